//! Journal file of a volume, block by block.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use draconis_device::{Disk, Extent, Group, Ticket, Write};
use draconis_types::Block;

use super::recovery::{JournalDamage, LogSource, LoggedBlock, ScannedLog, scan_log};
use super::transaction_layout::{TransactionContents, lay_out_transaction};
use super::unusable_journal_error;
use crate::blocks::data::SharedBytes;
use crate::format::inode::Inode;
use crate::format::jbd2::blocks::unescape;
use crate::format::jbd2::{JournalSuperblock, RawJournalSuperblock};
use crate::format::superblock::{RawSuperblock, Superblock};
use crate::map::{BlockLocation, SEGMENT_BLOCKS};
use crate::units::saturating_usize;
use crate::volume::{OpenOptions, Volume};
use crate::{Error, FileBlock, FsBlock, Result, Run};

/// Cache sizes of a volume of which only one inode's map is read.
const MINIMAL_OPTIONS: OpenOptions = OpenOptions {
    inode_cache: 16,
    block_map_cache: 64,
    data_cache_bytes: 1 << 20,
    lists_dots: false,
    read_ahead_bytes: 0,
};
/// Limit of the journal's block runs.
const MAX_JOURNAL_RUNS: usize = 1 << 16;
const MISSING_BLOCK: &str = "journal: a block of its file is missing";
/// Size of one replay write, in bytes.
const REPLAY_WRITE_BYTES: usize = 1 << 20;

/// An internal journal.
pub(crate) struct JournalFile {
    disk: Arc<dyn Disk>,
    volume: Superblock,
    pub(crate) super_: JournalSuperblock,
    /// Block with the journal superblock.
    pub(crate) first: SharedBytes,
    /// Block runs, in logical order.
    runs: Vec<Run>,
    /// Volume blocks of the journal itself, sorted.
    journal_blocks: Vec<Range<u64>>,
}

impl JournalFile {
    /// Opens the journal of a volume.
    ///
    /// # Errors
    /// As [`super::open_replayed`].
    pub(crate) fn open(disk: Arc<dyn Disk>, volume: &Superblock) -> Result<Self> {
        let inode = volume.journal.ok_or_else(|| unusable_journal_error(volume))?;
        let plain = Volume::open_unreplayed(disk.clone(), MINIMAL_OPTIONS, volume.clone());
        let node = plain.inode(inode).map_err(|error| match error {
            Error::NotFound if volume.journal_device != 0 => unusable_journal_error(volume),
            Error::NotFound => Error::corrupt("journal: its inode is unused").with_inode(inode),
            other => other,
        })?;
        let blocks = node.size_bytes.checked_div(volume.block_bytes.into()).unwrap_or(0);
        let mut runs = journal_runs(&plain, &node, FileBlock(0)..FileBlock(1))?;
        let Some(Run { location: BlockLocation::Mapped(first), .. }) = runs.pop() else {
            return Err(Error::corrupt(MISSING_BLOCK).with_inode(inode));
        };
        let first = read_block(&*disk, volume, first)?;
        let super_ = RawJournalSuperblock::view(&first)
            .and_then(|raw| raw.check(volume.block_bytes, blocks.min(plain.disk_blocks())))
            .map_err(|error| error.with_inode(inode))?;
        let runs = self::journal_runs(&plain, &node, FileBlock(0)..FileBlock(super_.len))?;
        let blocks = |run: &Run| match run.location {
            BlockLocation::Mapped(first) => Some(first.0..first.offset(run.blocks.into()).0),
            _ => None,
        };
        let mut own: Vec<Range<u64>> = runs.iter().filter_map(blocks).collect();
        own.sort_unstable_by_key(|own| own.start);
        Ok(Self { disk, volume: volume.clone(), super_, first, runs, journal_blocks: own })
    }

    /// Returns the volume block of a log block.
    pub(crate) fn volume_block(&self, at: u32) -> Option<FsBlock> {
        let at = FileBlock(at);
        let nth = self.runs.partition_point(|run| run.end() <= at);
        let run = self.runs.get(nth)?.clip(at, at.offset(1))?;
        match run.location {
            BlockLocation::Mapped(block) => Some(block),
            _ => None,
        }
    }

    /// Returns the size of the disk's atomic writes, in bytes.
    pub(crate) fn sector_bytes(&self) -> u32 {
        self.disk.properties().sector_bytes
    }

    /// Reads a logged copy and undoes its escaping.
    pub(crate) fn read_copy(&self, copy: LoggedBlock) -> Result<SharedBytes> {
        let mut bytes = self.read(copy.at)?;
        if copy.escaped {
            unescape(bytes.make_mut());
        }
        Ok(bytes)
    }

    /// Scans the log. Damage of committed transactions is part of the result.
    ///
    /// # Errors
    /// An error of the device.
    pub(crate) fn scan(&self) -> Result<ScannedLog> {
        scan_log(&self.super_, self)
    }

    /// Returns the error for damage of the log.
    pub(crate) fn damage_error(&self, damage: JournalDamage) -> Error {
        let error = Error::corrupt(damage.what);
        match self.volume_block(damage.at) {
            Some(block) => error.with_block(block),
            None => error,
        }
    }

    /// Writes the copies to their home blocks, empties the log, then clears `needs_recovery`, each
    /// durable before the next. The blocks of `more` first become a transaction of their own.
    /// `free` holds the free counts, if known.
    pub(crate) fn replay(
        &self,
        found: &ScannedLog,
        more: &BTreeMap<u64, SharedBytes>,
        free: Option<(u64, u64)>,
    ) -> Result<()> {
        let mut sender = OrderedWriter { disk: &*self.disk, last: None };
        let block_bytes = u64::from(self.volume.block_bytes);
        let mut writes = Vec::new();
        let mut held = 0usize;
        for (block, copy) in found.copies_in(FsBlock(0)..FsBlock(u64::MAX)) {
            let bytes = self.read_copy(copy)?;
            held = held.saturating_add(bytes.len());
            writes.push(write(block.0.saturating_mul(block_bytes), &bytes));
            if held >= REPLAY_WRITE_BYTES {
                sender.send(std::mem::take(&mut writes), false)?;
                held = 0;
            }
        }
        sender.send(writes, false)?;

        let mut first = self.first.clone();
        let at = self.volume_block(0).ok_or(Error::corrupt(MISSING_BLOCK))?;
        let mut next = found.next;
        if !more.is_empty() {
            // The fast commits stay valid until transaction `next` is in the log.
            let raw = RawJournalSuperblock::view_mut(first.make_mut())?;
            raw.set_tail(Some(self.super_.first), next);
            sender.send(vec![write(at.0.saturating_mul(block_bytes), &first)], true)?;
            let time = Duration::from_secs(self.volume.dates.written.into());
            let contents = TransactionContents { sequence: next, time, copies: more, revoked: &[] };
            let laid = lay_out_transaction(self, self.super_.first, &contents)?;
            for stage in [&laid.first, &laid.commit, more] {
                let write = |(block, bytes): (&u64, &SharedBytes)| {
                    write(block.saturating_mul(block_bytes), bytes)
                };
                sender.send(stage.iter().map(write).collect(), true)?;
            }
            next = next.wrapping_add(1);
        }

        // Sequence numbers in the log are not reused, so old blocks stay older.
        let next = next.wrapping_add(1);
        let raw = RawJournalSuperblock::view_mut(first.make_mut())?;
        raw.set_tail(None, next);
        raw.set_errno(0);
        sender.send(vec![write(at.0.saturating_mul(block_bytes), &first)], true)?;

        let (block, at) = self.volume.location();
        let mut bytes = match (more.get(&block.0), found.copies.get(&block.0)) {
            (Some(bytes), _) => bytes.clone(),
            (None, Some(copy)) => self.read_copy(*copy)?,
            (None, None) => read_block(&*self.disk, &self.volume, block)?,
        };
        let raw = RawSuperblock::view_mut(bytes.make_mut().get_mut(at..).unwrap_or_default())?;
        raw.set_recovered();
        if let Some((blocks, inodes)) = free {
            raw.set_free(blocks, inodes)?;
        }
        if self.super_.errno != 0 {
            raw.mark_errors();
        }
        raw.preserve_checksum();
        sender.send(vec![write(block.0.saturating_mul(block_bytes), &bytes)], true)?;
        sender.wait()
    }
}

impl LogSource for JournalFile {
    fn read(&self, at: u32) -> Result<SharedBytes> {
        read_block(
            &*self.disk,
            &self.volume,
            self.volume_block(at).ok_or(Error::corrupt(MISSING_BLOCK))?,
        )
    }

    fn invalid_target_reason(&self, block: u64) -> Option<&'static str> {
        if block >= self.volume.blocks {
            return Some("journal: a copy of a block that the volume does not have");
        }
        let nth = self.journal_blocks.partition_point(|own| own.start <= block);
        let own = nth.checked_sub(1).and_then(|nth| self.journal_blocks.get(nth));
        let is_own = own.is_some_and(|own| own.contains(&block));
        is_own.then_some("journal: a copy of a block of its own")
    }

    fn mount_time(&self) -> Duration {
        Duration::from_secs(self.volume.dates.mounted.into())
    }
}

impl std::fmt::Debug for JournalFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log").field("super_", &self.super_).finish_non_exhaustive()
    }
}

/// Sender of groups in order.
struct OrderedWriter<'a> {
    disk: &'a dyn Disk,
    last: Option<Ticket>,
}

impl OrderedWriter<'_> {
    /// Sends writes as one group; with `ordered`, after everything before it is durable.
    fn send(&mut self, writes: Vec<Write>, ordered: bool) -> Result<()> {
        if writes.is_empty() {
            return Ok(());
        }
        let after = self.last.filter(|_| ordered);
        let sent = self.disk.submit(Group { writes }, after.as_slice());
        self.last = Some(sent.map_err(|refused| Error::Io(refused.error))?);
        Ok(())
    }

    fn wait(&self) -> Result<()> {
        match self.last {
            Some(last) => Ok(self.disk.wait_durable(last)?),
            None => Ok(()),
        }
    }
}

fn write(at_bytes: u64, bytes: &[u8]) -> Write {
    let mut block = Block::private(bytes.len());
    block.copy_in(0, bytes);
    Write { at_bytes, block }
}

/// Returns the block runs of a journal, or an error if a block is missing.
fn journal_runs(volume: &Volume, node: &Inode, range: Range<FileBlock>) -> Result<Vec<Run>> {
    let mut all = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let end = at.offset(SEGMENT_BLOCKS).min(range.end);
        all.extend(volume.map_runs(node, at, end)?);
        if all.iter().rev().take(saturating_usize(SEGMENT_BLOCKS.into())).any(|run| !is_mapped(run))
        {
            return Err(Error::corrupt(MISSING_BLOCK).with_inode(node.number));
        }
        if all.len() > MAX_JOURNAL_RUNS {
            let feature = format!("needs: a journal in at most {MAX_JOURNAL_RUNS} pieces");
            return Err(Error::Unsupported { feature });
        }
        at = end;
    }
    Ok(all)
}

fn is_mapped(run: &Run) -> bool {
    matches!(run.location, BlockLocation::Mapped(_))
}

/// Reads a volume block without caches.
fn read_block(disk: &dyn Disk, volume: &Superblock, block: FsBlock) -> Result<SharedBytes> {
    let len_bytes = u64::from(volume.block_bytes);
    let bytes = read_bytes(disk, Extent::new(block.0.saturating_mul(len_bytes), len_bytes))?;
    Ok(SharedBytes::from_owned_bytes(bytes.into_boxed_slice()))
}

/// Reads bytes of a disk, aligned to sectors or not.
pub(super) fn read_bytes(
    disk: &dyn Disk,
    at: Extent,
) -> std::result::Result<Vec<u8>, draconis_device::Error> {
    let sector = u64::from(disk.properties().sector_bytes.max(1));
    let start = at.start_bytes.saturating_sub(at.start_bytes.checked_rem(sector).unwrap_or(0));
    let end = at.start_bytes.saturating_add(at.len_bytes);
    let end = end.checked_next_multiple_of(sector).unwrap_or(end);
    let len = end.saturating_sub(start);
    let read = disk.read_now(Extent::new(start, len), Block::private(saturating_usize(len)));
    let block = read.map_err(|refused| refused.error)?;
    let mut bytes = vec![0; saturating_usize(at.len_bytes)];
    block.copy_out(saturating_usize(at.start_bytes.saturating_sub(start)), &mut bytes);
    Ok(bytes)
}
