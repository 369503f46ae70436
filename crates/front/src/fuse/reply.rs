//! Messages to the kernel: replies and notifications.
//!
//! ```text
//!   length │ error (negative), or notification code │ unique, 0 in a notification │ body
//! ```

use draconis_types::{Attributes, Node, Time};

/// Length of the header, in bytes.
pub(super) const HEADER_BYTES: usize = 16;
/// The longest body: the reply to `statx`.
const MAX_BODY_BYTES: usize = 288;
/// Cache timeout of names and attributes, in seconds: the volume changes only through this server.
pub(super) const CACHE_TIMEOUT_SECONDS: u64 = 1 << 30;

/// FUSE_NOTIFY_INVAL_INODE.
const NOTIFY_INVAL_INODE: i32 = 2;
/// FUSE_NOTIFY_RESEND.
const NOTIFY_RESEND: i32 = 7;
/// Offset of an invalidation of attributes without pages.
const ATTRIBUTES_ONLY_OFFSET: u64 = u64::MAX;

/// A body of bounded length, to which fields are appended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReplyBody {
    bytes: [u8; MAX_BODY_BYTES],
    len: usize,
}

impl Default for ReplyBody {
    fn default() -> Self {
        Self { bytes: [0; MAX_BODY_BYTES], len: 0 }
    }
}

impl ReplyBody {
    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn push_bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
        self
    }

    pub(super) fn push_u16(&mut self, value: u16) -> &mut Self {
        self.push_bytes(&value.to_ne_bytes())
    }

    pub(super) fn push_u32(&mut self, value: u32) -> &mut Self {
        self.push_bytes(&value.to_ne_bytes())
    }

    pub(super) fn push_u64(&mut self, value: u64) -> &mut Self {
        self.push_bytes(&value.to_ne_bytes())
    }

    /// Pads with zeros up to `len` bytes.
    pub(super) fn pad_to(&mut self, len: usize) -> &mut Self {
        self.len = self.len.max(len.min(MAX_BODY_BYTES));
        self
    }

    /// Truncates to `room` bytes.
    fn truncate(&mut self, room: usize) -> &mut Self {
        self.len = self.len.min(room);
        self
    }
}

/// A reply, or a notification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    bytes: [u8; HEADER_BYTES + MAX_BODY_BYTES],
    len: usize,
}

impl Reply {
    /// Creates the reply to a request: an errno (0 for success), and the body, which is omitted on
    /// error.
    pub(super) fn new(unique: u64, errno: i32, answer: &[u8]) -> Self {
        let answer = if errno == 0 { answer } else { &[] };
        Self::encode(unique, -errno, answer)
    }

    /// Creates the notification that requests all unanswered requests again.
    pub(super) fn resend_notification() -> Self {
        Self::encode(0, NOTIFY_RESEND, &[])
    }

    fn encode(unique: u64, what: i32, body: &[u8]) -> Self {
        let len = HEADER_BYTES + body.len();
        let mut bytes = [0; HEADER_BYTES + MAX_BODY_BYTES];
        bytes[..4].copy_from_slice(&(len as u32).to_ne_bytes());
        bytes[4..8].copy_from_slice(&what.to_ne_bytes());
        bytes[8..HEADER_BYTES].copy_from_slice(&unique.to_ne_bytes());
        bytes[HEADER_BYTES..len].copy_from_slice(body);
        Self { bytes, len }
    }

    /// Returns the header of a reply with `len` bytes of data.
    pub(super) fn data_header(unique: u64, len: usize) -> [u8; HEADER_BYTES] {
        let mut head = [0; HEADER_BYTES];
        head[..4].copy_from_slice(&((HEADER_BYTES + len) as u32).to_ne_bytes());
        head[8..].copy_from_slice(&unique.to_ne_bytes());
        head
    }

    /// Creates the notification that has the kernel write back and drop pages of a node: `len`
    /// bytes from `offset` on, or all after it if `len` is 0. The kernel waits for pending reads of
    /// pages, so the sending thread must not be needed for replies.
    pub(super) fn invalidate_pages(node: Node, offset: u64, len: u64) -> Self {
        let mut body = ReplyBody::default();
        body.push_u64(node.0).push_u64(offset).push_u64(len);
        Self::encode(0, NOTIFY_INVAL_INODE, body.as_bytes())
    }

    /// Creates the notification that a node's attributes have changed. The kernel does not block on
    /// it.
    pub(super) fn invalidate_attributes(node: Node) -> Self {
        Self::invalidate_pages(node, ATTRIBUTES_ONLY_OFFSET, 0)
    }

    /// Returns the same reply for the request `unique`.
    pub(super) fn with_unique(mut self, unique: u64) -> Self {
        self.bytes[8..HEADER_BYTES].copy_from_slice(&unique.to_ne_bytes());
        self
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Encodes the reply to FUSE_STATX.
pub(super) fn statx_reply(it: &Attributes) -> ReplyBody {
    const STATX_BASIC_STATS: u32 = 0x7FF;
    const STATX_BTIME: u32 = 0x800;
    let mask =
        if it.created.is_some() { STATX_BASIC_STATS | STATX_BTIME } else { STATX_BASIC_STATS };
    let mut answer = ReplyBody::default();
    answer.push_u64(CACHE_TIMEOUT_SECONDS).push_u32(0).push_u32(0).push_u64(0).push_u64(0);
    answer.push_u32(mask).push_u32(it.block_size_bytes).push_u64(0);
    answer
        .push_u32(it.links)
        .push_u32(it.uid)
        .push_u32(it.gid)
        .push_u16(it.mode as u16)
        .push_u16(0);
    answer.push_u64(it.node.0).push_u64(it.size_bytes).push_u64(it.blocks_512).push_u64(0);
    for time in [it.accessed, it.created.unwrap_or_default(), it.changed, it.modified] {
        answer.push_u64(time.seconds as u64).push_u32(time.nanoseconds).push_u32(0);
    }
    answer.push_u32(it.device.0).push_u32(it.device.1).pad_to(MAX_BODY_BYTES);
    answer
}

/// Encodes `struct fuse_write_out`.
pub(super) fn write_reply(len: u32) -> ReplyBody {
    let mut answer = ReplyBody::default();
    answer.push_u32(len).push_u32(0);
    answer
}

/// Encodes the reply to an ioctl that returns `value` in up to `room` bytes.
pub(super) fn ioctl_u32_reply(value: u32, room: usize) -> ReplyBody {
    let mut answer = ioctl_empty_reply();
    answer.push_u64(value.into()).truncate(HEADER_BYTES + room);
    answer
}

/// Encodes the reply to an ioctl without data: a result of 0 and no vectors.
pub(super) fn ioctl_empty_reply() -> ReplyBody {
    let mut answer = ReplyBody::default();
    answer.push_u32(0).push_u32(0).push_u32(0).push_u32(0);
    answer
}

/// Encodes the reply to an ioctl that reads a `struct get_fsxattr` of `len` bytes.
pub(super) fn ioctl_fsxattr_reply(xflags: u32, len: usize) -> ReplyBody {
    let mut answer = ioctl_empty_reply();
    answer.push_u32(xflags).pad_to(HEADER_BYTES + len);
    answer
}

/// Encodes `struct fuse_open_out`.
pub(super) fn open_reply(handle: u64, flags: u32) -> ReplyBody {
    let mut answer = ReplyBody::default();
    push_open_out(&mut answer, handle, flags);
    answer
}

/// Returns the entry timeout of names in `directory`, in seconds. With casefolding, a change of one
/// name affects others that the kernel does not know to be equal.
pub(super) fn entry_timeout_seconds(directory: &Attributes) -> u64 {
    /// Inode flag of a directory: casefolded names.
    const CASEFOLD_FLAG: u32 = 0x4000_0000;
    if directory.flags & CASEFOLD_FLAG != 0 { 0 } else { CACHE_TIMEOUT_SECONDS }
}

/// Encodes the reply to FUSE_CREATE: entry and open. `name_seconds` is the entry timeout.
pub(super) fn create_reply(attributes: &Attributes, name_seconds: u64, flags: u32) -> ReplyBody {
    let mut answer = ReplyBody::default();
    push_entry_out(&mut answer, attributes, name_seconds);
    push_open_out(&mut answer, 0, flags);
    answer
}

/// Encodes `struct fuse_entry_out`. `name_seconds` is the entry timeout.
pub(super) fn entry_reply(attributes: &Attributes, name_seconds: u64) -> ReplyBody {
    let mut answer = ReplyBody::default();
    push_entry_out(&mut answer, attributes, name_seconds);
    answer
}

/// Encodes `struct fuse_attr_out`.
pub(super) fn attr_reply(it: &Attributes) -> ReplyBody {
    let mut answer = ReplyBody::default();
    answer.push_u64(CACHE_TIMEOUT_SECONDS).push_u64(0);
    push_attributes(&mut answer, it);
    answer
}

fn push_entry_out(answer: &mut ReplyBody, attributes: &Attributes, name_seconds: u64) {
    answer.push_u64(attributes.node.0).push_u64(attributes.generation.into());
    answer.push_u64(name_seconds).push_u64(CACHE_TIMEOUT_SECONDS).push_u32(0).push_u32(0);
    push_attributes(answer, attributes);
}

fn push_open_out(into: &mut ReplyBody, handle: u64, flags: u32) {
    into.push_u64(handle).push_u32(flags).push_u32(0);
}

/// Appends `struct fuse_attr`.
fn push_attributes(into: &mut ReplyBody, it: &Attributes) {
    let seconds = |time: Time| time.seconds as u64;
    into.push_u64(it.node.0).push_u64(it.size_bytes).push_u64(it.blocks_512);
    into.push_u64(seconds(it.accessed))
        .push_u64(seconds(it.modified))
        .push_u64(seconds(it.changed));
    into.push_u32(it.accessed.nanoseconds)
        .push_u32(it.modified.nanoseconds)
        .push_u32(it.changed.nanoseconds);
    into.push_u32(it.mode).push_u32(it.links).push_u32(it.uid).push_u32(it.gid);
    let (major, minor) = it.device;
    // The kernel's 32-bit encoding of a device number.
    let device = minor & 0xFF | major << 8 | (minor & !0xFF) << 12;
    into.push_u32(device).push_u32(it.block_size_bytes).push_u32(0);
}

#[cfg(test)]
mod tests {
    use draconis_types::FileType;

    use super::*;

    #[test]
    fn error_reply_has_no_body() {
        let reply = Reply::new(9, 28, &[1; 8]);
        assert_eq!(reply.as_bytes().len(), 16);
        assert_eq!(i32::from_ne_bytes(*reply.as_bytes()[4..].first_chunk().unwrap()), -28);
        assert_eq!(Reply::new(9, 0, &[1; 8]).as_bytes().len(), 24);
    }

    #[test]
    fn ioctl_reply_is_truncated_to_requested_size() {
        assert_eq!(ioctl_u32_reply(0x10, 4).as_bytes().len(), 20);
        assert_eq!(ioctl_u32_reply(0x10, 8).as_bytes().len(), 24);
        assert_eq!(ioctl_u32_reply(0x10, 100).as_bytes()[16], 0x10);
        assert_eq!(ioctl_fsxattr_reply(8, 28).as_bytes().len(), 44);
    }

    #[test]
    fn entry_reply_has_kernel_struct_length() {
        let made = create_reply(&test_attributes(), CACHE_TIMEOUT_SECONDS, 7);
        assert_eq!(made.as_bytes().len(), 128 + 16);
        assert_eq!(made.as_bytes()[136], 7);
        assert_eq!(open_reply(1, 3).as_bytes().len(), 16);
    }

    fn test_attributes() -> Attributes {
        let time = Time { seconds: -1, nanoseconds: 5 };
        Attributes {
            node: Node(12),
            generation: 9,
            kind: FileType::File,
            mode: 0o100_600,
            links: 1,
            uid: 7,
            gid: 8,
            device: (0, 0),
            size_bytes: 0,
            blocks_512: 0,
            block_size_bytes: 4096,
            flags: 0,
            no_xattrs: true,
            accessed: time,
            modified: time,
            changed: time,
            created: None,
        }
    }

    #[test]
    fn replies_have_kernel_struct_lengths() {
        let made = Time { seconds: 77, nanoseconds: 1 };
        let told = statx_reply(&Attributes { created: Some(made), ..test_attributes() });
        assert_eq!(told.as_bytes().len(), 32 + 256);
        assert_eq!(told.as_bytes()[32 + 80], 77, "time of birth, behind that of access");
    }

    #[test]
    fn attribute_invalidation_keeps_pages() {
        let notice = Reply::invalidate_attributes(Node(12));
        assert_eq!(notice.as_bytes().len(), 40);
        let offset = i64::from_ne_bytes(*notice.as_bytes()[24..].first_chunk().unwrap());
        assert!(offset < 0);
        let pages = Reply::invalidate_pages(Node(12), 4096, 0);
        assert_eq!(pages.as_bytes()[25], 16);
    }
}
