//! `draconis cat`

use std::io::Write;
use std::process::ExitCode;

use anyhow::bail;
use draconis_exchange::contract::Kind;
use draconis_ext::{Follow, Volume};

use crate::cli::Cat;
use crate::image::{self, find};
use crate::target::Target;

/// Asked of the library at once, in bytes.
const PIECE_BYTES: usize = 1 << 20;

pub fn run(arguments: &Cat) -> anyhow::Result<ExitCode> {
    // One image, since the process gives up opening files with the first.
    let first = &arguments.targets[0];
    if let Some(other) = arguments.targets.iter().find(|other| other.image != first.image) {
        bail!("{other}: only one image at a time");
    }
    let tree = image::open(&first.image, arguments.place, None)?;
    let mut code = ExitCode::SUCCESS;
    for target in &arguments.targets {
        if let Err(error) = write_file(tree.volume(), target) {
            if error.downcast_ref::<std::io::Error>().is_some() {
                return Err(error);
            }
            eprintln!("draconis: {error:#}");
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

/// Writes a file to standard output.
pub fn write_file(volume: &Volume, target: &Target) -> anyhow::Result<()> {
    let found = find(volume, target, Follow::Yes)?;
    let inode = volume.inode(found).map_err(|error| anyhow::anyhow!("{target}: {error}"))?;
    match inode.kind {
        Kind::File => {}
        Kind::Directory => bail!("{target}: is a directory"),
        _ => bail!("{target}: has no contents to write"),
    }
    let mut out = std::io::stdout().lock();
    let mut offset = 0;
    loop {
        let data = volume
            .read_of(&inode, offset, PIECE_BYTES)
            .map_err(|error| anyhow::anyhow!("{target}: {error}"))?;
        if data.is_empty() {
            return Ok(());
        }
        out.write_all(&data)?;
        offset += data.len() as u64;
    }
}
