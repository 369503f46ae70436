//! Request headers, and decoded requests without changes: reads, whose data goes to the kernel
//! without a copy, and requests that the library does not know or cannot answer.
//! `change::decode` decodes those that change the tree.
//!
//! ```text
//!   header 40 bytes │ fixed fields of the operation │ names and data
//! ```
//!
//! The kernel is trusted, but nothing here panics on any bytes.

use std::ops::Range;

use draconis_types::{Access, AttributeName, Name, Node};
use rustix::fs::OFlags;

use super::init::InitRequest;

/// Length of the header of every request, in bytes.
pub(super) const HEADER_BYTES: usize = 40;
/// Offset of a write's data in its request.
pub(super) const WRITE_DATA_OFFSET: usize = HEADER_BYTES + 40;

/// Offset of the length of its data, a `u32`.
pub(super) const WRITE_LEN_OFFSET: usize = HEADER_BYTES + 16;

const FORGET: u32 = 2;
pub(super) const SETATTR: u32 = 4;
pub(super) const SYMLINK: u32 = 6;
pub(super) const MKNOD: u32 = 8;
pub(super) const MKDIR: u32 = 9;
pub(super) const UNLINK: u32 = 10;
pub(super) const RMDIR: u32 = 11;
pub(super) const RENAME: u32 = 12;
pub(super) const LINK: u32 = 13;
const OPEN: u32 = 14;
const READ: u32 = 15;
pub(super) const WRITE: u32 = 16;
const FSYNC: u32 = 20;
pub(super) const SETXATTR: u32 = 21;
pub(super) const REMOVEXATTR: u32 = 24;
const INIT: u32 = 26;
const OPENDIR: u32 = 27;
const FSYNCDIR: u32 = 30;
pub(super) const CREATE: u32 = 35;
pub(super) const IOCTL: u32 = 39;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;
pub(super) const FALLOCATE: u32 = 43;
pub(super) const RENAME2: u32 = 45;
const LSEEK: u32 = 46;
const SYNCFS: u32 = 50;
pub(super) const TMPFILE: u32 = 51;
const STATX: u32 = 52;

/// Flag of a read: a direct read, past the page cache.
const READ_LOCKOWNER: u32 = 1 << 1;

/// Flag of a write: it comes from the page cache, and its writer has continued long ago.
pub(super) const WRITE_CACHE: u32 = 1 << 0;
/// Flag of a write: a direct write, past the page cache.
pub(super) const WRITE_LOCKOWNER: u32 = 1 << 1;
/// Flag of a write: setuid and setgid must be cleared.
pub(super) const WRITE_KILL_SUIDGID: u32 = 1 << 2;

/// Flag of an fsync: data only.
const FSYNC_FDATASYNC: u32 = 1 << 0;

/// The ioctls for inode flags (`FS_IOC_GETFLAGS`), for 64-bit and 32-bit programs.
const IOC_GETFLAGS: [u32; 2] = [0x8008_6601, 0x8004_6601];
pub(super) const IOC_SETFLAGS: [u32; 2] = [0x4008_6602, 0x4004_6602];
const IOC_GETVERSION: [u32; 2] = [0x8008_7601, 0x8004_7601];
/// The ioctls for the same flags in a `struct get_fsxattr`. If a program sets flags by the ioctls
/// above, the kernel first requests them by this one.
const IOC_FSGETXATTR: u32 = 0x801c_581f;
pub(super) const IOC_FSSETXATTR: u32 = 0x401c_5820;
pub(super) const FSXATTR_BYTES: usize = 28;
/// Pairs of `FS_*_FL` and `FS_XFLAG_*`: immutable, append-only, synchronous, no access
/// times, no dump.
const XFLAG_MAP: [(u32, u32); 5] =
    [(0x10, 0x08), (0x20, 0x10), (0x08, 0x20), (0x80, 0x40), (0x40, 0x80)];

/// Bit of a request id: the request was sent before, and was not answered.
pub(super) const UNIQUE_RESEND: u64 = 1 << 63;

/// Header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub opcode: u32,
    /// Id of the request, repeated in its reply.
    pub unique: u64,
    pub node: Node,
    /// The calling process.
    pub uid: u32,
    pub gid: u32,
}

/// A request that changes nothing and is decoded here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    Init(InitRequest),
    Open {
        directory: bool,
        access: Access,
    },
    Read(Read),
    GetFlags {
        room: usize,
    },
    GetExtended,
    GetVersion {
        room: usize,
    },
    SyncVolume,
    /// `statx`, with the creation time.
    Statx,
}

/// FUSE_CREATE: a file to be created and opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Create {
    pub name: Name,
    pub mode: u32,
    pub umask: u32,
    pub access: Access,
    /// True if the file must not exist.
    pub exclusive: bool,
}

/// An extended attribute to be set; its value is in the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SetXattr {
    pub name: AttributeName,
    pub value: Range<usize>,
    pub flags: u32,
    pub clear_setgid: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Read {
    pub offset: u64,
    pub len: u32,
    /// True if the access time stays.
    pub no_atime: bool,
}

/// A write, whose data is at [`WRITE_DATA_OFFSET`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Write {
    pub offset: u64,
    pub len: u32,
    /// True for a direct write, which the page cache does not have.
    pub direct: bool,
    /// True for a write from the page cache, whose writer cannot receive a short count.
    pub from_cache: bool,
    pub clear_privileges: bool,
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes)
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().copied().map(u64::from_ne_bytes)
}

/// Returns the bytes before the first NUL.
pub(super) fn c_string(bytes: &[u8]) -> Option<&[u8]> {
    let end = bytes.iter().position(|&byte| byte == 0)?;
    bytes.get(..end)
}

impl Header {
    pub(super) fn parse(request: &[u8]) -> Option<Self> {
        Some(Self {
            opcode: u32_at(request, 4)?,
            unique: u64_at(request, 8)?,
            node: Node(u64_at(request, 16)?),
            uid: u32_at(request, 24)?,
            gid: u32_at(request, 28)?,
        })
    }

    /// Returns true if the reply may take as long as a flush of the disk.
    pub(super) fn may_block(self) -> bool {
        self.opcode == SYNCFS
    }

    /// Returns `Some` for an fsync: true for its data only.
    pub(super) fn fsync_data_only(self, request: &[u8]) -> Option<bool> {
        let flags = || u32_at(request, HEADER_BYTES + 8).unwrap_or_default();
        matches!(self.opcode, FSYNC | FSYNCDIR).then(|| flags() & FSYNC_FDATASYNC != 0)
    }

    /// Returns true if the kernel caches pages of the node from now on.
    pub(super) fn fills_page_cache(self, request: &[u8]) -> bool {
        let flags = |at, direct| {
            u32_at(request, HEADER_BYTES + at).is_some_and(|flags| flags & direct == 0)
        };
        match self.opcode {
            READ => flags(20, READ_LOCKOWNER),
            WRITE => flags(20, WRITE_LOCKOWNER),
            _ => false,
        }
    }

    /// Describes the request, for people.
    pub(super) fn describe(self) -> String {
        const NAMES: [(u32, &str); 21] = [
            (1, "looking a name up in"),
            (3, "the attributes of"),
            (SETATTR, "a change of attributes of"),
            (5, "reading a symbolic link,"),
            (SYMLINK, "making a symbolic link in"),
            (MKNOD, "making a file in"),
            (MKDIR, "making a directory in"),
            (UNLINK, "removing a name in"),
            (RMDIR, "removing a directory in"),
            (RENAME, "renaming in"),
            (RENAME2, "renaming in"),
            (LINK, "a new name for a file in"),
            (READ, "reading"),
            (WRITE, "writing"),
            (SETXATTR, "an extended attribute of"),
            (22, "an extended attribute of"),
            (23, "the extended attributes of"),
            (CREATE, "making a file in"),
            (FALLOCATE, "fallocate of"),
            (28, "listing"),
            (44, "listing"),
        ];
        let name = NAMES.iter().find(|(opcode, _)| *opcode == self.opcode);
        let name = name.map_or_else(|| format!("request {} of", self.opcode), |it| it.1.into());
        format!("{name} inode {}", self.node.0)
    }

    pub(super) fn is_init(self) -> bool {
        self.opcode == INIT
    }

    /// Returns true if a server that died has read it before.
    pub(super) fn is_resent(self) -> bool {
        self.unique & UNIQUE_RESEND != 0
    }

    /// Returns true if the kernel waits for a reply.
    pub(super) fn wants_reply(self) -> bool {
        !matches!(self.opcode, FORGET | BATCH_FORGET | INTERRUPT)
    }

    /// Returns the nodes whose reference counts in the kernel decrease.
    pub(super) fn forgotten_nodes(self, request: &[u8]) -> impl Iterator<Item = Node> {
        let one = (self.opcode == FORGET).then_some(self.node);
        let body = request.get(HEADER_BYTES + 8..).filter(|_| self.opcode == BATCH_FORGET);
        let many = body.unwrap_or_default().chunks_exact(16);
        one.into_iter().chain(many.filter_map(|one| u64_at(one, 0).map(Node)))
    }

    /// Returns true if it may change the tree.
    pub(super) fn is_mutation(self, request: &[u8]) -> bool {
        match self.opcode {
            SETATTR | SYMLINK | MKNOD | MKDIR | UNLINK | RMDIR | RENAME | LINK | WRITE
            | SETXATTR | REMOVEXATTR | CREATE | FALLOCATE | RENAME2 | TMPFILE => true,
            IOCTL => u32_at(request, HEADER_BYTES + 12).is_some_and(|command| {
                IOC_SETFLAGS.contains(&command) || command == IOC_FSSETXATTR
            }),
            _ => false,
        }
    }

    /// Returns true if it has write data.
    pub(super) fn has_write_data(self) -> bool {
        self.opcode == WRITE
    }

    /// Returns the node to which a `link` adds a name.
    pub(super) fn linked_node(self, request: &[u8]) -> Option<Node> {
        u64_at(request, HEADER_BYTES).map(Node).filter(|_| self.opcode == LINK)
    }

    /// Returns true if its change may consist of several steps.
    pub(super) fn is_multi_step(self) -> bool {
        matches!(self.opcode, SETATTR | WRITE | FALLOCATE)
    }

    /// Returns true for an `lseek` to data or a hole.
    pub(super) fn is_seek(self) -> bool {
        self.opcode == LSEEK
    }
}

/// Returns the offset that a seek starts from.
pub(super) fn seek_offset(request: &[u8]) -> Option<u64> {
    u64_at(request, HEADER_BYTES + 8)
}

/// Returns the access that `open` flags request.
pub(super) fn access_from_open_flags(flags: u32) -> Access {
    let has = |flag: OFlags| flags & flag.bits() == flag.bits();
    let mode = flags & OFlags::RWMODE.bits();
    Access {
        read: mode != OFlags::WRONLY.bits() && !has(OFlags::NOATIME),
        write: mode != OFlags::RDONLY.bits(),
        append: has(OFlags::APPEND),
    }
}

/// Decodes a request that changes nothing and is answered here. Returns `None` for those that the
/// library handles, including invalid ones, which it refuses.
pub(super) fn decode(header: Header, request: &[u8]) -> Option<Message> {
    let body = request.get(HEADER_BYTES..)?;
    match header.opcode {
        INIT => InitRequest::parse(body).map(Message::Init),
        OPEN | OPENDIR => {
            let directory = header.opcode == OPENDIR;
            Some(Message::Open { directory, access: access_from_open_flags(u32_at(body, 0)?) })
        }
        READ => Some(Message::Read(Read {
            offset: u64_at(body, 8)?,
            len: u32_at(body, 16)?,
            no_atime: u32_at(body, 32)? & OFlags::NOATIME.bits() != 0,
        })),
        IOCTL => {
            let (command, room) = (u32_at(body, 12)?, u32_at(body, 28)? as usize);
            if IOC_GETFLAGS.contains(&command) {
                Some(Message::GetFlags { room })
            } else if IOC_GETVERSION.contains(&command) {
                Some(Message::GetVersion { room })
            } else {
                let is_extended = command == IOC_FSGETXATTR && room >= FSXATTR_BYTES;
                is_extended.then_some(Message::GetExtended)
            }
        }
        SYNCFS => Some(Message::SyncVolume),
        STATX => Some(Message::Statx),
        _ => None,
    }
}

/// Converts `FS_*_FL` flags to `FS_XFLAG_*`.
pub(super) fn to_xflags(flags: u32) -> u32 {
    let xflags = XFLAG_MAP.iter().filter(|(flag, _)| flags & flag != 0);
    xflags.fold(0, |all, (_, xflag)| all | xflag)
}

/// Returns `flags` with those replaced that `xflags` can express; `None` if `xflags` has bits
/// without a counterpart.
pub(super) fn apply_xflags(flags: u32, xflags: u32) -> Option<u32> {
    let known = XFLAG_MAP.iter().fold(0, |all, (_, xflag)| all | xflag);
    (xflags & !known == 0).then(|| {
        XFLAG_MAP.iter().fold(
            flags,
            |flags, (flag, xflag)| {
                if xflags & xflag != 0 { flags | flag } else { flags & !flag }
            },
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode_request(opcode: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
        bytes[8..16].copy_from_slice(&77_u64.to_ne_bytes());
        bytes[16..24].copy_from_slice(&12_u64.to_ne_bytes());
        bytes.extend_from_slice(body);
        bytes
    }

    fn decode_request(bytes: &[u8]) -> Option<Message> {
        decode(Header::parse(bytes)?, bytes)
    }

    #[test]
    fn read_request_is_decoded_with_noatime() {
        for (flags, no_atime) in [(0, false), (OFlags::NOATIME.bits(), true)] {
            let mut body = [0; 40];
            body[8..16].copy_from_slice(&(1_u64 << 40).to_ne_bytes());
            body[16..20].copy_from_slice(&4097_u32.to_ne_bytes());
            body[32..36].copy_from_slice(&flags.to_ne_bytes());
            let read = Read { offset: 1 << 40, len: 4097, no_atime };
            assert_eq!(decode_request(&encode_request(READ, &body)), Some(Message::Read(read)));
            assert_eq!(decode_request(&encode_request(READ, &body[..35])), None);
        }
    }

    #[test]
    fn getflags_ioctl_is_decoded_in_both_widths() {
        for command in IOC_GETFLAGS {
            let mut body = [0; 32];
            body[12..16].copy_from_slice(&command.to_ne_bytes());
            body[28..32].copy_from_slice(&4_u32.to_ne_bytes());
            assert_eq!(
                decode_request(&encode_request(IOCTL, &body)),
                Some(Message::GetFlags { room: 4 })
            );
        }
        assert_eq!(decode_request(&encode_request(IOCTL, &[0; 32])), None);
    }

    #[test]
    fn inode_flags_map_to_xflags() {
        assert_eq!(to_xflags(0x10 | 0x1000), 0x08);
        assert_eq!(apply_xflags(0x1000 | 0x20, 0x40), Some(0x1000 | 0x80));
        assert_eq!(apply_xflags(0, 0x200), None);
    }

    #[test]
    fn direct_io_does_not_fill_page_cache() {
        for (opcode, direct, fills) in
            [(READ, 0, true), (READ, 2, false), (WRITE, 0, true), (WRITE, 2, false), (3, 0, false)]
        {
            let mut body = [0; 40];
            body[20] = direct;
            let bytes = encode_request(opcode, &body);
            assert_eq!(Header::parse(&bytes).unwrap().fills_page_cache(&bytes), fills, "{opcode}");
        }
    }

    #[test]
    fn open_flags_are_decoded_to_access() {
        let of = |flags: OFlags| access_from_open_flags(flags.bits());
        let (read, write, append) = (true, true, true);
        assert_eq!(of(OFlags::RDONLY), Access { read, ..Access::default() });
        assert_eq!(of(OFlags::RDWR | OFlags::APPEND), Access { read, write, append });
        assert_eq!(of(OFlags::RDONLY | OFlags::NOATIME), Access::default());
        assert_eq!(of(OFlags::WRONLY | OFlags::NOATIME), Access { write, ..Access::default() });
        let bytes = encode_request(OPENDIR, &[0; 8]);
        let access = Access { read, ..Access::default() };
        assert_eq!(decode_request(&bytes), Some(Message::Open { directory: true, access }));
    }
}
