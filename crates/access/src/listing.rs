//! Sorted directory listings.

pub use draconis_ext::split_parent;
use draconis_ext::{InodeNumber, Volume};
use draconis_types::FileType;

use crate::messages::{ErrorSink, with_context};

/// Returns the names in a directory, sorted, without `.` and `..`. Reports damage and skips it.
///
/// # Errors
/// The directory cannot be read.
pub fn list_directory(
    volume: &Volume,
    dir: InodeNumber,
    label: &str,
    complain: ErrorSink<'_>,
) -> anyhow::Result<DirectoryListing> {
    let mut listing = DirectoryListing::default();
    volume
        .entries(dir, Default::default(), false, |found| {
            match found {
                Ok(entry) => listing.names.push(ListedName {
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

/// A directory listing.
#[derive(Default)]
pub struct DirectoryListing {
    /// Names, sorted by their bytes.
    pub names: Vec<ListedName>,
    /// True if some names could not be read.
    pub damaged: bool,
}

/// A name in a directory.
pub struct ListedName {
    /// The name.
    pub name: Vec<u8>,
    /// Inode number.
    pub inode: InodeNumber,
    /// File type, if the dirent has it.
    pub kind: Option<FileType>,
}

/// Joins a path and a name.
pub fn join_path(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let slash: &[u8] = if dir.ends_with(b"/") || dir.is_empty() { b"" } else { b"/" };
    [dir, slash, name].concat()
}
