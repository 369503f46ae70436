//! Exchange of messages and buffers between isolated services.
//!
//! ```text
//!   client ── endpoint ───▶ channel (thread | process) ──▶ endpoint ─── server
//!      │                                                        │
//!      └──────────── blocks of the exchange heap ───────────────┘
//! ```
//!
//! Law 1: a [`Block`](draconis_types::Block) has one owner, and returns to it.
//! Law 2: no endpoint waits without a deadline.
//! Law 3: nothing that a peer can write is trusted.
//!
//! A contract, a server of it in a thread, and a client that lends it a block:
//!
//! ```
//! use std::time::{Duration, Instant};
//!
//! use draconis_exchange::{channel, contract};
//! use draconis_types::{Refusal, Block};
//!
//! contract! {
//!     /// Writes letters.
//!     pub contract Letters served by LettersServer, starting in Ready {
//!         /// Accepts every request.
//!         state Ready {
//!             /// Fills `page` with the letter of number `nth`.
//!             call write: Write (page: Block) { nth: u32 }
//!                 -> AckWrite { len: u32 } => Ready
//!                  | NakWrite why Refusal => Ready;
//!             tell close: Close {} => Done;
//!         }
//!         /// The channel is closed.
//!         state Done {}
//!     }
//! }
//!
//! struct Clerk;
//! impl LettersServer for Clerk {
//!     fn write(&self, request: &mut Write) -> Result<u32, Refusal> {
//!         let letter = ["Dear reader,", "Yours"].get(request.nth as usize);
//!         let letter = letter.ok_or(Refusal::NotFound)?;
//!         Ok(request.page.copy_in(0, letter.as_bytes()) as u32)
//!     }
//! }
//!
//! # fn main() -> Result<(), channel::ChannelError> {
//! let patience = Duration::from_secs(10);
//! let (client, server) = channel::pair::<Letters>();
//! let clerk = std::thread::spawn(move || {
//!     server.serve(patience, |message| answer(&Clerk, message))
//! });
//!
//! let sent = client.send(Write { page: Block::private(64), nth: 0 });
//! let (page, client) = match sent.receive(Instant::now() + patience)? {
//!     channel::Reply::Ack(ack, client) => {
//!         assert_eq!(&ack.page.bytes().unwrap()[..ack.len as usize], b"Dear reader,");
//!         (ack.page, client)
//!     }
//!     channel::Reply::Nak(nak, _) => panic!("{}", nak.why),
//! };
//! // A refusal returns the block, too.
//! let sent = client.send(Write { page, nth: 7 });
//! match sent.receive(Instant::now() + patience)? {
//!     channel::Reply::Ack(..) => panic!("there is no such letter"),
//!     channel::Reply::Nak(nak, client) => {
//!         assert_eq!((nak.why, nak.page.len()), (Refusal::NotFound, 64));
//!         client.send(Close {});
//!     }
//! }
//! clerk.join().unwrap()
//! # }
//! ```
//!
//! Unsafe code is confined to [`shm`], [`channel::thread`] and the page pool. This crate knows
//! neither disks nor file systems nor kernel protocols.

#![deny(unsafe_code)]

pub mod channel;
pub mod contract;
pub mod descriptors;
pub mod heap;
pub mod notices;
#[allow(unsafe_code)]
pub mod shm;
mod violation;

/// For the text that [`contract!`] yields.
#[doc(hidden)]
pub use draconis_types::Refusal;
