//! Connects the keeper of a mount to a store keeper: to the running one, or it claims the store and
//! starts one.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use draconis_device::{LockMode, try_lock_file};
use draconis_types::path_bytes::ShowPath;

use super::{
    STORE_CLOSE_TIMEOUT, StartMessage, StoreReply, StoreRequest, io_error_message, receive_message,
    send_message, store_socket, url_socket, wait_for_exit,
};
use crate::options::MountOptions;
use crate::remote_disk::{
    RemoteCredentials, RemoteDiskRequest, open_lock_file, owner_id_of, parse_url,
};

/// Timeout for a store to be released whose last mount is just ending.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);
/// Retry interval meanwhile.
const CONNECT_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// The socket of a store keeper, and its start parameters.
pub(super) struct ConnectPlan {
    socket: PathBuf,
    /// The store, or the lock file of its URL; to be claimed.
    claim: File,
    start: StartMessage,
    environment: Option<BTreeMap<String, String>>,
}

impl ConnectPlan {
    /// Plans for the store in a file. Also returns why it is read-only, if that was not requested.
    pub(super) fn for_file(
        sockets: &Path,
        store: &Path,
        options: &MountOptions,
    ) -> Result<(Self, Option<String>), String> {
        let shown = store.shown();
        let socket = store_socket(sockets, store)?;
        let writable = File::options().read(true).write(true).open(store);
        let note = match &writable {
            Err(error) if !options.read_only => {
                Some(format!("read-only: {shown}: {}", io_error_message(error)))
            }
            _ => None,
        };
        let file = writable.or_else(|_| File::open(store));
        let claim = file.map_err(|error| format!("{shown}: {}", io_error_message(&error)))?;
        let start = StartMessage::File { force_raid_member: options.force_raid_member };
        Ok((Self { socket, claim, start, environment: None }, note))
    }

    /// Plans for the store at a URL. A read-only mount uses the store keeper of a local writer, if
    /// one runs. Otherwise it has a store keeper of its own, which fences no writer.
    pub(super) fn for_url(
        sockets: &Path,
        address: &str,
        read_only: bool,
        means: Option<&RemoteCredentials>,
    ) -> Result<Self, String> {
        let means = means.ok_or_else(|| format!("{address}: it is not said how to open it"))?;
        let writers = store_socket(sockets, Path::new(address))?;
        let is_read = read_only && UnixStream::connect(&writers).is_err();
        let name = if is_read { format!("{address} to read") } else { address.to_owned() };
        let claim = open_lock_file(sockets, &name).map_err(|error| {
            format!("{address}: no claim can be made: {}", io_error_message(&error))
        })?;
        let socket = if is_read { url_socket(sockets, &name) } else { writers };
        let start = StartMessage::Elsewhere(RemoteDiskRequest {
            address: address.to_owned(),
            read_only: is_read,
            stays: true,
            seat: owner_id_of(sockets),
            settings: means.settings.clone(),
        });
        Ok(Self { socket, claim, start, environment: Some(means.environment.clone()) })
    }

    /// Connects to the store keeper, or starts one; checks that the store is open.
    pub(super) fn find_or_start(self, store: &Path) -> Result<UnixStream, String> {
        let shown = store.shown();
        let until = Instant::now() + RELEASE_TIMEOUT;
        loop {
            let found = match UnixStream::connect(&self.socket) {
                Err(_) if try_lock_file(&self.claim, LockMode::Exclusive).is_ok() => {
                    // The new store keeper has the claim from now on.
                    let started = self.spawn_store_keeper().map_err(|error| {
                        format!(
                            "cannot start a process for the store: {}",
                            io_error_message(&error)
                        )
                    });
                    Some(started?)
                }
                found => found.ok(),
            };
            // A store keeper that is just ending does not answer.
            if let Some(found) = found
                && send_message(&found, &StoreRequest::Hello, &[]).is_ok()
                && let Ok((answer, _)) = receive_message(&found)
            {
                let why = match answer {
                    StoreReply::Number(_) => return Ok(found),
                    StoreReply::Refused(why) => why,
                };
                // The caller may want to use the store at once.
                wait_for_exit(&found, Some(STORE_CLOSE_TIMEOUT));
                // Messages about remote stores contain the URL.
                let is_named = parse_url(store).is_some();
                return Err(if is_named { why } else { format!("{shown}: {why}") });
            }
            if Instant::now() > until {
                return Err(format!("{shown} is in use by another mount or tool"));
            }
            std::thread::sleep(CONNECT_RETRY_INTERVAL);
        }
    }

    /// Starts a store keeper for the claimed store; returns a connection to it.
    fn spawn_store_keeper(&self) -> std::io::Result<UnixStream> {
        if let Some(dir) = self.socket.parent() {
            std::fs::create_dir_all(dir)?;
        }
        // The previous holder of the claim is gone.
        let _ = std::fs::remove_file(&self.socket);
        let listener = UnixListener::bind(&self.socket)?;
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = Command::new("/proc/self/exe");
        if let Some(environment) = &self.environment {
            command.env_clear().envs(environment);
        }
        let mut child = command
            .arg("store-keeper")
            .args(crate::verbosity::verbosity_argument())
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()?;
        std::thread::spawn(move || child.wait());
        send_message(&ours, &self.start, &[listener.as_fd(), self.claim.as_fd()])?;
        UnixStream::connect(&self.socket)
    }
}
