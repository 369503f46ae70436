//! `draconis undelete`: lists deleted files, and copies them to the host.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsString;
use std::io::Write;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use draconis_access::populate::PathPattern;
use draconis_access::walk::FileChunk;
use draconis_ext::undelete::{
    DeletedFile, DeletedFiles, DeletedTree, FileState, Limits, PlacedFile,
};
use draconis_service::sandbox::open_beneath;
use draconis_service::volume::refuse_other_contents;
use draconis_types::path_bytes::{ShowPath, hex_if_not_utf8};
use draconis_types::{Attributes, FileType, Node, Time};
use rustix::io::Errno;
use serde::Serialize;

use crate::extract::{
    ExtractionDest, ExtractionItem, ExtractionSource, TreeExtraction, XattrPairs, split_destination,
};
use crate::image::{self, VolumeArgs};
use crate::progress::{ByteProgress, ProgressMode};
use crate::report;
use crate::text::{
    EscapingOutput, TimeFormatter, escape_control_chars, file_type_name, parse_time, pluralize,
};

const UNDELETE_HELP: &str = "\
A path begins with # and an inode number where the names above it are not known.
State:
  whole                the contents as they were when last recorded
  overwritten in part  the rest is certain; overwritten bytes are copied as zeros
  overwritten          nothing is left; not copied
  contents unsure      nothing proves that the blocks still hold this file
IMAGE@deleted is a tree of the deleted files for ls, get, tar, mount and other readers.
With --json, ranges are [first byte, byte after the last], times [seconds, nanoseconds].";

/// List deleted files of a volume, or copy them to the host.
#[derive(Debug, Args)]
#[command(after_long_help = UNDELETE_HELP)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: VolumeArgs,
    /// Only files deleted at TIME or later, and those without a known time
    /// (2026-11-20 23:36, @SECONDS).
    #[arg(long, value_name = "TIME", value_parser = parse_time, allow_hyphen_values = true)]
    since: Option<Time>,
    /// Only files in DIR of the volume and below it.
    #[arg(long, value_name = "DIR")]
    path: Option<OsString>,
    /// Print JSON.
    #[arg(long, conflicts_with = "pattern")]
    json: bool,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Image: file, block device or STORE#NAME.
    image: PathBuf,
    /// Files to copy: a pattern with / matches the whole path, others any file name; ** matches any
    /// number of directories; inode:N or `<N>` is an inode. A directory is copied with all it held.
    #[arg(requires = "dest")]
    pattern: Option<OsString>,
    /// Directory, which is made if it does not exist, or the name of a single file. Existing files
    /// are kept.
    dest: Option<PathBuf>,
}

#[derive(Serialize)]
struct ListJson {
    files: Vec<FileJson>,
    more_files: bool,
    journal_damage: Option<String>,
}

#[derive(Serialize)]
struct FileJson {
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_hex: Option<String>,
    path_known: bool,
    inode: u32,
    kind: &'static str,
    mode: String,
    uid: u32,
    gid: u32,
    size: u64,
    modified: (i64, u32),
    deleted: Option<(i64, u32)>,
    state: &'static str,
    reason: Option<&'static str>,
    overwritten: Vec<(u64, u64)>,
    unsure: Vec<(u64, u64)>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match (&arguments.pattern, &arguments.dest) {
        (Some(pattern), Some(dest)) => copy(arguments, pattern.as_bytes(), dest),
        _ => list(arguments),
    }
}

fn scan(
    arguments: &Arguments,
    beneath: Option<std::os::fd::BorrowedFd<'_>>,
) -> anyhow::Result<DeletedFiles> {
    let disk = image::open_disk_confined(&arguments.image, &arguments.place, beneath)?;
    let found = refuse_other_contents(&*disk)
        .and_then(|()| DeletedFiles::scan(disk.clone(), Limits::default()).map_err(Into::into));
    let found = found.map_err(|error| image::open_volume_error(&arguments.image, &*disk, error))?;
    if let Some(damage) = &found.journal_damage {
        report::warn_line(format_args!(
            "draconis: {}: {damage}: older states in the journal are not certain",
            arguments.image.shown()
        ));
    }
    Ok(found)
}

/// Returns the names of a file that the options select.
fn selected_names<'a>(arguments: &Arguments, file: &'a DeletedFile) -> Vec<&'a [u8]> {
    let is_recent =
        arguments.since.is_none_or(|since| file.deleted.is_none_or(|deleted| deleted >= since));
    let is_inside = |path: &&[u8]| {
        arguments.path.as_ref().is_none_or(|dir| {
            let dir = dir.as_bytes();
            let dir = dir.strip_suffix(b"/").unwrap_or(dir);
            path.strip_prefix(dir).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
        })
    };
    if is_recent { file.names().filter(is_inside).collect() } else { vec![] }
}

fn list(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let clock = TimeFormatter::new();
    let found = scan(arguments, None)?;
    let mut out = EscapingOutput::new();
    let files = found.files().iter().filter(|it| !selected_names(arguments, it).is_empty());
    if arguments.json {
        let list = ListJson {
            files: files.map(file_json).collect(),
            more_files: found.is_cut_short,
            journal_damage: found.journal_damage.as_ref().map(ToString::to_string),
        };
        writeln!(out, "{}", serde_json::to_string_pretty(&list)?)?;
        out.flush()?;
        return Ok(ExitCode::SUCCESS);
    }
    for file in files {
        let deleted = file.deleted.map_or("-".to_owned(), |time| clock.format_to_minute(time));
        let (state, size) = (file.state.text(), file.attributes.size_bytes);
        write!(out, "{state:<19} {deleted:<16} {:>8} {size:>12} ", file.inode.0)?;
        out.write_name(&file.path)?;
        writeln!(out, "{}", if file.attributes.kind == FileType::Directory { "/" } else { "" })?;
    }
    out.flush()?;
    if found.is_cut_short {
        report::warn_line("draconis: there are more deleted files than this command lists");
    }
    Ok(ExitCode::SUCCESS)
}

fn file_json(file: &DeletedFile) -> FileJson {
    let time = |time: Time| (time.seconds, time.nanoseconds);
    let ranges = |all: &[Range<u64>]| all.iter().map(|it| (it.start, it.end)).collect();
    let attributes = &file.attributes;
    FileJson {
        path: escape_control_chars(&file.path),
        path_hex: hex_if_not_utf8(&file.path),
        path_known: file.is_path_known,
        inode: file.inode.0,
        kind: file_type_name(attributes.kind),
        mode: format!("{:04o}", attributes.mode & 0o7777),
        uid: attributes.uid,
        gid: attributes.gid,
        size: attributes.size_bytes,
        modified: time(attributes.modified),
        deleted: file.deleted.map(time),
        state: file.state.text(),
        reason: file.reason,
        overwritten: ranges(&file.overwritten),
        unsure: ranges(&file.unsure),
    }
}

/// What the pattern on the command line selects.
enum Selection {
    Inode(u32),
    Paths(PathPattern),
}

impl Selection {
    fn parse(text: &[u8]) -> anyhow::Result<Self> {
        let number = text
            .strip_prefix(b"inode:")
            .or_else(|| text.strip_prefix(b"<").and_then(|rest| rest.strip_suffix(b">")));
        let Some(number) = number else { return Ok(Self::Paths(PathPattern::new(text))) };
        let number = std::str::from_utf8(number).ok().and_then(|number| number.parse().ok());
        number.map(Self::Inode).context("an inode is a number, such as inode:12")
    }

    fn matches(&self, file: &DeletedFile, path: &[u8]) -> bool {
        match self {
            Self::Inode(number) => file.inode.0 == *number,
            Self::Paths(pattern) => {
                pattern.matches(path, file.attributes.kind == FileType::Directory)
            }
        }
    }
}

fn copy(arguments: &Arguments, pattern: &[u8], dest: &Path) -> anyhow::Result<ExitCode> {
    let selection = Selection::parse(pattern)?;
    // A single file is written as DEST, everything else into the directory.
    let (parent, name) = split_destination(dest, b"")?;
    let sources = image::sources_to_protect(&arguments.image, &arguments.place);
    let beneath = open_beneath(&parent).with_context(|| parent.shown().to_string())?;
    let is_single = !name.is_empty() && !dest.as_os_str().as_bytes().ends_with(b"/");
    // A directory for several files is made, but not in the place of something else.
    let is_new_dir = !name.is_empty() && std::fs::symlink_metadata(dest).is_err();
    let mut dest = ExtractionDest::open(parent, name, sources)?;
    dest.replaces = false;
    let found = scan(arguments, Some(beneath.as_fd()))?;
    let plan = RestorePlan::new(&found, arguments, &selection, is_single, is_new_dir)?;
    let chunks = plan.chunks();
    let progress = ByteProgress::new(arguments.progress, plan.bytes());
    let mut extraction = TreeExtraction::new(&plan, dest, chunks, progress);
    extraction.copy_all(&(0..plan.items.len()).collect::<Vec<_>>());
    let failed = extraction.failed;
    drop(extraction);
    let is_whole = plan.report()?;
    Ok(if failed || !is_whole { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// A file to restore, or a directory that is only there for others.
struct RestoreItem<'a> {
    path: Vec<u8>,
    file: Option<&'a DeletedFile>,
    /// Index of the file's first name, for another hard link.
    link_to: Option<usize>,
}

impl<'a> RestoreItem<'a> {
    /// Returns the file if this is its first name.
    fn first_name_of(&self) -> Option<&'a DeletedFile> {
        self.file.filter(|_| self.link_to.is_none())
    }
}

/// Files to restore, each directory before what is in it.
struct RestorePlan<'a> {
    found: &'a DeletedFiles,
    items: Vec<RestoreItem<'a>>,
    /// Files of which nothing is left.
    lost: Vec<&'a DeletedFile>,
    directory: Attributes,
    /// Bytes of each file that are zeros although it has blocks for them.
    zeros: RefCell<HashMap<usize, u64>>,
}

impl<'a> RestorePlan<'a> {
    fn new(
        found: &'a DeletedFiles,
        arguments: &Arguments,
        selection: &Selection,
        is_single: bool,
        is_new_dir: bool,
    ) -> anyhow::Result<Self> {
        let files = found.files().iter().map(|file| (file, selected_names(arguments, file)));
        let files: Vec<_> = files.collect();
        // A selected directory comes back with what was in it.
        let dirs: BTreeSet<&[u8]> = files
            .iter()
            .filter(|(file, _)| file.attributes.kind == FileType::Directory)
            .flat_map(|(file, names)| names.iter().filter(|name| selection.matches(file, name)))
            .copied()
            .collect();
        let mut selected = vec![];
        for (file, mut names) in files {
            names.retain(|name| {
                selection.matches(file, name) || ancestors(name).any(|dir| dirs.contains(dir))
            });
            if !names.is_empty() {
                selected.push((file, names));
            }
        }
        if selected.is_empty() {
            bail!("{}: no deleted file matches", arguments.image.shown());
        }
        let (lost, selected): (Vec<_>, Vec<_>) =
            selected.into_iter().partition(|(file, _)| file.state == FileState::Overwritten);
        let lost = lost.into_iter().map(|(file, _)| file).collect();
        let items = match (&selected[..], is_single) {
            ([(file, _)], true) if file.attributes.kind != FileType::Directory => {
                vec![RestoreItem { path: vec![], file: Some(*file), link_to: None }]
            }
            ([], _) => vec![],
            (_, true) if !is_new_dir => {
                bail!("several files match: DEST must be a directory, or a new name for one")
            }
            _ => {
                let tree = DeletedTree::new(&selected);
                // The first is the top, which only a new directory needs.
                let skipped = usize::from(!is_new_dir);
                let places = tree.places().iter().enumerate().skip(skipped);
                let item = |(nth, it): (usize, &PlacedFile<'a>)| RestoreItem {
                    path: tree.path(nth),
                    file: it.file.filter(|_| nth > 0),
                    link_to: it.link_to.map(|first| first - skipped),
                };
                places.map(item).collect()
            }
        };
        Ok(Self { found, items, lost, directory: implied_directory(), zeros: RefCell::default() })
    }

    fn bytes(&self) -> u64 {
        let files = self.items.iter().filter_map(RestoreItem::first_name_of);
        files.map(|file| file.attributes.size_bytes.min(file.attributes.blocks_512 * 512)).sum()
    }

    /// Returns the contents of all files, in order.
    fn chunks(&self) -> impl Iterator<Item = FileChunk> + '_ {
        let files = self.items.iter().enumerate();
        let files = files.filter_map(|(at, item)| Some((at, item.first_name_of()?)));
        files
            .filter(|(_, file)| file.attributes.kind == FileType::File)
            .flat_map(|(at, file)| self.file_chunks(at, file))
    }

    fn file_chunks(
        &self,
        at: usize,
        file: &'a DeletedFile,
    ) -> impl Iterator<Item = FileChunk> + '_ {
        let mut ranges = file.data_ranges(self.found.block_bytes()).into_iter();
        let mut open = 0..0;
        let mut is_done = false;
        std::iter::from_fn(move || {
            if is_done {
                return None;
            }
            if open.is_empty() {
                match ranges.next() {
                    Some(next) => open = next,
                    None => {
                        is_done = true;
                        return Some(FileChunk::End(Ok(())));
                    }
                }
            }
            let want =
                usize::try_from(open.end - open.start).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            match self.found.read_chunk(file, open.start, want) {
                Ok(data) if !data.is_empty() => {
                    let offset = open.start;
                    open.start += data.len() as u64;
                    self.count_zeros(at, file, offset, &data);
                    Some(FileChunk::Data(offset, data))
                }
                read => {
                    is_done = true;
                    Some(FileChunk::End(read.map(drop)))
                }
            }
        })
    }

    fn count_zeros(&self, at: usize, file: &DeletedFile, offset: u64, data: &[u8]) {
        if !matches!(file.state, FileState::Whole | FileState::PartlyOverwritten) {
            return;
        }
        let len = self.found.block_bytes() as usize;
        for (block, start) in data.chunks(len).zip((offset..).step_by(len)) {
            let is_lost = file.overwritten.iter().any(|it| it.contains(&start));
            if block.iter().all(|byte| *byte == 0) && !is_lost {
                *self.zeros.borrow_mut().entry(at).or_default() += block.len() as u64;
            }
        }
    }

    /// Names what is not certain of the files; returns true if all are whole.
    fn report(&self) -> std::io::Result<bool> {
        let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
        let copied = self.items.iter().enumerate();
        let copied = copied.filter_map(|(at, item)| Some((at, item.first_name_of()?)));
        let zeros = self.zeros.borrow();
        for (at, file) in copied.chain(self.lost.iter().map(|file| (usize::MAX, *file))) {
            if file.attributes.kind == FileType::Directory {
                continue;
            }
            let shown = escape_control_chars(&file.path);
            let state = match zeros.get(&at) {
                Some(bytes) => {
                    report::warn_line(format_args!(
                        "draconis: {shown}: contents unsure: {bytes} bytes are zeros, which the \
                         device may have discarded"
                    ));
                    FileState::Unsure
                }
                None => file.state,
            };
            *counts.entry(state.text()).or_default() += 1;
            match file.state {
                FileState::Whole => {}
                FileState::PartlyOverwritten => report::warn_line(format_args!(
                    "draconis: {shown}: overwritten in part, copied as zeros: {}",
                    format_ranges(&file.overwritten)
                )),
                FileState::Overwritten => {
                    report::warn_line(format_args!("draconis: {shown}: overwritten, not copied"))
                }
                FileState::Unsure => {
                    let lost = match file.overwritten.is_empty() {
                        true => String::new(),
                        false => format!("; overwritten: {}", format_ranges(&file.overwritten)),
                    };
                    let reason = file.reason.unwrap_or("unknown");
                    report::warn_line(format_args!(
                        "draconis: {shown}: contents unsure: {reason}{lost}"
                    ));
                }
            }
        }
        let text: Vec<String> = counts.iter().map(|(state, n)| format!("{n} {state}")).collect();
        let total = counts.values().sum();
        report::print_line(format_args!(
            "{}: {}",
            pluralize(total, "file", "files"),
            if text.is_empty() { "only directories".to_owned() } else { text.join(", ") }
        ))?;
        Ok(counts.keys().all(|state| *state == FileState::Whole.text()))
    }
}

/// Returns the attributes of a directory that is only there for what is in it.
pub fn implied_directory() -> Attributes {
    let zero = Time { seconds: 0, nanoseconds: 0 };
    Attributes {
        node: Node::ROOT,
        generation: 0,
        kind: FileType::Directory,
        mode: 0o40755,
        links: 2,
        uid: 0,
        gid: 0,
        device: (0, 0),
        size_bytes: 0,
        blocks_512: 0,
        block_size_bytes: 0,
        flags: 0,
        no_xattrs: true,
        accessed: zero,
        modified: zero,
        changed: zero,
        created: None,
    }
}

/// Size of one read, in bytes.
const CHUNK_BYTES: usize = 128 << 10;
/// Ranges that a message has, at most.
const MAX_SHOWN_RANGES: usize = 8;

fn format_ranges(all: &[Range<u64>]) -> String {
    let shown = all.iter().take(MAX_SHOWN_RANGES).map(|it| format!("{}-{}", it.start, it.end - 1));
    let shown = shown.collect::<Vec<_>>().join(", ");
    match all.len().saturating_sub(MAX_SHOWN_RANGES) {
        0 => format!("bytes {shown}"),
        more => format!("bytes {shown} and {more} more ranges"),
    }
}

/// Returns the directories above a path, the nearest first.
fn ancestors(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    let cuts = path.iter().enumerate().rev().filter(|(_, byte)| **byte == b'/');
    cuts.map(|(cut, _)| &path[..cut]).filter(|dir| !dir.is_empty())
}

impl ExtractionSource for RestorePlan<'_> {
    fn count(&self) -> usize {
        self.items.len()
    }

    fn item(&self, at: usize) -> ExtractionItem<'_> {
        let RestoreItem { path, file, link_to } = &self.items[at];
        let attributes = file.map_or(&self.directory, |file| &file.attributes);
        ExtractionItem { at, path, attributes, link_to: *link_to, is_implied: file.is_none() }
    }

    fn read_link(&self, at: usize) -> Result<Vec<u8>, Errno> {
        let file = self.items[at].file.ok_or(Errno::INVAL)?;
        file.link_target(self.found).map_err(|_| Errno::UCLEAN)
    }

    fn xattrs(&self, at: usize) -> Result<XattrPairs, Errno> {
        let Some(file) = self.items[at].file else { return Ok(vec![]) };
        self.found.xattrs(file).map_err(|_| Errno::UCLEAN)
    }
}
