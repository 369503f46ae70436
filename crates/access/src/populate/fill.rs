//! Options for filling a new volume: sources, and changes to their files.

use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, bail};
use draconis_ext::mkfs::{FileSource, FormatOptions, NodeId, NodeKind, Tree, TreeNode};
use draconis_types::Time;
use draconis_types::path_bytes::ShowPath;

use super::device_table::{DeviceTable, apply_table};
use super::transform::{newest_mtime, set_owner, set_times, squash_perms};
use super::{
    BlobDigest, ExcludePatterns, ImageOptions, PopulateSource, ScanRequest, ScanResult, SourceSpec,
    TimestampPolicy, scan_source,
};

/// Upper limit of all times.
const MAX_TIME: Time = Time { seconds: i64::MAX, nanoseconds: 0 };

/// Sources of a volume and changes to their files.
pub struct FillOptions<'a> {
    /// A directory, or archives and images, later ones over earlier ones; none for an empty volume.
    pub from: &'a [SourceSpec],
    /// Paths to include from a directory; all if `None`.
    pub list: Option<&'a [Vec<u8>]>,
    /// Patterns of names to exclude.
    pub exclude: &'a ExcludePatterns,
    /// Options for reading archives and images.
    pub image_options: ImageOptions<'a>,
    /// Owner of all files, instead of their own.
    pub owner: Option<(u32, u32)>,
    /// Makes root the owner of all files.
    pub squash: bool,
    /// Clears the permissions of group and others.
    pub squash_perms: bool,
    /// Device table and its path.
    pub table: Option<(&'a DeviceTable, &'a Path)>,
    /// Limits times to that of the volume, and takes only the modification time from the source.
    pub clamp_times: bool,
    /// Equal sources give equal bytes, on any machine and at any time.
    pub reproducible: Option<DerivedFields>,
}

/// Fields of the volume that are derived from its tree.
#[derive(Clone, Copy, Default, Debug)]
pub struct DerivedFields {
    /// Creation time: that of the newest file.
    pub time: bool,
    /// UUID.
    pub uuid: bool,
    /// Seed of directory hashes.
    pub hash_seed: bool,
}

/// Scans the sources; stores derived fields in `options`.
///
/// # Errors
/// A source cannot be read, or is not of the format that it claims; a table does not fit the tree.
pub fn scan_sources_and_derive(
    filling: FillOptions<'_>,
    options: &mut FormatOptions,
) -> anyhow::Result<ScanResult> {
    let FillOptions {
        from,
        list,
        exclude,
        image_options: choice,
        owner,
        table,
        clamp_times,
        reproducible,
        ..
    } = filling;
    let made = Time { seconds: i64::from(options.time), nanoseconds: 0 };
    // The time of the newest file is known only after the scan.
    let by_newest = reproducible.is_some_and(|follows| follows.time);
    let now = if by_newest { MAX_TIME } else { made };
    let mut stamp = TimestampPolicy { now, reproducible: clamp_times || reproducible.is_some() };
    let mut root = TreeNode::new(NodeKind::Directory, 0o755).with_all_times(if by_newest {
        Time::default()
    } else {
        now
    });
    (root.uid, root.gid) = options.root_owner;
    let keep_owners = owner.is_none() && !filling.squash;
    let mut found = match from {
        [] => ScanResult { source: PopulateSource::new(Tree::new(root), NoContents), config: None },
        from => scan_source(ScanRequest {
            from,
            list,
            exclude,
            image_options: choice,
            keep_owners,
            root,
            stamp,
        })?,
    };
    let source = &mut found.source;
    if let Some((path, target)) = source.first_outside_link() {
        bail!("{path}: a hard link to {target}, which comes later in the archive or never");
    }
    if by_newest {
        stamp.now = newest_described_mtime(source);
        set_times(&mut source.tree, stamp);
        options.time = u32::try_from(stamp.now.seconds).unwrap_or(u32::MAX);
    }
    if let Some((uid, gid)) = owner {
        set_owner(&mut source.tree, uid, gid);
    } else if filling.squash {
        set_owner(&mut source.tree, 0, 0);
    }
    if filling.squash_perms {
        squash_perms(&mut source.tree);
    }
    if let Some((table, named)) = table {
        let laid = apply_table(source, table, stamp);
        laid.with_context(|| named.shown().to_string())?;
    }
    if let Some(follows) = reproducible {
        derive_ids(follows, options, &source.tree);
    }
    Ok(found)
}

/// Returns the newest time of described nodes; implied directories have none.
fn newest_described_mtime(source: &mut PopulateSource<'_>) -> Time {
    for id in &source.implied_dirs {
        if let Some(node) = source.tree.node_mut(*id) {
            *node = node.clone().with_all_times(Time::default());
        }
    }
    let newest = newest_mtime(&mut source.tree).max(Time::default());
    for id in &source.implied_dirs {
        if let Some(node) = source.tree.node_mut(*id) {
            *node = node.clone().with_all_times(newest);
        }
    }
    Time { nanoseconds: 0, ..newest }
}

/// Derives UUID and hash seed from names, lengths, times, owners and attributes.
fn derive_ids(follows: DerivedFields, options: &mut FormatOptions, tree: &Tree) {
    use std::fmt::Write as _;
    let mut sums = String::new();
    let mut dirs = vec![NodeId::ROOT];
    let mut text = String::new();
    while let Some(dir) = dirs.pop() {
        text.clear();
        for (name, id) in tree.names(dir) {
            let node = tree.node(id);
            let length = match &node.kind_data {
                NodeKind::File { size_bytes, .. } => *size_bytes,
                NodeKind::Directory => {
                    dirs.push(id);
                    0
                }
                _ => 0,
            };
            let Time { seconds, nanoseconds } = node.modified;
            let (kind, mode, owner) = (node.kind_data.kind(), node.mode, (node.uid, node.gid));
            let _ =
                write!(text, "{name:?} {kind:?} {mode} {owner:?} {length} {seconds}.{nanoseconds}");
            for (name, value) in node.attributes() {
                let _ = write!(text, " {name:?}={value:?}");
            }
            text.push('\n');
        }
        // Chained, so that memory does not grow with the tree.
        sums = BlobDigest::of_bytes(format!("{sums}{text}").as_bytes()).to_string();
    }
    let uuid = |what: &str| -> [u8; 16] {
        let sum = BlobDigest::sha256(format!("{what} {sums}").as_bytes());
        let mut bytes: [u8; 16] = std::array::from_fn(|at| sum[at]);
        // A UUID of version 8: custom.
        bytes[6] = bytes[6] & 0x0F | 0x80;
        bytes[8] = bytes[8] & 0x3F | 0x80;
        bytes
    };
    if follows.uuid {
        options.uuid = uuid("volume");
    }
    if follows.hash_seed {
        options.hash_seed = uuid("names");
    }
}

/// Contents of an empty volume.
struct NoContents;

impl FileSource for NoContents {
    fn read(&self, _: u64, _: u64, _: &mut [u8]) -> std::io::Result<()> {
        Err(ErrorKind::NotFound.into())
    }
}
