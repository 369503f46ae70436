//! How much of each deleted file is certain, block by block.
//!
//! ```text
//!   in use now                                     ▶ overwritten
//!   mapped by a file that was deleted later        ▶ overwritten
//!   in use in a bitmap copy after the deletion     ▶ unsure
//!   freed by the deletion, and no bitmap since
//!   then lacks or shows a new use                  ▶ certain
//!   nothing on the volume was written after it     ▶ certain
//!   everything else                                ▶ unsure
//! ```
//! Law: a block is certain only if something proves it; what is not known is unsure.

use std::ops::Range;

use super::contents::FileMap;
use super::history::{History, NOW, Rank};
use super::inodes::DeletedInode;
use crate::blocks::role::Role;
use crate::format::bitmap::Bitmap;
use crate::format::group::flags::BLOCK_UNINIT;
use crate::map::BlockLocation;
use crate::offline::{group_bounds, group_tables, set_bits_in_group};
use crate::reader::VolumeReader;
use crate::units::{saturating_u32, saturating_usize};
use crate::{FsBlock, GroupNumber, Result};

/// What is known of some bytes of a file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Certainty {
    Certain,
    Unsure,
    Overwritten,
}

/// Certainty of a file's contents, as file blocks.
#[derive(Clone, Debug, Default)]
pub(super) struct BlockVerdicts {
    pub(super) overwritten: Vec<Range<u64>>,
    pub(super) unsure: Vec<Range<u64>>,
    /// True if a block of the map is not certain, and with it all contents.
    pub(super) has_doubtful_map: bool,
}

impl BlockVerdicts {
    fn add(&mut self, at: u64, verdict: Certainty) {
        let ranges = match verdict {
            Certainty::Certain => return,
            Certainty::Unsure => &mut self.unsure,
            Certainty::Overwritten => &mut self.overwritten,
        };
        let end = at.saturating_add(1);
        match ranges.last_mut() {
            Some(last) if last.end == at => last.end = end,
            _ => ranges.push(at..end),
        }
    }

    /// Adds the blocks of contents that went through the journal (`data=journal`): the file's own
    /// place may never have got them.
    fn add_journaled(
        &mut self,
        reader: &VolumeReader,
        history: &History,
        claim: &Claim,
        file: &DeletedInode,
    ) {
        let Some(from) = claim.from else { return };
        let (start, _) = group_bounds(&reader.super_, claim.group);
        let first = start.saturating_add(claim.at.into());
        for block in history.blocks_in(first..first.saturating_add(claim.blocks.into())) {
            let (copy, _) = history.newest_until(block, file.last_seen());
            if copy.is_some_and(|copy| copy.rank >= file.seen.0) {
                self.add(from.saturating_add(block.saturating_sub(first)), Certainty::Unsure);
            }
        }
    }

    fn sort(&mut self) {
        for ranges in [&mut self.overwritten, &mut self.unsure] {
            ranges.sort_by_key(|range| range.start);
            let mut joined: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
            for range in ranges.drain(..) {
                match joined.last_mut() {
                    Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
                    _ => joined.push(range),
                }
            }
            *ranges = joined;
        }
    }
}

/// A run of blocks of a deleted file within a group.
struct Claim {
    group: u32,
    /// First block, counted from the start of the group.
    at: u32,
    blocks: u32,
    file: usize,
    /// First file block; `None` for a block of the map.
    from: Option<u64>,
}

/// Blocks evaluated per block of the volume, at most: more of them claim the same block.
const MAX_CLAIMS_PER_BLOCK: u64 = 4;

/// Evaluates the contents of all deleted files.
///
/// # Errors
/// Errors of the device in the journal.
pub(super) fn evaluate(
    reader: &VolumeReader,
    history: &History,
    last_write: i64,
    files: &[(DeletedInode, FileMap)],
) -> Result<Vec<BlockVerdicts>> {
    let mut verdicts = vec![BlockVerdicts::default(); files.len()];
    let mut claims = collect_claims(reader, files, &mut verdicts);
    claims.sort_by_key(|claim| (claim.group, claim.at));
    for claims in claims.chunk_by(|a, b| a.group == b.group) {
        let Some(group) = claims.first().map(|claim| claim.group) else { continue };
        let usage = GroupUsage::load(reader, history, group)?;
        let owners = usage.newest_owners(claims, files);
        for claim in claims {
            let (Some((file, _)), Some(verdict)) =
                (files.get(claim.file), verdicts.get_mut(claim.file))
            else {
                continue;
            };
            let proof = Proof::of(file, history, last_write);
            verdict.add_journaled(reader, history, claim, file);
            for nth in 0..claim.blocks {
                let at = claim.at.saturating_add(nth);
                let found = usage.verdict(at, file, proof, &owners);
                match claim.from {
                    Some(from) => verdict.add(from.saturating_add(nth.into()), found),
                    None => verdict.has_doubtful_map |= found != Certainty::Certain,
                }
            }
        }
    }
    verdicts.iter_mut().for_each(BlockVerdicts::sort);
    Ok(verdicts)
}

/// Splits the blocks of all files by group. Invalid pointers count as overwritten.
fn collect_claims(
    reader: &VolumeReader,
    files: &[(DeletedInode, FileMap)],
    verdicts: &mut [BlockVerdicts],
) -> Vec<Claim> {
    let super_ = &reader.super_;
    let mut budget = super_.blocks.min(reader.disk_blocks()).saturating_mul(MAX_CLAIMS_PER_BLOCK);
    let mut claims = vec![];
    for ((nth, (_, map)), verdict) in files.iter().enumerate().zip(verdicts) {
        verdict.has_doubtful_map |= map.is_cut_short;
        let nodes = map.dependencies.iter().map(|block| (*block, 1, None));
        let runs = map.runs.iter().filter_map(|run| match run.location {
            BlockLocation::Mapped(first) => Some((first, run.blocks, Some(u64::from(run.from.0)))),
            BlockLocation::Damaged(_) => {
                let from = u64::from(run.from.0);
                verdict.overwritten.push(from..from.saturating_add(run.blocks.into()));
                None
            }
            // They read as zeros, whatever the blocks hold.
            BlockLocation::Hole | BlockLocation::Unwritten(_) => None,
        });
        let all: Vec<(FsBlock, u32, Option<u64>)> = nodes.chain(runs).collect();
        for (first, blocks, from) in all {
            let Some(left) = budget.checked_sub(blocks.into()) else {
                verdict.has_doubtful_map = true;
                continue;
            };
            budget = left;
            let (mut at, end) = (first.0, first.0.saturating_add(blocks.into()));
            while at < end {
                let in_volume = at.saturating_sub(super_.first_data_block.into());
                let per_group = u64::from(super_.blocks_per_group).max(1);
                let group = saturating_u32(in_volume.checked_div(per_group).unwrap_or(0));
                let (start, stop) =
                    group_bounds(super_, group.min(super_.groups.saturating_sub(1)));
                let part_end = end.min(stop);
                if at < start || at >= part_end {
                    verdict.has_doubtful_map = true;
                    break;
                }
                claims.push(Claim {
                    group,
                    at: saturating_u32(at.saturating_sub(start)),
                    blocks: saturating_u32(part_end.saturating_sub(at)),
                    file: nth,
                    from: from.map(|from| from.saturating_add(at.saturating_sub(first.0))),
                });
                at = part_end;
            }
        }
    }
    claims
}

/// What proves that free blocks still hold a file's contents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Proof {
    /// Bitmaps of every transaction since the file was last seen; it was deleted in this one.
    Journal(Rank),
    /// Nothing was written after the deletion.
    Times,
    None,
}

impl Proof {
    fn of(file: &DeletedInode, history: &History, last_write: i64) -> Self {
        if let Some(rank) = file.deleted_in.filter(|_| history.is_complete_since(file.last_seen()))
        {
            return Self::Journal(rank);
        }
        let is_last =
            file.has_own_time && file.deleted_at.is_some_and(|time| time.seconds > last_write);
        if is_last { Self::Times } else { Self::None }
    }
}

/// Newest file that claims a block, and whether several do.
type Owner = (Rank, i64, bool);

/// Use of the blocks of a group, now and in the journal. All indices are clusters.
struct GroupUsage {
    /// Bitmap now; `None` if it is damaged.
    now: Option<Vec<u8>>,
    clusters: u32,
    cluster_blocks: u32,
    /// Newest transaction in which each cluster came into use; 0 for none.
    allocated: Vec<Rank>,
    /// Newest transaction in which it was freed; 0 for none.
    freed: Vec<Rank>,
}

impl GroupUsage {
    fn load(reader: &VolumeReader, history: &History, group: u32) -> Result<Self> {
        let super_ = &reader.super_;
        let (start, end) = group_bounds(super_, group);
        let cluster_blocks = super_.cluster_blocks.max(1);
        let clusters = saturating_u32(end.saturating_sub(start).div_ceil(cluster_blocks.into()));
        let len = saturating_usize(clusters.into());
        let mut usage = Self {
            now: None,
            clusters,
            cluster_blocks,
            allocated: vec![0; len],
            freed: vec![0; len],
        };
        let Ok(descriptor) = reader.group(GroupNumber(group)) else { return Ok(usage) };
        if descriptor.flags & BLOCK_UNINIT != 0 {
            let mut bytes = vec![0; saturating_usize(super_.block_bytes.into())];
            let head = start..start.saturating_add(super_.backup_blocks(GroupNumber(group)));
            for own in group_tables(super_, &descriptor).into_iter().chain([head]) {
                set_bits_in_group(&mut bytes, own, (super_, group), true);
            }
            usage.now = Some(bytes);
        } else if let Ok(bytes) =
            reader.store.block(descriptor.block_bitmap, Role::BlockBitmap(group))
            && descriptor.verify_block_bitmap_csum(&bytes, super_)
        {
            usage.now = Some(bytes.to_vec());
        }
        let mut before: Option<Vec<u8>> = None;
        for copy in history.copies(descriptor.block_bitmap.0) {
            let bytes = history.read(*copy)?.to_vec();
            usage.note_changes(before.as_deref(), &bytes, copy.rank);
            before = Some(bytes);
        }
        if before.is_some() && before != usage.now {
            // Something changed the bitmap without the journal.
            usage.allocated.fill(NOW);
        }
        Ok(usage)
    }

    /// Notes the bits that changed between two copies of the bitmap. Before the first copy,
    /// every bit may have changed.
    fn note_changes(&mut self, before: Option<&[u8]>, bytes: &[u8], rank: Rank) {
        let bits = self.allocated.chunks_mut(8).zip(self.freed.chunks_mut(8));
        for ((nth, new), (allocated, freed)) in bytes.iter().enumerate().zip(bits) {
            let changed = before.map_or(0xFF, |old| old.get(nth).map_or(0xFF, |old| old ^ new));
            for bit in (0..8u32).filter(|bit| changed >> bit & 1 == 1) {
                let of = if new >> bit & 1 == 1 { &mut *allocated } else { &mut *freed };
                if let Some(changed) = of.get_mut(saturating_usize(bit.into())) {
                    *changed = rank;
                }
            }
        }
    }

    fn cluster(&self, block: u32) -> usize {
        saturating_usize(block.checked_div(self.cluster_blocks).unwrap_or(0).into())
    }

    /// Returns the newest file of those that claim each block of the group.
    fn newest_owners(&self, claims: &[Claim], files: &[(DeletedInode, FileMap)]) -> Vec<Owner> {
        let blocks = u64::from(self.clusters).saturating_mul(self.cluster_blocks.into());
        let mut owners = vec![(0, i64::MIN, false); saturating_usize(blocks)];
        for claim in claims {
            let Some((file, _)) = files.get(claim.file) else { continue };
            let (rank, time) = age(file);
            let at = saturating_usize(claim.at.into());
            let end = at.saturating_add(saturating_usize(claim.blocks.into()));
            for owner in owners.get_mut(at..end).unwrap_or_default() {
                *owner = match (owner.0, owner.1).cmp(&(rank, time)) {
                    std::cmp::Ordering::Less => (rank, time, false),
                    std::cmp::Ordering::Equal => (rank, time, true),
                    std::cmp::Ordering::Greater => *owner,
                };
            }
        }
        owners
    }

    fn verdict(
        &self,
        block: u32,
        file: &DeletedInode,
        proof: Proof,
        owners: &[Owner],
    ) -> Certainty {
        let at = self.cluster(block);
        let is_used = self
            .now
            .as_ref()
            .and_then(|now| Bitmap::new(now, self.clusters).get(saturating_u32(at as u64)));
        match (is_used, file.is_orphan) {
            (Some(true), true) => {}
            (Some(true), false) => return Certainty::Overwritten,
            (Some(false), false) => {}
            _ => return Certainty::Unsure,
        }
        let (rank, time) = age(file);
        match owners.get(saturating_usize(block.into())) {
            Some((newest, newest_time, _)) if (*newest, *newest_time) > (rank, time) => {
                return Certainty::Overwritten;
            }
            Some((.., false)) => {}
            _ => return Certainty::Unsure,
        }
        if file.is_orphan {
            return Certainty::Certain;
        }
        let of = |ranks: &[Rank]| ranks.get(at).copied().unwrap_or(NOW);
        let (allocated, freed) = (of(&self.allocated), of(&self.freed));
        match proof {
            Proof::Journal(deleted) if allocated <= deleted && freed >= deleted => {
                Certainty::Certain
            }
            Proof::Times => Certainty::Certain,
            _ => Certainty::Unsure,
        }
    }
}

/// Returns the age of a file's claims: the last transaction that shows it, or its deletion. Two
/// files that one transaction shows alive cannot share a block.
fn age(file: &DeletedInode) -> (Rank, i64) {
    let time = file.deleted_at.filter(|_| file.last_seen() == NOW);
    (file.last_seen(), time.map_or(0, |time| time.seconds))
}
