//! Compressed files, detected by their first bytes and decompressed as a stream.
//!
//! Law 1: decompression uses bounded memory, whatever the file claims to need.
//! Law 2: checksums are verified; a truncated file is an error.
//! Law 3: data after the end is handled as by each format's own program.

use std::io::{BufRead, Error, ErrorKind, Read, Result};

use flate2::bufread::GzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// Number of bytes that identify a format.
pub const MAGIC_BYTES: usize = 6;

/// Maximum window of a zstd or xz file: the default of `zstd --long` and `xz -9`, and within the
/// memory of the smallest machine.
const MAX_WINDOW_BYTES: u64 = 128 << 20;

/// Header of a zstd frame with the smallest window.
const SMALLEST_WINDOW_HEADER: [u8; 6] = [0x28, 0xB5, 0x2F, 0xFD, 0, 0];

/// A compression format.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Compression {
    /// gzip, in any number of members.
    Gzip,
    /// Zstandard, in any number of frames.
    Zstd,
    /// xz, in any number of streams.
    Xz,
    /// bzip2, which is detected but not decompressed.
    Bzip2,
}

impl Compression {
    /// Detects the format from the first [`MAGIC_BYTES`] of a file; `None` if it is not compressed.
    pub fn detect(head: &[u8]) -> Option<Self> {
        Some(match head {
            [0x1F, 0x8B, 8, ..] => Self::Gzip,
            [0x28, 0xB5, 0x2F, 0xFD, ..] => Self::Zstd,
            // A skippable frame, which may come first.
            [0x50..=0x5F, 0x2A, 0x4D, 0x18, ..] => Self::Zstd,
            [0xFD, b'7', b'z', b'X', b'Z', 0, ..] => Self::Xz,
            [b'B', b'Z', b'h', b'1'..=b'9', ..] => Self::Bzip2,
            _ => return None,
        })
    }

    /// Returns the command that decompresses it.
    pub const fn decompressor_name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
            Self::Xz => "xz",
            Self::Bzip2 => "bzip2",
        }
    }

    /// Decompresses `packed` from its start.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for bzip2.
    pub fn decompress<'a>(
        self,
        packed: impl BufRead + Send + 'a,
    ) -> Result<Box<dyn Read + Send + 'a>> {
        Ok(match self {
            Self::Gzip => Box::new(CountingReader(Gzip::new(packed))),
            Self::Xz => {
                let most_kib = (MAX_WINDOW_BYTES >> 10) as u32;
                Box::new(CountingReader(lzma_rust2::XzReader::new_mem_limit(
                    packed, true, most_kib,
                )))
            }
            Self::Zstd => Box::new(CountingReader(Zstd::new(packed))),
            Self::Bzip2 => {
                let what = "compressed with bzip2, which is not read here: bzip2 -dc unpacks it";
                return Err(Error::new(ErrorKind::Unsupported, what));
            }
        })
    }
}

/// A decompressor with descriptive errors; errors of the underlying file are unchanged.
struct CountingReader<R>(R);

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        self.0.read(into).map_err(|error| {
            if error.raw_os_error().is_some() || error.kind() == ErrorKind::Interrupted {
                return error;
            }
            let ends = |error: &(dyn std::error::Error + 'static)| {
                let error = error.downcast_ref::<Error>();
                error.is_some_and(|error| error.kind() == ErrorKind::UnexpectedEof)
            };
            let mut causes = std::iter::successors(
                Some(&error as &(dyn std::error::Error + 'static)),
                |error| error.source(),
            );
            if causes.any(ends) {
                return Error::new(ErrorKind::UnexpectedEof, "cut off: its end is missing");
            }
            Error::new(ErrorKind::InvalidData, format!("damaged: {error}"))
        })
    }
}

/// Magic number of a gzip member.
const GZIP_MAGIC: [u8; 2] = [0x1F, 0x8B];

/// The members of a gzip file, one after the other. As gzip does, it skips zeros after them, and
/// ignores other trailing data with a warning.
struct Gzip<R> {
    /// `None` once all is read.
    member: Option<GzDecoder<PrefixedReader<R>>>,
}

impl<R: BufRead> Gzip<R> {
    fn new(packed: R) -> Self {
        Self { member: Some(GzDecoder::new(PrefixedReader { magic: &[], packed })) }
    }
}

/// Starts the next member in `packed`.
fn start_next_member<R: BufRead>(mut packed: R) -> Result<Option<GzDecoder<PrefixedReader<R>>>> {
    let is_member = consume_expected_byte(&mut packed, GZIP_MAGIC[0])?;
    if is_member && consume_expected_byte(&mut packed, GZIP_MAGIC[1])? {
        return Ok(Some(GzDecoder::new(PrefixedReader { magic: &GZIP_MAGIC, packed })));
    }
    if !is_member {
        let has_zeros = packed.fill_buf()?.first() == Some(&0);
        while consume_expected_byte(&mut packed, 0)? {}
        if packed.fill_buf()?.is_empty() {
            return Ok(None);
        }
        packed.consume((!has_zeros).into());
    }
    // gzip treats one byte as the start of a truncated member.
    if packed.fill_buf()?.is_empty() {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    log::warn!("what follows the end of the gzip stream is ignored, as gzip ignores it");
    Ok(None)
}

/// Consumes the next byte if it is `wanted`.
fn consume_expected_byte(from: &mut impl BufRead, wanted: u8) -> Result<bool> {
    let is_it = from.fill_buf()?.first() == Some(&wanted);
    from.consume(is_it.into());
    Ok(is_it)
}

impl<R: BufRead> Read for Gzip<R> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        while let Some(member) = self.member.as_mut().filter(|_| !into.is_empty()) {
            let got = member.read(into)?;
            if got > 0 {
                return Ok(got);
            }
            let Some(member) = self.member.take() else { break };
            self.member = start_next_member(member.into_inner().packed)?;
        }
        Ok(0)
    }
}

/// A stream, preceded by bytes that were already taken from it.
struct PrefixedReader<R> {
    magic: &'static [u8],
    packed: R,
}

impl<R: BufRead> Read for PrefixedReader<R> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        let got = self.fill_buf()?.read(into)?;
        self.consume(got);
        Ok(got)
    }
}

impl<R: BufRead> BufRead for PrefixedReader<R> {
    fn fill_buf(&mut self) -> Result<&[u8]> {
        match self.magic {
            [] => self.packed.fill_buf(),
            magic => Ok(magic),
        }
    }

    fn consume(&mut self, len: usize) {
        match self.magic.get(len..) {
            Some(rest) if !self.magic.is_empty() => self.magic = rest,
            _ => self.packed.consume(len),
        }
    }
}

/// The frames of a zstd file, one after the other.
struct Zstd<R> {
    packed: R,
    decoder: FrameDecoder,
    inside: bool,
}

impl<R: BufRead> Zstd<R> {
    fn new(packed: R) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(MAX_WINDOW_BYTES);
        // For its first frame a decoder grows its window by doubling, with old and new in memory
        // together; for later frames it allocates at once.
        let _ = decoder.reset(&SMALLEST_WINDOW_HEADER[..]);
        Self { packed, decoder, inside: false }
    }

    /// Starts the next frame; returns `false` at the end.
    fn start_next_frame(&mut self) -> Result<bool> {
        while !self.packed.fill_buf()?.is_empty() {
            match self.decoder.reset(&mut self.packed) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let skipped = (&mut self.packed).take(length.into());
                    let skipped = std::io::copy(&mut { skipped }, &mut std::io::sink())?;
                    if skipped < u64::from(length) {
                        return Err(ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(Error::new(ErrorKind::InvalidData, error)),
            }
        }
        Ok(false)
    }

    fn end_frame(&mut self) -> Result<()> {
        let said = self.decoder.get_checksum_from_data();
        if said.is_some() && said != self.decoder.get_calculated_checksum() {
            return Err(Error::new(ErrorKind::InvalidData, "a zstd frame has a wrong checksum"));
        }
        Ok(())
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.inside {
                self.inside = self.start_next_frame()?;
                if !self.inside {
                    return Ok(0);
                }
            }
            if self.decoder.can_collect() > 0 {
                let got = self.decoder.read(into)?;
                if got > 0 {
                    return Ok(got);
                }
            }
            if self.decoder.is_finished() {
                self.end_frame()?;
                self.inside = false;
                continue;
            }
            let one = BlockDecodingStrategy::UptoBlocks(1);
            self.decoder
                .decode_blocks(&mut self.packed, one)
                .map_err(|error| Error::new(ErrorKind::InvalidData, error))?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decompress_all(packed: &[u8]) -> Result<Vec<u8>> {
        let packing = Compression::detect(packed).expect("it is packed");
        let mut all = vec![];
        packing.decompress(packed)?.read_to_end(&mut all)?;
        Ok(all)
    }

    fn sample_text() -> Vec<u8> {
        (0..200_000u32).flat_map(|n| (n / 7).to_le_bytes()).collect()
    }

    fn gzip_compress(bytes: &[u8]) -> Vec<u8> {
        let mut packed = vec![];
        let mut encoder = flate2::bufread::GzEncoder::new(bytes, flate2::Compression::fast());
        encoder.read_to_end(&mut packed).unwrap();
        packed
    }

    fn zstd_compress(bytes: &[u8]) -> Vec<u8> {
        ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
    }

    #[test]
    fn concatenated_members_and_frames_are_read() {
        let twice = [sample_text(), sample_text()].concat();
        assert_eq!(
            decompress_all(
                &[gzip_compress(&sample_text()), gzip_compress(&sample_text())].concat()
            )
            .unwrap(),
            twice
        );
        let skipped =
            [&[0x5A, 0x2A, 0x4D, 0x18, 3, 0, 0, 0, 9, 9, 9][..], &zstd_compress(&sample_text())]
                .concat();
        assert_eq!(decompress_all(&[&skipped[..], &skipped].concat()).unwrap(), twice);
        assert_eq!(decompress_all(&skipped[..11]).unwrap(), b"");
    }

    #[test]
    fn truncated_or_corrupt_stream_is_error() {
        for packed in [gzip_compress(&sample_text()), zstd_compress(&sample_text())] {
            for len in [11, packed.len() / 2, packed.len() - 1] {
                assert!(decompress_all(&packed[..len]).is_err(), "{len} of {}", packed.len());
            }
            let mut changed = packed.clone();
            let last = changed.len() - 1;
            changed[last] ^= 1;
            assert!(decompress_all(&changed).is_err());
        }
        assert!(decompress_all(&[0x5A, 0x2A, 0x4D, 0x18, 30, 0, 0, 0, 9]).is_err());
        assert_eq!(decompress_all(b"BZh91AY").unwrap_err().kind(), ErrorKind::Unsupported);
    }

    /// Data after the end is accepted or rejected as by each format's own program.
    #[test]
    #[ignore = "tools: zstd, xz, gzip"]
    fn trailing_bytes_are_treated_like_gzip_and_zstd() {
        let dir = tempfile::tempdir().unwrap();
        let (plain, file) = (dir.path().join("plain"), dir.path().join("packed"));
        std::fs::write(&plain, sample_text()).unwrap();
        for program in ["gzip", "xz", "zstd"] {
            let run = |option: &str, path: &std::path::Path| {
                std::process::Command::new(program).arg(option).arg(path).output()
            };
            let Ok(packed) = run("-c", &plain) else {
                draconis_testkit::report_skipped(
                    "padding behind compressed files needs gzip, xz and zstd",
                );
                continue;
            };
            let (packed, second) = (packed.stdout, run("-c", &plain).unwrap().stdout);
            let mut tails: Vec<Vec<u8>> = [1, 3, 4, 6, 512, 70_000].map(|len| vec![0; len]).into();
            tails.extend([
                b"garbage".to_vec(),
                vec![0x1F],
                vec![0x1F, 0x8B],
                vec![0x1F, 0],
                vec![],
            ]);
            tails.extend([vec![0x1F, 0x8B, 9, 9], b"\0\0\0\0x".to_vec(), second.clone()]);
            tails.push([&[0; 4], &second[..]].concat());
            tails.push([&second[..], &[0; 4]].concat());
            tails.push([&second[..], b"x"].concat());
            for tail in tails {
                let bytes = [&packed[..], &tail].concat();
                std::fs::write(&file, &bytes).unwrap();
                let theirs = run("-dc", &file).unwrap();
                // gzip exits with 2 for a warning.
                let is_taken = matches!(theirs.status.code(), Some(0 | 2));
                let shown = format!("{program}: {:?}", &tail[..tail.len().min(8)]);
                match decompress_all(&bytes) {
                    Ok(ours) => assert!(is_taken && ours == theirs.stdout, "{shown}"),
                    Err(error) => assert!(!is_taken, "{shown}: {error}"),
                }
            }
        }
    }

    #[test]
    fn oversized_zstd_window_is_refused() {
        // A frame header with a window of 1 TiB, and one block.
        let huge = [0x28, 0xB5, 0x2F, 0xFD, 0, 0xF0, 1, 0, 0];
        assert!(decompress_all(&huge).is_err());
        // xz: a block header that requests a dictionary of 4 GiB - 1.
        let mut xz = vec![0xFD, b'7', b'z', b'X', b'Z', 0, 0, 1, 0x69, 0x22, 0xDE, 0x36];
        xz.extend([2, 0, 0x21, 1, 40, 0, 0, 0]);
        assert!(decompress_all(&xz).is_err());
    }
}
