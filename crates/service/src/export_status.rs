//! Status of exports: each exporting process answers at a socket of its own.
//!
//! ```text
//!   draconis export ── binds RUNTIME/exports/PID.sock ─ confines itself ─ answers each connection with JSON
//!                      may serve the command of --run at RUNTIME/exports/PID.nbd
//!   draconis status ── connects to all of them ── removes the sockets of dead processes
//! ```
//!
//! Law: status is never a reason for an export to fail.

use std::io::{ErrorKind, Read};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::client::RuntimeDir;
pub use crate::protocol::{ExportProcess, ExportStatus};

/// Timeout of an exporting process.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum length of a reply, in bytes.
const MAX_REPLY_BYTES: u64 = 16 << 20;

/// Creates the directory of the sockets, and returns the path of this process's socket.
///
/// # Errors
/// The system's error.
pub fn own_socket(directory: &RuntimeDir) -> std::io::Result<PathBuf> {
    let sockets = directory.export_sockets();
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&sockets)?;
    Ok(sockets.join(format!("{}.sock", std::process::id())))
}

/// Returns the state of all exporting processes, in order of their ids.
///
/// # Errors
/// The error of reading the directory.
pub fn list_exports(directory: &RuntimeDir) -> std::io::Result<Vec<ExportProcess>> {
    let names = match std::fs::read_dir(directory.export_sockets()) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(vec![]),
        names => names?,
    };
    let mut processes = vec![];
    for name in names {
        let path = name?.path();
        if path.extension() != Some("sock".as_ref()) {
            continue;
        }
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        let Some(pid) = stem.and_then(|stem| stem.parse().ok()) else { continue };
        processes.extend(query(&path, pid));
    }
    processes.sort_by_key(|process| process.pid);
    Ok(processes)
}

/// Asks a process; `None` if it is dead.
fn query(path: &Path, pid: u32) -> Option<ExportProcess> {
    let answer = || {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        let mut text = vec![];
        stream.take(MAX_REPLY_BYTES).read_to_end(&mut text)?;
        Ok(serde_json::from_slice(&text)?)
    };
    match answer() {
        Ok(process) => Some(process),
        Err(error) => {
            let error: std::io::Error = error;
            if error.kind() == ErrorKind::ConnectionRefused {
                // A confined process cannot remove its socket at its end.
                let _ = std::fs::remove_file(path);
                let _ = std::fs::remove_file(path.with_extension("nbd"));
                return None;
            }
            let why = Some(format!("it does not answer: {}", crate::error_text(&error)));
            Some(ExportProcess { pid, why, ..ExportProcess::default() })
        }
    }
}
