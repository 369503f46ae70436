//! Extended attributes, in inodes and in shared xattr blocks.

use draconis_types::FileType;
use zerocopy::FromBytes;

use super::blocks::BlockClaimer;
use super::problem::{Problem, What};
use super::{Check, raw_inode};
use crate::blocks::role::Role as BlockRole;
use crate::format::features::Incompatible;
use crate::format::inode::{RawInode, flags};
use crate::format::xattr::{Xattr, XattrList};
use crate::format::{le16, le32, xattr};
use crate::units::saturating_usize;
use crate::{FsBlock, Result};

/// Magic number of an attribute list.
pub(super) const MAGIC: u32 = 0xEA02_0000;
const BLOCK_HEADER_BYTES: usize = 32;
const ENTRY_BYTES: usize = 16;

/// Location of an attribute list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum XattrLocation {
    Block,
    Inode,
}

/// References to an xattr block.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct XattrBlockRefs {
    /// Inodes that refer to it.
    count: u32,
    /// Clusters of its EA inodes; each owner includes them in its `i_blocks`.
    ea_inode_clusters: u64,
    /// Number of its EA inodes.
    values: u64,
}

/// An attribute with an EA inode.
#[derive(Clone, Copy, Debug)]
pub(super) struct EaInodeUse {
    /// Inode with the attribute.
    owner: u32,
    inode: u32,
    len: u32,
    /// Stored entry hash; 0 for none. `names` are the hashes of the name, with its characters as
    /// unsigned and as signed.
    hash: u32,
    name_hashes: [u32; 2],
    /// True for one as Lustre wrote it: the owner in place of the hash, and space that no owner counts.
    is_lustre: bool,
}

/// Counts a reference to an xattr block; the first one claims and checks the block.
pub(super) fn check_block_reference(
    check: &Check<'_>,
    inode: u32,
    block: u64,
    claim: &mut BlockClaimer<'_, '_>,
) -> Result<()> {
    let complain = || {
        let complaint = Problem::new(What::AttributeBlock).inode(inode);
        check.problems.add(complaint.block(block));
    };
    let feature = crate::format::features::Compatible::EXT_ATTR;
    if !check.super_.compatible.contains(feature) || !check.is_valid_block(block) {
        complain();
        // An invalid xattr block is no block of the file.
        claim.has_skipped_blocks = true;
        return Ok(());
    }
    let mut blocks = check.xattr_blocks.lock();
    let shared = blocks.entry(block).or_default();
    shared.count = shared.count.saturating_add(1);
    if shared.count > 1 {
        claim.count = claim.count.saturating_add(1).saturating_add(shared.ea_inode_clusters);
        claim.values = claim.values.saturating_add(shared.values);
        return Ok(());
    }
    if claim.claim_cluster(block) {
        let bytes = check.block(block, BlockRole::XattrBlock)?;
        let found = Some(&bytes)
            .filter(|bytes| le32(bytes, 0) == Some(MAGIC) && le32(bytes, 8) == Some(1))
            .and_then(|bytes| {
                check_xattr_list(check, inode, bytes, BLOCK_HEADER_BYTES, XattrLocation::Block)
            });
        match found {
            None => complain(),
            Some(values) => {
                (shared.ea_inode_clusters, shared.values) = record_ea_inodes(check, values);
                claim.values = claim.values.saturating_add(shared.values);
                claim.count = claim.count.saturating_add(shared.ea_inode_clusters);
            }
        }
        let seed = check.super_.checksum_seed;
        if seed.is_some_and(|seed| !xattr::has_valid_checksum(&bytes, seed, FsBlock(block))) {
            let complaint = Problem::new(What::AttributeChecksum).inode(inode);
            check.problems.add(complaint.block(block));
        }
    }
    Ok(())
}

/// Records EA inodes; returns their clusters and number.
pub(super) fn record_ea_inodes(check: &Check<'_>, values: Vec<EaInodeUse>) -> (u64, u64) {
    let ratio = u64::from(check.super_.cluster_blocks);
    let cluster = u64::from(check.super_.block_bytes).saturating_mul(ratio).max(1);
    let counted = || values.iter().filter(|value| !value.is_lustre);
    let clusters = counted().map(|value| u64::from(value.len).div_ceil(cluster));
    let count = counted().count() as u64;
    let sum = clusters.fold(0, u64::saturating_add);
    if !values.is_empty() {
        check.values.lock().extend(values);
    }
    (sum, count)
}

/// Reports an encrypted inode without an encryption context; drops one of an unencrypted inode.
pub(super) fn check_encryption_context(check: &Check<'_>, inode: u32, encrypted: bool) {
    if !check.super_.incompatible.contains(Incompatible::ENCRYPT) {
        return;
    }
    let mut policies = check.policies.lock();
    if !encrypted {
        policies.remove(&inode);
    } else if !policies.contains_key(&inode) {
        check.problems.add(Problem::new(What::Encryption).inode(inode));
    }
}

/// Returns the part of an encryption context that the directory shares: all but the last 16 bytes,
/// the nonce.
fn encryption_policy(context: &[u8]) -> Option<&[u8]> {
    match (context.first(), context.len()) {
        (Some(1), 28) | (Some(2), 40) => context.get(..context.len().checked_sub(16)?),
        _ => None,
    }
}

/// Compares the number of references with the count in each block.
pub(super) fn check_xattr_block_references(check: &Check<'_>) -> Result<()> {
    let blocks = check.xattr_blocks.lock();
    let mut all: Vec<(u64, u32)> =
        blocks.iter().map(|(block, shared)| (*block, shared.count)).collect();
    drop(blocks);
    all.sort_unstable();
    for (block, count) in all {
        if check.metadata.contains(check.block_index(block)) {
            continue;
        }
        let bytes = check.block(block, BlockRole::XattrBlock)?;
        // What is no block of attributes counts nothing: it may hold the contents of a file.
        if XattrList::from_block(&bytes).is_err() {
            continue;
        }
        let found = xattr::refcount(&bytes).unwrap_or(0);
        if found != count {
            let complaint = Problem::new(What::AttributeReferences).block(block);
            check.problems.add(complaint.found(found).expected(count));
        }
    }
    Ok(())
}

/// Checks the EA inodes: each exists, has the flag and the right reference count, and matches the
/// attributes that refer to it.
pub(super) fn check_ea_inodes(check: &Check<'_>) -> Result<()> {
    let mut all = std::mem::take(&mut *check.values.lock());
    all.sort_unstable_by_key(|value| (value.inode, value.owner));
    for users in all.chunk_by(|one, two| one.inode == two.inode) {
        let Some(inode) = users.first().map(|value| value.inode) else { continue };
        let complain = |owner: u32| {
            let complaint = Problem::new(What::AttributeValue).inode(owner);
            check.problems.add(complaint.found(inode));
        };
        let ordinary = (check.super_.first_inode.0..=check.super_.inodes).contains(&inode);
        if !ordinary || !check.inode_states.get(inode).is_used() {
            users.iter().for_each(|value| complain(value.owner));
            continue;
        }
        check.inode_states.count_name(inode);
        let slot = raw_inode::read_inode_slot(check, inode)?;
        let Ok((raw, _)) = RawInode::ref_from_prefix(&slot) else { continue };
        let set = raw.i_flags.get();
        let is_file = raw_inode::file_type(raw) == Some(FileType::File);
        let value_hash = raw.i_atime.get();
        let is_hash_of = |value: &EaInodeUse| {
            let names = value.name_hashes.iter();
            names.map(|name| name.rotate_left(16) ^ value_hash).any(|hash| hash == value.hash)
        };
        // An attribute with its hash and length is a witness, as the feature is.
        let has_lost_flag = set & flags::EA_INODE == 0
            && is_file
            && users.iter().any(|value| {
                is_hash_of(value) && raw_inode::inode_size(raw) == u64::from(value.len)
            });
        if has_lost_flag {
            let complaint = Problem::new(What::Flags).inode(inode).found(set);
            check.problems.add(complaint.expected(set | flags::EA_INODE));
        }
        let is_value = is_file && (set & flags::EA_INODE != 0 || has_lost_flag);
        check.flagged_values.lock().remove(&inode);
        for value in users {
            let fits = value.hash == 0 || value.is_lustre || is_hash_of(value);
            if !is_value || !fits || raw_inode::inode_size(raw) != u64::from(value.len) {
                complain(value.owner);
            }
        }
        let found = u64::from(raw.i_ctime.get()) << 32 | u64::from(raw.i_version.get());
        let expected = users.len() as u64;
        // Lustre counted no users, and left both times the same.
        let is_uncounted =
            users.iter().all(|value| value.is_lustre) && raw.i_ctime.get() == raw.i_atime.get();
        if found != expected && !is_uncounted {
            let complaint = Problem::new(What::AttributeValueReferences).inode(inode);
            check.problems.add(complaint.found(found).expected(expected));
        }
    }
    Ok(())
}

/// Reports files with the flag of EA inodes that directories name and no attribute has: no reader
/// reads them.
pub(super) fn check_named_ea_inodes(check: &Check<'_>) -> Result<()> {
    for inode in std::mem::take(&mut *check.flagged_values.lock()) {
        let slot = raw_inode::read_inode_slot(check, inode)?;
        let Ok((raw, _)) = RawInode::ref_from_prefix(&slot) else { continue };
        let (links, set) = (raw.i_links_count.get(), raw.i_flags.get());
        if check.inode_states.get(inode).name_count(links) > 0 {
            let complaint = Problem::new(What::Flags).inode(inode).found(set);
            check.problems.add(complaint.expected(set & !flags::EA_INODE));
        }
    }
    Ok(())
}

/// Returns true if an inode names the owner of its value and has its generation, as Lustre's do.
fn is_lustre(check: &Check<'_>, owner: u32, value: u32) -> bool {
    let is_inode = (check.super_.first_inode.0..=check.super_.inodes).contains(&value);
    let slots = [owner, value].map(|of| is_inode.then(|| raw_inode::read_inode_slot(check, of)));
    let [Some(Ok(owner_slot)), Some(Ok(slot))] = slots else { return false };
    let generation = |slot: &[u8]| le32(slot, 100);
    le32(&slot, 16) == Some(owner) && generation(&slot) == generation(&owner_slot)
}

/// Returns true if an inode has the flag and the length of a value outside its owner.
fn is_value_of(check: &Check<'_>, inode: u32, len: u32) -> bool {
    let ordinary = (check.super_.first_inode.0..=check.super_.inodes).contains(&inode);
    let slot = ordinary.then(|| raw_inode::read_inode_slot(check, inode));
    slot.is_some_and(|slot| {
        slot.is_ok_and(|slot| {
            RawInode::ref_from_prefix(&slot).is_ok_and(|(raw, _)| {
                raw.i_flags.get() & flags::EA_INODE != 0
                    && raw.i_links_count.get() != 0
                    && raw_inode::inode_size(raw) == u64::from(len)
            })
        })
    })
}

/// Checks the entries from `start` on and their values in `bytes`: intact, without overlap, and
/// with valid hashes. Returns the references to EA inodes.
pub(super) fn check_xattr_list(
    check: &Check<'_>,
    inode: u32,
    bytes: &[u8],
    start: usize,
    container: XattrLocation,
) -> Option<Vec<EaInodeUse>> {
    let mut taken = vec![(0, start)];
    let mut values = Vec::new();
    let outside = check.super_.incompatible.contains(Incompatible::EA_INODE);
    let mut at = start;
    // Each iteration advances by the length of an entry.
    while let Some(head) = bytes.get(at..).filter(|rest| le32(rest, 0).is_some_and(|it| it != 0)) {
        let entry = parse_entry(bytes, head, container)?;
        if entry.is_context
            && let Some((at, _)) = entry.value
            && let Some(policy) = bytes
                .get(at..at.saturating_add(saturating_usize(entry.size.into())))
                .and_then(encryption_policy)
        {
            let mut policies = check.policies.lock();
            policies.insert(inode, policy.to_vec());
        }
        if entry.value_inode != 0 {
            if !outside {
                if !is_value_of(check, entry.value_inode, entry.size) {
                    return None;
                }
                check.note_missing(Incompatible::EA_INODE);
            }
            let (names, hash) = (xattr_hashes(entry.name, &[]), entry.hash);
            values.push(EaInodeUse {
                owner: inode,
                inode: entry.value_inode,
                len: entry.size,
                hash,
                name_hashes: names,
                is_lustre: is_lustre(check, inode, entry.value_inode),
            });
        }
        taken.push((at, entry.len));
        taken.extend(entry.value);
        at = at.saturating_add(entry.len);
    }
    if bytes.len().saturating_sub(at) >= 4 {
        taken.push((at, 4));
    }
    taken.sort_unstable();
    let clear = taken.windows(2).all(|pair| match pair {
        [(start, len), (next, _)] => start.saturating_add(*len) <= *next,
        _ => true,
    });
    clear.then_some(values)
}

/// Returns the inline data value. If any value, even an empty one, begins outside the inode,
/// `e2fsck` finds none, and so does this.
pub(crate) fn inline_data_value(slot: &[u8]) -> Option<&[u8]> {
    let extra = le16(slot, size_of::<RawInode>())?;
    let rest = slot.get(size_of::<RawInode>().checked_add(extra.into())?..)?;
    let body = rest.get(4..).filter(|_| le32(rest, 0) == Some(MAGIC))?;
    let mut at = 0usize;
    // Each iteration advances by the length of an entry.
    while let Some(head) = body.get(at..).filter(|rest| le32(rest, 0).is_some_and(|it| it != 0)) {
        let entry = parse_entry(body, head, XattrLocation::Inode)?;
        let end = u64::from(le16(head, 2)?).saturating_add(entry.size.into());
        if entry.value_inode == 0 && end > body.len() as u64 {
            return None;
        }
        at = at.saturating_add(entry.len);
    }
    let mut attributes = XattrList::from_inode(body);
    let found = attributes.find_map(|it| it.ok().filter(Xattr::is_inline_data))?;
    found.value().ok()
}

struct XattrEntry<'a> {
    len: usize,
    name: &'a [u8],
    size: u32,
    hash: u32,
    /// True for an encryption context.
    is_context: bool,
    /// EA inode of the value.
    value_inode: u32,
    /// Offset and length of the value.
    value: Option<(usize, usize)>,
}

fn parse_entry<'a>(
    bytes: &[u8],
    head: &'a [u8],
    container: XattrLocation,
) -> Option<XattrEntry<'a>> {
    let (name_len, number) = (usize::from(*head.first()?), *head.get(1)?);
    let (value_at, value_inode) = (usize::from(le16(head, 2)?), le32(head, 4)?);
    let (size, hash) = (le32(head, 8)?, le32(head, 12)?);
    let value_len = saturating_usize(size.into());
    let name = head.get(ENTRY_BYTES..)?.get(..name_len)?;
    let len = ENTRY_BYTES.checked_add(name_len)?.checked_next_multiple_of(4)?;
    if head.len() < len || container == XattrLocation::Block && number == 0 {
        return None;
    }
    let is_context = (number, name) == (9, &b"c"[..]);
    if value_inode != 0 {
        return Some(XattrEntry { len, name, size, hash, is_context, value_inode, value: None });
    }
    if container == XattrLocation::Block && value_at.checked_add(value_len)? > bytes.len() {
        return None;
    }
    let padded = value_len.checked_next_multiple_of(4)?;
    let value: &[u8] =
        if value_len == 0 { &[] } else { bytes.get(value_at..)?.get(..padded.max(value_len))? };
    let hashed = container == XattrLocation::Block || hash != 0;
    if hashed && !xattr_hashes(name, value).contains(&hash) {
        return None;
    }
    let value = (value_len != 0).then_some((value_at, padded));
    Some(XattrEntry { len, name, size, hash, is_context, value_inode, value })
}

/// Returns the hash of an attribute, with the characters of its name as unsigned and as signed:
/// machines differ.
fn xattr_hashes(name: &[u8], value: &[u8]) -> [u32; 2] {
    [false, true].map(|signed| {
        let character = |byte: u8| {
            if signed { i32::from(byte.cast_signed()).cast_unsigned() } else { byte.into() }
        };
        let hash = name.iter().fold(0u32, |hash, byte| hash.rotate_left(5) ^ character(*byte));
        let words = value.chunks_exact(4).filter_map(|word| le32(word, 0));
        words.fold(hash, |hash, word| hash.rotate_left(16) ^ word)
    })
}
