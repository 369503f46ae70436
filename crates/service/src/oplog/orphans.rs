//! Orphan table of volumes without an orphan list on disk: saves the next worker a scan of all
//! inodes.
//!
//! ```text
//!   part A in use ──── it has grown: part B begins with all current orphans ────▶ both are read
//!   part A cleared ◀── the disk has accepted the change at which B was begun ──── part B in use
//! ```
//! Law 1: every orphan on the disk is in one of the two parts. The parts may contain other inodes.
//! Law 2: a part is cleared once the disk has accepted the change at which the other was begun.
//! Law 3: an overflowing part is marked as incomplete.

use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::Ordering;

use draconis_exchange::shm::SharedMemory;
use draconis_ext::InodeNumber;
use draconis_types::lock::{Mutex, MutexGuard};

use super::{ORPHAN_PART_OFFSET, ORPHAN_TABLE_OFFSET};

/// Number of inodes in a part.
const MAX_PART_INODES: u32 = (1 << 16) - 1;
/// Size of a part, which begins with its count.
const PART_BYTES: usize = (MAX_PART_INODES as usize + 1) * 4;
/// Size of the table in an oplog's memory.
pub(super) const TABLE_BYTES: usize = 2 * PART_BYTES;
/// Count of an overflowed part.
const OVERFLOW_COUNT: u32 = u32::MAX;
/// Number of inodes added to a part before the other one is begun.
const INSERTS_BEFORE_SWITCH: u32 = 512;

/// The table as seen by the worker that fills it.
pub(super) struct OrphanTable(Mutex<OrphanState>);

struct OrphanState {
    current_part: usize,
    /// Inodes that this worker has put into the part in use.
    present: HashSet<u32>,
    /// Count at which the other part is begun.
    switch_at: u32,
    /// Number of the change whose acceptance clears the other part.
    switched_at: Option<u64>,
    /// True during replay: numbers count the replayed changes.
    is_replaying: bool,
}

/// Returns all inodes that earlier workers recorded; `None` if there were too many.
pub(super) fn load_orphans(memory: &SharedMemory) -> Option<BTreeSet<InodeNumber>> {
    let mut found = BTreeSet::new();
    for part in 0..2 {
        let count = part_count(memory, part);
        if count > MAX_PART_INODES {
            return None;
        }
        let inode = |nth| memory.atomic_u32(entry_offset(part, nth)).load(Ordering::Relaxed);
        found.extend((0..count).map(|nth| InodeNumber(inode(nth))));
    }
    Some(found)
}

fn part_count(memory: &SharedMemory, part: usize) -> u32 {
    memory.atomic_u32(ORPHAN_TABLE_OFFSET + part * PART_BYTES).load(Ordering::Acquire)
}

fn set_part_count(memory: &SharedMemory, part: usize, count: u32) {
    memory.atomic_u32(ORPHAN_TABLE_OFFSET + part * PART_BYTES).store(count, Ordering::Release);
}

fn entry_offset(part: usize, nth: u32) -> usize {
    ORPHAN_TABLE_OFFSET + part * PART_BYTES + (nth as usize + 1) * 4
}

impl OrphanTable {
    /// Opens the table for the first worker of a mount, or for a successor.
    pub(super) fn new(memory: &SharedMemory, is_first: bool) -> Self {
        let current_part =
            memory.atomic_u64(ORPHAN_PART_OFFSET).load(Ordering::Acquire) as usize & 1;
        let (present, switched_at, is_replaying) = (HashSet::new(), None, !is_first);
        Self(Mutex::new(OrphanState {
            current_part,
            present,
            switch_at: INSERTS_BEFORE_SWITCH,
            switched_at,
            is_replaying,
        }))
    }

    /// Records an inode that change `number` makes an orphan; `others` returns the other orphans.
    pub(super) fn add(
        &self,
        memory: &SharedMemory,
        number: u64,
        inode: InodeNumber,
        others: &dyn Fn() -> Vec<InodeNumber>,
    ) {
        let mut known = self.lock_state();
        if !known.present.insert(inode.0) {
            return;
        }
        if !known.is_replaying
            && known.switched_at.is_none()
            && part_count(memory, known.current_part) >= known.switch_at
        {
            known.switch_parts(memory, number, others);
            known.present.insert(inode.0);
        }
        append_inode(memory, known.current_part, inode.0);
    }

    /// Handles that the disk has accepted all changes up to `number`.
    pub(super) fn clear_superseded_part(&self, memory: &SharedMemory, number: u64) {
        let mut known = self.lock_state();
        if known.switched_at.is_some_and(|turned_at| turned_at <= number) {
            known.switched_at = None;
            set_part_count(memory, 1 - known.current_part, 0);
        }
    }

    /// Ends the replay of the predecessor's requests.
    pub(super) fn end_replay(&self) {
        self.lock_state().is_replaying = false;
    }

    fn lock_state(&self) -> MutexGuard<'_, OrphanState> {
        self.0.lock()
    }
}

impl OrphanState {
    /// Switches to the other part if it is empty. Otherwise schedules that it is cleared.
    fn switch_parts(
        &mut self,
        memory: &SharedMemory,
        number: u64,
        others: &dyn Fn() -> Vec<InodeNumber>,
    ) {
        self.switched_at = Some(number);
        let next = 1 - self.current_part;
        if part_count(memory, next) != 0 {
            // An earlier worker has switched.
            return;
        }
        self.present.clear();
        // No reader uses that part before it is filled.
        for inode in others() {
            if self.present.insert(inode.0) {
                append_inode(memory, next, inode.0);
            }
        }
        memory.atomic_u64(ORPHAN_PART_OFFSET).store(next as u64, Ordering::Release);
        self.current_part = next;
        self.switch_at = part_count(memory, next).saturating_add(INSERTS_BEFORE_SWITCH);
    }
}

/// Appends an inode to a part.
fn append_inode(memory: &SharedMemory, part: usize, inode: u32) {
    match part_count(memory, part) {
        OVERFLOW_COUNT => {}
        count if count >= MAX_PART_INODES => set_part_count(memory, part, OVERFLOW_COUNT),
        count => {
            memory.atomic_u32(entry_offset(part, count)).store(inode, Ordering::Relaxed);
            set_part_count(memory, part, count + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use draconis_device::Random;

    use super::*;

    fn orphan_lister(all: &HashSet<u32>) -> impl Fn() -> Vec<InodeNumber> {
        || all.iter().copied().map(InodeNumber).collect()
    }

    /// A model volume: orphans in memory, orphans on the disk, and changes on their way to it.
    #[derive(Default)]
    struct ModelVolume {
        memory: HashSet<u32>,
        disk: HashSet<u32>,
        /// Changes that make an inode an orphan (true) or delete it (false).
        changes: VecDeque<(bool, u32)>,
        number: u64,
    }

    impl ModelVolume {
        fn apply_change(
            &mut self,
            log: &OrphanTable,
            memory: &SharedMemory,
            (dies, inode): (bool, u32),
        ) {
            self.number += 1;
            if dies {
                log.add(memory, self.number, InodeNumber(inode), &orphan_lister(&self.memory));
                self.memory.insert(inode);
            } else {
                self.memory.remove(&inode);
            }
        }

        /// The disk accepts the first `count` changes. The last `untold` of the queue are not
        /// replayed yet.
        fn accept_changes(
            &mut self,
            log: &OrphanTable,
            memory: &SharedMemory,
            count: usize,
            untold: usize,
        ) {
            for (dies, inode) in self.changes.drain(..count) {
                if dies {
                    self.disk.insert(inode)
                } else {
                    self.disk.remove(&inode)
                };
            }
            log.clear_superseded_part(memory, self.number - (self.changes.len() - untold) as u64);
            self.assert_disk_orphans_recorded(memory);
        }

        fn assert_disk_orphans_recorded(&self, memory: &SharedMemory) {
            let known = load_orphans(memory).unwrap();
            assert!(self.disk.iter().all(|inode| known.contains(&InodeNumber(*inode))));
        }
    }

    #[test]
    fn orphans_on_disk_are_recorded_after_worker_death() {
        let memory = super::super::create_memory().unwrap();
        let (mut random, mut model) = (Random::new(3), ModelVolume::default());
        let mut log = OrphanTable::new(&memory, true);
        for _ in 0..200_000 {
            let dies = model.memory.len() < 300 || random.once_in(2);
            let any = || model.memory.iter().next().copied().unwrap_or(1);
            let change = (dies, if dies { 12 + random.next_below(100_000) as u32 } else { any() });
            model.apply_change(&log, &memory, change);
            model.changes.push_back(change);
            if random.once_in(60) {
                let count = random.next_below(model.changes.len() as u64 + 1) as usize / 4;
                model.accept_changes(&log, &memory, count, 0);
            }
            if random.once_in(3000) {
                // The worker dies, and its successor replays the changes that the disk does not
                // have.
                model.assert_disk_orphans_recorded(&memory);
                log = OrphanTable::new(&memory, false);
                (model.memory, model.number) = (model.disk.clone(), 0);
                let again: Vec<_> = model.changes.iter().copied().collect();
                let dies_during_replay = random.once_in(3);
                for (nth, change) in again.iter().enumerate() {
                    model.apply_change(&log, &memory, *change);
                    if random.once_in(60) {
                        let count = random
                            .next_below((nth + 1 - (again.len() - model.changes.len())) as u64 + 1);
                        model.accept_changes(&log, &memory, count as usize, again.len() - nth - 1);
                    }
                }
                if !dies_during_replay {
                    log.end_replay();
                }
            }
        }
        log.end_replay();
        for _ in 0..4 {
            let count = model.changes.len();
            model.accept_changes(&log, &memory, count, 0);
            for inode in 0..2 * INSERTS_BEFORE_SWITCH {
                let change = (true, 200_000 + inode);
                model.apply_change(&log, &memory, change);
                model.apply_change(&log, &memory, (false, change.1));
                model.changes.extend([change, (false, change.1)]);
            }
        }
        let most = model.memory.len() + 6 * INSERTS_BEFORE_SWITCH as usize;
        assert!(load_orphans(&memory).unwrap().len() <= most, "what has gone is forgotten");
    }

    #[test]
    fn orphan_table_overflow_is_reported() {
        let memory = super::super::create_memory().unwrap();
        let log = OrphanTable::new(&memory, true);
        let nothing = HashSet::new();
        // Nothing is accepted meanwhile, so that no part can be cleared.
        for inode in 0..2 * MAX_PART_INODES + 2 {
            log.add(&memory, u64::from(inode) + 1, InodeNumber(inode), &orphan_lister(&nothing));
        }
        assert_eq!(load_orphans(&memory), None);
        // The disk accepts all of that, and few orphans are left.
        let number = u64::from(2 * MAX_PART_INODES + 3);
        log.clear_superseded_part(&memory, number);
        log.add(&memory, number + 1, InodeNumber(7), &orphan_lister(&nothing));
        log.add(&memory, number + 2, InodeNumber(u32::MAX), &orphan_lister(&nothing));
        log.clear_superseded_part(&memory, number + 2);
        assert_eq!(load_orphans(&memory), Some([InodeNumber(7), InodeNumber(u32::MAX)].into()));
        // The count of a hostile worker.
        set_part_count(&memory, 0, MAX_PART_INODES + 1);
        assert_eq!(load_orphans(&memory), None);
    }
}
