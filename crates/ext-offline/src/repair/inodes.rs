//! Pass 1 and 4: inodes, their maps and attributes, and their link counts.

use std::collections::{BTreeMap, BTreeSet};

use draconis_types::FileType;
use zerocopy::{FromBytes, IntoBytes};

use super::Fixer;
use crate::check::inodes::{InodeRole, forbidden_flags};
use crate::check::raw_inode::{inode_size, is_fast_symlink};
use crate::check::xattrs::inline_data_value;
use crate::check::{Problem, What};
use crate::dir::broken_chain::parse;
use crate::format::features::{Incompatible, ReadOnlyCompatible};
use crate::format::inline::POINTER_BYTES;
use crate::format::inode::{RawInode, fast_symlink_pointers, flags};
use crate::format::inode_slot::InodeSlot;
use crate::format::requirements::Feature;
use crate::format::xattr::edit::{read_block, read_body};
use crate::format::xattr::{NewXattr, encode_block, encode_list, refcount};
use crate::format::{extent, put16, witness, xattr};
use crate::units::{saturating_u32, saturating_usize};
use crate::{Error, FsBlock, InodeNumber, Result};

const ROOT: u32 = 2;
/// First inode that is not reserved, on every volume that mke2fs made.
const FIRST_INODE: u32 = 11;
/// Damaged inodes from which on a table whose greater part is damaged is left alone.
const MAX_DAMAGED_INODES: usize = 24;
/// Bytes of an inode before its extra fields.
const OLD_BYTES: usize = 128;
/// Bytes of the extra fields of a new inode.
const EXTRA_BYTES: u16 = 32;
/// Links from which on a directory counts none.
const LINK_MAX: u64 = 65_000;

/// What one inode needs besides changes of its fields.
#[derive(Default)]
struct InodeWork {
    /// Blocks that others claim, too.
    shared: BTreeSet<u64>,
    rebuilds_map: bool,
    clears: bool,
    has_new_size: bool,
    /// True for a directory that loses its hash tree.
    rebuilds_directory: bool,
}

impl Fixer<'_> {
    pub(super) fn fix_inodes(&mut self, problems: &[&Problem]) -> Result<()> {
        let first_inode = self.check()?.super_.first_inode;
        let is_too_many = |it: &&&Problem| {
            it.what == What::ReservedInode
                && it.inode.is_some_and(|it| it.0 >= FIRST_INODE)
                && it.inode.is_some_and(|it| it < first_inode)
        };
        if let Some(problem) = problems.iter().find(is_too_many) {
            // What counts as reserved is not what it is.
            self.edit_super(|raw| raw.s_first_ino.set(FIRST_INODE))?;
            self.done(problem, "the first inode that is not reserved is 11");
            return Ok(());
        }
        let mut by_inode: BTreeMap<u32, Vec<&Problem>> = BTreeMap::new();
        for problem in problems {
            match (problem.what, problem.inode) {
                (What::AttributeReferences, _) => self.fix_attribute_references(problem)?,
                (_, Some(InodeNumber(inode))) => by_inode.entry(inode).or_default().push(problem),
                (_, None) => {}
            }
        }
        let used = (1..=self.check()?.super_.inodes)
            .filter(|number| self.check.is_some_and(|it| it.inode_states.get(*number).is_used()))
            .count();
        // A broken list of orphans reaches many inodes that are whole.
        let of_orphans = [
            What::InOrphanList,
            What::OnOrphanList,
            What::DeletedWithoutTime,
            What::UsedWithDeletionTime,
        ];
        let is_damaged = |all: &&Vec<&Problem>| all.iter().any(|it| !of_orphans.contains(&it.what));
        let damaged = by_inode.values().filter(is_damaged).count();
        if damaged > MAX_DAMAGED_INODES && damaged > used / 2 {
            // That is no table of inodes, or not at this place.
            return Ok(());
        }
        for (inode, problems) in &by_inode {
            if problems.iter().any(|it| damages_map(it.what) || it.what == What::ClaimedTwice) {
                self.take_blocks_of(*inode)?;
            }
        }
        for (inode, problems) in by_inode {
            let done = self.fix_inode(inode, &problems);
            done.map_err(|error| error.with_inode(InodeNumber(inode)))?;
        }
        Ok(())
    }

    /// Takes all blocks of an inode: the check does not walk below a node that others claim, too.
    fn take_blocks_of(&self, number: u32) -> Result<()> {
        let check = self.check()?;
        let slot = self.slot(number)?;
        let (raw, _) = RawInode::ref_from_prefix(&slot).map_err(|_| Error::corrupt("inode"))?;
        if !crate::check::raw_inode::has_map(check, raw) {
            return Ok(());
        }
        for run in self.runs(number, &slot)? {
            for at in run.start..run.start.saturating_add(run.blocks.into()) {
                self.taken.insert(check.cluster_index(at));
            }
        }
        Ok(())
    }

    fn fix_inode(&mut self, number: u32, problems: &[&Problem]) -> Result<()> {
        let is_shared = |what| matches!(what, What::InMetadata | What::ClaimedTwice);
        if number == 8 && problems.iter().any(|it| damages_map(it.what) || is_shared(it.what)) {
            if self.restore_journal_inode()? {
                let action = "the inode is restored from its copy in the superblock";
                problems.iter().for_each(|problem| self.done(problem, action));
                return Ok(());
            }
            // A journal has no holes.
            self.drop_journal()?;
            problems.iter().for_each(|problem| self.done(problem, "the journal is made anew"));
            return Ok(());
        }
        if number == 1 && problems.iter().any(|it| damages_map(it.what)) {
            self.clear_reserved(number)?;
            problems.iter().for_each(|it| self.done(it, "the list of bad blocks is cleared"));
            return Ok(());
        }
        let mut slot = self.slot(number)?;
        let mut work = InodeWork::default();
        for problem in problems {
            if let Some(action) = self.fix_slot(number, &mut slot, problem, &mut work)? {
                self.done(problem, action);
            }
        }
        if work.clears {
            let now = self.seconds();
            let mut it = InodeSlot::from_bytes(&mut slot)?;
            it.set_links(0);
            it.set_deleted(now);
        } else if work.rebuilds_map {
            self.copy_shared_attributes(&mut slot, &work.shared)?;
            let (raw, _) = RawInode::ref_from_prefix(&slot).map_err(|_| Error::corrupt("inode"))?;
            if crate::check::raw_inode::has_map(self.check()?, raw) {
                self.rebuild_map(number, &mut slot, &work.shared)?;
            }
        }
        self.put_slot(number, slot)?;
        if work.rebuilds_directory && !work.clears {
            self.rebuild_directory(number, None, &BTreeSet::new())?;
        }
        Ok(())
    }

    /// Changes the bytes of an inode for one problem; returns what it does, if there is something.
    fn fix_slot(
        &mut self,
        number: u32,
        slot: &mut [u8],
        problem: &Problem,
        work: &mut InodeWork,
    ) -> Result<Option<&'static str>> {
        let check = self.check()?;
        let now = self.seconds();
        let role = InodeRole::for_inode(check, number);
        let is_plain = matches!(role, InodeRole::Ordinary | InodeRole::Root);
        let wrong = forbidden_flags(check, role, number, slot);
        let (raw, _) = RawInode::mut_from_prefix(slot).map_err(|_| Error::corrupt("inode"))?;
        let expected = problem.expected;
        let is_directory = raw.i_mode.get() & 0o170_000 == 0o040_000;
        Ok(Some(match problem.what {
            What::InodeChecksum if problem.name.is_some() => {
                let mended = witness::mend_inode(slot, InodeNumber(number), &check.super_);
                let Some((_, mended)) = mended else { return Ok(None) };
                slot.copy_from_slice(&mended);
                "the bit is changed back"
            }
            What::InodeChecksum => "the inode is sealed anew",
            What::RootMissing => {
                self.make_root(slot)?;
                "the root is made anew"
            }
            What::ReservedInode if !matches!(role, InodeRole::Hidden | InodeRole::Journal) => {
                match role {
                    InodeRole::BadBlocks => {
                        raw.i_mode.set(0);
                        raw.i_links_count.set(0);
                        raw.i_file_acl_lo.set(0);
                        raw.i_file_acl_high.set(0);
                    }
                    _ => slot.fill(0),
                }
                self.edit_super(|raw| {
                    for field in [
                        &mut raw.s_usr_quota_inum,
                        &mut raw.s_grp_quota_inum,
                        &mut raw.s_prj_quota_inum,
                    ]
                    .into_iter()
                    .filter(|field| field.get() == number)
                    {
                        field.set(0);
                    }
                })?;
                "the reserved inode is cleared"
            }
            What::DeletedWithoutTime => {
                raw.i_dtime.set(now);
                "the time of deletion is set"
            }
            What::InOrphanList | What::OnOrphanList => {
                let is_dead = raw.i_links_count.get() == 0;
                raw.i_dtime.set(if is_dead { now } else { 0 });
                if !is_dead && inode_size(raw) > 0 && is_plain {
                    let size = inode_size(raw);
                    self.cut_map(number, slot, size)?;
                }
                self.edit_super(|raw| raw.s_last_orphan.set(0))?;
                "the list of orphans is emptied"
            }
            What::UsedWithDeletionTime => {
                raw.i_dtime.set(0);
                "the time of deletion is cleared"
            }
            What::Mode => {
                work.clears = true;
                "the inode is cleared"
            }
            What::Flags => {
                let kept = match expected.and_then(|it| u32::try_from(it).ok()) {
                    Some(expected) => expected,
                    None => raw.i_flags.get() & !wrong,
                };
                let lost = raw.i_flags.get() & !kept;
                work.rebuilds_directory |= lost & flags::INDEX != 0 && is_directory && is_plain;
                let is_set = kept & !raw.i_flags.get() != 0;
                raw.i_flags.set(kept);
                if is_set { "the flag is set" } else { "the flags are cleared" }
            }
            What::HighHalf => {
                match problem.name.as_deref() {
                    Some(b"i_blocks_hi") => raw.i_blocks_high.set(0),
                    Some(b"i_file_acl_hi") => raw.i_file_acl_high.set(0),
                    Some(b"i_size_high") => raw.i_size_high.set(0),
                    _ => return Ok(None),
                }
                "the field is cleared"
            }
            What::FragmentAddress => {
                raw.i_obso_faddr.set(0);
                "the field is cleared"
            }
            What::ExtraSize => {
                let _ = put16(slot, OLD_BYTES, EXTRA_BYTES);
                "the size is set to 32"
            }
            What::AttributesInInode if raw.i_flags.get() & flags::INLINE_DATA == 0 => {
                let extra = crate::format::le16(slot, OLD_BYTES).unwrap_or(0);
                let from = OLD_BYTES.saturating_add(extra.into());
                slot.get_mut(from..).unwrap_or_default().fill(0);
                "the attributes inside the inode are cleared"
            }
            What::SpecialSize if self.has_own_names(number, raw)? => {
                raw.i_mode.set(raw.i_mode.get() & 0o7777 | 0o040_000);
                "the mode is that of a directory, as its block says"
            }
            What::SpecialSize => {
                raw.i_size_lo.set(0);
                raw.i_size_high.set(0);
                "the size is cleared"
            }
            What::Symlink => {
                match self.symlink_target(number, slot)? {
                    Some(target) => self.set_symlink(number, slot, &target)?,
                    None => work.clears = true,
                }
                if work.clears { "the link is cleared" } else { "the size is the target's" }
            }
            What::Size if expected == Some(0) && is_directory => {
                work.clears = true;
                "the directory without a block is cleared"
            }
            What::Size if problem.found == expected => {
                // The last block lies where no file reaches.
                let size = expected.unwrap_or(0);
                let block_bytes = u64::from(check.super_.block_bytes);
                let size = size.saturating_sub(block_bytes);
                self.cut_map(number, slot, size)?;
                InodeSlot::from_bytes(slot)?.set_size(size);
                "the last block is freed"
            }
            What::Size => {
                let Some(expected) = expected else { return Ok(None) };
                work.has_new_size = true;
                InodeSlot::from_bytes(slot)?.set_size(expected);
                "the size is set"
            }
            What::BlockCount => {
                let Some(expected) = expected else { return Ok(None) };
                raw.i_blocks_lo.set(saturating_u32(expected & u64::from(u32::MAX)));
                let huge =
                    check.super_.read_only_compatible.contains(ReadOnlyCompatible::HUGE_FILE);
                if huge {
                    raw.i_blocks_high.set(u16::try_from(expected >> 32).unwrap_or(u16::MAX));
                }
                "the count is set"
            }
            what if damages_map(what) => {
                work.rebuilds_map = true;
                "the map of blocks is built anew from its valid part"
            }
            What::ExtentFlag => {
                raw.i_flags.set(raw.i_flags.get() | flags::EXTENTS);
                "the flag is set"
            }
            What::InMetadata | What::ClaimedTwice | What::Misaligned if !is_plain => {
                return Ok(None);
            }
            What::InMetadata | What::ClaimedTwice | What::Misaligned => {
                work.shared.extend(problem.block.map(|block| block.0));
                work.rebuilds_map = true;
                "the block is copied"
            }
            What::AttributeBlock => {
                let has_ea_inodes = check.super_.incompatible.contains(Incompatible::EA_INODE);
                let is_target = raw.i_mode.get() & 0o170_000 == 0o120_000
                    && is_fast_symlink(check, raw)
                    && !has_ea_inodes;
                let mut it = InodeSlot::from_bytes(slot)?;
                it.set_xattr_block(0);
                if is_target {
                    // A count tells readers that the target is outside.
                    it.set_sectors(0);
                }
                "the inode has no block of attributes any more"
            }
            What::AttributeChecksum => {
                let Some(at) = problem.block else { return Ok(None) };
                self.reseal_attributes(at, None)?;
                "the block is sealed anew"
            }
            What::AttributeValueReferences => {
                let Some(expected) = expected else { return Ok(None) };
                InodeSlot::from_bytes(slot)?.set_ea_ref_count(expected);
                "the count is set"
            }
            What::AttributeValue => {
                let Some(value) = problem.found.and_then(|it| u32::try_from(it).ok()) else {
                    return Ok(None);
                };
                if !self.remove_value_attributes(slot, value)? {
                    return Ok(None);
                }
                "the attribute is removed"
            }
            What::Encryption => {
                let mut it = InodeSlot::from_bytes(slot)?;
                it.set_flags(it.flags() & !flags::ENCRYPT);
                "the flag is cleared"
            }
            What::InlineData if expected.is_some() => {
                raw.i_flags.set(raw.i_flags.get() | flags::INLINE_DATA);
                "the flag is set"
            }
            What::InlineData | What::AttributesInInode => {
                match renew_inline_value(slot)? {
                    true => {}
                    false if is_directory && is_plain => work.rebuilds_directory = true,
                    false => return Ok(None),
                }
                "what is in the inode itself is kept"
            }
            // The size is one of the problems.
            What::LargeFileFeature if work.has_new_size => return Ok(None),
            What::LargeFileFeature => {
                self.edit_super(|raw| {
                    let all = raw.s_feature_ro_compat.get() | ReadOnlyCompatible::LARGE_FILE.bits();
                    raw.s_feature_ro_compat.set(all);
                })?;
                "the feature is set"
            }
            _ => return Ok(None),
        }))
    }

    /// Returns true if the first block of an inode begins with the entry `.` of a directory, its own.
    fn has_own_names(&self, number: u32, raw: &RawInode) -> Result<bool> {
        let [first, ..] = raw.i_block.map(|word| u64::from(word.get()));
        let check = self.check()?;
        if !check.is_valid_block(first) || check.metadata.contains(check.block_index(first)) {
            return Ok(false);
        }
        let found = parse(&self.block(first)?, 0).map(|(inode, name, _)| (inode, name == b"."));
        Ok(found == Some((number, true)))
    }

    /// Removes the attributes whose value is in inode `value`; returns false if there are none.
    fn remove_value_attributes(&mut self, slot: &mut [u8], value: u32) -> Result<bool> {
        let keeps = |it: &NewXattr| it.ea_inode().is_none_or(|of| of.inode.0 != value);
        let mut it = InodeSlot::from_bytes(slot)?;
        let list = read_body(it.inline_xattrs()).unwrap_or_default();
        let kept: Vec<NewXattr> = list.iter().filter(|it| keeps(it)).cloned().collect();
        if kept.len() < list.len() {
            set_inline_list(&mut it, &kept);
            return Ok(true);
        }
        let at = it.xattr_block();
        if at == 0 {
            return Ok(false);
        }
        let bytes = self.block(at)?;
        let Ok(list) = read_block(&bytes) else { return Ok(false) };
        let kept: Vec<NewXattr> = list.iter().filter(|it| keeps(it)).cloned().collect();
        if kept.len() == list.len() {
            return Ok(false);
        }
        let block_bytes = self.check()?.super_.block_bytes;
        self.put(at, encode_block(&kept, block_bytes, refcount(&bytes).unwrap_or(1)))?;
        self.reseal_attributes(FsBlock(at), None)?;
        Ok(true)
    }

    /// Returns the target of a symbolic link as readers see it: up to its size or its first NUL.
    fn symlink_target(&self, number: u32, slot: &[u8]) -> Result<Option<Vec<u8>>> {
        let check = self.check()?;
        let (raw, _) = RawInode::ref_from_prefix(slot).map_err(|_| Error::corrupt("inode"))?;
        if raw.i_flags.get() & (flags::ENCRYPT | flags::INLINE_DATA) != 0 {
            return Ok(None);
        }
        // A flag alone makes no tree of a target.
        let mut plain = raw.clone();
        let is_tree = raw.i_flags.get() & flags::EXTENTS != 0
            && extent::ExtentNode::check(raw.i_block.as_bytes(), None).is_ok();
        plain.i_flags.set(raw.i_flags.get() & !flags::EXTENTS);
        let bytes = if !is_tree && is_fast_symlink(check, &plain) {
            raw.i_block.map(|word| word.get().to_le_bytes()).as_flattened().to_vec()
        } else {
            match self.runs(number, slot)?.as_slice() {
                [run] if run.from == 0 && run.blocks == 1 => self.block(run.start)?,
                _ => vec![],
            }
        };
        let end = bytes.iter().position(|byte| *byte == 0);
        let len = end.unwrap_or_else(|| saturating_usize(inode_size(raw)));
        let target = bytes.get(..len).filter(|target| target.len() < bytes.len());
        Ok(target.filter(|target| !target.is_empty()).map(<[u8]>::to_vec))
    }

    /// Sets the target, which may move into the inode if it became short.
    fn set_symlink(&self, number: u32, slot: &mut [u8], target: &[u8]) -> Result<()> {
        if fast_symlink_pointers(target).is_none()
            && let Some(run) = self.runs(number, slot)?.first()
        {
            // Readers expect a NUL behind it.
            let mut bytes = self.block(run.start)?;
            bytes.get_mut(target.len()..).unwrap_or_default().fill(0);
            self.put(run.start, bytes)?;
        }
        let mut it = InodeSlot::from_bytes(slot)?;
        it.set_size(target.len() as u64);
        if let Some(pointers) = fast_symlink_pointers(target) {
            it.set_flags(it.flags() & !flags::EXTENTS);
            it.set_pointers(pointers);
            let attributes = u64::from(it.xattr_block() != 0);
            let sectors = u64::from(self.check()?.super_.block_bytes) / 512;
            it.set_sectors(sectors.saturating_mul(attributes));
        }
        Ok(())
    }

    /// Gives the inode a copy of its block of attributes, if others claim it.
    fn copy_shared_attributes(&mut self, slot: &mut [u8], shared: &BTreeSet<u64>) -> Result<()> {
        let mut it = InodeSlot::from_bytes(slot)?;
        let old = it.xattr_block();
        if !shared.contains(&old) {
            return Ok(());
        }
        let new = self.allocate(1)?.first().copied().ok_or(Error::NoSpace)?;
        it.set_xattr_block(new);
        self.put(new, self.block(old)?)?;
        self.reseal_attributes(FsBlock(new), Some(1))
    }

    fn reseal_attributes(&self, at: FsBlock, owners: Option<u32>) -> Result<()> {
        let mut bytes = self.block(at.0)?;
        if let Some(owners) = owners {
            let _ = xattr::set_refcount(&mut bytes, owners);
        }
        if let Some(seed) = self.check()?.super_.checksum_seed {
            xattr::set_checksum(&mut bytes, seed, at);
        }
        self.put(at.0, bytes)
    }

    fn fix_attribute_references(&mut self, problem: &Problem) -> Result<()> {
        let owners = problem.expected.and_then(|it| u32::try_from(it).ok());
        if let (Some(at), Some(owners)) = (problem.block, owners) {
            self.reseal_attributes(at, Some(owners))?;
            self.done(problem, "the count is set");
        }
        Ok(())
    }

    /// Makes an empty root directory.
    fn make_root(&mut self, slot: &mut [u8]) -> Result<()> {
        let extents = self.check()?.super_.incompatible;
        let extents = extents.contains(crate::format::features::Incompatible::EXTENTS);
        let mut it = InodeSlot::from_bytes(slot)?;
        it.clear();
        it.init_extra_fields();
        it.set_mode(0o040_755);
        it.set_links(2);
        it.set_flags(if extents { flags::EXTENTS } else { 0 });
        self.write_directory(ROOT, slot, ROOT, &[])
    }

    pub(super) fn fix_links(&mut self, problems: &[&Problem]) -> Result<()> {
        let mut orphans = vec![];
        for problem in problems {
            let Some(InodeNumber(number)) = problem.inode else { continue };
            match problem.what {
                What::UnattachedEmpty => {
                    self.clear_inode(number)?;
                    self.done(problem, "the empty file is deleted");
                }
                What::Unattached => {
                    let is_value = self.edit_slot(number, |it| it.is_ea_inode())?;
                    if is_value {
                        self.clear_inode(number)?;
                        self.done(problem, "the value that no attribute has is deleted");
                    } else {
                        orphans.push(number);
                        self.done(problem, "the file gets a name in lost+found");
                    }
                }
                What::LinkCount => {
                    let Some(names) = problem.expected else { continue };
                    let is_dir = self.check()?.inode_states.get(number).is_directory();
                    let links = match names {
                        LINK_MAX.. if is_dir => {
                            let feature = Feature::R(ReadOnlyCompatible::DIR_NLINK);
                            self.edit_super(|raw| feature.set(raw, true))?;
                            1
                        }
                        names => u16::try_from(names).unwrap_or(u16::MAX),
                    };
                    self.edit_slot(number, |it| it.set_links(links))?;
                    self.done(problem, "the count is set");
                }
                _ => {}
            }
        }
        self.attach(&orphans)
    }

    /// Takes an unused inode for a new directory.
    pub(super) fn take_inode(&self) -> Result<u32> {
        let check = self.check()?;
        let range = check.super_.first_inode.0..=check.super_.inodes;
        let mut free = range.filter(|number| !check.inode_states.get(*number).is_used());
        free.next().ok_or(Error::NoSpace)
    }

    pub(super) fn empty_slot(&self) -> Result<Vec<u8>> {
        Ok(vec![0; saturating_usize(self.check()?.super_.inode_bytes.into())])
    }
}

/// Returns true for damage of a map, which is built anew.
const fn damages_map(what: What) -> bool {
    matches!(
        what,
        What::PointerOutside | What::ExtentNode | What::ExtentChecksum | What::ExtentStart
    )
}

/// Sets the attributes in an inode, which must fit.
pub(super) fn set_inline_list(it: &mut InodeSlot<'_>, list: &[NewXattr]) {
    let room = it.xattr_capacity();
    match list {
        [] => it.set_inline_xattrs(&[]),
        list => it.set_inline_xattrs(&encode_list(list, room)),
    }
}

/// Gives an inode with contents inside their second part anew, as far as it can be read, and empty
/// without; returns false if it has no room.
fn renew_inline_value(slot: &mut [u8]) -> Result<bool> {
    let (raw, _) = RawInode::ref_from_prefix(slot).map_err(|_| Error::corrupt("inode"))?;
    let outside = inode_size(raw).saturating_sub(POINTER_BYTES as u64);
    let mut value = inline_data_value(slot).unwrap_or_default().to_vec();
    value.truncate(saturating_usize(outside));
    let mut it = InodeSlot::from_bytes(slot)?;
    let mut list = read_body(it.inline_xattrs()).unwrap_or_default();
    list.retain(|it| !it.is_inline_data());
    list.insert(0, NewXattr::from_inline_data(&value));
    let needed = list.iter().map(NewXattr::entry_and_value_bytes).fold(4, usize::saturating_add);
    if needed > it.xattr_capacity() {
        return Ok(false);
    }
    set_inline_list(&mut it, &list);
    let is_file = FileType::from_mode(it.mode().into()) == Some(FileType::File);
    let (raw, _) = RawInode::ref_from_prefix(slot).map_err(|_| Error::corrupt("inode"))?;
    let inside = (POINTER_BYTES as u64).saturating_add(value.len() as u64);
    let size = if is_file { inode_size(raw).min(inside) } else { inside };
    InodeSlot::from_bytes(slot)?.set_size(size);
    Ok(true)
}
