//! Opening the image that a command was given.

mod held;
pub mod object;
mod packed;

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use draconis_device::{Claim, Disk, FileOptions, OpenedFile, claim};
use draconis_exchange::contract::Kind;
use draconis_ext::{Error, Follow, InodeNumber, Volume};
use draconis_service::options::MountOptions;
use draconis_service::sandbox::{self, Profile};
use draconis_service::volume::{self, OpenError, VolumeTree};
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::change::tell;
pub use held::{clear, hold, settle};
use object::{Name, Unopened};
use packed::packed;

use crate::say;
use crate::target::Target;
use crate::text::size;
use draconis_container::signature;

/// What is shorter has no place for a superblock.
const SHORTEST_BYTES: u64 = 2048;

/// Where in an image the volume is.
#[derive(Debug, Clone, Default, Args)]
pub struct Place {
    /// The volume starts at this byte of IMAGE (K, M, G allowed).
    #[arg(long, value_name = "BYTES", value_parser = size, conflicts_with = "partition")]
    pub offset: Option<u64>,
    /// The volume is this partition of IMAGE, counted from 1.
    #[arg(long, value_name = "N")]
    pub partition: Option<u32>,
    /// IMAGE is a qcow2 file that holds only what differs from FILE; given again, what FILE
    /// differs from. Names that IMAGE itself says are not opened.
    #[arg(long, value_name = "FILE")]
    pub backing: Vec<PathBuf>,
}

impl Place {
    /// The same as mount options.
    pub fn options(&self) -> MountOptions {
        MountOptions {
            offset_bytes: self.offset,
            partition: self.partition,
            ..MountOptions::default()
        }
    }
}

/// Opens the volume in `image` and confines this process to reading it.
pub fn open(
    image: &Path,
    place: &Place,
    beneath: Option<BorrowedFd<'_>>,
) -> anyhow::Result<VolumeTree> {
    let disk = disk(image, place, beneath)?;
    let opened = volume::open_part(disk.clone(), &MountOptions::default());
    opened.map_err(|error| refused(image, &*disk, error))
}

/// Opens the part of `image` that the volume is in, and confines this process: afterwards it
/// can read that, write to what is open, and create files in `beneath` if that is given.
pub fn disk(
    image: &Path,
    place: &Place,
    beneath: Option<BorrowedFd<'_>>,
) -> anyhow::Result<Arc<dyn Disk>> {
    let shown = image.display();
    let profile = match beneath {
        Some(beneath) => Profile::Extractor { beneath },
        None => Profile::Reader,
    };
    if let Some(name) = Name::of(image) {
        let store = name.shared()?;
        sandbox::confine(&profile, None)?;
        let part = volume::part(store.start()?, &[], &place.options());
        return Ok(part.with_context(|| shown.to_string())?.disk);
    }
    let file = File::open(image).with_context(|| shown.to_string())?;
    usable(image, file.metadata().with_context(|| shown.to_string())?.file_type())?;
    match claim(&file, Claim::Shared) {
        Err(Errno::WOULDBLOCK) => {
            bail!("{shown} is mounted or being changed; see draconis status")
        }
        claimed => claimed.with_context(|| shown.to_string())?,
    }
    // Opened while that can be done; what is in them is looked at later.
    let packed = packed(&file, image)?;
    let behind =
        place.backing.iter().map(|path| readable_file(path)).collect::<Result<Vec<_>, _>>()?;
    sandbox::confine(&profile, None)?;
    let file = match packed {
        Some(packed) => packed.unpack(image)?,
        None => file,
    };
    let whole = Arc::new(opened(file, image, false)?.start());
    let behind: Vec<Arc<dyn Disk>> =
        behind.into_iter().map(|file| Arc::new(file.start()) as Arc<dyn Disk>).collect();
    let part = volume::part(whole, &behind, &place.options());
    Ok(part.with_context(|| shown.to_string())?.disk)
}

/// Why a volume was not opened; where there is none, what is there instead.
pub fn refused(image: &Path, disk: &dyn Disk, error: OpenError) -> anyhow::Error {
    let shown = image.display();
    if matches!(error, OpenError::Held(_)) {
        return anyhow!("{shown}: {error}");
    }
    // What is too short for a superblock holds none either.
    let none = matches!(
        &error,
        OpenError::Ext(Error::NotExt | Error::Io(draconis_device::Error::OutOfRange { .. }))
    );
    if !none {
        return anyhow::Error::from(error).context(shown.to_string());
    }
    if disk.properties().len_bytes < SHORTEST_BYTES {
        return anyhow!("{shown}: too short for a volume, or empty; draconis format makes one");
    }
    match signature::held(disk) {
        Some(held) => {
            anyhow!("{shown}: not an ext volume; it holds {}, and {}", held.what, held.help)
        }
        None => anyhow!(
            "{shown}: not an ext volume; --offset and --partition say where one begins, and \
             draconis format makes one"
        ),
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
    usable(image, kind)?;
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

/// The file that an image is in: its own, or that of its store.
pub fn file_of(image: &Path) -> PathBuf {
    Name::of(image).map_or_else(|| image.to_owned(), |object| object.store)
}

/// What a file or device holds, as far as that is easily known.
pub fn held(file: &File) -> anyhow::Result<Option<&'static str>> {
    let mut head = vec![0; signature::HEAD_BYTES];
    let mut len = 0;
    while len < head.len() {
        match file.read_at(&mut head[len..], len as u64)? {
            0 => break,
            got => len += got,
        }
    }
    Ok(signature::of(&head[..len]).map(|held| held.what))
}

/// The length of a file or device.
pub fn len_bytes(file: &File) -> anyhow::Result<u64> {
    Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?)
}

/// Refuses what cannot hold a volume.
fn usable(image: &Path, kind: std::fs::FileType) -> anyhow::Result<()> {
    let shown = image.display();
    if kind.is_dir() {
        bail!("{shown} is a directory; draconis format --from makes a volume of one");
    }
    if !kind.is_file() && !kind.is_block_device() {
        bail!("{shown} is neither a file nor a block device");
    }
    Ok(())
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

/// What an image's name led to: open, claimed, and not looked at.
pub enum Opened {
    /// A file or block device.
    File(OpenedFile),
    /// A disk in a store.
    InStore(Unopened),
}

impl Opened {
    /// The disk; who is to be confined is, by now.
    pub fn start(self) -> anyhow::Result<Arc<dyn Disk>> {
        match self {
            Self::File(file) => Ok(Arc::new(file.start())),
            Self::InStore(object) => object.start(),
        }
    }
}

/// Opens an image that must be there, to be changed, alone.
pub fn writable(image: &Path) -> anyhow::Result<Opened> {
    if let Some(name) = Name::of(image) {
        return name.alone().map(Opened::InStore);
    }
    let name = image.display();
    let missing = || format!("{name}: no such file; draconis format makes a volume");
    opened(alone(image)?.with_context(missing)?, image, true).map(Opened::File)
}

/// Opens an image that is only read beside one that is changed.
pub fn readable(image: &Path) -> anyhow::Result<Opened> {
    match Name::of(image) {
        Some(name) => name.shared().map(Opened::InStore),
        None => readable_file(image).map(Opened::File),
    }
}

fn readable_file(image: &Path) -> anyhow::Result<OpenedFile> {
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

/// Confines this process to what it has open, whose length it may change.
pub fn confine_resizer() -> anyhow::Result<()> {
    sandbox::confine(&Profile::Resizer, None)?;
    Ok(())
}

/// Confines this process to what it has open.
pub fn confine() -> anyhow::Result<()> {
    sandbox::confine(&Profile::Reader, None)?;
    Ok(())
}

/// Finds what a target names; the error names the target.
pub fn find(volume: &Volume, target: &Target, follow: Follow) -> anyhow::Result<InodeNumber> {
    volume.resolve(volume.root(), &target.path, follow).map_err(|error| tell(target, error))
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
                    say::complain(&tell(&label, damage.error));
                    listing.damaged = true;
                }
            }
            true
        })
        .map_err(|error| tell(&label, error))?;
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
