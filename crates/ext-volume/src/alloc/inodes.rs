//! Inode allocation: near the directory; top-level directories are spread.

use draconis_types::FileType;

use super::{Group, all_bits_are, bitmap_view, set_bit_range};
use crate::blocks::role::Role;
use crate::format::bitmap::Bitmap;
use crate::format::group;
use crate::format::inode::flags;
use crate::transaction::Transaction;
use crate::units::saturating_u32;
use crate::{Error, FileId, FsBlock, InodeNumber, Result};

impl Transaction<'_> {
    /// Recounts the free blocks and inodes of every group; returns the used inodes.
    pub(crate) fn used_inodes(&mut self) -> Result<Vec<InodeNumber>> {
        let super_ = &self.volume.super_;
        let mut used = Vec::new();
        for number in 0..super_.groups {
            self.load_group_bitmaps(number)?;
            let Some(Group { inodes, allocation_bitmaps: Some(search), .. }) =
                self.writer.groups.get(number)
            else {
                continue;
            };
            let bits = Bitmap::new(&search.inodes, *inodes);
            let mut at = 0;
            while let Some(found) = bits.next_one(at) {
                let inode = InodeNumber(
                    number
                        .saturating_mul(super_.inodes_per_group)
                        .saturating_add(found)
                        .saturating_add(1),
                );
                if inode >= super_.first_inode {
                    used.push(inode);
                }
                at = found.saturating_add(1);
            }
        }
        Ok(used)
    }

    /// Allocates an inode for a new name in `dir`; a replayed change gets its old inode.
    pub(crate) fn allocate_inode_for(
        &mut self,
        dir: InodeNumber,
        kind: FileType,
    ) -> Result<InodeNumber> {
        let inode = match self.replayed_inode() {
            None => self.allocate_inode(dir, kind)?,
            Some(inode) => {
                let place = self.writer.groups.locate_inode_bit(inode);
                let (number, at) = place.ok_or(Error::NotFound)?;
                self.load_group_bitmaps(number)?;
                match self.allocate_inode_in_group(number, kind, Some(at))? {
                    Some(taken) => taken,
                    // It may be free once pending frees are durable.
                    _ if self.writer.groups.has_pending_free() => return Err(Error::NoSpace),
                    _ => {
                        let used = "inode bitmap: an inode is used that a change took";
                        return Err(Error::corrupt(used).with_inode(inode));
                    }
                }
            }
        };
        let generation = self.next_generation(inode);
        self.writer.created_inode = Some(FileId { inode: inode.0, generation });
        Ok(inode)
    }

    /// Returns the generation that distinguishes the inode's next file from all earlier ones.
    pub(crate) fn next_generation(&self, inode: InodeNumber) -> u32 {
        let repeated = self.writer.replaying.and_then(|it| it.inode);
        match repeated.filter(|made| made.inode == inode.0) {
            Some(made) => made.generation,
            None => self.writer.generation.wrapping_mul(0x9E37_79B1).wrapping_add(inode.0 | 1),
        }
    }

    /// Allocates an inode near `dir`.
    #[allow(clippy::arithmetic_side_effects, reason = "a volume has a group, and fewer than 2^31")]
    pub(crate) fn allocate_inode(
        &mut self,
        dir: InodeNumber,
        kind: FileType,
    ) -> Result<InodeNumber> {
        if self.writer.groups.free_inodes == 0 {
            return Err(Error::NoSpace);
        }
        let (own_group, _) = self.writer.groups.locate_inode_bit(dir).ok_or(Error::NotFound)?;
        let groups = self.volume.super_.groups;
        let first = if kind == FileType::Directory {
            self.find_group_orlov(dir, own_group)?
        } else {
            own_group
        };
        // Files: the directory's group, then groups at growing distance, then any.
        let hops =
            (0..31u32).map(|hop| (1u32 << hop).saturating_sub(1)).take_while(|hop| *hop < groups);
        let order = hops.chain(0..groups).map(|hop| (first + hop) % groups);
        for number in order {
            let Some(group) = self.writer.groups.get(number) else { continue };
            if group.descriptor.free_inodes == 0
                || (kind == FileType::File
                    && group.descriptor.free_clusters == 0
                    && number != first)
            {
                continue;
            }
            self.load_group_bitmaps(number)?;
            if let Some(inode) = self.allocate_inode_in_group(number, kind, None)? {
                return Ok(inode);
            }
        }
        for number in 0..groups {
            self.load_group_bitmaps(number)?;
            if let Some(inode) = self.allocate_inode_in_group(number, kind, None)? {
                return Ok(inode);
            }
        }
        Err(Error::NoSpace)
    }

    /// Allocates the first free inode of a group, or only `wanted`, if free.
    fn allocate_inode_in_group(
        &mut self,
        number: u32,
        kind: FileType,
        wanted: Option<u32>,
    ) -> Result<Option<InodeNumber>> {
        let per_group = self.volume.super_.inodes_per_group;
        let bitmap_at = self.preload_bitmap(number, Role::InodeBitmap(number))?;
        let Some(Group { allocation_bitmaps: Some(search), .. }) = self.writer.groups.get(number)
        else {
            return Ok(None);
        };
        let free = bitmap_view(&search.inodes).next_zero(wanted.unwrap_or(0));
        let Some(at) = free.filter(|at| wanted.is_none_or(|wanted| wanted == *at)) else {
            return Ok(None);
        };
        // The slot is read before it is overwritten. A never used slot may hold anything.
        let inode =
            InodeNumber(number.saturating_mul(per_group).saturating_add(at).saturating_add(1));
        let is_linked = self.read_slot(inode, |it| it.links() != 0)?;
        let group = self.writer.groups.get(number).ok_or(Error::corrupt("group number"))?;
        if is_linked && at < group.inodes.saturating_sub(group.descriptor.unused_inodes) {
            return Err(Error::corrupt("inode bitmap: a used inode is free").with_inode(inode));
        }
        self.mark_inode_used(number, at, bitmap_at, kind)?;
        Ok(Some(inode))
    }

    /// Returns true if the bitmap marks an inode as used. The inode's own bytes do not count.
    pub(crate) fn is_inode_allocated(&mut self, inode: InodeNumber) -> Result<bool> {
        let (number, at) = self.writer.groups.locate_inode_bit(inode).ok_or(Error::NotFound)?;
        self.load_group_bitmaps(number)?;
        let role = Role::InodeBitmap(number);
        let bitmap_at = self.preload_bitmap(number, role)?;
        let group = self.writer.groups.get(number).ok_or(Error::NotFound)?;
        let was_written = group.descriptor.flags & group::flags::INODE_UNINIT == 0;
        Ok(was_written && all_bits_are(&self.block(bitmap_at, role)?, at, 1, true))
    }

    /// Allocates this inode if it is free; returns false if it was used.
    pub(crate) fn allocate_exact_inode(
        &mut self,
        inode: InodeNumber,
        kind: FileType,
    ) -> Result<bool> {
        let (number, at) = self.writer.groups.locate_inode_bit(inode).ok_or(Error::NotFound)?;
        self.load_group_bitmaps(number)?;
        let role = Role::InodeBitmap(number);
        let bitmap_at = self.preload_bitmap(number, role)?;
        self.initialize_bitmaps(number, true)?;
        let is_free = all_bits_are(&self.block(bitmap_at, role)?, at, 1, false);
        if is_free {
            self.mark_inode_used(number, at, bitmap_at, kind)?;
        }
        Ok(is_free)
    }

    fn mark_inode_used(
        &mut self,
        number: u32,
        at: u32,
        bitmap_at: FsBlock,
        kind: FileType,
    ) -> Result<()> {
        self.may_block = true;
        self.initialize_bitmaps(number, true)?;
        let group = self.writer.groups.get_mut(number)?;
        let never_used = group.inodes.saturating_sub(at.saturating_add(1));
        group.descriptor.unused_inodes = group.descriptor.unused_inodes.min(never_used);
        if let Some(search) = &mut group.allocation_bitmaps {
            set_bit_range(&mut search.inodes, at, 1, true);
        }
        group.descriptor.free_inodes = group.descriptor.free_inodes.saturating_sub(1);
        group.descriptor.directories =
            group.descriptor.directories.saturating_add(u32::from(kind == FileType::Directory));
        group.changed = true;
        self.writer.groups.directories =
            self.writer.groups.directories.saturating_add(u64::from(kind == FileType::Directory));
        self.writer.groups.free_inodes = self.writer.groups.free_inodes.saturating_sub(1);
        self.modify_block(bitmap_at, Role::InodeBitmap(number), |bits| {
            set_bit_range(bits, at, 1, true)
        })
    }

    /// Marks an inode as used so that it is never allocated.
    pub(crate) fn quarantine_inode(&mut self, inode: InodeNumber) -> Result<()> {
        let (number, at) = self.writer.groups.locate_inode_bit(inode).ok_or(Error::NotFound)?;
        self.load_group_bitmaps(number)?;
        let bitmap_at = self.preload_bitmap(number, Role::InodeBitmap(number))?;
        self.may_block = true;
        self.initialize_bitmaps(number, true)?;
        let group = self.writer.groups.get_mut(number)?;
        let never_used = group.inodes.saturating_sub(at.saturating_add(1));
        group.descriptor.unused_inodes = group.descriptor.unused_inodes.min(never_used);
        let Some(search) = &mut group.allocation_bitmaps else { return Ok(()) };
        if all_bits_are(&search.inodes, at, 1, true) {
            return Ok(());
        }
        set_bit_range(&mut search.inodes, at, 1, true);
        group.descriptor.free_inodes = group.descriptor.free_inodes.saturating_sub(1);
        group.changed = true;
        self.writer.groups.free_inodes = self.writer.groups.free_inodes.saturating_sub(1);
        self.modify_block(bitmap_at, Role::InodeBitmap(number), |bits| {
            set_bit_range(bits, at, 1, true)
        })
    }

    /// Frees an inode without names.
    pub(crate) fn free_inode(&mut self, inode: InodeNumber, kind: FileType) -> Result<()> {
        let (number, at) = self.writer.groups.locate_inode_bit(inode).ok_or(Error::NotFound)?;
        self.load_group_bitmaps(number)?;
        let bitmap_at = self.preload_bitmap(number, Role::InodeBitmap(number))?;
        self.may_block = true;
        let group = self.writer.groups.get_mut(number)?;
        group.descriptor.free_inodes = group.descriptor.free_inodes.saturating_add(1);
        group.descriptor.directories =
            group.descriptor.directories.saturating_sub(u32::from(kind == FileType::Directory));
        group.changed = true;
        self.writer.groups.free_inodes = self.writer.groups.free_inodes.saturating_add(1);
        let fewer = u64::from(kind == FileType::Directory);
        self.writer.groups.directories = self.writer.groups.directories.saturating_sub(fewer);
        self.writer.groups.discard_reservation_window(inode.0);
        let used = self.modify_block(bitmap_at, Role::InodeBitmap(number), |bits| {
            let used = all_bits_are(bits, at, 1, true);
            set_bit_range(bits, at, 1, false);
            used
        })?;
        if !used {
            return Err(Error::corrupt("inode bitmap: a used inode is free").with_inode(inode));
        }
        if self.writer.batch.created_inodes.remove(&inode.0) {
            self.writer.groups.mark_allocatable(&[], &[inode.0]);
        } else {
            self.writer.batch.freed_inodes.push(inode.0);
            self.writer.groups.pending_free_inodes =
                self.writer.groups.pending_free_inodes.saturating_add(1);
        }
        Ok(())
    }

    /// Returns the group for a new directory: near its parent while there is space for its files;
    /// top-level directories are spread (Orlov allocator).
    #[allow(clippy::arithmetic_side_effects, reason = "a volume has a group, and fewer than 2^31")]
    fn find_group_orlov(&mut self, parent: InodeNumber, own_group: u32) -> Result<u32> {
        let groups = self.volume.super_.groups;
        let count = u64::from(groups);
        let all = &self.writer.groups;
        let mean_inodes = saturating_u32(all.free_inodes / count);
        let mean_clusters = saturating_u32(all.free_clusters / count);
        let top = parent == InodeNumber::ROOT || self.node(parent)?.flags & flags::TOP_DIR != 0;
        let order = |start: u32| (0..groups).map(move |step| (start + step) % groups);
        let room = |group: &Group, inodes: u32, clusters: u32| {
            group.descriptor.free_inodes > 0
                && group.descriptor.free_inodes >= inodes
                && group.descriptor.free_clusters >= clusters
        };
        if top {
            // The group with the fewest directories among those with average free space.
            let start = self.writer.next_top_dir_group % groups;
            self.writer.next_top_dir_group = self.writer.next_top_dir_group.wrapping_add(1);
            let found = order(start)
                .filter_map(|number| all.get(number).map(|group| (number, group)))
                .filter(|(_, group)| room(group, mean_inodes, mean_clusters))
                .min_by_key(|(_, group)| group.descriptor.directories);
            if let Some((number, _)) = found {
                return Ok(number);
            }
        }
        let per_group = self.volume.super_.inodes_per_group;
        let most = saturating_u32(all.directories / count).saturating_add(per_group / 16);
        let least_inodes = mean_inodes.saturating_sub(per_group / 4);
        let clusters_per_group = self.volume.super_.clusters_per_group();
        let least_clusters = mean_clusters.saturating_sub(clusters_per_group / 4);
        let found = order(own_group).find(|number| {
            all.get(*number).is_some_and(|group| {
                group.descriptor.directories < most
                    && room(group, least_inodes.max(1), least_clusters)
            })
        });
        Ok(found.unwrap_or(own_group))
    }
}
