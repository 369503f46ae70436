//! `draconis cat`

use std::io::Write;
use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use draconis_exchange::contract::Kind;
use draconis_ext::{Follow, Volume};

use crate::change::{one_image, tell};
use crate::image::{self, Place, find};
use crate::say;
use crate::target::Target;

/// Print files of a volume.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: Place,
    /// Files.
    #[arg(value_name = "IMAGE:/path", required = true)]
    targets: Vec<Target>,
}

/// Asked of the library at once, in bytes.
const PIECE_BYTES: usize = 1 << 20;

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    // One image, since the process gives up opening files with the first.
    let tree = image::open(one_image(&arguments.targets)?, &arguments.place, None)?;
    let mut code = ExitCode::SUCCESS;
    for target in &arguments.targets {
        if let Err(error) = write_file(tree.volume(), target) {
            if error.downcast_ref::<std::io::Error>().is_some() {
                return Err(error);
            }
            say::complain(&error);
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

/// Writes a file to standard output.
pub fn write_file(volume: &Volume, target: &Target) -> anyhow::Result<()> {
    let found = find(volume, target, Follow::Yes)?;
    let inode = volume.inode(found).map_err(|error| tell(target, error))?;
    match inode.kind {
        Kind::File => {}
        Kind::Directory => {
            bail!("{target}: is a directory; draconis ls lists it, draconis tar archives it")
        }
        _ => bail!("{target}: has no contents to write"),
    }
    let mut out = std::io::stdout().lock();
    let mut offset = 0;
    loop {
        let data = volume.read_of(&inode, offset, PIECE_BYTES);
        let data = data.map_err(|error| tell(target, error))?;
        if data.is_empty() {
            return Ok(());
        }
        out.write_all(&data)?;
        offset += data.len() as u64;
    }
}
