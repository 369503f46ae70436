//! Power cuts during the creation of a store: over noise, and over an older store.
//!
//! The result is no store, the new store, empty, or the older one, unchanged. A store can be
//! created there again.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use crate::{CrashOptions, CrashStates, RecordDisk};
use draconis_device::{Disk, MemoryDisk};

use super::stores::{SMALL_CACHE_OPTIONS, read_disk_bytes};
use super::{Contents, RunTally, Script, StoreShape, TestSettings, Violation, record_script};
use draconis_objects::{CreateOptions, Error, Store};

impl std::fmt::Debug for PriorContents<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Noise => f.write_str("noise"),
            Self::Store(shape, _) => shape.fmt(f),
        }
    }
}

/// Contents of the disk before the creation.
#[derive(Clone, Copy)]
enum PriorContents<'a> {
    /// Random bytes.
    Noise,
    /// The store that a script left, of this shape, on a disk of the same length. It may have the
    /// id of the new one.
    Store(StoreShape, &'a Script),
}

/// Creates a store of each of [`StoreShape::ALL`] over noise, over an older one like it, and over one
/// with other pages. Returns the sum of the tallies.
///
/// # Errors
/// The first violation.
pub fn create_over_old_contents(seed: u64, settings: TestSettings) -> Result<RunTally, Violation> {
    let mut all = RunTally::default();
    for shape in StoreShape::ALL {
        let shape = StoreShape { disk_bytes: 2 << 20, ..shape };
        let larger = StoreShape { page_bytes: 8192, segment_bytes: 32 << 10, ..shape };
        let script = super::random(seed, shape, 40);
        let older = PriorContents::Store(shape, &script);
        // Two stores of one id differ by their incarnations, as long as their first writes are the
        // same.
        for (before, is_namesake) in [
            (PriorContents::Noise, false),
            (older, false),
            (older, true),
            (PriorContents::Store(larger, &script), false),
        ] {
            let options = CrashOptions { seed, subsets: 60, exhaustive_sectors: 12 };
            let made = create_with_power_cuts(shape, before, is_namesake, options, settings);
            all += made.map_err(|Violation(why)| {
                Violation(format!("{shape:?} over {before:?}, {is_namesake}: {why}"))
            })?;
        }
    }
    Ok(all)
}

/// Creates a store, and judges states that power cuts during the creation leave.
///
/// # Errors
/// The first violation.
fn create_with_power_cuts(
    shape: StoreShape,
    before: PriorContents<'_>,
    is_namesake: bool,
    options: CrashOptions,
    settings: TestSettings,
) -> Result<RunTally, Violation> {
    let (mut image, older) = match before {
        PriorContents::Noise => (vec![0xEE; shape.disk_bytes], None),
        PriorContents::Store(shape, script) => {
            let recorded = record_script(shape, script, settings)?;
            (recorded.last_image, Some(recorded.history.current().clone()))
        }
    };
    image.resize(shape.disk_bytes, 0xEE);
    let disk = Arc::new(RecordDisk::new(MemoryDisk::new(image.clone(), 512)));
    let mut how = shape.options();
    how.id ^= u128::from(!is_namesake);
    super::set_thread_settings(TestSettings { fault: settings.fault, ..TestSettings::NORMAL });
    Store::create(disk.clone(), &how)
        .map_err(|error| Violation(format!("making a store: {error}")))?;
    // The creation has returned: from here on the store must be there.
    disk.record_mark(1);
    let store =
        Store::open(Arc::new(MemoryDisk::new(read_disk_bytes(&*disk), 512)), &SMALL_CACHE_OPTIONS);
    check_empty_or_older(&store.map_err(|error| Violation(format!("opening it: {error}")))?, None)?;
    let mut tally = RunTally::default();
    for crash in CrashStates::new(image, disk.take_events(), options) {
        tally.states += 1;
        let is_made = !crash.marks().is_empty();
        let judged = std::panic::catch_unwind(AssertUnwindSafe(|| {
            judge_creation_state(crash.disk.clone(), &how, older.as_ref(), is_made)
        }));
        let judged = judged.unwrap_or_else(|panic| Err(Violation::from_panic("judging", &*panic)));
        judged.map_err(|Violation(why)| {
            Violation(format!("making, state {} ({:?}): {why}", tally.states, crash.kind))
        })?;
    }
    Ok(tally)
}

fn judge_creation_state(
    disk: Arc<dyn Disk>,
    how: &CreateOptions,
    older: Option<&Contents>,
    is_made: bool,
) -> Result<(), Violation> {
    match Store::open(disk.clone(), &SMALL_CACHE_OPTIONS) {
        // The last of its writes need not be durable when the first superblock is.
        Err(Error::NotAStore(_)) if !is_made => {}
        Err(error) => return Err(Violation(format!("open says {error}"))),
        Ok(store) => check_empty_or_older(&store, older.filter(|_| !is_made))?,
    }
    Store::create(disk.clone(), how)
        .map_err(|error| Violation(format!("making it again: {error}")))?;
    let store = Store::open(disk, &SMALL_CACHE_OPTIONS)
        .map_err(|error| Violation(format!("opening what was made again: {error}")))?;
    check_empty_or_older(&store, None)
}

/// Checks that a store is empty, or has the contents of the older one.
fn check_empty_or_older(store: &Arc<Store>, older: Option<&Contents>) -> Result<(), Violation> {
    let seen = Contents::read(store).map_err(|error| Violation(format!("read: {error}")))?;
    let is = |other: &Contents| seen.objects == other.objects && seen.keys == other.keys;
    let empty = Contents::default();
    if is(&empty) || older.is_some_and(is) {
        return Ok(());
    }
    Err(Violation(match older {
        None => format!("a new store is not empty: {}", seen.describe_difference(&empty)),
        Some(older) => format!("neither new nor as it was: {}", seen.describe_difference(older)),
    }))
}
