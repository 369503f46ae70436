//! The label of a volume, changed in its superblock: one sector, so whole or not at all.

use draconis_device::{Disk, Extent, Group, Write};
use draconis_exchange::contract::Time;
use draconis_exchange::heap::Block;

use crate::format::features::{Incompatible, ReadOnlyCompatible};
use crate::format::superblock::{MAGIC, OFFSET_BYTES};
use crate::format::{le16, le32, put32};
use crate::units::narrow;
use crate::{Error, Result};

const SECTOR_BYTES: u64 = 512;
/// `s_wtime`
const WRITTEN_AT: usize = 48;
/// `s_magic`
const MAGIC_AT: usize = 56;
/// `s_feature_incompat` and `s_feature_ro_compat`
const FEATURES_AT: [usize; 2] = [96, 100];
/// `s_volume_name`
const LABEL_AT: usize = 120;
const LABEL_BYTES: usize = 16;

/// Gives the volume on `disk`, which is not open, another label, and waits until it is
/// durable. Copies of the superblock keep the old one, as with `e2label`.
///
/// # Errors
/// [`Error::Misuse`] for a label of more than 16 bytes or with a NUL; [`Error::NotExt`];
/// [`Error::Unsupported`] if its journal or checksums would contradict; [`Error::Io`].
pub fn set_label(disk: &dyn Disk, label: &[u8], now: Time) -> Result<()> {
    if label.len() > LABEL_BYTES || label.contains(&0) {
        return Err(Error::Misuse("a label has at most 16 bytes, none of them NUL"));
    }
    let at = Extent { start_bytes: OFFSET_BYTES, len_bytes: SECTOR_BYTES };
    let block = disk.read_now(at, Block::private(crate::units::index(SECTOR_BYTES)));
    let mut block = block.map_err(|refused| Error::Io(refused.error))?.into_private();
    if le16(&block, MAGIC_AT) != Some(MAGIC) {
        return Err(Error::NotExt);
    }
    let [incompatible, read_only] = FEATURES_AT.map(|at| le32(&block, at).unwrap_or(0));
    let needs_recovery = incompatible & Incompatible::RECOVER.bits() != 0;
    let has_checksum = read_only & ReadOnlyCompatible::METADATA_CSUM.bits() != 0;
    if needs_recovery || has_checksum {
        let feature = if needs_recovery { "journal recovery" } else { "metadata_csum" };
        return Err(Error::Unsupported { feature: format!("needs: {feature}") });
    }
    let seconds = narrow(u64::try_from(now.seconds).unwrap_or(0));
    put32(&mut block, WRITTEN_AT, seconds).ok_or(Error::NotExt)?;
    let field = block.get_mut(LABEL_AT..).and_then(|rest| rest.get_mut(..LABEL_BYTES));
    let padded = label.iter().copied().chain(std::iter::repeat(0));
    field.ok_or(Error::NotExt)?.iter_mut().zip(padded).for_each(|(to, byte)| *to = byte);
    let write = Write { at_bytes: OFFSET_BYTES, block: block.into() };
    let ticket = disk.submit(Group { writes: vec![write] }, &[]);
    Ok(disk.wait(ticket.map_err(|refused| Error::Io(refused.error))?)?)
}
