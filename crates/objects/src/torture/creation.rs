//! Power cuts during the creation of a store: over noise, and over an older store.
//!
//! The result is no store, the new store, empty, or the older one, unchanged. A store can be
//! created there again.

use std::sync::Arc;

use draconis_device::{CrashOptions, CrashStates, Disk, MemoryDisk, RecordDisk};

use super::stores::{SMALL, bytes_of};
use super::{Contents, Script, Settings, Shape, Tally, Violation, record};
use crate::{CreateOptions, Error, Store};

impl std::fmt::Debug for Before<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Noise => f.write_str("noise"),
            Self::Store(shape, _) => shape.fmt(f),
        }
    }
}

/// Contents of the disk before the creation.
#[derive(Clone, Copy)]
enum Before<'a> {
    /// Random bytes.
    Noise,
    /// The store that a script left, of this shape, on a disk of the same length. It may have the
    /// id of the new one.
    Store(Shape, &'a Script),
}

/// Creates a store of each of [`Shape::ALL`] over noise, over an older one like it, and over one
/// with other pages. Returns the sum of the tallies.
///
/// # Errors
/// The first violation.
pub fn make_over(seed: u64, settings: Settings) -> Result<Tally, Violation> {
    let mut all = Tally::default();
    for shape in Shape::ALL {
        let shape = Shape { disk_bytes: 2 << 20, ..shape };
        let larger = Shape { page_bytes: 8192, segment_bytes: 32 << 10, ..shape };
        let script = super::random(seed, shape, 40);
        let older = Before::Store(shape, &script);
        // Two stores of one id differ by their incarnations, as long as their first writes are the
        // same.
        for (before, is_namesake) in [
            (Before::Noise, false),
            (older, false),
            (older, true),
            (Before::Store(larger, &script), false),
        ] {
            let options = CrashOptions { seed, subsets: 60, exhaustive_sectors: 12 };
            let made = making(shape, before, is_namesake, options, settings);
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
fn making(
    shape: Shape,
    before: Before<'_>,
    is_namesake: bool,
    options: CrashOptions,
    settings: Settings,
) -> Result<Tally, Violation> {
    let (mut image, older) = match before {
        Before::Noise => (vec![0xEE; shape.disk_bytes], None),
        Before::Store(shape, script) => {
            let recorded = record(shape, script, settings)?;
            (recorded.last_image, Some(recorded.history.last().clone()))
        }
    };
    image.resize(shape.disk_bytes, 0xEE);
    let disk = Arc::new(RecordDisk::new(MemoryDisk::new(image.clone(), 512)));
    let mut how = shape.options();
    how.id ^= u128::from(!is_namesake);
    super::set(Settings { fault: settings.fault, ..Settings::USUAL });
    Store::create(disk.clone(), &how)
        .map_err(|error| Violation(format!("making a store: {error}")))?;
    // The creation has returned: from here on the store must be there.
    disk.mark(1);
    let store = Store::open(Arc::new(MemoryDisk::new(bytes_of(&*disk), 512)), &SMALL);
    shows(&store.map_err(|error| Violation(format!("opening it: {error}")))?, None)?;
    let mut tally = Tally::default();
    for crash in CrashStates::new(image, disk.take(), options) {
        tally.states += 1;
        let is_made = !crash.marks().is_empty();
        let judged =
            std::panic::catch_unwind(|| judge(crash.disk.clone(), &how, older.as_ref(), is_made));
        let judged = judged.unwrap_or_else(|panic| Err(Violation::of_panic("judging", &*panic)));
        judged.map_err(|Violation(why)| {
            Violation(format!("making, state {} ({:?}): {why}", tally.states, crash.kind))
        })?;
    }
    Ok(tally)
}

fn judge(
    disk: Arc<dyn Disk>,
    how: &CreateOptions,
    older: Option<&Contents>,
    is_made: bool,
) -> Result<(), Violation> {
    match Store::open(disk.clone(), &SMALL) {
        // The last of its writes need not be durable when the first superblock is.
        Err(Error::NotAStore(_)) if !is_made => {}
        Err(error) => return Err(Violation(format!("open says {error}"))),
        Ok(store) => shows(&store, older.filter(|_| !is_made))?,
    }
    Store::create(disk.clone(), how)
        .map_err(|error| Violation(format!("making it again: {error}")))?;
    let store = Store::open(disk, &SMALL)
        .map_err(|error| Violation(format!("opening what was made again: {error}")))?;
    shows(&store, None)
}

/// Checks that a store is empty, or has the contents of the older one.
fn shows(store: &Arc<Store>, older: Option<&Contents>) -> Result<(), Violation> {
    let seen = Contents::read(store).map_err(|error| Violation(format!("read: {error}")))?;
    let is = |other: &Contents| seen.objects == other.objects && seen.keys == other.keys;
    let empty = Contents::default();
    if is(&empty) || older.is_some_and(is) {
        return Ok(());
    }
    Err(Violation(match older {
        None => format!("a new store is not empty: {}", seen.differs(&empty)),
        Some(older) => format!("neither new nor as it was: {}", seen.differs(older)),
    }))
}
