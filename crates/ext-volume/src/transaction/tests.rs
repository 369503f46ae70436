//! Disk requests under the exclusive lock.
//!
//! No group is submitted and no thread waits under the lock. A change reads its blocks before
//! it begins; reads under the lock are left in three places, the first two bounded by tests:
//!
//! - A free of blocks below more indirect blocks than `MAX_PRELOADED_NODES` reads the others, and
//!   the bitmaps of their groups, as it comes to them: at most each once.
//! - After `MAX_READ_RETRIES` misses a change reads with the lock held: its blocks do not fit into
//!   the cache.
//! - An allocation that finds its group full after the change has begun reads the bitmaps of the
//!   next one: at most those of each group once.
//!
//! Reads ahead may start under the lock. Nobody waits for them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use draconis_device::{
    ChainBounds, Disk, Error, Extent, Group, MemoryDisk, Pending, Properties, Random, ReadAnswer,
    Refused, Ticket, Urgency,
};
use draconis_ext_offline::check;
use draconis_types::Block;
use draconis_types::{AttributeChange, FileType};

use crate::format::xattr::XattrSet;
use crate::testing::{FILE, formatted_disk, journaled_disk, plain_disk, write_options};
use crate::{AccessTimes, NewNode, OpenOptions, RenameMode, Reserve, Volume};

/// A disk that records requests made under the lock.
struct LockWatchDisk {
    disk: Arc<MemoryDisk>,
    volume: OnceLock<Weak<Volume>>,
    /// Requests under the lock: reads that block, reads ahead, and all others.
    held: [AtomicU64; 3],
    reads: AtomicU64,
}

const READ: usize = 0;
const AHEAD: usize = 1;
const OTHER: usize = 2;

impl LockWatchDisk {
    /// Opens the volume of a disk with empty caches, and counts its requests.
    fn open(disk: &Arc<MemoryDisk>, cache_bytes: u64) -> (Arc<Self>, Arc<Volume>) {
        let watch = Arc::new(Self {
            disk: disk.clone(),
            volume: OnceLock::new(),
            held: Default::default(),
            reads: AtomicU64::new(0),
        });
        let small = OpenOptions {
            data_cache_bytes: cache_bytes,
            inode_cache: 64,
            ..OpenOptions::default()
        };
        let volume = Volume::open_for_writing(watch.clone(), small, write_options()).unwrap();
        let volume = Arc::new(volume);
        watch.volume.set(Arc::downgrade(&volume)).unwrap();
        (watch, volume)
    }

    fn held(&self, what: usize) -> u64 {
        self.held[what].load(Ordering::Relaxed)
    }

    fn count_if_locked(&self, nth: usize) {
        let volume = self.volume.get().and_then(Weak::upgrade);
        let writing = volume.as_ref().and_then(|volume| volume.writing.as_ref());
        if writing.is_some_and(|writing| writing.state.is_locked_exclusive()) {
            self.held[nth].fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Disk for LockWatchDisk {
    fn properties(&self) -> Properties {
        self.disk.properties()
    }
    fn chain_bounds(&self) -> ChainBounds {
        self.disk.chain_bounds()
    }
    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.count_if_locked(if urgency == Urgency::Now { READ } else { AHEAD });
        self.disk.read(at, into, urgency)
    }
    fn submit_chain(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        self.count_if_locked(OTHER);
        self.disk.submit_chain(chain, after)
    }
    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        self.count_if_locked(OTHER);
        self.disk.wait_visible(ticket)
    }
    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        self.count_if_locked(OTHER);
        self.disk.wait_durable(ticket)
    }
}

/// Each round works on a newly opened volume with empty caches.
#[test]
fn disk_is_read_without_write_lock() {
    for disk in [formatted_disk(1024, 64 << 20), journaled_disk(1024, 64 << 20)] {
        work_without_reads_under_lock(&disk);
    }
}

fn work_without_reads_under_lock(disk: &Arc<MemoryDisk>) {
    let mut reads = 0;
    for round in 0..4u32 {
        let (watch, volume) = LockWatchDisk::open(disk, 1 << 20);
        let root = volume.root();
        for nth in 0..40u32 {
            let name = |what: &str, round: u32| format!("{what} {nth} {round}").into_bytes();
            let directory = NewNode { kind: FileType::Directory, mode: 0o755, ..FILE };
            let dir = volume.create(root, &name("dir", round), &directory).unwrap();
            for file in 0..20 {
                let file = volume.create(dir, format!("{file}").as_bytes(), &FILE).unwrap();
                volume.write(file, 0, &vec![1; 14_000]).unwrap();
            }
            // A file with holes, in many pieces: cut and deleted in the next round.
            let pieces = volume.create(dir, b"pieces", &FILE).unwrap();
            for piece in 0..40u64 {
                volume.write(pieces, piece * 9000, &[3; 1500]).unwrap();
            }
            let Some(before) = round.checked_sub(1) else { continue };
            let old = volume.lookup(root, &name("dir", before)).unwrap();
            let file = volume.lookup(old, b"3").unwrap();
            volume.write(file, 10_000, &[2; 3000]).unwrap();
            volume.set_xattr(file, b"user.a", &[1; 600], XattrSet::Any, false).unwrap();
            let cut = volume.lookup(old, b"4").unwrap();
            let shorter = AttributeChange { size_bytes: Some(3000), ..AttributeChange::default() };
            volume.set_attributes(cut, &shorter).unwrap();
            volume.rename(old, b"5", dir, b"moved", RenameMode::Replace).unwrap();
            volume.rename(old, b"6", old, b"7", RenameMode::Replace).unwrap();
            volume.unlink(old, b"8").unwrap();
            let pieces = volume.lookup(old, b"pieces").unwrap();
            let half = AttributeChange { size_bytes: Some(150_000), ..Default::default() };
            volume.set_attributes(pieces, &half).unwrap();
            volume.fallocate(pieces, 20_000, 30_000, Reserve::PunchHole).unwrap();
            volume
                .fallocate(pieces, 60_100, 30_000, Reserve::ZeroRange { keep_size: true })
                .unwrap();
            volume.unlink(old, b"pieces").unwrap();
            volume.sync_inode(file, nth % 2 == 0).unwrap();
            if nth % 10 == 0 {
                volume.commit().unwrap();
            }
        }
        volume.close().unwrap();
        let held = [READ, OTHER].map(|what| watch.held(what));
        assert_eq!(held, [0, 0], "round {round}: reads, and other requests");
        reads += watch.reads.load(Ordering::Relaxed);
    }
    assert!(reads > 500, "{reads}");
}

/// Writes a file of 40 MiB, and deletes it with empty caches.
#[test]
fn free_of_large_file_reads_only_its_map_with_lock() {
    let disk = formatted_disk(1024, 64 << 20);
    let (_, volume) = LockWatchDisk::open(&disk, 1 << 20);
    let file = volume.create(volume.root(), b"large", &FILE).unwrap();
    let data = vec![1; 1 << 20];
    for mib in 0..40 {
        volume.write(file, mib << 20, &data).unwrap();
    }
    volume.close().unwrap();
    drop(volume);
    let (watch, volume) = LockWatchDisk::open(&disk, 1 << 20);
    volume.unlink(volume.root(), b"large").unwrap();
    let map_blocks = 40 * 1024 / 256 + 2;
    let held = watch.held(READ);
    assert!(held <= map_blocks, "{held} reads for {map_blocks} map blocks");
    assert_eq!(watch.held(OTHER), 0);
    volume.close().unwrap();
}

/// With a cache of a few blocks, each change ends, and reads no more than it has blocks.
#[test]
fn changes_that_exceed_cache_read_with_lock() {
    let disk = formatted_disk(1024, 64 << 20);
    let (watch, volume) = LockWatchDisk::open(&disk, 1);
    let mut before = 0;
    for nth in 0..200u64 {
        let file = volume.create(volume.root(), format!("{nth}").as_bytes(), &FILE).unwrap();
        volume.write(file, nth * 300_000, &[1; 100]).unwrap();
        let held = watch.held(READ) - std::mem::replace(&mut before, watch.held(READ));
        assert!(held <= 40, "{held} reads of two changes");
    }
    assert_eq!(watch.held(OTHER), 0);
    volume.close().unwrap();
}

/// Threads change, read, sync and truncate, with tiny caches, under both protocols. Every file
/// holds the last data of its thread, and the volume is consistent afterwards.
#[test]
fn concurrent_writers_with_small_caches_leave_clean_volume() {
    for atomic in [false, true] {
        let disk = plain_disk(1024, 32 << 20);
        let disk = if atomic { disk.atomic_against_power_cuts() } else { disk };
        let disk = Arc::new(disk);
        let small = OpenOptions {
            data_cache_bytes: 256 << 10,
            inode_cache: 8,
            block_map_cache: 8,
            ..OpenOptions::default()
        };
        let mut writing = write_options();
        writing.dirty_bytes = 1 << 20;
        writing.atime = AccessTimes::Strict;
        let volume = Volume::open_for_writing(disk.clone(), small, writing).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let volume = &volume;
                scope.spawn(move || run_random_operations(volume, thread));
            }
        });
        volume.close().unwrap();
        drop(volume);
        let disk: Arc<dyn Disk> = disk;
        let report = check::check(&disk, check::CheckOptions::default(), &|_, _| {}).unwrap();
        assert_eq!(report.problems, [], "atomic: {atomic}");
    }
}

fn run_random_operations(volume: &Volume, thread: u8) {
    let mut random = Random::new(thread.into());
    let directory = NewNode { kind: FileType::Directory, mode: 0o755, ..FILE };
    let dir = volume.create(volume.root(), &[b'a' + thread], &directory).unwrap();
    let mut files: Vec<Option<(u8, usize)>> = vec![None; 12];
    for turn in 0..600u32 {
        let nth = random.next_below(12) as usize;
        let name = format!("file {nth}").into_bytes();
        match (random.next_below(8), files[nth]) {
            (0..4, _) => {
                let file = match volume.lookup(dir, &name) {
                    Ok(file) => file,
                    Err(_) => volume.create(dir, &name, &FILE).unwrap(),
                };
                let shorter = AttributeChange { size_bytes: Some(0), ..Default::default() };
                volume.set_attributes(file, &shorter).unwrap();
                let (byte, len) = (turn as u8, 1 + random.next_below(60_000) as usize);
                assert_eq!(volume.write(file, 0, &vec![byte; len]), Ok(len));
                files[nth] = Some((byte, len));
            }
            (4, Some(_)) => {
                volume.unlink(dir, &name).unwrap();
                files[nth] = None;
            }
            (5, Some((byte, len))) => {
                let other = random.next_below(12) as usize;
                let to = format!("file {other}").into_bytes();
                volume.rename(dir, &name, dir, &to, RenameMode::Replace).unwrap();
                files[nth] = None;
                files[other] = Some((byte, len));
            }
            (6, _) if turn % 3 == 0 => volume.sync().unwrap(),
            (_, Some((byte, len))) => {
                let file = volume.lookup(dir, &name).unwrap();
                let mut bytes = vec![!byte; len + 1];
                assert_eq!(volume.read_into(file, 0, &mut bytes), Ok(len));
                assert!(bytes[..len].iter().all(|it| *it == byte), "thread {thread}, {turn}");
                volume.touch_atime(file);
            }
            (_, None) => assert!(volume.lookup(dir, &name).is_err()),
        }
    }
}
