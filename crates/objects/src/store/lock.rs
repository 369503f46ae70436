//! How the state of a store is held, and what is done without it.
//!
//! Law 1: under the lock memory is changed and writes are handed over. What has to be read first,
//! or waited for, is read and waited for without it, and then it is tried again.
//! Law 2: what is looked up stays where it is while who looks holds the view.

use std::ops::ControlFlow;
use std::sync::Arc;

use parking_lot::RwLockWriteGuard;

use super::Store;
use crate::Result;
use crate::cached_disk::CachedNodes;
use crate::core::Core;
use crate::index::tree::{NodeMap, NodeSource};
use crate::index::view::{Index, View};
use crate::maintenance::{MissPolicy, RequiredIo, Step, WorkBudget};

/// Needs in turn before what is missing is read under the lock: others may drive out what was read
/// for one, or change what it was read for.
const MAX_UNLOCKED_RETRIES: u32 = 8;

/// How often one looks again with what it read before.
const LOOKS: usize = 64;

fn patience(needs: u32) -> MissPolicy {
    if needs < MAX_UNLOCKED_RETRIES { MissPolicy::Defer } else { MissPolicy::Block }
}

impl Store {
    /// Looks something up in the index; yields the view in which it is, too.
    pub(super) fn lookup<T>(
        &self,
        look: impl Fn(Index<'_>, &dyn NodeSource) -> Result<T>,
    ) -> Result<(T, Arc<View>)> {
        let mut read = NodeMap::new();
        loop {
            let core = self.core.read();
            core.check_no_partial_group()?;
            let view = core.levels.view.clone();
            if read.len() >= LOOKS {
                return Ok((look(core.levels.index(), &*self.io)?, view));
            }
            let nodes = CachedNodes::with_loaded(&self.io, &read);
            let found = look(core.levels.index(), &nodes);
            let Some(missing) = nodes.missing() else { return Ok((found?, view)) };
            drop(core);
            let node = self.io.load(missing)?;
            read.insert(missing.sum, node);
        }
    }

    /// Changes the state by what brings so many bytes, which may need something first; then
    /// does its share of what is due.
    pub(super) fn change<T>(
        &self,
        brought_bytes: u64,
        mut act: impl FnMut(&mut Core, MissPolicy) -> Result<ControlFlow<RequiredIo, T>>,
    ) -> Result<T> {
        let mut needs = 0;
        loop {
            let mut core = self.core.write();
            match act(&mut core, patience(needs))? {
                ControlFlow::Continue(done) => {
                    self.work(core, brought_bytes)?;
                    return Ok(done);
                }
                ControlFlow::Break(need) => {
                    drop(core);
                    need.perform(&self.io, needs > 0);
                    needs = needs.saturating_add(1);
                }
            }
        }
    }

    /// Does something to the whole state, and then a share of what is due.
    pub(crate) fn with_core<T>(&self, mut act: impl FnMut(&mut Core) -> Result<T>) -> Result<T> {
        self.change(0, |core, _| act(core).map(ControlFlow::Continue))
    }

    /// Does what is due, as far as a change of so many bytes has to.
    pub(super) fn work<'s>(&'s self, core: RwLockWriteGuard<'s, Core>, bytes: u64) -> Result<()> {
        let mut share = WorkBudget::of(bytes.saturating_add(64));
        self.drive(core, |core, patience| core.next_step(&mut share, patience))?;
        self.io.throttle()
    }

    /// Does step after step as long as there is one.
    pub(super) fn drive<'s>(
        &'s self,
        mut core: RwLockWriteGuard<'s, Core>,
        mut step: impl FnMut(&mut Core, MissPolicy) -> Result<Option<Step>>,
    ) -> Result<()> {
        let mut needs = 0;
        loop {
            let need = match step(&mut core, patience(needs)) {
                Ok(None) => return Ok(()),
                Ok(Some(ControlFlow::Continue(_))) => {
                    needs = 0;
                    continue;
                }
                Ok(Some(ControlFlow::Break(need))) => need,
                Err(error) => return Err(core.stop(error)),
            };
            drop(core);
            let granted = need.perform(&self.io, needs > 0);
            needs = needs.saturating_add(1);
            core = self.core.write();
            if let Some(granted) = granted {
                core.log.sent.record_completed(granted);
            }
        }
    }

    /// Whether the state is held, for tests.
    #[cfg(feature = "torture")]
    pub fn is_held(&self) -> bool {
        self.core.try_write().is_none()
    }
}
