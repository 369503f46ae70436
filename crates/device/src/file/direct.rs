//! Direct I/O: support of a file, and alignment of its requests.

use std::os::fd::OwnedFd;

use draconis_types::PrivateBuffer;
use rustix::fs::{OFlags, StatxFlags};
use rustix::io::Errno;

/// Alignment tried for direct I/O if the kernel reports none, in bytes.
const DIRECT_ALIGN_BYTES: u32 = 4096;

/// Enables direct I/O if the file supports it; returns the required alignment.
pub(crate) fn enable_direct_io(fd: &OwnedFd) -> u32 {
    match try_direct(fd) {
        Ok(align_bytes) => align_bytes,
        Err(errno) => {
            log::info!("no direct I/O here ({errno}): reads and writes go through the page cache");
            1
        }
    }
}

fn try_direct(fd: &OwnedFd) -> rustix::io::Result<u32> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | OFlags::DIRECT)?;
    let align_bytes = match statx_alignment(fd) {
        // The kernel reports no direct I/O for this file, although it accepts the flag.
        Some(0) => Err(Errno::OPNOTSUPP),
        Some(told) if told.is_power_of_two() && told <= 1 << 16 => Ok(told),
        _ => Ok(DIRECT_ALIGN_BYTES),
    };
    let mut probe = PrivateBuffer::new(DIRECT_ALIGN_BYTES as usize);
    let tried = align_bytes.and_then(|align_bytes| {
        rustix::io::pread(fd, &mut probe[..], 0)?;
        Ok(align_bytes)
    });
    if tried.is_err() {
        rustix::fs::fcntl_setfl(fd, flags)?;
    }
    tried
}

/// Returns the direct I/O alignment of memory and offset reported by `statx` (Linux 6.1).
fn statx_alignment(fd: &OwnedFd) -> Option<u32> {
    let flags = rustix::fs::AtFlags::EMPTY_PATH;
    let told = rustix::fs::statx(fd, c"", flags, StatxFlags::DIOALIGN).ok()?;
    (told.stx_mask & StatxFlags::DIOALIGN.bits() != 0)
        .then(|| told.stx_dio_offset_align.max(told.stx_dio_mem_align.min(4096)))
}
