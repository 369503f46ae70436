//! The disk contract: reads, and groups of writes that become visible together.
//!
//! A server of this contract serves one end: the parts of a group and the tickets are
//! its client's alone.

use super::{List, Refusal};
use crate::heap::Block;

/// Most writes in one `Submit`; a larger group travels in several parts.
pub const WRITES_MAX: usize = 64;
/// Most groups that one group is put after.
pub const AFTER_MAX: usize = 16;

crate::contract! {
    /// A disk, and what it promises.
    pub contract Disk served by DiskServer, starting in Ready {
        /// Anything may be asked.
        state Ready {
            /// Sizes and promises. They do not change while the disk is open.
            call properties: Properties {}
                -> AckProperties {
                    /// Length in bytes.
                    len_bytes: u64,
                    /// Reads and writes start and end on multiples of this; a power of two.
                    sector_bytes: u32,
                    /// Size from which larger requests gain nothing much.
                    best_io_bytes: u32,
                    /// Whether distance costs time.
                    rotational: bool,
                    /// Whether `Submit` is refused always.
                    read_only: bool,
                    /// What groups survive: 0 nothing, 1 the client's death, 2 a power cut.
                    atomic: u32,
                } => Ready
                 | NakProperties {} why Refusal => Ready;

            /// Fills the whole of `buffer` from `at_bytes`. With `urgent` somebody waits
            /// for it; otherwise it is read ahead, behind everything urgent.
            call read: Read { at_bytes: u64, buffer: Block, urgent: bool }
                -> AckRead { buffer: Block } => Ready
                 | NakRead { buffer: Block } why Refusal => Ready;

            /// Orders a group of writes - first byte and block - after the groups named
            /// in `after`. Returns before anything is durable; the server has taken a
            /// private copy, so the blocks come back at once.
            ///
            /// While `more` is set, further parts of the same group follow, and nothing
            /// of it is applied: a client that dies between two parts has sent nothing.
            /// `AckSubmit::ticket` names the group once it is whole. `after` of all parts
            /// counts. A refused part ends the group: no part of it is applied.
            call submit: Submit {
                blocks: List<(u64, Block), WRITES_MAX>,
                after: List<u64, AFTER_MAX>,
                more: bool,
            }
                -> AckSubmit { blocks: List<(u64, Block), WRITES_MAX>, ticket: Option<u64> } => Ready
                 | NakSubmit { blocks: List<(u64, Block), WRITES_MAX> } why Refusal => Ready, or ReadOnly;

            /// Returns once the group `ticket` is durable, with everything it follows.
            call wait: Wait { ticket: u64 }
                -> AckWait {} => Ready
                 | NakWait {} why Refusal => Ready, or ReadOnly;

            tell close: Close {} => Done;
        }
        /// Nothing more is said.
        state Done {}
    }
}
