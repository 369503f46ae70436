//! `draconis shrink`

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use draconis_access::resize::{ResizeOutcome, ResizeRequest, ResizeTarget, ShrinkJob};
use draconis_types::lock::Mutex;
use draconis_types::path_bytes::ShowPath;

use super::format;
use crate::image::{self, BackingFiles, WriteArgs};
use crate::progress::{ByteProgress, ProgressMode};
use crate::{edit, report, text};

/// Shrink a volume.
///
/// The volume is checked first, and refused if it is damaged. Moves data beyond the new end; moved
/// inodes get new numbers. An image file is truncated if
/// nothing follows the volume. If interrupted, the volume is unchanged or the same command
/// completes the operation.
#[derive(Debug, Args)]
#[group(skip)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: WriteArgs,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Shrink to the minimum size (default if SIZE is omitted).
    #[arg(long, conflicts_with = "size")]
    min: bool,
    /// Image: file, block device or STORE#NAME.
    image: PathBuf,
    /// New size in KiB, or with a suffix K, M, G, T.
    size: Option<String>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (image, place) = (&arguments.image, &arguments.place.to_location());
    let now = edit::now_or_source_date()?;
    let size = arguments.size.as_deref().filter(|_| !arguments.min);
    let len_bytes = size.map(parse_length).transpose()?;
    let behind = BackingFiles::open(image, &place.backing)?;
    let base = match image::parse_store_disk(image)? {
        Some(name) => {
            let store = image::open_store_disk_exclusive(name, arguments.place.force)?;
            image::confine_to_open_files()?;
            ResizeTarget::InStore(store.open()?)
        }
        None => ResizeTarget::open_exclusive_file(image)?,
    };
    let wanted = ResizeRequest { image, place, len_bytes, now };
    let shrinking = ShrinkJob::plan(wanted, base, behind, image::confine_resizer)?;
    let progress = Mutex::new(ByteProgress::new(arguments.progress, shrinking.bytes_to_move()));
    let count = |bytes| progress.lock().add(bytes);
    let resized = shrinking.write(&count)?;
    drop(progress);
    print_new_size(image, &resized);
    let len = resized.len_bytes();
    let (shown, size) = (image.shown(), text::format_bytes(len));
    report::print_line(format_args!("{shown}: {size}, {len} bytes"))?;
    Ok(ExitCode::SUCCESS)
}

/// Parses the new length of a volume.
pub fn parse_length(size: &str) -> anyhow::Result<u64> {
    format::parse_mke2fs_size(size, None)
        .with_context(|| format!("{size}: not a size such as 4096, 64K or 1G"))
}

/// Prints the new size of a volume.
pub fn print_new_size(image: &Path, resized: &ResizeOutcome) {
    let (shown, new) = (image.shown(), &resized.superblock);
    if resized.len_bytes() == resized.old_len_bytes {
        log::info!("{shown}: has {} already", text::format_bytes(resized.len_bytes()));
        return;
    }
    log::info!(
        "{shown}: from {} to {}, {} blocks of {} bytes, {} inodes",
        text::format_bytes(resized.old_len_bytes),
        text::format_bytes(resized.len_bytes()),
        new.blocks,
        new.block_bytes,
        new.inodes
    );
}
