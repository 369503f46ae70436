//! Layout for disks with seeks: all writes go to one place, in long requests.
//!
//! The cleaner writes long frames, so the seek between its stream and that of new writes is rare. A
//! page more takes less than a hundredth of a seek, and padding between nodes would cost a tenth of
//! their size, so nothing is aligned.

use super::{Layout, StoreDimensions};

pub(super) struct LogLayout(pub StoreDimensions);

impl Layout for LogLayout {
    fn dimensions(&self) -> &StoreDimensions {
        &self.0
    }

    fn cleaner_read_bytes(&self) -> usize {
        // Three times as long as a seek.
        8 << 20
    }

    fn cleaner_reads_ahead(&self) -> usize {
        1
    }

    fn node_bytes(&self) -> usize {
        // A seek costs as much as reading 1 MB; but each changed node is written whole.
        self.0.cap_to_segment_part(16 << 10, 8)
    }

    fn log_bytes(&self) -> u64 {
        // Superblocks are far away: a checkpoint takes as long as 12 MB of log. Reading all of it
        // at open takes a quarter of a second.
        self.0.log_bytes(self.0.capacity_bytes.saturating_mul(4), 40 << 20)
    }
}
