//! `draconis store get`

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use draconis_objects::ObjectId;

use super::number;
use super::opened::{readable, tell};
use super::stream::PIECE_BYTES;
use crate::progress::{Progress, When};

/// Write an object to a file or to standard output.
#[derive(Debug, Args)]
pub struct Arguments {
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    progress: When,
    /// The file or block device.
    device: PathBuf,
    /// The number of the object.
    #[arg(value_parser = number)]
    object: u64,
    /// Where to; standard output if left out or -.
    file: Option<PathBuf>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let device = &arguments.device;
    let store = readable(device)?;
    let id = ObjectId(arguments.object);
    let len = store.len(id).map_err(|error| tell(device, error))?;
    let (mut out, name): (Box<dyn Write>, _) = match arguments.file.as_deref() {
        Some(path) if path != Path::new("-") => {
            let file = File::create(path).with_context(|| path.display().to_string())?;
            (Box::new(file), path.display().to_string())
        }
        _ => (Box::new(std::io::stdout().lock()), "standard output".to_owned()),
    };
    let mut progress = Progress::new(arguments.progress, len);
    let mut piece = vec![0; PIECE_BYTES];
    let mut at = 0;
    while at < len {
        let got = store.read(id, at, &mut piece).map_err(|error| tell(device, error))?;
        out.write_all(&piece[..got]).with_context(|| name.clone())?;
        at += got as u64;
        progress.add(got as u64);
    }
    out.flush().with_context(|| name)
}
