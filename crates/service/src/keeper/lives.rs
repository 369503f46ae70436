//! The lives of a mount: a worker that dies is followed by another, and clients only wait.
//!
//! ```text
//!   worker dies ── reaped ── its disk service has written what was taken whole
//!        │                          └─ the last change that was taken
//!        └── next worker: the same volume, the same log, the same connection
//! ```
//! Law 1: a worker is started once the one before it is gone, with all that it could do.
//! Law 2: what is in the log is not looked at here, but for the requests that were in hand.
//! Law 3: a request that two workers died over is refused to the third. Workers that die too
//! often are not followed by another. Those that others kill do not count.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use draconis_exchange::shm::Shared;
use serde::{Deserialize, Serialize};

use crate::claimed::Source;
use crate::oplog;
use crate::options::MountOptions;
use crate::process::{StartError, Worker};
use crate::recorder::Start;

/// More deaths than this within [`DEATHS_WITHIN`] are the end.
const DEATHS_MAX: usize = 10;
const DEATHS_WITHIN: Duration = Duration::from_secs(60);
/// Deaths over one request after which it is refused.
const DEATHS_OF_ONE: u32 = 2;
/// Requests whose deaths are remembered.
const REMEMBERED: usize = 1024;

/// What outlives the workers of a mount.
pub(super) struct Lives {
    source: Source,
    log: Shared,
    options: MountOptions,
    epoch: u64,
    /// An epoch, and the last of its changes that the disk has taken.
    taken: (u64, u64),
    deaths: VecDeque<Instant>,
    /// How many died over a request.
    died_over: HashMap<u64, u32>,
    refused: Vec<u64>,
}

/// What is to be known of them by another program that goes on with them.
#[derive(Serialize, Deserialize)]
pub(super) struct Past {
    options: MountOptions,
    epoch: u64,
    taken: (u64, u64),
    died_over: Vec<(u64, u32)>,
    refused: Vec<u64>,
}

impl Lives {
    /// Those of a mount that has had none yet.
    ///
    /// # Errors
    /// What the system says.
    pub(super) fn new(source: Source, options: MountOptions) -> std::io::Result<Self> {
        let log = oplog::memory()?;
        let (deaths, died_over, refused) = (VecDeque::new(), HashMap::new(), vec![]);
        Ok(Self { source, log, options, epoch: 0, taken: (0, 0), deaths, died_over, refused })
    }

    /// Those that another program has had until now.
    pub(super) fn resume(source: Source, log: Shared, past: Past) -> Self {
        let Past { options, epoch, taken, died_over, refused } = past;
        let (deaths, died_over) = (VecDeque::new(), died_over.into_iter().collect());
        Self { source, log, options, epoch, taken, deaths, died_over, refused }
    }

    pub(super) fn past(&self) -> Past {
        Past {
            options: self.options.clone(),
            epoch: self.epoch,
            taken: self.taken,
            died_over: self.died_over.iter().map(|(unique, deaths)| (*unique, *deaths)).collect(),
            refused: self.refused.clone(),
        }
    }

    /// Gives the volume back.
    pub(super) fn give_back(self) {
        if let Source::Store(disk) = self.source {
            disk.give_back();
        }
    }

    pub(super) fn source(&self) -> &Source {
        &self.source
    }

    pub(super) fn log(&self) -> BorrowedFd<'_> {
        self.log.as_fd()
    }

    /// Starts the next worker; of a mount that is `read_only` by now, though it was not.
    ///
    /// # Errors
    /// See [`StartError`].
    pub(super) fn next(&mut self, read_only: bool) -> Result<Worker, StartError> {
        self.epoch += 1;
        let start = Start {
            options: self.options.clone(),
            epoch: self.epoch,
            taken: self.taken,
            was_clean: oplog::was_clean(&self.log),
            closed: read_only && !self.options.read_only,
            refused: self.refused.clone(),
        };
        Worker::start(&self.source, self.log.as_fd(), &start)
    }

    /// One has died, or was killed by another process; `taken` is the last of its changes that
    /// the disk has taken. Whether there may be another.
    pub(super) fn died(&mut self, taken: u64, was_killed: bool) -> bool {
        if oplog::noted(&self.log) == self.epoch {
            self.taken = (self.epoch, taken);
        }
        let in_hand = oplog::in_hand(&self.log);
        if was_killed {
            return true;
        }
        let now = Instant::now();
        self.deaths.retain(|then| now.duration_since(*then) < DEATHS_WITHIN);
        self.deaths.push_back(now);
        if self.died_over.len() > REMEMBERED {
            self.died_over.clear();
        }
        for unique in in_hand {
            let deaths = self.died_over.entry(unique).or_default();
            *deaths += 1;
            if *deaths == DEATHS_OF_ONE {
                self.refused.push(unique);
                let too_many = self.refused.len().saturating_sub(REMEMBERED);
                self.refused.drain(..too_many);
            }
        }
        self.deaths.len() <= DEATHS_MAX
    }
}
