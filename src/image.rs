//! Opening the image that a command was given.

use std::os::fd::BorrowedFd;
use std::path::Path;

use draconis_exchange::contract::Kind;
use draconis_ext::{Follow, InodeNumber, Volume};
use draconis_service::image::open_confined;
use draconis_service::options::MountOptions;
use draconis_service::volume::VolumeTree;

use crate::cli::Place;
use crate::target::Target;

/// Opens the volume in `image` and confines this process to reading it.
pub fn open(
    image: &Path,
    place: Place,
    beneath: Option<BorrowedFd<'_>>,
) -> anyhow::Result<VolumeTree> {
    let options = MountOptions {
        offset_bytes: place.offset,
        partition: place.partition,
        ..MountOptions::default()
    };
    let tree = open_confined(image, &options, beneath).map_err(anyhow::Error::msg)?;
    let info = tree.volume().info();
    if info.truncated {
        log::warn!("{}: the image is shorter than its volume", image.display());
    }
    Ok(tree)
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
