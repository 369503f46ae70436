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

use super::image::Image;
use crate::Random;

/// Unit of atomic writes, in bytes.
const SECTOR_BYTES: u64 = 512;
/// Maximum bytes that a power cut can undo; older writes count as completed by the device.
const UNDO_BYTES_MAX: u64 = 256 << 20;

/// Contents that were overwritten by writes that are not durable.
#[derive(Clone, Debug, Default)]
pub(crate) struct Undo {
    writes: VecDeque<Undone>,
    bytes: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Undone {
    pub(crate) ticket: u64,
    pub(crate) at_bytes: u64,
    pub(crate) bytes: Vec<u8>,
}

impl Undo {
    pub(crate) fn push(&mut self, write: Undone) {
        self.bytes += write.bytes.len() as u64;
        self.writes.push_back(write);
        while self.bytes > UNDO_BYTES_MAX {
            self.pop();
        }
    }

    fn pop(&mut self) {
        if let Some(write) = self.writes.pop_front() {
            self.bytes -= write.bytes.len() as u64;
        }
    }

    /// Drops the undo data of groups up to `durable`.
    pub(crate) fn forget(&mut self, durable: u64) {
        while self.writes.front().is_some_and(|write| write.ticket <= durable) {
            self.pop();
        }
    }

    /// Undoes all writes, then redoes some sectors of those that were started.
    pub(crate) fn cut(&mut self, image: &mut Image, started: u64, dice: &mut Random) {
        for write in self.writes.iter_mut().rev() {
            let mut new = vec![0; write.bytes.len()];
            image.read(write.at_bytes, &mut new);
            image.write(write.at_bytes, &write.bytes);
            write.bytes = new;
        }
        for write in self.writes.drain(..).filter(|write| write.ticket <= started) {
            // Whole writes as often as torn ones.
            let (torn, all) = (dice.below(2) == 0, dice.below(2) == 0);
            for (nth, sector) in write.bytes.chunks(SECTOR_BYTES as usize).enumerate() {
                if if torn { dice.below(2) == 0 } else { all } {
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
    fn written(writes: &[(u64, u64, u8)]) -> (Image, Undo) {
        let (mut image, mut undo) = (Image::new(1 << 20), Undo::default());
        for &(ticket, sector, byte) in writes {
            let mut old = vec![0; 512];
            image.read(sector * 512, &mut old);
            undo.push(Undone { ticket, at_bytes: sector * 512, bytes: old });
            image.write(sector * 512, &[byte; 512]);
        }
        (image, undo)
    }

    fn states(writes: &[(u64, u64, u8)], durable: u64, started: u64) -> Vec<[u8; 3]> {
        let mut states: Vec<[u8; 3]> = (0..200)
            .map(|seed| {
                let (mut image, mut undo) = written(writes);
                undo.forget(durable);
                undo.cut(&mut image, started, &mut Random::new(seed));
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
    fn any_of_what_is_not_durable_may_be_there() {
        let writes = [(1, 0, 1), (2, 0, 2), (2, 1, 2), (3, 2, 3)];
        // The first is durable, the third was not started.
        let expected = [[1, 0, 0], [1, 2, 0], [2, 0, 0], [2, 2, 0]];
        assert_eq!(states(&writes, 1, 2), expected);
        assert_eq!(states(&writes, 3, 3), [[2, 2, 3]]);
        assert_eq!(states(&writes, 0, 0), [[0, 0, 0]]);
        assert_eq!(states(&writes, 0, 3).len(), 12);
    }
}
