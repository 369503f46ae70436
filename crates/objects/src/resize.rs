//! Resizing of stores.
//!
//! ```text
//!   grow     | segments ............ | 2 | 3 |  ──▶  | segments ............ ....... | 2 | 3 |
//!   shrink   what lies behind the new end is moved, then as above, the other way round
//! ```
//!
//! Law 1: writing the first copies of the superblock switches to the new size. Those at the new end
//! are written before, and invalid until then; those at the old end are never written again.
//! Law 2: segments keep their addresses; a store grows without moves.
//! Law 3: a new size that is too small is refused before anything is moved.
use std::sync::Arc;

use draconis_device::Disk;

use crate::core::Core;
use crate::options::OpenOptions;
use crate::required_io::MissPolicy;
use crate::segment_table::SegmentState;
use crate::superblock::Geometry;
use crate::{Error, Result, Store};

/// Segments that are cleaned between checkpoints to free some.
const SEGMENTS_CLEARED_PER_CHECKPOINT: usize = 8;

impl Store {
    /// Resizes the closed store on `disk` to `len_bytes`, up to the length of the disk. Bytes of
    /// the disk after that stay unused.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if the contents do not fit, [`Error::Misuse`] if no store of this size is
    /// possible; errors of opening and writing.
    pub fn resize(disk: Arc<dyn Disk>, len_bytes: u64) -> Result<()> {
        if len_bytes > disk.properties().len_bytes {
            return Err(Error::Misuse("a store cannot be longer than its disk"));
        }
        let mut core = crate::recovery::open(disk, &OpenOptions::default())?;
        let old = core.checkpoints.superblock.geometry;
        let new = old.resized(&core.checkpoints.superblock.profile, len_bytes)?;
        if new.segments < old.segments {
            core.evacuate_tail(new)?;
        }
        core.set_geometry(new);
        core.checkpoints.is_resized = true;
        core.log.segments.resize(new);
        core.checkpoint_now()
    }
}

impl Core {
    /// Moves all live bytes after the end of `new` to before it.
    fn evacuate_tail(&mut self, new: Geometry) -> Result<()> {
        let old = self.set_geometry(new);
        let fits = self.has_space_beside_merge(0);
        let full = self.no_space(self.log.segments.total_rewrite_bytes());
        self.set_geometry(old);
        if !fits {
            return Err(full);
        }
        self.merge_now()?;
        self.checkpoint_now()?;
        self.free_segments_below(new.segments)?;
        self.log.segments.exclude_from(new.segments);
        if self.log.segments.free_segments() <= self.reserve.reserved_segments {
            self.reclaim_segments(self.reserve.reserved_segments.saturating_add(1))?;
        }
        // Moves the streams before the end: then no log after it is needed.
        for stream in 0..self.log.streams.len() {
            while let Some(place) = self.log.streams.get(stream)
                && place.segment.max(place.next) >= new.segments
            {
                self.log.next_segment(stream)?;
            }
        }
        self.checkpoint_now()?;
        // Nothing is moved past the end, so each segment is cleaned once. A checkpoint accounts the
        // entries freed meanwhile.
        for _ in 0..2 {
            for number in new.segments..old.segments {
                self.empty_segment(number)?;
            }
            self.checkpoint_now()?;
            self.checkpoint_now()?;
        }
        let mut behind = (new.segments..old.segments)
            .zip(self.log.segments.all.iter().skip(new.segments as usize));
        match behind.find(|(_, segment)| segment.live > 0) {
            None => Ok(()),
            Some((number, _)) => Err(Error::Corrupt {
                what: "a segment that cannot be moved",
                at_bytes: old.start_of(number),
            }),
        }
    }

    /// Frees some segments before `end`, while those after it are still usable: later moves go
    /// there, and moving needs space.
    fn free_segments_below(&mut self, end: u32) -> Result<()> {
        let needed = self.reserve.reserved_segments.saturating_add(1);
        for _ in 0..end {
            if self.log.segments.count_free_below(end) >= needed {
                break;
            }
            self.reclaim_for_moves()?;
            let room = self
                .log
                .segments
                .free_segments()
                .saturating_sub(self.checkpoint_segments().saturating_add(1))
                .min(SEGMENTS_CLEARED_PER_CHECKPOINT);
            let below = self.log.segments.all.iter().zip(0..end);
            let mut closed: Vec<(u64, u32)> = below
                .filter(|(it, _)| it.state == SegmentState::Closed && it.live > 0 && !it.is_bad)
                .map(|(it, number)| (it.rewrite_bytes(), number))
                .collect();
            closed.sort_unstable();
            if room == 0 || closed.is_empty() {
                break;
            }
            for (_, number) in closed.into_iter().take(room) {
                self.empty_segment(number)?;
            }
            // Cleaned segments are free after the second checkpoint.
            self.checkpoint_now()?;
            self.checkpoint_now()?;
        }
        Ok(())
    }

    /// Reclaims segments, if few are left beside those of a checkpoint.
    fn reclaim_for_moves(&mut self) -> Result<()> {
        let wanted = self.checkpoint_segments().saturating_add(3);
        if self.log.segments.free_segments() < wanted {
            self.reclaim_segments(wanted)
        } else {
            Ok(())
        }
    }

    fn empty_segment(&mut self, number: u32) -> Result<()> {
        let Some(&segment) = self.log.segments.all.get(number as usize) else { return Ok(()) };
        if segment.state != SegmentState::Closed || segment.live == 0 || segment.is_bad {
            return Ok(());
        }
        self.reclaim_for_moves()?;
        if self.log.segments.free_segments() <= self.checkpoint_segments().saturating_add(1) {
            return Err(
                self.no_space(u64::from(self.checkpoints.superblock.geometry.segment_bytes))
            );
        }
        self.finish_cleaning()?;
        let _ = self.cleaner.begin(&mut self.log, number, MissPolicy::Block)?;
        self.finish_cleaning()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use draconis_device::{Extent, MemoryDisk, Random};
    use draconis_testkit::{CrashOptions, CrashStates, RecordDisk};
    use draconis_types::Block;

    use super::*;
    use crate::check::CheckOptions;
    use crate::kv::Kv;
    use crate::{CreateOptions, LayoutKind, Profile};

    type ModelKeys = BTreeMap<Vec<u8>, Vec<u8>>;

    fn check_store_contents(disk: &Arc<dyn Disk>, keys: &ModelKeys) -> u64 {
        let report = Store::check(disk.clone(), &CheckOptions::default(), &mut |_, _| {}).unwrap();
        assert!(report.is_clean(), "{:?}", report.damage);
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let store = Store::open(disk.clone(), &options).unwrap();
        let kv = Kv::new(store.clone());
        let all: ModelKeys = kv.scan::<std::ops::RangeFull>(&..).map(Result::unwrap).collect();
        assert!(all == *keys, "{} keys, {} should be there", all.len(), keys.len());
        store.info().disk_bytes
    }

    fn put_random_keys(
        disk: &Arc<dyn Disk>,
        keys: &mut ModelKeys,
        random: &mut Random,
        count: u64,
    ) {
        let store = Store::open(disk.clone(), &OpenOptions::default()).unwrap();
        let kv = Kv::new(store.clone());
        for _ in 0..count {
            let (key, len) =
                (random.next_below(3000).to_be_bytes(), random.next_below(2000) as usize);
            let mut value = vec![0; len];
            random.fill(&mut value);
            kv.put(&key, &value).unwrap();
            keys.insert(key.to_vec(), value);
        }
        store.sync().unwrap();
    }

    #[test]
    fn resize_keeps_contents_across_power_cuts() {
        for (layout, seed) in [(LayoutKind::Cow, 1), (LayoutKind::Log, 2)] {
            let memory = MemoryDisk::new(vec![0x55; 24 << 20], 512);
            let recorded = Arc::new(RecordDisk::new(memory));
            let disk: Arc<dyn Disk> = recorded.clone();
            let profile =
                Profile { layout, page_bytes: 4096, segment_bytes: 64 << 10, queue_depth: 4 };
            Store::create(disk.clone(), &CreateOptions { profile, id: seed.into() }).unwrap();
            let (mut keys, mut random) = (ModelKeys::new(), Random::new(seed));
            put_random_keys(&disk, &mut keys, &mut random, 4000);
            for len in [9 << 20, 17 << 20, (7 << 20) + 512, 24 << 20, 8 << 20] {
                let before = check_store_contents(&disk, &keys);
                recorded.take_events();
                let whole = Extent::new(0, disk.properties().len_bytes);
                let image = disk.read_now(whole, Block::private(whole.len_bytes as usize));
                let image = image.unwrap().into_private().to_vec();
                Store::resize(disk.clone(), len).unwrap();
                assert_eq!(check_store_contents(&disk, &keys), len);
                let options = CrashOptions { seed, subsets: 1, exhaustive_sectors: 0 };
                for crash in CrashStates::new(image, recorded.take_events(), options).step_by(29) {
                    let found = check_store_contents(&(crash.disk as Arc<dyn Disk>), &keys);
                    assert!([before, len].contains(&found), "{found}");
                }
                put_random_keys(&disk, &mut keys, &mut random, 1500);
            }
            let before = check_store_contents(&disk, &keys);
            let refused = Store::resize(disk.clone(), 4 << 20);
            assert!(matches!(refused, Err(Error::NoSpace { .. })), "{refused:?}");
            assert_eq!(check_store_contents(&disk, &keys), before);
        }
    }
}
