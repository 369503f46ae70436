//! Extent trees: sorted extents with the root in the inode.
//!
//! ```text
//!   | magic entries max depth generation | entry .. entry | free | checksum (not in the inode) |
//!   depth 0: entry = file block, length, disk block   depth > 0: entry = file block, node below
//! ```
//! (`Documentation/filesystems/ext4/ifork.rst`.) Law: the entries of an [`ExtentNode`] are sorted,
//! do not overlap, and are no more than its bytes hold.

use super::checksum::Checksum;
use super::{le16, le32, put16, put32};
use crate::{Error, FsBlock, Result};

/// Magic number of every node.
pub const MAGIC: u16 = 0xF30A;
/// Bytes of the header of a node, and of each entry.
pub const ENTRY_BYTES: usize = 12;
/// Maximum of levels below the root.
pub const MAX_DEPTH: u16 = 5;
/// Maximum of blocks in a written extent; larger stored lengths mean unwritten extents.
pub const INIT_MAX_LEN: u32 = 1 << 15;
/// Entries of a root in the inode.
pub const ROOT_ENTRIES: u16 = 4;

/// A contiguous run of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// First block in the file.
    pub from: u32,
    /// Number of blocks: 1 to [`INIT_MAX_LEN`], one less if unwritten.
    pub blocks: u32,
    /// First block on the volume.
    pub start: FsBlock,
    /// True if the blocks are allocated and read as zeros.
    pub is_unwritten: bool,
}

impl Extent {
    /// Returns the file block after the extent.
    pub fn end(&self) -> u64 {
        u64::from(self.from).saturating_add(self.blocks.into())
    }

    /// Decodes an entry of a leaf.
    pub fn decode(entry: &[u8; ENTRY_BYTES]) -> Option<Self> {
        let raw = u32::from(le16(entry, 4)?);
        let is_unwritten = raw > INIT_MAX_LEN;
        Some(Self {
            from: le32(entry, 0)?,
            blocks: if is_unwritten { raw.saturating_sub(INIT_MAX_LEN) } else { raw },
            start: FsBlock(u64::from(le32(entry, 8)?) | u64::from(le16(entry, 6)?) << 32),
            is_unwritten,
        })
    }

    /// Encodes an entry of a leaf.
    pub fn encode(&self) -> [u8; ENTRY_BYTES] {
        let flag = if self.is_unwritten { INIT_MAX_LEN } else { 0 };
        let [len_a, len_b, ..] = self.blocks.saturating_add(flag).to_le_bytes();
        let [a, b, c, d] = self.from.to_le_bytes();
        let [e, f, g, h, i, j, ..] = self.start.0.to_le_bytes();
        [a, b, c, d, len_a, len_b, i, j, e, f, g, h]
    }
}

/// Returns the first file block of an entry of either kind; 0 without an entry.
pub fn first_file_block(entry: Option<&[u8; ENTRY_BYTES]>) -> u32 {
    entry.and_then(|entry| le32(entry, 0)).unwrap_or(0)
}

/// An index entry, which points to a child node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExtentIndex {
    /// First file block below.
    pub from: u32,
    /// Block of the child node.
    pub node: FsBlock,
}

impl ExtentIndex {
    /// Encodes an index entry.
    pub fn encode(&self) -> [u8; ENTRY_BYTES] {
        let [a, b, c, d] = self.from.to_le_bytes();
        let [e, f, g, h, i, j, ..] = self.node.0.to_le_bytes();
        [a, b, c, d, e, f, g, h, i, j, 0, 0]
    }
}

/// A node of the tree that is valid by itself.
#[derive(Clone, Copy, Debug)]
pub struct ExtentNode<'a> {
    /// Levels below the node.
    pub depth: u16,
    /// Capacity in entries.
    pub max_entries: u16,
    entries: &'a [[u8; ENTRY_BYTES]],
}

impl<'a> ExtentNode<'a> {
    /// Checks the node in `bytes`, which must be `depth` levels above the leaves; a root may have
    /// any depth.
    ///
    /// # Errors
    /// [`Error::Corrupt`] naming the invalid field.
    pub fn check(bytes: &'a [u8], depth: Option<u16>) -> Result<Self> {
        let corrupt = |what| Error::corrupt(what);
        let head = (le16(bytes, 0), le16(bytes, 2), le16(bytes, 4), le16(bytes, 6));
        let (Some(MAGIC), Some(count), Some(room), Some(own_depth)) = head else {
            return Err(corrupt("extent tree: magic number"));
        };
        if depth.is_some_and(|depth| depth != own_depth) || own_depth > MAX_DEPTH {
            return Err(corrupt("extent tree: depth"));
        }
        let (all, _) = bytes.get(ENTRY_BYTES..).unwrap_or_default().as_chunks();
        if usize::from(room) > all.len() || room == 0 {
            return Err(corrupt("extent tree: room"));
        }
        let entries = all.get(..usize::from(count)).filter(|_| count <= room);
        let node = Self {
            depth: own_depth,
            max_entries: room,
            entries: entries.ok_or(corrupt("extent tree: count"))?,
        };
        if count == 0 && own_depth > 0 {
            return Err(corrupt("extent tree: node without entries"));
        }
        node.is_sorted().then_some(node).ok_or(corrupt("extent tree: order"))
    }

    fn is_sorted(&self) -> bool {
        if self.depth == 0 {
            let mut end = 0;
            return self.extents().all(|extent| {
                let follows = u64::from(extent.from) >= end && extent.blocks > 0;
                end = extent.end();
                follows && end <= 1 << 32
            });
        }
        let firsts = || (0..self.len()).filter_map(|nth| self.index(nth)).map(|index| index.from);
        firsts().zip(firsts().skip(1)).all(|(a, b)| a < b)
    }

    /// Returns the raw entries.
    pub fn entries(&self) -> &'a [[u8; ENTRY_BYTES]] {
        self.entries
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns extent `nth` of a leaf.
    pub fn extent(&self, nth: usize) -> Option<Extent> {
        Extent::decode(self.entries.get(nth)?)
    }

    /// Iterates over all extents of a leaf.
    pub fn extents(&self) -> impl Iterator<Item = Extent> + use<'a> {
        let node = *self;
        (0..node.len()).filter_map(move |nth| node.extent(nth))
    }

    /// Returns entry `nth` of an index node.
    pub fn index(&self, nth: usize) -> Option<ExtentIndex> {
        let entry = self.entries.get(nth)?;
        let node = u64::from(le32(entry, 4)?) | u64::from(le16(entry, 8)?) << 32;
        Some(ExtentIndex { from: le32(entry, 0)?, node: FsBlock(node) })
    }

    /// Returns the last entry that begins at or before file block `at`; the first entry also covers
    /// all blocks before it.
    pub fn find(&self, at: u32) -> usize {
        let after = self.entries.partition_point(|entry| le32(entry, 0).is_some_and(|it| it <= at));
        after.saturating_sub(1)
    }
}

/// Returns the offset of the checksum in a node's block: behind the capacity of entries.
fn checksum_at(block: &[u8]) -> Option<usize> {
    usize::from(le16(block, 4)?).checked_add(1)?.checked_mul(ENTRY_BYTES)
}

/// Returns true if the checksum of a node in a block is valid; `seed` is that of its inode.
pub fn has_valid_checksum(block: &[u8], seed: Checksum) -> bool {
    checksum_at(block).is_some_and(|at| {
        let sum = block.get(..at).map(|bytes| seed.update(bytes).value());
        sum.is_some() && le32(block, at) == sum
    })
}

/// Sets the checksum of a node in a block.
pub fn set_checksum(block: &mut [u8], seed: Checksum) {
    if let Some(at) = checksum_at(block)
        && let Some(bytes) = block.get(..at)
    {
        let sum = seed.update(bytes).value();
        let _ = put32(block, at, sum);
    }
}

/// Returns the capacity of a node in a block of its own; the rest holds the checksum.
pub fn max_entries_in_block(block_bytes: u32) -> u16 {
    let room = (crate::units::saturating_usize(block_bytes.into()) / ENTRY_BYTES).saturating_sub(1);
    u16::try_from(room).unwrap_or(u16::MAX)
}

/// Writes a node: its header, and the entries that fit.
pub fn write_node(bytes: &mut [u8], depth: u16, room: u16, entries: &[[u8; ENTRY_BYTES]]) {
    let count = u16::try_from(entries.len()).unwrap_or(u16::MAX).min(room);
    for (at, field) in [(0, MAGIC), (2, count), (4, room), (6, depth)] {
        let _ = put16(bytes, at, field);
    }
    let (all, _) = bytes.get_mut(ENTRY_BYTES..).unwrap_or_default().as_chunks_mut();
    all.iter_mut().zip(entries).for_each(|(to, from)| *to = *from);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode_leaf(extents: &[Extent]) -> Vec<u8> {
        let mut bytes = vec![0; 60];
        let entries: Vec<_> = extents.iter().map(Extent::encode).collect();
        write_node(&mut bytes, 0, ROOT_ENTRIES, &entries);
        bytes
    }

    fn extent(from: u32, blocks: u32, start: u64) -> Extent {
        Extent { from, blocks, start: FsBlock(start), is_unwritten: false }
    }

    #[test]
    fn written_nodes_are_read_back() {
        let unwritten = Extent { is_unwritten: true, ..extent(50_000, 32_767, 7) };
        let all = [extent(0, 1 << 15, 0xABCD_1234_5678), unwritten];
        let bytes = encode_leaf(&all);
        let node = ExtentNode::check(&bytes, Some(0)).unwrap();
        assert_eq!(node.extents().collect::<Vec<_>>(), all);
        assert_eq!((node.find(0), node.find(49_999), node.find(u32::MAX)), (0, 0, 1));
        let index = ExtentIndex { from: 9, node: FsBlock(0xABCD_1234_5678) };
        let mut bytes = vec![0; 60];
        write_node(&mut bytes, 1, ROOT_ENTRIES, &[index.encode()]);
        assert_eq!(ExtentNode::check(&bytes, None).unwrap().index(0), Some(index));
    }

    #[test]
    fn invalid_nodes_are_refused() {
        let bad = [
            encode_leaf(&[extent(5, 2, 9), extent(6, 1, 20)]),
            encode_leaf(&[extent(5, 0, 9)]),
            encode_leaf(&[extent(u32::MAX, 2, 9)]),
        ];
        for bytes in bad {
            assert!(ExtentNode::check(&bytes, None).is_err());
        }
        let good = encode_leaf(&[extent(5, 2, 9)]);
        assert!(ExtentNode::check(&good, Some(1)).is_err());
        for (at, value) in [(0, 0), (2, 5), (4, 5), (6, 6), (6, 1)] {
            let mut bytes = good.clone();
            bytes[at] = value;
            let refused = ExtentNode::check(&bytes, None).is_err();
            assert_eq!(refused, (at, value) != (6, 1), "{at} {value}");
        }
    }

    #[test]
    fn changed_block_fails_checksum() {
        let mut block = vec![7; 1024];
        write_node(&mut block, 0, max_entries_in_block(1024), &[extent(0, 1, 9).encode()]);
        let seed = Checksum::seeded(3);
        set_checksum(&mut block, seed);
        assert!(
            has_valid_checksum(&block, seed) && !has_valid_checksum(&block, Checksum::seeded(4))
        );
        block[40] ^= 1;
        assert!(!has_valid_checksum(&block, seed));
    }
}
