//! Merging archives into one tree, and locating the contents of their files.
//!
//! Law 1: contents are read from the archive when they are written. A compressed archive is
//! decompressed once for the scan, and once more for reading, if the reads are in order.
//! Law 2: no offset from an archive leads past its end.

use std::collections::BTreeSet;
use std::io::Read;

use anyhow::Context;
use draconis_ext::mkfs::{FileSource, NodeKind, TreeNode};
use draconis_types::Time;
use draconis_types::lock::Mutex;

use super::blob::Blob;
use super::merge::LayerMerger;
use super::tar::{
    ArchiveReader, TarEntries, TarEntry, parse_header_number, parse_unsigned_header_number,
};
use super::{PopulateSource, SkippedItems, TimestampPolicy, acl, libarchive_xattr};
use crate::messages::escape_control_chars;

/// Prefixes of pax records with extended attributes, and the SELinux record.
const PAX_LIBARCHIVE_XATTR_PREFIX: &[u8] = b"LIBARCHIVE.xattr.";
const PAX_SCHILY_XATTR_PREFIX: &[u8] = b"SCHILY.xattr.";
const PAX_SCHILY_ACL_PREFIX: &[u8] = b"SCHILY.acl.";
const PAX_SELINUX_KEY: &[u8] = b"RHT.security.selinux";

/// Memory for one extent of a file.
const EXTENT_MEMORY_BYTES: u64 = 24;

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
        let mut unpacking = self.unpacking.lock();
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
pub fn scan_layers(
    layers: Vec<ImageLayer>,
    root: TreeNode,
    stamp: TimestampPolicy,
    keep_owners: bool,
    limit: Option<u64>,
) -> anyhow::Result<PopulateSource<'static>> {
    let mut scan = LayerScan {
        merge: LayerMerger::new(root, stamp),
        stamp,
        keep_owners,
        layer: 0,
        places: vec![],
        left_out: SkippedItems::default(),
        names: acl::UserGroupIds::from_etc_files(),
    };
    let mut open = vec![];
    for (nth, layer) in (0..).zip(layers) {
        scan.layer = nth;
        scan.merge.begin_layer(layer.whiteouts);
        scan.scan_layer(&layer.archive, limit).with_context(|| layer.display_name.clone())?;
        let packed = layer.archive.detect_compression()?.is_some();
        open.push(OpenArchive { archive: layer.archive, limit, is_compressed: packed });
    }
    let contents = ArchiveReaders { open, places: scan.places, unpacking: Mutex::new(None) };
    let LayerMerger { tree, implied, outside, .. } = scan.merge;
    let notes = scan.left_out.notes;
    Ok(PopulateSource {
        implied_dirs: implied,
        outside,
        notes,
        ..PopulateSource::new(tree, contents)
    })
}

struct LayerScan {
    merge: LayerMerger,
    stamp: TimestampPolicy,
    /// Keeps the owners in the archives; otherwise everything belongs to root.
    keep_owners: bool,
    layer: u32,
    places: Vec<FileLocation>,
    left_out: SkippedItems,
    names: acl::UserGroupIds,
}

impl LayerScan {
    fn scan_layer(&mut self, archive: &Blob, limit: Option<u64>) -> anyhow::Result<()> {
        let mut entries = TarEntries::new(archive, limit)?;
        while let Some(entry) = entries.next()? {
            let done = self.add_entry(&mut entries.reader, &entry);
            done.with_context(|| escape_control_chars(&entry.name))?;
        }
        Ok(())
    }

    fn add_entry(&mut self, reader: &mut ArchiveReader, entry: &TarEntry) -> anyhow::Result<()> {
        let device = || entry.device();
        let what = match entry.kind() {
            b'1' => {
                reader.skip_contents(entry.size)?;
                return self.merge.add_hard_link(&entry.name, &entry.target());
            }
            b'2' => NodeKind::Symlink(entry.target()),
            b'3' => device().map(|(major, minor)| NodeKind::CharDevice(major, minor))?,
            b'4' => device().map(|(major, minor)| NodeKind::BlockDevice(major, minor))?,
            b'5' | b'D' => NodeKind::Directory,
            b'6' => NodeKind::Fifo,
            _ => self.locate_file_data(reader, entry)?,
        };
        match &what {
            NodeKind::File { .. } => {}
            NodeKind::Symlink(target) => {
                self.merge.charge_memory(target.len() as u64)?;
                reader.skip_contents(entry.size)?;
            }
            _ => reader.skip_contents(entry.size)?,
        }
        let node = self.make_node(what, entry)?;
        self.merge.add_entry(&entry.name, node)
    }

    fn make_node(&mut self, what: NodeKind, entry: &TarEntry) -> anyhow::Result<TreeNode> {
        let TarEntry { header, extension, .. } = entry;
        let mode = if matches!(what, NodeKind::Symlink(_)) {
            0o777
        } else {
            (parse_unsigned_header_number(&header[100..108]).context("its mode")? & 0o7777) as u16
        };
        let mut node = TreeNode::new(what, mode);
        if self.keep_owners {
            node.uid = entry.owner_id("uid", &header[108..116]).context("its uid")?;
            node.gid = entry.owner_id("gid", &header[116..124]).context("its gid")?;
        }
        let modified = match extension.pax_time("mtime")? {
            Some(time) => time,
            None => {
                let seconds = parse_header_number(&header[136..148]).context("its time")?;
                Time { seconds, nanoseconds: 0 }
            }
        };
        let (accessed, changed) = (extension.pax_time("atime")?, extension.pax_time("ctime")?);
        self.stamp.set_times(&mut node, modified, accessed, changed);
        self.set_xattrs(&mut node, entry)?;
        Ok(node)
    }

    /// Sets the extended attributes of a node from the archive.
    fn set_xattrs(&mut self, node: &mut TreeNode, entry: &TarEntry) -> anyhow::Result<()> {
        let records = &entry.extension.records;
        // libarchive writes each attribute twice, also as SCHILY with a plain or encoded name.
        let coded_names =
            || records.keys().filter_map(|key| key.strip_prefix(PAX_LIBARCHIVE_XATTR_PREFIX));
        let mut doubled: BTreeSet<Vec<u8>> =
            coded_names().filter_map(libarchive_xattr::decode_name).collect();
        doubled.extend(coded_names().map(<[u8]>::to_vec));
        for (key, value) in records {
            let (attribute, value) = if let Some(coded) =
                key.strip_prefix(PAX_LIBARCHIVE_XATTR_PREFIX)
            {
                let decoded =
                    libarchive_xattr::decode_name(coded).zip(libarchive_xattr::decode_value(value));
                decoded.with_context(|| format!("the attribute {}", escape_control_chars(coded)))?
            } else if let Some(coded) = key.strip_prefix(PAX_SCHILY_XATTR_PREFIX) {
                if doubled.contains(coded) {
                    continue;
                }
                (libarchive_xattr::decode_gnu_name(coded), value.clone())
            } else if key == PAX_SELINUX_KEY {
                (b"security.selinux".to_vec(), [value, &b"\0"[..]].concat())
            } else if let Some(which @ (b"access" | b"default")) =
                key.strip_prefix(PAX_SCHILY_ACL_PREFIX)
            {
                let Some(bytes) = acl::from_text(value, &self.names) else {
                    let what = "an access control list that names users unknown here is";
                    self.left_out.record_skipped(what, &escape_control_chars(&entry.name));
                    continue;
                };
                ([b"system.posix_acl_", which].concat(), bytes)
            } else {
                continue;
            };
            self.merge.charge_memory((attribute.len() + value.len()) as u64)?;
            if !node.set_xattr(&attribute, &value) {
                let what = format!("the attribute {} is", escape_control_chars(&attribute));
                self.left_out.record_skipped(&what, &escape_control_chars(&entry.name));
            }
        }
        Ok(())
    }

    /// Locates the contents of a file, and skips them.
    fn locate_file_data(
        &mut self,
        reader: &mut ArchiveReader,
        entry: &TarEntry,
    ) -> anyhow::Result<NodeKind> {
        let begun = reader.at;
        let (size_bytes, map) = entry.sparse_map(reader)?;
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
        reader.skip_contents(left.context("the map of a sparse file makes no sense")?)?;
        data.shrink_to_fit();
        self.merge.charge_memory(pieces.len() as u64 * 2 * EXTENT_MEMORY_BYTES)?;
        let source = self.places.len() as u64;
        self.places.push(FileLocation { layer: self.layer, pieces: pieces.into() });
        Ok(NodeKind::File { size_bytes, data, source })
    }
}
