//! `draconis put` and `draconis untar`: files of this machine, and archives, into a volume.

use std::collections::HashSet;
use std::io::Read;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use draconis_exchange::contract::Kind;
use draconis_ext::mkfs::{Node, What};
use draconis_ext::{Error, Follow, InodeNumber, NewNode, Volume};

use crate::change::{self, Home, Maker, Owner};
use crate::cli::{Put, Untar, When};
use crate::graft::Graft;
use crate::image;
use crate::populate::{self, Gather, Source, Stamp};
use crate::progress::Progress;
use crate::target::Target;

/// Bytes that are taken from standard input at once.
const PIECE_BYTES: usize = 1 << 20;

/// Files are read while the volume is written, so this process is not confined, unless all
/// it reads is its standard input.
pub fn put(arguments: &Put) -> anyhow::Result<ExitCode> {
    let Put { target, sources, .. } = arguments;
    if sources.iter().any(|source| source == Path::new("-")) {
        ensure!(sources.len() == 1, "-: standard input is put alone; ./- is a file of that name");
        ensure!(
            !arguments.recursive,
            "-: standard input is one file; draconis untar unpacks an archive, and ./- is a \
             file of that name"
        );
        return put_input(arguments);
    }
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

/// Puts standard input: as a file without a name, which takes the place of what has the name
/// once it is whole.
fn put_input(arguments: &Put) -> anyhow::Result<ExitCode> {
    let target = &arguments.target;
    let maker = Maker::new(arguments.owner);
    change::change(&target.image, arguments.place, |volume| {
        let there = match volume.resolve(volume.root(), &target.path, Follow::Yes) {
            Ok(there) => Some(volume.inode(there)?),
            Err(Error::NotFound) => None,
            Err(error) => return Err(change::tell(target, error)),
        };
        ensure!(
            !there.is_some_and(|there| there.kind == Kind::Directory),
            "{target} is a directory: standard input needs a name in it"
        );
        ensure!(!target.path.ends_with(b"/"), "{target}: no such directory");
        let home = Home::of(volume, target)?;
        let new = NewNode {
            kind: Kind::File,
            mode: 0o666 & !maker.umask,
            uid: maker.uid,
            gid: maker.gid,
            device: (0, 0),
            target: b"",
        };
        let made = volume.create_unnamed(home.dir, &new);
        let made = made.map_err(|error| change::tell(target, error))?;
        volume.hold(made);
        let done = fill(volume, made, target, arguments.progress).and_then(|()| {
            if home.lookup(volume)?.is_some() {
                volume.unlink(home.dir, &home.name).map_err(|error| change::tell(target, error))?;
            }
            volume.link(made, home.dir, &home.name).map_err(|error| change::tell(target, error))
        });
        volume.release(made, 1);
        done.map(|()| ExitCode::SUCCESS)
    })
}

/// Writes standard input into a file.
fn fill(volume: &Volume, file: InodeNumber, target: &Target, progress: When) -> anyhow::Result<()> {
    let mut progress = Progress::endless(progress);
    let mut input = std::io::stdin().lock();
    let mut buffer = vec![0; PIECE_BYTES];
    let mut at = 0;
    loop {
        let len = match input.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(len) => len,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error).context("standard input"),
        };
        let mut put = 0;
        while put < len {
            match volume.write(file, at, &buffer[put..len]) {
                Ok(0) => return Err(change::tell(target, Error::NoSpace)),
                Ok(taken) => (put, at) = (put + taken, at + taken as u64),
                Err(error) => return Err(change::tell(target, error)),
            }
        }
        progress.add(len as u64);
    }
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
