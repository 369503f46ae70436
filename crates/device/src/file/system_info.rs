//! Properties that the system reports for a file or device: length, write granularity, and support
//! of discards.

use std::os::fd::OwnedFd;

use rustix::fs::FileType;

use crate::raw::{DISCARD_UNIT_BYTES, PUNCH_HOLE_FLAGS};

pub(crate) fn len_bytes(fd: &OwnedFd) -> std::io::Result<u64> {
    let stat = rustix::fs::fstat(fd)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(u64::try_from(stat.st_size).unwrap_or(0)),
        // A seek returns a device's length without an ioctl, which a sandbox would have to allow.
        FileType::BlockDevice => Ok(rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0))?),
        _ => Err(std::io::Error::new(
            std::io::ErrorKind::InvalidInput,
            "neither a file nor a block device",
        )),
    }
}

/// Returns true for a regular file, whose length can change.
pub(crate) fn is_regular_file(fd: &OwnedFd) -> bool {
    let stat = rustix::fs::fstat(fd);
    stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
}

/// Returns true if a file or device supports discards. A file is tested with a hole past its end.
pub(crate) fn can_discard(fd: &OwnedFd, len_bytes: u64) -> bool {
    let Ok(stat) = rustix::fs::fstat(fd) else { return false };
    if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
        return read_queue_attribute(stat.st_rdev, "discard_max_bytes")
            .is_some_and(|bytes| bytes > 0);
    }
    let behind = len_bytes.next_multiple_of(DISCARD_UNIT_BYTES);
    rustix::fs::fallocate(fd, PUNCH_HOLE_FLAGS, behind, DISCARD_UNIT_BYTES).is_ok()
}

/// Returns the write granularity that the system reports, in bytes. Shorter writes cost a
/// read-modify-write below. For a device: its physical block, or its optimal I/O size if that is at
/// most 16 KiB (larger ones are RAID stripes). For a file also its file system's blocks.
///
/// `None` if nothing is reported, as for memory and network file systems.
pub fn write_unit_bytes(fd: impl std::os::fd::AsFd) -> Option<u32> {
    const MAX_OPTIMAL_IO_BYTES: u64 = 16 << 10;
    let stat = rustix::fs::fstat(&fd).ok()?;
    let (device, block) = match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => (stat.st_rdev, None),
        _ => (stat.st_dev, rustix::fs::fstatvfs(&fd).ok().map(|system| system.f_frsize)),
    };
    let queue =
        ["physical_block_size", "optimal_io_size"].map(|name| read_queue_attribute(device, name));
    let told = queue.into_iter().chain([block]).flatten();
    let unit =
        told.filter(|bytes| bytes.is_power_of_two() && *bytes <= MAX_OPTIMAL_IO_BYTES).max()?;
    u32::try_from(unit).ok()
}

/// Returns a number from sysfs of a block device's queue.
pub(super) fn read_queue_attribute(device: rustix::fs::Dev, name: &str) -> Option<u64> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    // A partition's queue is in the directory of the whole device.
    let said = ["queue", "../queue"].iter().find_map(|queue| {
        let path = format!("/sys/dev/block/{major}:{minor}/{queue}/{name}");
        std::fs::read_to_string(path).ok()
    });
    said?.trim().parse().ok()
}
