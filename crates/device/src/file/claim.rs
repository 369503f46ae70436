//! Who may use a file or device beside its user: `flock`, for as long as it is open.

use rustix::fs::FlockOperation;

/// Who may use a disk beside us.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Claim {
    /// Others may read too.
    Shared,
    /// No other user: what a mount and a writer take.
    Alone,
}

/// Claims the file or device for as long as the open file lives.
///
/// # Errors
/// `EWOULDBLOCK` if there is a claim that does not go with this one.
pub fn claim(fd: impl std::os::fd::AsFd, how: Claim) -> rustix::io::Result<()> {
    let operation = match how {
        Claim::Shared => FlockOperation::NonBlockingLockShared,
        Claim::Alone => FlockOperation::NonBlockingLockExclusive,
    };
    rustix::fs::flock(fd, operation)
}
