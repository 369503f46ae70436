//! Numbers and messages of the protocol, named as in its specification (`doc/proto.md`).

use std::io::{IoSlice, Read, Write};

use crate::ConnectionError;

pub(crate) const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
pub(crate) const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
pub(crate) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub(crate) const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(crate) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub(crate) const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
pub(crate) const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;
pub(crate) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Maximum payload of a read or write: what clients assume of servers.
pub const MAX_PAYLOAD_BYTES: u32 = 32 << 20;
/// Length of a request without its payload.
const REQUEST_BYTES: usize = 28;
/// Length of a request with extended headers, without its payload.
pub(crate) const EXTENDED_REQUEST_BYTES: usize = 32;
/// Length of the payload of BLOCK_STATUS that names one metadata context.
pub(crate) const STATUS_PAYLOAD_BYTES: u32 = 12;
/// Maximum length of a string.
pub(crate) const MAX_STRING_BYTES: usize = 4096;

/// Handshake flags: of the server, and the same bits of the client.
pub(crate) const FLAG_FIXED_NEWSTYLE: u16 = 1;
pub(crate) const FLAG_NO_ZEROES: u16 = 2;

/// Transmission flags.
pub(crate) mod flag {
    pub(crate) const HAS_FLAGS: u16 = 1;
    pub(crate) const READ_ONLY: u16 = 1 << 1;
    pub(crate) const SEND_FLUSH: u16 = 1 << 2;
    pub(crate) const SEND_FUA: u16 = 1 << 3;
    pub(crate) const ROTATIONAL: u16 = 1 << 4;
    pub(crate) const SEND_TRIM: u16 = 1 << 5;
    pub(crate) const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub(crate) const SEND_DF: u16 = 1 << 7;
    pub(crate) const CAN_MULTI_CONN: u16 = 1 << 8;
    pub(crate) const SEND_CACHE: u16 = 1 << 10;
    pub(crate) const SEND_FAST_ZERO: u16 = 1 << 11;
    pub(crate) const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// Options.
pub(crate) mod opt {
    pub(crate) const EXPORT_NAME: u32 = 1;
    pub(crate) const ABORT: u32 = 2;
    pub(crate) const LIST: u32 = 3;
    pub(crate) const STARTTLS: u32 = 5;
    pub(crate) const INFO: u32 = 6;
    pub(crate) const GO: u32 = 7;
    pub(crate) const STRUCTURED_REPLY: u32 = 8;
    pub(crate) const LIST_META_CONTEXT: u32 = 9;
    pub(crate) const SET_META_CONTEXT: u32 = 10;
    pub(crate) const EXTENDED_HEADERS: u32 = 11;
}

/// Replies to options.
pub(crate) mod rep {
    pub(crate) const ACK: u32 = 1;
    pub(crate) const SERVER: u32 = 2;
    pub(crate) const INFO: u32 = 3;
    pub(crate) const META_CONTEXT: u32 = 4;
    pub(crate) const ERR_UNSUP: u32 = (1 << 31) + 1;
    pub(crate) const ERR_POLICY: u32 = (1 << 31) + 2;
    pub(crate) const ERR_INVALID: u32 = (1 << 31) + 3;
    pub(crate) const ERR_TLS_REQD: u32 = (1 << 31) + 5;
    pub(crate) const ERR_UNKNOWN: u32 = (1 << 31) + 6;
    pub(crate) const ERR_EXT_HEADER_REQD: u32 = (1 << 31) + 10;
}

/// Kinds of information about an export.
pub(crate) mod info {
    pub(crate) const EXPORT: u16 = 0;
    pub(crate) const NAME: u16 = 1;
    pub(crate) const DESCRIPTION: u16 = 2;
    pub(crate) const BLOCK_SIZE: u16 = 3;
}

/// Commands.
pub(crate) mod cmd {
    pub(crate) const READ: u16 = 0;
    pub(crate) const WRITE: u16 = 1;
    pub(crate) const DISC: u16 = 2;
    pub(crate) const FLUSH: u16 = 3;
    pub(crate) const TRIM: u16 = 4;
    pub(crate) const CACHE: u16 = 5;
    pub(crate) const WRITE_ZEROES: u16 = 6;
    pub(crate) const BLOCK_STATUS: u16 = 7;
}

/// Flags of commands.
pub(crate) mod cmd_flag {
    pub(crate) const FUA: u16 = 1;
    pub(crate) const NO_HOLE: u16 = 1 << 1;
    pub(crate) const DF: u16 = 1 << 2;
    pub(crate) const REQ_ONE: u16 = 1 << 3;
    pub(crate) const FAST_ZERO: u16 = 1 << 4;
    pub(crate) const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Types of structured reply chunks, and the flag of the last chunk.
pub(crate) mod chunk {
    pub(crate) const DONE: u16 = 1;
    pub(crate) const NONE: u16 = 0;
    pub(crate) const OFFSET_DATA: u16 = 1;
    pub(crate) const OFFSET_HOLE: u16 = 2;
    pub(crate) const BLOCK_STATUS: u16 = 5;
    pub(crate) const BLOCK_STATUS_EXT: u16 = 6;
    pub(crate) const ERROR: u16 = (1 << 15) + 1;
}

/// The metadata context of holes, its number, and its states.
pub(crate) const BASE_ALLOCATION: &str = "base:allocation";
pub(crate) const BASE_ALLOCATION_ID: u32 = 1;
pub(crate) const STATE_HOLE_ZERO: u32 = 1 | 2;

/// Errors that a reply can have; the numbers are the protocol's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(crate) enum ErrorCode {
    Perm = 1,
    Io = 5,
    NoMem = 12,
    Inval = 22,
    NoSpc = 28,
    NotSup = 95,
    Shutdown = 108,
}

/// Form of the headers in the transmission phase.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Headers {
    /// Compact requests and simple replies.
    #[default]
    Simple,
    /// Compact requests; replies with contents are structured.
    Structured,
    /// Extended requests and replies.
    Extended,
}

impl Headers {
    /// Returns the length of a request's header.
    pub(crate) fn request_bytes(self) -> usize {
        match self {
            Self::Simple | Self::Structured => REQUEST_BYTES,
            Self::Extended => EXTENDED_REQUEST_BYTES,
        }
    }
}

/// A request, without its payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Request {
    pub(crate) flags: u16,
    pub(crate) command: u16,
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    /// Bytes of the export that the request is about.
    pub(crate) len: u64,
    /// Bytes that follow the header.
    pub(crate) payload_len: u64,
}

impl Request {
    /// Decodes a request.
    ///
    /// # Errors
    /// The magic number is wrong.
    pub(crate) fn decode(bytes: &[u8], headers: Headers) -> Result<Self, ConnectionError> {
        let mut fields = Fields(bytes);
        let decoded = (|| {
            let magic = fields.u32()?;
            let (flags, command) = (fields.u16()?, fields.u16()?);
            let (cookie, offset) = (fields.u64()?, fields.u64()?);
            let (wanted, len, has_payload) = match headers {
                Headers::Extended => {
                    (EXTENDED_REQUEST_MAGIC, fields.u64()?, flags & cmd_flag::PAYLOAD_LEN != 0)
                }
                _ => (REQUEST_MAGIC, fields.u32()?.into(), command == cmd::WRITE),
            };
            let payload_len = if has_payload { len } else { 0 };
            let request = Self { flags, command, cookie, offset, len, payload_len };
            (magic == wanted).then_some(request)
        })();
        decoded.ok_or(ConnectionError::Protocol("a request without the magic number"))
    }
}

/// Reader of the fields of a message. Each method returns `None` at the end of the message.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    /// Returns the next `len` bytes.
    pub(crate) fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// Returns the next string, which follows its length.
    pub(crate) fn string(&mut self) -> Option<&'a str> {
        let len = self.u32()? as usize;
        let text = self.bytes(len).filter(|text| text.len() <= MAX_STRING_BYTES)?;
        std::str::from_utf8(text).ok()
    }

    /// Returns true if all fields were read.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Reads exactly `N` bytes.
pub(crate) fn read_array<const N: usize>(input: &mut impl Read) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    input.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Reads and drops exactly `len` bytes.
pub(crate) fn skip_bytes(input: &mut impl Read, len: u64) -> std::io::Result<()> {
    let skipped = std::io::copy(&mut input.take(len), &mut std::io::sink())?;
    if skipped == len { Ok(()) } else { Err(std::io::ErrorKind::UnexpectedEof.into()) }
}

/// Writes all of `parts`, in as few system calls as the stream allows.
pub(crate) fn write_all_parts(
    output: &mut impl Write,
    parts: &mut [IoSlice<'_>],
) -> std::io::Result<()> {
    let mut rest = parts;
    IoSlice::advance_slices(&mut rest, 0);
    while !rest.is_empty() {
        match output.write_vectored(rest) {
            Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut rest, written),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    output.flush()
}
