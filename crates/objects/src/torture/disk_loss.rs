//! Disks whose requests end at some moment, and that are opened again from elsewhere: what was
//! waited for is there, what was not is whole or absent.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use draconis_device::{Disk, RecordDisk};

use super::judge::{compare, find, live_on};
use super::run::{SMALL, ScriptRunner};
use super::{DamageTally, History, Script, Settings, Shape, Violation};
use crate::{Error, OpenOptions, Store};

/// The disks of one run, from the first to the last.
pub trait DiskFactory {
    /// What a disk is.
    type Disk: Disk + 'static;

    /// The first, as long as the shape says.
    fn first(&mut self) -> Self::Disk;

    /// All that is done before the script is done: from now on requests may end.
    fn begins(&mut self);

    /// Opens it again, if it can be, while it may end once more; none if it shall not again.
    fn again(&mut self) -> Option<Result<Self::Disk, draconis_device::Error>>;

    /// Opens it to be read only; it does not end.
    fn reader(&mut self) -> Result<Self::Disk, draconis_device::Error>;

    /// Opens it for good.
    fn last(&mut self) -> Result<Self::Disk, draconis_device::Error>;
}

fn said(doing: &'static str) -> impl Fn(Error) -> Violation {
    move |error| Violation(format!("{doing}: {error}"))
}

/// Carries out a script until its disk ends, and judges what later ones show.
///
/// # Errors
/// The first promise that is broken.
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
    // What was seen once stays: a later life may have made it durable.
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

/// Whether a store's disk answers no more.
fn is_over(store: &Arc<Store>) -> bool {
    store.list().is_err() || store.checkpoint().is_err()
}

/// Opens it for good, changes it, and opens it once more.
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
