//! Checks a whole store: every sum, every map, every count.
//!
//! ```text
//!   open, read-only ─▶ superblocks ─▶ walk: nodes · order · owners · recount
//!                                      └─▶ walk again, a window of segments at a time:
//!                                          who lies where · payloads in disk order
//! ```
//!
//! Two views are looked at. *Counted* is runs over the tree; what the log behind them hides
//! is alive until the next checkpoint counts it. *Visible* is the log over that: what people
//! read.
//!
//! Law 1: nothing is written.
//! Law 2: damage is a finding, not an error, and the check goes on behind it.
//! Law 3: alive in a segment is exactly what counted leads to, what the log leads to, and the
//! nodes and chunks that hold all this. The table must say the same, byte for byte.
//! Law 4: memory is bounded: payloads are gathered for as many segments as fit.

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use draconis_device::{Disk, Extent, Pending, ReadAnswer, Urgency};
use draconis_exchange::heap::{Block, Private};

use crate::codec::Reader;
use crate::core::Core;
use crate::entry::{Data, Entry, Key, Named, ObjectRecord, named, object_key};
use crate::io::Io;
use crate::layer::{Layer, Sorted, hash, intervals};
use crate::segment::State;
use crate::store::OpenOptions;
use crate::tree::{Child, Inner, Node, Nodes, Ptr, Tree};
use crate::view::Index;
use crate::{Error, ObjectId, Result, Store};

/// The longest request.
const REQUEST_BYTES: u64 = 1 << 20;
/// Bytes that nobody asks for are read, if that saves a request.
const GAP_BYTES: u64 = 64 << 10;
/// Requests in flight.
const REQUESTS_MAX: u32 = 32;
/// Leaves that are asked for together.
const LEAVES_AT_ONCE: usize = 32;

/// How to check.
#[derive(Clone, Debug)]
pub struct CheckOptions {
    /// Memory for what is known of payloads, in bytes. The index is read once more for each
    /// time it is filled.
    pub memory_bytes: u64,
    /// Findings that are kept; more are counted.
    pub findings_max: usize,
}

impl Default for CheckOptions {
    fn default() -> Self {
        Self { memory_bytes: 256 << 20, findings_max: 1000 }
    }
}

/// What kind of damage.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum What {
    /// The store cannot be opened.
    Open,
    /// A copy of the superblock.
    Superblock,
    /// A node or a part of the index is not what was written.
    Node,
    /// Keys that are not where they are looked for.
    Order,
    /// A payload is not what was written.
    Payload,
    /// The disk cannot read it.
    Unreadable,
    /// Two have the same bytes.
    Shared,
    /// An address that is in no segment, or in two.
    Outside,
    /// An address in a segment that is free, or behind what was written there.
    Unused,
    /// Bytes of an object that is not there.
    NoObject,
    /// Bytes behind an object's end.
    BehindEnd,
    /// A key whose value is not there.
    NoValue,
    /// A value that no key leads to.
    NoKey,
    /// An object whose number will be given out again.
    Number,
    /// A count.
    Count,
}

impl What {
    /// A word for scripts.
    pub fn code(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Superblock => "superblock",
            Self::Node => "node",
            Self::Order => "order",
            Self::Payload => "payload",
            Self::Unreadable => "unreadable",
            Self::Shared => "shared",
            Self::Outside => "outside",
            Self::Unused => "unused",
            Self::NoObject => "no-object",
            Self::BehindEnd => "behind-end",
            Self::NoValue => "no-value",
            Self::NoKey => "no-key",
            Self::Number => "number",
            Self::Count => "count",
        }
    }
}

/// Whose bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Of {
    /// An object's.
    Object(ObjectId),
    /// The value of a key.
    Key(Vec<u8>),
}

impl fmt::Display for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Object(id) => write!(f, "object {id}"),
            Self::Key(key) => write!(f, "key {}", key.escape_ascii()),
        }
    }
}

/// One thing that is wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// What kind of damage.
    pub what: What,
    /// In words.
    pub text: String,
    /// Where on the disk.
    pub at_bytes: Option<u64>,
    /// Whose.
    pub of: Option<Of>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(of) = &self.of {
            write!(f, "{of}: ")?;
        }
        f.write_str(&self.text)?;
        match self.at_bytes {
            Some(at) => write!(f, " (byte {at})"),
            None => Ok(()),
        }
    }
}

/// What a check found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// What is wrong, as it was found.
    pub damage: Vec<Finding>,
    /// What else is wrong and was not kept.
    pub more: u64,
    /// What is worth knowing and not wrong.
    pub notes: Vec<Finding>,
    /// Whether all was looked at. Behind damage there may be more of the index.
    pub is_complete: bool,
    /// Objects.
    pub objects: u64,
    /// Keys of the kv.
    pub keys: u64,
    /// Bytes of objects and values.
    pub payload_bytes: u64,
    /// Bytes of nodes, runs and checkpoint.
    pub index_bytes: u64,
    /// Segments with something in them, or open.
    pub used_segments: u32,
    /// Segments with nothing in them.
    pub free_segments: u32,
}

impl Report {
    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.damage.is_empty() && self.is_complete
    }

    fn add(&mut self, options: &CheckOptions, finding: Finding) {
        log::debug!("check: {finding}");
        if self.damage.len() < options.findings_max {
            self.damage.push(finding);
        } else {
            self.more += 1;
        }
    }
}

/// Hears of bytes that were looked at, and of how many there are.
pub type Progress<'p> = &'p mut dyn FnMut(u64, u64);

impl Store {
    /// Checks the store on `disk`, which nobody may change meanwhile. Writes nothing.
    ///
    /// # Errors
    /// [`Error::NotAStore`]; [`Error::Device`] where not even the superblocks can be read.
    /// Damage is no error.
    pub fn check(
        disk: Arc<dyn Disk>,
        options: &CheckOptions,
        progress: Progress<'_>,
    ) -> Result<Report> {
        let mut report = Report::default();
        // Small: the walk goes through everything once.
        let how = OpenOptions { cache_bytes: 16 << 20, read_only: true };
        let core = match crate::recover::open(disk.clone(), &how) {
            Ok(core) => core,
            Err(Error::Corrupt { what, at_bytes }) => {
                report.add(options, finding(What::Open, what.to_owned(), Some(at_bytes), None));
                return Ok(report);
            }
            Err(error) => return Err(error),
        };
        superblocks(&core, &mut report, options);
        let mut check = Check::new(core, options, report, progress);
        check.first_walk();
        check.compare_counts();
        check.look_at_payloads();
        Ok(check.finish())
    }
}

fn finding(what: What, text: String, at_bytes: Option<u64>, of: Option<Of>) -> Finding {
    Finding { what, text, at_bytes, of }
}

/// All four copies are the newest one, or the one before it.
fn superblocks(core: &Core, report: &mut Report, options: &CheckOptions) {
    let newest = &core.superblock;
    for (copy, (at, found)) in newest.copies(&*core.io.disk).into_iter().enumerate() {
        let name = format!("copy {copy} of the superblock");
        let found = match found {
            Ok(found) => found,
            // A power cut while the store was made.
            Err(Error::NotAStore(_)) if newest.generation <= 1 => {
                let text = format!("{name} was not written yet");
                report.notes.push(finding(What::Superblock, text, Some(at), None));
                continue;
            }
            Err(error) => {
                let text = format!("{name}: {error}");
                report.add(options, finding(What::Superblock, text, Some(at), None));
                continue;
            }
        };
        if found == *newest {
            continue;
        }
        let behind = newest.generation.wrapping_sub(found.generation);
        let is_same_store = found.id == newest.id && found.geometry == newest.geometry;
        if behind == 1 && is_same_store {
            // Copies are written two at a time: a power cut came between.
            let text = format!("{name} is one checkpoint old");
            report.notes.push(finding(What::Superblock, text, Some(at), None));
        } else {
            let text = match (is_same_store, behind) {
                (true, 0) => format!("{name} differs from the newest"),
                (true, _) => format!("{name} is {behind} checkpoints old: a write was lost"),
                (false, _) => format!("{name} is of another store"),
            };
            report.add(options, finding(What::Superblock, text, Some(at), None));
        }
    }
}

/// What a walk comes across.
enum Seen<'w> {
    /// A node that could be read.
    Node(Ptr),
    /// Something is wrong with the tree.
    Broken(Finding),
    /// A payload that is alive.
    Live(Option<ObjectId>, &'w Data),
    /// A payload that is read: of an object with its offset, or of a key.
    Payload(Named<'w>, &'w Data),
    /// An object.
    Object(ObjectId, ObjectRecord),
    /// A key whose value is an object.
    Link(&'w [u8], ObjectId, u64),
}

/// Everything that leads somewhere.
struct Map {
    io: Arc<Io>,
    tree: Tree,
    /// Runs, as one.
    counted: Arc<Layer>,
    /// The log.
    log: Arc<Layer>,
    /// Both, as one.
    full: [Arc<Layer>; 1],
}

impl Map {
    fn new(core: &mut Core) -> Self {
        let mut counted = Arc::new(Layer::default());
        for newer in core.counted_layers().iter().rev() {
            counted = Arc::new(Layer::fold(newer, &counted, &mut |_| {}));
        }
        let log = Arc::new(core.active.seal());
        let full = [Arc::new(Layer::fold(&log, &counted, &mut |_| {}))];
        Self { io: core.io.clone(), tree: core.tree.clone(), counted, log, full }
    }

    fn index(&self) -> Index<'_> {
        Index { top: None, layers: &self.full, tree: &self.tree }
    }

    /// Goes through all there is.
    fn walk(&self, see: &mut dyn FnMut(Seen<'_>)) {
        if let Some(root) = &self.tree.root {
            let mut inner_nodes = HashSet::new();
            self.node(root, None, (&Key::new(), None), &mut inner_nodes, see);
        }
        for (key, entry) in self.counted.pairs.iter().chain(&self.log.pairs) {
            if let Entry::Data(data) = entry {
                see(Seen::Live(owner(key), data));
            }
        }
        for (key, entry) in &self.full[0].pairs {
            show(key, entry, see);
        }
    }

    /// A node and all below it: keys from `lower` on, before `upper`.
    fn node(
        &self,
        child: &Child,
        level: Option<u8>,
        (lower, upper): (&Key, Option<&Key>),
        inner_nodes: &mut HashSet<u64>,
        see: &mut dyn FnMut(Seen<'_>),
    ) {
        let Child::Disk(ptr) = *child else { return };
        let broken = |what, text: String| Seen::Broken(finding(what, text, Some(ptr.at), None));
        let node = match self.io.load(ptr) {
            Ok(node) => node,
            Err(Error::Corrupt { what, at_bytes }) => {
                let text = format!("a node of the index cannot be used: {what}");
                return see(Seen::Broken(finding(What::Node, text, Some(at_bytes), None)));
            }
            Err(error) => {
                let text = format!("a node of the index cannot be read: {error}");
                return see(broken(What::Unreadable, text));
            }
        };
        see(Seen::Node(ptr));
        if level.is_some_and(|level| level != node.level()) {
            let text = format!("a node of level {} where another is expected", node.level());
            return see(broken(What::Order, text));
        }
        let is_within = |key: &[u8]| {
            lower.as_slice() <= key && upper.is_none_or(|upper| key < upper.as_slice())
        };
        match &*node {
            Node::Leaf(leaf) => {
                let mut walk = leaf.walk();
                // Every pair was read once when the node was.
                while let Ok(Some((key, entry))) = walk.next() {
                    let Ok(entry) = Entry::decode(&mut Reader::new(entry, ptr.at)) else {
                        continue;
                    };
                    if is_within(key) {
                        self.tree_pair(key, &entry, see);
                    } else {
                        see(broken(What::Order, "a key in a leaf that it is not of".to_owned()));
                    }
                }
            }
            Node::Inner(inner) => {
                // No node has two parents, so this ends even on a disk that lies.
                let is_new = inner_nodes.insert(ptr.at);
                if !is_new || !inner.children.iter().skip(1).all(|(key, _)| is_within(key)) {
                    return see(broken(What::Order, "a node in a place not its own".to_owned()));
                }
                self.children(inner, (lower, upper), inner_nodes, see);
            }
        }
    }

    fn children(
        &self,
        inner: &Inner,
        (lower, upper): (&Key, Option<&Key>),
        inner_nodes: &mut HashSet<u64>,
        see: &mut dyn FnMut(Seen<'_>),
    ) {
        let level = Some(inner.level - 1);
        for (index, (key, child)) in inner.children.iter().enumerate() {
            if level == Some(0) && index.is_multiple_of(LEAVES_AT_ONCE) {
                let next = inner.children[index..].iter().take(LEAVES_AT_ONCE);
                let next: Vec<Ptr> = next.filter_map(|(_, child)| child.on_disk()).collect();
                self.io.load_ahead(&next);
            }
            // The first child has what is before its key, too.
            let from = if index == 0 { lower } else { key };
            let to = inner.children.get(index + 1).map(|(key, _)| key).or(upper);
            self.node(child, level, (from, to), inner_nodes, see);
        }
    }

    /// A pair of the tree, as far as layers do not hide it.
    fn tree_pair(&self, key: &[u8], entry: &Entry, see: &mut dyn FnMut(Seen<'_>)) {
        match (named(key), entry) {
            (Some(Named::Extent(id, at)), Entry::Data(data)) => {
                let all = (at, at + u64::from(data.len));
                rests(&self.counted, id, all, &mut |from, to| {
                    see(Seen::Live(Some(id), &data.part((from - at) as u32, (to - from) as u32)));
                });
                rests(&self.full[0], id, all, &mut |from, to| {
                    let part = data.part((from - at) as u32, (to - from) as u32);
                    see(Seen::Payload(Named::Extent(id, from), &part));
                });
            }
            _ => {
                let hash = hash(key);
                if let Entry::Data(data) = entry
                    && self.counted.get(key, hash).is_none()
                {
                    see(Seen::Live(None, data));
                }
                if self.full[0].get(key, hash).is_none() {
                    show(key, entry, see);
                }
            }
        }
    }
}

fn owner(key: &[u8]) -> Option<ObjectId> {
    match named(key) {
        Some(Named::Extent(id, _) | Named::Object(id)) => Some(id),
        _ => None,
    }
}

fn show(key: &[u8], entry: &Entry, see: &mut dyn FnMut(Seen<'_>)) {
    match (named(key), entry) {
        (Some(name), Entry::Data(data)) => see(Seen::Payload(name, data)),
        (Some(Named::Object(id)), Entry::Object(record)) => see(Seen::Object(id, *record)),
        (Some(Named::Value(name)), Entry::Link(id, len)) => see(Seen::Link(name, *id, *len)),
        _ => {}
    }
}

/// What of `[from, to)` of an object a layer does not hide.
fn rests(layer: &Layer, id: ObjectId, (from, to): (u64, u64), give: &mut dyn FnMut(u64, u64)) {
    let mut done = from;
    intervals(layer, id, from, to, &mut |at, entry| {
        if at > done {
            give(done, at.min(to));
        }
        done = done.max(at.saturating_add(entry.covers()));
    });
    if done < to {
        give(done, to);
    }
}

/// Bytes of the disk that have an owner.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Span {
    from: u64,
    to: u64,
    of: Option<ObjectId>,
}

/// A payload that is read.
struct Payload {
    data: Data,
    key: Key,
}

impl Payload {
    fn of(&self) -> Option<Of> {
        match named(&self.key)? {
            Named::Object(id) | Named::Extent(id, _) => Some(Of::Object(id)),
            Named::Value(key) => Some(Of::Key(key.to_vec())),
        }
    }
}

/// A check under way.
struct Check<'c> {
    core: Core,
    map: Arc<Map>,
    options: &'c CheckOptions,
    report: Report,
    progress: Progress<'c>,
    /// What is alive in each segment, counted here.
    counts: Vec<i64>,
    /// Memory that the payloads of each segment take.
    weights: Vec<u64>,
    done_bytes: u64,
    total_bytes: u64,
}

impl<'c> Check<'c> {
    fn new(
        mut core: Core,
        options: &'c CheckOptions,
        report: Report,
        progress: Progress<'c>,
    ) -> Self {
        let segments = core.superblock.geometry.segments as usize;
        let map = Arc::new(Map::new(&mut core));
        Self {
            map,
            options,
            report: Report { is_complete: true, ..report },
            progress,
            counts: vec![0; segments],
            weights: vec![0; segments],
            done_bytes: 0,
            total_bytes: core.segments.live.max(0) as u64,
            core,
        }
    }

    fn did(&mut self, bytes: u64) {
        self.done_bytes = (self.done_bytes + bytes).min(self.total_bytes);
        (self.progress)(self.done_bytes, self.total_bytes);
    }

    fn add(&mut self, what: What, text: String, at: Option<u64>, of: Option<Of>) {
        self.report.add(self.options, finding(what, text, at, of));
    }

    /// Runs, tables and checkpoint: everything but nodes and payloads.
    fn chunks(&self) -> Vec<Ptr> {
        let runs = self.core.runs.iter().flat_map(|run| run.chunks.iter().copied());
        runs.chain(self.core.checkpoint_ptrs.iter().copied()).collect()
    }

    /// Looks at the index, counts, and asks who owns what.
    fn first_walk(&mut self) {
        for ptr in self.chunks() {
            // They were read when the store was opened, but perhaps not all.
            if let Err(error) = self.core.io.read_ptr(ptr) {
                self.broken(finding(
                    What::Node,
                    format!("a part of the index: {error}"),
                    Some(ptr.at),
                    None,
                ));
            }
            self.node(ptr);
        }
        let map = self.map.clone();
        let mut owners = Owners::default();
        map.walk(&mut |seen| match seen {
            Seen::Node(ptr) => self.node(ptr),
            Seen::Broken(finding) => self.broken(finding),
            Seen::Live(of, data) => {
                let at = data.at + u64::from(data.skip);
                self.count(at, data.len, 32, of.map(Of::Object));
            }
            Seen::Payload(name, data) => self.payload(&map, &mut owners, name, data),
            Seen::Object(id, record) => self.object(&mut owners, id, record),
            Seen::Link(key, id, len) => self.link(&map, &mut owners, key, id, len),
        });
        self.values(owners);
    }

    fn broken(&mut self, finding: Finding) {
        self.report.is_complete = false;
        self.report.add(self.options, finding);
    }

    fn node(&mut self, ptr: Ptr) {
        self.report.index_bytes += u64::from(ptr.len);
        self.count(ptr.at, ptr.len, 32, None);
        self.did(u64::from(ptr.len));
    }

    /// Counts what is alive, in its segment.
    fn count(&mut self, at: u64, len: u32, weight: u64, of: Option<Of>) {
        let geometry = self.core.superblock.geometry;
        let Some(segment) = geometry.segment_of(at).filter(|_| geometry.holds(at, u64::from(len)))
        else {
            return self.add(
                What::Outside,
                "an address outside of all segments".into(),
                Some(at),
                of,
            );
        };
        self.counts[segment as usize] += i64::from(len);
        self.weights[segment as usize] += weight;
    }

    fn payload(&mut self, map: &Map, owners: &mut Owners, name: Named<'_>, data: &Data) {
        self.report.payload_bytes += u64::from(data.len);
        let geometry = self.core.superblock.geometry;
        let of = match name {
            Named::Object(id) | Named::Extent(id, _) => Of::Object(id),
            Named::Value(key) => Of::Key(key.to_vec()),
        };
        if let Some(segment) = geometry.segment_of(data.at) {
            let end = data.end() - geometry.start_of(segment);
            if end > u64::from(self.core.segments.all[segment as usize].used) {
                let text = "bytes behind what was written in their segment".to_owned();
                self.add(What::Unused, text, Some(data.at), Some(of.clone()));
            }
            self.weights[segment as usize] += 128 + data.sums.len() as u64 * 8;
        }
        match name {
            Named::Extent(id, at) => match owners.record(map, id) {
                None => {}
                Some(None) => {
                    let text = format!("has bytes at {at}, but is not there");
                    self.add(What::NoObject, text, Some(data.at), Some(of));
                }
                Some(Some(record)) if at + u64::from(data.len) > record.len => {
                    let text = format!("has bytes at {at}, but is {} long", record.len);
                    self.add(What::BehindEnd, text, Some(data.at), Some(of));
                }
                Some(Some(_)) => {}
            },
            Named::Value(_) => self.report.keys += 1,
            Named::Object(_) => {}
        }
    }

    fn object(&mut self, owners: &mut Owners, id: ObjectId, record: ObjectRecord) {
        if record.is_value {
            owners.values.push(id);
        } else {
            self.report.objects += 1;
        }
        if id.0 >= self.core.next_id {
            let text = "has a number that will be given out again".to_owned();
            self.add(What::Number, text, None, Some(Of::Object(id)));
        }
    }

    fn link(&mut self, map: &Map, owners: &mut Owners, key: &[u8], id: ObjectId, len: u64) {
        self.report.keys += 1;
        owners.links.push(id);
        let text = match owners.record(map, id) {
            Some(None) => format!("its value, object {id}, is not there"),
            Some(Some(record)) if !record.is_value || record.len != len => {
                format!("object {id} is not its value of {len} bytes")
            }
            _ => return,
        };
        self.add(What::NoValue, text, None, Some(Of::Key(key.to_vec())));
    }

    /// Each value has one key.
    fn values(&mut self, mut owners: Owners) {
        owners.values.sort_unstable();
        owners.links.sort_unstable();
        if !self.report.is_complete {
            return;
        }
        // Replaying counts links and not what took them away, so there may be fewer.
        if owners.links.len() as u64 > self.core.links {
            let (counted, is) = (self.core.links, owners.links.len());
            let text = format!("{counted} long values are counted, {is} are there");
            self.add(What::Count, text, None, None);
        }
        for pair in owners.links.windows(2).filter(|pair| pair[0] == pair[1]) {
            let text = "is the value of two keys".to_owned();
            self.add(What::NoValue, text, None, Some(Of::Object(pair[0])));
        }
        for id in owners.values {
            if owners.links.binary_search(&id).is_err() {
                let text = "is a value that no key leads to".to_owned();
                self.add(What::NoKey, text, None, Some(Of::Object(id)));
            }
        }
    }

    fn compare_counts(&mut self) {
        let geometry = self.core.superblock.geometry;
        for number in 0..geometry.segments {
            let segment = self.core.segments.all[number as usize];
            let (counted, at) = (self.counts[number as usize], Some(geometry.start_of(number)));
            if segment.state == State::Free {
                self.report.free_segments += 1;
                if counted > 0 {
                    let text =
                        format!("segment {number} is free, but {counted} bytes of it are alive");
                    self.add(What::Unused, text, at, None);
                }
                continue;
            }
            self.report.used_segments += 1;
            if segment.is_bad {
                let text = format!("segment {number} could not be cleaned");
                self.report.notes.push(finding(What::Count, text, at, None));
            }
            // Of a tree that cannot be read the rest is not known.
            if counted != segment.live && self.report.is_complete {
                let live = segment.live;
                let text =
                    format!("segment {number} has {counted} bytes alive, {live} are counted");
                self.add(What::Count, text, at, None);
            }
        }
    }

    /// Gathers payloads for as many segments as fit, and reads them in disk order.
    fn look_at_payloads(&mut self) {
        let map = self.map.clone();
        let geometry = self.core.superblock.geometry;
        let mut first = 0;
        while first < geometry.segments {
            let mut end = first;
            let mut weight = 0;
            while end < geometry.segments
                && (end == first
                    || weight + self.weights[end as usize] <= self.options.memory_bytes)
            {
                weight += self.weights[end as usize];
                end += 1;
            }
            if weight > 0 {
                let from = geometry.start_of(first);
                self.window(&map, from..geometry.start_of(end));
            }
            first = end;
        }
    }

    fn window(&mut self, map: &Map, window: Range<u64>) {
        let geometry = self.core.superblock.geometry;
        let span = |at: u64, len: u32, of| Span { from: at, to: at + u64::from(len), of };
        let mut spans: Vec<Span> = vec![];
        let mut payloads: Vec<Payload> = vec![];
        let chunks = self.chunks().into_iter().filter(|ptr| window.contains(&ptr.at));
        spans.extend(chunks.map(|ptr| span(ptr.at, ptr.len, None)));
        map.walk(&mut |seen| match seen {
            Seen::Node(ptr) if window.contains(&ptr.at) => spans.push(span(ptr.at, ptr.len, None)),
            Seen::Live(of, data) if window.contains(&data.at) => {
                spans.push(span(data.at + u64::from(data.skip), data.len, of));
            }
            Seen::Payload(name, data)
                if window.contains(&data.at) && geometry.holds(data.at, u64::from(data.stored)) =>
            {
                let key = match name {
                    Named::Object(id) | Named::Extent(id, _) => object_key(id),
                    Named::Value(key) => crate::entry::value_key(key),
                };
                payloads.push(Payload { data: data.clone(), key });
            }
            _ => {}
        });
        self.overlaps(spans);
        payloads.sort_unstable_by_key(|payload| payload.data.at);
        self.read(&payloads);
    }

    fn overlaps(&mut self, mut spans: Vec<Span>) {
        spans.sort_unstable();
        let mut last: Option<Span> = None;
        for span in spans {
            if span.from == span.to {
                continue;
            }
            if let Some(before) = last.filter(|before| before.to > span.from) {
                let name = |of: Option<ObjectId>| match of {
                    Some(id) => format!("object {id}"),
                    None => "a value or the index".to_owned(),
                };
                let text = format!("{} and {} have the same bytes", name(before.of), name(span.of));
                self.add(What::Shared, text, Some(span.from), span.of.map(Of::Object));
            }
            last = last.filter(|before| before.to > span.to).or(Some(span));
        }
    }

    /// Reads and verifies payloads, in the order in which they lie.
    fn read(&mut self, payloads: &[Payload]) {
        let depth = self.core.superblock.profile.queue_depth.clamp(1, REQUESTS_MAX) as usize;
        let mut flying: VecDeque<(u64, &[Payload], Pending<ReadAnswer>)> = VecDeque::new();
        let mut rest = payloads;
        while !rest.is_empty() || !flying.is_empty() {
            while flying.len() < depth && !rest.is_empty() {
                let (extent, count) = self.request(rest);
                let (these, others) = rest.split_at(count);
                let block = Block::from(Private::unset(extent.len_bytes as usize));
                let answer = self.core.io.disk.read(extent, block, Urgency::Ahead);
                flying.push_back((extent.start_bytes, these, answer));
                rest = others;
            }
            let Some((start, these, answer)) = flying.pop_front() else { break };
            let block = answer.wait().and_then(std::result::Result::ok);
            let bytes = block.map(Block::into_private);
            for payload in these {
                self.verify(payload, start, bytes.as_deref());
                self.did(u64::from(payload.data.len));
            }
        }
    }

    /// The request that brings the first of `payloads`, and how many it brings.
    fn request(&self, payloads: &[Payload]) -> (Extent, usize) {
        let page = u64::from(self.core.superblock.geometry.page_bytes);
        let start = payloads[0].data.at / page * page;
        let mut end = start;
        let mut count = 0;
        for payload in payloads {
            let is_near = payload.data.at <= end + GAP_BYTES;
            let behind = payload.data.end().max(end);
            if count > 0 && (!is_near || behind - start > REQUEST_BYTES) {
                break;
            }
            end = behind;
            count += 1;
        }
        // Segments end on pages, so this stays on the disk.
        (Extent::new(start, (end - start).next_multiple_of(page).max(page)), count)
    }

    fn verify(&mut self, payload: &Payload, start: u64, bytes: Option<&[u8]>) {
        let Payload { data, .. } = payload;
        if data.stored == 0 {
            return;
        }
        let io = self.core.io.clone();
        let verified = match bytes {
            Some(bytes) => {
                let from = (data.at - start) as usize;
                io.verify(data, &bytes[from..from + data.stored as usize])
            }
            // The request failed: perhaps not because of this one.
            None => {
                let page = u64::from(self.core.superblock.geometry.page_bytes);
                let first = data.at / page * page;
                let len = (data.end() - first).next_multiple_of(page);
                io.direct(first, len as usize).and_then(|bytes| {
                    let from = (data.at - first) as usize;
                    io.verify(data, &bytes[from..from + data.stored as usize])
                })
            }
        };
        match verified {
            Ok(()) => {}
            Err(Error::Corrupt { at_bytes, .. }) => {
                let text = "bytes that are not what was written".to_owned();
                self.add(What::Payload, text, Some(at_bytes), payload.of());
            }
            Err(error) => {
                self.add(What::Unreadable, error.to_string(), Some(data.at), payload.of());
            }
        }
    }

    fn finish(mut self) -> Report {
        self.did(self.total_bytes);
        self.report
    }
}

/// Who owns what.
#[derive(Default)]
struct Owners {
    /// The object that was asked for last.
    last: Option<(ObjectId, Option<ObjectRecord>)>,
    /// Objects that are values.
    values: Vec<ObjectId>,
    /// Objects that keys lead to.
    links: Vec<ObjectId>,
}

impl Owners {
    /// The record of an object; none if the index cannot be read there.
    fn record(&mut self, map: &Map, id: ObjectId) -> Option<Option<ObjectRecord>> {
        if let Some((last, record)) = self.last
            && last == id
        {
            return Some(record);
        }
        let record = map.index().object(&*map.io, id).ok()?;
        self.last = Some((id, record));
        Some(record)
    }
}

#[cfg(test)]
mod tests {
    use draconis_device::{Group as DiskGroup, MemoryDisk, Write};

    use super::*;
    use crate::entry::{extent_key, value_key};
    use crate::kv::{Batch, Kv};
    use crate::superblock::Superblock;
    use crate::{CreateOptions, Group, Hint, LayoutKind, Profile};

    const LONG: usize = 200_000;

    fn made(layout: LayoutKind) -> Arc<dyn Disk> {
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(vec![0; 16 << 20], 512));
        let profile =
            Profile { layout, page_bytes: 4096, segment_bytes: 128 << 10, queue_depth: 4 };
        Store::create(disk.clone(), &CreateOptions { profile, id: 9 }).unwrap();
        let store = Store::open(disk.clone(), &OpenOptions::default()).unwrap();
        let mut group = Group::new();
        for nth in 0..4u8 {
            let id = group.create(store.new_object(), Hint::Unknown);
            group.write(id, 0, &vec![nth; 40_000]);
        }
        store.submit(group, &[]).unwrap();
        let kv = Kv::new(store.clone());
        let mut batch = Batch::new();
        for nth in 0..600u32 {
            batch.put(&nth.to_be_bytes(), &[nth as u8; 300]);
        }
        batch.put(b"long", &[5; LONG]);
        kv.write(batch).unwrap();
        // All of it in the tree, and something over it.
        store.checkpoint().unwrap();
        let mut core = crate::recover::open(disk.clone(), &OpenOptions::default()).unwrap();
        drop(store);
        core.checkpoint_now().unwrap();
        core.merge_all().unwrap();
        core.checkpoint_now().unwrap();
        let mut group = Group::new();
        group.write(ObjectId(1), 100, &[77; 5000]);
        core.submit(&group, &[]).unwrap();
        core.checkpoint_now().unwrap();
        core.submit(&group, &[]).unwrap();
        core.commit().unwrap();
        disk
    }

    fn check(disk: &Arc<dyn Disk>) -> Report {
        Store::check(disk.clone(), &CheckOptions::default(), &mut |_, _| {}).unwrap()
    }

    fn whats(report: &Report) -> Vec<What> {
        let mut whats: Vec<What> = vec![];
        for finding in &report.damage {
            if !whats.contains(&finding.what) {
                whats.push(finding.what);
            }
        }
        whats
    }

    /// Spoils a store from the inside, in a way that its next checkpoint writes down.
    fn plant(spoil: impl FnOnce(&mut Core)) -> Report {
        let disk = made(LayoutKind::Cow);
        let mut core = crate::recover::open(disk.clone(), &OpenOptions::default()).unwrap();
        spoil(&mut core);
        core.checkpoint_now().unwrap();
        drop(core);
        check(&disk)
    }

    fn flip(disk: &Arc<dyn Disk>, at: u64) {
        let sector = at / 512 * 512;
        let block = disk.read_now(Extent::new(sector, 512), Block::private(512)).unwrap();
        let mut bytes = block.into_private();
        bytes[(at - sector) as usize] ^= 0x10;
        let write = Write { at_bytes: sector, block: Block::from(bytes) };
        disk.submit(DiskGroup { writes: vec![write] }, &[]).unwrap();
    }

    fn data_of(core: &Core, id: u64) -> Data {
        let mut found = None;
        let _ = core
            .index()
            .resolve(&*core.io, ObjectId(id), (8192, u64::MAX), &mut None, &mut |_, data| {
                found = Some(data);
                std::ops::ControlFlow::Break(())
            })
            .unwrap();
        found.unwrap()
    }

    #[test]
    fn a_whole_store_has_no_damage_whatever_is_under_way() {
        for layout in [LayoutKind::Log, LayoutKind::Cow] {
            let disk = made(layout);
            let report = check(&disk);
            assert!(report.is_clean(), "{layout}: {:#?}", report.damage);
            assert_eq!((report.objects, report.keys), (4, 601));
            assert_eq!(report.payload_bytes, 4 * 40_000 + 600 * 300 + LONG as u64);
            assert!(report.index_bytes > 600 * 10 && report.notes.is_empty());
            let store = Store::open(disk, &OpenOptions::default()).unwrap();
            let segments = store.info().segments;
            assert_eq!(report.used_segments + report.free_segments, segments);
        }
    }

    #[test]
    fn little_memory_gives_the_same_report() {
        let disk = made(LayoutKind::Log);
        let id = {
            let options = OpenOptions { read_only: true, ..OpenOptions::default() };
            let core = crate::recover::open(disk.clone(), &options).unwrap();
            data_of(&core, 2).at
        };
        flip(&disk, id);
        let all = check(&disk);
        let options = CheckOptions { memory_bytes: 1, ..CheckOptions::default() };
        let (mut last, mut calls) = (0, 0);
        let report = Store::check(disk, &options, &mut |done, total| {
            assert!(last <= done && done <= total);
            (last, calls) = (done, calls + 1);
        })
        .unwrap();
        assert_eq!(report, all);
        assert_eq!(whats(&report), [What::Payload]);
        assert!(calls > 3);
    }

    #[test]
    fn rot_is_named_with_its_owner() {
        let disk = made(LayoutKind::Cow);
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let core = crate::recover::open(disk.clone(), &options).unwrap();
        let of_object = data_of(&core, 3).at;
        let key = value_key(&7u32.to_be_bytes());
        let Some(Entry::Data(of_key)) = core.index().get(&*core.io, &key).unwrap() else {
            panic!("a value")
        };
        flip(&disk, of_object);
        flip(&disk, of_key.at);
        let report = check(&disk);
        let of: Vec<_> = report.damage.iter().map(|finding| finding.of.clone().unwrap()).collect();
        assert!(of.contains(&Of::Object(ObjectId(3))), "{report:#?}");
        assert!(of.contains(&Of::Key(7u32.to_be_bytes().to_vec())), "{report:#?}");
        assert_eq!(whats(&report), [What::Payload]);
        assert!(report.is_complete);
    }

    #[test]
    fn a_node_that_is_not_what_it_was() {
        let disk = made(LayoutKind::Cow);
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let core = crate::recover::open(disk.clone(), &options).unwrap();
        let Some(Child::Disk(root)) = core.tree.root else { panic!("a root on the disk") };
        flip(&disk, root.at + 5);
        let report = check(&disk);
        assert_eq!(whats(&report), [What::Node]);
        assert!(!report.is_complete && !report.is_clean());
    }

    #[test]
    fn a_node_in_the_wrong_place() {
        let report = plant(|core| {
            let Some(Child::Disk(root)) = core.tree.root.clone() else { panic!("a root") };
            let node = core.io.load(root).unwrap();
            let Node::Inner(inner) = &*node else { panic!("an inner node") };
            let mut children = inner.children.clone();
            let (first, second) = (children[0].1.clone(), children[1].1.clone());
            (children[0].1, children[1].1) = (second, first);
            let inner = Inner { level: inner.level, children };
            core.tree.root = Some(Child::Changed(Arc::new(inner)));
        });
        assert!(whats(&report).contains(&What::Order), "{report:#?}");
        let report = plant(|core| {
            let Some(Child::Disk(root)) = core.tree.root.clone() else { panic!("a root") };
            let children = vec![(Key::new(), Child::Disk(root))];
            core.tree.root = Some(Child::Changed(Arc::new(Inner { level: 9, children })));
        });
        assert_eq!(whats(&report), [What::Order]);
    }

    #[test]
    fn copies_of_the_superblock() {
        let disk = made(LayoutKind::Log);
        flip(&disk, 4096 + 9);
        let report = check(&disk);
        assert_eq!(whats(&report), [What::Superblock]);
        assert!(report.damage[0].text.contains("copy 1"), "{report:#?}");
        // The last two one checkpoint old: that is what a power cut leaves.
        let disk = made(LayoutKind::Log);
        let (newest, _) = Superblock::find(&*disk).unwrap();
        for (behind, is_clean) in [(1, true), (2, false)] {
            let mut old = newest.clone();
            old.generation -= behind;
            disk.submit(DiskGroup { writes: old.writes(1) }, &[]).unwrap();
            let report = check(&disk);
            assert_eq!(report.is_clean(), is_clean, "{report:#?}");
            assert_eq!(report.notes.len(), if is_clean { 2 } else { 0 });
        }
        // The log names its checkpoint: an old superblock is the store of then, or none.
        for pair in 0..2 {
            let zeros = newest.writes(pair).into_iter().map(|mut write| {
                write.block = Block::private(write.block.len());
                write
            });
            disk.submit(DiskGroup { writes: zeros.collect() }, &[]).unwrap();
        }
        let error = Store::check(disk, &CheckOptions::default(), &mut |_, _| {}).unwrap_err();
        assert!(matches!(error, Error::NotAStore(_)));
    }

    #[test]
    fn a_store_that_cannot_be_opened_is_a_finding() {
        let disk = made(LayoutKind::Log);
        let (newest, _) = Superblock::find(&*disk).unwrap();
        flip(&disk, newest.checkpoint.at);
        let report = check(&disk);
        assert_eq!(whats(&report), [What::Open]);
        assert!(!report.is_complete);
    }

    #[test]
    fn bytes_of_nobody() {
        let report = plant(|core| {
            let payload = [1; 600];
            let key = extent_key(ObjectId(900), 0);
            core.payload(key, &payload, crate::layout::Kind::Moved { age: 0 }, None).unwrap();
        });
        assert_eq!(whats(&report), [What::NoObject]);
        assert_eq!(report.damage[0].of, Some(Of::Object(ObjectId(900))));
    }

    #[test]
    fn bytes_behind_the_end() {
        let report = plant(|core| {
            let record = core.index().object(&*core.io, ObjectId(2)).unwrap().unwrap();
            let short = Entry::Object(ObjectRecord { len: 39_999, ..record });
            core.pair(object_key(ObjectId(2)), short).unwrap();
        });
        assert_eq!(whats(&report), [What::BehindEnd]);
    }

    #[test]
    fn two_with_the_same_bytes() {
        let report = plant(|core| {
            let data = data_of(core, 2);
            let to = extent_key(ObjectId(4), 1 << 20);
            core.pair(to, Entry::Data(data)).unwrap();
            let record = ObjectRecord { len: 2 << 20, hint: Hint::Cold, is_value: false };
            core.pair(object_key(ObjectId(4)), Entry::Object(record)).unwrap();
        });
        assert_eq!(whats(&report), [What::Count, What::Shared]);
    }

    #[test]
    fn addresses_that_cannot_be() {
        let report = plant(|core| {
            let data = Data { at: 1 << 50, ..data_of(core, 2) };
            core.pair(extent_key(ObjectId(4), 0), Entry::Data(data)).unwrap();
        });
        assert!(whats(&report).contains(&What::Outside), "{report:#?}");
    }

    #[test]
    fn a_free_segment_that_holds_something() {
        let report = plant(|core| {
            let segment = core.segments.geometry.segment_of(data_of(core, 3).at).unwrap();
            let live = core.segments.all[segment as usize].live;
            core.segments.kill(core.segments.geometry.start_of(segment), live as u32, false);
            core.segments.release(segment);
        });
        assert!(whats(&report).contains(&What::Unused), "{report:#?}");
    }

    #[test]
    fn counts_that_are_wrong() {
        let report = plant(|core| {
            let at = data_of(core, 2).at;
            core.segments.add(at, 11, 0, false);
        });
        assert_eq!(whats(&report), [What::Count]);
        let report = plant(|core| core.links -= 1);
        assert_eq!(whats(&report), [What::Count]);
    }

    #[test]
    fn values_and_their_keys() {
        let report = plant(|core| {
            core.links += 1;
            core.pair(value_key(b"lost"), Entry::Link(ObjectId(99), 5)).unwrap();
        });
        assert_eq!(whats(&report), [What::NoValue]);
        assert_eq!(report.damage[0].of, Some(Of::Key(b"lost".to_vec())));
        let report = plant(|core| {
            core.pair(value_key(b"long"), Entry::Gone).unwrap();
        });
        assert_eq!(whats(&report), [What::NoKey]);
    }

    #[test]
    fn a_long_value_that_is_not_there_is_an_error_for_who_asks() {
        let disk = made(LayoutKind::Cow);
        let mut core = crate::recover::open(disk.clone(), &OpenOptions::default()).unwrap();
        let endless = ObjectRecord { len: 1 << 60, hint: Hint::Cold, is_value: true };
        core.pair(object_key(ObjectId(4)), Entry::Object(endless)).unwrap();
        let links = [(&b"lost"[..], 99, 5), (b"other", 2, 5), (b"endless", 4, 1 << 60)];
        for (name, id, len) in links {
            core.links += 1;
            core.pair(value_key(name), Entry::Link(ObjectId(id), len)).unwrap();
        }
        core.checkpoint_now().unwrap();
        drop(core);
        let kv = crate::kv::Kv::new(Store::open(disk, &OpenOptions::default()).unwrap());
        for (name, ..) in links {
            for value in [kv.get(name), kv.snapshot().get(name)] {
                assert!(matches!(value, Err(Error::Corrupt { .. })), "{value:?}");
            }
            let scanned = kv.scan(&(std::ops::Bound::Included(name), std::ops::Bound::Unbounded));
            assert!(matches!(scanned.take(1).next(), Some(Err(Error::Corrupt { .. }))));
        }
    }

    #[test]
    fn a_number_that_comes_again() {
        let report = plant(|core| {
            let record = ObjectRecord { len: 0, hint: Hint::Cold, is_value: false };
            core.pair(object_key(ObjectId(5000)), Entry::Object(record)).unwrap();
        });
        assert_eq!(whats(&report), [What::Number]);
    }

    #[test]
    fn a_disk_without_a_store_is_an_error() {
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(vec![0; 1 << 20], 512));
        let error = Store::check(disk, &CheckOptions::default(), &mut |_, _| {}).unwrap_err();
        assert!(matches!(error, Error::NotAStore(_)));
    }
}
