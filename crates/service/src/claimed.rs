//! A volume that was opened for a mount, and is nobody else's meanwhile.
//!
//! Law: as long as a descriptor of it lives no other mount and no tool has the volume; of a
//! block device the kernel's own mounts count, too.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use draconis_device::{Claim, claim};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

/// How often it is tried again while the volume is in use.
const TRY_EVERY: Duration = Duration::from_millis(5);

/// A volume that was opened and claimed.
pub(crate) struct Claimed {
    /// For the worker: read-only.
    pub(crate) image: OwnedFd,
    /// For the disk service, if the volume may be written. It holds the claim then.
    pub(crate) disk: Option<OwnedFd>,
    /// Why it may not be, if that was wanted.
    pub(crate) note: Option<String>,
}

/// Why it was not opened.
enum NotOpened {
    InUse(String),
    Failed(String),
}

impl From<String> for NotOpened {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

impl Claimed {
    /// Opens a volume for as long as the descriptors live. What was just unmounted is on its
    /// way to be free: that is waited for, `wait` at most.
    pub(crate) fn open(volume: &Path, read_only: bool, wait: Duration) -> Result<Self, String> {
        let until = Instant::now() + wait;
        loop {
            match Self::try_open(volume, read_only) {
                Ok(claimed) => return Ok(claimed),
                Err(NotOpened::InUse(_)) if Instant::now() < until => {
                    std::thread::sleep(TRY_EVERY);
                }
                Err(NotOpened::InUse(why) | NotOpened::Failed(why)) => return Err(why),
            }
        }
    }

    fn try_open(volume: &Path, read_only: bool) -> Result<Self, NotOpened> {
        let mut note = None;
        if !read_only {
            match open(volume, OFlags::RDWR)? {
                Ok(disk) => {
                    claim_alone(volume, &disk)?;
                    let image = for_reading(&disk).map_err(|errno| said(volume, errno))?;
                    return Ok(Self { image, disk: Some(disk), note });
                }
                Err(errno @ (Errno::ACCESS | Errno::PERM | Errno::ROFS)) => {
                    note = Some(format!("read-only: {}", said(volume, errno)));
                }
                Err(errno) => return Err(said(volume, errno).into()),
            }
        }
        let image = open(volume, OFlags::RDONLY)?.map_err(|errno| said(volume, errno))?;
        claim_alone(volume, &image)?;
        Ok(Self { image, disk: None, note })
    }
}

/// Device and inode number of a volume, or the device's own number.
///
/// # Errors
/// A sentence for the user.
pub(crate) fn identity(volume: &Path) -> Result<(u64, u64), String> {
    let stat = rustix::fs::stat(volume).map_err(|errno| said(volume, errno))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => Ok((stat.st_rdev, u64::MAX)),
        FileType::RegularFile => Ok((stat.st_dev, stat.st_ino)),
        _ => Err(format!("{} is neither a file nor a block device", volume.display())),
    }
}

/// What the system said of a path, as a sentence.
pub(crate) fn said(path: &Path, errno: Errno) -> String {
    format!("{}: {}", path.display(), crate::sentence(&errno.into()))
}

fn open(volume: &Path, flags: OFlags) -> Result<rustix::io::Result<OwnedFd>, NotOpened> {
    let is_device = identity(volume)?.1 == u64::MAX;
    // O_EXCL on a device: refused while the kernel has it mounted.
    let exclusive = if is_device { OFlags::EXCL } else { OFlags::empty() };
    let opened = rustix::fs::open(volume, flags | exclusive | OFlags::CLOEXEC, Mode::empty());
    match opened {
        Err(Errno::BUSY) => {
            let name = volume.display();
            Err(NotOpened::InUse(format!(
                "{name} is in use: the kernel has it mounted, or another program has it for itself"
            )))
        }
        opened => Ok(opened),
    }
}

fn claim_alone(volume: &Path, fd: &OwnedFd) -> Result<(), NotOpened> {
    claim(fd, Claim::Alone).map_err(|errno| match errno {
        Errno::WOULDBLOCK => {
            NotOpened::InUse(format!("{} is in use by another mount or tool", volume.display()))
        }
        other => said(volume, other).into(),
    })
}

/// A second descriptor of the same file that cannot write, whatever its name leads to by
/// now.
fn for_reading(fd: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let same = format!("/proc/self/fd/{}", fd.as_raw_fd());
    rustix::fs::open(same, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}
