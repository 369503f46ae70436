//! The manager: knows names and mount points, starts and watches one worker per mount.
//!
//! ```text
//!   command line ── JSON line ──▶ manager ──┬─ opens and claims the volume
//!                                           ├─ worker process, confined ── volume contract
//!                                           ├─ attaches the mount point, gives the worker
//!                                           │  the descriptor and keeps one itself
//!                                           └─ watcher thread: status, death, hang
//! ```
//!
//! Law 1: a volume is served once, and a mount point is used once, by any manager.
//! Law 2: nothing that a volume holds is looked at here.
//! Law 3: when a worker dies or hangs, its connection is closed, so that every call that waits
//! gets an error instead of waiting. The mount stays in its place, dead, until a user unmounts
//! it: what is written by its path must not go to the disk below. The volume is free at once.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, OFlags};

use crate::claimed::{Claimed, Keep, identity, said};
use crate::holders::{is_held_in_sight, who_holds};
use crate::options::MountOptions;
use crate::process::{Exit, StartError, Worker};
use crate::protocol::{self, LostMount, MountStatus, Reply, Request, Status, WorkerStatus};
use crate::sandbox::Confinement;
use crate::table;

/// How often a worker is asked how it is.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// How long `status` waits for fresh numbers.
const STATUS_WAIT: Duration = Duration::from_millis(300);
/// How long a worker may take to answer when its mount is taken away by force.
const FORCE_WAIT: Duration = Duration::from_secs(2);
/// How long the kernel may take to send the first request.
const SERVE_WAIT: Duration = Duration::from_secs(10);
/// How long an unmounted worker may take to end by itself.
const END_WAIT: Duration = Duration::from_secs(10);
/// How long, when it has changes to bring home first. That it hangs is noticed otherwise.
const CLOSE_WAIT: Duration = Duration::from_secs(600);
/// How long what uses a mount, and cannot be seen, may take to end; and how often that is
/// looked at.
const BUSY_WAIT: Duration = Duration::from_millis(500);
const BUSY_PAUSE: Duration = Duration::from_millis(10);
/// How long the kernel may take to write back what programs have changed, when the manager
/// is asked to end while files are open.
const SYNC_WAIT: Duration = Duration::from_secs(30);
/// How long a mount that is just ending may take to give its volume and directory back.
const GIVE_BACK_WAIT: Duration = Duration::from_secs(3);
/// How often it is looked whether a dead mount was taken away, where no client asks.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How many mounts that were lost are remembered.
const LOST_MAX: usize = 16;

/// How a manager makes a volume appear to Linux programs. FUSE is the only way today.
pub trait Front: Send + Sync + 'static {
    /// Attaches `mount_point` and returns the descriptor over which its requests come. With
    /// a block `device` that is what the kernel shows as the source, and has for itself.
    ///
    /// # Errors
    /// A sentence that says what to do.
    fn attach(
        &self,
        mount_point: &Path,
        volume: &Path,
        device: Option<&Path>,
        options: &MountOptions,
    ) -> Result<OwnedFd, String>;

    /// Has the kernel take a mount for read-only, or not any more; `options` say which, and
    /// are otherwise those of the mount.
    ///
    /// # Errors
    /// See [`NotDetached`].
    fn remount(
        &self,
        mount_point: &Path,
        volume: &Path,
        options: &MountOptions,
    ) -> Result<(), NotDetached>;

    /// Sets the kernel up for speed once the mount is served, as far as it may.
    fn tune(&self, mount_point: &Path);

    /// Takes `mount_point` away; with `force` even while it is in use.
    ///
    /// # Errors
    /// See [`NotDetached`].
    fn detach(&self, mount_point: &Path, force: bool) -> Result<(), NotDetached>;
}

/// Why a mount was not taken away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotDetached {
    /// It is in use.
    Busy,
    /// Anything else: a sentence that says what.
    Failed(String),
}

impl NotDetached {
    /// The sentence for the user.
    pub fn sentence(self, mount_point: &Path) -> String {
        match self {
            Self::Failed(why) => why,
            Self::Busy => {
                let holders = table::at(mount_point).map(|mount| who_holds(&mount));
                let holders = holders.unwrap_or_else(|| "it is in use".into());
                let name = mount_point.display();
                format!("{name} is busy: {holders}; end that, or take it away at once with --force")
            }
        }
    }
}

/// A manager and what it has mounted.
pub struct Manager {
    front: Box<dyn Front>,
    mounts: Mutex<BTreeMap<u64, Arc<Mount>>>,
    lost: Mutex<Vec<LostMount>>,
    /// Told whenever a mount ends or a client has its answer.
    ended: Condvar,
    next: AtomicU64,
    /// Clients that wait for an answer.
    clients: AtomicU64,
}

struct Mount {
    volume: PathBuf,
    /// Device and inode number of the volume: two paths may lead to one.
    identity: (u64, u64),
    mount_point: PathBuf,
    options: MountOptions,
    state: Mutex<MountState>,
}

struct MountState {
    phase: Phase,
    /// What the kernel calls it, once it is attached.
    device: Option<String>,
    asks: Option<Sender<Ask>>,
    worker: Option<OwnedFd>,
    status: MountStatus,
}

/// ```text
///   Starting ──▶ Serving ──▶ Ended { dead } ──▶ (out of the table)
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    Starting,
    Serving,
    /// Nothing serves it any more. `dead`: it is still in its place.
    Ended {
        why: Option<String>,
        dead: bool,
    },
}

enum Ask {
    Refresh(Sender<()>),
    Close(Sender<()>),
    ReadOnly(bool, Sender<Result<(), String>>),
    Died(Exit),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Manager {
    /// A manager that has mounted nothing yet.
    pub fn new(front: Box<dyn Front>) -> Arc<Self> {
        Arc::new(Self {
            front,
            mounts: Mutex::default(),
            lost: Mutex::default(),
            ended: Condvar::new(),
            next: AtomicU64::new(0),
            clients: AtomicU64::new(0),
        })
    }

    /// Serves `listener` in a thread of its own, each client in another.
    pub fn listen(self: &Arc<Self>, listener: UnixListener) {
        let manager = self.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                manager.clients.fetch_add(1, Ordering::Relaxed);
                let manager = manager.clone();
                std::thread::spawn(move || {
                    manager.serve(&client);
                    // Under the lock, or whoever waits for it could miss it.
                    let mounts = lock(&manager.mounts);
                    manager.clients.fetch_sub(1, Ordering::Relaxed);
                    manager.ended.notify_all();
                    drop(mounts);
                });
            }
        });
    }

    fn serve(self: &Arc<Self>, client: &UnixStream) {
        // Sockets live in a directory that only their owner can enter; this is the second lock.
        let peer = rustix::net::sockopt::socket_peercred(client);
        if peer.is_ok_and(|peer| peer.uid != rustix::process::geteuid()) {
            return;
        }
        let reply = match protocol::receive(client) {
            Ok(request) => self.answer(request),
            Err(error) => Reply::Failed { why: format!("the request makes no sense: {error}") },
        };
        // A client that went away does not want to know.
        let _ = protocol::send(client, &reply);
    }

    fn answer(self: &Arc<Self>, request: Request) -> Reply {
        match request {
            Request::Mount { volume, mount_point, options, replace } => {
                match self.mount(volume, mount_point, options, replace) {
                    Ok(notes) => Reply::Mounted { notes },
                    Err(why) => Reply::Failed { why },
                }
            }
            Request::Remount { mount_point, read_only } => {
                let Some(mount) = self.find(&mount_point) else { return Reply::NotMounted };
                match self.remount(&mount, read_only) {
                    Ok(()) => Reply::Done,
                    Err(why) => Reply::Failed { why: format!("{}: {why}", mount_point.display()) },
                }
            }
            Request::Unmount { mount_point, force } => {
                let Some(mount) = self.find(&mount_point) else { return Reply::NotMounted };
                match self.unmount(&mount, force) {
                    Ok(None) => Reply::Done,
                    Ok(Some(why)) => Reply::Cleared { why },
                    Err(why) => Reply::Failed { why },
                }
            }
            Request::Status => Reply::Status(self.status()),
            Request::Wait { mount_point } => Reply::Ended { why: self.wait(&mount_point) },
        }
    }

    /// Mounts `volume` on `mount_point` and returns what the user should be told; with
    /// `replace` a dead mount of ours is cleared first.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn mount(
        self: &Arc<Self>,
        volume: PathBuf,
        mount_point: PathBuf,
        options: MountOptions,
        replace: bool,
    ) -> Result<Vec<String>, String> {
        let identity = identity(&volume)?;
        if replace {
            self.clear(&mount_point)?;
        }
        // The place in the table is taken first: two requests for one volume cannot both pass.
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let status = first_status(&volume, &mount_point, &options);
        let state =
            MountState { phase: Phase::Starting, device: None, asks: None, worker: None, status };
        let mount =
            Arc::new(Mount { volume, identity, mount_point, options, state: Mutex::new(state) });
        self.enter(id, &mount)?;
        let started = check_mount_point(&mount.mount_point)
            .and_then(|()| Claimed::open(&mount.volume, mount.options.read_only, GIVE_BACK_WAIT))
            .and_then(|claimed| self.start(id, &mount, claimed));
        if started.is_err() {
            self.leave(id);
        }
        started
    }

    /// Takes a dead mount of ours away, whichever manager it had.
    fn clear(&self, mount_point: &Path) -> Result<(), String> {
        if let Some(mount) = self.find(mount_point).filter(|mount| mount.is_dead()) {
            return self.unmount(&mount, true).map(drop);
        }
        match table::at(mount_point) {
            Some(entry) if entry.is_ours() && entry.answers() == table::Answer::Dead => {
                let detached = self.front.detach(mount_point, true);
                detached.map_err(|why| why.sentence(mount_point))
            }
            _ => Ok(()),
        }
    }

    fn enter(&self, id: u64, mount: &Arc<Mount>) -> Result<(), String> {
        let until = Instant::now() + GIVE_BACK_WAIT;
        let mut mounts = lock(&self.mounts);
        loop {
            mounts.retain(|_, other| !other.was_cleared());
            let Some((other, why)) = conflict(&mounts, mount) else { break };
            // One that is just ending gives back what it has.
            let left = until.checked_duration_since(Instant::now());
            let Some(left) = left.filter(|_| other.is_ending()) else { return Err(why) };
            mounts =
                self.ended.wait_timeout(mounts, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        lock(&self.lost).retain(|lost| lost.mount_point != mount.mount_point);
        mounts.insert(id, mount.clone());
        Ok(())
    }

    fn leave(&self, id: u64) {
        lock(&self.mounts).remove(&id);
        self.ended.notify_all();
    }

    fn start(
        self: &Arc<Self>,
        id: u64,
        mount: &Arc<Mount>,
        claimed: Claimed,
    ) -> Result<Vec<String>, String> {
        let Claimed { image, disk, note, mut keep } = claimed;
        let read_only = disk.is_none();
        let options = MountOptions { read_only, ..mount.options.clone() };
        let started = Worker::start(image, disk, &options);
        let mut worker = started.map_err(|error| match error {
            StartError::Refused(why) => format!("{}: {why}", mount.volume.display()),
            other => other.to_string(),
        })?;
        let options = MountOptions { read_only: worker.read_only, ..options };
        let attached = self.attach(mount, &mut keep, &options);
        let fuse = attached.inspect_err(|_| worker.kill())?;
        let device = table::at(&mount.mount_point).map(|entry| entry.device);
        lock(&mount.state).device = device;
        let given = worker.give(&fuse);
        let given = given.map_err(|error| format!("the worker died before it served: {error}"));
        if let Err(why) = given.and_then(|()| wait_until_served(&mut worker)) {
            worker.kill();
            self.clean(mount);
            return Err(why);
        }
        let mut notes: Vec<String> = note.into_iter().collect();
        notes.extend(worker.notes.iter().cloned());
        self.front.tune(&mount.mount_point);
        let (asks, asked) = channel();
        let exits = asks.clone();
        let pid = worker.pid();
        {
            let mut state = lock(&mount.state);
            state.phase = Phase::Serving;
            state.asks = Some(asks);
            state.worker = worker.pidfd().ok();
            let MountStatus { worker_pid, state, read_only, sandbox, memory_bytes, .. } =
                &mut state.status;
            (*worker_pid, *state) = (pid, "serving".into());
            (*read_only, *sandbox) = (worker.read_only, worker.confinement.clone());
            *memory_bytes = resident_bytes(pid);
        }
        self.tell();
        log::info!(
            "{} is mounted on {}, served by process {pid}",
            mount.volume.display(),
            mount.mount_point.display()
        );
        worker.when_it_ends(move |exit| {
            // Nobody listens any more only if the watcher has ended, which then knows.
            let _ = exits.send(Ask::Died(exit));
        });
        let (manager, mount) = (self.clone(), mount.clone());
        std::thread::spawn(move || {
            // The volume is given back as this returns.
            let why = manager.watch(&mount, worker, &asked);
            drop(keep);
            // Closing our descriptor of the connection is what ends the waits of clients.
            drop(fuse);
            manager.has_ended(id, &mount, why);
        });
        Ok(notes)
    }

    /// Attaches a mount; one that writes has a block device as its source where that can be
    /// done, since only then does the kernel pass `sync` on.
    fn attach(
        &self,
        mount: &Mount,
        keep: &mut Keep,
        options: &MountOptions,
    ) -> Result<OwnedFd, String> {
        let Mount { mount_point, volume, .. } = mount;
        let attach =
            |device: Option<&Path>| self.front.attach(mount_point, volume, device, options);
        let is_root = rustix::process::geteuid().is_root();
        if options.block_device == Some(true) && !is_root {
            return Err("mount option 'fuseblk' is for root only; leave it out".into());
        }
        let may = is_root && options.source.is_none();
        if options.read_only || !options.block_device.unwrap_or(may) {
            return attach(None);
        }
        let attached = keep.source(volume).and_then(|source| attach(Some(&source.path)));
        attached.or_else(|why| {
            if options.block_device == Some(true) {
                return Err(format!("mount option 'fuseblk' cannot be had: {why}"));
            }
            log::info!("{}: not mounted as a block device: {why}", volume.display());
            keep.guard_again(volume)?;
            attach(None)
        })
    }

    /// Nothing serves `mount` any more: it is out of the table, or in it as a dead one.
    fn has_ended(&self, id: u64, mount: &Mount, why: Option<String>) {
        let dead = mount.is_in_place();
        // A worker ends in peace, too, when the connection is cut from outside.
        let cut = || "its connection to the kernel was cut".to_string();
        let why = why.or_else(|| dead.then(cut));
        if let Some(why) = &why {
            log::error!("{}: {why}", mount.mount_point.display());
        }
        {
            let mut state = lock(&mount.state);
            state.phase = Phase::Ended { why: why.clone(), dead };
            (state.asks, state.worker) = (None, None);
            if dead {
                state.status.state = "dead".into();
                state.status.why.clone_from(&why);
                state.status.worker = None;
                state.status.memory_bytes = 0;
            }
        }
        if dead {
            return self.tell();
        }
        if let Some(why) = &why {
            self.remember(mount, why);
        }
        self.leave(id);
    }

    /// Wakes the waiters of all mounts.
    fn tell(&self) {
        // Under the lock, or a waiter that looks at this moment could miss it.
        let mounts = lock(&self.mounts);
        self.ended.notify_all();
        drop(mounts);
    }

    fn remember(&self, mount: &Mount, why: &str) {
        let mut lost = lock(&self.lost);
        let Mount { volume, mount_point, .. } = mount;
        let (volume, mount_point) = (volume.clone(), mount_point.clone());
        lost.push(LostMount { volume, mount_point, why: why.to_string() });
        let too_many = lost.len().saturating_sub(LOST_MAX);
        lost.drain(..too_many);
    }

    /// Asks the worker how it is until it ends; returns what went wrong, if something did.
    fn watch(&self, mount: &Mount, mut worker: Worker, asked: &Receiver<Ask>) -> Option<String> {
        let deadline = Duration::from_secs(mount.options.deadline_s.max(1));
        let mut hung = None;
        let mut closed = false;
        loop {
            let waiting = match asked.recv_timeout(ASK_EVERY) {
                Ok(Ask::Died(exit)) => {
                    let words = worker.disk_failure();
                    return hung
                        .or_else(|| exit.complaint(&words.unwrap_or_else(|| worker.last_words())));
                }
                Ok(Ask::Close(waiting)) => {
                    closed = true;
                    if let Err(fault) = worker.close(Instant::now() + CLOSE_WAIT) {
                        log::error!("{}: {fault}", mount.mount_point.display());
                    }
                    drop(waiting);
                    None
                }
                Ok(Ask::ReadOnly(read_only, waiting)) => {
                    // Who asked may have gone.
                    let _ = waiting.send(worker.set_read_only(read_only, CLOSE_WAIT));
                    None
                }
                Ok(Ask::Refresh(waiting)) => Some(waiting),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => None,
            };
            if hung.is_some() || closed {
                continue;
            }
            match worker.status(Instant::now() + deadline) {
                Ok(told) if Duration::from_millis(told.busy_ms) <= deadline => {
                    self.note(mount, "serving", Some(told));
                    lock(&mount.state).status.disk = worker.disk_failure();
                }
                answer => {
                    // A worker that is ending does not answer either; its death tells why.
                    let late = answer.err().is_none_or(|fault| fault.is_timeout());
                    if late {
                        let pid = worker.pid();
                        let seconds = deadline.as_secs();
                        hung = Some(format!(
                            "worker {pid} did not answer for {seconds} s and was killed"
                        ));
                        self.note(mount, "not answering", None);
                        worker.kill();
                    }
                }
            }
            drop(waiting);
        }
    }

    fn note(&self, mount: &Mount, state: &str, told: Option<WorkerStatus>) {
        let status = &mut lock(&mount.state).status;
        status.state = state.to_string();
        status.read_only |= told.as_ref().is_some_and(|told| told.failure.is_some());
        status.worker = told;
        status.memory_bytes = resident_bytes(status.worker_pid);
    }

    /// Takes a mount point away that was never served.
    fn clean(&self, mount: &Mount) {
        if mount.is_in_place()
            && let Err(why) = self.front.detach(&mount.mount_point, true)
        {
            log::error!("{}", why.sentence(&mount.mount_point));
        }
    }

    /// Takes a mount point away, and waits a moment for users of it that are not to be seen.
    fn detach(&self, mount_point: &Path, force: bool) -> Result<(), NotDetached> {
        let until = Instant::now() + BUSY_WAIT;
        loop {
            let detached = self.front.detach(mount_point, force);
            let held = || table::at(mount_point).is_none_or(|mount| is_held_in_sight(&mount));
            if detached != Err(NotDetached::Busy) || Instant::now() > until || held() {
                return detached;
            }
            std::thread::sleep(BUSY_PAUSE);
        }
    }

    /// Unmounts, and waits until the worker is gone and the volume free. Of a mount that was
    /// dead it says what had happened.
    fn unmount(&self, mount: &Arc<Mount>, force: bool) -> Result<Option<String>, String> {
        self.wait_while(mount, Some(SERVE_WAIT), |mount| mount.phase() == Phase::Starting);
        let mount_point = &mount.mount_point;
        if force && mount.is_served() && !mount.answers(FORCE_WAIT) {
            // The kernel would wait for it, too, to tell it that the mount goes.
            log::error!("{}: its worker does not answer, and is killed", mount_point.display());
            mount.kill();
            self.wait_while(mount, Some(END_WAIT), Mount::is_served);
        }
        // Of a dead mount there is nothing that could be lost, by any of its users.
        let detached = self.detach(mount_point, force || mount.is_dead());
        match detached {
            // It died, or was taken away by another, while we were at it.
            Err(_) if mount.is_ending() => {}
            detached => detached.map_err(|why| why.sentence(mount_point))?,
        }
        if let Phase::Ended { why, dead: true } = mount.phase() {
            lock(&self.mounts).retain(|_, other| !Arc::ptr_eq(other, mount));
            self.tell();
            return Ok(why);
        }
        let patient = !force && !lock(&mount.state).status.read_only;
        let wait = if patient { CLOSE_WAIT } else { END_WAIT };
        if !self.wait_while(mount, Some(wait), Mount::is_served) {
            return Err(format!(
                "{} is unmounted, but its worker still runs: files are open there",
                mount_point.display()
            ));
        }
        match mount.phase() {
            // Who forces it does so because of the worker.
            Phase::Ended { why: Some(why), .. } if !force => {
                Err(format!("{}: {why}", mount_point.display()))
            }
            _ => Ok(None),
        }
    }

    /// Makes a mount read-only, with everything brought home and the volume marked as
    /// unmounted, or writable again.
    fn remount(&self, mount: &Mount, read_only: bool) -> Result<(), String> {
        if mount.phase() != Phase::Serving {
            return Err("nothing serves it; clear it with draconis umount".into());
        }
        if lock(&mount.state).status.read_only == read_only {
            return Ok(());
        }
        if !rustix::process::geteuid().is_root() {
            return Err("only root may remount; unmount it and mount it again".into());
        }
        let options = MountOptions { read_only, ..mount.options.clone() };
        let kernel = || {
            let done = self.front.remount(&mount.mount_point, &mount.volume, &options);
            done.map_err(|why| match why {
                NotDetached::Busy => "it is busy: files are open for writing there".to_string(),
                NotDetached::Failed(why) => why,
            })
        };
        let worker = || {
            let asks = lock(&mount.state).asks.clone();
            let (done, wait) = channel();
            let sent = asks.is_some_and(|asks| asks.send(Ask::ReadOnly(read_only, done)).is_ok());
            let answer = wait.recv_timeout(CLOSE_WAIT).ok().filter(|_| sent);
            answer.unwrap_or_else(|| Err("its worker does not answer".into()))
        };
        // The kernel never lets through what the worker would refuse.
        if read_only {
            kernel()?;
            worker()?;
        } else {
            worker()?;
            kernel()?;
        }
        lock(&mount.state).status.read_only = read_only;
        Ok(())
    }

    /// Waits while `mount` is in the table and something holds of it, for so long at most;
    /// says whether that has ended.
    fn wait_while(
        &self,
        mount: &Arc<Mount>,
        wait: Option<Duration>,
        holds: impl Fn(&Mount) -> bool,
    ) -> bool {
        let until = wait.map(|wait| Instant::now() + wait);
        let mut mounts = lock(&self.mounts);
        while holds(mount) && mounts.values().any(|other| Arc::ptr_eq(other, mount)) {
            mounts = match until {
                None => self.ended.wait(mounts).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let Some(left) = until.checked_duration_since(Instant::now()) else {
                        return false;
                    };
                    let waited = self.ended.wait_timeout(mounts, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        true
    }

    /// What is mounted there; one that is served before one that is dead.
    fn find(&self, mount_point: &Path) -> Option<Arc<Mount>> {
        let mut mounts = lock(&self.mounts);
        mounts.retain(|_, mount| !mount.was_cleared());
        mounts.values().rfind(|mount| mount.mount_point == mount_point).cloned()
    }

    /// Everything that is mounted, with numbers as fresh as the workers give them.
    pub fn status(&self) -> Status {
        let mounts: Vec<Arc<Mount>> = {
            let mut mounts = lock(&self.mounts);
            mounts.retain(|_, mount| !mount.was_cleared());
            mounts.values().cloned().collect()
        };
        for mount in &mounts {
            mount.answers(STATUS_WAIT);
        }
        let mounts = mounts.iter().map(|mount| lock(&mount.state).status.clone()).collect();
        let lost = lock(&self.lost).clone();
        Status { manager_pid: Some(std::process::id()), mounts, lost, dead: vec![] }
    }

    /// Waits until nothing serves `mount_point`; says why it ended, if not on request.
    pub fn wait(&self, mount_point: &Path) -> Option<String> {
        let mount = self.find(mount_point)?;
        self.wait_while(&mount, None, Mount::is_served);
        match mount.phase() {
            Phase::Ended { why, .. } => why,
            _ => None,
        }
    }

    /// Waits until nothing has been mounted, and no client has asked anything, for `idle`. With
    /// `dead` mounts that are dead count as mounted: it knows why they are.
    pub fn wait_idle(&self, idle: Duration, dead: bool) {
        let mut mounts = lock(&self.mounts);
        loop {
            mounts.retain(|_, mount| !mount.was_cleared());
            let served = mounts.values().any(|mount| mount.is_served());
            if served || self.clients.load(Ordering::Relaxed) > 0 {
                mounts = self.ended.wait(mounts).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let stays = dead && !mounts.is_empty();
            let wait = if stays { LOOK_EVERY } else { idle };
            let (held, waited) =
                self.ended.wait_timeout(mounts, wait).unwrap_or_else(PoisonError::into_inner);
            mounts = held;
            let changed = mounts.values().any(|mount| mount.is_served())
                || self.clients.load(Ordering::Relaxed) > 0;
            if waited.timed_out() && !stays && !changed {
                return;
            }
        }
    }

    /// Unmounts everything, in use or not. What programs have changed is brought home;
    /// what they change after that is refused.
    pub fn unmount_all(&self) {
        let mounts: Vec<Arc<Mount>> = lock(&self.mounts).values().cloned().collect();
        for mount in mounts {
            if let Err(why) = self.end(&mount) {
                log::error!("{why}");
            }
        }
    }

    fn end(&self, mount: &Arc<Mount>) -> Result<(), String> {
        let Err(in_use) = self.unmount(mount, false) else { return Ok(()) };
        if !mount.is_served() {
            return Err(in_use);
        }
        write_back(&mount.mount_point);
        let detached = self.front.detach(&mount.mount_point, true);
        detached.map_err(|why| why.sentence(&mount.mount_point))?;
        let asks = lock(&mount.state).asks.clone();
        let (done, wait) = channel();
        if asks.is_some_and(|asks| asks.send(Ask::Close(done)).is_ok()) {
            // The end is dropped when it is done: that is the answer.
            let _ = wait.recv_timeout(CLOSE_WAIT);
        }
        Ok(())
    }
}

impl Mount {
    fn phase(&self) -> Phase {
        lock(&self.state).phase.clone()
    }

    fn is_served(&self) -> bool {
        !matches!(self.phase(), Phase::Ended { .. })
    }

    /// Whether its worker tells how it is.
    fn answers(&self, wait: Duration) -> bool {
        let asks = lock(&self.state).asks.clone();
        let (done, answer) = channel::<()>();
        let asked = asks.is_some_and(|asks| asks.send(Ask::Refresh(done)).is_ok());
        // The end is dropped when the numbers are in: that is the answer.
        asked && answer.recv_timeout(wait) == Err(RecvTimeoutError::Disconnected)
    }

    fn kill(&self) {
        if let Some(worker) = &lock(&self.state).worker {
            // It may have ended by itself, which is as good.
            let _ = rustix::process::pidfd_send_signal(worker, rustix::process::Signal::KILL);
        }
    }

    fn is_dead(&self) -> bool {
        matches!(self.phase(), Phase::Ended { dead: true, .. })
    }

    /// Whether the kernel has it in its place.
    fn is_in_place(&self) -> bool {
        let device = lock(&self.state).device.clone();
        device.is_some_and(|device| {
            let mut all = table::entries().into_iter();
            all.any(|entry| entry.device == device && entry.at == self.mount_point)
        })
    }

    /// A dead one that was unmounted without us.
    fn was_cleared(&self) -> bool {
        self.is_dead() && !self.is_in_place()
    }

    /// Whether it was unmounted, and its worker is about to end.
    fn is_ending(&self) -> bool {
        self.phase() == Phase::Serving && !self.is_in_place()
    }
}

/// What of `mounts` has the volume or the directory that `mount` wants, and how to say it.
fn conflict(mounts: &BTreeMap<u64, Arc<Mount>>, mount: &Mount) -> Option<(Arc<Mount>, String)> {
    mounts.values().find_map(|other| {
        let (volume, at) = (other.volume.display(), other.mount_point.display());
        let why = if other.is_served() && other.identity == mount.identity {
            format!("{} is already mounted on {at}", mount.volume.display())
        } else if other.mount_point != mount.mount_point {
            return None;
        } else if other.is_dead() {
            dead_there(&other.mount_point, &other.volume)
        } else {
            format!("{at} is already a mount point, of {volume}")
        };
        Some((other.clone(), why))
    })
}

fn dead_there(mount_point: &Path, volume: &Path) -> String {
    let (at, volume) = (mount_point.display(), volume.display());
    format!(
        "{at} has a dead mount of {volume} on it: clear it with draconis umount, or mount with \
         --replace"
    )
}

/// Has the kernel write back what it keeps of a mount. A worker that hangs may hang this,
/// too, and is then left behind.
fn write_back(mount_point: &Path) {
    let path = mount_point.to_path_buf();
    let (done, wait) = channel();
    std::thread::spawn(move || {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&path, flags, rustix::fs::Mode::empty());
        let synced = opened.and_then(rustix::fs::syncfs);
        // Whoever waited has gone on if nobody hears this.
        let _ = done.send(synced);
    });
    match wait.recv_timeout(SYNC_WAIT) {
        Ok(Ok(())) => {}
        Ok(Err(errno)) => log::error!("{}", said(mount_point, errno)),
        Err(_) => log::error!("{}: it does not answer", mount_point.display()),
    }
}

/// Waits for the first request, by which the kernel sets the mount up: before it the
/// kernel's own settings would overwrite what [`Front::tune`] sets.
fn wait_until_served(worker: &mut Worker) -> Result<(), String> {
    let until = Instant::now() + SERVE_WAIT;
    loop {
        match worker.status(until) {
            Ok(told) if told.requests > 0 => return Ok(()),
            Ok(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
            Ok(_) => return Err("the kernel did not begin to use the mount".into()),
            Err(fault) => return Err(format!("the worker was lost before it served: {fault}")),
        }
    }
}

fn first_status(volume: &Path, mount_point: &Path, options: &MountOptions) -> MountStatus {
    MountStatus {
        volume: volume.to_path_buf(),
        mount_point: mount_point.to_path_buf(),
        worker_pid: 0,
        state: "starting".into(),
        why: None,
        read_only: options.read_only,
        sandbox: Confinement::default(),
        memory_bytes: 0,
        disk: None,
        worker: None,
    }
}

fn check_mount_point(mount_point: &Path) -> Result<(), String> {
    let name = mount_point.display();
    // Asked first: a mount whose worker is gone does not answer `stat`.
    match table::at(mount_point) {
        Some(entry) if entry.is_ours() && entry.answers() == table::Answer::Dead => {
            return Err(dead_there(mount_point, &entry.volume()));
        }
        Some(_) => return Err(format!("{name} is already a mount point")),
        None => {}
    }
    let stat = rustix::fs::stat(mount_point).map_err(|errno| said(mount_point, errno))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => Ok(()),
        _ => Err(format!("{name} is not a directory")),
    }
}

/// Resident memory of a process, in bytes; 0 when it is gone.
fn resident_bytes(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}
