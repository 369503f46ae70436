//! Negotiation: the fixed newstyle handshake and its options.

use std::io::{Read, Write};

use crate::wire::{
    self, BASE_ALLOCATION, BASE_ALLOCATION_ID, FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, Fields,
    Headers, flag, info, opt, rep,
};
use crate::{ChosenExport, ConnectionError, Export, MAX_PAYLOAD_BYTES};

/// Maximum length of an option. A client that claims a longer one is disconnected.
pub const MAX_OPTION_BYTES: u32 = 64 << 10;
/// Maximum number of options of a connection. A client that sends more is disconnected.
pub const MAX_OPTIONS: usize = 256;
/// Zero bytes at the end of the reply to EXPORT_NAME.
const EXPORT_NAME_ZEROES: usize = 124;
/// Size of requests that are efficient, in bytes: a page.
const PREFERRED_BLOCK_BYTES: u32 = 4096;

/// What client and server agreed on.
pub struct Session<'e> {
    /// The chosen export.
    pub export: ChosenExport<'e>,
    pub(crate) headers: Headers,
    /// True if the client may send BLOCK_STATUS, for `base:allocation`.
    pub(crate) allocation_context: bool,
}

/// State of a negotiation.
struct Negotiation<'e, 'o, W> {
    output: &'o mut W,
    exports: &'e [Export],
    no_zeroes: bool,
    headers: Headers,
    /// Export for which the client set `base:allocation`.
    allocation_export: Option<&'e Export>,
}

/// Result of an option.
enum Outcome<'e> {
    Continue,
    /// The export of the exports, and as this connection uses it.
    Chosen(&'e Export, ChosenExport<'e>),
    Left,
}

/// Greets the client, and returns its handshake flags.
pub(crate) fn greet(
    input: &mut impl Read,
    output: &mut impl Write,
) -> Result<u32, ConnectionError> {
    let mut hello = vec![];
    hello.extend(wire::NBDMAGIC.to_be_bytes());
    hello.extend(wire::IHAVEOPT.to_be_bytes());
    hello.extend((FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
    output.write_all(&hello)?;
    output.flush()?;
    let flags = u32::from_be_bytes(wire::read_array(input)?);
    if flags & !u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES) != 0 {
        return Err(ConnectionError::Protocol("unknown handshake flags"));
    }
    Ok(flags)
}

/// Reads an option and its data.
fn read_option(input: &mut impl Read) -> Result<(u32, Vec<u8>), ConnectionError> {
    let header: [u8; 16] = wire::read_array(input)?;
    let mut fields = Fields(&header);
    let (Some(wire::IHAVEOPT), Some(option), Some(len)) =
        (fields.u64(), fields.u32(), fields.u32())
    else {
        return Err(ConnectionError::Protocol("an option without the magic number"));
    };
    if len > MAX_OPTION_BYTES {
        return Err(ConnectionError::Protocol("an option that is too long"));
    }
    let mut data = vec![0; len as usize];
    input.read_exact(&mut data)?;
    Ok((option, data))
}

/// Refuses options until the client starts TLS; false if it leaves instead.
pub(crate) fn require_tls(
    input: &mut impl Read,
    output: &mut impl Write,
) -> Result<bool, ConnectionError> {
    for _ in 0..MAX_OPTIONS {
        let (option, data) = read_option(input)?;
        match option {
            opt::STARTTLS if data.is_empty() => {
                send_reply(output, option, rep::ACK, &[])?;
                return Ok(true);
            }
            opt::STARTTLS => {
                send_reply(output, option, rep::ERR_INVALID, b"the option has no data")?;
            }
            opt::EXPORT_NAME => {
                return Err(ConnectionError::Protocol("EXPORT_NAME without TLS"));
            }
            opt::ABORT => {
                let _ = send_reply(output, option, rep::ACK, &[]);
                return Ok(false);
            }
            _ => send_reply(output, option, rep::ERR_TLS_REQD, b"this server requires TLS")?,
        }
    }
    Err(ConnectionError::Protocol("too many options"))
}

fn send_reply(output: &mut impl Write, option: u32, kind: u32, data: &[u8]) -> std::io::Result<()> {
    let mut reply = vec![];
    reply.extend(wire::OPTION_REPLY_MAGIC.to_be_bytes());
    reply.extend(option.to_be_bytes());
    reply.extend(kind.to_be_bytes());
    reply.extend((data.len() as u32).to_be_bytes());
    reply.extend(data);
    output.write_all(&reply)?;
    output.flush()
}

/// Negotiates until the client chooses an export; `None` if it leaves instead.
pub(crate) fn negotiate<'e, W: Write>(
    input: &mut impl Read,
    output: &mut W,
    flags: u32,
    exports: &'e [Export],
) -> Result<Option<Session<'e>>, ConnectionError> {
    let mut state = Negotiation {
        output,
        exports,
        no_zeroes: flags & u32::from(FLAG_NO_ZEROES) != 0,
        headers: Headers::Simple,
        allocation_export: None,
    };
    for _ in 0..MAX_OPTIONS {
        let (option, data) = read_option(input)?;
        match state.handle_option(option, &data)? {
            Outcome::Continue => {}
            Outcome::Left => return Ok(None),
            Outcome::Chosen(of, export) => {
                let context = state.allocation_export;
                return Ok(Some(Session {
                    export,
                    headers: state.headers,
                    allocation_context: context.is_some_and(|it| std::ptr::eq(it, of)),
                }));
            }
        }
    }
    Err(ConnectionError::Protocol("too many options"))
}

impl<'e, W: Write> Negotiation<'e, '_, W> {
    fn handle_option(&mut self, option: u32, data: &[u8]) -> Result<Outcome<'e>, ConnectionError> {
        match option {
            opt::EXPORT_NAME => return self.choose_by_export_name(data),
            opt::ABORT => {
                // The client need not wait for the reply.
                let _ = self.reply(option, rep::ACK, &[]);
                return Ok(Outcome::Left);
            }
            opt::LIST if data.is_empty() => self.list_exports()?,
            opt::INFO | opt::GO => {
                return self.describe_export(option, data);
            }
            opt::STRUCTURED_REPLY if data.is_empty() && self.headers == Headers::Extended => {
                self.reply(option, rep::ERR_EXT_HEADER_REQD, b"extended headers are agreed on")?;
            }
            opt::STRUCTURED_REPLY if data.is_empty() => {
                self.headers = Headers::Structured;
                self.reply(option, rep::ACK, &[])?;
            }
            opt::EXTENDED_HEADERS if data.is_empty() => {
                self.headers = Headers::Extended;
                self.reply(option, rep::ACK, &[])?;
            }
            opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => self.meta_context(option, data)?,
            opt::LIST | opt::STRUCTURED_REPLY | opt::EXTENDED_HEADERS => {
                self.reply(option, rep::ERR_INVALID, b"the option has no data")?;
            }
            _ => self.reply(option, rep::ERR_UNSUP, b"the option is not supported")?,
        }
        Ok(Outcome::Continue)
    }

    fn reply(&mut self, option: u32, kind: u32, data: &[u8]) -> std::io::Result<()> {
        send_reply(self.output, option, kind, data)
    }

    /// Returns the export with this name; the first one for the empty name.
    fn find_export(&self, name: &str) -> Option<&'e Export> {
        let named = self.exports.iter().find(|export| export.name() == name);
        named.or_else(|| self.exports.first().filter(|_| name.is_empty()))
    }

    /// Replies to EXPORT_NAME, which has no error reply.
    fn choose_by_export_name(&mut self, data: &[u8]) -> Result<Outcome<'e>, ConnectionError> {
        if self.headers == Headers::Extended {
            return Err(ConnectionError::Protocol("EXPORT_NAME after EXTENDED_HEADERS"));
        }
        let of = std::str::from_utf8(data).ok().and_then(|name| self.find_export(name));
        let of = of.ok_or(ConnectionError::Protocol("no export has that name"))?;
        let export = of.for_connection().map_err(ConnectionError::NoClone)?;
        let mut reply = vec![];
        reply.extend(export.len_bytes().to_be_bytes());
        reply.extend(self.transmission_flags(of, &export).to_be_bytes());
        if !self.no_zeroes {
            reply.extend([0; EXPORT_NAME_ZEROES]);
        }
        self.output.write_all(&reply)?;
        self.output.flush()?;
        Ok(Outcome::Chosen(of, export))
    }

    fn list_exports(&mut self) -> std::io::Result<()> {
        for export in self.exports {
            let name = export.name().as_bytes();
            let data = [&(name.len() as u32).to_be_bytes()[..], name].concat();
            self.reply(opt::LIST, rep::SERVER, &data)?;
        }
        self.reply(opt::LIST, rep::ACK, &[])
    }

    /// Replies to INFO or GO, which chooses the export.
    fn describe_export(
        &mut self,
        option: u32,
        data: &[u8],
    ) -> Result<Outcome<'e>, ConnectionError> {
        let mut fields = Fields(data);
        let decoded = (|| {
            let name = fields.string()?;
            let count = fields.u16()?;
            let wanted: Vec<u16> = (0..count).map(|_| fields.u16()).collect::<Option<_>>()?;
            fields.is_empty().then_some((name, wanted))
        })();
        let Some((name, wanted)) = decoded else {
            self.reply(option, rep::ERR_INVALID, b"the option cannot be decoded")?;
            return Ok(Outcome::Continue);
        };
        let Some(of) = self.find_export(name) else {
            self.reply(option, rep::ERR_UNKNOWN, b"no export has that name")?;
            return Ok(Outcome::Continue);
        };
        let chosen = if option == opt::GO {
            match of.for_connection() {
                Ok(chosen) => Some(chosen),
                Err(why) => {
                    let text = format!("no clone of the disk: {why}");
                    self.reply(option, rep::ERR_POLICY, text.as_bytes())?;
                    return Ok(Outcome::Continue);
                }
            }
        } else {
            None
        };
        let export = chosen.as_deref().unwrap_or(of);
        let mut of_export = info::EXPORT.to_be_bytes().to_vec();
        of_export.extend(export.len_bytes().to_be_bytes());
        of_export.extend(self.transmission_flags(of, export).to_be_bytes());
        self.reply(option, rep::INFO, &of_export)?;
        let mut sizes = info::BLOCK_SIZE.to_be_bytes().to_vec();
        for size in [1, PREFERRED_BLOCK_BYTES, MAX_PAYLOAD_BYTES] {
            sizes.extend(size.to_be_bytes());
        }
        self.reply(option, rep::INFO, &sizes)?;
        for (kind, text) in [(info::NAME, export.name()), (info::DESCRIPTION, export.description())]
        {
            if wanted.contains(&kind) {
                let data = [&kind.to_be_bytes()[..], text.as_bytes()].concat();
                self.reply(option, rep::INFO, &data)?;
            }
        }
        self.reply(option, rep::ACK, &[])?;
        Ok(chosen.map_or(Outcome::Continue, |chosen| Outcome::Chosen(of, chosen)))
    }

    /// Replies to LIST_META_CONTEXT or SET_META_CONTEXT.
    fn meta_context(&mut self, option: u32, data: &[u8]) -> Result<(), ConnectionError> {
        let sets = option == opt::SET_META_CONTEXT;
        if sets {
            self.allocation_export = None;
        }
        let mut fields = Fields(data);
        let decoded = (|| {
            let name = fields.string()?;
            let count = fields.u32()?;
            // Each query has a length: the data bounds their number.
            let mut is_queried = count == 0 && !sets;
            for _ in 0..count {
                let query = fields.string()?;
                is_queried |= query == BASE_ALLOCATION || (query == "base:" && !sets);
            }
            fields.is_empty().then_some((name, is_queried))
        })();
        let Some((name, is_queried)) = decoded else {
            self.reply(option, rep::ERR_INVALID, b"the option cannot be decoded")?;
            return Ok(());
        };
        if sets && self.headers == Headers::Simple {
            self.reply(option, rep::ERR_INVALID, b"structured replies come first")?;
            return Ok(());
        }
        let Some(export) = self.find_export(name) else {
            self.reply(option, rep::ERR_UNKNOWN, b"no export has that name")?;
            return Ok(());
        };
        if is_queried {
            let id = if sets { BASE_ALLOCATION_ID } else { 0 };
            let data = [&id.to_be_bytes()[..], BASE_ALLOCATION.as_bytes()].concat();
            self.reply(option, rep::META_CONTEXT, &data)?;
            if sets {
                self.allocation_export = Some(export);
            }
        }
        self.reply(option, rep::ACK, &[])?;
        Ok(())
    }

    /// Returns the flags of `export`, which is `of` or a clone of it.
    fn transmission_flags(&self, of: &Export, export: &Export) -> u16 {
        let mut flags = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::SEND_CACHE;
        if export.can_multi_conn() {
            flags |= flag::CAN_MULTI_CONN;
        }
        flags |= match export.is_read_only() {
            true => flag::READ_ONLY,
            false => flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO,
        };
        if export.is_rotational() {
            flags |= flag::ROTATIONAL;
        }
        if self.headers != Headers::Simple {
            flags |= flag::SEND_DF;
        }
        let has_context = self.allocation_export.is_some_and(|it| std::ptr::eq(it, of));
        if self.headers == Headers::Extended && has_context {
            flags |= flag::BLOCK_STATUS_PAYLOAD;
        }
        flags
    }
}
