//! Pass 2 and 3: directories, built anew from their valid entries, and `lost+found`.

use std::collections::{BTreeMap, BTreeSet};

use draconis_types::FileType;
use zerocopy::FromBytes;

use super::Fixer;
use super::groups::initialise;
use super::inodes::set_inline_list;
use super::maps::MappedRun;
use crate::check::raw_inode::has_map;
use crate::check::xattrs::inline_data_value;
use crate::check::{Problem, What};
use crate::dir::broken_chain::{next_chain, parse};
use crate::dir::build::{DirectoryFormat, NewDirent, build_directory};
use crate::dir::remains::visit_entries;
use crate::format::dir_tail;
use crate::format::dirent::DirBlockFormat;
use crate::format::features::{Compatible, Incompatible};
use crate::format::hash::NameHash;
use crate::format::inline::{InlineData, POINTER_BYTES};
use crate::format::inode::{POINTERS, RawInode, flags};
use crate::format::inode_slot::{InodeSlot, InodeTime};
use crate::format::le16;
use crate::format::xattr::edit::read_body;
use crate::map::extents::empty_root;
use crate::units::{saturating_u32, saturating_usize};
use crate::{Error, FileId, InodeNumber, Result};

const ROOT: u32 = 2;
const LOST_AND_FOUND: &[u8] = b"lost+found";

/// A name in a directory.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Name {
    name: Vec<u8>,
    inode: u32,
}

/// What the blocks of a directory say.
#[derive(Debug, Default)]
struct Listing {
    names: Vec<Name>,
    parent: Option<u32>,
}

impl Fixer<'_> {
    /// Fixes names that lead to inodes that their group says were never used: the inodes count.
    fn fix_unused_inodes(&mut self, problems: &[&Problem]) -> Result<bool> {
        let check = self.check()?;
        let per_group = check.super_.inodes_per_group.max(1);
        let mut groups = BTreeSet::new();
        for problem in problems.iter().filter(|it| it.what == What::EntryUnused) {
            let number = problem.found.and_then(|it| u32::try_from(it).ok()).unwrap_or(0);
            let nth = number.saturating_sub(1);
            let group = nth.checked_div(per_group).unwrap_or(0);
            let within = nth.checked_rem(per_group).unwrap_or(0);
            let Some(layout) = check.groups.get(saturating_usize(group.into())) else { continue };
            let is_beyond = within >= per_group.saturating_sub(layout.unused);
            let has_mode = || self.slot(number).map(|slot| le16(&slot, 0).unwrap_or(0) != 0);
            if is_beyond && has_mode()? {
                groups.insert(group);
                self.done(problem, "the whole table of inodes of the group counts");
            }
        }
        for group in &groups {
            self.edit_group(*group, initialise)?;
        }
        Ok(!groups.is_empty())
    }

    pub(super) fn fix_directories(&mut self, problems: &[&Problem]) -> Result<()> {
        if self.fix_unused_inodes(problems)? {
            return Ok(());
        }
        let mut damaged = BTreeMap::new();
        let mut unfit: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        let mut renamed_twice = BTreeSet::new();
        for problem in problems {
            let Some(InodeNumber(number)) = problem.inode else { continue };
            match problem.what {
                What::DirectoryTwice => {
                    renamed_twice.insert(number);
                    self.done(problem, "the directory keeps the name that its .. agrees with");
                }
                What::EntryEncryption => {
                    let child = problem.found.and_then(|it| u32::try_from(it).ok());
                    unfit.entry(number).or_default().extend(child);
                    self.done(problem, "the name is removed; the file gets one in lost+found");
                }
                _ => {
                    damaged.insert(number, ());
                    self.done(problem, "the directory is built anew from its valid entries");
                }
            }
        }
        for number in damaged.into_keys() {
            self.rebuild_directory(number, None, &BTreeSet::new())?;
        }
        for (number, drops) in unfit {
            self.rebuild_without(number, &drops, false)?;
        }
        if renamed_twice.is_empty() {
            return Ok(());
        }
        let mut all: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (dir, child) in self.all_names()? {
            if renamed_twice.contains(&child) {
                all.entry(child).or_default().push(dir);
            }
        }
        for (child, parents) in all {
            let said = self.listing(child)?.parent;
            let kept = said.filter(|it| parents.contains(it)).or(parents.first().copied());
            let mut has_kept = false;
            for parent in parents.iter().collect::<BTreeSet<_>>() {
                let is_kept = Some(*parent) == kept;
                if is_kept && !has_kept && parents.iter().filter(|it| *it == parent).count() == 1 {
                    has_kept = true;
                    continue;
                }
                let drops: BTreeSet<u32> = [child].into();
                self.rebuild_without(*parent, &drops, is_kept)?;
            }
        }
        Ok(())
    }

    /// Rebuilds a directory without the names of some inodes; with `keeps_first`, the first stays.
    fn rebuild_without(
        &mut self,
        number: u32,
        drops: &BTreeSet<u32>,
        keeps_first: bool,
    ) -> Result<()> {
        let mut listing = self.listing(number)?;
        let mut kept = keeps_first;
        listing.names.retain(|it| !drops.contains(&it.inode) || std::mem::take(&mut kept));
        let mut slot = self.slot(number)?;
        let parent = listing.parent.unwrap_or(ROOT);
        self.write_directory(number, &mut slot, parent, &listing.names)?;
        self.put_slot(number, slot)
    }

    pub(super) fn rebuild_directory(
        &mut self,
        number: u32,
        parent: Option<u32>,
        drops: &BTreeSet<u32>,
    ) -> Result<()> {
        let mut listing = self.listing(number)?;
        listing.names.retain(|it| !drops.contains(&it.inode));
        let mut slot = self.slot(number)?;
        let parent = match (number, parent.or(listing.parent)) {
            (ROOT, _) | (_, None) => ROOT,
            (_, Some(parent)) => parent,
        };
        self.write_directory(number, &mut slot, parent, &listing.names)?;
        self.put_slot(number, slot)
    }

    /// Reads the valid entries of a directory; a broken chain goes on where the rest of a block is
    /// one again.
    fn listing(&self, number: u32) -> Result<Listing> {
        let check = self.check()?;
        let slot = self.slot(number)?;
        let (raw, _) = RawInode::ref_from_prefix(&slot).map_err(|_| Error::corrupt("inode"))?;
        let mut found = Listing::default();
        let is_encrypted = raw.i_flags.get() & flags::ENCRYPT != 0;
        if is_inline(&slot) {
            let value = inline_data_value(&slot).unwrap_or_default();
            let pointers = raw.i_block.map(|word| word.get().to_le_bytes());
            let mut bytes = [0; POINTER_BYTES];
            bytes.copy_from_slice(pointers.as_flattened());
            let inside = InlineData::new(&bytes, value);
            found.parent = inside.parent().ok().map(|it| it.0);
            for part in inside.dir_parts() {
                self.read_entries(part.entries, is_encrypted, number, &mut found)?;
            }
            make_unique(&mut found);
            return Ok(found);
        }
        if !has_map(check, raw) {
            return Ok(found);
        }
        let sums = check.super_.checksum_seed.is_some();
        let mut seen = BTreeSet::new();
        for run in self.runs(number, &slot)? {
            for nth in 0..run.blocks {
                let at = run.start.saturating_add(nth.into());
                if check.metadata.contains(check.block_index(at)) || !seen.insert(at) {
                    continue;
                }
                let bytes = self.block(at)?;
                let area = dir_tail::dirent_area(&bytes, sums);
                self.read_entries(area, is_encrypted, number, &mut found)?;
            }
        }
        make_unique(&mut found);
        Ok(found)
    }

    fn read_entries(
        &self,
        area: &[u8],
        is_encrypted: bool,
        dir: u32,
        found: &mut Listing,
    ) -> Result<()> {
        let mut at = 0usize;
        while at < area.len() {
            let Some((inode, name, len)) = parse(area, at) else {
                let may_be_named = |inode| self.may_be_named(inode);
                let Some(next) = next_chain(area, at, may_be_named) else { return Ok(()) };
                at = next;
                continue;
            };
            at = at.saturating_add(len);
            self.read_entry(inode, name, is_encrypted, dir, found)?;
        }
        Ok(())
    }

    fn read_entry(
        &self,
        inode: u32,
        name: &[u8],
        is_encrypted: bool,
        dir: u32,
        found: &mut Listing,
    ) -> Result<()> {
        let check = self.check()?;
        let state = check.inode_states.get(inode);
        match name {
            b".." if state.is_directory() && found.parent.is_none() => found.parent = Some(inode),
            b"." | b".." => {}
            _ if !self.may_be_named(inode) || inode == dir => {}
            name => {
                let mut name = name.to_vec();
                if !is_encrypted {
                    name.iter_mut().filter(|it| matches!(it, 0 | b'/')).for_each(|it| *it = b'.');
                }
                if name.is_empty() {
                    name = format!("#{inode}").into_bytes();
                }
                found.names.push(Name { name, inode });
            }
        }
        Ok(())
    }

    fn may_be_named(&self, inode: u32) -> bool {
        self.check.is_some_and(|check| {
            (check.super_.first_inode.0..=check.super_.inodes).contains(&inode)
                && check.inode_states.get(inode).is_used()
        })
    }

    /// Returns all directories and the inodes that they name.
    fn all_names(&self) -> Result<Vec<(u32, u32)>> {
        let check = self.check()?;
        let mut all = vec![];
        let others = check.super_.first_inode.0..=check.super_.inodes;
        for dir in std::iter::once(ROOT).chain(others) {
            if check.inode_states.get(dir).is_directory() {
                all.extend(self.listing(dir)?.names.into_iter().map(|it| (dir, it.inode)));
            }
        }
        Ok(all)
    }

    fn directory_format(&self, set: u32) -> Result<DirectoryFormat> {
        let super_ = &self.check()?.super_;
        let is_plain = set & (flags::CASEFOLD | flags::ENCRYPT) == 0;
        let version = super_.default_hash_version;
        let hash = NameHash::of_version(version, super_.hash_unsigned, super_.hash_seed);
        let is_indexed = is_plain && super_.compatible.contains(Compatible::DIR_INDEX);
        Ok(DirectoryFormat {
            shape: DirBlockFormat {
                block_bytes: super_.block_bytes,
                filetype: super_.incompatible.contains(Incompatible::FILETYPE),
                has_checksums: super_.checksum_seed.is_some(),
            },
            index: hash.filter(|_| is_indexed).map(|hash| (hash, version)),
            levels: 1u8.saturating_add(super_.incompatible.contains(Incompatible::LARGEDIR).into()),
        })
    }

    /// Writes a directory: its blocks, and map, size and flags into the bytes of its inode. Its own
    /// blocks are used again as far as nothing else claims them.
    pub(super) fn write_directory(
        &mut self,
        number: u32,
        slot: &mut [u8],
        parent: u32,
        names: &[Name],
    ) -> Result<()> {
        let check = self.check()?;
        let mut it = InodeSlot::from_bytes(slot)?;
        if it.flags() & flags::INLINE_DATA != 0 {
            // A directory inside its inode gets blocks: what it needs anew may not fit there.
            let mut list = read_body(it.inline_xattrs()).unwrap_or_default();
            list.retain(|it| !it.is_inline_data());
            set_inline_list(&mut it, &list);
            let extents = check.super_.incompatible.contains(Incompatible::EXTENTS);
            let mapping = if extents { flags::EXTENTS } else { 0 };
            it.set_flags(it.flags() & !flags::INLINE_DATA | mapping);
            it.set_pointers(if extents { empty_root() } else { [0; POINTERS] });
        }
        let set = it.flags();
        let style = self.directory_format(set)?;
        let kind = |inode: u32| {
            let code = check.inode_states.get(inode).file_type();
            FileType::from_number(code.into()).unwrap_or(FileType::File)
        };
        let names: Vec<NewDirent<'_>> = names
            .iter()
            .map(|it| NewDirent { name: &it.name, inode: it.inode, kind: kind(it.inode) })
            .collect();
        let built = build_directory(number, parent, &names, style);
        let block_bytes = saturating_usize(check.super_.block_bytes.into()).max(1);
        let count = built.bytes.len().checked_div(block_bytes).unwrap_or(0);
        let (raw, _) = RawInode::ref_from_prefix(slot).map_err(|_| Error::corrupt("inode"))?;
        let own = if has_map(check, raw) { self.runs(number, slot)? } else { vec![] };
        let mut seen = BTreeSet::new();
        let mut places: Vec<u64> = own
            .iter()
            // A cluster holds blocks in the order of the file.
            .filter(|run| !run.unwritten && check.super_.cluster_blocks == 1)
            .flat_map(|run| run.start..run.start.saturating_add(run.blocks.into()))
            .filter(|at| {
                !check.metadata.contains(check.block_index(*at))
                    && !check.multiply_claimed.contains(check.cluster_index(*at))
                    && seen.insert(*at)
            })
            .take(count)
            .collect();
        places.extend(self.allocate(count.saturating_sub(places.len()))?);
        let generation = InodeSlot::from_bytes(slot)?.generation();
        let seed = check.super_.file_checksum_seed(FileId { inode: number, generation });
        for (bytes, at) in built.bytes.chunks(block_bytes).zip(&places) {
            let mut bytes = bytes.to_vec();
            if let Some(seed) = seed {
                dir_tail::set_checksum(&mut bytes, seed);
            }
            self.put(*at, bytes)?;
        }
        let run = |(from, at): (usize, &u64)| MappedRun {
            from: saturating_u32(from as u64),
            start: *at,
            blocks: 1,
            unwritten: false,
        };
        let runs: Vec<_> = places.iter().enumerate().map(run).collect();
        let mut it = InodeSlot::from_bytes(slot)?;
        it.set_flags(if built.indexed { set | flags::INDEX } else { set & !flags::INDEX });
        it.set_size(built.bytes.len() as u64);
        self.set_map(number, slot, &runs)
    }

    pub(super) fn fix_connections(&mut self, problems: &[&Problem]) -> Result<()> {
        let lost: BTreeSet<u32> = problems
            .iter()
            .filter(|it| it.what == What::Unconnected)
            .filter_map(|it| it.inode.map(|inode| inode.0))
            .collect();
        for problem in problems.iter().filter(|it| it.what == What::Parent) {
            let expected = problem.expected.and_then(|it| u32::try_from(it).ok());
            let (Some(InodeNumber(number)), Some(_)) = (problem.inode, expected) else { continue };
            self.rebuild_directory(number, expected, &BTreeSet::new())?;
            self.done(problem, "the entry .. is set");
        }
        if lost.is_empty() {
            return Ok(());
        }
        let parents: BTreeMap<u32, u32> =
            self.all_names()?.into_iter().rev().map(|(dir, child)| (child, dir)).collect();
        let mut tops = BTreeSet::new();
        for dir in &lost {
            let mut passed = vec![];
            let mut at = *dir;
            let top = loop {
                if let Some(nth) = passed.iter().position(|it| *it == at) {
                    // A circle is opened at its lowest inode.
                    break passed.get(nth..).unwrap_or_default().iter().min().copied();
                }
                passed.push(at);
                match parents.get(&at) {
                    Some(parent) if lost.contains(parent) => at = *parent,
                    _ => break Some(at),
                }
            };
            tops.extend(top);
        }
        let attached = self.lost_and_found()?;
        for top in &tops {
            if let Some(parent) = parents.get(top) {
                self.rebuild_without(*parent, &[*top].into(), false)?;
            }
            self.rebuild_directory(*top, Some(attached), &BTreeSet::new())?;
        }
        for problem in problems.iter().filter(|it| it.what == What::Unconnected) {
            self.done(problem, "the directory, or one above it, gets a name in lost+found");
        }
        self.attach(&tops.into_iter().collect::<Vec<_>>())
    }

    /// Names inodes in `lost+found`.
    pub(super) fn attach(&mut self, inodes: &[u32]) -> Result<()> {
        if inodes.is_empty() {
            return Ok(());
        }
        let dir = self.lost_and_found()?;
        let mut listing = self.listing(dir)?;
        let mut names = UniqueNames::default();
        for it in &listing.names {
            names.insert(&it.name);
        }
        let known = self.removed_names(&inodes.iter().copied().collect())?;
        for inode in inodes {
            let nameless = format!("#{inode}").into_bytes();
            let name = names.insert(known.get(inode).unwrap_or(&nameless));
            listing.names.push(Name { name, inode: *inode });
        }
        let mut slot = self.slot(dir)?;
        let parent = listing.parent.unwrap_or(ROOT);
        self.write_directory(dir, &mut slot, parent, &listing.names)?;
        self.put_slot(dir, slot)
    }

    /// Returns the names of inodes that are left in directories behind other names. An inode with
    /// several has none.
    fn removed_names(&self, inodes: &BTreeSet<u32>) -> Result<BTreeMap<u32, Vec<u8>>> {
        let check = self.check()?;
        let mut found: BTreeMap<u32, BTreeSet<Vec<u8>>> = BTreeMap::new();
        let others = check.super_.first_inode.0..=check.super_.inodes;
        for dir in std::iter::once(ROOT).chain(others) {
            if !check.inode_states.get(dir).is_directory() {
                continue;
            }
            let slot = self.slot(dir)?;
            let (raw, _) = RawInode::ref_from_prefix(&slot).map_err(|_| Error::corrupt("inode"))?;
            if !has_map(check, raw) || raw.i_flags.get() & flags::ENCRYPT != 0 {
                continue;
            }
            let blocks = self.runs(dir, &slot)?.into_iter();
            let blocks =
                blocks.flat_map(|run| run.start..run.start.saturating_add(run.blocks.into()));
            for at in blocks.filter(|at| !check.metadata.contains(check.block_index(*at))) {
                let bytes = self.block(at)?;
                let area = dir_tail::dirent_area(&bytes, check.super_.checksum_seed.is_some());
                visit_entries(area, &check.super_, &mut |entry, is_used| {
                    let number = entry.inode.0;
                    let code = check.inode_states.get(number).file_type();
                    let kind = FileType::from_number(code.into());
                    let fits = entry.kind.is_none_or(|it| Some(it) == kind);
                    if !is_used && fits && inodes.contains(&number) {
                        let names = found.entry(number).or_default();
                        // Two say as much as more.
                        if names.len() < 2 {
                            names.insert(entry.name.to_vec());
                        }
                    }
                });
            }
        }
        let only = found.into_iter().filter(|(_, names)| names.len() == 1);
        Ok(only.flat_map(|(inode, names)| names.into_iter().map(move |it| (inode, it))).collect())
    }

    /// Returns the directory `lost+found` of the root, which is made if it is missing.
    fn lost_and_found(&mut self) -> Result<u32> {
        let check = self.check()?;
        let mut root = self.listing(ROOT)?;
        let is_dir = |it: &&Name| check.inode_states.get(it.inode).is_directory();
        for own in root.names.iter().filter(|it| is_lost_and_found(&it.name)).filter(is_dir) {
            // In an encrypted one a name needs the key.
            let mut slot = self.slot(own.inode)?;
            if InodeSlot::from_bytes(&mut slot)?.flags() & flags::ENCRYPT == 0 {
                return Ok(own.inode);
            }
        }
        let number = self.take_inode()?;
        let mut slot = self.empty_slot()?;
        let mut it = InodeSlot::from_bytes(&mut slot)?;
        it.init_extra_fields();
        it.set_mode(0o040_700);
        it.set_links(2);
        let extents = check.super_.incompatible.contains(Incompatible::EXTENTS);
        it.set_flags(if extents { flags::EXTENTS } else { 0 });
        for which in
            [InodeTime::Accessed, InodeTime::Modified, InodeTime::Changed, InodeTime::Created]
        {
            it.set_time(which, self.now);
        }
        self.write_directory(number, &mut slot, ROOT, &[])?;
        self.put_slot(number, slot)?;
        check.inode_states.set_used(number, Some(FileType::Directory), 2);
        let mut names = UniqueNames::default();
        for it in &root.names {
            names.insert(&it.name);
        }
        let name = names.insert(LOST_AND_FOUND);
        root.names.push(Name { name, inode: number });
        let mut slot = self.slot(ROOT)?;
        self.write_directory(ROOT, &mut slot, ROOT, &root.names)?;
        self.put_slot(ROOT, slot)?;
        Ok(number)
    }
}

/// Returns true for the name of the directory, or the one that it gets beside an unusable one.
fn is_lost_and_found(name: &[u8]) -> bool {
    name == LOST_AND_FOUND || name == with_suffix(LOST_AND_FOUND, 1)
}

/// Returns true for contents inside the inode.
fn is_inline(slot: &[u8]) -> bool {
    RawInode::ref_from_prefix(slot)
        .is_ok_and(|(raw, _)| raw.i_flags.get() & flags::INLINE_DATA != 0)
}

/// Gives names that are there twice a suffix.
fn make_unique(listing: &mut Listing) {
    let mut names = UniqueNames::default();
    for it in &mut listing.names {
        it.name = names.insert(&it.name);
    }
}

/// Names of a directory: one that is there gets a suffix.
#[derive(Default)]
struct UniqueNames {
    /// The next suffix of each name.
    taken: BTreeMap<Vec<u8>, u32>,
}

impl UniqueNames {
    fn insert(&mut self, name: &[u8]) -> Vec<u8> {
        let mut unique = name.to_vec();
        let mut suffix = self.taken.get(name).copied().unwrap_or(0);
        while self.taken.contains_key(&unique) && suffix < u32::MAX {
            suffix = suffix.saturating_add(1);
            unique = with_suffix(name, suffix);
        }
        self.taken.insert(name.to_vec(), suffix);
        self.taken.entry(unique.clone()).or_default();
        unique
    }
}

fn with_suffix(name: &[u8], nth: u32) -> Vec<u8> {
    let suffix = format!("~{nth}").into_bytes();
    let room = 255usize.saturating_sub(suffix.len());
    [name.get(..name.len().min(room)).unwrap_or_default(), &suffix].concat()
}
