//! What the command line and the manager say to each other: one line of JSON each way,
//! over a Unix socket that only its owner can reach.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::options::MountOptions;
use crate::sandbox::Confinement;

/// Longest line either side takes, in bytes.
const LINE_MAX_BYTES: u64 = 1 << 20;

/// A question to the manager.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Mount a volume.
    Mount {
        /// The file or device, as an absolute path.
        volume: PathBuf,
        /// The directory, as an absolute path.
        mount_point: PathBuf,
        /// How.
        options: MountOptions,
        /// A dead mount of ours on that directory is cleared first.
        #[serde(default)]
        replace: bool,
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

/// One mount.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MountStatus {
    /// The file or device.
    pub volume: PathBuf,
    /// The directory.
    pub mount_point: PathBuf,
    /// The process that serves it.
    pub worker_pid: u32,
    /// How often it died and another took over.
    #[serde(default)]
    pub restarts: u64,
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
    let mut line = vec![];
    BufReader::new(socket.take(LINE_MAX_BYTES)).read_until(b'\n', &mut line)?;
    if line.last() != Some(&b'\n') {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_slice(&line)?)
}
