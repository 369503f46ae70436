//! `draconis export`: serves images to NBD clients, or one to a virtual machine.
//!
//! ```text
//!   bind sockets ─ open and lock images ─ start --run ─ confine ─ read images ─ accept
//!        ─ a thread for each connection ══▶ Export ──▶ disk
//!        ─ SIGTERM, end of --run, last client of --once ─ answer what is in flight ─ flush ─ close
//! ```
//!
//! Law 1: the process is confined before it reads a byte of an image or of a client.
//! Law 2: the number of connections is bounded; others wait in the queue of the socket.

mod clones;
mod socket;
mod source;
mod status;
#[cfg_attr(not(feature = "tls"), path = "export/no_tls.rs")]
mod tls;
mod vhost_user;

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::Args;
use draconis_nbd::{Connection, ConnectionError, Export};
use draconis_service::path_members;
use draconis_types::lock::Mutex;
use draconis_types::path_bytes::ShowPath;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::Shutdown;
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, getrlimit, pidfd_open, setrlimit};
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use self::clones::{CloneUse, SharedClones};
use self::socket::{ListenAddress, Listener, Socket, SocketHalf};
use self::source::{CloneNames, ImageFormat, Source, UnreadSources};
use self::status::StatusServer;
use self::tls::ServerConfig;
use crate::image::{self, WriteArgs};
use crate::report;
use crate::text::{escape_control_chars, format_bytes};

/// Serve images as disks: to NBD clients (virtual machines, nbdcopy, the kernel), or by vhost-user.
///
/// Each IMAGE is exported whole, as a raw disk, whatever its format: a file, a block device, qcow2,
/// VHDX, a compressed file, a disk or snapshot of a store. Images that can only be read are exported
/// read-only. The process is confined before it reads from an image or a client.
///
/// One image is the default export; --name gives it a name as well. Several images are exported by
/// their file names, disks of stores by their own; the first one is also the default export.
///
/// With --clone each connection has a writable disk of its own: a clone of a disk or snapshot in a
/// store, made in constant time. A client that reconnects gets a new clone. With --vhost-user the
/// process has one clone, for the front ends that connect to it.
///
/// Ends on SIGTERM, SIGINT or SIGHUP: answers the requests in flight, makes all writes durable, and
/// closes the images. A connection has up to 16 requests and 64 MiB of their contents in memory.
/// Traffic is encrypted only with --tls.
///
/// --vhost-user serves one image as a virtio disk to QEMU or another front end, which shares the memory
/// of its machine. A front end that finds another process at the socket has its requests in flight
/// carried out by that one.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Listen on a Unix socket, unix:PATH, or on a TCP port, tcp:HOST:PORT; may be repeated. Port 0
    /// is any free port. A service manager may pass sockets instead.
    #[arg(long, value_name = "ADDRESS")]
    nbd: Vec<ListenAddress>,
    /// Serve the image as a virtio block device to the front end that connects to the Unix socket
    /// PATH; there is one at a time.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["nbd", "tls"])]
    vhost_user: Option<PathBuf>,
    /// Export read-only; other readers may use the image as well.
    #[arg(short, long)]
    read_only: bool,
    /// Format of the images: detected, or raw to export the bytes of a file as they are, also of a
    /// qcow2 file. Machines that write a raw file should be given it as raw.
    #[arg(long, value_enum, default_value_t, conflicts_with = "backing")]
    format: ImageFormat,
    /// Give each connection a writable clone of STORE#NAME@SNAPSHOT, or of STORE#NAME as it is now.
    /// Clones are removed when their clients disconnect, or, once written, kept as PREFIX-1,
    /// PREFIX-2, ... With
    /// --vhost-user the only clone is removed at the end, or kept as PREFIX-1, with which the next
    /// export goes on.
    #[arg(
        long,
        value_name = "PREFIX",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "",
        conflicts_with = "read_only"
    )]
    clone: Option<CloneNames>,
    /// Serve up to N connections at a time; further clients wait.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=MAX_CONNECTIONS))]
    connections: u64,
    /// Require TLS, with ca-cert.pem, server-cert.pem and server-key.pem in DIR. Clients need a
    /// certificate that the authority of ca-cert.pem has signed, and ca-crl.pem does not revoke.
    #[arg(long, value_name = "DIR")]
    tls: Option<PathBuf>,
    /// Name of the export, if there is one IMAGE (default: the empty name). With --vhost-user, the
    /// serial number of the disk, of 20 bytes (default: the file name).
    #[arg(long)]
    name: Option<String>,
    /// End once the last client has disconnected.
    #[arg(long)]
    once: bool,
    /// Run COMMAND in a shell with the export's address in $uri (NBD), $unixsocket or $port, and its
    /// name in $exportname; end with it, with its exit status. Without an address the export listens
    /// on a private socket. SIGINT is left to COMMAND; a SIGTERM ends the export before it.
    #[arg(long, value_name = "COMMAND")]
    run: Option<String>,
    /// Print the exports and their addresses as JSON.
    #[arg(long)]
    json: bool,
    /// Where the disk is in IMAGE.
    #[command(flatten)]
    place: WriteArgs,
    /// Images: files, block devices, STORE#NAME, or STORE#NAME@SNAPSHOT.
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<PathBuf>,
}

/// Maximum of `--connections`.
const MAX_CONNECTIONS: u64 = 65536;
/// Descriptors that an export has besides those of connections, and some more.
const SPARE_DESCRIPTORS: u64 = 256;
const SIGINT_NUMBER: usize = SIGINT as usize;
/// Maximum length of an export's name, in bytes.
const MAX_NAME_BYTES: usize = 256;
/// Time that a client has to choose an export.
const NEGOTIATION_TIMEOUT: Duration = Duration::from_secs(30);
/// Time that clients have to read the replies of requests in flight at the end.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after connections could not be accepted, for example for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// JSON form of an export.
#[derive(Serialize)]
struct ExportJson<'a> {
    name: &'a str,
    #[serde(flatten, with = "path_members::image")]
    image: PathBuf,
    size_bytes: u64,
    read_only: bool,
    /// Names of the clones that connections get, with N for a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    clones: Option<String>,
    uris: Vec<String>,
    #[serde(flatten, with = "path_members::vhost_user_socket")]
    vhost_user_socket: Option<PathBuf>,
}

/// JSON form of what is exported.
#[derive(Serialize)]
struct ExportsJson<'a> {
    exports: Vec<ExportJson<'a>>,
    confinement: draconis_service::sandbox::Confinement,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if let Some(socket) = &arguments.vhost_user {
        return vhost_user::run(arguments, socket);
    }
    let names = export_names(arguments)?;
    let mut listeners = Listener::from_environment()?;
    for address in &arguments.nbd {
        listeners.push(Listener::bind(address)?);
    }
    if listeners.is_empty() && arguments.run.is_some() {
        listeners.push(Listener::bind(&ListenAddress::Unix(status::private_socket()?))?);
    }
    if listeners.is_empty() {
        bail!(
            "no socket to listen on; --nbd unix:PATH, --nbd tcp:HOST:PORT or --vhost-user PATH names one"
        );
    }
    let sources = UnreadSources::open(
        &arguments.images,
        &arguments.place,
        arguments.read_only,
        arguments.format,
        arguments.clone.clone(),
        CloneUse::ForEachConnection,
    )?;
    allow_descriptors(arguments.connections + SPARE_DESCRIPTORS)?;
    let tls = arguments.tls.as_deref().map(tls::read_directory).transpose()?;
    let wake = WakePipe::new()?;
    let child = arguments.run.as_deref().map(|command| {
        let (Some(listener), Some(name)) = (listeners.first(), names.first()) else {
            bail!("--run needs a socket and an image");
        };
        start_command(command, listener, Some((name, tls.is_some())))
    });
    let child = child.transpose()?;
    let status = status::bind_socket();
    // A no-op unless systemd started the command. Clients can connect already.
    sd_notify::notify(&[sd_notify::NotifyState::Ready])?;
    let confinement = image::confine_export()?;

    let sources = sources.start()?;
    let mut exports = vec![];
    for (Source { image, disk, clones, .. }, name) in sources.iter().zip(names) {
        let (about, disk) = (image.shown().to_string(), disk.clone());
        let export = match clones {
            Some(clones) => {
                // A connection gets the name of its own clone.
                let about = format!("{}, a clone of {about}", clones.pattern());
                Export::with_clones(name, about, disk, Box::new(SharedClones(clones.clone())))
            }
            None => Export::new(name, about, disk),
        };
        if export.is_read_only() && !arguments.read_only {
            report::print_notes(&[format!("read-only: {} can only be read", image.shown())]);
        }
        exports.push(export);
    }
    let status = status.map(|listener| {
        let uris = |name: &str| listeners.iter().map(|it| it.uri(name, tls.is_some())).collect();
        let exports = status::nbd_exports(&exports, &sources, uris);
        StatusServer::new(listener, exports, confinement.clone())
    });
    let server = Server {
        status,
        tls,
        exports: exports.into(),
        listeners,
        wake,
        connections: Arc::default(),
        once: arguments.once,
        max_connections: arguments.connections as usize,
    };
    if arguments.json || child.is_none() {
        server.print_exports(&sources, arguments.json, confinement)?;
    }
    let code = server.serve(child)?;
    close(server, sources)?;
    Ok(code)
}

/// Returns the names of the exports.
fn export_names(arguments: &Arguments) -> anyhow::Result<Vec<String>> {
    let images = &arguments.images;
    if let [_] = images[..] {
        let name = arguments.name.clone().unwrap_or_default();
        ensure!(name.len() <= MAX_NAME_BYTES, "--name is longer than {MAX_NAME_BYTES} bytes");
        return Ok(vec![name]);
    }
    ensure!(arguments.name.is_none(), "--name is for one image; several have their file names");
    let mut names: Vec<String> = vec![];
    for image in images {
        let text = image.file_name().unwrap_or(image.as_os_str()).shown().to_string();
        let name = text.rsplit_once('#').map_or(text.as_str(), |(_, name)| name);
        let shown = image.shown();
        ensure!(name.len() <= MAX_NAME_BYTES, "{shown}: a name longer than {MAX_NAME_BYTES} bytes");
        ensure!(
            !names.iter().any(|other| other == name),
            "{shown}: another image has the name {name}; export it by another command"
        );
        names.push(name.to_owned());
    }
    Ok(names)
}

/// Raises the limit of descriptors, if it is lower.
fn allow_descriptors(wanted: u64) -> anyhow::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= wanted) {
        return Ok(());
    }
    let raised = Rlimit {
        current: limit.maximum.map_or(Some(wanted), |most| Some(most.min(wanted))),
        ..limit
    };
    setrlimit(Resource::Nofile, raised).context("cannot raise the limit of descriptors")
}

/// Starts the command of `--run`.
fn start_command(
    command: &str,
    listener: &Listener,
    nbd_name_and_tls: Option<(&str, bool)>,
) -> anyhow::Result<(Child, OwnedFd)> {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).env_remove("uri").env_remove("exportname");
    if let Some((name, is_tls)) = nbd_name_and_tls {
        shell.env("uri", listener.uri(name, is_tls)).env("exportname", name);
    }
    match &listener.address {
        ListenAddress::Unix(path) => shell.env("unixsocket", path).env_remove("port"),
        ListenAddress::Tcp(address) => {
            let port = address.rsplit(':').next().unwrap_or_default();
            shell.env("port", port).env_remove("unixsocket")
        }
    };
    let child = shell.spawn().context("sh, for --run")?;
    let pid = Pid::from_child(&child);
    let ended = pidfd_open(pid, PidfdFlags::empty()).context("the process of --run")?;
    Ok((child, ended))
}

/// Waits for the process of `--run`; returns its exit status.
fn wait_for_command(child: &mut Child) -> anyhow::Result<ExitCode> {
    let status = child.wait().context("the process of --run")?;
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    Ok(ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)))
}

/// A socket pair that wakes the main thread: on signals, and when a connection has ended.
struct WakePipe {
    receiver: UnixStream,
    sender: Arc<UnixStream>,
    /// The signal that was received; 0 if there was none.
    signal: Arc<AtomicUsize>,
}

impl WakePipe {
    fn new() -> anyhow::Result<Self> {
        let (receiver, sender) = UnixStream::pair()?;
        receiver.set_nonblocking(true)?;
        sender.set_nonblocking(true)?;
        let (is_signalled, received) = (Arc::new(AtomicBool::new(false)), Arc::default());
        for signal in [SIGTERM, SIGINT, SIGHUP] {
            // The second signal ends the process at once.
            signal_hook::flag::register_conditional_shutdown(
                signal,
                128 + signal,
                is_signalled.clone(),
            )?;
            signal_hook::flag::register(signal, is_signalled.clone())?;
            let number = usize::try_from(signal)?;
            signal_hook::flag::register_usize(signal, Arc::clone(&received), number)?;
            signal_hook::low_level::pipe::register(signal, sender.try_clone()?)?;
        }
        Ok(Self { receiver, sender: Arc::new(sender), signal: received })
    }

    /// Returns the exit status once a signal has ended the export.
    fn exit_code(&self, has_command: bool) -> Option<ExitCode> {
        match (self.signal.load(Ordering::SeqCst), has_command) {
            // The terminal sends it to the command as well, which may go on.
            (0, _) | (SIGINT_NUMBER, true) => None,
            (_, false) => Some(ExitCode::SUCCESS),
            // The command has not ended: that is no success.
            (signal, true) => Some(ExitCode::from(u8::try_from(128 + signal).unwrap_or(1))),
        }
    }

    /// Returns what wakes the main thread when it is dropped.
    fn waker(&self) -> Waker {
        Waker(self.sender.clone())
    }

    fn clear(&self) {
        while (&self.receiver).read(&mut [0; 64]).is_ok_and(|got| got > 0) {}
    }
}

impl AsFd for WakePipe {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.receiver.as_fd()
    }
}

/// Wakes the main thread on drop.
struct Waker(Arc<UnixStream>);

impl Drop for Waker {
    fn drop(&mut self) {
        // A full socket wakes, too.
        let _ = (&*self.0).write(&[0]);
    }
}

/// Connections that are open, and whether one ever chose an export.
#[derive(Default)]
struct Connections {
    open: Vec<Arc<Socket>>,
    had_client: bool,
}

struct Server {
    status: Option<StatusServer>,
    tls: Option<Arc<ServerConfig>>,
    exports: Arc<[Export]>,
    listeners: Vec<Listener>,
    wake: WakePipe,
    connections: Arc<Mutex<Connections>>,
    once: bool,
    max_connections: usize,
}

impl Server {
    /// Returns the addresses of an export.
    fn uris(&self, name: &str) -> Vec<String> {
        self.listeners.iter().map(|listener| listener.uri(name, self.tls.is_some())).collect()
    }

    fn print_exports(
        &self,
        sources: &[Source],
        json: bool,
        confinement: draconis_service::sandbox::Confinement,
    ) -> anyhow::Result<()> {
        let exports = self.exports.iter().zip(sources).map(|(export, source)| ExportJson {
            name: export.name(),
            image: source.image.clone(),
            size_bytes: export.len_bytes(),
            read_only: export.is_read_only(),
            clones: source.clones.as_ref().map(|clones| clones.pattern()),
            uris: self.uris(export.name()),
            vhost_user_socket: None,
        });
        let exports: Vec<_> = exports.collect();
        if json {
            report::print_line(serde_json::to_string(&ExportsJson { exports, confinement })?)?;
        } else {
            for export in &exports {
                let image = escape_control_chars(export.image.as_os_str().as_bytes());
                let size = format_bytes(export.size_bytes);
                let mode = if export.read_only { ", read-only" } else { "" };
                let of = export.clones.iter().map(|name| format!(", clones {name}"));
                let of: String = of.map(|text| escape_control_chars(text.as_bytes())).collect();
                for uri in &export.uris {
                    report::print_line(format_args!("{image} ({size}{mode}{of}): {uri}"))?;
                }
            }
        }
        std::io::stdout().flush()?;
        Ok(())
    }

    /// Serves clients until a signal, the end of `child`, or that of the last client of `--once`.
    fn serve(&self, child: Option<(Child, OwnedFd)>) -> anyhow::Result<ExitCode> {
        loop {
            if let Some(code) = self.wake.exit_code(child.is_some()) {
                return Ok(code);
            }
            if self.is_done() {
                return Ok(ExitCode::SUCCESS);
            }
            let is_full = self.connections.lock().open.len() >= self.max_connections;
            let listeners = if is_full { &[] } else { &self.listeners[..] };
            let mut waited = vec![PollFd::new(&self.wake.receiver, PollFlags::IN)];
            waited.extend(child.iter().map(|(_, ended)| PollFd::new(ended, PollFlags::IN)));
            waited.extend(listeners.iter().map(|it| PollFd::new(it, PollFlags::IN)));
            let status = self.status.as_ref();
            waited.extend(status.map(|it| PollFd::new(&it.listener, PollFlags::IN)));
            match poll(&mut waited, None) {
                Err(Errno::INTR) => continue,
                polled => polled?,
            };
            self.wake.clear();
            let has_ended =
                child.is_some() && waited.get(1).is_some_and(|ended| !ended.revents().is_empty());
            drop(waited);
            if has_ended {
                break;
            }
            listeners.iter().for_each(|listener| self.accept(listener));
            status.iter().for_each(|it| it.answer(self.exports.iter().map(Export::activity)));
        }
        let Some((mut child, _)) = child else { return Ok(ExitCode::SUCCESS) };
        wait_for_command(&mut child)
    }

    fn is_done(&self) -> bool {
        let connections = self.connections.lock();
        self.once && connections.had_client && connections.open.is_empty()
    }

    /// Accepts a connection, and serves it in a thread of its own.
    fn accept(&self, listener: &Listener) {
        let socket = match listener.accept(Instant::now() + NEGOTIATION_TIMEOUT) {
            Ok(Some(socket)) => socket,
            Ok(None) => return,
            Err(error) => {
                log::warn!("a connection was not accepted: {error}");
                return std::thread::sleep(ACCEPT_PAUSE);
            }
        };
        self.connections.lock().open.push(socket.clone());
        let end = ConnectionEnd {
            socket: socket.clone(),
            connections: self.connections.clone(),
            wake: self.wake.sender.clone(),
        };
        let exports = self.exports.clone();
        let tls = self.tls.clone();
        let thread = std::thread::Builder::new().name("client".into()).spawn(move || {
            match serve_client(&socket, tls, &exports, &end.connections) {
                Ok(()) => log::info!("a client disconnected"),
                Err(error) => log::warn!("a connection was closed: {error}"),
            }
            // The main thread drops the disks last, which closes them.
            drop(exports);
            drop(end);
        });
        if let Err(error) = thread {
            log::warn!("no thread for a connection: {error}");
        }
    }
}

fn serve_client(
    socket: &Arc<Socket>,
    tls: Option<Arc<ServerConfig>>,
    exports: &[Export],
    connections: &Mutex<Connections>,
) -> Result<(), ConnectionError> {
    let half = || SocketHalf(socket.clone());
    let connection = Connection::new(half(), half());
    match tls {
        Some(tls) => tls::serve_client(socket, connection, tls, exports, connections),
        None => serve_exports(socket, connection, exports, connections),
    }
}

/// Serves a client over both directions of its stream.
fn serve_exports<R: Read + Send, W: Write + Send>(
    socket: &Socket,
    mut connection: Connection<R, W>,
    exports: &[Export],
    connections: &Mutex<Connections>,
) -> Result<(), ConnectionError> {
    let Some(session) = connection.negotiate(exports)? else { return Ok(()) };
    socket.clear_deadline();
    connections.lock().had_client = true;
    let export = &session.export;
    log::info!("a client uses the export '{}': {}", export.name(), export.description());
    connection.transmit(&session)
}

/// Removes a connection when its thread ends, however it ends.
struct ConnectionEnd {
    socket: Arc<Socket>,
    connections: Arc<Mutex<Connections>>,
    wake: Arc<UnixStream>,
}

impl Drop for ConnectionEnd {
    fn drop(&mut self) {
        self.socket.shut_down(Shutdown::Both);
        self.connections.lock().open.retain(|open| !Arc::ptr_eq(open, &self.socket));
        // A full socket wakes, too.
        let _ = (&*self.wake).write(&[0]);
    }
}

/// Ends all connections after their requests in flight, and closes the images.
fn close(server: Server, sources: Vec<Source>) -> anyhow::Result<()> {
    let Server { exports, listeners, wake, connections, .. } = server;
    drop(listeners);
    exports.iter().for_each(Export::stop);
    for how in [Shutdown::Read, Shutdown::Both] {
        connections.lock().open.iter().for_each(|socket| socket.shut_down(how));
        let until = Instant::now() + DRAIN_TIMEOUT;
        while !connections.lock().open.is_empty() && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left)?;
            let _ = poll(&mut [PollFd::new(&wake.receiver, PollFlags::IN)], Some(&left));
            wake.clear();
        }
    }
    for (export, Source { image, session, .. }) in exports.iter().zip(&sources) {
        let closed = export.flush();
        let closed = closed.and_then(|()| session.as_ref().map_or(Ok(()), |it| it.close_session()));
        closed.with_context(|| image.shown().to_string())?;
    }
    let is_idle = connections.lock().open.is_empty();
    drop(exports);
    for Source { image, disk, clones, .. } in sources {
        // A snapshot that is open cannot be removed.
        drop(disk);
        if let Some(clones) = clones.filter(|_| is_idle) {
            clones.close().with_context(|| image.shown().to_string())?;
        }
    }
    Ok(())
}
