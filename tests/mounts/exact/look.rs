//! Visible properties of files, as fields that are compared one by one.
//!
//! Inodes are identified by their names before the call, and times by their relation to earlier
//! ones: neither inode numbers nor absolute times are equal on two volumes.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::exact::sys;

pub type ResultFields = Vec<(String, String)>;

/// Properties of a file, as one process sees them at a time.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub struct ObservedFile {
    pub name: String,
    pub inode: u64,
    /// Times of access, modification, change and birth.
    pub times: [(i64, i64); 4],
    pub fields: ResultFields,
}

/// Names and times of files before a call, by inode number.
#[derive(Default, Clone, Debug)]
pub struct EarlierState(HashMap<u64, (String, [(i64, i64); 4])>);

impl EarlierState {
    pub fn from_observed(seen: &[ObservedFile]) -> Self {
        let mut files = HashMap::new();
        for one in seen {
            files.entry(one.inode).or_insert_with(|| (one.name.clone(), one.times));
        }
        Self(files)
    }

    /// Converts properties to fields relative to the state before; `prefix` is added to their
    /// names. The call began at `start`.
    pub fn relative_fields(
        &self,
        prefix: &str,
        seen: Vec<ObservedFile>,
        start: (i64, i64),
    ) -> ResultFields {
        let mut fields = vec![];
        let mut new: BTreeMap<u64, String> = BTreeMap::new();
        for one in seen {
            let name = format!("{prefix}{}", one.name);
            let known = self.0.get(&one.inode);
            let number = new.len();
            let inode = match known {
                Some((name, _)) => name.clone(),
                None => new.entry(one.inode).or_insert_with(|| format!("new{number}")).clone(),
            };
            fields.push((format!("{name}.inode"), inode));
            fields.extend(
                one.fields.into_iter().map(|(key, value)| (format!("{name}.{key}"), value)),
            );
            let old = known.map(|known| known.1);
            let told: Vec<String> =
                (0..4).map(|i| time_relation(one.times[i], old.map(|old| old[i]), start)).collect();
            for (key, told) in ["atime", "mtime", "ctime", "btime"].iter().zip(&told) {
                fields.push((format!("{name}.{key}"), told.clone()));
            }
            // A new file may get its ctime a tick later.
            if known.is_some() && told[1] == "now" && told[2] == "now" {
                let same = one.times[1] == one.times[2];
                fields.push((format!("{name}.mtime=ctime"), same.to_string()));
            }
        }
        fields
    }
}

/// Time stamps of files advance every few milliseconds.
const TIMESTAMP_TICK_NS: i64 = 12_000_000;

fn time_relation(time: (i64, i64), before: Option<(i64, i64)>, start: (i64, i64)) -> String {
    let nanoseconds = |time: (i64, i64)| i128::from(time.0) * 1_000_000_000 + i128::from(time.1);
    if time == (0, -1) {
        "absent".into()
    } else if before == Some(time) {
        "same".into()
    } else if nanoseconds(time) >= nanoseconds(start) - i128::from(TIMESTAMP_TICK_NS)
        && time.0 < start.0 + 600
    {
        "now".into()
    } else if (1_750_000_000..start.0 + 600).contains(&time.0) {
        // The time of another file, or of an earlier change.
        if before.is_none_or(|before| time > before) { "earlier" } else { "turned back" }.into()
    } else {
        format!("{}.{:09}", time.0, time.1)
    }
}

/// Returns the clock of the kernel's time stamps, which may stand still for longer than a tick on a
/// busy machine.
pub fn current_time() -> (i64, i64) {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    (now.tv_sec, now.tv_nsec)
}

/// Possible names in the directory of a case, so that no listing (which changes times) is
/// necessary.
const KNOWN_NAMES: [&str; 10] = [".", "t", "f", "g", "h", "o", "n", "d", "d/x", "d/y"];
const KNOWN_SUBDIRECTORY_NAMES: [&str; 3] = ["t/x", "t/n", "t/y"];

/// Returns the result of `statx` for the files of a case, without a listing.
pub fn stat_known_names(dir: &Path) -> Vec<ObservedFile> {
    let mut seen = vec![];
    let mut look = |name: &str| {
        let found = sys::lstat(&dir.join(name)).ok();
        seen.extend(found.as_ref().map(|found| from_statx(name, found)));
        found.is_some_and(|found| file_type_bits(&found) == libc::S_IFDIR)
    };
    for name in KNOWN_NAMES {
        // Names below a symbolic link would follow it, which is an access.
        if look(name) && name == "t" {
            let _ = KNOWN_SUBDIRECTORY_NAMES.map(&mut look);
        }
    }
    seen
}

/// Returns all files at and below `dir`, with listings; `dir` itself is ".".
pub fn walk_tree(dir: &Path) -> Vec<ObservedFile> {
    let mut seen = vec![];
    let mut stack = vec![(dir.to_path_buf(), String::from("."))];
    while let Some((path, name)) = stack.pop() {
        let Ok(found) = sys::lstat(&path) else {
            seen.push(absent_file(&name));
            continue;
        };
        let mut one = from_statx(&name, &found);
        add_xattr_link_and_flag_fields(&path, &found, &mut one.fields);
        if file_type_bits(&found) == libc::S_IFDIR {
            let listed = sys::open(&path, libc::O_RDONLY, 0).and_then(|dir| sys::list_names(&dir));
            one.fields.push(("names".into(), format_result(&listed, |names| names.join(" "))));
            for entry in listed.unwrap_or_default().iter().rev() {
                let entry = entry.rsplit_once(':').map_or("", |entry| entry.0);
                if !matches!(entry, "." | "..") {
                    let below = if name == "." { entry.into() } else { format!("{name}/{entry}") };
                    stack.push((path.join(entry), below));
                }
            }
        }
        seen.push(one);
    }
    seen
}

fn absent_file(name: &str) -> ObservedFile {
    let fields = vec![("listed".into(), "but not there".into())];
    ObservedFile { name: name.into(), inode: 0, times: [(0, -1); 4], fields }
}

pub fn file_type_bits(seen: &libc::statx) -> u32 {
    u32::from(seen.stx_mode) & libc::S_IFMT
}

/// Converts the result of `statx`.
pub fn from_statx(name: &str, seen: &libc::statx) -> ObservedFile {
    let mut fields: ResultFields = vec![];
    let mut tell = |key: &str, value: String| fields.push((key.into(), value));
    tell("mode", format!("{:o}", seen.stx_mode));
    tell("links", seen.stx_nlink.to_string());
    tell("owner", format!("{}:{}", seen.stx_uid, seen.stx_gid));
    // Sizes of directories depend on the driver.
    if file_type_bits(seen) != libc::S_IFDIR {
        tell("size", seen.stx_size.to_string());
        tell("blocks", seen.stx_blocks.to_string());
    }
    tell("block size", seen.stx_blksize.to_string());
    tell("device", format!("{}:{}", seen.stx_rdev_major, seen.stx_rdev_minor));
    tell("statx mask", format!("{:x}", seen.stx_mask & 0xfff));
    tell("statx attributes", format!("{:x}", seen.stx_attributes & 0x74));
    tell("statx attributes mask", format!("{:x}", seen.stx_attributes_mask & 0x74));
    let time = |time: &libc::statx_timestamp| (time.tv_sec, i64::from(time.tv_nsec));
    let birth =
        if seen.stx_mask & libc::STATX_BTIME == 0 { (0, -1) } else { time(&seen.stx_btime) };
    ObservedFile {
        name: name.into(),
        inode: seen.stx_ino,
        times: [time(&seen.stx_atime), time(&seen.stx_mtime), time(&seen.stx_ctime), birth],
        fields,
    }
}

/// Adds extended attributes, link targets and inode flags.
fn add_xattr_link_and_flag_fields(path: &Path, found: &libc::statx, fields: &mut ResultFields) {
    let names = sys::listxattr(path);
    fields.push(("xattrs".into(), format_result(&names, |names| names.join(" "))));
    for name in names.unwrap_or_default() {
        let value = sys::getxattr(path, &name);
        fields.push((format!("xattr {name}"), format_result(&value, |value| format_bytes(value))));
    }
    match file_type_bits(found) {
        libc::S_IFLNK => {
            let target = sys::readlink(path);
            fields.push(("target".into(), format_result(&target, |target| format_bytes(target))));
        }
        libc::S_IFREG | libc::S_IFDIR => {
            let how = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOFOLLOW;
            let flags = sys::open(path, how, 0).and_then(|fd| sys::get_inode_flags(&fd));
            fields.push(("flags".into(), format_result(&flags, |flags| format!("{flags:x}"))));
        }
        _ => (),
    }
}

/// Reads the contents of the regular files in each way.
pub fn content_fields(dir: &Path, seen: &[ObservedFile]) -> ResultFields {
    let mut fields = vec![];
    for one in seen {
        let is_file = one
            .fields
            .iter()
            .any(|(key, value)| key == "mode" && value.len() == 6 && value.starts_with("10"));
        if !is_file {
            continue;
        }
        let path = dir.join(&one.name);
        for (key, flags) in [("buffered", 0), ("direct", libc::O_DIRECT)] {
            let read = sys::open(&path, libc::O_RDONLY | flags, 0).and_then(|fd| read_all(&fd));
            fields.push((
                format!("{} {key}", one.name),
                format_result(&read, |bytes| format_bytes(bytes)),
            ));
        }
        let mapped = sys::open(&path, libc::O_RDONLY, 0).and_then(|fd| read_mapped(&fd));
        fields.push((
            format!("{} mapped", one.name),
            format_result(&mapped, |bytes| format_bytes(bytes)),
        ));
    }
    fields
}

pub fn read_all(fd: &OwnedFd) -> Result<Vec<u8>, i32> {
    // Direct reads need aligned memory.
    let mut memory = vec![0_u8; (256 << 10) + 4096];
    let skip = memory.as_ptr().align_offset(4096);
    let buffer = &mut memory[skip..skip + (256 << 10)];
    let mut bytes = vec![];
    loop {
        let len = sys::pread(fd, buffer, bytes.len() as i64)? as usize;
        bytes.extend_from_slice(&buffer[..len]);
        if len == 0 || !len.is_multiple_of(4096) {
            return Ok(bytes);
        }
    }
}

fn read_mapped(fd: &OwnedFd) -> Result<Vec<u8>, i32> {
    let len = sys::fstat(fd)?.stx_size as usize;
    if len == 0 {
        return Ok(vec![]);
    }
    sys::MemoryMapping::new(fd, len, false)?.read_bytes(len)
}

/// Formats bytes, or their number and checksum.
pub fn format_bytes(bytes: &[u8]) -> String {
    if bytes.len() <= 48 {
        return format!("\"{}\"", bytes.escape_ascii());
    }
    let mut sum = 0xcbf2_9ce4_8422_2325_u64;
    for &byte in bytes {
        sum = (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    format!("{} bytes, {sum:016x}", bytes.len())
}

/// Formats a result.
pub fn format_result<T>(result: &Result<T, i32>, tell: impl FnOnce(&T) -> String) -> String {
    match result {
        Ok(value) => tell(value),
        Err(errno) => sys::errno_name(*errno),
    }
}
