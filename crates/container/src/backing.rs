//! Backing files: the chain of images that hold the blocks an image lacks.
//!
//! ```text
//!   image ── name and identity ──▶ the given file: identity checked ──▶ its own backing file ..
//! ```
//! Law 1: backing file names are only displayed. The caller opens the files and passes them in.
//! Law 2: each image takes one of the given files, so a cycle of names ends.

use std::sync::Arc;

use draconis_device::Disk;

use crate::image_file::ImageFile;
use crate::image_map::ImageMap;
use crate::{Error, Format, Unsupported, open, vhd, vhdx, vmdk};

/// Reference of an image to its backing file.
pub(crate) struct BackingFile {
    /// Name, as the image has it.
    pub(crate) name: String,
    pub(crate) id: BackingId,
}

/// Identity of a backing file.
pub(crate) enum BackingId {
    /// Any file, as a raw disk.
    Raw,
    /// Any format.
    Any,
    /// An image of this format with one of these identities.
    One(Format, Vec<String>),
}

/// Opens the backing file of `map`: the first of the files `behind`, over the others.
pub(crate) fn open_backing_chain(
    map: &impl ImageMap,
    behind: &[Arc<dyn Disk>],
) -> Result<Option<Arc<dyn Disk>>, Error> {
    let Some(BackingFile { name, id: is }) = map.backing_file() else { return Ok(None) };
    let Some((next, rest)) = behind.split_first() else {
        return Err(Unsupported::NeedsBacking(name.clone()).into());
    };
    match is {
        BackingId::Raw => return Ok(Some(next.clone())),
        BackingId::Any => {}
        BackingId::One(format, wanted) => {
            let found = identity(*format, &ImageFile::new(next.clone()))?;
            if !found.as_ref().is_some_and(|found| wanted.contains(found)) {
                let found = found.unwrap_or_else(|| format!("no {}", format.name()));
                let wanted = wanted.join(" or ");
                return Err(Unsupported::WrongBacking { name: name.clone(), wanted, found }.into());
            }
        }
    }
    Ok(Some(open(next.clone(), rest)?.disk))
}

/// Returns the identity of an image of this format, if the file is one.
fn identity(format: Format, file: &ImageFile) -> Result<Option<String>, Error> {
    match format {
        Format::Vhd => vhd::identity(file),
        Format::Vhdx => vhdx::identity(file),
        Format::Vmdk => vmdk::identity(file),
        _ => Ok(None),
    }
}

/// Maximum length of a displayed name.
const MAX_NAME_CHARS: usize = 1024;

/// Decodes UTF-16 up to its end or the first zero, at most [`MAX_NAME_CHARS`] characters.
pub(crate) fn utf16(bytes: &[u8], number: fn([u8; 2]) -> u16) -> String {
    let numbers = bytes.chunks_exact(2).filter_map(|pair| pair.try_into().ok()).map(number);
    let text: Vec<u16> = numbers.take_while(|unit| *unit != 0).take(MAX_NAME_CHARS).collect();
    String::from_utf16_lossy(&text)
}

#[cfg(test)]
mod tests;
