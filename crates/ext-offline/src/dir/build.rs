//! Construction of directories, bottom-up: entries into blocks, blocks under a hash tree.
//!
//! ```text
//!   small or unindexed   | . .. name name | name name .. | ..
//!   indexed              | root | nodes .. | leaves in the order of their hashes .. |
//! ```
//! Law: if names with one hash exceed the rest of a leaf, they continue in the next leaf, and its
//! index entry has the continuation bit set.

use draconis_types::FileType;

use crate::format::dirent::{DirBlockBuilder, DirBlockFormat, min_rec_len};
use crate::format::hash::NameHash;
use crate::format::htree::{self, DxEntry};
use crate::units::saturating_usize;

/// A new entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewDirent<'a> {
    pub(crate) name: &'a [u8],
    pub(crate) inode: u32,
    pub(crate) kind: FileType,
}

/// Format of a volume's directories.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirectoryFormat {
    pub(crate) shape: DirBlockFormat,
    /// Hash function of larger directories, and its number; `None` without index.
    pub(crate) index: Option<(NameHash, u8)>,
    /// Limit of index levels below the root: 1, or 2 with `large_dir`.
    pub(crate) levels: u8,
}

/// Blocks of a directory.
#[derive(Debug)]
pub(crate) struct BuiltDirectory {
    pub(crate) bytes: Vec<u8>,
    /// True if they are a hash tree.
    pub(crate) indexed: bool,
}

/// Part of a leaf left free, so that the first inserts need no split.
const LEAF_RESERVE_DIVISOR: usize = 8;

/// Builds the directory `own` with parent `parent` and these names.
pub(crate) fn build_directory(
    own: u32,
    parent: u32,
    names: &[NewDirent<'_>],
    style: DirectoryFormat,
) -> BuiltDirectory {
    let dots = [
        NewDirent { name: b".", inode: own, kind: FileType::Directory },
        NewDirent { name: b"..", inode: parent, kind: FileType::Directory },
    ];
    let room = style.shape.dirent_area_bytes();
    let one: usize = dots.iter().chain(names).map(|it| min_rec_len(it.name.len())).sum();
    if one > room
        && let Some((hash, version)) = style.index
        && let Some(bytes) = build_htree(dots, names, hash, version, style)
    {
        return BuiltDirectory { bytes, indexed: true };
    }
    BuiltDirectory { bytes: build_linear(dots.iter().chain(names), style), indexed: false }
}

fn build_linear<'a>(
    names: impl Iterator<Item = &'a NewDirent<'a>>,
    style: DirectoryFormat,
) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut block = DirBlockBuilder::new(style.shape);
    for it in names {
        if !block.push(it.inode, it.kind, it.name) {
            bytes.extend(block.finish());
            block.push(it.inode, it.kind, it.name);
        }
    }
    bytes.extend(block.finish());
    bytes
}

/// Builds a hash-tree directory; `None` if it exceeds the levels of one.
#[allow(clippy::arithmetic_side_effects, reason = "a level has at least one node")]
fn build_htree(
    dots: [NewDirent<'_>; 2],
    names: &[NewDirent<'_>],
    hash: NameHash,
    version: u8,
    style: DirectoryFormat,
) -> Option<Vec<u8>> {
    let (leaves, entries) = build_leaves(names, hash, style);
    let root_room = htree::dx_root_limit(style.shape);
    let node_room = htree::dx_node_limit(style.shape);
    // Nodes per level, highest first. Blocks are numbered in this order: root, levels, leaves.
    let mut counts = vec![];
    let mut tops = entries.len();
    while tops > root_room {
        tops = tops.div_ceil(node_room);
        counts.insert(0, tops);
    }
    let levels = u8::try_from(counts.len()).ok().filter(|levels| *levels <= style.levels)?;
    let nodes: usize = counts.iter().sum();
    let first_leaf = u32::try_from(nodes).ok()?.checked_add(1)?;
    let mut entries: Vec<DxEntry> = entries
        .into_iter()
        .map(|entry| DxEntry { block: entry.block.saturating_add(first_leaf), ..entry })
        .collect();

    let [own, parent] = dots.map(|dot| dot.inode);
    let mut below: Vec<Vec<u8>> = vec![];
    let mut first = first_leaf;
    for count in counts.into_iter().rev() {
        first = first.saturating_sub(u32::try_from(count).ok()?);
        let mut upper = Vec::new();
        let mut written = Vec::new();
        // Nodes of equal size, so that the last is not almost empty.
        let (each, more) = (entries.len() / count, entries.len() % count);
        let mut rest = &entries[..];
        for block in first.. {
            let Some(hash) = rest.first().map(|entry| entry.hash) else { break };
            let nth = saturating_usize(u64::from(block.saturating_sub(first)));
            let (part, later) =
                rest.split_at_checked(each.saturating_add(usize::from(nth < more)))?;
            upper.push(DxEntry { hash, block });
            written.extend(htree::encode_node(part, style.shape)?);
            rest = later;
        }
        entries = upper;
        below.insert(0, written);
    }
    let mut bytes = Vec::with_capacity(leaves.len().saturating_add(
        nodes.saturating_add(1).saturating_mul(saturating_usize(style.shape.block_bytes.into())),
    ));
    bytes.extend(htree::encode_root(own, parent, version, levels, &entries, style.shape)?);
    bytes.extend(below.into_iter().flatten());
    bytes.extend(leaves);
    Some(bytes)
}

/// Builds the leaves in hash order, and an index entry for each; leaves count from 0.
#[allow(clippy::arithmetic_side_effects, reason = "blocks have at least 1,024 bytes")]
fn build_leaves(
    names: &[NewDirent<'_>],
    hash: NameHash,
    style: DirectoryFormat,
) -> (Vec<u8>, Vec<DxEntry>) {
    let mut hashed: Vec<(u32, &NewDirent<'_>)> =
        names.iter().map(|it| (hash.hash_name(it.name), it)).collect();
    hashed.sort_unstable_by(|a, b| (a.0, a.1.name).cmp(&(b.0, b.1.name)));
    let block_bytes = saturating_usize(style.shape.block_bytes.into());
    let full = block_bytes.saturating_sub(block_bytes / LEAF_RESERVE_DIVISOR);
    let mut bytes = Vec::new();
    let mut entries: Vec<DxEntry> = vec![DxEntry { hash: 0, block: 0 }];
    let mut block = DirBlockBuilder::new(style.shape);
    let mut last = None;
    for (hash, it) in hashed {
        let crowded = block.used_bytes().saturating_add(min_rec_len(it.name.len())) > full;
        // Names with one hash stay together while the block has space.
        let split = crowded && last != Some(hash) && !block.is_empty();
        if split || !block.push(it.inode, it.kind, it.name) {
            bytes.extend(block.finish());
            let goes_on = u32::from(last == Some(hash));
            let nth = bytes.len() / block_bytes;
            entries.push(DxEntry {
                hash: hash | goes_on,
                block: crate::units::saturating_u32(nth as u64),
            });
            block.push(it.inode, it.kind, it.name);
        }
        last = Some(hash);
    }
    bytes.extend(block.finish());
    (bytes, entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::hash::HashSeed;
    use crate::format::htree::{DxEntries, DxRoot};

    fn numbered_names(count: u32, len: usize) -> Vec<Vec<u8>> {
        (0..count).map(|nth| format!("{nth:0len$}").into_bytes()).collect()
    }

    fn build_with_one_level(names: &[Vec<u8>]) -> BuiltDirectory {
        build_with_levels(names, 1)
    }

    fn build_with_levels(names: &[Vec<u8>], levels: u8) -> BuiltDirectory {
        let names: Vec<NewDirent<'_>> =
            names.iter().map(|name| NewDirent { name, inode: 12, kind: FileType::File }).collect();
        let hash = NameHash::of_version(1, false, HashSeed::new([1; 4])).unwrap();
        let style = DirectoryFormat {
            shape: DirBlockFormat { block_bytes: 1024, filetype: true, has_checksums: false },
            index: Some((hash, 1)),
            levels,
        };
        build_directory(2, 2, &names, style)
    }

    #[test]
    fn names_filling_one_block_need_no_htree() {
        // `.` and `..` take 24 bytes, each of these names 20.
        let full = numbered_names(50, 12);
        let built = build_with_one_level(&full);
        assert!(!built.indexed && built.bytes.len() == 1024);
        let built = build_with_one_level(&numbered_names(51, 12));
        assert!(built.indexed && built.bytes.len() >= 3 * 1024);
        assert_eq!(build_with_one_level(&[]).bytes.len(), 1024);
    }

    #[test]
    fn htree_levels_grow_up_to_limit() {
        let levels = |built: &BuiltDirectory| {
            let (root, _) =
                DxRoot::check(&built.bytes[..1024], false, HashSeed::new([1; 4])).unwrap();
            root.levels
        };
        // Three names per leaf: a root holds 124 leaves.
        assert_eq!(levels(&build_with_one_level(&numbered_names(3 * 124, 255))), 0);
        let built = build_with_one_level(&numbered_names(3 * 125, 255));
        assert_eq!(levels(&built), 1);
        DxEntries::from_node(&built.bytes[1024..2048]).unwrap();
        assert_eq!(levels(&build_with_one_level(&numbered_names(3 * 124 * 127, 255))), 1);
        let built = build_with_one_level(&numbered_names(3 * 124 * 127 + 1, 255));
        assert!(!built.indexed, "no third level");
        let built = build_with_levels(&numbered_names(3 * 124 * 127 + 1, 255), 2);
        assert_eq!(levels(&built), 2);
        let (root, _) = DxRoot::check(&built.bytes[..1024], false, HashSeed::new([1; 4])).unwrap();
        assert_eq!(root.levels, 2);
        DxEntries::from_node(&built.bytes[1024..2048]).unwrap();
    }
}
