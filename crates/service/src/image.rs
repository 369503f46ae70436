//! An image opened for a tool, in the tool's own process, which then gives its power away.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use draconis_device::{Claim, Disk, FileOptions, OpenedFile, claim};
use rustix::io::Errno;

use crate::options::MountOptions;
use crate::sandbox::{Profile, confine};
use crate::volume::{VolumeTree, open, part};

/// Opens the volume in `image` for reading and confines this process: afterwards it can
/// read the image, write to what is open, and create files in `beneath` if that is given.
///
/// # Errors
/// A sentence for the user.
pub fn open_confined(
    image: &Path,
    options: &MountOptions,
    beneath: Option<BorrowedFd<'_>>,
) -> Result<VolumeTree, String> {
    let disk = confined(image, beneath)?;
    open(disk, options).map_err(|error| format!("{}: {error}", image.display()))
}

/// Opens the part of `image` that `options` name, for whoever looks at its bytes, and
/// confines this process as [`open_confined`] does.
///
/// # Errors
/// A sentence for the user.
pub fn disk_confined(image: &Path, options: &MountOptions) -> Result<Arc<dyn Disk>, String> {
    let disk = confined(image, None)?;
    part(disk, options).map_err(|error| format!("{}: {error}", image.display()))
}

fn confined(image: &Path, beneath: Option<BorrowedFd<'_>>) -> Result<Arc<dyn Disk>, String> {
    let name = image.display();
    let file = std::fs::File::open(image).map_err(|error| format!("{name}: {error}"))?;
    claim(&file, Claim::Shared).map_err(|errno| match errno {
        Errno::WOULDBLOCK => format!("{name} is mounted or being changed; see draconis status"),
        other => format!("{name}: {other}"),
    })?;
    // Through the page cache: a tool runs once, and what it read may be asked for again.
    let how = FileOptions { write: false, direct: false, uring: false };
    let file = OpenedFile::new(file.into(), how).map_err(|error| format!("{name}: {error}"))?;
    let profile = match beneath {
        Some(beneath) => Profile::Extractor { beneath },
        None => Profile::Reader,
    };
    confine(&profile, None).map_err(|error| error.to_string())?;
    Ok(Arc::new(file.start()))
}
