//! Unmounting and remounting read-only, on request.

use std::path::Path;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use draconis_types::path_bytes::ShowPath;
use rustix::fs::OFlags;

use super::{FUSE_INIT_TIMEOUT, Keeper, Mount, MountPhase, SupervisorEvent, VOLUME_CLOSE_TIMEOUT};
use crate::identity::describe_errno;
use crate::loop_device;
use crate::mount_table;
use crate::mount_users::find_mount_users;
use crate::mounter::DetachError;
use crate::options::MountOptions;
use crate::worker_process::ControlRequest;

/// Timeout for a worker's reply when its mount is detached by force.
const FORCED_DETACH_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout for invisible users of a mount to end, and its poll interval.
const BUSY_MOUNT_TIMEOUT: Duration = Duration::from_millis(500);
const BUSY_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// A process that uses a mount for this long is a real user. A shorter use may be a process between
/// fork and exec, which holds the open files of another thread of its parent.
const MIN_REAL_USE_TIME: Duration = Duration::from_millis(100);
/// Timeout for the kernel's write-back if the mount is shut down while files are open.
const SHUTDOWN_SYNC_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout for an unmounted worker to exit.
const WORKER_EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for the kernel to free the loop device that was a mount's source.
const LOOP_RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// Poll interval for copies of a detached mount.
const COPY_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// A copy that is there for this long is a lasting one. A shorter one is that of a process that has
/// just made a mount namespace, or is ending.
const PASSING_COPY_TIME: Duration = Duration::from_millis(500);

/// What became of an unmounted mount.
pub(super) enum Unmounted {
    /// Nothing serves it any more.
    Gone,
    /// It was dead in place.
    WasDead {
        /// Cause of its death.
        why: String,
    },
    /// It goes on in copies; all changes are durable.
    Copied {
        /// Their holders.
        copies: Vec<String>,
    },
}

impl Keeper {
    /// Detaches a mount point. Waits a moment for users that are invisible, or gone at the next
    /// poll.
    pub(super) fn detach(&self, mount_point: &Path, force: bool) -> Result<(), DetachError> {
        let until = Instant::now() + BUSY_MOUNT_TIMEOUT;
        let (mut held, mut since) = (vec![], Instant::now());
        loop {
            let detached = self.mounter.detach(mount_point, force);
            if detached != Err(DetachError::Busy) || Instant::now() > until {
                return detached;
            }
            let Some(mount) = mount_table::find_mount_at(mount_point) else { return detached };
            let seen = find_mount_users(&mount);
            held.retain(|holder| seen.contains(holder));
            if held.is_empty() {
                (held, since) = (seen, Instant::now());
            } else if since.elapsed() >= MIN_REAL_USE_TIME {
                return detached;
            }
            std::thread::sleep(BUSY_POLL_INTERVAL);
        }
    }

    /// Unmounts, and waits until the worker is gone and the volume released, or all changes are
    /// durable and only copies of the mount are left.
    pub(super) fn unmount(&self, mount: &Mount, force: bool) -> Result<Unmounted, String> {
        self.wait_while(mount, Some(FUSE_INIT_TIMEOUT), |mount| {
            mount.phase() == MountPhase::Starting
        });
        let mount_point = &mount.mount_point;
        if force && mount.is_served() && !mount.is_responding(FORCED_DETACH_TIMEOUT) {
            // The kernel would also wait for the worker's reply to FUSE_DESTROY.
            log::error!("{}: its worker does not answer, and is killed", mount_point.shown());
            mount.kill_worker();
            self.wait_while(mount, Some(WORKER_EXIT_TIMEOUT), Mount::is_served);
        }
        // The number of a loop device of ours is that of the mount. A volume that is a device itself
        // stays.
        let device = mount.state.lock().device.clone().filter(|_| mount.identity.1 != u64::MAX);
        if mount.options.write_back && !force && mount.is_served() {
            // Where copies stay, the kernel writes nothing back.
            sync_mount(mount_point);
        }
        // A dead mount has nothing to lose.
        let detached = self.detach(mount_point, force || mount.is_dead());
        match detached {
            // The mount died, or another program detached it meanwhile.
            Err(_) if mount.is_ending() => {}
            detached => detached.map_err(|why| why.message(mount_point))?,
        }
        if let MountPhase::Ended { why, dead: true } = mount.phase() {
            // A mount that takes its place may have the same device number.
            mount.state.lock().phase = MountPhase::Ended { why: why.clone(), dead: false };
            self.notify_waiters();
            return Ok(why.map_or(Unmounted::Gone, |why| Unmounted::WasDead { why }));
        }
        let patient = !force && !mount.state.lock().status.read_only;
        let wait = if patient { VOLUME_CLOSE_TIMEOUT } else { WORKER_EXIT_TIMEOUT };
        if let Some(copies) = self.wait_for_copies(mount, Instant::now() + wait) {
            let synced = self.control(mount, ControlRequest::Sync);
            // The last copy may have ended meanwhile.
            if mount.is_served() {
                synced.map_err(|why| format!("{}: {why}", mount_point.shown()))?;
                return Ok(Unmounted::Copied { copies });
            }
        }
        if mount.is_served() {
            return Err(format!(
                "{} is unmounted, but its worker still runs: files are open there",
                mount_point.shown()
            ));
        }
        if !force && let Some(device) = device {
            // The next command finds the image in use while the loop device exists.
            loop_device::wait_until_free(&device, LOOP_RELEASE_TIMEOUT);
        }
        match mount.phase() {
            // With `force`, the error of the worker is expected.
            MountPhase::Ended { why: Some(why), .. } if !force => {
                Err(format!("{}: {why}", mount_point.shown()))
            }
            _ => Ok(Unmounted::Gone),
        }
    }

    /// Waits until nothing serves a detached mount any more. Returns early if copies of it stay that
    /// are no passing ones, with their holders.
    fn wait_for_copies(&self, mount: &Mount, until: Instant) -> Option<Vec<String>> {
        let mut lasting: Vec<(String, Instant)> = vec![];
        loop {
            if self.wait_while(mount, Some(COPY_POLL_INTERVAL), Mount::is_served) {
                return None;
            }
            let copies = mount.copies();
            lasting.retain(|(copy, _)| copies.contains(copy));
            if lasting.iter().any(|(_, since)| since.elapsed() >= PASSING_COPY_TIME) {
                return Some(copies);
            }
            if Instant::now() >= until {
                return None;
            }
            for copy in copies {
                if !lasting.iter().any(|(known, _)| *known == copy) {
                    lasting.push((copy, Instant::now()));
                }
            }
        }
    }

    /// Has the worker carry out `request`.
    fn control(&self, mount: &Mount, request: ControlRequest) -> Result<(), String> {
        let asks = mount.state.lock().events.clone();
        let (done, wait) = channel();
        let sent =
            asks.is_some_and(|asks| asks.send(SupervisorEvent::Control(request, done)).is_ok());
        let answer = wait.recv_timeout(VOLUME_CLOSE_TIMEOUT).ok().filter(|_| sent);
        answer.unwrap_or_else(|| Err("its worker does not answer".into()))
    }

    /// Makes a mount read-only, after writing all changes and marking the volume clean; or writable
    /// again.
    pub(super) fn remount(&self, mount: &Mount, read_only: bool) -> Result<(), String> {
        if mount.phase() != MountPhase::Serving {
            return Err("nothing serves it; clear it with draconis umount".into());
        }
        if mount.state.lock().status.read_only == read_only {
            return Ok(());
        }
        if !rustix::process::geteuid().is_root() {
            return Err("only root may remount; unmount it and mount it again".into());
        }
        let options = MountOptions { read_only, ..mount.options.clone() };
        let kernel = || {
            let done = self.mounter.remount(&mount.mount_point, &mount.volume, &options);
            done.map_err(|why| match why {
                DetachError::Busy => "it is busy: files are open for writing there".to_string(),
                DetachError::Failed(why) => why,
            })
        };
        let request = if read_only { ControlRequest::ReadOnly } else { ControlRequest::Writable };
        let worker = || self.control(mount, request);
        // In either order, the kernel never accepts changes that the worker would refuse.
        if read_only {
            kernel()?;
            worker()?;
        } else {
            worker()?;
            kernel()?;
        }
        mount.state.lock().status.read_only = read_only;
        Ok(())
    }

    /// Waits while `condition` holds, at most for `wait`. Returns true if it ended.
    pub(super) fn wait_while(
        &self,
        mount: &Mount,
        wait: Option<Duration>,
        condition: impl Fn(&Mount) -> bool,
    ) -> bool {
        let until = wait.map(|wait| Instant::now() + wait);
        let mut held = self.mount.lock();
        while condition(mount) {
            match until {
                None => self.changed.wait(&mut held),
                Some(until) => {
                    let Some(left) = until.checked_duration_since(Instant::now()) else {
                        return false;
                    };
                    self.changed.wait_for(&mut held, left);
                }
            }
        }
        true
    }

    /// Ends the mount, if there is one, in use or not. Changes made so far are written to the
    /// volume; later changes are refused.
    pub fn shut_down(&self) {
        let ended = self.active_mount().map_or(Ok(()), |mount| self.shut_down_mount(&mount));
        if let Err(why) = ended {
            log::error!("{why}");
        }
    }

    pub(super) fn shut_down_mount(&self, mount: &Mount) -> Result<(), String> {
        match self.unmount(mount, false) {
            // The worker has all that copies wrote.
            Ok(Unmounted::Copied { .. }) => {}
            Ok(_) => return Ok(()),
            Err(in_use) if !mount.is_served() => return Err(in_use),
            Err(_) => {
                sync_mount(&mount.mount_point);
                let detached = self.mounter.detach(&mount.mount_point, true);
                detached.map_err(|why| why.message(&mount.mount_point))?;
            }
        }
        let asks = mount.state.lock().events.clone();
        let (done, wait) = channel();
        if asks.is_some_and(|asks| asks.send(SupervisorEvent::Close(done)).is_ok()) {
            // The supervisor drops the sender when it is done: that is the reply.
            let _ = wait.recv_timeout(VOLUME_CLOSE_TIMEOUT);
        }
        Ok(())
    }
}

/// Has the kernel write back the dirty pages of a mount. A hung worker may block the thread, which
/// is then left behind.
fn sync_mount(mount_point: &Path) {
    let path = mount_point.to_path_buf();
    let (done, wait) = channel();
    std::thread::spawn(move || {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&path, flags, rustix::fs::Mode::empty());
        let synced = opened.and_then(rustix::fs::syncfs);
        // Fails if the waiter has given up.
        let _ = done.send(synced);
    });
    match wait.recv_timeout(SHUTDOWN_SYNC_TIMEOUT) {
        Ok(Ok(())) => {}
        Ok(Err(errno)) => log::error!("{}", describe_errno(mount_point, errno)),
        Err(_) => log::error!("{}: it does not answer", mount_point.shown()),
    }
}
