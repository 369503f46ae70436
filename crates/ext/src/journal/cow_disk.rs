//! Copy-on-write disk: changes stay in memory.
//!
//! Law: the disk stores at most `max_blocks` changed blocks; a group that exceeds this is refused.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use draconis_device::{
    Atomic, Disk, Error, Extent, Group, Pending, Properties, ReadAnswer, Refused, Ticket, Urgency,
};
use draconis_types::Block;
use parking_lot::Mutex;

use crate::blocks::data::SharedBytes;
use crate::units::saturating_usize;

/// Copy-on-write disk in memory.
pub(super) struct CowDisk {
    disk: Arc<dyn Disk>,
    block_bytes: u64,
    /// Limit of changed blocks.
    max_blocks: usize,
    changed: Mutex<BTreeMap<u64, SharedBytes>>,
    tickets: AtomicU64,
    is_frozen: AtomicBool,
}

impl CowDisk {
    pub(super) fn new(disk: Arc<dyn Disk>, block_bytes: u32, most: usize) -> Self {
        let (kept, tickets, is_done) = (Mutex::default(), AtomicU64::new(0), AtomicBool::default());
        Self {
            disk,
            block_bytes: block_bytes.into(),
            max_blocks: most,
            changed: kept,
            tickets,
            is_frozen: is_done,
        }
    }

    /// Makes the disk read-only.
    pub(super) fn freeze(&self) {
        self.is_frozen.store(true, Ordering::Relaxed);
    }

    /// Returns the changed blocks.
    pub(super) fn blocks(&self) -> BTreeMap<u64, SharedBytes> {
        self.changed.lock().clone()
    }

    /// Stores the blocks of a group.
    fn store_group(&self, group: &Group) -> Result<(), Error> {
        let len = saturating_usize(self.block_bytes);
        for write in &group.writes {
            let first = write.at_bytes.checked_div(self.block_bytes).unwrap_or(0);
            for nth in 0..write.block.len().checked_div(len).unwrap_or(0) {
                let mut bytes = vec![0; len].into_boxed_slice();
                write.block.copy_out(nth.saturating_mul(len), &mut bytes);
                let mut kept = self.changed.lock();
                kept.insert(first.saturating_add(nth as u64), SharedBytes::from_owned_bytes(bytes));
                if kept.len() > self.max_blocks {
                    return Err(Error::ServiceEnded);
                }
            }
        }
        Ok(())
    }

    fn apply_changes(&self, at: Extent, into: &mut Block) {
        let end = at.start_bytes.saturating_add(at.len_bytes);
        let first = at.start_bytes.checked_div(self.block_bytes).unwrap_or(0);
        let kept = self.changed.lock();
        for (block, bytes) in kept.range(first..end.div_ceil(self.block_bytes.max(1))) {
            let start = block.saturating_mul(self.block_bytes);
            let from = at.start_bytes.max(start);
            let to = end.min(start.saturating_add(self.block_bytes));
            let place = |at: u64, of: u64| saturating_usize(at.saturating_sub(of));
            let part = bytes.get(place(from, start)..place(to, start)).unwrap_or_default();
            into.copy_in(place(from, at.start_bytes), part);
        }
    }
}

impl Disk for CowDisk {
    fn properties(&self) -> Properties {
        Properties {
            read_only: self.is_frozen.load(Ordering::Relaxed),
            atomic: Atomic::AgainstPowerCut,
            discards: false,
            ..self.disk.properties()
        }
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        if self.changed.lock().is_empty() {
            return self.disk.read(at, into, urgency);
        }
        let read = self.disk.read_now(at, into);
        Pending::ready(read.map(|mut block| {
            self.apply_changes(at, &mut block);
            block
        }))
    }

    fn submit_chain(
        &self,
        chain: Vec<Group>,
        _: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        if self.is_frozen.load(Ordering::Relaxed) {
            return Err(Refused { payload: Some(chain), error: Error::ReadOnly });
        }
        if let Err(error) = chain.iter().try_for_each(|group| self.store_group(group)) {
            return Err(Refused { payload: Some(chain), error });
        }
        let next = |_: &Group| Ticket(self.tickets.fetch_add(1, Ordering::Relaxed).wrapping_add(1));
        Ok(chain.iter().map(next).collect())
    }

    fn wait_visible(&self, _: Ticket) -> Result<(), Error> {
        Ok(())
    }

    fn wait_durable(&self, _: Ticket) -> Result<(), Error> {
        Ok(())
    }
}
