//! `draconis grow`

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use draconis_access::resize::{GrowJob, ResizeRequest, ResizeTarget};
use draconis_types::lock::Mutex;

use super::shrink::{parse_length, print_new_size};
use crate::edit;
use crate::image::{self, BackingFiles, WriteArgs};
use crate::progress::{ByteProgress, ProgressMode};

/// Enlarge a volume.
///
/// The volume is checked first, and refused if it is damaged. Files are not moved. Image files are extended. If interrupted, the volume is unchanged or the
/// same command completes the operation.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: WriteArgs,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Image: file, block device or STORE#NAME.
    image: PathBuf,
    /// New size in KiB, or with a suffix K, M, G, T (default: size of IMAGE).
    size: Option<String>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (image, place) = (&arguments.image, &arguments.place.to_location());
    let now = edit::now_or_source_date()?;
    let in_store = image::parse_store_disk(image)?;
    let is_file = in_store.is_none();
    let behind = BackingFiles::open(image, &place.backing)?;
    let base = match in_store {
        Some(name) => {
            let store = image::open_store_disk_exclusive(name, arguments.place.force)?;
            image::confine_to_open_files()?;
            ResizeTarget::InStore(store.open()?)
        }
        None => ResizeTarget::open_exclusive_file(image)?,
    };
    let len_bytes = arguments.size.as_deref().map(parse_length).transpose()?;
    let growing = GrowJob::plan(ResizeRequest { image, place, len_bytes, now }, &base, behind)?;
    if is_file {
        image::confine_to_open_files()?;
    }
    let progress = Mutex::new(ByteProgress::new(arguments.progress, growing.bytes_to_write()));
    let count = |bytes| progress.lock().add(bytes);
    let resized = growing.write(&count)?;
    drop(progress);
    print_new_size(image, &resized);
    Ok(ExitCode::SUCCESS)
}
