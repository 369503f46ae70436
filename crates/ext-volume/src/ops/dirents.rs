//! Directory entries: lookup, insert, remove.
//!
//! ```text
//!   find_or_slot ── DirentLocation ─▶ remove_name, retarget_name
//!                └─ InsertionPoint ─▶ insert_name: free slot · new block · split leaf of the tree
//! ```
//! Law 1: [`Transaction::find_name_or_slot`] changes nothing. Everything an insert needs is known and
//! allocatable before the first block changes.
//! Law 2: a damaged hash tree is not changed: the directory becomes linear.

use draconis_types::FileType;
use draconis_types::injected_fault::InjectedFault;

use crate::blocks::role::Role;
use crate::commit::batch::Effect;
use crate::dir::edit::index::{self, IndexBlockKind};
use crate::dir::edit::{self, DirentSlot, FoundRecord, SlotSearch};
use crate::dir::name_query::{self, NameQuery};
use crate::format::dir_tail;
use crate::format::dirent::DirBlockFormat;
use crate::format::features::{Compatible, Incompatible};
use crate::format::hash::NameHash;
use crate::format::htree::{DxEntries, DxEntry, DxRoot};
use crate::format::inode::{Inode, flags};
use crate::format::inode_slot::InodeTime;
use crate::map::edit::AllocationPolicy;
use crate::transaction::Transaction;
use crate::{Error, FileBlock, FileId, FsBlock, InodeNumber, Result};

/// Limit of blocks that one insert allocates: a leaf, two index blocks, and map blocks.
pub(crate) const MAX_INSERT_BLOCKS: u64 = 8;
/// Directory blocks among them: in a hash tree, and in a linear directory, which may become one.
const MAX_HTREE_INSERT_BLOCKS: u64 = 3;
const MAX_LINEAR_INSERT_BLOCKS: u64 = 2;
/// Limit of leaf blocks with one hash.
const MAX_BLOCKS_PER_HASH: usize = 4096;
/// Limit of insert attempts: more than the splits that a tree can need.
const MAX_SPLITS: usize = 6;

/// Location of a directory entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirentLocation {
    pub(crate) container: DirentContainer,
    pub(crate) found: FoundRecord,
}

/// Container of directory entries.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DirentContainer {
    /// A directory block.
    Block(FsBlock),
    /// A part of an inline directory.
    Inline(usize),
    /// The parent's inode number in an inline directory.
    Parent,
}

/// Place where a name can be inserted.
#[derive(Clone, Debug)]
pub(crate) enum InsertionPoint {
    /// A block, after an inline directory is converted.
    ConvertInline,
    /// A free slot of this block.
    FreeSlot(FsBlock, DirentSlot),
    /// A block of a directory whose damaged hash tree must be dropped first.
    DropHtree,
    /// A new block at the end.
    AppendBlock,
    /// A leaf of the hash tree, after a split.
    SplitLeaf(HtreePath),
}

/// Path from the root of a hash tree to a leaf.
#[derive(Clone, Debug)]
pub(crate) struct HtreePath {
    dir: FileId,
    hash: NameHash,
    levels: u8,
    name_hash: u32,
    /// Index block and entry of each level, from the root down.
    steps: Vec<DxFrame>,
    leaf: (u32, FsBlock),
}

#[derive(Clone, Copy, Debug)]
struct DxFrame {
    block: FsBlock,
    nth: usize,
    level: IndexBlockKind,
}

/// Rule by which names match.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum NameMatch {
    /// Exact match.
    Exact,
    /// Exact match, or equal after case folding.
    Folded,
}

/// Result of [`Transaction::find_name_or_slot`].
pub(crate) type NameLookup = std::result::Result<DirentLocation, InsertionPoint>;

impl InsertionPoint {
    /// Returns the limit of blocks that the insert allocates.
    pub(crate) const fn max_blocks(&self) -> u64 {
        match self {
            Self::FreeSlot(..) | Self::DropHtree => 0,
            Self::ConvertInline | Self::AppendBlock | Self::SplitLeaf(_) => MAX_INSERT_BLOCKS,
        }
    }
}

impl Transaction<'_> {
    fn has_filetype(&self) -> bool {
        self.volume.super_.incompatible.contains(Incompatible::FILETYPE)
    }

    /// Returns the format of directory blocks.
    pub(crate) fn dir_block_format(&self) -> DirBlockFormat {
        let super_ = &self.volume.super_;
        let has_checksums = super_.checksum_seed.is_some();
        DirBlockFormat {
            block_bytes: super_.block_bytes,
            filetype: self.has_filetype(),
            has_checksums,
        }
    }

    /// Returns the part of a block that holds directory entries.
    fn dirent_area<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        dir_tail::dirent_area(bytes, self.volume.super_.checksum_seed.is_some())
    }

    fn large_dir(&self) -> bool {
        self.volume.super_.incompatible.contains(Incompatible::LARGEDIR)
    }

    /// Reads a directory block; `None` for a hole.
    pub(crate) fn read_directory_block(
        &self,
        dir: &Inode,
        nth: u32,
    ) -> Result<Option<(FsBlock, crate::SharedBytes)>> {
        let of_dir = |error: Error| error.with_inode(dir.number);
        let Some(block) = self.lookup_block(dir.number, nth).map_err(of_dir)? else {
            return Ok(None);
        };
        Ok(Some((block, self.block(block, Role::Directory(dir.file_id())).map_err(of_dir)?)))
    }

    /// Looks up a name; if it is missing, returns a place for it.
    pub(crate) fn find_name_or_slot(&self, dir: &Inode, name: &[u8]) -> Result<NameLookup> {
        if name.len() > 255 {
            return Err(Error::NameTooLong);
        }
        if name.is_empty() || name.contains(&b'/') || name.contains(&0) {
            return Err(Error::Misuse("not a name"));
        }
        let wanted = NameQuery::for_name(self.volume, dir, name)?;
        let same = self.find_matching(dir, &wanted, NameMatch::Exact)?;
        if same.is_ok() || !wanted.is_case_insensitive() {
            return Ok(same);
        }
        let alike = self.find_matching(dir, &wanted, NameMatch::Folded)?;
        if alike.is_ok() || !(self.volume.has_htree(dir) && wanted.may_be_misplaced(self.volume)) {
            return Ok(alike);
        }
        let anywhere = self.find_linear(dir, &wanted, NameMatch::Folded)?;
        Ok(if anywhere.is_ok() { anywhere } else { alike })
    }

    fn find_matching(
        &self,
        dir: &Inode,
        wanted: &NameQuery<'_>,
        like: NameMatch,
    ) -> Result<NameLookup> {
        if dir.is_inline() {
            return self.find_inline(dir, wanted, like);
        }
        let dots = matches!(wanted.name(), b"." | b"..");
        if self.volume.has_htree(dir)
            && !dots
            && let Some(hashed) = wanted.hash_input()
        {
            match self.find_htree(dir, wanted, hashed, like) {
                Err(Error::Corrupt { .. }) => {}
                done => return done,
            }
        }
        self.find_linear(dir, wanted, like)
    }

    /// Looks up a name in one block or inline part.
    fn find_in_dirents(
        &self,
        names: &[u8],
        wanted: &NameQuery<'_>,
        like: NameMatch,
    ) -> Result<SlotSearch> {
        let is = |name: &[u8]| {
            wanted.matches_exactly(name) || like == NameMatch::Folded && wanted.folds_to(name)
        };
        edit::find_or_slot_by(names, self.has_filetype(), wanted.name().len(), is)
    }

    fn find_inline(
        &self,
        dir: &Inode,
        wanted: &NameQuery<'_>,
        like: NameMatch,
    ) -> Result<NameLookup> {
        for (nth, part) in self.read_inline(dir)?.dir_parts().iter().enumerate() {
            let target = self.find_in_dirents(part.entries, wanted, like);
            if let SlotSearch::Found(found) =
                target.map_err(|error| error.with_inode(dir.number))?
            {
                return Ok(Ok(DirentLocation { container: DirentContainer::Inline(nth), found }));
            }
        }
        Ok(Err(InsertionPoint::ConvertInline))
    }

    fn find_linear(
        &self,
        dir: &Inode,
        wanted: &NameQuery<'_>,
        like: NameMatch,
    ) -> Result<NameLookup> {
        let count = self.volume.directory_blocks(dir);
        let tree = self.volume.has_htree(dir);
        let hint = self.writer.insert_hints.get(&dir.number.0).copied().unwrap_or(0).min(count);
        let mut place = None;
        for nth in (hint..count).chain(0..hint) {
            let Some((block, bytes)) = self.read_directory_block(dir, nth)? else { continue };
            let target = self.find_in_dirents(self.dirent_area(&bytes), wanted, like);
            match target.map_err(|error| error.with_block(block).with_inode(dir.number))? {
                SlotSearch::Found(found) => {
                    return Ok(Ok(DirentLocation {
                        container: DirentContainer::Block(block),
                        found,
                    }));
                }
                // Free space in the root of a hash tree belongs to the index.
                SlotSearch::Free(room) if !tree => {
                    place.get_or_insert(InsertionPoint::FreeSlot(block, room));
                }
                SlotSearch::Free(_) if nth > 0 => {
                    place.get_or_insert(InsertionPoint::DropHtree);
                }
                SlotSearch::Free(_) | SlotSearch::Full => {}
            }
        }
        Ok(Err(place.unwrap_or(InsertionPoint::AppendBlock)))
    }

    fn tree_block(&self, dir: &Inode, nth: FileBlock) -> Result<(FsBlock, crate::SharedBytes)> {
        let wrong = Error::corrupt("hash tree index").with_inode(dir.number);
        if nth.0 == 0 || nth.0 >= self.volume.directory_blocks(dir) {
            return Err(wrong);
        }
        self.read_directory_block(dir, nth.0)?.ok_or(wrong)
    }

    fn find_htree(
        &self,
        dir: &Inode,
        wanted: &NameQuery<'_>,
        hashed: &[u8],
        like: NameMatch,
    ) -> Result<NameLookup> {
        let super_ = &self.volume.super_;
        let wrong = Error::corrupt("hash tree index").with_inode(dir.number);
        let (root_at, root_bytes) = self.read_directory_block(dir, 0)?.ok_or(wrong.clone())?;
        let (root, top) = DxRoot::check(&root_bytes, super_.hash_unsigned, super_.hash_seed)?;
        let name_hash = root.hash.hash_name(hashed);
        let mut descent = HtreePath {
            dir: dir.file_id(),
            hash: root.hash,
            levels: root.levels,
            name_hash,
            steps: vec![DxFrame {
                block: root_at,
                nth: top.find(name_hash),
                level: IndexBlockKind::Root,
            }],
            leaf: (0, FsBlock(0)),
        };
        let mut place = None;
        for turn in 0..MAX_BLOCKS_PER_HASH {
            let hash = if turn == 0 { name_hash } else { 0 };
            let bytes = self.descend_to_leaf(dir, &mut descent, hash)?;
            let block = descent.leaf.1;
            let target = self.find_in_dirents(self.dirent_area(&bytes), wanted, like);
            match target.map_err(|error| error.with_block(block).with_inode(dir.number))? {
                SlotSearch::Found(found) => {
                    return Ok(Ok(DirentLocation {
                        container: DirentContainer::Block(block),
                        found,
                    }));
                }
                SlotSearch::Free(room) => {
                    place.get_or_insert(InsertionPoint::FreeSlot(block, room));
                }
                SlotSearch::Full if turn == 0 => {
                    if !self.can_split(&descent)? {
                        return Err(Error::NoSpace);
                    }
                    place = Some(InsertionPoint::SplitLeaf(descent.clone()));
                }
                SlotSearch::Full => {}
            }
            if !self.next_leaf(&mut descent)? {
                return place.map(Err).ok_or(wrong);
            }
        }
        Err(wrong)
    }

    /// Descends from the last step to a leaf.
    fn descend_to_leaf(
        &self,
        dir: &Inode,
        descent: &mut HtreePath,
        hash: u32,
    ) -> Result<crate::SharedBytes> {
        let wrong = Error::corrupt("hash tree index").with_inode(dir.number);
        loop {
            let step = *descent.steps.last().ok_or(wrong.clone())?;
            let bytes = self.block(step.block, Role::Directory(dir.file_id()))?;
            let next =
                self.parse_index(step.level, &bytes)?.block(step.nth).ok_or(wrong.clone())?;
            let (block, bytes) = self.tree_block(dir, next)?;
            if descent.steps.len() > usize::from(descent.levels) {
                descent.leaf = (next.0, block);
                return Ok(bytes);
            }
            let nth = DxEntries::from_node(&bytes)?.find(hash);
            descent.steps.push(DxFrame { block, nth, level: IndexBlockKind::Node });
        }
    }

    fn parse_index<'a>(&self, level: IndexBlockKind, bytes: &'a [u8]) -> Result<DxEntries<'a>> {
        let super_ = &self.volume.super_;
        match level {
            IndexBlockKind::Root => {
                DxRoot::check(bytes, super_.hash_unsigned, super_.hash_seed).map(|(_, index)| index)
            }
            IndexBlockKind::Node => DxEntries::from_node(bytes),
        }
    }

    /// Moves to the next leaf, if entries with this hash may continue there.
    fn next_leaf(&self, descent: &mut HtreePath) -> Result<bool> {
        while let Some(step) = descent.steps.last_mut() {
            let bytes = self.block(step.block, Role::Directory(descent.dir))?;
            let index = match step.level {
                IndexBlockKind::Root => {
                    let super_ = &self.volume.super_;
                    DxRoot::check(&bytes, super_.hash_unsigned, super_.hash_seed)?.1
                }
                IndexBlockKind::Node => DxEntries::from_node(&bytes)?,
            };
            if let Some(next) = index.next_with_hash(step.nth, descent.name_hash) {
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

    /// Returns true if the tree can take one more leaf.
    fn can_split(&self, descent: &HtreePath) -> Result<bool> {
        if descent.levels < index::max_levels(self.large_dir()) {
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

    /// Inserts a name at a place found by [`Transaction::find_name_or_slot`]. The caller ensures
    /// [`InsertionPoint::max_blocks`] free blocks.
    pub(crate) fn insert_name(
        &mut self,
        dir: InodeNumber,
        place: InsertionPoint,
        name: &[u8],
        inode: InodeNumber,
        kind: FileType,
    ) -> Result<()> {
        self.record_effect(Effect::NameAdded { dir });
        let mut place = place;
        for _ in 0..MAX_SPLITS {
            match place {
                InsertionPoint::FreeSlot(block, room) => {
                    let DirBlockFormat { filetype, has_checksums, .. } = self.dir_block_format();
                    return self.modify_block(block, self.directory_role(dir)?, |bytes| {
                        let names = dir_tail::dirent_area_mut(bytes, has_checksums);
                        edit::insert(names, &room, inode, kind, name, filetype)
                    })?;
                }
                InsertionPoint::ConvertInline => self.convert_inline_directory(dir)?,
                InsertionPoint::DropHtree => self.drop_htree(dir)?,
                InsertionPoint::AppendBlock => self.grow_directory(dir)?,
                InsertionPoint::SplitLeaf(descent) => self.split(dir, &descent)?,
            }
            let node = self.directory(dir)?;
            place = match self.find_name_or_slot(&node, name)? {
                Err(place) => place,
                Ok(_) => return Err(Error::corrupt("directory: a name twice").with_inode(dir)),
            };
        }
        Err(Error::corrupt("hash tree").with_inode(dir))
    }

    /// Grows a linear directory: converts it to a hash tree, or appends an empty block.
    fn grow_directory(&mut self, dir: InodeNumber) -> Result<()> {
        let node = self.directory(dir)?;
        let count = self.volume.directory_blocks(&node);
        let indexed = self.volume.super_.compatible.contains(Compatible::DIR_INDEX);
        if indexed
            && count == 1
            && !self.volume.has_htree(&node)
            && let Some((first, bytes)) = self.read_directory_block(&node, 0)?
            && let Ok((root, leaf)) = index::make_indexed(
                &bytes,
                self.volume.super_.default_hash(),
                1,
                self.dir_block_format(),
            )
        {
            let (_, block) = self.append_block(dir)?;
            self.put_new_block(block, self.directory_role(dir)?, leaf);
            self.modify_block(first, self.directory_role(dir)?, |bytes| {
                bytes.copy_from_slice(&root)
            })?;
            return self.change_slot(dir, |it| it.set_flags(it.flags() | flags::INDEX));
        }
        // A damaged hash tree is dropped.
        if node.flags & flags::INDEX != 0 {
            self.drop_htree(dir)?;
        }
        let (nth, block) = self.append_block(dir)?;
        self.put_new_block(
            block,
            self.directory_role(dir)?,
            edit::empty_block(self.dir_block_format()),
        );
        self.writer.insert_hints.insert(dir.0, nth);
        Ok(())
    }

    fn drop_htree(&mut self, dir: InodeNumber) -> Result<()> {
        if self.dir_block_format().has_checksums {
            // Its index blocks lack the checksum tail of linear blocks.
            return Err(Error::corrupt("hash tree").with_inode(dir));
        }
        self.change_slot(dir, |it| it.set_flags(it.flags() & !flags::INDEX))
    }

    /// Appends a block to a directory.
    fn append_block(&mut self, dir: InodeNumber) -> Result<(u32, FsBlock)> {
        let node = self.directory(dir)?;
        let nth = self.volume.directory_blocks(&node);
        let (uid, _) = node.owner();
        let taking = AllocationPolicy {
            is_append: true,
            privileged: self.is_privileged(uid),
            unwritten: false,
        };
        let all = self.map_blocks(dir, nth..nth.saturating_add(1), taking)?;
        let run = all.first().filter(|run| run.is_new).ok_or(Error::corrupt("directory: size"))?;
        let bytes =
            u64::from(nth.saturating_add(1)).saturating_mul(self.volume.super_.block_bytes.into());
        self.change_slot(dir, |it| it.set_size(bytes))?;
        self.invalidate_map(dir, nth, nth.saturating_add(1));
        Ok((nth, run.at))
    }

    /// Splits the leaf at the end of a path, or first a full index block above it.
    fn split(&mut self, dir: InodeNumber, descent: &HtreePath) -> Result<()> {
        let role = self.directory_role(dir)?;
        let mut full = None;
        // Finds the lowest index block with a free entry, and the full one below it.
        for (depth, step) in descent.steps.iter().enumerate().rev() {
            if index::has_room(&self.block(step.block, role)?, step.level)? {
                let Some(lower) = full else { return self.split_leaf(dir, descent, *step) };
                let lower: DxFrame = lower;
                let split =
                    index::split_node(&self.block(lower.block, role)?, self.dir_block_format())?;
                let (nth, block) = self.append_block(dir)?;
                self.put_new_block(block, role, split.high);
                self.modify_block(lower.block, role, |bytes| bytes.copy_from_slice(&split.low))?;
                let entry = DxEntry { hash: split.hash, block: nth };
                let put = self.modify_block(step.block, role, |bytes| {
                    index::insert(bytes, step.level, step.nth, entry)
                })??;
                return put.then_some(()).ok_or(Error::corrupt("hash tree index"));
            }
            full = Some(*step);
            if depth == 0 {
                let most = index::max_levels(self.large_dir());
                let nth = self.volume.directory_blocks(&*self.directory(dir)?);
                let (root, node) = index::add_level(
                    &self.block(step.block, role)?,
                    nth,
                    most,
                    self.dir_block_format(),
                )?;
                let (_, block) = self.append_block(dir)?;
                self.put_new_block(block, role, node);
                return self.modify_block(step.block, role, |bytes| bytes.copy_from_slice(&root));
            }
        }
        Err(Error::corrupt("hash tree").with_inode(dir))
    }

    fn split_leaf(&mut self, dir: InodeNumber, descent: &HtreePath, above: DxFrame) -> Result<()> {
        let role = self.directory_role(dir)?;
        let old = self.block(descent.leaf.1, role)?;
        let shape = self.dir_block_format();
        let folds = name_query::is_casefolded(self.volume, &*self.directory(dir)?);
        let hash =
            |name: &[u8]| descent.hash.hash_name(&name_query::hash_input_of_name(folds, name));
        let halves = edit::split_with_hash(self.dirent_area(&old), hash)?;
        let (nth, block) = self.append_block(dir)?;
        self.put_new_block(block, role, shape.with_tail(halves.high));
        self.modify_block(descent.leaf.1, role, |bytes| {
            dir_tail::dirent_area_mut(bytes, shape.has_checksums).copy_from_slice(&halves.low);
        })?;
        let entry = DxEntry { hash: halves.hash, block: nth };
        let put = self.modify_block(above.block, role, |bytes| {
            index::insert(bytes, above.level, above.nth, entry)
        })??;
        put.then_some(()).ok_or(Error::corrupt("hash tree index").with_inode(dir))
    }

    /// Removes a name.
    pub(crate) fn remove_name(&mut self, dir: InodeNumber, spot: DirentLocation) -> Result<()> {
        self.record_effect(Effect::NameRemoved { dir });
        let sums = self.dir_block_format().has_checksums;
        match spot.container {
            DirentContainer::Block(block) => {
                self.modify_block(block, self.directory_role(dir)?, |bytes| {
                    edit::remove(dir_tail::dirent_area_mut(bytes, sums), &spot.found)
                })?
            }
            DirentContainer::Inline(nth) => {
                self.change_slot(dir, |it| edit::remove(it.inline_dirents(nth), &spot.found))?
            }
            DirentContainer::Parent => Err(Error::Misuse("`..` cannot be taken out")),
        }
    }

    /// Changes the inode that a name references.
    pub(crate) fn retarget_name(
        &mut self,
        dir: InodeNumber,
        spot: DirentLocation,
        inode: InodeNumber,
        kind: FileType,
    ) -> Result<()> {
        self.record_effect(Effect::NameAdded { dir });
        let kinds = self.has_filetype();
        let set = |bytes: &mut [u8]| edit::set_inode(bytes, spot.found.at, inode, kind, kinds);
        match spot.container {
            DirentContainer::Block(block) => {
                self.modify_block(block, self.directory_role(dir)?, set)?
            }
            DirentContainer::Inline(nth) => {
                self.change_slot(dir, |it| set(it.inline_dirents(nth)))?
            }
            DirentContainer::Parent => self.change_slot(dir, |it| it.set_pointer(0, inode.0)),
        }
    }

    /// Returns true if a directory has no entries but `.` and `..`.
    pub(crate) fn is_empty(&self, dir: &Inode) -> Result<bool> {
        if dir.is_inline() {
            for part in self.read_inline(dir)?.dir_parts() {
                let empty = edit::is_empty(part.entries, false);
                if !empty.map_err(|error| error.with_inode(dir.number))? {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
        for nth in 0..self.volume.directory_blocks(dir) {
            let Some((block, bytes)) = self.read_directory_block(dir, nth)? else { continue };
            let empty = edit::is_empty(self.dirent_area(&bytes), nth == 0);
            if !empty.map_err(|error| error.with_block(block).with_inode(dir.number))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the parent of a directory and the location of its `..`.
    pub(crate) fn find_dot_dot(&self, dir: InodeNumber) -> Result<DirentLocation> {
        let node = self.directory(dir)?;
        if node.is_inline() {
            let inode = self.read_inline(&node)?.parent().map_err(|error| error.with_inode(dir))?;
            let kind = Some(FileType::Directory);
            let found = FoundRecord { at: 0, previous: None, inode, kind };
            return Ok(DirentLocation { container: DirentContainer::Parent, found });
        }
        let missing = Error::corrupt("directory: no `..`").with_inode(dir);
        let (block, bytes) = self.read_directory_block(&node, 0)?.ok_or(missing.clone())?;
        let found = edit::find(&bytes, self.has_filetype(), b"..")?.ok_or(missing)?;
        Ok(DirentLocation { container: DirentContainer::Block(block), found })
    }

    /// Builds the first block of a new directory.
    pub(crate) fn dot_entries_block(&self, own: InodeNumber, parent: InodeNumber) -> Vec<u8> {
        let mut block = crate::format::dirent::DirBlockBuilder::new(self.dir_block_format());
        block.push(own.0, FileType::Directory, b".");
        block.push(parent.0, FileType::Directory, b"..");
        block.finish()
    }

    /// Returns the limit of blocks for an insert at `place`, where each may need its own cluster.
    /// The rest of the directory's last cluster is allocated already.
    pub(crate) fn max_insert_blocks(
        &self,
        dir: InodeNumber,
        place: &InsertionPoint,
    ) -> Result<u64> {
        let ratio = u64::from(self.cluster_blocks());
        match place {
            InsertionPoint::AppendBlock | InsertionPoint::SplitLeaf(_) if ratio > 1 => {
                let node = self.directory(dir)?;
                let count = self.volume.directory_blocks(&node);
                let left = u64::from(count).next_multiple_of(ratio).saturating_sub(count.into());
                let own = if matches!(place, InsertionPoint::SplitLeaf(_)) {
                    MAX_HTREE_INSERT_BLOCKS
                } else {
                    MAX_LINEAR_INSERT_BLOCKS
                };
                let clusters = own.saturating_sub(left).div_ceil(ratio);
                Ok(clusters.saturating_add(self.nodes_needed(dir, count)?))
            }
            place => Ok(place.max_blocks()),
        }
    }

    /// Returns `NoSpace` unless `count` blocks are free, each in its own cluster.
    pub(crate) fn check_free_blocks(&self, count: u64, privileged: bool) -> Result<()> {
        let count = count.saturating_mul(self.cluster_blocks().into());
        if self.allocatable_blocks(privileged) < count { Err(Error::NoSpace) } else { Ok(()) }
    }

    pub(crate) fn touch_directory(&mut self, dir: InodeNumber) -> Result<()> {
        if InjectedFault::DirectoryTimes.is_made() {
            return Ok(());
        }
        self.set_times_now(dir, &[InodeTime::Modified, InodeTime::Changed])
    }
}
