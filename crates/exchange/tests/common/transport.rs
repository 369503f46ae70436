//! The transports, each with a serving peer that dies on request.

use std::{
    os::fd::{AsFd, OwnedFd},
    process::{Child, Command, Stdio},
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
        Attributes, Contract, Refusal, StatFs,
        directory::{self, Directory, DirectoryServer},
        disk::{self, Disk, DiskServer},
        file::{self, File, FileServer},
        tree,
        volume::{self, MountError, MountedVolume, Volume, VolumeServer},
    },
    heap::Block,
};
use rustix::process::{Pid, PidfdFlags, Signal, getpid, kill_process, pidfd_open};

use super::{PATIENCE, memory::Memory, soon};

/// Role of a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Serves the tree in memory.
    Tree,
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
pub struct Refuser;

impl FileServer for Refuser {
    fn read(&self, _: &mut file::Read) -> Result<u32, Refusal> {
        Err(Refusal::Io)
    }
    fn get_attributes(&self, _: &mut file::GetAttributes) -> Result<Attributes, Refusal> {
        Err(Refusal::Io)
    }
}

impl DirectoryServer for Refuser {
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

impl DiskServer for Refuser {
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

impl VolumeServer for Refuser {
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

/// A contract that [`Refuser`] serves.
pub trait Served: Contract {
    fn answer(message: Self::ToServer) -> Option<Self::ToClient>;
    /// Serves the in-memory tree, if the contract is `Directory`.
    fn serve_tree(_: Server<Self>) {
        panic!("only a directory serves a tree");
    }
}

impl Served for File {
    fn answer(message: file::ToServer) -> Option<file::ToClient> {
        file::answer(&Refuser, message)
    }
}
impl Served for Disk {
    fn answer(message: disk::ToServer) -> Option<disk::ToClient> {
        disk::answer(&Refuser, message)
    }
}
impl Served for Volume {
    fn answer(message: volume::ToServer) -> Option<volume::ToClient> {
        volume::answer(&Refuser, message)
    }
}
impl Served for Directory {
    fn answer(message: directory::ToServer) -> Option<directory::ToClient> {
        directory::answer(&Refuser, message)
    }
    fn serve_tree(end: Server<Directory>) {
        let _ = tree::serve(end, &Memory, PATIENCE);
    }
}

struct Closing;

/// Plays `role` over `end`; `die` kills the peer at once.
fn play<C: Served>(role: Role, end: Server<C>, die: fn() -> !) {
    match role {
        Role::Tree => C::serve_tree(end),
        Role::DieAt(n) => {
            let mut answered = 0;
            let _ = end.serve(PATIENCE, |message| {
                if answered == n {
                    die();
                }
                answered += 1;
                C::answer(message)
            });
        }
        Role::Close => drop(end),
        Role::CloseAfter(n) => {
            let mut answered = 0;
            // Unwinding out of `serve` drops the endpoint, as closing does.
            let closing = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let _ = end.serve(PATIENCE, |message| {
                    if answered == n {
                        std::panic::resume_unwind(Box::new(Closing));
                    }
                    answered += 1;
                    C::answer(message)
                });
            }));
            drop(closing);
        }
        Role::Silent(how_long) => {
            let _ = end.serve(PATIENCE, |message| {
                std::thread::sleep(how_long);
                C::answer(message)
            });
        }
    }
}

/// A transport with a serving peer.
pub trait Transport: Sized {
    /// Starts a peer that plays `role` as the server of `C`.
    fn start<C: Served>(role: Role) -> (Self, Client<C>);
    /// Returns a block whose return is tracked.
    fn block(&self, len: usize) -> Block;
    /// Returns a channel whose server's endpoint can be sent to the peer.
    fn pair<C: Contract>(&self) -> (Client<C>, Server<C>);
    /// Waits for the peer to end and checks that every byte has returned.
    fn finish(self);
}

fn session_of_one() -> (Arc<Session>, Arc<Session>) {
    let (offer, socket) = session::offer(&SessionConfig::default()).unwrap();
    let host = offer.start(pidfd_open(getpid(), PidfdFlags::empty()).unwrap());
    (host, session::accept(&socket, soon()).unwrap())
}

#[track_caller]
pub fn expect_all_home(session: &Arc<Session>) {
    let audit = session.audit();
    assert_eq!(audit.free_bytes, audit.total_bytes(), "{audit:?}");
}

/// The peer is a thread; blocks are moved.
pub struct Threads {
    heap: Arc<Session>,
    peer: JoinHandle<()>,
}

fn unwind() -> ! {
    // Not `panic!`: the hook would print each death.
    std::panic::resume_unwind(Box::new("told to die"))
}

impl Transport for Threads {
    fn start<C: Served>(role: Role) -> (Self, Client<C>) {
        let (client, server) = channel::pair::<C>();
        let peer = std::thread::spawn(move || play(role, server, unwind));
        (Self { heap: session_of_one().0, peer }, client)
    }
    fn block(&self, len: usize) -> Block {
        self.heap.block(len).unwrap()
    }
    fn pair<C: Contract>(&self) -> (Client<C>, Server<C>) {
        channel::pair()
    }
    fn finish(self) {
        let _ = self.peer.join();
        expect_all_home(&self.heap);
    }
}

/// The peer is a thread behind the shared-memory transport.
pub struct Lanes {
    session: Arc<Session>,
    peer: JoinHandle<()>,
}

impl Transport for Lanes {
    fn start<C: Served>(role: Role) -> (Self, Client<C>) {
        let (session, guest) = session_of_one();
        let server = guest.server::<C>(0).unwrap();
        let peer = std::thread::spawn(move || play(role, server, unwind));
        let client = session.client::<C>(0).unwrap();
        (Self { session, peer }, client)
    }
    fn block(&self, len: usize) -> Block {
        self.session.block(len).unwrap()
    }
    fn pair<C: Contract>(&self) -> (Client<C>, Server<C>) {
        self.session.pair().unwrap()
    }
    fn finish(self) {
        let _ = self.peer.join();
        expect_all_home(&self.session);
    }
}

/// The peer is a process: this test binary again.
pub struct Processes {
    session: Arc<Session>,
    child: Child,
}

const ROLE: &str = "DRACONIS_TEST_ROLE";

impl Transport for Processes {
    fn start<C: Served>(role: Role) -> (Self, Client<C>) {
        let (kind, n) = match role {
            Role::Tree => ("tree", 0),
            Role::DieAt(n) => ("die", n),
            Role::Close => ("shut", 0),
            Role::CloseAfter(n) => ("close", n),
            Role::Silent(how_long) => ("silent", how_long.as_millis() as u32),
        };
        let (session, child) = spawn(&format!("{} {kind} {n}", C::NAME));
        let client = session.client::<C>(0).unwrap();
        (Self { session, child }, client)
    }
    fn block(&self, len: usize) -> Block {
        self.session.block(len).unwrap()
    }
    fn pair<C: Contract>(&self) -> (Client<C>, Server<C>) {
        self.session.pair().unwrap()
    }
    fn finish(mut self) {
        // Ends the peer, whatever it does, and confirms its death.
        let _ = self.child.kill();
        self.session.wait_for_death(soon()).unwrap();
        self.child.wait().unwrap();
        expect_all_home(&self.session);
    }
}

/// Starts this test binary as a peer; its standard input is the session's socket.
pub fn spawn(role: &str) -> (Arc<Session>, Child) {
    let (offer, socket) = session::offer(&SessionConfig::default()).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["child_entry", "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .stdin(socket)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let pid = Pid::from_child(&child);
    (offer.start(pidfd_open(pid, PidfdFlags::empty()).unwrap()), child)
}

/// Returns the role and the socket, in a test binary that was started as a peer.
pub fn role_of_child() -> Option<(String, OwnedFd)> {
    let role = std::env::var(ROLE).ok()?;
    Some((role, std::io::stdin().as_fd().try_clone_to_owned().unwrap()))
}

fn kill_me() -> ! {
    kill_process(getpid(), Signal::KILL).unwrap();
    loop {
        std::thread::park();
    }
}

/// Plays the peer if this is a child: each suite calls it in a test named `child_entry`.
pub fn play_if_child() {
    let Some((role, socket)) = role_of_child() else { return };
    let words: Vec<_> = role.split(' ').collect();
    let n: u32 = words[2].parse().unwrap();
    let role = match words[1] {
        "tree" => Role::Tree,
        "die" => Role::DieAt(n),
        "shut" => Role::Close,
        "close" => Role::CloseAfter(n),
        _ => Role::Silent(Duration::from_millis(n.into())),
    };
    let session = session::accept(&socket, soon()).unwrap();
    match words[0] {
        "File" => play::<File>(role, session.server(0).unwrap(), kill_me),
        "Disk" => play::<Disk>(role, session.server(0).unwrap(), kill_me),
        "Volume" => play::<Volume>(role, session.server(0).unwrap(), kill_me),
        _ => play::<Directory>(role, session.server(0).unwrap(), kill_me),
    }
}
