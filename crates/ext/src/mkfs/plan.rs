//! Which inode and which blocks each node has.
//!
//! ```text
//!   order    dir, its files .. , then each directory below it, likewise
//!   inodes   ──────▶ rising          both cursors only move on; each waits for the other at the
//!   blocks   ──────▶ rising          start of a directory, if the volume has room to spare
//! ```
//! Law 1: a file is one run wherever a group has room for it; indirect blocks lie before the
//! data they lead to.
//! Law 2: space is skipped only while what is left holds everything that is to come.

use std::collections::HashMap;

use draconis_exchange::contract::Kind;

use super::layout::Layout;
use super::tree::{Node, NodeId, Tree, What};
use super::{Error, Inodes, Options, Result};
use crate::GroupNumber;
use crate::dir::build::{self as directory, Name, Style};
use crate::format::dirent::Shape;
use crate::format::features::{Compatible, Incompatible};
use crate::format::hash::{Hash, Seed};
use crate::format::inode::target_pointers;
use crate::format::xattr::{NewAttribute, block_room, body_room};
use crate::map::build as map;
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
pub(super) type Blocks = (u32, u32);

/// What a node has.
#[derive(Clone, Debug, Default)]
pub(super) struct Placed {
    pub(super) node: u32,
    pub(super) inode: u32,
    pub(super) parent: u32,
    pub(super) links: u32,
    /// Blocks for contents, indirect ones included.
    pub(super) blocks: u64,
    /// Of the plan's runs, where its own begin, and how many.
    pub(super) runs: (u32, u32),
    /// The block of its attributes, 0 for none.
    pub(super) attribute_block: u32,
    /// How many of its attributes are in the inode.
    pub(super) in_body: u32,
}

/// A block of attributes that inodes share.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    pub(super) attributes: Vec<NewAttribute>,
    pub(super) at: u32,
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
    pub(super) reserve_map: u32,
    /// Runs of blocks that are used, rising; without what a group's own tables take.
    pub(super) used: Vec<Blocks>,
    pub(super) style: Style,
    data_bytes: u64,
}

/// What a tree needs before anything is placed.
struct Needs {
    placed: Vec<Placed>,
    blocks: u64,
}

impl Plan<'_> {
    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Bytes of blocks that files, directories and links take.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
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
        let (small, needs) = fitting_layout(&options, tree, free_bytes)?;
        let block_bytes = super::layout::default_block_bytes(small.len_bytes());
        if block_bytes == 1024 {
            return place(small, tree, needs);
        }
        options.block_bytes = Some(block_bytes);
    }
    let (layout, needs) = fitting_layout(&options, tree, free_bytes)?;
    place(layout, tree, needs)
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

fn fitting_layout(options: &Options, tree: &Tree, free_bytes: u64) -> Result<(Layout, Needs)> {
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
    loop {
        let layout = match Layout::new(&options, blocks.saturating_mul(block_bytes)) {
            Ok(layout) => layout,
            Err(Error::TooSmall { .. } | Error::TooManyInodes(_)) => {
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
        let wanted = needs.blocks.saturating_add(spare).saturating_add(reserved);
        let Some(missing) = wanted.checked_sub(super_.free_blocks).filter(|it| *it > 0) else {
            return Ok((layout, needs));
        };
        blocks = blocks.saturating_add(missing.next_multiple_of(step));
    }
}

/// Inodes beyond the reserved ones and lost+found.
fn wanted_inodes(needs: &Needs) -> u32 {
    narrow(needs.placed.len() as u64).saturating_sub(2)
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
        needs: Needs { placed: vec![], blocks: 0 },
        seen: vec![None; tree.len()],
        shared: HashMap::new(),
    };
    walk.add(NodeId::ROOT, NodeId::ROOT, 2)?;
    if let Some(id) = walk.lost_found {
        walk.add(id, NodeId::ROOT, 2)?;
    }
    if layout.options.compatible.contains(Compatible::RESIZE_INODE) {
        walk.needs.blocks += 1;
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
        match placed.links > MOST_LINKS {
            true => Err(unfit(self.tree, id, "ext2 allows 65000 links to a file or directory")),
            false => Ok(()),
        }
    }

    fn add(&mut self, id: NodeId, parent: NodeId, links: u32) -> Result<()> {
        if let Some(seen) = self.seen.get_mut(index(id.0.into())) {
            *seen = Some(self.needs.placed.len());
        }
        let in_body = self.attributes(id)?;
        let blocks = self.contents(id)?;
        self.needs.blocks += blocks;
        self.needs.placed.push(Placed {
            node: id.0,
            parent: parent.0,
            links,
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

    /// Blocks for what a node holds, indirect ones included.
    fn contents(&self, id: NodeId) -> Result<u64> {
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
            What::File { size_bytes, .. }
                if *size_bytes
                    > crate::map::pointers::reach_blocks(block_bytes) * u64::from(block_bytes)
                    || *size_bytes >= u64::from(block_bytes) << 32 =>
            {
                return Err(unfit(self.tree, id, "too long for blocks of this size (-b)"));
            }
            what => data_runs(what, block_bytes),
        };
        let data: u64 = runs.iter().map(|run| u64::from(run.1)).sum();
        let blocks = data + map::indirect_blocks(&runs, block_bytes);
        // `i_blocks` counts sectors in 32 bits; one block may come for attributes.
        if (blocks + 1) * u64::from(block_bytes / 512) > u64::from(u32::MAX) {
            return Err(unfit(self.tree, id, "more data than an inode of ext2 can count"));
        }
        Ok(blocks)
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
    if wanted_inodes(&needs) > layout.super_.inodes.saturating_sub(LOST_FOUND) {
        return Err(no_inodes(&layout, &needs));
    }
    let inodes_left = wanted_inodes(&needs);
    let Needs { mut placed, blocks: needed } = needs;
    // Asked again where it cannot happen: no panic hangs on counting right.
    let too_few = || Error::NoBlocks { needed, free, block_bytes };
    if needed > free {
        return Err(too_few());
    }
    let mut placing = Placing {
        blocks: Cursor::new(&layout, needed),
        inodes_left,
        next_inode: LOST_FOUND + 1,
        layout: &layout,
        tree,
        runs: vec![],
        shared: vec![],
        open: HashMap::new(),
        inodes: vec![0; tree.len()],
        reserve_map: 0,
    };
    for (nth, one) in placed.iter_mut().enumerate() {
        placing.place(nth, one).ok_or_else(too_few)?;
        if one.inode == LOST_FOUND {
            placing.reserve_map().ok_or_else(too_few)?;
        }
    }
    let Placing { blocks, runs, shared, inodes, reserve_map, .. } = placing;
    let used = blocks.used;
    Ok(Plan {
        tree,
        placed,
        runs,
        shared,
        inodes,
        reserve_map,
        used,
        style: style(&layout),
        data_bytes: needed * u64::from(block_bytes),
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
    reserve_map: u32,
}

impl<'a> Placing<'a> {
    /// mke2fs takes this block right after those of root and lost+found.
    fn reserve_map(&mut self) -> Option<()> {
        if self.layout.options.compatible.contains(Compatible::RESIZE_INODE) {
            let mut runs = vec![];
            self.blocks.take(1, &mut runs)?;
            self.reserve_map = runs.first()?.0;
        }
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
        self.blocks.take(placed.blocks, &mut self.runs)?;
        placed.runs = (narrow(first as u64), narrow((self.runs.len() - first) as u64));
        let rest = node.attributes.get(index(placed.in_body.into())..)?;
        if !rest.is_empty() {
            placed.attribute_block = self.share(rest)?;
        }
        Some(())
    }

    /// The block with these attributes.
    fn share(&mut self, attributes: &'a [NewAttribute]) -> Option<u32> {
        if let Some(shared) = self.open.get(attributes).and_then(|nth| self.shared.get_mut(*nth))
            && shared.owners < MOST_SHARERS
        {
            shared.owners += 1;
            return Some(shared.at);
        }
        let mut runs = vec![];
        self.blocks.take(1, &mut runs)?;
        let (at, _) = *runs.first()?;
        self.open.insert(attributes, self.shared.len());
        self.shared.push(Shared { attributes: attributes.to_vec(), at, owners: 1 });
        Some(at)
    }

    /// Brings the cursor that is in an earlier group to the group of the other.
    fn meet(&mut self) {
        let per_group = self.layout.super_.inodes_per_group;
        let inode_group = (self.next_inode - 1) / per_group;
        let block_group = self.blocks.group;
        if block_group > inode_group {
            let target = block_group.saturating_mul(per_group).saturating_add(1);
            let left = self.layout.super_.inodes.saturating_sub(target - 1);
            if left >= self.inodes_left {
                self.next_inode = target;
            }
        } else if inode_group > block_group {
            self.blocks.go_to(inode_group);
        }
    }
}

/// Gives out blocks in rising order.
struct Cursor<'a> {
    layout: &'a Layout,
    group: u32,
    next: u64,
    /// Free blocks from here to the end.
    left: u64,
    /// Blocks that are yet to be given out.
    needed: u64,
    used: Vec<Blocks>,
}

impl<'a> Cursor<'a> {
    fn new(layout: &'a Layout, needed: u64) -> Self {
        let next = layout.data_start(0);
        Self { layout, group: 0, next, left: layout.super_.free_blocks, needed, used: vec![] }
    }

    fn room(&self) -> u64 {
        self.layout.group_end(self.group).saturating_sub(self.next)
    }

    fn next_group(&mut self) -> Option<()> {
        self.group += 1;
        if self.group >= self.layout.super_.groups {
            return None;
        }
        self.next = self.layout.data_start(self.group);
        Some(())
    }

    /// Moves to the next group if `blocks` are one run there and not here.
    fn keep_together(&mut self, blocks: u64) {
        let (room, next) = (self.room(), self.group + 1);
        if blocks <= room || next >= self.layout.super_.groups {
            return;
        }
        let there = self.layout.group_end(next).saturating_sub(self.layout.data_start(next));
        if blocks <= there && self.left.saturating_sub(room) >= self.needed {
            self.left -= room;
            let _ = self.next_group();
        }
    }

    /// Moves to a later group if there is room to spare.
    fn go_to(&mut self, group: u32) {
        let between = (self.group + 1..group)
            .map(|group| self.layout.group_end(group) - self.layout.data_start(group));
        let skipped = between.fold(self.room(), u64::saturating_add);
        if self.left.saturating_sub(skipped) >= self.needed {
            self.left -= skipped;
            self.group = group;
            self.next = self.layout.data_start(group);
        }
    }

    fn take(&mut self, mut blocks: u64, runs: &mut Vec<Blocks>) -> Option<()> {
        self.left = self.left.checked_sub(blocks)?;
        self.needed = self.needed.saturating_sub(blocks);
        while blocks > 0 {
            let count = blocks.min(self.room());
            if count == 0 {
                self.next_group()?;
                continue;
            }
            let run = (narrow(self.next), narrow(count));
            runs.push(run);
            match self.used.last_mut() {
                Some((start, len)) if *start + *len == run.0 => *len += run.1,
                _ => self.used.push(run),
            }
            self.next += count;
            blocks -= count;
        }
        Some(())
    }
}

/// Whether a group has a copy of the superblock.
pub(super) fn has_copy(layout: &Layout, group: u32) -> bool {
    layout.super_.has_superblock(GroupNumber(group))
}
