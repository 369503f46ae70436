//! Reader of a segment from start to end, with read-ahead.
//!
//! ```text
//!   | passed over | held | asked · asked · asked |    not yet    |
//! ```
//!
//! Law: requested bytes follow the held ones without a gap.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::indexing_slicing,
    reason = "`is_valid_for_key` bounds decoded entries, so their ends do not overflow"
)]

use std::collections::VecDeque;

use draconis_device::{Extent, Pending, ReadAnswer, Refused, Urgency};
use draconis_types::PrivateBuffer;

use crate::cached_disk::CachedDisk;
use crate::{Error, Result};

/// Reader of a segment.
pub(crate) struct SegmentReader {
    /// Address of the segment.
    start: u64,
    /// Written bytes, and the same rounded up to whole pages.
    used: u32,
    end: u32,
    /// Bytes of one request.
    window: u32,
    /// Requests ahead of the held bytes.
    depth: usize,
    held: Option<(u32, PrivateBuffer)>,
    ahead: VecDeque<PendingRead>,
    /// A separate read outside of the window.
    apart: Option<PendingRead>,
}

/// A read in flight.
struct PendingRead {
    at: u32,
    len: u32,
    read: Pending<ReadAnswer>,
}

impl SegmentReader {
    /// Begins to read the segment at address `start`, of which `used` bytes were written. The first
    /// request is submitted at once.
    pub fn new(io: &CachedDisk, start: u64, used: u32, window: usize, depth: usize) -> Self {
        let end = used.next_multiple_of(io.geometry.page_bytes);
        let window = window as u32;
        let ahead = VecDeque::new();
        let mut reading = Self { start, used, end, window, depth, held: None, ahead, apart: None };
        reading.submit_read(io, 0);
        reading
    }

    /// Returns true if requested bytes before address `to` are not there yet.
    pub fn is_pending_before(&self, to: u64) -> bool {
        let asked = self.ahead.iter().take_while(|ahead| to > self.start + u64::from(ahead.at));
        asked.chain(&self.apart).any(|ahead| !ahead.read.is_ready())
    }

    /// Waits for the requested bytes before address `to`.
    pub fn wait_before(&mut self, to: u64) {
        let start = self.start;
        let asked = self.ahead.iter_mut().take_while(|ahead| to > start + u64::from(ahead.at));
        for ahead in asked.chain(&mut self.apart) {
            let gone =
                || Err(Refused { payload: None, error: draconis_device::Error::ServiceEnded });
            let read = std::mem::replace(&mut ahead.read, Pending::ready(gone()));
            ahead.read = Pending::ready(read.wait().unwrap_or_else(gone));
        }
    }

    /// Returns `len` bytes from offset `from`, with a separate read if they are not held: the first
    /// call requests them and returns none.
    pub fn read_separately(
        &mut self,
        io: &CachedDisk,
        from: u32,
        len: usize,
    ) -> Result<Option<Vec<u8>>> {
        let page = io.geometry.page_bytes;
        let first = from - from % page;
        let whole = ((from - first) + len as u32).next_multiple_of(page);
        if let Some(asked) = self.apart.take() {
            let bytes = match asked.read.wait() {
                Some(Ok(block)) => block.into_private(),
                // Once more, for an error with its context.
                _ => io.read_pages_uncached(self.start + u64::from(first), whole as usize)?,
            };
            let skip = (from - first) as usize;
            return Ok(bytes.get(skip..skip + len).map(<[u8]>::to_vec));
        }
        if self.has_bytes(from, len) {
            return self.get(io, from, len).map(|bytes| Some(bytes.to_vec()));
        }
        let extent = Extent::new(self.start + u64::from(first), u64::from(whole));
        let read = io.disk.read(
            extent,
            PrivateBuffer::new_uninitialized(whole as usize).into(),
            Urgency::Ahead,
        );
        self.apart = Some(PendingRead { at: first, len: whole, read });
        Ok(None)
    }

    /// Requests `len` bytes from offset `from`; returns true if they were requested before.
    pub fn request(&mut self, io: &CachedDisk, from: u32, len: usize) -> bool {
        if from as usize + len > self.used as usize {
            // `get` returns the error.
            return true;
        }
        let to = from + len as u32;
        if self.first_offset().is_none_or(|begin| begin > from) || from >= self.requested_end() {
            self.held = None;
            self.ahead.clear();
            self.submit_read(io, from - from % io.geometry.page_bytes);
        } else if to <= self.requested_end() {
            return true;
        }
        while self.requested_end() < to {
            self.submit_read(io, self.requested_end());
        }
        false
    }

    /// Returns `len` bytes from offset `from`.
    pub fn get(&mut self, io: &CachedDisk, from: u32, len: usize) -> Result<&[u8]> {
        let gone = Error::Corrupt { what: "an item outside of its segment", at_bytes: self.start };
        if from as usize + len > self.used as usize {
            return Err(gone);
        }
        while !self.has_bytes(from, len) {
            self.take_next_read(io, from, len)?;
        }
        while self.ahead.len() < self.depth && self.requested_end() < self.end {
            self.submit_read(io, self.requested_end());
        }
        let (at, bytes) = self.held.as_ref().ok_or(gone.clone())?;
        let from = (from - at) as usize;
        bytes.get(from..from + len).ok_or(gone)
    }

    /// Returns true if these bytes are held.
    pub fn has_bytes(&self, from: u32, len: usize) -> bool {
        self.held.as_ref().is_some_and(|(at, bytes)| {
            *at <= from && from as usize + len <= *at as usize + bytes.len()
        })
    }

    /// Returns the first held or requested offset.
    fn first_offset(&self) -> Option<u32> {
        match (&self.held, self.ahead.front()) {
            (Some((at, _)), _) => Some(*at),
            (None, Some(ahead)) => Some(ahead.at),
            (None, None) => None,
        }
    }

    /// Returns the offset after the last requested byte.
    fn requested_end(&self) -> u32 {
        match (self.ahead.back(), &self.held) {
            (Some(last), _) => last.at + last.len,
            (None, Some((at, bytes))) => at + bytes.len() as u32,
            (None, None) => 0,
        }
    }

    fn submit_read(&mut self, io: &CachedDisk, at: u32) {
        let len = self.window.min(self.end - at);
        let extent = Extent::new(self.start + u64::from(at), u64::from(len));
        let into = PrivateBuffer::new_uninitialized(len as usize).into();
        self.ahead.push_back(PendingRead {
            at,
            len,
            read: io.disk.read(extent, into, Urgency::Ahead),
        });
    }

    /// Holds the next requested bytes, with the held ones that are still needed. Without a request,
    /// reads the bytes.
    fn take_next_read(&mut self, io: &CachedDisk, from: u32, len: usize) -> Result<()> {
        if self.first_offset().is_some_and(|begin| begin <= from)
            && let Some(ahead) = self.ahead.pop_front()
        {
            if from >= ahead.at + ahead.len {
                // Skipped.
                self.held = None;
                return Ok(());
            }
            if let Some(Ok(block)) = ahead.read.wait() {
                let new = block.into_private();
                let held = self.held.take();
                let kept = held.as_ref().and_then(|(at, old)| old.get((from - at) as usize..));
                self.held = Some(match kept.filter(|kept| !kept.is_empty()) {
                    None => (ahead.at, new),
                    Some(kept) => (from, concat_buffers(kept, &new)),
                });
                return Ok(());
            }
            // A failed read is repeated, for an error with its context.
        }
        self.ahead.clear();
        let page = io.geometry.page_bytes;
        let first = from - from % page;
        let whole = ((from - first) + len as u32).next_multiple_of(page);
        let len = whole.max(self.window).min(self.end - first);
        self.held =
            Some((first, io.read_pages_uncached(self.start + u64::from(first), len as usize)?));
        Ok(())
    }
}

fn concat_buffers(head: &[u8], tail: &[u8]) -> PrivateBuffer {
    let mut both = PrivateBuffer::new_uninitialized(head.len() + tail.len());
    both[..head.len()].copy_from_slice(head);
    both[head.len()..].copy_from_slice(tail);
    both
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use draconis_device::{Disk, Group, MemoryDisk, Write};

    use super::*;
    use crate::codec::{Checksummer, mix_bits};
    use crate::superblock::Geometry;
    use crate::{LayoutKind, Profile};

    const SEGMENT_BYTES: usize = 256 << 10;

    /// Random offsets and read-ahead return the bytes of the disk.
    #[test]
    fn reads_match_disk() {
        let disk = Arc::new(MemoryDisk::new(vec![0; 8 << 20], 512));
        let profile = Profile {
            layout: LayoutKind::Cow,
            page_bytes: 4096,
            segment_bytes: SEGMENT_BYTES as u32,
            queue_depth: 1,
        };
        let geometry = Geometry::for_disk(&profile, 8 << 20).unwrap();
        let start = geometry.start_of(2);
        let bytes: Vec<u8> = (0..SEGMENT_BYTES as u64).map(|at| mix_bits(at) as u8).collect();
        let mut block = PrivateBuffer::new_uninitialized(SEGMENT_BYTES);
        block.copy_from_slice(&bytes);
        let group = Group { writes: vec![Write { at_bytes: start, block: block.into() }] };
        let ticket = disk.submit(group, &[]).unwrap();
        disk.wait_durable(ticket).unwrap();
        let io = CachedDisk::new(disk, geometry, Checksummer(1), 1 << 20);
        let mut dice = 1u64;
        let mut below = |limit: usize| {
            dice = mix_bits(dice);
            dice as usize % limit
        };
        for round in 0..60 {
            let used = SEGMENT_BYTES - below(9000);
            let mut reading = SegmentReader::new(&io, start, used as u32, 16 << 10, round % 5);
            let mut at = 0;
            for _ in 0..40 {
                // Mostly forwards, as the cleaner does; sometimes anywhere.
                at = if below(8) == 0 { below(used) } else { (at + below(20_000)).min(used - 1) };
                let len = (1 + below(40_000)).min(used - at);
                if below(2) == 0 {
                    reading.request(&io, at as u32, len);
                }
                assert!(reading.get(&io, at as u32, len).unwrap() == &bytes[at..at + len]);
                assert!(reading.has_bytes(at as u32, len) && reading.request(&io, at as u32, len));
            }
            assert!(reading.get(&io, used as u32 - 1, 2).is_err());
        }
    }
}
