//! What a block device was asked, as the kernel counts it.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Bytes of a sector in the kernel's counters, whatever the device's are.
const SECTOR_BYTES: u64 = 512;

/// The device that a file is on.
#[derive(Clone, Debug)]
pub struct Device {
    sys: PathBuf,
}

impl Device {
    /// The device behind `path`, if it is one with counters.
    pub fn of(path: &Path) -> Option<Self> {
        let number = std::fs::metadata(path).ok()?.dev();
        Self::numbered(number)
    }

    /// The device of that number.
    pub fn numbered(number: u64) -> Option<Self> {
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let sys = std::fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
        sys.join("stat").exists().then_some(Self { sys })
    }

    /// Bytes read since the machine started.
    pub fn read_bytes(&self) -> Option<u64> {
        let stat = std::fs::read_to_string(self.sys.join("stat")).ok()?;
        read_sectors(&stat).map(|sectors| sectors * SECTOR_BYTES)
    }

    /// Its name.
    pub fn name(&self) -> String {
        self.sys.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// What its queue says under that name; a partition has its disk's queue.
    pub fn queue(&self, what: &str) -> Option<String> {
        let own = self.sys.join("queue").join(what);
        let path = if own.exists() { own } else { self.sys.join("../queue").join(what) };
        std::fs::read_to_string(path).ok().map(|text| text.trim().to_string())
    }
}

/// The third figure of a `stat` line.
fn read_sectors(stat: &str) -> Option<u64> {
    stat.split_whitespace().nth(2)?.parse().ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_third_figure_counts_sectors_read() {
        assert_eq!(super::read_sectors("  10  2  4096 7 0 0 0 0 0 1 2"), Some(4096));
        assert_eq!(super::read_sectors(""), None);
    }
}
