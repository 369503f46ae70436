//! Streaming of objects and files, which may be larger than memory.

use std::fs::{File, Metadata};
use std::io::{Read, StdinLock};
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use draconis_access::destination::ReadSources;
use draconis_access::populate::{changed_file_message, metadata_fingerprint};
use draconis_objects::{Group, ObjectId};
use draconis_types::path_bytes::ShowPath;

use crate::progress::ByteProgress;

/// Size of one read or write, in bytes.
pub const READ_CHUNK_BYTES: usize = 1 << 20;

/// Maximum length of an object that is stored in a single group, in bytes.
pub const GROUP_BYTES: usize = 64 << 20;

/// Data per group of a longer object, in bytes.
pub const BATCH_BYTES: usize = 8 << 20;

/// Input of an object.
pub enum ObjectInput {
    /// Standard input.
    Standard(StdinLock<'static>),
    /// A file, with its metadata when it was opened.
    File { file: File, path: PathBuf, before: Metadata },
}

impl ObjectInput {
    /// Opens standard input or a file, for copying into the store in `device`.
    pub fn open(file: Option<&Path>, device: &Path) -> anyhow::Result<Self> {
        let mut sources = ReadSources::new();
        let Some(path) = file.filter(|file| *file != Path::new("-")) else {
            sources.add_input();
            sources.refuse_source_as_destination(device)?;
            return Ok(Self::Standard(std::io::stdin().lock()));
        };
        let shown = path.shown();
        let file = File::open(path).with_context(|| shown.to_string())?;
        let before = file.metadata().with_context(|| shown.to_string())?;
        ensure!(!before.is_dir(), "{shown}: is a directory");
        sources.add(path);
        sources.refuse_source_as_destination(device)?;
        Ok(Self::File { file, path: path.to_owned(), before })
    }

    /// Returns the length if it is known.
    pub fn len_bytes(&self) -> u64 {
        match self {
            Self::Standard(_) => 0,
            Self::File { before, .. } => before.len(),
        }
    }

    /// Fails if the file changed while it was read.
    pub fn check_unchanged(&self) -> anyhow::Result<()> {
        let Self::File { file, path, before } = self else { return Ok(()) };
        let is_same = !before.is_file()
            || metadata_fingerprint(before) == metadata_fingerprint(&file.metadata()?);
        ensure!(is_same, "{}", changed_file_message(path));
        Ok(())
    }
}

impl Read for ObjectInput {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Self::Standard(input) => input.read(into),
            Self::File { file, .. } => file.read(into),
        }
    }
}

/// Unit of zeros that are left as holes, in bytes.
const MIN_HOLE_BYTES: usize = 4 << 10;

/// Appends `bytes` at `at`, where the object has no data yet; zeros become holes.
pub fn write(group: &mut Group, id: ObjectId, at: u64, bytes: &[u8]) {
    let mut from = 0;
    for (nth, part) in bytes.chunks(MIN_HOLE_BYTES).enumerate() {
        if part.iter().all(|byte| *byte == 0) {
            let end = nth * MIN_HOLE_BYTES;
            write_part(group, id, at, bytes, from..end);
            from = end + part.len();
        }
    }
    write_part(group, id, at, bytes, from..bytes.len());
    group.truncate(id, at + bytes.len() as u64);
}

fn write_part(group: &mut Group, id: ObjectId, at: u64, bytes: &[u8], part: Range<usize>) {
    if !part.is_empty() {
        group.write(id, at + part.start as u64, &bytes[part]);
    }
}

/// Reads up to `most` bytes; fewer only at the end.
pub fn read_up_to(
    from: &mut dyn Read,
    most: usize,
    progress: &mut ByteProgress,
) -> anyhow::Result<Vec<u8>> {
    let mut bytes = vec![];
    while bytes.len() < most {
        let piece = READ_CHUNK_BYTES.min(most - bytes.len()) as u64;
        let got = from.take(piece).read_to_end(&mut bytes)?;
        progress.add(got as u64);
        if got == 0 {
            break;
        }
    }
    Ok(bytes)
}
