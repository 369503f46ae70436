//! For buckets: each request takes long and has a price, many at once cost no more time, and
//! distance is nothing.
//!
//! Frames are long, commits without a waiter longer; nodes are so large that a lookup takes two
//! requests in stores of some gigabytes. Room is not scarce: what is cleaned is what has little
//! alive.

use super::{Kind, Layout};

pub(super) struct Bucket {
    pub segment_bytes: u32,
    pub capacity: u64,
}

impl Layout for Bucket {
    fn streams(&self) -> usize {
        3
    }

    fn stream_of(&self, kind: Kind, is_trickle: bool) -> usize {
        match kind {
            // A commit with a waiter is one request.
            _ if is_trickle && !matches!(kind, Kind::Moved { .. }) => 0,
            Kind::Written { .. } => 0,
            Kind::Moved { .. } => 1,
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
        // An object of the bucket.
        (4 << 20).min(self.segment_bytes as usize)
    }

    fn aligns(&self) -> bool {
        // Ranges begin at any byte.
        false
    }

    fn commit_bytes(&self) -> usize {
        crate::codec::index((16 << 20).min(self.log_bytes() / 2))
    }

    fn read_bytes(&self) -> usize {
        // What comes in about the time of an answer.
        4 << 20
    }

    fn jumps_from(&self) -> u64 {
        16
    }

    fn reads_ahead(&self) -> usize {
        8
    }

    fn log_read_bytes(&self) -> usize {
        self.read_bytes().min(self.segment_bytes as usize)
    }

    fn node_bytes(&self) -> usize {
        (32 << 10).min(self.segment_bytes as usize / 8)
    }

    fn chunk_bytes(&self) -> usize {
        (2 << 20).min(self.segment_bytes as usize / 8)
    }

    fn log_bytes(&self) -> u64 {
        // Opening reads that much at most, and a checkpoint has a price.
        super::log_bytes(self.segment_bytes, self.capacity.saturating_mul(8), 32 << 20)
    }

    fn worth(&self, used: u64, len: u64, _age: u64) -> f64 {
        // What is moved is paid for by the byte, now; what may die later costs nothing now.
        1.0 - used as f64 / len as f64
    }
}
