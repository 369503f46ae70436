//! I/O counters of block devices.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Unit of the kernel's counters, whatever the device's sector size is.
const SECTOR_BYTES: u64 = 512;

/// A block device.
#[derive(Clone, Debug)]
pub struct BlockDeviceCounters {
    sys: PathBuf,
}

impl BlockDeviceCounters {
    /// Returns the device of `path`, if it has counters.
    pub fn of_path(path: &Path) -> Option<Self> {
        let number = std::fs::metadata(path).ok()?.dev();
        Self::from_device_number(number)
    }

    /// Returns the device with a device number.
    pub fn from_device_number(number: u64) -> Option<Self> {
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let sys = std::fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
        sys.join("stat").exists().then_some(Self { sys })
    }

    /// Returns the bytes read since boot.
    pub fn read_bytes(&self) -> Option<u64> {
        let stat = std::fs::read_to_string(self.sys.join("stat")).ok()?;
        stat_field(&stat, 2).map(|sectors| sectors * SECTOR_BYTES)
    }

    /// Returns the writes and flushes since boot; flushes are those of the whole disk.
    pub fn writes_and_flushes(&self) -> Option<(u64, u64)> {
        let own = std::fs::read_to_string(self.sys.join("stat")).ok()?;
        let disk = if self.sys.join("partition").exists() { "../stat" } else { "stat" };
        let disk = std::fs::read_to_string(self.sys.join(disk)).ok()?;
        Some((stat_field(&own, 4)?, stat_field(&disk, 15)?))
    }

    /// Returns the device name.
    pub fn name(&self) -> String {
        self.sys.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Returns a queue attribute; a partition has those of its disk.
    pub fn queue_attribute(&self, what: &str) -> Option<String> {
        let own = self.sys.join("queue").join(what);
        let path = if own.exists() { own } else { self.sys.join("../queue").join(what) };
        std::fs::read_to_string(path).ok().map(|text| text.trim().to_string())
    }
}

/// Returns a field of a `stat` line: 2 is sectors read, 4 writes, 15 flushes.
fn stat_field(stat: &str, nth: usize) -> Option<u64> {
    stat.split_whitespace().nth(nth)?.parse().ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn stat_fields_are_found_by_index() {
        let stat = "  10  2  4096 7 33 0 0 0 0 1 2 0 0 0 0 44 1";
        assert_eq!(super::stat_field(stat, 2), Some(4096));
        assert_eq!(super::stat_field(stat, 4), Some(33));
        assert_eq!(super::stat_field(stat, 15), Some(44));
        assert_eq!(super::stat_field("", 2), None);
    }
}
