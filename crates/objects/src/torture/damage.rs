//! Disks that lose, misplace, change and refuse writes.
//!
//! Guarantees: no read returns bytes that were not written there; nothing panics or spins. Awaited
//! groups are there, or an open or a read fails. One loss looks like a power cut: that of the last
//! submitted writes, when no later write refers to them.

use std::sync::Arc;

use draconis_device::{Disk, Event, Extent, Fault, FaultDisk, FaultTarget, MemoryDisk, RecordDisk};

use super::partial_contents::PartialContents;
use super::run::ScriptRunner;
use super::stores::SMALL;
use super::{Contents, History, Random, Recorded, Script, Settings, Shape, Violation, record};
use crate::{Error, OpenOptions, Store};

/// A fault of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Damage {
    /// Some bits of one sector flipped.
    Rot,
    /// One write was acknowledged, but not done.
    Lost,
    /// One write went to another address.
    Misdirected,
}

impl Damage {
    /// All faults.
    pub const ALL: [Self; 3] = [Self::Rot, Self::Lost, Self::Misdirected];
}

/// Results of damage.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DamageTally {
    /// Disks that were damaged.
    pub disks: u64,
    /// Stores that could not be opened.
    pub refused: u64,
    /// Stores with unreadable contents.
    pub unreadable: u64,
    /// Stores that lost the newest groups, as after a power cut.
    pub shorter: u64,
}

impl std::ops::AddAssign for DamageTally {
    fn add_assign(&mut self, other: Self) {
        self.disks += other.disks;
        self.refused += other.refused;
        self.unreadable += other.unreadable;
        self.shorter += other.shorter;
    }
}

/// One write of a run.
type Write<'a> = (u64, &'a [u8]);

/// Runs a script, then damages the resulting disk `rounds` times, each time from the same state.
///
/// # Errors
/// The first violation.
pub fn damage(
    shape: Shape,
    script: &Script,
    rounds: u64,
    settings: Settings,
) -> Result<DamageTally, Violation> {
    let recorded = record(shape, script, settings)?;
    let mut dice = Random::new(script.seed ^ 0xDA);
    let mut harm = DamageTally::default();
    for round in 0..rounds {
        let kind = Damage::ALL[(round % 3) as usize];
        let what = || format!("damage {round}, {kind:?}");
        let (image, is_certain, place) = spoil(shape, &recorded, kind, &mut dice);
        let is_spare = is_certain && place.iter().all(|at| shape.is_superblock(at.start_bytes));
        let least = match (is_certain, is_spare) {
            (_, true) => recorded.history.groups(),
            (true, _) => known(&recorded.events),
            (false, _) => 0,
        };
        let looked = std::panic::catch_unwind(|| look(image, &recorded.history, least));
        let seen = looked
            .unwrap_or_else(|panic| Err(Violation::of_panic("reading", &*panic)))
            .map_err(|Violation(why)| Violation(format!("{} at {place:?}: {why}", what())))?;
        if is_spare && seen.refused + seen.unreadable > 0 {
            return Err(Violation(format!(
                "{} at {place:?}: one superblock is not done without",
                what()
            )));
        }
        harm += seen;
    }
    Ok(harm)
}

/// Returns the number of groups that some later write declares durable.
fn known(events: &[Event]) -> usize {
    let is_write =
        |event: &Event| matches!(event, Event::Group { writes, .. } if !writes.is_empty());
    let last = events.iter().rposition(is_write).unwrap_or(0);
    let mark = |event: &Event| match event {
        Event::Mark(mark) => Some(*mark as usize),
        _ => None,
    };
    events[..last].iter().filter_map(mark).max().unwrap_or(0)
}

/// Returns the disk after the run, damaged; true if the damage certainly differs from a power cut;
/// and the damaged extents.
fn spoil(
    shape: Shape,
    recorded: &Recorded,
    kind: Damage,
    dice: &mut Random,
) -> (Vec<u8>, bool, Vec<Extent>) {
    let writes: Vec<Write<'_>> = recorded
        .events
        .iter()
        .filter_map(|event| match event {
            Event::Group { writes, .. } => Some(writes),
            _ => None,
        })
        .flatten()
        .map(|(at, bytes)| (*at, &bytes[..]))
        .collect();
    let mut image = recorded.image.clone();
    let mut put = |(at, bytes): Write<'_>| {
        image[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    };
    if writes.is_empty() {
        return (image, false, vec![]);
    }
    let mut chosen = dice.below(writes.len() as u64) as usize;
    // The last writes are mostly live.
    if dice.once_in(2) {
        chosen = writes.len() - 1 - dice.below(16.min(writes.len() as u64)) as usize;
    }
    // Superblocks are small and would be hit rarely.
    if dice.once_in(6)
        && let Some(nth) = writes.iter().rposition(|(at, _)| shape.is_superblock(*at))
    {
        chosen = nth - dice.below(4).min(nth as u64) as usize;
    }
    let (at, bytes) = writes[chosen];
    let extent = Extent::new(at, bytes.len() as u64);
    let all_but = |nth: &usize| *nth != chosen;
    match kind {
        Damage::Rot => {
            writes.iter().for_each(|write| put(*write));
            let mut sector = at as usize + 512 * dice.below(bytes.len() as u64 / 512) as usize;
            if shape.is_superblock(at) {
                sector = at as usize;
            }
            for _ in 0..1 + dice.below(4) {
                image[sector + dice.below(512) as usize] ^= 1 << dice.below(8);
            }
            (image, true, vec![Extent::new(sector as u64, 512)])
        }
        Damage::Lost => {
            (0..writes.len()).filter(all_but).for_each(|nth| put(writes[nth]));
            (image, true, vec![extent])
        }
        Damage::Misdirected => {
            let pages = (recorded.image.len() - bytes.len()) as u64 / 512;
            // Mostly at an address in use.
            let to = match dice.once_in(3) {
                true => dice.below(pages) * 512,
                false => writes[dice.below(writes.len() as u64) as usize].0.min(pages * 512),
            };
            for (nth, write) in writes.iter().enumerate() {
                put(if nth == chosen { (to, bytes) } else { *write });
            }
            (image, false, vec![extent, Extent::new(to, extent.len_bytes)])
        }
    }
}

/// Opens and reads a damaged disk.
fn look(image: Vec<u8>, history: &History, least: usize) -> Result<DamageTally, Violation> {
    let mut harm = DamageTally { disks: 1, ..DamageTally::default() };
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(image, 512));
    let store = match Store::open(disk.clone(), &OpenOptions { read_only: true, ..SMALL }) {
        Ok(store) => store,
        Err(Error::Corrupt { .. } | Error::NotAStore(_)) => {
            harm.refused += 1;
            return Ok(harm);
        }
        Err(error) => return Err(Violation(format!("open says {error}"))),
    };
    let seen = PartialContents::read(&store, history)?;
    harm.unreadable += u64::from(seen.errors > 0);
    let groups = seen.find(history, least)?;
    harm.shorter += u64::from(groups < history.groups() && seen.errors == 0);
    drop(store);
    // A writable opening shows the same, or fails.
    if let Ok(store) = Store::open(disk, &SMALL) {
        PartialContents::read(&store, history)?.find(history, least)?;
        let _ = store.checkpoint();
        PartialContents::read(&store, history)?.find(history, least)?;
    }
    Ok(harm)
}

/// Runs a script on a disk that begins to fail at one of its steps, and opens it again when the
/// disk works again.
///
/// # Errors
/// The first violation.
pub fn fail(
    shape: Shape,
    script: &Script,
    seed: u64,
    settings: Settings,
) -> Result<DamageTally, Violation> {
    let failed = std::panic::AssertUnwindSafe(|| try_fail(shape, script, seed, settings));
    std::panic::catch_unwind(failed)
        .unwrap_or_else(|panic| Err(Violation::of_panic("failing", &*panic)))
}

fn try_fail(
    shape: Shape,
    script: &Script,
    seed: u64,
    settings: Settings,
) -> Result<DamageTally, Violation> {
    let mut dice = Random::new(seed);
    let below = Arc::new(MemoryDisk::new(vec![0xEE; shape.disk_bytes], 512));
    let faults = Arc::new(FaultDisk::new(below.clone()));
    let disk = Arc::new(RecordDisk::new(faults.clone()));
    let mut actor = ScriptRunner::begin(shape, script, settings, disk)?;
    let at = dice.below(script.steps.len() as u64) as usize;
    actor.all(&script.steps[..at])?;
    let request = faults.requests() + dice.below(30);
    let all = Extent::new(0, shape.disk_bytes as u64);
    let kept_writes = dice.below(3) as usize;
    let (hits, fault) = match dice.below(6) {
        0 => (FaultTarget::Flushes, Fault::Fail),
        1 => (FaultTarget::Request(request), Fault::Fail),
        2 => (FaultTarget::Request(request), Fault::Break { kept_writes }),
        3 => (FaultTarget::Request(request), Fault::PowerCut { kept_writes }),
        4 => (FaultTarget::Reads(all), Fault::Flip { bit: dice.below(8) as u8 }),
        _ => (FaultTarget::Reads(all), Fault::Fail),
    };
    faults.add(hits, fault);
    let mut harm = DamageTally { disks: 1, ..DamageTally::default() };
    let ran = actor.until_failure(&script.steps[at..]);
    let waited = actor.waited;
    let history = actor.end();
    let what =
        |Violation(why): Violation| Violation(format!("{hits:?}, {fault:?} from step {at}: {why}"));
    ran.map_err(what)?;
    // The rest, on a disk that works.
    faults.heal();
    let store =
        Store::open(below, &SMALL).map_err(|error| what(Violation(format!("open: {error}"))))?;
    let seen = Contents::read(&store).map_err(|error| what(Violation(format!("read: {error}"))))?;
    let groups = history.find(&seen, waited).map_err(|why| what(Violation(why)))?;
    harm.shorter += u64::from(groups < history.groups());
    Ok(harm)
}
