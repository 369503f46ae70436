//! A volume that is open for a mount, and claimed.
//!
//! Law: while a descriptor of it exists, no other mount and no tool changes the volume, and none
//! reads it while the mount may write. For a block device, this includes the kernel's own mounts.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use draconis_device::{LockMode, lock_file, try_lock_file};
use draconis_types::path_bytes::ShowPath;
use rustix::fs::{MemfdFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::identity::{describe_errno, file_identity};
use crate::options::MountOptions;
use crate::parts;
use crate::remote_disk::RemoteCredentials;
use crate::store_keeper::StoreDiskHandle;

/// Length of the part of a volume's name that is used as the name of a memfd.
const MAX_MEMFD_NAME_BYTES: usize = 240;
/// Length of a memfd that represents a volume: longer than any block of one.
const PLACEHOLDER_MEMFD_BYTES: u64 = 1 << 20;
/// Maximum number of backing and extent files.
const MAX_BACKING_FILES: usize = 64;
/// Retry interval while the volume is in use.
const OPEN_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// A volume that was opened and claimed.
pub(crate) struct ClaimedVolume {
    /// The file or store disk that the worker uses.
    pub(crate) source: VolumeSource,
    /// The reason why it is read-only, if writing was requested.
    pub(crate) note: Option<String>,
    /// Other descriptors that live as long as the mount.
    pub(crate) guards: VolumeGuards,
}

/// Source of a volume's bytes.
pub(crate) enum VolumeSource {
    /// In a file or block device.
    File {
        /// Read-only descriptor for the worker.
        image: OwnedFd,
        /// Descriptor of the disk service, if the volume may be written. It holds the claim then.
        disk: Option<OwnedFd>,
    },
    /// In a store, which another process owns for all of its disks.
    Store(StoreDiskHandle),
}

impl VolumeSource {
    pub(crate) fn is_read_only(&self) -> bool {
        match self {
            Self::File { disk, .. } => disk.is_none(),
            Self::Store(disk) => disk.read_only,
        }
    }
}

/// Descriptors of a mount's volume beside the worker's.
pub(crate) struct VolumeGuards {
    /// For a loop device of a writable file. It has no claim, or the loop device would hold the
    /// claim as long as it exists.
    backing: Option<OwnedFd>,
    /// `O_EXCL` descriptor of a block device: excludes mounts of the kernel, and other exclusive
    /// users.
    guard: Option<OwnedFd>,
}

/// A block device as a mount's source, with the descriptor that keeps it until the mount exists.
pub(crate) struct SourceDevice {
    pub(crate) path: PathBuf,
    _device: Option<OwnedFd>,
}

/// Reason why it was not opened.
enum OpenFailure {
    InUse(String),
    Failed(String),
}

impl From<String> for OpenFailure {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

impl ClaimedVolume {
    /// Opens a disk in a store. `sockets` is the directory of the store keepers' sockets; a remote
    /// store needs `means`.
    pub(crate) fn open_in_store(
        sockets: &Path,
        store: &Path,
        disk: &str,
        options: &MountOptions,
        means: Option<&RemoteCredentials>,
    ) -> Result<Self, String> {
        let (disk, note) = StoreDiskHandle::open(sockets, store, disk, options, means)?;
        let guards = VolumeGuards { backing: None, guard: None };
        Ok(Self { source: VolumeSource::Store(disk), note, guards })
    }

    /// Opens a volume for as long as the descriptors live. Retries for at most `wait`, since a
    /// volume that was just unmounted is about to be released.
    pub(crate) fn open(volume: &Path, read_only: bool, wait: Duration) -> Result<Self, String> {
        retry_while_in_use(wait, || Self::try_open(volume, read_only))
    }

    fn try_open(volume: &Path, read_only: bool) -> Result<Self, OpenFailure> {
        let guard = open_guard(volume)?;
        let mut note = None;
        if !read_only {
            match open(volume, OFlags::RDWR) {
                Ok(disk) => {
                    lock_volume(volume, &disk, LockMode::Exclusive)?;
                    let image = reopen_fd(&disk, OFlags::RDONLY)
                        .map_err(|errno| describe_errno(volume, errno))?;
                    let backing = reopen_fd(&disk, OFlags::RDWR).ok().filter(|_| guard.is_none());
                    let source = VolumeSource::File { image, disk: Some(disk) };
                    return Ok(Self { source, note, guards: VolumeGuards { backing, guard } });
                }
                Err(errno @ (Errno::ACCESS | Errno::PERM | Errno::ROFS)) => {
                    note = Some(format!("read-only: {}", describe_errno(volume, errno)));
                }
                Err(errno) => return Err(describe_errno(volume, errno).into()),
            }
        }
        let image = open(volume, OFlags::RDONLY).map_err(|errno| describe_errno(volume, errno))?;
        lock_volume(volume, &image, LockMode::Shared)?;
        let source = VolumeSource::File { image, disk: None };
        Ok(Self { source, note, guards: VolumeGuards { backing: None, guard } })
    }
}

impl VolumeGuards {
    /// Returns the file of a loop device, and the guard of a block device.
    pub(crate) fn fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [&self.backing, &self.guard].map(|fd| fd.as_ref().map(AsFd::as_fd))
    }

    /// Restores the guards from these descriptors.
    pub(crate) fn from_fds(backing: Option<OwnedFd>, guard: Option<OwnedFd>) -> Self {
        Self { backing, guard }
    }

    /// Returns the volume as a block device: itself, or a loop device of it. Releases the guard,
    /// since the mount will exclude others.
    ///
    /// # Errors
    /// The system's error, for the user.
    pub(crate) fn attach_block_device(&mut self, volume: &Path) -> Result<SourceDevice, String> {
        if self.guard.take().is_some() {
            return Ok(SourceDevice { path: volume.to_path_buf(), _device: None });
        }
        let file = self.backing.take().ok_or("the volume is not written")?;
        let attached = crate::loop_device::attach(&file);
        let (path, device) = attached
            .map_err(|error| format!("no loop device can be had: {}", crate::error_text(&error)))?;
        Ok(SourceDevice { path, _device: Some(device) })
    }

    /// Creates a memfd as the file of a volume that is in a store; nothing is read or written
    /// there.
    ///
    /// # Errors
    /// The system's error, for the user.
    pub(crate) fn create_memfd(&mut self, volume: &Path) -> Result<(), String> {
        let name: Vec<u8> =
            volume.as_os_str().as_bytes().iter().copied().take(MAX_MEMFD_NAME_BYTES).collect();
        let made = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).and_then(|file| {
            rustix::fs::ftruncate(&file, PLACEHOLDER_MEMFD_BYTES)?;
            Ok(file)
        });
        let file = made.map_err(|errno| format!("no file in memory can be had: {errno}"))?;
        self.backing = Some(file);
        Ok(())
    }

    /// Reacquires the guard of a block device that was not mounted after all. Retries for at most
    /// `wait`.
    ///
    /// # Errors
    /// A message for the user.
    pub(crate) fn reacquire_guard(&mut self, volume: &Path, wait: Duration) -> Result<(), String> {
        self.guard = retry_while_in_use(wait, || open_guard(volume))?;
        Ok(())
    }
}

fn retry_while_in_use<T>(
    wait: Duration,
    mut open: impl FnMut() -> Result<T, OpenFailure>,
) -> Result<T, String> {
    let until = Instant::now() + wait;
    loop {
        match open() {
            Ok(opened) => return Ok(opened),
            Err(OpenFailure::InUse(_)) if Instant::now() < until => {
                std::thread::sleep(OPEN_RETRY_INTERVAL);
            }
            Err(OpenFailure::InUse(why) | OpenFailure::Failed(why)) => return Err(why),
        }
    }
}

/// Opens the extent files and then the backing files of the disk image `volume`, the nearest first,
/// for the worker to read. Others may read them meanwhile, but not change them, since that would
/// corrupt the image.
///
/// # Errors
/// A message for the user.
pub(crate) fn open_backing_files(
    volume: &Path,
    options: &MountOptions,
    image: (u64, u64),
) -> Result<Vec<OwnedFd>, String> {
    let count = options.parts.len() + options.backing.len();
    if count > MAX_BACKING_FILES {
        return Err(format!("there can be {MAX_BACKING_FILES} files behind an image, not {count}"));
    }
    let open_part = |name: &PathBuf| {
        let file = volume.with_file_name(name);
        let fd =
            parts::open_extent_file(volume, name).map_err(|errno| describe_errno(&file, errno))?;
        lock_backing_file(fd, &file)
    };
    let mut known = vec![image];
    let mut open_one = |file: &PathBuf| {
        // Checked first: opening anything but a file or device may hang.
        let found = file_identity(file)?;
        if known.contains(&found) {
            let name = file.shown();
            return Err(format!("{name} cannot lie behind itself: --backing names each file once"));
        }
        known.push(found);
        let fd = open(file, OFlags::RDONLY).map_err(|errno| describe_errno(file, errno))?;
        lock_backing_file(fd, file)
    };
    let parts = options.parts.iter().map(open_part);
    parts.chain(options.backing.iter().map(&mut open_one)).collect()
}

fn lock_backing_file(fd: OwnedFd, file: &Path) -> Result<OwnedFd, String> {
    match lock_file(&fd, LockMode::Shared) {
        Ok(()) => Ok(fd),
        Err(Errno::WOULDBLOCK) => {
            Err(format!("{} is in use by another mount or tool", file.shown()))
        }
        Err(other) => Err(describe_errno(file, other)),
    }
}

fn open(volume: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(volume, flags | OFlags::CLOEXEC, Mode::empty())
}

/// Opens a block device with `O_EXCL`, which fails while the kernel has it mounted.
fn open_guard(volume: &Path) -> Result<Option<OwnedFd>, OpenFailure> {
    if file_identity(volume)?.1 != u64::MAX {
        return Ok(None);
    }
    open(volume, OFlags::RDONLY | OFlags::EXCL).map(Some).map_err(|errno| match errno {
        Errno::BUSY => OpenFailure::InUse(format!(
            "{} is in use: it is mounted, or another program has it for itself",
            volume.shown()
        )),
        other => describe_errno(volume, other).into(),
    })
}

fn lock_volume(volume: &Path, fd: &OwnedFd, how: LockMode) -> Result<(), OpenFailure> {
    try_lock_file(fd, how).map_err(|errno| match errno {
        Errno::WOULDBLOCK => {
            OpenFailure::InUse(format!("{} is in use by another mount or tool", volume.shown()))
        }
        other => describe_errno(volume, other).into(),
    })
}

/// Opens another descriptor of the same file, even if its name leads elsewhere by now.
fn reopen_fd(fd: &OwnedFd, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let same = format!("/proc/self/fd/{}", fd.as_raw_fd());
    rustix::fs::open(same, flags | OFlags::CLOEXEC, Mode::empty())
}
