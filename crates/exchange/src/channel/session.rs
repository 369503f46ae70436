//! A session: everything two processes share, set up once.
//!
//! ```text
//!   host                         socket                          guest
//!   offer ── hello: plan + memory, bells, the host's pidfd ────▶ accept
//!     └─ start(guest's pidfd)
//!
//!   another process: introduce(pidfds) ── a hello each, with the other's pidfd ──▶ both
//!
//!   memory: | lines, two a lane | "let go" words | slots of the host | slots of the guest |
//! ```
//!
//! Law 1: all descriptors pass and all memory is mapped before the first message; after
//! that a session needs `ppoll`, `read` and `write`, and no more.
//! Law 2: the guest maps nothing that is not sealed, sized and laid out as the hello says.
//! Law 3: a peer that breaks the contract once is not listened to again on any lane.
//! Law 4: its slots come home when its pidfd says that it is dead, not before.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*},
    },
    time::Instant,
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    fs::OFlags,
    io::{self, Errno},
    net::{self, AddressFamily, RecvFlags, SocketFlags, SocketType},
    process::{PidfdFlags, getpid, pidfd_open},
    time::{ClockId, clock_gettime},
};

use super::{
    ChannelError, Client, RawEndpoint, Server,
    change_counter::LIVENESS_CACHE_MS,
    lane::{AbandonedRequest, LaneEndpoint, LaneSide, LaneTransport, MAILBOX_STRIDE},
};
use crate::{
    contract::{Contract, Refusal, Violation, fsm::Sender},
    descriptors,
    heap::{
        Block,
        arena::{Arena, Audit, Class, layout_bytes},
    },
    shm::SharedMemory,
};

/// Most lanes of a session: two bells each, and one message passes at most 253 descriptors.
pub const MAX_LANES: u32 = 64;
/// Most classes of slots of each side.
pub const MAX_SLOT_CLASSES: usize = 8;
/// Most bytes of shared memory a guest maps.
pub const MAX_MEMORY_BYTES: usize = 1 << 32;

/// What a session is made of. Its slots are the quota of each side.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionConfig {
    /// Lanes `0..fixed_lanes`: both sides know what contract is spoken on which.
    pub static_lanes: u32,
    /// Lanes for the channels that the host makes.
    pub host_lanes: u32,
    /// Lanes for the channels that the guest makes.
    pub guest_lanes: u32,
    /// Slots that the host hands out.
    pub host: Vec<Class>,
    /// Slots that the guest hands out.
    pub guest: Vec<Class>,
}

impl Default for SessionConfig {
    /// One fixed lane, a few to make, and blocks of 4 KiB to 1 MiB: 4.5 MiB a side.
    fn default() -> Self {
        let classes: Vec<_> = [(4 << 10, 128), (64 << 10, 32), (1 << 20, 2)]
            .map(|(slot_bytes, slots)| Class { slot_bytes, slots })
            .into();
        Self {
            static_lanes: 1,
            host_lanes: 8,
            guest_lanes: 8,
            host: classes.clone(),
            guest: classes,
        }
    }
}

/// Where things lie in the shared memory.
struct SessionLayout {
    release_words_at: usize,
    slots_at: usize,
    len: usize,
}

impl SessionConfig {
    fn lanes(&self) -> u64 {
        u64::from(self.static_lanes) + u64::from(self.host_lanes) + u64::from(self.guest_lanes)
    }

    fn layout(&self) -> Option<SessionLayout> {
        let classes_fit = self.host.len().max(self.guest.len()) <= MAX_SLOT_CLASSES;
        if !classes_fit || self.lanes() > u64::from(MAX_LANES) {
            return None;
        }
        let (words, slots) = layout_bytes(&[&self.host, &self.guest])?;
        let let_go_at = (self.lanes() as usize * 2 * MAILBOX_STRIDE).next_multiple_of(4096);
        let slots_at = let_go_at.checked_add(words)?;
        let len = slots_at.checked_add(slots)?;
        (len > 0 && len <= MAX_MEMORY_BYTES).then_some(SessionLayout {
            release_words_at: let_go_at,
            slots_at,
            len,
        })
    }

    /// The hello's bytes: fixed length, so that nothing needs parsing.
    fn to_bytes(&self) -> [u8; HELLO_BYTES] {
        let counts = [self.static_lanes, self.host_lanes, self.guest_lanes];
        let class = |classes: &[Class], i: usize| {
            classes.get(i).map_or([0, 0], |class| [class.slot_bytes, class.slots])
        };
        let classes = (0..MAX_SLOT_CLASSES)
            .flat_map(|i| class(&self.host, i).into_iter().chain(class(&self.guest, i)));
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        for (into, word) in
            bytes[8..].as_chunks_mut().0.iter_mut().zip(counts.into_iter().chain(classes))
        {
            *into = word.to_le_bytes();
        }
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let words = bytes.strip_prefix(&MAGIC)?.as_chunks().0;
        let words: Vec<_> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        if bytes.len() != HELLO_BYTES {
            return None;
        }
        let classes = |from: usize| {
            let pairs = words[3..].as_chunks::<4>().0.iter();
            let class = |c: &[u32; 4]| Class { slot_bytes: c[from], slots: c[from + 1] };
            pairs.map(class).filter(|class| class.slots > 0).collect()
        };
        Some(Self {
            static_lanes: words[0],
            host_lanes: words[1],
            guest_lanes: words[2],
            host: classes(0),
            guest: classes(2),
        })
    }
}

const MAGIC: [u8; 8] = *b"Drakon\x00\x01";
const HELLO_BYTES: usize = 8 + 4 * (3 + 4 * MAX_SLOT_CLASSES);
/// Memory and pidfd come before the bells.
const FDS_BEFORE_BELLS: usize = 2;
const _: () = assert!(FDS_BEFORE_BELLS + 2 * MAX_LANES as usize <= descriptors::MAX_FDS);

/// A session that waits for its guest.
#[derive(Debug)]
pub struct PendingSession {
    plan: SessionConfig,
    shared: SharedMemory,
    event_fds: Vec<OwnedFd>,
}

/// Makes a session's memory and bells. The socket is the guest's: let it be inherited, and
/// have the guest [`accept`] it. The hello is already in it.
///
/// # Errors
/// [`Errno::INVAL`] for a plan that exceeds its limits, or what the system says.
pub fn offer(plan: &SessionConfig) -> io::Result<(PendingSession, OwnedFd)> {
    let offer = PendingSession::new(plan)?;
    let me = pidfd_open(getpid(), PidfdFlags::empty())?;
    let socket = offer.hello(me.as_fd())?;
    Ok((offer, socket))
}

/// Makes a session of two other processes, of which `host` and `guest` are pidfds. The sockets
/// are theirs: the host takes its one up with [`accept_as_host`], the guest with [`accept`].
///
/// # Errors
/// As [`offer`].
pub fn broker(
    plan: &SessionConfig,
    host: BorrowedFd<'_>,
    guest: BorrowedFd<'_>,
) -> io::Result<(OwnedFd, OwnedFd)> {
    let offer = PendingSession::new(plan)?;
    Ok((offer.hello(guest)?, offer.hello(host)?))
}

impl PendingSession {
    fn new(plan: &SessionConfig) -> io::Result<Self> {
        let shared = SharedMemory::new(plan.layout().ok_or(Errno::INVAL)?.len)?;
        let bell = |_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bells = (0..plan.lanes() * 2).map(bell).collect::<io::Result<Vec<_>>>()?;
        Ok(Self { plan: plan.clone(), shared, event_fds: bells })
    }

    /// A socket with the hello in it, for the one whose peer `peer` is a pidfd of.
    fn hello(&self, peer: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let before = [self.shared.as_fd(), peer];
        let fds: Vec<_> =
            before.into_iter().chain(self.event_fds.iter().map(OwnedFd::as_fd)).collect();
        descriptors::send(&ours, &self.plan.to_bytes(), &fds)?;
        Ok(theirs)
    }

    /// Starts the session with the guest that `peer` is a pidfd of.
    pub fn start(self, peer: OwnedFd) -> Arc<Session> {
        Arc::new(Session::new(self.plan, self.shared, self.event_fds, peer, true))
    }
}

/// Takes up the session that was offered over `socket`.
///
/// # Errors
/// [`ChannelError::Timeout`], [`ChannelError::Closed`], or the violation in the hello.
pub fn accept(socket: &OwnedFd, deadline: Instant) -> Result<Arc<Session>, ChannelError> {
    join(socket, deadline, false)
}

/// Takes up, as its host, a session that a third process made: see [`broker`].
///
/// # Errors
/// As [`accept`].
pub fn accept_as_host(socket: &OwnedFd, deadline: Instant) -> Result<Arc<Session>, ChannelError> {
    join(socket, deadline, true)
}

fn join(socket: &OwnedFd, deadline: Instant, is_host: bool) -> Result<Arc<Session>, ChannelError> {
    let (hello, fds) = receive_hello(socket, deadline)?;
    let plan =
        SessionConfig::from_bytes(&hello).ok_or(Violation::Memory("the hello is malformed"))?;
    let layout = plan.layout().ok_or(Violation::Memory("the plan exceeds its limits"))?;
    let wanted = FDS_BEFORE_BELLS + plan.lanes() as usize * 2;
    if fds.len() != wanted {
        return Err(Violation::Descriptors("another number than the plan needs").into());
    }
    let mut fds = fds.into_iter();
    // Counted above.
    let (Some(memory), Some(peer)) = (fds.next(), fds.next()) else {
        return Err(ChannelError::Closed);
    };
    let bells: Vec<_> = fds.collect();
    for bell in &bells {
        let flags = rustix::fs::fcntl_getfl(bell);
        if !flags.is_ok_and(|flags| flags.contains(OFlags::NONBLOCK)) {
            return Err(Violation::Descriptors("a bell that can block").into());
        }
    }
    let shared = SharedMemory::map_peer(memory, layout.len)?;
    Ok(Arc::new(Session::new(plan, shared, bells, peer, is_host)))
}

fn receive_hello(
    socket: &OwnedFd,
    deadline: Instant,
) -> Result<([u8; HELLO_BYTES], Vec<OwnedFd>), ChannelError> {
    wait_for(&mut [PollFd::new(socket, PollFlags::IN)], deadline)?;
    let mut hello = [0; HELLO_BYTES];
    let got = descriptors::receive(socket, &mut hello, RecvFlags::DONTWAIT)
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
fn wait_for(fds: &mut [PollFd<'_>], deadline: Instant) -> Result<(), ChannelError> {
    let left = deadline.checked_duration_since(Instant::now()).ok_or(ChannelError::Timeout)?;
    // A wait too long for a timespec has no end worth the name.
    let timeout = left.try_into().ok();
    match poll(fds, timeout.as_ref()) {
        Ok(0) => Err(ChannelError::Timeout),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(_) => Err(ChannelError::Closed),
    }
}

/// Which ends of a lane this side holds.
#[derive(Clone, Copy, Default, Debug)]
struct LaneState {
    epoch: u16,
    client: bool,
    server: bool,
    /// The server's end went over to the peer.
    server_sent: bool,
    /// A late reply may still come.
    orphaned: bool,
}

/// One side of what two processes share.
pub struct Session {
    plan: SessionConfig,
    shared: Arc<SharedMemory>,
    heap: Arc<Arena>,
    bells: Vec<OwnedFd>,
    peer: OwnedFd,
    host: bool,
    dead: AtomicBool,
    /// When it was last looked for the peer and it lived, in milliseconds of a coarse clock.
    alive_checked_ms: AtomicU64,
    blame: OnceLock<Violation>,
    /// Clients that have sent and not yet received.
    awaiting: AtomicUsize,
    lanes: Mutex<Vec<LaneState>>,
    orphans: Mutex<Vec<AbandonedRequest>>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Session({} lanes, {:?})", self.bells.len() / 2, self.heap.audit())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
        // A plan without a layout was refused before it came here.
        let layout = plan.layout().expect("the plan was checked");
        let SessionLayout { release_words_at: let_go_at, slots_at, .. } = layout;
        let heap = Arena::new(shared.clone(), let_go_at, slots_at, &plan.host, &plan.guest, host);
        let lanes = vec![LaneState::default(); plan.lanes() as usize];
        Self {
            plan,
            shared,
            heap: Arc::new(heap),
            bells,
            peer,
            host,
            dead: AtomicBool::new(false),
            alive_checked_ms: AtomicU64::new(0),
            blame: OnceLock::new(),
            awaiting: AtomicUsize::new(0),
            lanes: Mutex::new(lanes),
            orphans: Mutex::default(),
        }
    }

    /// The client's end of fixed lane `lane`, once.
    pub fn client<C: Contract>(self: &Arc<Self>, lane: u32) -> Option<Client<C>> {
        let place = self.fixed(lane, Sender::Client)?;
        let link = LaneTransport::new::<C>(self, place);
        Some(RawEndpoint::new(Box::new(link), C::TABLE, Sender::Server).into())
    }

    /// The server's end of fixed lane `lane`, once.
    pub fn server<C: Contract>(self: &Arc<Self>, lane: u32) -> Option<Server<C>> {
        let place = self.fixed(lane, Sender::Server)?;
        Some(LaneEndpoint::new(self, place).server())
    }

    fn fixed(&self, lane: u32, side: Sender) -> Option<LaneSide> {
        let mut lanes = lock(&self.lanes);
        if lane >= self.plan.static_lanes || lanes[lane as usize].epoch != 0 {
            return None;
        }
        let ends = &mut lanes[lane as usize];
        ends.epoch = 1;
        match side {
            Sender::Client => ends.client = true,
            Sender::Server => ends.server = true,
        }
        Some(LaneSide { lane, epoch: 1, side })
    }

    /// A new channel, whose server's end can be sent over this session.
    ///
    /// # Errors
    /// [`Refusal::Quota`] when all lanes of this side are in use.
    pub fn pair<C: Contract>(self: &Arc<Self>) -> Result<(Client<C>, Server<C>), Refusal> {
        self.reclaim_lost();
        let place = self.free_lane().ok_or(Refusal::Quota)?;
        let link = LaneTransport::new::<C>(self, place);
        let client = RawEndpoint::new(Box::new(link), C::TABLE, Sender::Server).into();
        Ok((client, LaneEndpoint::new(self, LaneSide { side: Sender::Server, ..place }).server()))
    }

    fn free_lane(&self) -> Option<LaneSide> {
        let mut lanes = lock(&self.lanes);
        let lane = self.own_lanes().find(|&lane| {
            let ends = lanes[lane as usize];
            let idle = !ends.client && !ends.server && !ends.orphaned;
            let place = LaneSide { lane, epoch: ends.epoch, side: Sender::Client };
            idle && ends.epoch < u16::MAX && (!ends.server_sent || place.peer_closed(self))
        })?;
        let ends = &mut lanes[lane as usize];
        *ends =
            LaneState { epoch: ends.epoch + 1, client: true, server: true, ..LaneState::default() };
        Some(LaneSide { lane, epoch: ends.epoch, side: Sender::Client })
    }

    fn own_lanes(&self) -> std::ops::Range<u32> {
        let SessionConfig { static_lanes: fixed_lanes, host_lanes, guest_lanes, .. } = self.plan;
        let middle = fixed_lanes + host_lanes;
        if self.host { fixed_lanes..middle } else { middle..middle + guest_lanes }
    }

    /// Whether this side makes the channels of `lane`.
    pub(super) fn is_own_lane(&self, lane: u32) -> bool {
        self.own_lanes().contains(&lane)
    }

    /// A block of `len` bytes that crosses this session without a copy. Its contents are
    /// whatever its last owner left. `None` when all slots that would hold it are in use.
    pub fn block(&self, len: usize) -> Option<Block> {
        self.heap.block(len)
    }

    /// Tells of `memory`, which both sides map and one of them writes: blocks that lie in it
    /// ([`PagePool`](crate::heap::PagePool)) cross by their place. Both sides say it once,
    /// before the first.
    pub fn register_pool(&self, memory: Arc<SharedMemory>) {
        self.heap.register_pool(memory);
    }

    /// Where every byte of this side's slots is.
    pub fn audit(self: &Arc<Self>) -> Audit {
        self.reclaim_lost();
        self.heap.audit()
    }

    /// Whether the peer's death is confirmed.
    pub fn is_dead(&self) -> bool {
        self.dead.load(Acquire)
    }

    /// How the peer broke the contract, if it did.
    pub fn violation(&self) -> Option<Violation> {
        self.blame.get().copied()
    }

    /// Waits until the peer is dead: after it was killed for a breach, say. Everything
    /// that was on its way is home then, once the ends of this session were dropped.
    ///
    /// # Errors
    /// [`ChannelError::Timeout`].
    pub fn wait_for_death(self: &Arc<Self>, deadline: Instant) -> Result<(), ChannelError> {
        while !self.is_dead() {
            let mut fds = [PollFd::new(&self.peer, PollFlags::IN)];
            wait_for(&mut fds, deadline)?;
            self.note_death(fds[0].revents());
        }
        self.reclaim_lost();
        Ok(())
    }

    fn note_death(&self, events: PollFlags) {
        if events.contains(PollFlags::IN) {
            self.dead.store(true, Release);
        }
    }

    /// Whether the peer lives, or did some milliseconds ago: what is asked with each use of what
    /// it answered, so a clock that costs little tells when to ask the kernel.
    pub(super) fn is_peer_alive(&self) -> bool {
        let now = clock_gettime(ClockId::MonotonicCoarse);
        let now = now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000;
        if now.wrapping_sub(self.alive_checked_ms.load(Relaxed)) >= LIVENESS_CACHE_MS {
            let mut fds = [PollFd::new(&self.peer, PollFlags::IN)];
            // One that cannot be looked for is not known to live.
            let looked = poll(&mut fds, Some(&Timespec::default())).is_ok();
            self.note_death(fds[0].revents());
            if !looked {
                return false;
            }
            self.alive_checked_ms.store(now, Relaxed);
        }
        !self.is_dead()
    }

    pub(super) fn shared(&self) -> &SharedMemory {
        &self.shared
    }

    pub(super) fn heap(&self) -> &Arc<Arena> {
        &self.heap
    }

    /// Records the first breach; returns it.
    pub(super) fn record_violation(&self, violation: Violation) -> Violation {
        *self.blame.get_or_init(|| violation)
    }

    pub(super) fn signal(&self, bell: usize) {
        // A bell that is full is ringing already.
        let _ = io::write(&self.bells[bell], &1u64.to_ne_bytes());
    }

    /// Sleeps until `bell` rings or the peer dies.
    pub(super) fn wait(&self, bell: usize, deadline: Instant) -> Result<(), ChannelError> {
        let mut fds =
            [PollFd::new(&self.bells[bell], PollFlags::IN), PollFd::new(&self.peer, PollFlags::IN)];
        wait_for(&mut fds, deadline)?;
        let [rung, died] = [fds[0].revents(), fds[1].revents()];
        self.note_death(died);
        if rung.contains(PollFlags::IN) {
            // It may have been drained meanwhile; it does not block.
            let _ = io::read(&self.bells[bell], &mut [0; 8]);
        }
        Ok(())
    }

    pub(super) fn count_awaiting(&self, was: bool, is: bool) {
        match (was, is) {
            (false, true) => self.awaiting.fetch_add(1, AcqRel),
            (true, false) => self.awaiting.fetch_sub(1, AcqRel),
            _ => return,
        };
    }

    /// The server's end of the named lane went over.
    pub(super) fn on_endpoint_sent(&self, name: u32) {
        let mut lanes = lock(&self.lanes);
        if let Some(ends) = lanes.get_mut((name & 0xffff) as usize) {
            ends.server = false;
            ends.server_sent = true;
        }
    }

    /// The server's end of the named lane came over.
    pub(super) fn on_endpoint_received(&self, name: u32) -> Result<LaneSide, Violation> {
        let (lane, epoch) = (name & 0xffff, (name >> 16) as u16);
        let mut lanes = lock(&self.lanes);
        let fixed = lane < self.plan.static_lanes;
        let ends = lanes.get_mut(lane as usize).filter(|_| !fixed).ok_or(Violation::Lane(lane))?;
        let good = if self.is_own_lane(lane) {
            ends.server_sent && ends.epoch == epoch
        } else {
            !ends.server && epoch >= ends.epoch && epoch > 0
        };
        if !good {
            return Err(Violation::Lane(lane));
        }
        ends.epoch = epoch;
        ends.server = true;
        ends.server_sent = false;
        Ok(LaneSide { lane, epoch, side: Sender::Server })
    }

    /// The server's end of the named lane never went over.
    pub(super) fn on_endpoint_returned(&self, name: u32) -> Result<LaneSide, Violation> {
        let (lane, epoch) = (name & 0xffff, (name >> 16) as u16);
        let mut lanes = lock(&self.lanes);
        match lanes.get_mut(lane as usize) {
            Some(ends) if ends.server_sent && ends.epoch == epoch => {
                ends.server = true;
                ends.server_sent = false;
                Ok(LaneSide { lane, epoch, side: Sender::Server })
            }
            _ => Err(Violation::Lane(lane)),
        }
    }

    pub(super) fn on_endpoint_dropped(&self, place: LaneSide) {
        let ends = &mut lock(&self.lanes)[place.lane as usize];
        match place.side {
            Sender::Client => ends.client = false,
            Sender::Server => ends.server = false,
        }
    }

    pub(super) fn add_abandoned(&self, orphan: AbandonedRequest) {
        lock(&self.lanes)[orphan.lane() as usize].orphaned = true;
        lock(&self.orphans).push(orphan);
    }

    /// Brings home what can come home: late replies, and all of a dead peer's slots once
    /// no message of it is left to read.
    pub(super) fn reclaim_lost(self: &Arc<Self>) {
        // Taken out first: settling drops ends, which settle in their turn.
        let mut orphans = std::mem::take(&mut *lock(&self.orphans));
        orphans.retain_mut(|orphan| {
            let settled = orphan.try_reclaim(self);
            if settled {
                lock(&self.lanes)[orphan.lane() as usize].orphaned = false;
            }
            !settled
        });
        let mut kept = lock(&self.orphans);
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
