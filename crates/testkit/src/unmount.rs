//! Unmounting what drivers of the kernel have mounted.

use std::fs::OpenOptions;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::wait::wait_until;

/// Unmounts `at`, if it is a mount point, and waits until the volume is written and its device is
/// free. Others can hold both for a moment after `umount(8)` has returned: a child between its fork
/// and its exec, a worker that has a copy of the mount table until it is confined.
pub fn unmount_and_wait(at: &Path) {
    let number = |path: &Path| std::fs::metadata(path).map(|it| it.dev()).ok();
    if number(at) == number(&at.join("..")) {
        return;
    }
    let device = number(at).and_then(find_device);
    wait_until(&format!("{} is unmounted", at.display()), || {
        // What it says is that the mount is busy.
        Command::new("umount").arg(at).output().is_ok_and(|output| output.status.success())
    });
    if let Some(device) = device {
        wait_until(&format!("{} is free", device.path.display()), || !device.is_mounted());
    }
}

/// A block device and the file behind it, if it is a loop device.
struct MountedDevice {
    path: PathBuf,
    backing_file: PathBuf,
    backing_name: Option<String>,
}

/// Finds the block device with a number; `None` for file systems without one.
fn find_device(number: u64) -> Option<MountedDevice> {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let sys = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let about = std::fs::read_to_string(sys.join("uevent")).ok()?;
    let name = about.lines().find_map(|line| line.strip_prefix("DEVNAME="))?;
    let backing_file = sys.join("loop/backing_file");
    let backing_name = std::fs::read_to_string(&backing_file).ok();
    Some(MountedDevice { path: Path::new("/dev").join(name), backing_file, backing_name })
}

impl MountedDevice {
    /// Returns true while a file system has the device. A loop device can have another file by now.
    fn is_mounted(&self) -> bool {
        if std::fs::read_to_string(&self.backing_file).ok() != self.backing_name {
            return false;
        }
        let exclusive = OpenOptions::new()
            .read(true)
            .custom_flags(rustix::fs::OFlags::EXCL.bits() as i32)
            .open(&self.path);
        exclusive.is_err_and(|error| error.kind() == std::io::ErrorKind::ResourceBusy)
    }
}
