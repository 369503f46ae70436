//! Extended attributes, inside inodes and in blocks that several inodes may share.

use std::sync::PoisonError;

use super::Check;
use super::blocks::Claim;
use super::complaint::{Complaint, What};
use crate::Result;
use crate::blocks::role::Role as BlockRole;
use crate::format::{le16, le32, xattr};
use crate::units::index;

/// What a list of attributes starts with.
pub(super) const MAGIC: u32 = 0xEA02_0000;
const HEAD_BYTES: usize = 32;
const ENTRY_BYTES: usize = 16;

/// Where a list is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Container {
    Block,
    Inode,
}

/// A reference to a block of attributes; the first one claims the block and looks at it.
pub(super) fn block(
    check: &Check<'_>,
    inode: u32,
    block: u64,
    claim: &mut Claim<'_, '_>,
) -> Result<()> {
    let complain = || {
        let complaint = Complaint::new(What::AttributeBlock).inode(inode);
        check.log.add(complaint.block(block));
    };
    let feature = crate::format::features::Compatible::EXT_ATTR;
    if !check.super_.compatible.contains(feature) || !check.holds(block) {
        complain();
        // What is not a block of attributes is no block of the file either.
        claim.skipped = true;
        return Ok(());
    }
    let first = {
        let mut blocks = check.attribute_blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let count = blocks.entry(block).or_insert(0);
        *count = count.saturating_add(1);
        *count == 1
    };
    if !first {
        claim.count = claim.count.saturating_add(1);
        return Ok(());
    }
    if claim.claim(block) {
        let bytes = check.block(block, BlockRole::Attributes)?;
        let sound = le32(&bytes, 0) == Some(MAGIC)
            && le32(&bytes, 8) == Some(1)
            && is_sound(&bytes, HEAD_BYTES, Container::Block);
        if !sound {
            complain();
        }
    }
    Ok(())
}

/// Compares the number of references with what each block says of it.
pub(super) fn references(check: &Check<'_>) -> Result<()> {
    let blocks = check.attribute_blocks.lock().unwrap_or_else(PoisonError::into_inner);
    let mut all: Vec<(u64, u32)> = blocks.iter().map(|(block, count)| (*block, *count)).collect();
    drop(blocks);
    all.sort_unstable();
    for (block, count) in all {
        if check.metadata.has(check.nth(block)) {
            continue;
        }
        let found = xattr::owners(&check.block(block, BlockRole::Attributes)?).unwrap_or(0);
        if found != count {
            let complaint = Complaint::new(What::AttributeReferences).block(block);
            check.log.add(complaint.found(found).expected(count));
        }
    }
    Ok(())
}

/// Whether the entries from `at` on, and the values they have in `bytes`, are whole, clear
/// from each other, and have the hashes they should.
pub(super) fn is_sound(bytes: &[u8], start: usize, container: Container) -> bool {
    let mut taken = vec![(0, start)];
    let mut at = start;
    // Each turn goes on by the length of an entry.
    while let Some(head) = bytes.get(at..).filter(|rest| le32(rest, 0).is_some_and(|it| it != 0)) {
        let Some((len, value)) = entry(bytes, head, container) else { return false };
        taken.push((at, len));
        taken.extend(value);
        at = at.saturating_add(len);
    }
    if bytes.len().saturating_sub(at) >= 4 {
        taken.push((at, 4));
    }
    taken.sort_unstable();
    taken.windows(2).all(|pair| match pair {
        [(start, len), (next, _)] => start.saturating_add(*len) <= *next,
        _ => true,
    })
}

/// The length of an entry, and place and length of its value.
fn entry(
    bytes: &[u8],
    head: &[u8],
    container: Container,
) -> Option<(usize, Option<(usize, usize)>)> {
    let (name_len, number) = (usize::from(*head.first()?), *head.get(1)?);
    let (value_at, elsewhere) = (usize::from(le16(head, 2)?), le32(head, 4)?);
    let value_len = index(le32(head, 8)?.into());
    let hash = le32(head, 12)?;
    let name = head.get(ENTRY_BYTES..)?.get(..name_len)?;
    let len = ENTRY_BYTES.checked_add(name_len)?.checked_next_multiple_of(4)?;
    let outside = value_at.checked_add(value_len)? > bytes.len();
    if elsewhere != 0
        || head.len() < len
        || container == Container::Block && (number == 0 || outside)
    {
        return None;
    }
    let padded = value_len.checked_next_multiple_of(4)?;
    let value: &[u8] =
        if value_len == 0 { &[] } else { bytes.get(value_at..)?.get(..padded.max(value_len))? };
    let hashed = container == Container::Block || hash != 0;
    if hashed && !hashes(name, value).contains(&hash) {
        return None;
    }
    Some((len, (value_len != 0).then_some((value_at, padded))))
}

/// The hash of an attribute, with the characters of its name as unsigned and as signed:
/// machines differ.
fn hashes(name: &[u8], value: &[u8]) -> [u32; 2] {
    [false, true].map(|signed| {
        let character = |byte: u8| {
            if signed { i32::from(byte.cast_signed()).cast_unsigned() } else { byte.into() }
        };
        let hash = name.iter().fold(0u32, |hash, byte| hash.rotate_left(5) ^ character(*byte));
        let words = value.chunks_exact(4).filter_map(|word| le32(word, 0));
        words.fold(hash, |hash, word| hash.rotate_left(16) ^ word)
    })
}
