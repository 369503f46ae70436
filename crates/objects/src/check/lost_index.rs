//! Verifies what a lost part of the index may refer to: the payloads that frames have for its keys.
//!
//! Older versions of a key, and removed ones, are verified with it: without the index nobody can
//! say which is the newest.

use super::Checker;
use super::report::{DamageKind, Owner};
use crate::codec::to_usize_saturating;
use crate::entry::{DecodedKey, Entry, decode_key};
use crate::frame::summary::SummaryItem;
use crate::frame_scan::{FrameScan, ScannedFrame};
use crate::segment_table::SegmentState;

impl Checker<'_> {
    /// Verifies frames, if a part of the index is lost.
    pub(super) fn verify_frames(&mut self) {
        if self.report.is_complete && self.is_whole {
            return;
        }
        let io = self.core.log.io.clone();
        let scan = FrameScan::new(&io, None, self.core.log.tag, &mut |_| ());
        scan.for_each(&mut |frame| self.verify_frame(frame));
    }

    /// Returns true if the entry of a key may have been in a part of the index that is lost.
    fn may_be_lost(&self, key: &[u8]) -> bool {
        let is_within = |(from, to): &(crate::entry::Key, Option<crate::entry::Key>)| {
            from.as_slice() <= key && to.as_ref().is_none_or(|to| key < to.as_slice())
        };
        self.lost_keys.iter().any(is_within) || !self.map.is_key_readable(key)
    }

    /// Returns true if nothing is alive at an address.
    fn is_free(&self, at: u64) -> bool {
        let segments = &self.core.log.segments;
        let number = segments.geometry.segment_of(at);
        let segment = number.and_then(|number| segments.all.get(number as usize));
        // Without a checkpoint all segments seem to be free.
        !segments.all.iter().all(|it| it.state == SegmentState::Free)
            && segment.is_none_or(|it| it.state == SegmentState::Free || it.live <= 0)
    }

    fn verify_frame(&mut self, frame: &ScannedFrame) {
        let header = frame.header;
        if self.is_free(header.at) {
            return;
        }
        if !frame.is_valid {
            let text = "a frame whose keys are not what was written".to_owned();
            return self.add_damage(DamageKind::Node, text, Some(header.at), None);
        }
        let io = self.core.log.io.clone();
        let mut bytes = None;
        for item in frame.items() {
            let SummaryItem::Pair(_, key, Entry::Data(data)) = item else { continue };
            if !self.may_be_lost(&key) {
                continue;
            }
            let bytes = bytes
                .get_or_insert_with(|| io.read_pages_uncached(header.at, header.len as usize).ok());
            let stored = bytes.as_ref().and_then(|bytes| {
                let from = to_usize_saturating(data.at.checked_sub(header.at)?);
                bytes.get(from..)?.get(..data.stored as usize)
            });
            let kind = match stored.map(|stored| io.verify_payload(&data, stored)) {
                Some(Ok(())) => continue,
                Some(Err(_)) => DamageKind::Payload,
                None => DamageKind::Unreadable,
            };
            let of = match decode_key(&key) {
                Some(DecodedKey::Extent(id, _) | DecodedKey::Object(id)) => Owner::Object(id),
                Some(DecodedKey::Name(name)) => Owner::Name(name.to_vec()),
                _ => Owner::Key(key.get(1..).unwrap_or_default().to_vec()),
            };
            let text = "bytes that are not what was written; they may be of an older version";
            self.add_damage(kind, text.to_owned(), Some(data.at), Some(of));
        }
    }
}
