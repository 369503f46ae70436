//! The volume contract: a manager and the worker that serves one mount.
//!
//! ```text
//!   Start ── Mount ──▶ mounting ── AckMount ──▶ Running ── Unmount ──▶ Done
//!     │                    └────── NakMount ──▶ Done        ▲    │
//!     └── Format ──▶ back to Start        NakUnmount, Status┴────┘
//! ```

use super::{Refusal, Space};
use crate::heap::Block;

crate::contract! {
    /// The control of one volume.
    pub contract Volume served by VolumeServer, starting in Start {
        /// Nothing is mounted yet.
        state Start {
            /// Mounts the volume. `len` bytes of `options` are its options as text.
            /// A refusal leaves an explanation there, in `len` bytes of UTF-8.
            call mount: Mount { options: Block, len: u32 }
                -> AckMount {
                    options: Block,
                    /// What `statfs` will tell.
                    space: Space,
                    /// Whether nothing can be written.
                    read_only: bool,
                } => Running
                 | NakMount { options: Block, len: u32 } why Refusal => Done;

            /// Makes an empty volume. `len` bytes of `options` are its options as text.
            call format: Format { options: Block, len: u32 }
                -> AckFormat { options: Block } => Start
                 | NakFormat { options: Block, len: u32 } why Refusal => Start, or NotSupported;
        }
        /// The volume is mounted.
        state Running {
            /// Writes the worker's figures into `buffer`: `AckStatus::len` bytes of JSON.
            call status: Status { buffer: Block }
                -> AckStatus { buffer: Block, len: u32 } => Running
                 | NakStatus { buffer: Block } why Refusal => Running;

            /// Ends the mount; with `force`, even while it is in use.
            call unmount: Unmount { force: bool }
                -> AckUnmount {} => Done
                 | NakUnmount {} why Refusal => Running;
        }
        /// Nothing more is said.
        state Done {}
    }
}
