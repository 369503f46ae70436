//! Reads that nobody waits for yet: queued, and served in disk order.
//!
//! The queue is an elevator: the next read is the first at or behind the last one's
//! end, else the first of the disk. Foreground reads never enter it, they go to the
//! device in their caller's thread. The thread takes neighbours together: one large
//! request, scattered into their blocks, wakes its waiter once.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use draconis_exchange::heap::Block;

use crate::file::RawFile;
use crate::uring::Ring;
use crate::{Extent, Pending, Promise, ReadAnswer, pending};

/// Serves reads ahead of their use.
#[derive(Debug)]
pub(crate) enum Ahead {
    /// Up to a ring's depth in flight.
    Uring(Ring),
    /// A few threads that read.
    Threads(Readers),
}

impl Ahead {
    pub(crate) fn start(file: Arc<RawFile>, uring: bool) -> Self {
        if uring {
            match Ring::start(file.clone()) {
                Ok(ring) => return Self::Uring(ring),
                Err(error) => log::info!("no io_uring here ({error}): a thread reads ahead"),
            }
        }
        Self::Threads(Readers::start(file))
    }

    pub(crate) fn uses_uring(&self) -> bool {
        matches!(self, Self::Uring(_))
    }

    pub(crate) fn read(&self, at: Extent, into: Block) -> Pending<ReadAnswer> {
        let (promise, answer) = pending();
        let request = Request { at, into, promise };
        match self {
            Self::Uring(ring) => ring.read(request),
            Self::Threads(readers) => readers.read(request),
        }
        answer
    }
}

/// One read and where its answer goes.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) at: Extent,
    pub(crate) into: Block,
    pub(crate) promise: Promise<ReadAnswer>,
}

/// The most that neighbours are read together, in bytes.
const RUN_BYTES: u64 = 512 << 10;
/// The most neighbours.
const RUN_REQUESTS: usize = 64;

/// Requests in disk order.
#[derive(Debug, Default)]
pub(crate) struct Elevator {
    waiting: BTreeMap<(u64, u64), Request>,
    waiting_bytes: u64,
    arrivals: u64,
    head_bytes: u64,
}

impl Elevator {
    pub(crate) fn push(&mut self, request: Request) {
        // The arrival number keeps two requests for one place apart.
        self.arrivals += 1;
        self.waiting_bytes += request.at.len_bytes;
        self.waiting.insert((request.at.start_bytes, self.arrivals), request);
    }

    pub(crate) fn pop(&mut self) -> Option<Request> {
        let ahead = self.waiting.range((self.head_bytes, 0)..).next();
        let key = *ahead.or_else(|| self.waiting.first_key_value())?.0;
        self.take(&key)
    }

    fn take(&mut self, key: &(u64, u64)) -> Option<Request> {
        let request = self.waiting.remove(key)?;
        self.waiting_bytes -= request.at.len_bytes;
        self.head_bytes = request.at.end_bytes().unwrap_or(0);
        Some(request)
    }

    /// The next request with those that follow it without a gap.
    fn pop_run(&mut self) -> Vec<Request> {
        let mut run: Vec<Request> = self.pop().into_iter().collect();
        let mut bytes = run.first().map_or(0, |first| first.at.len_bytes);
        while let Some(entry) = self.waiting.range((self.head_bytes, 0)..).next() {
            let (key, at) = (*entry.0, entry.1.at);
            let fits = bytes + at.len_bytes <= RUN_BYTES && run.len() < RUN_REQUESTS;
            if run.is_empty() || at.start_bytes != self.head_bytes || !fits {
                break;
            }
            bytes += at.len_bytes;
            run.extend(self.take(&key));
        }
        run
    }
}

/// Threads that read: as many requests as these are in flight at once.
const READERS: usize = 4;

/// A few threads that read what the elevator says.
#[derive(Debug)]
pub(crate) struct Readers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    file: Arc<RawFile>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    elevator: Elevator,
    closing: bool,
    /// Threads that sleep.
    sleeping: u64,
    /// Those of them that were told to wake.
    waking: u64,
}

impl State {
    /// Whether another thread would find something to do.
    fn wants_more(&self, threads: u64) -> bool {
        let awake = threads - self.sleeping + self.waking;
        self.sleeping > self.waking && awake < self.elevator.waiting_bytes.div_ceil(RUN_BYTES)
    }
}

impl Readers {
    fn start(file: Arc<RawFile>) -> Self {
        let state = Mutex::new(State::default());
        let shared = Arc::new(Shared { file, state, changed: Condvar::new() });
        let start = |_| {
            let mine = shared.clone();
            let thread = std::thread::Builder::new().name("disk-ahead".into());
            thread.spawn(move || mine.serve()).ok()
        };
        let threads: Vec<_> = (0..READERS).filter_map(start).collect();
        if threads.is_empty() {
            log::warn!("no thread to read ahead with: every read is waited for");
        }
        Self { shared, threads }
    }

    fn read(&self, request: Request) {
        if self.threads.is_empty() {
            self.shared.answer(request);
            return;
        }
        let mut state = self.shared.lock();
        state.elevator.push(request);
        // Waking costs a system call: one thread for all that it can take in one go.
        if state.wants_more(self.threads.len() as u64) {
            state.waking += 1;
            drop(state);
            self.shared.changed.notify_one();
        }
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, request: Request) {
        request.promise.keep(self.file.read(request.at, request.into));
    }

    /// One request for all where that is possible; each for itself where it is not, or
    /// if it failed: then some may still succeed.
    fn answer_run(&self, mut run: Vec<Request>) {
        let start_bytes = run.first().map_or(0, |first| first.at.start_bytes);
        let together = run.len() > 1
            && self.file.read_scattered(start_bytes, run.iter_mut().map(|it| &mut it.into));
        for request in run {
            if together {
                request.promise.keep(Ok(request.into));
            } else {
                self.answer(request);
            }
        }
    }

    fn serve(&self) {
        let mut state = self.lock();
        // Closing breaks the promises that still wait: nobody can be there to hear them.
        while !state.closing {
            let run = state.elevator.pop_run();
            match run.is_empty() {
                false => {
                    drop(state);
                    self.answer_run(run);
                    state = self.lock();
                }
                true => {
                    state.sleeping += 1;
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                    state.sleeping -= 1;
                    // A thread may wake without having been told: then another one sleeps
                    // on, and is told again by the next request.
                    state.waking = state.waking.saturating_sub(1);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_elevator_goes_up_and_starts_again() {
        let mut elevator = Elevator::default();
        let mut push = |start| {
            let (promise, _) = pending();
            let at = Extent::new(start, 10);
            elevator.push(Request { at, into: Block::private(0), promise });
        };
        [50, 10, 90, 10].into_iter().for_each(&mut push);
        let order: Vec<u64> =
            std::iter::from_fn(|| elevator.pop()).map(|r| r.at.start_bytes).collect();
        assert_eq!(order, [10, 50, 90, 10]);
    }

    #[test]
    fn neighbours_are_taken_together() {
        let mut elevator = Elevator::default();
        for start in [30, 10, 20, 50, 60, 60] {
            let (promise, _) = pending();
            let at = Extent::new(start, 10);
            elevator.push(Request { at, into: Block::private(0), promise });
        }
        let runs: Vec<usize> =
            std::iter::from_fn(|| Some(elevator.pop_run().len()).filter(|len| *len > 0)).collect();
        assert_eq!(runs, [3, 2, 1]);
    }

    #[test]
    fn what_is_read_together_lands_in_its_own_blocks() {
        let mut file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..100_000u32).map(|at| (at / 512) as u8).collect();
        std::io::Write::write_all(&mut file, &bytes).unwrap();
        let file = RawFile { fd: file.into(), align_bytes: 1, flushes: Default::default() };
        let read = |start, lens: [usize; 3]| {
            let mut blocks = lens.map(Block::private);
            file.read_scattered(start, blocks.iter_mut())
                .then(|| blocks.map(|block| block.bytes().unwrap().to_vec()).concat())
        };
        assert_eq!(read(512, [512, 4096, 1024]).as_deref(), bytes.get(512..512 + 5632));
        assert_eq!(read(99_000, [512, 512, 512]), None);
    }
}
