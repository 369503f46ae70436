//! Cost of updates of a nearly full store, and of waits for them.

use std::sync::Arc;

use draconis_objects::kv::{Batch, Kv};
use draconis_objects::{
    Counters, CreateOptions, Error, Group, LayoutKind, LifetimeHint, ObjectId, OpenOptions,
    Profile, Store, Ticket,
};
use draconis_testkit::sim::SimDisk;

const BLOCK_BYTES: u64 = 512;

/// Creates and opens a store with one object.
fn store_with_object(
    layout: LayoutKind,
    disk: Arc<SimDisk>,
    segment_bytes: u32,
) -> (Arc<Store>, ObjectId) {
    let profile = Profile { layout, page_bytes: 4096, segment_bytes, queue_depth: 32 };
    Store::create(disk.clone(), &CreateOptions { profile, id: 1 }).unwrap();
    let store = Store::open(disk, &OpenOptions::default()).unwrap();
    let new = store.new_object();
    let id = new.id();
    let mut group = Group::new();
    group.create(new, LifetimeHint::Unknown);
    store.submit(group, &[]).unwrap();
    (store, id)
}

struct NearlyFullStore {
    disk: Arc<SimDisk>,
    store: Arc<Store>,
    id: ObjectId,
    blocks: u64,
    dice: u64,
}

impl NearlyFullStore {
    /// Creates a store of `bytes`, `percent` of which are filled with blocks.
    fn create_filled(layout: LayoutKind, disk: Arc<SimDisk>, bytes: u64, percent: u64) -> Self {
        let (store, id) = store_with_object(layout, disk.clone(), 256 << 10);
        let blocks = bytes / BLOCK_BYTES * percent / 100;
        let worn = Self { disk, store, id, blocks, dice: 88_172_645_463_325_252 };
        (0..blocks).for_each(|block| worn.write(block));
        worn.store.sync().unwrap();
        worn
    }

    fn write(&self, block: u64) {
        let mut group = Group::new();
        group.write(self.id, block * BLOCK_BYTES, &[7; BLOCK_BYTES as usize]);
        self.store.submit(group, &[]).unwrap();
    }

    fn overwrite_random_block(&mut self) {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        self.write(self.dice % self.blocks);
    }

    fn counters(&self) -> Counters {
        self.store.info().counters
    }
}

/// A cleaned segment waits for a checkpoint, and is not read again before it is reused; nor are
/// cached leaves.
#[test]
fn cleaner_reads_no_more_than_is_written() {
    let (disk, _) = SimDisk::hdd(48 << 20, 1);
    let mut worn = NearlyFullStore::create_filled(LayoutKind::Log, disk, 48 << 20, 60);
    let (before, cleaned) = (worn.disk.statistics(), worn.counters().cleaned);
    (0..worn.blocks).for_each(|_| worn.overwrite_random_block());
    let after = worn.disk.statistics();
    let read = after.read_bytes - before.read_bytes;
    let written = after.written_bytes - before.written_bytes;
    let cleaned = worn.counters().cleaned - cleaned;
    assert!(cleaned > 100, "{cleaned} segments cleaned: nothing to see");
    println!("{read} bytes read, {written} written, {cleaned} cleaned");
    assert!(read < written, "{read} bytes read, {written} written");
}

/// If each pair changes another leaf, merging writes more bytes than the pairs have. Those must not
/// grow the merge's own backlog, or one group pays for all.
#[test]
fn merge_writes_do_not_grow_merge_backlog() {
    let (disk, _) = SimDisk::ssd(128 << 20, 1);
    let mut worn = NearlyFullStore::create_filled(LayoutKind::Cow, disk, 128 << 20, 50);
    let (mut most, before) = (0, worn.counters());
    for _ in 0..worn.blocks / 2 {
        let before = worn.counters();
        worn.overwrite_random_block();
        most = most.max(worn.counters().written_bytes - before.written_bytes);
    }
    let index = worn.counters().index_bytes - before.index_bytes;
    println!("{index} bytes of index, {most} at once");
    assert!(index > 4 << 20, "{index} bytes of index: nothing was merged");
    assert!(most < 512 << 10, "one group wrote {most} bytes");
}

/// Only both ends of long payloads are live, further apart than one read of the cleaner.
#[test]
fn distant_live_parts_are_moved() {
    const LONG_PAYLOAD_BYTES: u64 = 128 << 10;
    let (disk, _) = SimDisk::ssd(64 << 20, 1);
    let (store, id) = store_with_object(LayoutKind::Cow, disk, 1 << 20);
    let write = |at: u64, len: u64, byte: u8| {
        let mut group = Group::new();
        group.write(id, at, &vec![byte; len as usize]);
        store.submit(group, &[]).unwrap();
    };
    let count = (24 << 20) / LONG_PAYLOAD_BYTES;
    for turn in 0..6 {
        (0..count).for_each(|nth| write(nth * LONG_PAYLOAD_BYTES, LONG_PAYLOAD_BYTES, turn));
        (0..count).for_each(|nth| {
            write(nth * LONG_PAYLOAD_BYTES + 4096, LONG_PAYLOAD_BYTES - 8192, turn + 100)
        });
    }
    store.sync().unwrap();
    let cleaned = store.info().counters.cleaned;
    assert!(cleaned > 10, "{cleaned} segments cleaned: nothing to see");
    let mut bytes = vec![0; LONG_PAYLOAD_BYTES as usize];
    for nth in 0..count {
        assert_eq!(
            store.read(id, nth * LONG_PAYLOAD_BYTES, &mut bytes).unwrap(),
            LONG_PAYLOAD_BYTES as usize
        );
        let expected = |at: usize| {
            if (4096..LONG_PAYLOAD_BYTES as usize - 4096).contains(&at) { 105 } else { 5 }
        };
        assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == expected(at)), "{nth}");
    }
}

/// Every group is durable before the next. No group cleans until there is space again: each does
/// little, even with segments of few live bytes.
#[test]
fn waits_are_bounded_while_cleaning() {
    const BLOCK: u64 = 4096;
    let (disk, clock) = SimDisk::ssd(96 << 20, 1);
    let (store, id) = store_with_object(LayoutKind::Cow, disk, 128 << 10);
    let write = |block: u64| -> Ticket {
        let mut group = Group::new();
        group.write(id, block * BLOCK, &[7; BLOCK as usize]);
        store.submit(group, &[]).unwrap()
    };
    let blocks = (96 << 20) / BLOCK * 70 / 100;
    for block in 0..blocks {
        write(block);
    }
    store.sync().unwrap();

    let mut dice = 88_172_645_463_325_252_u64;
    let (mut waited_ns, mut cleaned_at_once) = (vec![], 0);
    for _ in 0..blocks {
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        let (before_ns, before) = (clock.now_ns(), store.info().counters);
        let ticket = write(dice % blocks);
        store.wait(ticket).unwrap();
        waited_ns.push(clock.now_ns() - before_ns);
        cleaned_at_once = cleaned_at_once.max(store.info().counters.cleaned - before.cleaned);
    }
    let cleaned = store.info().counters.cleaned;
    assert!(cleaned > 500, "{cleaned} segments cleaned: nothing to see");
    assert!(cleaned_at_once <= 8, "one group finished {cleaned_at_once} segments");
    waited_ns.sort_unstable();
    let at = |part: f64| waited_ns[((waited_ns.len() - 1) as f64 * part) as usize];
    let (half, most, longest) = (at(0.5), at(0.999), at(1.0));
    assert!(most <= half * 20, "half wait {half} ns, a thousandth more than {most} ns");
    assert!(longest <= half * 100, "half wait {half} ns, one {longest} ns");
    println!(
        "half {half} most {most} longest {longest} cleaned {cleaned} at once {cleaned_at_once}"
    );
}

/// A group of thousands of pairs compacts and merges as many. Otherwise one later group would
/// compact all runs at once, with more memory than allowed.
#[test]
fn long_groups_leave_no_larger_backlog() {
    const PAIR_COUNT: u32 = 600_000;
    let most_pending = |in_group: u32| {
        let (disk, _) = SimDisk::ssd(512 << 20, 1);
        drop(store_with_object(LayoutKind::Cow, disk.clone(), 1 << 20));
        let options = OpenOptions { cache_bytes: 16 << 20, read_only: false };
        let store = Store::open(disk, &options).unwrap();
        let kv = Kv::new(store.clone());
        let mut most = 0;
        for from in (0..PAIR_COUNT).step_by(in_group as usize) {
            let mut batch = Batch::new();
            (from..from + in_group).for_each(|key| batch.put(&key.to_be_bytes(), &[7; 100]));
            kv.write(batch).unwrap();
            most = most.max(store.info().pending_keys);
        }
        most
    };
    let (short, long) = (most_pending(10), most_pending(1000));
    println!("{short} and {long} pairs pending");
    assert!(long < short * 3 / 2, "{long} pairs pending, {short} after short groups");
}

/// Segments of long payloads have unused ends, in which no other fits. Cleaning them gains nothing;
/// each refused group would write the store anew.
#[test]
fn refused_groups_clean_nothing_in_vain() {
    const SEGMENT_BYTES: u32 = 64 << 10;
    for layout in [LayoutKind::Log, LayoutKind::Cow] {
        let (disk, _) = SimDisk::ssd(12 << 20, 1);
        let (store, id) = store_with_object(layout, disk.clone(), SEGMENT_BYTES);
        let write = |at: u64, len: usize| {
            let mut group = Group::new();
            group.write(id, at, &vec![7; len]);
            store.submit(group, &[]).map(drop).map_err(|refused| refused.error)
        };
        (0..4).for_each(|nth| write(nth << 20, 1 << 20).unwrap());
        store.sync().unwrap();
        let before = disk.statistics().written_bytes;
        for nth in 0..20 {
            // It succeeds, so that the refusal is not known from before.
            write(nth << 12, 512).unwrap();
            let refused = write(4 << 20, 4 << 20);
            assert!(matches!(refused, Err(Error::NoSpace { .. })), "{refused:?}");
        }
        store.sync().unwrap();
        let written = disk.statistics().written_bytes - before;
        println!("{layout}: {written} bytes written");
        assert!(written < 4 << 20, "{written} bytes written for 20 small groups, {layout}");
    }
}
