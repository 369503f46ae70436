//! The channel between threads: messages are moved together with their blocks.
//!
//! ```text
//!   client ──▶ mailbox: | full, message | .. |  futex ──▶ server
//!   client ◀──          futex  | full, message | .. | ◀── server
//! ```
//!
//! Law 1: only the sender writes a cell, and only while it is empty; only the receiver empties it.
//! `full` transfers it. The contract bounds the queue, so a cell is always free.
//! Law 2: a receiver sets its sleep word, then checks once more, then sleeps.

use std::{
    sync::{self as real, atomic::AtomicU64, atomic::Ordering::*},
    time::Instant,
};

use super::{
    ChangeNotifier, ChannelError, Client, ExpectedState, RawEndpoint, Server, Transport,
    busy_poll::SpinBudget,
    sync::{Arc, AtomicU32, Cell, Futex, fence},
};
use crate::contract::{Contract, fsm::Sender};

/// Creates a channel between threads and returns its two endpoints.
pub fn pair<C: Contract>() -> (Client<C>, Server<C>) {
    let asks = Arc::new(Mailbox::new(C::QUEUE));
    let answers = Arc::new(Mailbox::new(C::QUEUE));
    let count = real::Arc::new(AtomicU64::new(0));
    let client = ThreadTransport::new(asks.clone(), answers.clone(), count.clone());
    let server = ThreadTransport::new(answers, asks, count);
    (
        RawEndpoint::new(Box::new(client), C::TABLE, Sender::Server).into(),
        RawEndpoint::new(Box::new(server), C::TABLE, Sender::Client).into(),
    )
}

/// A cell for one message, on its own cache lines: flag and small message move together.
#[repr(align(128))]
struct MailboxCell<T> {
    full: AtomicU32,
    message: Cell<Option<T>>,
}

const RECEIVER_AWAKE: u32 = 0;
const RECEIVER_ASLEEP: u32 = 1;

struct Mailbox<T> {
    slots: Box<[MailboxCell<T>]>,
    /// Futex that the receiver sleeps on.
    sleep_word: Futex,
    /// Set once, when the sender is gone.
    closed: AtomicU32,
}

// SAFETY: only the one sender accesses a cell's message while `full` is 0, and only the one
// receiver while it is 1; the acquire and release of `full` order the two. `ThreadTransport` is the
// only user and is neither `Clone` nor `Sync`.
unsafe impl<T: Send> Sync for Mailbox<T> {}

impl<T> Mailbox<T> {
    fn new(len: usize) -> Self {
        let slot = || MailboxCell { full: AtomicU32::new(0), message: Cell::new(None) };
        Self {
            slots: (0..len).map(|_| slot()).collect(),
            sleep_word: Futex::new(RECEIVER_AWAKE),
            closed: AtomicU32::new(0),
        }
    }

    /// Wakes the receiver if it sleeps; called after the state it waits for has changed.
    fn wake_receiver(&self) {
        // Pairs with the fence in `sleep`: either we see that it sleeps, or it sees what we wrote.
        fence(SeqCst);
        if self.sleep_word.word.load(Acquire) == RECEIVER_ASLEEP
            && self.sleep_word.word.swap(RECEIVER_AWAKE, AcqRel) == RECEIVER_ASLEEP
        {
            self.sleep_word.wake();
        }
    }

    fn is_full(&self, at: usize) -> bool {
        self.slots[at].full.load(Acquire) == 1 || self.closed.load(Acquire) == 1
    }

    /// Sleeps until cell `at` is full, the sender is gone, or the deadline has passed.
    fn sleep(&self, at: usize, deadline: Instant) -> Result<(), ChannelError> {
        let result = self.sleep_until_ready(at, deadline);
        self.sleep_word.word.swap(RECEIVER_AWAKE, AcqRel);
        result
    }

    fn sleep_until_ready(&self, at: usize, deadline: Instant) -> Result<(), ChannelError> {
        loop {
            // A swap, not a store, so that it is ordered with the swap of the other side.
            self.sleep_word.word.swap(RECEIVER_ASLEEP, AcqRel);
            fence(SeqCst);
            if self.is_full(at) {
                return Ok(());
            }
            let left =
                deadline.checked_duration_since(Instant::now()).ok_or(ChannelError::Timeout)?;
            self.sleep_word.wait(RECEIVER_ASLEEP, left);
        }
    }
}

struct ThreadTransport<Tx, Rx> {
    to: Arc<Mailbox<Tx>>,
    from: Arc<Mailbox<Rx>>,
    send_at: usize,
    receive_at: usize,
    spin: SpinBudget,
    /// Change counter of the server; 0 if it has no notifier.
    count: real::Arc<AtomicU64>,
    teller: real::OnceLock<ChangeNotifier>,
}

impl<Tx, Rx> ThreadTransport<Tx, Rx> {
    fn new(to: Arc<Mailbox<Tx>>, from: Arc<Mailbox<Rx>>, count: real::Arc<AtomicU64>) -> Self {
        let teller = real::OnceLock::new();
        Self { to, from, send_at: 0, receive_at: 0, spin: SpinBudget::new(), count, teller }
    }

    fn take_message(&mut self) -> Option<Rx> {
        let slot = &self.from.slots[self.receive_at];
        if slot.full.load(Acquire) == 0 {
            return None;
        }
        // SAFETY: `full` is 1, so only the receiver, which is this side, accesses the message.
        let message = slot.message.with_mut(|message| unsafe { (*message).take() });
        slot.full.store(0, Release);
        self.receive_at = (self.receive_at + 1) % self.from.slots.len();
        message
    }
}

impl<Tx: Send, Rx: Send> Transport<Tx, Rx> for ThreadTransport<Tx, Rx> {
    fn send(&mut self, message: Tx) {
        let slot = &self.to.slots[self.send_at];
        assert_eq!(slot.full.load(Acquire), 0, "the contract's queue bound does not hold");
        // SAFETY: `full` is 0, so only the sender, which is this side, accesses the message.
        slot.message.with_mut(|place| unsafe { *place = Some(message) });
        slot.full.store(1, Release);
        self.send_at = (self.send_at + 1) % self.to.slots.len();
        self.to.wake_receiver();
    }

    fn receive(&mut self, _turn: &ExpectedState, deadline: Instant) -> Result<Rx, ChannelError> {
        if let Some(message) = self.take_message() {
            return Ok(message);
        }
        self.wait(deadline)?;
        self.take_message().ok_or(ChannelError::Closed)
    }

    fn wait(&mut self, deadline: Instant) -> Result<(), ChannelError> {
        let (from, at) = (&self.from, self.receive_at);
        if self.spin.spin_until(|| from.is_full(at)) { Ok(()) } else { from.sleep(at, deadline) }
    }

    fn change_count(&self) -> Result<Option<u64>, ChannelError> {
        match self.from.closed.load(Acquire) {
            0 => Ok(Some(self.count.load(Acquire)).filter(|count| *count > 0)),
            _ => Err(ChannelError::Closed),
        }
    }

    fn change_notifier(&self) -> ChangeNotifier {
        self.teller.get_or_init(|| ChangeNotifier::for_thread(&self.count)).clone()
    }
}

impl<Tx, Rx> Drop for ThreadTransport<Tx, Rx> {
    fn drop(&mut self) {
        if let Some(teller) = self.teller.get() {
            teller.close();
        }
        self.to.closed.store(1, Release);
        self.to.wake_receiver();
        // Drops unread messages now, so that their attachments return before the peer closes too.
        while self.take_message().is_some() {}
    }
}

/// Every interleaving of a transfer: `RUSTFLAGS="--cfg loom" cargo test --release --lib loom`.
#[cfg(all(test, loom))]
mod loom_model {
    use std::time::Duration;

    use super::*;

    fn links() -> (ThreadTransport<u32, u32>, ThreadTransport<u32, u32>) {
        let (there, back) = (Arc::new(Mailbox::new(1)), Arc::new(Mailbox::new(1)));
        let count = real::Arc::default();
        let client = ThreadTransport::new(there.clone(), back.clone(), real::Arc::clone(&count));
        (client, ThreadTransport::new(back, there, count))
    }

    fn turn() -> ExpectedState {
        let table = <crate::contract::file::File as Contract>::TABLE;
        ExpectedState { table, state: 0, peer: Sender::Client }
    }

    /// At most three preemptions beside those that waiting forces: all interleavings take minutes.
    fn model(test: impl Fn() + Sync + Send + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(test);
    }

    fn never() -> Instant {
        Instant::now() + Duration::from_secs(1 << 20)
    }

    #[test]
    fn round_trip_loses_no_wakeup() {
        model(|| {
            let (mut client, mut server) = links();
            let hand = loom::thread::spawn(move || {
                let n = server.receive(&turn(), never()).unwrap();
                server.send(n + 1);
            });
            client.send(1);
            assert_eq!(client.receive(&turn(), never()), Ok(2));
            // After the reply, the closing is received.
            assert_eq!(client.receive(&turn(), never()), Err(ChannelError::Closed));
            hand.join().unwrap();
        });
    }

    #[test]
    fn close_is_received_after_messages_and_wakes_receiver() {
        model(|| {
            let (mut client, mut server) = links();
            let hand = loom::thread::spawn(move || {
                assert_eq!(server.receive(&turn(), never()), Ok(7));
                assert_eq!(server.receive(&turn(), never()), Err(ChannelError::Closed));
            });
            client.send(7);
            drop(client);
            hand.join().unwrap();
        });
    }

    #[test]
    fn unreceived_message_is_dropped_once() {
        model(|| {
            let (there, back) = (Arc::new(Mailbox::new(1)), Arc::new(Mailbox::new(1)));
            let count = real::Arc::default;
            let mut client: ThreadTransport<_, u32> =
                ThreadTransport::new(there.clone(), back.clone(), count());
            let server: ThreadTransport<u32, _> = ThreadTransport::new(back, there, count());
            let attachments = loom::sync::Arc::new(());
            let sent = attachments.clone();
            let hand = loom::thread::spawn(move || drop(server));
            client.send(sent);
            hand.join().unwrap();
            drop(client);
            assert_eq!(loom::sync::Arc::strong_count(&attachments), 1);
        });
    }
}
