//! The FUSE connection to the kernel, and each worker's share of it.
//!
//! Since Linux 6.9 the kernel can resend requests that a worker has read but not answered: all
//! workers share one descriptor. Before, each worker has its own (`FUSE_DEV_IOC_CLONE`). Requests
//! read through it then end with it, by ECONNABORTED, and the successor gets later requests.
//!
//! Threads in the keeper send a worker's notifications: see [`notices`].
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use draconis_exchange::notices::{self, NoticeSender};
use draconis_types::injected_fault::InjectedFault;
use draconis_types::lock::{Condvar, Mutex};
use rustix::fs::{Mode, OFlags};

use crate::options::{MountOptions, UringUse};
use crate::user_namespace;

const FUSE_DEV_IOC_CLONE: libc::c_ulong = 0x8004_E500;
/// The first Linux version that can resend requests.
const MIN_RESEND_KERNEL: (u32, u32) = (6, 9);

/// Timeout for the kernel to finish the notifications in progress.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Threads that send workers' notifications. A thread that blocks in the kernel when its worker
/// dies continues once the successor has answered the request that it waits for.
#[derive(Default)]
pub(crate) struct NotificationRelays {
    gate: Arc<SendingGate>,
}

/// Lets notifications through unless they are paused.
#[derive(Default)]
struct SendingGate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    /// Notifications that are being sent.
    sending: usize,
    is_paused: bool,
}

impl SendingGate {
    fn pass<R>(&self, send: impl FnOnce() -> R) -> R {
        let mut state = self.state.lock();
        self.changed.wait_while(&mut state, |state| state.is_paused);
        state.sending += 1;
        drop(state);
        let sent = send();
        self.state.lock().sending -= 1;
        self.changed.notify_all();
        sent
    }
}

/// No notification is sent while this exists.
pub(crate) struct PausedNotifications<'a>(&'a SendingGate);

impl Drop for PausedNotifications<'_> {
    fn drop(&mut self) {
        self.0.state.lock().is_paused = false;
        self.0.changed.notify_all();
    }
}

impl NotificationRelays {
    /// Starts the relay thread of one worker over `fuse`; returns the worker's endpoint.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn start_relay(&self, fuse: &OwnedFd) -> io::Result<NoticeSender> {
        let (theirs, ours) = notices::pair()?;
        let (fuse, gate) = (fuse.try_clone()?, self.gate.clone());
        std::thread::Builder::new().name("notices".into()).spawn(move || {
            notices::relay_notices(ours, |notice| gate.pass(|| rustix::io::write(&fuse, notice)));
        })?;
        Ok(theirs)
    }

    /// Stops all notifications until the guard is dropped. Returns `None` if the kernel does not
    /// finish one in time.
    pub(crate) fn pause_notifications(&self) -> Option<PausedNotifications<'_>> {
        let Self { gate } = self;
        let mut state = gate.state.lock();
        gate.changed.wait_while(&mut state, |state| state.is_paused);
        state.is_paused = true;
        let is_sending = |state: &mut GateState| state.sending > 0;
        let waited = gate.changed.wait_while_for(&mut state, is_sending, PAUSE_TIMEOUT);
        drop(state);
        let paused = PausedNotifications(gate);
        (!waited.timed_out()).then_some(paused)
    }
}

/// Parameter of the kernel that offers rings to new mounts.
const ENABLE_URING_FILE: &str = "/sys/module/fuse/parameters/enable_uring";

/// Opens `/dev/fuse` for a mount over rings, if there is to be one. The connection exists before
/// its mount because the worker makes the rings for it before it is confined.
///
/// # Errors
/// Reason, for the user, why a mount that must have rings has none.
pub(crate) fn open_for_rings(options: &MountOptions) -> Result<Option<OwnedFd>, String> {
    let enabled = || std::fs::read_to_string(ENABLE_URING_FILE).unwrap_or_default();
    let obstacle = if options.uring == UringUse::Off {
        return Ok(None);
    } else if options.restart {
        Some("a mount whose worker restarts cannot use it; add norestart".to_string())
    } else if !user_namespace::is_host_root() {
        Some("only mounts of root can use it".into())
    } else if !enabled().starts_with('Y') {
        Some(format!("the kernel does not offer it; write Y to {ENABLE_URING_FILE}"))
    } else {
        None
    };
    match obstacle {
        Some(why) if options.uring == UringUse::On => {
            Err(format!("mount option 'uring=on': {why}"))
        }
        Some(_) => Ok(None),
        None => {
            let flags = OFlags::RDWR | OFlags::CLOEXEC;
            let device = rustix::fs::open("/dev/fuse", flags, Mode::empty());
            device.map(Some).map_err(|errno| format!("/dev/fuse: {errno}"))
        }
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
