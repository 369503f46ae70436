//! The FUSE connection to the kernel, and each worker's share of it.
//!
//! Since Linux 6.9 the kernel can resend requests that a worker has read but not answered: all
//! workers share one descriptor. Before, each worker has its own (`FUSE_DEV_IOC_CLONE`). Requests
//! read through it then end with it, by ECONNABORTED, and the successor gets later requests.
//!
//! Threads in the keeper send a worker's notifications: see [`notices`].
#![allow(unsafe_code)]

use parking_lot::{RwLock, RwLockWriteGuard};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use draconis_exchange::notices::{self, NoticeSender};
use draconis_types::injected_fault::InjectedFault;
use rustix::fs::{Mode, OFlags};

const FUSE_DEV_IOC_CLONE: libc::c_ulong = 0x8004_E500;
/// The first Linux version that can resend requests.
const MIN_RESEND_KERNEL: (u32, u32) = (6, 9);

/// Timeout for the kernel to finish the notifications in progress.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Threads that send workers' notifications. A thread that blocks in the kernel when its worker
/// dies continues once the successor has answered the request that it waits for.
#[derive(Default)]
pub(crate) struct NotificationRelays {
    /// Read-locked while a notification is sent.
    sending: Arc<RwLock<()>>,
}

impl NotificationRelays {
    /// Starts the relay thread of one worker over `fuse`; returns the worker's endpoint.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn start_relay(&self, fuse: &OwnedFd) -> io::Result<NoticeSender> {
        let (theirs, ours) = notices::pair()?;
        let (fuse, sending) = (fuse.try_clone()?, self.sending.clone());
        std::thread::Builder::new().name("notices".into()).spawn(move || {
            notices::relay_notices(ours, |notice| {
                let _sending = sending.read();
                rustix::io::write(&fuse, notice)
            });
        })?;
        Ok(theirs)
    }

    /// Stops all notifications until the guard is dropped. Returns `None` if the kernel does not
    /// finish one in time.
    pub(crate) fn pause_notifications(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        self.sending.try_write_for(PAUSE_TIMEOUT)
    }
}

/// Returns true if this kernel can resend unanswered requests.
pub(crate) fn kernel_can_resend() -> bool {
    let release = rustix::system::uname();
    let release = release.release().to_string_lossy();
    !InjectedFault::Resend.is_made()
        && parse_kernel_version(&release).is_none_or(|version| version >= MIN_RESEND_KERNEL)
}

/// Parses major and minor number of a release such as `6.1.0-27-amd64`.
fn parse_kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Returns a descriptor of `connection` for a worker.
///
/// # Errors
/// The system's error.
pub(crate) fn clone_for_worker(connection: &OwnedFd) -> io::Result<OwnedFd> {
    if kernel_can_resend() {
        return connection.try_clone();
    }
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let device = rustix::fs::open("/dev/fuse", flags, Mode::empty())?;
    let old = connection.as_fd().as_raw_fd().cast_unsigned();
    // SAFETY: the kernel reads one `u32`, the number of a descriptor, that outlives the call.
    let done = unsafe { libc::ioctl(device.as_raw_fd(), FUSE_DEV_IOC_CLONE as _, &raw const old) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(device) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_release_is_parsed() {
        assert_eq!(parse_kernel_version("6.1.0-27-amd64"), Some((6, 1)));
        assert_eq!(parse_kernel_version("6.18.5"), Some((6, 18)));
        assert_eq!(parse_kernel_version("7.0-rc1"), Some((7, 0)));
        assert_eq!(parse_kernel_version("odd"), None);
    }
}
