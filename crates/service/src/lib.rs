//! The manager, and for each mount its keeper and the sandboxed worker that this one starts.
//!
//! ```text
//!   client ── protocol ──▶ manager ── protocol ──▶ keeper
//!                  keeper ── process (volume contract) ──▶ worker ── volume ──▶ ext
//!                    ├── front (FUSE)                        └── sandbox
//!                    └── store_process (disk contract) ────▶ objects
//!   library ── local (a thread instead of a process) ─────▶ volume ──▶ ext
//! ```
//!
//! This crate knows ext and the contracts. It does not know FUSE: the one who puts the program
//! together passes a [`front::Front`] and a [`worker::Serve`].
#![deny(unsafe_code)]

mod claimed;
pub mod client;
mod connection;
mod disk;
pub mod front;
mod holders;
pub mod keeper;
pub mod local;
mod loop_device;
pub mod manager;
mod oplog;
pub mod options;
pub mod process;
pub mod protocol;
mod recorder;
pub mod sandbox;
pub mod store_keeper;
pub mod store_process;
pub mod table;
pub mod volume;
pub mod worker;

/// What the system said, without its number.
pub fn sentence(error: &std::io::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once(" (os error ") {
        Some((sentence, _)) => sentence.to_string(),
        None => text,
    }
}
