//! Frames of a store, found by a scan of the whole disk without the index.
//!
//! ```text
//!   | frame | frame | not a frame: the next page, and so on | frame |        of each segment
//! ```
//!
//! A frame names its address, store, incarnation and commit, and its summary the key and the order
//! of each pair. So pairs have an order without an index. Nodes and chunks have none: a summary has
//! only their addresses.
//!
//! Law 1: header and summary are verified. Payloads are verified when they are read.
//! Law 2: a scan reads as many bytes as the disk has, or twice as many if headers are forged. It
//! keeps at most [`CACHED_SUMMARY_BYTES`] of summaries and [`MAX_COUNTED_COMMITS`] counts.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use draconis_types::PrivateBuffer;

use crate::bit_repair::RepairedDisk;
use crate::cached_disk::CachedDisk;
use crate::codec::to_usize_saturating;
use crate::frame::summary::{SummaryItem, SummaryItems};
use crate::frame::{FrameHeader, HEADER_BYTES};

/// Bytes of one read. It has the header of a frame, and the summary if the frame is short.
const WINDOW_BYTES: usize = 256 << 10;
/// Summaries that are kept for the next pass, in bytes.
const CACHED_SUMMARY_BYTES: usize = 64 << 20;
/// Commits whose pairs are counted. With more of them nothing is called complete.
const MAX_COUNTED_COMMITS: usize = 1 << 20;

/// Order of writing of a pair.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Version {
    pub incarnation: u64,
    /// Number of the commit.
    pub seq: u64,
    /// Number in the commit.
    pub order: u64,
}

/// A frame, and the bytes of its summary.
pub(crate) struct ScannedFrame {
    pub header: FrameHeader,
    table: Vec<u8>,
    /// False if the checksum is wrong: its pairs hide older ones, and are not there themselves.
    pub is_valid: bool,
}

impl ScannedFrame {
    /// Returns the items up to the first that cannot be decoded.
    pub fn items(&self) -> impl Iterator<Item = SummaryItem> {
        SummaryItems::new(&self.table, self.header.at, self.header.table_at).map_while(Result::ok)
    }

    /// Returns true if all items can be decoded.
    fn is_decodable(&self) -> bool {
        SummaryItems::new(&self.table, self.header.at, self.header.table_at).all(|it| it.is_ok())
    }

    pub fn version(&self, order: u64) -> Version {
        Version { incarnation: self.header.incarnation, seq: self.header.seq, order }
    }
}

/// What is known about a commit.
#[derive(Clone, Copy, Default)]
struct CommitFrames {
    pairs: u64,
    max_order: u64,
    /// Frames, and those of them that are damaged.
    frames: u64,
    damaged_frames: u64,
    /// Number of frames, if the last one was found.
    all_frames: Option<u64>,
}

impl CommitFrames {
    fn has_all_frames(&self) -> bool {
        self.all_frames.is_some_and(|all| self.frames >= all)
    }
}

/// All frames of a disk.
pub(crate) struct FrameScan<'d> {
    io: &'d CachedDisk,
    repairs: Option<&'d RepairedDisk>,
    tag: u32,
    /// Frames of the first pass, if they fit.
    cached: Option<Vec<ScannedFrame>>,
    /// First commit found of each incarnation.
    first_commits: BTreeMap<u64, u64>,
    /// All commits up to this one were durable.
    pub durable: u64,
    commits: HashMap<(u64, u64), CommitFrames>,
    /// Pages that could not be read.
    pub unreadable_pages: u64,
}

impl<'d> FrameScan<'d> {
    /// Scans the disk for frames of the store with this tag.
    pub fn new(
        io: &'d CachedDisk,
        repairs: Option<&'d RepairedDisk>,
        tag: u32,
        progress: &mut dyn FnMut(u64),
    ) -> Self {
        let mut scan = Self {
            io,
            repairs,
            tag,
            cached: None,
            first_commits: BTreeMap::new(),
            durable: 0,
            commits: HashMap::new(),
            unreadable_pages: 0,
        };
        let (mut kept, mut kept_bytes) = (vec![], 0usize);
        let mut scanner = Scanner::new(io, repairs, tag);
        scanner.scan(progress, &mut |frame| {
            scan.count_frame(&frame);
            kept_bytes = kept_bytes.saturating_add(frame.table.len()).saturating_add(128);
            if kept_bytes <= CACHED_SUMMARY_BYTES {
                kept.push(frame);
            }
        });
        scan.unreadable_pages = scanner.unreadable_pages;
        scan.cached = (kept_bytes <= CACHED_SUMMARY_BYTES).then_some(kept);
        scan
    }

    fn count_frame(&mut self, frame: &ScannedFrame) {
        let header = &frame.header;
        if !frame.is_valid && !frame.is_decodable() {
            return;
        }
        if frame.is_valid {
            self.durable = self.durable.max(header.durable);
            let first = self.first_commits.entry(header.incarnation).or_insert(header.seq);
            *first = header.seq.min(*first);
        }
        if self.commits.len() >= MAX_COUNTED_COMMITS {
            return;
        }
        let commit = self.commits.entry((header.incarnation, header.seq)).or_default();
        commit.frames = commit.frames.saturating_add(1);
        commit.damaged_frames = commit.damaged_frames.saturating_add(u64::from(!frame.is_valid));
        if header.is_last {
            commit.all_frames = Some(u64::from(header.frame_index).saturating_add(1));
        }
        for item in frame.items().filter(|_| frame.is_valid) {
            if let SummaryItem::Pair(order, ..) = item {
                commit.pairs = commit.pairs.saturating_add(1);
                commit.max_order = commit.max_order.max(order);
            }
        }
    }

    /// Passes each frame to `see`, in no order.
    pub fn for_each(&self, see: &mut dyn FnMut(&ScannedFrame)) {
        match &self.cached {
            Some(frames) => frames.iter().for_each(see),
            None => Scanner::new(self.io, self.repairs, self.tag)
                .scan(&mut |_| (), &mut |frame| see(&frame)),
        }
    }

    /// Returns true if a later incarnation began before this commit: a crash had cut it off.
    pub fn is_cut_off(&self, version: Version) -> bool {
        let after = (std::ops::Bound::Excluded(version.incarnation), std::ops::Bound::Unbounded);
        self.first_commits.range(after).any(|(_, &first)| first <= version.seq)
    }

    /// Returns true if a commit was durable, or is whole. Without an index, commits before the
    /// newest one count, too: of old commits, frames of the index may be gone.
    pub fn is_certain(&self, commit: Version, has_no_index: bool) -> bool {
        let newest = self.commits.keys().max().copied().unwrap_or_default();
        commit.seq <= self.durable
            || self.is_whole(commit.incarnation, commit.seq)
            || has_no_index && (commit.incarnation, commit.seq) < newest
    }

    /// Returns true if all frames of a commit were found.
    fn is_whole(&self, incarnation: u64, seq: u64) -> bool {
        let commit = self.commits.get(&(incarnation, seq));
        commit.is_some_and(|commit| commit.damaged_frames == 0 && commit.has_all_frames())
    }

    /// Returns the newest commit up to `last` of which frames are not on the disk any more: older
    /// pairs may have been replaced or removed by it. Damaged frames count if their items can be
    /// decoded: they hide older pairs.
    pub fn newest_incomplete_commit(&self, last: u64) -> u64 {
        let mut present: BTreeSet<u64> = BTreeSet::new();
        for (&(incarnation, seq), commit) in &self.commits {
            let is_cut_off = self.is_cut_off(Version { incarnation, seq, order: 0 });
            if commit.has_all_frames() && !is_cut_off && seq <= last {
                present.insert(seq);
            }
        }
        let last = if last == u64::MAX { present.last().copied().unwrap_or(0) } else { last };
        let mut missing = (1..=last).rev();
        missing.find(|seq| !present.contains(seq)).unwrap_or(0)
    }

    /// Returns true if no pair of the commits up to `last` is missing between others. Pairs at the
    /// end of a commit may be.
    pub fn has_all_pairs(&self, last: u64) -> bool {
        let mut found = 0u64;
        for (&(incarnation, seq), commit) in &self.commits {
            let version = Version { incarnation, seq, order: 0 };
            if seq <= last && !self.is_cut_off(version) {
                found = found.saturating_add(1);
                if commit.pairs != commit.max_order {
                    return false;
                }
            }
        }
        found == last
    }
}

/// Bytes of a segment.
struct Window {
    at: u64,
    bytes: PrivateBuffer,
}

/// Reader of the frames of a disk.
struct Scanner<'d> {
    io: &'d CachedDisk,
    repairs: Option<&'d RepairedDisk>,
    tag: u32,
    window: Option<Window>,
    /// Bytes read for summaries with a wrong checksum.
    wasted_bytes: u64,
    unreadable_pages: u64,
}

/// A range of the disk that cannot be read.
struct Unreadable;

impl<'d> Scanner<'d> {
    fn new(io: &'d CachedDisk, repairs: Option<&'d RepairedDisk>, tag: u32) -> Self {
        Self { io, repairs, tag, window: None, wasted_bytes: 0, unreadable_pages: 0 }
    }

    /// Passes all frames to `see`, and the bytes of each scanned segment to `progress`.
    fn scan(&mut self, progress: &mut dyn FnMut(u64), see: &mut dyn FnMut(ScannedFrame)) {
        let geometry = self.io.geometry;
        let page = u64::from(geometry.page_bytes);
        for segment in 0..geometry.segments {
            let (mut at, end) =
                (geometry.start_of(segment), geometry.start_of(segment.saturating_add(1)));
            self.window = None;
            while at < end {
                let mut step = page;
                match self.read_frame(at, end) {
                    Ok(Some(frame)) => {
                        if frame.is_valid {
                            step = page.max(frame.header.len.into());
                        }
                        see(frame);
                    }
                    Ok(None) => {}
                    Err(Unreadable) => {
                        self.unreadable_pages = self.unreadable_pages.saturating_add(1);
                    }
                }
                at = at.saturating_add(step);
            }
            progress(u64::from(geometry.segment_bytes));
        }
    }

    /// Returns the frame at an address of a segment that ends at `end`, if there is one.
    fn read_frame(&mut self, at: u64, end: u64) -> Result<Option<ScannedFrame>, Unreadable> {
        let room = end.saturating_sub(at);
        let (tag, page) = (self.tag, self.io.geometry.page_bytes);
        let bytes = self.read_bytes(at, HEADER_BYTES, end)?;
        let header = FrameHeader::decode_header(bytes, at, tag, room);
        let Some(header) = header.filter(|header| header.len.is_multiple_of(page)) else {
            return Ok(None);
        };
        let mut first = bytes.get(..HEADER_BYTES).unwrap_or_default().to_vec();
        let len = header.table_len as usize;
        let table_at = at.saturating_add(u64::from(header.table_at));
        // Forged headers must not make the scan read the disk again and again.
        let is_held = self.is_held(table_at, table_at.saturating_add(len as u64));
        if self.wasted_bytes > self.io.geometry.disk_bytes && !is_held {
            return Ok(None);
        }
        let table = self.read_bytes(table_at, len, end)?;
        let mut table = table.get(..len).unwrap_or_default().to_vec();
        let summer = self.io.summer;
        if header.has_valid_checksum(&first, &table, summer) {
            return Ok(Some(ScannedFrame { header, table, is_valid: true }));
        }
        let read = if is_held { 0 } else { len.saturating_add(2 * WINDOW_BYTES) };
        self.wasted_bytes = self.wasted_bytes.saturating_add(read as u64);
        let mut parts = [(at, first.as_mut_slice()), (table_at, table.as_mut_slice())];
        let is_repaired = self.repairs.is_some_and(|repairs| {
            repairs.repair_with(&mut parts, &|parts| match parts {
                [(_, first), (_, table)] => header.has_valid_checksum(first, table, summer),
                _ => false,
            })
        });
        if is_repaired {
            self.window = None;
            // A header of other lengths has another summary.
            let repaired = FrameHeader::decode_header(&first, at, tag, room);
            let is_same = |it: &FrameHeader| {
                (it.table_at, it.table_len) == (header.table_at, header.table_len)
            };
            if let Some(header) = repaired.filter(is_same) {
                return Ok(Some(ScannedFrame { header, table, is_valid: true }));
            }
        }
        Ok(Some(ScannedFrame { header, table, is_valid: false }))
    }

    fn is_held(&self, at: u64, to: u64) -> bool {
        self.window.as_ref().is_some_and(|window| {
            window.at <= at && to <= window.at.saturating_add(window.bytes.len() as u64)
        })
    }

    /// Returns the bytes from `at` on, at least `len` of them if the segment has them.
    fn read_bytes(&mut self, at: u64, len: usize, end: u64) -> Result<&[u8], Unreadable> {
        let page = u64::from(self.io.geometry.page_bytes);
        let to = at.saturating_add(len as u64).min(end);
        if !self.is_held(at, to) {
            let from = at.saturating_sub(at.checked_rem(page).unwrap_or(0));
            let least = to.saturating_sub(from).next_multiple_of(page);
            let most = least.max(WINDOW_BYTES as u64).min(end.saturating_sub(from));
            let read = |len| self.io.read_pages_in_parts(from, to_usize_saturating(len));
            // The error may be of bytes that are not needed.
            let bytes = read(most).or_else(|_| read(least)).map_err(|_| Unreadable)?;
            self.window = Some(Window { at: from, bytes });
        }
        let window = self.window.as_ref().ok_or(Unreadable)?;
        let skip = to_usize_saturating(at.saturating_sub(window.at));
        window.bytes.get(skip..).ok_or(Unreadable)
    }
}
