//! The oplog of a mount: its FUSE requests, each until its change is accepted by the disk and its
//! reply is sent.
//!
//! ```text
//!   head of the memory           ring
//!   epoch, tail, head            ┌ entry: length, state, unique │ number, made, time │ request ┐
//!   requests in flight           └──────────────────────────────────────────────────────────────┘
//!                                orphan table
//!                                page pool                       └ first page and length of data
//!                                ┌ write data, as read from FUSE ┐
//!                                └───────────────────────────────┘
//!
//!   pending ── changed under the gate ──▶ applied ── accepted by the disk, replied ──▶ freed
//!      └── changed nothing ──▶ dropped
//! ```
//! The keeper creates the memory, which outlives the worker; only the worker writes to it. Epochs
//! count workers; a number counts changes within an epoch.
//!
//! Law 1: an entry is complete in the oplog before readers of the volume see its change.
//! Law 2: an entry is freed only once the disk has accepted the change and the reply was sent.
//! Law 3: a successor trusts nothing in the oplog: a process that parsed an untrusted volume wrote
//! it. Invalid contents end all changes.
//! Law 4: a pool buffer is in use as long as an entry refers to it, or the volume has not submitted
//! its data. The process that writes the data copies it from there, and not before.

mod orphans;

use std::cell::Cell;
use std::collections::{BTreeSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use draconis_exchange::contract::request_log::{Deferred, LoggedRequest, Outcome, RequestData};
use draconis_exchange::contract::{Node, Time};
use draconis_exchange::heap::{ALIGN_BYTES, PagePool, PoolBuffer};
use draconis_exchange::injected_fault::{DelayPoint, InjectedFault};
use draconis_exchange::shm::SharedMemory;
use draconis_ext::{ChangeRecord, ChangeRecorder, FileId, InodeNumber};

use orphans::OrphanTable;

/// Magic number of the memory; another format has another one.
pub(crate) const FORMAT: u64 = u64::from_be_bytes(*b"oplog  4");

/// Size of the ring of entries, in bytes.
const RING_BYTES: u64 = 8 << 20;
/// Offset of the orphan table.
const ORPHANS_AT: usize = HEAD_BYTES + RING_BYTES as usize;
/// Size of the page pool for write data, in bytes.
const POOL_BYTES: usize = 64 << 20;
/// Use of the pool above which the helper thread commits.
const COMMIT_THRESHOLD_BYTES: usize = POOL_BYTES / 2;
/// Use of the pool above which clients wait for that commit.
const WAIT_THRESHOLD_BYTES: usize = POOL_BYTES / 4 * 3;
/// Longest pool buffer: a request with all its data.
const MAX_REQUEST_BYTES: usize = 1 << 20;
const HEAD_BYTES: usize = 4096;
/// Alignment of entries.
const ENTRY_ALIGN_BYTES: u64 = 64;

const FORMAT_AT: usize = 0;
/// Offset of the clean mark of the volume before the first worker: 1 not clean, 2 clean, 0 unknown.
const CLEAN_AT: usize = 16;
/// Offset of tail and head, in units: one word, so that both change together.
const TAIL_AND_HEAD_AT: usize = 24;
/// Offset of the index of the orphan table part in use.
const ORPHAN_PART_AT: usize = 32;
/// Offset of the epoch of the last worker that marked which entries the disk has accepted.
const MARKED_EPOCH_AT: usize = 8;
/// Offset of the requests in flight, one slot per thread.
const IN_FLIGHT_AT: usize = 64;
const IN_FLIGHT_SLOTS: usize = 32;

/// Offsets of the fields of an entry.
const LEN: usize = 0;
const STATE: usize = 4;
const UNIQUE: usize = 8;
const EPOCH: usize = 16;
const NUMBER: usize = 24;
const CREATED_INODE: usize = 32;
const CREATED_GENERATION: usize = 36;
const SECONDS: usize = 40;
const NANOSECONDS: usize = 48;
const FLAGS: usize = 52;
const REQUEST_LEN: usize = 56;
const RENAMED_INODE: usize = 60;
/// First page and length of the write data in the page pool.
const DATA_PAGE: usize = 64;
const DATA_LEN: usize = 68;
/// Outcome of the change.
const ERRNO: usize = 72;
const WRITTEN_BYTES: usize = 76;
const REQUEST_AT: usize = 80;

/// The greatest errno that the kernel accepts in a reply.
const ERRNO_MAX: u32 = 511;

/// States of an entry.
const STATE_PENDING: u32 = 1;
const STATE_APPLIED: u32 = 2;
const STATE_DROPPED: u32 = 3;

/// Flags of an entry.
const FLAG_REPLIED: u32 = 1;
const FLAG_ACCEPTED: u32 = 2;
/// The outcome of the change is known.
const FLAG_DECIDED: u32 = 4;

thread_local! {
    /// The entry that the thread works on, and the thread's slot among the requests in flight.
    static CURRENT_ENTRY: Cell<Option<u64>> = const { Cell::new(None) };
    static IN_FLIGHT_SLOT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Length of an oplog's memory, in bytes.
pub(crate) const MEMORY_BYTES: usize = ORPHANS_AT + orphans::BYTES + POOL_BYTES;

/// Maps the memory of an oplog that another process created.
///
/// # Errors
/// A message about what is wrong with the memory.
pub(crate) fn map_existing(memory: OwnedFd) -> Result<Arc<SharedMemory>, String> {
    SharedMemory::map_peer(memory, MEMORY_BYTES).map(Arc::new).map_err(|why| why.to_string())
}

/// Maps the pages of the first pool buffer, into which a worker reads a request. Done in advance,
/// this saves the first client about 1 ms.
pub(crate) fn prefault_request_buffer(memory: &SharedMemory) {
    let rooms = MEMORY_BYTES - POOL_BYTES;
    if let Err(errno) = memory.populate(rooms..rooms + MAX_REQUEST_BYTES) {
        log::debug!("the first room is mapped when it is needed: {errno}");
    }
}

/// Creates the memory of an oplog.
///
/// # Errors
/// The system's error.
pub(crate) fn create_memory() -> std::io::Result<Arc<SharedMemory>> {
    let memory = SharedMemory::new(MEMORY_BYTES)?;
    memory.atomic_u64(FORMAT_AT).store(FORMAT, Ordering::Relaxed);
    Ok(Arc::new(memory))
}

/// Returns and clears the requests that were in flight when the worker died.
pub(crate) fn take_in_flight(memory: &SharedMemory) -> Vec<u64> {
    let hands = (0..IN_FLIGHT_SLOTS)
        .map(|hand| memory.atomic_u64(IN_FLIGHT_AT + 8 * hand).swap(0, Ordering::Relaxed));
    hands.filter(|unique| *unique != 0).collect()
}

/// Returns the last epoch whose accepted changes must be recorded.
pub(crate) fn marked_epoch(memory: &SharedMemory) -> u64 {
    memory.atomic_u64(MARKED_EPOCH_AT).load(Ordering::Relaxed)
}

/// Returns true if the volume was clean when it was first opened; `None` if it was not opened.
pub(crate) fn was_clean(memory: &SharedMemory) -> Option<bool> {
    match memory.atomic_u64(CLEAN_AT).load(Ordering::Relaxed) {
        0 => None,
        word => Some(word == 2),
    }
}

/// Reason why an inherited oplog was rejected.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the log of the worker before makes no sense: {0}")]
pub struct CorruptOplog(&'static str);

/// The oplog of a mount, as used by its current worker.
pub(crate) struct OpLog {
    memory: Arc<SharedMemory>,
    pool: Arc<PagePool>,
    epoch: u64,
    /// The disk has accepted all changes of this epoch up to this number.
    accepted_number: AtomicU64,
    ring: Mutex<Ring>,
    next_slot: AtomicU32,
    orphan_table: OrphanTable,
}

/// The ring. Its positions grow beyond the end of the ring (modulo [`RING_BYTES`]).
struct Ring {
    tail: u64,
    head: u64,
    /// Pool buffers of the entries, by position of the entry.
    pool_buffers: VecDeque<(u64, Arc<PoolBuffer>)>,
}

impl OpLog {
    /// Opens the oplog of the `epoch`th worker of its mount.
    ///
    /// # Errors
    /// A message about what is wrong with the memory.
    #[allow(unsafe_code)]
    pub(crate) fn new(memory: Arc<SharedMemory>, epoch: u64) -> Result<Self, String> {
        if memory.atomic_u64(FORMAT_AT).load(Ordering::Relaxed) != FORMAT {
            return Err("the log of the mount has another format".into());
        }
        if epoch == 1 {
            memory.atomic_u64(MARKED_EPOCH_AT).store(1, Ordering::Relaxed);
        }
        let ends = memory.atomic_u64(TAIL_AND_HEAD_AT).load(Ordering::Relaxed);
        let (tail, used) = (ends >> 32, (ends as u32).wrapping_sub((ends >> 32) as u32));
        let tail = tail * ENTRY_ALIGN_BYTES;
        let (head, rooms) = (tail + u64::from(used) * ENTRY_ALIGN_BYTES, VecDeque::new());
        let ring = Mutex::new(Ring { tail, head, pool_buffers: rooms });
        let part = MEMORY_BYTES - POOL_BYTES..MEMORY_BYTES;
        // SAFETY: the keeper writes to the head only; one worker lives at a time, and this is its
        // only oplog.
        let rooms = unsafe { PagePool::new(memory.clone(), part) };
        let (taken, hands) = (AtomicU64::new(0), AtomicU32::new(0));
        let nameless = OrphanTable::new(&memory, epoch == 1);
        Ok(Self {
            memory,
            pool: rooms,
            epoch,
            accepted_number: taken,
            ring,
            next_slot: hands,
            orphan_table: nameless,
        })
    }

    /// Records whether the volume was clean before it was opened.
    pub(crate) fn note_clean(&self, clean: bool) {
        self.memory.atomic_u64(CLEAN_AT).store(1 + u64::from(clean), Ordering::Relaxed);
    }

    /// Returns the orphans that earlier workers recorded, and possibly others; `None` if there were
    /// too many.
    pub(crate) fn orphans(&self) -> Option<BTreeSet<InodeNumber>> {
        orphans::load_orphans(&self.memory)
    }

    /// Returns the unfinished requests of earlier workers, in the order of their changes.
    /// `taken` is an epoch and the number up to which the disk has accepted its changes.
    ///
    /// # Errors
    /// [`CorruptOplog`].
    pub(crate) fn load_unfinished(
        &self,
        taken: (u64, u64),
    ) -> Result<Vec<(LoggedRequest, ChangeRecord)>, CorruptOplog> {
        let mut ring = self.ring();
        let Ring { tail, head, .. } = *ring;
        if head - tail > RING_BYTES {
            ring.tail = ring.head;
            return Err(CorruptOplog("its ends"));
        }
        let mut found = vec![];
        let mut at = tail;
        while at < head {
            let len =
                self.len_of(at).filter(|len| *len <= head - at).ok_or(CorruptOplog("a length"))?;
            if self.u32_field(at, STATE).load(Ordering::Acquire) == STATE_APPLIED {
                let found_room = self.reclaim_buffer(at)?;
                found.push(self.entry(at, len, taken, found_room.as_deref())?);
                ring.pool_buffers.extend(found_room.map(|room| (at, room)));
            } else {
                // It changed nothing visible.
                self.u32_field(at, STATE).store(STATE_DROPPED, Ordering::Relaxed);
            }
            at += len;
        }
        self.memory.atomic_u64(MARKED_EPOCH_AT).store(self.epoch, Ordering::Release);
        // Those of the newest epoch are replays of the oldest entries at that time.
        found.sort_by_key(|(epoch, number, ..)| (std::cmp::Reverse(*epoch), *number));
        Ok(found.into_iter().map(|(.., entry, made)| (entry, made)).collect())
    }

    fn entry(
        &self,
        at: u64,
        len: u64,
        taken: (u64, u64),
        contents: Option<&PoolBuffer>,
    ) -> Result<(u64, u64, LoggedRequest, ChangeRecord), CorruptOplog> {
        let word = |field| self.u32_field(at, field).load(Ordering::Relaxed);
        let long = |field| self.u64_field(at, field).load(Ordering::Relaxed);
        let (epoch, number) = (long(EPOCH), long(NUMBER));
        if epoch >= self.epoch {
            return Err(CorruptOplog("a number"));
        }
        let (flags, errno) = (word(FLAGS), word(ERRNO));
        // The kernel would reject the reply, and its client would wait for ever.
        if errno > ERRNO_MAX {
            return Err(CorruptOplog("an errno"));
        }
        let outcome = Outcome { errno: errno as i32, written_bytes: word(WRITTEN_BYTES) };
        let outcome = (flags & FLAG_DECIDED != 0).then_some(outcome);
        // The partial result of a failed change was submitted before its outcome was recorded.
        let has_failed = flags & FLAG_DECIDED != 0 && errno != 0;
        let is_taken =
            has_failed || flags & FLAG_ACCEPTED != 0 || epoch == taken.0 && number <= taken.1;
        if is_taken {
            self.u32_field(at, FLAGS).fetch_or(FLAG_ACCEPTED, Ordering::Relaxed);
        }
        let request_len = word(REQUEST_LEN) as usize;
        if request_len as u64 > len - REQUEST_AT as u64 {
            return Err(CorruptOplog("the length of a request"));
        }
        let mut request = vec![0; request_len];
        self.memory.copy_out(self.byte_offset(at) + REQUEST_AT, &mut request);
        // A change that is not replayed needs no data.
        request.extend_from_slice(contents.filter(|_| !is_taken).map_or(&[], |room| room));
        let inode = word(CREATED_INODE);
        let file = FileId { inode, generation: word(CREATED_GENERATION) };
        let nanoseconds = word(NANOSECONDS);
        if nanoseconds >= 1_000_000_000 {
            return Err(CorruptOplog("a time"));
        }
        let now = Time { seconds: long(SECONDS) as i64, nanoseconds };
        let moved = Some(word(RENAMED_INODE)).filter(|moved| *moved != 0).map(InodeNumber);
        let made = ChangeRecord { now, inode: (inode != 0).then_some(file), renamed_inode: moved };
        let inherited = LoggedRequest {
            position: at,
            unique: long(UNIQUE),
            request,
            created: made.inode.map(|made| Node(made.inode.into())),
            outcome,
            is_accepted: is_taken,
            answered: flags & FLAG_REPLIED != 0,
        };
        Ok((epoch, number, inherited, made))
    }

    /// Reallocates the pool buffer that the entry at `at` refers to.
    fn reclaim_buffer(&self, at: u64) -> Result<Option<Arc<PoolBuffer>>, CorruptOplog> {
        let word = |field| self.u32_field(at, field).load(Ordering::Relaxed) as usize;
        let len = word(DATA_LEN);
        if len == 0 {
            return Ok(None);
        }
        let place = word(DATA_PAGE).checked_mul(ALIGN_BYTES).ok_or(CorruptOplog("a room"))?;
        let room = self.pool.allocate_at(place, len).ok_or(CorruptOplog("a room"))?;
        Ok(Some(Arc::new(room)))
    }

    /// Returns the pool of buffers for write data.
    pub(crate) fn buffers(&self) -> &Arc<PagePool> {
        &self.pool
    }

    /// Returns the memory of the oplog.
    pub(crate) fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Returns true if so much of the pool is in use that a commit should free some of it.
    pub(crate) fn needs_commit(&self) -> bool {
        self.pool.used_bytes() > COMMIT_THRESHOLD_BYTES
    }

    /// Returns true if requests must wait for that commit.
    pub(crate) fn must_wait(&self) -> bool {
        self.pool.used_bytes() > WAIT_THRESHOLD_BYTES
    }

    /// Frees finished entries.
    pub(crate) fn free_finished_entries(&self) {
        self.trim(&mut self.ring());
    }

    /// Records that the calling thread begins a request. While the ring has no space for it, calls
    /// `make_room` without holding a lock, which returns true if there may be space now.
    pub(crate) fn begin_request(
        &self,
        unique: u64,
        changing: Option<(&[u8], RequestData<'_>)>,
        free_space: impl Fn() -> bool,
    ) {
        self.in_flight_slot().store(unique, Ordering::Relaxed);
        let Some((bytes, contents)) = changing else { return };
        let entry = loop {
            match self.append(unique, bytes, contents) {
                Some(entry) => break entry,
                None if free_space() => {}
                // No further changes are possible.
                None => return,
            }
        };
        CURRENT_ENTRY.set(Some(entry));
    }

    /// Returns true if the request of the calling thread has changed something.
    pub(crate) fn has_changed(&self) -> bool {
        CURRENT_ENTRY
            .get()
            .is_some_and(|at| self.u32_field(at, STATE).load(Ordering::Relaxed) == STATE_APPLIED)
    }

    /// Records the outcome of the calling thread's change.
    pub(crate) fn decided(&self, outcome: Outcome) {
        let Some(at) = CURRENT_ENTRY.get() else { return };
        self.u32_field(at, ERRNO).store(outcome.errno as u32, Ordering::Relaxed);
        self.u32_field(at, WRITTEN_BYTES).store(outcome.written_bytes, Ordering::Relaxed);
        self.u32_field(at, FLAGS).fetch_or(FLAG_DECIDED, Ordering::Release);
    }

    /// Detaches the calling thread's entry, for the thread that will reply.
    pub(crate) fn defer(&self) -> Option<Deferred> {
        CURRENT_ENTRY.take().map(Deferred)
    }

    /// Records that a deferred request was answered.
    pub(crate) fn deferred_done(&self, Deferred(at): Deferred) {
        self.mark_replied(at);
    }

    /// Records that the calling thread has replied.
    pub(crate) fn finish_request(&self) {
        if let Some(at) = CURRENT_ENTRY.take() {
            self.mark_replied(at);
        }
        self.in_flight_slot().store(0, Ordering::Relaxed);
    }

    fn mark_replied(&self, at: u64) {
        if InjectedFault::LogFirst.is_made()
            && self.u64_field(at, EPOCH).load(Ordering::Relaxed) != 0
        {
            std::thread::sleep(std::time::Duration::from_millis(2));
            self.u32_field(at, STATE).store(STATE_APPLIED, Ordering::Release);
        }
        match self.u32_field(at, STATE).load(Ordering::Relaxed) {
            STATE_PENDING => self.u32_field(at, STATE).store(STATE_DROPPED, Ordering::Relaxed),
            _ => drop(self.u32_field(at, FLAGS).fetch_or(FLAG_REPLIED, Ordering::Relaxed)),
        }
    }

    /// Runs `work`, which replays the entry at `at`.
    pub(crate) fn replay(&self, at: u64, unique: u64, work: &mut dyn FnMut()) {
        self.in_flight_slot().store(unique, Ordering::Relaxed);
        CURRENT_ENTRY.set(Some(at));
        work();
        CURRENT_ENTRY.set(None);
        if self.u64_field(at, EPOCH).load(Ordering::Relaxed) != self.epoch {
            // The replay changed nothing.
            self.u32_field(at, STATE).store(STATE_DROPPED, Ordering::Relaxed);
        }
        self.in_flight_slot().store(0, Ordering::Relaxed);
    }

    /// Marks all entries of earlier epochs as answered: the kernel will not resend them any more.
    pub(crate) fn finish_inherited(&self, inherited: impl Iterator<Item = u64>) {
        self.orphan_table.end_replay();
        let ring = self.ring();
        // Entries before the tail are freed, and their space may be reused.
        for at in inherited.filter(|at| *at >= ring.tail) {
            let (state, flags) = (self.u32_field(at, STATE), self.u32_field(at, FLAGS));
            if flags.fetch_or(FLAG_REPLIED, Ordering::Relaxed) & FLAG_ACCEPTED != 0 {
                state.store(STATE_DROPPED, Ordering::Relaxed);
            }
        }
    }

    /// Appends an entry to the ring if there is space for it.
    fn append(&self, unique: u64, bytes: &[u8], contents: RequestData<'_>) -> Option<u64> {
        let (parts, room) = match contents {
            RequestData::Bytes(more) => ([bytes, more], None),
            RequestData::Buffer(room) => ([bytes, &[]], Some(room)),
        };
        let mut ring = self.ring();
        self.trim(&mut ring);
        let request_len: usize = parts.iter().map(|part| part.len()).sum();
        let len = (REQUEST_AT as u64 + request_len as u64).next_multiple_of(ENTRY_ALIGN_BYTES);
        // No entry wraps around the end of the ring.
        let left = RING_BYTES - ring.head % RING_BYTES;
        let skip = if left < len { left } else { 0 };
        if ring.head + skip + len - ring.tail > RING_BYTES {
            return None;
        }
        if skip > 0 {
            self.u32_field(ring.head, LEN).store(skip as u32, Ordering::Relaxed);
            self.u32_field(ring.head, STATE).store(STATE_DROPPED, Ordering::Relaxed);
            ring.head += skip;
        }
        let at = ring.head;
        self.u32_field(at, LEN).store(len as u32, Ordering::Relaxed);
        self.u32_field(at, STATE).store(STATE_PENDING, Ordering::Relaxed);
        self.u64_field(at, UNIQUE).store(unique, Ordering::Relaxed);
        self.u64_field(at, EPOCH).store(0, Ordering::Relaxed);
        self.u32_field(at, CREATED_INODE).store(0, Ordering::Relaxed);
        self.u32_field(at, RENAMED_INODE).store(0, Ordering::Relaxed);
        self.u32_field(at, FLAGS).store(0, Ordering::Relaxed);
        self.u32_field(at, ERRNO).store(0, Ordering::Relaxed);
        self.u32_field(at, REQUEST_LEN).store(request_len as u32, Ordering::Relaxed);
        let page = room.map_or(0, |room| room.offset() / ALIGN_BYTES);
        self.u32_field(at, DATA_PAGE).store(page as u32, Ordering::Relaxed);
        self.u32_field(at, DATA_LEN)
            .store(room.map_or(0, |room| room.len()) as u32, Ordering::Relaxed);
        let mut place = self.byte_offset(at) + REQUEST_AT;
        for part in parts {
            self.memory.copy_in(place, part);
            place += part.len();
        }
        ring.pool_buffers.extend(room.map(|room| (at, room.clone())));
        ring.head += len;
        self.store_tail_and_head(&ring);
        Some(at)
    }

    /// Frees finished entries at the ring's tail.
    fn trim(&self, ring: &mut Ring) {
        let taken = self.accepted_number.load(Ordering::Acquire);
        let old = ring.tail;
        while ring.tail < ring.head {
            let at = ring.tail;
            let is_gone = match self.u32_field(at, STATE).load(Ordering::Acquire) {
                STATE_PENDING => false,
                STATE_APPLIED => {
                    let (epoch, number) = (self.u64_field(at, EPOCH), self.u64_field(at, NUMBER));
                    self.u32_field(at, FLAGS).load(Ordering::Relaxed) & FLAG_REPLIED != 0
                        && epoch.load(Ordering::Relaxed) == self.epoch
                        && number.load(Ordering::Relaxed) <= taken
                }
                _ => true,
            };
            match self.len_of(at) {
                Some(len) if is_gone && len <= ring.head - at => ring.tail += len,
                _ => break,
            }
        }
        if ring.tail == ring.head && !ring.head.is_multiple_of(RING_BYTES) {
            // Restart at the beginning of the ring, since untouched pages cost no memory. The range
            // between the old head and the new tail is skipped.
            let next = ring.head.next_multiple_of(RING_BYTES);
            (ring.tail, ring.head) = (next, next);
        }
        if ring.tail != old {
            self.store_tail_and_head(ring);
        }
        // Buffers are freed only after their entries.
        while let Some((_, room)) = ring.pool_buffers.pop_front_if(|(at, _)| *at < ring.tail) {
            drop(room);
        }
    }

    fn store_tail_and_head(&self, ring: &Ring) {
        let units = |at: u64| u64::from((at / ENTRY_ALIGN_BYTES) as u32);
        let ends = units(ring.tail) << 32 | units(ring.head);
        self.memory.atomic_u64(TAIL_AND_HEAD_AT).store(ends, Ordering::Release);
    }

    fn len_of(&self, at: u64) -> Option<u64> {
        let len = u64::from(self.u32_field(at, LEN).load(Ordering::Relaxed));
        let left = RING_BYTES - at % RING_BYTES;
        (len >= ENTRY_ALIGN_BYTES && len.is_multiple_of(ENTRY_ALIGN_BYTES) && len <= left)
            .then_some(len)
    }

    fn byte_offset(&self, at: u64) -> usize {
        HEAD_BYTES + (at % RING_BYTES) as usize
    }

    fn u32_field(&self, at: u64, field: usize) -> &AtomicU32 {
        self.memory.atomic_u32(self.byte_offset(at) + field)
    }

    fn u64_field(&self, at: u64, field: usize) -> &AtomicU64 {
        self.memory.atomic_u64(self.byte_offset(at) + field)
    }

    /// Returns the in-flight slot of the calling thread.
    fn in_flight_slot(&self) -> &AtomicU64 {
        let hand = IN_FLIGHT_SLOT.get().unwrap_or_else(|| {
            let hand = self.next_slot.fetch_add(1, Ordering::Relaxed) as usize % IN_FLIGHT_SLOTS;
            IN_FLIGHT_SLOT.set(Some(hand));
            hand
        });
        self.memory.atomic_u64(IN_FLIGHT_AT + 8 * hand)
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ChangeRecorder for OpLog {
    fn record_change(&self, number: u64, made: ChangeRecord) {
        let Some(at) = CURRENT_ENTRY.get() else { return };
        DelayPoint::Applied.pass();
        if let Some(file) = made.inode {
            self.u32_field(at, CREATED_INODE).store(file.inode, Ordering::Relaxed);
            self.u32_field(at, CREATED_GENERATION).store(file.generation, Ordering::Relaxed);
        }
        if let Some(InodeNumber(moved)) = made.renamed_inode {
            self.u32_field(at, RENAMED_INODE).store(moved, Ordering::Relaxed);
        }
        self.u64_field(at, SECONDS).store(made.now.seconds as u64, Ordering::Relaxed);
        self.u32_field(at, NANOSECONDS).store(made.now.nanoseconds, Ordering::Relaxed);
        self.u64_field(at, NUMBER).store(number, Ordering::Relaxed);
        self.u64_field(at, EPOCH).store(self.epoch, Ordering::Release);
        if !InjectedFault::LogFirst.is_made() {
            self.u32_field(at, STATE).store(STATE_APPLIED, Ordering::Release);
        }
        DelayPoint::Logged.pass();
    }

    fn accepted_through(&self, number: u64) {
        DelayPoint::Committed.pass();
        self.accepted_number.fetch_max(number, Ordering::Release);
        self.orphan_table.on_chain_accepted(&self.memory, number);
    }

    fn record_orphan(&self, number: u64, inode: InodeNumber, all: &dyn Fn() -> Vec<InodeNumber>) {
        if !InjectedFault::RecordOrphans.is_made() {
            self.orphan_table.add(&self.memory, number, inode, all);
        }
    }
}

#[cfg(test)]
mod tests;
