//! Mount namespaces: each process sees the mounts of its own, which may be a copy of another's.
//!
//! Law: a manager and its keepers make, see and end mounts only in the namespace that they run in,
//! and serve only its processes.

use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;

/// Returns the number of the caller's namespace; 0 without `/proc`, where none can be told apart.
pub fn own_namespace() -> u64 {
    namespace_at("self").unwrap_or_default()
}

/// Returns the number of the namespace of a process, if this user may see it.
pub(crate) fn namespace_of(pid: u32) -> Option<u64> {
    namespace_at(&pid.to_string())
}

/// Returns true if the process that listens at the other end of `socket` is known to be in the
/// caller's namespace. A process in another namespace of process ids has no number here.
pub(crate) fn is_listener_here(socket: &UnixStream) -> bool {
    let peer = rustix::net::sockopt::socket_peercred(socket);
    let pid = peer.ok().and_then(|peer| u32::try_from(peer.pid.as_raw_pid()).ok());
    pid.and_then(namespace_of).is_some_and(|namespace| namespace == own_namespace())
}

fn namespace_at(process: &str) -> Option<u64> {
    std::fs::metadata(format!("/proc/{process}/ns/mnt")).ok().map(|found| found.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_listener_is_here() {
        let (one, _other) = UnixStream::pair().unwrap();
        assert!(own_namespace() != 0 && is_listener_here(&one));
        assert_eq!(namespace_of(std::process::id()), Some(own_namespace()));
        assert_eq!(namespace_of(0), None);
    }
}
