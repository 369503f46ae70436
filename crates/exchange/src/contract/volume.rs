//! The volume contract: a keeper and the worker that serves one mount.
//!
//! ```text
//!   Start ── Mount ──▶ mounting ── AckMount ──▶ Running ── Unmount ──▶ Done
//!                          └────── NakMount ──▶ Done        ▲    │
//!                                          NakUnmount, Status┴────┘
//! ```

use super::wire::records;
use draconis_types::Block;
use draconis_types::{Refusal, StatFs};

/// Properties of a mounted volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MountedVolume {
    /// Statistics, as `statfs` returns them.
    pub space: StatFs,
    /// True if nothing can be written.
    pub read_only: bool,
}

/// Error of a mount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MountError {
    /// The reason.
    pub why: Refusal,
    /// Length in bytes of the explanation left in the options' block.
    pub message_bytes: u32,
}

impl From<Refusal> for MountError {
    fn from(why: Refusal) -> Self {
        Self { why, message_bytes: 0 }
    }
}

records! {
    MountedVolume { space: StatFs, read_only: bool }
    MountError { why: Refusal, message_bytes: u32 }
}

crate::contract! {
    /// Control of one volume.
    pub contract Volume served by VolumeServer, starting in Start {
        /// Nothing is mounted yet.
        state Start {
            /// Mounts the volume. `len` bytes of `options` are its options as text. A refusal
            /// leaves an explanation there, in UTF-8: see [`MountError`].
            call mount: Mount (options: Block) { len: u32 }
                -> AckMount { mounted: MountedVolume } => Running
                 | NakMount why MountError => Done;
        }
        /// The volume is mounted.
        state Running {
            /// Writes the worker's statistics into `buffer`: `AckStatus::len` bytes of JSON.
            call status: Status (buffer: Block) {}
                -> AckStatus { len: u32 } => Running
                 | NakStatus why Refusal => Running;

            /// Unmounts, even if the volume is in use; all changes are then durable.
            call unmount: Unmount {}
                -> AckUnmount {} => Done
                 | NakUnmount why Refusal => Running;
        }
        /// The channel is closed.
        state Done {}
    }
}
