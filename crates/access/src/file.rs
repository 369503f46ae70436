//! An open file of a volume.

use std::sync::Arc;

use draconis_ext::{Follow, InodeNumber};
use draconis_types::{Access, AttributeChange, Attributes, FileType};
use rustix::io::Errno;

use crate::volume::{Volume, resolve_parent, resolve_path};
use crate::{Error, Result};

/// Flags for opening a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OpenOptions {
    /// Opens the file for writing.
    pub write: bool,
    /// Creates the file if it is missing.
    pub create: bool,
    /// Fails if the file exists.
    pub exclusive: bool,
    /// Truncates the file to length 0.
    pub truncate: bool,
    /// Permission bits of a new file.
    pub mode: u32,
}

/// An open file. After its last name is removed, the inode lives on until the file is closed.
#[derive(Debug)]
pub struct File {
    volume: Arc<Volume>,
    inode: InodeNumber,
    path: Vec<u8>,
    write: bool,
}

impl File {
    /// Opens a file.
    ///
    /// # Errors
    /// The file does not exist, is not a regular file, or is not writable.
    pub fn open(volume: &Arc<Volume>, path: &[u8], how: OpenOptions) -> Result<Self> {
        let writes = how.write || how.truncate || how.create;
        let inode = volume.with_volume(path, |inner| {
            if writes && !inner.is_writable() {
                return Err(draconis_ext::Error::ReadOnly);
            }
            loop {
                let new = volume.new_node(FileType::File, how.mode, b"");
                let found = match (how.create, how.exclusive) {
                    (true, true) if resolve_path(inner, path, Follow::No).is_ok() => {
                        return Err(draconis_ext::Error::Exists);
                    }
                    (true, true) if path.ends_with(b"/") => {
                        return Err(draconis_ext::Error::IsADirectory);
                    }
                    (true, true) => {
                        let (dir, name) = resolve_parent(inner, path)?;
                        inner.create(dir, name, &new)?
                    }
                    (true, false) => inner.resolve_or_create(inner.root(), path, &new)?,
                    (false, _) => resolve_path(inner, path, Follow::Yes)?,
                };
                inner.add_user(found);
                // The name may have been removed before the inode was pinned.
                match resolve_path(inner, path, Follow::Yes) {
                    Ok(still) if still == found => return Ok(found),
                    _ => inner.remove_users(found, 1),
                }
            }
        })?;
        let file = Self { volume: volume.clone(), inode, path: path.to_vec(), write: how.write };
        match file.stat()?.kind {
            FileType::File => {}
            FileType::Directory => return Err(file.error(Errno::ISDIR, "is a directory")),
            _ => return Err(file.error(Errno::INVAL, "not a regular file")),
        }
        if writes {
            let access = Access { read: false, write: true, append: false };
            volume.with_volume(path, |inner| inner.check_open(inode, access))?;
        }
        if how.truncate {
            file.set_size(0)?;
        }
        Ok(file)
    }

    /// Reads from byte `offset` and returns the number of bytes, which is short only at the end
    /// of the file.
    ///
    /// # Errors
    /// The volume is damaged, or the disk fails.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<usize> {
        self.volume.with_volume(&self.path, |volume| {
            let mut filled = 0;
            while let Some(rest) = into.get_mut(filled..).filter(|rest| !rest.is_empty()) {
                let at = offset.saturating_add(filled as u64);
                match volume.read_into(self.inode, at, rest)? {
                    0 => break,
                    got => filled += got,
                }
            }
            Ok(filled)
        })
    }

    /// Writes `bytes` at byte `offset`.
    ///
    /// # Errors
    /// The file was opened read-only, or the volume is full.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<usize> {
        self.check_writable()?;
        self.volume.with_volume(&self.path, |volume| {
            let mut put = 0;
            while let Some(rest) = bytes.get(put..).filter(|rest| !rest.is_empty()) {
                match volume.write(self.inode, offset.saturating_add(put as u64), rest) {
                    Ok(0) => break,
                    Ok(more) => put += more,
                    // A partial write returns the bytes that were written.
                    Err(_) if put > 0 => break,
                    Err(error) => return Err(error),
                }
            }
            Ok(put)
        })
    }

    /// Sets the length; new bytes read as zeros.
    ///
    /// # Errors
    /// As [`File::write_at`].
    pub fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.check_writable()?;
        self.set_size(len_bytes)
    }

    /// Returns the attributes, as `stat` shows them.
    ///
    /// # Errors
    /// The volume is damaged, or the disk fails.
    pub fn stat(&self) -> Result<Attributes> {
        self.volume.with_volume(&self.path, |volume| volume.attributes(self.inode))
    }

    /// Makes all changes of the file durable.
    ///
    /// # Errors
    /// The disk failed.
    pub fn sync(&self) -> Result<()> {
        self.volume.with_volume(&self.path, |volume| match volume.is_writable() {
            true => volume.sync_inode(self.inode, false),
            false => Ok(()),
        })
    }

    /// Returns the volume of this file.
    pub fn volume(&self) -> &Arc<Volume> {
        &self.volume
    }

    fn set_size(&self, len_bytes: u64) -> Result<()> {
        let change = AttributeChange { size_bytes: Some(len_bytes), ..AttributeChange::default() };
        let set = |volume: &draconis_ext::Volume| volume.set_attributes(self.inode, &change);
        self.volume.with_volume(&self.path, set).map(drop)
    }

    fn check_writable(&self) -> Result<()> {
        match self.write {
            true => Ok(()),
            false => Err(self.error(Errno::BADF, "was opened for reading")),
        }
    }

    fn error(&self, errno: Errno, why: &str) -> Error {
        Error::new(errno, format!("{}: {why}", self.volume.path_label(&self.path)))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // A closed volume has already released the inode.
        let _ = self.volume.with_volume(&self.path, |volume| {
            if volume.is_writable() {
                volume.remove_users(self.inode, 1);
            }
            Ok(())
        });
    }
}
