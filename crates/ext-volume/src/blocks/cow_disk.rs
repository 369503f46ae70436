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
use draconis_types::lock::Mutex;

use crate::FsBlock;
use crate::blocks::data::SharedBytes;
use crate::blocks::uncached::read_bytes;
use crate::units::saturating_usize;

/// Copy-on-write disk in memory.
pub struct CowDisk {
    disk: Arc<dyn Disk>,
    block_bytes: u64,
    /// Limit of changed blocks.
    max_blocks: usize,
    changed: Mutex<BTreeMap<u64, SharedBytes>>,
    tickets: AtomicU64,
    is_frozen: AtomicBool,
}

impl CowDisk {
    /// Creates a disk that reads as `disk` and keeps at most `max_blocks` changed blocks.
    pub fn new(disk: Arc<dyn Disk>, block_bytes: u32, max_blocks: usize) -> Self {
        let (changed, tickets, is_frozen) =
            (Mutex::default(), AtomicU64::new(0), AtomicBool::default());
        Self { disk, block_bytes: block_bytes.into(), max_blocks, changed, tickets, is_frozen }
    }

    /// Makes the disk read-only.
    pub fn freeze(&self) {
        self.is_frozen.store(true, Ordering::Relaxed);
    }

    /// Returns the changed blocks.
    pub fn blocks(&self) -> BTreeMap<u64, SharedBytes> {
        self.changed.lock().clone()
    }

    /// Returns a block with its changes.
    pub fn block(&self, at: FsBlock) -> Result<Vec<u8>, Error> {
        if let Some(bytes) = self.changed.lock().get(&at.0) {
            return Ok(bytes.to_vec());
        }
        let extent = Extent::new(at.0.saturating_mul(self.block_bytes), self.block_bytes);
        read_bytes(&*self.disk, extent)
    }

    /// Changes a block.
    ///
    /// # Errors
    /// [`Error::ServiceEnded`] if there are too many changed blocks.
    pub fn put(&self, at: FsBlock, bytes: Vec<u8>) -> Result<(), Error> {
        let mut kept = self.changed.lock();
        kept.insert(at.0, SharedBytes::from_owned_bytes(bytes.into_boxed_slice()));
        if kept.len() > self.max_blocks { Err(Error::ServiceEnded) } else { Ok(()) }
    }

    /// Stores the writes of a group, of whole blocks or parts of them.
    fn store_group(&self, group: &Group) -> Result<(), Error> {
        for write in &group.writes {
            let end = write.at_bytes.saturating_add(write.block.len() as u64);
            let mut at = write.at_bytes;
            while at < end {
                let block = at.checked_div(self.block_bytes).unwrap_or(0);
                let start = block.saturating_mul(self.block_bytes);
                let to = start.saturating_add(self.block_bytes).min(end);
                let is_whole = at == start && to.saturating_sub(at) == self.block_bytes;
                let mut bytes = match is_whole {
                    true => vec![0; saturating_usize(self.block_bytes)],
                    false => self.block(FsBlock(block))?,
                };
                let part = saturating_usize(at.saturating_sub(start))
                    ..saturating_usize(to.saturating_sub(start));
                let from = saturating_usize(at.saturating_sub(write.at_bytes));
                write.block.copy_out(from, bytes.get_mut(part).unwrap_or_default());
                self.put(FsBlock(block), bytes)?;
                at = to.max(at.saturating_add(1));
            }
        }
        Ok(())
    }

    /// Returns true if all blocks of a range are changed.
    fn has_whole(&self, at: Extent) -> bool {
        let end = at.start_bytes.saturating_add(at.len_bytes).div_ceil(self.block_bytes.max(1));
        let first = at.start_bytes.checked_div(self.block_bytes).unwrap_or(0);
        let changed = self.changed.lock().range(first..end.max(first)).count() as u64;
        changed == end.saturating_sub(first) && at.len_bytes > 0
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
        // What is changed as a whole is read although the disk cannot read it any more.
        let read = if self.has_whole(at) { Ok(into) } else { self.disk.read_now(at, into) };
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
