//! The messages that we decode ourselves: writes, whose bytes stay where they were read,
//! and what the library cannot answer.
//!
//! ```text
//!   header 40 bytes │ fixed fields of the operation │ what belongs to it
//! ```
//!
//! The kernel is trusted to say what it means, and still nothing here panics on any bytes.

use draconis_exchange::contract::Node;

/// Length of the header of every request, in bytes.
pub(super) const HEADER_BYTES: usize = 40;
/// Offset of a write's data in its request.
pub(super) const WRITE_DATA_AT: usize = HEADER_BYTES + 40;
/// Longest reply that [`reply`] makes.
const REPLY_BYTES: usize = 64;

const WRITE: u32 = 16;
const FSYNC: u32 = 20;
const FSYNCDIR: u32 = 30;
const IOCTL: u32 = 39;
const LSEEK: u32 = 46;
const SYNCFS: u32 = 50;

/// Of a write: it comes from the kernel's cache, whose writer has gone on long ago.
const WRITE_CACHE: u32 = 1 << 0;
/// Of a write: the writer may not keep setuid and setgid.
const WRITE_KILL_SUIDGID: u32 = 1 << 2;

/// The inode flags, as `FS_IOC_GETFLAGS` numbers it for 64 and for 32 bit programs.
const GET_FLAGS: [u32; 2] = [0x8008_6601, 0x8004_6601];
const SET_FLAGS: [u32; 2] = [0x4008_6602, 0x4004_6602];
const GET_VERSION: [u32; 2] = [0x8008_7601, 0x8004_7601];
/// The same flags under other numbers (`struct fsxattr`). Whoever sets flags in the first
/// way is asked for them in this one by the kernel.
const GET_EXTENDED: u32 = 0x801c_581f;
const SET_EXTENDED: u32 = 0x401c_5820;
/// Length of a `struct fsxattr`, in bytes.
const EXTENDED_BYTES: usize = 28;
/// Pairs of `FS_*_FL` and `FS_XFLAG_*`: immutable, append-only, synchronous, no access
/// times, no dump.
const SAME_FLAGS: [(u32, u32); 5] =
    [(0x10, 0x08), (0x20, 0x10), (0x08, 0x20), (0x80, 0x40), (0x40, 0x80)];

/// What the header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub opcode: u32,
    /// Names the request in its reply.
    pub unique: u64,
    pub node: Node,
}

/// A message that is answered here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    Write(Write),
    GetFlags { room: usize },
    SetFlags { flags: u32 },
    GetExtended,
    SetExtended { xflags: u32 },
    GetVersion { room: usize },
    SyncVolume,
}

/// A write, whose bytes lie at [`WRITE_DATA_AT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Write {
    pub offset: u64,
    pub len: u32,
    /// Nobody is there to be told that less was written.
    pub from_cache: bool,
    pub clear_privileges: bool,
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().copied().map(u64::from_ne_bytes)
}

impl Header {
    pub(super) fn of(request: &[u8]) -> Option<Self> {
        Some(Self {
            opcode: u32_at(request, 4)?,
            unique: u64_at(request, 8)?,
            node: Node(u64_at(request, 16)?),
        })
    }

    /// Whether the answer may take as long as a disk takes to flush.
    pub(super) fn waits(self) -> bool {
        matches!(self.opcode, FSYNC | FSYNCDIR | SYNCFS)
    }

    /// Whether it asks where data is.
    pub(super) fn seeks(self) -> bool {
        self.opcode == LSEEK
    }
}

/// The offset that a seek starts from.
pub(super) fn seek_offset(request: &[u8]) -> Option<u64> {
    u64_at(request, HEADER_BYTES + 8)
}

/// Decodes what is answered here; the rest is the library's.
pub(super) fn decode(header: Header, request: &[u8]) -> Option<Message> {
    let body = request.get(HEADER_BYTES..)?;
    match header.opcode {
        WRITE => {
            let len = u32_at(body, 16)?;
            let there = request.len().checked_sub(WRITE_DATA_AT)?;
            // The library refuses what is cut short.
            let flags = u32_at(body, 20)?;
            (len as usize <= there).then_some(Message::Write(Write {
                offset: u64_at(body, 8)?,
                len,
                from_cache: flags & WRITE_CACHE != 0,
                clear_privileges: flags & WRITE_KILL_SUIDGID != 0,
            }))
        }
        IOCTL => {
            let (command, room) = (u32_at(body, 12)?, u32_at(body, 28)? as usize);
            if GET_FLAGS.contains(&command) {
                Some(Message::GetFlags { room })
            } else if GET_VERSION.contains(&command) {
                Some(Message::GetVersion { room })
            } else if SET_FLAGS.contains(&command) {
                Some(Message::SetFlags { flags: u32_at(body, 32)? })
            } else {
                match command {
                    GET_EXTENDED if room >= EXTENDED_BYTES => Some(Message::GetExtended),
                    SET_EXTENDED => Some(Message::SetExtended { xflags: u32_at(body, 32)? }),
                    _ => None,
                }
            }
        }
        SYNCFS => Some(Message::SyncVolume),
        _ => None,
    }
}

/// A reply: an errno (0 if done) and the answer, which is left out if there is an error.
pub(super) struct Reply {
    bytes: [u8; REPLY_BYTES],
    len: usize,
}

impl Reply {
    pub(super) fn new(unique: u64, errno: i32, answer: &[u8]) -> Self {
        let answer = if errno == 0 { answer } else { &[] };
        let mut bytes = [0; REPLY_BYTES];
        let len = 16 + answer.len();
        bytes[..4].copy_from_slice(&(len as u32).to_ne_bytes());
        bytes[4..8].copy_from_slice(&(-errno).to_ne_bytes());
        bytes[8..16].copy_from_slice(&unique.to_ne_bytes());
        bytes[16..len].copy_from_slice(answer);
        Self { bytes, len }
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The answer to a write.
pub(super) fn written(len: u32) -> [u8; 8] {
    let mut answer = [0; 8];
    answer[..4].copy_from_slice(&len.to_ne_bytes());
    answer
}

/// The answer to an ioctl that asks for flags in their other form.
pub(super) fn extended_answer(flags: u32) -> [u8; 16 + EXTENDED_BYTES] {
    let mut answer = [0; 16 + EXTENDED_BYTES];
    let xflags = SAME_FLAGS.iter().filter(|(flag, _)| flags & flag != 0);
    let xflags = xflags.fold(0, |all, (_, xflag)| all | xflag);
    answer[16..20].copy_from_slice(&xflags.to_ne_bytes());
    answer
}

/// `flags` with those that have another form as that says; `None` if it says something
/// that flags cannot.
pub(super) fn with_extended(flags: u32, xflags: u32) -> Option<u32> {
    let known = SAME_FLAGS.iter().fold(0, |all, (_, xflag)| all | xflag);
    (xflags & !known == 0).then(|| {
        SAME_FLAGS.iter().fold(flags, |flags, (flag, xflag)| {
            if xflags & xflag != 0 { flags | flag } else { flags & !flag }
        })
    })
}

/// The answer to an ioctl that returns `value` in up to `room` bytes, and its length.
pub(super) fn ioctl_answer(value: u32, room: usize) -> ([u8; 24], usize) {
    let mut answer = [0; 24];
    answer[16..].copy_from_slice(&u64::from(value).to_ne_bytes());
    (answer, 16 + room.min(8))
}

/// The notification that a node's pages from `offset` on are to be brought here and
/// forgotten by the kernel.
pub(super) fn fetch_pages(node: Node, offset: u64) -> [u8; 40] {
    const INVALIDATE_INODE: i32 = 2;
    let mut bytes = [0; 40];
    bytes[..4].copy_from_slice(&40_u32.to_ne_bytes());
    bytes[4..8].copy_from_slice(&INVALIDATE_INODE.to_ne_bytes());
    bytes[16..24].copy_from_slice(&node.0.to_ne_bytes());
    bytes[24..32].copy_from_slice(&offset.to_ne_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(opcode: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
        bytes[8..16].copy_from_slice(&77_u64.to_ne_bytes());
        bytes[16..24].copy_from_slice(&12_u64.to_ne_bytes());
        bytes.extend_from_slice(body);
        bytes
    }

    fn write(len: u32, flags: u32, data: usize) -> Vec<u8> {
        let mut body = vec![0; 40 + data];
        body[8..16].copy_from_slice(&4096_u64.to_ne_bytes());
        body[16..20].copy_from_slice(&len.to_ne_bytes());
        body[20..24].copy_from_slice(&flags.to_ne_bytes());
        request(WRITE, &body)
    }

    fn decoded(bytes: &[u8]) -> Option<Message> {
        decode(Header::of(bytes)?, bytes)
    }

    #[test]
    fn a_write_is_decoded_where_it_lies() {
        let bytes = write(5, WRITE_KILL_SUIDGID | 1, 5);
        let header = Header { opcode: WRITE, unique: 77, node: Node(12) };
        assert_eq!(Header::of(&bytes), Some(header));
        let write = Write { offset: 4096, len: 5, from_cache: true, clear_privileges: true };
        assert_eq!(decoded(&bytes), Some(Message::Write(write)));
        assert_eq!(bytes.len() - WRITE_DATA_AT, 5);
    }

    #[test]
    fn what_is_cut_short_is_not_decoded() {
        assert_eq!(decoded(&write(6, 0, 5)), None);
        let whole = write(0, 0, 0);
        for len in 0..whole.len() {
            assert_eq!(decoded(&whole[..len]), None, "{len}");
        }
    }

    #[test]
    fn flags_are_asked_by_programs_of_both_widths() {
        for command in GET_FLAGS {
            let mut body = [0; 32];
            body[12..16].copy_from_slice(&command.to_ne_bytes());
            body[28..32].copy_from_slice(&4_u32.to_ne_bytes());
            assert_eq!(decoded(&request(IOCTL, &body)), Some(Message::GetFlags { room: 4 }));
        }
        let (answer, len) = ioctl_answer(0x10, 4);
        assert_eq!((answer[16], len), (0x10, 20));
        assert_eq!(decoded(&request(IOCTL, &[0; 32])), None);
    }

    #[test]
    fn flags_have_two_forms() {
        assert_eq!(extended_answer(0x10 | 0x1000)[16], 0x08);
        assert_eq!(with_extended(0x1000 | 0x20, 0x40), Some(0x1000 | 0x80));
        assert_eq!(with_extended(0, 0x200), None);
    }

    #[test]
    fn an_error_carries_no_answer() {
        let reply = Reply::new(9, 28, &[1; 8]);
        assert_eq!(reply.as_bytes().len(), 16);
        assert_eq!(i32::from_ne_bytes(*reply.as_bytes()[4..].first_chunk().unwrap()), -28);
        assert_eq!(Reply::new(9, 0, &[1; 8]).as_bytes().len(), 24);
    }
}
