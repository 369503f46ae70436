//! A journal for a bucket: it has awaited data while the bucket is away, and uploads it later.
//! Without the journal, opening is refused with its path. No journal file causes a panic.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use draconis_bucket::{BucketDisk, BucketOptions, Faults, JournalDevice, MemoryBucket};
use draconis_device::{
    Disk, Error, Extent, Fault, FaultDisk, FaultTarget, Group, MemoryDisk, Random, Write, conform,
};
use draconis_exchange::heap::Block;

use common::Distant;

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

fn drive(len: usize) -> Arc<MemoryDisk> {
    let disk = MemoryDisk::new(vec![0; len], 512);
    JournalDevice::format(&disk, 99).unwrap();
    Arc::new(disk)
}

fn local(drive: &Arc<impl Disk + 'static>) -> Option<JournalDevice> {
    Some(JournalDevice::on(drive.clone(), "/var/the journal"))
}

fn bytes(drive: &MemoryDisk) -> Vec<u8> {
    let len = drive.properties().len_bytes;
    let all = drive.read_now(Extent::new(0, len), Block::private(len as usize)).unwrap();
    all.into_private().to_vec()
}

fn made(memory: &MemoryBucket) {
    let engine = Arc::new(memory.client(Faults::default()));
    drop(BucketDisk::create(engine, "memory", LEN_BYTES, false, &options("maker", 1, None)));
}

fn opened(memory: &MemoryBucket, options: &BucketOptions) -> Result<BucketDisk, String> {
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
fn left(memory: &MemoryBucket, journal: Option<JournalDevice>) {
    let away = Arc::new(AtomicBool::new(false));
    let engine = Arc::new(Distant(memory.client(Faults::default()), away.clone()));
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

fn is_all_there(disk: &BucketDisk) {
    for nth in 0..10u8 {
        assert_eq!(read(disk, 100 + u64::from(nth)), Ok(nth + 1), "{nth}");
    }
    assert_eq!(read(disk, 0), Ok(77));
}

#[test]
fn it_does_what_every_disk_does() {
    let mut seed = 0;
    conform::check_all(|| {
        seed += 1;
        let faults = Faults { seed, refused: 8, lost: 8, late: 8, slow: 2, dies_after: None };
        let engine = Arc::new(MemoryBucket::default().client(faults));
        let how = BucketOptions {
            deadline: Duration::from_secs(60),
            ..options("a disk", seed.into(), local(&drive(JOURNAL_BYTES * 4)))
        };
        BucketDisk::create(engine, "memory", LEN_BYTES, false, &how).unwrap()
    });
}

#[test]
fn what_was_acknowledged_is_sent_later_and_missed_by_others() {
    let memory = MemoryBucket::default();
    made(&memory);
    let drive = drive(JOURNAL_BYTES);
    left(&memory, local(&drive));
    // Without the journal, from anywhere: the error has its path, and the next step.
    let said = opened(&memory, &options("another", 3, None)).err().expect("it is refused");
    assert!(said.contains("with a journal, /var/the journal, by the one that died"), "{said}");
    assert!(said.contains("--journal /var/the journal") && said.contains("--take-over"), "{said}");
    // A reader that knows the journal must not see less than was acknowledged.
    let engine = || Arc::new(memory.client(Faults::default()));
    let how = options("a reader", 4, local(&drive));
    let said = BucketDisk::open_to_read(engine(), "memory", &how).err().expect("it waits");
    assert!(said.to_string().contains("has what memory has not yet"), "{said}");
    let reader = BucketDisk::open_to_read(engine(), "memory", &options("", 4, None)).unwrap();
    assert_eq!(read(&reader, 109), Ok(0));

    let disk = opened(&memory, &options("the next", 5, local(&drive))).unwrap();
    assert!(disk.journal_statistics().unwrap().sent_late > 0);
    is_all_there(&disk);
    write(&disk, 200, 9).unwrap();
    disk.close();
    assert_eq!(disk.close_error(), None);
    drop(disk);
    // It was unmounted, so others may open it, and the journal serves another store.
    let disk = opened(&memory, &options("another", 6, None)).unwrap();
    is_all_there(&disk);
    assert_eq!(read(&disk, 200), Ok(9));
    let other = MemoryBucket::default();
    made(&other);
    drop(opened(&other, &options("the next", 7, local(&drive))).unwrap());
}

#[test]
fn a_bucket_that_comes_back_is_sent_all_without_being_asked() {
    let memory = MemoryBucket::default();
    made(&memory);
    let (drive, away) = (drive(JOURNAL_BYTES), Arc::new(AtomicBool::new(false)));
    let engine = Arc::new(Distant(memory.client(Faults::default()), away.clone()));
    let disk = BucketDisk::open(engine, "memory", &options("x", 2, local(&drive))).unwrap();
    away.store(true, Ordering::SeqCst);
    write(&disk, 100, 1).unwrap();
    write(&disk, 0, 77).unwrap();
    away.store(false, Ordering::SeqCst);
    let is_there = || {
        let engine = Arc::new(memory.client(Faults::default()));
        let reader = BucketDisk::open_to_read(engine, "memory", &options("", 3, None)).unwrap();
        (read(&reader, 100), read(&reader, 0)) == (Ok(1), Ok(77))
    };
    while !is_there() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_another_machine_has_made_void_is_named_and_kept() {
    let memory = MemoryBucket::default();
    made(&memory);
    let drive = drive(JOURNAL_BYTES);
    left(&memory, local(&drive));
    let how = BucketOptions { take_over: true, ..options("the other machine", 3, None) };
    let other = opened(&memory, &how).unwrap();
    write(&other, 100, 50).unwrap();
    drop(other);
    let before = bytes(&drive);
    for takes_over in [false, true] {
        let how = BucketOptions { take_over: takes_over, ..options("the first", 4, local(&drive)) };
        let said = opened(&memory, &how).err().expect("it is void");
        assert!(said.contains("without what only /var/the journal has: "), "{said}");
        assert!(said.contains("data/00000002-") && said.contains("more, "), "{said}");
        assert!(said.contains("move it away, or delete it"), "{said}");
    }
    assert!(bytes(&drive) == before, "it was changed");
    let disk = opened(&memory, &options("the first", 5, None)).unwrap();
    assert_eq!((read(&disk, 100), read(&disk, 101)), (Ok(50), Ok(0)));
}

#[test]
fn what_waits_for_one_store_is_not_sent_to_another() {
    let (one, two) = (MemoryBucket::default(), MemoryBucket::default());
    made(&one);
    let engine = Arc::new(two.client(Faults::default()));
    drop(BucketDisk::create(engine, "two", LEN_BYTES, false, &options("maker", 8, None)).unwrap());
    let drive = drive(JOURNAL_BYTES);
    left(&one, local(&drive));
    let keys = two.keys();
    let said = opened(&two, &options("x", 3, local(&drive))).err().expect("it is another");
    assert!(said.contains("has what waits for memory, not for the store at"), "{said}");
    let engine = Arc::new(two.client(Faults::default()));
    let made = BucketDisk::create(engine, "two", LEN_BYTES, true, &options("", 9, local(&drive)));
    assert!(made.is_err(), "it would be thrown away");
    assert_eq!(two.keys().len(), keys.len());
    is_all_there(&opened(&one, &options("x", 4, local(&drive))).unwrap());
}

#[test]
fn a_full_journal_makes_writers_wait() {
    let memory = MemoryBucket::default();
    made(&memory);
    let (drive, away) = (drive(64 << 10), Arc::new(AtomicBool::new(false)));
    let engine = Arc::new(Distant(memory.client(Faults::default()), away.clone()));
    let deadline = Duration::from_secs(60);
    let how = BucketOptions { deadline, ..options("x", 2, local(&drive)) };
    let disk = BucketDisk::open(engine, "memory", &how).unwrap();
    away.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            for nth in 0..300u64 {
                write(&disk, 100 + nth, nth as u8).unwrap();
            }
        });
        while disk.journal_statistics().unwrap().full == 0 && !writing.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!writing.is_finished());
        away.store(false, Ordering::SeqCst);
    });
    drop(disk);
    let disk = opened(&memory, &options("", 3, None)).unwrap();
    for nth in 0..300u64 {
        assert_eq!(read(&disk, 100 + nth), Ok(nth as u8));
    }
}

#[test]
fn a_full_journal_and_a_bucket_that_is_away_end_writing_and_lose_nothing() {
    let memory = MemoryBucket::default();
    made(&memory);
    let (drive, away) = (drive(64 << 10), Arc::new(AtomicBool::new(false)));
    let engine = Arc::new(Distant(memory.client(Faults::default()), away.clone()));
    let disk = BucketDisk::open(engine, "memory", &options("x", 2, local(&drive))).unwrap();
    away.store(true, Ordering::SeqCst);
    let mut written = 0;
    let said = loop {
        match write(&disk, 100 + written, written as u8 + 1) {
            Ok(()) => written += 1,
            Err(error) => break error.to_string(),
        }
    };
    assert!(said.contains("/var/the journal is full") && said.contains("--deadline"), "{said}");
    assert!(written > 20, "{written}");
    drop(disk);
    let disk = opened(&memory, &options("y", 3, local(&drive))).unwrap();
    for nth in 0..written {
        assert_eq!(read(&disk, 100 + nth), Ok(nth as u8 + 1));
    }
}

#[test]
fn a_journal_that_fails_ends_writing_and_loses_nothing() {
    for nth in 6..30u64 {
        let memory = MemoryBucket::default();
        made(&memory);
        let disk = MemoryDisk::new(vec![0; JOURNAL_BYTES], 512);
        JournalDevice::format(&disk, 99).unwrap();
        let faulty = Arc::new(FaultDisk::new(disk));
        faulty.add(FaultTarget::Request(nth), Fault::Fail);
        let how =
            BucketOptions { commit: Duration::from_secs(1), ..options("x", 2, local(&faulty)) };
        let Ok(disk) = opened(&memory, &how) else { continue };
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
        let disk = opened(&memory, &how).unwrap();
        for nth in 0..written {
            assert_eq!(read(&disk, 100 + nth), Ok(nth as u8 + 1));
        }
    }
}

#[test]
fn no_bytes_of_a_journal_are_believed() {
    let memory = MemoryBucket::default();
    made(&memory);
    let drive = drive(JOURNAL_BYTES);
    left(&memory, local(&drive));
    let image = bytes(&drive);
    let end = image.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    let told = |image: Vec<u8>| {
        let disk = Arc::new(MemoryDisk::new(image.clone(), 512));
        let engine = Arc::new(memory.client(Faults::default()));
        let how = options("a reader", 4, Some(JournalDevice::on(disk.clone(), "the journal")));
        let said = BucketDisk::open_to_read(engine, "memory", &how).err();
        assert!(bytes(&disk) == image, "it was changed");
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
        other[at] ^= 1 << dice.below(8);
        damaged += u64::from(told(other).contains("the journal is damaged"));
    }
    assert!(damaged > 20, "{damaged}");
    // Headers with right checksums and wrong contents.
    let mut sane = 0;
    for round in 0..2000 {
        let mut other = image.clone();
        for head in [0, 4096] {
            let at = head + [8, 12, 48, 56, 64, 72, 80, 88, 96][dice.below(9) as usize];
            let value = match round % 3 {
                0 => dice.next_u64(),
                1 => dice.below(1 << 20),
                _ => dice.below(64) * 512,
            };
            other[at..at + 8].copy_from_slice(&value.to_le_bytes());
            let sum = twox_hash::XxHash3_64::oneshot(&other[head..head + 504]);
            other[head + 504..head + 512].copy_from_slice(&sum.to_le_bytes());
        }
        sane += u64::from(told(other).contains("has what memory has not yet"));
    }
    assert!(sane < 2000, "{sane}");
    is_all_there(&opened(&memory, &options("x", 5, local(&drive))).unwrap());
}

#[test]
fn a_file_is_made_once_and_nothing_else_is_written_over() {
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
    made(&memory);
    left_in_file(&memory, &path);
    let disk = opened(&memory, &options("x", 5, Some(JournalDevice::file(&path, len, 3).unwrap())));
    is_all_there(&disk.unwrap());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);

    let letters = dir.path().join("letters");
    std::fs::write(&letters, "dear".repeat(9000)).unwrap();
    let how = options("x", 6, Some(JournalDevice::file(&letters, len, 4).unwrap()));
    let said = opened(&memory, &how).err().expect("it is no journal");
    assert!(said.contains("letters is no journal"), "{said}");
    assert_eq!(std::fs::read(&letters).unwrap(), "dear".repeat(9000).as_bytes());
    assert!(JournalDevice::file(dir.path(), len, 5).is_err());
}

fn left_in_file(memory: &MemoryBucket, path: &std::path::Path) {
    let away = Arc::new(AtomicBool::new(false));
    let engine = Arc::new(Distant(memory.client(Faults::default()), away.clone()));
    let journal = JournalDevice::file(path, 16 << 20, 2).unwrap();
    let disk = BucketDisk::open(engine, "memory", &options("x", 2, Some(journal))).unwrap();
    away.store(true, Ordering::SeqCst);
    for nth in 0..10u8 {
        write(&disk, 100 + u64::from(nth), nth + 1).unwrap();
    }
    write(&disk, 0, 77).unwrap();
}
