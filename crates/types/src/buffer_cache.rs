//! Cache of the memory of large blocks, for reuse by later blocks of the same size.
//!
//! The allocator returns large memory to the system at once, and the system hands it out zeroed,
//! page fault by page fault. For blocks that are only copied through, that costs more than the
//! copy.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::lock::{Mutex, MutexGuard};
use crate::page::{ALIGN_BYTES, Page};

/// Cached sizes, in pages: 64 KiB to 1 MiB.
const CACHED_PAGE_COUNTS: std::ops::RangeInclusive<usize> = 16..=256;
/// Maximum cached memory, in pages: 32 MiB.
const MAX_CACHED_PAGES: usize = (32 << 20) / ALIGN_BYTES;

struct BufferCache {
    /// Cached memory, most recently freed last.
    memory: VecDeque<Vec<Page>>,
    pages: usize,
}

/// True in a forked child: a thread of its parent may hold the lock for ever.
static IS_DISABLED: AtomicBool = AtomicBool::new(false);

static CACHE: Mutex<BufferCache> = Mutex::new(BufferCache { memory: VecDeque::new(), pages: 0 });

/// Frees large blocks from now on instead of caching them. Can be called in a forked child.
#[doc(hidden)]
pub fn disable_buffer_cache() {
    IS_DISABLED.store(true, Ordering::Relaxed);
}

fn is_cached(pages: usize) -> bool {
    CACHED_PAGE_COUNTS.contains(&pages) && !IS_DISABLED.load(Ordering::Relaxed)
}

fn lock() -> MutexGuard<'static, BufferCache> {
    CACHE.lock()
}

/// Returns memory of exactly `pages` pages, with its old contents.
pub(crate) fn take_pages(pages: usize) -> Option<Vec<Page>> {
    if !is_cached(pages) {
        return None;
    }
    let mut spare = lock();
    let nth = spare.memory.iter().rposition(|memory| memory.len() == pages)?;
    spare.pages -= pages;
    spare.memory.remove(nth)
}

/// Caches `memory` if its size is cached; evicts the oldest if the cache is full.
pub(crate) fn put_pages(memory: Vec<Page>) {
    if !is_cached(memory.len()) {
        return;
    }
    let mut old = vec![];
    let mut spare = lock();
    spare.pages += memory.len();
    spare.memory.push_back(memory);
    while spare.pages > MAX_CACHED_PAGES {
        let Some(oldest) = spare.memory.pop_front() else { break };
        spare.pages -= oldest.len();
        // Freed after the lock is released.
        old.push(oldest);
    }
    drop(spare);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PrivateBuffer;

    // Other tests use the same cache concurrently, so each uses a size of its own.

    #[test]
    fn freed_pages_are_reused_and_new_pages_zeroed() {
        let len = 77 * ALIGN_BYTES - 5;
        let mut first = PrivateBuffer::new(len);
        first.fill(9);
        let at = first.as_ptr();
        drop(first);
        let again = PrivateBuffer::new_uninitialized(len);
        assert_eq!((again.as_ptr(), again.len()), (at, len));
        drop(again);
        assert!(PrivateBuffer::new(len).iter().all(|byte| *byte == 0));
    }

    #[test]
    fn cached_pages_are_bounded() {
        let many: Vec<_> = (0..200).map(|_| PrivateBuffer::new(81 * ALIGN_BYTES)).collect();
        drop(many);
        let spare = lock();
        assert!(spare.pages <= MAX_CACHED_PAGES);
        assert_eq!(spare.pages, spare.memory.iter().map(Vec::len).sum::<usize>());
    }
}
