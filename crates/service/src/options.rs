//! Options of `mount -o`.

use std::path::PathBuf;

use draconis_types::AccessTimes;
use serde::{Deserialize, Serialize};

use crate::path_members;

/// What `force=` names to have a member of a RAID written.
pub const FORCE_RAID_MEMBER: &str = "raid-member";

/// Whether a mount uses FUSE over io_uring. Only one without restart can: the kernel loses the
/// requests of a server that dies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UringUse {
    /// Where possible.
    #[default]
    Auto,
    /// Or do not mount.
    On,
    /// Never.
    Off,
}

/// Mount options: everything that `-o` accepts, with the defaults.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountOptions {
    /// Mount read-only.
    pub read_only: bool,
    /// Let other users access the mount.
    pub allow_other: bool,
    /// Let the kernel check permissions by the owners and modes on the volume.
    pub default_permissions: bool,
    /// Number of parsed inodes in the cache.
    pub inode_cache: usize,
    /// Number of files whose block maps are cached.
    pub block_map_cache: usize,
    /// Cached file data, in bytes.
    pub data_cache_bytes: u64,
    /// Show `.` and `..` in native directory listings, too.
    pub dots: bool,
    /// First byte of the volume in the file or device.
    pub offset_bytes: Option<u64>,
    /// Number of the partition that is the volume.
    pub partition: Option<u32>,
    /// Backing files of a disk image, the nearest first.
    #[serde(flatten, with = "path_members::backing")]
    pub backing: Vec<PathBuf>,
    /// Extent files of a disk image, relative to its directory: see [`crate::parts`].
    #[serde(flatten, with = "path_members::parts")]
    pub parts: Vec<PathBuf>,
    /// Mount the deleted files of the volume; implies `read_only`.
    #[serde(default)]
    pub deleted: bool,
    /// Write also to a member of a RAID.
    #[serde(default)]
    pub force_raid_member: bool,
    /// Honour device nodes (root only).
    pub dev: bool,
    /// Honour setuid bits (root only).
    pub suid: bool,
    /// Refuse to execute.
    pub no_exec: bool,
    /// Seconds after which a worker that does not answer is killed.
    pub deadline_s: u64,
    /// When reading a file updates its access time.
    #[serde(with = "by_name")]
    pub access_times: AccessTimes,
    /// Reading directories leaves their access times.
    pub no_directory_atime: bool,
    /// Every change is durable before its reply.
    pub sync: bool,
    /// Every directory change is durable before its reply.
    pub dir_sync: bool,
    /// Commit interval, in seconds.
    pub commit_s: u64,
    /// Limit of changes in memory before a commit, in bytes.
    pub dirty_bytes: u64,
    /// Let the kernel cache writes and send them later (writeback cache).
    pub write_back: bool,
    /// Sleep until a request arrives instead of busy-polling for a moment.
    #[serde(default)]
    pub no_polling: bool,
    /// Whether requests come over FUSE's ring.
    #[serde(default)]
    pub uring: UringUse,
    /// The volume must have a journal, because `data=` was given.
    #[serde(default)]
    pub journal: bool,
    /// Source that the kernel shows, if not the volume.
    #[serde(flatten, with = "path_members::source")]
    pub source: Option<PathBuf>,
    /// File system type that the kernel shows after `fuse.`.
    pub subtype: Option<String>,
    /// Security contexts, as `NAME=VALUE`, for a kernel with SELinux.
    #[serde(default)]
    pub contexts: Vec<String>,
    /// Write to a volume whose superblock says that it has errors.
    pub ignore_errors: bool,
    /// New files get the group of their directory, as if it were setgid.
    pub directory_group: bool,
    /// `df` also counts blocks of metadata.
    pub minix_df: bool,
    /// True if a block device is the source of the mount, so that the kernel passes `sync` on. By
    /// default, root's mounts have one where possible.
    pub block_device: Option<bool>,
    /// True if a worker that died is restarted.
    pub restart: bool,
    /// True if freed space is discarded on the disk. By default, only for disks in stores.
    #[serde(default)]
    pub discard: Option<bool>,
    /// Change an existing mount.
    pub remount: bool,
    /// The `bucket_NAME=VALUE` options. The program interprets them and passes them on with the
    /// other settings of a bucket.
    #[serde(skip)]
    pub bucket: Vec<(String, String)>,
}

/// Access time modes in JSON, with the names that all versions of managers and clients use.
mod by_name {
    use draconis_types::AccessTimes;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(times: &AccessTimes, into: S) -> Result<S::Ok, S::Error> {
        into.serialize_str(times.name())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<AccessTimes, D::Error> {
        let name = String::deserialize(from)?;
        AccessTimes::from_name(&name).ok_or_else(|| D::Error::custom(format!("no times: {name}")))
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
            backing: vec![],
            parts: vec![],
            deleted: false,
            force_raid_member: false,
            dev: false,
            suid: false,
            no_exec: false,
            deadline_s: 30,
            access_times: AccessTimes::Relative,
            no_directory_atime: false,
            sync: false,
            dir_sync: false,
            commit_s: 5,
            dirty_bytes: 64 << 20,
            write_back: false,
            no_polling: false,
            uring: UringUse::Auto,
            journal: false,
            source: None,
            subtype: None,
            contexts: vec![],
            ignore_errors: false,
            directory_group: false,
            minix_df: false,
            block_device: None,
            restart: true,
            discard: None,
            remount: false,
            bucket: vec![],
        }
    }
}

/// Memory for a search of deleted files, in bytes.
const DELETED_FILES_BYTES: u64 = 512 << 20;
/// Memory of a cached inode, in bytes.
const CACHED_INODE_BYTES: u64 = 512;
/// Memory of a block-map cache entry, in bytes.
const CACHED_BLOCK_MAP_BYTES: u64 = 2048;

/// Memory for writing beside the changes themselves, in bytes: data on its way to the disk, and a
/// request and a reply for each FUSE thread.
const WRITE_BUFFERS_BYTES: u64 = 64 << 20;

/// An invalid mount option.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// The option is unknown.
    #[error("unknown mount option '{0}'; see draconis-mount(1)")]
    Unknown(String),
    /// The option has no value, or an invalid one.
    #[error("mount option '{name}' needs {what}, not '{value}'")]
    Value {
        /// The option.
        name: &'static str,
        /// The kind of value that it needs.
        what: &'static str,
        /// The value that was given.
        value: String,
    },
    /// The option is known, but its effect is not implemented here.
    #[error("mount option '{name}' is not supported: {why}")]
    Refused {
        /// The option.
        name: String,
        /// The reason, and the alternative.
        why: &'static str,
    },
    /// Two options that exclude each other.
    #[error("mount options 'offset' and 'partition' exclude each other")]
    OffsetAndPartition,
}

/// Options without effect here: they are the default, meant for other programs, or about missing
/// features. First those of mount(8) and systemd, then of the kernel's driver, then of fuse2fs and
/// other servers.
const IGNORED_OPTIONS: &[&str] = &[
    "defaults",
    "auto",
    "noauto",
    "nouser",
    "nofail",
    "_netdev",
    "comment",
    "helper",
    "uhelper",
    "loop",
    "atime",
    "silent",
    "loud",
    "nomand",
    // Linux keeps versions of inodes in memory, for its NFS server, with and without it.
    "iversion",
    "noiversion",
    "symfollow",
    "acl",
    "user_xattr",
    "nocheck",
    "debug",
    // Usage is counted where the volume has the feature; limits are not enforced.
    "quota",
    "noquota",
    "usrquota",
    "grpquota",
    "prjquota",
    "usrjquota",
    "grpjquota",
    "jqfmt",
    "barrier",
    "nobarrier",
    "data_err",
    "oldalloc",
    "orlov",
    "reservation",
    "noreservation",
    "delalloc",
    "nodelalloc",
    "auto_da_alloc",
    "noauto_da_alloc",
    "dioread_lock",
    "dioread_nolock",
    "journal_checksum",
    "nojournal_checksum",
    "journal_async_commit",
    "journal_ioprio",
    "min_batch_time",
    "max_batch_time",
    "inode_readahead_blks",
    "stripe",
    "init_itable",
    "noinit_itable",
    "block_validity",
    "noblock_validity",
    "mb_optimize_scan",
    "nombcache",
    "no_mbcache",
    "inlinecrypt",
    "no_default_opts",
    "noload",
    "nonempty",
    "big_writes",
    "kernel_cache",
    "auto_cache",
    "use_ino",
    "readdir_ino",
    "hard_remove",
    "intr",
    "noblkdev",
    "directio",
    "lockfile",
    // Options that the kernel shows of a mount, and that mount(8) passes when it remounts.
    "user_id",
    "group_id",
    "rootmode",
    "blksize",
    "max_read",
    "seclabel",
];

/// Prefix of options of the volume's bucket.
const BUCKET_PREFIX: &str = "bucket_";

/// Options whose effect is not implemented here, and the reasons.
const REFUSED_OPTIONS: &[(&str, &str)] = &[
    ("noacl", "access control lists always count; use fakeroot for no permissions at all"),
    ("nouser_xattr", "attributes of users are always there"),
    ("nouid32", "owners always have 32 bits"),
    ("dax", "a volume is never mapped; leave the option out"),
    ("xip", "a volume is never mapped; leave the option out"),
    ("journal_dev", "a journal on another device is not written; Linux mounts the volume with it"),
    ("journal_path", "a journal on another device is not written; Linux mounts the volume with it"),
    ("max_dir_size_kb", "directories have no limit; leave the option out"),
    ("sizelimit", "the length is that of the volume; leave the option out"),
    ("mand", "mandatory locks are gone from Linux"),
    ("nosymfollow", "symbolic links are followed; mount with noexec,nosuid,nodev"),
    ("allow_root", "use allow_other"),
    (
        "auto_unmount",
        "a mount whose server died stays in place, so that nothing goes to the \
        disk below; draconis umount clears it",
    ),
    ("uid", "owners are those of the volume; see draconis chown"),
    ("gid", "owners are those of the volume; see draconis chown"),
    ("umask", "modes are those of the volume; see draconis chmod"),
];

impl MountOptions {
    /// Returns the limit of a worker's private memory with these options, in bytes: full caches,
    /// and 64 MiB for everything else.
    pub fn memory_limit_bytes(&self) -> u64 {
        let each = |entries: usize, bytes: u64| (entries as u64).saturating_mul(bytes);
        let writing = match self.read_only {
            true => 0,
            // Current changes, and earlier ones that are not written yet.
            false => self.dirty_bytes.saturating_mul(2).saturating_add(WRITE_BUFFERS_BYTES),
        };
        (64_u64 << 20)
            .saturating_add(if self.deleted { DELETED_FILES_BYTES } else { 0 })
            .saturating_add(self.data_cache_bytes)
            .saturating_add(writing)
            .saturating_add(each(self.inode_cache, CACHED_INODE_BYTES))
            .saturating_add(each(self.block_map_cache, CACHED_BLOCK_MAP_BYTES))
    }

    /// Applies a comma-separated list; later options win.
    ///
    /// # Errors
    /// See [`OptionError`].
    pub fn add_list(&mut self, list: &str) -> Result<(), OptionError> {
        for option in split_option_list(list) {
            self.add_option(&option)?;
        }
        if self.offset_bytes.is_some() && self.partition.is_some() {
            return Err(OptionError::OffsetAndPartition);
        }
        self.read_only |= self.deleted;
        Ok(())
    }

    fn add_option(&mut self, option: &str) -> Result<(), OptionError> {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        match name {
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "allow_other" | "allow_others" => self.allow_other = true,
            "default_permissions" | "nofakeroot" => self.default_permissions = true,
            "fakeroot" => self.default_permissions = false,
            "dots" => self.dots = true,
            "nodots" => self.dots = false,
            "dev" => self.dev = true,
            "nodev" => self.dev = false,
            "suid" => self.suid = true,
            "nosuid" => self.suid = false,
            "noexec" => self.no_exec = true,
            "exec" => self.no_exec = false,
            // As in mount(8): later options may override these.
            "user" | "users" => (self.dev, self.suid, self.no_exec) = (false, false, true),
            "owner" | "group" => (self.dev, self.suid) = (false, false),
            // Option of fuse2fs: mounts like the kernel's driver.
            "kernel" => (self.allow_other, self.dev, self.suid) = (true, true, true),
            "norecovery" => self.read_only = true,
            "fsname" => self.source = Some(parse_text_option("fsname", value)?.into()),
            "subtype" => self.subtype = Some(parse_text_option("subtype", value)?),
            "context" | "fscontext" | "defcontext" | "rootcontext" => {
                let context = parse_text_option("context", value)?;
                self.contexts.push(format!("{name}={context}"));
            }
            "errors" => self.ignore_errors = parse_errors_option(value)?,
            "grpid" | "bsdgroups" => self.directory_group = true,
            "nogrpid" | "sysvgroups" => self.directory_group = false,
            "restart" => self.restart = true,
            "norestart" => self.restart = false,
            "minixdf" => self.minix_df = true,
            "bsddf" => self.minix_df = false,
            "discard" => self.discard = Some(true),
            "nodiscard" => self.discard = Some(false),
            "fuseblk" => self.block_device = Some(true),
            "nofuseblk" => self.block_device = Some(false),
            "remount" => self.remount = true,
            "data" => self.journal = parse_data_option(value)?,
            "check" if value == "none" => {}
            "check" => return Err(invalid_value("check", "'none' (e2fsck checks)", value)),
            "sb" if value == "1" => {}
            "sb" => {
                return Err(unsupported(
                    "sb",
                    "the first superblock is used; mend it with e2fsck -b",
                ));
            }
            "resuid" | "resgid" if value == "0" => {}
            "resuid" | "resgid" => {
                let why =
                    "who may use reserved blocks is written on the volume; see tune2fs -u, -g";
                return Err(unsupported(name, why));
            }
            "cache_size" => self.data_cache_bytes = parse_size_option("cache_size", value)?,
            "inode_cache" => self.inode_cache = parse_number_option("inode_cache", value)?,
            "block_map_cache" => {
                self.block_map_cache = parse_number_option("block_map_cache", value)?
            }
            "data_cache" => self.data_cache_bytes = parse_size_option("data_cache", value)?,
            "offset" => self.offset_bytes = Some(parse_size_option("offset", value)?),
            "partition" => self.partition = Some(parse_number_option("partition", value)?),
            "deleted" => self.deleted = true,
            "force" if value == FORCE_RAID_MEMBER => self.force_raid_member = true,
            "force" => return Err(invalid_value("force", FORCE_RAID_MEMBER, value)),
            "follow" => {
                let why = "a mount does not follow the writer of a disk; mount a later snapshot of \
                           it (draconis store snapshot)";
                return Err(unsupported(name, why));
            }
            "backing" => self.backing.push(parse_text_option("backing", value)?.into()),
            "relatime" | "norelatime" | "nolazytime" => self.access_times = AccessTimes::Relative,
            "noatime" => self.access_times = AccessTimes::Never,
            "nodiratime" => self.no_directory_atime = true,
            "diratime" => self.no_directory_atime = false,
            "nostrictatime" if self.access_times != AccessTimes::Strict => {}
            "nostrictatime" => self.access_times = AccessTimes::Relative,
            "strictatime" => self.access_times = AccessTimes::Strict,
            "lazytime" => self.access_times = AccessTimes::Lazy,
            "sync" => self.sync = true,
            "async" => (self.sync, self.dir_sync) = (false, false),
            "dirsync" => self.dir_sync = true,
            "writeback" => self.write_back = true,
            "nowriteback" => self.write_back = false,
            "polling" => self.no_polling = parse_polling(value)?,
            "uring" => self.uring = parse_uring(value)?,
            "commit" => self.commit_s = parse_number_option("commit", value)?,
            "dirty" => self.dirty_bytes = parse_size_option("dirty", value)?,
            "deadline" => self.deadline_s = parse_number_option("deadline", value)?,
            _ if name.starts_with(BUCKET_PREFIX) => {
                let name = name.strip_prefix(BUCKET_PREFIX).unwrap_or(name);
                self.bucket.push((name.to_string(), value.to_string()));
            }
            // Options that mount(8) and systemd pass to every helper.
            _ if name.starts_with("x-") || name.starts_with("X-") => {}
            _ if IGNORED_OPTIONS.contains(&name) => {}
            _ => match REFUSED_OPTIONS.iter().find(|(refused, _)| *refused == name) {
                Some((name, why)) => return Err(unsupported(name, why)),
                None => return Err(OptionError::Unknown(option.to_string())),
            },
        }
        Ok(())
    }
}

/// Splits at commas, except within quotes or after a backslash: mount(8) and fusermount3 write
/// values with commas that way.
fn split_option_list(list: &str) -> Vec<String> {
    let (mut all, mut quoted, mut literal) = (vec![String::new()], false, false);
    for c in list.chars() {
        match c {
            _ if literal => literal = false,
            '\\' => {
                literal = true;
                continue;
            }
            '"' => {
                quoted = !quoted;
                continue;
            }
            ',' if !quoted => {
                all.push(String::new());
                continue;
            }
            _ => {}
        }
        all.last_mut().unwrap_or(&mut String::new()).push(c);
    }
    all.into_iter().map(|one| one.trim().to_string()).filter(|one| !one.is_empty()).collect()
}

fn unsupported(name: &str, why: &'static str) -> OptionError {
    OptionError::Refused { name: name.to_string(), why }
}

fn invalid_value(name: &'static str, what: &'static str, value: &str) -> OptionError {
    OptionError::Value { name, what, value: value.to_string() }
}

fn parse_text_option(name: &'static str, value: &str) -> Result<String, OptionError> {
    let plain = !value.is_empty() && !value.chars().any(char::is_control);
    plain.then(|| value.to_string()).ok_or_else(|| invalid_value(name, "a name", value))
}

/// Parses the reaction to a volume that has errors.
fn parse_errors_option(value: &str) -> Result<bool, OptionError> {
    match value {
        "remount-ro" => Ok(false),
        "continue" => Ok(true),
        "panic" => {
            let why = "a volume does not stop the machine; use errors=remount-ro";
            Err(unsupported("errors=panic", why))
        }
        _ => Err(invalid_value("errors", "remount-ro or continue", value)),
    }
}

/// Parses `data=`. File data never goes through the journal. `writeback` costs no flush here and is
/// treated as `ordered`.
fn parse_data_option(value: &str) -> Result<bool, OptionError> {
    match value {
        "ordered" | "writeback" => Ok(true),
        "journal" => {
            let why = "contents do not go through the journal; data=ordered has them on the disk \
                       before what leads to them, and sync makes each write durable";
            Err(unsupported("data=journal", why))
        }
        _ => Err(invalid_value("data", "ordered or writeback", value)),
    }
}

/// Parses `uring=`.
fn parse_uring(value: &str) -> Result<UringUse, OptionError> {
    match value {
        "auto" => Ok(UringUse::Auto),
        "on" => Ok(UringUse::On),
        "off" => Ok(UringUse::Off),
        _ => Err(invalid_value("uring", "auto, on or off", value)),
    }
}

/// Parses `polling=`; returns true if busy-polling is off.
fn parse_polling(value: &str) -> Result<bool, OptionError> {
    match value {
        "auto" => Ok(false),
        "off" => Ok(true),
        _ => Err(invalid_value("polling", "auto or off", value)),
    }
}

fn parse_number_option<T: std::str::FromStr>(
    name: &'static str,
    value: &str,
) -> Result<T, OptionError> {
    let what = "a whole number";
    value.parse().map_err(|_| OptionError::Value { name, what, value: value.to_string() })
}

/// Parses a number of bytes, with K, M, G or T for powers of 1024.
fn parse_size_option(name: &'static str, value: &str) -> Result<u64, OptionError> {
    parse_size(value).ok_or_else(|| {
        let what = "a size such as 4096, 64K, 128M or 1G";
        OptionError::Value { name, what, value: value.to_string() }
    })
}

/// Parses a number of bytes as people write it: `4096`, `64K`, `128M`, `1G`, `2T`.
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
    use std::path::Path;

    use super::*;

    fn parse(list: &str) -> Result<MountOptions, OptionError> {
        let mut options = MountOptions::default();
        options.add_list(list).map(|()| options)
    }

    #[test]
    fn later_mount_options_override_earlier() {
        let options =
            parse("rw,ro,allow_other,data_cache=128M,inode_cache=7,noatime,x-systemd.a=b");
        let options = options.unwrap();
        assert!(options.read_only && options.allow_other);
        assert_eq!((options.data_cache_bytes, options.inode_cache), (128 << 20, 7));
        assert_eq!(options.access_times, AccessTimes::Never);
        let options = parse("sync,dirsync,async,strictatime,commit=1,dirty=1M").unwrap();
        assert_eq!((options.sync, options.dir_sync, options.commit_s), (false, false, 1));
        assert_eq!((options.access_times, options.dirty_bytes), (AccessTimes::Strict, 1 << 20));
        let options = parse("backing=/a,ro,backing=/b\\,c").unwrap();
        assert_eq!(options.backing, ["/a", "/b,c"].map(PathBuf::from));
        assert_eq!(parse("").unwrap(), MountOptions::default());
        let options = parse("deleted,rw").unwrap();
        assert!(options.deleted && options.read_only);
        let options = parse("bucket_cache=/a:1G,deadline=9,bucket_deadline=7").unwrap();
        let word = |name: &str, value: &str| (name.to_string(), value.to_string());
        assert_eq!(options.bucket, [word("cache", "/a:1G"), word("deadline", "7")]);
        assert_eq!(options.deadline_s, 9);
    }

    #[test]
    fn invalid_option_is_named_in_error() {
        let said = |list| parse(list).unwrap_err().to_string();
        assert_eq!(said("ro,extra"), "unknown mount option 'extra'; see draconis-mount(1)");
        assert!(said("data_cache=lots").contains("'data_cache' needs a size"));
        assert!(said("partition=-1").contains("whole number"));
        assert!(said("offset=1M,partition=2").contains("exclude"));
    }

    #[test]
    fn fstab_options_of_other_drivers_are_accepted() {
        for line in [
            "defaults,errors=remount-ro,nofail,x-systemd.device-timeout=5s,X-mount.mkdir",
            "loop,rw,acl,user_xattr,bsddf,nogrpid,check=none,debug,resuid=0,sb=1",
            "loop=/dev/loop3,noauto,users,exec,_netdev,comment=mine,owner,group,user=me",
            "fakeroot,no_default_opts,norecovery,allow_others,kernel,dirsync,minixdf,errors=continue",
        ] {
            parse(line).unwrap();
        }
        assert!(parse("nodiratime").unwrap().no_directory_atime);
        let options = parse("fsname=my\\,disk,subtype=ext2,errors=continue,grpid").unwrap();
        assert_eq!(options.source.as_deref(), Some(Path::new("my,disk")));
        assert_eq!(options.subtype.as_deref(), Some("ext2"));
        assert!(options.ignore_errors && options.directory_group);
        assert_eq!(parse("fsname=\"a,b\",ro").unwrap().source.as_deref(), Some(Path::new("a,b")));
        for line in ["data=ordered,delalloc,stripe=4", "data=writeback,journal_checksum"] {
            assert!(parse(line).unwrap().journal, "{line}");
        }
        let options = parse("dev,suid,user").unwrap();
        assert_eq!((options.dev, options.suid, options.no_exec), (false, false, true));
        assert!(!parse("user,exec").unwrap().no_exec);
        assert!(parse("remount,ro").unwrap().remount);
        let times = |list| parse(list).unwrap().access_times;
        assert_eq!(times("strictatime,nostrictatime"), AccessTimes::Relative);
        assert_eq!(times("noatime,nostrictatime,iversion"), AccessTimes::Never);
        let options = parse("context=\"a:b:c:s0:c1,c2\",rootcontext=d").unwrap();
        assert_eq!(options.contexts, ["context=a:b:c:s0:c1,c2", "rootcontext=d"]);
    }

    #[test]
    fn unsupported_options_are_refused_by_name() {
        let said = |list| parse(list).unwrap_err().to_string();
        assert!(said("errors=panic").contains("'errors=panic' is not supported"));
        assert!(said("errors=panic").contains("use errors=remount-ro"));
        assert!(said("data=journal").contains("do not go through the journal; data=ordered"));
        assert!(said("data=all").contains("needs ordered or writeback"));
        assert!(said("force").contains("'force' needs raid-member"));
        assert!(said("errors=ignore").contains("needs remount-ro or continue"));
        assert!(said("resuid=1000").contains("tune2fs"));
        assert!(said("sb=8193").contains("e2fsck -b"));
        for (name, why) in REFUSED_OPTIONS {
            let said = said(name);
            assert!(said.contains(name) && said.contains(why), "{said}");
            assert!(!IGNORED_OPTIONS.contains(name));
        }
    }

    #[test]
    fn access_times_serialize_by_stable_name() {
        let text = serde_json::to_string(&MountOptions::default()).unwrap();
        assert!(text.contains(r#""access_times":"relative""#), "{text}");
        let strict = text.replace(r#""relative""#, r#""strict""#);
        let options: MountOptions = serde_json::from_str(&strict).unwrap();
        assert_eq!(options.access_times, AccessTimes::Strict);
        let none = text.replace(r#""relative""#, r#""relatime""#);
        assert!(serde_json::from_str::<MountOptions>(&none).is_err());
    }

    #[test]
    fn sizes_with_suffix_are_parsed() {
        for (text, bytes) in [("512", 512), ("64k", 65536), ("1MiB", 1 << 20), ("2T", 2 << 40)] {
            assert_eq!(parse_size(text), Some(bytes));
        }
        for text in ["", "K", "1.5G", "99999999T", "-1", "1X"] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }
}
