//! Salvage: copies the intact contents of a damaged store to another one.
//!
//! ```text
//!   superblock ─▶ index, as far as it is readable ─┐
//!   scan of all frames ─▶ pairs in its gaps ───────┴▶ objects · keys · names ─▶ the new store
//! ```
//!
//! Law 1: copied bytes are what was written: they are verified when read. Contents that cannot be
//! verified are left out and reported.
//! Law 2: an object is copied without its unreadable blocks, which become holes and are reported. A
//! value is copied whole or not at all.
//! Law 3: memory is bounded by [`SalvageOptions::memory_bytes`], the cache, and the runs of the
//! store. If the pairs of frames need more, the keys are copied in several windows.

mod anchor;
mod gaps;

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use draconis_device::Disk;

use self::anchor::{find_checkpoint, find_superblocks};
use self::gaps::{DamagedIndex, FilledWindow, ReadableNodes, window_place};
use crate::bit_repair::RepairedDisk;
use crate::cached_disk::CachedDisk;
use crate::check::ProgressCallback;
use crate::core::Core;
use crate::entry::{
    CHECKSUM_BLOCK_BYTES, DecodedKey, Entry, Key, NAME_KEYS_END, ObjectRecord, PayloadRef,
    decode_key, extent_key, name_key, object_key, value_key,
};
use crate::frame::summary::SummaryItem;
use crate::frame_scan::FrameScan;
use crate::index::cursor::Cursor;
use crate::levels::Levels;
use crate::recovery::{OpenDamage, empty_core, load_from_superblock};
use crate::superblock::Superblock;
use crate::{Error, Group, LifetimeHint, NewObject, ObjectId, Profile, Result, Store};

/// Memory of the cache of the damaged store.
const CACHE_BYTES: u64 = 64 << 20;
/// Rounds of repairing flipped bits: a repaired node may lead to others.
const MAX_REPAIR_ROUNDS: usize = 8;
/// Bytes of one group.
const MAX_GROUP_BYTES: usize = 256 << 10;
/// Bytes of one read of an object; if it fails, single blocks are read.
const OBJECT_READ_BYTES: u64 = 256 << 10;

/// Result of a salvage.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SalvageReport {
    /// Copied objects, whole or in part.
    pub objects: u64,
    /// Copied keys with their values.
    pub keys: u64,
    /// Copied names of objects.
    pub names: u64,
    /// Copied bytes of objects and values.
    pub bytes: u64,
    /// Pairs that came from frames, because their part of the index is damaged.
    pub from_frames: u64,
    /// Flipped bits that were changed back.
    pub repaired_bits: u64,
    /// Descriptions of losses; empty if everything was copied.
    pub lost: Vec<String>,
    /// Number of further losses.
    pub more: u64,
}

/// Most losses that are described.
const MAX_DESCRIBED_LOSSES: usize = 10_000;

impl SalvageReport {
    fn record_loss(&mut self, what: String) {
        if self.lost.len() < MAX_DESCRIBED_LOSSES {
            self.lost.push(what);
        } else {
            self.more = self.more.saturating_add(1);
        }
    }
}

/// Options of a salvage.
#[derive(Clone, Debug)]
pub struct SalvageOptions {
    /// Memory for pairs whose index is lost, in bytes. The frames are read once more each time it
    /// is full. Readable parts of the index take no memory.
    pub memory_bytes: usize,
    /// True to copy values also if they may be old or removed: a newer part of the index is lost,
    /// and so are later commits.
    pub unsure: bool,
}

impl Default for SalvageOptions {
    fn default() -> Self {
        Self { memory_bytes: 512 << 20, unsure: false }
    }
}

impl Store {
    /// Returns the length and the profile for a store to which the one on `disk` is salvaged.
    /// Without superblocks the profile is made from frames.
    ///
    /// # Errors
    /// As [`Store::salvage`].
    pub fn profile_for_salvage(disk: &dyn Disk) -> Result<(u64, Profile)> {
        let (superblocks, _) = find_superblocks(disk)?;
        let none = Error::NotAStore("no superblock".to_owned());
        let superblock = superblocks.last().ok_or(none)?;
        Ok((superblock.geometry.disk_bytes, superblock.profile))
    }

    /// Copies the intact contents of the store on `from` to this one, which must be empty. Objects
    /// keep their numbers.
    ///
    /// # Errors
    /// [`Error::NotAStore`] if there is neither a superblock nor a frame; errors of this store.
    pub fn salvage(&self, from: Arc<dyn Disk>) -> Result<SalvageReport> {
        self.salvage_with(from, &SalvageOptions::default(), &mut |_, _| ())
    }

    /// The same, with options and a callback for progress.
    ///
    /// # Errors
    /// As [`Store::salvage`].
    pub fn salvage_with(
        &self,
        from: Arc<dyn Disk>,
        options: &SalvageOptions,
        progress: ProgressCallback<'_>,
    ) -> Result<SalvageReport> {
        let mut done = SalvageReport::default();
        let from = Arc::new(RepairedDisk::new(from));
        let (mut core, mut index) = open_damaged(&from, &mut done)?;
        for _ in 0..MAX_REPAIR_ROUNDS {
            if !index.repair_nodes(&from, &core.log.io) {
                break;
            }
            done.lost.clear();
            (core, index) = open_damaged(&from, &mut done)?;
        }
        if repair_end_of_log(&from, &core, &index) {
            done.lost.clear();
            (core, index) = open_damaged(&from, &mut done)?;
        }
        let io = core.log.io.clone();
        let geometry = io.geometry;
        let scanned_bytes = match index.is_damaged() {
            true => u64::from(geometry.segments).saturating_mul(geometry.segment_bytes.into()),
            false => 0,
        };
        let total = scanned_bytes.saturating_add(core.log.segments.total_live_bytes());
        let mut progress = Progress { callback: progress, done: 0, total };
        let scan = index.is_damaged().then(|| {
            FrameScan::new(&io, Some(&from), core.log.tag, &mut |bytes| progress.add(bytes))
        });
        if let Some(pages) = scan.as_ref().map(|scan| scan.unreadable_pages).filter(|it| *it > 0) {
            let text = format!("{pages} pages of {} bytes cannot be read", geometry.page_bytes);
            done.record_loss(text);
        }
        core.levels = Levels::default();
        let mut begin = Key::new();
        loop {
            let filled = index.fill(scan.as_ref(), &geometry, begin, options);
            done.from_frames = done.from_frames.saturating_add(filled.from_frames);
            if filled.left_out > 0 {
                done.record_loss(format!(
                    "{} short values may be old or removed, and were left out",
                    filled.left_out
                ));
            }
            let next = filled.window.to.clone();
            let mut work = Salvager {
                nodes: index.readable_nodes(io.clone())?,
                io: io.clone(),
                repairs: &from,
                unsure: options.unsure,
                index: &index,
                filled,
                into: self,
                group: Group::new(),
                done,
                progress: &mut progress,
            };
            work.salvage_window()?;
            work.submit()?;
            done = work.done;
            match next {
                Some(next) => begin = next,
                None => break,
            }
        }
        self.sync()?;
        done.repaired_bits = from.repaired_bits();
        progress.add(total);
        Ok(done)
    }

    /// Returns a new object with this number; later ones get larger numbers.
    fn new_object_with_id(&self, id: ObjectId) -> NewObject {
        self.reserve_object_ids_to(id);
        NewObject(id)
    }
}

/// Opens a store as far as it is readable, and reads its whole index.
fn open_damaged(
    from: &Arc<RepairedDisk>,
    done: &mut SalvageReport,
) -> Result<(Core, DamagedIndex)> {
    let (superblocks, is_made) = find_superblocks(&**from)?;
    if is_made {
        done.record_loss("all superblocks: frames told where everything is".to_owned());
    } else if let Some(superblock) = superblocks.first() {
        match load_repaired(from, superblock) {
            Ok((mut core, losses)) => {
                let is_needed = losses.iter().any(|lost| lost.is_needed);
                if is_needed {
                    let text = "commits of the log are missing; whole later ones came back";
                    done.record_loss(text.to_owned());
                }
                let index = DamagedIndex::read(&mut core, !has_lost_table(&losses), is_needed);
                return Ok((core, index));
            }
            Err(error @ Error::Corrupt { .. }) => {
                done.record_loss(format!(
                    "the checkpoint: {error}; what was removed since an older one may be there"
                ));
            }
            Err(error) => return Err(error),
        }
    }
    let mut bare = None;
    for superblock in superblocks {
        let core = empty_core(from.clone(), superblock, CACHE_BYTES)?;
        let scan = FrameScan::new(&core.log.io, Some(from), core.log.tag, &mut |_| ());
        let found = find_checkpoint(&core, &scan);
        match found.and_then(|found| load_repaired(from, &found).ok()) {
            // Superblocks that were made differ by the length of segments.
            Some((mut core, losses)) if !is_made || !has_lost_table(&losses) => {
                // Segments may have been reused since, so the log may seem to end too early.
                let index = DamagedIndex::read(&mut core, !has_lost_table(&losses), true);
                return Ok((core, index));
            }
            _ => bare = bare.or(Some(core)),
        }
    }
    done.record_loss("the whole index: what was removed may be there".to_owned());
    let core = bare.ok_or(Error::Misuse("a store without a superblock"))?;
    Ok((core, DamagedIndex::empty()))
}

/// Loads a checkpoint, and repairs flipped bits in it, in its runs, and in the tree.
fn load_repaired(
    from: &Arc<RepairedDisk>,
    superblock: &Superblock,
) -> Result<(Core, Vec<OpenDamage>)> {
    let summer = superblock.checksummer();
    for round in 0.. {
        let mut losses = vec![];
        let loaded =
            load_from_superblock(from.clone(), superblock.clone(), CACHE_BYTES, &mut losses);
        let is_last = round == MAX_REPAIR_ROUNDS;
        let is_repaired = match &loaded {
            Err(Error::Corrupt { .. }) => [Some(superblock.checkpoint), superblock.checkpoint_copy]
                .into_iter()
                .flatten()
                .any(|ptr| !is_last && from.repair_block(summer, ptr)),
            Ok(core) if !is_last && !losses.is_empty() => {
                let runs = core.levels.runs.iter().flat_map(|run| &run.chunks);
                let chunks = runs.chain(&core.checkpoints.ptrs);
                chunks.filter(|ptr| from.repair_block(summer, **ptr)).count() > 0
            }
            _ => false,
        };
        if !is_repaired {
            return loaded.map(|core| (core, losses));
        }
    }
    Err(Error::Misuse("a round behind the last"))
}

/// Changes flipped bits back in commits behind the last one that was replayed: it may have ended
/// there because of them. Returns true if the store has to be opened again.
fn repair_end_of_log(repairs: &RepairedDisk, core: &Core, index: &DamagedIndex) -> bool {
    let before = repairs.repaired_bits();
    let io = &core.log.io;
    let scan = FrameScan::new(io, Some(repairs), core.log.tag, &mut |_| ());
    scan.for_each(&mut |frame| {
        if !frame.is_valid || !index.is_newer(frame.version(0)) {
            return;
        }
        for item in frame.items() {
            if let SummaryItem::Pair(_, _, Entry::Data(data)) = item {
                repairs.repair_payload(io.summer, &data);
            }
        }
    });
    repairs.repaired_bits() > before
}

fn has_lost_table(losses: &[OpenDamage]) -> bool {
    losses.iter().any(|lost| lost.is_table)
}

/// Progress of a salvage.
struct Progress<'p> {
    callback: ProgressCallback<'p>,
    done: u64,
    total: u64,
}

impl Progress<'_> {
    fn add(&mut self, bytes: u64) {
        self.done = self.done.saturating_add(bytes).min(self.total);
        (self.callback)(self.done, self.total);
    }
}

struct Salvager<'s, 'p> {
    nodes: ReadableNodes,
    io: Arc<CachedDisk>,
    repairs: &'s RepairedDisk,
    unsure: bool,
    index: &'s DamagedIndex,
    filled: FilledWindow,
    into: &'s Store,
    group: Group,
    done: SalvageReport,
    progress: &'s mut Progress<'p>,
}

impl Salvager<'_, '_> {
    fn salvage_window(&mut self) -> Result<()> {
        let objects = (object_key(ObjectId(0)), object_key(ObjectId(u64::MAX)));
        self.copy_pairs((&objects.0, &objects.1), "objects")?;
        self.copy_objects_without_record()?;
        self.copy_pairs((&value_key(&[]), &name_key(&[])), "keys")?;
        self.copy_pairs((&name_key(&[]), NAME_KEYS_END), "names")?;
        self.report_gaps();
        Ok(())
    }

    /// Reports the gaps of the window in which something may be missing.
    fn report_gaps(&mut self) {
        if self.filled.is_complete {
            return;
        }
        for gap in self.index.gaps().filter(|gap| self.filled.window.overlaps(gap)) {
            let bound = |key: &Key| {
                if key.is_empty() { "the beginning".to_owned() } else { format_key(key) }
            };
            let to = gap.to.as_ref().map_or("the end".to_owned(), bound);
            self.done.record_loss(format!(
                "the index from {} to {to} (damaged at byte {}): {} pairs came from frames; others \
                 may be missing, or be there although they were removed",
                bound(&gap.from),
                gap.at,
                gap.filled
            ));
        }
    }

    fn copy_pairs(&mut self, bounds: (&[u8], &[u8]), what: &str) -> Result<()> {
        let view = self.filled.view.clone();
        let mut cursor = Cursor::forward(&view, &self.nodes, bounds)?;
        let mut last = "the beginning".to_owned();
        let mut is_lost = false;
        loop {
            let next = match cursor.next(&view, &self.nodes) {
                Ok(next) => next.filter(|(key, _)| key.as_slice() < bounds.1),
                Err(error) => {
                    self.done.record_loss(format!("{what} behind {last}: {error}"));
                    is_lost = true;
                    continue;
                }
            };
            let Some((key, entry)) = next else { break };
            let name = format_key(&key);
            if std::mem::take(&mut is_lost) {
                self.done.record_loss(format!("{what} up to {name}: as above"));
            }
            if let (Some(DecodedKey::Object(id)), Entry::Object(record)) =
                (decode_key(&key), &entry)
            {
                if !record.is_value {
                    self.copy_object(id, record)?;
                }
            } else if self.filled.window.contains(&window_place(&key)) {
                self.copy_pair(&key, &entry, &name)?;
            }
            last = name;
        }
        Ok(())
    }

    /// Copies a key with its value, or a name.
    fn copy_pair(&mut self, key: &Key, entry: &Entry, name: &str) -> Result<()> {
        if !self.unsure && self.filled.may_be_hidden(key) {
            self.done.record_loss(format!("{name}: it may be old or removed, and was left out"));
            return Ok(());
        }
        let value = match (decode_key(key), entry) {
            (Some(DecodedKey::Value(_)), Entry::Data(data)) => self.read_data(data),
            (Some(DecodedKey::Value(_)), Entry::Inline(value)) => Ok(value.to_vec()),
            (Some(DecodedKey::Value(_)), Entry::ValueObject(id, len)) => {
                self.read_value_object(*id, *len)
            }
            (Some(DecodedKey::Name(name)), entry) => return self.copy_name(name, entry),
            _ => return Ok(()),
        };
        match (decode_key(key), value) {
            (Some(DecodedKey::Value(key)), Ok(value)) => self.put_value(key, &value),
            (_, Err(error)) => {
                self.done.record_loss(format!("{name}: {error}"));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Copies objects that have bytes, but whose record is lost.
    fn copy_objects_without_record(&mut self) -> Result<()> {
        if !self.index.may_have_lost_objects() {
            return Ok(());
        }
        let view = self.filled.view.clone();
        let values = self.value_objects()?;
        let mut next = Some(ObjectId(0));
        while let Some(from) = next {
            let bounds = (extent_key(from, 0), value_key(&[]));
            let mut cursor = Cursor::forward(&view, &self.nodes, (&bounds.0, &bounds.1))?;
            // Damage that a cursor reports was reported before.
            let found =
                std::iter::repeat_with(|| cursor.next(&view, &self.nodes)).find_map(Result::ok);
            let Some(Some((key, _))) = found else { break };
            let Some(DecodedKey::Extent(id, _)) = decode_key(&key) else { break };
            next = id.0.checked_add(1).map(ObjectId);
            let is_there =
                view.index().object(&self.nodes, id).is_ok_and(|record| record.is_some());
            if !is_there && self.index.may_have_lost(&object_key(id)) && !values.contains(&id) {
                if self.filled.window.offsets(id).0 == 0 {
                    let text = format!("object {id}: its record; it ends with its last byte now");
                    self.done.record_loss(text);
                }
                self.copy_object(id, &ObjectRecord::new(LifetimeHint::Unknown))?;
            }
        }
        Ok(())
    }

    /// Returns the objects that hold values of keys.
    fn value_objects(&self) -> Result<HashSet<ObjectId>> {
        let view = &self.filled.view;
        let bounds = (value_key(&[]), name_key(&[]));
        let mut cursor = Cursor::forward(view, &self.nodes, (&bounds.0, &bounds.1))?;
        let mut found = HashSet::new();
        loop {
            match cursor.next(view, &self.nodes) {
                Ok(Some((_, Entry::ValueObject(id, _)))) => {
                    found.insert(id);
                }
                Ok(Some((key, _))) if key.as_slice() >= bounds.1.as_slice() => break,
                Ok(None) => break,
                _ => {}
            }
        }
        Ok(found)
    }

    /// Copies a name, after its object.
    fn copy_name(&mut self, name: &[u8], entry: &Entry) -> Result<()> {
        let Some(id) = entry.named_object() else { return Ok(()) };
        self.submit()?;
        match self.into.len(id) {
            Ok(_) => {
                self.group.set_name(name, id);
                self.done.names = self.done.names.saturating_add(1);
            }
            Err(Error::NoObject(_)) => {
                self.done
                    .record_loss(format!("name {}: object {id} is not there", name.escape_ascii()));
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn put_value(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.group.put(key, value);
        self.done.keys = self.done.keys.saturating_add(1);
        self.submit_if_full(value.len())
    }

    fn submit_if_full(&mut self, bytes: usize) -> Result<()> {
        self.done.bytes = self.done.bytes.saturating_add(bytes as u64);
        self.progress.add(bytes as u64);
        if self.group.len_bytes() >= MAX_GROUP_BYTES { self.submit() } else { Ok(()) }
    }

    fn submit(&mut self) -> Result<()> {
        let group = std::mem::take(&mut self.group);
        match self.into.submit_ref(&group, &[]) {
            // What the merge of the index left is free after a checkpoint.
            Err(Error::NoSpace { .. }) => {
                self.into.checkpoint()?;
                self.into.submit_ref(&group, &[]).map(drop)
            }
            submitted => submitted.map(drop),
        }
    }

    /// Reads a payload; if a bit of it is flipped, that is changed back.
    fn read_data(&self, data: &PayloadRef) -> Result<Vec<u8>> {
        match self.io.read_value(data) {
            Err(Error::Corrupt { .. }) if self.repairs.repair_payload(self.io.summer, data) => {
                self.io.read_value(data)
            }
            read => read,
        }
    }

    /// Returns the extents of an object within a range.
    fn extents(&self, id: ObjectId, range: (u64, u64)) -> Result<Vec<(u64, PayloadRef)>> {
        let mut parts = vec![];
        let index = self.filled.view.index();
        let _ = index.resolve_range(&self.nodes, id, range, &mut None, &mut |offset, entry| {
            if let Entry::Data(data) = entry {
                parts.push((offset, data));
            }
            ControlFlow::Continue(())
        })?;
        Ok(parts)
    }

    /// Fills `into` from byte `at` of an object; fails if any of it is unreadable.
    fn read(&self, id: ObjectId, at: u64, into: &mut [u8]) -> Result<()> {
        let parts = self.extents(id, (at, at.saturating_add(into.len() as u64)))?;
        crate::store::copy_payloads_into(at, into, parts, |data, into| {
            into.copy_from_slice(&self.read_data(data)?);
            Ok(())
        })?;
        Ok(())
    }

    /// Returns the value of a value object.
    fn read_value_object(&self, id: ObjectId, len: u64) -> Result<Vec<u8>> {
        let gone = Error::Corrupt { what: "a key whose long value is not there", at_bytes: 0 };
        match self.filled.view.index().object(&self.nodes, id)? {
            Some(record) if record.len == len => {}
            None if self.index.may_have_lost(&object_key(id)) => {}
            _ => return Err(gone),
        }
        // All bytes of a value were written, zeros too.
        let parts = self.extents(id, (0, len))?;
        let found = parts.iter().fold(0u64, |sum, (_, data)| sum.saturating_add(data.len.into()));
        if found != len {
            return Err(gone);
        }
        let mut value = crate::kv::allocate_value(len, self.io.geometry.disk_bytes)?;
        self.read(id, 0, &mut value)?;
        Ok(value)
    }

    /// Copies the part of an object that is in the window.
    fn copy_object(&mut self, id: ObjectId, record: &ObjectRecord) -> Result<()> {
        let (mut at, to) = self.filled.window.offsets(id);
        let is_begun = !self.filled.window.contains(&window_place(&object_key(id)));
        let mut len = record.len;
        if self.index.may_have_lost(&object_key(id)) {
            // A newer record, of a longer object, may be lost.
            let last = self.extents(id, (0, u64::MAX))?.pop();
            let end = last.map_or(0, |(at, data)| at.saturating_add(data.len.into()));
            len = len.max(end);
        }
        if len == u64::MAX || at >= to && is_begun {
            return Ok(());
        }
        if !is_begun {
            if self.filled.may_be_hidden(&object_key(id)) {
                self.done.record_loss(format!("object {id}: it may be old or removed"));
            }
            self.create_object(id, record)?;
        }
        if !is_begun || record.len < len {
            self.submit()?;
            self.group.truncate(id, len);
        }
        let end = len.min(to);
        self.report_unknown_ranges(id, (at, end))?;
        // After the last extent there is only a hole.
        while let Some((first, part_len, is_zeros)) = self.next_extent(id, at, end)? {
            at = first;
            if is_zeros {
                self.group.punch_hole(id, at, part_len);
                self.submit_if_full(0)?;
                at = at.saturating_add(part_len);
                continue;
            }
            // Of a child only its own extents are copied.
            let together = if record.parent.is_some() { part_len } else { OBJECT_READ_BYTES };
            let end = at.saturating_add(together).min(end);
            let mut bytes = vec![0; crate::codec::to_usize_saturating(end.saturating_sub(at))];
            match self.read(id, at, &mut bytes) {
                Ok(()) => {
                    self.group.write(id, at, &bytes);
                    self.submit_if_full(bytes.len())?;
                }
                Err(_) => self.copy_blocks(id, at, end)?,
            }
            at = end;
        }
        Ok(())
    }

    /// Creates an object; its parent has a smaller number, and was copied before.
    fn create_object(&mut self, id: ObjectId, record: &ObjectRecord) -> Result<()> {
        self.submit()?;
        // Numbers may skip: nothing else creates objects meanwhile.
        let new = self.into.new_object_with_id(id);
        match record.parent {
            Some(parent) if self.into.object_record(parent)?.is_some() => {
                self.group.fork(new, parent);
            }
            parent => {
                if let Some(parent) = parent {
                    let text = format!("object {id}: what it shared with object {parent}");
                    self.done.record_loss(format!("{text}, which is not there, is zeros now"));
                }
                self.group.create(new, LifetimeHint::Unknown);
            }
        }
        self.done.objects = self.done.objects.saturating_add(1);
        Ok(())
    }

    /// Reports the ranges of an object whose index is lost and that no frame has.
    fn report_unknown_ranges(&mut self, id: ObjectId, (from, to): (u64, u64)) -> Result<()> {
        if self.filled.is_complete {
            return Ok(());
        }
        let gaps: Vec<(u64, u64, u64)> = self
            .index
            .gaps()
            .map(|gap| (gap.offsets(id), gap.at))
            .map(|((a, b), at)| (a.max(from), b.min(to), at))
            .filter(|(a, b, _)| a < b)
            .collect();
        for (a, b) in self.filled.outdated_ranges(id).collect::<Vec<_>>() {
            let (from, to) = (a.max(from), b.min(to));
            if from < to {
                let text = format!("object {id}: bytes {from} to {to} may be older than the last");
                self.done.record_loss(text);
            }
        }
        for (from, to, at_bytes) in gaps {
            let mut done = from;
            let mut extents = self.extents(id, (from, to))?;
            extents.push((
                to,
                PayloadRef { at: 0, stored: 0, skip: 0, len: 0, sums: smallvec::smallvec![] },
            ));
            for (at, data) in extents {
                if at > done {
                    let error = Error::Corrupt { what: "their index", at_bytes };
                    self.record_lost_range(id, (done, at, error));
                }
                done = at.saturating_add(data.len.into());
            }
        }
        Ok(())
    }

    /// Returns the next extent of an object before `to`: its offset, its length, and true if it is
    /// zeros.
    fn next_extent(&self, id: ObjectId, from: u64, to: u64) -> Result<Option<(u64, u64, bool)>> {
        let mut found = None;
        let index = self.filled.view.index();
        let _ = index.resolve_range(&self.nodes, id, (from, to), &mut None, &mut |at, entry| {
            found = Some((at, entry.covered_bytes(), !matches!(entry, Entry::Data(_))));
            ControlFlow::Break(())
        })?;
        Ok(found)
    }

    /// Copies a range of an object block by block, as far as they are readable.
    fn copy_blocks(&mut self, id: ObjectId, from: u64, to: u64) -> Result<()> {
        let piece = u64::from(CHECKSUM_BLOCK_BYTES);
        let mut lost: Option<(u64, u64, Error)> = None;
        let mut at = from;
        while at < to {
            let end = at.saturating_add(1).next_multiple_of(piece).min(to);
            let mut bytes = vec![0; crate::codec::to_usize_saturating(end.saturating_sub(at))];
            match self.read(id, at, &mut bytes) {
                Ok(()) => {
                    self.group.write(id, at, &bytes);
                    self.submit_if_full(bytes.len())?;
                }
                Err(error) => match &mut lost {
                    Some((_, behind, _)) if *behind == at => *behind = end,
                    _ => {
                        if let Some(before) = lost.replace((at, end, error)) {
                            self.record_lost_range(id, before);
                        }
                    }
                },
            }
            at = end;
        }
        if let Some(lost) = lost {
            self.record_lost_range(id, lost);
        }
        Ok(())
    }

    fn record_lost_range(&mut self, id: ObjectId, (from, to, error): (u64, u64, Error)) {
        self.done.record_loss(format!("object {id}: bytes {from} to {to} are zeros now: {error}"));
    }
}

fn format_key(key: &Key) -> String {
    match decode_key(key) {
        Some(DecodedKey::Object(id)) => format!("object {id}"),
        Some(DecodedKey::Value(key)) => format!("key {}", key.escape_ascii()),
        Some(DecodedKey::Name(name)) => format!("name {}", name.escape_ascii()),
        _ => "something else".to_owned(),
    }
}
