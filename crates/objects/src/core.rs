//! State of an open store: its parts, and the steps of a change.
//!
//! ```text
//!   log         streams, the open commit, what is alive where      writes
//!   levels      active layer · runs · tree                         what leads to what is alive
//!   cleaner     the segment that is emptied                        from levels and log, into log
//!   checkpoints superblock, and what waits for it                  when segments are free
//!   backlogs    work of maintenance that is due
//! ```
//!
//! Law 1: a group is refused before any of it is applied, or not at all.
//! Law 2: all items of a group are in one commit.
//! Law 3: a failure while a group is applied stops all changes: half of the group may be in the
//! commit.

mod apply;
pub(crate) mod backlogs;
pub(crate) mod checkpoint;
mod plan;
mod space;

use std::ops::ControlFlow;
use std::sync::Arc;

use self::backlogs::Backlogs;
use self::checkpoint::Checkpoints;
pub(crate) use self::space::SpaceUse;
use self::space::{NoSpaceState, Reserve};
use crate::cleaner::Cleaner;
use crate::index::view::View;
use crate::levels::Levels;
use crate::log::LogWriter;
use crate::required_io::{MissPolicy, RequiredIo, with_miss_policy};
use crate::{Error, Group, Result, Ticket};

/// State of a store. All of it is under one lock.
pub(crate) struct Core {
    pub log: LogWriter,
    pub levels: Levels,
    pub cleaner: Cleaner,
    pub checkpoints: Checkpoints,
    pub backlogs: Backlogs,
    pub reserve: Reserve,

    pub next_id: u64,
    /// Number of values stored as objects.
    pub value_objects: u64,
    /// Last refusal for lack of space.
    pub last_no_space: Option<NoSpaceState>,
    /// Error that stopped all writes, for good.
    pub stopped: Option<Error>,
    /// True if half a group is in the active memtable: reads fail from then on.
    pub has_partial_group: bool,
}

impl Core {
    /// Creates the state of a store of which nothing was read yet.
    pub fn new(log: LogWriter, mut levels: Levels, checkpoints: Checkpoints) -> Self {
        levels.view = Arc::new(View { token: levels.token.clone(), ..View::default() });
        let reserve = Reserve::for_layout(&checkpoints.superblock.geometry, &*log.layout);
        Self {
            log,
            levels,
            cleaner: Cleaner::default(),
            checkpoints,
            backlogs: Backlogs::default(),
            reserve,
            next_id: 1,
            value_objects: 0,
            last_no_space: None,
            stopped: None,
            has_partial_group: false,
        }
    }

    /// Returns true if the store was opened read-only.
    pub fn is_read_only(&self) -> bool {
        matches!(self.stopped, Some(Error::Misuse(_)))
    }

    /// Returns an error if the active memtable holds a partial group.
    pub fn check_no_partial_group(&self) -> Result<()> {
        if self.has_partial_group { self.check_running() } else { Ok(()) }
    }

    pub fn check_running(&self) -> Result<()> {
        match &self.stopped {
            None => Ok(()),
            Some(Error::Device(error)) => Err(Error::Stopped(error.clone())),
            Some(error) => Err(error.clone()),
        }
    }

    /// Stops all writes with `error`, and returns it. The first error is kept.
    pub fn stop(&mut self, error: Error) -> Error {
        if self.stopped.is_none() {
            log::error!("the store takes no more changes: {error}");
            self.stopped = Some(error.clone());
        }
        error
    }

    /// Seals the memtable and publishes a view of it, unless the memtable holds a partial group.
    pub fn seal_memtable(&mut self) {
        if !self.has_partial_group {
            self.levels.seal_memtable(&mut self.log.segments);
        }
    }

    /// Submits a group, or returns the index I/O that must complete first.
    pub fn submit(
        &mut self,
        group: &Group,
        after: &[Ticket],
        patience: MissPolicy,
    ) -> Result<ControlFlow<RequiredIo, Ticket>> {
        self.check_running()?;
        if after.iter().any(|ticket| ticket.0 > self.log.batch.seq) {
            return Err(Error::Misuse("a ticket that was never given out"));
        }
        if let Some(need) = self.prefetch_value_links(group, patience)? {
            return Ok(ControlFlow::Break(need));
        }
        let room = match with_miss_policy(&self.log.io, patience, |nodes| self.plan(group, nodes))?
        {
            ControlFlow::Continue((plan, space_use)) => (plan.needed_bytes(), space_use),
            ControlFlow::Break(need) => return Ok(ControlFlow::Break(need)),
        };
        self.apply_as_group(room, group.bytes.len() as u64, |core| core.apply(group))
            .map(ControlFlow::Continue)
    }

    /// Applies `apply` as one group of `needed_bytes`.
    pub fn apply_as_group(
        &mut self,
        (needed_bytes, space_use): (u64, SpaceUse),
        brought_bytes: u64,
        apply: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<Ticket> {
        self.ensure_space(needed_bytes, space_use)?;
        // From here on any failure stops the store: half a group may be in the commit.
        if let Err(error) = apply(self) {
            self.has_partial_group = true;
            return Err(self.stop(error));
        }
        // A group that changes nothing is as durable as the groups before it.
        let log = &mut self.log;
        let ticket = Ticket(log.newest_commit());
        log.counters.groups = log.counters.groups.saturating_add(1);
        log.counters.payload_bytes = log.counters.payload_bytes.saturating_add(brought_bytes);
        if log.batch.bytes >= log.commit_limit()
            && let Err(error) = log.commit()
        {
            return Err(self.stop(error));
        }
        self.grow_backlogs(brought_bytes.saturating_add(64));
        Ok(ticket)
    }
}
