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
use draconis_exchange::contract::directory::{DirectoryServer, Lookup};
use draconis_exchange::contract::file::{self, CHUNK_BYTES, CachingReader, File, FileServer};
use draconis_exchange::contract::tree::Tree;
use draconis_exchange::heap::arena::SlotClass;
use draconis_service::options::MountOptions;
use draconis_service::sandbox::{self, SandboxProfile};
use draconis_service::volume::{self, VolumeTree};
use draconis_types::{Block, PrivateBuffer};
use draconis_types::{Name, Node};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::reading::prepare_file;
use super::{Experiment, ExperimentInfo, PaperSource};
use crate::context::RunContext;
use crate::parameters::new_parameter;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::stats;
use crate::subject::{Subject, SubjectKind};
use crate::units;

/// See the module.
pub struct IsolationExperiment;

const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
const TEST_FILE_NAME: &str = "isolation";
/// Maximum request size, in bytes.
const MAX_REQUEST_BYTES: u32 = 1 << 20;
/// Repetitions for each way and size.
const REPETITIONS: usize = 9;
/// Number of chunks of a reader too small to keep a chunk until it is needed again.
const UNCACHED_READER_CHUNKS: usize = 4;

const IN_PROCESS_LABEL: &str = "called";
const MESSAGE_PER_READ_LABEL: &str = "process worker, a message each";
const READ_AHEAD_LABEL: &str = "process worker, straight on";
const CACHED_LABEL: &str = "process worker, kept";

fn open(image: &Path) -> anyhow::Result<VolumeTree> {
    let how = FileOptions { write: false, direct: true, uring: false };
    let disk = Arc::new(FileDisk::open(image, how)?);
    Ok(volume::open(disk, &[], &MountOptions::default())?)
}

fn find_test_file(tree: &VolumeTree) -> anyhow::Result<Node> {
    let name = Name::new(TEST_FILE_NAME.as_bytes())?;
    let found = tree.lookup(&mut Lookup { parent: Node::ROOT, name });
    Ok(found.with_context(|| format!("no file {TEST_FILE_NAME}"))?.node)
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
    let file = tree.file(find_test_file(&tree)?);
    let _ = server.serve(REPLY_TIMEOUT, |message| file::answer(&file, message));
    Ok(())
}

/// Fills a buffer from an offset of the file.
type ReadFunction<'a> = Box<dyn FnMut(u64, &mut [u8]) -> anyhow::Result<usize> + 'a>;

/// A way to read the file.
struct ReadMethod<'a> {
    name: &'static str,
    ask: ReadFunction<'a>,
}

impl ReadMethod<'_> {
    /// Reads the whole file; returns the time taken.
    fn time_full_read(&mut self, bytes: u64, into: &mut [u8]) -> anyhow::Result<f64> {
        let started = Instant::now();
        for offset in (0..bytes).step_by(into.len()) {
            if (self.ask)(offset, into)? != into.len() {
                bail!("{}: a short answer at {offset}", self.name);
            }
        }
        Ok((started.elapsed().as_nanos() as f64).max(1.0))
    }
}

fn read_by_call<'a>(tree: &'a VolumeTree, node: Node) -> ReadFunction<'a> {
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

fn read_by_reader(mut reader: CachingReader) -> ReadFunction<'static> {
    Box::new(move |offset, into| Ok(reader.read(offset, into)?))
}

/// A worker process, which is killed on drop.
struct ReadWorker {
    session: Arc<Session>,
    child: Child,
}

impl ReadWorker {
    fn start(image: &Path, chunks: usize) -> anyhow::Result<Self> {
        let class = |slot_bytes, slots| SlotClass { slot_bytes, slots };
        // One more chunk is in flight.
        let host = vec![class(4096, 2), class(16 << 10, 2), class(CHUNK_BYTES, chunks as u32 + 2)];
        let plan = SessionConfig { lanes: 1, host, guest: vec![] };
        let (offer, socket) = session::offer(&plan)?;
        let child = Command::new("/proc/self/exe")
            .arg("isolation-child")
            .arg(image)
            .stdin(socket)
            .spawn()?;
        let pid = Pid::from_child(&child);
        Ok(Self { session: offer.start(pidfd_open(pid, PidfdFlags::empty())?), child })
    }

    /// Creates a reader with a cache of `chunks` chunks.
    fn caching_reader(&self, chunks: usize) -> anyhow::Result<CachingReader> {
        let session = self.session.clone();
        let end = session.client::<File>(0).context("lane 0")?;
        Ok(CachingReader::new(end, REPLY_TIMEOUT, chunks, move |len| session.allocate_block(len)))
    }
}

impl Drop for ReadWorker {
    fn drop(&mut self) {
        // The child may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Measures bytes per second by way and request size. Alternates between the ways, so that other
/// load affects all of them.
fn measure_read_methods(
    context: &RunContext,
    image: &Path,
    bytes: u64,
    requests: &[u64],
) -> anyhow::Result<Vec<Sample>> {
    let all_chunks = bytes.div_ceil(CHUNK_BYTES.into()) as usize;
    let tree = open(image)?;
    let at = find_test_file(&tree)?;
    let (client, server) = channel::pair::<File>();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            tree.notify_changes_to(&server);
            // Ignores a reader that disconnects.
            let file = tree.file(at);
            let _ = server.serve(REPLY_TIMEOUT, |message| file::answer(&file, message));
        });
        let vacant = |len| Some(Block::unallocated(len));
        let kept_by_thread = CachingReader::new(client, REPLY_TIMEOUT, all_chunks, vacant);
        let counts = [0, UNCACHED_READER_CHUNKS, all_chunks];
        let workers = counts.map(|chunks| ReadWorker::start(image, chunks));
        let [each, few, all] = workers;
        let (each, few, all) = (each?, few?, all?);
        let mut ways = [
            ReadMethod { name: IN_PROCESS_LABEL, ask: read_by_call(&tree, at) },
            ReadMethod { name: "thread worker, kept", ask: read_by_reader(kept_by_thread) },
            ReadMethod {
                name: MESSAGE_PER_READ_LABEL,
                ask: read_by_reader(each.caching_reader(counts[0])?),
            },
            ReadMethod {
                name: READ_AHEAD_LABEL,
                ask: read_by_reader(few.caching_reader(counts[1])?),
            },
            ReadMethod { name: CACHED_LABEL, ask: read_by_reader(all.caching_reader(counts[2])?) },
        ];
        let mut samples = vec![];
        for len in requests {
            // Aligned, as the buffers of calls are.
            let mut into = PrivateBuffer::new(*len as usize);
            let mut times = ways.each_ref().map(|_| vec![]);
            for _ in 0..REPETITIONS {
                context.check_not_stopped()?;
                for (way, times) in ways.iter_mut().zip(&mut times) {
                    // The first pass is a warm-up: other ways have used the CPU caches.
                    way.time_full_read(bytes, &mut into).context(way.name)?;
                    times.push(way.time_full_read(bytes, &mut into).context(way.name)?);
                }
            }
            for (way, times) in ways.iter().zip(&times) {
                let ns = stats::median(times).context("there are rounds")?;
                samples.push(Sample::at_x("speed", way.name, *len as f64, bytes as f64 * 1e9 / ns));
            }
        }
        Ok(samples)
    })
}

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "isolation",
    paper: PaperSource::Singularity,
    question: "What does isolation cost a file that is cached: the library called, the same library \
           behind a channel in a thread, and in a sandboxed process?",
    published_result: "Singularity: hardware isolation costs 37.7 %, channels 7 to 10 % with requests below \
              8 KB.",
    caveat: "Singularity paid 37.7 % for hardware isolation in every system call. Here a call \
               into the library does not even leave the thread. A message costs the hand-over to \
               another process and back, and a copy there beside the client's own; a client that \
               keeps what it was answered until it is told of a change pays its own copy alone.",
    parameters: &[
        new_parameter("file", "length of the file", "4M", "32M"),
        new_parameter("requests", "sizes of a read", "4K,16K,128K", "4K,16K,64K,128K,1M"),
    ],
    subjects: &["draconis-lib"],
    accepts: |kind| kind == SubjectKind::Library,
    warms_up: false,
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for IsolationExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Lines, "speed", "Reading a cached file by who serves it")
                .with_x_axis("request", "B")
                .with_y_axis("read speed", "B/s")
                .with_log_x()
                .with_log_y(),
        ]
    }

    fn required_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        context.number_parameter("file")
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let bytes =
            context.number_parameter("file")?.next_multiple_of(u64::from(MAX_REQUEST_BYTES));
        let requests = context.number_list_parameter("requests")?;
        if let Some(request) = requests.iter().find(|len| u64::from(MAX_REQUEST_BYTES) % **len != 0)
        {
            bail!("requests={request}: a part of 1 MiB without a rest is needed");
        }
        prepare_file(context, &subject.files()?, TEST_FILE_NAME, bytes)?;
        let image = subject.library_subject().context("our library")?.close_and_take_image()?;
        let samples = measure_read_methods(context, &image, bytes, &requests)?;
        // Reopens the volume for the next pass.
        subject.empty_caches()?;
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let subject = "draconis-lib";
        let line = points.medians_by_x("speed", subject, IN_PROCESS_LABEL);
        let tell = |(len, called): &(f64, f64)| {
            let slower = |series| {
                let speed = points.median_at("speed", subject, series, *len)?;
                Some((called / speed - 1.0) * 100.0)
            };
            Some(format!(
                "Requests of {}: {} called; a sandboxed process takes {:+.0} % where each is a \
                 message, {:+.0} % where the next chunk is asked for ahead, {:+.0} % where what \
                 was read is kept.",
                units::format_bytes(*len),
                units::format_in_unit(*called, "B/s"),
                slower(MESSAGE_PER_READ_LABEL)?,
                slower(READ_AHEAD_LABEL)?,
                slower(CACHED_LABEL)?,
            ))
        };
        line.iter().filter_map(tell).collect()
    }
}
