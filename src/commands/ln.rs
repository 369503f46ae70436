//! `draconis ln`

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use anyhow::ensure;
use clap::Args;
use draconis_exchange::contract::Kind;
use draconis_ext::{Follow, InodeNumber, NewNode, Volume};

use crate::change::{self, Entry, Maker, Owner};
use crate::image::{Place, find};
use crate::target::Target;

/// Create hard or symbolic links in a volume.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: Place,
    /// Create a symbolic link to TARGET, stored unchanged.
    #[arg(short, long)]
    symbolic: bool,
    /// Replace an existing file.
    #[arg(short, long)]
    force: bool,
    /// Treat LINK as a file, not as a directory.
    #[arg(short = 'T', long)]
    no_target_directory: bool,
    /// Owner of the symbolic link (default: current user).
    #[arg(long, value_name = "UID:GID")]
    owner: Option<Owner>,
    /// Existing file, as IMAGE:/path; with -s any path.
    target: OsString,
    /// Name of the new link.
    #[arg(value_name = "IMAGE:/path")]
    link: Target,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Arguments { target, link, symbolic, force, .. } = arguments;
    let maker = Maker::new(arguments.owner);
    // Only a hard link is a name for something in the image.
    let existing = Target::from(target.clone());
    ensure!(
        *symbolic || existing.image == link.image,
        "{}: a hard link stays in its image; ln -s makes a symbolic one",
        target.display()
    );
    let own = match symbolic {
        true => target.as_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default(),
        false => existing.file_name(),
    };
    change::change(&link.image, &arguments.place, |volume| {
        let entry = change::destination(volume, link, !arguments.no_target_directory, own)?;
        ensure!(!entry.name.is_empty(), "{link}: the link needs a name");
        let found = if *symbolic { None } else { Some(find(volume, &existing, Follow::No)?) };
        if *force {
            make_way(volume, &entry, link, found)?;
        }
        let done = match found {
            Some(found) if entry.lookup(volume)?.is_some_and(|it| it.number == found) && *force => {
                Ok(())
            }
            Some(found) => volume.link(found, entry.dir, &entry.name),
            None => {
                let new = NewNode { target: target.as_bytes(), ..maker.node(Kind::Symlink, 0o777) };
                volume.create(entry.dir, &entry.name, &new).map(drop)
            }
        };
        done.map_err(|error| change::tell(link, error))?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Removes what has the name, unless it is what the link is to name.
fn make_way(
    volume: &Volume,
    entry: &Entry,
    link: &Target,
    found: Option<InodeNumber>,
) -> anyhow::Result<()> {
    match entry.lookup(volume)? {
        Some(there) if found == Some(there.number) => Ok(()),
        Some(there) => {
            ensure!(there.kind != Kind::Directory, "{link}: is a directory");
            volume.unlink(entry.dir, &entry.name).map_err(|error| change::tell(link, error))
        }
        None => Ok(()),
    }
}
