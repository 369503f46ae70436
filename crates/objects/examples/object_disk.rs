//! Random writes of 4 KiB to a disk in a store, compared to a plain file.
//!
//! `cargo run --release -p draconis-objects --example object_disk -- DIR`
//!
//! Each disk of 256 MiB is filled, then overwritten at random: with one wait at the end, and with a
//! wait for each write. Last, all of it is read sequentially, 128 KiB at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use draconis_device::{Disk, Extent, FileDisk, FileOptions, Group, Random, Write};
use draconis_objects::{CreateOptions, LayoutKind, LifetimeHint, OpenOptions, Profile, Store};
use draconis_types::Block;

const DISK_BYTES: u64 = 256 << 20;
const BLOCK_BYTES: usize = 4096;
const PIECE_BYTES: usize = 128 << 10;
const RANDOM_OVERWRITES: u64 = 50_000;
const AWAITED_WRITES: u64 = 2000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = std::env::args().nth(1).ok_or("the directory to measure in is missing")?;
    let file = |name: &str, len: u64| -> std::io::Result<FileDisk> {
        let path = std::path::Path::new(&dir).join(name);
        let file = std::fs::File::create(&path)?;
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, len)?;
        let how = FileOptions { write: true, direct: true, uring: false };
        let disk = FileDisk::open(&path, how);
        std::fs::remove_file(&path)?;
        disk
    };
    for turn in 1..=3 {
        measure_disk(&format!("turn {turn}, file "), &file("file", DISK_BYTES)?)?;
        let below: Arc<dyn Disk> = Arc::new(file("store", 4 * DISK_BYTES)?);
        let layout = LayoutKind::Cow;
        let profile = Profile { layout, page_bytes: 4096, segment_bytes: 1 << 20, queue_depth: 32 };
        Store::create(below.clone(), &CreateOptions { profile, id: turn })?;
        let store = Store::open(below, &OpenOptions::default())?;
        let mut group = draconis_objects::Group::new();
        let id = group.create(store.new_object(), LifetimeHint::Unknown);
        group.truncate(id, DISK_BYTES);
        store.submit(group, &[]).map_err(|refused| refused.error)?;
        measure_disk(&format!("turn {turn}, store"), &store.disk(id)?)?;
    }
    Ok(())
}

fn measure_disk(name: &str, disk: &dyn Disk) -> Result<(), draconis_device::Error> {
    let submit = |at_bytes: u64, len: usize, byte: u8| {
        let mut block = Block::private(len);
        block.copy_in(0, &vec![byte; len]);
        let group = Group { writes: vec![Write { at_bytes, block }] };
        disk.submit(group, &[]).map_err(|refused| refused.error)
    };
    let mut dice = Random::new(1);
    let mut at = || dice.next_below(DISK_BYTES / BLOCK_BYTES as u64) * BLOCK_BYTES as u64;
    let began = Instant::now();
    let mut last = None;
    for at in (0..DISK_BYTES).step_by(1 << 20) {
        last = Some(submit(at, 1 << 20, 1)?);
    }
    last.map_or(Ok(()), |last| disk.wait_durable(last))?;
    let filled = began.elapsed();
    let began = Instant::now();
    for nth in 0..RANDOM_OVERWRITES {
        last = Some(submit(at(), BLOCK_BYTES, nth as u8)?);
    }
    last.map_or(Ok(()), |last| disk.wait_durable(last))?;
    let written = began.elapsed();
    let began = Instant::now();
    for nth in 0..AWAITED_WRITES {
        let ticket = submit(at(), BLOCK_BYTES, nth as u8)?;
        disk.wait_durable(ticket)?;
    }
    let waited = began.elapsed();
    let began = Instant::now();
    for at in (0..DISK_BYTES).step_by(PIECE_BYTES) {
        let at = Extent::new(at, PIECE_BYTES as u64);
        disk.read_now(at, Block::private(PIECE_BYTES)).map_err(|refused| refused.error)?;
    }
    let read = began.elapsed();
    let rate = |count: u64, time: Duration| count as f64 / time.as_secs_f64();
    println!(
        "{name}: filled at {:.0} MB/s; {:.0} random writes/s; {:.0} waited for one by one; read \
         in order at {:.0} MB/s",
        rate(DISK_BYTES, filled) / 1e6,
        rate(RANDOM_OVERWRITES, written),
        rate(AWAITED_WRITES, waited),
        rate(DISK_BYTES, read) / 1e6,
    );
    Ok(())
}
