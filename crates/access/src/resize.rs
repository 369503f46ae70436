//! Growing and shrinking a volume together with its file.
//!
//! ```text
//!   Growing:    target ──▶ recovered ──▶ plan ──▶ file extended ──(confined)──▶ written
//!   Shrinking:  target ─(confined)─▶ recovered ─▶ plan ─▶ written ─▶ compacted ─▶ file truncated
//! ```
//! Law: a refusal comes before the volume or its length has changed. The only exception is
//! recovery (journal replay or an unfinished change), which runs first.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use draconis_container::SessionDisk;
use draconis_device::{Disk, FileOptions, OpenedFile};
use draconis_ext::format::superblock::Superblock;
use draconis_ext::grow::{self, GrowPlan, OfflineError};
use draconis_ext::shrink;
use draconis_service::volume::{LocatedVolume, locate_for_writing};
use draconis_types::Time;
use draconis_types::path_bytes::ShowPath;
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::error::{Error as Failure, disk_errno, not_found_error};
use crate::format::FormatProgress;
use crate::host_file;
use crate::image::{self, BackingFiles};
use crate::location::VolumeLocation;
use crate::messages::format_bytes;
use crate::mmp_claim::{self, MmpGuard};
use crate::store_disk::{OpenStoreDisk, StoreDiskName};

/// File, device or store disk of a volume, open and locked.
pub enum ResizeTarget {
    /// A file or block device.
    File(File),
    /// A disk in a store.
    InStore(OpenStoreDisk),
}

impl ResizeTarget {
    /// Opens an existing file or device exclusively.
    ///
    /// # Errors
    /// The file does not exist, or is in use.
    pub fn open_exclusive_file(image: &Path) -> anyhow::Result<Self> {
        let none = || {
            not_found_error(format!(
                "{}: no such file; draconis format makes a volume",
                image.shown()
            ))
        };
        Ok(Self::File(host_file::open_exclusive(image)?.ok_or_else(none)?))
    }

    /// Returns the disk in its current length; it is read only after `confine`.
    fn open_disk(
        &self,
        image: &Path,
        confine: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Arc<dyn Disk>> {
        let file = match self {
            Self::File(file) => file,
            Self::InStore(store) => return store.disk(),
        };
        let options = FileOptions { write: true, direct: false, uring: false };
        let shown = || image.shown().to_string();
        let opened = OpenedFile::new(file.try_clone()?.into(), options).with_context(shown)?;
        confine()?;
        Ok(Arc::new(host_file::start_disk(opened).with_context(shown)?))
    }

    fn len_bytes(&self) -> anyhow::Result<u64> {
        match self {
            Self::File(file) => host_file::len_bytes(file),
            Self::InStore(store) => store.len_bytes(),
        }
    }

    fn set_len(&self, len_bytes: u64) -> anyhow::Result<()> {
        match self {
            Self::File(file) => Ok(file.set_len(len_bytes)?),
            Self::InStore(store) => store.set_len(len_bytes),
        }
    }

    /// Returns the name of a disk in a store.
    fn store_disk(&self) -> Option<StoreDiskName> {
        match self {
            Self::File(_) => None,
            Self::InStore(store) => Some(store.name().clone()),
        }
    }

    /// Returns true for a block device, whose length is fixed.
    fn is_device(&self) -> anyhow::Result<bool> {
        match self {
            Self::File(file) => Ok(file.metadata()?.file_type().is_block_device()),
            Self::InStore(_) => Ok(false),
        }
    }
}

/// Maximum number of passes when shrinking to the minimum; each pass makes the volume smaller.
const MAX_PASSES: u32 = 16;

/// Volume to resize and its new length.
pub struct ResizeRequest<'a> {
    /// Image, for messages.
    pub image: &'a Path,
    /// Location of the volume in the image.
    pub place: &'a VolumeLocation,
    /// New length. If `None`: all available space when growing, the minimum when shrinking.
    pub len_bytes: Option<u64>,
    /// Current time.
    pub now: Time,
}

/// A planned growth of a volume; the file already has its new length.
pub struct GrowJob<'a> {
    wanted: ResizeRequest<'a>,
    disk: Arc<dyn Disk>,
    growth: GrowPlan,
    zeroed_from_bytes: u64,
    store_disk: Option<StoreDiskName>,
    _held: MmpGuard,
}

impl<'a> GrowJob<'a> {
    /// Plans the growth, and extends the file.
    ///
    /// # Errors
    /// The volume cannot become so long, or reading or extending the file fails.
    pub fn plan(
        wanted: ResizeRequest<'a>,
        base: &ResizeTarget,
        behind: BackingFiles,
    ) -> anyhow::Result<Self> {
        let ResizeRequest { image, place, now, .. } = wanted;
        let shown = || image.shown().to_string();
        let behind = behind.start_disks();
        let part = || {
            let part =
                locate_for_writing(base.open_disk(image, || Ok(()))?, &behind, &place.options());
            part.with_context(shown)
        };
        let LocatedVolume { disk, format, .. } = part()?;
        let held = mmp_claim::recover_and_claim(image, &disk, now)?;
        let there_bytes = disk.properties().len_bytes;
        let len_bytes = wanted.len_bytes.unwrap_or(there_bytes);
        let store_disk = base.store_disk();
        let growth = GrowPlan::plan(&disk, len_bytes)
            .map_err(|error| resize_error(image, store_disk.as_ref(), &*disk, error))?;
        let is_nothing = growth.len_bytes() == growth.old_len_bytes();
        let (disk, zeroed_from_bytes) = match format {
            None if !is_nothing => {
                drop(disk);
                let zeroed_from_bytes = extend_file(&wanted, base, there_bytes, &growth)?;
                (part()?.disk, zeroed_from_bytes)
            }
            // A disk image has a fixed virtual size, which writing compares.
            _ => (disk, u64::MAX),
        };
        Ok(Self { wanted, disk, growth, zeroed_from_bytes, store_disk, _held: held })
    }

    /// Returns the bytes that [`GrowJob::write`] writes.
    pub fn bytes_to_write(&self) -> u64 {
        self.growth.bytes_to_write(self.zeroed_from_bytes)
    }

    /// Grows the volume.
    ///
    /// # Errors
    /// The disk fails; the volume is unchanged, or running the command again completes it.
    pub fn write(self, progress: FormatProgress<'_>) -> anyhow::Result<ResizeOutcome> {
        let resized = ResizeOutcome::new(self.growth.old_len_bytes(), self.growth.superblock());
        if self.growth.len_bytes() == resized.old_len_bytes {
            return Ok(resized);
        }
        let (zeroed_from_bytes, now) = (self.zeroed_from_bytes, self.wanted.now);
        let target =
            grow::GrowTarget { disk: &*self.disk, zeroed_from_bytes, now, progress: &progress };
        self.growth
            .write(&target)
            .map_err(|error| with_context(self.wanted.image, self.store_disk.as_ref(), error))?;
        Ok(resized)
    }
}

/// Extends the file for the volume; returns the offset from which the volume reads as zeros.
fn extend_file(
    wanted: &ResizeRequest<'_>,
    base: &ResizeTarget,
    there_bytes: u64,
    growth: &GrowPlan,
) -> anyhow::Result<u64> {
    let shown = wanted.image.shown();
    let there = base.len_bytes()?;
    let start = wanted.place.offset_bytes.unwrap_or(0);
    let end = start.saturating_add(growth.len_bytes());
    if start.saturating_add(there_bytes) < there - there % 512 {
        // Other data follows the volume, so its partition sets the limit, which writing compares.
        return Ok(u64::MAX);
    }
    if base.is_device()? {
        if end > there {
            bail!("{shown} has only {}", format_bytes(there));
        }
        return Ok(u64::MAX);
    }
    let old_end = start.saturating_add(growth.old_len_bytes());
    let zeroed = match base {
        ResizeTarget::File(file)
            if matches!(rustix::fs::seek(file, SeekFrom::Data(old_end)), Err(Errno::NXIO)) =>
        {
            old_end
        }
        _ => there,
    };
    if end > there {
        base.set_len(end).with_context(|| format!("{shown}: {}", format_bytes(end)))?;
    }
    Ok(zeroed.saturating_sub(start))
}

/// A planned shrinking of a volume.
pub struct ShrinkJob<'a> {
    wanted: ResizeRequest<'a>,
    base: ResizeTarget,
    disk: Arc<dyn Disk>,
    plan: shrink::ShrinkPlan,
    /// True if the file is truncated after the volume.
    truncates_file: bool,
    /// Length before an interrupted shrink, which recovery finished, or the current one.
    old_len_bytes: u64,
    /// Disk image to compact after the shrink, and the start of the volume in it.
    image: Option<(Arc<dyn SessionDisk>, u64)>,
    _held: MmpGuard,
}

impl<'a> ShrinkJob<'a> {
    /// Plans the shrinking. A file is read only after `confine`.
    ///
    /// # Errors
    /// The volume cannot become so short, or reading fails.
    pub fn plan(
        wanted: ResizeRequest<'a>,
        base: ResizeTarget,
        behind: BackingFiles,
        confine: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let ResizeRequest { image, place, now, len_bytes } = wanted;
        // Checked before the process is confined.
        let is_device = base.is_device()?;
        let disk = base.open_disk(image, confine)?;
        let part = locate_for_writing(disk, &behind.start_disks(), &place.options());
        let part = part.with_context(|| image.shown().to_string())?;
        let LocatedVolume { disk, start_bytes, partition, format, image: inside, .. } = part;
        let there = base.len_bytes()?;
        let end = place.offset_bytes.unwrap_or(0).saturating_add(disk.properties().len_bytes);
        // Not for disk images: a fixed VHD has its footer after the disk.
        let is_last = partition.is_none() && format.is_none() && end >= there - there % 512;
        let is_cut = is_last && !is_device;
        let is_file = matches!(base, ResizeTarget::File(_)) && !is_device;
        let inside = inside.filter(|_| is_file).map(|inside| (inside, start_bytes));
        let len_before_recovery = shrink::len_bytes_before_recovery(&*disk);
        let held = mmp_claim::recover_and_claim(image, &disk, now)?;
        let plan = shrink::ShrinkPlan::plan(&disk, len_bytes)
            .map_err(|error| resize_error(image, base.store_disk().as_ref(), &*disk, error))?;
        let old_len_bytes = len_before_recovery.max(plan.old_len_bytes());
        let (truncates_file, image) = (is_cut, inside);
        Ok(Self { wanted, base, disk, plan, truncates_file, old_len_bytes, image, _held: held })
    }

    /// Returns the bytes that [`ShrinkJob::write`] moves.
    pub fn bytes_to_move(&self) -> u64 {
        self.plan.bytes_to_move()
    }

    /// Shrinks the volume, and truncates its file after it.
    ///
    /// # Errors
    /// The disk fails; the volume is unchanged, or running the command again completes it.
    pub fn write(mut self, progress: FormatProgress<'_>) -> anyhow::Result<ResizeOutcome> {
        let ResizeRequest { image, place, .. } = self.wanted;
        let old_len_bytes = self.old_len_bytes;
        let resized = self.write_volume(progress)?;
        let is_shorter = resized.len_bytes() < old_len_bytes;
        if let Some((inside, start)) = &self.image {
            let shown = || format!("{}: its file stays as long as it is", image.shown());
            let behind = resized.len_bytes()..old_len_bytes;
            let free = shrink::free_bytes(&*self.disk).with_context(shown)?;
            let at = |range: Range<u64>| start + range.start..start + range.end;
            let unused = free.into_iter().chain([behind]).map(at).collect();
            let needed = inside.compact(unused).with_context(shown)?;
            if let Some(len) = needed.filter(|len| self.base.len_bytes().is_ok_and(|is| is > *len))
            {
                self.base.set_len(len).with_context(shown)?;
            }
        }
        let start = place.offset_bytes.unwrap_or(0);
        let end = start.saturating_add(old_len_bytes);
        let behind = end.saturating_add(resized.superblock.block_bytes.into());
        if is_shorter && self.truncates_file && self.base.len_bytes()? < behind {
            let len = start.saturating_add(resized.len_bytes());
            let cut = self.base.set_len(len);
            cut.with_context(|| format!("{}: {}", image.shown(), format_bytes(len)))?;
        }
        Ok(resized)
    }

    fn write_volume(&mut self, progress: FormatProgress<'_>) -> anyhow::Result<ResizeOutcome> {
        let Self { wanted: ResizeRequest { image, now, len_bytes, .. }, plan, disk, base, .. } =
            self;
        let old_len_bytes = self.old_len_bytes;
        let store_disk = base.store_disk();
        let failed = |error| with_context(image, store_disk.as_ref(), error);
        let mut resized = ResizeOutcome::new(old_len_bytes, plan.superblock());
        if plan.len_bytes() == plan.old_len_bytes() {
            return Ok(resized);
        }
        let target = shrink::ShrinkTarget { disk: &**disk, now: *now, progress: &progress };
        plan.write(&target).map_err(failed)?;
        // Space that one pass frees lets the next pass shrink further.
        let passes = if len_bytes.is_none() { MAX_PASSES } else { 1 };
        for _ in 1..passes {
            *plan = shrink::ShrinkPlan::plan_further(&**disk)
                .map_err(|error| resize_error(image, store_disk.as_ref(), &**disk, error))?;
            if plan.len_bytes() == plan.old_len_bytes() {
                break;
            }
            plan.write(&target).map_err(failed)?;
            resized = ResizeOutcome::new(old_len_bytes, plan.superblock());
        }
        Ok(resized)
    }
}

/// Result of resizing a volume.
#[derive(Clone, Debug)]
pub struct ResizeOutcome {
    /// Previous length.
    pub old_len_bytes: u64,
    /// Superblock after the change.
    pub superblock: Superblock,
}

impl ResizeOutcome {
    fn new(old_len_bytes: u64, superblock: &Superblock) -> Self {
        Self { old_len_bytes, superblock: superblock.clone() }
    }

    /// Returns the new length.
    pub fn len_bytes(&self) -> u64 {
        self.superblock.len_bytes()
    }
}

fn resize_error(
    image: &Path,
    store_disk: Option<&StoreDiskName>,
    disk: &dyn Disk,
    error: OfflineError,
) -> anyhow::Error {
    match error {
        OfflineError::Volume(error) => image::open_volume_error(image, disk, error.into()),
        error => with_context(image, store_disk, error),
    }
}

fn with_context(
    image: &Path,
    store_disk: Option<&StoreDiskName>,
    error: OfflineError,
) -> anyhow::Error {
    let shown = image.shown();
    let step = match (&error, store_disk) {
        (OfflineError::ShortDisk { needed_bytes, .. }, Some(StoreDiskName { store, name })) => {
            let (store, kib) = (store.shown(), needed_bytes.div_ceil(1024));
            format!("draconis store disk {store} {name} {kib}K makes it long enough")
        }
        (OfflineError::ShortDisk { .. }, None) => {
            "give the partition or the device more room first".to_owned()
        }
        (OfflineError::Volume(draconis_ext::Error::Io(why)), Some(StoreDiskName { store, .. }))
            if disk_errno(why) == Errno::NOSPC =>
        {
            let store = store.shown();
            format!(
                "delete something from the store or make it larger (draconis store grow {store} \
                 SIZE), then run it again before the volume is used"
            )
        }
        (OfflineError::Volume(draconis_ext::Error::Io(_)), _) => {
            "run it again before the volume is used".to_owned()
        }
        _ => return anyhow::Error::from(error).context(shown.to_string()),
    };
    Failure::new(crate::error::tune_errno(&error), format!("{shown}: {error}; {step}")).into()
}
