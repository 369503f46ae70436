//! Opening of a journal: its inode, its blocks and its superblock.

use std::ops::Range;
use std::sync::Arc;

use draconis_device::Disk;

use super::journal_file::{JournalFile, MISSING_BLOCK, read_block};
use super::unusable_journal_error;
use crate::format::extent;
use crate::format::inode::{Inode, NewInode, flags, set_checksum};
use crate::format::jbd2::RawJournalSuperblock;
use crate::format::superblock::Superblock;
use crate::map::{BlockLocation, SEGMENT_BLOCKS};
use crate::options::OpenOptions;
use crate::reader::VolumeReader;
use crate::units::saturating_usize;
use crate::{Error, FileBlock, InodeNumber, Result, Run};

/// Cache sizes of a volume of which only one inode's map is read.
const MINIMAL_OPTIONS: OpenOptions = OpenOptions {
    inode_cache: 16,
    block_map_cache: 64,
    data_cache_bytes: 1 << 20,
    lists_dots: false,
    read_ahead_bytes: 0,
};

/// Limit of the journal's block runs.
const MAX_JOURNAL_RUNS: usize = 1 << 16;

/// Opens the journal of a volume.
///
/// # Errors
/// As [`super::open_replayed`].
pub fn open_journal(disk: Arc<dyn Disk>, volume: &Superblock) -> Result<JournalFile> {
    let inode = volume.journal.ok_or_else(|| unusable_journal_error(volume))?;
    let plain = plain_reader(&disk, volume);
    let node = plain.node(inode).map_err(|error| match error {
        Error::NotFound if volume.journal_device != 0 => unusable_journal_error(volume),
        Error::NotFound => Error::corrupt("journal: its inode is unused").with_inode(inode),
        other => other,
    })?;
    open_by_inode(disk, &plain, &node)
}

/// [`open_journal`] for reading: a damaged inode of the journal is replaced by its copy in the
/// superblock.
///
/// # Errors
/// As [`open_journal`].
pub(super) fn open_damaged_journal(
    disk: Arc<dyn Disk>,
    volume: &Superblock,
) -> Result<JournalFile> {
    open_journal(disk.clone(), volume).or_else(|error| {
        let number = volume.journal.filter(|_| matches!(error, Error::Corrupt { .. }));
        let copy = number.and_then(|number| Some((number, journal_inode_copy(volume, number)?)));
        let (number, slot) = copy.ok_or(error.clone())?;
        let plain = plain_reader(&disk, volume);
        let opened = Inode::parse_used(&slot, number, volume)
            .and_then(|node| open_by_inode(disk, &plain, &node));
        if opened.is_ok() {
            ::log::warn!("{error}: its copy in the superblock is used");
        }
        opened.map_err(|_| error)
    })
}

/// Returns the bytes of the journal's inode after its copy in the superblock, if there is one.
pub fn journal_inode_copy(volume: &Superblock, number: InodeNumber) -> Option<Vec<u8>> {
    let [pointers @ .., high, low] = volume.journal_backup?;
    let [first, ..] = pointers;
    let has_extents = first & 0xFFFF == u32::from(extent::MAGIC);
    let inode = NewInode {
        mode: 0o100_600,
        links: 1,
        size_bytes: u64::from(high) << 32 | u64::from(low),
        flags: if has_extents { flags::EXTENTS } else { 0 },
        pointers,
        ..NewInode::default()
    };
    let mut slot = inode.encode(volume.inode_bytes);
    set_checksum(&mut slot, number, volume);
    Some(slot)
}

fn plain_reader(disk: &Arc<dyn Disk>, volume: &Superblock) -> VolumeReader {
    VolumeReader::new(disk.clone(), &MINIMAL_OPTIONS, volume.clone()).without_warnings()
}

fn open_by_inode(disk: Arc<dyn Disk>, plain: &VolumeReader, node: &Inode) -> Result<JournalFile> {
    let (volume, inode) = (&plain.super_, node.number);
    let blocks = node.size_bytes.checked_div(volume.block_bytes.into()).unwrap_or(0);
    let mut runs = journal_runs(plain, node, FileBlock(0)..FileBlock(1))?;
    let Some(Run { location: BlockLocation::Mapped(first), .. }) = runs.pop() else {
        return Err(Error::corrupt(MISSING_BLOCK).with_inode(inode));
    };
    let first = read_block(&*disk, volume, first)?;
    let super_ = RawJournalSuperblock::view(&first)
        .and_then(|raw| raw.check(volume.block_bytes, blocks.min(plain.disk_blocks())))
        .map_err(|error| error.with_inode(inode))?;
    let runs = journal_runs(plain, node, FileBlock(0)..FileBlock(super_.len))?;
    let blocks = |run: &Run| match run.location {
        BlockLocation::Mapped(first) => Some(first.0..first.offset(run.blocks.into()).0),
        _ => None,
    };
    let mut journal_blocks: Vec<Range<u64>> = runs.iter().filter_map(blocks).collect();
    journal_blocks.sort_unstable_by_key(|journal_blocks| journal_blocks.start);
    Ok(JournalFile { disk, volume: volume.clone(), super_, first, runs, journal_blocks })
}

/// Returns the block runs of a journal, or an error if a block is missing.
fn journal_runs(volume: &VolumeReader, node: &Inode, range: Range<FileBlock>) -> Result<Vec<Run>> {
    let mut all = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let end = at.offset(SEGMENT_BLOCKS).min(range.end);
        all.extend(volume.map_runs(node, at, end)?);
        if all.iter().rev().take(saturating_usize(SEGMENT_BLOCKS.into())).any(|run| !is_mapped(run))
        {
            return Err(Error::corrupt(MISSING_BLOCK).with_inode(node.number));
        }
        if all.len() > MAX_JOURNAL_RUNS {
            let feature = format!("needs: a journal in at most {MAX_JOURNAL_RUNS} pieces");
            return Err(Error::Unsupported { feature });
        }
        at = end;
    }
    Ok(all)
}

fn is_mapped(run: &Run) -> bool {
    matches!(run.location, BlockLocation::Mapped(_))
}
