//! What the system tells of a file or device: its length, the unit it is written in, and
//! whether it takes discards.

use std::os::fd::OwnedFd;

use rustix::fs::FileType;

use crate::raw::{DISCARD_UNIT_BYTES, PUNCH};

pub(crate) fn len_bytes(fd: &OwnedFd) -> std::io::Result<u64> {
    let stat = rustix::fs::fstat(fd)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(u64::try_from(stat.st_size).unwrap_or(0)),
        // A seek tells a device's length without an ioctl a sandbox would have to allow.
        FileType::BlockDevice => Ok(rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0))?),
        _ => Err(std::io::Error::new(
            std::io::ErrorKind::InvalidInput,
            "neither a file nor a block device",
        )),
    }
}

/// Whether it is a file, whose length can change.
pub(crate) fn is_file(fd: &OwnedFd) -> bool {
    let stat = rustix::fs::fstat(fd);
    stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
}

/// Whether a file or device can give room back. A file is asked with a hole behind its end.
pub(crate) fn can_discard(fd: &OwnedFd, len_bytes: u64) -> bool {
    let Ok(stat) = rustix::fs::fstat(fd) else { return false };
    if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
        return read_queue_attribute(stat.st_rdev, "discard_max_bytes")
            .is_some_and(|bytes| bytes > 0);
    }
    let behind = len_bytes.next_multiple_of(DISCARD_UNIT_BYTES);
    rustix::fs::fallocate(fd, PUNCH, behind, DISCARD_UNIT_BYTES).is_ok()
}

/// The unit in which a file or device says that it is written, in bytes: what is shorter is
/// read, changed and written back somewhere below. A device tells what is physically one
/// block, and what it likes best if that is no more than 16 KiB (with several disks it is a
/// stripe, which is no unit). A file has its file system's blocks besides.
///
/// None where there is no answer, as of memory and the network.
pub fn write_unit_bytes(fd: impl std::os::fd::AsFd) -> Option<u32> {
    const MOST: u64 = 16 << 10;
    let stat = rustix::fs::fstat(&fd).ok()?;
    let (device, block) = match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => (stat.st_rdev, None),
        _ => (stat.st_dev, rustix::fs::fstatvfs(&fd).ok().map(|system| system.f_frsize)),
    };
    let queue =
        ["physical_block_size", "optimal_io_size"].map(|name| read_queue_attribute(device, name));
    let told = queue.into_iter().chain([block]).flatten();
    let unit = told.filter(|bytes| bytes.is_power_of_two() && *bytes <= MOST).max()?;
    u32::try_from(unit).ok()
}

/// A number that the kernel tells of a block device's queue.
pub(super) fn read_queue_attribute(device: rustix::fs::Dev, name: &str) -> Option<u64> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    // A partition has its queue in the directory of the whole device.
    let said = ["queue", "../queue"].iter().find_map(|queue| {
        let path = format!("/sys/dev/block/{major}:{minor}/{queue}/{name}");
        std::fs::read_to_string(path).ok()
    });
    said?.trim().parse().ok()
}
