//! Quota usage of each user, group and project, updated with every change.
//!
//! ```text
//!   a change of a file ── inodes, bytes ──▶ batch: sums by type and id
//!                                             │ when it is closed, in the same chain
//!                                             ▼
//!   quota files:  a tree of ids ─▶ entries: limits · usage
//! ```
//! Law 1: an inode counts from its creation until it is freed, with or without a name, with all
//! blocks in its `i_blocks`. Quota files do not count. A value in an EA inode counts, inode and
//! blocks, for the owner of each file that has it, once per entry; the EA inode counts for nobody.
//! Law 2: a change whose owner has no entry yet begins only if there is space for one. That space
//! stays reserved, from files and from trees, until the batch is closed.
//! Law 3: a damaged quota file is not changed. An operation that needs it returns `Corrupt` before
//! it changes anything. An operation that frees space continues, uncounted, with a warning.
//! Law 4: entries of owners without usage stay, for later use.
//!
//! Limits are not enforced and stay unchanged, as on Linux without the mount options `usrquota`,
//! `grpquota` or `prjquota`; grace times neither start nor end.

mod files;

use std::collections::{BTreeMap, HashSet};

use crate::format::features::ReadOnlyCompatible;
use crate::format::inode_slot::InodeSlot;
use crate::format::quota::{QuotaType, QuotaUsage};
use crate::format::superblock::Superblock;
use crate::{Error, InodeNumber, Result};

/// Limit of remembered owners with entries.
const MAX_KNOWN_ENTRIES: usize = 1 << 16;

/// Owner whose quotas an inode counts for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Owner {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) project: u32,
}

impl Owner {
    /// Returns the owner in the inode.
    fn from_inode_slot(slot: &InodeSlot<'_>) -> Self {
        let (uid, gid) = slot.owner();
        Self { uid, gid, project: slot.project() }
    }

    const fn id(self, kind: QuotaType) -> u32 {
        match kind {
            QuotaType::User => self.uid,
            QuotaType::Group => self.gid,
            QuotaType::Project => self.project,
        }
    }
}

/// A quota entry: type and id.
type QuotaId = (QuotaType, u32);

/// Usage changes of a batch, by quota entry.
pub(crate) type UsageDeltas = BTreeMap<QuotaId, QuotaUsage>;

/// Quota files and entries of a volume.
#[derive(Debug, Default)]
pub(crate) struct Quotas {
    /// Existing quota files.
    files: Vec<(QuotaType, InodeNumber)>,
    /// Entries known to exist.
    known_entries: HashSet<QuotaId>,
    /// Entries to be created when the batch is closed.
    reserved_entries: HashSet<QuotaId>,
    /// Blocks reserved for new entries.
    pub(crate) reserved_blocks: u64,
}

impl Quotas {
    /// Returns the quotas of a volume.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the superblock names an invalid quota inode.
    pub(crate) fn from_superblock(super_: &Superblock) -> Result<Self> {
        let features = super_.read_only_compatible;
        if !features.contains(ReadOnlyCompatible::QUOTA) {
            return Ok(Self::default());
        }
        let mut files = Vec::new();
        for (kind, inode) in QuotaType::ALL.into_iter().zip(super_.quotas.map(InodeNumber)) {
            let is_there = match kind {
                QuotaType::User | QuotaType::Group => inode.0 != 0,
                QuotaType::Project => {
                    inode.0 != 0 && features.contains(ReadOnlyCompatible::PROJECT)
                }
            };
            if !is_there {
                continue;
            }
            let is_right = match kind {
                QuotaType::User => inode.0 == 3,
                QuotaType::Group => inode.0 == 4,
                QuotaType::Project => (super_.first_inode.0..=super_.inodes).contains(&inode.0),
            };
            if !is_right {
                return Err(Error::corrupt("superblock: inode of quotas").with_inode(inode));
            }
            files.push((kind, inode));
        }
        Ok(Self { files, ..Self::default() })
    }

    fn quota_ids(&self, owner: Owner) -> impl Iterator<Item = (QuotaId, InodeNumber)> + use<> {
        let all: Vec<_> =
            self.files.iter().map(|(kind, file)| ((*kind, owner.id(*kind)), *file)).collect();
        all.into_iter()
    }

    fn has_entry(&self, account: QuotaId) -> bool {
        self.known_entries.contains(&account) || self.reserved_entries.contains(&account)
    }

    fn remember_entry(&mut self, account: QuotaId) {
        if self.known_entries.len() >= MAX_KNOWN_ENTRIES {
            self.known_entries.clear();
        }
        self.known_entries.insert(account);
    }
}
