//! `draconis ln`

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use anyhow::ensure;
use clap::Args;
use draconis_ext::{Follow, InodeNumber, NewNode, Volume};
use draconis_types::FileType;
use draconis_types::path_bytes::ShowPath;

use crate::edit::{self, NewFileOwner, OwnerArg, TargetName};
use crate::image::{Force, VolumeArgs, WriteArgs, parse_force, resolve_target};
use crate::target::ImagePath;

/// Create hard or symbolic links in a volume.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: VolumeArgs,
    /// Create a symbolic link to TARGET, stored unchanged.
    #[arg(short, long)]
    symbolic: bool,
    /// Replace an existing file. With raid-member, write also to a member of a RAID, which this splits from the
    /// others.
    #[arg(short, long, value_name = "KIND", num_args = 0..=1, require_equals = true,
        default_missing_value = "", value_parser = parse_force)]
    force: Vec<Option<Force>>,
    /// Treat LINK as a file, not as a directory.
    #[arg(short = 'T', long)]
    no_target_directory: bool,
    /// Owner of the symbolic link (default: current user).
    #[arg(long, value_name = "UID:GID")]
    owner: Option<OwnerArg>,
    /// Existing file, as IMAGE:/path; with -s any path.
    target: OsString,
    /// Name of the new link.
    #[arg(value_name = "IMAGE:/path")]
    link: ImagePath,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Arguments { target, link, symbolic, force, .. } = arguments;
    let maker = NewFileOwner::new(arguments.owner);
    // Only the target of a hard link is in the image.
    let existing = ImagePath::from(target.clone());
    ensure!(
        *symbolic || existing.image == link.image,
        "{}: a hard link stays in its image; ln -s makes a symbolic one",
        target.shown()
    );
    let own = match symbolic {
        true => target.as_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default(),
        false => existing.file_name(),
    };
    let is_forced = force.contains(&None);
    let force = force.iter().flatten().copied().next();
    let place = WriteArgs { volume: arguments.place.clone(), force };
    edit::edit_volume(&link.image, &place, |volume| {
        let entry = edit::resolve_destination(volume, link, !arguments.no_target_directory, own)?;
        ensure!(!entry.name.is_empty(), "{link}: the link needs a name");
        let found =
            if *symbolic { None } else { Some(resolve_target(volume, &existing, Follow::No)?) };
        if is_forced {
            remove_existing(volume, &entry, link, found)?;
        }
        let done = match found {
            Some(found)
                if entry.lookup(volume)?.is_some_and(|it| it.number == found) && is_forced =>
            {
                Ok(())
            }
            Some(found) => volume.link(found, entry.dir, &entry.name),
            None => {
                let new = NewNode {
                    target: target.as_bytes(),
                    ..maker.new_node(FileType::Symlink, 0o777)
                };
                volume.create(entry.dir, &entry.name, &new).map(drop)
            }
        };
        done.map_err(|error| edit::with_context(link, error))?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Removes the existing file, unless it is the target of the link.
fn remove_existing(
    volume: &Volume,
    entry: &TargetName,
    link: &ImagePath,
    found: Option<InodeNumber>,
) -> anyhow::Result<()> {
    match entry.lookup(volume)? {
        Some(there) if found == Some(there.number) => Ok(()),
        Some(there) => {
            ensure!(there.kind != FileType::Directory, "{link}: is a directory");
            volume.unlink(entry.dir, &entry.name).map_err(|error| edit::with_context(link, error))
        }
        None => Ok(()),
    }
}
