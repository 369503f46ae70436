//! Changes of an open volume: each call is one transaction, or a few for large data.

use std::sync::Arc;
use std::time::Duration;

use draconis_device::Disk;
use draconis_types::SharedSlice;
use draconis_types::{AttributeChange, Attributes, FileType, Time};

use super::Volume;
use crate::blocks::data::SharedBytes;
use crate::format::inode::{Inode, flags};
use crate::format::inode_slot::InodeTime;
use crate::format::xattr::XattrSet;
use crate::ops::{Access, AccessTimes, NewNode, RenameMode, Reserve, Whiteout};
use crate::options::{OpenOptions, WriteOptions};
use crate::transaction::Transaction;
use crate::units::{saturating_u32, saturating_usize};
use crate::write_context::{StopReason, WriteContext};
use crate::{Error, InodeNumber, MmpClaim, Result};

/// Limit of bytes written by one change; other changes run between two of them.
const MAX_WRITE_STEP_BYTES: usize = 1 << 20;
/// Limit of bytes reserved by one change.
const MAX_FALLOCATE_STEP_BYTES: u64 = 4 << 20;

impl Volume {
    /// Opens the volume on `disk` for reading and writing, and deletes the orphans of its last use.
    /// The disk changes, and is marked as in use, with the first commit of a change.
    ///
    /// # Errors
    /// As [`Volume::open`]; [`Error::Unsupported`] naming the feature that writing needs;
    /// [`Error::ReadOnly`] if the disk is read-only.
    pub fn open_for_writing(
        disk: Arc<dyn Disk>,
        options: OpenOptions,
        writing: WriteOptions,
    ) -> Result<Self> {
        Self::mount(disk, options, writing, None, None)
    }

    /// Opens a volume with an MMP claim, which closing the volume releases. The caller must call
    /// [`Volume::renew_claim`] until then.
    ///
    /// # Errors
    /// As [`Volume::open_for_writing`].
    pub fn open_with_claim(
        disk: Arc<dyn Disk>,
        options: OpenOptions,
        writing: WriteOptions,
        claim: Option<MmpClaim>,
    ) -> Result<Self> {
        Self::mount(disk, options, writing, None, claim)
    }

    /// Renews the MMP claim and returns the time until the next renewal. Returns `None` without a
    /// claim, or once writing stopped.
    ///
    /// # Errors
    /// [`Error::InUse`] if another host has claimed the volume, and errors of the device; writing
    /// stops then.
    pub fn renew_claim(&self) -> Result<Option<Duration>> {
        let Some(writing) = self.writing.as_ref().filter(|it| !it.is_stopped()) else {
            return Ok(None);
        };
        let Some(claim) = &writing.claim else { return Ok(None) };
        if let Err(error) = claim.renew((writing.clock)()) {
            writing.state.write().stop(&error);
            return Err(error);
        }
        Ok(Some(claim.interval()))
    }

    /// Makes a closed volume writable again.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] if it was opened read-only, or writing failed.
    pub fn reopen(&self) -> Result<()> {
        let writing = self.writing.as_ref().ok_or(Error::ReadOnly)?;
        if writing.claim.is_some() {
            let feature = "the volume guards against two hosts (mmp), and was given back: unmount it \
                           and mount it again";
            return Err(Error::Unsupported { feature: feature.to_owned() });
        }
        let mut writer = writing.state.write();
        match writer.stopped() {
            Some(StopReason::Failed(_)) => Err(Error::ReadOnly),
            Some(StopReason::Closed) => {
                writer.set_stopped(None);
                writer.is_marked_in_use = false;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Returns true if changes are possible: not if the volume was opened read-only, closed, or
    /// stopped.
    pub fn is_writable(&self) -> bool {
        self.writing.as_ref().is_some_and(|writing| !writing.is_stopped())
    }

    /// Returns the error that stopped writing, if any.
    pub fn failure(&self) -> Option<String> {
        self.read_lock().and_then(|writer| writer.failure())
    }

    /// Returns the number of changes made, if any of them is uncommitted.
    pub fn uncommitted_changes(&self) -> Option<u64> {
        let writing = self.writing.as_ref()?;
        let writer = self
            .read_lock()
            .filter(|it| it.batch.dirty || writing.pending_access_times.has_due_times())?;
        Some(writer.change_count.wrapping_add(writing.pending_access_times.recorded_count()))
    }

    /// Installs `tell`, called within the first change after a commit. It must not call the volume.
    pub fn on_first_change(&self, tell: impl Fn() + Send + Sync + 'static) {
        if let Some(writing) = &self.writing {
            *writing.on_first_change.lock() = Some(Box::new(tell));
        }
    }

    /// Creates a file, directory, symbolic link, device, fifo or socket.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::NotADirectory`], [`Error::NameTooLong`], [`Error::NoSpace`],
    /// [`Error::LinkLimit`] for too many subdirectories, [`Error::ReadOnly`], and errors of damage
    /// and devices.
    pub fn create(&self, dir: InodeNumber, name: &[u8], new: &NewNode<'_>) -> Result<InodeNumber> {
        self.transact_with_space(0, |tx| tx.create(dir, name, new))
    }

    /// Creates an `O_TMPFILE` inode in the group of `dir`, which also passes on its attributes. The
    /// inode is deleted when its last user goes ([`Volume::add_user`]), unless it got a name.
    ///
    /// # Errors
    /// As [`Volume::create`].
    pub fn create_tmpfile(&self, dir: InodeNumber, new: &NewNode<'_>) -> Result<InodeNumber> {
        self.transact_with_space(0, |tx| tx.create_tmpfile(dir, new))
    }

    /// Returns `Ok` if the inode's flags permit `access`, by the rules of Linux.
    ///
    /// # Errors
    /// [`Error::NotPermitted`]; [`Error::NoKey`] for an encrypted file; as [`Volume::inode`].
    pub fn check_open(&self, inode: InodeNumber, access: Access) -> Result<()> {
        let inode = self.inode(inode)?;
        let has = inode.flags;
        let forbidden = access.write
            && (has & (flags::IMMUTABLE | flags::VERITY) != 0
                || has & flags::APPEND != 0 && !access.append);
        match forbidden {
            true => Err(Error::NotPermitted),
            false if inode.kind == FileType::File && inode.is_encrypted() => Err(Error::NoKey),
            false => Ok(()),
        }
    }

    /// Adds a name to `inode`; the first one, for an inode of [`Volume::create_tmpfile`].
    ///
    /// # Errors
    /// As [`Volume::create`]; [`Error::LinkLimit`]; [`Error::NotPermitted`] for a directory.
    pub fn link(&self, inode: InodeNumber, dir: InodeNumber, name: &[u8]) -> Result<()> {
        self.transact_with_space(0, |tx| tx.link(inode, dir, name))
    }

    /// Removes a name that is not a directory's.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::IsADirectory`], [`Error::ReadOnly`].
    pub fn unlink(&self, dir: InodeNumber, name: &[u8]) -> Result<()> {
        self.transact(|tx| tx.unlink(dir, name))
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotADirectory`], [`Error::NotEmpty`], [`Error::ReadOnly`].
    pub fn remove_directory(&self, dir: InodeNumber, name: &[u8]) -> Result<()> {
        self.transact(|tx| tx.remove_directory(dir, name))
    }

    /// Renames an inode.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Exists`], [`Error::NotEmpty`], [`Error::IsADirectory`],
    /// [`Error::NotADirectory`], [`Error::Misuse`] for a directory into itself,
    /// [`Error::NoSpace`], [`Error::LinkLimit`], [`Error::ReadOnly`].
    pub fn rename(
        &self,
        from_dir: InodeNumber,
        from: &[u8],
        to_dir: InodeNumber,
        to: &[u8],
        how: RenameMode,
    ) -> Result<()> {
        self.transact_with_space(0, |tx| tx.rename((from_dir, from), (to_dir, to), how, None))
    }

    /// Renames an inode and leaves a whiteout under the old name.
    ///
    /// # Errors
    /// As [`Volume::rename`].
    pub fn rename_with_whiteout(
        &self,
        from_dir: InodeNumber,
        from: &[u8],
        to_dir: InodeNumber,
        to: &[u8],
        how: RenameMode,
        whiteout: Whiteout,
    ) -> Result<()> {
        self.transact_with_space(0, |tx| {
            tx.rename((from_dir, from), (to_dir, to), how, Some(whiteout))
        })
    }

    /// Writes `bytes` at `offset` and returns how many were written: fewer only if space ran out.
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::TooLarge`], [`Error::IsADirectory`],
    /// [`Error::ReadOnly`].
    pub fn write(&self, inode: InodeNumber, offset: u64, bytes: &[u8]) -> Result<usize> {
        self.write_chunked(inode, offset, bytes, None)
    }

    /// Writes shared bytes as [`Volume::write`] does; whole blocks of them are not copied.
    ///
    /// # Errors
    /// As [`Volume::write`].
    pub fn write_shared(
        &self,
        inode: InodeNumber,
        offset: u64,
        bytes: &SharedSlice,
    ) -> Result<usize> {
        self.write_chunked(inode, offset, bytes, Some(&SharedBytes::from_piece(bytes.clone())))
    }

    /// Allocates, punches or zeroes a range, as `fallocate`.
    ///
    /// # Errors
    /// As [`Volume::write`].
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    pub fn fallocate(
        &self,
        number: InodeNumber,
        offset: u64,
        len: u64,
        how: Reserve,
    ) -> Result<()> {
        if len == 0 {
            return Err(Error::Misuse("no bytes to reserve"));
        }
        self.convert_inline(number)?;
        let inode = self.inode(number)?;
        let end =
            offset.checked_add(len).filter(|end| *end <= self.reader.max_file_bytes_of(&inode));
        let end = end.ok_or(Error::TooLarge)?;
        if how == Reserve::PunchHole {
            return self
                .transact_with_space(0, |tx| tx.punch_or_zero_range(number, offset, end, false));
        }
        let keep = matches!(how, Reserve::KeepSize | Reserve::ZeroRange { keep_size: true });
        if keep && !inode.has_extents() {
            // A block map cannot mark blocks after the end of the file as intended.
            let size = self.transact(|tx| Ok(tx.regular_file(number)?.size_bytes))?;
            if end > size.next_multiple_of(self.reader.super_.block_bytes.into()) {
                let feature = "blocks behind the end of a file need: extent".to_owned();
                return Err(Error::Unsupported { feature });
            }
        }
        if matches!(how, Reserve::ZeroRange { .. }) {
            self.transact_with_space(0, |tx| tx.punch_or_zero_range(number, offset, end, true))?;
        }
        let bytes = u64::from(self.reader.super_.block_bytes);
        let before = self.transact(|tx| Ok(tx.regular_file(number)?.size_bytes))?;
        let mut grown = before;
        let mut at = saturating_u32(offset / bytes);
        let last = saturating_u32(end.div_ceil(bytes));
        while at < last {
            let step =
                last.min(at.saturating_add(saturating_u32(MAX_FALLOCATE_STEP_BYTES / bytes)));
            // Each step sets the size, so a commit between two steps leaves no blocks after the
            // end.
            let reserved = self.transact_with_space(0, |tx| {
                let reserved_to = tx.fallocate_blocks(number, at, step)?;
                let inode = tx.regular_file(number)?;
                let reached = end.min(u64::from(reserved_to).saturating_mul(bytes));
                if !keep && reached > inode.size_bytes {
                    tx.set_size(&inode, reached)?;
                    grown = reached;
                }
                Ok(reserved_to)
            });
            match reserved {
                // The rest may fit once pending frees are durable.
                Ok(reserved_to) if reserved_to > at => at = reserved_to,
                // An extent-mapped file keeps its reservation, as on Linux.
                Ok(_) | Err(Error::NoSpace) if inode.has_extents() => return Err(Error::NoSpace),
                Ok(_) | Err(Error::NoSpace) => {
                    // A block-mapped file has no blocks after its end.
                    self.transact(|tx| {
                        let inode = tx.regular_file(number)?;
                        let mut size = inode.size_bytes;
                        if size == grown && size > before {
                            tx.set_size(&inode, before)?;
                            size = before;
                        }
                        tx.unmap(number, saturating_u32(size.div_ceil(bytes))..u32::MAX)
                    })?;
                    return Err(Error::NoSpace);
                }
                Err(error) => return Err(error),
            }
        }
        self.transact(|tx| {
            let inode = tx.regular_file(number)?;
            if !keep && end > inode.size_bytes {
                tx.set_size(&inode, end)?;
            }
            tx.set_times_now(number, &[InodeTime::Modified, InodeTime::Changed])
        })
    }

    /// Changes mode, owner, times and size.
    ///
    /// # Errors
    /// As [`Volume::write`]; [`Error::NotPermitted`] for an immutable inode.
    pub fn set_attributes(
        &self,
        inode: InodeNumber,
        change: &AttributeChange,
    ) -> Result<Attributes> {
        self.transact_with_space(0, |tx| {
            tx.set_attributes(inode, change)?;
            Ok(self.attributes_of(&*tx.node(inode)?))
        })
    }

    /// Sets an extended attribute to `value` in the format of Linux's `setxattr`. With
    /// `clear_setgid`, setting an access ACL clears setgid, as for a caller who is not in the
    /// group.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::NoAttribute`], [`Error::NoSpace`], [`Error::Unsupported`] for a
    /// name that the format cannot store.
    pub fn set_xattr(
        &self,
        inode: InodeNumber,
        name: &[u8],
        value: &[u8],
        how: XattrSet,
        clear_setgid: bool,
    ) -> Result<()> {
        self.transact_with_space(0, |tx| tx.set_xattr(inode, name, value, how, clear_setgid))
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// [`Error::NoAttribute`], [`Error::ReadOnly`].
    pub fn remove_xattr(&self, inode: InodeNumber, name: &[u8]) -> Result<()> {
        self.transact(|tx| tx.remove_xattr(inode, name))
    }

    /// Sets the inode flags of `chattr`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a flag that the volume does not support, [`Error::ReadOnly`].
    pub fn set_flags(&self, inode: InodeNumber, flags: u32) -> Result<()> {
        self.transact(|tx| tx.set_flags(inode, flags))
    }

    /// Assigns an inode to the quota of `project`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the volume or the inode cannot store projects,
    /// [`Error::NotPermitted`], [`Error::ReadOnly`].
    pub fn set_project(&self, inode: InodeNumber, project: u32) -> Result<()> {
        self.transact(|tx| tx.set_project(inode, project))
    }

    /// Adds one user of an inode; an orphan is kept while it has users.
    pub fn add_user(&self, inode: InodeNumber) {
        if let Some(WriteContext { state, .. }) = &self.writing {
            let mut writer = state.write();
            let users = writer.users.entry(inode.0).or_default();
            *users = users.saturating_add(1);
        }
    }

    /// Removes `users` of an inode; deletes an orphan when the last one goes.
    pub fn remove_users(&self, inode: InodeNumber, users: u64) {
        // If the deletion fails, the next mount deletes the orphan.
        let _ = self.transact(|tx| tx.release(inode, users));
    }

    #[allow(clippy::arithmetic_side_effects, reason = "the divisor is a constant")]
    pub(crate) fn write_chunked(
        &self,
        number: InodeNumber,
        offset: u64,
        bytes: &[u8],
        lent: Option<&SharedBytes>,
    ) -> Result<usize> {
        self.convert_inline(number)?;
        let mut done = 0;
        while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
            // Steps end at aligned boundaries, so that a large write stays contiguous.
            let at = offset.saturating_add(done as u64);
            let skew = saturating_usize(at % MAX_WRITE_STEP_BYTES as u64);
            let part = rest.get(..MAX_WRITE_STEP_BYTES.saturating_sub(skew)).unwrap_or(rest);
            let lent = lent.map(|lent| lent.slice(done..done.saturating_add(part.len())));
            let write = |tx: &mut Transaction<'_>| tx.write(number, at, part, lent.as_ref());
            let taken = match self.transact_with_space(part.len() as u64, write) {
                Ok(taken) => taken,
                Err(Error::NoSpace) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            };
            done = done.saturating_add(taken);
            if taken < part.len() {
                break;
            }
        }
        Ok(done)
    }

    /// Converts an inline file to blocks.
    pub(crate) fn convert_inline(&self, number: InodeNumber) -> Result<()> {
        if !self.inode(number)?.is_inline() {
            return Ok(());
        }
        self.transact_with_space(0, |tx| {
            let inode = tx.regular_file(number)?;
            tx.convert_inline_file(&inode, u64::MAX).map(drop)
        })
    }

    /// Deletes the orphans that were too large to be deleted with their names.
    pub(crate) fn delete_pending(&self) -> Result<()> {
        let Some(writing) = &self.writing else { return Ok(()) };
        let next = || writing.state.write().pending_deletions.pop();
        while let Some(inode) = next() {
            self.transact(|tx| {
                tx.may_block = true;
                tx.is_internal = true;
                let inode = InodeNumber(inode);
                let has_users = tx.has_users(inode);
                if has_users || !tx.is_orphan(inode) { Ok(()) } else { tx.evict_inode(inode) }
            })?;
        }
        Ok(())
    }

    /// Records that a file was read just now, by the policy [`crate::WriteOptions::atime`]. Never
    /// fails: reads do not depend on it.
    pub fn touch_atime(&self, inode: InodeNumber) {
        let Some(writing) = &self.writing else { return };
        if !self.is_access_due(inode) {
            return;
        }
        let is_first = writing.pending_access_times.record(inode, (writing.clock)());
        if is_first && writing.pending_access_times.has_due_times() {
            writing.notify_first_change();
        }
    }

    /// Returns true if reading the inode now would change its access time.
    pub fn is_access_due(&self, inode: InodeNumber) -> bool {
        let Some(writing) = &self.writing else { return false };
        if writing.pending_access_times.rule == AccessTimes::Never || writing.is_stopped() {
            return false;
        }
        let now = (writing.clock)();
        let is_due = |node: Arc<Inode>| {
            writing.pending_access_times.is_due(&node, &self.attributes_of(&node), now)
        };
        self.reader.node(inode).is_ok_and(is_due)
    }

    /// Returns the access-time policy; [`AccessTimes::Never`] on a read-only volume.
    pub fn access_times(&self) -> AccessTimes {
        self.writing
            .as_ref()
            .map_or(AccessTimes::Never, |writing| writing.pending_access_times.rule)
    }

    /// Returns the pending access time of an inode, if there is one.
    pub(crate) fn pending_access_time(&self, inode: InodeNumber) -> Option<Time> {
        self.writing.as_ref()?.pending_access_times.get(inode)
    }
}
