//! Deleted files as a volume: a read-only disk for [`draconis_ext_volume::Volume::open`].
//!
//! ```text
//!   | superblock | descriptors | blocks of the image, unchanged | bitmaps | inode tables | nodes |
//!                              ^ an extent of a deleted file leads here: no contents are copied
//! ```
//! Law 1: everything but the blocks of the image is made in memory, from what undeletion found. No
//! byte of the image is taken for metadata of the new volume.
//! Law 2: overwritten ranges are holes. A file of which nothing is left, or that lies beyond the
//! disk, has no valid map: reading it is an error.
//! Law 3: what is not certain of a file's contents is in its attribute [`STATE_XATTR`].
//! Law 4: memory grows with the files found, not with the disk: tables and descriptors are put
//! together when they are read.
//!
//! The volume is for readers: its bitmaps have no free block and no free inode, and there is no
//! `lost+found`. Linux mounts it; `e2fsck` reports both.

mod disk;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use draconis_device::Disk;
use draconis_types::{Attributes, FileType, Time};

use disk::{ViewDisk, ViewLayout, quotient};

use super::placement::DeletedTree;
use super::{DeletedFile, DeletedFiles, FileState};
use crate::dir::build::{DirectoryFormat, NewDirent, build_directory};
use crate::dir::name_query::NameQuery;
use crate::format::dirent::{DirBlockFormat, min_rec_len};
use crate::format::extent::{Extent as FileExtent, INIT_MAX_LEN};
use crate::format::hash::{HashSeed, NameHash};
use crate::format::inode::{
    EXTRA_BYTES, NewInode, POINTERS, device_pointers, fast_symlink_pointers, flags, low16,
};
use crate::format::xattr::edit::lay_out_attributes;
use crate::format::xattr::{NewXattr, set_refcount};
use crate::map::BlockLocation;
use crate::map::build_extents::{build_extent_tree, extents_of_runs};
use crate::reader::VolumeReader;
use crate::units::{saturating_u32, saturating_usize};
use crate::{Error, FsBlock, InodeNumber, Result};

/// Attribute of a deleted file that is not whole; its value is [`FileState::text`].
pub const STATE_XATTR: &[u8] = b"user.draconis.state";

/// Hash of directories: half MD4.
const HASH_VERSION: u8 = 1;
/// Most links that a directory counts.
const MAX_DIRECTORY_LINKS: u32 = 65_000;

/// A volume of deleted files.
#[derive(Clone)]
pub struct DeletedView {
    /// The disk, all of which is the volume.
    pub disk: Arc<dyn Disk>,
    /// What the volume holds.
    pub summary: DeletedSummary,
}

/// Number of files in a volume of deleted files.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeletedSummary {
    /// Deleted files, without directories.
    pub files: u64,
    /// Of these, files that are not whole.
    pub unsure: u64,
    /// True if there are more deleted files.
    pub is_cut_short: bool,
    /// Reason why the journal does not help, if it should.
    pub journal_damage: Option<Error>,
}

impl std::fmt::Debug for DeletedView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeletedView").field("summary", &self.summary).finish_non_exhaustive()
    }
}

impl DeletedFiles {
    /// Returns the files as a volume.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the volume would be too large; [`Error::Io`].
    pub fn into_view(self) -> Result<DeletedView> {
        let built = ViewBuilder::build(&self)?;
        let files = self.files.iter().filter(|it| it.attributes.kind != FileType::Directory);
        let unsure = files.clone().filter(|it| it.state != FileState::Whole).count() as u64;
        let summary = DeletedSummary {
            files: files.count() as u64,
            unsure,
            is_cut_short: self.is_cut_short,
            journal_damage: self.journal_damage.clone(),
        };
        Ok(DeletedView { disk: Arc::new(ViewDisk { image: self.disk, ..built }), summary })
    }
}

/// Size, map and flags of an inode.
#[derive(Default)]
struct Mapped {
    size_bytes: u64,
    pointers: [u32; POINTERS],
    flags: u32,
    blocks: u64,
}

/// Construction of the volume.
struct ViewBuilder<'a> {
    all: &'a DeletedFiles,
    layout: ViewLayout,
    inodes: BTreeMap<u32, Vec<u8>>,
    nodes: BTreeMap<u64, Vec<u8>>,
    next_block: u64,
    /// Blocks of attributes with the number of their owners, by contents.
    xattr_blocks: HashMap<Vec<u8>, (u64, u32)>,
}

impl<'a> ViewBuilder<'a> {
    fn build(all: &'a DeletedFiles) -> Result<ViewDisk> {
        let reader = &all.reader;
        let files: Vec<_> = all.files.iter().map(|file| (file, file.names().collect())).collect();
        let tree = DeletedTree::new(&files);
        let existing = existing_directories(reader, &tree);
        let numbers = choose_numbers(&tree, &existing);
        let last_inode = numbers.iter().copied().max().unwrap_or(0).max(FIRST_INODE);
        let image_blocks = reader.super_.blocks.min(reader.disk_blocks());
        let nodes = max_node_blocks(&tree, reader.super_.block_bytes);
        let layout = ViewLayout::new(&reader.super_, image_blocks, last_inode, nodes)?;
        let mut builder = Self {
            all,
            layout,
            inodes: BTreeMap::new(),
            nodes: BTreeMap::new(),
            next_block: layout.nodes,
            xattr_blocks: HashMap::new(),
        };
        let mut links_of: HashMap<usize, u32> = HashMap::new();
        for first in tree.places().iter().filter_map(|place| place.link_to) {
            let links = links_of.entry(first).or_insert(1);
            *links = links.saturating_add(1);
        }
        for (nth, place) in tree.places().iter().enumerate() {
            if place.link_to.is_some() {
                continue;
            }
            let number = numbers.get(nth).copied().unwrap_or(0);
            let kind = place.file.map_or(FileType::Directory, |file| file.attributes.kind);
            let attributes = place.file.map(|file| file.attributes);
            let attributes = attributes.or(existing.get(nth).copied().flatten());
            let mut links = 1;
            let mapped = match (kind, place.file) {
                (FileType::Directory, _) => {
                    let (mapped, subdirectories) = builder.map_directory(&tree, nth, &numbers)?;
                    links = subdirectories.saturating_add(2);
                    mapped
                }
                (_, Some(file)) => builder.map_file(file)?,
                (_, None) => Mapped::default(),
            };
            if let Some(count) = links_of.get(&nth) {
                links = *count;
            }
            builder.add_inode(number, attributes, links, mapped, place.file)?;
        }
        for (mut block, (at, owners)) in std::mem::take(&mut builder.xattr_blocks) {
            set_refcount(&mut block, owners);
            builder.nodes.insert(at, block);
        }
        let superblock = layout.superblock(&reader.super_);
        let super_ = superblock.check()?;
        Ok(ViewDisk {
            image: all.disk.clone(),
            layout,
            superblock,
            super_,
            inodes: builder.inodes,
            nodes: builder.nodes,
        })
    }

    fn block_bytes(&self) -> u32 {
        self.all.reader.super_.block_bytes
    }

    /// Allocates adjacent blocks for nodes.
    fn allocate(&mut self, blocks: u64) -> Result<u64> {
        let at = self.next_block;
        self.next_block = at.saturating_add(blocks);
        if self.next_block > self.layout.blocks { Err(Error::NoSpace) } else { Ok(at) }
    }

    /// Stores bytes in blocks of their own, and returns their map.
    fn store(&mut self, bytes: &[u8]) -> Result<Mapped> {
        let len = saturating_usize(self.layout.block_bytes).max(1);
        let blocks = bytes.len().div_ceil(len) as u64;
        let first = self.allocate(blocks)?;
        for (at, part) in (first..).zip(bytes.chunks(len)) {
            self.nodes.insert(at, part.to_vec());
        }
        let extents = extents_of_runs(&[(0, saturating_u32(blocks))], &[(first, blocks)]);
        let mapped = self.map_extents(&extents.unwrap_or_default().0)?;
        Ok(Mapped { size_bytes: bytes.len() as u64, ..mapped })
    }

    fn map_extents(&mut self, extents: &[FileExtent]) -> Result<Mapped> {
        let block_bytes = self.block_bytes();
        let data: u64 = extents.iter().map(|extent| u64::from(extent.blocks)).sum();
        let first = self.next_block;
        let mut places = first..self.layout.blocks;
        let (pointers, nodes) =
            build_extent_tree(extents, block_bytes, &mut places).ok_or(Error::NoSpace)?;
        self.allocate(nodes.len() as u64)?;
        let blocks = data.saturating_add(nodes.len() as u64);
        self.nodes.extend(nodes);
        Ok(Mapped { pointers, flags: flags::EXTENTS, blocks, size_bytes: 0 })
    }

    /// Maps a directory; returns also the number of its subdirectories.
    fn map_directory(
        &mut self,
        tree: &DeletedTree<'_>,
        nth: usize,
        numbers: &[u32],
    ) -> Result<(Mapped, u32)> {
        let number = |nth: usize| numbers.get(nth).copied().unwrap_or(0);
        let mut subdirectories = 0u32;
        let Some(place) = tree.places().get(nth) else { return Ok((Mapped::default(), 0)) };
        let names = place.children().filter_map(|(name, child)| {
            let kind = match tree.places().get(child)?.file {
                Some(file) => file.attributes.kind,
                None => FileType::Directory,
            };
            subdirectories = subdirectories.saturating_add((kind == FileType::Directory).into());
            Some(NewDirent { name, inode: number(child), kind })
        });
        let names: Vec<NewDirent<'_>> = names.collect();
        let shape = DirBlockFormat {
            block_bytes: self.block_bytes(),
            filetype: true,
            has_checksums: false,
        };
        let hash = NameHash::of_version(HASH_VERSION, true, HashSeed::new([0; 4]));
        let style =
            DirectoryFormat { shape, index: hash.map(|hash| (hash, HASH_VERSION)), levels: 1 };
        let built = build_directory(number(nth), number(place.parent), &names, style);
        let mut mapped = self.store(&built.bytes)?;
        mapped.flags |= if built.indexed { flags::INDEX } else { 0 };
        Ok((mapped, subdirectories))
    }

    fn map_file(&mut self, file: &DeletedFile) -> Result<Mapped> {
        let kept = flags::ENCRYPT | flags::COMPRESSED;
        let kept = file.of.inode.attributes(&self.all.reader.super_).flags & kept;
        let size_bytes = file.of.inode.size_bytes;
        // A map that every reader refuses.
        let broken =
            Mapped { size_bytes, flags: kept | flags::EXTENTS, blocks: 1, ..Mapped::default() };
        let mapped = match file.attributes.kind {
            FileType::CharDevice | FileType::BlockDevice => {
                Mapped { pointers: device_pointers(file.attributes.device), ..Mapped::default() }
            }
            FileType::Symlink => match file.link_target(self.all) {
                Ok(target) => match fast_symlink_pointers(&target) {
                    Some(pointers) => {
                        Mapped { pointers, size_bytes: target.len() as u64, ..Mapped::default() }
                    }
                    None => self.store(&target)?,
                },
                Err(Error::Io(error)) => return Err(Error::Io(error)),
                Err(_) => broken,
            },
            FileType::File if file.state == FileState::Overwritten => broken,
            FileType::File => match &file.inline {
                Some(bytes) => self.store(bytes)?,
                None => match self.extents(file) {
                    Some(extents) => Mapped { size_bytes, ..self.map_extents(&extents)? },
                    None => broken,
                },
            },
            _ => Mapped::default(),
        };
        Ok(Mapped { flags: mapped.flags | kept, ..mapped })
    }

    /// Returns what is left of a file as extents of the new volume; `None` if a part lies beyond
    /// the disk.
    fn extents(&self, file: &DeletedFile) -> Option<Vec<FileExtent>> {
        let block_bytes = self.layout.block_bytes.max(1);
        let mut extents: Vec<FileExtent> = vec![];
        for run in &file.runs {
            let BlockLocation::Mapped(first) = run.location else { continue };
            let (from, end) =
                (u64::from(run.from.0), u64::from(run.from.0).saturating_add(run.blocks.into()));
            let disk_end = first.0.checked_add(run.blocks.into())?;
            if disk_end > self.layout.image_blocks {
                return None;
            }
            let lost = file.overwritten.partition_point(|it| it.end.div_ceil(block_bytes) <= from);
            let mut at = from;
            for lost in file.overwritten.get(lost..).unwrap_or_default() {
                let lost = quotient(lost.start, block_bytes)..lost.end.div_ceil(block_bytes);
                if lost.start >= end {
                    break;
                }
                push_extents(&mut extents, at..lost.start, first.0, from, self.layout.image);
                at = at.max(lost.end);
            }
            push_extents(&mut extents, at..end, first.0, from, self.layout.image);
        }
        // A damaged map may have blocks twice.
        extents
            .windows(2)
            .all(|pair| matches!(pair, [a, b] if a.end() <= b.from.into()))
            .then_some(extents)
    }

    /// Returns the attributes of a file, and its state if it is not whole.
    fn xattrs(&self, file: &DeletedFile) -> Vec<NewXattr> {
        let found = self.all.xattrs(file);
        let is_lost = found.is_err();
        let mut list: Vec<NewXattr> = vec![];
        for (name, value) in found.unwrap_or_default() {
            if let Ok(Some(new)) = NewXattr::new(&name, &value)
                && !list.iter().any(|it| it.same_name(&new))
                && name != STATE_XATTR
            {
                list.push(new);
            }
        }
        let lost = if is_lost { "; its attributes are lost" } else { "" };
        if file.attributes.kind == FileType::File && (is_lost || file.state != FileState::Whole) {
            let text = format!("{}{lost}", file.state.text());
            list.extend(NewXattr::new(STATE_XATTR, text.as_bytes()).ok().flatten());
        }
        list
    }

    fn add_inode(
        &mut self,
        number: u32,
        attributes: Option<Attributes>,
        links: u32,
        mapped: Mapped,
        file: Option<&DeletedFile>,
    ) -> Result<()> {
        let mut list = file.map(|file| self.xattrs(file)).unwrap_or_default();
        let inode_bytes = saturating_u32(self.layout.inode_bytes);
        let fields = 128u32.saturating_add(EXTRA_BYTES.into()).saturating_add(4);
        let room = saturating_usize(inode_bytes.saturating_sub(fields).into());
        let laid_out = loop {
            match lay_out_attributes(&list, room, self.block_bytes()) {
                Ok(laid_out) => break laid_out,
                // The state of a file comes last, and stays.
                Err(error) if list.len() < 2 => return Err(error),
                Err(_) => drop(list.remove(list.len().saturating_sub(2))),
            }
        };
        let xattr_block = match laid_out.block {
            None => 0,
            Some(block) => match self.xattr_blocks.get_mut(&block) {
                Some((at, owners)) => {
                    *owners = owners.saturating_add(1);
                    *at
                }
                None => {
                    let at = self.allocate(1)?;
                    self.xattr_blocks.insert(block, (at, 1));
                    at
                }
            },
        };
        let blocks = mapped.blocks.saturating_add(u64::from(xattr_block != 0));
        let zero = Time::default();
        let attributes = attributes.as_ref();
        let time = |of: fn(&Attributes) -> Time| attributes.map_or(zero, of);
        let inode = NewInode {
            mode: attributes.map_or(0o40755, |it| low16(it.mode)),
            uid: attributes.map_or(0, |it| it.uid),
            gid: attributes.map_or(0, |it| it.gid),
            size_bytes: mapped.size_bytes,
            links: if links > MAX_DIRECTORY_LINKS { 1 } else { low16(links) },
            sectors: blocks.saturating_mul(self.layout.block_bytes / 512),
            flags: mapped.flags,
            pointers: mapped.pointers,
            accessed: time(|it| it.accessed),
            modified: time(|it| it.modified),
            changed: time(|it| it.changed),
            created: time(|it| it.created.unwrap_or_default()),
            xattr_block,
            attributes: if laid_out.has_inode_xattrs { &laid_out.body } else { &[] },
        };
        let mut bytes = inode.encode(inode_bytes);
        let used =
            bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last.saturating_add(1));
        bytes.truncate(used);
        bytes.shrink_to_fit();
        self.inodes.insert(number, bytes);
        Ok(())
    }
}

/// Adds the part of a run that begins at file block `from` and disk block `first`.
fn push_extents(
    extents: &mut Vec<FileExtent>,
    part: std::ops::Range<u64>,
    first: u64,
    from: u64,
    image: u64,
) {
    let mut at = part.start;
    while at < part.end {
        let blocks = part.end.saturating_sub(at).min(INIT_MAX_LEN.into());
        let start = image.saturating_add(first).saturating_add(at.saturating_sub(from));
        extents.push(FileExtent {
            from: saturating_u32(at),
            blocks: saturating_u32(blocks),
            start: FsBlock(start),
            is_unwritten: false,
        });
        at = at.saturating_add(blocks);
    }
}

/// First inode of a file.
const FIRST_INODE: u32 = 11;

/// Returns the attributes of directories that were not deleted, by index.
fn existing_directories(reader: &VolumeReader, tree: &DeletedTree<'_>) -> Vec<Option<Attributes>> {
    let mut found: Vec<Option<(InodeNumber, Attributes)>> = vec![];
    for (nth, place) in tree.places().iter().enumerate() {
        let find = || {
            if place.file.is_some() {
                return None;
            }
            let inode = if nth == 0 {
                reader.directory(InodeNumber::ROOT).ok()?
            } else {
                let (above, _) = found.get(place.parent).copied().flatten()?;
                let dir = reader.directory(above).ok()?;
                let name = NameQuery::for_name(reader, &dir, &place.name).ok()?;
                reader.directory(reader.find_name(&dir, &name).ok()?).ok()?
            };
            Some((inode.number, inode.attributes(&reader.super_)))
        };
        let here = find();
        found.push(here);
    }
    found.into_iter().map(|it| it.map(|(_, attributes)| attributes)).collect()
}

/// Returns the inode of each file: its own, unless a directory or a newer file has the number.
fn choose_numbers(tree: &DeletedTree<'_>, existing: &[Option<Attributes>]) -> Vec<u32> {
    let places = tree.places();
    let own = |nth: usize| match places.get(nth)?.file {
        Some(file) => Some(file.inode.0),
        None => {
            let node = existing.get(nth)?.as_ref()?.node;
            InodeNumber::from_node(node).map(|inode| inode.0)
        }
    };
    let is_first = |nth: &usize| places.get(*nth).is_some_and(|place| place.link_to.is_none());
    let mut order: Vec<usize> = (1..places.len()).filter(is_first).collect();
    order.sort_by_key(|nth| {
        let file = places.get(*nth).and_then(|place| place.file);
        (file.is_some(), std::cmp::Reverse(file.and_then(|file| file.deleted)))
    });
    let mut numbers = vec![0; places.len()];
    let mut taken: HashSet<u32> = HashSet::new();
    let mut others = vec![];
    for nth in order {
        let number = own(nth).filter(|it| *it >= FIRST_INODE && *it < 1 << 31);
        match (number.filter(|number| taken.insert(*number)), numbers.get_mut(nth)) {
            (Some(number), Some(to)) => *to = number,
            _ => others.push(nth),
        }
    }
    let mut next = taken.iter().copied().max().unwrap_or(FIRST_INODE);
    for nth in others {
        next = next.saturating_add(1);
        numbers.get_mut(nth).into_iter().for_each(|to| *to = next);
    }
    for (nth, place) in places.iter().enumerate() {
        let first = place.link_to.and_then(|first| numbers.get(first).copied());
        first.zip(numbers.get_mut(nth)).into_iter().for_each(|(first, to)| *to = first);
    }
    numbers.first_mut().into_iter().for_each(|root| *root = InodeNumber::ROOT.0);
    numbers
}

/// Returns a bound for the blocks of directories, maps and attributes.
fn max_node_blocks(tree: &DeletedTree<'_>, block_bytes: u32) -> u64 {
    let mut blocks = 16u64;
    let (mut name_bytes, mut extents) = (0u64, 0u64);
    for place in tree.places() {
        // A directory's first blocks, attributes, a target or contents from inside the inode.
        blocks = blocks.saturating_add(8);
        name_bytes = name_bytes.saturating_add(min_rec_len(place.name.len()) as u64);
        let Some(file) = place.file else { continue };
        let runs: u64 = file
            .runs
            .iter()
            .map(|run| u64::from(run.blocks / INIT_MAX_LEN).saturating_add(1))
            .sum();
        extents = extents.saturating_add(runs).saturating_add(file.overwritten.len() as u64);
    }
    let names = quotient(name_bytes.saturating_mul(4), block_bytes.into());
    blocks.saturating_add(names).saturating_add(extents / 8)
}
