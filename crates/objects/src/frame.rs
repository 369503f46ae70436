//! Frames: self-describing units of writing.
//!
//! ```text
//!   | header | payload | payload | .. | table |      whole pages; the table may lie in the
//!                                                    gap before the first aligned payload
//! ```
//!
//! A commit is one or more frames, in any streams, with one number. Its items are numbered across
//! its frames.
//!
//! Law 1: the header's checksum covers header and summary; the summary has those of the payloads.
//! Law 2: a frame names its address, store and incarnation, so that older bytes there never pass
//! for it.
//! Law 3: `durable` is true when the frame is: all commits up to it were durable before the frame
//! was submitted. Only later commits can have holes after a power cut.

pub(crate) mod summary;

use draconis_types::PrivateBuffer;

use crate::Error;
use crate::codec::{Checksummer, Reader};
use crate::entry::Entry;
use crate::frame::summary::FrameSummary;
use crate::test_hooks::{InjectedFault, is_fault_injected};

const MAGIC: u32 = u32::from_le_bytes(*b"DrFr");
pub(crate) const HEADER_BYTES: usize = 72;
/// Marks the last frame of a commit.
const LAST_FRAME_FLAG: u32 = 1 << 31;

/// Decoded header of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FrameHeader {
    pub incarnation: u64,
    /// First byte on the disk.
    pub at: u64,
    /// Number of the commit.
    pub seq: u64,
    /// All commits up to this one are durable.
    pub durable: u64,
    /// Bytes, whole pages.
    pub len: u32,
    pub table_at: u32,
    pub table_len: u32,
    /// Index among the commit's frames.
    pub frame_index: u32,
    /// True if the commit has no more frames.
    pub is_last: bool,
    /// Segment in which the stream continues.
    pub next_segment: u32,
}

impl FrameHeader {
    pub fn encode(&self, store: u32, table: &[u8], summer: Checksummer) -> [u8; HEADER_BYTES] {
        let mut out = Vec::with_capacity(HEADER_BYTES);
        out.extend_from_slice(&MAGIC.to_le_bytes());
        out.extend_from_slice(&store.to_le_bytes());
        for word in [self.incarnation, self.at, self.seq, self.durable] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        let part = self.frame_index | if self.is_last { LAST_FRAME_FLAG } else { 0 };
        for word in [self.len, self.table_at, self.table_len, part, self.next_segment, 0] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        let sum = summer.checksum(self.at, &out) ^ summer.checksum(self.at.wrapping_add(1), table);
        out.extend_from_slice(&sum.to_le_bytes());
        let mut header = [0; HEADER_BYTES];
        header.copy_from_slice(&out);
        header
    }

    /// Decodes a header without its summary; `None` unless it is one of this store at `at`, of at
    /// most `room` bytes.
    pub fn decode_header(bytes: &[u8], at: u64, store: u32, room: u64) -> Option<Self> {
        let mut reader = Reader::new(bytes.get(..HEADER_BYTES)?, at);
        let mine = reader.u32().ok()? == MAGIC && reader.u32().ok()? == store;
        if !mine {
            return None;
        }
        let mut word = || reader.u64().ok();
        let (incarnation, place, seq, durable) = (word()?, word()?, word()?, word()?);
        let mut half = || reader.u32().ok();
        let (len, table_at, table_len, part) = (half()?, half()?, half()?, half()?);
        let next_segment = half()?;
        let table_end = u64::from(table_at).saturating_add(u64::from(table_len));
        let is_sane = place == at
            && len as usize >= HEADER_BYTES
            && u64::from(len) <= room
            && table_at as usize >= HEADER_BYTES
            && table_end <= u64::from(len);
        is_sane.then_some(Self {
            incarnation,
            at,
            seq,
            durable,
            len,
            table_at,
            table_len,
            frame_index: part & !LAST_FRAME_FLAG,
            is_last: part & LAST_FRAME_FLAG != 0,
            next_segment,
        })
    }

    /// Returns true if header and summary have the right checksum.
    pub fn has_valid_checksum(&self, header: &[u8], table: &[u8], summer: Checksummer) -> bool {
        let Some(bytes) = header.get(..HEADER_BYTES) else { return false };
        let Some((told, sum)) = bytes.split_last_chunk() else { return false };
        let expected =
            summer.checksum(self.at, told) ^ summer.checksum(self.at.wrapping_add(1), table);
        u64::from_le_bytes(*sum) == expected || is_fault_injected(InjectedFault::FrameSum)
    }
}

/// A frame being filled.
#[derive(Debug)]
pub(crate) struct FrameBuilder {
    /// First byte on the disk.
    pub at: u64,
    bytes: PrivateBuffer,
    /// End of the last payload.
    used: usize,
    /// Start and end of the gap before the first aligned payload.
    gap: (usize, usize),
    table: FrameSummary,
}

#[allow(
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::indexing_slicing,
    reason = "`has_space_for` is true of everything that is appended"
)]
impl FrameBuilder {
    /// Creates an empty frame of at most `capacity` bytes.
    pub fn new(at: u64, capacity: usize) -> Self {
        Self {
            at,
            bytes: PrivateBuffer::new_uninitialized(capacity),
            used: HEADER_BYTES,
            gap: (HEADER_BYTES, HEADER_BYTES),
            table: FrameSummary::new(at),
        }
    }

    /// Returns the length of the shortest frame for a payload of `payload` bytes and an item of
    /// `line` bytes in its summary. Payloads of `align` bytes or more begin at a multiple of
    /// `align`.
    pub fn min_frame_len(payload: usize, line: usize, align: usize, page: usize) -> usize {
        match align > 1 && payload >= align {
            true if line <= align - HEADER_BYTES => align + payload,
            true => align + payload + line,
            false => HEADER_BYTES + payload + line,
        }
        .next_multiple_of(page)
    }

    /// Returns true if a payload of `payload` bytes and an item of `line` bytes still fit.
    pub fn has_space_for(&self, payload: usize, line: usize, align: usize) -> bool {
        let table = self.table.bytes.len() + line;
        let begin = if payload >= align { self.used.next_multiple_of(align) } else { self.used };
        let gap = match self.gap.1 - self.gap.0 {
            0 => begin - self.used,
            gap => gap,
        };
        let end = begin + payload + if table <= gap { 0 } else { table };
        end <= self.bytes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.table.bytes.is_empty()
    }

    /// Appends a payload, at a multiple of `align` if it is as long. The caller has checked that
    /// the frame [has space](FrameBuilder::has_space_for) for it.
    pub fn append_payload(&mut self, payload: &[u8], align: usize) -> u64 {
        if payload.len() >= align && !self.used.is_multiple_of(align) {
            let aligned = self.used.next_multiple_of(align);
            if self.gap.0 == self.gap.1 {
                self.gap = (self.used, aligned);
            }
            self.bytes[self.used..aligned].fill(0);
            self.used = aligned;
        }
        let at = self.used;
        self.bytes[at..at + payload.len()].copy_from_slice(payload);
        self.used += payload.len();
        self.at + at as u64
    }

    pub fn add_pair(&mut self, order: u64, key: &[u8], entry: &Entry) {
        self.table.add_pair(order, key, entry);
    }

    /// Adds the item of a node or a chunk.
    pub fn add_block(&mut self, is_node: bool, at: u64, len: u32) {
        self.table.add_block(is_node, at, len);
    }

    /// Returns the bytes at a disk address, if the frame has them.
    pub fn get(&self, at: u64, len: usize) -> Option<&[u8]> {
        let from = usize::try_from(at.checked_sub(self.at)?).ok()?;
        self.bytes.get(from..from.checked_add(len)?).filter(|_| from + len <= self.used)
    }

    /// Finishes the frame: appends the summary and pads to whole pages. [`SealedFrame::write_header`]
    /// adds the header. The stream continues in `next_segment` after this segment.
    pub fn finish(mut self, page: usize, next_segment: u32) -> SealedFrame {
        let table_len = self.table.bytes.len();
        let table_at = if table_len <= self.gap.1 - self.gap.0 { self.gap.0 } else { self.used };
        self.bytes[table_at..table_at + table_len].copy_from_slice(&self.table.bytes);
        let end = self.used.max(table_at + table_len);
        let len = end.next_multiple_of(page);
        self.bytes[end..len].fill(0);
        SealedFrame {
            at: self.at,
            bytes: self.bytes,
            len,
            table_at: table_at as u32,
            table_len: table_len as u32,
            next_segment,
        }
    }
}

/// A finished frame.
#[derive(Debug)]
pub(crate) struct SealedFrame {
    pub at: u64,
    bytes: PrivateBuffer,
    pub len: usize,
    table_at: u32,
    table_len: u32,
    pub next_segment: u32,
}

#[allow(
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::indexing_slicing,
    reason = "built here: header, payloads and table lie in the buffer"
)]
impl SealedFrame {
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Returns the length of its buffer.
    pub fn capacity(&self) -> usize {
        self.bytes.len()
    }

    /// Writes the header, with the frame's address and lengths.
    pub fn write_header(&mut self, mut header: FrameHeader, store: u32, summer: Checksummer) {
        header.at = self.at;
        header.len = self.len as u32;
        header.table_at = self.table_at;
        header.table_len = self.table_len;
        let table = self.table_at as usize..(self.table_at + self.table_len) as usize;
        let encoded = header.encode(store, &self.bytes[table], summer);
        self.bytes[..HEADER_BYTES].copy_from_slice(&encoded);
    }
}

/// Returns the error for a missing durable frame.
pub(crate) fn missing_frame_error(at: u64) -> Error {
    Error::Corrupt { what: "the log: a frame that was durable is gone", at_bytes: at }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ObjectId;
    use crate::entry::{extent_key, value_key};
    use crate::frame::summary::SummaryItems;

    fn header(seq: u64) -> FrameHeader {
        FrameHeader {
            incarnation: 3,
            at: 0,
            seq,
            durable: seq - 1,
            len: 0,
            table_at: 0,
            table_len: 0,
            frame_index: 0,
            is_last: true,
            next_segment: 9,
        }
    }

    #[test]
    fn frame_round_trips_and_detects_bit_flips() {
        let summer = Checksummer(5);
        let mut frame = FrameBuilder::new(1 << 20, 64 << 10);
        let small = frame.append_payload(b"small", 4096);
        frame.add_pair(0, &value_key(b"k"), &Entry::Tombstone);
        let large = frame.append_payload(&[7; 8192], 4096);
        assert!(large.is_multiple_of(4096) && small < large);
        frame.add_pair(1, &extent_key(ObjectId(1), 0), &Entry::Hole(9));
        frame.add_block(true, large, 8192);
        assert_eq!(frame.get(small, 5), Some(&b"small"[..]));
        let mut done = frame.finish(4096, 9);
        // The summary lies in the gap: one page for all but the large payload.
        assert_eq!(done.len, 3 * 4096);
        done.write_header(header(8), 11, summer);
        let bytes = done.bytes().to_vec();
        let back = FrameHeader::decode_header(&bytes, 1 << 20, 11, 1 << 20).unwrap();
        let table =
            |bytes: &[u8]| bytes[back.table_at as usize..][..back.table_len as usize].to_vec();
        assert!(back.has_valid_checksum(&bytes, &table(&bytes), summer));
        let items: Vec<_> = SummaryItems::new(&table(&bytes), back.at, back.table_at)
            .map(|item| format!("{:?}", item.unwrap()))
            .collect();
        assert_eq!(items.len(), 3);
        assert!(items[2].contains(&format!("at: {large}")), "{items:?}");
        assert_eq!(FrameHeader::decode_header(&bytes, 1 << 21, 11, 1 << 20), None);
        assert_eq!(FrameHeader::decode_header(&bytes, 1 << 20, 12, 1 << 20), None);
        let covered = (0..HEADER_BYTES)
            .chain(back.table_at as usize..(back.table_at + back.table_len) as usize);
        for byte in covered {
            let mut bytes = bytes.clone();
            bytes[byte] ^= 4;
            let is_whole =
                FrameHeader::decode_header(&bytes, 1 << 20, 11, 1 << 20).is_some_and(|header| {
                    let end = (header.table_at + header.table_len) as usize;
                    bytes
                        .get(header.table_at as usize..end)
                        .is_some_and(|table| header.has_valid_checksum(&bytes, table, summer))
                });
            assert!(!is_whole, "byte {byte}");
        }
    }
}
