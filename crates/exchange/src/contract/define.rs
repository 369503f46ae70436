//! The [`contract!`](crate::contract!) macro and the traits that it implements.

use std::{fmt::Debug, marker::PhantomData};

use super::{
    fsm::{FieldInfo, Fsm},
    wire::{Field, Wire},
};
use draconis_types::Refusal;

// Sending allocates nothing, so messages are unboxed in the enums: large variants are intended.

/// A contract: a type without values.
pub trait Contract: Sized + 'static {
    /// First state of a channel.
    type Start: State<Contract = Self>;
    /// Messages of the client.
    type ToServer: Wire + Debug + Send + 'static;
    /// Messages of the server.
    type ToClient: Wire + Debug + Send + 'static;
    /// Name in the definition.
    const NAME: &'static str;
    /// Table of states, messages and steps.
    const FSM: Fsm;
    /// Maximum messages that wait in one direction.
    const QUEUE: usize = Self::FSM.queue_bound();
    /// Hash that both endpoints of a channel must agree on.
    const FINGERPRINT: u64 = Self::FSM.fingerprint();
    /// The table as a static.
    const TABLE: &'static Fsm = &Self::FSM;
}

/// A state of a contract.
pub trait State: 'static {
    /// Contract of the state.
    type Contract: Contract;
    /// Index in the contract's table.
    const ID: u8;
}

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
    /// Contract of the request.
    type Contract: Contract;
    /// State in which it may be sent.
    type From: State<Contract = Self::Contract>;
    /// State to which it leads.
    type Next: State<Contract = Self::Contract>;
}

/// A request with a reply. It keeps its attachments while a server works on it; both replies return
/// them.
pub trait Call: Request<Next = Awaiting<Self>> + Debug + 'static {
    /// Result of success.
    type Answer;
    /// Reason of failure.
    type Reason: From<Refusal>;
    /// Reply to a successful request: attachments and answer.
    type Ack: Into<<Self::Contract as Contract>::ToClient> + Debug;
    /// Reply to a failed request: attachments and reason.
    type Nak: Into<<Self::Contract as Contract>::ToClient> + Debug;
    /// State after the Ack.
    type AckTo: State<Contract = Self::Contract>;
    /// State after the Nak.
    type NakTo: State<Contract = Self::Contract>;
    /// Index of the awaiting state.
    const AWAITING: u8;
    /// Returns the Ack.
    fn into_ack(self, answer: Self::Answer) -> Self::Ack;
    /// Returns the Nak.
    fn into_nak(self, why: Self::Reason) -> Self::Nak;
    /// Decodes a received reply; `None` if it belongs to another request.
    fn reply(message: <Self::Contract as Contract>::ToClient) -> Option<CallResult<Self>>;
    /// Returns the reply for `answered`.
    fn into_reply(
        self,
        answered: Result<Self::Answer, Self::Reason>,
    ) -> <Self::Contract as Contract>::ToClient {
        match answered {
            Ok(answer) => self.into_ack(answer).into(),
            Err(why) => self.into_nak(why).into(),
        }
    }
}

/// The reply to request `M`, as its client sees it.
pub type CallResult<M> = Result<<M as Call>::Ack, <M as Call>::Nak>;

/// Describes a field of type `T`.
pub const fn field<T: Field>(name: &'static str) -> FieldInfo {
    FieldInfo { name, kind: T::TYPE_HASH, blocks: T::HAS_BLOCKS, bytes_max: T::MAX_BYTES }
}

/// Defines a contract and generates its types.
///
/// A contract lists the states in which the client sends. In each it lists *calls* - a request with
/// its two replies, and the state after each - and then *tells*, which have no reply. After a call
/// the channel is in the state "awaiting" that request, and only its two replies can be sent.
///
/// A request lists its attachments in parentheses: blocks, which both replies return, and which are
/// named nowhere else. An Ack has at most one field more, the server's answer. A Nak has a reason
/// that a [`Refusal`] converts to.
///
/// ```
/// use draconis_exchange::{channel, contract};
/// use draconis_types::{Block, Refusal};
/// use std::time::{Duration, Instant};
///
/// contract! {
///     /// Turns bytes round.
///     pub contract Mirror served by MirrorServer, starting in Ready {
///         /// Accepts every request.
///         state Ready {
///             /// Reverses the bytes of `buffer`.
///             call flip: Flip (buffer: Block) {}
///                 -> AckFlip { first: u8 } => Ready
///                  | NakFlip why Refusal => Ready, or NotSupported;
///             tell close: Close {} => Done;
///         }
///         /// The channel is closed.
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
/// fn main() -> Result<(), channel::ChannelError> {
///     let soon = Instant::now() + Duration::from_secs(1);
///     let (client, server) = channel::pair::<Mirror>();
///     let hand = std::thread::spawn(move || {
///         server.serve(Duration::from_secs(1), |message| answer(&Hand, message))
///     });
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
/// The contract above generates, in its module:
///
/// - `Mirror`, which implements [`Contract`]: table, run-time validator, queue bound and
///   fingerprint;
/// - the states `Ready` and `Done`, and a struct per message;
/// - `ToServer` and `ToClient`, the messages of each direction;
/// - `MirrorServer`, the trait of its servers: one method per call, which borrows the request. `or
///   NotSupported` gives a method a default body that refuses with that reason;
/// - `answer`, which passes one message to a server: see
///   [`Server::serve`](crate::channel::Server::serve).
///
/// # Misuse does not compile
///
/// A step that the state does not allow:
/// ```compile_fail,E0271
/// use draconis_exchange::{channel, contract::file};
/// let (client, _server) = channel::pair::<file::File>();
/// let client = client.send(file::Close {});
/// client.send(file::GetAttributes {}); // closed: nothing may be sent
/// ```
///
/// An endpoint, or a block, after it was sent:
/// ```compile_fail,E0382
/// use draconis_exchange::{channel, contract::file};
/// let (client, _server) = channel::pair::<file::File>();
/// client.send(file::Close {});
/// client.send(file::GetAttributes {});
/// ```
/// ```compile_fail,E0382
/// use draconis_exchange::{channel, contract::file};
/// use draconis_types::Block;
/// let (client, _server) = channel::pair::<file::File>();
/// let buffer = Block::private(4096);
/// client.send(file::Read { buffer, buffer_offset: 0, offset: 0, len: 4096, no_atime: false });
/// buffer.len();
/// ```
///
/// A cycle without a receive, whose queue would be unbounded:
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
/// A buffer among the fields, which no reply would return:
/// ```compile_fail,E0080
/// # fn main() {}
/// use draconis_types::{Refusal, Block};
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
/// A server that keeps a borrowed buffer:
/// ```compile_fail,E0507
/// use draconis_types::{Attributes, Refusal, Block};
/// use draconis_exchange::contract::file;
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
            }

            #[doc = concat!("[`", stringify!($R), "`] was done; its goods come back.")]
            #[derive(Debug)]
            #[allow(missing_docs)]
            pub struct $A { $($(pub $g: $gt,)*)? $(pub $a: $at,)? }

            #[doc = concat!("[`", stringify!($R), "`] was refused; its goods come back.")]
            #[derive(Debug)]
            pub struct $N {
                $($(#[doc = "As it was sent."] pub $g: $gt,)*)?
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

        #[doc = concat!("A server of the [`", stringify!($C), "`] contract.")]
        ///
        /// Each method borrows a request, whose attachments the reply returns in any case. A method
        /// with a default body refuses with the reason that the contract names.
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

        /// Passes one message to `server`; returns `None` for messages without a reply.
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
                    calls: &[$($(fsm::CallTags {
                        request: Tag::$R as u8,
                        ack: Tag::$A as u8,
                        nak: Tag::$N as u8,
                    },)*)*],
                    start: StateId::$Start as u8,
                };
            }

            // Evaluated even if no channel is created.
            const _: usize = <$C as define::Contract>::QUEUE;
            const _: () = <$C as define::Contract>::FSM.check(wire::MAX_MESSAGE_BYTES);

            $(
                impl define::State for $S {
                    type Contract = $C;
                    const ID: u8 = StateId::$S as u8;
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
                        type Ack = $A;
                        type Nak = $N;
                        type AckTo = $ATo;
                        type NakTo = $NTo;
                        const AWAITING: u8 = StateId::$R as u8;
                        fn into_ack(self, answer: Self::Answer) -> $A {
                            $A { $($($g: self.$g,)*)? $($a: answer,)? }
                        }
                        fn into_nak(self, why: $why) -> $N {
                            $N { $($($g: self.$g,)*)? why }
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
                        })*
                        $(ToServer::$T(m) => { $(wire::Field::pack(m.$tf, into);)* })*)*
                    }
                }
                fn unpack(tag: u8, from: &mut wire::Unpacker<'_>) -> Result<Self, wire::Violation> {
                    $($(if tag == Tag::$R as u8 {
                        return Ok(ToServer::$R($R {
                            $($($g: wire::Field::unpack(from)?,)*)?
                            $($f: wire::Field::unpack(from)?,)*
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
            Err($crate::Refusal::$default.into())
        }
    };
}
