//! The disk contract: reads, and chains of groups of writes. Groups become visible atomically, and
//! chains are accepted atomically.
//!
//! A server of this contract serves one endpoint: partial groups and tickets belong to its client
//! alone.

use super::{List, wire::records};
use draconis_types::Block;
use draconis_types::Refusal;

/// Maximum writes in one `Submit`; a larger group travels in several parts.
pub const MAX_WRITES: usize = 64;
/// Maximum groups that end in one `Submit`.
pub const MAX_GROUP_ENDS: usize = 16;
/// Maximum tickets in one `Submit`; a chain with more dependencies names them in several parts.
pub const MAX_DEPENDENCIES: usize = 16;

/// Maximum extents in one `Discard`.
pub const MAX_DISCARD_EXTENTS: usize = 64;

/// Properties of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskProperties {
    /// Length in bytes.
    pub len_bytes: u64,
    /// Alignment of reads and writes; a power of two.
    pub sector_bytes: u32,
    /// Request size beyond which throughput hardly grows.
    pub best_io_bytes: u32,
    /// True if seeks cost time.
    pub rotational: bool,
    /// True if `Submit` is always refused.
    pub read_only: bool,
    /// Events that groups survive atomically: 0 none, 1 the client's death, 2 a power cut.
    pub atomic: u32,
    /// True if `Discard` has an effect.
    pub discards: bool,
    /// Maximum groups of one chain.
    pub chain_groups_max: u32,
    /// Maximum writes of all groups of one chain.
    pub chain_writes_max: u32,
    /// Maximum bytes of all writes of one chain.
    pub chain_bytes_max: u64,
}

records! {
    DiskProperties {
        len_bytes: u64, sector_bytes: u32, best_io_bytes: u32, rotational: bool, read_only: bool,
        atomic: u32, discards: bool, chain_groups_max: u32, chain_writes_max: u32,
        chain_bytes_max: u64
    }
}

crate::contract! {
    /// A disk and its guarantees.
    pub contract Disk served by DiskServer, starting in Ready {
        /// Accepts every request.
        state Ready {
            /// Sizes and guarantees. They do not change while the disk is open.
            call properties: Properties {}
                -> AckProperties { properties: DiskProperties } => Ready
                 | NakProperties why Refusal => Ready;

            /// Fills `buffer` from `at_bytes`. `urgent` means that a process waits; other reads are
            /// read-ahead and come after all urgent ones.
            call read: Read (buffer: Block) { at_bytes: u64, urgent: bool }
                -> AckRead {} => Ready
                 | NakRead why Refusal => Ready;

            /// Submits a part of a chain of groups. Its first group follows the groups in `after`,
            /// each other one the group before it. A group's dependencies are durable before any of
            /// it is written. The reply comes as soon as the server has a private copy, so the
            /// blocks return at once.
            ///
            /// `blocks` are writes: offset and contents. Each of `ends` ends a group: it counts the
            /// writes of this part before the end. Writes after the last end begin the next group.
            ///
            /// While `more` is set, further parts of the same chain follow, and nothing is applied
            /// yet: a client that dies between two parts has submitted nothing. The last part ends
            /// the last group. `AckSubmit::first` is the ticket of the first group once the chain
            /// is complete; the others count on from it. `after` of all parts is merged. A refused
            /// part cancels the whole chain. Once the chain is accepted, the server remembers the
            /// `mark` of its last part unless that is 0. It answers that part only when group
            /// `durable` of the chain, counted from 0, is durable: submitting and waiting in one
            /// message.
            call submit: Submit (blocks: List<(u64, Block), MAX_WRITES>) {
                ends: List<u32, MAX_GROUP_ENDS>,
                after: List<u64, MAX_DEPENDENCIES>,
                mark: u64,
                durable: Option<u32>,
                more: bool,
            }
                -> AckSubmit { first: Option<u64> } => Ready
                 | NakSubmit why Refusal => Ready, or ReadOnly;

            /// Waits until every read sees the group `ticket`; it may not be durable yet.
            call wait_visible: Settle { ticket: u64 }
                -> AckSettle {} => Ready
                 | NakSettle why Refusal => Ready, or ReadOnly;

            /// Waits until the group `ticket` and all before it are durable.
            call wait: Wait { ticket: u64 }
                -> AckWait {} => Ready
                 | NakWait why Refusal => Ready, or ReadOnly;

            /// Discards extents, as pairs of offset and length, once the group `after` is durable,
            /// if given. A hint; it does not affect groups submitted later.
            call discard: Discard { extents: List<(u64, u64), MAX_DISCARD_EXTENTS>, after: Option<u64> }
                -> AckDiscard {} => Ready
                 | NakDiscard why Refusal => Ready;

            /// Reserves space for `bytes` of future writes; returns how many bytes were reserved.
            call reserve: Reserve { bytes: u64 }
                -> AckReserve { bytes: u64 } => Ready
                 | NakReserve why Refusal => Ready;

            tell close: Close {} => Done;
        }
        /// The channel is closed.
        state Done {}
    }
}
