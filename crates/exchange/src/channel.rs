//! Channels: two ends of one contract, whose states are types.
//!
//! ```text
//!   Client<C, Ready> ──send(Read)──▶ Client<C, Awaiting<Read>>
//!         ▲                                   │ receive(deadline)
//!         └──── Reply::{Ack, Nak}(.., end) ◀──┘
//! ```
//!
//! ```text
//!   contract ──▶ heap ──▶ shm        what a message holds, and where its blocks are
//!      ▲                   ▲
//!      └───── channel ─────┘         moves it; and an end is itself a field of a message,
//! ```                                so contracts name `LaneEnd` and `Core` of this module
//!
//! Law 1: sending uses up the end and never blocks, allocates or fails.
//! Law 2: every receive has a deadline; an end whose peer is lost says so in every state.
//! Law 3: dropping an end closes it; the peer sees [`Lost::Closed`] after what was queued.

mod busy_poll;
mod change_counter;
mod lane;
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
    Awaiting, Call, CallResult, Contract, ReceivingState, Refusal, Request, State, Violation,
    fsm::{Fsm, Sender, type_hash},
    wire::{Field, LaneName, Packer, Unpacker, Wire},
};

pub use change_counter::ChangeNotifier;
pub use lane::LaneEndpoint;
pub use thread::pair;

/// Why there is no answer. The end that says it is used up; what was on its way comes
/// home when the peer lets go of it or is confirmed dead.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ChannelError {
    /// The peer closed its end or died.
    #[error("the peer closed the channel")]
    Closed,
    /// The deadline passed.
    #[error("the peer did not answer in time")]
    Timeout,
    /// The peer broke the contract.
    #[error("the peer broke the contract: {0}")]
    Violation(#[from] Violation),
    /// A private block was sent and the exchange heap had no room for its bytes.
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

/// What may arrive next.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedState {
    /// The contract's table.
    pub table: &'static Fsm,
    /// The state the channel is in.
    pub state: u8,
    /// Who is to speak.
    pub peer: Sender,
}

impl ExpectedState {
    /// Where message `tag` leads.
    ///
    /// # Errors
    /// [`Violation::Tag`] or [`Violation::State`].
    pub fn next_state(&self, tag: u32) -> Result<u8, Violation> {
        let message = self.table.messages.get(tag as usize).ok_or(Violation::Tag(tag))?;
        // A table has at most 256 messages.
        self.table.next(self.state, tag as u8, self.peer).ok_or(Violation::State {
            message: message.name,
            state: self.table.states[usize::from(self.state)],
        })
    }
}

/// A transport: moves messages of one channel.
pub trait Transport<Tx, Rx>: Send {
    /// Sends `message`. Trouble shows in the next receive.
    fn send(&mut self, message: Tx);

    /// The next message, which `turn` admits.
    ///
    /// # Errors
    /// Why there is none.
    fn receive(&mut self, turn: &ExpectedState, deadline: Instant) -> Result<Rx, ChannelError>;

    /// Waits until a message or trouble is there, which `receive` then tells.
    ///
    /// # Errors
    /// [`ChannelError::Timeout`].
    fn wait(&mut self, deadline: Instant) -> Result<(), ChannelError>;

    /// How often the server's side has told of a change, if it tells.
    ///
    /// # Errors
    /// That the server is lost.
    fn change_count(&self) -> Result<Option<u64>, ChannelError>;

    /// What tells the client, at the server's end.
    fn change_notifier(&self) -> ChangeNotifier;

    /// Gives the lane away, if this link is one end of a lane that no peer has yet.
    fn into_lane_name(self: Box<Self>) -> Option<LaneName> {
        None
    }
}

/// An end without its types: a link and the state it is in.
pub struct RawEndpoint<Tx, Rx> {
    link: Box<dyn Transport<Tx, Rx>>,
    turn: ExpectedState,
}

impl<Tx: Wire, Rx: Wire> RawEndpoint<Tx, Rx> {
    /// An end of `link` in the contract's first state, hearing from `peer`.
    pub fn new(link: Box<dyn Transport<Tx, Rx>>, table: &'static Fsm, peer: Sender) -> Self {
        Self { link, turn: ExpectedState { table, state: table.start, peer } }
    }

    fn send(&mut self, message: Tx) {
        let me = match self.turn.peer {
            Sender::Client => Sender::Server,
            Sender::Server => Sender::Client,
        };
        // The typed ends and the generated `answer` only send what the state has.
        self.turn.state = self
            .turn
            .table
            .next(self.turn.state, message.tag(), me)
            .expect("a message was sent that the contract does not allow here");
        self.link.send(message);
    }

    fn receive(&mut self, deadline: Instant) -> Result<Rx, ChannelError> {
        if self.turn.table.is_final(self.turn.state) {
            return Err(ChannelError::Closed);
        }
        let message = self.link.receive(&self.turn, deadline)?;
        self.turn.state = self.turn.next_state(u32::from(message.tag()))?;
        Ok(message)
    }
}

impl<Tx, Rx> fmt::Debug for RawEndpoint<Tx, Rx> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.turn.table.states[usize::from(self.turn.state)];
        write!(f, "{} in {state}", self.turn.table.name)
    }
}

type ClientCore<C> = RawEndpoint<<C as Contract>::ToServer, <C as Contract>::ToClient>;
type ServerCore<C> = RawEndpoint<<C as Contract>::ToClient, <C as Contract>::ToServer>;

/// The end that asks, in state `S`.
#[must_use = "dropping an end closes the channel"]
pub struct Client<C: Contract, S = <C as Contract>::Start> {
    core: ClientCore<C>,
    state: PhantomData<fn() -> S>,
}

/// The end that answers, in state `S`.
#[must_use = "dropping an end closes the channel"]
pub struct Server<C: Contract, S = <C as Contract>::Start> {
    core: ServerCore<C>,
    state: PhantomData<fn() -> S>,
}

impl<C: Contract, S> From<ClientCore<C>> for Client<C, S> {
    fn from(core: ClientCore<C>) -> Self {
        Self { core, state: PhantomData }
    }
}

impl<C: Contract, S> From<ServerCore<C>> for Server<C, S> {
    fn from(core: ServerCore<C>) -> Self {
        Self { core, state: PhantomData }
    }
}

impl<C: Contract, S> fmt::Debug for Client<C, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Client({:?})", self.core)
    }
}

impl<C: Contract, S> fmt::Debug for Server<C, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Server({:?})", self.core)
    }
}

/// A reply, and the end in the state it leads to.
#[derive(Debug)]
pub enum Reply<M: Call> {
    /// It was done.
    Ack(M::Ack, Client<M::Contract, M::AckTo>),
    /// It was not; the goods are in it.
    Nak(M::Nak, Client<M::Contract, M::NakTo>),
}

impl<C: Contract, S: State<Contract = C>> Client<C, S> {
    /// Sends a request that this state has. Never blocks, allocates or fails: trouble
    /// shows in the receive that follows.
    pub fn send<M: Request<Contract = C, From = S>>(mut self, message: M) -> Client<C, M::Next> {
        self.core.send(message.into());
        self.core.into()
    }

    /// Sends a request whose replies both lead back to this state, and waits for one.
    ///
    /// # Errors
    /// Why there is no reply; the channel is closed then.
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
    /// A number that grows whenever what the server answered may have changed: what it was asked
    /// for since this was last another one is as it would answer now. `None` of a server without a
    /// [`ChangeNotifier`].
    ///
    /// # Errors
    /// The server is lost. One that died is so after some milliseconds at the latest.
    pub fn told(&self) -> Result<Option<u64>, ChannelError> {
        self.core.link.change_count()
    }
}

impl<C: Contract, S> Server<C, S> {
    /// Tells the client at the other end without a message, from now on: of each change of what
    /// it was, and will be, answered.
    pub fn teller(&self) -> ChangeNotifier {
        self.core.link.change_notifier()
    }
}

impl<C: Contract, M: Call<Contract = C>> Client<C, Awaiting<M>> {
    /// Waits for the reply.
    ///
    /// # Errors
    /// Why there is none; the channel is closed then.
    pub fn receive(mut self, deadline: Instant) -> Result<Reply<M>, ChannelError> {
        let message = self.core.receive(deadline)?;
        // The table admits nothing but this request's replies in this state.
        Ok(match M::reply(message).expect("the table admitted another request's reply") {
            Ok(ack) => Reply::Ack(ack, self.core.into()),
            Err(nak) => Reply::Nak(nak, self.core.into()),
        })
    }

    /// Waits until [`Client::receive`] would not wait, and keeps the end if the deadline
    /// passes.
    ///
    /// # Errors
    /// [`ChannelError::Timeout`].
    pub fn wait(&mut self, deadline: Instant) -> Result<(), ChannelError> {
        self.core.link.wait(deadline)
    }
}

impl<C: Contract, S: ReceivingState<Contract = C>> Server<C, S> {
    /// Waits for what the client says next.
    ///
    /// # Errors
    /// Why it says nothing; the channel is closed then.
    pub fn receive(mut self, deadline: Instant) -> Result<S::Received, ChannelError> {
        let message = self.core.receive(deadline)?;
        Ok(S::decode_received(message, self.core))
    }

    /// Waits until [`Server::receive`] would not wait, and keeps the end if the deadline
    /// passes.
    ///
    /// # Errors
    /// [`ChannelError::Timeout`].
    pub fn wait(&mut self, deadline: Instant) -> Result<(), ChannelError> {
        self.core.link.wait(deadline)
    }
}

impl<C: Contract, M: Call<Contract = C>> Server<C, Awaiting<M>> {
    /// Sends the Ack of `request`, which returns its goods; what it gives away stays here.
    pub fn ack(mut self, request: M, answer: M::Answer) -> (Server<C, M::AckTo>, M::Retained) {
        let (ack, given) = request.into_ack(answer);
        self.core.send(ack.into());
        (self.core.into(), given)
    }

    /// Sends the Nak of `request`, which returns all of it.
    pub fn nak(mut self, request: M, why: M::Reason) -> Server<C, M::NakTo> {
        self.core.send(request.into_nak(why).into());
        self.core.into()
    }
}

impl<C: Contract> Server<C> {
    /// Answers every message with what `answer` makes of it, until the client closes or
    /// the contract ends. Each module's `serve` calls this with its server trait.
    ///
    /// # Errors
    /// Why the client was lost: silent for `patience`, or in breach of the contract. A
    /// client that closed is no error.
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

/// The deadline after `patience`, which may be as long as [`Duration::MAX`].
pub(crate) fn deadline_after(patience: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(patience).unwrap_or(now + NO_DEADLINE)
}

/// For ever, as far as a deadline can say it.
const NO_DEADLINE: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// A client that calls again and again in one state, with one patience for all calls.
///
/// Once a call is lost the channel is closed and every further call answers
/// [`ChannelError::Closed`].
#[derive(Debug)]
pub struct RpcClient<C: Contract, S = <C as Contract>::Start> {
    end: Option<Client<C, S>>,
    patience: Duration,
}

impl<C: Contract, S: State<Contract = C>> RpcClient<C, S> {
    /// Calls over `end`, waiting `patience` for each reply.
    pub fn new(end: Client<C, S>, patience: Duration) -> Self {
        Self { end: Some(end), patience }
    }

    /// Sends `message` and waits for its reply.
    ///
    /// # Errors
    /// Why there is none.
    pub fn call<M>(&mut self, message: M) -> Result<CallResult<M>, ChannelError>
    where
        M: Call<Contract = C, From = S, AckTo = S, NakTo = S>,
    {
        let end = self.end.take().ok_or(ChannelError::Closed)?;
        let (reply, end) = end.call(message, deadline_after(self.patience))?;
        self.end = Some(end);
        Ok(reply)
    }

    /// The end, unless a call was lost.
    pub fn into_client(self) -> Option<Client<C, S>> {
        self.end
    }
}

/// An end in a message: only a server's, and only before its first message, so that
/// it has no other user.
impl<C: Contract> Field for Server<C> {
    // By name: a contract may carry ends of itself. The fingerprint travels with the end.
    const TYPE_HASH: u64 = type_hash("Server", &[type_hash(C::NAME, &[])]);
    const MAX_BYTES: usize = 12;
    const HAS_ENDPOINTS: bool = true;

    fn pack(self, into: &mut Packer<'_>) {
        let lane = self.core.link.into_lane_name();
        let name = into.attachments().endpoint(lane);
        name.pack(into);
        C::FINGERPRINT.pack(into);
    }

    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
        let lane = u32::unpack(from)?;
        if u64::unpack(from)? != C::FINGERPRINT {
            return Err(Violation::Fingerprint);
        }
        Ok(from.goods().end(lane)?.server())
    }
}
