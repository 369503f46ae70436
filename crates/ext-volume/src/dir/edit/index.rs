//! In-place changes of hash-tree index blocks.
//!
//! ```text
//!   add_level     root | a b c ..          ──▶  root | n         node n | a b c ..
//!   split_node    node | a b c d           ──▶  node | a b       node   | c d
//!   make_indexed  block | . .. name name   ──▶  root | . .. | 1  leaf 1 | name name
//! ```
//! Law 1: each of these operations changes an old block in its first sector only, so a power cut
//! leaves the old block or the new one. [`insert`] is the exception: it moves entries. A tear then
//! costs the index, which checkers drop without a question, and no name.
//! Law 2: the stored `dx_limit` is kept, and trusted only if it fits the block.

use zerocopy::FromBytes;

use super::{RawRecord, collect_records, pack_records, set_rec_len};
use crate::format::dirent::{DirBlockFormat, RawDirent, min_rec_len};
use crate::format::htree::{
    BLOCK_MASK, DxEntries, DxEntry, ENTRY_BYTES, NODE_ENTRIES_AT, ROOT_ENTRIES_AT, ROOT_INFO_AT,
    RawDxCountLimit, RawDxEntry, RawDxRootInfo, dx_node_limit, dx_root_limit, view_mut,
};
use crate::format::{dir_tail, htree};
use crate::units::saturating_u32;
use crate::{Error, Result};

/// Returns the limit of index levels below the root.
pub(crate) const fn max_levels(large_dir: bool) -> u8 {
    if large_dir { 2 } else { 1 }
}

/// Kind of index block, which decides where its entries begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IndexBlockKind {
    /// The root.
    Root,
    /// An inner node.
    Node,
}

impl IndexBlockKind {
    const fn entries_at(self) -> usize {
        match self {
            Self::Root => ROOT_ENTRIES_AT,
            Self::Node => NODE_ENTRIES_AT,
        }
    }

    /// Returns the maximum of entries; a block with a checksum holds one less.
    fn capacity(self, block_bytes: u32) -> usize {
        let shape = DirBlockFormat { block_bytes, filetype: false, has_checksums: false };
        match self {
            Self::Root => dx_root_limit(shape),
            Self::Node => dx_node_limit(shape),
        }
    }
}

/// The two halves of a split index block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct NodeSplit {
    /// Lower half; it may overwrite the old block.
    pub(crate) low: Vec<u8>,
    /// Upper half.
    pub(crate) high: Vec<u8>,
    /// Hash of the parent's entry for the upper half.
    pub(crate) hash: u32,
    /// Number of entries in the lower half.
    pub(crate) kept: usize,
}

/// Returns the entries of an index block and its limit.
fn parse_index(block: &[u8], level: IndexBlockKind) -> Result<(DxEntries<'_>, usize)> {
    let corrupt = Error::corrupt("hash tree index");
    let entries = block.get(level.entries_at()..).ok_or(corrupt.clone())?;
    let (raw, _) = RawDxCountLimit::ref_from_prefix(entries).map_err(|_| corrupt.clone())?;
    let limit = usize::from(raw.limit.get());
    if limit > level.capacity(saturating_u32(block.len() as u64)) {
        return Err(corrupt);
    }
    Ok((DxEntries::from_entries(entries)?, limit))
}

fn entries(index: DxEntries<'_>) -> Vec<DxEntry> {
    let entry = |nth| Some(DxEntry { hash: index.hash(nth)?, block: index.block(nth)?.0 });
    (0..index.count()).filter_map(entry).collect()
}

/// Returns true if one more entry fits.
///
/// # Errors
/// [`Error::Corrupt`] if limit or count is invalid.
pub(crate) fn has_room(block: &[u8], level: IndexBlockKind) -> Result<bool> {
    let (index, limit) = parse_index(block, level)?;
    Ok(index.count() < limit)
}

/// Inserts `entry` after entry `nth`; returns `false` if the block is full.
///
/// # Errors
/// [`Error::Corrupt`] if limit, count, or the order of hashes is invalid.
pub(crate) fn insert(
    block: &mut [u8],
    level: IndexBlockKind,
    nth: usize,
    entry: DxEntry,
) -> Result<bool> {
    let corrupt = Error::corrupt("hash tree index");
    let (index, limit) = parse_index(block, level)?;
    let len = index.count();
    if len >= limit {
        return Ok(false);
    }
    let place = nth.saturating_add(1);
    // The first entry stores no hash: it covers all lower hashes.
    let above = nth == 0 || index.hash(nth).is_some_and(|hash| hash <= entry.hash);
    let below = place == len || index.hash(place).is_some_and(|hash| entry.hash <= hash);
    if !above || !below || entry.block & !BLOCK_MASK != 0 {
        return Err(corrupt);
    }
    let bytes = |count: usize| level.entries_at().saturating_add(count.saturating_mul(ENTRY_BYTES));
    let (at, end) = (bytes(place), bytes(len));
    let grown = block.get_mut(at..end.saturating_add(ENTRY_BYTES)).ok_or(corrupt.clone())?;
    grown.copy_within(..end.saturating_sub(at), ENTRY_BYTES);
    let new: &mut RawDxEntry = view_mut(grown, 0).ok_or(corrupt.clone())?;
    *new = RawDxEntry { hash: entry.hash.into(), block: entry.block.into() };
    set_count(block, level, len.saturating_add(1)).ok_or(corrupt)?;
    Ok(true)
}

fn set_count(block: &mut [u8], level: IndexBlockKind, count: usize) -> Option<()> {
    let count = u16::try_from(count).ok()?;
    view_mut::<RawDxCountLimit>(block, level.entries_at())?.count.set(count);
    Some(())
}

/// Sets the limit of an index block to what fits before its checksum, or without one; `None` if it is
/// full.
///
/// # Errors
/// [`Error::Corrupt`] if limit or count is invalid.
pub fn fit_to_shape(
    block: &[u8],
    level: IndexBlockKind,
    shape: DirBlockFormat,
) -> Result<Option<Vec<u8>>> {
    let (index, _) = parse_index(block, level)?;
    let room = match level {
        IndexBlockKind::Root => dx_root_limit(shape),
        IndexBlockKind::Node => dx_node_limit(shape),
    };
    if index.count() > room {
        return Ok(None);
    }
    let mut block = block.to_vec();
    let at = level.entries_at();
    let end = at.saturating_add(room.saturating_mul(ENTRY_BYTES));
    if let Some(raw) = view_mut::<RawDxCountLimit>(&mut block, at) {
        raw.limit.set(u16::try_from(room).unwrap_or(u16::MAX));
    }
    block.get_mut(end..).into_iter().for_each(|rest| rest.fill(0));
    Ok(Some(block))
}

/// Splits an index node in the middle.
///
/// # Errors
/// [`Error::Corrupt`] if limit or count is invalid; [`Error::Misuse`] if there are fewer than two
/// entries.
pub(crate) fn split_node(block: &[u8], shape: DirBlockFormat) -> Result<NodeSplit> {
    let (index, _) = parse_index(block, IndexBlockKind::Node)?;
    let all = entries(index);
    let kept = all.len() / 2;
    let go = all.get(kept..).unwrap_or_default();
    let few = Error::Misuse("hash tree index: too few entries to split");
    let (true, Some(first)) = (kept > 0, go.first()) else { return Err(few) };
    let high = htree::encode_node(go, shape).ok_or(few.clone())?;
    let mut low = block.to_vec();
    set_count(&mut low, IndexBlockKind::Node, kept).ok_or(few)?;
    Ok(NodeSplit { low, high, hash: first.hash, kept })
}

/// Adds a level to a hash tree: moves the entries of the root to a new node, directory block
/// `node`. Returns the root and the node.
///
/// # Errors
/// [`Error::NoSpace`] if the tree has `most_levels`; [`Error::Corrupt`] if the root is invalid.
pub(crate) fn add_level(
    root: &[u8],
    node: u32,
    most_levels: u8,
    shape: DirBlockFormat,
) -> Result<(Vec<u8>, Vec<u8>)> {
    let corrupt = Error::corrupt("hash tree root");
    let (index, _) = parse_index(root, IndexBlockKind::Root)?;
    let below = htree::encode_node(&entries(index), shape);
    let mut root = root.to_vec();
    let info: &mut RawDxRootInfo = view_mut(&mut root, ROOT_INFO_AT).ok_or(corrupt.clone())?;
    if info.indirect_levels >= most_levels {
        return Err(Error::NoSpace);
    }
    info.indirect_levels = info.indirect_levels.saturating_add(1);
    let below = below.ok_or(corrupt.clone())?;
    set_count(&mut root, IndexBlockKind::Root, 1).ok_or(corrupt.clone())?;
    let first: &mut RawDxEntry = view_mut(&mut root, ROOT_ENTRIES_AT).ok_or(corrupt)?;
    first.block.set(node & BLOCK_MASK);
    Ok((root, below))
}

/// Converts a one-block directory to a hash tree. Returns a root for the old block, and a leaf with
/// all names but `.` and `..` for directory block `leaf`. The rest of the old block stays unchanged
/// and hidden. `version` is the number of the hash function.
///
/// # Errors
/// [`Error::Corrupt`] if the chain breaks or does not begin with `.` and `..`.
pub(crate) fn make_indexed(
    block: &[u8],
    version: u8,
    leaf: u32,
    shape: DirBlockFormat,
) -> Result<(Vec<u8>, Vec<u8>)> {
    let corrupt = Error::corrupt("directory: no `.` and `..` at its start");
    let own = dir_tail::dirent_area(block, shape.has_checksums);
    let all = collect_records(own)?;
    let [dot, dot_dot, names @ ..] = all.as_slice() else { return Err(corrupt) };
    let is = |record: &RawRecord, name: &[u8]| record.inode != 0 && record.name(own) == name;
    if !is(dot, b".") || !is(dot_dot, b"..") {
        return Err(corrupt);
    }
    let names = shape.with_tail(pack_records(names.iter().copied(), own, own.len()));
    let entry = DxEntry { hash: 0, block: leaf };
    let head = htree::encode_root(
        dot.inode,
        dot_dot.inode,
        version,
        0,
        &[entry],
        DirBlockFormat { filetype: false, ..shape },
    )
    .ok_or(corrupt.clone())?;
    let mut root = block.to_vec();
    let end = ROOT_ENTRIES_AT.saturating_add(ENTRY_BYTES);
    let (Some(into), Some(head)) = (root.get_mut(..end), head.get(..end)) else {
        return Err(corrupt);
    };
    into.copy_from_slice(head);
    // The rest of the block belongs to `..`.
    let after_dot = min_rec_len(1);
    for (record, at) in [(dot, 0), (dot_dot, after_dot)] {
        if let Some(raw) = RawDirent::view_mut(&mut root, at) {
            raw.file_type = record.kind;
        }
    }
    set_rec_len(&mut root, after_dot, block.len().saturating_sub(after_dot));
    Ok((root, names))
}

#[cfg(test)]
mod tests;
