//! ext.
