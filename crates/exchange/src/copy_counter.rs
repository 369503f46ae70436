//! How many bytes of contents were copied: what a test asks of a way that data takes.
//!
//! Counted by whatever copies them, in builds with debug assertions; elsewhere nothing is
//! counted and nothing is paid.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

static BYTES: AtomicU64 = AtomicU64::new(0);

/// So many bytes are copied.
pub fn record(bytes: usize) {
    if cfg!(debug_assertions) {
        BYTES.fetch_add(bytes as u64, Relaxed);
    }
}

/// Bytes copied by this process so far; `None` where they are not counted.
pub fn bytes() -> Option<u64> {
    cfg!(debug_assertions).then(|| BYTES.load(Relaxed))
}
