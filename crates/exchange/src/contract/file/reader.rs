//! A client that reads one file and caches its contents.
//!
//! ```text
//!   read ──▶ cached, and the change counter unchanged? ── yes ──▶ copied out of the block
//!                │ no
//!                └── message: part of a chunk, or all of it ──▶ block, cached ──▶ copied out
//!                                          └ sequential reads prefetch the next chunk
//! ```
//! A cached read costs one copy and one load of the change counter.
//!
//! Law 1: cached bytes are used only while the server lives and its change counter is the one from
//! before the request. So they equal what a message would return.
//! Law 2: contents are the server's. Lengths are checked; a block that the server still writes to
//! yields other bytes, and nothing else.
//! Law 3: each chunk has at most one block, cached or requested, within the agreed number of
//! blocks.
//!
//! A read from the cache sends no message. So it does not update the access time, like a hit in the
//! kernel's page cache, and does not count as activity for a server with a client timeout.

use std::time::Duration;

use super::{File, Read};
use crate::{
    channel::{ChannelError, Client, Reply, deadline_after},
    contract::{Awaiting, Violation},
};
use draconis_types::{Block, Refusal};

/// Maximum bytes requested in one message; requests are aligned parts of a chunk of this length.
pub const CHUNK_BYTES: u32 = 128 << 10;
const CHUNK_LEN: u64 = CHUNK_BYTES as u64;
/// Bytes requested for a non-sequential read; aligned as well.
const RANDOM_READ_BYTES: u64 = 16 << 10;

/// Error of a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReadError {
    /// The server refused it.
    #[error("{0}")]
    Refused(Refusal),
    /// The server is lost, now and for every later call.
    #[error("{0}")]
    Lost(#[from] ChannelError),
}

/// See the module documentation.
pub struct CachingReader {
    end: ReaderState,
    /// Allocates blocks of a length in bytes, while some are left.
    blocks: Box<dyn Fn(usize) -> Option<Block> + Send>,
    patience: Duration,
    /// Cached chunks; the chunk number determines the slot.
    cache: Box<[Option<CachedChunk>]>,
    /// True if cached chunks may be used again.
    is_caching: bool,
    /// Offset at which the last read ended.
    next: u64,
    /// End of the file, and the change counter read before it was seen.
    end_of_file: Option<(u64, Option<u64>)>,
}

enum ReaderState {
    Idle(Client<File>),
    /// A request is in flight.
    Asked(Client<File, Awaiting<Read>>, ReadRequest),
    Lost(ChannelError),
}

/// Range of a request, and the change counter before it.
#[derive(Clone, Copy)]
struct ReadRequest {
    start: u64,
    len: u32,
    told: Option<u64>,
}

/// A reply: `len` bytes, fewer than requested at the end of the file.
struct CachedChunk {
    block: Block,
    asked: ReadRequest,
    len: u32,
}

impl CachedChunk {
    /// Returns true if it holds `len` bytes of its chunk from `at`.
    fn contains_range(&self, at: u64, len: usize) -> bool {
        let start = self.asked.start;
        let is_there = at + len as u64 <= start + u64::from(self.len);
        at >= start && (is_there || self.is_last() && at / CHUNK_LEN == start / CHUNK_LEN)
    }

    fn is_last(&self) -> bool {
        self.len < self.asked.len
    }
}

impl CachingReader {
    /// Creates a reader over `end` with a timeout for each reply and a cache of `chunks` chunks of
    /// [`CHUNK_BYTES`]. Without a cache, or if the server does not notify of changes, each read
    /// sends a message per chunk. `blocks` is `session.block(len)`, or [`Block::unallocated`]
    /// between threads.
    pub fn new(
        end: Client<File>,
        patience: Duration,
        chunks: usize,
        blocks: impl Fn(usize) -> Option<Block> + Send + 'static,
    ) -> Self {
        let places = std::iter::repeat_with(|| None).take(chunks.max(1)).collect();
        let (end, blocks) = (ReaderState::Idle(end), Box::new(blocks));
        Self {
            end,
            blocks,
            patience,
            cache: places,
            is_caching: chunks > 0,
            next: 0,
            end_of_file: None,
        }
    }

    /// Fills `into` from `offset` of the file. Returns the number of bytes read, which is less than
    /// requested only at the end of the file.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<usize, ReadError> {
        // The counter is read once: the whole read counts as done at this moment.
        let told = self.change_count()?;
        // No file reaches this offset.
        let end = offset.saturating_add(into.len() as u64).min(u64::MAX - 2 * CHUNK_LEN);
        let mut straight = offset == self.next;
        let (mut at, mut done) = (offset, 0);
        while at < end {
            let want = (CHUNK_LEN - at % CHUNK_LEN).min(end - at) as usize;
            self.fetch(at, want, told, straight)?;
            straight |= at + (want as u64) < end;
            if straight {
                // In flight while this chunk is copied.
                self.prefetch_next(at, told);
            }
            let Some(kept) = &self.cache[self.cache_slot_of(at)] else { break };
            let skip = (at - kept.asked.start) as usize;
            let there = (kept.len as usize).saturating_sub(skip).min(want);
            // The length was checked when the reply arrived: see `store_reply`.
            kept.block.copy_out(skip, &mut into[done..done + there]);
            (at, done) = (at + there as u64, done + there);
            if there < want {
                break;
            }
        }
        self.next = at;
        Ok(done)
    }

    /// Returns the change counter, if caching uses it.
    fn change_count(&self) -> Result<Option<u64>, ChannelError> {
        let told = match &self.end {
            ReaderState::Idle(end) => end.change_count(),
            ReaderState::Asked(end, _) => end.change_count(),
            ReaderState::Lost(lost) => Err(*lost),
        };
        told.map(|told| told.filter(|_| self.is_caching))
    }

    fn cache_slot_of(&self, at: u64) -> usize {
        (at / CHUNK_LEN % self.cache.len() as u64) as usize
    }

    fn is_cached(&self, at: u64, len: usize, told: Option<u64>) -> bool {
        let kept = self.cache[self.cache_slot_of(at)].as_ref();
        told.is_some()
            && kept.is_some_and(|kept| kept.asked.told == told && kept.contains_range(at, len))
    }

    /// Fetches the chunk part with `len` bytes from `at` into its slot, unless it is cached.
    fn fetch(
        &mut self,
        at: u64,
        len: usize,
        told: Option<u64>,
        is_sequential: bool,
    ) -> Result<(), ReadError> {
        if self.is_cached(at, len, told) {
            return Ok(());
        }
        // The request in flight is received first and may be the one needed. Its refusal is not
        // this read's.
        if self.receive_read()?.is_ok() && self.is_cached(at, len, told) {
            return Ok(());
        }
        let (start, want) = self.request_range(at, len, told, is_sequential);
        if self.send_read(start, want).is_err() {
            // The cache may hold all available blocks.
            self.cache.fill_with(|| None);
            self.send_read(start, want)?;
        }
        self.receive_read()?.map_err(ReadError::Refused)
    }

    /// Returns the range to request for `len` bytes from `at`: a whole chunk for sequential or
    /// repeated reads, a small part for other reads or where contents change.
    fn request_range(&self, at: u64, len: usize, told: Option<u64>, straight: bool) -> (u64, u32) {
        if told.is_none() {
            return (at, len as u32);
        }
        let had = self.cache[self.cache_slot_of(at)].as_ref();
        let had = had.filter(|had| had.asked.start / CHUNK_LEN == at / CHUNK_LEN);
        if had.map_or(straight, |had| had.asked.told == told) {
            return (at - at % CHUNK_LEN, CHUNK_BYTES);
        }
        let from = at - at % RANDOM_READ_BYTES;
        // A chunk is a whole number of units.
        let end = (at + len as u64).next_multiple_of(RANDOM_READ_BYTES);
        (from, (end - from) as u32)
    }

    /// Requests the chunk after that of `at`, if it is not cached and may be prefetched.
    fn prefetch_next(&mut self, at: u64, told: Option<u64>) {
        let next = at - at % CHUNK_LEN + CHUNK_LEN;
        // A chunk past the end of the file would only evict another one.
        let ends = self.cache[self.cache_slot_of(at)].as_ref().is_none_or(CachedChunk::is_last)
            || self.end_of_file.is_some_and(|(end, seen)| seen == told && next >= end);
        if told.is_some()
            && !ends
            && self.cache.len() > 1
            && matches!(self.end, ReaderState::Idle(_))
            && !self.is_cached(next, 1, told)
        {
            // A failed prefetch is requested again when it is needed.
            let _ = self.send_read(next, CHUNK_BYTES);
        }
    }

    /// Requests `want` bytes from `start`; no other request is in flight.
    fn send_read(&mut self, start: u64, want: u32) -> Result<(), ChannelError> {
        let told = self.change_count()?;
        let place = self.cache_slot_of(start);
        // This may free the block that the request needs.
        self.cache[place] = None;
        let buffer = (self.blocks)(want as usize).ok_or(ChannelError::HeapFull)?;
        let read = Read { buffer, buffer_offset: 0, offset: start, len: want, no_atime: false };
        self.end = match std::mem::replace(&mut self.end, ReaderState::Lost(ChannelError::Closed)) {
            ReaderState::Idle(end) => {
                ReaderState::Asked(end.send(read), ReadRequest { start, len: want, told })
            }
            other => other,
        };
        Ok(())
    }

    /// Receives the reply in flight, if any, and caches it; returns the refusal of the server.
    fn receive_read(&mut self) -> Result<Result<(), Refusal>, ChannelError> {
        match std::mem::replace(&mut self.end, ReaderState::Lost(ChannelError::Closed)) {
            ReaderState::Asked(end, asked) => {
                let answered = self.store_reply(end.receive(deadline_after(self.patience)), asked);
                if let Err(lost) = answered {
                    self.end = ReaderState::Lost(lost);
                }
                answered
            }
            other => {
                self.end = other;
                Ok(Ok(()))
            }
        }
    }

    fn store_reply(
        &mut self,
        reply: Result<Reply<Read>, ChannelError>,
        asked: ReadRequest,
    ) -> Result<Result<(), Refusal>, ChannelError> {
        match reply? {
            Reply::Ack(ack, end) => {
                if ack.len > asked.len || ack.buffer.len() < ack.len as usize {
                    return Err(Violation::Value("AckRead").into());
                }
                self.end = ReaderState::Idle(end);
                if ack.len < asked.len {
                    self.end_of_file = Some((asked.start + u64::from(ack.len), asked.told));
                }
                let place = self.cache_slot_of(asked.start);
                self.cache[place] = Some(CachedChunk { block: ack.buffer, asked, len: ack.len });
                Ok(Ok(()))
            }
            Reply::Nak(nak, end) => {
                self.end = ReaderState::Idle(end);
                Ok(Err(nak.why))
            }
        }
    }
}
