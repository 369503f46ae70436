//! Where the files of a new volume come from: a directory, tar archives, a container image.
//!
//! ```text
//!   directory ───────────────────────────scan──▶ Tree + paths
//!   image ──digests──▶ layers ─┐
//!   archives ──────────────────┴─scan, merge──▶ Tree + places in archives, packed or not
//! ```
//! Law 1: a scan remembers names and places; contents are read when they are written.
//! Law 2: nothing is unpacked on this machine, but what comes through a pipe or is an image
//! inside a packed archive: that is kept in a file without a name.
//! Law 3: what is left out is told in notes.

pub(crate) mod acl;
mod blob;
mod device_table;
mod digest;
mod directory;
mod fill;
mod image;
mod layers;
mod lengths;
pub(crate) mod libarchive_xattr;
mod merge;
mod platform;
mod source_spec;
mod tar;
mod temp_file;
mod transform;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use anyhow::ensure;
use draconis_exchange::contract::Time;
use draconis_ext::mkfs::{FileSource, NodeId, Tree, TreeNode};

use crate::destination::Sources;
use crate::messages::printable;

/// A tree and where the contents of its files are.
pub struct Source<'a> {
    /// The tree.
    pub tree: Tree,
    /// What reads the contents.
    pub contents: Box<dyn FileSource + 'a>,
    /// Directories that the source does not describe: they are only on the way to others.
    pub implied_dirs: HashSet<NodeId>,
    /// Hard links to what the source does not have, and the paths of their targets: they may be
    /// on the volume that the source is put into.
    pub outside: HashMap<NodeId, Vec<u8>>,
    /// What a user should know: what is left out, and what may not be meant.
    pub notes: Vec<String>,
    /// What could not be read, or changed while it was read.
    pub faults: Arc<Faults>,
}

impl<'a> Source<'a> {
    /// A tree whose directories are all described.
    pub fn new(tree: Tree, contents: impl FileSource + 'a) -> Self {
        Self {
            tree,
            contents: Box::new(contents),
            implied_dirs: HashSet::new(),
            outside: HashMap::new(),
            notes: vec![],
            faults: Arc::default(),
        }
    }

    /// All nodes, each once, whatever names it has.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> {
        let mut stack = vec![NodeId::ROOT];
        let mut seen = HashSet::new();
        std::iter::from_fn(move || {
            let id = stack.pop()?;
            stack.extend(self.tree.names(id).map(|(_, id)| id).filter(|id| seen.insert(*id)));
            Some(id)
        })
    }

    /// The path and the target of a hard link to what the source does not have, if there is one.
    pub fn outside_link(&self) -> Option<(String, String)> {
        let found = self.nodes().find_map(|id| Some((id, self.outside.get(&id)?)));
        found.map(|(id, target)| (self.tree.path(id), printable(target)))
    }
}

/// What scans are told beforehand.
#[derive(Clone, Copy)]
pub struct TimestampPolicy {
    /// When the volume is made.
    pub now: Time,
    /// No time is later than `now`, and only `modified` comes from the source.
    pub reproducible: bool,
}

impl TimestampPolicy {
    /// Gives a node its times; what the source does not know becomes `modified`.
    fn set(
        &self,
        node: &mut TreeNode,
        modified: Time,
        accessed: Option<Time>,
        changed: Option<Time>,
    ) {
        if self.reproducible {
            let modified = modified.min(self.now);
            (node.modified, node.accessed, node.changed) = (modified, modified, modified);
        } else {
            node.modified = modified;
            node.accessed = accessed.unwrap_or(modified);
            node.changed = changed.unwrap_or(modified);
        }
        node.created = self.now;
    }
}

/// What is scanned, and how.
pub struct ScanRequest<'a> {
    /// A directory, or archives and images, later ones over earlier ones.
    pub from: &'a [SourceSpec],
    /// Of a directory, only these.
    pub list: Option<&'a [Vec<u8>]>,
    /// What is left out.
    pub exclude: &'a Patterns,
    /// How archives and images are read.
    pub choice: ImageOptions<'a>,
    /// Takes the owners that archives name; otherwise everything in them is root's.
    pub keep_owners: bool,
    /// The root directory, where the source does not describe it.
    pub root: TreeNode,
    /// When.
    pub stamp: TimestampPolicy,
}

/// What was found.
pub struct ScanResult {
    /// The tree.
    pub source: Source<'static>,
    /// The configuration of the last image.
    pub config: Option<Vec<u8>>,
}

/// Scans everything that is wanted.
///
/// # Errors
/// A source cannot be read, or is not what it claims to be.
pub fn scan(wanted: ScanRequest<'_>) -> anyhow::Result<ScanResult> {
    let ScanRequest { from, list, exclude, choice, keep_owners, root, stamp } = wanted;
    sources(from).refuse(choice.temp_dir_of)?;
    if let [SourceSpec::Path(path)] = from
        && path.is_dir()
    {
        let mut source = directory::scan(path, choice.temp_dir_of, root, stamp, exclude, list)?;
        source.notes.extend(image_hint(from, &source.tree));
        return Ok(ScanResult { source, config: None });
    }
    ensure!(list.is_none(), "a list of files is for one directory");
    let mut all = vec![];
    let mut config = None;
    for origin in from {
        let found = origin.archives(&choice)?;
        all.extend(found.layers);
        config = found.config.or(config);
    }
    // One archive alone is taken as it is, whatever its names look like.
    let several = all.len() > 1;
    all.iter_mut().for_each(|layer| layer.whiteouts |= several);
    let mut source = layers::scan(all, root, stamp, keep_owners, choice.limit)?;
    source.notes.extend(image_hint(from, &source.tree));
    transform::exclude(&mut source.tree, exclude);
    Ok(ScanResult { source, config })
}

/// The archives and images that are read. Of a directory, the image that is made is left out.
pub fn sources(from: &[SourceSpec]) -> Sources {
    let mut sources = Sources::new();
    for origin in from.iter().filter(|origin| !origin.is_directory()) {
        match origin.path() {
            Some(path) => sources.add(&path),
            None => sources.add_input(),
        }
    }
    sources
}

/// Says what to write where a container image is taken as the files that it is kept in.
fn image_hint(from: &[SourceSpec], tree: &Tree) -> Option<String> {
    let [only @ (SourceSpec::Path(_) | SourceSpec::Stdin)] = from else { return None };
    let has = |name: &[u8]| tree.lookup(NodeId::ROOT, name).is_some();
    // An image that was saved by its digest has no repositories.
    let has_layers = || {
        let mut names = tree.names(NodeId::ROOT);
        names.any(|(_, id)| tree.lookup(id, b"layer.tar").is_some())
    };
    let kind = if has(b"oci-layout") && has(b"index.json") {
        if only.is_directory() { "oci" } else { "oci-archive" }
    } else if has(b"manifest.json")
        && !only.is_directory()
        && (has(b"repositories") || has_layers())
    {
        "docker-archive"
    } else {
        return None;
    };
    let named =
        if matches!(only, SourceSpec::Stdin) { "FILE".to_owned() } else { only.to_string() };
    Some(format!(
        "{only} is a container image, taken as the files that it is kept in; {kind}:{named} takes \
         what it holds"
    ))
}

pub use blob::Blob;
pub use device_table::Table;
pub use digest::Digest;
pub use directory::{FileScan, scan_files};
pub use fill::{DerivedFields, FillOptions, fill};
pub use image::{ImageKind, ImageOptions, REF_NAME};
pub use lengths::{Faults, changed, fingerprint};
pub use platform::Platform;
pub use source_spec::SourceSpec;
pub use temp_file::temporary_file;
pub use transform::Patterns;

/// What a scan leaves out, told once for each kind of it.
#[derive(Default)]
pub struct SkippedItems {
    kinds: std::collections::BTreeSet<String>,
    /// In words, in the order in which it was met.
    pub notes: Vec<String>,
}

impl SkippedItems {
    /// Notes that `what` of `path` is left out.
    pub fn record(&mut self, what: &str, path: &dyn std::fmt::Display) {
        if self.kinds.insert(what.to_owned()) {
            self.notes.push(format!("{path}: {what} left out, and wherever else it is"));
        }
    }
}
