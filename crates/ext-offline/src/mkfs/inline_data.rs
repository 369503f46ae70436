//! Inline data of a new volume (`inline_data`): files and directories that fit in their inodes with
//! all their attributes.
//!
//! Law: a directory is split between two names: the first part has 56 bytes, the second exactly the
//! bytes of its entries.

use crate::dir::build::NewDirent;
use crate::format::dirent::{DirBlockBuilder, DirBlockFormat, min_rec_len};
use crate::format::inline::{ENTRIES_AT, POINTER_BYTES};
use crate::format::inode::POINTERS;
use crate::units::saturating_u32;

/// Bytes of the entry of `system.data` without its value.
const ENTRY_BYTES: u64 = 20;
/// Bytes of the first part of a directory.
const FIRST_PART_BYTES: usize = POINTER_BYTES - ENTRIES_AT;

/// Returns the attribute bytes in the inode needed for contents of this length.
pub(super) fn xattr_bytes_needed(len: u64) -> u64 {
    ENTRY_BYTES.saturating_add(len.saturating_sub(POINTER_BYTES as u64).next_multiple_of(4))
}

/// Returns the inline size of a directory with names of these lengths.
pub(super) fn inline_directory_bytes(names: impl Iterator<Item = usize>) -> u64 {
    let (mut first, mut rest) = (0usize, 0u64);
    for record in names.map(min_rec_len) {
        match rest == 0 && first.saturating_add(record) <= FIRST_PART_BYTES {
            true => first = first.saturating_add(record),
            false => rest = rest.saturating_add(record as u64),
        }
    }
    (POINTER_BYTES as u64).saturating_add(rest)
}

/// Builds the inline directory of these names in `parent`.
pub(super) fn build_inline_directory(
    parent: u32,
    names: &[NewDirent<'_>],
    filetype: bool,
) -> Vec<u8> {
    let shape = |bytes: usize| DirBlockFormat {
        block_bytes: saturating_u32(bytes as u64),
        filetype,
        has_checksums: false,
    };
    let mut first = DirBlockBuilder::new(shape(FIRST_PART_BYTES));
    let fit = names.iter().position(|it| !first.push(it.inode, it.kind, it.name));
    let rest = names.get(fit.unwrap_or(names.len())..).unwrap_or_default();
    let mut bytes = parent.to_le_bytes().to_vec();
    bytes.extend(first.finish());
    if !rest.is_empty() {
        let len = rest.iter().map(|it| min_rec_len(it.name.len())).sum();
        let mut second = DirBlockBuilder::new(shape(len));
        for it in rest {
            second.push(it.inode, it.kind, it.name);
        }
        bytes.extend(second.finish());
    }
    bytes
}

/// Splits inline contents into `i_block` and the value of `system.data`.
pub(super) fn split_inline(bytes: &[u8]) -> ([u32; POINTERS], &[u8]) {
    let (first, value) = bytes.split_at_checked(POINTER_BYTES).unwrap_or((bytes, &[]));
    let mut words = first.chunks(4).map(|chunk| {
        let mut word = [0; 4];
        word.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
        u32::from_le_bytes(word)
    });
    (std::array::from_fn(|_| words.next().unwrap_or(0)), value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use draconis_types::FileType;

    #[test]
    fn inline_directory_has_predicted_length() {
        let names: Vec<Vec<u8>> =
            [1usize, 30, 9, 4, 40].iter().map(|len| vec![b'n'; *len]).collect();
        for count in 0..=names.len() {
            let names = &names[..count];
            let list: Vec<NewDirent<'_>> = names
                .iter()
                .map(|name| NewDirent { name, inode: 12, kind: FileType::File })
                .collect();
            let bytes = build_inline_directory(2, &list, true);
            assert_eq!(bytes.len() as u64, inline_directory_bytes(names.iter().map(Vec::len)));
            assert_eq!(bytes.len() == POINTER_BYTES, count <= 2, "12 and 40 of 56 bytes");
        }
        let (pointers, value) = split_inline(&[1; 62]);
        assert_eq!((pointers, value), ([0x0101_0101; POINTERS], &[1, 1][..]));
        assert_eq!(split_inline(&[1, 2]).0[0], 0x0201);
        assert_eq!(
            (xattr_bytes_needed(0), xattr_bytes_needed(60), xattr_bytes_needed(61)),
            (20, 20, 24)
        );
    }
}
