//! Remote disks, such as those in buckets: one process owns the disk, the network and the
//! credentials. Another, confined process reads and writes the disk through it.
//!
//! ```text
//!   tool ══ disk contract ══▶ disk process ── RemoteDiskProvider ──▶ bucket
//!   store process ══ disk contract ══▶ store keeper ── RemoteDiskProvider ──▶ bucket
//! ```
//!
//! Law 1: the process that owns the disk interprets no byte of it.
//! Law 2: of all processes that share a runtime directory, one mounts the disks at a URL. No other
//! changes them while it does.
//! Law 3: the disk is closed when its only user has closed it or is dead. A user that closes it
//! waits until it is closed.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use draconis_device::{
    Disk, Error, Extent, Group, Pending, ReadAnswer, Refused, RemoteDisk, SubmitOptions, Ticket,
    Urgency, serve_remote_disk,
};
use draconis_exchange::channel::session::{Session, accept, offer};
use draconis_exchange::contract::disk;
use draconis_exchange::descriptors;
use draconis_types::Block;
use draconis_types::path_bytes::ShowPath;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socketpair};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::client::RuntimeDir;
use crate::disk::open_session_disk;
use crate::disk::{DISK_LANES, disk_session};
pub use crate::protocol::RemoteCredentials;

/// Peer timeout of both sides of a disk: none, since requests have their own bounds and a death is
/// noticed at once.
const NO_TIMEOUT: Duration = Duration::MAX;
/// Timeout for receiving a hello that was sent already.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum length of a [`RemoteDiskRequest`] message, in bytes.
const MAX_REQUEST_BYTES: usize = 16 << 10;
// First byte of the reply: a session is attached, or an error message follows.
const REPLY_OK: u8 = 0;
const REPLY_REFUSED: u8 = 1;

/// Opens the disk at a URL. The program implements it.
pub trait RemoteDiskProvider: Send + Sync {
    /// Opens a disk. Dropping the disk closes it, after sending everything written as far as
    /// possible.
    ///
    /// # Errors
    /// A message for the user.
    fn open(&self, opening: &RemoteDiskRequest) -> Result<Arc<dyn Disk>, String>;

    /// Announces that all opened disks are about to be closed: writes that cannot finish soon fail.
    fn prepare_close(&self);

    /// Closes all opened disks, as dropping them does. Returns a message for the user about data
    /// that could not be sent.
    fn close(&self) -> Option<String>;
}

/// A request to open a remote disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RemoteDiskRequest {
    /// The URL.
    pub address: String,
    /// True if the disk is only read.
    pub read_only: bool,
    /// True if a mount keeps the disk open for long.
    pub stays: bool,
    /// Identity of the owner: [`owner_id`].
    pub seat: String,
    /// Settings that only the program interprets.
    pub settings: String,
}

/// Prefix of [`Disk::outage_message`] texts that do not mean the end of writing. The amount of waiting
/// data, since when, and why follow.
pub const UNSENT_PREFIX: &str = "not sent yet: ";

/// Returns `path` as a URL if it is one: `scheme://something`.
pub fn parse_url(path: &Path) -> Option<&str> {
    let text = path.to_str()?;
    let (scheme, _) = text.split_once("://")?;
    let is_word = !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_word.then_some(text)
}

/// Returns two numbers that identify a URL, as device and inode number identify a file.
pub(crate) fn url_identity(address: &str) -> (u64, u64) {
    // FNV-1a, because it is the same in every version of the program.
    let hash =
        address.bytes().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, |hash, byte| {
            (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
        });
    ((hash >> 64) as u64, hash as u64)
}

/// Opens the file whose lock stands for a URL; it is beside the sockets of the stores.
pub(crate) fn open_lock_file(sockets: &Path, address: &str) -> std::io::Result<File> {
    std::fs::create_dir_all(sockets)?;
    let (one, other) = url_identity(address);
    let path = sockets.join(format!("{one}-{other}.claim"));
    File::options().read(true).write(true).create(true).truncate(false).open(path)
}

/// Returns the identity of the owner of mounts: this machine, and the runtime directory that has
/// the locks.
pub(crate) fn owner_id_of(sockets: &Path) -> String {
    let machine = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let names = rustix::system::uname();
    let (host, path) = (names.nodename().to_string_lossy(), sockets.shown());
    let (one, other) = url_identity(&format!("{}\n{host}\n{path}", machine.trim()));
    format!("{one:016x}{other:016x}")
}

/// Returns the identity of the owner of all mounts of this runtime directory.
pub fn owner_id(directory: &RuntimeDir) -> String {
    owner_id_of(&directory.store_sockets())
}

/// Opens the file whose lock ensures that nothing at a URL is mounted through this runtime
/// directory. An exclusive lock also keeps out others that ensure this.
///
/// # Errors
/// Errors of the file.
pub fn open_url_lock(directory: &RuntimeDir, address: &str) -> std::io::Result<File> {
    open_lock_file(&directory.store_sockets(), address)
}

/// A disk that another process serves to this one, not started yet.
pub struct DiskProcess {
    session: Arc<Session>,
    /// Reaches end of file when that process has ended.
    control: OwnedFd,
}

impl DiskProcess {
    /// Has `program`, which is draconis, open a disk in its own process.
    ///
    /// # Errors
    /// A message for the user.
    pub fn open(program: &Path, opening: &RemoteDiskRequest) -> Result<Self, String> {
        let cannot = |error: std::io::Error| {
            format!("{}: no process for it: {}", opening.address, crate::error_text(&error))
        };
        let ask = || -> std::io::Result<(OwnedFd, Vec<u8>, Vec<OwnedFd>)> {
            let (control, theirs) =
                socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
            let child = Command::new(program)
                .arg("disk-process")
                .args(crate::verbosity::verbosity_argument())
                .process_group(0)
                .stdin(Stdio::from(theirs))
                .stdout(Stdio::null())
                .spawn()?;
            // The child ends after this process has closed the disk or died.
            drop(child);
            let me = pidfd_open(getpid(), PidfdFlags::empty())?;
            descriptors::send_with_fds(&control, &serde_json::to_vec(opening)?, &[me.as_fd()])?;
            let mut answer = vec![0; MAX_REQUEST_BYTES];
            let got = descriptors::receive_with_fds(&control, &mut answer, RecvFlags::empty())?;
            answer.truncate(got.len);
            Ok((control, answer, got.fds))
        };
        let (control, answer, mut fds) = ask().map_err(cannot)?;
        match (answer.split_first(), fds.pop()) {
            (Some((&REPLY_OK, _)), Some(socket)) => {
                let session = accept(&socket, Instant::now() + HELLO_TIMEOUT);
                let session = session.map_err(|lost| cannot(std::io::Error::other(lost)))?;
                Ok(Self { session, control })
            }
            (Some((&REPLY_REFUSED, said)), _) => Err(String::from_utf8_lossy(said).into_owned()),
            _ => Err(cannot(std::io::ErrorKind::UnexpectedEof.into())),
        }
    }

    /// Starts the disk. The caller has confined itself by now if it has to.
    ///
    /// # Errors
    /// If the process does not answer.
    pub fn start(self) -> Result<Arc<dyn Disk>, Error> {
        let disk = open_session_disk(&self.session)?;
        Ok(Arc::new(OutOfProcessDisk { disk, _end: ProcessGuard(self.control) }))
    }
}

/// A disk whose process has ended once the disk is dropped.
struct OutOfProcessDisk {
    disk: RemoteDisk,
    /// Dropped after `disk`.
    _end: ProcessGuard,
}

/// The control socket of a process that exits on its own.
struct ProcessGuard(OwnedFd);

impl Drop for ProcessGuard {
    fn drop(&mut self) {
        // The read returns at end of file: the process never sends anything.
        let _ = rustix::io::retry_on_intr(|| rustix::io::read(&self.0, &mut [0u8]));
    }
}

impl draconis_device::ForwardingDisk for OutOfProcessDisk {
    type Inner = RemoteDisk;

    fn inner_disk(&self) -> &RemoteDisk {
        &self.disk
    }
}

/// Runs the disk process until its user has closed the disk or is dead.
///
/// # Errors
/// A message if the process was not started by a draconis command.
pub fn run_disk_process(provider: &dyn RemoteDiskProvider) -> Result<(), String> {
    let not_started = "a disk process is started by a command; see draconis-store(1)";
    let control = std::io::stdin().as_fd().try_clone_to_owned().map_err(|_| not_started)?;
    let mut text = vec![0; MAX_REQUEST_BYTES];
    let got = descriptors::receive_with_fds(&control, &mut text, RecvFlags::empty());
    let mut got = got.map_err(|_| not_started)?;
    let text = text.get(..got.len).filter(|_| got.is_complete).ok_or(not_started)?;
    let opening: RemoteDiskRequest = serde_json::from_slice(text).map_err(|_| not_started)?;
    let user = got.fds.pop().ok_or(not_started)?;
    let hosted = provider.open(&opening).and_then(|disk| {
        DiskServerThread::new(disk, user).map_err(|error| format!("{}: {error}", opening.address))
    });
    let (hosted, socket) = match hosted {
        Ok(hosted) => hosted,
        Err(why) => {
            let said = why.as_bytes();
            let said = said.get(..said.len().min(MAX_REQUEST_BYTES - 1)).unwrap_or_default();
            // Fails only if the receiver is gone.
            let _ = descriptors::send_with_fds(&control, &[&[REPLY_REFUSED], said].concat(), &[]);
            return Ok(());
        }
    };
    let _ = descriptors::send_with_fds(&control, &[REPLY_OK], &[socket.as_fd()]);
    drop(socket);
    hosted.join();
    Ok(())
}

/// A disk that a thread serves to another process.
pub(crate) struct DiskServerThread {
    thread: JoinHandle<()>,
    /// Alive as long as the disk is served.
    disk: Weak<dyn Disk>,
    failure: Arc<OnceLock<String>>,
}

impl DiskServerThread {
    /// Serves `disk` to the process whose pidfd is `user`. Returns the server and the socket to
    /// accept the session from.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn new(disk: Arc<dyn Disk>, user: OwnedFd) -> std::io::Result<(Self, OwnedFd)> {
        let (offer, socket) = offer(&disk_session())?;
        let session = offer.start(user);
        let failure = Arc::new(OnceLock::new());
        let served = Arc::downgrade(&disk);
        let told = ErrorRecordingDisk { disk, failure: failure.clone() };
        let thread = std::thread::Builder::new().name("disk".into()).spawn(move || {
            let lanes = 0..DISK_LANES;
            let ends = lanes.filter_map(|lane| session.server::<disk::Disk>(lane)).collect();
            if let Err(lost) = serve_remote_disk(&told, ends, NO_TIMEOUT) {
                log::debug!("a disk that is elsewhere was closed: {lost}");
            }
        })?;
        Ok((Self { thread, disk: served, failure }, socket))
    }

    /// Returns the error that ended all writing, or the current outage, if any.
    pub(crate) fn failure(&self) -> Option<String> {
        let trouble = || self.disk.upgrade().and_then(|disk| disk.outage_message());
        self.failure.get().cloned().or_else(trouble)
    }

    /// Returns once the user has ended and the disk is closed.
    pub(crate) fn join(self) {
        // A thread that panicked has logged that.
        let _ = self.thread.join();
    }
}

/// A disk that records the texts of its failures: the contract transfers only the kind of an error.
struct ErrorRecordingDisk {
    disk: Arc<dyn Disk>,
    /// The error that ended all writing.
    failure: Arc<OnceLock<String>>,
}

impl ErrorRecordingDisk {
    fn record_error(&self, error: &Error) {
        // An outage: the disk has logged it and keeps trying.
        if matches!(error, Error::Unreachable(_)) {
            return log::warn!("{error}");
        }
        if matches!(error, Error::Remote(_)) && self.failure.set(error.to_string()).is_ok() {
            log::error!("{error}");
        }
    }
}

impl draconis_device::ForwardingDisk for ErrorRecordingDisk {
    type Inner = dyn Disk;

    fn inner_disk(&self) -> &Self::Inner {
        &*self.disk
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        // The lane that reads would wait right away.
        let answer = self.inner_disk().read(at, into, urgency).wait();
        let answer = answer.unwrap_or(Err(Refused { payload: None, error: Error::ServiceEnded }));
        if let Err(Refused { error: error @ Error::Remote(_), .. }) = &answer {
            log::error!("{error}");
        }
        Pending::ready(answer)
    }

    fn submit_with(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
        terms: SubmitOptions,
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        self.inner_disk()
            .submit_with(chain, after, terms)
            .inspect_err(|refused| self.record_error(&refused.error))
    }

    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        self.inner_disk().wait_visible(ticket).inspect_err(|error| self.record_error(error))
    }

    fn punch_hole(&self, at: Extent) -> Result<Option<Ticket>, Error> {
        self.inner_disk().punch_hole(at).inspect_err(|error| self.record_error(error))
    }

    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        self.inner_disk().wait_durable(ticket).inspect_err(|error| self.record_error(error))
    }
}

#[cfg(test)]
mod tests {
    use draconis_device::{LockMode, try_lock_file};

    use super::*;

    #[test]
    fn urls_are_distinguished_from_paths() {
        let of = |text: &str| parse_url(Path::new(text)).is_some();
        assert!(["s3://bucket/a", "file:///dir", "gs://b"].into_iter().all(of));
        assert!(!["/s3://b", "a:/b", "dir/s3://x", "://x", "a b://x"].into_iter().any(of));
        assert_eq!(url_identity("s3://bucket/a"), url_identity("s3://bucket/a"));
        assert_ne!(url_identity("s3://bucket/a"), url_identity("s3://bucket/b"));
    }

    #[test]
    fn url_lock_conflicts_with_mount() {
        let dir = tempfile::tempdir().unwrap();
        let mount = open_lock_file(dir.path(), "s3://b/p").unwrap();
        let other = open_lock_file(dir.path(), "s3://b/p").unwrap();
        try_lock_file(&mount, LockMode::Exclusive).unwrap();
        try_lock_file(&other, LockMode::Shared).unwrap_err();
        try_lock_file(open_lock_file(dir.path(), "s3://b/q").unwrap(), LockMode::Shared).unwrap();
        drop(mount);
        try_lock_file(&other, LockMode::Shared).unwrap();
    }
}
