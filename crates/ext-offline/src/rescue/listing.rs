//! Files of a damaged volume: those that the tree names, and those that only the inode tables have.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use draconis_types::FileType;

use super::{DOUBTFUL_INODE, LOST_AND_FOUND, Loss, MAX_PATH_BYTES, Rescue, RescuedItem, UNNAMED};
use crate::blocks::role::Role;
use crate::check::Progress;
use crate::dir::MAX_NAME_BYTES;
use crate::dir::broken_chain::next_chain;
use crate::dir::name_query::NameDisplay;
use crate::format::dir_tail;
use crate::format::dirent::Dirents;
use crate::format::group::flags::INODE_UNINIT;
use crate::format::inode::Inode;
use crate::map::{BlockLocation, BlockMap, MapNode, MapSource, MapVisitor, map_of_any};
use crate::units::saturating_usize;
use crate::{FsBlock, GroupNumber, InodeNumber};

/// Damaged blocks of one directory that are named.
const MAX_NAMED_BLOCKS: usize = 16;

/// What a search found.
#[derive(Default)]
pub(super) struct Listing {
    pub(super) items: Vec<RescuedItem>,
    pub(super) losses: Vec<Loss>,
    pub(super) order: Vec<usize>,
}

/// Names of a directory, as far as they can be read.
#[derive(Default)]
struct Names {
    entries: Vec<(Vec<u8>, InodeNumber)>,
    /// What is damaged.
    damage: Option<String>,
}

/// Finds all files of a volume.
pub(super) fn find(rescue: &Rescue, progress: Progress<'_>) -> Listing {
    let super_ = &rescue.volume.reader().super_;
    let mut search = Search {
        rescue,
        found: Listing::default(),
        dirs: vec![],
        links: HashMap::new(),
        seen: HashSet::new(),
        blocks_left: super_.blocks.min(rescue.volume.reader().disk_blocks()),
    };
    search.walk(vec![], InodeNumber::ROOT);
    search.find_unnamed(progress);
    let items = &search.found.items;
    let mut order = Vec::with_capacity(items.len());
    for (dir, below) in &search.dirs {
        order.push(*dir);
        let is_dir = |at: usize| {
            let kind = items.get(at).and_then(|item| item.attributes.as_ref()).map(|it| it.kind);
            kind.is_none_or(|kind| kind == FileType::Directory)
        };
        let from = order.len();
        order.extend(below.clone().filter(|at| !is_dir(*at)));
        let files = order.get_mut(from..).unwrap_or_default();
        files.sort_by_key(|at| items.get(*at).map(|item| item.first_block));
    }
    Listing { order, ..search.found }
}

struct Search<'a> {
    rescue: &'a Rescue,
    found: Listing,
    /// Listed directories in order, each with the range of its items.
    dirs: Vec<(usize, Range<usize>)>,
    /// First item of each inode with several links.
    links: HashMap<InodeNumber, usize>,
    /// Inodes that have an item or a loss.
    seen: HashSet<u32>,
    /// Blocks that directories may still have.
    blocks_left: u64,
}

impl Search<'_> {
    /// Adds the tree below a directory.
    fn walk(&mut self, path: Vec<u8>, top: InodeNumber) {
        let first = self.found.items.len();
        self.add(path, top);
        if self.found.items.len() == first {
            return;
        }
        let mut stack = vec![first];
        while let Some(at) = stack.pop() {
            let Some(item) = self.found.items.get(at) else { continue };
            let Some(dir) = item.inode.clone().filter(|it| it.kind == FileType::Directory) else {
                continue;
            };
            let path = item.path.clone();
            let mut names = self.names(&dir);
            if let Some(what) = names.damage.take() {
                self.lose(path.clone(), Some(dir.number), what, false);
            }
            // Inodes are read in the order of their tables.
            names.entries.sort_by_key(|(_, inode)| *inode);
            let from = self.found.items.len();
            let mut taken = HashSet::new();
            for (name, inode) in names.entries {
                let mut name = name;
                if !taken.insert(name.clone()) {
                    name.extend_from_slice(format!("~{inode}").as_bytes());
                    if !taken.insert(name.clone()) {
                        continue;
                    }
                }
                let below = match path.is_empty() {
                    true => name,
                    false => [&path[..], b"/", &name].concat(),
                };
                self.add(below, inode);
            }
            let end = self.found.items.len();
            self.dirs.push((at, from..end));
            stack.extend((from..end).rev());
        }
    }

    fn lose(&mut self, path: Vec<u8>, inode: Option<InodeNumber>, what: String, is_lost: bool) {
        self.found.losses.push(Loss { path, inode, what, missing: vec![], is_lost });
    }

    /// Adds the item of a name, or its loss.
    fn add(&mut self, path: Vec<u8>, number: InodeNumber) {
        if path.len() > MAX_PATH_BYTES {
            return;
        }
        let (inode, is_sound) = match self.rescue.inode(number) {
            Ok(found) => found,
            Err(error) => return self.lose(path, Some(number), error.to_string(), true),
        };
        let is_dir = inode.kind == FileType::Directory;
        let is_new = self.seen.insert(number.0);
        if is_dir && !is_new {
            let what = "another name of a directory that is copied already".to_owned();
            return self.lose(path, Some(number), what, true);
        }
        if !is_sound && is_new {
            self.lose(path.clone(), Some(number), DOUBTFUL_INODE.to_owned(), false);
        }
        let at = self.found.items.len();
        let link_to = match is_dir {
            true => None,
            false => Some(*self.links.entry(number).or_insert(at)).filter(|first| *first != at),
        };
        let volume = &self.rescue.volume;
        self.found.items.push(RescuedItem {
            path,
            attributes: Some(volume.attributes_of(&inode)),
            link_to,
            first_block: volume.first_block(&inode).map_or(0, |block| block.0),
            inode: Some(inode),
        });
    }

    /// Reads the names of a directory.
    fn names(&mut self, dir: &Inode) -> Names {
        let mut names = Names::default();
        let reader = self.rescue.volume.reader();
        let display = NameDisplay::for_directory(reader, dir);
        if dir.is_inline() {
            match reader.load_inline_data(dir) {
                Ok(inline) => {
                    for part in inline.dir_parts() {
                        self.read_entries(dir, &display, part.entries, &mut names);
                    }
                }
                Err(error) => names.damage = Some(error.to_string()),
            }
            return names;
        }
        let map = match map_of_any(dir) {
            Ok(map) => map,
            Err(error) => {
                names.damage = Some(error.to_string());
                return names;
            }
        };
        let super_ = &reader.super_;
        let role = map.role(dir.file_id());
        let read = |block: FsBlock| Ok(self.rescue.metadata(block, role).map(|(bytes, _)| bytes));
        let blocks = u64::from(super_.first_data_block).saturating_add(1)..super_.blocks;
        let source = MapSource { block_bytes: super_.block_bytes, blocks, read: &read };
        let most = u64::from(reader.directory_blocks(dir)).min(self.blocks_left);
        let mut runs = DirectoryRuns { runs: vec![], nodes: HashSet::new(), damaged: 0 };
        let walked = map.walk(&source, 0..most, &mut runs);
        let mut damaged: Vec<String> = vec![];
        if walked.is_err() || runs.damaged > 0 {
            damaged.push("a part of its map".to_owned());
        }
        let has_sums = super_.checksum_seed.is_some();
        let mut count = 0usize;
        for block in runs.runs.into_iter().flatten().map(FsBlock) {
            self.blocks_left = self.blocks_left.saturating_sub(1);
            let is_sound = match self.rescue.metadata(block, Role::Directory(dir.file_id())) {
                Some((bytes, is_sound)) => {
                    let area = dir_tail::dirent_area(&bytes, has_sums);
                    self.read_entries(dir, &display, area, &mut names) && is_sound
                }
                None => false,
            };
            if !is_sound {
                count = count.saturating_add(1);
                if count <= MAX_NAMED_BLOCKS {
                    damaged.push(format!("block {block}"));
                }
            }
        }
        if let Some(more) = count.checked_sub(MAX_NAMED_BLOCKS).filter(|more| *more > 0) {
            damaged.push(format!("{more} more blocks"));
        }
        if self.blocks_left == 0 {
            damaged.push("blocks that the volume does not have".to_owned());
        }
        if !damaged.is_empty() {
            let what = damaged.join(", ");
            names.damage = Some(format!("damaged directory ({what}): names may be missing"));
        }
        names
    }

    /// Reads the entries of a part of a directory; returns false if its chain is broken.
    fn read_entries(
        &self,
        dir: &Inode,
        display: &NameDisplay,
        area: &[u8],
        names: &mut Names,
    ) -> bool {
        let super_ = &self.rescue.volume.reader().super_;
        let may_be_named = |inode: u32| (2..=super_.inodes).contains(&inode);
        let (mut rest, mut is_whole) = (area, true);
        loop {
            let mut entries = Dirents::of(rest, super_).allow_any_bytes(dir.is_encrypted());
            let broken = loop {
                let before = entries.position();
                match entries.next() {
                    Some(Ok(entry)) => {
                        let name = display.display_name(rest, &entry);
                        let is_name =
                            !matches!(&*name, b"." | b"..") && name.len() <= MAX_NAME_BYTES;
                        if is_name && may_be_named(entry.inode.0) {
                            names.entries.push((name.into_owned(), entry.inode));
                        }
                    }
                    Some(Err(_)) if entries.position() < rest.len() => is_whole = false,
                    Some(Err(_)) => {
                        is_whole = false;
                        break before;
                    }
                    None => return is_whole,
                }
            };
            let Some(next) = next_chain(rest, broken, may_be_named) else { return is_whole };
            rest = rest.get(next..).unwrap_or_default();
        }
    }

    /// Adds what only the inode tables have.
    fn find_unnamed(&mut self, progress: Progress<'_>) {
        let unnamed = self.unnamed_inodes(progress);
        if unnamed.is_empty() {
            return;
        }
        let mut named_by_others = BTreeSet::new();
        let left = self.blocks_left;
        for (number, is_dir) in &unnamed {
            if *is_dir && let Ok((dir, _)) = self.rescue.inode(InodeNumber(*number)) {
                let names = self.names(&dir).entries.into_iter().map(|(_, inode)| inode.0);
                named_by_others.extend(names.filter(|inode| inode != number));
            }
        }
        // The same blocks are read again for the items.
        self.blocks_left = left;
        let top = self.lost_and_found();
        let (tops, circles): (Vec<u32>, Vec<u32>) = unnamed
            .into_iter()
            .map(|(number, _)| number)
            .partition(|number| !named_by_others.contains(number));
        for number in tops.into_iter().chain(circles) {
            if self.seen.contains(&number) {
                continue;
            }
            let from = self.found.items.len();
            let path = [&top[..], format!("/#{number}").as_bytes()].concat();
            self.lose(path.clone(), Some(InodeNumber(number)), UNNAMED.to_owned(), false);
            self.walk(path, InodeNumber(number));
            let at = self.found.items.get(from);
            let is_dir = |item: &RescuedItem| {
                item.attributes.as_ref().is_some_and(|it| it.kind == FileType::Directory)
            };
            if at.is_some_and(|item| !is_dir(item)) {
                // A directory is in the order already.
                self.dirs.push((from, from..from));
            }
        }
    }

    /// Returns the path of the directory for files without a name; makes its item if there is none.
    fn lost_and_found(&mut self) -> Vec<u8> {
        let mut path = LOST_AND_FOUND.to_vec();
        let same = |item: &&RescuedItem, path: &[u8]| item.path == path;
        while let Some(item) = self.found.items.iter().find(|item| same(item, &path)) {
            if item.attributes.as_ref().is_some_and(|it| it.kind == FileType::Directory) {
                return path;
            }
            path.push(b'_');
        }
        self.dirs.push((self.found.items.len(), 0..0));
        self.found.items.push(RescuedItem {
            path: path.clone(),
            attributes: None,
            link_to: None,
            inode: None,
            first_block: 0,
        });
        path
    }

    /// Returns the inodes in use that have no item, and whether they are directories.
    fn unnamed_inodes(&self, progress: Progress<'_>) -> Vec<(u32, bool)> {
        let reader = self.rescue.volume.reader();
        let super_ = &reader.super_;
        let mut found = vec![];
        for nth in 0..super_.groups {
            progress(nth.into(), super_.groups.into());
            let Ok(group) = reader.group(GroupNumber(nth)) else {
                log::warn!("group {nth}: its descriptor is lost: its inodes are not searched");
                continue;
            };
            if group.flags & INODE_UNINIT != 0 {
                continue;
            }
            let bitmap = reader.store.block(group.inode_bitmap, Role::InodeBitmap(nth)).ok();
            let is_used = |within: u32| {
                let byte = saturating_usize((within / 8).into());
                bitmap.as_ref().is_none_or(|bitmap| {
                    bitmap.get(byte).is_none_or(|byte| byte >> (within % 8) & 1 == 1)
                })
            };
            let used = super_.inodes_per_group.saturating_sub(group.unused_inodes);
            let first = nth.saturating_mul(super_.inodes_per_group).saturating_add(1);
            for within in (0..used).filter(|within| is_used(*within)) {
                let number = first.saturating_add(within);
                let is_own = !super_.is_valid_inode(InodeNumber(number));
                if is_own || self.seen.contains(&number) {
                    continue;
                }
                // Without a name and with a wrong checksum, nothing says that it is an inode.
                let Ok((inode, true)) = self.rescue.inode(InodeNumber(number)) else { continue };
                let is_value = inode.kind == FileType::File && self.rescue.is_value(inode.number);
                if inode.links() > 0 && !is_value && self.is_plausible(&inode) {
                    found.push((number, inode.kind == FileType::Directory));
                }
            }
        }
        found
    }

    /// Returns true if an inode's numbers fit the volume.
    fn is_plausible(&self, inode: &Arc<Inode>) -> bool {
        let super_ = &self.rescue.volume.reader().super_;
        let sectors = super_.blocks.saturating_mul(u64::from(super_.block_bytes / 512));
        self.rescue.volume.attributes_of(inode).blocks_512 <= sectors
    }
}

/// Blocks of a directory.
struct DirectoryRuns {
    runs: Vec<Range<u64>>,
    nodes: HashSet<u64>,
    damaged: u64,
}

impl MapVisitor for DirectoryRuns {
    fn visit_run(&mut self, _: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
        match place {
            BlockLocation::Mapped(first) => {
                self.runs.push(first.0..first.0.saturating_add(blocks));
            }
            BlockLocation::Damaged(_) => self.damaged = self.damaged.saturating_add(blocks),
            BlockLocation::Hole | BlockLocation::Unwritten(_) => {}
        }
        ControlFlow::Continue(())
    }

    fn visit_node(&mut self, node: MapNode) -> bool {
        let is_new = self.nodes.insert(node.block.0);
        self.damaged = self.damaged.saturating_add(u64::from(!is_new));
        is_new
    }
}
