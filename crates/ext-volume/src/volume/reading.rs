//! Reading of an open volume: inodes, names, contents, attributes.

use std::sync::Arc;

use draconis_types::{Attributes, FileType};

use super::Volume;
use crate::blocks::CacheKey;
use crate::blocks::data::SharedBytes;
use crate::dir::name_query::NameQuery;
use crate::dir::{Cookie, DirDamage, Entry, MAX_NAME_BYTES};
use crate::file::Seek;
use crate::format::features::Incompatible;
use crate::format::inode::Inode;
use crate::format::xattr::check_name;
use crate::map::{self, BlockLocation, BlockMap, Run, SEGMENT_BLOCKS};
use crate::{Error, FileBlock, FsBlock, InodeNumber, Result};

/// Limit of map segments that one [`Volume::seek`] visits; it reports data after them.
const MAX_SEEK_SEGMENTS: u32 = 1 << 14;
/// Limit of directory blocks that are prefetched before a listing.
const MAX_PREFETCHED_DIR_BLOCKS: u32 = 12;

impl Volume {
    /// Returns the inode with this number.
    ///
    /// # Errors
    /// [`Error::NotFound`] if it does not exist or is not in use; [`Error::Corrupt`];
    /// [`Error::Io`].
    pub fn inode(&self, number: InodeNumber) -> Result<Arc<Inode>> {
        let _reading = self.read_lock();
        self.reader.node(number)
    }

    /// Returns the `stat` data of an inode.
    ///
    /// # Errors
    /// As [`Volume::inode`].
    pub fn attributes(&self, number: InodeNumber) -> Result<Attributes> {
        Ok(self.attributes_of(&*self.inode(number)?))
    }

    /// Returns the `stat` data of a loaded inode.
    pub fn attributes_of(&self, inode: &Inode) -> Attributes {
        let mut attributes = inode.attributes(&self.reader.super_);
        if let Some(accessed) = self.pending_access_time(inode.number) {
            attributes.accessed = accessed;
        }
        attributes
    }

    /// Returns the inode of `name` in the directory `dir`; `.` and `..` work, too.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotADirectory`], [`Error::NameTooLong`]; [`Error::Corrupt`] if
    /// the name was not found and part of the directory is damaged, or if its inode number is
    /// invalid; [`Error::Io`].
    pub fn lookup(&self, dir: InodeNumber, name: &[u8]) -> Result<InodeNumber> {
        let _reading = self.read_lock();
        let inode = self.reader.directory(dir)?;
        if name.len() > MAX_NAME_BYTES {
            return Err(Error::NameTooLong);
        }
        let found =
            self.reader.find_name(&inode, &NameQuery::for_name(&self.reader, &inode, name)?)?;
        if !self.reader.super_.is_valid_inode(found) {
            let what = "directory entry: inode number";
            return Err(Error::Corrupt { what, inode: Some(dir), block: None });
        }
        Ok(found)
    }

    /// Lists the directory `dir` from `from` on, while `visit` returns true. `.` and `..` are
    /// listed only with `dots`. Damage is reported at its position, and the listing continues after
    /// it.
    ///
    /// # Errors
    /// [`Error::NotADirectory`], [`Error::NotFound`] and errors of reading the inode. Errors inside
    /// the directory go to `visit`.
    pub fn entries(
        &self,
        dir: InodeNumber,
        from: Cookie,
        dots: bool,
        visit: impl FnMut(std::result::Result<Entry<'_>, DirDamage>) -> bool,
    ) -> Result<()> {
        let _reading = self.read_lock();
        let inode = self.reader.directory(dir)?;
        self.reader.list(&inode, from, dots, visit)
    }

    /// Returns up to `len` bytes of a file from `offset` without copying: at least one byte before
    /// the end of the file, none from there on. Reads stop at multiples of 128 KiB, and before
    /// damage.
    ///
    /// # Errors
    /// [`Error::IsADirectory`] and [`Error::Misuse`] if it is not a file; [`Error::Corrupt`] naming
    /// the block if its location is unknown; [`Error::Io`].
    pub fn read(&self, number: InodeNumber, offset: u64, len: usize) -> Result<SharedBytes> {
        let _reading = self.read_lock();
        self.read_from_inode(&*self.reader.node(number)?, offset, len)
    }

    /// [`Volume::read`] from a loaded inode.
    ///
    /// # Errors
    /// As [`Volume::read`].
    pub fn read_from_inode(&self, inode: &Inode, offset: u64, len: usize) -> Result<SharedBytes> {
        let _reading = self.read_lock();
        let now = self.reload_inode(inode)?;
        self.reader.read_chunk_part(now.as_deref().unwrap_or(inode), offset, len)
    }

    /// Fills `into` from `offset` and returns the number of bytes: fewer than requested only at the
    /// end of the file, or before damage.
    ///
    /// # Errors
    /// As [`Volume::read`], if not even the first byte can be read.
    pub fn read_into(&self, number: InodeNumber, offset: u64, into: &mut [u8]) -> Result<usize> {
        let _reading = self.read_lock();
        self.read_into_from_inode(&*self.reader.node(number)?, offset, into)
    }

    /// [`Volume::read_into`] from a loaded inode.
    ///
    /// # Errors
    /// As [`Volume::read_into`].
    pub fn read_into_from_inode(
        &self,
        inode: &Inode,
        offset: u64,
        into: &mut [u8],
    ) -> Result<usize> {
        let _reading = self.read_lock();
        let now = self.reload_inode(inode)?;
        self.reader.read_into_locked(now.as_deref().unwrap_or(inode), offset, into)
    }

    /// Reloads an inode that may have changed since; `None` on a read-only volume.
    fn reload_inode(&self, inode: &Inode) -> Result<Option<Arc<Inode>>> {
        self.writing.as_ref().map(|_| self.reader.node(inode.number)).transpose()
    }

    /// Prefetches the first blocks of a directory that is likely to be listed soon, for example
    /// after a listing with attributes. A hint: it never fails.
    pub fn prefetch_directory(&self, number: InodeNumber) {
        let _reading = self.read_lock();
        let Ok(inode) = self.reader.node(number) else { return };
        if inode.kind != FileType::Directory || inode.is_inline() {
            return;
        }
        if self.writing.is_none() {
            let key = CacheKey { inode: number.0, index: 0 };
            self.reader.store.read_ahead(key, || self.reader.chunk_read_plan(&inode, 0), false);
            return;
        }
        // A writable volume reads directories block by block (`directory_block`).
        let end = FileBlock(self.reader.directory_blocks(&inode).min(MAX_PREFETCHED_DIR_BLOCKS));
        if !map::is_mapped_by_inode(&inode, end) {
            return;
        }
        let Ok(runs) = self.reader.map_runs(&inode, FileBlock(0), end) else { return };
        let blocks = runs.iter().filter_map(|run| match run.location {
            BlockLocation::Mapped(block) => {
                Some((0..u64::from(run.blocks)).map(move |nth| block.offset(nth).0))
            }
            BlockLocation::Hole | BlockLocation::Unwritten(_) | BlockLocation::Damaged(_) => None,
        });
        self.reader.store.prefetch(blocks.flatten().collect());
    }

    /// Returns the block runs of a file from byte `offset` on. One call covers one map segment at
    /// most; call again from the end of the last run. Empty at the end of the file.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if it is not mapped by blocks, [`Error::Io`]. Damage is a
    /// [`BlockLocation`], not an error.
    pub fn map(&self, number: InodeNumber, offset: u64) -> Result<Vec<Run>> {
        let _reading = self.read_lock();
        let inode = self.reader.node(number)?;
        self.map_inode(&inode, offset)
    }

    /// [`Volume::map`] of a loaded inode.
    ///
    /// # Errors
    /// As [`Volume::map`].
    pub fn map_inode(&self, inode: &Inode, offset: u64) -> Result<Vec<Run>> {
        let _reading = self.read_lock();
        let now = self.reload_inode(inode)?;
        let inode = now.as_deref().unwrap_or(inode);
        inode.check_readable()?;
        let at = self.reader.file_block(offset);
        let end = self.reader.file_block_end(inode.size_bytes);
        if at >= end
            || inode.is_inline()
            || inode.fast_symlink_target(&self.reader.super_).is_some()
        {
            return Ok(Vec::new());
        }
        let (runs, segment_end) = self.reader.load_segment(inode, at.0 / SEGMENT_BLOCKS)?;
        let mut found: Vec<Run> = runs.between(at, end.min(segment_end)).collect();
        if runs.is_hole() {
            let map = map::map_of(inode)?;
            let hole = map::with_source(
                &self.reader.store,
                &self.reader.super_,
                map.role(inode.file_id()),
                |source| map::hole_end(&map, source, segment_end.min(end)),
            )?;
            if let (Some(run), Some(hole)) = (found.last_mut(), hole) {
                let whole = hole.min(end).0.saturating_sub(run.from.0);
                run.blocks = run.blocks.max(whole);
            }
        }
        Ok(found)
    }

    /// Returns the start of the next data or hole from `offset` on; `None` if there is none before
    /// the end of the file. May report data where the search stopped, as `SEEK_DATA` permits.
    ///
    /// # Errors
    /// As [`Volume::map`].
    pub fn seek(&self, number: InodeNumber, offset: u64, what: Seek) -> Result<Option<u64>> {
        let _reading = self.read_lock();
        let inode = self.reader.node(number)?;
        inode.check_readable()?;
        if offset >= inode.size_bytes {
            return Ok(None);
        }
        if inode.is_inline() {
            return self.reader.inline_seek(&inode, offset, what);
        }
        let block_bytes = u64::from(self.reader.super_.block_bytes);
        let mut at = offset;
        for _ in 0..MAX_SEEK_SEGMENTS {
            let runs = self.map_inode(&inode, at)?;
            let Some(last) = runs.last() else { break };
            let is_hole = |run: &&Run| run.location.is_zeros() == (what == Seek::Hole);
            if let Some(run) = runs.iter().find(is_hole) {
                let start = u64::from(run.from.0).saturating_mul(block_bytes).max(offset);
                return Ok(Some(start).filter(|start| *start < inode.size_bytes));
            }
            at = u64::from(last.end().0).saturating_mul(block_bytes);
            if at >= inode.size_bytes {
                return Ok((what == Seek::Hole).then_some(inode.size_bytes));
            }
        }
        Ok(match what {
            Seek::Data => Some(at),
            Seek::Hole => Some(inode.size_bytes),
        })
    }

    /// Returns the first block of a file on the device; sorting files by it makes device reads
    /// sequential. `None` without blocks, or if the map is unreadable.
    pub fn first_block(&self, inode: &Inode) -> Option<FsBlock> {
        (!inode.is_inline() && inode.fast_symlink_target(&self.reader.super_).is_none())
            .then_some(())?;
        matches!(inode.kind, FileType::File | FileType::Directory | FileType::Symlink)
            .then_some(())?;
        map::first_block(inode)
    }

    /// Returns the size limit of files in bytes: of extent-mapped files, if the volume has extents.
    pub fn max_file_bytes(&self) -> u64 {
        match self.reader.super_.incompatible.contains(Incompatible::EXTENTS) {
            true => self.reader.max_extent_file_bytes(),
            false => self.reader.max_indirect_file_bytes(),
        }
    }

    /// Returns the prefixed names of all extended attributes.
    ///
    /// # Errors
    /// As [`Volume::inode`]; [`Error::Corrupt`] if a list is damaged.
    pub fn xattr_names(&self, number: InodeNumber) -> Result<Vec<Vec<u8>>> {
        let _reading = self.read_lock();
        let mut names = Vec::new();
        self.reader.visit_xattrs(&*self.reader.node(number)?, |attribute| {
            // Those that no call would return are hidden.
            names.extend(Some(attribute.name()).filter(|name| check_name(name).is_ok()));
            None::<Result<()>>
        })?;
        Ok(names)
    }

    /// Returns the value of an extended attribute, as Linux's `getxattr`.
    ///
    /// # Errors
    /// [`Error::NoAttribute`], and as [`Volume::xattr_names`].
    pub fn xattr(&self, number: InodeNumber, name: &[u8]) -> Result<Vec<u8>> {
        let _reading = self.read_lock();
        let inode = self.reader.node(number)?;
        check_name(name)?;
        self.reader.xattr_of(&inode, name)
    }
}
