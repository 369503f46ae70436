//! For tests.

use std::sync::atomic::Ordering;

/// Sets the bytes of a transaction that are kept in memory.
pub fn set_memory_limit(bytes: usize) {
    crate::pending::MEMORY_LIMIT.store(bytes, Ordering::Relaxed);
}
