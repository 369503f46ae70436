//! `draconis store salvage`

use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::Args;
use draconis_access::making::reserve;
use draconis_access::uuid::Identities;
use draconis_device::Disk;
use draconis_objects::{CreateOptions, OpenOptions, Store};

use super::opened::{close, disk, shared, tell};
use crate::bucket;
use crate::image;
use crate::{say, text};

/// Copy readable data from a damaged store to a new one.
///
/// The new store has the same size and layout. Objects keep their numbers; unreadable ranges become
/// zeros. The old store is not changed.
#[derive(Debug, Args)]
#[command(after_help = "Exit status: 0 complete, 4 data lost, 1 failure.")]
pub struct Arguments {
    /// Damaged store: file or block device.
    old: PathBuf,
    /// New store: a file that does not exist.
    new: PathBuf,
}

/// Something is lost: the status of damage.
const LOST: u8 = 4;

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (old, new) = (&arguments.old, &arguments.new);
    let shown = new.display();
    let damaged = shared(old, true)?;
    let (len, profile) = Store::measures(&*damaged).map_err(|error| tell(old, error))?;
    let id = u128::from_le_bytes(Identities::new(None).uuid());
    let begin = |into: Arc<dyn Disk>| {
        Store::create(into.clone(), &CreateOptions { profile, id })
            .and_then(|()| Store::open(into, &OpenOptions::default()))
            .map_err(|error| tell(new, error))
    };
    if let Some(address) = bucket::address(new) {
        let store = begin(bucket::made(address, len, false)?)?;
        return bring(arguments, &store, damaged);
    }
    let file = match File::options().read(true).write(true).create_new(true).open(new) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            bail!("{shown} exists; salvage makes a new store")
        }
        opened => opened.with_context(|| shown.to_string())?,
    };
    image::claim_alone(&file, new)?;
    let made = || -> anyhow::Result<_> {
        file.set_len(len).with_context(|| format!("{shown}: {}", text::bytes(len)))?;
        reserve(&file, len).with_context(|| format!("{shown}: {}", text::bytes(len)))?;
        let into = disk(file.try_clone()?, new, true, true)?;
        begin(into)
    };
    let store = match made() {
        Ok(store) => store,
        Err(error) => {
            let _ = std::fs::remove_file(new);
            return Err(error);
        }
    };
    bring(arguments, &store, damaged)
}

/// Brings over all that can be read, and says what cannot.
fn bring(arguments: &Arguments, store: &Store, damaged: Arc<dyn Disk>) -> anyhow::Result<ExitCode> {
    let (old, new) = (&arguments.old, &arguments.new);
    let shown = new.display();
    let salvaged = store.salvage(damaged).map_err(|error| tell(old, error))?;
    close(store, new)?;
    for lost in &salvaged.lost {
        say::print_line(format_args!("lost: {lost}"))?;
    }
    if salvaged.more > 0 {
        say::print_line(format_args!("and {} more", salvaged.more))?;
    }
    say::print_line(format_args!(
        "{shown}: {}, {}, {}{}",
        text::counted(salvaged.objects, "object", "objects"),
        text::counted(salvaged.keys, "key", "keys"),
        text::bytes(salvaged.bytes),
        if salvaged.lost.is_empty() { ", all there was" } else { "" }
    ))?;
    Ok(ExitCode::from(if salvaged.lost.is_empty() { 0 } else { LOST }))
}
