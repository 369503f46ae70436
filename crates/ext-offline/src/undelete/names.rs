//! Names of deleted files: from copies of directory blocks, from what is left in directories.
//!
//! ```text
//!   | a · rec_len ───────────────▶ | c ..      in each state of a block: entries, and behind a
//!         | b, removed |                       shorter name the one that was there before
//! ```
//! Law 1: a block is read as a directory only if its whole chain is valid, and its checksum if it has
//! one.
//! Law 2: a name belongs to the file that its inode number meant in that transaction.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use draconis_types::FileType;

use super::Limits;
use super::contents::{FileMap, HistoricReader, inline_data};
use super::history::{NOW, Rank};
use super::inodes::{DeletedInode, InodeStates};
use crate::blocks::role::Role;
use crate::dir::remains::visit_entries;
use crate::format::dir_tail::dirent_area;
use crate::format::le32;
use crate::map::BlockLocation;
use crate::{FileBlock, FileId, InodeNumber, Result};

/// Most directories above a file.
const MAX_DEPTH: usize = 256;

/// A directory: one that exists, or a deleted one by its index.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
enum Dir {
    Existing(u32),
    Deleted(usize),
}

/// A name that an inode number had.
#[derive(Debug)]
struct NameFound {
    dir: Dir,
    name: Vec<u8>,
    kind: Option<FileType>,
    /// Newest transaction in which the entry was in use; `None` if only its remains were found.
    used: Option<Rank>,
}

/// All names of deleted inodes, and of the directories that exist.
#[derive(Debug, Default)]
pub(super) struct Names {
    found: HashMap<u32, Vec<NameFound>>,
    /// Directory and name of each directory that exists.
    existing: HashMap<u32, (u32, Vec<u8>)>,
    /// Parent of each deleted directory, by index.
    parents: HashMap<usize, u32>,
    left: usize,
}

/// Path of a deleted file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct FoundPath {
    /// Path from the root; begins with `#` and an inode number where the rest is unknown.
    pub(super) path: Vec<u8>,
    pub(super) is_known: bool,
    /// Paths of other hard links.
    pub(super) links: Vec<Vec<u8>>,
}

/// Finds the names of all deleted inodes.
///
/// # Errors
/// Errors of the device in the journal.
pub(super) fn find(
    past: HistoricReader<'_>,
    states: &InodeStates,
    files: &[(DeletedInode, FileMap)],
    limits: &Limits,
) -> Result<Names> {
    let wanted: BTreeSet<u32> = files.iter().map(|(file, _)| file.inode.number.0).collect();
    let mut search =
        NameSearch { past, wanted, names: Names { left: limits.max_names, ..Names::default() } };
    for (block, owners) in search.owners(states, files) {
        search.read_block(block, owners)?;
    }
    Ok(search.names)
}

/// A directory that had a block, up to this rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct BlockOwner {
    until: Rank,
    dir: Dir,
    file: (u32, u32),
    is_first: bool,
}

struct NameSearch<'a> {
    past: HistoricReader<'a>,
    wanted: BTreeSet<u32>,
    names: Names,
}

impl NameSearch<'_> {
    /// Returns the blocks of all directories with the directories that had them. Takes the names in
    /// inline directories.
    fn owners(
        &mut self,
        states: &InodeStates,
        files: &[(DeletedInode, FileMap)],
    ) -> BTreeMap<u64, Vec<BlockOwner>> {
        let reader = self.past.reader;
        let mut all: BTreeMap<u64, Vec<BlockOwner>> = BTreeMap::new();
        // Directories have no block in common; a damaged volume may claim otherwise.
        let mut left = reader.super_.blocks.min(reader.disk_blocks()).saturating_mul(2);
        let mut add = |runs: &[crate::Run], until, dir, id: FileId| {
            for run in runs {
                let BlockLocation::Mapped(first) = run.location else { continue };
                for nth in 0..run.blocks {
                    let Some(rest) = left.checked_sub(1) else { return };
                    left = rest;
                    let is_first = run.from.offset(nth) == FileBlock(0);
                    let file = (id.inode, id.generation);
                    let owner = BlockOwner { until, dir, file, is_first };
                    all.entry(first.offset(nth.into()).0).or_default().push(owner);
                }
            }
        };
        for number in &states.directories {
            let Ok(inode) = reader.directory(*number) else { continue };
            let dir = Dir::Existing(number.0);
            if inode.is_inline() {
                if let Ok(inside) = reader.load_inline_data(&inode) {
                    for part in inside.dir_parts() {
                        self.read_entries(part.entries, dir, NOW);
                    }
                }
                continue;
            }
            let end = FileBlock(reader.directory_blocks(&inode));
            let runs = reader.map_runs(&inode, FileBlock(0), end).unwrap_or_default();
            add(&runs, NOW, dir, inode.file_id());
        }
        for (nth, (file, map)) in files.iter().enumerate() {
            if file.inode.kind != FileType::Directory {
                continue;
            }
            let dir = Dir::Deleted(nth);
            add(&map.runs, file.last_seen(), dir, file.inode.file_id());
            if file.inode.is_inline()
                && let Some(inside) = inline_data(file)
            {
                if let Ok(parent) = inside.parent() {
                    self.names.parents.insert(nth, parent.0);
                }
                for part in inside.dir_parts() {
                    self.read_entries(part.entries, dir, file.last_seen());
                }
            }
        }
        all
    }

    /// Reads all states of a block.
    fn read_block(&mut self, block: u64, mut owners: Vec<BlockOwner>) -> Result<()> {
        owners.sort_unstable();
        let past = self.past;
        for copy in past.history.copies(block) {
            let owner = owners.iter().find(|owner| owner.until >= copy.rank);
            if let Some(owner) = owner {
                let bytes = past.history.read(*copy)?;
                self.read_state(block, &bytes, owner, copy.rank);
            }
        }
        let Some(owner) = owners.last() else { return Ok(()) };
        if let Ok(bytes) = past.reader.store.block(crate::FsBlock(block), Role::Contents) {
            // What is left of a deleted directory may be older than its last state.
            let rank = if owner.until == NOW { NOW } else { 0 };
            self.read_state(block, &bytes, owner, rank);
        }
        Ok(())
    }

    /// Reads one state of a block, if it is one of this directory.
    fn read_state(&mut self, block: u64, bytes: &[u8], owner: &BlockOwner, rank: Rank) {
        let reader = self.past.reader;
        let (inode, generation) = owner.file;
        let role = Role::Directory(FileId { inode, generation });
        if reader.store.verify_checksum(crate::FsBlock(block), role, bytes).is_err() {
            return;
        }
        if owner.is_first {
            if le32(bytes, 0) != Some(inode) {
                return;
            }
            if let (Dir::Deleted(nth), Some(parent)) = (owner.dir, le32(bytes, 12)) {
                self.names.parents.insert(nth, parent);
            }
        }
        let area = dirent_area(bytes, reader.store.has_checksums());
        self.read_entries(area, owner.dir, rank);
    }

    /// Takes the names of a chain, those in use and the remains behind them.
    fn read_entries(&mut self, chain: &[u8], dir: Dir, rank: Rank) {
        let reader = self.past.reader;
        visit_entries(chain, &reader.super_, &mut |entry, is_used| {
            self.add(entry.inode.0, dir, entry.name, entry.kind, is_used.then_some(rank));
        });
    }

    fn add(
        &mut self,
        inode: u32,
        dir: Dir,
        name: &[u8],
        kind: Option<FileType>,
        used: Option<Rank>,
    ) {
        if let (Dir::Existing(parent), Some(NOW), Some(FileType::Directory) | None) =
            (dir, used, kind)
        {
            self.names.existing.insert(inode, (parent, name.to_vec()));
        }
        if !self.wanted.contains(&inode) {
            return;
        }
        let all = self.names.found.entry(inode).or_default();
        if let Some(same) =
            all.iter_mut().find(|it| it.dir == dir && it.name == name && it.kind == kind)
        {
            same.used = same.used.max(used);
            return;
        }
        if let Some(left) =
            self.names.left.checked_sub(1).filter(|_| all.len() < MAX_NAMES_OF_INODE)
        {
            self.names.left = left;
            all.push(NameFound { dir, name: name.to_vec(), kind, used });
        }
    }
}

/// Most names that are kept of one inode number.
const MAX_NAMES_OF_INODE: usize = 64;
/// Most bytes of all paths together.
const MAX_PATH_BYTES: usize = 256 << 20;

impl Names {
    /// Returns the paths of all files.
    pub(super) fn paths(&self, files: &[(DeletedInode, FileMap)]) -> Vec<FoundPath> {
        // Of each number, the transactions that last show each file.
        let mut ends: HashMap<u32, Vec<Rank>> = HashMap::new();
        for (file, _) in files {
            ends.entry(file.inode.number.0).or_default().push(file.last_seen());
        }
        let names: Vec<Option<&NameFound>> = files
            .iter()
            .map(|(file, _)| {
                let ends = ends.get(&file.inode.number.0).map_or(&[][..], Vec::as_slice);
                let before = ends.iter().filter(|end| **end < file.seen.0).max().copied();
                let is_newest = ends.iter().max() == Some(&file.last_seen());
                self.name_of(file, before, is_newest)
            })
            .collect();
        let mut left = MAX_PATH_BYTES;
        let mut add = |nth: usize, name: Option<&NameFound>| {
            let mut found = self.path(nth, name, files, &names);
            match left.checked_sub(found.path.len()) {
                Some(less) => left = less,
                None => {
                    let number = files.get(nth).map_or(0, |(file, _)| file.inode.number.0);
                    (found.path, found.is_known) = (format!("#{number}").into_bytes(), false);
                }
            }
            found
        };
        let mut paths: Vec<FoundPath> = vec![];
        for (nth, ((file, _), name)) in files.iter().zip(&names).enumerate() {
            let mut path = add(nth, *name);
            if let Some(name) = name.filter(|_| file.inode.kind != FileType::Directory) {
                let links = self.links_of(file, name).into_iter().map(|link| add(nth, Some(link)));
                path.links = links.filter(|it| it.is_known).map(|it| it.path).collect();
            }
            paths.push(path);
        }
        paths
    }

    /// Returns the other names of a file: of those in use up to its last state the newest, as many as
    /// it has links.
    fn links_of(&self, file: &DeletedInode, name: &NameFound) -> Vec<&NameFound> {
        let more = usize::from(file.inode.links().saturating_sub(1));
        let Some(all) = self.found.get(&file.inode.number.0).filter(|_| more > 0) else {
            return vec![];
        };
        let end = file.deleted_in.unwrap_or(NOW);
        let is_link = |it: &&NameFound| {
            it.used.is_some_and(|rank| rank >= file.seen.0 && rank < end)
                && it.kind.is_none_or(|kind| kind == file.inode.kind)
                && (it.dir, &it.name) != (name.dir, &name.name)
        };
        let mut links: Vec<&NameFound> = all.iter().filter(is_link).collect();
        links.sort_by_key(|it| std::cmp::Reverse(it.used));
        links.truncate(more);
        links
    }

    /// Returns the last name of a file; `before` is the rank that last shows another file of that
    /// number. Remains, whose time is unknown, belong to the newest file of a number.
    fn name_of(
        &self,
        file: &DeletedInode,
        before: Option<Rank>,
        is_newest: bool,
    ) -> Option<&NameFound> {
        let all = self.found.get(&file.inode.number.0)?;
        let fits = |it: &&NameFound| it.kind.is_none_or(|kind| kind == file.inode.kind);
        let end = file.deleted_in.unwrap_or(NOW);
        let used = all.iter().filter(fits).filter(|it| {
            it.used.is_some_and(|rank| rank < end && before.is_none_or(|before| rank > before))
        });
        used.max_by_key(|it| it.used).or_else(|| {
            let mut remains = all.iter().filter(fits).filter(|it| it.used.is_none());
            let only = remains.next();
            only.filter(|_| is_newest && remains.next().is_none())
        })
    }

    /// Returns the path of a file by one of its names.
    fn path(
        &self,
        nth: usize,
        own: Option<&NameFound>,
        files: &[(DeletedInode, FileMap)],
        names: &[Option<&NameFound>],
    ) -> FoundPath {
        let mut parts: Vec<Vec<u8>> = vec![];
        let number_of = |nth: usize| files.get(nth).map_or(0, |(file, _)| file.inode.number.0);
        let orphans = |inode: u32| format!("#{inode}").into_bytes();
        let mut at = Dir::Deleted(nth);
        let mut is_known = true;
        while parts.len() < MAX_DEPTH {
            let above = match at {
                Dir::Existing(number) if number == InodeNumber::ROOT.0 => {
                    parts.push(vec![]);
                    break;
                }
                Dir::Existing(number) => match self.existing.get(&number) {
                    Some((parent, name)) => Some((Dir::Existing(*parent), name.clone())),
                    None => {
                        parts.push(orphans(number));
                        None
                    }
                },
                Dir::Deleted(_) if parts.is_empty() && own.is_some() => {
                    own.map(|found| (found.dir, found.name.clone()))
                }
                Dir::Deleted(nth) => match names.get(nth).copied().flatten() {
                    Some(found) => Some((found.dir, found.name.clone())),
                    None => {
                        is_known = false;
                        parts.push(orphans(number_of(nth)));
                        // Without a name of its own, the directory may still tell its parent.
                        self.parents
                            .get(&nth)
                            .filter(|parent| self.existing.contains_key(parent) || **parent == 2)
                            .map(|parent| (Dir::Existing(*parent), parts.pop().unwrap_or_default()))
                    }
                },
            };
            let Some((dir, name)) = above else {
                is_known = false;
                break;
            };
            parts.push(name);
            at = dir;
        }
        is_known &= parts.last().is_some_and(Vec::is_empty);
        parts.reverse();
        FoundPath { path: parts.join(&b'/'), is_known, links: vec![] }
    }
}
