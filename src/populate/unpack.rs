//! Archives that cannot be read twice: compressed ones, and pipes.

use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::Context;
use rustix::fs::{Mode, OFlags};

/// Bytes that tell how an archive is compressed.
const HEAD: usize = 6;

/// How an archive is compressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Packing {
    Plain,
    Gzip,
    Zstd,
    Xz,
}

impl Packing {
    fn of(head: &[u8]) -> anyhow::Result<Self> {
        Ok(match head {
            [0x1F, 0x8B, ..] => Self::Gzip,
            [0x28, 0xB5, 0x2F, 0xFD, ..] => Self::Zstd,
            [0xFD, b'7', b'z', b'X', b'Z', 0] => Self::Xz,
            [b'B', b'Z', b'h', ..] => {
                anyhow::bail!(
                    "compressed with bzip2, which is not read here: bzip2 -dc FILE | draconis format --from -"
                )
            }
            _ => Self::Plain,
        })
    }
}

/// Whether an archive can be read where it is.
pub fn is_plain(file: &File) -> anyhow::Result<bool> {
    let mut head = [0; HEAD];
    if !file.metadata()?.is_file() {
        return Ok(false);
    }
    let len = file.read_at(&mut head, 0)?;
    Ok(Packing::of(head.get(..len).unwrap_or_default())? == Packing::Plain)
}

/// Unpacks an archive into a file without a name, in the directory of `beside`.
pub fn plain(mut archive: Box<dyn Read + '_>, beside: &Path) -> anyhow::Result<File> {
    let mut head = Vec::with_capacity(HEAD);
    archive.by_ref().take(HEAD as u64).read_to_end(&mut head)?;
    let packing = Packing::of(&head)?;
    let whole = BufReader::with_capacity(1 << 18, std::io::Cursor::new(head).chain(archive));
    let mut file = nameless(beside)?;
    let copied = match packing {
        Packing::Plain => copy(whole, &mut file),
        Packing::Gzip => copy(flate2::bufread::MultiGzDecoder::new(whole), &mut file),
        Packing::Xz => copy(lzma_rust2::XzReader::new(whole, true), &mut file),
        Packing::Zstd => unzstd(whole, &mut file),
    };
    copied.context("unpacking it beside the image")?;
    Ok(file)
}

/// One frame after the other: `zstd` may be called several times for one file.
fn unzstd(mut packed: impl std::io::BufRead, file: &mut File) -> std::io::Result<()> {
    while !packed.fill_buf()?.is_empty() {
        let decoder = ruzstd::decoding::StreamingDecoder::new(&mut packed);
        copy(decoder.map_err(std::io::Error::other)?, file)?;
    }
    Ok(())
}

fn copy(mut from: impl Read, to: &mut File) -> std::io::Result<()> {
    let mut buffer = vec![0; 1 << 18];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(()),
            len => to.write_all(buffer.get(..len).unwrap_or_default())?,
        }
    }
}

/// A file without a name, which goes when it is closed.
fn nameless(beside: &Path) -> anyhow::Result<File> {
    let dir = match beside.parent() {
        Some(dir) if !dir.as_os_str().is_empty() && !dir.starts_with("/dev") => dir.to_path_buf(),
        Some(dir) if dir.starts_with("/dev") => std::env::temp_dir(),
        _ => ".".into(),
    };
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let private = Mode::from_raw_mode(0o600);
    let made = rustix::fs::open(&dir, flags, private)
        .or_else(|_| rustix::fs::open(std::env::temp_dir(), flags, private));
    Ok(made.with_context(|| format!("{}: no room to unpack it", dir.display()))?.into())
}
