//! The server side of the NBD protocol, for any [`Disk`](draconis_device::Disk).
//!
//! ```text
//!   client ── stream ──▶ Connection::negotiate ──▶ Session: an export, what both sides agreed on
//!                        Connection::transmit ──┬─ thread: reads a request, carries it out, replies
//!                                               └─ up to MAX_THREADS of them, replies in any order
//!                                     Export ──▶ trait Disk
//! ```
//!
//! Law 1: bytes of a client are untrusted. A request that breaks the protocol closes its connection;
//! one that is only wrong gets an error. No other connection notices.
//! Law 2: the memory of a connection is bounded: [`MAX_INFLIGHT_BYTES`] of contents, [`MAX_THREADS`]
//! threads, [`MAX_OPTION_BYTES`] of an option. A client that does not read replies stops being read.
//! Law 3: a flush of one connection covers all completed writes of every connection of the export.
//! A clone has one connection, so its export does not promise that to clients.
//! Law 4: a write is answered once every read sees it; with FUA, and by a flush, once it is durable.
//!
//! This crate opens no sockets and knows no formats. It implements the fixed newstyle negotiation,
//! structured replies, extended headers, the metadata context `base:allocation`, and STARTTLS up to the TLS stream,
//! which the caller provides.

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod export;
mod negotiation;
mod transmission;
mod wire;

use std::io::{BufReader, Read, Write};

pub use crate::export::{ChosenExport, CloneSource, Export};
pub use crate::negotiation::{MAX_OPTION_BYTES, MAX_OPTIONS, Session};
pub use crate::transmission::{MAX_INFLIGHT_BYTES, MAX_THREADS};
pub use crate::wire::MAX_PAYLOAD_BYTES;

/// Size of the buffer for requests, which often arrive several at a time.
const INPUT_BUFFER_BYTES: usize = 64 << 10;

/// Reasons for closing a connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The stream failed, or ended inside a message.
    #[error(transparent)]
    Stream(#[from] std::io::Error),
    /// The client broke the protocol.
    #[error("protocol error: {0}")]
    Protocol(&'static str),
    /// The client could not get a clone.
    #[error("no clone for the client: {0}")]
    NoClone(String),
}

/// A connection to a client.
pub struct Connection<R, W> {
    input: BufReader<R>,
    output: W,
    /// Handshake flags of the client, once they were read.
    client_flags: Option<u32>,
}

impl<R: Read + Send, W: Write + Send> Connection<R, W> {
    /// Creates a connection over both directions of a stream.
    pub fn new(input: R, output: W) -> Self {
        let input = BufReader::with_capacity(INPUT_BUFFER_BYTES, input);
        Self { input, output, client_flags: None }
    }

    /// Waits for STARTTLS, and refuses all options before it. Returns false if the client leaves
    /// instead; else everything that follows is TLS: see [`Connection::upgrade`].
    ///
    /// # Errors
    /// See [`ConnectionError`].
    pub fn require_tls(&mut self) -> Result<bool, ConnectionError> {
        let flags = negotiation::greet(&mut self.input, &mut self.output)?;
        self.client_flags = Some(flags);
        negotiation::require_tls(&mut self.input, &mut self.output)
    }

    /// Continues over both directions of a TLS stream.
    ///
    /// # Errors
    /// If the client has sent more in plain text.
    pub fn upgrade<R2: Read + Send, W2: Write + Send>(
        self,
        input: R2,
        output: W2,
    ) -> Result<Connection<R2, W2>, ConnectionError> {
        // It would be taken for contents of the TLS stream.
        if !self.input.buffer().is_empty() {
            return Err(ConnectionError::Protocol("plain text after STARTTLS"));
        }
        Ok(Connection { client_flags: self.client_flags, ..Connection::new(input, output) })
    }

    /// Negotiates until the client chooses one of `exports`; `None` if it leaves instead. The empty
    /// name is the first export.
    ///
    /// # Errors
    /// See [`ConnectionError`].
    pub fn negotiate<'e>(
        &mut self,
        exports: &'e [Export],
    ) -> Result<Option<Session<'e>>, ConnectionError> {
        let flags = match self.client_flags {
            Some(flags) => flags,
            None => negotiation::greet(&mut self.input, &mut self.output)?,
        };
        negotiation::negotiate(&mut self.input, &mut self.output, flags, exports)
    }

    /// Carries out requests until the client leaves. Returns once every request that was read has
    /// been answered.
    ///
    /// # Errors
    /// See [`ConnectionError`].
    pub fn transmit(self, session: &Session<'_>) -> Result<(), ConnectionError> {
        transmission::transmit(self.input, self.output, session)
    }
}
