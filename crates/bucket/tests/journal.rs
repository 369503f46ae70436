//! A journal for a bucket: it has awaited data while the bucket is away, and uploads it later.
//! Without the journal, opening is refused with its path. No journal file causes a panic.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use draconis_bucket::{BucketDisk, BucketOptions, Faults, JournalDevice, MemoryBucket};
use draconis_device::{Disk, Error, Extent, Group, MemoryDisk, Random, Write};
use draconis_testkit::wait::wait_until;
use draconis_testkit::{Fault, FaultDisk, FaultTarget, conform};
use draconis_types::Block;

use crate::common::{NO_ROUTE, UnreachableBucket};

const LEN_BYTES: u64 = 1 << 20;
const JOURNAL_BYTES: usize = 256 << 10;

fn options(who: &str, token: u128, journal: Option<JournalDevice>) -> BucketOptions {
    BucketOptions {
        pause: Duration::from_micros(50),
        deadline: Duration::from_millis(50),
        commit: Duration::ZERO,
        who: who.to_owned(),
        token,
        journal,
        ..BucketOptions::default()
    }
}

fn journal_disk(len: usize) -> Arc<MemoryDisk> {
    let disk = MemoryDisk::new(vec![0; len], 512);
    JournalDevice::format(&disk, 99).unwrap();
    Arc::new(disk)
}

fn journal_on(drive: &Arc<impl Disk + 'static>) -> Option<JournalDevice> {
    Some(JournalDevice::on_disk(drive.clone(), "/var/the journal"))
}

fn read_journal_bytes(drive: &MemoryDisk) -> Vec<u8> {
    let len = drive.properties().len_bytes;
    let all = drive.read_now(Extent::new(0, len), Block::private(len as usize)).unwrap();
    all.into_private().to_vec()
}

fn create_bucket_disk(memory: &MemoryBucket) {
    let engine = Arc::new(memory.client(Faults::default()));
    drop(BucketDisk::create(engine, "memory", LEN_BYTES, false, &options("maker", 1, None)));
}

fn open_disk(memory: &MemoryBucket, options: &BucketOptions) -> Result<BucketDisk, String> {
    let engine = Arc::new(memory.client(Faults::default()));
    BucketDisk::open(engine, "memory", options).map_err(|error| error.to_string())
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

/// Writes sectors 100 to 109 and the first one while the bucket is away, and dies.
fn leave_unsent_writes(memory: &MemoryBucket, journal: Option<JournalDevice>) {
    let away = Arc::new(AtomicBool::new(false));
    let engine =
        Arc::new(UnreachableBucket(memory.client(Faults::default()), away.clone(), NO_ROUTE));
    let how = options("the one that died", 2, journal);
    let disk = BucketDisk::open(engine, "memory", &how).unwrap();
    away.store(true, Ordering::SeqCst);
    for nth in 0..10u8 {
        write(&disk, 100 + u64::from(nth), nth + 1).unwrap();
        if nth == 5 {
            write(&disk, 0, 77).unwrap();
        }
    }
    for nth in 0..10u8 {
        assert_eq!(read(&disk, 100 + u64::from(nth)), Ok(nth + 1), "it is read from memory");
    }
    disk.close();
    let said = disk.close_error().expect("the bucket has not all");
    assert!(said.contains("/var/the journal keeps what was acknowledged"), "{said}");
}

fn assert_all_writes(disk: &BucketDisk) {
    for nth in 0..10u8 {
        assert_eq!(read(disk, 100 + u64::from(nth)), Ok(nth + 1), "{nth}");
    }
    assert_eq!(read(disk, 0), Ok(77));
}

#[test]
fn journaled_disk_conforms() {
    let mut seed = 0;
    conform::check_all(|| {
        seed += 1;
        let faults = Faults { seed, refused: 8, lost: 8, late: 8, slow: 2, dies_after: None };
        let engine = Arc::new(MemoryBucket::default().client(faults));
        let how = BucketOptions {
            deadline: Duration::from_secs(60),
            ..options("a disk", seed.into(), journal_on(&journal_disk(JOURNAL_BYTES * 4)))
        };
        BucketDisk::create(engine, "memory", LEN_BYTES, false, &how).unwrap()
    });
}

#[test]
fn acknowledged_writes_upload_after_outage() {
    let memory = MemoryBucket::default();
    create_bucket_disk(&memory);
    let drive = journal_disk(JOURNAL_BYTES);
    leave_unsent_writes(&memory, journal_on(&drive));
    // Without the journal, or with another: the error has its path, and the next step.
    let other = MemoryDisk::new(vec![0; JOURNAL_BYTES], 512);
    JournalDevice::format(&other, 98).unwrap();
    for journal in [None, journal_on(&Arc::new(other))] {
        let how = options("another", 3, journal);
        let said = open_disk(&memory, &how).err().expect("it is refused");
        assert!(said.contains("with a journal, /var/the journal, by the one that died"), "{said}");
        assert!(said.contains("--journal /var/the journal"), "{said}");
        assert!(said.contains("--take-over"), "{said}");
    }
    // A reader that knows the journal must not see less than was acknowledged.
    let engine = || Arc::new(memory.client(Faults::default()));
    let how = options("a reader", 4, journal_on(&drive));
    let said = BucketDisk::open_to_read(engine(), "memory", &how).err().expect("it waits");
    assert!(said.to_string().contains("has what memory has not yet"), "{said}");
    let reader = BucketDisk::open_to_read(engine(), "memory", &options("", 4, None)).unwrap();
    assert_eq!(read(&reader, 109), Ok(0));

    let disk = open_disk(&memory, &options("the next", 5, journal_on(&drive))).unwrap();
    assert!(disk.journal_statistics().unwrap().sent_late > 0);
    assert_all_writes(&disk);
    write(&disk, 200, 9).unwrap();
    disk.close();
    assert_eq!(disk.close_error(), None);
    drop(disk);
    // It was unmounted, so others may open it, and the journal serves another store.
    let disk = open_disk(&memory, &options("another", 6, None)).unwrap();
    assert_all_writes(&disk);
    assert_eq!(read(&disk, 200), Ok(9));
    let other = MemoryBucket::default();
    create_bucket_disk(&other);
    drop(open_disk(&other, &options("the next", 7, journal_on(&drive))).unwrap());
}

#[test]
fn uploads_resume_when_bucket_returns() {
    let memory = MemoryBucket::default();
    create_bucket_disk(&memory);
    let (drive, away) = (journal_disk(JOURNAL_BYTES), Arc::new(AtomicBool::new(false)));
    let engine =
        Arc::new(UnreachableBucket(memory.client(Faults::default()), away.clone(), NO_ROUTE));
    let disk = BucketDisk::open(engine, "memory", &options("x", 2, journal_on(&drive))).unwrap();
    away.store(true, Ordering::SeqCst);
    write(&disk, 100, 1).unwrap();
    write(&disk, 0, 77).unwrap();
    away.store(false, Ordering::SeqCst);
    let is_there = || {
        let engine = Arc::new(memory.client(Faults::default()));
        let reader = BucketDisk::open_to_read(engine, "memory", &options("", 3, None)).unwrap();
        (read(&reader, 100), read(&reader, 0)) == (Ok(1), Ok(77))
    };
    wait_until("the write is in the bucket", is_there);
}

#[test]
fn fenced_journal_is_reported_and_kept() {
    let memory = MemoryBucket::default();
    create_bucket_disk(&memory);
    let drive = journal_disk(JOURNAL_BYTES);
    leave_unsent_writes(&memory, journal_on(&drive));
    let how = BucketOptions { take_over: true, ..options("the other machine", 3, None) };
    let other = open_disk(&memory, &how).unwrap();
    write(&other, 100, 50).unwrap();
    drop(other);
    let before = read_journal_bytes(&drive);
    for takes_over in [false, true] {
        let how =
            BucketOptions { take_over: takes_over, ..options("the first", 4, journal_on(&drive)) };
        let said = open_disk(&memory, &how).err().expect("it is void");
        assert!(said.contains("without what only /var/the journal has: "), "{said}");
        assert!(said.contains("data/00000002-") && said.contains("more, "), "{said}");
        assert!(said.contains("move it away, or delete it"), "{said}");
    }
    assert!(read_journal_bytes(&drive) == before, "it was changed");
    let disk = open_disk(&memory, &options("the first", 5, None)).unwrap();
    assert_eq!((read(&disk, 100), read(&disk, 101)), (Ok(50), Ok(0)));
}

#[test]
fn journal_is_not_uploaded_to_other_store() {
    let (one, two) = (MemoryBucket::default(), MemoryBucket::default());
    create_bucket_disk(&one);
    let engine = Arc::new(two.client(Faults::default()));
    drop(BucketDisk::create(engine, "two", LEN_BYTES, false, &options("maker", 8, None)).unwrap());
    let drive = journal_disk(JOURNAL_BYTES);
    leave_unsent_writes(&one, journal_on(&drive));
    let keys = two.keys();
    let said = open_disk(&two, &options("x", 3, journal_on(&drive))).err().expect("it is another");
    assert!(said.contains("has what waits for memory, not for the store at"), "{said}");
    let engine = Arc::new(two.client(Faults::default()));
    let made =
        BucketDisk::create(engine, "two", LEN_BYTES, true, &options("", 9, journal_on(&drive)));
    assert!(made.is_err(), "it would be thrown away");
    assert_eq!(two.keys().len(), keys.len());
    assert_all_writes(&open_disk(&one, &options("x", 4, journal_on(&drive))).unwrap());
}

#[test]
fn full_journal_blocks_writers() {
    let memory = MemoryBucket::default();
    create_bucket_disk(&memory);
    let (drive, away) = (journal_disk(64 << 10), Arc::new(AtomicBool::new(false)));
    let engine =
        Arc::new(UnreachableBucket(memory.client(Faults::default()), away.clone(), NO_ROUTE));
    let deadline = Duration::from_secs(60);
    let how = BucketOptions { deadline, ..options("x", 2, journal_on(&drive)) };
    let disk = BucketDisk::open(engine, "memory", &how).unwrap();
    away.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            for nth in 0..300u64 {
                write(&disk, 100 + nth, nth as u8).unwrap();
            }
        });
        wait_until("the journal is full", || {
            disk.journal_statistics().unwrap().full > 0 || writing.is_finished()
        });
        assert!(!writing.is_finished());
        away.store(false, Ordering::SeqCst);
    });
    drop(disk);
    let disk = open_disk(&memory, &options("", 3, None)).unwrap();
    for nth in 0..300u64 {
        assert_eq!(read(&disk, 100 + nth), Ok(nth as u8));
    }
}

#[test]
fn full_journal_during_outage_stops_writes_without_loss() {
    for (error, advice) in [(NO_ROUTE, "--deadline"), ("403 AccessDenied", "has no permission")] {
        let memory = MemoryBucket::default();
        create_bucket_disk(&memory);
        let (drive, away) = (journal_disk(64 << 10), Arc::new(AtomicBool::new(false)));
        let engine = UnreachableBucket(memory.client(Faults::default()), away.clone(), error);
        let how = options("x", 2, journal_on(&drive));
        let disk = BucketDisk::open(Arc::new(engine), "memory", &how).unwrap();
        away.store(true, Ordering::SeqCst);
        let mut written = 0;
        let said = loop {
            match write(&disk, 100 + written, written as u8 + 1) {
                Ok(()) => written += 1,
                Err(error) => break error.to_string(),
            }
        };
        assert!(said.contains("/var/the journal is full"), "{said}");
        for part in [error, advice, "the next command or mount with this journal sends it"] {
            assert!(said.contains(part), "{said}");
        }
        assert_eq!(said.contains("--deadline"), error == NO_ROUTE, "{said}");
        assert!(written > 20, "{written}");
        drop(disk);
        let disk = open_disk(&memory, &options("y", 3, journal_on(&drive))).unwrap();
        for nth in 0..written {
            assert_eq!(read(&disk, 100 + nth), Ok(nth as u8 + 1));
        }
    }
}

#[test]
fn failed_journal_stops_writes_without_loss() {
    for nth in 6..30u64 {
        let memory = MemoryBucket::default();
        create_bucket_disk(&memory);
        let disk = MemoryDisk::new(vec![0; JOURNAL_BYTES], 512);
        JournalDevice::format(&disk, 99).unwrap();
        let faulty = Arc::new(FaultDisk::new(disk));
        faulty.add_fault(FaultTarget::Request(nth), Fault::Fail);
        let how = BucketOptions {
            commit: Duration::from_secs(1),
            ..options("x", 2, journal_on(&faulty))
        };
        let Ok(disk) = open_disk(&memory, &how) else { continue };
        let mut written = 0;
        let said = loop {
            match write(&disk, 100 + written, written as u8 + 1) {
                Ok(()) => written += 1,
                Err(error) => break error.to_string(),
            }
        };
        assert!(said.contains("/var/the journal: "), "{said}");
        disk.close();
        assert!(disk.close_error().is_some());
        drop(disk);
        // The bucket has it, even if the file is never read again.
        let how = BucketOptions { take_over: true, ..options("y", 3, None) };
        let disk = open_disk(&memory, &how).unwrap();
        for nth in 0..written {
            assert_eq!(read(&disk, 100 + nth), Ok(nth as u8 + 1));
        }
    }
}

#[test]
fn corrupt_journal_is_rejected() {
    let memory = MemoryBucket::default();
    create_bucket_disk(&memory);
    let drive = journal_disk(JOURNAL_BYTES);
    leave_unsent_writes(&memory, journal_on(&drive));
    let image = read_journal_bytes(&drive);
    let end = image.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    let told = |image: Vec<u8>| {
        let disk = Arc::new(MemoryDisk::new(image.clone(), 512));
        let engine = Arc::new(memory.client(Faults::default()));
        let how = options("a reader", 4, Some(JournalDevice::on_disk(disk.clone(), "the journal")));
        let said = BucketDisk::open_to_read(engine, "memory", &how).err();
        assert!(read_journal_bytes(&disk) == image, "it was changed");
        said.map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(told(image.clone()).contains("has what memory has not yet"));
    for other in [vec![], vec![0; 102_400], vec![0xFF; 102_400], b"letter.\n".repeat(9600)] {
        let said = told(other);
        assert!(said.contains("is no journal, or a damaged one"), "{said}");
    }
    let said = told(image[..100 << 10].to_vec());
    assert!(said.contains("damaged") && said.contains("bytes of"), "{said}");
    // Damage to a record that a later one declares durable is detected.
    let mut damaged = 0;
    let mut dice = Random::new(7);
    for at in (0..end).step_by(97) {
        let mut other = image.clone();
        other[at] ^= 1 << dice.next_below(8);
        damaged += u64::from(told(other).contains("the journal is damaged"));
    }
    assert!(damaged > 20, "{damaged}");
    // Headers with right checksums and wrong contents.
    let mut sane = 0;
    for round in 0..2000 {
        let mut other = image.clone();
        for head in [0, 4096] {
            let at = head + [8, 12, 48, 56, 64, 72, 80, 88, 96][dice.next_below(9) as usize];
            let value = match round % 3 {
                0 => dice.next_u64(),
                1 => dice.next_below(1 << 20),
                _ => dice.next_below(64) * 512,
            };
            other[at..at + 8].copy_from_slice(&value.to_le_bytes());
            let sum = twox_hash::XxHash3_64::oneshot(&other[head..head + 504]);
            other[head + 504..head + 512].copy_from_slice(&sum.to_le_bytes());
        }
        sane += u64::from(told(other).contains("has what memory has not yet"));
    }
    assert!(sane < 2000, "{sane}");
    assert_all_writes(&open_disk(&memory, &options("x", 5, journal_on(&drive))).unwrap());
}

#[test]
fn journal_file_never_overwrites_other_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let len = 16 << 20;
    let said = JournalDevice::file(&path, 1 << 20, 1).expect_err("it is too short");
    assert!(said.contains("16 MiB at least"), "{said}");
    let first = JournalDevice::file(&path, len, 1).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), len);
    let said = JournalDevice::file(&path, len, 2).expect_err("it has a user");
    assert!(said.contains("in use"), "{said}");
    drop(first);
    let memory = MemoryBucket::default();
    create_bucket_disk(&memory);
    leave_unsent_writes_in_file(&memory, &path);
    let disk =
        open_disk(&memory, &options("x", 5, Some(JournalDevice::file(&path, len, 3).unwrap())));
    assert_all_writes(&disk.unwrap());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);

    let letters = dir.path().join("letters");
    std::fs::write(&letters, "dear".repeat(9000)).unwrap();
    let how = options("x", 6, Some(JournalDevice::file(&letters, len, 4).unwrap()));
    let said = open_disk(&memory, &how).err().expect("it is no journal");
    assert!(said.contains("letters is no journal"), "{said}");
    assert_eq!(std::fs::read(&letters).unwrap(), "dear".repeat(9000).as_bytes());
    assert!(JournalDevice::file(dir.path(), len, 5).is_err());
}

fn leave_unsent_writes_in_file(memory: &MemoryBucket, path: &std::path::Path) {
    let away = Arc::new(AtomicBool::new(false));
    let engine =
        Arc::new(UnreachableBucket(memory.client(Faults::default()), away.clone(), NO_ROUTE));
    let journal = JournalDevice::file(path, 16 << 20, 2).unwrap();
    let disk = BucketDisk::open(engine, "memory", &options("x", 2, Some(journal))).unwrap();
    away.store(true, Ordering::SeqCst);
    for nth in 0..10u8 {
        write(&disk, 100 + u64::from(nth), nth + 1).unwrap();
    }
    write(&disk, 0, 77).unwrap();
}
