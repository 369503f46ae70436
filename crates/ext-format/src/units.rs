//! Types of block and inode numbers: adding a file block to a device block does not compile.

use draconis_types::Node;

/// A block of the file system, counted from the start of the volume.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FsBlock(pub u64);

/// A block of a file, counted from the start of the file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FileBlock(pub u32);

/// An inode number, counted from 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct InodeNumber(pub u32);

/// A block group number, counted from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GroupNumber(pub u32);

/// A file, distinguished from earlier ones with the same inode number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FileId {
    /// Inode number.
    pub inode: u32,
    /// Generation of the inode.
    pub generation: u32,
}

impl FsBlock {
    /// Returns the block `count` after this one, saturating.
    #[must_use]
    pub const fn offset(self, count: u64) -> Self {
        Self(self.0.saturating_add(count))
    }
}

impl FileBlock {
    /// Returns the block `count` after this one, saturating.
    #[must_use]
    pub const fn offset(self, count: u32) -> Self {
        Self(self.0.saturating_add(count))
    }
}

impl InodeNumber {
    /// The root directory.
    pub const ROOT: Self = Self(2);

    /// Returns the node of this inode in contracts: its number, except that the root is
    /// [`Node::ROOT`].
    pub const fn node(self) -> Node {
        match self {
            Self::ROOT => Node::ROOT,
            Self(number) => Node(number as u64),
        }
    }

    /// Returns the inode of a contract's `node`, if there can be one. Inode 1, the list of bad
    /// blocks, has no node.
    pub fn from_node(node: Node) -> Option<Self> {
        match node {
            Node::ROOT => Some(Self::ROOT),
            Node(0) => None,
            Node(number) => u32::try_from(number).ok().map(Self),
        }
    }
}

impl std::fmt::Display for FsBlock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::fmt::Display for InodeNumber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Converts a byte count to an index; a larger count becomes `usize::MAX`, which no slice has.
pub fn saturating_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Converts a count to 32 bits, saturating.
pub fn saturating_u32(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_is_node_1_and_bad_blocks_inode_has_no_node() {
        assert_eq!(InodeNumber::ROOT.node(), Node::ROOT);
        assert_eq!(InodeNumber::from_node(Node::ROOT), Some(InodeNumber::ROOT));
        assert_eq!(InodeNumber::from_node(Node(11)), Some(InodeNumber(11)));
        assert_eq!(InodeNumber::from_node(Node(0)), None);
        assert_eq!(InodeNumber::from_node(Node(1 << 32)), None);
    }
}
