//! Opening the image that a command was given.

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::Args;
use draconis_access::destination::{Sources, refuse_output};
use draconis_access::image as by_path;
pub use draconis_access::image::{
    Behind, Opened, alone, claim_alone, held, len_bytes, parts_of, refused,
};
use draconis_access::image::{opened, usable};
pub use draconis_access::names::{Listed, Listing};
pub use draconis_access::object;
use draconis_access::object::{Name, Unopened};
use draconis_access::packed::packed;
use draconis_container::is_indexed;
use draconis_device::{Claim, Disk, claim};
use draconis_ext::{Follow, InodeNumber, Volume};
use draconis_service::options::MountOptions;
use draconis_service::sandbox::{self, Profile};
use draconis_service::volume::{self, Part, VolumeTree};
use rustix::io::Errno;

use crate::bucket;
use crate::change::tell;
use crate::progress::{Progress, When};
use crate::say;
use crate::target::Target;
use crate::text::size;
pub use draconis_access::held::clear;

/// Where in an image the volume is.
#[derive(Debug, Clone, Default, Args)]
pub struct Place {
    /// Start of the volume in IMAGE, in bytes (suffixes K, M, G).
    #[arg(long, value_name = "BYTES", value_parser = size, conflicts_with = "partition")]
    pub offset: Option<u64>,
    /// Use partition N of IMAGE, counted from 1.
    #[arg(long, value_name = "N")]
    pub partition: Option<u32>,
    /// Backing file of a differencing IMAGE (qcow2, VHDX, VHD, VMDK); repeat for the backing file
    /// of FILE. Paths stored in IMAGE are never opened. Also lists the extents of a multi-file
    /// VMDK, in order, if their names do not match IMAGE.
    #[arg(long, value_name = "FILE")]
    pub backing: Vec<PathBuf>,
}

impl Place {
    /// The same for what is not of the command line.
    pub fn by_path(&self) -> draconis_access::Place {
        let Self { offset, partition, backing } = self.clone();
        draconis_access::Place { offset_bytes: offset, partition, backing }
    }

    /// The same as mount options.
    pub fn options(&self) -> MountOptions {
        self.by_path().options()
    }
}

/// What a command reads that reads an image: no file that it writes may be one of these.
pub fn sources(image: &Path, place: &Place) -> Sources {
    let mut sources = Sources::of_image(image, &place.backing);
    bucket::journal_file().iter().for_each(|file| sources.add(file));
    sources
}

/// The disk in a store that an image is, if it is one: of a file, or in a bucket.
pub fn in_store(image: &Path) -> anyhow::Result<Option<Name>> {
    // A file of that name is that file.
    let Some(address) =
        bucket::address(image).filter(|_| std::fs::symlink_metadata(image).is_err())
    else {
        return Ok(Name::of(image));
    };
    match address.rsplit_once('#') {
        Some((store, name)) if !name.is_empty() => {
            Ok(Some(Name { store: bucket::normal(store).into(), name: name.to_owned() }))
        }
        _ => bail!("{address} is a store; {address}#NAME is a disk in it, store ls lists them"),
    }
}

/// Opens the store of a disk to be changed, alone.
pub fn alone_in(name: Name) -> anyhow::Result<Unopened> {
    name.may_be_opened(true)?;
    let Some(address) = bucket::address(&name.store) else { return name.alone() };
    let (disk, claim) = bucket::served(address, true)?;
    name.served(disk, true, claim)
}

/// Opens the store of a disk to be read, beside others who do.
fn shared_in(name: Name) -> anyhow::Result<Unopened> {
    let Some(address) = bucket::address(&name.store) else { return name.shared() };
    let (disk, claim) = bucket::served(address, false)?;
    name.served(disk, false, claim)
}

/// Opens an image that must be there, to be changed, alone.
pub fn writable(image: &Path) -> anyhow::Result<Opened> {
    refuse_output(image, &[])?;
    match in_store(image)? {
        Some(name) => alone_in(name).map(Opened::InStore),
        None => by_path::writable(image),
    }
}

/// Opens an image that is only read beside one that is changed.
pub fn readable(image: &Path) -> anyhow::Result<Opened> {
    refuse_output(image, &[])?;
    match in_store(image)? {
        Some(name) => shared_in(name).map(Opened::InStore),
        None => by_path::readable(image),
    }
}

/// Opens the volume in `image` and confines this process to reading it.
pub fn open(
    image: &Path,
    place: &Place,
    beneath: Option<BorrowedFd<'_>>,
) -> anyhow::Result<VolumeTree> {
    let disk = disk(image, place, beneath)?;
    tree(image, disk)
}

/// Opens the volume that is all of `disk`, which is in `image`.
pub fn tree(image: &Path, disk: Arc<dyn Disk>) -> anyhow::Result<VolumeTree> {
    let opened = volume::open_part(disk.clone(), &MountOptions::default());
    opened.map_err(|error| refused(image, &*disk, error))
}

/// The disk of [`part`].
pub fn disk(
    image: &Path,
    place: &Place,
    beneath: Option<BorrowedFd<'_>>,
) -> anyhow::Result<Arc<dyn Disk>> {
    part(image, place, beneath).map(|part| part.disk)
}

/// Opens the part of `image` that the volume is in, and confines this process: afterwards it
/// can read that, write to what is open, and create files in `beneath` if that is given.
pub fn part(image: &Path, place: &Place, beneath: Option<BorrowedFd<'_>>) -> anyhow::Result<Part> {
    let shown = image.display();
    refuse_output(image, &place.backing)?;
    let profile = match beneath {
        Some(beneath) => Profile::Extractor { beneath },
        None => Profile::Reader,
    };
    if let Some(name) = in_store(image)? {
        let store = shared_in(name)?;
        sandbox::confine(&profile, None)?;
        let part = volume::part(store.start()?, &[], &place.options());
        return part.with_context(|| shown.to_string());
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
    let behind = Behind::open(image, &place.backing)?;
    sandbox::confine(&profile, None)?;
    let start = |file| -> anyhow::Result<Arc<dyn Disk>> {
        Ok(Arc::new(opened(file, image, false)?.start()))
    };
    let whole = start(file)?;
    let whole = match packed {
        Some(packed) if !is_indexed(whole.clone()).with_context(|| shown.to_string())? => {
            let mut progress = Progress::endless(When::Auto);
            start(packed.unpack(image, &mut |bytes| progress.add(bytes))?)?
        }
        _ => whole,
    };
    let part = volume::part(whole, &behind.start(), &place.options());
    part.with_context(|| shown.to_string())
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
    draconis_access::names::names(volume, dir, label, &mut |error| say::complain(error))
}
