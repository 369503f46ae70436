//! Reader threads that serve an [`Elevator`].
//!
//! Threads start on demand: disks that are open briefly or read only synchronously have none.

use draconis_types::lock::{Condvar, Mutex, MutexGuard};
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::elevator::{Elevator, ReadRequest};

/// Source of requests and reader for one kind of thread.
pub(crate) trait ReadHandler: Send + Sync + 'static {
    /// Removes the requests that one thread serves at once; empty if there are none.
    fn take_batch(elevator: &mut Elevator) -> Vec<ReadRequest>;

    /// Returns the minimum number of threads that would find requests.
    fn min_threads(elevator: &Elevator) -> u64;

    /// Reads, and fulfils the promises.
    fn answer_requests(&self, requests: Vec<ReadRequest>);
}

/// A pool of up to as many threads as requests in flight.
#[derive(Debug)]
pub(crate) struct ReaderThreads<R> {
    shared: Arc<ReadersShared<R>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    most: u64,
}

#[derive(Debug)]
struct ReadersShared<R> {
    reads: Arc<R>,
    state: Mutex<ReadersState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ReadersState {
    elevator: Elevator,
    closing: bool,
    started: u64,
    /// Number of sleeping threads.
    sleeping: u64,
    /// Number of sleeping threads that were notified.
    waking: u64,
}

/// Action for a new request.
enum ThreadAction {
    /// Enough threads are awake.
    Nothing,
    Wake,
    Start,
}

impl ReadersState {
    /// Decides whether to wake or start a thread. Waking costs a system call and starting more, so
    /// one thread serves all that it can take at once.
    fn next_thread_action(&mut self, shares: u64, most: u64) -> ThreadAction {
        let awake = self.started - self.sleeping + self.waking;
        if awake >= shares {
            ThreadAction::Nothing
        } else if self.sleeping > self.waking {
            self.waking += 1;
            ThreadAction::Wake
        } else if self.started < most {
            self.started += 1;
            ThreadAction::Start
        } else {
            ThreadAction::Nothing
        }
    }
}

impl<R: ReadHandler> ReaderThreads<R> {
    pub(crate) fn new(reads: Arc<R>, most: usize) -> Self {
        let shared = ReadersShared { reads, state: Mutex::default(), changed: Condvar::new() };
        Self { shared: Arc::new(shared), threads: Mutex::default(), most: most as u64 }
    }

    pub(crate) fn read(&self, request: ReadRequest) {
        let mut state = self.shared.lock();
        state.elevator.push(request);
        let shares = R::min_threads(&state.elevator);
        let next = state.next_thread_action(shares, self.most);
        drop(state);
        match next {
            ThreadAction::Nothing => {}
            ThreadAction::Wake => {
                self.shared.changed.notify_one();
            }
            ThreadAction::Start => self.start(),
        }
    }

    /// Starts a thread that is already counted.
    fn start(&self) {
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name("disk-ahead".into());
        match thread.spawn(move || shared.run_thread()) {
            Ok(thread) => {
                self.threads.lock().push(thread);
            }
            Err(error) => {
                let mut state = self.shared.lock();
                state.started -= 1;
                if state.started == 0 {
                    log::warn!("no thread to read ahead with ({error}): every read is waited for");
                    drop(self.shared.serve_until_empty(state));
                }
            }
        }
    }
}

impl<R> Drop for ReaderThreads<R> {
    fn drop(&mut self) {
        self.shared.state.lock().closing = true;
        self.shared.changed.notify_all();
        let threads = self.threads.get_mut();
        for thread in threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl<R: ReadHandler> ReadersShared<R> {
    fn lock(&self) -> MutexGuard<'_, ReadersState> {
        self.state.lock()
    }

    /// Serves all pending requests; returns the lock once none are left.
    fn serve_until_empty<'a>(
        &'a self,
        mut state: MutexGuard<'a, ReadersState>,
    ) -> MutexGuard<'a, ReadersState> {
        // Closing breaks the pending promises, which have no waiters any more.
        while !state.closing {
            let requests = R::take_batch(&mut state.elevator);
            if requests.is_empty() {
                break;
            }
            drop(state);
            self.reads.answer_requests(requests);
            state = self.lock();
        }
        state
    }

    fn run_thread(&self) {
        let mut state = self.serve_until_empty(self.lock());
        while !state.closing {
            state.sleeping += 1;
            self.changed.wait(&mut state);
            state.sleeping -= 1;
            // A spurious wake-up: another thread sleeps on, and the next request notifies it again.
            state.waking = state.waking.saturating_sub(1);
            state = self.serve_until_empty(state);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::thread::ThreadId;

    use draconis_types::Block;

    use super::*;
    use crate::{Extent, promise_pair};

    /// Reads nothing; records the thread of each answer.
    #[derive(Debug, Default)]
    struct ThreadNameRecorder(Mutex<BTreeSet<String>>);

    impl ReadHandler for ThreadNameRecorder {
        fn take_batch(elevator: &mut Elevator) -> Vec<ReadRequest> {
            elevator.pop().into_iter().collect()
        }

        fn min_threads(_: &Elevator) -> u64 {
            u64::MAX
        }

        fn answer_requests(&self, requests: Vec<ReadRequest>) {
            let id: ThreadId = std::thread::current().id();
            self.0.lock().insert(format!("{id:?}"));
            requests
                .into_iter()
                .for_each(|request| request.promise.fulfill_promise(Ok(request.into)));
        }
    }

    #[test]
    fn reader_threads_start_on_demand_up_to_limit() {
        let noting = Arc::new(ThreadNameRecorder::default());
        let readers = ReaderThreads::new(noting.clone(), 3);
        assert_eq!(readers.threads.lock().len(), 0);
        let answers: Vec<_> = (0..100)
            .map(|i| {
                let (promise, answer) = promise_pair();
                let at = Extent::new(i * 512, 512);
                readers.read(ReadRequest { at, into: Block::private(512), promise });
                answer
            })
            .collect();
        answers.into_iter().for_each(|answer| drop(answer.wait().unwrap().unwrap()));
        assert!((1..=3).contains(&readers.threads.lock().len()));
        assert!(noting.0.lock().len() <= 3);
        drop(readers);
        assert_eq!(Arc::strong_count(&noting), 1, "all threads ended");
    }
}
