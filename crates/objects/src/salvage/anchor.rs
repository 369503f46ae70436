//! Checkpoints and superblocks, found by a scan.
//!
//! ```text
//!   superblocks ─lost─▶ frames: seed of the checksums, page, segment ─┐
//!   checkpoint ──lost─▶ chunks of frames that decode as one ──────────┴▶ the newest usable
//! ```
//!
//! The seed of all checksums follows from one payload and its checksum, because the mixing of seed
//! and address can be undone.
//!
//! Law: a checkpoint counts only if it names the commit that it is in, and each block that it refers
//! to has its checksum.

use draconis_device::{Disk, Extent};
use draconis_types::PrivateBuffer;

use crate::checkpoint_record::CheckpointRecord;
use crate::codec::{Checksummer, low_u32, mix_bits, to_usize_saturating, unmix_bits};
use crate::core::Core;
use crate::entry::{CHECKSUM_BLOCK_BYTES, Entry};
use crate::frame::summary::{SummaryItem, SummaryItems};
use crate::frame::{FrameHeader, HEADER_BYTES};
use crate::frame_scan::FrameScan;
use crate::index::tree::BlockPtr;
use crate::superblock::{Geometry, Superblock};
use crate::{Error, LayoutKind, Profile, Result};

/// Unit of the search for frames: a page of nearly all stores.
const SEARCH_STEP_BYTES: usize = 4096;
/// Bytes of one read of the search.
const SEARCH_READ_BYTES: u64 = 1 << 20;
/// Longest summary that the search reads.
const MAX_SUMMARY_BYTES: u32 = 4 << 20;
/// Blocks of a frame from which the seed is computed.
const MAX_SEED_TRIES: usize = 4;
/// Frames that determine page and segment.
const MAX_SEARCHED_FRAMES: usize = 1 << 16;

/// Returns the newest superblock, or if there is none, the superblocks that fit the frames of the
/// disk, without a checkpoint, and true.
///
/// # Errors
/// The error of reading the superblocks if there are no frames either.
pub(super) fn find_superblocks(disk: &dyn Disk) -> Result<(Vec<Superblock>, bool)> {
    match Superblock::find_newest(disk) {
        Ok((superblock, _)) => Ok((vec![superblock], false)),
        Err(error @ (Error::NotAStore(_) | Error::Corrupt { .. })) => {
            let made = superblocks_of_frames(disk).filter(|made| !made.is_empty());
            made.map(|made| (made, true)).ok_or(error)
        }
        Err(error) => Err(error),
    }
}

/// Returns the superblock of the newest checkpoint that can be used, newest first.
pub(super) fn find_checkpoint(core: &Core, scan: &FrameScan<'_>) -> Option<Superblock> {
    let io = &*core.log.io;
    let mut best: Option<(u64, Superblock)> = None;
    scan.for_each(&mut |frame| {
        let header = &frame.header;
        if scan.is_cut_off(frame.version(0)) || best.as_ref().is_some_and(|it| it.0 > header.seq) {
            return;
        }
        for item in frame.items() {
            let SummaryItem::Chunk { at, len } = item else { continue };
            if !io.geometry.contains(at, len.into()) {
                continue;
            }
            let Some(bytes) = read(&*io.disk, at, len.into(), io.geometry.page_bytes) else {
                continue;
            };
            let Ok(record) = CheckpointRecord::decode(&bytes, at) else { continue };
            let is_sound = |ptr: &BlockPtr| io.read_block(*ptr).is_ok();
            let mut ptrs = record.table.iter().chain(&record.root).chain(&record.replayed_log);
            if record.own_seq != header.seq
                || record.seq >= record.own_seq
                || !ptrs.all(is_sound)
                || !record.runs.iter().flatten().all(is_sound)
            {
                continue;
            }
            let sum = io.summer.checksum(at, &bytes);
            let mut superblock = core.checkpoints.superblock.clone();
            (superblock.checkpoint, superblock.checkpoint_copy) = (BlockPtr { at, len, sum }, None);
            superblock.log_incarnation = header.incarnation;
            superblock.incarnation = superblock.incarnation.max(header.incarnation);
            if record.places.len() != core.log.layout.streams() {
                superblock.profile.layout = match record.places.len() {
                    5 => LayoutKind::Cow,
                    _ => LayoutKind::Log,
                };
            }
            best = Some((header.seq, superblock));
        }
    });
    best.map(|(_, superblock)| superblock)
}

/// Reads a range of the disk.
fn read(disk: &dyn Disk, at: u64, len: u64, page: u32) -> Option<Vec<u8>> {
    let page = u64::from(page);
    let skip = at.checked_rem(page)?;
    let whole = skip.checked_add(len)?.next_multiple_of(page);
    if at.checked_add(len)? > disk.properties().len_bytes {
        return None;
    }
    let into = PrivateBuffer::new_uninitialized(to_usize_saturating(whole)).into();
    let block = disk.read_now(Extent::new(at.checked_sub(skip)?, whole), into).ok()?;
    let (skip, len) = (to_usize_saturating(skip), to_usize_saturating(len));
    Some(block.into_private().get(skip..skip.checked_add(len)?)?.to_vec())
}

/// Returns superblocks for the frames of a disk, one for each length of segments that fits.
fn superblocks_of_frames(disk: &dyn Disk) -> Option<Vec<Superblock>> {
    let disk_bytes = disk.properties().len_bytes;
    let sector = disk.properties().sector_bytes;
    let (mut seed, mut frames, mut at) = (None, vec![], 0u64);
    while at < disk_bytes && frames.len() < MAX_SEARCHED_FRAMES {
        let len = SEARCH_READ_BYTES.min(disk_bytes.saturating_sub(at));
        // What is unreadable has no frames.
        let bytes = read(disk, at, len, sector).unwrap_or_default();
        for (page, from) in bytes.chunks(SEARCH_STEP_BYTES).zip((at..).step_by(SEARCH_STEP_BYTES)) {
            let Some(header) = any_header(page, from, disk_bytes) else { continue };
            if seed.is_none() {
                seed = seed_of(disk, page, &header);
            }
            frames.push(header);
        }
        at = at.saturating_add(len.max(SEARCH_STEP_BYTES as u64));
    }
    let seed = seed?;
    let aligned = frames.iter().fold(1 << 20, |all, it| all | it.at | u64::from(it.len));
    let page_bytes = 1u32 << aligned.trailing_zeros().clamp(9, 20);
    // No frame leaves its segment.
    let is_within = |geometry: &Geometry| {
        frames.iter().all(|it| {
            geometry.contains(it.at, it.len.into()) && it.next_segment < geometry.segments
        })
    };
    let none = BlockPtr { at: 0, len: 0, sum: 0 };
    let superblock = |shift: u32| {
        let layout = LayoutKind::Log;
        let profile = Profile { layout, page_bytes, segment_bytes: 1 << shift, queue_depth: 8 };
        let geometry = Geometry::for_disk(&profile, disk_bytes).ok().filter(is_within)?;
        Some(Superblock {
            // An id with this seed.
            id: u128::from(unmix_bits(seed ^ mix_bits(1))),
            generation: 0,
            incarnation: 1,
            log_incarnation: 1,
            profile,
            geometry,
            checkpoint: none,
            checkpoint_copy: None,
        })
    };
    Some((12..=30).filter_map(superblock).collect())
}

/// Returns the header of a frame of any store.
fn any_header(page: &[u8], at: u64, disk_bytes: u64) -> Option<FrameHeader> {
    let tag = u32::from_le_bytes(*page.get(4..)?.first_chunk()?);
    let room = disk_bytes.saturating_sub(at);
    let header = FrameHeader::decode_header(page, at, tag, room)?;
    (header.table_len <= MAX_SUMMARY_BYTES).then_some(header)
}

/// Returns the seed of the checksums of a frame's store, from a payload or the table of a
/// checkpoint that is intact.
fn seed_of(disk: &dyn Disk, page: &[u8], header: &FrameHeader) -> Option<u64> {
    let tag = u32::from_le_bytes(*page.get(4..)?.first_chunk()?);
    let sector = disk.properties().sector_bytes;
    let table_at = header.at.checked_add(header.table_at.into())?;
    let table = read(disk, table_at, header.table_len.into(), sector)?;
    let end = header.at.checked_add(header.len.into())?;
    let is_within = |at: u64, len: u32| {
        at >= header.at && at.checked_add(len.into()).is_some_and(|to| to <= end)
    };
    let items = SummaryItems::new(&table, header.at, header.table_at).map_while(Result::ok);
    let blocks = items.filter_map(|item| match item {
        SummaryItem::Pair(_, _, Entry::Data(data)) => {
            let (len, sum) = (data.stored.min(CHECKSUM_BLOCK_BYTES), *data.sums.first()?);
            (is_within(data.at, len)).then_some(BlockPtr { at: data.at, len, sum })
        }
        SummaryItem::Chunk { at, len } if is_within(at, len) => {
            let bytes = read(disk, at, len.into(), sector)?;
            let record = CheckpointRecord::decode(&bytes, at).ok()?;
            let is_short = |ptr: &&BlockPtr| ptr.len <= MAX_SUMMARY_BYTES;
            record.table.first().filter(is_short).copied()
        }
        _ => None,
    });
    blocks.take(MAX_SEED_TRIES).find_map(|ptr| {
        let bytes = read(disk, ptr.at, ptr.len.into(), sector)?;
        let seed = ptr.at ^ unmix_bits(ptr.sum ^ Checksummer::hash(&bytes));
        let is_seed = low_u32(mix_bits(seed)) == tag
            && header.has_valid_checksum(page.get(..HEADER_BYTES)?, &table, Checksummer(seed));
        is_seed.then_some(seed)
    })
}
