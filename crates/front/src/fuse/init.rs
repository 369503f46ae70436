//! Negotiation with the kernel at the beginning of a connection (`FUSE_INIT`).
//!
//! Decoded here, since the library does not know all features that are used.

use super::options::ServerOptions;
use super::reply::ReplyBody;

/// The protocol version of the reply.
const PROTOCOL_MAJOR: u32 = 7;
const PROTOCOL_MINOR: u32 = 38;
/// Largest write of one request, in bytes, and in pages.
const MAX_WRITE_BYTES: u32 = 1 << 20;
const PAGE_BYTES: u32 = 4096;
/// Maximum number of background requests; the congestion threshold is three quarters of it.
const MAX_BACKGROUND: u16 = u16::MAX;
/// Size of `struct fuse_init_out`, in bytes.
pub(super) const INIT_OUT_BYTES: usize = 64;

/// Reads of one file may overlap.
const ASYNC_READ: u64 = 1 << 0;
/// File handles may outlive the kernel's inodes.
const EXPORT_SUPPORT: u64 = 1 << 4;
const BIG_WRITES: u64 = 1 << 5;
/// The server applies the umask: a default ACL replaces it.
const DONT_MASK: u64 = 1 << 6;
const HAS_IOCTL_DIR: u64 = 1 << 11;
const DO_READDIRPLUS: u64 = 1 << 13;
/// Direct I/O of `io_submit` and io_uring is asynchronous.
const ASYNC_DIO: u64 = 1 << 15;
const WRITEBACK_CACHE: u64 = 1 << 16;
const NO_OPEN_SUPPORT: u64 = 1 << 17;
const PARALLEL_DIROPS: u64 = 1 << 18;
const POSIX_ACL: u64 = 1 << 20;
const MAX_PAGES: u64 = 1 << 22;
const CACHE_SYMLINKS: u64 = 1 << 23;
const NO_OPENDIR_SUPPORT: u64 = 1 << 24;
const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
/// The server clears setuid and setgid. The kernel requests it by a setattr without attributes.
const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
/// A setxattr of an ACL has a flag for clearing setgid.
const SETXATTR_EXT: u64 = 1 << 29;
const INIT_EXT: u64 = 1 << 30;
/// Files opened for direct I/O can be mapped.
const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
const HAS_RESEND: u64 = 1 << 39;
const OVER_IO_URING: u64 = 1 << 41;

/// A FUSE_INIT request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InitRequest {
    pub major: u32,
    pub max_read_ahead: u32,
    /// Features that the kernel supports.
    pub kernel_flags: u64,
}

impl InitRequest {
    /// Parses the bytes after the header.
    pub(super) fn parse(body: &[u8]) -> Option<Self> {
        let word = |at: usize| body.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes);
        let mut kernel_flags = u64::from(word(12)?);
        if kernel_flags & INIT_EXT != 0 {
            kernel_flags |= u64::from(word(16)?) << 32;
        }
        Some(Self { major: word(0)?, max_read_ahead: word(8)?, kernel_flags })
    }

    /// Selects the flags that are wanted and supported.
    fn select_flags(self, options: ServerOptions, writable: bool) -> u64 {
        // Not ATOMIC_O_TRUNC: if opening sends no request, nothing would truncate.
        let mut wanted = ASYNC_READ
            | EXPORT_SUPPORT
            | BIG_WRITES
            | HAS_IOCTL_DIR
            | DO_READDIRPLUS
            | ASYNC_DIO
            | NO_OPEN_SUPPORT
            | PARALLEL_DIROPS
            | MAX_PAGES
            | CACHE_SYMLINKS
            | NO_OPENDIR_SUPPORT
            | EXPLICIT_INVAL_DATA
            | INIT_EXT
            | DIRECT_IO_ALLOW_MMAP
            | HAS_RESEND;
        if options.permissions {
            wanted |= POSIX_ACL;
        }
        if options.over_rings {
            wanted |= OVER_IO_URING;
        }
        if writable {
            wanted |= HANDLE_KILLPRIV_V2 | DONT_MASK | SETXATTR_EXT;
            if options.write_back {
                wanted |= WRITEBACK_CACHE;
            }
        }
        self.kernel_flags & wanted
    }

    /// Returns the reply and the negotiated features; `None` for an older major version. A kernel
    /// with a newer one repeats the request in our version.
    pub(super) fn negotiate(
        self,
        options: ServerOptions,
        writable: bool,
    ) -> Option<(ReplyBody, NegotiatedFeatures)> {
        let mut answer = ReplyBody::default();
        if self.major < PROTOCOL_MAJOR {
            return None;
        }
        let flags =
            if self.major == PROTOCOL_MAJOR { self.select_flags(options, writable) } else { 0 };
        answer
            .push_u32(PROTOCOL_MAJOR)
            .push_u32(PROTOCOL_MINOR)
            .push_u32(self.max_read_ahead)
            .push_u32(flags as u32);
        answer.push_u16(MAX_BACKGROUND).push_u16(MAX_BACKGROUND / 4 * 3).push_u32(MAX_WRITE_BYTES);
        // Time granularity in ns; pages of a request; no DAX mappings.
        answer.push_u32(1).push_u16((MAX_WRITE_BYTES / PAGE_BYTES) as u16).push_u16(0);
        answer.push_u32((flags >> 32) as u32).pad_to(INIT_OUT_BYTES);
        let agreed = NegotiatedFeatures {
            setxattr_ext: flags & SETXATTR_EXT != 0,
            over_rings: flags & OVER_IO_URING != 0,
        };
        Some((answer, agreed))
    }
}

/// Negotiated format of later requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NegotiatedFeatures {
    /// True if FUSE_SETXATTR is eight bytes longer.
    pub setxattr_ext: bool,
    /// True if the kernel sends requests over rings once their entries are registered.
    pub over_rings: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL_KERNEL_FLAGS: u64 = u64::MAX;

    fn negotiated_flags(init: InitRequest, options: ServerOptions, writable: bool) -> u64 {
        let (answer, _) = init.negotiate(options, writable).unwrap();
        assert_eq!(answer.as_bytes().len(), INIT_OUT_BYTES);
        let word = |at: usize| {
            u64::from(u32::from_ne_bytes(*answer.as_bytes()[at..].first_chunk().unwrap()))
        };
        word(12) | word(32) << 32
    }

    #[test]
    fn unsupported_kernel_features_are_not_requested() {
        let of = |kernel_flags| InitRequest {
            major: PROTOCOL_MAJOR,
            max_read_ahead: 1 << 17,
            kernel_flags,
        };
        let options = ServerOptions {
            permissions: true,
            write_back: true,
            no_polling: false,
            over_rings: false,
        };
        assert_eq!(negotiated_flags(of(0), options, true), 0);
        let all = negotiated_flags(of(ALL_KERNEL_FLAGS), options, true);
        assert_eq!(all & OVER_IO_URING, 0);
        assert!(all & (WRITEBACK_CACHE | POSIX_ACL | SETXATTR_EXT) > 0 && all & (1 << 3) == 0);
        let reading = negotiated_flags(of(ALL_KERNEL_FLAGS), ServerOptions::default(), false);
        assert_eq!(reading & (WRITEBACK_CACHE | POSIX_ACL | SETXATTR_EXT | DONT_MASK), 0);
        let (_, agreed) = of(ASYNC_READ).negotiate(options, true).unwrap();
        assert!(!agreed.setxattr_ext);
    }

    #[test]
    fn other_major_version_is_refused_or_renegotiated() {
        let of = |major| InitRequest { major, max_read_ahead: 0, kernel_flags: ALL_KERNEL_FLAGS };
        assert_eq!(of(6).negotiate(ServerOptions::default(), true), None);
        assert_eq!(negotiated_flags(of(8), ServerOptions::default(), true), 0);
    }

    #[test]
    fn second_flag_word_needs_init_ext() {
        let mut body = [0; 64];
        body[..4].copy_from_slice(&7_u32.to_ne_bytes());
        body[16..20].copy_from_slice(&(1_u32 << 7).to_ne_bytes());
        assert_eq!(InitRequest::parse(&body).unwrap().kernel_flags, 0);
        body[12..16].copy_from_slice(&(INIT_EXT as u32).to_ne_bytes());
        assert_eq!(InitRequest::parse(&body).unwrap().kernel_flags, INIT_EXT | HAS_RESEND);
        assert_eq!(InitRequest::parse(&body[..18]), None);
    }
}
