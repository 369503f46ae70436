//! The lives of a mount: a worker that dies is followed by another, and clients only wait.
//!
//! ```text
//!   worker dies ── reaped ── its disk service has written what was taken whole
//!        │                          └─ the last change that was taken
//!        └── next worker: the same volume, the same log, the same connection
//! ```
//! Law 1: a worker looks at the volume once the one before it is gone, with all that it could do;
//! one that waits for that has confined itself, and seen nothing.
//! Law 2: what is in the log is not looked at here, but for the requests that were in hand.
//! Law 3: a request that two workers died over is refused to the third. Workers that die too
//! often are not followed by another. Those that others kill do not count.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use draconis_exchange::shm::SharedMemory;
use serde::{Deserialize, Serialize};

use crate::claimed_volume::VolumeSource;
use crate::oplog;
use crate::options::MountOptions;
use crate::request_log::WorkerStart;
use crate::worker_process::{StandbyWorker, StartError, Worker};

/// More deaths than this within [`DEATH_WINDOW`] are the end.
const MAX_DEATHS: usize = 10;
const DEATH_WINDOW: Duration = Duration::from_secs(60);
/// Deaths over one request after which it is refused.
const MAX_DEATHS_PER_REQUEST: u32 = 2;
/// Requests whose deaths are remembered.
const MAX_TRACKED_REQUESTS: usize = 1024;

/// What outlives the workers of a mount.
pub(super) struct WorkerSupervision {
    source: VolumeSource,
    /// What a disk image differs from, the nearest first: read by each of them.
    behind: Vec<OwnedFd>,
    log: Arc<SharedMemory>,
    options: MountOptions,
    epoch: u64,
    /// An epoch, and the last of its changes that the disk has taken.
    accepted_through: (u64, u64),
    deaths: VecDeque<Instant>,
    /// How many died over a request.
    deaths_by_request: HashMap<u64, u32>,
    quarantined: Vec<u64>,
    next: Next,
}

/// The worker that would follow.
enum Next {
    /// It is started when it is needed.
    None,
    Waits(Box<StandbyWorker>),
    /// It ended before it was needed, as the one after it might.
    Gone,
}

/// What is to be known of them by another program that goes on with them.
#[derive(Serialize, Deserialize)]
pub(super) struct SupervisionState {
    options: MountOptions,
    epoch: u64,
    taken: (u64, u64),
    died_over: Vec<(u64, u32)>,
    refused: Vec<u64>,
}

impl WorkerSupervision {
    /// Those of a mount that has had none yet.
    ///
    /// # Errors
    /// What the system says.
    pub(super) fn new(
        source: VolumeSource,
        behind: Vec<OwnedFd>,
        options: MountOptions,
    ) -> std::io::Result<Self> {
        let log = oplog::create_memory()?;
        let (deaths, died_over, refused) = (VecDeque::new(), HashMap::new(), vec![]);
        let (epoch, taken, next) = (0, (0, 0), Next::None);
        Ok(Self {
            source,
            behind,
            log,
            options,
            epoch,
            accepted_through: taken,
            deaths,
            deaths_by_request: died_over,
            quarantined: refused,
            next,
        })
    }

    /// Those that another program has had until now.
    pub(super) fn resume(
        source: VolumeSource,
        behind: Vec<OwnedFd>,
        log: Arc<SharedMemory>,
        past: SupervisionState,
    ) -> Self {
        let SupervisionState { options, epoch, taken, died_over, refused } = past;
        let (deaths, died_over) = (VecDeque::new(), died_over.into_iter().collect());
        let next = Next::None;
        Self {
            source,
            behind,
            log,
            options,
            epoch,
            accepted_through: taken,
            deaths,
            deaths_by_request: died_over,
            quarantined: refused,
            next,
        }
    }

    pub(super) fn state(&self) -> SupervisionState {
        SupervisionState {
            options: self.options.clone(),
            epoch: self.epoch,
            taken: self.accepted_through,
            died_over: self
                .deaths_by_request
                .iter()
                .map(|(unique, deaths)| (*unique, *deaths))
                .collect(),
            refused: self.quarantined.clone(),
        }
    }

    /// Gives the volume back; says what could not be brought to where it is.
    pub(super) fn release_source(mut self) -> Option<String> {
        self.stop_standby();
        match self.source {
            VolumeSource::Store(disk) => disk.disconnect(),
            _ => None,
        }
    }

    pub(super) fn source(&self) -> &VolumeSource {
        &self.source
    }

    pub(super) fn backing_files(&self) -> &[OwnedFd] {
        &self.behind
    }

    pub(super) fn oplog(&self) -> BorrowedFd<'_> {
        self.log.as_fd()
    }

    /// Has a process wait for its turn, if another may follow. Where the disk is in a store it would
    /// be the disk's second user, so there is none.
    pub(super) fn ensure_standby(&mut self) {
        let is_file = matches!(self.source, VolumeSource::File { .. });
        match &mut self.next {
            Next::None if self.options.restart && is_file => {}
            Next::None | Next::Gone => return,
            Next::Waits(ready) => {
                if ready.has_exited() {
                    log::warn!("the process that would follow a worker has ended");
                    self.next = Next::Gone;
                }
                return;
            }
        }
        self.next =
            match Worker::start_standby(&self.source, &self.behind, &self.log, &self.options) {
                Ok(ready) => Next::Waits(Box::new(ready)),
                Err(error) => {
                    log::warn!("no process waits to follow a worker: {error}");
                    Next::Gone
                }
            };
    }

    /// Ends the process that waits for its turn.
    pub(super) fn stop_standby(&mut self) {
        self.next = Next::None;
    }

    /// Has the next worker open the volume; of a mount that is `read_only` by now, though it was not.
    ///
    /// # Errors
    /// See [`StartError`].
    pub(super) fn start_successor(&mut self, read_only: bool) -> Result<Worker, StartError> {
        self.epoch += 1;
        let start = WorkerStart {
            options: self.options.clone(),
            epoch: self.epoch,
            taken: self.accepted_through,
            was_clean: oplog::was_clean(&self.log),
            closed: read_only && !self.options.read_only,
            refused: self.quarantined.clone(),
        };
        if let Next::Waits(ready) = std::mem::replace(&mut self.next, Next::None) {
            match ready.open(&start) {
                // It was killed while it waited.
                Err(StartError::Lost(why)) => log::warn!("{why}"),
                opened => return opened,
            }
        }
        Worker::start(&self.source, &self.behind, &self.log, &start)
    }

    /// One has died, or was killed by another process; `taken` is the last of its changes that
    /// the disk has taken. Whether there may be another.
    pub(super) fn record_death(&mut self, taken: u64, was_killed: bool) -> bool {
        if oplog::marked_epoch(&self.log) == self.epoch {
            self.accepted_through = (self.epoch, taken);
        }
        let in_hand = oplog::take_in_flight(&self.log);
        if was_killed {
            return true;
        }
        let now = Instant::now();
        self.deaths.retain(|then| now.duration_since(*then) < DEATH_WINDOW);
        self.deaths.push_back(now);
        if self.deaths_by_request.len() > MAX_TRACKED_REQUESTS {
            self.deaths_by_request.clear();
        }
        for unique in in_hand {
            let deaths = self.deaths_by_request.entry(unique).or_default();
            *deaths += 1;
            if *deaths == MAX_DEATHS_PER_REQUEST {
                self.quarantined.push(unique);
                let too_many = self.quarantined.len().saturating_sub(MAX_TRACKED_REQUESTS);
                self.quarantined.drain(..too_many);
            }
        }
        self.deaths.len() <= MAX_DEATHS
    }
}
