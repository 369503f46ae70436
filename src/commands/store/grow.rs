//! `draconis store grow`

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use draconis_objects::Store;
use draconis_types::path_bytes::ShowPath;

use super::open::{
    StoreWriteArgs, has_no_holes, no_store_message, open_store_disk, refuse_raid_member, store_len,
    with_context,
};
use crate::bucket;
use crate::image;
use crate::report;
use crate::text::{self, parse_size};

/// Enlarge a store.
///
/// Nothing is moved. A file is extended; a store on a block device may use all of it.
#[derive(Debug, Args)]
pub struct Arguments {
    /// How the store is written.
    #[command(flatten)]
    write: StoreWriteArgs,
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    device: PathBuf,
    /// New size (suffixes K, M, G, T; default: size of DEVICE).
    #[arg(value_parser = parse_size)]
    size: Option<u64>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let device = &arguments.device;
    let shown = device.shown();
    if let Some(address) = bucket::bucket_url(device) {
        let wanted = arguments.size.with_context(|| format!("{shown}: SIZE is needed"))?;
        let disk = bucket::open_writable(address)?;
        let before = Store::read_profile(&*disk).map_err(|error| with_context(device, error))?.0;
        ensure_grows(device, before, wanted)?;
        disk.resize(wanted).map_err(|error| with_context(device, error.into()))?;
        Store::resize(disk, wanted).map_err(|error| with_context(device, error))?;
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
    let there = image::len_bytes(&file)?;
    let is_device = file.metadata()?.file_type().is_block_device();
    let before = store_len(device, &file)?;
    let wanted = arguments.size.unwrap_or(there);
    ensure_grows(device, before, wanted)?;
    if is_device && wanted > there {
        bail!("{shown} has only {}", text::format_bytes(there));
    }
    // Checked before the file is extended, which adds a hole.
    let is_written_out = has_no_holes(&file)?;
    if wanted > there {
        file.set_len(wanted).with_context(|| format!("{shown}: {}", text::format_bytes(wanted)))?;
        if is_written_out {
            draconis_access::create_store::preallocate(&file, wanted)
                .with_context(|| format!("{shown}: {}", text::format_bytes(wanted)))?;
        }
    }
    let grown = Store::resize(open_store_disk(file.try_clone()?, device, true, true)?, wanted);
    if grown.is_err() && wanted > there {
        let _ = file.set_len(there);
    }
    grown.map_err(|error| with_context(device, error))?;
    report::print_line(format_args!(
        "{shown}: {}, was {}",
        text::format_bytes(wanted),
        text::format_bytes(before)
    ))?;
    Ok(())
}

fn ensure_grows(device: &Path, before: u64, wanted: u64) -> anyhow::Result<()> {
    if wanted >= before {
        return Ok(());
    }
    let shown = device.shown();
    bail!(
        "{shown} has {}, {} is less; draconis store shrink makes it smaller",
        text::format_bytes(before),
        text::format_bytes(wanted)
    );
}
