//! Which thread of a queue leads.
//!
//! ```text
//!   followers ── one becomes the leader: it takes requests and waits for kicks
//!   leader ─┬─ more requests: leaves; a follower is woken and leads
//!           └─ no more: busy; it goes on as leader, unless a follower has found it busy for a tick
//! ```
//!
//! One follower looks at each tick, as long as requests keep coming, so that no thread has to be woken
//! for a request.

use std::time::Duration;

use draconis_types::lock::{Condvar, Mutex, MutexGuard};

/// Interval at which a follower looks whether the leader is busy.
const TICK: Duration = Duration::from_millis(1);
/// Number of ticks without a request after which the follower sleeps until it is woken.
const MAX_IDLE_TICKS: u32 = 20;

/// Number of a term of leading. Each leader has another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Term(u64);

#[derive(Default)]
pub(crate) struct Lead {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    term: u64,
    has_leader: bool,
    /// True while the leader carries a request out.
    is_busy: bool,
    /// Number of requests that leaders have carried out.
    requests: u64,
    /// Number of threads that neither lead nor carry a request out.
    followers: usize,
    /// True if a follower looks at each tick.
    has_watcher: bool,
    is_stopping: bool,
}

impl State {
    fn start_term(&mut self) -> Term {
        self.term += 1;
        (self.has_leader, self.is_busy) = (true, false);
        Term(self.term)
    }
}

impl Lead {
    /// Counts a thread that is started.
    pub(crate) fn add_follower(&self) {
        self.state.lock().followers += 1;
    }

    /// Waits until the calling follower leads; `None` once the queue stops.
    pub(crate) fn take_over(&self) -> Option<Term> {
        let mut state = self.state.lock();
        let term = loop {
            if state.is_stopping {
                break None;
            }
            if !state.has_leader {
                break Some(state.start_term());
            }
            if state.has_watcher {
                self.changed.wait(&mut state);
            } else if let Some(term) = self.watch(&mut state) {
                break Some(term);
            }
        };
        state.followers -= 1;
        term
    }

    /// Looks at each tick, and leads if the leader is busy with one request for that long.
    fn watch(&self, state: &mut MutexGuard<'_, State>) -> Option<Term> {
        state.has_watcher = true;
        let (mut idle_ticks, mut seen) = (0, state.requests);
        while idle_ticks < MAX_IDLE_TICKS && state.has_leader && !state.is_stopping {
            let waited = self.changed.wait_for(state, TICK);
            if state.requests != seen {
                (seen, idle_ticks) = (state.requests, 0);
            } else if state.is_busy && waited.timed_out() {
                state.has_watcher = false;
                return Some(state.start_term());
            } else {
                idle_ticks += 1;
            }
        }
        state.has_watcher = false;
        if state.has_leader && !state.is_stopping {
            // The next request wakes it.
            self.changed.wait(state);
        }
        None
    }

    /// Begins a request. The leader stays leader if there are no `more`. Returns the number of
    /// threads that can lead instead.
    pub(crate) fn leave(&self, term: Term, more: bool) -> usize {
        let mut state = self.state.lock();
        if state.term == term.0 {
            state.requests += 1;
            if more {
                state.has_leader = false;
            } else {
                state.is_busy = true;
            }
            if more || !state.has_watcher {
                self.changed.notify_one();
            }
        }
        state.followers
    }

    /// Ends a request. Returns true if the calling thread still leads, and does not follow.
    pub(crate) fn resume(&self, term: Term) -> bool {
        let mut state = self.state.lock();
        let is_leader = state.term == term.0 && state.has_leader && !state.is_stopping;
        if is_leader {
            state.is_busy = false;
        } else {
            state.followers += 1;
        }
        is_leader
    }

    /// Ends the thread of a term, and with it the queue.
    pub(crate) fn end(&self, term: Option<Term>) {
        let mut state = self.state.lock();
        state.is_stopping = true;
        if term == Some(Term(state.term)) {
            state.has_leader = false;
        }
        self.changed.notify_all();
    }

    /// Lets all threads end. Returns once no thread waits for a kick.
    pub(crate) fn stop(&self) {
        let mut state = self.state.lock();
        state.is_stopping = true;
        self.changed.notify_all();
        while state.has_leader && !state.is_busy {
            self.changed.wait(&mut state);
        }
    }
}
