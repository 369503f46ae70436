//! Creating a volume at a path: an existing or new file, a device, or a disk in a store.
//!
//! Law 1: targets in use are not touched; contents that would be lost are named first.
//! Law 2: all sizes are checked before the first byte is written; a new file is removed if
//! creating the volume fails.

use std::fmt::Display;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use draconis_container::create::{DryRunDisk, NewFormat, NewImageDisk};
use draconis_container::signature::{DetectedContent, EXT_KIND, RAID_CONTENT, find_raid_member};
use draconis_container::{Format, fixed_vhd_len, open_for_writing};
use draconis_device::{
    Disk, Extent, FileDisk, FileOptions, Partition, SubDisk, find_partition, read_partitions,
};
use draconis_ext::format::superblock::RawSuperblock;
use draconis_ext::mkfs::{self, FileSource, FormatTarget, VolumePlan};
use draconis_types::Block;
use draconis_types::path_bytes::ShowPath;
use rustix::fs::FallocateFlags;

use crate::error::not_found_error;
use crate::location::VolumeLocation;
use crate::messages::format_bytes;
use crate::overwrite::{OverwriteCheck, OverwritePermission};
use crate::store_disk::{OpenStoreDisk, StoreDiskName, UnreadStoreDisk};
use crate::{host_file, image};

/// Length of the footer of a fixed VHD.
const FOOTER_BYTES: usize = 512;
/// Files larger than this are written with O_DIRECT.
const DIRECT_IO_MIN_BYTES: u64 = 64 << 20;

/// Progress callback for bytes written; called by several threads.
pub type FormatProgress<'a> = &'a (dyn Fn(u64) + Sync);

/// Target of a new volume, open and locked.
pub enum FormatDestination {
    /// A file or device; `None` if the file does not exist yet.
    File(Option<File>),
    /// A fixed VHD, whose footer is preserved.
    Footed(FixedVhd),
    /// A disk in a store, existing or new.
    StoreDisk(OpenStoreDisk),
    /// A part of a disk; the rest of the disk is not written.
    Part(PartitionTarget),
}

/// A partition, or the part of a disk from an offset on.
pub struct PartitionTarget {
    disk: Arc<dyn Disk>,
    /// Description of the part for messages.
    shown: String,
    /// Contents around the part that writing it would damage.
    around: Option<DetectedContent>,
}

impl PartitionTarget {
    /// Locates a partition of a writable disk, or the part that begins at an offset. The part ends
    /// with the partition that contains it.
    ///
    /// # Errors
    /// There is no such part, or the disk is read-only.
    pub fn locate(image: &Path, whole: Arc<dyn Disk>, at: &VolumeLocation) -> anyhow::Result<Self> {
        let shown = || image.shown().to_string();
        let chance = RandomState::new().build_hasher().finish();
        let opened = open_for_writing(whole, &[], chance).with_context(shown)?;
        if let (Some(format), None) = (opened.format, &opened.session) {
            bail!("{}: {} images are only read", shown(), format.name());
        }
        let disk = opened.disk;
        if let Some(number) = at.partition {
            let extent = find_partition(&*disk, number).with_context(shown)?;
            let whole_disk = disk.clone();
            let disk = Arc::new(SubDisk::new(disk, extent).with_context(shown)?);
            return Ok(Self {
                disk,
                shown: format!("{}, partition {number}", shown()),
                around: find_raid_member(&*whole_disk).map(|_| RAID_CONTENT),
            });
        }
        let start = at.offset_bytes.unwrap_or(0);
        let len = disk.properties().len_bytes;
        ensure!(
            start < len,
            "{} has only {}, and ends before --offset",
            shown(),
            format_bytes(len)
        );
        let is_in = |part: &Partition| {
            let Extent { start_bytes, len_bytes } = part.extent;
            start_bytes <= start && start < start_bytes + len_bytes
        };
        let mut table = read_partitions(&*disk).unwrap_or_default().into_iter();
        let around = table.find(is_in).map_or(Extent::new(0, len), |part| part.extent);
        let end = around.start_bytes + around.len_bytes;
        let around_it = SubDisk::new(disk.clone(), around).with_context(shown)?;
        let offset = start - around.start_bytes;
        let around = image::detect_disk_contents(&around_it)?.filter(|held| {
            offset > 0
                && (held.kind != EXT_KIND
                    || ext_volume_bytes(&around_it).is_none_or(|ext| ext > offset))
        });
        let disk =
            Arc::new(SubDisk::new(disk, Extent::new(start, end - start)).with_context(shown)?);
        Ok(Self { disk, shown: format!("{} from byte {start} on", shown()), around })
    }
}

/// The data area of a fixed VHD and its footer.
pub struct FixedVhd {
    file: File,
    len_bytes: u64,
    footer: Vec<u8>,
}

/// Returns the length of the ext volume at the start of a disk, if there is one.
fn ext_volume_bytes(disk: &dyn Disk) -> Option<u64> {
    let block = disk.read_now(Extent::new(0, 4096), Block::private(4096)).ok()?.into_private();
    let superblock = RawSuperblock::view(block.get(1024..2048)?).ok()?.check().ok()?;
    Some(superblock.len_bytes())
}

impl FormatDestination {
    /// Recognises a fixed VHD by its footer, so that the new volume leaves the footer in place.
    /// Callers use it unless the file is to become another format.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn preserve_vhd_footer(self) -> anyhow::Result<Self> {
        let Self::File(Some(file)) = self else { return Ok(self) };
        let there = host_file::len_bytes(&file)?;
        let mut footer = vec![0; FOOTER_BYTES];
        let is_read = match there.checked_sub(FOOTER_BYTES as u64) {
            Some(at) if file.metadata()?.is_file() => {
                file.read_exact_at(&mut footer, at)?;
                true
            }
            _ => false,
        };
        Ok(match fixed_vhd_len(&footer, there).filter(|_| is_read) {
            Some(len_bytes) => Self::Footed(FixedVhd { file, len_bytes, footer }),
            None => Self::File(Some(file)),
        })
    }

    /// Opens the target exclusively. A store is read only after `confine`.
    ///
    /// # Errors
    /// The target is in use, or cannot hold a volume.
    pub fn open(
        image: &Path,
        confine: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let Some(name) = StoreDiskName::parse(image) else {
            return Ok(Self::File(host_file::open_exclusive(image)?));
        };
        Self::open_store_disk(name.open_exclusive(false)?, confine)
    }

    /// Opens a disk in a store that is already open and locked.
    ///
    /// # Errors
    /// The store cannot be opened.
    pub fn open_store_disk(
        store: UnreadStoreDisk,
        confine: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        confine()?;
        Ok(Self::StoreDisk(store.open()?))
    }

    /// Detects contents that overwriting the target would lose, by known signatures.
    ///
    /// # Errors
    /// The target cannot be read.
    pub fn detect_contents(&self) -> anyhow::Result<Option<DetectedContent>> {
        match self {
            Self::File(file) => {
                Ok(file.as_ref().map(image::detect_contents).transpose()?.flatten())
            }
            Self::Footed(footed) => image::detect_contents(&footed.file),
            Self::StoreDisk(store) => match store.find()? {
                Some(_) => image::detect_disk_contents(&*store.disk()?),
                None => Ok(None),
            },
            Self::Part(part) => match part.around {
                None => image::detect_disk_contents(&*part.disk),
                around => Ok(around),
            },
        }
    }

    /// Refuses to overwrite contents that `force` does not allow; `word` is the option by which the
    /// caller allows more.
    ///
    /// # Errors
    /// Contents would be lost, or the target cannot be read.
    pub fn check_overwrite(
        &self,
        image: &Path,
        force: &OverwritePermission,
        option_name: &str,
    ) -> anyhow::Result<()> {
        let (held, len_bytes) = (self.detect_contents()?, self.len_bytes()?);
        let whole = image.shown();
        let place: &dyn Display = match self {
            Self::Part(part) => &part.shown,
            _ => &whole,
        };
        let usual = &[EXT_KIND];
        Ok(OverwriteCheck { place, len_bytes, contents: held, force, usual, option_name }
            .check()?)
    }

    /// Detects the format of a virtual machine's disk image by its first bytes.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn container_format(&self) -> anyhow::Result<Option<Format>> {
        let Self::File(Some(file)) = self else { return Ok(None) };
        let mut head = [0; 512];
        let got = file.read_at(&mut head, 0)?;
        Ok(Format::detect(&head[..got]))
    }

    /// Returns true for a target of fixed size: a block device, or a disk that keeps its length.
    ///
    /// # Errors
    /// A system call fails.
    pub fn has_fixed_size(&self) -> anyhow::Result<bool> {
        match self {
            Self::Footed(_) | Self::Part(_) => Ok(true),
            Self::File(Some(file)) => Ok(file.metadata()?.file_type().is_block_device()),
            _ => Ok(false),
        }
    }

    /// Returns the current length; 0 if the target does not exist.
    ///
    /// # Errors
    /// A system call fails.
    pub fn len_bytes(&self) -> anyhow::Result<u64> {
        match self {
            Self::File(file) => {
                Ok(file.as_ref().map(host_file::len_bytes).transpose()?.unwrap_or(0))
            }
            Self::Footed(footed) => Ok(footed.len_bytes),
            Self::Part(part) => Ok(part.disk.properties().len_bytes),
            Self::StoreDisk(store) => match store.find()? {
                Some(_) => store.len_bytes(),
                None => Ok(0),
            },
        }
    }
}

/// Writes the planned volume, into a disk image of a virtual machine if `format` is given.
///
/// # Errors
/// The disk is full, or reading the contents or writing fails.
pub fn write(
    image: &Path,
    base: FormatDestination,
    plan: &VolumePlan<'_>,
    contents: &dyn FileSource,
    format: Option<NewFormat>,
    progress: FormatProgress<'_>,
) -> anyhow::Result<()> {
    let work = FormatJob { image, plan, contents, format, progress };
    let file = match base {
        FormatDestination::File(file) => file,
        FormatDestination::Footed(footed) => return work.write_fixed_vhd(footed),
        FormatDestination::StoreDisk(store) => return work.format_store_disk(&store),
        FormatDestination::Part(part) => return work.format_partition(&part),
    };
    let created = file.is_none();
    let done = match file {
        Some(file) => work.write_raw(file),
        None => create_image_file(image).and_then(|file| work.write_raw(file)),
    };
    if done.is_err() && created {
        let _ = std::fs::remove_file(image);
    }
    done
}

fn create_image_file(image: &Path) -> anyhow::Result<File> {
    let file = File::options().read(true).write(true).create_new(true).open(image);
    let file = match file {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let parent = image.parent().unwrap_or(Path::new("")).shown();
            return Err(not_found_error(format!("{parent}: no such directory; mkdir -p makes it")));
        }
        file => file.with_context(|| image.shown().to_string())?,
    };
    host_file::claim_exclusive(&file, image)?;
    Ok(file)
}

/// Contents without data, for the draft pass; the flag says if they are read sequentially.
struct PlaceholderContents(bool);

impl FileSource for PlaceholderContents {
    fn read(&self, _: u64, _: u64, _: &mut [u8]) -> std::io::Result<()> {
        Ok(())
    }

    fn is_sequential(&self) -> bool {
        self.0
    }
}

/// Volume to write and its target.
struct FormatJob<'a> {
    image: &'a Path,
    plan: &'a VolumePlan<'a>,
    contents: &'a dyn FileSource,
    format: Option<NewFormat>,
    progress: FormatProgress<'a>,
}

impl FormatJob<'_> {
    fn write_raw(&self, file: File) -> anyhow::Result<()> {
        let shown = self.image.shown();
        let is_file = file.metadata()?.is_file();
        let len = self.plan.layout().len_bytes();
        if let Some(format) = self.format {
            if !is_file {
                bail!("{shown}: --image-format is for files");
            }
            return self.write_disk_image(file, format);
        }
        if is_file {
            self.check_free_space(&file).with_context(|| shown.to_string())?;
            // Truncated and extended again, the file is one hole, which reads as zeros.
            let keep = file.metadata()?.len().max(len);
            file.set_len(0)?;
            file.set_len(keep).with_context(|| format!("{shown}: {}", format_bytes(keep)))?;
        }
        let direct = !is_file || self.plan.data_bytes() > DIRECT_IO_MIN_BYTES;
        let options = FileOptions { write: true, direct, uring: false };
        let disk = FileDisk::from_fd(file.into(), options).with_context(|| shown.to_string())?;
        self.write_volume(&disk, is_file)
    }

    /// Writes the volume in front of a VHD footer, which stays valid where holes can be punched.
    fn write_fixed_vhd(&self, footed: FixedVhd) -> anyhow::Result<()> {
        let FixedVhd { file, len_bytes, footer } = footed;
        let shown = || self.image.shown().to_string();
        self.check_free_space(&file).with_context(shown)?;
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if rustix::fs::fallocate(&file, hole, 0, len_bytes).is_err() {
            let end = host_file::len_bytes(&file)?;
            file.set_len(0)?;
            file.set_len(end).with_context(shown)?;
            file.write_all_at(&footer, end - FOOTER_BYTES as u64).with_context(shown)?;
        }
        let options = FileOptions { write: true, direct: false, uring: false };
        let disk = FileDisk::from_fd(file.into(), options).with_context(shown)?;
        let disk = SubDisk::new(Arc::new(disk), Extent::new(0, len_bytes)).with_context(shown)?;
        self.write_volume(&disk, true)
    }

    /// Writes the volume into a new disk image.
    fn write_disk_image(&self, file: File, format: NewFormat) -> anyhow::Result<()> {
        let shown = self.image.shown();
        let len = self.plan.layout().len_bytes();
        if len > format.max_disk_bytes() {
            bail!("{shown}: such an image has at most {}", format_bytes(format.max_disk_bytes()));
        }
        self.check_free_space(&file).with_context(|| shown.to_string())?;
        let most = format.max_file_bytes(len);
        file.set_len(0)?;
        file.set_len(most).with_context(|| format!("{shown}: {}", format_bytes(most)))?;
        let options = FileOptions { write: true, direct: false, uring: false };
        let disk = FileDisk::from_fd(file.try_clone()?.into(), options);
        let disk = disk.with_context(|| shown.to_string())?;
        let identity = self.plan.layout().options().uuid;
        let made = || format!("{shown}: no image was made");
        let draft = DryRunDisk::new(&disk, format, len);
        let target = FormatTarget { disk: &draft, zeroed: true, progress: &|_| () };
        let blank = PlaceholderContents(self.contents.is_sequential());
        mkfs::write(self.plan, &blank, &target).with_context(made)?;
        let image = NewImageDisk::new(&disk, &draft, identity).with_context(made)?;
        self.write_volume(&image, true)?;
        let end = image.finish().with_context(made)?;
        file.set_len(end).with_context(made)
    }

    /// Writes the volume to a part of a disk.
    fn format_partition(&self, part: &PartitionTarget) -> anyhow::Result<()> {
        if self.format.is_some() {
            bail!("{}: --image-format makes a disk, of which this is a part", part.shown);
        }
        self.write_volume(&*part.disk, false)
    }

    /// Writes the volume to a disk; `zeroed` says that it reads as zeros.
    fn write_volume(&self, disk: &dyn Disk, zeroed: bool) -> anyhow::Result<()> {
        let target = FormatTarget { disk, zeroed, progress: self.progress };
        let made = mkfs::write(self.plan, self.contents, &target);
        made.with_context(|| format!("{}: no volume was made", self.image.shown()))
    }

    /// Writes the volume to a disk in a store, which is created or cleared first.
    fn format_store_disk(&self, store: &OpenStoreDisk) -> anyhow::Result<()> {
        if self.format.is_some() {
            bail!("{}: --image-format is for files", self.image.shown());
        }
        let len = self.plan.layout().len_bytes();
        let created = store.find()?.is_none();
        match created {
            true => store.create(len)?,
            false => store.zero_and_resize(store.len_bytes()?.max(len))?,
        }
        let done = self.write_volume(&store.disk()?, true);
        if done.is_err() && created {
            let _ = store.remove();
        }
        done
    }

    /// Refuses a volume that is larger than the free space of the file system below.
    fn check_free_space(&self, file: &File) -> anyhow::Result<()> {
        let below = rustix::fs::fstatvfs(file)?;
        let held = file.metadata()?.blocks().saturating_mul(512);
        let free = below.f_bavail.saturating_mul(below.f_frsize).saturating_add(held);
        let needed = self.plan.data_bytes();
        if needed > free {
            bail!(
                "{} are needed, and the file system that it is on has {}; free some space there",
                format_bytes(needed),
                format_bytes(free)
            );
        }
        Ok(())
    }
}
