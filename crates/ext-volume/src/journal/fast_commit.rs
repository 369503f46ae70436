//! Replay of fast commits on an in-memory copy of the volume.
//!
//! ```text
//!   replayed disk ──▶ copy-on-write disk ──▶ a volume on it ──▶ record by record ──▶ blocks
//! ```
//! Fast commits log operations on files, not blocks. So replay allocates directory blocks and
//! extent-tree nodes here, and excludes the blocks that records assign to files. Directory inodes
//! are not logged: their link counts and blocks follow from the names.
//!
//! Law 1: the result is one set of blocks. A read-only mount reads them from memory; recovery
//! writes them as one journal transaction, so that a cut leaves all or nothing to be repeated.
//! Law 2: a record is in memory only while it is replayed.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use draconis_device::Disk;
use draconis_types::{FileType, Time};

use super::journal_file::JournalFile;
use super::recovery::{JournalDamage, LogSource};
use crate::blocks::cow_disk::CowDisk;
use crate::blocks::role::Role;
use crate::format::inode;
use crate::format::inode_slot::InodeSlot;
use crate::format::jbd2::JournalIncompatible;
use crate::format::jbd2::fast_commit::{
    DentryChange, FastCommitRecord, FastCommitScan, has_tail, parse_records,
};
use crate::format::superblock::Superblock;
use crate::map::edit::AllocationPolicy;
use crate::map::extents::empty_root;
use crate::options::{OpenOptions, WriteOptions};
use crate::transaction::Transaction;
use crate::units::saturating_usize;
use crate::volume::Volume;
use crate::{AccessTimes, Error, InodeNumber, Result};

/// Cache sizes of the volume on which records are replayed.
const REPLAY_OPTIONS: OpenOptions = OpenOptions {
    inode_cache: 256,
    block_map_cache: 256,
    data_cache_bytes: 2 << 20,
    lists_dots: false,
    read_ahead_bytes: 0,
};
/// Limit of changed bytes.
const MAX_REPLAY_BYTES: u64 = 64 << 20;

/// Summary of a log's fast commits.
pub(super) struct FastCommitSummary {
    /// Number of valid records.
    pub(super) records: u64,
    /// Damage that makes committed records invalid.
    pub(super) damage: Option<JournalDamage>,
}

/// Scans the fast commits based on the transaction before `next`.
///
/// # Errors
/// An error of the device.
pub(super) fn summarize_fast_commits(log: &JournalFile, next: u32) -> Result<FastCommitSummary> {
    let mut survey = FastCommitSummary { records: 0, damage: None };
    let super_ = &log.super_;
    if super_.start.is_none() || !super_.incompatible.contains(JournalIncompatible::FAST_COMMIT) {
        return Ok(survey);
    }
    let mut counting = FastCommitScan::new(next);
    let mut places = fast_commit_blocks(log).peekable();
    while let Some(at) = places.peek()
        && counting.scan_block(&log.read(*at)?)
    {
        places.next();
    }
    survey.records = counting.valid_records();
    let what = "journal: checksum of a fast commit";
    if counting.has_damaged_tail() {
        survey.damage = places.peek().map(|at| JournalDamage { what, at: *at });
        return Ok(survey);
    }
    // A tail is durable only after the records that it ends.
    let mut behind = counting.valid_commit_bytes();
    for at in places {
        if has_tail(&log.read(at)?, behind, next) {
            survey.damage = Some(JournalDamage { what, at });
            break;
        }
        behind = 0;
    }
    Ok(survey)
}

/// Returns the log blocks of fast commits. Linux leaves the first block after the journal proper
/// unused.
fn fast_commit_blocks(log: &JournalFile) -> Range<u32> {
    log.super_.end.saturating_add(1)..log.super_.len
}

/// Returns the disk after replay of `count` fast-commit records, or `None` if there are none.
/// `disk` is the volume after journal replay.
///
/// # Errors
/// [`Error::Unsupported`] for records that cannot be replayed here; [`Error::Corrupt`];
/// [`Error::Io`].
#[allow(clippy::arithmetic_side_effects, reason = "the divisor is at least 1")]
pub(super) fn replay_fast_commits(
    disk: Arc<dyn Disk>,
    log: &JournalFile,
    super_: &Superblock,
    count: u64,
) -> Result<Option<Arc<CowDisk>>> {
    if count == 0 {
        return Ok(None);
    }
    let block_bytes = super_.block_bytes;
    if super_.quotas.iter().any(|inode| *inode != 0) {
        let feature =
            "needs_recovery: fast commits beside quotas; mount the volume with Linux once";
        return Err(Error::Unsupported { feature: feature.to_owned() });
    }
    // All changes must fit one transaction.
    let most =
        u64::from(log.super_.log_blocks()).min(MAX_REPLAY_BYTES / u64::from(block_bytes.max(1)));
    let scratch = Arc::new(CowDisk::new(disk, block_bytes, saturating_usize(most)));
    let seconds = super_.dates.written;
    let clock = move || Time { seconds: seconds.into(), nanoseconds: 0 };
    let writing = WriteOptions {
        clock: Arc::new(clock),
        dirty_bytes: 64 << 20,
        atime: AccessTimes::Never,
        discard: false,
    };
    let volume = Volume::for_recovery(scratch.clone(), REPLAY_OPTIONS, writing, super_)?;
    let all = |each: &mut dyn FnMut(FastCommitRecord) -> Result<()>| {
        let mut left = count;
        for at in fast_commit_blocks(log) {
            if left == 0 {
                break;
            }
            let block = log.read(at)?;
            for record in parse_records(&block).take(saturating_usize(left)) {
                left = left.saturating_sub(1);
                each(record?)?;
            }
        }
        Ok::<_, Error>(())
    };
    all(&mut |record| match record {
        FastCommitRecord::AddRange { extent, .. } => volume.transact(|tx| {
            tx.may_block = true;
            tx.exclude_from_allocation(extent.start.0, extent.blocks)
        }),
        _ => Ok(()),
    })?;
    let mut dead = BTreeSet::new();
    all(&mut |record| {
        volume.transact(|tx| {
            tx.may_block = true;
            tx.replay_record(&record, &mut dead).map_err(to_journal_damage)
        })
    })?;
    for inode in dead {
        volume.transact(|tx| {
            tx.may_block = true;
            let supervision = tx.read_slot(inode, |it| it.links() > 0 || it.mode() == 0)?;
            if supervision { Ok(()) } else { tx.evict_inode(inode) }
        })?;
    }
    let done = volume.sync();
    if scratch.blocks().len() > saturating_usize(most) {
        let feature = "needs_recovery: fast commits that change more than the log has room for; \
                       mount the volume with Linux once";
        return Err(Error::Unsupported { feature: feature.to_owned() });
    }
    done?;
    scratch.freeze();
    ::log::info!("{count} records of fast commits are carried out");
    Ok(Some(scratch))
}

/// Maps an error that valid records cannot cause to damage of the journal.
fn to_journal_damage(error: Error) -> Error {
    match error {
        Error::Corrupt { .. } | Error::Io(_) | Error::Unsupported { .. } | Error::NoSpace => error,
        _ => Error::corrupt("journal: record of a fast commit"),
    }
}

impl Transaction<'_> {
    fn replay_record(
        &mut self,
        record: &FastCommitRecord,
        dead: &mut BTreeSet<InodeNumber>,
    ) -> Result<()> {
        match record {
            FastCommitRecord::Inode { inode, raw } => self.replay_inode(*inode, raw, dead),
            FastCommitRecord::AddRange { inode, extent } => match self.has_map(*inode)? {
                true => self.replay_extent(*inode, *extent),
                false => Ok(()),
            },
            FastCommitRecord::DelRange { inode, from, blocks } => match self.has_map(*inode)? {
                true => self.unmap(*inode, *from..from.saturating_add(*blocks)),
                false => Ok(()),
            },
            FastCommitRecord::Name { change, dir, inode, name } => match change {
                DentryChange::Unlink => self.replay_unlink(*dir, *inode, name, dead),
                DentryChange::Create | DentryChange::Link => {
                    self.replay_link(*dir, *inode, name, *change == DentryChange::Create)
                }
            },
        }
    }

    /// Returns true if an inode is in use.
    fn is_used(&mut self, inode: InodeNumber) -> Result<bool> {
        Ok(self.read_slot(inode, |it| it.mode() != 0)? && self.is_inode_allocated(inode)?)
    }

    /// Returns true if the inode is in use; its file must have extents.
    fn has_map(&mut self, inode: InodeNumber) -> Result<bool> {
        let extents = self.read_slot(inode, |it| it.flags() & inode::flags::EXTENTS != 0)?;
        if self.is_used(inode)? && !extents {
            let feature = "needs_recovery: a fast commit of a file without extents; mount the \
                           volume with Linux once";
            return Err(Error::Unsupported { feature: feature.to_owned() });
        }
        self.is_used(inode)
    }

    fn replay_inode(
        &mut self,
        number: InodeNumber,
        raw: &[u8],
        dead: &mut BTreeSet<InodeNumber>,
    ) -> Result<()> {
        let damaged = || Error::corrupt("journal: inode of a fast commit").with_inode(number);
        let is_ours = number < self.volume.super_.first_inode && number != InodeNumber::ROOT;
        if is_ours || raw.len() > saturating_usize(self.volume.super_.inode_bytes.into()) {
            return Err(damaged());
        }
        let mut copy = raw.to_vec();
        let new = InodeSlot::from_bytes(&mut copy)?;
        let (mode, links, generation) = (new.mode(), new.links(), new.generation());
        let (flags, attributes) = (new.flags(), new.xattr_block());
        let kind = FileType::from_mode(mode.into()).ok_or_else(damaged)?;
        let was_linked = self.read_slot(number, |it| it.links() > 0)?;
        if self.is_used(number)? {
            let before = self.read_slot(number, |it| (it.generation(), it.flags()))?;
            if (before.1 ^ flags) & inode::flags::HUGE_FILE != 0 {
                return Err(damaged());
            }
            if before.0 != generation {
                // Another file had the inode number before.
                self.evict_inode(number)?;
            } else if before.1 & !flags & inode::flags::EXTENTS != 0 {
                self.unmap(number, 0..u32::MAX)?;
            }
        }
        let is_new = self.allocate_exact_inode(number, kind)?;
        self.change_slot(number, |it| it.update_from(raw, is_new, empty_root()))?;
        self.invalidate_map(number, 0, u32::MAX);
        if is_new && attributes != 0 {
            self.add_sectors(number, self.cluster_blocks().into())?;
        }
        if links == 0 && (is_new || was_linked) {
            dead.insert(number);
        }
        Ok(())
    }

    /// Adds a name.
    fn replay_link(
        &mut self,
        dir: InodeNumber,
        inode: InodeNumber,
        name: &[u8],
        is_first: bool,
    ) -> Result<()> {
        if !self.is_used(dir)? || !self.is_used(inode)? {
            return Ok(());
        }
        let parent = self.read_inode_unchecked(dir)?;
        let kind = self.read_inode_unchecked(inode)?.kind;
        if parent.kind != FileType::Directory || dir == inode {
            return Err(Error::corrupt("journal: name of a fast commit").with_inode(dir));
        }
        let is_dir = kind == FileType::Directory;
        if is_dir && is_first && self.lookup_block(inode, 0)?.is_none() {
            self.init_directory(inode, dir)?;
        }
        let parent = self.directory(dir)?;
        let Err(place) = self.find_name_or_slot(&parent, name)? else { return Ok(()) };
        self.check_free_blocks(place.max_blocks(), true)?;
        self.insert_name(dir, place, name, inode, kind)?;
        match (is_dir, is_first) {
            (true, _) => self.count_subdirectory(dir, true),
            (false, true) => self.change_slot(inode, |it| it.set_links(1)),
            (false, false) => {
                self.change_slot(inode, |it| it.set_links(it.links().saturating_add(1)))
            }
        }
    }

    /// Allocates the first block of a new directory.
    fn init_directory(&mut self, inode: InodeNumber, parent: InodeNumber) -> Result<()> {
        self.change_slot(inode, |it| {
            it.set_size(0);
            it.set_links(2);
        })?;
        let taking = AllocationPolicy { is_append: false, privileged: true, unwritten: false };
        let all = self.map_blocks(inode, 0..1, taking)?;
        let first = all.first().ok_or(Error::NoSpace)?.at;
        let names = self.dot_entries_block(inode, parent);
        let role = Role::Directory(self.file_id(inode)?);
        self.put_new_block(first, role, names);
        let block_bytes = self.volume.super_.block_bytes;
        self.change_slot(inode, |it| it.set_size(block_bytes.into()))
    }

    /// Removes a name of `inode`.
    fn replay_unlink(
        &mut self,
        dir: InodeNumber,
        inode: InodeNumber,
        name: &[u8],
        dead: &mut BTreeSet<InodeNumber>,
    ) -> Result<()> {
        if !self.is_used(dir)? {
            return Ok(());
        }
        let parent = self.directory(dir)?;
        let Ok(spot) = self.find_name_or_slot(&parent, name)? else { return Ok(()) };
        if spot.found.inode != inode {
            return Ok(());
        }
        self.remove_name(dir, spot)?;
        if !self.is_used(inode)? {
            return Ok(());
        }
        let is_dir = self.read_inode_unchecked(inode)?.kind == FileType::Directory;
        if is_dir {
            self.count_subdirectory(dir, false)?;
        }
        let left = self.change_slot(inode, |it| {
            it.set_links(if is_dir { 0 } else { it.links().saturating_sub(1) });
            it.links()
        })?;
        if left == 0 {
            dead.insert(inode);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use draconis_types::AttributeChange;

    use super::*;
    use crate::FsBlock;
    use crate::format::extent::Extent;
    use crate::testing::{FILE, formatted_disk, journaled_disk, open_for_writing};
    use draconis_ext_offline::check::{self, CheckOptions};

    fn replay(volume: &Volume, record: &FastCommitRecord) -> Result<()> {
        volume.transact(|tx| {
            tx.may_block = true;
            tx.replay_record(record, &mut BTreeSet::new())
        })
    }

    /// Records do not change the inodes of the volume itself, nor maps of pointers.
    #[test]
    fn records_of_other_inodes_are_refused() {
        let volume = open_for_writing(formatted_disk(1024, 1 << 20));
        let mut raw = vec![0; 128];
        (raw[0], raw[1], raw[26]) = (0xA4, 0x81, 1);
        for inode in [1, 7, 8, 10].map(InodeNumber) {
            let found = replay(&volume, &FastCommitRecord::Inode { inode, raw: raw.clone() });
            assert!(matches!(found, Err(Error::Corrupt { .. })), "{inode}: {found:?}");
        }
        let inode = volume.create(volume.root(), b"file", &FILE).unwrap();
        let extent = Extent { from: 0, blocks: 1, start: FsBlock(500), is_unwritten: false };
        let found = replay(&volume, &FastCommitRecord::AddRange { inode, extent });
        assert!(matches!(found, Err(Error::Unsupported { .. })), "{found:?}");
    }

    /// Blocks that a file has already stay where they are.
    #[test]
    fn repeated_extent_changes_nothing() {
        let disk = journaled_disk(1024, 8 << 20);
        let volume = open_for_writing(disk.clone());
        let inode = volume.create(volume.root(), b"file", &FILE).unwrap();
        let change = AttributeChange { size_bytes: Some(7 << 10), ..AttributeChange::default() };
        volume.set_attributes(inode, &change).unwrap();
        let extent = Extent { from: 3, blocks: 4, start: FsBlock(6000), is_unwritten: false };
        for _ in 0..3 {
            replay(&volume, &FastCommitRecord::AddRange { inode, extent }).unwrap();
        }
        let found = volume.transact(|tx| tx.lookup_block(inode, 4)).unwrap();
        assert_eq!(found, Some(FsBlock(6001)));
        volume.close().unwrap();
        let disk: Arc<dyn Disk> = disk;
        let report = check::check(&disk, CheckOptions::default(), &|_, _| {}).unwrap();
        assert!(report.problems.is_empty(), "{:?}", report.problems);
    }
}
