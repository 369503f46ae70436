//! Inodes and their names: made, linked, unlinked; moved by [`renames`].
//!
//! What a change means for the stages of the next chain is noted here; see [`crate::commit`].
//! Where one chain could not be ordered, the batch before is ended first.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "counts links below 65,536 and stages below the number of inodes"
)]

mod renames;

use draconis_exchange::contract::FileType;
use draconis_exchange::omission::InjectedFault;

use super::attributes::Inherited;
use super::names::{DirentLocation, NameLookup};
use super::{NewNode, Whiteout};
use crate::blocks::data::Data;
use crate::commit::batch::{Intent, Operation};
use crate::format::features::{Incompatible, ReadOnlyCompatible};
use crate::format::inode::{Inode, POINTERS, device_pointers, flags, target_pointers};
use crate::format::quota::Usage;
use crate::format::slot::Stamp;
use crate::format::xattr::NewAttribute;
use crate::map::edit::Taking;
use crate::map::extents::empty_root;
use crate::quota::Owner;
use crate::transaction::Transaction;
use crate::units::index;
use crate::{Error, InodeNumber, Result};

/// Names that an inode may have.
const MOST_LINKS: u16 = 32_000;
/// Directories up to the root before they count as a circle.
const MOST_DEPTH: u32 = 1 << 16;

/// What a new inode gets from its request and its directory.
struct Planned {
    /// Permission bits.
    mode: u32,
    gid: u32,
    project: u32,
    /// Of a symbolic link: the pointers that hold its target, if they can.
    target: Option<Option<[u32; POINTERS]>>,
    attributes: Vec<NewAttribute>,
}

impl Planned {
    /// Blocks that something of this kind takes when it is made.
    fn blocks(&self, kind: FileType) -> u64 {
        let slow = matches!(self.target, Some(None));
        u64::from(kind == FileType::Directory || slow) + u64::from(!self.attributes.is_empty())
    }

    const fn owner(&self, uid: u32) -> Owner {
        Owner { uid, gid: self.gid, project: self.project }
    }
}

impl Whiteout {
    fn node(self) -> NewNode<'static> {
        let (kind, mode, device) = (FileType::CharDevice, 0, (0, 0));
        NewNode { kind, mode, uid: self.uid, gid: self.gid, device, target: &[] }
    }
}

/// A whiteout that is going to be made, and the inode that was taken for it.
#[derive(Clone, Copy)]
struct Taken {
    number: InodeNumber,
    whiteout: Whiteout,
}

/// A name, and the directory it is in.
type At<'n> = (InodeNumber, &'n [u8]);

const fn is_dots(name: &[u8]) -> bool {
    matches!(name, b"." | b"..")
}

impl Transaction<'_> {
    /// A directory whose names may change.
    fn changeable(&self, dir: InodeNumber, take: bool) -> Result<std::sync::Arc<Inode>> {
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

    fn one_more_directory(&self, dir: &Inode) -> Result<()> {
        let links = dir.links();
        let uncounted =
            self.volume.super_.read_only_compatible.contains(ReadOnlyCompatible::DIR_NLINK);
        if links >= MOST_LINKS && !uncounted { Err(Error::LinkLimit) } else { Ok(()) }
    }

    /// [`Transaction::seek`] for a name that is going to be made.
    fn seek_free(&self, dir: &Inode, name: &[u8]) -> Result<NameLookup> {
        match self.seek(dir, name) {
            Ok(Err(_)) | Err(Error::NotFound) => self.need_key(dir)?,
            sought => return sought,
        }
        self.seek(dir, name)
    }

    /// Refuses new names where they would have to be encrypted.
    fn need_key(&self, dir: &Inode) -> Result<()> {
        if dir.is_encrypted() { Err(Error::NoKey) } else { Ok(()) }
    }

    /// Counts a subdirectory more or less; 1 means "many" with `dir_nlink`.
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
        let parent = self.changeable(dir, false)?;
        if is_dots(name) {
            return Err(Error::Exists);
        }
        let place = match self.seek_free(&parent, name)? {
            Ok(_) => return Err(Error::Exists),
            Err(place) => place,
        };
        let is_dir = new.kind == FileType::Directory;
        if is_dir {
            self.one_more_directory(&parent)?;
        }
        let birth = self.plan_inode(&parent, new)?;
        let needs = self.blocks_of_name(dir, &place)? + birth.blocks(new.kind);
        let entries = self.entries_needed(birth.owner(new.uid))?;
        self.need(needs + entries, new.uid)?;
        let place = if self.begin(Operation::Create { dir, is_directory: is_dir })? {
            let Err(place) = self.seek(&*self.directory(dir)?, name)? else {
                return Err(Error::Exists);
            };
            place
        } else {
            place
        };
        self.have_entries(birth.owner(new.uid))?;
        let number = self.inode_for(dir, new.kind)?;
        self.make_inode(&parent, number, new, birth, if is_dir { 2 } else { 1 })?;
        self.put_in(dir, place, name, number, new.kind)?;
        self.stamp_directory(dir)?;
        Ok(number)
    }

    /// A file that no name leads to: an orphan from the start, which may still get a name.
    pub(crate) fn create_unnamed(
        &mut self,
        dir: InodeNumber,
        new: &NewNode<'_>,
    ) -> Result<InodeNumber> {
        let parent = self.changeable(dir, false)?;
        self.need_key(&parent)?;
        if new.kind != FileType::File {
            return Err(Error::Misuse("only a file can be made without a name"));
        }
        let birth = self.plan_inode(&parent, new)?;
        let entries = self.entries_needed(birth.owner(new.uid))?;
        self.need(birth.blocks(new.kind) + entries, new.uid)?;
        self.have_entries(birth.owner(new.uid))?;
        let number = self.inode_for(dir, new.kind)?;
        self.make_inode(&parent, number, new, birth, 0)?;
        self.make_orphan(number)?;
        self.writer.unnamed.insert(number.0);
        Ok(number)
    }

    /// What a new inode in `parent` is going to be; nothing is changed yet.
    fn plan_inode(&self, parent: &Inode, new: &NewNode<'_>) -> Result<Planned> {
        let block_bytes = index(self.volume.super_.block_bytes.into());
        let target = match new.kind {
            FileType::Symlink if new.target.is_empty() => return Err(Error::NotFound),
            FileType::Symlink if new.target.len() >= block_bytes => return Err(Error::NameTooLong),
            FileType::Symlink => Some(target_pointers(new.target)),
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
        let Inherited { mode, attributes } = self.inherit(parent, new.kind, mode)?;
        let project = if self.hands_project_down(parent) { parent.project() } else { 0 };
        Ok(Planned { mode, gid, project, target, attributes })
    }

    /// Whether all that is in a directory belongs to its project.
    fn hands_project_down(&self, dir: &Inode) -> bool {
        let features = self.volume.super_.read_only_compatible;
        features.contains(ReadOnlyCompatible::PROJECT) && dir.flags & flags::PROJECT != 0
    }

    /// Refuses to let an inode into a directory of another project.
    fn may_belong(&self, inode: &Inode, dir: &Inode) -> Result<()> {
        let other = self.hands_project_down(dir) && inode.project() != dir.project();
        if other { Err(Error::OtherProject) } else { Ok(()) }
    }

    /// Sees to it that so many blocks can be had.
    fn need(&mut self, blocks: u64, uid: u32) -> Result<()> {
        match blocks {
            0 => Ok(()),
            blocks => self.need_blocks(blocks, self.is_privileged(uid)),
        }
    }

    /// Makes the inode that was taken for something in `parent`; no name leads to it yet.
    fn make_inode(
        &mut self,
        parent: &Inode,
        number: InodeNumber,
        new: &NewNode<'_>,
        birth: Planned,
        links: u16,
    ) -> Result<()> {
        let dir = parent.number;
        let is_dir = new.kind == FileType::Directory;
        let privileged = self.is_privileged(new.uid);
        self.forget_access(number);
        self.record(Intent::Born { inode: number, parent: is_dir.then_some(dir) });
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
            || matches!(birth.target, Some(None));
        let has_extents = self.volume.super_.incompatible.contains(Incompatible::EXTENTS);
        let of_map = if is_mapped && has_extents { flags::EXTENTS } else { 0 };
        let full_mode = u16::try_from(new.kind.mode_bits() | birth.mode).unwrap_or(0);
        self.change_slot(number, |it| {
            it.clear();
            it.extend();
            it.set_mode(full_mode);
            it.set_owner(new.uid, birth.gid);
            it.set_project(birth.project);
            it.set_links(links);
            it.set_flags(inherited_flags | of_map);
            it.set_generation(generation);
            for stamp in [Stamp::Accessed, Stamp::Modified, Stamp::Changed, Stamp::Created] {
                it.set_time(stamp, now);
            }
            match (new.kind, birth.target) {
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
        self.count_usage(number, Usage { inodes: 1, bytes: 0 })?;
        let block_bytes = self.volume.super_.block_bytes;
        let taking = Taking { grows: false, privileged, unwritten: false };
        if is_dir {
            let all = self.map_blocks(number, 0..1, taking)?;
            let first = all.first().ok_or(Error::NoSpace)?.at;
            let names = self.first_names(number, dir);
            self.put_fresh(first, self.directory_role(number)?, names);
            self.change_slot(number, |it| it.set_size(block_bytes.into()))?;
            self.count_subdirectory(dir, true)?;
        } else if matches!(birth.target, Some(None)) {
            let all = self.map_blocks(number, 0..1, taking)?;
            let first = all.first().ok_or(Error::NoSpace)?.at;
            let mut bytes = new.target.to_vec();
            bytes.resize(index(block_bytes.into()), 0);
            self.put_contents(first, &Data::owned(bytes.into_boxed_slice()));
            self.change_slot(number, |it| it.set_size(new.target.len() as u64))?;
        }
        if !birth.attributes.is_empty() {
            self.store_attributes(number, &birth.attributes)?;
        }
        Ok(())
    }

    pub(crate) fn link(&mut self, inode: InodeNumber, dir: InodeNumber, name: &[u8]) -> Result<()> {
        let node = self.node(inode)?;
        let parent = self.changeable(dir, false)?;
        if node.kind == FileType::Directory || node.flags & (flags::IMMUTABLE | flags::APPEND) != 0
        {
            return Err(Error::NotPermitted);
        }
        if node.links() >= MOST_LINKS {
            return Err(Error::LinkLimit);
        }
        // Of those that it had before, the kernel knows which may have one.
        let may_have = self.writer.taken_over || self.writer.unnamed.contains(&inode.0);
        let first = may_have && !InjectedFault::LinkTmpfile.is_made();
        if self.is_orphan(inode) && !first {
            return Err(Error::NotFound);
        }
        if is_dots(name) {
            return Err(Error::Exists);
        }
        let Err(place) = self.seek_free(&parent, name)? else { return Err(Error::Exists) };
        self.may_belong(&node, &parent)?;
        let needs = self.blocks_of_name(dir, &place)?;
        self.need(needs, parent.owner().0)?;
        self.put_in(dir, place, name, inode, node.kind)?;
        if self.writer.unnamed.remove(&inode.0) {
            // Its first name. On disk it is dead, as any new inode is.
            self.forget_orphan(inode)?;
            self.record(Intent::Born { inode, parent: None });
        }
        self.change_slot(inode, |it| it.set_links(it.links().saturating_add(1)))?;
        if !InjectedFault::LinkTime.is_made() {
            self.stamp(inode, &[Stamp::Changed])?;
        }
        self.record(Intent::Linked { inode });
        self.stamp_directory(dir)
    }

    pub(crate) fn unlink(&mut self, dir: InodeNumber, name: &[u8]) -> Result<()> {
        let parent = self.changeable(dir, true)?;
        if is_dots(name) {
            return Err(Error::IsADirectory);
        }
        let Ok(spot) = self.seek(&parent, name)? else { return Err(Error::NotFound) };
        let inode = spot.found.inode;
        match self.node(inode) {
            Ok(node) if node.kind == FileType::Directory => return Err(Error::IsADirectory),
            Ok(node) if node.flags & (flags::IMMUTABLE | flags::APPEND) != 0 => {
                return Err(Error::NotPermitted);
            }
            Ok(node) => self.have_for_death(&node)?,
            // A name that leads nowhere is what a power cut may leave.
            Err(Error::NotFound) => {
                self.take_out(dir, spot)?;
                return self.stamp_directory(dir);
            }
            Err(other) => return Err(other),
        }
        let moved = self.begin(Operation::Unlink { inode })?;
        let spot = if moved { self.spot(dir, name)? } else { spot };
        self.take_out(dir, spot)?;
        self.stamp_directory(dir)?;
        self.lose_name(dir, inode)
    }

    /// Where a name is that was there before the batch was ended: blocks move then.
    fn spot(&self, dir: InodeNumber, name: &[u8]) -> Result<DirentLocation> {
        let node = self.directory(dir)?;
        let lost = Error::corrupt("directory: a name is gone").of_inode(dir);
        self.seek(&node, name)?.map_err(|_| lost)
    }

    /// Sees to it that an inode can lose its last name without the device.
    fn have_for_death(&mut self, inode: &Inode) -> Result<()> {
        let has_users = self.has_users(inode.number);
        let is_last = inode.links() <= 1 || inode.kind == FileType::Directory;
        if is_last && !has_users { self.have_map(inode, 0) } else { Ok(()) }
    }

    /// Counts one name less, and buries an inode that has none and no users.
    fn lose_name(&mut self, dir: InodeNumber, inode: InodeNumber) -> Result<()> {
        let left = self.change_slot(inode, |it| {
            it.set_links(it.links().saturating_sub(1));
            it.links()
        })?;
        self.stamp(inode, &[Stamp::Changed])?;
        if left > 0 {
            self.record(Intent::Left { inode, dir });
            return Ok(());
        }
        self.die(dir, inode)
    }

    /// Whether what an inode has cannot go with its name, in one batch.
    fn is_too_large_to_die(&self, inode: InodeNumber) -> Result<bool> {
        if self.writer.protocol.most_lost(self.volume.super_.groups).is_none() {
            return Ok(false);
        }
        let node = self.peek(inode)?;
        Ok(node.has_map(&self.volume.super_) && !self.cuts(inode, 0)?.is_empty())
    }

    fn die(&mut self, dir: InodeNumber, inode: InodeNumber) -> Result<()> {
        self.record(Intent::Died { inode, dir });
        if self.has_users(inode) {
            self.make_orphan(inode)
        } else if self.is_too_large_to_die(inode)? {
            self.writer.dying.push(inode.0);
            self.make_orphan(inode)
        } else {
            self.delete(inode)
        }
    }

    pub(crate) fn remove_directory(&mut self, dir: InodeNumber, name: &[u8]) -> Result<()> {
        let parent = self.changeable(dir, true)?;
        match name {
            b"." => return Err(Error::Misuse("`.` cannot be removed")),
            b".." => return Err(Error::NotEmpty),
            _ => {}
        }
        let Ok(spot) = self.seek(&parent, name)? else { return Err(Error::NotFound) };
        let inode = spot.found.inode;
        let node = self.node(inode)?;
        if node.kind != FileType::Directory {
            return Err(Error::NotADirectory);
        }
        if node.flags & (flags::IMMUTABLE | flags::APPEND) != 0 {
            return Err(Error::NotPermitted);
        }
        if inode == dir || inode == InodeNumber::ROOT {
            return Err(Error::corrupt("directory: names itself").of_inode(dir));
        }
        if !self.is_empty(&node)? {
            return Err(Error::NotEmpty);
        }
        self.have_for_death(&node)?;
        let moved = self.begin(Operation::RemoveDirectory { inode })?;
        let spot = if moved { self.spot(dir, name)? } else { spot };
        self.take_out(dir, spot)?;
        self.lose_directory(dir, inode)?;
        self.stamp_directory(dir)
    }

    /// An empty directory has lost its name.
    fn lose_directory(&mut self, dir: InodeNumber, inode: InodeNumber) -> Result<()> {
        self.count_subdirectory(dir, false)?;
        self.change_slot(inode, |it| it.set_links(0))?;
        self.stamp(inode, &[Stamp::Changed])?;
        self.die(dir, inode)
    }

    /// Counts users; see [`crate::Volume::release`].
    pub(crate) fn release(&mut self, inode: InodeNumber, users: u64) -> Result<()> {
        if self.writer.taken_over {
            return Ok(());
        }
        let Some(count) = self.writer.users.get(&inode.0).copied() else { return Ok(()) };
        let left = count.saturating_sub(users);
        if left > 0 {
            self.writer.users.insert(inode.0, left);
            return Ok(());
        }
        self.give_back(inode)
    }

    /// The last user of an inode is gone.
    pub(crate) fn give_back(&mut self, inode: InodeNumber) -> Result<()> {
        self.follows = true;
        let is_orphan = self.is_orphan(inode);
        if is_orphan {
            // Before anything is counted.
            let node = self.peek(inode)?;
            self.have_map(&node, 0)?;
            self.may_wait = true;
        }
        self.writer.users.remove(&inode.0);
        self.writer.groups.drop_window(inode.0);
        if is_orphan {
            self.writer.unnamed.remove(&inode.0);
            return self.delete(inode);
        }
        Ok(())
    }
}
