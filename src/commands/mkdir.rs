//! `draconis mkdir`

use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use draconis_ext::{Error, Follow, InodeNumber, Volume};
use draconis_types::FileType;

use crate::edit::{self, NewFileOwner, OwnerArg, TargetName};
use crate::image::WriteArgs;
use crate::modes::ModeChange;
use crate::target::ImagePath;

/// Create directories in a volume.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: WriteArgs,
    /// Create parent directories as needed; ignore existing directories.
    #[arg(short, long)]
    parents: bool,
    /// Mode of the new directories, as for chmod.
    #[arg(short, long)]
    mode: Option<ModeChange>,
    /// Owner of the new directories (default: current user).
    #[arg(long, value_name = "UID:GID")]
    owner: Option<OwnerArg>,
    /// Directories to create.
    #[arg(value_name = "IMAGE:/path", required = true)]
    targets: Vec<ImagePath>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let maker = NewFileOwner::new(arguments.owner);
    edit::for_each_target(&arguments.place, &arguments.targets, |volume, target| {
        if arguments.parents {
            return make_parents(volume, target, maker, arguments.mode.as_ref());
        }
        let entry = TargetName::from_image_path(volume, target)?;
        let made = make_directory(volume, entry.dir, &entry.name, maker, arguments.mode.as_ref());
        made.map(drop).map_err(|error| edit::with_context(target, error))
    })
}

fn make_directory(
    volume: &Volume,
    dir: InodeNumber,
    name: &[u8],
    maker: NewFileOwner,
    mode: Option<&ModeChange>,
) -> draconis_ext::Result<InodeNumber> {
    let usual = 0o777 & !maker.umask;
    // As with `mkdir -m`, symbolic modes apply to 0777.
    let mode = mode.map_or(usual, |mode| mode.apply(0o777, true, maker.umask));
    volume.create(dir, name, &maker.new_node(FileType::Directory, mode))
}

/// Creates missing parent directories; the mode applies to the last directory.
fn make_parents(
    volume: &Volume,
    target: &ImagePath,
    maker: NewFileOwner,
    mode: Option<&ModeChange>,
) -> anyhow::Result<()> {
    let tell = |error| edit::with_context(target, error);
    let mut at = volume.root();
    let mut names =
        target.path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()).peekable();
    while let Some(name) = names.next() {
        let mode = if names.peek().is_none() { mode } else { None };
        at = match volume.resolve(at, name, Follow::Yes) {
            Ok(there) if volume.inode(there)?.kind == FileType::Directory => there,
            Ok(_) => bail!("{target}: a part of it is no directory"),
            Err(Error::NotFound) => make_directory(volume, at, name, maker, mode).map_err(tell)?,
            Err(error) => return Err(tell(error)),
        };
    }
    Ok(())
}
