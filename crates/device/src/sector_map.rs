//! Which sectors of a disk can be read: a map in the format of GNU ddrescue, and a disk that heeds
//! and extends it.
//!
//! ```text
//!   0x00000000  0x00100000  +      finished      0x.. 0x..  ?   not tried
//!   0x00100000  0x00000200  -      bad sector    0x.. 0x..  * / failed in a larger read
//! ```
//! (ddrescue's manual, "Mapfile structure".)
//!
//! Law 1: of a copy that ddrescue made, only what is finished is read: the rest was never copied.
//! Of the disk itself, all but bad sectors is.
//! Law 2: of the disk itself, no sector is read again that failed alone, and a larger read that
//! failed is repeated sector by sector.
//! Law 3: a map has at most [`MAX_AREAS`] areas, for any file and any disk.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

use draconis_types::Block;
use draconis_types::lock::Mutex;
use rustix::io::Errno;

use crate::{Disk, Error, Extent, Pending, ReadAnswer, Refused, Urgency};

/// Maximum number of areas; further reads are not remembered.
pub const MAX_AREAS: usize = 1 << 20;

/// State of an area.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AreaState {
    /// Not read yet: `?`.
    Untried,
    /// Failed in a larger read: `*` or `/`.
    Failed,
    /// Cannot be read: `-`.
    Bad,
    /// Read: `+`.
    Finished,
}

impl AreaState {
    const fn letter(self) -> char {
        match self {
            Self::Untried => '?',
            Self::Failed => '/',
            Self::Bad => '-',
            Self::Finished => '+',
        }
    }

    const fn parse(text: &str) -> Option<Self> {
        Some(match text.as_bytes() {
            b"?" => Self::Untried,
            b"*" | b"/" => Self::Failed,
            b"-" => Self::Bad,
            b"+" => Self::Finished,
            _ => return None,
        })
    }
}

/// Areas of a disk by their state; what is not in it was not tried.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SectorMap {
    /// End and state of each area, by its start. Neighbours differ in state.
    areas: BTreeMap<u64, (u64, AreaState)>,
}

impl SectorMap {
    /// Parses a map file.
    ///
    /// # Errors
    /// Number and problem of the first line that is not part of a map.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut map = Self::default();
        let lines = text.lines().enumerate().map(|(nth, line)| (nth + 1, line.trim()));
        let mut lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        // The first line tells where ddrescue was.
        let Some(_) = lines.next() else { return Err("it has no status line".to_owned()) };
        let mut end = 0;
        for (nth, line) in lines {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            let [start, len, state] = fields[..] else {
                return Err(format!("line {nth}: not a start, a size and a state"));
            };
            let number = |text: &str| match text.strip_prefix("0x") {
                Some(hex) => u64::from_str_radix(hex, 16).ok(),
                None => text.parse().ok(),
            };
            let state = AreaState::parse(state);
            let (Some(start), Some(len), Some(state)) = (number(start), number(len), state) else {
                return Err(format!("line {nth}: not a start, a size and a state"));
            };
            if start < end {
                return Err(format!("line {nth}: the area begins before the end of the last one"));
            }
            end = start
                .checked_add(len)
                .ok_or_else(|| format!("line {nth}: the area is longer than any disk"))?;
            if map.areas.len() >= MAX_AREAS {
                return Err(format!("line {nth}: more than {MAX_AREAS} areas"));
            }
            map.set(start..end, state);
        }
        Ok(map)
    }

    /// Formats the map of a disk of this length.
    pub fn format(&self, len_bytes: u64) -> String {
        let mut text = "# Mapfile. Made by draconis rescue\n# current_pos  current_status  \
                        current_pass\n0x00000000     ?               1\n#      pos        size  \
                        status\n"
            .to_owned();
        for (area, state) in self.areas_in(0..len_bytes) {
            let len = area.end - area.start;
            let _ = writeln!(text, "0x{:08X}  0x{len:08X}  {}", area.start, state.letter());
        }
        text
    }

    /// Returns the areas of a range in order, without gaps.
    pub fn areas_in(&self, range: Range<u64>) -> Vec<(Range<u64>, AreaState)> {
        let mut found = vec![];
        let mut at = range.start;
        let first = self.areas.range(..=at).next_back().filter(|(_, (end, _))| *end > at);
        let rest = self.areas.range(at.saturating_add(1)..range.end.max(at.saturating_add(1)));
        for (start, (end, state)) in first.into_iter().chain(rest) {
            let (from, to) = ((*start).max(at), (*end).min(range.end));
            if from > at {
                found.push((at..from, AreaState::Untried));
            }
            if to > from {
                found.push((from..to, *state));
            }
            at = to.max(at);
        }
        if at < range.end {
            found.push((at..range.end, AreaState::Untried));
        }
        found
    }

    /// Sets the state of a range.
    pub fn set(&mut self, range: Range<u64>, state: AreaState) {
        if range.is_empty() {
            return;
        }
        let Range { mut start, mut end } = range;
        // Cuts what overlaps, and joins what touches and has the same state.
        let before = self.areas.range(..start).next_back().map(|(from, area)| (*from, *area));
        if let Some((from, (to, old))) = before
            && to >= start
        {
            self.areas.remove(&from);
            match old == state {
                true => start = from,
                false => drop(self.areas.insert(from, (start, old))),
            }
            if to > end {
                match old == state {
                    true => end = to,
                    false => drop(self.areas.insert(end, (to, old))),
                }
            }
        }
        while let Some((from, (to, old))) =
            self.areas.range(start..=end).next().map(|(from, area)| (*from, *area))
        {
            if from == end && old != state {
                break;
            }
            self.areas.remove(&from);
            if old == state {
                end = end.max(to);
            } else if to > end {
                self.areas.insert(end, (to, old));
                break;
            }
        }
        if state != AreaState::Untried {
            self.areas.insert(start, (end, state));
        }
    }
}

/// What a map is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MapOf {
    /// The disk itself: what is read and what fails enters the map.
    Disk,
    /// A copy that ddrescue made. The map does not change.
    Copy,
}

/// How a range may be read.
enum AreaAccess {
    Whole,
    BySectors,
    Refused,
}

/// Longest read of which a part failed before that is repeated, by sectors. Longer ones fail: their
/// callers read less then.
const MAX_SECTORWISE_BYTES: u64 = 64 << 10;

/// A disk that is only read where its map allows it.
pub struct MappedDisk {
    disk: Arc<dyn Disk>,
    of: MapOf,
    map: Mutex<SectorMap>,
}

impl MappedDisk {
    /// Creates the disk.
    pub fn new(disk: Arc<dyn Disk>, map: SectorMap, of: MapOf) -> Self {
        Self { disk, of, map: Mutex::new(map) }
    }

    /// Returns the map file.
    pub fn format_map(&self) -> String {
        self.map.lock().format(self.disk.properties().len_bytes)
    }

    /// Returns the number of bytes in each state: bad or failed, and finished.
    pub fn count_bytes(&self) -> (u64, u64) {
        let (mut bad, mut finished) = (0, 0);
        for (area, state) in self.map.lock().areas_in(0..self.disk.properties().len_bytes) {
            match state {
                AreaState::Bad | AreaState::Failed => bad += area.end - area.start,
                AreaState::Finished => finished += area.end - area.start,
                AreaState::Untried => {}
            }
        }
        (bad, finished)
    }

    /// Returns how a range may be read.
    fn access(&self, at: &Range<u64>) -> AreaAccess {
        let areas = self.map.lock().areas_in(at.clone());
        let has = |wanted: AreaState| areas.iter().any(|(_, state)| *state == wanted);
        match self.of {
            MapOf::Copy if areas.iter().any(|(_, state)| *state != AreaState::Finished) => {
                AreaAccess::Refused
            }
            MapOf::Copy => AreaAccess::Whole,
            MapOf::Disk if has(AreaState::Bad) => AreaAccess::Refused,
            MapOf::Disk if !has(AreaState::Failed) => AreaAccess::Whole,
            MapOf::Disk if at.end - at.start > MAX_SECTORWISE_BYTES => AreaAccess::Refused,
            MapOf::Disk => AreaAccess::BySectors,
        }
    }

    /// Reads a range, of which a part failed in a larger read, sector by sector: each one is read
    /// once, and then known.
    fn read_sectors(&self, at: Extent, mut into: Block) -> ReadAnswer {
        let sector = u64::from(self.disk.properties().sector_bytes.max(512));
        let mut failure = None;
        for start in (0..at.len_bytes).step_by(sector as usize) {
            let len = sector.min(at.len_bytes - start);
            let part = Extent::new(at.start_bytes + start, len);
            match self.read_whole(part, Block::private(len as usize)) {
                Ok(block) => {
                    into.copy_in(start as usize, &block.into_private());
                }
                Err(refused) => failure = failure.or(Some(refused.error)),
            }
        }
        match failure {
            None => Ok(into),
            Some(error) => Err(Refused { payload: Some(into), error }),
        }
    }

    fn read_whole(&self, at: Extent, into: Block) -> ReadAnswer {
        let read = self.disk.read_now(at, into);
        let is_failure = |refused: &Refused<Block>| matches!(refused.error, Error::Io { .. });
        if self.of == MapOf::Disk && read.as_ref().err().is_none_or(is_failure) {
            self.record(at.start_bytes..at.start_bytes + at.len_bytes, read.is_ok());
        }
        read
    }

    fn record(&self, at: Range<u64>, was_read: bool) {
        let is_sector =
            at.end - at.start <= u64::from(self.disk.properties().sector_bytes.max(512));
        let mut map = self.map.lock();
        let state = match (was_read, is_sector) {
            (true, _) => AreaState::Finished,
            (false, true) => AreaState::Bad,
            (false, false) => AreaState::Failed,
        };
        if map.areas.len() >= MAX_AREAS {
            return;
        }
        if state != AreaState::Failed {
            map.set(at, state);
            return;
        }
        // What a smaller read found out stays.
        for (area, old) in map.areas_in(at) {
            if old == AreaState::Untried {
                map.set(area, state);
            }
        }
    }
}

impl crate::ForwardingDisk for MappedDisk {
    type Inner = dyn Disk;

    fn inner_disk(&self) -> &Self::Inner {
        &*self.disk
    }

    fn read(&self, at: Extent, into: Block, _: Urgency) -> Pending<ReadAnswer> {
        let range = at.start_bytes..at.end_bytes().unwrap_or(u64::MAX);
        Pending::ready(match self.access(&range) {
            AreaAccess::Whole => self.read_whole(at, into),
            AreaAccess::BySectors => self.read_sectors(at, into),
            AreaAccess::Refused => {
                let error = Error::Io { what: "read", extent: at, errno: Errno::IO };
                Err(Refused { payload: Some(into), error })
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryDisk;

    const LEN: u64 = 200;

    /// Sets random ranges in a map and in an array of bytes, and compares.
    #[test]
    fn areas_are_those_of_a_map_of_single_bytes() {
        let states = [AreaState::Untried, AreaState::Failed, AreaState::Bad, AreaState::Finished];
        let mut seed = 7u64;
        let mut next = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % below
        };
        for _ in 0..200 {
            let (mut map, mut bytes) = (SectorMap::default(), vec![AreaState::Untried; 200]);
            for _ in 0..30 {
                let start = next(LEN);
                let end = start + next(LEN - start + 1);
                let state = states[next(4) as usize];
                map.set(start..end, state);
                bytes[start as usize..end as usize].fill(state);
                let mut found = vec![];
                let areas = map.areas_in(0..LEN);
                for (area, state) in &areas {
                    assert_eq!(area.start, found.len() as u64);
                    found.resize(area.end as usize, *state);
                }
                assert_eq!(found, bytes);
                assert!(areas.windows(2).all(|pair| pair[0].1 != pair[1].1), "{areas:?}");
                let (from, to) = (next(LEN / 2), LEN / 2 + next(LEN / 2));
                let part: u64 =
                    map.areas_in(from..to).iter().map(|(it, _)| it.end - it.start).sum();
                assert_eq!(part, to - from);
            }
            assert_eq!(SectorMap::parse(&map.format(LEN)).unwrap(), map);
        }
    }

    #[test]
    fn ddrescue_maps_are_parsed_and_others_refused() {
        let text = "# Mapfile. Created by GNU ddrescue version 1.27\n0x00000000     ?   1\n\
                    0x00000000  0x00001000  +\n0x00001000  0x00000200  -\n4608 512 *\n";
        let map = SectorMap::parse(text).unwrap();
        let areas = map.areas_in(0..6000);
        assert_eq!(
            areas,
            [
                (0..4096, AreaState::Finished),
                (4096..4608, AreaState::Bad),
                (4608..5120, AreaState::Failed),
                (5120..6000, AreaState::Untried),
            ]
        );
        for wrong in ["", "# only comments\n", "0 ?\n0 1\n", "0 ?\n0 1 x\n", "0 ?\n5 5 +\n0 6 +\n"]
        {
            assert!(SectorMap::parse(wrong).is_err(), "{wrong:?}");
        }
        let too_long = "0 ?\n0xFFFFFFFFFFFFFFFF 0x2 +\n";
        assert!(SectorMap::parse(too_long).unwrap_err().contains("line 2"));
    }

    #[test]
    fn a_copy_is_read_only_where_it_is_finished() {
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(vec![7; 8192], 512));
        let map = SectorMap::parse("0 ?\n0 4096 +\n4096 512 -\n").unwrap();
        let read = |of: MapOf, start: u64, len: u64| {
            let disk = MappedDisk::new(disk.clone(), map.clone(), of);
            let read = disk.read_now(Extent::new(start, len), Block::private(len as usize));
            (read.is_ok(), disk.count_bytes())
        };
        assert_eq!(read(MapOf::Copy, 0, 4096), (true, (512, 4096)));
        assert_eq!(read(MapOf::Copy, 4608, 512), (false, (512, 4096)));
        assert_eq!(read(MapOf::Disk, 4608, 512), (true, (512, 4608)));
        assert_eq!(read(MapOf::Disk, 4096, 1024), (false, (512, 4096)));
    }

    /// A disk of which a sector fails, and which counts the reads of it.
    struct OneBadSector(MemoryDisk, std::sync::atomic::AtomicU32);

    impl crate::ForwardingDisk for OneBadSector {
        type Inner = MemoryDisk;

        fn inner_disk(&self) -> &MemoryDisk {
            &self.0
        }

        fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
            if at.overlaps(Extent::new(1536, 512)) {
                self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                let error = Error::Io { what: "read", extent: at, errno: Errno::IO };
                return Pending::ready(Err(Refused { payload: Some(into), error }));
            }
            Disk::read(&self.0, at, into, urgency)
        }
    }

    #[test]
    fn a_bad_sector_is_found_once() {
        let bytes = (0..8192u32).map(|nth| (nth / 512) as u8).collect();
        let disk = Arc::new(OneBadSector(MemoryDisk::new(bytes, 512), 0.into()));
        let mapped = MappedDisk::new(disk.clone(), SectorMap::default(), MapOf::Disk);
        let read = |start: u64, len: u64| {
            let read = mapped.read_now(Extent::new(start, len), Block::private(len as usize));
            read.map(|block| block.into_private().to_vec()).ok()
        };
        for _ in 0..2 {
            assert_eq!(read(0, 8192), None);
            assert_eq!(read(1024, 1024), None);
            assert_eq!(read(1536, 512), None);
            assert_eq!(read(2048, 1024).unwrap()[512..], [5; 512]);
            assert_eq!(read(0, 1024).unwrap()[..512], [0; 512]);
        }
        // Once in the large read, once alone.
        assert_eq!(disk.1.load(std::sync::atomic::Ordering::Relaxed), 2);
        let map = mapped.format_map();
        assert!(map.contains("0x00000600  0x00000200  -\n"), "{map}");
        assert_eq!(SectorMap::parse(&map).unwrap(), *mapped.map.lock());
    }
}
