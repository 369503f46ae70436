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
//! Law 4: an error that ends all changes is in the oplog before a client learns of it, so that every
//! later worker stops, too. Only another mount writes again.
//! Law 5: a pool buffer is in use as long as an entry refers to it, or the volume has not submitted
//! its data. The process that writes the data copies it from there, and not before.

mod orphans;

use std::cell::Cell;
use std::collections::{BTreeSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use draconis_exchange::contract::request_log::{
    DeferredRequest, LoggedRequest, RequestData, RequestOutcome,
};
use draconis_exchange::heap::{PagePool, PoolBuffer};
use draconis_exchange::shm::SharedMemory;
use draconis_ext::{ChangeRecord, ChangeRecorder, FileId, InodeNumber};
use draconis_types::ALIGN_BYTES;
use draconis_types::injected_fault::{DelayPoint, InjectedFault};
use draconis_types::lock::{Mutex, MutexGuard};
use draconis_types::{Node, Time};

use orphans::OrphanTable;

/// Magic number of the memory; another format has another one.
pub(crate) const OPLOG_FORMAT: u64 = u64::from_be_bytes(*b"oplog  4");

/// Size of the ring of entries, in bytes.
const RING_BYTES: u64 = 8 << 20;
/// Offset of the orphan table.
const ORPHAN_TABLE_OFFSET: usize = HEADER_BYTES + RING_BYTES as usize;
/// Size of the page pool for write data, in bytes.
const PAGE_POOL_BYTES: usize = 64 << 20;
/// Use of the pool above which the helper thread commits.
const COMMIT_THRESHOLD_BYTES: usize = PAGE_POOL_BYTES / 2;
/// Use of the pool above which clients wait for that commit.
const CLIENT_WAIT_THRESHOLD_BYTES: usize = PAGE_POOL_BYTES / 4 * 3;
/// Longest pool buffer: a request with all its data.
const MAX_REQUEST_BYTES: usize = 1 << 20;
const HEADER_BYTES: usize = 4096;
/// Alignment of entries.
const ENTRY_ALIGN_BYTES: u64 = 64;

const FORMAT_OFFSET: usize = 0;
/// Offset of the clean mark of the volume before the first worker: 1 not clean, 2 clean, 0 unknown.
const CLEAN_MARK_OFFSET: usize = 16;
/// Offset of tail and head, in units: one word, so that both change together.
const TAIL_AND_HEAD_OFFSET: usize = 24;
/// Offset of the index of the orphan table part in use.
const ORPHAN_PART_OFFSET: usize = 32;
/// Offset of the epoch of the last worker that marked which entries the disk has accepted.
const MARKED_EPOCH_OFFSET: usize = 8;
/// Offset of the requests in flight, one slot per thread.
const IN_FLIGHT_OFFSET: usize = 64;
const IN_FLIGHT_SLOTS: usize = 32;
/// Offsets of the length and text of the error that ended all changes; the length is 0 if none did.
const STOP_LEN_OFFSET: usize = IN_FLIGHT_OFFSET + 8 * IN_FLIGHT_SLOTS;
const STOP_TEXT_OFFSET: usize = STOP_LEN_OFFSET + 8;
/// Greatest length of that text, in bytes; a longer one is cut.
const MAX_STOP_TEXT_BYTES: usize = 1024;

/// Offsets of the fields of an entry.
const ENTRY_LEN_OFFSET: usize = 0;
const ENTRY_STATE_OFFSET: usize = 4;
const ENTRY_UNIQUE_OFFSET: usize = 8;
const ENTRY_EPOCH_OFFSET: usize = 16;
const ENTRY_CHANGE_NUMBER_OFFSET: usize = 24;
const CREATED_INODE_OFFSET: usize = 32;
const CREATED_GENERATION_OFFSET: usize = 36;
const CHANGE_SECONDS_OFFSET: usize = 40;
const CHANGE_NANOSECONDS_OFFSET: usize = 48;
const ENTRY_FLAGS_OFFSET: usize = 52;
const REQUEST_LEN_OFFSET: usize = 56;
const RENAMED_INODE_OFFSET: usize = 60;
/// First page and length of the write data in the page pool.
const DATA_PAGE_OFFSET: usize = 64;
const DATA_LEN_OFFSET: usize = 68;
/// Outcome of the change.
const OUTCOME_ERRNO_OFFSET: usize = 72;
const OUTCOME_WRITTEN_BYTES_OFFSET: usize = 76;
const REQUEST_BYTES_OFFSET: usize = 80;

/// The greatest errno that the kernel accepts in a reply.
const MAX_REPLY_ERRNO: u32 = 511;

/// States of an entry.
const STATE_PENDING: u32 = 1;
const STATE_APPLIED: u32 = 2;
const STATE_DROPPED: u32 = 3;

/// Flags of an entry.
const FLAG_REPLIED: u32 = 1;
const FLAG_DISK_ACCEPTED: u32 = 2;
/// The outcome of the change is known.
const FLAG_OUTCOME_RECORDED: u32 = 4;

thread_local! {
    /// The entry that the thread works on, and the thread's slot among the requests in flight.
    static CURRENT_ENTRY: Cell<Option<u64>> = const { Cell::new(None) };
    static IN_FLIGHT_SLOT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Length of an oplog's memory, in bytes.
pub(crate) const OPLOG_MEMORY_BYTES: usize =
    ORPHAN_TABLE_OFFSET + orphans::TABLE_BYTES + PAGE_POOL_BYTES;

/// Maps the memory of an oplog that another process created.
///
/// # Errors
/// A message about what is wrong with the memory.
pub(crate) fn map_existing(memory: OwnedFd) -> Result<Arc<SharedMemory>, String> {
    SharedMemory::map_peer(memory, OPLOG_MEMORY_BYTES).map(Arc::new).map_err(|why| why.to_string())
}

/// Maps the pages of the first pool buffer, into which a worker reads a request. Done in advance,
/// this saves the first client about 1 ms.
pub(crate) fn prefault_request_buffer(memory: &SharedMemory) {
    let page_pool = OPLOG_MEMORY_BYTES - PAGE_POOL_BYTES;
    if let Err(errno) = memory.populate(page_pool..page_pool + MAX_REQUEST_BYTES) {
        log::debug!("the first room is mapped when it is needed: {errno}");
    }
}

/// Creates the memory of an oplog.
///
/// # Errors
/// The system's error.
pub(crate) fn create_memory() -> std::io::Result<Arc<SharedMemory>> {
    let memory = SharedMemory::new(OPLOG_MEMORY_BYTES)?;
    memory.atomic_u64(FORMAT_OFFSET).store(OPLOG_FORMAT, Ordering::Relaxed);
    Ok(Arc::new(memory))
}

/// Returns and clears the requests that were in flight when the worker died.
pub(crate) fn take_in_flight(memory: &SharedMemory) -> Vec<u64> {
    let next_slot = (0..IN_FLIGHT_SLOTS)
        .map(|hand| memory.atomic_u64(IN_FLIGHT_OFFSET + 8 * hand).swap(0, Ordering::Relaxed));
    next_slot.filter(|unique| *unique != 0).collect()
}

/// Returns the last epoch whose accepted changes must be recorded.
pub(crate) fn marked_epoch(memory: &SharedMemory) -> u64 {
    memory.atomic_u64(MARKED_EPOCH_OFFSET).load(Ordering::Relaxed)
}

/// Returns true if the volume was clean when it was first opened; `None` if it was not opened.
pub(crate) fn was_volume_clean(memory: &SharedMemory) -> Option<bool> {
    match memory.atomic_u64(CLEAN_MARK_OFFSET).load(Ordering::Relaxed) {
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
    ring: Mutex<EntryRing>,
    next_slot: AtomicU32,
    orphan_table: OrphanTable,
}

/// The ring. Its positions grow beyond the end of the ring (modulo [`RING_BYTES`]).
struct EntryRing {
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
        if memory.atomic_u64(FORMAT_OFFSET).load(Ordering::Relaxed) != OPLOG_FORMAT {
            return Err("the log of the mount has another format".into());
        }
        if epoch == 1 {
            memory.atomic_u64(MARKED_EPOCH_OFFSET).store(1, Ordering::Relaxed);
        }
        let ends = memory.atomic_u64(TAIL_AND_HEAD_OFFSET).load(Ordering::Relaxed);
        let (tail, used) = (ends >> 32, (ends as u32).wrapping_sub((ends >> 32) as u32));
        let tail = tail * ENTRY_ALIGN_BYTES;
        let (head, pool_buffers) = (tail + u64::from(used) * ENTRY_ALIGN_BYTES, VecDeque::new());
        let ring = Mutex::new(EntryRing { tail, head, pool_buffers });
        let part = OPLOG_MEMORY_BYTES - PAGE_POOL_BYTES..OPLOG_MEMORY_BYTES;
        // SAFETY: the keeper writes to the head only; one worker lives at a time, and this is its
        // only oplog.
        let pool_buffers = unsafe { PagePool::new(memory.clone(), part) };
        let (accepted_number, next_slot) = (AtomicU64::new(0), AtomicU32::new(0));
        let orphan_table = OrphanTable::new(&memory, epoch == 1);
        Ok(Self {
            memory,
            pool: pool_buffers,
            epoch,
            accepted_number,
            ring,
            next_slot,
            orphan_table,
        })
    }

    /// Records whether the volume was clean before it was opened.
    pub(crate) fn record_clean_mark(&self, clean: bool) {
        self.memory.atomic_u64(CLEAN_MARK_OFFSET).store(1 + u64::from(clean), Ordering::Relaxed);
    }

    /// Returns the error that ended all changes of this or an earlier worker.
    pub(crate) fn stop_reason(&self) -> Option<String> {
        let len = self.memory.atomic_u64(STOP_LEN_OFFSET).load(Ordering::Acquire);
        let mut text = vec![0; len.min(MAX_STOP_TEXT_BYTES as u64) as usize];
        self.memory.copy_out(STOP_TEXT_OFFSET, &mut text);
        (len != 0).then(|| String::from_utf8_lossy(&text).into_owned())
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
        let EntryRing { tail, head, .. } = *ring;
        if head - tail > RING_BYTES {
            ring.tail = ring.head;
            return Err(CorruptOplog("its ends"));
        }
        let mut found = vec![];
        let mut at = tail;
        while at < head {
            let len = self
                .entry_len_at(at)
                .filter(|len| *len <= head - at)
                .ok_or(CorruptOplog("a length"))?;
            if self.u32_field(at, ENTRY_STATE_OFFSET).load(Ordering::Acquire) == STATE_APPLIED {
                let found_room = self.reclaim_buffer(at)?;
                found.push(self.parse_entry(at, len, taken, found_room.as_deref())?);
                ring.pool_buffers.extend(found_room.map(|room| (at, room)));
            } else {
                // It changed nothing visible.
                self.u32_field(at, ENTRY_STATE_OFFSET).store(STATE_DROPPED, Ordering::Relaxed);
            }
            at += len;
        }
        self.memory.atomic_u64(MARKED_EPOCH_OFFSET).store(self.epoch, Ordering::Release);
        // Those of the newest epoch are replays of the oldest entries at that time.
        found.sort_by_key(|(epoch, number, ..)| (std::cmp::Reverse(*epoch), *number));
        Ok(found.into_iter().map(|(.., entry, made)| (entry, made)).collect())
    }

    fn parse_entry(
        &self,
        at: u64,
        len: u64,
        taken: (u64, u64),
        contents: Option<&PoolBuffer>,
    ) -> Result<(u64, u64, LoggedRequest, ChangeRecord), CorruptOplog> {
        let word = |field| self.u32_field(at, field).load(Ordering::Relaxed);
        let long = |field| self.u64_field(at, field).load(Ordering::Relaxed);
        let (epoch, number) = (long(ENTRY_EPOCH_OFFSET), long(ENTRY_CHANGE_NUMBER_OFFSET));
        if epoch >= self.epoch {
            return Err(CorruptOplog("a number"));
        }
        let (flags, errno) = (word(ENTRY_FLAGS_OFFSET), word(OUTCOME_ERRNO_OFFSET));
        // The kernel would reject the reply, and its client would wait for ever.
        if errno > MAX_REPLY_ERRNO {
            return Err(CorruptOplog("an errno"));
        }
        let outcome = RequestOutcome {
            errno: errno as i32,
            written_bytes: word(OUTCOME_WRITTEN_BYTES_OFFSET),
        };
        let outcome = (flags & FLAG_OUTCOME_RECORDED != 0).then_some(outcome);
        // The partial result of a failed change was submitted before its outcome was recorded.
        let has_failed = flags & FLAG_OUTCOME_RECORDED != 0 && errno != 0;
        let is_accepted =
            has_failed || flags & FLAG_DISK_ACCEPTED != 0 || epoch == taken.0 && number <= taken.1;
        if is_accepted {
            self.u32_field(at, ENTRY_FLAGS_OFFSET).fetch_or(FLAG_DISK_ACCEPTED, Ordering::Relaxed);
        }
        let request_len = word(REQUEST_LEN_OFFSET) as usize;
        if request_len as u64 > len - REQUEST_BYTES_OFFSET as u64 {
            return Err(CorruptOplog("the length of a request"));
        }
        let mut request = vec![0; request_len];
        self.memory.copy_out(self.byte_offset(at) + REQUEST_BYTES_OFFSET, &mut request);
        // A change that is not replayed needs no data.
        request.extend_from_slice(contents.filter(|_| !is_accepted).map_or(&[], |room| room));
        let inode = word(CREATED_INODE_OFFSET);
        let file = FileId { inode, generation: word(CREATED_GENERATION_OFFSET) };
        let nanoseconds = word(CHANGE_NANOSECONDS_OFFSET);
        if nanoseconds >= 1_000_000_000 {
            return Err(CorruptOplog("a time"));
        }
        let now = Time { seconds: long(CHANGE_SECONDS_OFFSET) as i64, nanoseconds };
        let renamed_inode = Some(word(RENAMED_INODE_OFFSET))
            .filter(|renamed_inode| *renamed_inode != 0)
            .map(InodeNumber);
        let made = ChangeRecord { now, inode: (inode != 0).then_some(file), renamed_inode };
        let inherited = LoggedRequest {
            position: at,
            unique: long(ENTRY_UNIQUE_OFFSET),
            request,
            created: made.inode.map(|made| Node(made.inode.into())),
            outcome,
            is_accepted,
            answered: flags & FLAG_REPLIED != 0,
        };
        Ok((epoch, number, inherited, made))
    }

    /// Reallocates the pool buffer that the entry at `at` refers to.
    fn reclaim_buffer(&self, at: u64) -> Result<Option<Arc<PoolBuffer>>, CorruptOplog> {
        let word = |field| self.u32_field(at, field).load(Ordering::Relaxed) as usize;
        let len = word(DATA_LEN_OFFSET);
        if len == 0 {
            return Ok(None);
        }
        let place =
            word(DATA_PAGE_OFFSET).checked_mul(ALIGN_BYTES).ok_or(CorruptOplog("a room"))?;
        let room = self.pool.allocate_at(place, len).ok_or(CorruptOplog("a room"))?;
        Ok(Some(Arc::new(room)))
    }

    /// Returns the pool of buffers for write data.
    pub(crate) fn buffer_pool(&self) -> &Arc<PagePool> {
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
    pub(crate) fn should_block_clients(&self) -> bool {
        self.pool.used_bytes() > CLIENT_WAIT_THRESHOLD_BYTES
    }

    /// Frees finished entries.
    pub(crate) fn free_finished_entries(&self) {
        self.free_finished_at_tail(&mut self.ring());
    }

    /// Records that the calling thread begins a request. While the ring has no space for it, calls
    /// `free_space` without holding a lock, which returns true if there may be space now.
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
        CURRENT_ENTRY.get().is_some_and(|at| {
            self.u32_field(at, ENTRY_STATE_OFFSET).load(Ordering::Relaxed) == STATE_APPLIED
        })
    }

    /// Records the outcome of the calling thread's change.
    pub(crate) fn record_outcome(&self, outcome: RequestOutcome) {
        let Some(at) = CURRENT_ENTRY.get() else { return };
        self.u32_field(at, OUTCOME_ERRNO_OFFSET).store(outcome.errno as u32, Ordering::Relaxed);
        self.u32_field(at, OUTCOME_WRITTEN_BYTES_OFFSET)
            .store(outcome.written_bytes, Ordering::Relaxed);
        self.u32_field(at, ENTRY_FLAGS_OFFSET).fetch_or(FLAG_OUTCOME_RECORDED, Ordering::Release);
    }

    /// Detaches the calling thread's entry, for the thread that will reply.
    pub(crate) fn defer_completion(&self) -> Option<DeferredRequest> {
        CURRENT_ENTRY.take().map(DeferredRequest)
    }

    /// Records that a deferred request was answered.
    pub(crate) fn finish_deferred(&self, DeferredRequest(at): DeferredRequest) {
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
            && self.u64_field(at, ENTRY_EPOCH_OFFSET).load(Ordering::Relaxed) != 0
        {
            std::thread::sleep(std::time::Duration::from_millis(2));
            self.u32_field(at, ENTRY_STATE_OFFSET).store(STATE_APPLIED, Ordering::Release);
        }
        match self.u32_field(at, ENTRY_STATE_OFFSET).load(Ordering::Relaxed) {
            STATE_PENDING => {
                self.u32_field(at, ENTRY_STATE_OFFSET).store(STATE_DROPPED, Ordering::Relaxed)
            }
            _ => drop(
                self.u32_field(at, ENTRY_FLAGS_OFFSET).fetch_or(FLAG_REPLIED, Ordering::Relaxed),
            ),
        }
    }

    /// Runs `work`, which replays the entry at `at`.
    pub(crate) fn replay(&self, at: u64, unique: u64, work: &mut dyn FnMut()) {
        self.in_flight_slot().store(unique, Ordering::Relaxed);
        CURRENT_ENTRY.set(Some(at));
        work();
        CURRENT_ENTRY.set(None);
        if self.u64_field(at, ENTRY_EPOCH_OFFSET).load(Ordering::Relaxed) != self.epoch {
            // The replay changed nothing.
            self.u32_field(at, ENTRY_STATE_OFFSET).store(STATE_DROPPED, Ordering::Relaxed);
        }
        self.in_flight_slot().store(0, Ordering::Relaxed);
    }

    /// Marks all entries of earlier epochs as answered: the kernel will not resend them any more.
    pub(crate) fn finish_inherited(&self, inherited: impl Iterator<Item = u64>) {
        self.orphan_table.end_replay();
        let ring = self.ring();
        // Entries before the tail are freed, and their space may be reused.
        for at in inherited.filter(|at| *at >= ring.tail) {
            let (state, flags) =
                (self.u32_field(at, ENTRY_STATE_OFFSET), self.u32_field(at, ENTRY_FLAGS_OFFSET));
            if flags.fetch_or(FLAG_REPLIED, Ordering::Relaxed) & FLAG_DISK_ACCEPTED != 0 {
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
        self.free_finished_at_tail(&mut ring);
        let request_len: usize = parts.iter().map(|part| part.len()).sum();
        let len =
            (REQUEST_BYTES_OFFSET as u64 + request_len as u64).next_multiple_of(ENTRY_ALIGN_BYTES);
        // No entry wraps around the end of the ring.
        let left = RING_BYTES - ring.head % RING_BYTES;
        let skip = if left < len { left } else { 0 };
        if ring.head + skip + len - ring.tail > RING_BYTES {
            return None;
        }
        if skip > 0 {
            self.u32_field(ring.head, ENTRY_LEN_OFFSET).store(skip as u32, Ordering::Relaxed);
            self.u32_field(ring.head, ENTRY_STATE_OFFSET).store(STATE_DROPPED, Ordering::Relaxed);
            ring.head += skip;
        }
        let at = ring.head;
        self.u32_field(at, ENTRY_LEN_OFFSET).store(len as u32, Ordering::Relaxed);
        self.u32_field(at, ENTRY_STATE_OFFSET).store(STATE_PENDING, Ordering::Relaxed);
        self.u64_field(at, ENTRY_UNIQUE_OFFSET).store(unique, Ordering::Relaxed);
        self.u64_field(at, ENTRY_EPOCH_OFFSET).store(0, Ordering::Relaxed);
        self.u32_field(at, CREATED_INODE_OFFSET).store(0, Ordering::Relaxed);
        self.u32_field(at, RENAMED_INODE_OFFSET).store(0, Ordering::Relaxed);
        self.u32_field(at, ENTRY_FLAGS_OFFSET).store(0, Ordering::Relaxed);
        self.u32_field(at, OUTCOME_ERRNO_OFFSET).store(0, Ordering::Relaxed);
        self.u32_field(at, REQUEST_LEN_OFFSET).store(request_len as u32, Ordering::Relaxed);
        let page = room.map_or(0, |room| room.offset() / ALIGN_BYTES);
        self.u32_field(at, DATA_PAGE_OFFSET).store(page as u32, Ordering::Relaxed);
        self.u32_field(at, DATA_LEN_OFFSET)
            .store(room.map_or(0, |room| room.len()) as u32, Ordering::Relaxed);
        let mut place = self.byte_offset(at) + REQUEST_BYTES_OFFSET;
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
    fn free_finished_at_tail(&self, ring: &mut EntryRing) {
        let taken = self.accepted_number.load(Ordering::Acquire);
        let old = ring.tail;
        while ring.tail < ring.head {
            let at = ring.tail;
            let is_gone = match self.u32_field(at, ENTRY_STATE_OFFSET).load(Ordering::Acquire) {
                STATE_PENDING => false,
                STATE_APPLIED => {
                    let (epoch, number) = (
                        self.u64_field(at, ENTRY_EPOCH_OFFSET),
                        self.u64_field(at, ENTRY_CHANGE_NUMBER_OFFSET),
                    );
                    self.u32_field(at, ENTRY_FLAGS_OFFSET).load(Ordering::Relaxed) & FLAG_REPLIED
                        != 0
                        && epoch.load(Ordering::Relaxed) == self.epoch
                        && number.load(Ordering::Relaxed) <= taken
                }
                _ => true,
            };
            match self.entry_len_at(at) {
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

    fn store_tail_and_head(&self, ring: &EntryRing) {
        let units = |at: u64| u64::from((at / ENTRY_ALIGN_BYTES) as u32);
        let ends = units(ring.tail) << 32 | units(ring.head);
        self.memory.atomic_u64(TAIL_AND_HEAD_OFFSET).store(ends, Ordering::Release);
    }

    fn entry_len_at(&self, at: u64) -> Option<u64> {
        let len = u64::from(self.u32_field(at, ENTRY_LEN_OFFSET).load(Ordering::Relaxed));
        let left = RING_BYTES - at % RING_BYTES;
        (len >= ENTRY_ALIGN_BYTES && len.is_multiple_of(ENTRY_ALIGN_BYTES) && len <= left)
            .then_some(len)
    }

    fn byte_offset(&self, at: u64) -> usize {
        HEADER_BYTES + (at % RING_BYTES) as usize
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
        self.memory.atomic_u64(IN_FLIGHT_OFFSET + 8 * hand)
    }

    fn ring(&self) -> MutexGuard<'_, EntryRing> {
        self.ring.lock()
    }
}

impl ChangeRecorder for OpLog {
    fn record_change(&self, number: u64, made: ChangeRecord) {
        let Some(at) = CURRENT_ENTRY.get() else { return };
        DelayPoint::Applied.pass();
        log::debug!("request {}: change {number}", self.in_flight_slot().load(Ordering::Relaxed));
        if let Some(file) = made.inode {
            self.u32_field(at, CREATED_INODE_OFFSET).store(file.inode, Ordering::Relaxed);
            self.u32_field(at, CREATED_GENERATION_OFFSET).store(file.generation, Ordering::Relaxed);
        }
        if let Some(InodeNumber(moved)) = made.renamed_inode {
            self.u32_field(at, RENAMED_INODE_OFFSET).store(moved, Ordering::Relaxed);
        }
        self.u64_field(at, CHANGE_SECONDS_OFFSET).store(made.now.seconds as u64, Ordering::Relaxed);
        self.u32_field(at, CHANGE_NANOSECONDS_OFFSET)
            .store(made.now.nanoseconds, Ordering::Relaxed);
        self.u64_field(at, ENTRY_CHANGE_NUMBER_OFFSET).store(number, Ordering::Relaxed);
        self.u64_field(at, ENTRY_EPOCH_OFFSET).store(self.epoch, Ordering::Release);
        if !InjectedFault::LogFirst.is_made() {
            self.u32_field(at, ENTRY_STATE_OFFSET).store(STATE_APPLIED, Ordering::Release);
        }
        DelayPoint::Logged.pass();
    }

    fn record_stop(&self, why: &str) {
        // The first error stays: later ones follow from it.
        if self.stop_reason().is_none() {
            let text = &why[..why.floor_char_boundary(MAX_STOP_TEXT_BYTES)];
            self.memory.copy_in(STOP_TEXT_OFFSET, text.as_bytes());
            self.memory.atomic_u64(STOP_LEN_OFFSET).store(text.len() as u64, Ordering::Release);
        }
    }

    fn record_accepted_through(&self, number: u64) {
        DelayPoint::Committed.pass();
        self.accepted_number.fetch_max(number, Ordering::Release);
        self.orphan_table.clear_superseded_part(&self.memory, number);
    }

    fn record_orphan(&self, number: u64, inode: InodeNumber, all: &dyn Fn() -> Vec<InodeNumber>) {
        if !InjectedFault::RecordOrphans.is_made() {
            self.orphan_table.add(&self.memory, number, inode, all);
        }
    }
}

#[cfg(test)]
mod tests;
