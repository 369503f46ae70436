//! `draconis store`: objects in a file or on a device.
//!
//! ```text
//!   writers ──alone──▶ disk ─▶ store        readers ──shared──▶ disk ─▶ store, read-only
//! ```
//!
//! Law 1: what is in use, and what holds something unless forced, is not touched.
//! Law 2: a block device is measured, or made a store, only by who says --destroy;
//! everywhere else what is measured is a file of our own.
//! Law 3: a file that was written out stays so: nothing of it is discarded, since each hole
//! that is written to again costs a commit of the file system's journal.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, anyhow, bail, ensure};
use draconis_device::{Claim, Disk, Extent, FileOptions, OpenedFile, claim, written_unit_bytes};
use draconis_exchange::heap::Block;
use draconis_objects::check::{CheckOptions, Finding, Of, Report};
use draconis_objects::probe::{self, Measured};
use draconis_objects::{
    CreateOptions, Error, Group, Hint, LayoutKind, ObjectId, OpenOptions, Profile, Store,
};
use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::format;
use crate::cli::{
    Heat, Layout, ObjectName, StoreAppend, StoreCheck, StoreCommand, StoreCreate, StoreGet,
    StoreProbe, StorePut, StoreRm, StoreShow, When,
};
use crate::image;
use crate::progress::Progress;
use crate::text::{self, printable};

/// What is read and written at once, in bytes.
const PIECE_BYTES: usize = 1 << 20;
/// An object up to this length is put with one group, in bytes.
const GROUP_BYTES: usize = 64 << 20;
/// What one group of a longer one has, in bytes.
const LOT_BYTES: usize = 8 << 20;
/// A file shorter than this tells nothing of the disk below, in bytes.
const MEASURED_BYTES_MIN: u64 = 2 * probe::REGION_BYTES_MIN;

/// The statuses of `draconis check`.
const DAMAGED: u8 = 4;
const FAILED: u8 = 8;

pub fn run(command: &StoreCommand) -> anyhow::Result<ExitCode> {
    match command {
        StoreCommand::Probe(arguments) => measure(arguments)?,
        StoreCommand::Create(arguments) => create(arguments)?,
        StoreCommand::Info(arguments) => info(arguments)?,
        StoreCommand::Check(arguments) => return Ok(check(arguments)),
        StoreCommand::Ls(arguments) => ls(arguments)?,
        StoreCommand::Put(arguments) => put(arguments)?,
        StoreCommand::Get(arguments) => get(arguments)?,
        StoreCommand::Append(arguments) => append(arguments)?,
        StoreCommand::Rm(arguments) => rm(arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Opens a store to be changed, by nobody else.
pub fn writable(device: &Path) -> anyhow::Result<Arc<Store>> {
    let file = image::alone(device)?.with_context(|| missing(device))?;
    open(device, disk(file, device, true, true)?, false)
}

/// Opens a store to be read, beside others who do.
pub fn readable(device: &Path) -> anyhow::Result<Arc<Store>> {
    open(device, shared(device, true)?, true)
}

/// Makes all that was done durable, and part of a checkpoint: the end of a log that rots
/// cannot be told from one that a power cut tore.
pub fn close(store: &Store, device: &Path) -> anyhow::Result<()> {
    store.sync().and_then(|()| store.checkpoint()).map_err(|error| tell(device, error))
}

fn shared(device: &Path, uring: bool) -> anyhow::Result<Arc<dyn Disk>> {
    let shown = device.display();
    let file = match File::open(device) {
        Err(error) if error.kind() == ErrorKind::NotFound => bail!(missing(device)),
        opened => opened.with_context(|| shown.to_string())?,
    };
    match claim(&file, Claim::Shared) {
        Err(Errno::WOULDBLOCK) => bail!("{shown} is in use; wait until who changes it is done"),
        claimed => claimed?,
    }
    disk(file, device, false, uring)
}

fn missing(device: &Path) -> String {
    format!("{}: no such file; draconis store create makes a store", device.display())
}

fn open(device: &Path, disk: Arc<dyn Disk>, read_only: bool) -> anyhow::Result<Arc<Store>> {
    let options = OpenOptions { read_only, ..OpenOptions::default() };
    Store::open(disk, &options).map_err(|error| tell(device, error))
}

/// An error, with what can be done about it.
pub fn tell(device: &Path, error: Error) -> anyhow::Error {
    let shown = device.display();
    let step = match &error {
        Error::NotAStore(_) => format!("; draconis store create {shown} makes one"),
        Error::Corrupt { .. } => format!("; draconis store check {shown} says what is damaged"),
        Error::NoObject(_) => format!("; draconis store ls {shown} lists them"),
        _ => String::new(),
    };
    anyhow!("{shown}: {error}{step}")
}

fn disk(file: File, device: &Path, write: bool, uring: bool) -> anyhow::Result<Arc<dyn Disk>> {
    let options = FileOptions { write, direct: true, uring };
    let is_dense = is_dense(&file)?;
    let opened = OpenedFile::new(file.into(), options);
    let opened = opened.with_context(|| device.display().to_string())?;
    let opened = if is_dense { opened } else { opened.discarding() };
    Ok(Arc::new(opened.start()))
}

/// Whether it is a file without holes.
fn is_dense(file: &File) -> std::io::Result<bool> {
    // What is behind the last whole sector is never written.
    const BLOCK_BYTES: u64 = 4096;
    let meta = file.metadata()?;
    Ok(meta.is_file() && meta.blocks() * 512 + BLOCK_BYTES > meta.len())
}

// Probe and create.

/// A profile as JSON has it.
#[derive(Serialize, Deserialize)]
struct Chosen {
    layout: String,
    page_bytes: u32,
    segment_bytes: u32,
    queue_depth: u32,
}

/// What `--profile` reads: what `probe --json` writes, or the profile alone.
#[derive(Deserialize)]
#[serde(untagged)]
enum Given {
    Probed { profile: Chosen },
    Alone(Chosen),
}

#[derive(Serialize)]
struct Probed {
    profile: Chosen,
    why: Vec<String>,
    measured: Figures,
}

#[derive(Serialize)]
struct Figures {
    write_bytes_per_s: u64,
    read_bytes_per_s: u64,
    near_read_ns: u64,
    far_read_ns: u64,
    near_write_ns: u64,
    far_write_ns: u64,
    flush_ns: u64,
    reads_per_s: [u64; 6],
    across: [f64; 6],
    told_bytes: u32,
}

impl From<Profile> for Chosen {
    fn from(profile: Profile) -> Self {
        Self {
            layout: profile.layout.to_string(),
            page_bytes: profile.page_bytes,
            segment_bytes: profile.segment_bytes,
            queue_depth: profile.queue_depth,
        }
    }
}

impl Chosen {
    fn profile(&self) -> anyhow::Result<Profile> {
        let layout = match self.layout.as_str() {
            "log" => LayoutKind::Log,
            "cow" => LayoutKind::Cow,
            other => bail!("layout {other}: log or cow"),
        };
        Ok(Profile {
            layout,
            page_bytes: self.page_bytes,
            segment_bytes: self.segment_bytes,
            queue_depth: self.queue_depth,
        })
    }
}

fn measure(arguments: &StoreProbe) -> anyhow::Result<()> {
    let device = &arguments.device;
    let shown = device.display();
    let is_device = std::fs::metadata(device).is_ok_and(|it| it.file_type().is_block_device());
    let wanted = arguments.size.unwrap_or(probe::REGION_BYTES);
    let (file, disk_bytes) = if is_device {
        if !arguments.destroy {
            bail!(
                "{shown}: measuring it overwrites it; --destroy says so, or give a directory that is on it"
            );
        }
        let file = image::alone(device)?.with_context(|| missing(device))?;
        let len = format::len_bytes(&file)?;
        (file, len)
    } else {
        let file = nameless(device, wanted)?;
        // A store is made as large as one likes; sizes are for a large one.
        let there = std::fs::metadata(device).ok().filter(std::fs::Metadata::is_file);
        (file, there.map_or(64 << 30, |there| there.len()))
    };
    let measured = measured(device, file, wanted, arguments.progress)
        .map_err(|error| anyhow!("{shown}: {error}"))?;
    let (profile, why) = measured.profile(disk_bytes);
    if arguments.json {
        let probed = Probed { profile: profile.into(), why, measured: figures(&measured) };
        println!("{}", serde_json::to_string_pretty(&probed)?);
        return Ok(());
    }
    let mut out = std::io::stdout().lock();
    let per_second = |bytes| format!("{}/s", text::bytes(bytes));
    writeln!(out, "writes in order    {}", per_second(measured.write_bytes_per_s))?;
    writeln!(out, "reads in order     {}", per_second(measured.read_bytes_per_s))?;
    let micros = |ns: u64| format!("{:.1} µs", ns as f64 / 1e3);
    let (near, far) = (micros(measured.near_read_ns), micros(measured.far_read_ns));
    writeln!(out, "4 KiB reads        {near} near, {far} far")?;
    let (near, far) = (micros(measured.near_write_ns), micros(measured.far_write_ns));
    writeln!(out, "4 KiB writes       {near} near, {far} far, 32 with one flush")?;
    writeln!(out, "write and flush    {}", micros(measured.flush_ns))?;
    let rates = measured.reads_per_s.map(|rate| rate.to_string()).join(", ");
    writeln!(out, "reads a second     {rates} with 1, 2, 4, 8, 16, 32 in flight")?;
    tell_profile(&mut out, &why)?;
    Ok(())
}

fn tell_profile(out: &mut dyn Write, why: &[String]) -> std::io::Result<()> {
    why.iter().try_for_each(|reason| writeln!(out, "{reason}"))
}

fn figures(measured: &Measured) -> Figures {
    let &Measured { write_bytes_per_s, read_bytes_per_s, near_read_ns, far_read_ns, .. } = measured;
    let &Measured {
        near_write_ns, far_write_ns, flush_ns, reads_per_s, across, told_bytes, ..
    } = measured;
    Figures {
        write_bytes_per_s,
        read_bytes_per_s,
        near_read_ns,
        far_read_ns,
        near_write_ns,
        far_write_ns,
        flush_ns,
        reads_per_s,
        across,
        told_bytes,
    }
}

/// A file without a name on the file system that `near` is on; it goes when it is closed.
fn nameless(near: &Path, len_bytes: u64) -> anyhow::Result<File> {
    let dir = match near.parent() {
        _ if near.is_dir() => near,
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(dir, flags, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR);
    let file = File::from(file.with_context(|| format!("{}: no file to measure", dir.display()))?);
    file.set_len(len_bytes)?;
    Ok(file)
}

fn measured(device: &Path, file: File, wanted: u64, progress: When) -> anyhow::Result<Measured> {
    let told_bytes = written_unit_bytes(&file).unwrap_or(0);
    let disk = disk(file, device, true, true)?;
    let start = Instant::now();
    let clock = || start.elapsed().as_nanos() as u64;
    let len = disk.properties().len_bytes.min(wanted);
    let mut bar: Option<Progress> = None;
    let mut told = 0;
    let measured =
        probe::probe(&*disk, &clock, Extent::new(0, len), told_bytes, &mut |done, all| {
            // A bar counts bytes; a step is so many.
            const STEP: u64 = 1 << 20;
            bar.get_or_insert_with(|| Progress::new(progress, all * STEP))
                .add((done - told) * STEP);
            told = done;
        });
    Ok(measured?)
}

fn create(arguments: &StoreCreate) -> anyhow::Result<()> {
    let device = &arguments.device;
    let shown = device.display();
    let given = arguments.profile.as_deref().map(profile_of).transpose()?;
    let opened = image::alone(device)?;
    if let Some(file) = &opened {
        may_overwrite(arguments, file)?;
    }
    let created = opened.is_none();
    let made = match opened {
        Some(file) => make(arguments, file, given),
        None => {
            ensure!(arguments.size.is_some(), "{shown} does not exist: --size is needed");
            let file = File::options().read(true).write(true).create_new(true).open(device);
            let file = file.with_context(|| shown.to_string())?;
            image::claim_alone(&file, device)?;
            make(arguments, file, given)
        }
    };
    if made.is_err() && created {
        let _ = std::fs::remove_file(device);
    }
    made
}

/// Refuses what holds something, unless somebody said that it may go.
fn may_overwrite(arguments: &StoreCreate, file: &File) -> anyhow::Result<()> {
    let shown = arguments.device.display();
    let holds = format::holds(file)?;
    match (file.metadata()?.is_file(), holds) {
        (true, Some(what)) if !arguments.force => {
            bail!("{shown} holds {what}; --force overwrites it")
        }
        (false, what) if !arguments.destroy => bail!(
            "{shown} is a block device{}; --destroy makes a store of it, and what it holds is lost",
            what.map_or(String::new(), |what| format!(" that holds {what}"))
        ),
        _ => Ok(()),
    }
}

fn profile_of(file: &Path) -> anyhow::Result<Profile> {
    let shown = file.display();
    let text = match file == Path::new("-") {
        true => std::io::read_to_string(std::io::stdin())?,
        false => std::fs::read_to_string(file).with_context(|| shown.to_string())?,
    };
    let given = serde_json::from_str(&text)
        .with_context(|| format!("{shown}: not what draconis store probe --json writes"))?;
    match given {
        Given::Probed { profile } | Given::Alone(profile) => profile.profile(),
    }
}

/// Makes a store in an open file or device.
fn make(arguments: &StoreCreate, file: File, given: Option<Profile>) -> anyhow::Result<()> {
    let device = &arguments.device;
    let shown = device.display();
    let is_file = file.metadata()?.is_file();
    let there = format::len_bytes(&file)?;
    let len = arguments.size.unwrap_or(there);
    ensure!(len > 0, "{shown} is empty: --size is needed");
    if !is_file && len != there {
        bail!("{shown} has {there} bytes; a store takes all of a device, without --size");
    }
    let make_hole = || -> anyhow::Result<()> {
        // Cut off and lengthened it is one hole.
        file.set_len(0)?;
        file.set_len(len).with_context(|| format!("{shown}: {}", text::bytes(len)))
    };
    if is_file {
        make_hole()?;
    }
    let is_written_out = is_file && !arguments.sparse;
    if is_written_out {
        reserve(&file, len).with_context(|| format!("{shown}: {}", text::bytes(len)))?;
    }
    let (mut profile, mut why) = match given {
        Some(profile) => (profile, vec!["as --profile says".to_owned()]),
        None if len < MEASURED_BYTES_MIN => unmeasured(len),
        None => {
            let wanted = probe::REGION_BYTES;
            let measured = measured(device, file.try_clone()?, wanted, arguments.progress)
                .map_err(|error| anyhow!("{shown}: {error}"))?;
            if is_file && arguments.sparse {
                make_hole()?;
            }
            measured.profile(len)
        }
    };
    if is_written_out {
        let disk = self::disk(file.try_clone()?, device, true, true)?;
        write_out(&*disk, arguments.progress).map_err(|error| anyhow!("{shown}: {error}"))?;
    }
    if let Some(layout) = arguments.layout {
        profile.layout = match layout {
            Layout::Log => LayoutKind::Log,
            Layout::Cow => LayoutKind::Cow,
        };
        why.push(format!("layout {}: --layout says so", profile.layout));
    }
    let id = u128::from_le_bytes(format::Random::new(None).uuid());
    let disk = self::disk(file, device, true, true)?;
    Store::create(disk, &CreateOptions { profile, id }).map_err(|error| match error {
        Error::Misuse(why) => anyhow!("{shown}: {why}; choose a larger --size"),
        error => anyhow!("{shown}: {error}"),
    })?;
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{shown}: {}, layout {}, pages of {}, segments of {}, queue depth {}",
        text::bytes(len),
        profile.layout,
        text::bytes(profile.page_bytes.into()),
        text::bytes(profile.segment_bytes.into()),
        profile.queue_depth
    )?;
    tell_profile(&mut out, &why)?;
    Ok(())
}

/// Takes room for a file where the file system can do that; if there is none, it says so now.
fn reserve(file: &File, len: u64) -> rustix::io::Result<()> {
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, len) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        done => done,
    }
}

/// Writes zeros everywhere: what was written once is written again without a change of the
/// file system's.
fn write_out(disk: &dyn Disk, progress: When) -> Result<(), draconis_device::Error> {
    let len = disk.properties().len_bytes;
    let mut bar = Progress::new(progress, len);
    let (mut at, mut last) = (0, None);
    while at < len {
        let mut writes = vec![];
        while at < len && writes.len() < 8 {
            let bytes = (len - at).min(PIECE_BYTES as u64);
            writes.push(draconis_device::Write {
                at_bytes: at,
                block: Block::private(bytes as usize),
            });
            at += bytes;
        }
        let group = draconis_device::Group { writes };
        let ticket = disk.submit(group, &[]).map_err(|refused| refused.error)?;
        // One is written while the next one is made.
        if let Some(before) = last.replace(ticket) {
            disk.settle(before)?;
            bar.add(8 * PIECE_BYTES as u64);
        }
    }
    last.map_or(Ok(()), |ticket| disk.wait(ticket))
}

/// What serves everywhere.
fn unmeasured(len: u64) -> (Profile, Vec<String>) {
    let segment_bytes = (1u64 << (len / 128).max(1).ilog2()).clamp(64 << 10, 4 << 20) as u32;
    let profile =
        Profile { layout: LayoutKind::Cow, page_bytes: 4096, segment_bytes, queue_depth: 16 };
    (profile, vec!["not measured: too small to tell anything of the disk".to_owned()])
}

// Looking at a store.

#[derive(Serialize)]
struct Facts {
    id: String,
    profile: Chosen,
    disk_bytes: u64,
    capacity_bytes: u64,
    used_bytes: u64,
    segments: u32,
    free_segments: u32,
    incarnation: u64,
    pending_keys: u64,
}

fn info(arguments: &StoreShow) -> anyhow::Result<()> {
    let info = readable(&arguments.device)?.info();
    if arguments.json {
        let facts = Facts {
            id: format!("{:032x}", info.id),
            profile: info.profile.into(),
            disk_bytes: info.disk_bytes,
            capacity_bytes: info.capacity_bytes,
            used_bytes: info.used_bytes,
            segments: info.segments,
            free_segments: info.free_segments,
            incarnation: info.incarnation,
            pending_keys: info.pending_keys,
        };
        println!("{}", serde_json::to_string_pretty(&facts)?);
        return Ok(());
    }
    let mut out = std::io::stdout().lock();
    let profile = info.profile;
    let percent = info.used_bytes as f64 / info.capacity_bytes.max(1) as f64 * 100.0;
    writeln!(out, "identity      {:032x}", info.id)?;
    writeln!(out, "layout        {}", profile.layout)?;
    writeln!(out, "page          {}", text::bytes(profile.page_bytes.into()))?;
    writeln!(out, "segment       {}", text::bytes(profile.segment_bytes.into()))?;
    writeln!(out, "queue depth   {}", profile.queue_depth)?;
    writeln!(out, "length        {}", text::bytes(info.disk_bytes))?;
    let (used, capacity) = (text::bytes(info.used_bytes), text::bytes(info.capacity_bytes));
    writeln!(out, "used          {used} of {capacity} ({percent:.1} %)")?;
    writeln!(out, "segments      {}, {} free", info.segments, info.free_segments)?;
    writeln!(
        out,
        "opened        {} for writing",
        text::counted(info.incarnation.saturating_sub(1), "time", "times")
    )?;
    Ok(())
}

#[derive(Serialize)]
struct Listed {
    object: u64,
    len_bytes: u64,
}

fn ls(arguments: &StoreShow) -> anyhow::Result<()> {
    let store = readable(&arguments.device)?;
    let list = store.list().map_err(|error| tell(&arguments.device, error))?;
    let listed = |&(id, len_bytes): &(ObjectId, u64)| Listed { object: id.0, len_bytes };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    if arguments.json {
        let all: Vec<Listed> = list.iter().map(listed).collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
    } else {
        for (id, len) in &list {
            writeln!(out, "{id}\t{len}")?;
        }
    }
    out.flush()?;
    Ok(())
}

// Checking.

#[derive(Serialize)]
struct Checked {
    clean: bool,
    complete: bool,
    objects: u64,
    keys: u64,
    payload_bytes: u64,
    index_bytes: u64,
    used_segments: u32,
    free_segments: u32,
    damage: Vec<Said>,
    more_damage: u64,
    notes: Vec<Said>,
}

#[derive(Serialize)]
struct Said {
    what: &'static str,
    text: String,
    at_bytes: Option<u64>,
    object: Option<u64>,
    key: Option<String>,
}

fn said(finding: &Finding) -> Said {
    let (object, key) = match &finding.of {
        Some(Of::Object(id)) => (Some(id.0), None),
        Some(Of::Key(key)) => (None, Some(printable(key))),
        None => (None, None),
    };
    let text = finding.to_string();
    Said { what: finding.what.code(), text, at_bytes: finding.at_bytes, object, key }
}

/// Everything that can go wrong has the same status, so there is no error.
fn check(arguments: &StoreCheck) -> ExitCode {
    match try_check(arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(DAMAGED),
        Err(error) => {
            eprintln!("draconis: {error:#}");
            ExitCode::from(FAILED)
        }
    }
}

fn try_check(arguments: &StoreCheck) -> anyhow::Result<bool> {
    // A sandbox cannot see what goes through a ring.
    let disk = shared(&arguments.device, false)?;
    image::confine()?;
    let mut bar: Option<Progress> = None;
    let mut told = 0;
    let report = Store::check(disk, &CheckOptions::default(), &mut |done, total| {
        bar.get_or_insert_with(|| Progress::new(arguments.progress, total))
            .add(done.saturating_sub(told));
        told = done;
    });
    drop(bar);
    let report = report.map_err(|error| tell(&arguments.device, error))?;
    show(arguments, &report)?;
    Ok(report.is_clean())
}

fn show(arguments: &StoreCheck, report: &Report) -> anyhow::Result<()> {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    if arguments.json {
        let checked = Checked {
            clean: report.is_clean(),
            complete: report.is_complete,
            objects: report.objects,
            keys: report.keys,
            payload_bytes: report.payload_bytes,
            index_bytes: report.index_bytes,
            used_segments: report.used_segments,
            free_segments: report.free_segments,
            damage: report.damage.iter().map(said).collect(),
            more_damage: report.more,
            notes: report.notes.iter().map(said).collect(),
        };
        writeln!(out, "{}", serde_json::to_string_pretty(&checked)?)?;
    } else {
        for finding in &report.damage {
            writeln!(out, "{finding}")?;
        }
        if report.more > 0 {
            writeln!(out, "and {} more", report.more)?;
        }
        for note in &report.notes {
            writeln!(out, "note: {note}")?;
        }
        writeln!(
            out,
            "{}: {}, {}, {}, index {}, {}/{} segments{}",
            arguments.device.display(),
            text::counted(report.objects, "object", "objects"),
            text::counted(report.keys, "key", "keys"),
            text::bytes(report.payload_bytes),
            text::bytes(report.index_bytes),
            report.used_segments,
            report.used_segments + report.free_segments,
            if report.is_clean() { "" } else { ", damaged" }
        )?;
    }
    out.flush()?;
    Ok(())
}

// Objects.

/// Where bytes come from, and how many there are if that is known.
pub fn source(file: Option<&Path>) -> anyhow::Result<(Box<dyn Read>, u64)> {
    match file {
        None => Ok((Box::new(std::io::stdin().lock()), 0)),
        Some(dash) if dash == Path::new("-") => Ok((Box::new(std::io::stdin().lock()), 0)),
        Some(path) => {
            let file = File::open(path).with_context(|| path.display().to_string())?;
            ensure!(!file.metadata()?.is_dir(), "{}: is a directory", path.display());
            let len = file.metadata()?.len();
            Ok((Box::new(file), len))
        }
    }
}

/// Reads up to `most` bytes; fewer only at the end.
fn take(from: &mut dyn Read, most: usize, progress: &mut Progress) -> anyhow::Result<Vec<u8>> {
    let mut bytes = vec![];
    while bytes.len() < most {
        let piece = PIECE_BYTES.min(most - bytes.len()) as u64;
        let got = from.take(piece).read_to_end(&mut bytes)?;
        progress.add(got as u64);
        if got == 0 {
            break;
        }
    }
    Ok(bytes)
}

fn put(arguments: &StorePut) -> anyhow::Result<()> {
    let device = &arguments.device;
    let (mut from, len) = source(arguments.file.as_deref())?;
    let store = writable(device)?;
    let say = |error| tell(device, error);
    let mut progress = Progress::new(arguments.progress, len);
    let mut bytes = take(&mut *from, GROUP_BYTES, &mut progress)?;
    let mut group = Group::new();
    let id = match arguments.object {
        ObjectName::New => {
            let hint = match arguments.hint {
                None => Hint::Unknown,
                Some(Heat::Hot) => Hint::Hot,
                Some(Heat::Cold) => Hint::Cold,
            };
            group.create(store.new_object(), hint)
        }
        ObjectName::Number(number) => {
            let id = ObjectId(number);
            store.len(id).map_err(|error| match error {
                Error::NoObject(id) => {
                    anyhow!("{}: there is no object {id}; put new makes one", device.display())
                }
                error => say(error),
            })?;
            group.truncate(id, 0);
            id
        }
    };
    let mut at = 0;
    loop {
        group.write(id, at, &bytes);
        at += bytes.len() as u64;
        if let Err(refused) = store.submit(std::mem::take(&mut group), &[]) {
            if arguments.object == ObjectName::New && at > bytes.len() as u64 {
                // Half an object is of no use to anybody.
                let mut group = Group::new();
                group.delete(id);
                store.submit(group, &[]).map_err(|refused| say(refused.error))?;
                close(&store, device)?;
            }
            return Err(say(refused.error));
        }
        if at < GROUP_BYTES as u64 {
            break;
        }
        bytes = take(&mut *from, LOT_BYTES, &mut progress)?;
        if bytes.is_empty() {
            break;
        }
    }
    close(&store, device)?;
    if arguments.object == ObjectName::New {
        println!("{id}");
    }
    Ok(())
}

fn append(arguments: &StoreAppend) -> anyhow::Result<()> {
    let device = &arguments.device;
    let (mut from, len) = source(arguments.file.as_deref())?;
    let store = writable(device)?;
    let id = ObjectId(arguments.object);
    store.len(id).map_err(|error| tell(device, error))?;
    let mut progress = Progress::new(arguments.progress, len);
    let mut most = GROUP_BYTES;
    loop {
        let bytes = take(&mut *from, most, &mut progress)?;
        if bytes.is_empty() {
            break;
        }
        let mut group = Group::new();
        group.append(id, &bytes);
        store.submit(group, &[]).map_err(|refused| tell(device, refused.error))?;
        most = LOT_BYTES;
    }
    close(&store, device)
}

fn get(arguments: &StoreGet) -> anyhow::Result<()> {
    let device = &arguments.device;
    let store = readable(device)?;
    let id = ObjectId(arguments.object);
    let len = store.len(id).map_err(|error| tell(device, error))?;
    let (mut out, name): (Box<dyn Write>, _) = match arguments.file.as_deref() {
        Some(path) if path != Path::new("-") => {
            let file = File::create(path).with_context(|| path.display().to_string())?;
            (Box::new(file), path.display().to_string())
        }
        _ => (Box::new(std::io::stdout().lock()), "standard output".to_owned()),
    };
    let mut progress = Progress::new(arguments.progress, len);
    let mut piece = vec![0; PIECE_BYTES];
    let mut at = 0;
    while at < len {
        let got = store.read(id, at, &mut piece).map_err(|error| tell(device, error))?;
        out.write_all(&piece[..got]).with_context(|| name.clone())?;
        at += got as u64;
        progress.add(got as u64);
    }
    out.flush().with_context(|| name)
}

fn rm(arguments: &StoreRm) -> anyhow::Result<()> {
    let device = &arguments.device;
    let store = writable(device)?;
    let mut objects = arguments.objects.clone();
    objects.sort_unstable();
    objects.dedup();
    let mut group = Group::new();
    for id in objects.into_iter().map(ObjectId) {
        match store.len(id) {
            Ok(_) => group.delete(id),
            Err(Error::NoObject(_)) if arguments.force => {}
            Err(error) => return Err(tell(device, error)),
        }
    }
    store.submit(group, &[]).map_err(|refused| tell(device, refused.error))?;
    close(&store, device)
}
