//! `draconis cat`

use std::io::Write;
use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use draconis_ext::{Follow, Volume};
use draconis_types::FileType;

use crate::edit::{single_image, with_context};
use crate::image::{self, ReadArgs, resolve_target};
use crate::report;
use crate::target::ImagePath;

/// Print files of a volume.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: ReadArgs,
    /// Files.
    #[arg(value_name = "IMAGE:/path", required = true)]
    targets: Vec<ImagePath>,
}

/// Size of one read, in bytes.
const READ_CHUNK_BYTES: usize = 1 << 20;

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    // A single image: once confined, the process can open no other.
    let tree = image::open(single_image(&arguments.targets)?, &arguments.place, None)?;
    let mut code = ExitCode::SUCCESS;
    for target in &arguments.targets {
        if let Err(error) = write_file(tree.volume(), target) {
            if error.downcast_ref::<std::io::Error>().is_some() {
                return Err(error);
            }
            report::print_error(&error);
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

/// Writes a file to standard output.
pub fn write_file(volume: &Volume, target: &ImagePath) -> anyhow::Result<()> {
    let found = resolve_target(volume, target, Follow::Yes)?;
    let inode = volume.inode(found).map_err(|error| with_context(target, error))?;
    match inode.kind {
        FileType::File => {}
        FileType::Directory => {
            bail!("{target}: is a directory; draconis ls lists it, draconis tar archives it")
        }
        _ => bail!("{target}: has no contents to write"),
    }
    let mut out = std::io::stdout().lock();
    let mut offset = 0;
    loop {
        let data = volume.read_from_inode(&inode, offset, READ_CHUNK_BYTES);
        let data = data.map_err(|error| with_context(target, error))?;
        if data.is_empty() {
            return Ok(());
        }
        out.write_all(&data)?;
        offset += data.len() as u64;
    }
}
