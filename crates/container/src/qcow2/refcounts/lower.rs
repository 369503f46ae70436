//! Refcounts during compaction, which moves clusters to the front of the file.
//!
//! Law: the refcount of a new location is durable before anything refers to it. This includes the
//! new locations of refcount blocks and refcount table.

use std::collections::{BTreeSet, VecDeque};

use super::{INCOMPAT_DIRTY, Refcounts};
use crate::Error;
use crate::image_file::be64;
use crate::writable::MetadataWriter;

/// Bytes of refcount blocks that are copied at once.
const BATCH_BYTES: u64 = 4 << 20;

impl Refcounts {
    /// Returns true if refcounts must be corrected, or the dirty flag is set.
    pub(in crate::qcow2) fn needs_repair(&self) -> bool {
        let is_dirty = self.version == 3 && be64(&self.header, 72) & INCOMPAT_DIRTY != 0;
        is_dirty || !self.changed.is_empty()
    }

    /// Begins a session.
    pub(in crate::qcow2) fn begin_session(
        &mut self,
        out: &mut MetadataWriter<'_>,
    ) -> Result<(), Error> {
        self.submit_changes(out, vec![]).map(|_| ())
    }

    /// Returns the length of the file up to the last used cluster.
    pub(in crate::qcow2) fn used_file_end(&self) -> u64 {
        let last = self.refcounts.iter().rposition(|count| *count != 0);
        last.map_or(0, |last| last as u64 + 1) << self.cluster_bits
    }

    /// Returns true if the cluster at `at` was allocated since the image was opened.
    pub(in crate::qcow2) fn is_newly_allocated(&self, at: u64) -> bool {
        self.new_clusters.get((at >> self.cluster_bits) as usize).copied().unwrap_or(false)
    }

    /// Returns true if any cluster was allocated since the image was opened.
    pub(in crate::qcow2) fn has_newly_allocated(&self) -> bool {
        !self.new_clusters.is_empty()
    }

    /// Returns for each cluster whether it holds a refcount block.
    pub(in crate::qcow2) fn refcount_block_clusters(&self) -> Vec<bool> {
        let mut is_block = vec![false; self.refcounts.len()];
        for at in self.table.iter().filter(|at| **at != 0) {
            let nth = usize::try_from(at >> self.cluster_bits).ok();
            if let Some(place) = nth.and_then(|nth| is_block.get_mut(nth)) {
                *place = true;
            }
        }
        is_block
    }

    /// Returns true if a cluster is free and its refcount block exists.
    fn is_allocatable(&self, nth: u64) -> bool {
        let block = self.table.get((nth / self.refcounts_per_block()) as usize);
        self.refcount(nth) == 0 && block.is_some_and(|at| *at != 0)
    }

    /// Returns the lowest limit below which there are enough free clusters for all `can_move`
    /// clusters above it, and the free clusters that are needed.
    pub(in crate::qcow2) fn move_limit(&self, can_move: &[bool]) -> (u64, VecDeque<u64>) {
        let table = self.cluster_range(self.table_at, self.table.len() as u64 * 8);
        let (mut limit, mut needed) = (self.refcounts.len() as u64, 0);
        let mut free = (0..limit).filter(|nth| self.is_allocatable(*nth)).count();
        while let Some(nth) = limit.checked_sub(1) {
            if can_move.get(nth as usize).copied().unwrap_or(false) {
                needed += 1;
            } else if self.is_allocatable(nth) {
                free -= 1;
            } else if self.refcount(nth) != 0 && !table.contains(&nth) {
                break;
            }
            if free < needed {
                needed -= usize::from(!self.is_allocatable(nth));
                break;
            }
            limit = nth;
        }
        (limit, (0..limit).filter(|nth| self.is_allocatable(*nth)).take(needed).collect())
    }

    /// Sets the refcounts of free clusters to 1, durably.
    pub(in crate::qcow2) fn reserve_clusters(
        &mut self,
        out: &mut MetadataWriter<'_>,
        clusters: &VecDeque<u64>,
    ) -> Result<(), Error> {
        for nth in clusters {
            self.set_refcount_dirty(*nth, 1);
        }
        self.submit_changes(out, vec![])?;
        out.wait()
    }

    /// Sets the refcounts of clusters that are allocated or reserved. Tables that are written
    /// afterwards depend on it.
    pub(in crate::qcow2) fn set_shares(
        &mut self,
        out: &mut MetadataWriter<'_>,
        shares: impl Iterator<Item = (u64, u16)>,
    ) -> Result<(), Error> {
        for (at, count) in shares {
            self.set_refcount_dirty(at >> self.cluster_bits, count);
        }
        let ticket = self.submit_changes(out, vec![])?;
        out.add_dependency(ticket);
        Ok(())
    }

    /// Returns the largest refcount that the image can hold.
    pub(in crate::qcow2) fn max_refcount(&self) -> u64 {
        let bits = 1u32 << self.refcount_order;
        (u64::MAX >> (64 - bits)).min(super::MAX_REFCOUNT)
    }

    /// Moves refcount blocks from `limit` on to reserved clusters.
    pub(in crate::qcow2) fn move_refcount_blocks(
        &mut self,
        out: &mut MetadataWriter<'_>,
        limit: u64,
        reserved: &mut VecDeque<u64>,
    ) -> Result<(), Error> {
        let bits = self.cluster_bits;
        let is_above = |(_, at): &(usize, &u64)| **at >> bits >= limit;
        let above: Vec<usize> =
            self.table.iter().enumerate().filter(is_above).map(|(nth, _)| nth).collect();
        for batch in above.chunks(((BATCH_BYTES >> bits) as usize).max(1)) {
            let (mut copies, mut sectors) = (vec![], BTreeSet::new());
            for block in batch {
                let Some(new) = reserved.pop_front() else { break };
                let per_block = self.sectors_per_block();
                copies.push((
                    new << bits,
                    self.encode_refcount_sectors(*block as u64 * per_block, per_block),
                ));
                if let Some(entry) = self.table.get_mut(*block) {
                    let old = std::mem::replace(entry, new << bits);
                    self.release_clusters(old, 1 << bits);
                }
                sectors.insert(*block as u64 * 8 / self.sector_bytes);
            }
            out.submit_chain(vec![copies, self.encode_table_sectors(&sectors)])?;
            out.wait()?;
        }
        Ok(())
    }

    /// Releases refcount blocks for clusters from `limit` on that count nothing but themselves.
    /// Returns false if there are none.
    pub(in crate::qcow2) fn release_refcount_blocks(
        &mut self,
        out: &mut MetadataWriter<'_>,
        limit: u64,
    ) -> Result<bool, Error> {
        let (bits, per_block) = (self.cluster_bits, self.refcounts_per_block());
        let range = |block: usize| {
            let first = block as u64 * per_block;
            first..first.saturating_add(per_block).min(self.refcounts.len() as u64)
        };
        let is_empty = |(block, at): (usize, &u64)| {
            let own = at >> bits;
            let is_unused = range(block).all(|nth| nth == own || self.refcount(nth) == 0);
            (*at != 0 && range(block).start >= limit && is_unused)
                .then_some((block, range(block).contains(&own)))
        };
        let empty: Vec<(usize, bool)> =
            self.table.iter().enumerate().filter_map(is_empty).collect();
        if empty.is_empty() {
            return Ok(false);
        }
        self.begin_session(out)?;
        let mut sectors = BTreeSet::new();
        for (block, counts_itself) in empty {
            sectors.insert(block as u64 * 8 / self.sector_bytes);
            let Some(entry) = self.table.get_mut(block) else { continue };
            let old = std::mem::take(entry);
            match counts_itself {
                // Its refcount is dropped with the block.
                true => self.set_refcount(old >> bits, 0),
                false => self.release_clusters(old, 1 << bits),
            }
        }
        out.submit_chain(vec![self.encode_table_sectors(&sectors)])?;
        self.end_session(out)?;
        Ok(true)
    }

    /// Moves the refcount table to the first free clusters before it that can hold its entries.
    /// Returns false if there are none.
    pub(in crate::qcow2) fn move_table_down(
        &mut self,
        out: &mut MetadataWriter<'_>,
    ) -> Result<bool, Error> {
        let last = self.table.iter().rposition(|at| *at != 0).unwrap_or(0);
        let per_cluster = 1 << (self.cluster_bits - 3);
        let clusters = (last / per_cluster + 1) as u64;
        let mut free = 0;
        let end = (0..self.table_at >> self.cluster_bits).find(|nth| {
            free = if self.is_allocatable(*nth) { free + 1 } else { 0 };
            free == clusters
        });
        let Some(first) = end.map(|end| end + 1 - clusters) else { return Ok(false) };
        self.reserve_clusters(out, &(first..first + clusters).collect())?;
        self.release_clusters(self.table_at, self.table.len() as u64 * 8);
        self.table.resize(clusters as usize * per_cluster, 0);
        self.table_at = first << self.cluster_bits;
        let bytes = self.table.iter().copied().flat_map(u64::to_be_bytes).collect();
        let head = self.header_with_table().to_vec();
        out.submit_chain(vec![vec![(self.table_at, bytes)], vec![(0, head)]])?;
        self.end_session(out)?;
        Ok(true)
    }

    fn end_session(&mut self, out: &mut MetadataWriter<'_>) -> Result<(), Error> {
        out.wait()?;
        self.close_session(out)?;
        out.wait()
    }
}
