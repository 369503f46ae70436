//! Channels: two endpoints of one contract. The contract's states are types of the client; its
//! table checks the server.
//!
//! ```text
//!   Client<C, Ready> ──send(Read)──▶ Client<C, Awaiting<Read>>
//!         ▲                                   │ receive(deadline)
//!         └──── Reply::{Ack, Nak}(.., end) ◀──┘
//! ```
//!
//! ```text
//!   channel ──▶ contract ──▶ heap ──▶ shm     transport; contents of a message; memory of its blocks
//! ```
//!
//! Law 1: sending consumes the endpoint and never blocks, allocates or fails.
//! Law 2: every receive has a deadline, and reports the loss of the peer in every state.
//! Law 3: dropping an endpoint closes it; the peer sees [`ChannelError::Closed`] after queued
//! messages.

mod busy_poll;
mod change_counter;
pub mod session;
mod sync;
#[allow(unsafe_code)]
pub mod thread;

use std::{
    fmt,
    marker::PhantomData,
    time::{Duration, Instant},
};

use crate::contract::{
    Awaiting, Call, CallResult, Contract, Request, State, Violation,
    fsm::{Fsm, Sender},
    wire::Wire,
};
use draconis_types::Refusal;

pub use change_counter::ChangeNotifier;
pub use thread::pair;

/// Error of a receive; it consumes the endpoint. Attachments in flight return when the peer
/// releases them or its death is confirmed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ChannelError {
    /// The peer closed its endpoint or died.
    #[error("the peer closed the channel")]
    Closed,
    /// The deadline passed.
    #[error("the peer did not answer in time")]
    Timeout,
    /// The peer broke the contract.
    #[error("the peer broke the contract: {0}")]
    Violation(#[from] Violation),
    /// A private block was sent and the exchange heap had no space for its bytes.
    #[error("the exchange heap has no room")]
    HeapFull,
}

impl From<ChannelError> for Refusal {
    fn from(lost: ChannelError) -> Self {
        match lost {
            ChannelError::Closed => Refusal::Gone,
            ChannelError::Timeout => Refusal::Timeout,
            ChannelError::Violation(_) => Refusal::Io,
            ChannelError::HeapFull => Refusal::Quota,
        }
    }
}

/// State of the channel and the side that sends next.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedState {
    /// Table of the contract.
    pub table: &'static Fsm,
    /// Current state of the channel.
    pub state: u8,
    /// Side whose message is expected.
    pub peer: Sender,
}

impl ExpectedState {
    /// Returns the state to which message `tag` leads.
    ///
    /// # Errors
    /// [`Violation::Tag`] or [`Violation::State`].
    pub fn next_state(&self, tag: u32) -> Result<u8, Violation> {
        let message = self.table.messages.get(tag as usize).ok_or(Violation::Tag(tag))?;
        // A table has at most 256 messages.
        self.table.next_state(self.state, tag as u8, self.peer).ok_or(Violation::State {
            message: message.name,
            state: self.table.states[usize::from(self.state)],
        })
    }
}

/// A transport of the messages of one channel.
pub trait Transport<Tx, Rx>: Send {
    /// Sends `message`. Errors are reported by the next receive.
    fn send(&mut self, message: Tx);

    /// Receives the next message, which `turn` must allow.
    ///
    /// # Errors
    /// Reason that no message arrived.
    fn receive(&mut self, turn: &ExpectedState, deadline: Instant) -> Result<Rx, ChannelError>;

    /// Waits until `receive` would return a message or an error at once.
    ///
    /// # Errors
    /// [`ChannelError::Timeout`].
    fn wait(&mut self, deadline: Instant) -> Result<(), ChannelError>;

    /// Returns the change counter of the server, if it has one.
    ///
    /// # Errors
    /// The server is lost.
    fn change_count(&self) -> Result<Option<u64>, ChannelError>;

    /// Creates the server's writer of the change counter.
    fn change_notifier(&self) -> ChangeNotifier;
}

/// An untyped endpoint: a transport and its state.
pub struct RawEndpoint<Tx, Rx> {
    link: Box<dyn Transport<Tx, Rx>>,
    expected: ExpectedState,
}

impl<Tx: Wire, Rx: Wire> RawEndpoint<Tx, Rx> {
    /// Creates an endpoint over `link` in the contract's first state; `peer` is the other side.
    pub fn new(link: Box<dyn Transport<Tx, Rx>>, table: &'static Fsm, peer: Sender) -> Self {
        Self { link, expected: ExpectedState { table, state: table.start, peer } }
    }

    fn send(&mut self, message: Tx) {
        let me = match self.expected.peer {
            Sender::Client => Sender::Server,
            Sender::Server => Sender::Client,
        };
        // The typed endpoints and the generated `answer` send only messages that the state allows.
        self.expected.state = self
            .expected
            .table
            .next_state(self.expected.state, message.tag(), me)
            .expect("a message was sent that the contract does not allow here");
        self.link.send(message);
    }

    fn receive(&mut self, deadline: Instant) -> Result<Rx, ChannelError> {
        if self.expected.table.is_final(self.expected.state) {
            return Err(ChannelError::Closed);
        }
        let message = self.link.receive(&self.expected, deadline)?;
        self.expected.state = self.expected.next_state(u32::from(message.tag()))?;
        Ok(message)
    }
}

impl<Tx, Rx> fmt::Debug for RawEndpoint<Tx, Rx> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.expected.table.states[usize::from(self.expected.state)];
        write!(f, "{} in {state}", self.expected.table.name)
    }
}

type ClientCore<C> = RawEndpoint<<C as Contract>::ToServer, <C as Contract>::ToClient>;
type ServerCore<C> = RawEndpoint<<C as Contract>::ToClient, <C as Contract>::ToServer>;

/// The requesting endpoint, in state `S`.
#[must_use = "dropping an end closes the channel"]
pub struct Client<C: Contract, S = <C as Contract>::Start> {
    core: ClientCore<C>,
    state: PhantomData<fn() -> S>,
}

/// The answering endpoint.
#[must_use = "dropping an end closes the channel"]
pub struct Server<C: Contract> {
    core: ServerCore<C>,
}

impl<C: Contract, S> From<ClientCore<C>> for Client<C, S> {
    fn from(core: ClientCore<C>) -> Self {
        Self { core, state: PhantomData }
    }
}

impl<C: Contract> From<ServerCore<C>> for Server<C> {
    fn from(core: ServerCore<C>) -> Self {
        Self { core }
    }
}

impl<C: Contract, S> fmt::Debug for Client<C, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Client({:?})", self.core)
    }
}

impl<C: Contract> fmt::Debug for Server<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Server({:?})", self.core)
    }
}

/// A reply, and the endpoint in the next state.
#[derive(Debug)]
pub enum Reply<M: Call> {
    /// The request succeeded.
    Ack(M::Ack, Client<M::Contract, M::AckTo>),
    /// The request failed; the reply returns the attachments.
    Nak(M::Nak, Client<M::Contract, M::NakTo>),
}

impl<C: Contract, S: State<Contract = C>> Client<C, S> {
    /// Sends a request that this state allows. Never blocks, allocates or fails: errors are
    /// reported by the following receive.
    pub fn send<M: Request<Contract = C, From = S>>(mut self, message: M) -> Client<C, M::Next> {
        self.core.send(message.into());
        self.core.into()
    }

    /// Sends a request whose replies both lead back to this state, and waits for the reply.
    ///
    /// # Errors
    /// Reason that no reply arrived; the channel is then closed.
    pub fn call<M>(
        self,
        message: M,
        deadline: Instant,
    ) -> Result<(CallResult<M>, Self), ChannelError>
    where
        M: Call<Contract = C, From = S, AckTo = S, NakTo = S>,
    {
        Ok(match self.send(message).receive(deadline)? {
            Reply::Ack(ack, end) => (Ok(ack), end),
            Reply::Nak(nak, end) => (Err(nak), end),
        })
    }
}

impl<C: Contract, S> Client<C, S> {
    /// Returns the server's change counter. Answers received while it was unchanged are still
    /// current. `None` if the server has no [`ChangeNotifier`].
    ///
    /// # Errors
    /// The server is lost; a death is detected within some milliseconds.
    pub fn change_count(&self) -> Result<Option<u64>, ChannelError> {
        self.core.link.change_count()
    }
}

impl<C: Contract, M: Call<Contract = C>> Client<C, Awaiting<M>> {
    /// Waits for the reply.
    ///
    /// # Errors
    /// Reason that no reply arrived; the channel is then closed.
    pub fn receive(mut self, deadline: Instant) -> Result<Reply<M>, ChannelError> {
        let message = self.core.receive(deadline)?;
        // In this state the table allows only replies to this request.
        Ok(match M::reply(message).expect("the table admitted another request's reply") {
            Ok(ack) => Reply::Ack(ack, self.core.into()),
            Err(nak) => Reply::Nak(nak, self.core.into()),
        })
    }

    /// Waits until [`Client::receive`] would not block. The endpoint stays usable if the deadline
    /// passes.
    ///
    /// # Errors
    /// [`ChannelError::Timeout`].
    pub fn wait(&mut self, deadline: Instant) -> Result<(), ChannelError> {
        self.core.link.wait(deadline)
    }
}

impl<C: Contract> Server<C> {
    /// Returns the writer of this channel's change counter. From now on, the server must notify
    /// every change that affects answers it has given or will give.
    pub fn change_notifier(&self) -> ChangeNotifier {
        self.core.link.change_notifier()
    }

    /// Replies to every message with the result of `answer`, until the client closes or the
    /// contract ends. Each contract has an `answer` that calls its server trait.
    ///
    /// # Errors
    /// Reason that the client was lost: no message within `timeout`, or a contract violation.
    /// Closing is no error.
    pub fn serve(
        mut self,
        timeout: Duration,
        mut answer: impl FnMut(C::ToServer) -> Option<C::ToClient>,
    ) -> Result<(), ChannelError> {
        loop {
            let message = match self.core.receive(deadline_after(timeout)) {
                Ok(message) => message,
                Err(ChannelError::Closed) => return Ok(()),
                Err(lost) => return Err(lost),
            };
            if let Some(reply) = answer(message) {
                self.core.send(reply);
            }
        }
    }
}

/// Returns the time `patience` from now; `patience` may be [`Duration::MAX`].
pub(crate) fn deadline_after(patience: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(patience).unwrap_or(now + NO_DEADLINE)
}

/// Timeout that stands for "no deadline".
const NO_DEADLINE: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// A client for repeated calls in one state, with one timeout for all calls.
///
/// After a lost call the channel is closed, and every further call returns
/// [`ChannelError::Closed`].
#[derive(Debug)]
pub struct RpcClient<C: Contract, S = <C as Contract>::Start> {
    end: Option<Client<C, S>>,
    patience: Duration,
}

impl<C: Contract, S: State<Contract = C>> RpcClient<C, S> {
    /// Creates a client over `end` that waits at most `patience` for each reply.
    pub fn new(end: Client<C, S>, patience: Duration) -> Self {
        Self { end: Some(end), patience }
    }

    /// Sends `message` and waits for its reply.
    ///
    /// # Errors
    /// Reason that no reply arrived.
    pub fn call<M>(&mut self, message: M) -> Result<CallResult<M>, ChannelError>
    where
        M: Call<Contract = C, From = S, AckTo = S, NakTo = S>,
    {
        let end = self.end.take().ok_or(ChannelError::Closed)?;
        let (reply, end) = end.call(message, deadline_after(self.patience))?;
        self.end = Some(end);
        Ok(reply)
    }

    /// Returns the endpoint, unless a call was lost.
    pub fn into_client(self) -> Option<Client<C, S>> {
        self.end
    }
}
