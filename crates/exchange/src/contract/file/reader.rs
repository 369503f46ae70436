//! A client that reads one file, and keeps what it has read.
//!
//! ```text
//!   read ──▶ kept, and the server has told nothing since? ── yes ──▶ copied out of the block
//!                │ no
//!                └── message: a part of a chunk, or all of it ──▶ block, kept ──▶ copied out
//!                                          └ the next chunk is asked for meanwhile, if a reader
//!                                            goes straight on
//! ```
//! So what is read again costs the copy that a call costs, and a look at a word.
//!
//! Law 1: what is kept is used while the server lives and has told nothing since before it was
//! asked for, so it is what a message would bring.
//! Law 2: contents are the server's to say. Lengths are checked; a block that a server still
//! writes to yields other bytes, and nothing else.
//! Law 3: of a chunk there is one block, kept or on its way, and there are no more than were agreed.
//!
//! A reading that is answered by what is kept is no message, so it moves no time of access, as one
//! that a kernel's page cache answers; and a server that gives silent clients up does not hear it.

use std::time::Duration;

use super::{File, Read};
use crate::{
    channel::{ChannelError, Client, Reply, deadline_after},
    contract::{Awaiting, Refusal, Violation},
    heap::Block,
};

/// The most that is asked for in one message: aligned parts of a file of this length.
pub const CHUNK_BYTES: u32 = 128 << 10;
const CHUNK: u64 = CHUNK_BYTES as u64;
/// What is asked for of a chunk that a reader comes to from elsewhere: aligned, too.
const RANDOM_READ_BYTES: u64 = 16 << 10;

/// Why there are no bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReadError {
    /// The server says why.
    #[error("{0}")]
    Refused(Refusal),
    /// The server is lost, now and for every later call.
    #[error("{0}")]
    Lost(#[from] ChannelError),
}

/// See the head of the file.
pub struct CachingReader {
    end: ReaderState,
    /// Gives blocks of a length in bytes, while there are any.
    blocks: Box<dyn Fn(usize) -> Option<Block> + Send>,
    patience: Duration,
    /// A chunk has one place, by its number.
    cache: Box<[Option<CachedChunk>]>,
    /// Whether anything is used twice.
    is_caching: bool,
    /// Where the last reading ended.
    next: u64,
    /// Where the file ends, and what had been told before that was seen.
    end_of_file: Option<(u64, Option<u64>)>,
}

enum ReaderState {
    Idle(Client<File>),
    /// With a message on its way.
    Asked(Client<File, Awaiting<Read>>, ReadRequest),
    Lost(ChannelError),
}

/// What was asked for, and what the server had told before.
#[derive(Clone, Copy)]
struct ReadRequest {
    start: u64,
    len: u32,
    told: Option<u64>,
}

/// An answer: `len` bytes, fewer than were wanted at the end of the file.
struct CachedChunk {
    block: Block,
    asked: ReadRequest,
    len: u32,
}

impl CachedChunk {
    /// Whether it answers for `len` bytes of one chunk from `at` on.
    fn covers(&self, at: u64, len: usize) -> bool {
        let start = self.asked.start;
        let is_there = at + len as u64 <= start + u64::from(self.len);
        at >= start && (is_there || self.is_last() && at / CHUNK == start / CHUNK)
    }

    fn is_last(&self) -> bool {
        self.len < self.asked.len
    }
}

impl CachingReader {
    /// Reads over `end`, with patience for each answer, and keeps that many chunks of
    /// [`CHUNK_BYTES`]; with none, or of a server that does not tell of changes, each reading is
    /// a message of its own for each chunk. Blocks
    /// are `session.block(len)`, or [`Block::unallocated`] between threads.
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

    /// Fills `into` from `offset` of the file; returns how many bytes there were: fewer than asked
    /// at the end of the file only.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<usize, ReadError> {
        // One look is enough: it is as if all was read now.
        let told = self.change_count()?;
        // Files end before.
        let end = offset.saturating_add(into.len() as u64).min(u64::MAX - 2 * CHUNK);
        let mut straight = offset == self.next;
        let (mut at, mut done) = (offset, 0);
        while at < end {
            let want = (CHUNK - at % CHUNK).min(end - at) as usize;
            self.fetch(at, want, told, straight)?;
            straight |= at + (want as u64) < end;
            if straight {
                // On its way while this is copied.
                self.prefetch_next(at, told);
            }
            let Some(kept) = &self.cache[self.slot_of(at)] else { break };
            let skip = (at - kept.asked.start) as usize;
            let there = (kept.len as usize).saturating_sub(skip).min(want);
            // What a server gave back is as long as it says: see `judge`.
            kept.block.copy_out(skip, &mut into[done..done + there]);
            (at, done) = (at + there as u64, done + there);
            if there < want {
                break;
            }
        }
        self.next = at;
        Ok(done)
    }

    /// What the server has told, if that is of use.
    fn change_count(&self) -> Result<Option<u64>, ChannelError> {
        let told = match &self.end {
            ReaderState::Idle(end) => end.told(),
            ReaderState::Asked(end, _) => end.told(),
            ReaderState::Lost(lost) => Err(*lost),
        };
        told.map(|told| told.filter(|_| self.is_caching))
    }

    fn slot_of(&self, at: u64) -> usize {
        (at / CHUNK % self.cache.len() as u64) as usize
    }

    fn is_kept(&self, at: u64, len: usize, told: Option<u64>) -> bool {
        let kept = self.cache[self.slot_of(at)].as_ref();
        told.is_some() && kept.is_some_and(|kept| kept.asked.told == told && kept.covers(at, len))
    }

    /// Sees to it that what answers for `len` bytes of one chunk from `at` on is in its place.
    fn fetch(
        &mut self,
        at: u64,
        len: usize,
        told: Option<u64>,
        is_sequential: bool,
    ) -> Result<(), ReadError> {
        if self.is_kept(at, len, told) {
            return Ok(());
        }
        // What is on its way comes first, and may be it; a refusal of it is none of this.
        if self.receive_read()?.is_ok() && self.is_kept(at, len, told) {
            return Ok(());
        }
        let (start, want) = self.request_range(at, len, told, is_sequential);
        if self.send_read(start, want).is_err() {
            // All the blocks there are may be kept here.
            self.cache.fill_with(|| None);
            self.send_read(start, want)?;
        }
        self.receive_read()?.map_err(ReadError::Refused)
    }

    /// What is asked for to have `len` bytes from `at` on: a whole chunk for a reader that goes
    /// straight on or comes again, and little for one that does not, or where there are changes.
    fn request_range(&self, at: u64, len: usize, told: Option<u64>, straight: bool) -> (u64, u32) {
        if told.is_none() {
            return (at, len as u32);
        }
        let had = self.cache[self.slot_of(at)].as_ref();
        let had = had.filter(|had| had.asked.start / CHUNK == at / CHUNK);
        if had.map_or(straight, |had| had.asked.told == told) {
            return (at - at % CHUNK, CHUNK_BYTES);
        }
        let from = at - at % RANDOM_READ_BYTES;
        // A chunk is whole units.
        let end = (at + len as u64).next_multiple_of(RANDOM_READ_BYTES);
        (from, (end - from) as u32)
    }

    /// Asks for the chunk behind that of `at`, if it is not there and may be.
    fn prefetch_next(&mut self, at: u64, told: Option<u64>) {
        let next = at - at % CHUNK + CHUNK;
        // What is asked for there takes the place of another chunk, which may be wanted again.
        let ends = self.cache[self.slot_of(at)].as_ref().is_none_or(CachedChunk::is_last)
            || self.end_of_file.is_some_and(|(end, seen)| seen == told && next >= end);
        if told.is_some()
            && !ends
            && self.cache.len() > 1
            && matches!(self.end, ReaderState::Idle(_))
            && !self.is_kept(next, 1, told)
        {
            // It is asked for again when it is needed.
            let _ = self.send_read(next, CHUNK_BYTES);
        }
    }

    /// Sends for `want` bytes from `start` on; nothing is on its way.
    fn send_read(&mut self, start: u64, want: u32) -> Result<(), ChannelError> {
        let told = self.change_count()?;
        let place = self.slot_of(start);
        // Its block may be the one that is free.
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

    /// Waits for what is on its way, if something is, and keeps it; or why the server refused it.
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
                let place = self.slot_of(asked.start);
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
