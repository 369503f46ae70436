//! The status of this process, for `draconis status`.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use draconis_nbd::Export;
use draconis_service::client::RuntimeDir;
use draconis_service::export_status::{ExportProcess, ExportStatus, own_socket};
use draconis_service::sandbox::Confinement;
use draconis_types::ExportActivity;

use super::socket::{ListenAddress, Listener, SocketHalf};
use super::source::Source;

/// Time that `draconis status` has to read an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Binds the socket of this process; `None` if there is no place for it.
pub fn bind_socket() -> Option<Listener> {
    let path = RuntimeDir::open().and_then(|directory| own_socket(&directory));
    let bound = path.map_err(anyhow::Error::from);
    match bound.and_then(|path| Listener::bind(&ListenAddress::Unix(path))) {
        Ok(listener) => Some(listener),
        Err(error) => {
            log::warn!("draconis status will not list this export: {error:#}");
            None
        }
    }
}

/// Returns the path of a socket for the command of `--run`, which has no other.
pub fn private_socket() -> anyhow::Result<PathBuf> {
    let path =
        own_socket(&RuntimeDir::open()?).context("no place for a socket; --nbd names one")?;
    Ok(path.with_extension("nbd"))
}

/// Answers at the socket of this process.
pub struct StatusServer {
    pub listener: Listener,
    /// What does not change.
    about: ExportProcess,
}

/// Returns the state of NBD exports that have had no clients.
pub fn nbd_exports(
    exports: &[Export],
    sources: &[Source],
    uris: impl Fn(&str) -> Vec<String>,
) -> Vec<ExportStatus> {
    let exports = exports.iter().zip(sources).map(|(export, source)| ExportStatus {
        name: export.name().to_owned(),
        image: source.image.clone(),
        size_bytes: export.len_bytes(),
        read_only: export.is_read_only(),
        uris: uris(export.name()),
        ..ExportStatus::default()
    });
    exports.collect()
}

impl StatusServer {
    pub fn new(listener: Listener, exports: Vec<ExportStatus>, sandbox: Confinement) -> Self {
        let about = ExportProcess { pid: std::process::id(), exports, sandbox, why: None };
        Self { listener, about }
    }

    /// Answers a command that has connected, if any. `activities` are those of the exports.
    pub fn answer(&self, activities: impl Iterator<Item = ExportActivity>) {
        let Ok(Some(socket)) = self.listener.accept(Instant::now() + ANSWER_TIMEOUT) else {
            return;
        };
        let mut status = self.about.clone();
        for (activity, status) in activities.zip(&mut status.exports) {
            let ExportActivity { clients, requests, read_bytes, written_bytes, clones, last_error } =
                activity;
            (status.clients, status.requests) = (clients, requests);
            (status.read_bytes, status.written_bytes) = (read_bytes, written_bytes);
            (status.clones, status.last_error) = (clones, last_error);
        }
        let Ok(text) = serde_json::to_vec(&status) else { return };
        // Clients do not wait for a command that does not read.
        let answer = move || {
            let sent = SocketHalf(socket.clone()).write_all(&text);
            sent.unwrap_or_else(|error| log::debug!("the status was not sent: {error}"));
            socket.shut_down(rustix::net::Shutdown::Both);
        };
        if let Err(error) = std::thread::Builder::new().name("status".into()).spawn(answer) {
            log::warn!("no thread for the status: {error}");
        }
    }
}
