//! Names in directories: found, put in, taken out.
//!
//! ```text
//!   seek ── Found ─▶ take_out, point_elsewhere
//!        └─ Place ─▶ put_in: into free room · behind the end · by splitting a leaf of the tree
//! ```
//! Law 1: `seek` finds out everything without changing anything; what a name needs is known,
//! and there, before the first block changes.
//! Law 2: a tree that makes no sense is left alone: its directory goes on as a plain list.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with blocks of a directory, which are fewer than 2^32"
)]

use draconis_exchange::contract::FileType;
use draconis_exchange::omission::InjectedFault;

use crate::blocks::role::Role;
use crate::commit::batch::Intent;
use crate::dir::edit::index::{self, Level};
use crate::dir::edit::{self, Found, Room, SlotSearch};
use crate::dir::names::{self, Wanted};
use crate::format::dirent::Shape;
use crate::format::features::{Compatible, Incompatible};
use crate::format::hash::Hash;
use crate::format::htree::{Entry, Index, Root};
use crate::format::inode::{Inode, flags};
use crate::format::leaf;
use crate::format::slot::Stamp;
use crate::map::edit::Taking;
use crate::transaction::Transaction;
use crate::{Error, FileBlock, FileId, FsBlock, InodeNumber, Result};

/// Blocks that one more name can take at most: a leaf, two nodes, and indirect blocks.
pub(crate) const NAME_BLOCKS: u64 = 8;
/// Those of them that are the directory's own: of a tree, and of a list, which may become one.
const TREE_BLOCKS: u64 = 3;
const LIST_BLOCKS: u64 = 2;
/// Blocks of names that one hash may fill.
const MOST_BLOCKS: usize = 4096;
/// Names put in before a tree has had all the splits that it can need.
const MOST_SPLITS: usize = 6;

/// Where a name is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirentLocation {
    pub(crate) site: DirentContainer,
    pub(crate) found: Found,
}

/// What holds names.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DirentContainer {
    /// A block of the directory.
    Block(FsBlock),
    /// A part of a directory that is inside its inode.
    Inside(usize),
    /// The number of the parent of such a directory.
    Parent,
}

/// Where a name can be put.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// Into blocks, once the directory is no longer inside its inode.
    Inside,
    /// Into this block.
    Room(FsBlock, Room),
    /// Into a block of a directory whose tree makes no sense: it must be a list first.
    Listed,
    /// Into a new block behind the others.
    Behind,
    /// Into a leaf of the tree that must be split first.
    Leaf(Descent),
}

/// The path down a hash tree.
#[derive(Clone, Debug)]
pub(crate) struct Descent {
    dir: FileId,
    hash: Hash,
    levels: u8,
    of_name: u32,
    /// From the root down: where each index block is, and which entry leads on.
    steps: Vec<Step>,
    leaf: (u32, FsBlock),
}

#[derive(Clone, Copy, Debug)]
struct Step {
    block: FsBlock,
    nth: usize,
    level: Level,
}

/// Which names are meant by one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum NameMatch {
    /// The very same.
    Same,
    /// Those, too, that fold to the same.
    Folded,
}

/// The answer of [`Transaction::seek`].
pub(crate) type NameLookup = std::result::Result<DirentLocation, Place>;

impl Place {
    /// Blocks that it may take.
    pub(crate) const fn needs(&self) -> u64 {
        match self {
            Self::Room(..) | Self::Listed => 0,
            Self::Inside | Self::Behind | Self::Leaf(_) => NAME_BLOCKS,
        }
    }
}

impl Transaction<'_> {
    fn has_kinds(&self) -> bool {
        self.volume.super_.incompatible.contains(Incompatible::FILETYPE)
    }

    /// How blocks of directories look.
    pub(crate) fn shape(&self) -> Shape {
        let super_ = &self.volume.super_;
        let sums = super_.checksum_seed.is_some();
        Shape { block_bytes: super_.block_bytes, filetype: self.has_kinds(), sums }
    }

    /// The part of a block that holds names.
    fn names_of<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        leaf::names(bytes, self.volume.super_.checksum_seed.is_some())
    }

    fn large_dir(&self) -> bool {
        self.volume.super_.incompatible.contains(Incompatible::LARGEDIR)
    }

    /// A block of a directory; `None` in a hole.
    pub(crate) fn names_in(&self, dir: &Inode, nth: u32) -> Result<Option<(FsBlock, crate::Data)>> {
        let of_dir = |error: Error| error.of_inode(dir.number);
        let Some(block) = self.mapped(dir.number, nth).map_err(of_dir)? else { return Ok(None) };
        Ok(Some((block, self.block(block, Role::Directory(dir.id())).map_err(of_dir)?)))
    }

    /// Looks for a name, and if it is not there, for a place for it.
    pub(crate) fn seek(&self, dir: &Inode, name: &[u8]) -> Result<NameLookup> {
        if name.len() > 255 {
            return Err(Error::NameTooLong);
        }
        if name.is_empty() || name.contains(&b'/') || name.contains(&0) {
            return Err(Error::Misuse("not a name"));
        }
        let wanted = Wanted::of(self.volume, dir, name)?;
        let same = self.seek_as(dir, &wanted, NameMatch::Same)?;
        if same.is_ok() || !wanted.folds() {
            return Ok(same);
        }
        let alike = self.seek_as(dir, &wanted, NameMatch::Folded)?;
        if alike.is_ok() || !(self.volume.has_tree(dir) && wanted.may_be_anywhere(self.volume)) {
            return Ok(alike);
        }
        let anywhere = self.seek_in_list(dir, &wanted, NameMatch::Folded)?;
        Ok(if anywhere.is_ok() { anywhere } else { alike })
    }

    fn seek_as(&self, dir: &Inode, wanted: &Wanted<'_>, like: NameMatch) -> Result<NameLookup> {
        if dir.is_inline() {
            return self.seek_inside(dir, wanted, like);
        }
        let dots = matches!(wanted.name(), b"." | b"..");
        if self.volume.has_tree(dir)
            && !dots
            && let Some(hashed) = wanted.hashed()
        {
            match self.seek_in_tree(dir, wanted, hashed, like) {
                Err(Error::Corrupt { .. }) => {}
                done => return done,
            }
        }
        self.seek_in_list(dir, wanted, like)
    }

    /// Looks for a name in one block or part.
    fn seek_among(&self, names: &[u8], wanted: &Wanted<'_>, like: NameMatch) -> Result<SlotSearch> {
        let is =
            |name: &[u8]| wanted.is(name) || like == NameMatch::Folded && wanted.folds_to(name);
        edit::seek_by(names, self.has_kinds(), wanted.name().len(), is)
    }

    fn seek_inside(&self, dir: &Inode, wanted: &Wanted<'_>, like: NameMatch) -> Result<NameLookup> {
        for (nth, part) in self.inside(dir)?.parts().iter().enumerate() {
            let sought = self.seek_among(part.entries, wanted, like);
            if let SlotSearch::Found(found) = sought.map_err(|error| error.of_inode(dir.number))? {
                return Ok(Ok(DirentLocation { site: DirentContainer::Inside(nth), found }));
            }
        }
        Ok(Err(Place::Inside))
    }

    fn seek_in_list(
        &self,
        dir: &Inode,
        wanted: &Wanted<'_>,
        like: NameMatch,
    ) -> Result<NameLookup> {
        let count = self.volume.directory_blocks(dir);
        let tree = self.volume.has_tree(dir);
        let hint = self.writer.hints.get(&dir.number.0).copied().unwrap_or(0).min(count);
        let mut place = None;
        for nth in (hint..count).chain(0..hint) {
            let Some((block, bytes)) = self.names_in(dir, nth)? else { continue };
            let sought = self.seek_among(self.names_of(&bytes), wanted, like);
            match sought.map_err(|error| error.in_block(block).of_inode(dir.number))? {
                SlotSearch::Found(found) => {
                    return Ok(Ok(DirentLocation { site: DirentContainer::Block(block), found }));
                }
                // In the root of a tree there is room that belongs to the index.
                SlotSearch::Room(room) if !tree => {
                    place.get_or_insert(Place::Room(block, room));
                }
                SlotSearch::Room(_) if nth > 0 => drop(place.get_or_insert(Place::Listed)),
                SlotSearch::Room(_) | SlotSearch::Full => {}
            }
        }
        Ok(Err(place.unwrap_or(Place::Behind)))
    }

    fn tree_block(&self, dir: &Inode, nth: FileBlock) -> Result<(FsBlock, crate::Data)> {
        let wrong = Error::corrupt("hash tree index").of_inode(dir.number);
        if nth.0 == 0 || nth.0 >= self.volume.directory_blocks(dir) {
            return Err(wrong);
        }
        self.names_in(dir, nth.0)?.ok_or(wrong)
    }

    fn seek_in_tree(
        &self,
        dir: &Inode,
        wanted: &Wanted<'_>,
        hashed: &[u8],
        like: NameMatch,
    ) -> Result<NameLookup> {
        let super_ = &self.volume.super_;
        let wrong = Error::corrupt("hash tree index").of_inode(dir.number);
        let (root_at, root_bytes) = self.names_in(dir, 0)?.ok_or(wrong.clone())?;
        let (root, top) = Root::check(&root_bytes, super_.hash_unsigned, super_.hash_seed)?;
        let of_name = root.hash.of(hashed);
        let mut descent = Descent {
            dir: dir.id(),
            hash: root.hash,
            levels: root.levels,
            of_name,
            steps: vec![Step { block: root_at, nth: top.find(of_name), level: Level::Root }],
            leaf: (0, FsBlock(0)),
        };
        let mut place = None;
        for turn in 0..MOST_BLOCKS {
            let hash = if turn == 0 { of_name } else { 0 };
            let bytes = self.down(dir, &mut descent, hash)?;
            let block = descent.leaf.1;
            let sought = self.seek_among(self.names_of(&bytes), wanted, like);
            match sought.map_err(|error| error.in_block(block).of_inode(dir.number))? {
                SlotSearch::Found(found) => {
                    return Ok(Ok(DirentLocation { site: DirentContainer::Block(block), found }));
                }
                SlotSearch::Room(room) => drop(place.get_or_insert(Place::Room(block, room))),
                SlotSearch::Full if turn == 0 => {
                    if !self.can_split(&descent)? {
                        return Err(Error::NoSpace);
                    }
                    place = Some(Place::Leaf(descent.clone()));
                }
                SlotSearch::Full => {}
            }
            if !self.on(&mut descent)? {
                return place.map(Err).ok_or(wrong);
            }
        }
        Err(wrong)
    }

    /// Walks down from the last step to a leaf.
    fn down(&self, dir: &Inode, descent: &mut Descent, hash: u32) -> Result<crate::Data> {
        let wrong = Error::corrupt("hash tree index").of_inode(dir.number);
        loop {
            let step = *descent.steps.last().ok_or(wrong.clone())?;
            let bytes = self.block(step.block, Role::Directory(dir.id()))?;
            let next = self.index(step.level, &bytes)?.block(step.nth).ok_or(wrong.clone())?;
            let (block, bytes) = self.tree_block(dir, next)?;
            if descent.steps.len() > usize::from(descent.levels) {
                descent.leaf = (next.0, block);
                return Ok(bytes);
            }
            let nth = Index::of_node(&bytes)?.find(hash);
            descent.steps.push(Step { block, nth, level: Level::Node });
        }
    }

    fn index<'a>(&self, level: Level, bytes: &'a [u8]) -> Result<Index<'a>> {
        let super_ = &self.volume.super_;
        match level {
            Level::Root => {
                Root::check(bytes, super_.hash_unsigned, super_.hash_seed).map(|(_, index)| index)
            }
            Level::Node => Index::of_node(bytes),
        }
    }

    /// Moves on to the next leaf, if names with this hash may go on there.
    fn on(&self, descent: &mut Descent) -> Result<bool> {
        while let Some(step) = descent.steps.last_mut() {
            let bytes = self.block(step.block, Role::Directory(descent.dir))?;
            let index = match step.level {
                Level::Root => {
                    let super_ = &self.volume.super_;
                    Root::check(&bytes, super_.hash_unsigned, super_.hash_seed)?.1
                }
                Level::Node => Index::of_node(&bytes)?,
            };
            if let Some(next) = index.continues(step.nth, descent.of_name) {
                step.nth = next;
                return Ok(true);
            }
            if !index.is_last(step.nth) {
                return Ok(false);
            }
            descent.steps.pop();
        }
        Ok(false)
    }

    /// Whether the tree can take one more leaf.
    fn can_split(&self, descent: &Descent) -> Result<bool> {
        if descent.levels < index::most_levels(self.large_dir()) {
            return Ok(true);
        }
        for step in &descent.steps {
            let bytes = self.block(step.block, Role::Directory(descent.dir))?;
            if index::has_room(&bytes, step.level)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Puts a name in where [`Transaction::seek`] said; there must be [`Place::needs`] blocks.
    pub(crate) fn put_in(
        &mut self,
        dir: InodeNumber,
        place: Place,
        name: &[u8],
        inode: InodeNumber,
        kind: FileType,
    ) -> Result<()> {
        self.record(Intent::Named { dir });
        let mut place = place;
        for _ in 0..MOST_SPLITS {
            match place {
                Place::Room(block, room) => {
                    let Shape { filetype, sums, .. } = self.shape();
                    return self.change(block, self.directory_role(dir)?, |bytes| {
                        let names = leaf::names_mut(bytes, sums);
                        edit::insert(names, &room, inode, kind, name, filetype)
                    })?;
                }
                Place::Inside => self.move_names_out(dir)?,
                Place::Listed => self.forget_tree(dir)?,
                Place::Behind => self.lengthen(dir)?,
                Place::Leaf(descent) => self.split(dir, &descent)?,
            }
            let node = self.directory(dir)?;
            place = match self.seek(&node, name)? {
                Err(place) => place,
                Ok(_) => return Err(Error::corrupt("directory: a name twice").of_inode(dir)),
            };
        }
        Err(Error::corrupt("hash tree").of_inode(dir))
    }

    /// Makes room in a directory that is a list: makes a tree of it, or puts an empty block
    /// behind the others.
    fn lengthen(&mut self, dir: InodeNumber) -> Result<()> {
        let node = self.directory(dir)?;
        let count = self.volume.directory_blocks(&node);
        let indexed = self.volume.super_.compatible.contains(Compatible::DIR_INDEX);
        if indexed
            && count == 1
            && !self.volume.has_tree(&node)
            && let Some((first, bytes)) = self.names_in(&node, 0)?
            && let Ok((root, leaf)) =
                index::make_indexed(&bytes, self.volume.super_.default_hash(), 1, self.shape())
        {
            let (_, block) = self.append_block(dir)?;
            self.put_fresh(block, self.directory_role(dir)?, leaf);
            self.change(first, self.directory_role(dir)?, |bytes| bytes.copy_from_slice(&root))?;
            return self.change_slot(dir, |it| it.set_flags(it.flags() | flags::INDEX));
        }
        // What was a tree and made no sense is none any more.
        if node.flags & flags::INDEX != 0 {
            self.forget_tree(dir)?;
        }
        let (nth, block) = self.append_block(dir)?;
        self.put_fresh(block, self.directory_role(dir)?, edit::empty(self.shape()));
        self.writer.hints.insert(dir.0, nth);
        Ok(())
    }

    fn forget_tree(&mut self, dir: InodeNumber) -> Result<()> {
        if self.shape().sums {
            // Its blocks would have to end in other ways.
            return Err(Error::corrupt("hash tree").of_inode(dir));
        }
        self.change_slot(dir, |it| it.set_flags(it.flags() & !flags::INDEX))
    }

    /// One more block behind the others of a directory.
    fn append_block(&mut self, dir: InodeNumber) -> Result<(u32, FsBlock)> {
        let node = self.directory(dir)?;
        let nth = self.volume.directory_blocks(&node);
        let (uid, _) = node.owner();
        let taking = Taking { grows: true, privileged: self.is_privileged(uid), unwritten: false };
        let all = self.map_blocks(dir, nth..nth + 1, taking)?;
        let run = all.first().filter(|run| run.fresh).ok_or(Error::corrupt("directory: size"))?;
        let bytes = u64::from(nth + 1) * u64::from(self.volume.super_.block_bytes);
        self.change_slot(dir, |it| it.set_size(bytes))?;
        self.forget_map(dir, nth, nth + 1);
        Ok((nth, run.at))
    }

    /// Splits the leaf at the end of a path, or what must be split before it can be.
    fn split(&mut self, dir: InodeNumber, descent: &Descent) -> Result<()> {
        let role = self.directory_role(dir)?;
        let mut full = None;
        // The lowest index block with room, and the full one below it.
        for (depth, step) in descent.steps.iter().enumerate().rev() {
            if index::has_room(&self.block(step.block, role)?, step.level)? {
                let Some(lower) = full else { return self.split_leaf(dir, descent, *step) };
                let lower: Step = lower;
                let split = index::split_node(&self.block(lower.block, role)?, self.shape())?;
                let (nth, block) = self.append_block(dir)?;
                self.put_fresh(block, role, split.high);
                self.change(lower.block, role, |bytes| bytes.copy_from_slice(&split.low))?;
                let entry = Entry { hash: split.hash, block: nth };
                let put = self.change(step.block, role, |bytes| {
                    index::insert(bytes, step.level, step.nth, entry)
                })??;
                return put.then_some(()).ok_or(Error::corrupt("hash tree index"));
            }
            full = Some(*step);
            if depth == 0 {
                let most = index::most_levels(self.large_dir());
                let nth = self.volume.directory_blocks(&*self.directory(dir)?);
                let (root, node) =
                    index::deepen(&self.block(step.block, role)?, nth, most, self.shape())?;
                let (_, block) = self.append_block(dir)?;
                self.put_fresh(block, role, node);
                return self.change(step.block, role, |bytes| bytes.copy_from_slice(&root));
            }
        }
        Err(Error::corrupt("hash tree").of_inode(dir))
    }

    fn split_leaf(&mut self, dir: InodeNumber, descent: &Descent, above: Step) -> Result<()> {
        let role = self.directory_role(dir)?;
        let old = self.block(descent.leaf.1, role)?;
        let shape = self.shape();
        let folds = names::is_folded(self.volume, &*self.directory(dir)?);
        let hash = |name: &[u8]| descent.hash.of(&names::hashed_of(folds, name));
        let halves = edit::split_by(self.names_of(&old), hash)?;
        let (nth, block) = self.append_block(dir)?;
        self.put_fresh(block, role, shape.whole(halves.high));
        self.change(descent.leaf.1, role, |bytes| {
            leaf::names_mut(bytes, shape.sums).copy_from_slice(&halves.low);
        })?;
        let entry = Entry { hash: halves.hash, block: nth };
        let put = self.change(above.block, role, |bytes| {
            index::insert(bytes, above.level, above.nth, entry)
        })??;
        put.then_some(()).ok_or(Error::corrupt("hash tree index").of_inode(dir))
    }

    /// Takes a name out.
    pub(crate) fn take_out(&mut self, dir: InodeNumber, spot: DirentLocation) -> Result<()> {
        self.record(Intent::Unnamed { dir });
        let sums = self.shape().sums;
        match spot.site {
            DirentContainer::Block(block) => {
                self.change(block, self.directory_role(dir)?, |bytes| {
                    edit::remove(leaf::names_mut(bytes, sums), &spot.found)
                })?
            }
            DirentContainer::Inside(nth) => {
                self.change_slot(dir, |it| edit::remove(it.names_inside(nth), &spot.found))?
            }
            DirentContainer::Parent => Err(Error::Misuse("`..` cannot be taken out")),
        }
    }

    /// Lets a name lead to another inode.
    pub(crate) fn point_elsewhere(
        &mut self,
        dir: InodeNumber,
        spot: DirentLocation,
        inode: InodeNumber,
        kind: FileType,
    ) -> Result<()> {
        self.record(Intent::Named { dir });
        let kinds = self.has_kinds();
        let set = |bytes: &mut [u8]| edit::set_inode(bytes, spot.found.at, inode, kind, kinds);
        match spot.site {
            DirentContainer::Block(block) => self.change(block, self.directory_role(dir)?, set)?,
            DirentContainer::Inside(nth) => {
                self.change_slot(dir, |it| set(it.names_inside(nth)))?
            }
            DirentContainer::Parent => self.change_slot(dir, |it| it.set_pointer(0, inode.0)),
        }
    }

    /// Whether a directory holds no names.
    pub(crate) fn is_empty(&self, dir: &Inode) -> Result<bool> {
        if dir.is_inline() {
            for part in self.inside(dir)?.parts() {
                let empty = edit::is_empty(part.entries, false);
                if !empty.map_err(|error| error.of_inode(dir.number))? {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
        for nth in 0..self.volume.directory_blocks(dir) {
            let Some((block, bytes)) = self.names_in(dir, nth)? else { continue };
            let empty = edit::is_empty(self.names_of(&bytes), nth == 0);
            if !empty.map_err(|error| error.in_block(block).of_inode(dir.number))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// What `..` of a directory names, and where it says so.
    pub(crate) fn parent(&self, dir: InodeNumber) -> Result<DirentLocation> {
        let node = self.directory(dir)?;
        if node.is_inline() {
            let inode = self.inside(&node)?.parent().map_err(|error| error.of_inode(dir))?;
            let kind = Some(FileType::Directory);
            let found = Found { at: 0, previous: None, inode, kind };
            return Ok(DirentLocation { site: DirentContainer::Parent, found });
        }
        let missing = Error::corrupt("directory: no `..`").of_inode(dir);
        let (block, bytes) = self.names_in(&node, 0)?.ok_or(missing.clone())?;
        let found = edit::find(&bytes, self.has_kinds(), b"..")?.ok_or(missing)?;
        Ok(DirentLocation { site: DirentContainer::Block(block), found })
    }

    /// The first block of a new directory.
    pub(crate) fn first_names(&self, own: InodeNumber, parent: InodeNumber) -> Vec<u8> {
        let mut block = crate::format::dirent::BlockWriter::new(self.shape());
        block.push(own.0, FileType::Directory, b".");
        block.push(parent.0, FileType::Directory, b"..");
        block.finish()
    }

    /// Blocks that a name which goes there may take at most, each of which can lie in a cluster of
    /// its own. What is left of the cluster that a directory ends in is the directory's already.
    pub(crate) fn blocks_of_name(&self, dir: InodeNumber, place: &Place) -> Result<u64> {
        let ratio = u64::from(self.cluster_blocks());
        match place {
            Place::Behind | Place::Leaf(_) if ratio > 1 => {
                let node = self.directory(dir)?;
                let count = self.volume.directory_blocks(&node);
                let left = u64::from(count).next_multiple_of(ratio) - u64::from(count);
                let own = if matches!(place, Place::Leaf(_)) { TREE_BLOCKS } else { LIST_BLOCKS };
                let clusters = own.saturating_sub(left).div_ceil(ratio);
                Ok(clusters + self.nodes_needed(dir, count)?)
            }
            place => Ok(place.needs()),
        }
    }

    /// Refuses what needs more blocks than are left; each may take a cluster of its own.
    pub(crate) fn need_blocks(&self, count: u64, privileged: bool) -> Result<()> {
        let count = count.saturating_mul(self.cluster_blocks().into());
        if self.available_now(privileged) < count { Err(Error::NoSpace) } else { Ok(()) }
    }

    pub(crate) fn stamp_directory(&mut self, dir: InodeNumber) -> Result<()> {
        if InjectedFault::DirectoryTimes.is_made() {
            return Ok(());
        }
        self.stamp(dir, &[Stamp::Modified, Stamp::Changed])
    }
}
