//! Streams, read-ahead, concurrent readers, and disks with bad sectors.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use crate::common::storm::write_options;
use crate::common::{Image, tree};
use draconis_device::{
    Disk, Error as DiskError, Extent, MemoryDisk, Pending, Promise, Properties, ReadAnswer,
    Refused, Urgency, promise_pair,
};
use draconis_ext::check::{self, check};
use draconis_ext::{
    BlockLocation, Cookie, DirDamage, Entry, Error, InodeNumber, OpenOptions, Volume,
};
use draconis_testkit::{Event, RecordDisk};
use draconis_types::Block;
use draconis_types::FileType;

/// A disk that answers read-ahead later from another thread, and counts.
struct DelayedReadDisk {
    memory: Arc<MemoryDisk>,
    queue: Mutex<mpsc::Sender<(Extent, Block, Promise<ReadAnswer>)>>,
    counts: Arc<ReadCounters>,
    bad: Mutex<Vec<Range<u64>>>,
    /// True to drop read-ahead without an answer.
    forgetful: AtomicBool,
}

#[derive(Default)]
struct ReadCounters {
    bytes: AtomicU64,
    ahead: AtomicU64,
    flying: AtomicU64,
    most_flying: AtomicU64,
}

impl DelayedReadDisk {
    fn new(image: Vec<u8>) -> Arc<Self> {
        let memory = Arc::new(MemoryDisk::new(image, 512));
        let counts = Arc::new(ReadCounters::default());
        let (queue, requests) = mpsc::channel::<(Extent, Block, Promise<ReadAnswer>)>();
        let (disk, mine) = (memory.clone(), counts.clone());
        std::thread::spawn(move || {
            for (at, block, promise) in requests {
                draconis_testkit::wait::pause("the disk is slow", Duration::from_micros(100));
                mine.flying.fetch_sub(at.len_bytes, Ordering::Relaxed);
                promise.fulfill_promise(disk.read_now(at, block));
            }
        });
        Arc::new(Self {
            memory,
            queue: Mutex::new(queue),
            counts,
            bad: Mutex::default(),
            forgetful: AtomicBool::new(false),
        })
    }

    fn add_bad_range(&self, bytes: Range<u64>) {
        self.bad.lock().unwrap().push(bytes);
    }

    fn has_bad_sector(&self, at: Extent) -> bool {
        let end = at.end_bytes().unwrap();
        self.bad.lock().unwrap().iter().any(|bad| bad.start < end && at.start_bytes < bad.end)
    }

    fn bytes_read(&self) -> u64 {
        self.counts.bytes.load(Ordering::Relaxed)
    }
}

impl Disk for DelayedReadDisk {
    fn properties(&self) -> Properties {
        self.memory.properties()
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        self.counts.bytes.fetch_add(at.len_bytes, Ordering::Relaxed);
        if self.has_bad_sector(at) {
            let error = DiskError::ShortRead { extent: at, got_bytes: 0 };
            return Pending::ready(Err(Refused { payload: Some(into), error }));
        }
        if urgency == Urgency::Now {
            return self.memory.read(at, into, urgency);
        }
        self.counts.ahead.fetch_add(1, Ordering::Relaxed);
        let (promise, answer) = promise_pair();
        if self.forgetful.load(Ordering::Relaxed) {
            return answer;
        }
        let flying = self.counts.flying.fetch_add(at.len_bytes, Ordering::Relaxed);
        self.counts.most_flying.fetch_max(flying + at.len_bytes, Ordering::Relaxed);
        self.queue.lock().unwrap().send((at, into, promise)).unwrap();
        answer
    }
}

const LARGE_FILE_BYTES: usize = 12 << 20;
const SMALL_FILES: u64 = 300;

/// Makes a volume with one large file and some small ones, and its disk.
fn make_volume_with_files(options: OpenOptions) -> Option<(Volume, Arc<DelayedReadDisk>)> {
    let source = tempfile::tempdir().unwrap();
    std::fs::write(source.path().join("large"), tree::random_bytes(1, LARGE_FILE_BYTES)).unwrap();
    std::fs::create_dir(source.path().join("small")).unwrap();
    for nth in 0..SMALL_FILES {
        let bytes = tree::random_bytes(nth, 500 + nth as usize * 37);
        std::fs::write(source.path().join(format!("small/{nth}")), bytes).unwrap();
    }
    let image = Image::make(Some(source.path()), "24M", &["-b", "4096"])?;
    let disk = DelayedReadDisk::new(std::fs::read(&image.path).unwrap());
    let volume = Volume::open(disk.clone(), options).unwrap();
    Some((volume, disk))
}

fn read_large_file(volume: &Volume, step: usize) {
    let number = volume.lookup(volume.root(), b"large").unwrap();
    let expected = tree::random_bytes(1, LARGE_FILE_BYTES);
    let mut buffer = vec![0; step];
    let mut at = 0;
    while at < LARGE_FILE_BYTES {
        let got = volume.read_into(number, at as u64, &mut buffer).unwrap();
        assert!(buffer[..got] == expected[at..at + got], "at {at}");
        at += got;
    }
    assert_eq!(at, LARGE_FILE_BYTES);
}

#[test]
fn sequential_read_uses_read_ahead_once() {
    for step in [4096, 16 << 10, 1_000_003] {
        let Some((volume, disk)) = make_volume_with_files(OpenOptions::default()) else { return };
        read_large_file(&volume, step);
        assert!(
            disk.bytes_read() < LARGE_FILE_BYTES as u64 * 11 / 10,
            "{} bytes",
            disk.bytes_read()
        );
        assert!(disk.counts.ahead.load(Ordering::Relaxed) > 80);
        let most = disk.counts.most_flying.load(Ordering::Relaxed);
        let limit = OpenOptions::default().read_ahead_bytes;
        assert!(most <= limit + (1 << 20), "{most} bytes in flight");
    }
}

#[test]
fn small_cache_limits_reads_in_flight() {
    let options = OpenOptions { data_cache_bytes: 1 << 20, ..OpenOptions::default() };
    let Some((volume, disk)) = make_volume_with_files(options) else { return };
    read_large_file(&volume, 64 << 10);
    let most = disk.counts.most_flying.load(Ordering::Relaxed);
    assert!(most <= 512 << 10, "{most} bytes in flight");
    let data = volume.statistics().data;
    assert!(data.used <= data.capacity);
}

#[test]
fn readers_of_one_file_share_its_reads() {
    let Some((volume, disk)) = make_volume_with_files(OpenOptions::default()) else { return };
    std::thread::scope(|scope| {
        for step in [8192, 10_000, 65_536, 131_072] {
            let volume = &volume;
            scope.spawn(move || read_large_file(volume, step));
        }
    });
    assert!(disk.bytes_read() < LARGE_FILE_BYTES as u64 * 13 / 10, "{} bytes", disk.bytes_read());
}

#[test]
fn dropped_read_ahead_is_read_again() {
    let Some((volume, disk)) = make_volume_with_files(OpenOptions::default()) else { return };
    disk.forgetful.store(true, Ordering::Relaxed);
    read_large_file(&volume, 16 << 10);
}

#[test]
fn neighbouring_small_files_are_read_together() {
    let Some((volume, _)) = make_volume_with_files(OpenOptions::default()) else { return };
    let dir = volume.lookup(volume.root(), b"small").unwrap();
    let before = volume.statistics().device.reads;
    let mut numbers = Vec::new();
    volume
        .entries(dir, draconis_ext::Cookie::default(), false, |entry| {
            let entry = entry.unwrap();
            let nth: u64 = std::str::from_utf8(entry.name).unwrap().parse().unwrap();
            numbers.push((nth, entry.inode));
            true
        })
        .unwrap();
    assert_eq!(numbers.len() as u64, SMALL_FILES);
    for (nth, number) in numbers {
        let data = volume.read(number, 0, usize::MAX).unwrap();
        assert!(*data == tree::random_bytes(nth, 500 + nth as usize * 37));
    }
    let reads = volume.statistics().device.reads - before;
    assert!(reads < SMALL_FILES / 3, "{reads} reads for {SMALL_FILES} files");
}

#[test]
fn bad_sector_fails_only_its_block() {
    let Some((volume, disk)) = make_volume_with_files(OpenOptions::default()) else { return };
    let number = volume.lookup(volume.root(), b"large").unwrap();
    // Far from the directory, which was read already.
    let bad = 405u64;
    let runs = volume.map(number, bad * 4096).unwrap();
    let BlockLocation::Mapped(first) = runs[0].location else { panic!("{runs:?}") };
    let at = first.0 * 4096;
    disk.add_bad_range(at + 512..at + 1024);
    let expected = tree::random_bytes(1, LARGE_FILE_BYTES);
    for block in 350..500u64 {
        let answer = volume.read(number, block * 4096, 4096);
        if block == bad {
            assert!(matches!(answer, Err(Error::Io(_))), "{answer:?}");
        } else {
            let start = block as usize * 4096;
            assert!(*answer.unwrap() == expected[start..start + 4096], "block {block}");
        }
    }
    // A long read ends before the damage.
    let mut buffer = vec![0; 10 * 4096];
    assert_eq!(volume.read_into(number, 400 * 4096, &mut buffer).unwrap(), 5 * 4096);
}

#[test]
fn bad_inode_table_sector_fails_only_its_inodes() {
    let Some((volume, disk)) = make_volume_with_files(OpenOptions::default()) else { return };
    // Earlier reads are cached, so reopen on the bad disk.
    let dir = volume.lookup(volume.root(), b"small").unwrap();
    let victim = volume.lookup(dir, b"200").unwrap();
    let (table, bytes) = inode_table_range(&disk);
    let at = table + u64::from(victim.0 - 1) * bytes;
    disk.add_bad_range(at..at + bytes);
    let volume = Volume::open(disk, OpenOptions::default()).unwrap();
    assert!(matches!(volume.inode(victim), Err(Error::Io(_))));
    let mut readable = 0;
    for nth in 0..SMALL_FILES {
        let number = volume.lookup(dir, nth.to_string().as_bytes()).unwrap();
        readable += u64::from(volume.read(number, 0, 10).is_ok());
    }
    assert!((SMALL_FILES - 16..SMALL_FILES).contains(&readable), "{readable}");
}

/// Returns the offset of group 0's inode table, and the inode size.
fn inode_table_range(disk: &DelayedReadDisk) -> (u64, u64) {
    let block = disk.read_now(Extent::new(0, 8192), Block::private(8192)).unwrap();
    let le32 = |at: usize| {
        let mut field = [0; 4];
        block.copy_out(at, &mut field);
        u64::from(u32::from_le_bytes(field))
    };
    (le32(4096 + 8) * 4096, le32(1024 + 0x58) & 0xFFFF)
}

/// Distant directories in a listing with attributes, on a read-only and a writable volume.
#[test]
fn listed_directories_are_prefetched() {
    const DIRECTORIES: usize = 24;
    let source = tempfile::tempdir().unwrap();
    for nth in 0..DIRECTORIES {
        let dir = source.path().join(format!("{nth}"));
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("file"), tree::random_bytes(nth as u64, 300_000)).unwrap();
    }
    for kind in ["ext2", "ext4"] {
        let Some(image) = Image::make(Some(source.path()), "24M", &["-b", "1024", "-t", kind])
        else {
            return;
        };
        let bytes = std::fs::read(&image.path).unwrap();
        let waited = |is_written: bool, is_told: bool| {
            let disk = Arc::new(RecordDisk::new(MemoryDisk::new(bytes.clone(), 512)));
            let volume = match is_written {
                true => {
                    Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options())
                }
                false => Volume::open(disk.clone(), OpenOptions::default()),
            };
            let volume = volume.unwrap();
            let mut directories = vec![];
            let list = |dir, each: &mut dyn FnMut(InodeNumber)| {
                let visit = |found: std::result::Result<Entry<'_>, DirDamage>| {
                    each(found.unwrap().inode);
                    true
                };
                volume.entries(dir, Cookie(0), false, visit).unwrap();
            };
            list(volume.root(), &mut |inode| {
                if volume.attributes(inode).unwrap().kind == FileType::Directory {
                    directories.push(inode);
                    if is_told {
                        volume.prefetch_directory(inode);
                    }
                }
            });
            disk.take_events();
            directories.iter().for_each(|dir| list(*dir, &mut drop));
            assert_eq!(directories.len(), DIRECTORIES + 1, "with lost+found");
            let read = |event: &Event| matches!(event, Event::Read(_, Urgency::Now));
            disk.take_events().iter().filter(|event| read(event)).count()
        };
        for is_written in [false, true] {
            assert!(waited(is_written, false) > DIRECTORIES / 2, "{kind} {is_written}");
            assert_eq!(waited(is_written, true), 0, "{kind} {is_written}");
        }
    }
}

/// A check of the same: second map blocks, and directories.
#[test]
fn check_prefetches_metadata() {
    const DIRECTORIES: usize = 60;
    let source = tempfile::tempdir().unwrap();
    for nth in 0..DIRECTORIES {
        let dir = source.path().join(format!("{nth}"));
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("file"), tree::random_bytes(nth as u64, 100_000)).unwrap();
    }
    let Some(image) = Image::make(Some(source.path()), "24M", &["-b", "1024"]) else { return };
    let disk = Arc::new(RecordDisk::new(MemoryDisk::new(std::fs::read(&image.path).unwrap(), 512)));
    let shared: Arc<dyn Disk> = disk.clone();
    let report = check(&shared, check::CheckOptions::default(), &|_, _| {}).unwrap();
    assert!(report.is_clean() && report.directories as usize == DIRECTORIES + 2);
    let read = |event: &Event| matches!(event, Event::Read(_, Urgency::Now));
    let waited = disk.take_events().iter().filter(|event| read(event)).count();
    assert!(waited < DIRECTORIES / 2, "{waited} reads were waited for alone");
}

#[test]
fn read_slices_outlive_cache() {
    let options = OpenOptions { data_cache_bytes: 1 << 20, ..OpenOptions::default() };
    let Some((volume, _)) = make_volume_with_files(options) else { return };
    let number = volume.lookup(volume.root(), b"large").unwrap();
    let held: Vec<_> = (0..LARGE_FILE_BYTES as u64 / 131_072)
        .map(|nth| volume.read(number, nth * 131_072, 1000).unwrap())
        .collect();
    read_large_file(&volume, 1 << 20);
    drop(volume);
    let expected = tree::random_bytes(1, LARGE_FILE_BYTES);
    for (nth, data) in held.iter().enumerate() {
        assert!(data[..] == expected[nth * 131_072..nth * 131_072 + 1000]);
        assert!(data.slice(10..20)[..] == expected[nth * 131_072 + 10..nth * 131_072 + 20]);
    }
}

#[test]
fn dot_entries_are_listed_on_request() {
    let Some((volume, _)) = make_volume_with_files(OpenOptions::default()) else { return };
    let dir = volume.lookup(volume.root(), b"small").unwrap();
    let list = |dots| {
        let mut names = Vec::new();
        let from = draconis_ext::Cookie::default();
        volume
            .entries(dir, from, dots, |entry| {
                let entry = entry.unwrap();
                names.push((entry.name.to_vec(), entry.inode));
                true
            })
            .unwrap();
        names
    };
    let (hidden, shown) = (list(false), list(true));
    assert_eq!(hidden.len() as u64, SMALL_FILES);
    assert_eq!(shown[..2], [(b".".to_vec(), dir), (b"..".to_vec(), volume.root())]);
    assert_eq!(shown[2..], hidden);
}
