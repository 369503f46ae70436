//! Layout for buckets: each request is slow and has a price, many at once take no longer, and
//! distance costs nothing.
//!
//! A frame is an object of the bucket, and a commit with a waiter is one request. Nodes are large:
//! a lookup takes two requests in stores of some gigabytes. Ranges begin at any byte, so nothing is
//! aligned. Space is not scarce: the cleaner takes segments with few live bytes.

use super::{Layout, StoreDimensions};

pub(super) struct BucketLayout(pub StoreDimensions);

impl Layout for BucketLayout {
    fn dimensions(&self) -> &StoreDimensions {
        &self.0
    }

    fn cleaner_read_bytes(&self) -> usize {
        // The transfer takes about as long as the latency of a request.
        4 << 20
    }

    fn cleaner_reads_ahead(&self) -> usize {
        8
    }

    fn log_read_bytes(&self) -> usize {
        // In parts, all at once.
        self.0.cap_to_segment_part(16 << 20, 1)
    }

    fn node_bytes(&self) -> usize {
        self.0.cap_to_segment_part(32 << 10, 8)
    }

    fn chunk_bytes(&self) -> usize {
        self.0.cap_to_segment_part(2 << 20, 8)
    }

    fn log_bytes(&self) -> u64 {
        // Opening reads that much at most, and a checkpoint has a price.
        self.0.log_bytes(self.0.capacity_bytes.saturating_mul(8), 32 << 20)
    }

    fn cleaning_benefit(&self, used: u64, len: u64, _age: u64) -> f64 {
        // Moved bytes are paid for now; bytes that may die later cost nothing now.
        1.0 - used as f64 / len as f64
    }
}
