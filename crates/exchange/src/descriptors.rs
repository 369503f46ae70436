//! Messages of bytes and file descriptors over a Unix socket.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    io::{Errno, Result},
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    },
};

/// Maximum descriptors of one message, as on Linux.
pub const MAX_FDS: usize = 253;

/// A received message.
#[derive(Debug)]
pub struct ReceivedMessage {
    /// Number of bytes; 0 if the peer has closed.
    pub len: usize,
    /// Descriptors, with close-on-exec set.
    pub fds: Vec<OwnedFd>,
    /// True if nothing of the message was truncated.
    pub is_complete: bool,
}

/// Sends `bytes`, at least one, together with `fds`.
///
/// # Errors
/// Error of the socket; [`Errno::INVAL`] for more than [`MAX_FDS`] descriptors.
pub fn send_with_fds(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives one message into `bytes`; blocks unless `flags` prevent it.
///
/// # Errors
/// Error of the socket.
pub fn receive_with_fds(
    socket: impl AsFd,
    bytes: &mut [u8],
    flags: RecvFlags,
) -> Result<ReceivedMessage> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let got = loop {
        match recvmsg(&socket, &mut [IoSliceMut::new(bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            got => break got?,
        }
    };
    // All are taken out, so that refused ones are closed, too.
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let is_complete = !got.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC);
    Ok(ReceivedMessage { len: got.bytes, fds, is_complete })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixDatagram;

    #[test]
    fn fds_arrive_with_message_bytes() {
        let (one, other) = UnixDatagram::pair().unwrap();
        let fds = [one.as_fd(); MAX_FDS];
        send_with_fds(&one, b"ab", &fds).unwrap();
        send_with_fds(&one, b"abc", &[]).unwrap();
        let mut bytes = [0; 2];
        let got = receive_with_fds(&other, &mut bytes, RecvFlags::empty()).unwrap();
        assert_eq!((got.len, got.fds.len(), got.is_complete, &bytes), (2, MAX_FDS, true, b"ab"));
        let cut = receive_with_fds(&other, &mut bytes, RecvFlags::empty()).unwrap();
        assert_eq!((cut.len, cut.fds.len(), cut.is_complete), (2, 0, false));
        let none = receive_with_fds(&other, &mut bytes, RecvFlags::DONTWAIT).unwrap_err();
        assert_eq!(none, Errno::AGAIN);
        let too_many = [one.as_fd(); MAX_FDS + 1];
        assert_eq!(send_with_fds(&one, b"a", &too_many), Err(Errno::INVAL));
    }
}
