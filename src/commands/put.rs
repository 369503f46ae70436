//! `draconis put`: files of this machine into a volume.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, ensure};
use clap::Args;
use draconis_access::destination::Sources;
use draconis_access::populate::{self, Gather};
use draconis_exchange::contract::Kind;
use draconis_ext::{Error, Follow, InodeNumber, Volume};

use crate::change::{self, Entry, Maker, Owner};
use crate::graft::{How, graft, stamp};
use crate::image::{self, Behind, Place};
use crate::progress::{Progress, When};
use crate::target::Target;

/// Copy files from the host into a volume.
///
/// Keeps owners, modes, times, hard links, holes and extended attributes.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: Place,
    /// Copy directories recursively; copy symbolic links as links.
    #[arg(short, long, visible_short_alias = 'R')]
    recursive: bool,
    /// Treat the destination as a file, not as a directory.
    #[arg(short = 'T', long)]
    no_target_directory: bool,
    /// Set the owner of all files.
    #[arg(long, value_name = "UID:GID")]
    owner: Option<Owner>,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    progress: When,
    /// Source files; - for standard input (the destination must be a file name).
    #[arg(value_name = "SRC", required = true)]
    sources: Vec<PathBuf>,
    /// Destination file or directory.
    #[arg(value_name = "IMAGE:/path")]
    target: Target,
}

/// Bytes that are taken from standard input at once.
const PIECE_BYTES: usize = 1 << 20;

/// Files are read while the volume is written, so this process is not confined, unless all
/// it reads is its standard input.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Arguments { target, sources, .. } = arguments;
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
    let opened =
        (image::writable(&target.image)?, Behind::open(&target.image, &arguments.place.backing)?);
    change::change_opened(opened, &target.image, &arguments.place, |volume| {
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
                let entry = Entry::of(volume, target)?;
                (entry.dir, Some(entry.name))
            }
        };
        let gather = Gather {
            sources,
            name: name.as_deref(),
            recursive: arguments.recursive,
            image: &target.image,
        };
        let source = populate::gather(gather, stamp)?;
        let label = if name.is_some() { target.parent() } else { target.to_string() };
        let Arguments { owner, progress, .. } = *arguments;
        graft(volume, &source, into, label, How { owner, replace_kinds: false, progress })
    })
}

/// Puts standard input: as a file without a name, which takes the place of what has the name
/// once it is whole.
fn put_input(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let target = &arguments.target;
    let mut input = Sources::new();
    input.add_input();
    input.refuse(&target.image)?;
    let maker = Maker::new(arguments.owner);
    change::change(&target.image, &arguments.place, |volume| {
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
        let entry = Entry::of(volume, target)?;
        let made = volume.create_unnamed(entry.dir, &maker.file());
        let made = made.map_err(|error| change::tell(target, error))?;
        volume.hold(made);
        let done = fill(volume, made, target, arguments.progress).and_then(|()| {
            if entry.lookup(volume)?.is_some() {
                volume
                    .unlink(entry.dir, &entry.name)
                    .map_err(|error| change::tell(target, error))?;
            }
            volume.link(made, entry.dir, &entry.name).map_err(|error| change::tell(target, error))
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
