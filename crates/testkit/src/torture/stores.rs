//! Small stores that a campaign opens, reads and drops.

use draconis_device::{Disk, Extent};
use draconis_types::Block;

use draconis_objects::OpenOptions;

/// Options with little memory, for stores that are opened and dropped quickly.
pub(super) const SMALL_CACHE_OPTIONS: OpenOptions =
    OpenOptions { cache_bytes: 128 << 10, read_only: false };

/// Returns all bytes of a disk.
pub(crate) fn read_disk_bytes(disk: &dyn Disk) -> Vec<u8> {
    let len = disk.properties().len_bytes;
    match disk.read_now(Extent::new(0, len), Block::private(len as usize)) {
        Ok(block) => block.into_private().to_vec(),
        Err(_) => vec![],
    }
}

pub(super) fn key_from_number(key: u16) -> Vec<u8> {
    format!("key {key:04}").into_bytes()
}
