//! The contracts, and the plain data their messages carry.

mod types;

pub use types::*;
