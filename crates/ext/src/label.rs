//! Change of a volume label: one sector of the superblock, and therefore atomic.

use draconis_device::{Disk, Extent, Group, Write};
use draconis_exchange::contract::Time;
use draconis_exchange::heap::Block;

use crate::format::features::Incompatible;
use crate::format::superblock::to_disk_seconds;
use crate::format::superblock::{LEN_BYTES, OFFSET_BYTES, RawSuperblock};
use crate::{Error, Result};

/// Size of the sector that is written: the superblock's first, which holds the label.
const SECTOR_BYTES: usize = 512;

/// Sets the label of the volume on `disk`, which must not be open, and waits until it is durable.
/// Backup superblocks keep the old label, as with `e2label`.
///
/// # Errors
/// [`Error::Misuse`] for a label of more than 16 bytes or with a NUL; [`Error::NotExt`];
/// [`Error::Unsupported`] if its journal needs recovery; [`Error::Io`].
pub fn set_label(disk: &dyn Disk, label: &[u8], now: Time) -> Result<()> {
    let mut field = [0; 16];
    if label.len() > field.len() || label.contains(&0) {
        return Err(Error::Misuse("a label has at most 16 bytes, none of them NUL"));
    }
    field.iter_mut().zip(label).for_each(|(to, byte)| *to = *byte);
    let at = Extent { start_bytes: OFFSET_BYTES, len_bytes: LEN_BYTES as u64 };
    let block = disk.read_now(at, Block::private(LEN_BYTES));
    let mut bytes = block.map_err(|refused| Error::Io(refused.error))?.into_private();
    let raw = RawSuperblock::view_mut(&mut bytes)?;
    if raw.s_feature_incompat.get() & Incompatible::RECOVER.bits() != 0 {
        let feature = "needs_recovery: mount the volume once, or run e2fsck on it".to_owned();
        return Err(Error::Unsupported { feature });
    }
    raw.s_wtime.set(to_disk_seconds(now));
    raw.s_volume_name = field;
    // The checksum is in the other sector and stays valid.
    raw.preserve_checksum();
    let mut sector = Block::private(SECTOR_BYTES);
    sector.copy_in(0, bytes.get(..SECTOR_BYTES).unwrap_or_default());
    let write = Write { at_bytes: OFFSET_BYTES, block: sector };
    let ticket = disk.submit(Group { writes: vec![write] }, &[]);
    Ok(disk.wait_durable(ticket.map_err(|refused| Error::Io(refused.error))?)?)
}
