//! `draconis store shrink`

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use draconis_objects::Store;

use super::opened::{disk, length, missing, tell};
use crate::image;
use crate::text::{self, size};

/// Make a store smaller.
///
/// What lies behind the new end is moved; then a file is cut off. Of a block device the rest is
/// free for others.
#[derive(Debug, Args)]
pub struct Arguments {
    /// The file or block device.
    device: PathBuf,
    /// The new length (K, M, G, T allowed).
    #[arg(value_parser = size)]
    size: u64,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let (device, wanted) = (&arguments.device, arguments.size);
    let shown = device.display();
    let file = image::alone(device)?.with_context(|| missing(device))?;
    let before = length(device, &file)?;
    if wanted > before {
        bail!(
            "{shown} has {}, {} is more; draconis store grow makes it larger",
            text::bytes(before),
            text::bytes(wanted)
        );
    }
    let disk = disk(file.try_clone()?, device, true, true)?;
    Store::resize(disk, wanted).map_err(|error| tell(device, error))?;
    if file.metadata()?.is_file() {
        file.set_len(wanted).with_context(|| shown.to_string())?;
    }
    println!("{shown}: {}, was {}", text::bytes(wanted), text::bytes(before));
    Ok(())
}
