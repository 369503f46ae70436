//! Time of a check beside that of reading the same metadata in order, both with a cold page cache.
//!
//! `cargo run -p draconis-ext --release --example check_reads -- IMAGE [ROUNDS
//! [direct|random]]`, as root. `random` turns the kernel's read-ahead off, as `draconis check` does.
//!
//! A first check records what it reads. Every round then drops the page cache, checks, drops it
//! again, and reads the recorded ranges in ascending order, in requests of at most 1 MiB, eight at
//! a time, without looking at them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use draconis_device::{
    Disk, Extent, FileDisk, FileOptions, ForwardingDisk, OpenedFile, Pending, ReadAnswer, Urgency,
};
use draconis_ext::check::{CheckOptions, check};
use draconis_types::Block;

const REQUEST_BYTES: u64 = 1 << 20;
const REQUESTS_IN_FLIGHT: usize = 8;
/// Ranges with a smaller gap are read with it.
const MAX_GAP_BYTES: u64 = 16 << 10;

/// A disk that records its reads.
struct RecordingDisk {
    inner: FileDisk,
    reads: Mutex<Vec<Extent>>,
}

impl ForwardingDisk for RecordingDisk {
    type Inner = FileDisk;

    fn inner_disk(&self) -> &FileDisk {
        &self.inner
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        self.reads.lock().unwrap().push(at);
        self.inner.read(at, into, urgency)
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some(image) = args.first() else {
        return println!("check_reads IMAGE [ROUNDS [direct|random]]");
    };
    let rounds = args.get(1).and_then(|it| it.parse().ok()).unwrap_or(5);
    let direct = args.get(2).is_some_and(|it| it == "direct");
    let random = args.get(2).is_some_and(|it| it == "random");
    let open = || {
        let options = FileOptions { write: false, direct, uring: false };
        let file = std::fs::File::open(image).expect("a file or device");
        if random {
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
        }
        OpenedFile::new(file.into(), options).expect("a file or device").start()
    };
    let recorder = Arc::new(RecordingDisk { inner: open(), reads: Mutex::default() });
    let recording: Arc<dyn Disk> = recorder.clone();
    check(&recording, CheckOptions::default(), &|_, _| {}).expect("a volume");
    let reads = std::mem::take(&mut *recorder.reads.lock().unwrap());
    let (requests, sum) = (reads.len(), reads.iter().map(|at| at.len_bytes).sum::<u64>());
    let ranges = merge_ranges(reads);
    println!(
        "the check reads {sum} bytes in {requests} requests; in order {} bytes in {} ranges",
        ranges.iter().map(|at| at.len_bytes).sum::<u64>(),
        ranges.len()
    );
    let (mut checks, mut readings) = (vec![], vec![]);
    for _ in 0..rounds {
        let disk: Arc<dyn Disk> = Arc::new(open());
        let checked = measure_cold(|| {
            check(&disk, CheckOptions::default(), &|_, _| {}).expect("a volume");
        });
        let disk = open();
        let read = measure_cold(|| read_in_order(&disk, &ranges));
        println!("check {checked}, reading in order {read}");
        checks.push(checked.wall);
        readings.push(read.wall);
    }
    let median = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        times.get(times.len() / 2).map_or(0.0, Duration::as_secs_f64)
    };
    let (checked, read) = (median(&mut checks), median(&mut readings));
    println!("medians: check {checked:.3} s, in order {read:.3} s, {:.2} times", checked / read);
}

/// Wall clock, CPU time, and bytes that the kernel read for this process.
struct Cost {
    wall: Duration,
    cpu: Duration,
    device_bytes: u64,
}

impl std::fmt::Display for Cost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { wall, cpu, device_bytes } = self;
        write!(f, "{wall:.2?} (CPU {cpu:.0?}, {} MB from the device)", device_bytes / 1_000_000)
    }
}

/// Measures `work`, which begins with an empty page cache.
fn measure_cold(work: impl FnOnce()) -> Cost {
    std::fs::write("/proc/sys/vm/drop_caches", "3").expect("root, to drop the page cache");
    let (cpu, bytes, begin) = (cpu_time(), device_bytes(), Instant::now());
    work();
    let wall = begin.elapsed();
    Cost { wall, cpu: cpu_time() - cpu, device_bytes: device_bytes() - bytes }
}

fn device_bytes() -> u64 {
    let io = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let line = io.lines().find_map(|line| line.strip_prefix("read_bytes: "));
    line.and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Merges ranges that overlap or nearly touch, and splits long ones into requests.
fn merge_ranges(mut reads: Vec<Extent>) -> Vec<Extent> {
    reads.sort_unstable_by_key(|at| at.start_bytes);
    let mut merged: Vec<Extent> = vec![];
    for at in reads {
        let end = at.start_bytes + at.len_bytes;
        match merged.last_mut() {
            Some(last) if at.start_bytes <= last.start_bytes + last.len_bytes + MAX_GAP_BYTES => {
                last.len_bytes = last.len_bytes.max(end - last.start_bytes);
            }
            _ => merged.push(at),
        }
    }
    let requests = merged.into_iter().flat_map(|at| {
        (0..at.len_bytes).step_by(REQUEST_BYTES as usize).map(move |nth| {
            Extent::new(at.start_bytes + nth, REQUEST_BYTES.min(at.len_bytes - nth))
        })
    });
    requests.collect()
}

fn read_in_order(disk: &FileDisk, ranges: &[Extent]) {
    let mut flying = VecDeque::new();
    let wait = |read: Option<Pending<ReadAnswer>>| {
        read.and_then(Pending::wait).expect("an answer").expect("a read within the file")
    };
    // Memory of finished requests is used again.
    let mut free: Vec<Block> = vec![];
    for at in ranges {
        if flying.len() == REQUESTS_IN_FLIGHT {
            free.push(wait(flying.pop_front()));
        }
        let len = at.len_bytes as usize;
        let same = free.iter().position(|it| it.len() == len);
        let into = same.map_or_else(|| Block::private(len), |nth| free.swap_remove(nth));
        free.truncate(REQUESTS_IN_FLIGHT);
        flying.push_back(disk.read(*at, into, Urgency::Ahead));
    }
    while !flying.is_empty() {
        wait(flying.pop_front());
    }
}
