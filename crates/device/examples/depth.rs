//! Random 4 KiB reads of a file or device, one at a time and many at once: reads per second, and
//! how many the kernel has in flight.
//!
//! With --write it overwrites the file instead: groups of 64 random blocks of 4 KiB, and groups of
//! 1 MiB; it also prints the CPU time per block.
//!
//! `cargo run -p draconis-device --release --example depth -- FILE [SECONDS [DEVICE | --write]]`

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use draconis_device::{Disk, Extent, FileDisk, FileOptions, Group, Urgency, Write};
use draconis_types::Block;

const READ_BYTES: u64 = 4096;

fn main() {
    let mut args = std::env::args().skip(1);
    let Some(path) = args.next() else {
        return println!("depth FILE [SECONDS [DEVICE | --write]]");
    };
    let seconds = args.next().and_then(|it| it.parse().ok()).unwrap_or(3);
    let write = std::env::args().nth(3).is_some_and(|it| it == "--write");
    let options = FileOptions { write, direct: true, uring: true };
    let disk = FileDisk::open(Path::new(&path), options).expect("a file or device");
    println!("direct: {}, io_uring: {}", disk.is_direct(), disk.uses_uring());
    if write {
        for (bytes, at_once) in [(4096, 64), (64 << 10, 16), (1 << 20, 1)] {
            let (per_s, cpu_us) =
                measure_group_writes(&disk, bytes, at_once, Duration::from_secs(seconds));
            println!("{at_once:3} of {bytes:7} bytes: {per_s:7.0} writes/s, {cpu_us:6.2} µs each");
        }
        return;
    }
    let device = std::env::args().nth(3);
    for depth in [1, 4, 16, 32, 64] {
        let (per_s, in_flight) =
            measure_reads(&disk, depth, Duration::from_secs(seconds), device.as_deref());
        println!("depth {depth:3}: {per_s:9.0} reads/s, in flight {in_flight}");
    }
}

/// Keeps `depth` reads in flight; waits for the oldest.
fn measure_reads(
    disk: &FileDisk,
    depth: usize,
    time: Duration,
    device: Option<&str>,
) -> (f64, String) {
    let places = disk.properties().len_bytes / READ_BYTES;
    let mut x = 88_172_645_463_325_252u64;
    let mut flying = VecDeque::new();
    let (begin, mut done, mut samples) = (Instant::now(), 0u64, vec![]);
    while begin.elapsed() < time {
        while flying.len() < depth {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            let at = Extent::new(x % places * READ_BYTES, READ_BYTES);
            flying.push_back(disk.read(at, Block::private(READ_BYTES as usize), Urgency::Ahead));
        }
        if done.is_multiple_of(64) {
            samples.extend(device.and_then(inflight_reads));
        }
        let oldest = flying.pop_front().and_then(|answer| answer.wait());
        oldest.expect("an answer").expect("a read within the file");
        done += 1;
    }
    let mean = samples.iter().sum::<u64>() as f64 / samples.len().max(1) as f64;
    let said = match samples.iter().max() {
        Some(most) => format!("{mean:.1} in the mean, {most} at most"),
        None => "not known: name a device, as in vda".into(),
    };
    (done as f64 / begin.elapsed().as_secs_f64(), said)
}

/// Returns the number of reads in flight on a block device.
fn inflight_reads(device: &str) -> Option<u64> {
    let said = std::fs::read_to_string(format!("/sys/block/{device}/inflight")).ok()?;
    said.split_whitespace().next()?.parse().ok()
}

/// Keeps two groups in flight; returns blocks per second, and CPU time per block.
fn measure_group_writes(disk: &FileDisk, bytes: u64, at_once: u64, time: Duration) -> (f64, f64) {
    let places = disk.properties().len_bytes / bytes;
    let (begin, before, mut done, mut place) = (Instant::now(), process_cpu_us(), 0, 0);
    let mut last = None;
    while begin.elapsed() < time {
        let write = |_| {
            place = (place + 7919) % places;
            Write { at_bytes: place * bytes, block: Block::private(bytes as usize) }
        };
        let group = Group { writes: (0..at_once).map(write).collect() };
        let ticket = disk.submit(group, &[]).expect("a disk that can be written");
        if let Some(before) = last.replace(ticket) {
            disk.wait_visible(before).expect("a disk that works");
        }
        done += at_once;
    }
    (done as f64 / begin.elapsed().as_secs_f64(), (process_cpu_us() - before) / done as f64)
}

/// Returns the CPU time of all threads of this process so far, including system calls.
fn process_cpu_us() -> f64 {
    let mut sum_ns = 0.0;
    for thread in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let said = std::fs::read_to_string(thread.path().join("schedstat")).unwrap_or_default();
        sum_ns += said.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0.0);
    }
    sum_ns / 1000.0
}
