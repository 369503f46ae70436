//! Requirements of a tree before placement: blocks, inodes, and inline contents.

use std::collections::{BTreeSet, HashMap};

use super::super::layout::Layout;
use super::super::tree::{NodeId, NodeKind, Tree};
use super::super::{FormatError, Result, inline_data, values};
use super::clusters::touched_clusters;
use super::{
    NodePlacement, XATTR_REFCOUNT_MAX, build_directory_of, data_runs, directory_format_of,
};
use crate::dir::build::DirectoryFormat;
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::quota::{self, QuotaType as Quota};
use crate::format::xattr::{NewXattr, inode_capacity};
use crate::units::{saturating_u32, saturating_usize};

/// Maximum link count.
const LINK_MAX: u32 = 65_000;

/// Requirements of a tree before placement.
#[derive(Clone)]
pub(super) struct TreeRequirements {
    pub(super) placed: Vec<NodePlacement>,
    pub(super) blocks: u64,
    /// Inodes of system files.
    pub(super) inodes: u32,
    /// Blocks of EA inodes.
    pub(super) value_blocks: u64,
    /// Bytes of the quota files.
    pub(super) quotas: Vec<(Quota, u64)>,
}

impl TreeRequirements {
    /// Returns the blocks of system files.
    pub(super) fn system_file_blocks(&self, layout: &Layout) -> u64 {
        let quotas = self
            .quotas
            .iter()
            .map(|(_, bytes)| layout.blocks_with_map(layout.blocks_for_bytes(*bytes)));
        layout.system_file_blocks().saturating_add(quotas.sum()).saturating_add(self.value_blocks)
    }
}

/// Walks the tree and counts its requirements.
pub(super) fn measure_tree(layout: &Layout, tree: &Tree) -> Result<TreeRequirements> {
    let mut walk = TreeMeasurer {
        layout,
        tree,
        style: directory_format_of(layout),
        lost_found: tree.lookup(NodeId::ROOT, b"lost+found"),
        needs: TreeRequirements {
            placed: vec![],
            blocks: 0,
            inodes: 0,
            value_blocks: 0,
            quotas: vec![],
        },
        node_placement: vec![None; tree.len()],
        shared: HashMap::new(),
        owners: Default::default(),
    };
    walk.add_node(NodeId::ROOT, NodeId::ROOT, 2)?;
    if let Some(id) = walk.lost_found {
        walk.add_node(id, NodeId::ROOT, 2)?;
    }
    walk.needs.inodes = values::system_inodes_before_ea_inodes(&layout.options)
        .saturating_add(saturating_u32(tree.values.len() as u64));
    let lens = tree.values.iter().map(|value| value.bytes.len() as u64);
    walk.needs.value_blocks =
        lens.map(|len| layout.blocks_with_map(layout.blocks_for_bytes(len))).sum();
    let mut stack = vec![(NodeId::ROOT, NodeId::ROOT)];
    while let Some((dir, parent)) = stack.pop() {
        let below = walk.measure_directory(dir, parent)?;
        stack.extend(below.into_iter().rev().map(|id| (id, dir)));
    }
    let [users, groups] = &walk.owners;
    let projects = BTreeSet::from([0]);
    for kind in layout.options.quota_kinds() {
        let ids = match kind {
            Quota::User => users,
            Quota::Group => groups,
            Quota::Project => &projects,
        };
        walk.needs.quotas.push((kind, quota::file_bytes(ids)));
    }
    Ok(walk.needs)
}

struct TreeMeasurer<'a> {
    layout: &'a Layout,
    tree: &'a Tree,
    style: DirectoryFormat,
    lost_found: Option<NodeId>,
    needs: TreeRequirements,
    /// Index of the placement, by node number.
    node_placement: Vec<Option<usize>>,
    /// Number of owners of each shared attribute list.
    shared: HashMap<&'a [NewXattr], u32>,
    /// Users and groups with usage.
    owners: [BTreeSet<u32>; 2],
}

impl<'a> TreeMeasurer<'a> {
    /// Counts a directory and its entries; returns its subdirectories.
    fn measure_directory(&mut self, dir: NodeId, parent: NodeId) -> Result<Vec<NodeId>> {
        if self.node_placement(dir).is_none() {
            self.add_node(dir, parent, 2)?;
        }
        let mut below = vec![];
        let tree = self.tree;
        for (_, id) in tree.names(dir) {
            if matches!(tree.node(id).kind_data, NodeKind::Directory) {
                below.push(id);
            } else if self.node_placement(id).is_some() {
                self.add_links(id, 1)?;
            } else {
                self.add_node(id, dir, 1)?;
            }
        }
        self.add_links(dir, below.len())?;
        Ok(below)
    }

    fn node_placement(&self, id: NodeId) -> Option<usize> {
        self.node_placement.get(saturating_usize(id.0.into())).copied().flatten()
    }

    fn add_links(&mut self, id: NodeId, more: usize) -> Result<()> {
        let Some(placed) = self.node_placement(id).and_then(|nth| self.needs.placed.get_mut(nth))
        else {
            return Ok(());
        };
        placed.links = placed.links.saturating_add(saturating_u32(more as u64));
        let countless = self.layout.options.read_only_compatible;
        let is_countless = matches!(self.tree.node(id).kind_data, NodeKind::Directory)
            && countless.contains(ReadOnlyCompatible::DIR_NLINK);
        match placed.links > LINK_MAX && !is_countless {
            true => {
                Err(tree_error(self.tree, id, "65000 links to a file or directory are possible"))
            }
            false => Ok(()),
        }
    }

    fn add_node(&mut self, id: NodeId, parent: NodeId, links: u32) -> Result<()> {
        if let Some(seen) = self.node_placement.get_mut(saturating_usize(id.0.into())) {
            *seen = Some(self.needs.placed.len());
        }
        let node = self.tree.node(id);
        let [users, groups] = &mut self.owners;
        users.insert(node.uid);
        groups.insert(node.gid);
        let in_body = self.measure_attributes(id)?;
        let (ea_inodes, value_blocks) = values::count_ea_inodes(&node.attributes, self.layout);
        let (data, blocks) = self.contents_blocks(id)?;
        let is_inline = self.is_inline(id, in_body);
        let (data, blocks) = if is_inline { (0, 0) } else { (data, blocks) };
        self.needs.blocks = self.needs.blocks.saturating_add(blocks);
        self.needs.placed.push(NodePlacement {
            node: id.0,
            parent: parent.0,
            links,
            data,
            blocks,
            in_body,
            ea_inodes,
            value_blocks,
            is_inline,
            ..NodePlacement::default()
        });
        Ok(())
    }

    /// Counts the xattr block for attributes beyond the inode; returns the number in the inode.
    fn measure_attributes(&mut self, id: NodeId) -> Result<u32> {
        let tree = self.tree;
        let all = &tree.node(id).attributes[..];
        if all.is_empty() {
            return Ok(0);
        }
        if !self.layout.options.compatible.contains(Compatible::EXT_ATTR) {
            return Err(tree_error(tree, id, "extended attributes need the feature ext_attr (-O)"));
        }
        let Some(in_body) = values::attributes_in_inode(all, self.layout) else {
            return Err(tree_error(tree, id, values::unfit_reason(all, self.layout)));
        };
        let rest = all.get(in_body..).unwrap_or_default();
        if !rest.is_empty() {
            let owners = self.shared.entry(rest).or_insert(0);
            self.needs.blocks = self.needs.blocks.saturating_add(
                u64::from(owners.is_multiple_of(XATTR_REFCOUNT_MAX))
                    .saturating_mul(self.layout.cluster_blocks()),
            );
            *owners = owners.saturating_add(1);
        }
        Ok(saturating_u32(in_body as u64))
    }

    /// Returns the blocks of a node's contents, and the same with their map.
    fn contents_blocks(&self, id: NodeId) -> Result<(u64, u64)> {
        let what = &self.tree.node(id).kind_data;
        let block_bytes = self.layout.super_.block_bytes;
        let runs = match what {
            NodeKind::Directory => vec![(0, self.directory_blocks(id))],
            NodeKind::Symlink(target) if target.is_empty() => {
                return Err(tree_error(self.tree, id, "a symbolic link without a target"));
            }
            NodeKind::Symlink(target) if target.len() >= self.layout.block_len() => {
                return Err(tree_error(self.tree, id, "the target is longer than a block (-b)"));
            }
            NodeKind::File { size_bytes, .. } if *size_bytes > self.max_file_bytes() => {
                return Err(tree_error(self.tree, id, "too long for blocks of this size (-b)"));
            }
            what => data_runs(what, block_bytes),
        };
        let data: u64 = runs.iter().map(|run| u64::from(run.1)).sum();
        let ratio = self.layout.cluster_blocks();
        let owned = touched_clusters(&runs, ratio)
            .iter()
            .map(|run| run.1.saturating_mul(ratio))
            .sum::<u64>();
        let blocks = owned.saturating_add(self.layout.map_blocks(&runs).saturating_mul(ratio));
        let huge = self.layout.options.read_only_compatible.contains(ReadOnlyCompatible::HUGE_FILE);
        let bits = if huge { 48 } else { 32 };
        // `i_blocks` counts sectors; an xattr block may be added.
        if blocks.saturating_add(ratio).saturating_mul(u64::from(block_bytes / 512)) >= 1 << bits {
            let what = "more data than an inode can count; the feature huge_file helps (-O)";
            return Err(tree_error(self.tree, id, what));
        }
        Ok((data, blocks))
    }

    /// Returns true if the contents of a node are inline, with all attributes in the inode.
    fn is_inline(&self, id: NodeId, in_body: u32) -> bool {
        let node = self.tree.node(id);
        let has_feature = self.layout.options.incompatible.contains(Incompatible::INLINE_DATA);
        let are_attributes_inside = in_body == saturating_u32(node.attributes.len() as u64);
        if !has_feature || !are_attributes_inside {
            return false;
        }
        let len = match &node.kind_data {
            // e2fsck and others expect these two in blocks.
            NodeKind::Directory if id == NodeId::ROOT || Some(id) == self.lost_found => {
                return false;
            }
            NodeKind::Directory => {
                let names = self.tree.names(id).map(|(name, _)| name.len());
                inline_data::inline_directory_bytes(names)
            }
            NodeKind::File { size_bytes, .. } => *size_bytes,
            // Linux creates no inline symbolic links, and e2fsck does not count them in quotas.
            _ => return false,
        };
        let taken = node.attributes.iter().map(NewXattr::entry_and_value_bytes).sum();
        let room = inode_capacity(self.layout.super_.inode_bytes).saturating_sub(taken);
        inline_data::xattr_bytes_needed(len) <= room as u64
    }

    /// Returns the maximum file size.
    fn max_file_bytes(&self) -> u64 {
        let block_bytes = self.layout.super_.block_bytes;
        // The last file block number is reserved.
        let numbers = (u64::from(block_bytes) << 32).saturating_sub(block_bytes.into());
        match self.layout.options.has_extents() {
            true => numbers,
            false => {
                let reach = crate::map::pointers::max_mapped_blocks(block_bytes);
                reach
                    .saturating_mul(block_bytes.into())
                    .min(numbers.saturating_add(block_bytes.into()).saturating_sub(1))
            }
        }
    }

    #[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
    fn directory_blocks(&self, id: NodeId) -> u32 {
        let built = build_directory_of(self.tree, id, (0, 0), &[], self.style);
        let blocks = built.bytes.len() / self.layout.block_len().max(1);
        let least = match Some(id) == self.lost_found && !built.indexed {
            true => self.layout.lost_found_blocks(),
            false => 1,
        };
        saturating_u32((blocks as u64).max(least))
    }
}

fn tree_error(tree: &Tree, id: NodeId, what: &str) -> FormatError {
    FormatError::Tree { path: tree.path(id), what: what.to_owned() }
}
