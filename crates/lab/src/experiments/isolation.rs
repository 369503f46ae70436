//! The same cached file read by a call, by a worker in a thread, by a worker in a sandboxed
//! process.

use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use draconis_device::{FileDisk, FileOptions};
use draconis_exchange::channel::process::{self, Plan};
use draconis_exchange::channel::{self, Caller};
use draconis_exchange::contract::Node;
use draconis_exchange::contract::file::{self, File};
use draconis_exchange::contract::tree::{Tree, Walked, walk};
use draconis_exchange::heap::Block;
use draconis_exchange::heap::arena::Class;
use draconis_service::options::MountOptions;
use draconis_service::sandbox::{self, Profile};
use draconis_service::volume::{self, VolumeTree};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::reading::prepare;
use super::{About, Experiment, Paper};
use crate::context::Context;
use crate::parameters::parameter;
use crate::results::{Figure, Points, Sample, Shape};
use crate::subject::{Kind, Subject};
use crate::units;

/// See the module.
pub struct Isolation;

const PATIENCE: Duration = Duration::from_secs(10);
const NAME: &str = "isolation";
/// The largest request, in bytes.
const MOST: u32 = 64 << 10;

fn open(image: &Path) -> anyhow::Result<VolumeTree> {
    let how = FileOptions { write: false, direct: true, uring: false };
    let disk = std::sync::Arc::new(FileDisk::open(image, how)?);
    Ok(volume::open(disk, &[], &MountOptions::default())?)
}

fn node(tree: &VolumeTree) -> anyhow::Result<Node> {
    match walk(tree, Node::ROOT, NAME.as_bytes(), true) {
        Ok(Walked::At(attributes)) => Ok(attributes.node),
        _ => bail!("no file {NAME}"),
    }
}

/// The child's side: opens the volume, gives all power away, serves the file.
///
/// # Errors
/// What the channel, the volume or the sandbox say.
pub fn serve_as_child(image: &Path) -> anyhow::Result<()> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    let session = process::accept(&socket, Instant::now() + PATIENCE)?;
    let tree = open(image)?;
    sandbox::confine(&Profile::Worker, None)?;
    let server = session.server::<File>(0).context("lane 0")?;
    let _ = file::serve(server, &tree.file(node(&tree)?), PATIENCE);
    Ok(())
}

/// Reads the file from its start to its end, twice; how long the second time took.
fn read_twice(
    bytes: u64,
    len: u32,
    buffer: &mut Option<Block>,
    mut ask: impl FnMut(file::Read) -> anyhow::Result<Block>,
) -> anyhow::Result<u64> {
    let mut ns = 0;
    for _ in 0..2 {
        let started = Instant::now();
        let mut offset = 0;
        while offset < bytes {
            let block = buffer.take().context("the last reply returned it")?;
            *buffer = Some(ask(file::Read {
                buffer: block,
                buffer_offset: 0,
                offset,
                len,
                no_atime: false,
            })?);
            offset += u64::from(len);
        }
        ns = started.elapsed().as_nanos() as u64;
    }
    Ok(ns.max(1))
}

fn by_caller(caller: &mut Caller<File>, message: file::Read) -> anyhow::Result<Block> {
    match caller.call(message) {
        Ok(Ok(ack)) => Ok(ack.buffer),
        Ok(Err(nak)) => bail!("{}", nak.why),
        Err(lost) => bail!("{lost}"),
    }
}

fn by_call(image: &Path, bytes: u64, requests: &[u64]) -> anyhow::Result<Vec<u64>> {
    use draconis_exchange::contract::file::FileServer;
    let tree = open(image)?;
    let file = tree.file(node(&tree)?);
    let time = |len: &u64| {
        let mut buffer = Some(Block::private(MOST as usize));
        read_twice(bytes, *len as u32, &mut buffer, |mut message| match file.read(&mut message) {
            Ok(_) => Ok(message.buffer),
            Err(why) => bail!("{why}"),
        })
    };
    requests.iter().map(time).collect()
}

fn by_thread(image: &Path, bytes: u64, requests: &[u64]) -> anyhow::Result<Vec<u64>> {
    let tree = open(image)?;
    let node = node(&tree)?;
    let (client, server) = channel::pair::<File>();
    std::thread::scope(|scope| {
        scope.spawn(|| file::serve(server, &tree.file(node), PATIENCE));
        let mut caller = Caller::new(client, PATIENCE);
        let time = |len: &u64| {
            let mut buffer = Some(Block::private(MOST as usize));
            read_twice(bytes, *len as u32, &mut buffer, |m| by_caller(&mut caller, m))
        };
        requests.iter().map(time).collect()
    })
}

fn by_process(image: &Path, bytes: u64, requests: &[u64]) -> anyhow::Result<Vec<u64>> {
    let class = |slot_bytes| Class { slot_bytes, slots: 4 };
    let host = vec![class(4096), class(MOST)];
    let plan = Plan { fixed_lanes: 1, host_lanes: 0, guest_lanes: 0, host, guest: vec![] };
    let (offer, socket) = process::offer(&plan)?;
    let mut child =
        Command::new("/proc/self/exe").arg("isolation-child").arg(image).stdin(socket).spawn()?;
    let pid = Pid::from_raw(child.id() as i32).context("a child has a number")?;
    let session = offer.start(pidfd_open(pid, PidfdFlags::empty())?);
    let measure = || -> anyhow::Result<Vec<u64>> {
        let mut caller = Caller::new(session.client::<File>(0).context("lane 0")?, PATIENCE);
        let time = |len: &u64| {
            let mut buffer = session.block(MOST as usize);
            read_twice(bytes, *len as u32, &mut buffer, |m| by_caller(&mut caller, m))
        };
        requests.iter().map(time).collect()
    };
    let times = measure();
    let _ = child.kill();
    let _ = child.wait();
    times
}

const ABOUT: About = About {
    name: "isolation",
    paper: Paper::Singularity,
    asks: "What does isolation cost a file that is cached: the library called, the same library \
           behind a channel in a thread, and in a sandboxed process?",
    finding: "Singularity: hardware isolation costs 37.7 %, channels 7 to 10 % with requests below \
              8 KB.",
    explains: "Singularity paid 37.7 % for hardware isolation in every system call. Here a call \
               into the library does not even leave the thread: what is measured is the hand-over \
               to another thread or process and back, which large requests share out.",
    parameters: &[
        parameter("file", "length of the file", "4M", "32M"),
        parameter("requests", "sizes of a read", "4K,16K,64K", "4K,8K,16K,32K,64K"),
    ],
    subjects: &["draconis-lib"],
    takes: |kind| kind == Kind::Library,
    warms_up: false,
    ..About::USUAL
};

impl Experiment for Isolation {
    fn about(&self) -> &About {
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
        let bytes = context.number("file")?.next_multiple_of(u64::from(MOST));
        let requests = context.numbers("requests")?;
        if let Some(request) = requests.iter().find(|len| u64::from(MOST) % **len != 0) {
            bail!("requests={request}: a part of 64 KiB without a rest is needed");
        }
        prepare(context, &subject.files()?, NAME, bytes)?;
        let image = subject.library().context("our library")?.take_image()?;
        let mut samples = vec![];
        type By = fn(&Path, u64, &[u64]) -> anyhow::Result<Vec<u64>>;
        let all: [(&str, By); 3] = [
            ("called", by_call),
            ("thread worker", by_thread),
            ("sandboxed process worker", by_process),
        ];
        for (name, by) in all {
            context.check()?;
            let times = by(&image, bytes, &requests).context(name)?;
            samples.extend(requests.iter().zip(times).map(|(len, ns)| {
                Sample::at("speed", name, *len as f64, bytes as f64 * 1e9 / ns as f64)
            }));
        }
        // The next pass finds it open again.
        subject.cold()?;
        Ok(samples)
    }

    fn found(&self, points: Points<'_>) -> Vec<String> {
        let subject = "draconis-lib";
        let line = points.line("speed", subject, "called");
        let tell = |(len, called): &(f64, f64)| {
            let slower = |series| {
                let speed = points.at("speed", subject, series, *len)?;
                Some((called / speed - 1.0) * 100.0)
            };
            Some(format!(
                "Requests of {}: {} called; a thread worker takes {:.0} % longer, a process \
                 worker {:.0} %.",
                units::bytes(*len),
                units::in_unit(*called, "B/s"),
                slower("thread worker")?,
                slower("sandboxed process worker")?,
            ))
        };
        line.iter().filter_map(tell).collect()
    }
}
