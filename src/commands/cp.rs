//! `draconis cp`: copies inside a volume, and from one volume into another.

mod scan;

use std::collections::HashSet;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use clap::Args;
use draconis_exchange::contract::Kind;
use draconis_ext::{Follow, InodeNumber, Options, Volume};
use draconis_service::volume::part;

use crate::bucket;
use crate::change::{self, Maker};
use crate::graft::Graft;
use crate::image::object::Name;
use crate::image::{self, Behind, Place, find};
use crate::progress::When;
use crate::target::Target;
use scan::{Keep, scan};

/// Copy files within or between volumes.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volumes are.
    #[command(flatten)]
    place: Place,
    /// Copy directories recursively; copy symbolic links as links.
    #[arg(short, long, visible_short_alias = 'R')]
    recursive: bool,
    /// Keep owners, times and extended attributes.
    #[arg(short, long)]
    preserve: bool,
    /// The same as -rp.
    #[arg(short, long)]
    archive: bool,
    /// Treat the destination as a file, not as a directory.
    #[arg(short = 'T', long)]
    no_target_directory: bool,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    progress: When,
    /// Source files, then the destination file or directory.
    #[arg(value_name = "IMAGE:/path", num_args = 2.., required = true)]
    targets: Vec<Target>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (dest, sources) = arguments.targets.split_last().context("nothing to copy")?;
    let from = change::one_image(sources)?;
    let keep = if arguments.preserve || arguments.archive {
        Keep::All
    } else {
        Keep::Contents { maker: Maker::new(None), now: change::now()? }
    };
    if let (Some(one), Some(other)) = (image::in_store(from)?, image::in_store(&dest.image)?)
        && one.name != other.name
        && is_same_file(&one.store, &other.store)?
    {
        return within_store(arguments, sources, (one, other), keep);
    }
    let same = is_same_file(from, &dest.image)?;
    if !same {
        image::sources(from, &arguments.place).refuse(&dest.image)?;
    }
    // Both are opened before the process gives up opening files.
    let other = if same { None } else { Some(image::readable(from)?) };
    let opened = image::writable(&dest.image)?;
    // Of two images, they are what the one that is read differs from.
    let behind = Behind::open(from, &arguments.place.backing)?;
    image::confine()?;
    let (other, behind) = match other {
        Some(other) => {
            let shown = from.display();
            let part = part(other.start()?, &behind.start(), &arguments.place.options());
            let disk = part.with_context(|| shown.to_string())?.disk;
            let volume = Volume::open(disk.clone(), Options::default());
            let volume = volume.map_err(|error| image::refused(from, &*disk, error.into()))?;
            (Some(volume), Behind::default())
        }
        None => (None, behind),
    };
    change::change_opened((opened, behind), &dest.image, &arguments.place, |volume| {
        let from = other.as_ref().unwrap_or(volume);
        copy(arguments, sources, dest, from, volume, same, keep)
    })
}

/// Copies from one disk of a store to another: the store is opened once, for both.
fn within_store(
    arguments: &Arguments,
    sources: &[Target],
    (from, to): (Name, Name),
    keep: Keep,
) -> anyhow::Result<ExitCode> {
    let (dest, _) = arguments.targets.split_last().context("nothing to copy")?;
    let store = image::alone_in(to)?;
    image::confine()?;
    let store = store.open()?;
    let shown = from.to_string();
    let part = part(store.beside(&from).disk()?, &[], &arguments.place.options());
    let disk = part.with_context(|| shown.clone())?.disk;
    let volume = Volume::open(disk.clone(), Options::default());
    let volume = volume.map_err(|error| image::refused(Path::new(&shown), &*disk, error.into()))?;
    change::change_disk((store.disk()?, vec![]), &dest.image, &arguments.place, |into| {
        copy(arguments, sources, dest, &volume, into, false, keep)
    })
}

fn is_same_file(one: &Path, other: &Path) -> anyhow::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    // Of disks, too, the store is what counts.
    let address = |path: &Path| {
        let address = bucket::address(path)?;
        Some(bucket::normal(address.rsplit_once('#').map_or(address, |(store, _)| store)))
    };
    let addresses = [address(one), address(other)];
    if addresses.iter().any(Option::is_some) {
        return Ok(addresses[0] == addresses[1]);
    }
    let identity = |path: &Path| -> anyhow::Result<(u64, u64, u64)> {
        let object = Name::of(path);
        let path = object.as_ref().map_or(path, |object| &object.store);
        let found = std::fs::metadata(path).with_context(|| path.display().to_string())?;
        let device = found.rdev();
        // Two nodes of one device are the same, too.
        Ok(if device != 0 { (device, 0, 0) } else { (0, found.dev(), found.ino()) })
    };
    Ok(identity(one)? == identity(other)?)
}

fn copy(
    arguments: &Arguments,
    sources: &[Target],
    dest: &Target,
    from: &Volume,
    to: &Volume,
    same: bool,
    keep: Keep,
) -> anyhow::Result<ExitCode> {
    let recursive = arguments.recursive || arguments.archive;
    let follow = if recursive { Follow::No } else { Follow::Yes };
    let mut tops: Vec<(Vec<u8>, InodeNumber)> = vec![];
    let mut into = None;
    let mut named = false;
    for source in sources {
        let top = find(from, source, follow)?;
        let is_dir = from.inode(top)?.kind == Kind::Directory;
        ensure!(!is_dir || recursive, "{source} is a directory; -r copies it with all it holds");
        let entry =
            change::destination(to, dest, !arguments.no_target_directory, source.file_name())?;
        let several = sources.len() > 1 && entry.name != source.file_name();
        ensure!(!several, "{dest}: no such directory");
        if entry.name.is_empty() {
            bail!("{source}: the root directory has no name; name the copy");
        }
        let inside = same && is_dir && change::is_below(to, entry.dir, top)?;
        ensure!(!inside, "{source}: a directory cannot be copied into itself");
        into = Some(entry.dir);
        named |= entry.name != source.file_name();
        tops.push((entry.name, top));
    }
    let into = into.context("nothing to copy")?;
    let (source, inodes) = scan(from, &tops, keep)?;
    let kept = if same { inodes } else { HashSet::new() };
    let label = if named { dest.parent() } else { dest.to_string() };
    let graft =
        Graft { volume: to, source: &source, into, label, owner: None, replace_kinds: false, kept };
    graft.run(arguments.progress)?;
    Ok(ExitCode::SUCCESS)
}
