//! `draconis put` and `draconis untar`: files of this machine, and archives, into a volume.

use std::collections::HashSet;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use draconis_exchange::contract::Kind;
use draconis_ext::mkfs::{Node, What};
use draconis_ext::{Error, Follow, InodeNumber, Volume};

use crate::change::{self, Home, Owner};
use crate::cli::{Put, Untar, When};
use crate::graft::Graft;
use crate::image;
use crate::populate::{self, Gather, Source, Stamp};
use crate::progress::Progress;

/// Files are read while the volume is written, so this process is not confined.
pub fn put(arguments: &Put) -> anyhow::Result<ExitCode> {
    let Put { target, sources, .. } = arguments;
    let stamp = stamp()?;
    let opened = image::writable(&target.image)?;
    change::change_opened(opened, &target.image, arguments.place, |volume| {
        let there = match volume.resolve(volume.root(), &target.path, Follow::Yes) {
            Ok(there) => Some(there),
            Err(Error::NotFound) => None,
            Err(error) => return Err(change::tell(target, error)),
        };
        let is_dir = there.map(|there| volume.inode(there)).transpose()?;
        let is_dir = is_dir.is_some_and(|inode| inode.kind == Kind::Directory);
        let (into, name) = match there {
            Some(there) if is_dir && !arguments.no_target_directory => (there, None),
            _ => {
                ensure!(sources.len() == 1, "{target}: no such directory");
                ensure!(is_dir || !target.path.ends_with(b"/"), "{target}: no such directory");
                let home = Home::of(volume, target)?;
                (home.dir, Some(home.name))
            }
        };
        let gather = Gather {
            sources,
            name: name.as_deref(),
            recursive: arguments.recursive,
            image: &target.image,
        };
        let source = populate::gather(gather, stamp)?;
        graft(
            volume,
            &source,
            into,
            if name.is_some() { target.parent() } else { target.to_string() },
            arguments.owner,
            arguments.progress,
        )
    })
}

pub fn untar(arguments: &Untar) -> anyhow::Result<ExitCode> {
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
        let into = image::find(volume, target, Follow::Yes);
        let into = into.context("draconis mkdir -p makes the directory")?;
        if volume.inode(into)?.kind != Kind::Directory {
            bail!("{target}: not a directory");
        }
        graft(volume, &source, into, target.to_string(), arguments.owner, arguments.progress)
    })
}

fn stamp() -> anyhow::Result<Stamp> {
    let reproducible = std::env::var_os("SOURCE_DATE_EPOCH").is_some();
    Ok(Stamp { now: change::now()?, reproducible })
}

fn graft(
    volume: &Volume,
    source: &Source<'_>,
    into: InodeNumber,
    label: String,
    owner: Option<Owner>,
    progress: When,
) -> anyhow::Result<ExitCode> {
    let graft = Graft { volume, source, into, label, owner, kept: HashSet::new() };
    graft.check_space()?;
    graft.run(&mut Progress::new(progress, graft.bytes()))?;
    Ok(ExitCode::SUCCESS)
}
