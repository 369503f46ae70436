//! A tar archive as a tree: ustar, pax, GNU long names, sparse files of every kind.
//!
//! ```text
//!   | x: pax records | header | contents .. | header | contents .. | zeros
//! ```
//! Law: nothing an archive says leads out of the tree or past the end of the archive.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, anyhow, bail, ensure};
use draconis_exchange::contract::Time;
use draconis_ext::mkfs::{Contents, Node, NodeId, Tree, What};

use super::{LeftOut, Source, Stamp};
use crate::text::printable;

const BLOCK: u64 = 512;
/// Longest list of records and longest name that an archive may hold.
const LONGEST_EXTENSION: u64 = 16 << 20;
/// Bytes of the archive that are read at once while it is scanned.
const WINDOW: usize = 64 << 10;

/// Where in the archive a piece of a file is.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// In the file.
    at: u64,
    len: u64,
    /// In the archive.
    archive_at: u64,
}

/// The contents of all files of an archive.
struct Archive {
    file: File,
    pieces: Vec<Vec<Piece>>,
}

impl Contents for Archive {
    fn read(&self, source: u64, at_bytes: u64, into: &mut [u8]) -> std::io::Result<()> {
        let pieces = usize::try_from(source).ok().and_then(|nth| self.pieces.get(nth));
        let pieces = pieces.ok_or(std::io::ErrorKind::NotFound)?;
        let end = at_bytes.saturating_add(into.len() as u64);
        let first = pieces.partition_point(|piece| piece.at + piece.len <= at_bytes);
        for piece in pieces.iter().skip(first).take_while(|piece| piece.at < end) {
            let (from, to) = (piece.at.max(at_bytes), (piece.at + piece.len).min(end));
            let room = into.get_mut((from - at_bytes) as usize..(to - at_bytes) as usize);
            let Some(room) = room else { continue };
            self.file.read_exact_at(room, piece.archive_at + (from - piece.at))?;
        }
        Ok(())
    }
}

/// Reads the archive forwards, a window at a time.
struct Reader {
    file: File,
    len: u64,
    at: u64,
    window: Vec<u8>,
    window_at: u64,
}

impl Reader {
    /// The next 512 bytes; `None` at the end.
    fn block(&mut self) -> anyhow::Result<Option<[u8; 512]>> {
        if self.at + BLOCK > self.len {
            return Ok(None);
        }
        let held = self.window_at..self.window_at + self.window.len() as u64;
        if !held.contains(&self.at) || self.at + BLOCK > held.end {
            self.window.resize(WINDOW.min((self.len - self.at) as usize), 0);
            self.file.read_exact_at(&mut self.window, self.at)?;
            self.window_at = self.at;
        }
        let start = (self.at - self.window_at) as usize;
        let mut block = [0; 512];
        block.copy_from_slice(&self.window[start..start + 512]);
        self.at += BLOCK;
        Ok(Some(block))
    }

    /// Skips contents, which must be there.
    fn skip(&mut self, bytes: u64) -> anyhow::Result<()> {
        let end = self.at.checked_add(bytes).filter(|end| *end <= self.len);
        let end = end.context("the archive ends in the middle of a file")?;
        self.at = end.next_multiple_of(BLOCK);
        Ok(())
    }

    /// Contents that mean something themselves: names and records.
    fn extension(&mut self, bytes: u64) -> anyhow::Result<Vec<u8>> {
        ensure!(bytes <= LONGEST_EXTENSION, "an extended header of {bytes} bytes");
        let start = self.at;
        self.skip(bytes)?;
        let mut all = vec![0; bytes as usize];
        self.file.read_exact_at(&mut all, start)?;
        Ok(all)
    }
}

/// What extended headers say of the entry that follows.
#[derive(Clone, Default)]
struct Extension {
    records: BTreeMap<Vec<u8>, Vec<u8>>,
    /// `GNU.sparse.offset` and `GNU.sparse.numbytes`, which repeat.
    sparse: Vec<u64>,
    name: Option<Vec<u8>>,
    target: Option<Vec<u8>>,
}

impl Extension {
    /// Reads pax records: `length key=value\n`.
    fn pax(&mut self, mut bytes: &[u8]) -> anyhow::Result<()> {
        let broken = || anyhow!("a broken pax header");
        while !bytes.is_empty() {
            let space = bytes.iter().position(|byte| *byte == b' ').ok_or_else(broken)?;
            let len: usize = std::str::from_utf8(&bytes[..space])?.parse()?;
            ensure!(len > space + 1 && len <= bytes.len(), "a broken pax header");
            let record = bytes[space + 1..len].strip_suffix(b"\n").ok_or_else(broken)?;
            let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(broken)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            if matches!(key, b"GNU.sparse.offset" | b"GNU.sparse.numbytes") {
                self.sparse.push(decimal(value)?);
            }
            self.records.insert(key.to_vec(), value.to_vec());
            bytes = &bytes[len..];
        }
        Ok(())
    }

    fn get(&self, key: &str) -> Option<&[u8]> {
        // An empty value takes back what a global header said.
        self.records.get(key.as_bytes()).map(|value| &value[..]).filter(|value| !value.is_empty())
    }

    fn number(&self, key: &str) -> anyhow::Result<Option<u64>> {
        self.get(key).map(decimal).transpose()
    }

    fn time(&self, key: &str) -> anyhow::Result<Option<Time>> {
        self.get(key).map(fraction).transpose()
    }
}

fn decimal(text: &[u8]) -> anyhow::Result<u64> {
    Ok(std::str::from_utf8(text)?.trim().parse()?)
}

/// `-1.5` is half a second before -1.
fn fraction(text: &[u8]) -> anyhow::Result<Time> {
    let text = std::str::from_utf8(text)?;
    let (whole, rest) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().with_context(|| format!("the time {text}"))?;
    let digits: String = rest.chars().chain("000000000".chars()).take(9).collect();
    let nanoseconds: u32 = digits.parse().with_context(|| format!("the time {text}"))?;
    Ok(match (whole.starts_with('-'), nanoseconds) {
        (true, 1..) => Time { seconds: seconds - 1, nanoseconds: 1_000_000_000 - nanoseconds },
        _ => Time { seconds, nanoseconds },
    })
}

/// A number of a header: octal digits, or binary with the highest bit set.
fn number(field: &[u8]) -> anyhow::Result<i64> {
    if field.first().is_some_and(|first| first & 0x80 != 0) {
        let negative = field[0] & 0x40 != 0;
        let start = if negative { -1 } else { i64::from(field[0] & 0x3F) };
        return field[1..].iter().try_fold(start, |sum, byte| {
            let next = sum.checked_mul(256).and_then(|sum| sum.checked_add(i64::from(*byte)));
            next.context("a number beyond 64 bits")
        });
    }
    let text = field.split(|byte| matches!(byte, 0)).next().unwrap_or_default();
    let text = std::str::from_utf8(text)?.trim();
    if text.is_empty() { Ok(0) } else { Ok(i64::from_str_radix(text, 8)?) }
}

fn unsigned(field: &[u8]) -> anyhow::Result<u64> {
    u64::try_from(number(field)?).context("a length below zero")
}

fn string(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

fn checksum_fits(header: &[u8; 512]) -> bool {
    let blank = |(at, byte): (usize, &u8)| if (148..156).contains(&at) { b' ' } else { *byte };
    let bytes = || header.iter().enumerate().map(blank);
    let unsigned: i64 = bytes().map(i64::from).sum();
    let signed: i64 = bytes().map(|byte| i64::from(byte as i8)).sum();
    number(&header[148..156]).is_ok_and(|sum| sum == unsigned || sum == signed)
}

struct Scan {
    tree: Tree,
    stamp: Stamp,
    pieces: Vec<Vec<Piece>>,
    /// Directories that have no entry of their own so far.
    implied: HashSet<NodeId>,
    left_out: LeftOut,
}

/// Scans an archive.
pub fn scan(file: File, root: Node, stamp: Stamp) -> anyhow::Result<Source<'static>> {
    let len = file.metadata()?.len();
    let mut reader = Reader { file, len, at: 0, window: vec![], window_at: 0 };
    let mut scan = Scan {
        tree: Tree::new(root),
        stamp,
        pieces: vec![],
        implied: HashSet::from([NodeId::ROOT]),
        left_out: LeftOut::default(),
    };
    let mut global = Extension::default();
    let mut extension = Extension::default();
    let mut entries = 0u64;
    while let Some(header) = reader.block()? {
        if header.iter().all(|byte| *byte == 0) {
            break;
        }
        ensure!(
            checksum_fits(&header),
            "{}",
            if entries == 0 {
                "not a tar archive"
            } else {
                "damaged: a header has a wrong checksum"
            }
        );
        entries += 1;
        let size = unsigned(&header[124..136])?;
        match header[156] {
            b'x' | b'X' => extension.pax(&reader.extension(size)?)?,
            b'g' => {
                global.pax(&reader.extension(size)?)?;
                extension.records.extend(global.records.clone());
            }
            b'L' => extension.name = Some(string(&reader.extension(size)?).to_vec()),
            b'K' => extension.target = Some(string(&reader.extension(size)?).to_vec()),
            // The label of a volume, and what continues elsewhere.
            b'V' | b'M' | b'N' => reader.skip(size)?,
            _ => {
                let name = name_of(&header, &extension);
                let done = scan.entry(&mut reader, &header, &extension, &name);
                done.with_context(|| printable(&name))?;
                extension = global.clone();
            }
        }
    }
    ensure!(entries > 0 || len == 0 || len >= BLOCK, "not a tar archive");
    let contents = Archive { file: reader.file, pieces: scan.pieces };
    Ok(Source { implied: scan.implied, ..Source::new(scan.tree, contents) })
}

fn name_of(header: &[u8; 512], extension: &Extension) -> Vec<u8> {
    if let Some(name) = extension.get("GNU.sparse.name").or(extension.get("path")) {
        return name.to_vec();
    }
    if let Some(name) = &extension.name {
        return name.clone();
    }
    let name = string(&header[..100]);
    // GNU tar's own format uses these bytes for other things.
    let prefix = if &header[257..263] == b"ustar\0" { string(&header[345..500]) } else { b"" };
    if prefix.is_empty() { name.to_vec() } else { [prefix, b"/", name].concat() }
}

impl Scan {
    fn entry(
        &mut self,
        reader: &mut Reader,
        header: &[u8; 512],
        extension: &Extension,
        name: &[u8],
    ) -> anyhow::Result<()> {
        let size = match extension.number("size")? {
            Some(size) => size,
            None => unsigned(&header[124..136])?,
        };
        let target = || match extension.get("linkpath").or(extension.target.as_deref()) {
            Some(target) => target.to_vec(),
            None => string(&header[157..257]).to_vec(),
        };
        let device = || -> anyhow::Result<(u32, u32)> {
            let [major, minor] = [&header[329..337], &header[337..345]].map(unsigned);
            Ok((major?.try_into()?, minor?.try_into()?))
        };
        let mut kind = header[156];
        if matches!(kind, 0 | b'0' | b'7') && name.ends_with(b"/") {
            kind = b'5';
        }
        let what = match kind {
            b'1' => {
                reader.skip(size)?;
                return self.hard_link(name, &target());
            }
            b'2' => What::Symlink(target()),
            b'3' => device().map(|(major, minor)| What::CharDevice(major, minor))?,
            b'4' => device().map(|(major, minor)| What::BlockDevice(major, minor))?,
            b'5' | b'D' => What::Directory,
            b'6' => What::Fifo,
            _ => self.file(reader, header, extension, size)?,
        };
        if !matches!(what, What::File { .. }) {
            reader.skip(size)?;
        }
        let node = self.node(what, header, extension, name)?;
        self.add(name, node)
    }

    fn node(
        &mut self,
        what: What,
        header: &[u8; 512],
        extension: &Extension,
        name: &[u8],
    ) -> anyhow::Result<Node> {
        let owner = |key: &str, field: &[u8]| -> anyhow::Result<u32> {
            let id = match extension.number(key)? {
                Some(id) => id,
                None => unsigned(field)?,
            };
            u32::try_from(id).with_context(|| format!("{key} {id}"))
        };
        let mode = if matches!(what, What::Symlink(_)) {
            0o777
        } else {
            (unsigned(&header[100..108])? & 0o7777) as u16
        };
        let mut node = Node::new(what, mode);
        node.uid = owner("uid", &header[108..116])?;
        node.gid = owner("gid", &header[116..124])?;
        let modified = match extension.time("mtime")? {
            Some(time) => time,
            None => Time { seconds: number(&header[136..148])?, nanoseconds: 0 },
        };
        let (accessed, changed) = (extension.time("atime")?, extension.time("ctime")?);
        self.stamp.set(&mut node, modified, accessed, changed);
        for (key, value) in &extension.records {
            if let Some(attribute) = key.strip_prefix(b"SCHILY.xattr.") {
                if !node.attribute(attribute, value) {
                    let attribute = printable(attribute);
                    let what = format!("the attribute {attribute} is");
                    self.left_out.tell(&what, &printable(name));
                }
            } else if key.starts_with(b"SCHILY.acl.") {
                let what = "an access control list in words is";
                self.left_out.tell(what, &printable(name));
            }
        }
        Ok(node)
    }

    /// Finds where the contents of a file are, and goes past them.
    fn file(
        &mut self,
        reader: &mut Reader,
        header: &[u8; 512],
        extension: &Extension,
        size: u64,
    ) -> anyhow::Result<What> {
        let (size_bytes, map) = if header[156] == b'S' {
            (unsigned(&header[483..495])?, Some(old_sparse_map(reader, header)?))
        } else if extension.get("GNU.sparse.major") == Some(b"1") {
            let real = extension.number("GNU.sparse.realsize")?;
            (real.context("a sparse file without a length")?, None)
        } else if let Some(map) = extension.get("GNU.sparse.map") {
            let numbers: Result<Vec<u64>, _> =
                map.split(|byte| *byte == b',').map(decimal).collect();
            (extension.number("GNU.sparse.size")?.unwrap_or(0), Some(numbers?))
        } else if !extension.sparse.is_empty() {
            (extension.number("GNU.sparse.size")?.unwrap_or(0), Some(extension.sparse.clone()))
        } else {
            (size, Some(vec![0, size]))
        };
        let (map, start) = match map {
            Some(map) => (map, reader.at),
            None => new_sparse_map(reader, size)?,
        };
        let mut pieces = vec![];
        let mut data: Vec<(u64, u64)> = vec![];
        let (mut archive_at, mut end_before) = (start, 0);
        for pair in map.chunks_exact(2) {
            let &[at, len] = pair else { continue };
            let end = at.checked_add(len).filter(|end| *end <= size_bytes && at >= end_before);
            let end = end.context("the map of a sparse file makes no sense")?;
            if len > 0 {
                pieces.push(Piece { at, len, archive_at });
                data.push((at, end));
            }
            archive_at = archive_at.checked_add(len).context("too long")?;
            end_before = end;
        }
        reader.skip(archive_at - start)?;
        let source = self.pieces.len() as u64;
        self.pieces.push(pieces);
        Ok(What::File { size_bytes, data, source })
    }

    fn hard_link(&mut self, name: &[u8], target: &[u8]) -> anyhow::Result<()> {
        let to = self.find(target)?;
        let to = to.with_context(|| {
            format!("a link to {}, which comes later or never", printable(target))
        })?;
        ensure!(!matches!(self.tree.node(to).what, What::Directory), "a hard link to a directory");
        let (dir, last) = self.home(name)?;
        let last = last.context("a link that is the root directory")?;
        Ok(self.tree.link(dir, &last, to)?)
    }

    fn find(&self, path: &[u8]) -> anyhow::Result<Option<NodeId>> {
        let mut at = Some(NodeId::ROOT);
        for part in parts(path)? {
            at = at.and_then(|at| self.tree.lookup(at, part));
        }
        Ok(at)
    }

    /// The directory a path lies in, made if need be, and its last name; no name for the root.
    fn home(&mut self, path: &[u8]) -> anyhow::Result<(NodeId, Option<Vec<u8>>)> {
        let parts = parts(path)?;
        let Some((last, above)) = parts.split_last() else { return Ok((NodeId::ROOT, None)) };
        let mut dir = NodeId::ROOT;
        for part in above {
            dir = match self.tree.lookup(dir, part) {
                Some(found) => found,
                None => {
                    let mut node = Node::new(What::Directory, 0o755);
                    let now = self.stamp.now;
                    self.stamp.set(&mut node, now, None, None);
                    let made = self.tree.add(dir, part, node)?;
                    self.implied.insert(made);
                    made
                }
            };
        }
        Ok((dir, Some(last.to_vec())))
    }

    fn add(&mut self, name: &[u8], node: Node) -> anyhow::Result<()> {
        let (dir, last) = self.home(name)?;
        let is_dir = matches!(node.what, What::Directory);
        let there = match &last {
            Some(last) => self.tree.lookup(dir, last),
            None => Some(NodeId::ROOT),
        };
        // A directory that comes again keeps what it holds.
        if let Some(there) = there
            && is_dir
            && matches!(self.tree.node(there).what, What::Directory)
        {
            if let Some(old) = self.tree.node_mut(there) {
                *old = node;
            }
            self.implied.remove(&there);
            return Ok(());
        }
        let last = last.context("the root directory is something else")?;
        self.tree.add(dir, &last, node)?;
        Ok(())
    }
}

/// The names of a path; nothing leads upwards.
fn parts(path: &[u8]) -> anyhow::Result<Vec<&[u8]>> {
    let parts: Vec<&[u8]> =
        path.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b".")).collect();
    if parts.contains(&&b".."[..]) {
        bail!("its path leads out of the archive");
    }
    Ok(parts)
}

/// The map of GNU tar's own format: four pairs in the header, more in blocks behind it.
fn old_sparse_map(reader: &mut Reader, header: &[u8; 512]) -> anyhow::Result<Vec<u64>> {
    let mut map = vec![];
    let mut pairs = |bytes: &[u8]| -> anyhow::Result<()> {
        for pair in bytes.chunks_exact(24).filter(|pair| pair[0] != 0) {
            map.push(unsigned(&pair[..12])?);
            map.push(unsigned(&pair[12..])?);
        }
        Ok(())
    };
    pairs(&header[386..482])?;
    let mut more = header[482] != 0;
    while more {
        let block = reader.block()?.context("the archive ends in the middle of a file")?;
        pairs(&block[..504])?;
        more = block[504] != 0;
    }
    Ok(map)
}

/// The map of pax's version 1.0: lines of digits before the data, in whole blocks.
fn new_sparse_map(reader: &mut Reader, size: u64) -> anyhow::Result<(Vec<u64>, u64)> {
    let end = reader.at.saturating_add(size);
    let mut numbers: Vec<u64> = vec![];
    let mut digits = vec![];
    while numbers.first().is_none_or(|pairs| numbers.len() as u64 <= pairs.saturating_mul(2)) {
        ensure!(reader.at < end, "the map of a sparse file makes no sense");
        let block = reader.block()?.context("the archive ends in the middle of a file")?;
        for byte in block {
            if byte == b'\n' {
                numbers.push(decimal(&digits)?);
                digits.clear();
                if numbers.len() as u64 > numbers[0].saturating_mul(2) {
                    break;
                }
            } else {
                digits.push(byte);
            }
        }
    }
    Ok((numbers.split_off(1), reader.at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_both_forms() {
        assert_eq!(number(b"0000644\0").unwrap(), 0o644);
        assert_eq!(number(b"   17 \0").unwrap(), 0o17);
        assert_eq!(number(&[0x80, 0, 0, 0, 0, 0, 1, 2]).unwrap(), 258);
        assert_eq!(number(&[0xFF; 12]).unwrap(), -1);
        assert_eq!(number(b"\0\0\0").unwrap(), 0);
        assert!(number(b"9").is_err());
    }

    #[test]
    fn times_before_and_after() {
        let time = |seconds, nanoseconds| Time { seconds, nanoseconds };
        assert_eq!(fraction(b"12.5").unwrap(), time(12, 500_000_000));
        assert_eq!(fraction(b"-1.25").unwrap(), time(-2, 750_000_000));
        assert_eq!(fraction(b"-3").unwrap(), time(-3, 0));
        assert!(fraction(b"soon").is_err());
    }

    #[test]
    fn paths_stay_inside() {
        assert_eq!(parts(b"./a//b/").unwrap(), [b"a", b"b"]);
        assert!(parts(b"./").unwrap().is_empty());
        assert!(parts(b"a/../../b").is_err());
    }

    #[test]
    fn records_are_read_and_broken_ones_refused() {
        let mut extension = Extension::default();
        extension.pax(b"12 path=abc\n20 mtime=1.000000001\n").unwrap_err();
        let mut extension = Extension::default();
        extension.pax(b"12 path=abc\n21 mtime=1.000000001\n").unwrap();
        assert_eq!(extension.get("path"), Some(&b"abc"[..]));
        assert_eq!(extension.time("mtime").unwrap().unwrap().nanoseconds, 1);
        for broken in [&b"5"[..], b"0 a=b\n", b"99 a=b\n", b"6 a=bc", b"6 abc\n"] {
            assert!(Extension::default().pax(broken).is_err());
        }
    }
}
