//! The places that are being filled: a segment and an open frame for each stream.
//!
//! Law: a stream knows where it goes on before it gets there, and each of its frames says so.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::indexing_slicing,
    reason = "sequence numbers, counts and places are this process's own; streams are numbered by their layout"
)]

use super::LogWriter;
use crate::log::frame::FrameBuilder;
use crate::{Error, Result};

/// Where a stream stood: segment, position in it, the segment after it.
pub(crate) type StreamPosition = (u32, u32, u32);

/// A place that is being filled.
#[derive(Debug)]
pub(crate) struct Stream {
    pub segment: u32,
    /// Where the next frame begins, in the segment.
    pub pos: u32,
    /// Where the stream goes on.
    pub next: u32,
    pub frame: Option<FrameBuilder>,
}

impl Stream {
    /// One that goes on from `place`.
    pub fn at((segment, pos, next): StreamPosition) -> Self {
        Self { segment, pos, next, frame: None }
    }
}

impl LogWriter {
    /// Where all streams stand.
    pub fn places(&self) -> Vec<StreamPosition> {
        self.streams.iter().map(|stream| (stream.segment, stream.pos, stream.next)).collect()
    }

    /// The frame of a stream, with room for a payload and a line of its table.
    pub(super) fn frame_for(
        &mut self,
        stream: usize,
        payload: usize,
        line: usize,
    ) -> Result<&mut FrameBuilder> {
        let geometry = self.segments.geometry;
        let page = geometry.page_bytes as usize;
        let align = self.alignment();
        let has_room = self.streams[stream]
            .frame
            .as_ref()
            .is_some_and(|frame| frame.holds(payload, line, align));
        if !has_room {
            self.finish_frame(stream);
            let least = FrameBuilder::min_len(payload, line, align, page);
            let usual = (self.usual_bytes * 2).max(64 << 10).min(self.layout.frame_bytes());
            let wanted = usual.max(least).next_multiple_of(page);
            let segment_bytes = geometry.segment_bytes as usize;
            if segment_bytes - (self.streams[stream].pos as usize) < least {
                self.next_segment(stream)?;
            }
            let place = &mut self.streams[stream];
            let capacity = wanted.min(segment_bytes - place.pos as usize);
            if capacity < least {
                return Err(Error::Misuse("a payload that no segment holds"));
            }
            let at = geometry.start_of(place.segment) + u64::from(place.pos);
            place.frame = Some(FrameBuilder::new(at, capacity));
        }
        // It was there, or was made just now.
        self.streams[stream].frame.as_mut().ok_or(Error::Misuse("no frame"))
    }

    /// Has a stream go on in its next segment.
    pub fn next_segment(&mut self, stream: usize) -> Result<()> {
        let place = &self.streams[stream];
        let (old, new) = (place.segment, place.next);
        let Some(next) = self.segments.take(new) else {
            // Who makes room keeps enough for whatever comes here.
            log::error!("no segment for stream {stream}");
            let needed_bytes = u64::from(self.segments.geometry.segment_bytes);
            return Err(Error::NoSpace { needed_bytes, free_bytes: 0, kept_bytes: 0 });
        };
        let (seq, is_index) = (self.batch.seq, stream == self.layout.index_stream());
        self.segments.set(old, |old| (old.last_seq, old.is_index) = (seq, is_index));
        self.segments.close(old, self.clock);
        self.streams[stream] = Stream::at((new, 0, next));
        Ok(())
    }

    pub(super) fn finish_frame(&mut self, stream: usize) {
        let page = self.segments.geometry.page_bytes as usize;
        let place = &mut self.streams[stream];
        let Some(frame) = place.frame.take() else { return };
        if frame.is_empty() {
            return;
        }
        let done = frame.finish(page, place.next);
        place.pos += done.len as u32;
        let (used, seq) = (place.pos, self.batch.seq);
        self.segments.set(place.segment, |segment| (segment.used, segment.last_seq) = (used, seq));
        self.batch.done.push(done);
    }

    /// Bytes that are in a frame which the disk does not have yet.
    pub fn in_frames(&self, at: u64, len: usize) -> Option<&[u8]> {
        let open = self.streams.iter().filter_map(|stream| stream.frame.as_ref());
        if let Some(bytes) = open.filter_map(|frame| frame.get(at, len)).next() {
            return Some(bytes);
        }
        self.batch.done.iter().find_map(|done| {
            let from = usize::try_from(at.checked_sub(done.at)?).ok()?;
            done.bytes().get(from..from.checked_add(len)?)
        })
    }
}
