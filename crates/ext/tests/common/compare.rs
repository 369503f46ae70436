//! Compares a volume with a directory tree of the host: bytes and attributes.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use draconis_ext::{Cookie, Error, Follow, InodeNumber, Seek, Volume};
use draconis_types::FileType;
use rustix::fs::SeekFrom;

/// Origin of the host's tree.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ReferenceTree {
    /// The same volume, mounted: everything is equal.
    Mount,
    /// The source of the volume: everything that `mke2fs -d` copies is equal.
    Source,
}

/// Compares everything below `dir`; returns the number of names.
pub fn compare_trees(volume: &Volume, dir: InodeNumber, host: &Path, beside: ReferenceTree) -> u64 {
    if beside == ReferenceTree::Mount && dir == InodeNumber::ROOT {
        // Before the first read: the kernel reports unwritten blocks as data once they are cached.
        compare_all_holes(volume, host);
    }
    let ours = list_names(volume, dir);
    let mut theirs: BTreeMap<Vec<u8>, _> = BTreeMap::new();
    for entry in fs::read_dir(host).unwrap() {
        let entry = entry.unwrap();
        theirs.insert(entry.file_name().as_bytes().to_vec(), entry.path());
    }
    let at_root = dir == InodeNumber::ROOT && beside == ReferenceTree::Source;
    let names: Vec<_> = ours.keys().filter(|name| !at_root || *name != b"lost+found").collect();
    assert_eq!(names, theirs.keys().collect::<Vec<_>>(), "{}", host.display());
    let mut count = 0;
    for (name, path) in &theirs {
        let number = ours[name];
        assert_eq!(volume.lookup(dir, name).unwrap(), number, "{}", path.display());
        compare_inode(volume, number, path, beside);
        count += 1;
        if fs::symlink_metadata(path).unwrap().is_dir() {
            count += compare_trees(volume, number, path, beside);
        }
    }
    count
}

/// Lists all names of a directory in small batches.
pub fn list_names(volume: &Volume, dir: InodeNumber) -> BTreeMap<Vec<u8>, InodeNumber> {
    let mut all = BTreeMap::new();
    let mut from = Cookie::default();
    loop {
        let mut taken = 0;
        volume
            .entries(dir, from, false, |entry| {
                if taken == 7 {
                    return false;
                }
                let entry = entry.unwrap();
                assert!(all.insert(entry.name.to_vec(), entry.inode).is_none());
                from = entry.next;
                taken += 1;
                true
            })
            .unwrap();
        if taken == 0 {
            return all;
        }
    }
}

fn compare_inode(volume: &Volume, number: InodeNumber, path: &Path, beside: ReferenceTree) {
    let ours = volume.attributes(number).unwrap();
    let theirs = fs::symlink_metadata(path).unwrap();
    let shown = path.display();
    assert_eq!(ours.mode, theirs.mode(), "{shown}");
    assert_eq!((ours.uid, ours.gid), (theirs.uid(), theirs.gid()), "{shown}");
    if !theirs.is_dir() || beside == ReferenceTree::Mount {
        assert_eq!(ours.size_bytes, theirs.size(), "{shown}");
        assert_eq!(u64::from(ours.links), theirs.nlink(), "{shown}");
    }
    let device = (rustix::fs::major(theirs.rdev()), rustix::fs::minor(theirs.rdev()));
    assert_eq!(ours.device, device, "{shown}");
    if beside == ReferenceTree::Mount {
        assert_eq!(u64::from(number.0), theirs.ino(), "{shown}");
        assert_eq!(ours.blocks_512, theirs.blocks(), "{shown}");
        let times = [ours.accessed, ours.modified, ours.changed];
        let times = times.map(|time| (time.seconds, i64::from(time.nanoseconds)));
        let expected = [
            (theirs.atime(), theirs.atime_nsec()),
            (theirs.mtime(), theirs.mtime_nsec()),
            (theirs.ctime(), theirs.ctime_nsec()),
        ];
        assert_eq!(times, expected, "{shown}");
        if let (Some(ours), Ok(theirs)) = (ours.created, theirs.created()) {
            let theirs = theirs.duration_since(std::time::UNIX_EPOCH).unwrap();
            assert_eq!(ours.seconds.unsigned_abs(), theirs.as_secs(), "{shown}");
            assert_eq!(ours.nanoseconds, theirs.subsec_nanos(), "{shown}");
        }
    }
    if volume.info().features.iter().any(|feature| feature == "ext_attr") {
        compare_xattrs(volume, number, path);
    }
    match ours.kind {
        FileType::File if is_locked(path) => {
            assert_eq!(volume.read(number, 0, 10).unwrap_err(), Error::NoKey, "{shown}");
            assert_eq!(volume.seek(number, 0, Seek::Data), Err(Error::NoKey), "{shown}");
            assert_eq!(volume.map(number, 0), Err(Error::NoKey), "{shown}");
        }
        FileType::File => {
            compare_contents(volume, number, path);
        }
        FileType::Symlink => {
            let target = fs::read_link(path).unwrap();
            let expected = target.as_os_str().as_bytes();
            assert_eq!(volume.read_link(number).unwrap(), expected, "{shown}");
        }
        _ => {}
    }
}

/// Returns true if the contents are encrypted and the key is missing.
fn is_locked(path: &Path) -> bool {
    let opened = File::open(path).map_err(|error| error.raw_os_error());
    opened.is_err_and(|errno| errno == Some(rustix::io::Errno::NOKEY.raw_os_error()))
}

fn compare_xattrs(volume: &Volume, number: InodeNumber, path: &Path) {
    let mut theirs = vec![0; 65536];
    let Ok(len) = rustix::fs::llistxattr(path, &mut theirs[..]) else { return };
    theirs.truncate(len);
    let mut theirs: Vec<Vec<u8>> =
        theirs.split(|byte| *byte == 0).filter(|it| !it.is_empty()).map(<[u8]>::to_vec).collect();
    let mut ours = volume.xattr_names(number).unwrap();
    theirs.sort();
    ours.sort();
    if !rustix::process::geteuid().is_root() {
        ours.retain(|name| !name.starts_with(b"trusted."));
    }
    assert_eq!(ours, theirs, "{}", path.display());
    for name in theirs {
        let mut value = vec![0; 65536];
        let text = std::str::from_utf8(&name).unwrap();
        let len = rustix::fs::lgetxattr(path, text, &mut value[..]).unwrap();
        value.truncate(len);
        assert_eq!(volume.xattr(number, &name).unwrap(), value, "{} {text}", path.display());
    }
    assert!(volume.xattr(number, b"user.not there").is_err());
}

/// Of the pieces that are holes on both sides, one in so many is read.
const HOLE_SAMPLE_INTERVAL: u64 = 8;

/// Compares contents in pieces of odd sizes; the host must read zeros in our holes.
fn compare_contents(volume: &Volume, number: InodeNumber, path: &Path) {
    let file = File::open(path).unwrap();
    let size = file.metadata().unwrap().size();
    let is_hole = |at: u64, end: u64| {
        let theirs = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => size,
            Err(_) => at,
        };
        theirs >= end && volume.seek(number, at, Seek::Data).unwrap().unwrap_or(size) >= end
    };
    let (mut at, mut holes) = (0, 0);
    while at < size {
        let step = 1_000_003.min(size - at) as usize;
        if is_hole(at, at + step as u64) {
            holes += 1;
            if holes % HOLE_SAMPLE_INTERVAL != 1 {
                at += step as u64;
                continue;
            }
        }
        let mut theirs = vec![0; step];
        file.read_exact_at(&mut theirs, at).unwrap();
        let mut ours = vec![1; step];
        assert_eq!(volume.read_into(number, at, &mut ours).unwrap(), step);
        assert!(ours == theirs, "{} differs in {step} bytes at {at}", path.display());
        at += step as u64;
    }
    assert_eq!(volume.read_into(number, size, &mut [0; 10]).unwrap(), 0);
    let inode = volume.inode(number).unwrap();
    let mut at = 0;
    while at < size {
        let data = volume.read_from_inode(&inode, at, usize::MAX).unwrap();
        assert!(!data.is_empty());
        at += data.len() as u64;
        // Only the ends of a long hole are read.
        let next = if at < size { volume.seek(number, at, Seek::Data).unwrap() } else { None };
        at = at.max(next.unwrap_or(size).saturating_sub(1 << 20));
    }
    assert_eq!(at, size);
}

/// Checks that paths resolve to the same inodes as in the kernel's mount.
pub fn check_path_resolution(volume: &Volume, host: &Path, paths: &[&str]) {
    for path in paths {
        let theirs = fs::metadata(host.join(path)).unwrap().ino();
        let ours = volume.resolve(volume.root(), path.as_bytes(), Follow::Yes).unwrap();
        assert_eq!(u64::from(ours.0), theirs, "{path}");
    }
}

fn compare_all_holes(volume: &Volume, host: &Path) {
    for entry in fs::read_dir(host).unwrap() {
        let path = entry.unwrap().path();
        let found = fs::symlink_metadata(&path).unwrap();
        if found.is_dir() {
            compare_all_holes(volume, &path);
        } else if found.is_file() && !is_locked(&path) {
            compare_holes(volume, InodeNumber(u32::try_from(found.ino()).unwrap()), &path);
        }
    }
}

/// Checks that data and holes are where the kernel reports them.
fn compare_holes(volume: &Volume, number: InodeNumber, path: &Path) {
    let file = File::open(path).unwrap();
    let size = file.metadata().unwrap().size();
    let mut at = 0;
    while at < size {
        let data = rustix::fs::seek(&file, SeekFrom::Data(at)).ok();
        assert_eq!(volume.seek(number, at, Seek::Data).unwrap(), data, "{}", path.display());
        let Some(data) = data else { return };
        let hole = rustix::fs::seek(&file, SeekFrom::Hole(data)).ok();
        assert_eq!(volume.seek(number, data, Seek::Hole).unwrap(), hole, "{}", path.display());
        at = hole.unwrap();
    }
}
