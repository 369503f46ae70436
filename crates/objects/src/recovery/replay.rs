//! Replay of the log after a checkpoint, commit by commit.
//!
//! Law 1: commits are valid as long as none is missing. Commits after a hole were never
//! acknowledged, unless a frame declares that the hole was durable. Then the disk lost it, and
//! opening fails rather than return an older state.
//! Law 2: frames that may have holes are verified, with their payloads.
//! Law 3: reading the log changes nothing, so that followers read it without the lock.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use draconis_types::PrivateBuffer;

use crate::cached_disk::{CachedDisk, PagesRead};
use crate::checkpoint_record::CheckpointRecord;
use crate::codec::{to_u32_saturating, to_usize_saturating};
use crate::core::Core;
use crate::entry::{DecodedKey, Entry, Key, decode_key};
use crate::frame::summary::{SummaryItem, SummaryItems};
use crate::frame::{FrameHeader, HEADER_BYTES, missing_frame_error};
use crate::log::{Stream, StreamPosition};
use crate::segment_table::{SegmentState, SegmentTable};
use crate::test_hooks::{InjectedFault, is_fault_injected};
use crate::{Error, Result};

/// Search range after a hole for frames that declare its commits durable.
const GAP_SEARCH_BYTES: u32 = 1 << 20;

/// Segments to search if a whole segment may be lost.
const GAP_SEARCH_SEGMENTS: usize = 8;

/// Where and how a log is read.
pub(super) struct LogReader {
    io: Arc<CachedDisk>,
    log_incarnation: u64,
    tag: u32,
    read_bytes: usize,
    frame_bytes: usize,
    /// Newest commit before those to read.
    seq: u64,
    places: Vec<StreamPosition>,
}

/// Whole commits of a log, without a gap.
pub(super) struct LogTail {
    commits: Vec<Vec<LogFrame>>,
    /// Newest commit.
    pub seq: u64,
    /// Newest commit that some frame declares durable.
    pub durable: u64,
    /// Address of a frame after the gap.
    behind_gap: Option<u64>,
}

impl LogTail {
    /// Returns an error if commits up to `durable` are missing.
    pub fn check_complete(&self, durable: u64, checkpoint_at: u64) -> Result<()> {
        if self.seq >= durable {
            return Ok(());
        }
        Err(missing_frame_error(self.behind_gap.unwrap_or(checkpoint_at)))
    }

    pub fn is_empty(&self) -> bool {
        self.commits.is_empty()
    }
}

/// A frame of the log.
struct LogFrame {
    header: FrameHeader,
    stream: usize,
    segment: u32,
    table: Vec<u8>,
}

impl LogFrame {
    fn items(&self) -> SummaryItems<'_> {
        SummaryItems::new(&self.table, self.header.at, self.header.table_at)
    }
}

impl LogReader {
    /// Returns a reader of the log after the state of `core`.
    pub fn after(core: &Core) -> Self {
        let place = |stream: &Stream| (stream.segment, stream.pos, stream.next);
        Self {
            io: core.log.io.clone(),
            log_incarnation: core.checkpoints.superblock.log_incarnation,
            tag: core.log.tag,
            read_bytes: core.log.layout.log_read_bytes(),
            frame_bytes: core.log.layout.frame_bytes(),
            seq: core.log.batch.seq.saturating_sub(1),
            places: core.log.streams.iter().map(place).collect(),
        }
    }

    /// Begins to read a stream at its position.
    fn begin(&self, (segment, pos, _): StreamPosition) -> PagesRead {
        let geometry = self.io.geometry;
        let room = geometry.segment_bytes.saturating_sub(pos) as usize;
        let len = self.read_bytes.min(room).next_multiple_of(geometry.page_bytes as usize);
        let at = geometry.start_of(segment).saturating_add(u64::from(pos));
        self.io.begin_reading_pages(at, len)
    }

    /// Reads the whole commits after the reader's position. `table` names the segments in which a
    /// lost frame's successors are looked for.
    pub fn read_tail(&self, durable: u64, table: Option<&SegmentTable>) -> Result<LogTail> {
        let mut found: Vec<LogFrame> = vec![];
        let mut durable = durable.max(self.seq);
        // The first reads of all streams are in flight together.
        let first: Vec<PagesRead> = self.places.iter().map(|place| self.begin(*place)).collect();
        for ((stream, place), first) in self.places.iter().enumerate().zip(first) {
            durable = durable.max(scan_stream(self, stream, *place, first, table, &mut found)?);
        }
        let mut commits: BTreeMap<u64, Vec<LogFrame>> = BTreeMap::new();
        for frame in found {
            if frame.header.seq > self.seq {
                commits.entry(frame.header.seq).or_default().push(frame);
            }
        }
        let mut tail = LogTail { commits: vec![], seq: self.seq, durable, behind_gap: None };
        while let Some(mut frames) =
            commits.remove(&tail.seq.saturating_add(1)).or_else(|| next_after_gap(&mut commits))
        {
            frames.sort_by_key(|frame| frame.header.frame_index);
            let is_numbered =
                frames.iter().zip(0..).all(|(frame, part)| frame.header.frame_index == part);
            let is_ended = frames.last().is_some_and(|frame| frame.header.is_last);
            if (!is_numbered || !is_ended) && !is_fault_injected(InjectedFault::WholeCommits) {
                break;
            }
            if tail.seq >= durable && !is_fault_injected(InjectedFault::VerifiedReplay) {
                let mut is_whole = true;
                for frame in &frames {
                    is_whole &= has_valid_payloads(&self.io, frame)?;
                }
                if !is_whole {
                    break;
                }
            }
            tail.commits.push(frames);
            tail.seq = tail.seq.saturating_add(1);
        }
        tail.behind_gap = commits.values().flatten().map(|frame| frame.header.at).next();
        Ok(tail)
    }
}

/// Reads the frames of one stream from its position.
fn scan_stream(
    log: &LogReader,
    stream: usize,
    place: StreamPosition,
    first: PagesRead,
    table: Option<&SegmentTable>,
    out: &mut Vec<LogFrame>,
) -> Result<u64> {
    let geometry = log.io.geometry;
    let (mut segment, mut pos, mut next) = place;
    let mut seq = log.seq.saturating_add(1);
    let mut durable = 0;
    let mut window: Option<(u32, PrivateBuffer)> = Some((pos, first.wait()?));
    // A stream cannot go through more segments than there are.
    for _ in 0..=geometry.segments {
        let start = geometry.start_of(segment);
        let before = out.len();
        while pos < geometry.segment_bytes {
            let Some((header, table)) =
                read_frame_at(log, start, pos, log.read_bytes, &mut window)?
            else {
                break;
            };
            if header.seq < seq || header.next_segment >= geometry.segments {
                break;
            }
            seq = header.seq;
            durable = durable.max(header.durable);
            next = header.next_segment;
            pos = pos.saturating_add(header.len);
            out.push(LogFrame { header, stream, segment, table });
        }
        // A later frame may declare the missing one durable.
        let reach = to_u32_saturating((GAP_SEARCH_BYTES as usize).max(log.frame_bytes) as u64);
        let reach = reach.saturating_add(geometry.page_bytes.saturating_mul(2));
        let end = pos.saturating_add(reach).min(geometry.segment_bytes);
        let mut look = pos.saturating_add(geometry.page_bytes);
        while look < end {
            if let Some((header, _)) = read_frame_at(log, start, look, log.read_bytes, &mut window)?
                && header.seq >= seq
            {
                durable = durable.max(header.durable);
            }
            look = look.saturating_add(geometry.page_bytes);
        }
        if out.len() == before && pos == 0 {
            // A frame that filled its segment held the link to the next one. The stream most likely
            // continued in the next free segments.
            let free = table.into_iter().flat_map(|table| table.free_segments_after(segment));
            for next in free.take(GAP_SEARCH_SEGMENTS) {
                let header = read_frame_at(log, geometry.start_of(next), 0, 0, &mut None)?;
                let later = header.map(|(header, _)| header).filter(|header| header.seq >= seq);
                durable = durable.max(later.map_or(0, |header| header.durable));
            }
            break;
        }
        (segment, pos, window) = (next, 0, None);
    }
    Ok(durable)
}

/// Returns the frame at an address, if a whole one of this incarnation is there.
fn read_frame_at(
    log: &LogReader,
    start: u64,
    pos: u32,
    read_bytes: usize,
    window: &mut Option<(u32, PrivateBuffer)>,
) -> Result<Option<(FrameHeader, Vec<u8>)>> {
    let geometry = log.io.geometry;
    let at = start.saturating_add(u64::from(pos));
    let room = geometry.segment_bytes.saturating_sub(pos) as usize;
    let mut wanted = (geometry.page_bytes as usize).max(HEADER_BYTES);
    for _ in 0..2 {
        let is_held = window.as_ref().is_some_and(|(from, bytes)| {
            let skip = pos.checked_sub(*from);
            skip.is_some_and(|skip| bytes.len() >= (skip as usize).saturating_add(wanted.min(room)))
        });
        if !is_held {
            let len =
                wanted.max(read_bytes).min(room).next_multiple_of(geometry.page_bytes as usize);
            *window = Some((pos, log.io.read_pages_in_parts(at, len)?));
        }
        let Some((from, bytes)) = window.as_ref() else { return Ok(None) };
        let bytes = bytes.get(pos.saturating_sub(*from) as usize..).unwrap_or_default();
        let Some(header) = FrameHeader::decode_header(bytes, at, log.tag, room as u64) else {
            return Ok(None);
        };
        let is_ours = header.incarnation == log.log_incarnation
            && (header.len).is_multiple_of(geometry.page_bytes);
        if !is_ours {
            return Ok(None);
        }
        let end = header.table_at.saturating_add(header.table_len) as usize;
        let Some(table) = bytes.get(header.table_at as usize..end) else {
            wanted = end;
            continue;
        };
        return Ok(header
            .has_valid_checksum(bytes, table, log.io.summer)
            .then(|| (header, table.to_vec())));
    }
    Ok(None)
}

/// Verifies all payloads of a frame.
fn has_valid_payloads(io: &CachedDisk, found: &LogFrame) -> Result<bool> {
    let page = io.geometry.page_bytes as usize;
    let bytes = io
        .read_pages_uncached(found.header.at, (found.header.len as usize).next_multiple_of(page))?;
    for item in found.items() {
        let Ok(item) = item else { return Ok(false) };
        if let SummaryItem::Pair(_, _, Entry::Data(data)) = item {
            let within = data.at.checked_sub(found.header.at).and_then(|from| {
                bytes.get(to_usize_saturating(from)..)?.get(..data.stored as usize)
            });
            let Some(stored) = within else { return Ok(false) };
            if io.verify_payload(&data, stored).is_err() {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Replays the log after the checkpoint. If `floor` is set, commits after it may be missing,
/// though a frame declares them durable: a writer wrote them while the log was read.
pub(super) fn replay(
    core: &mut Core,
    blob: &CheckpointRecord,
    floor: Option<u64>,
) -> Result<ReplayEnd> {
    let tail = LogReader::after(core).read_tail(blob.own_seq, Some(&core.log.segments))?;
    let (seq, durable) = (tail.seq, tail.durable);
    let checkpoint_at = core.checkpoints.superblock.checkpoint.at;
    let gap = tail.check_complete(floor.unwrap_or(durable), checkpoint_at).err();
    apply_tail(core, tail)?;
    if let Some(gap) = gap {
        return Ok(ReplayEnd { durable, gap: Some(gap) });
    }
    core.log.batch.seq = seq.saturating_add(1);
    core.log.sent.mark_recovered(seq);
    // Segments without live bytes and without a stream are free.
    let standing: HashSet<u32> =
        core.log.streams.iter().flat_map(|stream| [stream.segment, stream.next]).collect();
    for number in 0..core.checkpoints.superblock.geometry.segments {
        let Some(segment) = core.log.segments.all.get(number as usize) else { continue };
        if segment.live == 0 && !standing.contains(&number) && segment.state != SegmentState::Free {
            core.log.segments.release_segment(number);
        } else if standing.contains(&number) {
            core.log.segments.reopen(number);
        }
    }
    Ok(ReplayEnd { durable, gap: None })
}

/// Result of a replay.
pub(super) struct ReplayEnd {
    /// Newest commit that some frame declares durable.
    pub durable: u64,
    /// Error for durable commits that are missing.
    pub gap: Option<Error>,
}

/// Applies commits to the state that they follow.
fn apply_tail(core: &mut Core, tail: LogTail) -> Result<()> {
    tail.commits.into_iter().try_for_each(|frames| replay_commit(core, frames))
}

/// Applies commits to the state of a reader, which `log` was read for.
pub(super) fn follow_tail(core: &mut Core, tail: LogTail) -> Result<()> {
    let seq = tail.seq;
    apply_tail(core, tail)?;
    core.log.batch.seq = seq.saturating_add(1);
    core.log.sent.mark_recovered(seq);
    Ok(())
}

/// Returns the next commit although one may be missing, if that fault is injected.
fn next_after_gap(commits: &mut BTreeMap<u64, Vec<LogFrame>>) -> Option<Vec<LogFrame>> {
    is_fault_injected(InjectedFault::NoGaps).then(|| commits.pop_first())?.map(|(_, frames)| frames)
}

fn replay_commit(core: &mut Core, frames: Vec<LogFrame>) -> Result<()> {
    let mut pairs: Vec<(u64, Key, Entry)> = vec![];
    for frame in &frames {
        for item in frame.items() {
            if let SummaryItem::Pair(order, key, entry) = item? {
                pairs.push((order, key, entry));
            }
        }
        let Some(stream) = core.log.streams.get_mut(frame.stream) else { continue };
        if stream.segment != frame.segment {
            core.log.segments.close(stream.segment, core.log.clock);
            core.log.segments.reopen(frame.segment);
            stream.segment = frame.segment;
        }
        let begin = core.checkpoints.superblock.geometry.start_of(frame.segment);
        let within = to_u32_saturating(frame.header.at.saturating_sub(begin));
        stream.pos = within.saturating_add(frame.header.len);
        stream.next = frame.header.next_segment;
        core.log.segments.reopen(stream.next);
        let (end, seq) = (stream.pos, frame.header.seq);
        core.log.segments.update_segment(frame.segment, |segment| {
            (segment.used, segment.last_seq) = (segment.used.max(end), seq);
        });
    }
    pairs.sort_by_key(|(order, ..)| *order);
    for (_, key, entry) in pairs {
        if let Entry::Data(data) = &entry {
            core.log.clock = core.log.clock.saturating_add(u64::from(data.stored));
            core.log.segments.add_live(data.at, data.stored, core.log.clock, true);
        }
        match (decode_key(&key), &entry) {
            (Some(DecodedKey::Object(id)), Entry::Object(_)) => {
                core.next_id = core.next_id.max(id.0.saturating_add(1))
            }
            (_, Entry::ValueObject(..)) => {
                core.value_objects = core.value_objects.saturating_add(1)
            }
            _ => {}
        }
        core.levels.set_entry(&mut core.log.segments, key, entry);
    }
    Ok(())
}
