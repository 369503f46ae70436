//! Which inodes have no name, on volumes that do not list them: remembered for the next worker,
//! which would have to look at every inode.
//!
//! ```text
//!   one part is filled ──── it has grown: the other begins with all that have no name now ───▶
//!   the other is empty ◀─── the disk has taken the change at which that was ─── both are kept
//! ```
//! Law 1: what has no name on the disk is in one of the parts. There may be others.
//! Law 2: a part is emptied once the disk is past the moment at which the other began.
//! Law 3: what does not fit is not forgotten: the part says that it is not all.

use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

use draconis_exchange::shm::SharedMemory;
use draconis_ext::InodeNumber;

use super::{FILLED_AT, ORPHANS_AT};

/// Inodes that a part holds.
const PART_CAPACITY: u32 = (1 << 16) - 1;
/// A part begins with its count.
const PART_BYTES: usize = (PART_CAPACITY as usize + 1) * 4;
/// In the memory of a log.
pub(super) const BYTES: usize = 2 * PART_BYTES;
/// In place of a count: there were more.
const OVERFLOW: u32 = u32::MAX;
/// So much more than it began with has a part before the other is begun.
const SWITCH_AFTER: u32 = 512;

/// What of it is known to the worker that fills it.
pub(super) struct OrphanTable(Mutex<OrphanState>);

struct OrphanState {
    filled: usize,
    /// Those in the part that is filled, as far as this worker has put them there.
    present: HashSet<u32>,
    /// With so many the other part is begun.
    switch_at: u32,
    /// The other part is empty once the disk has taken this change.
    switched_at: Option<u64>,
    /// What the worker before has left is done again, and numbers count that.
    is_replaying: bool,
}

/// All that workers before have left; nothing if there were too many.
pub(super) fn load_orphans(memory: &SharedMemory) -> Option<BTreeSet<InodeNumber>> {
    let mut found = BTreeSet::new();
    for part in 0..2 {
        let count = count(memory, part);
        if count > PART_CAPACITY {
            return None;
        }
        let inode = |nth| memory.atomic_u32(entry_offset(part, nth)).load(Ordering::Relaxed);
        found.extend((0..count).map(|nth| InodeNumber(inode(nth))));
    }
    Some(found)
}

fn count(memory: &SharedMemory, part: usize) -> u32 {
    memory.atomic_u32(ORPHANS_AT + part * PART_BYTES).load(Ordering::Acquire)
}

fn set_count(memory: &SharedMemory, part: usize, count: u32) {
    memory.atomic_u32(ORPHANS_AT + part * PART_BYTES).store(count, Ordering::Release);
}

fn entry_offset(part: usize, nth: u32) -> usize {
    ORPHANS_AT + part * PART_BYTES + (nth as usize + 1) * 4
}

impl OrphanTable {
    /// What the first worker of a mount knows, or one that follows another.
    pub(super) fn new(memory: &SharedMemory, is_first: bool) -> Self {
        let filled = memory.atomic_u64(FILLED_AT).load(Ordering::Acquire) as usize & 1;
        let (there, turned_at, repeats) = (HashSet::new(), None, !is_first);
        Self(Mutex::new(OrphanState {
            filled,
            present: there,
            switch_at: SWITCH_AFTER,
            switched_at: turned_at,
            is_replaying: repeats,
        }))
    }

    /// Remembers an inode that the change of that number leaves without a name; `others` have none
    /// by now.
    pub(super) fn add(
        &self,
        memory: &SharedMemory,
        number: u64,
        inode: InodeNumber,
        others: &dyn Fn() -> Vec<InodeNumber>,
    ) {
        let mut known = self.known();
        if !known.present.insert(inode.0) {
            return;
        }
        if !known.is_replaying
            && known.switched_at.is_none()
            && count(memory, known.filled) >= known.switch_at
        {
            known.switch_parts(memory, number, others);
            known.present.insert(inode.0);
        }
        push(memory, known.filled, inode.0);
    }

    /// The disk has taken all changes up to this one.
    pub(super) fn on_chain_accepted(&self, memory: &SharedMemory, number: u64) {
        let mut known = self.known();
        if known.switched_at.is_some_and(|turned_at| turned_at <= number) {
            known.switched_at = None;
            set_count(memory, 1 - known.filled, 0);
        }
    }

    /// What the worker before has left was done again.
    pub(super) fn end_replay(&self) {
        self.known().is_replaying = false;
    }

    fn known(&self) -> MutexGuard<'_, OrphanState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OrphanState {
    /// Fills the other part from now on, where there is nothing; else sees to it that there will
    /// be nothing.
    fn switch_parts(
        &mut self,
        memory: &SharedMemory,
        number: u64,
        others: &dyn Fn() -> Vec<InodeNumber>,
    ) {
        self.switched_at = Some(number);
        let next = 1 - self.filled;
        if count(memory, next) != 0 {
            // A worker before has turned.
            return;
        }
        self.present.clear();
        // Nothing finds it there before it is filled.
        for inode in others() {
            if self.present.insert(inode.0) {
                push(memory, next, inode.0);
            }
        }
        memory.atomic_u64(FILLED_AT).store(next as u64, Ordering::Release);
        self.filled = next;
        self.switch_at = count(memory, next).saturating_add(SWITCH_AFTER);
    }
}

/// Puts an inode into a part.
fn push(memory: &SharedMemory, part: usize, inode: u32) {
    match count(memory, part) {
        OVERFLOW => {}
        count if count >= PART_CAPACITY => set_count(memory, part, OVERFLOW),
        count => {
            memory.atomic_u32(entry_offset(part, count)).store(inode, Ordering::Relaxed);
            set_count(memory, part, count + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use draconis_device::Random;

    use super::*;

    fn others(all: &HashSet<u32>) -> impl Fn() -> Vec<InodeNumber> {
        || all.iter().copied().map(InodeNumber).collect()
    }

    /// A volume: what has no name in memory, what on the disk, and what of it is on its way.
    #[derive(Default)]
    struct Model {
        memory: HashSet<u32>,
        disk: HashSet<u32>,
        /// Inodes that lose their names, or are gone.
        changes: VecDeque<(bool, u32)>,
        number: u64,
    }

    impl Model {
        fn change(&mut self, log: &OrphanTable, memory: &SharedMemory, (dies, inode): (bool, u32)) {
            self.number += 1;
            if dies {
                log.add(memory, self.number, InodeNumber(inode), &others(&self.memory));
                self.memory.insert(inode);
            } else {
                self.memory.remove(&inode);
            }
        }

        /// The disk takes some of what has changed, of which the last `untold` are to be.
        fn take(&mut self, log: &OrphanTable, memory: &SharedMemory, count: usize, untold: usize) {
            for (dies, inode) in self.changes.drain(..count) {
                if dies {
                    self.disk.insert(inode)
                } else {
                    self.disk.remove(&inode)
                };
            }
            log.on_chain_accepted(memory, self.number - (self.changes.len() - untold) as u64);
            self.is_known(memory);
        }

        fn is_known(&self, memory: &SharedMemory) {
            let known = load_orphans(memory).unwrap();
            assert!(self.disk.iter().all(|inode| known.contains(&InodeNumber(*inode))));
        }
    }

    #[test]
    fn what_has_no_name_on_the_disk_is_known_after_any_death() {
        let memory = super::super::create_memory().unwrap();
        let (mut random, mut model) = (Random::new(3), Model::default());
        let mut log = OrphanTable::new(&memory, true);
        for _ in 0..200_000 {
            let dies = model.memory.len() < 300 || random.once_in(2);
            let any = || model.memory.iter().next().copied().unwrap_or(1);
            let change = (dies, if dies { 12 + random.below(100_000) as u32 } else { any() });
            model.change(&log, &memory, change);
            model.changes.push_back(change);
            if random.once_in(60) {
                let count = random.below(model.changes.len() as u64 + 1) as usize / 4;
                model.take(&log, &memory, count, 0);
            }
            if random.once_in(3000) {
                // The worker dies, and another does again what the disk does not have.
                model.is_known(&memory);
                log = OrphanTable::new(&memory, false);
                (model.memory, model.number) = (model.disk.clone(), 0);
                let again: Vec<_> = model.changes.iter().copied().collect();
                let dies_on_the_way = random.once_in(3);
                for (nth, change) in again.iter().enumerate() {
                    model.change(&log, &memory, *change);
                    if random.once_in(60) {
                        let count = random
                            .below((nth + 1 - (again.len() - model.changes.len())) as u64 + 1);
                        model.take(&log, &memory, count as usize, again.len() - nth - 1);
                    }
                }
                if !dies_on_the_way {
                    log.end_replay();
                }
            }
        }
        log.end_replay();
        for _ in 0..4 {
            let count = model.changes.len();
            model.take(&log, &memory, count, 0);
            for inode in 0..2 * SWITCH_AFTER {
                let change = (true, 200_000 + inode);
                model.change(&log, &memory, change);
                model.change(&log, &memory, (false, change.1));
                model.changes.extend([change, (false, change.1)]);
            }
        }
        let most = model.memory.len() + 6 * SWITCH_AFTER as usize;
        assert!(load_orphans(&memory).unwrap().len() <= most, "what has gone is forgotten");
    }

    #[test]
    fn more_than_there_is_room_for_are_said_to_be_more() {
        let memory = super::super::create_memory().unwrap();
        let log = OrphanTable::new(&memory, true);
        let nothing = HashSet::new();
        // Nothing is taken meanwhile, so that no part can be emptied.
        for inode in 0..2 * PART_CAPACITY + 2 {
            log.add(&memory, u64::from(inode) + 1, InodeNumber(inode), &others(&nothing));
        }
        assert_eq!(load_orphans(&memory), None);
        // Once the disk has all of that, and there are few.
        let number = u64::from(2 * PART_CAPACITY + 3);
        log.on_chain_accepted(&memory, number);
        log.add(&memory, number + 1, InodeNumber(7), &others(&nothing));
        log.add(&memory, number + 2, InodeNumber(u32::MAX), &others(&nothing));
        log.on_chain_accepted(&memory, number + 2);
        assert_eq!(load_orphans(&memory), Some([InodeNumber(7), InodeNumber(u32::MAX)].into()));
        // A hostile worker's count.
        set_count(&memory, 0, PART_CAPACITY + 1);
        assert_eq!(load_orphans(&memory), None);
    }
}
