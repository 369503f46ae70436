//! Access to a disk without caches: the superblock, and single ranges of bytes.

use draconis_device::{Disk, Extent, Write};
use draconis_types::Block;

use crate::format::superblock::{LEN_BYTES, OFFSET_BYTES, RawSuperblock, Superblock};
use crate::units::saturating_usize;
use crate::{Error, Result};

/// Reads bytes of a disk, aligned to sectors or not.
pub fn read_bytes(
    disk: &dyn Disk,
    at: Extent,
) -> std::result::Result<Vec<u8>, draconis_device::Error> {
    let sector = u64::from(disk.properties().sector_bytes.max(1));
    let start = at.start_bytes.saturating_sub(at.start_bytes.checked_rem(sector).unwrap_or(0));
    let end = at.start_bytes.saturating_add(at.len_bytes);
    let end = end.checked_next_multiple_of(sector).unwrap_or(end);
    let len = end.saturating_sub(start);
    let read = disk.read_now(Extent::new(start, len), Block::private(saturating_usize(len)));
    let block = read.map_err(|refused| refused.error)?;
    let mut bytes = vec![0; saturating_usize(at.len_bytes)];
    block.copy_out(saturating_usize(at.start_bytes.saturating_sub(start)), &mut bytes);
    Ok(bytes)
}

/// Reads the superblock on `disk` without checking it.
///
/// # Errors
/// [`Error::NotExt`] on a disk that is too short or has no magic; [`Error::Io`].
pub fn read_raw_superblock(disk: &dyn Disk) -> Result<RawSuperblock> {
    let place = Extent::new(OFFSET_BYTES, LEN_BYTES as u64);
    if place.end_bytes() > Some(disk.properties().len_bytes) {
        return Err(Error::NotExt);
    }
    RawSuperblock::view(&read_bytes(disk, place)?).cloned()
}

/// Reads and checks the superblock on `disk`.
///
/// # Errors
/// As [`read_raw_superblock`]; [`Error::Corrupt`]; [`Error::Unsupported`].
pub fn read_superblock(disk: &dyn Disk) -> Result<Superblock> {
    read_raw_superblock(disk)?.check()
}

/// Returns a write of a copy of these bytes.
pub fn write_of(at_bytes: u64, bytes: &[u8]) -> Write {
    let mut block = Block::private(bytes.len());
    block.copy_in(0, bytes);
    Write { at_bytes, block }
}
