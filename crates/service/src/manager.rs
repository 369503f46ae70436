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
//! Law 3: when a worker dies or hangs, its mount point is taken away, so that whoever
//! waits gets an error instead of waiting.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use draconis_device::{Claim, claim};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;

use crate::client::Directory;
use crate::options::MountOptions;
use crate::process::{Exit, StartError, Worker};
use crate::protocol::{self, LostMount, MountStatus, Reply, Request, Status, WorkerStatus};

/// How often a worker is asked how it is.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// How long `status` waits for fresh numbers.
const STATUS_WAIT: Duration = Duration::from_millis(300);
/// How long the kernel may take to send the first request.
const SERVE_WAIT: Duration = Duration::from_secs(10);
/// How long an unmounted worker may take to end by itself.
const END_WAIT: Duration = Duration::from_secs(10);
/// How long, when it has changes to bring home first. That it hangs is noticed otherwise.
const CLOSE_WAIT: Duration = Duration::from_secs(600);
/// How long the kernel may take to write back what programs have changed, when the manager
/// is asked to end while files are open.
const SYNC_WAIT: Duration = Duration::from_secs(30);
/// How many mounts that were lost are remembered.
const LOST_MAX: usize = 16;

/// How a manager makes a volume appear to Linux programs. FUSE is the only way today.
pub trait Front: Send + Sync + 'static {
    /// Attaches `mount_point` and returns the descriptor over which its requests come.
    ///
    /// # Errors
    /// A sentence that says what to do.
    fn attach(
        &self,
        mount_point: &Path,
        volume: &Path,
        options: &MountOptions,
    ) -> Result<OwnedFd, String>;

    /// Sets the kernel up for speed once the mount is served; tells what it may not do.
    fn tune(&self, mount_point: &Path) -> Option<String>;

    /// Takes `mount_point` away; with `force` even while it is in use.
    ///
    /// # Errors
    /// A sentence that says why not.
    fn detach(&self, mount_point: &Path, force: bool) -> Result<(), String>;
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
    worker_pid: u32,
    asks: Option<Sender<Ask>>,
    status: Option<MountStatus>,
    /// Why it ended, once it has.
    ended: Option<Option<String>>,
}

enum Ask {
    Refresh(Sender<()>),
    Close(Sender<()>),
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
            Request::Mount { volume, mount_point, options } => {
                match self.mount(volume, mount_point, options) {
                    Ok(notes) => Reply::Mounted { notes },
                    Err(why) => Reply::Failed { why },
                }
            }
            Request::Unmount { mount_point, force } => match self.unmount(&mount_point, force) {
                Ok(()) => Reply::Done,
                Err(why) => Reply::Failed { why },
            },
            Request::Status => Reply::Status(self.status()),
            Request::Wait { mount_point } => Reply::Ended { why: self.wait(&mount_point) },
        }
    }

    /// Mounts `volume` on `mount_point` and returns what the user should be told.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn mount(
        self: &Arc<Self>,
        volume: PathBuf,
        mount_point: PathBuf,
        options: MountOptions,
    ) -> Result<Vec<String>, String> {
        let identity = identity(&volume)?;
        check_mount_point(&mount_point)?;
        // The place in the table is taken first: two requests for one volume cannot both pass.
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mount = Arc::new(Mount {
            volume,
            identity,
            mount_point,
            options,
            state: Mutex::new(MountState { worker_pid: 0, asks: None, status: None, ended: None }),
        });
        self.enter(id, &mount)?;
        let opened = open_volume(&mount.volume, mount.options.read_only);
        let started = opened.and_then(|opened| self.start(id, &mount, opened));
        if started.is_err() {
            self.leave(id);
        }
        started
    }

    fn enter(&self, id: u64, mount: &Arc<Mount>) -> Result<(), String> {
        let mut mounts = lock(&self.mounts);
        for other in mounts.values() {
            if other.identity == mount.identity {
                let (volume, at) = (mount.volume.display(), other.mount_point.display());
                return Err(format!("{volume} is already mounted on {at}"));
            }
            if other.mount_point == mount.mount_point {
                let (at, volume) = (mount.mount_point.display(), other.volume.display());
                return Err(format!("{at} is already used for {volume}"));
            }
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
        opened: Opened,
    ) -> Result<Vec<String>, String> {
        let read_only = opened.disk.is_none();
        let options = MountOptions { read_only, ..mount.options.clone() };
        let started = Worker::start(opened.image, opened.disk, &options);
        let mut worker = started.map_err(|error| match error {
            StartError::Refused(why) => format!("{}: {why}", mount.volume.display()),
            other => other.to_string(),
        })?;
        let options = MountOptions { read_only: worker.read_only, ..options };
        let attached = self.front.attach(&mount.mount_point, &mount.volume, &options);
        let fuse = attached.inspect_err(|_| worker.kill())?;
        if let Err(error) = worker.give(&fuse) {
            worker.kill();
            self.clean(mount);
            return Err(format!("the worker died before it could serve: {error}"));
        }
        if let Err(why) = wait_until_served(&mut worker) {
            worker.kill();
            self.clean(mount);
            return Err(why);
        }
        let mut notes: Vec<String> = opened.note.into_iter().collect();
        notes.extend(worker.notes.iter().cloned());
        notes.extend(self.front.tune(&mount.mount_point));
        let (asks, asked) = channel();
        let exits = asks.clone();
        let pid = worker.pid();
        *lock(&mount.state) = MountState {
            worker_pid: pid,
            asks: Some(asks),
            status: Some(first_status(mount, &worker)),
            ended: None,
        };
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
            let why = manager.watch(&mount, worker, &asked);
            // Closing our descriptor of the connection is what ends the waits of clients.
            drop(fuse);
            if let Some(why) = &why {
                log::error!("{}: {why}", mount.mount_point.display());
                manager.remember(&mount, why);
            }
            lock(&mount.state).ended = Some(why);
            manager.leave(id);
        });
        Ok(notes)
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
                    self.clean(mount);
                    return hung.or_else(|| exit.complaint(&worker.last_words()));
                }
                Ok(Ask::Close(waiting)) => {
                    closed = true;
                    if let Err(fault) = worker.close(Instant::now() + CLOSE_WAIT) {
                        log::error!("{}: {fault}", mount.mount_point.display());
                    }
                    drop(waiting);
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
        let mut held = lock(&mount.state);
        let pid = held.worker_pid;
        if let Some(status) = &mut held.status {
            status.state = state.to_string();
            status.read_only |= told.as_ref().is_some_and(|told| told.failure.is_some());
            status.worker = told;
            status.memory_bytes = resident_bytes(pid);
        }
    }

    /// Takes the mount point away if it is still there.
    fn clean(&self, mount: &Mount) {
        if is_mount_point(&mount.mount_point)
            && let Err(error) = self.front.detach(&mount.mount_point, true)
        {
            log::error!("{}: {error}", mount.mount_point.display());
        }
    }

    /// Unmounts a directory and waits until its worker is gone.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn unmount(&self, mount_point: &Path, force: bool) -> Result<(), String> {
        let mount = self.find(mount_point).ok_or_else(|| {
            format!("{}: no volume of ours is mounted there", mount_point.display())
        })?;
        self.front.detach(&mount.mount_point, force)?;
        let patient = !force && lock(&mount.state).status.as_ref().is_some_and(|s| !s.read_only);
        self.wait_for_end(&mount, if patient { CLOSE_WAIT } else { END_WAIT })?;
        match lock(&mount.state).ended.clone().flatten() {
            // Who forces it does so because of the worker.
            Some(why) if !force => Err(format!("{}: {why}", mount_point.display())),
            _ => Ok(()),
        }
    }

    fn wait_for_end(&self, mount: &Arc<Mount>, wait: Duration) -> Result<(), String> {
        let until = Instant::now() + wait;
        let mut mounts = lock(&self.mounts);
        while mounts.values().any(|other| Arc::ptr_eq(other, mount)) {
            let Some(left) = until.checked_duration_since(Instant::now()) else {
                return Err(format!(
                    "{} is unmounted, but its worker still runs: files are open there",
                    mount.mount_point.display()
                ));
            };
            mounts =
                self.ended.wait_timeout(mounts, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    fn find(&self, mount_point: &Path) -> Option<Arc<Mount>> {
        lock(&self.mounts).values().find(|mount| mount.mount_point == mount_point).cloned()
    }

    /// Everything that is mounted, with numbers as fresh as the workers give them.
    pub fn status(&self) -> Status {
        let mounts: Vec<Arc<Mount>> = lock(&self.mounts).values().cloned().collect();
        for mount in &mounts {
            let asks = lock(&mount.state).asks.clone();
            let (done, wait) = channel();
            if asks.is_some_and(|asks| asks.send(Ask::Refresh(done)).is_ok()) {
                // The end is dropped when the numbers are in: that is the answer.
                let _ = wait.recv_timeout(STATUS_WAIT);
            }
        }
        let mounts = mounts.iter().filter_map(|mount| lock(&mount.state).status.clone()).collect();
        let lost = lock(&self.lost).clone();
        Status { manager_pid: Some(std::process::id()), mounts, lost }
    }

    /// Waits until nothing is mounted on `mount_point`; says why it ended, if not on request.
    pub fn wait(&self, mount_point: &Path) -> Option<String> {
        let mount = self.find(mount_point)?;
        let mut mounts = lock(&self.mounts);
        while mounts.values().any(|other| Arc::ptr_eq(other, &mount)) {
            mounts = self.ended.wait(mounts).unwrap_or_else(PoisonError::into_inner);
        }
        lock(&mount.state).ended.clone().flatten()
    }

    /// Waits until nothing has been mounted, and nobody has asked anything, for `idle`.
    pub fn wait_idle(&self, idle: Duration) {
        let mut mounts = lock(&self.mounts);
        loop {
            let busy = !mounts.is_empty() || self.clients.load(Ordering::Relaxed) > 0;
            if busy {
                mounts = self.ended.wait(mounts).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let (held, waited) =
                self.ended.wait_timeout(mounts, idle).unwrap_or_else(PoisonError::into_inner);
            mounts = held;
            if waited.timed_out() && mounts.is_empty() && self.clients.load(Ordering::Relaxed) == 0
            {
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
        let Err(in_use) = self.unmount(&mount.mount_point, false) else { return Ok(()) };
        if lock(&mount.state).ended.is_some() {
            return Err(in_use);
        }
        write_back(&mount.mount_point);
        self.front.detach(&mount.mount_point, true)?;
        let asks = lock(&mount.state).asks.clone();
        let (done, wait) = channel();
        if asks.is_some_and(|asks| asks.send(Ask::Close(done)).is_ok()) {
            // The end is dropped when it is done: that is the answer.
            let _ = wait.recv_timeout(CLOSE_WAIT);
        }
        Ok(())
    }
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

fn first_status(mount: &Mount, worker: &Worker) -> MountStatus {
    MountStatus {
        volume: mount.volume.clone(),
        mount_point: mount.mount_point.clone(),
        worker_pid: worker.pid(),
        state: "serving".into(),
        read_only: worker.read_only,
        sandbox: worker.confinement.clone(),
        memory_bytes: resident_bytes(worker.pid()),
        worker: None,
    }
}

fn said(path: &Path, errno: Errno) -> String {
    format!("{}: {}", path.display(), std::io::Error::from(errno))
}

/// Device and inode number of a volume, or the device's own number.
fn identity(volume: &Path) -> Result<(u64, u64), String> {
    let stat = rustix::fs::stat(volume).map_err(|errno| said(volume, errno))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => Ok((stat.st_rdev, u64::MAX)),
        FileType::RegularFile => Ok((stat.st_dev, stat.st_ino)),
        _ => Err(format!("{} is neither a file nor a block device", volume.display())),
    }
}

/// A volume that was opened and claimed.
struct Opened {
    /// For the worker: read-only.
    image: OwnedFd,
    /// For the disk service, if the volume may be written. It holds the claim then.
    disk: Option<OwnedFd>,
    /// Why it may not be, if that was wanted.
    note: Option<String>,
}

/// Opens and claims a volume for as long as the descriptors live.
fn open_volume(volume: &Path, read_only: bool) -> Result<Opened, String> {
    let is_device = identity(volume)?.1 == u64::MAX;
    let open = |flags: OFlags| {
        // O_EXCL on a device: refused while the kernel has it mounted.
        let exclusive = if is_device { OFlags::EXCL } else { OFlags::empty() };
        rustix::fs::open(volume, flags | exclusive | OFlags::CLOEXEC, rustix::fs::Mode::empty())
    };
    let mut note = None;
    if !read_only {
        match open(OFlags::RDWR) {
            Ok(disk) => {
                claim_alone(volume, &disk)?;
                let image = for_reading(&disk).map_err(|errno| said(volume, errno))?;
                return Ok(Opened { image, disk: Some(disk), note });
            }
            Err(errno @ (Errno::ACCESS | Errno::PERM | Errno::ROFS)) => {
                note = Some(format!("read-only: {}", said(volume, errno)));
            }
            Err(errno) => return Err(said(volume, errno)),
        }
    }
    let image = open(OFlags::RDONLY).map_err(|errno| said(volume, errno))?;
    claim_alone(volume, &image)?;
    Ok(Opened { image, disk: None, note })
}

fn claim_alone(volume: &Path, fd: &OwnedFd) -> Result<(), String> {
    claim(fd, Claim::Alone).map_err(|errno| match errno {
        Errno::WOULDBLOCK => format!("{} is in use by another mount or tool", volume.display()),
        other => said(volume, other),
    })
}

/// A second descriptor of the same file that cannot write, whatever its name leads to by
/// now.
fn for_reading(fd: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let same = format!("/proc/self/fd/{}", fd.as_raw_fd());
    rustix::fs::open(same, OFlags::RDONLY | OFlags::CLOEXEC, rustix::fs::Mode::empty())
}

fn check_mount_point(mount_point: &Path) -> Result<(), String> {
    let name = mount_point.display();
    // Asked first: a mount whose worker is gone does not answer `stat`.
    if is_mount_point(mount_point) {
        return Err(format!("{name} is already a mount point"));
    }
    let stat = rustix::fs::stat(mount_point).map_err(|errno| said(mount_point, errno))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => Ok(()),
        _ => Err(format!("{name} is not a directory")),
    }
}

/// Whether something is mounted exactly there, by the kernel's own table.
pub fn is_mount_point(path: &Path) -> bool {
    Directory::mount_points().iter().any(|mounted| mounted == path)
}

/// Resident memory of a process, in bytes; 0 when it is gone.
fn resident_bytes(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}
