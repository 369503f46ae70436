//! Creating a store in a file or on a device: measure the disk, zero-fill the file, format.

use std::fs::File;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, anyhow};
use draconis_container::signature::{EXT_KIND, STORE_KIND};
use draconis_device::{Disk, Extent, Group, Write, write_unit_bytes};
use draconis_objects::probe::{self, ProbeResults};
use draconis_objects::{CreateOptions, Error, LayoutKind, Profile, Store};
use draconis_types::Block;
use draconis_types::path_bytes::ShowPath;
use rustix::io::Errno;

use crate::error::{Error as Failure, store_errno};
use crate::messages::format_bytes;
use crate::overwrite::{OverwriteCheck, OverwritePermission};
use crate::stores::open_store_disk;
use crate::uuid::UuidGenerator;
use crate::{host_file, image};

/// Smallest file in which the disk is measured, in bytes.
const MIN_PROBE_BYTES: u64 = 2 * probe::REGION_BYTES_MIN;
/// Size of one write of zeros, in bytes.
const WRITE_CHUNK_BYTES: usize = 1 << 20;
/// Progress weight of one step of measuring, in bytes.
const PROBE_STEP_BYTES: u64 = 1 << 20;

/// Specification of a new store.
#[derive(Clone, Debug)]
pub struct StoreSpec {
    /// Length of the file; ignored for a device, which has its own.
    pub len_bytes: u64,
    /// Creates the file as one hole instead of writing zeros.
    pub sparse: bool,
    /// Layout and sizes; measured if neither this nor `layout` is given.
    pub profile: Option<Profile>,
    /// Layout to use; without `profile`, with default sizes.
    pub layout: Option<LayoutKind>,
}

/// Result of creating a store.
#[derive(Clone, Debug)]
pub struct CreatedStore {
    /// Layout and sizes.
    pub profile: Profile,
    /// Reasons for the choice of the profile.
    pub why: Vec<String>,
}

/// Steps that take time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CreateStep {
    /// Measuring the disk.
    Measure,
    /// Writing zeros to the file.
    WriteOut,
}

/// Progress callback: step, bytes done, bytes in total.
pub type CreateProgress<'a> = &'a mut dyn FnMut(CreateStep, u64, u64);

/// Refuses to overwrite contents that `force` does not allow. Stores and volumes count as usual.
/// `word` is the option by which the caller allows more.
///
/// # Errors
/// Contents would be lost, or the target cannot be read.
pub fn check_overwrite(
    device: &Path,
    file: &File,
    force: &OverwritePermission,
    option_name: &str,
) -> anyhow::Result<()> {
    let (held, len_bytes) = (image::detect_contents(file)?, host_file::len_bytes(file)?);
    let place = &device.shown();
    let usual = &[EXT_KIND, STORE_KIND];
    Ok(OverwriteCheck { place, len_bytes, contents: held, force, usual, option_name }.check()?)
}

/// Creates a store in an open file or device that is already locked.
///
/// # Errors
/// The disk is full, the profile does not fit, or a system call fails.
pub fn create_in_file(
    device: &Path,
    file: File,
    wanted: &StoreSpec,
    progress: CreateProgress<'_>,
) -> anyhow::Result<CreatedStore> {
    let shown = device.shown();
    let is_file = file.metadata()?.is_file();
    let len = wanted.len_bytes;
    let make_hole = || -> anyhow::Result<()> {
        // Truncated and extended again, the file is one hole.
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
        None if wanted.layout.is_some() || len < MIN_PROBE_BYTES => {
            default_profile(len, wanted.layout)
        }
        None => {
            let measured = probe_disk(device, file.try_clone()?, probe::REGION_BYTES, progress);
            let measured = measured.with_context(|| shown.to_string())?;
            if is_file && wanted.sparse {
                make_hole()?;
            }
            measured.profile(len)
        }
    };
    if is_written_out {
        let disk = open_store_disk(file.try_clone()?, device, true, true)?;
        zero_fill(&*disk, progress).map_err(|error| anyhow!("{shown}: {error}"))?;
    }
    if let Some(layout) = wanted.layout {
        profile.layout = layout;
        why.push(format!("layout {}: --layout says so", profile.layout));
    }
    create_on_disk(device, open_store_disk(file, device, true, true)?, profile)?;
    Ok(CreatedStore { profile, why })
}

/// Creates the store on a disk.
///
/// # Errors
/// The profile does not fit, or the disk fails.
pub fn create_on_disk(
    device: &Path,
    disk: std::sync::Arc<dyn Disk>,
    profile: Profile,
) -> anyhow::Result<()> {
    let shown = device.shown();
    let id = u128::from_le_bytes(UuidGenerator::new(None).uuid());
    Store::create(disk, &CreateOptions { profile, id }).map_err(|error| {
        let text = match &error {
            Error::Misuse(why) => format!("{shown}: {why}; choose a larger --size"),
            error => format!("{shown}: {error}"),
        };
        Failure::new(store_errno(&error), text).into()
    })
}

/// Returns the default profile for a store of `len` bytes, without measuring.
fn default_profile(len: u64, layout: Option<LayoutKind>) -> (Profile, Vec<String>) {
    // The shortest segments that a measurement chooses; see `ProbeResults::profile`.
    let most_bytes = if layout == Some(LayoutKind::Log) { 16 << 20 } else { 4 << 20 };
    let segment_bytes = (1u64 << (len / 128).max(1).ilog2()).clamp(64 << 10, most_bytes) as u32;
    let profile =
        Profile { layout: LayoutKind::Cow, page_bytes: 4096, segment_bytes, queue_depth: 16 };
    let why = match layout {
        Some(_) => "not measured, since the layout is given: default sizes",
        None => "not measured: too small to tell anything of the disk",
    };
    (profile, vec![why.to_owned()])
}

/// Measures the disk below a new file, in the first `wanted` bytes of the file.
///
/// # Errors
/// The disk fails.
pub fn probe_disk(
    device: &Path,
    file: File,
    wanted: u64,
    progress: CreateProgress<'_>,
) -> anyhow::Result<ProbeResults> {
    let told_bytes = write_unit_bytes(&file).unwrap_or(0);
    let disk = open_store_disk(file, device, true, true)?;
    let start = Instant::now();
    let clock = || start.elapsed().as_nanos() as u64;
    let len = disk.properties().len_bytes.min(wanted);
    let measured =
        probe::probe(&*disk, &clock, Extent::new(0, len), told_bytes, &mut |done, all| {
            progress(CreateStep::Measure, done * PROBE_STEP_BYTES, all * PROBE_STEP_BYTES);
        });
    Ok(measured?)
}

/// Preallocates the file where the file system supports it, so that a full disk is reported now.
///
/// # Errors
/// `fallocate` fails.
pub fn preallocate(file: &File, len: u64) -> rustix::io::Result<()> {
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, len) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        done => done,
    }
}

/// Writes zeros to the whole disk, so that later writes change no metadata of the file system
/// below.
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
        // Keeps one write in flight while the next one is prepared.
        if let Some(before) = last.replace(ticket) {
            disk.wait_visible(before)?;
            progress(CreateStep::WriteOut, at - 8 * WRITE_CHUNK_BYTES as u64, len);
        }
    }
    last.map_or(Ok(()), |ticket| disk.wait_durable(ticket))
}
