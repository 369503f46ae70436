//! The exchange heap of one session: slots that two processes map, and their owners.
//!
//! ```text
//!            alloc            export              import
//!     Free ────────▶ Held ───────────▶ Away ──────────────▶ Held       at the slot's home
//!      ▲              │ drop            │ peer released it, or is dead
//!      └──────────────┴─────────────────┘
//!
//!     Away ── import ──▶ Held ── export, or drop and release ──▶ Away      at the other side
//! ```
//!
//! Every slot has a home: the side that allocates it. Each side keeps its own table in private
//! memory. Shared memory holds bytes, and hints that harm only a lying peer itself.
//!
//! Law 1: a slot has one state: Free, Held by one [`Block`], or Away (exported to the peer).
//! Law 2: a slot is named by index and generation. The generation grows with every export from
//! home, so old names never become valid again. A slot without unused generations retires.
//! Law 3: an Away slot is reused only after the peer has returned or released it, or after the
//! peer's death is confirmed.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicU64, Ordering::*},
};

use draconis_types::lock::Mutex;
use draconis_types::{Block, BlockMemory};

use super::page_pool::PoolSlice;
use crate::{shm::SharedMemory, violation::Violation};

/// A block's name on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockName {
    /// Index of the slot.
    pub slot: u32,
    /// Number of exports of the slot.
    pub generation: u32,
    /// Length of the block in bytes.
    pub len: u32,
}

/// Slot number of pool memory; the generation then holds the offset in it.
const POOL_SLOT: u32 = u32::MAX;

/// Maximum generation of a slot.
const MAX_GENERATION: u32 = (1 << 31) - 1;

/// Slots of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotClass {
    /// Size of a slot in bytes: a multiple of 4096.
    pub slot_bytes: u32,
    /// Number of slots.
    pub slots: u32,
}

/// State of a slot, as this side sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SlotState {
    Free,
    Held,
    Exported,
    Retired,
}

/// One entry of the table, packed into 64 bits: state 2, generation 31, length 31.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct SlotEntry {
    state: SlotState,
    generation: u32,
    len: u32,
}

impl SlotEntry {
    const fn to_bits(self) -> u64 {
        (self.state as u64) << 62 | (self.generation as u64) << 31 | self.len as u64
    }

    const fn from_bits(bits: u64) -> Self {
        let state = match bits >> 62 {
            0 => SlotState::Free,
            1 => SlotState::Held,
            2 => SlotState::Exported,
            _ => SlotState::Retired,
        };
        let mask = (1 << 31) - 1;
        Self { state, generation: (bits >> 31 & mask) as u32, len: (bits & mask) as u32 }
    }
}

#[derive(Debug)]
struct Slot {
    at: usize,
    bytes: u32,
    /// True if this side allocates it.
    is_own: bool,
    entry: AtomicU64,
}

impl Slot {
    fn load(&self) -> SlotEntry {
        SlotEntry::from_bits(self.entry.load(Acquire))
    }

    fn store(&self, entry: SlotEntry) {
        self.entry.store(entry.to_bits(), Release);
    }

    fn compare_exchange(&self, from: SlotEntry, to: SlotEntry) -> bool {
        self.entry.compare_exchange(from.to_bits(), to.to_bits(), AcqRel, Acquire).is_ok()
    }
}

/// Free slots of one size, at their home.
#[derive(Debug)]
struct FreeList {
    slot_bytes: u32,
    free: Mutex<Vec<u32>>,
}

impl FreeList {
    fn with_free_slots<T>(&self, f: impl FnOnce(&mut Vec<u32>) -> T) -> T {
        f(&mut self.free.lock())
    }
}

/// One side's view of the slots that two processes share.
#[derive(Debug)]
pub struct Arena {
    shared: Arc<SharedMemory>,
    /// Offset of the release words: one per slot, in which the importing side reports a release.
    release_words_at: usize,
    slots: Box<[Slot]>,
    free: Box<[FreeList]>,
    /// Pool memory that both sides map and one of them writes.
    pool_memory: OnceLock<Arc<SharedMemory>>,
}

/// Bytes of one side's slots by state. They add up to the size of the arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HeapUsage {
    /// Not allocated.
    pub free_bytes: u64,
    /// In blocks of this side.
    pub held_bytes: u64,
    /// Exported to the peer.
    pub exported_bytes: u64,
    /// In slots without unused generations.
    pub retired_bytes: u64,
    /// In the peer's slots that this side holds; not part of the sum.
    pub borrowed_bytes: u64,
}

impl HeapUsage {
    /// Returns the bytes of all slots of this side.
    pub fn total_bytes(&self) -> u64 {
        self.free_bytes + self.held_bytes + self.exported_bytes + self.retired_bytes
    }
}

/// Returns the bytes that the release words and the slots of `classes` take in shared memory.
pub(crate) fn layout_bytes(classes: &[&[SlotClass]]) -> Option<(usize, usize)> {
    let mut slots = 0u64;
    let mut bytes = 0u64;
    for class in classes.iter().copied().flatten() {
        if class.slot_bytes == 0 || class.slot_bytes % 4096 != 0 || class.slot_bytes >= 1 << 30 {
            return None;
        }
        slots = slots.checked_add(class.slots.into())?;
        bytes = bytes.checked_add(u64::from(class.slot_bytes) * u64::from(class.slots))?;
    }
    let words = usize::try_from(slots * 4).ok()?.next_multiple_of(4096);
    Some((words, usize::try_from(bytes).ok()?))
}

impl Arena {
    /// Creates the view of the side that owns the slots `ours`. Release words start at `let_go_at`
    /// and slots at `slots_at`, the host's classes first.
    pub(crate) fn new(
        shared: Arc<SharedMemory>,
        release_words_at: usize,
        slots_at: usize,
        host: &[SlotClass],
        guest: &[SlotClass],
        we_are_host: bool,
    ) -> Self {
        let mut slots = Vec::new();
        let mut lists: Vec<(u32, Vec<u32>)> = Vec::new();
        let mut at = slots_at;
        for (classes, is_own) in [(host, we_are_host), (guest, !we_are_host)] {
            for class in classes {
                let state = if is_own { SlotState::Free } else { SlotState::Exported };
                let entry = SlotEntry { state, generation: 0, len: 0 };
                let first = slots.len() as u32;
                for _ in 0..class.slots {
                    let entry = AtomicU64::new(entry.to_bits());
                    slots.push(Slot { at, bytes: class.slot_bytes, is_own, entry });
                    at += class.slot_bytes as usize;
                }
                if is_own {
                    lists.push((class.slot_bytes, (first..slots.len() as u32).rev().collect()));
                }
            }
        }
        lists.sort_by_key(|(slot_bytes, _)| *slot_bytes);
        let free = lists
            .into_iter()
            .map(|(slot_bytes, free)| FreeList { slot_bytes, free: Mutex::new(free) })
            .collect();
        Self { shared, release_words_at, slots: slots.into(), free, pool_memory: OnceLock::new() }
    }

    /// Allocates a block of `len` bytes in the smallest free slot that is large enough. Its
    /// contents are undefined. `None` if no such slot is free.
    pub fn allocate_block(self: &Arc<Self>, len: usize) -> Option<Block> {
        self.allocate(len).map(Block::from)
    }

    fn allocate(self: &Arc<Self>, len: usize) -> Option<OwnedSlot> {
        let index = self.pop(len).or_else(|| {
            self.collect_released();
            self.pop(len)
        })?;
        let slot = &self.slots[index as usize];
        let generation = slot.load().generation;
        // A slot is smaller than 2^30 bytes, and `len` fits it.
        slot.store(SlotEntry { state: SlotState::Held, generation, len: len as u32 });
        Some(OwnedSlot::new(self, index, len as u32))
    }

    fn pop(&self, len: usize) -> Option<u32> {
        self.free
            .iter()
            .filter(|list| list.slot_bytes as usize >= len)
            .find_map(|list| list.with_free_slots(Vec::pop))
    }

    fn push(&self, index: u32) {
        let bytes = self.slots[index as usize].bytes;
        if let Some(list) = self.free.iter().find(|list| list.slot_bytes == bytes) {
            list.with_free_slots(|free| free.push(index));
        }
    }

    fn release_word(&self, index: u32) -> &std::sync::atomic::AtomicU32 {
        self.shared.atomic_u32(self.release_words_at + index as usize * 4)
    }

    /// Exports a block to the peer; returns its name. Private memory, and slots of other arenas,
    /// are first copied into a slot of this one; `None` if the arena is full.
    pub(crate) fn export(self: &Arc<Self>, block: Block) -> Option<BlockName> {
        if let (Some(lent), Some(memory)) = (block.memory::<PoolSlice>(), self.pool_memory.get())
            && let Some(generation) = lent.offset_in(memory)
        {
            return Some(BlockName { slot: POOL_SLOT, generation, len: lent.len_bytes() as u32 });
        }
        match block.into_memory::<OwnedSlot>() {
            Ok(held) if held.is_exportable(self) => Some(self.mark_exported(held)),
            Ok(held) => self.copy_into_slot(&held.into()).map(|held| self.mark_exported(held)),
            Err(private) => self.copy_into_slot(&private).map(|held| self.mark_exported(held)),
        }
    }

    fn copy_into_slot(self: &Arc<Self>, block: &Block) -> Option<OwnedSlot> {
        let mut held = self.allocate(block.len())?;
        let mut piece = [0; 4096];
        for at in (0..block.filled_len()).step_by(piece.len()) {
            let n = block.copy_out(at, &mut piece);
            held.copy_in(at, &piece[..n]);
        }
        Some(held)
    }

    fn mark_exported(&self, mut held: OwnedSlot) -> BlockName {
        held.arena = None;
        let slot = &self.slots[held.index as usize];
        let mut entry = slot.load();
        debug_assert_eq!(entry.state, SlotState::Held);
        if slot.is_own {
            entry.generation += 1;
        }
        let len = held.len;
        slot.store(SlotEntry { state: SlotState::Exported, len, ..entry });
        BlockName { slot: held.index, generation: entry.generation, len }
    }

    /// Imports a block of the peer: a slot, or a range of pool memory.
    pub(crate) fn import(self: &Arc<Self>, name: BlockName) -> Result<Block, Violation> {
        match self.pool_memory.get().filter(|_| name.slot == POOL_SLOT) {
            Some(memory) => PoolSlice::from_peer(memory, name.generation, name.len)
                .map(Block::from_memory)
                .ok_or(Violation::PoolRange(name.generation)),
            None => self.import_slot(name).map(Block::from),
        }
    }

    /// Registers pool memory, which both sides map and one of them writes. Both sides call this
    /// once, before any of it is exported.
    pub(crate) fn register_pool(&self, memory: Arc<SharedMemory>) {
        // A second registration is ignored.
        let _ = self.pool_memory.set(memory);
    }

    /// Imports a slot that the peer exported.
    pub(crate) fn import_slot(self: &Arc<Self>, name: BlockName) -> Result<OwnedSlot, Violation> {
        let index = name.slot;
        let slot = self.slots.get(index as usize).ok_or(Violation::Slot(index))?;
        let entry = slot.load();
        if entry.state != SlotState::Exported {
            return Err(Violation::Owner(index));
        }
        let fresh = if slot.is_own {
            name.generation == entry.generation
        } else {
            name.generation > entry.generation && name.generation <= MAX_GENERATION
        };
        if !fresh {
            return Err(Violation::Generation(index));
        }
        if name.len > slot.bytes || (slot.is_own && name.len != entry.len) {
            return Err(Violation::BlockLength(index));
        }
        let held = SlotEntry { state: SlotState::Held, generation: name.generation, len: name.len };
        // A peer may offer the same slot on two lanes at once; only one import succeeds.
        if !slot.compare_exchange(entry, held) {
            return Err(Violation::Owner(index));
        }
        Ok(OwnedSlot::new(self, index, name.len))
    }

    /// Takes back the export of a message that was never sent.
    pub(crate) fn cancel_export(self: &Arc<Self>, name: BlockName) -> Option<OwnedSlot> {
        let slot = self.slots.get(name.slot as usize)?;
        let given =
            SlotEntry { state: SlotState::Exported, generation: name.generation, len: name.len };
        let held = SlotEntry { state: SlotState::Held, ..given };
        slot.compare_exchange(given, held).then(|| OwnedSlot::new(self, name.slot, name.len))
    }

    fn release_slot(&self, index: u32) {
        let slot = &self.slots[index as usize];
        let entry = slot.load();
        if slot.is_own {
            self.free(index, entry);
        } else {
            slot.store(SlotEntry { state: SlotState::Exported, ..entry });
            self.release_word(index).store(entry.generation, Release);
        }
    }

    fn free(&self, index: u32, from: SlotEntry) {
        let retire = from.generation >= MAX_GENERATION - 1;
        let state = if retire { SlotState::Retired } else { SlotState::Free };
        let to = SlotEntry { state, generation: from.generation, len: 0 };
        if self.slots[index as usize].compare_exchange(from, to) && !retire {
            self.push(index);
        }
    }

    /// Frees the slots that the peer has released.
    fn collect_released(&self) {
        self.free_exported_where(|index, entry| {
            self.release_word(index).load(Acquire) == entry.generation
        });
    }

    /// Frees all exported slots. Only after the peer's death is confirmed.
    pub(crate) fn reclaim_exported(&self) {
        self.free_exported_where(|_, _| true);
    }

    fn free_exported_where(&self, which: impl Fn(u32, SlotEntry) -> bool) {
        for (index, slot) in self.slots.iter().enumerate().filter(|(_, slot)| slot.is_own) {
            // There are at most 2^32 slots: names count them so.
            let (index, entry) = (index as u32, slot.load());
            if entry.state == SlotState::Exported && which(index, entry) {
                self.free(index, entry);
            }
        }
    }

    /// Returns the bytes by state.
    pub fn usage(&self) -> HeapUsage {
        self.collect_released();
        let mut audit = HeapUsage::default();
        for slot in &self.slots {
            let bytes = u64::from(slot.bytes);
            match (slot.load().state, slot.is_own) {
                (SlotState::Free, _) => audit.free_bytes += bytes,
                (SlotState::Retired, _) => audit.retired_bytes += bytes,
                (SlotState::Held, true) => audit.held_bytes += bytes,
                (SlotState::Exported, true) => audit.exported_bytes += bytes,
                (SlotState::Held, false) => audit.borrowed_bytes += bytes,
                (SlotState::Exported, false) => {}
            }
        }
        audit
    }
}

/// A slot held by a block of this side. Dropping it returns the slot.
pub(crate) struct OwnedSlot {
    /// `None` only once the slot was exported.
    arena: Option<Arc<Arena>>,
    index: u32,
    at: usize,
    len: u32,
}

impl OwnedSlot {
    fn new(arena: &Arc<Arena>, index: u32, len: u32) -> Self {
        Self { arena: Some(arena.clone()), index, at: arena.slots[index as usize].at, len }
    }

    fn is_exportable(&self, arena: &Arc<Arena>) -> bool {
        self.arena.as_ref().is_some_and(|mine| Arc::ptr_eq(mine, arena))
            && arena.slots[self.index as usize].load().generation < MAX_GENERATION
    }
}

impl BlockMemory for OwnedSlot {
    fn len_bytes(&self) -> usize {
        self.len as usize
    }

    fn copy_out(&self, at: usize, into: &mut [u8]) {
        if let Some(arena) = &self.arena {
            arena.shared.copy_out(self.at + at, into);
        }
    }

    fn is_writable(&self) -> bool {
        true
    }

    fn copy_in(&mut self, at: usize, from: &[u8]) {
        if let Some(arena) = &self.arena {
            arena.shared.copy_in(self.at + at, from);
        }
    }
}

impl From<OwnedSlot> for Block {
    fn from(slot: OwnedSlot) -> Self {
        Self::from_memory(slot)
    }
}

impl std::fmt::Debug for OwnedSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "slot {}, {} bytes", self.index, self.len)
    }
}

impl Drop for OwnedSlot {
    fn drop(&mut self) {
        if let Some(arena) = self.arena.take() {
            arena.release_slot(self.index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLASSES: [SlotClass; 2] =
        [SlotClass { slot_bytes: 4096, slots: 3 }, SlotClass { slot_bytes: 8192, slots: 1 }];

    fn arena_pair() -> (Arc<Arena>, Arc<Arena>) {
        let (words, bytes) = layout_bytes(&[&CLASSES, &[]]).unwrap();
        let shared = Arc::new(SharedMemory::new(words + bytes).unwrap());
        let side = |host| Arc::new(Arena::new(shared.clone(), 0, words, &CLASSES, &[], host));
        (side(true), side(false))
    }

    const TOTAL_BYTES: u64 = 3 * 4096 + 8192;

    #[track_caller]
    fn assert_usage(arena: &Arena, free: u64, held: u64, away: u64) {
        let audit = arena.usage();
        assert_eq!((audit.free_bytes, audit.held_bytes, audit.exported_bytes), (free, held, away));
        assert_eq!(audit.total_bytes(), TOTAL_BYTES);
    }

    #[test]
    fn exported_block_returns_to_owner() {
        let (home, peer) = arena_pair();
        let mut block = home.allocate_block(10).unwrap();
        block.copy_in(0, b"there");
        let name = home.export(block).unwrap();
        assert_usage(&home, TOTAL_BYTES - 4096, 0, 4096);
        let mut there = Block::from(peer.import_slot(name).unwrap());
        assert_eq!(peer.usage().borrowed_bytes, 4096);
        let mut bytes = [0; 5];
        there.copy_out(0, &mut bytes);
        assert_eq!(&bytes, b"there");
        there.copy_in(0, b"again");
        let back = Block::from(home.import_slot(peer.export(there).unwrap()).unwrap());
        assert_eq!(&back.into_private()[..5], b"again");
        assert_usage(&home, TOTAL_BYTES, 0, 0);
    }

    #[test]
    fn block_dropped_by_peer_is_freed() {
        let (home, peer) = arena_pair();
        let name = home.export(home.allocate_block(8000).unwrap()).unwrap();
        assert!(home.allocate_block(8000).is_none(), "the only large slot is away");
        drop(peer.import_slot(name).unwrap());
        assert!(home.allocate_block(8000).is_some());
        assert_usage(&home, TOTAL_BYTES, 0, 0);
    }

    #[test]
    fn dead_peer_blocks_are_freed_by_reclaim() {
        let (home, peer) = arena_pair();
        let name = home.export(home.allocate_block(1).unwrap()).unwrap();
        std::mem::forget(peer.import_slot(name));
        assert_usage(&home, TOTAL_BYTES - 4096, 0, 4096);
        home.reclaim_exported();
        assert_usage(&home, TOTAL_BYTES, 0, 0);
        assert_eq!(home.import_slot(name).unwrap_err(), Violation::Owner(0));
    }

    #[test]
    fn invalid_block_names_are_violations() {
        let (home, peer) = arena_pair();
        let name = home.export(home.allocate_block(100).unwrap()).unwrap();
        let cases = [
            (BlockName { slot: 99, ..name }, Violation::Slot(99)),
            (BlockName { slot: 1, ..name }, Violation::Owner(1)),
            (BlockName { generation: 0, ..name }, Violation::Generation(0)),
            (BlockName { generation: 2, ..name }, Violation::Generation(0)),
            (BlockName { len: 101, ..name }, Violation::BlockLength(0)),
        ];
        for (lie, violation) in cases {
            assert_eq!(home.import_slot(lie).unwrap_err(), violation);
        }
        let there = peer.import_slot(name).unwrap();
        assert_eq!(peer.import_slot(name).unwrap_err(), Violation::Owner(0), "given twice");
        drop(there);
        assert_eq!(peer.import_slot(name).unwrap_err(), Violation::Generation(0), "replayed");
        let long = BlockName { generation: 7, len: 4097, slot: 0 };
        assert_eq!(peer.import_slot(long).unwrap_err(), Violation::BlockLength(0));
    }

    #[test]
    fn pool_range_is_imported_only_within_pool() {
        let (home, peer) = arena_pair();
        let name = |at, len| BlockName { slot: POOL_SLOT, generation: at, len };
        assert_eq!(
            home.import(name(0, 1)).unwrap_err(),
            Violation::Slot(POOL_SLOT),
            "none is known"
        );
        let memory = Arc::new(SharedMemory::new(2 * 4096).unwrap());
        [&home, &peer].into_iter().for_each(|side| side.register_pool(memory.clone()));
        memory.copy_in(4090, b"here");
        for (at, len) in
            [(8192, 1), (8191, 2), (0, 8193), (1, u32::MAX), (u32::MAX, u32::MAX), (100, 0)]
        {
            let refused = home.import(name(at, len)).unwrap_err();
            assert_eq!(refused, Violation::PoolRange(at), "{at} {len}");
        }
        for (at, len) in [(0, 8192), (8191, 1), (4090, 4), (4090, 4)] {
            assert_eq!(home.import(name(at, len)).unwrap().len(), len as usize);
        }
        assert_eq!(&home.import(name(4090, 4)).unwrap().into_private()[..], b"here");
        assert_usage(&home, TOTAL_BYTES, 0, 0);
    }

    #[test]
    fn slot_with_exhausted_generation_retires() {
        let (home, _) = arena_pair();
        let worn = SlotEntry { state: SlotState::Free, generation: MAX_GENERATION - 1, len: 0 };
        home.slots[0].store(worn);
        assert_eq!(SlotEntry::from_bits(worn.to_bits()), worn);
        drop(home.allocate_block(1).unwrap());
        let audit = home.usage();
        assert_eq!((audit.retired_bytes, audit.total_bytes()), (4096, TOTAL_BYTES));
    }

    #[test]
    fn exporting_private_memory_copies_into_slot() {
        let (home, peer) = arena_pair();
        let mut private = Block::private(5000);
        private.copy_in(4990, b"the end");
        let name = home.export(private).unwrap();
        let mut bytes = [0; 7];
        Block::from(peer.import_slot(name).unwrap()).copy_out(4990, &mut bytes);
        assert_eq!(&bytes, b"the end");
        assert!(home.export(Block::private(8193)).is_none());
    }
}
