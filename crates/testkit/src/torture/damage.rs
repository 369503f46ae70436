//! Disks that lose, misplace, change and refuse writes.
//!
//! Guarantees: no read returns bytes that were not written there; nothing panics or spins. Awaited
//! groups are there, or an open or a read fails. One loss looks like a power cut: that of the last
//! submitted writes, when no later write refers to them.

use std::sync::Arc;

use crate::{Event, Fault, FaultDisk, FaultTarget, RecordDisk};
use draconis_device::{Disk, Extent, MemoryDisk};

use super::partial_contents::PartialContents;
use super::run::ScriptRunner;
use super::stores::SMALL_CACHE_OPTIONS;
use super::{
    Contents, History, Random, RecordedRun, Script, StoreShape, TestSettings, Violation,
    record_script,
};
use draconis_objects::{Error, OpenOptions, Store};

/// A fault of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DiskDamage {
    /// Some bits of one sector flipped.
    Rot,
    /// One write was acknowledged, but not done.
    Lost,
    /// One write went to another address.
    Misdirected,
}

impl DiskDamage {
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
type RecordedWrite<'a> = (u64, &'a [u8]);

/// Runs a script, then damages the resulting disk `rounds` times, each time from the same state.
///
/// # Errors
/// The first violation.
pub fn run_with_damage(
    shape: StoreShape,
    script: &Script,
    rounds: u64,
    settings: TestSettings,
) -> Result<DamageTally, Violation> {
    let recorded = record_script(shape, script, settings)?;
    let mut dice = Random::new(script.seed ^ 0xDA);
    let mut harm = DamageTally::default();
    for round in 0..rounds {
        let kind = DiskDamage::ALL[(round % 3) as usize];
        let what = || format!("damage {round}, {kind:?}");
        let (image, is_certain, place) = damage_disk(shape, &recorded, kind, &mut dice);
        let is_spare = is_certain && place.iter().all(|at| shape.is_superblock(at.start_bytes));
        let least = match (is_certain, is_spare) {
            (_, true) => recorded.history.group_count(),
            (true, _) => count_declared_durable(&recorded.events),
            (false, _) => 0,
        };
        let looked =
            std::panic::catch_unwind(|| check_damaged_disk(image, &recorded.history, least));
        let seen = looked
            .unwrap_or_else(|panic| Err(Violation::from_panic("reading", &*panic)))
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
fn count_declared_durable(events: &[Event]) -> usize {
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
fn damage_disk(
    shape: StoreShape,
    recorded: &RecordedRun,
    kind: DiskDamage,
    dice: &mut Random,
) -> (Vec<u8>, bool, Vec<Extent>) {
    let writes: Vec<RecordedWrite<'_>> = recorded
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
    let mut put = |(at, bytes): RecordedWrite<'_>| {
        image[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    };
    if writes.is_empty() {
        return (image, false, vec![]);
    }
    let mut chosen = dice.next_below(writes.len() as u64) as usize;
    // The last writes are mostly live.
    if dice.once_in(2) {
        chosen = writes.len() - 1 - dice.next_below(16.min(writes.len() as u64)) as usize;
    }
    // Superblocks are small and would be hit rarely.
    if dice.once_in(6)
        && let Some(nth) = writes.iter().rposition(|(at, _)| shape.is_superblock(*at))
    {
        chosen = nth - dice.next_below(4).min(nth as u64) as usize;
    }
    let (at, bytes) = writes[chosen];
    let extent = Extent::new(at, bytes.len() as u64);
    let all_but = |nth: &usize| *nth != chosen;
    match kind {
        DiskDamage::Rot => {
            writes.iter().for_each(|write| put(*write));
            let mut sector = at as usize + 512 * dice.next_below(bytes.len() as u64 / 512) as usize;
            if shape.is_superblock(at) {
                sector = at as usize;
            }
            for _ in 0..1 + dice.next_below(4) {
                image[sector + dice.next_below(512) as usize] ^= 1 << dice.next_below(8);
            }
            (image, true, vec![Extent::new(sector as u64, 512)])
        }
        DiskDamage::Lost => {
            (0..writes.len()).filter(all_but).for_each(|nth| put(writes[nth]));
            (image, true, vec![extent])
        }
        DiskDamage::Misdirected => {
            let pages = (recorded.image.len() - bytes.len()) as u64 / 512;
            // Mostly at an address in use.
            let to = match dice.once_in(3) {
                true => dice.next_below(pages) * 512,
                false => writes[dice.next_below(writes.len() as u64) as usize].0.min(pages * 512),
            };
            for (nth, write) in writes.iter().enumerate() {
                put(if nth == chosen { (to, bytes) } else { *write });
            }
            (image, false, vec![extent, Extent::new(to, extent.len_bytes)])
        }
    }
}

/// Opens and reads a damaged disk.
fn check_damaged_disk(
    image: Vec<u8>,
    history: &History,
    least: usize,
) -> Result<DamageTally, Violation> {
    let mut harm = DamageTally { disks: 1, ..DamageTally::default() };
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(image, 512));
    let store =
        match Store::open(disk.clone(), &OpenOptions { read_only: true, ..SMALL_CACHE_OPTIONS }) {
            Ok(store) => store,
            Err(Error::Corrupt { .. } | Error::NotAStore(_)) => {
                harm.refused += 1;
                return Ok(harm);
            }
            Err(error) => return Err(Violation(format!("open says {error}"))),
        };
    let seen = PartialContents::read(&store, history)?;
    harm.unreadable += u64::from(seen.errors > 0);
    let groups = seen.find_prefix(history, least)?;
    harm.shorter += u64::from(groups < history.group_count() && seen.errors == 0);
    drop(store);
    // A writable opening shows the same, or fails.
    if let Ok(store) = Store::open(disk, &SMALL_CACHE_OPTIONS) {
        PartialContents::read(&store, history)?.find_prefix(history, least)?;
        let _ = store.checkpoint();
        PartialContents::read(&store, history)?.find_prefix(history, least)?;
    }
    Ok(harm)
}

/// Runs a script on a disk that begins to fail at one of its steps, and opens it again when the
/// disk works again.
///
/// # Errors
/// The first violation.
pub fn run_with_failures(
    shape: StoreShape,
    script: &Script,
    seed: u64,
    settings: TestSettings,
) -> Result<DamageTally, Violation> {
    let failed =
        std::panic::AssertUnwindSafe(|| try_run_with_failures(shape, script, seed, settings));
    std::panic::catch_unwind(failed)
        .unwrap_or_else(|panic| Err(Violation::from_panic("failing", &*panic)))
}

fn try_run_with_failures(
    shape: StoreShape,
    script: &Script,
    seed: u64,
    settings: TestSettings,
) -> Result<DamageTally, Violation> {
    let mut dice = Random::new(seed);
    let below = Arc::new(MemoryDisk::new(vec![0xEE; shape.disk_bytes], 512));
    let faults = Arc::new(FaultDisk::new(below.clone()));
    let disk = Arc::new(RecordDisk::new(faults.clone()));
    let mut actor = ScriptRunner::prepare(shape, script, settings, disk)?;
    let at = dice.next_below(script.steps.len() as u64) as usize;
    actor.run_steps(&script.steps[..at])?;
    let request = faults.request_count() + dice.next_below(30);
    let all = Extent::new(0, shape.disk_bytes as u64);
    let kept_writes = dice.next_below(3) as usize;
    let (hits, fault) = match dice.next_below(6) {
        0 => (FaultTarget::Flushes, Fault::Fail),
        1 => (FaultTarget::Request(request), Fault::Fail),
        2 => (FaultTarget::Request(request), Fault::Break { kept_writes }),
        3 => (FaultTarget::Request(request), Fault::PowerCut { kept_writes }),
        4 => (FaultTarget::Reads(all), Fault::Flip { bit: dice.next_below(8) as u8 }),
        _ => (FaultTarget::Reads(all), Fault::Fail),
    };
    faults.add_fault(hits, fault);
    let mut harm = DamageTally { disks: 1, ..DamageTally::default() };
    let ran = actor.run_until_failure(&script.steps[at..]);
    let waited = actor.waited;
    let history = actor.finish();
    let what =
        |Violation(why): Violation| Violation(format!("{hits:?}, {fault:?} from step {at}: {why}"));
    ran.map_err(what)?;
    // The rest, on a disk that works.
    faults.clear_faults();
    let store = Store::open(below, &SMALL_CACHE_OPTIONS)
        .map_err(|error| what(Violation(format!("open: {error}"))))?;
    let seen = Contents::read(&store).map_err(|error| what(Violation(format!("read: {error}"))))?;
    let groups = history.find_prefix(&seen, waited).map_err(|why| what(Violation(why)))?;
    harm.shorter += u64::from(groups < history.group_count());
    Ok(harm)
}
