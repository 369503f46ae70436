//! front.
