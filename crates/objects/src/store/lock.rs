//! Locking of a store's state, and work done without the lock.
//!
//! Law 1: code under the lock changes memory and submits writes. Required reads and waits happen
//! without the lock, and then the operation is retried.
//! Law 2: items found by a lookup stay at their addresses while the caller holds the view.

use std::ops::ControlFlow;
use std::sync::Arc;

use draconis_types::lock::RwLockWriteGuard;

use super::Store;
use crate::Result;
use crate::cached_disk::CachedNodes;
use crate::core::Core;
use crate::index::tree::{NodeMap, NodeSource};
use crate::index::view::{Index, View};
use crate::maintenance::WorkBudget;
use crate::required_io::{MaintenanceStep, MissPolicy, RequiredIo};

/// Retries before a miss is read under the lock: evictions and concurrent changes can defeat each
/// retry.
const MAX_UNLOCKED_RETRIES: u32 = 8;

/// Most nodes that a lookup reads without the lock.
const MAX_UNLOCKED_NODES: usize = 64;

fn miss_policy_after_retries(needs: u32) -> MissPolicy {
    if needs < MAX_UNLOCKED_RETRIES { MissPolicy::Defer } else { MissPolicy::Block }
}

impl Store {
    /// Looks something up in the index; returns also the view that holds it.
    pub(super) fn lookup<T>(
        &self,
        look: impl Fn(Index<'_>, &dyn NodeSource) -> Result<T>,
    ) -> Result<(T, Arc<View>)> {
        self.process.check()?;
        let mut read = NodeMap::new();
        loop {
            let core = self.core.read();
            core.check_no_partial_group()?;
            let view = core.levels.view.clone();
            if read.len() >= MAX_UNLOCKED_NODES {
                return Ok((look(core.levels.index(), &*self.io)?, view));
            }
            let nodes = CachedNodes::with_loaded(&self.io, &read);
            let found = look(core.levels.index(), &nodes);
            let Some(missing) = nodes.missing_node() else { return Ok((found?, view)) };
            drop(core);
            let node = self.io.load(missing)?;
            read.insert(missing.sum, node);
        }
    }

    /// Runs a change of so many bytes, with retries for required I/O, then does its part of
    /// maintenance.
    pub(super) fn run_change<T>(
        &self,
        brought_bytes: u64,
        mut act: impl FnMut(&mut Core, MissPolicy) -> Result<ControlFlow<RequiredIo, T>>,
    ) -> Result<T> {
        self.process.check()?;
        let mut needs = 0;
        loop {
            let mut core = self.core.write();
            match act(&mut core, miss_policy_after_retries(needs))? {
                ControlFlow::Continue(done) => {
                    self.run_due_maintenance(core, brought_bytes)?;
                    return Ok(done);
                }
                ControlFlow::Break(need) => {
                    drop(core);
                    need.perform_io(&self.io, needs > 0);
                    needs = needs.saturating_add(1);
                }
            }
        }
    }

    /// Runs `act` on the whole state, then a part of maintenance.
    pub(crate) fn with_core<T>(&self, mut act: impl FnMut(&mut Core) -> Result<T>) -> Result<T> {
        self.run_change(0, |core, _| act(core).map(ControlFlow::Continue))
    }

    /// Does due maintenance, within the budget of a change of so many bytes.
    pub(super) fn run_due_maintenance<'s>(
        &'s self,
        core: RwLockWriteGuard<'s, Core>,
        bytes: u64,
    ) -> Result<()> {
        let mut share = WorkBudget::for_change(bytes.saturating_add(64));
        self.run_steps(core, |core, patience| core.next_step(&mut share, patience))?;
        self.io.throttle()
    }

    /// Does steps until none is due.
    pub(super) fn run_steps<'s>(
        &'s self,
        mut core: RwLockWriteGuard<'s, Core>,
        mut step: impl FnMut(&mut Core, MissPolicy) -> Result<Option<MaintenanceStep>>,
    ) -> Result<()> {
        let mut needs = 0;
        loop {
            let need = match step(&mut core, miss_policy_after_retries(needs)) {
                Ok(None) => return Ok(()),
                Ok(Some(ControlFlow::Continue(_))) => {
                    needs = 0;
                    continue;
                }
                Ok(Some(ControlFlow::Break(need))) => need,
                Err(error) => return Err(core.stop(error)),
            };
            drop(core);
            let granted = need.perform_io(&self.io, needs > 0);
            needs = needs.saturating_add(1);
            core = self.core.write();
            if let Some(granted) = granted {
                core.log.sent.record_completed(granted);
            }
        }
    }

    /// Returns true if the state is locked, for tests.
    #[cfg(feature = "test-hooks")]
    pub fn is_locked(&self) -> bool {
        self.core.try_write().is_none()
    }
}
