//! Reader of a segment from start to end, with read-ahead.
//!
//! ```text
//!   | passed over | held | asked · asked · asked |    not yet    |
//! ```
//!
//! Law: requested bytes follow the held ones without a gap.
use std::collections::VecDeque;

use draconis_device::{Extent, Pending, ReadAnswer, Refused, Urgency};
use draconis_types::PrivateBuffer;

use crate::cached_disk::CachedDisk;
use crate::codec::{slice_at, to_u32_saturating};
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
        let window = to_u32_saturating(window as u64);
        let ahead = VecDeque::new();
        let mut reading = Self { start, used, end, window, depth, held: None, ahead, apart: None };
        reading.submit_read(io, 0);
        reading
    }

    /// Returns true if requested bytes before address `to` are not there yet.
    pub fn is_pending_before(&self, to: u64) -> bool {
        let asked =
            self.ahead.iter().take_while(|ahead| to > self.start.saturating_add(ahead.at.into()));
        asked.chain(&self.apart).any(|ahead| !ahead.read.is_ready())
    }

    /// Waits for the requested bytes before address `to`.
    pub fn wait_before(&mut self, to: u64) {
        let start = self.start;
        let asked =
            self.ahead.iter_mut().take_while(|ahead| to > start.saturating_add(ahead.at.into()));
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
        let (first, whole) = pages_of(io, from, len);
        let at_bytes = self.start.saturating_add(first.into());
        if let Some(asked) = self.apart.take() {
            let bytes = match asked.read.wait() {
                Some(Ok(block)) => block.into_private(),
                // Once more, for an error with its context.
                _ => io.read_pages_uncached(at_bytes, whole as usize)?,
            };
            return Ok(slice_at(&bytes, first.into(), from.into(), len).map(<[u8]>::to_vec));
        }
        if self.has_bytes(from, len) {
            return self.get(io, from, len).map(|bytes| Some(bytes.to_vec()));
        }
        let extent = Extent::new(at_bytes, u64::from(whole));
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
        if end_of(from, len) > self.used {
            // `get` returns the error.
            return true;
        }
        let to = end_of(from, len);
        if self.first_offset().is_none_or(|begin| begin > from) || from >= self.requested_end() {
            self.held = None;
            self.ahead.clear();
            self.submit_read(io, pages_of(io, from, len).0);
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
        if end_of(from, len) > self.used {
            return Err(gone);
        }
        while !self.has_bytes(from, len) {
            self.take_next_read(io, from, len)?;
        }
        while self.ahead.len() < self.depth && self.requested_end() < self.end {
            self.submit_read(io, self.requested_end());
        }
        let (at, bytes) = self.held.as_ref().ok_or(gone.clone())?;
        slice_at(bytes, u64::from(*at), from.into(), len).ok_or(gone)
    }

    /// Returns true if these bytes are held.
    pub fn has_bytes(&self, from: u32, len: usize) -> bool {
        self.held
            .as_ref()
            .is_some_and(|(at, bytes)| *at <= from && end_of(from, len) <= end_of(*at, bytes.len()))
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
            (Some(last), _) => last.at.saturating_add(last.len),
            (None, Some((at, bytes))) => end_of(*at, bytes.len()),
            (None, None) => 0,
        }
    }

    fn submit_read(&mut self, io: &CachedDisk, at: u32) {
        let len = self.window.min(self.end.saturating_sub(at));
        let extent = Extent::new(self.start.saturating_add(at.into()), u64::from(len));
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
            if from >= ahead.at.saturating_add(ahead.len) {
                // Skipped.
                self.held = None;
                return Ok(());
            }
            if let Some(Ok(block)) = ahead.read.wait() {
                let new = block.into_private();
                let held = self.held.take();
                let kept = held
                    .as_ref()
                    .and_then(|(at, old)| old.get(from.saturating_sub(*at) as usize..));
                self.held = Some(match kept.filter(|kept| !kept.is_empty()) {
                    None => (ahead.at, new),
                    Some(kept) => (from, concat_buffers(kept, &new)),
                });
                return Ok(());
            }
            // A failed read is repeated, for an error with its context.
        }
        self.ahead.clear();
        let (first, whole) = pages_of(io, from, len);
        let len = whole.max(self.window).min(self.end.saturating_sub(first));
        let at_bytes = self.start.saturating_add(first.into());
        self.held = Some((first, io.read_pages_uncached(at_bytes, len as usize)?));
        Ok(())
    }
}

/// Returns the offset after `len` bytes from offset `from`; the largest one if that is no offset.
fn end_of(from: u32, len: usize) -> u32 {
    from.saturating_add(to_u32_saturating(len as u64))
}

/// Returns the offset and length of the whole pages that hold `len` bytes from offset `from`.
fn pages_of(io: &CachedDisk, from: u32, len: usize) -> (u32, u32) {
    let page = io.geometry.page_bytes;
    let skip = from.checked_rem(page).unwrap_or(0);
    let whole = end_of(skip, len).checked_next_multiple_of(page).unwrap_or(u32::MAX);
    (from.saturating_sub(skip), whole)
}

fn concat_buffers(head: &[u8], tail: &[u8]) -> PrivateBuffer {
    let mut both = PrivateBuffer::new_uninitialized(head.len().saturating_add(tail.len()));
    let (front, back) = both.split_at_mut(head.len());
    front.copy_from_slice(head);
    back.copy_from_slice(tail);
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
