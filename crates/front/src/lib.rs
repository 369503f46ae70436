//! Ways in from Linux. Today: FUSE.
//!
//! This crate knows the contracts of `exchange` and the kernel's protocols. It cannot
//! name a disk block, a cache or a file system format.

#![forbid(unsafe_code)]

pub mod fuse;
