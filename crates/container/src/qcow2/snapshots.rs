//! Snapshots inside a qcow2 image: first tables of earlier states.
//!
//! ```text
//!   head ──▶ | snapshot: where its first table is, its names | snapshot | ..
//!                └─▶ first table ──▶ second tables, which later states have, too, until they change
//! ```
//! A cluster is counted once for each first table that leads to it, however many second tables
//! there are on the way.
//!
//! Law: a snapshot is never changed: what it has is counted, and what is counted twice is copied
//! before it is written.

use std::collections::BTreeMap;

use super::refcounts::Refcounts;
use super::{OFFSET, table};
use crate::image_file::{ImageFile, be32, be64};
use crate::{CONVERT, Error, Unsupported};

/// Snapshots of one image, as QEMU has it.
const MAX_SNAPSHOTS: u32 = 65_536;
/// Entries of all their first tables.
const MAX_SNAPSHOT_L1_ENTRIES: u64 = 1 << 20;
/// What one says of itself, without its names.
const HEAD_BYTES: u64 = 40;
/// What it may say besides.
const MAX_EXTRA_DATA_BYTES: u64 = 1024;

/// Notes what snapshots have for themselves; the second tables that they lead to, with how many
/// of them do.
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
    let too_many = || Unsupported::ReadOnlyFormat("qcow2", "so many snapshots inside", CONVERT);
    if count > MAX_SNAPSHOTS {
        return Err(too_many().into());
    }
    let (mut at, mut entries_left) = (start, MAX_SNAPSHOT_L1_ENTRIES);
    for _ in 0..count {
        let one = file.bytes(at, HEAD_BYTES as usize)?;
        let (first_at, entries) = (be64(&one, 0), u64::from(be32(&one, 8)));
        let (names, extra) = (be32(&one, 12), u64::from(be32(&one, 36)));
        if extra > MAX_EXTRA_DATA_BYTES {
            return Err(Error::DamagedAt("qcow2: a snapshot that says too much", at));
        }
        entries_left = entries_left.checked_sub(entries).ok_or_else(too_many)?;
        counts.record_exclusive(first_at, entries * 8, false)?;
        for entry in table(file, first_at, entries)? {
            if entry & OFFSET != 0 {
                *seconds.entry(entry & OFFSET).or_insert(0) += 1;
            }
        }
        let names = u64::from(names >> 16) + u64::from(names & 0xFFFF);
        at = at.saturating_add((HEAD_BYTES + extra + names).next_multiple_of(8));
    }
    counts.record_exclusive(start, at.saturating_sub(start), false)?;
    Ok(seconds)
}
