//! Change of a volume label: one sector of the superblock, and therefore atomic.

use draconis_device::{Disk, Group};
use draconis_types::Time;

use crate::blocks::uncached::read_raw_superblock;
use crate::format::features::Incompatible;
use crate::format::superblock::to_disk_seconds;
use crate::redo_log::superblock_sector;
use crate::{Error, Result};

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
    let mut raw = read_raw_superblock(disk)?;
    if raw.s_feature_incompat.get() & Incompatible::RECOVER.bits() != 0 {
        let feature = "needs_recovery: mount the volume once, or run e2fsck on it".to_owned();
        return Err(Error::Unsupported { feature });
    }
    raw.s_wtime.set(to_disk_seconds(now));
    raw.s_volume_name = field;
    // The checksum is in the other sector and stays valid.
    raw.preserve_checksum();
    let write = superblock_sector(&raw, 0);
    let ticket = disk.submit(Group { writes: vec![write] }, &[]);
    Ok(disk.wait_durable(ticket.map_err(|refused| Error::Io(refused.error))?)?)
}
