//! The channel between processes: two lines of shared memory and two bells.
//!
//! ```text
//!   line: | head: seq, epoch, tag, len | payload .. |  written by one side only
//!         | asleep (receiver) · closed, fingerprint, how often told (sender) |
//! ```
//!
//! Law 1: a line holds one message; the contract's alternation is what empties it, so
//! there is no shared index for a peer to bend.
//! Law 2: a message is copied once, then judged; the shared bytes are not looked at again.
//! Law 3: what a lost message carried is found again: a reply without a waiter
//! is drained, an unread request is taken back, the rest returns with the
//! peer's death.

use std::{
    sync::{Arc, OnceLock, atomic::Ordering::*},
    time::Instant,
};

use super::{Core, Link, Lost, Server, Teller, Turn, process::Session, spin::Spin};
use crate::{
    contract::{
        Contract, Violation,
        fsm::Sender,
        wire::{GoodsIn, GoodsOut, LINE_BYTES, LaneName, Packer, Unpacker, Wire},
    },
    heap::{Block, arena::BlockName},
};

/// Bytes from one line to the next; an odd number of pairs of cache lines.
pub(super) const LINE_STRIDE: usize = 17 * 128;
pub(super) const PAYLOAD_AT: usize = 8;
const ASLEEP_AT: usize = 2048;
const CLOSED_AT: usize = 2112;
pub(super) const FINGERPRINT_AT: usize = 2120;
pub(super) const TOLD_AT: usize = 2128;
const _: () = assert!(PAYLOAD_AT + LINE_BYTES <= ASLEEP_AT && TOLD_AT + 8 <= LINE_STRIDE);

/// More rings than this without a message, in one receive, are an attack.
const RINGS_MAX: u32 = 100_000;

/// The first word of a line: everything that must change at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Head {
    pub(super) seq: u16,
    pub(super) epoch: u16,
    pub(super) tag: u16,
    pub(super) len: u16,
}

impl Head {
    pub(super) fn to_bits(self) -> u64 {
        let Self { seq, epoch, tag, len } = self;
        u64::from(seq) << 48 | u64::from(epoch) << 32 | u64::from(tag) << 16 | u64::from(len)
    }

    fn from_bits(bits: u64) -> Self {
        let part = |shift: u32| (bits >> shift) as u16;
        Self { seq: part(48), epoch: part(32), tag: part(16), len: part(0) }
    }
}

/// What the word `closed` holds once a side has closed: how much it had read by then.
fn closed_bits(epoch: u16, got: u16) -> u64 {
    1 << 63 | u64::from(epoch) << 16 | u64::from(got)
}

/// What the peer wrote when it closed: how many of our messages it had read.
fn closed_word(place: Place, session: &Session) -> Option<u16> {
    let at = place.incoming() * LINE_STRIDE + CLOSED_AT;
    let bits = session.shared().long(at).load(SeqCst);
    (bits >> 16 == closed_bits(place.epoch, 0) >> 16).then_some(bits as u16)
}

/// Which end of a lane, and so which of its two lines is which.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    pub(super) lane: u32,
    pub(super) epoch: u16,
    pub(super) side: Sender,
}

impl Place {
    /// Number of the line this end writes; also of the bell it rings.
    fn out(self) -> usize {
        self.lane as usize * 2 + usize::from(self.side == Sender::Server)
    }

    /// Number of the line this end reads; also of the bell it waits for.
    fn incoming(self) -> usize {
        self.lane as usize * 2 + usize::from(self.side == Sender::Client)
    }

    /// Whether the peer says that it closed its end.
    pub(super) fn peer_closed(self, session: &Session) -> bool {
        closed_word(self, session).is_some()
    }

    pub(super) fn name(self) -> u32 {
        u32::from(self.epoch) << 16 | self.lane
    }
}

/// The reading half: no message types, so that it can outlive its link.
pub(super) struct Reader {
    place: Place,
    line_at: usize,
    received: u16,
    fingerprint: u64,
    copy: Box<[u8; LINE_BYTES]>,
}

impl Reader {
    fn new(place: Place, fingerprint: u64) -> Self {
        let line_at = place.incoming() * LINE_STRIDE;
        Self { place, line_at, received: 0, fingerprint, copy: Box::new([0; LINE_BYTES]) }
    }

    /// The head of a message that was not taken yet.
    fn look(&self, session: &Session) -> Result<Option<Head>, Violation> {
        // Sequentially consistent: a sleeper looks after it has said that it sleeps.
        let head = Head::from_bits(session.shared().long(self.line_at).load(SeqCst));
        if head.epoch != self.place.epoch || head.seq == self.received {
            return Ok(None);
        }
        if head.seq != self.received.wrapping_add(1) {
            return Err(Violation::Turn);
        }
        if usize::from(head.len) > LINE_BYTES {
            return Err(Violation::Length(head.len.into()));
        }
        Ok(Some(head))
    }

    fn closed(&self, session: &Session) -> Option<u16> {
        closed_word(self.place, session)
    }

    /// Copies the message out, so that its sender cannot change it any more.
    fn take(&mut self, session: &Session, head: Head) -> Result<(), Violation> {
        let shared = session.shared();
        if self.received == 0 {
            let theirs = shared.long(self.line_at + FINGERPRINT_AT).load(Relaxed);
            if theirs != self.fingerprint {
                return Err(Violation::Fingerprint);
            }
        }
        let words = usize::from(head.len).div_ceil(8);
        for (i, into) in self.copy.as_chunks_mut::<8>().0[..words].iter_mut().enumerate() {
            *into = shared.long(self.line_at + PAYLOAD_AT + i * 8).load(Relaxed).to_ne_bytes();
        }
        self.received = head.seq;
        Ok(())
    }

    fn unpack<Rx: Wire>(&self, session: &Arc<Session>, head: Head) -> Result<Rx, Violation> {
        let mut goods = Arrived { session };
        let mut unpacker = Unpacker::new(&self.copy[..usize::from(head.len)], &mut goods);
        // The table has admitted the tag, so it is below 256.
        let message = Rx::unpack(head.tag as u8, &mut unpacker)?;
        unpacker.finish()?;
        Ok(message)
    }
}

/// A request whose client has gone: its goods must still come home, in a late reply or,
/// if it stays unread, out of its own line.
pub(super) struct Orphan {
    reader: Reader,
    awaits: Turn,
    request: Sent,
    reclaim: Reclaim,
}

/// A message as it was packed.
struct Sent {
    head: Head,
    bytes: Box<[u8; LINE_BYTES]>,
}

impl Orphan {
    pub(super) fn lane(&self) -> u32 {
        self.reader.place.lane
    }

    /// Looks for the reply; whether there is nothing more to wait for.
    pub(super) fn settle(&mut self, session: &Arc<Session>) -> bool {
        // Read before looking: a reply that was sent before closing is there.
        let closed = self.reader.closed(session);
        match (self.reader.look(session), closed) {
            (Ok(Some(head)), _) => {
                let admitted = self.awaits.admit(head.tag.into()).is_ok();
                if admitted && self.reader.take(session, head).is_ok() {
                    (self.reclaim.drain)(&self.reader, session, head);
                }
                true
            }
            (Ok(None), Some(got)) => {
                if got != self.request.head.seq {
                    self.reclaim.take_back(session, &self.request);
                }
                true
            }
            (Ok(None), None) => session.is_dead(),
            (Err(_), _) => true,
        }
    }
}

/// One end of a lane, as a link.
pub(super) struct LaneLink {
    session: Arc<Session>,
    reader: Reader,
    out_at: usize,
    /// The last message, to take it back should it stay unread.
    sent: Sent,
    failed: Option<Lost>,
    /// The turn in which an answer is awaited.
    awaits: Option<Turn>,
    spin: Spin,
    table: &'static crate::contract::fsm::Fsm,
    /// Knows the types of the messages, to reclaim their goods.
    reclaim: Reclaim,
    given: bool,
    teller: OnceLock<Teller>,
}

/// How to reclaim the goods of messages whose types are known to the link only.
#[derive(Clone, Copy)]
struct Reclaim {
    drain: fn(&Reader, &Arc<Session>, Head),
    unsend: fn(&Arc<Session>, &[u8], Head),
}

impl Reclaim {
    fn take_back(self, session: &Arc<Session>, sent: &Sent) {
        (self.unsend)(session, &sent.bytes[..usize::from(sent.head.len)], sent.head);
    }

    fn of<Tx: Wire, Rx: Wire>() -> Self {
        Self {
            drain: |reader, session, head| drop(reader.unpack::<Rx>(session, head)),
            unsend: |session, bytes, head| {
                let mut goods = NeverSent { session };
                drop(Tx::unpack(head.tag as u8, &mut Unpacker::new(bytes, &mut goods)));
            },
        }
    }
}

impl LaneLink {
    pub(super) fn new<C: Contract>(session: &Arc<Session>, place: Place) -> Self {
        // One message a line: a contract that queues more does not fit a lane.
        const { assert!(C::QUEUE == 1, "a lane holds one message each way") };
        let out_at = place.out() * LINE_STRIDE;
        session.shared().long(out_at + FINGERPRINT_AT).store(C::FINGERPRINT, Relaxed);
        Self {
            session: session.clone(),
            reader: Reader::new(place, C::FINGERPRINT),
            out_at,
            sent: Sent {
                head: Head { seq: 0, epoch: place.epoch, tag: 0, len: 0 },
                bytes: Box::new([0; LINE_BYTES]),
            },
            failed: None,
            awaits: None,
            spin: Spin::new(),
            table: C::TABLE,
            reclaim: match place.side {
                Sender::Client => Reclaim::of::<C::ToServer, C::ToClient>(),
                Sender::Server => Reclaim::of::<C::ToClient, C::ToServer>(),
            },
            given: false,
            teller: OnceLock::new(),
        }
    }

    fn place(&self) -> Place {
        self.reader.place
    }

    fn write(&self) {
        let shared = self.session.shared();
        let Sent { head, bytes } = &self.sent;
        let words = usize::from(head.len).div_ceil(8);
        for (i, word) in bytes.as_chunks::<8>().0[..words].iter().enumerate() {
            let at = self.out_at + PAYLOAD_AT + i * 8;
            shared.long(at).store(u64::from_ne_bytes(*word), Relaxed);
        }
        shared.long(self.out_at).store(head.to_bits(), SeqCst);
        self.wake();
    }

    fn wake(&self) {
        if self.session.shared().word(self.out_at + ASLEEP_AT).load(SeqCst) != 0 {
            self.session.ring(self.place().out());
        }
    }

    /// Whether `receive` has something to tell.
    fn ready(&self) -> bool {
        !matches!(self.reader.look(&self.session), Ok(None))
            || self.reader.closed(&self.session).is_some()
    }

    fn sleep(&self, deadline: Instant) -> Result<(), Lost> {
        let asleep = self.session.shared().word(self.reader.line_at + ASLEEP_AT);
        asleep.store(1, SeqCst);
        let result = self.sleep_until_ready(deadline);
        asleep.store(0, Relaxed);
        result
    }

    fn sleep_until_ready(&self, deadline: Instant) -> Result<(), Lost> {
        for _ in 0..RINGS_MAX {
            if self.ready() || self.session.is_dead() || self.session.blame().is_some() {
                return Ok(());
            }
            self.session.wait(self.place().incoming(), deadline)?;
        }
        Err(self.session.accuse(Violation::Flood).into())
    }

    /// The message that is there, if any, judged.
    fn take<Rx: Wire>(&mut self, turn: &Turn) -> Result<Option<Rx>, Violation> {
        let Some(head) = self.reader.look(&self.session)? else { return Ok(None) };
        self.reader.take(&self.session, head)?;
        turn.admit(head.tag.into())?;
        self.reader.unpack(&self.session, head).map(Some)
    }

    fn set_awaiting(&mut self, turn: Option<Turn>) {
        self.session.count_awaiting(self.awaits.is_some(), turn.is_some());
        self.awaits = turn;
    }
}

impl<Tx: Wire, Rx: Wire> Link<Tx, Rx> for LaneLink {
    fn send(&mut self, message: Tx) {
        let tag = message.tag();
        let mut goods = Leaving { session: &self.session, failed: None };
        let mut packer = Packer::new(&mut self.sent.bytes, &mut goods);
        message.pack(&mut packer);
        // A line is shorter than 2^16 bytes.
        let len = packer.used() as u16;
        self.failed = goods.failed;
        self.sent.head.tag = tag.into();
        self.sent.head.len = len;
        if self.failed.is_some() {
            self.reclaim.take_back(&self.session, &self.sent);
            return;
        }
        self.sent.head.seq = self.sent.head.seq.wrapping_add(1);
        if self.place().side == Sender::Client {
            // One step per message, in the messages' order.
            let state = self.table.steps[usize::from(tag)].to;
            let turn = Turn { table: self.table, state, peer: Sender::Server };
            self.set_awaiting(Some(turn));
        }
        self.write();
    }

    fn receive(&mut self, turn: &Turn, deadline: Instant) -> Result<Rx, Lost> {
        if let Some(lost) = self.failed {
            return Err(lost);
        }
        loop {
            if let Some(violation) = self.session.blame() {
                return Err(violation.into());
            }
            // Read before looking: what was said before closing or dying is still heard.
            let gone = self.reader.closed(&self.session).is_some() || self.session.is_dead();
            match self.take(turn) {
                Ok(Some(message)) => {
                    self.set_awaiting(None);
                    return Ok(message);
                }
                Ok(None) if gone => return Err(Lost::Closed),
                Ok(None) => Link::<Tx, Rx>::wait(self, deadline)?,
                Err(violation) => return Err(self.session.accuse(violation).into()),
            }
        }
    }

    fn wait(&mut self, deadline: Instant) -> Result<(), Lost> {
        let mut spin = std::mem::take(&mut self.spin);
        let there = spin.until(|| self.ready());
        self.spin = spin;
        if there { Ok(()) } else { self.sleep(deadline) }
    }

    fn told(&self) -> Result<Option<u64>, Lost> {
        if let Some(violation) = self.session.blame() {
            return Err(violation.into());
        }
        if self.reader.closed(&self.session).is_some() || !self.session.lives() {
            return Err(Lost::Closed);
        }
        let told = self.session.shared().long(self.reader.line_at + TOLD_AT).load(Acquire);
        // What an end before this one told is nothing.
        Ok(Some(told).filter(|told| told >> 48 == u64::from(self.place().epoch)))
    }

    fn teller(&self) -> Teller {
        let at = self.out_at + TOLD_AT;
        let first = u64::from(self.place().epoch) << 48;
        self.teller.get_or_init(|| Teller::of_lane(&self.session, at, first)).clone()
    }

    fn give(mut self: Box<Self>) -> Option<LaneName> {
        let unused = self.sent.head.seq == 0 && self.reader.received == 0;
        if self.place().side == Sender::Client || !unused {
            return None;
        }
        self.given = true;
        let name = self.place().name();
        Some(LaneName { session: Arc::as_ptr(&self.session) as usize, lane: name })
    }
}

impl Drop for LaneLink {
    fn drop(&mut self) {
        if self.given {
            return;
        }
        if let Some(teller) = self.teller.get() {
            teller.close();
        }
        let session = self.session.clone();
        // A request that arrived and was not looked at: its goods go home.
        if self.place().side == Sender::Server
            && let Ok(Some(head)) = self.reader.look(&session)
            && usize::from(head.tag) < self.table.messages.len()
            && self.reader.take(&session, head).is_ok()
        {
            (self.reclaim.drain)(&self.reader, &session, head);
        }
        // Its maker uses a lane again once the server says that it closed: by then our
        // own table must say so, too.
        if self.place().side == Sender::Server {
            session.end_dropped(self.place());
        }
        let bits = closed_bits(self.place().epoch, self.reader.received);
        session.shared().long(self.out_at + CLOSED_AT).store(bits, SeqCst);
        self.wake();
        if self.awaits.is_some() {
            self.leave_orphan();
        }
        self.set_awaiting(None);
        // And not before a late reply has an owner that looks for it.
        if self.place().side == Sender::Client {
            session.end_dropped(self.place());
        }
        session.settle();
    }
}

impl LaneLink {
    /// Leaves the request to the session, which looks for its late reply.
    fn leave_orphan(&mut self) {
        let Some(awaits) = self.awaits else { return };
        let place = self.place();
        let reader = std::mem::replace(&mut self.reader, Reader::new(place, 0));
        let head = self.sent.head;
        let bytes = std::mem::replace(&mut self.sent.bytes, Box::new([0; LINE_BYTES]));
        let request = Sent { head, bytes };
        self.session.adopt(Orphan { reader, awaits, request, reclaim: self.reclaim });
    }
}

/// An end that arrived in a message.
pub struct LaneEnd {
    session: Arc<Session>,
    place: Place,
}

impl LaneEnd {
    pub(super) fn new(session: &Arc<Session>, place: Place) -> Self {
        Self { session: session.clone(), place }
    }

    /// The server's end of contract `C`.
    pub fn server<C: Contract>(self) -> Server<C> {
        let link = LaneLink::new::<C>(&self.session, self.place);
        Core::new(Box::new(link), C::TABLE, Sender::Client).into()
    }
}

/// No block, on the wire: there was no room for it, and the message is not sent.
const NO_BLOCK: BlockName = BlockName { slot: u32::MAX, generation: 0, len: 0 };
const NO_LANE: u32 = u32::MAX;

/// Gives the goods of a message away.
struct Leaving<'a> {
    session: &'a Arc<Session>,
    failed: Option<Lost>,
}

impl GoodsOut for Leaving<'_> {
    fn block(&mut self, block: Block) -> BlockName {
        self.session.heap().give(block).unwrap_or_else(|| {
            self.failed = Some(Lost::NoRoom);
            NO_BLOCK
        })
    }

    fn end(&mut self, lane: Option<LaneName>) -> u32 {
        match lane {
            Some(name) if name.session == Arc::as_ptr(self.session) as usize => {
                self.session.end_given(name.lane);
                name.lane
            }
            // An end of another session, or one in use: it cannot go over this one.
            _ => {
                self.failed = Some(Lost::Closed);
                NO_LANE
            }
        }
    }
}

/// Claims the goods of a message that arrived.
struct Arrived<'a> {
    session: &'a Arc<Session>,
}

impl GoodsIn for Arrived<'_> {
    fn block(&mut self, name: BlockName) -> Result<Block, Violation> {
        self.session.heap().arrived(name)
    }

    fn end(&mut self, lane: u32) -> Result<LaneEnd, Violation> {
        let place = self.session.end_arrived(lane)?;
        Ok(LaneEnd::new(self.session, place))
    }
}

/// Takes the goods back of an unread message.
struct NeverSent<'a> {
    session: &'a Arc<Session>,
}

impl GoodsIn for NeverSent<'_> {
    fn block(&mut self, name: BlockName) -> Result<Block, Violation> {
        let taken = self.session.heap().take_back(name);
        // What is not there to be taken back was never given.
        Ok(taken.map_or_else(|| Block::private(0), Block::from))
    }

    fn end(&mut self, lane: u32) -> Result<LaneEnd, Violation> {
        let place = self.session.end_taken_back(lane)?;
        Ok(LaneEnd::new(self.session, place))
    }
}
