//! For buckets: each request takes long and has a price, many at once cost no more time, and
//! distance is nothing.
//!
//! A frame is an object of the bucket, and a commit with a waiter one request. Nodes are so large
//! that a lookup takes two requests in stores of some gigabytes. Ranges begin at any byte, so
//! nothing is aligned. Room is not scarce: what is cleaned is what has little alive.

use super::{Layout, StoreDimensions};

pub(super) struct Bucket(pub StoreDimensions);

impl Layout for Bucket {
    fn site(&self) -> &StoreDimensions {
        &self.0
    }

    fn read_bytes(&self) -> usize {
        // What comes in about the time of an answer.
        4 << 20
    }

    fn reads_ahead(&self) -> usize {
        8
    }

    fn log_read_bytes(&self) -> usize {
        // In parts, all at once.
        self.0.at_most(16 << 20, 1)
    }

    fn node_bytes(&self) -> usize {
        self.0.at_most(32 << 10, 8)
    }

    fn chunk_bytes(&self) -> usize {
        self.0.at_most(2 << 20, 8)
    }

    fn log_bytes(&self) -> u64 {
        // Opening reads that much at most, and a checkpoint has a price.
        self.0.log_bytes(self.0.capacity_bytes.saturating_mul(8), 32 << 20)
    }

    fn cleaning_benefit(&self, used: u64, len: u64, _age: u64) -> f64 {
        // What is moved is paid for by the byte, now; what may die later costs nothing now.
        1.0 - used as f64 / len as f64
    }
}
