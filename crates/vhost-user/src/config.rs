//! Features and configuration space of the device.

use draconis_device::Properties;
use virtio_bindings::{virtio_blk as blk, virtio_config, virtio_ring};

use crate::request::{MAX_DISCARD_SECTORS, MAX_RANGES, MAX_ZERO_SECTORS, SECTOR_BYTES};

/// Length of the configuration space that a front end may read, in bytes. The rest is zero.
pub(crate) const CONFIG_BYTES: usize = 256;
/// Offset of the byte that switches the write cache.
pub(crate) const WRITE_CACHE_OFFSET: usize = 32;
/// Maximum number of segments: with header and status it fills the usual queue of 128 descriptors.
const SEG_MAX: u32 = 126;
/// Size of the blocks that a guest should align to, in bytes.
const PHYSICAL_BLOCK_BYTES: u32 = 4096;

const fn bit(number: u32) -> u64 {
    1 << number
}

pub(crate) const FLUSH: u64 = bit(blk::VIRTIO_BLK_F_FLUSH);
pub(crate) const CONFIG_WCE: u64 = bit(blk::VIRTIO_BLK_F_CONFIG_WCE);
pub(crate) const EVENT_IDX: u64 = bit(virtio_ring::VIRTIO_RING_F_EVENT_IDX);

/// Returns the virtio features of a disk.
pub(crate) fn features(properties: &Properties) -> u64 {
    let mut features = bit(virtio_config::VIRTIO_F_VERSION_1)
        | bit(virtio_ring::VIRTIO_RING_F_INDIRECT_DESC)
        | EVENT_IDX
        | bit(blk::VIRTIO_BLK_F_SEG_MAX)
        | bit(blk::VIRTIO_BLK_F_BLK_SIZE)
        | bit(blk::VIRTIO_BLK_F_TOPOLOGY)
        | bit(blk::VIRTIO_BLK_F_MQ)
        | FLUSH
        | CONFIG_WCE;
    if properties.read_only {
        return features | bit(blk::VIRTIO_BLK_F_RO);
    }
    features |= bit(blk::VIRTIO_BLK_F_WRITE_ZEROES);
    if properties.discards {
        features |= bit(blk::VIRTIO_BLK_F_DISCARD);
    }
    features
}

/// Returns the configuration space of a disk.
pub(crate) fn space(properties: &Properties, has_write_cache: bool) -> [u8; CONFIG_BYTES] {
    let block = properties.sector_bytes.max(SECTOR_BYTES as u32);
    let block_sectors = block / SECTOR_BYTES as u32;
    let physical = (PHYSICAL_BLOCK_BYTES / block).max(1);
    let mut space = [0; CONFIG_BYTES];
    let mut put = |at: usize, bytes: &[u8]| {
        if let Some(room) = space.get_mut(at..at + bytes.len()) {
            room.copy_from_slice(bytes);
        }
    };
    put(0, &(properties.len_bytes / SECTOR_BYTES).to_le_bytes());
    put(12, &SEG_MAX.to_le_bytes());
    put(20, &block.to_le_bytes());
    put(24, &[physical.ilog2() as u8]);
    put(26, &(physical as u16).to_le_bytes());
    put(28, &(properties.best_io_bytes / block).to_le_bytes());
    put(WRITE_CACHE_OFFSET, &[u8::from(has_write_cache)]);
    put(34, &crate::MAX_QUEUES.to_le_bytes());
    put(36, &MAX_DISCARD_SECTORS.to_le_bytes());
    put(40, &MAX_RANGES.to_le_bytes());
    put(44, &block_sectors.to_le_bytes());
    put(48, &MAX_ZERO_SECTORS.to_le_bytes());
    put(52, &MAX_RANGES.to_le_bytes());
    // Zeros may free space.
    put(56, &[u8::from(properties.discards)]);
    space
}
