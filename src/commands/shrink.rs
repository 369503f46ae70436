//! `draconis shrink`

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

use anyhow::Context;
use clap::Args;
use draconis_access::resize::{Base, Resized, Shrinking, Wanted};

use super::format;
use crate::image::{self, Behind, Place};
use crate::progress::{Progress, When};
use crate::{change, say, text};

/// Shrink a volume.
///
/// Moves data beyond the new end; moved inodes get new numbers. An image file is truncated if
/// nothing follows the volume. If interrupted, the volume is unchanged or the same command
/// completes the operation.
#[derive(Debug, Args)]
#[group(skip)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: Place,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    progress: When,
    /// Shrink to the minimum size (default if SIZE is omitted).
    #[arg(long, conflicts_with = "size")]
    min: bool,
    /// Image: file, block device or STORE#NAME.
    image: PathBuf,
    /// New size in KiB, or with a suffix K, M, G, T.
    size: Option<String>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (image, place) = (&arguments.image, &arguments.place.by_path());
    let now = change::now()?;
    let size = arguments.size.as_deref().filter(|_| !arguments.min);
    let len_bytes = size.map(length).transpose()?;
    let behind = Behind::open(image, &place.backing)?;
    let base = match image::in_store(image)? {
        Some(name) => {
            let store = image::alone_in(name)?;
            image::confine()?;
            Base::InStore(store.open()?)
        }
        None => Base::file(image)?,
    };
    let wanted = Wanted { image, place, len_bytes, now };
    let shrinking = Shrinking::plan(wanted, base, behind, image::confine_resizer)?;
    let progress = Mutex::new(Progress::new(arguments.progress, shrinking.bytes_to_move()));
    let count = |bytes| progress.lock().unwrap_or_else(PoisonError::into_inner).add(bytes);
    let resized = shrinking.write(&count)?;
    drop(progress);
    report(image, &resized);
    let len = resized.len_bytes();
    let (shown, size) = (image.display(), text::bytes(len));
    say::print_line(format_args!("{shown}: {size}, {len} bytes"))?;
    Ok(ExitCode::SUCCESS)
}

/// The length that a volume is to have.
pub fn length(size: &str) -> anyhow::Result<u64> {
    format::size(size, None).with_context(|| format!("{size}: not a size such as 4096, 64K or 1G"))
}

/// Says what became of a volume.
pub fn report(image: &Path, resized: &Resized) {
    let (shown, new) = (image.display(), &resized.superblock);
    if resized.len_bytes() == resized.old_len_bytes {
        log::info!("{shown}: has {} already", text::bytes(resized.len_bytes()));
        return;
    }
    log::info!(
        "{shown}: from {} to {}, {} blocks of {} bytes, {} inodes",
        text::bytes(resized.old_len_bytes),
        text::bytes(resized.len_bytes()),
        new.blocks,
        new.block_bytes,
        new.inodes
    );
}
