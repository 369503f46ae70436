//! The main loop of the store process: opens the store, and serves disks until none is left.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use draconis_container::signature::{RaidMember, find_raid_member};
use draconis_device::{Disk, FileOptions, OpenedFile, serve_remote_disk};
use draconis_exchange::channel::session::{Session, accept, accept_as_host};
use draconis_exchange::contract::disk;
use draconis_exchange::descriptors;
use draconis_objects::{ObjectDisk, OpenOptions, SNAPSHOT_SEPARATOR, Store};
use draconis_types::lock::{Condvar, Mutex};
use rustix::net::RecvFlags;

use super::{
    DISK_LANES, DiskCommand, MAX_MESSAGE_BYTES, NO_TIMEOUT, REPLY_DONE, REPLY_REFUSED,
    REQUEST_ATTACH, REQUEST_ATTACH_READ_ONLY, REQUEST_COMMAND, REQUEST_LIST, REQUEST_OPEN,
    REQUEST_OPEN_RAID_MEMBER, REQUEST_OPEN_READ_ONLY, REQUEST_OPEN_REMOTE, REQUEST_POLL_COMMAND,
    REQUEST_WAIT_DETACHED, StoreAccess, open_session_disk,
};
use crate::accepted_mark::AcceptedMarkDisk;
use crate::sandbox::{SandboxProfile, close_other_fds, confine};

/// Timeout for a session's hello, which the starter has sent already.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for ending a disk whose worker is dead.
const DETACH_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout of one poll for a command's end, so that other requests are answered meanwhile.
const COMMAND_POLL_TIMEOUT: Duration = Duration::from_millis(200);
/// Maximum number of disks served at once: each takes threads and memory.
const MAX_ATTACHED_DISKS: usize = 64;

/// Runs the store process until its starter has ended and no disk is served. `memory_limit_bytes`
/// bounds its private memory.
///
/// # Errors
/// A message if it was not started by a store keeper, or cannot be confined.
pub fn run_store_process(memory_limit_bytes: Option<u64>) -> Result<(), String> {
    let control = std::io::stdin().as_fd().try_clone_to_owned();
    let control = control.map_err(|error| error.to_string())?;
    let not_started = "a process of a store is started by a store keeper; see draconis-mount(1)";
    let (how, mut fds) = receive_request(&control).ok_or(not_started)?;
    let (Some(store), true) = (fds.pop(), fds.is_empty()) else { return Err(not_started.into()) };
    close_other_fds(&[control.as_fd(), store.as_fd()]);
    std::panic::set_hook(Box::new(|panic| {
        let _ = writeln!(std::io::stderr(), "draconis: store {}: {panic}", std::process::id());
        std::process::exit(70);
    }));
    let below = match how[..] {
        [REQUEST_OPEN] => StoreBackend::from_file(store, StoreAccess::Write)?,
        [REQUEST_OPEN_READ_ONLY] => StoreBackend::from_file(store, StoreAccess::Read)?,
        [REQUEST_OPEN_RAID_MEMBER] => StoreBackend::from_file(store, StoreAccess::WriteRaidMember)?,
        [REQUEST_OPEN_REMOTE] => {
            let session = accept(&store, Instant::now() + HELLO_TIMEOUT);
            StoreBackend::Served(session.map_err(|lost| lost.to_string())?)
        }
        _ => return Err(not_started.into()),
    };
    confine(&SandboxProfile::Store, memory_limit_bytes).map_err(|error| error.to_string())?;
    let (store, raid_member) = match below.open_store() {
        Ok(opened) => opened,
        Err(error) => {
            send_reply(&control, Err(error.to_string()));
            return Ok(());
        }
    };
    let serving =
        StoreServer { store, raid_member, disks: Arc::default(), changes: Arc::default() };
    send_reply(&control, Ok(0));
    while let Some((question, fds)) = receive_request(&control) {
        send_reply(&control, serving.handle_request(&question, fds));
    }
    serving.close();
    Ok(())
}

/// The disk or file that contains the store.
enum StoreBackend {
    File {
        file: OpenedFile,
        access: StoreAccess,
    },
    /// A disk that the starter serves.
    Served(Arc<Session>),
}

impl StoreBackend {
    fn from_file(store: OwnedFd, access: StoreAccess) -> Result<Self, String> {
        let write = access != StoreAccess::Read;
        // No io_uring: the seccomp filter cannot see operations of a ring.
        let options = FileOptions { write, direct: true, uring: false };
        let file = OpenedFile::new(store, options).map_err(|error| error.to_string())?;
        Ok(Self::File { file, access })
    }

    /// Opens the store; for reading, if it is on a member of a RAID that is not written.
    fn open_store(self) -> Result<(Arc<Store>, Option<RaidMember>), draconis_objects::Error> {
        let mut raid_member = None;
        let (disk, read_only): (Arc<dyn Disk>, bool) = match self {
            Self::File { file, access } => {
                let disk = Arc::new(file.start());
                if access == StoreAccess::Write {
                    raid_member = find_raid_member(&*disk);
                }
                (disk, access == StoreAccess::Read || raid_member.is_some())
            }
            Self::Served(session) => {
                let disk = open_session_disk(&session)?;
                let read_only = disk.properties().read_only;
                (Arc::new(disk), read_only)
            }
        };
        let store = Store::open(disk, &OpenOptions { read_only, ..OpenOptions::default() })?;
        Ok((store, raid_member))
    }
}

/// Receives one whole message; `None` if the peer is gone.
fn receive_request(control: &OwnedFd) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; MAX_MESSAGE_BYTES];
    let got = descriptors::receive_with_fds(control, &mut bytes, RecvFlags::empty()).ok()?;
    if got.len == 0 {
        return None;
    }
    // A truncated message becomes an unknown request.
    bytes.truncate(if got.is_complete { got.len } else { 0 });
    Some((bytes, got.fds))
}

/// Replies. If the starter is gone, the next receive detects it.
fn send_reply(control: &OwnedFd, answer: Result<u64, String>) {
    let bytes = match &answer {
        Ok(number) => [&[REPLY_DONE], &number.to_le_bytes()[..]].concat(),
        Err(said) => {
            let text = said.as_bytes();
            [
                &[REPLY_REFUSED],
                text.get(..text.len().min(MAX_MESSAGE_BYTES - 1)).unwrap_or_default(),
            ]
            .concat()
        }
    };
    let _ = descriptors::send_with_fds(control, &bytes, &[]);
}

/// The store and the attached disks.
struct StoreServer {
    store: Arc<Store>,
    /// The member of a RAID that the store is on, if it is not to be written.
    raid_member: Option<RaidMember>,
    disks: Arc<AttachedDisks>,
    changes: Arc<RunningCommands>,
}

/// Commands whose results were not reported yet; a result is present once the command has ended.
#[derive(Default)]
struct RunningCommands {
    all: Mutex<BTreeMap<u64, Option<Result<(), String>>>>,
    ended: Condvar,
}

#[derive(Default)]
struct AttachedDisks {
    all: Mutex<BTreeMap<u64, AttachedDiskState>>,
    ended: Condvar,
}

/// State of an attached disk.
struct AttachedDiskState {
    name: Vec<u8>,
    read_only: bool,
    mark: Arc<AtomicU64>,
    has_ended: bool,
}

impl StoreServer {
    fn handle_request(&self, question: &[u8], mut fds: Vec<OwnedFd>) -> Result<u64, String> {
        match (question.split_first(), fds.pop(), fds.is_empty()) {
            (
                Some((how @ (&REQUEST_ATTACH | &REQUEST_ATTACH_READ_ONLY), name)),
                Some(socket),
                true,
            ) => self.attach(name, *how == REQUEST_ATTACH_READ_ONLY, &socket),
            (Some((&REQUEST_WAIT_DETACHED, number)), None, true) => {
                let number = number.try_into().map_err(|_| UNKNOWN_REQUEST)?;
                self.wait_detached(u64::from_le_bytes(number))
            }
            (Some((&REQUEST_LIST, [])), Some(pipe), true) => {
                super::listing::send_listing(&self.store, pipe)
                    .map_err(|error| error.to_string())?;
                Ok(0)
            }
            (Some((&REQUEST_COMMAND, text)), None, true) => self.start_command(text),
            (Some((&REQUEST_POLL_COMMAND, number)), None, true) => {
                let number = number.try_into().map_err(|_| UNKNOWN_REQUEST)?;
                self.poll_command(u64::from_le_bytes(number))
            }
            _ => Err(UNKNOWN_REQUEST.into()),
        }
    }

    fn attach(&self, name: &[u8], read_only: bool, socket: &OwnedFd) -> Result<u64, String> {
        let shown = name.escape_ascii();
        if name.contains(&SNAPSHOT_SEPARATOR) && !read_only {
            return Err(format!("{shown} is a snapshot, and read-only: mount it with -o ro"));
        }
        if !read_only {
            self.refuse_raid_member()?;
        }
        let disk = self.store.disk_named(name).map_err(|error| error.to_string())?;
        let disk = if read_only { disk.read_only() } else { disk };
        let until = Instant::now() + HELLO_TIMEOUT;
        let session = accept_as_host(socket, until).map_err(|error| error.to_string())?;
        let mark = Arc::new(AtomicU64::new(0));
        let mut disks = self.disks.all.lock();
        let mut living = disks.values().filter(|other| !other.has_ended);
        if living.clone().count() >= MAX_ATTACHED_DISKS {
            return Err(format!(
                "{MAX_ATTACHED_DISKS} disks of the store are in use: unmount one first"
            ));
        }
        let is_shared = |other: &AttachedDiskState| other.read_only && read_only;
        if living.any(|other| other.name == name && !is_shared(other)) {
            return Err(format!("the disk {shown} is in use; unmount it first"));
        }
        let number = disks.last_key_value().map_or(0, |(last, _)| *last) + 1;
        let (marking, all) = (mark.clone(), self.disks.clone());
        let thread = std::thread::Builder::new().name("disk".into()).spawn(move || {
            serve_disk(&AcceptedMarkDisk::new(disk, marking), &session);
            if let Some(served) = all.all.lock().get_mut(&number) {
                served.has_ended = true;
            }
            all.ended.notify_all();
        });
        // Not joined: the thread sets `has_ended`.
        drop(thread.map_err(|error| error.to_string())?);
        disks.insert(
            number,
            AttachedDiskState { name: name.to_vec(), read_only, mark, has_ended: false },
        );
        Ok(number)
    }

    fn refuse_raid_member(&self) -> Result<(), String> {
        self.raid_member.as_ref().map_or(Ok(()), |member| Err(member.to_string()))
    }

    /// Starts a command; returns its number.
    fn start_command(&self, text: &[u8]) -> Result<u64, String> {
        self.refuse_raid_member()?;
        let change: DiskCommand = serde_json::from_slice(text).map_err(|_| UNKNOWN_REQUEST)?;
        let mut all = self.changes.all.lock();
        let number = all.last_key_value().map_or(0, |(last, _)| *last) + 1;
        let (store, changes) = (self.store.clone(), self.changes.clone());
        let thread = std::thread::Builder::new().name("change".into()).spawn(move || {
            let done = change.execute(&store).map_err(|error| error.to_string());
            // If the entry is missing, no caller waits.
            if let Some(change) = changes.all.lock().get_mut(&number) {
                *change = Some(done);
            }
            changes.ended.notify_all();
        });
        drop(thread.map_err(|error| error.to_string())?);
        all.insert(number, None);
        Ok(number)
    }

    /// Returns 0 once a command has ended, and forgets it; 1 while it runs.
    fn poll_command(&self, number: u64) -> Result<u64, String> {
        let goes_on = |all: &mut BTreeMap<u64, Option<Result<(), String>>>| {
            matches!(all.get(&number), Some(None))
        };
        let mut all = self.changes.all.lock();
        self.changes.ended.wait_while_for(&mut all, goes_on, COMMAND_POLL_TIMEOUT);
        if goes_on(&mut all) {
            return Ok(1);
        }
        all.remove(&number).flatten().unwrap_or_else(|| Err(UNKNOWN_REQUEST.into())).map(|()| 0)
    }

    /// Waits until a disk is not served any more; returns its mark, and forgets it.
    fn wait_detached(&self, number: u64) -> Result<u64, String> {
        let mut disks = self.disks.all.lock();
        if !disks.contains_key(&number) {
            return Err(format!("no disk {number} was served"));
        }
        let is_served = |disks: &mut BTreeMap<u64, AttachedDiskState>| {
            disks.get(&number).is_some_and(|served| !served.has_ended)
        };
        self.disks.ended.wait_while_for(&mut disks, is_served, DETACH_TIMEOUT);
        if is_served(&mut disks) {
            return Err(format!("disk {number} is still served"));
        }
        Ok(disks.remove(&number).map_or(0, |served| served.mark.load(Ordering::Acquire)))
    }

    /// Waits until no disk is served, and writes a checkpoint.
    fn close(self) {
        let mut disks = self.disks.all.lock();
        let is_served = |disks: &mut BTreeMap<u64, AttachedDiskState>| {
            disks.values().any(|served| !served.has_ended)
        };
        self.disks.ended.wait_while(&mut disks, is_served);
        drop(disks);
        if !self.store.is_read_only()
            && let Err(error) = self.store.sync().and_then(|()| self.store.checkpoint())
        {
            // Acknowledged writes were durable before.
            log::warn!("a store was not closed: {error}");
        }
    }
}

const UNKNOWN_REQUEST: &str = "what was asked is not known here";

/// Serves one disk until its client has closed it, violated the contract, or died.
fn serve_disk(disk: &AcceptedMarkDisk<ObjectDisk>, session: &Arc<Session>) {
    let ends: Vec<_> =
        (0..DISK_LANES).filter_map(|lane| session.server::<disk::Disk>(lane)).collect();
    if let Err(lost) = serve_remote_disk(disk, ends, NO_TIMEOUT) {
        log::debug!("a disk of a store was closed: {lost}");
    }
}
