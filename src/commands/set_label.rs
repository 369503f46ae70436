//! `draconis set-label`

use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use draconis_service::volume::part;

use crate::change;
use crate::cli::SetLabel;
use crate::image;

pub fn run(arguments: &SetLabel) -> anyhow::Result<ExitCode> {
    let shown = arguments.image.display();
    let now = change::now()?;
    let opened = image::writable(&arguments.image)?;
    image::confine()?;
    let disk = part(Arc::new(opened.start()), &arguments.place.options());
    let disk = disk.with_context(|| shown.to_string())?;
    draconis_ext::set_label(&*disk, arguments.label.as_bytes(), now)
        .map_err(|error| image::refused(&arguments.image, &*disk, error.into()))?;
    Ok(ExitCode::SUCCESS)
}
