//! Memory of a hard disk: read cache and writes to be destaged.

use std::collections::{BTreeMap, VecDeque};

use draconis_device::Extent;

/// Maximum runs in the read cache.
const CACHE_SEGMENTS: usize = 16;
/// Maximum cached bytes of each run.
const SEGMENT_BYTES: u64 = 2 << 20;

/// Recently read runs.
#[derive(Clone, Default, Debug)]
pub(crate) struct ReadCache {
    /// Start and end of each run, the newest last.
    segments: VecDeque<(u64, u64)>,
}

impl ReadCache {
    pub(crate) fn add_range(&mut self, from: u64, to: u64) {
        // Extends a run that this one continues.
        let grows = self.segments.iter().rposition(|it| it.0 <= from && from <= it.1);
        let segment = match grows.and_then(|at| self.segments.remove(at)) {
            Some((first, end)) => (first, end.max(to)),
            None => (from, to),
        };
        let first = segment.0.max(segment.1.saturating_sub(SEGMENT_BYTES));
        self.segments.push_back((first, segment.1));
        if self.segments.len() > CACHE_SEGMENTS {
            self.segments.pop_front();
        }
    }

    /// Returns the end of the cached bytes that start at `byte`.
    pub(crate) fn cached_until(&self, byte: u64) -> u64 {
        let holds = |it: &&(u64, u64)| it.0 <= byte && byte < it.1;
        self.segments.iter().rev().find(holds).map_or(byte, |it| it.1)
    }
}

/// Writes between two flushes that are not on the platters.
#[derive(Clone, Default, Debug)]
pub(crate) struct DirtyRuns {
    runs: BTreeMap<u64, u64>,
    bytes: u64,
}

impl DirtyRuns {
    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn add(&mut self, at: Extent) {
        let (mut start, mut end) = (at.start_bytes, at.start_bytes + at.len_bytes);
        // Merges the runs that it touches.
        while let Some((&first, &last)) = self.runs.range(..=end).next_back()
            && last >= start
        {
            self.runs.remove(&first);
            self.bytes -= last - first;
            (start, end) = (start.min(first), end.max(last));
        }
        self.runs.insert(start, end);
        self.bytes += end - start;
    }

    /// Removes the first `most` bytes of the run that starts at `start`.
    pub(crate) fn take_from_run(&mut self, start: u64, most: u64) -> Option<Extent> {
        let end = self.runs.remove(&start)?;
        let len_bytes = (end - start).min(most);
        if start + len_bytes < end {
            self.runs.insert(start + len_bytes, end);
        }
        self.bytes -= len_bytes;
        Some(Extent::new(start, len_bytes))
    }

    /// Returns the starts of up to `most` runs on each side of `byte`.
    pub(crate) fn runs_near(&self, byte: u64, most: usize) -> impl Iterator<Item = u64> {
        let behind = self.runs.range(byte..).take(most);
        let before = self.runs.range(..byte).rev().take(most);
        behind.chain(before).map(|(start, _)| *start)
    }

    /// Returns true if all of `at` is cached.
    pub(crate) fn contains_extent(&self, at: Extent) -> bool {
        let run = self.runs.range(..=at.start_bytes).next_back();
        run.is_some_and(|(_, end)| *end >= at.start_bytes + at.len_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_dirty_runs_merge() {
        let mut dirty = DirtyRuns::default();
        for (start, len) in [(10, 5), (30, 5), (15, 5), (22, 4), (0, 2)] {
            dirty.add(Extent::new(start, len));
        }
        assert_eq!(dirty.runs, BTreeMap::from([(0, 2), (10, 20), (22, 26), (30, 35)]));
        dirty.add(Extent::new(12, 19));
        assert_eq!(dirty.runs, BTreeMap::from([(0, 2), (10, 35)]));
        assert_eq!(dirty.bytes(), 27);
        assert!(
            dirty.contains_extent(Extent::new(12, 23)) && !dirty.contains_extent(Extent::new(1, 2))
        );
        assert_eq!(dirty.runs_near(5, 1).collect::<Vec<_>>(), [10, 0]);
        assert_eq!(dirty.take_from_run(10, 20), Some(Extent::new(10, 20)));
        assert_eq!(dirty.take_from_run(30, 20), Some(Extent::new(30, 5)));
        assert_eq!((dirty.take_from_run(30, 20), dirty.bytes()), (None, 2));
    }

    #[test]
    fn read_cache_merges_and_evicts_segments() {
        let mut cache = ReadCache::default();
        cache.add_range(100, 200);
        cache.add_range(200, 300);
        assert_eq!((cache.cached_until(150), cache.cached_until(300)), (300, 300));
        assert_eq!(cache.cached_until(99), 99);
        (40..56).for_each(|i| cache.add_range(i * 1000, i * 1000 + 10));
        assert_eq!((cache.cached_until(150), cache.cached_until(55_005)), (150, 55_010));
    }
}
