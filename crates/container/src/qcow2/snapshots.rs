//! Internal snapshots of a qcow2 image: L1 tables of earlier states.
//!
//! ```text
//!   header ──▶ | snapshot: offset of its L1 table, its names | snapshot | ..
//!                └─▶ L1 table ──▶ L2 tables, shared with later states until they change
//! ```
//! The refcount of a cluster is the number of L1 tables through which it is reachable, however many
//! L2 tables are on the way.
//!
//! Law: a snapshot is never changed. Its clusters are counted, and a cluster with a refcount above
//! 1 is copied before it is written.

use std::collections::BTreeMap;

use super::refcounts::Refcounts;
use super::{OFFSET_MASK, read_table};
use crate::image_file::{ImageFile, be32, be64};
use crate::{CONVERT_REMEDY, Error, UnsupportedFeature};

/// Maximum snapshots of an image, as in QEMU.
const MAX_SNAPSHOTS: u32 = 65_536;
/// Maximum L1 entries of all snapshots.
const MAX_SNAPSHOT_L1_ENTRIES: u64 = 1 << 20;
/// Length of a snapshot table entry without its names and extra data.
const ENTRY_HEADER_BYTES: u64 = 40;
const MAX_EXTRA_DATA_BYTES: u64 = 1024;

/// Counts the clusters that hold the snapshot table and the snapshots' L1 tables. Returns the L2
/// tables of the snapshots, each with the number of L1 entries that refer to it.
pub(super) fn record_snapshots(
    file: &ImageFile,
    counts: &mut Refcounts,
    head: &[u8],
) -> Result<BTreeMap<u64, u64>, Error> {
    let mut seconds = BTreeMap::new();
    let (count, start) = (be32(head, 60), be64(head, 64));
    if count == 0 {
        return Ok(seconds);
    }
    let too_many =
        || UnsupportedFeature::ReadOnlyFormat("qcow2", "so many snapshots inside", CONVERT_REMEDY);
    if count > MAX_SNAPSHOTS {
        return Err(too_many().into());
    }
    let (mut at, mut entries_left) = (start, MAX_SNAPSHOT_L1_ENTRIES);
    for _ in 0..count {
        let one = file.read_vec(at, ENTRY_HEADER_BYTES as usize)?;
        let (first_at, entries) = (be64(&one, 0), u64::from(be32(&one, 8)));
        let (names, extra) = (be32(&one, 12), u64::from(be32(&one, 36)));
        if extra > MAX_EXTRA_DATA_BYTES {
            return Err(Error::DamagedAt("qcow2: a snapshot that says too much", at));
        }
        entries_left = entries_left.checked_sub(entries).ok_or_else(too_many)?;
        counts.record_exclusive(first_at, entries * 8, false)?;
        for entry in read_table(file, first_at, entries)? {
            if entry & OFFSET_MASK != 0 {
                *seconds.entry(entry & OFFSET_MASK).or_insert(0) += 1;
            }
        }
        let names = u64::from(names >> 16) + u64::from(names & 0xFFFF);
        at = at.saturating_add((ENTRY_HEADER_BYTES + extra + names).next_multiple_of(8));
    }
    counts.record_exclusive(start, at.saturating_sub(start), false)?;
    Ok(seconds)
}
