//! Disks that stop answering and are reopened by another client. Awaited groups survive; others are
//! whole or absent.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use draconis_device::{Disk, RecordDisk};

use super::judge::{compare, find, live_on};
use super::run::ScriptRunner;
use super::stores::SMALL;
use super::{DamageTally, History, Script, Settings, Shape, Violation};
use crate::{Error, OpenOptions, Store};

/// Disks of one run, from the first to the last.
pub trait DiskFactory {
    /// Type of the disks.
    type Disk: Disk + 'static;

    /// Returns the first disk, of the shape's length.
    fn first(&mut self) -> Self::Disk;

    /// Called before the script starts: from now on requests may fail.
    fn begins(&mut self);

    /// Reopens the disk, which may fail once more; none after the last such attempt.
    fn again(&mut self) -> Option<Result<Self::Disk, draconis_device::Error>>;

    /// Opens the disk for reading; it does not fail.
    fn reader(&mut self) -> Result<Self::Disk, draconis_device::Error>;

    /// Opens the disk for the last time.
    fn last(&mut self) -> Result<Self::Disk, draconis_device::Error>;
}

fn said(doing: &'static str) -> impl Fn(Error) -> Violation {
    move |error| Violation(format!("{doing}: {error}"))
}

/// Runs a script until its disk stops, and judges the later openings.
///
/// # Errors
/// The first violation.
pub fn ended(
    shape: Shape,
    script: &Script,
    settings: Settings,
    lives: &mut impl DiskFactory,
) -> Result<DamageTally, Violation> {
    let tried = AssertUnwindSafe(|| try_ended(shape, script, settings, lives));
    std::panic::catch_unwind(tried)
        .unwrap_or_else(|panic| Err(Violation::of_panic("a disk that ends", &*panic)))
}

fn try_ended(
    shape: Shape,
    script: &Script,
    settings: Settings,
    lives: &mut impl DiskFactory,
) -> Result<DamageTally, Violation> {
    let mut harm = DamageTally { disks: 1, ..DamageTally::default() };
    let disk = Arc::new(RecordDisk::new(lives.first()));
    let mut actor = ScriptRunner::begin(shape, script, settings, disk)?;
    lives.begins();
    actor.until_failure(&script.steps)?;
    let waited = actor.waited;
    let history = actor.end();
    // Contents seen once stay: a later opening may have made them durable.
    while let Some(disk) = lives.again() {
        harm.disks += 1;
        let opened = disk.map_err(Error::Device);
        match opened.and_then(|disk| Store::open(Arc::new(disk), &SMALL)) {
            Ok(store) => match find(&store, &history, waited) {
                Ok(_) => {}
                Err(Violation(why)) if store.info().incarnation > 0 && is_over(&store) => {
                    log::debug!("it ended while it was read: {why}");
                }
                Err(violation) => return Err(violation),
            },
            Err(Error::Device(_) | Error::Stopped(_)) => harm.refused += 1,
            Err(error) => return Err(said("opening it again")(error)),
        }
    }
    let disk = lives.reader().map_err(|error| said("opening it to read")(error.into()))?;
    let options = OpenOptions { read_only: true, ..SMALL };
    let store = Store::open(Arc::new(disk), &options).map_err(said("reading it"))?;
    find(&store, &history, waited)?;
    drop(store);
    let groups = last(lives, &history, waited)?;
    harm.shorter += u64::from(groups < history.groups());
    Ok(harm)
}

/// Returns true if a store's disk does not answer any more.
fn is_over(store: &Arc<Store>) -> bool {
    store.list().is_err() || store.checkpoint().is_err()
}

/// Opens the disk for the last time, changes the store, and opens it once more.
fn last(
    lives: &mut impl DiskFactory,
    history: &History,
    waited: usize,
) -> Result<usize, Violation> {
    let mut open = || {
        let disk = lives.last().map_err(|error| said("opening it")(error.into()))?;
        Store::open(Arc::new(disk), &SMALL).map_err(said("opening it"))
    };
    let store = open()?;
    let groups = find(&store, history, waited)?;
    let expected = live_on(&store, history.after(groups))?;
    drop(store);
    compare(&open()?, &expected)?;
    Ok(groups)
}
