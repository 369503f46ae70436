//! Reads ahead and writes of a group through io_uring, and the one ioctl that a block device
//! needs: this file is the crate's only unsafe code.
//!
//! ```text
//!   caller ── push ──▶ ring, while fewer than DEPTH are in flight; else elevator
//!   reaper thread: wait for a completion ─▶ keep its promise ─▶ next of the elevator
//!
//!   writer thread: push while fewer than DEPTH are in flight ─▶ wait ─▶ until all are done
//! ```
//!
//! Law 1: the kernel writes only into memory of [`InFlight`] entries, and an entry leaves
//! the table only after its completion was seen. The ring is closed after the last one.
//! Law 2: what the kernel reads is borrowed until the last completion was seen.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::io::IoSlice;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use draconis_exchange::heap::{Block, Private};
use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::Errno;
use rustix::ioctl;

use crate::ahead::{Elevator, Request};
use crate::file::RawFile;
use crate::{Extent, Promise, ReadAnswer};

/// Requests in flight at once: where the disks we measured are close to their best. A
/// virtual disk gave 45,000 random 4 KiB reads a second with 16, 54,000 with 32 and no more
/// with 64.
const DEPTH: usize = 32;
/// Marks the completion that ends the reaper.
const STOP: u64 = u64::MAX;

/// A ring, its reaper and the reads that wait for a place.
#[derive(Debug)]
pub(crate) struct Ring {
    shared: Arc<Shared>,
    reaper: Option<JoinHandle<()>>,
}

struct Shared {
    file: Arc<RawFile>,
    ring: IoUring,
    /// Guards the submission queue as well as what it says.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    elevator: Elevator,
    in_flight: HashMap<u64, InFlight>,
    next_id: u64,
    closing: bool,
}

/// A read that the kernel is working on; `memory` must not move or go away meanwhile.
#[derive(Debug)]
struct InFlight {
    at: Extent,
    memory: Private,
    promise: Promise<ReadAnswer>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("file", &self.file).finish_non_exhaustive()
    }
}

impl Ring {
    /// Sets a ring up for `file`.
    ///
    /// # Errors
    /// What the system says, `EPERM` or `ENOSYS` where rings are not to be had.
    pub(crate) fn start(file: Arc<RawFile>) -> std::io::Result<Self> {
        // Room for every read and the stop message.
        let ring = IoUring::new(2 * DEPTH as u32)?;
        let shared = Arc::new(Shared { file, ring, state: Mutex::new(State::default()) });
        let mine = shared.clone();
        let reaper =
            std::thread::Builder::new().name("disk-uring".into()).spawn(move || mine.reap())?;
        Ok(Self { shared, reaper: Some(reaper) })
    }

    pub(crate) fn read(&self, request: Request) {
        // A ring needs private memory that the kernel can fill as it is.
        if request.into.bytes().is_none() || !self.shared.file.aligned(request.at) {
            request.promise.keep(self.shared.file.read(request.at, request.into));
            return;
        }
        let mut state = self.shared.lock();
        state.elevator.push(request);
        if let Err(errno) = self.shared.fill(&mut state) {
            log::warn!("io_uring refused a read: {errno}");
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        {
            let mut state = self.shared.lock();
            state.closing = true;
            state.elevator = Elevator::default();
            let stop = opcode::Nop::new().build().user_data(STOP);
            if self.shared.push(&state, &stop).is_err() {
                // Without the message the reaper sleeps on; leave it the ring and go.
                self.reaper = None;
            }
        }
        if let Some(reaper) = self.reaper.take() {
            let _ = reaper.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves reads from the elevator into the ring while there is room.
    fn fill(&self, state: &mut State) -> rustix::io::Result<()> {
        while state.in_flight.len() < DEPTH {
            let Some(request) = state.elevator.pop() else { break };
            let id = state.next_id;
            state.next_id += 1;
            let Request { at, into, promise } = request;
            let mut memory = into.into_private();
            let len = u32::try_from(memory.len()).unwrap_or(u32::MAX);
            let fd = types::Fd(self.file.fd.as_raw_fd());
            let entry = opcode::Read::new(fd, memory.as_mut_ptr(), len)
                .offset(at.start_bytes)
                .build()
                .user_data(id);
            state.in_flight.insert(id, InFlight { at, memory, promise });
            if let Err(errno) = self.push(state, &entry) {
                // The kernel never saw it: answer in this thread instead.
                if let Some(read) = state.in_flight.remove(&id) {
                    let answer = self.file.read(read.at, Block::from(read.memory));
                    read.promise.keep(answer);
                }
                return Err(errno);
            }
        }
        Ok(())
    }

    fn push(&self, _guard: &State, entry: &squeue::Entry) -> rustix::io::Result<()> {
        // SAFETY: the submission queue is touched here only, and `_guard` proves that the
        // state's lock is held. The entry's memory lives in `in_flight` until its
        // completion is seen (the law above), and moving a `Private` does not move its bytes.
        let pushed = unsafe { self.ring.submission_shared().push(entry) };
        pushed.map_err(|_| Errno::BUSY)?;
        loop {
            match self.ring.submit() {
                Ok(_) => return Ok(()),
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::INTR | Errno::AGAIN | Errno::BUSY) => std::thread::yield_now(),
                    // The entry is in the queue: the reaper's next call submits it.
                    _ => return Ok(()),
                },
            }
        }
    }

    fn reap(&self) {
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if Errno::from_io_error(&error) == Some(Errno::INTR) => continue,
                Err(error) => {
                    log::error!("io_uring stopped working: {error}");
                    std::thread::sleep(std::time::Duration::from_millis(10));
                }
            }
            let mut stop = false;
            // SAFETY: this thread alone touches the completion queue.
            let completions: Vec<(u64, i32)> = unsafe { self.ring.completion_shared() }
                .map(|done| (done.user_data(), done.result()))
                .collect();
            let mut state = self.lock();
            for (id, result) in completions {
                match state.in_flight.remove(&id) {
                    Some(read) => read.finish(result, &self.file),
                    None => stop |= id == STOP,
                }
            }
            state.closing |= stop;
            if state.closing && state.in_flight.is_empty() {
                return;
            }
            if let Err(errno) = self.fill(&mut state) {
                log::warn!("io_uring refused a read: {errno}");
            }
        }
    }
}

/// One write: where, and its parts one behind the other.
#[derive(Debug)]
pub(crate) struct Gathered<'a> {
    pub(crate) at: Extent,
    pub(crate) parts: Vec<IoSlice<'a>>,
}

/// A ring that writes for the thread that owns it.
pub(crate) struct WriteRing(IoUring);

impl WriteRing {
    /// Sets a ring up.
    ///
    /// # Errors
    /// As [`Ring::start`].
    pub(crate) fn start() -> std::io::Result<Self> {
        Ok(Self(IoUring::new(DEPTH as u32)?))
    }

    /// Writes all of `writes`, several at once and in no order; says of each whether it was
    /// written whole.
    pub(crate) fn write(&mut self, file: &RawFile, writes: &[Gathered<'_>]) -> Vec<bool> {
        let mut done = vec![false; writes.len()];
        let (mut next, mut flying) = (0, 0);
        while next < writes.len() || flying > 0 {
            while flying < DEPTH && next < writes.len() {
                let Gathered { at, parts } = &writes[next];
                let fd = types::Fd(file.fd.as_raw_fd());
                // `IoSlice` is laid out as `iovec`; there are at most `IOV_MAX`.
                let entry = opcode::Writev::new(fd, parts.as_ptr().cast(), parts.len() as u32)
                    .offset(at.start_bytes)
                    .build()
                    .user_data(next as u64);
                // SAFETY: `writes` and the bytes its parts borrow outlive this call, which
                // ends only once nothing is in flight.
                if unsafe { self.0.submission().push(&entry) }.is_err() {
                    break;
                }
                (next, flying) = (next + 1, flying + 1);
            }
            if let Err(error) = self.0.submit_and_wait(1)
                && !matches!(
                    Errno::from_io_error(&error),
                    Some(Errno::INTR | Errno::AGAIN | Errno::BUSY)
                )
            {
                // What is in flight cannot be left alone: its memory would go away.
                log::error!("io_uring stopped working: {error}");
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            for completion in self.0.completion() {
                flying -= 1;
                let nth = completion.user_data() as usize;
                let put = u64::try_from(completion.result()).ok();
                done[nth] = put == Some(writes[nth].at.len_bytes);
            }
        }
        done
    }
}

impl std::fmt::Debug for WriteRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WriteRing").finish_non_exhaustive()
    }
}

/// Tells a block device that nobody needs what is in `extent`.
///
/// # Errors
/// What the system says, `ENOTTY` of what is no block device.
pub(crate) fn discard_blocks(fd: &OwnedFd, extent: Extent) -> rustix::io::Result<()> {
    /// `BLKDISCARD`, which takes where and how much, in bytes.
    const DISCARD: ioctl::Opcode = ioctl::opcode::none(0x12, 119);
    let range = [extent.start_bytes, extent.len_bytes];
    // SAFETY: `BLKDISCARD` reads two 64-bit numbers from where its argument points, and
    // the setter points it to such an array of its own.
    unsafe { ioctl::ioctl(fd, ioctl::Setter::<DISCARD, [u64; 2]>::new(range)) }
}

impl InFlight {
    fn finish(self, result: i32, file: &RawFile) {
        let block = Block::from(self.memory);
        let whole = usize::try_from(result).is_ok_and(|got| got == block.len());
        // Short or failed: asking again in this thread tells what is the matter.
        let answer = if whole { Ok(block) } else { file.read(self.at, block) };
        self.promise.keep(answer);
    }
}
