//! A volume that was opened for a mount, and is of no other use meanwhile.
//!
//! Law: as long as a descriptor of it lives no other mount and no tool changes the volume, and
//! none reads it while the mount may write; of a block device the kernel's own mounts count, too.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use draconis_device::{LockMode, lock_file, try_lock_file};
use rustix::fs::{FileType, MemfdFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::options::MountOptions;
use crate::parts;
use crate::remote_disk::{self, RemoteCredentials};
use crate::store_keeper::StoreDiskHandle;

/// How much of a volume's name a file in memory is called by.
const MEMORY_NAME_MAX: usize = 240;
/// The length of a file that only stands for a volume: more than any block of one.
const STAND_IN_BYTES: u64 = 1 << 20;
/// Most files that lie behind each other.
const MAX_BACKING_FILES: usize = 64;
/// How often it is tried again while the volume is in use.
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// A volume that was opened and claimed.
pub(crate) struct ClaimedVolume {
    /// What the worker reads, and what is written for it.
    pub(crate) source: VolumeSource,
    /// Why it may not be, if that was wanted.
    pub(crate) note: Option<String>,
    /// What the mount needs besides.
    pub(crate) guards: VolumeGuards,
}

/// Where the bytes of a volume are.
pub(crate) enum VolumeSource {
    /// In a file or block device.
    File {
        /// For the worker: read-only.
        image: OwnedFd,
        /// For the disk service, if the volume may be written. It holds the claim then.
        disk: Option<OwnedFd>,
    },
    /// In a store, which another process has for all of its disks.
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

/// What a mount has of its volume, beside its worker.
pub(crate) struct VolumeGuards {
    /// For a loop device of a file that may be written: without the claim, or the device
    /// would hold it for as long as it is there.
    backing: Option<OwnedFd>,
    /// Of a block device: keeps the kernel from mounting it, and others that ask.
    guard: Option<OwnedFd>,
}

/// A block device that a mount can have as its source, and what keeps it until there is one.
pub(crate) struct SourceDevice {
    pub(crate) path: PathBuf,
    _device: Option<OwnedFd>,
}

/// Why it was not opened.
enum OpenFailure {
    InUse(String),
    Failed(String),
}

impl OpenFailure {
    fn into_message(self) -> String {
        let (Self::InUse(why) | Self::Failed(why)) = self;
        why
    }
}

impl From<String> for OpenFailure {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

impl ClaimedVolume {
    /// A disk in a store: `sockets` is where those have theirs who have stores. One that is
    /// elsewhere needs `means`.
    pub(crate) fn in_store(
        sockets: &Path,
        store: &Path,
        disk: &str,
        read_only: bool,
        means: Option<&RemoteCredentials>,
    ) -> Result<Self, String> {
        let (disk, note) = StoreDiskHandle::open(sockets, store, disk, read_only, means)?;
        let keep = VolumeGuards { backing: None, guard: None };
        Ok(Self { source: VolumeSource::Store(disk), note, guards: keep })
    }

    /// Opens a volume for as long as the descriptors live. What was just unmounted is
    /// about to be free: that is waited for, `wait` at most.
    pub(crate) fn open(volume: &Path, read_only: bool, wait: Duration) -> Result<Self, String> {
        let until = Instant::now() + wait;
        loop {
            match Self::try_open(volume, read_only) {
                Ok(claimed) => return Ok(claimed),
                Err(OpenFailure::InUse(_)) if Instant::now() < until => {
                    std::thread::sleep(RETRY_INTERVAL);
                }
                Err(OpenFailure::InUse(why) | OpenFailure::Failed(why)) => return Err(why),
            }
        }
    }

    fn try_open(volume: &Path, read_only: bool) -> Result<Self, OpenFailure> {
        let guard = guard(volume)?;
        let mut note = None;
        if !read_only {
            match open(volume, OFlags::RDWR) {
                Ok(disk) => {
                    claim_as(volume, &disk, LockMode::Exclusive)?;
                    let image = reopen(&disk, OFlags::RDONLY)
                        .map_err(|errno| describe_errno(volume, errno))?;
                    let backing = reopen(&disk, OFlags::RDWR).ok().filter(|_| guard.is_none());
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
        claim_as(volume, &image, LockMode::Shared)?;
        let source = VolumeSource::File { image, disk: None };
        Ok(Self { source, note, guards: VolumeGuards { backing: None, guard } })
    }
}

impl VolumeGuards {
    /// The file behind a loop device, and the guard of a block device.
    pub(crate) fn fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [&self.backing, &self.guard].map(|fd| fd.as_ref().map(AsFd::as_fd))
    }

    /// What has these parts.
    pub(crate) fn from_fds(backing: Option<OwnedFd>, guard: Option<OwnedFd>) -> Self {
        Self { backing, guard }
    }

    /// The volume as a block device: itself, or a loop device of it. A guard is given up,
    /// since the mount will be one.
    ///
    /// # Errors
    /// What the system says, for the user.
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

    /// Has a file in memory in the place of one, for a volume that is in a store: nothing is read
    /// or written there.
    ///
    /// # Errors
    /// What the system says, for the user.
    pub(crate) fn stand_in(&mut self, volume: &Path) -> Result<(), String> {
        let name: Vec<u8> =
            volume.as_os_str().as_bytes().iter().copied().take(MEMORY_NAME_MAX).collect();
        let made = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).and_then(|file| {
            rustix::fs::ftruncate(&file, STAND_IN_BYTES)?;
            Ok(file)
        });
        let file = made.map_err(|errno| format!("no file in memory can be had: {errno}"))?;
        self.backing = Some(file);
        Ok(())
    }

    /// Guards a block device again that was not mounted after all.
    ///
    /// # Errors
    /// A sentence for the user.
    pub(crate) fn reacquire_guard(&mut self, volume: &Path) -> Result<(), String> {
        self.guard = guard(volume).map_err(OpenFailure::into_message)?;
        Ok(())
    }
}

/// Opens what the disk image `volume` differs from or is in, for the worker to read: first its
/// parts, then what it differs from, the nearest first. Others may read it meanwhile; those who
/// change it are shut out, as the image would be nothing any more.
///
/// # Errors
/// A sentence for the user.
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
        let fd = parts::open(volume, name).map_err(|errno| describe_errno(&file, errno))?;
        claim_behind(fd, &file)
    };
    let mut known = vec![image];
    let mut open_one = |file: &PathBuf| {
        // Asked first: opening anything else may hang.
        let found = identity(file)?;
        if known.contains(&found) {
            let name = file.display();
            return Err(format!("{name} cannot lie behind itself: --backing names each file once"));
        }
        known.push(found);
        let fd = open(file, OFlags::RDONLY).map_err(|errno| describe_errno(file, errno))?;
        claim_behind(fd, file)
    };
    let parts = options.parts.iter().map(open_part);
    parts.chain(options.backing.iter().map(&mut open_one)).collect()
}

fn claim_behind(fd: OwnedFd, file: &Path) -> Result<OwnedFd, String> {
    match lock_file(&fd, LockMode::Shared) {
        Ok(()) => Ok(fd),
        Err(Errno::WOULDBLOCK) => {
            Err(format!("{} is in use by another mount or tool", file.display()))
        }
        Err(other) => Err(describe_errno(file, other)),
    }
}

/// Device and inode number of a volume, or the device's own number; of an address those that it has.
///
/// # Errors
/// A sentence for the user.
pub(crate) fn identity(volume: &Path) -> Result<(u64, u64), String> {
    if let Some(address) = remote_disk::parse_url(volume) {
        return Ok(remote_disk::url_identity(address));
    }
    let stat = rustix::fs::stat(volume).map_err(|errno| describe_errno(volume, errno))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => Ok((stat.st_rdev, u64::MAX)),
        FileType::RegularFile => Ok((stat.st_dev, stat.st_ino)),
        _ => Err(format!("{} is neither a file nor a block device", volume.display())),
    }
}

/// What the system said of a path, as a sentence.
pub(crate) fn describe_errno(path: &Path, errno: Errno) -> String {
    format!("{}: {}", path.display(), crate::error_text(&std::io::Error::from(errno)))
}

fn open(volume: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(volume, flags | OFlags::CLOEXEC, Mode::empty())
}

/// `O_EXCL` on a device: refused while the kernel has it mounted.
fn guard(volume: &Path) -> Result<Option<OwnedFd>, OpenFailure> {
    if identity(volume)?.1 != u64::MAX {
        return Ok(None);
    }
    open(volume, OFlags::RDONLY | OFlags::EXCL).map(Some).map_err(|errno| match errno {
        Errno::BUSY => OpenFailure::InUse(format!(
            "{} is in use: it is mounted, or another program has it for itself",
            volume.display()
        )),
        other => describe_errno(volume, other).into(),
    })
}

fn claim_as(volume: &Path, fd: &OwnedFd, how: LockMode) -> Result<(), OpenFailure> {
    try_lock_file(fd, how).map_err(|errno| match errno {
        Errno::WOULDBLOCK => {
            OpenFailure::InUse(format!("{} is in use by another mount or tool", volume.display()))
        }
        other => describe_errno(volume, other).into(),
    })
}

/// Another descriptor of the same file, whatever its name leads to by now.
fn reopen(fd: &OwnedFd, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let same = format!("/proc/self/fd/{}", fd.as_raw_fd());
    rustix::fs::open(same, flags | OFlags::CLOEXEC, Mode::empty())
}
