//! The manager, and the sandboxed worker that it starts for each mount.
#![deny(unsafe_code)]

pub mod sandbox;
