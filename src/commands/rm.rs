//! `draconis rm`

use std::process::ExitCode;

use anyhow::ensure;
use clap::Args;
use draconis_exchange::contract::Kind;
use draconis_ext::{Error, Follow, InodeNumber, Volume};

use crate::change::{self, Entry};
use crate::image::{self, Place};
use crate::target::Target;

/// Remove files or directories from a volume.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: Place,
    /// Remove directories and their contents recursively.
    #[arg(short, long, visible_short_alias = 'R')]
    recursive: bool,
    /// Ignore missing files.
    #[arg(short, long)]
    force: bool,
    /// Files or directories to remove.
    #[arg(value_name = "IMAGE:/path", required = true)]
    targets: Vec<Target>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    change::each(&arguments.place, &arguments.targets, |volume, target| {
        match volume.resolve(volume.root(), &target.path, Follow::No) {
            Err(Error::NotFound | Error::NotADirectory) if arguments.force => return Ok(()),
            Err(error) => return Err(change::tell(target, error)),
            Ok(_) => {}
        }
        let entry = Entry::of(volume, target)?;
        let Some(inode) = entry.lookup(volume)? else { return Ok(()) };
        if inode.kind != Kind::Directory {
            return volume.unlink(entry.dir, &entry.name).map_err(|e| change::tell(target, e));
        }
        ensure!(arguments.recursive, "{target} is a directory; -r removes it with all it holds");
        remove_below(volume, target, inode.number)?;
        volume.remove_directory(entry.dir, &entry.name).map_err(|e| change::tell(target, e))
    })
}

/// Removes all that a directory holds. Only the directories on the path down are remembered,
/// each with the directories in it that are still to go.
fn remove_below(volume: &Volume, target: &Target, top: InodeNumber) -> anyhow::Result<()> {
    let label = target.to_string();
    let mut stack = vec![(top, directories(volume, top, &label)?)];
    while let Some((dir, below)) = stack.last_mut() {
        let dir = *dir;
        let Some((name, number)) = below.last().cloned() else {
            stack.pop();
            if let Some((above, below)) = stack.last_mut()
                && let Some((name, _)) = below.pop()
            {
                volume.remove_directory(*above, &name).map_err(|e| change::tell(&label, e))?;
            }
            continue;
        };
        ensure!(
            !stack.iter().any(|(above, _)| *above == number) && number != dir,
            "{label}: {} leads back up; draconis check shows the damage",
            crate::text::printable(&name)
        );
        let below = directories(volume, number, &label)?;
        stack.push((number, below));
    }
    Ok(())
}

/// Removes what is no directory; the directories that are left.
fn directories(
    volume: &Volume,
    dir: InodeNumber,
    label: &str,
) -> anyhow::Result<Vec<(Vec<u8>, InodeNumber)>> {
    let mut left = vec![];
    for entry in image::names(volume, dir, label)?.names {
        let kind = match entry.kind {
            Some(kind) => kind,
            None => volume.inode(entry.inode)?.kind,
        };
        if kind == Kind::Directory {
            left.push((entry.name, entry.inode));
        } else {
            volume.unlink(dir, &entry.name).map_err(|error| change::tell(&label, error))?;
        }
    }
    Ok(left)
}
