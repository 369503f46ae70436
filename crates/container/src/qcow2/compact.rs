//! Compaction: minimizes the length of a qcow2 file by moving its clusters.
//!
//! ```text
//!   | used | free | used | free | used | used |   first session: clears the entries of unused
//!                                                 bytes and of recent clusters of zeros
//!               ▲             ▲     │      │      each later session: copies clusters above a
//!               └─────────────┴─────┴──────┘      limit below it; its end releases the old ones
//!   | used | used | used | used |                 the caller truncates the file here
//! ```
//! Law 1: a cluster is released only once no durable table refers to it, and reused only in a later
//! session. A crash leaks clusters at most; the contents of the disk stay.
//! Law 2: a copy, and the refcount of its cluster, are durable before a table refers to it.
//! Law 3: snapshots, clusters shared with them, and the L1 table are not moved. In an image with
//! snapshots compressed clusters are not moved either.
//!
//! A discard by a mount only punches holes. A released cluster is not reused within its session, so
//! a volume that keeps discarding and writing would make the file longer.

use std::collections::VecDeque;
use std::ops::Range;

use draconis_device::Ticket;

use super::writable::{TableSector, WritableQcow2};
use super::{OFFSET_MASK, OFLAG_COMPRESSED, OFLAG_ZERO};
use crate::Error;
use crate::image_file::ImageFile;
use crate::writable::{AllocationTables, MetadataWriter};

/// Maximum passes. The first pass can make refcount blocks and the refcount table movable.
const MAX_PASSES: u32 = 4;
/// Bytes that are copied before the tables are updated.
const BATCH_BYTES: u64 = 4 << 20;

/// Copies of the current batch: pending writes, and the free clusters that are left.
struct PendingCopies {
    limit: u64,
    free: VecDeque<u64>,
    writes: Vec<(u64, Vec<u8>)>,
}

impl WritableQcow2 {
    /// Releases the clusters of `unused` bytes, moves clusters to the front of the file, and
    /// returns the required length of the file. Requires that no session is open.
    pub(super) fn compact_clusters(
        &mut self,
        out: &mut MetadataWriter<'_>,
        unused: Vec<Range<u64>>,
    ) -> Result<u64, Error> {
        if self.refcounts.needs_repair() {
            self.refcounts.begin_session(out)?;
            self.end_session(out)?;
        }
        // At once: a later run no longer knows what is unused, but finds the zeros again.
        let is_changed = !unused.is_empty() && self.clear_entries(out, unused, false)?;
        let has_recent = self.map.is_dirty || self.refcounts.has_newly_allocated();
        if has_recent {
            self.clear_entries(out, vec![], true)?;
        }
        if is_changed || has_recent {
            self.pack_all(out)?;
        }
        for _ in 0..MAX_PASSES {
            let (limit, mut is_changed) = self.move_clusters(out)?;
            is_changed |= self.refcounts.release_refcount_blocks(out, limit)?;
            is_changed |= self.refcounts.move_table_down(out)?;
            if !is_changed {
                break;
            }
        }
        let end = self.refcounts.used_file_end();
        // A last host cluster of compressed ones need not be whole.
        let last = self.clusters_to_pack(out.file, end - self.map.cluster_bytes(), false)?;
        let packed = last.iter().map(|cluster| cluster.at + cluster.len).max();
        Ok(packed.unwrap_or(end).next_multiple_of(self.sector_bytes).min(end))
    }

    /// Clears the entries of `unused` bytes, or of recent clusters of zeros, in L2 tables that no
    /// snapshot shares. Returns false if there are none.
    fn clear_entries(
        &mut self,
        out: &mut MetadataWriter<'_>,
        unused: Vec<Range<u64>>,
        clears_zeros: bool,
    ) -> Result<bool, Error> {
        let cluster = self.map.cluster_bytes();
        let cleared = match (self.map.backing.is_some(), self.map.version) {
            (false, _) => 0,
            (true, 3) => OFLAG_ZERO,
            // An unallocated cluster would read from the backing file.
            (true, _) => return Ok(false),
        };
        let len = self.map.len_bytes;
        let units = |range: Range<u64>| {
            let end = if range.end >= len { len.div_ceil(cluster) } else { range.end / cluster };
            range.start.div_ceil(cluster)..end
        };
        let units: Vec<_> = unused.into_iter().map(units).filter(|it| !it.is_empty()).collect();
        let is_unused = |unit: u64| {
            let before = units.partition_point(|range| range.start <= unit);
            before
                .checked_sub(1)
                .and_then(|nth| units.get(nth))
                .is_some_and(|it| it.contains(&unit))
        };
        let mut is_changed = false;
        self.refcounts.begin_session(out)?;
        let (per_table, per_sector) = (self.entries_per_l2_table(), self.sector_bytes / 8);
        for nth in 0..self.l1_table.len() as u64 {
            let at = self.l2_table_offset(nth);
            if at == 0 || !self.refcounts.is_exclusive(at) {
                continue;
            }
            let mut entries = self.cached_l2_table(out.file, nth)?.entries.clone();
            let mut released = vec![];
            for (place, entry) in (0u64..).zip(&mut entries) {
                let is_unused = is_unused(nth * per_table + place);
                if *entry != cleared
                    && (is_unused || clears_zeros && self.is_recent_and_zeros(out.file, *entry)?)
                {
                    released.push((place / per_sector, std::mem::replace(entry, cleared)));
                }
            }
            is_changed |= !released.is_empty();
            let is_empty = entries.iter().all(|entry| *entry == 0);
            for (sector, entry) in released {
                if !is_empty {
                    self.changed_sectors.insert(TableSector::L2Table(nth, sector));
                }
                self.release_entry(out.file, entry);
            }
            self.cached_l2_table(out.file, nth)?.entries = entries;
            if is_empty {
                self.l2_tables.remove(&nth);
                self.set_l1_entry(nth, 0);
                self.refcounts.release_clusters(at, cluster);
            }
            self.write_dirty_tables(out)?;
        }
        self.end_session(out)?;
        Ok(is_changed)
    }

    /// Returns true if the cluster at `at` may be recent: allocated since the image was opened, or
    /// by a writer that did not close it, such as a compaction that was interrupted.
    pub(super) fn is_recent(&self, at: u64) -> bool {
        self.map.is_dirty || self.refcounts.is_newly_allocated(at)
    }

    /// Returns true if an entry refers to a recent cluster that reads as zeros. Older clusters are
    /// not read.
    fn is_recent_and_zeros(&self, file: &ImageFile, entry: u64) -> Result<bool, Error> {
        let Some(at) = self.exclusive_cluster(entry).filter(|at| self.is_recent(*at)) else {
            return Ok(false);
        };
        Ok(entry & OFLAG_ZERO != 0 || self.read_cluster(file, at)?.iter().all(|byte| *byte == 0))
    }

    /// Reads a cluster, padded with zeros past the end of the file.
    pub(super) fn read_cluster(&self, file: &ImageFile, at: u64) -> Result<Vec<u8>, Error> {
        let cluster = self.map.cluster_bytes();
        let there = file.max_len_bytes().saturating_sub(at).min(cluster);
        let mut bytes = file.read_vec(at, there as usize)?;
        bytes.resize(cluster as usize, 0);
        Ok(bytes)
    }

    pub(super) fn end_session(&mut self, out: &mut MetadataWriter<'_>) -> Result<(), Error> {
        self.write_dirty_tables(out)?;
        out.wait()?;
        self.close_session(out)?;
        out.wait()
    }

    /// Moves clusters from the returned limit on to free ones. Returns false if it moved none.
    fn move_clusters(&mut self, out: &mut MetadataWriter<'_>) -> Result<(u64, bool), Error> {
        let mut can_move = self.refcounts.refcount_block_clusters();
        let mut mark = |at: u64| {
            let nth = usize::try_from(at >> self.map.cluster_bits).ok();
            if let Some(place) = nth.and_then(|nth| can_move.get_mut(nth)) {
                *place = true;
            }
        };
        let tables: Vec<u64> = (0..self.l1_table.len() as u64)
            .filter(|nth| {
                self.l2_table_offset(*nth) != 0
                    && self.refcounts.is_exclusive(self.l2_table_offset(*nth))
            })
            .collect();
        for nth in &tables {
            mark(self.l2_table_offset(*nth));
            // Not cached: there may be many.
            for entry in super::read_table(
                out.file,
                self.l2_table_offset(*nth),
                self.entries_per_l2_table(),
            )? {
                if let Some(at) = self.exclusive_cluster(entry) {
                    mark(at);
                } else if entry & OFLAG_COMPRESSED != 0 && !self.has_snapshots {
                    let (at, len) = self.map.compressed_extent_in(out.file, entry);
                    let hosts = (at..at + len).step_by(self.map.cluster_bytes() as usize);
                    hosts.chain([at + len.saturating_sub(1)]).for_each(&mut mark);
                }
            }
        }
        let (limit, free) = self.refcounts.move_limit(&can_move);
        if free.is_empty() {
            return Ok((limit, false));
        }
        let start = limit << self.map.cluster_bits;
        let packed = self.clusters_to_pack(out.file, start, false)?;
        // The last ones first: if the free clusters are too few, the rest is below the end.
        let mut packed = packed.into_iter().rev().collect();
        self.refcounts.reserve_clusters(out, &free)?;
        let mut copies = PendingCopies { limit: start, free, writes: vec![] };
        self.refcounts.move_refcount_blocks(out, limit, &mut copies.free)?;
        for nth in tables {
            self.move_data_clusters(out, nth, &mut copies)?;
            self.move_l2_table(out, nth, &mut copies)?;
        }
        self.flush_copies(out, &mut copies)?;
        self.pack_batch(out, &mut packed, Some(&mut copies.free))?;
        for nth in copies.free {
            self.refcounts.release_clusters(nth << self.map.cluster_bits, 1);
        }
        self.end_session(out)?;
        Ok((limit, true))
    }

    /// Returns the cluster of an entry if it is uncompressed and its refcount is 1.
    pub(super) fn exclusive_cluster(&self, entry: u64) -> Option<u64> {
        let at = entry & OFFSET_MASK;
        (entry & OFLAG_COMPRESSED == 0 && at != 0 && self.refcounts.is_exclusive(at)).then_some(at)
    }

    /// Moves the data clusters of an L2 table that lie above the limit.
    fn move_data_clusters(
        &mut self,
        out: &mut MetadataWriter<'_>,
        nth: u64,
        copies: &mut PendingCopies,
    ) -> Result<(), Error> {
        let cluster = self.map.cluster_bytes();
        for place in 0..self.entries_per_l2_table() {
            let entry = self.cached_l2_table(out.file, nth)?.entries.get(place as usize).copied();
            let entry = entry.unwrap_or(0);
            let Some(old) = self.exclusive_cluster(entry).filter(|at| *at >= copies.limit) else {
                continue;
            };
            let Some(new) = copies.free.pop_front() else { return Ok(()) };
            let new = new << self.map.cluster_bits;
            // The contents of a zero cluster do not matter.
            if entry & OFLAG_ZERO == 0 {
                copies.writes.push((new, self.read_cluster(out.file, old)?));
            }
            if let Some(it) = self.cached_l2_table(out.file, nth)?.entries.get_mut(place as usize) {
                *it = new | entry & !OFFSET_MASK;
            }
            self.changed_sectors.insert(TableSector::L2Table(nth, place * 8 / self.sector_bytes));
            self.refcounts.release_clusters(old, cluster);
            if copies.writes.len() as u64 * cluster >= BATCH_BYTES {
                self.flush_copies(out, copies)?;
            }
        }
        Ok(())
    }

    /// Moves an L2 table that lies above the limit.
    fn move_l2_table(
        &mut self,
        out: &mut MetadataWriter<'_>,
        nth: u64,
        copies: &mut PendingCopies,
    ) -> Result<(), Error> {
        let old = self.l2_table_offset(nth);
        if old < copies.limit {
            return Ok(());
        }
        self.flush_copies(out, copies)?;
        let Some(new) = copies.free.pop_front() else { return Ok(()) };
        self.copy_l2_table(out, nth, new << self.map.cluster_bits)
    }

    /// Submits the pending copies, and then the tables that refer to them.
    fn flush_copies(
        &mut self,
        out: &mut MetadataWriter<'_>,
        copies: &mut PendingCopies,
    ) -> Result<(), Error> {
        if !copies.writes.is_empty() {
            let ticket: Ticket = out.submit_chain(vec![std::mem::take(&mut copies.writes)])?;
            out.file.disk().wait_visible(ticket)?;
            out.add_dependency(ticket);
        }
        self.write_dirty_tables(out)
    }

    /// Releases the clusters of an L2 entry.
    pub(super) fn release_entry(&mut self, file: &ImageFile, entry: u64) {
        if entry & OFLAG_COMPRESSED != 0 {
            let (at, len) = self.map.compressed_extent_in(file, entry);
            self.refcounts.release_clusters(at, len);
        } else if entry & OFFSET_MASK != 0 {
            self.refcounts.release_clusters(entry & OFFSET_MASK, self.map.cluster_bytes());
        }
    }
}
