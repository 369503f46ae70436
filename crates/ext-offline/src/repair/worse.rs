//! Comparison of what can be read of a volume before and after a repair in part.

use std::collections::HashMap;
use std::sync::Arc;

use draconis_device::Disk;
use draconis_types::FileType;

use crate::backup::SuperblockPlace;
use crate::options::OpenOptions;
use crate::rescue::{Rescue, RescuedItem};
use crate::{InodeNumber, Result};

/// Sectors of a file's contents that are compared: 1 GiB of data. Of a longer file with another map,
/// nothing shows that it is no worse.
const MAX_SECTORS: usize = 1 << 21;

/// Returns the path of a file of which less can be read on the disk `after` a repair than `before`.
///
/// # Errors
/// Those of opening one of them.
pub(super) fn find_worse_file(
    before: &Arc<dyn Disk>,
    after: &Arc<dyn Disk>,
) -> Result<Option<Vec<u8>>> {
    let scan = |disk: &Arc<dyn Disk>| {
        let place = SuperblockPlace::default();
        Rescue::scan(disk.clone(), OpenOptions::default(), &place, &|_, _| {})
    };
    let (before, after) = (scan(before)?, scan(after)?);
    let by_inode: HashMap<InodeNumber, &RescuedItem> =
        after.items().iter().filter_map(|item| Some((item.inode()?, item))).collect();
    let worse = before.items().iter().find(|item| {
        let Some(number) = item.inode() else { return false };
        by_inode.get(&number).is_none_or(|now| is_worse((&before, item), (&after, now)))
    });
    Ok(worse.map(|item| item.path.clone()))
}

fn is_worse(
    (before, item): (&Rescue, &RescuedItem),
    (after, now): (&Rescue, &RescuedItem),
) -> bool {
    let (Some(old), Some(new)) = (&item.attributes, &now.attributes) else { return false };
    if old.kind != new.kind || old.size_bytes > new.size_bytes {
        return true;
    }
    if old.kind == FileType::Symlink {
        return before.link_target(item).is_ok_and(|old| after.link_target(now) != Ok(old));
    }
    if old.kind != FileType::File || before.has_same_map(item, after, now) {
        return false;
    }
    // Pieces of the two may end in other places: each sector has its own.
    let sums = |at: u64, piece: &[u8]| -> Vec<(u64, u32)> {
        let places = (0u64..).map(|nth| at.saturating_add(nth.saturating_mul(512)));
        places.zip(piece.chunks(512).map(crc32c::crc32c)).collect()
    };
    let mut sectors = HashMap::new();
    after.read(now, &mut |at, piece| {
        sectors.extend(sums(at, &piece));
        sectors.len() <= MAX_SECTORS
    });
    let mut is_worse = sectors.len() > MAX_SECTORS;
    if is_worse {
        return true;
    }
    before.read(item, &mut |at, piece| {
        is_worse = sums(at, &piece).iter().any(|(at, sum)| sectors.get(at) != Some(sum));
        !is_worse
    });
    is_worse
}
