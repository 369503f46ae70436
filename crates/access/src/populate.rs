//! Sources for filling a new volume: a directory, tar archives, a container image.
//!
//! ```text
//!   directory ───────────────────────────scan──▶ Tree + paths
//!   image ──digests──▶ layers ─┐
//!   archives ──────────────────┴─scan, merge──▶ Tree + places in archives, packed or not
//! ```
//! Law 1: a scan records names and positions; contents are read when they are written.
//! Law 2: nothing is decompressed to the disk of this machine, except input from a pipe or an
//! image inside a compressed archive: these go to an unnamed temporary file.
//! Law 3: every item that is skipped is reported in the notes.

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
use draconis_ext::mkfs::{FileSource, NodeId, Tree, TreeNode};
use draconis_types::Time;

use crate::destination::ReadSources;
use crate::messages::escape_control_chars;

/// A tree and the reader of its files' contents.
pub struct PopulateSource<'a> {
    /// The tree.
    pub tree: Tree,
    /// Reader of the contents.
    pub contents: Box<dyn FileSource + 'a>,
    /// Directories that the source does not describe, created as parents of other entries.
    pub implied_dirs: HashSet<NodeId>,
    /// Hard links to targets outside the source, and the paths of the targets, which may be on the
    /// volume that the source is copied into.
    pub outside: HashMap<NodeId, Vec<u8>>,
    /// Notes for the user: skipped items, and entries that are probably unintended.
    pub notes: Vec<String>,
    /// Files that could not be read, or changed while they were read.
    pub faults: Arc<ReadFaults>,
}

impl<'a> PopulateSource<'a> {
    /// Creates a source whose directories are all described.
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

    /// Returns all nodes, each once, however many names it has.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> {
        let mut stack = vec![NodeId::ROOT];
        let mut seen = HashSet::new();
        std::iter::from_fn(move || {
            let id = stack.pop()?;
            stack.extend(self.tree.names(id).map(|(_, id)| id).filter(|id| seen.insert(*id)));
            Some(id)
        })
    }

    /// Returns the path and target of a hard link to a target outside the source, if there is one.
    pub fn first_outside_link(&self) -> Option<(String, String)> {
        let found = self.nodes().find_map(|id| Some((id, self.outside.get(&id)?)));
        found.map(|(id, target)| (self.tree.path(id), escape_control_chars(target)))
    }
}

/// Rules for the timestamps of scanned nodes.
#[derive(Clone, Copy)]
pub struct TimestampPolicy {
    /// Creation time of the volume.
    pub now: Time,
    /// Limits all times to `now`, and takes only `modified` from the source.
    pub reproducible: bool,
}

impl TimestampPolicy {
    /// Sets the times of a node; times that the source does not know become `modified`.
    fn set_times(
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

/// Sources to scan, and options.
pub struct ScanRequest<'a> {
    /// A directory, or archives and images; later ones are laid over earlier ones.
    pub from: &'a [SourceSpec],
    /// Paths to include from a directory; all if `None`.
    pub list: Option<&'a [Vec<u8>]>,
    /// Patterns of names to exclude.
    pub exclude: &'a ExcludePatterns,
    /// Options for reading archives and images.
    pub image_options: ImageOptions<'a>,
    /// Keeps the owners in archives; otherwise everything in them belongs to root.
    pub keep_owners: bool,
    /// Root directory, used if the source does not describe it.
    pub root: TreeNode,
    /// Timestamp rules.
    pub stamp: TimestampPolicy,
}

/// Result of a scan.
pub struct ScanResult {
    /// The tree.
    pub source: PopulateSource<'static>,
    /// Configuration of the last container image.
    pub config: Option<Vec<u8>>,
}

/// Scans the requested sources.
///
/// # Errors
/// A source cannot be read, or is not of the format that it claims.
pub fn scan_source(wanted: ScanRequest<'_>) -> anyhow::Result<ScanResult> {
    let ScanRequest { from, list, exclude, image_options, keep_owners, root, stamp } = wanted;
    sources_to_protect(from).refuse_source_as_destination(image_options.temp_dir_of)?;
    if let [SourceSpec::Path(path)] = from
        && path.is_dir()
    {
        let mut source = directory::scan_directory_tree(
            path,
            image_options.temp_dir_of,
            root,
            stamp,
            exclude,
            list,
        )?;
        source.notes.extend(image_hint(from, &source.tree));
        return Ok(ScanResult { source, config: None });
    }
    ensure!(list.is_none(), "a list of files is for one directory");
    let mut all = vec![];
    let mut config = None;
    for origin in from {
        let found = origin.open_archives(&image_options)?;
        all.extend(found.layers);
        config = found.config.or(config);
    }
    // In a single plain archive, whiteout names are ordinary names.
    let several = all.len() > 1;
    all.iter_mut().for_each(|layer| layer.whiteouts |= several);
    let mut source = layers::scan_layers(all, root, stamp, keep_owners, image_options.limit)?;
    source.notes.extend(image_hint(from, &source.tree));
    transform::remove_excluded(&mut source.tree, exclude);
    Ok(ScanResult { source, config })
}

/// Returns the archives and images to read. A directory that contains the new image is legal.
pub fn sources_to_protect(from: &[SourceSpec]) -> ReadSources {
    let mut sources = ReadSources::new();
    for origin in from.iter().filter(|origin| !origin.is_directory()) {
        match origin.path() {
            Some(path) => sources.add(&path),
            None => sources.add_input(),
        }
    }
    sources
}

/// Suggests the right prefix if the files of a container image are taken as plain files.
fn image_hint(from: &[SourceSpec], tree: &Tree) -> Option<String> {
    let [only @ (SourceSpec::Path(_) | SourceSpec::Stdin)] = from else { return None };
    let has = |name: &[u8]| tree.lookup(NodeId::ROOT, name).is_some();
    // An image that was saved by digest has no repositories.
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
pub use device_table::DeviceTable;
pub use digest::BlobDigest;
pub use directory::{FileScan, scan_files};
pub use fill::{DerivedFields, FillOptions, scan_sources_and_derive};
pub use image::{ImageKind, ImageOptions, OCI_REF_NAME_ANNOTATION};
pub use lengths::{ReadFaults, changed_file_message, metadata_fingerprint};
pub use platform::ImagePlatform;
pub use source_spec::SourceSpec;
pub use temp_file::temporary_file;
pub use transform::{ExcludePatterns, PathPattern};

/// Items that a scan skips, reported once for each kind.
#[derive(Default)]
pub struct SkippedItems {
    kinds: std::collections::BTreeSet<String>,
    /// Messages, in the order of their first occurrence.
    pub notes: Vec<String>,
}

impl SkippedItems {
    /// Records that `what` of `path` is skipped.
    pub fn record_skipped(&mut self, what: &str, path: &dyn std::fmt::Display) {
        if self.kinds.insert(what.to_owned()) {
            self.notes.push(format!("{path}: {what} left out, and wherever else it is"));
        }
    }
}
