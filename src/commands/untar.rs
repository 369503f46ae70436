//! `draconis untar`: an archive into a volume.

use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use draconis_access::populate::{self, Found, Origin, Patterns, Wanted};
use draconis_exchange::contract::Kind;
use draconis_ext::mkfs::{Node, What};
use draconis_ext::{Error, Follow};

use crate::change::{self, Owner};
use crate::graft::{How, graft, stamp};
use crate::image::{self, Behind, Place};
use crate::progress::When;
use crate::reading::Reading;
use crate::target::Target;

/// Extract tar archives or a container image into a volume.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: Place,
    /// Tar archive (plain, gzip, zstd or xz) or container image, as for format --from (default:
    /// standard input). Repeatable: later archives and images override earlier ones.
    #[arg(short, long, value_name = "TAR|IMAGE")]
    file: Vec<Origin>,
    /// How archives and images are read.
    #[command(flatten)]
    reading: Reading,
    /// Set the owner of all files.
    #[arg(long, value_name = "UID:GID")]
    owner: Option<Owner>,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    progress: When,
    /// Destination directory (default: the root directory).
    #[arg(value_name = "IMAGE[:/path]")]
    target: Target,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let target = &arguments.target;
    let input = [Origin::Input];
    let from = if arguments.file.is_empty() { &input[..] } else { &arguments.file };
    if let Some(dir) = from.iter().find(|from| from.is_directory()) {
        bail!("{dir}: is a directory; draconis put -r takes one");
    }
    let stamp = stamp()?;
    let opened =
        (image::writable(&target.image)?, Behind::open(&target.image, &arguments.place.backing)?);
    let root = Node::new(What::Directory, 0o755).at(stamp.now);
    let exclude = Patterns::new(arguments.reading.exclude());
    let choice = arguments.reading.choice(&target.image);
    let keep_owners = arguments.owner.is_none();
    let wanted = Wanted { from, list: None, exclude: &exclude, choice, keep_owners, root, stamp };
    let Found { source, config } = populate::scan(wanted)?;
    let mut sources = populate::sources(from);
    sources.add(&target.image);
    arguments.reading.write_config(config.as_deref(), &sources)?;
    // The archive is open, or unpacked: nothing else is needed of this machine.
    image::confine()?;
    change::change_opened(opened, &target.image, &arguments.place, |volume| {
        let into = match volume.resolve(volume.root(), &target.path, Follow::Yes) {
            Err(Error::NotFound) => {
                bail!("{target}: no such directory; draconis mkdir -p makes it")
            }
            found => found.map_err(|error| change::tell(target, error))?,
        };
        if volume.inode(into)?.kind != Kind::Directory {
            bail!("{target}: not a directory");
        }
        let Arguments { owner, progress, .. } = *arguments;
        let how = How { owner, replace_kinds: true, progress };
        graft(volume, &source, into, target.to_string(), how)
    })
}
