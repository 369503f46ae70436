//! What the command line, the manager and its keepers say to each other: one line of JSON each
//! way, over a Unix socket that only its owner can reach.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::options::MountOptions;
use crate::remote_disk::RemoteCredentials;
use crate::sandbox::Confinement;

/// Longest line either side takes, in bytes.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// A question to the manager, who passes most of them on to a keeper.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Mount a volume.
    Mount {
        /// The file or device, as an absolute path; or an address of something elsewhere.
        volume: PathBuf,
        /// If that is a store: which of its disks.
        #[serde(default)]
        disk: Option<String>,
        /// The directory, as an absolute path.
        mount_point: PathBuf,
        /// How.
        options: Box<MountOptions>,
        /// A dead mount of ours on that directory is cleared first.
        #[serde(default)]
        replace: bool,
        /// If the volume is an address: what opening it takes.
        #[serde(default)]
        means: Option<Box<RemoteCredentials>>,
    },
    /// Let a mount be written, or not.
    Remount {
        /// The directory, as an absolute path.
        mount_point: PathBuf,
        /// What it is to be.
        read_only: bool,
    },
    /// Unmount a directory.
    Unmount {
        /// The directory, as an absolute path.
        mount_point: PathBuf,
        /// Even if it is in use.
        force: bool,
    },
    /// Tell what is mounted.
    Status,
    /// Answer when nothing is mounted there any more.
    Wait {
        /// The directory, as an absolute path.
        mount_point: PathBuf,
    },
    /// Go on by another program: a keeper by itself, a manager has all of its keepers do so.
    Upgrade {
        /// The program, as an absolute path.
        program: PathBuf,
    },
    /// End the manager, and no mount.
    Retire,
    /// To a keeper: end the mount, in use or not, with everything brought home.
    End,
    /// To a keeper: tell what is kept, and when it has ended.
    Watch,
}

/// The manager's answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// It is done.
    Done,
    /// A dead mount is gone.
    Cleared {
        /// What had happened to it.
        why: String,
    },
    /// This manager has mounted nothing there.
    NotMounted,
    /// A volume is mounted.
    Mounted {
        /// What should be known about it, a line each.
        notes: Vec<String>,
    },
    /// What is mounted.
    Status(Status),
    /// Mounts that go on by another program, and those that do not.
    Upgraded {
        /// In order of mounting.
        mounts: Vec<Upgraded>,
    },
    /// What a keeper keeps.
    Kept(Kept),
    /// A mount has ended.
    Ended {
        /// Why, if not because it was asked for.
        why: Option<String>,
    },
    /// It is not done.
    Failed {
        /// Why, as a sentence without the program's name.
        why: String,
    },
}

/// Everything the manager knows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The manager's process, if one runs.
    pub manager_pid: Option<u32>,
    /// What is mounted, in order of mounting; dead mounts that are still in place included.
    pub mounts: Vec<MountStatus>,
    /// Mounts that ended without having been asked to and are gone, the latest last.
    #[serde(default)]
    pub lost: Vec<LostMount>,
    /// Mounts that outlived their manager: they are in place, and answer nothing.
    #[serde(default)]
    pub dead: Vec<LostMount>,
}

/// A mount that ended without having been asked to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LostMount {
    /// The file or device.
    pub volume: PathBuf,
    /// The directory.
    pub mount_point: PathBuf,
    /// What happened.
    pub why: String,
}

/// What became of a mount that was to go on by another program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Upgraded {
    /// The directory.
    pub mount_point: PathBuf,
    /// Why it does not, if so.
    pub why: Option<String>,
}

/// What a keeper keeps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kept {
    /// What is mounted, as a user calls it.
    pub volume: PathBuf,
    /// If it is in a store: which of its disks.
    #[serde(default)]
    pub disk: Option<String>,
    /// Device and inode number of the file: two paths may lead to one.
    pub identity: (u64, u64),
    /// The directory.
    pub mount_point: PathBuf,
}

/// One mount.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MountStatus {
    /// Whether `sync` and `syncfs` do not reach it.
    #[serde(default)]
    pub misses_syncs: bool,
    /// The file or device.
    pub volume: PathBuf,
    /// The directory.
    pub mount_point: PathBuf,
    /// The process that serves it.
    pub worker_pid: u32,
    /// The process that keeps what outlives that one.
    #[serde(default)]
    pub keeper_pid: u32,
    /// How often it died and another took over.
    #[serde(default)]
    pub restarts: u64,
    /// Whether calls that were under way then went on; else, before Linux 6.9, they got an error.
    #[serde(default)]
    pub resends: bool,
    /// `starting`, `serving`, `not answering` or `dead`.
    pub state: String,
    /// Why it is dead, if it is.
    #[serde(default)]
    pub why: Option<String>,
    /// Whether it cannot be written.
    pub read_only: bool,
    /// What keeps the worker in.
    pub sandbox: Confinement,
    /// Resident memory of the worker, in bytes.
    pub memory_bytes: u64,
    /// What ended writing below, if something did: a full file system for instance.
    #[serde(default)]
    pub disk: Option<String>,
    /// What the worker tells; absent while it does not answer.
    pub worker: Option<WorkerStatus>,
}

/// What a worker tells of itself.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// Requests of the kernel that were answered.
    pub requests: u64,
    /// How many of each kind were read, by the kernel's names in small letters.
    #[serde(default)]
    pub by_opcode: BTreeMap<String, u64>,
    /// Age of the request it is busy with, in milliseconds; 0 when idle.
    pub busy_ms: u64,
    /// Reads of the device.
    pub device_reads: u64,
    /// Bytes read from the device.
    pub device_read_bytes: u64,
    /// The caches.
    pub caches: Vec<CacheStatus>,
    /// What keeps the worker in.
    pub sandbox: Confinement,
    /// What the user should know about the volume.
    pub notes: Vec<String>,
    /// What stopped writing, if something did: the volume has been read-only since.
    #[serde(default)]
    pub failure: Option<String>,
    /// Requests that were answered with an error because workers died over them.
    #[serde(default)]
    pub refused: Vec<String>,
}

/// One cache.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
pub struct CacheStatus {
    /// `inode`, `block_map` or `data`.
    pub name: String,
    /// What it holds: entries, or bytes for `data`.
    pub used: u64,
    /// What it may hold.
    pub capacity: u64,
    /// Questions it could answer.
    pub hits: u64,
    /// Questions it could not.
    pub misses: u64,
    /// `hits` as a part of both, 0 to 1.
    pub hit_rate: f64,
}

/// What a user calls a disk in a store: STORE#NAME; the file itself, if it is no store.
pub(crate) fn volume_name(file: &Path, disk: Option<&str>) -> PathBuf {
    let Some(disk) = disk else { return file.to_path_buf() };
    let mut name = file.as_os_str().to_os_string();
    name.push("#");
    name.push(disk);
    name.into()
}

/// Whether the other end of a socket belongs to this user. Sockets lie in a directory that only
/// their owner can enter; this is the second lock.
pub(crate) fn is_same_user(client: &UnixStream) -> bool {
    let peer = rustix::net::sockopt::socket_peercred(client);
    peer.is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

/// Sends one line.
///
/// # Errors
/// What the socket says.
pub fn send<T: Serialize>(mut socket: &UnixStream, what: &T) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// Receives one line.
///
/// # Errors
/// What the socket says; `InvalidData` for anything that is not such a line.
pub fn receive<T: for<'de> Deserialize<'de>>(socket: &UnixStream) -> std::io::Result<T> {
    LineReader::new(socket).receive()
}

/// Receives one line after the other.
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
