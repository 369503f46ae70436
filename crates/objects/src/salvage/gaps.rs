//! Ranges of keys that a level of the index lost, and the pairs of frames that fill them.
//!
//! ```text
//!   newer   log behind a missing frame                pairs of frames
//!   log · runs · tree, each as far as it is readable
//!     └ pairs of frames in the ranges that this level lost, right above it
//! ```
//!
//! The index says what was removed, frames may not: the frame of a removal has no live bytes, so its
//! segment is reused while the removed value may still be in another one. So frames only fill gaps.
//!
//! Law 1: a payload comes back only if it may be alive. In a segment whose live bytes are all known
//! from the readable index, nothing else is alive.
//! Law 2: a short value has no live bytes. It comes back only if no later commit has lost frames, or
//! if unsure values are wanted.
//! Law 3: the newest pair of a key hides older ones, also if it is dead, or its payload or the
//! summary of its frame is damaged.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use super::SalvageOptions;
use crate::bit_repair::RepairedDisk;
use crate::cached_disk::CachedDisk;
use crate::check::walk::{IndexSnapshot, LostNode, WalkItem};
use crate::codec::Reader;
use crate::core::Core;
use crate::entry::{DecodedKey, Entry, Key, PayloadRef, decode_key, extent_key, value_key};
use crate::frame::summary::SummaryItem;
use crate::frame_scan::{FrameScan, Version};
use crate::index::leaf::Leaf;
use crate::index::memtable::{
    ImmutableMemtable, Memtable, SortedLookup, UnreadableRange, hash, weight,
};
use crate::index::tree::{BlockPtr, Node, NodeSource, Tree};
use crate::index::view::View;
use crate::segment_table::{Segment, SegmentState};
use crate::superblock::Geometry;
use crate::{ObjectId, Result};

/// Keys from `from` on, before `to`, that one level of the index lost.
#[derive(Clone, Debug)]
pub(super) struct Gap {
    pub from: Key,
    pub to: Option<Key>,
    /// The same for bytes of objects: an extent outside of the range may reach into it, and one
    /// inside may reach out of it.
    extents_from: Key,
    extents_to: Option<Key>,
    /// Byte on the disk of what is damaged.
    pub at: u64,
    /// Pairs that frames have for it.
    pub filled: u64,
}

/// Returns the first offset of an object whose extent key is at least `bound`.
fn offset_at(bound: &[u8], id: ObjectId) -> u64 {
    let first = extent_key(id, 0);
    let prefix = first.get(..9).unwrap_or_default();
    match bound.get(..9.min(bound.len())).unwrap_or_default().cmp(prefix) {
        std::cmp::Ordering::Equal => {
            let mut word = [0; 8];
            let rest = bound.get(9..).unwrap_or_default();
            word.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
            u64::from_be_bytes(word).saturating_add(u64::from(rest.len() > 8))
        }
        // A bound that is a prefix of the object's keys is before all of them.
        std::cmp::Ordering::Less => 0,
        std::cmp::Ordering::Greater => u64::MAX,
    }
}

impl Gap {
    fn new(from: Key, to: Option<Key>, at: u64) -> Self {
        let (extents_from, extents_to) = (from.clone(), to.clone());
        Self { from, to, extents_from, extents_to, at, filled: 0 }
    }

    fn of_range(lost: &UnreadableRange) -> Self {
        let mut from = lost.after.clone();
        if !from.is_empty() {
            from.push(0);
        }
        Self::new(from, lost.before.clone(), lost.at)
    }

    /// Adjusts the range of extents to the pairs beside the gap.
    fn set_neighbours(&mut self, before: Option<(Key, Entry)>, after: Option<Key>) {
        if let Some((key, entry)) = before
            && let Some(DecodedKey::Extent(id, at)) = decode_key(&key)
        {
            let end = extent_key(id, at.saturating_add(entry.covered_bytes()));
            self.extents_from = end.max(self.extents_from.clone());
        }
        if self.to.is_some() {
            self.extents_to = after;
        }
    }

    pub fn contains(&self, key: &[u8]) -> bool {
        self.from.as_slice() <= key && self.to.as_ref().is_none_or(|to| key < to.as_slice())
    }

    /// Returns the offsets of an object that are in the gap.
    pub fn offsets(&self, id: ObjectId) -> (u64, u64) {
        let to = self.extents_to.as_ref().map_or(u64::MAX, |to| offset_at(to, id));
        (offset_at(&self.extents_from, id), to)
    }

    /// Returns the part of a pair that is in the gap.
    fn clip(&self, key: &Key, entry: &Entry) -> Option<(Key, Entry)> {
        let Some(DecodedKey::Extent(id, at)) = decode_key(key) else {
            return self.contains(key).then(|| (key.clone(), entry.clone()));
        };
        let (lower, upper) = self.offsets(id);
        let (from, to) = (at.max(lower), at.saturating_add(entry.covered_bytes()).min(upper));
        let len = to.checked_sub(from).filter(|len| *len > 0)?;
        Some((extent_key(id, from), entry.part(from.saturating_sub(at), len)))
    }
}

/// Returns the gaps that a pair may touch; they are sorted.
fn touched_gaps<'g>(gaps: &'g [Gap], key: &Key, entry: &Entry) -> &'g [Gap] {
    let last = match decode_key(key) {
        Some(DecodedKey::Extent(id, at)) => {
            extent_key(id, at.saturating_add(entry.covered_bytes()))
        }
        _ => key.clone(),
    };
    let is_before = |gap: &Gap| gap.extents_to.as_ref().is_some_and(|to| to <= key);
    let from = gaps.partition_point(is_before);
    let to = gaps.partition_point(|gap| gap.from <= last);
    gaps.get(from..to).unwrap_or_default()
}

/// A level of the index as far as it is readable, and its gaps.
struct Level {
    layer: Arc<ImmutableMemtable>,
    gaps: Vec<Gap>,
}

/// A range of a salvage: objects by number, with their bytes, then keys and names.
#[derive(Clone, Debug)]
pub(super) struct Window {
    pub from: Key,
    pub to: Option<Key>,
}

/// Returns the place of a key in windows: the record of an object is before its extents.
pub(super) fn window_place(key: &[u8]) -> Key {
    let mut place = Key::new();
    match decode_key(key) {
        Some(DecodedKey::Object(id)) => {
            place.push(1);
            place.extend_from_slice(&id.0.to_be_bytes());
        }
        Some(DecodedKey::Extent(id, at)) => {
            place.push(1);
            place.extend_from_slice(&id.0.to_be_bytes());
            place.push(1);
            place.extend_from_slice(&at.to_be_bytes());
        }
        _ => place.extend_from_slice(key),
    }
    place
}

impl Window {
    pub fn contains(&self, place: &[u8]) -> bool {
        self.from.as_slice() <= place && self.to.as_ref().is_none_or(|to| place < to.as_slice())
    }

    /// Returns true if keys of the gap may be in the window.
    pub fn overlaps(&self, gap: &Gap) -> bool {
        // Places and keys have the same order, but for objects.
        let is_of_objects = |key: &[u8]| key.first().is_none_or(|kind| *kind <= 2);
        is_of_objects(&gap.from) && is_of_objects(&self.from)
            || gap.to.as_ref().is_none_or(|to| self.from < *to)
                && self.to.as_ref().is_none_or(|to| gap.from < *to)
    }

    /// Returns the offsets of an object that are in the window.
    pub fn offsets(&self, id: ObjectId) -> (u64, u64) {
        // Places of extents sort as extent keys do.
        let bound = |place: &Key| match place.get(9) {
            Some(1) => {
                let id = place.get(1..9).unwrap_or_default();
                [&[2], id, place.get(10..).unwrap_or_default()].concat()
            }
            // A record, or keys behind all objects.
            _ => match place.first() {
                Some(1) => [&[2], place.get(1..).unwrap_or_default()].concat(),
                None => vec![],
                Some(_) => vec![3],
            },
        };
        let to = self.to.as_ref().map_or(u64::MAX, |to| offset_at(&bound(to), id));
        (offset_at(&bound(&self.from), id), to)
    }
}

/// Bytes of a pair beside key and entry.
const PAIR_BYTES: usize = 48;

/// Versions of the pairs of a window that frames have.
#[derive(Default)]
struct Candidates {
    pairs: BTreeMap<Key, Vec<(Version, Key, Entry)>>,
    bytes: usize,
}

impl Candidates {
    fn add(&mut self, place: Key, version: Version, key: Key, entry: Entry) {
        let bytes = weight(&key, &entry).saturating_add(PAIR_BYTES);
        let pairs = self.pairs.entry(place).or_default();
        // Only the newest pair of a key is visible; of an extent, if it is as long.
        let len = entry.covered_bytes();
        if pairs.iter().any(|(old, _, it)| *old > version && it.covered_bytes() >= len) {
            return;
        }
        let before = pairs.len();
        pairs.retain(|(old, _, it)| *old > version || it.covered_bytes() > len);
        let removed = before.saturating_sub(pairs.len());
        pairs.push((version, key, entry));
        self.bytes = self.bytes.saturating_add(bytes);
        self.bytes = self.bytes.saturating_sub(bytes.saturating_mul(removed));
    }

    /// Drops the later half of the places; returns where it begins, if there are several.
    fn cut(&mut self) -> Option<Key> {
        let half = self.pairs.len() / 2;
        let middle = self.pairs.keys().nth(half).filter(|_| half > 0)?.clone();
        drop(self.pairs.split_off(&middle));
        let all = self.pairs.values().flatten();
        self.bytes = all.map(|(_, key, entry)| weight(key, entry).saturating_add(PAIR_BYTES)).sum();
        Some(middle)
    }
}

/// The index of a damaged store: what is readable of it, and its gaps.
pub(super) struct DamagedIndex {
    /// Newest first.
    levels: Vec<Level>,
    tree: Tree,
    tree_gaps: Vec<Gap>,
    /// Nodes that cannot be used.
    lost_nodes: Vec<BlockPtr>,
    /// Live bytes of each segment that the readable index does not refer to; none if the table of
    /// segments is lost.
    unknown_live: Option<Vec<i64>>,
    /// Offset in each segment behind which nothing was written since it was reused.
    used: Vec<u32>,
    is_index_segment: Vec<bool>,
    /// Last commit in the index.
    last_seq: u64,
    log_incarnation: u64,
    /// True if later commits were durable, but cannot be replayed.
    has_missing_commits: bool,
}

/// What a window of the store has, from the index and from frames.
pub(super) struct FilledWindow {
    pub view: View,
    pub window: Window,
    /// Pairs of frames in it.
    pub from_frames: u64,
    /// Versions of short values that may be old or removed, and were left out.
    pub left_out: u64,
    /// Gaps of memtables, each with the number of layers that are as new or newer: what is below
    /// may have been hidden by what is lost. Empty if frames have everything.
    hiding_gaps: Vec<(usize, Gap)>,
    /// True if nothing can be missing in the gaps.
    pub is_complete: bool,
}

impl FilledWindow {
    /// Returns true if a lost part of a memtable may have hidden the entry that a key has.
    pub fn may_be_hidden(&self, key: &[u8]) -> bool {
        let hash = hash(key);
        self.hiding_gaps.iter().any(|(newer, gap)| {
            let newer = self.view.layers.get(..*newer).unwrap_or_default();
            gap.contains(key) && newer.iter().all(|layer| layer.get(key, hash).is_none())
        })
    }

    /// Returns the offsets of an object that lost parts of memtables may have had newer bytes of.
    pub fn outdated_ranges(&self, id: ObjectId) -> impl Iterator<Item = (u64, u64)> {
        self.hiding_gaps.iter().map(move |(_, gap)| gap.offsets(id)).filter(|(from, to)| from < to)
    }
}

impl DamagedIndex {
    /// Reads the whole index of a store.
    pub fn read(core: &mut Core, has_table: bool, has_missing_commits: bool) -> Self {
        let map = IndexSnapshot::new(core);
        let io = core.log.io.clone();
        let geometry = io.geometry;
        let mut live: Vec<i64> = core.log.segments.all.iter().map(|segment| segment.live).collect();
        let mut sub = |at: u64, len: u32| {
            let segment = geometry.segment_of(at).and_then(|number| live.get_mut(number as usize));
            if let Some(live) = segment.filter(|_| len > 0) {
                *live = live.saturating_sub(i64::from(len));
            }
        };
        let mut layers = vec![map.log.clone()];
        layers.extend(core.levels.sealed_memtables.iter().rev().cloned());
        layers.extend(core.levels.run_memtables());
        let chunks = core.levels.runs.iter().flat_map(|run| &run.chunks);
        chunks.chain(&core.checkpoints.ptrs).for_each(|ptr| sub(ptr.at, ptr.len));
        let run_gaps: Vec<&UnreadableRange> = layers.iter().flat_map(|it| &it.lost).collect();
        let mut lost_nodes: Vec<LostNode> = vec![];
        map.walk(&mut |seen| match seen {
            WalkItem::Node(ptr) => sub(ptr.at, ptr.len),
            WalkItem::Broken(_, lost) => {
                if let Some(lost) = &lost {
                    sub(lost.ptr.at, lost.ptr.len);
                }
                lost_nodes.extend(lost);
            }
            // What a lost part of a run hides is not alive.
            WalkItem::Live(key, data) => {
                let from = match decode_key(key) {
                    Some(DecodedKey::Extent(id, _)) => extent_key(id, 0),
                    _ => Key::from_slice(key),
                };
                if !run_gaps.iter().any(|lost| lost.overlaps(&from, key)) {
                    sub(data.at.saturating_add(u64::from(data.skip)), data.len);
                }
            }
            _ => {}
        });
        let tree = core.levels.tree.clone();
        let mut tree_gaps: Vec<Gap> = vec![];
        let ptrs = lost_nodes.iter().map(|lost| lost.ptr).collect();
        for LostNode { ptr, lower, upper } in lost_nodes {
            match tree_gaps.last_mut() {
                Some(last) if last.to.as_ref().is_some_and(|to| *to >= lower) => last.to = upper,
                _ => tree_gaps.push(Gap::new(lower, upper, ptr.at)),
            }
        }
        for gap in &mut tree_gaps {
            let before = tree.last_before(&*io, &gap.from, &mut None).ok().flatten();
            let after =
                gap.to.as_ref().and_then(|to| match tree.first_at_or_after(&*io, to, &mut None) {
                    Ok(pair) => pair.map(|(key, _)| key),
                    Err(_) => Some(to.clone()),
                });
            gap.set_neighbours(before, after);
        }
        Self {
            levels: layers.into_iter().map(Level::new).collect(),
            tree,
            tree_gaps,
            lost_nodes: ptrs,
            unknown_live: has_table.then_some(live),
            used: core.log.segments.all.iter().map(used_bytes).collect(),
            is_index_segment: core.log.segments.all.iter().map(|it| it.is_index).collect(),
            last_seq: core.log.batch.seq.saturating_sub(1),
            log_incarnation: core.checkpoints.superblock.log_incarnation,
            has_missing_commits,
        }
    }

    /// Returns the index of a store without a checkpoint: everything is a gap.
    pub fn empty() -> Self {
        Self {
            levels: vec![],
            tree: Tree::default(),
            tree_gaps: vec![Gap::new(Key::new(), None, 0)],
            lost_nodes: vec![],
            unknown_live: None,
            used: vec![],
            is_index_segment: vec![],
            last_seq: u64::MAX,
            log_incarnation: 0,
            has_missing_commits: false,
        }
    }

    /// Returns the nodes of the tree as far as they are readable.
    pub fn readable_nodes(&self, io: Arc<CachedDisk>) -> Result<ReadableNodes> {
        let leaf = Leaf::decode(&mut Reader::new(&[], 0), &[], 0, 0)?;
        let empty = Arc::new(Node::Leaf(leaf));
        let lost = self.lost_nodes.iter().map(|ptr| ptr.at).collect();
        Ok(ReadableNodes { io, lost, empty })
    }

    /// Repairs nodes that were lost; returns true if the index has to be read again.
    pub fn repair_nodes(&self, repairs: &RepairedDisk, io: &CachedDisk) -> bool {
        let repaired =
            self.lost_nodes.iter().filter(|lost| repairs.repair_block(io.summer, **lost));
        repaired.count() > 0
    }

    pub fn gaps(&self) -> impl Iterator<Item = &Gap> {
        self.levels.iter().flat_map(|level| &level.gaps).chain(&self.tree_gaps)
    }

    /// Returns true if frames are needed to know everything.
    pub fn is_damaged(&self) -> bool {
        self.has_missing_commits || self.gaps().next().is_some()
    }

    /// Returns true if records of objects may be lost.
    pub fn may_have_lost_objects(&self) -> bool {
        let end = extent_key(ObjectId(0), 0);
        self.gaps()
            .any(|gap| gap.from < end && gap.to.as_ref().is_none_or(|to| to.as_slice() > &[1]))
    }

    /// Returns true if the key may have been in a part of the index that is lost.
    pub fn may_have_lost(&self, key: &[u8]) -> bool {
        self.gaps().any(|gap| gap.contains(key))
    }

    fn is_in_gap(&self, key: &Key, entry: &Entry) -> bool {
        let levels = self.levels.iter().map(|level| &level.gaps).chain([&self.tree_gaps]);
        let mut touched = levels.flat_map(|gaps| touched_gaps(gaps, key, entry));
        touched.any(|gap| gap.clip(key, entry).is_some())
    }

    /// Returns true if a pair is newer than the last commit that was replayed.
    pub fn is_newer(&self, version: Version) -> bool {
        version.incarnation >= self.log_incarnation && version.seq > self.last_seq
    }

    /// Returns true if nothing can refer to a payload of the index any more.
    fn is_dead(&self, geometry: &Geometry, data: &PayloadRef) -> bool {
        let (Some(unknown), Some(segment)) = (&self.unknown_live, geometry.segment_of(data.at))
        else {
            return false;
        };
        let end = data.end().saturating_sub(geometry.start_of(segment));
        let used = self.used.get(segment as usize).copied().unwrap_or(0);
        unknown.get(segment as usize).is_none_or(|live| *live <= 0) || end > u64::from(used)
    }

    /// Collects the pairs of frames for a window that begins at `from` and needs at most about
    /// `memory_bytes`.
    fn collect(
        &self,
        scan: &FrameScan<'_>,
        geometry: &Geometry,
        from: Key,
        options: &SalvageOptions,
    ) -> (Window, Candidates, u64) {
        let newest_incomplete = scan.newest_incomplete_commit(self.last_seq);
        let mut left_out = 0u64;
        let mut window = Window { from, to: None };
        let mut found = Candidates::default();
        scan.for_each(&mut |frame| {
            let of = frame.version(0);
            if scan.is_cut_off(of) {
                return;
            }
            let is_newer = self.is_newer(of);
            let is_kept = match is_newer || self.last_seq == u64::MAX {
                true => scan.is_certain(of, self.last_seq == u64::MAX),
                false => of.seq <= self.last_seq,
            };
            if !is_kept || is_newer && !(self.has_missing_commits && frame.is_valid) {
                return;
            }
            for item in frame.items() {
                let SummaryItem::Pair(order, key, mut entry) = item else { continue };
                let is_wanted = is_newer || self.is_in_gap(&key, &entry);
                if !is_wanted {
                    continue;
                }
                let is_dead = match &entry {
                    Entry::Data(data) => !is_newer && self.is_dead(geometry, data),
                    _ => false,
                };
                let is_unsure = matches!(&entry, Entry::Inline(_))
                    && key.first() == value_key(&[]).first()
                    && of.seq < newest_incomplete
                    && !is_newer
                    && !options.unsure;
                if is_unsure {
                    left_out = left_out.saturating_add(1);
                }
                if is_dead || is_unsure || !frame.is_valid {
                    entry = hiding_entry(&key, entry.covered_bytes());
                }
                let Some(key) = clip_to_window(&window, key, &mut entry) else { continue };
                found.add(window_place(&key), frame.version(order), key, entry);
                if found.bytes > options.memory_bytes
                    && let Some(to) = found.cut()
                {
                    window.to = Some(to);
                }
            }
        });
        (window, found, left_out)
    }

    /// Fills the gaps of a window that begins at `from` with pairs of frames.
    pub fn fill(
        &mut self,
        scan: Option<&FrameScan<'_>>,
        geometry: &Geometry,
        from: Key,
        options: &SalvageOptions,
    ) -> FilledWindow {
        let whole = || (Window { from: Key::new(), to: None }, Candidates::default(), 0);
        let (window, found, left_out) =
            scan.map_or_else(whole, |scan| self.collect(scan, geometry, from, options));
        let mut pairs: Vec<(Version, Key, Entry)> = found.pairs.into_values().flatten().collect();
        pairs.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        let pairs = pairs.into_iter();
        let (newer, older): (Vec<_>, Vec<_>) =
            pairs.partition(|(version, ..)| self.is_newer(*version));
        let mut from_frames = newer.len() as u64;
        let mut unknown = self.unknown_live.clone();
        let mut layers = vec![];
        if !newer.is_empty() {
            let mut memtable = Memtable::default();
            newer.into_iter().for_each(|(_, key, entry)| memtable.set(key, entry, &mut |_| ()));
            layers.push(Arc::new(memtable.seal()));
        }
        // Several levels may have lost the same pair.
        let mut counted = HashSet::new();
        let mut fill = |gaps: &mut Vec<Gap>, layers: &mut Vec<Arc<ImmutableMemtable>>| {
            if gaps.is_empty() {
                return;
            }
            let filled = fill_gaps(gaps, &older);
            for (key, entry) in &filled.pairs {
                if is_hiding(entry) || !counted.insert(hash(key)) {
                    continue;
                }
                from_frames = from_frames.saturating_add(1);
                if let (Entry::Data(data), Some(unknown)) = (entry, &mut unknown) {
                    let at = data.at.saturating_add(u64::from(data.skip));
                    let segment = geometry.segment_of(at);
                    let live = segment.and_then(|number| unknown.get_mut(number as usize));
                    if let Some(live) = live {
                        *live = live.saturating_sub(i64::from(data.len));
                    }
                }
            }
            layers.push(Arc::new(filled));
        };
        let mut hiding_gaps = vec![];
        for level in &mut self.levels {
            fill(&mut level.gaps, &mut layers);
            layers.push(level.layer.clone());
            hiding_gaps.extend(level.gaps.iter().map(|gap| (layers.len(), gap.clone())));
        }
        fill(&mut self.tree_gaps, &mut layers);
        let is_exact = unknown.is_some_and(|unknown| {
            unknown.iter().zip(&self.is_index_segment).all(|(live, index)| *index || *live == 0)
        });
        let is_complete = !self.is_damaged()
            || is_exact
                && window.from.is_empty()
                && window.to.is_none()
                && !self.has_missing_commits
                && scan.is_some_and(|scan| scan.has_all_pairs(self.last_seq));
        let has_all_commits =
            scan.is_some_and(|scan| scan.newest_incomplete_commit(self.last_seq) == 0);
        if is_complete || has_all_commits {
            hiding_gaps.clear();
        }
        let view = View { layers, tree: self.tree.clone(), ..View::default() };
        FilledWindow { view, window, from_frames, left_out, hiding_gaps, is_complete }
    }
}

impl Level {
    fn new(layer: Arc<ImmutableMemtable>) -> Self {
        if layer.lost.is_empty() {
            return Self { layer, gaps: vec![] };
        }
        let mut gaps: Vec<Gap> = layer.lost.iter().map(Gap::of_range).collect();
        for gap in &mut gaps {
            let own = |(key, entry): (&Key, &Entry)| (key.clone(), entry.clone());
            let before = layer.last_before(&gap.from).map(own);
            gap.set_neighbours(before, gap.to.clone());
        }
        let pairs = layer.pairs.clone();
        Self { layer: Arc::new(ImmutableMemtable::new(pairs, layer.bytes)), gaps }
    }
}

fn used_bytes(segment: &Segment) -> u32 {
    if segment.state == SegmentState::Free { 0 } else { segment.used }
}

/// Returns an entry that hides older ones of the key.
fn hiding_entry(key: &[u8], len: u64) -> Entry {
    match decode_key(key) {
        Some(DecodedKey::Extent(..)) => Entry::Hole(len),
        _ => Entry::Tombstone,
    }
}

fn is_hiding(entry: &Entry) -> bool {
    matches!(entry, Entry::Tombstone | Entry::Hole(_))
}

/// Returns the key of the part of a pair that is in the window.
fn clip_to_window(window: &Window, key: Key, entry: &mut Entry) -> Option<Key> {
    if let Some(DecodedKey::Extent(id, at)) = decode_key(&key) {
        let (from, to) = window.offsets(id);
        let (start, end) = (at.max(from), at.saturating_add(entry.covered_bytes()).min(to));
        let len = end.checked_sub(start).filter(|len| *len > 0)?;
        *entry = entry.part(start.saturating_sub(at), len);
        return Some(extent_key(id, start));
    }
    window.contains(&window_place(&key)).then_some(key)
}

/// Returns the newest pairs in the gaps; `pairs` are sorted by version.
fn fill_gaps(gaps: &mut [Gap], pairs: &[(Version, Key, Entry)]) -> ImmutableMemtable {
    let mut memtable = Memtable::default();
    for (_, key, entry) in pairs {
        for gap in touched_gaps(gaps, key, entry) {
            if let Some((key, entry)) = gap.clip(key, entry) {
                memtable.set(key, entry, &mut |_| ());
            }
        }
    }
    let filled = memtable.seal();
    for gap in gaps {
        let end = gap.to.as_ref().map_or(filled.pairs.len(), |to| filled.seek(to));
        let inside = filled.pairs.get(filled.seek(&gap.from)..end).unwrap_or_default();
        gap.filled = inside.iter().filter(|(_, entry)| !is_hiding(entry)).count() as u64;
    }
    filled
}

/// Source of nodes in which lost nodes are empty leaves.
pub(super) struct ReadableNodes {
    io: Arc<CachedDisk>,
    lost: HashSet<u64>,
    empty: Arc<Node>,
}

impl NodeSource for ReadableNodes {
    fn load(&self, ptr: BlockPtr) -> Result<Arc<Node>> {
        if self.lost.contains(&ptr.at) { Ok(self.empty.clone()) } else { self.io.load(ptr) }
    }
}
