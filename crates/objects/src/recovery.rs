//! Opening a store, after any crash.
//!
//! ```text
//!   superblock ─▶ checkpoint ─▶ runs, image ─▶ the log behind it, commit by commit
//! ```
//!
//! Damage affects only the items in it. Readers go without unreadable chunks of runs, and the
//! checkpoint has two copies. Writers are refused, because building on damage would lose more.
//!
//! Opening reads the checkpoint and at most the log since it; nothing of the tree.
//!
//! Law: before anything else is written, a new incarnation is durable, which no earlier attempt to
//! open the store had. Remains of lost commits, and of lost attempts to open, never pass for new
//! ones.

mod block_reads;
pub(crate) mod follow;
mod replay;

use std::sync::Arc;

use draconis_device::Disk;

use self::block_reads::BlockReads;
use self::replay::replay;

use crate::cached_disk::CachedDisk;
use crate::checkpoint_record::CheckpointRecord;
use crate::codec::low_u32;
use crate::core::Core;
use crate::core::checkpoint::Checkpoints;
use crate::entry::{Entry, Key};
use crate::index::memtable::{ImmutableMemtable, Memtable, UnreadableRange, weight};
use crate::index::tree::{BlockPtr, Child, Tree};
use crate::layout::{StoreDimensions, construct_layout};
use crate::levels::Levels;
use crate::levels::merge::merge_pairs;
use crate::levels::run::{SortedRun, read_chunk};
use crate::log::{LogWriter, Stream};
use crate::options::{CreateOptions, OpenOptions};
use crate::segment_table::SegmentTable;
use crate::superblock::{Geometry, Superblock, wipe_writes};
use crate::test_hooks::{InjectedFault, is_fault_injected};
use crate::{Error, Result};

/// Creates an empty state over a disk, to be filled in.
pub(crate) fn empty_core(
    disk: Arc<dyn Disk>,
    superblock: Superblock,
    cache_bytes: u64,
) -> Result<Core> {
    let io = CachedDisk::new(disk, superblock.geometry, superblock.checksummer(), cache_bytes);
    empty_core_over(Arc::new(io), superblock, cache_bytes)
}

/// Creates an empty state over a disk with its cache.
fn empty_core_over(io: Arc<CachedDisk>, superblock: Superblock, cache_bytes: u64) -> Result<Core> {
    let geometry = superblock.geometry;
    let profile = superblock.profile;
    let summer = superblock.checksummer();
    let capacity = u64::from(geometry.segments).saturating_mul(u64::from(geometry.segment_bytes));
    let site = StoreDimensions {
        page_bytes: profile.page_bytes,
        segment_bytes: profile.segment_bytes,
        capacity_bytes: capacity,
    };
    let layout = construct_layout(profile.layout, &site)?;
    let mut log = LogWriter::new(io, layout, low_u32(crate::codec::mix_bits(summer.0)));
    log.incarnation = superblock.incarnation;
    let levels = Levels { merge_pairs: merge_pairs(capacity, cache_bytes), ..Levels::default() };
    Ok(Core::new(log, levels, Checkpoints::new(superblock)))
}

/// Creates an empty store.
pub(crate) fn create(disk: Arc<dyn Disk>, options: &CreateOptions) -> Result<()> {
    let properties = disk.properties();
    let profile = options.profile;
    if profile.page_bytes < properties.sector_bytes {
        return Err(Error::Misuse("a page is at least one sector of the disk"));
    }
    let geometry = Geometry::for_disk(&profile, properties.len_bytes)?;
    let superblock = Superblock {
        id: options.id,
        generation: 0,
        incarnation: 1,
        log_incarnation: 1,
        profile,
        geometry,
        checkpoint: BlockPtr { at: 0, len: 0, sum: 0 },
        checkpoint_copy: None,
    };
    // A layout that does not fit is refused before anything is written.
    let mut core = empty_core(disk.clone(), superblock, 1 << 20)?;
    // An earlier store must not be found if a crash interrupts this.
    let group = draconis_device::Group { writes: wipe_writes(&*disk) };
    if !group.writes.is_empty() && !is_fault_injected(InjectedFault::Wipe) {
        let ticket = disk.submit(group, &[]).map_err(|refused| Error::Device(refused.error))?;
        disk.wait_durable(ticket)?;
    }
    for _ in 0..core.log.layout.streams() {
        let places =
            core.log.segments.open_free_segment(0).zip(core.log.segments.open_free_segment(0));
        let (segment, next) = places.ok_or(Error::Misuse("the disk is too small for a store"))?;
        core.log.streams.push(Stream::at_position((segment, 0, next)));
    }
    core.write_replayed_image()
}

/// Opens a store; a read-only opening writes nothing.
pub(crate) fn open(disk: Arc<dyn Disk>, options: &OpenOptions) -> Result<Core> {
    if options.read_only {
        return follow::open(&disk, options.cache_bytes);
    }
    let mut lost = vec![];
    let core = open_degraded(disk, options, &mut lost)?;
    lost.into_iter().next().map_or(Ok(core), |lost| Err(lost.error))
}

/// Damage found while a store was opened.
#[derive(Clone, Debug)]
pub(crate) struct OpenDamage {
    pub error: Error,
    /// True if readers cannot know what is missing: commits of the log.
    pub is_needed: bool,
    /// True if it is the table of segments.
    pub is_table: bool,
}

/// Opens a store as far as it is readable. Writes nothing if it is opened read-only or damaged.
pub(crate) fn open_degraded(
    disk: Arc<dyn Disk>,
    options: &OpenOptions,
    lost: &mut Vec<OpenDamage>,
) -> Result<Core> {
    let (superblock, agree) = Superblock::find_newest(&*disk)?;
    let newest = agree.iter().filter(|is_newest| **is_newest).count();
    if newest < 2 {
        log::warn!("only {newest} of four superblocks is the newest");
    }
    let mut core = load_from_superblock(disk, superblock, options.cache_bytes, lost)?;
    if options.read_only || !lost.is_empty() {
        core.stopped = Some(Error::Misuse("the store is open for reading only"));
        return Ok(core);
    }
    if newest < agree.len() {
        // A crash came between the copies: all must be equal before there is a newer one.
        let ticket = core.checkpoints.write_superblock_copies(&mut core.log, [1, 0])?;
        core.log.io.disk.wait_durable(ticket)?;
    }
    if !is_fault_injected(InjectedFault::Incarnation) {
        core.checkpoints.superblock.incarnation =
            core.checkpoints.superblock.incarnation.saturating_add(1);
        let ticket = core.checkpoints.write_superblock(&mut core.log)?;
        core.log.io.disk.wait_durable(ticket)?;
    }
    core.checkpoints.superblock.log_incarnation = core.checkpoints.superblock.incarnation;
    core.log.incarnation = core.checkpoints.superblock.incarnation;
    core.write_replayed_image()?;
    Ok(core)
}

/// Loads the checkpoint of a superblock and replays the log, as far as they are readable. Writes
/// nothing.
pub(crate) fn load_from_superblock(
    disk: Arc<dyn Disk>,
    superblock: Superblock,
    cache_bytes: u64,
    lost: &mut Vec<OpenDamage>,
) -> Result<Core> {
    load_state(empty_core(disk, superblock, cache_bytes)?, None, lost).map(|(core, _)| core)
}

/// Loads the checkpoint into an empty state, and replays the log; for `floor` see [`replay()`].
/// Returns also the newest commit that the log declares durable.
fn load_state(
    mut core: Core,
    floor: Option<u64>,
    lost: &mut Vec<OpenDamage>,
) -> Result<(Core, u64)> {
    let blob = read_checkpoint_record(&core)?;
    load_checkpoint(&mut core, &blob, lost)?;
    let (gap, durable) = match replay(&mut core, &blob, floor) {
        Ok(end) => (end.gap, end.durable),
        Err(error @ Error::Corrupt { .. }) => (Some(error), 0),
        Err(error) => return Err(error),
    };
    lost.extend(gap.map(|error| OpenDamage { error, is_needed: true, is_table: false }));
    core.levels.publish_view();
    Ok((core, durable))
}

/// Reads the checkpoint record, from one of its copies.
fn read_checkpoint_record(core: &Core) -> Result<CheckpointRecord> {
    let read = |ptr: BlockPtr| CheckpointRecord::decode(&core.log.io.read_block(ptr)?, ptr.at);
    let Superblock { checkpoint, checkpoint_copy, .. } = core.checkpoints.superblock;
    read(checkpoint).or_else(|error| {
        log::warn!("the checkpoint's first copy: {error}");
        read(checkpoint_copy.ok_or(error)?)
    })
}

fn read_memtable_image(
    reads: &mut BlockReads<'_>,
    chunks: &[BlockPtr],
    losses: &mut Vec<OpenDamage>,
) -> Result<ImmutableMemtable> {
    let mut pairs: Vec<(Key, Entry)> = vec![];
    let mut lost: Vec<UnreadableRange> = vec![];
    for chunk in chunks {
        let before = pairs.len();
        let read = reads.take(*chunk).and_then(|bytes| read_chunk(&bytes, chunk.at, &mut pairs));
        match read {
            Ok(()) => {
                let first = pairs.get(before).map(|(key, _)| key.clone());
                let open = lost.iter_mut().filter(|lost| lost.before.is_none());
                open.for_each(|lost| lost.before.clone_from(&first));
            }
            Err(error) => {
                pairs.truncate(before);
                let behind = pairs.last().map(|(key, _)| key.clone()).unwrap_or_default();
                lost.push(UnreadableRange { after: behind, before: None, at: chunk.at });
                losses.push(OpenDamage { error, is_needed: false, is_table: false });
            }
        }
    }
    let bytes = pairs.iter().map(|(key, entry)| weight(key, entry)).sum();
    Ok(ImmutableMemtable::with_unreadable_ranges(pairs, bytes, lost))
}

fn read_segment_table(
    core: &Core,
    reads: &mut BlockReads<'_>,
    blob: &CheckpointRecord,
) -> Result<SegmentTable> {
    let mut table = vec![];
    for chunk in &blob.table {
        table.extend(reads.take(*chunk)?);
    }
    SegmentTable::decode(
        core.checkpoints.superblock.geometry,
        &table,
        core.checkpoints.superblock.checkpoint.at,
    )
}

fn load_checkpoint(
    core: &mut Core,
    blob: &CheckpointRecord,
    lost: &mut Vec<OpenDamage>,
) -> Result<()> {
    let checkpoint = core.checkpoints.superblock.checkpoint;
    let io = core.log.io.clone();
    let blocks = blob.table.iter().chain(blob.runs.iter().flatten()).chain(&blob.replayed_log);
    let mut reads = BlockReads::new(&io, blocks.copied());
    match read_segment_table(core, &mut reads, blob) {
        Ok(table) => core.log.segments = table,
        // Readers do without.
        Err(error) => lost.push(OpenDamage { error, is_needed: false, is_table: true }),
    }
    // The segment table was encoded before its own chunks were stored.
    let copies =
        [vec![checkpoint], core.checkpoints.superblock.checkpoint_copy.into_iter().collect()]
            .concat();
    core.checkpoints.ptrs =
        [blob.table.clone(), copies.clone(), blob.replayed_log.clone()].concat();
    for ptr in [blob.table.clone(), copies].concat() {
        core.log.segments.add_live(ptr.at, ptr.len, blob.clock, false);
    }
    let before = lost.len();
    for chunks in &blob.runs {
        let layer = Some(Arc::new(read_memtable_image(&mut reads, chunks, lost)?));
        core.levels.runs.push(SortedRun { layer, chunks: chunks.clone() });
        // An unreadable chunk may have hidden older entries: then the memtables stay separate.
        if lost.len() == before {
            core.levels.merge_loaded_runs();
        }
    }
    let mut image = read_memtable_image(&mut reads, &blob.replayed_log, lost)?;
    if !image.lost.is_empty() {
        let lost = std::mem::take(&mut image.lost);
        core.levels.sealed_memtables.push(Arc::new(ImmutableMemtable::with_unreadable_ranges(
            vec![],
            0,
            lost,
        )));
    }
    core.levels.active = Memtable { map: image.pairs.into_iter().collect(), bytes: image.bytes };
    core.levels.tree = Tree { root: blob.root.map(Child::Disk) };
    (core.log.clock, core.next_id, core.value_objects) =
        (blob.clock, blob.next_id.max(1), blob.links);
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
        core.log.streams.push(Stream::at_position((segment, pos, next)));
    }
    core.log.batch.seq = blob.seq.saturating_add(1);
    Ok(())
}

#[cfg(test)]
mod tests {
    use draconis_device::MemoryDisk;

    use super::*;
    use crate::{CreateOptions, LayoutKind, Profile};

    #[test]
    fn stream_positions_outside_the_store_are_damage() {
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(vec![0; 8 << 20], 512));
        let segment_bytes = 128 << 10;
        let profile =
            Profile { layout: LayoutKind::Cow, page_bytes: 4096, segment_bytes, queue_depth: 8 };
        crate::Store::create(disk.clone(), &CreateOptions { profile, id: 7 }).unwrap();
        let (superblock, _) = Superblock::find_newest(&*disk).unwrap();
        let segments = superblock.geometry.segments;
        for place in [(segments, 0, 0), (0, 0, segments), (0, segment_bytes + 1, 0)] {
            let mut core = empty_core(disk.clone(), superblock.clone(), 1 << 20).unwrap();
            let mut blob = read_checkpoint_record(&core).unwrap();
            blob.places.fill(place);
            let found = load_checkpoint(&mut core, &blob, &mut vec![]);
            let is_damage =
                matches!(found, Err(Error::Corrupt { what: "where a stream stood", .. }));
            assert!(is_damage, "{place:?}: {found:?}");
        }
    }
}
