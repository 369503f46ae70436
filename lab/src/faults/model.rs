//! Model of a directory in which every call is executed exactly once.

use std::collections::BTreeMap;

/// Object of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NamedObject {
    /// A file, by index.
    File(usize),
    /// An empty directory, and its inode number.
    Directory(u64),
    /// A symbolic link, and its target.
    Link(String),
}

/// A file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ModelFile {
    pub(super) inode: u64,
    pub(super) links: u64,
    pub(super) mode: u32,
    pub(super) bytes: Vec<u8>,
    pub(super) note: Option<Vec<u8>>,
}

/// Model of a directory.
#[derive(Debug, Default)]
pub(super) struct TreeModel {
    pub(super) names: BTreeMap<String, NamedObject>,
    pub(super) files: Vec<ModelFile>,
}

impl TreeModel {
    /// Removes a name, possibly the last one of a file.
    pub(super) fn remove_name(&mut self, name: &str) {
        if let Some(NamedObject::File(file)) = self.names.remove(name) {
            self.files[file].links -= 1;
        }
    }

    /// Returns the `nth` (modulo their count) of the names that `which` accepts.
    pub(super) fn pick_name(
        &self,
        nth: u64,
        which: impl Fn(&NamedObject) -> bool,
    ) -> Option<String> {
        let liked: Vec<&String> =
            self.names.iter().filter(|(_, named)| which(named)).map(|(name, _)| name).collect();
        let nth = nth.checked_rem(liked.len() as u64)?;
        liked.get(nth as usize).map(|name| name.to_string())
    }
}
