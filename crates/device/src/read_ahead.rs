//! Read-ahead: reads without a waiter yet.
//!
//! ```text
//!   in the page cache ────▶ copied in the caller's thread
//!   short, not cached ────▶ the system has started to read; the waiter copies
//!   direct I/O, or long ──▶ queued and served in disk order (`Elevator`) by a ring or threads
//! ```
//! Foreground reads bypass the queue and go to the device in the calling thread. A worker thread
//! reads neighbours with one large request, scattered into their blocks, and wakes their waiter
//! once.

use std::sync::Arc;

use draconis_types::Block;
use draconis_types::lock::Mutex;

use crate::elevator::{Elevator, ReadRequest};
use crate::pending::DeferredAnswer;
use crate::raw::{NowaitRead, RawFile};
use crate::readers::{ReadHandler, ReaderThreads};
use crate::uring::ReadRing;
use crate::{Extent, Pending, ReadAnswer, promise_pair};

/// Maximum bytes of a read that first tries the page cache. Copying that much is cheaper than
/// waking a thread, and the system reads it ahead in one go.
const MAX_KERNEL_READAHEAD_BYTES: u64 = 128 << 10;

/// Read-ahead of a file disk.
#[derive(Debug)]
pub(crate) struct ReadAhead {
    file: Arc<RawFile>,
    queue: ReadAheadQueue,
}

#[derive(Debug)]
enum ReadAheadQueue {
    /// io_uring, up to its depth in flight.
    Uring(ReadRing),
    /// A few reader threads.
    Threads(ReaderThreads<RawFile>),
}

impl ReadAhead {
    pub(crate) fn start(file: Arc<RawFile>, uring: bool) -> Self {
        let ring = uring.then(|| ReadRing::start(file.clone()));
        let queue = match ring {
            Some(Ok(ring)) => ReadAheadQueue::Uring(ring),
            Some(Err(error)) => {
                log::info!("no io_uring here ({error}): a thread reads ahead");
                ReadAheadQueue::Threads(ReaderThreads::new(file.clone(), MAX_READER_THREADS))
            }
            None => ReadAheadQueue::Threads(ReaderThreads::new(file.clone(), MAX_READER_THREADS)),
        };
        Self { file, queue }
    }

    pub(crate) fn uses_uring(&self) -> bool {
        matches!(self.queue, ReadAheadQueue::Uring(_))
    }

    pub(crate) fn read(&self, at: Extent, mut into: Block) -> Pending<ReadAnswer> {
        if at.len_bytes <= MAX_KERNEL_READAHEAD_BYTES {
            match self.file.read_nowait(at, &mut into) {
                NowaitRead::Done => return Pending::ready(Ok(into)),
                NowaitRead::Started => {
                    let state = Mutex::new(ReadAheadState::Started(into));
                    return Pending::deferred(KernelReadAhead {
                        file: self.file.clone(),
                        at,
                        state,
                    });
                }
                NowaitRead::Unable => {}
            }
        }
        let (promise, answer) = promise_pair();
        let request = ReadRequest { at, into, promise };
        match &self.queue {
            ReadAheadQueue::Uring(ring) => ring.read(request),
            ReadAheadQueue::Threads(readers) => readers.read(request),
        }
        answer
    }
}

/// A read that the system has already started as read-ahead.
#[derive(Debug)]
struct KernelReadAhead {
    file: Arc<RawFile>,
    at: Extent,
    state: Mutex<ReadAheadState>,
}

#[derive(Debug)]
enum ReadAheadState {
    Started(Block),
    Done(Block),
}

impl DeferredAnswer<ReadAnswer> for KernelReadAhead {
    fn is_ready(&self) -> bool {
        let mut state = self.state.lock();
        if let ReadAheadState::Started(into) = &mut *state
            && matches!(self.file.read_nowait(self.at, into), NowaitRead::Done)
        {
            let into = std::mem::replace(into, Block::private(0));
            *state = ReadAheadState::Done(into);
        }
        matches!(*state, ReadAheadState::Done(_))
    }

    fn wait(self: Box<Self>) -> Option<ReadAnswer> {
        Some(match self.state.into_inner() {
            ReadAheadState::Done(into) => Ok(into),
            ReadAheadState::Started(into) => self.file.read(self.at, into),
        })
    }
}

/// Number of requests in flight.
const MAX_READER_THREADS: usize = 8;

/// Reads neighbours with one request if possible. Otherwise, or if that fails, reads each alone:
/// some may still succeed.
impl ReadHandler for RawFile {
    fn take_batch(elevator: &mut Elevator) -> Vec<ReadRequest> {
        elevator.pop_run()
    }

    fn min_threads(elevator: &Elevator) -> u64 {
        elevator.min_run_count()
    }

    fn answer_requests(&self, mut run: Vec<ReadRequest>) {
        let start_bytes = run.first().map_or(0, |first| first.at.start_bytes);
        let together = run.len() > 1
            && self.read_scattered(start_bytes, run.iter_mut().map(|it| &mut it.into));
        for ReadRequest { at, into, promise } in run {
            promise.fulfill_promise(if together { Ok(into) } else { self.read(at, into) });
        }
    }
}
