//! Notices to the kernel, sent by a process that outlives the one that has them.
//!
//! ```text
//!   worker ── number, notice ──▶ keeper ── write ──▶ kernel: writes pages back, drops them
//!          ◀── number, errno ──         ◀────────────┘
//! ```
//! A thread that waits in such a `write` cannot be killed, and its process ends only after it. The
//! kernel waits for answers to what it writes back. If a worker sent the notice itself and was
//! killed, the next worker, which could answer, would wait for its end for ever.
//!
//! Law 1: a worker waits for an answer in a call that a signal ends.
//! Law 2: an answer has the number of its notice: one that came too late is passed over.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, Result};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};

/// Longest notice, in bytes.
const NOTICE_MAX_BYTES: usize = 128;
const NUMBER_BYTES: usize = 8;
const ANSWER_BYTES: usize = NUMBER_BYTES + 4;

/// The two ends of a way for notices: the one that has them, and the one that [`relay`]s them.
///
/// # Errors
/// What the system says.
pub fn pair() -> Result<(Notices, OwnedFd)> {
    let (flags, kind) = (SocketFlags::CLOEXEC, SocketType::SEQPACKET);
    let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, flags, None)?;
    Ok((Notices::new(ours), theirs))
}

/// The end that has notices. One is under way at a time.
#[derive(Debug)]
pub struct Notices {
    socket: OwnedFd,
    /// The number of the last notice.
    last: Mutex<u64>,
}

impl Notices {
    /// The end that `socket` is.
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket, last: Mutex::new(0) }
    }

    /// Has a notice sent, and waits until the kernel has done what it says.
    ///
    /// # Errors
    /// What the kernel says, or the socket; [`Errno::TIMEDOUT`] if that takes longer than `wait`.
    pub fn send(&self, notice: &[u8], wait: Option<Duration>) -> Result<()> {
        let until = wait.map(|wait| Instant::now() + wait);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last += 1;
        let message = [&last.to_ne_bytes()[..], notice].concat();
        send(&self.socket, &message, SendFlags::NOSIGNAL)?;
        let mut answer = [0; ANSWER_BYTES];
        loop {
            self.wait(until)?;
            match recv(&self.socket, &mut answer, RecvFlags::empty()) {
                Ok((ANSWER_BYTES, _)) => {}
                Ok(_) => return Err(Errno::PIPE),
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno),
            }
            let (number, errno) = answer.split_at(NUMBER_BYTES);
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

impl AsFd for Notices {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Sends each notice that comes over `socket` by `write`, and answers it, until the other end is
/// closed.
pub fn relay(socket: impl AsFd, mut write: impl FnMut(&[u8]) -> Result<usize>) {
    let mut message = [0; NUMBER_BYTES + NOTICE_MAX_BYTES];
    loop {
        let len = match recv(&socket, &mut message, RecvFlags::empty()) {
            Err(Errno::INTR) => continue,
            Ok((len, _)) if len > NUMBER_BYTES => len,
            // The end, or nothing that a worker says.
            _ => return,
        };
        let (number, notice) = message[..len].split_at(NUMBER_BYTES);
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
    fn notices_are_written_and_their_errors_come_back() {
        let (notices, theirs) = pair().unwrap();
        let relayed = std::thread::spawn(move || {
            let mut written = vec![];
            relay(theirs, |notice| {
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
    fn an_answer_that_comes_too_late_is_not_the_next_one() {
        let (notices, theirs) = pair().unwrap();
        let wait = Some(Duration::from_millis(5));
        assert_eq!(notices.send(b"late", wait), Err(Errno::TIMEDOUT));
        let relayed = std::thread::spawn(move || {
            relay(theirs, |notice| if notice == b"late" { Err(Errno::IO) } else { Ok(0) });
        });
        assert_eq!(notices.send(b"next", None), Ok(()));
        drop(notices);
        relayed.join().unwrap();
    }

    #[test]
    fn a_relay_that_is_gone_is_an_error() {
        let (notices, theirs) = pair().unwrap();
        drop(theirs);
        assert!(notices.send(b"pages", None).is_err());
    }
}
