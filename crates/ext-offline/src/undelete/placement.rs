//! One tree of names for deleted files.
//!
//! Law 1: each file has a path of its own. Of several with one path, the first in the order of
//! [`super::DeletedFiles::files`] has it; to the name of another, `~` and its inode are added.
//! Law 2: each name is one that a directory may have; names of damaged volumes are changed.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use draconis_types::FileType;

use super::DeletedFile;
use crate::dir::MAX_NAME_BYTES;

/// A file of a tree, or a directory that is only there for what is in it.
#[derive(Debug)]
pub struct PlacedFile<'a> {
    /// Name in its directory; empty for the root directory.
    pub name: Vec<u8>,
    /// Index of its directory.
    pub parent: usize,
    /// The deleted file.
    pub file: Option<&'a DeletedFile>,
    /// Index of the file's first name, for another hard link.
    pub link_to: Option<usize>,
    children: BTreeMap<Vec<u8>, usize>,
}

impl PlacedFile<'_> {
    /// Returns the names in a directory with their indices, sorted.
    pub(super) fn children(&self) -> impl Iterator<Item = (&[u8], usize)> {
        self.children.iter().map(|(name, nth)| (&name[..], *nth))
    }
}

/// Deleted files in a tree. The root directory has index 0, and each directory a lower index than
/// what is in it.
#[derive(Debug)]
pub struct DeletedTree<'a> {
    places: Vec<PlacedFile<'a>>,
    /// Next number for each name with an inode that was already taken.
    taken: HashMap<(usize, Vec<u8>), u32>,
}

impl<'a> DeletedTree<'a> {
    /// Places files under these of their names, with the directories above them. An older directory
    /// is merged into a newer one of its path. A further name that is taken is left out.
    pub fn new(files: &[(&'a DeletedFile, Vec<&[u8]>)]) -> Self {
        let root = PlacedFile {
            name: vec![],
            parent: 0,
            file: None,
            link_to: None,
            children: BTreeMap::new(),
        };
        let mut tree = Self { places: vec![root], taken: HashMap::new() };
        // All directories come first, so that no file has the name of one.
        let mut parents = vec![];
        for (file, names) in files {
            let names: Vec<_> = names.iter().map(|path| tree.parent(path, file)).collect();
            parents.push(names.into_iter());
        }
        let mut later = vec![];
        for ((file, _), mut names) in files.iter().zip(parents) {
            let Some((parent, name)) = names.next() else { continue };
            let first = tree.place(file, parent, &name);
            later.extend(names.map(|link| (*file, first, link)));
        }
        for (file, first, (parent, name)) in later {
            if tree.child(parent, &name).is_none() {
                let nth = tree.add(parent, name.into_owned(), Some(file));
                tree.places.get_mut(nth).into_iter().for_each(|it| it.link_to = Some(first));
            }
        }
        tree
    }

    /// Returns the files and directories.
    pub fn places(&self) -> &[PlacedFile<'a>] {
        &self.places
    }

    /// Returns the path of a file without a slash at its beginning.
    pub fn path(&self, nth: usize) -> Vec<u8> {
        let mut names = vec![];
        let mut at = nth;
        while let Some(place) = self.places.get(at).filter(|_| at != 0) {
            names.push(&place.name[..]);
            at = place.parent;
        }
        names.reverse();
        names.join(&b'/')
    }

    /// Adds the directories above a path; returns the last, and the name of the file.
    fn parent<'p>(&mut self, path: &'p [u8], file: &DeletedFile) -> (usize, Cow<'p, [u8]>) {
        let mut names = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty());
        let Some(last) = names.next_back() else {
            return (0, format!("#{}", file.inode.0).into_bytes().into());
        };
        let mut at = 0;
        for name in names {
            let name = valid_name(name);
            at = match self.child(at, &name) {
                Some(child) => child,
                None => self.add(at, name.into_owned(), None),
            };
        }
        (at, valid_name(last))
    }

    /// Places a file; returns its index, or that of the directory it is merged into.
    fn place(&mut self, file: &'a DeletedFile, parent: usize, name: &[u8]) -> usize {
        let is_dir = file.attributes.kind == FileType::Directory;
        let Some(nth) = self.child(parent, name) else {
            return self.add(parent, name.to_vec(), Some(file));
        };
        match self.places.get_mut(nth) {
            Some(same @ PlacedFile { file: None, .. }) if is_dir => same.file = Some(file),
            Some(PlacedFile { file: Some(other), .. })
                if is_dir && other.attributes.kind == FileType::Directory => {}
            _ => {
                let name = self.free_name(parent, name, file.inode.0);
                return self.add(parent, name, Some(file));
            }
        }
        nth
    }

    fn free_name(&mut self, parent: usize, name: &[u8], inode: u32) -> Vec<u8> {
        loop {
            let numbered = with_suffix(name, &format!("~{inode}"));
            let next = self.taken.entry((parent, numbered.clone())).or_default();
            let nth = std::mem::replace(next, next.saturating_add(1));
            let name =
                if nth == 0 { numbered } else { with_suffix(name, &format!("~{inode}.{nth}")) };
            if self.child(parent, &name).is_none() {
                return name;
            }
        }
    }

    fn child(&self, parent: usize, name: &[u8]) -> Option<usize> {
        self.places.get(parent)?.children.get(name).copied()
    }

    fn add(&mut self, parent: usize, name: Vec<u8>, file: Option<&'a DeletedFile>) -> usize {
        let nth = self.places.len();
        if let Some(dir) = self.places.get_mut(parent) {
            dir.children.insert(name.clone(), nth);
        }
        self.places.push(PlacedFile {
            name,
            parent,
            file,
            link_to: None,
            children: BTreeMap::new(),
        });
        nth
    }
}

/// Returns a name with a suffix, within the length of a name.
fn with_suffix(name: &[u8], suffix: &str) -> Vec<u8> {
    let len = name.len().min(MAX_NAME_BYTES.saturating_sub(suffix.len()));
    [name.get(..len).unwrap_or_default(), suffix.as_bytes()].concat()
}

/// Returns a name that a directory may have.
fn valid_name(name: &[u8]) -> Cow<'_, [u8]> {
    match name {
        b"." | b".." => [b"#", name].concat().into(),
        _ if name.len() > MAX_NAME_BYTES || name.contains(&0) => {
            let name = name.iter().take(MAX_NAME_BYTES);
            name.map(|byte| if *byte == 0 { b'?' } else { *byte }).collect::<Vec<_>>().into()
        }
        _ => name.into(),
    }
}
