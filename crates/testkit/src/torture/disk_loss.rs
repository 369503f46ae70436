//! Disks that stop answering and are reopened by another client. Awaited groups survive; others are
//! whole or absent.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use crate::RecordDisk;
use draconis_device::Disk;

use super::judge::{change_and_wait, compare_contents, find_history_prefix};
use super::run::ScriptRunner;
use super::stores::SMALL_CACHE_OPTIONS;
use super::{DamageTally, History, Script, StoreShape, TestSettings, Violation};
use draconis_objects::{Error, OpenOptions, Store};

/// Disks of one run, from the first to the last.
pub trait DiskFactory {
    /// Type of the disks.
    type Disk: Disk + 'static;

    /// Returns the first disk, of the shape's length.
    fn create_disk(&mut self) -> Self::Disk;

    /// Called before the script starts: from now on requests may fail.
    fn begin_faults(&mut self);

    /// Reopens the disk, which may fail once more; none after the last such attempt.
    fn reopen(&mut self) -> Option<Result<Self::Disk, draconis_device::Error>>;

    /// Opens the disk for reading; it does not fail.
    fn open_reader(&mut self) -> Result<Self::Disk, draconis_device::Error>;

    /// Opens the disk for the last time.
    fn open_last(&mut self) -> Result<Self::Disk, draconis_device::Error>;
}

fn violation_while(doing: &'static str) -> impl Fn(Error) -> Violation {
    move |error| Violation(format!("{doing}: {error}"))
}

/// Runs a script until its disk stops, and judges the later openings.
///
/// # Errors
/// The first violation.
pub fn run_until_disk_loss(
    shape: StoreShape,
    script: &Script,
    settings: TestSettings,
    lives: &mut impl DiskFactory,
) -> Result<DamageTally, Violation> {
    let tried = AssertUnwindSafe(|| try_run_until_disk_loss(shape, script, settings, lives));
    std::panic::catch_unwind(tried)
        .unwrap_or_else(|panic| Err(Violation::from_panic("a disk that ends", &*panic)))
}

fn try_run_until_disk_loss(
    shape: StoreShape,
    script: &Script,
    settings: TestSettings,
    lives: &mut impl DiskFactory,
) -> Result<DamageTally, Violation> {
    let mut harm = DamageTally { disks: 1, ..DamageTally::default() };
    let disk = Arc::new(RecordDisk::new(lives.create_disk()));
    let mut actor = ScriptRunner::prepare(shape, script, settings, disk)?;
    lives.begin_faults();
    actor.run_until_failure(&script.steps)?;
    let waited = actor.waited;
    let history = actor.finish();
    // Contents seen once stay: a later opening may have made them durable.
    while let Some(disk) = lives.reopen() {
        harm.disks += 1;
        let opened = disk.map_err(Error::Device);
        match opened.and_then(|disk| Store::open(Arc::new(disk), &SMALL_CACHE_OPTIONS)) {
            Ok(store) => match find_history_prefix(&store, &history, waited) {
                Ok(_) => {}
                Err(Violation(why)) if store.info().incarnation > 0 && is_disk_lost(&store) => {
                    log::debug!("it ended while it was read: {why}");
                }
                Err(violation) => return Err(violation),
            },
            Err(Error::Device(_) | Error::Stopped(_)) => harm.refused += 1,
            Err(error) => return Err(violation_while("opening it again")(error)),
        }
    }
    let disk =
        lives.open_reader().map_err(|error| violation_while("opening it to read")(error.into()))?;
    let options = OpenOptions { read_only: true, ..SMALL_CACHE_OPTIONS };
    let store = Store::open(Arc::new(disk), &options).map_err(violation_while("reading it"))?;
    find_history_prefix(&store, &history, waited)?;
    drop(store);
    let groups = change_and_reopen(lives, &history, waited)?;
    harm.shorter += u64::from(groups < history.group_count());
    Ok(harm)
}

/// Returns true if a store's disk does not answer any more.
fn is_disk_lost(store: &Arc<Store>) -> bool {
    store.list().is_err() || store.checkpoint().is_err()
}

/// Opens the disk for the last time, changes the store, and opens it once more.
fn change_and_reopen(
    lives: &mut impl DiskFactory,
    history: &History,
    waited: usize,
) -> Result<usize, Violation> {
    let mut open = || {
        let disk =
            lives.open_last().map_err(|error| violation_while("opening it")(error.into()))?;
        Store::open(Arc::new(disk), &SMALL_CACHE_OPTIONS).map_err(violation_while("opening it"))
    };
    let store = open()?;
    let groups = find_history_prefix(&store, history, waited)?;
    let expected = change_and_wait(&store, history.contents_after(groups))?;
    drop(store);
    compare_contents(&open()?, &expected)?;
    Ok(groups)
}
