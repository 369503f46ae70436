//! Room: what there is, what is kept for what, and how more is found.
//!
//! ```text
//!   segments │ held by what is alive │ free ............................ │
//!                                    │ for groups │ to give up │ upkeep  │
//! ```
//!
//! Law 1: whatever is taken, what is left suffices for the checkpoint after it: a store can be
//! opened, and can give up.
//! Law 2: what only gives up may use what is kept for that; everything else is refused before.
//! Law 3: a refusal costs nothing when it is asked for again.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    reason = "counts of segments and bytes of one disk"
)]

use crate::core::Core;
use crate::layout::Layout;
use crate::maintenance::MissPolicy;
use crate::recovery::superblock::Geometry;
use crate::{Error, Result};

/// Checkpoints after which nothing was gained in vain.
const IN_VAIN: usize = 8;

/// What was refused, and how things stood then: it is refused again until they changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NoSpaceState {
    needed_bytes: u64,
    groups: u64,
    free: usize,
    epochs: usize,
}

/// What is kept free for what: the same as long as a store has its length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reserve {
    floor: usize,
    kept: usize,
    low: usize,
    capacity_bytes: u64,
    /// Bytes of log after which a checkpoint is due.
    pub log_bytes: u64,
}

impl Reserve {
    /// Of a store in so many segments.
    pub fn of(geometry: &Geometry, layout: &dyn Layout) -> Self {
        let (segment_bytes, log_bytes) = (u64::from(geometry.segment_bytes), layout.log_bytes());
        let segments = geometry.segments as usize;
        // What a checkpoint may take after a whole log: for the log's commit, for nodes, for a
        // run with what leads to it.
        let upkeep = 3 + log_bytes.div_ceil(segment_bytes) as usize;
        // Cleaning that many together gains more than the pages of the checkpoint after it, even
        // where a sixteenth of each is dead.
        let pages = (u64::from(geometry.page_bytes) * 64).div_ceil(segment_bytes) as usize;
        let floor = upkeep + 4 + pages;
        // A store of few segments has none to spare for what comes in bursts.
        let kept = floor + (layout.streams() + 3).min(segments / 8 + 2);
        // What `make_room` asks for, and what is filled until a checkpoint frees what was
        // cleaned. The cleaner keeps up with what is written when an eighth is missing; as much
        // again is for what comes in bursts: long commits, merged runs.
        let filled = (log_bytes * 2).div_ceil(segment_bytes) as usize;
        let low = (kept + 2 + filled) * 8 / 7 + 1;
        // Each stream has a segment that it fills and one that it fills next. Segments have ends
        // that nothing fits into, and cleaning has to gain something.
        let filled = segments.saturating_sub(layout.streams() * 2 + kept) as u64;
        Self { floor, kept, low, capacity_bytes: filled * segment_bytes / 16 * 15, log_bytes }
    }
}

impl Core {
    fn segment_bytes(&self) -> u64 {
        u64::from(self.checkpoints.superblock.geometry.segment_bytes)
    }

    /// Segments that a checkpoint would take now: what the cleaner moved is in the log, too.
    pub fn due(&self) -> usize {
        // On the disk a pair takes at most half of what it takes in memory.
        let run_bytes = self.levels.unwritten_bytes() as u64 / 2;
        3 + run_bytes.div_ceil(self.segment_bytes()) as usize
    }

    /// Whether runs have so much that merging them is due before more is taken.
    fn is_crowded(&self, needed_bytes: u64) -> bool {
        let few = self.floor() as u64 * self.segment_bytes() / 4;
        !self.fits(needed_bytes) && self.merge_bytes() > (self.capacity_bytes() / 32).min(few)
    }

    /// Free segments that only what gives up, the cleaner and checkpoints may use.
    pub fn floor(&self) -> usize {
        self.reserve.floor
    }

    /// Free segments that groups which only add may not use.
    pub fn kept(&self) -> usize {
        self.reserve.kept
    }

    /// The cleaner begins when fewer segments are free.
    pub fn low(&self) -> usize {
        self.reserve.low
    }

    /// Bytes that groups can fill.
    pub fn capacity_bytes(&self) -> u64 {
        self.reserve.capacity_bytes
    }

    /// The store has this length from now on; yields the one that it had.
    pub fn set_geometry(&mut self, geometry: Geometry) -> Geometry {
        self.reserve = Reserve::of(&geometry, &*self.log.layout);
        std::mem::replace(&mut self.checkpoints.superblock.geometry, geometry)
    }

    /// Bytes that merging writes before it gives back what it merged.
    fn merge_bytes(&self) -> u64 {
        self.levels.run_bytes() + self.log.bytes
    }

    /// Whether so many bytes more leave enough for merging.
    pub fn fits(&self, needed_bytes: u64) -> bool {
        let (bytes, capacity) = (self.log.segments.held() + needed_bytes, self.capacity_bytes());
        // Runs are held, too: mostly it is clear without going through them.
        bytes * 2 + self.log.bytes <= capacity || bytes + self.merge_bytes() <= capacity
    }

    /// Segments that a group of so many bytes takes: at the end of each less is left than its
    /// next payload is long.
    fn taken_by(&self, bytes: u64) -> usize {
        let gap = self.log.payload_max() as u64
            + u64::from(self.checkpoints.superblock.geometry.page_bytes) * 2;
        let usable = self.segment_bytes().saturating_sub(gap).max(self.segment_bytes() / 4);
        bytes.div_ceil(usable) as usize
    }

    /// Bytes of segments that groups cannot fill.
    fn kept_bytes(&self) -> u64 {
        let geometry = &self.checkpoints.superblock.geometry;
        (u64::from(geometry.segments) * self.segment_bytes()).saturating_sub(self.capacity_bytes())
    }

    /// Sees that a group of `needed_bytes` fits. `frees` may use what is kept for that.
    pub fn ensure_space(&mut self, needed_bytes: u64, frees: bool) -> Result<()> {
        let kept = if frees { self.floor() } else { self.kept() };
        let needed = self.taken_by(needed_bytes) + kept;
        let is_roomy = match frees {
            true => !self.is_crowded(needed_bytes),
            false => self.fits(needed_bytes),
        };
        if self.log.segments.free() >= needed && is_roomy {
            return Ok(());
        }
        self.release();
        let now = self.standing(needed_bytes);
        let is_as_before = |was: &NoSpaceState| {
            NoSpaceState { needed_bytes, ..*was } == now && needed_bytes >= was.needed_bytes
        };
        if !frees && self.last_no_space.as_ref().is_some_and(is_as_before) {
            return Err(self.no_space(needed_bytes));
        }
        self.look_for_room(needed, needed_bytes, frees).map_err(|error| self.stop(error))?;
        // What gives up goes on as long as its checkpoint has room: a snapshot may keep what
        // was given up.
        let is_enough = match frees {
            true => self.log.segments.free() + self.floor() > needed + self.due(),
            false => self.log.segments.free() >= needed && self.fits(needed_bytes),
        };
        if is_enough {
            return Ok(());
        }
        if !frees {
            self.last_no_space = Some(self.standing(needed_bytes));
        }
        Err(self.no_space(needed_bytes))
    }

    /// Sees that so many bytes fit that come in any pieces.
    pub fn ensure_reservable(&mut self, bytes: u64) -> Result<()> {
        self.check_running()?;
        // With their entries, and what is lost at the ends of commits.
        self.ensure_space(
            bytes.saturating_add(bytes / 8).saturating_add(self.segment_bytes()),
            false,
        )
    }

    fn look_for_room(&mut self, needed: usize, needed_bytes: u64, frees: bool) -> Result<()> {
        if self.is_crowded(needed_bytes) || !frees && !self.fits(needed_bytes) {
            // What was overwritten may not be counted yet.
            self.checkpoint_now()?;
            if self.is_crowded(needed_bytes) {
                self.merge_now()?;
                self.checkpoint_now()?;
            }
            if !frees && !self.fits(needed_bytes) {
                return Ok(());
            }
        }
        self.reclaim_segments(needed)
    }

    pub fn no_space(&self, needed_bytes: u64) -> Error {
        let held = self.log.segments.held() + self.merge_bytes();
        let by_bytes = self.capacity_bytes().saturating_sub(held);
        // Not more than what was tried to be found.
        let segments = self.log.segments.free().saturating_sub(self.kept()) as u64;
        let free_bytes = by_bytes.min(segments * self.segment_bytes() / 4 * 3);
        Error::NoSpace { needed_bytes, free_bytes, kept_bytes: self.kept_bytes() }
    }

    fn standing(&self, needed_bytes: u64) -> NoSpaceState {
        let (groups, free) = (self.log.counters.groups, self.log.segments.free());
        NoSpaceState { needed_bytes, groups, free, epochs: self.checkpoints.pinned_segments.len() }
    }

    /// Looks for free segments until there are `needed`, or no more can be had: cleaning moves
    /// what is alive together, merging does away with what runs hide, and a checkpoint frees what
    /// came of both. Each needs a little room itself.
    pub fn reclaim_segments(&mut self, needed: usize) -> Result<()> {
        let (start, mut in_vain) = (self.log.segments.free(), 0);
        let mut best = start;
        let (mut is_counted, mut is_merged) = (false, false);
        loop {
            self.release();
            if self.log.segments.free() >= needed {
                return Ok(());
            }
            if self.checkpoints.written.is_some() {
                let _ = self.complete_checkpoint(MissPolicy::Block)?;
                continue;
            }
            // What was given up since the last checkpoint is not known to be dead. Where
            // that is little it is tried last.
            if !is_counted && self.log.bytes >= self.reserve.log_bytes / 4 {
                is_counted = true;
                self.checkpoint_now()?;
                continue;
            }
            // While a snapshot keeps what was given up, cleaning only uses up what is left.
            if !self.checkpoints.pinned_segments.is_empty() {
                if is_counted {
                    return Ok(());
                }
                is_counted = true;
                self.checkpoint_now()?;
                continue;
            }
            if in_vain >= IN_VAIN {
                if is_merged {
                    return Ok(());
                }
                (is_merged, in_vain) = (true, 0);
                self.merge_now()?;
                self.checkpoint_now()?;
                continue;
            }
            // A waiter does not pay for more than is missing, and for what the checkpoint takes
            // that gives it, unless that gains nothing.
            let waiting = self.cleaner.since.len() + self.cleaner.before.len();
            let missing = needed + self.due() - self.log.segments.free();
            let is_enough = in_vain < IN_VAIN / 2 && waiting >= missing;
            let can_clean = self.log.segments.free() > self.due() + 1;
            let is_due = is_enough
                || self.log.segments.has_empty()
                || !can_clean
                || (self.cleaner.cleaning.is_none() && !self.clean_best()?);
            if is_due {
                // The last try: what was given up may not be known to be dead.
                if waiting == 0 && !self.log.segments.has_empty() {
                    in_vain = IN_VAIN;
                    if is_counted {
                        continue;
                    }
                    is_counted = true;
                }
                self.checkpoint_now()?;
                in_vain += 1;
                if self.log.segments.free() > best {
                    (best, in_vain) = (self.log.segments.free(), 0);
                } else if self.log.segments.free() + 1 < start {
                    // It costs more than it gains.
                    return Ok(());
                }
                continue;
            }
            self.finish_cleaning()?;
        }
    }

    /// Begins to clean what is worth most; says whether anything is worth it.
    fn clean_best(&mut self) -> Result<bool> {
        let Some(number) = self.best_to_clean() else { return Ok(false) };
        let _ = self.begin_cleaning(number, MissPolicy::Block)?;
        Ok(true)
    }

    /// Makes all runs part of the tree, as far as there is room for that.
    pub fn merge_now(&mut self) -> Result<()> {
        let mut is_begun = false;
        loop {
            if self.levels.folding.is_none() && self.levels.merging.is_none() {
                if is_begun || self.levels.runs.is_empty() {
                    return Ok(());
                }
                is_begun = true;
                self.levels.to_merge = self.levels.runs.len();
                self.levels.schedule_merges(&self.log);
                continue;
            }
            if self.log.segments.free() <= self.due() {
                self.checkpoint_now()?;
                let (free, can_clean) =
                    (self.log.segments.free(), self.checkpoints.pinned_segments.is_empty());
                if free <= self.due() + 1 && can_clean && self.clean_best()? {
                    self.finish_cleaning()?;
                    self.checkpoint_now()?;
                }
                if self.log.segments.free() <= self.due() {
                    return Ok(());
                }
            }
            self.levels.compact_step(&mut self.log, 1024)?;
            let pairs = self.merged_at_once();
            let _ = self.levels.tree_merge_step(&mut self.log, pairs, MissPolicy::Block)?;
        }
    }

    /// Pairs that a step of merging may bring into the tree: each may change a leaf of its own,
    /// and what leads to it.
    pub fn merged_at_once(&self) -> usize {
        let room =
            self.log.segments.free().saturating_sub(self.due()) as u64 * self.segment_bytes();
        let pages = room / u64::from(self.checkpoints.superblock.geometry.page_bytes);
        (pages as usize / 4).clamp(1, 256)
    }
}
