//! Directories: entries in blocks, read sequentially or looked up through a hash tree.
//!
//! Law: a block that is unreadable or damaged hides its own names and no others.

pub(crate) mod edit;
mod htree;
mod linear;
pub(crate) mod name_query;

use draconis_types::FileType;

use crate::blocks::data::SharedBytes;
use crate::blocks::role::Role;
use crate::format::dirent::Dirent;
use crate::format::features::{Compatible, Incompatible};
use crate::format::inode::{Inode, flags};
use crate::map::BlockLocation;
use crate::reader::VolumeReader;
use crate::units::{saturating_u32, saturating_usize};
use crate::{Error, FileBlock, InodeNumber, Result};
use name_query::NameQuery;

/// A position in a directory, after all entries listed before. Stays valid while the directory does
/// not change, whatever else was listed meanwhile.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Cookie(pub u64);

/// A directory entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry<'a> {
    /// The name: 1 to 255 bytes, without `/` and NUL.
    pub name: &'a [u8],
    /// Inode number.
    pub inode: InodeNumber,
    /// File type, if the directory stores it.
    pub kind: Option<FileType>,
    /// Position after this entry.
    pub next: Cookie,
}

/// A damaged part of a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirDamage {
    /// Kind and location of the damage.
    pub error: Error,
    /// Position after the damage.
    pub next: Cookie,
}

/// Length limit of a name, in bytes.
pub const MAX_NAME_BYTES: usize = 255;
/// Size limit of a directory in the format, in bytes.
const MAX_DIR_BYTES: u64 = 2 << 30;
/// Size limit of a directory with `large_dir`, in bytes.
const MAX_LARGE_DIR_BYTES: u64 = 16 << 30;

impl VolumeReader {
    /// Returns the inode of a name.
    ///
    /// # Errors
    /// [`Error::NotFound`] without one; damage, and errors of the device.
    pub fn find_name(&self, dir: &Inode, wanted: &NameQuery<'_>) -> Result<InodeNumber> {
        if dir.is_inline() {
            return self.find_inline(dir, wanted);
        }
        let dots = matches!(wanted.name(), b"." | b"..");
        let Some(hashed) = wanted.hash_input().filter(|_| self.has_htree(dir) && !dots) else {
            return linear::find_linear(self, dir, wanted);
        };
        match htree::find_in_htree(self, dir, wanted, hashed) {
            // The leaf blocks are still readable sequentially.
            Err(Error::Corrupt { .. }) => linear::find_linear(self, dir, wanted),
            Err(Error::NotFound) if wanted.may_be_misplaced(self) => {
                linear::find_linear(self, dir, wanted)
            }
            found => found,
        }
    }

    /// Lists a directory; see [`crate::Volume::entries`].
    pub(crate) fn list(
        &self,
        dir: &Inode,
        from: Cookie,
        dots: bool,
        visit: impl FnMut(std::result::Result<Entry<'_>, DirDamage>) -> bool,
    ) -> Result<()> {
        match dir.is_inline() {
            true => self.enumerate_inline(dir, from, dots, visit),
            false => linear::enumerate(self, dir, from, dots, visit),
        }
    }

    /// Returns an inode that is a directory.
    ///
    /// # Errors
    /// [`Error::NotADirectory`] for another inode; damage, and errors of the device.
    pub fn directory(&self, number: InodeNumber) -> Result<std::sync::Arc<Inode>> {
        self.node(number)?.as_directory()
    }

    pub(crate) fn has_htree(&self, dir: &Inode) -> bool {
        self.super_.compatible.contains(Compatible::DIR_INDEX) && dir.flags & flags::INDEX != 0
    }

    /// Returns the number of whole blocks of a directory; a partial last block holds no entries.
    /// The disk size bounds it, since directories have practically no holes. Without that bound, a
    /// few pointers could name one block millions of times.
    pub fn directory_blocks(&self, dir: &Inode) -> u32 {
        let large = self.super_.incompatible.contains(Incompatible::LARGEDIR);
        let most = if large { MAX_LARGE_DIR_BYTES } else { MAX_DIR_BYTES };
        let bytes = dir.size_bytes.min(most).min(self.disk_bytes);
        saturating_u32(bytes.checked_div(u64::from(self.super_.block_bytes)).unwrap_or(0))
    }

    /// Reads one block of a directory; `None` for a hole.
    fn directory_block(&self, dir: &Inode, nth: FileBlock) -> Result<Option<SharedBytes>> {
        let run = self.map_runs(dir, nth, nth.offset(1))?.first().copied();
        match run.map(|run| run.location) {
            Some(BlockLocation::Mapped(_)) => {}
            Some(BlockLocation::Hole | BlockLocation::Unwritten(_)) | None => return Ok(None),
            Some(BlockLocation::Damaged(block)) => {
                let what = "block map: pointer";
                return Err(Error::Corrupt { what, inode: Some(dir.number), block: Some(block) });
            }
        }
        // A writable volume changes and caches directories block by block.
        if self.is_writable
            && let Some(BlockLocation::Mapped(block)) = run.map(|run| run.location)
        {
            return self
                .store
                .block(block, Role::Directory(dir.file_id()))
                .map(Some)
                .map_err(|error| error.with_inode(dir.number));
        }
        let len = u64::from(self.super_.block_bytes);
        let block =
            self.read_contents(dir, u64::from(nth.0).saturating_mul(len), saturating_usize(len));
        let block = block.map_err(|error| error.with_inode(dir.number))?;
        if let Some(BlockLocation::Mapped(at)) = run.map(|run| run.location) {
            self.store
                .verify_checksum(at, Role::Directory(dir.file_id()), &block)
                .map_err(|error| error.with_inode(dir.number))?;
        }
        Ok(Some(block))
    }

    /// Adds the location of a directory block to an error.
    fn with_location(&self, dir: &Inode, nth: FileBlock, error: Error) -> Error {
        let run =
            self.map_runs(dir, nth, nth.offset(1)).ok().and_then(|runs| runs.first().copied());
        match run.map(|run| run.location) {
            Some(BlockLocation::Mapped(block)) => error.with_block(block).with_inode(dir.number),
            _ => error.with_inode(dir.number),
        }
    }

    fn cookie(&self, block: FileBlock, at: usize) -> Cookie {
        let start = u64::from(block.0).saturating_mul(u64::from(self.super_.block_bytes));
        Cookie(start.saturating_add(at as u64))
    }

    /// Returns the block and offset of a cookie.
    fn cookie_position(&self, cookie: Cookie) -> (FileBlock, usize) {
        let bytes = u64::from(self.super_.block_bytes);
        let at = saturating_usize(cookie.0.checked_rem(bytes).unwrap_or(0));
        (self.file_block(cookie.0), at)
    }
}

fn is_dot_or_dot_dot(entry: &Dirent<'_>) -> bool {
    matches!(entry.name, b"." | b"..")
}
