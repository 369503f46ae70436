//! Cleaning: frees a segment by moving its live bytes.
//!
//! Law 1: a moved payload is a change like any other: in the log, with the same key. It was
//! verified first; damaged bytes stay where they are.
//! Law 2: live items are those that the index refers to at that time; counts do not matter.
use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use draconis_types::lock::{Mutex, MutexGuard};

use crate::cached_disk::CachedDisk;
use crate::entry::{Entry, Key, PayloadRef};
use crate::frame::summary::{SummaryItem, SummaryItems};
use crate::frame::{FrameHeader, HEADER_BYTES};
use crate::index::tree::{BlockPtr, Node};
use crate::layout::PayloadKind;
use crate::levels::Levels;
use crate::log::LogWriter;
use crate::required_io::{MaintenanceStep, MissPolicy, RequiredIo, with_miss_policy};
use crate::segment_reader::SegmentReader;
use crate::test_hooks::{InjectedFault, is_fault_injected};
use crate::{Error, Result};

/// An item of a frame that may be live.
#[derive(Debug)]
enum LiveCandidate {
    Payload(Key, PayloadRef),
    Node { at: u64, len: u32 },
    Chunk { at: u64, len: u32 },
}

impl LiveCandidate {
    fn len(&self) -> u64 {
        match self {
            Self::Payload(_, data) => u64::from(data.stored) + 64,
            Self::Node { len, .. } | Self::Chunk { len, .. } => u64::from(*len) + 64,
        }
    }
}

/// The segment being cleaned, and those cleaned since the last checkpoints.
#[derive(Default)]
pub(crate) struct Cleaner {
    pub cleaning: Option<SegmentCleaning>,
    /// Segments cleaned since the last checkpoint began: they wait for the next one.
    pub since: HashSet<u32>,
    /// Segments cleaned before the checkpoint in progress began.
    pub before: HashSet<u32>,
}

/// A segment being cleaned.
pub(crate) struct SegmentCleaning {
    pub segment: u32,
    /// Address of its first byte.
    start: u64,
    /// Offset of the next frame.
    pos: u32,
    used: u32,
    /// Bytes that cleaning it frees.
    pub dead: u64,
    stamp: u64,
    /// Shared with a caller that waits for reads.
    reading: Arc<Mutex<SegmentReader>>,
    /// Address up to which the next step needs bytes.
    needed: u64,
    /// True if frames are read whole, because a seek takes longer than reading the gap.
    is_whole: bool,
    /// Remaining items of the frame, last first.
    candidates: Vec<LiveCandidate>,
}

impl SegmentCleaning {
    /// Returns the offset of an address in the segment.
    fn segment_offset(&self, at: u64) -> Result<u32> {
        let gone = Error::Corrupt { what: "an item outside of its segment", at_bytes: at };
        at.checked_sub(self.start).and_then(|at| u32::try_from(at).ok()).ok_or(gone)
    }

    /// Requests bytes of the segment; returns true if they were requested before.
    fn request_bytes(
        &mut self,
        io: &CachedDisk,
        reading: &mut SegmentReader,
        from: u32,
        len: usize,
    ) -> bool {
        self.needed = self.start.saturating_add(from.into()).saturating_add(len as u64);
        reading.request(io, from, len)
    }
}

impl Cleaner {
    /// Returns the I/O that the next step would wait for.
    pub fn pending_io(&self) -> Option<RequiredIo> {
        let cleaning = self.cleaning.as_ref()?;
        let waits =
            cleaning.reading.try_lock().is_none_or(|it| it.is_pending_before(cleaning.needed));
        waits.then(|| RequiredIo::Bytes(cleaning.reading.clone(), cleaning.needed))
    }

    /// Begins to clean a segment.
    pub fn begin(
        &mut self,
        log: &mut LogWriter,
        number: u32,
        patience: MissPolicy,
    ) -> Result<MaintenanceStep> {
        let geometry = log.segments.geometry;
        let len = u64::from(geometry.segment_bytes);
        let segment = log.segments.all.get(number as usize).copied();
        let segment = segment.ok_or(Error::Misuse("no such segment"))?;
        if segment.last_seq == log.batch.seq {
            // Its last frames were not submitted yet.
            log.commit()?;
        }
        if let Some(ticket) = log.sent.invisible_ticket(segment.last_seq) {
            if patience == MissPolicy::Defer {
                return Ok(MaintenanceStep::Break(RequiredIo::Settled(ticket)));
            }
            log.io.disk.wait_visible(ticket)?;
        }
        let live = segment.rewrite_bytes();
        let layout = &log.layout;
        // With few live bytes the cleaner skips the gaps between them.
        let is_dense = live.saturating_mul(layout.sparse_read_ratio()) > u64::from(segment.used);
        let depth = if is_dense { layout.cleaner_reads_ahead() } else { 0 };
        let start = geometry.start_of(number);
        let window = layout.cleaner_read_bytes();
        let reading = SegmentReader::new(&log.io, start, segment.used, window, depth);
        self.cleaning = Some(SegmentCleaning {
            segment: number,
            start,
            reading: Arc::new(Mutex::new(reading)),
            needed: start.saturating_add(1),
            is_whole: is_dense && window >= layout.frame_bytes(),
            pos: 0,
            used: segment.used,
            dead: len.saturating_sub(live).max(len / 32),
            stamp: segment.stamp,
            candidates: vec![],
        });
        Ok(MaintenanceStep::Continue(0))
    }

    /// Processes the next item of the segment; returns its bytes.
    pub fn step(
        &mut self,
        log: &mut LogWriter,
        levels: &mut Levels,
        patience: MissPolicy,
    ) -> Result<MaintenanceStep> {
        let Some(mut cleaning) = self.cleaning.take() else {
            return Ok(MaintenanceStep::Continue(0));
        };
        if cleaning.candidates.is_empty() && cleaning.pos >= cleaning.used {
            self.since.insert(cleaning.segment);
            log.counters.cleaned = log.counters.cleaned.saturating_add(1);
            return Ok(MaintenanceStep::Continue(64));
        }
        // A lock holder waits for the disk: the caller checked `pending_io`, or has to wait, too.
        let reading = cleaning.reading.clone();
        let mut reading = reading.lock();
        let done = match cleaning.candidates.pop() {
            None => cleaning.next_frame(log, &mut reading).map(MaintenanceStep::Continue),
            Some(candidate) => {
                let moved =
                    cleaning.move_candidate(log, levels, &mut reading, &candidate, patience);
                match moved {
                    Ok(MoveResult::Done) => Ok(MaintenanceStep::Continue(candidate.len())),
                    Ok(MoveResult::Asked) => {
                        cleaning.candidates.push(candidate);
                        Ok(MaintenanceStep::Continue(64))
                    }
                    Ok(MoveResult::Wants(need)) => {
                        cleaning.candidates.push(candidate);
                        Ok(MaintenanceStep::Break(need))
                    }
                    Err(error) => Err(error),
                }
            }
        };
        match done {
            Ok(step) => {
                self.cleaning = Some(cleaning);
                Ok(step)
            }
            Err(Error::Corrupt { what, at_bytes }) => {
                let segment = cleaning.segment;
                log::warn!("segment {segment} is left as it is: {what} at byte {at_bytes}");
                log.segments.update_segment(segment, |segment| segment.is_bad = true);
                Ok(MaintenanceStep::Continue(64))
            }
            Err(error) => Err(error),
        }
    }
}

/// Result of moving a candidate.
enum MoveResult {
    Done,
    /// Its bytes were requested.
    Asked,
    Wants(RequiredIo),
}

impl SegmentCleaning {
    /// Reads the items of the next frame; returns the bytes of it that cannot be live.
    fn next_frame(
        &mut self,
        log: &LogWriter,
        reading: &mut MutexGuard<'_, SegmentReader>,
    ) -> Result<u64> {
        let io = &*log.io;
        let page = log.segments.geometry.page_bytes as usize;
        let (start, pos) = (self.start, self.pos);
        let at = start.saturating_add(pos.into());
        let room = self.used.saturating_sub(pos) as usize;
        let gone = Error::Corrupt { what: "a frame", at_bytes: at };
        if !self.request_bytes(io, reading, pos, page.min(room)) {
            return Ok(64);
        }
        let first = reading.get(io, pos, page.min(room))?;
        let header =
            FrameHeader::decode_header(first, at, log.tag, room as u64).ok_or(gone.clone())?;
        let first = first.get(..HEADER_BYTES).ok_or(gone.clone())?.to_vec();
        if self.is_whole {
            if !self.request_bytes(io, reading, pos, header.len as usize) {
                return Ok(64);
            }
            reading.get(io, pos, header.len as usize)?;
        }
        let (table_at, table_len) =
            (pos.saturating_add(header.table_at), header.table_len as usize);
        // The summary of a long frame is after its payloads, which are read as they are needed.
        let Some(table) = reading.read_separately(io, table_at, table_len)? else { return Ok(64) };
        if !header.has_valid_checksum(&first, &table, io.summer) {
            return Err(gone);
        }
        let mut in_items = 0u64;
        for item in SummaryItems::new(&table, header.at, header.table_at) {
            let candidate = match item? {
                SummaryItem::Pair(_, key, Entry::Data(data)) => LiveCandidate::Payload(key, data),
                SummaryItem::Pair(..) => continue,
                SummaryItem::Node { at, len } => LiveCandidate::Node { at, len },
                SummaryItem::Chunk { at, len } => LiveCandidate::Chunk { at, len },
            };
            in_items = in_items.saturating_add(candidate.len());
            self.candidates.push(candidate);
        }
        self.candidates.reverse();
        self.pos = pos.saturating_add(header.len);
        self.needed = start.saturating_add(self.pos.into());
        Ok(u64::from(header.len).saturating_sub(in_items).saturating_add(64))
    }

    /// Moves the live parts of a candidate.
    fn move_candidate(
        &mut self,
        log: &mut LogWriter,
        levels: &mut Levels,
        reading: &mut MutexGuard<'_, SegmentReader>,
        candidate: &LiveCandidate,
        patience: MissPolicy,
    ) -> Result<MoveResult> {
        let io = log.io.clone();
        match candidate {
            LiveCandidate::Payload(key, stored) => {
                let alive = with_miss_policy(&io, patience, |nodes| {
                    levels.index().live_payload_parts(nodes, key, stored)
                })?;
                let parts = match alive {
                    ControlFlow::Continue(parts) => parts,
                    ControlFlow::Break(need) => return Ok(MoveResult::Wants(need)),
                };
                // Together: parts that are requested one by one would evict each other forever.
                if let (Some((_, first)), Some((_, last))) = (parts.first(), parts.last()) {
                    let (from, to) =
                        (self.segment_offset(first.at)?, self.segment_offset(last.end())?);
                    if !self.request_bytes(&io, reading, from, to.saturating_sub(from) as usize) {
                        return Ok(MoveResult::Asked);
                    }
                }
                for (key, part) in parts {
                    let bytes =
                        reading.get(&io, self.segment_offset(part.at)?, part.stored as usize)?;
                    io.verify_payload(&part, bytes)?;
                    let alive = part.referenced_bytes(bytes);
                    let kind = PayloadKind::Moved { age: log.clock.saturating_sub(self.stamp) };
                    let moved = &mut log.counters.moved_bytes;
                    *moved = moved.saturating_add(part.len.into());
                    levels.put_payload(log, key, alive, (kind, Some(self.stamp)))?;
                }
            }
            LiveCandidate::Node { at, len } => {
                if !self.request_bytes(&io, reading, self.segment_offset(*at)?, *len as usize) {
                    return Ok(MoveResult::Asked);
                }
                let bytes = reading.get(&io, self.segment_offset(*at)?, *len as usize)?;
                let node = Node::decode(bytes, *at)?;
                let (key, level) = (Key::from_slice(node.first_key()), node.level());
                let found = with_miss_policy(&io, patience, |nodes| {
                    levels.tree.has_node(nodes, &key, level, *at)
                })?;
                match found {
                    ControlFlow::Break(need) => return Ok(MoveResult::Wants(need)),
                    ControlFlow::Continue(false) => {}
                    ControlFlow::Continue(true) => {
                        levels.tree.move_node(log, &key, *at)?;
                        levels.publish_view();
                    }
                }
            }
            LiveCandidate::Chunk { at, len } => {
                let Some(old) = levels.chunks_mut().find(|ptr| ptr.at == *at).copied() else {
                    return Ok(MoveResult::Done);
                };
                if !self.request_bytes(&io, reading, self.segment_offset(*at)?, *len as usize) {
                    return Ok(MoveResult::Asked);
                }
                let bytes = reading.get(&io, self.segment_offset(*at)?, *len as usize)?;
                if io.summer.checksum(*at, bytes) != old.sum
                    && !is_fault_injected(InjectedFault::NodeSum)
                {
                    return Err(Error::Corrupt { what: "a node's sum", at_bytes: *at });
                }
                let new: BlockPtr = log.append_block(bytes, false)?;
                log.mark_blocks_dead([old]);
                levels.chunks_mut().filter(|ptr| **ptr == old).for_each(|ptr| *ptr = new);
            }
        }
        Ok(MoveResult::Done)
    }
}
