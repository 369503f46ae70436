//! Witnesses of how the contents of an inode are stored.
//!
//! ```text
//!   feature of the superblock · flag of the inode · bytes of the inode: two of the three decide
//! ```
//! Law 1: one flipped bit changes one witness, and the other two outvote it, for check, repair and
//! rescue alike.
//! Law 2: one flipped bit under a checksum is changed back where that makes the checksum right.

use std::ops::Range;

use zerocopy::{FromBytes, IntoBytes};

use super::extent::{self, ExtentNode};
use super::features::Incompatible;
use super::group;
use super::inode::{RawInode, flags, has_valid_checksum};
use super::superblock::Superblock;
use super::xattr::inline_value;
use super::{le16, le32};
use crate::{GroupNumber, InodeNumber};

/// Flags that say how contents are stored.
pub const FORMS: u32 = flags::EXTENTS | flags::INLINE_DATA;
/// Bytes of the first part of an inode, behind which `i_extra_isize` is.
const OLD_BYTES: usize = size_of::<RawInode>();
const XATTR_MAGIC: u32 = 0xEA02_0000;

/// What the witnesses say of an inode that may have contents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Verdict {
    /// The flags of [`FORMS`] that are right.
    pub flags: u32,
    /// Features that the superblock lost.
    pub missing: Incompatible,
}

/// Hears the witnesses of an inode on a volume with these features and as many blocks.
pub fn judge(slot: &[u8], features: Incompatible, blocks: u64) -> Option<Verdict> {
    let (raw, _) = RawInode::ref_from_prefix(slot).ok()?;
    let set = raw.i_flags.get();
    let is_heard = |feature, flag| features.contains(feature) || set & flag != 0;
    // One witness alone decides nothing: most inodes need no look at their bytes.
    let has_tree = match is_heard(Incompatible::EXTENTS, flags::EXTENTS) {
        true => shows_extents(raw.i_block.as_bytes(), blocks),
        false => Some(false),
    };
    let has_value =
        is_heard(Incompatible::INLINE_DATA, flags::INLINE_DATA) && has_inline_value(slot);
    let mut verdict = Verdict { flags: 0, missing: Incompatible::empty() };
    for (feature, flag, shows) in [
        (Incompatible::EXTENTS, flags::EXTENTS, has_tree),
        (Incompatible::INLINE_DATA, flags::INLINE_DATA, Some(has_value)),
    ] {
        let (has_feature, has_flag) = (features.contains(feature), set & flag != 0);
        // Block numbers of the volume are no damaged tree, and no contents of a file.
        let is_file = raw.i_mode.get() & 0o170_000 == 0o100_000;
        let leads_to_blocks =
            has_tree == Some(false) && raw.i_block.iter().any(|word| word.get() != 0);
        if leads_to_blocks && shows == Some(false) && (is_file || flag == flags::EXTENTS) {
            continue;
        }
        // Damaged bytes say nothing, and the flag counts for them.
        let shows = shows.unwrap_or(has_flag);
        if [has_feature, has_flag, shows].into_iter().filter(|it| *it).count() < 2 {
            continue;
        }
        verdict.flags |= flag;
        if !has_feature {
            verdict.missing |= feature;
        }
    }
    if verdict.flags == FORMS {
        // Contents have one form: the one that the bytes show.
        let (flag, feature) = match has_value && has_tree != Some(true) {
            true => (flags::EXTENTS, Incompatible::EXTENTS),
            false => (flags::INLINE_DATA, Incompatible::INLINE_DATA),
        };
        verdict.flags &= !flag;
        verdict.missing.remove(feature);
    }
    Some(verdict)
}

/// Returns true if the pointers are the root of a tree of extents, false if they lead to blocks of
/// the volume themselves, and nothing if they are damaged.
fn shows_extents(pointers: &[u8], blocks: u64) -> Option<bool> {
    if ExtentNode::check(pointers, None).is_ok() {
        return Some(true);
    }
    let leads_into_volume = |word: &[u8; 4]| u64::from(u32::from_le_bytes(*word)) < blocks;
    let is_magic = (le16(pointers, 0)? ^ extent::MAGIC).count_ones() <= 1;
    (!is_magic && pointers.as_chunks().0.iter().all(leads_into_volume)).then_some(false)
}

/// A bit of a structure: the byte and the number in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bit(pub usize, pub u32);

impl std::fmt::Display for Bit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "bit {} of byte {}", self.1, self.0)
    }
}

/// Returns the one bit of `range` that `accepts` accepts as flipped, with what it returns; nothing
/// if there are several.
pub fn flip_one_bit<T>(
    mut bytes: Vec<u8>,
    range: Range<usize>,
    mut accepts: impl FnMut(&[u8]) -> Option<T>,
) -> Option<(Bit, T)> {
    let bits = range.flat_map(|at| (0..8).map(move |bit| Bit(at, bit)));
    let mut found = bits.filter_map(|bit| {
        let mask = 1u8 << bit.1;
        *bytes.get_mut(bit.0)? ^= mask;
        let accepted = accepts(&bytes);
        *bytes.get_mut(bit.0)? ^= mask;
        Some((bit, accepted?))
    });
    let first = found.next()?;
    found.next().is_none().then_some(first)
}

/// Returns an inode with a wrong checksum, with the one bit changed back that makes it right.
pub fn mend_inode(slot: &[u8], number: InodeNumber, super_: &Superblock) -> Option<(Bit, Vec<u8>)> {
    if has_valid_checksum(slot, number, super_) {
        return None;
    }
    flip_one_bit(slot.to_vec(), 0..slot.len(), |bytes| {
        has_valid_checksum(bytes, number, super_).then(|| bytes.to_vec())
    })
}

/// Returns the block of descriptors with one bit of a group's descriptor changed back, if that makes
/// its checksum right.
pub fn mend_descriptor(
    block: &[u8],
    slot: u32,
    super_: &Superblock,
    number: GroupNumber,
) -> Option<(Bit, Vec<u8>)> {
    if group::has_valid_checksum(block, slot, super_, number) {
        return None;
    }
    let range = group::descriptor_range(slot, super_)?;
    let start = range.start;
    let (Bit(at, bit), bytes) = flip_one_bit(block.to_vec(), range, |bytes| {
        let is_right = group::has_valid_checksum(bytes, slot, super_, number);
        is_right.then(|| bytes.to_vec())
    })?;
    Some((Bit(at.saturating_sub(start), bit), bytes))
}

/// Returns true if the inode has the attribute that contents inside it have.
fn has_inline_value(slot: &[u8]) -> bool {
    let extra = le16(slot, OLD_BYTES).unwrap_or(0);
    let rest = slot.get(OLD_BYTES.saturating_add(extra.into())..).unwrap_or_default();
    le32(rest, 0) == Some(XATTR_MAGIC)
        && extra >= 4
        && rest.get(4..).is_some_and(|body| inline_value(body).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inode::NewInode;
    use crate::xattr::{NewXattr, encode_list};

    const BOTH: Incompatible = Incompatible::EXTENTS.union(Incompatible::INLINE_DATA);

    fn slot(flags: u32, has_tree: bool, is_inline: bool) -> Vec<u8> {
        let mut pointers = [0; 15];
        if has_tree {
            pointers[..2].copy_from_slice(&[0x1_F30A, 4]);
            pointers[3..6].copy_from_slice(&[0, 7, 300]);
        } else {
            pointers[..3].copy_from_slice(&[300, 301, 302]);
        }
        let list = encode_list(&[NewXattr::from_inline_data(&[])], 92);
        let attributes: &[u8] = if is_inline { &list } else { &[] };
        NewInode { mode: 0o100_644, flags, pointers, attributes, ..NewInode::default() }.encode(256)
    }

    /// Each state of an inode with each of its three witnesses turned.
    #[test]
    fn two_of_three_witnesses_decide() {
        let forms = [
            (0, Incompatible::empty(), false, false),
            (flags::EXTENTS, Incompatible::EXTENTS, true, false),
            (flags::INLINE_DATA, Incompatible::INLINE_DATA, false, true),
        ];
        for (flags, own, has_tree, is_inline) in forms {
            let right = Some(Verdict { flags, missing: Incompatible::empty() });
            let bytes = slot(flags, has_tree, is_inline);
            for features in [own, own | Incompatible::EXTENTS, own | Incompatible::INLINE_DATA] {
                assert_eq!(judge(&bytes, features, 8192), right, "{flags:x} {features:?}");
            }
            // The superblock lost its feature.
            let lost = BOTH.difference(own);
            let found = judge(&bytes, lost, 8192);
            assert_eq!(found, Some(Verdict { flags, missing: own }), "{flags:x}");
            // The inode lost its flag, or got another.
            for turned in [flags::EXTENTS, flags::INLINE_DATA] {
                let bytes = slot(flags ^ turned, has_tree, is_inline);
                assert_eq!(judge(&bytes, BOTH, 8192), right, "{flags:x} {turned:x}");
            }
        }
        // A bit of the header of a tree.
        for bit in 0..16 {
            let mut bytes = slot(flags::EXTENTS, true, false);
            bytes[40 + bit / 8] ^= 1 << (bit % 8);
            let found = judge(&bytes, Incompatible::EXTENTS, 8192).unwrap();
            assert_eq!(found.flags, flags::EXTENTS, "{bit}");
        }
    }
}
