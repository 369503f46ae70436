//! Disks that are no files here, such as those in buckets: one process has the disk, with the
//! network and the credentials that this takes, and another one, confined, reads and writes it.
//!
//! ```text
//!   tool ══ disk contract ══▶ disk process ── Elsewhere ──▶ bucket
//!   store process ══ disk contract ══▶ store keeper ── Elsewhere ──▶ bucket
//! ```
//!
//! Law 1: who has the disk looks at no byte of it.
//! Law 2: of all who have one runtime directory one mounts what is at an address, and as long as it
//! does no other changes that.
//! Law 3: the disk is closed when its only user has closed it or is dead; a user that closes it
//! waits for that.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use draconis_device::{
    Disk, Error, Extent, Group, LockMode, Pending, ReadAnswer, Refused, RemoteDisk, SubmitOptions,
    Ticket, Urgency, lock_file, serve,
};
use draconis_exchange::channel::session::{Session, SessionConfig, accept, offer};
use draconis_exchange::contract::disk;
use draconis_exchange::descriptors;
use draconis_exchange::heap::Block;
use draconis_exchange::heap::arena::Class;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socketpair};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::client::RuntimeDir;
use crate::disk::{DISK_LANES, add_disk_lanes as add_disk};
use crate::store_process::open_session_disk;

/// How long one side of a disk waits for the other, which is alive: requests have bounds of their
/// own, and a death is noticed at once.
const PATIENCE: Duration = Duration::MAX;
/// How long a hello may take that was sent already.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest message that asks for a disk, in bytes.
const MESSAGE_BYTES: usize = 16 << 10;
// The first byte of the answer: a session comes along, or a sentence follows.
const REPLY_OK: u8 = 0;
const REFUSED: u8 = 1;

/// Opens what is at an address: the program knows how.
pub trait RemoteDiskProvider: Send + Sync {
    /// Opens a disk. It is closed when it is dropped: all that was written is sent then, as far as
    /// it can be.
    ///
    /// # Errors
    /// A sentence for the user.
    fn open(&self, opening: &RemoteDiskRequest) -> Result<Arc<dyn Disk>, String>;

    /// All that was opened is about to be closed: what cannot be written soon has failed.
    fn finish(&self);

    /// Closes all that was opened, as dropping it does; says what of it could not be brought there,
    /// in a sentence for the user.
    fn close(&self) -> Option<String>;
}

/// What is to be opened.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RemoteDiskRequest {
    /// Where it is.
    pub address: String,
    /// Whether it is only read.
    pub read_only: bool,
    /// Whether it is kept for long, by a mount.
    pub stays: bool,
    /// The place from which this is done: [`owner_id`].
    pub seat: String,
    /// What the program wrote for itself.
    pub settings: String,
}

/// What a mount of something elsewhere needs of who asks for it.
#[derive(Clone, Serialize, Deserialize)]
pub struct RemoteCredentials {
    /// [`RemoteDiskRequest::settings`].
    pub settings: String,
    /// The environment, which has the credentials.
    pub environment: BTreeMap<String, String>,
}

impl std::fmt::Debug for RemoteCredentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Means").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// What the trouble of a disk begins with that is not the end of writing: what follows is how much
/// waits, since when, and why.
pub const WAITING: &str = "not sent yet: ";

/// The address that a path is, if it is one and no path: `scheme://something`.
pub fn parse_url(path: &Path) -> Option<&str> {
    let text = path.to_str()?;
    let (scheme, _) = text.split_once("://")?;
    let is_word = !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_word.then_some(text)
}

/// Two numbers that an address has for itself, as a file has those of its device and inode.
pub(crate) fn url_identity(address: &str) -> (u64, u64) {
    // FNV-1a: the same in every version of the program.
    let hash =
        address.bytes().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, |hash, byte| {
            (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
        });
    ((hash >> 64) as u64, hash as u64)
}

/// The file whose claim stands for an address, beside the sockets of stores.
pub(crate) fn open_lock_file(sockets: &Path, address: &str) -> std::io::Result<File> {
    std::fs::create_dir_all(sockets)?;
    let (one, other) = url_identity(address);
    let path = sockets.join(format!("{one}-{other}.claim"));
    File::options().read(true).write(true).create(true).truncate(false).open(path)
}

/// The place from which something is mounted: this machine, and the runtime directory in which
/// claims are made.
pub(crate) fn owner_id_of(sockets: &Path) -> String {
    let machine = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let names = rustix::system::uname();
    let (host, path) = (names.nodename().to_string_lossy(), sockets.display());
    let (one, other) = url_identity(&format!("{}\n{host}\n{path}", machine.trim()));
    format!("{one:016x}{other:016x}")
}

/// The place from which those mount who have this directory.
pub fn owner_id(directory: &RuntimeDir) -> String {
    owner_id_of(&directory.store_sockets())
}

/// Sees that nothing at an address is mounted here by those who have this directory, for as long as
/// the file is open.
///
/// # Errors
/// A sentence for the user.
pub fn lock_url(directory: &RuntimeDir, address: &str) -> Result<File, String> {
    let cannot = |error| format!("{address}: {}", crate::error_text(&error));
    let file = open_lock_file(&directory.store_sockets(), address).map_err(cannot)?;
    // One that has just ended may still be about to go.
    match lock_file(&file, LockMode::Shared) {
        Err(rustix::io::Errno::WOULDBLOCK) => {
            Err(format!("{address} is in use: disks in it are mounted here; unmount them first"))
        }
        claimed => claimed.map(|()| file).map_err(|errno| cannot(errno.into())),
    }
}

/// A disk that another process has for this one.
pub struct DiskProcess {
    session: Arc<Session>,
    /// Ends with that process.
    control: OwnedFd,
}

impl DiskProcess {
    /// Has `program`, which is draconis, open a disk in a process of its own.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn open(program: &Path, opening: &RemoteDiskRequest) -> Result<Self, String> {
        let cannot = |error: std::io::Error| {
            format!("{}: no process for it: {}", opening.address, crate::error_text(&error))
        };
        let ask = || -> std::io::Result<(OwnedFd, Vec<u8>, Vec<OwnedFd>)> {
            let (control, theirs) =
                socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
            let child = Command::new(program)
                .arg("disk-process")
                .process_group(0)
                .stdin(Stdio::from(theirs))
                .stdout(Stdio::null())
                .spawn()?;
            // It ends after this process has closed the disk, or is dead.
            drop(child);
            let me = pidfd_open(getpid(), PidfdFlags::empty())?;
            descriptors::send(&control, &serde_json::to_vec(opening)?, &[me.as_fd()])?;
            let mut answer = vec![0; MESSAGE_BYTES];
            let got = descriptors::receive(&control, &mut answer, RecvFlags::empty())?;
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
            (Some((&REFUSED, said)), _) => Err(String::from_utf8_lossy(said).into_owned()),
            _ => Err(cannot(std::io::ErrorKind::UnexpectedEof.into())),
        }
    }

    /// The disk; who is to be confined is, by now.
    ///
    /// # Errors
    /// When the process does not answer.
    pub fn start(self) -> Result<Arc<dyn Disk>, Error> {
        let disk = open_session_disk(&self.session)?;
        Ok(Arc::new(OutOfProcessDisk { disk, _end: ProcessGuard(self.control) }))
    }
}

/// A disk whose process has ended when it is dropped.
struct OutOfProcessDisk {
    disk: RemoteDisk,
    /// Dropped behind it.
    _end: ProcessGuard,
}

/// The control socket of a process that ends by itself.
struct ProcessGuard(OwnedFd);

impl Drop for ProcessGuard {
    fn drop(&mut self) {
        // Nothing comes but the end.
        let _ = rustix::io::retry_on_intr(|| rustix::io::read(&self.0, &mut [0u8]));
    }
}

impl draconis_device::ForwardingDisk for OutOfProcessDisk {
    type Below = RemoteDisk;

    fn disk(&self) -> &RemoteDisk {
        &self.disk
    }
}

/// Is the process of a disk until its user has closed it, or is dead.
///
/// # Errors
/// A sentence, when something else started it.
pub fn run(elsewhere: &dyn RemoteDiskProvider) -> Result<(), String> {
    let not_started = "a disk process is started by a command; see draconis-store(1)";
    let control = std::io::stdin().as_fd().try_clone_to_owned().map_err(|_| not_started)?;
    let mut text = vec![0; MESSAGE_BYTES];
    let got = descriptors::receive(&control, &mut text, RecvFlags::empty());
    let mut got = got.map_err(|_| not_started)?;
    let text = text.get(..got.len).filter(|_| got.is_complete).ok_or(not_started)?;
    let opening: RemoteDiskRequest = serde_json::from_slice(text).map_err(|_| not_started)?;
    let user = got.fds.pop().ok_or(not_started)?;
    let hosted = elsewhere.open(&opening).and_then(|disk| {
        DiskServerThread::new(disk, user).map_err(|error| format!("{}: {error}", opening.address))
    });
    let (hosted, socket) = match hosted {
        Ok(hosted) => hosted,
        Err(why) => {
            let said = why.as_bytes();
            let said = said.get(..said.len().min(MESSAGE_BYTES - 1)).unwrap_or_default();
            // Who does not want to know any more is gone.
            let _ = descriptors::send(&control, &[&[REFUSED], said].concat(), &[]);
            return Ok(());
        }
    };
    let _ = descriptors::send(&control, &[REPLY_OK], &[socket.as_fd()]);
    drop(socket);
    hosted.join();
    Ok(())
}

/// A disk that is served to another process, in a thread.
pub(crate) struct DiskServerThread {
    thread: JoinHandle<()>,
    /// As long as it is served.
    disk: Weak<dyn Disk>,
    failure: Arc<OnceLock<String>>,
}

impl DiskServerThread {
    /// Serves `disk` to the process that `user` is a pidfd of; where that takes it up.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn new(disk: Arc<dyn Disk>, user: OwnedFd) -> std::io::Result<(Self, OwnedFd)> {
        let mut plan = SessionConfig {
            static_lanes: 0,
            host_lanes: 0,
            guest_lanes: 0,
            host: vec![Class { slot_bytes: 4096, slots: 1 }],
            guest: vec![],
        };
        add_disk(&mut plan);
        let (offer, socket) = offer(&plan)?;
        let session = offer.start(user);
        let failure = Arc::new(OnceLock::new());
        let served = Arc::downgrade(&disk);
        let told = ErrorRecordingDisk { disk, failure: failure.clone() };
        let thread = std::thread::Builder::new().name("disk".into()).spawn(move || {
            let lanes = 0..DISK_LANES;
            let ends = lanes.filter_map(|lane| session.server::<disk::Disk>(lane)).collect();
            if let Err(lost) = serve(&told, ends, PATIENCE) {
                log::debug!("a disk that is elsewhere was closed: {lost}");
            }
        })?;
        Ok((Self { thread, disk: served, failure }, socket))
    }

    /// What ended all writing, or keeps it from going on, if something does.
    pub(crate) fn failure(&self) -> Option<String> {
        let trouble = || self.disk.upgrade().and_then(|disk| disk.outage());
        self.failure.get().cloned().or_else(trouble)
    }

    /// Returns when its user has ended, and the disk is closed.
    pub(crate) fn join(self) {
        // A thread that panicked has said so.
        let _ = self.thread.join();
    }
}

/// A disk whose failures are told in words: over the contract goes only of which kind one was.
struct ErrorRecordingDisk {
    disk: Arc<dyn Disk>,
    /// What ended all writing.
    failure: Arc<OnceLock<String>>,
}

impl ErrorRecordingDisk {
    fn record_error(&self, error: &Error) {
        // It has said so, and goes on.
        if matches!(error, Error::Away(_)) {
            return log::warn!("{error}");
        }
        if matches!(error, Error::Remote(_)) && self.failure.set(error.to_string()).is_ok() {
            log::error!("{error}");
        }
    }
}

impl draconis_device::ForwardingDisk for ErrorRecordingDisk {
    type Below = dyn Disk;

    fn disk(&self) -> &Self::Below {
        &*self.disk
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        // The lane that asks would wait at once.
        let answer = self.disk().read(at, into, urgency).wait();
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
        self.disk()
            .submit_with(chain, after, terms)
            .inspect_err(|refused| self.record_error(&refused.error))
    }

    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        self.disk().wait_visible(ticket).inspect_err(|error| self.record_error(error))
    }

    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        self.disk().wait_durable(ticket).inspect_err(|error| self.record_error(error))
    }
}

#[cfg(test)]
mod tests {
    use draconis_device::try_lock_file;

    use super::*;

    #[test]
    fn addresses_are_no_paths() {
        let of = |text: &str| parse_url(Path::new(text)).is_some();
        assert!(["s3://bucket/a", "file:///dir", "gs://b"].into_iter().all(of));
        assert!(!["/s3://b", "a:/b", "dir/s3://x", "://x", "a b://x"].into_iter().any(of));
        assert_eq!(url_identity("s3://bucket/a"), url_identity("s3://bucket/a"));
        assert_ne!(url_identity("s3://bucket/a"), url_identity("s3://bucket/b"));
    }

    #[test]
    fn what_is_mounted_here_is_in_use() {
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
