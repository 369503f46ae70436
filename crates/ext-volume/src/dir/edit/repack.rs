//! Repacking of directory blocks when a rewrite changes all of them at once.

use super::{RawRecord, collect_records, pack_records};
use crate::Result;
use crate::format::dirent::DirBlockFormat;

/// Converts a block of entries to another format; `None` if they do not fit.
///
/// # Errors
/// [`crate::Error::Corrupt`] if the chain breaks.
pub fn convert_block(names: &[u8], shape: DirBlockFormat) -> Result<Option<Vec<u8>>> {
    let records = collect_records(names)?;
    let used: usize = records.iter().map(RawRecord::used_bytes).sum();
    if used > shape.dirent_area_bytes() {
        return Ok(None);
    }
    Ok(Some(shape.with_tail(pack_records(records, names, shape.dirent_area_bytes()))))
}

/// Repacks the entries of these blocks into as many blocks, or more if needed. Everything without a
/// name (index, checksums) is dropped.
///
/// # Errors
/// As [`convert_block`].
pub fn repack_linear(blocks: &[&[u8]], shape: DirBlockFormat) -> Result<Vec<Vec<u8>>> {
    let mut listed = vec![];
    let mut page: Vec<u8> = vec![];
    for names in blocks {
        for record in collect_records(names)?.into_iter().filter(|record| record.inode != 0) {
            if page.len().saturating_add(record.used_bytes()) > shape.dirent_area_bytes() {
                listed.push(std::mem::take(&mut page));
            }
            record.append_to(names, &mut page);
        }
    }
    listed.push(page);
    listed.resize(blocks.len().max(listed.len()), vec![]);
    let whole = |mut page: Vec<u8>| {
        super::extend_last_record(&mut page, shape.dirent_area_bytes());
        shape.with_tail(page)
    };
    Ok(listed.into_iter().map(whole).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InodeNumber;
    use crate::dir::edit::{SlotSearch, empty_block, find, find_or_slot, insert};
    use draconis_types::FileType;

    const WITHOUT_CHECKSUMS: DirBlockFormat =
        DirBlockFormat { block_bytes: 1024, filetype: true, has_checksums: false };
    const WITH_CHECKSUMS: DirBlockFormat =
        DirBlockFormat { has_checksums: true, ..WITHOUT_CHECKSUMS };

    /// Returns a block with `count` names of ten bytes.
    fn filled_block(count: u32) -> Vec<u8> {
        let mut block = empty_block(WITHOUT_CHECKSUMS);
        for nth in 0..count {
            let name = format!("{nth:010}");
            let target = find_or_slot(&block, true, name.as_bytes()).unwrap();
            let SlotSearch::Free(room) = target else { panic!("{target:?}") };
            let inode = InodeNumber(nth + 12);
            insert(&mut block, &room, inode, FileType::File, name.as_bytes(), true).unwrap();
        }
        block
    }

    #[test]
    fn checksum_tail_is_added_if_block_has_space() {
        let names = WITH_CHECKSUMS.dirent_area_bytes();
        for (count, fits) in [(0, true), (1, true), (50, true), (51, false)] {
            let block = convert_block(&filled_block(count), WITH_CHECKSUMS).unwrap();
            assert_eq!(block.is_some(), fits, "{count}");
            let Some(block) = block else { continue };
            for nth in 0..count {
                let name = format!("{nth:010}");
                assert!(find(&block[..names], true, name.as_bytes()).unwrap().is_some());
            }
        }
    }

    #[test]
    fn repacked_names_need_as_many_blocks_or_more() {
        let (full, some) = (filled_block(51), filled_block(3));
        let listed = repack_linear(&[&full, &some, &some], WITH_CHECKSUMS).unwrap();
        assert_eq!(listed.len(), 3);
        let count = |block: &Vec<u8>| {
            let records = collect_records(&block[..WITH_CHECKSUMS.dirent_area_bytes()]).unwrap();
            records.iter().filter(|record| record.inode != 0).count()
        };
        assert_eq!(listed.iter().map(count).collect::<Vec<_>>(), [50, 7, 0]);
        let more = repack_linear(&[&full], WITH_CHECKSUMS).unwrap();
        assert_eq!(more.iter().map(count).collect::<Vec<_>>(), [50, 1]);
        assert!(repack_linear(&[&[1; 1024]], WITH_CHECKSUMS).is_err());
    }
}
