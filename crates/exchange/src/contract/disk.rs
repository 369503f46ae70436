//! The disk contract: reads, and chains of groups of writes. A group becomes visible
//! whole, and a chain is taken whole.
//!
//! A server of this contract serves one end: the parts of a group and the tickets are
//! its client's alone.

use super::{List, Refusal};
use crate::heap::Block;

/// Most writes in one `Submit`; a larger group travels in several parts.
pub const MAX_WRITES: usize = 64;
/// Most groups that end in one `Submit`.
pub const MAX_GROUP_ENDS: usize = 16;
/// Most tickets in one `Submit`; a chain that follows more names them in several parts.
pub const MAX_DEPENDENCIES: usize = 16;

/// Most extents in one `Discard`.
pub const EXTENTS_MAX: usize = 64;

/// What a disk says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskProperties {
    /// Length in bytes.
    pub len_bytes: u64,
    /// Reads and writes start and end on multiples of this; a power of two.
    pub sector_bytes: u32,
    /// Size from which larger requests gain nothing much.
    pub best_io_bytes: u32,
    /// Whether distance costs time.
    pub rotational: bool,
    /// Whether `Submit` is refused always.
    pub read_only: bool,
    /// What groups survive: 0 nothing, 1 the client's death, 2 a power cut.
    pub atomic: u32,
    /// Whether `Discard` does anything.
    pub discards: bool,
    /// Most groups of one chain.
    pub chain_groups_max: u32,
    /// Most writes of all groups of one chain.
    pub chain_writes_max: u32,
    /// Most bytes of all writes of one chain.
    pub chain_bytes_max: u64,
}

crate::contract! {
    /// A disk, and what it promises.
    pub contract Disk served by DiskServer, starting in Ready {
        /// Anything may be asked.
        state Ready {
            /// Sizes and promises. They do not change while the disk is open.
            call properties: Properties {}
                -> AckProperties { properties: DiskProperties } => Ready
                 | NakProperties why Refusal => Ready;

            /// Fills the whole of `buffer` from `at_bytes`. With `urgent` a process waits
            /// for it; otherwise it is read ahead, behind everything urgent.
            call read: Read (buffer: Block) { at_bytes: u64, urgent: bool }
                -> AckRead {} => Ready
                 | NakRead why Refusal => Ready;

            /// Brings a part of a chain of groups: its first group follows those named in
            /// `after`, each other one the group before it. What a group follows is durable
            /// before any of it is written. Returns before anything else is; the server has
            /// taken a private copy, so the blocks come back at once.
            ///
            /// `blocks` are writes: first byte and what to write there. Each of `ends` ends
            /// a group: it counts the writes of this part that come before the end. What
            /// comes behind the last end begins the next group.
            ///
            /// While `more` is set, further parts of the same chain follow, and nothing of
            /// it is applied: a client that dies between two parts has sent nothing. The
            /// last part ends the last group. `AckSubmit::first` names the first group once
            /// the chain is whole; the others count on from it. `after` of all parts counts.
            /// A refused part ends the chain: no part of it is applied. Once the chain is taken
            /// the server remembers the `mark` of its last part, unless that is 0; and it answers
            /// that part only when the group of the chain that its `durable` counts, from 0 on,
            /// is durable: submitting and waiting in one message.
            call submit: Submit (blocks: List<(u64, Block), MAX_WRITES>) {
                ends: List<u32, MAX_GROUP_ENDS>,
                after: List<u64, MAX_DEPENDENCIES>,
                mark: u64,
                durable: Option<u32>,
                more: bool,
            }
                -> AckSubmit { first: Option<u64> } => Ready
                 | NakSubmit why Refusal => Ready, or ReadOnly;

            /// Returns once every read sees the group `ticket`; it is not durable for that.
            call wait_visible: Settle { ticket: u64 }
                -> AckSettle {} => Ready
                 | NakSettle why Refusal => Ready, or ReadOnly;

            /// Returns once the group `ticket` is durable, with all before it.
            call wait: Wait { ticket: u64 }
                -> AckWait {} => Ready
                 | NakWait why Refusal => Ready, or ReadOnly;

            /// Says that bytes are not needed any more once the group `after` is durable, if one
            /// is named: first byte and length in turns. A hint, which groups that are submitted
            /// later are not touched by.
            call discard: Discard { extents: List<(u64, u64), EXTENTS_MAX>, after: Option<u64> }
                -> AckDiscard {} => Ready
                 | NakDiscard why Refusal => Ready;

            /// Has room kept for `bytes` of writes that are yet to be submitted; answers for how
            /// many it is.
            call reserve: Reserve { bytes: u64 }
                -> AckReserve { bytes: u64 } => Ready
                 | NakReserve why Refusal => Ready;

            tell close: Close {} => Done;
        }
        /// Nothing more is said.
        state Done {}
    }
}
