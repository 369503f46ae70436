//! The workers of a mount: a worker that dies has a successor, and clients only wait.
//!
//! ```text
//!   worker dies ── reaped ── its disk service has written all completely accepted groups
//!        │                          └─ number of the last accepted change
//!        └── successor: the same volume, the same oplog, the same connection
//! ```
//! Law 1: a worker reads the volume only after its predecessor is gone and all its writes have
//! ended. A standby has confined itself by then, and has read nothing.
//! Law 2: the keeper reads nothing in the oplog but the list of requests in flight.
//! Law 3: a request that killed two workers is refused by the third. Workers that die too often
//! have no successor. Workers killed by another process do not count.

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

/// More deaths than this within [`WORKER_DEATH_WINDOW`] end the mount.
const MAX_WORKER_DEATHS: usize = 10;
const WORKER_DEATH_WINDOW: Duration = Duration::from_secs(60);
/// Number of deaths after which a request is quarantined.
const MAX_DEATHS_PER_REQUEST: u32 = 2;
/// Maximum number of requests whose deaths are counted.
const MAX_TRACKED_REQUESTS: usize = 1024;

/// State that outlives the workers of a mount.
pub(super) struct WorkerSupervision {
    source: VolumeSource,
    /// Backing files of the image, the nearest first. All workers read them.
    backing_files: Vec<OwnedFd>,
    log: Arc<SharedMemory>,
    /// An open `/dev/fuse` for a mount over rings.
    fuse_device: Option<OwnedFd>,
    options: MountOptions,
    epoch: u64,
    /// An epoch, and the last of its changes that the disk has accepted.
    accepted_through: (u64, u64),
    deaths: VecDeque<Instant>,
    /// Number of workers that each request killed.
    deaths_by_request: HashMap<u64, u32>,
    quarantined: Vec<u64>,
    standby: StandbySlot,
}

/// The standby process.
enum StandbySlot {
    /// None; a successor is started when needed.
    None,
    Ready(Box<StandbyWorker>),
    /// It exited before it was needed; another might, too.
    Exited,
}

/// State that an upgrade hands over to the next program.
#[derive(Serialize, Deserialize)]
pub(super) struct SupervisionState {
    options: MountOptions,
    epoch: u64,
    taken: (u64, u64),
    died_over: Vec<(u64, u32)>,
    refused: Vec<u64>,
}

impl WorkerSupervision {
    /// Creates the supervision of a mount without a worker yet.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn new(
        source: VolumeSource,
        behind: Vec<OwnedFd>,
        fuse_device: Option<OwnedFd>,
        options: MountOptions,
    ) -> std::io::Result<Self> {
        let log = oplog::create_memory()?;
        let (deaths, died_over, refused) = (VecDeque::new(), HashMap::new(), vec![]);
        let (epoch, taken, next) = (0, (0, 0), StandbySlot::None);
        Ok(Self {
            source,
            backing_files: behind,
            log,
            fuse_device,
            options,
            epoch,
            accepted_through: taken,
            deaths,
            deaths_by_request: died_over,
            quarantined: refused,
            standby: next,
        })
    }

    /// Restores the supervision that another program handed over.
    pub(super) fn from_handover(
        source: VolumeSource,
        behind: Vec<OwnedFd>,
        log: Arc<SharedMemory>,
        past: SupervisionState,
    ) -> Self {
        let SupervisionState { options, epoch, taken, died_over, refused } = past;
        let (deaths, died_over) = (VecDeque::new(), died_over.into_iter().collect());
        let next = StandbySlot::None;
        Self {
            source,
            backing_files: behind,
            log,
            // A mount over rings is not handed over.
            fuse_device: None,
            options,
            epoch,
            accepted_through: taken,
            deaths,
            deaths_by_request: died_over,
            quarantined: refused,
            standby: next,
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

    /// Releases the volume; returns a message about data that could not be sent to its bucket.
    pub(super) fn release_source(mut self) -> Option<String> {
        self.stop_standby();
        match self.source {
            VolumeSource::Store(disk) => disk.disconnect(),
            _ => None,
        }
    }

    /// Returns the connection that must be mounted, if it exists already.
    pub(super) fn fuse_device(&self) -> Option<&OwnedFd> {
        self.fuse_device.as_ref()
    }

    pub(super) fn source(&self) -> &VolumeSource {
        &self.source
    }

    pub(super) fn backing_files(&self) -> &[OwnedFd] {
        &self.backing_files
    }

    pub(super) fn oplog(&self) -> BorrowedFd<'_> {
        self.log.as_fd()
    }

    /// Starts a standby process, if a successor is allowed. A disk in a store has none: the standby
    /// would be a second user of the disk.
    pub(super) fn ensure_standby(&mut self) {
        let is_file = matches!(self.source, VolumeSource::File { .. });
        match &mut self.standby {
            StandbySlot::None if self.options.restart && is_file => {}
            StandbySlot::None | StandbySlot::Exited => return,
            StandbySlot::Ready(ready) => {
                if ready.has_exited() {
                    log::warn!("the process that would follow a worker has ended");
                    self.standby = StandbySlot::Exited;
                }
                return;
            }
        }
        self.standby = match Worker::start_standby(
            &self.source,
            &self.backing_files,
            &self.log,
            None,
            &self.options,
        ) {
            Ok(ready) => StandbySlot::Ready(Box::new(ready)),
            Err(error) => {
                log::warn!("no process waits to follow a worker: {error}");
                StandbySlot::Exited
            }
        };
    }

    /// Ends the standby process.
    pub(super) fn stop_standby(&mut self) {
        self.standby = StandbySlot::None;
    }

    /// Has the successor open the volume. `read_only`: the mount has been made read-only since.
    ///
    /// # Errors
    /// See [`StartError`].
    pub(super) fn start_successor(&mut self, read_only: bool) -> Result<Worker, StartError> {
        self.epoch += 1;
        let start = WorkerStart {
            options: self.options.clone(),
            epoch: self.epoch,
            taken: self.accepted_through,
            was_clean: oplog::was_volume_clean(&self.log),
            closed: read_only && !self.options.read_only,
            refused: self.quarantined.clone(),
        };
        if let StandbySlot::Ready(ready) = std::mem::replace(&mut self.standby, StandbySlot::None) {
            match ready.open(&start) {
                // The standby was killed.
                Err(StartError::Lost(why)) => log::warn!("{why}"),
                opened => return opened,
            }
        }
        let device = self.fuse_device.as_ref();
        Worker::start(&self.source, &self.backing_files, &self.log, device, &start)
    }

    /// Records that the worker died or was killed by another process. `taken` is the last of its
    /// changes that the disk accepted. Returns true if a successor may start.
    pub(super) fn record_death(&mut self, taken: u64, was_killed: bool) -> bool {
        if oplog::marked_epoch(&self.log) == self.epoch {
            self.accepted_through = (self.epoch, taken);
        }
        let in_flight = oplog::take_in_flight(&self.log);
        if was_killed {
            return true;
        }
        let now = Instant::now();
        self.deaths.retain(|then| now.duration_since(*then) < WORKER_DEATH_WINDOW);
        self.deaths.push_back(now);
        if self.deaths_by_request.len() > MAX_TRACKED_REQUESTS {
            self.deaths_by_request.clear();
        }
        for unique in in_flight {
            let deaths = self.deaths_by_request.entry(unique).or_default();
            *deaths += 1;
            if *deaths == MAX_DEATHS_PER_REQUEST {
                self.quarantined.push(unique);
                let too_many = self.quarantined.len().saturating_sub(MAX_TRACKED_REQUESTS);
                self.quarantined.drain(..too_many);
            }
        }
        self.deaths.len() <= MAX_WORKER_DEATHS
    }
}
