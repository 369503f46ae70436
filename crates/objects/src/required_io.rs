//! I/O that a step under the lock requires. The caller performs it without the lock, and tries the
//! step again.

use std::ops::ControlFlow;
use std::sync::Arc;

use draconis_device::Ticket;
use draconis_types::lock::Mutex;

use crate::Result;
use crate::cached_disk::{CachedDisk, CachedNodes};
use crate::index::tree::{BlockPtr, NodeSource};
use crate::segment_reader::SegmentReader;

/// I/O that a step requires.
pub(crate) enum RequiredIo {
    /// Nodes of the index.
    Nodes(Vec<BlockPtr>),
    /// Reads of the cleaner, up to this byte of the disk.
    Bytes(Arc<Mutex<SegmentReader>>, u64),
    /// Writes that must be visible to reads.
    Settled(Ticket),
    /// Writes that must be durable.
    Durable(Ticket),
}

/// Result of required I/O.
pub(crate) enum CompletedIo {
    Settled(Ticket),
    Durable(Ticket),
}

impl RequiredIo {
    /// Performs the I/O, which may block for long. Nodes of earlier attempts stay prefetched if
    /// `is_further`. The next try of the step reports errors, with their context.
    pub fn perform_io(self, io: &CachedDisk, is_further: bool) -> Option<CompletedIo> {
        match self {
            // A single node does not evict those that were prefetched together.
            Self::Nodes(nodes) if is_further || nodes.len() == 1 => io.prefetch_more_nodes(&nodes),
            Self::Nodes(nodes) => io.prefetch_nodes(&nodes),
            Self::Bytes(reading, to) => reading.lock().wait_before(to),
            Self::Settled(ticket) => {
                return io.disk.wait_visible(ticket).ok().map(|()| CompletedIo::Settled(ticket));
            }
            Self::Durable(ticket) => {
                return io
                    .wait_durable_without_deadline(ticket)
                    .ok()
                    .map(|()| CompletedIo::Durable(ticket));
            }
        }
        None
    }
}

/// Work of a step, in its own unit, or the I/O that it requires first.
pub(crate) type MaintenanceStep = ControlFlow<RequiredIo, u64>;

/// Policy of a step for a cache miss.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MissPolicy {
    /// Return it as required I/O.
    Defer,
    /// Wait for it.
    Block,
}

/// Looks something up in the index, with a miss policy.
pub(crate) fn with_miss_policy<T>(
    io: &CachedDisk,
    patience: MissPolicy,
    act: impl FnOnce(&dyn NodeSource) -> Result<T>,
) -> Result<ControlFlow<RequiredIo, T>> {
    if patience == MissPolicy::Block {
        return act(io).map(ControlFlow::Continue);
    }
    let nodes = CachedNodes::new(io);
    let done = act(&nodes);
    match nodes.missing_node() {
        Some(ptr) => Ok(ControlFlow::Break(RequiredIo::Nodes(vec![ptr]))),
        None => done.map(ControlFlow::Continue),
    }
}
