//! Backing files: the chain of images that hold the blocks an image lacks.
//!
//! ```text
//!   image ── name and identity ──▶ the given file: identity checked ──▶ its own backing file ..
//! ```
//! Law 1: backing file names are only displayed. The caller opens the files and passes them in.
//! Law 2: each image takes one of the given files, so a cycle of names ends.

pub(crate) mod reference;

use std::sync::Arc;

use draconis_device::Disk;

use self::reference::{BackingFile, BackingId};
use crate::image_file::ImageFile;
use crate::image_map::ImageMap;
use crate::{Error, Format, UnsupportedFeature, open, vhd, vhdx, vmdk};

/// Opens the backing file of `map`: the first of the files `behind`, over the others.
pub(crate) fn open_backing_chain(
    map: &impl ImageMap,
    behind: &[Arc<dyn Disk>],
) -> Result<Option<Arc<dyn Disk>>, Error> {
    let Some(BackingFile { name, id: is }) = map.backing_file() else { return Ok(None) };
    let Some((next, rest)) = behind.split_first() else {
        return Err(UnsupportedFeature::NeedsBacking(name.clone()).into());
    };
    match is {
        BackingId::Raw => return Ok(Some(next.clone())),
        BackingId::Any => {}
        BackingId::One(format, wanted) => {
            let found = backing_identity(*format, &ImageFile::new(next.clone()))?;
            if !found.as_ref().is_some_and(|found| wanted.contains(found)) {
                let found = found.unwrap_or_else(|| format!("no {}", format.name()));
                let wanted = wanted.join(" or ");
                return Err(
                    UnsupportedFeature::WrongBacking { name: name.clone(), wanted, found }.into()
                );
            }
        }
    }
    Ok(Some(open(next.clone(), rest)?.disk))
}

/// Returns the identity of an image of this format, if the file is one.
fn backing_identity(format: Format, file: &ImageFile) -> Result<Option<String>, Error> {
    match format {
        Format::Vhd => vhd::read_identity(file),
        Format::Vhdx => vhdx::data_guid(file),
        Format::Vmdk => vmdk::read_identity(file),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests;
