//! Scanning a host directory into a tree.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use draconis_ext::mkfs::{FileSource, NodeId, NodeKind, Tree, TreeNode};
use draconis_types::Time;
use draconis_types::path_bytes::{ShowPath, escape_non_utf8};
use rustix::fs::{OFlags, SeekFrom};
use rustix::io::Errno;

use super::lengths::{self, ReadFaults, SpooledFiles, metadata_fingerprint};
use super::{ExcludePatterns, PopulateSource, SkippedItems, TimestampPolicy};
use crate::image::container_file;
use crate::messages::escape_control_chars;

/// Maximum number of unreadable files that a message lists.
const MAX_LISTED_UNREADABLE: usize = 20;

/// Scanned files by number, below the top directory.
#[derive(Default)]
struct FileTable {
    top: PathBuf,
    /// Directory of each file as an index into `dirs`, and the end of its name in `names`. The name
    /// is empty if the entry in `dirs` is the file itself.
    files: Vec<(u32, u32)>,
    /// Names, concatenated.
    names: Vec<u8>,
    dirs: Vec<PathBuf>,
    /// Fingerprint of each file's metadata at the time of the scan.
    fingerprints: Vec<u64>,
    /// Contents of files of unknown length.
    spooled: SpooledFiles,
    faults: Arc<ReadFaults>,
}

impl FileTable {
    /// Adds a file and returns its number.
    fn add_file(&mut self, dir: u32, name: &[u8], found: &Metadata) -> anyhow::Result<u64> {
        self.names.extend_from_slice(name);
        let end = u32::try_from(self.names.len()).context("too many names")?;
        self.files.push((dir, end));
        self.fingerprints.push(metadata_fingerprint(found));
        Ok(self.files.len() as u64 - 1)
    }

    fn file_path(&self, source: u64) -> Option<PathBuf> {
        let nth = usize::try_from(source).ok()?;
        let (dir, end) = self.files.get(nth)?;
        let start = nth.checked_sub(1).and_then(|before| self.files.get(before));
        let name = self.names.get(start.map_or(0, |it| it.1 as usize)..*end as usize)?;
        let dir = self.dirs.get(*dir as usize)?;
        let dir = self.top.join(dir);
        Some(if name.is_empty() { dir } else { dir.join(OsStr::from_bytes(name)) })
    }
}

impl FileSource for FileTable {
    fn read(&self, source: u64, at_bytes: u64, into: &mut [u8]) -> std::io::Result<()> {
        if let Some(read) = self.spooled.read(source, at_bytes, into) {
            return read;
        }
        let path = self.file_path(source).ok_or(std::io::ErrorKind::NotFound)?;
        let file = open(&path)?;
        let got = read_up_to(&file, into, at_bytes)?;
        let rest = into.get_mut(got..).unwrap_or_default();
        rest.fill(0);
        let end = (!rest.is_empty()).then_some(at_bytes + got as u64);
        let before = usize::try_from(source).ok().and_then(|nth| self.fingerprints.get(nth));
        if end.is_some() || before.copied() != Some(metadata_fingerprint(&file.metadata()?)) {
            self.faults.record_changed(source, &path, end);
        }
        Ok(())
    }
}

/// Fills `into` from byte `at` on, up to the end of the file; returns the bytes read.
fn read_up_to(file: &File, into: &mut [u8], at: u64) -> std::io::Result<usize> {
    let mut filled = 0;
    while let Some(rest) = into.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, at + filled as u64) {
            Ok(0) => break,
            Ok(got) => filled += got,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// Opens a file with O_NOATIME where that is allowed.
fn open(path: &Path) -> std::io::Result<File> {
    let flags = |more: OFlags| (OFlags::NOFOLLOW | OFlags::NONBLOCK | more).bits() as i32;
    let quiet = File::options().read(true).custom_flags(flags(OFlags::NOATIME)).open(path);
    match quiet {
        Err(error) if error.raw_os_error() == Some(Errno::PERM.raw_os_error()) => {
            File::options().read(true).custom_flags(flags(OFlags::empty())).open(path)
        }
        opened => opened,
    }
}

struct DirectoryScan<'a> {
    tree: Tree,
    files: FileTable,
    stamp: TimestampPolicy,
    /// Nodes with several hard links, by device and inode.
    seen: HashMap<(u64, u64), NodeId>,
    /// Devices of file systems whose `st_size` equals the readable length.
    exact_size_devices: HashSet<u64>,
    /// Image that is being created, which is excluded from its own contents.
    image: Option<(u64, u64)>,
    /// Path in whose directory temporary files are created.
    beside: &'a Path,
    left_out: SkippedItems,
    exclude: &'a ExcludePatterns,
    /// User ID of this process.
    user: u32,
    /// Files that this user may not read.
    unreadable: Vec<PathBuf>,
}

/// Scans everything below `top`.
pub fn scan_directory_tree(
    top: &Path,
    image: &Path,
    mut root: TreeNode,
    stamp: TimestampPolicy,
    exclude: &ExcludePatterns,
    list: Option<&[Vec<u8>]>,
) -> anyhow::Result<PopulateSource<'static>> {
    let shown = || top.shown().to_string();
    let found = std::fs::metadata(top).with_context(shown)?;
    let mut left_out = SkippedItems::default();
    set_metadata(&mut root, &found, stamp);
    read_xattrs(&mut root, top, &mut left_out).with_context(shown)?;
    let mut scan = DirectoryScan::new(top, image, root, stamp, exclude);
    scan.left_out = left_out;
    match list {
        Some(list) => scan.scan_listed(list)?,
        None => scan.scan_subdirectories(vec![(PathBuf::new(), NodeId::ROOT)])?,
    }
    scan.check_readable()?;
    let faults = scan.files.faults.clone();
    Ok(PopulateSource {
        notes: scan.left_out.notes,
        faults,
        ..PopulateSource::new(scan.tree, scan.files)
    })
}

/// Host files to copy into a volume, and options.
#[derive(Clone, Copy)]
pub struct FileScan<'a> {
    /// Files and directories to copy.
    pub sources: &'a [PathBuf],
    /// New name of a single source.
    pub name: Option<&'a [u8]>,
    /// Copies directories recursively, and symbolic links as links.
    pub recursive: bool,
    /// Image that receives the copies.
    pub image: &'a Path,
}

/// Scans files and directories into an implied directory.
///
/// # Errors
/// A file cannot be read, or two have the same name.
pub fn scan_files(
    what: FileScan<'_>,
    stamp: TimestampPolicy,
) -> anyhow::Result<PopulateSource<'static>> {
    let root = TreeNode::new(NodeKind::Directory, 0o755).with_all_times(stamp.now);
    let all = ExcludePatterns::default();
    let mut scan = DirectoryScan::new(Path::new(""), what.image, root, stamp, &all);
    let mut stack = vec![];
    for source in what.sources {
        let shown = || source.shown().to_string();
        let found = match what.recursive {
            true => std::fs::symlink_metadata(source),
            false => std::fs::metadata(source),
        };
        let found = found.with_context(shown)?;
        ensure!(
            what.recursive || !found.is_dir(),
            "{} is a directory; -r copies it with all it holds",
            source.shown()
        );
        // As with `cp`, `DIR/.` copies the contents of DIR.
        let own = if source.as_os_str().as_bytes().ends_with(b"/.") {
            None
        } else {
            source.file_name().map(OsStrExt::as_bytes)
        };
        // Contents are opened with O_NOFOLLOW, so a link to follow is resolved here.
        let real = match std::fs::symlink_metadata(source).with_context(shown)?.is_symlink() {
            true if !what.recursive => std::fs::canonicalize(source).with_context(shown)?,
            _ => source.clone(),
        };
        let Some(name) = what.name.or(own) else {
            stack.push((real, NodeId::ROOT));
            continue;
        };
        ensure!(
            scan.tree.lookup(NodeId::ROOT, name).is_none(),
            "{}: another source has that name",
            source.shown()
        );
        let nth = u32::try_from(scan.files.dirs.len()).context("too many sources")?;
        scan.files.dirs.push(real.clone());
        let at = SourcePath { path: &real, dir_index: nth, name_there: b"" };
        let entry = scan.add_entry(at, &found, name, NodeId::ROOT).with_context(shown)?;
        stack.extend(entry.map(|id| (real, id)));
    }
    scan.scan_subdirectories(stack)?;
    scan.check_readable()?;
    let implied_dirs = HashSet::from([NodeId::ROOT]);
    let notes = scan.left_out.notes;
    let faults = scan.files.faults.clone();
    Ok(PopulateSource { implied_dirs, notes, faults, ..PopulateSource::new(scan.tree, scan.files) })
}

/// Host path of a scanned name.
#[derive(Clone, Copy)]
struct SourcePath<'a> {
    path: &'a Path,
    /// Index in the open directories.
    dir_index: u32,
    name_there: &'a [u8],
}

impl<'a> DirectoryScan<'a> {
    fn new(
        top: &Path,
        image: &'a Path,
        root: TreeNode,
        stamp: TimestampPolicy,
        exclude: &'a ExcludePatterns,
    ) -> Self {
        Self {
            tree: Tree::new(root),
            files: FileTable { top: top.to_path_buf(), ..FileTable::default() },
            stamp,
            seen: HashMap::new(),
            image: std::fs::metadata(container_file(image))
                .ok()
                .map(|found| (found.dev(), found.ino())),
            beside: image,
            exact_size_devices: HashSet::new(),
            left_out: SkippedItems::default(),
            exclude,
            user: rustix::process::geteuid().as_raw(),
            unreadable: vec![],
        }
    }

    /// Scans directories recursively.
    fn scan_subdirectories(&mut self, mut stack: Vec<(PathBuf, NodeId)>) -> anyhow::Result<()> {
        while let Some((dir, id)) = stack.pop() {
            self.scan_directory(dir, id, &mut stack)?;
        }
        Ok(())
    }

    /// Scans only the listed paths, and the directories above them.
    fn scan_listed(&mut self, list: &[Vec<u8>]) -> anyhow::Result<()> {
        let top = self.files.top.clone();
        for line in list {
            let shown = || escape_control_chars(line);
            let parts = super::merge::split_path(line).with_context(shown)?;
            ensure!(!line.starts_with(b"/"), "{}: names in a list begin in the directory", shown());
            let (mut at, mut dir) = (PathBuf::new(), NodeId::ROOT);
            for (name, left) in parts.iter().zip((0..parts.len()).rev()) {
                let above = at.clone();
                at.push(OsStr::from_bytes(name));
                if let Some(there) = self.tree.lookup(dir, name) {
                    dir = there;
                    continue;
                }
                let path = top.join(&at);
                let found = std::fs::symlink_metadata(&path);
                let found = found.with_context(|| path.shown().to_string())?;
                let nth = u32::try_from(self.files.dirs.len()).context("too many directories")?;
                self.files.dirs.push(above);
                let place = SourcePath { path: &path, dir_index: nth, name_there: name };
                let made = self.add_entry(place, &found, name, dir);
                match made.with_context(|| path.shown().to_string())? {
                    Some(made) => dir = made,
                    None if left > 0 && !found.is_dir() => {
                        bail!("{}: {} is no directory", escape_control_chars(line), path.shown())
                    }
                    // Not a directory, or excluded.
                    None => break,
                }
            }
        }
        Ok(())
    }

    /// Returns true if this user may read a file, by the effective IDs.
    fn is_file_readable(&self, path: &Path, found: &Metadata) -> bool {
        use rustix::fs::{Access, AtFlags, CWD, accessat};
        // Shortcut for the common case: an ACL cannot deny the owner what the mode grants.
        let is_owners = found.uid() == self.user && found.mode() & 0o400 != 0;
        is_owners
            || !matches!(accessat(CWD, path, Access::READ_OK, AtFlags::EACCESS), Err(Errno::ACCESS))
    }

    fn is_excluded(&self, dir: NodeId, name: &[u8], is_dir: bool) -> bool {
        !self.exclude.is_empty() && self.exclude.matches(&self.tree, dir, name, is_dir)
    }

    /// Refuses unreadable files before anything is written.
    fn check_readable(&self) -> anyhow::Result<()> {
        let Some(first) = self.unreadable.first() else { return Ok(()) };
        let others = self.unreadable.get(1..).unwrap_or_default();
        let named = others
            .iter()
            .take(MAX_LISTED_UNREADABLE)
            .map(|other| format!(", nor {}", other.shown()));
        let more = match others.len().saturating_sub(MAX_LISTED_UNREADABLE) {
            0 => String::new(),
            more => format!(", nor {more} others"),
        };
        bail!(
            "{}: this user may not read it{}{more}; --exclude leaves things out",
            first.shown(),
            named.collect::<String>()
        )
    }

    fn scan_directory(
        &mut self,
        dir: PathBuf,
        id: NodeId,
        stack: &mut Vec<(PathBuf, NodeId)>,
    ) -> anyhow::Result<()> {
        let path = self.files.top.join(&dir);
        let nth = u32::try_from(self.files.dirs.len()).context("too many directories")?;
        let entries = match std::fs::read_dir(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                self.unreadable.push(path);
                return Ok(());
            }
            entries => entries.with_context(|| path.shown().to_string())?,
        };
        let mut names = vec![];
        for entry in entries {
            names.push(entry.with_context(|| path.shown().to_string())?.file_name());
        }
        // Sorted, so that the result does not depend on the source file system.
        names.sort_unstable();
        for name in names {
            let path = path.join(&name);
            let shown = || path.shown().to_string();
            let found = std::fs::symlink_metadata(&path).with_context(shown)?;
            let at = SourcePath { path: &path, dir_index: nth, name_there: name.as_bytes() };
            let below = self.add_entry(at, &found, name.as_bytes(), id);
            if let Some(child) = below.with_context(shown)? {
                stack.push((dir.join(&name), child));
            }
        }
        self.files.dirs.push(dir);
        Ok(())
    }

    /// Returns the contents of a file; `None` if it cannot be read.
    fn scan_file(
        &mut self,
        at: SourcePath<'_>,
        found: &Metadata,
    ) -> anyhow::Result<Option<NodeKind>> {
        let source = self.files.add_file(at.dir_index, at.name_there, found)?;
        match self.spool_unknown_length(source, at.path, found) {
            Ok(None) => {
                let data = data_ranges(at.path, found)?;
                Ok(Some(NodeKind::File { size_bytes: found.size(), data, source }))
            }
            Ok(Some(size_bytes)) => {
                let data = if size_bytes > 0 { vec![(0, size_bytes)] } else { vec![] };
                Ok(Some(NodeKind::File { size_bytes, data, source }))
            }
            Err(error) => {
                let shown = at.path.shown();
                self.files.faults.record_unreadable(format!("{shown}: left out: {error:#}"));
                Ok(None)
            }
        }
    }

    /// Copies a file of unknown length to the temporary file, and returns its length.
    fn spool_unknown_length(
        &mut self,
        source: u64,
        path: &Path,
        found: &Metadata,
    ) -> anyhow::Result<Option<u64>> {
        if self.exact_size_devices.contains(&found.dev()) {
            return Ok(None);
        }
        if lengths::has_exact_sizes(path) {
            self.exact_size_devices.insert(found.dev());
            return Ok(None);
        }
        let mut file = open(path)?;
        match lengths::has_exact_size(&file, found)? {
            true => Ok(None),
            false => self.files.spooled.spool_file(source, &mut file, self.beside).map(Some),
        }
    }

    /// Adds one name; returns its node if it is a directory.
    fn add_entry(
        &mut self,
        at: SourcePath<'_>,
        found: &Metadata,
        name: &[u8],
        dir: NodeId,
    ) -> anyhow::Result<Option<NodeId>> {
        let path = at.path;
        let identity = (found.dev(), found.ino());
        if Some(identity) == self.image {
            self.left_out.record_skipped("the image itself is", &path.shown());
            return Ok(None);
        }
        let kind = found.file_type();
        if self.is_excluded(dir, name, kind.is_dir()) {
            return Ok(None);
        }
        let several = found.nlink() > 1 && !found.is_dir();
        if several && let Some(first) = self.seen.get(&identity) {
            self.tree.link(dir, name, *first)?;
            return Ok(None);
        }
        let device = (rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
        let what = if kind.is_dir() {
            NodeKind::Directory
        } else if kind.is_file() {
            // Reported now, before anything is written.
            if found.size() > 0 && !self.is_file_readable(path, found) {
                self.unreadable.push(path.to_path_buf());
                return Ok(None);
            }
            match self.scan_file(at, found)? {
                Some(what) => what,
                None => return Ok(None),
            }
        } else if kind.is_symlink() {
            NodeKind::Symlink(std::fs::read_link(path)?.as_os_str().as_bytes().to_vec())
        } else if kind.is_char_device() {
            NodeKind::CharDevice(device.0, device.1)
        } else if kind.is_block_device() {
            NodeKind::BlockDevice(device.0, device.1)
        } else if kind.is_fifo() {
            NodeKind::Fifo
        } else {
            NodeKind::Socket
        };
        let mut node = TreeNode::new(what, 0);
        set_metadata(&mut node, found, self.stamp);
        read_xattrs(&mut node, path, &mut self.left_out)?;
        let id = self.tree.add(dir, name, node)?;
        if several {
            self.seen.insert(identity, id);
        }
        Ok(kind.is_dir().then_some(id))
    }
}

fn set_metadata(node: &mut TreeNode, found: &Metadata, stamp: TimestampPolicy) {
    let time = |seconds, nanoseconds| Time {
        seconds,
        nanoseconds: u32::try_from(nanoseconds).unwrap_or(0),
    };
    node.mode = (found.mode() & 0o7777) as u16;
    (node.uid, node.gid) = (found.uid(), found.gid());
    stamp.set_times(
        node,
        time(found.mtime(), found.mtime_nsec()),
        Some(time(found.atime(), found.atime_nsec())),
        Some(time(found.ctime(), found.ctime_nsec())),
    );
}

/// Returns the data ranges of a file. Opens only files that may have holes.
fn data_ranges(path: &Path, found: &Metadata) -> std::io::Result<Vec<(u64, u64)>> {
    let size = found.size();
    if size == 0 {
        return Ok(vec![]);
    }
    if found.blocks().saturating_mul(512) >= size {
        return Ok(vec![(0, size)]);
    }
    let file = open(path)?;
    let mut data = vec![];
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            // The file system does not support holes.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(vec![(0, size)]),
            Err(errno) => return Err(errno.into()),
        };
        let end = rustix::fs::seek(&file, SeekFrom::Hole(start))?.min(size);
        if end <= start {
            break;
        }
        data.push((start, end));
        at = end;
    }
    Ok(data)
}

fn read_xattrs(
    node: &mut TreeNode,
    path: &Path,
    left_out: &mut SkippedItems,
) -> std::io::Result<()> {
    let mut list = [0; 4096];
    let len = match rustix::fs::llistxattr(path, &mut list[..]) {
        Ok(0) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(()),
        Ok(len) => len,
        Err(Errno::RANGE) => return read_long_xattrs(node, path, left_out),
        Err(errno) => return Err(errno.into()),
    };
    for_each_xattr(node, path, list.get(..len).unwrap_or_default(), left_out)
}

fn read_long_xattrs(
    node: &mut TreeNode,
    path: &Path,
    left_out: &mut SkippedItems,
) -> std::io::Result<()> {
    let mut list = vec![0; 65536];
    let len = rustix::fs::llistxattr(path, &mut list[..])?;
    for_each_xattr(node, path, list.get(..len).unwrap_or_default(), left_out)
}

fn for_each_xattr(
    node: &mut TreeNode,
    path: &Path,
    list: &[u8],
    left_out: &mut SkippedItems,
) -> std::io::Result<()> {
    let mut value = vec![0; 65536];
    for name in list.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let len = match rustix::fs::lgetxattr(path, name, &mut value[..]) {
            Ok(len) => len,
            // Removed meanwhile, or not readable by this user.
            Err(Errno::NODATA | Errno::PERM | Errno::ACCESS) => continue,
            Err(errno) => return Err(errno.into()),
        };
        if !node.set_xattr(name, value.get(..len).unwrap_or_default()) {
            let name = escape_non_utf8(name);
            left_out.record_skipped(&format!("the attribute {name} is"), &path.shown());
        }
    }
    Ok(())
}
