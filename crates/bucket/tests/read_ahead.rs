//! Sequential reads take few requests, random ones short requests; all bytes are right.

use std::sync::Arc;
use std::time::Duration;

use draconis_bucket::{BucketDisk, BucketOptions, Faults, MemoryBucket};
use draconis_device::{Disk, Extent, Group, Urgency, Write};
use draconis_types::Block;

const LEN_BYTES: u64 = 64 << 20;
/// Start and length of the written part.
const WRITTEN_FROM: u64 = 1 << 20;
const WRITTEN_BYTES: u64 = 16 << 20;

fn byte_at(at: u64) -> u8 {
    (at >> 9).wrapping_mul(37) as u8
}

/// Returns a bucket with a disk, partly written in groups of 100 KiB.
fn create_filled_bucket() -> MemoryBucket {
    let memory = MemoryBucket::default();
    let engine = Arc::new(memory.client(Faults::default()));
    let options = BucketOptions { token: 1, ..BucketOptions::default() };
    let disk = BucketDisk::create(engine, "memory", LEN_BYTES, false, &options).unwrap();
    let mut at = WRITTEN_FROM;
    while at < WRITTEN_FROM + WRITTEN_BYTES {
        let len = (100u64 << 10).min(WRITTEN_FROM + WRITTEN_BYTES - at);
        let mut block = Block::private(len as usize);
        let bytes: Vec<u8> = (at..at + len).map(byte_at).collect();
        block.copy_in(0, &bytes);
        disk.submit(Group { writes: vec![Write { at_bytes: at, block }] }, &[]).unwrap();
        at += len;
    }
    drop(disk);
    memory
}

fn open_reader(memory: &MemoryBucket, faults: Faults) -> BucketDisk {
    let engine = Arc::new(memory.client(faults));
    let options = BucketOptions { pause: Duration::from_millis(1), ..BucketOptions::default() };
    BucketDisk::open_to_read(engine, "memory", &options).unwrap()
}

fn check_bytes(at: u64, block: &Block) {
    let mut bytes = vec![0; block.len()];
    block.copy_out(0, &mut bytes);
    assert!(bytes.iter().zip(at..).all(|(have, at)| *have == byte_at(at)), "wrong at {at}");
}

#[test]
fn sequential_reads_need_few_requests() {
    let memory = create_filled_bucket();
    let disk = open_reader(&memory, Faults::default());
    let before = disk.requests();
    for at in (WRITTEN_FROM..WRITTEN_FROM + WRITTEN_BYTES).step_by(64 << 10) {
        check_bytes(
            at,
            &disk.read_now(Extent::new(at, 64 << 10), Block::private(64 << 10)).unwrap(),
        );
    }
    let after = disk.requests();
    let (gets, came) = (after.gets - before.gets, after.received_bytes - before.received_bytes);
    assert!(gets < WRITTEN_BYTES / (64 << 10) / 6, "{gets} requests");
    assert!(came < WRITTEN_BYTES + (2 << 20), "{came} bytes");
}

#[test]
fn random_reads_fetch_only_requested_bytes() {
    let memory = create_filled_bucket();
    let disk = open_reader(&memory, Faults::default());
    let before = disk.requests().received_bytes;
    for nth in 0..100 {
        let at = WRITTEN_FROM + nth * 77 % 100 * (150 << 10);
        check_bytes(at, &disk.read_now(Extent::new(at, 4096), Block::private(4096)).unwrap());
    }
    let came = disk.requests().received_bytes - before;
    assert!(came <= 110 * 4096, "{came} bytes");
}

/// Several readers, each with several requests in flight, on an unreliable bucket.
#[test]
fn concurrent_reads_are_correct() {
    let memory = create_filled_bucket();
    let faults = Faults { seed: 3, refused: 9, slow: 2, ..Faults::default() };
    let disk = open_reader(&memory, faults);
    std::thread::scope(|scope| {
        for part in 0..4 {
            let disk = &disk;
            scope.spawn(move || {
                let from = WRITTEN_FROM + part * WRITTEN_BYTES / 4;
                for begin in (from..from + WRITTEN_BYTES / 4).step_by(256 << 10) {
                    let reads = (begin..begin + (256 << 10)).step_by(32 << 10).map(|at| {
                        let into = Block::private(32 << 10);
                        (at, disk.read(Extent::new(at, 32 << 10), into, Urgency::Ahead))
                    });
                    for (at, read) in reads.collect::<Vec<_>>() {
                        check_bytes(at, &read.wait().expect("an answer").expect("bytes"));
                    }
                }
            });
        }
    });
}
