//! An open file of a volume.

use std::sync::Arc;

use draconis_exchange::contract::{Access, AttributeChange, Attributes, FileType};
use draconis_ext::{Follow, InodeNumber};
use rustix::io::Errno;

use crate::volume::{Volume, find, resolve_parent};
use crate::{Error, Result};

/// How to open a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OpenOptions {
    /// To change it.
    pub write: bool,
    /// Make it if it is not there.
    pub create: bool,
    /// It must not be there.
    pub exclusive: bool,
    /// Cut it to nothing.
    pub truncate: bool,
    /// Permission bits of a file that is made.
    pub mode: u32,
}

/// An open file. Without names it lives on for as long as it is open, as on Linux.
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
    /// It is not there, no regular file, or cannot be changed.
    pub fn open(volume: &Arc<Volume>, path: &[u8], how: OpenOptions) -> Result<Self> {
        let writes = how.write || how.truncate || how.create;
        let inode = volume.with_volume(path, |inner| {
            if writes && !inner.is_writable() {
                return Err(draconis_ext::Error::ReadOnly);
            }
            loop {
                let new = volume.node(FileType::File, how.mode, b"");
                let found = match (how.create, how.exclusive) {
                    (true, true) if find(inner, path, Follow::No).is_ok() => {
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
                    (false, _) => find(inner, path, Follow::Yes)?,
                };
                inner.add_user(found);
                // Its name may have gone before it was held.
                match find(inner, path, Follow::Yes) {
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

    /// Reads from byte `offset` on; how many bytes there were, fewer than asked for only at the
    /// end.
    ///
    /// # Errors
    /// Damage, or what the disk says.
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

    /// Writes all of `bytes` at byte `offset`.
    ///
    /// # Errors
    /// It was opened for reading, or there is no room.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<usize> {
        self.check_writable()?;
        self.volume.with_volume(&self.path, |volume| {
            let mut put = 0;
            while let Some(rest) = bytes.get(put..).filter(|rest| !rest.is_empty()) {
                match volume.write(self.inode, offset.saturating_add(put as u64), rest) {
                    Ok(0) => break,
                    Ok(more) => put += more,
                    // What is there already counts.
                    Err(_) if put > 0 => break,
                    Err(error) => return Err(error),
                }
            }
            Ok(put)
        })
    }

    /// Gives it a length; what is new reads as zeros.
    ///
    /// # Errors
    /// As [`File::write_at`].
    pub fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.check_writable()?;
        self.set_size(len_bytes)
    }

    /// What `stat` shows.
    ///
    /// # Errors
    /// Damage, or what the disk says.
    pub fn stat(&self) -> Result<Attributes> {
        self.volume.with_volume(&self.path, |volume| volume.attributes(self.inode))
    }

    /// Makes it durable.
    ///
    /// # Errors
    /// What made the disk fail.
    pub fn sync(&self) -> Result<()> {
        self.volume.with_volume(&self.path, |volume| match volume.is_writable() {
            true => volume.sync_inode(self.inode, false),
            false => Ok(()),
        })
    }

    /// The volume that it is in.
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
        Error::new(errno, format!("{}: {why}", self.volume.label(&self.path)))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // A volume that was closed has given it up.
        let _ = self.volume.with_volume(&self.path, |volume| {
            if volume.is_writable() {
                volume.remove_users(self.inode, 1);
            }
            Ok(())
        });
    }
}
