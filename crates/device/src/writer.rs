//! The writing half of a file disk: groups in order, one flush for all who wait.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::file::RawFile;
use crate::{Error, Group, Refused, Ticket};

/// Groups that may wait to be written; a submitter beyond this waits its turn.
const QUEUE_MAX: usize = 256;

/// Writes groups in a thread of its own.
#[derive(Debug)]
pub(crate) struct Writer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    file: Arc<RawFile>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Group>,
    /// Tickets given out, written, durable: each counts from 1, none overtakes the one before.
    given: u64,
    written: u64,
    durable: u64,
    flushing: bool,
    failed: Option<Error>,
    closing: bool,
}

impl Writer {
    pub(crate) fn start(file: Arc<RawFile>) -> Self {
        let state = Mutex::new(State::default());
        let shared = Arc::new(Shared { file, state, changed: Condvar::new() });
        let mine = shared.clone();
        let thread =
            std::thread::Builder::new().name("disk-write".into()).spawn(move || mine.write_all());
        // Without a thread every submit is refused as stopped.
        if let Err(error) = &thread {
            log::error!("no thread to write with: {error}");
            shared.lock().failed = Some(Error::Gone);
        }
        Self { shared, thread: thread.ok() }
    }

    /// Tickets are given in order and written in order, so `after` holds by itself.
    pub(crate) fn submit(&self, group: Group, after: &[Ticket]) -> Result<Ticket, Refused<Group>> {
        let refuse = |group, error| Err(Refused { goods: Some(group), error });
        let mut state = self.shared.lock();
        if let Some(&unknown) = after.iter().find(|ticket| ticket.0 > state.given) {
            return refuse(group, Error::NoTicket(unknown));
        }
        while state.queue.len() >= QUEUE_MAX && state.failed.is_none() {
            state = self.shared.sleep(state);
        }
        if state.failed.is_some() {
            return refuse(group, Error::Stopped);
        }
        state.given += 1;
        state.queue.push_back(group);
        self.shared.changed.notify_all();
        Ok(Ticket(state.given))
    }

    pub(crate) fn wait(&self, ticket: Ticket) -> Result<(), Error> {
        let mut state = self.shared.lock();
        if ticket.0 > state.given {
            return Err(Error::NoTicket(ticket));
        }
        loop {
            if state.durable >= ticket.0 {
                return Ok(());
            }
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if state.written >= ticket.0 && !state.flushing {
                state = self.shared.flush(state);
            } else {
                state = self.shared.sleep(state);
            }
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sleep<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// One flush covers everything written when it starts, whoever asked.
    fn flush<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let covered = state.written;
        state.flushing = true;
        drop(state);
        let flushed = self.file.flush();
        let mut state = self.lock();
        state.flushing = false;
        match flushed {
            Ok(()) => state.durable = state.durable.max(covered),
            Err(error) => state.stop(error),
        }
        self.changed.notify_all();
        state
    }

    fn write_all(&self) {
        let mut state = self.lock();
        loop {
            let Some(group) = state.queue.pop_front() else {
                if state.closing {
                    return;
                }
                state = self.sleep(state);
                continue;
            };
            drop(state);
            let written =
                group.writes.iter().try_for_each(|w| self.file.write(w.at_bytes, &w.block));
            drop(group);
            state = self.lock();
            match written {
                Ok(()) => state.written += 1,
                Err(error) => state.stop(error),
            }
            self.changed.notify_all();
        }
    }
}

impl State {
    /// The first failure ends all writing; what waits is dropped and its blocks go home.
    fn stop(&mut self, error: Error) {
        log::error!("{error}: nothing more is written to this disk");
        self.failed.get_or_insert(error);
        self.queue.clear();
    }
}
