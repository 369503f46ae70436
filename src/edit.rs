//! Changing a volume without mounting it: open, change, close.
//!
//! ```text
//!   image ──alone──▶ confined ──▶ open for writing ──▶ operations ──▶ close: durable, clean
//! ```
//! Law 1: the image is locked exclusively.
//! Law 2: after an interruption at any point the image is consistent; the latest changes may be
//! missing. Law 3: an error names its object, and the next step where there is one.

use std::collections::HashSet;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use draconis_access::listing::split_parent;
pub use draconis_access::messages::with_context;
use draconis_access::volume::{current_time, open_writable};
use draconis_device::Disk;
use draconis_ext::{Error, Follow, Inode, InodeNumber, NewNode, Volume};
use draconis_types::path_bytes::ShowPath;
use draconis_types::{AttributeChange, FileType, Time};

use crate::image::{self, BackingFiles, UnreadImage, WriteArgs, resolve_target};
use crate::report;
use crate::target::ImagePath;
use crate::text::escape_control_chars;

/// Owner and umask for new files, as for a program on a mounted volume.
#[derive(Clone, Copy, Debug)]
pub struct NewFileOwner {
    pub uid: u32,
    pub gid: u32,
    /// Permission bits to clear.
    pub umask: u32,
}

impl NewFileOwner {
    /// Uses the given owner or the calling user. Call it before the process is confined: it reads
    /// the umask.
    pub fn new(owner: Option<OwnerArg>) -> Self {
        let umask = rustix::process::umask(rustix::fs::Mode::empty());
        rustix::process::umask(umask);
        let uid = rustix::process::geteuid().as_raw();
        let gid = rustix::process::getegid().as_raw();
        let OwnerArg { uid, gid } = owner.unwrap_or(OwnerArg { uid, gid });
        Self { uid, gid, umask: umask.as_raw_mode() }
    }

    /// Returns a new node of this owner, without a device number or link target.
    pub fn new_node(self, kind: FileType, mode: u32) -> NewNode<'static> {
        let Self { uid, gid, .. } = self;
        NewNode { kind, mode, uid, gid, device: (0, 0), target: b"" }
    }

    /// Returns a new empty file.
    pub fn new_file_node(self) -> NewNode<'static> {
        self.new_node(FileType::File, 0o666 & !self.umask)
    }
}

/// Owner as `UID:GID`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OwnerArg {
    pub uid: u32,
    pub gid: u32,
}

impl std::str::FromStr for OwnerArg {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let both = text.split_once(':');
        let parsed = both
            .and_then(|(uid, gid)| Some(Self { uid: uid.parse().ok()?, gid: gid.parse().ok()? }));
        parsed.ok_or("UID:GID in numbers is needed")
    }
}

/// Returns the current time, or SOURCE_DATE_EPOCH if it is set.
pub fn now_or_source_date() -> anyhow::Result<Time> {
    match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(text) => {
            let seconds = text.parse().with_context(|| format!("SOURCE_DATE_EPOCH={text}"))?;
            Ok(Time { seconds, nanoseconds: 0 })
        }
        Err(_) => Ok(current_time()),
    }
}

/// Opens the volume in `image`, confines this process, calls `work`, and closes the volume even
/// if `work` fails.
pub fn edit_volume<T>(
    image: &Path,
    place: &WriteArgs,
    work: impl FnOnce(&Volume) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let opened =
        (image::open_writable(image, place.force)?, BackingFiles::open(image, &place.backing)?);
    image::confine_to_open_files()?;
    edit_open_image(opened, image, place, work)
}

/// Runs [`edit_volume`] on an open image; leaves confinement to the caller.
pub fn edit_open_image<T>(
    (opened, behind): (UnreadImage, BackingFiles),
    image: &Path,
    place: &WriteArgs,
    work: impl FnOnce(&Volume) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    edit_disk((opened.into_disk()?, behind.start_disks()), image, place, work)
}

/// Runs [`edit_volume`] on a disk and its backing files; leaves confinement to the caller.
pub fn edit_disk<T>(
    (disk, behind): (Arc<dyn Disk>, Vec<Arc<dyn Disk>>),
    image: &Path,
    place: &WriteArgs,
    work: impl FnOnce(&Volume) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let shown = image.shown();
    let time = std::env::var_os("SOURCE_DATE_EPOCH").map(|_| now_or_source_date()).transpose()?;
    let clock = Arc::new(move || time.unwrap_or_else(current_time));
    let (volume, _held) = open_writable(image, disk, &behind, &place.options(), clock)?;
    let done = work(&volume);
    let closed = volume.close();
    let failure = volume.failure();
    match (done, closed, failure) {
        (Ok(done), Ok(()), None) => Ok(done),
        (Err(error), Ok(()), None) => Err(error),
        (_, closed, failure) => {
            let why = failure.or(closed.err().map(|error| error.to_string()));
            let why = why.unwrap_or_default();
            bail!(
                "{shown}: {why}; what was changed last is not there, and draconis check {shown} \
                 looks at the rest"
            )
        }
    }
}

/// Returns the image that all targets have in common.
pub fn single_image(targets: &[ImagePath]) -> anyhow::Result<&Path> {
    let first = targets.first().context("nothing is named")?;
    match targets.iter().find(|other| other.image != first.image) {
        Some(other) => bail!("{other}: only one image at a time; run again for that one"),
        None => Ok(&first.image),
    }
}

/// Calls `work` for each target in one session; reports failures and continues.
pub fn for_each_target(
    place: &WriteArgs,
    targets: &[ImagePath],
    mut work: impl FnMut(&Volume, &ImagePath) -> anyhow::Result<()>,
) -> anyhow::Result<ExitCode> {
    edit_volume(single_image(targets)?, place, |volume| {
        let mut code = ExitCode::SUCCESS;
        for target in targets {
            if let Err(error) = work(volume, target) {
                report::print_error(&error);
                code = ExitCode::FAILURE;
                if !volume.is_writable() {
                    break;
                }
            }
        }
        Ok(code)
    })
}

/// A name in a directory; it may not exist.
#[derive(Clone, Debug)]
pub struct TargetName {
    pub dir: InodeNumber,
    pub name: Vec<u8>,
}

impl TargetName {
    /// Resolves the parent directory of a target.
    pub fn from_image_path(volume: &Volume, target: &ImagePath) -> anyhow::Result<Self> {
        let (above, name) = split_parent(&target.path);
        match name {
            b"" => bail!("{target} is the root directory"),
            b"." | b".." => bail!("{target}: a name is needed at its end"),
            _ => {}
        }
        let dir = volume.resolve(volume.root(), above, Follow::Yes);
        let shown = || {
            format!(
                "{}:{}",
                target.image.shown(),
                escape_control_chars(trim_trailing_slashes(above))
            )
        };
        let dir = match dir {
            Err(error @ Error::NotFound) => {
                bail!("{}: {error}; draconis mkdir -p makes it", shown())
            }
            dir => dir.with_context(shown)?,
        };
        Ok(Self { dir, name: name.to_vec() })
    }

    /// Returns the inode with this name.
    pub fn lookup(&self, volume: &Volume) -> draconis_ext::Result<Option<Arc<Inode>>> {
        match volume.lookup(self.dir, &self.name) {
            Ok(number) => volume.inode(number).map(Some),
            Err(Error::NotFound) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Returns where to put a file: under its own name in an existing directory, or else as the last
/// name of the target.
pub fn resolve_destination(
    volume: &Volume,
    target: &ImagePath,
    into: bool,
    own: &[u8],
) -> anyhow::Result<TargetName> {
    match volume.resolve(volume.root(), &target.path, Follow::Yes) {
        Ok(there) if into && volume.inode(there)?.kind == FileType::Directory => {
            Ok(TargetName { dir: there, name: own.to_vec() })
        }
        Ok(_) | Err(Error::NotFound) => {
            let entry = TargetName::from_image_path(volume, target)?;
            ensure!(
                !target.path.ends_with(b"/") || entry.lookup(volume)?.is_none(),
                "{target}: not a directory"
            );
            Ok(entry)
        }
        Err(error) => Err(with_context(target, error)),
    }
}

/// Finds the inode of a target, following symbolic links; creates an empty file if it is missing
/// and `make` is true.
pub fn find_or_create(
    volume: &Volume,
    target: &ImagePath,
    maker: NewFileOwner,
    make: bool,
) -> anyhow::Result<Option<InodeNumber>> {
    match volume.resolve(volume.root(), &target.path, Follow::Yes) {
        Ok(found) => return Ok(Some(found)),
        Err(Error::NotFound) if !make => return Ok(None),
        Err(Error::NotFound) => {}
        Err(error) => return Err(with_context(target, error)),
    }
    ensure!(!target.path.ends_with(b"/"), "{target}: no such directory");
    let made = volume.resolve_or_create(volume.root(), &target.path, &maker.new_file_node());
    match made {
        Ok(made) => Ok(Some(made)),
        Err(error @ Error::NotFound) => {
            // If the parent directory of the target is missing, the error names that.
            TargetName::from_image_path(volume, target)?;
            bail!("{target}: {error}: the symbolic link leads into a directory that is not there")
        }
        Err(error) => Err(with_context(target, error)),
    }
}

/// Changes a target, or with `recursive` its whole tree, without following links in the tree.
pub fn change_attributes(
    volume: &Volume,
    target: &ImagePath,
    recursive: bool,
    follow: Follow,
    change: &dyn Fn(&Volume, &Inode) -> Option<AttributeChange>,
) -> anyhow::Result<()> {
    let top = resolve_target(volume, target, follow)?;
    let all = match recursive {
        true => list_subtree(volume, top, &target.to_string())?,
        false => vec![volume.inode(top).with_context(|| target.to_string())?],
    };
    for inode in all {
        if let Some(change) = change(volume, &inode) {
            let done = volume.set_attributes(inode.number, &change);
            done.map_err(|error| with_context(target, error))?;
        }
    }
    Ok(())
}

/// Returns true if `dir` is `top` or below it.
pub fn is_below(volume: &Volume, dir: InodeNumber, top: InodeNumber) -> anyhow::Result<bool> {
    let mut at = dir;
    let mut seen = HashSet::new();
    while at != top {
        if at == volume.root() || !seen.insert(at) {
            return Ok(false);
        }
        at = volume.lookup(at, b"..")?;
    }
    Ok(true)
}

/// Returns all inodes at and below `top`; a directory precedes its contents.
pub fn list_subtree(
    volume: &Volume,
    top: InodeNumber,
    label: &str,
) -> anyhow::Result<Vec<Arc<Inode>>> {
    let mut all = vec![volume.inode(top)?];
    let mut seen = HashSet::from([top]);
    let mut at = 0;
    while let Some(inode) = all.get(at).cloned() {
        at += 1;
        if inode.kind != FileType::Directory {
            continue;
        }
        for entry in image::list_directory(volume, inode.number, label)?.names {
            if seen.insert(entry.inode) {
                all.push(
                    volume.inode(entry.inode).with_context(|| escape_control_chars(&entry.name))?,
                );
            }
        }
    }
    Ok(all)
}

/// Removes trailing slashes from a path.
fn trim_trailing_slashes(path: &[u8]) -> &[u8] {
    let len = path.iter().rposition(|byte| *byte != b'/').map_or(0, |at| at + 1);
    &path[..len]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_args_are_numeric() {
        assert_eq!("0:65534".parse(), Ok(OwnerArg { uid: 0, gid: 65534 }));
        for wrong in ["", "0", ":", "root:root", "1:", "-1:0", "1:4294967296"] {
            assert!(wrong.parse::<OwnerArg>().is_err(), "{wrong}");
        }
    }
}
