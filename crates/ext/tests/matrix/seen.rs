//! Comparable views of a volume, by the kernel and by us.
//!
//! Names map to inode numbers, numbers to text fields. Contents are digests of the data between
//! holes, so that holes are compared, too.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::{Debug, Write};
use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use draconis_ext::{Cookie, Error, InodeNumber, Seek, Volume};
use draconis_types::{Attributes, FileType};
use rustix::fs::{AtFlags, CWD, FileType as HostType, Mode, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;

use crate::matrix::ioctl;

/// Observed values by name.
pub type FieldMap = BTreeMap<Cow<'static, str>, String>;

/// One reader's view of a volume.
#[derive(Default, Debug)]
pub struct VolumeView {
    /// Fields of `statfs`.
    pub space: FieldMap,
    /// Paths, with `.` and `..`: inode number, and type in the directory entry.
    pub names: BTreeMap<Vec<u8>, (u64, String)>,
    /// Output of `stat`, `getfattr`, `cat` and `readlink` for each inode.
    pub nodes: BTreeMap<u64, FieldMap>,
}

/// Bytes per read, not aligned to any boundary.
const READ_BYTES: usize = 100_003;

impl VolumeView {
    /// Returns the kernel's view below `mount`.
    pub fn from_kernel(mount: &Path) -> Self {
        let mut seen = Self::default();
        let space = rustix::fs::statvfs(mount).unwrap();
        seen.space = space_fields([
            space.f_bsize,
            space.f_blocks,
            space.f_bfree,
            space.f_bavail,
            space.f_files,
            space.f_ffree,
            space.f_fsid,
        ]);
        seen.record_kernel_inode(mount);
        seen.visit_kernel_directory(mount, b"");
        seen
    }

    /// Returns our view of `volume`.
    pub fn from_draconis(volume: &Volume) -> Self {
        let mut seen = Self::default();
        let space = volume.space();
        seen.space = space_fields([
            space.block_bytes.into(),
            space.blocks,
            space.free_blocks,
            space.available_blocks,
            space.inodes,
            space.free_inodes,
            space.id,
        ]);
        seen.record_draconis_inode(volume, volume.root());
        seen.visit_draconis_directory(volume, volume.root(), b"");
        seen
    }

    /// Returns the differences to `theirs`, one per line.
    pub fn differences_from(&self, theirs: &Self) -> Vec<String> {
        let mut lines = Vec::new();
        list_field_differences("space", &self.space, &theirs.space, &mut lines);
        for_each_difference(&self.names, &theirs.names, |name, ours, theirs| {
            lines.push(format!("name {}: {ours:?}, kernel {theirs:?}", name.escape_ascii()));
        });
        let named: BTreeMap<u64, &Vec<u8>> =
            theirs.names.iter().map(|(name, (number, _))| (*number, name)).collect();
        for_each_difference(&self.nodes, &theirs.nodes, |number, ours, theirs| {
            let name = named.get(number).map_or(&b"?"[..], |name| name.as_slice());
            let none = FieldMap::new();
            let what = format!("inode {number} ({})", name.escape_ascii());
            list_field_differences(
                &what,
                ours.unwrap_or(&none),
                theirs.unwrap_or(&none),
                &mut lines,
            );
        });
        lines
    }

    /// Copies the directory times of `other`. Fast commits do not store them: Linux uses the time
    /// of the replay.
    pub fn copy_directory_times(&mut self, other: &Self) {
        let dirs = self.names.iter().filter(|(name, _)| name.ends_with(b"/."));
        let dirs: Vec<u64> = dirs.map(|(_, (number, _))| *number).collect();
        for (number, field) in dirs.iter().flat_map(|it| [(it, "changed"), (it, "modified")]) {
            let theirs = other.nodes.get(number).and_then(|node| node.get(field));
            if let (Some(node), Some(value)) = (self.nodes.get_mut(number), theirs) {
                insert_field(node, field, value);
            }
        }
    }

    /// Fills in a file that the kernel refuses to open, such as a verity file without fs-verity.
    /// The contents are `bytes`; fields of open files come from `other`.
    pub fn fill_in_refused_file(&mut self, path: &[u8], bytes: &[u8], other: &Self) {
        let Some((number, _)) = self.names.get(path) else { return };
        if let Some(node) = self.nodes.get_mut(number)
            && node.get("contents").is_some_and(|it| it == REFUSED_CONTENTS)
        {
            let end = bytes.len() as u64;
            insert_field(node, "contents", format!("0-{end} {:x} ", digest(bytes)));
            for field in ["flags", "generation"] {
                if let Some(value) = other.nodes.get(number).and_then(|node| node.get(field)) {
                    insert_field(node, field, value);
                }
            }
        }
    }

    fn visit_kernel_directory(&mut self, dir: &Path, path: &[u8]) {
        let handle = open_path(dir, OFlags::RDONLY | OFlags::DIRECTORY).unwrap();
        let mut below = Vec::new();
        for entry in rustix::fs::Dir::read_from(&handle).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().to_bytes();
            let kind = match entry.file_type() {
                HostType::Unknown => None,
                kind => FileType::from_mode(kind.as_raw_mode()),
            };
            self.record_name(path, name, entry.ino(), kind);
            if matches!(name, b"." | b"..") {
                continue;
            }
            let child = dir.join(std::ffi::OsStr::from_bytes(name));
            let is_directory = if self.nodes.contains_key(&entry.ino()) {
                false
            } else {
                self.record_kernel_inode(&child)
            };
            if is_directory {
                below.push((child, join_path(path, name)));
            }
        }
        for (child, path) in below {
            self.visit_kernel_directory(&child, &path);
        }
    }

    fn record_kernel_inode(&mut self, path: &Path) -> bool {
        let all = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let stat = rustix::fs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, all).unwrap();
        let time = |time: rustix::fs::StatxTimestamp| (time.tv_sec, time.tv_nsec);
        let born = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
        let mut told = StatFields {
            mode: stat.stx_mode.into(),
            links: stat.stx_nlink,
            owner: (stat.stx_uid, stat.stx_gid),
            device: (stat.stx_rdev_major, stat.stx_rdev_minor),
            size: stat.stx_size,
            sectors: stat.stx_blocks,
            block: stat.stx_blksize,
            times: [stat.stx_atime, stat.stx_mtime, stat.stx_ctime].map(time),
            created: born.then(|| time(stat.stx_btime)),
        }
        .to_field_map();
        add_kernel_xattrs(path, &mut told);
        let kind = HostType::from_raw_mode(stat.stx_mode.into());
        match kind {
            HostType::RegularFile | HostType::Directory => {
                match open_path(path, OFlags::RDONLY) {
                    Ok(file) => {
                        add_kernel_flags(&file, &mut told);
                        if kind == HostType::RegularFile {
                            insert_field(
                                &mut told,
                                "contents",
                                kernel_contents(&file, stat.stx_size),
                            );
                        }
                    }
                    Err(_) => insert_field(&mut told, "contents", REFUSED_CONTENTS),
                };
            }
            HostType::Symlink => {
                let target = rustix::fs::readlink(path, Vec::new());
                insert_field(
                    &mut told,
                    "target",
                    target.map_or(REFUSED_CONTENTS.into(), |it| escape_bytes(it.as_bytes())),
                );
            }
            _ => {}
        }
        self.nodes.insert(stat.stx_ino, told);
        kind == HostType::Directory
    }

    fn visit_draconis_directory(&mut self, volume: &Volume, dir: InodeNumber, path: &[u8]) {
        let mut names = Vec::new();
        let listed = volume.entries(dir, Cookie::default(), true, |entry| {
            match entry {
                Ok(entry) => names.push((entry.name.to_vec(), entry.inode, entry.kind)),
                Err(damage) => names.push((
                    format!("damage: {}", damage.error).into_bytes(),
                    InodeNumber(0),
                    None,
                )),
            }
            true
        });
        if let Err(error) = listed {
            self.record_name(path, format!("not listed: {error}").as_bytes(), 0, None);
        }
        let mut below = Vec::new();
        for (name, number, kind) in names {
            match volume.lookup(dir, &name) {
                Ok(found) if found == number => {}
                other => {
                    self.record_name(path, b"not looked up", 0, other.map(|_| FileType::File).ok())
                }
            }
            // Each name is also looked up in a variant that does not exist.
            let mut absent = name.clone();
            absent.push(b'~');
            if !matches!(
                volume.lookup(dir, &absent),
                Err(Error::NotFound | Error::NameTooLong) | Ok(_)
            ) {
                self.record_name(path, b"damage met in looking up what is not there", 0, None);
            }
            self.record_name(path, &name, number.0.into(), kind);
            if matches!(&name[..], b"." | b"..") || self.nodes.contains_key(&number.0.into()) {
                continue;
            }
            if self.record_draconis_inode(volume, number) {
                below.push((number, join_path(path, &name)));
            }
        }
        for (number, path) in below {
            self.visit_draconis_directory(volume, number, &path);
        }
    }

    fn record_draconis_inode(&mut self, volume: &Volume, number: InodeNumber) -> bool {
        let (told, kind) = match volume.attributes(number) {
            Ok(attributes) => (draconis_fields(volume, number, &attributes), Some(attributes.kind)),
            Err(error) => (FieldMap::from([("inode".into(), error.to_string())]), None),
        };
        self.nodes.insert(number.0.into(), told);
        kind == Some(FileType::Directory)
    }

    fn record_name(&mut self, path: &[u8], name: &[u8], number: u64, kind: Option<FileType>) {
        let twice = self.names.insert(join_path(path, name), (number, format!("{kind:?}")));
        if twice.is_some() {
            self.names.insert(join_path(&join_path(path, name), b"twice"), (number, String::new()));
        }
    }
}

/// Contents that neither reader may read.
const REFUSED_CONTENTS: &str = "refused";

fn join_path(path: &[u8], name: &[u8]) -> Vec<u8> {
    [path, b"/", name].concat()
}

fn insert_field(
    fields: &mut FieldMap,
    name: impl Into<Cow<'static, str>>,
    value: impl Into<String>,
) {
    fields.insert(name.into(), value.into());
}

fn escape_bytes(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().escape_ascii().to_string()
}

fn space_fields(numbers: [u64; 7]) -> FieldMap {
    let names = ["block", "blocks", "free", "available", "inodes", "free inodes", "id"];
    names.into_iter().map(Cow::from).zip(numbers.map(|number| number.to_string())).collect()
}

/// Lists the fields that differ.
fn list_field_differences(what: &str, ours: &FieldMap, theirs: &FieldMap, lines: &mut Vec<String>) {
    for_each_difference(ours, theirs, |name, ours, theirs| {
        let text = |it: Option<&String>| it.map_or("nothing".into(), |it| truncate_text(it));
        lines.push(format!("{what}: {name}: {}, kernel {}", text(ours), text(theirs)));
    });
}

fn truncate_text(text: &str) -> String {
    text.chars().take(300).collect()
}

/// Visits each key whose values differ.
fn for_each_difference<K: Ord, V: PartialEq>(
    ours: &BTreeMap<K, V>,
    theirs: &BTreeMap<K, V>,
    mut differs: impl FnMut(&K, Option<&V>, Option<&V>),
) {
    for (key, value) in ours {
        let their = theirs.get(key);
        if their != Some(value) {
            differs(key, Some(value), their);
        }
    }
    for (key, value) in theirs.iter().filter(|(key, _)| !ours.contains_key(key)) {
        differs(key, None, Some(value));
    }
}

/// Fields of `stat`.
struct StatFields<T> {
    mode: u32,
    links: u32,
    owner: (u32, u32),
    device: (u32, u32),
    size: u64,
    sectors: u64,
    block: u32,
    times: [T; 3],
    created: Option<T>,
}

impl<T: Debug> StatFields<T> {
    fn to_field_map(&self) -> FieldMap {
        let [accessed, modified, changed] = &self.times;
        let mut fields = FieldMap::new();
        insert_field(&mut fields, "mode", format!("{:o}", self.mode));
        insert_field(&mut fields, "links", self.links.to_string());
        insert_field(&mut fields, "owner", format!("{:?}", self.owner));
        insert_field(&mut fields, "device", format!("{:?}", self.device));
        insert_field(&mut fields, "size", self.size.to_string());
        insert_field(&mut fields, "sectors", self.sectors.to_string());
        insert_field(&mut fields, "block", self.block.to_string());
        insert_field(&mut fields, "accessed", format!("{accessed:?}"));
        insert_field(&mut fields, "modified", format!("{modified:?}"));
        insert_field(&mut fields, "changed", format!("{changed:?}"));
        insert_field(&mut fields, "created", format!("{:?}", self.created));
        fields
    }
}

fn open_path(path: &Path, how: OFlags) -> rustix::io::Result<File> {
    let how = how | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::open(path, how, Mode::empty()).map(File::from)
}

fn add_kernel_flags(file: &File, fields: &mut FieldMap) {
    let flags = rustix::fs::ioctl_getflags(file).unwrap();
    insert_field(fields, "flags", format!("{:#x}", flags.bits()));
    insert_field(fields, "generation", ioctl::get_generation(file).unwrap().to_string());
}

fn add_kernel_xattrs(path: &Path, fields: &mut FieldMap) {
    let mut names = vec![0; 65536];
    let len = match rustix::fs::llistxattr(path, &mut names[..]) {
        Ok(len) => len,
        Err(Errno::OPNOTSUPP) => 0,
        Err(error) => panic!("{}: {error}", path.display()),
    };
    for name in names[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let text = std::str::from_utf8(name).unwrap();
        let mut value = vec![0; 65536];
        let len = rustix::fs::lgetxattr(path, text, &mut value[..]).unwrap();
        insert_field(fields, format!("attribute {text}"), xattr_value_text(&value[..len]));
    }
}

fn xattr_value_text(value: &[u8]) -> String {
    if value.len() < 100 {
        escape_bytes(value)
    } else {
        format!("{} {:x}", value.len(), digest(value))
    }
}

fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

/// Returns the data ranges and their digest. Reading caches unwritten blocks, which then count as
/// data, so all ranges are found before any is read.
fn kernel_contents(file: &File, size: u64) -> String {
    let mut found = Vec::new();
    let mut at = 0;
    while at < size {
        let Ok(start) = rustix::fs::seek(file, SeekFrom::Data(at)) else { break };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start)).unwrap();
        found.push((start, end));
        at = end;
    }
    let mut text = String::new();
    for (start, end) in found {
        let digest = digest_of_range(start, end, |at, into| file.read_at(into, at).ok());
        write!(text, "{start}-{end} {digest} ").unwrap();
    }
    text
}

/// Returns the digest of the bytes in `start..end`.
fn digest_of_range(start: u64, end: u64, read: impl Fn(u64, &mut [u8]) -> Option<usize>) -> String {
    let mut hasher = DefaultHasher::new();
    let mut piece = vec![0; READ_BYTES];
    let mut at = start;
    while at < end {
        let len = (end - at).min(READ_BYTES as u64) as usize;
        match read(at, &mut piece[..len]) {
            Some(got) if got > 0 => {
                hasher.write(&piece[..got]);
                at += got as u64;
            }
            _ => return format!("unreadable at {at}"),
        }
    }
    format!("{:x}", hasher.finish())
}

fn draconis_fields(volume: &Volume, number: InodeNumber, attributes: &Attributes) -> FieldMap {
    let time = |time: draconis_types::Time| (time.seconds, time.nanoseconds);
    let mut told = StatFields {
        mode: attributes.mode,
        links: attributes.links,
        owner: (attributes.uid, attributes.gid),
        device: attributes.device,
        size: attributes.size_bytes,
        sectors: attributes.blocks_512,
        block: attributes.block_size_bytes,
        times: [attributes.accessed, attributes.modified, attributes.changed].map(time),
        created: attributes.created.map(time),
    }
    .to_field_map();
    add_draconis_xattrs(volume, number, attributes, &mut told);
    match attributes.kind {
        FileType::File | FileType::Directory => {
            let contents =
                (attributes.kind == FileType::File).then(|| draconis_contents(volume, number));
            if contents.as_deref() != Some(REFUSED_CONTENTS) {
                insert_field(&mut told, "flags", format!("{:#x}", attributes.flags));
                insert_field(&mut told, "generation", attributes.generation.to_string());
            }
            if let Some(contents) = contents {
                insert_field(&mut told, "contents", contents);
            }
        }
        FileType::Symlink => match volume.read_link(number) {
            Ok(target) => insert_field(&mut told, "target", escape_bytes(target)),
            Err(error) => insert_field(&mut told, "target", error.to_string()),
        },
        _ => {}
    }
    told
}

fn add_draconis_xattrs(
    volume: &Volume,
    number: InodeNumber,
    attributes: &Attributes,
    fields: &mut FieldMap,
) {
    match volume.xattr_names(number) {
        Ok(names) => {
            if attributes.no_xattrs && !names.is_empty() {
                insert_field(fields, "attributes", "some, where there are said to be none");
            }
            for name in names {
                let value = volume.xattr(number, &name);
                let text = value.map_or_else(|error| error.to_string(), |it| xattr_value_text(&it));
                insert_field(fields, format!("attribute {}", String::from_utf8_lossy(&name)), text);
            }
        }
        Err(error) => insert_field(fields, "attributes", error.to_string()),
    }
    match volume.xattr(number, b"user.not there") {
        Err(Error::NoAttribute | Error::Unsupported { .. }) => {}
        other => insert_field(fields, "an attribute that is not there", format!("{other:?}")),
    }
}

/// As [`kernel_contents`], but reads only the ends of each hole.
fn draconis_contents(volume: &Volume, number: InodeNumber) -> String {
    let inode = volume.inode(number).unwrap();
    let size = inode.size_bytes;
    let mut text = String::new();
    let mut at = 0;
    loop {
        let (start, end) = match next_data_range(volume, number, at, size) {
            Ok(next) => next,
            Err(error) if error.to_string().contains("key not available") => {
                return REFUSED_CONTENTS.into();
            }
            Err(error) => return format!("{text}then: {error}"),
        };
        for hole in [at..start.min(at + 5000), start.saturating_sub(5000).max(at)..start] {
            let mut zeros = vec![1; (hole.end - hole.start) as usize];
            let got = volume.read_into(number, hole.start, &mut zeros);
            if got != Ok(zeros.len()) || zeros.iter().any(|byte| *byte != 0) {
                write!(text, "hole {hole:?} is not zeros: {got:?} ").unwrap();
            }
        }
        if start >= size {
            break;
        }
        let digest =
            digest_of_range(start, end, |at, into| volume.read_into(number, at, into).ok());
        write!(text, "{start}-{end} {digest} ").unwrap();
        at = end;
    }
    if volume.read_into(number, size, &mut [0; 10]) != Ok(0) {
        text.push_str("bytes beyond the end");
    }
    text
}

/// Returns the next data range; twice the size if there is none.
fn next_data_range(
    volume: &Volume,
    number: InodeNumber,
    at: u64,
    size: u64,
) -> Result<(u64, u64), Error> {
    // Also opens an empty file.
    volume.read(number, at, 1)?;
    if at >= size {
        return Ok((size, size));
    }
    let Some(start) = volume.seek(number, at, Seek::Data)? else { return Ok((size, size)) };
    Ok((start, volume.seek(number, start, Seek::Hole)?.unwrap_or(size)))
}
