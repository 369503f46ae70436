//! Opening the image that a command was given.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, bail};
use draconis_device::{Claim, FileOptions, OpenedFile, claim};
use draconis_exchange::contract::Kind;
use draconis_ext::{Follow, InodeNumber, Volume};
use draconis_service::image::open_confined;
use draconis_service::options::MountOptions;
use draconis_service::sandbox::{self, Profile};
use draconis_service::volume::VolumeTree;
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::cli::Place;
use crate::target::Target;

/// Opens the volume in `image` and confines this process to reading it.
pub fn open(
    image: &Path,
    place: Place,
    beneath: Option<BorrowedFd<'_>>,
) -> anyhow::Result<VolumeTree> {
    let tree = open_confined(image, &place.options(), beneath).map_err(anyhow::Error::msg)?;
    let info = tree.volume().info();
    if info.truncated {
        log::warn!("{}: the image is shorter than its volume", image.display());
    }
    Ok(tree)
}

impl Place {
    /// The same as mount options.
    pub fn options(self) -> MountOptions {
        MountOptions {
            offset_bytes: self.offset,
            partition: self.partition,
            ..MountOptions::default()
        }
    }
}

/// Opens the image for writing, alone; `None` if it is not there.
pub fn alone(image: &Path) -> anyhow::Result<Option<File>> {
    let shown = image.display();
    let kind = match std::fs::metadata(image) {
        Ok(found) => found.file_type(),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| shown.to_string()),
    };
    if !kind.is_file() && !kind.is_block_device() {
        bail!("{shown} is neither a file nor a block device");
    }
    // A device that the kernel has mounted refuses to be opened alone.
    let flags = if kind.is_block_device() { OFlags::EXCL.bits() as i32 } else { 0 };
    let file = match File::options().read(true).write(true).custom_flags(flags).open(image) {
        Err(error) if error.kind() == ErrorKind::ResourceBusy => bail!(busy(image)),
        opened => opened.with_context(|| shown.to_string())?,
    };
    claim_alone(&file, image)?;
    if let Some(device) = loop_device(image) {
        bail!("{shown} is in use by {device}; detach it first");
    }
    Ok(Some(file))
}

/// Claims an open image against everybody else.
pub fn claim_alone(file: &File, image: &Path) -> anyhow::Result<()> {
    match claim(file, Claim::Alone) {
        Err(Errno::WOULDBLOCK) => bail!(busy(image)),
        claimed => Ok(claimed?),
    }
}

fn busy(image: &Path) -> String {
    format!("{} is in use; unmount it first", image.display())
}

/// The loop device that the kernel has on a file.
fn loop_device(image: &Path) -> Option<String> {
    let image = std::fs::metadata(image).ok()?;
    let backs = |device: &Path| -> Option<bool> {
        let path = std::fs::read_to_string(device.join("loop/backing_file")).ok()?;
        let found = std::fs::metadata(path.trim_end_matches('\n')).ok()?;
        Some((found.dev(), found.ino()) == (image.dev(), image.ino()))
    };
    let devices = std::fs::read_dir("/sys/block").ok()?.flatten();
    let mut using = devices.filter(|device| backs(&device.path()) == Some(true));
    using.next().map(|device| format!("/dev/{}", device.file_name().display()))
}

/// Opens an image that must be there, to be changed and by nobody else.
pub fn writable(image: &Path) -> anyhow::Result<OpenedFile> {
    let name = image.display();
    let missing = || format!("{name}: no such file; draconis format makes a volume");
    opened(alone(image)?.with_context(missing)?, image, true)
}

/// Opens an image that is only read beside one that is changed.
pub fn readable(image: &Path) -> anyhow::Result<OpenedFile> {
    let file = File::open(image).with_context(|| image.display().to_string())?;
    match claim(&file, Claim::Shared) {
        Err(Errno::WOULDBLOCK) => bail!(busy(image)),
        claimed => claimed?,
    }
    opened(file, image, false)
}

fn opened(file: File, image: &Path, write: bool) -> anyhow::Result<OpenedFile> {
    // Through the page cache, as with every tool that runs once.
    let how = FileOptions { write, direct: false, uring: false };
    OpenedFile::new(file.into(), how).with_context(|| image.display().to_string())
}

/// Confines this process to what it has open.
pub fn confine() -> anyhow::Result<()> {
    sandbox::confine(&Profile::Reader, None)?;
    Ok(())
}

/// Finds what a target names; the error names the target.
pub fn find(volume: &Volume, target: &Target, follow: Follow) -> anyhow::Result<InodeNumber> {
    volume
        .resolve(volume.root(), &target.path, follow)
        .map_err(|error| anyhow::anyhow!("{target}: {error}"))
}

/// The names in a directory, sorted, without `.` and `..`; damage is told and left out.
pub fn names(volume: &Volume, dir: InodeNumber, label: &str) -> anyhow::Result<Listing> {
    let mut listing = Listing::default();
    volume
        .entries(dir, Default::default(), false, |found| {
            match found {
                Ok(entry) => listing.names.push(Listed {
                    name: entry.name.to_vec(),
                    inode: entry.inode,
                    kind: entry.kind,
                }),
                Err(damage) => {
                    eprintln!("draconis: {label}: {}", damage.error);
                    listing.damaged = true;
                }
            }
            true
        })
        .map_err(|error| anyhow::anyhow!("{label}: {error}"))?;
    listing.names.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(listing)
}

/// What a directory holds.
#[derive(Default)]
pub struct Listing {
    /// Its names, sorted by their bytes.
    pub names: Vec<Listed>,
    /// Whether some could not be read.
    pub damaged: bool,
}

/// A name in a directory.
pub struct Listed {
    /// The name.
    pub name: Vec<u8>,
    /// What it names.
    pub inode: InodeNumber,
    /// Its kind, where the directory says.
    pub kind: Option<Kind>,
}
