//! The public API of a store.

mod follow;
mod lock;
mod snapshot;

use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use draconis_device::{Disk, Process};
use draconis_types::lock::RwLock;
use draconis_types::lock::{Condvar, Mutex};

use crate::cached_disk::{CacheInfo, CachedDisk};
use crate::codec::{to_u32_saturating, to_usize_saturating};
use crate::core::Core;
use crate::core::backlogs::WorkDone;
use crate::entry::{Entry, ObjectRecord, PayloadRef};
use crate::index::view::View;
use crate::log::Counters;
use crate::options::{CreateOptions, OpenOptions, Profile};
use crate::superblock::Superblock;
use crate::{Error, Group, NewObject, ObjectId, RefusedGroup, Result, Ticket};

pub use self::snapshot::Snapshot;

/// Sizes and counts of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoreInfo {
    /// Id of the store.
    pub id: u128,
    /// Layout and its sizes.
    pub profile: Profile,
    /// Length of the disk, in bytes.
    pub disk_bytes: u64,
    /// Bytes that objects, values and their index can fill.
    pub capacity_bytes: u64,
    /// Bytes in use. Overwritten bytes count until the next checkpoint.
    pub used_bytes: u64,
    /// Segments.
    pub segments: u32,
    /// Free segments.
    pub free_segments: u32,
    /// Number of openings for writing.
    pub incarnation: u64,
    /// Number of keys in memory that are not in the tree yet.
    pub pending_keys: u64,
    /// Counters since the store was opened.
    pub counters: Counters,
    /// Statistics of the cache.
    pub cache: CacheInfo,
}

/// How far [`Store::allocation_run`] looks ahead: it lists all payloads of that range.
const RUN_WINDOW_BYTES: u64 = 16 << 20;
/// Payloads shorter than this are read together.
const MAX_COALESCED_PAYLOAD_BYTES: u32 = 32 << 10;

/// An object store. All methods take `&self`, from any number of threads.
pub struct Store {
    core: RwLock<Core>,
    /// The process that may use the store: in its children other threads may have left locks.
    process: Process,
    io: Arc<CachedDisk>,
    flusher: Mutex<Flusher>,
    flushed: Condvar,
    /// Objects that are open as disks.
    pub(crate) open: Mutex<Vec<Weak<CurrentObject>>>,
    /// Bytes reserved by all disks.
    pub(crate) kept_bytes: Mutex<u64>,
    /// Held by operations that change parents of objects.
    pub(crate) lineage: Mutex<()>,
    /// Held while a reader moves on to newer commits.
    refreshing: Mutex<()>,
    cache_bytes: u64,
    /// False once no record of a pending deletion is left. Changes under `lineage`.
    pub(crate) has_pending_deletes: AtomicBool,
}

/// Object id of an open disk: each request holds a read lock on it.
pub(crate) type CurrentObject = RwLock<ObjectId>;

/// State of the flush that waiters share.
#[derive(Debug, Default)]
struct Flusher {
    is_busy: bool,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").finish_non_exhaustive()
    }
}

impl Store {
    /// Creates an empty store on `disk`, which is overwritten.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the profile does not fit the disk; errors of the disk.
    pub fn create(disk: Arc<dyn Disk>, options: &CreateOptions) -> Result<()> {
        crate::recovery::create(disk, options)
    }

    /// Opens the store on `disk`, after any crash. Another process may write to a store that is
    /// opened read-only: see [`Store::refresh`].
    ///
    /// # Errors
    /// [`Error::NotAStore`], or [`Error::Corrupt`] if the disk lost or changed durable bytes; never
    /// for the effects of a power cut.
    pub fn open(disk: Arc<dyn Disk>, options: &OpenOptions) -> Result<Arc<Self>> {
        let core = crate::recovery::open(disk, options)?;
        let io = core.log.io.clone();
        Ok(Arc::new(Self {
            core: RwLock::new(core),
            process: Process::current(),
            io,
            open: Mutex::default(),
            kept_bytes: Mutex::default(),
            lineage: Mutex::default(),
            refreshing: Mutex::default(),
            cache_bytes: options.cache_bytes,
            has_pending_deletes: AtomicBool::new(true),
            flusher: Mutex::default(),
            flushed: Condvar::new(),
        }))
    }

    /// Returns the length and the profile of the store on `disk`, from its superblock.
    ///
    /// # Errors
    /// [`Error::NotAStore`], or errors of the disk.
    pub fn read_profile(disk: &dyn Disk) -> Result<(u64, Profile)> {
        let (superblock, _) = Superblock::find_newest(disk)?;
        Ok((superblock.geometry.disk_bytes, superblock.profile))
    }

    /// Reserves the number of an object to create; see [`Group::create`].
    pub fn new_object(&self) -> NewObject {
        let mut core = self.core.write();
        let id = ObjectId(core.next_id);
        core.next_id = core.next_id.saturating_add(1);
        NewObject(id)
    }

    /// Makes new objects have larger numbers than this.
    pub(crate) fn reserve_object_ids_to(&self, id: ObjectId) {
        let mut core = self.core.write();
        core.next_id = core.next_id.max(id.0.saturating_add(1));
    }

    /// Submits a group. It follows all tickets in `after`, and in fact all earlier groups. Returns
    /// at once unless very many bytes wait to be written; [`Store::wait`] returns once the group is
    /// durable.
    ///
    /// # Errors
    /// The group, with nothing of it applied: no space, no such object, or the store was stopped by
    /// an earlier failure.
    pub fn submit(
        &self,
        group: Group,
        after: &[Ticket],
    ) -> std::result::Result<Ticket, RefusedGroup> {
        match self.submit_ref(&group, after) {
            Ok(ticket) => Ok(ticket),
            Err(error) => Err(RefusedGroup { group, error }),
        }
    }

    pub(crate) fn submit_ref(&self, group: &Group, after: &[Ticket]) -> Result<Ticket> {
        self.run_change(group.bytes.len() as u64, |core, patience| {
            core.submit(group, after, patience)
        })
    }

    /// Does maintenance in advance, as if `bytes` more had been written, so that later writers have
    /// less to do: for idle callers, or a thread. Returns true if work is still in progress. Other
    /// threads read and write meanwhile.
    ///
    /// # Errors
    /// Error of the disk; then the store accepts no more groups.
    pub fn maintain(&self, bytes: u64) -> Result<bool> {
        self.process.check()?;
        let mut core = self.core.write();
        core.check_running()?;
        core.grow_backlogs(0);
        core.grow_backlogs_by(WorkDone::with_all_kinds(bytes));
        self.run_due_maintenance(core, bytes)?;
        Ok(self.core.read().is_working())
    }

    /// Waits until the group and all before it are durable. Concurrent waiters share one flush.
    ///
    /// # Errors
    /// Error of the first write or flush that failed.
    pub fn wait(&self, ticket: Ticket) -> Result<()> {
        self.process.check()?;
        loop {
            {
                let core = self.core.read();
                if core.log.sent.durable >= ticket.0 {
                    return Ok(());
                }
                if ticket.0 > core.log.newest_commit() {
                    return Err(Error::Misuse("a ticket that was never given out"));
                }
                if let Some(error) = &core.stopped {
                    return Err(to_stopped_error(error));
                }
            }
            let mut flusher = self.flusher.lock();
            if flusher.is_busy {
                self.flushed.wait(&mut flusher);
                continue;
            }
            if self.core.read().log.sent.durable >= ticket.0 {
                return Ok(());
            }
            flusher.is_busy = true;
            drop(flusher);
            let flushed = self.flush_commit_of(ticket);
            self.flusher.lock().is_busy = false;
            self.flushed.notify_all();
            flushed?;
        }
    }

    /// Submits the open commit if the ticket is in it, and waits without the lock.
    fn flush_commit_of(&self, ticket: Ticket) -> Result<()> {
        // Groups submitted meanwhile join the same commit.
        self.io.disk.wait_commit_interval();
        let (seq, disk_ticket) = {
            let mut core = self.core.write();
            if core.log.batch.seq == ticket.0
                && let Err(error) = core.log.commit()
            {
                return Err(core.stop(error));
            }
            match core.log.sent.commits.back() {
                Some(&last) => last,
                None => return Ok(()),
            }
        };
        let waited =
            match crate::test_hooks::is_fault_injected(crate::test_hooks::InjectedFault::Flush) {
                true => Ok(()),
                false => self.io.disk.wait_durable(disk_ticket),
            };
        let mut core = self.core.write();
        match waited {
            Ok(()) => core.log.mark_durable(seq),
            // The write stays queued.
            Err(error @ draconis_device::Error::Unreachable(_)) => return Err(error.into()),
            Err(error) => return Err(core.stop(error.into())),
        }
        Ok(())
    }

    /// Makes all submitted groups durable.
    ///
    /// # Errors
    /// As [`Store::wait`].
    pub fn sync(&self) -> Result<()> {
        self.process.check()?;
        let ticket = {
            let core = self.core.read();
            if core.stopped.is_some() && core.is_read_only() {
                return Ok(());
            }
            Ticket(core.log.batch.seq)
        };
        self.wait_all(ticket)
    }

    fn wait_all(&self, ticket: Ticket) -> Result<()> {
        // An empty commit has no frames and never becomes durable by itself.
        let is_empty = self.core.read().log.is_batch_empty();
        match (is_empty, ticket.0) {
            (true, seq) => self.wait(Ticket(seq.saturating_sub(1))),
            (false, _) => self.wait(ticket),
        }
    }

    /// Writes a checkpoint: opening the store afterwards has nothing to replay.
    ///
    /// # Errors
    /// As [`Store::wait`].
    pub fn checkpoint(&self) -> Result<()> {
        self.process.check()?;
        if let Some(error) = &self.core.read().stopped {
            return if matches!(error, Error::Misuse(_)) {
                Ok(())
            } else {
                Err(to_stopped_error(error))
            };
        }
        // First the checkpoint in progress, then one with all later changes.
        let core = self.core.write();
        let under_way = u64::from(core.levels.flush.is_some());
        let first = core.log.counters.checkpoints.saturating_add(under_way);
        self.run_steps(core, |core, patience| core.step_toward_checkpoint(first, patience))?;
        let mut core = self.core.write();
        if let Err(error) = core.begin_checkpoint() {
            return Err(core.stop(error));
        }
        let next = core.log.counters.checkpoints.saturating_add(1);
        self.run_steps(core, |core, patience| core.step_toward_checkpoint(next, patience))
    }

    /// Reads from byte `at` of an object; returns the number of bytes. Holes read as zeros.
    ///
    /// # Errors
    /// [`Error::NoObject`]; [`Error::Corrupt`] rather than a byte that was not written.
    pub fn read(&self, id: ObjectId, at: u64, into: &mut [u8]) -> Result<usize> {
        let wanted = into.len() as u64;
        // The view is held until the end of the read: it keeps segments from being reused.
        let ((parts, len), _view) = self.lookup(|index, nodes| {
            let record = index.object(nodes, id)?.ok_or(Error::NoObject(id))?;
            let len = record.len.saturating_sub(at).min(wanted);
            Ok((index.visible_payloads(nodes, (id, &record), (at, at.saturating_add(len)))?, len))
        })?;
        let mut together = self.read_short_payloads(&parts).into_iter();
        let into = into.get_mut(..to_usize_saturating(len)).unwrap_or_default();
        copy_payloads_into(at, into, parts, |data, into| match together.next().flatten() {
            Some(bytes) => {
                into.copy_from_slice(&bytes);
                Ok(())
            }
            None => self.read_data(data, into),
        })
    }

    /// Returns how many bytes of an object from `at` are all stored or all a hole, at most `len`,
    /// and whether they are a hole. Looks ahead [`RUN_WINDOW_BYTES`].
    pub(crate) fn allocation_run(&self, id: ObjectId, at: u64, len: u64) -> Result<(u64, bool)> {
        let end = at.saturating_add(len.min(RUN_WINDOW_BYTES));
        let (parts, _view) = self.lookup(|index, nodes| {
            let record = index.object(nodes, id)?.ok_or(Error::NoObject(id))?;
            index.visible_payloads(nodes, (id, &record), (at, end))
        })?;
        let is_hole = parts.first().is_none_or(|(start, _)| *start > at);
        let until = match parts.first() {
            Some((start, _)) if is_hole => *start,
            None => end,
            Some(_) => parts.iter().fold(at, |until, (start, data)| match *start == until {
                true => until.saturating_add(data.len.into()),
                false => until,
            }),
        };
        Ok((until.saturating_sub(at), is_hole))
    }

    /// Reads short uncached payloads together. `None`: cached, long enough for a request of its
    /// own, or unreadable.
    fn read_short_payloads(&self, parts: &[(u64, PayloadRef)]) -> Vec<Option<Vec<u8>>> {
        let is_short = |data: &PayloadRef| data.stored < MAX_COALESCED_PAYLOAD_BYTES;
        if parts.iter().filter(|(_, data)| is_short(data)).count() < 2 {
            return vec![];
        }
        let core = self.core.read();
        let is_far =
            |data: &&PayloadRef| is_short(data) && core.log.unsubmitted_payload(data).is_none();
        let far: Vec<_> = parts.iter().map(|(_, data)| Some(data).filter(is_far)).collect();
        drop(core);
        let wanted: Vec<&PayloadRef> = far.iter().copied().flatten().collect();
        let mut found = self.io.read_uncached_values(&wanted).into_iter();
        far.iter().map(|data| data.and_then(|_| found.next().flatten())).collect()
    }

    /// Copies a payload found in the index.
    pub(crate) fn read_data(&self, data: &PayloadRef, into: &mut [u8]) -> Result<()> {
        {
            let core = self.core.read();
            if let Some(bytes) = core.log.unsubmitted_payload(data) {
                into.copy_from_slice(bytes);
                return Ok(());
            }
        }
        self.io.read_data(data, into)
    }

    pub(crate) fn read_value_payload(&self, data: &PayloadRef) -> Result<Vec<u8>> {
        if let Some(value) = self.io.cached_value(data) {
            return Ok(value);
        }
        {
            let core = self.core.read();
            if let Some(bytes) = core.log.unsubmitted_payload(data) {
                return Ok(bytes.to_vec());
            }
        }
        self.io.read_value(data)
    }

    /// Returns the entry of a key, and a view that keeps its bytes from being reused.
    pub(crate) fn find_key(&self, key: &[u8]) -> Result<(Option<Entry>, Arc<View>)> {
        let core = self.core.read();
        core.check_no_partial_group()?;
        if let Some(entry) = core.levels.active.map.get(key) {
            return Ok((Some(entry.clone()), core.levels.view.clone()));
        }
        let view = core.levels.view.clone();
        drop(core);
        let entry = view.index().get(&*self.io, key)?;
        Ok((entry, view))
    }

    pub(crate) fn object_record(&self, id: ObjectId) -> Result<Option<ObjectRecord>> {
        Ok(self.lookup(|index, nodes| index.object(nodes, id))?.0)
    }

    /// Returns the length of an object in bytes.
    ///
    /// # Errors
    /// [`Error::NoObject`], or the error of reading the index.
    pub fn len(&self, id: ObjectId) -> Result<u64> {
        Ok(self.object_record(id)?.ok_or(Error::NoObject(id))?.len)
    }

    /// Returns all objects in order of their numbers, with their lengths.
    ///
    /// # Errors
    /// The error of reading the index.
    pub fn list(self: &Arc<Self>) -> Result<Vec<(ObjectId, u64)>> {
        self.snapshot().list()
    }

    /// Returns an immutable snapshot of the store.
    pub fn snapshot(self: &Arc<Self>) -> Snapshot {
        let mut core = self.core.write();
        core.seal_memtable();
        Snapshot {
            view: core.levels.view.clone(),
            io: self.io.clone(),
            store: Arc::downgrade(self),
        }
    }

    /// Returns true if the store was opened read-only.
    pub fn is_read_only(&self) -> bool {
        self.core.read().is_read_only()
    }

    /// Returns the bytes of the store's disk.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.io.geometry.disk_bytes
    }

    /// Returns true if distance costs time on the store's disk.
    pub(crate) fn is_rotational(&self) -> bool {
        self.io.disk.properties().rotational
    }

    /// Returns sizes and counts.
    pub fn info(&self) -> StoreInfo {
        let core = self.core.read();
        let superblock = &core.checkpoints.superblock;
        StoreInfo {
            id: superblock.id,
            profile: superblock.profile,
            disk_bytes: superblock.geometry.disk_bytes,
            capacity_bytes: core.reserve.capacity_bytes,
            used_bytes: core.log.segments.total_rewrite_bytes(),
            segments: superblock.geometry.segments,
            free_segments: to_u32_saturating(core.log.segments.free_segments() as u64),
            incarnation: superblock.incarnation,
            pending_keys: core.levels.pending_keys(),
            counters: core.log.counters,
            cache: self.io.info(),
        }
    }
}

impl Drop for Store {
    /// Submits the open commit. Groups without a waiter may be lost anyway, as in a crash; errors
    /// are ignored.
    fn drop(&mut self) {
        let core = self.core.get_mut();
        if core.stopped.is_none() {
            let _ = core.log.commit();
        }
    }
}

fn to_stopped_error(error: &Error) -> Error {
    match error {
        Error::Device(error) => Error::Stopped(error.clone()),
        error => error.clone(),
    }
}

/// Fills `into` with payloads, and zeros between them.
pub(crate) fn copy_payloads_into(
    at: u64,
    into: &mut [u8],
    parts: Vec<(u64, PayloadRef)>,
    mut read: impl FnMut(&PayloadRef, &mut [u8]) -> Result<()>,
) -> Result<usize> {
    let mut done = 0;
    for (offset, data) in parts {
        let overlap = Error::Corrupt { what: "payloads that overlap", at_bytes: data.at };
        let from = to_usize_saturating(offset.checked_sub(at).ok_or(overlap.clone())?);
        into.get_mut(done..from).ok_or(overlap.clone())?.fill(0);
        done = from.saturating_add(data.len as usize);
        read(&data, into.get_mut(from..done).ok_or(overlap)?)?;
    }
    into.get_mut(done..).unwrap_or_default().fill(0);
    Ok(into.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlaps_are_damage_and_gaps_are_zeros() {
        let data = |len| PayloadRef {
            at: 4096,
            stored: len,
            skip: 0,
            len,
            sums: [0].into_iter().collect(),
        };
        let read = |_: &PayloadRef, into: &mut [u8]| {
            into.fill(7);
            Ok(())
        };
        let mut into = [1; 10];
        assert_eq!(
            copy_payloads_into(100, &mut into, vec![(101, data(2)), (105, data(3))], read),
            Ok(10)
        );
        assert_eq!(into, [0, 7, 7, 0, 0, 7, 7, 7, 0, 0]);
        for wrong in [vec![(101, data(5)), (103, data(3))], vec![(108, data(5))]] {
            let found = copy_payloads_into(100, &mut into, wrong, read);
            assert!(matches!(found, Err(Error::Corrupt { .. })), "{found:?}");
        }
    }
}
