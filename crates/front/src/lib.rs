//! Front ends for Linux. Today: FUSE.
//!
//! This crate knows the contracts of `exchange` and the kernel's protocols, but no disk block,
//! cache or file system format.

#![deny(unsafe_code)]

pub mod fuse;
