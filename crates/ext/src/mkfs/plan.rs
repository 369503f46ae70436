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

use std::collections::HashMap;

use draconis_exchange::contract::Kind;

use cursor::Cursor;

use super::hidden::{Hidden, Purpose};
use super::layout::Layout;
use super::tables::{self, Space, Tables};
use super::tree::{Node, NodeId, Tree, What};
use super::{Error, Inodes, Options, Result, journal};
use crate::dir::build::{self as directory, Name, Style};
use crate::format::dirent::Shape;
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::hash::{Hash, Seed};
use crate::format::inode::target_pointers;
use crate::format::xattr::{NewAttribute, block_room, body_room};
use crate::map::{build as map, build_extents};
use crate::units::{index, narrow};

/// The first inode that files can have; lost+found has it.
pub(super) const LOST_FOUND: u32 = 11;
/// Names that one inode can have.
const MOST_LINKS: u32 = 65_000;
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
    pub(super) hidden: Vec<Hidden>,
    /// Of each group.
    pub(super) tables: Vec<Tables>,
    /// What is left.
    pub(super) space: Space,
    pub(super) style: Style,
    data_bytes: u64,
}

/// What a tree needs before anything is placed.
#[derive(Clone)]
struct Needs {
    placed: Vec<Placed>,
    blocks: u64,
    /// Of files that are not in the tree.
    inodes: u32,
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
        self.layout.hidden_blocks() * u64::from(self.layout.super_.block_bytes)
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
    let mut options = options.clone();
    if options.block_bytes.is_none() {
        // By the size it will have, as if that had been given.
        options.block_bytes = Some(1024);
        let plan = fit(&options, tree, free_bytes)?;
        let block_bytes = super::layout::default_block_bytes(plan.layout.len_bytes());
        if block_bytes == 1024 {
            return Ok(plan);
        }
        options.block_bytes = Some(block_bytes);
    }
    fit(&options, tree, free_bytes)
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
        let all = needs.blocks.saturating_add(layout.hidden_blocks()).saturating_add(missed);
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
    let names: Vec<Name<'_>> = tree
        .names(dir)
        .map(|(name, id)| Name {
            name,
            inode: inodes.get(index(id.0.into())).copied().unwrap_or(0),
            kind: tree.node(id).what.kind(),
        })
        .collect();
    directory::build(own, parent, &names, style)
}

/// Walks the tree and counts what it needs.
fn measure(layout: &Layout, tree: &Tree) -> Result<Needs> {
    let mut walk = Measure {
        layout,
        tree,
        style: style(layout),
        lost_found: tree.lookup(NodeId::ROOT, b"lost+found"),
        needs: Needs { placed: vec![], blocks: 0, inodes: 0 },
        seen: vec![None; tree.len()],
        shared: HashMap::new(),
    };
    walk.add(NodeId::ROOT, NodeId::ROOT, 2)?;
    if let Some(id) = walk.lost_found {
        walk.add(id, NodeId::ROOT, 2)?;
    }
    if layout.options.compatible.contains(Compatible::ORPHAN_FILE) {
        walk.needs.inodes += 1;
    }
    let mut stack = vec![(NodeId::ROOT, NodeId::ROOT)];
    while let Some((dir, parent)) = stack.pop() {
        let below = walk.directory(dir, parent)?;
        stack.extend(below.into_iter().rev().map(|id| (id, dir)));
    }
    Ok(walk.needs)
}

struct Measure<'a> {
    layout: &'a Layout,
    tree: &'a Tree,
    style: Style,
    lost_found: Option<NodeId>,
    needs: Needs,
    /// By the number of a node, where among the placed it is.
    seen: Vec<Option<usize>>,
    /// Attributes in blocks of their own, and how many inodes have them.
    shared: HashMap<&'a [NewAttribute], u32>,
}

impl<'a> Measure<'a> {
    /// Counts a directory with all that is in it but directories, which are returned.
    fn directory(&mut self, dir: NodeId, parent: NodeId) -> Result<Vec<NodeId>> {
        if self.seen(dir).is_none() {
            self.add(dir, parent, 2)?;
        }
        let mut below = vec![];
        let tree = self.tree;
        for (_, id) in tree.names(dir) {
            if matches!(tree.node(id).what, What::Directory) {
                below.push(id);
            } else if self.seen(id).is_some() {
                self.more_links(id, 1)?;
            } else {
                self.add(id, dir, 1)?;
            }
        }
        self.more_links(dir, below.len())?;
        Ok(below)
    }

    fn seen(&self, id: NodeId) -> Option<usize> {
        self.seen.get(index(id.0.into())).copied().flatten()
    }

    fn more_links(&mut self, id: NodeId, more: usize) -> Result<()> {
        let Some(placed) = self.seen(id).and_then(|nth| self.needs.placed.get_mut(nth)) else {
            return Ok(());
        };
        placed.links = placed.links.saturating_add(narrow(more as u64));
        let countless = self.layout.options.read_only_compatible;
        let is_countless = matches!(self.tree.node(id).what, What::Directory)
            && countless.contains(ReadOnlyCompatible::DIR_NLINK);
        match placed.links > MOST_LINKS && !is_countless {
            true => Err(unfit(self.tree, id, "65000 links to a file or directory are possible")),
            false => Ok(()),
        }
    }

    fn add(&mut self, id: NodeId, parent: NodeId, links: u32) -> Result<()> {
        if let Some(seen) = self.seen.get_mut(index(id.0.into())) {
            *seen = Some(self.needs.placed.len());
        }
        let in_body = self.attributes(id)?;
        let (data, blocks) = self.contents(id)?;
        self.needs.blocks += blocks;
        self.needs.placed.push(Placed {
            node: id.0,
            parent: parent.0,
            links,
            data,
            blocks,
            in_body,
            ..Placed::default()
        });
        Ok(())
    }

    /// Counts the block that attributes beyond the inode's room need; how many it has room for.
    fn attributes(&mut self, id: NodeId) -> Result<u32> {
        let tree = self.tree;
        let all = &tree.node(id).attributes[..];
        if all.is_empty() {
            return Ok(0);
        }
        if !self.layout.options.compatible.contains(Compatible::EXT_ATTR) {
            return Err(unfit(tree, id, "extended attributes need the feature ext_attr (-O)"));
        }
        let fits = |list: &[NewAttribute], room: usize| {
            list.iter().map(NewAttribute::room_bytes).fold(0, usize::saturating_add) <= room
        };
        let body = body_room(self.layout.super_.inode_bytes);
        let mut in_body = all.len();
        while !all.get(..in_body).is_some_and(|list| fits(list, body)) {
            in_body -= 1;
        }
        let rest = all.get(in_body..).unwrap_or_default();
        if !fits(rest, block_room(self.layout.super_.block_bytes)) {
            return Err(unfit(tree, id, "its extended attributes do not fit in one block"));
        }
        if !rest.is_empty() {
            let owners = self.shared.entry(rest).or_insert(0);
            self.needs.blocks += u64::from(owners.is_multiple_of(MOST_SHARERS));
            *owners += 1;
        }
        Ok(narrow(in_body as u64))
    }

    /// Blocks for what a node holds, and with those of its map.
    fn contents(&self, id: NodeId) -> Result<(u64, u64)> {
        let what = &self.tree.node(id).what;
        let block_bytes = self.layout.super_.block_bytes;
        let runs = match what {
            What::Directory => vec![(0, self.directory_blocks(id))],
            What::Symlink(target) if target.is_empty() => {
                return Err(unfit(self.tree, id, "a symbolic link without a target"));
            }
            What::Symlink(target) if target.len() >= self.layout.block_len() => {
                return Err(unfit(self.tree, id, "the target is longer than a block"));
            }
            What::File { size_bytes, .. } if *size_bytes > self.most_bytes() => {
                return Err(unfit(self.tree, id, "too long for blocks of this size (-b)"));
            }
            what => data_runs(what, block_bytes),
        };
        let data: u64 = runs.iter().map(|run| u64::from(run.1)).sum();
        let blocks = data + self.layout.map_blocks(&runs);
        let huge = self.layout.options.read_only_compatible.contains(ReadOnlyCompatible::HUGE_FILE);
        let bits = if huge { 48 } else { 32 };
        // `i_blocks` counts sectors; one block may come for attributes.
        if (blocks + 1) * u64::from(block_bytes / 512) >= 1 << bits {
            let what = "more data than an inode can count; the feature huge_file helps (-O)";
            return Err(unfit(self.tree, id, what));
        }
        Ok((data, blocks))
    }

    /// How long a file can be.
    fn most_bytes(&self) -> u64 {
        let block_bytes = self.layout.super_.block_bytes;
        // The last number of a block of a file is kept for the end.
        let numbers = (u64::from(block_bytes) << 32) - u64::from(block_bytes);
        match self.layout.options.extents() {
            true => numbers,
            false => {
                let reach = crate::map::pointers::reach_blocks(block_bytes);
                (reach * u64::from(block_bytes)).min(numbers + u64::from(block_bytes) - 1)
            }
        }
    }

    fn directory_blocks(&self, id: NodeId) -> u32 {
        let built = directory_of(self.tree, id, (0, 0), &[], self.style);
        let blocks = built.bytes.len() / self.layout.block_len().max(1);
        let least = match Some(id) == self.lost_found && !built.indexed {
            true => self.layout.lost_found_blocks(),
            false => 1,
        };
        narrow((blocks as u64).max(least))
    }
}

fn unfit(tree: &Tree, id: NodeId, what: &str) -> Error {
    Error::Tree { path: tree.path(id), what: what.to_owned() }
}

fn place(layout: Layout, tree: &Tree, needs: Needs) -> Result<Plan<'_>> {
    let free = layout.super_.free_blocks;
    let block_bytes = layout.super_.block_bytes;
    let inodes_left = wanted_inodes(&needs);
    if inodes_left > layout.super_.inodes.saturating_sub(LOST_FOUND) {
        return Err(no_inodes(&layout, &needs));
    }
    let Needs { mut placed, blocks: in_tree, .. } = needs;
    let needed = in_tree + layout.hidden_blocks();
    // Asked again where it cannot happen: no panic hangs on counting right.
    let too_few = || Error::NoBlocks { needed, free, block_bytes };
    if needed > free {
        return Err(too_few());
    }
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
        hidden: vec![],
    };
    for (nth, one) in placed.iter_mut().enumerate() {
        placing.place(nth, one).ok_or_else(too_few)?;
        if one.inode == LOST_FOUND {
            placing.hidden().ok_or_else(too_few)?;
        }
    }
    let Placing { blocks, runs, shared, inodes, reserve_map, hidden, .. } = placing;
    let space = blocks.space;
    Ok(Plan {
        tree,
        placed,
        runs,
        shared,
        inodes,
        reserve_map,
        hidden,
        tables,
        space,
        style: style(&layout),
        data_bytes: in_tree * u64::from(block_bytes),
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
    hidden: Vec<Hidden>,
}

impl<'a> Placing<'a> {
    /// Places what no name leads to, as mke2fs does: right after root and lost+found.
    fn hidden(&mut self) -> Option<()> {
        let super_ = &self.layout.super_;
        if self.layout.options.compatible.contains(Compatible::RESIZE_INODE) {
            let own = self.layout.copies(0) + 2 + u64::from(super_.inode_table_blocks());
            let goal = u64::from(super_.first_data_block) + own;
            self.reserve_map = self.blocks.take_from(goal, 1)?.first()?.0;
        }
        if let Some(sizes) = self.layout.journal {
            let goal = journal::goal(self.layout, &self.blocks.space);
            self.hide(Purpose::Journal(sizes), journal::INODE, sizes.all(), goal)?;
        }
        if let Some(blocks) = self.layout.orphan_blocks() {
            self.hide(Purpose::Orphans, self.next_inode, blocks, 0)?;
            self.next_inode += 1;
            self.inodes_left = self.inodes_left.saturating_sub(1);
        }
        self.blocks.start();
        Some(())
    }

    fn hide(&mut self, purpose: Purpose, inode: u32, blocks: u32, goal: u64) -> Option<()> {
        let runs = [(0, blocks)];
        let mut count = u64::from(blocks);
        if !self.layout.options.extents() {
            count += self.layout.map_blocks(&runs);
        }
        let mut places = self.blocks.take_from(goal, count)?;
        if self.layout.options.extents() {
            let (extents, _) = build_extents::extents(&runs, &places)?;
            let nodes = build_extents::nodes(extents.len() as u64, self.layout.super_.block_bytes);
            // Where mke2fs puts them: just before the file, if they have room there.
            let before = places.first().map_or(goal, |first| first.0.saturating_sub(1));
            places.extend(self.blocks.take_from(before, nodes)?);
        }
        self.hidden.push(Hidden { purpose, inode, blocks, places });
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
        if node.what.kind() == Kind::File {
            self.blocks.keep_together(placed.blocks);
        }
        let first = self.runs.len();
        self.blocks.needed = self.blocks.needed.saturating_sub(placed.blocks);
        if self.layout.options.extents() {
            self.blocks.take(placed.data, &mut self.runs)?;
            let nodes = self.nodes(node, placed.data, first)?;
            self.blocks.take(nodes, &mut self.runs)?;
            placed.blocks = placed.data + nodes;
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

    /// Nodes that the map of a node needs whose data is in the runs from `first` on.
    fn nodes(&self, node: &Node, data: u64, first: usize) -> Option<u64> {
        let block_bytes = self.layout.super_.block_bytes;
        let runs = match &node.what {
            What::Directory => vec![(0, narrow(data))],
            what => data_runs(what, block_bytes),
        };
        let (extents, _) = build_extents::extents(&runs, self.runs.get(first..)?)?;
        Some(build_extents::nodes(extents.len() as u64, block_bytes))
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
        self.blocks.needed = self.blocks.needed.saturating_sub(1);
        self.blocks.take(1, &mut runs)?;
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
