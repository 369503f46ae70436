//! `draconis shrink`
//!
//! ```text
//!   image ──alone──▶ confined ──▶ settled ──▶ plan ──▶ written ──▶ file cut
//! ```
//! Law: what is refused is refused before the volume has changed; but for what its journal holds,
//! or an unfinished change, which are put in place first.

use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, anyhow};
use clap::Args;
use draconis_device::{Disk, FileOptions, OpenedFile};
use draconis_ext::shrink::{Error, Shrinking, Target};
use draconis_service::volume::{Part, part_for_writing};

use super::format;
use crate::image::object::InStore;
use crate::image::{self, Behind, Place};
use crate::progress::{Progress, When};
use crate::{change, text};

/// Make a volume smaller.
///
/// Files beyond the new end are moved, and inodes there get other numbers. An image that is a file
/// is cut to the new length, if nothing is behind the volume. If it is cut off, the volume is as
/// it was, or running it again ends it.
#[derive(Debug, Args)]
#[group(skip)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: Place,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    progress: When,
    /// As small as what it holds.
    #[arg(long, required_unless_present = "size", conflicts_with = "size")]
    min: bool,
    /// The file or block device.
    image: PathBuf,
    /// Size of the volume: in KiB, or with K, M, G, T.
    size: Option<String>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let shown = arguments.image.display();
    let now = change::now()?;
    let size = arguments.size.as_ref().map(|text| {
        format::size(text, None)
            .with_context(|| format!("{text}: not a size such as 4096, 64K or 1G"))
    });
    let size = size.transpose()?;
    let behind = Behind::open(&arguments.place.backing)?;
    let (base, disk) = Base::open(arguments)?;
    let part = part_for_writing(disk, &behind.start(), &arguments.place.options());
    let Part { disk, partition, format, .. } = part.with_context(|| shown.to_string())?;
    let is_cut = partition.is_none() && format.is_none() && base.has_any_length();
    let _held = image::settle(&arguments.image, &disk, now)?;
    let plan = Shrinking::plan(&*disk, size).map_err(|error| match error {
        Error::Volume(error) => image::refused(&arguments.image, &*disk, error.into()),
        error => anyhow::Error::from(error).context(shown.to_string()),
    })?;
    if plan.len_bytes() == plan.old_len_bytes() {
        log::info!("{shown}: has {} already", text::bytes(plan.len_bytes()));
        return Ok(ExitCode::SUCCESS);
    }
    let progress = Mutex::new(Progress::new(arguments.progress, plan.bytes_to_move()));
    let count = |bytes| progress.lock().unwrap_or_else(PoisonError::into_inner).add(bytes);
    let target = Target { disk: &*disk, now, progress: &count };
    plan.write(&target).map_err(|error| match error {
        Error::Volume(draconis_ext::Error::Io(_)) => {
            anyhow!("{shown}: {error}; run it again before the volume is used")
        }
        error => anyhow::Error::from(error).context(shown.to_string()),
    })?;
    drop(progress);
    let new = plan.superblock();
    let there = base.len_bytes()?;
    let start = arguments.place.offset.unwrap_or(0);
    let end = start.saturating_add(plan.old_len_bytes());
    let is_last = there < end.saturating_add(new.block_bytes.into());
    if is_cut && is_last {
        let len = start.saturating_add(plan.len_bytes());
        base.set_len(len).with_context(|| format!("{shown}: {}", text::bytes(len)))?;
    }
    log::info!(
        "{shown}: from {} to {}, {} blocks of {} bytes, {} inodes",
        text::bytes(plan.old_len_bytes()),
        text::bytes(plan.len_bytes()),
        new.blocks,
        new.block_bytes,
        new.inodes
    );
    Ok(ExitCode::SUCCESS)
}

/// What the volume lies in.
enum Base {
    File { file: File, is_file: bool },
    InStore(InStore),
}

impl Base {
    /// Opens it, alone, and confines this process before anything in it is looked at.
    fn open(arguments: &Arguments) -> anyhow::Result<(Self, Arc<dyn Disk>)> {
        let shown = arguments.image.display();
        if let Some(name) = image::in_store(&arguments.image)? {
            let store = image::alone_in(name)?;
            image::confine()?;
            let store = store.open()?;
            let disk = store.disk()?;
            return Ok((Self::InStore(store), disk));
        }
        let missing = || format!("{shown}: no such file; draconis format makes a volume");
        let file = image::alone(&arguments.image)?.with_context(missing)?;
        let options = FileOptions { write: true, direct: false, uring: false };
        let opened = OpenedFile::new(file.try_clone()?.into(), options);
        let opened = opened.with_context(|| shown.to_string())?;
        let is_file = file.metadata()?.is_file();
        image::confine_resizer()?;
        Ok((Self::File { file, is_file }, Arc::new(image::started(opened)?)))
    }

    /// Whether it can be cut: a device has the length that it has.
    fn has_any_length(&self) -> bool {
        matches!(self, Self::File { is_file: true, .. } | Self::InStore(_))
    }

    fn len_bytes(&self) -> anyhow::Result<u64> {
        match self {
            Self::File { file, .. } => image::len_bytes(file),
            Self::InStore(store) => store.len_bytes(),
        }
    }

    fn set_len(&self, len_bytes: u64) -> anyhow::Result<()> {
        match self {
            Self::File { file, .. } => Ok(file.set_len(len_bytes)?),
            Self::InStore(store) => store.set_len(len_bytes),
        }
    }
}
