//! Short sequences of calls, every one within bounds, beside a model of each state.
//!
//! The bounds are those of CrashMonkey's generator (OSDI 2018): a few files in two directories, each
//! kind of change, and a sync of the file, of its directory or of everything after it.
//!
//! ```text
//!   S0 ─ call 1 ─ S1 ─ fsync ✓ ─ call 2 ─ S2 ─ fsync ✓        states of the model, and marks
//!   a cut after the first ✓: each name and byte is as in S1 or S2
//! ```
//! A journal and a disk with atomic groups promise more: all names together are those of one
//! state.
//!
//! Two changes have a state in between, which a cut may leave: see [`Run::change`].
//!
//! Law 1: bytes that a file never held are an error, acknowledged or not.
//! Law 2: an inode that is in each state after the mark has one of its names.

use std::collections::{BTreeMap, BTreeSet};

use draconis_device::Random;
use draconis_ext::{Error, InodeNumber, RenameMode, Reserve, Volume, XattrSet};
use draconis_types::lock::Mutex;
use draconis_types::{AttributeChange, FileType};

use super::super::ConsistencyProtocol;
use super::{RecordingDisk, Workload, create, encode_cells, find, read_file, walk_volume, write};

const XATTR_NAME: &[u8] = b"user.note";
/// Length of the files that are there at the start: two blocks of 4 KiB and a part.
const BASE_FILE_BYTES: u64 = 9_008;
/// Length of what a call writes.
const WRITE_BYTES: u64 = 3_200;

/// Files that can exist. `/foo`, `/A/foo` and `/A/bar` are there at the start.
const FILES: [&str; 5] = ["/foo", "/bar", "/A/foo", "/A/bar", "/B/foo"];
const BASE_FILES: [&str; 3] = [FILES[0], FILES[2], FILES[3]];
/// Files whose contents are changed.
const DATA_FILES: [&str; 2] = [FILES[0], FILES[2]];
/// Directories; all but the last are there at the start.
const DIRECTORIES: [&str; 3] = ["/A", "/B", "/C"];

/// Position of a write or an allocation in a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::crash) enum WritePosition {
    Start,
    Middle,
    /// Over the end.
    Across,
    /// From the end on.
    Append,
    /// After a hole.
    Beyond,
}

const PLACES: [WritePosition; 5] = [
    WritePosition::Start,
    WritePosition::Middle,
    WritePosition::Across,
    WritePosition::Append,
    WritePosition::Beyond,
];

/// One change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::crash) enum Change {
    Create(&'static str),
    MakeDirectory(&'static str),
    Symlink(&'static str),
    Write(&'static str, WritePosition),
    Allocate(&'static str, WritePosition),
    AllocateKeepingSize(&'static str),
    Punch(&'static str),
    Zero(&'static str),
    Truncate(&'static str, u64),
    Link(&'static str, &'static str),
    Rename(&'static str, &'static str),
    Unlink(&'static str),
    RemoveDirectory(&'static str),
    SetAttribute(&'static str),
    RemoveAttribute(&'static str),
}

/// What is made durable after a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::crash) enum Persist {
    Nothing,
    Everything,
    /// `fsync` of what was changed.
    Subject,
    /// `fdatasync` of it.
    SubjectData,
    /// `fsync` of its directory.
    Directory,
}

const PERSISTS: [Persist; 5] = [
    Persist::Everything,
    Persist::Subject,
    Persist::SubjectData,
    Persist::Directory,
    Persist::Nothing,
];

/// A change and what follows it.
pub(in crate::crash) type Step = (Change, Persist);

/// Returns every change within the bounds.
pub(in crate::crash) fn all_changes() -> Vec<Change> {
    let mut all = vec![];
    all.extend([FILES[1], FILES[4]].map(Change::Create));
    all.extend([Change::MakeDirectory("/C"), Change::Symlink("/bar"), Change::Symlink("/B/foo")]);
    for file in DATA_FILES {
        all.extend(PLACES.map(|place| Change::Write(file, place)));
        all.extend(
            [WritePosition::Middle, WritePosition::Append]
                .map(|place| Change::Allocate(file, place)),
        );
        all.extend([
            Change::AllocateKeepingSize(file),
            Change::Punch(file),
            Change::Zero(file),
            Change::Truncate(file, 0),
            Change::Truncate(file, BASE_FILE_BYTES / 2),
            Change::Truncate(file, BASE_FILE_BYTES * 2),
        ]);
        all.extend([Change::SetAttribute(file), Change::RemoveAttribute(file)]);
    }
    for from in BASE_FILES {
        for to in FILES {
            if from != to {
                all.extend([Change::Link(from, to), Change::Rename(from, to)]);
            }
        }
        all.push(Change::Unlink(from));
    }
    all.extend([
        Change::Rename("/A", "/C"),
        Change::Rename("/A", "/B"),
        Change::Rename("/B", "/C"),
        Change::RemoveDirectory("/B"),
        Change::SetAttribute("/A"),
    ]);
    all
}

/// Number of sequences with `len` changes. Every change is followed by every [`Persist`], the last
/// one by every one that makes something durable.
pub(in crate::crash) fn count_sequences(len: u32) -> u64 {
    let steps = all_changes().len() * PERSISTS.len();
    let last = all_changes().len() * (PERSISTS.len() - 1);
    (1..len).fold(last as u64, |all, _| all * steps as u64)
}

/// Returns sequence `number` of those with `len` changes.
pub(in crate::crash) fn nth_sequence(number: u64, len: u32) -> Option<Vec<Step>> {
    let changes = all_changes();
    let mut rest = number;
    let mut digit = |base: usize| {
        let digit = rest % base as u64;
        rest /= base as u64;
        digit as usize
    };
    let steps = (1..=len)
        .map(|nth| {
            let persists = PERSISTS.len() - usize::from(nth == len);
            (changes[digit(changes.len())], PERSISTS[digit(persists)])
        })
        .collect();
    (rest == 0).then_some(steps)
}

/// A file or directory of a state.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Node {
    kind: FileType,
    bytes: Vec<u8>,
    note: Vec<u8>,
}

/// A state of the model: names, and what they name.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct State {
    names: BTreeMap<String, InodeNumber>,
    nodes: BTreeMap<InodeNumber, Node>,
}

/// A directory and a name in it. Changes of several directories that are not durable yet may be
/// there in any combination, so paths would be too strict.
type Name = (InodeNumber, String);

#[derive(Default)]
struct Run {
    protocol: Option<ConsistencyProtocol>,
    states: Vec<State>,
    /// What each mark acknowledges: the number of the state, and an inode if it is its data alone.
    marks: Vec<(usize, Option<InodeNumber>)>,
    /// Names that a rename replaced from another directory.
    replaced: BTreeSet<Name>,
}

pub(in crate::crash) struct SequenceWorkload {
    steps: Vec<Step>,
    /// True if the files of the start are durable before the first change.
    is_base_durable: bool,
    protocol: ConsistencyProtocol,
    run: Mutex<Run>,
}

impl SequenceWorkload {
    pub(in crate::crash) fn new(
        steps: Vec<Step>,
        is_base_durable: bool,
        protocol: ConsistencyProtocol,
    ) -> Self {
        let run = Run { protocol: Some(protocol), ..Run::default() };
        Self { steps, is_base_durable, protocol, run: Mutex::new(run) }
    }

    /// Returns true if a change was refused: the sequence has no meaning.
    pub(in crate::crash) fn is_refused(error: &anyhow::Error) -> bool {
        matches!(
            error.downcast_ref(),
            Some(
                Error::NotFound
                    | Error::Exists
                    | Error::NotEmpty
                    | Error::NoAttribute
                    | Error::Unsupported { .. }
                    | Error::IsADirectory
                    | Error::NotADirectory
                    | Error::Misuse(_)
            )
        )
    }
}

impl std::fmt::Debug for SequenceWorkload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let base = if self.is_base_durable { "durable" } else { "not durable" };
        write!(f, "files {base}, then {:?}", self.steps)
    }
}

impl Workload for SequenceWorkload {
    fn name(&self) -> &'static str {
        "sequence"
    }

    fn run(&self, volume: &Volume, record: &RecordingDisk, _: &mut Random) -> anyhow::Result<()> {
        let mut run = self.run.lock();
        run.states.push(State::default());
        for dir in &DIRECTORIES[..2] {
            run.change(volume, Change::MakeDirectory(dir), 0)?;
        }
        for (nth, file) in (1..).zip(BASE_FILES) {
            run.change(volume, Change::Create(file), nth)?;
            run.change(volume, Change::Write(file, WritePosition::Append), nth)?;
        }
        for file in DATA_FILES {
            run.change(volume, Change::SetAttribute(file), 9)?;
        }
        if self.is_base_durable {
            volume.sync()?;
            run.acknowledge(record, None);
        }
        for (version, (change, persist)) in (10..).zip(&self.steps) {
            let data = run.change(volume, *change, version)?;
            let subject = run.subject(volume, *change)?;
            match persist {
                Persist::Nothing => continue,
                Persist::Everything => volume.sync()?,
                Persist::Subject => volume.sync_inode(subject, false)?,
                Persist::Directory => {
                    volume.sync_inode(find_directory(volume, change.path())?, false)?;
                }
                Persist::SubjectData => {
                    volume.sync_inode(subject, true)?;
                    if data {
                        run.acknowledge(record, Some(subject));
                    }
                    continue;
                }
            }
            run.acknowledge(record, None);
        }
        Ok(())
    }

    fn verify(&self, volume: &Volume, marks: &[u64]) -> Result<(), String> {
        let run = self.run.lock();
        let known = marks.iter().filter_map(|mark| run.marks.get(*mark as usize));
        let (mut whole, mut data) = (0, vec![]);
        for (state, of) in known {
            match of {
                None => whole = whole.max(*state),
                Some(inode) => data.push((*state, *inode)),
            }
        }
        let found = FoundTree::read(volume)?;
        found.check_names(&run, whole)?;
        if self.protocol != ConsistencyProtocol::Ordered {
            found.check_is_one_state(&run, whole)?;
        }
        for (path, (inode, node)) in &found.nodes {
            let since =
                data.iter().filter(|it| it.1 == *inode).map(|it| it.0).fold(whole, usize::max);
            check_contents(&run, path, *inode, node, whole, since)?;
        }
        Ok(())
    }
}

impl Change {
    /// The path that is there after the change, or was before it.
    fn path(self) -> &'static str {
        match self {
            Self::Create(path)
            | Self::MakeDirectory(path)
            | Self::Symlink(path)
            | Self::Write(path, _)
            | Self::Allocate(path, _)
            | Self::AllocateKeepingSize(path)
            | Self::Punch(path)
            | Self::Zero(path)
            | Self::Truncate(path, _)
            | Self::Link(_, path)
            | Self::Rename(_, path)
            | Self::Unlink(path)
            | Self::RemoveDirectory(path)
            | Self::SetAttribute(path)
            | Self::RemoveAttribute(path) => path,
        }
    }
}

fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

fn find_directory(volume: &Volume, path: &str) -> anyhow::Result<InodeNumber> {
    let (dir, _) = split(path);
    if dir.is_empty() {
        Ok(InodeNumber::ROOT)
    } else {
        find(volume, dir).ok_or_else(|| Error::NotFound.into())
    }
}

impl Run {
    /// Acknowledges the newest state.
    fn acknowledge(&mut self, record: &RecordingDisk, data_of: Option<InodeNumber>) {
        record.record_mark(self.marks.len() as u64);
        self.marks.push((self.states.len() - 1, data_of));
    }

    /// Returns the inode to sync after a change: that of the path, or of its directory.
    fn subject(&self, volume: &Volume, change: Change) -> anyhow::Result<InodeNumber> {
        match find(volume, change.path()) {
            Some(inode) => Ok(inode),
            None => find_directory(volume, change.path()),
        }
    }

    /// Carries a change out, on the volume and in the model; returns true if it changed contents
    /// that a following `fdatasync` makes durable.
    fn change(&mut self, volume: &Volume, change: Change, version: u32) -> anyhow::Result<bool> {
        let mut state = self.states.last().cloned().unwrap_or_default();
        let path = change.path();
        let (_, name) = split(path);
        let dir = find_directory(volume, path)?;
        let there = |path: &str| find(volume, path).ok_or(Error::NotFound);
        let (mut is_data, mut between) = (false, None);
        match change {
            Change::Create(_) | Change::MakeDirectory(_) | Change::Symlink(_) => {
                let kind = match change {
                    Change::Create(_) => FileType::File,
                    Change::Symlink(_) => FileType::Symlink,
                    _ => FileType::Directory,
                };
                let inode = create(volume, dir, name, kind)?;
                state.names.insert(path.into(), inode);
                state.nodes.insert(inode, Node { kind, bytes: vec![], note: vec![] });
            }
            Change::Write(_, place) => {
                let inode = there(path)?;
                let node = state.nodes.get_mut(&inode).ok_or(Error::NotFound)?;
                let len = node.bytes.len() as u64;
                // The first write makes the file.
                let bytes = if len == 0 { BASE_FILE_BYTES } else { WRITE_BYTES };
                let at = place.offset(len);
                let bytes = encode_cells(inode.0, version, at, bytes);
                write(volume, inode, at, &bytes)?;
                let end = at as usize + bytes.len();
                node.bytes.resize(node.bytes.len().max(end), 0);
                node.bytes[at as usize..end].copy_from_slice(&bytes);
                is_data = true;
            }
            Change::Allocate(_, _)
            | Change::AllocateKeepingSize(_)
            | Change::Punch(_)
            | Change::Zero(_) => {
                let inode = there(path)?;
                let node = state.nodes.get_mut(&inode).ok_or(Error::NotFound)?;
                let len = node.bytes.len() as u64;
                let (at, how) = match change {
                    Change::Allocate(_, place) => (place.offset(len), Reserve::Allocate),
                    Change::AllocateKeepingSize(_) => (len, Reserve::KeepSize),
                    Change::Punch(_) => (WritePosition::Middle.offset(len), Reserve::PunchHole),
                    _ => {
                        (WritePosition::Middle.offset(len), Reserve::ZeroRange { keep_size: false })
                    }
                };
                volume.fallocate(inode, at, WRITE_BYTES, how)?;
                let end = (at + WRITE_BYTES) as usize;
                if !matches!(how, Reserve::KeepSize | Reserve::PunchHole) {
                    node.bytes.resize(node.bytes.len().max(end), 0);
                }
                if matches!(how, Reserve::PunchHole | Reserve::ZeroRange { .. }) {
                    let end = end.min(node.bytes.len());
                    node.bytes[(at as usize).min(end)..end].fill(0);
                }
                is_data = true;
            }
            Change::Truncate(_, len) => {
                let inode = there(path)?;
                let size = AttributeChange { size_bytes: Some(len), ..AttributeChange::default() };
                volume.set_attributes(inode, &size)?;
                between = self.zeroed_tail(&state, inode, len, volume.superblock().block_bytes);
                state.nodes.get_mut(&inode).ok_or(Error::NotFound)?.bytes.resize(len as usize, 0);
                is_data = true;
            }
            Change::Link(from, _) => {
                let inode = there(from)?;
                volume.link(inode, dir, name.as_bytes())?;
                state.names.insert(path.into(), inode);
            }
            Change::Rename(from, _) => {
                let inode = there(from)?;
                let (old_dir, old_name) = (find_directory(volume, from)?, split(from).1);
                let replaced = find(volume, path);
                if replaced == Some(inode) {
                    return Err(Error::Exists.into());
                }
                volume.rename(
                    old_dir,
                    old_name.as_bytes(),
                    dir,
                    name.as_bytes(),
                    RenameMode::Replace,
                )?;
                let is_within = split(from).0 == split(path).0;
                if replaced.is_some() && !is_within {
                    self.replaced.insert((dir, name.into()));
                }
                state.names.remove(path);
                state.move_names(from, path);
                // In one directory without a journal the two names are exchanged first.
                if is_within && self.protocol == Some(ConsistencyProtocol::Ordered) {
                    between = replaced.map(|inode| {
                        let mut between = state.clone();
                        between.names.insert(from.into(), inode);
                        between
                    });
                }
            }
            Change::Unlink(_) => {
                volume.unlink(dir, name.as_bytes())?;
                state.names.remove(path);
            }
            Change::RemoveDirectory(_) => {
                volume.remove_directory(dir, name.as_bytes())?;
                state.names.remove(path);
            }
            Change::SetAttribute(_) => {
                let inode = there(path)?;
                let note = vec![b'a' + (version % 26) as u8; 40 + version as usize];
                volume.set_xattr(inode, XATTR_NAME, &note, XattrSet::Any, false)?;
                state.nodes.get_mut(&inode).ok_or(Error::NotFound)?.note = note;
            }
            Change::RemoveAttribute(_) => {
                let inode = there(path)?;
                volume.remove_xattr(inode, XATTR_NAME)?;
                state.nodes.get_mut(&inode).ok_or(Error::NotFound)?.note.clear();
            }
        }
        for mut state in between.into_iter().chain([state]) {
            let named: BTreeSet<InodeNumber> = state.names.values().copied().collect();
            state.nodes.retain(|inode, _| named.contains(inode));
            self.states.push(state);
        }
        Ok(is_data)
    }

    /// Returns the state in which the rest of a shortened file's last block is zero, and its length
    /// is the old one: that block is written ahead, as by the kernel's driver. A disk with atomic
    /// groups has no such state.
    fn zeroed_tail(
        &self,
        state: &State,
        inode: InodeNumber,
        len: u64,
        block_bytes: u32,
    ) -> Option<State> {
        let mut state = state.clone();
        let bytes = &mut state.nodes.get_mut(&inode)?.bytes;
        let end = (len.next_multiple_of(u64::from(block_bytes)) as usize).min(bytes.len());
        bytes.get_mut(len as usize..end)?.fill(0);
        self.protocol.filter(|protocol| !protocol.is_atomic()).map(|_| state)
    }
}

/// Returns the names of a tree by directory.
fn names_by_directory<'a>(
    paths: impl Iterator<Item = (&'a String, InodeNumber)> + Clone,
) -> BTreeMap<Name, InodeNumber> {
    let inodes: BTreeMap<&str, InodeNumber> =
        paths.clone().map(|(path, inode)| (path.as_str(), inode)).collect();
    let in_directory = |(path, inode): (&'a String, InodeNumber)| {
        let (dir, name) = split(path);
        let dir = if dir.is_empty() { Some(InodeNumber::ROOT) } else { inodes.get(dir).copied() };
        dir.map(|dir| ((dir, name.to_owned()), inode))
    };
    paths.filter_map(in_directory).collect()
}

impl State {
    /// Renames a file, or a directory with all below.
    fn move_names(&mut self, from: &str, to: &str) {
        let below = format!("{from}/");
        let names = std::mem::take(&mut self.names).into_iter();
        let moved = names.map(|(name, inode)| match name.strip_prefix(from) {
            Some(rest) if name == from || name.starts_with(&below) => {
                (format!("{to}{rest}"), inode)
            }
            _ => (name, inode),
        });
        self.names = moved.collect();
    }
}

impl WritePosition {
    /// Returns the offset in a file of `len` bytes: that of a cell.
    fn offset(self, len: u64) -> u64 {
        match self {
            Self::Start => 0,
            Self::Middle => len / 32 * 16,
            Self::Across => len.saturating_sub(WRITE_BYTES / 32 * 16),
            Self::Append => len,
            Self::Beyond => len + 20_000,
        }
    }
}

/// The tree of a volume after a cut.
struct FoundTree {
    nodes: BTreeMap<String, (InodeNumber, Node)>,
}

impl FoundTree {
    fn read(volume: &Volume) -> Result<Self, String> {
        let mut nodes = BTreeMap::new();
        for (path, inode, kind) in walk_volume(volume)? {
            if path == "/lost+found" || path == format!("/{}", super::super::judge::PROBE_FILE_NAME)
            {
                continue;
            }
            let note = match volume.xattr(inode, XATTR_NAME) {
                Ok(note) => note,
                Err(Error::NoAttribute) => vec![],
                Err(error) => return Err(format!("{path}: {error}")),
            };
            let bytes = if kind == FileType::File { read_file(volume, inode)? } else { vec![] };
            nodes.insert(path.replace("\\x20", " "), (inode, Node { kind, bytes, note }));
        }
        Ok(Self { nodes })
    }

    /// Each name is as in one of the states since `since`, and no inode of all of them is lost.
    fn check_names(&self, run: &Run, since: usize) -> Result<(), String> {
        let states = run.states.get(since..).unwrap_or_default();
        let names: Vec<_> = states
            .iter()
            .map(|state| names_by_directory(state.names.iter().map(|(path, inode)| (path, *inode))))
            .collect();
        let here = names_by_directory(self.nodes.iter().map(|(path, (inode, _))| (path, *inode)));
        let all: BTreeSet<&Name> =
            names.iter().flat_map(BTreeMap::keys).chain(here.keys()).collect();
        for name in all {
            let found = here.get(name).copied();
            let is_gap = found.is_none() && run.replaced.contains(name);
            if !is_gap && !names.iter().any(|state| state.get(name).copied() == found) {
                return Err(format!(
                    "{} in directory {} is {found:?}, as in none of the states since {since}",
                    name.1, name.0
                ));
            }
        }
        let Some((first, rest)) = states.split_first() else { return Ok(()) };
        for inode in first.nodes.keys() {
            let is_in_all = rest.iter().all(|state| state.nodes.contains_key(inode));
            if is_in_all && !self.nodes.values().any(|it| it.0 == *inode) {
                return Err(format!(
                    "inode {inode} has lost its name; it was in all states since {since}"
                ));
            }
        }
        Ok(())
    }

    /// All names, kinds and attributes are those of one of the states since `since`.
    fn check_is_one_state(&self, run: &Run, since: usize) -> Result<(), String> {
        let is_this = |state: &State| {
            state.names.len() == self.nodes.len()
                && state.names.iter().all(|(path, inode)| {
                    let (Some((found, node)), Some(meant)) =
                        (self.nodes.get(path), state.nodes.get(inode))
                    else {
                        return false;
                    };
                    found == inode && node.kind == meant.kind && node.note == meant.note
                })
        };
        if run.states.iter().skip(since).any(is_this) {
            return Ok(());
        }
        let names: Vec<_> =
            self.nodes.iter().map(|(path, (inode, _))| format!("{path} {inode}")).collect();
        Err(format!("the tree is of none of the states since {since}: {}", names.join(", ")))
    }
}

/// The length and each byte of a file, and its attribute, are those of a state since the mark.
fn check_contents(
    run: &Run,
    path: &str,
    inode: InodeNumber,
    found: &Node,
    whole: usize,
    since: usize,
) -> Result<(), String> {
    // A number that was used again names another file: no state before it counts.
    let of = |from: usize| {
        run.states
            .iter()
            .skip(from)
            .filter_map(move |state| state.nodes.get(&inode))
            .collect::<Vec<_>>()
    };
    let (named, states) = (of(whole), of(since));
    if !named.iter().any(|node| node.note == found.note && node.kind == found.kind) {
        return Err(format!(
            "{path}: its kind or attribute is of none of the states since {whole}"
        ));
    }
    let lens = states.iter().map(|node| node.bytes.len());
    let (least, most) = (lens.clone().min().unwrap_or(0), lens.max().unwrap_or(0));
    if found.bytes.len() < least || found.bytes.len() > most {
        let len = found.bytes.len();
        return Err(format!("{path}: {len} bytes, {least} to {most} since state {since}"));
    }
    // Without a journal a file that is being extended may have its new length before its blocks.
    let may_be_zero = run.protocol == Some(ConsistencyProtocol::Ordered);
    for (at, byte) in found.bytes.iter().enumerate() {
        let is_known = states.iter().any(|node| node.bytes.get(at) == Some(byte))
            || may_be_zero && *byte == 0 && at >= least;
        if !is_known {
            return Err(format!("{path}: byte {at} is {byte:#04x} as in no state since {since}"));
        }
    }
    Ok(())
}
