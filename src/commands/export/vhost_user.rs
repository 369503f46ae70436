//! `draconis export --vhost-user`: serves one image to one front end after the other.
//!
//! Law 1: a front end can end this process by truncating memory that it shares. So the process has one
//! image and no other clients.
//! Law 2: a machine goes on with the disk that it has used, or is refused. A clone that is not kept
//! has an identity that no other process gives.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, ensure};
use draconis_service::export_status::ExportStatus;
use draconis_types::ExportActivity;
use draconis_types::path_bytes::ShowPath;
use draconis_vhost_user::{Device, Resources, serve};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags};

use super::clones::CloneUse;
use super::socket::{ListenAddress, Listener};
use super::source::{CloneNames, Source, UnreadSources};
use super::status::{self, StatusServer};
use super::{
    ACCEPT_PAUSE, Arguments, DRAIN_TIMEOUT, ExportJson, ExportsJson, WakePipe, Waker,
    start_command, wait_for_command,
};
use crate::image;
use crate::report;
use crate::text::{escape_control_chars, format_bytes};

pub fn run(arguments: &Arguments, socket: &PathBuf) -> anyhow::Result<ExitCode> {
    ensure!(arguments.images.len() == 1, "--vhost-user serves one image; start another command");
    let listener = Listener::bind(&ListenAddress::Unix(std::path::absolute(socket)?))?;
    let sources = UnreadSources::open(
        &arguments.images,
        &arguments.place,
        arguments.read_only,
        arguments.format,
        arguments.clone.clone(),
        CloneUse::ForProcess,
    )?;
    let resources = Arc::new(Resources::new()?);
    let wake = WakePipe::new()?;
    let child = arguments.run.as_deref().map(|command| start_command(command, &listener, None));
    let mut child = child.transpose()?;
    let status = status::bind_socket();
    // A no-op unless systemd started the command. Front ends can connect already.
    sd_notify::notify(&[sd_notify::NotifyState::Ready])?;
    let confinement = image::confine_export()?;

    let mut sources = sources.start()?;
    let Source { image, mut disk, session, survives_death, clones } =
        sources.pop().context("an image")?;
    let clone = clones.as_ref().map(|clones| clones.open_only()).transpose()?;
    let clone = clone.map(|(name, opened)| {
        disk = opened;
        name
    });
    let file_name = image.file_name().unwrap_or(image.as_os_str()).shown().to_string();
    let name = arguments.name.as_deref().unwrap_or(&file_name);
    let mut device = Device::new(disk, name);
    if !survives_death {
        device = device.with_durable_writes();
    }
    if arguments.clone == Some(CloneNames::Temporary) {
        device = device.with_disk_id(RandomState::new().build_hasher().finish().max(1));
    }
    let device = Arc::new(device);
    if device.properties().read_only && !arguments.read_only {
        report::print_notes(&[format!("read-only: {} can only be read", image.shown())]);
    }
    let export = ExportJson {
        name,
        image: image.clone(),
        size_bytes: device.properties().len_bytes,
        read_only: device.properties().read_only,
        clones: clone.clone(),
        uris: vec![],
        vhost_user_socket: Some(listener.unix_path()),
    };
    let status = status.map(|socket| {
        let exports = vec![ExportStatus {
            name: name.to_owned(),
            image: export.image.clone(),
            size_bytes: export.size_bytes,
            read_only: export.read_only,
            vhost_user_socket: export.vhost_user_socket.clone(),
            ..ExportStatus::default()
        }];
        StatusServer::new(socket, exports, confinement.clone())
    });
    if arguments.json {
        let exports = ExportsJson { exports: vec![export], confinement };
        report::print_line(serde_json::to_string(&exports)?)?;
    } else if child.is_none() {
        let mode = if export.read_only { ", read-only" } else { "" };
        let size = format_bytes(export.size_bytes);
        let image = escape_control_chars(export.image.as_os_str().as_bytes());
        let path = listener.unix_path();
        let path = escape_control_chars(path.as_os_str().as_bytes());
        let of = clone.iter().map(|name| format!(", clone {name}"));
        let of: String = of.map(|text| escape_control_chars(text.as_bytes())).collect();
        report::print_line(format_args!("{image} ({size}{mode}{of}): vhost-user {path}"))?;
    }

    let front_ends =
        FrontEnds { device: &device, resources: &resources, wake: &wake, status, clone };
    let code = front_ends.serve(
        &listener,
        child.as_ref().map(|(_, ended)| ended.as_fd()),
        arguments.once,
    )?;
    device.stop();
    let shown = || image.shown().to_string();
    device.flush().with_context(shown)?;
    session.map_or(Ok(()), |session| session.close_session()).with_context(shown)?;
    // A thread that has not ended may still use the clone; the next export removes it then.
    if let (Some(device), Some(clones)) = (Arc::into_inner(device), clones) {
        drop(device);
        clones.close().with_context(shown)?;
    }
    match (code, child.as_mut()) {
        (Some(code), _) => Ok(code),
        (None, Some((child, _))) => wait_for_command(child),
        (None, None) => Ok(ExitCode::SUCCESS),
    }
}

struct FrontEnds<'a> {
    device: &'a Arc<Device>,
    resources: &'a Arc<Resources>,
    wake: &'a WakePipe,
    status: Option<StatusServer>,
    /// Name of the clone that is served.
    clone: Option<String>,
}

impl FrontEnds<'_> {
    /// Serves front ends until a signal, the end of `child`, or that of the first one if `once`.
    /// Returns the exit status, or `None` if the child has ended.
    fn serve(
        &self,
        listener: &Listener,
        child: Option<std::os::fd::BorrowedFd<'_>>,
        once: bool,
    ) -> anyhow::Result<Option<ExitCode>> {
        let mut connection: Option<Connection> = None;
        loop {
            if let Some(ended) = connection.take_if(|it| it.has_ended()) {
                let _ = ended.thread.join();
                if once {
                    return Ok(Some(ExitCode::SUCCESS));
                }
            }
            let has_ended = match child {
                Some(child) => is_readable(&child)?,
                None => false,
            };
            let code = self.wake.exit_code(child.is_some());
            if has_ended || code.is_some() {
                if let Some(connection) = connection {
                    self.end(connection);
                }
                return Ok(code.filter(|_| !has_ended));
            }
            let mut waited = vec![PollFd::new(self.wake, PollFlags::IN)];
            waited.extend(child.iter().map(|child| PollFd::new(child, PollFlags::IN)));
            // Another front end waits until this one has gone.
            if connection.is_none() {
                waited.push(PollFd::new(listener, PollFlags::IN));
            }
            waited.extend(self.status.iter().map(|it| PollFd::new(&it.listener, PollFlags::IN)));
            match poll(&mut waited, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            drop(waited);
            self.wake.clear();
            if let Some(status) = &self.status {
                status.answer(std::iter::once(self.activity()));
            }
            if connection.is_none() {
                connection = self.accept(listener);
            }
        }
    }

    fn activity(&self) -> ExportActivity {
        ExportActivity { clones: self.clone.iter().cloned().collect(), ..self.device.activity() }
    }

    fn accept(&self, listener: &Listener) -> Option<Connection> {
        let accepted = match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(fd) => UnixStream::from(fd),
            Err(Errno::WOULDBLOCK | Errno::CONNABORTED | Errno::INTR) => return None,
            Err(errno) => {
                log::warn!("a connection was not accepted: {errno}");
                std::thread::sleep(ACCEPT_PAUSE);
                return None;
            }
        };
        let connection = self.start(accepted);
        connection.inspect_err(|error| log::warn!("no thread for a front end: {error}")).ok()
    }

    fn start(&self, stream: UnixStream) -> std::io::Result<Connection> {
        let copy = stream.try_clone()?;
        let (device, resources) = (self.device.clone(), self.resources.clone());
        let has_ended = Arc::new(AtomicBool::new(false));
        let end = ConnectionEnd { has_ended: has_ended.clone(), _waker: self.wake.waker() };
        let thread = std::thread::Builder::new().name("front end".into()).spawn(move || {
            let _end = end;
            log::info!("a front end has connected");
            match serve(stream, &device, &resources) {
                Ok(()) => log::info!("the front end has disconnected"),
                Err(error) => log::warn!("the connection to the front end was closed: {error}"),
            }
        })?;
        Ok(Connection { stream: copy, thread, has_ended })
    }

    /// Ends a connection after its requests in flight.
    fn end(&self, connection: Connection) {
        self.device.stop();
        // It fails if the front end has gone.
        let _ = rustix::net::shutdown(&connection.stream, Shutdown::Both);
        let until = Instant::now() + DRAIN_TIMEOUT;
        while !connection.has_ended() && Instant::now() < until {
            let pause = Timespec::try_from(ACCEPT_PAUSE).unwrap_or_default();
            let _ = poll(&mut [PollFd::new(self.wake, PollFlags::IN)], Some(&pause));
            self.wake.clear();
        }
        // Until it is joined, the thread may still hold the device, and so the clone.
        if connection.has_ended() {
            let _ = connection.thread.join();
        }
    }
}

struct Connection {
    stream: UnixStream,
    thread: JoinHandle<()>,
    has_ended: Arc<AtomicBool>,
}

impl Connection {
    fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::SeqCst)
    }
}

/// Tells the main thread that a connection has ended, however its thread ends.
struct ConnectionEnd {
    has_ended: Arc<AtomicBool>,
    _waker: Waker,
}

impl Drop for ConnectionEnd {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::SeqCst);
    }
}

fn is_readable(fd: &impl AsFd) -> anyhow::Result<bool> {
    let mut waited = [PollFd::new(fd, PollFlags::IN)];
    match poll(&mut waited, Some(&Timespec::default())) {
        Ok(count) => Ok(count > 0),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}
