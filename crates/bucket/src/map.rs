//! Map of sectors to objects.
//!
//! Law 1: later writes win.
//! Law 2: an object without live sectors is reported, once.

use std::collections::{BTreeMap, HashMap};

use crate::name::{ObjectNumber, SectorRun};

/// A run of sectors of one object, keyed by its first sector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MappedRun {
    pub count: u64,
    pub object: ObjectNumber,
    /// First sector in the object.
    pub from: u64,
}

#[derive(Debug, Default)]
pub(crate) struct SectorMap {
    pieces: BTreeMap<u64, MappedRun>,
    /// Number of live sectors of each object.
    alive: HashMap<ObjectNumber, u64>,
}

impl SectorMap {
    /// Maps sectors to an object, from its sector `from` on. Objects without live sectors are added
    /// to `dead`.
    pub fn set(
        &mut self,
        run: SectorRun,
        object: ObjectNumber,
        from: u64,
        dead: &mut Vec<ObjectNumber>,
    ) {
        // Counted first: the replaced run may be of the same object.
        *self.alive.entry(object).or_default() += run.count;
        self.clear(run, dead);
        self.pieces.insert(run.sector, MappedRun { count: run.count, object, from });
    }

    /// Unmaps sectors.
    pub fn clear(&mut self, run: SectorRun, dead: &mut Vec<ObjectNumber>) {
        let end = run.sector.saturating_add(run.count);
        let before = self.pieces.range(..run.sector).next_back();
        if let Some((&start, &piece)) = before
            && start + piece.count > run.sector
        {
            self.pieces.insert(start, MappedRun { count: run.sector - start, ..piece });
            let skipped = run.sector - start;
            let rest =
                MappedRun { count: piece.count - skipped, from: piece.from + skipped, ..piece };
            self.pieces.insert(run.sector, rest);
        }
        let within: Vec<u64> =
            self.pieces.range(run.sector..end).map(|(&start, _)| start).collect();
        for start in within {
            let Some(piece) = self.pieces.remove(&start) else { continue };
            let covered = piece.count.min(end - start);
            if covered < piece.count {
                let rest =
                    MappedRun { count: piece.count - covered, from: piece.from + covered, ..piece };
                self.pieces.insert(end, rest);
            }
            if let Some(alive) = self.alive.get_mut(&piece.object) {
                *alive = alive.saturating_sub(covered);
                if *alive == 0 {
                    self.alive.remove(&piece.object);
                    dead.push(piece.object);
                }
            }
        }
    }

    /// Returns the mapped runs within these sectors, trimmed to them, in order; gaps are unmapped.
    pub fn runs_within(&self, run: SectorRun) -> Vec<(u64, MappedRun)> {
        let end = run.sector.saturating_add(run.count);
        let first = self.pieces.range(..=run.sector).next_back().map_or(run.sector, |it| *it.0);
        let pieces = self.pieces.range(first..end).filter_map(|(&start, piece)| {
            let (from, to) = (start.max(run.sector), (start + piece.count).min(end));
            let cut = MappedRun {
                count: to.checked_sub(from)?,
                from: piece.from + from - start,
                ..*piece
            };
            (cut.count > 0).then_some((from, cut))
        });
        pieces.collect()
    }

    /// Returns the objects with live sectors.
    pub fn live_objects(&self) -> impl Iterator<Item = ObjectNumber> {
        self.alive.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use draconis_device::Random;

    use super::*;

    #[test]
    fn sector_map_matches_array() {
        let mut dice = Random::new(7);
        for _ in 0..200 {
            let (mut map, mut array) = (SectorMap::default(), [None; 64]);
            let mut dead = vec![];
            let mut given = vec![];
            for nth in 0..40 {
                let sector = dice.next_below(60);
                let run = SectorRun { sector, count: 1 + dice.next_below(64 - sector) };
                let object = ObjectNumber { epoch: 1, sequence: nth };
                let from = dice.next_below(9);
                let is_cleared = dice.next_below(5) == 0;
                match is_cleared {
                    true => map.clear(run, &mut dead),
                    false => {
                        given.push(object);
                        map.set(run, object, from, &mut dead);
                    }
                }
                for at in 0..run.count {
                    array[(sector + at) as usize] = (!is_cleared).then_some((object, from + at));
                }
                let mut seen = [None; 64];
                for (start, piece) in map.runs_within(SectorRun { sector: 0, count: 64 }) {
                    for at in 0..piece.count {
                        seen[(start + at) as usize] = Some((piece.object, piece.from + at));
                    }
                }
                assert_eq!(seen, array);
                let part = map.runs_within(SectorRun { sector: 10, count: 5 });
                let sectors: u64 = part.iter().map(|(_, piece)| piece.count).sum();
                let expected = array[10..15].iter().flatten().count() as u64;
                assert_eq!(sectors, expected);
                for object in &given {
                    let is_alive = array.iter().flatten().any(|(it, _)| it == object);
                    assert_eq!(is_alive, map.live_objects().any(|it| it == *object));
                    assert_eq!(!is_alive, dead.contains(object));
                }
            }
            dead.sort();
            assert!(dead.windows(2).all(|two| two[0] != two[1]), "named twice");
        }
    }
}
