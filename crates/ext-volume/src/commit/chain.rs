//! Chains: what a commit hands to the queue.

use std::collections::BTreeMap;

use crate::blocks::data::SharedBytes;

/// Blocks that are written together, sorted by block number.
pub(crate) type Stage = BTreeMap<u64, SharedBytes>;

/// Dependency of a chain, ordered from weakest to strongest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) enum ChainDependency {
    /// No dependency: data that is overwritten or that nothing references yet.
    NoDependency,
    /// The chain that a sync waits for, if it is not durable yet.
    #[default]
    PendingSync,
    /// All chains sent before.
    AllEarlier,
}

/// Stages of writes, each durable before the next begins, and what they mean for the volume.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    /// Dependency of the first stage.
    pub(crate) dependency: ChainDependency,
    /// Stages, none of them empty; dirty data is in the first.
    pub(crate) stages: Vec<Stage>,
    /// Index of the stage that a sync waits for; `None` for data written ahead and checkpoints.
    pub(crate) sync_stage: Option<usize>,
    /// Data blocks in the chain.
    pub(crate) contents: Vec<u64>,
    /// Blocks and inodes that the chain frees.
    pub(crate) freed: FreedSpace,
    /// Blocks that the chain commits to the journal, and freed blocks that it revokes there.
    pub(crate) logged: Stage,
    pub(crate) revoked: Vec<u64>,
    /// Journaled blocks that the chain writes to their home blocks.
    pub(crate) checkpointed: Vec<u64>,
}

impl Chain {
    /// Returns the chain of these stages without the empty ones; none if all are empty. A sync
    /// waits for stage `sync_stage`, or for the last one.
    pub(crate) fn of_stages<const N: usize>(stages: [Stage; N], sync_stage: usize) -> Vec<Self> {
        let stages: Vec<Stage> = stages.into_iter().filter(|stage| !stage.is_empty()).collect();
        let Some(last) = stages.len().checked_sub(1) else { return vec![] };
        vec![Self { stages, sync_stage: Some(last.min(sync_stage)), ..Self::default() }]
    }
}

/// Blocks and inodes freed by a chain; allocatable once the chain is durable.
#[derive(Debug, Default)]
pub(crate) struct FreedSpace {
    /// First block and count.
    pub(crate) blocks: Vec<(u64, u32)>,
    pub(crate) inodes: Vec<u32>,
}

impl FreedSpace {
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.inodes.is_empty()
    }
}
