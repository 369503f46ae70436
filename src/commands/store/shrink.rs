//! `draconis store shrink`

use std::path::PathBuf;

use anyhow::{Context, anyhow};
use clap::Args;
use draconis_objects::Store;

use super::opened::{disk, length, missing, tell};
use crate::bucket;
use crate::image;
use crate::say;
use crate::text::{self, size};

/// Shrink a store.
///
/// Moves data beyond the new end, then truncates the file. On a block device the rest becomes
/// unused.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    device: PathBuf,
    /// New size (suffixes K, M, G, T).
    #[arg(value_parser = size)]
    size: u64,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let (device, wanted) = (&arguments.device, arguments.size);
    let shown = device.display();
    let is_more = |before: u64| match wanted > before {
        true => Err(anyhow!(
            "{shown} has {}, {} is more; draconis store grow makes it larger",
            text::bytes(before),
            text::bytes(wanted)
        )),
        false => Ok(()),
    };
    if let Some(address) = bucket::address(device) {
        let disk = bucket::writable(address)?;
        let before = Store::measures(&*disk).map_err(|error| tell(device, error))?.0;
        is_more(before)?;
        Store::resize(disk.clone(), wanted).map_err(|error| tell(device, error))?;
        disk.resize(wanted).map_err(|error| tell(device, error.into()))?;
        say::print_line(format_args!(
            "{shown}: {}, was {}",
            text::bytes(wanted),
            text::bytes(before)
        ))?;
        return Ok(());
    }
    let file = image::alone(device)?.with_context(|| missing(device))?;
    let before = length(device, &file)?;
    is_more(before)?;
    let disk = disk(file.try_clone()?, device, true, true)?;
    Store::resize(disk, wanted).map_err(|error| tell(device, error))?;
    if file.metadata()?.is_file() {
        file.set_len(wanted).with_context(|| shown.to_string())?;
    }
    say::print_line(format_args!("{shown}: {}, was {}", text::bytes(wanted), text::bytes(before)))?;
    Ok(())
}
