//! Undo of writes that a power cut may lose.
//!
//! ```text
//!   image ── undo, newest first ──▶ durable contents ── redo some sectors ──▶ a state
//! ```
//!
//! The image has every write at once, so that reads see it. The undo list holds the overwritten
//! contents until the write is durable.
//!
//! Law 1: after a cut, a sector has its old contents or those of one later write, never a mixture.
//! Law 2: writes that the device had not started are absent.

use std::collections::VecDeque;

use super::image::SparseImage;
use draconis_device::Random;

/// Unit of atomic writes, in bytes.
const SECTOR_BYTES: u64 = 512;
/// Maximum bytes that a power cut can undo; older writes count as completed by the device.
const MAX_UNDO_BYTES: u64 = 256 << 20;

/// Contents that were overwritten by writes that are not durable.
#[derive(Clone, Debug, Default)]
pub(crate) struct UndoLog {
    writes: VecDeque<UndoRecord>,
    bytes: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct UndoRecord {
    pub(crate) ticket: u64,
    pub(crate) at_bytes: u64,
    pub(crate) bytes: Vec<u8>,
}

impl UndoLog {
    pub(crate) fn push(&mut self, write: UndoRecord) {
        self.bytes += write.bytes.len() as u64;
        self.writes.push_back(write);
        while self.bytes > MAX_UNDO_BYTES {
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        if let Some(write) = self.writes.pop_front() {
            self.bytes -= write.bytes.len() as u64;
        }
    }

    /// Drops the undo data of groups up to `durable`.
    pub(crate) fn drop_durable(&mut self, durable: u64) {
        while self.writes.front().is_some_and(|write| write.ticket <= durable) {
            self.drop_oldest();
        }
    }

    /// Undoes all writes, then redoes some sectors of those that were started.
    pub(crate) fn apply_power_cut(
        &mut self,
        image: &mut SparseImage,
        started: u64,
        dice: &mut Random,
    ) {
        for write in self.writes.iter_mut().rev() {
            let mut new = vec![0; write.bytes.len()];
            image.read(write.at_bytes, &mut new);
            image.write(write.at_bytes, &write.bytes);
            write.bytes = new;
        }
        for write in self.writes.drain(..).filter(|write| write.ticket <= started) {
            // Whole writes as often as torn ones.
            let (torn, all) = (dice.next_below(2) == 0, dice.next_below(2) == 0);
            for (nth, sector) in write.bytes.chunks(SECTOR_BYTES as usize).enumerate() {
                if if torn { dice.next_below(2) == 0 } else { all } {
                    image.write(write.at_bytes + nth as u64 * SECTOR_BYTES, sector);
                }
            }
        }
        self.bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an image and its undo list after writes of one sector each.
    fn image_with_undo(writes: &[(u64, u64, u8)]) -> (SparseImage, UndoLog) {
        let (mut image, mut undo) = (SparseImage::new(1 << 20), UndoLog::default());
        for &(ticket, sector, byte) in writes {
            let mut bytes = vec![0; 512];
            image.read(sector * 512, &mut bytes);
            undo.push(UndoRecord { ticket, at_bytes: sector * 512, bytes });
            image.write(sector * 512, &[byte; 512]);
        }
        (image, undo)
    }

    fn power_cut_states(writes: &[(u64, u64, u8)], durable: u64, started: u64) -> Vec<[u8; 3]> {
        let mut states: Vec<[u8; 3]> = (0..200)
            .map(|seed| {
                let (mut image, mut undo) = image_with_undo(writes);
                undo.drop_durable(durable);
                undo.apply_power_cut(&mut image, started, &mut Random::new(seed));
                let mut bytes = [0; 1536];
                image.read(0, &mut bytes);
                [bytes[0], bytes[512], bytes[1024]]
            })
            .collect();
        states.sort_unstable();
        states.dedup();
        states
    }

    #[test]
    fn power_cut_may_keep_any_undurable_sector() {
        let writes = [(1, 0, 1), (2, 0, 2), (2, 1, 2), (3, 2, 3)];
        // The first is durable, the third was not started.
        let expected = [[1, 0, 0], [1, 2, 0], [2, 0, 0], [2, 2, 0]];
        assert_eq!(power_cut_states(&writes, 1, 2), expected);
        assert_eq!(power_cut_states(&writes, 3, 3), [[2, 2, 3]]);
        assert_eq!(power_cut_states(&writes, 0, 0), [[0, 0, 0]]);
        assert_eq!(power_cut_states(&writes, 0, 3).len(), 12);
    }
}
