//! A session: shared memory, event fds and lanes of two processes, set up once.
//!
//! ```text
//!   host                         socket                          guest
//!   offer ── hello: config + memory, event fds, host's pidfd ──▶ accept
//!     └─ start(guest's pidfd)
//!
//!   a third process: broker(pidfds) ── a hello each, with the other's pidfd ──▶ both
//!
//!   memory: | mailboxes, two a lane | release words | slots of the host | slots of the guest |
//! ```
//!
//! Law 1: all descriptors are passed and all memory is mapped before the first message. After that,
//! a session needs only `ppoll`, `read` and `write`.
//! Law 2: the guest maps only memory that is sealed, sized and laid out as the hello describes.
//! Law 3: after one contract violation, the peer is ignored on every lane.
//! Law 4: its slots return when its pidfd confirms its death, not before.

mod lane;

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*},
    },
    time::Instant,
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    fs::OFlags,
    io::{self, Errno},
    net::{self, AddressFamily, RecvFlags, SocketFlags, SocketType},
    process::{PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal},
    time::{ClockId, clock_gettime},
};

use super::{ChannelError, Client, RawEndpoint, Server};
use crate::{
    contract::{Contract, Violation, fsm::Sender},
    descriptors,
    heap::arena::{Arena, HeapUsage, SlotClass, layout_bytes},
    shm::SharedMemory,
};
use draconis_types::Block;
use draconis_types::lock::Mutex;

use lane::{AbandonedRequest, LaneSide, LaneTransport, MAILBOX_STRIDE};

/// Maximum lanes of a session: each needs two event fds, and one message passes at most 253
/// descriptors.
pub const MAX_LANES: u32 = u64::BITS;
/// Maximum slot classes of each side.
pub const MAX_SLOT_CLASSES: usize = 8;
/// Maximum bytes of shared memory that a guest maps.
pub const MAX_MEMORY_BYTES: usize = 1 << 32;

/// Milliseconds for which a liveness check counts. Answers of a dead server stay in use for at most
/// this and one clock tick.
const LIVENESS_CACHE_MS: u64 = 10;

/// Lanes and slots of a session. The slots are the quota of each side.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionConfig {
    /// Number of lanes, whose contracts both sides know in advance.
    pub lanes: u32,
    /// Slots that the host allocates.
    pub host: Vec<SlotClass>,
    /// Slots that the guest allocates.
    pub guest: Vec<SlotClass>,
}

/// Offsets in the shared memory.
struct SessionLayout {
    release_words_at: usize,
    slots_at: usize,
    len: usize,
}

impl SessionConfig {
    fn layout(&self) -> Option<SessionLayout> {
        let classes_fit = self.host.len().max(self.guest.len()) <= MAX_SLOT_CLASSES;
        if !classes_fit || self.lanes > MAX_LANES {
            return None;
        }
        let (words, slots) = layout_bytes(&[&self.host, &self.guest])?;
        let release_words_at = (self.lanes as usize * 2 * MAILBOX_STRIDE).next_multiple_of(4096);
        let slots_at = release_words_at.checked_add(words)?;
        let len = slots_at.checked_add(slots)?;
        (len > 0 && len <= MAX_MEMORY_BYTES).then_some(SessionLayout {
            release_words_at,
            slots_at,
            len,
        })
    }

    /// Encodes the hello: fixed length, so that nothing needs parsing. After the number of lanes
    /// come two words that are 0.
    fn to_bytes(&self) -> [u8; HELLO_BYTES] {
        let counts = [self.lanes, 0, 0];
        let class = |classes: &[SlotClass], i: usize| {
            classes.get(i).map_or([0, 0], |class| [class.slot_bytes, class.slots])
        };
        let classes = (0..MAX_SLOT_CLASSES)
            .flat_map(|i| class(&self.host, i).into_iter().chain(class(&self.guest, i)));
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&HELLO_MAGIC);
        for (into, word) in
            bytes[8..].as_chunks_mut().0.iter_mut().zip(counts.into_iter().chain(classes))
        {
            *into = word.to_le_bytes();
        }
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let words = bytes.strip_prefix(&HELLO_MAGIC)?.as_chunks().0;
        let words: Vec<_> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        if bytes.len() != HELLO_BYTES || words[1..3] != [0, 0] {
            return None;
        }
        let classes = |from: usize| {
            let pairs = words[3..].as_chunks::<4>().0.iter();
            let class = |c: &[u32; 4]| SlotClass { slot_bytes: c[from], slots: c[from + 1] };
            pairs.map(class).filter(|class| class.slots > 0).collect()
        };
        Some(Self { lanes: words[0], host: classes(0), guest: classes(2) })
    }
}

const HELLO_MAGIC: [u8; 8] = *b"Drakon\x00\x01";
const HELLO_BYTES: usize = 8 + 4 * (3 + 4 * MAX_SLOT_CLASSES);
/// Memory and pidfd precede the event fds.
const FDS_BEFORE_EVENT_FDS: usize = 2;
const _: () = assert!(FDS_BEFORE_EVENT_FDS + 2 * MAX_LANES as usize <= descriptors::MAX_FDS);

/// A session that waits for its guest.
#[derive(Debug)]
pub struct PendingSession {
    plan: SessionConfig,
    shared: SharedMemory,
    event_fds: Vec<OwnedFd>,
}

/// Creates the shared memory and event fds of a session. The socket is for the guest, which
/// inherits it and calls [`accept`]. The hello is already in it.
///
/// # Errors
/// [`Errno::INVAL`] for a configuration that exceeds its limits, or the error of the system.
pub fn offer(plan: &SessionConfig) -> io::Result<(PendingSession, OwnedFd)> {
    let offer = PendingSession::new(plan)?;
    let me = pidfd_open(getpid(), PidfdFlags::empty())?;
    let socket = offer.send_hello(me.as_fd())?;
    Ok((offer, socket))
}

/// Creates a session of two other processes, given by their pidfds. The sockets are for them: the
/// host calls [`accept_as_host`], the guest [`accept`].
///
/// # Errors
/// As [`offer`].
pub fn broker(
    plan: &SessionConfig,
    host: BorrowedFd<'_>,
    guest: BorrowedFd<'_>,
) -> io::Result<(OwnedFd, OwnedFd)> {
    let offer = PendingSession::new(plan)?;
    Ok((offer.send_hello(guest)?, offer.send_hello(host)?))
}

impl PendingSession {
    fn new(plan: &SessionConfig) -> io::Result<Self> {
        let shared = SharedMemory::new(plan.layout().ok_or(Errno::INVAL)?.len)?;
        let event_fd = |_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let event_fds = (0..plan.lanes * 2).map(event_fd).collect::<io::Result<Vec<_>>>()?;
        Ok(Self { plan: plan.clone(), shared, event_fds })
    }

    /// Returns a socket that holds the hello. `peer` is the pidfd of the recipient's peer.
    fn send_hello(&self, peer: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let before = [self.shared.as_fd(), peer];
        let fds: Vec<_> =
            before.into_iter().chain(self.event_fds.iter().map(OwnedFd::as_fd)).collect();
        descriptors::send_with_fds(&ours, &self.plan.to_bytes(), &fds)?;
        Ok(theirs)
    }

    /// Starts the session with the guest whose pidfd is `peer`.
    pub fn start(self, peer: OwnedFd) -> Arc<Session> {
        Arc::new(Session::new(self.plan, self.shared, self.event_fds, peer, true))
    }
}

/// Joins the session that was offered over `socket`.
///
/// # Errors
/// [`ChannelError::Timeout`], [`ChannelError::Closed`], or the violation in the hello.
pub fn accept(socket: &OwnedFd, deadline: Instant) -> Result<Arc<Session>, ChannelError> {
    accept_session(socket, deadline, false)
}

/// Joins a session as its host, created by a third process with [`broker`].
///
/// # Errors
/// As [`accept`].
pub fn accept_as_host(socket: &OwnedFd, deadline: Instant) -> Result<Arc<Session>, ChannelError> {
    accept_session(socket, deadline, true)
}

fn accept_session(
    socket: &OwnedFd,
    deadline: Instant,
    is_host: bool,
) -> Result<Arc<Session>, ChannelError> {
    let (hello, fds) = receive_hello(socket, deadline)?;
    let plan =
        SessionConfig::from_bytes(&hello).ok_or(Violation::Memory("the hello is malformed"))?;
    let layout = plan.layout().ok_or(Violation::Memory("the plan exceeds its limits"))?;
    let wanted = FDS_BEFORE_EVENT_FDS + plan.lanes as usize * 2;
    if fds.len() != wanted {
        return Err(Violation::Descriptors("another number than the plan needs").into());
    }
    let mut fds = fds.into_iter();
    // Counted above.
    let (Some(memory), Some(peer)) = (fds.next(), fds.next()) else {
        return Err(ChannelError::Closed);
    };
    let event_fds: Vec<_> = fds.collect();
    for bell in &event_fds {
        let flags = rustix::fs::fcntl_getfl(bell);
        if !flags.is_ok_and(|flags| flags.contains(OFlags::NONBLOCK)) {
            return Err(Violation::Descriptors("a bell that can block").into());
        }
    }
    let shared = SharedMemory::map_peer(memory, layout.len)?;
    Ok(Arc::new(Session::new(plan, shared, event_fds, peer, is_host)))
}

fn receive_hello(
    socket: &OwnedFd,
    deadline: Instant,
) -> Result<([u8; HELLO_BYTES], Vec<OwnedFd>), ChannelError> {
    poll_fds(&mut [PollFd::new(socket, PollFlags::IN)], deadline)?;
    let mut hello = [0; HELLO_BYTES];
    let got = descriptors::receive_with_fds(socket, &mut hello, RecvFlags::DONTWAIT)
        .map_err(|_| ChannelError::Closed)?;
    if !got.is_complete {
        return Err(Violation::Descriptors("more than fit a message").into());
    }
    match got.len {
        0 => Err(ChannelError::Closed),
        HELLO_BYTES => Ok((hello, got.fds)),
        n => Err(Violation::Length(n as u32).into()),
    }
}

/// Polls until one of `fds` is ready.
fn poll_fds(fds: &mut [PollFd<'_>], deadline: Instant) -> Result<(), ChannelError> {
    let left = deadline.checked_duration_since(Instant::now()).ok_or(ChannelError::Timeout)?;
    // A timeout too long for a timespec is treated as none.
    let timeout = left.try_into().ok();
    match poll(fds, timeout.as_ref()) {
        Ok(0) => Err(ChannelError::Timeout),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(_) => Err(ChannelError::Closed),
    }
}

/// One side of a session.
pub struct Session {
    plan: SessionConfig,
    shared: Arc<SharedMemory>,
    heap: Arc<Arena>,
    event_fds: Vec<OwnedFd>,
    peer: OwnedFd,
    dead: AtomicBool,
    /// Time of the last successful liveness check, in milliseconds of a coarse clock.
    alive_checked_ms: AtomicU64,
    blame: OnceLock<Violation>,
    kills_violators: AtomicBool,
    /// Number of clients that await a reply.
    awaiting: AtomicUsize,
    /// Lanes whose endpoint of this side exists or existed, one bit a lane.
    taken_lanes: AtomicU64,
    abandoned: Mutex<Vec<AbandonedRequest>>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Session({} lanes, {:?})", self.event_fds.len() / 2, self.heap.usage())
    }
}

impl Session {
    fn new(
        plan: SessionConfig,
        shared: SharedMemory,
        bells: Vec<OwnedFd>,
        peer: OwnedFd,
        host: bool,
    ) -> Self {
        let shared = Arc::new(shared);
        // Callers have checked that the configuration has a layout.
        let layout = plan.layout().expect("the plan was checked");
        let SessionLayout { release_words_at, slots_at, .. } = layout;
        let heap =
            Arena::new(shared.clone(), release_words_at, slots_at, &plan.host, &plan.guest, host);
        Self {
            plan,
            shared,
            heap: Arc::new(heap),
            event_fds: bells,
            peer,
            dead: AtomicBool::new(false),
            alive_checked_ms: AtomicU64::new(0),
            blame: OnceLock::new(),
            kills_violators: AtomicBool::new(false),
            awaiting: AtomicUsize::new(0),
            taken_lanes: AtomicU64::new(0),
            abandoned: Mutex::default(),
        }
    }

    /// Returns the client's endpoint of `lane`, once.
    pub fn client<C: Contract>(self: &Arc<Self>, lane: u32) -> Option<Client<C>> {
        let place = self.take_lane(lane, Sender::Client)?;
        let link = LaneTransport::new::<C>(self, place);
        Some(RawEndpoint::new(Box::new(link), C::TABLE, Sender::Server).into())
    }

    /// Returns the server's endpoint of `lane`, once.
    pub fn server<C: Contract>(self: &Arc<Self>, lane: u32) -> Option<Server<C>> {
        let place = self.take_lane(lane, Sender::Server)?;
        let link = LaneTransport::new::<C>(self, place);
        Some(RawEndpoint::new(Box::new(link), C::TABLE, Sender::Client).into())
    }

    fn take_lane(&self, lane: u32, side: Sender) -> Option<LaneSide> {
        let exists = lane < self.plan.lanes;
        let is_taken = |bit| self.taken_lanes.fetch_or(bit, AcqRel) & bit != 0;
        (exists && !is_taken(1 << lane)).then_some(LaneSide { lane, side })
    }

    /// Allocates a block of `len` bytes that crosses this session without a copy. Its contents are
    /// undefined. `None` if all slots large enough are in use.
    pub fn allocate_block(&self, len: usize) -> Option<Block> {
        self.heap.allocate_block(len)
    }

    /// Registers `memory`, which both sides map and one of them writes. Blocks in it
    /// ([`PagePool`](crate::heap::PagePool)) are passed by offset. Both sides register it once,
    /// before the first such block.
    pub fn register_pool(&self, memory: Arc<SharedMemory>) {
        self.heap.register_pool(memory);
    }

    /// Returns the state of every byte of this side's slots.
    pub fn heap_usage(self: &Arc<Self>) -> HeapUsage {
        self.reclaim_lost();
        self.heap.usage()
    }

    /// Returns true once the peer's death is confirmed.
    pub fn is_dead(&self) -> bool {
        self.dead.load(Acquire)
    }

    /// Returns the first contract violation of the peer, if any.
    pub fn violation(&self) -> Option<Violation> {
        self.blame.get().copied()
    }

    /// Has the peer killed at its first violation. Without this a peer that broke its contract
    /// lives on, and its owner learns of it at the next call.
    pub fn kill_peer_on_violation(&self) {
        self.kills_violators.store(true, Release);
    }

    /// Waits until the peer is dead, for example after it was killed for a violation. Its
    /// attachments have then returned, once the endpoints of this session are dropped.
    ///
    /// # Errors
    /// [`ChannelError::Timeout`].
    pub fn wait_for_death(self: &Arc<Self>, deadline: Instant) -> Result<(), ChannelError> {
        while !self.is_dead() {
            let mut fds = [PollFd::new(&self.peer, PollFlags::IN)];
            poll_fds(&mut fds, deadline)?;
            self.record_death(fds[0].revents());
        }
        self.reclaim_lost();
        Ok(())
    }

    fn record_death(&self, events: PollFlags) {
        if events.contains(PollFlags::IN) {
            self.dead.store(true, Release);
        }
    }

    /// Returns true if the peer is alive as of a few milliseconds ago. A cheap clock decides when
    /// to ask the kernel, because every use of a cached answer calls this.
    fn is_peer_alive(&self) -> bool {
        let now = clock_gettime(ClockId::MonotonicCoarse);
        let now = now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000;
        if now.wrapping_sub(self.alive_checked_ms.load(Relaxed)) >= LIVENESS_CACHE_MS {
            let mut fds = [PollFd::new(&self.peer, PollFlags::IN)];
            // A peer that cannot be polled is not known to be alive.
            let looked = poll(&mut fds, Some(&Timespec::default())).is_ok();
            self.record_death(fds[0].revents());
            if !looked {
                return false;
            }
            self.alive_checked_ms.store(now, Relaxed);
        }
        !self.is_dead()
    }

    fn shared_memory(&self) -> &Arc<SharedMemory> {
        &self.shared
    }

    fn heap(&self) -> &Arc<Arena> {
        &self.heap
    }

    /// Records the first violation; returns it.
    fn record_violation(&self, violation: Violation) -> Violation {
        let first = *self.blame.get_or_init(|| violation);
        if self.kills_violators.load(Acquire) {
            // It may have ended already, which is equivalent.
            let _ = pidfd_send_signal(&self.peer, Signal::KILL);
        }
        first
    }

    fn signal_event_fd(&self, bell: usize) {
        // An event fd whose counter is full is signalled already.
        let _ = io::write(&self.event_fds[bell], &1u64.to_ne_bytes());
    }

    /// Sleeps until event fd `bell` is signalled or the peer dies.
    fn wait_event_fd(&self, bell: usize, deadline: Instant) -> Result<(), ChannelError> {
        let mut fds = [
            PollFd::new(&self.event_fds[bell], PollFlags::IN),
            PollFd::new(&self.peer, PollFlags::IN),
        ];
        poll_fds(&mut fds, deadline)?;
        let [rung, died] = [fds[0].revents(), fds[1].revents()];
        self.record_death(died);
        if rung.contains(PollFlags::IN) {
            // Another thread may have drained it; the read does not block.
            let _ = io::read(&self.event_fds[bell], &mut [0; 8]);
        }
        Ok(())
    }

    fn update_awaiting_count(&self, was: bool, is: bool) {
        match (was, is) {
            (false, true) => self.awaiting.fetch_add(1, AcqRel),
            (true, false) => self.awaiting.fetch_sub(1, AcqRel),
            _ => return,
        };
    }

    fn add_abandoned(&self, orphan: AbandonedRequest) {
        self.abandoned.lock().push(orphan);
    }

    /// Reclaims attachments: late replies, and all slots of a dead peer once no message of it is
    /// left to read.
    fn reclaim_lost(self: &Arc<Self>) {
        // Taken out first: reclaiming drops endpoints, which may reclaim in turn.
        let mut orphans = std::mem::take(&mut *self.abandoned.lock());
        orphans.retain_mut(|orphan| !orphan.try_reclaim(self));
        let mut kept = self.abandoned.lock();
        kept.append(&mut orphans);
        let quiet = kept.is_empty() && self.awaiting.load(Acquire) == 0;
        drop(kept);
        if self.is_dead() && quiet {
            self.heap.reclaim_exported();
        }
    }
}

#[cfg(test)]
mod hostile_tests;
