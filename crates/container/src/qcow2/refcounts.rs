//! Refcounts of the clusters of a qcow2 file, and the cluster allocator.
//!
//! ```text
//!   header ──▶ refcount table ──▶ refcount blocks, one refcount for each cluster
//!   allocation: [ dirty flag ] ──▶ [ refcounts, new blocks ] ──▶ [ table, header ] ──▶ L2 entries
//! ```
//! Law 1: the refcount of an allocated cluster is durable before anything refers to it, so a crash
//! leaks clusters at most. No cluster is allocated twice, or before its owner released it.
//! Law 2: a released cluster stays counted until the session ends: by then no table refers to it.
//! Law 3: during a session an image of version 3 is marked as dirty: the next program that opens it
//! recomputes the refcounts, as QEMU does.
//! Law 4: clusters are preallocated, so that few writes wait for a refcount.
//! Law 5: the file is as long as its preallocated clusters: `qemu-img check` calls a table entry past
//! the end of the file damage, also in an image that is marked as dirty.

mod lower;

use std::collections::{BTreeSet, VecDeque};

use draconis_device::{Error as DiskError, Extent, Ticket};

use super::{INCOMPAT_DIRTY, OFFSET_MASK};
use crate::image_file::{ImageFile, be32, be64};
use crate::writable::MetadataWriter;
use crate::{CONVERT_REMEDY, Error, UnsupportedFeature};

/// Maximum clusters of a writable file: their refcounts take 2 bytes each, 32 MiB.
const MAX_CLUSTERS: u64 = 1 << 24;
/// Maximum clusters past the end of a truncated file that tables may refer to.
const MAX_CLUSTERS_PAST_END: u64 = 1 << 16;
/// Maximum length of the refcount table, as in QEMU.
const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;
/// Minimum clusters of a preallocation.
const MIN_PREALLOCATED_CLUSTERS: u64 = 16;
/// A preallocation is this part of the file: what is never used makes it so much longer, without
/// taking space.
const PREALLOCATED_PART: u64 = 8;
/// Maximum preallocation at the end of the file, and inside it, where zeros are written.
const MAX_PREALLOCATED_BYTES: u64 = 64 << 20;
const MAX_ZEROED_PREALLOCATION_BYTES: u64 = 2 << 20;

/// During verification: marks a cluster whose only user cannot share it.
const EXCLUSIVE_FLAG: u16 = 1 << 15;
const MAX_REFCOUNT: u64 = (EXCLUSIVE_FLAG - 1) as u64;

/// Adjacent clusters that are allocated but not yet used.
struct PreallocatedClusters {
    first: u64,
    count: u64,
    /// Writes that refer to the clusters depend on it.
    ticket: Ticket,
}

pub(super) struct Refcounts {
    cluster_bits: u32,
    /// Refcount width in bits, as a power of two.
    refcount_order: u32,
    version: u32,
    sector_bytes: u64,
    /// First sector of the file, with the header.
    header: Vec<u8>,
    table_at: u64,
    table: Vec<u64>,
    /// Refcount of each cluster.
    refcounts: Vec<u16>,
    /// Refcount sectors, counted from cluster 0, that differ from the file.
    changed: BTreeSet<u64>,
    /// Clusters from this one on were never written.
    written_clusters: u64,
    /// No cluster below it is free.
    search_from: u64,
    preallocated: VecDeque<PreallocatedClusters>,
    /// For each cluster, true if it was allocated since the image was opened.
    new_clusters: Vec<bool>,
    /// Released clusters: their refcounts are decremented when the session ends.
    released: Vec<u64>,
    in_session: bool,
}

impl Refcounts {
    /// Reads the refcount table. Callers record the users of all clusters with
    /// [`Refcounts::record_exclusive`] and [`Refcounts::record_shared`], then call
    /// [`Refcounts::verify_or_repair`].
    pub(super) fn open(file: &ImageFile, cluster_bits: u32, version: u32) -> Result<Self, Error> {
        let sector_bytes = file.sector_bytes().max(512);
        let cluster = 1u64 << cluster_bits;
        let written_clusters = file.len_bytes().div_ceil(cluster);
        if written_clusters > MAX_CLUSTERS || sector_bytes > cluster {
            let why = "a file of so many clusters, or of so small ones";
            return Err(UnsupportedFeature::ReadOnlyFormat("qcow2", why, CONVERT_REMEDY).into());
        }
        let head = file.read_vec(0, sector_bytes.min(file.len_bytes()) as usize)?;
        let refcount_order = if version == 3 { be32(&head, 96) } else { 4 };
        if refcount_order > 6 {
            return Err(Error::Damaged("qcow2: counts of an impossible size"));
        }
        let table_at = be64(&head, 48);
        let table_bytes = u64::from(be32(&head, 56)) << cluster_bits;
        if table_bytes > MAX_REFCOUNT_TABLE_BYTES
            || !table_at.is_multiple_of(cluster)
            || table_at == 0
        {
            return Err(Error::DamagedAt("qcow2: a table of counts that cannot be", table_at));
        }
        let table = super::read_table(file, table_at, table_bytes / 8)?;
        let mut counts = Self {
            cluster_bits,
            refcount_order,
            version,
            sector_bytes,
            header: head,
            table_at,
            table,
            refcounts: vec![0; written_clusters as usize],
            changed: BTreeSet::new(),
            written_clusters,
            search_from: 0,
            preallocated: VecDeque::new(),
            new_clusters: vec![],
            released: vec![],
            in_session: false,
        };
        counts.record_exclusive(0, cluster, false)?;
        counts.record_exclusive(table_at, table_bytes, false)?;
        for block in counts.table.clone() {
            if block != 0 {
                counts.record_exclusive(block, cluster, false)?;
            }
        }
        Ok(counts)
    }

    /// Records an exclusive user of `len` bytes at `at`, which lie past the end of the file only if
    /// `may_be_behind`.
    pub(super) fn record_exclusive(
        &mut self,
        at: u64,
        len: u64,
        may_be_behind: bool,
    ) -> Result<(), Error> {
        self.check_cluster_offset(at)?;
        for nth in self.cluster_range(at, len) {
            match self.checked_refcount(nth, at, may_be_behind)? {
                0 => self.set_refcount(nth, EXCLUSIVE_FLAG),
                _ => return Err(Error::DamagedAt("qcow2: two things have the same cluster", at)),
            }
        }
        Ok(())
    }

    /// Checks that `at` is a valid cluster offset.
    pub(super) fn check_cluster_offset(&self, at: u64) -> Result<(), Error> {
        match at.is_multiple_of(1 << self.cluster_bits) && at & !OFFSET_MASK == 0 {
            true => Ok(()),
            false => Err(Error::DamagedAt("qcow2: a cluster that is none", at)),
        }
    }

    /// Records `times` users of a range whose clusters may be shared.
    pub(super) fn record_shared(
        &mut self,
        at: u64,
        len: u64,
        times: u64,
        may_be_behind: bool,
    ) -> Result<(), Error> {
        for nth in self.cluster_range(at, len) {
            let count =
                u64::from(self.checked_refcount(nth, at, may_be_behind)?).saturating_add(times);
            if count > MAX_REFCOUNT {
                return Err(Error::DamagedAt("qcow2: two things have the same cluster", at));
            }
            self.set_refcount(nth, count as u16);
        }
        Ok(())
    }

    fn cluster_range(&self, at: u64, len: u64) -> std::ops::Range<u64> {
        let end = at.saturating_add(len).saturating_add((1 << self.cluster_bits) - 1);
        at >> self.cluster_bits..end >> self.cluster_bits
    }

    fn checked_refcount(&mut self, nth: u64, at: u64, may_be_behind: bool) -> Result<u16, Error> {
        let most = self.written_clusters + if may_be_behind { MAX_CLUSTERS_PAST_END } else { 0 };
        if nth >= most.min(MAX_CLUSTERS) {
            return Err(Error::DamagedAt("qcow2: a cluster behind the end of the file", at));
        }
        if nth >= self.refcounts.len() as u64 {
            self.refcounts.resize(nth as usize + 1, 0);
        }
        Ok(self.refcount(nth))
    }

    fn refcount(&self, nth: u64) -> u16 {
        usize::try_from(nth).ok().and_then(|nth| self.refcounts.get(nth)).copied().unwrap_or(0)
    }

    fn set_refcount(&mut self, nth: u64, count: u16) {
        if let Some(place) = usize::try_from(nth).ok().and_then(|nth| self.refcounts.get_mut(nth)) {
            *place = count;
        }
    }

    /// Compares the refcounts of the file with the recorded users. Wrong refcounts of a dirty
    /// image, or of version 2, are corrected by the next session. Those of other images may be too
    /// high, for users that are not known here, but not too low.
    pub(super) fn verify_or_repair(
        &mut self,
        file: &ImageFile,
        was_dirty: bool,
    ) -> Result<(), Error> {
        for count in &mut self.refcounts {
            if *count == EXCLUSIVE_FLAG {
                *count = 1;
            }
        }
        let put_right = was_dirty || self.version == 2;
        let clusters = self.refcounts.len() as u64;
        for (nth, block) in self.table.clone().into_iter().enumerate() {
            let first = nth as u64 * self.refcounts_per_block();
            if block == 0 {
                self.check_missing_block(first, was_dirty)?;
                continue;
            }
            // Refcounts past the end of the file are overwritten when it grows.
            let here = clusters.saturating_sub(first).min(self.refcounts_per_block());
            if here == 0 {
                continue;
            }
            let bytes = file.read_vec(block, 1 << self.cluster_bits)?;
            for place in 0..here {
                let (said, nth) = (self.decode_refcount(&bytes, place), first + place);
                let had = u64::from(self.refcount(nth));
                if said == had {
                    continue;
                }
                if said < had && !was_dirty {
                    let at = nth << self.cluster_bits;
                    return Err(Error::DamagedAt("qcow2: a cluster is used and not counted", at));
                }
                if put_right {
                    self.changed.insert(self.refcount_sector_of(nth));
                } else if said > MAX_REFCOUNT {
                    let at = nth << self.cluster_bits;
                    return Err(Error::DamagedAt("qcow2: an impossible count", at));
                } else {
                    self.set_refcount(nth, said as u16);
                }
            }
        }
        self.check_missing_block(self.table.len() as u64 * self.refcounts_per_block(), was_dirty)
    }

    /// Compares the clusters from `first` on that have no refcount block.
    fn check_missing_block(&mut self, first: u64, was_dirty: bool) -> Result<(), Error> {
        let end = match first < self.table.len() as u64 * self.refcounts_per_block() {
            true => {
                first.saturating_add(self.refcounts_per_block()).min(self.refcounts.len() as u64)
            }
            false => self.refcounts.len() as u64,
        };
        for nth in first..end {
            if self.refcount(nth) == 0 {
                continue;
            }
            if !was_dirty {
                let at = nth << self.cluster_bits;
                return Err(Error::DamagedAt("qcow2: a cluster is used and not counted", at));
            }
            self.changed.insert(self.refcount_sector_of(nth));
        }
        Ok(())
    }

    /// Returns true if the refcount of the cluster at `at` is 1.
    pub(super) fn is_exclusive(&self, at: u64) -> bool {
        self.refcount(at >> self.cluster_bits) == 1
    }

    /// Releases the clusters of a range when the session ends.
    pub(super) fn release_clusters(&mut self, at: u64, len: u64) {
        let clusters = self.cluster_range(at, len);
        self.released.extend(clusters);
    }

    /// Allocates a cluster, which reads as zeros.
    pub(super) fn allocate_cluster(&mut self, out: &mut MetadataWriter<'_>) -> Result<u64, Error> {
        if self.preallocated.is_empty() {
            self.preallocate(out)?;
        }
        let Some(run) = self.preallocated.front_mut() else {
            return Err(no_space(self.file_end()));
        };
        out.add_dependency(run.ticket);
        let nth = run.first;
        (run.first, run.count) = (run.first + 1, run.count - 1);
        if run.count == 0 {
            self.preallocated.pop_front();
        }
        if self.new_clusters.len() as u64 <= nth {
            self.new_clusters.resize(self.refcounts.len().max(nth as usize + 1), false);
        }
        if let Some(is_new) = self.new_clusters.get_mut(nth as usize) {
            *is_new = true;
        }
        Ok(nth << self.cluster_bits)
    }

    /// Preallocates more clusters if few are left.
    pub(super) fn preallocate_if_low(&mut self, out: &mut MetadataWriter<'_>) -> Result<(), Error> {
        let left: u64 = self.preallocated.iter().map(|run| run.count).sum();
        // A full file is reported to the write that needs a cluster.
        let has_room = || {
            self.search_from < self.written_clusters || self.appendable_clusters(out.file, 1) > 0
        };
        match self.in_session
            && left < self.preallocation_clusters(MAX_PREALLOCATED_BYTES) / 4
            && has_room()
        {
            true => self.preallocate(out),
            false => Ok(()),
        }
    }

    /// Returns the clusters of the next preallocation, which is at most `most_bytes` long.
    fn preallocation_clusters(&self, most_bytes: u64) -> u64 {
        let part = self.file_end() / PREALLOCATED_PART;
        part.max(MIN_PREALLOCATED_CLUSTERS).min(most_bytes >> self.cluster_bits).max(1)
    }

    fn preallocate(&mut self, out: &mut MetadataWriter<'_>) -> Result<(), Error> {
        let cluster = 1u64 << self.cluster_bits;
        // Free clusters inside the file go first, so that it does not grow.
        while self.search_from < self.written_clusters && self.refcount(self.search_from) != 0 {
            self.search_from += 1;
        }
        let (first, count, is_inside) = if self.search_from < self.written_clusters {
            let most = self.preallocation_clusters(MAX_ZEROED_PREALLOCATION_BYTES);
            let end = (self.search_from + most).min(self.written_clusters);
            let free = (self.search_from..end).take_while(|nth| self.refcount(*nth) == 0);
            (self.search_from, free.count() as u64, true)
        } else {
            let most = self.preallocation_clusters(MAX_PREALLOCATED_BYTES);
            let most = most.min(self.appendable_clusters(out.file, most)).max(1);
            (self.extend_file(out.file, most)?, most, false)
        };
        for nth in first..first + count {
            self.set_refcount_dirty(nth, 1);
        }
        // Appended clusters are a hole but for the last sector.
        let zeroed = if is_inside { count * cluster } else { self.sector_bytes };
        let zeros = ((first + count) * cluster - zeroed, vec![0; zeroed as usize]);
        let ticket = self.submit_changes(out, vec![zeros])?;
        self.preallocated.push_back(PreallocatedClusters { first, count, ticket });
        Ok(())
    }

    /// Appends `count` clusters and returns the first.
    fn extend_file(&mut self, file: &ImageFile, count: u64) -> Result<u64, Error> {
        let first = self.file_end();
        let end = first + count;
        if end > self.max_clusters(file) {
            return Err(no_space(first << self.cluster_bits));
        }
        self.refcounts.resize(end as usize, 0);
        Ok(first)
    }

    /// Returns the first of `count` adjacent clusters for refcount structures, which are written as
    /// a whole: appended, or free ones if the file cannot grow.
    fn find_contiguous(&mut self, file: &ImageFile, count: u64) -> Result<u64, Error> {
        let behind = self.extend_file(file, count);
        if behind.is_ok() {
            return behind;
        }
        let mut free = 0;
        for nth in self.search_from..self.written_clusters {
            free = if self.refcount(nth) == 0 { free + 1 } else { 0 };
            if free == count {
                return Ok(nth + 1 - count);
            }
        }
        behind
    }

    /// Returns how many clusters can be appended, after the refcount structures for `most` of them.
    fn appendable_clusters(&self, file: &ImageFile, most: u64) -> u64 {
        let end = self.file_end() + most;
        let table = (end / self.refcounts_per_block() + 2).max(self.table.len() as u64) * 2;
        let table = table * 8 / (1 << self.cluster_bits) + 1;
        let is_moved = end / self.refcounts_per_block() + 1 >= self.table.len() as u64;
        let table = if is_moved { table } else { 0 };
        let blocks = (most + table) / self.refcounts_per_block() + 2;
        self.max_clusters(file).saturating_sub(self.file_end() + blocks + table)
    }

    /// Returns the maximum number of clusters of the file.
    fn max_clusters(&self, file: &ImageFile) -> u64 {
        MAX_CLUSTERS.min(file.max_len_bytes() >> self.cluster_bits)
    }

    fn file_end(&self) -> u64 {
        (self.refcounts.len() as u64).max(self.written_clusters)
    }

    fn set_refcount_dirty(&mut self, nth: u64, count: u16) {
        self.set_refcount(nth, count);
        self.changed.insert(self.refcount_sector_of(nth));
    }

    /// Begins a session if none is open, and submits the changed refcounts together with `more`.
    /// Returns the ticket of the last group.
    fn submit_changes(
        &mut self,
        out: &mut MetadataWriter<'_>,
        more: Vec<(u64, Vec<u8>)>,
    ) -> Result<Ticket, Error> {
        let mut chain = vec![];
        if !self.in_session {
            self.in_session = true;
            if self.version == 3 {
                let features = be64(&self.header, 72) | INCOMPAT_DIRTY;
                self.set_header_field(72, &features.to_be_bytes());
                chain.push(vec![(0, self.header.clone())]);
            }
        }
        let mut leads = vec![];
        let is_new = self.allocate_blocks(out.file, &mut leads)?;
        let per_block = self.sectors_per_block();
        let mut writes = more;
        for sector in std::mem::take(&mut self.changed) {
            let (block, place) = (sector / per_block, sector % per_block);
            let at = self.table.get(block as usize).copied().unwrap_or(0);
            if !is_new.contains(&block) {
                writes.push((
                    at + place * self.sector_bytes,
                    self.encode_refcount_sectors(sector, 1),
                ));
            }
        }
        for block in is_new {
            let at = self.table.get(block as usize).copied().unwrap_or(0);
            writes.push((at, self.encode_refcount_sectors(block * per_block, per_block)));
        }
        let (tables, last): (Vec<_>, Vec<_>) =
            leads.into_iter().partition(|(_, _, is_last)| !is_last);
        writes.extend(tables.into_iter().map(|(at, bytes, _)| (at, bytes)));
        chain.push(writes);
        if !last.is_empty() {
            chain.push(last.into_iter().map(|(at, bytes, _)| (at, bytes)).collect());
        }
        out.submit_chain(chain)
    }

    /// Allocates missing refcount blocks for changed refcounts, and returns them. Adds the writes
    /// of the table and header to `leads`: `true` for those that publish the blocks.
    fn allocate_blocks(
        &mut self,
        file: &ImageFile,
        leads: &mut Vec<(u64, Vec<u8>, bool)>,
    ) -> Result<BTreeSet<u64>, Error> {
        let mut is_new = BTreeSet::new();
        let mut entries = BTreeSet::new();
        let mut moved = false;
        // A new block needs a refcount itself, sometimes in another new block.
        loop {
            let per_block = self.sectors_per_block();
            let block = |sector: &u64| sector / per_block;
            let at = |block: u64| self.table.get(block as usize).copied().unwrap_or(0);
            let missing = self.changed.iter().map(block).find(|block| at(*block) == 0);
            let Some(missing) = missing else { break };
            if missing >= self.table.len() as u64 {
                self.move_refcount_table(file, missing)?;
                moved = true;
                continue;
            }
            let nth = self.find_contiguous(file, 1)?;
            self.set_refcount_dirty(nth, 1);
            if let Some(entry) = self.table.get_mut(missing as usize) {
                *entry = nth << self.cluster_bits;
            }
            is_new.insert(missing);
            entries.insert(missing * 8 / self.sector_bytes);
        }
        let bytes: Vec<u8> = self.table.iter().copied().flat_map(u64::to_be_bytes).collect();
        if moved {
            leads.push((self.table_at, bytes, false));
            leads.push((0, self.header_with_table().to_vec(), true));
            return Ok(is_new);
        }
        leads.extend(
            self.encode_table_sectors(&entries).into_iter().map(|(at, bytes)| (at, bytes, true)),
        );
        Ok(is_new)
    }

    /// Returns the header with offset and length of the refcount table.
    fn header_with_table(&mut self) -> &[u8] {
        let clusters = ((self.table.len() as u64 * 8) >> self.cluster_bits) as u32;
        self.set_header_field(48, &self.table_at.to_be_bytes());
        self.set_header_field(56, &clusters.to_be_bytes());
        &self.header
    }

    /// Returns offsets and contents of sectors of the refcount table.
    fn encode_table_sectors(&self, sectors: &BTreeSet<u64>) -> Vec<(u64, Vec<u8>)> {
        let per_sector = self.sector_bytes as usize / 8;
        let sector = |nth: &u64| {
            let entries = self.table.iter().skip(*nth as usize * per_sector).take(per_sector);
            let bytes = entries.copied().flat_map(u64::to_be_bytes).collect();
            (self.table_at + nth * self.sector_bytes, bytes)
        };
        sectors.iter().map(sector).collect()
    }

    /// Moves the refcount table to where it has space for entry `nth`.
    fn move_refcount_table(&mut self, file: &ImageFile, nth: u64) -> Result<(), Error> {
        let per_cluster = 1u64 << (self.cluster_bits - 3);
        let clusters = (nth + 1).max(self.table.len() as u64 * 2).div_ceil(per_cluster);
        if clusters << self.cluster_bits > MAX_REFCOUNT_TABLE_BYTES {
            return Err(no_space(self.file_end() << self.cluster_bits));
        }
        let first = self.find_contiguous(file, clusters)?;
        for nth in first..first + clusters {
            self.set_refcount_dirty(nth, 1);
        }
        self.release_clusters(self.table_at, self.table.len() as u64 * 8);
        self.table.resize((clusters * per_cluster) as usize, 0);
        self.table_at = first << self.cluster_bits;
        Ok(())
    }

    /// Ends the session.
    pub(super) fn close_session(&mut self, out: &mut MetadataWriter<'_>) -> Result<(), Error> {
        if !self.in_session {
            return Ok(());
        }
        for nth in std::mem::take(&mut self.released) {
            self.set_refcount_dirty(nth, self.refcount(nth).saturating_sub(1));
        }
        while let Some(PreallocatedClusters { first, count, .. }) = self.preallocated.pop_back() {
            for nth in first..first + count {
                self.set_refcount_dirty(nth, 0);
            }
            // They stay holes at the end of the file, which may be overwritten without zeroing.
            if first >= self.written_clusters && first + count == self.refcounts.len() as u64 {
                self.refcounts.truncate(first as usize);
            }
        }
        // Clusters written in this session are zeroed before they are reused.
        self.written_clusters = self.file_end();
        self.search_from = 0;
        self.submit_changes(out, vec![])?;
        out.wait()?;
        self.in_session = false;
        if self.version == 3 {
            let features = be64(&self.header, 72) & !INCOMPAT_DIRTY;
            self.set_header_field(72, &features.to_be_bytes());
            out.submit_chain(vec![vec![(0, self.header.clone())]])?;
        }
        Ok(())
    }

    fn set_header_field(&mut self, at: usize, bytes: &[u8]) {
        if let Some(room) = self.header.get_mut(at..at + bytes.len()) {
            room.copy_from_slice(bytes);
        }
    }

    /// Returns the number of refcounts in a block.
    fn refcounts_per_block(&self) -> u64 {
        (8 << self.cluster_bits) >> self.refcount_order
    }

    fn sectors_per_block(&self) -> u64 {
        (1 << self.cluster_bits) / self.sector_bytes
    }

    /// Returns the refcount sector of a cluster.
    fn refcount_sector_of(&self, nth: u64) -> u64 {
        nth / ((self.sector_bytes * 8) >> self.refcount_order)
    }

    /// Returns refcount `nth` of a block.
    fn decode_refcount(&self, block: &[u8], nth: u64) -> u64 {
        let bits = 1u64 << self.refcount_order;
        if bits < 8 {
            let byte = block.get((nth * bits / 8) as usize).copied().unwrap_or(0);
            return u64::from(byte) >> (nth * bits % 8) & ((1 << bits) - 1);
        }
        let bytes = (bits / 8) as usize;
        let at = nth as usize * bytes;
        let field = block.get(at..at + bytes).unwrap_or_default();
        field.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    /// Encodes refcount sectors.
    fn encode_refcount_sectors(&self, sector: u64, sectors: u64) -> Vec<u8> {
        let bits = 1u64 << self.refcount_order;
        let mut bytes = vec![0u8; (sectors * self.sector_bytes) as usize];
        let first = sector * self.sector_bytes * 8 / bits;
        for nth in 0..sectors * self.sector_bytes * 8 / bits {
            // A narrow refcount saturates.
            let count = u64::from(self.refcount(first + nth)).min(u64::MAX >> (64 - bits));
            if bits < 8 {
                if let Some(byte) = bytes.get_mut((nth * bits / 8) as usize) {
                    *byte |= (count << (nth * bits % 8)) as u8;
                }
                continue;
            }
            let len = (bits / 8) as usize;
            let at = nth as usize * len;
            if let Some(field) = bytes.get_mut(at..at + len) {
                let all = count.to_be_bytes();
                field.copy_from_slice(all.get(8 - len..).unwrap_or_default());
            }
        }
        bytes
    }
}
fn no_space(at: u64) -> Error {
    DiskError::no_space(Extent::new(at, 0)).into()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use draconis_device::{ForwardingDisk, MemoryDisk, Ticket};

    use super::*;

    /// A disk that can grow to so many bytes.
    struct LimitedDisk(MemoryDisk, u64);

    impl ForwardingDisk for LimitedDisk {
        type Inner = MemoryDisk;

        fn inner_disk(&self) -> &MemoryDisk {
            &self.0
        }

        fn max_len_bytes(&self) -> u64 {
            self.1
        }
    }

    fn refcounts_of(
        cluster_bits: u32,
        refcount_order: u32,
        table: Vec<u64>,
        refcounts: Vec<u16>,
        written_clusters: u64,
    ) -> Refcounts {
        Refcounts {
            cluster_bits,
            refcount_order,
            version: 3,
            sector_bytes: 512,
            header: vec![],
            table_at: 1 << cluster_bits,
            table,
            refcounts,
            changed: BTreeSet::new(),
            written_clusters,
            search_from: 0,
            preallocated: VecDeque::new(),
            new_clusters: vec![],
            released: vec![],
            in_session: false,
        }
    }

    /// A block of several sectors that moves has its own counts, and the table names it.
    #[test]
    fn moved_refcount_block_keeps_its_counts() {
        // Blocks of 2,048 counts; cluster 5,000 has the second one, and moves to cluster 7.
        let counts: Vec<u16> = (0..6144).map(|nth| nth / 100 + 1).collect();
        let mut table = vec![0; 512];
        table[..3].copy_from_slice(&[2 << 12, 5000 << 12, 3 << 12]);
        let mut refcounts = refcounts_of(12, 4, table, counts.clone(), 6144);
        let file = ImageFile::new(Arc::new(MemoryDisk::new(vec![0; 64 << 10], 512)));
        let mut newest = Ticket(0);
        let mut out = MetadataWriter::new(&file, &mut newest);
        let mut reserved = VecDeque::from([7]);
        refcounts.move_refcount_blocks(&mut out, 4000, &mut reserved).unwrap();
        let written = file.read_vec(7 << 12, 4096).unwrap();
        let expected = counts[2048..4096].iter().flat_map(|it| it.to_be_bytes());
        assert!(written.iter().copied().eq(expected));
        let entries = file.read_vec(1 << 12, 24).unwrap();
        let expected = [2u64 << 12, 7 << 12, 3 << 12].into_iter().flat_map(u64::to_be_bytes);
        assert!(entries.iter().copied().eq(expected));
        assert_eq!((refcounts.released.len(), reserved.len()), (1, 0));
    }

    /// What is appended leaves space for what counts it. Blocks and table clusters have 64 entries.
    #[test]
    fn appended_clusters_leave_space_for_their_refcounts() {
        const ENTRIES: u64 = 8192;
        for (before_end, most, free) in [0, 10, 101, 165, 500, 3000]
            .into_iter()
            .flat_map(|before_end| [1, 100, 164, 3000].map(|most| (before_end, most)))
            .flat_map(|(before_end, most)| {
                (0..4000).step_by(5).map(move |free| (before_end, most, free))
            })
        {
            let end = ENTRIES * 64 - before_end;
            let file = LimitedDisk(MemoryDisk::new(vec![0; 512], 512), (end + free) * 512);
            let file = ImageFile::new(Arc::new(file)).with_growth();
            let refcounts = refcounts_of(9, 6, vec![1; ENTRIES as usize], vec![], end);
            let count = refcounts.appendable_clusters(&file, most).min(most);
            let mut all = end + count;
            loop {
                let blocks = all.div_ceil(64);
                let table = if blocks > ENTRIES { blocks.max(ENTRIES * 2).div_ceil(64) } else { 0 };
                let needed = end + count + blocks - end.div_ceil(64) + table;
                if needed == all {
                    break;
                }
                all = needed;
            }
            let what = format!("{before_end} {most} {free}: {count}");
            assert!(count == 0 || all <= end + free, "{what}");
            // All that fits is used but for a few clusters, and a table of twice the entries.
            let spare = most / 64 + 8 + if most + 64 >= before_end { 300 } else { 0 };
            assert!(count == most || count + spare >= free, "{what}");
        }
    }
}
