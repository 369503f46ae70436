//! Merging archives into one tree, and locating the contents of their files.
//!
//! Law 1: contents are read from the archive when they are written. A compressed archive is
//! decompressed once for the scan, and once more for reading, if the reads are in order.
//! Law 2: no offset from an archive leads past its end.

use std::collections::BTreeSet;
use std::io::Read;
use std::sync::{Mutex, PoisonError};

use anyhow::Context;
use draconis_exchange::contract::Time;
use draconis_ext::mkfs::{FileSource, NodeKind, TreeNode};

use super::blob::Blob;
use super::merge::Merge;
use super::tar::{Entries, Entry, Reader, number, unsigned};
use super::{SkippedItems, Source, TimestampPolicy, acl, libarchive_xattr};
use crate::messages::printable;

/// Prefixes of pax records with extended attributes, and the SELinux record.
const LIBARCHIVE: &[u8] = b"LIBARCHIVE.xattr.";
const SCHILY: &[u8] = b"SCHILY.xattr.";
const ACL: &[u8] = b"SCHILY.acl.";
const SELINUX: &[u8] = b"RHT.security.selinux";

/// Memory for one extent of a file.
const PIECE_BYTES: u64 = 24;

/// One archive.
pub struct ImageLayer {
    pub archive: Blob,
    /// Name in messages.
    pub display_name: String,
    /// True if whiteout names remove names of lower layers.
    pub whiteouts: bool,
}

/// An extent of a file and its position in the archive.
#[derive(Clone, Copy, Debug)]
struct ArchiveExtent {
    /// Offset in the file.
    at: u64,
    len: u64,
    /// Offset in the archive.
    archive_at: u64,
}

/// Archive of a file, and its extents there.
struct FileLocation {
    layer: u32,
    pieces: Box<[ArchiveExtent]>,
}

/// Contents of all files.
struct ArchiveReaders {
    open: Vec<OpenArchive>,
    places: Vec<FileLocation>,
    /// The one active decompressor: its history window can take 128 MiB.
    unpacking: Mutex<Option<StreamPosition>>,
}

/// An archive whose contents are read.
struct OpenArchive {
    archive: Blob,
    limit: Option<u64>,
    is_compressed: bool,
}

/// Position in a compressed archive that is being decompressed.
struct StreamPosition {
    layer: u32,
    from: Box<dyn Read + Send>,
    reached: u64,
}

impl ArchiveReaders {
    fn read_from(&self, layer: u32, into: &mut [u8], at: u64) -> std::io::Result<()> {
        let open = self.open.get(layer as usize).ok_or(std::io::ErrorKind::NotFound)?;
        if !open.is_compressed {
            return open.archive.read_exact_at(into, at);
        }
        let mut unpacking = self.unpacking.lock().unwrap_or_else(PoisonError::into_inner);
        let goes_on = unpacking.take().filter(|it| it.layer == layer && it.reached <= at);
        let mut it = match goes_on {
            Some(it) => it,
            // At an earlier offset, or in another archive: decompress from the start.
            None => {
                let from = open.archive.decompress(open.limit).map_err(std::io::Error::other)?;
                StreamPosition { layer, from, reached: 0 }
            }
        };
        let before = at - it.reached;
        it.reached += std::io::copy(&mut (&mut it.from).take(before), &mut std::io::sink())?;
        if it.reached < at {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        it.from.read_exact(into)?;
        it.reached += into.len() as u64;
        *unpacking = Some(it);
        Ok(())
    }
}

impl FileSource for ArchiveReaders {
    fn read(&self, source: u64, at_bytes: u64, into: &mut [u8]) -> std::io::Result<()> {
        let place = usize::try_from(source).ok().and_then(|nth| self.places.get(nth));
        let place = place.ok_or(std::io::ErrorKind::NotFound)?;
        let end = at_bytes.saturating_add(into.len() as u64);
        let first = place.pieces.partition_point(|piece| piece.at + piece.len <= at_bytes);
        for piece in place.pieces.iter().skip(first).take_while(|piece| piece.at < end) {
            let (from, to) = (piece.at.max(at_bytes), (piece.at + piece.len).min(end));
            let room = into.get_mut((from - at_bytes) as usize..(to - at_bytes) as usize);
            let Some(room) = room else { continue };
            self.read_from(place.layer, room, piece.archive_at + (from - piece.at))?;
        }
        Ok(())
    }

    fn is_sequential(&self) -> bool {
        self.open.iter().any(|open| open.is_compressed)
    }
}

/// Scans archives and merges each over those before.
pub fn scan(
    layers: Vec<ImageLayer>,
    root: TreeNode,
    stamp: TimestampPolicy,
    keep_owners: bool,
    limit: Option<u64>,
) -> anyhow::Result<Source<'static>> {
    let mut scan = LayerScan {
        merge: Merge::new(root, stamp),
        stamp,
        keep_owners,
        layer: 0,
        places: vec![],
        left_out: SkippedItems::default(),
        names: acl::Names::of_this_machine(),
    };
    let mut open = vec![];
    for (nth, layer) in (0..).zip(layers) {
        scan.layer = nth;
        scan.merge.layer(layer.whiteouts);
        scan.layer(&layer.archive, limit).with_context(|| layer.display_name.clone())?;
        let packed = layer.archive.compression()?.is_some();
        open.push(OpenArchive { archive: layer.archive, limit, is_compressed: packed });
    }
    let contents = ArchiveReaders { open, places: scan.places, unpacking: Mutex::new(None) };
    let Merge { tree, implied, outside, .. } = scan.merge;
    let notes = scan.left_out.notes;
    Ok(Source { implied_dirs: implied, outside, notes, ..Source::new(tree, contents) })
}

struct LayerScan {
    merge: Merge,
    stamp: TimestampPolicy,
    /// Keeps the owners in the archives; otherwise everything belongs to root.
    keep_owners: bool,
    layer: u32,
    places: Vec<FileLocation>,
    left_out: SkippedItems,
    names: acl::Names,
}

impl LayerScan {
    fn layer(&mut self, archive: &Blob, limit: Option<u64>) -> anyhow::Result<()> {
        let mut entries = Entries::new(archive, limit)?;
        while let Some(entry) = entries.next()? {
            let done = self.entry(&mut entries.reader, &entry);
            done.with_context(|| printable(&entry.name))?;
        }
        Ok(())
    }

    fn entry(&mut self, reader: &mut Reader, entry: &Entry) -> anyhow::Result<()> {
        let device = || entry.device();
        let what = match entry.kind() {
            b'1' => {
                reader.skip(entry.size)?;
                return self.merge.link(&entry.name, &entry.target());
            }
            b'2' => NodeKind::Symlink(entry.target()),
            b'3' => device().map(|(major, minor)| NodeKind::CharDevice(major, minor))?,
            b'4' => device().map(|(major, minor)| NodeKind::BlockDevice(major, minor))?,
            b'5' | b'D' => NodeKind::Directory,
            b'6' => NodeKind::Fifo,
            _ => self.file(reader, entry)?,
        };
        match &what {
            NodeKind::File { .. } => {}
            NodeKind::Symlink(target) => {
                self.merge.charge(target.len() as u64)?;
                reader.skip(entry.size)?;
            }
            _ => reader.skip(entry.size)?,
        }
        let node = self.node(what, entry)?;
        self.merge.add(&entry.name, node)
    }

    fn node(&mut self, what: NodeKind, entry: &Entry) -> anyhow::Result<TreeNode> {
        let Entry { header, extension, .. } = entry;
        let mode = if matches!(what, NodeKind::Symlink(_)) {
            0o777
        } else {
            (unsigned(&header[100..108]).context("its mode")? & 0o7777) as u16
        };
        let mut node = TreeNode::new(what, mode);
        if self.keep_owners {
            node.uid = entry.owner("uid", &header[108..116]).context("its uid")?;
            node.gid = entry.owner("gid", &header[116..124]).context("its gid")?;
        }
        let modified = match extension.time("mtime")? {
            Some(time) => time,
            None => {
                let seconds = number(&header[136..148]).context("its time")?;
                Time { seconds, nanoseconds: 0 }
            }
        };
        let (accessed, changed) = (extension.time("atime")?, extension.time("ctime")?);
        self.stamp.set(&mut node, modified, accessed, changed);
        self.attributes(&mut node, entry)?;
        Ok(node)
    }

    /// Sets the extended attributes of a node from the archive.
    fn attributes(&mut self, node: &mut TreeNode, entry: &Entry) -> anyhow::Result<()> {
        let records = &entry.extension.records;
        // libarchive writes each attribute twice, also as SCHILY with a plain or encoded name.
        let coded_names = || records.keys().filter_map(|key| key.strip_prefix(LIBARCHIVE));
        let mut doubled: BTreeSet<Vec<u8>> =
            coded_names().filter_map(libarchive_xattr::name).collect();
        doubled.extend(coded_names().map(<[u8]>::to_vec));
        for (key, value) in records {
            let (attribute, value) = if let Some(coded) = key.strip_prefix(LIBARCHIVE) {
                let decoded = libarchive_xattr::name(coded).zip(libarchive_xattr::value(value));
                decoded.with_context(|| format!("the attribute {}", printable(coded)))?
            } else if let Some(coded) = key.strip_prefix(SCHILY) {
                if doubled.contains(coded) {
                    continue;
                }
                (libarchive_xattr::gnu_name(coded), value.clone())
            } else if key == SELINUX {
                (b"security.selinux".to_vec(), [value, &b"\0"[..]].concat())
            } else if let Some(which @ (b"access" | b"default")) = key.strip_prefix(ACL) {
                let Some(bytes) = acl::from_text(value, &self.names) else {
                    let what = "an access control list that names users unknown here is";
                    self.left_out.record(what, &printable(&entry.name));
                    continue;
                };
                ([b"system.posix_acl_", which].concat(), bytes)
            } else {
                continue;
            };
            self.merge.charge((attribute.len() + value.len()) as u64)?;
            if !node.set_xattr(&attribute, &value) {
                let what = format!("the attribute {} is", printable(&attribute));
                self.left_out.record(&what, &printable(&entry.name));
            }
        }
        Ok(())
    }

    /// Locates the contents of a file, and skips them.
    fn file(&mut self, reader: &mut Reader, entry: &Entry) -> anyhow::Result<NodeKind> {
        let begun = reader.at;
        let (size_bytes, map) = entry.sparse(reader)?;
        let start = reader.at;
        let mut pieces = vec![];
        let mut data: Vec<(u64, u64)> = vec![];
        let (mut archive_at, mut end_before) = (start, 0);
        for pair in map.chunks_exact(2) {
            let &[at, len] = pair else { continue };
            let end = at.checked_add(len).filter(|end| *end <= size_bytes && at >= end_before);
            let end = end.context("the map of a sparse file makes no sense")?;
            if len > 0 {
                pieces.push(ArchiveExtent { at, len, archive_at });
                data.push((at, end));
            }
            archive_at = archive_at.checked_add(len).context("too long")?;
            end_before = end;
        }
        // In version 1.0 the size includes the map.
        let before = if entry.header[156] == b'S' { 0 } else { start - begun };
        let left = entry.size.checked_sub(before).filter(|left| *left >= archive_at - start);
        reader.skip(left.context("the map of a sparse file makes no sense")?)?;
        data.shrink_to_fit();
        self.merge.charge(pieces.len() as u64 * 2 * PIECE_BYTES)?;
        let source = self.places.len() as u64;
        self.places.push(FileLocation { layer: self.layer, pieces: pieces.into() });
        Ok(NodeKind::File { size_bytes, data, source })
    }
}
