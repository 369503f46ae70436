//! Paths: from a call's arguments to an inode of the volume, or to the host.
//!
//! Directories need real descriptors and real working directories. Each one that a program opens
//! or enters has a stand-in: an empty directory of the host at the same path, below the mount
//! point. Its device and inode number say which directory of the volume it stands for, so that
//! fork, dup, `fchdir` and `getcwd` stay the kernel's own.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::ffi::{CString, OsStr};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use draconis_ext::{Error, FileType, InodeNumber, Volume};

use crate::files::errno;
use crate::sys;

const MAX_LINKS: usize = 40;
/// Names in memory at most.
const MAX_NAMES: usize = 100_000;

/// Where a path ends in the volume.
pub struct Place {
    /// Directory of the last name.
    pub dir: InodeNumber,
    /// The last name; empty for the root, `.` and `..`.
    pub name: Vec<u8>,
    /// The inode, if it exists.
    pub node: Option<InodeNumber>,
    /// Canonical path of `dir`, from the mount point on.
    dir_path: Vec<u8>,
    /// Symbolic links passed: path and target.
    links: Vec<(Vec<u8>, Vec<u8>)>,
    /// The path ends with a slash.
    pub slash: bool,
}

pub enum Walked {
    Volume(Place),
    Host,
}

impl Place {
    pub fn path(&self) -> Vec<u8> {
        match self.name.is_empty() {
            true => self.dir_path.clone(),
            false => [&self.dir_path, b"/".as_slice(), &self.name].concat(),
        }
    }

    pub fn found(&self) -> Result<InodeNumber, i32> {
        self.node.ok_or(libc::ENOENT)
    }
}

/// Who asks: permissions are checked as the kernel does for ordinary users.
#[derive(Clone, Default)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
}

pub struct Tree {
    pub volume: std::sync::Arc<Volume>,
    /// The mount point, canonical.
    pub at: Vec<u8>,
    by_dir: HashMap<u32, Vec<u8>>,
    by_real: HashMap<(u64, u64), u32>,
    /// Names looked up before, by directory. Nobody else changes the volume.
    names: HashMap<u32, HashMap<Vec<u8>, (u32, FileType)>>,
    names_held: usize,
    /// Links and programs that stand in the real tree, by path.
    real: HashSet<Vec<u8>>,
}

impl Caller {
    /// Checks permission bits; `want` is a combination of 4, 2 and 1.
    pub fn may(&self, volume: &Volume, inode: InodeNumber, want: u32) -> Result<(), i32> {
        if self.uid == 0 {
            return Ok(());
        }
        let held = volume.attributes(inode).map_err(errno)?;
        let bits = if held.uid == self.uid {
            held.mode >> 6
        } else if held.gid == self.gid || self.groups.contains(&held.gid) {
            held.mode >> 3
        } else {
            held.mode
        };
        if bits & want == want { Ok(()) } else { Err(libc::EACCES) }
    }
}

impl Tree {
    pub fn new(volume: std::sync::Arc<Volume>, at: Vec<u8>) -> Result<Self, i32> {
        let mut tree = Self {
            volume,
            at,
            by_dir: HashMap::new(),
            by_real: HashMap::new(),
            names: HashMap::new(),
            names_held: 0,
            real: HashSet::new(),
        };
        let (root, at) = (tree.volume.root(), tree.at.clone());
        tree.stand_in(root, &at)?;
        Ok(tree)
    }

    /// Returns the directory that a directory of the host stands for.
    pub fn directory_of(&self, stat: &libc::stat) -> Option<InodeNumber> {
        self.by_real.get(&(stat.st_dev, stat.st_ino)).copied().map(InodeNumber)
    }

    /// Returns the path of a directory's stand-in, which it creates.
    pub fn stand_in(&mut self, dir: InodeNumber, path: &[u8]) -> Result<Vec<u8>, i32> {
        if let Some(path) = self.by_dir.get(&dir.0) {
            return Ok(path.clone());
        }
        let real = as_path(path);
        std::fs::create_dir_all(real).map_err(io_errno)?;
        let opened = sys::open_at(libc::AT_FDCWD, path, libc::O_PATH | libc::O_DIRECTORY, 0)?;
        let stat = sys::fstat(opened.as_raw_fd())?;
        self.by_real.insert((stat.st_dev, stat.st_ino), dir.0);
        self.by_dir.insert(dir.0, path.to_vec());
        Ok(path.to_vec())
    }

    /// Makes the way of a path real, so that the kernel can follow it by itself.
    pub fn make_real(&mut self, place: &Place) -> Result<(), i32> {
        self.make_links_real(&place.links)?;
        self.stand_in(place.dir, &place.dir_path).map(drop)
    }

    fn make_links_real(&mut self, links: &[(Vec<u8>, Vec<u8>)]) -> Result<(), i32> {
        for (path, target) in links {
            if self.real.insert(path.clone()) {
                let path = as_path(path);
                let above = path.parent().unwrap_or(path);
                std::fs::create_dir_all(above).map_err(io_errno)?;
                std::os::unix::fs::symlink(as_path(target), path).map_err(io_errno)?;
            }
        }
        Ok(())
    }

    /// Notes a program's real copy; returns false if there is one.
    pub fn add_real(&mut self, path: Vec<u8>) -> bool {
        self.real.insert(path)
    }

    fn lookup(&mut self, dir: InodeNumber, name: &[u8]) -> Result<(InodeNumber, FileType), Error> {
        if let Some((inode, kind)) = self.names.get(&dir.0).and_then(|names| names.get(name)) {
            return Ok((InodeNumber(*inode), *kind));
        }
        let found = self.volume.lookup(dir, name)?;
        let kind = self.volume.inode(found)?.kind;
        self.remember_name(dir, name, found, kind);
        Ok((found, kind))
    }

    /// Keeps a name that exists now.
    pub fn remember_name(
        &mut self,
        dir: InodeNumber,
        name: &[u8],
        node: InodeNumber,
        kind: FileType,
    ) {
        if self.names_held >= MAX_NAMES {
            (self.names_held, self.names) = (0, HashMap::new());
        }
        self.names_held += 1;
        self.names.entry(dir.0).or_default().insert(name.to_vec(), (node.0, kind));
    }

    /// Forgets the name of a place, which a call is about to change.
    pub fn forget_name(&mut self, place: &Place) {
        if let Some(names) = self.names.get_mut(&place.dir.0) {
            names.remove(&place.name);
        }
        if let Some(node) = place.node {
            self.names.remove(&node.0);
        }
    }

    /// Forgets the stand-in, link or program of a name that is gone or means something else now.
    pub fn forget(&mut self, place: &Place) {
        if self.real.is_empty() && place.node.is_none_or(|node| !self.by_dir.contains_key(&node.0))
        {
            return;
        }
        let path = place.path();
        if self.real.remove(&path) {
            let _ = std::fs::remove_file(as_path(&path));
        }
        if let Some(node) = place.node
            && let Some(held) = self.by_dir.get(&node.0)
            && *held == path
        {
            self.by_dir.remove(&node.0);
            self.by_real.retain(|_, dir| *dir != node.0);
            let _ = std::fs::remove_dir_all(as_path(&path));
        }
    }

    /// Renames the stand-ins at and below a directory.
    pub fn renamed(&mut self, from: &Place, to: &Place) {
        let (old, new) = (from.path(), to.path());
        if self.real.remove(&old) {
            let _ = std::fs::remove_file(as_path(&old));
        }
        if from.node.is_none_or(|node| {
            self.volume.inode(node).is_ok_and(|inode| inode.kind != FileType::Directory)
        }) || !as_path(&old).exists()
        {
            return;
        }
        let _ = std::fs::create_dir_all(as_path(&to.dir_path));
        let _ = std::fs::rename(as_path(&old), as_path(&new));
        let moved = |path: &[u8]| {
            let rest = path.strip_prefix(old.as_slice())?;
            (rest.is_empty() || rest.first() == Some(&b'/')).then(|| [&new, rest].concat())
        };
        for path in self.by_dir.values_mut() {
            if let Some(now) = moved(path) {
                *path = now;
            }
        }
        self.real = self.real.drain().map(|path| moved(&path).unwrap_or(path)).collect();
    }

    /// Returns what is left of an absolute path below the mount point.
    pub fn below<'p>(&self, path: &'p [u8]) -> Option<&'p [u8]> {
        let rest = path.strip_prefix(self.at.as_slice())?;
        (rest.is_empty() || rest.first() == Some(&b'/')).then_some(rest)
    }

    /// Finds a path whose names were all looked up before, without links and `..`; only for root,
    /// who needs no permission.
    pub fn find_known(&self, start: InodeNumber, path: &[u8], follow: bool) -> Option<InodeNumber> {
        let mut at = (start.0, FileType::Directory);
        for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
            if name == b"." || name == b".." || at.1 != FileType::Directory {
                return None;
            }
            at = *self.names.get(&at.0)?.get(name)?;
        }
        let is_plain = path.last() != Some(&b'/') && !(follow && at.1 == FileType::Symlink);
        is_plain.then_some(InodeNumber(at.0))
    }

    /// Walks `path` from a directory of the volume.
    pub fn walk(
        &mut self,
        start: InodeNumber,
        path: &[u8],
        follow: bool,
        caller: &Caller,
    ) -> Result<Walked, i32> {
        if path.len() >= 4096 {
            return Err(libc::ENAMETOOLONG);
        }
        let mut at_path = self.by_dir.get(&start.0).ok_or(libc::ENOENT)?.clone();
        let mut at = start;
        let slash = path.last() == Some(&b'/');
        let mut names: Vec<Cow<'_, [u8]>> = parts(path).map(Cow::Borrowed).collect();
        let mut links = Vec::new();
        let mut last = Vec::new();
        while let Some(name) = names.pop() {
            if *name == *b"." {
                self.require_dir(at)?;
                continue;
            }
            if *name == *b".." {
                if at == self.volume.root() {
                    self.make_links_real(&links)?;
                    return Ok(Walked::Host);
                }
                at = self.volume.lookup(at, b"..").map_err(errno)?;
                let len = at_path.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
                at_path.truncate(len);
                continue;
            }
            caller.may(&self.volume, at, 1)?;
            let (found, kind) = match self.lookup(at, &name) {
                Ok(found) => found,
                Err(Error::NotFound) if names.is_empty() => {
                    let name = name.into_owned();
                    let place =
                        Place { dir: at, name, node: None, dir_path: at_path, links, slash };
                    return Ok(Walked::Volume(place));
                }
                Err(error) => return Err(errno(error)),
            };
            let is_last = names.is_empty();
            if kind == FileType::Symlink && (!is_last || follow || slash) {
                if links.len() >= MAX_LINKS {
                    return Err(libc::ELOOP);
                }
                let target = self.volume.read_link(found).map_err(errno)?;
                links.push(([&at_path, b"/".as_slice(), &name].concat(), target.clone()));
                if target.first() == Some(&b'/') {
                    let Some(rest) = self.below(&target) else {
                        self.make_links_real(&links)?;
                        return Ok(Walked::Host);
                    };
                    names.extend(parts(rest).map(|name| Cow::Owned(name.to_vec())));
                    (at, at_path) = (self.volume.root(), self.at.clone());
                } else {
                    names.extend(parts(&target).map(|name| Cow::Owned(name.to_vec())));
                }
                continue;
            }
            if is_last {
                last = name.into_owned();
                if slash && kind != FileType::Directory {
                    return Err(libc::ENOTDIR);
                }
                let node = Some(found);
                let place = Place { dir: at, name: last, node, dir_path: at_path, links, slash };
                return Ok(Walked::Volume(place));
            }
            if kind != FileType::Directory {
                return Err(libc::ENOTDIR);
            }
            at_path.push(b'/');
            at_path.extend(&*name);
            at = found;
        }
        let place = Place { dir: at, name: last, node: Some(at), dir_path: at_path, links, slash };
        Ok(Walked::Volume(place))
    }

    fn require_dir(&self, at: InodeNumber) -> Result<(), i32> {
        match self.volume.inode(at).map_err(errno)?.kind {
            FileType::Directory => Ok(()),
            _ => Err(libc::ENOTDIR),
        }
    }
}

/// Returns the names of a path, the first one last.
fn parts(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.rsplit(|byte| *byte == b'/').filter(|name| !name.is_empty())
}

/// Removes `.`, `..` and doubled slashes from an absolute path.
pub fn normalise(path: &[u8]) -> Vec<u8> {
    let mut names: Vec<&[u8]> = Vec::new();
    for name in path.split(|byte| *byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." => drop(names.pop()),
            _ => names.push(name),
        }
    }
    names.iter().flat_map(|name| [b"/", *name].concat()).collect()
}

pub fn as_path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

pub fn io_errno(error: std::io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

pub fn canonical(path: &Path) -> std::io::Result<PathBuf> {
    std::fs::canonicalize(path)
}

pub fn c_string(bytes: &[u8]) -> Result<CString, i32> {
    CString::new(bytes).map_err(|_| libc::EINVAL)
}
