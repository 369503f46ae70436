//! Upgrade: a keeper replaces itself by another program (`exec`) while its mount is in use.
//!
//! ```text
//!   worker ends ── state and descriptors into a socket ── exec ──▶ received from the socket
//!       └── as after a death: the oplog stays                     successor ◀──┘
//! ```
//! Law 1: before that, the other program is asked whether it understands the handover.
//! Law 2: nothing is given up until it runs: if it cannot be started, this program continues.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use draconis_exchange::contract::{Contract, disk};
use draconis_exchange::descriptors;
use draconis_types::lock::Mutex;
use draconis_types::path_bytes::ShowPath;
use rustix::net::RecvFlags;
use serde::{Deserialize, Serialize};

use super::mounting::MountResources;
use super::supervision::{SupervisionState, WorkerSupervision};
use super::{Keeper, Mount, MountPhase, MountState, SupervisorEvent};
use crate::claimed_volume::{VolumeGuards, VolumeSource};
use crate::connection::NotificationRelays;
use crate::mounter::Mounter;
use crate::oplog;
use crate::options::MountOptions;
use crate::path_members;
use crate::protocol::{self, MountStatus, Reply};
use crate::store_keeper::{StoreDiskHandle, StoreDiskState};

/// Version of the handover format.
const HANDOVER_VERSION: u64 = 1;
/// Timeout for the other program's reply about its formats.
const FORMATS_REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest handover message, in bytes.
const MAX_HANDOVER_BYTES: usize = 160 << 10;
/// Descriptors that are always present: the socket, the oplog, the volume, the connection.
const REQUIRED_FDS: usize = 4;

/// Versions of the formats that a program understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandoverFormats {
    /// The handover between keepers.
    handover: u64,
    /// The oplog.
    oplog: u64,
    /// The disk contract, which a worker speaks to a store process that keeps running.
    #[serde(default)]
    disk: u64,
    /// True if the handover may include backing files. The name in messages is that of older
    /// programs.
    #[serde(default, rename = "behind")]
    has_backing_files: bool,
}

/// Features that a mount requires of the next program.
#[derive(Clone, Copy)]
struct RequiredFeatures {
    in_store: bool,
    has_backing_files: bool,
}

impl HandoverFormats {
    fn supports(self, ours: Self, wants: RequiredFeatures) -> bool {
        // Without a store, the next program has both ends of the disk contract.
        Self { disk: ours.disk, has_backing_files: ours.has_backing_files, ..self } == ours
            && (self.disk == ours.disk || !wants.in_store)
            && (self.has_backing_files || !wants.has_backing_files)
    }
}

/// Returns the formats of this program.
pub fn supported_formats() -> HandoverFormats {
    let disk = disk::Disk::FINGERPRINT;
    HandoverFormats {
        handover: HANDOVER_VERSION,
        oplog: oplog::OPLOG_FORMAT,
        disk,
        has_backing_files: true,
    }
}

/// An upgrade to `program`, which then replies to `client`.
pub(super) struct UpgradeRequest {
    program: PathBuf,
    client: UnixStream,
}

#[derive(Serialize, Deserialize)]
struct HandoverState {
    #[serde(flatten, with = "path_members::volume")]
    volume: PathBuf,
    #[serde(flatten, with = "path_members::file")]
    file: PathBuf,
    disk: Option<String>,
    identity: (u64, u64),
    #[serde(flatten, with = "path_members::mount_point")]
    mount_point: PathBuf,
    options: MountOptions,
    device: Option<String>,
    status: MountStatus,
    past: SupervisionState,
    /// State of a disk in a store; its connection takes the place of the volume.
    store: Option<StoreDiskState>,
    /// Which optional descriptors are present: the disk, the backing file of the loop device, the
    /// guard of a block device, the client. Backing files of the image follow them.
    has: [bool; 4],
}

impl Keeper {
    /// Upgrades to `program`, which replies to `client`. Returns only on failure, with the reason.
    pub(super) fn upgrade(&self, mount: &Mount, program: PathBuf, client: &UnixStream) -> String {
        let at = mount.mount_point.shown();
        if mount.phase() != MountPhase::Serving {
            return format!("{at}: nothing serves it");
        }
        if !mount.options.restart {
            return format!("{at}: it is mounted with norestart; unmount it and mount it again");
        }
        let MountOptions { backing, parts, .. } = &mount.options;
        let has_backing_files = !backing.is_empty() || !parts.is_empty();
        let wants = RequiredFeatures { in_store: mount.disk.is_some(), has_backing_files };
        if let Err(why) = check_program(&program, wants) {
            return format!("{at}: {why}");
        }
        let client = match client.try_clone() {
            Ok(client) => client,
            Err(error) => return format!("{at}: {error}"),
        };
        let (done, failed) = channel();
        let asks = mount.state.lock().events.clone();
        let request = UpgradeRequest { program, client };
        let asked =
            asks.is_some_and(|asks| asks.send(SupervisorEvent::Upgrade(request, done)).is_ok());
        let why = failed.recv().ok().filter(|_| asked);
        let why = why.unwrap_or_else(|| "it has ended meanwhile".into());
        format!("{at}: {why}")
    }

    /// Executes another program after the worker has ended. Returns only on failure, with the
    /// reason.
    pub(super) fn exec_program(
        &self,
        mount: &Mount,
        held: &MountResources,
        request: &UpgradeRequest,
    ) -> String {
        let MountResources { supervision, guards, fuse, .. } = held;
        let [backing, guard] = guards.fds();
        let client = request.client.as_fd();
        let (volume, disk, store) = match supervision.source() {
            VolumeSource::File { image, disk } => {
                (image.as_fd(), disk.as_ref().map(AsFd::as_fd), None)
            }
            VolumeSource::Store(disk) => (disk.connection(), None, Some(disk.state())),
        };
        let optional_fds = [disk, backing, guard, Some(client)];
        let state = {
            let state = mount.state.lock();
            HandoverState {
                volume: mount.volume.clone(),
                file: mount.file.clone(),
                disk: mount.disk.clone(),
                identity: mount.identity,
                mount_point: mount.mount_point.clone(),
                options: mount.options.clone(),
                device: state.device.clone(),
                status: state.status.clone(),
                past: supervision.state(),
                store,
                has: optional_fds.map(|fd| fd.is_some()),
            }
        };
        let fixed = [self.listener.as_fd(), supervision.oplog(), volume, fuse.as_fd()];
        let fds = fixed.into_iter().chain(optional_fds.into_iter().flatten());
        let fds: Vec<BorrowedFd<'_>> =
            fds.chain(supervision.backing_files().iter().map(AsFd::as_fd)).collect();
        let put = || {
            let text = serde_json::to_vec(&state)?;
            if text.len() > MAX_HANDOVER_BYTES {
                return Err(std::io::Error::from(std::io::ErrorKind::FileTooLarge));
            }
            let (ours, theirs) = UnixDatagram::pair()?;
            descriptors::send_with_fds(&ours, &text, &fds)?;
            std::io::Result::Ok(theirs)
        };
        let theirs = match put() {
            Ok(theirs) => theirs,
            Err(error) => return format!("it cannot be handed over: {error}"),
        };
        let mut command = Command::new(&request.program);
        command.args(["keeper", "--resume"]).stdin(Stdio::from(OwnedFd::from(theirs)));
        let error = command.exec();
        format!("{} cannot be started: {error}", request.program.shown())
    }

    /// Restores the keeper from the handover that the previous program left in `socket`.
    ///
    /// # Errors
    /// A message; the mount is lost then.
    pub fn resume(front: Box<dyn Mounter>, socket: OwnedFd) -> Result<Arc<Self>, String> {
        let mut text = vec![0; MAX_HANDOVER_BYTES];
        let got = descriptors::receive_with_fds(&socket, &mut text, RecvFlags::DONTWAIT)
            .map_err(|errno| format!("nothing was handed over: {errno}"))?;
        let text = text.get(..got.len).filter(|_| got.is_complete && got.fds.len() >= REQUIRED_FDS);
        let text = text.ok_or("what was handed over is not whole")?;
        let state: HandoverState = serde_json::from_slice(text)
            .map_err(|error| format!("what was handed over makes no sense: {error}"))?;
        let mut fds = got.fds.into_iter();
        let [Some(listener), Some(log), Some(image), Some(fuse)] =
            [(); REQUIRED_FDS].map(|()| fds.next())
        else {
            return Err("descriptors are missing".into());
        };
        let [disk, backing, guard, client] =
            state.has.map(|is_there| if is_there { fds.next() } else { None });
        let source = match state.store {
            None => VolumeSource::File { image, disk },
            Some(known) => VolumeSource::Store(StoreDiskHandle::from_handover(image, known)),
        };
        let supervision = WorkerSupervision::from_handover(
            source,
            fds.collect(),
            oplog::map_existing(log)?,
            state.past,
        );
        let guards = VolumeGuards::from_fds(backing, guard);
        let mount = Arc::new(Mount {
            volume: state.volume,
            file: state.file,
            disk: state.disk,
            identity: state.identity,
            place: state.mount_point.clone(),
            mount_point: state.mount_point,
            options: state.options,
            state: Mutex::new(MountState {
                phase: MountPhase::Serving,
                device: state.device,
                events: None,
                worker: None,
                is_final_worker: false,
                status: state.status,
            }),
        });
        let keeper = Self::new(front, UnixListener::from(listener));
        keeper.register_mount(&mount)?;
        let reply = match keeper.resume_serving(
            &mount,
            MountResources { supervision, guards, fuse, relays: NotificationRelays::default() },
        ) {
            Ok(()) => Reply::Done,
            Err(why) => Reply::Failed { why },
        };
        if let Some(client) = client {
            // Fails only if the client is gone.
            let _ = protocol::send_line(&UnixStream::from(client), &reply);
        }
        Ok(keeper)
    }

    /// Starts the successor of a mount that has no worker at the moment.
    fn resume_serving(
        self: &Arc<Self>,
        mount: &Arc<Mount>,
        mut held: MountResources,
    ) -> Result<(), String> {
        let at = mount.mount_point.shown();
        let read_only = mount.state.lock().status.read_only;
        match held.supervision.start_successor(read_only) {
            Ok(worker) => {
                held.send_connection(&worker, mount);
                self.spawn_supervisor(mount, held, worker);
                log::info!("{at}: goes on, served by process {}", mount.worker_pid());
                Ok(())
            }
            Err(error) => {
                drop(held);
                let why = format!("no worker of the new program could take over: {error}");
                self.mark_ended(mount, Some(why.clone()));
                Err(format!("{at}: {why}"))
            }
        }
    }
}

/// Checks that `program` understands the handover and has the required features.
fn check_program(program: &Path, wants: RequiredFeatures) -> Result<(), String> {
    let name = program.shown();
    let mut child = Command::new(program)
        .args(["keeper", "--formats"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("{name} cannot be started: {error}"))?;
    let (done, said) = channel();
    let out = child.stdout.take();
    std::thread::spawn(move || {
        let read = out.and_then(|out| serde_json::from_reader::<_, HandoverFormats>(out).ok());
        // After the timeout nobody receives it.
        let _ = done.send(read);
    });
    let said = said.recv_timeout(FORMATS_REPLY_TIMEOUT).ok().flatten();
    // The reply has arrived, or the timeout has passed.
    let _ = child.kill();
    let _ = child.wait();
    match said {
        Some(theirs) if theirs.supports(supported_formats(), wants) => Ok(()),
        Some(_) => Err(format!(
            "{name} does not understand the log that it would take over: unmount, and mount with \
             it again"
        )),
        None => Err(format!("{name} is no draconis that can take over a mount")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_program_takes_over_mount_without_new_features() {
        let ours = supported_formats();
        let text = serde_json::to_string(&ours).unwrap();
        let older = text.replace(",\"behind\":true", "");
        assert!(older != text);
        let older: HandoverFormats = serde_json::from_str(&older).unwrap();
        let wants = |in_store, has_backing_files| RequiredFeatures { in_store, has_backing_files };
        assert!(older.supports(ours, wants(true, false)));
        assert!(!older.supports(ours, wants(false, true)));
        assert!(ours.supports(older, wants(true, true)));
        let other = HandoverFormats { disk: 0, ..ours };
        assert!(!other.supports(ours, wants(true, false)));
        assert!(other.supports(ours, wants(false, true)));
    }
}
