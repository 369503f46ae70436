//! The list of inodes that were deleted, or cut short, while in use.
//!
//! The superblock names the first; each one's deletion time is the number of the next.

use std::collections::HashSet;

use zerocopy::FromBytes;

use super::{Check, entries};
use crate::Result;
use crate::format::inode::RawInode;

/// The inodes on the list, as far as it makes sense.
pub(super) fn listed(check: &Check<'_>) -> Result<HashSet<u32>> {
    let mut listed = HashSet::new();
    let mut next = check.raw.s_last_orphan.get();
    let ordinary = check.super_.first_inode.0..=check.super_.inodes;
    // An inode is there once, so the list ends.
    while ordinary.contains(&next) && listed.insert(next) {
        let slot = entries::slot(check, next)?;
        let Ok((raw, _)) = RawInode::ref_from_prefix(&slot) else { break };
        next = raw.i_dtime.get();
    }
    Ok(listed)
}
