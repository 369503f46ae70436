//! A plan to grow, written: what is beyond the end first, the superblock last.
//!
//! ```text
//!   beyond the end   bitmaps, tables and copies of new groups            not seen yet
//!   1                superblock: not clean, no reserve
//!   2                top of the reserve's map: empty
//!   3                descriptors, their copies; reserved blocks with more pointers
//!   4                superblock: more blocks, groups and inodes
//!   5                the group that was last: what it gained is free; top; owner of the reserve
//!   6                superblock: all counts, the reserve, clean
//! ```
//! Each stage is durable before the next is written.
//!
//! Law 1: a superblock changes by one sector, and the volume is sound before and after: what
//! makes the new groups real (`s_blocks_count`, `s_inodes_count`, their free counts, the length
//! of the reserve) is all in its first.
//! Law 2: no bitmap calls free what the superblock does not have yet.
//! Law 3: no block has two meanings: before a block of the reserve becomes one of descriptors,
//! or gets pointers beyond the end, nothing leads to it.
//!
//! A power cut before stage 1 leaves the volume as it was; later, one that is marked as not
//! clean and that `e2fsck -p` mends without a question: blocks marked as used that are not,
//! and wrong counts. If the reserve had to change, it is lost then: the volume cannot grow beyond
//! the descriptor blocks that it has by then. Files are never at stake.

use draconis_device::{Disk, Group, Ticket, Write};
use draconis_exchange::contract::Time;
use draconis_exchange::heap::Block;
use zerocopy::{FromZeros, IntoBytes};

use super::{Error, Growth, Owner, Result, reserve, tables};
use crate::format::bitmap::{BitRun, fill};
use crate::format::group::RawGroup;
use crate::format::put32;
use crate::format::slot::{Slot, Stamp};
use crate::format::superblock::{OFFSET_BYTES, RawSuperblock, STATE_CLEAN, Superblock};
use crate::units::{index, narrow};
use crate::{FsBlock, GroupNumber};

/// What a disk writes as a whole or not at all.
pub(super) const SECTOR_BYTES: u64 = 512;
/// Bytes of one request for zeros.
const REQUEST_BYTES: u64 = 1 << 20;
/// Bytes that may be on their way before they are waited for.
const UNDER_WAY_BYTES: u64 = 16 << 20;

/// Where a plan is written.
pub struct Target<'a> {
    /// The disk; as long as the volume is to be.
    pub disk: &'a dyn Disk,
    /// From this byte on it reads as zeros, so that zeros need not be written.
    pub zeroed_from_bytes: u64,
    /// When the volume is said to have been written.
    pub now: Time,
    /// Called with bytes of new groups that were handed to the disk.
    pub progress: &'a dyn Fn(u64),
}

impl Growth {
    /// Bytes of new groups that are written where nothing reads as zeros, for a bar of progress.
    pub fn bytes_to_write(&self, zeroed_from_bytes: u64) -> u64 {
        let blocks = |group: GroupNumber| {
            let start = self.new.group_start(group).0;
            let most = zeroed_from_bytes.checked_div(self.new.block_bytes.into()).unwrap_or(0);
            let zeros = tables(&self.new).saturating_sub(2).min(most.saturating_sub(start));
            zeros.saturating_add(2)
        };
        let blocks = self.new_groups().fold(0u64, |all, group| all.saturating_add(blocks(group)));
        blocks.saturating_mul(self.new.block_bytes.into())
    }

    /// Grows the volume, and waits until that is durable.
    ///
    /// # Errors
    /// [`Error::ShortDisk`], and what the device says.
    pub fn write(&self, target: &Target<'_>) -> Result<()> {
        let (disk_bytes, needed_bytes) = (target.disk.properties().len_bytes, self.len_bytes());
        if needed_bytes > disk_bytes {
            return Err(Error::ShortDisk { disk_bytes, needed_bytes });
        }
        if self.old.blocks == self.new.blocks {
            return Ok(());
        }
        let grown = self.grown(target)?;
        let mut writer =
            Writer { target, block_bytes: self.new.block_bytes, under_way: 0, after: vec![] };
        for group in self.new_groups() {
            self.write_group(&mut writer, &grown, group)?;
        }
        let [begin, top_empty, tables, real, freed, end] = self.stages(&grown, &writer)?;
        writer.follow(vec![Group::default(), begin, top_empty])?;
        for group in (1..self.old.groups).map(GroupNumber) {
            if self.new.has_superblock(group) {
                let copy = grown.copy(group, self.new.block_bytes);
                writer.submit(writer.write(self.new.group_start(group), &copy))?;
            }
        }
        writer.follow(vec![tables, real, freed, end])?;
        writer.wait()
    }

    /// All descriptors and counts as they are to be.
    fn grown(&self, target: &Target<'_>) -> Result<Grown> {
        let mut descriptors = self.descriptors.clone();
        // What is behind the last descriptor may be anything.
        let len = u64::from(self.old.groups).saturating_mul(self.old.descriptor_bytes.into());
        descriptors.truncate(index(len));
        let mut free = self.old.free_blocks;
        for group in self.new_groups() {
            let raw = self.new_descriptor(group)?;
            free = free.saturating_add(raw.bg_free_blocks_count_lo.get().into());
            descriptors.extend(raw.as_bytes());
        }
        let blocks = u64::from(self.new.descriptor_blocks());
        descriptors.resize(index(blocks.saturating_mul(self.new.block_bytes.into())), 0);
        let gained = self.gained_in_last_group();
        let mut last = self.descriptor(self.last_group())?.clone();
        let had = u64::from(last.bg_free_blocks_count_lo.get());
        let has = u16::try_from(had.saturating_add(gained)).unwrap_or(u16::MAX);
        last.bg_free_blocks_count_lo = has.into();
        put_descriptor(&mut descriptors, self.last_group(), &last);
        let mut super_ = self.new_raw.clone();
        let groups = self.new.groups.saturating_sub(self.old.groups);
        let inodes = groups.saturating_mul(self.old.inodes_per_group);
        super_.s_free_inodes_count = self.old.free_inodes.saturating_add(inodes).into();
        super_.s_free_blocks_count_lo = FsBlock(free.saturating_add(gained)).in_32_bits()?.into();
        super_.s_wtime = narrow(u64::try_from(target.now.seconds).unwrap_or(0)).into();
        Ok(Grown { super_, unfreed: narrow(free), descriptors })
    }

    fn new_descriptor(&self, group: GroupNumber) -> Result<RawGroup> {
        let new = &self.new;
        let at = bitmaps(new, group);
        let data = at.after(tables(new));
        let mut raw = RawGroup::new_zeroed();
        raw.set_places([at, at.after(1), at.after(2)])?;
        let free = new.group_end(group).0.saturating_sub(data.0);
        raw.bg_free_blocks_count_lo = u16::try_from(free).unwrap_or(u16::MAX).into();
        let inodes = u16::try_from(new.inodes_per_group).unwrap_or(u16::MAX);
        raw.bg_free_inodes_count_lo = inodes.into();
        Ok(raw)
    }

    /// Writes what is in a new group: it is not seen yet.
    fn write_group(
        &self,
        writer: &mut Writer<'_>,
        grown: &Grown,
        group: GroupNumber,
    ) -> Result<()> {
        let new = &self.new;
        let (start, at) = (new.group_start(group), bitmaps(new, group));
        if new.has_superblock(group) {
            let copy = grown.copy(group, new.block_bytes);
            let len = copy.len() as u64;
            writer.blocks(start, &copy)?;
            let from = start.after(len.checked_div(new.block_bytes.into()).unwrap_or(0));
            writer.zeros(from, at)?;
        }
        let bits = narrow(u64::from(new.block_bytes).saturating_mul(8));
        let bitmap = |used: u64, end: u64| {
            let mut bytes = vec![0; index(new.block_bytes.into())];
            fill(&mut bytes, BitRun { start: 0, len: narrow(used) }, true);
            let end = narrow(end);
            fill(&mut bytes, BitRun { start: end, len: bits.saturating_sub(end) }, true);
            bytes
        };
        let data = at.after(tables(new));
        let blocks =
            bitmap(data.0.saturating_sub(start.0), new.group_end(group).0.saturating_sub(start.0));
        let both = [blocks, bitmap(0, new.inodes_per_group.into())].concat();
        writer.blocks(at, &both)?;
        writer.zeros(at.after(2), data)
    }

    /// What was there before, in stages; copies excepted, which are written in the third.
    fn stages(&self, grown: &Grown, writer: &Writer<'_>) -> Result<[Group; 6]> {
        let mut stages: [Vec<Write>; 6] = Default::default();
        let [begin, top_empty, tables, real, freed, end] = &mut stages;
        let mut unclean = self.old_raw.clone();
        unclean.s_wtime = grown.super_.s_wtime;
        unclean.s_state = (unclean.s_state.get() & !STATE_CLEAN).into();
        let mut without = grown.super_.clone();
        without.s_state = unclean.s_state;
        without.s_free_blocks_count_lo = grown.unfreed.into();
        if let Some(owner) = &self.owner {
            unclean.s_reserved_gdt_blocks = 0.into();
            without.s_reserved_gdt_blocks = 0.into();
            let empty = vec![0; index(self.new.block_bytes.into())];
            top_empty.push(writer.write(owner.top, &empty));
            tables
                .extend(self.reserved_blocks()?.iter().map(|(at, bytes)| writer.write(*at, bytes)));
            freed.extend(
                self.renewed(owner, writer.target.now)?.map(|(at, bytes)| writer.write(at, &bytes)),
            );
        }
        begin.push(sector(&unclean, 0));
        let table = self.new.descriptor_place(GroupNumber(0)).0;
        let mut unfreed = grown.descriptors.clone();
        put_descriptor(&mut unfreed, self.last_group(), self.descriptor(self.last_group())?);
        tables.push(writer.write(table, &unfreed));
        real.push(sector(&without, 0));
        if let Some((at, bitmap)) = &self.last_bitmap {
            freed.push(writer.write(*at, &self.with_gained(bitmap)));
            freed.push(writer.write(table, &grown.descriptors));
        }
        freed.push(sector(&grown.super_, SECTOR_BYTES));
        end.push(sector(&grown.super_, 0));
        Ok(stages.map(|writes| Group { writes }))
    }

    /// The reserved blocks of group 0: each leads to its copies in other groups.
    fn reserved_blocks(&self) -> Result<Vec<(FsBlock, Vec<u8>)>> {
        let new = &self.new;
        let copies = (1..new.groups).map(GroupNumber).filter(|group| new.has_superblock(*group));
        let starts: Vec<FsBlock> = copies.map(|group| new.group_start(group)).collect();
        let first = new.group_start(GroupNumber(0)).0;
        let with_copies = |(_, block): (usize, FsBlock)| {
            let nth = block.0.saturating_sub(first);
            let mut pointers = vec![];
            for start in &starts {
                pointers.extend(start.after(nth).in_32_bits()?.to_le_bytes());
            }
            pointers.resize(index(new.block_bytes.into()), 0);
            Ok((block, pointers))
        };
        reserve(new).map(with_copies).collect()
    }

    /// The top of the map of the reserve, and the block with its owner.
    fn renewed(&self, owner: &Owner, now: Time) -> Result<[(FsBlock, Vec<u8>); 2]> {
        let new = &self.new;
        let mut top = vec![0; index(new.block_bytes.into())];
        for (place, block) in reserve(new) {
            put32(&mut top, place, block.in_32_bits()?);
        }
        let copies = (0..new.groups).filter(|group| new.has_superblock(GroupNumber(*group)));
        let reserved = u64::from(new.reserved_descriptor_blocks);
        let owned = reserved.saturating_mul(copies.count() as u64).saturating_add(1);
        let sectors = owned.saturating_mul((new.block_bytes / 512).into());
        let mut bytes = owner.bytes.clone();
        if let Some(Ok(mut slot)) = bytes.get_mut(owner.at..).map(Slot::of) {
            slot.set_sectors(sectors);
            slot.set_time(Stamp::Accessed, now);
            slot.set_time(Stamp::Modified, now);
        }
        Ok([(owner.top, top), (owner.block, bytes)])
    }

    /// The bitmap of the group that was last, with what it gained.
    fn with_gained(&self, bitmap: &[u8]) -> Vec<u8> {
        let mut bitmap = bitmap.to_vec();
        let start = self.old.group_start(self.last_group()).0;
        let from = narrow(self.old.blocks.saturating_sub(start));
        let gained = narrow(self.gained_in_last_group());
        fill(&mut bitmap, BitRun { start: from, len: gained }, false);
        bitmap
    }
}

/// The block bitmap of a new group; the inode bitmap and the inode table follow.
fn bitmaps(super_: &Superblock, group: GroupNumber) -> FsBlock {
    super_.group_start(group).after(super_.copy_blocks(group))
}

fn put_descriptor(table: &mut [u8], group: GroupNumber, raw: &RawGroup) {
    let len = size_of::<RawGroup>();
    let at = index(group.0.into()).saturating_mul(len);
    if let Some(place) = table.get_mut(at..).and_then(|rest| rest.get_mut(..len)) {
        place.copy_from_slice(raw.as_bytes());
    }
}

/// What the volume is to be.
struct Grown {
    super_: RawSuperblock,
    /// Free blocks without what the group that was last gains.
    unfreed: u32,
    /// Whole blocks of descriptors.
    descriptors: Vec<u8>,
}

impl Grown {
    /// Superblock and descriptors as `group` keeps them.
    fn copy(&self, group: GroupNumber, block_bytes: u32) -> Vec<u8> {
        let mut super_ = self.super_.clone();
        // A copy knows nothing of how the volume was left.
        super_.s_state = 0.into();
        super_.s_block_group_nr = u16::try_from(group.0).unwrap_or(0).into();
        let mut bytes = super_.as_bytes().to_vec();
        bytes.resize(index(block_bytes.into()), 0);
        bytes.extend(&self.descriptors);
        bytes
    }
}

/// The sector of a superblock that `from` is in.
fn sector(raw: &RawSuperblock, from: u64) -> Write {
    let bytes = raw.as_bytes().get(index(from)..).unwrap_or_default();
    let bytes = bytes.get(..index(SECTOR_BYTES)).unwrap_or_default();
    Write { at_bytes: OFFSET_BYTES.saturating_add(from), block: block_of(bytes) }
}

fn block_of(bytes: &[u8]) -> Block {
    let mut block = Block::private(bytes.len());
    block.copy_in(0, bytes);
    block
}

/// The disk, in blocks of the volume.
struct Writer<'a> {
    target: &'a Target<'a>,
    block_bytes: u32,
    under_way: u64,
    /// What everything handed over follows.
    after: Vec<Ticket>,
}

impl Writer<'_> {
    fn at_bytes(&self, at: FsBlock) -> u64 {
        at.0.saturating_mul(self.block_bytes.into())
    }

    fn write(&self, at: FsBlock, bytes: &[u8]) -> Write {
        Write { at_bytes: self.at_bytes(at), block: block_of(bytes) }
    }

    /// Hands over a write; memory is bounded.
    fn submit(&mut self, write: Write) -> Result<()> {
        let len = write.block.len() as u64;
        let group = Group { writes: vec![write] };
        let ticket =
            self.target.disk.submit(group, &self.after).map_err(|refused| refused.error)?;
        self.under_way = self.under_way.saturating_add(len);
        if self.under_way >= UNDER_WAY_BYTES {
            self.under_way = 0;
            self.target.disk.wait(ticket)?;
        }
        Ok(())
    }

    fn blocks(&mut self, at: FsBlock, bytes: &[u8]) -> Result<()> {
        self.submit(self.write(at, bytes))?;
        (self.target.progress)(bytes.len() as u64);
        Ok(())
    }

    /// Zeros from block `from` up to `end`, where they are not there already.
    fn zeros(&mut self, from: FsBlock, end: FsBlock) -> Result<()> {
        let mut at = self.at_bytes(from);
        let end = self.at_bytes(end).min(self.target.zeroed_from_bytes);
        while at < end {
            let len = end.saturating_sub(at).min(REQUEST_BYTES);
            self.submit(Write { at_bytes: at, block: Block::private(index(len)) })?;
            (self.target.progress)(len);
            at = at.saturating_add(len);
        }
        Ok(())
    }

    /// Hands over stages, the first of which becomes durable together with what was handed
    /// over before; what is handed over next follows the last.
    fn follow(&mut self, stages: Vec<Group>) -> Result<()> {
        let tickets = self.target.disk.submit_chain(stages, &self.after);
        let tickets = tickets.map_err(|refused| refused.error)?;
        self.after = tickets.last().copied().into_iter().collect();
        Ok(())
    }

    /// Waits until everything handed over is durable.
    fn wait(&self) -> Result<()> {
        match self.after.last() {
            Some(last) => Ok(self.target.disk.wait(*last)?),
            None => Ok(()),
        }
    }
}
