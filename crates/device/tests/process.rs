//! Forked children: what they inherited cannot be used, and holds no locks.

use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use draconis_device::{
    CloseOnFork, Disk, Error, Extent, FileDisk, FileOptions, Group, PerProcess, ProcessBound,
    Ticket, Urgency, Write,
};
use draconis_testkit::{ForkedChild, in_own_process};
use draconis_types::Block;
use draconis_types::lock::Mutex;

/// Long enough for the cache of large blocks, whose lock threads share.
const BLOCK_BYTES: usize = 256 << 10;

fn open(image: &std::path::Path, direct: bool) -> FileDisk {
    FileDisk::open(image, FileOptions { write: true, direct, uring: direct }).unwrap()
}

fn write_block() -> Group {
    Group { writes: vec![Write { at_bytes: 0, block: Block::private(BLOCK_BYTES) }] }
}

#[test]
fn forked_child_is_refused_by_a_disk_whose_threads_it_lacks() {
    in_own_process!();
    for direct in [false, true] {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(BLOCK_BYTES as u64).unwrap();
        let disk = Arc::new(open(image.path(), direct));
        let is_over = Arc::new(AtomicBool::new(false));
        let busy: Vec<_> = (0..3)
            .map(|_| {
                let (disk, is_over) = (disk.clone(), is_over.clone());
                std::thread::spawn(move || {
                    while !is_over.load(Ordering::Relaxed) {
                        let ticket = disk.submit(write_block(), &[]).unwrap();
                        disk.wait_durable(ticket).unwrap();
                    }
                })
            })
            .collect();
        let inherited = Error::Inherited { process: std::process::id() };
        for _ in 0..20 {
            // The disk's locks are held at some of these moments.
            ForkedChild::start(|| {
                let whole = Extent::new(0, BLOCK_BYTES as u64);
                for urgency in [Urgency::Now, Urgency::Ahead] {
                    let read = disk.read(whole, Block::private(BLOCK_BYTES), urgency).wait();
                    assert_eq!(read.unwrap().unwrap_err().error, inherited);
                }
                assert_eq!(disk.submit(write_block(), &[]).unwrap_err().error, inherited);
                assert_eq!(disk.wait_durable(Ticket(1)), Err(inherited.clone()));
                assert_eq!(disk.wait_visible(Ticket(1)), Err(inherited.clone()));
                assert_eq!(disk.discard(&[whole], &[]), Err(inherited.clone()));
            })
            .assert_success();
        }
        is_over.store(true, Ordering::Relaxed);
        busy.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

#[test]
fn locks_end_with_their_process_while_a_child_lives() {
    in_own_process!();
    for direct in [false, true] {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(BLOCK_BYTES as u64).unwrap();
        let disk = open(image.path(), direct);
        disk.wait_durable(disk.submit(write_block(), &[]).unwrap()).unwrap();
        let (mut until, writer) = std::io::pipe().unwrap();
        let writer = CloseOnFork::new(OwnedFd::from(writer));
        // The parent closes the disk, and the child drops it.
        let child = ForkedChild::start(move || {
            drop(disk);
            until.read_to_end(&mut vec![]).unwrap();
        });
        open(image.path(), direct);
        drop(writer);
        child.assert_success();
    }
}

/// Says that it was dropped.
struct Loud(Arc<AtomicBool>);

impl Drop for Loud {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn values_of_a_process_are_neither_used_nor_dropped_in_its_children() {
    static LIST: PerProcess<Mutex<Vec<u32>>> = PerProcess::new();
    in_own_process!();
    let was_dropped = Arc::new(AtomicBool::new(false));
    let bound = ProcessBound::new(Loud(was_dropped.clone()));
    let mut list = LIST.get().lock();
    list.push(1);
    let seen = was_dropped.clone();
    let child = ForkedChild::start(move || {
        assert!(bound.get().is_err());
        drop(bound);
        assert!(!seen.load(Ordering::Relaxed), "dropped in the child");
        // The parent's lock is held for ever here.
        LIST.get().lock().push(2);
        ForkedChild::start(|| assert_eq!(*LIST.get().lock(), [])).assert_success();
        assert_eq!(*LIST.get().lock(), [2]);
    });
    assert!(was_dropped.load(Ordering::Relaxed), "the parent drops its own");
    child.assert_success();
    assert_eq!(*list, [1]);
}
