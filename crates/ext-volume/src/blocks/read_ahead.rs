//! Detection of sequential reads, and their read-ahead windows.
//!
//! ```text
//!   read | in flight ..................... | not yet
//!                             ▲ mark: the next window starts when this one is read
//! ```
//! There are two kinds: a file read sequentially, in chunks; and a region of the device with small
//! reads (a directory's files, an inode table), in pieces. Windows double up to a limit. Both
//! tables have a small fixed size. Files that share a slot evict each other, which costs only
//! read-ahead.

use draconis_types::lock::Mutex;

use crate::blocks::data::CHUNK_BYTES;

const STREAM_SLOTS: usize = 64;
/// Distance by which a read may lag and still belong to its stream.
const MAX_LATE_CHUNKS: u64 = 8;

/// Read-ahead state of all files.
#[derive(Debug)]
pub(crate) struct FileReadAhead {
    slots: Vec<Mutex<ReadAheadState>>,
    limit_chunks: u64,
}

#[derive(Debug, Default, Clone, Copy)]
struct ReadAheadState {
    inode: u32,
    /// Next chunk of the sequential read.
    next: u64,
    /// One past the last requested chunk.
    requested_end: u64,
    window: u64,
}

/// Chunks to read ahead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ReadAheadWindow {
    pub(crate) from: u64,
    pub(crate) end: u64,
    /// Chunk that gets the read-ahead mark.
    pub(crate) mark: u64,
}

impl FileReadAhead {
    pub(crate) fn new(limit_bytes: u64) -> Self {
        let slots = std::iter::repeat_with(Mutex::default).take(STREAM_SLOTS).collect();
        Self { slots, limit_chunks: limit_bytes / CHUNK_BYTES }
    }

    /// Reports a read of `chunk`, which was not cached, or was cached and marked.
    pub(crate) fn on_read(&self, inode: u32, chunk: u64, there: bool) -> Option<ReadAheadWindow> {
        let nth = crate::units::saturating_usize(u64::from(inode)) % STREAM_SLOTS;
        let mut stream = self.slots.get(nth)?.lock();
        stream.advance(inode, chunk, there, self.limit_chunks)
    }
}

impl ReadAheadState {
    fn advance(
        &mut self,
        inode: u32,
        chunk: u64,
        there: bool,
        limit: u64,
    ) -> Option<ReadAheadWindow> {
        let known = self.inode == inode;
        // Several readers share the state, and requests arrive out of order.
        let late = known && chunk < self.next && chunk.saturating_add(MAX_LATE_CHUNKS) >= self.next;
        if late && chunk != 0 {
            return None;
        }
        let within = known && chunk >= self.next && chunk <= self.requested_end;
        if !(within || there || chunk == 0) {
            *self = Self { inode, next: chunk.saturating_add(1), ..Self::default() };
            self.requested_end = self.next;
            return None;
        }
        if !within {
            *self = Self { inode, requested_end: chunk.saturating_add(1), ..Self::default() };
        }
        self.next = chunk.saturating_add(1);
        self.window = self.window.saturating_mul(2).clamp(2, 16.max(limit)).min(limit);
        let from = self.requested_end.max(self.next);
        let end = self.next.saturating_add(self.window);
        self.requested_end = end.max(from);
        let mark = from.midpoint(end);
        (from < end).then_some(ReadAheadWindow { from, end, mark })
    }
}

/// Number of device regions tracked at a time.
const MAX_REGIONS: usize = 16;
/// Gap tolerated within a region: other files, tables and bitmaps are in between.
const REGION_GAP_PIECES: u64 = 4;

/// Largest window: blocks further ahead often belong to another directory.
const MAX_WINDOW_PIECES: u64 = 16;

/// Read-ahead state of device regions with small reads.
#[derive(Debug)]
pub(crate) struct DeviceReadAhead {
    all: Mutex<RegionTable>,
    limit_pieces: u64,
}

#[derive(Debug, Default)]
struct RegionTable {
    regions: [DeviceRegion; MAX_REGIONS],
    oldest: usize,
}

#[derive(Debug, Default, Clone, Copy)]
struct DeviceRegion {
    /// One past the last piece read.
    next: u64,
    /// One past the last requested piece.
    requested_end: u64,
    window: u64,
}

impl DeviceReadAhead {
    pub(crate) fn new(limit_bytes: u64, piece_bytes: u64) -> Self {
        let limit_pieces = limit_bytes.checked_div(piece_bytes).unwrap_or(0);
        Self { all: Mutex::default(), limit_pieces }
    }

    /// Reports a read within `piece`. Returns `None` if it is not near recent reads; otherwise the
    /// pieces to read ahead, possibly none.
    pub(crate) fn on_piece_read(&self, piece: u64) -> Option<ReadAheadWindow> {
        let mut table = self.all.lock();
        let known = table.regions.iter_mut().find(|it| it.is_near(piece));
        if let Some(stretch) = known {
            return Some(stretch.advance(piece, self.limit_pieces));
        }
        let next = piece.saturating_add(1);
        let oldest = table.oldest;
        table.oldest = oldest.wrapping_add(1) % MAX_REGIONS;
        if let Some(place) = table.regions.get_mut(oldest) {
            *place = DeviceRegion { next, requested_end: next, window: 0 };
        }
        None
    }
}

impl DeviceRegion {
    fn is_near(&self, piece: u64) -> bool {
        let end = self.next.max(self.requested_end).saturating_add(REGION_GAP_PIECES);
        self.next > 0 && piece.saturating_add(1) >= self.next && piece < end
    }

    fn advance(&mut self, piece: u64, limit: u64) -> ReadAheadWindow {
        let nothing = ReadAheadWindow { from: 0, end: 0, mark: 0 };
        if piece < self.next {
            return nothing;
        }
        self.next = piece.saturating_add(1);
        // While half a window is left, send no small requests.
        let ahead = self.requested_end.saturating_sub(self.next);
        if ahead > self.window / 2 {
            return nothing;
        }
        self.window = self.window.saturating_mul(2).clamp(1, MAX_WINDOW_PIECES).min(limit);
        let from = self.requested_end.max(self.next);
        let end = self.next.saturating_add(self.window);
        self.requested_end = end.max(from);
        ReadAheadWindow { from, end, mark: from.midpoint(end) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_grows_along_stream_up_to_limit() {
        let streams = FileReadAhead::new(8 * CHUNK_BYTES);
        assert_eq!(
            streams.on_read(12, 0, false),
            Some(ReadAheadWindow { from: 1, end: 3, mark: 2 })
        );
        assert_eq!(
            streams.on_read(12, 2, true),
            Some(ReadAheadWindow { from: 3, end: 7, mark: 5 })
        );
        assert_eq!(
            streams.on_read(12, 5, true),
            Some(ReadAheadWindow { from: 7, end: 14, mark: 10 })
        );
        assert_eq!(
            streams.on_read(12, 10, true),
            Some(ReadAheadWindow { from: 14, end: 19, mark: 16 })
        );
    }

    #[test]
    fn out_of_order_requests_are_one_stream() {
        let streams = FileReadAhead::new(8 * CHUNK_BYTES);
        streams.on_read(12, 0, false);
        assert!(streams.on_read(12, 3, false).is_some());
        assert_eq!(streams.on_read(12, 2, false), None);
        let ahead = streams.on_read(12, 5, false).unwrap();
        assert!(ahead.end - ahead.from >= 4, "{ahead:?}");
    }

    #[test]
    fn random_reads_are_no_stream() {
        let streams = FileReadAhead::new(8 * CHUNK_BYTES);
        for chunk in [900, 17, 4000, 30] {
            assert_eq!(streams.on_read(12, chunk, false), None);
        }
        assert!(streams.on_read(12, 31, false).is_some());
    }

    #[test]
    fn regions_match_nearby_reads() {
        let stretches = DeviceReadAhead::new(8 << 16, 1 << 16);
        assert_eq!(stretches.on_piece_read(100), None);
        assert_eq!(stretches.on_piece_read(5000), None);
        let ahead = stretches.on_piece_read(101).unwrap();
        assert_eq!((ahead.from, ahead.end), (102, 103));
        // A small step back requests nothing new; a far jump is another region.
        let back = stretches.on_piece_read(101).unwrap();
        assert_eq!((back.from, back.end), (0, 0));
        assert_eq!(stretches.on_piece_read(150), None);
        let mut asked = 103;
        for piece in 102..140 {
            let ahead = stretches.on_piece_read(piece).unwrap();
            if ahead.from < ahead.end {
                assert_eq!(ahead.from, asked);
                asked = ahead.end;
            }
            assert!(asked <= piece + 1 + 8);
        }
        assert!(asked > 140);
        assert!(stretches.on_piece_read(5001).is_some());
    }

    #[test]
    fn zero_limit_disables_read_ahead() {
        let streams = FileReadAhead::new(0);
        for chunk in 0..10 {
            assert_eq!(streams.on_read(12, chunk, false), None);
        }
    }
}
