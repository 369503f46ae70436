//! Readers of a store that is written meanwhile: each state is a prefix of the writer's commits.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use draconis_device::{Disk, Extent, MemoryDisk, Pending, Random, ReadAnswer, Urgency};
use draconis_objects::kv::{Batch, Kv};
use draconis_objects::{
    CreateOptions, Error, Group, LayoutKind, LifetimeHint, OpenOptions, Profile, Store,
};
use draconis_testkit::wait::HangClock;
use draconis_types::Block;

const KEYS: u64 = 64;

fn create(layout: LayoutKind) -> Arc<dyn Disk> {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(vec![0; 8 << 20], 512));
    let profile = Profile { layout, page_bytes: 4096, segment_bytes: 128 << 10, queue_depth: 8 };
    Store::create(disk.clone(), &CreateOptions { profile, id: 7 }).unwrap();
    disk
}

fn open(disk: &Arc<dyn Disk>, read_only: bool) -> Arc<Store> {
    Store::open(disk.clone(), &OpenOptions { cache_bytes: 1 << 20, read_only }).unwrap()
}

/// Commits the number `nth`: under two keys, and in one of the values. Another group before it goes
/// to other streams.
fn commit(kv: &Kv, nth: u64, dice: &mut Random) {
    let mut group = Group::new();
    for hint in [LifetimeHint::Hot, LifetimeHint::Cold] {
        let object = group.create(kv.store().new_object(), hint);
        group.append(object, &vec![1; 5000]);
        group.delete(object);
    }
    kv.store().submit(group, &[]).unwrap();
    let mut batch = Batch::new();
    batch.put(b"a", &nth.to_le_bytes());
    batch.put(format!("k{:03}", nth % KEYS).as_bytes(), &value(nth, dice));
    batch.put(b"z", &nth.to_le_bytes());
    let ticket = kv.write(batch).map_err(|refused| refused.1).unwrap();
    kv.wait(ticket).unwrap();
}

/// A value that names its commit, of a random length.
fn value(nth: u64, dice: &mut Random) -> Vec<u8> {
    nth.to_le_bytes().repeat(1 + dice.next_below(1500) as usize)
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().unwrap())
}

/// Returns the newest commit that a view shows, after checking that the view is a prefix.
fn check_view(store: &Arc<Store>) -> draconis_objects::Result<u64> {
    let mut pairs = vec![];
    for pair in Kv::new(store.clone()).scan::<std::ops::RangeFull>(&..) {
        pairs.push(pair?);
    }
    if pairs.is_empty() {
        return Ok(0);
    }
    let last = number(&pairs[0].1);
    assert_eq!(last, number(&pairs.last().unwrap().1), "two keys of one commit");
    assert_eq!(pairs.len() as u64, 2 + last.min(KEYS));
    for (key, value) in &pairs[1..pairs.len() - 1] {
        let key: u64 = std::str::from_utf8(&key[1..]).unwrap().parse().unwrap();
        let expected = last - (last % KEYS + KEYS - key) % KEYS;
        assert!(value.chunks(8).all(|word| number(word) == expected), "key {key} of {last}");
    }
    Ok(last)
}

#[test]
fn each_view_is_a_prefix_and_none_goes_back() {
    let (min_openings, min_views) = match std::env::var("DRACONIS_LONG") {
        Ok(_) => (2000, 2000),
        Err(_) => (30, 20),
    };
    for layout in [LayoutKind::Log, LayoutKind::Cow] {
        let disk = create(layout);
        let (done, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
        let views = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let store = open(&disk, true);
                    let mut newest = 0;
                    while !is_over.load(Ordering::Acquire) {
                        let floor = done.load(Ordering::Acquire);
                        store.refresh().unwrap();
                        let seen = store.read_newest(check_view).unwrap();
                        assert!(seen >= newest.max(floor), "{seen} after {newest}, {floor}");
                        newest = seen;
                        views.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let clock = HangClock::start();
            let (mut dice, mut nth, mut openings) = (Random::new(3), 0, 0);
            // Opened anew again and again, without a checkpoint before, as after a crash.
            while openings < min_openings || views.load(Ordering::Relaxed) < min_views {
                openings += 1;
                clock.assert_not_hung("following");
                let kv = Kv::new(open(&disk, false));
                for _ in 0..300 {
                    nth += 1;
                    commit(&kv, nth, &mut dice);
                    done.store(nth, Ordering::Release);
                }
            }
            is_over.store(true, Ordering::Release);
        });
        let views = views.into_inner();
        println!("{layout}: {} commits, {views} views", done.into_inner());
    }
}

/// A disk whose reads are followed by commits of a writer.
struct BusyDisk {
    disk: Arc<dyn Disk>,
    after_read: Box<dyn Fn() + Send + Sync>,
}

impl draconis_device::ForwardingDisk for BusyDisk {
    type Inner = dyn Disk;

    fn inner_disk(&self) -> &Self::Inner {
        &*self.disk
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        let answer = self.disk.read_now(at, into);
        (self.after_read)();
        let _ = urgency;
        Pending::ready(answer)
    }
}

#[test]
fn writer_goes_on_between_any_two_reads() {
    follow_a_writer_between_reads(4);
}

#[test]
#[ignore = "long: more seeds"]
fn writer_goes_on_between_any_two_reads_of_many_seeds() {
    follow_a_writer_between_reads(20);
}

fn follow_a_writer_between_reads(seeds: u64) {
    for layout in [LayoutKind::Log, LayoutKind::Cow] {
        for seed in 0..seeds {
            let disk = create(layout);
            let writer = Kv::new(open(&disk, false));
            let state = Arc::new(Mutex::new((Random::new(seed), 0, 0)));
            let commit_some = {
                let (writer, state) = (writer.clone(), state.clone());
                move |most: u64| {
                    let mut state = state.lock().unwrap();
                    let (dice, nth, _) = &mut *state;
                    for _ in 0..dice.next_below(most + 1) {
                        *nth += 1;
                        commit(&writer, *nth, dice);
                    }
                }
            };
            commit_some(400);
            let after_read = {
                let (state, commit_some) = (state.clone(), commit_some.clone());
                // The writer is fast during some reads, and idle after a while.
                Box::new(move || {
                    let reads = {
                        let mut state = state.lock().unwrap();
                        state.2 += 1;
                        state.2
                    };
                    match reads {
                        ..40 if reads % 7 == seed % 7 => commit_some(300),
                        ..60 => commit_some(3),
                        _ => {}
                    }
                })
            };
            let busy: Arc<dyn Disk> = Arc::new(BusyDisk { disk: disk.clone(), after_read });
            let reader = open(&busy, true);
            for _ in 0..4 {
                let floor = state.lock().unwrap().1;
                state.lock().unwrap().2 = 0;
                reader.refresh().unwrap();
                let seen = reader.read_newest(check_view).unwrap();
                assert!(seen >= floor, "{layout}, seed {seed}: {seen} of {floor}");
            }
        }
    }
}

#[test]
fn overwritten_states_are_noticed_and_read_again() {
    let disk = create(LayoutKind::Cow);
    let mut dice = Random::new(5);
    let kv = Kv::new(open(&disk, false));
    (1..=100).for_each(|nth| commit(&kv, nth, &mut dice));
    kv.store().checkpoint().unwrap();
    let reader = open(&disk, true);
    let old = Kv::new(reader.clone()).snapshot();
    assert!(!reader.refresh().unwrap(), "nothing was written");
    (101..=3000).for_each(|nth| commit(&kv, nth, &mut dice));

    // A state whose bytes were overwritten shows them no more, and never others.
    let found = old
        .scan::<std::ops::RangeFull>(&..)
        .map(|pair| pair.map(|(key, value)| (key, number(&value[..8]))));
    let (found, lost): (Vec<_>, Vec<_>) = found.partition(|pair| pair.is_ok());
    assert!(found.iter().flatten().all(|(_, nth)| *nth <= 100));
    assert!(!lost.is_empty());
    let is_damage = |pair: &draconis_objects::Result<_>| matches!(pair, Err(Error::Corrupt { .. }));
    assert!(lost.iter().all(is_damage));

    assert_eq!(reader.read_newest(check_view), Ok(3000));
    assert!(!reader.refresh().unwrap());
    commit(&kv, 3001, &mut dice);
    assert!(reader.refresh().unwrap());
    assert_eq!(check_view(&reader), Ok(3001));
}

#[test]
fn damage_is_no_old_state() {
    let disk = create(LayoutKind::Cow);
    let kv = Kv::new(open(&disk, false));
    kv.wait(kv.put(b"key", &[7; 5000]).unwrap()).unwrap();
    kv.store().checkpoint().unwrap();
    let reader = open(&disk, true);
    // The value is overwritten though the writer still needs it.
    let mut zeroed = false;
    for at_bytes in (0..8 << 20).step_by(4096) {
        let extent = Extent::new(at_bytes, 4096);
        let block = disk.read_now(extent, Block::private(4096)).unwrap();
        if block.into_private()[..4000].iter().filter(|byte| **byte == 7).count() > 3000 {
            let write = draconis_device::Write { at_bytes, block: Block::private(4096) };
            let group = draconis_device::Group { writes: vec![write] };
            let ticket = disk.submit(group, &[]).unwrap();
            disk.wait_durable(ticket).unwrap();
            zeroed = true;
        }
    }
    assert!(zeroed);
    let found = reader.read_newest(|store| Kv::new(store.clone()).get(b"key"));
    assert!(matches!(found, Err(Error::Corrupt { .. })), "{found:?}");
}

#[test]
fn writers_and_replaced_stores_are_refused() {
    let disk = create(LayoutKind::Cow);
    let writer = open(&disk, false);
    assert!(matches!(writer.refresh(), Err(Error::Misuse(_))));
    let reader = open(&disk, true);
    let profile = writer.info().profile;
    drop(writer);
    Store::create(disk.clone(), &CreateOptions { profile, id: 8 }).unwrap();
    let errors = reader.refresh().unwrap_err().to_string();
    assert!(errors.contains("another store has replaced it"), "{errors}");
}

/// Keys in an unreadable part of what opening stored of the log are unknown, and not absent.
#[test]
fn unreadable_image_of_the_log_hides_no_keys() {
    let disk = create(LayoutKind::Cow);
    let kv = Kv::new(open(&disk, false));
    kv.wait(kv.put(b"needle", b"short").unwrap()).unwrap();
    drop(kv);
    drop(open(&disk, false));
    for at_bytes in (0..8 << 20).step_by(4096) {
        let block = disk.read_now(Extent::new(at_bytes, 4096), Block::private(4096)).unwrap();
        let mut bytes = block.into_private().to_vec();
        let Some(found) = bytes.windows(6).position(|part| part == b"needle") else { continue };
        bytes[found] = b'N';
        let mut block = Block::private(4096);
        block.bytes_mut().unwrap().copy_from_slice(&bytes);
        let write = draconis_device::Write { at_bytes, block };
        let ticket = disk.submit(draconis_device::Group { writes: vec![write] }, &[]).unwrap();
        disk.wait_durable(ticket).unwrap();
    }
    let found = Kv::new(open(&disk, true)).get(b"needle");
    assert!(matches!(found, Err(Error::Corrupt { .. })), "{found:?}");
}

/// Another store replaces the one that is being opened, between any two reads.
#[test]
fn store_that_is_replaced_while_it_is_opened() {
    for nth in 1..12 {
        let disk = create(LayoutKind::Cow);
        let writer = Kv::new(open(&disk, false));
        let profile = writer.store().info().profile;
        writer.wait(writer.put(b"key", b"old").unwrap()).unwrap();
        drop(writer);
        let (reads, replaced) = (AtomicU64::new(0), disk.clone());
        let after_read = Box::new(move || {
            if reads.fetch_add(1, Ordering::Relaxed) + 1 == nth {
                let options = CreateOptions { profile, id: 9 };
                Store::create(replaced.clone(), &options).unwrap();
                // Each opening has a generation of its own.
                (0..5).for_each(|_| drop(open(&replaced, false)));
                let kv = Kv::new(open(&replaced, false));
                kv.wait(kv.put(b"key", b"new").unwrap()).unwrap();
            }
        });
        let busy: Arc<dyn Disk> = Arc::new(BusyDisk { disk, after_read });
        let value = Kv::new(open(&busy, true)).get(b"key").unwrap();
        assert!(matches!(value.as_deref(), Some(b"old" | b"new")), "{nth}: {value:?}");
    }
}
