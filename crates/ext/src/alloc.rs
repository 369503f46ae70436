//! Which blocks and inodes are free, and which of them to take.
//!
//! ```text
//!   bitmap on disk ── buffer: what is used now ──┐
//!                                                ├─ search image: what must not be given out
//!   freed, but the freeing is not durable ───────┤
//!   kept for a growing file: its window ─────────┘
//! ```
//! Law 1: nothing freed is given out before the freeing is durable.
//! Law 2: bitmaps decide; a count that disagrees with its bitmap is damage on a volume that
//! was unmounted properly, and is corrected on one that was not.
//! Law 3: the volume's own blocks are never given out and never freed, whatever its bitmaps
//! say.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with block numbers of a volume of fewer than 2^32 blocks"
)]

use std::collections::HashMap;

use draconis_exchange::contract::Kind;

use crate::blocks::Store;
use crate::blocks::overlay::State;
use crate::blocks::role::Role;
use crate::format::bitmap::{self, BitRun, Bitmap};
use crate::format::group::RawGroup;
use crate::format::inode::flags;
use crate::format::superblock::Superblock;
use crate::transaction::Transaction;
use crate::units::{index, narrow};
use crate::{Error, FsBlock, GroupNumber, InodeNumber, Result};

/// Groups of a volume that is written: 128 TiB in blocks of 4 KiB.
const MOST_GROUPS: u32 = 1 << 20;
/// Blocks kept for a file that grows: at first, and at most.
const WINDOW_BLOCKS: (u32, u32) = (8, 1024);
/// Files that may have a window at once.
const MOST_WINDOWS: usize = 256;

/// A block group, as it is now.
#[derive(Debug)]
pub(crate) struct Group {
    first: u64,
    blocks: u32,
    block_bitmap: FsBlock,
    inode_bitmap: FsBlock,
    pub(crate) table: FsBlock,
    inodes: u32,
    pub(crate) free_blocks: u32,
    pub(crate) free_inodes: u32,
    pub(crate) directories: u32,
    /// The counts differ from the descriptor.
    pub(crate) changed: bool,
    /// What must not be given out; `None` until it is needed.
    search: Option<Search>,
}

#[derive(Debug)]
struct Search {
    blocks: Vec<u8>,
    inodes: Vec<u8>,
}

/// Blocks that a growing file will take next.
#[derive(Clone, Copy, Debug)]
struct Window {
    next: u64,
    end: u64,
    /// How large it was made.
    len: u32,
}

fn bits(bytes: &[u8]) -> Bitmap<'_> {
    Bitmap::new(bytes, u32::MAX)
}

fn mark(bytes: &mut [u8], start: u32, len: u32, used: bool) {
    bitmap::fill(bytes, BitRun { start, len }, used);
}

fn is_all(bytes: &[u8], start: u32, len: u32, used: bool) -> bool {
    bits(bytes).is_all(BitRun { start, len }, used)
}

/// All groups.
#[derive(Debug)]
pub(crate) struct Groups {
    all: Vec<Group>,
    /// The volume's own blocks, in order: first and end.
    own: Vec<(u64, u64)>,
    pub(crate) free_blocks: u64,
    pub(crate) free_inodes: u64,
    directories: u64,
    /// Free blocks that must not be given out yet.
    frozen_blocks: u64,
    frozen_inodes: u64,
    windows: HashMap<u32, Window>,
    /// Counts may be wrong: the volume was not unmounted properly.
    forgiving: bool,
    per_group: (u32, u32),
    first_data_block: u64,
}

impl Groups {
    /// Reads all descriptors.
    pub(crate) fn load(store: &Store, super_: &Superblock) -> Result<Self> {
        if super_.groups > MOST_GROUPS {
            let feature = format!("writing needs: {} groups", super_.groups);
            return Err(Error::Unsupported { feature });
        }
        let mut all = Vec::with_capacity(index(super_.groups.into()));
        let mut own = vec![(0, u64::from(super_.first_data_block) + 1)];
        for number in (0..super_.groups).map(GroupNumber) {
            let (at, slot) = super_.descriptor_place(number);
            let bytes = store.block(at, Role::Descriptors)?;
            let group = Group::read(RawGroup::view(&bytes, slot, super_)?, number, super_)
                .map_err(|error| error.in_block(at))?;
            own.push((group.block_bitmap.0, group.block_bitmap.0 + 1));
            own.push((group.inode_bitmap.0, group.inode_bitmap.0 + 1));
            let table = u64::from(super_.inode_table_blocks());
            own.push((group.table.0, group.table.0 + table));
            let head = super_.head_blocks(number);
            own.push((group.first, group.first + head));
            all.push(group);
        }
        let own = disjoint(own)?;
        let sum = |count: fn(&Group) -> u32| all.iter().map(|group| u64::from(count(group))).sum();
        let (free_blocks, free_inodes) = (sum(|it| it.free_blocks), sum(|it| it.free_inodes));
        let directories = sum(|it| it.directories);
        Ok(Self {
            own,
            free_blocks,
            free_inodes,
            directories,
            frozen_blocks: 0,
            frozen_inodes: 0,
            windows: HashMap::new(),
            forgiving: !super_.clean,
            per_group: (super_.blocks_per_group, super_.inodes_per_group),
            first_data_block: super_.first_data_block.into(),
            all,
        })
    }

    pub(crate) fn get(&self, group: u32) -> Option<&Group> {
        self.all.get(index(group.into()))
    }

    fn get_mut(&mut self, group: u32) -> Result<&mut Group> {
        self.all.get_mut(index(group.into())).ok_or(Error::corrupt("group number"))
    }

    /// Groups whose counts changed.
    pub(crate) fn changed(&self) -> impl Iterator<Item = GroupNumber> + '_ {
        (0..).map(GroupNumber).zip(&self.all).filter(|(_, group)| group.changed).map(|(nth, _)| nth)
    }

    /// Groups whose counts changed; they count as written from now on.
    pub(crate) fn take_changed(&mut self) -> Vec<(GroupNumber, [u32; 3])> {
        let changed = (0..).map(GroupNumber).zip(&mut self.all).filter(|(_, group)| group.changed);
        changed
            .map(|(number, group)| {
                group.changed = false;
                (number, [group.free_blocks, group.free_inodes, group.directories])
            })
            .collect()
    }

    fn group_of(&self, block: u64) -> Option<(u32, u32)> {
        let nth = block.checked_sub(self.first_data_block)?;
        let per_group = u64::from(self.per_group.0);
        Some((narrow(nth / per_group), narrow(nth % per_group)))
    }

    /// The group and the place in it of an inode.
    pub(crate) fn place_of_inode(&self, inode: InodeNumber) -> Option<(u32, u32)> {
        let nth = inode.0.checked_sub(1)?;
        Some((nth / self.per_group.1, nth % self.per_group.1))
    }

    /// Whether any of these blocks is the volume's own.
    fn owns(&self, start: u64, end: u64) -> bool {
        let nth = self.own.partition_point(|(_, own_end)| *own_end <= start);
        self.own.get(nth).is_some_and(|(own_start, _)| *own_start < end)
    }

    /// What was freed may be given out again.
    pub(crate) fn thaw(&mut self, blocks: &[(u64, u32)], inodes: &[u32]) {
        let count: u64 = blocks.iter().map(|(_, count)| u64::from(*count)).sum();
        self.frozen_blocks = self.frozen_blocks.saturating_sub(count);
        self.frozen_inodes = self.frozen_inodes.saturating_sub(inodes.len() as u64);
        self.unmark(blocks, inodes);
    }

    /// Whether anything was freed that must not be given out yet.
    pub(crate) fn has_frozen(&self) -> bool {
        self.frozen_blocks > 0 || self.frozen_inodes > 0
    }

    /// Lets these be found again.
    fn unmark(&mut self, blocks: &[(u64, u32)], inodes: &[u32]) {
        for &(start, count) in blocks {
            let Some((group, at)) = self.group_of(start) else { continue };
            if let Ok(Group { search: Some(search), .. }) = self.get_mut(group) {
                mark(&mut search.blocks, at, count, false);
            }
        }
        for &inode in inodes {
            let Some((group, at)) = self.place_of_inode(InodeNumber(inode)) else { continue };
            if let Ok(Group { search: Some(search), .. }) = self.get_mut(group) {
                mark(&mut search.inodes, at, 1, false);
            }
        }
    }

    /// Gives up the window of a file.
    pub(crate) fn drop_window(&mut self, inode: u32) {
        if let Some(window) = self.windows.remove(&inode) {
            let count = narrow(window.end - window.next);
            self.unmark(&[(window.next, count)], &[]);
        }
    }

    fn drop_windows(&mut self) -> bool {
        let all: Vec<u32> = self.windows.keys().copied().collect();
        all.iter().for_each(|inode| self.drop_window(*inode));
        !all.is_empty()
    }

    /// Makes the search image of a group.
    fn prepare(&mut self, number: u32, store: &Store, super_: &Superblock) -> Result<()> {
        let (forgiving, first_inode) = (self.forgiving, super_.first_inode.0);
        let own: Vec<(u64, u64)> = {
            let group = self.get_mut(number)?;
            if group.search.is_some() {
                return Ok(());
            }
            let (first, end) = (group.first, group.first + u64::from(group.blocks));
            let from = self.own.partition_point(|(_, own_end)| *own_end <= first);
            let rest = self.own.get(from..).unwrap_or_default().iter();
            rest.take_while(|(start, _)| *start < end)
                .map(|&(a, b)| (a.max(first) - first, b.min(end) - first))
                .collect()
        };
        let group = self.get_mut(number)?;
        let mut blocks = store.block(group.block_bitmap, Role::BlockBitmap(number))?.to_vec();
        let mut inodes = store.block(group.inode_bitmap, Role::InodeBitmap(number))?.to_vec();
        let corrupt = |what, at| Err(Error::corrupt(what).in_block(at));
        for (start, end) in own {
            let (at, count) = (narrow(start), narrow(end - start));
            if !is_all(&blocks, at, count, true) {
                return corrupt("block bitmap: the volume's own block is free", group.block_bitmap);
            }
        }
        if number == 0 {
            mark(&mut inodes, 0, first_inode.saturating_sub(1).min(group.inodes), true);
        }
        let free = [
            Bitmap::new(&blocks, group.blocks).count_zeros(),
            Bitmap::new(&inodes, group.inodes).count_zeros(),
        ];
        let claimed = [group.free_blocks, group.free_inodes];
        if free != claimed {
            if !forgiving {
                return corrupt("group descriptor: free counts", group.block_bitmap);
            }
            [group.free_blocks, group.free_inodes] = free;
            group.changed = true;
        }
        // Nothing beyond the end is ever found.
        let past = |len: usize, count: u32| narrow((len as u64) * 8).saturating_sub(count);
        let (all_blocks, all_inodes) =
            (past(blocks.len(), group.blocks), past(inodes.len(), group.inodes));
        mark(&mut blocks, group.blocks, all_blocks, true);
        mark(&mut inodes, group.inodes, all_inodes, true);
        group.search = Some(Search { blocks, inodes });
        if free != claimed {
            let sum =
                |a: u64, new: u32, old: u32| (a + u64::from(new)).saturating_sub(u64::from(old));
            self.free_blocks = sum(self.free_blocks, free[0], claimed[0]);
            self.free_inodes = sum(self.free_inodes, free[1], claimed[1]);
        }
        Ok(())
    }
}

impl Group {
    fn read(raw: &RawGroup, number: GroupNumber, super_: &Superblock) -> Result<Self> {
        let table = raw.check(super_)?.inode_table;
        let first = super_.group_start(number).0;
        let on_volume = |block: u32, what| {
            let block = FsBlock(block.into());
            if super_.holds(block) { Ok(block) } else { Err(Error::corrupt(what)) }
        };
        let blocks = narrow(super_.blocks.saturating_sub(first)).min(super_.blocks_per_group);
        let before = u64::from(number.0) * u64::from(super_.inodes_per_group);
        let inodes = narrow(u64::from(super_.inodes).saturating_sub(before));
        let inodes = inodes.min(super_.inodes_per_group);
        Ok(Self {
            first,
            blocks,
            block_bitmap: on_volume(
                raw.bg_block_bitmap_lo.get(),
                "group descriptor: block bitmap",
            )?,
            inode_bitmap: on_volume(
                raw.bg_inode_bitmap_lo.get(),
                "group descriptor: inode bitmap",
            )?,
            table,
            inodes,
            free_blocks: u32::from(raw.bg_free_blocks_count_lo.get()).min(blocks),
            free_inodes: u32::from(raw.bg_free_inodes_count_lo.get()).min(inodes),
            directories: raw.bg_used_dirs_count_lo.get().into(),
            changed: false,
            search: None,
        })
    }
}

/// Ranges in order, those that touch made one.
fn disjoint(mut ranges: Vec<(u64, u64)>) -> Result<Vec<(u64, u64)>> {
    ranges.retain(|(start, end)| start < end);
    ranges.sort_unstable();
    let mut out: Vec<(u64, u64)> = Vec::new();
    for (start, end) in ranges {
        match out.last_mut() {
            // The first block of a group counts with the boot block and with its group.
            Some(last) if start < last.1 && start > 1 => {
                let what = "group descriptor: two groups claim one block";
                return Err(Error::corrupt(what).in_block(FsBlock(start)));
            }
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => out.push((start, end)),
        }
    }
    out.shrink_to_fit();
    Ok(out)
}

impl Superblock {
    /// Blocks at the start of a group that hold the superblock, the descriptors and what is
    /// kept for more of them.
    fn head_blocks(&self, group: GroupNumber) -> u64 {
        let super_ = u64::from(self.has_superblock(group));
        let (first, _) = self.descriptor_place(group);
        let meta = first.0.saturating_sub(self.group_start(group).0) <= 1 && group.0 > 0;
        match super_ {
            0 => u64::from(meta && first >= self.group_start(group)),
            _ if self.incompatible.contains(crate::format::features::Incompatible::META_BG) => {
                let classic = self.first_meta_group.min(self.descriptor_blocks());
                1 + u64::from(classic).max(u64::from(meta))
            }
            _ => {
                let table = u64::from(self.descriptor_blocks());
                1 + table + u64::from(self.reserved_descriptor_blocks)
            }
        }
    }
}

/// Where to look for blocks, and for whom.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// The best first block.
    pub(crate) goal: u64,
    /// How many, at least 1.
    pub(crate) want: u32,
    /// The file, if it is one that grows at its end.
    pub(crate) grows: Option<u32>,
    /// May take what is kept for the superuser.
    pub(crate) privileged: bool,
}

impl Transaction<'_> {
    /// Blocks that may be taken by such a user, the frozen ones among them.
    pub(crate) fn available(&self, privileged: bool) -> u64 {
        let reserved = if privileged { 0 } else { self.volume.super_.reserved_blocks };
        self.writer.groups.free_blocks.saturating_sub(reserved)
    }

    /// Those of them that may be taken now.
    pub(crate) fn available_now(&self, privileged: bool) -> u64 {
        self.available(privileged).saturating_sub(self.writer.groups.frozen_blocks)
    }

    /// Takes up to `want` blocks that follow each other; [`Error::NoSpace`] if there is
    /// none.
    pub(crate) fn allocate_blocks(&mut self, request: Request) -> Result<(u64, u32)> {
        let want = u64::from(request.want).min(self.available(request.privileged));
        let request = Request { want: narrow(want), ..request };
        if request.want == 0 {
            return Err(Error::NoSpace);
        }
        self.have_bitmap_of(request.goal)?;
        if let Some(found) = self.take_from_window(request) {
            return self.take_found(found);
        }
        if let Some(grows) = request.grows {
            self.writer.groups.drop_window(grows);
        }
        let found = match self.find_blocks(request)? {
            Some(found) => found,
            None if self.writer.groups.drop_windows() => {
                self.find_blocks(request)?.ok_or(Error::NoSpace)?
            }
            None => return Err(Error::NoSpace),
        };
        let taken = self.take_found(found)?;
        if let Some(grows) = request.grows {
            self.open_window(grows, taken);
        }
        Ok(taken)
    }

    fn take_found(&mut self, (start, count): (u64, u32)) -> Result<(u64, u32)> {
        self.mark_used(start, count)?;
        Ok((start, count))
    }

    fn take_from_window(&mut self, request: Request) -> Option<(u64, u32)> {
        let window = self.writer.groups.windows.get_mut(&request.grows?)?;
        if window.next != request.goal {
            return None;
        }
        let count = narrow(window.end - window.next).min(request.want);
        let start = window.next;
        window.next += u64::from(count);
        if window.next >= window.end {
            // Used up: the next one is twice as large.
            window.end = window.next;
        }
        (count > 0).then_some((start, count))
    }

    /// Keeps free blocks behind those that a file was just given.
    fn open_window(&mut self, inode: u32, (start, count): (u64, u32)) {
        let groups = &mut self.writer.groups;
        let before = groups.windows.get(&inode).map_or(0, |window| window.len);
        let len =
            (before * 2).clamp(WINDOW_BLOCKS.0, WINDOW_BLOCKS.1).max(count.min(WINDOW_BLOCKS.1));
        let next = start + u64::from(count);
        let Some((group, at)) = groups.group_of(next) else { return };
        if groups.windows.len() >= MOST_WINDOWS {
            groups.drop_windows();
        }
        let Ok(Group { search: Some(search), .. }) = groups.get_mut(group) else { return };
        let kept = bits(&search.blocks).zeros_at(at, len);
        if kept > 0 {
            mark(&mut search.blocks, at, kept, true);
            groups.windows.insert(inode, Window { next, end: next + u64::from(kept), len });
        }
    }

    /// Makes the search image of a group, if there is none.
    fn prepare_group(&mut self, number: u32) -> Result<()> {
        let Some(Group { search: None, block_bitmap, inode_bitmap, .. }) =
            self.writer.groups.get(number)
        else {
            return Ok(());
        };
        self.block(*block_bitmap, Role::BlockBitmap(number))?;
        self.block(*inode_bitmap, Role::InodeBitmap(number))?;
        self.writer.groups.prepare(number, &self.volume.store, &self.volume.super_)
    }

    /// Sees to it that a bitmap can be changed without the device, before what is counted
    /// beside it is; where it is.
    fn have_bitmap(&self, number: u32, role: Role) -> Result<FsBlock> {
        let group = self.writer.groups.get(number).ok_or(Error::corrupt("group number"))?;
        let at = match role {
            Role::InodeBitmap(_) => group.inode_bitmap,
            _ => group.block_bitmap,
        };
        self.block(at, role).map(|_| at)
    }

    /// The same of the group of a block, and its search image.
    pub(crate) fn have_bitmap_of(&mut self, block: u64) -> Result<()> {
        let Some((number, _)) = self.writer.groups.group_of(block) else { return Ok(()) };
        if self.writer.groups.get(number).is_none() {
            return Ok(());
        }
        self.prepare_group(number)?;
        self.have_bitmap(number, Role::BlockBitmap(number)).map(drop)
    }

    /// Finds blocks, but does not take them.
    fn find_blocks(&mut self, request: Request) -> Result<Option<(u64, u32)>> {
        let super_ = &self.volume.super_;
        let goal = request.goal.clamp(u64::from(super_.first_data_block), super_.blocks - 1);
        let (first_group, at) =
            self.writer.groups.group_of(goal).ok_or(Error::corrupt("block number"))?;
        let count = super_.groups;
        let mut best: Option<(u64, u32)> = None;
        for step in 0..count {
            let number = (first_group + step) % count;
            let Some(group) = self.writer.groups.get(number) else { continue };
            if group.free_blocks == 0 {
                continue;
            }
            self.prepare_group(number)?;
            let Some(Group { first, search: Some(search), .. }) = self.writer.groups.get(number)
            else {
                continue;
            };
            let from = if step == 0 { at } else { 0 };
            // Right behind what came before is the best place, however short.
            if step == 0 {
                let run = bits(&search.blocks).zeros_at(from, request.want);
                if run > 0 {
                    return Ok(Some((first + u64::from(from), run)));
                }
            }
            let mut found = bits(&search.blocks).next_zero_run(from, request.want);
            if from > 0 && found.is_none_or(|found| found.len < request.want) {
                let wrapped = bits(&search.blocks).next_zero_run(0, request.want);
                found = [found, wrapped].into_iter().flatten().max_by_key(|run| run.len);
            }
            let Some(BitRun { start: at, len: run }) = found else { continue };
            let found = (first + u64::from(at), run);
            if run >= request.want {
                return Ok(Some(found));
            }
            if best.is_none_or(|(_, best)| best < run) {
                best = Some(found);
            }
            // Near and large enough is better than whole and far away.
            if step >= 8 && best.is_some_and(|(_, run)| run >= 64) {
                break;
            }
        }
        Ok(best)
    }

    fn mark_used(&mut self, start: u64, count: u32) -> Result<()> {
        let (number, at) =
            self.writer.groups.group_of(start).ok_or(Error::corrupt("block number"))?;
        if self.writer.groups.owns(start, start + u64::from(count)) {
            return Err(Error::corrupt("block bitmap: the volume's own block is free"));
        }
        let bitmap_at = self.have_bitmap(number, Role::BlockBitmap(number))?;
        self.may_wait = true;
        let group = self.writer.groups.get_mut(number)?;
        group.free_blocks = group.free_blocks.saturating_sub(count);
        group.changed = true;
        if let Some(search) = &mut group.search {
            mark(&mut search.blocks, at, count, true);
        }
        self.writer.groups.free_blocks =
            self.writer.groups.free_blocks.saturating_sub(u64::from(count));
        let new = self.change(bitmap_at, Role::BlockBitmap(number), |bits| {
            let new = is_all(bits, at, count, false);
            mark(bits, at, count, true);
            new
        })?;
        if !new {
            return Err(Error::corrupt("block bitmap").in_block(bitmap_at));
        }
        Ok(())
    }

    /// Gives blocks back that nothing leads to any more.
    pub(crate) fn free_blocks(&mut self, start: u64, count: u32) -> Result<()> {
        let mut start = start;
        let mut left = count;
        while left > 0 {
            let wrong = Error::corrupt("block map: pointer").in_block(FsBlock(start));
            let end = start + u64::from(left);
            if end > self.volume.super_.blocks || self.writer.groups.owns(start, end) {
                return Err(wrong);
            }
            let (number, at) = self.writer.groups.group_of(start).ok_or(wrong.clone())?;
            self.prepare_group(number)?;
            let bitmap_at = self.have_bitmap(number, Role::BlockBitmap(number))?;
            self.may_wait = true;
            let group = self.writer.groups.get_mut(number)?;
            let now = left.min(group.blocks.saturating_sub(at));
            if now == 0 {
                return Err(wrong);
            }
            group.free_blocks += now;
            group.changed = true;
            self.writer.groups.free_blocks += u64::from(now);
            let used = self.change(bitmap_at, Role::BlockBitmap(number), |bits| {
                let used = is_all(bits, at, now, true);
                mark(bits, at, now, false);
                used
            })?;
            if !used {
                return Err(
                    Error::corrupt("block bitmap: a used block is free").in_block(FsBlock(start))
                );
            }
            self.freeze(bitmap_at, start, at, now);
            start += u64::from(now);
            left -= now;
        }
        Ok(())
    }

    /// Blocks that were taken in this batch are free at once: the disk never knew.
    fn freeze(&mut self, bitmap_at: FsBlock, start: u64, at: u32, count: u32) {
        let store = &self.volume.store;
        let mut changing = store.overlay.change();
        for block in (start..start + u64::from(count)).map(FsBlock) {
            changing.drop_block(block);
        }
        let mut new = Vec::new();
        if let Some(buffer) = changing.metadata.get(&bitmap_at.0)
            && let State::Changed(base) = &buffer.state
        {
            // One by one: this is rare but in short-lived files, which are small.
            let mut nth = 0;
            while nth < count {
                let fresh = bits(base).zeros_at(at + nth, count - nth);
                if fresh > 0 {
                    new.push((start + u64::from(nth), fresh));
                }
                nth += fresh;
                let known = bits(base).ones_at(at + nth, count - nth);
                if known > 0 {
                    self.writer.batch.freed.push((start + u64::from(nth), known));
                    self.writer.groups.frozen_blocks += u64::from(known);
                }
                nth += known;
            }
        } else {
            self.writer.batch.freed.push((start, count));
            self.writer.groups.frozen_blocks += u64::from(count);
        }
        drop(changing);
        self.writer.groups.unmark(&new, &[]);
    }

    /// Counts what is free in every group; the inodes that are marked as used.
    pub(crate) fn used_inodes(&mut self) -> Result<Vec<InodeNumber>> {
        let super_ = &self.volume.super_;
        let mut used = Vec::new();
        for number in 0..super_.groups {
            self.prepare_group(number)?;
            let Some(Group { inodes, search: Some(search), .. }) = self.writer.groups.get(number)
            else {
                continue;
            };
            let bits = Bitmap::new(&search.inodes, *inodes);
            let mut at = 0;
            while let Some(found) = bits.next_one(at) {
                let inode = InodeNumber(number * super_.inodes_per_group + found + 1);
                if inode >= super_.first_inode {
                    used.push(inode);
                }
                at = found + 1;
            }
        }
        Ok(used)
    }

    /// Takes an inode near `dir`.
    pub(crate) fn allocate_inode(&mut self, dir: InodeNumber, kind: Kind) -> Result<InodeNumber> {
        if self.writer.groups.free_inodes == 0 {
            return Err(Error::NoSpace);
        }
        let (own_group, _) = self.writer.groups.place_of_inode(dir).ok_or(Error::NotFound)?;
        let groups = self.volume.super_.groups;
        let first = if kind == Kind::Directory { self.spread(dir, own_group)? } else { own_group };
        // Files: their directory's group, then ever farther ones, then any.
        let hops = (0..31u32).map(|hop| (1u32 << hop) - 1).take_while(|hop| *hop < groups);
        let order = hops.chain(0..groups).map(|hop| (first + hop) % groups);
        for number in order {
            let Some(group) = self.writer.groups.get(number) else { continue };
            if group.free_inodes == 0
                || (kind == Kind::File && group.free_blocks == 0 && number != first)
            {
                continue;
            }
            self.prepare_group(number)?;
            if let Some(inode) = self.allocate_inode_in(number, kind)? {
                return Ok(inode);
            }
        }
        for number in 0..groups {
            self.prepare_group(number)?;
            if let Some(inode) = self.allocate_inode_in(number, kind)? {
                return Ok(inode);
            }
        }
        Err(Error::NoSpace)
    }

    fn allocate_inode_in(&mut self, number: u32, kind: Kind) -> Result<Option<InodeNumber>> {
        let per_group = self.volume.super_.inodes_per_group;
        let bitmap_at = self.have_bitmap(number, Role::InodeBitmap(number))?;
        let Some(Group { search: Some(search), .. }) = self.writer.groups.get(number) else {
            return Ok(None);
        };
        let Some(at) = bits(&search.inodes).next_zero(0) else { return Ok(None) };
        // It is going to be written.
        self.read_slot(InodeNumber(number * per_group + at + 1), |_| ())?;
        self.may_wait = true;
        let group = self.writer.groups.get_mut(number)?;
        let Some(search) = &mut group.search else { return Ok(None) };
        mark(&mut search.inodes, at, 1, true);
        group.free_inodes = group.free_inodes.saturating_sub(1);
        group.directories += u32::from(kind == Kind::Directory);
        group.changed = true;
        self.writer.groups.directories += u64::from(kind == Kind::Directory);
        self.writer.groups.free_inodes = self.writer.groups.free_inodes.saturating_sub(1);
        self.change(bitmap_at, Role::InodeBitmap(number), |bits| mark(bits, at, 1, true))?;
        Ok(Some(InodeNumber(number * per_group + at + 1)))
    }

    /// Marks an inode as used that is not to be given out, if it is not marked.
    pub(crate) fn set_aside(&mut self, inode: InodeNumber) -> Result<()> {
        let (number, at) = self.writer.groups.place_of_inode(inode).ok_or(Error::NotFound)?;
        self.prepare_group(number)?;
        let bitmap_at = self.have_bitmap(number, Role::InodeBitmap(number))?;
        self.may_wait = true;
        let group = self.writer.groups.get_mut(number)?;
        let Some(search) = &mut group.search else { return Ok(()) };
        if is_all(&search.inodes, at, 1, true) {
            return Ok(());
        }
        mark(&mut search.inodes, at, 1, true);
        group.free_inodes = group.free_inodes.saturating_sub(1);
        group.changed = true;
        self.writer.groups.free_inodes = self.writer.groups.free_inodes.saturating_sub(1);
        self.change(bitmap_at, Role::InodeBitmap(number), |bits| mark(bits, at, 1, true))
    }

    /// Gives an inode back that no name leads to any more.
    pub(crate) fn free_inode(&mut self, inode: InodeNumber, kind: Kind) -> Result<()> {
        let (number, at) = self.writer.groups.place_of_inode(inode).ok_or(Error::NotFound)?;
        self.prepare_group(number)?;
        let bitmap_at = self.have_bitmap(number, Role::InodeBitmap(number))?;
        self.may_wait = true;
        let group = self.writer.groups.get_mut(number)?;
        group.free_inodes += 1;
        group.directories = group.directories.saturating_sub(u32::from(kind == Kind::Directory));
        group.changed = true;
        self.writer.groups.free_inodes += 1;
        let fewer = u64::from(kind == Kind::Directory);
        self.writer.groups.directories = self.writer.groups.directories.saturating_sub(fewer);
        self.writer.groups.drop_window(inode.0);
        let used = self.change(bitmap_at, Role::InodeBitmap(number), |bits| {
            let used = is_all(bits, at, 1, true);
            mark(bits, at, 1, false);
            used
        })?;
        if !used {
            return Err(Error::corrupt("inode bitmap: a used inode is free").of_inode(inode));
        }
        if self.writer.batch.born.remove(&inode.0) {
            self.writer.groups.unmark(&[], &[inode.0]);
        } else {
            self.writer.batch.freed_inodes.push(inode.0);
            self.writer.groups.frozen_inodes += 1;
        }
        Ok(())
    }

    /// The group for a new directory: near its parent while there is room for its files,
    /// but those at the top of the tree are spread (Orlov's allocator).
    fn spread(&mut self, parent: InodeNumber, own_group: u32) -> Result<u32> {
        let groups = self.volume.super_.groups;
        let count = u64::from(groups);
        let all = &self.writer.groups;
        let mean_inodes = narrow(all.free_inodes / count);
        let mean_blocks = narrow(all.free_blocks / count);
        let top = parent == InodeNumber::ROOT || self.node(parent)?.flags & flags::TOP_DIR != 0;
        let order = |start: u32| (0..groups).map(move |step| (start + step) % groups);
        let room = |group: &Group, inodes: u32, blocks: u32| {
            group.free_inodes > 0 && group.free_inodes >= inodes && group.free_blocks >= blocks
        };
        if top {
            // The one with the fewest directories among those with average room.
            let start = self.writer.turn % groups;
            self.writer.turn = self.writer.turn.wrapping_add(1);
            let found = order(start)
                .filter_map(|number| all.get(number).map(|group| (number, group)))
                .filter(|(_, group)| room(group, mean_inodes, mean_blocks))
                .min_by_key(|(_, group)| group.directories);
            if let Some((number, _)) = found {
                return Ok(number);
            }
        }
        let per_group = self.volume.super_.inodes_per_group;
        let most = narrow(all.directories / count) + per_group / 16;
        let least_inodes = mean_inodes.saturating_sub(per_group / 4);
        let least_blocks = mean_blocks.saturating_sub(self.volume.super_.blocks_per_group / 4);
        let found = order(own_group).find(|number| {
            all.get(*number).is_some_and(|group| {
                group.directories < most && room(group, least_inodes.max(1), least_blocks)
            })
        });
        Ok(found.unwrap_or(own_group))
    }
}
