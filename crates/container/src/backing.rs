//! What an image differs from: others, one behind the other, of which it holds only what is not theirs.
//!
//! ```text
//!   image ── says a name and an identity ──▶ the file that was given: is it that one? ──▶ its own ..
//! ```
//! Law 1: a name that an image says is shown, and never opened.
//! Law 2: an image goes with each file that is given, so a circle of names has an end.

use std::sync::Arc;

use draconis_device::Disk;

use crate::image_file::ImageFile;
use crate::image_map::ImageMap;
use crate::{Error, Format, Unsupported, open, vhd, vhdx, vmdk};

/// What an image says of the one that it differs from.
pub(crate) struct BackingFile {
    /// How it is called.
    pub(crate) name: String,
    pub(crate) is: BackingId,
}

/// Which file that is.
pub(crate) enum BackingId {
    /// Any, taken as it is.
    Raw,
    /// Any.
    Any,
    /// An image of this format that says that it is one of these.
    One(Format, Vec<String>),
}

/// The disk that `map` differs from: in the first of the files `behind` it, over the others.
pub(crate) fn open_backing_chain(
    map: &impl ImageMap,
    behind: &[Arc<dyn Disk>],
) -> Result<Option<Arc<dyn Disk>>, Error> {
    let Some(BackingFile { name, is }) = map.behind() else { return Ok(None) };
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

/// By what an image of a format is known, if that is what a file holds.
fn identity(format: Format, file: &ImageFile) -> Result<Option<String>, Error> {
    match format {
        Format::Vhd => vhd::identity(file),
        Format::Vhdx => vhdx::identity(file),
        Format::Vmdk => vmdk::identity(file),
        _ => Ok(None),
    }
}

/// Of a name that is shown.
const MAX_NAME_CHARS: usize = 1024;

/// A text in UTF-16, up to its end or the first zero, or as far as it is shown.
pub(crate) fn utf16(bytes: &[u8], number: fn([u8; 2]) -> u16) -> String {
    let numbers = bytes.chunks_exact(2).filter_map(|pair| pair.try_into().ok()).map(number);
    let text: Vec<u16> = numbers.take_while(|unit| *unit != 0).take(MAX_NAME_CHARS).collect();
    String::from_utf16_lossy(&text)
}

#[cfg(test)]
mod tests;
