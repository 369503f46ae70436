//! `draconis set-label`

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use draconis_service::volume::locate_for_writing;
use draconis_types::path_bytes::ShowPath;

use crate::edit;
use crate::image::{self, BackingFiles, WriteArgs};

/// Set the label of a volume.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: WriteArgs,
    /// Image: file, block device or STORE#NAME.
    image: PathBuf,
    /// New label, at most 16 bytes; empty removes the label.
    #[arg(default_value = "")]
    label: OsString,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let shown = arguments.image.shown();
    let now = edit::now_or_source_date()?;
    let opened = image::open_writable(&arguments.image, arguments.place.force)?;
    let behind = BackingFiles::open(&arguments.image, &arguments.place.backing)?;
    image::confine_to_open_files()?;
    let part =
        locate_for_writing(opened.into_disk()?, &behind.start_disks(), &arguments.place.options());
    let disk = part.with_context(|| shown.to_string())?.disk;
    draconis_ext::set_label(&*disk, arguments.label.as_bytes(), now)
        .map_err(|error| image::open_volume_error(&arguments.image, &*disk, error.into()))?;
    Ok(ExitCode::SUCCESS)
}
