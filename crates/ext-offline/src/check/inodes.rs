//! Pass 1: checks every inode, and claims its blocks.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};

use draconis_device::{Extent, Urgency};
use draconis_types::Block;
use draconis_types::FileType;
use zerocopy::{FromBytes, IntoBytes};

use super::blocks::{BlockClaimer, walk_map};
use super::problem::{Problem, What};
use super::raw_inode::{file_type, has_map, inode_size, is_fast_symlink, xattr_block};
use super::{Check, prefetch, xattrs};
use crate::blocks::role::Role as BlockRole;
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::htree::DxRoot;
use crate::format::inline::POINTER_BYTES as INLINE_BYTES;
use crate::format::inode::{RawInode, flags, has_valid_checksum};
use crate::format::jbd2::RawJournalSuperblock;
use crate::format::witness::{FORMS, Verdict};
use crate::format::{extent, le16, le32};
use crate::map::{BlockLocation, MapVisitor};
use crate::units::saturating_usize;
use crate::{Error, FsBlock, InodeNumber, Result};

/// Bytes of a read request of inode tables. Small requests let the checking thread copy cached
/// data.
const INODE_TABLE_READ_BYTES: u64 = 128 << 10;
/// Read requests in flight.
const MAX_READS_IN_FLIGHT: usize = 8;

const ROOT: u32 = 2;
const IMAGIC: u32 = 0x2000;
const CASEFOLD: u32 = flags::CASEFOLD;
/// Maximum file size without the `large_file` feature, in bytes.
const MAX_SMALL_FILE_BYTES: u64 = 0x7FFF_FFFF;

/// Role of an inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum InodeRole {
    BadBlocks,
    Root,
    /// Inode of a feature that the volume lacks: must be empty.
    UnusedFeature,
    Resize,
    Journal,
    /// System file: the orphan file or a quota file.
    Hidden,
    Reserved,
    Ordinary,
}

impl InodeRole {
    pub(crate) fn for_inode(check: &Check<'_>, number: u32) -> Self {
        let has = |feature| check.super_.compatible.contains(feature);
        if check.super_.orphan_file == Some(InodeNumber(number)) || check.is_quota_inode(number) {
            return Self::Hidden;
        }
        match number {
            1 => Self::BadBlocks,
            2 => Self::Root,
            7 if has(Compatible::RESIZE_INODE) => Self::Resize,
            8 if has(Compatible::HAS_JOURNAL) => Self::Journal,
            3 | 4 | 8 => Self::UnusedFeature,
            _ if number < check.super_.first_inode.0 => Self::Reserved,
            _ => Self::Ordinary,
        }
    }
}

/// Checks all inode tables.
pub(super) fn check_inode_tables(check: &Check<'_>) -> Result<()> {
    let next = AtomicU64::new(0);
    check.run_parallel(check.options.threads.max(1), |_| {
        let visited = visit_groups(check, &next, &|number, slot| check_inode(check, number, slot));
        // The other threads end, too.
        visited.inspect_err(|_| next.store(check.groups.len() as u64, Ordering::Relaxed))
    })?;
    // An uninitialized group was not read.
    if !check.inode_states.get(ROOT).is_used() {
        check.problems.add(Problem::new(What::RootMissing).inode(ROOT));
    }
    Ok(())
}

/// A part of an inode table that is read with one request.
struct TablePart {
    extent: Extent,
    /// Inodes before the first one.
    before: u32,
    /// The last inode of its group that was ever used.
    last: u32,
}

/// Returns the parts of a group's inode table that hold inodes.
fn table_parts<'a>(check: &'a Check<'_>, group: u64) -> impl Iterator<Item = TablePart> + use<'a> {
    let super_ = &check.super_;
    let place = check.groups.get(saturating_usize(group));
    let block_bytes = u64::from(super_.block_bytes);
    // With descriptor checksums, unused inodes are not read.
    let lazy = super_.read_only_compatible.intersects(ReadOnlyCompatible::CHECKSUMS);
    let unused = place.map_or(0, |place| if lazy { place.unused } else { 0 });
    let there = super_.inodes_per_group.saturating_sub(unused);
    let len = u64::from(there).saturating_mul(super_.inode_bytes.into());
    let len = len.checked_next_multiple_of(block_bytes).unwrap_or(len);
    let whole = u64::from(super_.inode_table_blocks()).saturating_mul(block_bytes);
    check.advance(whole.saturating_sub(len));
    let start = place.map_or(0, |place| place.inode_table).saturating_mul(block_bytes);
    let before = u32::try_from(group).unwrap_or(u32::MAX).saturating_mul(super_.inodes_per_group);
    let per_part = INODE_TABLE_READ_BYTES.checked_div(super_.inode_bytes.into()).unwrap_or(0);
    (0u32..).map_while(move |nth| {
        let at = u64::from(nth).saturating_mul(INODE_TABLE_READ_BYTES);
        let count = len.saturating_sub(at).min(INODE_TABLE_READ_BYTES);
        let skipped = nth.saturating_mul(u32::try_from(per_part).unwrap_or(u32::MAX));
        (count > 0).then_some(TablePart {
            extent: Extent::new(start.saturating_add(at), count),
            before: before.saturating_add(skipped),
            last: before.saturating_add(there),
        })
    })
}

/// Visits the inodes of groups, in order; `next` counts the groups that some thread took. Reads
/// ahead, from one group into the next.
pub(super) fn visit_groups(
    check: &Check<'_>,
    next: &AtomicU64,
    visit: &dyn Fn(u32, &[u8]) -> Result<()>,
) -> Result<()> {
    let groups = std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed))
        .take_while(|group| *group < check.groups.len() as u64);
    let mut parts = groups.flat_map(|group| table_parts(check, group));
    let order = |part: TablePart| {
        let buffer = request_buffer(check, saturating_usize(part.extent.len_bytes));
        let pending = check.disk.read(part.extent, buffer, Urgency::Ahead);
        (part, pending)
    };
    let slot_bytes = saturating_usize(check.super_.inode_bytes.into());
    let mut flying = VecDeque::new();
    loop {
        let room = MAX_READS_IN_FLIGHT.saturating_sub(flying.len());
        flying.extend(parts.by_ref().take(room).map(order));
        let Some((part, read)) = flying.pop_front() else { return Ok(()) };
        let gone = Error::Io(draconis_device::Error::ServiceEnded);
        let block = read.wait().ok_or(gone)?.map_err(|refused| Error::Io(refused.error))?;
        let bytes = block.into_private();
        let mut number = part.before;
        for slots in bytes.chunks(slot_bytes.saturating_mul(prefetch::INODES_PER_BATCH)) {
            prefetch::prefetch_maps(check, slots);
            for slot in slots.chunks_exact(slot_bytes) {
                if number < part.last {
                    number = number.saturating_add(1);
                    visit(number, slot)?;
                }
            }
        }
        check.advance(bytes.len() as u64);
        check.buffers.lock().push(bytes);
    }
}

/// Returns a recycled buffer for a request: fresh pages cost more than the check of their inodes.
fn request_buffer(check: &Check<'_>, len: usize) -> Block {
    let mut buffers = check.buffers.lock();
    let same = buffers.iter().position(|it| it.len() == len);
    same.map_or_else(|| Block::private(len), |nth| Block::from(buffers.swap_remove(nth)))
}

/// Returns the inode in `slot` if its blocks are claimed.
pub(super) fn inode_with_map<'s>(
    check: &Check<'_>,
    number: u32,
    slot: &'s [u8],
) -> Option<&'s RawInode> {
    let (raw, _) = RawInode::ref_from_prefix(slot).ok()?;
    let counts = match InodeRole::for_inode(check, number) {
        InodeRole::UnusedFeature => false,
        InodeRole::Ordinary | InodeRole::Root => {
            raw.i_links_count.get() != 0 || check.is_orphan(number)
        }
        InodeRole::BadBlocks
        | InodeRole::Resize
        | InodeRole::Journal
        | InodeRole::Hidden
        | InodeRole::Reserved => true,
    };
    counts.then_some(raw)
}

fn check_inode(check: &Check<'_>, number: u32, slot: &[u8]) -> Result<()> {
    let Ok((raw, _)) = RawInode::ref_from_prefix(slot) else { return Ok(()) };
    let complain = |what| check.problems.add(Problem::new(what).inode(number));
    // A slot of zeros was never used and needs no checksum.
    if !has_valid_checksum(slot, InodeNumber(number), &check.super_)
        && slot.iter().any(|it| *it != 0)
    {
        let bit = check.mended_bit(slot, InodeNumber(number));
        let name = bit.map(|bit| bit.to_string().into_bytes());
        let complaint = Problem::new(What::InodeChecksum).inode(number);
        check.problems.add(Problem { name, ..complaint });
    }
    let role = InodeRole::for_inode(check, number);
    let (mode, links) = (raw.i_mode.get(), raw.i_links_count.get());
    let kind = file_type(raw);
    let died = raw.i_dtime.get();
    let pending = check.is_orphan(number);
    if died != 0 && died < check.super_.inodes && !pending {
        let listed = check.orphans.contains(&number);
        complain(if listed { What::OnOrphanList } else { What::InOrphanList });
    }
    if raw.i_flags.get() & forbidden_flags(check, role, number, slot) != 0 {
        complain(What::Flags);
    }
    match role {
        InodeRole::BadBlocks => {
            check.inode_states.set_used(number, None, links);
            if mode != 0 || links != 0 || xattr_block(check, raw) != 0 {
                complain(What::ReservedInode);
            }
            let mut claim = BlockClaimer::new(check, number, true);
            return walk_map(check, number, raw, &mut claim);
        }
        InodeRole::UnusedFeature => {
            check.inode_states.set_used(number, None, links);
            let [first, ..] = raw.i_block;
            if links != 0 || first.get() != 0 || raw.i_blocks_lo.get() != 0 {
                complain(What::ReservedInode);
            }
            return Ok(());
        }
        InodeRole::Root => {
            if kind != Some(FileType::Directory) || links == 0 {
                complain(What::RootMissing);
            }
            if died != 0 {
                complain(What::UsedWithDeletionTime);
            }
        }
        InodeRole::Resize => {
            check.inode_states.set_used(number, kind, links);
            return check_resize_inode(check, number, raw);
        }
        InodeRole::Journal => check_journal_inode(check, number, raw)?,
        InodeRole::Hidden => {
            if kind != Some(FileType::File) || links == 0 {
                complain(What::ReservedInode);
            }
        }
        InodeRole::Reserved => {
            let fits = mode == 0 || number == 5 && kind != Some(FileType::Directory) || number == 7;
            if !fits {
                complain(What::ReservedInode);
            }
            if number == 7 && raw.i_block.iter().any(|it| it.get() != 0) {
                complain(What::ResizeInodeWithoutFeature);
                let [.., double, _] = raw.i_block;
                BlockClaimer::new(check, number, true).claim_cluster(double.get().into());
                check.inode_states.set_used(number, kind, links);
                return Ok(());
            }
        }
        InodeRole::Ordinary if links == 0 && !pending => {
            if mode != 0 && died == 0 {
                complain(What::DeletedWithoutTime);
            }
            return Ok(());
        }
        InodeRole::Ordinary => {
            if died != 0 && !pending {
                complain(What::UsedWithDeletionTime);
            }
            if kind.is_none() {
                complain(What::Mode);
            }
        }
    }
    // The quota file of a volume without quotas.
    if role == InodeRole::Ordinary && number == check.raw.s_prj_quota_inum.get() {
        complain(What::ReservedInode);
    }
    let mut outside = (0, 0);
    check.inode_states.set_used(number, kind, links);
    if kind == Some(FileType::File) && raw.i_flags.get() & flags::EA_INODE != 0 {
        check.flagged_values.lock().insert(number);
    }
    if kind == Some(FileType::Directory) {
        check.directories.lock().push(number);
        check.directory_inodes.put(number, slot);
    }
    let may_have_contents =
        matches!(kind, Some(FileType::File | FileType::Directory | FileType::Symlink));
    let form = check.form(slot).filter(|_| may_have_contents && links != 0);
    if let Some(form) = form {
        check.note_missing(form.missing);
        let lost = form.flags & !raw.i_flags.get();
        if lost & flags::EXTENTS != 0 && !is_fast_symlink(check, raw) {
            complain(What::ExtentFlag);
        }
        if lost & flags::INLINE_DATA != 0 {
            let complaint = Problem::new(What::InlineData).inode(number);
            check.problems.add(complaint.expected(flags::INLINE_DATA));
        }
    }
    if matches!(role, InodeRole::Ordinary | InodeRole::Root) {
        check_fields(check, number, slot, kind, form);
        outside = check_extra_fields(check, number, slot);
    }
    let mut claim = BlockClaimer::new(check, number, false);
    (claim.count, claim.values) = outside;
    check_contents(check, number, slot, kind, role, claim)
}

/// Returns the flags that a reserved inode must not have; those of others depend on their type.
pub(crate) fn forbidden_flags(check: &Check<'_>, role: InodeRole, number: u32, slot: &[u8]) -> u32 {
    let mode = le16(slot, 0).unwrap_or(0);
    let extents = check.super_.incompatible.contains(Incompatible::EXTENTS)
        || check.form(slot).is_some_and(|it| it.missing.contains(Incompatible::EXTENTS));
    let mapped = if extents { 0 } else { flags::EXTENTS } | flags::INLINE_DATA;
    match role {
        InodeRole::Ordinary | InodeRole::Root => 0,
        InodeRole::BadBlocks => mapped | CASEFOLD,
        InodeRole::UnusedFeature if number == 8 => mapped & flags::EXTENTS | CASEFOLD,
        InodeRole::UnusedFeature => CASEFOLD,
        InodeRole::Reserved if mode == 0 => flags::INDEX | CASEFOLD,
        InodeRole::Resize | InodeRole::Journal | InodeRole::Hidden | InodeRole::Reserved => {
            flags::INDEX | mapped | CASEFOLD
        }
    }
}

/// Checks for fields that need features the volume lacks.
fn check_fields(
    check: &Check<'_>,
    number: u32,
    slot: &[u8],
    kind: Option<FileType>,
    form: Option<Verdict>,
) {
    let Ok((raw, _)) = RawInode::ref_from_prefix(slot) else { return };
    let super_ = &check.super_;
    let set = raw.i_flags.get();
    let directory = kind == Some(FileType::Directory);
    let mut wrong = 0;
    for (feature, flag) in
        [(Incompatible::ENCRYPT, flags::ENCRYPT), (Incompatible::CASEFOLD, CASEFOLD)]
    {
        if !super_.incompatible.contains(feature) {
            wrong |= flag;
        }
    }
    if !directory {
        wrong |= CASEFOLD;
    }
    let has_contents =
        matches!(kind, None | Some(FileType::File | FileType::Directory | FileType::Symlink));
    wrong |= match form {
        Some(form) => FORMS & !form.flags,
        None if has_contents => 0,
        None => FORMS,
    };
    // Only a file is the value of an attribute.
    if kind != Some(FileType::File) {
        wrong |= flags::EA_INODE;
    }
    // e2fsck trusts such a flag only on a device or pipe that holds nothing but its number.
    if !has_contents && raw.i_block.iter().skip(4).any(|word| word.get() != 0) {
        wrong |= flags::IMMUTABLE | flags::APPEND;
    }
    if !super_.compatible.contains(Compatible::IMAGIC_INODES) {
        wrong |= IMAGIC;
    }
    // A directory inside its inode has no blocks for a tree.
    if !directory || form.is_some_and(|form| form.flags & flags::INLINE_DATA != 0) {
        wrong |= flags::INDEX;
    } else if set & flags::INDEX != 0 && !super_.compatible.contains(Compatible::DIR_INDEX) {
        match has_tree_root(check, raw) {
            true => check.missing_features.lock().extend(Compatible::DIR_INDEX.names()),
            false => wrong |= flags::INDEX,
        }
    }
    let complain = |complaint: Problem| check.problems.add(complaint.inode(number));
    if set & wrong != 0 {
        complain(Problem::new(What::Flags).found(set).expected(set & !wrong));
    }
    let huge = super_.read_only_compatible.contains(ReadOnlyCompatible::HUGE_FILE);
    let wide = super_.incompatible.contains(Incompatible::SIXTY_FOUR_BIT);
    let large = super_.incompatible.contains(Incompatible::LARGEDIR);
    for (field, high) in [
        ("i_blocks_hi", if huge { 0 } else { raw.i_blocks_high.get().into() }),
        ("i_file_acl_hi", if wide { 0 } else { raw.i_file_acl_high.get().into() }),
        ("i_size_high", if directory && !large { raw.i_size_high.get() } else { 0 }),
    ] {
        if high != 0 {
            complain(Problem::new(What::HighHalf).name(field.as_bytes()).found(high));
        }
    }
    if raw.i_obso_faddr.get() != 0 {
        complain(Problem::new(What::FragmentAddress).found(raw.i_obso_faddr.get()));
    }
}

/// Returns true if the first block of a directory is the root of a hash tree.
fn has_tree_root(check: &Check<'_>, raw: &RawInode) -> bool {
    let [pointer, ..] = raw.i_block;
    let first = match extent::ExtentNode::check(raw.i_block.as_bytes(), Some(0)) {
        Ok(node) => node.extent(0).map_or(0, |first| first.start.0),
        Err(_) => pointer.get().into(),
    };
    let role = BlockRole::Directory(Check::file_id(0));
    let block = check.is_valid_block(first).then(|| check.block(first, role));
    block.is_some_and(|block| {
        block.is_ok_and(|bytes| DxRoot::check(&bytes, false, check.super_.hash_seed).is_ok())
    })
}

/// Checks the fields beyond 128 bytes; returns the clusters and the number of EA inodes.
fn check_extra_fields(check: &Check<'_>, number: u32, slot: &[u8]) -> (u64, u64) {
    let old = size_of::<RawInode>();
    let Some(extra) = le16(slot, old) else { return (0, 0) };
    let end = old.saturating_add(extra.into());
    if extra == 0 {
        return (0, 0);
    }
    if !extra.is_multiple_of(4) || end > slot.len() {
        check.problems.add(Problem::new(What::ExtraSize).inode(number).found(extra));
        return (0, 0);
    }
    let rest = slot.get(end..).unwrap_or_default();
    if le32(rest, 0) != Some(xattrs::MAGIC) {
        return (0, 0);
    }
    let list = rest.get(4..).unwrap_or_default();
    match xattrs::check_xattr_list(check, number, list, 0, xattrs::XattrLocation::Inode) {
        Some(values) => xattrs::record_ea_inodes(check, values),
        None => {
            check.problems.add(Problem::new(What::AttributesInInode).inode(number));
            (0, 0)
        }
    }
}

/// Checks the resize inode. All its blocks are metadata, except the double-indirect block.
fn check_resize_inode(check: &Check<'_>, number: u32, raw: &RawInode) -> Result<()> {
    let Some(reserve) = super::layout::check_reserved_gdt(check, raw)? else {
        check.problems.add(Problem::new(What::ResizeInode).inode(number));
        // The double-indirect block stays its own.
        let [.., list, _] = raw.i_block;
        if check.is_valid_block(list.get().into()) {
            BlockClaimer::new(check, number, true).claim_cluster(list.get().into());
        }
        return Ok(());
    };
    let mut claim = BlockClaimer::new(check, number, false);
    let attributes = xattr_block(check, raw);
    if attributes != 0 && check.is_valid_block(attributes) {
        xattrs::check_block_reference(check, number, attributes, &mut claim)?;
    }
    claim.claim_cluster(reserve.dind_block);
    claim.count = reserve.count;
    claim.last = (reserve.count > 1).then_some(reserve.last);
    check_size(check, number, raw, file_type(raw), &claim)?;
    check_block_count(check, number, raw, file_type(raw), &claim);
    Ok(())
}

/// Claims the blocks of an inode, and checks what depends on them.
fn check_contents(
    check: &Check<'_>,
    number: u32,
    slot: &[u8],
    kind: Option<FileType>,
    role: InodeRole,
    mut claim: BlockClaimer<'_, '_>,
) -> Result<()> {
    let Ok((raw, _)) = RawInode::ref_from_prefix(slot) else { return Ok(()) };
    let attributes = xattr_block(check, raw);
    // An invalid xattr block of a reserved inode is no damage.
    let heeded =
        matches!(role, InodeRole::Ordinary | InodeRole::Root) || check.is_valid_block(attributes);
    if attributes != 0 && heeded {
        xattrs::check_block_reference(check, number, attributes, &mut claim)?;
    }
    if has_map(check, raw) {
        let room = le16(raw.i_block.as_bytes(), 4).unwrap_or(0);
        let is_tree = raw.i_flags.get() & flags::EXTENTS != 0;
        if is_tree
            && !(extent::ROOT_ENTRIES.saturating_sub(2)..=extent::ROOT_ENTRIES).contains(&room)
        {
            check.problems.add(Problem::new(What::ExtentNode).inode(number).found(room));
        }
        walk_map(check, number, raw, &mut claim)?;
    }
    if raw.i_flags.get() & flags::INLINE_DATA != 0 {
        // A reserved inode without a mode has no contents.
        if kind.is_some() || role != InodeRole::Reserved {
            check_inline_data(check, number, slot, kind);
        }
    } else {
        check_size(check, number, raw, kind, &claim)?;
    }
    check_block_count(check, number, raw, kind, &claim);
    xattrs::check_encryption_context(check, number, raw.i_flags.get() & flags::ENCRYPT != 0);
    let counted = matches!(role, InodeRole::Ordinary | InodeRole::Root);
    if counted && raw.i_flags.get() & flags::EA_INODE == 0 {
        super::quota::count_inode(check, slot, claim.count, claim.values);
    }
    Ok(())
}

/// Checks the size of inline contents.
fn check_inline_data(check: &Check<'_>, number: u32, slot: &[u8], kind: Option<FileType>) {
    let Ok((raw, _)) = RawInode::ref_from_prefix(slot) else { return };
    let Some(value) = xattrs::inline_data_value(slot) else {
        check.problems.add(Problem::new(What::InlineData).inode(number));
        return;
    };
    let there = (INLINE_BYTES as u64).saturating_add(value.len() as u64);
    let size = inode_size(raw);
    let fits = match kind {
        Some(FileType::File) => size <= there,
        _ => size == there,
    };
    if !fits {
        let complaint = Problem::new(What::Size).inode(number);
        check.problems.add(complaint.found(size).expected(there));
    }
}

fn check_block_count(
    check: &Check<'_>,
    number: u32,
    raw: &RawInode,
    kind: Option<FileType>,
    claim: &BlockClaimer<'_, '_>,
) {
    // Blocks below an invalid pointer cannot be counted.
    if claim.bad_pointers > 0 || claim.has_skipped_blocks || kind.is_none() && raw.i_mode.get() != 0
    {
        return;
    }
    let huge = check.super_.read_only_compatible.contains(ReadOnlyCompatible::HUGE_FILE);
    let mut found = u64::from(raw.i_blocks_lo.get());
    let mut unit = u64::from(check.super_.block_bytes >> 9);
    if huge {
        found |= u64::from(raw.i_blocks_high.get()) << 32;
        if raw.i_flags.get() & flags::HUGE_FILE != 0 {
            unit = 1;
        }
    }
    let blocks = claim.count.saturating_mul(check.super_.cluster_blocks.into());
    let expected = blocks.saturating_mul(unit);
    if found != expected {
        let complaint = Problem::new(What::BlockCount).inode(number);
        check.problems.add(complaint.found(found).expected(expected));
    }
}

/// Checks the size against the last mapped block.
fn check_size(
    check: &Check<'_>,
    number: u32,
    raw: &RawInode,
    kind: Option<FileType>,
    claim: &BlockClaimer<'_, '_>,
) -> Result<()> {
    let block_bytes = u64::from(check.super_.block_bytes);
    let size = inode_size(raw);
    let whole = claim.last.map_or(0, |last| last.saturating_add(1).saturating_mul(block_bytes));
    let complain = |what| {
        check.problems.add(Problem::new(what).inode(number).found(size));
    };
    let wrong_size = || {
        // The low half alone may end in the last block.
        let low = u64::from(raw.i_size_lo.get());
        let is_right = size > low && whole.saturating_sub(low) < block_bytes && low <= whole;
        let expected = if is_right { low } else { whole };
        let complaint = Problem::new(What::Size).inode(number);
        check.problems.add(complaint.found(size).expected(expected));
    };
    match kind {
        Some(FileType::Directory) => {
            let size = u64::from(raw.i_size_lo.get());
            if !claim.has_skipped_blocks && (size != whole || whole == 0) {
                wrong_size();
            }
            if claim.unwritten > 0 {
                complain(What::DirectoryUnwritten);
            }
        }
        Some(FileType::File) => {
            let extents = raw.i_flags.get() & flags::EXTENTS != 0;
            // Unwritten blocks may be preallocated beyond the end.
            let last = if extents { claim.last_written } else { claim.last };
            let least = last.map_or(0, |last| last.saturating_mul(block_bytes));
            let verity = raw.i_flags.get() & flags::VERITY != 0;
            if size < least && !verity && !check.is_orphan(number)
                || size > max_file_bytes(check, raw)
            {
                wrong_size();
            }
            let large = check.super_.read_only_compatible.contains(ReadOnlyCompatible::LARGE_FILE);
            if size > MAX_SMALL_FILE_BYTES && !large {
                complain(What::LargeFileFeature);
            }
        }
        None if size > max_file_bytes(check, raw) => wrong_size(),
        Some(FileType::Symlink) if !is_symlink(check, raw, claim)? => complain(What::Symlink),
        Some(FileType::CharDevice | FileType::BlockDevice | FileType::Fifo | FileType::Socket)
            if size != 0 =>
        {
            complain(What::SpecialSize);
        }
        _ => {}
    }
    Ok(())
}

/// Returns the maximum file size.
fn max_file_bytes(check: &Check<'_>, raw: &RawInode) -> u64 {
    let has_extents = raw.i_flags.get() & flags::EXTENTS != 0;
    crate::map::max_file_bytes(check.super_.block_bytes, has_extents)
}

/// Returns true if a symbolic link's target has the stored length.
fn is_symlink(check: &Check<'_>, raw: &RawInode, claim: &BlockClaimer<'_, '_>) -> Result<bool> {
    let encrypted = raw.i_flags.get() & flags::ENCRYPT != 0;
    let size = inode_size(raw);
    // An encrypted target has its length in front, and a NUL behind it or not.
    let is_whole = |bytes: &[u8]| match encrypted {
        false => bytes.iter().take_while(|byte| **byte != 0).count() as u64 == size,
        true => le16(bytes, 0).is_some_and(|len| {
            let len = u64::from(len).saturating_add(2);
            len == size || len.saturating_add(1) == size
        }),
    };
    if is_fast_symlink(check, raw) {
        let words = raw.i_block.map(|word| word.get().to_le_bytes());
        let bytes = words.as_flattened();
        return Ok(size > 0 && size < bytes.len() as u64 && is_whole(bytes));
    }
    let Some(block) = claim.first.filter(|block| check.is_valid_block(*block)) else {
        return Ok(false);
    };
    if claim.last != Some(0) || claim.map_blocks > 0 {
        return Ok(false);
    }
    let bytes = check.block(block, BlockRole::Contents)?;
    Ok(size > 0 && size < bytes.len() as u64 && is_whole(&bytes))
}

/// Checks that the journal's inode holds an empty journal.
fn check_journal_inode(check: &Check<'_>, number: u32, raw: &RawInode) -> Result<()> {
    /// First block of the file, and the number of blocks up to the first hole.
    struct FirstAndCount(Option<u64>, u64);
    impl MapVisitor for FirstAndCount {
        fn visit_run(&mut self, at: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
            if let BlockLocation::Mapped(FsBlock(block)) = place {
                if at == 0 {
                    self.0 = Some(block);
                }
                if at == self.1 {
                    self.1 = self.1.saturating_add(blocks);
                }
            }
            ControlFlow::Continue(())
        }
    }
    let mut first = FirstAndCount(None, 0);
    let there = file_type(raw) == Some(FileType::File) && raw.i_links_count.get() != 0;
    if there {
        walk_map(check, number, raw, &mut first)?;
    }
    let have = inode_size(raw).checked_div(check.super_.block_bytes.into()).unwrap_or(0);
    let sound = match first.0.filter(|block| check.is_valid_block(*block)) {
        None => false,
        Some(_) if first.1 < have => false,
        Some(block) => {
            let bytes = check.block(block, BlockRole::Contents)?;
            let raw = RawJournalSuperblock::view(&bytes);
            if raw.as_ref().is_ok_and(|raw| raw.s_start.get() != 0)
                && !check.super_.needs_recovery()
            {
                check.problems.add(Problem::new(What::JournalNotEmpty).inode(number));
            }
            match raw.and_then(|raw| raw.check(check.super_.block_bytes, have)) {
                Ok(_) => true,
                // The contents of the log are irrelevant then, and so is its start.
                Err(error) => error == RawJournalSuperblock::LOG_START_OUT_OF_RANGE,
            }
        }
    };
    if !sound {
        check.problems.add(Problem::new(What::JournalInode).inode(number));
    }
    Ok(())
}
