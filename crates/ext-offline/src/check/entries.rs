//! Pass 2: the entries of every directory.

use std::borrow::Cow;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU32, Ordering};

use zerocopy::{FromBytes, IntoBytes};

use super::bit_set::AtomicBitSet;
use super::blocks::walk_map;
use super::htree::HashRange;
use super::problem::{Problem, What};
use super::{Check, htree, prefetch, raw_inode, xattrs};
use crate::blocks::role::Role as BlockRole;
use crate::format::dirent::{HEAD_BYTES, rec_len_from_disk};
use crate::format::features::{Compatible, Incompatible};
use crate::format::hash::NameHash;
use crate::format::inline::{InlineData, POINTER_BYTES};
use crate::format::inode::{RawInode, flags};
use crate::format::{casefold, dir_tail, le16, le32};
use crate::map::{BlockLocation, MapNode, MapVisitor};
use crate::{FileId, FsBlock, InodeNumber, Result};

/// No parent directory found yet.
const NO_PARENT: u32 = u32::MAX;
/// Minimum length of an encrypted name.
const MIN_ENCRYPTED_NAME_BYTES: usize = 16;
/// Minimum record length.
const MIN_RECORD_BYTES: usize = 12;

/// All directories, in order, with their parents.
pub(super) struct ParentTable<'a> {
    pub(super) directories: &'a [u32],
    /// Lowest directory that references each directory.
    parents: Vec<AtomicU32>,
    /// Target of each directory's `..`.
    dot_dots: Vec<AtomicU32>,
}

impl<'a> ParentTable<'a> {
    fn new(directories: &'a [u32]) -> Self {
        let all = |value: u32| directories.iter().map(|_| AtomicU32::new(value)).collect();
        Self { directories, parents: all(NO_PARENT), dot_dots: all(0) }
    }

    pub(super) fn index_of(&self, inode: u32) -> Option<usize> {
        self.directories.binary_search(&inode).ok()
    }

    pub(super) fn parent(&self, place: usize) -> Option<u32> {
        let parent = self.parents.get(place)?.load(Ordering::Relaxed);
        (parent != NO_PARENT).then_some(parent)
    }

    pub(super) fn dot_dot_inode(&self, place: usize) -> u32 {
        self.dot_dots.get(place).map_or(0, |it| it.load(Ordering::Relaxed))
    }

    /// Records a reference to a directory; returns true if it is the first.
    fn set_parent(&self, child: u32, parent: u32) -> bool {
        let word = self.index_of(child).and_then(|place| self.parents.get(place));
        word.is_none_or(|word| word.fetch_min(parent, Ordering::Relaxed) == NO_PARENT)
    }

    fn set_dot_dot_inode(&self, dir: u32, inode: u32) {
        if let Some(word) = self.index_of(dir).and_then(|place| self.dot_dots.get(place)) {
            word.store(inode, Ordering::Relaxed);
        }
    }
}

/// Checks all directories.
pub(super) fn check_directories<'a>(check: &Check<'_>, list: &'a [u32]) -> Result<ParentTable<'a>> {
    let parents = ParentTable::new(list);
    let in_groups = check.super_.blocks.saturating_sub(check.super_.first_data_block.into());
    let walked = AtomicBitSet::new(in_groups);
    let batch = |nth: usize| {
        let start = nth.saturating_mul(prefetch::DIRECTORIES_PER_BATCH);
        let end = start.saturating_add(prefetch::DIRECTORIES_PER_BATCH).min(list.len());
        list.get(start..end).unwrap_or_default()
    };
    (0..prefetch::BATCHES_IN_FLIGHT)
        .for_each(|nth| prefetch::prefetch_directories(check, batch(nth)));
    check.run_parallel(list.len().div_ceil(prefetch::DIRECTORIES_PER_BATCH), |nth| {
        prefetch::prefetch_directories(
            check,
            batch(nth.saturating_add(prefetch::BATCHES_IN_FLIGHT)),
        );
        batch(nth).iter().try_for_each(|dir| check_directory(check, *dir, &parents, &walked))
    })?;
    Ok(parents)
}

/// Blocks of a directory, without those already walked for another directory.
struct BlockCollector<'a, 'b> {
    check: &'a Check<'b>,
    walked: &'a AtomicBitSet,
    blocks: Vec<(u64, u64)>,
    skipped: bool,
}

impl BlockCollector<'_, '_> {
    fn mark_visited(&mut self, block: u64) -> bool {
        let nth = self.check.block_index(block);
        let first = !self.walked.insert(nth) && !self.check.metadata.contains(nth);
        self.skipped |= !first;
        first
    }
}

impl MapVisitor for BlockCollector<'_, '_> {
    fn visit_run(&mut self, at: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
        match place {
            BlockLocation::Hole => {}
            BlockLocation::Mapped(FsBlock(block)) | BlockLocation::Unwritten(FsBlock(block)) => {
                for nth in 0..blocks {
                    let block = block.saturating_add(nth);
                    if self.mark_visited(block) {
                        self.blocks.push((at.saturating_add(nth), block));
                    } else if !self.check.count_revisit() {
                        break;
                    }
                }
            }
            BlockLocation::Damaged(_) => self.skipped = true,
        }
        ControlFlow::Continue(())
    }

    fn visit_node(&mut self, node: MapNode) -> bool {
        self.mark_visited(node.block.0)
    }
}

fn check_directory(
    check: &Check<'_>,
    dir: u32,
    parents: &ParentTable<'_>,
    walked: &AtomicBitSet,
) -> Result<()> {
    let bytes = raw_inode::read_inode_slot(check, dir)?;
    let Ok((raw, _)) = RawInode::ref_from_prefix(&bytes) else { return Ok(()) };
    let policy = match raw.i_flags.get() & flags::ENCRYPT != 0 {
        true => check.policies.lock().get(&dir).cloned(),
        false => None,
    };
    let folds = raw.i_flags.get() & flags::CASEFOLD != 0
        && check.super_.incompatible.contains(Incompatible::CASEFOLD);
    if raw.i_flags.get() & flags::INLINE_DATA != 0 {
        check_inline_directory(check, dir, &bytes, parents, folds, policy);
        return Ok(());
    }
    let mut collect = BlockCollector { check, walked, blocks: Vec::new(), skipped: false };
    if raw_inode::has_map(check, raw) {
        walk_map(check, dir, raw, &mut collect)?;
    }
    let BlockCollector { blocks, skipped, .. } = collect;
    let file = FileId { inode: dir, generation: raw.i_generation.get() };
    let seed = check.super_.file_checksum_seed(file);
    if !skipped {
        report_holes(check, dir, &blocks);
    }
    let indexed = raw.i_flags.get() & flags::INDEX != 0
        && check.super_.compatible.contains(Compatible::DIR_INDEX)
        && !skipped;
    let mut first = None;
    let mut hash = None;
    if indexed && let Some((0, block)) = blocks.first() {
        let bytes = check.block(*block, BlockRole::Directory(Check::file_id(dir)))?;
        hash = htree::name_hash_of_root(check, &bytes);
        first = Some(bytes);
    }
    let mut ranges = Vec::new();
    let numbers: Vec<u64> = blocks.iter().map(|(_, block)| *block).collect();
    for (nth, (at, block)) in blocks.iter().enumerate() {
        prefetch::prefetch_list(check, nth, &numbers);
        let bytes = check.block(*block, BlockRole::Directory(Check::file_id(dir)))?;
        let scan = DirentScan {
            check,
            dir,
            at: *at,
            block: Some(*block),
            parents,
            hash,
            folds,
            policy: policy.as_deref(),
        };
        if seed.is_some_and(|seed| !dir_tail::has_valid_checksum(&bytes, seed)) {
            scan.report_problem(What::DirectoryChecksum, |it| it);
        }
        let range = scan.check_block_entries(dir_tail::dirent_area(&bytes, seed.is_some()));
        if first.is_some() {
            ranges.push((*at, *block, range));
        }
    }
    match first {
        Some(root) => htree::check_htree(check, dir, &root, &ranges),
        None => Ok(()),
    }
}

/// Checks an inline directory.
fn check_inline_directory(
    check: &Check<'_>,
    dir: u32,
    slot: &[u8],
    parents: &ParentTable<'_>,
    folds: bool,
    policy: Option<Vec<u8>>,
) {
    let Ok((raw, _)) = RawInode::ref_from_prefix(slot) else { return };
    let Some(value) = xattrs::inline_data_value(slot) else { return };
    let pointers = raw.i_block.as_bytes().first_chunk::<POINTER_BYTES>();
    let Some(data) = pointers.map(|pointers| InlineData::new(pointers, value)) else { return };
    // Inline directories store no `.` and `..` entries.
    let scan = DirentScan {
        check,
        dir,
        at: 1,
        block: None,
        parents,
        hash: None,
        folds,
        policy: policy.as_deref(),
    };
    check.inode_states.count_name(dir);
    match data.parent() {
        Ok(InodeNumber(parent)) => {
            parents.set_dot_dot_inode(dir, parent);
            scan.check_target(
                &RawDirentView { inode: parent, kind: 2, name: b"..", is_nul_terminated: true },
                true,
            );
        }
        Err(_) => scan.report_problem(What::DotDot, |it| it),
    }
    for part in data.dir_parts() {
        scan.check_block_entries(part.entries);
    }
}

fn report_holes(check: &Check<'_>, dir: u32, blocks: &[(u64, u64)]) {
    let mut next = 0;
    for (at, _) in blocks {
        if *at != next {
            let complaint = Problem::new(What::DirectoryHole).inode(dir);
            check.problems.add(complaint.found(next));
        }
        next = at.saturating_add(1);
    }
}

/// Scan of one directory block.
struct DirentScan<'a, 'b> {
    check: &'a Check<'b>,
    dir: u32,
    at: u64,
    /// `None` for an inline directory.
    block: Option<u64>,
    parents: &'a ParentTable<'a>,
    hash: Option<NameHash>,
    /// True if names are case-insensitive.
    folds: bool,
    /// Encryption policy of the names, if any.
    policy: Option<&'a [u8]>,
}

struct RawDirentView<'a> {
    inode: u32,
    kind: u8,
    name: &'a [u8],
    /// True if a NUL follows the name.
    is_nul_terminated: bool,
}

impl DirentScan<'_, '_> {
    fn report_problem(&self, what: What, with: impl FnOnce(Problem) -> Problem) {
        let complaint = Problem::new(what).inode(self.dir);
        let complaint = Problem { block: self.block.map(FsBlock), ..complaint };
        self.check.problems.add(with(complaint));
    }

    fn check_block_entries(&self, bytes: &[u8]) -> HashRange {
        let mut at = 0usize;
        // With their first bytes, which tell most names apart.
        let mut names: Vec<(u64, Cow<'_, [u8]>)> = Vec::new();
        let mut range = None;
        let mut nth = 0u32;
        while at < bytes.len() {
            let Some((entry, len)) = parse_record(bytes, at) else {
                self.report_problem(What::EntryChain, |it| it.found(at as u64));
                return range;
            };
            let dots = self.at == 0 && nth < 2;
            if dots {
                self.check_dots(nth, &entry);
            }
            if entry.inode != 0 {
                if !dots && self.check_name(&entry) {
                    let key = self.comparison_key(entry.name);
                    names.push((first_bytes(&key), key));
                }
                self.check_target(&entry, dots);
                if !dots && let Some(hash) = self.hash {
                    let hash = hash.hash_name(&self.comparison_key(entry.name));
                    let (low, high) = range.unwrap_or((hash, hash));
                    range = Some((hash.min(low), hash.max(high)));
                }
            }
            at = at.saturating_add(len);
            nth = nth.saturating_add(1);
        }
        if self.at == 0 && nth < 2 {
            self.report_problem(What::DotDot, |it| it);
        }
        names.sort_unstable();
        for pair in names.windows(2) {
            if let [one, two] = pair
                && one == two
            {
                self.report_problem(What::EntryTwice, |it| it.name(&one.1));
            }
        }
        range
    }

    /// Returns the folded name for comparison.
    fn comparison_key<'n>(&self, name: &'n [u8]) -> Cow<'n, [u8]> {
        let folded = if self.folds { casefold::fold_name(name) } else { None };
        folded.map_or(Cow::Borrowed(name), Cow::Owned)
    }

    /// Checks the first two entries of a directory.
    fn check_dots(&self, nth: u32, entry: &RawDirentView<'_>) {
        if nth == 0 {
            if entry.name != b"." || !entry.is_nul_terminated || entry.inode != self.dir {
                self.report_problem(What::Dot, |it| it.found(entry.inode).expected(self.dir));
            }
            return;
        }
        if entry.name != b".." || !entry.is_nul_terminated || entry.inode == 0 {
            self.report_problem(What::DotDot, |it| it.found(entry.inode));
        } else {
            self.parents.set_dot_dot_inode(self.dir, entry.inode);
        }
    }

    /// Returns true if a name is valid.
    fn check_name(&self, entry: &RawDirentView<'_>) -> bool {
        if self.policy.is_some() {
            let whole = entry.name.len() >= MIN_ENCRYPTED_NAME_BYTES;
            if !whole {
                self.report_problem(What::EntryName, |it| it.name(entry.name));
            }
            return whole;
        }
        let wrong = entry.name.is_empty()
            || matches!(entry.name, b"." | b"..")
            || entry.name.iter().any(|byte| matches!(byte, 0 | b'/'));
        if wrong {
            self.report_problem(What::EntryName, |it| it.name(entry.name));
        }
        !wrong
    }

    /// Checks the inode that an entry references.
    fn check_target(&self, entry: &RawDirentView<'_>, dots: bool) {
        let super_ = &self.check.super_;
        let (inode, named) = (entry.inode, entry.name);
        let reserved = inode < super_.first_inode.0 && inode != 2;
        if inode > super_.inodes || reserved || inode == 2 && !dots {
            self.report_problem(What::EntryInode, |it| it.name(named).found(inode));
            return;
        }
        let note = self.check.inode_states.get(inode);
        if !note.is_used() {
            self.report_problem(What::EntryUnused, |it| it.name(named).found(inode));
            return;
        }
        let typed = super_.incompatible.contains(Incompatible::FILETYPE);
        let expected = if typed { note.file_type() } else { 0 };
        if entry.kind != expected && !(typed && entry.kind == 0) {
            let with = |it: Problem| it.name(named).found(entry.kind).expected(expected);
            self.report_problem(What::EntryKind, with);
        }
        if let Some(policy) = self.policy
            && !dots
            && matches!(note.file_type(), 1 | 2 | 7)
        {
            let all = self.check.policies.lock();
            if all.get(&inode).map(Vec::as_slice) != Some(policy) {
                self.report_problem(What::EntryEncryption, |it| it.name(named).found(inode));
            }
        }
        self.check.inode_states.count_name(inode);
        if note.is_directory() && !dots && !self.parents.set_parent(inode, self.dir) {
            self.check.problems.add(Problem::new(What::DirectoryTwice).inode(inode));
        }
    }
}

/// Returns the first bytes of a name as a number that sorts as they do.
fn first_bytes(name: &[u8]) -> u64 {
    let mut first = [0; 8];
    first.iter_mut().zip(name).for_each(|(to, from)| *to = *from);
    u64::from_be_bytes(first)
}

/// Parses the record at `at`; returns it with its length, `None` if the chain is broken.
fn parse_record(block: &[u8], at: usize) -> Option<(RawDirentView<'_>, usize)> {
    let rest = block.get(at..)?;
    let len = rec_len_from_disk(le16(rest, 4)?, block.len());
    let whole = rest.get(..len)?;
    let name_len = usize::from(*whole.get(6)?);
    if len < MIN_RECORD_BYTES || !len.is_multiple_of(4) {
        return None;
    }
    let name = whole.get(HEAD_BYTES..)?.get(..name_len)?;
    let end = HEAD_BYTES.checked_add(name_len)?;
    let is_nul_terminated = block.get(at.checked_add(end)?).is_none_or(|byte| *byte == 0);
    Some((
        RawDirentView { inode: le32(whole, 0)?, kind: *whole.get(7)?, name, is_nul_terminated },
        len,
    ))
}
