//! Protocol for disks that are atomic against power cuts (object stores): one group per batch.
//!
//! Law: a cut leaves the volume as before the batch or as after it, always consistent. Inodes that
//! were unlinked while open are on the on-disk orphan list, and the next mount deletes them.

use super::CommitProtocol;
use crate::Result;
use crate::commit::chain::{Chain, Stage};
use crate::commit::changes::Changes;

/// Commit protocol without write order: it records nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AtomicProtocol;

impl CommitProtocol for AtomicProtocol {
    fn build_chains(&mut self, changes: Changes<'_>) -> Result<Vec<Chain>> {
        let mut stage: Stage = changes.contents;
        stage.extend(changes.blocks.into_iter().map(|it| (it.block, it.current)));
        Ok(Chain::of_stages([stage], 0))
    }
}
