//! Seekable compressed files, read in place by an index or by skipping from header to header.
//!
//! ```text
//!   zstd, seekable   | frame | frame | .. | seek table: sizes of each, compressed and not |
//!   dictzip          | header: compressed size of each chunk | chunk | chunk | .. |
//!   bgzip            | header: size of this member | .. | header .. |    64 KiB each, decompressed
//! ```
//! After `contrib/seekable_format` of zstd, dictzip(1), and the specification of SAM and BAM.
//!
//! Law 1: a file with a chunk that decompresses to more than [`MAX_INDEXED_CHUNK_BYTES`] counts as
//! one without an index, and is decompressed as a whole.
//! Law 2: an index takes memory in proportion to the bytes that the file has for it.
//! Law 3: a chunk that decompresses to another length than the index has is damaged.

use std::io::Read;

use crate::Error;
use crate::compression::Compression;
use crate::image_file::{ImageFile, le16, le32};
use crate::image_map::{ImageMap, Location, MAX_CHUNK_BYTES};

/// Maximum size of a chunk that is decompressed to read a part of it.
const MAX_INDEXED_CHUNK_BYTES: u64 = 8 * MAX_CHUNK_BYTES;
/// Maximum chunks of a file.
const MAX_CHUNKS: usize = 4 << 20;
/// Files are read in sectors, and padded with zeros to a whole sector.
const SECTOR_BYTES: u64 = 512;

const ZSTD_SKIPPABLE_MAGIC: u32 = 0x184D_2A5E;
const ZSTD_SEEK_TABLE_MAGIC: u32 = 0x8F92_EAB1;
/// Seek table footer: number of frames, a flag, and the magic number.
const ZSTD_FOOTER_BYTES: u64 = 9;

const GZIP_HEADER_BYTES: usize = 12;
/// Length of an empty bgzip member: the end-of-file marker.
const BGZIP_EOF_BYTES: u64 = 28;
const GZIP_FEXTRA: u8 = 4;
const GZIP_FNAME: u8 = 8;
const GZIP_FCOMMENT: u8 = 16;
const GZIP_FHCRC: u8 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SeekableFormat {
    /// zstd frames.
    Zstd,
    /// Complete gzip members.
    Bgzip,
    /// Independent parts of one deflate stream.
    Dictzip,
}

/// A chunk: its compressed and decompressed position.
struct CompressedChunk {
    start: u64,
    at: u64,
    packed_len: u32,
}

pub(crate) struct SeekableFile {
    kind: SeekableFormat,
    len_bytes: u64,
    pieces: Vec<CompressedChunk>,
}

impl SeekableFile {
    /// Reads the index of a compressed file that begins with `head`, its first sector; `None` if it
    /// has no usable index.
    pub(crate) fn open(file: &ImageFile, head: &[u8]) -> Result<Option<Self>, Error> {
        match Compression::detect(head) {
            Some(Compression::Zstd) => open_zstd(file),
            Some(Compression::Gzip)
                if head.get(3).is_some_and(|flags| flags & GZIP_FEXTRA != 0) =>
            {
                open_gzip(file, head)
            }
            _ => Ok(None),
        }
    }

    /// Returns the format.
    pub(crate) fn format(&self) -> crate::Format {
        match self.kind {
            SeekableFormat::Zstd => crate::Format::Zstd,
            SeekableFormat::Bgzip | SeekableFormat::Dictzip => crate::Format::Gzip,
        }
    }

    fn new(kind: SeekableFormat) -> Self {
        Self { kind, len_bytes: 0, pieces: vec![] }
    }

    /// Adds a chunk; returns `false` if it exceeds a limit.
    fn add_chunk(&mut self, at: u64, packed_len: u64, len: u64) -> bool {
        let Ok(packed_len) = u32::try_from(packed_len) else { return false };
        if len > MAX_INDEXED_CHUNK_BYTES
            || u64::from(packed_len) > MAX_INDEXED_CHUNK_BYTES * 2
            || self.pieces.len() >= MAX_CHUNKS
        {
            return false;
        }
        if len > 0 {
            self.pieces.push(CompressedChunk { start: self.len_bytes, at, packed_len });
            self.len_bytes += len;
        }
        true
    }

    /// Returns the decompressed offset at which the chunk after `nth` begins.
    fn chunk_end(&self, nth: usize) -> u64 {
        self.pieces.get(nth + 1).map_or(self.len_bytes, |next| next.start)
    }
}

fn open_zstd(file: &ImageFile) -> Result<Option<SeekableFile>, Error> {
    let tail_at = file.len_bytes().saturating_sub(2 * SECTOR_BYTES);
    let tail = file.read_vec(tail_at, (file.len_bytes() - tail_at) as usize)?;
    let end = tail_at + tail.iter().rposition(|byte| *byte != 0).map_or(0, |last| last as u64 + 1);
    if end < ZSTD_FOOTER_BYTES + 8 {
        return Ok(None);
    }
    let footer = file.read_vec(end - ZSTD_FOOTER_BYTES, ZSTD_FOOTER_BYTES as usize)?;
    let (count, flags) = (u64::from(le32(&footer, 0)), footer.get(4).copied().unwrap_or(0));
    let entry = if flags & 0x80 != 0 { 12 } else { 8 };
    let table_bytes = count * entry + ZSTD_FOOTER_BYTES;
    if le32(&footer, 5) != ZSTD_SEEK_TABLE_MAGIC || flags & 0x7C != 0 || count > MAX_CHUNKS as u64 {
        return Ok(None);
    }
    let Some(table_at) = end.checked_sub(table_bytes + 8) else { return Ok(None) };
    let table = file.read_vec(table_at, (table_bytes + 8) as usize)?;
    if le32(&table, 0) != ZSTD_SKIPPABLE_MAGIC || u64::from(le32(&table, 4)) != table_bytes {
        return Ok(None);
    }
    let mut found = SeekableFile::new(SeekableFormat::Zstd);
    let mut at = 0;
    for nth in 0..count {
        let place = (8 + nth * entry) as usize;
        let packed_len = u64::from(le32(&table, place));
        if !found.add_chunk(at, packed_len, le32(&table, place + 4).into()) {
            return Ok(None);
        }
        at += packed_len;
    }
    // The frames must fill the file up to the table.
    Ok((at == table_at).then_some(found))
}

fn open_gzip(file: &ImageFile, head: &[u8]) -> Result<Option<SeekableFile>, Error> {
    match find_extra_field(head, *b"RA") {
        Some(field) => open_dictzip(file, head, field),
        None if find_extra_field(head, *b"BC").is_some() => open_bgzip(file),
        None => Ok(None),
    }
}

/// Finds a field of the extra part of a header: offset and length.
fn find_extra_field(head: &[u8], name: [u8; 2]) -> Option<(usize, usize)> {
    if !head.starts_with(&[0x1F, 0x8B, 8]) || head.get(3)? & GZIP_FEXTRA == 0 {
        return None;
    }
    let end = GZIP_HEADER_BYTES + usize::from(le16(head, 10));
    let mut at = GZIP_HEADER_BYTES;
    while at + 4 <= end {
        let len = usize::from(le16(head, at + 2));
        if head.get(at..at + 2)? == name {
            return Some((at + 4, len));
        }
        at += 4 + len;
    }
    None
}

fn open_dictzip(
    file: &ImageFile,
    head: &[u8],
    (at, len): (usize, usize),
) -> Result<Option<SeekableFile>, Error> {
    let most = file.len_bytes().min(1 << 17) as usize;
    let all = file.read_vec(0, most)?;
    let (version, chunk) = (le16(&all, at), u64::from(le16(&all, at + 2)));
    let count = usize::from(le16(&all, at + 4));
    if version != 1 || chunk == 0 || len != 6 + 2 * count {
        return Ok(None);
    }
    // A name, a comment and a checksum may follow the extra part.
    let flags = head.get(3).copied().unwrap_or(0);
    let mut start = GZIP_HEADER_BYTES + usize::from(le16(head, 10));
    for flag in [GZIP_FNAME, GZIP_FCOMMENT] {
        if flags & flag != 0 {
            let rest = all.get(start..).unwrap_or_default();
            let Some(end) = rest.iter().position(|byte| *byte == 0) else { return Ok(None) };
            start += end + 1;
        }
    }
    start += if flags & GZIP_FHCRC != 0 { 2 } else { 0 };
    let mut found = SeekableFile::new(SeekableFormat::Dictzip);
    let mut place = start as u64;
    for nth in 0..count {
        let packed_len = u64::from(le16(&all, at + 6 + 2 * nth));
        if !found.add_chunk(place, packed_len, chunk) {
            return Ok(None);
        }
        place += packed_len;
    }
    // The last chunk has the remaining length: the trailer has the total, below 4 GiB.
    let Some(last) = found.pieces.pop() else { return Ok(None) };
    let trailer = read_trailer(file, place)?;
    let len = u64::from(le32(&trailer, 4));
    let rest = len.checked_sub(last.start).filter(|rest| (1..=chunk).contains(rest));
    let Some(rest) = rest else { return Ok(None) };
    found.len_bytes = last.start;
    let is_added = found.add_chunk(last.at, last.packed_len.into(), rest);
    Ok(is_added.then_some(found))
}

/// Returns checksum and length of a stream that ends near `at`: the chunks exclude its end.
fn read_trailer(file: &ImageFile, at: u64) -> Result<Vec<u8>, Error> {
    let rest = file.len_bytes().saturating_sub(at).min(2 * SECTOR_BYTES) as usize;
    let bytes = file.read_vec(at, rest)?;
    // An empty last block of the stream, of two bytes or of five.
    let skip = match bytes.get(..5) {
        Some([3, 0, ..]) => 2,
        Some([1, 0, 0, 0xFF, 0xFF]) => 5,
        _ => 0,
    };
    Ok(bytes.get(skip..).unwrap_or_default().to_vec())
}

fn open_bgzip(file: &ImageFile) -> Result<Option<SeekableFile>, Error> {
    const READ_WINDOW_BYTES: u64 = 1 << 20;
    let mut found = SeekableFile::new(SeekableFormat::Bgzip);
    let (mut at, mut window_at, mut window) = (0u64, 0u64, vec![]);
    // An empty last member shows that the file is complete.
    let mut is_whole = false;
    while at < file.len_bytes() {
        // A member has at most 64 KiB, and its length at its end.
        if at + (1 << 17) > window_at + window.len() as u64 || at < window_at {
            window_at = at;
            window = file.read_vec(at, (file.len_bytes() - at).min(READ_WINDOW_BYTES) as usize)?;
        }
        let member = window.get((at - window_at) as usize..).unwrap_or_default();
        let Some((field, 2)) = find_extra_field(member, *b"BC") else {
            // Zeros that pad the last sector.
            let is_end = file.len_bytes() - at < SECTOR_BYTES && member.iter().all(|it| *it == 0);
            return Ok((is_end && is_whole).then_some(found));
        };
        let packed_len = u64::from(le16(member, field)) + 1;
        let Some(len_at) = usize::try_from(packed_len - 1).ok().and_then(|it| it.checked_sub(3))
        else {
            return Ok(None);
        };
        let len = le32(member, len_at);
        if member.len() < len_at + 4 || !found.add_chunk(at, packed_len, len.into()) {
            return Ok(None);
        }
        is_whole = len == 0 && packed_len == BGZIP_EOF_BYTES;
        at += packed_len;
    }
    Ok(is_whole.then_some(found))
}

impl ImageMap for SeekableFile {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn find(&self, _: &ImageFile, at: u64) -> Result<(Location, u64), Error> {
        let nth = self.pieces.partition_point(|piece| piece.start <= at);
        let nth = nth.checked_sub(1).ok_or(Error::Damaged("nothing is packed there"))?;
        let start = self.pieces.get(nth).map_or(0, |piece| piece.start);
        let place = Location::Compressed { piece: nth as u64, skip: at - start };
        Ok((place, self.chunk_end(nth).saturating_sub(at).max(1)))
    }

    fn decompress_chunk(&self, file: &ImageFile, nth: u64) -> Result<Vec<u8>, Error> {
        let nth = nth as usize;
        let piece = self.pieces.get(nth).ok_or(Error::Damaged("nothing is packed there"))?;
        let len = self.chunk_end(nth) - piece.start;
        let packed = file.read_vec(piece.at, piece.packed_len as usize)?;
        let mut unpacked = Vec::new();
        let read = match self.kind {
            SeekableFormat::Zstd => (Compression::Zstd.decompress(&packed[..]))
                .and_then(|stream| stream.take(len + 1).read_to_end(&mut unpacked)),
            SeekableFormat::Bgzip => flate2::bufread::GzDecoder::new(&packed[..])
                .take(len + 1)
                .read_to_end(&mut unpacked),
            // The stream continues after the chunk, with the next one.
            SeekableFormat::Dictzip => flate2::bufread::DeflateDecoder::new(&packed[..])
                .take(len)
                .read_to_end(&mut unpacked),
        };
        match read {
            Ok(_) if unpacked.len() as u64 == len => Ok(unpacked),
            _ => Err(Error::DamagedAt("a piece of it cannot be unpacked", piece.at)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use draconis_device::Random;
    use flate2::Compression;

    use crate::tests::{memory_disk, read_all, sample_contents};
    use crate::{Format, open};

    /// Compresses into seekable zstd, with frames of 64 KiB.
    fn build_seekable_zstd(raw: &[u8], sums: bool) -> Vec<u8> {
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        let (mut file, mut table) = (vec![], vec![]);
        for frame in raw.chunks(1 << 16) {
            let packed = ruzstd::encoding::compress_to_vec(frame, level);
            table.extend((packed.len() as u32).to_le_bytes());
            table.extend((frame.len() as u32).to_le_bytes());
            table.extend([7; 4].iter().take(if sums { 4 } else { 0 }));
            file.extend(packed);
        }
        file.extend(super::ZSTD_SKIPPABLE_MAGIC.to_le_bytes());
        file.extend((table.len() as u32 + 9).to_le_bytes());
        file.extend(table);
        file.extend((raw.len().div_ceil(1 << 16) as u32).to_le_bytes());
        file.push(if sums { 0x80 } else { 0 });
        file.extend(super::ZSTD_SEEK_TABLE_MAGIC.to_le_bytes());
        file
    }

    fn deflate_bytes(bytes: &[u8], flush: bool) -> Vec<u8> {
        let mut encoder = flate2::write::DeflateEncoder::new(vec![], Compression::fast());
        encoder.write_all(bytes).unwrap();
        match flush {
            true => {
                encoder.flush().unwrap();
                encoder.get_ref().clone()
            }
            false => encoder.finish().unwrap(),
        }
    }

    fn crc32_of(bytes: &[u8]) -> u32 {
        let mut crc = flate2::Crc::new();
        crc.update(bytes);
        crc.sum()
    }

    fn build_bgzip(raw: &[u8]) -> Vec<u8> {
        let mut file = vec![];
        for member in raw.chunks(0xFF00).chain([&[][..]]) {
            let packed = deflate_bytes(member, false);
            file.extend([0x1F, 0x8B, 8, 4, 0, 0, 0, 0, 0, 0xFF, 6, 0, b'B', b'C', 2, 0]);
            file.extend((packed.len() as u16 + 25).to_le_bytes());
            file.extend(packed);
            file.extend(crc32_of(member).to_le_bytes());
            file.extend((member.len() as u32).to_le_bytes());
        }
        file
    }

    fn build_dictzip(raw: &[u8]) -> Vec<u8> {
        let chunks: Vec<Vec<u8>> =
            raw.chunks(50_000).map(|chunk| deflate_bytes(chunk, true)).collect();
        let mut file = vec![0x1F, 0x8B, 8, 4 | 8, 0, 0, 0, 0, 0, 3];
        file.extend((chunks.len() as u16 * 2 + 10).to_le_bytes());
        file.extend(b"RA");
        file.extend((chunks.len() as u16 * 2 + 6).to_le_bytes());
        for word in [1, 50_000, chunks.len() as u16] {
            file.extend(word.to_le_bytes());
        }
        file.extend(chunks.iter().flat_map(|chunk| (chunk.len() as u16).to_le_bytes()));
        file.extend(b"name\0");
        file.extend(chunks.concat());
        // The end of the stream.
        file.extend([3, 0]);
        file.extend(crc32_of(raw).to_le_bytes());
        file.extend((raw.len() as u32).to_le_bytes());
        file
    }

    #[test]
    fn seekable_files_are_read_in_place() {
        let raw = sample_contents(3 << 20);
        for (packed, format) in [
            (build_seekable_zstd(&raw, true), Format::Zstd),
            (build_seekable_zstd(&raw, false), Format::Zstd),
            (build_bgzip(&raw), Format::Gzip),
            (build_dictzip(&raw), Format::Gzip),
        ] {
            // The same without its index.
            let packing = crate::compression::Compression::detect(&packed).unwrap();
            let mut unpacked = vec![];
            packing.decompress(&packed[..]).unwrap().read_to_end(&mut unpacked).unwrap();
            assert!(unpacked == raw, "{format:?}");
            let opened = open(memory_disk(packed), &[]).unwrap();
            assert_eq!(opened.format, Some(format));
            assert!(read_all(&*opened.disk).unwrap() == raw, "{format:?}");
        }
    }

    #[test]
    fn wrong_seek_index_is_ignored_or_refused() {
        let raw = sample_contents(1 << 20);
        let mut random = Random::new(5);
        for packed in [build_seekable_zstd(&raw, false), build_bgzip(&raw), build_dictzip(&raw)] {
            assert_eq!(
                open(memory_disk(packed[..packed.len() - 600].to_vec()), &[]).unwrap().format,
                None
            );
            for round in 0..300 {
                let mut broken = packed.clone();
                // Headers are at the start, the table of zstd at the end.
                let within = if round % 3 == 0 { 200 } else { broken.len() as u64 };
                let at = random.next_below(within) as usize;
                let at = if round % 2 == 0 { at } else { broken.len() - 1 - at };
                broken[at] = random.next_below(256) as u8;
                let opened = open(memory_disk(broken), &[]).unwrap();
                if opened.format.is_some() {
                    let _ = read_all(&*opened.disk);
                }
            }
        }
        let mut large = build_seekable_zstd(&raw, false);
        let entry = large.len() - 9 - 8 + 4;
        large[entry..entry + 4].copy_from_slice(&(1u32 << 30).to_le_bytes());
        assert_eq!(open(memory_disk(large), &[]).unwrap().format, None, "a frame of 1 GiB");
    }
}
