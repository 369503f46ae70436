//! A store that several mounts use: a process that holds it for all of them.
//!
//! ```text
//!   keeper ── Attach { disk }, pidfd of a worker ──▶ store keeper ──▶ store process
//!          ◀── number, socket of a session ─────────                      ▲
//!   worker ══ disk contract ══════════════════════════════════════════════╝
//! ```
//! The first mount of a disk in a store starts it, the others find it by its socket: its name is
//! the device and inode number of the store, or two numbers that its address has.
//!
//! Law 1: it has the claim on the store, and looks at no byte of it. Of a store that is elsewhere it
//! has the disk, with the network and the credentials, and serves that to the store process.
//! Law 2: it ends with the last keeper that is connected, and gives the claim up last.

mod connect;

use std::io::Read;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use draconis_exchange::descriptors;
use rustix::net::RecvFlags;
use serde::{Deserialize, Serialize};

use crate::client::RuntimeDir;
use crate::protocol::is_same_user;
use crate::remote_disk::{
    RemoteCredentials, RemoteDiskProvider, RemoteDiskRequest, parse_url, url_identity,
};
use crate::store_process::{AttachedDisk, DiskCommand, ObjectEntry, StoreProcess, receive_list};
use connect::ConnectPlan;

/// How long one that was started waits for the first keeper.
const FIRST_WAIT: Duration = Duration::from_secs(10);
/// How long a store may take to be closed.
const CLOSE_WAIT: Duration = Duration::from_secs(60);
/// The longest message, in bytes.
const MESSAGE_BYTES: usize = 16 << 10;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StoreRequest {
    /// Say whether the store is open.
    Hello,
    /// Serve a disk to the process whose pidfd comes along.
    Attach { disk: String, read_only: bool },
    /// Change which disks and snapshots there are.
    Change { change: DiskCommand },
    /// Wait until that has ended; the mark of the last chain that was taken.
    Ended { number: u64 },
    /// Say what ended all writing, if something did.
    Failure,
    /// Have what the store has written into the pipe that comes along.
    List,
}

/// What one is started with, beside its socket and its claim.
#[derive(Serialize, Deserialize)]
enum StartMessage {
    /// The store in the file that the claim is on.
    File,
    Elsewhere(RemoteDiskRequest),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StoreReply {
    /// With the socket of a session, of a disk.
    Number(u64),
    Refused(String),
}

/// A disk in a store, as the keeper of its mount has it.
pub(crate) struct StoreDiskHandle {
    store: UnixStream,
    disk: String,
    pub(crate) read_only: bool,
    is_remote: bool,
}

/// What is to be known of one by another program that goes on with it.
#[derive(Serialize, Deserialize)]
pub(crate) struct StoreDiskState {
    disk: String,
    read_only: bool,
    #[serde(default)]
    is_elsewhere: bool,
}

impl StoreDiskHandle {
    /// Finds who has `store`, or starts one, with `means` if that is elsewhere; `sockets` is where
    /// they have their addresses. With it comes why it is read-only, if that was not asked for.
    ///
    /// # Errors
    /// A sentence for the user.
    pub(crate) fn open(
        sockets: &Path,
        store: &Path,
        disk: &str,
        read_only: bool,
        means: Option<&RemoteCredentials>,
    ) -> Result<(Self, Option<String>), String> {
        let (wanted, note) = match parse_url(store) {
            Some(address) => (ConnectPlan::for_url(sockets, address, read_only, means)?, None),
            None => ConnectPlan::for_file(sockets, store, read_only)?,
        };
        let (read_only, is_elsewhere) = (read_only || note.is_some(), parse_url(store).is_some());
        let store = wanted.find_or_start(store)?;
        Ok((Self { store, disk: disk.into(), read_only, is_remote: is_elsewhere }, note))
    }

    /// Has it served to the process that `guest` is a pidfd of.
    ///
    /// # Errors
    /// A sentence for the user.
    pub(crate) fn attach(&self, worker: BorrowedFd<'_>) -> Result<AttachedDisk, String> {
        let ask = StoreRequest::Attach { disk: self.disk.clone(), read_only: self.read_only };
        match self.ask(&ask, &[worker])? {
            (number, Some(socket)) => Ok(AttachedDisk { socket, number }),
            _ => Err(STORE_PROCESS_GONE.into()),
        }
    }

    /// Waits until a disk that was attached is served no more; the mark of the last chain that was
    /// taken.
    ///
    /// # Errors
    /// A sentence.
    pub(crate) fn wait_detached(&self, number: u64) -> Result<u64, String> {
        Ok(self.ask(&StoreRequest::Ended { number }, &[])?.0)
    }

    /// What ended all writing to a store that is elsewhere, if something did: over the contracts
    /// goes only that it was.
    pub(crate) fn failure(&self) -> Option<String> {
        if !self.is_remote {
            return None;
        }
        self.ask(&StoreRequest::Failure, &[]).err()
    }

    fn ask(
        &self,
        ask: &StoreRequest,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(u64, Option<OwnedFd>), String> {
        let gone = |_| STORE_PROCESS_GONE.to_string();
        send(&self.store, ask, fds).map_err(gone)?;
        let (answer, mut fds) = receive(&self.store).map_err(gone)?;
        match answer {
            StoreReply::Number(number) => Ok((number, fds.pop())),
            StoreReply::Refused(why) => Err(why),
        }
    }

    /// Gives it back; if no other mount has a disk of that store, it is free then. Says what could
    /// not be brought to where the store is.
    pub(crate) fn disconnect(self) -> Option<String> {
        // What is still to be sent elsewhere has bounds of its own.
        wait_for_exit(&self.store, (!self.is_remote).then_some(CLOSE_WAIT))
    }

    /// The same over the same connection: the two do not ask at the same time.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub(crate) fn try_clone(&self) -> std::io::Result<Self> {
        let Self { disk, read_only, is_remote: is_elsewhere, .. } = self;
        let (disk, read_only, is_elsewhere) = (disk.clone(), *read_only, *is_elsewhere);
        Ok(Self { store: self.store.try_clone()?, disk, read_only, is_remote: is_elsewhere })
    }

    /// What another program needs beside [`StoreDisk::connection`] to go on with it.
    pub(crate) fn state(&self) -> StoreDiskState {
        let Self { disk, read_only, is_remote: is_elsewhere, .. } = self;
        StoreDiskState { disk: disk.clone(), read_only: *read_only, is_elsewhere: *is_elsewhere }
    }

    pub(crate) fn connection(&self) -> BorrowedFd<'_> {
        self.store.as_fd()
    }

    /// The one that another program has had until now.
    pub(crate) fn resume(connection: OwnedFd, known: StoreDiskState) -> Self {
        let StoreDiskState { disk, read_only, is_elsewhere } = known;
        Self { store: connection.into(), disk, read_only, is_remote: is_elsewhere }
    }
}

/// Has `store` changed by the process that has it, because some of its disks are mounted; says
/// whether there is one.
///
/// # Errors
/// A sentence for the user.
pub fn change(directory: &RuntimeDir, store: &Path, change: &DiskCommand) -> Result<bool, String> {
    let Some(store) = connect_running(directory, store)? else { return Ok(false) };
    request_running(&store, &StoreRequest::Change { change: change.clone() }, &[])?;
    Ok(true)
}

/// What `store` has, said by the process that has it, because some of its disks are mounted; none
/// if there is no such process.
///
/// # Errors
/// A sentence for the user.
pub fn list(directory: &RuntimeDir, store: &Path) -> Result<Option<Vec<ObjectEntry>>, String> {
    let Some(store) = connect_running(directory, store)? else { return Ok(None) };
    let pipe = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC);
    let (read, write) = pipe.map_err(|errno| sentence(&errno.into()))?;
    request_running(&store, &StoreRequest::List, &[write.as_fd()])?;
    drop(write);
    receive_list(read).map(Some)
}

/// A connection with the one who has `store`, if it is open.
fn connect_running(directory: &RuntimeDir, store: &Path) -> Result<Option<UnixStream>, String> {
    let Ok(store) = UnixStream::connect(socket_of(&directory.store_sockets(), store)?) else {
        return Ok(None);
    };
    // One that is just ending does not answer: then the store has no owner.
    let is_open =
        send(&store, &StoreRequest::Hello, &[]).is_ok() && receive::<StoreReply>(&store).is_ok();
    Ok(is_open.then_some(store))
}

fn request_running(
    store: &UnixStream,
    ask: &StoreRequest,
    fds: &[BorrowedFd<'_>],
) -> Result<(), String> {
    let gone = |_| STORE_PROCESS_GONE.to_string();
    send(store, ask, fds).map_err(gone)?;
    match receive(store).map_err(gone)?.0 {
        StoreReply::Number(_) => Ok(()),
        StoreReply::Refused(why) => Err(why),
    }
}

const STORE_PROCESS_GONE: &str = "the process that serves the store is gone";

/// Leaves a store keeper; if no other is connected with it, it has ended then, and has said what
/// it leaves undone.
fn wait_for_exit(store: &UnixStream, wait: Option<Duration>) -> Option<String> {
    let left = store.shutdown(Shutdown::Write).and_then(|()| store.set_read_timeout(wait));
    let mut said = vec![];
    // The end is the answer.
    let read = left.and_then(|()| store.take(MESSAGE_BYTES as u64).read_to_end(&mut said));
    if let Err(error) = read {
        log::warn!("the process that has the store does not end: {error}");
    }
    match serde_json::from_slice(&said) {
        Ok(StoreReply::Refused(why)) => Some(why),
        _ => None,
    }
}

fn sentence(error: &std::io::Error) -> String {
    crate::error_text(error)
}

fn socket_of(sockets: &Path, store: &Path) -> Result<PathBuf, String> {
    let (device, inode) = crate::claimed_volume::identity(store)?;
    Ok(sockets.join(format!("{device}-{inode}.sock")))
}

fn socket_of_address(sockets: &Path, address: &str) -> PathBuf {
    let (one, other) = url_identity(address);
    sockets.join(format!("{one}-{other}.sock"))
}

fn send(socket: &UnixStream, what: &impl Serialize, fds: &[BorrowedFd<'_>]) -> std::io::Result<()> {
    Ok(descriptors::send(socket, &serde_json::to_vec(what)?, fds)?)
}

/// One message: each side waits for the other's before it says another.
fn receive<T: for<'de> Deserialize<'de>>(
    socket: &UnixStream,
) -> std::io::Result<(T, Vec<OwnedFd>)> {
    let mut bytes = [0; MESSAGE_BYTES];
    let got = descriptors::receive(socket, &mut bytes, RecvFlags::empty())?;
    let text = bytes.get(..got.len).filter(|text| !text.is_empty() && got.is_complete);
    let text = text.ok_or(std::io::ErrorKind::UnexpectedEof)?;
    Ok((serde_json::from_slice(text)?, got.fds))
}

/// The keepers that are connected.
#[derive(Default)]
struct ClientCount {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    keepers: usize,
    /// There was none any more: the store is given up, and no other gets it.
    is_closing: bool,
    /// Those that go, and may be the last.
    disconnecting: usize,
    /// What these are told, once the store is closed.
    close_message: Option<Option<String>>,
}

impl ClientCount {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one that has come, if it is not too late.
    fn try_register(&self) -> bool {
        let mut state = self.state();
        state.keepers += usize::from(!state.is_closing);
        self.changed.notify_all();
        !state.is_closing
    }

    /// One has gone; returns if the store is not given up for that. Else `tell` gets what is left
    /// undone, if something is.
    fn unregister(&self, tell: impl FnOnce(&str)) {
        let mut state = self.state();
        state.keepers -= 1;
        state.disconnecting += 1;
        self.changed.notify_all();
        let is_open = |state: &mut State| {
            state.keepers == 0 && !state.is_closing
                || state.is_closing && state.close_message.is_none()
        };
        let waited = self.changed.wait_while(state, is_open);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
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

    /// The store is closed: those that wait for it are told what was left undone.
    fn closed(&self, last_words: Option<String>) {
        let mut state = self.state();
        state.close_message = Some(last_words);
        self.changed.notify_all();
        let waited = self.changed.wait_while(state, |state| state.disconnecting > 0);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits for the first one, for a while, and until there is none.
    fn wait(&self) {
        let none = |state: &mut State| state.keepers == 0;
        let waited = self.changed.wait_timeout_while(self.state(), FIRST_WAIT, none);
        let state = waited.unwrap_or_else(PoisonError::into_inner).0;
        let some = |state: &mut State| state.keepers > 0;
        let waited = self.changed.wait_while(state, some);
        waited.unwrap_or_else(PoisonError::into_inner).is_closing = true;
        self.changed.notify_all();
    }
}

/// Has a store for as long as keepers are connected.
///
/// # Errors
/// A sentence, when something other than a keeper started the process.
pub fn run(elsewhere: &dyn RemoteDiskProvider) -> Result<(), String> {
    let by_hand = || "a store keeper is started by a keeper; see draconis-mount(1)".to_string();
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().map_err(|_| by_hand())?;
    let (start, fds): (StartMessage, _) =
        receive(&UnixStream::from(stdin)).map_err(|_| by_hand())?;
    let [listener, store]: [OwnedFd; 2] = fds.try_into().map_err(|_| by_hand())?;
    let listener = UnixListener::from(listener);
    let socket = listener.local_addr().map_err(|error| error.to_string())?;
    let program = Path::new("/proc/self/exe");
    let process = match start {
        StartMessage::File => {
            let flags = rustix::fs::fcntl_getfl(&store).map_err(|errno| errno.to_string())?;
            let read_only = !flags.contains(rustix::fs::OFlags::RDWR);
            let given = store.try_clone().map_err(|error| error.to_string())?;
            StoreProcess::start(program, given, read_only).map_err(|error| error.to_string())
        }
        StartMessage::Elsewhere(opening) => elsewhere.open(&opening).and_then(|disk| {
            let started = StoreProcess::start_on_disk(program, disk);
            started.map_err(|error| format!("{}: {error}", opening.address))
        }),
    };
    // What it is refused for, each keeper is told.
    let process = Arc::new(process);
    let connected = Arc::new(ClientCount::default());
    let (serving, counted) = (process.clone(), connected.clone());
    std::thread::spawn(move || {
        for keeper in listener.incoming().flatten() {
            if !counted.try_register() {
                continue;
            }
            let (process, counted) = (serving.clone(), counted.clone());
            std::thread::spawn(move || {
                serve(&process, &keeper);
                // The last one hears of our end by this. One that died does not want to know.
                counted
                    .unregister(|why| drop(send(&keeper, &StoreReply::Refused(why.into()), &[])));
                drop(keeper);
            });
        }
    });
    connected.wait();
    if let Some(path) = socket.as_pathname() {
        // The directory may have gone before.
        let _ = std::fs::remove_file(path);
    }
    elsewhere.finish();
    // It leaves a checkpoint when no disk is served any more.
    let closed = (*process).as_ref().map_or(Ok(()), StoreProcess::close);
    connected.closed(elsewhere.close());
    closed.map_err(|error| error.to_string())
}

/// Answers one keeper until it is gone.
fn serve(process: &Result<StoreProcess, String>, keeper: &UnixStream) {
    if !is_same_user(keeper) {
        return;
    }
    while let Ok((ask, fds)) = receive::<StoreRequest>(keeper) {
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
                    process.list(pipe.as_fd()).map(|()| (0, None)).map_err(refused)
                }
                (StoreRequest::Change { change }, None) => {
                    process.change(&change).map(|()| (0, None)).map_err(refused)
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
                send(keeper, &StoreReply::Number(number), &fds)
            }
            Err(why) => send(keeper, &StoreReply::Refused(why), &[]),
        };
        if sent.is_err() {
            return;
        }
    }
}
