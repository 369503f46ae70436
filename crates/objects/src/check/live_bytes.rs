//! Compares the recounted live bytes of each segment with the segment table.

use super::Checker;
use super::report::{DamageKind, new_finding};
use crate::segment_table::SegmentState;

impl Checker<'_> {
    pub(super) fn compare_live_bytes(&mut self) {
        let geometry = self.core.checkpoints.superblock.geometry;
        let segments = self.core.log.segments.all.clone();
        let counts = std::mem::take(&mut self.recounted_live);
        for ((number, segment), counted) in (0..geometry.segments).zip(segments).zip(counts) {
            let at = Some(geometry.start_of(number));
            if segment.state == SegmentState::Free {
                self.report.free_segments = self.report.free_segments.saturating_add(1);
                if counted > 0 && self.is_whole {
                    let text =
                        format!("segment {number} is free, but {counted} bytes of it are alive");
                    self.add_damage(DamageKind::UnwrittenSpace, text, at, None);
                }
                continue;
            }
            self.report.used_segments = self.report.used_segments.saturating_add(1);
            if segment.is_bad {
                let text = format!("segment {number} could not be cleaned");
                self.report.notes.push(new_finding(DamageKind::Count, text, at, None));
            }
            // The rest of an unreadable tree is not known.
            if counted != segment.live && self.report.is_complete {
                let live = segment.live;
                let text =
                    format!("segment {number} has {counted} bytes alive, {live} are counted");
                self.add_damage(DamageKind::Count, text, at, None);
            }
        }
    }
}
