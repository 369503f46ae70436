//! `draconis mv`

use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use clap::Args;
use draconis_ext::{Error, RenameMode};

use crate::edit::{self, TargetName};
use crate::image::WriteArgs;
use crate::target::ImagePath;

/// Move or rename files in a volume.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: WriteArgs,
    /// Do not overwrite existing files.
    #[arg(short, long)]
    no_clobber: bool,
    /// Exchange source and destination atomically.
    #[arg(long, conflicts_with = "no_clobber")]
    exchange: bool,
    /// Treat the destination as a file, not as a directory.
    #[arg(short = 'T', long)]
    no_target_directory: bool,
    /// Source files, then the destination file or directory.
    #[arg(value_name = "IMAGE:/path", num_args = 2.., required = true)]
    targets: Vec<ImagePath>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (dest, sources) = arguments.targets.split_last().context("nothing to move")?;
    if let Some(other) = sources.iter().find(|source| source.image != dest.image) {
        bail!("{other}: moving between images is copying, draconis cp -a, and then draconis rm -r");
    }
    let how = match (arguments.no_clobber, arguments.exchange) {
        (true, _) => RenameMode::NoReplace,
        (_, true) => RenameMode::Exchange,
        _ => RenameMode::Replace,
    };
    let into = !arguments.no_target_directory && how != RenameMode::Exchange;
    edit::for_each_target(&arguments.place, sources, |volume, source| {
        let from = TargetName::from_image_path(volume, source)?;
        let to = edit::resolve_destination(volume, dest, into, &from.name)?;
        let several = sources.len() > 1 && to.name != from.name;
        ensure!(!several, "{dest}: no such directory");
        match volume.rename(from.dir, &from.name, to.dir, &to.name, how) {
            // As with `mv -n`, an existing file stays, without an error.
            Err(Error::Exists) if arguments.no_clobber => Ok(()),
            Err(Error::Misuse(_)) => {
                bail!("{source}: a directory cannot be moved into itself")
            }
            done => done.map_err(|error| edit::with_context(source, error)),
        }
    })
}
