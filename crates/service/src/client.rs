//! Finds the manager, starts one if none runs, and sends it requests.
//!
//! Law: a request goes to the manager of the caller's mount namespace. Its socket is named after the
//! namespace. `manager.sock`, the socket of systemd and of older programs, is used if its listener
//! runs in this namespace.

use std::ffi::OsStr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use draconis_types::path_bytes::ShowPath;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::mount_namespace;
use crate::protocol::{self, MountStatus, Reply, Request, Status};
use crate::user_namespace;

/// Timeout for a manager to listen.
const MANAGER_START_TIMEOUT: Duration = Duration::from_secs(10);

/// The directory with the socket and the log file of a user's manager.
#[derive(Clone, Debug)]
pub struct RuntimeDir(PathBuf);

impl RuntimeDir {
    /// Opens the directory of the calling user: `$DRACONIS_RUNTIME_DIR`, else `/run/draconis` for
    /// root (in a user namespace if it may write `/run`), else `$XDG_RUNTIME_DIR/draconis`, else
    /// `/tmp/draconis-UID`.
    ///
    /// # Errors
    /// If it cannot be created, or belongs to another user.
    pub fn open() -> std::io::Result<Self> {
        let uid = rustix::process::geteuid();
        let can_write = |path| rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok();
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let path = match (set("DRACONIS_RUNTIME_DIR"), set("XDG_RUNTIME_DIR")) {
            (Some(own), _) => PathBuf::from(own),
            _ if uid.is_root() && (user_namespace::is_host_root() || can_write("/run")) => {
                PathBuf::from("/run/draconis")
            }
            (_, Some(run)) => Path::new(&run).join("draconis"),
            _ => PathBuf::from(format!("/tmp/draconis-{}", uid.as_raw())),
        };
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(|error| {
            let text = format!(
                "{}: cannot be made for the manager's socket: {}; DRACONIS_RUNTIME_DIR names another",
                path.shown(),
                crate::error_text(&error)
            );
            std::io::Error::new(error.kind(), text)
        })?;
        // The owner of the directory could answer our requests.
        let found = std::fs::symlink_metadata(&path)?;
        if !found.is_dir() || found.uid() != uid.as_raw() || found.mode() & 0o022 != 0 {
            let text = format!("{}: must be a directory that only you can write", path.shown());
            return Err(std::io::Error::new(std::io::ErrorKind::PermissionDenied, text));
        }
        Ok(Self(path))
    }

    /// Returns the socket path of the manager of the caller's mount namespace.
    fn manager_socket(&self) -> PathBuf {
        self.0.join(manager_socket_name())
    }

    fn keepers_dir(&self) -> PathBuf {
        self.0.join("keepers")
    }

    /// Returns the directory of the status sockets of exports.
    pub(crate) fn export_sockets(&self) -> PathBuf {
        self.0.join("exports")
    }

    /// Returns the directory of the store keepers' sockets.
    pub(crate) fn store_sockets(&self) -> PathBuf {
        self.0.join("stores")
    }

    /// Returns the socket path of a keeper.
    pub(crate) fn keeper_socket(&self, id: u64) -> PathBuf {
        self.keepers_dir().join(format!("{id}.sock"))
    }

    /// Returns the ids of all keepers whose sockets exist, in order of mounting.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn keeper_ids(&self) -> std::io::Result<Vec<u64>> {
        let names = match std::fs::read_dir(self.keepers_dir()) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
            names => names?,
        };
        let id = |name: &OsStr| name.to_str()?.strip_suffix(".sock")?.parse::<u64>().ok();
        let mut ids = vec![];
        for name in names {
            ids.extend(id(&name?.file_name()));
        }
        ids.sort_unstable();
        Ok(ids)
    }

    /// Binds the socket of a new keeper; returns it with an id that no keeper has, at least `from`.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn bind_keeper(&self, from: u64) -> std::io::Result<(u64, UnixListener)> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(self.keepers_dir())?;
        let mut id = self.keeper_ids()?.last().map_or(from, |last| from.max(last + 1));
        loop {
            match UnixListener::bind(self.keeper_socket(id)) {
                // Of a manager in another mount namespace.
                Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => id += 1,
                bound => return bound.map(|listener| (id, listener)),
            }
        }
    }

    /// Returns true if any keeper runs; the manager need not run.
    fn has_keepers(&self) -> bool {
        let ids = self.keeper_ids().unwrap_or_default();
        ids.into_iter().any(|id| UnixStream::connect(self.keeper_socket(id)).is_ok())
    }

    /// Returns the path of the log file of a manager in the background.
    pub fn log_file(&self) -> PathBuf {
        self.0.join("manager.log")
    }

    /// Connects to the manager of the caller's mount namespace, if one runs.
    pub fn connect(&self) -> Option<UnixStream> {
        let fixed = UnixStream::connect(self.0.join("manager.sock")).ok();
        fixed
            .filter(mount_namespace::is_listener_here)
            .or_else(|| UnixStream::connect(self.manager_socket()).ok())
    }

    /// Holds off managers that start or end, until the file is dropped.
    fn lock_managers(&self) -> std::io::Result<std::fs::File> {
        let guard = std::fs::File::create(self.0.join("manager.lock"))?;
        guard.lock()?;
        Ok(guard)
    }

    /// Removes the socket of this manager, which is about to end. The next one binds another.
    pub fn unbind(&self) {
        let is_own = |socket: &UnixStream| {
            let listener = rustix::net::sockopt::socket_peercred(socket);
            listener.is_ok_and(|listener| listener.pid == rustix::process::getpid())
        };
        // The runtime directory may be gone already.
        let Ok(_guard) = self.lock_managers() else { return };
        let socket = self.manager_socket();
        if UnixStream::connect(&socket).is_ok_and(|manager| is_own(&manager)) {
            let _ = std::fs::remove_file(socket);
        }
    }

    /// Binds the manager's socket; `None` if another manager answers there.
    ///
    /// # Errors
    /// The system's error.
    pub fn bind(&self) -> std::io::Result<Option<UnixListener>> {
        // Of managers that start at once one binds. The socket of a dead one is removed.
        let _guard = self.lock_managers()?;
        if self.connect().is_some() {
            return Ok(None);
        }
        let socket = self.manager_socket();
        match std::fs::remove_file(&socket) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        UnixListener::bind(socket).map(Some)
    }

    /// Connects to the manager; starts one in the background if none runs.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn connect_or_start(&self) -> std::io::Result<UnixStream> {
        if let Some(manager) = self.connect() {
            return Ok(manager);
        }
        let log = std::fs::File::options().create(true).append(true).open(self.log_file())?;
        Command::new("/proc/self/exe")
            .args(["serve", "--until-idle"])
            .args(crate::verbosity::verbosity_argument())
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            // Ctrl-C in a terminal must reach only the command.
            .process_group(0)
            .spawn()?;
        let until = Instant::now() + MANAGER_START_TIMEOUT;
        while Instant::now() < until {
            if let Some(manager) = self.connect() {
                return Ok(manager);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let text = format!("no manager came up; see {}", self.log_file().shown());
        Err(std::io::Error::new(std::io::ErrorKind::TimedOut, text))
    }
}

/// Returns the name, in the runtime directory, of the socket of the manager of the caller's mount
/// namespace.
pub fn manager_socket_name() -> String {
    format!("manager-{}.sock", mount_namespace::own_namespace())
}

/// Sends a request to a manager and receives its reply.
///
/// # Errors
/// The socket's error, for instance if the manager dies.
pub fn send_request(manager: &UnixStream, request: &Request) -> std::io::Result<Reply> {
    protocol::send_line(manager, request)?;
    protocol::receive_line(manager)
}

/// Maximum retries of a request whose manager ended before it replied. The bound protects against a
/// request that kills managers.
const MAX_RETRIES: usize = 10;

/// Sends a request to the manager, if one runs or something is mounted. A manager that is just
/// ending counts as not running.
///
/// # Errors
/// As for [`send_request`].
pub fn request_if_running(
    directory: &RuntimeDir,
    request: &Request,
) -> std::io::Result<Option<Reply>> {
    let mut tries = MAX_RETRIES;
    loop {
        let manager = match directory.connect() {
            Some(manager) => manager,
            None if directory.has_keepers() => directory.connect_or_start()?,
            None => return Ok(None),
        };
        match send_request(&manager, request) {
            Err(error) if is_disconnect(&error) && tries > 0 => tries -= 1,
            answer => return answer.map(Some),
        }
    }
}

/// Sends a request to the manager. Starts one if none runs, or if it ended before it replied.
///
/// # Errors
/// As for [`send_request`]; if none comes up.
pub fn request_or_start(directory: &RuntimeDir, request: &Request) -> std::io::Result<Reply> {
    let mut tries = MAX_RETRIES;
    loop {
        match send_request(&directory.connect_or_start()?, request) {
            // A request that only waits cannot kill managers.
            Err(error) if is_disconnect(&error) && matches!(request, Request::Wait { .. }) => {}
            Err(error) if is_disconnect(&error) && tries > 0 => tries -= 1,
            Ok(Reply::Failed { .. }) if tries < MAX_RETRIES && is_mounted(directory, request)? => {
                return Ok(Reply::Mounted { notes: vec![] });
            }
            answer => return answer,
        }
    }
}

/// Returns true if the mount that `request` asks for exists. A manager that ended before its reply
/// may have mounted it, and the next one refuses a second mount.
fn is_mounted(directory: &RuntimeDir, request: &Request) -> std::io::Result<bool> {
    let Request::Mount { volume, disk, mount_point, .. } = request else { return Ok(false) };
    let volume = protocol::display_name(volume, disk.as_deref());
    let until = Instant::now() + MANAGER_START_TIMEOUT;
    loop {
        let Reply::Status(status) = send_request(&directory.connect_or_start()?, &Request::Status)?
        else {
            return Ok(false);
        };
        let is_it = |it: &&MountStatus| (&it.volume, &it.mount_point) == (&volume, mount_point);
        match status.mounts.iter().find(is_it) {
            Some(it) if it.state == "starting" && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(10));
            }
            found => return Ok(found.is_some_and(|it| it.state == "serving")),
        }
    }
}

/// Ends the running manager, if any, but no mount. The next manager may be another program version.
///
/// # Errors
/// The socket's error; if the manager does not end.
pub fn retire_manager(directory: &RuntimeDir) -> std::io::Result<()> {
    let Some(manager) = directory.connect() else { return Ok(()) };
    let other = |what: String| Err(std::io::Error::other(what));
    let pid = match send_request(&manager, &Request::Status)? {
        Reply::Status(Status { manager_pid: Some(pid), .. }) => pid,
        reply => return other(format!("the manager answers {reply:?}")),
    };
    // Wait for its process: the next manager may answer at its address at once.
    let process = Pid::from_raw(pid as i32).map(|pid| pidfd_open(pid, PidfdFlags::empty()));
    let Some(Ok(process)) = process else { return Ok(()) };
    let asked = directory.connect().map(|manager| send_request(&manager, &Request::Retire));
    match asked {
        None | Some(Ok(Reply::Done)) => {}
        Some(Err(error)) if is_disconnect(&error) => {}
        Some(Err(error)) => return Err(error),
        Some(Ok(reply)) => return other(format!("the manager answers {reply:?}")),
    }
    let wait = Timespec { tv_sec: MANAGER_START_TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    match poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&wait))? {
        0 => other("the manager does not end".into()),
        _ => Ok(()),
    }
}

fn is_disconnect(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}
