//! `draconis grow`
//!
//! ```text
//!   image ──alone──▶ settled ──▶ plan ──▶ file lengthened ──▶ confined ──▶ written
//! ```
//! Law: what is refused is refused before the image has changed, its length included; but for what
//! its journal holds, or an unfinished change, which are put in place first.

use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use draconis_device::{Disk, FileDisk, FileOptions, OpenedFile};
use draconis_ext::grow::{Error, Growth, Target};
use draconis_service::volume::{Part, part_for_writing};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::format;
use crate::image::object::InStore;
use crate::image::{self, Behind, Place};
use crate::progress::{Progress, When};
use crate::{change, text};

/// Make a volume larger.
///
/// Files stay where they are. An image that is a file is lengthened, with a hole. If it is cut off,
/// the volume is as it was, or running it again ends it.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: Place,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    progress: When,
    /// The file or block device.
    image: PathBuf,
    /// Size of the volume: in KiB, or with K, M, G, T; if left out, all of IMAGE.
    size: Option<String>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let shown = arguments.image.display();
    let now = change::now()?;
    let base = Base::open(arguments)?;
    let given = arguments.size.as_ref().map(|text| {
        format::size(text, None)
            .with_context(|| format!("{text}: not a size such as 4096, 64K or 1G"))
    });
    let given = given.transpose()?;
    let behind = Behind::open(&arguments.place.backing)?.start();
    let Part { disk, format, .. } = base.part(arguments, &behind)?;
    let _held = image::settle(&arguments.image, &disk, now)?;
    let there_bytes = disk.properties().len_bytes;
    let size = given.unwrap_or(there_bytes);
    let growth = Growth::plan(&*disk, size).map_err(|error| match error {
        Error::Volume(error) => image::refused(&arguments.image, &*disk, error.into()),
        error => tell(arguments, error),
    })?;
    if growth.len_bytes() == growth.old_len_bytes() {
        log::info!("{shown}: has {} already", text::bytes(growth.len_bytes()));
        return Ok(ExitCode::SUCCESS);
    }
    let (disk, zeroed_from_bytes) = match format {
        // The disk inside has a length of its own, which writing compares.
        Some(_) => (disk, u64::MAX),
        None => {
            drop(disk);
            let zeroed_from_bytes = base.lengthen(arguments, there_bytes, &growth)?;
            (base.part(arguments, &behind)?.disk, zeroed_from_bytes)
        }
    };
    if matches!(base, Base::File(_)) {
        image::confine()?;
    }
    let total = growth.bytes_to_write(zeroed_from_bytes);
    let progress = Mutex::new(Progress::new(arguments.progress, total));
    let count = |bytes| progress.lock().unwrap_or_else(PoisonError::into_inner).add(bytes);
    let target = Target { disk: &*disk, zeroed_from_bytes, now, progress: &count };
    growth.write(&target).map_err(|error| tell(arguments, error))?;
    drop(progress);
    let (old, new) = (growth.old_len_bytes(), growth.superblock());
    log::info!(
        "{shown}: from {} to {}, {} blocks of {} bytes, {} inodes",
        text::bytes(old),
        text::bytes(growth.len_bytes()),
        new.blocks,
        new.block_bytes,
        new.inodes
    );
    Ok(ExitCode::SUCCESS)
}

/// What the volume lies in.
enum Base {
    File(File),
    InStore(InStore),
}

impl Base {
    /// Opens it, alone. Who looks at a store is confined before that.
    fn open(arguments: &Arguments) -> anyhow::Result<Self> {
        let shown = arguments.image.display();
        if let Some(name) = image::in_store(&arguments.image)? {
            let store = image::alone_in(name)?;
            image::confine()?;
            return store.open().map(Self::InStore);
        }
        let missing = || format!("{shown}: no such file; draconis format makes a volume");
        image::alone(&arguments.image)?.with_context(missing).map(Self::File)
    }

    /// The part that the volume is, as long as it is now.
    fn part(&self, arguments: &Arguments, behind: &[Arc<dyn Disk>]) -> anyhow::Result<Part> {
        let whole: Arc<dyn Disk> = match self {
            Self::File(file) => Arc::new(disk(arguments, file)?),
            Self::InStore(store) => store.disk()?,
        };
        let part = part_for_writing(whole, behind, &arguments.place.options());
        part.with_context(|| arguments.image.display().to_string())
    }

    /// Gives it the length that the volume will have; the first byte of the part from which on
    /// it reads as zeros.
    fn lengthen(
        &self,
        arguments: &Arguments,
        there_bytes: u64,
        growth: &Growth,
    ) -> anyhow::Result<u64> {
        let store = match self {
            Self::File(file) => return lengthen(arguments, file, there_bytes, growth),
            Self::InStore(store) => store,
        };
        let (there, start) = (store.len_bytes()?, arguments.place.offset.unwrap_or(0));
        if start.saturating_add(there_bytes) < there - there % 512 {
            return Ok(u64::MAX);
        }
        let end = start.saturating_add(growth.len_bytes());
        if end > there {
            store.set_len(end)?;
        }
        Ok(there.saturating_sub(start))
    }
}

/// The file as a disk.
fn disk(arguments: &Arguments, file: &File) -> anyhow::Result<FileDisk> {
    let shown = arguments.image.display();
    let options = FileOptions { write: true, direct: false, uring: false };
    let opened = OpenedFile::new(file.try_clone()?.into(), options);
    opened.and_then(image::started).with_context(|| shown.to_string())
}

/// Makes the file long enough; says from where on the volume reads as zeros.
fn lengthen(
    arguments: &Arguments,
    file: &File,
    there_bytes: u64,
    growth: &Growth,
) -> anyhow::Result<u64> {
    let shown = arguments.image.display();
    let there = image::len_bytes(file)?;
    let start = arguments.place.offset.unwrap_or(0);
    let end = start.saturating_add(growth.len_bytes());
    if start.saturating_add(there_bytes) < there - there % 512 {
        // Something follows it: it has the length that a table gives it, which writing compares.
        return Ok(u64::MAX);
    }
    if file.metadata()?.file_type().is_block_device() {
        if end > there {
            bail!("{shown} has only {}", text::bytes(there));
        }
        return Ok(u64::MAX);
    }
    let old_end = start.saturating_add(growth.old_len_bytes());
    let zeroed = match rustix::fs::seek(file, SeekFrom::Data(old_end)) {
        Err(Errno::NXIO) => old_end,
        _ => there,
    };
    if end > there {
        file.set_len(end).with_context(|| format!("{shown}: {}", text::bytes(end)))?;
    }
    Ok(zeroed.saturating_sub(start))
}

fn tell(arguments: &Arguments, error: Error) -> anyhow::Error {
    let shown = arguments.image.display();
    let step = match &error {
        Error::ShortDisk { .. } => "give the partition or the device more room first",
        Error::Volume(draconis_ext::Error::Io(_)) => "run it again before the volume is used",
        _ => return anyhow::Error::from(error).context(shown.to_string()),
    };
    anyhow!("{shown}: {error}; {step}")
}
