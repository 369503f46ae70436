//! Who may use a file or device beside its user: `flock`, for as long as it is open.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::io::Errno;

/// A claim outlives its user for a moment: a child that is being started holds what its parent
/// has open until it runs its program, and the kernel ends rings of dead processes behind them.
const CLOSING_WAIT: Duration = Duration::from_millis(300);
const TRY_EVERY: Duration = Duration::from_millis(3);

/// Who may use a disk beside us.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockMode {
    /// Others may read too.
    Shared,
    /// No other user: what a mount and a writer take.
    Exclusive,
}

/// Claims the file or device for as long as the open file lives. What was closed a moment ago is
/// waited for, 300 ms at most.
///
/// # Errors
/// `EWOULDBLOCK` if there is a claim that does not go with this one.
pub fn lock_file(fd: impl AsFd, how: LockMode) -> rustix::io::Result<()> {
    let tries = CLOSING_WAIT.as_millis() / TRY_EVERY.as_millis();
    for _ in 0..tries {
        match try_lock_file(&fd, how) {
            Err(Errno::WOULDBLOCK) => std::thread::sleep(TRY_EVERY),
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
