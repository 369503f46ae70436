//! Writing a tree of a volume as a POSIX (pax) archive.
//!
//! Pax records hold what ustar headers cannot, in the form that GNU tar and bsdtar read: long
//! names, nanoseconds, large numbers, `SCHILY.xattr.*`, `SCHILY.acl.*` and `GNU.sparse.*` version
//! 1.0.
//!
//! Law: holes cost nothing, and the map of a sparse file is never in memory as a whole. It is
//! read twice: once for its length, which the header contains, and once to be written.

use std::io::{self, Write};

use anyhow::{Context, anyhow, bail};
use draconis_ext::{InodeNumber, Volume};
use draconis_types::FileType;
use tar::{EntryType, Header};

use crate::messages::{escape_control_chars, with_context};
use crate::populate::{acl, libarchive_xattr};
use crate::walk::{
    ChunkReceiver, FileChunk, TreeItem, TreeListing, chunk_queue, data_segments, read_ahead,
};

/// Rule for archiving files with holes as sparse entries.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SparseFormat {
    /// Files with at least 1 MiB of holes.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// Options of an archive.
#[derive(Clone, Debug, Default)]
pub struct TarOptions {
    /// Prefix of every path; `.` if empty.
    pub prefix: Vec<u8>,
    /// Treatment of files with holes.
    pub sparse: SparseFormat,
    /// Writes a layer of a container image, whose readers give whiteout names a special meaning.
    pub is_layer: bool,
}

/// Callbacks for progress and errors.
pub trait TarObserver {
    /// Called with the total bytes of contents, before the first is written.
    fn on_start(&mut self, bytes: u64);
    /// Called with the number of bytes just written.
    fn on_written(&mut self, bytes: u64);
    /// Called for each item that is skipped.
    fn on_error(&mut self, error: &anyhow::Error);
}

/// Size of a tar block, in bytes.
const BLOCK_BYTES: usize = 512;
/// Largest number that ustar's size field holds.
const MAX_USTAR_SIZE: u64 = 0o77_777_777_777;
/// Largest number that ustar's owner fields hold.
const MAX_USTAR_ID: u32 = 0o7_777_777;
/// Longest name that ustar holds without splitting.
const USTAR_NAME_BYTES: usize = 100;
/// Minimum bytes in holes for a sparse entry in automatic mode, because not every reader of
/// archives knows sparse entries.
const MIN_HOLE_BYTES: u64 = 1 << 20;

/// Writes the tree at `top` to `out`; messages call it `label`. Returns true if everything could
/// be read, and `out`.
///
/// # Errors
/// `top` cannot be read, or writing fails. Damage below `top` is reported and skipped.
pub fn write_archive<W: Write>(
    volume: &Volume,
    (top, label): (InodeNumber, &str),
    how: TarOptions,
    watch: &mut dyn TarObserver,
    out: W,
) -> anyhow::Result<(bool, W)> {
    let walk = TreeListing::new(volume, top, label, &mut |error| watch.on_error(error))?;
    let plan = walk.write_order();
    watch.on_start(walk.bytes);
    let (failed, out) = std::thread::scope(|scope| {
        let (send, pieces) = chunk_queue();
        let (walk, plan) = (&walk, &plan);
        scope.spawn(move || read_ahead(volume, walk, plan, send));
        let out = io::BufWriter::with_capacity(1 << 20, out);
        let mut archive = ArchiveWriter { volume, walk, how, out, pieces, watch, failed: false };
        archive.write(plan)?;
        let out = archive.out.into_inner().map_err(|error| error.into_error())?;
        anyhow::Ok((archive.failed, out))
    })?;
    Ok((!failed && !walk.damaged, out))
}

struct ArchiveWriter<'a, W: Write> {
    volume: &'a Volume,
    walk: &'a TreeListing,
    how: TarOptions,
    out: io::BufWriter<W>,
    pieces: ChunkReceiver,
    watch: &'a mut dyn TarObserver,
    failed: bool,
}

impl<W: Write> ArchiveWriter<'_, W> {
    fn write(&mut self, plan: &[usize]) -> anyhow::Result<()> {
        for &at in plan {
            let item = &self.walk.items[at];
            if item.attributes.kind == FileType::Socket {
                let path = escape_control_chars(&self.entry_path(item));
                self.watch.on_error(&anyhow!("{path}: a socket cannot be archived"));
                continue;
            }
            let name = item.path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
            if self.how.is_layer && name.starts_with(b".wh.") {
                bail!(
                    "{}: in an image this name means that another is taken away; rename it first",
                    escape_control_chars(&self.entry_path(item))
                );
            }
            self.write_item(item)?;
        }
        // Two blocks of zeros end an archive.
        self.out.write_all(&[0; 2 * BLOCK_BYTES])?;
        self.out.flush()?;
        Ok(())
    }

    fn report_error(&mut self, item: &TreeItem, error: draconis_ext::Error) {
        self.failed = true;
        let error = with_context(&escape_control_chars(&self.entry_path(item)), error);
        self.watch.on_error(&error);
    }

    fn entry_path(&self, item: &TreeItem) -> Vec<u8> {
        let mut path = match &self.how.prefix[..] {
            b"" => b".".to_vec(),
            prefix => prefix.to_vec(),
        };
        if !item.path.is_empty() {
            path.push(b'/');
            path.extend_from_slice(&item.path);
        }
        if item.attributes.kind == FileType::Directory {
            path.push(b'/');
        }
        path
    }

    fn write_item(&mut self, item: &TreeItem) -> anyhow::Result<()> {
        let attributes = &item.attributes;
        let path = self.entry_path(item);
        let mut header = Header::new_ustar();
        let mut pax = PaxRecords::default();
        header.set_mode(attributes.mode & 0o7777);
        header.set_uid(pax.add_number("uid", attributes.uid.into(), MAX_USTAR_ID.into()));
        header.set_gid(pax.add_number("gid", attributes.gid.into(), MAX_USTAR_ID.into()));
        let modified = attributes.modified;
        header.set_mtime(u64::try_from(modified.seconds).unwrap_or(0).min(MAX_USTAR_SIZE));
        if modified.nanoseconds != 0 || header.mtime().ok() != u64::try_from(modified.seconds).ok()
        {
            pax.add_record(
                "mtime",
                format_pax_time(modified.seconds, modified.nanoseconds).as_bytes(),
            );
        }
        if let Err(error) = self.add_xattr_records(item, &mut pax) {
            self.report_error(item, error);
        }
        if let Some(first) = item.link_to {
            header.set_entry_type(EntryType::Link);
            let target = self.entry_path(&self.walk.items[first]);
            set_link(&mut header, &mut pax, &target);
            return self.write_header(header, &mut pax, &path, 0);
        }
        match attributes.kind {
            FileType::File => return self.write_file(item, header, pax, &path),
            FileType::Directory => header.set_entry_type(EntryType::Directory),
            FileType::Symlink => {
                header.set_entry_type(EntryType::Symlink);
                match self.volume.read_link_of(item.inode()) {
                    Ok(target) => set_link(&mut header, &mut pax, &target),
                    Err(error) => {
                        self.report_error(item, error);
                        return Ok(());
                    }
                }
            }
            FileType::Fifo => header.set_entry_type(EntryType::Fifo),
            kind => {
                let character = kind == FileType::CharDevice;
                header.set_entry_type(if character { EntryType::Char } else { EntryType::Block });
                header.set_device_major(attributes.device.0)?;
                header.set_device_minor(attributes.device.1)?;
            }
        }
        self.write_header(header, &mut pax, &path, 0)
    }

    fn add_xattr_records(&self, item: &TreeItem, pax: &mut PaxRecords) -> draconis_ext::Result<()> {
        if item.attributes.no_xattrs {
            return Ok(());
        }
        let number = item.inode().number;
        for name in self.volume.xattr_names(number)? {
            let value = self.volume.xattr(number, &name)?;
            // GNU tar reads the two ACL kinds from `SCHILY.acl` records, container engines from
            // `SCHILY.xattr` records as all others.
            if let Some(which) = name.strip_prefix(b"system.posix_acl_")
                && let Some(words) = acl::to_text(&value)
            {
                pax.add_record_bytes(&[b"SCHILY.acl.", which].concat(), &words);
            }
            if name == b"security.selinux" {
                let context = value.strip_suffix(b"\0").unwrap_or(&value);
                pax.add_record("RHT.security.selinux", context);
            }
            let coded = libarchive_xattr::encode_gnu_name(&name);
            // bsdtar decodes names in `LIBARCHIVE.xattr` records only.
            if coded != name {
                pax.add_record_bytes(
                    &[b"LIBARCHIVE.xattr.", &coded[..]].concat(),
                    &libarchive_xattr::encode_base64(&value),
                );
            }
            pax.add_record_bytes(&[b"SCHILY.xattr.", &coded[..]].concat(), &value);
        }
        Ok(())
    }

    fn write_file(
        &mut self,
        item: &TreeItem,
        mut header: Header,
        mut pax: PaxRecords,
        path: &[u8],
    ) -> anyhow::Result<()> {
        header.set_entry_type(EntryType::Regular);
        let size = item.attributes.size_bytes;
        let mut layout = SparseMapSize::default();
        for segment in data_segments(self.volume, item.inode()) {
            match segment {
                Ok((start, end)) => layout.add_segment(start, end),
                Err(error) => {
                    self.report_error(item, error);
                    self.skip_file_chunks();
                    return Ok(());
                }
            }
        }
        layout.add_trailing_hole(size);
        let holes = size - layout.stored;
        let sparse = match self.how.sparse {
            SparseFormat::Auto => holes >= MIN_HOLE_BYTES,
            SparseFormat::Always => holes > 0,
            SparseFormat::Never => false,
        };
        let stored = if sparse { layout.stored } else { size };
        if sparse {
            pax.add_record("GNU.sparse.major", b"1");
            pax.add_record("GNU.sparse.minor", b"0");
            pax.add_name("GNU.sparse.name", path);
            pax.add_record("GNU.sparse.realsize", size.to_string().as_bytes());
            // Name under which a tar without sparse support extracts the entry.
            let name = [b"GNUSparseFile.0/", path].concat();
            self.write_header(header, &mut pax, &name, stored + layout.map_blocks_bytes())?;
            self.write_sparse_map(item, &layout, size)?;
        } else {
            self.write_header(header, &mut pax, path, stored)?;
        }
        let mut put = 0;
        while let Some(piece) = self.pieces.next() {
            // The chunks of a segment come in order and without gaps.
            let (offset, data) = match piece {
                FileChunk::Data(offset, data) => (offset, data),
                FileChunk::End(read) => {
                    if let Err(error) = read {
                        self.report_error(item, error);
                    }
                    break;
                }
            };
            if !sparse {
                self.write_zeros(offset.saturating_sub(put))?;
                put = put.max(offset);
            }
            self.out.write_all(&data)?;
            put += data.len() as u64;
            self.watch.on_written(data.len() as u64);
        }
        // Fills a hole at the end and unreadable parts, so that the archive stays valid.
        self.write_zeros(stored.saturating_sub(put))?;
        self.pad_to_block(stored)
    }

    /// Writes the map of a sparse file, version 1.0: one decimal number per line, in whole blocks.
    fn write_sparse_map(
        &mut self,
        item: &TreeItem,
        layout: &SparseMapSize,
        size: u64,
    ) -> anyhow::Result<()> {
        let mut written = SparseMapSize::default();
        writeln!(self.out, "{}", layout.entries)?;
        for segment in data_segments(self.volume, item.inode()) {
            // The first pass read the same map without an error, and the volume does not change.
            let (start, end) = segment.with_context(|| {
                format!("{}: the archive ends here", escape_control_chars(&item.path))
            })?;
            write!(self.out, "{start}\n{}\n", end - start)?;
            written.add_segment(start, end);
        }
        if written.end < size {
            write!(self.out, "{size}\n0\n")?;
        }
        self.pad_to_block(layout.map_bytes())
    }

    fn skip_file_chunks(&mut self) {
        while let Some(FileChunk::Data(..)) = self.pieces.next() {}
    }

    fn write_zeros(&mut self, mut len: u64) -> io::Result<()> {
        let zeros = [0; 8192];
        while len > 0 {
            let n = len.min(zeros.len() as u64);
            self.out.write_all(&zeros[..n as usize])?;
            len -= n;
        }
        Ok(())
    }

    fn pad_to_block(&mut self, len: u64) -> anyhow::Result<()> {
        let over = len as usize % BLOCK_BYTES;
        if over > 0 {
            self.out.write_all(&[0; BLOCK_BYTES][over..])?;
        }
        Ok(())
    }

    /// Writes a header, preceded by the pax records that it needs.
    fn write_header(
        &mut self,
        mut header: Header,
        pax: &mut PaxRecords,
        path: &[u8],
        size: u64,
    ) -> anyhow::Result<()> {
        header.set_size(pax.add_number("size", size, MAX_USTAR_SIZE));
        if path.len() > USTAR_NAME_BYTES {
            pax.add_name("path", path);
        }
        if let Some(ustar) = header.as_ustar_mut() {
            set_field(&mut ustar.name, path);
        }
        header.set_cksum();
        let records = std::mem::take(&mut pax.records);
        if !records.is_empty() {
            let mut extended = Header::new_ustar();
            extended.set_entry_type(EntryType::XHeader);
            extended.set_size(records.len() as u64);
            extended.set_mode(0o644);
            if let Some(ustar) = extended.as_ustar_mut() {
                set_field(&mut ustar.name, b"PaxHeaders/entry");
            }
            extended.set_cksum();
            self.out.write_all(extended.as_bytes())?;
            self.out.write_all(&records)?;
            self.pad_to_block(records.len() as u64)?;
        }
        self.out.write_all(header.as_bytes())?;
        Ok(())
    }
}

fn set_link(header: &mut Header, pax: &mut PaxRecords, target: &[u8]) {
    if target.len() > USTAR_NAME_BYTES {
        pax.add_name("linkpath", target);
    }
    if let Some(ustar) = header.as_ustar_mut() {
        set_field(&mut ustar.linkname, target);
    }
}

/// Stores as much of `text` as the field holds; a pax record holds the whole text.
fn set_field(field: &mut [u8; USTAR_NAME_BYTES], text: &[u8]) {
    let len = text.len().min(field.len());
    field.fill(0);
    field[..len].copy_from_slice(&text[..len]);
}

/// Size of the map of a sparse file, computed before the map is written.
#[derive(Default)]
struct SparseMapSize {
    /// Bytes outside holes.
    stored: u64,
    /// Number of entries.
    entries: u64,
    /// Length of the entries as decimal text.
    text_bytes: u64,
    /// End of the last entry.
    end: u64,
}

impl SparseMapSize {
    fn add_segment(&mut self, start: u64, end: u64) {
        self.stored += end - start;
        self.entries += 1;
        self.text_bytes += count_decimal_digits(start) + count_decimal_digits(end - start) + 2;
        self.end = end;
    }

    /// Adds an empty entry for a hole at the end, which gives the length of the file.
    fn add_trailing_hole(&mut self, size: u64) {
        if self.end < size {
            self.add_segment(size, size);
        }
    }

    fn map_bytes(&self) -> u64 {
        count_decimal_digits(self.entries) + 1 + self.text_bytes
    }

    fn map_blocks_bytes(&self) -> u64 {
        self.map_bytes().next_multiple_of(BLOCK_BYTES as u64)
    }
}

/// Returns the number of decimal digits.
fn count_decimal_digits(number: u64) -> u64 {
    u64::from(number.checked_ilog10().unwrap_or(0)) + 1
}

/// Formats seconds with a fraction. Before 1970 the fraction adds to the negative value.
fn format_pax_time(seconds: i64, nanoseconds: u32) -> String {
    match (seconds, nanoseconds) {
        (_, 0) => seconds.to_string(),
        (0.., _) => format!("{seconds}.{nanoseconds:09}"),
        _ => format!("-{}.{:09}", (seconds + 1).unsigned_abs(), 1_000_000_000 - nanoseconds),
    }
}

/// Records of a pax header.
#[derive(Default)]
struct PaxRecords {
    records: Vec<u8>,
    /// True once a `hdrcharset=BINARY` record was written.
    is_binary: bool,
}

impl PaxRecords {
    fn add_record(&mut self, key: &str, value: &[u8]) {
        self.add_record_bytes(key.as_bytes(), value);
    }

    /// Adds the record `LEN KEY=VALUE\n`, where LEN counts itself.
    fn add_record_bytes(&mut self, key: &[u8], value: &[u8]) {
        let rest = key.len() + value.len() + 3;
        let mut len = rest + 1;
        while rest + len.to_string().len() != len {
            len = rest + len.to_string().len();
        }
        self.records.extend_from_slice(format!("{len} ").as_bytes());
        self.records.extend_from_slice(key);
        self.records.push(b'=');
        self.records.extend_from_slice(value);
        self.records.push(b'\n');
    }

    /// Adds a name or link target, preceded by a charset record if it is not UTF-8.
    fn add_name(&mut self, key: &str, name: &[u8]) {
        if std::str::from_utf8(name).is_err() && !self.is_binary {
            self.add_record("hdrcharset", b"BINARY");
            self.is_binary = true;
        }
        self.add_record(key, name);
    }

    /// Returns the value for the plain field: the number itself, or 0 if a pax record holds it.
    fn add_number(&mut self, key: &str, value: u64, max: u64) -> u64 {
        if value <= max {
            return value;
        }
        self.add_record(key, value.to_string().as_bytes());
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pax_record_length_includes_itself() {
        let mut pax = PaxRecords::default();
        pax.add_record("path", b"x");
        // Around 99, where LEN gets another digit.
        pax.add_record("k", &[b'v'; 91]);
        pax.add_record("k", &[b'v'; 94]);
        let text = String::from_utf8(pax.records).unwrap();
        for line in text.lines() {
            let (len, _) = line.split_once(' ').unwrap();
            assert_eq!(len.parse::<usize>().unwrap(), line.len() + 1);
        }
        assert!(text.starts_with("9 path=x\n"));
    }

    #[test]
    fn pax_times_before_epoch() {
        assert_eq!(format_pax_time(1, 5), "1.000000005");
        assert_eq!(format_pax_time(-1, 0), "-1");
        // Half a second before 1970 is second -1 plus 0.5 s.
        assert_eq!(format_pax_time(-1, 500_000_000), "-0.500000000");
        assert_eq!(format_pax_time(-2, 750_000_000), "-1.250000000");
    }

    #[test]
    fn sparse_map_size_is_computed_before_writing() {
        let mut layout = SparseMapSize::default();
        layout.add_segment(0, 10);
        layout.add_segment(100, 120);
        layout.add_trailing_hole(200);
        let map = "3\n0\n10\n100\n20\n200\n0\n";
        assert_eq!((layout.entries, layout.stored), (3, 30));
        assert_eq!(layout.map_bytes(), map.len() as u64);
        assert_eq!(layout.map_blocks_bytes(), 512);
        let mut hole = SparseMapSize::default();
        hole.add_trailing_hole(5);
        assert_eq!(hole.map_bytes(), "1\n5\n0\n".len() as u64);
        for number in [0, 9, 10, 99, 100, u64::MAX] {
            assert_eq!(count_decimal_digits(number), number.to_string().len() as u64);
        }
    }
}
