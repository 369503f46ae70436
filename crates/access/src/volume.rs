//! A volume by the path of its image, and its files by their paths.

mod create;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use draconis_container::is_seekable;
use draconis_device::{Disk, ProcessBound};
use draconis_ext::check::{self, Report};
use draconis_ext::tune::TuneChanges;
use draconis_ext::{
    AccessTimes, Follow, Info, InodeNumber, NewNode, OpenOptions, RenameMode, WriteOptions,
    XattrSet,
};
use draconis_service::options::MountOptions;
use draconis_service::volume::{locate_for_writing, locate_volume, open_for_reading};
use draconis_types::lock::RecursiveRwLock;
use draconis_types::path_bytes::ShowPath;
use draconis_types::{AttributeChange, Attributes, FileType, Time};
use rustix::io::Errno;

use crate::compressed::detect;
use crate::listing::{list_directory, split_parent};
pub use crate::location::VolumeLocation;
use crate::messages::{escape_control_chars, with_context};
use crate::mmp_claim::{self, MmpGuard};
use crate::resize::{self, GrowJob, ResizeOutcome, ResizeRequest, ShrinkJob};
use crate::store_disk::StoreDiskName;
use crate::tar::{SparseFormat, TarObserver, TarOptions};
use crate::{Error, Result, host_file, image, tar, tuning};

pub use create::{CreatedVolume, NewVolume, image_format};

/// Limit of dirty data in memory before it is written to the image, in bytes.
const DIRTY_BYTES: u64 = 64 << 20;
/// Maximum number of messages kept for an archive.
const MAX_ARCHIVE_MESSAGES: usize = 100;

/// Result of checking a volume.
#[derive(Debug)]
pub struct CheckedVolume(pub Report);

impl CheckedVolume {
    /// Returns true if `e2fsck -fn` would report nothing.
    pub fn is_clean(&self) -> bool {
        self.0.is_clean()
    }
}

/// A directory entry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirEntry {
    /// The name.
    pub name: Vec<u8>,
    /// Inode number.
    pub inode: u32,
    /// File type.
    pub kind: FileType,
}

type VolumeLock = RecursiveRwLock<Option<(draconis_ext::Volume, Option<MmpGuard>)>>;

/// An open volume. All methods take `&self` and can be called from any number of threads.
///
/// Changes stay in memory until [`Volume::sync`] or [`Volume::close`] returns, or until they exceed
/// a limit. After a crash the volume is consistent, in an earlier state.
pub struct Volume {
    image: PathBuf,
    owner: (u32, u32),
    /// The volume, and its MMP claim if it is writable.
    inner: ProcessBound<VolumeLock>,
}

impl std::fmt::Debug for Volume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Volume").field("image", &self.image).finish_non_exhaustive()
    }
}

impl Volume {
    /// Opens a volume for reading, shared with other readers.
    ///
    /// # Errors
    /// There is no volume, it is open for writing, or it has unsupported features.
    pub fn open(image: &Path, place: &VolumeLocation) -> Result<Arc<Self>> {
        let disk = open_readable(image, place)?;
        let volume = open_for_reading(disk.clone(), OpenOptions::default());
        let volume = volume.map_err(|error| image::open_volume_error(image, &*disk, error))?;
        Ok(Self::new(image, volume, None))
    }

    /// Opens a volume for writing, exclusively.
    ///
    /// # Errors
    /// As [`Volume::open`]; the volume is in use, or read-only.
    pub fn open_for_writing(image: &Path, place: &VolumeLocation) -> Result<Arc<Self>> {
        let disk = image::open_writable(image, place.force_raid_member)?.into_disk()?;
        let behind = image::BackingFiles::open(image, &place.backing)?.start_disks();
        let (volume, held) =
            open_writable(image, disk, &behind, &place.options(), Arc::new(current_time))?;
        if let Some(why) = volume.read_only_reason() {
            return Err(Error::new(Errno::ROFS, format!("{}: {why}", image.shown())));
        }
        Ok(Self::new(image, volume, Some(held)))
    }

    fn new(image: &Path, volume: draconis_ext::Volume, held: Option<MmpGuard>) -> Arc<Self> {
        let maker = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let inner = ProcessBound::new(RecursiveRwLock::new(Some((volume, held))));
        Arc::new(Self { image: image.to_owned(), owner: maker, inner })
    }

    /// Creates a volume, and the file if it is missing.
    ///
    /// # Errors
    /// The image is in use or holds other contents, the disk is full, or a source cannot be read.
    pub fn create(image: &Path, new: &NewVolume) -> Result<CreatedVolume> {
        Ok(create::create(image, new)?)
    }

    /// Grows the volume to `len_bytes`, or to all available space. A file is extended if necessary.
    ///
    /// # Errors
    /// The image is in use, the volume cannot become so long, or the disk fails.
    pub fn grow(
        image: &Path,
        place: &VolumeLocation,
        len_bytes: Option<u64>,
    ) -> Result<ResizeOutcome> {
        let (base, behind) = open_resize_target(image, place)?;
        let wanted = ResizeRequest { image, place, len_bytes, now: current_time() };
        Ok(GrowJob::plan(wanted, &base, behind)?.write(&|_| {})?)
    }

    /// Shrinks the volume to `len_bytes`, or to its minimum. A file is truncated after the volume.
    ///
    /// # Errors
    /// The image is in use, the volume cannot become so short, or the disk fails.
    pub fn shrink(
        image: &Path,
        place: &VolumeLocation,
        len_bytes: Option<u64>,
    ) -> Result<ResizeOutcome> {
        let (base, behind) = open_resize_target(image, place)?;
        let wanted = ResizeRequest { image, place, len_bytes, now: current_time() };
        Ok(ShrinkJob::plan(wanted, base, behind, || Ok(()))?.write(&|_| {})?)
    }

    /// Changes superblock settings.
    ///
    /// # Errors
    /// The image is in use, the volume does not support the change, or the disk fails.
    pub fn tune(image: &Path, place: &VolumeLocation, changes: &TuneChanges) -> Result<()> {
        let disk = image::open_writable(image, place.force_raid_member)?.into_disk()?;
        let behind = image::BackingFiles::open(image, &place.backing)?.start_disks();
        let part = locate_for_writing(disk, &behind, &place.options());
        let disk = part.with_context(|| image.shown().to_string())?.disk;
        Ok(tuning::tune(image, &disk, changes, current_time())?)
    }

    /// Checks the volume without changing it.
    ///
    /// # Errors
    /// The volume cannot be checked. Damage is reported, not returned as an error.
    pub fn check(image: &Path, place: &VolumeLocation) -> Result<CheckedVolume> {
        let disk = open_readable(image, place)?;
        let report = check::check(&disk, check::CheckOptions::default(), &|_, _| {});
        let report =
            report.map_err(|error| image::open_volume_error(image, &*disk, error.into()))?;
        Ok(CheckedVolume(report))
    }

    /// Returns the path of the image.
    pub fn image(&self) -> &Path {
        &self.image
    }

    /// Makes all changes durable, marks the volume as unmounted, and releases the image. Waits for
    /// calls in progress; later calls fail.
    ///
    /// # Errors
    /// The disk failed, now or earlier; the latest changes are lost.
    pub fn close(&self) -> Result<()> {
        let Some((volume, _held)) = self.lock()?.write().take() else { return Ok(()) };
        let closed = volume.close();
        let failure = volume.failure();
        let Some(why) = failure.or_else(|| closed.err().map(|error| error.to_string())) else {
            return Ok(());
        };
        let shown = self.image.shown();
        let text = format!(
            "{shown}: {why}; what was changed last is not there, and draconis check {shown} looks \
             at the rest"
        );
        Err(Error::new(Errno::IO, text))
    }

    /// Makes all changes durable.
    ///
    /// # Errors
    /// The disk failed.
    pub fn sync(&self) -> Result<()> {
        self.with_volume(b"/", |volume| match volume.is_writable() {
            true => volume.sync(),
            false => Ok(()),
        })
    }

    /// Returns true if the volume is open for writing.
    ///
    /// # Errors
    /// The volume is closed.
    pub fn is_writable(&self) -> Result<bool> {
        self.with_volume(b"/", |volume| Ok(volume.is_writable()))
    }

    /// Returns superblock information and usage.
    ///
    /// # Errors
    /// The volume is closed.
    pub fn info(&self) -> Result<Info> {
        self.with_volume(b"/", |volume| Ok(volume.info()))
    }

    /// Returns the attributes of a file, as `stat` shows them.
    ///
    /// # Errors
    /// The file does not exist, or is damaged.
    pub fn stat(&self, path: &[u8], follow: Follow) -> Result<Attributes> {
        self.with_volume(path, |volume| volume.attributes(resolve_path(volume, path, follow)?))
    }

    /// Returns the names in a directory, sorted, without `.` and `..`. On damage, returns the
    /// readable names and the error.
    ///
    /// # Errors
    /// The path is no directory, or cannot be read.
    pub fn list(&self, path: &[u8]) -> Result<(Vec<DirEntry>, Option<Error>)> {
        let label = self.path_label(path);
        self.try_with_volume(|volume| {
            let dir = resolve_path(volume, path, Follow::Yes)
                .map_err(|error| with_context(&label, error))?;
            let mut damage = None;
            let mut complain = |error: &anyhow::Error| {
                damage.get_or_insert_with(|| {
                    Error::new(Errno::UCLEAN, crate::messages::to_message(error))
                });
            };
            let listing = list_directory(volume, dir, &label, &mut complain)?;
            let mut all = Vec::with_capacity(listing.names.len());
            for entry in listing.names {
                let kind = match entry.kind {
                    Some(kind) => Ok(kind),
                    None => volume.inode(entry.inode).map(|inode| inode.kind),
                };
                match kind {
                    Ok(kind) => {
                        all.push(DirEntry { name: entry.name, inode: entry.inode.0, kind });
                    }
                    Err(error) => complain(&with_context(&label, error)),
                }
            }
            Ok((all, damage))
        })
    }

    /// Returns the target of a symbolic link.
    ///
    /// # Errors
    /// The path is no symbolic link.
    pub fn read_link(&self, path: &[u8]) -> Result<Vec<u8>> {
        self.with_volume(path, |volume| volume.read_link(resolve_path(volume, path, Follow::No)?))
    }

    /// Returns the names of the extended attributes.
    ///
    /// # Errors
    /// The file does not exist, or is damaged.
    pub fn xattr_names(&self, path: &[u8], follow: Follow) -> Result<Vec<Vec<u8>>> {
        self.with_volume(path, |volume| volume.xattr_names(resolve_path(volume, path, follow)?))
    }

    /// Returns an extended attribute by its full name (`user.x`).
    ///
    /// # Errors
    /// `ENODATA` if there is no such attribute.
    pub fn xattr(&self, path: &[u8], name: &[u8], follow: Follow) -> Result<Vec<u8>> {
        self.with_volume(path, |volume| volume.xattr(resolve_path(volume, path, follow)?, name))
    }

    /// Sets an extended attribute.
    ///
    /// # Errors
    /// `EEXIST` and `ENODATA` according to `how`; the volume is full, or the name is not supported.
    pub fn set_xattr(
        &self,
        path: &[u8],
        name: &[u8],
        value: &[u8],
        how: XattrSet,
        follow: Follow,
    ) -> Result<()> {
        self.with_volume(path, |volume| {
            volume.set_xattr(resolve_path(volume, path, follow)?, name, value, how, false)
        })
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// `ENODATA` if there is no such attribute.
    pub fn remove_xattr(&self, path: &[u8], name: &[u8], follow: Follow) -> Result<()> {
        self.with_volume(path, |volume| {
            volume.remove_xattr(resolve_path(volume, path, follow)?, name)
        })
    }

    /// Creates a directory.
    ///
    /// # Errors
    /// The name exists, or the volume is full.
    pub fn make_dir(&self, path: &[u8], mode: u32) -> Result<()> {
        self.create_node(path, FileType::Directory, mode, b"")
    }

    /// Creates a symbolic link to `target`.
    ///
    /// # Errors
    /// As [`Volume::make_dir`].
    pub fn symlink(&self, target: &[u8], path: &[u8]) -> Result<()> {
        self.create_node(path, FileType::Symlink, 0o777, target)
    }

    /// Creates a hard link.
    ///
    /// # Errors
    /// As [`Volume::make_dir`]; directories cannot have hard links.
    pub fn link(&self, from: &[u8], to: &[u8]) -> Result<()> {
        self.with_volume(to, |volume| {
            let inode = resolve_path(volume, from, Follow::No)?;
            let (dir, name) = resolve_parent(volume, to)?;
            volume.link(inode, dir, name)
        })
    }

    /// Removes a file that is no directory.
    ///
    /// # Errors
    /// The file does not exist, or is a directory.
    pub fn unlink(&self, path: &[u8]) -> Result<()> {
        self.with_volume(path, |volume| {
            let (dir, name) = resolve_parent(volume, path)?;
            volume.unlink(dir, name)
        })
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// The path does not exist, is no directory, or is not empty.
    pub fn remove_dir(&self, path: &[u8]) -> Result<()> {
        self.with_volume(path, |volume| {
            let (dir, name) = resolve_parent(volume, path)?;
            volume.remove_directory(dir, name)
        })
    }

    /// Renames a file or directory.
    ///
    /// # Errors
    /// `from` does not exist, or `to` must not or cannot be replaced.
    pub fn rename(&self, from: &[u8], to: &[u8], how: RenameMode) -> Result<()> {
        self.with_volume(from, |volume| {
            let (dir, name) = resolve_parent(volume, from)?;
            let (to_dir, to_name) = resolve_parent(volume, to)?;
            volume.rename(dir, name, to_dir, to_name, how)
        })
    }

    /// Changes mode, owner, times and length.
    ///
    /// # Errors
    /// The file does not exist, or cannot be changed.
    pub fn set_attributes(
        &self,
        path: &[u8],
        follow: Follow,
        change: &AttributeChange,
    ) -> Result<()> {
        self.with_volume(path, |volume| {
            volume.set_attributes(resolve_path(volume, path, follow)?, change).map(drop)
        })
    }

    /// Writes a tree as an archive, as `draconis tar` does. Skips items that cannot be read, and
    /// returns a message for each.
    ///
    /// # Errors
    /// The top does not exist, or writing fails.
    pub fn tar(
        &self,
        path: &[u8],
        sparse: SparseFormat,
        out: &mut (dyn Write + '_),
    ) -> Result<Vec<String>> {
        let label = self.path_label(path);
        self.try_with_volume(|volume| {
            let top = resolve_path(volume, path, Follow::Yes)
                .map_err(|error| with_context(&label, error))?;
            let prefix = split_parent(path).1.to_vec();
            let how = TarOptions { prefix, sparse, is_layer: false };
            let mut left_out = SkippedMessages(vec![]);
            let written = tar::write_archive(volume, (top, &label), how, &mut left_out, out);
            written.with_context(|| label.clone())?;
            Ok(left_out.0)
        })
    }

    fn create_node(&self, path: &[u8], kind: FileType, mode: u32, target: &[u8]) -> Result<()> {
        self.with_volume(path, |volume| {
            let new = self.new_node(kind, mode, target);
            volume.create_by_path(volume.root(), path, &new).map(drop)
        })
    }

    /// Returns a new node that belongs to the calling user.
    pub(crate) fn new_node<'a>(&self, kind: FileType, mode: u32, target: &'a [u8]) -> NewNode<'a> {
        let (uid, gid) = self.owner;
        NewNode { kind, mode: mode & 0o7777, uid, gid, device: (0, 0), target }
    }

    /// Returns the name of a path for messages.
    pub(crate) fn path_label(&self, path: &[u8]) -> String {
        let slash = if path.starts_with(b"/") { "" } else { "/" };
        format!("{}:{slash}{}", self.image.shown(), escape_control_chars(path))
    }

    /// Calls `work` with the open volume; adds `path` to its errors.
    pub(crate) fn with_volume<T>(
        &self,
        path: &[u8],
        work: impl FnOnce(&draconis_ext::Volume) -> draconis_ext::Result<T>,
    ) -> Result<T> {
        self.try_with_volume(|volume| {
            work(volume).map_err(|error| with_context(&self.path_label(path), error))
        })
    }

    fn lock(&self) -> Result<&VolumeLock> {
        Ok(self.inner.get().with_context(|| self.image.shown().to_string())?)
    }

    fn try_with_volume<T>(
        &self,
        work: impl FnOnce(&draconis_ext::Volume) -> anyhow::Result<T>,
    ) -> Result<T> {
        // A nested call (a reader of an archive) must not wait for a `close` that waits for the
        // outer call.
        let inner = self.lock()?.read();
        let Some((volume, _)) = &*inner else {
            let text = format!("{}: the volume was closed", self.image.shown());
            return Err(Error::new(Errno::BADF, text));
        };
        Ok(work(volume)?)
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        if self.inner.get().is_ok()
            && let Err(error) = self.close()
        {
            log::warn!("{error}");
        }
    }
}

/// Messages about items that an archive skips.
struct SkippedMessages(Vec<String>);

impl TarObserver for SkippedMessages {
    fn on_start(&mut self, _: u64) {}

    fn on_written(&mut self, _: u64) {}

    fn on_error(&mut self, error: &anyhow::Error) {
        if self.0.len() < MAX_ARCHIVE_MESSAGES {
            self.0.push(crate::messages::to_message(error));
        }
    }
}

/// Locates and opens the volume on a disk, for writing.
///
/// # Errors
/// There is no volume, or it has unsupported features.
pub fn open_writable(
    image: &Path,
    disk: Arc<dyn Disk>,
    behind: &[Arc<dyn Disk>],
    options: &MountOptions,
    clock: Arc<dyn Fn() -> Time + Send + Sync>,
) -> anyhow::Result<(draconis_ext::Volume, MmpGuard)> {
    let part = locate_for_writing(disk, behind, options);
    let disk = part.with_context(|| image.shown().to_string())?.disk;
    let held = mmp_claim::claim_volume(image, &disk, clock())?;
    let writing = WriteOptions {
        clock,
        dirty_bytes: DIRTY_BYTES,
        atime: AccessTimes::Never,
        // Only disks in a store discard; files keep their allocated blocks.
        discard: disk.properties().discards,
    };
    let opened = draconis_ext::Volume::open_with_claim(
        disk.clone(),
        OpenOptions::default(),
        writing,
        held.claim(),
    );
    let volume = opened.map_err(|error| image::open_volume_error(image, &*disk, error.into()))?;
    Ok((volume, held))
}

/// Returns the current time.
pub fn current_time() -> Time {
    match std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH) {
        Ok(now) => Time {
            seconds: i64::try_from(now.as_secs()).unwrap_or(i64::MAX),
            nanoseconds: now.subsec_nanos(),
        },
        Err(_) => Time::default(),
    }
}

fn open_readable(image: &Path, place: &VolumeLocation) -> anyhow::Result<Arc<dyn Disk>> {
    let (file, options) = place.to_read(image);
    let whole = match StoreDiskName::parse(&file) {
        Some(name) => name.open_shared()?.start()?,
        None => open_readable_file(&file)?,
    };
    let behind = image::BackingFiles::open(&file, &place.backing)?.start_disks();
    let part = locate_volume(whole, &behind, &options);
    Ok(part.with_context(|| image.shown().to_string())?.disk)
}

/// Opens a file or device read-only; decompresses it if its format has no index.
fn open_readable_file(image: &Path) -> anyhow::Result<Arc<dyn Disk>> {
    let start = |file| -> anyhow::Result<Arc<dyn Disk>> {
        Ok(Arc::new(host_file::open_file(file, image, false)?.start()))
    };
    let file = host_file::open_shared(image)?;
    let packed = detect(&file, image)?;
    let whole = start(file)?;
    match packed {
        Some(packed)
            if !is_seekable(whole.clone()).with_context(|| image.shown().to_string())? =>
        {
            start(packed.unpack(image, &mut |_| {})?)
        }
        _ => Ok(whole),
    }
}

pub(crate) fn resolve_path(
    volume: &draconis_ext::Volume,
    path: &[u8],
    follow: Follow,
) -> draconis_ext::Result<InodeNumber> {
    volume.resolve(volume.root(), path, follow)
}

/// Returns the parent directory and the last name of a path.
pub(crate) fn resolve_parent<'p>(
    volume: &draconis_ext::Volume,
    path: &'p [u8],
) -> draconis_ext::Result<(InodeNumber, &'p [u8])> {
    volume.resolve_parent(volume.root(), path)
}

/// Opens the target of a resize, and its backing files.
fn open_resize_target(
    image: &Path,
    place: &VolumeLocation,
) -> anyhow::Result<(resize::ResizeTarget, image::BackingFiles)> {
    let base = match StoreDiskName::parse(image) {
        Some(name) => {
            resize::ResizeTarget::InStore(name.open_exclusive(place.force_raid_member)?.open()?)
        }
        None => resize::ResizeTarget::open_exclusive_file(image)?,
    };
    Ok((base, image::BackingFiles::open(image, &place.backing)?))
}
