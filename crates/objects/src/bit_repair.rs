//! Blocks with one flipped bit: the checksum tells which one.
//!
//! A checksum of 64 bits that fits after one bit was changed back is right: of the 2^19 bits of the
//! longest block, another one fits with a probability of 2^-45.
//!
//! Law: the number of tries is bounded, whatever the disk has.

use std::collections::BTreeMap;
use std::sync::Arc;

use draconis_device::{Disk, Extent, Pending, ReadAnswer, Refused, Urgency};
use draconis_types::lock::{Mutex, RwLock};
use draconis_types::{Block, PrivateBuffer};

use crate::codec::{Checksummer, to_usize_saturating};
use crate::entry::{CHECKSUM_BLOCK_BYTES, PayloadRef};
use crate::index::tree::BlockPtr;

/// Longest block that is tried.
pub(crate) const MAX_REPAIRED_BYTES: usize = 64 << 10;
/// Bytes that may be hashed: for all tries, and for those that found nothing.
const MAX_HASHED_BYTES: u64 = 256 << 30;
const MAX_WASTED_BYTES: u64 = 4 << 30;

/// Bytes and their address.
pub(crate) type DiskBytes<'b> = (u64, &'b mut [u8]);

/// A disk whose flipped bits are changed back when it is read.
pub(crate) struct RepairedDisk {
    inner: Arc<dyn Disk>,
    /// Changed bits of bytes.
    patches: RwLock<BTreeMap<u64, u8>>,
    /// Bytes hashed: for all tries, and for those that found nothing.
    hashed: Mutex<(u64, u64)>,
}

impl RepairedDisk {
    pub fn new(inner: Arc<dyn Disk>) -> Self {
        Self { inner, patches: RwLock::default(), hashed: Mutex::default() }
    }

    /// Returns the number of bits changed back.
    pub fn repaired_bits(&self) -> u64 {
        self.patches.read().len() as u64
    }

    /// Finds the flipped bit of the bytes in `parts`, with their addresses; `has_valid_checksum`
    /// judges them. Returns true if they are right now.
    pub fn repair_with(
        &self,
        parts: &mut [DiskBytes<'_>],
        has_valid_checksum: &dyn Fn(&[DiskBytes<'_>]) -> bool,
    ) -> bool {
        let len: usize = parts.iter().map(|(_, bytes)| bytes.len()).sum();
        let is_blank = parts.iter().all(|(_, bytes)| bytes.iter().all(|byte| *byte == 0));
        if len > MAX_REPAIRED_BYTES || is_blank || !self.may_try() {
            return false;
        }
        let mut tries = 0u64;
        let mut found = None;
        'tries: for part in 0..parts.len() {
            let count = parts.get(part).map_or(0, |(_, bytes)| bytes.len());
            for (nth, bit) in (0..count).flat_map(|nth| (0..8).map(move |bit| (nth, 1u8 << bit))) {
                let flip = |parts: &mut [DiskBytes<'_>]| {
                    let byte = parts.get_mut(part).and_then(|(_, bytes)| bytes.get_mut(nth));
                    byte.into_iter().for_each(|byte| *byte ^= bit);
                };
                tries = tries.saturating_add(1);
                flip(parts);
                if has_valid_checksum(parts) {
                    let at = parts.get(part).map_or(0, |(at, _)| at.saturating_add(nth as u64));
                    found = Some((at, bit));
                    break 'tries;
                }
                flip(parts);
            }
        }
        let bytes = tries.saturating_mul(len as u64);
        let mut hashed = self.hashed.lock();
        hashed.0 = hashed.0.saturating_add(bytes);
        let Some((at, bit)) = found else {
            hashed.1 = hashed.1.saturating_add(bytes);
            return false;
        };
        log::debug!("byte {at} has one flipped bit");
        let mut patches = self.patches.write();
        let patch = patches.entry(at).or_default();
        *patch ^= bit;
        true
    }

    fn may_try(&self) -> bool {
        let hashed = self.hashed.lock();
        hashed.0 <= MAX_HASHED_BYTES && hashed.1 <= MAX_WASTED_BYTES
    }

    /// Repairs a block of the index; returns true if it is right now.
    pub fn repair_block(&self, summer: Checksummer, ptr: BlockPtr) -> bool {
        let BlockPtr { at, len, sum } = ptr;
        if len as usize > MAX_REPAIRED_BYTES || !self.may_try() {
            return false;
        }
        let Some(mut bytes) = self.read_bytes(at, len.into()) else { return false };
        if summer.checksum(at, &bytes) == sum {
            return false;
        }
        let part: &mut [u8] = &mut bytes;
        self.repair_with(&mut [(at, part)], &|parts| {
            parts.first().is_some_and(|(at, bytes)| summer.checksum(*at, bytes) == sum)
        })
    }

    /// Repairs the blocks of a payload; returns true if one was repaired.
    pub fn repair_payload(&self, summer: Checksummer, data: &PayloadRef) -> bool {
        let blocks = (data.at..data.end()).step_by(CHECKSUM_BLOCK_BYTES as usize).zip(&data.sums);
        let repaired = blocks.filter(|&(at, &sum)| {
            let len = data.end().saturating_sub(at).min(CHECKSUM_BLOCK_BYTES.into());
            let len = crate::codec::to_u32_saturating(len);
            self.repair_block(summer, BlockPtr { at, len, sum })
        });
        repaired.count() > 0
    }

    /// Reads bytes at any address.
    pub fn read_bytes(&self, at: u64, len: u64) -> Option<Vec<u8>> {
        let sector = u64::from(self.inner.properties().sector_bytes);
        let skip = at.checked_rem(sector)?;
        let whole = skip.checked_add(len)?.next_multiple_of(sector);
        let extent = Extent::new(at.checked_sub(skip)?, whole);
        if extent.start_bytes.checked_add(whole)? > self.inner.properties().len_bytes {
            return None;
        }
        let into = PrivateBuffer::new_uninitialized(to_usize_saturating(whole)).into();
        let block = Disk::read_now(self, extent, into).ok()?;
        let (skip, len) = (to_usize_saturating(skip), to_usize_saturating(len));
        Some(block.into_private().get(skip..skip.checked_add(len)?)?.to_vec())
    }
}

impl draconis_device::ForwardingDisk for RepairedDisk {
    type Inner = dyn Disk;

    fn inner_disk(&self) -> &(dyn Disk + 'static) {
        &*self.inner
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        let start = at.start_bytes;
        let end = start.saturating_add(into.len() as u64);
        let patches: Vec<(u64, u8)> =
            self.patches.read().range(start..end).map(|(at, bit)| (*at, *bit)).collect();
        let read = Disk::read(&*self.inner, at, into, urgency);
        if patches.is_empty() {
            return read;
        }
        let gone = || Err(Refused { payload: None, error: draconis_device::Error::ServiceEnded });
        Pending::ready(read.wait().unwrap_or_else(gone).map(|block| {
            let mut bytes = block.into_private();
            for (at, bits) in patches {
                let byte = bytes.get_mut(to_usize_saturating(at.saturating_sub(start)));
                byte.into_iter().for_each(|byte| *byte ^= bits);
            }
            bytes.into()
        }))
    }
}
