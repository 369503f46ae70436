//! Which inode and which blocks each node has.
//!
//! ```text
//!   order    dir, its files .. , then each directory below it, likewise
//!   inodes   ──────▶ rising          both cursors only move on; each waits for the other at the
//!   blocks   ──────▶ rising          start of a directory, if the volume has room to spare
//! ```
//! Law 1: a file is one run wherever there is one that has room for it; indirect blocks lie before
//! the data they lead to, nodes of extents behind it.
//! Law 2: space is skipped only while what is left holds everything that is to come.

mod cursor;
mod measure;
mod pieces;

use std::collections::HashMap;

use draconis_exchange::contract::FileType;

use cursor::Cursor;
use measure::{Needs, measure};

use pieces::{clusters, cut, firsts, within};

use super::hidden::{self, Hidden, Purpose};
use super::layout::Layout;
use super::tables::{self, Space, Tables};
use super::tree::{Node, NodeId, Tree, What};
use super::{Error, Inodes, Options, Result, journal, values};
use crate::dir::build::{self as directory, Name, Style};
use crate::format::dirent::Shape;
use crate::format::features::{Compatible, Incompatible};
use crate::format::hash::{Hash, Seed};
use crate::format::inode::target_pointers;
use crate::format::quota::{self, Kind as Quota};
use crate::format::xattr::NewAttribute;
use crate::map::{build as map, build_extents};
use crate::units::{index, narrow};

/// The first inode that files can have; lost+found has it.
pub(super) const LOST_FOUND: u32 = 11;
/// Inodes that may share one block of attributes.
const MOST_SHARERS: u32 = 1024;

/// A size that every block size and every number of inodes goes with.
const ANY_SIZE_BYTES: u64 = 64 << 30;

/// Blocks that follow each other: the first, and how many.
pub(super) type Blocks = (u64, u64);

/// What a node has.
#[derive(Clone, Debug, Default)]
pub(super) struct Placed {
    pub(super) node: u32,
    pub(super) inode: u32,
    pub(super) parent: u32,
    pub(super) links: u32,
    /// Blocks for contents, and with those of their map.
    pub(super) data: u64,
    pub(super) blocks: u64,
    /// Of the plan's runs, where its own begin, and how many.
    pub(super) runs: (u32, u32),
    /// The block of its attributes, 0 for none.
    pub(super) attribute_block: u64,
    /// How many of its attributes are in the inode.
    pub(super) in_body: u32,
    /// Attributes whose values are in inodes of their own, and the blocks of those values, which
    /// count as its own.
    pub(super) values: u32,
    pub(super) value_blocks: u64,
    /// Whether its contents are in the inode, too.
    pub(super) is_inside: bool,
}

/// A block of attributes that inodes share.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    pub(super) attributes: Vec<NewAttribute>,
    pub(super) at: u64,
    pub(super) owners: u32,
}

/// A volume with everything in its place.
#[derive(Debug)]
pub struct Plan<'a> {
    pub(super) layout: Layout,
    pub(super) tree: &'a Tree,
    /// In the order in which blocks and inodes were given out.
    pub(super) placed: Vec<Placed>,
    pub(super) runs: Vec<Blocks>,
    pub(super) shared: Vec<Shared>,
    /// By the number of a node, its inode; 0 for what nothing leads to.
    pub(super) inodes: Vec<u32>,
    /// The top of the reserve's map, if there is one.
    pub(super) reserve_map: u64,
    /// The block by which hosts see that the volume is in use, if there is one.
    pub(super) guard: u64,
    pub(super) hidden: Vec<Hidden>,
    /// Of each group.
    pub(super) tables: Vec<Tables>,
    /// What is left.
    pub(super) space: Space,
    pub(super) style: Style,
    data_bytes: u64,
    hidden_blocks: u64,
}

impl Placed {
    /// Blocks that its inode counts: with its map, its attributes, their values, and the rest of
    /// their clusters.
    pub(super) fn owned(&self, layout: &Layout) -> u64 {
        let attributes = u64::from(self.attribute_block != 0) * layout.ratio();
        self.blocks + attributes + self.value_blocks
    }
}

impl Plan<'_> {
    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Bytes of blocks that the tree's files, directories and links take.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Bytes of blocks that files without a name take: the journal, mostly.
    pub fn hidden_bytes(&self) -> u64 {
        self.hidden_blocks * u64::from(self.layout.super_.block_bytes)
    }

    pub(super) fn runs_of(&self, placed: &Placed) -> &[Blocks] {
        let start = index(placed.runs.0.into());
        let end = start.saturating_add(index(placed.runs.1.into()));
        self.runs.get(start..end).unwrap_or_default()
    }
}

/// Adds lost+found where the tree has none.
fn with_lost_found(tree: &mut Tree, options: &Options) -> Result<()> {
    let time =
        draconis_exchange::contract::Time { seconds: i64::from(options.time), nanoseconds: 0 };
    match tree.lookup(NodeId::ROOT, b"lost+found") {
        None => {
            let mut node = Node::new(What::Directory, 0o700).at(time);
            (node.uid, node.gid) = options.root_owner;
            tree.add(NodeId::ROOT, b"lost+found", node).map(drop)
        }
        Some(id) if matches!(tree.node(id).what, What::Directory) => Ok(()),
        Some(_) => Err(Error::Tree {
            path: "/lost+found".into(),
            what: "e2fsck needs a directory of this name".into(),
        }),
    }
}

/// Lays out the smallest volume that holds the tree and leaves `free_bytes` to users.
///
/// # Errors
/// As [`Layout::new`] and [`Plan::new`].
pub fn fitting<'a>(options: &Options, tree: &'a mut Tree, free_bytes: u64) -> Result<Plan<'a>> {
    with_lost_found(tree, options)?;
    let block_bytes = Some(options.block_bytes.unwrap_or(1024));
    let any = Options { inodes: Inodes::Default, block_bytes, ..options.clone() };
    values::move_out(&Layout::new(&any, ANY_SIZE_BYTES)?, tree);
    let tree = &*tree;
    with_roomy_blocks(options, |options| {
        if options.block_bytes.is_some() {
            return fit(options, tree, free_bytes);
        }
        // By the size it will have, as if that had been given.
        let sized = |block_bytes| Options { block_bytes: Some(block_bytes), ..options.clone() };
        let plan = fit(&sized(1024), tree, free_bytes)?;
        match super::layout::default_block_bytes(plan.layout.len_bytes()) {
            1024 => Ok(plan),
            block_bytes => fit(&sized(block_bytes), tree, free_bytes),
        }
    })
}

/// Plans with these options, and with blocks of 4096 bytes where no size is given and the usual
/// ones are too small for what the tree holds.
fn with_roomy_blocks<'a>(
    options: &Options,
    plan: impl Fn(&Options) -> Result<Plan<'a>>,
) -> Result<Plan<'a>> {
    match plan(options) {
        Err(unfit @ Error::Tree { .. }) if options.block_bytes.is_none() => {
            let roomy = Options { block_bytes: Some(4096), ..options.clone() };
            plan(&roomy).map_err(|_| unfit)
        }
        done => done,
    }
}

/// How often what a count missed makes a volume larger: maps of extents of files in many pieces, and
/// inode tables that do not fit between what has its place.
const MOST_FITTINGS: u64 = 20;

/// The smallest volume for a tree, in blocks of a size that is given.
fn fit<'a>(options: &Options, tree: &'a Tree, free_bytes: u64) -> Result<Plan<'a>> {
    let mut missed = 0;
    loop {
        let (layout, needs) = fitting_layout(options, tree, free_bytes, missed)?;
        match place(layout, tree, needs) {
            Err(Error::NoBlocks { .. } | Error::NoTables) if missed < 1 << MOST_FITTINGS => {
                missed = (missed * 2).max(1);
            }
            done => return done,
        }
    }
}

/// Lays out a volume of `size_bytes` for the tree. Where it is not said how many inodes there are,
/// there are as many as the tree needs.
///
/// # Errors
/// As [`Layout::new`] and [`Plan::new`].
pub fn sized<'a>(options: &Options, tree: &'a mut Tree, size_bytes: u64) -> Result<Plan<'a>> {
    with_lost_found(tree, options)?;
    values::move_out(&Layout::new(options, size_bytes)?, tree);
    let tree = &*tree;
    with_roomy_blocks(options, |options| {
        let mut layout = Layout::new(options, size_bytes)?;
        let needs = measure(&layout, tree)?;
        let inodes = wanted_inodes(&needs).saturating_add(LOST_FOUND);
        if options.inodes == Inodes::Default && layout.super_.inodes < inodes {
            // Each group rounds its share down to a multiple of eight.
            let rounding = layout.super_.groups.saturating_mul(8);
            let inodes = Inodes::Count(inodes.saturating_add(rounding));
            layout = Layout::new(&Options { inodes, ..options.clone() }, size_bytes)?;
        }
        place(layout, tree, needs)
    })
}

fn fitting_layout(
    options: &Options,
    tree: &Tree,
    free_bytes: u64,
    missed: u64,
) -> Result<(Layout, Needs)> {
    let block_bytes = u64::from(options.block_bytes.unwrap_or(1024));
    let mut options = options.clone();
    // What a tree needs depends on the sizes of blocks and inodes and on nothing else.
    let any = Options { inodes: Inodes::Default, ..options.clone() };
    let needs = measure(&Layout::new(&any, ANY_SIZE_BYTES)?, tree)?;
    let inodes = wanted_inodes(&needs) + LOST_FOUND;
    let ratio = super::layout::default_ratio(needs.blocks.saturating_mul(block_bytes));
    // Free room wants inodes, too, where it is not said how many.
    let spare = match options.inodes {
        Inodes::Default => narrow(free_bytes / u64::from(ratio)),
        _ => 0,
    };
    let inodes = inodes.saturating_add(spare);
    let tables = u64::from(inodes) * u64::from(options.inode_bytes) / block_bytes;
    // Sizes that mappings of pages like.
    let step = (4096 / block_bytes).max(1);
    let mut blocks = (needs.blocks + tables).max(64).next_multiple_of(step);
    if options.compatible.contains(Compatible::HAS_JOURNAL) {
        // It was asked for.
        blocks = blocks.max(journal::LEAST_VOLUME);
    }
    loop {
        let layout = match Layout::new(&options, blocks.saturating_mul(block_bytes)) {
            Ok(layout) => layout,
            Err(Error::TooSmall { .. } | Error::TooManyInodes(_) | Error::LargeJournal(_)) => {
                blocks += blocks.div_ceil(64).next_multiple_of(step);
                continue;
            }
            Err(error) => return Err(error),
        };
        let super_ = &layout.super_;
        if super_.inodes < inodes {
            match options.inodes {
                Inodes::Count(count) if count < inodes => return Err(no_inodes(&layout, &needs)),
                // Rounded down: ask for a few more.
                Inodes::Count(count) => options.inodes = Inodes::Count(count.saturating_add(8)),
                Inodes::PerBytes(_) => blocks += blocks.div_ceil(64).next_multiple_of(step),
                // More than this size would get: as many as the tree has.
                Inodes::Default => options.inodes = Inodes::Count(inodes),
            }
            continue;
        }
        let spare = free_bytes.div_ceil(block_bytes);
        let reserved = if free_bytes > 0 { super_.reserved_blocks } else { 0 };
        let all = needs.blocks.saturating_add(needs.hidden_blocks(&layout)).saturating_add(missed);
        let wanted = all.saturating_add(spare).saturating_add(reserved);
        let Some(missing) = wanted.checked_sub(super_.free_blocks).filter(|it| *it > 0) else {
            return Ok((layout, needs));
        };
        blocks = blocks.saturating_add(missing.next_multiple_of(step));
    }
}

/// Inodes beyond the reserved ones and lost+found.
fn wanted_inodes(needs: &Needs) -> u32 {
    narrow(needs.placed.len() as u64).saturating_sub(2).saturating_add(needs.inodes)
}

fn no_inodes(layout: &Layout, needs: &Needs) -> Error {
    Error::NoInodes {
        needed: wanted_inodes(needs).into(),
        free: layout.super_.inodes.saturating_sub(LOST_FOUND).into(),
    }
}

impl<'a> Plan<'a> {
    /// Places a tree on a layout.
    ///
    /// # Errors
    /// [`Error::NoBlocks`] and [`Error::NoInodes`] before anything is written, and
    /// [`Error::Tree`] for what ext2 cannot hold.
    pub fn new(layout: Layout, tree: &'a mut Tree) -> Result<Self> {
        with_lost_found(tree, &layout.options)?;
        values::move_out(&layout, tree);
        let needs = measure(&layout, tree)?;
        place(layout, tree, needs)
    }
}

/// What a node's contents are made of, as blocks of the file.
pub(super) fn data_runs(what: &What, block_bytes: u32) -> Vec<(u32, u32)> {
    let mut runs: Vec<(u32, u32)> = vec![];
    match what {
        What::File { size_bytes, data, .. } => {
            for (start, end) in data {
                let (mut from, mut blocks) =
                    map::to_blocks(*start, (*end).min(*size_bytes), block_bytes);
                // Two pieces of data may share a block.
                if let Some((last, count)) = runs.last()
                    && let Some(overlap) = (last + count).checked_sub(from)
                {
                    from += overlap.min(blocks);
                    blocks = blocks.saturating_sub(overlap);
                }
                if blocks > 0 {
                    runs.push((from, blocks));
                }
            }
        }
        What::Symlink(target) if target_pointers(target).is_none() => runs.push((0, 1)),
        _ => {}
    }
    runs
}

pub(super) fn style(layout: &Layout) -> Style {
    let options = &layout.options;
    let version = options.hash_version;
    let seed = options.hash_seed.as_chunks::<4>().0;
    let mut words = seed.iter().map(|word| u32::from_le_bytes(*word));
    let seed = Seed::new(std::array::from_fn(|_| words.next().unwrap_or(0)));
    let index = options.compatible.contains(Compatible::DIR_INDEX);
    Style {
        shape: Shape {
            block_bytes: layout.super_.block_bytes,
            filetype: options.incompatible.contains(Incompatible::FILETYPE),
            sums: layout.super_.checksum_seed.is_some(),
        },
        index: index
            .then(|| Hash::of_version(version, false, seed))
            .flatten()
            .map(|hash| (hash, version)),
        levels: 1 + u8::from(options.incompatible.contains(Incompatible::LARGEDIR)),
    }
}

/// The blocks of a directory, with the inodes it names.
pub(super) fn directory_of(
    tree: &Tree,
    dir: NodeId,
    (own, parent): (u32, u32),
    inodes: &[u32],
    style: Style,
) -> directory::Built {
    directory::build(own, parent, &names_of(tree, dir, inodes), style)
}

/// The names in a directory, with the inodes that they name.
pub(super) fn names_of<'a>(tree: &'a Tree, dir: NodeId, inodes: &[u32]) -> Vec<Name<'a>> {
    let name = |(name, id): (&'a [u8], NodeId)| Name {
        name,
        inode: inodes.get(index(id.0.into())).copied().unwrap_or(0),
        kind: tree.node(id).what.kind(),
    };
    tree.names(dir).map(name).collect()
}

fn place(layout: Layout, tree: &Tree, needs: Needs) -> Result<Plan<'_>> {
    let free = layout.super_.free_blocks;
    let block_bytes = layout.super_.block_bytes;
    let inodes_left = wanted_inodes(&needs);
    if inodes_left > layout.super_.inodes.saturating_sub(LOST_FOUND) {
        return Err(no_inodes(&layout, &needs));
    }
    let hidden_blocks = needs.hidden_blocks(&layout);
    let needed = needs.blocks + hidden_blocks;
    // Asked again where it cannot happen: no panic hangs on counting right.
    let too_few = || Error::NoBlocks { needed, free, block_bytes };
    if needed > free {
        return Err(too_few());
    }
    let Needs { mut placed, blocks: in_tree, quotas, .. } = needs;
    let (tables, space) = tables::place(&layout)?;
    let mut placing = Placing {
        blocks: Cursor::new(&layout, space, in_tree),
        inodes_left,
        next_inode: LOST_FOUND + 1,
        layout: &layout,
        tree,
        runs: vec![],
        shared: vec![],
        open: HashMap::new(),
        inodes: vec![0; tree.len()],
        reserve_map: 0,
        guard: 0,
        quotas,
        hidden: vec![],
    };
    for (nth, one) in placed.iter_mut().enumerate() {
        placing.place(nth, one).ok_or_else(too_few)?;
        if one.inode == LOST_FOUND {
            placing.hidden().ok_or_else(too_few)?;
        }
    }
    let Placing { blocks, runs, shared, inodes, reserve_map, guard, hidden, .. } = placing;
    let space = blocks.space;
    Ok(Plan {
        tree,
        placed,
        runs,
        shared,
        inodes,
        reserve_map,
        guard,
        hidden,
        tables,
        space,
        style: style(&layout),
        data_bytes: in_tree * u64::from(block_bytes),
        hidden_blocks,
        layout,
    })
}

struct Placing<'a> {
    layout: &'a Layout,
    tree: &'a Tree,
    blocks: Cursor<'a>,
    next_inode: u32,
    inodes_left: u32,
    runs: Vec<Blocks>,
    shared: Vec<Shared>,
    /// The block of each list of attributes that has room for another owner.
    open: HashMap<&'a [NewAttribute], usize>,
    inodes: Vec<u32>,
    reserve_map: u64,
    guard: u64,
    quotas: Vec<(Quota, u64)>,
    hidden: Vec<Hidden>,
}

impl<'a> Placing<'a> {
    /// Places what no name leads to, as mke2fs does: right after root and lost+found.
    fn hidden(&mut self) -> Option<()> {
        let super_ = &self.layout.super_;
        if self.layout.options.compatible.contains(Compatible::RESIZE_INODE) {
            let own = self.layout.copies(0) + 2 + u64::from(super_.inode_table_blocks());
            let goal = u64::from(super_.first_data_block) + own;
            self.reserve_map = self.one_from(goal)?;
        }
        if let Some(sizes) = self.layout.journal {
            let goal = journal::goal(self.layout, &self.blocks.space);
            self.hide(Purpose::Journal(sizes), journal::INODE, sizes.all(), goal)?;
        }
        if self.layout.options.incompatible.contains(Incompatible::MMP) {
            self.guard = self.one_from(0)?;
        }
        for (kind, bytes) in std::mem::take(&mut self.quotas) {
            let inode = match kind {
                Quota::User => quota::USERS,
                Quota::Group => quota::GROUPS,
                Quota::Project => self.hidden_inode(),
            };
            self.hide(Purpose::Quota(kind), inode, self.layout.blocks_of(bytes), 0)?;
            if let Some(hidden) = self.hidden.last_mut() {
                hidden.size_bytes = Some(bytes);
            }
        }
        if let Some(blocks) = self.layout.orphan_blocks() {
            let inode = self.hidden_inode();
            self.hide(Purpose::Orphans, inode, blocks, 0)?;
        }
        for (nth, value) in self.tree.values.iter().enumerate() {
            let (inode, bytes) = (self.hidden_inode(), value.bytes.len() as u64);
            self.hide(Purpose::Value(nth), inode, self.layout.blocks_of(bytes), 0)?;
            if let Some(hidden) = self.hidden.last_mut() {
                hidden.size_bytes = Some(bytes);
            }
        }
        self.blocks.start();
        Some(())
    }

    /// The first free block from `goal` on, in a cluster of its own.
    fn one_from(&mut self, goal: u64) -> Option<u64> {
        Some(self.blocks.take_from(goal, self.layout.ratio())?.first()?.0)
    }

    /// The next inode, for a file that is not in the tree.
    fn hidden_inode(&mut self) -> u32 {
        self.next_inode += 1;
        self.inodes_left = self.inodes_left.saturating_sub(1);
        self.next_inode - 1
    }

    fn hide(&mut self, purpose: Purpose, inode: u32, blocks: u32, goal: u64) -> Option<()> {
        let runs = [(0, blocks)];
        let mut count = self.layout.in_clusters(blocks.into());
        if !self.layout.options.extents() {
            count += self.layout.map_blocks(&runs);
        }
        let mut places = self.blocks.take_from(goal, count)?;
        let mut owned = count;
        if matches!(purpose, Purpose::Quota(_)) && self.layout.ratio() == 1 {
            let block_bytes = self.layout.super_.block_bytes;
            places = hidden::in_order_of_quotas(places, blocks, block_bytes);
        }
        if self.layout.options.extents() {
            let (extents, _) = build_extents::extents(&runs, &places)?;
            let nodes = build_extents::nodes(extents.len() as u64, self.layout.super_.block_bytes);
            // Where mke2fs puts them: just before the file, if they have room there.
            let before = places.first().map_or(goal, |first| first.0.saturating_sub(1));
            let ratio = self.layout.ratio();
            owned += nodes * ratio;
            let of_nodes = self.blocks.take_from(before, nodes * ratio)?;
            // What the last cluster has beyond the file's end is no node's.
            places = cut(places, blocks.into());
            places.extend(firsts(&of_nodes, ratio));
        }
        self.hidden.push(Hidden { purpose, inode, blocks, size_bytes: None, owned, places });
        Some(())
    }

    fn place(&mut self, nth: usize, placed: &mut Placed) -> Option<()> {
        let node = self.tree.node(NodeId(placed.node));
        placed.inode = match nth {
            0 => crate::InodeNumber::ROOT.0,
            1 => LOST_FOUND,
            _ => {
                if matches!(node.what, What::Directory) {
                    self.meet();
                }
                self.inodes_left = self.inodes_left.saturating_sub(1);
                self.next_inode += 1;
                self.next_inode - 1
            }
        };
        *self.inodes.get_mut(index(placed.node.into()))? = placed.inode;
        if node.what.kind() == FileType::File {
            self.blocks.keep_together(placed.blocks);
        }
        let first = self.runs.len();
        self.blocks.needed = self.blocks.needed.saturating_sub(placed.blocks);
        if self.layout.options.extents() {
            let ratio = self.layout.ratio();
            let data = self.data(node, placed)?;
            let nodes = self.nodes(&data, first)?;
            let mut of_nodes = vec![];
            self.blocks.take(nodes * ratio, &mut of_nodes)?;
            self.runs.extend(firsts(&of_nodes, ratio));
            let owned: u64 = clusters(&data, ratio).iter().map(|run| run.1 * ratio).sum();
            placed.blocks = owned + nodes * ratio;
        } else {
            self.blocks.take(placed.blocks, &mut self.runs)?;
        }
        placed.runs = (narrow(first as u64), narrow((self.runs.len() - first) as u64));
        let rest = node.attributes.get(index(placed.in_body.into())..)?;
        if !rest.is_empty() {
            placed.attribute_block = self.share(rest)?;
        }
        Some(())
    }

    /// Takes the blocks for what a node holds; which blocks of the file those are.
    fn data(&mut self, node: &Node, placed: &Placed) -> Option<Vec<(u32, u32)>> {
        let runs = match &node.what {
            _ if placed.is_inside => vec![],
            What::Directory => vec![(0, narrow(placed.data))],
            what => data_runs(what, self.layout.super_.block_bytes),
        };
        let ratio = self.layout.ratio();
        if ratio == 1 {
            self.blocks.take(placed.data, &mut self.runs)?;
            return Some(runs);
        }
        let touched = clusters(&runs, ratio);
        let mut taken = vec![];
        self.blocks.take(touched.iter().map(|run| run.1 * ratio).sum(), &mut taken)?;
        self.runs.extend(within(&runs, &touched, &taken, ratio)?);
        Some(runs)
    }

    /// Nodes that a map needs whose data is in the runs from `first` on.
    fn nodes(&self, data: &[(u32, u32)], first: usize) -> Option<u64> {
        let (extents, _) = build_extents::extents(data, self.runs.get(first..)?)?;
        Some(build_extents::nodes(extents.len() as u64, self.layout.super_.block_bytes))
    }

    /// The block with these attributes.
    fn share(&mut self, attributes: &'a [NewAttribute]) -> Option<u64> {
        if let Some(shared) = self.open.get(attributes).and_then(|nth| self.shared.get_mut(*nth))
            && shared.owners < MOST_SHARERS
        {
            shared.owners += 1;
            return Some(shared.at);
        }
        let mut runs = vec![];
        let ratio = self.layout.ratio();
        self.blocks.needed = self.blocks.needed.saturating_sub(ratio);
        self.blocks.take(ratio, &mut runs)?;
        let (at, _) = *runs.first()?;
        self.open.insert(attributes, self.shared.len());
        self.shared.push(Shared { attributes: attributes.to_vec(), at, owners: 1 });
        Some(at)
    }

    /// Brings the cursor that is in an earlier flex group to that of the other.
    fn meet(&mut self) {
        let flex = self.layout.options.flex();
        let per_flex = self.layout.super_.inodes_per_group.saturating_mul(flex);
        let inode_flex = (self.next_inode - 1) / per_flex;
        let block_flex = self.layout.group_of(self.blocks.next) / flex;
        if block_flex > inode_flex {
            let target = block_flex.saturating_mul(per_flex).saturating_add(1);
            let left = self.layout.super_.inodes.saturating_sub(target - 1);
            if left >= self.inodes_left {
                self.next_inode = target;
            }
        } else if inode_flex > block_flex {
            self.blocks.go_to(self.layout.group_start(inode_flex.saturating_mul(flex)));
        }
    }
}
