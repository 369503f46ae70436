//! The lanes of a remote disk: one request each at a time, urgent requests first.
//!
//! ```text
//!   Now    urgent reads, chains                      any lane
//!   Ahead  read-ahead                                leaves one lane to others
//!   Long   wait_visible, wait_durable                half of the lanes at most
//! ```
//!
//! So reads and chains proceed however many threads wait for their flush.

use draconis_types::lock::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use draconis_exchange::channel::{Client, RpcClient};
use draconis_exchange::contract::disk::Disk;

use crate::Error;

/// The lanes, and counts of their waiters.
pub(super) struct LanePool {
    state: Mutex<LanePoolState>,
    changed: Condvar,
    timeout: Duration,
}

struct LanePoolState {
    idle: Vec<Client<Disk>>,
    /// Number of idle or used lanes; lost lanes do not count.
    open: usize,
    /// Number of urgent requests that wait for a lane.
    urgent: usize,
    /// Number of lanes used by long requests.
    long: usize,
}

/// Priority of a request for a lane.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LanePriority {
    /// First.
    Now,
    /// After urgent requests, and leaving one lane free for them.
    Ahead,
    /// As `Ahead`, for requests that may take as long as a flush.
    Long,
}

/// A lane in use by one request.
pub(super) struct AcquiredLane<'a> {
    lanes: &'a LanePool,
    caller: Option<RpcClient<Disk>>,
    need: LanePriority,
}

impl LanePoolState {
    /// Returns true if a request may have a lane now.
    fn can_acquire(&self, need: LanePriority) -> bool {
        let left_to_others = match need {
            LanePriority::Now => 0,
            LanePriority::Ahead | LanePriority::Long => self.urgent + usize::from(self.open > 1),
        };
        let long_max = (self.open / 2).max(1);
        self.idle.len() > left_to_others && (need != LanePriority::Long || self.long < long_max)
    }
}

impl LanePool {
    pub(super) fn new(idle: Vec<Client<Disk>>, timeout: Duration) -> Self {
        let state = LanePoolState { open: idle.len(), idle, urgent: 0, long: 0 };
        Self { state: Mutex::new(state), changed: Condvar::new(), timeout }
    }

    /// Waits for a lane; [`Error::ServiceEnded`] once all are lost.
    pub(super) fn acquire(&self, need: LanePriority) -> Result<AcquiredLane<'_>, Error> {
        let mut state = self.lock();
        let urgent = usize::from(need == LanePriority::Now);
        state.urgent += urgent;
        let end = loop {
            if state.open == 0 {
                break Err(Error::ServiceEnded);
            }
            if state.can_acquire(need) {
                break state.idle.pop().ok_or(Error::ServiceEnded);
            }
            self.changed.wait(&mut state);
        };
        state.urgent -= urgent;
        state.long += usize::from(need == LanePriority::Long && end.is_ok());
        drop(state);
        // Fewer urgent requests wait: another request may have a lane now.
        self.changed.notify_all();
        Ok(AcquiredLane { lanes: self, caller: Some(RpcClient::new(end?, self.timeout)), need })
    }

    fn lock(&self) -> MutexGuard<'_, LanePoolState> {
        self.state.lock()
    }
}

impl AcquiredLane<'_> {
    /// Closes the lane, and with it an incomplete chain.
    pub(super) fn close(mut self) {
        self.caller = None;
    }
}

impl std::ops::Deref for AcquiredLane<'_> {
    type Target = RpcClient<Disk>;
    fn deref(&self) -> &RpcClient<Disk> {
        // Only `close` and `drop` take it.
        self.caller.as_ref().expect("a lane that was given back")
    }
}

impl std::ops::DerefMut for AcquiredLane<'_> {
    fn deref_mut(&mut self) -> &mut RpcClient<Disk> {
        self.caller.as_mut().expect("a lane that was given back")
    }
}

impl Drop for AcquiredLane<'_> {
    fn drop(&mut self) {
        let end = self.caller.take().and_then(RpcClient::into_client);
        let mut state = self.lanes.lock();
        state.long -= usize::from(self.need == LanePriority::Long);
        match end {
            Some(end) => state.idle.push(end),
            None => state.open -= 1,
        }
        drop(state);
        self.lanes.changed.notify_all();
    }
}
