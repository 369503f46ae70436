//! Mode, owner, times, flags, and extended attributes.
//!
//! Law: an xattr block is never changed in place: the new block is written first, and the inode
//! references it then.

use draconis_types::injected_fault::InjectedFault;
use draconis_types::{AttributeChange, FileType, SetTime};

use crate::alloc::AllocationRequest;
use crate::blocks::role::Role;
use crate::format::acl::Acl;
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::inode::{Inode, flags};
use crate::format::inode_slot::InodeTime;
use crate::format::requirements::Feature;
use crate::format::xattr::{self, NewXattr, XattrSet, check_name, edit};
use crate::quota::Owner;
use crate::transaction::Transaction;
use crate::{Error, FsBlock, GroupNumber, InodeNumber, Result};

const ACCESS_ACL: &[u8] = b"system.posix_acl_access";
const DEFAULT_ACL: &[u8] = b"system.posix_acl_default";

/// Attributes that a new inode inherits from its directory.
pub(crate) struct InheritedAttributes {
    pub(crate) mode: u32,
    pub(crate) attributes: Vec<NewXattr>,
}

impl Transaction<'_> {
    pub(crate) fn set_attributes(
        &mut self,
        number: InodeNumber,
        change: &AttributeChange,
    ) -> Result<()> {
        let inode = self.node(number)?;
        if inode.flags & flags::IMMUTABLE != 0 {
            return Err(Error::NotPermitted);
        }
        let owns = change.mode.is_some() || change.uid.is_some() || change.gid.is_some();
        // Setting both times to now, as `touch` does, and times that a front end cached, are
        // allowed.
        let now = change.accessed.is_none() && change.modified.is_none()
            || change.changed.is_some()
            || (change.accessed, change.modified) == (Some(SetTime::Now), Some(SetTime::Now));
        let sets = owns || !now || change.size_bytes.is_some();
        if inode.flags & flags::APPEND != 0 && sets && !InjectedFault::AppendOnly.is_made() {
            return Err(Error::NotPermitted);
        }
        let (uid, gid) = inode.owner();
        let (uid, gid) = (change.uid.unwrap_or(uid), change.gid.unwrap_or(gid));
        if (uid, gid) != inode.owner() {
            self.ensure_entries(Owner { uid, gid, project: inode.project() })?;
        }
        if let Some(size) = change.size_bytes {
            let file = self.regular_file(number)?;
            self.truncate(&file, size)?;
        }
        if change.uid.is_some() || change.gid.is_some() {
            self.transfer_usage(number, |it| it.set_owner(uid, gid))?;
        }
        if let Some(mode) = change.mode {
            let bits = u16::try_from(mode & 0o7777).unwrap_or(0);
            self.change_slot(number, |it| it.set_mode(it.mode() & 0o170_000 | bits))?;
            self.chmod_acl(&inode, mode)?;
        }
        if change.accessed.is_some() {
            self.discard_access_time(number);
        }
        let now = self.now;
        self.change_slot(number, |it| {
            for (stamp, time) in
                [(InodeTime::Accessed, change.accessed), (InodeTime::Modified, change.modified)]
            {
                match time {
                    Some(SetTime::Now) => it.set_time(stamp, now),
                    Some(SetTime::To(time)) => it.set_time(stamp, time),
                    None => {}
                }
            }
            match change.changed {
                Some(SetTime::To(time)) => it.set_time(InodeTime::Changed, time),
                None if InjectedFault::ChangeTime.is_made() => {}
                Some(SetTime::Now) | None => it.set_time(InodeTime::Changed, now),
            }
        })
    }

    /// Updates the access ACL after a change of mode.
    fn chmod_acl(&mut self, inode: &Inode, mode: u32) -> Result<()> {
        if inode.kind == FileType::Symlink || !inode.has_xattrs() {
            return Ok(());
        }
        let Some(list) = self.read_acl(inode, ACCESS_ACL)? else { return Ok(()) };
        let bits = u16::try_from(mode & 0o777).unwrap_or(0);
        self.put_xattr(inode, ACCESS_ACL, &list.chmod(bits).to_xattr(), XattrSet::Any)
    }

    fn xattr_of(&self, inode: &Inode, name: &[u8]) -> Result<Vec<u8>> {
        self.read_slot(inode.number, |_| ())?;
        if let Some(at) = inode.xattr_block.filter(|at| self.volume.super_.is_valid_block(*at)) {
            self.block(at, Role::XattrBlock)?;
        }
        self.volume.xattr_of(inode, name)
    }

    fn read_acl(&self, inode: &Inode, name: &[u8]) -> Result<Option<Acl>> {
        match self.xattr_of(inode, name) {
            Ok(bytes) => Acl::from_xattr(&bytes),
            Err(Error::NoAttribute) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the mode and ACLs of a new inode in `parent`.
    pub(crate) fn inherit_attributes(
        &self,
        parent: &Inode,
        kind: FileType,
        mode: u32,
    ) -> Result<InheritedAttributes> {
        let plain = InheritedAttributes { mode, attributes: Vec::new() };
        if kind == FileType::Symlink || !parent.has_xattrs() {
            return Ok(plain);
        }
        let Some(default) = self.read_acl(parent, DEFAULT_ACL)? else { return Ok(plain) };
        let bits = u16::try_from(mode & 0o7777).unwrap_or(0);
        let (access, mode) = default.inherit(bits);
        let mut attributes = Vec::new();
        let mut add = |name: &[u8], list: &Acl| -> Result<()> {
            attributes.extend(NewXattr::new(name, &list.to_xattr())?);
            Ok(())
        };
        if let Some(access) = access {
            add(ACCESS_ACL, &access)?;
        }
        if kind == FileType::Directory {
            add(DEFAULT_ACL, &default)?;
        }
        Ok(InheritedAttributes { mode: mode.into(), attributes })
    }

    pub(crate) fn set_xattr(
        &mut self,
        number: InodeNumber,
        name: &[u8],
        value: &[u8],
        how: XattrSet,
        clear_setgid: bool,
    ) -> Result<()> {
        let inode = self.node(number)?;
        if inode.flags & (flags::IMMUTABLE | flags::APPEND) != 0 {
            return Err(Error::NotPermitted);
        }
        check_name(name)?;
        let is_list = name == ACCESS_ACL || name == DEFAULT_ACL;
        if !is_list {
            if self.is_xattr_unchanged(&inode, name, value, how)? {
                return Ok(());
            }
            self.put_xattr(&inode, name, value, how)?;
            return self.set_times_now(number, &[InodeTime::Changed]);
        }
        if inode.kind == FileType::Symlink {
            return Err(Error::Unsupported { feature: "access lists of symbolic links".into() });
        }
        if name == DEFAULT_ACL && inode.kind != FileType::Directory {
            return Err(Error::Misuse("only directories have default access lists"));
        }
        let Some(list) = Acl::from_xattr(value)? else {
            return self.remove_xattr(number, name);
        };
        let bits = list.access_mode();
        let kept = if clear_setgid { !0o2777 } else { !0o777 };
        let old = self.read_slot(number, |it| it.mode())?;
        let mode = if name == ACCESS_ACL { old & kept | bits } else { old };
        let linux = list.to_xattr();
        if mode == old && self.is_xattr_unchanged(&inode, name, &linux, how)? {
            return Ok(());
        }
        if name == ACCESS_ACL && list.is_equivalent_to_mode() {
            match self.remove_xattr_entry(&inode, name) {
                Ok(()) | Err(Error::NoAttribute) => {}
                Err(error) => return Err(error),
            }
        } else {
            self.put_xattr(&inode, name, &linux, how)?;
        }
        self.change_slot(number, |it| it.set_mode(mode))?;
        self.set_times_now(number, &[InodeTime::Changed])
    }

    /// Returns true if the attribute has that value already: then nothing changes, not even a time.
    fn is_xattr_unchanged(
        &self,
        inode: &Inode,
        name: &[u8],
        value: &[u8],
        how: XattrSet,
    ) -> Result<bool> {
        if how == XattrSet::Create || !inode.has_xattrs() {
            return Ok(false);
        }
        match self.xattr_of(inode, name) {
            Ok(old) => Ok(old == value),
            Err(Error::NoAttribute) => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn remove_xattr(&mut self, number: InodeNumber, name: &[u8]) -> Result<()> {
        let inode = self.node(number)?;
        if inode.flags & (flags::IMMUTABLE | flags::APPEND) != 0 {
            return Err(Error::NotPermitted);
        }
        check_name(name)?;
        match self.remove_xattr_entry(&inode, name) {
            // Removing a missing ACL succeeds.
            Err(Error::NoAttribute) if name == ACCESS_ACL || name == DEFAULT_ACL => return Ok(()),
            dropped => dropped?,
        }
        self.set_times_now(number, &[InodeTime::Changed])
    }

    fn put_xattr(&mut self, inode: &Inode, name: &[u8], value: &[u8], how: XattrSet) -> Result<()> {
        let new = NewXattr::new(name, value)?.ok_or_else(|| Error::Unsupported {
            feature: format!("extended attribute {}", name.escape_ascii()),
        })?;
        let mut all = self.read_xattrs(inode)?;
        edit::set_attribute(&mut all, new.clone(), how)?;
        self.move_to_ea_inode(inode, &mut all, &new)?;
        self.write_xattrs(inode.number, &all)
    }

    fn remove_xattr_entry(&mut self, inode: &Inode, name: &[u8]) -> Result<()> {
        let mut all = self.read_xattrs(inode)?;
        edit::remove_attribute(&mut all, name)?;
        self.write_xattrs(inode.number, &all)
    }

    /// Reads all attributes: first those in the inode, then those of its xattr block.
    fn read_xattrs(&self, inode: &Inode) -> Result<Vec<NewXattr>> {
        let of_inode = |error: Error| error.with_inode(inode.number);
        let mut all = self
            .read_slot(inode.number, |it| edit::read_body(it.inline_xattrs()))?
            .map_err(of_inode)?;
        if let Some(at) = inode.xattr_block {
            if !self.volume.super_.is_valid_block(at) {
                return Err(of_inode(Error::corrupt("extended attribute block: number")));
            }
            let block = self.block(at, Role::XattrBlock).map_err(of_inode)?;
            all.extend(edit::read_block(&block).map_err(|error| of_inode(error.with_block(at)))?);
        }
        let known = self.volume.super_.incompatible.contains(Incompatible::EA_INODE);
        if !known && all.iter().any(|attribute| attribute.ea_inode().is_some()) {
            let what = "extended attribute: value outside, without ea_inode";
            return Err(of_inode(Error::corrupt(what)));
        }
        Ok(all)
    }

    /// Stores all attributes of an inode.
    pub(crate) fn write_xattrs(&mut self, number: InodeNumber, all: &[NewXattr]) -> Result<()> {
        let block_bytes = self.volume.super_.block_bytes;
        let room = self.read_slot(number, |it| it.xattr_capacity())?;
        let old = self.read_slot(number, |it| it.xattr_block())?;
        let placed = edit::lay_out_attributes(all, room, block_bytes)?;
        let same = match (&placed.block, old) {
            (Some(new), 1..) => {
                xattr::equals_ignoring_checksum(&self.block(FsBlock(old), Role::XattrBlock)?, new)
            }
            (None, 0) => true,
            _ => false,
        };
        let shifted = self.ea_ref_changes(number, &placed, same)?;
        if !same && let Some(block) = &placed.block {
            let (uid, _) = self.read_slot(number, |it| it.owner())?;
            match self.check_free_blocks(1, self.is_privileged(uid)) {
                Ok(()) => {}
                // On a full volume, a smaller set may be written in place.
                Err(_) if self.is_xattr_subset(old, block)? => {
                    self.change_slot(number, |it| {
                        it.set_inline_xattrs(if placed.has_inode_xattrs {
                            &placed.body
                        } else {
                            &[]
                        });
                    })?;
                    self.modify_block(FsBlock(old), Role::XattrBlock, |bytes| {
                        bytes.copy_from_slice(block);
                    })?;
                    return self.apply_ea_ref_changes(number, shifted);
                }
                Err(error) => return Err(error),
            }
        }
        let (group, _) = self.writer.groups.locate_inode_bit(number).ok_or(Error::NotFound)?;
        let goal = self.volume.super_.group_start(GroupNumber(group)).0;
        // The bitmaps that are needed after the first change.
        if !same
            && old != 0
            && xattr::refcount(&self.block(FsBlock(old), Role::XattrBlock)?) == Some(1)
        {
            self.preload_bitmap_of_block(old)?;
        }
        if !same && placed.block.is_some() {
            self.preload_bitmap_of_block(goal)?;
        }
        self.change_slot(number, |it| {
            it.set_inline_xattrs(if placed.has_inode_xattrs { &placed.body } else { &[] });
        })?;
        if same {
            return self.apply_ea_ref_changes(number, shifted);
        }
        self.release_xattr_block(number)?;
        if let Some(block) = placed.block {
            let (uid, _) = self.read_slot(number, |it| it.owner())?;
            let privileged = self.is_privileged(uid);
            let (at, taken) = self.allocate_blocks(AllocationRequest {
                goal,
                count: 1,
                append_inode: None,
                privileged,
                is_for_extent_node: false,
            })?;
            self.put_new_block(FsBlock(at), Role::XattrBlock, block);
            self.change_slot(number, |it| it.set_xattr_block(at))?;
            self.add_sectors(number, taken.into())?;
        }
        if !all.is_empty() && !self.volume.super_.compatible.contains(Compatible::EXT_ATTR) {
            self.set_ro_compat_feature(Feature::C(Compatible::EXT_ATTR))?;
        }
        self.apply_ea_ref_changes(number, shifted)
    }

    /// Returns true if `new` holds fewer attributes than block `old`, which no other inode shares.
    fn is_xattr_subset(&self, old: u64, new: &[u8]) -> Result<bool> {
        if old == 0 {
            return Ok(false);
        }
        let bytes = self.block(FsBlock(old), Role::XattrBlock)?;
        let before = edit::read_block(&bytes)?.len();
        Ok(xattr::refcount(&bytes) == Some(1) && edit::read_block(new)?.len() < before)
    }

    /// Frees the xattr block, or drops this inode's reference to it.
    pub(crate) fn release_xattr_block(&mut self, number: InodeNumber) -> Result<()> {
        let old = self.read_slot(number, |it| it.xattr_block())?;
        if old == 0 {
            return Ok(());
        }
        let at = FsBlock(old);
        let wrong = Error::corrupt("extended attribute block: number").with_block(at);
        if !self.volume.super_.is_valid_block(at) {
            return Err(wrong.with_inode(number));
        }
        let owners = xattr::refcount(&self.block(at, Role::XattrBlock)?).unwrap_or(1);
        // Each inode that shares the block accounts for all of it.
        let taken = self.cluster_blocks().into();
        self.change_slot(number, |it| it.set_xattr_block(0))?;
        self.subtract_sectors(number, taken)?;
        if owners > 1 {
            return self.modify_block(at, Role::XattrBlock, |bytes| {
                xattr::set_refcount(bytes, owners.saturating_sub(1));
            });
        }
        self.free_blocks(at.0, 1).map(drop)
    }

    pub(crate) fn set_flags(&mut self, number: InodeNumber, wanted: u32) -> Result<()> {
        let inode = self.node(number)?;
        let fitting = match inode.kind {
            FileType::Directory => !0,
            FileType::File => !flags::DIRECTORY_ONLY,
            _ => flags::OTHER_FLMASK,
        };
        let changed = (inode.flags ^ wanted) & flags::USER_MODIFIABLE;
        let mut settable = flags::SETTABLE;
        if self.volume.super_.read_only_compatible.contains(ReadOnlyCompatible::PROJECT) {
            settable |= flags::PROJECT;
        }
        let changes_case = changed & flags::CASEFOLD != 0;
        if self.volume.super_.incompatible.contains(Incompatible::CASEFOLD) {
            settable |= flags::CASEFOLD;
        }
        if changes_case && inode.kind != FileType::Directory {
            return Err(Error::NotADirectory);
        }
        let strange = wanted & !flags::ACCEPTED_BY_SETFLAGS != 0
            || wanted & flags::USER_MODIFIABLE & !fitting != 0
            || changed & !settable != 0;
        if strange {
            return Err(Error::Unsupported { feature: "this inode flag".into() });
        }
        // An inode that stays immutable permits no other flag change.
        if inode.flags & wanted & flags::IMMUTABLE != 0 && changed != 0 {
            return Err(Error::NotPermitted);
        }
        if changes_case && inode.is_encrypted() && wanted & flags::CASEFOLD != 0 {
            return Err(Error::NoKey);
        }
        if changes_case && !self.is_empty(&inode)? {
            return Err(Error::NotEmpty);
        }
        self.change_slot(number, |it| {
            it.set_flags(it.flags() & !settable | wanted & settable);
        })?;
        self.set_times_now(number, &[InodeTime::Changed])
    }

    pub(crate) fn set_project(&mut self, number: InodeNumber, project: u32) -> Result<()> {
        let inode = self.node(number)?;
        if inode.project() == project {
            return Ok(());
        }
        let features = self.volume.super_.read_only_compatible;
        if !features.contains(ReadOnlyCompatible::PROJECT) {
            return Err(Error::Unsupported { feature: "projects of files need: project".into() });
        }
        if inode.flags & (flags::IMMUTABLE | flags::APPEND) != 0 {
            return Err(Error::NotPermitted);
        }
        if !self.read_slot(number, |it| it.has_project())? {
            let feature = "the inode has no room for a project".to_owned();
            return Err(Error::Unsupported { feature });
        }
        let (uid, gid) = inode.owner();
        self.ensure_entries(Owner { uid, gid, project })?;
        self.transfer_usage(number, |it| it.set_project(project))?;
        self.set_times_now(number, &[InodeTime::Changed])
    }
}
