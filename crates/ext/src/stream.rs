//! Who reads a file from front to back, and how far ahead of them to read.
//!
//! ```text
//!   read by the stream | on its way ........ | not yet
//!                             ▲ mark: the next window starts when this chunk is read
//! ```
//! Windows grow from 256 KiB to the limit. The table is small and of fixed size; streams
//! that share a place forget each other, which costs read-ahead and nothing else.

use std::sync::{Mutex, PoisonError};

use crate::store::CHUNK_BYTES;

const PLACES: usize = 64;

/// The streams of a volume.
#[derive(Debug)]
pub(crate) struct Streams {
    places: Vec<Mutex<Stream>>,
    limit_chunks: u64,
}

#[derive(Debug, Default, Clone, Copy)]
struct Stream {
    inode: u32,
    /// The chunk that would continue the stream.
    next: u64,
    /// One past the last chunk asked for.
    asked: u64,
    window: u64,
}

/// Chunks to read ahead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ahead {
    pub(crate) from: u64,
    pub(crate) end: u64,
    /// The one to mark.
    pub(crate) mark: u64,
}

impl Streams {
    pub(crate) fn new(limit_bytes: u64) -> Self {
        let places = std::iter::repeat_with(Mutex::default).take(PLACES).collect();
        Self { places, limit_chunks: limit_bytes / CHUNK_BYTES }
    }

    /// Somebody reads `chunk` and it was not there, or it was there and marked.
    pub(crate) fn at(&self, inode: u32, chunk: u64, there: bool) -> Option<Ahead> {
        let nth = crate::units::index(u64::from(inode)) % PLACES;
        let mut stream = self.places.get(nth)?.lock().unwrap_or_else(PoisonError::into_inner);
        stream.advance(inode, chunk, there, self.limit_chunks)
    }
}

impl Stream {
    fn advance(&mut self, inode: u32, chunk: u64, there: bool, limit: u64) -> Option<Ahead> {
        let known = self.inode == inode;
        let within = known && chunk >= self.next && chunk <= self.asked;
        if !(within || there || chunk == 0) {
            *self = Self { inode, next: chunk.saturating_add(1), ..Self::default() };
            self.asked = self.next;
            return None;
        }
        if !within {
            *self = Self { inode, asked: chunk.saturating_add(1), ..Self::default() };
        }
        self.next = chunk.saturating_add(1);
        self.window = self.window.saturating_mul(2).clamp(2, 16.max(limit)).min(limit);
        let from = self.asked.max(self.next);
        let end = self.next.saturating_add(self.window);
        self.asked = end.max(from);
        let mark = from.midpoint(end);
        (from < end).then_some(Ahead { from, end, mark })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_grow_along_a_stream_and_never_beyond_the_limit() {
        let streams = Streams::new(8 * CHUNK_BYTES);
        assert_eq!(streams.at(12, 0, false), Some(Ahead { from: 1, end: 3, mark: 2 }));
        assert_eq!(streams.at(12, 2, true), Some(Ahead { from: 3, end: 7, mark: 5 }));
        assert_eq!(streams.at(12, 5, true), Some(Ahead { from: 7, end: 14, mark: 10 }));
        assert_eq!(streams.at(12, 10, true), Some(Ahead { from: 14, end: 19, mark: 16 }));
    }

    #[test]
    fn leaps_are_no_stream() {
        let streams = Streams::new(8 * CHUNK_BYTES);
        for chunk in [900, 17, 4000, 3] {
            assert_eq!(streams.at(12, chunk, false), None);
        }
        assert!(streams.at(12, 4, false).is_some());
    }

    #[test]
    fn nothing_is_read_ahead_if_the_limit_says_so() {
        let streams = Streams::new(0);
        for chunk in 0..10 {
            assert_eq!(streams.at(12, chunk, false), None);
        }
    }
}
