//! Reading tar archives: ustar, pax, GNU long names, sparse files of every kind.
//!
//! ```text
//!   | x: pax records | header | contents .. | header | contents .. | zeros
//! ```
//! Law: archives are read forwards, in memory that does not depend on their claims.

use std::collections::BTreeMap;
use std::io::Read;

use anyhow::{Context, anyhow, ensure};
use draconis_container::signature;
use draconis_types::Time;

use super::blob::Blob;
use crate::messages::escape_control_chars;

const TAR_BLOCK_BYTES: u64 = 512;
/// Maximum length of an extended header or of a long name, in bytes.
const MAX_EXTENSION_BYTES: u64 = 1 << 20;
/// Maximum count of numbers in the map of a sparse file.
const MAX_SPARSE_ENTRIES: usize = 1 << 20;
/// Size of the read buffer, in bytes.
const READ_BUFFER_BYTES: usize = 64 << 10;

/// Input of a reader.
enum ArchiveInput {
    /// Seekable input.
    Plain(Blob),
    /// A stream, which must decompress the bytes that are skipped.
    Packed(Box<dyn Read + Send>),
}

/// Reads an archive forwards through a buffer.
pub struct ArchiveReader {
    from: ArchiveInput,
    /// Offset in the archive of the next byte to read.
    pub at: u64,
    window: Vec<u8>,
    /// Bytes of the buffer that were consumed.
    used: usize,
}

/// A parsed entry, without its contents.
pub struct TarEntry {
    pub header: [u8; 512],
    pub extension: ExtendedHeader,
    pub name: Vec<u8>,
    /// Length of the contents that follow.
    pub size: u64,
}

impl ArchiveReader {
    /// Opens an archive at its start; decompresses at most `limit` bytes of a compressed one.
    pub fn new(archive: &Blob, limit: Option<u64>) -> anyhow::Result<Self> {
        let from = match archive.detect_compression()? {
            None => ArchiveInput::Plain(archive.clone()),
            Some(_) => ArchiveInput::Packed(archive.decompress(limit)?),
        };
        Ok(Self { from, at: 0, window: vec![], used: 0 })
    }

    /// Fills `into` up to the end of the archive, and returns the number of bytes read.
    fn read(&mut self, into: &mut [u8]) -> anyhow::Result<usize> {
        let mut filled = 0;
        while filled < into.len() {
            if self.used == self.window.len() {
                self.used = 0;
                self.window.resize(READ_BUFFER_BYTES, 0);
                let got = match &mut self.from {
                    ArchiveInput::Plain(archive) => archive.read_at(&mut self.window, self.at)?,
                    ArchiveInput::Packed(stream) => stream.read(&mut self.window)?,
                };
                self.window.truncate(got);
                if got == 0 {
                    break;
                }
            }
            let held = &self.window[self.used..];
            let len = held.len().min(into.len() - filled);
            into[filled..filled + len].copy_from_slice(&held[..len]);
            (filled, self.used, self.at) = (filled + len, self.used + len, self.at + len as u64);
        }
        Ok(filled)
    }

    /// Returns the next 512 bytes; `None` at the end.
    pub fn read_block(&mut self) -> anyhow::Result<Option<[u8; 512]>> {
        let mut block = [0; 512];
        let whole = self.read(&mut block)? == block.len();
        Ok(whole.then_some(block))
    }

    /// Skips contents, which must be complete, and their padding.
    pub fn skip_contents(&mut self, bytes: u64) -> anyhow::Result<()> {
        let end = self.at.checked_add(bytes);
        let end = end.filter(|end| *end < 1 << 62).context("an impossible length")?;
        ensure!(self.skip_to(end)?, "the archive ends in the middle of a file");
        self.skip_to(end.next_multiple_of(TAR_BLOCK_BYTES))?;
        Ok(())
    }

    /// Skips to a later offset; returns true if the archive is long enough.
    fn skip_to(&mut self, to: u64) -> anyhow::Result<bool> {
        let held = (self.window.len() - self.used) as u64;
        let step = held.min(to.saturating_sub(self.at));
        (self.used, self.at) = (self.used + step as usize, self.at + step);
        if self.at == to {
            return Ok(true);
        }
        match &mut self.from {
            ArchiveInput::Plain(archive) => {
                self.at = to;
                Ok(to <= archive.len())
            }
            ArchiveInput::Packed(stream) => {
                let mut skipped = stream.take(to - self.at);
                self.at += std::io::copy(&mut skipped, &mut std::io::sink())?;
                Ok(self.at == to)
            }
        }
    }

    /// Returns the error for input that begins with `head` and is no archive.
    fn not_an_archive_error(&mut self, head: &[u8]) -> anyhow::Error {
        let mut more = vec![0; signature::HEAD_BYTES.saturating_sub(head.len())];
        let Ok(got) = self.read(&mut more) else { return anyhow!("not a tar archive") };
        more.truncate(got);
        match signature::detect_head(&[head, &more].concat()) {
            Some(held) => anyhow!("not a tar archive; it holds {}, and {}", held.what, held.help),
            None => anyhow!("not a tar archive"),
        }
    }

    /// Reads the contents of an extended header.
    fn read_extended_header(&mut self, bytes: u64) -> anyhow::Result<Vec<u8>> {
        ensure!(bytes <= MAX_EXTENSION_BYTES, "an extended header of {bytes} bytes");
        let mut all = vec![0; bytes as usize];
        let whole = self.read(&mut all)? == all.len();
        ensure!(whole, "the archive ends in the middle of an extended header");
        self.skip_to(self.at.next_multiple_of(TAR_BLOCK_BYTES))?;
        Ok(all)
    }
}

/// Iterator over the entries of an archive.
pub struct TarEntries {
    pub reader: ArchiveReader,
    global: ExtendedHeader,
    read: u64,
    /// A header that was read ahead.
    peeked_header: Option<[u8; 512]>,
}

impl TarEntries {
    /// Opens an archive; decompresses at most `limit` bytes of a compressed one.
    pub fn new(archive: &Blob, limit: Option<u64>) -> anyhow::Result<Self> {
        let reader = ArchiveReader::new(archive, limit)?;
        Ok(Self { reader, global: ExtendedHeader::default(), read: 0, peeked_header: None })
    }

    /// Returns the next entry. The caller must then skip its contents.
    pub fn next(&mut self) -> anyhow::Result<Option<TarEntry>> {
        let mut extension = self.global.clone();
        loop {
            let block = match self.peeked_header.take() {
                Some(block) => Some(block),
                None => {
                    let mut block = [0; 512];
                    match self.reader.read(&mut block)? {
                        512 => Some(block),
                        // Empty input counts as an empty archive.
                        got if self.read > 0 || got == 0 => None,
                        got => return Err(self.reader.not_an_archive_error(&block[..got])),
                    }
                }
            };
            let Some(header) = block.filter(|block| block.iter().any(|byte| *byte != 0)) else {
                return Ok(None);
            };
            if !is_checksum_valid(&header) {
                ensure!(self.read == 0, "damaged: a header has a wrong checksum");
                return Err(self.reader.not_an_archive_error(&header));
            }
            self.read += 1;
            let size = parse_unsigned_header_number(&header[124..136]);
            let size = size.with_context(|| {
                format!("the length of {}", escape_control_chars(&entry_name(&header, &extension)))
            })?;
            match header[156] {
                b'x' | b'X' => {
                    extension.parse_pax_records(&self.reader.read_extended_header(size)?)?
                }
                b'g' => {
                    self.global.parse_pax_records(&self.reader.read_extended_header(size)?)?;
                    let held: usize =
                        self.global.records.iter().map(|(k, v)| k.len() + v.len()).sum();
                    ensure!(held as u64 <= MAX_EXTENSION_BYTES, "global headers of {held} bytes");
                    extension.records.extend(self.global.records.clone());
                }
                b'L' => {
                    extension.name =
                        Some(trim_header_string(&self.reader.read_extended_header(size)?).to_vec())
                }
                b'K' => {
                    extension.target =
                        Some(trim_header_string(&self.reader.read_extended_header(size)?).to_vec())
                }
                // Volume labels and continuations of multi-volume archives.
                b'V' | b'M' | b'N' => self.reader.skip_contents(size)?,
                _ => {
                    let name = entry_name(&header, &extension);
                    let size = extension.pax_number("size")?.unwrap_or(size);
                    let size = match header[156] {
                        b'1' => self.hard_link_data_len(size)?,
                        // No contents follow these types, whatever their size field says.
                        b'2'..=b'6' => 0,
                        _ => size,
                    };
                    return Ok(Some(TarEntry { header, extension, name, size }));
                }
            }
        }
    }
}

impl TarEntries {
    /// Returns the length of the contents of a hard link. Some archives store the length of the
    /// linked file there, with or without its contents: if a header follows, there are none.
    fn hard_link_data_len(&mut self, size: u64) -> anyhow::Result<u64> {
        if size == 0 {
            return Ok(0);
        }
        let block = self.reader.read_block()?.context("the archive ends behind a link")?;
        if is_checksum_valid(&block) || block.iter().all(|byte| *byte == 0) {
            self.peeked_header = Some(block);
            return Ok(0);
        }
        Ok(size.saturating_sub(TAR_BLOCK_BYTES))
    }
}

impl TarEntry {
    /// Returns the type flag; a file name that ends with a slash is a directory.
    pub fn kind(&self) -> u8 {
        match self.header[156] {
            0 | b'0' | b'7' if self.name.ends_with(b"/") => b'5',
            0 | b'7' => b'0',
            kind => kind,
        }
    }

    /// Returns the target of a link.
    pub fn target(&self) -> Vec<u8> {
        match self.extension.get("linkpath").or(self.extension.target.as_deref()) {
            Some(target) => target.to_vec(),
            None => trim_header_string(&self.header[157..257]).to_vec(),
        }
    }

    /// Returns the owner from record `key` or header `field`: the low 32 bits of any number, as
    /// container engines pass it to chown. There -1 leaves the owner unchanged, which
    /// is root.
    pub fn owner_id(&self, key: &str, field: &[u8]) -> anyhow::Result<u32> {
        let id = match (self.extension.get(key), field) {
            (Some(text), _) => {
                let number = std::str::from_utf8(text).ok();
                let number = number.and_then(|text| text.trim().parse::<i128>().ok());
                number
                    .with_context(|| format!("\"{}\" is no number", escape_control_chars(text)))?
                    as u32
            }
            (None, [first, .., a, b, c, d]) if first & 0x80 != 0 => {
                u32::from_be_bytes([*a, *b, *c, *d])
            }
            (None, field) => parse_header_number(field)? as u32,
        };
        Ok(if id == u32::MAX { 0 } else { id })
    }

    /// Returns the device number.
    pub fn device(&self) -> anyhow::Result<(u32, u32)> {
        let [major, minor] =
            [&self.header[329..337], &self.header[337..345]].map(parse_unsigned_header_number);
        Ok((major?.try_into()?, minor?.try_into()?))
    }

    /// Returns the length of a file and its data segments as pairs of start and length. Leaves
    /// `reader` at the data.
    pub fn sparse_map(&self, reader: &mut ArchiveReader) -> anyhow::Result<(u64, Vec<u64>)> {
        let (header, extension, size) = (&self.header, &self.extension, self.size);
        Ok(if header[156] == b'S' {
            (parse_unsigned_header_number(&header[483..495])?, read_old_sparse_map(reader, header)?)
        } else if extension.get("GNU.sparse.major") == Some(b"1") {
            let real = extension.pax_number("GNU.sparse.realsize")?;
            let real = real.context("a sparse file without a length")?;
            (real, read_sparse_map_v1(reader, size)?)
        } else if let Some(map) = extension.get("GNU.sparse.map") {
            let numbers: Result<Vec<u64>, _> =
                map.split(|byte| *byte == b',').map(parse_decimal).collect();
            (extension.pax_number("GNU.sparse.size")?.unwrap_or(0), numbers?)
        } else if !extension.sparse.is_empty() {
            (extension.pax_number("GNU.sparse.size")?.unwrap_or(0), extension.sparse.clone())
        } else {
            (size, vec![0, size])
        })
    }
}

/// Extended header fields of the next entry.
#[derive(Clone, Default)]
pub struct ExtendedHeader {
    pub records: BTreeMap<Vec<u8>, Vec<u8>>,
    /// `GNU.sparse.offset` and `GNU.sparse.numbytes`, which repeat.
    sparse: Vec<u64>,
    name: Option<Vec<u8>>,
    target: Option<Vec<u8>>,
}

impl ExtendedHeader {
    /// Parses pax records: `length key=value\n`.
    fn parse_pax_records(&mut self, mut bytes: &[u8]) -> anyhow::Result<()> {
        let broken = || anyhow!("a broken pax header");
        while !bytes.is_empty() {
            let space = bytes.iter().position(|byte| *byte == b' ').ok_or_else(broken)?;
            let len: usize = std::str::from_utf8(&bytes[..space])?.parse()?;
            ensure!(len > space + 1 && len <= bytes.len(), "a broken pax header");
            let record = bytes[space + 1..len].strip_suffix(b"\n").ok_or_else(broken)?;
            let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(broken)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            if matches!(key, b"GNU.sparse.offset" | b"GNU.sparse.numbytes") {
                self.sparse.push(parse_decimal(value)?);
            }
            self.records.insert(key.to_vec(), value.to_vec());
            bytes = &bytes[len..];
        }
        Ok(())
    }

    pub fn get(&self, key: &str) -> Option<&[u8]> {
        // An empty value cancels the global header's value.
        self.records.get(key.as_bytes()).map(|value| &value[..]).filter(|value| !value.is_empty())
    }

    pub fn pax_number(&self, key: &str) -> anyhow::Result<Option<u64>> {
        self.get(key).map(parse_decimal).transpose()
    }

    pub fn pax_time(&self, key: &str) -> anyhow::Result<Option<Time>> {
        self.get(key).map(parse_fractional_time).transpose()
    }
}

fn parse_decimal(text: &[u8]) -> anyhow::Result<u64> {
    let number = std::str::from_utf8(text).ok().and_then(|text| text.trim().parse().ok());
    number.with_context(|| format!("\"{}\" is no number", escape_control_chars(text)))
}

/// Parses a decimal time: `-1.5` is half a second before -1.
fn parse_fractional_time(text: &[u8]) -> anyhow::Result<Time> {
    let text = std::str::from_utf8(text)?;
    let (whole, rest) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().with_context(|| format!("the time {text}"))?;
    let digits: String = rest.chars().chain("000000000".chars()).take(9).collect();
    let nanoseconds: u32 = digits.parse().with_context(|| format!("the time {text}"))?;
    Ok(match (whole.starts_with('-'), nanoseconds) {
        (true, 1..) => Time {
            seconds: seconds.checked_sub(1).context("a time beyond 64 bits")?,
            nanoseconds: 1_000_000_000 - nanoseconds,
        },
        _ => Time { seconds, nanoseconds },
    })
}

/// Parses a number of a header: octal digits, or binary with the highest bit set.
pub fn parse_header_number(field: &[u8]) -> anyhow::Result<i64> {
    if field.first().is_some_and(|first| first & 0x80 != 0) {
        let negative = field[0] & 0x40 != 0;
        let start = if negative { -1 } else { i64::from(field[0] & 0x3F) };
        return field[1..].iter().try_fold(start, |sum, byte| {
            let next = sum.checked_mul(256).and_then(|sum| sum.checked_add(i64::from(*byte)));
            next.context("a number beyond 64 bits")
        });
    }
    let text = field.split(|byte| matches!(byte, 0)).next().unwrap_or_default();
    let digits = std::str::from_utf8(text).map(str::trim);
    let number = match digits {
        Ok("") => Some(0),
        Ok(digits) => i64::from_str_radix(digits, 8).ok(),
        Err(_) => None,
    };
    number.with_context(|| format!("\"{}\" is no number", escape_control_chars(text)))
}

pub fn parse_unsigned_header_number(field: &[u8]) -> anyhow::Result<u64> {
    let number = parse_header_number(field)?;
    number.try_into().ok().with_context(|| format!("{number} is below zero"))
}

fn trim_header_string(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

fn is_checksum_valid(header: &[u8; 512]) -> bool {
    let blank = |(at, byte): (usize, &u8)| if (148..156).contains(&at) { b' ' } else { *byte };
    let bytes = || header.iter().enumerate().map(blank);
    let unsigned: i64 = bytes().map(i64::from).sum();
    let signed: i64 = bytes().map(|byte| i64::from(byte as i8)).sum();
    parse_header_number(&header[148..156]).is_ok_and(|sum| sum == unsigned || sum == signed)
}

fn entry_name(header: &[u8; 512], extension: &ExtendedHeader) -> Vec<u8> {
    // bsdtar truncates the long name of a sparse file and puts all of it in `path`. GNU tar puts
    // a placeholder name in `path`, possibly truncated.
    let path = extension.get("path");
    let whole = path.filter(|path| path.len() > 100 && !is_sparse_placeholder(path));
    if let Some(name) = whole.or(extension.get("GNU.sparse.name")).or(path) {
        return name.to_vec();
    }
    if let Some(name) = &extension.name {
        return name.clone();
    }
    let name = trim_header_string(&header[..100]);
    // GNU tar's old format uses the prefix field for other data.
    let prefix =
        if &header[257..263] == b"ustar\0" { trim_header_string(&header[345..500]) } else { b"" };
    if prefix.is_empty() { name.to_vec() } else { [prefix, b"/", name].concat() }
}

/// Returns true for a placeholder path for tars without sparse support: `GNUSparseFile.7/name`.
fn is_sparse_placeholder(path: &[u8]) -> bool {
    path.split(|byte| *byte == b'/').any(|name| name.starts_with(b"GNUSparseFile."))
}

/// Reads the map of GNU tar's old format: four pairs in the header, more in extension blocks.
fn read_old_sparse_map(reader: &mut ArchiveReader, header: &[u8; 512]) -> anyhow::Result<Vec<u64>> {
    let mut map = vec![];
    let pairs = |map: &mut Vec<u64>, bytes: &[u8]| -> anyhow::Result<()> {
        for pair in bytes.chunks_exact(24).filter(|pair| pair[0] != 0) {
            map.push(parse_unsigned_header_number(&pair[..12])?);
            map.push(parse_unsigned_header_number(&pair[12..])?);
        }
        Ok(())
    };
    pairs(&mut map, &header[386..482])?;
    let mut more = header[482] != 0;
    while more {
        ensure!(map.len() < MAX_SPARSE_ENTRIES, "a sparse file in too many pieces");
        let block = reader.read_block()?.context("the archive ends in the middle of a file")?;
        pairs(&mut map, &block[..504])?;
        more = block[504] != 0;
    }
    Ok(map)
}

/// Reads the map of pax version 1.0: lines of digits before the data, in whole blocks.
fn read_sparse_map_v1(reader: &mut ArchiveReader, size: u64) -> anyhow::Result<Vec<u64>> {
    let end = reader.at.saturating_add(size);
    let mut numbers: Vec<u64> = vec![];
    let mut digits = vec![];
    while numbers.first().is_none_or(|pairs| numbers.len() as u64 <= pairs.saturating_mul(2)) {
        ensure!(reader.at < end, "the map of a sparse file makes no sense");
        let block = reader.read_block()?.context("the archive ends in the middle of a file")?;
        ensure!(
            numbers.len() < MAX_SPARSE_ENTRIES && digits.len() < 32,
            "the map of a sparse file makes no sense"
        );
        for byte in block {
            if byte == b'\n' {
                numbers.push(parse_decimal(&digits)?);
                digits.clear();
                if numbers.len() as u64 > numbers[0].saturating_mul(2) {
                    break;
                }
            } else {
                digits.push(byte);
            }
        }
    }
    Ok(numbers.split_off(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_numbers_octal_and_binary() {
        assert_eq!(parse_header_number(b"0000644\0").unwrap(), 0o644);
        assert_eq!(parse_header_number(b"   17 \0").unwrap(), 0o17);
        assert_eq!(parse_header_number(&[0x80, 0, 0, 0, 0, 0, 1, 2]).unwrap(), 258);
        assert_eq!(parse_header_number(&[0xFF; 12]).unwrap(), -1);
        assert_eq!(parse_header_number(b"\0\0\0").unwrap(), 0);
        assert!(parse_header_number(b"9").is_err());
    }

    #[test]
    fn fractional_times_before_and_after_epoch() {
        let time = |seconds, nanoseconds| Time { seconds, nanoseconds };
        assert_eq!(parse_fractional_time(b"12.5").unwrap(), time(12, 500_000_000));
        assert_eq!(parse_fractional_time(b"-1.25").unwrap(), time(-2, 750_000_000));
        assert_eq!(parse_fractional_time(b"-3").unwrap(), time(-3, 0));
        assert!(parse_fractional_time(b"soon").is_err());
    }

    #[test]
    fn pax_records_parse_and_reject_invalid() {
        let mut extension = ExtendedHeader::default();
        extension.parse_pax_records(b"12 path=abc\n20 mtime=1.000000001\n").unwrap_err();
        let mut extension = ExtendedHeader::default();
        extension.parse_pax_records(b"12 path=abc\n21 mtime=1.000000001\n").unwrap();
        assert_eq!(extension.get("path"), Some(&b"abc"[..]));
        assert_eq!(extension.pax_time("mtime").unwrap().unwrap().nanoseconds, 1);
        for broken in [&b"5"[..], b"0 a=b\n", b"99 a=b\n", b"6 a=bc", b"6 abc\n"] {
            assert!(ExtendedHeader::default().parse_pax_records(broken).is_err());
        }
    }
}
