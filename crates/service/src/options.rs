//! What `-o` may hold.

use serde::{Deserialize, Serialize};

/// How a volume is mounted: everything `-o` can say, with its defaults.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountOptions {
    /// Mount read-only.
    pub read_only: bool,
    /// Let other users in.
    pub allow_other: bool,
    /// Let the kernel check permissions by the owners and modes on the volume.
    pub default_permissions: bool,
    /// Inodes that are kept parsed.
    pub inode_cache: usize,
    /// Files whose block lists are kept.
    pub block_map_cache: usize,
    /// File data that is kept, in bytes.
    pub data_cache_bytes: u64,
    /// Show `.` and `..` in native directory listings, too.
    pub dots: bool,
    /// First byte of the volume in the file or device.
    pub offset_bytes: Option<u64>,
    /// Number of the partition that is the volume.
    pub partition: Option<u32>,
    /// Honour device nodes (root only).
    pub dev: bool,
    /// Honour setuid bits (root only).
    pub suid: bool,
    /// Refuse to execute.
    pub no_exec: bool,
    /// Seconds after which a worker that does not answer is killed.
    pub deadline_s: u64,
    /// When reading a file changes its time of access.
    pub access_times: AccessTimes,
    /// Every change is durable before it is answered.
    pub sync: bool,
    /// So is every change of a directory.
    pub dir_sync: bool,
    /// Seconds after which changes are handed to the disk.
    pub commit_s: u64,
    /// Changes that may wait in memory for that, in bytes.
    pub dirty_bytes: u64,
    /// The kernel may keep what is written for a while before it says so.
    pub write_back: bool,
}

/// When reading a file changes its time of access, by the names of mount(8).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AccessTimes {
    /// `relatime`: if it is not later than the last change, or a day old.
    #[default]
    Relative,
    /// `noatime`: never.
    Never,
    /// `strictatime`: always.
    Strict,
    /// `lazytime`: in memory, and on disk with whatever else of the inode is written.
    Lazy,
}

impl From<AccessTimes> for draconis_ext::AccessTimes {
    fn from(times: AccessTimes) -> Self {
        match times {
            AccessTimes::Relative => Self::Relative,
            AccessTimes::Never => Self::Never,
            AccessTimes::Strict => Self::Strict,
            AccessTimes::Lazy => Self::Lazy,
        }
    }
}

impl Default for MountOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            allow_other: false,
            default_permissions: true,
            inode_cache: 16_384,
            block_map_cache: 4096,
            data_cache_bytes: 64 << 20,
            dots: false,
            offset_bytes: None,
            partition: None,
            dev: false,
            suid: false,
            no_exec: false,
            deadline_s: 30,
            access_times: AccessTimes::Relative,
            sync: false,
            dir_sync: false,
            commit_s: 5,
            dirty_bytes: 64 << 20,
            write_back: false,
        }
    }
}

/// What an inode takes in its cache, in bytes.
const INODE_BYTES: u64 = 512;
/// What an entry of the block-map cache takes, in bytes.
const BLOCK_MAP_BYTES: u64 = 2048;

/// What writing takes beside the changes themselves: what is on its way to the disk, and
/// a request and its reply for each thread that answers the kernel.
const WRITING_BYTES: u64 = 64 << 20;

/// An option that is not one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// Nobody knows it.
    #[error("unknown mount option '{0}'; see draconis-mount(1)")]
    Unknown(String),
    /// It needs a value, or another one.
    #[error("mount option '{name}' needs {what}, not '{value}'")]
    Value {
        /// The option.
        name: &'static str,
        /// What it needs.
        what: &'static str,
        /// What it got.
        value: String,
    },
    /// Two that exclude each other.
    #[error("mount options 'offset' and 'partition' exclude each other")]
    OffsetAndPartition,
}

/// Options of mount(8) that change nothing here: they are the default, or for others.
const WITHOUT_EFFECT: &[&str] = &[
    "defaults",
    "auto",
    "noauto",
    "user",
    "nouser",
    "users",
    "owner",
    "group",
    "nofail",
    "_netdev",
    "atime",
    "norelatime",
    "nolazytime",
    "diratime",
    "nodiratime",
    "silent",
    "loud",
    "exec",
];

impl MountOptions {
    /// Most private memory a worker with these options may have, in bytes: its caches, as
    /// large as they are when full, and 64 MiB for everything else.
    pub fn memory_limit_bytes(&self) -> u64 {
        let each = |entries: usize, bytes: u64| (entries as u64).saturating_mul(bytes);
        let writing = match self.read_only {
            true => 0,
            // What changes, and what changed before and is not written yet.
            false => self.dirty_bytes.saturating_mul(2).saturating_add(WRITING_BYTES),
        };
        (64_u64 << 20)
            .saturating_add(self.data_cache_bytes)
            .saturating_add(writing)
            .saturating_add(each(self.inode_cache, INODE_BYTES))
            .saturating_add(each(self.block_map_cache, BLOCK_MAP_BYTES))
    }

    /// Adds what a comma-separated list says; later ones win.
    ///
    /// # Errors
    /// See [`OptionError`].
    pub fn add(&mut self, list: &str) -> Result<(), OptionError> {
        for option in list.split(',').map(str::trim).filter(|option| !option.is_empty()) {
            self.add_one(option)?;
        }
        if self.offset_bytes.is_some() && self.partition.is_some() {
            return Err(OptionError::OffsetAndPartition);
        }
        Ok(())
    }

    fn add_one(&mut self, option: &str) -> Result<(), OptionError> {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        match name {
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "allow_other" => self.allow_other = true,
            "default_permissions" => self.default_permissions = true,
            "fakeroot" => self.default_permissions = false,
            "dots" => self.dots = true,
            "nodots" => self.dots = false,
            "dev" => self.dev = true,
            "nodev" => self.dev = false,
            "suid" => self.suid = true,
            "nosuid" => self.suid = false,
            "noexec" => self.no_exec = true,
            "inode_cache" => self.inode_cache = number("inode_cache", value)?,
            "block_map_cache" => self.block_map_cache = number("block_map_cache", value)?,
            "data_cache" => self.data_cache_bytes = size("data_cache", value)?,
            "offset" => self.offset_bytes = Some(size("offset", value)?),
            "partition" => self.partition = Some(number("partition", value)?),
            "relatime" | "norelatime" | "nolazytime" => self.access_times = AccessTimes::Relative,
            "noatime" => self.access_times = AccessTimes::Never,
            "strictatime" => self.access_times = AccessTimes::Strict,
            "lazytime" => self.access_times = AccessTimes::Lazy,
            "sync" => self.sync = true,
            "async" => (self.sync, self.dir_sync) = (false, false),
            "dirsync" => self.dir_sync = true,
            "writeback" => self.write_back = true,
            "nowriteback" => self.write_back = false,
            "commit" => self.commit_s = number("commit", value)?,
            "dirty" => self.dirty_bytes = size("dirty", value)?,
            "deadline" => self.deadline_s = number("deadline", value)?,
            // What mount(8) and systemd hand to every helper.
            _ if name.starts_with("x-") || WITHOUT_EFFECT.contains(&name) => {}
            _ => return Err(OptionError::Unknown(option.to_string())),
        }
        Ok(())
    }
}

fn number<T: std::str::FromStr>(name: &'static str, value: &str) -> Result<T, OptionError> {
    let what = "a whole number";
    value.parse().map_err(|_| OptionError::Value { name, what, value: value.to_string() })
}

/// A number of bytes, with K, M, G or T for powers of 1024.
fn size(name: &'static str, value: &str) -> Result<u64, OptionError> {
    parse_size(value).ok_or_else(|| {
        let what = "a size such as 4096, 64K, 128M or 1G";
        OptionError::Value { name, what, value: value.to_string() }
    })
}

/// A number of bytes as people write it: `4096`, `64K`, `128M`, `1G`, `2T`.
pub fn parse_size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(list: &str) -> Result<MountOptions, OptionError> {
        let mut options = MountOptions::default();
        options.add(list).map(|()| options)
    }

    #[test]
    fn options_are_read_and_later_ones_win() {
        let options =
            parse("rw,ro,allow_other,data_cache=128M,inode_cache=7,noatime,x-systemd.a=b");
        let options = options.unwrap();
        assert!(options.read_only && options.allow_other);
        assert_eq!((options.data_cache_bytes, options.inode_cache), (128 << 20, 7));
        assert_eq!(options.access_times, AccessTimes::Never);
        let options = parse("sync,dirsync,async,strictatime,commit=1,dirty=1M").unwrap();
        assert_eq!((options.sync, options.dir_sync, options.commit_s), (false, false, 1));
        assert_eq!((options.access_times, options.dirty_bytes), (AccessTimes::Strict, 1 << 20));
        assert_eq!(parse("").unwrap(), MountOptions::default());
    }

    #[test]
    fn what_is_wrong_is_named() {
        let said = |list| parse(list).unwrap_err().to_string();
        assert_eq!(said("ro,extra"), "unknown mount option 'extra'; see draconis-mount(1)");
        assert!(said("data_cache=lots").contains("'data_cache' needs a size"));
        assert!(said("partition=-1").contains("whole number"));
        assert!(said("offset=1M,partition=2").contains("exclude"));
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [("512", 512), ("64k", 65536), ("1MiB", 1 << 20), ("2T", 2 << 40)] {
            assert_eq!(parse_size(text), Some(bytes));
        }
        for text in ["", "K", "1.5G", "99999999T", "-1", "1X"] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }
}
