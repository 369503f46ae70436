//! Readers of the queues of rings: each queue has a thread, which answers what it reads.
//!
//! ```text
//!   queue of a CPU ─ thread there ─┬─ answers at once
//!                                  └─ may wait for the disk or other requests ─▶ a helper answers
//! ```
//! A request that waits in a queue's thread would stop all programs of that CPU.

use std::collections::VecDeque;
use std::io;
use std::thread::Scope;

use draconis_exchange::contract::tree::Tree;
use draconis_types::lock::{Condvar, Mutex};

use super::{LeaderFollowers, MAX_FUSE_THREADS, PollBudget};
use crate::fuse::decoder::Header;
use crate::fuse::request::Request;
use crate::fuse::ring::{Queue, RingSet};
use crate::fuse::sync_batch::SyncRequest;

/// What a helper does.
enum Task {
    /// Run batches of syncs until none waits.
    Syncs,
    Request(Header, Box<Request>),
}

/// Threads that answer requests for the readers of queues.
#[derive(Default)]
pub(super) struct Helpers {
    state: Mutex<HelperState>,
    /// Notified of new tasks and of the end.
    changed: Condvar,
}

#[derive(Default)]
struct HelperState {
    tasks: VecDeque<Task>,
    idle: usize,
    threads: usize,
    closed: bool,
}

impl Helpers {
    /// Lets the threads end.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    fn next_task(&self) -> Option<Task> {
        let mut state = self.state.lock();
        loop {
            if let Some(task) = state.tasks.pop_front() {
                return Some(task);
            }
            if state.closed {
                return None;
            }
            state.idle += 1;
            self.changed.wait(&mut state);
            state.idle -= 1;
        }
    }
}

impl<T: Tree + Sync> LeaderFollowers<'_, '_, T> {
    /// Starts the readers of all queues.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn start_queues<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
    ) -> io::Result<()> {
        let Some(rings) = self.transport.rings else { return Ok(()) };
        for queue in rings.queues() {
            let name = format!("fuse-{}", queue.number());
            std::thread::Builder::new().name(name).spawn_scoped(scope, move || {
                if let Err(error) = self.run_queue(scope, rings, queue) {
                    log::error!("queue {} of the ring: {error}", queue.number());
                    rings.report_failure();
                }
            })?;
        }
        Ok(())
    }

    fn run_queue<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        rings: &RingSet,
        queue: &Queue,
    ) -> io::Result<()> {
        let mut poll_budget = PollBudget::new(self.server.options.no_polling);
        let (mut request, mut arrived) = (Box::new(Request::new()), vec![]);
        queue.start()?;
        while !rings.has_failed() && queue.collect(&mut arrived)? {
            if arrived.is_empty() {
                if !poll_budget.keeps_polling() {
                    queue.sleep()?;
                }
                continue;
            }
            poll_budget.record_arrival();
            for entry in arrived.drain(..) {
                queue.read_request(entry, |parts| request.load(parts, self.server.recorder));
                request = self.answer_queued(scope, queue.number() + 1, request);
            }
        }
        Ok(())
    }

    /// Answers a request, or has a helper answer it. Returns a request for the next one.
    fn answer_queued<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        slot: usize,
        mut request: Box<Request>,
    ) -> Box<Request> {
        let Some(header) = Header::parse(request.bytes()) else { return request };
        self.activity.count_opcode(header.opcode);
        if let Some(data_only) = header.fsync_data_only(request.bytes()) {
            if self.enqueue_sync(SyncRequest { header, data_only })
                && self.give_to_helper(scope, Task::Syncs).is_err()
            {
                self.run_sync_batches();
            }
            return request;
        }
        if header.may_block() || self.may_block(header, &request) {
            match self.give_to_helper(scope, Task::Request(header, request)) {
                Ok(()) => return Box::new(Request::new()),
                Err(Task::Request(_, back)) => request = back,
                Err(Task::Syncs) => return Box::new(Request::new()),
            }
        }
        self.activity.begin_request(slot);
        self.handle_request(header, &mut request);
        self.activity.end_request(slot);
        request
    }

    /// Gives a task to a helper that has nothing to do, or returns it.
    fn give_to_helper<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        task: Task,
    ) -> Result<(), Task> {
        let helpers = &self.helpers;
        let mut state = helpers.state.lock();
        if state.idle <= state.tasks.len() {
            if state.closed || state.threads == MAX_FUSE_THREADS - 1 {
                return Err(task);
            }
            let builder = std::thread::Builder::new().name("fuse-too".into());
            if builder.spawn_scoped(scope, || self.run_helper()).is_err() {
                return Err(task);
            }
            state.threads += 1;
        }
        state.tasks.push_back(task);
        drop(state);
        helpers.changed.notify_one();
        Ok(())
    }

    fn run_helper(&self) {
        while let Some(task) = self.helpers.next_task() {
            match task {
                Task::Syncs => self.run_sync_batches(),
                Task::Request(header, mut request) => {
                    if header.is_seek() {
                        self.flush_kernel_pages(header, &request);
                    }
                    self.handle_request(header, &mut request);
                }
            }
        }
    }
}
