//! Protocol for volumes with extents or checksums and no journal: data and new blocks first, then
//! all other metadata, in place.
//!
//! Law: after `fsync` returns, the data is on the disk, and no metadata references data that is
//! not. A cut within a batch leaves what the kernel's driver leaves on such a volume: a mix of old
//! and new structures, which `e2fsck` repairs.

use super::CommitProtocol;
use crate::Result;
use crate::commit::chain::{Chain, Stage};
use crate::commit::changes::Changes;

/// Commit protocol with two stages: it records nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnorderedProtocol;

impl CommitProtocol for UnorderedProtocol {
    fn build_chains(&mut self, changes: Changes<'_>) -> Result<Vec<Chain>> {
        let (mut first, mut last): (Stage, Stage) = (changes.contents, Stage::new());
        for it in changes.blocks {
            let stage = if it.base.is_none() { &mut first } else { &mut last };
            stage.insert(it.block, it.current);
        }
        Ok(Chain::of_stages([first, last], 1))
    }
}
