//! Input that is read several times: an archive, or a part of one.
//!
//! Law 1: compressed input is decompressed as a stream on each reading, and never kept.
//! Law 2: the decompressed size is limited.

use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, ensure};
use draconis_container::compression::{Compression, MAGIC_BYTES};

use super::lengths;
use super::temp_file::temporary_file;

/// Default limit for the decompressed size of an archive: this plus 100 times its length.
const MAX_UNPACKED_BYTES: u64 = 16 << 30;
const MAX_UNPACK_RATIO: u64 = 100;
/// Size of the read buffer, in bytes.
const READ_BUFFER_BYTES: usize = 256 << 10;

/// A byte range of an open file.
#[derive(Clone, Debug)]
pub struct Blob {
    file: Arc<File>,
    start: u64,
    len: u64,
}

impl Blob {
    /// Wraps a whole file. Input without a length, or that cannot be read twice (a pipe), is copied
    /// to an unnamed file in the directory of `beside`.
    pub fn new(mut file: File, beside: &Path) -> anyhow::Result<Self> {
        let found = file.metadata()?;
        let has_length = found.is_file() && lengths::has_exact_size(&file, &found)?;
        if !has_length {
            let mut kept = temporary_file(beside)?;
            std::io::copy(&mut file, &mut kept).context("keeping it beside the image")?;
            file = kept;
        }
        let len = file.metadata()?.len();
        Ok(Self { file: Arc::new(file), start: 0, len })
    }

    /// Returns a byte range, if it lies inside this one.
    pub fn sub_range(&self, at: u64, len: u64) -> Option<Self> {
        at.checked_add(len).filter(|end| *end <= self.len)?;
        Some(Self { file: self.file.clone(), start: self.start + at, len })
    }

    /// Returns the length in bytes, before decompression.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Fills `into` from byte `at` on, and returns the number of bytes read.
    pub fn read_at(&self, into: &mut [u8], at: u64) -> std::io::Result<usize> {
        let left = self.len.saturating_sub(at);
        let room = into.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        match into.get_mut(..room) {
            Some(room) if !room.is_empty() => self.file.read_at(room, self.start + at),
            _ => Ok(0),
        }
    }

    /// Fills all of `into` from byte `at` on.
    pub fn read_exact_at(&self, into: &mut [u8], at: u64) -> std::io::Result<()> {
        let mut filled = 0;
        while let Some(rest) = into.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.read_at(rest, at + filled as u64)? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                got => filled += got,
            }
        }
        Ok(())
    }

    /// Detects the compression.
    pub fn detect_compression(&self) -> std::io::Result<Option<Compression>> {
        let mut head = [0; MAGIC_BYTES];
        let len = self.read_at(&mut head, 0)?;
        Ok(Compression::detect(head.get(..len).unwrap_or_default()))
    }

    /// Returns a reader of the bytes, without decompression.
    pub fn raw_reader(&self) -> impl Read + Send + 'static {
        BlobStream { blob: self.clone(), at: 0 }
    }

    /// Returns a reader of the bytes, decompressed if necessary; fails beyond `limit` bytes.
    pub fn decompress(&self, limit: Option<u64>) -> anyhow::Result<Box<dyn Read + Send>> {
        let stream = BufReader::with_capacity(READ_BUFFER_BYTES, self.raw_reader());
        let most =
            limit.unwrap_or_else(|| MAX_UNPACKED_BYTES.saturating_add(self.len * MAX_UNPACK_RATIO));
        Ok(match self.detect_compression()? {
            None => Box::new(stream),
            Some(packing) => {
                Box::new(LimitedReader { from: packing.decompress(stream)?, left: most, most })
            }
        })
    }

    /// Decompresses to an unnamed file in the directory of `beside`; returns plain input as it is.
    pub fn decompress_to_file(&self, limit: Option<u64>, beside: &Path) -> anyhow::Result<Self> {
        if self.detect_compression()?.is_none() {
            return Ok(self.clone());
        }
        let mut kept = temporary_file(beside)?;
        std::io::copy(&mut self.decompress(limit)?, &mut kept)
            .context("unpacking it beside the image")?;
        Self::new(kept, beside)
    }

    /// Reads everything; fails if it is longer than `most`.
    pub fn read_all(&self, most: u64) -> anyhow::Result<Vec<u8>> {
        ensure!(self.len <= most, "{} bytes long: more than {most} are not read", self.len);
        let mut all = vec![0; self.len as usize];
        self.read_exact_at(&mut all, 0)?;
        Ok(all)
    }
}

struct BlobStream {
    blob: Blob,
    at: u64,
}

impl Read for BlobStream {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let got = self.blob.read_at(into, self.at)?;
        self.at += got as u64;
        Ok(got)
    }
}

/// A reader that fails beyond a limit.
struct LimitedReader<R> {
    from: R,
    left: u64,
    most: u64,
}

impl<R: Read> Read for LimitedReader<R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let got = self.from.read(into)?;
        match self.left.checked_sub(got as u64) {
            Some(left) => self.left = left,
            None => {
                return Err(std::io::Error::other(format!(
                    "it unpacks to more than {}; format and untar take --limit SIZE for what is larger",
                    crate::messages::format_bytes(self.most)
                )));
            }
        }
        Ok(got)
    }
}
