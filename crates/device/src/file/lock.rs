//! Locks files and devices with `flock` while they are open.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::io::Errno;

/// Maximum wait for a released lock. A starting child holds its parent's descriptors until exec,
/// and the kernel tears down rings of dead processes asynchronously.
const LOCK_RELEASE_TIMEOUT: Duration = Duration::from_millis(300);
const RETRY_INTERVAL: Duration = Duration::from_millis(3);

/// Mode of a lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockMode {
    /// Other readers are allowed.
    Shared,
    /// No other user: for mounts and writers.
    Exclusive,
}

/// Locks the file or device while the open file lives. Waits up to 300 ms for a lock that is being
/// released.
///
/// # Errors
/// `EWOULDBLOCK` if another user holds a conflicting lock.
pub fn lock_file(fd: impl AsFd, how: LockMode) -> rustix::io::Result<()> {
    let tries = LOCK_RELEASE_TIMEOUT.as_millis() / RETRY_INTERVAL.as_millis();
    for _ in 0..tries {
        match try_lock_file(&fd, how) {
            Err(Errno::WOULDBLOCK) => std::thread::sleep(RETRY_INTERVAL),
            claimed => return claimed,
        }
    }
    try_lock_file(fd, how)
}

/// As [`lock_file`], without waiting.
///
/// # Errors
/// As [`lock_file`].
pub fn try_lock_file(fd: impl AsFd, how: LockMode) -> rustix::io::Result<()> {
    let operation = match how {
        LockMode::Shared => FlockOperation::NonBlockingLockShared,
        LockMode::Exclusive => FlockOperation::NonBlockingLockExclusive,
    };
    rustix::fs::flock(fd, operation)
}
