//! Deleted files of a volume: found, named, and read as far as they are still there. The volume does
//! not change.
//!
//! ```text
//!   journal: all transactions in its blocks ─▶ history ─┐
//!   inode tables, now and in the history ───▶ inodes ───┤ files that had a name, and have none
//!   map blocks as they were ────────────────▶ contents ─┤ their blocks
//!   bitmaps, now and in the history ────────▶ certainty ┤ whole, overwritten, unsure
//!   directory blocks, their remains ────────▶ names ────┘ their paths
//! ```
//! Law 1: contents that may be wrong are called unsure. What proves them right is in `certainty`.
//! Law 2: the work is bounded by the size of the disk, the memory by what is found in tables, maps
//! and journal and by [`Limits`], whatever the fields claim.
//! Law 3: what is damaged is skipped; only an unreadable superblock ends the search.
//!
//! The kernel deletes a file by writing over its inode: size and map are gone. Its journal still has
//! the blocks of the inode table as they were before, as long as newer transactions do not write
//! over them. The drivers of ext2 leave the map, with a time of deletion.

mod certainty;
mod contents;
mod history;
mod inodes;
mod names;
mod placement;
mod view;

use std::ops::Range;
use std::sync::Arc;

use draconis_device::{Disk, Extent};
use draconis_types::{Attributes, FileType, Time};

use crate::backup::{SuperblockPlace, UsableVolume, open_superblock};
use crate::blocks::uncached::read_bytes;
use crate::journal;
use crate::map::BlockLocation;
use crate::options::OpenOptions;
use crate::reader::VolumeReader;
use crate::units::saturating_usize;
use crate::{Error, InodeNumber, Result, Run, SharedBytes};
use certainty::BlockVerdicts;
use contents::{FileMap, HistoricReader, WalkBudget};
use history::History;
use inodes::DeletedInode;
pub use placement::{DeletedTree, PlacedFile};
pub use view::{DeletedSummary, DeletedView, STATE_XATTR};

/// Bounds of a search.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Deleted files.
    pub max_files: usize,
    /// Runs of blocks of all files together.
    pub max_runs: usize,
    /// Names of all inode numbers together.
    pub max_names: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { max_files: 1 << 20, max_runs: 1 << 22, max_names: 1 << 21 }
    }
}

/// How much of a file's contents is certain.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FileState {
    /// All of it.
    Whole,
    /// The rest of it is; [`DeletedFile::overwritten`] has what is lost.
    PartlyOverwritten,
    /// Nothing is left.
    Overwritten,
    /// Contents may be those of another file, or older or newer than the file's last.
    Unsure,
}

impl FileState {
    /// Returns the words for users.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::PartlyOverwritten => "overwritten in part",
            Self::Overwritten => "overwritten",
            Self::Unsure => "contents unsure",
        }
    }
}

/// A deleted file, directory, link or device.
#[derive(Debug)]
pub struct DeletedFile {
    /// Path from the root directory. Where it is not known, it begins with `#` and an inode number.
    pub path: Vec<u8>,
    /// True if the path leads from the root directory.
    pub is_path_known: bool,
    /// Paths of other hard links, as far as they are known.
    pub links: Vec<Vec<u8>>,
    /// Inode number.
    pub inode: InodeNumber,
    /// Attributes before the deletion.
    pub attributes: Attributes,
    /// Time of the deletion, if it is known.
    pub deleted: Option<Time>,
    /// How much of the contents is certain.
    pub state: FileState,
    /// Bytes that other contents have replaced, sorted; they are read as zeros.
    pub overwritten: Vec<Range<u64>>,
    /// Bytes that may be wrong, sorted.
    pub unsure: Vec<Range<u64>>,
    /// Reason for [`FileState::Unsure`].
    pub reason: Option<&'static str>,
    /// Runs of blocks, in file order, without holes.
    runs: Vec<Run>,
    /// Contents or target inside the inode.
    inline: Option<Vec<u8>>,
    of: DeletedInode,
}

impl DeletedFile {
    /// Returns the paths of all hard links that are known, its own first.
    pub fn names(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(&self.path).chain(&self.links).map(|path| &path[..])
    }
}

/// All deleted files that were found on a volume.
pub struct DeletedFiles {
    reader: VolumeReader,
    disk: Arc<dyn Disk>,
    history: History,
    files: Vec<DeletedFile>,
    /// True if there are more files than [`Limits::max_files`].
    pub is_cut_short: bool,
    /// Reason why the journal does not help, if it should.
    pub journal_damage: Option<Error>,
}

/// Caches of a search, which reads most blocks once.
const OPTIONS: OpenOptions = OpenOptions {
    inode_cache: 1024,
    block_map_cache: 1024,
    data_cache_bytes: 8 << 20,
    lists_dots: false,
    read_ahead_bytes: 0,
};

impl DeletedFiles {
    /// Searches the volume on `disk`.
    ///
    /// # Errors
    /// As [`draconis_ext_volume::Volume::open`]. Damage elsewhere is skipped.
    pub fn scan(disk: Arc<dyn Disk>, limits: Limits) -> Result<Self> {
        let usable = open_superblock(disk, &SuperblockPlace::default())?;
        let UsableVolume { disk, super_, substitute } = usable;
        if let Some(reason) = substitute {
            log::warn!("{reason}");
        }
        let (mut history, mut journal_damage) = (History::empty(), None);
        if super_.journal.is_some() {
            match journal::open_journal(disk.clone(), &super_).and_then(History::scan) {
                Ok(found) => history = found,
                Err(Error::Io(error)) => return Err(Error::Io(error)),
                Err(error) => journal_damage = Some(error),
            }
        }
        let (mut now, mut super_now) = (disk.clone(), super_.clone());
        if super_.needs_recovery() {
            let replayed = journal::open_replayed(disk, &super_)?;
            journal_damage = journal_damage.or(replayed.damage);
            (now, super_now) = (replayed.disk, replayed.super_);
        }
        let reader = VolumeReader::new(now.clone(), &OPTIONS, super_now);
        let states = inodes::scan(&reader, &*now, &history, &limits)?;
        let is_bypassed = history.newest_time().is_none_or(|time| {
            // A change is not newer than its commit, except by less than a second.
            states.last_change > time.seconds.saturating_add(1)
        });
        if is_bypassed || journal_damage.is_some() {
            history.distrust();
        }
        log::info!(
            "{} transactions in the journal, {} deleted inodes",
            history.transactions(),
            states.deleted.len()
        );
        let inodes::InodeStates { deleted, is_cut_short, directories, last_write, last_change } =
            states;
        let past = HistoricReader { reader: &reader, history: &history };
        let mut budget = WalkBudget::new(&reader, &limits);
        let mut found = vec![];
        for file in deleted {
            let map = past.map(&file, &mut budget)?;
            found.push((file, map));
        }
        let states =
            inodes::InodeStates { directories, last_write, last_change, ..Default::default() };
        let verdicts = certainty::evaluate(&reader, &history, last_write, &found)?;
        let names = names::find(past, &states, &found, &limits)?;
        let paths = names.paths(&found);
        let mut files: Vec<DeletedFile> = vec![];
        for (((of, map), verdict), path) in found.into_iter().zip(verdicts).zip(paths) {
            let inline = past.inline(&of, &map);
            let file = DeletedFile {
                path: path.path,
                is_path_known: path.is_known,
                links: path.links,
                inode: of.inode.number,
                attributes: of.inode.attributes(&reader.super_),
                deleted: of.deleted_at,
                state: FileState::Whole,
                overwritten: vec![],
                unsure: vec![],
                reason: None,
                runs: vec![],
                inline,
                of,
            };
            files.push(file.with_verdict(map, verdict, &reader.super_));
        }
        files.sort_by(|a, b| (&a.path, b.deleted, a.inode).cmp(&(&b.path, a.deleted, b.inode)));
        let mut all = Self { reader, disk: now, history, files, is_cut_short, journal_damage };
        all.find_discarded();
        Ok(all)
    }

    /// Returns the files, sorted by path; of several with one path, the last deleted first.
    pub fn files(&self) -> &[DeletedFile] {
        &self.files
    }

    /// Returns the block size of the volume.
    pub fn block_bytes(&self) -> u32 {
        self.reader.super_.block_bytes
    }

    /// Returns the extended attributes of a file, with their names as programs see them.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if they are not there any more; [`Error::Io`].
    pub fn xattrs(&self, file: &DeletedFile) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        HistoricReader { reader: &self.reader, history: &self.history }.xattrs(&file.of)
    }

    /// Reads a file into `into`; returns the number of bytes, fewer only at its end. Overwritten
    /// bytes and holes are zeros.
    ///
    /// # Errors
    /// [`Error::IsADirectory`]; [`Error::NoKey`] and [`Error::Unsupported`] as
    /// [`draconis_ext_volume::Volume::read`]; [`Error::Corrupt`] for contents of which nothing is
    /// left; [`Error::Io`].
    pub fn read(&self, file: &DeletedFile, offset: u64, into: &mut [u8]) -> Result<usize> {
        match file.of.inode.kind {
            FileType::Directory => return Err(Error::IsADirectory),
            FileType::File => file.of.inode.check_readable()?,
            _ => {}
        }
        let size = file.of.inode.size_bytes;
        let len = into.len().min(saturating_usize(size.saturating_sub(offset)));
        let into = into.get_mut(..len).unwrap_or_default();
        into.fill(0);
        if let Some(inline) = &file.inline {
            let from = saturating_usize(offset).min(inline.len());
            let bytes = inline.get(from..).unwrap_or_default();
            let bytes = bytes.get(..len).unwrap_or(bytes);
            into.get_mut(..bytes.len()).unwrap_or_default().copy_from_slice(bytes);
            return Ok(len);
        }
        if file.of.inode.is_inline() {
            return Err(inodes::lost(&file.of.inode));
        }
        let block_bytes = u64::from(self.reader.super_.block_bytes);
        let end = offset.saturating_add(len as u64);
        let first = file.runs.partition_point(|run| byte_range(run, block_bytes).end <= offset);
        for run in file.runs.get(first..).unwrap_or_default() {
            let range = byte_range(run, block_bytes);
            if range.start >= end {
                break;
            }
            let BlockLocation::Mapped(block) = run.location else { continue };
            let (from, to) = (range.start.max(offset), range.end.min(end));
            let skipped = from.saturating_sub(range.start);
            let at = block.0.saturating_mul(block_bytes).saturating_add(skipped);
            let bytes = read_bytes(&*self.disk, Extent::new(at, to.saturating_sub(from)))?;
            let start = saturating_usize(from.saturating_sub(offset));
            let place = into.get_mut(start..).and_then(|rest| rest.get_mut(..bytes.len()));
            place.unwrap_or_default().copy_from_slice(&bytes);
        }
        for lost in &file.overwritten {
            let from = saturating_usize(lost.start.saturating_sub(offset)).min(len);
            let to = saturating_usize(lost.end.saturating_sub(offset)).min(len);
            into.get_mut(from..to).unwrap_or_default().fill(0);
        }
        Ok(len)
    }

    /// Reads up to `len` bytes as [`DeletedFiles::read`] does.
    ///
    /// # Errors
    /// As [`DeletedFiles::read`].
    pub fn read_chunk(&self, file: &DeletedFile, offset: u64, len: usize) -> Result<SharedBytes> {
        let left = saturating_usize(file.of.inode.size_bytes.saturating_sub(offset));
        let mut bytes = vec![0; len.min(left)];
        let read = self.read(file, offset, &mut bytes)?;
        bytes.truncate(read);
        Ok(SharedBytes::from_owned_bytes(bytes.into_boxed_slice()))
    }

    /// Marks files whose first or last block holds only zeros: the device may have discarded them.
    fn find_discarded(&mut self) {
        let block_bytes = self.reader.super_.block_bytes;
        for nth in 0..self.files.len() {
            let Some(file) = self.files.get(nth) else { continue };
            if file.attributes.kind == FileType::Directory {
                continue;
            }
            let ends = [file.runs.first(), file.runs.last()];
            let is_zeros = ends.into_iter().flatten().any(|run| {
                let BlockLocation::Mapped(first) = run.location else { return false };
                let nth = if run.from.0 == 0 { 0 } else { run.blocks.saturating_sub(1) };
                let at = first.offset(nth.into()).0.saturating_mul(block_bytes.into());
                let read = read_bytes(&*self.disk, Extent::new(at, block_bytes.into()));
                read.is_ok_and(|bytes| bytes.iter().all(|byte| *byte == 0))
            });
            if let Some(file) = self.files.get_mut(nth).filter(|file| {
                is_zeros && matches!(file.state, FileState::Whole | FileState::PartlyOverwritten)
            }) {
                let runs = file.runs.iter().map(|run| byte_range(run, block_bytes.into()));
                file.unsure = clip(runs.collect(), file.attributes.size_bytes);
                file.state = FileState::Unsure;
                file.reason = Some("a block holds only zeros: the device may have discarded it");
            }
        }
    }
}

impl std::fmt::Debug for DeletedFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeletedFiles").field("files", &self.files).finish_non_exhaustive()
    }
}

impl DeletedFile {
    /// Returns the target of a symbolic link.
    ///
    /// # Errors
    /// As [`DeletedFiles::read`]; [`Error::NoKey`] for an encrypted one.
    pub fn link_target(&self, all: &DeletedFiles) -> Result<Vec<u8>> {
        if self.of.inode.is_encrypted() {
            return Err(Error::NoKey);
        }
        if self.state != FileState::Whole {
            return Err(inodes::lost(&self.of.inode));
        }
        let len = self.of.inode.size_bytes.min(all.block_bytes().into());
        let mut target = vec![0; saturating_usize(len)];
        all.read(self, 0, &mut target)?;
        match target.is_empty() || target.contains(&0) {
            true => Err(inodes::lost(&self.of.inode)),
            false => Ok(target),
        }
    }

    /// Returns the bytes that are stored, as sorted ranges between holes.
    pub fn data_ranges(&self, block_bytes: u32) -> Vec<Range<u64>> {
        let size = self.of.inode.size_bytes;
        if self.inline.is_some() {
            return clip(std::iter::once(0..size).collect(), size);
        }
        let runs = self.runs.iter().filter(|run| matches!(run.location, BlockLocation::Mapped(_)));
        clip(runs.map(|run| byte_range(run, block_bytes.into())).collect(), size)
    }

    fn with_verdict(
        mut self,
        map: FileMap,
        verdict: BlockVerdicts,
        super_: &crate::format::superblock::Superblock,
    ) -> Self {
        let size = self.of.inode.size_bytes;
        let bytes = |range: Range<u64>| {
            let block_bytes = u64::from(super_.block_bytes);
            range.start.saturating_mul(block_bytes)..range.end.saturating_mul(block_bytes)
        };
        let in_bytes =
            |ranges: Vec<Range<u64>>| clip(ranges.into_iter().map(bytes).collect(), size);
        if self.inline.is_some() {
            return self;
        }
        self.runs = map.runs;
        if self.attributes.kind == FileType::Directory {
            return self;
        }
        self.overwritten = in_bytes(verdict.overwritten);
        self.unsure = in_bytes(verdict.unsure);
        let lost_inside = self.of.inode.is_inline() && self.inline.is_none();
        (self.state, self.reason) = if verdict.has_doubtful_map {
            self.unsure = clip(std::iter::once(0..size).collect(), size);
            (FileState::Unsure, Some("a block of its map may be another file's"))
        } else if lost_inside {
            self.overwritten = clip(std::iter::once(0..size).collect(), size);
            (FileState::Overwritten, None)
        } else if !self.unsure.is_empty() {
            (FileState::Unsure, Some("nothing proves that its blocks were not used since"))
        } else if !self.overwritten.is_empty() {
            let stored = self.data_ranges(super_.block_bytes);
            match stored.iter().all(|range| is_covered(range, &self.overwritten)) {
                true => (FileState::Overwritten, None),
                false => (FileState::PartlyOverwritten, None),
            }
        } else if size == 0 && self.attributes.kind == FileType::File && !self.of.is_orphan {
            // Data that was not yet allocated is in no inode.
            (FileState::Unsure, Some("empty when it was last recorded; contents may have followed"))
        } else {
            (FileState::Whole, None)
        };
        self
    }
}

/// Returns the bytes of a run.
fn byte_range(run: &Run, block_bytes: u64) -> Range<u64> {
    let start = u64::from(run.from.0).saturating_mul(block_bytes);
    start..start.saturating_add(u64::from(run.blocks).saturating_mul(block_bytes))
}

/// Returns true if sorted, joined ranges cover all of `range`.
fn is_covered(range: &Range<u64>, by: &[Range<u64>]) -> bool {
    let nth = by.partition_point(|it| it.end <= range.start);
    by.get(nth).is_some_and(|it| it.start <= range.start && it.end >= range.end)
}

/// Clips sorted ranges to the length of a file, and joins those that touch.
fn clip(ranges: Vec<Range<u64>>, size: u64) -> Vec<Range<u64>> {
    let mut all: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        let range = range.start.min(size)..range.end.min(size);
        match all.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if last.end == range.start => last.end = range.end,
            _ => all.push(range),
        }
    }
    all
}
