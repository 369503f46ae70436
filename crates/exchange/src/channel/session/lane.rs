//! The channel between processes: two mailboxes in shared memory and two event fds.
//!
//! ```text
//!   mailbox: | head: seq, epoch, tag, len | payload .. |  written by one side only
//!            | sleeping (receiver) · closed, fingerprint, change counter (sender) |
//! ```
//!
//! Law 1: a mailbox holds one message. The contract's alternation empties it, so no shared index
//! exists that a peer could corrupt.
//! Law 2: a message is copied once, then validated; the shared bytes are not read again.
//! Law 3: attachments of a lost message are recovered. A reply without a waiter is drained, an
//! unread request is taken back, the rest returns with the peer's death.

use std::{
    sync::{Arc, OnceLock, atomic::Ordering::*},
    time::Instant,
};

use super::Session;
use crate::{
    channel::{ChangeNotifier, ChannelError, ExpectedState, Transport, busy_poll::SpinBudget},
    contract::{
        Contract, Violation,
        fsm::Sender,
        wire::{ExportAttachments, ImportAttachments, MAX_MESSAGE_BYTES, Packer, Unpacker, Wire},
    },
    heap::arena::BlockName,
};
use draconis_types::Block;

/// Distance of two mailboxes in bytes; an odd number of pairs of cache lines.
pub(super) const MAILBOX_STRIDE: usize = 17 * 128;
pub(super) const PAYLOAD_OFFSET: usize = 8;
const SLEEPING_FLAG_OFFSET: usize = 2048;
const CLOSED_WORD_OFFSET: usize = 2112;
pub(super) const FINGERPRINT_OFFSET: usize = 2120;
pub(super) const CHANGE_COUNT_OFFSET: usize = 2128;
const _: () = assert!(
    PAYLOAD_OFFSET + MAX_MESSAGE_BYTES <= SLEEPING_FLAG_OFFSET
        && CHANGE_COUNT_OFFSET + 8 <= MAILBOX_STRIDE
);

/// Epoch in every message and closing of a lane: its endpoints are created once.
const EPOCH: u16 = 1;

/// Maximum wake-ups without a message in one receive; more are an attack.
const MAX_EMPTY_WAKEUPS: u32 = 100_000;

/// First word of a mailbox: the fields that must change atomically.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct MailboxHeader {
    pub(super) seq: u16,
    pub(super) epoch: u16,
    pub(super) tag: u16,
    pub(super) len: u16,
}

impl MailboxHeader {
    pub(super) fn to_bits(self) -> u64 {
        let Self { seq, epoch, tag, len } = self;
        u64::from(seq) << 48 | u64::from(epoch) << 32 | u64::from(tag) << 16 | u64::from(len)
    }

    fn from_bits(bits: u64) -> Self {
        let part = |shift: u32| (bits >> shift) as u16;
        Self { seq: part(48), epoch: part(32), tag: part(16), len: part(0) }
    }
}

/// Word `closed` of a side that has closed, without the number of messages it had read.
const CLOSED_WORD: u64 = 1 << 63 | (EPOCH as u64) << 16;

/// Returns how many of our messages the peer had read when it closed.
fn peer_read_count_at_close(place: LaneSide, session: &Session) -> Option<u16> {
    let at = place.incoming_mailbox() * MAILBOX_STRIDE + CLOSED_WORD_OFFSET;
    let bits = session.shared_memory().atomic_u64(at).load(SeqCst);
    (bits >> 16 == CLOSED_WORD >> 16).then_some(bits as u16)
}

/// A side of a lane; it determines which of the two mailboxes it writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LaneSide {
    pub(super) lane: u32,
    pub(super) side: Sender,
}

impl LaneSide {
    /// Returns the index of the mailbox this side writes, and of the event fd it signals.
    fn outgoing_mailbox(self) -> usize {
        self.lane as usize * 2 + usize::from(self.side == Sender::Server)
    }

    /// Returns the index of the mailbox this side reads, and of the event fd it waits for.
    fn incoming_mailbox(self) -> usize {
        self.lane as usize * 2 + usize::from(self.side == Sender::Client)
    }
}

/// The receiving half. It has no message types, so that it can outlive its transport.
pub(super) struct LaneReceiver {
    place: LaneSide,
    line_at: usize,
    received: u16,
    fingerprint: u64,
    copy: Box<[u8; MAX_MESSAGE_BYTES]>,
}

impl LaneReceiver {
    fn new(place: LaneSide, fingerprint: u64) -> Self {
        let line_at = place.incoming_mailbox() * MAILBOX_STRIDE;
        Self { place, line_at, received: 0, fingerprint, copy: Box::new([0; MAX_MESSAGE_BYTES]) }
    }

    /// Returns the head of an unread message.
    fn peek(&self, session: &Session) -> Result<Option<MailboxHeader>, Violation> {
        // Sequentially consistent: a receiver polls after it has set its sleeping flag.
        let head =
            MailboxHeader::from_bits(session.shared_memory().atomic_u64(self.line_at).load(SeqCst));
        if head.epoch != EPOCH || head.seq == self.received {
            return Ok(None);
        }
        if head.seq != self.received.wrapping_add(1) {
            return Err(Violation::Turn);
        }
        if usize::from(head.len) > MAX_MESSAGE_BYTES {
            return Err(Violation::Length(head.len.into()));
        }
        Ok(Some(head))
    }

    fn peer_read_count(&self, session: &Session) -> Option<u16> {
        peer_read_count_at_close(self.place, session)
    }

    /// Copies the message out, so that its sender can no longer change it.
    fn copy_message(&mut self, session: &Session, head: MailboxHeader) -> Result<(), Violation> {
        let shared = session.shared_memory();
        if self.received == 0 {
            let theirs = shared.atomic_u64(self.line_at + FINGERPRINT_OFFSET).load(Relaxed);
            if theirs != self.fingerprint {
                return Err(Violation::Fingerprint);
            }
        }
        let words = usize::from(head.len).div_ceil(8);
        for (i, into) in self.copy.as_chunks_mut::<8>().0[..words].iter_mut().enumerate() {
            *into = shared
                .atomic_u64(self.line_at + PAYLOAD_OFFSET + i * 8)
                .load(Relaxed)
                .to_ne_bytes();
        }
        self.received = head.seq;
        Ok(())
    }

    fn unpack<Rx: Wire>(
        &self,
        session: &Arc<Session>,
        head: MailboxHeader,
    ) -> Result<Rx, Violation> {
        let mut attachments = AttachmentReceiver { session };
        let mut unpacker = Unpacker::new(&self.copy[..usize::from(head.len)], &mut attachments);
        // The table has allowed the tag, so it is below 256.
        let message = Rx::unpack(head.tag as u8, &mut unpacker)?;
        unpacker.finish()?;
        Ok(message)
    }
}

/// A request whose client is gone. Its attachments return in a late reply or, if it stays unread,
/// from its own mailbox.
pub(super) struct AbandonedRequest {
    reader: LaneReceiver,
    awaits: ExpectedState,
    request: SentMessage,
    reclaim: ReclaimOps,
}

/// A packed copy of a sent message.
struct SentMessage {
    head: MailboxHeader,
    bytes: Box<[u8; MAX_MESSAGE_BYTES]>,
}

impl AbandonedRequest {
    /// Checks for the reply; returns true once nothing is left to wait for.
    pub(super) fn try_reclaim(&mut self, session: &Arc<Session>) -> bool {
        // Read before polling: a reply that was sent before closing is then visible.
        let closed = self.reader.peer_read_count(session);
        match (self.reader.peek(session), closed) {
            (Ok(Some(head)), _) => {
                let admitted = self.awaits.next_state(head.tag.into()).is_ok();
                if admitted && self.reader.copy_message(session, head).is_ok() {
                    (self.reclaim.drop_received)(&self.reader, session, head);
                }
                true
            }
            (Ok(None), Some(got)) => {
                if got != self.request.head.seq {
                    self.reclaim.reclaim_unread_message(session, &self.request);
                }
                true
            }
            (Ok(None), None) => session.is_dead(),
            (Err(_), _) => true,
        }
    }
}

/// Transport over one side of a lane.
pub(super) struct LaneTransport {
    session: Arc<Session>,
    reader: LaneReceiver,
    out_at: usize,
    /// Last message, to take it back if it stays unread.
    sent: SentMessage,
    failed: Option<ChannelError>,
    /// Expected state while a reply is awaited.
    awaits: Option<ExpectedState>,
    spin: SpinBudget,
    table: &'static crate::contract::fsm::Fsm,
    /// Type-aware functions that reclaim attachments.
    reclaim: ReclaimOps,
    teller: OnceLock<ChangeNotifier>,
}

/// Functions that reclaim the attachments of messages whose types only the transport knows.
#[derive(Clone, Copy)]
struct ReclaimOps {
    drop_received: fn(&LaneReceiver, &Arc<Session>, MailboxHeader),
    cancel_send: fn(&Arc<Session>, &[u8], MailboxHeader),
}

impl ReclaimOps {
    fn reclaim_unread_message(self, session: &Arc<Session>, sent: &SentMessage) {
        (self.cancel_send)(session, &sent.bytes[..usize::from(sent.head.len)], sent.head);
    }

    fn for_messages<Tx: Wire, Rx: Wire>() -> Self {
        Self {
            drop_received: |reader, session, head| drop(reader.unpack::<Rx>(session, head)),
            cancel_send: |session, bytes, head| {
                let mut attachments = AttachmentReturner { session };
                drop(Tx::unpack(head.tag as u8, &mut Unpacker::new(bytes, &mut attachments)));
            },
        }
    }
}

impl LaneTransport {
    pub(super) fn new<C: Contract>(session: &Arc<Session>, place: LaneSide) -> Self {
        // One message per mailbox: a contract that queues more does not fit a lane.
        const { assert!(C::QUEUE == 1, "a lane holds one message each way") };
        let out_at = place.outgoing_mailbox() * MAILBOX_STRIDE;
        session
            .shared_memory()
            .atomic_u64(out_at + FINGERPRINT_OFFSET)
            .store(C::FINGERPRINT, Relaxed);
        Self {
            session: session.clone(),
            reader: LaneReceiver::new(place, C::FINGERPRINT),
            out_at,
            sent: SentMessage {
                head: MailboxHeader { seq: 0, epoch: EPOCH, tag: 0, len: 0 },
                bytes: Box::new([0; MAX_MESSAGE_BYTES]),
            },
            failed: None,
            awaits: None,
            spin: SpinBudget::new(),
            table: C::TABLE,
            reclaim: match place.side {
                Sender::Client => ReclaimOps::for_messages::<C::ToServer, C::ToClient>(),
                Sender::Server => ReclaimOps::for_messages::<C::ToClient, C::ToServer>(),
            },
            teller: OnceLock::new(),
        }
    }

    fn lane_side(&self) -> LaneSide {
        self.reader.place
    }

    fn write_mailbox(&self) {
        let shared = self.session.shared_memory();
        let SentMessage { head, bytes } = &self.sent;
        let words = usize::from(head.len).div_ceil(8);
        for (i, word) in bytes.as_chunks::<8>().0[..words].iter().enumerate() {
            let at = self.out_at + PAYLOAD_OFFSET + i * 8;
            shared.atomic_u64(at).store(u64::from_ne_bytes(*word), Relaxed);
        }
        shared.atomic_u64(self.out_at).store(head.to_bits(), SeqCst);
        self.signal_peer();
    }

    fn signal_peer(&self) {
        if self.session.shared_memory().atomic_u32(self.out_at + SLEEPING_FLAG_OFFSET).load(SeqCst)
            != 0
        {
            self.session.signal_event_fd(self.lane_side().outgoing_mailbox());
        }
    }

    /// Returns true if `receive` would return at once.
    fn is_ready(&self) -> bool {
        !matches!(self.reader.peek(&self.session), Ok(None))
            || self.reader.peer_read_count(&self.session).is_some()
    }

    fn sleep(&self, deadline: Instant) -> Result<(), ChannelError> {
        let asleep =
            self.session.shared_memory().atomic_u32(self.reader.line_at + SLEEPING_FLAG_OFFSET);
        asleep.store(1, SeqCst);
        let result = self.sleep_until_ready(deadline);
        asleep.store(0, Relaxed);
        result
    }

    fn sleep_until_ready(&self, deadline: Instant) -> Result<(), ChannelError> {
        for _ in 0..MAX_EMPTY_WAKEUPS {
            if self.is_ready() || self.session.is_dead() || self.session.violation().is_some() {
                return Ok(());
            }
            self.session.wait_event_fd(self.lane_side().incoming_mailbox(), deadline)?;
        }
        Err(self.session.record_violation(Violation::Flood).into())
    }

    /// Returns the next message, validated, if there is one.
    fn take_message<Rx: Wire>(&mut self, turn: &ExpectedState) -> Result<Option<Rx>, Violation> {
        let Some(head) = self.reader.peek(&self.session)? else { return Ok(None) };
        self.reader.copy_message(&self.session, head)?;
        turn.next_state(head.tag.into())?;
        self.reader.unpack(&self.session, head).map(Some)
    }

    fn set_awaiting(&mut self, turn: Option<ExpectedState>) {
        self.session.update_awaiting_count(self.awaits.is_some(), turn.is_some());
        self.awaits = turn;
    }
}

impl<Tx: Wire, Rx: Wire> Transport<Tx, Rx> for LaneTransport {
    fn send(&mut self, message: Tx) {
        let tag = message.tag();
        let mut attachments = AttachmentSender { session: &self.session, failed: None };
        let mut packer = Packer::new(&mut self.sent.bytes, &mut attachments);
        message.pack(&mut packer);
        // A mailbox is shorter than 2^16 bytes.
        let len = packer.used() as u16;
        self.failed = attachments.failed;
        self.sent.head.tag = tag.into();
        self.sent.head.len = len;
        if self.failed.is_some() {
            self.reclaim.reclaim_unread_message(&self.session, &self.sent);
            return;
        }
        self.sent.head.seq = self.sent.head.seq.wrapping_add(1);
        if self.lane_side().side == Sender::Client {
            // The table has one step per message, in message order.
            let state = self.table.steps[usize::from(tag)].to;
            let turn = ExpectedState { table: self.table, state, peer: Sender::Server };
            self.set_awaiting(Some(turn));
        }
        self.write_mailbox();
    }

    fn receive(&mut self, turn: &ExpectedState, deadline: Instant) -> Result<Rx, ChannelError> {
        if let Some(lost) = self.failed {
            return Err(lost);
        }
        loop {
            if let Some(violation) = self.session.violation() {
                return Err(violation.into());
            }
            // Read before polling: messages sent before closing or death are still received.
            let gone =
                self.reader.peer_read_count(&self.session).is_some() || self.session.is_dead();
            match self.take_message(turn) {
                Ok(Some(message)) => {
                    self.set_awaiting(None);
                    return Ok(message);
                }
                Ok(None) if gone => return Err(ChannelError::Closed),
                Ok(None) => Transport::<Tx, Rx>::wait(self, deadline)?,
                Err(violation) => return Err(self.session.record_violation(violation).into()),
            }
        }
    }

    fn wait(&mut self, deadline: Instant) -> Result<(), ChannelError> {
        let mut spin = std::mem::take(&mut self.spin);
        let there = spin.spin_until(|| self.is_ready());
        self.spin = spin;
        if there { Ok(()) } else { self.sleep(deadline) }
    }

    fn change_count(&self) -> Result<Option<u64>, ChannelError> {
        if let Some(violation) = self.session.violation() {
            return Err(violation.into());
        }
        if self.reader.peer_read_count(&self.session).is_some() || !self.session.is_peer_alive() {
            return Err(ChannelError::Closed);
        }
        let told = self
            .session
            .shared_memory()
            .atomic_u64(self.reader.line_at + CHANGE_COUNT_OFFSET)
            .load(Acquire);
        // Zero: the server has no notifier.
        Ok(Some(told).filter(|told| told >> 48 == u64::from(EPOCH)))
    }

    fn change_notifier(&self) -> ChangeNotifier {
        let at = self.out_at + CHANGE_COUNT_OFFSET;
        let first = u64::from(EPOCH) << 48;
        let memory = self.session.shared_memory();
        self.teller.get_or_init(|| ChangeNotifier::for_lane(memory, at, first)).clone()
    }
}

impl Drop for LaneTransport {
    fn drop(&mut self) {
        if let Some(teller) = self.teller.get() {
            teller.close();
        }
        let session = self.session.clone();
        // Drops a request that arrived unread, so that its attachments return.
        if self.lane_side().side == Sender::Server
            && let Ok(Some(head)) = self.reader.peek(&session)
            && usize::from(head.tag) < self.table.messages.len()
            && self.reader.copy_message(&session, head).is_ok()
        {
            (self.reclaim.drop_received)(&self.reader, &session, head);
        }
        let bits = CLOSED_WORD | u64::from(self.reader.received);
        session.shared_memory().atomic_u64(self.out_at + CLOSED_WORD_OFFSET).store(bits, SeqCst);
        self.signal_peer();
        if self.awaits.is_some() {
            self.abandon_request();
        }
        self.set_awaiting(None);
        session.reclaim_lost();
    }
}

impl LaneTransport {
    /// Hands the request to the session, which polls for its late reply.
    fn abandon_request(&mut self) {
        let Some(awaits) = self.awaits else { return };
        let place = self.lane_side();
        let reader = std::mem::replace(&mut self.reader, LaneReceiver::new(place, 0));
        let head = self.sent.head;
        let bytes = std::mem::replace(&mut self.sent.bytes, Box::new([0; MAX_MESSAGE_BYTES]));
        let request = SentMessage { head, bytes };
        self.session.add_abandoned(AbandonedRequest {
            reader,
            awaits,
            request,
            reclaim: self.reclaim,
        });
    }
}

/// Name of no block: the heap was full, and the message is not sent.
const NO_BLOCK: BlockName = BlockName { slot: u32::MAX, generation: 0, len: 0 };

/// Exports the attachments of an outgoing message.
struct AttachmentSender<'a> {
    session: &'a Arc<Session>,
    failed: Option<ChannelError>,
}

impl ExportAttachments for AttachmentSender<'_> {
    fn export_block(&mut self, block: Block) -> BlockName {
        self.session.heap().export(block).unwrap_or_else(|| {
            self.failed = Some(ChannelError::HeapFull);
            NO_BLOCK
        })
    }
}

/// Imports the attachments of an incoming message.
struct AttachmentReceiver<'a> {
    session: &'a Arc<Session>,
}

impl ImportAttachments for AttachmentReceiver<'_> {
    fn import_block(&mut self, name: BlockName) -> Result<Block, Violation> {
        self.session.heap().import(name)
    }
}

/// Takes back the attachments of an unread message.
struct AttachmentReturner<'a> {
    session: &'a Arc<Session>,
}

impl ImportAttachments for AttachmentReturner<'_> {
    fn import_block(&mut self, name: BlockName) -> Result<Block, Violation> {
        let taken = self.session.heap().cancel_export(name);
        // A missing block was never exported.
        Ok(taken.map_or_else(|| Block::private(0), Block::from))
    }
}
