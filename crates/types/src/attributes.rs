//! Plain data in messages, without owned memory or pointers.

use std::fmt;

/// Number of a volume's object: for ext its inode number. Zero is never a node.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Node(pub u64);

impl Node {
    /// Root directory of every volume, whatever its inode number.
    pub const ROOT: Node = Node(1);
}

/// Type of a node.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub enum FileType {
    /// A regular file.
    File = 1,
    /// A directory.
    Directory = 2,
    /// A character device.
    CharDevice = 3,
    /// A block device.
    BlockDevice = 4,
    /// A named pipe.
    Fifo = 5,
    /// A Unix socket.
    Socket = 6,
    /// A symbolic link.
    Symlink = 7,
}

/// Returns `mode` after a write or chown by an unprivileged caller: without setuid, and without
/// setgid if the group may execute. Otherwise setgid marks mandatory locking and stays, unless
/// `caller` is known to be neither the superuser nor in the group.
pub const fn clear_suid_sgid(mode: u32, group: u32, caller: Option<Credentials>) -> u32 {
    const SETUID: u32 = 0o4000;
    const SETGID: u32 = 0o2000;
    const GROUP_EXECUTES: u32 = 0o0010;
    let outside = match caller {
        Some(Credentials { uid, gid }) => uid != 0 && gid != group,
        None => false,
    };
    let clears_group = mode & GROUP_EXECUTES != 0 || outside;
    if clears_group { mode & !(SETUID | SETGID) } else { mode & !SETUID }
}

impl FileType {
    /// Returns the file type bits of `st_mode`.
    pub const fn mode_bits(self) -> u32 {
        match self {
            FileType::Fifo => 0o010000,
            FileType::CharDevice => 0o020000,
            FileType::Directory => 0o040000,
            FileType::BlockDevice => 0o060000,
            FileType::File => 0o100000,
            FileType::Symlink => 0o120000,
            FileType::Socket => 0o140000,
        }
    }

    /// Returns the type with this number.
    pub const fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            1 => FileType::File,
            2 => FileType::Directory,
            3 => FileType::CharDevice,
            4 => FileType::BlockDevice,
            5 => FileType::Fifo,
            6 => FileType::Socket,
            7 => FileType::Symlink,
            _ => return None,
        })
    }

    /// Returns the type in the file type bits of `mode`.
    pub const fn from_mode(mode: u32) -> Option<Self> {
        Some(match mode & 0o170000 {
            0o010000 => FileType::Fifo,
            0o020000 => FileType::CharDevice,
            0o040000 => FileType::Directory,
            0o060000 => FileType::BlockDevice,
            0o100000 => FileType::File,
            0o120000 => FileType::Symlink,
            0o140000 => FileType::Socket,
            _ => return None,
        })
    }
}

/// A point in time: seconds since 1970 and nanoseconds within the second.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Time {
    /// Seconds since 1970-01-01 00:00 UTC; negative before it.
    pub seconds: i64,
    /// 0 to 999,999,999.
    pub nanoseconds: u32,
}

/// Attributes of a node, as `stat` returns them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attributes {
    /// Node of the attributes.
    pub node: Node,
    /// Changes when the node number is reused for another object.
    pub generation: u32,
    /// Type; agrees with the type bits of `mode`.
    pub kind: FileType,
    /// `st_mode`: type, setuid, setgid, sticky and permission bits.
    pub mode: u32,
    /// Hard links.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device node, major and minor.
    pub device: (u32, u32),
    /// Length in bytes.
    pub size_bytes: u64,
    /// Space used, in units of 512 bytes.
    pub blocks_512: u64,
    /// Preferred I/O size in bytes.
    pub block_size_bytes: u32,
    /// Inode flags as `lsattr` shows them (`FS_*_FL`).
    pub flags: u32,
    /// True if no extended attribute exists.
    pub no_xattrs: bool,
    /// Last access.
    pub accessed: Time,
    /// Last change of the contents (mtime).
    pub modified: Time,
    /// Last change of the inode (ctime).
    pub changed: Time,
    /// Creation, where the volume records it.
    pub created: Option<Time>,
}

/// A time to set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetTime {
    /// The server's clock.
    Now,
    /// This time.
    To(Time),
}

/// Attributes to change; `None` leaves one unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AttributeChange {
    /// Permission bits; the type bits are ignored.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length in bytes: truncates, or extends with a hole.
    pub size_bytes: Option<u64>,
    /// Last access.
    pub accessed: Option<SetTime>,
    /// Last change of the contents.
    pub modified: Option<SetTime>,
    /// Last change of the inode. Defaults to the server's clock; a front end that caches times
    /// passes its own.
    pub changed: Option<SetTime>,
    /// Clears setuid and setgid, because the caller may not keep them. See [`clear_suid_sgid`].
    pub clear_privileges: Option<Credentials>,
}

/// The process that requests a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Credentials {
    /// Its user.
    pub uid: u32,
    /// Its group; its supplementary groups are unknown.
    pub gid: u32,
}

/// Access that an open requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Access {
    /// Reading that may update the access time.
    pub read: bool,
    /// Writing.
    pub write: bool,
    /// Appending only.
    pub append: bool,
}

/// How a client may use contents or listings cached by an earlier open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CacheValidity {
    /// Use them.
    Valid,
    /// Drop them, and cache new ones: reading updates the access time.
    Stale,
    /// Cache nothing: each read updates the access time.
    Never,
}

/// Update policy of access times.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum AccessTimes {
    /// If it is not later than the last change, or is a day old.
    #[default]
    Relative,
    /// Never.
    Never,
    /// Always.
    Strict,
    /// In memory; on disk when another field of the inode is written.
    Lazy,
}

impl AccessTimes {
    /// Names in messages between a manager and its clients.
    pub const NAMES: [(&'static str, AccessTimes); 4] = [
        ("relative", AccessTimes::Relative),
        ("never", AccessTimes::Never),
        ("strict", AccessTimes::Strict),
        ("lazy", AccessTimes::Lazy),
    ];

    /// Returns the policy with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.into_iter().find(|(of, _)| *of == name).map(|(_, times)| times)
    }

    /// Returns the name.
    pub fn name(self) -> &'static str {
        Self::NAMES.into_iter().find(|(_, of)| *of == self).map_or("", |(name, _)| name)
    }
}

/// Modes of `Fallocate`, as in fallocate(2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FallocateMode {
    /// Allocates blocks for the range, which read as zero if new; the file grows to the end of the
    /// range.
    Allocate,
    /// As `Allocate`, with the length unchanged.
    KeepSize,
    /// Frees the range, which then reads as zero; the length is unchanged.
    PunchHole,
    /// Zeroes the range and allocates its blocks.
    ZeroRange {
        /// The length is unchanged.
        keep_size: bool,
    },
}

/// Statistics of a volume, as `statfs` returns them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StatFs {
    /// Size of the blocks counted here, in bytes.
    pub block_bytes: u32,
    /// All blocks.
    pub blocks: u64,
    /// Unused blocks.
    pub free_blocks: u64,
    /// Free blocks available to ordinary users.
    pub available_blocks: u64,
    /// All inodes.
    pub inodes: u64,
    /// Unused inodes.
    pub free_inodes: u64,
    /// Maximum name length in bytes.
    pub name_bytes_max: u32,
    /// Identifier of the volume, shown as `f_fsid`.
    pub id: u64,
}

/// One name of a path: 1 to 255 bytes, none of them `/` or NUL.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Name(InlineBytes);

/// The name of an extended attribute: 1 to 255 bytes, none of them NUL. Unlike a name of a
/// path it may hold `/`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct AttributeName(InlineBytes);

impl Name {
    /// Maximum length in bytes.
    pub const MAX_BYTES: usize = InlineBytes::MAX_BYTES;

    /// Validates `name`.
    ///
    /// # Errors
    /// [`Refusal::NameTooLong`] above 255 bytes, [`Refusal::Invalid`] when empty or
    /// holding `/` or NUL.
    pub fn new(name: &[u8]) -> Result<Self, Refusal> {
        InlineBytes::from_bytes_without(name, b"/\0").map(Self)
    }

    /// Returns the bytes of the name.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl AttributeName {
    /// Maximum length in bytes.
    pub const MAX_BYTES: usize = InlineBytes::MAX_BYTES;

    /// Validates `name`.
    ///
    /// # Errors
    /// [`Refusal::NameTooLong`] above 255 bytes, [`Refusal::Invalid`] when empty or
    /// holding NUL.
    pub fn new(name: &[u8]) -> Result<Self, Refusal> {
        InlineBytes::from_bytes_without(name, b"\0").map(Self)
    }

    /// Returns the bytes of the name.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Name({})", self.as_bytes().escape_ascii())
    }
}

impl fmt::Debug for AttributeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AttributeName({})", self.as_bytes().escape_ascii())
    }
}

/// 1 to 255 bytes, stored inline.
#[derive(Clone, Copy, PartialEq, Eq)]
struct InlineBytes {
    len: u8,
    bytes: [u8; InlineBytes::MAX_BYTES],
}

impl InlineBytes {
    const MAX_BYTES: usize = 255;

    fn from_bytes_without(name: &[u8], forbidden: &[u8]) -> Result<Self, Refusal> {
        // Above 255 is too long.
        let len = u8::try_from(name.len()).map_err(|_| Refusal::NameTooLong)?;
        if name.is_empty() || name.iter().any(|b| forbidden.contains(b)) {
            return Err(Refusal::Invalid);
        }
        let mut bytes = [0; Self::MAX_BYTES];
        bytes[..name.len()].copy_from_slice(name);
        Ok(Self { len, bytes })
    }

    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// Reason of a refused request. [`Refusal::errno`] maps it to an errno.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[repr(u32)]
pub enum Refusal {
    /// No such name or node.
    #[error("no such file or directory")]
    NotFound = 1,
    /// The node is not a directory.
    #[error("not a directory")]
    NotADirectory = 2,
    /// The node is a directory.
    #[error("is a directory")]
    IsADirectory = 3,
    /// The service does not implement it.
    #[error("operation not supported")]
    NotSupported = 4,
    /// The volume is mounted read-only.
    #[error("read-only file system")]
    ReadOnly = 5,
    /// Metadata on the disk is damaged.
    #[error("structure needs cleaning")]
    Corrupt = 6,
    /// The device failed.
    #[error("input/output error")]
    Io = 7,
    /// The request is invalid.
    #[error("invalid argument")]
    Invalid = 8,
    /// A name of more than 255 bytes.
    #[error("file name too long")]
    NameTooLong = 9,
    /// No such extended attribute.
    #[error("no data available")]
    NoAttribute = 10,
    /// The answer does not fit the buffer.
    #[error("numerical result out of range")]
    BufferTooSmall = 11,
    /// The caller has no permission.
    #[error("permission denied")]
    Denied = 12,
    /// The volume or mount point is in use.
    #[error("device or resource busy")]
    Busy = 13,
    /// More symbolic links than may be followed.
    #[error("too many levels of symbolic links")]
    TooManyLinks = 14,
    /// The service is gone.
    #[error("transport endpoint is not connected")]
    Gone = 15,
    /// The name exists already.
    #[error("file exists")]
    Exists = 16,
    /// The directory still holds names.
    #[error("directory not empty")]
    NotEmpty = 17,
    /// No space or no inode left.
    #[error("no space left on device")]
    NoSpace = 18,
    /// Beyond the largest size the format can hold.
    #[error("file too large")]
    TooLarge = 19,
    /// Beyond the largest link count the format can hold.
    #[error("too many links")]
    LinkLimit = 20,
    /// A hard link or rename across volumes.
    #[error("invalid cross-device link")]
    CrossVolume = 21,
    /// A quota of the session is used up.
    #[error("resource temporarily unavailable")]
    Quota = 22,
    /// The deadline passed.
    #[error("timer expired")]
    Timeout = 23,
    /// Not allowed to any caller: the inode is immutable or append-only.
    #[error("operation not permitted")]
    NotPermitted = 24,
    /// The contents are encrypted and the key is unknown.
    #[error("required key not available")]
    NoKey = 25,
}

impl Refusal {
    /// All refusals, in numerical order.
    pub const ALL: [Refusal; 25] = [
        Refusal::NotFound,
        Refusal::NotADirectory,
        Refusal::IsADirectory,
        Refusal::NotSupported,
        Refusal::ReadOnly,
        Refusal::Corrupt,
        Refusal::Io,
        Refusal::Invalid,
        Refusal::NameTooLong,
        Refusal::NoAttribute,
        Refusal::BufferTooSmall,
        Refusal::Denied,
        Refusal::Busy,
        Refusal::TooManyLinks,
        Refusal::Gone,
        Refusal::Exists,
        Refusal::NotEmpty,
        Refusal::NoSpace,
        Refusal::TooLarge,
        Refusal::LinkLimit,
        Refusal::CrossVolume,
        Refusal::Quota,
        Refusal::Timeout,
        Refusal::NotPermitted,
        Refusal::NoKey,
    ];

    /// Returns the refusal with this number.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(number.checked_sub(1)?).ok()?).copied()
    }

    /// Returns the errno for Linux programs.
    pub fn errno(self) -> rustix::io::Errno {
        use rustix::io::Errno as E;
        match self {
            Refusal::NotFound => E::NOENT,
            Refusal::NotADirectory => E::NOTDIR,
            Refusal::IsADirectory => E::ISDIR,
            Refusal::NotSupported => E::OPNOTSUPP,
            Refusal::ReadOnly => E::ROFS,
            // EUCLEAN, as the kernel's ext drivers answer.
            Refusal::Corrupt => E::UCLEAN,
            Refusal::Io => E::IO,
            Refusal::Invalid => E::INVAL,
            Refusal::NameTooLong => E::NAMETOOLONG,
            Refusal::NoAttribute => E::NODATA,
            Refusal::BufferTooSmall => E::RANGE,
            Refusal::Denied => E::ACCESS,
            Refusal::Busy => E::BUSY,
            Refusal::TooManyLinks => E::LOOP,
            Refusal::Gone => E::NOTCONN,
            Refusal::Exists => E::EXIST,
            Refusal::NotEmpty => E::NOTEMPTY,
            Refusal::NoSpace => E::NOSPC,
            Refusal::TooLarge => E::FBIG,
            Refusal::LinkLimit => E::MLINK,
            Refusal::CrossVolume => E::XDEV,
            Refusal::Quota => E::AGAIN,
            Refusal::Timeout => E::TIMEDOUT,
            Refusal::NotPermitted => E::PERM,
            Refusal::NoKey => E::NOKEY,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suid_sgid_cleared_for_non_owners() {
        for (mode, left) in [(0o106755, 0o100755), (0o102644, 0o102644), (0o104600, 0o100600)] {
            assert_eq!(clear_suid_sgid(mode, 5, None), left, "{mode:o}");
            let member = Some(Credentials { uid: 1, gid: 5 });
            assert_eq!(clear_suid_sgid(mode, 5, member), left, "{mode:o}");
            let outsider = Some(Credentials { uid: 1, gid: 6 });
            assert_eq!(clear_suid_sgid(mode, 5, outsider) & 0o6000, 0, "{mode:o}");
        }
    }

    #[test]
    fn refusal_numbers_round_trip() {
        for (at, refusal) in Refusal::ALL.into_iter().enumerate() {
            assert_eq!(refusal as usize, at + 1);
            assert_eq!(Refusal::from_number(refusal as u32), Some(refusal));
        }
    }
}
