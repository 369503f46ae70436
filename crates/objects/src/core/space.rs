//! Free space: reserves, admission of groups and reclamation of segments.
//!
//! ```text
//!   segments │ held by what is alive │ free ............................ │
//!                                    │ for groups │ to give up │ upkeep  │
//! ```
//!
//! Law 1: each group leaves space for the checkpoint after it: the store opens, and can free space.
//! Law 2: groups that only free space may use the delete reserve; others are refused before it is
//! touched. Groups that replace bytes need space until the old ones are freed: they may also use
//! the reserves for bursts and for merges.
//! Law 3: repeating a refused request costs nothing.
use crate::codec::to_usize_saturating;
use crate::core::Core;
use crate::layout::Layout;
use crate::required_io::MissPolicy;
use crate::segment_table::{Segment, SegmentState};
use crate::superblock::Geometry;
use crate::{Error, Result};

/// Checkpoints without a gain after which reclamation gives up.
const MAX_FUTILE_CHECKPOINTS: usize = 8;

/// What a group does to the space of the store, the least first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum SpaceUse {
    /// It only frees space.
    Frees,
    /// It replaces bytes within the lengths of objects, and may free space.
    Replaces,
    /// It may need more space than before.
    Grows,
}

/// A refused request and the state at that time: the refusal is repeated until the state changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NoSpaceState {
    needed_bytes: u64,
    space_use: SpaceUse,
    groups: u64,
    free: usize,
    epochs: usize,
}

/// Reserves of a store: constant as long as its size is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reserve {
    /// Free segments reserved for freeing groups, the cleaner and checkpoints.
    pub reserved_segments: usize,
    /// Free segments that other groups may not use.
    pub unusable_segments: usize,
    /// Free segments below which cleaning begins.
    pub cleaning_threshold_segments: usize,
    /// Bytes that groups can fill.
    pub capacity_bytes: u64,
    /// Bytes of log after which a checkpoint is due.
    pub log_bytes: u64,
}

impl Reserve {
    /// Returns the reserves of a store of this geometry.
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "`Geometry` bounds segments and their bytes, a layout its streams and its log"
    )]
    pub fn for_layout(geometry: &Geometry, layout: &dyn Layout) -> Self {
        let (segment_bytes, log_bytes) = (u64::from(geometry.segment_bytes), layout.log_bytes());
        let segments = geometry.segments as usize;
        // Most segments that a checkpoint after a whole log takes: for the log's commit, for nodes,
        // and for a run with the record.
        let upkeep = 3 + to_usize_saturating(log_bytes.div_ceil(segment_bytes));
        // Cleaning that many together gains more than the pages of the checkpoint after it, even if
        // only a sixteenth of each is dead.
        let pages = (u64::from(geometry.page_bytes) * 64).div_ceil(segment_bytes);
        let reserved_segments = upkeep + 4 + to_usize_saturating(pages);
        // A store of few segments cannot spare any for bursts.
        let unusable_segments = reserved_segments + (layout.streams() + 3).min(segments / 8 + 2);
        // The target of `reclaim_segments`, and the segments filled until a checkpoint frees
        // cleaned ones. The cleaner keeps up with writes when an eighth is missing; another eighth
        // is for bursts: long commits, merged runs.
        let filled = to_usize_saturating((log_bytes * 2).div_ceil(segment_bytes));
        let cleaning_threshold_segments = (unusable_segments + 2 + filled) * 8 / 7 + 1;
        // Each stream has an open segment and a next one. Segments have unusable ends, and cleaning
        // has to gain something.
        let filled = segments.saturating_sub(layout.streams() * 2 + unusable_segments) as u64;
        let capacity_bytes = filled * segment_bytes / 16 * 15;
        Self {
            reserved_segments,
            unusable_segments,
            cleaning_threshold_segments,
            capacity_bytes,
            log_bytes,
        }
    }
}

impl Core {
    fn segment_bytes(&self) -> u64 {
        u64::from(self.checkpoints.superblock.geometry.segment_bytes)
    }

    /// Returns the segments that a checkpoint would take now, with the cleaner's copies.
    pub fn checkpoint_segments(&self) -> usize {
        // On the disk a pair takes at most half of its memory.
        let run_bytes = self.levels.unflushed_memtable_bytes() as u64 / 2;
        to_usize_saturating(run_bytes.div_ceil(self.segment_bytes())).saturating_add(3)
    }

    /// Returns true if runs are so large that they must be merged before more is admitted.
    fn must_merge_runs(&self, needed_bytes: u64) -> bool {
        let few = (self.reserve.reserved_segments as u64).saturating_mul(self.segment_bytes()) / 4;
        !self.has_space_beside_merge(needed_bytes)
            && self.merge_reserve_bytes() > (self.reserve.capacity_bytes / 32).min(few)
    }

    /// Sets the geometry; returns the old one.
    pub fn set_geometry(&mut self, geometry: Geometry) -> Geometry {
        self.reserve = Reserve::for_layout(&geometry, &*self.log.layout);
        std::mem::replace(&mut self.checkpoints.superblock.geometry, geometry)
    }

    /// Returns the bytes that a merge writes before it frees the merged runs.
    fn merge_reserve_bytes(&self) -> u64 {
        self.levels.run_bytes().saturating_add(self.log.bytes)
    }

    /// Returns true if so many more bytes leave enough space for a merge.
    pub fn has_space_beside_merge(&self, needed_bytes: u64) -> bool {
        let bytes = self.log.segments.total_rewrite_bytes().saturating_add(needed_bytes);
        let capacity = self.reserve.capacity_bytes;
        // Runs are live, too: this mostly decides without visiting them.
        bytes.saturating_mul(2).saturating_add(self.log.bytes) <= capacity
            || bytes.saturating_add(self.merge_reserve_bytes()) <= capacity
    }

    /// Returns the longest unused end of a full segment: it is shorter than the next payload.
    fn longest_gap_bytes(&self) -> u64 {
        let pages = u64::from(self.checkpoints.superblock.geometry.page_bytes).saturating_mul(2);
        pages.saturating_add(self.log.payload_max() as u64)
    }

    /// Returns the segments that a group of so many bytes takes.
    fn segments_needed(&self, bytes: u64) -> usize {
        let gap = self.longest_gap_bytes();
        let usable = self.segment_bytes().saturating_sub(gap).max(self.segment_bytes() / 4);
        to_usize_saturating(bytes.div_ceil(usable))
    }

    /// Returns the bytes of segments that groups cannot fill.
    fn reserved_bytes(&self) -> u64 {
        let geometry = &self.checkpoints.superblock.geometry;
        u64::from(geometry.segments)
            .saturating_mul(self.segment_bytes())
            .saturating_sub(self.reserve.capacity_bytes)
    }

    /// Returns true if so many more bytes leave what merges need.
    fn is_roomy(&self, needed_bytes: u64, space_use: SpaceUse) -> bool {
        match space_use {
            SpaceUse::Frees => !self.must_merge_runs(needed_bytes),
            SpaceUse::Replaces => {
                let bytes = self.log.segments.total_rewrite_bytes().saturating_add(needed_bytes);
                bytes <= self.reserve.capacity_bytes && !self.must_merge_runs(needed_bytes)
            }
            SpaceUse::Grows => self.has_space_beside_merge(needed_bytes),
        }
    }

    /// Ensures that a group of `needed_bytes` fits.
    pub fn ensure_space(&mut self, needed_bytes: u64, space_use: SpaceUse) -> Result<()> {
        let reserve = match space_use {
            SpaceUse::Frees | SpaceUse::Replaces => self.reserve.reserved_segments,
            SpaceUse::Grows => self.reserve.unusable_segments,
        };
        let needed = self.segments_needed(needed_bytes).saturating_add(reserve);
        if self.log.segments.free_segments() >= needed && self.is_roomy(needed_bytes, space_use) {
            return Ok(());
        }
        self.release();
        let now = self.no_space_state(needed_bytes, space_use);
        let is_as_before = |was: &NoSpaceState| {
            NoSpaceState { needed_bytes, space_use, ..*was } == now
                && needed_bytes >= was.needed_bytes
                && space_use >= was.space_use
        };
        if space_use != SpaceUse::Frees && self.last_no_space.as_ref().is_some_and(is_as_before) {
            return Err(self.no_space(needed_bytes));
        }
        self.find_space(needed, needed_bytes, space_use).map_err(|error| self.stop(error))?;
        // Freeing groups continue as long as their checkpoint has space: a snapshot may pin the
        // freed segments.
        let free = self.log.segments.free_segments();
        let is_enough = match space_use {
            SpaceUse::Frees => {
                free.saturating_add(self.reserve.reserved_segments)
                    > needed.saturating_add(self.checkpoint_segments())
            }
            _ => free >= needed && self.is_roomy(needed_bytes, space_use),
        };
        if is_enough {
            return Ok(());
        }
        if space_use != SpaceUse::Frees {
            self.last_no_space = Some(self.no_space_state(needed_bytes, space_use));
        }
        Err(self.no_space(needed_bytes))
    }

    /// Ensures that so many bytes fit, in writes of any size.
    pub fn ensure_reservable(&mut self, bytes: u64) -> Result<()> {
        self.check_running()?;
        // With their entries, and padding at the ends of commits.
        self.ensure_space(
            bytes.saturating_add(bytes / 8).saturating_add(self.segment_bytes()),
            SpaceUse::Grows,
        )
    }

    fn find_space(&mut self, needed: usize, needed_bytes: u64, space_use: SpaceUse) -> Result<()> {
        if self.must_merge_runs(needed_bytes) || !self.is_roomy(needed_bytes, space_use) {
            // Overwritten entries may not be accounted yet.
            self.checkpoint_now()?;
            if self.must_merge_runs(needed_bytes) {
                self.merge_now()?;
                self.checkpoint_now()?;
            }
            if space_use != SpaceUse::Frees && !self.is_roomy(needed_bytes, space_use) {
                return Ok(());
            }
        }
        self.reclaim_segments(needed)
    }

    pub fn no_space(&self, needed_bytes: u64) -> Error {
        let held = self.log.segments.total_rewrite_bytes();
        let held = held.saturating_add(self.merge_reserve_bytes());
        let by_bytes = self.reserve.capacity_bytes.saturating_sub(held);
        // Not more than was searched for.
        let segments =
            self.log.segments.free_segments().saturating_sub(self.reserve.unusable_segments) as u64;
        let free_bytes =
            by_bytes.min((segments.saturating_mul(self.segment_bytes()) / 4).saturating_mul(3));
        Error::NoSpace { needed_bytes, free_bytes, kept_bytes: self.reserved_bytes() }
    }

    fn no_space_state(&self, needed_bytes: u64, space_use: SpaceUse) -> NoSpaceState {
        let (groups, free) = (self.log.counters.groups, self.log.segments.free_segments());
        NoSpaceState {
            needed_bytes,
            space_use,
            groups,
            free,
            epochs: self.checkpoints.pinned_segments.len(),
        }
    }

    /// Reclaims segments until `needed` are free, or no more can be. Cleaning compacts live bytes,
    /// merging drops hidden entries, and checkpoints free the segments of both. Each needs a little
    /// space itself.
    pub fn reclaim_segments(&mut self, needed: usize) -> Result<()> {
        let (start, mut in_vain) = (self.log.segments.free_segments(), 0usize);
        let mut best = start;
        let (mut is_counted, mut is_merged) = (false, false);
        loop {
            self.release();
            if self.log.segments.free_segments() >= needed {
                return Ok(());
            }
            if self.checkpoints.written.is_some() {
                let _ = self.complete_checkpoint(MissPolicy::Block)?;
                continue;
            }
            // Entries freed since the last checkpoint are not accounted yet. If they are few, this
            // is tried last.
            if !is_counted && self.log.bytes >= self.reserve.log_bytes / 4 {
                is_counted = true;
                self.checkpoint_now()?;
                continue;
            }
            // While a snapshot pins freed segments, cleaning only uses up the rest.
            if !self.checkpoints.pinned_segments.is_empty() {
                if is_counted {
                    return Ok(());
                }
                is_counted = true;
                self.checkpoint_now()?;
                continue;
            }
            if in_vain >= MAX_FUTILE_CHECKPOINTS {
                if is_merged {
                    return Ok(());
                }
                (is_merged, in_vain) = (true, 0);
                self.merge_now()?;
                self.checkpoint_now()?;
                continue;
            }
            // A waiter cleans only for the missing segments and for the checkpoint that frees them,
            // unless that gains nothing.
            let waiting = self.cleaner.since.len().saturating_add(self.cleaner.before.len());
            let wanted = needed.saturating_add(self.checkpoint_segments());
            let missing = wanted.saturating_sub(self.log.segments.free_segments());
            let is_enough = in_vain < MAX_FUTILE_CHECKPOINTS / 2 && waiting >= missing;
            let can_clean =
                self.log.segments.free_segments() > self.checkpoint_segments().saturating_add(1);
            let is_due = is_enough
                || self.log.segments.has_empty()
                || !can_clean
                || (self.cleaner.cleaning.is_none() && !self.clean_best()?);
            if is_due {
                // Last attempt: freed entries may not be accounted yet.
                if waiting == 0 && !self.log.segments.has_empty() {
                    in_vain = MAX_FUTILE_CHECKPOINTS;
                    if is_counted {
                        continue;
                    }
                    is_counted = true;
                }
                self.checkpoint_now()?;
                in_vain = in_vain.saturating_add(1);
                if self.log.segments.free_segments() > best {
                    (best, in_vain) = (self.log.segments.free_segments(), 0);
                } else if self.log.segments.free_segments().saturating_add(1) < start {
                    // It costs more than it gains.
                    return Ok(());
                }
                continue;
            }
            self.finish_cleaning()?;
        }
    }

    /// Returns the number of segments that are free after one or two checkpoints.
    pub fn segments_awaiting_checkpoint(&self) -> usize {
        let emptied = self.checkpoints.written.as_ref().map_or(0, |written| written.emptied.len());
        emptied.saturating_add(self.cleaner.since.len()).saturating_add(self.cleaner.before.len())
    }

    /// Returns true if a segment only waits for a checkpoint.
    fn is_cleaned(&self, segment: u32) -> bool {
        let written = self.checkpoints.written.as_ref().map(|written| &written.cleaned);
        [Some(&self.cleaner.since), Some(&self.cleaner.before), written]
            .into_iter()
            .flatten()
            .any(|cleaned| cleaned.contains(&segment))
    }

    /// Returns the segment with the largest benefit, if there is one: of all, or without index
    /// segments that still have many live bytes.
    fn find_best_segment(&self, all: bool) -> Option<u32> {
        let len = u64::from(self.log.segments.geometry.segment_bytes);
        let gap = self.longest_gap_bytes();
        let worth = |(number, segment): (u32, &Segment)| {
            let used = segment.rewrite_bytes();
            // What cleaning cannot gain: a copy has an unused end, too.
            let frames = u64::from(segment.used);
            let filled = if len.saturating_sub(frames) < gap { frames } else { len };
            let is_candidate = segment.state == SegmentState::Closed
                && number < self.log.segments.end
                && !segment.is_bad
                && segment.live > 0
                && (all || !segment.is_index || used < len / 16)
                && !self.is_cleaned(number);
            let age = self.log.clock.saturating_sub(segment.closed).max(1);
            (is_candidate && used < filled.saturating_sub(len / 64))
                .then(|| (self.log.layout.cleaning_benefit(used, len, age), number))
        };
        let worths = (0..).zip(&self.log.segments.all).filter_map(worth);
        Some(worths.max_by(|(a, _), (b, _)| a.total_cmp(b))?.1)
    }

    /// Returns the segment that is best to clean, if there is one.
    pub fn best_to_clean(&self) -> Option<u32> {
        // A merge rewrites leaves in the order of their addresses: it empties their segments, and
        // the half-emptied one would look best.
        let all = self.levels.tree_merge.is_none()
            || self.log.segments.free_segments() <= self.reserve.unusable_segments;
        self.find_best_segment(all).or_else(|| self.find_best_segment(true))
    }

    /// Finishes cleaning the current segment.
    pub fn finish_cleaning(&mut self) -> Result<()> {
        while self.cleaner.cleaning.is_some() {
            let _ = self.cleaner.step(&mut self.log, &mut self.levels, MissPolicy::Block)?;
        }
        Ok(())
    }

    /// Begins to clean the best segment; returns false if there is none.
    fn clean_best(&mut self) -> Result<bool> {
        let Some(number) = self.best_to_clean() else { return Ok(false) };
        let _ = self.cleaner.begin(&mut self.log, number, MissPolicy::Block)?;
        Ok(true)
    }

    /// Merges all runs into the tree, as far as free space allows.
    pub fn merge_now(&mut self) -> Result<()> {
        let mut is_begun = false;
        loop {
            if self.levels.compaction.is_none() && self.levels.tree_merge.is_none() {
                if is_begun || self.levels.runs.is_empty() {
                    return Ok(());
                }
                is_begun = true;
                self.levels.to_merge = self.levels.runs.len();
                self.levels.schedule_merges(&self.log);
                continue;
            }
            if self.log.segments.free_segments() <= self.checkpoint_segments() {
                self.checkpoint_now()?;
                let (free, can_clean) = (
                    self.log.segments.free_segments(),
                    self.checkpoints.pinned_segments.is_empty(),
                );
                if free <= self.checkpoint_segments().saturating_add(1)
                    && can_clean
                    && self.clean_best()?
                {
                    self.finish_cleaning()?;
                    self.checkpoint_now()?;
                }
                if self.log.segments.free_segments() <= self.checkpoint_segments() {
                    return Ok(());
                }
            }
            self.levels.compact_step(&mut self.log, 1024)?;
            let pairs = self.max_pairs_per_merge_step();
            let _ = self.levels.tree_merge_step(&mut self.log, pairs, MissPolicy::Block)?;
        }
    }

    /// Returns the most pairs that one step may merge into the tree: each may change a leaf and the
    /// path to it.
    pub fn max_pairs_per_merge_step(&self) -> usize {
        let free = self.log.segments.free_segments().saturating_sub(self.checkpoint_segments());
        let room = (free as u64).saturating_mul(self.segment_bytes());
        let page_bytes = u64::from(self.checkpoints.superblock.geometry.page_bytes);
        to_usize_saturating(room.checked_div(page_bytes).unwrap_or(0) / 4).clamp(1, 256)
    }
}
