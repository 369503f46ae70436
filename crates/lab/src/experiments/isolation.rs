//! The same cached file read by a direct call, by a worker in a thread, and by a worker in a
//! sandboxed process.

use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use draconis_device::{FileDisk, FileOptions};
use draconis_exchange::channel;
use draconis_exchange::channel::session::{self, Session, SessionConfig};
use draconis_exchange::contract::Node;
use draconis_exchange::contract::file::{self, CHUNK_BYTES, CachingReader, File, FileServer};
use draconis_exchange::contract::tree::{Tree, Walked, walk};
use draconis_exchange::heap::arena::Class;
use draconis_exchange::heap::{Block, PrivateBuffer};
use draconis_service::options::MountOptions;
use draconis_service::sandbox::{self, SandboxProfile};
use draconis_service::volume::{self, VolumeTree};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::reading::prepare;
use super::{Experiment, ExperimentInfo, Paper};
use crate::context::Context;
use crate::parameters::parameter;
use crate::results::{Figure, Points, Sample, Shape};
use crate::stats;
use crate::subject::{Kind, Subject};
use crate::units;

/// See the module.
pub struct Isolation;

const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
const NAME: &str = "isolation";
/// Maximum request size, in bytes.
const MAX_REQUEST_BYTES: u32 = 1 << 20;
/// Repetitions for each way and size.
const ROUNDS: usize = 9;
/// Number of chunks of a reader too small to keep a chunk until it is needed again.
const FEW_CHUNKS: usize = 4;

const CALLED: &str = "called";
const EACH: &str = "process worker, a message each";
const AHEAD: &str = "process worker, straight on";
const KEPT: &str = "process worker, kept";

fn open(image: &Path) -> anyhow::Result<VolumeTree> {
    let how = FileOptions { write: false, direct: true, uring: false };
    let disk = Arc::new(FileDisk::open(image, how)?);
    Ok(volume::open(disk, &[], &MountOptions::default())?)
}

fn node(tree: &VolumeTree) -> anyhow::Result<Node> {
    match walk(tree, Node::ROOT, NAME.as_bytes(), true) {
        Ok(Walked::At(attributes)) => Ok(attributes.node),
        _ => bail!("no file {NAME}"),
    }
}

/// Child side: opens the volume, sandboxes the process, serves the file.
///
/// # Errors
/// The channel, the volume or the sandbox fails.
pub fn serve_as_child(image: &Path) -> anyhow::Result<()> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    let session = session::accept(&socket, Instant::now() + REPLY_TIMEOUT)?;
    let tree = open(image)?;
    sandbox::confine(&SandboxProfile::Worker, None)?;
    let server = session.server::<File>(0).context("lane 0")?;
    tree.notify_changes_to(&server);
    let _ = file::serve(server, &tree.file(node(&tree)?), REPLY_TIMEOUT);
    Ok(())
}

/// Fills a buffer from an offset of the file.
type Ask<'a> = Box<dyn FnMut(u64, &mut [u8]) -> anyhow::Result<usize> + 'a>;

/// A way to read the file.
struct ReadMethod<'a> {
    name: &'static str,
    ask: Ask<'a>,
}

impl ReadMethod<'_> {
    /// Reads the whole file; returns the time taken.
    fn pass(&mut self, bytes: u64, into: &mut [u8]) -> anyhow::Result<f64> {
        let started = Instant::now();
        for offset in (0..bytes).step_by(into.len()) {
            if (self.ask)(offset, into)? != into.len() {
                bail!("{}: a short answer at {offset}", self.name);
            }
        }
        Ok((started.elapsed().as_nanos() as f64).max(1.0))
    }
}

fn by_call<'a>(tree: &'a VolumeTree, node: Node) -> Ask<'a> {
    let file = tree.file(node);
    let mut buffer = Block::private(MAX_REQUEST_BYTES as usize);
    Box::new(move |offset, into| {
        let (len, buffer_offset) = (into.len() as u32, 0);
        let taken = buffer.take();
        let mut asked = file::Read { buffer: taken, buffer_offset, offset, len, no_atime: false };
        let read = file.read(&mut asked);
        buffer = asked.buffer;
        Ok(read? as usize)
    })
}

fn by_reader(mut reader: CachingReader) -> Ask<'static> {
    Box::new(move |offset, into| Ok(reader.read(offset, into)?))
}

/// A worker process, which is killed on drop.
struct Worker {
    session: Arc<Session>,
    child: Child,
}

impl Worker {
    fn start(image: &Path, chunks: usize) -> anyhow::Result<Self> {
        let class = |slot_bytes, slots| Class { slot_bytes, slots };
        // One more chunk is in flight.
        let host = vec![class(4096, 2), class(16 << 10, 2), class(CHUNK_BYTES, chunks as u32 + 2)];
        let plan =
            SessionConfig { static_lanes: 1, host_lanes: 0, guest_lanes: 0, host, guest: vec![] };
        let (offer, socket) = session::offer(&plan)?;
        let child = Command::new("/proc/self/exe")
            .arg("isolation-child")
            .arg(image)
            .stdin(socket)
            .spawn()?;
        let pid = Pid::from_raw(child.id() as i32).context("a child has a number")?;
        Ok(Self { session: offer.start(pidfd_open(pid, PidfdFlags::empty())?), child })
    }

    /// Creates a reader with a cache of `chunks` chunks.
    fn reader(&self, chunks: usize) -> anyhow::Result<CachingReader> {
        let session = self.session.clone();
        let end = session.client::<File>(0).context("lane 0")?;
        Ok(CachingReader::new(end, REPLY_TIMEOUT, chunks, move |len| session.block(len)))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The child may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Measures bytes per second by way and request size. Alternates between the ways, so that other
/// load affects all of them.
fn measure(
    context: &Context,
    image: &Path,
    bytes: u64,
    requests: &[u64],
) -> anyhow::Result<Vec<Sample>> {
    let all_chunks = bytes.div_ceil(CHUNK_BYTES.into()) as usize;
    let tree = open(image)?;
    let at = node(&tree)?;
    let (client, server) = channel::pair::<File>();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            tree.notify_changes_to(&server);
            // Ignores a reader that disconnects.
            let _ = file::serve(server, &tree.file(at), REPLY_TIMEOUT);
        });
        let vacant = |len| Some(Block::unallocated(len));
        let kept_by_thread = CachingReader::new(client, REPLY_TIMEOUT, all_chunks, vacant);
        let counts = [0, FEW_CHUNKS, all_chunks];
        let workers = counts.map(|chunks| Worker::start(image, chunks));
        let [each, few, all] = workers;
        let (each, few, all) = (each?, few?, all?);
        let mut ways = [
            ReadMethod { name: CALLED, ask: by_call(&tree, at) },
            ReadMethod { name: "thread worker, kept", ask: by_reader(kept_by_thread) },
            ReadMethod { name: EACH, ask: by_reader(each.reader(counts[0])?) },
            ReadMethod { name: AHEAD, ask: by_reader(few.reader(counts[1])?) },
            ReadMethod { name: KEPT, ask: by_reader(all.reader(counts[2])?) },
        ];
        let mut samples = vec![];
        for len in requests {
            // Aligned, as the buffers of calls are.
            let mut into = PrivateBuffer::new(*len as usize);
            let mut times = ways.each_ref().map(|_| vec![]);
            for _ in 0..ROUNDS {
                context.check()?;
                for (way, times) in ways.iter_mut().zip(&mut times) {
                    // The first pass is a warm-up: other ways have used the CPU caches.
                    way.pass(bytes, &mut into).context(way.name)?;
                    times.push(way.pass(bytes, &mut into).context(way.name)?);
                }
            }
            for (way, times) in ways.iter().zip(&times) {
                let ns = stats::median(times).context("there are rounds")?;
                samples.push(Sample::at("speed", way.name, *len as f64, bytes as f64 * 1e9 / ns));
            }
        }
        Ok(samples)
    })
}

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "isolation",
    paper: Paper::Singularity,
    question: "What does isolation cost a file that is cached: the library called, the same library \
           behind a channel in a thread, and in a sandboxed process?",
    published_result: "Singularity: hardware isolation costs 37.7 %, channels 7 to 10 % with requests below \
              8 KB.",
    caveat: "Singularity paid 37.7 % for hardware isolation in every system call. Here a call \
               into the library does not even leave the thread. A message costs the hand-over to \
               another process and back, and a copy there beside the client's own; a client that \
               keeps what it was answered until it is told of a change pays its own copy alone.",
    parameters: &[
        parameter("file", "length of the file", "4M", "32M"),
        parameter("requests", "sizes of a read", "4K,16K,128K", "4K,16K,64K,128K,1M"),
    ],
    subjects: &["draconis-lib"],
    accepts: |kind| kind == Kind::Library,
    warms_up: false,
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for Isolation {
    fn about(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(Shape::Lines, "speed", "Reading a cached file by who serves it")
                .x("request", "B")
                .y("read speed", "B/s")
                .log_x()
                .log_y(),
        ]
    }

    fn bytes(&self, context: &Context) -> anyhow::Result<u64> {
        context.number("file")
    }

    fn run(&self, context: &Context, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let bytes = context.number("file")?.next_multiple_of(u64::from(MAX_REQUEST_BYTES));
        let requests = context.numbers("requests")?;
        if let Some(request) = requests.iter().find(|len| u64::from(MAX_REQUEST_BYTES) % **len != 0)
        {
            bail!("requests={request}: a part of 1 MiB without a rest is needed");
        }
        prepare(context, &subject.files()?, NAME, bytes)?;
        let image = subject.library().context("our library")?.take_image()?;
        let samples = measure(context, &image, bytes, &requests)?;
        // Reopens the volume for the next pass.
        subject.cold()?;
        Ok(samples)
    }

    fn summarize(&self, points: Points<'_>) -> Vec<String> {
        let subject = "draconis-lib";
        let line = points.line("speed", subject, CALLED);
        let tell = |(len, called): &(f64, f64)| {
            let slower = |series| {
                let speed = points.at("speed", subject, series, *len)?;
                Some((called / speed - 1.0) * 100.0)
            };
            Some(format!(
                "Requests of {}: {} called; a sandboxed process takes {:+.0} % where each is a \
                 message, {:+.0} % where the next chunk is asked for ahead, {:+.0} % where what \
                 was read is kept.",
                units::bytes(*len),
                units::in_unit(*called, "B/s"),
                slower(EACH)?,
                slower(AHEAD)?,
                slower(KEPT)?,
            ))
        };
        line.iter().filter_map(tell).collect()
    }
}
