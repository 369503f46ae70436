//! Counter of copied content bytes, with which tests verify zero-copy paths.
//!
//! Every copying function counts, in builds with debug assertions; other builds count nothing and
//! pay nothing.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

static BYTES: AtomicU64 = AtomicU64::new(0);

/// Counts `bytes` copied bytes.
pub fn record(bytes: usize) {
    if cfg!(debug_assertions) {
        BYTES.fetch_add(bytes as u64, Relaxed);
    }
}

/// Returns the bytes copied by this process so far; `None` in builds that do not count.
pub fn bytes() -> Option<u64> {
    cfg!(debug_assertions).then(|| BYTES.load(Relaxed))
}
