//! Changing a volume.
//!
//! ```text
//!   create · link · unlink · rename · write · reserve · attributes       &self, one at a time
//!        │ Transaction: every block it changes is a buffer of the overlay
//!   names · contents · inodes · maps · allocation                        memory only
//!        │
//!   commit: the buffers that changed, in stages; one chain of groups     the disk
//! ```
//! Law 1: a change is whole in memory before it is seen, and readers wait for no
//! device because of it.
//! Law 2: a change that cannot be made changes nothing; one that fails half-way, because
//! the volume is damaged or its device fails, ends all writing.
//! Law 3: what a chain leaves behind, whole or cut off between two of its stages, is what
//! [`commit`] says.

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
use draconis_exchange::contract::{AttributeChange, Attributes, FileType, Time};
use draconis_exchange::heap::SharedSlice;

use crate::blocks::data::SharedBytes;
use crate::format::inode::flags;
use crate::transaction::WriteContext;
use crate::volume::{OpenOptions, Volume};
use crate::{Error, MmpClaim};
use crate::{InodeNumber, Result};

/// How a volume is written.
#[derive(Clone)]
pub struct WriteOptions {
    /// What time it is.
    pub clock: Arc<dyn Fn() -> Time + Send + Sync>,
    /// Bytes that may be changed in memory before they are handed to the disk.
    pub dirty_bytes: u64,
    /// When reading is written down.
    pub atime: AccessTimes,
    /// Whether the disk is told which blocks are free, once they are for good.
    pub discard: bool,
}

/// What is to be made.
#[derive(Clone, Copy, Debug)]
pub struct NewNode<'a> {
    /// What it is.
    pub kind: FileType,
    /// Permission bits; setuid, setgid and sticky among them.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group; the directory's instead if that is setgid.
    pub gid: u32,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    /// Target of a symbolic link.
    pub target: &'a [u8],
}

/// What becomes of what has the new name already.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RenameMode {
    /// It is replaced.
    Replace,
    /// The renaming is refused.
    NoReplace,
    /// It gets the old name.
    Exchange,
}

/// The owner of a whiteout: the device 0:0 that a union mount takes for "nothing here".
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Whiteout {
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// Whether an extended attribute must be new, or must not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum XattrSet {
    /// Either.
    Any,
    /// It must be new.
    Create,
    /// It must be there.
    Replace,
}

impl Volume {
    /// Opens the volume on `disk` for reading and writing, and frees what was unlinked but
    /// still open when it was used last. The disk changes, and is marked as in use, with the
    /// first commit of a change.
    ///
    /// # Errors
    /// As [`Volume::open`]; [`Error::Unsupported`] naming what writing needs;
    /// [`Error::ReadOnly`] if the disk is.
    pub fn open_for_writing(
        disk: Arc<dyn Disk>,
        options: OpenOptions,
        writing: WriteOptions,
    ) -> Result<Self> {
        Self::mount(disk, options, writing, None, None)
    }

    /// The same with a volume that was claimed where others can reach it, too, which is given back
    /// when it is closed. [`Volume::renew_claim`] is to be called until then.
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

    /// Says again that this host uses the volume; after how long next. `None` if nothing asks for
    /// it, or no longer.
    ///
    /// # Errors
    /// [`Error::InUse`] if another host has taken the volume, and what the device says; nothing is
    /// written any more then.
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

    /// Takes a volume that was closed into use again.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] if it was opened for reading, or writing failed.
    pub fn reopen(&self) -> Result<()> {
        self.reopen_closed()
    }

    /// Whether changes are possible: not if it was opened for reading, closed, or stopped.
    pub fn is_writable(&self) -> bool {
        self.writing.as_ref().is_some_and(|writing| !writing.is_stopped())
    }

    /// What stopped all writing, if something did.
    pub fn failure(&self) -> Option<String> {
        self.read_lock().and_then(|writer| writer.failure())
    }

    /// How many changes were made, if any of them waits to be committed.
    pub fn uncommitted_changes(&self) -> Option<u64> {
        let writing = self.writing.as_ref()?;
        let writer = self
            .read_lock()
            .filter(|it| it.batch.dirty || writing.pending_access_times.has_due_times())?;
        Some(writer.change_count.wrapping_add(writing.pending_access_times.recorded_count()))
    }

    /// Has `tell` called, in the middle of a change, whenever the first one is made since
    /// everything was committed. It must not come back to the volume.
    pub fn on_first_change(&self, tell: impl Fn() + Send + Sync + 'static) {
        if let Some(writing) = &self.writing {
            *writing.on_first_change.lock() = Some(Box::new(tell));
        }
    }

    /// Makes a file, directory, symbolic link, device, fifo or socket.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::NotADirectory`], [`Error::NameTooLong`],
    /// [`Error::NoSpace`], [`Error::LinkLimit`] for one directory too many,
    /// [`Error::ReadOnly`], and what damage and devices answer.
    pub fn create(&self, dir: InodeNumber, name: &[u8], new: &NewNode<'_>) -> Result<InodeNumber> {
        self.transact_with_space(0, |tx| tx.create(dir, name, new))
    }

    /// Makes a file without a name, in the group of `dir` and with what it hands down. It
    /// lives for as long as it has users ([`Volume::add_user`]), or until it gets a name.
    ///
    /// # Errors
    /// As [`Volume::create`].
    pub fn create_tmpfile(&self, dir: InodeNumber, new: &NewNode<'_>) -> Result<InodeNumber> {
        self.transact_with_space(0, |tx| tx.create_unnamed(dir, new))
    }

    /// Whether `inode` may be opened for `access`, as Linux decides it by the inode's flags.
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

    /// Gives `inode` another name, or its first one to a file of [`Volume::create_tmpfile`].
    ///
    /// # Errors
    /// As [`Volume::create`]; [`Error::LinkLimit`]; [`Error::NotPermitted`] for a directory.
    pub fn link(&self, inode: InodeNumber, dir: InodeNumber, name: &[u8]) -> Result<()> {
        self.transact_with_space(0, |tx| tx.link(inode, dir, name))
    }

    /// Takes a name away from something that is not a directory.
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

    /// Moves a name.
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

    /// Moves a name and leaves a whiteout under the old one.
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

    /// Writes `bytes` at `offset` and says how many were taken: fewer only if space ran
    /// out behind them.
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::TooLarge`], [`Error::IsADirectory`],
    /// [`Error::ReadOnly`].
    pub fn write(&self, inode: InodeNumber, offset: u64, bytes: &[u8]) -> Result<usize> {
        self.write_chunked(inode, offset, bytes, None)
    }

    /// [`Volume::write`] of bytes that are lent: whole blocks of them are not copied.
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

    /// `fallocate`.
    ///
    /// # Errors
    /// As [`Volume::write`].
    pub fn fallocate(&self, inode: InodeNumber, offset: u64, len: u64, how: Reserve) -> Result<()> {
        self.fallocate_in_steps(inode, offset, len, how)
    }

    /// Changes mode, owner, times and length.
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

    /// Sets an extended attribute to `value`, as Linux's `setxattr` takes it. With
    /// `clear_setgid` an access list takes setgid away, as it does where the caller is not in
    /// the group.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::NoAttribute`], [`Error::NoSpace`],
    /// [`Error::Unsupported`] for a name without a place in the format.
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

    /// Sets the flags that `chattr` sets.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a flag that ext2 does not honour, [`Error::ReadOnly`].
    pub fn set_flags(&self, inode: InodeNumber, flags: u32) -> Result<()> {
        self.transact(|tx| tx.set_flags(inode, flags))
    }

    /// Lets an inode count for the quota of `project`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the volume or the inode has no place for projects,
    /// [`Error::NotPermitted`], [`Error::ReadOnly`].
    pub fn set_project(&self, inode: InodeNumber, project: u32) -> Result<()> {
        self.transact(|tx| tx.set_project(inode, project))
    }

    /// Counts one more user of an inode: without names it lives on for as long as it has
    /// users.
    pub fn add_user(&self, inode: InodeNumber) {
        if let Some(WriteContext { state: gate, .. }) = &self.writing {
            let mut writer = gate.write();
            let users = writer.users.entry(inode.0).or_default();
            *users = users.saturating_add(1);
        }
    }

    /// Counts `users` fewer; deletes an inode without names when the last one goes.
    pub fn remove_users(&self, inode: InodeNumber, users: u64) {
        // What cannot be deleted now is deleted at the next mount.
        let _ = self.transact(|tx| tx.release(inode, users));
    }
}
