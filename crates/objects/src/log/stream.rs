//! Streams: an open segment and an open frame for each.
//!
//! Law: a stream has its next segment before it fills this one, and each of its frames names that.
use super::LogWriter;
use crate::codec::{slice_at, to_u32_saturating};
use crate::entry::PayloadRef;
use crate::frame::FrameBuilder;
use crate::{Error, Result};

/// Position of a stream: segment, offset in it, next segment.
pub(crate) type StreamPosition = (u32, u32, u32);

/// A segment being filled.
#[derive(Debug)]
pub(crate) struct Stream {
    pub segment: u32,
    /// Offset of the next frame in the segment.
    pub pos: u32,
    /// Segment in which the stream continues.
    pub next: u32,
    pub frame: Option<FrameBuilder>,
}

impl Stream {
    /// Creates a stream that continues from `place`.
    pub fn at_position((segment, pos, next): StreamPosition) -> Self {
        Self { segment, pos, next, frame: None }
    }
}

const NO_STREAM: Error = Error::Misuse("no such stream");

impl LogWriter {
    /// Returns the positions of all streams.
    pub fn positions(&self) -> Vec<StreamPosition> {
        self.streams.iter().map(|stream| (stream.segment, stream.pos, stream.next)).collect()
    }

    /// Returns the open frame of a stream, with space for a payload and an item of its summary.
    pub(super) fn frame_for(
        &mut self,
        stream: usize,
        payload: usize,
        line: usize,
    ) -> Result<&mut FrameBuilder> {
        let geometry = self.segments.geometry;
        let page = geometry.page_bytes as usize;
        let align = self.alignment();
        let frame = self.streams.get(stream).and_then(|place| place.frame.as_ref());
        let has_room = frame.is_some_and(|frame| frame.has_space_for(payload, line, align));
        if !has_room {
            self.finish_frame(stream);
            let least = FrameBuilder::min_frame_len(payload, line, align, page);
            let usual =
                self.usual_bytes.saturating_mul(2).max(64 << 10).min(self.layout.frame_bytes());
            let wanted = usual.max(least).next_multiple_of(page);
            let segment_bytes = geometry.segment_bytes as usize;
            let left = |pos: u32| segment_bytes.saturating_sub(pos as usize);
            if self.streams.get(stream).is_some_and(|place| left(place.pos) < least) {
                self.next_segment(stream)?;
            }
            let place = self.streams.get_mut(stream).ok_or(NO_STREAM)?;
            let capacity = wanted.min(left(place.pos));
            if capacity < least {
                return Err(Error::Misuse("a payload that no segment holds"));
            }
            let at = geometry.start_of(place.segment).saturating_add(place.pos.into());
            place.frame = Some(FrameBuilder::new(at, capacity));
        }
        // It existed, or was created just now.
        let place = self.streams.get_mut(stream).ok_or(NO_STREAM)?;
        place.frame.as_mut().ok_or(Error::Misuse("no frame"))
    }

    /// Moves a stream to its next segment.
    pub fn next_segment(&mut self, stream: usize) -> Result<()> {
        let place = self.streams.get(stream).ok_or(NO_STREAM)?;
        let (old, new) = (place.segment, place.next);
        let Some(next) = self.segments.open_free_segment(new) else {
            // The reserve covers every segment that streams need.
            log::error!("no segment for stream {stream}");
            let needed_bytes = u64::from(self.segments.geometry.segment_bytes);
            return Err(Error::NoSpace { needed_bytes, free_bytes: 0, kept_bytes: 0 });
        };
        let (seq, is_index) = (self.batch.seq, stream == self.layout.index_stream());
        self.segments.update_segment(old, |old| (old.last_seq, old.is_index) = (seq, is_index));
        self.segments.close(old, self.clock);
        if let Some(place) = self.streams.get_mut(stream) {
            *place = Stream::at_position((new, 0, next));
        }
        Ok(())
    }

    pub(super) fn finish_frame(&mut self, stream: usize) {
        let page = self.segments.geometry.page_bytes as usize;
        let Some(place) = self.streams.get_mut(stream) else { return };
        let Some(frame) = place.frame.take() else { return };
        if frame.is_empty() {
            return;
        }
        let done = frame.finish(page, place.next);
        place.pos = place.pos.saturating_add(to_u32_saturating(done.len as u64));
        let (used, seq) = (place.pos, self.batch.seq);
        self.segments.update_segment(place.segment, |segment| {
            (segment.used, segment.last_seq) = (used, seq)
        });
        self.batch.done.push(done);
    }

    /// Returns the bytes of a payload that is in a frame not yet submitted to the disk.
    pub fn unsubmitted_payload(&self, data: &PayloadRef) -> Option<&[u8]> {
        let (at, len) = (data.at, data.stored as usize);
        let open = self.streams.iter().filter_map(|stream| stream.frame.as_ref());
        let done =
            || self.batch.done.iter().find_map(|done| slice_at(done.bytes(), done.at, at, len));
        let stored = open.filter_map(|frame| frame.get(at, len)).next().or_else(done)?;
        Some(data.referenced_bytes(stored))
    }
}
