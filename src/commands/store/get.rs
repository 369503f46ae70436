//! `draconis store get`

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use draconis_access::destination::ReadSources;
use draconis_types::path_bytes::ShowPath;

use super::ObjectArg;
use super::copy::READ_CHUNK_BYTES;
use super::open::{open_readable, with_context};
use crate::bucket;
use crate::new_file::OutputFile;
use crate::progress::{ByteProgress, ProgressMode};

/// Write an object to a file or standard output.
///
/// A disk is written as a raw image. Zeros become holes in a file.
#[derive(Debug, Args)]
pub struct Arguments {
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    device: PathBuf,
    /// Object number or disk name.
    object: ObjectArg,
    /// Output file (default: standard output).
    file: Option<PathBuf>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let device = &arguments.device;
    let store = open_readable(device)?;
    let id = arguments.object.find_object(&store, device)?;
    let len = store.len(id).map_err(|error| with_context(device, error))?;
    let mut new = None;
    let (mut out, name) = match arguments.file.as_deref() {
        Some(path) if path != Path::new("-") => {
            let mut sources = ReadSources::of_image(device, &[]);
            bucket::cli_journal_file().iter().for_each(|file| sources.add(file));
            let (file, output) = OutputFile::begin(&sources, path)?;
            new = Some(output);
            let out = match file.metadata()?.is_file() {
                true => ObjectOutput::Sparse(file),
                false => ObjectOutput::Dense(Box::new(file)),
            };
            (out, path.shown().to_string())
        }
        _ => {
            (ObjectOutput::Dense(Box::new(std::io::stdout().lock())), "standard output".to_owned())
        }
    };
    let mut progress = ByteProgress::new(arguments.progress, len);
    let mut piece = vec![0; READ_CHUNK_BYTES];
    let mut at = 0;
    while at < len {
        let got = store.read(id, at, &mut piece).map_err(|error| with_context(device, error))?;
        out.write_sparse(&piece[..got]).with_context(|| name.clone())?;
        at += got as u64;
        progress.add(got as u64);
    }
    out.finish(len).with_context(|| name.clone())?;
    new.map_or(Ok(()), OutputFile::publish).context(name)
}

/// Sequential output.
enum ObjectOutput {
    /// An empty file, in which skipped bytes are holes.
    Sparse(File),
    /// Output without holes.
    Dense(Box<dyn Write>),
}

/// Size and alignment of zeros that are skipped.
const MIN_HOLE_BYTES: usize = 64 << 10;

impl ObjectOutput {
    fn write_sparse(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Dense(out) => out.write_all(bytes),
            Self::Sparse(file) => {
                for part in bytes.chunks(MIN_HOLE_BYTES) {
                    match part.iter().all(|byte| *byte == 0) {
                        true => drop(file.seek(SeekFrom::Current(part.len() as i64))?),
                        false => file.write_all(part)?,
                    }
                }
                Ok(())
            }
        }
    }

    fn finish(self, len_bytes: u64) -> std::io::Result<()> {
        match self {
            Self::Dense(mut out) => out.flush(),
            Self::Sparse(file) => file.set_len(len_bytes),
        }
    }
}
