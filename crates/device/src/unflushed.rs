//! What a flush of a served disk must make durable.
//!
//! ```text
//!   writes, punched holes ──▶ the newest ticket ──▶ flush: wait_durable
//!   zeros left out in a hole; a predecessor's changes ──▶ no ticket ──▶ flush: wait_all_durable
//! ```
//! Law: zeros are left out where there is a hole. It may be the work of a discard or of another
//! process, and not durable: the next flush makes all durable that reads see.

use std::sync::atomic::{AtomicU64, Ordering};

use draconis_types::lock::Mutex;

use crate::{AllocationRun, Disk, Error, Extent, Ticket, wait_durable_while};

/// Maximum length of a hole that is punched at once, in bytes: others write meanwhile.
const MAX_HOLE_BYTES: u64 = 256 << 20;

/// What becomes of the space of zeroed bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ZeroedSpace {
    /// It is freed.
    Freed,
    /// Holes stay holes, and the rest keeps its space.
    Kept,
    /// All of it is allocated.
    Allocated,
}

/// First step of zeroing a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ZeroStep {
    /// So many bytes are zeros already, or once the newest ticket is visible.
    Done(u64),
    /// So many zeros must be written.
    Write(u64),
}

/// Changes since the last flush, by all clients of a disk.
#[derive(Debug)]
pub struct UnflushedChanges {
    newest: Mutex<Option<Ticket>>,
    /// Number of times that changes without a ticket were relied on.
    unticketed: AtomicU64,
    /// The number of these that are durable.
    durable_unticketed: AtomicU64,
}

/// A predecessor may have died with changes that its clients will still flush.
impl Default for UnflushedChanges {
    fn default() -> Self {
        let (newest, durable_unticketed) = Default::default();
        Self { newest, unticketed: AtomicU64::new(1), durable_unticketed }
    }
}

impl UnflushedChanges {
    /// Records a submitted group.
    pub fn record(&self, ticket: Ticket) {
        let mut newest = self.newest.lock();
        *newest = (*newest).max(Some(ticket));
    }

    /// Returns the newest ticket of all groups.
    pub fn newest(&self) -> Option<Ticket> {
        *self.newest.lock()
    }

    /// Makes all completed changes durable. While the store of the disk is unreachable, waits as long
    /// as `goes_on` returns true.
    ///
    /// # Errors
    /// Error of the first failed write or flush.
    pub fn flush(&self, disk: &dyn Disk, goes_on: impl Fn() -> bool) -> Result<(), Error> {
        let unticketed = self.unticketed.load(Ordering::SeqCst);
        if self.durable_unticketed.load(Ordering::SeqCst) < unticketed {
            wait_durable_while(|| disk.wait_all_durable(), &goes_on)?;
            self.durable_unticketed.fetch_max(unticketed, Ordering::SeqCst);
        }
        let newest = self.newest();
        newest.map_or(Ok(()), |it| wait_durable_while(|| disk.wait_durable(it), goes_on))
    }

    /// Makes the start of `at` zeros without writing them, if possible; otherwise returns how many to
    /// write, at most `max_write_bytes`.
    ///
    /// # Errors
    /// As [`Disk::punch_hole`] and [`Disk::allocation_run`].
    pub fn zero_start(
        &self,
        disk: &dyn Disk,
        at: Extent,
        space: ZeroedSpace,
        max_write_bytes: u64,
    ) -> Result<ZeroStep, Error> {
        let write = |bytes: u64| Ok(ZeroStep::Write(bytes.min(at.len_bytes).min(max_write_bytes)));
        if space == ZeroedSpace::Allocated {
            return write(u64::MAX);
        }
        let AllocationRun { len_bytes, is_hole } = disk.allocation_run(at)?;
        let len_bytes = len_bytes.clamp(1, at.len_bytes.max(1));
        if is_hole {
            self.unticketed.fetch_add(1, Ordering::SeqCst);
            return Ok(ZeroStep::Done(len_bytes));
        }
        if space == ZeroedSpace::Kept {
            return write(len_bytes);
        }
        let sector = u64::from(disk.properties().sector_bytes).max(1);
        let past_sector = at.start_bytes % sector;
        let hole = Extent::new(at.start_bytes, len_bytes.min(MAX_HOLE_BYTES) / sector * sector);
        if past_sector > 0 || hole.len_bytes == 0 {
            return write(sector - past_sector);
        }
        match disk.punch_hole(hole)? {
            Some(ticket) => {
                self.record(ticket);
                Ok(ZeroStep::Done(hole.len_bytes))
            }
            None => write(len_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FileDisk, FileOptions, Group, Write};
    use draconis_types::Block;

    /// Holes, and what a predecessor has left, have no ticket: the next flush covers them.
    #[test]
    fn flush_covers_what_has_no_ticket() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let options = FileOptions { write: true, direct: false, uring: false };
        let disk = FileDisk::open_discarding(file.path(), options).unwrap();
        let changes = UnflushedChanges::default();
        let flush = || {
            changes.flush(&disk, || true).unwrap();
            disk.flush_count()
        };
        let zero = |start, len, space| {
            changes.zero_start(&disk, Extent::new(start, len), space, 4096).unwrap()
        };
        assert_eq!((flush(), flush()), (1, 1), "a predecessor may have left something");
        assert_eq!(zero(65536, 8192, ZeroedSpace::Freed), ZeroStep::Done(8192));
        assert_eq!((flush(), flush()), (2, 2), "a hole");
        assert_eq!(zero(65536, 8192, ZeroedSpace::Allocated), ZeroStep::Write(4096));
        assert_eq!(flush(), 2);
        let mut block = Block::private(65536);
        block.copy_in(0, &[7; 65536]);
        let group = Group { writes: vec![Write { at_bytes: 0, block }] };
        let written = disk.submit(group, &[]).unwrap();
        changes.record(written);
        disk.wait_visible(written).unwrap();
        assert_eq!(zero(0, 65536, ZeroedSpace::Kept), ZeroStep::Write(4096));
        assert_eq!(
            zero(100, 65436, ZeroedSpace::Freed),
            ZeroStep::Write(412),
            "to the next sector"
        );
        assert_eq!(zero(512, 100, ZeroedSpace::Freed), ZeroStep::Write(100));
        assert_eq!((changes.newest(), flush()), (Some(written), 3));
        assert_eq!(zero(0, 65436, ZeroedSpace::Freed), ZeroStep::Done(65024));
        assert!(changes.newest() > Some(written));
        assert_eq!((flush(), flush()), (4, 4), "a punched hole");
        let bytes = std::fs::read(file.path()).unwrap();
        assert_eq!((bytes[0], bytes[65023], bytes[65024], bytes[65535]), (0, 0, 7, 7));
    }
}
