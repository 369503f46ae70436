//! Read-ahead: reads that have no waiter yet, queued and served in disk order
//! ([`Elevator`]) by a ring or by threads.
//!
//! Foreground reads never enter the queue, they go to the device in their caller's thread.
//! A thread takes neighbours together: one large request, scattered into their blocks,
//! wakes its waiter once.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use draconis_exchange::heap::Block;

pub(crate) use crate::elevator::{Elevator, Request};
use crate::raw::RawFile;
use crate::uring::Ring;
use crate::{Extent, Pending, ReadAnswer, pending};

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
        self.sleeping > self.waking && awake < self.elevator.runs()
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
        // Closing breaks the promises that still wait: they have no waiter any more.
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
