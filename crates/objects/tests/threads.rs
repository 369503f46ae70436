//! Threads that submit, wait, read and take snapshots concurrently, while the power is cut.
//!
//! ```text
//!   writer t: group n = object and log of t both say n, and how far the others were
//!   reader:   snapshot ─▶ judge        cutter: what was waited for, then the disk ─▶ judge
//! ```
//!
//! A state has some number of whole groups of each thread. It has all awaited groups, and with each
//! group all groups that any thread submitted before it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use draconis_device::Disk;
use draconis_device::Random;
use draconis_objects::test_hooks::{InjectedFault, TestSettings};
use draconis_objects::{
    CreateOptions, Group, LayoutKind, LifetimeHint, ObjectId, OpenOptions, Profile, Store, Ticket,
};
use draconis_testkit::sim::SimDisk;

const WRITERS: usize = 3;
const GROUPS_PER_WRITER: u64 = 400;
const DISK_BYTES: u64 = 16 << 20;
/// Offset of an object's record: an odd byte.
const RECORD_OFFSET: u64 = 777;

/// Number of groups of each writer.
type WriterProgress = [u64; WRITERS];

#[derive(Default)]
struct SharedProgress {
    submitted: [AtomicU64; WRITERS],
    waited: [AtomicU64; WRITERS],
    tickets: [AtomicU64; WRITERS],
}

fn load_progress(of: &[AtomicU64; WRITERS]) -> WriterProgress {
    std::array::from_fn(|writer| of[writer].load(SeqCst))
}

/// Returns a writer's record from [`AT`] on after group `n`, with the progress of `others`.
fn encode_record(n: u64, others: WriterProgress) -> Vec<u8> {
    let mut bytes: Vec<u8> = [n].iter().chain(&others).flat_map(|it| it.to_le_bytes()).collect();
    let mut dice = Random::new(n);
    bytes.resize(bytes.len() + dice.next_below(9000) as usize, n as u8);
    bytes
}

/// Returns the number of each writer's groups in a store.
fn verify_crash_image(
    objects: &[ObjectId; 2 * WRITERS],
    read: &dyn Fn(ObjectId) -> Vec<u8>,
    least: WriterProgress,
) -> WriterProgress {
    let mut reached = [0; WRITERS];
    let mut known = [[0; WRITERS]; WRITERS];
    for writer in 0..WRITERS {
        let bytes = read(objects[writer]);
        let log = read(objects[WRITERS + writer]);
        let number = |at: usize| match bytes.get(at..at + 8) {
            Some(word) => u64::from_le_bytes(word.try_into().unwrap()),
            None => 0,
        };
        let n = number(RECORD_OFFSET as usize);
        known[writer] = std::array::from_fn(|other| number(RECORD_OFFSET as usize + 8 + 8 * other));
        // The record is complete; bytes after it are older.
        let expected = if n == 0 { vec![] } else { encode_record(n, known[writer]) };
        let there = bytes.get(RECORD_OFFSET as usize..).unwrap_or_default();
        assert!(n == 0 || there.starts_with(&expected), "writer {writer}, group {n} in part");
        assert_eq!(log.len() as u64, 8 * n, "the log of writer {writer}");
        assert!(log.chunks(8).zip(1u64..).all(|(word, nth)| word == nth.to_le_bytes()));
        assert!(n >= least[writer], "writer {writer}: {n} groups, {} before", least[writer]);
        reached[writer] = n;
    }
    for (writer, known) in known.iter().enumerate() {
        for other in 0..WRITERS {
            assert!(
                reached[other] >= known[other],
                "group {} of writer {writer} followed {} of writer {other}, which has {}",
                reached[writer],
                known[other],
                reached[other]
            );
        }
    }
    reached
}

fn verify_store(
    store: &Arc<Store>,
    objects: &[ObjectId; 2 * WRITERS],
    least: WriterProgress,
) -> WriterProgress {
    let read = |id| {
        let mut bytes = vec![0; store.len(id).unwrap() as usize];
        let got = store.read(id, 0, &mut bytes).unwrap();
        bytes.truncate(got);
        bytes
    };
    verify_crash_image(objects, &read, least)
}

fn run_writer(
    store: &Store,
    objects: &[ObjectId; 2 * WRITERS],
    progress: &SharedProgress,
    writer: usize,
    seed: u64,
    settings: TestSettings,
) {
    let mut dice = Random::new(seed * 31 + writer as u64);
    draconis_objects::test_hooks::set_thread_settings(settings);
    for n in 1..=GROUPS_PER_WRITER {
        let others = load_progress(&progress.submitted);
        let after: Vec<Ticket> = load_progress(&progress.tickets).map(Ticket).into();
        let mut group = Group::new();
        group.write(objects[writer], RECORD_OFFSET, &encode_record(n, others));
        group.append(objects[WRITERS + writer], &n.to_le_bytes());
        let ticket = store.submit(group, &after).unwrap();
        progress.tickets[writer].store(ticket.0, SeqCst);
        progress.submitted[writer].store(n, SeqCst);
        match dice.next_below(12) {
            0..3 => {
                store.wait(ticket).unwrap();
                progress.waited[writer].store(n, SeqCst);
            }
            3 => store.checkpoint().unwrap(),
            _ => {}
        }
    }
}

fn run_threads_and_crash(seed: u64, without: Option<InjectedFault>) -> usize {
    let layout = if seed.is_multiple_of(2) { LayoutKind::Log } else { LayoutKind::Cow };
    let settings = TestSettings { commit_bytes: 4000, fault: without, ..TestSettings::NORMAL };
    draconis_objects::test_hooks::set_thread_settings(settings);
    let (disk, _) = match seed.is_multiple_of(2) {
        false => SimDisk::ssd(DISK_BYTES, seed),
        true => SimDisk::hdd(DISK_BYTES, seed),
    };
    let profile = Profile { layout, page_bytes: 4096, segment_bytes: 128 << 10, queue_depth: 8 };
    let shared: Arc<dyn Disk> = disk.clone();
    Store::create(shared.clone(), &CreateOptions { profile, id: u128::from(seed) }).unwrap();
    let small = OpenOptions { cache_bytes: 256 << 10, read_only: false };
    let store = Store::open(shared, &small).unwrap();
    let mut group = Group::new();
    let objects = std::array::from_fn(|_| group.create(store.new_object(), LifetimeHint::Unknown));
    store.wait(store.submit(group, &[]).unwrap()).unwrap();
    let (progress, is_over) = (SharedProgress::default(), AtomicBool::new(false));
    let mut states = vec![];
    std::thread::scope(|scope| {
        let (store, progress, objects) = (&store, &progress, &objects);
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                scope.spawn(move || run_writer(store, objects, progress, writer, seed, settings))
            })
            .collect();
        let is_over = &is_over;
        let reader = scope.spawn(move || {
            let mut least = [0; WRITERS];
            while !is_over.load(SeqCst) {
                let submitted = load_progress(&progress.submitted);
                let snapshot = store.snapshot();
                let before = std::array::from_fn(|nth| submitted[nth].max(least[nth]));
                let read = |id| {
                    let mut bytes = vec![0; snapshot.len(id).unwrap() as usize];
                    let got = snapshot.read(id, 0, &mut bytes).unwrap();
                    bytes.truncate(got);
                    bytes
                };
                least = verify_crash_image(objects, &read, before);
            }
        });
        let mut dice = Random::new(seed);
        while writers.iter().any(|writer| !writer.is_finished()) {
            // Gives the disk and the store some time.
            (0..dice.next_below(2000)).for_each(|_| std::hint::spin_loop());
            if states.len() < 200 && dice.once_in(3) {
                let waited = load_progress(&progress.waited);
                states.push((waited, disk.crash_and_restart(dice.next_u64())));
            }
            std::thread::yield_now();
        }
        is_over.store(true, SeqCst);
        reader.join().unwrap();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
    verify_store(&store, &objects, load_progress(&progress.submitted));
    for (waited, disk) in &states {
        let opened = Store::open(disk.clone(), &small).unwrap();
        verify_store(&opened, &objects, *waited);
    }
    states.len()
}

#[test]
fn concurrent_writers_survive_power_cuts() {
    let number = |name: &str, otherwise| {
        std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(otherwise)
    };
    let first: u64 = number("SEED", 1);
    let mut states = 0;
    for seed in first..first + number("RUNS", 6) {
        println!("SEED={seed}");
        states += run_threads_and_crash(seed, None);
    }
    println!("{states} states");
    assert!(states > 0);
}

/// Threads are not deterministic: a few runs are more than enough.
#[test]
fn injected_faults_are_detected() {
    for what in [InjectedFault::Flush, InjectedFault::NoGaps] {
        let missed =
            |seed| std::panic::catch_unwind(|| run_threads_and_crash(seed, Some(what))).is_err();
        // On a busy machine races are rare.
        assert!((1..400).any(missed), "{what:?}");
    }
}
