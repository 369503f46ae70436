//! Round-trip costs: a call, a thread behind a channel, a process behind a channel, and the
//! kernel's own transports.

use std::fs::File as Stream;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use draconis_exchange::channel::{
    self, RpcClient,
    session::{self, Session, SessionConfig},
};
use draconis_exchange::contract::file::{self, File, FileServer};
use draconis_exchange::heap::arena::SlotClass;
use draconis_types::Block;
use draconis_types::{Attributes, Refusal};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::pipe;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::{Experiment, ExperimentInfo, PaperSource};
use crate::context::RunContext;
use crate::parameters::new_parameter;
use crate::pin;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::stats;
use crate::subject::{Subject, SubjectKind};
use crate::units;

/// See the module.
pub struct ChannelExperiment;

const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum payload, in bytes.
const MAX_PAYLOAD_BYTES: usize = 1 << 20;

/// A service that replies without touching the buffer: only the hand-over is measured, as there.
struct NoOpFileServer;

impl FileServer for NoOpFileServer {
    fn read(&self, request: &mut file::Read) -> Result<u32, Refusal> {
        Ok(request.len)
    }

    fn get_attributes(&self, _: &mut file::GetAttributes) -> Result<Attributes, Refusal> {
        Err(Refusal::NotSupported)
    }
}

/// Runs `what` in its own thread, pinned to a CPU, so that no other thread is pinned.
fn run_pinned<T: Send>(
    cpu: usize,
    what: impl FnOnce() -> anyhow::Result<T> + Send,
) -> anyhow::Result<T> {
    std::thread::scope(|scope| {
        let run = || {
            pin::pin_to_cpu(cpu);
            what()
        };
        scope.spawn(run).join().map_err(|_| anyhow!("a thread panicked"))?
    })
}

/// Child side of a process service: serves until the client is gone.
///
/// # Errors
/// The channel fails.
pub fn serve_as_child(cpu: usize) -> anyhow::Result<()> {
    pin::pin_to_cpu(cpu);
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    let session = session::accept(&socket, Instant::now() + REPLY_TIMEOUT)?;
    let server = session.server::<File>(0).context("lane 0")?;
    let _ = server.serve(REPLY_TIMEOUT, |message| file::answer(&NoOpFileServer, message));
    Ok(())
}

fn start_child(cpu: usize) -> anyhow::Result<(Arc<Session>, Child)> {
    let class = |slot_bytes| SlotClass { slot_bytes, slots: 4 };
    let plan = SessionConfig {
        lanes: 1,
        host: vec![class(4096), class(65536), class(MAX_PAYLOAD_BYTES as u32)],
        guest: vec![],
    };
    let (offer, socket) = session::offer(&plan)?;
    let child = Command::new("/proc/self/exe")
        .args(["channel-child", &cpu.to_string()])
        .stdin(socket)
        .spawn()?;
    let pid = Pid::from_child(&child);
    let peer = pidfd_open(pid, PidfdFlags::empty())?;
    Ok((offer.start(peer), child))
}

/// Maximum duration of a batch.
const MAX_BATCH_TIME: Duration = Duration::from_millis(50);

/// Returns the median over batches, in nanoseconds per round trip.
fn median_batch_time_ns(
    round_trips: u64,
    mut once: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<f64> {
    const BATCH_COUNT: u64 = 10;
    let each = (round_trips / BATCH_COUNT).max(1);
    let mut times = vec![];
    for _ in 0..=BATCH_COUNT {
        let started = Instant::now();
        let mut made = 0;
        while made < each {
            once()?;
            made += 1;
            // Reading the clock costs time, too.
            if made % 16 == 0 && started.elapsed() > MAX_BATCH_TIME {
                break;
            }
        }
        times.push(started.elapsed().as_nanos() as f64 / made as f64);
    }
    // The first batch is the warm-up.
    stats::median(&times[1..]).context("there are batches")
}

fn send_typed_request(
    caller: &mut RpcClient<File>,
    buffer: &mut Option<Block>,
    len: u32,
) -> anyhow::Result<()> {
    let block = buffer.take().context("the last reply returned it")?;
    let message = file::Read { buffer: block, buffer_offset: 0, offset: 0, len, no_atime: false };
    match caller.call(message) {
        Ok(Ok(ack)) => *buffer = Some(ack.buffer),
        Ok(Err(_)) => bail!("refused"),
        Err(lost) => bail!("{lost}"),
    }
    Ok(())
}

/// A transport to measure.
struct TransportBenchmark {
    name: &'static str,
    trips: u64,
}

impl TransportBenchmark {
    fn measure_function_call(&self, payloads: &[usize]) -> anyhow::Result<Vec<f64>> {
        let server: &dyn FileServer = std::hint::black_box(&NoOpFileServer);
        let mut times = vec![];
        for payload in payloads {
            let buffer = Block::private(*payload);
            let len = buffer.len() as u32;
            let mut asked =
                file::Read { buffer, buffer_offset: 0, offset: 0, len, no_atime: false };
            times.push(median_batch_time_ns(self.trips * 10, || {
                server.read(std::hint::black_box(&mut asked))?;
                Ok(())
            })?);
        }
        Ok(times)
    }

    fn measure_thread(&self, payloads: &[usize], cpu: usize) -> anyhow::Result<Vec<f64>> {
        let (client, server) = channel::pair::<File>();
        let peer = std::thread::spawn(move || {
            pin::pin_to_cpu(cpu);
            server.serve(REPLY_TIMEOUT, |message| file::answer(&NoOpFileServer, message))
        });
        let mut caller = RpcClient::new(client, REPLY_TIMEOUT);
        let mut times = vec![];
        for payload in payloads {
            let mut buffer = Some(Block::private(*payload));
            times.push(median_batch_time_ns(self.trips, || {
                send_typed_request(&mut caller, &mut buffer, *payload as u32)
            })?);
        }
        drop(caller);
        let _ = peer.join();
        Ok(times)
    }

    fn measure_process(&self, payloads: &[usize], cpu: usize) -> anyhow::Result<Vec<f64>> {
        let (session, mut child) = start_child(cpu)?;
        let mut times = vec![];
        let mut measure = || -> anyhow::Result<()> {
            let client = session.client::<File>(0).context("lane 0")?;
            let mut caller = RpcClient::new(client, REPLY_TIMEOUT);
            for payload in payloads {
                let mut buffer = session.allocate_block(*payload);
                times.push(median_batch_time_ns(self.trips, || {
                    send_typed_request(&mut caller, &mut buffer, *payload as u32)
                })?);
            }
            Ok(())
        };
        let measured = measure();
        drop(session);
        let _ = child.kill();
        let _ = child.wait();
        measured.map(|()| times)
    }

    /// Measures a request of 32 bytes and a reply of the payload, copied by the kernel.
    fn measure_streams(
        &self,
        payloads: &[usize],
        ours: [OwnedFd; 2],
        theirs: [OwnedFd; 2],
    ) -> anyhow::Result<Vec<f64>> {
        let [mut from, mut to] = theirs.map(Stream::from);
        let peer = std::thread::spawn(move || {
            pin::pin_to_cpu(1);
            let bytes = vec![7; MAX_PAYLOAD_BYTES];
            let mut request = [0; 32];
            while from.read_exact(&mut request).is_ok() {
                let len = u32::from_le_bytes([request[0], request[1], request[2], request[3]]);
                if to.write_all(&bytes[..(len as usize).min(MAX_PAYLOAD_BYTES)]).is_err() {
                    break;
                }
            }
        });
        let [mut from, mut to] = ours.map(Stream::from);
        let mut reply = vec![0; MAX_PAYLOAD_BYTES];
        let mut times = vec![];
        for payload in payloads {
            let mut request = [0; 32];
            request[..4].copy_from_slice(&(*payload as u32).to_le_bytes());
            times.push(median_batch_time_ns(self.trips / 4, || {
                to.write_all(&request)?;
                Ok(from.read_exact(&mut reply[..*payload])?)
            })?);
        }
        drop((from, to));
        let _ = peer.join();
        Ok(times)
    }

    fn measure_unix_socket(&self, payloads: &[usize]) -> anyhow::Result<Vec<f64>> {
        let (a, b) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let both = |fd: OwnedFd| -> anyhow::Result<_> { Ok([fd.try_clone()?, fd]) };
        self.measure_streams(payloads, both(a)?, both(b)?)
    }

    fn measure_pipes(&self, payloads: &[usize]) -> anyhow::Result<Vec<f64>> {
        let (there, back) = (pipe()?, pipe()?);
        self.measure_streams(payloads, [back.0, there.1], [there.0, back.1])
    }

    /// Measures a read from the page cache.
    fn measure_system_call(&self, payloads: &[usize]) -> anyhow::Result<Vec<f64>> {
        let file = tempfile::tempfile()?;
        file.write_all_at(&vec![7; MAX_PAYLOAD_BYTES], 0)?;
        let mut into = vec![0; MAX_PAYLOAD_BYTES];
        let mut times = vec![];
        for payload in payloads {
            times.push(median_batch_time_ns(self.trips, || {
                Ok(file.read_exact_at(&mut into[..*payload], 0)?)
            })?);
        }
        Ok(times)
    }
}

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "channel",
    paper: PaperSource::Singularity,
    question: "What does the round trip of a read cost by its payload: a function call, a service in a \
           thread, one in a process, a Unix socket, a pipe, a system call?",
    published_result: "On Singularity 919 to 942 cycles whatever the payload, since the buffer is handed \
              over; on Linux, which copies, 5,544 cycles at 1 byte and 87,941 at 64 KB.",
    caveat: "Handing over costs the same whatever the payload, as on Singularity; what copies \
               grows with it. Between processes the wake-up is what costs, and spinning avoids it.",
    parameters: &[
        new_parameter(
            "payloads",
            "bytes of the reply",
            "4,4K,64K,1M",
            "4,64,1K,4K,16K,64K,256K,1M",
        ),
        new_parameter(
            "trips",
            "round trips of each kind, of half a second at most",
            "1000",
            "100000",
        ),
    ],
    subjects: &["mem"],
    accepts: |kind| kind == SubjectKind::Memory,
    warms_up: false,
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for ChannelExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Lines, "time", "Round trip by payload")
                .with_x_axis("payload", "B")
                .with_y_axis("time for a round trip", "ns")
                .with_log_x()
                .with_log_y(),
        ]
    }

    fn run(&self, context: &RunContext, _: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let payloads: Vec<usize> = context
            .number_list_parameter("payloads")?
            .iter()
            .map(|bytes| (*bytes as usize).min(MAX_PAYLOAD_BYTES))
            .collect();
        let trips = context.number_parameter("trips")?;
        let two = std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1);
        let mut samples = vec![];
        let mut all: Vec<(&'static str, &dyn TransportMeasurement)> = vec![
            ("function call", &|transport: &TransportBenchmark, p: &[usize]| {
                transport.measure_function_call(p)
            }),
            ("system call", &|transport: &TransportBenchmark, p: &[usize]| {
                transport.measure_system_call(p)
            }),
            ("thread, sleeping", &|transport: &TransportBenchmark, p: &[usize]| {
                transport.measure_thread(p, 0)
            }),
            ("process, sleeping", &|transport: &TransportBenchmark, p: &[usize]| {
                transport.measure_process(p, 0)
            }),
            ("Unix socket", &|transport: &TransportBenchmark, p: &[usize]| {
                transport.measure_unix_socket(p)
            }),
            ("pipe", &|transport: &TransportBenchmark, p: &[usize]| transport.measure_pipes(p)),
        ];
        if two {
            all.push(("thread, spinning", &|transport: &TransportBenchmark, p: &[usize]| {
                transport.measure_thread(p, 1)
            }));
            all.push(("process, spinning", &|transport: &TransportBenchmark, p: &[usize]| {
                transport.measure_process(p, 1)
            }));
        } else {
            context.add_note("one CPU: nobody can spin while the other works");
        }
        for (name, measure) in all {
            context.check_not_stopped()?;
            let transport = TransportBenchmark { name, trips };
            let times = run_pinned(0, || measure.measure_times(&transport, &payloads))
                .with_context(|| transport.name.to_string())?;
            let sample = |(bytes, ns): (&usize, f64)| Sample::at_x("time", name, *bytes as f64, ns);
            samples.extend(payloads.iter().zip(times).map(sample));
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |series: &&str| {
            let line = points.medians_by_x("time", "mem", series);
            let (least, most) = (line.first()?, line.last()?);
            Some(format!(
                "{series}: {} for {}, {} for {}.",
                units::format_time_ns(least.1),
                units::format_bytes(least.0),
                units::format_time_ns(most.1),
                units::format_bytes(most.0),
            ))
        };
        points.series("time", "mem").iter().filter_map(tell).collect()
    }
}

/// Measures a transport for all payloads.
trait TransportMeasurement: Sync {
    fn measure_times(
        &self,
        transport: &TransportBenchmark,
        payloads: &[usize],
    ) -> anyhow::Result<Vec<f64>>;
}

impl<F: Fn(&TransportBenchmark, &[usize]) -> anyhow::Result<Vec<f64>> + Sync> TransportMeasurement
    for F
{
    fn measure_times(
        &self,
        transport: &TransportBenchmark,
        payloads: &[usize],
    ) -> anyhow::Result<Vec<f64>> {
        self(transport, payloads)
    }
}
