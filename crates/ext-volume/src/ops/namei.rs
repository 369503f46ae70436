//! Inodes and their names: create, link, unlink; [`renames`] has rename.
//!
//! Effects that matter for the order of the next chain are recorded here; see [`crate::commit`]. If
//! one chain cannot be ordered, the previous batch is closed first.

mod renames;

use draconis_types::FileType;
use draconis_types::injected_fault::InjectedFault;

use super::attributes::InheritedAttributes;
use super::dirents::{DirentLocation, NameLookup};
use super::{NewNode, Whiteout};
use crate::blocks::data::SharedBytes;
use crate::commit::batch::{Effect, Operation};
use crate::format::features::{Incompatible, ReadOnlyCompatible};
use crate::format::inode::{Inode, POINTERS, device_pointers, fast_symlink_pointers, flags};
use crate::format::inode_slot::InodeTime;
use crate::format::quota::QuotaUsage;
use crate::format::xattr::NewXattr;
use crate::map::edit::AllocationPolicy;
use crate::map::extents::empty_root;
use crate::quota::Owner;
use crate::transaction::Transaction;
use crate::units::saturating_usize;
use crate::{Error, InodeNumber, Result};

/// Limit of links to an inode.
const LINK_MAX: u16 = 32_000;
/// Limit of parents up to the root; more is a cycle.
const MAX_DIRECTORY_DEPTH: u32 = 1 << 16;

/// Properties of a new inode, from its request and its directory.
struct InodePlan {
    /// Permission bits.
    mode: u32,
    gid: u32,
    project: u32,
    /// Set for a symbolic link; the inner value holds a fast link's target.
    target: Option<Option<[u32; POINTERS]>>,
    attributes: Vec<NewXattr>,
}

impl InodePlan {
    /// Returns the blocks that the new inode allocates.
    fn blocks(&self, kind: FileType) -> u64 {
        let slow = matches!(self.target, Some(None));
        u64::from(kind == FileType::Directory || slow)
            .saturating_add(u64::from(!self.attributes.is_empty()))
    }

    const fn owner(&self, uid: u32) -> Owner {
        Owner { uid, gid: self.gid, project: self.project }
    }
}

impl Whiteout {
    fn as_new_node(self) -> NewNode<'static> {
        let (kind, mode, device) = (FileType::CharDevice, 0, (0, 0));
        NewNode { kind, mode, uid: self.uid, gid: self.gid, device, target: &[] }
    }
}

/// A whiteout to create, and the inode allocated for it.
#[derive(Clone, Copy)]
struct AllocatedWhiteout {
    number: InodeNumber,
    whiteout: Whiteout,
}

/// Directory and name.
type DirAndName<'n> = (InodeNumber, &'n [u8]);

const fn is_dot_or_dot_dot(name: &[u8]) -> bool {
    matches!(name, b"." | b"..")
}

impl Transaction<'_> {
    /// Returns a directory whose entries may change.
    fn writable_directory(&self, dir: InodeNumber, take: bool) -> Result<std::sync::Arc<Inode>> {
        let node = self.directory(dir)?;
        let forbidden = if take { flags::IMMUTABLE | flags::APPEND } else { flags::IMMUTABLE };
        if node.flags & forbidden != 0 {
            return Err(Error::NotPermitted);
        }
        if self.is_orphan(dir) {
            return Err(Error::NotFound);
        }
        Ok(node)
    }

    fn check_subdirectory_limit(&self, dir: &Inode) -> Result<()> {
        let links = dir.links();
        let uncounted =
            self.volume.super_.read_only_compatible.contains(ReadOnlyCompatible::DIR_NLINK);
        if links >= LINK_MAX && !uncounted { Err(Error::LinkLimit) } else { Ok(()) }
    }

    /// [`Transaction::find_name_or_slot`] for a new name.
    fn find_new_name_slot(&self, dir: &Inode, name: &[u8]) -> Result<NameLookup> {
        match self.find_name_or_slot(dir, name) {
            Ok(Err(_)) | Err(Error::NotFound) => self.check_not_encrypted(dir)?,
            sought => return sought,
        }
        self.find_name_or_slot(dir, name)
    }

    /// Refuses new names in encrypted directories.
    fn check_not_encrypted(&self, dir: &Inode) -> Result<()> {
        if dir.is_encrypted() { Err(Error::NoKey) } else { Ok(()) }
    }

    /// Changes the count of subdirectories; with `dir_nlink`, a link count of 1 means "many".
    pub(crate) fn count_subdirectory(&mut self, dir: InodeNumber, more: bool) -> Result<()> {
        let uncounted =
            self.volume.super_.read_only_compatible.contains(ReadOnlyCompatible::DIR_NLINK);
        self.change_slot(dir, |it| {
            let links = it.links();
            let next = match (links, more) {
                (1, _) if uncounted => 1,
                (64_999.., true) if uncounted => 1,
                (_, true) => links.saturating_add(1),
                (_, false) => links.saturating_sub(1).max(2),
            };
            it.set_links(next);
        })
    }

    pub(crate) fn create(
        &mut self,
        dir: InodeNumber,
        name: &[u8],
        new: &NewNode<'_>,
    ) -> Result<InodeNumber> {
        let parent = self.writable_directory(dir, false)?;
        if is_dot_or_dot_dot(name) {
            return Err(Error::Exists);
        }
        let place = match self.find_new_name_slot(&parent, name)? {
            Ok(_) => return Err(Error::Exists),
            Err(place) => place,
        };
        let is_dir = new.kind == FileType::Directory;
        if is_dir {
            self.check_subdirectory_limit(&parent)?;
        }
        let birth = self.plan_new_inode(&parent, new)?;
        let needs = self.max_insert_blocks(dir, &place)?.saturating_add(birth.blocks(new.kind));
        let entries = self.entries_needed(birth.owner(new.uid))?;
        self.ensure_free_blocks(needs.saturating_add(entries), new.uid)?;
        let place = if self.join_batch(Operation::Create { dir, is_directory: is_dir })? {
            let Err(place) = self.find_name_or_slot(&*self.directory(dir)?, name)? else {
                return Err(Error::Exists);
            };
            place
        } else {
            place
        };
        self.ensure_entries(birth.owner(new.uid))?;
        let number = self.allocate_inode_for(dir, new.kind)?;
        self.make_inode(&parent, number, new, birth, if is_dir { 2 } else { 1 })?;
        self.insert_name(dir, place, name, number, new.kind)?;
        self.touch_directory(dir)?;
        Ok(number)
    }

    /// Creates an `O_TMPFILE` inode: an orphan that may still get a name.
    pub(crate) fn create_tmpfile(
        &mut self,
        dir: InodeNumber,
        new: &NewNode<'_>,
    ) -> Result<InodeNumber> {
        let parent = self.writable_directory(dir, false)?;
        self.check_not_encrypted(&parent)?;
        if new.kind != FileType::File {
            return Err(Error::Misuse("only a file can be made without a name"));
        }
        let birth = self.plan_new_inode(&parent, new)?;
        let entries = self.entries_needed(birth.owner(new.uid))?;
        self.ensure_free_blocks(birth.blocks(new.kind).saturating_add(entries), new.uid)?;
        self.ensure_entries(birth.owner(new.uid))?;
        let number = self.allocate_inode_for(dir, new.kind)?;
        self.make_inode(&parent, number, new, birth, 0)?;
        self.make_orphan(number)?;
        self.writer.tmpfiles.insert(number.0);
        Ok(number)
    }

    /// Plans a new inode in `parent`; changes nothing.
    fn plan_new_inode(&self, parent: &Inode, new: &NewNode<'_>) -> Result<InodePlan> {
        let block_bytes = saturating_usize(self.volume.super_.block_bytes.into());
        let target = match new.kind {
            FileType::Symlink if new.target.is_empty() => return Err(Error::NotFound),
            FileType::Symlink if new.target.len() >= block_bytes => return Err(Error::NameTooLong),
            FileType::Symlink => Some(fast_symlink_pointers(new.target)),
            _ => None,
        };
        let (_, parent_gid) = parent.owner();
        let parent_mode = parent.mode();
        let mut mode = new.mode & 0o7777;
        let hands_down = parent_mode & 0o2000 != 0 && !InjectedFault::GroupOfParent.is_made();
        let gid = if hands_down { parent_gid } else { new.gid };
        if new.kind == FileType::Directory {
            mode |= parent_mode & 0o2000;
        }
        let InheritedAttributes { mode, attributes } =
            self.inherit_attributes(parent, new.kind, mode)?;
        let project = if self.inherits_project(parent) { parent.project() } else { 0 };
        Ok(InodePlan { mode, gid, project, target, attributes })
    }

    /// Returns true if the directory passes its project on to its children.
    fn inherits_project(&self, dir: &Inode) -> bool {
        let features = self.volume.super_.read_only_compatible;
        features.contains(ReadOnlyCompatible::PROJECT) && dir.flags & flags::PROJECT != 0
    }

    /// Refuses to link an inode into a directory of another project.
    fn check_project(&self, inode: &Inode, dir: &Inode) -> Result<()> {
        let other = self.inherits_project(dir) && inode.project() != dir.project();
        if other { Err(Error::OtherProject) } else { Ok(()) }
    }

    /// Returns `NoSpace` unless `blocks` are free.
    fn ensure_free_blocks(&mut self, blocks: u64, uid: u32) -> Result<()> {
        match blocks {
            0 => Ok(()),
            blocks => self.check_free_blocks(blocks, self.is_privileged(uid)),
        }
    }

    /// Initializes an inode allocated for a child of `parent`; no name references it yet.
    fn make_inode(
        &mut self,
        parent: &Inode,
        number: InodeNumber,
        new: &NewNode<'_>,
        plan: InodePlan,
        links: u16,
    ) -> Result<()> {
        let dir = parent.number;
        let is_dir = new.kind == FileType::Directory;
        let privileged = self.is_privileged(new.uid);
        self.discard_access_time(number);
        self.record_effect(Effect::Created { inode: number, parent: is_dir.then_some(dir) });
        let (now, generation) = (self.now, self.next_generation(number));
        self.writer.generation = generation;
        let inherited_flags = match new.kind {
            FileType::Directory => {
                parent.flags & (flags::INHERITED | flags::PROJECT | flags::CASEFOLD)
            }
            FileType::File => parent.flags & flags::INHERITED & !flags::DIR_SYNC,
            _ => parent.flags & flags::INHERITED & (flags::NO_ATIME | flags::NO_DUMP),
        };
        // A target in the inode needs no map.
        let is_mapped = matches!(new.kind, FileType::File | FileType::Directory)
            || matches!(plan.target, Some(None));
        let has_extents = self.volume.super_.incompatible.contains(Incompatible::EXTENTS);
        let of_map = if is_mapped && has_extents { flags::EXTENTS } else { 0 };
        let full_mode = u16::try_from(new.kind.mode_bits() | plan.mode).unwrap_or(0);
        self.change_slot(number, |it| {
            it.clear();
            it.init_extra_fields();
            it.set_mode(full_mode);
            it.set_owner(new.uid, plan.gid);
            it.set_project(plan.project);
            it.set_links(links);
            it.set_flags(inherited_flags | of_map);
            it.set_generation(generation);
            for stamp in
                [InodeTime::Accessed, InodeTime::Modified, InodeTime::Changed, InodeTime::Created]
            {
                it.set_time(stamp, now);
            }
            match (new.kind, plan.target) {
                (FileType::CharDevice | FileType::BlockDevice, _) => {
                    it.set_pointers(device_pointers(new.device));
                }
                (_, Some(Some(fast))) => {
                    it.set_pointers(fast);
                    it.set_size(new.target.len() as u64);
                }
                (FileType::File | FileType::Directory | FileType::Symlink, _) if of_map != 0 => {
                    it.set_pointers(empty_root());
                }
                _ => {}
            }
        })?;
        self.count_usage(number, QuotaUsage { inodes: 1, bytes: 0 })?;
        let block_bytes = self.volume.super_.block_bytes;
        let taking = AllocationPolicy { is_append: false, privileged, unwritten: false };
        if is_dir {
            let all = self.map_blocks(number, 0..1, taking)?;
            let first = all.first().ok_or(Error::NoSpace)?.at;
            let names = self.dot_entries_block(number, dir);
            self.put_new_block(first, self.directory_role(number)?, names);
            self.change_slot(number, |it| it.set_size(block_bytes.into()))?;
            self.count_subdirectory(dir, true)?;
        } else if matches!(plan.target, Some(None)) {
            let all = self.map_blocks(number, 0..1, taking)?;
            let first = all.first().ok_or(Error::NoSpace)?.at;
            let mut bytes = new.target.to_vec();
            bytes.resize(saturating_usize(block_bytes.into()), 0);
            self.put_contents(first, &SharedBytes::from_owned_bytes(bytes.into_boxed_slice()));
            self.change_slot(number, |it| it.set_size(new.target.len() as u64))?;
        }
        if !plan.attributes.is_empty() {
            self.write_xattrs(number, &plan.attributes)?;
        }
        Ok(())
    }

    pub(crate) fn link(&mut self, inode: InodeNumber, dir: InodeNumber, name: &[u8]) -> Result<()> {
        let node = self.node(inode)?;
        let parent = self.writable_directory(dir, false)?;
        if node.kind == FileType::Directory || node.flags & (flags::IMMUTABLE | flags::APPEND) != 0
        {
            return Err(Error::NotPermitted);
        }
        if node.links() >= LINK_MAX {
            return Err(Error::LinkLimit);
        }
        // After a resume, the kernel knows which orphans are `O_TMPFILE` inodes.
        let may_have = self.writer.is_resumed || self.writer.tmpfiles.contains(&inode.0);
        let first = may_have && !InjectedFault::LinkTmpfile.is_made();
        if self.is_orphan(inode) && !first {
            return Err(Error::NotFound);
        }
        if is_dot_or_dot_dot(name) {
            return Err(Error::Exists);
        }
        let Err(place) = self.find_new_name_slot(&parent, name)? else { return Err(Error::Exists) };
        self.check_project(&node, &parent)?;
        let needs = self.max_insert_blocks(dir, &place)?;
        self.ensure_free_blocks(needs, parent.owner().0)?;
        self.insert_name(dir, place, name, inode, node.kind)?;
        if self.writer.tmpfiles.remove(&inode.0) {
            // Its first name. On disk it is unused, as any new inode.
            self.remove_orphan(inode)?;
            self.record_effect(Effect::Created { inode, parent: None });
        }
        self.change_slot(inode, |it| it.set_links(it.links().saturating_add(1)))?;
        if !InjectedFault::LinkTime.is_made() {
            self.set_times_now(inode, &[InodeTime::Changed])?;
        }
        self.record_effect(Effect::Linked { inode });
        self.touch_directory(dir)
    }

    pub(crate) fn unlink(&mut self, dir: InodeNumber, name: &[u8]) -> Result<()> {
        let parent = self.writable_directory(dir, true)?;
        if is_dot_or_dot_dot(name) {
            return Err(Error::IsADirectory);
        }
        let Ok(slot) = self.find_name_or_slot(&parent, name)? else { return Err(Error::NotFound) };
        let inode = slot.found.inode;
        match self.node(inode) {
            Ok(node) if node.kind == FileType::Directory => return Err(Error::IsADirectory),
            Ok(node) if node.flags & (flags::IMMUTABLE | flags::APPEND) != 0 => {
                return Err(Error::NotPermitted);
            }
            Ok(node) => self.preload_for_deletion(&node)?,
            // A power cut may leave a name of an unused inode.
            Err(Error::NotFound) => {
                self.remove_name(dir, slot)?;
                return self.touch_directory(dir);
            }
            Err(other) => return Err(other),
        }
        let moved = self.join_batch(Operation::Unlink { inode })?;
        let slot = if moved { self.find_existing(dir, name)? } else { slot };
        self.remove_name(dir, slot)?;
        self.touch_directory(dir)?;
        self.drop_link(dir, inode)
    }

    /// Finds a name again after its batch was closed, which may move blocks.
    fn find_existing(&self, dir: InodeNumber, name: &[u8]) -> Result<DirentLocation> {
        let node = self.directory(dir)?;
        let lost = Error::corrupt("directory: a name is gone").with_inode(dir);
        self.find_name_or_slot(&node, name)?.map_err(|_| lost)
    }

    /// Preloads the blocks for removing the last name of an inode.
    fn preload_for_deletion(&mut self, inode: &Inode) -> Result<()> {
        let has_users = self.has_users(inode.number);
        let is_last = inode.links() <= 1 || inode.kind == FileType::Directory;
        if is_last && !has_users { self.preload_map(inode, 0..u64::MAX) } else { Ok(()) }
    }

    /// Decrements the link count; an inode without links is deleted, or becomes an orphan if it is
    /// open.
    fn drop_link(&mut self, dir: InodeNumber, inode: InodeNumber) -> Result<()> {
        let left = self.change_slot(inode, |it| {
            it.set_links(it.links().saturating_sub(1));
            it.links()
        })?;
        self.set_times_now(inode, &[InodeTime::Changed])?;
        if left > 0 {
            self.record_effect(Effect::LinkDropped { inode, dir });
            return Ok(());
        }
        self.delete_or_orphan(dir, inode)
    }

    /// Returns true if the inode has too many blocks to be deleted in one batch.
    fn needs_batched_deletion(&self, inode: InodeNumber) -> Result<bool> {
        if self.writer.protocol.max_blocks_per_truncate(self.volume.super_.groups).is_none() {
            return Ok(false);
        }
        let node = self.read_inode_unchecked(inode)?;
        Ok(node.has_map(&self.volume.super_) && !self.truncate_points(inode, 0)?.is_empty())
    }

    fn delete_or_orphan(&mut self, dir: InodeNumber, inode: InodeNumber) -> Result<()> {
        self.record_effect(Effect::LastLinkDropped { inode, dir });
        if self.has_users(inode) {
            self.make_orphan(inode)
        } else if self.needs_batched_deletion(inode)? {
            self.writer.pending_deletions.push(inode.0);
            self.make_orphan(inode)
        } else {
            self.evict_inode(inode)
        }
    }

    pub(crate) fn remove_directory(&mut self, dir: InodeNumber, name: &[u8]) -> Result<()> {
        let parent = self.writable_directory(dir, true)?;
        match name {
            b"." => return Err(Error::Misuse("`.` cannot be removed")),
            b".." => return Err(Error::NotEmpty),
            _ => {}
        }
        let Ok(slot) = self.find_name_or_slot(&parent, name)? else { return Err(Error::NotFound) };
        let inode = slot.found.inode;
        let node = self.node(inode)?;
        if node.kind != FileType::Directory {
            return Err(Error::NotADirectory);
        }
        if node.flags & (flags::IMMUTABLE | flags::APPEND) != 0 {
            return Err(Error::NotPermitted);
        }
        if inode == dir || inode == InodeNumber::ROOT {
            return Err(Error::corrupt("directory: names itself").with_inode(dir));
        }
        if !self.is_empty(&node)? {
            return Err(Error::NotEmpty);
        }
        self.preload_for_deletion(&node)?;
        let moved = self.join_batch(Operation::RemoveDirectory { inode })?;
        let slot = if moved { self.find_existing(dir, name)? } else { slot };
        self.remove_name(dir, slot)?;
        self.drop_directory(dir, inode)?;
        self.touch_directory(dir)
    }

    /// Completes the removal of an empty directory whose name is gone.
    fn drop_directory(&mut self, dir: InodeNumber, inode: InodeNumber) -> Result<()> {
        self.count_subdirectory(dir, false)?;
        self.change_slot(inode, |it| it.set_links(0))?;
        self.set_times_now(inode, &[InodeTime::Changed])?;
        self.delete_or_orphan(dir, inode)
    }

    /// Removes users; see [`crate::Volume::remove_users`].
    pub(crate) fn release(&mut self, inode: InodeNumber, users: u64) -> Result<()> {
        if self.writer.is_resumed {
            return Ok(());
        }
        let Some(count) = self.writer.users.get(&inode.0).copied() else { return Ok(()) };
        let left = count.saturating_sub(users);
        if left > 0 {
            self.writer.users.insert(inode.0, left);
            return Ok(());
        }
        self.release_last_user(inode)
    }

    /// Removes the last user of an inode and deletes an orphan.
    pub(crate) fn release_last_user(&mut self, inode: InodeNumber) -> Result<()> {
        self.is_internal = true;
        let is_orphan = self.is_orphan(inode);
        if is_orphan {
            // Preloaded before any count changes.
            let node = self.read_inode_unchecked(inode)?;
            self.preload_map(&node, 0..u64::MAX)?;
            self.may_block = true;
        }
        self.writer.users.remove(&inode.0);
        self.writer.groups.discard_reservation_window(inode.0);
        if is_orphan {
            self.writer.tmpfiles.remove(&inode.0);
            return self.evict_inode(inode);
        }
        Ok(())
    }
}
