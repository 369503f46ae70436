//! Counter of copied content bytes, with which tests verify zero-copy paths.
//!
//! Every copying function counts, in builds with debug assertions; other builds count nothing and
//! pay nothing.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

static COPIED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Counts `bytes` copied bytes.
pub fn record_copied_bytes(bytes: usize) {
    if cfg!(debug_assertions) {
        COPIED_BYTES.fetch_add(bytes as u64, Relaxed);
    }
}

/// Returns the bytes copied by this process so far; `None` in builds that do not count.
pub fn copied_bytes() -> Option<u64> {
    cfg!(debug_assertions).then(|| COPIED_BYTES.load(Relaxed))
}
