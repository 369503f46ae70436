//! FUSE over io_uring: a ring for each queue of the kernel, which has one for each CPU. This file
//! has all unsafe code of the crate.
//!
//! ```text
//!   /dev/fuse, not mounted ─▶ RingSet::new ─▶ the process confines itself ─▶ INIT
//!   thread of a queue:  register entries ─▶ wait ─▶ request ─▶ answer ─▶ commit and fetch ─▶ wait
//!   another thread:                                    └─▶ answer ─▶ wakes the queue's thread
//! ```
//! An entry is a header and a payload in memory of this process. The kernel copies a request into
//! them, and a commit hands the answer in them back.
//!
//! Law 1: rings are made before the process is confined. They refuse everything but commands to
//! `/dev/fuse` and operations without effect, so a confined process gains nothing by them.
//! Law 2: the memory of an entry belongs to the kernel from its submission until its completion was
//! seen, then to the one thread that answers it. It is never freed while the kernel may use it.
//! Law 3: only the thread of a queue submits its commands: the kernel delivers the next request
//! of an entry through the thread that submitted it.
#![allow(unsafe_code)]

use std::cell::{Cell, UnsafeCell};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use draconis_types::PrivateBuffer;
use draconis_types::lock::Mutex;
use io_uring::register::Restriction;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::event::EventfdFlags;
use rustix::fs::{MemfdFlags, SeekFrom};
use rustix::io::Errno;
use rustix::thread::CpuSet;

use super::decoder::{HEADER_BYTES, u32_at, u64_at};
use super::reply::HEADER_BYTES as REPLY_HEADER_BYTES;
use super::request::MAX_IO_BYTES;

/// Entries of each queue.
const ENTRIES: usize = 4;
/// Size of a submission queue: an entry each, and as many operations that wake.
const RING_SIZE: u32 = 2 * ENTRIES as u32;
/// `enum fuse_uring_cmd`.
const CMD_REGISTER: u32 = 1;
const CMD_COMMIT_AND_FETCH: u32 = 2;
/// User data of an operation that wakes the queue's thread.
const WAKE_USER_DATA: u64 = u64::MAX;
/// Offset of the length in a `struct io_uring_sqe`, for which the library has no setter.
const SQE_LEN_OFFSET: usize = 24;
/// `/dev/fuse` in the table of registered files.
const FUSE_FILE: types::Fixed = types::Fixed(0);
/// CPUs that may exist, which are the queues of the kernel.
const POSSIBLE_CPUS_FILE: &str = "/sys/devices/system/cpu/possible";

thread_local! {
    /// Number of the queue whose thread this is.
    static OWN_QUEUE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// `struct fuse_uring_req_header`.
#[repr(C, align(8))]
struct EntryHeader {
    in_out: [u8; 128],
    /// The fixed fields of the operation.
    fields: [u8; 128],
    flags: u64,
    commit_id: u64,
    payload_bytes: u32,
    padding: u32,
    reserved: u64,
}

/// One request at a time.
struct Entry {
    header: Box<UnsafeCell<EntryHeader>>,
    payload: UnsafeCell<PrivateBuffer>,
    vectors: Box<UnsafeCell<[libc::iovec; 2]>>,
    /// Id of the request to be answered; 0 while the kernel has the entry.
    unique: AtomicU64,
}

/// One queue of the kernel.
pub(super) struct Queue {
    number: usize,
    ring: std::mem::ManuallyDrop<IoUring<squeue::Entry128, cqueue::Entry>>,
    /// Guards the submission queue.
    submitting: Mutex<()>,
    entries: std::mem::ManuallyDrop<Vec<Entry>>,
    /// Entries that are answered and not committed.
    answered: Mutex<Vec<usize>>,
    /// Number of entries that the kernel or an answering thread has.
    live_entries: AtomicU64,
    /// A file in memory, for replies of the library.
    scratch: Mutex<OwnedFd>,
}

// SAFETY: the memory of an entry is used by one thread at a time (law 2), the submission queue
// under its lock, and the completion queue by the thread of the queue alone.
unsafe impl Sync for Queue {}
// SAFETY: nothing in it depends on the thread that made it.
unsafe impl Send for Queue {}

/// The rings of a mount: one for each queue of the kernel.
pub struct RingSet {
    queues: Vec<Queue>,
    /// True once the kernel has agreed to send requests over rings.
    agreed: AtomicBool,
    failed: AtomicBool,
    /// Readable once it has failed.
    failure: OwnedFd,
}

impl std::fmt::Debug for RingSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RingSet").field("queues", &self.queues.len()).finish_non_exhaustive()
    }
}

impl RingSet {
    /// Creates the rings for `fuse`, an open `/dev/fuse`.
    ///
    /// # Errors
    /// The system's error: `EPERM` or `ENOSYS` where rings are not available.
    pub fn new(fuse: impl AsFd) -> io::Result<Self> {
        let text = std::fs::read_to_string(POSSIBLE_CPUS_FILE)?;
        let cpus = parse_possible_cpus(&text)
            .ok_or_else(|| io::Error::other(format!("{POSSIBLE_CPUS_FILE} has gaps: {text:?}")))?;
        let queues = (0..cpus).map(|number| Queue::new(fuse.as_fd(), number));
        let queues = queues.collect::<io::Result<_>>()?;
        let failure = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (agreed, failed) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { queues, agreed, failed, failure })
    }

    /// Returns true once the kernel has agreed to send requests over rings.
    pub fn is_used(&self) -> bool {
        self.agreed.load(Ordering::Relaxed)
    }

    pub(super) fn set_used(&self) {
        self.agreed.store(true, Ordering::Relaxed);
    }

    pub(super) fn queues(&self) -> &[Queue] {
        &self.queues
    }

    /// Returns the queue and the entry of an unanswered request; `None` if it came over the device
    /// file.
    pub(super) fn find(&self, unique: u64) -> Option<(&Queue, usize)> {
        let own = OWN_QUEUE.get().and_then(|number| self.queues.get(number));
        own.into_iter().chain(&self.queues).find_map(|queue| Some((queue, queue.find(unique)?)))
    }

    /// Ends the threads of all queues and of the device file: one of them has failed, and without
    /// it some programs would wait for ever.
    pub(super) fn report_failure(&self) {
        self.failed.store(true, Ordering::SeqCst);
        // Fails only if it was reported very often.
        let _ = rustix::io::write(&self.failure, &1_u64.to_ne_bytes());
        self.queues.iter().for_each(Queue::wake);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    pub(super) fn failure(&self) -> BorrowedFd<'_> {
        self.failure.as_fd()
    }
}

/// Parses a list of CPUs such as `0-3`. Returns their number; `None` if some are missing.
fn parse_possible_cpus(text: &str) -> Option<usize> {
    let (first, last) = text.trim().split_once('-').unwrap_or((text.trim(), text.trim()));
    let last: u16 = last.parse().ok()?;
    (first == "0").then_some(usize::from(last) + 1)
}

impl Queue {
    fn new(fuse: BorrowedFd<'_>, number: usize) -> io::Result<Self> {
        let ring = IoUring::<squeue::Entry128, cqueue::Entry>::builder()
            .setup_r_disabled()
            .build(RING_SIZE)?;
        let submitter = ring.submitter();
        submitter.register_files(&[fuse.as_raw_fd()])?;
        let fixed = squeue::Flags::FIXED_FILE.bits();
        submitter.register_restrictions(&mut [
            Restriction::sqe_op(opcode::UringCmd80::CODE),
            Restriction::sqe_op(opcode::Nop::CODE),
            Restriction::sqe_flags_allowed(fixed),
            Restriction::sqe_flags_required(fixed),
        ])?;
        submitter.register_enable_rings()?;
        let scratch = rustix::fs::memfd_create("fuse-reply", MemfdFlags::CLOEXEC)?;
        Ok(Self {
            number,
            ring: std::mem::ManuallyDrop::new(ring),
            submitting: Mutex::new(()),
            entries: std::mem::ManuallyDrop::new((0..ENTRIES).map(|_| Entry::new()).collect()),
            answered: Mutex::default(),
            live_entries: AtomicU64::new(0),
            scratch: Mutex::new(scratch),
        })
    }

    pub(super) fn number(&self) -> usize {
        self.number
    }

    /// Makes the calling thread the thread of this queue, and gives the kernel its entries.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn start(&self) -> io::Result<()> {
        OWN_QUEUE.set(Some(self.number));
        let mut cpus = CpuSet::new();
        if self.number < CpuSet::MAX_CPU {
            cpus.set(self.number);
        }
        // The queue of a CPU that is offline is served anywhere.
        if let Err(errno) = rustix::thread::sched_setaffinity(None, &cpus) {
            log::debug!("the thread of queue {} has no CPU of its own: {errno}", self.number);
        }
        self.live_entries.store(ENTRIES as u64, Ordering::Relaxed);
        let all = (0..ENTRIES).map(|index| self.build_command(index, CMD_REGISTER, 0));
        self.submit(&all.collect::<Vec<_>>())
    }

    /// Commits answered entries, and appends the entries with new requests to `arrived`. Returns
    /// false once the mount has ended.
    ///
    /// # Errors
    /// The kernel's error, after which the queue cannot be used.
    pub(super) fn collect(&self, arrived: &mut Vec<usize>) -> io::Result<bool> {
        let answered = std::mem::take(&mut *self.answered.lock());
        if !answered.is_empty() {
            let commits = answered.into_iter().map(|index| {
                // SAFETY: answered, and not submitted yet: this thread has it (law 2).
                let commit_id = unsafe { (*self.entries[index].header.get()).commit_id };
                self.build_command(index, CMD_COMMIT_AND_FETCH, commit_id)
            });
            self.submit(&commits.collect::<Vec<_>>())?;
        }
        // SAFETY: only this thread uses the completion queue.
        for done in unsafe { self.ring.completion_shared() } {
            let index = done.user_data() as usize;
            // None: an operation that woke this thread.
            let Some(entry) = self.entries.get(index) else { continue };
            if done.result() >= 0 {
                // SAFETY: completed, so this thread has it (law 2).
                let header = unsafe { &*entry.header.get() };
                let unique = u64_at(&header.in_out, 8).unwrap_or_default();
                entry.unique.store(unique, Ordering::Release);
                arrived.push(index);
                continue;
            }
            self.live_entries.fetch_sub(1, Ordering::Relaxed);
            let error = io::Error::from_raw_os_error(-done.result());
            let ended = [Errno::NOTCONN, Errno::CANCELED, Errno::CONNABORTED];
            // Else it was unmounted or aborted.
            if !ended.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error())) {
                return Err(error);
            }
        }
        Ok(self.live_entries.load(Ordering::Relaxed) > 0)
    }

    /// Sleeps until there is something to collect.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn sleep(&self) -> io::Result<()> {
        match self.ring.submitter().submit_and_wait(1) {
            Err(error) if error.raw_os_error() != Some(libc::EINTR) => Err(error),
            _ => Ok(()),
        }
    }

    /// Passes the parts of a request to `load`: header, fixed fields, names and data.
    pub(super) fn read_request(&self, index: usize, load: impl FnOnce([&[u8]; 3])) {
        let entry = &self.entries[index];
        // SAFETY: it arrived and is not answered: one thread has it (law 2).
        let (header, payload) = unsafe { (&*entry.header.get(), &*entry.payload.get()) };
        let payload = payload.get(..header.payload_bytes as usize).unwrap_or_default();
        let whole = u32_at(&header.in_out, 0).unwrap_or_default() as usize;
        let fields = whole.saturating_sub(HEADER_BYTES + payload.len());
        let fields = header.fields.get(..fields).unwrap_or_default();
        load([&header.in_out[..HEADER_BYTES], fields, payload]);
    }

    fn find(&self, unique: u64) -> Option<usize> {
        self.entries.iter().position(|entry| entry.unique.load(Ordering::Acquire) == unique)
    }

    /// Answers the request of an entry with a whole reply, in parts.
    pub(super) fn answer(&self, index: usize, parts: &[IoSlice<'_>]) {
        self.answer_with(index, |head, payload| {
            let mut rest = &mut *payload;
            let mut begun = 0;
            for part in parts {
                let split = part.len().min(REPLY_HEADER_BYTES - begun);
                let (first, data) = part.split_at_checked(split)?;
                head.get_mut(begun..begun + split)?.copy_from_slice(first);
                begun += split;
                let (into, behind) = rest.split_at_mut_checked(data.len())?;
                into.copy_from_slice(data);
                rest = behind;
            }
            let left = rest.len();
            Some(payload.len() - left)
        });
    }

    /// Has `write` write a whole reply to a file, and answers the request of an entry with it.
    pub(super) fn answer_from_file(&self, index: usize, write: impl FnOnce(BorrowedFd<'_>)) {
        let scratch = self.scratch.lock();
        write(scratch.as_fd());
        self.answer_with(index, |head, payload| {
            let len = rustix::fs::seek(&*scratch, SeekFrom::Current(0)).ok()? as usize;
            rustix::fs::seek(&*scratch, SeekFrom::Start(0)).ok()?;
            let data = payload.get_mut(..len.checked_sub(head.len())?)?;
            let got = rustix::io::pread(&*scratch, &mut *head, 0).ok()?
                + rustix::io::pread(&*scratch, &mut *data, head.len() as u64).ok()?;
            (got == len).then_some(data.len())
        });
    }

    /// Has `fill` fill header and payload of an entry's answer, and return the payload's length.
    fn answer_with(
        &self,
        index: usize,
        fill: impl FnOnce(&mut [u8; REPLY_HEADER_BYTES], &mut [u8]) -> Option<usize>,
    ) {
        let entry = &self.entries[index];
        let unique = entry.unique.load(Ordering::Relaxed);
        let mut head = [0; REPLY_HEADER_BYTES];
        // SAFETY: it arrived and is not answered: this thread has it (law 2).
        let (header, payload) = unsafe { (&mut *entry.header.get(), &mut *entry.payload.get()) };
        let len = fill(&mut head, payload).unwrap_or_else(|| {
            head[4..8].copy_from_slice(&(-Errno::IO.raw_os_error()).to_ne_bytes());
            head[8..].copy_from_slice(&unique.to_ne_bytes());
            0
        });
        header.in_out[..REPLY_HEADER_BYTES].copy_from_slice(&head);
        header.payload_bytes = len as u32;
        entry.unique.store(0, Ordering::Release);
        self.answered.lock().push(index);
        if OWN_QUEUE.get() != Some(self.number) {
            self.wake();
        }
    }

    /// Wakes the queue's thread.
    fn wake(&self) {
        let wake = opcode::Nop::new().build().flags(squeue::Flags::FIXED_FILE);
        let wake = squeue::Entry128::from(wake).user_data(WAKE_USER_DATA);
        if let Err(error) = self.submit(&[wake]) {
            log::error!("queue {} was not woken: {error}", self.number);
        }
    }

    fn build_command(&self, index: usize, command: u32, commit_id: u64) -> squeue::Entry128 {
        // `struct fuse_uring_cmd_req`: flags, commit id, queue.
        let mut request = [0; 80];
        request[8..16].copy_from_slice(&commit_id.to_ne_bytes());
        request[16..18].copy_from_slice(&(self.number as u16).to_ne_bytes());
        let vectors = self.entries[index].vectors.get();
        let mut built = opcode::UringCmd80::new(FUSE_FILE, command)
            .cmd(request)
            .addr(Some(vectors as u64))
            .build()
            .user_data(index as u64);
        // SAFETY: an `Entry128` is a `struct io_uring_sqe` of 128 bytes.
        unsafe { (&raw mut built).byte_add(SQE_LEN_OFFSET).cast::<u32>().write_unaligned(2) };
        built
    }

    /// Submits at once, so that no other thread does.
    fn submit(&self, all: &[squeue::Entry128]) -> io::Result<()> {
        let _submitting = self.submitting.lock();
        // SAFETY: under the lock. The memory of entries lives until the ring has ended: see `Drop`.
        unsafe { self.ring.submission_shared().push_multiple(all) }
            .map_err(|_| io::Error::from(Errno::BUSY))?;
        loop {
            match self.ring.submit() {
                Ok(_) => return Ok(()),
                Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // The kernel may still write into entries: their memory and the ring then stay.
        if self.live_entries.load(Ordering::Relaxed) == 0 {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe {
                std::mem::ManuallyDrop::drop(&mut self.ring);
                std::mem::ManuallyDrop::drop(&mut self.entries);
            }
        }
    }
}

impl Entry {
    fn new() -> Self {
        let header = Box::new(UnsafeCell::new(EntryHeader {
            in_out: [0; 128],
            fields: [0; 128],
            flags: 0,
            commit_id: 0,
            payload_bytes: 0,
            padding: 0,
            reserved: 0,
        }));
        let mut payload = PrivateBuffer::new(MAX_IO_BYTES);
        let vectors = [
            libc::iovec { iov_base: header.get().cast(), iov_len: size_of::<EntryHeader>() },
            libc::iovec { iov_base: payload.as_mut_ptr().cast(), iov_len: payload.len() },
        ];
        Self {
            header,
            payload: UnsafeCell::new(payload),
            vectors: Box::new(UnsafeCell::new(vectors)),
            unique: AtomicU64::new(0),
        }
    }
}

#[cfg(test)]
mod lost_requests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn possible_cpus_are_counted() {
        assert_eq!(parse_possible_cpus("0-127\n"), Some(128));
        assert_eq!(parse_possible_cpus("0\n"), Some(1));
        for text in ["", "1-3", "0-1,4-5", "0-x", "0-99999999"] {
            assert_eq!(parse_possible_cpus(text), None, "{text}");
        }
    }

    #[test]
    fn ring_refuses_other_operations_and_files() {
        assert_eq!(size_of::<EntryHeader>(), 288);
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let Ok(queue) = Queue::new(ours.as_fd(), 0) else {
            draconis_testkit::report_skipped("restrictions of rings: no io_uring");
            return;
        };
        let nop = squeue::Entry128::from(opcode::Nop::new().build());
        let fixed = squeue::Flags::FIXED_FILE;
        let mut byte = [0_u8];
        let read = opcode::Read::new(FUSE_FILE, byte.as_mut_ptr(), 1).build();
        let other = opcode::UringCmd80::new(types::Fd(ours.as_raw_fd()), 0).build();
        let allowed = squeue::Entry128::from(opcode::Nop::new().build()).flags(fixed);
        for (entry, expected) in [
            (nop, -libc::EACCES),
            (read.into(), -libc::EACCES),
            (other, -libc::EACCES),
            (allowed, 0),
        ] {
            queue.submit(&[entry]).unwrap();
            queue.sleep().unwrap();
            // SAFETY: only this thread uses it.
            let done: Vec<_> = unsafe { queue.ring.completion_shared() }.collect();
            assert_eq!(done.iter().map(cqueue::Entry::result).collect::<Vec<_>>(), [expected]);
        }
        assert!(queue.ring.submitter().register_eventfd(ours.as_raw_fd()).is_err());
    }
}
