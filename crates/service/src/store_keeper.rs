//! The store keeper: a process that owns a store for several mounts.
//!
//! ```text
//!   keeper ── Attach { disk }, pidfd of a worker ──▶ store keeper ──▶ store process
//!          ◀── number, socket of a session ─────────                      ▲
//!   worker ══ disk contract ══════════════════════════════════════════════╝
//! ```
//! The first mount of a disk in a store starts it; the others find it by its socket. The socket's
//! name is the device and inode number of the store, or the identity of its URL.
//!
//! Law 1: it has the claim on the store, and interprets no byte of it. For a remote store, it has
//! the disk, the network and the credentials, and serves the disk to the store process.
//! Law 2: it ends with the last connected keeper, and releases the claim last.

mod connect;

use std::io::Read;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use draconis_exchange::descriptors;
use draconis_types::lock::{Condvar, Mutex, MutexGuard};
use rustix::net::RecvFlags;
use serde::{Deserialize, Serialize};

use crate::client::RuntimeDir;
use crate::options::MountOptions;
use crate::protocol::is_same_user;
use crate::remote_disk::{
    RemoteCredentials, RemoteDiskProvider, RemoteDiskRequest, parse_url, url_identity,
};
use crate::store_process::{
    AttachedDisk, DiskCommand, ObjectEntry, StoreAccess, StoreProcess, receive_list,
};
use connect::ConnectPlan;

/// Timeout for the first keeper to connect to a new store keeper.
const FIRST_KEEPER_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for closing a store.
const STORE_CLOSE_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum message length, in bytes.
const MAX_MESSAGE_BYTES: usize = 16 << 10;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StoreRequest {
    /// Reply whether the store is open.
    Hello,
    /// Serve a disk to the process whose pidfd is attached.
    Attach { disk: String, read_only: bool },
    /// Execute a command on disks or snapshots.
    Change { change: DiskCommand },
    /// Wait until an attached disk is not served any more; reply with the mark of its last accepted
    /// chain.
    Ended { number: u64 },
    /// Reply with the error that ended all writing, if any.
    Failure,
    /// Write the list of the store's objects into the attached pipe.
    List,
}

/// Start parameters, beside the socket and the claim.
#[derive(Serialize, Deserialize)]
enum StartMessage {
    /// The store is in the file that is claimed.
    File {
        /// Write also to a member of a RAID.
        force_raid_member: bool,
    },
    Elsewhere(RemoteDiskRequest),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StoreReply {
    /// For an attached disk, with the socket of its session.
    Number(u64),
    Refused(String),
}

/// A disk in a store, as used by the keeper of its mount.
pub(crate) struct StoreDiskHandle {
    store: UnixStream,
    disk: String,
    pub(crate) read_only: bool,
    is_remote: bool,
}

/// State that an upgrade hands over to the next program.
#[derive(Serialize, Deserialize)]
pub(crate) struct StoreDiskState {
    disk: String,
    read_only: bool,
    #[serde(default)]
    is_elsewhere: bool,
}

impl StoreDiskHandle {
    /// Connects to the store keeper of `store`, or starts one, with `means` if the store is remote.
    /// `sockets` is the directory of their sockets. Also returns why the disk is read-only, if that
    /// was not requested. Of `options`, it takes what is written.
    ///
    /// # Errors
    /// A message for the user.
    pub(crate) fn open(
        sockets: &Path,
        store: &Path,
        disk: &str,
        options: &MountOptions,
        means: Option<&RemoteCredentials>,
    ) -> Result<(Self, Option<String>), String> {
        let read_only = options.read_only;
        let (wanted, note) = match parse_url(store) {
            Some(address) => (ConnectPlan::for_url(sockets, address, read_only, means)?, None),
            None => ConnectPlan::for_file(sockets, store, options)?,
        };
        let (read_only, is_elsewhere) = (read_only || note.is_some(), parse_url(store).is_some());
        let store = wanted.find_or_start(store)?;
        Ok((Self { store, disk: disk.into(), read_only, is_remote: is_elsewhere }, note))
    }

    /// Has the disk served to the process whose pidfd is `worker`.
    ///
    /// # Errors
    /// A message for the user.
    pub(crate) fn attach(&self, worker: BorrowedFd<'_>) -> Result<AttachedDisk, String> {
        let ask = StoreRequest::Attach { disk: self.disk.clone(), read_only: self.read_only };
        match self.send_request(&ask, &[worker])? {
            (number, Some(socket)) => Ok(AttachedDisk { socket, number }),
            _ => Err(STORE_PROCESS_GONE.into()),
        }
    }

    /// Waits until an attached disk is not served any more; returns the mark of its last accepted
    /// chain.
    ///
    /// # Errors
    /// A message.
    pub(crate) fn wait_detached(&self, number: u64) -> Result<u64, String> {
        Ok(self.send_request(&StoreRequest::Ended { number }, &[])?.0)
    }

    /// Returns the error that ended all writing to a remote store, if any. The contracts only
    /// transfer that there was one.
    pub(crate) fn failure(&self) -> Option<String> {
        if !self.is_remote {
            return None;
        }
        self.send_request(&StoreRequest::Failure, &[]).err()
    }

    fn send_request(
        &self,
        ask: &StoreRequest,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(u64, Option<OwnedFd>), String> {
        let gone = |_| STORE_PROCESS_GONE.to_string();
        send_message(&self.store, ask, fds).map_err(gone)?;
        let (answer, mut fds) = receive_message(&self.store).map_err(gone)?;
        match answer {
            StoreReply::Number(number) => Ok((number, fds.pop())),
            StoreReply::Refused(why) => Err(why),
        }
    }

    /// Disconnects. If no other mount has a disk of that store, it is released then. Returns a
    /// message about data that could not be sent to a remote store.
    pub(crate) fn disconnect(self) -> Option<String> {
        // Pending uploads have timeouts of their own.
        wait_for_exit(&self.store, (!self.is_remote).then_some(STORE_CLOSE_TIMEOUT))
    }

    /// Clones the handle over the same connection: the two must not send requests at the same time.
    ///
    /// # Errors
    /// If no descriptor is left.
    pub(crate) fn try_clone(&self) -> std::io::Result<Self> {
        let Self { disk, read_only, is_remote: is_elsewhere, .. } = self;
        let (disk, read_only, is_elsewhere) = (disk.clone(), *read_only, *is_elsewhere);
        Ok(Self { store: self.store.try_clone()?, disk, read_only, is_remote: is_elsewhere })
    }

    /// Returns the state that another program needs beside [`StoreDiskHandle::connection`].
    pub(crate) fn state(&self) -> StoreDiskState {
        let Self { disk, read_only, is_remote: is_elsewhere, .. } = self;
        StoreDiskState { disk: disk.clone(), read_only: *read_only, is_elsewhere: *is_elsewhere }
    }

    pub(crate) fn connection(&self) -> BorrowedFd<'_> {
        self.store.as_fd()
    }

    /// Restores the handle from another program's handover.
    pub(crate) fn from_handover(connection: OwnedFd, known: StoreDiskState) -> Self {
        let StoreDiskState { disk, read_only, is_elsewhere } = known;
        Self { store: connection.into(), disk, read_only, is_remote: is_elsewhere }
    }
}

/// Has the running store keeper of `store`, some of whose disks are mounted, execute `change`.
/// Returns false if none runs.
///
/// # Errors
/// A message for the user.
pub fn execute_disk_command(
    directory: &RuntimeDir,
    store: &Path,
    change: &DiskCommand,
) -> Result<bool, String> {
    let Some(store) = connect_running(directory, store)? else { return Ok(false) };
    request_running(&store, &StoreRequest::Change { change: change.clone() }, &[])?;
    Ok(true)
}

/// Lists `store` through its running store keeper, some of whose disks are mounted. Returns `None`
/// if none runs.
///
/// # Errors
/// A message for the user.
pub fn list_objects(
    directory: &RuntimeDir,
    store: &Path,
) -> Result<Option<Vec<ObjectEntry>>, String> {
    let Some(store) = connect_running(directory, store)? else { return Ok(None) };
    let pipe = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC);
    let (read, write) = pipe.map_err(|errno| io_error_message(&errno.into()))?;
    request_running(&store, &StoreRequest::List, &[write.as_fd()])?;
    drop(write);
    receive_list(read).map(Some)
}

/// Connects to the running store keeper of `store`.
fn connect_running(directory: &RuntimeDir, store: &Path) -> Result<Option<UnixStream>, String> {
    let Ok(store) = UnixStream::connect(store_socket(&directory.store_sockets(), store)?) else {
        return Ok(None);
    };
    // A store keeper that is just ending does not answer: the store has no owner then.
    let is_open = send_message(&store, &StoreRequest::Hello, &[]).is_ok()
        && receive_message::<StoreReply>(&store).is_ok();
    Ok(is_open.then_some(store))
}

fn request_running(
    store: &UnixStream,
    ask: &StoreRequest,
    fds: &[BorrowedFd<'_>],
) -> Result<(), String> {
    let gone = |_| STORE_PROCESS_GONE.to_string();
    send_message(store, ask, fds).map_err(gone)?;
    match receive_message(store).map_err(gone)?.0 {
        StoreReply::Number(_) => Ok(()),
        StoreReply::Refused(why) => Err(why),
    }
}

const STORE_PROCESS_GONE: &str = "the process that serves the store is gone";

/// Disconnects from a store keeper. If this was the last connection, waits until it has ended, and
/// returns its final message.
fn wait_for_exit(store: &UnixStream, wait: Option<Duration>) -> Option<String> {
    let left = store.shutdown(Shutdown::Write).and_then(|()| store.set_read_timeout(wait));
    let mut said = vec![];
    // End of file means that it has ended.
    let read = left.and_then(|()| store.take(MAX_MESSAGE_BYTES as u64).read_to_end(&mut said));
    if let Err(error) = read {
        log::warn!("the process that has the store does not end: {error}");
    }
    match serde_json::from_slice(&said) {
        Ok(StoreReply::Refused(why)) => Some(why),
        _ => None,
    }
}

fn io_error_message(error: &std::io::Error) -> String {
    crate::error_text(error)
}

fn store_socket(sockets: &Path, store: &Path) -> Result<PathBuf, String> {
    let (device, inode) = crate::identity::file_identity(store)?;
    Ok(sockets.join(format!("{device}-{inode}.sock")))
}

fn url_socket(sockets: &Path, address: &str) -> PathBuf {
    let (one, other) = url_identity(address);
    sockets.join(format!("{one}-{other}.sock"))
}

fn send_message(
    socket: &UnixStream,
    what: &impl Serialize,
    fds: &[BorrowedFd<'_>],
) -> std::io::Result<()> {
    Ok(descriptors::send_with_fds(socket, &serde_json::to_vec(what)?, fds)?)
}

/// Receives one message: each side waits for the other's reply before its next message.
fn receive_message<T: for<'de> Deserialize<'de>>(
    socket: &UnixStream,
) -> std::io::Result<(T, Vec<OwnedFd>)> {
    let mut bytes = [0; MAX_MESSAGE_BYTES];
    let got = descriptors::receive_with_fds(socket, &mut bytes, RecvFlags::empty())?;
    let text = bytes.get(..got.len).filter(|text| !text.is_empty() && got.is_complete);
    let text = text.ok_or(std::io::ErrorKind::UnexpectedEof)?;
    Ok((serde_json::from_slice(text)?, got.fds))
}

/// The connected keepers.
#[derive(Default)]
struct KeeperCount {
    state: Mutex<KeeperCountState>,
    changed: Condvar,
}

#[derive(Default)]
struct KeeperCountState {
    keepers: usize,
    /// True once none was left: the store is being closed, and no other keeper may connect.
    is_closing: bool,
    /// Keepers that are disconnecting; any may be the last.
    disconnecting: usize,
    /// Final message to them, once the store is closed.
    close_message: Option<Option<String>>,
}

impl KeeperCount {
    fn state(&self) -> MutexGuard<'_, KeeperCountState> {
        self.state.lock()
    }

    /// Registers a new keeper; returns false if the store is closing already.
    fn try_register(&self) -> bool {
        let mut state = self.state();
        state.keepers += usize::from(!state.is_closing);
        self.changed.notify_all();
        !state.is_closing
    }

    /// Unregisters a keeper; returns if the store stays open. Otherwise calls `tell` with the final
    /// message, if any, once the store is closed, and never returns.
    fn unregister(&self, tell: impl FnOnce(&str)) {
        let mut state = self.state();
        state.keepers -= 1;
        state.disconnecting += 1;
        self.changed.notify_all();
        let is_open = |state: &mut KeeperCountState| {
            state.keepers == 0 && !state.is_closing
                || state.is_closing && state.close_message.is_none()
        };
        self.changed.wait_while(&mut state, is_open);
        if let Some(Some(why)) = &state.close_message {
            tell(why);
        }
        state.disconnecting -= 1;
        self.changed.notify_all();
        if state.is_closing {
            drop(state);
            loop {
                std::thread::park();
            }
        }
    }

    /// Marks the store as closed and passes the final message to the waiting keepers.
    fn mark_closed(&self, last_words: Option<String>) {
        let mut state = self.state();
        state.close_message = Some(last_words);
        self.changed.notify_all();
        self.changed.wait_while(&mut state, |state| state.disconnecting > 0);
    }

    /// Waits for the first keeper, with a timeout, and then until none is left.
    fn wait_until_unused(&self) {
        let none = |state: &mut KeeperCountState| state.keepers == 0;
        let mut state = self.state();
        self.changed.wait_while_for(&mut state, none, FIRST_KEEPER_TIMEOUT);
        let some = |state: &mut KeeperCountState| state.keepers > 0;
        self.changed.wait_while(&mut state, some);
        state.is_closing = true;
        self.changed.notify_all();
    }
}

/// Runs a store keeper for as long as keepers are connected.
///
/// # Errors
/// A message if anything but a keeper started the process.
pub fn run_store_keeper(provider: &dyn RemoteDiskProvider) -> Result<(), String> {
    let by_hand = || "a store keeper is started by a keeper; see draconis-mount(1)".to_string();
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().map_err(|_| by_hand())?;
    let (start, fds): (StartMessage, _) =
        receive_message(&UnixStream::from(stdin)).map_err(|_| by_hand())?;
    let [listener, store]: [OwnedFd; 2] = fds.try_into().map_err(|_| by_hand())?;
    let listener = UnixListener::from(listener);
    let socket = listener.local_addr().map_err(|error| error.to_string())?;
    let program = Path::new("/proc/self/exe");
    let process = match start {
        StartMessage::File { force_raid_member } => {
            let flags = rustix::fs::fcntl_getfl(&store).map_err(|errno| errno.to_string())?;
            let access = match flags.contains(rustix::fs::OFlags::RDWR) {
                false => StoreAccess::Read,
                true if force_raid_member => StoreAccess::WriteRaidMember,
                true => StoreAccess::Write,
            };
            let given = store.try_clone().map_err(|error| error.to_string())?;
            StoreProcess::start(program, given, access).map_err(|error| error.to_string())
        }
        StartMessage::Elsewhere(opening) => provider.open(&opening).and_then(|disk| {
            let started = StoreProcess::start_on_disk(program, disk);
            started.map_err(|error| format!("{}: {error}", opening.address))
        }),
    };
    // If the store was refused, each keeper gets the reason.
    let process = Arc::new(process);
    let connected = Arc::new(KeeperCount::default());
    let (serving, counted) = (process.clone(), connected.clone());
    std::thread::spawn(move || {
        for keeper in listener.incoming().flatten() {
            if !counted.try_register() {
                continue;
            }
            let (process, counted) = (serving.clone(), counted.clone());
            std::thread::spawn(move || {
                serve_keeper(&process, &keeper);
                // The last keeper detects our end by the drop. Sending fails only if it is gone.
                counted.unregister(|why| {
                    drop(send_message(&keeper, &StoreReply::Refused(why.into()), &[]))
                });
                drop(keeper);
            });
        }
    });
    connected.wait_until_unused();
    if let Some(path) = socket.as_pathname() {
        // The directory may be gone already.
        let _ = std::fs::remove_file(path);
    }
    provider.prepare_close();
    // Once no disk is served any more, it writes a checkpoint.
    let closed = (*process).as_ref().map_or(Ok(()), StoreProcess::close);
    connected.mark_closed(provider.close());
    closed.map_err(|error| error.to_string())
}

/// Serves one keeper until it disconnects.
fn serve_keeper(process: &Result<StoreProcess, String>, keeper: &UnixStream) {
    if !is_same_user(keeper) {
        return;
    }
    while let Ok((ask, fds)) = receive_message::<StoreRequest>(keeper) {
        let answered = process.as_ref().map_err(Clone::clone).and_then(|process| {
            let refused = |error: crate::store_process::StoreError| error.to_string();
            match (ask, fds.first()) {
                (StoreRequest::Hello, None) => Ok((0, None)),
                (StoreRequest::Failure, None) => process.failure().map_or(Ok((0, None)), Err),
                (StoreRequest::Attach { disk, read_only }, Some(guest)) => {
                    let attached = process.attach(&disk, read_only, guest.as_fd());
                    attached.map(|it| (it.number, Some(it.socket))).map_err(refused)
                }
                (StoreRequest::List, Some(pipe)) => {
                    process.list_objects_into(pipe.as_fd()).map(|()| (0, None)).map_err(refused)
                }
                (StoreRequest::Change { change }, None) => {
                    process.execute_command(&change).map(|()| (0, None)).map_err(refused)
                }
                (StoreRequest::Ended { number }, None) => {
                    process.wait_detached(number).map(|mark| (mark, None)).map_err(refused)
                }
                _ => Err("that is not what a keeper asks".into()),
            }
        });
        let sent = match answered {
            Ok((number, socket)) => {
                let fds: Vec<_> = socket.iter().map(AsFd::as_fd).collect();
                send_message(keeper, &StoreReply::Number(number), &fds)
            }
            Err(why) => send_message(keeper, &StoreReply::Refused(why), &[]),
        };
        if sent.is_err() {
            return;
        }
    }
}
