//! Layout for flash: bytes with similar lifetimes share segments, which empty without cleaning.

use super::{Layout, PayloadKind, StoreDimensions};
use crate::Hint;

pub(super) struct Cow(pub StoreDimensions);

const TRICKLE: usize = 0;
const HOT: usize = 1;
const COLD: usize = 2;
const MOVED: usize = 3;
const NODES: usize = 4;

impl Layout for Cow {
    fn site(&self) -> &StoreDimensions {
        &self.0
    }

    fn streams(&self) -> usize {
        5
    }

    fn stream_of(&self, kind: PayloadKind, is_trickle: bool) -> usize {
        match kind {
            PayloadKind::Node => NODES,
            PayloadKind::ShortLived => HOT,
            // Young, and moved only because its neighbours died sooner: it will die soon.
            PayloadKind::Moved { age } if age < self.0.capacity_bytes / 4 => HOT,
            PayloadKind::Moved { .. } => MOVED,
            // One request for a commit with a waiter.
            PayloadKind::Written { .. } if is_trickle => TRICKLE,
            PayloadKind::Written { hint: Hint::Hot, .. } => HOT,
            PayloadKind::Written { hint: Hint::Cold, .. } => COLD,
            // A payload that was replaced soon will be replaced soon again (SepBIT).
            PayloadKind::Written { replaced_after: Some(bytes), .. }
                if bytes < self.0.capacity_bytes / 4 =>
            {
                HOT
            }
            PayloadKind::Written { .. } => COLD,
        }
    }

    fn index_stream(&self) -> usize {
        NODES
    }

    fn separates_by_age(&self) -> bool {
        true
    }

    fn frame_bytes(&self) -> usize {
        self.0.at_most(1 << 20, 1)
    }

    fn is_page_aligned(&self) -> bool {
        true
    }

    fn commit_bytes(&self) -> usize {
        crate::codec::to_usize_saturating((4 << 20).min(self.log_bytes() / 2))
    }

    fn read_bytes(&self) -> usize {
        // An awaited commit waits for it, too.
        64 << 10
    }

    fn sparse_read_ratio(&self) -> u64 {
        2
    }

    fn reads_ahead(&self) -> usize {
        // A single read uses one or two channels of many.
        4
    }

    fn node_bytes(&self) -> usize {
        self.0.at_most(self.0.page_bytes.max(4096) as usize, 8)
    }

    fn chunk_bytes(&self) -> usize {
        self.0.at_most(64 << 10, 8)
    }
}
