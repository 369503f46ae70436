//! How a mount ends, or turns read-only, because it was asked to.

use std::path::Path;
use std::sync::PoisonError;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

use super::{CLOSE_TIMEOUT, INIT_TIMEOUT, Keeper, Mount, MountPhase, SupervisorEvent, lock};
use crate::claimed_volume::describe_errno;
use crate::loop_device;
use crate::mount_table;
use crate::mount_users::find_mount_users;
use crate::mounter::DetachError;
use crate::options::MountOptions;

/// How long a worker may take to answer when its mount is taken away by force.
const FORCE_WAIT: Duration = Duration::from_secs(2);
/// How long what uses a mount, and cannot be seen, may take to end; and how often that is
/// looked at.
const BUSY_WAIT: Duration = Duration::from_millis(500);
const BUSY_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// What is seen to use a mount for so long goes on: it was no process between its fork and its
/// exec, which has what another thread of its parent had open then.
const BUSY_CONFIRM_TIME: Duration = Duration::from_millis(100);
/// How long the kernel may take to write back what programs have changed, when it
/// is asked to end while files are open.
const SYNC_WAIT: Duration = Duration::from_secs(30);
/// How long an unmounted worker may take to end by itself.
const END_WAIT: Duration = Duration::from_secs(10);
/// How long the kernel may take to free the loop device that was a mount's source.
const RELEASE_WAIT: Duration = Duration::from_secs(2);

impl Keeper {
    /// Takes a mount point away, and waits a moment for users of it that are not to be seen, or
    /// are gone at the next look.
    pub(super) fn detach(&self, mount_point: &Path, force: bool) -> Result<(), DetachError> {
        let until = Instant::now() + BUSY_WAIT;
        let (mut held, mut since) = (vec![], Instant::now());
        loop {
            let detached = self.front.detach(mount_point, force);
            if detached != Err(DetachError::Busy) || Instant::now() > until {
                return detached;
            }
            let Some(mount) = mount_table::mount_at(mount_point) else { return detached };
            let seen = find_mount_users(&mount);
            held.retain(|holder| seen.contains(holder));
            if held.is_empty() {
                (held, since) = (seen, Instant::now());
            } else if since.elapsed() >= BUSY_CONFIRM_TIME {
                return detached;
            }
            std::thread::sleep(BUSY_POLL_INTERVAL);
        }
    }

    /// Unmounts, and waits until the worker is gone and the volume free. Of a mount that was
    /// dead it says what had happened.
    pub(super) fn unmount(&self, mount: &Mount, force: bool) -> Result<Option<String>, String> {
        self.wait_while(mount, Some(INIT_TIMEOUT), |mount| mount.phase() == MountPhase::Starting);
        let mount_point = &mount.mount_point;
        if force && mount.is_served() && !mount.is_responding(FORCE_WAIT) {
            // The kernel would wait for it, too, to tell it that the mount goes.
            log::error!("{}: its worker does not answer, and is killed", mount_point.display());
            mount.kill();
            self.wait_while(mount, Some(END_WAIT), Mount::is_served);
        }
        let source = mount_table::mount_at(mount_point).map(|entry| entry.source);
        // Of a dead mount there is nothing that could be lost, by any of its users.
        let detached = self.detach(mount_point, force || mount.is_dead());
        match detached {
            // It died, or was taken away by another, while we were at it.
            Err(_) if mount.is_ending() => {}
            detached => detached.map_err(|why| why.message(mount_point))?,
        }
        if !force && let Some(device) = source.filter(|source| *source != mount.volume) {
            // The next command finds the image in use as long as it is there.
            loop_device::wait_until_free(&device, RELEASE_WAIT);
        }
        if let MountPhase::Ended { why, dead: true } = mount.phase() {
            self.notify_waiters();
            return Ok(why);
        }
        let patient = !force && !lock(&mount.state).status.read_only;
        let wait = if patient { CLOSE_TIMEOUT } else { END_WAIT };
        if !self.wait_while(mount, Some(wait), Mount::is_served) {
            return Err(format!(
                "{} is unmounted, but its worker still runs: files are open there",
                mount_point.display()
            ));
        }
        match mount.phase() {
            // Who forces it does so because of the worker.
            MountPhase::Ended { why: Some(why), .. } if !force => {
                Err(format!("{}: {why}", mount_point.display()))
            }
            _ => Ok(None),
        }
    }

    /// Makes a mount read-only, with everything brought home and the volume marked as
    /// unmounted, or writable again.
    pub(super) fn remount(&self, mount: &Mount, read_only: bool) -> Result<(), String> {
        if mount.phase() != MountPhase::Serving {
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
                DetachError::Busy => "it is busy: files are open for writing there".to_string(),
                DetachError::Failed(why) => why,
            })
        };
        let worker = || {
            let asks = lock(&mount.state).events.clone();
            let (done, wait) = channel();
            let sent = asks
                .is_some_and(|asks| asks.send(SupervisorEvent::ReadOnly(read_only, done)).is_ok());
            let answer = wait.recv_timeout(CLOSE_TIMEOUT).ok().filter(|_| sent);
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

    /// Waits while something holds of `mount`, for so long at most; says whether that has
    /// ended.
    pub(super) fn wait_while(
        &self,
        mount: &Mount,
        wait: Option<Duration>,
        condition: impl Fn(&Mount) -> bool,
    ) -> bool {
        let until = wait.map(|wait| Instant::now() + wait);
        let mut held = lock(&self.mount);
        while condition(mount) {
            held = match until {
                None => self.changed.wait(held).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let Some(left) = until.checked_duration_since(Instant::now()) else {
                        return false;
                    };
                    self.changed.wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        true
    }

    /// Ends the mount, if there is one, in use or not. What programs have changed is brought
    /// home; what they change after that is refused.
    pub fn shut_down(&self) {
        let ended = self.current().map_or(Ok(()), |mount| self.shut_down_mount(&mount));
        if let Err(why) = ended {
            log::error!("{why}");
        }
    }

    pub(super) fn shut_down_mount(&self, mount: &Mount) -> Result<(), String> {
        let Err(in_use) = self.unmount(mount, false) else { return Ok(()) };
        if !mount.is_served() {
            return Err(in_use);
        }
        sync_mount(&mount.mount_point);
        let detached = self.front.detach(&mount.mount_point, true);
        detached.map_err(|why| why.message(&mount.mount_point))?;
        let asks = lock(&mount.state).events.clone();
        let (done, wait) = channel();
        if asks.is_some_and(|asks| asks.send(SupervisorEvent::Close(done)).is_ok()) {
            // The end is dropped when it is done: that is the answer.
            let _ = wait.recv_timeout(CLOSE_TIMEOUT);
        }
        Ok(())
    }
}

/// Has the kernel write back what it keeps of a mount. A worker that hangs may hang this,
/// too, and is then left behind.
fn sync_mount(mount_point: &Path) {
    let path = mount_point.to_path_buf();
    let (done, wait) = channel();
    std::thread::spawn(move || {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&path, flags, rustix::fs::Mode::empty());
        let synced = opened.and_then(rustix::fs::syncfs);
        // A waiter that has gone on does not hear this.
        let _ = done.send(synced);
    });
    match wait.recv_timeout(SYNC_WAIT) {
        Ok(Ok(())) => {}
        Ok(Err(errno)) => log::error!("{}", describe_errno(mount_point, errno)),
        Err(_) => log::error!("{}: it does not answer", mount_point.display()),
    }
}
