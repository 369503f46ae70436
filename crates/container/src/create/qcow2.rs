//! The tables of a new qcow2 image, after `docs/interop/qcow2.rst` of QEMU.
//!
//! ```text
//!   | header | data clusters .. | L2 tables .. | L1 table | refcount blocks .. | refcount table |
//! ```

use super::{FileWrite, UnitOffsets};

pub(super) const CLUSTER_BYTES: u64 = 64 << 10;
/// Maximum disk length: L1 tables of QEMU have at most 32 MiB.
pub(super) const MAX_DISK_BYTES: u64 = (4 << 20) * ENTRIES_PER_CLUSTER * CLUSTER_BYTES;

const CLUSTER_BITS: u32 = 16;
/// Entries of a table of one cluster.
const ENTRIES_PER_CLUSTER: u64 = CLUSTER_BYTES / 8;
/// Number of 16-bit refcounts in a cluster.
const REFCOUNTS_PER_CLUSTER: u64 = CLUSTER_BYTES / 2;
const REFCOUNT_ORDER: u32 = 4;
const HEADER_BYTES: u32 = 104;
/// L1 and L2 flag: the refcount of the cluster is 1.
const OFLAG_COPIED: u64 = 1 << 63;

/// Returns the tables, the header, and the end of the file.
pub(super) fn build_tables(
    places: &UnitOffsets,
    len_bytes: u64,
) -> (Vec<FileWrite>, Vec<FileWrite>, u64) {
    let mut pieces: Vec<FileWrite> = vec![];
    let mut end = places.end;
    let mut first: Vec<u64> = vec![];
    let tables = len_bytes.div_ceil(CLUSTER_BYTES).div_ceil(ENTRIES_PER_CLUSTER);
    for from in (0..tables).map(|nth| nth * ENTRIES_PER_CLUSTER) {
        let units = from..from + ENTRIES_PER_CLUSTER;
        if places.units.range(units.clone()).next().is_none() {
            first.push(0);
            continue;
        }
        let entry = |nth: u64| places.units.get(&nth).map_or(0, |place| place | OFLAG_COPIED);
        first.push(end | OFLAG_COPIED);
        pieces.push((end, encode_table_clusters(units.map(entry))));
        end += CLUSTER_BYTES;
    }
    let first_at = end;
    let entries = first.len() as u64;
    let bytes = encode_table_clusters(first.into_iter());
    end += bytes.len() as u64;
    pieces.push((first_at, bytes));

    // Refcounts of all clusters, those of the refcount blocks among them.
    let counts_at = end;
    let (mut blocks, mut of_table) = (1, 1);
    loop {
        let all = counts_at / CLUSTER_BYTES + blocks + of_table;
        let needed = (
            all.div_ceil(REFCOUNTS_PER_CLUSTER),
            all.div_ceil(REFCOUNTS_PER_CLUSTER).div_ceil(ENTRIES_PER_CLUSTER),
        );
        if needed == (blocks, of_table) {
            break;
        }
        // Neither shrinks: each adds clusters to count.
        (blocks, of_table) = (needed.0.max(blocks), needed.1.max(of_table));
    }
    let table_at = counts_at + blocks * CLUSTER_BYTES;
    end = table_at + of_table * CLUSTER_BYTES;
    let mut counts: Vec<u8> = (0..end / CLUSTER_BYTES).flat_map(|_| 1u16.to_be_bytes()).collect();
    counts.resize((blocks * CLUSTER_BYTES) as usize, 0);
    pieces.push((counts_at, counts));
    let of_blocks = (0..blocks).map(|nth| counts_at + nth * CLUSTER_BYTES);
    let mut bytes = encode_table_clusters(of_blocks);
    bytes.resize((of_table * CLUSTER_BYTES) as usize, 0);
    pieces.push((table_at, bytes));

    let mut head = vec![];
    let mut word = |value: u32| head.extend(value.to_be_bytes());
    let long = |value: u64| [(value >> 32) as u32, value as u32];
    let fields = [[0x5146_49FB, 3], [0, 0], [0, CLUSTER_BITS], long(len_bytes)];
    fields.into_iter().flatten().for_each(&mut word);
    // Not encrypted.
    [0, entries as u32].into_iter().for_each(&mut word);
    [long(first_at), long(table_at)].into_iter().flatten().for_each(&mut word);
    // No snapshots, no features.
    [of_table as u32, 0, 0, 0].into_iter().for_each(&mut word);
    [0; 6].into_iter().for_each(&mut word);
    [REFCOUNT_ORDER, HEADER_BYTES].into_iter().for_each(&mut word);
    head.resize(CLUSTER_BYTES as usize, 0);
    (pieces, vec![(0, head)], end)
}

/// Encodes the entries of a table, padded to whole clusters.
fn encode_table_clusters(entries: impl Iterator<Item = u64>) -> Vec<u8> {
    let mut bytes: Vec<u8> = entries.flat_map(u64::to_be_bytes).collect();
    bytes.resize((bytes.len() as u64).next_multiple_of(CLUSTER_BYTES) as usize, 0);
    bytes
}
