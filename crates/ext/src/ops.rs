//! Changes of a volume.
//!
//! ```text
//!   create · link · unlink · rename · write · reserve · attributes       &self, one at a time
//!        │ Transaction: every block it changes is in the write-back cache
//!   names · contents · inodes · maps · allocation                        memory only
//!        │
//!   commit: the buffers that changed, in stages; one chain of groups     the disk
//! ```
//! Law 1: a change is complete in memory before readers see it, and readers wait for no device
//! because of it.
//! Law 2: a change that cannot be made changes nothing. A change that fails half-way, because of
//! damage or a device error, stops all writing.
//! Law 3: [`crate::commit`] defines what a chain leaves on disk, complete or cut off between two
//! stages.

pub(crate) mod access_times;
mod attributes;
mod contents;
mod dirents;
mod ea_inodes;
mod inline_data;
mod namei;
mod truncate_batches;

use std::sync::Arc;
use std::time::Duration;

use draconis_device::Disk;
pub use draconis_exchange::contract::{Access, AccessTimes, FallocateMode as Reserve};
use draconis_exchange::contract::{AttributeChange, Attributes, FileType};
use draconis_exchange::heap::SharedSlice;

use crate::blocks::data::SharedBytes;
use crate::format::inode::flags;
use crate::options::{OpenOptions, WriteOptions, XattrSet};
use crate::volume::Volume;
use crate::write_context::WriteContext;
use crate::{Error, MmpClaim};
use crate::{InodeNumber, Result};

/// Description of an inode to create.
#[derive(Clone, Copy, Debug)]
pub struct NewNode<'a> {
    /// File type.
    pub kind: FileType,
    /// Permission bits, including setuid, setgid and sticky.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group; a setgid directory's group takes precedence.
    pub gid: u32,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    /// Target of a symbolic link.
    pub target: &'a [u8],
}

/// Treatment of an existing inode with the new name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RenameMode {
    /// Replace it.
    Replace,
    /// Refuse the rename.
    NoReplace,
    /// Give it the old name.
    Exchange,
}

/// Owner of a whiteout: the device 0:0 that hides a name in a union mount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Whiteout {
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

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
        self.reopen_closed()
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
    pub fn fallocate(&self, inode: InodeNumber, offset: u64, len: u64, how: Reserve) -> Result<()> {
        self.fallocate_in_steps(inode, offset, len, how)
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
            Ok(tx.volume.attributes_of(&*tx.node(inode)?))
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
        if let Some(WriteContext { state: gate, .. }) = &self.writing {
            let mut writer = gate.write();
            let users = writer.users.entry(inode.0).or_default();
            *users = users.saturating_add(1);
        }
    }

    /// Removes `users` of an inode; deletes an orphan when the last one goes.
    pub fn remove_users(&self, inode: InodeNumber, users: u64) {
        // If the deletion fails, the next mount deletes the orphan.
        let _ = self.transact(|tx| tx.release(inode, users));
    }
}
