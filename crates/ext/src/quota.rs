//! Quotas: how much each user, group and project has, kept in step with every change.
//!
//! ```text
//!   a change of a file ── inodes, bytes ──▶ batch: sums by kind and id
//!                                             │ when it is sealed, in the same chain
//!                                             ▼
//!   hidden files: a tree of ids ─▶ entries: limits · usage
//! ```
//! Law 1: an inode counts from when it is made until it is given back, with or without a name,
//! and with all the blocks that it counts itself. The files of quotas count for nothing.
//! A value of an attribute in an inode of its own counts, inode and blocks, for the owner of each
//! file that has it, once for each entry; the inode of the value counts for nobody.
//! Law 2: a change whose owner has no entry yet begins only when there is room for one: until the
//! batch is sealed that is kept, from files and from trees.
//! Law 3: a file of quotas that is damaged is left as it is. What must look into it answers
//! `Corrupt` before it changes anything; what gives space back does so, uncounted, and says so.
//! Law 4: entries whose owners have nothing any more stay, for those who come back.
//!
//! Limits stay as they are and refuse nothing, as Linux does it unless it is mounted with
//! `usrquota`, `grpquota` or `prjquota`; times of grace do not begin or end.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with blocks of a file that has fewer than 2^32, and levels of a tree"
)]

use std::collections::{BTreeMap, HashSet};

use crate::blocks::data::Data;
use crate::blocks::role::Role;
use crate::format::features::ReadOnlyCompatible;
use crate::format::quota::{
    BLOCK_BYTES, Header, Kind, LEVELS, ROOT, RawEntries, Usage, reference, set_reference,
};
use crate::format::slot::Slot;
use crate::format::superblock::Superblock;
use crate::map::edit::Taking;
use crate::transaction::Transaction;
use crate::units::{index, narrow};
use crate::{Error, FsBlock, InodeNumber, Result};

/// Owners that are known to have entries.
const MOST_KNOWN: usize = 1 << 16;
/// Blocks of a file of quotas that a new entry takes at most: three nodes and its own.
const MOST_NEW: u32 = LEVELS;
/// Blocks that the map of that file may take for those.
const MOST_OF_MAP: u32 = 3;

/// Whom an inode counts for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Owner {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) project: u32,
}

impl Owner {
    /// As the inode itself says it.
    fn of(slot: &Slot<'_>) -> Self {
        let (uid, gid) = slot.owner();
        Self { uid, gid, project: slot.project() }
    }

    const fn id(self, kind: Kind) -> u32 {
        match kind {
            Kind::User => self.uid,
            Kind::Group => self.gid,
            Kind::Project => self.project,
        }
    }
}

/// Someone's quota of a kind.
type Account = (Kind, u32);

/// What a batch changes, by account.
pub(crate) type Sums = BTreeMap<Account, Usage>;

/// The quotas of a volume.
#[derive(Debug, Default)]
pub(crate) struct Quotas {
    /// The files that there are.
    files: Vec<(Kind, InodeNumber)>,
    /// Those with entries, as far as that was looked at.
    known: HashSet<Account>,
    /// Those that get one when the batch is sealed.
    promised: HashSet<Account>,
    /// Blocks that are kept for them.
    pub(crate) kept_blocks: u64,
}

impl Quotas {
    /// Those of a volume.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if its superblock names other inodes than it can.
    pub(crate) fn of(super_: &Superblock) -> Result<Self> {
        let features = super_.read_only_compatible;
        if !features.contains(ReadOnlyCompatible::QUOTA) {
            return Ok(Self::default());
        }
        let mut files = Vec::new();
        for (kind, inode) in Kind::ALL.into_iter().zip(super_.quotas.map(InodeNumber)) {
            let is_there = match kind {
                Kind::User | Kind::Group => inode.0 != 0,
                Kind::Project => inode.0 != 0 && features.contains(ReadOnlyCompatible::PROJECT),
            };
            if !is_there {
                continue;
            }
            let is_right = match kind {
                Kind::User => inode.0 == 3,
                Kind::Group => inode.0 == 4,
                Kind::Project => (super_.first_inode.0..=super_.inodes).contains(&inode.0),
            };
            if !is_right {
                return Err(Error::corrupt("superblock: inode of quotas").of_inode(inode));
            }
            files.push((kind, inode));
        }
        Ok(Self { files, ..Self::default() })
    }

    fn accounts(&self, owner: Owner) -> impl Iterator<Item = (Account, InodeNumber)> + use<> {
        let all: Vec<_> =
            self.files.iter().map(|(kind, file)| ((*kind, owner.id(*kind)), *file)).collect();
        all.into_iter()
    }

    fn is_counted_on(&self, account: Account) -> bool {
        self.known.contains(&account) || self.promised.contains(&account)
    }

    fn know(&mut self, account: Account) {
        if self.known.len() >= MOST_KNOWN {
            self.known.clear();
        }
        self.known.insert(account);
    }
}

/// Where the entry of an account is, or where the tree ends without it.
enum Found {
    Entry { block: u32, nth: usize },
    Nothing { node: u32, level: u32 },
}

impl Transaction<'_> {
    /// Looks whether all files of quotas are what they must be.
    pub(crate) fn look_at_quotas(&self) -> Result<()> {
        let files = &self.writer.quotas.files;
        files.iter().try_for_each(|(kind, file)| self.quota_header(*kind, *file).map(drop))
    }

    /// Blocks that new entries may take for what `owner` is going to have.
    pub(crate) fn entries_needed(&mut self, owner: Owner) -> Result<u64> {
        let mut needed = 0;
        for (account, file) in self.writer.quotas.accounts(owner) {
            if self.writer.quotas.is_counted_on(account) {
                continue;
            }
            match self.find_entry(account, file)? {
                Found::Entry { .. } => self.writer.quotas.know(account),
                Found::Nothing { .. } => needed += self.blocks_of_entry(),
            }
        }
        Ok(needed)
    }

    /// Keeps the blocks that [`Transaction::entries_needed`] has said, until the batch is sealed.
    pub(crate) fn promise_entries(&mut self, owner: Owner) {
        let blocks = self.blocks_of_entry() * u64::from(self.cluster_blocks());
        let quotas = &mut self.writer.quotas;
        for (account, _) in quotas.accounts(owner) {
            if !quotas.is_counted_on(account) {
                quotas.promised.insert(account);
                quotas.kept_blocks += blocks;
            }
        }
    }

    /// Both: sees to it that the owner of an inode has entries, or will have.
    pub(crate) fn have_entries(&mut self, owner: Owner) -> Result<()> {
        let needed = self.entries_needed(owner)?;
        if needed > 0 {
            self.need_blocks(needed, true)?;
            self.promise_entries(owner);
        }
        Ok(())
    }

    /// [`Transaction::have_entries`] of the owner of an inode that is there.
    pub(crate) fn have_entries_of(&mut self, inode: InodeNumber) -> Result<()> {
        if !self.is_counted(inode)? {
            return Ok(());
        }
        let owner = self.read_slot(inode, Owner::of)?;
        self.have_entries(owner)
    }

    /// Counts what an inode has more, or less, for its owner.
    pub(crate) fn count_usage(&mut self, inode: InodeNumber, usage: Usage) -> Result<()> {
        if self.is_counted(inode)? {
            let owner = self.read_slot(inode, Owner::of)?;
            self.count_for(owner, usage);
        }
        Ok(())
    }

    /// Counts blocks that an inode has more, or fewer.
    pub(crate) fn count_usage_of_blocks(
        &mut self,
        inode: InodeNumber,
        blocks: u64,
        more: bool,
    ) -> Result<()> {
        let bytes = blocks.saturating_mul(self.volume.super_.block_bytes.into());
        let usage = Usage { inodes: 0, bytes: i64::try_from(bytes).unwrap_or(i64::MAX) };
        self.count_usage(inode, if more { usage } else { usage.taken() })
    }

    /// Counts all that an inode has for others than before: those that its slot says once `give`
    /// has changed it.
    pub(crate) fn give_usage(
        &mut self,
        inode: InodeNumber,
        give: impl FnOnce(&mut Slot<'_>),
    ) -> Result<()> {
        let block_bytes = self.volume.super_.block_bytes;
        let (before, after, bytes) = self.change_slot(inode, |it| {
            let before = Owner::of(it);
            give(it);
            (before, Owner::of(it), it.bytes_of_blocks(block_bytes))
        })?;
        if before != after && self.is_counted(inode)? {
            let inodes = 1 + self.counted_values(inode)?.entries;
            let usage = Usage { inodes, bytes: i64::try_from(bytes).unwrap_or(i64::MAX) };
            self.count_for(before, usage.taken());
            self.count_for(after, usage);
        }
        Ok(())
    }

    fn is_counted(&self, inode: InodeNumber) -> Result<bool> {
        if self.writer.quotas.files.is_empty() || !self.volume.super_.names(inode) {
            return Ok(false);
        }
        Ok(!self.has_values() || !self.read_slot(inode, |it| it.is_value())?)
    }

    fn count_for(&mut self, owner: Owner, usage: Usage) {
        for (account, _) in self.writer.quotas.accounts(owner) {
            let sum = self.writer.batch.usage.entry(account).or_default();
            *sum = sum.with(usage);
        }
    }

    fn blocks_of_entry(&self) -> u64 {
        let blocks = (MOST_NEW * BLOCK_BYTES).div_ceil(self.volume.super_.block_bytes);
        u64::from(blocks + MOST_OF_MAP)
    }

    /// Writes what the batch has changed into the files of quotas.
    pub(crate) fn write_usage(&mut self) -> Result<()> {
        let sums = std::mem::take(&mut self.writer.batch.usage);
        let files: BTreeMap<Kind, InodeNumber> = self.writer.quotas.files.iter().copied().collect();
        self.writer.quotas.promised.clear();
        self.writer.quotas.kept_blocks = 0;
        for (account, usage) in sums.into_iter().filter(|(_, usage)| *usage != Usage::default()) {
            let (kind, id) = account;
            let Some(file) = files.get(&kind) else { continue };
            match self.add_usage(account, *file, usage) {
                Ok(()) => {}
                Err(error @ (Error::Corrupt { .. } | Error::NoSpace)) => {
                    log::warn!("the quota of {kind:?} {id} is wrong: {error}: run e2fsck");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn add_usage(&mut self, account: Account, file: InodeNumber, usage: Usage) -> Result<()> {
        match self.find_entry(account, file)? {
            Found::Entry { block, nth } => {
                self.change_quota(file, block, |bytes| {
                    RawEntries::view_mut(bytes).map(|entries| entries.count(nth, usage))
                })??;
                self.writer.quotas.know(account);
                Ok(())
            }
            // It had nothing that could become less.
            Found::Nothing { .. } if usage.inodes <= 0 && usage.bytes <= 0 => Ok(()),
            Found::Nothing { node, level } => {
                self.add_entry(account, file, (node, level), usage)?;
                self.writer.quotas.know(account);
                Ok(())
            }
        }
    }

    fn find_entry(&self, (kind, id): Account, file: InodeNumber) -> Result<Found> {
        let of_file = |error: Error| error.of_inode(file);
        let header = self.quota_header(kind, file)?;
        let mut node = ROOT;
        for level in 0..LEVELS {
            let bytes = self.quota_block(file, node)?;
            match header.leads_to(reference(&bytes, id, level)).map_err(of_file)? {
                None => return Ok(Found::Nothing { node, level }),
                Some(below) => node = below,
            }
        }
        let bytes = self.quota_block(file, node)?;
        let found = RawEntries::view(&bytes).map_err(of_file)?.find(id);
        let nth = found.ok_or(Error::corrupt("quota file: an entry is missing").of_inode(file))?;
        Ok(Found::Entry { block: node, nth })
    }

    /// Adds an entry, and the nodes that lead to it from `node` on. Nothing leads to what is new
    /// before all of it can be had.
    fn add_entry(
        &mut self,
        (kind, id): Account,
        file: InodeNumber,
        (node, level): (u32, u32),
        usage: Usage,
    ) -> Result<()> {
        let of_file = |error: Error| error.of_inode(file);
        let mut header = self.quota_header(kind, file)?;
        let mut next_room = None;
        if header.room != 0 {
            let bytes = self.quota_block(file, header.room)?;
            let entries = RawEntries::view(&bytes).map_err(of_file)?;
            if !entries.has_room().map_err(of_file)? {
                return Err(of_file(Error::corrupt("quota file: list of blocks with room")));
            }
            next_room = header.leads_to(entries.dqdh_next_free.get()).map_err(of_file)?;
            if let Some(next) = next_room {
                RawEntries::view(&self.quota_block(file, next)?).map_err(of_file)?;
            }
        }
        let mut nodes = Vec::new();
        for _ in level + 1..LEVELS {
            nodes.push(self.take_quota_block(file, &mut header)?);
        }
        if header.room == 0 {
            header.room = self.take_quota_block(file, &mut header)?;
        }
        let block = header.room;
        let has_room = self.change_quota(file, block, |bytes| {
            let entries = RawEntries::view_mut(bytes)?;
            let has_room = entries.add(id, usage);
            if !has_room {
                entries.dqdh_next_free.set(0);
                entries.dqdh_prev_free.set(0);
            }
            Ok::<_, Error>(has_room)
        })??;
        if !has_room {
            header.room = next_room.unwrap_or(0);
            if let Some(next) = next_room {
                self.change_quota(file, next, |bytes| {
                    RawEntries::view_mut(bytes).map(|entries| entries.dqdh_prev_free.set(0))
                })??;
            }
        }
        // From the entries up: each node leads to what is there.
        let mut below = block;
        for (level, node) in (level + 1..LEVELS).zip(&nodes).rev() {
            self.change_quota(file, *node, |bytes| set_reference(bytes, id, level, below))?;
            below = *node;
        }
        self.change_quota(file, node, |bytes| set_reference(bytes, id, level, below))?;
        self.change_quota(file, 0, |bytes| header.write(bytes))
    }

    /// A block of zeros in a file of quotas: an unused one, or one more. The header in hand knows
    /// of it, the file does not yet.
    fn take_quota_block(&mut self, file: InodeNumber, header: &mut Header) -> Result<u32> {
        if header.unused != 0 {
            let block = header.unused;
            let bytes = self.quota_block(file, block)?;
            let unused = RawEntries::view(&bytes).map_err(|error| error.of_inode(file))?;
            let next = header.leads_to(unused.dqdh_next_free.get());
            if unused.dqdh_entries.get() != 0 || next == Ok(Some(block)) {
                let what = "quota file: list of unused blocks";
                return Err(Error::corrupt(what).of_inode(file));
            }
            header.unused = next.map_err(|error| error.of_inode(file))?.unwrap_or(0);
            self.change_quota(file, block, |bytes| bytes.fill(0))?;
            return Ok(block);
        }
        let block = header.blocks;
        let block_bytes = u64::from(self.volume.super_.block_bytes);
        let at = narrow(u64::from(block) * u64::from(BLOCK_BYTES) / block_bytes);
        if self.mapped(file, at)?.is_none() {
            let taking = Taking { grows: false, privileged: true, unwritten: false };
            let runs = self.map_blocks(file, at..at + 1, taking)?;
            let run = runs.first().ok_or(Error::NoSpace)?;
            self.put_fresh(run.at, Role::Quota, vec![0; index(block_bytes)]);
        }
        header.blocks = block.checked_add(1).ok_or(Error::TooLarge)?;
        let end = u64::from(header.blocks) * u64::from(BLOCK_BYTES);
        if self.peek(file)?.size_bytes < end {
            self.change_slot(file, |it| it.set_size(end))?;
        }
        self.change_quota(file, block, |bytes| bytes.fill(0))?;
        Ok(block)
    }

    fn quota_header(&self, kind: Kind, file: InodeNumber) -> Result<Header> {
        let size = self.peek(file)?.size_bytes;
        let bytes = self.quota_block(file, 0)?;
        Header::check(&bytes, kind, size).map_err(|error| error.of_inode(file))
    }

    /// Where a block of a file of quotas is: in which block of the volume, and where in that.
    fn quota_place(&self, file: InodeNumber, nth: u32) -> Result<(FsBlock, usize)> {
        let block_bytes = u64::from(self.volume.super_.block_bytes);
        let at = u64::from(nth) * u64::from(BLOCK_BYTES);
        let block = self.mapped(file, narrow(at / block_bytes))?;
        let missing = Error::corrupt("quota file: a block is missing").of_inode(file);
        Ok((block.ok_or(missing)?, index(at % block_bytes)))
    }

    fn quota_block(&self, file: InodeNumber, nth: u32) -> Result<Data> {
        let (block, at) = self.quota_place(file, nth)?;
        let bytes = self.block(block, Role::Quota).map_err(|error| error.of_inode(file))?;
        Ok(bytes.slice(at..at + index(BLOCK_BYTES.into())))
    }

    fn change_quota<T>(
        &mut self,
        file: InodeNumber,
        nth: u32,
        change: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T> {
        let (block, at) = self.quota_place(file, nth)?;
        self.change(block, Role::Quota, |bytes| {
            let part = at..at + index(BLOCK_BYTES.into());
            change(bytes.get_mut(part).unwrap_or_default())
        })
    }
}
