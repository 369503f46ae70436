//! Fills volumes by the kernel, with files that use the volume's features.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, chown, symlink};
use std::path::Path;

use draconis_device::Random;
use rustix::fs::{
    CWD, FallocateFlags, IFlags, Timespec, Timestamps, XattrFlags, fallocate, ioctl_getflags,
    ioctl_setflags,
};
use rustix::io::Errno;

use crate::common::tree::{self, random_bytes};
use crate::common::{run_tool, spoil};
use crate::matrix::ioctl::{self, EncryptionPolicy};

/// Amount of data.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum DataScale {
    /// One file of each kind, in 4 MiB.
    Tiny,
    /// Enough for trees of two levels.
    Usual,
    /// Enough for trees of three levels.
    Large,
}

/// Output of `dumpe2fs`.
#[derive(Clone, Debug, Default)]
pub struct Dumpe2fsInfo {
    pub features: BTreeSet<String>,
    pub block_bytes: u64,
    pub inode_bytes: u64,
    pub cluster_bytes: u64,
}

impl Dumpe2fsInfo {
    pub fn from_image(image: &Path) -> Self {
        let text = run_tool("dumpe2fs", &["-h", image.to_str().unwrap()]).unwrap();
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.trim_start_matches(':').trim())
        };
        let number = |name| field(name).and_then(|text| text.parse().ok());
        let block_bytes = number("Block size").unwrap();
        Self {
            features: field("Filesystem features")
                .unwrap_or_default()
                .split_whitespace()
                .map(str::to_owned)
                .collect(),
            block_bytes,
            inode_bytes: number("Inode size").unwrap_or(128),
            cluster_bytes: number("Cluster size").unwrap_or(block_bytes),
        }
    }

    pub fn has_feature(&self, feature: &str) -> bool {
        self.features.contains(feature)
    }
}

/// Fills the mount at `root`.
pub fn fill_volume(root: &Path, facts: &Dumpe2fsInfo, scale: DataScale, random: &mut Random) {
    if scale == DataScale::Tiny {
        spoil::build_small_tree(root);
    } else {
        tree::build_tree(root);
    }
    create_fragmented_files(root, facts, scale);
    create_fallocated_ranges(root, facts);
    write_at_large_offsets(root, facts);
    create_owned_files(root);
    create_flagged_files(root, facts);
    create_xattrs(root, facts, scale);
    create_timestamps(root);
    create_htree_names(&root.join("names of one file"), facts, scale, random);
    create_aged_directory(&root.join("used"), scale, random);
    if facts.has_feature("inline_data") {
        create_inline_files(&root.join("inline"), facts, scale);
    }
    if facts.has_feature("encrypt") {
        create_encrypted_files(root, scale);
    }
    if facts.has_feature("casefold") {
        create_casefolded_names(&root.join("folded"));
    }
    if facts.has_feature("verity") {
        fs::write(root.join(VERITY_FILE), random_bytes(VERITY_SEED, VERITY_STORED_BYTES)).unwrap();
    }
    if scale == DataScale::Large && facts.has_feature("dir_nlink") && facts.has_feature("large_dir")
    {
        create_many_subdirectories(&root.join("subdirectories"));
    }
}

/// Fills the source tree for mke2fs if the kernel cannot mount the volume.
pub fn fill_source(root: &Path, facts: &Dumpe2fsInfo) {
    let file = File::create(root.join("fragments")).unwrap();
    for nth in 0..9 {
        let block = random_bytes(nth, facts.block_bytes as usize);
        file.write_all_at(&block, nth * 3 * facts.cluster_bytes).unwrap();
    }
    create_owned_files(root);
    let dir = root.join("used");
    create_aged_directory(&dir, DataScale::Tiny, &mut Random::new(facts.block_bytes));
}

/// A file with a Merkle tree beyond its end, once flagged.
pub const VERITY_FILE: &str = "verity";
const VERITY_SEED: u64 = 31;
const VERITY_STORED_BYTES: usize = 80_000;
const VERITY_FILE_BYTES: usize = 5_000;

/// Returns the contents of that file.
pub fn verity_contents() -> Vec<u8> {
    let mut contents = random_bytes(VERITY_SEED, VERITY_STORED_BYTES);
    contents.truncate(VERITY_FILE_BYTES);
    contents
}

/// Returns debugfs requests for features that this kernel lacks; the result is as from a kernel
/// that has them.
pub fn debugfs_finish_requests(facts: &Dumpe2fsInfo, tune2fs: &[&str]) -> Vec<String> {
    let mut requests = Vec::new();
    let extents = if facts.has_feature("extent") { 0x8_0000 } else { 0 };
    if facts.has_feature("verity") {
        requests.push(format!("sif {VERITY_FILE} flags {:#x}", 0x10_0000 | extents));
        requests.push(format!("sif {VERITY_FILE} size {VERITY_FILE_BYTES}"));
    }
    if tune2fs.iter().any(|word| word.contains("project")) {
        requests.push("sif f1024 projid 77".into());
        requests.push("sif f4096 projid 4000000000".into());
        requests.push("sif a projid 77".into());
    }
    requests
}

/// Writes every other block of a file, some of them unwritten.
fn create_fragmented_files(root: &Path, facts: &Dumpe2fsInfo, scale: DataScale) {
    let file = File::create(root.join("fragments")).unwrap();
    let per_node = (facts.block_bytes - 12) / 12;
    let count = match scale {
        DataScale::Tiny => 12,
        // Four in the inode, each pointing to a leaf: one more needs a second level.
        DataScale::Usual => 4 * per_node + 60,
        DataScale::Large => (6 * per_node).min(3000),
    };
    let room = rustix::fs::statvfs(root).unwrap();
    let clusters = room.f_bavail * room.f_bsize / facts.cluster_bytes;
    let count = count.min(clusters / 3);
    let step = 2 * facts.cluster_bytes;
    let block = random_bytes(11, facts.block_bytes as usize);
    for nth in 0..count {
        let at = nth * step;
        let reserved = nth % 4 == 1
            && fallocate(&file, FallocateFlags::empty(), at, facts.block_bytes).is_ok();
        if !reserved {
            file.write_all_at(&block, at).unwrap();
        }
    }
    file.set_len(count * step + 1).unwrap();
}

/// Makes preallocated, half-written, punched, zeroed, collapsed and inserted ranges.
fn create_fallocated_ranges(root: &Path, facts: &Dumpe2fsInfo) {
    let file = File::create(root.join("ranges")).unwrap();
    let (block, cluster) = (facts.block_bytes, facts.cluster_bytes);
    let change = |how, at, len| match fallocate(&file, how, at, len) {
        Ok(()) | Err(Errno::OPNOTSUPP) => {}
        Err(error) => panic!("{how:?} of {len} at {at}: {error}"),
    };
    let unit = cluster.max(4 * block);
    change(FallocateFlags::empty(), 0, 24 * unit);
    for nth in [0, 3, 4, 5, 9, 17] {
        file.write_all_at(&random_bytes(nth, unit as usize / 2 + 17), nth * unit).unwrap();
    }
    file.sync_all().unwrap();
    let keeping = FallocateFlags::KEEP_SIZE;
    change(FallocateFlags::PUNCH_HOLE | keeping, 4 * unit + 5, block);
    change(FallocateFlags::PUNCH_HOLE | keeping, 11 * unit, unit);
    change(FallocateFlags::ZERO_RANGE, 9 * unit, block);
    change(FallocateFlags::COLLAPSE_RANGE, 13 * unit, unit);
    change(FallocateFlags::INSERT_RANGE, 2 * unit, unit);
    // Preallocated beyond the end.
    change(keeping, 26 * unit, 3 * unit);
    let tail = File::create(root.join("reserved beyond the end")).unwrap();
    tail.write_all_at(b"short", 0).unwrap();
    let _ = fallocate(&tail, keeping, 0, 20 * block);
}

/// Writes beyond 4 GiB, and up to the kernel's limit.
fn write_at_large_offsets(root: &Path, facts: &Dumpe2fsInfo) {
    let block = facts.block_bytes;
    let file = File::create(root.join("far")).unwrap();
    let reach = [5 << 30, 9 << 30, block << 31, (block << 32) - 3 * block - 5];
    for at in [1 << 20, (4 << 30) - 7].into_iter().chain(reach) {
        match file.write_all_at(&random_bytes(at, 3000), at) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::FileTooLarge => return,
            Err(error) => panic!("{at}: {error}"),
        }
    }
}

fn create_owned_files(root: &Path) {
    for (name, owner, group) in [("owned", 70_000, 65_535), ("owned too", 4_000_000_000, 131_072)] {
        let path = root.join(name);
        fs::write(&path, name).unwrap();
        chown(&path, Some(owner), Some(group)).unwrap();
    }
}

/// Sets flags as `chattr`; one file of many is mapped by indirect blocks.
fn create_flagged_files(root: &Path, facts: &Dumpe2fsInfo) {
    let all = [
        ("append", IFlags::APPEND),
        ("immutable", IFlags::IMMUTABLE),
        ("no dump", IFlags::NODUMP | IFlags::NOATIME),
        ("synchronous", IFlags::SYNC),
    ];
    for (name, flags) in all {
        let path = root.join(name);
        fs::write(&path, name).unwrap();
        let file = File::open(&path).unwrap();
        let before = ioctl_getflags(&file).unwrap();
        ioctl_setflags(&file, before | flags).unwrap();
    }
    let path = root.join("mapped by blocks");
    fs::write(&path, random_bytes(5, 20 * facts.block_bytes as usize)).unwrap();
    let file = File::open(&path).unwrap();
    file.sync_all().unwrap();
    let without = IFlags::from_bits_retain(ioctl_getflags(&file).unwrap().bits() & !0x8_0000);
    // Refused with clusters.
    let _ = ioctl_setflags(&file, without);
}

/// Sets attributes in inodes, in shared xattr blocks, and in EA inodes.
fn create_xattrs(root: &Path, facts: &Dumpe2fsInfo, scale: DataScale) {
    let set = |path: &Path, name: &str, value: &[u8]| {
        rustix::fs::lsetxattr(path, name, value, XattrFlags::empty())
    };
    let dir = root.join("attributes");
    fs::create_dir(&dir).unwrap();
    let shared = random_bytes(17, facts.block_bytes as usize / 3);
    let files = if scale == DataScale::Tiny { 3 } else { 40 };
    for nth in 0..files {
        let path = dir.join(format!("shares {nth}"));
        fs::write(&path, b"").unwrap();
        // On a volume without attributes, this adds the feature.
        set(&path, "user.shared", &shared).unwrap();
        if nth % 7 == 1 {
            set(&path, "user.shared", &shared[1..]).unwrap();
        }
        if nth % 5 == 2 {
            set(&path, "user.own", &[nth as u8; 30]).unwrap();
        }
    }
    let path = dir.join("many");
    fs::create_dir(&path).unwrap();
    set(&path, "security.test", b"security").unwrap();
    for nth in 0..60 {
        let value = random_bytes(nth, nth as usize % 13);
        if set(&path, &format!("user.{nth}"), &value) == Err(Errno::NOSPC) {
            break;
        }
    }
    let _ = rustix::fs::removexattr(&path, "user.3");
    symlink("nowhere", dir.join("link")).unwrap();
    set(&dir.join("link"), "trusted.of a link", b"trusted").unwrap();
    if facts.has_feature("ea_inode") {
        let large = [facts.block_bytes as usize + 1, 3000, 9000, 60_000];
        let count = if scale == DataScale::Tiny { 2 } else { large.len() };
        for (nth, len) in large[..count].iter().enumerate() {
            for (which, seed) in [("one", nth), ("too", nth), ("other", nth + 100)] {
                let path = dir.join(format!("large {len} {which}"));
                fs::write(&path, b"").unwrap();
                // The same value for two of three.
                set(&path, "user.large", &random_bytes(seed as u64, *len)).unwrap();
                set(&path, "user.small", b"small").unwrap();
            }
        }
        let path = dir.join("several large");
        fs::write(&path, b"").unwrap();
        for nth in 0..4u64 {
            set(&path, &format!("user.{nth}"), &random_bytes(nth, 2500 + nth as usize)).unwrap();
        }
        rustix::fs::removexattr(&path, "user.2").unwrap();
    }
}

fn create_timestamps(root: &Path) {
    for (name, seconds) in [
        ("1901", -(1i64 << 31)),
        ("1969", -1),
        ("2038", (1 << 31) - 1),
        ("2039", 1 << 31),
        ("2106", 1 << 32),
        ("2200", 7_258_118_400),
        ("2446", 0x3_7FFF_FFFF),
    ] {
        let path = root.join(name);
        fs::write(&path, name).unwrap();
        let accessed = Timespec { tv_sec: seconds, tv_nsec: 999_999_999 };
        let modified = Timespec { tv_sec: seconds.saturating_add(1), tv_nsec: 1 };
        let times = Timestamps { last_access: accessed, last_modification: modified };
        rustix::fs::utimensat(CWD, &path, &times, rustix::fs::AtFlags::empty()).unwrap();
    }
}

/// Adds so many long names of one file that the htree gets an additional level; then removes and
/// changes some.
fn create_htree_names(dir: &Path, facts: &Dumpe2fsInfo, scale: DataScale, random: &mut Random) {
    fs::create_dir(dir).unwrap();
    let first = dir.join("first");
    fs::write(&first, b"one file").unwrap();
    let entries = (facts.block_bytes - 32) / 8;
    // Does not fit into the root: one more level.
    let deep = match scale {
        DataScale::Tiny => 6,
        _ if !facts.has_feature("dir_index") => 40,
        DataScale::Large if facts.has_feature("large_dir") && facts.block_bytes == 1024 => {
            entries * entries
        }
        _ => entries + 2,
    };
    let name = |random: &mut Random| {
        let mut name = format!("{:016x} ", random.next_u64());
        name.push_str(&"long name ".repeat(23));
        name
    };
    let mut names = Vec::new();
    while fs::metadata(dir).unwrap().size() < deep * facts.block_bytes {
        for _ in 0..20 {
            let name = dir.join(name(random));
            fs::hard_link(&first, &name).unwrap();
            names.push(name);
        }
    }
    for (nth, path) in names.iter().enumerate() {
        match nth % 9 {
            0 | 1 => fs::remove_file(path).unwrap(),
            2 => fs::rename(path, dir.join(name(random))).unwrap(),
            _ => {}
        }
    }
}

/// Creates small files with names of every length, and removes many again.
fn create_aged_directory(dir: &Path, scale: DataScale, random: &mut Random) {
    fs::create_dir(dir).unwrap();
    let count = match scale {
        DataScale::Tiny => 40,
        DataScale::Usual => 700,
        DataScale::Large => 4000,
    };
    for nth in 0..count {
        let len = 1 + random.next_below(254) as usize;
        let mut name: Vec<u8> = format!("{nth:x}-").into_bytes();
        name.extend((name.len()..len).map(|at| b"abcdefgh\xC3\xA4\xFF"[at % 11]));
        let path = dir.join(std::ffi::OsStr::from_bytes(&name));
        match nth % 10 {
            0 => fs::create_dir(&path).unwrap(),
            1 => symlink("x".repeat(40 + nth % 40), &path).unwrap(),
            _ => fs::write(&path, random_bytes(nth as u64, nth % 200)).unwrap(),
        }
    }
    for (nth, entry) in fs::read_dir(dir).unwrap().map(Result::unwrap).enumerate() {
        let path = entry.path();
        match (nth % 4, entry.file_type().unwrap().is_dir()) {
            (0, false) => fs::remove_file(&path).unwrap(),
            (0, true) => fs::remove_dir(&path).unwrap(),
            (1, _) => fs::rename(&path, dir.join(format!("renamed {nth}"))).unwrap(),
            _ => {}
        }
    }
}

/// Creates files, directories and symbolic links of lengths around the inode's capacity.
fn create_inline_files(dir: &Path, facts: &Dumpe2fsInfo, scale: DataScale) {
    fs::create_dir(dir).unwrap();
    let step = if scale == DataScale::Tiny { 23 } else { 1 };
    let end = facts.inode_bytes + 20;
    let around: Vec<u64> = (0..end).filter(|len| *len < 300 || *len + 120 > end).collect();
    for len in around.into_iter().step_by(step) {
        fs::write(dir.join(format!("file {len}")), random_bytes(len, len as usize)).unwrap();
        if len > 0 && len % 5 == 0 && len < facts.block_bytes {
            symlink("l".repeat(len as usize), dir.join(format!("link {len}"))).unwrap();
        }
    }
    // Contents that grew out of the inode, and that shrank again.
    let path = dir.join("grown");
    fs::write(&path, b"in the inode").unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    file.write_all_at(&random_bytes(3, 5000), 7).unwrap();
    let path = dir.join("cut");
    fs::write(&path, random_bytes(4, 5000)).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(40).unwrap();
    let path = dir.join("extended");
    fs::write(&path, b"a few").unwrap();
    File::options().write(true).open(&path).unwrap().set_len(70).unwrap();
    // Attributes next to inline contents.
    for len in [10, 40, 90] {
        let path = dir.join(format!("attributed {len}"));
        fs::write(&path, random_bytes(len, len as usize)).unwrap();
        let value = random_bytes(len, 44);
        rustix::fs::setxattr(&path, "user.beside", &value, XattrFlags::empty()).unwrap();
        fs::write(&path, random_bytes(len + 1, 2 * len as usize)).unwrap();
    }
    let most = if scale == DataScale::Tiny { 8 } else { 24 };
    for names in 0..most {
        let below = dir.join(format!("directory {names}"));
        fs::create_dir(&below).unwrap();
        for nth in 0..names {
            fs::write(below.join(format!("name {nth}")), b"").unwrap();
        }
        if names % 3 == 2 {
            fs::remove_file(below.join("name 1")).unwrap();
        }
        if names % 3 == 1 {
            fs::create_dir(below.join("below")).unwrap();
        }
    }
}

/// Creates files to be read without a key: names, types and lengths.
fn create_encrypted_files(root: &Path, scale: DataScale) {
    for (name, policy, padding) in [
        ("encrypted", EncryptionPolicy::Second, 2),
        ("encrypted before", EncryptionPolicy::First, 0),
    ] {
        let dir = root.join(name);
        fs::create_dir(&dir).unwrap();
        ioctl::set_encryption_policy(&File::open(&dir).unwrap(), policy, padding).unwrap();
        let count = if scale == DataScale::Tiny { 10 } else { 255 };
        for len in 1..=count {
            fs::write(dir.join("n".repeat(len)), random_bytes(len as u64, 20 * len)).unwrap();
        }
        for len in [1, 15, 40, 58, 59, 60, 200, 900] {
            symlink("t".repeat(len), dir.join(format!("link {len}"))).unwrap();
        }
        fs::create_dir_all(dir.join("below/it")).unwrap();
        fs::write(dir.join("below/it/file"), random_bytes(1, 100)).unwrap();
    }
}

/// Names and equivalent forms to look them up by.
pub const EQUIVALENT_NAMES: [(&str, &str); 4] = [
    ("Readme", "README"),
    ("UPPER and lower", "upper AND LOWER"),
    ("Caf\u{e9}", "CAFE\u{301}"),
    ("Stra\u{df}e", "STRASSE"),
];

fn create_casefolded_names(dir: &Path) {
    fs::create_dir(dir).unwrap();
    let handle = File::open(dir).unwrap();
    let flags = ioctl_getflags(&handle).unwrap();
    ioctl_setflags(&handle, flags | IFlags::from_bits_retain(0x4000_0000)).unwrap();
    for (name, _) in EQUIVALENT_NAMES {
        fs::write(dir.join(name), name).unwrap();
    }
    for nth in 0..500 {
        fs::write(dir.join(format!("Name Number {nth}")), b"").unwrap();
    }
}

/// Creates more subdirectories than a link count holds.
fn create_many_subdirectories(dir: &Path) {
    fs::create_dir(dir).unwrap();
    for nth in 0..65_100 {
        if let Err(error) = fs::create_dir(dir.join(nth.to_string())) {
            assert!(nth > 1000, "{error}");
            return;
        }
    }
}
