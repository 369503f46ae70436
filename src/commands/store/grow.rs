//! `draconis store grow`

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use draconis_objects::Store;

use super::opened::{disk, is_dense, length, missing, tell};
use crate::bucket;
use crate::image;
use crate::say;
use crate::text::{self, size};

/// Enlarge a store.
///
/// Nothing is moved. A file is extended; a store on a block device may use all of it.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    device: PathBuf,
    /// New size (suffixes K, M, G, T; default: size of DEVICE).
    #[arg(value_parser = size)]
    size: Option<u64>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let device = &arguments.device;
    let shown = device.display();
    if let Some(address) = bucket::address(device) {
        let wanted = arguments.size.with_context(|| format!("{shown}: SIZE is needed"))?;
        let disk = bucket::writable(address)?;
        let before = Store::measures(&*disk).map_err(|error| tell(device, error))?.0;
        ensure_grows(device, before, wanted)?;
        disk.resize(wanted).map_err(|error| tell(device, error.into()))?;
        Store::resize(disk, wanted).map_err(|error| tell(device, error))?;
        say::print_line(format_args!(
            "{shown}: {}, was {}",
            text::bytes(wanted),
            text::bytes(before)
        ))?;
        return Ok(());
    }
    let file = image::alone(device)?.with_context(|| missing(device))?;
    let there = image::len_bytes(&file)?;
    let is_device = file.metadata()?.file_type().is_block_device();
    let before = length(device, &file)?;
    let wanted = arguments.size.unwrap_or(there);
    ensure_grows(device, before, wanted)?;
    if is_device && wanted > there {
        bail!("{shown} has only {}", text::bytes(there));
    }
    // Asked before it is longer: what comes is a hole.
    let is_written_out = is_dense(&file)?;
    if wanted > there {
        file.set_len(wanted).with_context(|| format!("{shown}: {}", text::bytes(wanted)))?;
        if is_written_out {
            draconis_access::making::reserve(&file, wanted)
                .with_context(|| format!("{shown}: {}", text::bytes(wanted)))?;
        }
    }
    let grown = Store::resize(disk(file.try_clone()?, device, true, true)?, wanted);
    if grown.is_err() && wanted > there {
        let _ = file.set_len(there);
    }
    grown.map_err(|error| tell(device, error))?;
    say::print_line(format_args!("{shown}: {}, was {}", text::bytes(wanted), text::bytes(before)))?;
    Ok(())
}

fn ensure_grows(device: &Path, before: u64, wanted: u64) -> anyhow::Result<()> {
    if wanted >= before {
        return Ok(());
    }
    let shown = device.display();
    bail!(
        "{shown} has {}, {} is less; draconis store shrink makes it smaller",
        text::bytes(before),
        text::bytes(wanted)
    );
}
