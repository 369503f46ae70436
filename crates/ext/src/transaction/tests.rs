//! No disk request is made under the exclusive lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use draconis_device::{
    ChainBounds, Disk, Error, Extent, Group, MemoryDisk, Pending, Properties, Random, ReadAnswer,
    Refused, Ticket, Urgency,
};
use draconis_types::Block;
use draconis_types::{AttributeChange, FileType};

use crate::testing::{FILE, formatted_disk, plain_disk, write_options};
use crate::{AccessTimes, NewNode, OpenOptions, RenameMode, Volume, XattrSet, check};

/// A disk that records requests made under the lock.
struct LockWatchDisk {
    disk: Arc<MemoryDisk>,
    volume: OnceLock<Weak<Volume>>,
    /// Requests under the lock: reads, and all others.
    held: [AtomicU64; 2],
    reads: AtomicU64,
}

impl LockWatchDisk {
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
        self.count_if_locked(0);
        self.disk.read(at, into, urgency)
    }
    fn submit_chain(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        self.count_if_locked(1);
        self.disk.submit_chain(chain, after)
    }
    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        self.count_if_locked(1);
        self.disk.wait_visible(ticket)
    }
    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        self.count_if_locked(1);
        self.disk.wait_durable(ticket)
    }
}

/// Each round works on a newly opened volume with empty caches.
#[test]
fn disk_is_read_without_write_lock() {
    let disk = formatted_disk(1024, 64 << 20);
    let (mut reads, mut held_reads) = (0, 0);
    for round in 0..4u32 {
        let watch = Arc::new(LockWatchDisk {
            disk: disk.clone(),
            volume: OnceLock::new(),
            held: Default::default(),
            reads: AtomicU64::new(0),
        });
        let small =
            OpenOptions { data_cache_bytes: 1 << 20, inode_cache: 64, ..OpenOptions::default() };
        let volume = Volume::open_for_writing(watch.clone(), small, write_options()).unwrap();
        let volume = Arc::new(volume);
        watch.volume.set(Arc::downgrade(&volume)).unwrap();
        let root = volume.root();
        for nth in 0..40u32 {
            let name = |what: &str, round: u32| format!("{what} {nth} {round}").into_bytes();
            let directory = NewNode { kind: FileType::Directory, mode: 0o755, ..FILE };
            let dir = volume.create(root, &name("dir", round), &directory).unwrap();
            for file in 0..20 {
                let file = volume.create(dir, format!("{file}").as_bytes(), &FILE).unwrap();
                volume.write(file, 0, &vec![1; 14_000]).unwrap();
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
            volume.sync_inode(file, nth % 2 == 0).unwrap();
            if nth % 10 == 0 {
                volume.commit().unwrap();
            }
        }
        volume.close().unwrap();
        let [held, others] = [0, 1].map(|nth| watch.held[nth].load(Ordering::Relaxed));
        assert_eq!(others, 0, "round {round}");
        held_reads += held;
        reads += watch.reads.load(Ordering::Relaxed);
    }
    // A block missing after the operation has changed something is read at once.
    assert!(reads > 500 && held_reads * 20 < reads, "{held_reads} of {reads}");
    println!("{held_reads} of {reads} reads with the gate held");
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
