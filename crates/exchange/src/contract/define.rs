//! What a contract's text becomes: the traits that [`contract!`](crate::contract!) fills in.

use std::{fmt::Debug, marker::PhantomData};

use super::{
    Refusal,
    fsm::{FieldInfo, Fsm},
    wire::{Field, Wire},
};
use crate::channel::{RawEndpoint, Server};

// Sending allocates nothing, so messages stand unboxed in the enums: large variants are
// meant.

/// A contract: a type without values, naming the text.
pub trait Contract: Sized + 'static {
    /// Where a channel begins.
    type Start: State<Contract = Self>;
    /// What the client may send.
    type ToServer: Wire + Debug + Send + 'static;
    /// What the server may send.
    type ToClient: Wire + Debug + Send + 'static;
    /// Its name in the text.
    const NAME: &'static str;
    /// The text as a table.
    const FSM: Fsm;
    /// How many messages can wait in one direction.
    const QUEUE: usize = Self::FSM.queue_bound();
    /// Compared when two ends meet.
    const FINGERPRINT: u64 = Self::FSM.fingerprint();
    /// The table, where it can be pointed to.
    const TABLE: &'static Fsm = &Self::FSM;
}

/// A state of a contract.
pub trait State: 'static {
    /// The contract it is of.
    type Contract: Contract;
    /// Its index in the contract's table.
    const ID: u8;
}

/// A state named in the text: the client speaks.
pub trait ReceivingState: State {
    /// What can arrive at a server here, each with the end in the state it leads to.
    type Received;
    /// Sorts an arrived message.
    fn decode_received(
        message: <Self::Contract as Contract>::ToServer,
        end: ServerCore<Self::Contract>,
    ) -> Self::Received;
}

/// The untyped half of a [`Server`].
pub type ServerCore<C> = RawEndpoint<<C as Contract>::ToClient, <C as Contract>::ToServer>;

/// The state after request `M`: the server owes one of its two replies.
#[derive(Debug)]
pub enum Awaiting<M> {
    #[doc(hidden)]
    _Never(std::convert::Infallible, PhantomData<fn() -> M>),
}

impl<M: Call> State for Awaiting<M> {
    type Contract = M::Contract;
    const ID: u8 = M::AWAITING;
}

/// A message that a client may send in one state.
pub trait Request: Into<<Self::Contract as Contract>::ToServer> {
    /// The contract it is of.
    type Contract: Contract;
    /// Where it may be sent.
    type From: State<Contract = Self::Contract>;
    /// Where it leads.
    type Next: State<Contract = Self::Contract>;
}

/// A request that is answered. It keeps its goods while a server works on it: whatever the
/// server says, they are in the reply that is made of it.
pub trait Call: Request<Next = Awaiting<Self>> + Debug + 'static {
    /// What a server says when it was done.
    type Answer;
    /// What a server says when it was not.
    type Reason: From<Refusal>;
    /// What stays with a server that has done it: an end, or nothing.
    type Retained;
    /// The reply when it was done: the goods, and the answer.
    type Ack: Into<<Self::Contract as Contract>::ToClient> + Debug;
    /// The reply when it was not: the goods, what was to be given, and the reason.
    type Nak: Into<<Self::Contract as Contract>::ToClient> + Debug;
    /// Where the Ack leads.
    type AckTo: State<Contract = Self::Contract>;
    /// Where the Nak leads.
    type NakTo: State<Contract = Self::Contract>;
    /// Index of the awaiting state.
    const AWAITING: u8;
    /// The Ack, and what stays here.
    fn into_ack(self, answer: Self::Answer) -> (Self::Ack, Self::Retained);
    /// The Nak.
    fn into_nak(self, why: Self::Reason) -> Self::Nak;
    /// Sorts an arrived reply; `None` if it answers something else.
    fn reply(message: <Self::Contract as Contract>::ToClient) -> Option<CallResult<Self>>;
    /// The reply that says `answered`. An end that was given and not kept is closed.
    fn into_reply(
        self,
        answered: Result<Self::Answer, Self::Reason>,
    ) -> <Self::Contract as Contract>::ToClient {
        match answered {
            Ok(answer) => self.into_ack(answer).0.into(),
            Err(why) => self.into_nak(why).into(),
        }
    }
}

/// The reply to request `M`, as its client sees it.
pub type CallResult<M> = Result<<M as Call>::Ack, <M as Call>::Nak>;

/// Hands an arrived request to a server that owes `M`'s replies.
pub type PendingReply<M> = Server<<M as Request>::Contract, Awaiting<M>>;

/// Describes a field of type `T`.
pub const fn field<T: Field>(name: &'static str) -> FieldInfo {
    FieldInfo {
        name,
        kind: T::TYPE_HASH,
        blocks: T::HAS_BLOCKS,
        ends: T::HAS_ENDPOINTS,
        bytes_max: T::MAX_BYTES,
    }
}

/// Turns a contract's text into types.
///
/// A text names the states in which the client speaks. In each it lists *calls* - a
/// request with its two replies, and where each leads - and then *tells*, which nothing
/// answers. After a call the channel is in the state "awaiting" that request, and only
/// its two replies can be sent.
///
/// A request lists its goods in parentheses: blocks, which are in both replies, and are
/// named nowhere else. What it gives away for good, if it is done, follows its fields:
/// `giving (end: End)`; that is in the Nak alone. An Ack has one field more at the most, the
/// server's answer, and a Nak a reason that can say a [`Refusal`].
///
/// ```
/// use draconis_exchange::{channel, contract, heap::Block, contract::Refusal};
/// use std::time::{Duration, Instant};
///
/// contract! {
///     /// Turns bytes round.
///     pub contract Mirror served by MirrorServer, starting in Ready {
///         /// Anything may be asked.
///         state Ready {
///             /// Reverses the bytes of `buffer`.
///             call flip: Flip (buffer: Block) {}
///                 -> AckFlip { first: u8 } => Ready
///                  | NakFlip why Refusal => Ready, or NotSupported;
///             tell close: Close {} => Done;
///         }
///         /// Nothing more is said.
///         state Done {}
///     }
/// }
///
/// struct Hand;
/// impl MirrorServer for Hand {
///     fn flip(&self, request: &mut Flip) -> Result<u8, Refusal> {
///         let bytes = request.buffer.bytes_mut().ok_or(Refusal::Invalid)?;
///         bytes.reverse();
///         bytes.first().copied().ok_or(Refusal::Invalid)
///     }
/// }
///
/// fn main() -> Result<(), channel::Lost> {
///     let soon = Instant::now() + Duration::from_secs(1);
///     let (client, server) = channel::pair::<Mirror>();
///     let hand = std::thread::spawn(move || serve(server, &Hand, Duration::from_secs(1)));
///     let mut buffer = Block::private(2);
///     buffer.copy_in(0, b"ab");
///     let client = match client.send(Flip { buffer }).receive(soon)? {
///         channel::Reply::Ack(ack, client) => {
///             assert_eq!((ack.buffer.bytes(), ack.first), (Some(&b"ba"[..]), b'b'));
///             client
///         }
///         channel::Reply::Nak(nak, _) => panic!("{}", nak.why),
///     };
///     client.send(Close {});
///     hand.join().unwrap()
/// }
/// ```
///
/// What it yields, for the text above, in the module where it stands:
///
/// - `Mirror`, which implements [`Contract`]: the table with the run-time validator, the
///   queue bound and the fingerprint;
/// - the states `Ready` and `Done`, and a struct per message;
/// - `ToServer` and `ToClient`, the messages of each direction;
/// - `MirrorServer`, the trait of its servers: one method per call, a function of the
///   request that it is lent. `or NotSupported` gives a method a body that refuses with that
///   reason;
/// - `received::Ready`, what [`Server::receive`](crate::channel::Server::receive) answers
///   in that state;
/// - `answer`, which hands one message to a server, and `serve`, the loop around it.
///
/// # Misuse does not compile
///
/// A step that the state does not have:
/// ```compile_fail,E0271
/// use draconis_exchange::{channel, contract::file};
/// let (client, _server) = channel::pair::<file::File>();
/// let client = client.send(file::Close {});
/// client.send(file::GetAttributes {}); // closed: nothing may be sent
/// ```
///
/// An end, or a block, after it was given away:
/// ```compile_fail,E0382
/// use draconis_exchange::{channel, contract::file};
/// let (client, _server) = channel::pair::<file::File>();
/// client.send(file::Close {});
/// client.send(file::GetAttributes {});
/// ```
/// ```compile_fail,E0382
/// use draconis_exchange::{channel, contract::file, heap::Block};
/// let (client, _server) = channel::pair::<file::File>();
/// let buffer = Block::private(4096);
/// client.send(file::Read { buffer, buffer_offset: 0, offset: 0, len: 4096, no_atime: false });
/// buffer.len();
/// ```
///
/// A cycle without a receive, whose queue would have no bound:
/// ```compile_fail,E0080
/// # fn main() {}
/// draconis_exchange::contract! {
///     /// Never listens.
///     pub contract Chatter served by ChatterServer, starting in Ready {
///         /// Always.
///         state Ready {
///             tell poke: Poke {} => Ready;
///         }
///     }
/// }
/// ```
///
/// A buffer among the fields, where no reply would return it:
/// ```compile_fail,E0080
/// # fn main() {}
/// use draconis_exchange::{contract::Refusal, heap::Block};
/// draconis_exchange::contract! {
///     /// Keeps what it gets.
///     pub contract Sink served by SinkServer, starting in Ready {
///         /// Always.
///         state Ready {
///             /// Swallows.
///             call eat: Eat { buffer: Block } -> AckEat {} => Ready | NakEat why Refusal => Ready;
///         }
///     }
/// }
/// ```
///
/// A server that keeps a buffer it was lent:
/// ```compile_fail,E0507
/// use draconis_exchange::{contract::{Attributes, Refusal, file}, heap::Block};
/// struct Keeper(std::cell::RefCell<Vec<Block>>);
/// impl file::FileServer for Keeper {
///     fn read(&self, request: &mut file::Read) -> Result<u32, Refusal> {
///         self.0.borrow_mut().push(request.buffer);
///         Ok(0)
///     }
///     fn get_attributes(&self, _: &mut file::GetAttributes) -> Result<Attributes, Refusal> {
///         Err(Refusal::NotFound)
///     }
/// }
/// ```
#[macro_export]
macro_rules! contract {
    (
        $(#[$cmeta:meta])*
        pub contract $C:ident served by $Trait:ident, starting in $Start:ident {$(
            $(#[$smeta:meta])*
            state $S:ident {
                $(
                    $(#[$rmeta:meta])*
                    call $method:ident: $R:ident $(($($g:ident: $gt:ty),*))?
                        { $($(#[$fmeta:meta])* $f:ident: $ft:ty),* $(,)? }
                        $(giving ($e:ident: $et:ty))?
                        -> $A:ident { $($a:ident: $at:ty)? } => $ATo:ident
                         | $N:ident why $why:ty => $NTo:ident
                         $(, or $default:ident)?;
                )*
                $(
                    tell $tmethod:ident: $T:ident { $($tf:ident: $tft:ty),* $(,)? } => $TTo:ident;
                )*
            }
        )*}
    ) => {
        $(#[$cmeta])*
        #[derive(Debug)]
        pub enum $C {}

        $(
            $(#[$smeta])*
            #[derive(Debug)]
            pub enum $S {}
        )*

        $($(
            $(#[$rmeta])*
            #[derive(Debug)]
            #[allow(missing_docs)]
            pub struct $R {
                $($(pub $g: $gt,)*)?
                $($(#[$fmeta])* pub $f: $ft,)*
                $(pub $e: $et,)?
            }

            #[doc = concat!("[`", stringify!($R), "`] was done; its goods come back.")]
            #[derive(Debug)]
            #[allow(missing_docs)]
            pub struct $A { $($(pub $g: $gt,)*)? $(pub $a: $at,)? }

            #[doc = concat!("[`", stringify!($R), "`] was refused; its goods come back.")]
            #[derive(Debug)]
            pub struct $N {
                $($(#[doc = "As it was sent."] pub $g: $gt,)*)?
                $(#[doc = "As it was sent."] pub $e: $et,)?
                /// Reason.
                pub why: $why,
            }
        )*
        $(
            #[doc = concat!("`", stringify!($tmethod), "`: nothing answers it.")]
            #[derive(Debug)]
            #[allow(missing_docs)]
            pub struct $T { $(pub $tf: $tft),* }
        )*)*

        #[doc = concat!("What the client of a [`", stringify!($C), "`] sends.")]
        #[derive(Debug)]
        #[allow(missing_docs, clippy::large_enum_variant)]
        pub enum ToServer { $($($R($R),)* $($T($T),)*)* }

        #[doc = concat!("What the server of a [`", stringify!($C), "`] sends.")]
        #[derive(Debug)]
        #[allow(missing_docs, clippy::large_enum_variant)]
        pub enum ToClient { $($($A($A), $N($N),)*)* }

        /// What can arrive at a server, by state, each with the end in the state it leads to.
        pub mod received {
            #[allow(unused_imports)]
            use super::*;
            $(
                #[doc = concat!("What can arrive in state `", stringify!($S), "`.")]
                #[derive(Debug)]
                #[allow(missing_docs, clippy::large_enum_variant)]
                pub enum $S {
                    $($R(super::$R, $crate::contract::PendingReply<super::$R>),)*
                    $($T(super::$T, $crate::channel::Server<super::$C, super::$TTo>),)*
                }
            )*
        }

        #[doc = concat!("A server of the [`", stringify!($C), "`] contract.")]
        ///
        /// Each method is lent a request, whose goods are in the reply whatever it says. One
        /// that has a body refuses with the reason the contract names.
        #[allow(unused_parens)]
        pub trait $Trait {
            $($(
                $crate::contract!(
                    @method { $(#[$rmeta])* } $method $R ($($at)?) ($why) $($default)?
                );
            )*
            $(
                #[doc = concat!("[`", stringify!($T), "`] arrived.")]
                fn $tmethod(&self, message: $T) {
                    let _ = message;
                }
            )*)*
        }

        /// Hands one message to `server`; what nothing answers gives `None`.
        pub fn answer<S: $Trait + ?Sized>(server: &S, message: ToServer) -> Option<ToClient> {
            match message {
                $($(ToServer::$R(mut request) => {
                    let answered = server.$method(&mut request);
                    Some($crate::contract::Call::into_reply(request, answered))
                })*
                $(ToServer::$T(m) => {
                    server.$tmethod(m);
                    None
                })*)*
            }
        }

        /// Answers one client until it closes, is silent for `patience`, or breaks the
        /// contract.
        ///
        /// # Errors
        /// Reason the client was lost; a client that closed is no error.
        pub fn serve<S: $Trait + ?Sized>(
            end: $crate::channel::Server<$C>,
            server: &S,
            patience: ::std::time::Duration,
        ) -> Result<(), $crate::channel::ChannelError> {
            end.serve(patience, |message| answer(server, message))
        }

        const _: () = {
            use $crate::contract::{define, fsm, wire};

            #[repr(u8)]
            enum StateId { $($S,)* $($($R,)*)* }
            #[repr(u8)]
            enum Tag { $($($R, $A, $N,)* $($T,)*)* }

            impl define::Contract for $C {
                type Start = $Start;
                type ToServer = ToServer;
                type ToClient = ToClient;
                const NAME: &'static str = stringify!($C);
                const FSM: fsm::Fsm = fsm::Fsm {
                    name: stringify!($C),
                    states: &[$(stringify!($S),)* $($(concat!("awaiting ", stringify!($R)),)*)*],
                    messages: &[$(
                        $(
                            fsm::MessageInfo {
                                name: stringify!($R),
                                sender: fsm::Sender::Client,
                                fields: &[
                                    $($(define::field::<$gt>(stringify!($g)),)*)?
                                    $(define::field::<$ft>(stringify!($f)),)*
                                    $(define::field::<$et>(stringify!($e)),)?
                                ],
                            },
                            fsm::MessageInfo {
                                name: stringify!($A),
                                sender: fsm::Sender::Server,
                                fields: &[
                                    $($(define::field::<$gt>(stringify!($g)),)*)?
                                    $(define::field::<$at>(stringify!($a)),)?
                                ],
                            },
                            fsm::MessageInfo {
                                name: stringify!($N),
                                sender: fsm::Sender::Server,
                                fields: &[
                                    $($(define::field::<$gt>(stringify!($g)),)*)?
                                    $(define::field::<$et>(stringify!($e)),)?
                                    define::field::<$why>("why"),
                                ],
                            },
                        )*
                        $(fsm::MessageInfo {
                            name: stringify!($T),
                            sender: fsm::Sender::Client,
                            fields: &[$(define::field::<$tft>(stringify!($tf))),*],
                        },)*
                    )*],
                    steps: &[$(
                        $(
                            fsm::Transition { from: StateId::$S as u8, tag: Tag::$R as u8, to: StateId::$R as u8 },
                            fsm::Transition { from: StateId::$R as u8, tag: Tag::$A as u8, to: StateId::$ATo as u8 },
                            fsm::Transition { from: StateId::$R as u8, tag: Tag::$N as u8, to: StateId::$NTo as u8 },
                        )*
                        $(fsm::Transition { from: StateId::$S as u8, tag: Tag::$T as u8, to: StateId::$TTo as u8 },)*
                    )*],
                    families: &[$($(fsm::CallTags {
                        request: Tag::$R as u8,
                        ack: Tag::$A as u8,
                        nak: Tag::$N as u8,
                    },)*)*],
                    start: StateId::$Start as u8,
                };
            }

            // Evaluated even where no channel is made.
            const _: usize = <$C as define::Contract>::QUEUE;
            const _: () = <$C as define::Contract>::FSM.check(wire::MAX_MESSAGE_BYTES);

            $(
                impl define::State for $S {
                    type Contract = $C;
                    const ID: u8 = StateId::$S as u8;
                }

                impl define::ReceivingState for $S {
                    type Received = received::$S;
                    #[allow(unused_variables)]
                    fn decode_received(message: ToServer, end: define::ServerCore<$C>) -> received::$S {
                        match message {
                            $(ToServer::$R(m) => received::$S::$R(m, end.into()),)*
                            $(ToServer::$T(m) => received::$S::$T(m, end.into()),)*
                            #[allow(unreachable_patterns)]
                            _ => unreachable!("the table admitted a message of another state"),
                        }
                    }
                }

                $(
                    impl From<$R> for ToServer {
                        fn from(m: $R) -> Self {
                            ToServer::$R(m)
                        }
                    }
                    impl From<$A> for ToClient {
                        fn from(m: $A) -> Self {
                            ToClient::$A(m)
                        }
                    }
                    impl From<$N> for ToClient {
                        fn from(m: $N) -> Self {
                            ToClient::$N(m)
                        }
                    }
                    impl define::Request for $R {
                        type Contract = $C;
                        type From = $S;
                        type Next = define::Awaiting<$R>;
                    }
                    #[allow(unused_parens, unused_variables)]
                    impl define::Call for $R {
                        type Answer = ($($at)?);
                        type Reason = $why;
                        type Retained = ($($et)?);
                        type Ack = $A;
                        type Nak = $N;
                        type AckTo = $ATo;
                        type NakTo = $NTo;
                        const AWAITING: u8 = StateId::$R as u8;
                        fn into_ack(self, answer: Self::Answer) -> ($A, Self::Retained) {
                            ($A { $($($g: self.$g,)*)? $($a: answer,)? }, ($(self.$e)?))
                        }
                        fn into_nak(self, why: $why) -> $N {
                            $N { $($($g: self.$g,)*)? $($e: self.$e,)? why }
                        }
                        fn reply(message: ToClient) -> Option<Result<$A, $N>> {
                            match message {
                                ToClient::$A(ack) => Some(Ok(ack)),
                                ToClient::$N(nak) => Some(Err(nak)),
                                #[allow(unreachable_patterns)]
                                _ => None,
                            }
                        }
                    }
                )*
                $(
                    impl From<$T> for ToServer {
                        fn from(m: $T) -> Self {
                            ToServer::$T(m)
                        }
                    }
                    impl define::Request for $T {
                        type Contract = $C;
                        type From = $S;
                        type Next = $TTo;
                    }
                )*
            )*

            #[allow(unused_variables)]
            impl wire::Wire for ToServer {
                fn tag(&self) -> u8 {
                    match self {
                        $($(ToServer::$R(_) => Tag::$R as u8,)* $(ToServer::$T(_) => Tag::$T as u8,)*)*
                    }
                }
                fn pack(self, into: &mut wire::Packer<'_>) {
                    match self {
                        $($(ToServer::$R(m) => {
                            $($(wire::Field::pack(m.$g, into);)*)?
                            $(wire::Field::pack(m.$f, into);)*
                            $(wire::Field::pack(m.$e, into);)?
                        })*
                        $(ToServer::$T(m) => { $(wire::Field::pack(m.$tf, into);)* })*)*
                    }
                }
                fn unpack(tag: u8, from: &mut wire::Unpacker<'_>) -> Result<Self, wire::Violation> {
                    $($(if tag == Tag::$R as u8 {
                        return Ok(ToServer::$R($R {
                            $($($g: wire::Field::unpack(from)?,)*)?
                            $($f: wire::Field::unpack(from)?,)*
                            $($e: wire::Field::unpack(from)?,)?
                        }));
                    })*
                    $(if tag == Tag::$T as u8 {
                        return Ok(ToServer::$T($T { $($tf: wire::Field::unpack(from)?),* }));
                    })*)*
                    Err(wire::Violation::Tag(u32::from(tag)))
                }
            }

            #[allow(unused_variables)]
            impl wire::Wire for ToClient {
                fn tag(&self) -> u8 {
                    match *self {
                        $($(ToClient::$A(_) => Tag::$A as u8, ToClient::$N(_) => Tag::$N as u8,)*)*
                    }
                }
                fn pack(self, into: &mut wire::Packer<'_>) {
                    match self {
                        $($(
                            ToClient::$A(m) => {
                                $($(wire::Field::pack(m.$g, into);)*)?
                                $(wire::Field::pack(m.$a, into);)?
                            }
                            ToClient::$N(m) => {
                                $($(wire::Field::pack(m.$g, into);)*)?
                                $(wire::Field::pack(m.$e, into);)?
                                wire::Field::pack(m.why, into);
                            }
                        )*)*
                    }
                }
                fn unpack(tag: u8, from: &mut wire::Unpacker<'_>) -> Result<Self, wire::Violation> {
                    $($(
                        if tag == Tag::$A as u8 {
                            return Ok(ToClient::$A($A {
                                $($($g: wire::Field::unpack(from)?,)*)?
                                $($a: wire::Field::unpack(from)?,)?
                            }));
                        }
                        if tag == Tag::$N as u8 {
                            return Ok(ToClient::$N($N {
                                $($($g: wire::Field::unpack(from)?,)*)?
                                $($e: wire::Field::unpack(from)?,)?
                                why: wire::Field::unpack(from)?,
                            }));
                        }
                    )*)*
                    Err(wire::Violation::Tag(u32::from(tag)))
                }
            }
        };
    };

    (@method { $($meta:tt)* } $method:ident $R:ident ($($answer:ty)?) ($why:ty)) => {
        $($meta)*
        ///
        /// # Errors
        /// Reason it was not done.
        fn $method(&self, request: &mut $R) -> Result<($($answer)?), $why>;
    };
    (@method { $($meta:tt)* } $method:ident $R:ident ($($answer:ty)?) ($why:ty) $default:ident) => {
        $($meta)*
        ///
        /// # Errors
        /// Reason it was not done.
        fn $method(&self, request: &mut $R) -> Result<($($answer)?), $why> {
            let _ = request;
            Err($crate::contract::Refusal::$default.into())
        }
    };
}
