//! Layout for flash: bytes with similar lifetimes share segments, which empty without cleaning.

use super::{Layout, PayloadKind, StoreDimensions};
use crate::LifetimeHint;

pub(super) struct CowLayout(pub StoreDimensions);

const TRICKLE_STREAM: usize = 0;
const HOT_STREAM: usize = 1;
const COLD_STREAM: usize = 2;
const MOVED_STREAM: usize = 3;
const NODE_STREAM: usize = 4;

impl Layout for CowLayout {
    fn dimensions(&self) -> &StoreDimensions {
        &self.0
    }

    fn streams(&self) -> usize {
        5
    }

    fn stream_of(&self, kind: PayloadKind, is_trickle: bool) -> usize {
        match kind {
            PayloadKind::Node => NODE_STREAM,
            PayloadKind::ShortLived => HOT_STREAM,
            // Young, and moved only because its neighbours died sooner: it will die soon.
            PayloadKind::Moved { age } if age < self.0.capacity_bytes / 4 => HOT_STREAM,
            PayloadKind::Moved { .. } => MOVED_STREAM,
            // One request for a commit with a waiter.
            PayloadKind::Written { .. } if is_trickle => TRICKLE_STREAM,
            PayloadKind::Written { hint: LifetimeHint::Hot, .. } => HOT_STREAM,
            PayloadKind::Written { hint: LifetimeHint::Cold, .. } => COLD_STREAM,
            // A payload that was replaced soon will be replaced soon again (SepBIT).
            PayloadKind::Written { replaced_after: Some(bytes), .. }
                if bytes < self.0.capacity_bytes / 4 =>
            {
                HOT_STREAM
            }
            PayloadKind::Written { .. } => COLD_STREAM,
        }
    }

    fn index_stream(&self) -> usize {
        NODE_STREAM
    }

    fn separates_by_age(&self) -> bool {
        true
    }

    fn frame_bytes(&self) -> usize {
        self.0.cap_to_segment_part(1 << 20, 1)
    }

    fn is_page_aligned(&self) -> bool {
        true
    }

    fn commit_bytes(&self) -> usize {
        crate::codec::to_usize_saturating((4 << 20).min(self.log_bytes() / 2))
    }

    fn cleaner_read_bytes(&self) -> usize {
        // An awaited commit waits for it, too.
        64 << 10
    }

    fn sparse_read_ratio(&self) -> u64 {
        2
    }

    fn cleaner_reads_ahead(&self) -> usize {
        // A single read uses one or two channels of many.
        4
    }

    fn node_bytes(&self) -> usize {
        self.0.cap_to_segment_part(self.0.page_bytes.max(4096) as usize, 8)
    }

    fn chunk_bytes(&self) -> usize {
        self.0.cap_to_segment_part(64 << 10, 8)
    }
}
