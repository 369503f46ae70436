//! FUSE notifications, written to the kernel by a process that outlives the worker.
//!
//! ```text
//!   worker ── number, notice ──▶ keeper ── write ──▶ kernel: writes pages back, drops them
//!          ◀── number, errno ──         ◀────────────┘
//! ```
//! A thread blocked in such a `write` cannot be killed, and delays the end of its process. The
//! kernel waits for answers to its writeback. If a worker wrote the notification itself and was
//! killed, its successor, which could answer, would wait for its end forever.
//!
//! Law 1: a worker waits for a reply in a call that a signal interrupts.
//! Law 2: a reply carries the number of its notice; late replies are ignored.

use draconis_types::lock::Mutex;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, Result};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};

/// Maximum length of a notice in bytes.
const MAX_NOTICE_BYTES: usize = 128;
const SEQUENCE_NUMBER_BYTES: usize = 8;
const REPLY_BYTES: usize = SEQUENCE_NUMBER_BYTES + 4;

/// Creates a connected pair: the sender of notices, and the socket for [`relay_notices`].
///
/// # Errors
/// Error of the system.
pub fn pair() -> Result<(NoticeSender, OwnedFd)> {
    let (flags, kind) = (SocketFlags::CLOEXEC, SocketType::SEQPACKET);
    let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, flags, None)?;
    Ok((NoticeSender::new(ours), theirs))
}

/// Sender of notices. One is in flight at a time.
#[derive(Debug)]
pub struct NoticeSender {
    socket: OwnedFd,
    /// Number of the last notice.
    last: Mutex<u64>,
}

impl NoticeSender {
    /// Creates a sender over `socket`.
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket, last: Mutex::new(0) }
    }

    /// Sends a notice and waits until the kernel has handled it.
    ///
    /// # Errors
    /// Error of the kernel or the socket; [`Errno::TIMEDOUT`] if handling takes longer than `wait`.
    pub fn send(&self, notice: &[u8], wait: Option<Duration>) -> Result<()> {
        let until = wait.map(|wait| Instant::now() + wait);
        let mut last = self.last.lock();
        *last += 1;
        let message = [&last.to_ne_bytes()[..], notice].concat();
        send(&self.socket, &message, SendFlags::NOSIGNAL)?;
        let mut answer = [0; REPLY_BYTES];
        loop {
            self.wait(until)?;
            match recv(&self.socket, &mut answer, RecvFlags::empty()) {
                Ok((REPLY_BYTES, _)) => {}
                Ok(_) => return Err(Errno::PIPE),
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno),
            }
            let (number, errno) = answer.split_at(SEQUENCE_NUMBER_BYTES);
            if number == last.to_ne_bytes() {
                let errno = i32::from_ne_bytes(errno.try_into().unwrap_or_default());
                return if errno == 0 { Ok(()) } else { Err(Errno::from_raw_os_error(errno)) };
            }
        }
    }

    fn wait(&self, until: Option<Instant>) -> Result<()> {
        let Some(until) = until else { return Ok(()) };
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
        match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&left))? {
            0 => Err(Errno::TIMEDOUT),
            _ => Ok(()),
        }
    }
}

impl AsFd for NoticeSender {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Passes each notice from `socket` to `write` and replies with its result, until the peer closes.
pub fn relay_notices(socket: impl AsFd, mut write: impl FnMut(&[u8]) -> Result<usize>) {
    let mut message = [0; SEQUENCE_NUMBER_BYTES + MAX_NOTICE_BYTES];
    loop {
        let len = match recv(&socket, &mut message, RecvFlags::empty()) {
            Err(Errno::INTR) => continue,
            Ok((len, _)) if len > SEQUENCE_NUMBER_BYTES => len,
            // The peer closed, or sent no valid notice.
            _ => return,
        };
        let (number, notice) = message[..len].split_at(SEQUENCE_NUMBER_BYTES);
        let errno = write(notice).err().map_or(0, Errno::raw_os_error);
        let answer = [number, &errno.to_ne_bytes()].concat();
        if send(&socket, &answer, SendFlags::NOSIGNAL).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relayed_notice_returns_write_error() {
        let (notices, theirs) = pair().unwrap();
        let relayed = std::thread::spawn(move || {
            let mut written = vec![];
            relay_notices(theirs, |notice| {
                written.push(notice.to_vec());
                if notice == b"gone" { Err(Errno::NOENT) } else { Ok(notice.len()) }
            });
            written
        });
        assert_eq!(notices.send(b"pages", None), Ok(()));
        assert_eq!(notices.send(b"gone", Some(Duration::from_millis(900))), Err(Errno::NOENT));
        drop(notices);
        assert_eq!(relayed.join().unwrap(), [b"pages".to_vec(), b"gone".to_vec()]);
    }

    #[test]
    fn late_reply_is_not_taken_for_next_notice() {
        let (notices, theirs) = pair().unwrap();
        let wait = Some(Duration::from_millis(5));
        assert_eq!(notices.send(b"late", wait), Err(Errno::TIMEDOUT));
        let relayed = std::thread::spawn(move || {
            relay_notices(theirs, |notice| if notice == b"late" { Err(Errno::IO) } else { Ok(0) });
        });
        assert_eq!(notices.send(b"next", None), Ok(()));
        drop(notices);
        relayed.join().unwrap();
    }

    #[test]
    fn send_fails_without_relay() {
        let (notices, theirs) = pair().unwrap();
        drop(theirs);
        assert!(notices.send(b"pages", None).is_err());
    }
}
