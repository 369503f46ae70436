//! A loop device over an image, as a block device name for the kernel.
//!
//! Nothing is read or written through it. It is the source of a mount of the type `fuseblk`, the
//! only FUSE type to which the kernel passes `sync` on.
//!
//! Law: the device disappears with its last user (`LO_FLAGS_AUTOCLEAR`): the mount, or, without a
//! mount, the descriptor returned here.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
/// Maximum retries if another process takes the free device first.
const MAX_RETRIES: usize = 64;

/// Poll interval of [`wait_until_free`].
const RELEASE_PAUSE: Duration = Duration::from_millis(2);

/// `struct loop_config` of `linux/loop.h`, with its `struct loop_info64`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    /// Device, inode, real device, offset, size limit.
    sizelimit: [u64; 5],
    /// Number, encryption type, key length, flags.
    words: [u32; 4],
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    crypt_key: [u8; 32],
    init: [u64; 2],
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopConfig>() == 304, "as the kernel has it");

/// Attaches `image`, open for reading and writing, to a loop device. Requires root.
///
/// # Errors
/// The system's error.
pub(crate) fn attach(image: impl AsFd) -> io::Result<(PathBuf, OwnedFd)> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let control = rustix::fs::open("/dev/loop-control", flags, Mode::empty())?;
    for _ in 0..MAX_RETRIES {
        let path = PathBuf::from(format!("/dev/loop{}", free_number(&control)?));
        let device = rustix::fs::open(&path, flags, Mode::empty())?;
        match configure(device.as_raw_fd(), image.as_fd().as_raw_fd()) {
            Ok(()) => return Ok((path, device)),
            Err(error) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => {}
            Err(error) => return Err(error),
        }
    }
    Err(Errno::BUSY.into())
}

/// Waits until the loop device with this number, such as `7:2`, has no file: after the unmount of
/// its user, the kernel frees it a moment later. Returns at once for any other device.
pub(crate) fn wait_until_free(device: &str, wait: Duration) {
    let file = Path::new("/sys/dev/block").join(device).join("loop/backing_file");
    let until = Instant::now() + wait;
    while file.exists() && Instant::now() < until {
        std::thread::sleep(RELEASE_PAUSE);
    }
}

fn free_number(control: &OwnedFd) -> io::Result<i32> {
    // SAFETY: the request takes no argument and touches no memory of ours.
    let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as _) };
    if number < 0 { Err(io::Error::last_os_error()) } else { Ok(number) }
}

fn configure(device: RawFd, image: RawFd) -> io::Result<()> {
    let config = LoopConfig {
        fd: image.cast_unsigned(),
        block_size: 0,
        sizelimit: [0; 5],
        words: [0, 0, 0, LO_FLAGS_AUTOCLEAR],
        file_name: [0; 64],
        crypt_name: [0; 64],
        crypt_key: [0; 32],
        init: [0; 2],
        reserved: [0; 8],
    };
    // SAFETY: the kernel reads one `struct loop_config`, whose layout `LoopConfig` has, and which
    // outlives the call; it keeps the file, not the pointer.
    let done = unsafe { libc::ioctl(device, LOOP_CONFIGURE as _, &raw const config) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
