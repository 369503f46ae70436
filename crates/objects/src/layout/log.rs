//! For disks on which distance costs time: everything goes to one place, in long requests.

use super::{Kind, Layout};

pub(super) struct Log {
    pub segment_bytes: u32,
    pub capacity: u64,
}

impl Layout for Log {
    fn streams(&self) -> usize {
        3
    }

    fn stream_of(&self, kind: Kind, is_trickle: bool) -> usize {
        match kind {
            // No commit waits for two places.
            _ if is_trickle && !matches!(kind, Kind::Moved { .. }) => 0,
            Kind::Written { .. } => 0,
            // What survived until its segment was cleaned is older than what is written:
            // apart from it, it stays together. The cleaner writes long frames, so the seek
            // between the two is paid rarely.
            Kind::Moved { .. } => 1,
            // A merge replaces nearly all: then they leave whole segments behind. Among
            // payloads each hole of theirs costs moving the neighbours.
            Kind::Node | Kind::Brief => 2,
        }
    }

    fn index_stream(&self) -> usize {
        2
    }

    fn parts_by_age(&self) -> bool {
        false
    }

    fn frame_bytes(&self) -> usize {
        (4 << 20).min(self.segment_bytes as usize)
    }

    fn aligns(&self) -> bool {
        // A page more takes less than a hundredth of the seek there; what is lost between nodes
        // is a tenth of them.
        false
    }

    fn commit_bytes(&self) -> usize {
        crate::codec::index((16 << 20).min(self.log_bytes() / 2))
    }

    fn read_bytes(&self) -> usize {
        // Three times as long as it takes to go there.
        8 << 20
    }

    fn jumps_from(&self) -> u64 {
        16
    }

    fn reads_ahead(&self) -> usize {
        1
    }

    fn node_bytes(&self) -> usize {
        // A seek costs as much as reading 1 MB; but each changed node is written whole.
        (16 << 10).min(self.segment_bytes as usize / 8)
    }

    fn chunk_bytes(&self) -> usize {
        (1 << 20).min(self.segment_bytes as usize / 8)
    }

    fn log_bytes(&self) -> u64 {
        // Superblocks are far away: a checkpoint takes as long as 12 MB of log. Reading all of
        // it when the store is opened takes a quarter of a second.
        super::log_bytes(self.segment_bytes, self.capacity.saturating_mul(4), 40 << 20)
    }
}
