//! `draconis cp`: copies inside a volume, and from one volume into another.

mod scan;

use std::collections::HashSet;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use clap::Args;
use draconis_ext::{Follow, InodeNumber, OpenOptions, Volume};
use draconis_service::volume::{locate_volume, open_for_reading};
use draconis_types::FileType;
use draconis_types::path_bytes::ShowPath;

use crate::bucket;
use crate::edit::{self, NewFileOwner};
use crate::image::store_disk::StoreDiskName;
use crate::image::{self, BackingFiles, WriteArgs, resolve_target};
use crate::import_tree::TreeImport;
use crate::progress::ProgressMode;
use crate::target::ImagePath;
use scan::{PreserveAttributes, scan_copy_source};

/// Copy files within or between volumes.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volumes are.
    #[command(flatten)]
    place: WriteArgs,
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
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Source files, then the destination file or directory.
    #[arg(value_name = "IMAGE:/path", num_args = 2.., required = true)]
    targets: Vec<ImagePath>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (dest, sources) = arguments.targets.split_last().context("nothing to copy")?;
    let from = edit::single_image(sources)?;
    let keep = if arguments.preserve || arguments.archive {
        PreserveAttributes::All
    } else {
        PreserveAttributes::Contents {
            maker: NewFileOwner::new(None),
            now: edit::now_or_source_date()?,
        }
    };
    if let (Some(one), Some(other)) =
        (image::parse_store_disk(from)?, image::parse_store_disk(&dest.image)?)
        && one.name != other.name
        && is_same_file(&one.store, &other.store)?
    {
        return copy_within_store(arguments, sources, (one, other), keep);
    }
    let same = is_same_file(from, &dest.image)?;
    if !same {
        image::sources_to_protect(from, &arguments.place)
            .refuse_source_as_destination(&dest.image)?;
    }
    // Both images are opened before the process is confined.
    let other = if same { None } else { Some(image::open_readable(from)?) };
    let opened = image::open_writable(&dest.image, arguments.place.force)?;
    // With two images, the backing files belong to the source.
    let behind = BackingFiles::open(from, &arguments.place.backing)?;
    image::confine_to_open_files()?;
    let (other, behind) = match other {
        Some(other) => {
            let shown = from.shown();
            let part = locate_volume(
                other.into_disk()?,
                &behind.start_disks(),
                &arguments.place.options(),
            );
            let disk = part.with_context(|| shown.to_string())?.disk;
            let volume = open_for_reading(disk.clone(), OpenOptions::default());
            let volume = volume.map_err(|error| image::open_volume_error(from, &*disk, error))?;
            (Some(volume), BackingFiles::default())
        }
        None => (None, behind),
    };
    edit::edit_open_image((opened, behind), &dest.image, &arguments.place, |volume| {
        let from = other.as_ref().unwrap_or(volume);
        copy_sources(arguments, sources, dest, from, volume, same, keep)
    })
}

/// Copies between two disks of one store, which is opened once for both.
fn copy_within_store(
    arguments: &Arguments,
    sources: &[ImagePath],
    (from, to): (StoreDiskName, StoreDiskName),
    keep: PreserveAttributes,
) -> anyhow::Result<ExitCode> {
    let (dest, _) = arguments.targets.split_last().context("nothing to copy")?;
    let store = image::open_store_disk_exclusive(to, arguments.place.force)?;
    image::confine_to_open_files()?;
    let store = store.open()?;
    let shown = from.to_string();
    let part = locate_volume(store.other_disk(&from).disk()?, &[], &arguments.place.options());
    let disk = part.with_context(|| shown.clone())?.disk;
    let volume = open_for_reading(disk.clone(), OpenOptions::default());
    let volume =
        volume.map_err(|error| image::open_volume_error(Path::new(&shown), &*disk, error))?;
    edit::edit_disk((store.disk()?, vec![]), &dest.image, &arguments.place, |into| {
        copy_sources(arguments, sources, dest, &volume, into, false, keep)
    })
}

fn is_same_file(one: &Path, other: &Path) -> anyhow::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    // Two disks of one store count as the same file.
    let address = |path: &Path| {
        let address = bucket::bucket_url(path)?;
        Some(bucket::normalize_url(address.rsplit_once('#').map_or(address, |(store, _)| store)))
    };
    let addresses = [address(one), address(other)];
    if addresses.iter().any(Option::is_some) {
        return Ok(addresses[0] == addresses[1]);
    }
    let identity = |path: &Path| -> anyhow::Result<(u64, u64, u64)> {
        let object = StoreDiskName::parse(path);
        let path = object.as_ref().map_or(path, |object| &object.store);
        let found = std::fs::metadata(path).with_context(|| path.shown().to_string())?;
        let device = found.rdev();
        // Two nodes of one device count as the same file.
        Ok(if device != 0 { (device, 0, 0) } else { (0, found.dev(), found.ino()) })
    };
    Ok(identity(one)? == identity(other)?)
}

fn copy_sources(
    arguments: &Arguments,
    sources: &[ImagePath],
    dest: &ImagePath,
    from: &Volume,
    to: &Volume,
    same: bool,
    keep: PreserveAttributes,
) -> anyhow::Result<ExitCode> {
    let recursive = arguments.recursive || arguments.archive;
    let follow = if recursive { Follow::No } else { Follow::Yes };
    let mut tops: Vec<(Vec<u8>, InodeNumber)> = vec![];
    let mut into = None;
    let mut named = false;
    for source in sources {
        let top = resolve_target(from, source, follow)?;
        let is_dir = from.inode(top)?.kind == FileType::Directory;
        ensure!(!is_dir || recursive, "{source} is a directory; -r copies it with all it holds");
        let entry = edit::resolve_destination(
            to,
            dest,
            !arguments.no_target_directory,
            source.file_name(),
        )?;
        let several = sources.len() > 1 && entry.name != source.file_name();
        ensure!(!several, "{dest}: no such directory");
        if entry.name.is_empty() {
            bail!("{source}: the root directory has no name; name the copy");
        }
        let inside = same && is_dir && edit::is_below(to, entry.dir, top)?;
        ensure!(!inside, "{source}: a directory cannot be copied into itself");
        into = Some(entry.dir);
        named |= entry.name != source.file_name();
        tops.push((entry.name, top));
    }
    let into = into.context("nothing to copy")?;
    let (source, inodes) = scan_copy_source(from, &tops, keep)?;
    let protected = if same { inodes } else { HashSet::new() };
    let label = if named { dest.parent() } else { dest.to_string() };
    let graft = TreeImport {
        volume: to,
        source: &source,
        into,
        label,
        owner: None,
        replace_kinds: false,
        protected,
    };
    graft.run(arguments.progress)?;
    Ok(ExitCode::SUCCESS)
}
