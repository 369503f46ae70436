//! Making a volume larger or smaller, with what it lies in.
//!
//! ```text
//!   Growing:    base ──▶ settled ──▶ plan ──▶ file lengthened ──(confined)──▶ written
//!   Shrinking:  base ──(confined)──▶ settled ──▶ plan ──▶ written ──▶ image compacted ──▶ file cut
//! ```
//! Law: what is refused is refused before the volume has changed, its length included; but for
//! what its journal holds, or an unfinished change, which are put in place first.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use draconis_container::Image;
use draconis_device::{Disk, FileOptions, OpenedFile};
use draconis_exchange::contract::Time;
use draconis_ext::format::superblock::Superblock;
use draconis_ext::grow::{self, Error, Growth};
use draconis_ext::shrink;
use draconis_service::volume::{Part, part_for_writing};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::error::{Error as Failure, missing};
use crate::format::Progress;
use crate::held::{self, Held};
use crate::image::{self, Behind};
use crate::object::InStore;
use crate::say::bytes;
use crate::volume::Place;

/// What a volume lies in, open and claimed.
pub enum Base {
    /// A file or block device.
    File(File),
    /// A disk in a store.
    InStore(InStore),
}

impl Base {
    /// Opens a file or device that must be there, alone.
    ///
    /// # Errors
    /// It is not there, or in use.
    pub fn file(image: &Path) -> anyhow::Result<Self> {
        let none = || {
            missing(format!("{}: no such file; draconis format makes a volume", image.display()))
        };
        Ok(Self::File(image::alone(image)?.ok_or_else(none)?))
    }

    /// The disk, as long as it is now; it is looked at after `confine`.
    fn disk(
        &self,
        image: &Path,
        confine: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Arc<dyn Disk>> {
        let file = match self {
            Self::File(file) => file,
            Self::InStore(store) => return store.disk(),
        };
        let options = FileOptions { write: true, direct: false, uring: false };
        let shown = || image.display().to_string();
        let opened = OpenedFile::new(file.try_clone()?.into(), options).with_context(shown)?;
        confine()?;
        Ok(Arc::new(image::started(opened).with_context(shown)?))
    }

    fn len_bytes(&self) -> anyhow::Result<u64> {
        match self {
            Self::File(file) => image::len_bytes(file),
            Self::InStore(store) => store.len_bytes(),
        }
    }

    fn set_len(&self, len_bytes: u64) -> anyhow::Result<()> {
        match self {
            Self::File(file) => Ok(file.set_len(len_bytes)?),
            Self::InStore(store) => store.set_len(len_bytes),
        }
    }

    /// Whether it has a length of its own, which nothing changes.
    fn is_device(&self) -> anyhow::Result<bool> {
        match self {
            Self::File(file) => Ok(file.metadata()?.file_type().is_block_device()),
            Self::InStore(_) => Ok(false),
        }
    }
}

/// Maximum passes of shrinking to the least size; each makes the volume smaller.
const MAX_PASSES: u32 = 16;

/// Which volume, and how long it is to be.
pub struct Wanted<'a> {
    /// What it lies in, for messages.
    pub image: &'a Path,
    /// Where in that.
    pub place: &'a Place,
    /// How long; of one that grows, all there is if left out; of one that shrinks, what it holds.
    pub len_bytes: Option<u64>,
    /// When.
    pub now: Time,
}

/// A volume that is about to become larger: its file has the length.
pub struct Growing<'a> {
    wanted: Wanted<'a>,
    disk: Arc<dyn Disk>,
    growth: Growth,
    zeroed_from_bytes: u64,
    _held: Held,
}

impl<'a> Growing<'a> {
    /// Plans it, and lengthens what it lies in.
    ///
    /// # Errors
    /// It cannot become so long, or what reading and lengthening gave.
    pub fn plan(wanted: Wanted<'a>, base: &Base, behind: Behind) -> anyhow::Result<Self> {
        let Wanted { image, place, now, .. } = wanted;
        let shown = || image.display().to_string();
        let behind = behind.start();
        let part = || {
            let part = part_for_writing(base.disk(image, || Ok(()))?, &behind, &place.options());
            part.with_context(shown)
        };
        let Part { disk, format, .. } = part()?;
        let held = held::settle(image, &disk, now)?;
        let there_bytes = disk.properties().len_bytes;
        let len_bytes = wanted.len_bytes.unwrap_or(there_bytes);
        let growth =
            Growth::plan(&*disk, len_bytes).map_err(|error| refused(image, &*disk, error))?;
        let is_nothing = growth.len_bytes() == growth.old_len_bytes();
        let (disk, zeroed_from_bytes) = match format {
            None if !is_nothing => {
                drop(disk);
                let zeroed_from_bytes = lengthen(&wanted, base, there_bytes, &growth)?;
                (part()?.disk, zeroed_from_bytes)
            }
            // The disk inside has a length of its own, which writing compares.
            _ => (disk, u64::MAX),
        };
        Ok(Self { wanted, disk, growth, zeroed_from_bytes, _held: held })
    }

    /// Bytes that [`Growing::write`] writes.
    pub fn bytes_to_write(&self) -> u64 {
        self.growth.bytes_to_write(self.zeroed_from_bytes)
    }

    /// Makes the volume larger.
    ///
    /// # Errors
    /// What the disk gave; the volume is as it was, or doing it again ends it.
    pub fn write(self, progress: Progress<'_>) -> anyhow::Result<Resized> {
        let resized = Resized::new(self.growth.old_len_bytes(), self.growth.superblock());
        if self.growth.len_bytes() == resized.old_len_bytes {
            return Ok(resized);
        }
        let (zeroed_from_bytes, now) = (self.zeroed_from_bytes, self.wanted.now);
        let target =
            grow::Target { disk: &*self.disk, zeroed_from_bytes, now, progress: &progress };
        self.growth.write(&target).map_err(|error| tell(self.wanted.image, error))?;
        Ok(resized)
    }
}

/// Makes room for the volume; says from where on it reads as zeros.
fn lengthen(
    wanted: &Wanted<'_>,
    base: &Base,
    there_bytes: u64,
    growth: &Growth,
) -> anyhow::Result<u64> {
    let shown = wanted.image.display();
    let there = base.len_bytes()?;
    let start = wanted.place.offset_bytes.unwrap_or(0);
    let end = start.saturating_add(growth.len_bytes());
    if start.saturating_add(there_bytes) < there - there % 512 {
        // Something follows it: it has the length that a table gives it, which writing compares.
        return Ok(u64::MAX);
    }
    if base.is_device()? {
        if end > there {
            bail!("{shown} has only {}", bytes(there));
        }
        return Ok(u64::MAX);
    }
    let old_end = start.saturating_add(growth.old_len_bytes());
    let zeroed = match base {
        Base::File(file)
            if matches!(rustix::fs::seek(file, SeekFrom::Data(old_end)), Err(Errno::NXIO)) =>
        {
            old_end
        }
        _ => there,
    };
    if end > there {
        base.set_len(end).with_context(|| format!("{shown}: {}", bytes(end)))?;
    }
    Ok(zeroed.saturating_sub(start))
}

/// A volume that is about to become smaller.
pub struct Shrinking<'a> {
    wanted: Wanted<'a>,
    base: Base,
    disk: Arc<dyn Disk>,
    plan: shrink::Shrinking,
    /// Whether what it lies in is cut, if nothing is behind it.
    is_cut: bool,
    /// The image in a file that becomes shorter, and where the volume begins in it.
    image: Option<(Arc<dyn Image>, u64)>,
    _held: Held,
}

impl<'a> Shrinking<'a> {
    /// Plans it. A file is looked at after `confine`; what opened a store has done so.
    ///
    /// # Errors
    /// It cannot become so short, or what reading gave.
    pub fn plan(
        wanted: Wanted<'a>,
        base: Base,
        behind: Behind,
        confine: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let Wanted { image, place, now, len_bytes } = wanted;
        // Asked while that can be done.
        let is_device = base.is_device()?;
        let disk = base.disk(image, confine)?;
        let part = part_for_writing(disk, &behind.start(), &place.options());
        let part = part.with_context(|| image.display().to_string())?;
        let Part { disk, start_bytes, partition, format, image: inside, .. } = part;
        let there = base.len_bytes()?;
        let end = place.offset_bytes.unwrap_or(0).saturating_add(disk.properties().len_bytes);
        // Not what a VHD has behind its disk.
        let is_last = partition.is_none() && format.is_none() && end >= there - there % 512;
        let is_cut = is_last && !is_device;
        let is_file = matches!(base, Base::File(_)) && !is_device;
        let inside = inside.filter(|_| is_file).map(|inside| (inside, start_bytes));
        let held = held::settle(image, &disk, now)?;
        let plan = shrink::Shrinking::plan(&*disk, len_bytes)
            .map_err(|error| refused(image, &*disk, error))?;
        Ok(Self { wanted, base, disk, plan, is_cut, image: inside, _held: held })
    }

    /// Bytes that [`Shrinking::write`] moves.
    pub fn bytes_to_move(&self) -> u64 {
        self.plan.bytes_to_move()
    }

    /// Makes the volume smaller, and cuts its file behind it.
    ///
    /// # Errors
    /// What the disk gave; the volume is as it was, or doing it again ends it.
    pub fn write(mut self, progress: Progress<'_>) -> anyhow::Result<Resized> {
        let Wanted { image, place, .. } = self.wanted;
        let old_len_bytes = self.plan.old_len_bytes();
        let resized = self.write_volume(progress)?;
        let is_shorter = resized.len_bytes() < old_len_bytes;
        if let Some((inside, start)) = &self.image {
            let shown = || format!("{}: its file stays as long as it is", image.display());
            let behind = resized.len_bytes()..old_len_bytes;
            let free = match is_shorter {
                true => shrink::free_bytes(&*self.disk).with_context(shown)?,
                false => vec![],
            };
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
        if is_shorter && self.is_cut && self.base.len_bytes()? < behind {
            let len = start.saturating_add(resized.len_bytes());
            let cut = self.base.set_len(len);
            cut.with_context(|| format!("{}: {}", image.display(), bytes(len)))?;
        }
        Ok(resized)
    }

    fn write_volume(&mut self, progress: Progress<'_>) -> anyhow::Result<Resized> {
        let Self { wanted: Wanted { image, now, len_bytes, .. }, plan, disk, .. } = self;
        let old_len_bytes = plan.old_len_bytes();
        let mut resized = Resized::new(old_len_bytes, plan.superblock());
        if plan.len_bytes() == old_len_bytes {
            return Ok(resized);
        }
        let target = shrink::Target { disk: &**disk, now: *now, progress: &progress };
        plan.write(&target).map_err(|error| tell(image, error))?;
        // Space that one pass frees lets the next one go further.
        let passes = if len_bytes.is_none() { MAX_PASSES } else { 1 };
        for _ in 1..passes {
            *plan = shrink::Shrinking::plan(&**disk, None)
                .map_err(|error| refused(image, &**disk, error))?;
            if plan.len_bytes() == plan.old_len_bytes() {
                break;
            }
            plan.write(&target).map_err(|error| tell(image, error))?;
            resized = Resized::new(old_len_bytes, plan.superblock());
        }
        Ok(resized)
    }
}

/// A volume that has another length, or had that one already.
#[derive(Clone, Debug)]
pub struct Resized {
    /// How long it was.
    pub old_len_bytes: u64,
    /// What it is now.
    pub superblock: Superblock,
}

impl Resized {
    fn new(old_len_bytes: u64, superblock: &Superblock) -> Self {
        Self { old_len_bytes, superblock: superblock.clone() }
    }

    /// How long it is.
    pub fn len_bytes(&self) -> u64 {
        self.superblock.len_bytes()
    }
}

fn refused(image: &Path, disk: &dyn Disk, error: Error) -> anyhow::Error {
    match error {
        Error::Volume(error) => image::refused(image, disk, error.into()),
        error => tell(image, error),
    }
}

fn tell(image: &Path, error: Error) -> anyhow::Error {
    let shown = image.display();
    let step = match &error {
        Error::ShortDisk { .. } => "give the partition or the device more room first",
        Error::Volume(draconis_ext::Error::Io(_)) => "run it again before the volume is used",
        _ => return anyhow::Error::from(error).context(shown.to_string()),
    };
    Failure::new(crate::error::of_whole(&error), format!("{shown}: {error}; {step}")).into()
}
