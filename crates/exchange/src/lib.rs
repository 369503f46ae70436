//! What two services may share, and nothing else.
//!
//! ```text
//!   client ── typed end ──▶ channel (thread | process) ──▶ typed end ── server
//!      │                                                        │
//!      └──────────── blocks of the exchange heap ───────────────┘
//! ```
//!
//! Law 1: a [`heap::Block`] has one owner, and returns to it.
//! Law 2: no end waits for ever.
//! Law 3: believe nothing a peer can write.
//!
//! Unsafe code lives in [`shm`] and [`channel::thread`] and nowhere else. This crate does
//! not know what a disk, a file system or a kernel protocol is.

#![deny(unsafe_code)]

pub mod channel;
pub mod contract;
pub mod copies;
pub mod descriptors;
pub mod heap;
pub mod omission;
#[allow(unsafe_code)]
pub mod shm;
mod violation;
