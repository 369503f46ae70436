//! Readers of a store that another process writes.
//!
//! ```text
//!   superblock ─▶ checkpoint ─▶ log ─▶ superblock again: the same?      open, or a newer checkpoint
//!   superblock: the same? ─▶ end of the log ─▶ superblock again          all other refreshes
//! ```
//!
//! Law 1: a reader's state is a prefix of the writer's commits.
//! Law 2: a segment is reused only once a newer superblock is durable. So what was read is whole if
//! the superblock is the same afterwards; otherwise it is read again.
//! Law 3: streams are read one after another, and the writer goes on meanwhile. So a frame may
//! declare commits durable that were not there when their stream was read. They are missing only if
//! they still are when the log is read once more.

use std::sync::Arc;

use draconis_device::Disk;
use draconis_types::lock::RwLock;

use super::replay::{LogReader, follow_tail};
use super::{empty_core_over, load_state};
use crate::cached_disk::CachedDisk;
use crate::core::Core;
use crate::superblock::Superblock;
use crate::{Error, Result};

/// Most attempts to read a state while the writer goes on.
const MAX_ATTEMPTS: u32 = 100;

fn restless_writer_error() -> Error {
    Error::Misuse("the store is written faster than it can be read; try again")
}

/// Opens the newest state of a store for reading.
pub(super) fn open(disk: &Arc<dyn Disk>, cache_bytes: u64) -> Result<Core> {
    let mut io: Option<Arc<CachedDisk>> = None;
    load_newest(disk, cache_bytes, &mut |superblock| {
        let (geometry, summer) = (superblock.geometry, superblock.checksummer());
        let same = io.take().filter(|io| io.geometry == geometry && io.summer == summer);
        let io = io.insert(same.unwrap_or_else(|| {
            Arc::new(CachedDisk::new(disk.clone(), geometry, summer, cache_bytes))
        }));
        Ok(io.clone())
    })
}

fn load_newest(
    disk: &Arc<dyn Disk>,
    cache_bytes: u64,
    cached_disk: &mut dyn FnMut(&Superblock) -> Result<Arc<CachedDisk>>,
) -> Result<Core> {
    // Generation of the superblock, and the newest commit that an attempt with it found durable.
    let mut known: Option<(u64, u64)> = None;
    for _ in 0..MAX_ATTEMPTS {
        let (superblock, _) = Superblock::find_newest(&**disk)?;
        let generation = superblock.generation;
        let floor = known.filter(|known| known.0 == generation).map(|known| known.1);
        let mut lost = vec![];
        let empty = empty_core_over(cached_disk(&superblock)?, superblock, cache_bytes)?;
        let loaded = load_state(empty, floor, &mut lost);
        if Superblock::find_newest(&**disk)?.0.generation != generation {
            continue;
        }
        let (mut core, durable) = loaded?;
        // Readers do without the table and unreadable chunks of runs.
        match lost.into_iter().find(|lost| lost.is_needed) {
            Some(_) if floor.is_none() => known = Some((generation, durable)),
            Some(lost) => return Err(lost.error),
            None => {
                core.stopped = Some(Error::Misuse("the store is open for reading only"));
                return Ok(core);
            }
        }
    }
    Err(restless_writer_error())
}

/// Moves the state of a reader on to the newest commit. Returns true if it changed.
pub(crate) fn refresh(
    state: &RwLock<Core>,
    io: &Arc<CachedDisk>,
    cache_bytes: u64,
) -> Result<bool> {
    let (newest, _) = Superblock::find_newest(&*io.disk)?;
    let (superblock, before) = {
        let core = state.read();
        if !core.is_read_only() {
            return Err(Error::Misuse("only a store that is open for reading follows a writer"));
        }
        (core.checkpoints.superblock.clone(), core.log.newest_commit())
    };
    check_same_store(&superblock, &newest)?;
    if newest.generation == superblock.generation && follow_log(state, io, newest.generation)? {
        return Ok(state.read().log.newest_commit() != before);
    }
    let next = load_newest(&io.disk, cache_bytes, &mut |newest| {
        check_same_store(&superblock, newest)?;
        Ok(io.clone())
    })?;
    *state.write() = next;
    Ok(true)
}

fn check_same_store(before: &Superblock, newest: &Superblock) -> Result<()> {
    if before.id != newest.id {
        return Err(Error::NotAStore("another store has replaced it; open it again".to_owned()));
    }
    if before.geometry != newest.geometry || before.profile != newest.profile {
        return Err(Error::NotAStore("it was resized; open it again".to_owned()));
    }
    Ok(())
}

/// Adds the commits after the newest one of the state. Returns false if there is another superblock
/// by now: then nothing was added.
fn follow_log(state: &RwLock<Core>, io: &Arc<CachedDisk>, generation: u64) -> Result<bool> {
    let (reader, checkpoint_at) = {
        let core = state.read();
        (LogReader::after(&core), core.checkpoints.superblock.checkpoint.at)
    };
    let first = reader.read_tail(0, None)?;
    let (tail, floor) = match first.check_complete(first.durable, checkpoint_at) {
        Ok(()) => (first, None),
        Err(_) => (reader.read_tail(0, None)?, Some(first.durable)),
    };
    if Superblock::find_newest(&*io.disk)?.0.generation != generation {
        return Ok(false);
    }
    floor.map_or(Ok(()), |floor| tail.check_complete(floor, checkpoint_at))?;
    if !tail.is_empty() {
        follow_tail(&mut state.write(), tail)?;
    }
    Ok(true)
}
