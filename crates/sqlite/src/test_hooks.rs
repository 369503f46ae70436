//! For tests.

use std::sync::atomic::Ordering;

/// Sets the bytes of a transaction that are kept in memory.
pub fn set_memory_limit(bytes: usize) {
    crate::pending::MEMORY_LIMIT.store(bytes, Ordering::Relaxed);
}

/// Sets the limit of the page caches of databases that are opened later.
pub fn set_cache_limit(bytes: u64) {
    crate::page_cache::CAPACITY_LIMIT_BYTES.store(bytes, Ordering::Relaxed);
}

/// Commits in two groups, which is wrong: a campaign must find it.
pub fn set_split_commits(is_split: bool) {
    crate::database::SPLIT_COMMITS.store(is_split, Ordering::Relaxed);
}
