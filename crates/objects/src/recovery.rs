//! Opening a store, after whatever happened to it.
//!
//! ```text
//!   superblock ─▶ checkpoint ─▶ runs, image ─▶ the log behind it, commit by commit
//! ```
//!
//! Damage costs what it is in: a reader goes without the parts of runs that cannot be read, and
//! of the checkpoint there are two copies. A writer would lose more by building on that.
//!
//! What is read: the checkpoint, and at most the log since it; nothing of the tree.
//!
//! Law 1: commits count as long as none is missing. What is behind a hole was never
//! acknowledged, unless a frame says that it was durable: then the disk lost it, and that is
//! an error, not a shorter store.
//! Law 2: what may have holes is verified, payloads too.
//! Law 3: before anything else is written a new incarnation is durable, which no one who
//! tried to open the store before had: what is left of lost commits, and of lost attempts to
//! open, can never be taken for new ones.

pub(crate) mod blob;
pub(crate) mod checkpoint;
mod resize;
pub(crate) mod salvage;
pub(crate) mod superblock;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use draconis_device::Disk;

use crate::codec::{index, low_half, narrow};
use crate::core::Core;
use crate::entry::{Entry, Key, Named, named};
use crate::hooks::{Omission, is_left_out};
use crate::index::Levels;
use crate::index::layer::{Active, Layer, Lost, weight};
use crate::index::merge::merge_pairs;
use crate::index::run::{Run, read_chunk};
use crate::index::tree::{Child, Ptr, Tree};
use crate::io::Io;
use crate::layout::{Site, layout};
use crate::log::frame::{HEADER, Header, missing};
use crate::log::table::{Item, Items};
use crate::log::{Log, Place, Stream};
use crate::recovery::blob::Blob;
use crate::recovery::checkpoint::Checkpoints;
use crate::recovery::superblock::{Geometry, Superblock, wipe};
use crate::space::segment::Segments;
use crate::store::{CreateOptions, OpenOptions};
use crate::{Error, Result};

/// How far behind a hole frames are looked for that say it should not be there.
const LOOK_BYTES: u32 = 1 << 20;

/// Segments in which they are looked for where a whole segment may be lost.
const LOOK_SEGMENTS: usize = 8;

/// A frame of the log.
struct Found {
    header: Header,
    stream: usize,
    segment: u32,
    table: Vec<u8>,
}

impl Found {
    fn items(&self) -> Items<'_> {
        Items::new(&self.table, self.header.at, self.header.table_at)
    }
}

/// An empty core over a disk; everything in it is to be filled in.
fn empty_core(disk: Arc<dyn Disk>, superblock: Superblock, cache_bytes: u64) -> Result<Core> {
    let geometry = superblock.geometry;
    let profile = superblock.profile;
    let summer = superblock.summer();
    let capacity = u64::from(geometry.segments).saturating_mul(u64::from(geometry.segment_bytes));
    let site = Site {
        page_bytes: profile.page_bytes,
        segment_bytes: profile.segment_bytes,
        capacity_bytes: capacity,
    };
    let layout = layout(profile.layout, &site)?;
    let io = Io::new(disk, geometry, summer, cache_bytes);
    let mut log = Log::new(io, layout, low_half(crate::codec::mix(summer.0)));
    log.incarnation = superblock.incarnation;
    let levels = Levels { merge_pairs: merge_pairs(capacity, cache_bytes), ..Levels::default() };
    Ok(Core::new(log, levels, Checkpoints::new(superblock)))
}

/// Makes an empty store.
pub(crate) fn create(disk: Arc<dyn Disk>, options: &CreateOptions) -> Result<()> {
    let properties = disk.properties();
    let profile = options.profile;
    if profile.page_bytes < properties.sector_bytes {
        return Err(Error::Misuse("a page is at least one sector of the disk"));
    }
    let geometry = Geometry::of(&profile, properties.len_bytes)?;
    let superblock = Superblock {
        id: options.id,
        generation: 0,
        incarnation: 1,
        log_incarnation: 1,
        profile,
        geometry,
        checkpoint: Ptr { at: 0, len: 0, sum: 0 },
        twin: None,
    };
    // A layout that does not fit is refused before anything is written.
    let mut core = empty_core(disk.clone(), superblock, 1 << 20)?;
    // What was there must not be found if this ends before its time.
    let group = draconis_device::Group { writes: wipe(&*disk) };
    if !group.writes.is_empty() && !is_left_out(Omission::Wipe) {
        let ticket = disk.submit(group, &[]).map_err(|refused| Error::Device(refused.error))?;
        disk.wait(ticket)?;
    }
    for _ in 0..core.log.layout.streams() {
        let places = core.log.segments.take(0).zip(core.log.segments.take(0));
        let (segment, next) = places.ok_or(Error::Misuse("the disk is too small for a store"))?;
        core.log.streams.push(Stream::at((segment, 0, next)));
    }
    core.write_image()
}

/// Opens a store; writes nothing if that is asked for.
pub(crate) fn open(disk: Arc<dyn Disk>, options: &OpenOptions) -> Result<Core> {
    let mut lost = vec![];
    let core = open_what_is_left(disk, options, &mut lost)?;
    lost.retain(|lost| lost.is_needed || !options.read_only);
    lost.into_iter().next().map_or(Ok(core), |lost| Err(lost.error))
}

/// Something that could not be read while a store was opened.
#[derive(Clone, Debug)]
pub(crate) struct Loss {
    pub error: Error,
    /// Whether readers cannot know what is missing.
    pub is_needed: bool,
}

/// Opens a store as far as it can be read; writes nothing if that is asked for, or if something
/// was lost.
pub(crate) fn open_what_is_left(
    disk: Arc<dyn Disk>,
    options: &OpenOptions,
    lost: &mut Vec<Loss>,
) -> Result<Core> {
    let (superblock, agree) = Superblock::find(&*disk)?;
    if agree < 2 {
        log::warn!("only {agree} of four superblocks is the newest");
    }
    let mut core = empty_core(disk, superblock, options.cache_bytes)?;
    let blob = read_blob(&core)?;
    load(&mut core, &blob, lost)?;
    match replay(&mut core, &blob) {
        Ok(()) => {}
        Err(error @ Error::Corrupt { .. }) => lost.push(Loss { error, is_needed: true }),
        Err(error) => return Err(error),
    }
    core.levels.refresh();
    if options.read_only || !lost.is_empty() {
        core.stopped = Some(Error::Misuse("the store is open for reading only"));
        return Ok(core);
    }
    if !is_left_out(Omission::Incarnation) {
        core.checkpoints.superblock.incarnation =
            core.checkpoints.superblock.incarnation.saturating_add(1);
        let ticket = core.checkpoints.write_superblock(&mut core.log)?;
        core.log.io.disk.wait(ticket)?;
    }
    core.checkpoints.superblock.log_incarnation = core.checkpoints.superblock.incarnation;
    core.log.incarnation = core.checkpoints.superblock.incarnation;
    core.write_image()?;
    Ok(core)
}

/// What the checkpoint says, by one of its copies.
fn read_blob(core: &Core) -> Result<Blob> {
    let read = |ptr: Ptr| Blob::decode(&core.log.io.read_ptr(ptr)?, ptr.at);
    let Superblock { checkpoint, twin, .. } = core.checkpoints.superblock;
    read(checkpoint).or_else(|error| {
        log::warn!("the checkpoint's first copy: {error}");
        read(twin.ok_or(error)?)
    })
}

fn read_layer(core: &Core, chunks: &[Ptr], losses: &mut Vec<Loss>) -> Result<Layer> {
    let mut pairs: Vec<(Key, Entry)> = vec![];
    let mut lost: Vec<Lost> = vec![];
    for chunk in chunks {
        let before = pairs.len();
        let read =
            core.log.io.read_ptr(*chunk).and_then(|bytes| read_chunk(&bytes, chunk.at, &mut pairs));
        match read {
            Ok(()) => {
                let first = pairs.get(before).map(|(key, _)| key.clone());
                let open = lost.iter_mut().filter(|lost| lost.before.is_none());
                open.for_each(|lost| lost.before.clone_from(&first));
            }
            Err(error) => {
                pairs.truncate(before);
                let behind = pairs.last().map(|(key, _)| key.clone()).unwrap_or_default();
                lost.push(Lost { behind, before: None, at: chunk.at });
                losses.push(Loss { error, is_needed: false });
            }
        }
    }
    let bytes = pairs.iter().map(|(key, entry)| weight(key, entry)).sum();
    Ok(Layer::without(pairs, bytes, lost))
}

fn read_table(core: &Core, blob: &Blob) -> Result<Segments> {
    let mut table = vec![];
    for chunk in &blob.table {
        table.extend(core.log.io.read_ptr(*chunk)?);
    }
    Segments::decode(
        core.checkpoints.superblock.geometry,
        &table,
        core.checkpoints.superblock.checkpoint.at,
    )
}

fn load(core: &mut Core, blob: &Blob, lost: &mut Vec<Loss>) -> Result<()> {
    let checkpoint = core.checkpoints.superblock.checkpoint;
    match read_table(core, blob) {
        Ok(table) => core.log.segments = table,
        // Readers do without.
        Err(error) => lost.push(Loss { error, is_needed: false }),
    }
    // The table was written before itself.
    let copies =
        [vec![checkpoint], core.checkpoints.superblock.twin.into_iter().collect()].concat();
    core.checkpoints.ptrs = [blob.table.clone(), copies.clone(), blob.image.clone()].concat();
    for ptr in [blob.table.clone(), copies].concat() {
        core.log.segments.add(ptr.at, ptr.len, blob.clock, false);
    }
    let before = lost.len();
    for chunks in &blob.runs {
        let layer = Some(Arc::new(read_layer(core, chunks, lost)?));
        core.levels.runs.push(Run { layer, chunks: chunks.clone() });
        // What a part hid that is lost must not be seen: then each stays as it is.
        if lost.len() == before {
            core.levels.fold_runs();
        }
    }
    let mut image = read_layer(core, &blob.image, lost)?;
    if !image.lost.is_empty() {
        let lost = std::mem::take(&mut image.lost);
        core.levels.log_layers.push(Arc::new(Layer::without(vec![], 0, lost)));
    }
    core.levels.active = Active { map: image.pairs.into_iter().collect(), bytes: image.bytes };
    core.levels.tree = Tree { root: blob.root.map(Child::Disk) };
    (core.log.clock, core.next_id, core.links) = (blob.clock, blob.next_id.max(1), blob.links);
    if blob.places.len() != core.log.layout.streams() {
        return Err(Error::Corrupt { what: "the number of streams", at_bytes: checkpoint.at });
    }
    let geometry = core.checkpoints.superblock.geometry;
    for &(segment, pos, next) in &blob.places {
        if segment >= geometry.segments || next >= geometry.segments || pos > geometry.segment_bytes
        {
            return Err(Error::Corrupt { what: "where a stream stood", at_bytes: checkpoint.at });
        }
        core.log.segments.reopen(segment);
        core.log.segments.reopen(next);
        core.log.streams.push(Stream::at((segment, pos, next)));
    }
    core.log.batch.seq = blob.seq.saturating_add(1);
    Ok(())
}

/// Reads the frames of one stream from where the checkpoint left it.
fn scan(core: &Core, stream: usize, place: Place, out: &mut Vec<Found>) -> Result<u64> {
    let geometry = core.checkpoints.superblock.geometry;
    let (mut segment, mut pos, mut next) = place;
    let read_bytes = core.log.layout.log_read_bytes();
    let mut seq = core.log.batch.seq;
    let mut durable = 0;
    // A stream cannot go through more segments than there are.
    for _ in 0..=geometry.segments {
        let start = geometry.start_of(segment);
        let mut window: Option<(u32, draconis_exchange::heap::Private)> = None;
        let before = out.len();
        while pos < geometry.segment_bytes {
            let Some((header, table)) = frame_at(core, start, pos, read_bytes, &mut window)? else {
                break;
            };
            if header.seq < seq || header.next_segment >= geometry.segments {
                break;
            }
            seq = header.seq;
            durable = durable.max(header.durable);
            next = header.next_segment;
            pos = pos.saturating_add(header.len);
            out.push(Found { header, stream, segment, table });
        }
        // Something behind the hole may know that it should not be one.
        let reach = narrow((LOOK_BYTES as usize).max(core.log.layout.frame_bytes()) as u64);
        let reach = reach.saturating_add(geometry.page_bytes.saturating_mul(2));
        let end = pos.saturating_add(reach).min(geometry.segment_bytes);
        let mut look = pos.saturating_add(geometry.page_bytes);
        while look < end {
            if let Some((header, _)) = frame_at(core, start, look, read_bytes, &mut window)?
                && header.seq >= seq
            {
                durable = durable.max(header.durable);
            }
            look = look.saturating_add(geometry.page_bytes);
        }
        if out.len() == before && pos == 0 {
            // A frame that was all of its segment took the link to the next one with it. Where
            // the stream most likely went is known: to what was free behind it.
            for next in core.log.segments.free_behind(segment).take(LOOK_SEGMENTS) {
                let header = frame_at(core, geometry.start_of(next), 0, 0, &mut None)?;
                let later = header.map(|(header, _)| header).filter(|header| header.seq >= seq);
                durable = durable.max(later.map_or(0, |header| header.durable));
            }
            break;
        }
        (segment, pos) = (next, 0);
    }
    Ok(durable)
}

/// The frame at a place, if a whole one of this incarnation is there.
fn frame_at(
    core: &Core,
    start: u64,
    pos: u32,
    read_bytes: usize,
    window: &mut Option<(u32, draconis_exchange::heap::Private)>,
) -> Result<Option<(Header, Vec<u8>)>> {
    let geometry = core.checkpoints.superblock.geometry;
    let at = start.saturating_add(u64::from(pos));
    let room = geometry.segment_bytes.saturating_sub(pos) as usize;
    let mut wanted = (geometry.page_bytes as usize).max(HEADER);
    for _ in 0..2 {
        let is_held = window.as_ref().is_some_and(|(from, bytes)| {
            let skip = pos.checked_sub(*from);
            skip.is_some_and(|skip| bytes.len() >= (skip as usize).saturating_add(wanted.min(room)))
        });
        if !is_held {
            let len =
                wanted.max(read_bytes).min(room).next_multiple_of(geometry.page_bytes as usize);
            *window = Some((pos, core.log.io.direct(at, len)?));
        }
        let Some((from, bytes)) = window.as_ref() else { return Ok(None) };
        let bytes = bytes.get(pos.saturating_sub(*from) as usize..).unwrap_or_default();
        let Some(header) = Header::peek(bytes, at, core.log.tag, room as u64) else {
            return Ok(None);
        };
        let is_ours = header.incarnation == core.checkpoints.superblock.log_incarnation
            && (header.len).is_multiple_of(geometry.page_bytes);
        if !is_ours {
            return Ok(None);
        }
        let end = header.table_at.saturating_add(header.table_len) as usize;
        let Some(table) = bytes.get(header.table_at as usize..end) else {
            wanted = end;
            continue;
        };
        return Ok(header
            .is_whole(bytes, table, core.log.io.summer)
            .then(|| (header, table.to_vec())));
    }
    Ok(None)
}

/// Whether every payload of a frame is what it was.
fn has_payloads(core: &Core, found: &Found) -> Result<bool> {
    let page = core.checkpoints.superblock.geometry.page_bytes as usize;
    let bytes =
        core.log.io.direct(found.header.at, (found.header.len as usize).next_multiple_of(page))?;
    for item in found.items() {
        let Ok(item) = item else { return Ok(false) };
        if let Item::Pair(_, _, Entry::Data(data)) = item {
            let within = data
                .at
                .checked_sub(found.header.at)
                .and_then(|from| bytes.get(index(from)..)?.get(..data.stored as usize));
            let Some(stored) = within else { return Ok(false) };
            if core.log.io.verify(&data, stored).is_err() {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

fn replay(core: &mut Core, blob: &Blob) -> Result<()> {
    let mut found: Vec<Found> = vec![];
    let mut durable = blob.own_seq;
    for (stream, place) in blob.places.iter().enumerate() {
        durable = durable.max(scan(core, stream, *place, &mut found)?);
    }
    let mut commits: BTreeMap<u64, Vec<Found>> = BTreeMap::new();
    for frame in found {
        if frame.header.seq > blob.seq {
            commits.entry(frame.header.seq).or_default().push(frame);
        }
    }
    let mut seq = blob.seq;
    while let Some(mut frames) =
        commits.remove(&seq.saturating_add(1)).or_else(|| behind_a_gap(&mut commits))
    {
        frames.sort_by_key(|frame| frame.header.part);
        let is_numbered = frames.iter().zip(0..).all(|(frame, part)| frame.header.part == part);
        let is_ended = frames.last().is_some_and(|frame| frame.header.is_last);
        if (!is_numbered || !is_ended) && !is_left_out(Omission::WholeCommits) {
            break;
        }
        if seq >= durable && !is_left_out(Omission::VerifiedReplay) {
            let mut is_whole = true;
            for frame in &frames {
                is_whole &= has_payloads(core, frame)?;
            }
            if !is_whole {
                break;
            }
        }
        accept(core, frames)?;
        seq = seq.saturating_add(1);
    }
    if seq < durable {
        let at = commits.values().flatten().map(|frame| frame.header.at).next();
        return Err(missing(at.unwrap_or(core.checkpoints.superblock.checkpoint.at)));
    }
    core.log.batch.seq = seq.saturating_add(1);
    core.log.sent.found(seq);
    // What nothing leads to, and no stream stands in, is free.
    let standing: HashSet<u32> =
        core.log.streams.iter().flat_map(|stream| [stream.segment, stream.next]).collect();
    for number in 0..core.checkpoints.superblock.geometry.segments {
        let Some(segment) = core.log.segments.all.get(number as usize) else { continue };
        if segment.live == 0
            && !standing.contains(&number)
            && segment.state != crate::space::segment::State::Free
        {
            core.log.segments.release(number);
        } else if standing.contains(&number) {
            core.log.segments.reopen(number);
        }
    }
    Ok(())
}

/// The next commit, if the one before it may be missing.
fn behind_a_gap(commits: &mut BTreeMap<u64, Vec<Found>>) -> Option<Vec<Found>> {
    is_left_out(Omission::NoGaps).then(|| commits.pop_first())?.map(|(_, frames)| frames)
}

fn accept(core: &mut Core, frames: Vec<Found>) -> Result<()> {
    let mut pairs: Vec<(u64, Key, Entry)> = vec![];
    for frame in &frames {
        for item in frame.items() {
            if let Item::Pair(order, key, entry) = item? {
                pairs.push((order, key, entry));
            }
        }
        let Some(stream) = core.log.streams.get_mut(frame.stream) else { continue };
        if stream.segment != frame.segment {
            core.log.segments.close(stream.segment, core.log.clock);
            core.log.segments.reopen(frame.segment);
            stream.segment = frame.segment;
        }
        let begin = core.checkpoints.superblock.geometry.start_of(frame.segment);
        let within = narrow(frame.header.at.saturating_sub(begin));
        stream.pos = within.saturating_add(frame.header.len);
        stream.next = frame.header.next_segment;
        core.log.segments.reopen(stream.next);
        let (end, seq) = (stream.pos, frame.header.seq);
        core.log.segments.set(frame.segment, |segment| {
            (segment.used, segment.last_seq) = (segment.used.max(end), seq);
        });
    }
    pairs.sort_by_key(|(order, ..)| *order);
    for (_, key, entry) in pairs {
        if let Entry::Data(data) = &entry {
            core.log.clock = core.log.clock.saturating_add(u64::from(data.stored));
            core.log.segments.add(data.at, data.stored, core.log.clock, true);
        }
        match (named(&key), &entry) {
            (Some(Named::Object(id)), Entry::Object(_)) => {
                core.next_id = core.next_id.max(id.0.saturating_add(1))
            }
            (_, Entry::Link(..)) => core.links = core.links.saturating_add(1),
            _ => {}
        }
        core.levels.set(&mut core.log.segments, key, entry);
    }
    Ok(())
}
