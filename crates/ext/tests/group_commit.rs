//! Group commit: during commits, concurrent changes join one batch.

use crate::common;

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::common::storm::write_options;
use crate::common::{Image, run_tool};
use draconis_device::{
    Disk, Error, Extent, Group, MemoryDisk, Pending, Properties, ReadAnswer, Refused, Ticket,
    Urgency, Write,
};
use draconis_ext::{NewNode, OpenOptions, Volume};
use draconis_types::Block;
use draconis_types::FileType;

const THREADS: u64 = 16;
const FILE: NewNode<'_> =
    NewNode { kind: FileType::File, mode: 0o644, uid: 0, gid: 0, device: (0, 0), target: b"" };

/// A disk with slow flushes. One flush runs at a time and covers the writes before its start. A
/// dependent write is made after its dependency is durable.
struct SlowFlushDisk {
    disk: MemoryDisk,
    flush: Duration,
    line: Mutex<FlushQueue>,
    changed: Condvar,
}

/// Queue of groups.
#[derive(Default)]
struct FlushQueue {
    waiting: VecDeque<PendingGroup>,
    /// Last durable ticket.
    durable: u64,
    /// Contents after a power loss.
    medium: Vec<u8>,
    flushes: u64,
    is_flushing: bool,
}

/// A group that is not durable.
struct PendingGroup {
    ticket: u64,
    follows: u64,
    writes: Vec<(u64, Vec<u8>)>,
}

impl SlowFlushDisk {
    fn new(bytes: Vec<u8>, flush: Duration) -> Self {
        let line = FlushQueue { medium: bytes.clone(), ..FlushQueue::default() };
        let disk = MemoryDisk::new(bytes, 512);
        Self { disk, flush, line: Mutex::new(line), changed: Condvar::new() }
    }

    fn lock_queue(&self) -> MutexGuard<'_, FlushQueue> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Disk for SlowFlushDisk {
    fn properties(&self) -> Properties {
        self.disk.properties()
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        self.disk.read(at, into, urgency)
    }

    fn submit_chain(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let bytes = |write: &Write| {
            let mut bytes = vec![0; write.block.len()];
            write.block.copy_out(0, &mut bytes);
            (write.at_bytes, bytes)
        };
        let all: Vec<Vec<_>> =
            chain.iter().map(|group| group.writes.iter().map(bytes).collect()).collect();
        let mut line = self.lock_queue();
        let tickets = self.disk.submit_chain(chain, after)?;
        let mut follows = after.iter().map(|it| it.0).max().unwrap_or(0);
        for (Ticket(ticket), writes) in tickets.iter().zip(all) {
            line.waiting.push_back(PendingGroup { ticket: *ticket, follows, writes });
            follows = *ticket;
        }
        Ok(tickets)
    }

    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        self.disk.wait_visible(ticket)
    }

    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        let mut line = self.lock_queue();
        while line.durable < ticket.0 {
            if line.is_flushing {
                line = self.changed.wait(line).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let durable = line.durable;
            let written = line.waiting.iter().take_while(|group| group.follows <= durable).count();
            line.is_flushing = true;
            line.flushes += 1;
            drop(line);
            draconis_testkit::wait::pause("a flush takes time", self.flush);
            line = self.lock_queue();
            line.is_flushing = false;
            for group in line.waiting.drain(..written).collect::<Vec<_>>() {
                line.durable = group.ticket;
                for (at, bytes) in group.writes {
                    let at = at as usize;
                    line.medium[at..at + bytes.len()].copy_from_slice(&bytes);
                }
            }
            self.changed.notify_all();
        }
        drop(line);
        self.disk.wait_durable(ticket)
    }
}

/// Makes an empty volume on such a disk.
fn make_empty_volume(
    kind: &str,
    size: &str,
    more: &[&str],
    options: OpenOptions,
    flush: Duration,
) -> Option<(Arc<SlowFlushDisk>, Volume)> {
    let arguments = [&["-t", kind, "-I", "256"], more].concat();
    let image = Image::make(None, size, &arguments)?;
    let disk = Arc::new(SlowFlushDisk::new(std::fs::read(&image.path).unwrap(), flush));
    let volume = Volume::open_for_writing(disk.clone(), options, write_options()).unwrap();
    Some((disk, volume))
}

/// Closes the volume, and checks it with e2fsck.
fn close_and_fsck(disk: Arc<SlowFlushDisk>, volume: Volume) -> Image {
    volume.close().unwrap();
    drop(volume);
    let disk = Arc::into_inner(disk).unwrap().disk;
    let left = Image::from_bytes(&disk.into_bytes());
    run_tool("e2fsck", &["-fn", left.path()]).unwrap();
    left
}

#[test]
fn concurrent_syncs_share_commits() {
    const SYNCS: u64 = 20;
    for kind in ["ext4", "ext2"] {
        let slow = make_empty_volume(
            kind,
            "24M",
            &["-b", "4096"],
            OpenOptions::default(),
            Duration::from_millis(2),
        );
        let Some((disk, volume)) = slow else { return };
        let name = |nth: u64| format!("{nth}");
        let files: Vec<_> = (0..THREADS)
            .map(|nth| volume.create(volume.root(), name(nth).as_bytes(), &FILE).unwrap())
            .collect();
        volume.sync().unwrap();
        let flushes = |syncs: &dyn Fn()| {
            let before = disk.lock_queue().flushes;
            syncs();
            disk.lock_queue().flushes - before
        };
        let append = |nth: u64| {
            let file = files[nth as usize];
            for step in 0..SYNCS {
                volume.write(file, step * 4096, &[nth as u8; 4096]).unwrap();
                volume.sync_inode(file, false).unwrap();
            }
        };
        let alone = flushes(&|| append(0));
        assert!((2 * SYNCS..=2 * SYNCS + 1).contains(&alone), "{kind}: {alone} flushes");
        let together = flushes(&|| {
            std::thread::scope(|scope| {
                let append = &append;
                (1..THREADS).for_each(|nth| drop(scope.spawn(move || append(nth))));
            });
        });
        println!("{kind}: alone {alone}, together {together}");
        // How many share one depends on the machine; without sharing none does.
        let most = alone * (THREADS - 1);
        assert!(together < most, "{kind}: {together} flushes for {THREADS}, {alone} for one");
        let volume = close_and_fsck(disk, volume).open();
        for nth in 0..THREADS {
            let file = volume.lookup(volume.root(), name(nth).as_bytes()).unwrap();
            let mut read = vec![0; 4096 * SYNCS as usize];
            assert_eq!(volume.read_into(file, 0, &mut read).unwrap(), read.len());
            assert!(read.iter().all(|byte| *byte == nth as u8), "{kind}: {nth}");
        }
    }
}

/// Files synced together share one commit and one wait.
#[test]
fn sync_of_several_files_needs_one_commit() {
    for (kind, commit) in [("ext4", 2), ("ext2", 2)] {
        let slow = make_empty_volume(
            kind,
            "24M",
            &["-b", "4096"],
            OpenOptions::default(),
            Duration::from_micros(200),
        );
        let Some((disk, volume)) = slow else { return };
        let new = |name: &str| volume.create(volume.root(), name.as_bytes(), &FILE).unwrap();
        let files: Vec<_> = (0..8).map(|nth| new(&format!("{nth}"))).collect();
        volume.sync().unwrap();
        let synced = |bytes: &[u8], files: &[_], data_only: bool| {
            let before = disk.lock_queue().flushes;
            for file in files {
                volume.write(*file, 0, bytes).unwrap();
            }
            let files: Vec<_> = files.iter().map(|file| (*file, data_only)).collect();
            volume.sync_inodes(&files).unwrap();
            let (flushes, medium) = {
                let line = disk.lock_queue();
                (line.flushes - before, line.medium.clone())
            };
            let left = Arc::new(MemoryDisk::new(medium, 512));
            let left = Volume::open(left, OpenOptions::default()).unwrap();
            for (file, _) in &files {
                let mut read = vec![0; bytes.len()];
                assert_eq!(left.read_into(*file, 0, &mut read), Ok(bytes.len()), "{kind}");
                assert!(read == bytes, "{kind}");
            }
            flushes
        };
        assert_eq!(synced(&[1; 5000], &files, false), commit, "{kind}: new blocks");
        assert_eq!(synced(&[2; 5000], &files, true), 1, "{kind}: overwritten");
        assert_eq!(synced(&[3; 9000], &files, true), commit, "{kind}: longer, and data alone");
        // One of them needs more than its data.
        let with_new: Vec<_> = files.iter().copied().chain([new("new")]).collect();
        assert!(synced(&[4; 100], &with_new, true) <= commit + 1, "{kind}");
        assert_eq!(synced(&[5; 100], &[], false), 0, "{kind}: none");
        close_and_fsck(disk, volume);
    }
}

/// Data synced by a thread is durable when the sync returns, in whichever commit.
#[test]
fn data_is_durable_after_shared_commit() {
    const ROUNDS: u64 = 30;
    let tiny = OpenOptions {
        inode_cache: 4,
        block_map_cache: 4,
        data_cache_bytes: 128 << 10,
        ..OpenOptions::default()
    };
    let more = ["-b", "1024", "-J", "size=1"];
    let slow = make_empty_volume("ext4", "6M", &more, tiny, Duration::from_micros(200));
    let Some((disk, volume)) = slow else { return };
    let contents = |thread: u64, round: u64| common::tree::random_bytes(thread * 100 + round, 3000);
    let is_there = |volume: &Volume, name: &str, bytes: &[u8]| {
        let file = volume.lookup(volume.root(), name.as_bytes());
        let file = file.unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut read = vec![0; 4000];
        assert_eq!(volume.read_into(file, 0, &mut read).unwrap(), bytes.len(), "{name}");
        assert!(&read[..bytes.len()] == bytes, "{name}");
    };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (volume, disk) = (&volume, &disk);
            scope.spawn(move || {
                let root = volume.root();
                for round in 0..ROUNDS {
                    let name = format!("{thread}-{round}");
                    let file = volume.create(root, name.as_bytes(), &FILE).unwrap();
                    let bytes = contents(thread, round);
                    volume.write(file, 0, &bytes).unwrap();
                    match round % 3 {
                        0 => volume.sync().unwrap(),
                        _ => volume.sync_inode(file, round % 3 == 1).unwrap(),
                    }
                    if (thread + round) % 4 == 0 {
                        let medium = disk.lock_queue().medium.clone();
                        let medium = Arc::new(MemoryDisk::new(medium, 512));
                        let left = Volume::open(medium, OpenOptions::default()).unwrap();
                        is_there(&left, &name, &bytes);
                    }
                    if round >= 4 {
                        let old = format!("{thread}-{}", round - 4);
                        volume.unlink(root, old.as_bytes()).unwrap();
                    }
                }
            });
        }
    });
    let image = close_and_fsck(disk, volume);
    let volume = image.open();
    for (thread, round) in (0..THREADS).flat_map(|it| (ROUNDS - 4..ROUNDS).map(move |n| (it, n))) {
        is_there(&volume, &format!("{thread}-{round}"), &contents(thread, round));
    }
}
