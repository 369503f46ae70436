//! Pass 0: descriptors of groups, the journal, and the other structures of the volume itself.

use draconis_device::Extent;

use super::{Fixer, LaterStep};
use crate::blocks::uncached::read_bytes;
use crate::check::layout::FIRST_META_GROUP;
use crate::check::{Problem, What};
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::group::{GroupDescriptor, flags, has_valid_checksum};
use crate::format::inode;
use crate::format::inode_slot::InodeSlot;
use crate::format::jbd2::RawJournalSuperblock;
use crate::format::mmp::{self, MmpRecord};
use crate::format::orphan_file;
use crate::format::requirements::Feature;
use crate::format::superblock::RawSuperblock;
use crate::format::witness;
use crate::mkfs::journal;
use crate::offline::PlannedVolume;
use crate::offline::reserved_gdt::{self, RESIZE_INODE};
use crate::redo_log::RedoLog;
use crate::units::{saturating_u32, saturating_usize};
use crate::{Error, FileId, FsBlock, GroupNumber, InodeNumber, Result};

/// Structures in one block of which either group may be wrong: each asks for all groups.
const MAX_SUSPECTED_OVERLAPS: usize = 64;
/// Fewest blocks of a journal.
const MIN_JOURNAL_BLOCKS: u64 = 1024;
/// The two features that say how the descriptors grow.
const GROWTH_CLASH: &[u8] = b"resize_inode, meta_bg";

impl Fixer<'_> {
    pub(super) fn fix_superblock_and_groups(&mut self, problems: &[&Problem]) -> Result<()> {
        if self.check.is_none() {
            let fixable = |it: &&&Problem| it.what != What::VolumeBeyondDisk;
            let Some(problem) = problems.iter().find(fixable) else { return Ok(()) };
            return self.fix_super_alone(problem);
        }
        let is_overlap = |it: &&&Problem| it.what == What::GroupOverlap;
        let may_be_others = problems.iter().filter(is_overlap).count() <= MAX_SUSPECTED_OVERLAPS;
        for problem in problems {
            match problem.what.is_of_descriptor() {
                true => self.fix_descriptor(problem, may_be_others)?,
                false => self.fix_structure(problem)?,
            }
        }
        Ok(())
    }

    /// Fixes what the check sees in the superblock alone.
    fn fix_super_alone(&mut self, problem: &Problem) -> Result<()> {
        match problem.what {
            What::FeatureClash => {
                self.fix_superblock(problem)?;
                match self.fixes.is_empty() && problem.name.as_deref() == Some(GROWTH_CLASH) {
                    true => self.fix_super_field(problem),
                    false => Ok(()),
                }
            }
            What::Superblock if problem.name.as_deref() == Some(FIRST_META_GROUP.as_bytes()) => {
                self.fix_superblock(problem)?;
                if let (Some(last), true) = (problem.expected, self.fixes.is_empty()) {
                    // Descriptors are read at the same places as with the number that is too large.
                    self.edit_super(|raw| raw.s_first_meta_bg.set(saturating_u32(last)))?;
                    self.done(problem, "the number is that of all blocks of descriptors");
                }
                Ok(())
            }
            What::Superblock | What::SuperblockChecksum => self.fix_superblock(problem),
            _ => self.fix_super_field(problem),
        }
    }

    fn fix_super_field(&mut self, problem: &Problem) -> Result<()> {
        match problem.what {
            What::JournalWithoutFeature => {
                self.edit_super(|raw| {
                    raw.s_journal_inum.set(0);
                    raw.s_journal_uuid = [0; 16];
                })?;
                self.done(problem, "the superblock names no journal any more");
            }
            What::JournalInode if problem.inode.is_none() => {
                // Device and UUID together are witnesses of a journal on another device.
                let is_outside = self.edit_super(|raw| {
                    let is_outside = raw.s_journal_dev.get() != 0 && raw.s_journal_uuid != [0; 16];
                    raw.s_journal_inum.set(if is_outside { 0 } else { 8 });
                    if !is_outside {
                        raw.s_journal_uuid = [0; 16];
                        raw.s_journal_dev.set(0);
                    }
                    is_outside
                })?;
                let action = match is_outside {
                    true => "the superblock names the journal on the other device alone",
                    false => "the superblock names inode 8",
                };
                self.done(problem, action);
            }
            What::FeatureClash => {
                // As e2fsck decides.
                let feature = Feature::C(Compatible::RESIZE_INODE);
                self.edit_super(|raw| {
                    feature.set(raw, false);
                    raw.s_reserved_gdt_blocks.set(0);
                })?;
                self.done(problem, "the feature resize_inode is removed");
            }
            What::FeatureLost => {
                let name = problem.name.as_deref().and_then(|name| std::str::from_utf8(name).ok());
                let Some(feature) = name.and_then(Feature::from_name) else { return Ok(()) };
                self.edit_super(|raw| feature.set(raw, true))?;
                self.done(problem, "the superblock has the feature again");
            }
            What::FeaturesInRevision0 => {
                self.edit_super(|raw| {
                    raw.s_rev_level.set(1);
                    raw.s_first_ino.set(11);
                    raw.s_inode_size.set(128);
                })?;
                self.done(problem, "the revision is 1 now");
            }
            What::OrphanList => {
                self.edit_super(|raw| raw.s_last_orphan.set(0))?;
                self.done(problem, "the list of orphans is emptied");
            }
            What::ReserveWithoutFeature => {
                self.edit_super(|raw| raw.s_reserved_gdt_blocks.set(0))?;
                self.done(problem, "no descriptor blocks are reserved");
            }
            What::MmpBlock if problem.block == Some(FsBlock(0)) => {
                self.drop_mmp()?;
                self.done(problem, "the feature mmp is removed");
            }
            _ => {}
        }
        Ok(())
    }

    fn fix_structure(&mut self, problem: &Problem) -> Result<()> {
        match problem.what {
            What::JournalInode if problem.inode.is_some() => self.fix_journal(problem),
            What::JournalNotEmpty => {
                let Some(at) = self.first_block(8)? else { return Ok(()) };
                let mut bytes = self.block(at.0)?;
                let raw = RawJournalSuperblock::view_mut(&mut bytes)?;
                let next = raw.s_sequence.get().wrapping_add(1);
                raw.set_tail(None, next);
                raw.set_errno(0);
                self.put(at.0, bytes)?;
                self.done(problem, "the journal is emptied");
                Ok(())
            }
            What::GroupUnused | What::GroupUninitialised | What::UsedUninitialised => {
                let Some(GroupNumber(group)) = problem.group else { return Ok(()) };
                self.edit_group(group, initialise)?;
                self.done(problem, "the whole group counts as initialised");
                Ok(())
            }
            What::MmpBlock if self.attempt == 1 && problem.block != Some(FsBlock(0)) => {
                self.write_mmp_block(problem)
            }
            What::MmpBlock => {
                self.drop_mmp()?;
                self.done(problem, "the feature mmp is removed");
                Ok(())
            }
            What::OrphanFile => self.fix_orphan_file(problem),
            What::ResizeInode => self.fix_resize_inode(problem),
            What::ResizeInodeWithoutFeature => {
                self.clear_reserved(7)?;
                self.done(problem, "the resize inode is cleared");
                Ok(())
            }
            _ => self.fix_super_field(problem),
        }
    }

    pub(super) fn clear_reserved(&self, number: u32) -> Result<()> {
        self.put_slot(number, vec![0; saturating_usize(self.check()?.super_.inode_bytes.into())])
    }

    /// Takes the journal's inode from its copy in the superblock, if that leads to a journal.
    pub(super) fn restore_journal_inode(&mut self) -> Result<bool> {
        let number = InodeNumber(8);
        let copy = crate::journal::journal_inode_copy(&self.check()?.super_, number);
        let Some(slot) = copy.filter(|_| self.attempt == 1) else { return Ok(false) };
        let runs = self.runs(number.0, &slot)?;
        let Some(first) = runs.first().filter(|run| run.from == 0) else { return Ok(false) };
        if self.slot(number.0)? == slot
            || RawJournalSuperblock::view(&self.block(first.start)?).is_err()
        {
            return Ok(false);
        }
        self.put_slot(number.0, slot)?;
        Ok(true)
    }

    fn fix_journal(&mut self, problem: &Problem) -> Result<()> {
        if self.restore_journal_inode()? {
            self.done(problem, "the inode is restored from its copy in the superblock");
            return Ok(());
        }
        let super_ = &self.check()?.super_;
        let slot = self.slot(8)?;
        let runs = self.runs(8, &slot)?;
        let blocks: u64 = runs.iter().map(|run| u64::from(run.blocks)).sum();
        let has_hole = runs.last().is_some_and(|run| {
            u64::from(run.from).saturating_add(run.blocks.into()) != blocks || run.unwritten
        });
        let first = self.first_block(8)?.filter(|_| !has_hole);
        match first {
            Some(first) if self.attempt == 1 && blocks >= MIN_JOURNAL_BLOCKS => {
                let count = saturating_u32(blocks);
                let bytes = journal::raw_superblock(super_.block_bytes, count, 0, super_.uuid);
                self.put(first.0, bytes)?;
                self.edit_slot(8, |it| {
                    it.set_mode(0o100_600);
                    it.set_links(1);
                    it.set_size(blocks.saturating_mul(super_.block_bytes.into()));
                })?;
                self.done(problem, "the journal is emptied, and its superblock made anew");
            }
            _ => {
                self.drop_journal()?;
                self.done(problem, "the journal is made anew");
            }
        }
        Ok(())
    }

    /// Changes the descriptor of a group and seals it.
    pub(super) fn edit_group(
        &self,
        group: u32,
        change: impl FnOnce(&mut GroupDescriptor),
    ) -> Result<()> {
        let super_ = &self.check()?.super_;
        let number = GroupNumber(group);
        let (block, slot) = super_.descriptor_location(number);
        let mut bytes = self.block(block.0)?;
        let mut descriptor = GroupDescriptor::read_as_stored(&bytes, slot, super_)?;
        change(&mut descriptor);
        descriptor.write_table_locations(&mut bytes, slot, super_)?;
        descriptor.write(&mut bytes, slot, super_, number)?;
        self.put(block.0, bytes)
    }

    /// Takes the locations of a group's structures from a copy of its descriptor, or from the others.
    /// Of two groups with structures in one block either may be wrong.
    fn fix_descriptor(&mut self, problem: &Problem, may_be_others: bool) -> Result<()> {
        let check = self.check()?;
        let Some(GroupNumber(group)) = problem.group else { return Ok(()) };
        let super_ = &check.super_;
        let number = GroupNumber(group);
        let (block, slot) = super_.descriptor_location(number);
        let bytes = self.block(block.0)?;
        if let Some((_, mended)) = witness::mend_descriptor(&bytes, slot, super_, number) {
            self.put(block.0, mended)?;
            self.mended_groups.insert(group);
        }
        if self.mended_groups.contains(&group) {
            self.done(problem, "one bit of the descriptor is changed back");
            return Ok(());
        }
        let others = match problem.what {
            What::GroupOverlap if may_be_others => check.groups_over(group),
            _ => vec![],
        };
        for suspect in std::iter::once(group).chain(others) {
            if self.restore_places(problem, suspect)? {
                break;
            }
        }
        Ok(())
    }

    /// Restores where the structures of a group lie; returns false if nothing says otherwise.
    fn restore_places(&mut self, problem: &Problem, group: u32) -> Result<bool> {
        let check = self.check()?;
        let Some(own) = check.groups.get(saturating_usize(group.into())) else { return Ok(false) };
        let places = |it: &GroupDescriptor| [it.block_bitmap, it.inode_bitmap, it.inode_table];
        let is_other = |it: &GroupDescriptor| {
            problem.what != What::GroupOverlap || places(it) != places(&own.descriptor)
        };
        if let Some(backup) = self.copy_of_descriptor(group)?.filter(is_other) {
            let unused_inodes = self.never_used_inodes(group, &backup)?;
            self.edit_group(group, |own| {
                [own.block_bitmap, own.inode_bitmap, own.inode_table] = places(&backup);
                initialise(own);
                own.unused_inodes = unused_inodes;
            })?;
            self.done(problem, "the places are those of a copy of the descriptor");
        } else if problem.what == What::GroupChecksum && check.has_possible_places(group)? {
            self.edit_group(group, initialise)?;
            self.done(problem, "the descriptor is sealed anew");
        } else if let Some(computed) = check.computed_places(group)? {
            self.edit_group(group, |own| {
                [own.block_bitmap, own.inode_bitmap, own.inode_table] = computed;
                initialise(own);
            })?;
            self.done(problem, "the places are those that follow from the others");
        } else if check.is_complete
            && matches!(problem.what, What::GroupBlockBitmap | What::GroupInodeBitmap)
        {
            self.move_bitmap(problem, group)?;
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    /// Returns the first valid copy of a group's descriptor.
    fn copy_of_descriptor(&self, group: u32) -> Result<Option<GroupDescriptor>> {
        let super_ = &self.check()?.super_;
        let number = GroupNumber(group);
        let (block, slot) = super_.descriptor_location(number);
        let nth = group.checked_div(super_.descriptors_per_block()).unwrap_or(0);
        let copies = super_.descriptor_locations(nth).into_iter();
        for at in copies.filter(|at| *at != block && super_.is_valid_block(*at)) {
            let bytes = self.block(at.0)?;
            let found = GroupDescriptor::read_as_stored(&bytes, slot, super_)?;
            if has_valid_checksum(&bytes, slot, super_, number)
                && super_.is_valid_block(found.block_bitmap)
                && super_.is_valid_block(found.inode_bitmap)
                && found.check(super_).is_ok()
            {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Gives a bitmap a block of its own: what it should say is found anew.
    fn move_bitmap(&mut self, problem: &Problem, group: u32) -> Result<()> {
        let super_ = &self.check()?.super_;
        let start = super_.group_start(GroupNumber(group)).0;
        let end = start.saturating_add(super_.blocks_per_group.into()).min(super_.blocks);
        let in_group = self.allocate_between(start..end);
        let at = match in_group {
            Err(Error::NoSpace) if super_.incompatible.contains(Incompatible::FLEX_BG) => {
                self.allocate(1)?.first().copied().ok_or(Error::NoSpace)?
            }
            found => found?,
        };
        self.edit_group(group, |own| {
            match problem.what {
                What::GroupInodeBitmap => own.inode_bitmap = FsBlock(at),
                _ => own.block_bitmap = FsBlock(at),
            }
            initialise(own);
        })?;
        self.done(problem, "the bitmap gets another block, and says what is in use");
        Ok(())
    }

    /// Returns how many inodes at the end of a group's table were never used. An earlier format may
    /// have left some there. The copy of the descriptor says which were not used when it was
    /// written; later ones have a bit in the bitmap and a checksum of this volume.
    fn never_used_inodes(&self, group: u32, copy: &GroupDescriptor) -> Result<u32> {
        let super_ = &self.check()?.super_;
        if !super_.read_only_compatible.intersects(ReadOnlyCompatible::CHECKSUMS) {
            return Ok(0);
        }
        let all = super_.inodes_per_group;
        let unused = match copy.flags & flags::INODE_UNINIT {
            0 => copy.unused_inodes.min(all),
            _ => all,
        };
        let bitmap = self.block(copy.inode_bitmap.0)?;
        let has_bit = |index: &u32| {
            let byte = bitmap.get(saturating_usize(u64::from(*index / 8)));
            byte.is_some_and(|byte| byte >> (index % 8) & 1 != 0)
        };
        let table = copy.inode_table.0.saturating_mul(super_.block_bytes.into());
        for index in (all.saturating_sub(unused)..all).rev().filter(has_bit) {
            let at = u64::from(index).saturating_mul(super_.inode_bytes.into());
            let extent = Extent::new(table.saturating_add(at), super_.inode_bytes.into());
            let slot = read_bytes(self.changes, extent)?;
            let first = group.saturating_mul(all).saturating_add(1);
            let number = InodeNumber(first.saturating_add(index));
            if inode::has_valid_checksum(&slot, number, super_) {
                return Ok(all.saturating_sub(index).saturating_sub(1));
            }
        }
        Ok(unused)
    }

    fn drop_mmp(&self) -> Result<()> {
        self.edit_super(|raw| {
            raw.s_mmp_block.set(0);
            let features = raw.s_feature_incompat.get() & !Incompatible::MMP.bits();
            raw.s_feature_incompat.set(features);
        })
    }

    fn write_mmp_block(&mut self, problem: &Problem) -> Result<()> {
        let super_ = &self.check()?.super_;
        let Some(FsBlock(at)) = problem.block.filter(|at| super_.is_valid_block(*at)) else {
            self.drop_mmp()?;
            self.done(problem, "the feature mmp is removed");
            return Ok(());
        };
        let record = MmpRecord {
            sequence: mmp::SEQ_CLEAN,
            interval_seconds: mmp::MIN_CHECK_INTERVAL,
            node: String::new(),
            device: String::new(),
        };
        let mut bytes = vec![0; saturating_usize(super_.block_bytes.into())];
        mmp::write(&mut bytes, &record, self.seconds().into(), super_.checksum_seed);
        self.put(at, bytes)?;
        self.done(problem, "the block is made anew");
        Ok(())
    }

    fn fix_orphan_file(&mut self, problem: &Problem) -> Result<()> {
        let super_ = &self.check()?.super_;
        let Some(InodeNumber(number)) = problem.inode else { return Ok(()) };
        if super_.orphan_file.is_none() {
            self.edit_super(|raw| raw.s_orphan_file_inum.set(0))?;
            self.done(problem, "the superblock names no file of orphans any more");
            return Ok(());
        }
        let is_valid = number >= super_.first_inode.0 && number <= super_.inodes;
        if self.attempt > 1 || !is_valid {
            self.edit_super(|raw| {
                raw.s_orphan_file_inum.set(0);
                let compatible = raw.s_feature_compat.get() & !Compatible::ORPHAN_FILE.bits();
                raw.s_feature_compat.set(compatible);
                raw.set_no_orphans_in_file();
            })?;
            if is_valid {
                self.clear_inode(number)?;
            }
            self.later.insert(LaterStep::OrphanFile);
            self.done(problem, "the file is made anew");
            return Ok(());
        }
        let mut slot = self.slot(number)?;
        let runs = self.runs(number, &slot)?;
        let generation = InodeSlot::from_bytes(&mut slot)?.generation();
        let seed = super_.file_checksum_seed(FileId { inode: number, generation });
        for at in runs.iter().flat_map(|run| run.start..run.start.saturating_add(run.blocks.into()))
        {
            let mut bytes = orphan_file::empty_block(saturating_usize(super_.block_bytes.into()));
            if let Some(seed) = seed {
                orphan_file::set_checksum(&mut bytes, seed, FsBlock(at));
            }
            self.put(at, bytes)?;
        }
        self.edit_super(RawSuperblock::set_no_orphans_in_file)?;
        self.done(problem, "the file is emptied");
        Ok(())
    }

    fn fix_resize_inode(&mut self, problem: &Problem) -> Result<()> {
        let check = self.check()?;
        let super_ = &check.super_;
        let block_bytes = u64::from(super_.block_bytes);
        let top = match self.attempt {
            1 => {
                let mut slot = self.slot(RESIZE_INODE.0)?;
                let top = FsBlock(InodeSlot::from_bytes(&mut slot)?.pointer(13).into());
                let is_own = super_.is_valid_block(top)
                    && !check.metadata.contains(check.block_index(top.0))
                    && !check.multiply_claimed.contains(check.cluster_index(top.0));
                is_own.then_some(top)
            }
            _ => None,
        };
        let top = match top {
            Some(top) => top,
            None => FsBlock(self.allocate(1)?.first().copied().ok_or(Error::NoSpace)?),
        };
        let fan_out = block_bytes / 4;
        let blocks = fan_out.saturating_mul(fan_out).saturating_add(fan_out).saturating_add(12);
        self.edit_slot(RESIZE_INODE.0, |it| {
            it.clear();
            it.init_extra_fields();
            it.set_mode(0o100_600);
            it.set_links(1);
            it.set_size(blocks.saturating_mul(block_bytes));
        })?;
        let planned = PlannedVolume {
            raw: check.raw.clone(),
            super_: super_.clone(),
            groups: check.groups.iter().map(|it| it.descriptor).collect(),
        };
        let mut redo = RedoLog::new(self.changes, super_.block_bytes, vec![]);
        reserved_gdt::rewrite(&mut redo, &planned, top, self.now)?;
        for (at, bytes) in redo.into_staged() {
            self.put(at, bytes)?;
        }
        self.done(problem, "the resize inode is made anew");
        Ok(())
    }
}

/// Forgets that a part of the group was never used.
pub(super) fn initialise(group: &mut GroupDescriptor) {
    group.flags &= !(flags::BLOCK_UNINIT | flags::INODE_UNINIT);
    group.unused_inodes = 0;
}
