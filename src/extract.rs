//! Extraction of files from a volume into a host directory.
//!
//! Law 1: nothing is created outside the destination, whatever names or links the volume holds.
//! Every path is opened beneath it without following symbolic links, and Landlock restricts the
//! process to that directory.
//! Law 2: what needs privileges to restore (owners, devices) is skipped, as with `cp`. Any other
//! failure to restore is reported and sets the exit status. An attribute that cannot be set keeps
//! no other from being set, and is reported once for all files.
//! Law 3: a file that is a source, mounted or attached to a loop device is never replaced. Another is
//! replaced once the new one is whole.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use draconis_access::destination::ReadSources;
use draconis_access::walk::FileChunk;
use draconis_types::path_bytes::ShowPath;
use draconis_types::{Attributes, FileType, Time};
use rustix::fs::{
    AtFlags, FileType as HostFileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid,
    XattrFlags,
};
use rustix::io::Errno;

use crate::edit::with_context;
use crate::new_file::NewFile;
use crate::progress::ByteProgress;
use crate::report;
use crate::text::escape_control_chars;

/// Maximum number of directories kept open.
const MAX_OPEN_DIRS: usize = 256;

/// A file of an extraction.
#[derive(Clone, Copy)]
pub struct ExtractionItem<'a> {
    /// Index of the item.
    pub at: usize,
    /// Path below the top; empty for the top itself.
    pub path: &'a [u8],
    /// Attributes to restore.
    pub attributes: &'a Attributes,
    /// Index of an earlier item with the same inode: this one is a hard link to it.
    pub link_to: Option<usize>,
    /// True for a directory that is only there for what is in it: it gets no attributes.
    pub is_implied: bool,
}

/// Names and values of extended attributes.
pub type XattrPairs = Vec<(Vec<u8>, Vec<u8>)>;

/// Source of an extraction. A directory precedes what is in it.
pub trait ExtractionSource {
    /// Returns the number of items.
    fn count(&self) -> usize;
    /// Returns an item.
    fn item(&self, at: usize) -> ExtractionItem<'_>;
    /// Returns the target of a symbolic link.
    fn read_link(&self, at: usize) -> Result<Vec<u8>, Errno>;
    /// Returns the extended attributes of an item.
    fn xattrs(&self, at: usize) -> Result<XattrPairs, Errno>;
}

/// Returns the directory to create in, and the name of the top there. As with `cp`, copies into
/// DEST if it is a directory, else as DEST. The root directory has no name and becomes
/// DEST. `own` is the name of the top in the volume.
pub fn split_destination(dest: &Path, own: &[u8]) -> anyhow::Result<(PathBuf, Vec<u8>)> {
    if dest.is_dir() {
        return Ok((dest.to_path_buf(), own.to_vec()));
    }
    let name = dest.file_name().with_context(|| format!("{}: not a name", dest.shown()))?;
    let parent = match dest.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => Path::new(".").to_path_buf(),
    };
    if !parent.is_dir() {
        bail!("{}: no such directory", parent.shown());
    }
    Ok((parent, name.as_bytes().to_vec()))
}

/// An extraction below a directory that is open.
pub struct TreeExtraction<'a> {
    source: &'a dyn ExtractionSource,
    root: OwnedFd,
    /// Path of `root`, for messages.
    parent: PathBuf,
    /// Name of the top beneath `root`; empty if it is `root` itself.
    name: Vec<u8>,
    sources: ReadSources,
    is_root: bool,
    dirs: HashMap<Vec<u8>, Arc<OwnedFd>>,
    /// Contents of all files, in the order of the plan.
    pieces: Box<dyn Iterator<Item = FileChunk> + 'a>,
    /// True if existing files are replaced.
    replaces: bool,
    progress: ByteProgress,
    /// Attributes that could not be set, by what they are.
    unset: BTreeMap<&'static str, UnsetAttribute>,
    /// True if something was not restored.
    pub failed: bool,
    /// True once the destination is full, which ends the extraction.
    is_full: bool,
}

/// An open directory beneath the destination, and a name in it.
struct DestPath {
    dir: Arc<OwnedFd>,
    name: Vec<u8>,
}

/// An attribute that files could not be given.
struct UnsetAttribute {
    /// The first file, and why.
    first: String,
    errno: Errno,
    /// Number of other files.
    more: u64,
}

/// Returns true if the destination takes nothing more.
fn is_full(errno: Errno) -> bool {
    matches!(errno, Errno::NOSPC | Errno::DQUOT | Errno::ROFS)
}

/// Reason why a file was not created.
enum CreateError {
    System(Errno),
    /// An existing file with this name must not be replaced.
    Refused(anyhow::Error),
}

impl From<Errno> for CreateError {
    fn from(errno: Errno) -> Self {
        Self::System(errno)
    }
}

/// Destination of an extraction.
pub struct ExtractionDest {
    /// The directory to create in.
    root: OwnedFd,
    /// Its path.
    parent: PathBuf,
    /// Name of the top in it; empty if it is the top itself.
    name: Vec<u8>,
    /// Files that must not be replaced.
    sources: ReadSources,
    /// True if other existing files are replaced.
    pub replaces: bool,
    /// True if this process may give files to any owner.
    is_root: bool,
}

impl ExtractionDest {
    /// Opens `parent`, before the process is confined.
    pub fn open(parent: PathBuf, name: Vec<u8>, sources: ReadSources) -> anyhow::Result<Self> {
        let root = rustix::fs::open(&parent, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .with_context(|| parent.shown().to_string())?;
        sources.refuse_source_as_destination(&parent.join(OsStr::from_bytes(&name)))?;
        let is_root = rustix::process::geteuid().is_root();
        rustix::process::umask(Mode::empty());
        Ok(Self { root, parent, name, sources, replaces: true, is_root })
    }
}

impl ExtractionDest {
    /// Returns true if a file is there with the size and the time of modification of an item: an
    /// extraction sets the time last.
    pub fn has_complete_file(&self, item: ExtractionItem<'_>) -> bool {
        let path = crate::target::join_path(&self.name, item.path);
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve) else {
            return false;
        };
        let Ok(found) = rustix::fs::fstat(&file) else { return false };
        let Time { seconds, nanoseconds } = item.attributes.modified;
        HostFileType::from_raw_mode(found.st_mode) == HostFileType::RegularFile
            && u64::try_from(found.st_size) == Ok(item.attributes.size_bytes)
            && (found.st_mtime, found.st_mtime_nsec as u32) == (seconds, nanoseconds)
    }
}

impl<'a> TreeExtraction<'a> {
    /// Prepares an extraction. `pieces` are the contents of all files, in the order of the plan.
    pub fn new(
        source: &'a dyn ExtractionSource,
        dest: ExtractionDest,
        pieces: impl Iterator<Item = FileChunk> + 'a,
        progress: ByteProgress,
    ) -> Self {
        let ExtractionDest { root, parent, name, sources, replaces, is_root } = dest;
        Self {
            source,
            root,
            parent,
            name,
            sources,
            is_root,
            dirs: HashMap::new(),
            pieces: Box::new(pieces),
            replaces,
            progress,
            unset: BTreeMap::new(),
            failed: false,
            is_full: false,
        }
    }

    /// Creates all items in the order of `plan`.
    pub fn copy_all(&mut self, plan: &[usize]) {
        for &at in plan {
            if self.is_full {
                break;
            }
            let item = self.source.item(at);
            let has_pieces = item.attributes.kind == FileType::File && item.link_to.is_none();
            if let Err(failure) = self.extract_item(item) {
                match failure {
                    CreateError::System(errno) => {
                        self.report_error(item, "cannot be created", errno)
                    }
                    CreateError::Refused(error) => {
                        self.failed = true;
                        report::print_error(&error);
                    }
                }
                if has_pieces {
                    while let Some(FileChunk::Data(..)) = self.pieces.next() {}
                }
            }
        }
        // Sets modes and times of directories last, deepest first: a read-only directory cannot be
        // filled, and filling a directory changes its time.
        for &at in plan.iter().rev() {
            let item = self.source.item(at);
            if item.attributes.kind == FileType::Directory
                && !item.is_implied
                && let Err(errno) = self.set_dir_attributes(item)
                // Directories that were not reached do not exist.
                && !self.is_full
            {
                self.report_error(item, "attributes cannot be set", errno);
            }
        }
        self.report_unset();
    }

    /// Notes whether an attribute was set; returns true if it was.
    fn note(
        &mut self,
        item: ExtractionItem<'_>,
        what: &'static str,
        set: Result<(), Errno>,
    ) -> bool {
        let Err(errno) = set else { return true };
        if is_full(errno) {
            self.report_error(item, "attributes cannot be set", errno);
            return false;
        }
        self.failed = true;
        match self.unset.get_mut(what) {
            Some(unset) => unset.more += 1,
            None => {
                let first = self.display_path(item);
                self.unset.insert(what, UnsetAttribute { first, errno, more: 0 });
            }
        }
        false
    }

    fn report_unset(&mut self) {
        for (what, UnsetAttribute { first, errno, more }) in std::mem::take(&mut self.unset) {
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let text = format!("{first}{more}: copied without the {what}");
            report::print_error(&anyhow::Error::from(errno).context(text));
        }
    }

    fn report_error(&mut self, item: ExtractionItem<'_>, what: &str, errno: Errno) {
        self.failed = true;
        self.is_full |= is_full(errno);
        let path = self.display_path(item);
        let is_last = !self.is_full || self.source.count() == 1;
        let rest = if is_last { "" } else { "; stopped, what follows is not copied" };
        report::print_error(&anyhow::Error::from(errno).context(format!("{path}: {what}{rest}")));
    }

    /// Returns the path of an item for messages.
    fn display_path(&self, item: ExtractionItem<'_>) -> String {
        let path = self.host_path(item);
        let path = escape_control_chars(path.strip_suffix(b"/").unwrap_or(&path));
        self.parent.join(path).shown().to_string()
    }

    fn host_path(&self, item: ExtractionItem<'_>) -> Vec<u8> {
        crate::target::join_path(&self.name, item.path)
    }

    fn dest_path(&mut self, item: ExtractionItem<'_>) -> Result<DestPath, Errno> {
        let path = self.host_path(item);
        let path = path.strip_suffix(b"/").unwrap_or(&path);
        let cut = path.iter().rposition(|&b| b == b'/');
        let (dir, name) = cut.map_or((&b""[..], path), |cut| (&path[..cut], &path[cut + 1..]));
        Ok(DestPath { dir: self.open_dir(dir)?, name: name.to_vec() })
    }

    fn open_dir(&mut self, path: &[u8]) -> Result<Arc<OwnedFd>, Errno> {
        if let Some(open) = self.dirs.get(path) {
            return Ok(open.clone());
        }
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let name = if path.is_empty() { b"." } else { path };
        let open = Arc::new(rustix::fs::openat2(&self.root, name, flags, Mode::empty(), resolve)?);
        if self.dirs.len() >= MAX_OPEN_DIRS {
            self.dirs.clear();
        }
        self.dirs.insert(path.to_vec(), open.clone());
        Ok(open)
    }

    /// Calls `create` with a name. An existing file is replaced, but not by part of another.
    fn create_replacing(
        &self,
        item: ExtractionItem<'_>,
        there: &DestPath,
        mut create: impl FnMut(&[u8]) -> Result<(), Errno>,
    ) -> Result<(), CreateError> {
        match create(&there.name) {
            Err(Errno::EXIST) => {
                self.check_replaceable(item, there)?;
                let new = NewFile::begin(there.dir.clone(), |part| create(part.as_bytes()))?;
                Ok(new.publish(&there.name, true)?)
            }
            created => Ok(created?),
        }
    }

    /// Refuses to replace an existing directory, a source, a file in use, and any existing file if
    /// none is to be replaced.
    fn check_replaceable(
        &self,
        item: ExtractionItem<'_>,
        there: &DestPath,
    ) -> Result<(), CreateError> {
        let nofollow = AtFlags::SYMLINK_NOFOLLOW;
        let found = match rustix::fs::statat(&there.dir, &there.name[..], nofollow) {
            Err(Errno::NOENT) => return Ok(()),
            found => found?,
        };
        if !self.replaces {
            return Err(self.refuse_existing(item));
        }
        if HostFileType::from_raw_mode(found.st_mode) == HostFileType::Directory {
            return Err(Errno::ISDIR.into());
        }
        let shown = self.display_path(item);
        let refused = self.sources.refuse_source_as_destination_at(&there.dir, &there.name, &shown);
        refused.map_err(CreateError::Refused)
    }

    fn refuse_existing(&self, item: ExtractionItem<'_>) -> CreateError {
        let shown = self.display_path(item);
        CreateError::Refused(anyhow!("{shown}: exists already; it was not replaced"))
    }

    fn extract_item(&mut self, item: ExtractionItem<'_>) -> Result<(), CreateError> {
        if item.path.is_empty() && self.name.is_empty() {
            return Ok(());
        }
        let there = self.dest_path(item)?;
        if let Some(first) = item.link_to {
            let target = self.dest_path(self.source.item(first))?;
            return self.create_replacing(item, &there, |name| {
                let (from, to) = (&target.dir, &there.dir);
                rustix::fs::linkat(from, &target.name[..], to, name, AtFlags::empty())
            });
        }
        let attributes = item.attributes;
        let private = Mode::from_raw_mode(0o600);
        match attributes.kind {
            FileType::Directory => {
                // The others become readable once their attributes are set.
                let mode = if item.is_implied { Mode::from_raw_mode(0o755) } else { Mode::RWXU };
                match rustix::fs::mkdirat(&there.dir, &there.name[..], mode) {
                    // An existing directory is fine, but not a symbolic link to one.
                    Err(Errno::EXIST) => {
                        let path = self.host_path(item);
                        Ok(self.open_dir(&path).map(drop)?)
                    }
                    made => Ok(made?),
                }
            }
            FileType::File => self.extract_file(item, &there),
            FileType::Symlink => {
                let target = self.source.read_link(item.at)?;
                self.create_replacing(item, &there, |name| {
                    rustix::fs::symlinkat(&target[..], &there.dir, name)
                })?;
                self.set_attributes_by_name(item, &there);
                Ok(())
            }
            kind => {
                let device = rustix::fs::makedev(attributes.device.0, attributes.device.1);
                let file_type = match kind {
                    FileType::CharDevice => HostFileType::CharacterDevice,
                    FileType::BlockDevice => HostFileType::BlockDevice,
                    FileType::Socket => HostFileType::Socket,
                    _ => HostFileType::Fifo,
                };
                self.create_replacing(item, &there, |name| {
                    rustix::fs::mknodat(&there.dir, name, file_type, private, device)
                })?;
                self.set_attributes_by_name(item, &there);
                Ok(())
            }
        }
    }

    fn extract_file(
        &mut self,
        item: ExtractionItem<'_>,
        there: &DestPath,
    ) -> Result<(), CreateError> {
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let private = Mode::from_raw_mode(0o600);
        self.check_replaceable(item, there)?;
        let mut made = None;
        let new = NewFile::begin(there.dir.clone(), |part| {
            made = Some(rustix::fs::openat(&there.dir, part, flags, private)?);
            Ok(())
        })?;
        let Some(file) = made else { return Err(Errno::IO.into()) };
        let (mut failed, mut end) = (None, 0);
        while let Some(piece) = self.pieces.next() {
            match piece {
                FileChunk::Data(offset, data) => {
                    end = offset + data.len() as u64;
                    if failed.is_none() {
                        failed = write_at(&file, offset, &data).err();
                    }
                    if failed == Some(Errno::NOSPC) {
                        break;
                    }
                    self.progress.add(data.len() as u64);
                }
                FileChunk::End(read) => {
                    if let Err(error) = read {
                        self.failed = true;
                        report::print_error(&with_context(&self.display_path(item), error));
                    }
                    break;
                }
            }
        }
        if let Some(errno) = failed {
            self.report_error(item, "cannot be written", errno);
            return Ok(());
        }
        if end != item.attributes.size_bytes {
            // Sets the length, for a hole at the end or unreadable contents.
            rustix::fs::ftruncate(&file, item.attributes.size_bytes)?;
        }
        self.set_file_attributes(item, &file);
        match new.publish(&there.name, self.replaces) {
            Err(Errno::EXIST) if !self.replaces => Err(self.refuse_existing(item)),
            published => Ok(published?),
        }
    }

    fn set_dir_attributes(&mut self, item: ExtractionItem<'_>) -> Result<(), Errno> {
        let path = self.host_path(item);
        let dir = self.open_dir(path.strip_suffix(b"/").unwrap_or(&path))?;
        self.set_file_attributes(item, &*dir);
        Ok(())
    }

    /// Sets owner, xattrs, mode and times, in an order in which none undoes another.
    fn set_file_attributes(&mut self, item: ExtractionItem<'_>, file: impl AsFd) {
        let attributes = item.attributes;
        let mut mode = attributes.mode & 0o7777;
        let has_owner = self.is_root && {
            let (uid, gid) = (Uid::from_raw(attributes.uid), Gid::from_raw(attributes.gid));
            self.note(item, "owner", rustix::fs::fchown(&file, Some(uid), Some(gid)))
        };
        if !has_owner && attributes.kind == FileType::File {
            // Without the owner, setuid and setgid would apply to the wrong user.
            mode &= 0o1777;
        }
        if !attributes.no_xattrs {
            self.set_xattrs(item, &file);
        }
        self.note(item, "mode", rustix::fs::fchmod(&file, Mode::from_raw_mode(mode)));
        self.note(item, "times", rustix::fs::futimens(&file, &timestamps_of(attributes)));
    }

    fn set_xattrs(&mut self, item: ExtractionItem<'_>, file: impl AsFd) {
        let all = match self.source.xattrs(item.at) {
            Ok(all) => all,
            Err(errno) => {
                return self.report_error(item, "extended attributes cannot be read", errno);
            }
        };
        let set = |(name, value): &(Vec<u8>, Vec<u8>)| {
            match rustix::fs::fsetxattr(&file, &name[..], value, XattrFlags::empty()) {
                // Some xattrs need root, and some file systems have none.
                Err(Errno::PERM | Errno::OPNOTSUPP) if !self.is_root => Ok(()),
                set => set,
            }
        };
        let set: Vec<_> = all.iter().map(set).collect();
        let failed = set.into_iter().find(Result::is_err).unwrap_or(Ok(()));
        self.note(item, "extended attributes", failed);
    }

    /// Sets owner, mode and times of a file that is not opened.
    fn set_attributes_by_name(&mut self, item: ExtractionItem<'_>, there: &DestPath) {
        let attributes = item.attributes;
        let nofollow = AtFlags::SYMLINK_NOFOLLOW;
        let name = &there.name[..];
        if self.is_root {
            let (uid, gid) = (Uid::from_raw(attributes.uid), Gid::from_raw(attributes.gid));
            let set = rustix::fs::chownat(&there.dir, name, Some(uid), Some(gid), nofollow);
            self.note(item, "owner", set);
        }
        if attributes.kind != FileType::Symlink {
            let mode = Mode::from_raw_mode(attributes.mode & 0o7777);
            let set = rustix::fs::chmodat(&there.dir, name, mode, AtFlags::empty());
            self.note(item, "mode", set);
        }
        let times = timestamps_of(attributes);
        self.note(item, "times", rustix::fs::utimensat(&there.dir, name, &times, nofollow));
    }
}

fn write_at(file: impl AsFd, offset: u64, data: &[u8]) -> Result<(), Errno> {
    let mut put = 0;
    while put < data.len() {
        match rustix::io::pwrite(&file, &data[put..], offset + put as u64) {
            Ok(0) => return Err(Errno::IO),
            Ok(n) => put += n,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn timestamps_of(attributes: &Attributes) -> Timestamps {
    let time = |time: Time| Timespec { tv_sec: time.seconds, tv_nsec: time.nanoseconds.into() };
    Timestamps {
        last_access: time(attributes.accessed),
        last_modification: time(attributes.modified),
    }
}
