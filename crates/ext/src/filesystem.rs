//! A volume in an image with files named by paths, in the style of [`std::fs`].
//!
//! ```text
//!   FileSystem ──paths──▶ Volume::{resolve, resolve_parent, resolve_or_create} ──▶ inodes
//!       └── opens and locks the image, reads the system clock
//! ```
//!
//! Law 1: an error names the path.
//! Law 2: [`Volume`] defines which names are valid; this layer adds no rules.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use draconis_device::{Disk, FileDisk, FileOptions, Process};
use draconis_types::{Access, AttributeChange, Attributes, FileType, Time};

use crate::mkfs::{self, FileSource, FormatTarget, NodeKind, Tree, TreeNode};
use crate::{
    AccessTimes, Error, Follow, InodeNumber, NewNode, OpenOptions, RenameMode, Result, Volume,
    WriteOptions,
};

/// Limit of dirty data in memory, in bytes.
const MAX_DIRTY_BYTES: u64 = 64 << 20;
/// Size of one read, in bytes.
const IO_CHUNK_BYTES: usize = 1 << 20;

/// A volume with files named by paths, in the style of [`std::fs`]. Paths begin at its root; root
/// owns new files.
///
/// Changes stay in memory until [`FileSystem::sync`] or [`FileSystem::close`] returns. A crash
/// before that leaves a consistent, older state of the volume.
pub struct FileSystem {
    volume: Volume,
    /// The process that may use it: in its children other threads may have left locks.
    process: Process,
}

/// An entry of a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirEntry {
    path: PathBuf,
    name: OsString,
    kind: FileType,
}

impl DirEntry {
    /// Returns the name.
    pub fn file_name(&self) -> &OsStr {
        &self.name
    }

    /// Returns the path: the directory's path and the name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the file type; symbolic links are not followed.
    pub fn file_type(&self) -> FileType {
        self.kind
    }
}

impl FileSystem {
    /// Creates an image of `len_bytes` with an empty ext4 volume. The file must not exist.
    ///
    /// # Errors
    /// The file exists or cannot be created; the length is too small or too large.
    pub fn create(image: impl AsRef<Path>, len_bytes: u64) -> io::Result<Self> {
        let image = image.as_ref();
        let file = File::options().read(true).write(true).create_new(true).open(image);
        let made =
            file.and_then(|file| file.set_len(len_bytes)).map_err(|error| with_path(image, error));
        made?;
        let created =
            open_disk(image, true).and_then(|disk| Self::create_on(disk, &ext4_options(), true));
        if created.is_err() {
            // It holds no data.
            let _ = std::fs::remove_file(image);
        }
        created.map_err(|error| with_path(image, error))
    }

    /// Creates an empty volume on a disk and opens it. `zeroed` says that the disk reads as zeros.
    ///
    /// # Errors
    /// The options do not fit the disk; an error of the disk.
    pub fn create_on(
        disk: Arc<dyn Disk>,
        options: &mkfs::FormatOptions,
        zeroed: bool,
    ) -> io::Result<Self> {
        let mut tree = Tree::new(TreeNode::new(NodeKind::Directory, 0o755));
        let plan = mkfs::plan_for_size(options, &mut tree, disk.properties().len_bytes);
        let plan = plan.map_err(io::Error::other)?;
        let target = FormatTarget { disk: &disk, zeroed, progress: &|_| {} };
        mkfs::write(&plan, &EmptyFileSource, &target).map_err(io::Error::other)?;
        Self::open_on(disk)
    }

    /// Opens the volume in an image for reading and writing, exclusively.
    ///
    /// # Errors
    /// There is no volume, it is in use, or it is read-only.
    pub fn open(image: impl AsRef<Path>) -> io::Result<Self> {
        let image = image.as_ref();
        open_disk(image, true).and_then(Self::open_on).map_err(|error| with_path(image, error))
    }

    /// Opens the volume in an image for reading, shared with other readers.
    ///
    /// # Errors
    /// There is no volume, or it is open for writing.
    pub fn open_read_only(image: impl AsRef<Path>) -> io::Result<Self> {
        let image = image.as_ref();
        let open = |disk| Volume::open(disk, OpenOptions::default()).map_err(io_error);
        let volume =
            open_disk(image, false).and_then(open).map_err(|error| with_path(image, error))?;
        Ok(Self::new(volume))
    }

    /// Opens the volume on a disk for reading and writing.
    ///
    /// # Errors
    /// There is no volume, or it is read-only.
    pub fn open_on(disk: Arc<dyn Disk>) -> io::Result<Self> {
        let writing = WriteOptions {
            clock: Arc::new(now),
            dirty_bytes: MAX_DIRTY_BYTES,
            atime: AccessTimes::Never,
            discard: false,
        };
        let volume = Volume::open_for_writing(disk, OpenOptions::default(), writing);
        let volume = volume.map_err(io_error)?;
        match volume.read_only_reason() {
            None => Ok(Self::new(volume)),
            Some(why) => Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, why)),
        }
    }

    fn new(volume: Volume) -> Self {
        Self { volume, process: Process::current() }
    }

    /// Returns the volume, for operations that have no path-based method.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Creates a directory.
    ///
    /// # Errors
    /// The name exists, or its parent does not.
    pub fn create_dir(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let path = path.as_ref();
        self.create_inode(path, FileType::Directory, 0o755, b"")
            .map_err(|error| path_error(path, error))
    }

    /// Creates a directory and its missing parents; an existing directory is no error.
    ///
    /// # Errors
    /// A file that is not a directory has one of the names.
    pub fn create_dir_all(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let path = path.as_ref();
        // Find the deepest existing parent, then create the rest.
        let mut missing = vec![];
        for above in path.ancestors().filter(|above| !above.as_os_str().is_empty()) {
            match self.find(above, Follow::Yes).and_then(|found| self.volume.inode(found)) {
                Err(Error::NotFound) => missing.push(above),
                Ok(found) if found.kind == FileType::Directory => break,
                Ok(_) => return Err(path_error(above, Error::NotADirectory)),
                Err(error) => return Err(path_error(above, error)),
            }
        }
        for path in missing.into_iter().rev() {
            match self.create_inode(path, FileType::Directory, 0o755, b"") {
                // Another thread created it meanwhile, or the path repeats it, as in `a/b/../b`.
                Err(Error::Exists) if self.metadata(path).is_ok() => {}
                made => made.map_err(|error| path_error(path, error))?,
            }
        }
        Ok(())
    }

    /// Creates a file, or replaces its data.
    ///
    /// # Errors
    /// It is not a regular file, there is no space, or its parent does not exist.
    pub fn write(&self, path: impl AsRef<Path>, contents: impl AsRef<[u8]>) -> io::Result<()> {
        let (path, contents) = (path.as_ref(), contents.as_ref());
        let write = || {
            let inode = self.volume.resolve_or_create(
                self.volume.root(),
                self.own_path(path)?,
                &root_owned_node(FileType::File, 0o644, b""),
            )?;
            self.volume.add_user(inode);
            let written = self.replace_contents(inode, contents);
            self.volume.remove_users(inode, 1);
            written
        };
        write().map_err(|error| path_error(path, error))
    }

    /// Reads a whole file.
    ///
    /// # Errors
    /// It is not a regular file, or damaged; there is not enough memory.
    pub fn read(&self, path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
        let path = path.as_ref();
        let inode = self.find(path, Follow::Yes).and_then(|found| self.require_regular_file(found));
        let inode = inode.map_err(|error| path_error(path, error))?;
        let mut all = vec![];
        loop {
            let offset = u64::try_from(all.len()).unwrap_or(u64::MAX);
            let piece = self.volume.read(inode, offset, IO_CHUNK_BYTES);
            let piece = piece.map_err(|error| path_error(path, error))?.to_vec();
            if piece.is_empty() {
                return Ok(all);
            }
            let room = all.try_reserve(piece.len());
            room.map_err(|error| {
                with_path(path, io::Error::new(io::ErrorKind::OutOfMemory, error))
            })?;
            all.extend_from_slice(&piece);
        }
    }

    /// Reads a whole file as text.
    ///
    /// # Errors
    /// As [`FileSystem::read`]; the data is not UTF-8.
    pub fn read_to_string(&self, path: impl AsRef<Path>) -> io::Result<String> {
        let path = path.as_ref();
        let text = String::from_utf8(self.read(path)?);
        text.map_err(|error| with_path(path, io::Error::new(io::ErrorKind::InvalidData, error)))
    }

    /// Lists a directory, sorted, without `.` and `..`.
    ///
    /// # Errors
    /// It is not a directory, or damaged.
    pub fn read_dir(&self, path: impl AsRef<Path>) -> io::Result<Vec<DirEntry>> {
        let path = path.as_ref();
        self.list_entries(path).map_err(|error| path_error(path, error))
    }

    /// Returns the attributes of a file; follows symbolic links.
    ///
    /// # Errors
    /// It does not exist, or is damaged.
    pub fn metadata(&self, path: impl AsRef<Path>) -> io::Result<Attributes> {
        self.attributes(path.as_ref(), Follow::Yes)
    }

    /// Returns the attributes of a file; does not follow symbolic links.
    ///
    /// # Errors
    /// As [`FileSystem::metadata`].
    pub fn symlink_metadata(&self, path: impl AsRef<Path>) -> io::Result<Attributes> {
        self.attributes(path.as_ref(), Follow::No)
    }

    /// Removes a file, or any inode that is not a directory.
    ///
    /// # Errors
    /// It does not exist, or is a directory.
    pub fn remove_file(&self, path: impl AsRef<Path>) -> io::Result<()> {
        self.with_parent(path.as_ref(), |dir, name| self.volume.unlink(dir, name))
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// It does not exist, is not a directory, or is not empty.
    pub fn remove_dir(&self, path: impl AsRef<Path>) -> io::Result<()> {
        self.with_parent(path.as_ref(), |dir, name| self.volume.remove_directory(dir, name))
    }

    /// Renames a file or directory; replaces an existing file or empty directory.
    ///
    /// # Errors
    /// `from` does not exist; `to` exists and cannot be replaced.
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> io::Result<()> {
        let (from, to) = (from.as_ref(), to.as_ref());
        let (to_dir, to_name) = self.parent(to).map_err(|error| path_error(to, error))?;
        self.with_parent(from, |dir, name| {
            self.volume.rename(dir, name, to_dir, to_name, RenameMode::Replace)
        })
    }

    /// Adds a name to a file.
    ///
    /// # Errors
    /// `original` does not exist or is a directory; the new name exists.
    pub fn hard_link(&self, original: impl AsRef<Path>, link: impl AsRef<Path>) -> io::Result<()> {
        let original = original.as_ref();
        let inode = self.find(original, Follow::No).map_err(|error| path_error(original, error))?;
        self.with_parent(link.as_ref(), |dir, name| self.volume.link(inode, dir, name))
    }

    /// Creates a symbolic link to `original`.
    ///
    /// # Errors
    /// The name exists, or there is no space.
    pub fn symlink(&self, original: impl AsRef<Path>, link: impl AsRef<Path>) -> io::Result<()> {
        let (target, link) = (original.as_ref().as_os_str().as_bytes(), link.as_ref());
        self.create_inode(link, FileType::Symlink, 0o777, target)
            .map_err(|error| path_error(link, error))
    }

    /// Returns the target of a symbolic link.
    ///
    /// # Errors
    /// It is not a symbolic link.
    pub fn read_link(&self, path: impl AsRef<Path>) -> io::Result<PathBuf> {
        let path = path.as_ref();
        let target = self.find(path, Follow::No).and_then(|found| self.volume.read_link(found));
        Ok(OsString::from_vec(target.map_err(|error| path_error(path, error))?).into())
    }

    /// Makes all changes durable.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn sync(&self) -> io::Result<()> {
        self.process.check().map_err(|inherited| io_error(inherited.into()))?;
        if self.volume.is_writable() { self.volume.sync().map_err(io_error) } else { Ok(()) }
    }

    /// Makes all changes durable and marks the volume as cleanly unmounted. Dropping does the same,
    /// but loses the error.
    ///
    /// # Errors
    /// An error of the disk: the last changes are lost.
    pub fn close(self) -> io::Result<()> {
        self.process.check().map_err(|inherited| io_error(inherited.into()))?;
        self.volume.close().map_err(io_error)
    }

    /// Returns the bytes of a path, in the process that opened the volume.
    fn own_path<'p>(&self, path: &'p Path) -> Result<&'p [u8]> {
        self.process.check()?;
        path_bytes(path)
    }

    fn find(&self, path: &Path, follow: Follow) -> Result<InodeNumber> {
        self.volume.resolve(self.volume.root(), self.own_path(path)?, follow)
    }

    fn parent<'p>(&self, path: &'p Path) -> Result<(InodeNumber, &'p [u8])> {
        self.volume.resolve_parent(self.volume.root(), self.own_path(path)?)
    }

    /// Runs `work` with the directory and the name of a path.
    fn with_parent(
        &self,
        path: &Path,
        work: impl FnOnce(InodeNumber, &[u8]) -> Result<()>,
    ) -> io::Result<()> {
        let named = self.parent(path).and_then(|(dir, name)| work(dir, name));
        named.map_err(|error| path_error(path, error))
    }

    fn create_inode(&self, path: &Path, kind: FileType, mode: u32, target: &[u8]) -> Result<()> {
        let new = root_owned_node(kind, mode, target);
        self.volume.create_by_path(self.volume.root(), self.own_path(path)?, &new).map(drop)
    }

    /// Returns the inode if it is a regular file.
    fn require_regular_file(&self, inode: InodeNumber) -> Result<InodeNumber> {
        match self.volume.inode(inode)?.kind {
            FileType::File => Ok(inode),
            FileType::Directory => Err(Error::IsADirectory),
            _ => Err(Error::Misuse("not a regular file")),
        }
    }

    fn replace_contents(&self, inode: InodeNumber, contents: &[u8]) -> Result<()> {
        self.require_regular_file(inode)?;
        self.volume.check_open(inode, Access { read: false, write: true, append: false })?;
        let cut = AttributeChange { size_bytes: Some(0), ..AttributeChange::default() };
        self.volume.set_attributes(inode, &cut)?;
        let mut offset = 0;
        let mut rest = contents;
        while !rest.is_empty() {
            let put = self.volume.write(inode, offset, rest)?;
            rest = rest.get(put..).filter(|_| put > 0).ok_or(Error::NoSpace)?;
            offset = offset.saturating_add(u64::try_from(put).unwrap_or(u64::MAX));
        }
        Ok(())
    }

    fn list_entries(&self, path: &Path) -> Result<Vec<DirEntry>> {
        let dir = self.find(path, Follow::Yes)?;
        let (mut found, mut damage) = (vec![], None);
        self.volume.entries(dir, Default::default(), false, |entry| {
            match entry {
                Ok(entry) => found.push((entry.name.to_vec(), entry.inode, entry.kind)),
                Err(damaged) => damage = Some(damaged.error),
            }
            damage.is_none()
        })?;
        if let Some(error) = damage {
            return Err(error);
        }
        found.sort_by(|a, b| a.0.cmp(&b.0));
        let entry = |(name, inode, kind): (Vec<u8>, InodeNumber, Option<FileType>)| {
            let kind = match kind {
                Some(kind) => kind,
                None => self.volume.inode(inode)?.kind,
            };
            let name = OsString::from_vec(name);
            Ok(DirEntry { path: path.join(&name), name, kind })
        };
        found.into_iter().map(entry).collect()
    }

    fn attributes(&self, path: &Path, follow: Follow) -> io::Result<Attributes> {
        let found = self.find(path, follow).and_then(|found| self.volume.attributes(found));
        found.map_err(|error| path_error(path, error))
    }
}

impl std::fmt::Debug for FileSystem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileSystem").finish_non_exhaustive()
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        if self.process.check().is_ok()
            && let Err(error) = self.volume.close()
        {
            log::warn!("closing a volume: {error}");
        }
    }
}

/// File source of a new, empty volume.
struct EmptyFileSource;

impl FileSource for EmptyFileSource {
    fn read(&self, _: u64, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::NotFound.into())
    }
}

/// Returns the `mke2fs` defaults of ext4, with a random UUID.
fn ext4_options() -> mkfs::FormatOptions {
    let chance = || {
        let half = |of: u64| RandomState::new().hash_one(of).to_le_bytes();
        let mut bytes = [0; 16];
        for (to, from) in bytes.iter_mut().zip(half(0).into_iter().chain(half(1))) {
            *to = from;
        }
        bytes
    };
    let mut uuid = chance();
    // UUID version 4.
    let [_, _, _, _, _, _, version, _, variant, ..] = &mut uuid;
    *version = *version & 0x0F | 0x40;
    *variant = *variant & 0x3F | 0x80;
    let time = u32::try_from(now().seconds).unwrap_or(u32::MAX);
    let options = mkfs::FormatOptions::for_type("ext4").unwrap_or_default();
    mkfs::FormatOptions { uuid, hash_seed: chance(), time, ..options }
}

/// Returns the current time.
fn now() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Time {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanoseconds: since.subsec_nanos(),
    }
}

fn open_disk(image: &Path, write: bool) -> io::Result<Arc<dyn Disk>> {
    let options = FileOptions { write, direct: false, uring: false };
    Ok(Arc::new(FileDisk::open(image, options)?))
}

/// Returns the bytes of a path; an empty path is `NotFound`.
fn path_bytes(path: &Path) -> Result<&[u8]> {
    let path = path.as_os_str().as_bytes();
    if path.is_empty() { Err(Error::NotFound) } else { Ok(path) }
}

/// Describes a new inode owned by root.
fn root_owned_node(kind: FileType, mode: u32, target: &[u8]) -> NewNode<'_> {
    NewNode { kind, mode, uid: 0, gid: 0, device: (0, 0), target }
}

fn io_error(error: Error) -> io::Error {
    let kind = io::Error::from_raw_os_error(error.refusal().errno().raw_os_error()).kind();
    io::Error::new(kind, error)
}

fn path_error(path: &Path, error: Error) -> io::Error {
    with_path(path, io_error(error))
}

/// Adds the path to an error.
fn with_path(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
