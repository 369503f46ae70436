//! Directory blocks laid out anew, where all of them change at once (`rework`).

#![allow(clippy::arithmetic_side_effects, reason = "computes with places inside of a block")]

use super::{Record, all, pack_of};
use crate::Result;
use crate::format::dirent::Shape;

/// A block of names in another shape; `None` if they do not fit into it.
///
/// # Errors
/// [`crate::Error::Corrupt`] if the chain breaks.
pub(crate) fn reshape(names: &[u8], shape: Shape) -> Result<Option<Vec<u8>>> {
    let records = all(names)?;
    let used: usize = records.iter().map(Record::used).sum();
    if used > shape.names_bytes() {
        return Ok(None);
    }
    Ok(Some(shape.whole(pack_of(records, names, shape.names_bytes()))))
}

/// The names of these blocks, one behind the other in as many blocks, or more if they do not fit.
/// What has no name (the index, checksums) is gone.
///
/// # Errors
/// As [`reshape`].
pub(crate) fn relist(blocks: &[&[u8]], shape: Shape) -> Result<Vec<Vec<u8>>> {
    let mut listed = vec![];
    let mut page: Vec<u8> = vec![];
    for names in blocks {
        for record in all(names)?.into_iter().filter(|record| record.inode != 0) {
            if page.len() + record.used() > shape.names_bytes() {
                listed.push(std::mem::take(&mut page));
            }
            record.append(names, &mut page);
        }
    }
    listed.push(page);
    listed.resize(blocks.len().max(listed.len()), vec![]);
    let whole = |mut page: Vec<u8>| {
        super::fill_up(&mut page, shape.names_bytes());
        shape.whole(page)
    };
    Ok(listed.into_iter().map(whole).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InodeNumber;
    use crate::dir::edit::{SlotSearch, empty, find, insert, seek};
    use draconis_exchange::contract::FileType;

    const OLD: Shape = Shape { block_bytes: 1024, filetype: true, sums: false };
    const NEW: Shape = Shape { sums: true, ..OLD };

    /// A block with so many names of ten bytes.
    fn filled(count: u32) -> Vec<u8> {
        let mut block = empty(OLD);
        for nth in 0..count {
            let name = format!("{nth:010}");
            let sought = seek(&block, true, name.as_bytes()).unwrap();
            let SlotSearch::Room(room) = sought else { panic!("{sought:?}") };
            let inode = InodeNumber(nth + 12);
            insert(&mut block, &room, inode, FileType::File, name.as_bytes(), true).unwrap();
        }
        block
    }

    #[test]
    fn names_get_room_for_a_checksum_where_there_is_some() {
        let names = NEW.names_bytes();
        for (count, fits) in [(0, true), (1, true), (50, true), (51, false)] {
            let block = reshape(&filled(count), NEW).unwrap();
            assert_eq!(block.is_some(), fits, "{count}");
            let Some(block) = block else { continue };
            for nth in 0..count {
                let name = format!("{nth:010}");
                assert!(find(&block[..names], true, name.as_bytes()).unwrap().is_some());
            }
        }
    }

    #[test]
    fn all_names_go_on_in_as_many_blocks_or_in_more() {
        let (full, some) = (filled(51), filled(3));
        let listed = relist(&[&full, &some, &some], NEW).unwrap();
        assert_eq!(listed.len(), 3);
        let count = |block: &Vec<u8>| {
            let records = all(&block[..NEW.names_bytes()]).unwrap();
            records.iter().filter(|record| record.inode != 0).count()
        };
        assert_eq!(listed.iter().map(count).collect::<Vec<_>>(), [50, 7, 0]);
        let more = relist(&[&full], NEW).unwrap();
        assert_eq!(more.iter().map(count).collect::<Vec<_>>(), [50, 1]);
        assert!(relist(&[&[1; 1024]], NEW).is_err());
    }
}
