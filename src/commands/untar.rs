//! `draconis untar`: an archive into a volume.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{bail, ensure};
use clap::Args;
use draconis_exchange::contract::Kind;
use draconis_ext::mkfs::{Node, What};
use draconis_ext::{Error, Follow};

use crate::change::{self, Owner};
use crate::graft::{graft, stamp};
use crate::image::{self, Place};
use crate::populate;
use crate::progress::When;
use crate::target::Target;

/// Unpack a tar archive into a directory of a volume, as it is.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: Place,
    /// The archive, plain or compressed with gzip, zstd or xz; standard input if left out.
    #[arg(short, long, value_name = "TAR")]
    file: Option<PathBuf>,
    /// The owner of everything that is unpacked, instead of each file's own.
    #[arg(long, value_name = "UID:GID")]
    owner: Option<Owner>,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    progress: When,
    /// The directory to unpack it in; the root directory if only IMAGE is given.
    #[arg(value_name = "IMAGE[:/path]")]
    target: Target,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let target = &arguments.target;
    let from = arguments.file.as_deref().unwrap_or(Path::new("-"));
    ensure!(!from.is_dir(), "{}: is a directory; draconis put -r takes one", from.display());
    let stamp = stamp()?;
    let opened = image::writable(&target.image)?;
    let root = Node::new(What::Directory, 0o755).at(stamp.now);
    let source = populate::scan(from, &target.image, root, stamp)?;
    // The archive is open, or unpacked: nothing else is needed of this machine.
    image::confine()?;
    change::change_opened(opened, &target.image, arguments.place, |volume| {
        let into = match volume.resolve(volume.root(), &target.path, Follow::Yes) {
            Err(Error::NotFound) => {
                bail!("{target}: no such directory; draconis mkdir -p makes it")
            }
            found => found.map_err(|error| change::tell(target, error))?,
        };
        if volume.inode(into)?.kind != Kind::Directory {
            bail!("{target}: not a directory");
        }
        graft(volume, &source, into, target.to_string(), arguments.owner, arguments.progress)
    })
}
