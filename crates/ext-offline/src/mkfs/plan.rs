//! Assignment of inodes and blocks to the nodes of a tree.
//!
//! ```text
//!   order    dir, its files .. , then each directory below it, likewise
//!   inodes   ──────▶ ascending       both cursors only advance; at the start of a directory the
//!   blocks   ──────▶ ascending       lagging one catches up, if the volume has spare space
//! ```
//! Law 1: a file is one run if a large enough free range exists. Indirect blocks precede the data
//! they point to; extent nodes follow it.
//! Law 2: space is skipped only if the rest holds everything that remains.

mod clusters;
mod cursor;
mod goals;
mod measure;

use std::collections::HashMap;

use draconis_types::FileType;

use cursor::BlockCursor;
use measure::{TreeRequirements, measure_tree};

use clusters::{cluster_starts, runs_in_clusters, touched_clusters, truncate_runs};

use super::layout::Layout;
use super::layout::tables::{self, FreeRanges, GroupTables};
use super::system_files::{self, SystemFile, SystemFileKind};
use super::tree::{NodeId, NodeKind, Tree, TreeNode};
use super::{DiskRun, LOST_FOUND_INODE};
use super::{FormatError, FormatOptions, InodeCount, Result, journal, values};
use crate::dir::build::{self as directory, DirectoryFormat, NewDirent};
use crate::format::dirent::DirBlockFormat;
use crate::format::features::{Compatible, Incompatible};
use crate::format::hash::{HashSeed, NameHash};
use crate::format::inode::fast_symlink_pointers;
use crate::format::quota::{self, QuotaType as Quota};
use crate::format::xattr::NewXattr;
use crate::map::{build as map, build_extents};
use crate::units::{saturating_u32, saturating_usize};

/// Maximum of inodes that share an xattr block.
const XATTR_REFCOUNT_MAX: u32 = 1024;

/// A size that is valid with every block size and inode count.
const PROBE_VOLUME_BYTES: u64 = 64 << 30;

/// Placement of a node.
#[derive(Clone, Debug, Default)]
pub(super) struct NodePlacement {
    pub(super) node: u32,
    pub(super) inode: u32,
    pub(super) parent: u32,
    pub(super) links: u32,
    /// Blocks of the contents, and the same with their map.
    pub(super) data: u64,
    pub(super) blocks: u64,
    /// First run in the plan's runs, and number of runs.
    pub(super) runs: (u32, u32),
    /// Xattr block; 0 for none.
    pub(super) xattr_block: u64,
    /// Number of attributes in the inode.
    pub(super) in_body: u32,
    /// Attributes with EA inodes, and the blocks of their values, which the node's `i_blocks`
    /// includes.
    pub(super) ea_inodes: u32,
    pub(super) value_blocks: u64,
    /// True if the contents are inline.
    pub(super) is_inline: bool,
}

/// An xattr block shared by inodes.
#[derive(Clone, Debug)]
pub(super) struct SharedXattrBlock {
    pub(super) attributes: Vec<NewXattr>,
    pub(super) at: u64,
    pub(super) owners: u32,
}

/// A volume with all inodes and blocks assigned.
#[derive(Debug)]
pub struct VolumePlan<'a> {
    pub(super) layout: Layout,
    pub(super) tree: &'a Tree,
    /// In allocation order.
    pub(super) placed: Vec<NodePlacement>,
    pub(super) runs: Vec<DiskRun>,
    pub(super) shared: Vec<SharedXattrBlock>,
    /// Inode by node number; 0 for unreachable nodes.
    pub(super) inodes: Vec<u32>,
    /// Double-indirect block of the resize inode; 0 for none.
    pub(super) resize_dind_block: u64,
    /// MMP block; 0 for none.
    pub(super) mmp_block: u64,
    pub(super) system_files: Vec<SystemFile>,
    /// Tables of each group.
    pub(super) tables: Vec<GroupTables>,
    /// Free blocks.
    pub(super) space: FreeRanges,
    pub(super) directory_format: DirectoryFormat,
    data_bytes: u64,
    system_file_blocks: u64,
}

impl NodePlacement {
    /// Returns the blocks in `i_blocks`: with the map, the attributes, their values, and whole
    /// clusters.
    pub(super) fn allocated_blocks(&self, layout: &Layout) -> u64 {
        let attributes = u64::from(self.xattr_block != 0).saturating_mul(layout.cluster_blocks());
        self.blocks.saturating_add(attributes).saturating_add(self.value_blocks)
    }
}

impl VolumePlan<'_> {
    /// Returns the layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the bytes of blocks of the tree's files, directories and links.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Returns the bytes of blocks of system files, mostly the journal.
    pub fn system_file_bytes(&self) -> u64 {
        self.system_file_blocks.saturating_mul(self.layout.super_.block_bytes.into())
    }

    pub(super) fn runs_of_node(&self, placed: &NodePlacement) -> &[DiskRun] {
        let start = saturating_usize(placed.runs.0.into());
        let end = start.saturating_add(saturating_usize(placed.runs.1.into()));
        self.runs.get(start..end).unwrap_or_default()
    }
}

/// Adds lost+found to a tree that lacks it.
fn with_lost_found(tree: &mut Tree, options: &FormatOptions) -> Result<()> {
    let time = draconis_types::Time { seconds: i64::from(options.time), nanoseconds: 0 };
    match tree.lookup(NodeId::ROOT, b"lost+found") {
        None => {
            let mut node = TreeNode::new(NodeKind::Directory, 0o700).with_all_times(time);
            (node.uid, node.gid) = options.root_owner;
            tree.add(NodeId::ROOT, b"lost+found", node).map(drop)
        }
        Some(id) if matches!(tree.node(id).kind_data, NodeKind::Directory) => Ok(()),
        Some(_) => Err(FormatError::Tree {
            path: "/lost+found".into(),
            what: "e2fsck needs a directory of this name".into(),
        }),
    }
}

/// Plans the smallest volume that holds the tree and leaves `free_bytes` to users.
///
/// # Errors
/// As [`Layout::new`] and [`VolumePlan::new`].
pub fn plan_smallest<'a>(
    options: &FormatOptions,
    tree: &'a mut Tree,
    free_bytes: u64,
) -> Result<VolumePlan<'a>> {
    with_lost_found(tree, options)?;
    let block_bytes = Some(options.block_bytes.unwrap_or(1024));
    let any = FormatOptions { inodes: InodeCount::Default, block_bytes, ..options.clone() };
    values::move_values_to_ea_inodes(&Layout::new(&any, PROBE_VOLUME_BYTES)?, tree);
    let tree = &*tree;
    with_larger_block_fallback(options, |options| {
        if options.block_bytes.is_some() {
            return smallest_for_block_size(options, tree, free_bytes);
        }
        // Use the block size of the resulting volume size.
        let with_blocks_of =
            |block_bytes| FormatOptions { block_bytes: Some(block_bytes), ..options.clone() };
        let plan = smallest_for_block_size(&with_blocks_of(1024), tree, free_bytes)?;
        match super::layout::default_block_bytes(plan.layout.len_bytes()) {
            1024 => Ok(plan),
            block_bytes => smallest_for_block_size(&with_blocks_of(block_bytes), tree, free_bytes),
        }
    })
}

/// Plans with these options. Falls back to blocks of 4096 bytes if no size is given and the default
/// blocks are too small for the tree.
fn with_larger_block_fallback<'a>(
    options: &FormatOptions,
    plan: impl Fn(&FormatOptions) -> Result<VolumePlan<'a>>,
) -> Result<VolumePlan<'a>> {
    match plan(options) {
        Err(unfit @ FormatError::Tree { .. }) if options.block_bytes.is_none() => {
            let roomy = FormatOptions { block_bytes: Some(4096), ..options.clone() };
            plan(&roomy).map_err(|_| unfit)
        }
        done => done,
    }
}

/// Limit of attempts to enlarge a volume: extent maps of fragmented files and inode tables between
/// fixed structures may need more than estimated.
const MAX_SIZE_ATTEMPTS: u64 = 20;

/// Plans the smallest volume for a tree, with a given block size.
fn smallest_for_block_size<'a>(
    options: &FormatOptions,
    tree: &'a Tree,
    free_bytes: u64,
) -> Result<VolumePlan<'a>> {
    let mut missed = 0;
    loop {
        let (layout, needs) = smallest_layout(options, tree, free_bytes, missed)?;
        match place_tree(layout, tree, needs) {
            Err(FormatError::NoBlocks { .. } | FormatError::NoTables)
                if missed < 1 << MAX_SIZE_ATTEMPTS =>
            {
                missed = missed.saturating_mul(2).max(1);
            }
            done => return done,
        }
    }
}

/// Plans a volume of `size_bytes` for the tree. By default there are at least as many inodes as the
/// tree needs.
///
/// # Errors
/// As [`Layout::new`] and [`VolumePlan::new`].
pub fn plan_for_size<'a>(
    options: &FormatOptions,
    tree: &'a mut Tree,
    size_bytes: u64,
) -> Result<VolumePlan<'a>> {
    with_lost_found(tree, options)?;
    values::move_values_to_ea_inodes(&Layout::new(options, size_bytes)?, tree);
    let tree = &*tree;
    with_larger_block_fallback(options, |options| {
        let mut layout = Layout::new(options, size_bytes)?;
        let needs = measure_tree(&layout, tree)?;
        let inodes = wanted_inodes(&needs).saturating_add(LOST_FOUND_INODE);
        if options.inodes == InodeCount::Default && layout.super_.inodes < inodes {
            // Each group rounds its share down to a multiple of eight.
            let rounding = layout.super_.groups.saturating_mul(8);
            let inodes = InodeCount::Count(inodes.saturating_add(rounding));
            layout = Layout::new(&FormatOptions { inodes, ..options.clone() }, size_bytes)?;
        }
        place_tree(layout, tree, needs)
    })
}

#[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
fn smallest_layout(
    options: &FormatOptions,
    tree: &Tree,
    free_bytes: u64,
    missed: u64,
) -> Result<(Layout, TreeRequirements)> {
    let block_bytes = u64::from(options.block_bytes.unwrap_or(1024));
    let mut options = options.clone();
    // The needs of a tree depend only on the sizes of blocks and inodes.
    let any = FormatOptions { inodes: InodeCount::Default, ..options.clone() };
    let needs = measure_tree(&Layout::new(&any, PROBE_VOLUME_BYTES)?, tree)?;
    let inodes = wanted_inodes(&needs).saturating_add(LOST_FOUND_INODE);
    let ratio = super::layout::default_ratio(needs.blocks.saturating_mul(block_bytes));
    // By default, free space gets inodes, too.
    let spare = match options.inodes {
        InodeCount::Default => saturating_u32(free_bytes / u64::from(ratio)),
        _ => 0,
    };
    let inodes = inodes.saturating_add(spare);
    let tables = u64::from(inodes) * u64::from(options.inode_bytes) / block_bytes;
    // Sizes aligned to pages, for memory maps.
    let step = (4096 / block_bytes).max(1);
    let mut blocks = needs.blocks.saturating_add(tables).max(64).next_multiple_of(step);
    if options.compatible.contains(Compatible::HAS_JOURNAL) {
        // The journal was requested.
        blocks = blocks.max(journal::MIN_VOLUME_BLOCKS);
    }
    loop {
        let layout = match Layout::new(&options, blocks.saturating_mul(block_bytes)) {
            Ok(layout) => layout,
            Err(
                FormatError::TooSmall { .. }
                | FormatError::TooManyInodes(_)
                | FormatError::LargeJournal(_),
            ) => {
                blocks = blocks.saturating_add(blocks.div_ceil(64).next_multiple_of(step));
                continue;
            }
            Err(error) => return Err(error),
        };
        let super_ = &layout.super_;
        if super_.inodes < inodes {
            match options.inodes {
                InodeCount::Count(count) if count < inodes => {
                    return Err(too_few_inodes_error(&layout, &needs));
                }
                // Rounded down: request a few more.
                InodeCount::Count(count) => {
                    options.inodes = InodeCount::Count(count.saturating_add(8))
                }
                InodeCount::PerBytes(_) => {
                    blocks = blocks.saturating_add(blocks.div_ceil(64).next_multiple_of(step))
                }
                // More than this size gets by default: use the tree's count.
                InodeCount::Default => options.inodes = InodeCount::Count(inodes),
            }
            continue;
        }
        let spare = free_bytes.div_ceil(block_bytes);
        let reserved = if free_bytes > 0 { super_.reserved_blocks } else { 0 };
        let all =
            needs.blocks.saturating_add(needs.system_file_blocks(&layout)).saturating_add(missed);
        let wanted = all.saturating_add(spare).saturating_add(reserved);
        let Some(missing) = wanted.checked_sub(super_.free_blocks).filter(|it| *it > 0) else {
            return Ok((layout, needs));
        };
        blocks = blocks.saturating_add(missing.next_multiple_of(step));
    }
}

/// Returns the inodes beyond the reserved ones and lost+found.
fn wanted_inodes(needs: &TreeRequirements) -> u32 {
    saturating_u32(needs.placed.len() as u64).saturating_sub(2).saturating_add(needs.inodes)
}

fn too_few_inodes_error(layout: &Layout, needs: &TreeRequirements) -> FormatError {
    FormatError::NoInodes {
        needed: wanted_inodes(needs).into(),
        free: layout.super_.inodes.saturating_sub(LOST_FOUND_INODE).into(),
    }
}

impl<'a> VolumePlan<'a> {
    /// Plans a tree on a layout.
    ///
    /// # Errors
    /// [`FormatError::NoBlocks`] and [`FormatError::NoInodes`] before anything is written, and
    /// [`FormatError::Tree`] for nodes that ext2 cannot hold.
    pub fn new(layout: Layout, tree: &'a mut Tree) -> Result<Self> {
        with_lost_found(tree, &layout.options)?;
        values::move_values_to_ea_inodes(&layout, tree);
        let needs = measure_tree(&layout, tree)?;
        place_tree(layout, tree, needs)
    }
}

/// Returns the file blocks that hold a node's data.
pub(super) fn data_runs(what: &NodeKind, block_bytes: u32) -> Vec<(u32, u32)> {
    let mut runs: Vec<(u32, u32)> = vec![];
    match what {
        NodeKind::File { size_bytes, data, .. } => {
            for (start, end) in data {
                let (mut from, mut blocks) =
                    map::to_blocks(*start, (*end).min(*size_bytes), block_bytes);
                // Two data ranges may share a block.
                if let Some((last, count)) = runs.last()
                    && let Some(overlap) = last.saturating_add(*count).checked_sub(from)
                {
                    from = from.saturating_add(overlap.min(blocks));
                    blocks = blocks.saturating_sub(overlap);
                }
                if blocks > 0 {
                    runs.push((from, blocks));
                }
            }
        }
        NodeKind::Symlink(target) if fast_symlink_pointers(target).is_none() => runs.push((0, 1)),
        _ => {}
    }
    runs
}

pub(super) fn directory_format_of(layout: &Layout) -> DirectoryFormat {
    let options = &layout.options;
    let version = options.hash_version;
    let seed = options.hash_seed.as_chunks::<4>().0;
    let mut words = seed.iter().map(|word| u32::from_le_bytes(*word));
    let seed = HashSeed::new(std::array::from_fn(|_| words.next().unwrap_or(0)));
    let index = options.compatible.contains(Compatible::DIR_INDEX);
    DirectoryFormat {
        shape: DirBlockFormat {
            block_bytes: layout.super_.block_bytes,
            filetype: options.incompatible.contains(Incompatible::FILETYPE),
            has_checksums: layout.super_.checksum_seed.is_some(),
        },
        index: index
            .then(|| NameHash::of_version(version, false, seed))
            .flatten()
            .map(|hash| (hash, version)),
        levels: u8::from(options.incompatible.contains(Incompatible::LARGEDIR)).saturating_add(1),
    }
}

/// Builds the blocks of a directory with inode numbers.
pub(super) fn build_directory_of(
    tree: &Tree,
    dir: NodeId,
    (own, parent): (u32, u32),
    inodes: &[u32],
    style: DirectoryFormat,
) -> directory::BuiltDirectory {
    directory::build_directory(own, parent, &directory_names(tree, dir, inodes), style)
}

/// Returns the names in a directory with their inodes.
pub(super) fn directory_names<'a>(
    tree: &'a Tree,
    dir: NodeId,
    inodes: &[u32],
) -> Vec<NewDirent<'a>> {
    let name = |(name, id): (&'a [u8], NodeId)| NewDirent {
        name,
        inode: inodes.get(saturating_usize(id.0.into())).copied().unwrap_or(0),
        kind: tree.node(id).kind_data.kind(),
    };
    tree.names(dir).map(name).collect()
}

fn place_tree(layout: Layout, tree: &Tree, needs: TreeRequirements) -> Result<VolumePlan<'_>> {
    let free = layout.super_.free_blocks;
    let block_bytes = layout.super_.block_bytes;
    let inodes_left = wanted_inodes(&needs);
    if inodes_left > layout.super_.inodes.saturating_sub(LOST_FOUND_INODE) {
        return Err(too_few_inodes_error(&layout, &needs));
    }
    let system_file_blocks = needs.system_file_blocks(&layout);
    let needed = needs.blocks.saturating_add(system_file_blocks);
    // Later checks use this error, too, so that a wrong estimate cannot panic.
    let too_few = || FormatError::NoBlocks { needed, free, block_bytes };
    if needed > free {
        return Err(too_few());
    }
    let TreeRequirements { mut placed, blocks: in_tree, quotas, .. } = needs;
    let (tables, space) = tables::place_tables(&layout)?;
    let mut placing = VolumePlacer {
        blocks: BlockCursor::new(&layout, space, in_tree),
        inodes_left,
        next_inode: LOST_FOUND_INODE + 1,
        layout: &layout,
        tree,
        runs: vec![],
        shared: vec![],
        shareable_blocks: HashMap::new(),
        inodes: vec![0; tree.len()],
        resize_dind_block: 0,
        mmp_block: 0,
        quotas,
        system_files: vec![],
    };
    for (nth, one) in placed.iter_mut().enumerate() {
        placing.place_node(nth, one).ok_or_else(too_few)?;
        if one.inode == LOST_FOUND_INODE {
            placing.place_system_files().ok_or_else(too_few)?;
        }
    }
    let VolumePlacer {
        blocks,
        runs,
        shared,
        inodes,
        resize_dind_block: reserve_map,
        mmp_block: guard,
        system_files: hidden,
        ..
    } = placing;
    let space = blocks.space;
    Ok(VolumePlan {
        tree,
        placed,
        runs,
        shared,
        inodes,
        resize_dind_block: reserve_map,
        mmp_block: guard,
        system_files: hidden,
        tables,
        space,
        directory_format: directory_format_of(&layout),
        data_bytes: in_tree.saturating_mul(block_bytes.into()),
        system_file_blocks,
        layout,
    })
}

struct VolumePlacer<'a> {
    layout: &'a Layout,
    tree: &'a Tree,
    blocks: BlockCursor<'a>,
    next_inode: u32,
    inodes_left: u32,
    runs: Vec<DiskRun>,
    shared: Vec<SharedXattrBlock>,
    /// Xattr block of each attribute list that may get another owner.
    shareable_blocks: HashMap<&'a [NewXattr], usize>,
    inodes: Vec<u32>,
    resize_dind_block: u64,
    mmp_block: u64,
    quotas: Vec<(Quota, u64)>,
    system_files: Vec<SystemFile>,
}

impl<'a> VolumePlacer<'a> {
    /// Places the system files like mke2fs: right after root and lost+found.
    fn place_system_files(&mut self) -> Option<()> {
        let super_ = &self.layout.super_;
        if self.layout.options.compatible.contains(Compatible::RESIZE_INODE) {
            let own = self
                .layout
                .backup_blocks(0)
                .saturating_add(2)
                .saturating_add(super_.inode_table_blocks().into());
            let goal = u64::from(super_.first_data_block).saturating_add(own);
            self.resize_dind_block = self.allocate_block_from(goal)?;
        }
        if let Some(sizes) = self.layout.journal {
            let goal = goals::journal_goal(self.layout, &self.blocks.space);
            self.place_system_file(
                SystemFileKind::Journal(sizes),
                journal::JOURNAL_INODE,
                sizes.total_blocks(),
                goal,
            )?;
        }
        if self.layout.options.incompatible.contains(Incompatible::MMP) {
            self.mmp_block = self.allocate_block_from(0)?;
        }
        for (kind, bytes) in std::mem::take(&mut self.quotas) {
            let inode = match kind {
                Quota::User => quota::USER_QUOTA_INODE,
                Quota::Group => quota::GROUP_QUOTA_INODE,
                Quota::Project => self.next_system_inode(),
            };
            self.place_system_file(
                SystemFileKind::Quota(kind),
                inode,
                self.layout.blocks_for_bytes(bytes),
                0,
            )?;
            if let Some(hidden) = self.system_files.last_mut() {
                hidden.size_bytes = Some(bytes);
            }
        }
        if let Some(blocks) = self.layout.orphan_blocks() {
            let inode = self.next_system_inode();
            self.place_system_file(SystemFileKind::Orphans, inode, blocks, 0)?;
        }
        for (nth, value) in self.tree.values.iter().enumerate() {
            let (inode, bytes) = (self.next_system_inode(), value.bytes.len() as u64);
            self.place_system_file(
                SystemFileKind::Value(nth),
                inode,
                self.layout.blocks_for_bytes(bytes),
                0,
            )?;
            if let Some(hidden) = self.system_files.last_mut() {
                hidden.size_bytes = Some(bytes);
            }
        }
        self.blocks.start();
        Some(())
    }

    /// Allocates the first free block from `goal` on, in a cluster of its own.
    fn allocate_block_from(&mut self, goal: u64) -> Option<u64> {
        Some(self.blocks.allocate_from(goal, self.layout.cluster_blocks())?.first()?.0)
    }

    /// Allocates the next inode for a system file.
    fn next_system_inode(&mut self) -> u32 {
        self.next_inode = self.next_inode.saturating_add(1);
        self.inodes_left = self.inodes_left.saturating_sub(1);
        self.next_inode.saturating_sub(1)
    }

    fn place_system_file(
        &mut self,
        purpose: SystemFileKind,
        inode: u32,
        blocks: u32,
        goal: u64,
    ) -> Option<()> {
        let runs = [(0, blocks)];
        let mut count = self.layout.round_to_clusters(blocks.into());
        if !self.layout.options.has_extents() {
            count = count.saturating_add(self.layout.map_blocks(&runs));
        }
        let mut places = self.blocks.allocate_from(goal, count)?;
        let mut owned = count;
        if matches!(purpose, SystemFileKind::Quota(_)) && self.layout.cluster_blocks() == 1 {
            let block_bytes = self.layout.super_.block_bytes;
            places = system_files::quota_file_order(places, blocks, block_bytes);
        }
        if self.layout.options.has_extents() {
            let (extents, _) = build_extents::extents_of_runs(&runs, &places)?;
            let nodes =
                build_extents::nodes_needed(extents.len() as u64, self.layout.super_.block_bytes);
            // Like mke2fs, nodes go right before the file, if they fit there.
            let before = places.first().map_or(goal, |first| first.0.saturating_sub(1));
            let ratio = self.layout.cluster_blocks();
            owned = owned.saturating_add(nodes.saturating_mul(ratio));
            let of_nodes = self.blocks.allocate_from(before, nodes.saturating_mul(ratio))?;
            // Nodes do not use the rest of the file's last cluster.
            places = truncate_runs(places, blocks.into());
            places.extend(cluster_starts(&of_nodes, ratio));
        }
        self.system_files.push(SystemFile {
            purpose,
            inode,
            blocks,
            size_bytes: None,
            owned,
            places,
        });
        Some(())
    }

    fn place_node(&mut self, nth: usize, placed: &mut NodePlacement) -> Option<()> {
        let node = self.tree.node(NodeId(placed.node));
        placed.inode = match nth {
            0 => crate::InodeNumber::ROOT.0,
            1 => LOST_FOUND_INODE,
            _ => {
                if matches!(node.kind_data, NodeKind::Directory) {
                    self.align_cursors();
                }
                self.inodes_left = self.inodes_left.saturating_sub(1);
                self.next_inode = self.next_inode.saturating_add(1);
                self.next_inode.saturating_sub(1)
            }
        };
        *self.inodes.get_mut(saturating_usize(placed.node.into()))? = placed.inode;
        if node.kind_data.kind() == FileType::File {
            self.blocks.skip_to_fit(placed.blocks);
        }
        let first = self.runs.len();
        self.blocks.blocks_outstanding =
            self.blocks.blocks_outstanding.saturating_sub(placed.blocks);
        if self.layout.options.has_extents() {
            let ratio = self.layout.cluster_blocks();
            let data = self.allocate_data(node, placed)?;
            let nodes = self.count_extent_nodes(&data, first)?;
            let mut of_nodes = vec![];
            self.blocks.allocate(nodes.saturating_mul(ratio), &mut of_nodes)?;
            self.runs.extend(cluster_starts(&of_nodes, ratio));
            let owned: u64 =
                touched_clusters(&data, ratio).iter().map(|run| run.1.saturating_mul(ratio)).sum();
            placed.blocks = owned.saturating_add(nodes.saturating_mul(ratio));
        } else {
            self.blocks.allocate(placed.blocks, &mut self.runs)?;
        }
        placed.runs = (
            saturating_u32(first as u64),
            saturating_u32(self.runs.len().saturating_sub(first) as u64),
        );
        let rest = node.attributes.get(saturating_usize(placed.in_body.into())..)?;
        if !rest.is_empty() {
            placed.xattr_block = self.allocate_xattr_block(rest)?;
        }
        Some(())
    }

    /// Allocates the blocks of a node's contents; returns their file runs.
    fn allocate_data(
        &mut self,
        node: &TreeNode,
        placed: &NodePlacement,
    ) -> Option<Vec<(u32, u32)>> {
        let runs = match &node.kind_data {
            _ if placed.is_inline => vec![],
            NodeKind::Directory => vec![(0, saturating_u32(placed.data))],
            what => data_runs(what, self.layout.super_.block_bytes),
        };
        let ratio = self.layout.cluster_blocks();
        if ratio == 1 {
            self.blocks.allocate(placed.data, &mut self.runs)?;
            return Some(runs);
        }
        let touched = touched_clusters(&runs, ratio);
        let mut taken = vec![];
        self.blocks
            .allocate(touched.iter().map(|run| run.1.saturating_mul(ratio)).sum(), &mut taken)?;
        self.runs.extend(runs_in_clusters(&runs, &touched, &taken, ratio)?);
        Some(runs)
    }

    /// Returns the extent nodes for data in the runs from `first` on.
    fn count_extent_nodes(&self, data: &[(u32, u32)], first: usize) -> Option<u64> {
        let (extents, _) = build_extents::extents_of_runs(data, self.runs.get(first..)?)?;
        Some(build_extents::nodes_needed(extents.len() as u64, self.layout.super_.block_bytes))
    }

    /// Returns the xattr block with these attributes, shared or new.
    fn allocate_xattr_block(&mut self, attributes: &'a [NewXattr]) -> Option<u64> {
        if let Some(shared) =
            self.shareable_blocks.get(attributes).and_then(|nth| self.shared.get_mut(*nth))
            && shared.owners < XATTR_REFCOUNT_MAX
        {
            shared.owners = shared.owners.saturating_add(1);
            return Some(shared.at);
        }
        let mut runs = vec![];
        let ratio = self.layout.cluster_blocks();
        self.blocks.blocks_outstanding = self.blocks.blocks_outstanding.saturating_sub(ratio);
        self.blocks.allocate(ratio, &mut runs)?;
        let (at, _) = *runs.first()?;
        self.shareable_blocks.insert(attributes, self.shared.len());
        self.shared.push(SharedXattrBlock { attributes: attributes.to_vec(), at, owners: 1 });
        Some(at)
    }

    /// Advances the lagging cursor (inodes or blocks) to the other cursor's flex group.
    #[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
    fn align_cursors(&mut self) {
        let flex = self.layout.options.groups_per_flex();
        let per_flex = self.layout.super_.inodes_per_group.saturating_mul(flex);
        let inode_flex = self.next_inode.saturating_sub(1) / per_flex;
        let block_flex = self.layout.group_of(self.blocks.next) / flex;
        if block_flex > inode_flex {
            let target = block_flex.saturating_mul(per_flex).saturating_add(1);
            let left = self.layout.super_.inodes.saturating_sub(target.saturating_sub(1));
            if left >= self.inodes_left {
                self.next_inode = target;
            }
        } else if inode_flex > block_flex {
            self.blocks.advance_to(self.layout.group_start(inode_flex.saturating_mul(flex)));
        }
    }
}
