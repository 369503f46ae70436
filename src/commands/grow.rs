//! `draconis grow`

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

use clap::Args;
use draconis_access::resize::{Base, Growing, Wanted};

use super::shrink::{length, report};
use crate::change;
use crate::image::{self, Behind, Place};
use crate::progress::{Progress, When};

/// Enlarge a volume.
///
/// Files are not moved. Image files are extended. If interrupted, the volume is unchanged or the
/// same command completes the operation.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: Place,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    progress: When,
    /// Image: file, block device or STORE#NAME.
    image: PathBuf,
    /// New size in KiB, or with a suffix K, M, G, T (default: size of IMAGE).
    size: Option<String>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (image, place) = (&arguments.image, &arguments.place.by_path());
    let now = change::now()?;
    let in_store = image::in_store(image)?;
    let is_file = in_store.is_none();
    let behind = Behind::open(image, &place.backing)?;
    let base = match in_store {
        Some(name) => {
            let store = image::alone_in(name)?;
            image::confine()?;
            Base::InStore(store.open()?)
        }
        None => Base::file(image)?,
    };
    let len_bytes = arguments.size.as_deref().map(length).transpose()?;
    let growing = Growing::plan(Wanted { image, place, len_bytes, now }, &base, behind)?;
    if is_file {
        image::confine()?;
    }
    let progress = Mutex::new(Progress::new(arguments.progress, growing.bytes_to_write()));
    let count = |bytes| progress.lock().unwrap_or_else(PoisonError::into_inner).add(bytes);
    let resized = growing.write(&count)?;
    drop(progress);
    report(image, &resized);
    Ok(ExitCode::SUCCESS)
}
