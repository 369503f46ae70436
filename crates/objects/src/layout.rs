//! What a kind of hardware wants: placement, cadence, depth. Everything else is shared.
//!
//! ```text
//!   log   0 what is written   1 what is cleaned   2 nodes, runs
//!   cow   0 what is written in bits   1 hot, runs   2 cold   3 what is cleaned   4 nodes
//!   bucket   as log
//! ```

mod bucket;
mod cow;
mod log;

use crate::{Hint, LayoutKind};

/// What is known of a payload when its place is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Written by a client.
    Written {
        hint: Hint,
        /// Bytes that were written since what it replaces was; none if it replaces
        /// nothing that is in memory.
        replaced_after: Option<u64>,
    },
    /// Moved by the cleaner: so many bytes were written since it was.
    Moved { age: u64 },
    /// A node of the tree.
    Node,
    /// A part of a run or checkpoint: the next ones replace it.
    Brief,
}

/// A layout's choices.
pub(crate) trait Layout: Send + Sync {
    /// How many segments are filled at a time.
    fn streams(&self) -> usize;
    /// Which of them gets a payload. In a trickle commits are small: each has a waiter.
    fn stream_of(&self, kind: Kind, is_trickle: bool) -> usize;
    /// Which of them has nodes and runs, and nothing else but in a trickle.
    fn index_stream(&self) -> usize;
    /// Whether the age of what a payload replaces matters to that.
    fn parts_by_age(&self) -> bool;
    /// The longest frame, in bytes: what is worth one request.
    fn frame_bytes(&self) -> usize;
    /// Whether what is as long as a page begins with one: then no more pages than it needs are
    /// read for it.
    fn aligns(&self) -> bool;
    /// What is gathered of changes without a waiter, in bytes: the more, the less is
    /// lost where frames end.
    fn commit_bytes(&self) -> usize;
    /// What the cleaner reads at once, in bytes.
    fn read_bytes(&self) -> usize;
    /// The cleaner jumps from one thing that is alive to the next where fewer than one byte
    /// of so many is; else it reads what is between.
    fn jumps_from(&self) -> u64;
    /// How many such reads it asks for before it needs them.
    fn reads_ahead(&self) -> usize;
    /// What is read of a stream's log at once when a store is opened, in bytes.
    fn log_read_bytes(&self) -> usize {
        1 << 20
    }
    /// About how long a node is, in bytes.
    fn node_bytes(&self) -> usize;
    /// The longest part of a run or a table, in bytes: opening a store reads each by itself.
    fn chunk_bytes(&self) -> usize;
    /// Bytes of log after which a checkpoint is due.
    fn log_bytes(&self) -> u64;
    /// The worth of cleaning a segment: `used` of its bytes are alive, of `len`; what is
    /// in it was written `age` bytes ago, on average.
    fn worth(&self, used: u64, len: u64, age: u64) -> f64 {
        // Cost-benefit (Rosenblum and Ousterhout, section 3.5): what is gained, and for how
        // long, over what is read and written again. Of the age only the root: where what
        // dies together lies together it says less, and measured 1.8 against 1.9.
        let u = used as f64 / len as f64;
        (1.0 - u) * (age as f64).sqrt() / (1.0 + u)
    }
}

/// The layout for a store of `capacity` bytes.
pub(crate) fn layout(
    kind: LayoutKind,
    page_bytes: u32,
    segment_bytes: u32,
    capacity: u64,
) -> Box<dyn Layout> {
    match kind {
        LayoutKind::Log => Box::new(log::Log { segment_bytes, capacity }),
        LayoutKind::Cow => Box::new(cow::Cow { page_bytes, segment_bytes, capacity }),
        LayoutKind::Bucket => Box::new(bucket::Bucket { segment_bytes, capacity }),
    }
}

/// A 512th of the store, within what recovery may read: what is dead is free only behind a
/// checkpoint, so that much more is kept free.
fn log_bytes(segment_bytes: u32, capacity: u64, most: u64) -> u64 {
    (capacity / 512).max(u64::from(segment_bytes) / 2).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_has_sizes_that_fit_each_other() {
        for kind in [LayoutKind::Log, LayoutKind::Cow, LayoutKind::Bucket] {
            for page in (9..=16).map(|bits| 1u32 << bits) {
                for segment in (14..=26).map(|bits| 1u32 << bits).filter(|&len| len >= page * 16) {
                    for capacity in (8..=20).map(|bits| u64::from(segment) << bits) {
                        let layout = layout(kind, page, segment, capacity);
                        let log = layout.log_bytes();
                        assert!((4096..=40 << 20).contains(&log), "{kind:?} {segment} {log}");
                        assert!(layout.frame_bytes() <= segment as usize);
                        assert!((1..=log).contains(&(layout.commit_bytes() as u64)));
                        assert!(layout.node_bytes() <= segment as usize / 8);
                        assert!(layout.chunk_bytes() <= segment as usize / 8);
                        assert!(layout.read_bytes() >= page as usize);
                    }
                }
            }
        }
    }
}
