//! Sockets of an export: listening ones, bound before confinement, and connections.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, anyhow};
use draconis_types::lock::Mutex;
use draconis_types::path_bytes::ShowPath;
use listenfd::ListenFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, SocketFlags, sockopt};

/// Address of a listening socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// A Unix socket at this path.
    Unix(PathBuf),
    /// A TCP port: host and port, as the user writes them.
    Tcp(String),
}

impl std::str::FromStr for ListenAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_port = |port: &str| port.parse::<u16>().is_ok();
        match text.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => {
                let path = std::path::absolute(path).map_err(|_| "not a usable path")?;
                Ok(Self::Unix(path))
            }
            Some(("tcp", host)) if host.rsplit_once(':').is_some_and(|(_, port)| is_port(port)) => {
                Ok(Self::Tcp(host.to_owned()))
            }
            _ => Err("unix:PATH or tcp:HOST:PORT is needed"),
        }
    }
}

/// A listening socket.
pub struct Listener {
    fd: OwnedFd,
    pub address: ListenAddress,
}

impl Listener {
    /// Binds a socket. Replaces a Unix socket that nobody listens on any more.
    pub fn bind(address: &ListenAddress) -> anyhow::Result<Self> {
        match address {
            ListenAddress::Unix(path) => {
                let bound = match UnixListener::bind(path) {
                    Err(error) if error.kind() == ErrorKind::AddrInUse => rebind(path, error),
                    bound => bound,
                };
                Self::from_unix(bound.with_context(|| path.shown().to_string())?)
            }
            ListenAddress::Tcp(host) => {
                Self::from_tcp(TcpListener::bind(host).with_context(|| host.clone())?)
            }
        }
    }

    /// Returns the sockets that the service manager passed.
    pub fn from_environment() -> anyhow::Result<Vec<Self>> {
        let mut passed = ListenFd::from_env();
        let mut listeners = vec![];
        for index in 0..passed.len() {
            if let Ok(Some(listener)) = passed.take_tcp_listener(index) {
                listeners.push(Self::from_tcp(listener)?);
            } else {
                let listener = passed.take_unix_listener(index)?;
                let listener = listener.ok_or_else(|| anyhow!("a socket was passed twice"))?;
                listeners.push(Self::from_unix(listener)?);
            }
        }
        Ok(listeners)
    }

    fn from_unix(listener: UnixListener) -> anyhow::Result<Self> {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let path = address.as_pathname().map(Path::to_owned).unwrap_or_default();
        Ok(Self { fd: listener.into(), address: ListenAddress::Unix(path) })
    }

    fn from_tcp(listener: TcpListener) -> anyhow::Result<Self> {
        listener.set_nonblocking(true)?;
        // Connections inherit both.
        sockopt::set_tcp_nodelay(&listener, true)?;
        sockopt::set_socket_keepalive(&listener, true)?;
        let address = ListenAddress::Tcp(listener.local_addr()?.to_string());
        Ok(Self { fd: listener.into(), address })
    }

    /// Accepts a connection; `None` if there is none now. The client must have negotiated by
    /// `deadline`.
    pub fn accept(&self, deadline: Instant) -> io::Result<Option<Arc<Socket>>> {
        match rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC) {
            Ok(fd) => Ok(Some(Arc::new(Socket { fd, deadline: Mutex::new(Some(deadline)) }))),
            Err(Errno::WOULDBLOCK | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Returns the path of a Unix socket.
    pub fn unix_path(&self) -> PathBuf {
        match &self.address {
            ListenAddress::Unix(path) => path.clone(),
            ListenAddress::Tcp(_) => PathBuf::new(),
        }
    }

    /// Returns the URI of an export.
    pub fn uri(&self, export: &str, is_tls: bool) -> String {
        let export = percent_encode(export.as_bytes());
        let scheme = if is_tls { "nbds" } else { "nbd" };
        match &self.address {
            ListenAddress::Unix(path) => {
                let path = percent_encode(path.as_os_str().as_encoded_bytes());
                format!("{scheme}+unix:///{export}?socket={path}")
            }
            ListenAddress::Tcp(address) => format!("{scheme}://{address}/{export}"),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Binds a Unix socket whose path exists: replaces a socket that refuses connections.
fn rebind(path: &Path, error: io::Error) -> io::Result<UnixListener> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|it| it.file_type().is_socket());
    let is_refused = || {
        UnixStream::connect(path).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
    };
    if !is_socket || !is_refused() {
        return Err(error);
    }
    std::fs::remove_file(path)?;
    UnixListener::bind(path)
}

fn percent_encode(bytes: &[u8]) -> String {
    let mut text = String::new();
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            text.push(byte.into());
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}

/// A connection.
pub struct Socket {
    fd: OwnedFd,
    /// End of the negotiation; `None` once requests may come at any time.
    deadline: Mutex<Option<Instant>>,
}

impl Socket {
    /// Lets the client take any time from now on.
    pub fn clear_deadline(&self) {
        *self.deadline.lock() = None;
    }

    /// Gives the client time until `deadline`.
    #[cfg(feature = "tls")]
    pub fn set_deadline(&self, deadline: Instant) {
        *self.deadline.lock() = Some(deadline);
    }

    /// Ends the reading of requests, or with [`Shutdown::Both`] also of replies that are being sent.
    pub fn shut_down(&self, how: Shutdown) {
        // It fails if the client has closed its side.
        let _ = rustix::net::shutdown(&self.fd, how);
    }

    /// Waits until the socket is ready, at most until the deadline. Returns true if a deadline
    /// exists: the next call must not block.
    fn wait_ready(&self, flags: PollFlags) -> io::Result<bool> {
        let Some(deadline) = *self.deadline.lock() else { return Ok(false) };
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(&self.fd, flags)], Some(&left)) {
                Ok(0) => return Err(ErrorKind::TimedOut.into()),
                Ok(_) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

/// One direction of a connection.
pub struct SocketHalf(pub Arc<Socket>);

impl Read for SocketHalf {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let flags = match self.0.wait_ready(PollFlags::IN)? {
                true => RecvFlags::DONTWAIT,
                false => RecvFlags::empty(),
            };
            match rustix::net::recv(&self.0.fd, &mut *into, flags) {
                Ok((got, _)) => return Ok(got),
                Err(Errno::WOULDBLOCK) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl Write for SocketHalf {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            let flags = match self.0.wait_ready(PollFlags::OUT)? {
                true => SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
                false => SendFlags::NOSIGNAL,
            };
            match rustix::net::send(&self.0.fd, bytes, flags) {
                Err(Errno::WOULDBLOCK) => {}
                sent => return Ok(sent?),
            }
        }
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(rustix::io::writev(&self.0.fd, parts)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed() {
        let parse = |text: &str| text.parse::<ListenAddress>();
        assert_eq!(parse("unix:/a:b"), Ok(ListenAddress::Unix("/a:b".into())));
        for host in ["localhost:10809", "[::1]:0", "0.0.0.0:1"] {
            assert_eq!(parse(&format!("tcp:{host}")), Ok(ListenAddress::Tcp(host.into())));
        }
        for wrong in ["", "unix:", "/a", "tcp:", "tcp:a", "tcp:a:70000", "tcp:10809", "nbd://a"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn uris_are_encoded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a socket?");
        let listener = Listener::bind(&ListenAddress::Unix(path.clone())).unwrap();
        let uri = listener.uri("vm 1", false);
        assert!(uri.starts_with("nbd+unix:///vm%201?socket=/") && uri.ends_with("/a%20socket%3F"));
        assert!(Listener::bind(&ListenAddress::Unix(path.clone())).is_err(), "it is in use");
        drop(listener);
        Listener::bind(&ListenAddress::Unix(path.clone())).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "a file").unwrap();
        assert!(Listener::bind(&ListenAddress::Unix(path.clone())).is_err(), "not a socket");
        assert_eq!(std::fs::read(&path).unwrap(), b"a file");
    }
}
