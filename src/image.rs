//! Opening the image of a command.

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use draconis_access::compressed::{CompressedImage, detect};
use draconis_access::destination::{ReadSources, refuse_output};
use draconis_access::host_file::{check_file_type, open_error, open_file};
pub use draconis_access::host_file::{claim_exclusive, len_bytes, open_exclusive};
use draconis_access::image as by_path;
pub use draconis_access::image::{
    BackingFiles, UnreadImage, detect_contents, extent_files, open_volume_error,
};
pub use draconis_access::listing::{DirectoryListing, ListedName};
pub use draconis_access::location::image_of_deleted;
pub use draconis_access::store_disk;
use draconis_access::store_disk::{StoreDiskName, UnreadStoreDisk};
use draconis_container::is_seekable;
use draconis_device::{Disk, FileOptions, LockMode, OpenedFile, lock_file};
use draconis_ext::{Follow, InodeNumber, SuperblockPlace, Volume};
use draconis_service::options::MountOptions;
use draconis_service::sandbox::{self, Confinement, SandboxProfile};
use draconis_service::volume::{self, LocatedVolume, VolumeTree};
use draconis_types::path_bytes::ShowPath;
use rustix::io::Errno;

use crate::bucket;
use crate::progress::{ByteProgress, ProgressMode};
use crate::report;
use crate::target::ImagePath;
use crate::text::parse_size;
use draconis_access::messages::with_context;
pub use draconis_access::mmp_claim::clear_mmp;

/// Where in an image the volume is.
#[derive(Debug, Clone, Default, Args)]
pub struct VolumeArgs {
    /// Start of the volume in IMAGE, in bytes (suffixes K, M, G).
    #[arg(long, value_name = "BYTES", value_parser = parse_size, conflicts_with = "partition")]
    pub offset: Option<u64>,
    /// Use partition N of IMAGE, counted from 1.
    #[arg(long, value_name = "N")]
    pub partition: Option<u32>,
    /// Backing file of a differencing IMAGE (qcow2, VHDX, VHD, VMDK); repeat for the backing file
    /// of FILE. Paths stored in IMAGE are never opened. Also lists the extents of a multi-file
    /// VMDK, in order, if their names do not match IMAGE.
    #[arg(long, value_name = "FILE")]
    pub backing: Vec<PathBuf>,
    /// True for the deleted files of the volume.
    #[arg(skip)]
    pub deleted: bool,
}

/// Where in an image the volume to read is.
#[derive(Debug, Clone, Default, Args)]
pub struct ReadArgs {
    #[command(flatten)]
    pub volume: VolumeArgs,
    /// Read the deleted files of the volume, as IMAGE@deleted does. Files that are not whole have
    /// the attribute user.draconis.state.
    #[arg(long)]
    pub deleted: bool,
}

/// What is written only if it is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Force {
    /// A member of a RAID, which a change splits from the others.
    RaidMember,
}

/// Parses `--force[=KIND]` of a command that has a meaning for `--force` alone: `None`.
pub fn parse_force(text: &str) -> Result<Option<Force>, String> {
    if text.is_empty() { Ok(None) } else { Force::from_str(text, false).map(Some) }
}

/// Where in an image the volume to write is.
#[derive(Debug, Clone, Default, Args)]
pub struct WriteArgs {
    #[command(flatten)]
    pub volume: VolumeArgs,
    /// Write also to what is otherwise refused: a member of a RAID, which this splits from the
    /// others.
    #[arg(long, value_name = "KIND", value_enum)]
    pub force: Option<Force>,
}

impl std::ops::Deref for WriteArgs {
    type Target = VolumeArgs;

    fn deref(&self) -> &VolumeArgs {
        &self.volume
    }
}

impl WriteArgs {
    /// As [`VolumeArgs::to_location`], with what may be written.
    pub fn to_location(&self) -> draconis_access::VolumeLocation {
        let force_raid_member = self.force == Some(Force::RaidMember);
        draconis_access::VolumeLocation { force_raid_member, ..self.volume.to_location() }
    }

    /// Returns the location as mount options.
    pub fn options(&self) -> MountOptions {
        self.to_location().options()
    }
}

impl VolumeArgs {
    /// Returns the location as the library's type.
    pub fn to_location(&self) -> draconis_access::VolumeLocation {
        let Self { offset, partition, backing, deleted } = self.clone();
        draconis_access::VolumeLocation {
            offset_bytes: offset,
            partition,
            backing,
            deleted,
            force_raid_member: false,
        }
    }

    /// Returns the location as mount options.
    pub fn options(&self) -> MountOptions {
        self.to_location().options()
    }
}

/// Returns the files that a command reads with an image, which it must not overwrite.
pub fn sources_to_protect(image: &Path, place: &VolumeArgs) -> ReadSources {
    let mut sources = ReadSources::of_image(image, &place.backing);
    bucket::cli_journal_file().iter().for_each(|file| sources.add(file));
    sources
}

/// Which superblock of a volume to use.
#[derive(Debug, Clone, Default, Args)]
pub struct SuperblockArgs {
    /// Use the backup superblock in this block (of --block-size bytes, else of any size).
    #[arg(long, value_name = "BLOCK")]
    superblock: Option<u64>,
    /// Block size in bytes, for the search of a backup superblock.
    #[arg(long, value_name = "BYTES", value_parser = parse_block_size)]
    block_size: Option<u32>,
}

impl SuperblockArgs {
    /// Returns the place as the library's type.
    pub fn place(&self) -> SuperblockPlace {
        SuperblockPlace { block: self.superblock, block_bytes: self.block_size }
    }
}

fn parse_block_size(text: &str) -> Result<u32, String> {
    let bytes = parse_size(text).map_err(|error| error.to_string())?;
    let bytes = u32::try_from(bytes)
        .ok()
        .filter(|bytes| (1024..=65536).contains(bytes) && bytes.is_power_of_two());
    bytes.ok_or_else(|| "a block has 1024, 2048, 4096 .. 65536 bytes".to_owned())
}

/// Parses the name of a disk in a store, in a file or a bucket; `None` for other images.
pub fn parse_store_disk(image: &Path) -> anyhow::Result<Option<StoreDiskName>> {
    // An existing file of that name takes precedence.
    let Some(address) =
        bucket::bucket_url(image).filter(|_| std::fs::symlink_metadata(image).is_err())
    else {
        return Ok(StoreDiskName::parse(image));
    };
    match address.rsplit_once('#') {
        Some((store, name)) if !name.is_empty() => Ok(Some(StoreDiskName {
            store: bucket::normalize_url(store).into(),
            name: name.to_owned(),
        })),
        _ => bail!("{address} is a store; {address}#NAME is a disk in it, store ls lists them"),
    }
}

/// Opens the store of a disk for writing, exclusively.
pub fn open_store_disk_exclusive(
    name: StoreDiskName,
    force: Option<Force>,
) -> anyhow::Result<UnreadStoreDisk> {
    name.check_writable(true)?;
    let Some(address) = bucket::bucket_url(&name.store) else {
        return name.open_exclusive(force == Some(Force::RaidMember));
    };
    let (disk, claim) = bucket::start_disk_process(address, true)?;
    name.open_remote(disk, true, claim)
}

/// Opens the store of a disk for reading, shared with other readers.
pub fn open_store_disk_shared(name: StoreDiskName) -> anyhow::Result<UnreadStoreDisk> {
    let Some(address) = bucket::bucket_url(&name.store) else { return name.open_shared() };
    let (disk, claim) = bucket::start_disk_process(address, false)?;
    name.open_remote(disk, false, claim)
}

/// Opens an existing image for writing, exclusively.
pub fn open_writable(image: &Path, force: Option<Force>) -> anyhow::Result<UnreadImage> {
    refuse_output(image, &[])?;
    match parse_store_disk(image)? {
        Some(name) => open_store_disk_exclusive(name, force).map(UnreadImage::InStore),
        None => by_path::open_writable(image, force == Some(Force::RaidMember)),
    }
}

/// Opens an image for reading.
pub fn open_readable(image: &Path) -> anyhow::Result<UnreadImage> {
    refuse_output(image, &[])?;
    match parse_store_disk(image)? {
        Some(name) => open_store_disk_shared(name).map(UnreadImage::InStore),
        None => by_path::open_readable(image),
    }
}

/// Opens the volume in `image` read-only, and confines this process.
pub fn open(
    image: &Path,
    place: &ReadArgs,
    extract_dir: Option<BorrowedFd<'_>>,
) -> anyhow::Result<VolumeTree> {
    let part = locate_volume_to_read(image, place, extract_dir)?;
    open_tree(image, part.disk)
}

/// Locates a volume, or the deleted files of one, and confines this process. Warns of deleted files
/// that are not whole.
pub fn locate_volume_to_read(
    image: &Path,
    place: &ReadArgs,
    beneath: Option<BorrowedFd<'_>>,
) -> anyhow::Result<LocatedVolume> {
    let of_deleted = image_of_deleted(image);
    let deleted = of_deleted.is_some() || place.deleted;
    let volume = VolumeArgs { deleted, ..place.volume.clone() };
    let part = locate_volume(of_deleted.as_deref().unwrap_or(image), &volume, beneath)?;
    for note in part.deleted.iter().flat_map(volume::describe_deleted) {
        report::warn_line(format_args!("draconis: {}: {note}", image.shown()));
    }
    Ok(part)
}

/// Opens the volume on `disk`, which was located in `image`.
pub fn open_tree(image: &Path, disk: Arc<dyn Disk>) -> anyhow::Result<VolumeTree> {
    let opened = volume::open_whole_disk(disk.clone(), &MountOptions::default());
    opened.map_err(|error| open_volume_error(image, &*disk, error))
}

/// Locates the volume in `image`, and confines this process. Afterwards it can read the image,
/// write to open files, and create files below `beneath` if that is given.
pub fn open_disk_confined(
    image: &Path,
    place: &VolumeArgs,
    beneath: Option<BorrowedFd<'_>>,
) -> anyhow::Result<Arc<dyn Disk>> {
    locate_volume(image, place, beneath).map(|part| part.disk)
}

/// Opens a disk as [`open_disk_confined`] does, for a check.
pub fn open_disk_for_check(image: &Path, place: &VolumeArgs) -> anyhow::Result<Arc<dyn Disk>> {
    locate_opened_volume(image, place, None, UnreadFile::without_kernel_read_ahead)
        .map(|part| part.disk)
}

/// Locates the volume in `image` and confines this process, as [`open_disk_confined`] does. Returns also the
/// partition and the formats.
pub fn locate_volume(
    image: &Path,
    place: &VolumeArgs,
    beneath: Option<BorrowedFd<'_>>,
) -> anyhow::Result<LocatedVolume> {
    locate_opened_volume(image, place, beneath, |file| file)
}

/// [`locate_volume`]; passes the open file through `prepare` first.
fn locate_opened_volume(
    image: &Path,
    place: &VolumeArgs,
    beneath: Option<BorrowedFd<'_>>,
    prepare: impl FnOnce(UnreadFile) -> UnreadFile,
) -> anyhow::Result<LocatedVolume> {
    let shown = image.shown();
    refuse_output(image, &place.backing)?;
    let profile = match beneath {
        Some(beneath) => SandboxProfile::Extractor { beneath },
        None => SandboxProfile::Reader,
    };
    if let Some(name) = parse_store_disk(image)? {
        let store = open_store_disk_shared(name)?;
        sandbox::confine(&profile, None)?;
        let part = volume::locate_volume(store.start()?, &[], &place.options());
        return part.with_context(|| shown.to_string());
    }
    // Opened before confinement, read afterwards.
    let file = prepare(UnreadFile::open(image)?);
    let behind = BackingFiles::open(image, &place.backing)?;
    sandbox::confine(&profile, None)?;
    let whole = file.start(image)?;
    let part = volume::locate_volume(whole, &behind.start_disks(), &place.options());
    part.with_context(|| shown.to_string())
}

/// A file or device that is open and locked for reading, but not yet read. It may be compressed.
pub struct UnreadFile {
    file: File,
    packed: Option<CompressedImage>,
}

impl UnreadFile {
    /// Opens `image`, shared with other readers.
    pub fn open(image: &Path) -> anyhow::Result<Self> {
        let shown = image.shown();
        let file = File::open(image).map_err(|error| open_error(image, error))?;
        check_file_type(image, file.metadata().with_context(|| shown.to_string())?.file_type())?;
        match lock_file(&file, LockMode::Shared) {
            Err(Errno::WOULDBLOCK) => {
                bail!("{shown} is mounted or being changed; see draconis status")
            }
            claimed => claimed.with_context(|| shown.to_string())?,
        }
        let packed = detect(&file, image)?;
        Ok(Self { file, packed })
    }

    /// Has the kernel read nothing but what is requested, for a check: it reads ahead itself what it
    /// will need, and the kernel would read files' contents between directories.
    fn without_kernel_read_ahead(self) -> Self {
        if let Err(errno) = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::Random) {
            log::debug!("the kernel keeps reading ahead: {errno}");
        }
        self
    }

    /// Returns true if the file is compressed.
    pub fn is_compressed(&self) -> bool {
        self.packed.is_some()
    }

    /// Returns the disk of a device that may have bad sectors, read without the page cache: there,
    /// a bad sector costs all pages that were read with it.
    pub fn start_direct(self, image: &Path) -> anyhow::Result<Arc<dyn Disk>> {
        let options = FileOptions { write: false, direct: true, uring: false };
        let opened = OpenedFile::new(self.file.into(), options);
        Ok(Arc::new(opened.with_context(|| image.shown().to_string())?.start()))
    }

    /// Returns the disk of the file; decompresses the file unless it can be read in place.
    pub fn start(self, image: &Path) -> anyhow::Result<Arc<dyn Disk>> {
        let start = |file| -> anyhow::Result<Arc<dyn Disk>> {
            Ok(Arc::new(open_file(file, image, false)?.start()))
        };
        let whole = start(self.file)?;
        let shown = || image.shown().to_string();
        match self.packed {
            Some(packed) if !is_seekable(whole.clone()).with_context(shown)? => {
                let mut progress = ByteProgress::unbounded(ProgressMode::Auto);
                start(packed.unpack(image, &mut |bytes| progress.add(bytes))?)
            }
            _ => Ok(whole),
        }
    }
}

/// Confines this process to its open files, which it may resize.
pub fn confine_resizer() -> anyhow::Result<()> {
    sandbox::confine(&SandboxProfile::Resizer, None)?;
    Ok(())
}

/// Confines this process to its open files and listening sockets.
pub fn confine_export() -> anyhow::Result<Confinement> {
    Ok(sandbox::confine(&SandboxProfile::Export, None)?)
}

/// Confines this process to its open files.
pub fn confine_to_open_files() -> anyhow::Result<()> {
    sandbox::confine(&SandboxProfile::Reader, None)?;
    Ok(())
}

/// Resolves a target; errors name the target.
pub fn resolve_target(
    volume: &Volume,
    target: &ImagePath,
    follow: Follow,
) -> anyhow::Result<InodeNumber> {
    volume.resolve(volume.root(), &target.path, follow).map_err(|error| with_context(target, error))
}

/// Returns the names in a directory, sorted, without `.` and `..`. Reports damage and skips it.
pub fn list_directory(
    volume: &Volume,
    dir: InodeNumber,
    label: &str,
) -> anyhow::Result<DirectoryListing> {
    draconis_access::listing::list_directory(volume, dir, label, &mut |error| {
        report::print_error(error)
    })
}
