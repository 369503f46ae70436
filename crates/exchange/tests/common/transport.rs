//! The transports, each with a serving peer that dies on request.

use std::{
    os::fd::{AsFd, OwnedFd},
    process::{Child, Stdio},
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

use draconis_exchange::{
    channel::{
        self, Client, Server,
        session::{self, Session, SessionConfig},
    },
    contract::{
        Contract,
        directory::{self, Directory, DirectoryServer},
        disk::{self, Disk, DiskServer},
        file::{self, File, FileServer},
        volume::{self, MountError, MountedVolume, Volume, VolumeServer},
    },
    heap::arena::SlotClass,
};
use draconis_types::{Attributes, Block, Refusal, StatFs};
use rustix::process::{Pid, PidfdFlags, Signal, getpid, kill_process, pidfd_open};

use super::{TEST_TIMEOUT, test_deadline};

/// Role of a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Serves [`HelloFile`].
    Hello,
    /// Answers `n` messages and dies at the next: by a panic, or by SIGKILL.
    DieAt(u32),
    /// Closes without receiving.
    Close,
    /// Receives `n + 1` messages, answers `n` and closes.
    CloseAfter(u32),
    /// Receives one message and stays silent for a while.
    Silent(Duration),
}

/// Refuses every request except mounts.
pub struct RefusingServer;

impl FileServer for RefusingServer {
    fn read(&self, _: &mut file::Read) -> Result<u32, Refusal> {
        Err(Refusal::Io)
    }
    fn get_attributes(&self, _: &mut file::GetAttributes) -> Result<Attributes, Refusal> {
        Err(Refusal::Io)
    }
}

impl DirectoryServer for RefusingServer {
    fn lookup(&self, _: &mut directory::Lookup) -> Result<Attributes, Refusal> {
        Err(Refusal::Io)
    }
    fn get_attributes(&self, _: &mut directory::GetAttributes) -> Result<Attributes, Refusal> {
        Err(Refusal::Io)
    }
    fn enumerate(&self, _: &mut directory::Enumerate) -> Result<u32, Refusal> {
        Err(Refusal::Io)
    }
}

impl DiskServer for RefusingServer {
    fn properties(&self, _: &mut disk::Properties) -> Result<disk::DiskProperties, Refusal> {
        Err(Refusal::Io)
    }
    fn read(&self, _: &mut disk::Read) -> Result<(), Refusal> {
        Err(Refusal::Io)
    }
    fn discard(&self, _: &mut disk::Discard) -> Result<(), Refusal> {
        Err(Refusal::Io)
    }
    fn reserve(&self, _: &mut disk::Reserve) -> Result<u64, Refusal> {
        Err(Refusal::Io)
    }
}

impl VolumeServer for RefusingServer {
    fn mount(&self, _: &mut volume::Mount) -> Result<MountedVolume, MountError> {
        Ok(MountedVolume { space: StatFs::default(), read_only: true })
    }
    fn status(&self, _: &mut volume::Status) -> Result<u32, Refusal> {
        Err(Refusal::Io)
    }
    fn unmount(&self, _: &mut volume::Unmount) -> Result<(), Refusal> {
        Err(Refusal::Busy)
    }
}

/// A file of twelve bytes.
pub struct HelloFile;

impl FileServer for HelloFile {
    fn read(&self, request: &mut file::Read) -> Result<u32, Refusal> {
        if !request.is_in_bounds() {
            return Err(Refusal::Invalid);
        }
        let from = b"Hello, tree!".get(request.offset as usize..).unwrap_or_default();
        let from = &from[..from.len().min(request.len as usize)];
        Ok(request.buffer.copy_in(request.buffer_offset as usize, from) as u32)
    }
    fn get_attributes(&self, _: &mut file::GetAttributes) -> Result<Attributes, Refusal> {
        Err(Refusal::Io)
    }
}

/// A contract that [`RefusingServer`] serves.
pub trait TestContract: Contract {
    fn answer_with_refusal(message: Self::ToServer) -> Option<Self::ToClient>;
    /// Serves [`HelloFile`], if the contract is `File`.
    fn serve_hello(_: Server<Self>) {
        panic!("only a file has contents");
    }
}

impl TestContract for File {
    fn answer_with_refusal(message: file::ToServer) -> Option<file::ToClient> {
        file::answer(&RefusingServer, message)
    }
    fn serve_hello(end: Server<File>) {
        // The file never changes.
        let _ = end.change_notifier();
        let _ = end.serve(TEST_TIMEOUT, |message| file::answer(&HelloFile, message));
    }
}
impl TestContract for Disk {
    fn answer_with_refusal(message: disk::ToServer) -> Option<disk::ToClient> {
        disk::answer(&RefusingServer, message)
    }
}
impl TestContract for Volume {
    fn answer_with_refusal(message: volume::ToServer) -> Option<volume::ToClient> {
        volume::answer(&RefusingServer, message)
    }
}
impl TestContract for Directory {
    fn answer_with_refusal(message: directory::ToServer) -> Option<directory::ToClient> {
        directory::answer(&RefusingServer, message)
    }
}

struct CloseUnwind;

/// Plays `role` over `end`; `die` kills the peer at once.
fn play_role<C: TestContract>(role: Role, end: Server<C>, die: fn() -> !) {
    match role {
        Role::Hello => C::serve_hello(end),
        Role::DieAt(n) => {
            let mut answered = 0;
            let _ = end.serve(TEST_TIMEOUT, |message| {
                if answered == n {
                    die();
                }
                answered += 1;
                C::answer_with_refusal(message)
            });
        }
        Role::Close => drop(end),
        Role::CloseAfter(n) => {
            let mut answered = 0;
            // Unwinding out of `serve` drops the endpoint, as closing does.
            let closing = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let _ = end.serve(TEST_TIMEOUT, |message| {
                    if answered == n {
                        std::panic::resume_unwind(Box::new(CloseUnwind));
                    }
                    answered += 1;
                    C::answer_with_refusal(message)
                });
            }));
            drop(closing);
        }
        Role::Silent(how_long) => {
            let _ = end.serve(TEST_TIMEOUT, |message| {
                draconis_testkit::wait::pause("this peer is silent", how_long);
                C::answer_with_refusal(message)
            });
        }
    }
}

/// A transport with a serving peer.
pub trait TestTransport: Sized {
    /// Starts a peer that plays `role` as the server of `C`.
    fn start<C: TestContract>(role: Role) -> (Self, Client<C>);
    /// Returns a block whose return is tracked.
    fn block(&self, len: usize) -> Block;
    /// Waits for the peer to end and checks that every byte has returned.
    fn finish(self);
}

/// Lanes of a session.
pub const LANES: u32 = 4;

/// Blocks of 4 KiB to 1 MiB: 4.5 MiB a side.
fn session_config() -> SessionConfig {
    let classes: Vec<_> = [(4 << 10, 128), (64 << 10, 32), (1 << 20, 2)]
        .map(|(slot_bytes, slots)| SlotClass { slot_bytes, slots })
        .into();
    SessionConfig { lanes: LANES, host: classes.clone(), guest: classes }
}

fn session_with_self() -> (Arc<Session>, Arc<Session>) {
    let (offer, socket) = session::offer(&session_config()).unwrap();
    let host = offer.start(pidfd_open(getpid(), PidfdFlags::empty()).unwrap());
    (host, session::accept(&socket, test_deadline()).unwrap())
}

#[track_caller]
pub fn assert_all_blocks_returned(session: &Arc<Session>) {
    let audit = session.heap_usage();
    assert_eq!(audit.free_bytes, audit.total_bytes(), "{audit:?}");
}

/// The peer is a thread; blocks are moved.
pub struct Threads {
    heap: Arc<Session>,
    peer: JoinHandle<()>,
}

fn unwind_silently() -> ! {
    // Not `panic!`: the hook would print each death.
    std::panic::resume_unwind(Box::new("told to die"))
}

impl TestTransport for Threads {
    fn start<C: TestContract>(role: Role) -> (Self, Client<C>) {
        let (client, server) = channel::pair::<C>();
        let peer = std::thread::spawn(move || play_role(role, server, unwind_silently));
        (Self { heap: session_with_self().0, peer }, client)
    }
    fn block(&self, len: usize) -> Block {
        self.heap.allocate_block(len).unwrap()
    }
    fn finish(self) {
        let _ = self.peer.join();
        assert_all_blocks_returned(&self.heap);
    }
}

/// The peer is a thread behind the shared-memory transport.
pub struct Lanes {
    session: Arc<Session>,
    peer: JoinHandle<()>,
}

impl TestTransport for Lanes {
    fn start<C: TestContract>(role: Role) -> (Self, Client<C>) {
        let (session, guest) = session_with_self();
        let server = guest.server::<C>(0).unwrap();
        let peer = std::thread::spawn(move || play_role(role, server, unwind_silently));
        let client = session.client::<C>(0).unwrap();
        (Self { session, peer }, client)
    }
    fn block(&self, len: usize) -> Block {
        self.session.allocate_block(len).unwrap()
    }
    fn finish(self) {
        let _ = self.peer.join();
        assert_all_blocks_returned(&self.session);
    }
}

/// The peer is a process: this test binary again.
pub struct Processes {
    session: Arc<Session>,
    child: Child,
}

const ROLE_VARIABLE: &str = "DRACONIS_TEST_ROLE";

impl TestTransport for Processes {
    fn start<C: TestContract>(role: Role) -> (Self, Client<C>) {
        let (kind, n) = match role {
            Role::Hello => ("hello", 0),
            Role::DieAt(n) => ("die", n),
            Role::Close => ("shut", 0),
            Role::CloseAfter(n) => ("close", n),
            Role::Silent(how_long) => ("silent", how_long.as_millis() as u32),
        };
        let (session, child) = spawn_child(&format!("{} {kind} {n}", C::NAME));
        let client = session.client::<C>(0).unwrap();
        (Self { session, child }, client)
    }
    fn block(&self, len: usize) -> Block {
        self.session.allocate_block(len).unwrap()
    }
    fn finish(mut self) {
        // Ends the peer, whatever it does, and confirms its death.
        let _ = self.child.kill();
        self.session.wait_for_death(test_deadline()).unwrap();
        self.child.wait().unwrap();
        assert_all_blocks_returned(&self.session);
    }
}

/// Starts this test binary as a peer; its standard input is the session's socket.
pub fn spawn_child(role: &str) -> (Arc<Session>, Child) {
    let (offer, socket) = session::offer(&session_config()).unwrap();
    let child = draconis_testkit::child_test!(child_entry)
        .env(ROLE_VARIABLE, role)
        .stdin(socket)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let pid = Pid::from_child(&child);
    (offer.start(pidfd_open(pid, PidfdFlags::empty()).unwrap()), child)
}

/// Returns the role and the socket, in a test binary that was started as a peer.
pub fn child_role() -> Option<(String, OwnedFd)> {
    let role = std::env::var(ROLE_VARIABLE).ok()?;
    Some((role, std::io::stdin().as_fd().try_clone_to_owned().unwrap()))
}

fn kill_this_process() -> ! {
    kill_process(getpid(), Signal::KILL).unwrap();
    loop {
        std::thread::park();
    }
}

/// Plays the peer in a child: a test only in name.
#[test]
fn child_entry() {
    let Some((role, socket)) = child_role() else { return };
    let words: Vec<_> = role.split(' ').collect();
    let n: u32 = words[2].parse().unwrap();
    let role = match words[1] {
        "hello" => Role::Hello,
        "die" => Role::DieAt(n),
        "shut" => Role::Close,
        "close" => Role::CloseAfter(n),
        _ => Role::Silent(Duration::from_millis(n.into())),
    };
    let session = session::accept(&socket, test_deadline()).unwrap();
    // The other lanes, which few tests use, serve files.
    for server in (1..LANES).filter_map(|lane| session.server::<File>(lane)) {
        std::thread::spawn(move || play_role(role, server, kill_this_process));
    }
    match words[0] {
        "File" => play_role::<File>(role, session.server(0).unwrap(), kill_this_process),
        "Disk" => play_role::<Disk>(role, session.server(0).unwrap(), kill_this_process),
        "Volume" => play_role::<Volume>(role, session.server(0).unwrap(), kill_this_process),
        _ => play_role::<Directory>(role, session.server(0).unwrap(), kill_this_process),
    }
}
