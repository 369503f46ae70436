//! Protocol of the command line, the manager and its keepers: one line of JSON each way, over a
//! Unix socket that only its owner can reach.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::options::MountOptions;
use crate::path_members;
use crate::sandbox::Confinement;

/// Longest line that either side accepts, in bytes.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// A request to the manager, which forwards most of them to a keeper.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Mount a volume.
    Mount {
        /// The file or device, as an absolute path; or the URL of a remote disk.
        #[serde(flatten, with = "path_members::volume")]
        volume: PathBuf,
        /// Name of the disk, if the volume is a store.
        #[serde(default)]
        disk: Option<String>,
        /// The directory, as an absolute path.
        #[serde(flatten, with = "path_members::mount_point")]
        mount_point: PathBuf,
        /// Another name of the directory, for mount(2), if only the client may pass the automount
        /// point there: a descriptor of it in `/proc`.
        #[serde(flatten, with = "path_members::place")]
        place: Option<PathBuf>,
        /// Mount options.
        options: Box<MountOptions>,
        /// True if a dead mount of ours on that directory is cleared first.
        #[serde(default)]
        replace: bool,
        /// Settings and credentials, if the volume is a URL.
        #[serde(default)]
        means: Option<Box<RemoteCredentials>>,
    },
    /// Make a mount read-only or writable.
    Remount {
        /// The directory, as an absolute path.
        #[serde(flatten, with = "path_members::mount_point")]
        mount_point: PathBuf,
        /// The mode to change to.
        read_only: bool,
    },
    /// Unmount a directory.
    Unmount {
        /// The directory, as an absolute path.
        #[serde(flatten, with = "path_members::mount_point")]
        mount_point: PathBuf,
        /// True to unmount even if it is in use.
        force: bool,
    },
    /// Report all mounts.
    Status,
    /// Reply once nothing is mounted there any more.
    Wait {
        /// The directory, as an absolute path.
        #[serde(flatten, with = "path_members::mount_point")]
        mount_point: PathBuf,
    },
    /// Upgrade to another program: a keeper itself, a manager all of its keepers.
    Upgrade {
        /// The program, as an absolute path.
        #[serde(flatten, with = "path_members::program")]
        program: PathBuf,
    },
    /// End the manager, but no mount.
    Retire,
    /// To a keeper: write all changes to the volume and end the mount, in use or not.
    End,
    /// To a keeper: report its mount, and later the end of the mount.
    Watch,
}

/// A reply of the manager or a keeper.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Success.
    Done,
    /// A dead mount was cleared.
    Cleared {
        /// Cause of its death.
        why: String,
    },
    /// A mount is detached and its changes are durable, but copies of it go on.
    Copied {
        /// Their holders.
        copies: Vec<String>,
    },
    /// This manager has mounted nothing there.
    NotMounted,
    /// A volume is mounted.
    Mounted {
        /// Notes for the user, a line each.
        notes: Vec<String>,
    },
    /// The state of all mounts.
    Status(Status),
    /// Results of an upgrade, for each mount.
    Upgraded {
        /// In order of mounting.
        mounts: Vec<UpgradeResult>,
    },
    /// The mount of a keeper.
    Kept(KeeperMount),
    /// A mount has ended.
    Ended {
        /// The reason, unless the end was requested.
        why: Option<String>,
    },
    /// Failure.
    Failed {
        /// A message without the program's name.
        why: String,
    },
}

/// State of the manager and all mounts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Process id of the manager, if one runs.
    pub manager_pid: Option<u32>,
    /// The mounts in order of mounting, including dead mounts that are still in place.
    pub mounts: Vec<MountStatus>,
    /// Mounts that ended unrequested and are gone, the latest last.
    #[serde(default)]
    pub lost: Vec<LostMount>,
    /// Mounts in place without a manager or server.
    #[serde(default)]
    pub dead: Vec<LostMount>,
    /// Mounts in other mount namespaces, which the processes there see. This manager cannot change
    /// them.
    #[serde(default)]
    pub other_namespaces: Vec<MountStatus>,
    /// Processes that export disks. The manager does not know them.
    #[serde(default)]
    pub exports: Vec<ExportProcess>,
}

/// State of a process that exports disks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExportProcess {
    /// Process id.
    pub pid: u32,
    /// Its disks.
    pub exports: Vec<ExportStatus>,
    /// Its sandbox.
    pub sandbox: Confinement,
    /// Reason if it does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// State of an exported disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExportStatus {
    /// Name for clients; the default export may have none.
    pub name: String,
    /// The image.
    #[serde(flatten, with = "path_members::image")]
    pub image: PathBuf,
    /// Length of the disk, in bytes.
    pub size_bytes: u64,
    /// True if clients cannot write.
    pub read_only: bool,
    /// Addresses for NBD clients.
    pub uris: Vec<String>,
    /// Socket for a front end of vhost-user.
    #[serde(flatten, with = "path_members::vhost_user_socket")]
    pub vhost_user_socket: Option<PathBuf>,
    /// Clients that use the disk now.
    pub clients: u64,
    /// Requests since the start.
    pub requests: u64,
    /// Bytes that clients have read.
    pub read_bytes: u64,
    /// Bytes that clients have written.
    pub written_bytes: u64,
    /// Clones that clients use now.
    pub clones: Vec<String>,
    /// The latest error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// A mount that ended unrequested.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LostMount {
    /// The file or device.
    #[serde(flatten, with = "path_members::volume")]
    pub volume: PathBuf,
    /// The directory.
    #[serde(flatten, with = "path_members::mount_point")]
    pub mount_point: PathBuf,
    /// The reason.
    pub why: String,
}

/// Result of upgrading a mount to another program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UpgradeResult {
    /// The directory.
    #[serde(flatten, with = "path_members::mount_point")]
    pub mount_point: PathBuf,
    /// The reason of a failure.
    pub why: Option<String>,
}

/// The mount of a keeper.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeeperMount {
    /// The name of the volume for users.
    #[serde(flatten, with = "path_members::volume")]
    pub volume: PathBuf,
    /// Name of the disk, if the file is a store.
    #[serde(default)]
    pub disk: Option<String>,
    /// Device and inode number of the file: two paths may lead to one.
    pub identity: (u64, u64),
    /// The directory.
    #[serde(flatten, with = "path_members::mount_point")]
    pub mount_point: PathBuf,
    /// Number of the mount namespace of the keeper; older programs do not tell.
    #[serde(default)]
    pub namespace: Option<u64>,
}

/// Status of a mount.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MountStatus {
    /// True if `sync` and `syncfs` do not reach the mount.
    #[serde(default)]
    pub misses_syncs: bool,
    /// The file or device.
    #[serde(flatten, with = "path_members::volume")]
    pub volume: PathBuf,
    /// The directory.
    #[serde(flatten, with = "path_members::mount_point")]
    pub mount_point: PathBuf,
    /// Process id of its worker.
    pub worker_pid: u32,
    /// Process id of its keeper.
    #[serde(default)]
    pub keeper_pid: u32,
    /// How often the worker died and was restarted.
    #[serde(default)]
    pub restarts: u64,
    /// True if pending calls survived those restarts. Before Linux 6.9 they got an error instead.
    #[serde(default)]
    pub resends: bool,
    /// `starting`, `serving`, `not answering` or `dead`.
    pub state: String,
    /// Why it is dead.
    #[serde(default)]
    pub why: Option<String>,
    /// The holders of the copies by which it goes on, if it is unmounted here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<String>,
    /// True if the mount is read-only.
    pub read_only: bool,
    /// Confinement of the worker.
    pub sandbox: Confinement,
    /// Resident memory of the worker, in bytes.
    pub memory_bytes: u64,
    /// The error that ended writing of the underlying disk, for instance a full file system.
    #[serde(default)]
    pub disk: Option<String>,
    /// Status of the worker; absent while it does not answer.
    pub worker: Option<WorkerStatus>,
}

/// Status of a worker.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// Requests of the kernel that were answered.
    pub requests: u64,
    /// Number of requests read by opcode, with the kernel's names in lower case.
    #[serde(default)]
    pub by_opcode: BTreeMap<String, u64>,
    /// Age of the request in progress, in milliseconds; 0 when idle.
    pub busy_ms: u64,
    /// True if requests come over FUSE's ring.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub uring: bool,
    /// Reads of the device.
    pub device_reads: u64,
    /// Bytes read from the device.
    pub device_read_bytes: u64,
    /// The caches.
    pub caches: Vec<CacheStatus>,
    /// Confinement of the worker.
    pub sandbox: Confinement,
    /// Notes for the user about the volume.
    pub notes: Vec<String>,
    /// The error that stopped writing; the volume has been read-only since.
    #[serde(default)]
    pub failure: Option<String>,
    /// Quarantined requests, answered with an error because they had killed workers.
    #[serde(default)]
    pub refused: Vec<String>,
}

/// Figures of one cache.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
pub struct CacheStatus {
    /// `inode`, `block_map` or `data`.
    pub name: String,
    /// Current contents: entries, or bytes for `data`.
    pub used: u64,
    /// Maximum of `used`.
    pub capacity: u64,
    /// Lookups that were answered from the cache.
    pub hits: u64,
    /// Lookups that were not.
    pub misses: u64,
    /// Share of `hits` in all lookups, 0 to 1.
    pub hit_rate: f64,
}

/// Returns the user's name for a disk in a store, STORE#NAME; the file itself if it is no store.
pub(crate) fn display_name(file: &Path, disk: Option<&str>) -> PathBuf {
    let Some(disk) = disk else { return file.to_path_buf() };
    let mut name = file.as_os_str().to_os_string();
    name.push("#");
    name.push(disk);
    name.into()
}

/// Returns true if the peer of a socket is this user. Sockets are in a directory that only their
/// owner can enter; this is a second check.
pub(crate) fn is_same_user(client: &UnixStream) -> bool {
    let peer = rustix::net::sockopt::socket_peercred(client);
    peer.is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

/// Sends one line.
///
/// # Errors
/// The socket's error.
pub fn send_line<T: Serialize>(mut socket: &UnixStream, what: &T) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// Receives one line.
///
/// # Errors
/// The socket's error; `InvalidData` if the line is not valid JSON of this type.
pub fn receive_line<T: for<'de> Deserialize<'de>>(socket: &UnixStream) -> std::io::Result<T> {
    LineReader::new(socket).receive()
}

/// Receives lines, one after the other.
pub(crate) struct LineReader<'s>(BufReader<&'s UnixStream>);

impl<'s> LineReader<'s> {
    pub(crate) fn new(socket: &'s UnixStream) -> Self {
        Self(BufReader::new(socket))
    }

    pub(crate) fn receive<T: for<'de> Deserialize<'de>>(&mut self) -> std::io::Result<T> {
        let mut line = vec![];
        self.0.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line)?;
        if line.last() != Some(&b'\n') {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_slice(&line)?)
    }
}

/// Settings and credentials that the client passes for mounting a remote disk.
#[derive(Clone, Serialize, Deserialize)]
pub struct RemoteCredentials {
    /// Settings of the bucket client, opaque to the service.
    pub settings: String,
    /// The environment, which contains the credentials.
    pub environment: BTreeMap<String, String>,
}

impl std::fmt::Debug for RemoteCredentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Means").field("settings", &self.settings).finish_non_exhaustive()
    }
}
