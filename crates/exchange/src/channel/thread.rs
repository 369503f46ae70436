//! The channel between threads: messages are moved, blocks and all.
//!
//! ```text
//!   client ──▶ mailbox: | full, message | .. |   bell ──▶ server
//!   client ◀──          bell   | full, message | .. | ◀── server
//! ```
//!
//! Law 1: a slot is written only while it is empty, by the sender, and emptied only by
//! the receiver; `full` hands it over. The contract bounds the queue, so there is room.
//! Law 2: a receiver that sleeps has rung the bell to 1 first, and looked again.

use std::{
    cell::UnsafeCell,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::*},
    },
    time::Instant,
};

use rustix::thread::futex;

use super::{Client, Core, Link, Lost, Server, Turn, spin::Spin};
use crate::contract::{Contract, fsm::Sender};

/// The two ends of a new channel between threads.
pub fn pair<C: Contract>() -> (Client<C>, Server<C>) {
    let asks = Arc::new(Mailbox::new(C::QUEUE));
    let answers = Arc::new(Mailbox::new(C::QUEUE));
    let client = ThreadLink::new(asks.clone(), answers.clone());
    let server = ThreadLink::new(answers, asks);
    (
        Core::new(Box::new(client), C::TABLE, Sender::Server).into(),
        Core::new(Box::new(server), C::TABLE, Sender::Client).into(),
    )
}

/// A message's place. Its own cache lines: the flag and a small message move as one.
#[repr(align(128))]
struct Slot<T> {
    full: AtomicU32,
    message: UnsafeCell<Option<T>>,
}

#[repr(align(128))]
struct Bell(AtomicU32);

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;

struct Mailbox<T> {
    slots: Box<[Slot<T>]>,
    /// Futex of the receiver.
    bell: Bell,
    /// Set once, when the sender has gone.
    closed: AtomicU32,
}

// SAFETY: a slot's message is reached only by the one sender while `full` is 0 and only
// by the one receiver while it is 1; the acquire and release of `full` order the two.
// `ThreadLink` is the only user and is neither `Clone` nor `Sync`.
unsafe impl<T: Send> Sync for Mailbox<T> {}

impl<T> Mailbox<T> {
    fn new(len: usize) -> Self {
        let slot = || Slot { full: AtomicU32::new(0), message: UnsafeCell::new(None) };
        Self {
            slots: (0..len).map(|_| slot()).collect(),
            bell: Bell(AtomicU32::new(AWAKE)),
            closed: AtomicU32::new(0),
        }
    }

    fn ring(&self) {
        if self.bell.0.load(SeqCst) == ASLEEP && self.bell.0.swap(AWAKE, SeqCst) == ASLEEP {
            // Nothing to do about a failure; the sleeper's deadline bounds it.
            let _ = futex::wake(&self.bell.0, futex::Flags::PRIVATE, 1);
        }
    }

    fn ready(&self, at: usize) -> bool {
        self.slots[at].full.load(SeqCst) == 1 || self.closed.load(SeqCst) == 1
    }

    /// Sleeps until slot `at` is full, the sender has gone, or the deadline has passed.
    fn sleep(&self, at: usize, deadline: Instant) -> Result<(), Lost> {
        loop {
            self.bell.0.store(ASLEEP, SeqCst);
            if self.ready(at) {
                self.bell.0.store(AWAKE, SeqCst);
                return Ok(());
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                self.bell.0.store(AWAKE, SeqCst);
                return Err(Lost::Timeout);
            };
            let timeout = left.try_into().ok();
            // Woken, interrupted, too late or timed out: the loop looks.
            let _ = futex::wait(&self.bell.0, futex::Flags::PRIVATE, ASLEEP, timeout.as_ref());
        }
    }
}

struct ThreadLink<Tx, Rx> {
    to: Arc<Mailbox<Tx>>,
    from: Arc<Mailbox<Rx>>,
    send_at: usize,
    receive_at: usize,
    spin: Spin,
}

impl<Tx, Rx> ThreadLink<Tx, Rx> {
    fn new(to: Arc<Mailbox<Tx>>, from: Arc<Mailbox<Rx>>) -> Self {
        Self { to, from, send_at: 0, receive_at: 0, spin: Spin::new() }
    }

    fn take(&mut self) -> Option<Rx> {
        let slot = &self.from.slots[self.receive_at];
        if slot.full.load(Acquire) == 0 {
            return None;
        }
        // SAFETY: `full` is 1, so the sender leaves the message to us, its only receiver.
        let message = unsafe { (*slot.message.get()).take() };
        slot.full.store(0, Release);
        self.receive_at = (self.receive_at + 1) % self.from.slots.len();
        message
    }
}

impl<Tx: Send, Rx: Send> Link<Tx, Rx> for ThreadLink<Tx, Rx> {
    fn send(&mut self, message: Tx) {
        let slot = &self.to.slots[self.send_at];
        assert_eq!(slot.full.load(Acquire), 0, "the contract's queue bound does not hold");
        // SAFETY: `full` is 0, so the receiver leaves the message to us, its only sender.
        unsafe { *slot.message.get() = Some(message) };
        slot.full.store(1, SeqCst);
        self.send_at = (self.send_at + 1) % self.to.slots.len();
        self.to.ring();
    }

    fn receive(&mut self, _turn: &Turn, deadline: Instant) -> Result<Rx, Lost> {
        if let Some(message) = self.take() {
            return Ok(message);
        }
        self.wait(deadline)?;
        self.take().ok_or(Lost::Closed)
    }

    fn wait(&mut self, deadline: Instant) -> Result<(), Lost> {
        let (from, at) = (&self.from, self.receive_at);
        if self.spin.until(|| from.ready(at)) { Ok(()) } else { from.sleep(at, deadline) }
    }
}

impl<Tx, Rx> Drop for ThreadLink<Tx, Rx> {
    fn drop(&mut self) {
        self.to.closed.store(1, SeqCst);
        self.to.ring();
        // What arrived and was not looked at goes home now, not when the peer closes too.
        while self.take().is_some() {}
    }
}
