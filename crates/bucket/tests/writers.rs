//! Several writers of one bucket: one has it, the others are fenced; readers disturb none; a bucket
//! without the guarantees gets no store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use draconis_bucket::{
    BucketApi, BucketDisk, BucketOptions, Faults, MemoryBucket, ServerGuarantees,
};
use draconis_device::{Disk, Error, Extent, Group, Write};
use draconis_types::Block;

use crate::common::{NO_ROUTE, UnreachableBucket};

const LEN_BYTES: u64 = 1 << 20;

fn options(who: &str, token: u128) -> BucketOptions {
    BucketOptions {
        pause: Duration::from_micros(50),
        commit: Duration::ZERO,
        who: who.to_owned(),
        token,
        ..BucketOptions::default()
    }
}

fn create_disk(memory: &MemoryBucket) -> BucketDisk {
    let engine = Arc::new(memory.client(Faults::default()));
    BucketDisk::create(engine, "memory", LEN_BYTES, false, &options("the first", 1)).unwrap()
}

fn open_writer(memory: &MemoryBucket, who: &str, token: u128) -> Result<BucketDisk, Error> {
    let engine =
        Arc::new(memory.client(Faults { seed: token as u64, slow: 2, ..Faults::default() }));
    BucketDisk::open(engine, "memory", &options(who, token))
}

fn write(disk: &BucketDisk, sector: u64, byte: u8) -> Result<(), Error> {
    let mut block = Block::private(512);
    block.copy_in(0, &[byte; 512]);
    let group = Group { writes: vec![Write { at_bytes: sector * 512, block }] };
    let ticket = disk.submit(group, &[]).map_err(|refused| refused.error)?;
    disk.wait_durable(ticket)
}

fn read(disk: &BucketDisk, sector: u64) -> Result<u8, Error> {
    let answer = disk.read_now(Extent::new(sector * 512, 512), Block::private(512));
    Ok(answer.map_err(|refused| refused.error)?.into_private()[0])
}

#[test]
fn fenced_writer_learns_new_owner_and_changes_nothing() {
    let memory = MemoryBucket::default();
    let old = create_disk(&memory);
    write(&old, 100, 1).unwrap();
    let new = open_writer(&memory, "someone on another machine", 2).unwrap();
    let errors = write(&old, 100, 2).unwrap_err().to_string();
    assert!(errors.contains("memory was taken over by someone on another machine"), "{errors}");
    // Later writes fail with the same error.
    assert_eq!(write(&old, 101, 2).unwrap_err().to_string(), errors);
    assert_eq!(read(&new, 100), Ok(1));
    write(&new, 101, 3).unwrap();
    drop(old);
    for disk in [new, open_writer(&memory, "a third", 3).unwrap()] {
        assert_eq!((read(&disk, 100), read(&disk, 101)), (Ok(1), Ok(3)));
    }
}

#[test]
fn racing_writers_leave_one_unfenced() {
    let first = std::env::var("SEED").ok().and_then(|it| it.parse().ok()).unwrap_or(1u64);
    let rounds = std::env::var("RUNS").ok().and_then(|it| it.parse().ok()).unwrap_or(300u64);
    for round in first..first + rounds {
        let memory = MemoryBucket::default();
        drop(create_disk(&memory));
        // Each opens, and writes to a sector of its own and to a shared one.
        let results: Vec<Result<BucketDisk, Error>> = std::thread::scope(|scope| {
            let race = |nth: u64| {
                let memory = &memory;
                scope.spawn(move || {
                    let disk = open_writer(memory, "a rival", u128::from(round * 8 + nth))?;
                    write(&disk, 100 + nth, 7)?;
                    write(&disk, 200, nth as u8)?;
                    Ok(disk)
                })
            };
            let threads: Vec<_> = (1..=4).map(race).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let winners: Vec<usize> = (0..4).filter(|nth| results[*nth].is_ok()).collect();
        assert!(!winners.is_empty(), "round {round}: none won");
        // Acknowledged writes are there. Only one can still write.
        let reader = Arc::new(memory.client(Faults::default()));
        let reader = BucketDisk::open_to_read(reader, "memory", &options("", 0)).unwrap();
        for nth in &winners {
            assert_eq!(read(&reader, 101 + *nth as u64), Ok(7), "round {round}: {nth}");
        }
        let shared = read(&reader, 200).unwrap();
        assert!((1..=4).contains(&shared), "round {round}: {shared}");
        let writing = results.iter().flatten().filter(|disk| write(disk, 300, 1).is_ok()).count();
        assert!(writing <= 1, "round {round}: {writing} writers");
        for error in results.iter().filter_map(|result| result.as_ref().err()) {
            let errors = error.to_string();
            assert!(errors.contains("was taken over by a rival"), "round {round}: {errors}");
        }
    }
}

#[test]
fn readers_see_current_state_and_write_nothing() {
    let memory = MemoryBucket::default();
    let writer = create_disk(&memory);
    write(&writer, 100, 1).unwrap();
    let keys = memory.keys();
    let engine = Arc::new(memory.client(Faults::default()));
    let reader = BucketDisk::open_to_read(engine, "memory", &options("", 0)).unwrap();
    assert_eq!(read(&reader, 100), Ok(1));
    assert!(matches!(write(&reader, 100, 2), Err(Error::ReadOnly)));
    assert_eq!(memory.keys(), keys);
    write(&writer, 100, 2).unwrap();
    assert_eq!(read(&reader, 100), Ok(1), "it is as it was when it was opened");
}

/// Groups are uploaded concurrently, in objects of their own. A prefix of those that arrived is
/// live, with all awaited ones.
#[test]
fn crashed_writer_leaves_prefix_of_groups() {
    const GROUP_BYTES: usize = 300 << 10;
    let (mut shorter, mut stragglers) = (0, 0);
    for seed in 1..=150u64 {
        let memory = MemoryBucket::default();
        let first = Arc::new(memory.client(Faults::default()));
        let len_bytes = 64 << 20;
        drop(BucketDisk::create(first, "memory", len_bytes, false, &options("", 1)).unwrap());
        let faults = Faults { seed, late: 5, lost: 9, slow: 2, ..Faults::default() };
        let engine = Arc::new(memory.client(faults));
        let disk = BucketDisk::open(engine.clone(), "memory", &options("", 2)).unwrap();
        engine.set_faults(Faults { dies_after: Some(seed % 60), ..faults });
        let mut waited = 0;
        for nth in 0..40u64 {
            let mut block = Block::private(GROUP_BYTES);
            block.copy_in(0, &vec![nth as u8 + 1; GROUP_BYTES]);
            // Every other range, so that none continues another.
            let at_bytes = (1 << 20) + nth * 2 * GROUP_BYTES as u64;
            let group = Group { writes: vec![Write { at_bytes, block }] };
            let Ok(ticket) = disk.submit(group, &[]) else { break };
            if nth % 7 == seed % 7 && disk.wait_durable(ticket).is_ok() {
                waited = nth + 1;
            }
        }
        drop(disk);
        let arrived = memory.keys().iter().filter(|key| key.starts_with("data/")).count();
        let disk = open_writer(&memory, "", 3).unwrap();
        let place = |nth: u64| ((1 << 20) + nth * 2 * GROUP_BYTES as u64) / 512;
        let there: Vec<u64> = (0..40).filter(|nth| read(&disk, place(*nth)) != Ok(0)).collect();
        let count = there.len() as u64;
        assert!(there.iter().copied().eq(0..count), "seed {seed}: {there:?}");
        assert!(count >= waited, "seed {seed}: {waited} were durable, {count} are there");
        for nth in there {
            for sector in [place(nth), place(nth) + GROUP_BYTES as u64 / 512 - 1] {
                assert_eq!(read(&disk, sector), Ok(nth as u8 + 1), "seed {seed}");
            }
        }
        shorter += u64::from(count < 40);
        stragglers += u64::from(arrived as u64 > count);
    }
    assert!(shorter > 20 && stragglers > 5, "{shorter} ended early, {stragglers} out of order");
}

/// A writer keeps two sectors and the root's equal, each time in another object. A disk opened
/// meanwhile, for reading or with take-over, shows them as of one root.
#[test]
fn concurrent_reader_sees_consistent_state() {
    let memory = MemoryBucket::default();
    drop(create_disk(&memory));
    for taking_over in [false, true] {
        for round in 0..60u64 {
            let writer = open_writer(&memory, "the writer", 100).unwrap();
            // The previous writer may have left any number, and this one starts again.
            write(&writer, 0, 0).unwrap();
            std::thread::scope(|scope| {
                let writer = &writer;
                let written = scope.spawn(move || {
                    for nth in 0..40u8 {
                        let done = write(writer, 100 + u64::from(nth) % 7, nth)
                            .and_then(|()| write(writer, 0, nth));
                        if done.is_err() {
                            return;
                        }
                    }
                });
                let faults = Faults { seed: round, slow: 2, ..Faults::default() };
                let engine = Arc::new(memory.client(faults));
                while !written.is_finished() {
                    let opened = match taking_over {
                        false => {
                            BucketDisk::open_to_read(engine.clone(), "memory", &options("", 0))
                        }
                        true => BucketDisk::open(engine.clone(), "memory", &options("other", 9)),
                    };
                    let disk = opened.unwrap();
                    // Its root was written after this sector.
                    let nth = read(&disk, 0).unwrap();
                    let there = read(&disk, 100 + u64::from(nth) % 7);
                    // A reader may find an object deleted; that is reported.
                    if !taking_over && there.is_err() {
                        continue;
                    }
                    assert!(
                        nth == 0 || there.as_ref().is_ok_and(|it| *it == nth || *it == nth + 7),
                        "{nth}: {there:?}"
                    );
                }
            });
        }
    }
}

/// The newest fenced epochs stay, empty: a writer with an old list finds its number taken.
#[test]
fn newest_fenced_epochs_stay_empty() {
    let memory = MemoryBucket::default();
    drop(create_disk(&memory));
    for token in 2..=22 {
        drop(open_writer(&memory, "a later one", token).unwrap());
    }
    let mut epochs = memory.list("epoch").unwrap();
    epochs.sort_by(|one, other| one.key.cmp(&other.key));
    let keys: Vec<&str> = epochs.iter().map(|it| it.key.as_str()).collect();
    let expected: Vec<String> = (22 - 16..=22).map(|nth| format!("epoch/{nth:08x}")).collect();
    assert_eq!(keys, expected);
    assert!(epochs[..16].iter().all(|it| it.len_bytes == 0) && epochs[16].len_bytes > 0);
}

#[test]
fn unneeded_objects_are_deleted() {
    let memory = MemoryBucket::default();
    let disk = create_disk(&memory);
    for round in 0..50 {
        write(&disk, 100, round).unwrap();
        // The first sector is in the root.
        write(&disk, 0, round).unwrap();
    }
    drop(disk);
    let keys = memory.keys();
    assert!(keys.len() <= 6, "{keys:?}");
    let disk = open_writer(&memory, "", 5).unwrap();
    assert_eq!((read(&disk, 100), read(&disk, 0)), (Ok(49), Ok(49)));
}

#[test]
fn resize_keeps_common_contents() {
    let memory = MemoryBucket::default();
    let disk = create_disk(&memory);
    let last = |len_bytes: u64| len_bytes / 512 - 1;
    write(&disk, last(LEN_BYTES), 1).unwrap();
    write(&disk, 1000, 2).unwrap();
    disk.resize(LEN_BYTES * 2).unwrap();
    write(&disk, last(LEN_BYTES * 2), 3).unwrap();
    write(&disk, last(LEN_BYTES), 4).unwrap();
    drop(disk);
    let disk = open_writer(&memory, "", 2).unwrap();
    assert_eq!(disk.properties().len_bytes, LEN_BYTES * 2);
    assert_eq!(read(&disk, last(LEN_BYTES * 2)), Ok(3));
    assert_eq!(read(&disk, last(LEN_BYTES)), Ok(4));
    disk.resize(LEN_BYTES).unwrap();
    assert_eq!(read(&disk, last(LEN_BYTES)), Ok(4));
    drop(disk);
    let disk = open_writer(&memory, "", 3).unwrap();
    assert_eq!(disk.properties().len_bytes, LEN_BYTES);
    assert_eq!((read(&disk, last(LEN_BYTES)), read(&disk, 1000)), (Ok(4), Ok(2)));
    assert!(read(&disk, last(LEN_BYTES) + 1).is_err());
}

#[test]
fn server_without_guarantee_is_refused() {
    for (promises, why) in [
        (ServerGuarantees { creates_once: false, ..ServerGuarantees::ALL }, "If-None-Match"),
        (ServerGuarantees { lists_all: false, ..ServerGuarantees::ALL }, "does not list"),
        (ServerGuarantees { ranges: false, ..ServerGuarantees::ALL }, "range"),
        (ServerGuarantees { deletes: false, ..ServerGuarantees::ALL }, "after DELETE"),
    ] {
        let memory = MemoryBucket::with_guarantees(promises);
        let engine = Arc::new(memory.client(Faults::default()));
        let made = BucketDisk::create(engine, "memory", LEN_BYTES, false, &options("", 7));
        let text = made.err().expect("it is refused").to_string();
        assert!(text.contains(why), "{text}");
        assert!(memory.keys().iter().all(|key| key.starts_with("probe/")), "{:?}", memory.keys());
    }
}

#[test]
fn create_refuses_existing_store_unless_forced() {
    let memory = MemoryBucket::default();
    let disk = create_disk(&memory);
    write(&disk, 100, 1).unwrap();
    let engine = || Arc::new(memory.client(Faults::default()));
    let again = BucketDisk::create(engine(), "memory", LEN_BYTES, false, &options("", 2));
    let text = again.err().expect("a store is there").to_string();
    assert!(text.contains("holds a store; --force"), "{text}");
    // Its writer was not fenced.
    write(&disk, 100, 2).unwrap();
    let over = BucketDisk::create(engine(), "memory", LEN_BYTES, true, &options("", 3)).unwrap();
    assert_eq!(read(&over, 100), Ok(0));
    write(&over, 101, 3).unwrap();
    assert!(write(&disk, 100, 3).is_err());
    drop(over);
    assert_eq!(read(&open_writer(&memory, "", 4).unwrap(), 100), Ok(0));
}

#[test]
fn malformed_objects_are_rejected() {
    let memory = MemoryBucket::default();
    write(&create_disk(&memory), 100, 1).unwrap();
    let root = memory.keys().into_iter().find(|key| key.starts_with("root/")).unwrap();
    for (key, bytes) in [
        ("data/00000001-0000000003-64.1", &b"short"[..]),
        ("data/00000001-0000000003-fffffffffff.fffffffffff", b"far"),
        ("data/00000099-0000000000-64.1", &[9; 512]),
        ("data/zz", b""),
        ("root/x", b""),
        ("else", b""),
    ] {
        memory.put(key, bytes.to_vec().into()).unwrap();
        assert_eq!(read(&open_writer(&memory, "", 2).unwrap(), 100), Ok(1), "{key}");
    }
    for bytes in [vec![], vec![0; 100], vec![0xFF; 4000]] {
        let memory = MemoryBucket::default();
        drop(create_disk(&memory));
        memory.put(&root, bytes.into()).unwrap();
        let text = open_writer(&memory, "", 2).err().expect("the root is damaged").to_string();
        assert!(text.contains("damaged"), "{text}");
    }
}

#[test]
fn unreachable_bucket_is_retried_then_used() {
    let memory = MemoryBucket::default();
    write(&create_disk(&memory), 100, 1).unwrap();
    let away = Arc::new(AtomicBool::new(false));
    let engine =
        Arc::new(UnreachableBucket(memory.client(Faults::default()), away.clone(), NO_ROUTE));
    let how = BucketOptions { deadline: Duration::from_millis(20), ..options("", 0) };
    let reader = BucketDisk::open_to_read(engine, "memory", &how).unwrap();
    away.store(true, Ordering::SeqCst);
    let again = |reader: &BucketDisk| {
        let before = reader.requests().again;
        (read(reader, 100).is_ok(), reader.requests().again - before)
    };
    let (_, tries) = again(&reader);
    assert!(tries > 0, "the first one waits for it");
    assert_eq!(again(&reader), (false, 0));
    away.store(false, Ordering::SeqCst);
    assert_eq!(again(&reader), (true, 0));
    away.store(true, Ordering::SeqCst);
    assert!(again(&reader).1 > 0, "it was back");
}

fn open_mount(
    memory: &MemoryBucket,
    token: u128,
    seat: &str,
    takes_over: bool,
) -> Result<BucketDisk, Error> {
    let engine = Arc::new(memory.client(Faults::default()));
    let who = format!("the one at {seat}");
    let how = BucketOptions {
        is_mount: true,
        host_id: seat.to_owned(),
        take_over: takes_over,
        ..options(&who, token)
    };
    BucketDisk::open(engine, "memory", &how)
}

#[test]
fn mounted_writer_is_not_fenced_unless_asked() {
    let memory = MemoryBucket::default();
    drop(create_disk(&memory));
    let first = open_mount(&memory, 2, "home", false).unwrap();
    write(&first, 100, 1).unwrap();
    // Neither a mount nor a one-shot command fences its epoch.
    for refused in [open_mount(&memory, 3, "abroad", false), open_writer(&memory, "a visitor", 4)] {
        let errors = refused.err().expect("it is refused").to_string();
        assert!(
            errors.contains("memory is mounted by the one at home; unmount it there"),
            "{errors}"
        );
        assert!(errors.contains("--take-over"), "{errors}");
    }
    write(&first, 101, 2).unwrap();
    // It was unmounted: others may open it.
    drop(first);
    write(&open_writer(&memory, "a visitor", 5).unwrap(), 102, 3).unwrap();
    let second = open_mount(&memory, 6, "abroad", false).unwrap();
    write(&second, 103, 4).unwrap();
    // Crashed or out of reach: take-over fences its epoch, and it can do no harm.
    let third = open_mount(&memory, 7, "home", true).unwrap();
    let errors = write(&second, 103, 5).unwrap_err().to_string();
    assert!(errors.contains("was taken over by the one at home"), "{errors}");
    drop(second);
    let refused = open_writer(&memory, "a visitor", 8).err().expect("the third is there");
    assert!(refused.to_string().contains("mounted by the one at home"), "{refused}");
    // A mount with the same host id knows that the old one is gone.
    let fourth = open_mount(&memory, 9, "home", false).unwrap();
    write(&third, 104, 6).unwrap_err();
    for (sector, byte) in [(100, 1), (101, 2), (102, 3), (103, 4), (104, 0)] {
        assert_eq!(read(&fourth, sector), Ok(byte), "{sector}");
    }
}
