//! Mounting: registers the mount, starts a worker, attaches the mount point.

use draconis_types::lock::Mutex;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use draconis_types::path_bytes::ShowPath;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use super::supervision::WorkerSupervision;
use super::{FUSE_INIT_TIMEOUT, Keeper, Mount, MountPhase, MountState};
use crate::claimed_volume::{ClaimedVolume, VolumeGuards, open_backing_files};
use crate::connection::{self, NotificationRelays};
use crate::identity::{describe_errno, file_identity};
use crate::mount_table;
use crate::options::MountOptions;
use crate::protocol::{MountStatus, WorkerStatus, display_name};
use crate::remote_disk::RemoteCredentials;
use crate::sandbox::Confinement;
use crate::user_namespace;
use crate::worker_process::{StartError, Worker};

/// Note for mounts to which the kernel does not pass `sync`.
const NO_SYNC_NOTE: &str = "sync and syncfs do not reach this mount: the kernel passes them on \
                            to those alone that root makes of block devices. fsync does, and what \
                            changed is written after 200 ms of quiet";
/// Timeout for an ending mount to release its volume and directory.
const VOLUME_RELEASE_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout for the volume of a dead mount that is replaced: the kernel writes back what it holds for
/// a block device before it releases it.
const REPLACED_VOLUME_RELEASE_TIMEOUT: Duration = Duration::from_secs(20);

/// The directory that a volume is mounted on.
pub(super) struct MountTarget {
    pub(super) mount_point: PathBuf,
    /// Another name for mount(2): see [`Request::Mount`](crate::protocol::Request::Mount).
    pub(super) place: Option<PathBuf>,
}

/// Resources of a mount that outlive its workers.
pub(super) struct MountResources {
    pub(super) supervision: WorkerSupervision,
    /// Loop device and guard of the volume.
    pub(super) guards: VolumeGuards,
    /// The connection to the kernel.
    pub(super) fuse: OwnedFd,
    /// The threads that send the workers' notifications over it.
    pub(super) relays: NotificationRelays,
}

impl MountResources {
    /// Sends the connection to a worker that succeeds another.
    pub(super) fn send_connection(&self, worker: &Worker, mount: &Mount) {
        if let Err(error) = worker.send_connection(&self.fuse, &self.relays) {
            log::error!("{}: {error}", mount.mount_point.shown());
            // The worker would wait for ever. If it is dead already, its death is handled
            // elsewhere.
            worker.kill();
        }
    }
}

impl Keeper {
    /// Mounts `volume` on `target` and returns notes for the user. With `replace`, clears a
    /// dead mount of ours first.
    pub(super) fn mount(
        self: &Arc<Self>,
        file: PathBuf,
        disk: Option<String>,
        target: MountTarget,
        options: MountOptions,
        replace: bool,
        means: Option<&RemoteCredentials>,
    ) -> Result<Vec<String>, String> {
        let MountTarget { mount_point, place } = target;
        let place = place.unwrap_or_else(|| mount_point.clone());
        let identity = file_identity(&file)?;
        let volume = display_name(&file, disk.as_deref());
        let status = initial_status(&volume, &mount_point, &options);
        let (phase, device, asks, worker) = (MountPhase::Starting, None, None, None);
        let state =
            MountState { phase, device, events: asks, worker, is_final_worker: false, status };
        let state = Mutex::new(state);
        let mount = Mount { volume, file, disk, identity, mount_point, place, options, state };
        let mount = Arc::new(mount);
        self.register_mount(&mount)?;
        let cleared = if replace { self.clear_dead_mount(&mount.mount_point) } else { Ok(()) };
        let wait = if replace { REPLACED_VOLUME_RELEASE_TIMEOUT } else { VOLUME_RELEASE_TIMEOUT };
        let started = cleared
            .and_then(|()| check_mount_point(&mount.mount_point, &mount.place))
            .and_then(|()| self.claim_volume(&mount, means, wait))
            .and_then(|claimed| {
                Ok((claimed, open_backing_files(&mount.file, &mount.options, mount.identity)?))
            })
            .and_then(|(claimed, behind)| self.start_mount(&mount, claimed, behind));
        if started.is_err() {
            mount.state.lock().phase = MountPhase::Ended { why: None, dead: false };
            self.notify_waiters();
        }
        started
    }

    /// Opens the volume exclusively: no other mount and no tool can use it then.
    fn claim_volume(
        &self,
        mount: &Mount,
        means: Option<&RemoteCredentials>,
        wait: Duration,
    ) -> Result<ClaimedVolume, String> {
        let Mount { file, disk, options, .. } = mount;
        let Some(disk) = disk else {
            return ClaimedVolume::open(file, options.read_only, wait);
        };
        let socket = self.listener.local_addr().map_err(|error| error.to_string())?;
        // The directory `stores` is beside the directory of the keepers' sockets.
        let run = socket.as_pathname().and_then(Path::parent).and_then(Path::parent);
        let stores = run.ok_or("a keeper is started by the manager")?.join("stores");
        ClaimedVolume::open_in_store(&stores, file, disk, options, means)
    }

    /// Makes `mount` the mount of this keeper.
    pub(super) fn register_mount(&self, mount: &Arc<Mount>) -> Result<(), String> {
        let mut current = self.mount.lock();
        if current.is_some() {
            return Err("a keeper has one mount".into());
        }
        *current = Some(mount.clone());
        self.changed.notify_all();
        Ok(())
    }

    /// Detaches a dead mount of ours whose keeper is gone or serves another manager.
    fn clear_dead_mount(&self, mount_point: &Path) -> Result<(), String> {
        match mount_table::find_mount_at(mount_point) {
            Some(entry)
                if entry.is_draconis()
                    && entry.probe_server() == mount_table::ServerState::Dead =>
            {
                let detached = self.mounter.detach(mount_point, true);
                detached.map_err(|why| why.message(mount_point))
            }
            _ => Ok(()),
        }
    }

    fn start_mount(
        self: &Arc<Self>,
        mount: &Arc<Mount>,
        claimed: ClaimedVolume,
        behind: Vec<OwnedFd>,
    ) -> Result<Vec<String>, String> {
        let ClaimedVolume { source, note, guards: mut keep } = claimed;
        let read_only = source.is_read_only();
        // A worker receives descriptors instead of file names.
        let none = MountOptions { backing: vec![], parts: vec![], ..mount.options.clone() };
        let options = MountOptions { read_only, ..none };
        let describe = |error| match error {
            StartError::Refused(why) => format!("{}: {why}", mount.volume.shown()),
            other => other.to_string(),
        };
        let device = connection::open_for_rings(&options)?;
        let lives = WorkerSupervision::new(source, behind, device, options.clone())
            .map_err(StartError::Spawn);
        let mut lives = lives.map_err(describe)?;
        let begun = match lives.start_successor(read_only) {
            Ok(worker) => {
                let device = lives.fuse_device();
                self.attach_and_serve(mount, worker, &mut keep, device, &options)
            }
            Err(why) => Err(describe(why)),
        };
        let (worker, fuse, relays, told) = match begun {
            Ok(begun) => begun,
            Err(why) => {
                // The caller may want to use the volume at once.
                if let Some(left) = lives.release_source() {
                    log::error!("{left}");
                }
                return Err(why);
            }
        };
        let mut notes: Vec<String> = note.into_iter().collect();
        notes.extend(told.notes);
        {
            let status = &mut mount.state.lock().status;
            status.sandbox = told.sandbox;
            // A user who chose it knows.
            if status.misses_syncs && mount.options.block_device != Some(false) {
                notes.push(NO_SYNC_NOTE.to_owned());
            }
        }
        self.mounter.set_read_ahead(&mount.mount_point);
        self.spawn_supervisor(
            mount,
            MountResources { supervision: lives, guards: keep, fuse, relays },
            worker,
        );
        log::info!(
            "{} is mounted on {}, served by process {}",
            mount.volume.shown(),
            mount.mount_point.shown(),
            mount.state.lock().status.worker_pid
        );
        Ok(notes)
    }

    /// Attaches the mount point and has the first worker serve it. Returns the worker with its
    /// connection and status.
    fn attach_and_serve(
        &self,
        mount: &Mount,
        mut worker: Worker,
        keep: &mut VolumeGuards,
        connection: Option<&OwnedFd>,
        options: &MountOptions,
    ) -> Result<(Worker, OwnedFd, NotificationRelays, WorkerStatus), String> {
        let options = MountOptions { read_only: worker.read_only, ..options.clone() };
        let fuse = self.attach_mount_point(mount, keep, connection, &options)?;
        let entry = mount_table::find_mount_at(&mount.mount_point);
        let hears_of_syncs = entry.as_ref().is_some_and(mount_table::MountEntry::receives_syncs);
        {
            let mut state = mount.state.lock();
            state.device = entry.map(|entry| entry.device);
            state.status.misses_syncs = !options.read_only && !hears_of_syncs;
        }
        let relays = NotificationRelays::default();
        let given = worker
            .send_connection(&fuse, &relays)
            .map_err(|error| format!("the worker died before it served: {error}"));
        match given.and_then(|()| wait_until_served(&mut worker)) {
            Ok(told) => Ok((worker, fuse, relays, told)),
            Err(why) => {
                worker.kill();
                self.detach_unserved(mount);
                Err(why)
            }
        }
    }

    /// Supervises `worker`, which has its connection, in a thread until the mount ends.
    pub(super) fn spawn_supervisor(
        self: &Arc<Self>,
        mount: &Arc<Mount>,
        mut held: MountResources,
        mut worker: Worker,
    ) {
        let (asks, asked) = channel();
        mount.state.lock().events = Some(asks.clone());
        mount.set_worker(&mut worker, &asks);
        self.notify_waiters();
        let (keeper, mount) = (self.clone(), mount.clone());
        std::thread::spawn(move || {
            // The volume is released after this returns.
            let why = keeper.supervise_mount(&mount, worker, &mut held, (&asks, &asked));
            let MountResources { supervision: lives, guards: keep, fuse, relays } = held;
            drop(keep);
            // The kernel has given entries of a ring requests that nothing answers any more. Only
            // an abort ends them, and must not wait for the ring to be torn down.
            let has_rings = lives.fuse_device().is_some();
            if has_rings && mount.is_in_place() {
                abort_connection(&mount.mount_point);
            }
            let left = lives.release_source();
            // Closing the keeper's descriptor of the connection ends the waits of clients.
            drop(fuse);
            if relays.pause_notifications().is_none() && mount.is_in_place() {
                // A relay thread that waits for a reply holds the connection open, and no reply
                // will come.
                abort_connection(&mount.mount_point);
            }
            keeper.mark_ended(&mount, why.or(left));
        });
    }

    /// Attaches a mount. A writable one gets a block device as its source if possible, because only
    /// then does the kernel pass `sync` on.
    fn attach_mount_point(
        &self,
        mount: &Mount,
        keep: &mut VolumeGuards,
        connection: Option<&OwnedFd>,
        options: &MountOptions,
    ) -> Result<OwnedFd, String> {
        let Mount { place, volume, .. } = mount;
        let attach =
            |device: Option<&Path>| self.mounter.attach(place, volume, device, connection, options);
        // The kernel mounts block devices for no other root.
        let is_root = user_namespace::is_host_root();
        if options.block_device == Some(true) && !is_root {
            return Err("mount option 'fuseblk' is for root only; leave it out".into());
        }
        let may = is_root && options.source.is_none();
        if options.read_only || !options.block_device.unwrap_or(may) {
            return attach(None);
        }
        // A disk in a store has no file of its own.
        let ready = if mount.disk.is_some() { keep.create_memfd(volume) } else { Ok(()) };
        let attached = ready
            .and_then(|()| keep.attach_block_device(volume))
            .and_then(|source| attach(Some(&source.path)));
        attached.or_else(|why| {
            if options.block_device == Some(true) {
                return Err(format!("mount option 'fuseblk' cannot be had: {why}"));
            }
            log::info!("{}: not mounted as a block device: {why}", volume.shown());
            if mount.disk.is_none() {
                let guarded = keep.reacquire_guard(volume, VOLUME_RELEASE_TIMEOUT);
                guarded.map_err(|busy| format!("{busy} (the kernel did not mount it: {why})"))?;
            }
            attach(None)
        })
    }
}

pub(crate) fn dead_mount_message(mount_point: &Path, volume: &Path) -> String {
    let (at, volume) = (mount_point.shown(), volume.shown());
    format!(
        "{at} has a dead mount of {volume} on it: clear it with draconis umount, or mount with \
         --replace"
    )
}

/// Aborts the connection of a mount; the mount stays in place.
fn abort_connection(mount_point: &Path) {
    // The kernel would also unmount what is not in use. This descriptor is a use that sends no
    // request.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let used = rustix::fs::open(mount_point, flags, Mode::empty());
    if let Err(errno) = used {
        return log::error!("{}", describe_errno(mount_point, errno));
    }
    match rustix::mount::unmount(mount_point, UnmountFlags::FORCE) {
        Ok(()) | Err(Errno::BUSY) => {}
        Err(errno) => log::error!("{}", describe_errno(mount_point, errno)),
    }
}

/// Waits for FUSE_INIT, by which the kernel sets the mount up. Before it, the kernel's own settings
/// would overwrite those of [`Mounter::set_read_ahead`](crate::mounter::Mounter::set_read_ahead).
fn wait_until_served(worker: &mut Worker) -> Result<WorkerStatus, String> {
    let until = Instant::now() + FUSE_INIT_TIMEOUT;
    loop {
        match worker.status(until) {
            Ok(told) if told.requests > 0 => return Ok(told),
            Ok(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
            Ok(_) => return Err("the kernel did not begin to use the mount".into()),
            Err(fault) => return Err(format!("the worker was lost before it served: {fault}")),
        }
    }
}

fn initial_status(volume: &Path, mount_point: &Path, options: &MountOptions) -> MountStatus {
    MountStatus {
        volume: volume.to_path_buf(),
        mount_point: mount_point.to_path_buf(),
        worker_pid: 0,
        keeper_pid: std::process::id(),
        restarts: 0,
        resends: connection::kernel_can_resend(),
        state: "starting".into(),
        why: None,
        copies: vec![],
        read_only: options.read_only,
        sandbox: Confinement::default(),
        memory_bytes: 0,
        disk: None,
        misses_syncs: false,
        worker: None,
    }
}

fn check_mount_point(mount_point: &Path, place: &Path) -> Result<(), String> {
    let name = mount_point.shown();
    // Checked first: a mount whose worker is gone does not answer `stat`.
    match mount_table::find_mount_at(mount_point) {
        Some(entry)
            if entry.is_draconis() && entry.probe_server() == mount_table::ServerState::Dead =>
        {
            return Err(dead_mount_message(mount_point, &entry.volume()));
        }
        // The mount goes on top.
        Some(entry) if entry.is_automount_point() => {}
        Some(_) => return Err(format!("{name} is already a mount point")),
        None => {}
    }
    let stat = rustix::fs::stat(place).map_err(|errno| describe_errno(mount_point, errno))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => Ok(()),
        _ => Err(format!("{name} is not a directory")),
    }
}
