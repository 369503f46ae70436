//! A volume in an image, its files named by paths: the names of [`std::fs`].
//!
//! ```text
//!   FileSystem ──paths──▶ Volume::{resolve, resolve_parent, resolve_or_create} ──▶ inodes
//!       └── opens the image, claims it, has the system's clock
//! ```
//!
//! Law 1: an error names the path.
//! Law 2: what a name may be is [`Volume`]'s rule; nothing here has another.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use draconis_device::{Disk, FileDisk, FileOptions};
use draconis_exchange::contract::{Access, AttributeChange, Attributes, FileType, Time};

use crate::mkfs::{self, FileSource, FormatTarget, NodeKind, Tree, TreeNode};
use crate::{
    AccessTimes, Error, Follow, InodeNumber, NewNode, OpenOptions, RenameMode, Result, Volume,
    WriteOptions,
};

/// Bytes that are changed in memory before they go to the image.
const DIRTY_BYTES: u64 = 64 << 20;
/// Bytes that are read at once.
const PIECE_BYTES: usize = 1 << 20;

/// A volume whose files are named by paths, as [`std::fs`] names them. Paths begin at its root;
/// what is made belongs to root.
///
/// What was changed is in memory until [`FileSystem::sync`] or [`FileSystem::close`] returned; a
/// crash before then leaves the volume consistent, as it was a while ago.
pub struct FileSystem {
    volume: Volume,
}

/// A name in a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirEntry {
    path: PathBuf,
    name: OsString,
    kind: FileType,
}

impl DirEntry {
    /// The name.
    pub fn file_name(&self) -> &OsStr {
        &self.name
    }

    /// The path: that of the directory, and the name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it is; a symbolic link is one.
    pub fn file_type(&self) -> FileType {
        self.kind
    }
}

impl FileSystem {
    /// Makes an image of `len_bytes` that holds an empty ext4 volume. No file may be there.
    ///
    /// # Errors
    /// The file exists or cannot be made; the length is too small or too large.
    pub fn create(image: impl AsRef<Path>, len_bytes: u64) -> io::Result<Self> {
        let image = image.as_ref();
        let file = File::options().read(true).write(true).create_new(true).open(image);
        let made =
            file.and_then(|file| file.set_len(len_bytes)).map_err(|error| named(image, error));
        made?;
        let created = disk(image, true).and_then(|disk| Self::create_on(disk, &ext4(), true));
        if created.is_err() {
            // It holds nothing.
            let _ = std::fs::remove_file(image);
        }
        created.map_err(|error| named(image, error))
    }

    /// Makes an empty volume on a disk and opens it. `zeroed` says that the disk reads as zeros.
    ///
    /// # Errors
    /// The options do not fit the disk; what the disk says.
    pub fn create_on(
        disk: Arc<dyn Disk>,
        options: &mkfs::FormatOptions,
        zeroed: bool,
    ) -> io::Result<Self> {
        let mut tree = Tree::new(TreeNode::new(NodeKind::Directory, 0o755));
        let plan = mkfs::plan_for_size(options, &mut tree, disk.properties().len_bytes);
        let plan = plan.map_err(io::Error::other)?;
        let target = FormatTarget { disk: &disk, zeroed, progress: &|_| {} };
        mkfs::write(&plan, &NoFiles, &target).map_err(io::Error::other)?;
        Self::open_on(disk)
    }

    /// Opens the volume that an image begins with, to be changed, alone.
    ///
    /// # Errors
    /// There is none, it is in use, or it can only be read.
    pub fn open(image: impl AsRef<Path>) -> io::Result<Self> {
        let image = image.as_ref();
        disk(image, true).and_then(Self::open_on).map_err(|error| named(image, error))
    }

    /// Opens the volume that an image begins with, to be read, beside others who do.
    ///
    /// # Errors
    /// There is none, or it is being changed.
    pub fn open_read_only(image: impl AsRef<Path>) -> io::Result<Self> {
        let image = image.as_ref();
        let open = |disk| Volume::open(disk, OpenOptions::default()).map_err(io_error);
        let volume = disk(image, false).and_then(open).map_err(|error| named(image, error))?;
        Ok(Self { volume })
    }

    /// Opens the volume on a disk, to be changed.
    ///
    /// # Errors
    /// There is none, or it can only be read.
    pub fn open_on(disk: Arc<dyn Disk>) -> io::Result<Self> {
        let writing = WriteOptions {
            clock: Arc::new(now),
            dirty_bytes: DIRTY_BYTES,
            atime: AccessTimes::Never,
            discard: false,
        };
        let volume = Volume::open_for_writing(disk, OpenOptions::default(), writing);
        let volume = volume.map_err(io_error)?;
        match volume.read_only_reason() {
            None => Ok(Self { volume }),
            Some(why) => Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, why)),
        }
    }

    /// The volume, for all that paths have no word for.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// The name is there, or what is above it is not.
    pub fn create_dir(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let path = path.as_ref();
        self.make(path, FileType::Directory, 0o755, b"").map_err(|error| about(path, error))
    }

    /// Makes a directory, and those above it; one that is there is no error.
    ///
    /// # Errors
    /// Something else is there.
    pub fn create_dir_all(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let path = path.as_ref();
        // The longest that is there, then what is below it.
        let mut missing = vec![];
        for above in path.ancestors().filter(|above| !above.as_os_str().is_empty()) {
            match self.find(above, Follow::Yes).and_then(|found| self.volume.inode(found)) {
                Err(Error::NotFound) => missing.push(above),
                Ok(found) if found.kind == FileType::Directory => break,
                Ok(_) => return Err(about(above, Error::NotADirectory)),
                Err(error) => return Err(about(above, error)),
            }
        }
        for path in missing.into_iter().rev() {
            match self.make(path, FileType::Directory, 0o755, b"") {
                // Another thread made it meanwhile, or it is named twice, as in `a/b/../b`.
                Err(Error::Exists) if self.metadata(path).is_ok() => {}
                made => made.map_err(|error| about(path, error))?,
            }
        }
        Ok(())
    }

    /// Makes a file, or replaces what it holds.
    ///
    /// # Errors
    /// It is no file, there is no room, or what is above it is not there.
    pub fn write(&self, path: impl AsRef<Path>, contents: impl AsRef<[u8]>) -> io::Result<()> {
        let (path, contents) = (path.as_ref(), contents.as_ref());
        let write = || {
            let inode = self.volume.resolve_or_create(
                self.volume.root(),
                bytes(path)?,
                &node(FileType::File, 0o644, b""),
            )?;
            self.volume.add_user(inode);
            let written = self.replace(inode, contents);
            self.volume.remove_users(inode, 1);
            written
        };
        write().map_err(|error| about(path, error))
    }

    /// Reads all of a file.
    ///
    /// # Errors
    /// It is no file, or damaged; there is no memory for all of it.
    pub fn read(&self, path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
        let path = path.as_ref();
        let inode = self.find(path, Follow::Yes).and_then(|found| self.file(found));
        let inode = inode.map_err(|error| about(path, error))?;
        let mut all = vec![];
        loop {
            let offset = u64::try_from(all.len()).unwrap_or(u64::MAX);
            let piece = self.volume.read(inode, offset, PIECE_BYTES);
            let piece = piece.map_err(|error| about(path, error))?.to_vec();
            if piece.is_empty() {
                return Ok(all);
            }
            let room = all.try_reserve(piece.len());
            room.map_err(|error| named(path, io::Error::new(io::ErrorKind::OutOfMemory, error)))?;
            all.extend_from_slice(&piece);
        }
    }

    /// Reads all of a text file.
    ///
    /// # Errors
    /// As [`FileSystem::read`]; it is not UTF-8.
    pub fn read_to_string(&self, path: impl AsRef<Path>) -> io::Result<String> {
        let path = path.as_ref();
        let text = String::from_utf8(self.read(path)?);
        text.map_err(|error| named(path, io::Error::new(io::ErrorKind::InvalidData, error)))
    }

    /// Lists a directory, sorted, without `.` and `..`.
    ///
    /// # Errors
    /// It is no directory, or damaged.
    pub fn read_dir(&self, path: impl AsRef<Path>) -> io::Result<Vec<DirEntry>> {
        let path = path.as_ref();
        self.list(path).map_err(|error| about(path, error))
    }

    /// Describes a file; of a symbolic link, what it leads to.
    ///
    /// # Errors
    /// It is not there, or damaged.
    pub fn metadata(&self, path: impl AsRef<Path>) -> io::Result<Attributes> {
        self.attributes(path.as_ref(), Follow::Yes)
    }

    /// Describes a file; a symbolic link as itself.
    ///
    /// # Errors
    /// As [`FileSystem::metadata`].
    pub fn symlink_metadata(&self, path: impl AsRef<Path>) -> io::Result<Attributes> {
        self.attributes(path.as_ref(), Follow::No)
    }

    /// Removes a file, or whatever is no directory.
    ///
    /// # Errors
    /// It is not there, or a directory.
    pub fn remove_file(&self, path: impl AsRef<Path>) -> io::Result<()> {
        self.named(path.as_ref(), |dir, name| self.volume.unlink(dir, name))
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// It is not there, no directory, or not empty.
    pub fn remove_dir(&self, path: impl AsRef<Path>) -> io::Result<()> {
        self.named(path.as_ref(), |dir, name| self.volume.remove_directory(dir, name))
    }

    /// Moves a name; a file, or an empty directory, that is there is replaced.
    ///
    /// # Errors
    /// `from` is not there; what is at `to` cannot be replaced.
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> io::Result<()> {
        let (from, to) = (from.as_ref(), to.as_ref());
        let (to_dir, to_name) = self.parent(to).map_err(|error| about(to, error))?;
        self.named(from, |dir, name| {
            self.volume.rename(dir, name, to_dir, to_name, RenameMode::Replace)
        })
    }

    /// Gives a file another name.
    ///
    /// # Errors
    /// `original` is not there or a directory; the new name is there.
    pub fn hard_link(&self, original: impl AsRef<Path>, link: impl AsRef<Path>) -> io::Result<()> {
        let original = original.as_ref();
        let inode = self.find(original, Follow::No).map_err(|error| about(original, error))?;
        self.named(link.as_ref(), |dir, name| self.volume.link(inode, dir, name))
    }

    /// Makes a symbolic link that leads to `original`.
    ///
    /// # Errors
    /// The name is there, or there is no room.
    pub fn symlink(&self, original: impl AsRef<Path>, link: impl AsRef<Path>) -> io::Result<()> {
        let (target, link) = (original.as_ref().as_os_str().as_bytes(), link.as_ref());
        self.make(link, FileType::Symlink, 0o777, target).map_err(|error| about(link, error))
    }

    /// Where a symbolic link leads.
    ///
    /// # Errors
    /// It is none.
    pub fn read_link(&self, path: impl AsRef<Path>) -> io::Result<PathBuf> {
        let path = path.as_ref();
        let target = self.find(path, Follow::No).and_then(|found| self.volume.read_link(found));
        Ok(OsString::from_vec(target.map_err(|error| about(path, error))?).into())
    }

    /// Makes durable what was changed.
    ///
    /// # Errors
    /// What made the disk fail.
    pub fn sync(&self) -> io::Result<()> {
        if self.volume.is_writable() { self.volume.sync().map_err(io_error) } else { Ok(()) }
    }

    /// Makes all durable and marks the volume as unmounted. Dropping does the same, but loses the
    /// error.
    ///
    /// # Errors
    /// What made the disk fail: what was changed last is not there.
    pub fn close(self) -> io::Result<()> {
        self.volume.close().map_err(io_error)
    }

    fn find(&self, path: &Path, follow: Follow) -> Result<InodeNumber> {
        self.volume.resolve(self.volume.root(), bytes(path)?, follow)
    }

    fn parent<'p>(&self, path: &'p Path) -> Result<(InodeNumber, &'p [u8])> {
        self.volume.resolve_parent(self.volume.root(), bytes(path)?)
    }

    /// Works on the name that a path ends with.
    fn named(
        &self,
        path: &Path,
        work: impl FnOnce(InodeNumber, &[u8]) -> Result<()>,
    ) -> io::Result<()> {
        let named = self.parent(path).and_then(|(dir, name)| work(dir, name));
        named.map_err(|error| about(path, error))
    }

    fn make(&self, path: &Path, kind: FileType, mode: u32, target: &[u8]) -> Result<()> {
        let new = node(kind, mode, target);
        self.volume.create_by_path(self.volume.root(), bytes(path)?, &new).map(drop)
    }

    /// The same inode, if it is a regular file.
    fn file(&self, inode: InodeNumber) -> Result<InodeNumber> {
        match self.volume.inode(inode)?.kind {
            FileType::File => Ok(inode),
            FileType::Directory => Err(Error::IsADirectory),
            _ => Err(Error::Misuse("not a regular file")),
        }
    }

    fn replace(&self, inode: InodeNumber, contents: &[u8]) -> Result<()> {
        self.file(inode)?;
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

    fn list(&self, path: &Path) -> Result<Vec<DirEntry>> {
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
        found.map_err(|error| about(path, error))
    }
}

impl std::fmt::Debug for FileSystem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileSystem").finish_non_exhaustive()
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        if let Err(error) = self.volume.close() {
            log::warn!("closing a volume: {error}");
        }
    }
}

/// What the files of a new volume hold: it has none.
struct NoFiles;

impl FileSource for NoFiles {
    fn read(&self, _: u64, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::NotFound.into())
    }
}

/// An ext4 volume as mke2fs makes it, with an identity by chance.
fn ext4() -> mkfs::FormatOptions {
    let chance = || {
        let half = |of: u64| RandomState::new().hash_one(of).to_le_bytes();
        let mut bytes = [0; 16];
        for (to, from) in bytes.iter_mut().zip(half(0).into_iter().chain(half(1))) {
            *to = from;
        }
        bytes
    };
    let mut uuid = chance();
    // A UUID of version 4.
    let [_, _, _, _, _, _, version, _, variant, ..] = &mut uuid;
    *version = *version & 0x0F | 0x40;
    *variant = *variant & 0x3F | 0x80;
    let time = u32::try_from(now().seconds).unwrap_or(u32::MAX);
    let options = mkfs::FormatOptions::of_type("ext4").unwrap_or_default();
    mkfs::FormatOptions { uuid, hash_seed: chance(), time, ..options }
}

/// What time it is.
fn now() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Time {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanoseconds: since.subsec_nanos(),
    }
}

fn disk(image: &Path, write: bool) -> io::Result<Arc<dyn Disk>> {
    let options = FileOptions { write, direct: false, uring: false };
    Ok(Arc::new(FileDisk::open(image, options)?))
}

/// The bytes of a path; an empty one names nothing.
fn bytes(path: &Path) -> Result<&[u8]> {
    let path = path.as_os_str().as_bytes();
    if path.is_empty() { Err(Error::NotFound) } else { Ok(path) }
}

/// Something new of root's.
fn node(kind: FileType, mode: u32, target: &[u8]) -> NewNode<'_> {
    NewNode { kind, mode, uid: 0, gid: 0, device: (0, 0), target }
}

fn io_error(error: Error) -> io::Error {
    let kind = io::Error::from_raw_os_error(error.refusal().errno().raw_os_error()).kind();
    io::Error::new(kind, error)
}

fn about(path: &Path, error: Error) -> io::Error {
    named(path, io_error(error))
}

/// The same error, which names what it is about.
fn named(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
