//! Bytes that come in pieces: objects and files may be longer than memory.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, ensure};
use draconis_objects::{Group, ObjectId};

use crate::progress::Progress;

/// What is read and written at once, in bytes.
pub const PIECE_BYTES: usize = 1 << 20;

/// An object up to this length is put with one group, in bytes.
pub const GROUP_BYTES: usize = 64 << 20;

/// What one group of a longer one has, in bytes.
pub const LOT_BYTES: usize = 8 << 20;

/// Where bytes come from, and how many there are if that is known.
pub fn source(file: Option<&Path>) -> anyhow::Result<(Box<dyn Read>, u64)> {
    match file {
        None => Ok((Box::new(std::io::stdin().lock()), 0)),
        Some(dash) if dash == Path::new("-") => Ok((Box::new(std::io::stdin().lock()), 0)),
        Some(path) => {
            let file = File::open(path).with_context(|| path.display().to_string())?;
            ensure!(!file.metadata()?.is_dir(), "{}: is a directory", path.display());
            let len = file.metadata()?.len();
            Ok((Box::new(file), len))
        }
    }
}

/// Bytes that are left out of a group where they are zeros.
const HOLE_BYTES: usize = 4 << 10;

/// Writes `bytes` to an object that has nothing there yet; it ends behind them.
pub fn write(group: &mut Group, id: ObjectId, at: u64, bytes: &[u8]) {
    let mut from = 0;
    for (nth, part) in bytes.chunks(HOLE_BYTES).enumerate() {
        if part.iter().all(|byte| *byte == 0) {
            let end = nth * HOLE_BYTES;
            put(group, id, at, bytes, from..end);
            from = end + part.len();
        }
    }
    put(group, id, at, bytes, from..bytes.len());
    group.truncate(id, at + bytes.len() as u64);
}

fn put(group: &mut Group, id: ObjectId, at: u64, bytes: &[u8], part: Range<usize>) {
    if !part.is_empty() {
        group.write(id, at + part.start as u64, &bytes[part]);
    }
}

/// Reads up to `most` bytes; fewer only at the end.
pub fn take(from: &mut dyn Read, most: usize, progress: &mut Progress) -> anyhow::Result<Vec<u8>> {
    let mut bytes = vec![];
    while bytes.len() < most {
        let piece = PIECE_BYTES.min(most - bytes.len()) as u64;
        let got = from.take(piece).read_to_end(&mut bytes)?;
        progress.add(got as u64);
        if got == 0 {
            break;
        }
    }
    Ok(bytes)
}
