//! Random 4 KiB reads of a file or device, one at a time and many: how many a second, and
//! how many the kernel has in flight.
//!
//! `cargo run -p draconis-device --release --example depth -- FILE [SECONDS]`

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use draconis_device::{Disk, Extent, FileDisk, FileOptions, Urgency};
use draconis_exchange::heap::Block;

const READ_BYTES: u64 = 4096;

fn main() {
    let mut args = std::env::args().skip(1);
    let Some(path) = args.next() else { return println!("depth FILE [SECONDS]") };
    let seconds = args.next().and_then(|it| it.parse().ok()).unwrap_or(3);
    let options = FileOptions { write: false, direct: true, uring: true };
    let disk = FileDisk::open(Path::new(&path), options).expect("a file or device");
    println!("direct: {}, io_uring: {}", disk.is_direct(), disk.uses_uring());
    let device = std::env::args().nth(3);
    for depth in [1, 4, 16, 32, 64] {
        let (per_s, in_flight) = run(&disk, depth, Duration::from_secs(seconds), device.as_deref());
        println!("depth {depth:3}: {per_s:9.0} reads/s, in flight {in_flight}");
    }
}

/// Keeps `depth` reads going; the oldest is waited for.
fn run(disk: &FileDisk, depth: usize, time: Duration, device: Option<&str>) -> (f64, String) {
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
            samples.extend(device.and_then(in_flight));
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

/// Reads that a block device has now.
fn in_flight(device: &str) -> Option<u64> {
    let said = std::fs::read_to_string(format!("/sys/block/{device}/inflight")).ok()?;
    said.split_whitespace().next()?.parse().ok()
}
