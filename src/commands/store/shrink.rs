//! `draconis store shrink`

use std::path::PathBuf;

use anyhow::{Context, anyhow};
use clap::Args;
use draconis_objects::Store;
use draconis_types::path_bytes::ShowPath;

use super::open::{
    StoreWriteArgs, no_store_message, open_store_disk, refuse_raid_member, store_len, with_context,
};
use crate::bucket;
use crate::image;
use crate::report;
use crate::text::{self, parse_size};

/// Shrink a store.
///
/// Moves data beyond the new end, then truncates the file. On a block device the rest becomes
/// unused.
#[derive(Debug, Args)]
pub struct Arguments {
    /// How the store is written.
    #[command(flatten)]
    write: StoreWriteArgs,
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    device: PathBuf,
    /// New size (suffixes K, M, G, T).
    #[arg(value_parser = parse_size)]
    size: u64,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let (device, wanted) = (&arguments.device, arguments.size);
    let shown = device.shown();
    let is_more = |before: u64| match wanted > before {
        true => Err(anyhow!(
            "{shown} has {}, {} is more; draconis store grow makes it larger",
            text::format_bytes(before),
            text::format_bytes(wanted)
        )),
        false => Ok(()),
    };
    if let Some(address) = bucket::bucket_url(device) {
        let disk = bucket::open_writable(address)?;
        let before = Store::read_profile(&*disk).map_err(|error| with_context(device, error))?.0;
        is_more(before)?;
        Store::resize(disk.clone(), wanted).map_err(|error| with_context(device, error))?;
        disk.resize(wanted).map_err(|error| with_context(device, error.into()))?;
        report::print_line(format_args!(
            "{shown}: {}, was {}",
            text::format_bytes(wanted),
            text::format_bytes(before)
        ))?;
        return Ok(());
    }
    let file = image::open_exclusive(device)?.with_context(|| no_store_message(device))?;
    let disk = open_store_disk(file.try_clone()?, device, false, false)?;
    refuse_raid_member(device, &*disk, arguments.write.force.is_some())?;
    let before = store_len(device, &file)?;
    is_more(before)?;
    let disk = open_store_disk(file.try_clone()?, device, true, true)?;
    Store::resize(disk, wanted).map_err(|error| with_context(device, error))?;
    if file.metadata()?.is_file() {
        file.set_len(wanted).with_context(|| shown.to_string())?;
    }
    report::print_line(format_args!(
        "{shown}: {}, was {}",
        text::format_bytes(wanted),
        text::format_bytes(before)
    ))?;
    Ok(())
}
