//! The names in a directory, as lists and walks want them.

use draconis_exchange::contract::FileType;
pub use draconis_ext::split;
use draconis_ext::{InodeNumber, Volume};

use crate::messages::{ErrorSink, with_context};

/// The names in a directory, sorted, without `.` and `..`; damage is told and left out.
///
/// # Errors
/// What the volume says of `dir`.
pub fn names(
    volume: &Volume,
    dir: InodeNumber,
    label: &str,
    complain: ErrorSink<'_>,
) -> anyhow::Result<Listing> {
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
                    complain(&with_context(&label, damage.error));
                    listing.damaged = true;
                }
            }
            true
        })
        .map_err(|error| with_context(&label, error))?;
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
    pub kind: Option<FileType>,
}

/// A path and a name below it.
pub fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let slash: &[u8] = if dir.ends_with(b"/") || dir.is_empty() { b"" } else { b"/" };
    [dir, slash, name].concat()
}
