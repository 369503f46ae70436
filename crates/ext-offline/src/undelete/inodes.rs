//! Deleted inodes: the states of each slot of the inode tables, from the oldest copy in the journal
//! to the volume itself.
//!
//! ```text
//!   slot 12   rank 3: file A   rank 5: file A   rank 8: dead    rank 9: file B   NOW: file B
//!                              └ last state of A              A was deleted in rank 8
//! ```
//! Law 1: a file is the same as long as kind, generation and creation time stay.
//! Law 2: the last state of a file with links is the one that is restored, never one in which the
//! deletion had already begun.

use std::collections::{BTreeMap, BTreeSet};

use draconis_device::{Disk, Extent};
use draconis_types::{FileType, Time};

use super::Limits;
use super::history::{History, NOW, Rank};
use crate::blocks::uncached::read_bytes;
use crate::format::group::flags::INODE_UNINIT;
use crate::format::inode::{Inode, RawInode};
use crate::format::orphan_file;
use crate::format::{le32, superblock::Superblock};
use crate::reader::VolumeReader;
use crate::units::saturating_usize;
use crate::{Error, FileBlock, GroupNumber, InodeNumber, Result};

/// A deleted inode, as it was before its deletion.
#[derive(Debug)]
pub(super) struct DeletedInode {
    pub(super) inode: Inode,
    /// All bytes of its slot.
    pub(super) slot: Vec<u8>,
    /// First and last transaction that show it alive; [`NOW`] for one that is still in its slot.
    pub(super) seen: (Rank, Rank),
    /// Transaction that shows it deleted, if one does.
    pub(super) deleted_in: Option<Rank>,
    /// Time of the deletion: the inode's own, else that of the transaction.
    pub(super) deleted_at: Option<Time>,
    /// True if `deleted_at` is the inode's own.
    pub(super) has_own_time: bool,
    /// True if the inode is on the list of orphans: its blocks still belong to it.
    pub(super) is_orphan: bool,
}

/// All inodes of a volume, as far as undeletion needs them.
#[derive(Debug, Default)]
pub(super) struct InodeStates {
    pub(super) deleted: Vec<DeletedInode>,
    /// Directories that exist.
    pub(super) directories: Vec<InodeNumber>,
    /// Newest time of any inode: of a change or a deletion.
    pub(super) last_change: i64,
    /// Newest time at which file contents may have been written or blocks allocated.
    pub(super) last_write: i64,
    /// True if there are more than the limit.
    pub(super) is_cut_short: bool,
}

/// Identity of a file in a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Identity {
    kind: FileType,
    generation: u32,
    created: Option<Time>,
}

/// A file in a slot, from its first state found to its last.
#[derive(Debug)]
struct Living {
    identity: Identity,
    seen: (Rank, Rank),
    slot: Vec<u8>,
}

/// Reads all inode tables, and their copies in the journal.
///
/// # Errors
/// Errors of the device in every table.
pub(super) fn scan(
    reader: &VolumeReader,
    disk: &dyn Disk,
    history: &History,
    limits: &Limits,
) -> Result<InodeStates> {
    let mut scan = SlotScan {
        super_: &reader.super_,
        history,
        limits,
        orphans: orphans(reader),
        states: InodeStates::default(),
        closed: BTreeMap::new(),
    };
    for group in (0..reader.super_.groups).map(GroupNumber) {
        match reader.group(group) {
            Ok(descriptor) => {
                let used = match descriptor.flags & INODE_UNINIT {
                    0 => reader.super_.inodes_per_group.saturating_sub(descriptor.unused_inodes),
                    _ => 0,
                };
                scan.scan_table(disk, group, descriptor.inode_table.0, used)?;
            }
            Err(error) => log::warn!("group {}: {error}: its inodes are skipped", group.0),
        }
    }
    Ok(scan.states)
}

/// Returns the inodes without links whose deletion has not begun.
fn orphans(reader: &VolumeReader) -> BTreeSet<u32> {
    let mut found = BTreeSet::new();
    let mut at = reader.super_.last_orphan;
    while at != 0 && found.insert(at) {
        // In the slot of an orphan, the time of deletion is the number of the next one.
        let next = reader.inode_slot(InodeNumber(at)).ok().and_then(|slot| le32(&slot, 0x14));
        at = next.unwrap_or(0);
    }
    let Some(file) = reader.super_.orphan_file.and_then(|number| reader.node(number).ok()) else {
        return found;
    };
    let end = reader.file_block_end(file.size_bytes.min(reader.disk_bytes));
    for run in reader.map_runs(&file, FileBlock(0), end).unwrap_or_default() {
        let crate::BlockLocation::Mapped(first) = run.location else { continue };
        for nth in 0..u64::from(run.blocks) {
            let role = crate::blocks::role::Role::OrphanFile(file.file_id());
            let Ok(block) = reader.store.block(first.offset(nth), role) else { continue };
            let listed = orphan_file::read_entries(&block).unwrap_or_default();
            found.extend(listed.iter().map(|(_, inode)| inode.0));
        }
    }
    found
}

struct SlotScan<'a> {
    super_: &'a Superblock,
    history: &'a History,
    limits: &'a Limits,
    orphans: BTreeSet<u32>,
    states: InodeStates,
    /// Last deleted file of each slot of the current block.
    closed: BTreeMap<u32, Identity>,
}

/// Bytes of an inode table that are read at once.
const TABLE_READ_BYTES: u64 = 1 << 20;

impl SlotScan<'_> {
    /// Scans the table of a group, of which `used` inodes were ever in use.
    fn scan_table(
        &mut self,
        disk: &dyn Disk,
        group: GroupNumber,
        table: u64,
        used: u32,
    ) -> Result<()> {
        let block_bytes = u64::from(self.super_.block_bytes).max(1);
        let blocks = u64::from(self.super_.inode_table_blocks());
        let end = table.saturating_add(blocks);
        let used_bytes = u64::from(used).saturating_mul(self.super_.inode_bytes.into());
        let used_end = table.saturating_add(used_bytes.div_ceil(block_bytes).min(blocks));
        let first_inode = group.0.saturating_mul(self.super_.inodes_per_group).saturating_add(1);
        let per_block = self.super_.block_bytes.checked_div(self.super_.inode_bytes).unwrap_or(0);
        let numbers = |block: u64| {
            let nth = u32::try_from(block.saturating_sub(table)).unwrap_or(u32::MAX);
            first_inode.saturating_add(nth.saturating_mul(per_block))
        };
        let step = TABLE_READ_BYTES.checked_div(block_bytes).unwrap_or(1).max(1);
        let mut at = table;
        while at < used_end {
            let count = step.min(used_end.saturating_sub(at));
            let part =
                Extent::new(at.saturating_mul(block_bytes), count.saturating_mul(block_bytes));
            match read_bytes(disk, part) {
                Ok(bytes) => {
                    let len = saturating_usize(block_bytes);
                    for (block, bytes) in (at..).zip(bytes.chunks_exact(len)) {
                        self.scan_block(block, numbers(block), bytes)?;
                    }
                }
                Err(error) => log::warn!("inode table of group {}: {error}", group.0),
            }
            at = at.saturating_add(count);
        }
        // Beyond the used part: a table that was in use when the journal was written.
        let beyond: Vec<u64> = self.history.blocks_in(used_end..end).collect();
        let zeros = vec![0; saturating_usize(block_bytes)];
        for block in beyond {
            self.scan_block(block, numbers(block), &zeros)?;
        }
        Ok(())
    }

    /// Scans all states of one block of an inode table; `now` is the newest.
    fn scan_block(&mut self, block: u64, first_inode: u32, now: &[u8]) -> Result<()> {
        let len = saturating_usize(self.super_.inode_bytes.into()).max(1);
        let mut living: BTreeMap<u32, Living> = BTreeMap::new();
        let history = self.history;
        self.closed.clear();
        for copy in history.copies(block) {
            let bytes = history.read(*copy)?;
            for (number, slot) in (first_inode..).zip(bytes.chunks_exact(len)) {
                self.visit_slot(number, slot, copy.rank, &mut living);
            }
        }
        for (number, slot) in (first_inode..).zip(now.chunks_exact(len)) {
            self.note_times(number, slot);
            self.visit_slot(number, slot, NOW, &mut living);
        }
        Ok(())
    }

    /// Adds a state of a slot to the files that are `living` before it.
    fn visit_slot(
        &mut self,
        number: u32,
        slot: &[u8],
        rank: Rank,
        living: &mut BTreeMap<u32, Living>,
    ) {
        if number < self.super_.first_inode.0 || number > self.super_.inodes {
            if (number, rank) == (InodeNumber::ROOT.0, NOW) {
                self.states.directories.push(InodeNumber::ROOT);
            }
            return;
        }
        let Some(state) = self.parse(number, slot) else {
            // An empty slot, or one that is damaged: whatever was there is gone.
            if let Some(before) = living.remove(&number) {
                self.delete(number, before, rank, None);
            }
            return;
        };
        let (inode, is_alive, death) = state;
        let identity = identity(&inode, self.super_);
        if is_alive {
            if rank == NOW && inode.kind == FileType::Directory {
                self.states.directories.push(InodeNumber(number));
            }
            match living.get_mut(&number) {
                Some(same) if same.identity == identity => {
                    same.seen.1 = rank;
                    if same.slot != slot {
                        same.slot = slot.to_vec();
                    }
                }
                _ => {
                    let new = Living { identity, seen: (rank, rank), slot: slot.to_vec() };
                    if let Some(before) = living.insert(number, new) {
                        self.delete(number, before, rank, None);
                    }
                }
            }
            return;
        }
        let is_orphan = rank == NOW && self.orphans.contains(&number);
        let own_time = death.filter(|_| !is_orphan);
        match living.remove(&number) {
            // An orphan still has everything in its slot.
            Some(before) if !is_orphan => {
                let own_time =
                    own_time.filter(|_| before.identity.generation == identity.generation);
                self.delete(number, before, rank, own_time);
            }
            // Some drivers leave the block map in the slot.
            _ if rank == NOW
                && self.closed.get(&number) != Some(&identity)
                && (is_orphan || own_time.is_some())
                && has_contents(&inode) =>
            {
                let living = Living { identity, seen: (NOW, NOW), slot: slot.to_vec() };
                self.push(
                    number,
                    living,
                    None,
                    own_time.map(seconds),
                    own_time.is_some(),
                    is_orphan,
                );
            }
            _ => {}
        }
    }

    /// Parses a slot: the inode, whether it is in use, and its time of deletion. `None` for an empty
    /// or damaged slot, and for one that no name leads to.
    fn parse(&self, number: u32, slot: &[u8]) -> Option<(Inode, bool, Option<u32>)> {
        let raw =
            zerocopy::FromBytes::ref_from_prefix(slot).ok().map(|(raw, _): (&RawInode, _)| raw)?;
        if raw.i_mode.get() == 0 {
            return None;
        }
        let (links, death) = (raw.i_links_count.get(), raw.i_dtime.get());
        let inode = Inode::parse_used(slot, InodeNumber(number), self.super_).ok()?;
        if inode.is_ea_inode() {
            return None;
        }
        Some((inode, links > 0 && death == 0, Some(death).filter(|death| *death != 0)))
    }

    /// Takes the times of a slot as it is now.
    fn note_times(&mut self, number: u32, slot: &[u8]) {
        if number < self.super_.first_inode.0 {
            return;
        }
        let Some((inode, is_alive, death)) = self.parse(number, slot) else { return };
        let attributes = inode.attributes(self.super_);
        let death = death.map_or(0, i64::from);
        let changed = attributes.changed.seconds;
        let states = &mut self.states;
        states.last_change = states.last_change.max(changed).max(death);
        let written = match (is_alive, inode.kind) {
            // A directory never gives blocks back.
            (true, FileType::Directory) => return,
            (true, _) => changed,
            (false, _) => match attributes.created {
                // Truncation at the deletion sets the time of modification.
                Some(created) if !has_contents(&inode) => created.seconds,
                Some(created) => created.seconds.max(attributes.modified.seconds),
                None if has_contents(&inode) => attributes.modified.seconds,
                None => death.max(changed),
            },
        };
        states.last_write = states.last_write.max(written);
    }

    /// Adds a file that `rank` shows deleted.
    fn delete(&mut self, number: u32, before: Living, rank: Rank, own_time: Option<u32>) {
        self.closed.insert(number, before.identity);
        let deleted_in = Some(rank).filter(|rank| *rank != NOW);
        let time = own_time.map(seconds).or(deleted_in.and_then(|rank| self.history.time(rank)));
        self.push(number, before, deleted_in, time, own_time.is_some(), false);
    }

    fn push(
        &mut self,
        number: u32,
        living: Living,
        deleted_in: Option<Rank>,
        deleted_at: Option<Time>,
        has_own_time: bool,
        is_orphan: bool,
    ) {
        if self.states.deleted.len() >= self.limits.max_files {
            self.states.is_cut_short = true;
            return;
        }
        let Living { seen, slot, .. } = living;
        if let Ok(inode) = Inode::parse_used(&slot, InodeNumber(number), self.super_) {
            let deleted =
                DeletedInode { inode, slot, seen, deleted_in, deleted_at, has_own_time, is_orphan };
            self.states.deleted.push(deleted);
        }
    }
}

fn seconds(seconds: u32) -> Time {
    Time { seconds: seconds.into(), nanoseconds: 0 }
}

fn identity(inode: &Inode, super_: &Superblock) -> Identity {
    let created = inode.attributes(super_).created;
    Identity { kind: inode.kind, generation: inode.generation(), created }
}

/// Returns true if a dead inode still tells where its contents are.
fn has_contents(inode: &Inode) -> bool {
    match inode.kind {
        FileType::File | FileType::Directory | FileType::Symlink => {
            inode.size_bytes > 0 && inode.pointers.iter().any(|word| *word != 0)
        }
        _ => false,
    }
}

impl DeletedInode {
    /// Returns the rank up to which copies of other blocks belong to this state.
    pub(super) fn last_seen(&self) -> Rank {
        self.seen.1
    }

    /// Returns the bytes of the attributes in the slot.
    pub(super) fn attribute_bytes(&self) -> Option<&[u8]> {
        self.slot.get(usize::from(self.inode.attributes_at?)..)
    }
}

/// Returns an error for contents that cannot be found any more.
pub(super) fn lost(inode: &Inode) -> Error {
    Error::corrupt("deleted file: contents").with_inode(inode.number)
}
