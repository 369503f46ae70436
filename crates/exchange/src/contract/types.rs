//! Plain data in messages: nothing here owns memory or points anywhere.

use std::fmt;

/// An object of a volume: for ext its inode number. Zero is never a node.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Node(pub u64);

impl Node {
    /// What a volume calls its root directory, whatever its own number is.
    pub const ROOT: Node = Node(1);
}

/// What kind of object a node is.
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

/// The bits of `mode` that are left when a caller writes to a file, or gives it away, who
/// may not keep its privileges: no setuid, and no setgid where the group may execute.
/// Without that setgid is a mark of mandatory locks, and stays unless `caller` is known to
/// be neither the superuser nor in the group.
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
    /// The file type bits of `st_mode` for this kind.
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

    /// The kind with this number.
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

    /// The kind that the file type bits of `mode` name.
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

/// What `stat` tells of a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attributes {
    /// The node these are of.
    pub node: Node,
    /// Changes when the node's number is used again for another object.
    pub generation: u32,
    /// Kind; agrees with the type bits of `mode`.
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
    /// No extended attribute exists, so none needs to be asked for.
    pub no_xattrs: bool,
    /// Last access.
    pub accessed: Time,
    /// Last change of the contents.
    pub modified: Time,
    /// Last change of the inode.
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

/// What to change of a node; `None` leaves it as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AttributeChange {
    /// Permission bits; the type bits are ignored.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length in bytes: cuts or extends with a hole.
    pub size_bytes: Option<u64>,
    /// Last access.
    pub accessed: Option<SetTime>,
    /// Last change of the contents.
    pub modified: Option<SetTime>,
    /// Last change of the inode. The server's clock if left out; a front that keeps times
    /// itself for a while hands in its own.
    pub changed: Option<SetTime>,
    /// Take privileges away: the change is made by a caller who may not keep them. See
    /// [`clear_suid_sgid`].
    pub clear_privileges: Option<Credentials>,
}

/// The process that asks for a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Credentials {
    /// Its user.
    pub uid: u32,
    /// Its group; of other groups that it may be in nothing is known.
    pub gid: u32,
}

/// What something is opened for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Access {
    /// Reading, in a way that may change the time of access.
    pub read: bool,
    /// Writing.
    pub write: bool,
    /// Writing at the end only.
    pub append: bool,
}

/// What a client may do with bytes, or with a listing, that it kept from an earlier use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kept {
    /// Use it.
    Valid,
    /// Ask again, and keep the answers: reading changes the time of access.
    Stale,
    /// Ask each time: each reading changes the time of access.
    Never,
}

/// When reading a file changes its time of access.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum AccessTimes {
    /// If it is not later than the last change, or a day old.
    #[default]
    Relative,
    /// Never.
    Never,
    /// Always.
    Strict,
    /// In memory; on disk when something else of the inode is written.
    Lazy,
}

impl AccessTimes {
    /// Each with its name in messages between a manager and its clients.
    pub const NAMES: [(&'static str, AccessTimes); 4] = [
        ("relative", AccessTimes::Relative),
        ("never", AccessTimes::Never),
        ("strict", AccessTimes::Strict),
        ("lazy", AccessTimes::Lazy),
    ];

    /// The one with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.into_iter().find(|(of, _)| *of == name).map(|(_, times)| times)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::NAMES.into_iter().find(|(_, of)| *of == self).map_or("", |(name, _)| name)
    }
}

/// How `Reserve` changes the space of a file, as fallocate(2) has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FallocateMode {
    /// Blocks for the range, which read as zero where there were none; the file grows if
    /// the range ends beyond it.
    Allocate,
    /// The same, and the length stays.
    KeepSize,
    /// The range reads as zero and takes no space; the length stays.
    PunchHole,
    /// The range reads as zero and has blocks.
    ZeroRange {
        /// The length stays.
        keep_size: bool,
    },
}

/// What `statfs` tells of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StatFs {
    /// Size of the blocks counted here, in bytes.
    pub block_bytes: u32,
    /// All blocks.
    pub blocks: u64,
    /// Unused blocks.
    pub free_blocks: u64,
    /// Free blocks that an ordinary user may take.
    pub available_blocks: u64,
    /// All inodes.
    pub inodes: u64,
    /// Unused inodes.
    pub free_inodes: u64,
    /// Longest name, in bytes.
    pub name_bytes_max: u32,
    /// What tells this volume from others, as `f_fsid` shows it.
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
    /// Longest name, in bytes.
    pub const MAX_BYTES: usize = InlineBytes::MAX_BYTES;

    /// Takes `name` if it is one.
    ///
    /// # Errors
    /// [`Refusal::NameTooLong`] above 255 bytes, [`Refusal::Invalid`] when empty or
    /// holding `/` or NUL.
    pub fn new(name: &[u8]) -> Result<Self, Refusal> {
        InlineBytes::without(name, b"/\0").map(Self)
    }

    /// The bytes of the name.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl AttributeName {
    /// Longest name, in bytes.
    pub const MAX_BYTES: usize = InlineBytes::MAX_BYTES;

    /// Takes `name` if it is one.
    ///
    /// # Errors
    /// [`Refusal::NameTooLong`] above 255 bytes, [`Refusal::Invalid`] when empty or
    /// holding NUL.
    pub fn new(name: &[u8]) -> Result<Self, Refusal> {
        InlineBytes::without(name, b"\0").map(Self)
    }

    /// The bytes of the name.
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

/// 1 to 255 bytes in place.
#[derive(Clone, Copy, PartialEq, Eq)]
struct InlineBytes {
    len: u8,
    bytes: [u8; InlineBytes::MAX_BYTES],
}

impl InlineBytes {
    const MAX_BYTES: usize = 255;

    fn without(name: &[u8], forbidden: &[u8]) -> Result<Self, Refusal> {
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

/// Why a service refused. One place maps it to an errno: [`Refusal::errno`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[repr(u32)]
pub enum Refusal {
    /// No such name or node.
    #[error("no such file or directory")]
    NotFound = 1,
    /// A directory was needed.
    #[error("not a directory")]
    NotADirectory = 2,
    /// Something other than a directory was needed.
    #[error("is a directory")]
    IsADirectory = 3,
    /// The service does not do this.
    #[error("operation not supported")]
    NotSupported = 4,
    /// The volume is mounted read-only.
    #[error("read-only file system")]
    ReadOnly = 5,
    /// What the disk holds is damaged there.
    #[error("structure needs cleaning")]
    Corrupt = 6,
    /// The device failed.
    #[error("input/output error")]
    Io = 7,
    /// The request makes no sense.
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
    /// Not allowed.
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
    /// The name is there already.
    #[error("file exists")]
    Exists = 16,
    /// A directory that still holds names.
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
    /// Too much is asked at once: a quota of the session is used up.
    #[error("resource temporarily unavailable")]
    Quota = 22,
    /// It took longer than the deadline.
    #[error("timer expired")]
    Timeout = 23,
    /// Not allowed to any caller: the inode is immutable or takes appended data only.
    #[error("operation not permitted")]
    NotPermitted = 24,
    /// The contents are encrypted, and nothing here holds the key.
    #[error("required key not available")]
    NoKey = 25,
}

impl Refusal {
    /// Every refusal, in the order of its number.
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

    /// The refusal with this number.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(number.checked_sub(1)?).ok()?).copied()
    }

    /// The errno a Linux program sees.
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
    fn privileges_are_taken_from_those_outside() {
        for (mode, left) in [(0o106755, 0o100755), (0o102644, 0o102644), (0o104600, 0o100600)] {
            assert_eq!(clear_suid_sgid(mode, 5, None), left, "{mode:o}");
            let member = Some(Credentials { uid: 1, gid: 5 });
            assert_eq!(clear_suid_sgid(mode, 5, member), left, "{mode:o}");
            let outsider = Some(Credentials { uid: 1, gid: 6 });
            assert_eq!(clear_suid_sgid(mode, 5, outsider) & 0o6000, 0, "{mode:o}");
        }
    }

    #[test]
    fn refusals_are_numbered() {
        for (at, refusal) in Refusal::ALL.into_iter().enumerate() {
            assert_eq!(refusal as usize, at + 1);
            assert_eq!(Refusal::from_number(refusal as u32), Some(refusal));
        }
    }
}
