//! Making a store in a file or on a device: measured, written out, made.

use std::fs::File;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, anyhow};
use draconis_container::signature::{EXT, STORE};
use draconis_device::{Disk, Extent, Group, Write, write_unit_bytes};
use draconis_exchange::heap::Block;
use draconis_objects::probe::{self, ProbeResults};
use draconis_objects::{CreateOptions, Error, LayoutKind, Profile, Store};
use rustix::io::Errno;

use crate::error::{Error as Failure, store_errno};
use crate::messages::format_bytes;
use crate::overwrite::{Force, Overwriting};
use crate::stores::disk;
use crate::uuid::UuidGenerator;
use crate::{host_file, image};

/// A file shorter than this tells nothing of the disk below, in bytes.
const MIN_PROBE_BYTES: u64 = 2 * probe::REGION_BYTES_MIN;
/// What is written at once, in bytes.
const WRITE_CHUNK_BYTES: usize = 1 << 20;
/// What a step of measuring counts for, in bytes.
const STEP_BYTES: u64 = 1 << 20;

/// A store that is to be.
#[derive(Clone, Debug)]
pub struct StoreSpec {
    /// Its length; that of the device, if it is one.
    pub len_bytes: u64,
    /// Whether a file is left one hole instead of being written out.
    pub sparse: bool,
    /// Layout and sizes; measured if left out.
    pub profile: Option<Profile>,
    /// The layout, whatever was measured.
    pub layout: Option<LayoutKind>,
}

/// A store that was made.
#[derive(Clone, Debug)]
pub struct CreatedStore {
    /// Layout and sizes.
    pub profile: Profile,
    /// Why these.
    pub why: Vec<String>,
}

/// What takes time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Measuring the disk.
    Measure,
    /// Writing the file out.
    WriteOut,
}

/// Hears how far a step is: bytes done, and of how many.
pub type CreateProgress<'a> = &'a mut dyn FnMut(Step, u64, u64);

/// Refuses to make a store where something would be lost that may not be: a store and a volume need
/// no name of their kind. `word` is how the caller says that it may.
///
/// # Errors
/// What would be lost; it cannot be read.
pub fn may_become_store(
    device: &Path,
    file: &File,
    force: &Force,
    word: &str,
) -> anyhow::Result<()> {
    let (held, len_bytes) = (image::detect_contents(file)?, host_file::len_bytes(file)?);
    let place = &device.display();
    let usual = &[EXT, STORE];
    Ok(Overwriting { place, len_bytes, held, force, usual, word }.check()?)
}

/// Makes a store in an open file or device that is claimed.
///
/// # Errors
/// No room, a profile that does not fit, what the system says.
pub fn create_in_file(
    device: &Path,
    file: File,
    wanted: &StoreSpec,
    progress: CreateProgress<'_>,
) -> anyhow::Result<CreatedStore> {
    let shown = device.display();
    let is_file = file.metadata()?.is_file();
    let len = wanted.len_bytes;
    let make_hole = || -> anyhow::Result<()> {
        // Cut off and lengthened it is one hole.
        file.set_len(0)?;
        file.set_len(len).with_context(|| format!("{shown}: {}", format_bytes(len)))
    };
    if is_file {
        make_hole()?;
    }
    let is_written_out = is_file && !wanted.sparse;
    if is_written_out {
        preallocate(&file, len).with_context(|| format!("{shown}: {}", format_bytes(len)))?;
    }
    let (mut profile, mut why) = match wanted.profile {
        Some(profile) => (profile, vec!["as --profile says".to_owned()]),
        None if len < MIN_PROBE_BYTES => default_profile(len),
        None => {
            let measured = measure(device, file.try_clone()?, probe::REGION_BYTES, progress);
            let measured = measured.with_context(|| shown.to_string())?;
            if is_file && wanted.sparse {
                make_hole()?;
            }
            measured.profile(len)
        }
    };
    if is_written_out {
        let disk = disk(file.try_clone()?, device, true, true)?;
        zero_fill(&*disk, progress).map_err(|error| anyhow!("{shown}: {error}"))?;
    }
    if let Some(layout) = wanted.layout {
        profile.layout = layout;
        why.push(format!("layout {}: --layout says so", profile.layout));
    }
    create_on_disk(device, disk(file, device, true, true)?, profile)?;
    Ok(CreatedStore { profile, why })
}

/// Makes the store on a disk.
///
/// # Errors
/// A profile that does not fit, what the disk says.
pub fn create_on_disk(
    device: &Path,
    disk: std::sync::Arc<dyn Disk>,
    profile: Profile,
) -> anyhow::Result<()> {
    let shown = device.display();
    let id = u128::from_le_bytes(UuidGenerator::new(None).uuid());
    Store::create(disk, &CreateOptions { profile, id }).map_err(|error| {
        let text = match &error {
            Error::Misuse(why) => format!("{shown}: {why}; choose a larger --size"),
            error => format!("{shown}: {error}"),
        };
        Failure::new(store_errno(&error), text).into()
    })
}

/// What serves everywhere.
fn default_profile(len: u64) -> (Profile, Vec<String>) {
    let segment_bytes = (1u64 << (len / 128).max(1).ilog2()).clamp(64 << 10, 4 << 20) as u32;
    let profile =
        Profile { layout: LayoutKind::Cow, page_bytes: 4096, segment_bytes, queue_depth: 16 };
    (profile, vec!["not measured: too small to tell anything of the disk".to_owned()])
}

/// Measures the disk below a file of ours, in its first `wanted` bytes.
///
/// # Errors
/// What the disk says.
pub fn measure(
    device: &Path,
    file: File,
    wanted: u64,
    progress: CreateProgress<'_>,
) -> anyhow::Result<ProbeResults> {
    let told_bytes = write_unit_bytes(&file).unwrap_or(0);
    let disk = disk(file, device, true, true)?;
    let start = Instant::now();
    let clock = || start.elapsed().as_nanos() as u64;
    let len = disk.properties().len_bytes.min(wanted);
    let measured =
        probe::probe(&*disk, &clock, Extent::new(0, len), told_bytes, &mut |done, all| {
            progress(Step::Measure, done * STEP_BYTES, all * STEP_BYTES);
        });
    Ok(measured?)
}

/// Takes room for a file where the file system can do that; if there is none, it says so now.
///
/// # Errors
/// What the system says.
pub fn preallocate(file: &File, len: u64) -> rustix::io::Result<()> {
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, len) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        done => done,
    }
}

/// Writes zeros everywhere: what was written once is written again without a change of the
/// file system's.
fn zero_fill(disk: &dyn Disk, progress: CreateProgress<'_>) -> Result<(), draconis_device::Error> {
    let len = disk.properties().len_bytes;
    let (mut at, mut last) = (0, None);
    while at < len {
        let mut writes = vec![];
        while at < len && writes.len() < 8 {
            let bytes = (len - at).min(WRITE_CHUNK_BYTES as u64);
            writes.push(Write { at_bytes: at, block: Block::private(bytes as usize) });
            at += bytes;
        }
        let ticket = disk.submit(Group { writes }, &[]).map_err(|refused| refused.error)?;
        // One is written while the next one is made.
        if let Some(before) = last.replace(ticket) {
            disk.wait_visible(before)?;
            progress(Step::WriteOut, at - 8 * WRITE_CHUNK_BYTES as u64, len);
        }
    }
    last.map_or(Ok(()), |ticket| disk.wait_durable(ticket))
}
