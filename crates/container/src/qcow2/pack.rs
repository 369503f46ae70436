//! Packing of compressed clusters during compaction.
//!
//! ```text
//!   before   | c1 c2 c3 .. c4 | c5 .. .. .. .. | plain, new | plain |     c: compressed clusters
//!   after    | c1 c2 c3 c4 c5 c6 |             |            | plain |     c6: was the new plain one
//! ```
//! Recent clusters, which a mount or an offline change wrote since the image was opened or before a
//! crash, are compressed again, so that a compressed image stays one.
//!
//! Law 1: the refcount of a host cluster is the number of clusters packed into it, in whole or in
//! part, and is durable before an L2 entry refers to it.
//! Law 2: nothing is packed in an image with snapshots, which may share compressed clusters.

use std::collections::VecDeque;

use flate2::{Compression, FlushCompress, Status};

use super::writable::{TableSector, WritableQcow2};
use super::{OFFSET_MASK, OFLAG_COMPRESSED, OFLAG_ZERO};
use crate::Error;
use crate::image_file::ImageFile;
use crate::writable::MetadataWriter;

/// Maximum clusters to pack, in 32 bytes each. Images with more keep their compressed clusters.
const MAX_PACKED_CLUSTERS: usize = 2 << 20;
/// Bytes that are packed before the tables are updated.
const BATCH_BYTES: u64 = 8 << 20;
/// Window of a deflate stream in a qcow2 file (`docs/interop/qcow2.rst`: "a sliding window of 4 KB").
const WINDOW_BYTES: usize = 4096;
const SECTOR_BYTES: u64 = 512;

/// A cluster to pack: compressed, or plain and recent.
#[derive(Clone, Copy)]
pub(super) struct PackedCluster {
    /// Offset in the file, and maximum length there.
    pub(super) at: u64,
    pub(super) len: u64,
    /// L2 table and index of its entry there.
    table: u64,
    index: u32,
}

/// Adjacent host clusters being filled.
struct HostRun {
    at: u64,
    bytes: Vec<u8>,
    /// Number of packed clusters in each host cluster.
    shares: Vec<u16>,
    /// Packed clusters, their offsets in the file and their lengths.
    packed: Vec<(PackedCluster, u64, u64)>,
}

impl HostRun {
    /// Appends `bytes`, or returns false if another host cluster is needed first.
    fn push(&mut self, cluster: PackedCluster, bytes: &[u8], bits: u32, max_shares: u64) -> bool {
        let nth = self.bytes.len() >> bits;
        if self.shares.get(nth).is_some_and(|count| u64::from(*count) >= max_shares) {
            self.bytes.resize((nth + 1) << bits, 0);
        }
        let start = self.bytes.len();
        let touched = start >> bits..(start + bytes.len()).div_ceil(1 << bits);
        let Some(touched) = self.shares.get_mut(touched) else { return false };
        touched.iter_mut().for_each(|count| *count += 1);
        self.bytes.extend(bytes);
        self.packed.push((cluster, self.at + start as u64, bytes.len() as u64));
        true
    }
}

impl WritableQcow2 {
    /// Returns the compressed clusters from `start` of the file on, and the recent ones if
    /// `with_recent`; in file order. None if the image had no
    /// compressed ones when it was opened, or if they cannot be packed.
    pub(super) fn clusters_to_pack(
        &mut self,
        file: &ImageFile,
        start: u64,
        with_recent: bool,
    ) -> Result<Vec<PackedCluster>, Error> {
        let mut clusters = vec![];
        if self.has_snapshots || !self.has_compressed {
            return Ok(clusters);
        }
        for table in 0..self.l1_table.len() as u64 {
            let at = self.l2_table_offset(table);
            if at == 0 {
                continue;
            }
            // Not cached: there may be many.
            let entries = super::read_table(file, at, self.entries_per_l2_table())?;
            for (index, entry) in (0u32..).zip(entries) {
                let (at, len) = if entry & OFLAG_COMPRESSED != 0 {
                    self.map.compressed_extent_in(file, entry)
                } else {
                    match self.exclusive_cluster(entry) {
                        Some(at)
                            if with_recent && entry & OFLAG_ZERO == 0 && self.is_recent(at) =>
                        {
                            (at, self.map.cluster_bytes())
                        }
                        _ => continue,
                    }
                };
                if at.saturating_add(len) > start {
                    clusters.push(PackedCluster { at, len, table, index });
                }
                if clusters.len() > MAX_PACKED_CLUSTERS {
                    return Ok(vec![]);
                }
            }
        }
        clusters.sort_unstable_by_key(|cluster| cluster.at);
        // An entry counts whole sectors; the next cluster may begin in the last one.
        let starts: Vec<u64> = clusters.iter().map(|cluster| cluster.at).collect();
        for (cluster, next) in clusters.iter_mut().zip(starts.get(1..).unwrap_or_default()) {
            if *next > cluster.at {
                cluster.len = cluster.len.min(next - cluster.at);
            }
        }
        Ok(clusters)
    }

    /// Packs all compressed and recent clusters, in sessions of their own.
    pub(super) fn pack_all(&mut self, out: &mut MetadataWriter<'_>) -> Result<(), Error> {
        let mut clusters = VecDeque::from(self.clusters_to_pack(out.file, 0, true)?);
        while !clusters.is_empty() {
            self.refcounts.begin_session(out)?;
            self.pack_batch(out, &mut clusters, None)?;
            self.end_session(out)?;
        }
        Ok(())
    }

    /// Packs clusters from the front of `clusters`: a batch into new host clusters, or as many as
    /// the reserved host clusters `targets` hold. The caller ends the session.
    pub(super) fn pack_batch(
        &mut self,
        out: &mut MetadataWriter<'_>,
        clusters: &mut VecDeque<PackedCluster>,
        mut targets: Option<&mut VecDeque<u64>>,
    ) -> Result<(), Error> {
        let bits = self.map.cluster_bits;
        let max_shares = self.refcounts.max_refcount();
        let (mut runs, mut total): (Vec<HostRun>, u64) = (vec![], 0);
        'fill: while let Some(next) = clusters.front().copied() {
            let contents = self.packed_contents(out.file, next)?;
            while let Some(bytes) = &contents {
                if runs.last_mut().is_some_and(|run| run.push(next, bytes, bits, max_shares)) {
                    break;
                }
                let at = match &mut targets {
                    _ if total >= BATCH_BYTES => break 'fill,
                    None => self.refcounts.allocate_cluster(out)?,
                    Some(targets) => match targets.pop_front() {
                        Some(nth) => nth << bits,
                        None => break 'fill,
                    },
                };
                total += 1 << bits;
                match runs.last_mut() {
                    Some(run) if run.at + ((run.shares.len() as u64) << bits) == at => {
                        run.shares.push(0);
                    }
                    _ => {
                        runs.push(HostRun { at, bytes: vec![], shares: vec![0], packed: vec![] });
                    }
                }
            }
            clusters.pop_front();
        }
        self.publish_runs(out, runs)
    }

    /// Writes host clusters, then their refcounts, then the L2 entries.
    fn publish_runs(
        &mut self,
        out: &mut MetadataWriter<'_>,
        runs: Vec<HostRun>,
    ) -> Result<(), Error> {
        if runs.is_empty() {
            return Ok(());
        }
        let bits = self.map.cluster_bits;
        let shares = runs.iter().flat_map(|run| {
            (0u64..).zip(&run.shares).map(|(nth, count)| (run.at + (nth << bits), *count))
        });
        self.refcounts.set_shares(out, shares)?;
        let (mut writes, mut packed) = (vec![], vec![]);
        for HostRun { at, mut bytes, shares, packed: inside } in runs {
            // Whole host clusters, so that reading whole sectors stays within the file.
            bytes.resize(shares.len() << bits, 0);
            writes.push((at, bytes));
            packed.extend(inside);
        }
        let ticket = out.submit_chain(vec![writes])?;
        out.file.disk().wait_visible(ticket)?;
        out.add_dependency(ticket);
        packed.sort_unstable_by_key(|(cluster, ..)| (cluster.table, cluster.index));
        for (PackedCluster { table, index, .. }, at, len) in packed {
            let new = self.map.compressed_entry(at, len);
            let entries = &mut self.cached_l2_table(out.file, table)?.entries;
            let Some(entry) = entries.get_mut(index as usize) else { continue };
            let old = std::mem::replace(entry, new);
            let sector = u64::from(index) * 8 / self.sector_bytes;
            self.changed_sectors.insert(TableSector::L2Table(table, sector));
            self.release_entry(out.file, old);
        }
        self.write_dirty_tables(out)
    }

    /// Returns the compressed contents of a cluster; `None` if compression does not shorten it.
    fn packed_contents(
        &mut self,
        file: &ImageFile,
        cluster: PackedCluster,
    ) -> Result<Option<Vec<u8>>, Error> {
        let entries = &self.cached_l2_table(file, cluster.table)?.entries;
        let entry = entries.get(cluster.index as usize).copied().unwrap_or(0);
        if entry & OFLAG_COMPRESSED != 0 {
            return Ok(Some(file.read_vec(cluster.at, cluster.len as usize)?));
        }
        let plain = self.read_cluster(file, entry & OFFSET_MASK)?;
        let bytes = match self.map.zstd {
            true => {
                use ruzstd::encoding::{CompressionLevel, compress_to_vec};
                compress_to_vec(&plain[..], CompressionLevel::Fastest)
            }
            false => deflate(&plain),
        };
        Ok((bytes.len() < plain.len()).then_some(bytes))
    }
}

impl super::Qcow2 {
    /// Returns the L2 entry of a compressed cluster of `len` bytes at `at`.
    fn compressed_entry(&self, at: u64, len: u64) -> u64 {
        let sectors = (at % SECTOR_BYTES + len).div_ceil(SECTOR_BYTES) - 1;
        OFLAG_COMPRESSED | sectors << self.compressed_offset_bits() | at
    }
}

/// Compresses `plain` for a window of 4 KiB: the encoder forgets what it saw after each.
fn deflate(plain: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::Compress::new(Compression::default(), false);
    let mut packed = Vec::with_capacity(plain.len() + plain.len() / 8 + 64);
    let last = plain.len().div_ceil(WINDOW_BYTES).saturating_sub(1);
    for (nth, mut window) in plain.chunks(WINDOW_BYTES).enumerate() {
        let flush = if nth == last { FlushCompress::Finish } else { FlushCompress::Full };
        loop {
            packed.reserve(WINDOW_BYTES);
            let (before, room) = (encoder.total_in(), packed.capacity());
            let status = encoder.compress_vec(window, &mut packed, flush);
            let read = (encoder.total_in() - before) as usize;
            window = window.get(read..).unwrap_or_default();
            let is_done = match status {
                Ok(Status::StreamEnd) => true,
                Ok(_) => flush == FlushCompress::Full && packed.len() < room && window.is_empty(),
                // Not shortened, so that it stays plain.
                Err(_) => return plain.to_vec(),
            };
            if is_done {
                break;
            }
        }
    }
    packed
}
