//! The state of an open store, and how a group becomes part of it.
//!
//! ```text
//!   group ─▶ reserve ─▶ payloads and entries into frames ─▶ active layer
//!                            │ a waiter, or much came together
//!                            ▼
//!                          commit: all its frames to the disk at once
//! ```
//!
//! Law 1: a group is refused before anything of it was done, or not at all.
//! Law 2: all items of a group are in one commit. A commit counts only if all its frames
//! are there.
//! Law 3: every change pays a little of what is due: counting, merging, cleaning.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::indexing_slicing,
    reason = "sequence numbers, counts and places are this process's own; what was decoded was bounded there"
)]

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use draconis_device::{Group as DiskGroup, Ticket as DiskTicket, Write};
use draconis_exchange::heap::{Block, Private};

use crate::checkpoint::{Counting, Run, Written};
use crate::clean::Cleaning;
use crate::entry::{
    Data, Entry, KEY_MAX, Key, NAME_MAX, Named, ObjectRecord, PAYLOAD_MAX, PIECE, SHORT_MAX,
    extent_key, name_key, named, object_key, value_key,
};
use crate::frame::{Done, Frame, Header};
use crate::group::Op;
use crate::hooks::{Omission, barrier_bytes, commit_bytes, is_left_out};
use crate::io::Io;
use crate::layer::{Active, Layer, Sorted};
use crate::layout::{Kind, Layout};
use crate::merge::{Folding, Merging};
use crate::segment::Segments;
use crate::space::Full;
use crate::superblock::Superblock;
use crate::table::Table;
use crate::tree::{Node, Nodes, NodesMut, Ptr, Tree};
use crate::view::{Index, Token, View};
use crate::{Error, Group, Hint, ObjectId, Result, Ticket};

/// Commits shorter than this are a trickle.
const TRICKLE_BYTES: usize = 32 << 10;

/// A place that is being filled.
#[derive(Debug)]
pub(crate) struct Stream {
    pub segment: u32,
    /// Where the next frame begins, in the segment.
    pub pos: u32,
    /// Where the stream goes on.
    pub next: u32,
    pub frame: Option<Frame>,
}

/// The commit that takes groups.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub seq: u64,
    /// Items so far.
    order: u64,
    /// Frames that were numbered so far.
    parts: u32,
    done: Vec<Done>,
    bytes: usize,
    /// The commit's first frames, given to the disk already.
    early: Option<DiskTicket>,
    early_bytes: u64,
}

/// The state of a store. Everything here is under one lock.
pub(crate) struct Core {
    pub io: Arc<Io>,
    pub layout: Box<dyn Layout>,
    pub superblock: Superblock,
    pub tag: u32,

    pub active: Active,
    /// Sealed by snapshots since the last checkpoint began, oldest first.
    pub log_layers: Vec<Arc<Layer>>,
    pub counting: Option<Counting>,
    /// Oldest first.
    pub runs: Vec<Run>,
    pub folding: Option<Folding>,
    pub merging: Option<Merging>,
    /// The oldest runs that are merged as soon as they are one layer.
    pub to_merge: usize,
    /// Pairs in runs after which they are merged.
    pub merge_pairs: usize,
    /// Bytes on the disk that counting was paid for.
    pub worked_bytes: u64,
    /// Those of the log alone, which merging was paid for, and as they were when it began
    /// last: a merge that what it writes itself pays for goes on till all is merged.
    pub logged_bytes: u64,
    pub merged_at: u64,
    pub tree: Tree,
    pub view: Arc<View>,

    pub segments: Segments,
    pub streams: Vec<Stream>,
    pub cleaning: Option<Cleaning>,
    /// Bytes of work that the cleaner owes.
    pub cleaning_debt: u64,
    /// What work was paid for since the last commit, in bytes.
    pub paid_bytes: u64,
    /// Bytes on the disk for each that is paid for, in 64ths: a moving average.
    pub spent_64ths: u64,
    /// What was written, and moved, when the last commit ended.
    pub spent_before: (u64, u64),
    /// Segments that were cleaned since the last checkpoint: what is left in them waits for it.
    pub cleaned_since: HashSet<u32>,
    /// Those that were cleaned before the checkpoint that is being counted began.
    pub cleaned_before: HashSet<u32>,
    pub token: Arc<Token>,
    /// Segments that wait until those who hold the token let it go; oldest first.
    pub epochs: VecDeque<(Arc<Token>, Vec<u32>)>,

    pub batch: Batch,
    /// Commits that may not be durable yet, oldest first.
    pub commits: VecDeque<(u64, DiskTicket)>,
    pub durable: u64,
    /// Commits up to here are durable before anything else is written.
    pub barrier: u64,
    pub unflushed_bytes: u64,
    pub last_disk: Option<DiskTicket>,
    /// What the disk said is durable.
    pub durable_disk: Option<DiskTicket>,
    /// A moving average of a commit's bytes.
    pub usual_bytes: usize,

    /// Bytes of log since the last checkpoint began.
    pub log_bytes: u64,
    pub checkpoint: Option<Written>,
    /// Where the newest checkpoint lies.
    pub checkpoint_ptrs: Vec<Ptr>,

    /// Payload that groups brought so far, in bytes: how time is told here.
    pub clock: u64,
    pub next_id: u64,
    /// Values that are objects.
    pub links: u64,
    pub counters: Counters,
    /// The next superblock is the first of another length.
    pub is_resized: bool,
    /// What was refused last, for lack of room.
    pub full: Option<Full>,
    /// Set once writing is over, for good.
    pub stopped: Option<Error>,
    /// Half a group is in the active layer: nothing may be read any more.
    pub is_torn: bool,
}

/// What a store did since it was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Groups taken.
    pub groups: u64,
    /// Payload that groups brought, in bytes.
    pub payload_bytes: u64,
    /// Payload that the cleaner moved, in bytes.
    pub moved_bytes: u64,
    /// Nodes, runs and checkpoints, in bytes.
    pub index_bytes: u64,
    /// Everything given to the disk, in bytes.
    pub written_bytes: u64,
    /// Commits given to the disk.
    pub commits: u64,
    /// Checkpoints written.
    pub checkpoints: u64,
    /// Segments cleaned.
    pub cleaned: u64,
}

impl Batch {
    /// An empty commit.
    pub fn numbered(seq: u64) -> Self {
        Self { seq, ..Self::default() }
    }
}

impl Core {
    pub fn index(&self) -> Index<'_> {
        Index { top: Some(&self.active), layers: &self.view.layers, tree: &self.tree }
    }

    /// Makes the view anew: layers or tree are others now.
    pub fn refresh(&mut self) {
        let mut layers: Vec<Arc<Layer>> = self.log_layers.iter().rev().cloned().collect();
        layers.extend(self.counting.iter().map(|counting| counting.layer.clone()));
        layers.extend(self.counted_layers());
        let view = View { layers, tree: self.tree.clone(), token: self.token.clone() };
        self.view = Arc::new(view);
    }

    /// Runs, and what is being merged, newest first.
    pub fn counted_layers(&self) -> Vec<Arc<Layer>> {
        let merged = self.merging.as_ref().map_or(0, |merging| merging.runs);
        let mut layers: Vec<Arc<Layer>> =
            self.runs[merged..].iter().rev().filter_map(|run| run.layer.clone()).collect();
        layers.extend(self.merging.iter().map(|merging| merging.layer.clone()));
        layers
    }

    /// Ends the active layer, so that a view has everything.
    pub fn seal_layer(&mut self) {
        if self.active.map.is_empty() {
            return;
        }
        self.log_layers.push(Arc::new(self.active.seal()));
        // Few layers: each lookup asks all of them. Sizes double from new to old.
        while let [.., older, newer] = self.log_layers.as_slice()
            && (newer.pairs.len() * 2 >= older.pairs.len())
        {
            let folded = self.fold_log(&newer.clone(), &older.clone());
            self.log_layers.truncate(self.log_layers.len() - 2);
            self.log_layers.push(Arc::new(folded));
        }
        self.refresh();
    }

    /// `newer` over `older`, both of the log.
    pub fn fold_log(&mut self, newer: &Arc<Layer>, older: &Arc<Layer>) -> Layer {
        let segments = &mut self.segments;
        Layer::fold(newer, older, &mut |dead| {
            segments.kill(dead.at + u64::from(dead.skip), dead.len, true)
        })
    }

    /// Gives a key its entry in the active layer.
    pub fn set(&mut self, key: Key, entry: Entry) {
        let segments = &mut self.segments;
        self.active.set(key, entry, &mut |dead| {
            segments.kill(dead.at + u64::from(dead.skip), dead.len, true);
        });
    }

    /// Whether the open commit would write nothing.
    pub fn is_batch_empty(&self) -> bool {
        self.batch.bytes == 0
    }

    /// Whether the store was opened for reading.
    pub fn is_read_only(&self) -> bool {
        matches!(self.stopped, Some(Error::Misuse(_)))
    }

    /// Keys in layers.
    pub fn pending_keys(&self) -> u64 {
        let layers: usize = self.view.layers.iter().map(|layer| layer.pairs.len()).sum();
        (self.active.map.len() + layers) as u64
    }

    /// Whether the active layer has whole groups only.
    pub fn check_whole(&self) -> Result<()> {
        if self.is_torn { self.check_running() } else { Ok(()) }
    }

    pub fn check_running(&self) -> Result<()> {
        match &self.stopped {
            None => Ok(()),
            Some(Error::Device(error)) => Err(Error::Stopped(error.clone())),
            Some(error) => Err(error.clone()),
        }
    }

    /// Keeps an error that ends all writing.
    pub fn stop(&mut self, error: Error) -> Error {
        if self.stopped.is_none() {
            log::error!("the store takes no more changes: {error}");
            self.stopped = Some(error.clone());
        }
        error
    }

    /// Takes a group.
    pub fn submit(&mut self, group: &Group, after: &[Ticket]) -> Result<Ticket> {
        self.check_running()?;
        if after.iter().any(|ticket| ticket.0 > self.batch.seq) {
            return Err(Error::Misuse("a ticket that was never given out"));
        }
        let plan = self.plan(group)?;
        let room = (plan.needed_bytes, plan.frees);
        self.change(room, group.bytes.len() as u64, |core| core.apply(group))
    }

    /// Does something as one group that needs so many bytes, or only gives up, and brings so many.
    pub fn change(
        &mut self,
        (needed_bytes, frees): (u64, bool),
        brought_bytes: u64,
        apply: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<Ticket> {
        self.make_room(needed_bytes, frees)?;
        // From here on whatever fails ends the store: half a group may be in the commit.
        match apply(self) {
            Ok(()) => {}
            Err(error) => {
                self.is_torn = true;
                return Err(self.stop(error));
            }
        }
        // A group that changes nothing is as durable as what was before it.
        let ticket = Ticket(self.batch.seq - u64::from(self.is_batch_empty()));
        self.counters.groups += 1;
        self.counters.payload_bytes += brought_bytes;
        let worked = match self.batch.bytes >= self.commit_limit() {
            true => self.commit(),
            false => Ok(()),
        }
        .and_then(|()| self.work(brought_bytes + 64));
        match worked {
            Ok(()) => Ok(ticket),
            Err(error) => Err(self.stop(error)),
        }
    }

    /// Looks at what a group would do, and whether it can.
    fn plan(&self, group: &Group) -> Result<Plan> {
        let mut plan = Plan::default();
        let index = self.index();
        let per_piece = 8;
        for op in &group.ops {
            plan.needed_bytes += 96;
            match *op {
                Op::Create { id, hint } => {
                    plan.objects.insert(id, Some(ObjectRecord::new(hint)));
                }
                Op::Fork { id, parent } => {
                    self.check_depth(parent)?;
                    let parent_record = plan.existing(&index, &*self.io, parent)?;
                    let record = parent_record.forked(parent)?;
                    plan.objects.insert(id, Some(record));
                }
                Op::Write { id, at, len, .. } => {
                    let record = plan.changing(&index, &*self.io, id)?;
                    let end = at
                        .checked_add(len as u64)
                        .filter(|&end| end < u64::MAX)
                        .ok_or(Error::Misuse("an object that would be too long"))?;
                    record.len = record.len.max(end);
                    plan.add(len, per_piece, self.payload_max());
                }
                Op::Append { id, len, .. } => {
                    let record = plan.changing(&index, &*self.io, id)?;
                    record.len = record
                        .len
                        .checked_add(len as u64)
                        .filter(|&end| end < u64::MAX)
                        .ok_or(Error::Misuse("an object that would be too long"))?;
                    plan.add(len, per_piece, self.payload_max());
                }
                Op::Truncate { id, len } => {
                    let record = plan.changing(&index, &*self.io, id)?;
                    if len == u64::MAX {
                        return Err(Error::Misuse("an object that would be too long"));
                    }
                    record.len = len;
                    plan.frees = true;
                }
                Op::Punch { id, .. } => {
                    plan.changing(&index, &*self.io, id)?;
                    plan.frees = true;
                }
                Op::Name { name_len, id, .. } => {
                    check_name(name_len)?;
                    plan.existing(&index, &*self.io, id)?;
                    plan.needed_bytes += name_len as u64 * 2;
                }
                Op::Unname { name_len, .. } => {
                    check_name(name_len)?;
                    plan.needed_bytes += name_len as u64 * 2;
                    plan.frees = true;
                }
                Op::Delete { id } => {
                    let mut parent = plan.changing(&index, &*self.io, id)?.parent;
                    plan.objects.insert(id, None);
                    while let Some(below) = parent.take() {
                        let record = plan.existing(&index, &*self.io, below)?;
                        record.children = record.children.saturating_sub(1);
                        if record.is_leaving && record.children == 0 {
                            parent = record.parent;
                            plan.objects.insert(below, None);
                        }
                    }
                    plan.frees = true;
                }
                Op::Put { key_len, value_len, .. } => {
                    self.check_key(key_len)?;
                    plan.needed_bytes += key_len as u64 * 2;
                    plan.add(value_len, per_piece, self.payload_max());
                }
                Op::Remove { key_len, .. } => {
                    self.check_key(key_len)?;
                    plan.needed_bytes += key_len as u64 * 2;
                    plan.frees = true;
                }
            }
        }
        // Something that only frees may use what is kept for that.
        plan.frees &= group.bytes.len() <= 4096 + KEY_MAX
            && group.ops.iter().all(|op| {
                matches!(
                    op,
                    Op::Truncate { .. }
                        | Op::Punch { .. }
                        | Op::Delete { .. }
                        | Op::Remove { .. }
                        | Op::Unname { .. }
                )
            });
        Ok(plan)
    }

    fn check_key(&self, len: usize) -> Result<()> {
        if len > KEY_MAX || len > self.superblock.geometry.segment_bytes as usize / 32 {
            return Err(Error::Misuse("a key that is too long"));
        }
        Ok(())
    }

    /// A commit without a waiter is handed over when it has so many bytes.
    fn commit_limit(&self) -> usize {
        commit_bytes().min(self.layout.commit_bytes())
    }

    /// The longest payload of one entry.
    pub fn payload_max(&self) -> usize {
        let quarter = self.superblock.geometry.segment_bytes as usize / 4;
        PAYLOAD_MAX.min(quarter - quarter % PIECE as usize).max(PIECE as usize / 4)
    }

    fn apply(&mut self, group: &Group) -> Result<()> {
        for op in &group.ops {
            match *op {
                Op::Create { id, hint } => self.set_object(id, ObjectRecord::new(hint))?,
                Op::Fork { id, parent } => {
                    let mut record = self.record(parent)?;
                    let new = record.forked(parent)?;
                    self.set_object(parent, record)?;
                    self.set_object(id, new)?;
                }
                Op::Write { id, at, from, len } => {
                    let record = self.record(id)?;
                    self.write(id, record, at, &group.bytes[from..from + len])?;
                }
                Op::Append { id, from, len } => {
                    let record = self.record(id)?;
                    self.write(id, record, record.len, &group.bytes[from..from + len])?;
                }
                Op::Truncate { id, len } => {
                    let record = self.record(id)?;
                    if len < record.len {
                        self.pair(extent_key(id, len), record.hole(u64::MAX - len))?;
                    }
                    self.set_object(id, ObjectRecord { len, ..record })?;
                }
                Op::Punch { id, at, len } => {
                    let record = self.record(id)?;
                    let len = record.len.saturating_sub(at).min(len);
                    if len > 0 {
                        self.pair(extent_key(id, at), record.hole(len))?;
                    }
                }
                Op::Name { name, name_len, id } => {
                    self.record(id)?;
                    let key = name_key(&group.bytes[name..name + name_len]);
                    self.pair(key, Entry::naming(id))?;
                }
                Op::Unname { name, name_len } => {
                    let key = name_key(&group.bytes[name..name + name_len]);
                    if self.index().get(&*self.io, &key)?.is_some() {
                        self.pair(key, Entry::Gone)?;
                    }
                }
                Op::Delete { id } => self.delete(id)?,
                Op::Put { key, key_len, value, value_len } => {
                    let key = &group.bytes[key..key + key_len];
                    self.put(key, &group.bytes[value..value + value_len])?;
                }
                Op::Remove { key, key_len } => {
                    let key = value_key(&group.bytes[key..key + key_len]);
                    self.remove(key)?;
                }
            }
        }
        Ok(())
    }

    pub fn record(&self, id: ObjectId) -> Result<ObjectRecord> {
        self.index().object(&*self.io, id)?.ok_or(Error::NoObject(id))
    }

    pub fn set_object(&mut self, id: ObjectId, record: ObjectRecord) -> Result<()> {
        self.pair(object_key(id), Entry::Object(record))
    }

    pub fn write(
        &mut self,
        id: ObjectId,
        record: ObjectRecord,
        at: u64,
        bytes: &[u8],
    ) -> Result<()> {
        let mut offset = at;
        // Payloads begin on multiples of their longest, so that what is written again with the
        // same bounds replaces whole ones.
        let step = self.payload_max() as u64;
        let mut rest = bytes;
        while !rest.is_empty() {
            let len = (step - offset % step).min(rest.len() as u64) as usize;
            let (payload, others) = rest.split_at(len);
            let key = extent_key(id, offset);
            let replaced_after = self.age_of(&key);
            self.payload(key, payload, Kind::Written { hint: record.hint, replaced_after }, None)?;
            offset += len as u64;
            rest = others;
        }
        let len = record.len.max(at + bytes.len() as u64);
        if len != record.len {
            self.set_object(id, ObjectRecord { len, ..record })?;
        }
        Ok(())
    }

    fn delete(&mut self, id: ObjectId) -> Result<()> {
        let mut next = Some(id);
        while let Some(id) = next.take() {
            let record = self.record(id)?;
            // What is empty may have zeros that hide what it is or was over.
            self.pair(extent_key(id, 0), Entry::Hole(u64::MAX))?;
            self.pair(object_key(id), Entry::Gone)?;
            if let Some(parent) = record.parent {
                let record = self.record(parent)?;
                let children = record.children.saturating_sub(1);
                self.set_object(parent, ObjectRecord { children, ..record })?;
                // What was removed was there for this one alone.
                next = Some(parent).filter(|_| record.is_leaving && children == 0);
            }
        }
        Ok(())
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let key = value_key(key);
        self.unlink(&key)?;
        if value.len() <= SHORT_MAX {
            // It comes as often as what it replaces was moved: time goes on by it.
            self.clock += value.len() as u64;
            return self.pair(key, Entry::Short(value.into()));
        }
        if value.len() <= self.payload_max() {
            let replaced_after = self.age_of(&key);
            return self.payload(
                key,
                value,
                Kind::Written { hint: Hint::Unknown, replaced_after },
                None,
            );
        }
        let id = ObjectId(self.next_id);
        self.next_id += 1;
        let record = ObjectRecord { is_value: true, ..ObjectRecord::new(Hint::Unknown) };
        self.write(id, record, 0, value)?;
        self.links += 1;
        self.pair(key, Entry::Link(id, value.len() as u64))
    }

    fn remove(&mut self, key: Key) -> Result<()> {
        // Where there is little room nothing is written for what is not there.
        let is_scarce = self.segments.free() < self.low();
        if is_scarce && self.index().get(&*self.io, &key)?.is_none() {
            return Ok(());
        }
        self.unlink(&key)?;
        self.pair(key, Entry::Gone)
    }

    /// Deletes the object that holds the key's value, if one does.
    fn unlink(&mut self, key: &Key) -> Result<()> {
        if self.links == 0 {
            return Ok(());
        }
        if let Some(Entry::Link(id, _)) = self.index().get(&*self.io, key)? {
            self.links -= 1;
            self.delete(id)?;
        }
        Ok(())
    }

    /// How long ago what is under the key was written, as far as memory knows.
    fn age_of(&self, key: &Key) -> Option<u64> {
        // Where there is room enough, it matters little what lies together.
        if !self.layout.parts_by_age() || self.segments.free() > self.segments.all.len() / 2 {
            return None;
        }
        let entry = match self.active.map.get(key) {
            Some(entry) => Some(entry),
            None => {
                let hash = crate::layer::hash(key);
                self.view.layers.iter().find_map(|layer| layer.get(key, hash))
            }
        };
        let age = |data: &Data| self.clock.saturating_sub(self.segments.stamp_of(data.at));
        match entry {
            Some(Entry::Data(data)) => Some(age(data)),
            Some(_) => None,
            None => match self.tree.get(&Remembered(&self.io), key) {
                Ok(Some(Entry::Data(data))) => Some(age(&data)),
                _ => None,
            },
        }
    }

    /// Loads the leaves that these pairs, sorted by key, will be looked up in: one by one
    /// each would be waited for. `is_known` says which keys are answered without.
    pub fn load_leaves(
        &self,
        pairs: &[(Key, Entry)],
        is_known: impl Fn(&Key) -> bool,
    ) -> Result<()> {
        let mut wanted: Vec<Ptr> = vec![];
        let mut upper: Option<Key> = Some(Key::new());
        for (key, _) in pairs {
            let Some(bound) = &upper else { break };
            if key < bound {
                continue;
            }
            let Some((ptr, next)) = self.tree.place_of_leaf(&*self.io, key)? else { break };
            if self.io.remembered(ptr).is_some() {
                upper = next;
            } else if !is_known(key) {
                upper = next;
                wanted.push(ptr);
            }
        }
        if wanted.len() > 1 {
            self.io.load_ahead(&wanted);
        }
        Ok(())
    }

    fn stream_of(&self, kind: Kind) -> usize {
        let stream = self.layout.stream_of(kind, self.usual_bytes < TRICKLE_BYTES);
        // Layouts of others were asked before, but not for all.
        stream.min(self.streams.len().saturating_sub(1))
    }

    /// Payloads as long as this begin at a multiple of it.
    fn alignment(&self) -> usize {
        if self.layout.aligns() { self.superblock.geometry.page_bytes as usize } else { 1 }
    }

    /// Puts a payload and its entry into the commit; `stamp` is when it was written first.
    pub fn payload(
        &mut self,
        key: Key,
        payload: &[u8],
        kind: Kind,
        stamp: Option<u64>,
    ) -> Result<()> {
        let align = self.alignment();
        let stream = self.stream_of(kind);
        let order = self.next_order();
        let summer = self.io.summer;
        let line = Table::most(key.len(), payload.len());
        let frame = self.frame_for(stream, payload.len(), line)?;
        let at = frame.put(payload, align);
        let sums = (at..)
            .step_by(PIECE as usize)
            .zip(payload.chunks(PIECE as usize))
            .map(|(at, piece)| summer.sum(at, piece))
            .collect();
        let len = payload.len() as u32;
        let entry = Entry::Data(Data { at, stored: len, skip: 0, len, sums });
        frame.pair(order, &key, &entry);
        self.batch.bytes += payload.len() + line;
        if stamp.is_none() {
            self.clock += u64::from(len);
        }
        self.segments.add(at, len, stamp.unwrap_or(self.clock), true);
        self.set(key, entry);
        self.early()
    }

    /// Puts an entry without a payload into the commit.
    pub fn pair(&mut self, key: Key, entry: Entry) -> Result<()> {
        let order = self.next_order();
        let short = match &entry {
            Entry::Short(value) => value.len(),
            _ => 0,
        };
        let line = Table::most(key.len(), 0) + short;
        self.frame_for(0, 0, line)?.pair(order, &key, &entry);
        self.batch.bytes += line;
        self.set(key, entry);
        Ok(())
    }

    fn next_order(&mut self) -> u64 {
        self.batch.order += 1;
        self.batch.order
    }

    /// Stores something that is not of the log.
    pub fn store(&mut self, bytes: &[u8], is_node: bool) -> Result<Ptr> {
        self.store_in(if is_node { Kind::Node } else { Kind::Brief }, bytes, is_node)
    }

    /// The same, where what is of `kind` lies.
    pub fn store_in(&mut self, kind: Kind, bytes: &[u8], is_node: bool) -> Result<Ptr> {
        let align = self.alignment();
        let stream = self.stream_of(kind);
        let frame = self.frame_for(stream, bytes.len(), Table::most(0, 0))?;
        let at = frame.put(bytes, align);
        let len = bytes.len() as u32;
        frame.note(is_node, at, len);
        self.batch.bytes += bytes.len() + 16;
        self.segments.add(at, len, self.clock, false);
        self.counters.index_bytes += u64::from(len);
        self.early()?;
        Ok(Ptr { at, len, sum: self.io.summer.sum(at, bytes) })
    }

    /// The frame of a stream, with room for a payload and a line of its table.
    fn frame_for(&mut self, stream: usize, payload: usize, line: usize) -> Result<&mut Frame> {
        let page = self.superblock.geometry.page_bytes as usize;
        let align = self.alignment();
        let has_room = self.streams[stream]
            .frame
            .as_ref()
            .is_some_and(|frame| frame.holds(payload, line, align));
        if !has_room {
            self.finish_frame(stream);
            let least = Frame::least(payload, line, align, page);
            let usual = (self.usual_bytes * 2).max(64 << 10).min(self.layout.frame_bytes());
            let wanted = usual.max(least).next_multiple_of(page);
            let segment_bytes = self.superblock.geometry.segment_bytes as usize;
            if segment_bytes - (self.streams[stream].pos as usize) < least {
                self.next_segment(stream)?;
            }
            let place = &mut self.streams[stream];
            let capacity = wanted.min(segment_bytes - place.pos as usize);
            if capacity < least {
                return Err(Error::Misuse("a payload that no segment holds"));
            }
            let at = self.superblock.geometry.start_of(place.segment) + u64::from(place.pos);
            place.frame = Some(Frame::new(at, capacity));
        }
        // It was there, or was made just now.
        self.streams[stream].frame.as_mut().ok_or(Error::Misuse("no frame"))
    }

    pub fn next_segment(&mut self, stream: usize) -> Result<()> {
        let place = &self.streams[stream];
        let (old, new) = (place.segment, place.next);
        let Some(next) = self.segments.take(new) else {
            // `make_room` keeps enough for whatever comes here.
            log::error!("no segment for stream {stream}");
            let needed_bytes = u64::from(self.superblock.geometry.segment_bytes);
            return Err(Error::NoSpace { needed_bytes, free_bytes: 0, kept_bytes: 0 });
        };
        let (seq, is_index) = (self.batch.seq, stream == self.layout.index_stream());
        self.segments.set(old, |old| (old.last_seq, old.is_index) = (seq, is_index));
        self.segments.close(old, self.clock);
        let place = &mut self.streams[stream];
        (place.segment, place.pos, place.next) = (new, 0, next);
        Ok(())
    }

    fn finish_frame(&mut self, stream: usize) {
        let page = self.superblock.geometry.page_bytes as usize;
        let place = &mut self.streams[stream];
        let Some(frame) = place.frame.take() else { return };
        if frame.is_empty() {
            return;
        }
        let done = frame.finish(page, place.next);
        place.pos += done.len as u32;
        let (used, seq) = (place.pos, self.batch.seq);
        self.segments.set(place.segment, |segment| (segment.used, segment.last_seq) = (used, seq));
        self.batch.done.push(done);
    }

    /// Bytes that are in a frame which the disk does not have yet.
    pub fn in_frames(&self, at: u64, len: usize) -> Option<&[u8]> {
        let open = self.streams.iter().filter_map(|stream| stream.frame.as_ref());
        if let Some(bytes) = open.filter_map(|frame| frame.get(at, len)).next() {
            return Some(bytes);
        }
        self.batch.done.iter().find_map(|done| {
            let from = usize::try_from(at.checked_sub(done.at)?).ok()?;
            done.bytes().get(from..from.checked_add(len)?)
        })
    }

    /// Gives the first frames of a long commit to the disk.
    fn early(&mut self) -> Result<()> {
        let waiting: usize = self.batch.done.iter().map(|done| done.len).sum();
        if waiting < self.commit_limit().saturating_mul(4) {
            return Ok(());
        }
        // One frame stays: the last one says that it is the last.
        let kept = self.batch.done.pop();
        let frames = std::mem::take(&mut self.batch.done);
        self.batch.early_bytes += waiting as u64;
        let ticket = self.hand_over(frames, false, &[])?;
        self.batch.early = Some(ticket);
        self.batch.done.extend(kept);
        Ok(())
    }

    /// Gives the commit to the disk; returns at once.
    pub fn commit(&mut self) -> Result<()> {
        for stream in 0..self.streams.len() {
            self.finish_frame(stream);
        }
        if self.batch.done.is_empty() {
            return Ok(());
        }
        let frames = std::mem::take(&mut self.batch.done);
        let len: usize =
            frames.iter().map(|done| done.len).sum::<usize>() + self.batch.early_bytes as usize;
        // A long commit's first frames are durable before its last: it need not be
        // verified when the store is opened.
        let mut after: Vec<DiskTicket> = vec![];
        if self.batch.early_bytes > barrier_bytes() {
            after.extend(self.batch.early);
        }
        if self.unflushed_bytes > barrier_bytes() {
            after.extend(self.last_disk.filter(|_| !is_left_out(Omission::Barrier)));
            self.unflushed_bytes = 0;
            self.barrier = self.batch.seq - 1;
        }
        let ticket = self.hand_over(frames, true, &after)?;
        self.unflushed_bytes += len as u64;
        self.log_bytes += len as u64;
        self.usual_bytes = (self.usual_bytes * 7 + self.batch.bytes) / 8;
        self.counters.commits += 1;
        self.commits.push_back((self.batch.seq, ticket));
        self.batch = Batch::numbered(self.batch.seq + 1);
        self.io.all_handed_over();
        self.see_spent();
        Ok(())
    }

    fn hand_over(
        &mut self,
        frames: Vec<Done>,
        is_end: bool,
        after: &[DiskTicket],
    ) -> Result<DiskTicket> {
        let count = frames.len();
        let mut writes = Vec::with_capacity(count);
        let mut places = Vec::with_capacity(count);
        for (index, mut frame) in frames.into_iter().enumerate() {
            let header = Header {
                incarnation: self.superblock.incarnation,
                at: 0,
                seq: self.batch.seq,
                durable: if is_left_out(Omission::DurableMark) {
                    0
                } else {
                    self.durable.max(self.barrier)
                },
                len: 0,
                table_at: 0,
                table_len: 0,
                part: self.batch.parts,
                is_last: is_end && index + 1 == count,
                next_segment: frame.next_segment,
            };
            self.batch.parts += 1;
            frame.stamp(header, self.tag, self.io.summer);
            // As large as the frame's own, which was used before: new memory is cleared page
            // by page, and that takes longer than copying.
            let mut memory = Private::unset(frame.capacity());
            memory.shorten(frame.len);
            memory.copy_from_slice(frame.bytes());
            self.counters.written_bytes += frame.len as u64;
            writes.push(Write { at_bytes: frame.at, block: Block::from(memory) });
            places.push(Arc::new(frame));
        }
        self.io.remember(&places);
        let ticket = self
            .io
            .disk
            .submit(DiskGroup { writes }, after)
            .map_err(|refused| Error::Device(refused.error))?;
        self.last_disk = Some(ticket);
        self.io.handed_over(ticket, places)?;
        Ok(ticket)
    }

    /// Commits up to `seq` are durable.
    pub fn is_durable(&mut self, seq: u64) {
        self.durable = self.durable.max(seq);
        while let Some(&(first, ticket)) = self.commits.front()
            && first <= seq
        {
            self.io.settled(ticket);
            self.durable_disk = self.durable_disk.max(Some(ticket));
            self.commits.pop_front();
        }
    }

    /// Pays for what is due: cleaning in proportion to `bytes` that a group brought, the
    /// rest to what the disk took, since that is how segments are used up.
    fn work(&mut self, bytes: u64) -> Result<()> {
        self.complete_old_checkpoint()?;
        let open = (self.batch.bytes as u64).saturating_sub(self.batch.early_bytes);
        let written = self.counters.written_bytes + open;
        let taken = written.saturating_sub(self.worked_bytes);
        self.worked_bytes += taken;
        let logged = written.saturating_sub(self.counters.index_bytes);
        let taken_by_log = logged.saturating_sub(self.logged_bytes);
        self.logged_bytes += taken_by_log;
        self.count_some(taken)?;
        self.merge_some(taken_by_log)?;
        self.clean_some(bytes)?;
        if self.log_bytes + self.batch.bytes as u64 >= self.layout.log_bytes() {
            self.begin_checkpoint()?;
        }
        Ok(())
    }
}

fn check_name(len: usize) -> Result<()> {
    match len {
        1..=NAME_MAX => Ok(()),
        _ => Err(Error::Misuse("a name has 1 to 255 bytes")),
    }
}

/// What a group needs.
#[derive(Debug, Default)]
struct Plan {
    objects: HashMap<ObjectId, Option<ObjectRecord>>,
    needed_bytes: u64,
    frees: bool,
}

impl Plan {
    fn existing(
        &mut self,
        index: &Index<'_>,
        nodes: &dyn Nodes,
        id: ObjectId,
    ) -> Result<&mut ObjectRecord> {
        let entry = match self.objects.entry(id) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(index.object(nodes, id)?)
            }
        };
        entry.as_mut().ok_or(Error::NoObject(id))
    }

    /// The same, to be changed: what others are over shows through them.
    fn changing(
        &mut self,
        index: &Index<'_>,
        nodes: &dyn Nodes,
        id: ObjectId,
    ) -> Result<&mut ObjectRecord> {
        match self.existing(index, nodes, id)? {
            record if record.children == 0 => Ok(record),
            _ => Err(Error::Misuse("an object that others are over does not change")),
        }
    }

    fn add(&mut self, len: usize, per_piece: usize, payload_max: usize) {
        let pieces = len.div_ceil(PIECE as usize) + 1;
        let payloads = len.div_ceil(payload_max) + 1;
        self.needed_bytes += (len + pieces * per_piece + payloads * 96) as u64;
    }
}

/// Nodes that are in memory; others are an error, not a read.
struct Remembered<'a>(&'a Io);

impl Nodes for Remembered<'_> {
    fn load(&self, ptr: Ptr) -> Result<Arc<Node>> {
        self.0.remembered(ptr).ok_or(Error::Misuse("a node that is not in memory"))
    }
}

impl Nodes for Core {
    fn load(&self, ptr: Ptr) -> Result<Arc<Node>> {
        self.io.load(ptr)
    }
}

impl NodesMut for Core {
    fn write(&mut self, bytes: Vec<u8>) -> Result<Ptr> {
        let ptr = self.store(&bytes, true)?;
        self.io.offer_node(ptr, Arc::new(Node::decode(&bytes, ptr.at)?));
        Ok(ptr)
    }

    fn kill(&mut self, ptr: Ptr) {
        // A snapshot that still needs it reads it again.
        self.io.forget_node(ptr);
        self.segments.kill(ptr.at, ptr.len, false);
    }

    fn node_bytes(&self) -> usize {
        self.layout.node_bytes()
    }
}

/// The parts of a payload that are looked for: what the index has of a stored item.
pub(crate) fn live_parts(
    index: &Index<'_>,
    nodes: &dyn Nodes,
    key: &[u8],
    stored: &Data,
    hint: &mut Option<crate::tree::Found>,
) -> Result<Vec<(Key, Data)>> {
    let within = |data: &Data| data.at >= stored.at && data.end() <= stored.end();
    let mut parts = vec![];
    match named(key) {
        Some(Named::Extent(id, at)) => {
            let end = at + u64::from(stored.len);
            let _ = index.resolve(nodes, id, (at, end), hint, &mut |offset, entry| {
                if let Entry::Data(data) = entry
                    && within(&data)
                {
                    parts.push((extent_key(id, offset), data));
                }
                std::ops::ControlFlow::Continue(())
            })?;
        }
        Some(Named::Value(_)) => {
            if let Some(Entry::Data(data)) = index.get(nodes, key)?
                && within(&data)
            {
                parts.push((Key::from_slice(key), data));
            }
        }
        _ => {}
    }
    Ok(parts)
}
