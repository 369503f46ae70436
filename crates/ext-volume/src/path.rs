//! Path resolution: names, `..` and symbolic links, with a limit of links.

use draconis_types::FileType;

use crate::format::inode::Inode;
use crate::format::nokey;
use crate::volume::Volume;
use crate::{Error, InodeNumber, NewNode, Result};

/// Treatment of a symbolic link at the end of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Follow {
    /// Follow it.
    Yes,
    /// Return the link itself.
    No,
}

/// Limit of links followed on one path, as on Linux.
const MAX_SYMLINKS: usize = 40;
/// Size limit of a link target and of a path.
const PATH_MAX: usize = 4096;

impl Volume {
    /// Returns the inode that `path` names from the directory `start`. Absolute paths and absolute
    /// link targets begin at the volume's root; no path leaves the volume.
    ///
    /// # Errors
    /// As [`Volume::lookup`] and [`Volume::read_link`], and [`Error::TooManyLinks`].
    pub fn resolve(&self, start: InodeNumber, path: &[u8], follow: Follow) -> Result<InodeNumber> {
        if path.len() > PATH_MAX {
            return Err(Error::NameTooLong);
        }
        let mut at = if path.first() == Some(&b'/') { self.root() } else { start };
        // Remaining names, the next one last.
        let mut names = components(path);
        let mut links = 0usize;
        let slash_at_end = path.last() == Some(&b'/');
        while let Some(name) = names.pop() {
            let next = self.lookup(at, &name)?;
            let last = names.is_empty();
            if last && follow == Follow::No && !slash_at_end {
                return Ok(next);
            }
            let inode = self.inode(next)?;
            if inode.kind != FileType::Symlink {
                at = next;
                continue;
            }
            links = links.saturating_add(1);
            if links > MAX_SYMLINKS {
                return Err(Error::TooManyLinks);
            }
            let target = self.read_link_of(&inode)?;
            if target.len() >= PATH_MAX {
                return Err(Error::NameTooLong);
            }
            if target.first() == Some(&b'/') {
                at = self.root();
            }
            names.extend(components(&target));
        }
        if slash_at_end && self.inode(at)?.kind != FileType::Directory {
            return Err(Error::NotADirectory);
        }
        Ok(at)
    }

    /// Returns the parent directory of `path`, and its last name. Trailing slashes are ignored.
    ///
    /// # Errors
    /// As [`Volume::resolve`]; [`Error::Misuse`] for the root and for `.` and `..`.
    pub fn resolve_parent<'p>(
        &self,
        start: InodeNumber,
        path: &'p [u8],
    ) -> Result<(InodeNumber, &'p [u8])> {
        let (above, name) = split_parent(path);
        match name {
            b"" => Err(Error::Misuse("the root directory has no name")),
            b"." | b".." => Err(Error::Misuse("a name is needed at the end")),
            _ => Ok((self.resolve(start, above, Follow::Yes)?, name)),
        }
    }

    /// Creates an inode at `path`, in its parent directory.
    ///
    /// # Errors
    /// As [`Volume::create`]; also [`Error::Exists`] for the root, `.` and `..`.
    pub fn create_by_path(
        &self,
        start: InodeNumber,
        path: &[u8],
        new: &NewNode<'_>,
    ) -> Result<InodeNumber> {
        match self.resolve_parent(start, path) {
            Err(Error::Misuse(_)) if self.resolve(start, path, Follow::No).is_ok() => {
                Err(Error::Exists)
            }
            found => {
                let (dir, name) = found?;
                self.create(dir, name, new)
            }
        }
    }

    /// As [`Volume::resolve`], but creates a missing inode, also at the target of a symbolic link.
    ///
    /// # Errors
    /// As [`Volume::resolve`] and [`Volume::create`]; [`Error::IsADirectory`] for a new name with a
    /// trailing slash.
    pub fn resolve_or_create(
        &self,
        start: InodeNumber,
        path: &[u8],
        new: &NewNode<'_>,
    ) -> Result<InodeNumber> {
        let (mut at, mut path) = (start, path.to_vec());
        for _ in 0..=MAX_SYMLINKS {
            match self.resolve(at, &path, Follow::Yes) {
                Err(Error::NotFound) => {}
                found => return found,
            }
            if path.last() == Some(&b'/') {
                return Err(Error::IsADirectory);
            }
            let (dir, name) = self.resolve_parent(at, &path)?;
            match self.lookup(dir, name) {
                Err(Error::NotFound) => match self.create(dir, name, new) {
                    // Another thread created it meanwhile.
                    Err(Error::Exists) => {}
                    made => return made,
                },
                // A dangling link: its target is created.
                Ok(link) if self.inode(link)?.kind == FileType::Symlink => {
                    path = self.read_link(link)?;
                    at = dir;
                }
                Ok(_) => {}
                Err(error) => return Err(error),
            }
        }
        Err(Error::TooManyLinks)
    }

    /// Returns the target of a symbolic link.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it is not a symbolic link; [`Error::Corrupt`] if the target is empty or
    /// longer than a block; [`Error::Io`].
    pub fn read_link(&self, number: InodeNumber) -> Result<Vec<u8>> {
        let _reading = self.read_lock();
        self.read_link_of(&*self.reader.node(number)?)
    }

    /// [`Volume::read_link`] of a loaded inode.
    ///
    /// # Errors
    /// As [`Volume::read_link`].
    pub fn read_link_of(&self, inode: &Inode) -> Result<Vec<u8>> {
        if inode.kind != FileType::Symlink {
            return Err(Error::Misuse("only symbolic links have a target"));
        }
        let corrupt = |what| Error::Corrupt { what, inode: Some(inode.number), block: None };
        let target = match inode.fast_symlink_target(&self.reader.super_) {
            Some(target) => target,
            None => {
                let len = usize::try_from(inode.size_bytes).unwrap_or(usize::MAX);
                if inode.size_bytes > u64::from(self.reader.super_.block_bytes) {
                    return Err(corrupt("symbolic link: length"));
                }
                self.reader.read_contents(inode, 0, len)?.to_vec()
            }
        };
        if inode.is_encrypted() {
            return nokey::no_key_target(&target).map_err(|error| error.with_inode(inode.number));
        }
        let mut target = target;
        // A target is a C string: it ends at the first NUL.
        if let Some(end) = target.iter().position(|byte| *byte == 0) {
            target.truncate(end);
        }
        if target.is_empty() {
            return Err(corrupt("symbolic link: empty"));
        }
        Ok(target)
    }
}

/// Returns the names of a path, last first, without empty ones and `.`.
fn components(path: &[u8]) -> Vec<Vec<u8>> {
    let names = path.rsplit(|byte| *byte == b'/').filter(|name| !matches!(*name, b"" | b"."));
    names.map(<[u8]>::to_vec).collect()
}

/// Splits a path into the directory's path and the last name, which is empty for the root.
pub fn split_parent(path: &[u8]) -> (&[u8], &[u8]) {
    let len = path.iter().rposition(|byte| *byte != b'/').map_or(0, |at| at.saturating_add(1));
    let (path, _) = path.split_at_checked(len).unwrap_or((path, b""));
    let cut = path.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at.saturating_add(1));
    path.split_at_checked(cut).unwrap_or((b"", path))
}
