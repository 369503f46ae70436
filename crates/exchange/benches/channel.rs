//! Cost of a channel, compared with a Unix socket and a pipe.
//!
//! Prints for each row the median and minimum over batches in nanoseconds per round trip, the mode,
//! and the ratio to the first row of its table.
//!
//! Modes: `2 cpus` - both sides busy-poll before they sleep, each on its own CPU; `1 cpu` - both on
//! one CPU, where polling is useless and each transfer is a context switch.

use std::{
    fs::File as Stream,
    io::{Read, Write},
    os::fd::{AsFd, OwnedFd},
    process::{Child, Command},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use draconis_exchange::{
    channel::{
        self, RpcClient,
        session::{self, Session, SessionConfig},
    },
    contract::file::{self, CHUNK_BYTES, CachingReader, File, FileServer},
    heap::arena::SlotClass,
};
use draconis_types::{Attributes, Block, PrivateBuffer, Refusal};
use rustix::{
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    pipe::pipe,
    process::{Pid, PidfdFlags, pidfd_open},
    thread::{CpuSet, sched_setaffinity},
};

const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
const CHILD_CPU_VARIABLE: &str = "DRACONIS_BENCH_CHILD";
const REPLY_BYTES: usize = 4096;

/// Fills `len` bytes of each buffer; 0 leaves it unchanged, so that only the transfer is measured.
struct FillingFileServer;

static FILE_BYTES: [u8; 1 << 20] = [7; 1 << 20];

impl FileServer for FillingFileServer {
    fn read(&self, request: &mut file::Read) -> Result<u32, Refusal> {
        let there = FILE_BYTES.get(request.offset as usize..).unwrap_or_default();
        let there = &there[..there.len().min(request.len as usize)];
        Ok(request.buffer.copy_in(0, there) as u32)
    }
    fn get_attributes(&self, _: &mut file::GetAttributes) -> Result<Attributes, Refusal> {
        Err(Refusal::NotSupported)
    }
}

fn pin_to_cpu(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    if let Err(errno) = sched_setaffinity(None, &set) {
        eprintln!("not pinned to CPU {cpu}: {errno}");
    }
}

#[derive(Clone, Copy)]
struct BenchMode {
    name: &'static str,
    peer_cpu: usize,
    batches: usize,
    round_trips: u32,
}

const TWO_CPU_MODE: BenchMode =
    BenchMode { name: "2 cpus", peer_cpu: 1, batches: 101, round_trips: 2000 };
const ONE_CPU_MODE: BenchMode =
    BenchMode { name: "1 cpu", peer_cpu: 0, batches: 51, round_trips: 400 };

struct BenchResult {
    what: String,
    mode: &'static str,
    median_ns: f64,
    least_ns: f64,
}

/// Measures several operations in turn, batch by batch, so that other load affects all of them
/// alike.
fn measure_interleaved(
    labels: Vec<String>,
    mode: BenchMode,
    mut round_trip: impl FnMut(usize),
) -> Vec<BenchResult> {
    let mut batch = |i| {
        let start = Instant::now();
        (0..mode.round_trips).for_each(|_| round_trip(i));
        start.elapsed().as_nanos() as f64 / f64::from(mode.round_trips)
    };
    let mut taken = vec![Vec::with_capacity(mode.batches); labels.len()];
    (0..labels.len()).for_each(|i| _ = batch(i));
    for _ in 0..mode.batches {
        taken.iter_mut().enumerate().for_each(|(i, taken)| taken.push(batch(i)));
    }
    labels.into_iter().zip(taken).map(|(what, taken)| BenchResult::new(what, mode, taken)).collect()
}

impl BenchResult {
    fn new(what: String, mode: BenchMode, mut batches: Vec<f64>) -> Self {
        batches.sort_by(f64::total_cmp);
        let (median_ns, least_ns) = (batches[batches.len() / 2], batches[0]);
        Self { what, mode: mode.name, median_ns, least_ns }
    }
}

fn print_results(title: &str, rows: &[BenchResult]) {
    println!("\n{title}\n{:42} {:8} {:>10} {:>10} {:>7}", "", "mode", "median", "least", "ratio");
    for row in rows {
        let ratio = row.median_ns / rows[0].median_ns;
        let BenchResult { what, mode, median_ns, least_ns } = row;
        println!("{what:42} {mode:8} {median_ns:7.0} ns {least_ns:7.0} ns {ratio:7.2}");
    }
}

/// Sends one typed read over `caller` and gets the buffer back.
fn send_read(caller: &mut RpcClient<File>, buffer: &mut Option<Block>, len: u32) {
    let block = buffer.take().expect("the last reply returned it");
    let message = file::Read { buffer: block, buffer_offset: 0, offset: 0, len, no_atime: false };
    match caller.call(message) {
        Ok(Ok(ack)) => *buffer = Some(ack.buffer),
        other => panic!("{other:?}"),
    }
}

fn bench_thread_channel(mode: BenchMode, what: &str, sizes: &[(usize, u32)]) -> Vec<BenchResult> {
    let (client, server) = channel::pair::<File>();
    let peer = std::thread::spawn(move || {
        pin_to_cpu(mode.peer_cpu);
        server.serve(REPLY_TIMEOUT, |message| file::answer(&FillingFileServer, message))
    });
    let mut caller = RpcClient::new(client, REPLY_TIMEOUT);
    let mut buffers: Vec<_> = sizes.iter().map(|&(size, _)| Some(Block::private(size))).collect();
    let rows = measure_interleaved(result_labels(what, sizes), mode, |i| {
        send_read(&mut caller, &mut buffers[i], sizes[i].1);
    });
    drop(caller);
    let _ = peer.join();
    rows
}

fn result_labels(what: &str, sizes: &[(usize, u32)]) -> Vec<String> {
    let done = |len| if len == 0 { "handed over" } else { "filled" };
    sizes.iter().map(|&(size, len)| format!("{what}, {size} B {}", done(len))).collect()
}

fn session_config() -> SessionConfig {
    let class = |slot_bytes| SlotClass { slot_bytes, slots: 8 };
    SessionConfig { lanes: 1, host: vec![class(4096), class(65536), class(1 << 20)], guest: vec![] }
}

fn spawn_child(cpu: usize) -> (Arc<Session>, Child) {
    spawn_child_with(&session_config(), cpu)
}

fn spawn_child_with(plan: &SessionConfig, cpu: usize) -> (Arc<Session>, Child) {
    let (offer, socket) = session::offer(plan).expect("a session");
    let child = Command::new(std::env::current_exe().expect("our own path"))
        .env(CHILD_CPU_VARIABLE, cpu.to_string())
        .stdin(socket)
        .spawn()
        .expect("a child");
    let peer = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).expect("its pidfd");
    (offer.start(peer), child)
}

fn run_child_server(cpu: usize) {
    pin_to_cpu(cpu);
    let socket = std::io::stdin().as_fd().try_clone_to_owned().expect("the socket");
    let session = session::accept(&socket, Instant::now() + REPLY_TIMEOUT).expect("a session");
    let server = session.server::<File>(0).expect("lane 0");
    let _ = server.change_notifier();
    let _ = server.serve(REPLY_TIMEOUT, |message| file::answer(&FillingFileServer, message));
}

/// Measures a read of `size` bytes of a 1 MiB file into a private buffer: a plain copy, messages,
/// and the cache.
fn bench_caching_reader(mode: BenchMode, size: usize) -> Vec<BenchResult> {
    let chunks = FILE_BYTES.len() / CHUNK_BYTES as usize;
    let plan = SessionConfig {
        host: vec![SlotClass { slot_bytes: CHUNK_BYTES, slots: 10 }],
        ..session_config()
    };
    let readers = [0, chunks].map(|chunks| {
        let (session, child) = spawn_child_with(&plan, mode.peer_cpu);
        let client = session.client::<File>(0).expect("lane 0");
        let blocks = move |len| session.allocate_block(len);
        (CachingReader::new(client, REPLY_TIMEOUT, chunks, blocks), child)
    });
    let [(mut each, mut one), (mut kept, mut other)] = readers;
    let mut into = PrivateBuffer::new(size);
    let mut at = 0;
    let labels = ["copied", "a message for each 128 KiB", "kept"];
    let labels = labels.map(|what| format!("{size} B, {what}")).to_vec();
    let round_trips = (mode.round_trips as usize / size.div_ceil(16 << 10)).max(8) as u32;
    let rows = measure_interleaved(labels, BenchMode { round_trips, batches: 51, ..mode }, |i| {
        at = (at + size) % FILE_BYTES.len();
        match i {
            0 => into.copy_from_slice(&std::hint::black_box(&FILE_BYTES)[at..at + size]),
            1 => assert_eq!(each.read(at as u64, &mut into), Ok(size)),
            _ => assert_eq!(kept.read(at as u64, &mut into), Ok(size)),
        }
        std::hint::black_box(&mut into);
    });
    drop((each, kept));
    let _ = (one.wait(), other.wait());
    rows
}

fn bench_process_channel(mode: BenchMode, what: &str, sizes: &[(usize, u32)]) -> Vec<BenchResult> {
    let (session, mut child) = spawn_child(mode.peer_cpu);
    let mut caller = RpcClient::new(session.client::<File>(0).expect("lane 0"), REPLY_TIMEOUT);
    let mut buffers: Vec<_> = sizes.iter().map(|&(size, _)| session.allocate_block(size)).collect();
    let rows = measure_interleaved(result_labels(what, sizes), mode, |i| {
        send_read(&mut caller, &mut buffers[i], sizes[i].1);
    });
    drop(caller);
    let _ = child.wait();
    rows
}

/// A request of 32 bytes and a reply of 4 KiB, through the kernel.
fn bench_kernel_stream(
    mode: BenchMode,
    what: &str,
    ours: [OwnedFd; 2],
    theirs: [OwnedFd; 2],
) -> BenchResult {
    let streams = |fds: [OwnedFd; 2]| fds.map(Stream::from);
    let [mut from, mut to] = streams(theirs);
    let peer = std::thread::spawn(move || {
        pin_to_cpu(mode.peer_cpu);
        let mut request = [0; 32];
        let reply = &FILE_BYTES[..REPLY_BYTES];
        while from.read_exact(&mut request).is_ok() && to.write_all(reply).is_ok() {}
    });
    let [mut from, mut to] = streams(ours);
    let mut reply = [0; REPLY_BYTES];
    let few = BenchMode { round_trips: mode.round_trips / 10, batches: 31, ..mode };
    let label = format!("{what}, {REPLY_BYTES} B copied");
    let mut rows = measure_interleaved(vec![label], few, |_| {
        to.write_all(&[1; 32]).expect("the peer reads");
        from.read_exact(&mut reply).expect("the peer answers");
    });
    drop((from, to));
    let _ = peer.join();
    rows.remove(0)
}

fn bench_unix_socket(mode: BenchMode) -> BenchResult {
    let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let (a, b) = pair.expect("a socket pair");
    let both = |fd: OwnedFd| [fd.try_clone().expect("a descriptor"), fd];
    bench_kernel_stream(mode, "Unix socket", both(a), both(b))
}

fn bench_pipes(mode: BenchMode) -> BenchResult {
    let (there, back) = (pipe().expect("a pipe"), pipe().expect("a pipe"));
    bench_kernel_stream(mode, "pipes", [back.0, there.1], [there.0, back.1])
}

fn describe_machine(cpus: usize) -> String {
    let field = |path: &str, key: &str| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_default();
        line.rsplit(": ").next().unwrap_or_default().to_string()
    };
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cpu = field("/proc/cpuinfo", "model name");
    format!("{cpu}, {cpus} CPUs, Linux {}", kernel.trim())
}

/// Returns today's date in UTC as year, month and day: Hinnant's algorithm, for days since 1970.
fn today() -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let days = now.as_secs() / 86400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year = (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    format!("{:04}-{month:02}-{day:02}", year + era * 400 + u64::from(month <= 2))
}

fn main() {
    if let Ok(cpu) = std::env::var(CHILD_CPU_VARIABLE) {
        return run_child_server(cpu.parse().unwrap_or(0));
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    pin_to_cpu(0);
    println!("{}\n{}; no chance involved; ns for one round trip", describe_machine(cpus), today());
    let once = [(REPLY_BYTES, 0), (REPLY_BYTES, REPLY_BYTES as u32)];
    let two_cpus = cpus > 1;
    for mode in [TWO_CPU_MODE, ONE_CPU_MODE] {
        if mode.peer_cpu == 1 && !two_cpus {
            println!("\none CPU only: no spinning");
            continue;
        }
        let mut rows = bench_thread_channel(mode, "typed read, threads", &once);
        rows.extend(bench_process_channel(mode, "typed read, processes", &once));
        rows.push(bench_unix_socket(mode));
        rows.push(bench_pipes(mode));
        print_results("A read of 4 KiB", &rows);
    }
    if two_cpus {
        let sizes = [4096, 4, 64, 1024, 16384, 65536, 262_144, 1 << 20].map(|size| (size, 0));
        print_results("By size, threads", &bench_thread_channel(TWO_CPU_MODE, "threads", &sizes));
        print_results(
            "By size, processes",
            &bench_process_channel(TWO_CPU_MODE, "processes", &sizes),
        );
    }
    let mode = if two_cpus { TWO_CPU_MODE } else { ONE_CPU_MODE };
    for size in [4 << 10, 16 << 10, 64 << 10, 128 << 10, 1 << 20] {
        print_results("Reading what the server has in memory", &bench_caching_reader(mode, size));
    }
}
