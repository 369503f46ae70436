//! `draconis rm`

use std::process::ExitCode;

use anyhow::ensure;
use clap::Args;
use draconis_ext::{Error, Follow, InodeNumber, Volume};
use draconis_types::FileType;

use crate::edit::{self, TargetName};
use crate::image::{self, Force, VolumeArgs, WriteArgs, parse_force};
use crate::target::ImagePath;

/// Remove files or directories from a volume.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: VolumeArgs,
    /// Remove directories and their contents recursively.
    #[arg(short, long, visible_short_alias = 'R')]
    recursive: bool,
    /// Ignore missing files. With raid-member, write also to a member of a RAID, which this splits from the
    /// others.
    #[arg(short, long, value_name = "KIND", num_args = 0..=1, require_equals = true,
        default_missing_value = "", value_parser = parse_force)]
    force: Vec<Option<Force>>,
    /// Files or directories to remove.
    #[arg(value_name = "IMAGE:/path", required = true)]
    targets: Vec<ImagePath>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let is_forced = arguments.force.contains(&None);
    let force = arguments.force.iter().flatten().copied().next();
    let place = WriteArgs { volume: arguments.place.clone(), force };
    edit::for_each_target(&place, &arguments.targets, |volume, target| {
        match volume.resolve(volume.root(), &target.path, Follow::No) {
            Err(Error::NotFound | Error::NotADirectory) if is_forced => return Ok(()),
            Err(error) => return Err(edit::with_context(target, error)),
            Ok(_) => {}
        }
        let entry = TargetName::from_image_path(volume, target)?;
        let Some(inode) = entry.lookup(volume)? else { return Ok(()) };
        if inode.kind != FileType::Directory {
            return volume
                .unlink(entry.dir, &entry.name)
                .map_err(|e| edit::with_context(target, e));
        }
        ensure!(arguments.recursive, "{target} is a directory; -r removes it with all it holds");
        remove_below(volume, target, inode.number)?;
        volume.remove_directory(entry.dir, &entry.name).map_err(|e| edit::with_context(target, e))
    })
}

/// Removes the contents of a directory. Keeps only the directories on the current path, each
/// with its remaining subdirectories.
fn remove_below(volume: &Volume, target: &ImagePath, top: InodeNumber) -> anyhow::Result<()> {
    let label = target.to_string();
    let mut stack = vec![(top, remove_files_and_list_subdirectories(volume, top, &label)?)];
    while let Some((dir, below)) = stack.last_mut() {
        let dir = *dir;
        let Some((name, number)) = below.last().cloned() else {
            stack.pop();
            if let Some((above, below)) = stack.last_mut()
                && let Some((name, _)) = below.pop()
            {
                volume
                    .remove_directory(*above, &name)
                    .map_err(|e| edit::with_context(&label, e))?;
            }
            continue;
        };
        ensure!(
            !stack.iter().any(|(above, _)| *above == number) && number != dir,
            "{label}: {} leads back up; draconis check shows the damage",
            crate::text::escape_control_chars(&name)
        );
        let below = remove_files_and_list_subdirectories(volume, number, &label)?;
        stack.push((number, below));
    }
    Ok(())
}

/// Removes all other files; returns the remaining subdirectories.
fn remove_files_and_list_subdirectories(
    volume: &Volume,
    dir: InodeNumber,
    label: &str,
) -> anyhow::Result<Vec<(Vec<u8>, InodeNumber)>> {
    let mut left = vec![];
    for entry in image::list_directory(volume, dir, label)?.names {
        let kind = match entry.kind {
            Some(kind) => kind,
            None => volume.inode(entry.inode)?.kind,
        };
        if kind == FileType::Directory {
            left.push((entry.name, entry.inode));
        } else {
            volume.unlink(dir, &entry.name).map_err(|error| edit::with_context(&label, error))?;
        }
    }
    Ok(left)
}
