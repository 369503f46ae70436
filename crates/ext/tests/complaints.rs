//! Each problem of ext2, planted: the checker finds exactly that one. `e2fsck -fn` agrees on the
//! verdict, and `e2fsck -fp` asks nothing if we predict so.

mod common;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use common::{Image, Pread};
use draconis_device::{Disk, MemoryDisk};
use draconis_ext::check::{CheckOptions, Problem, Report, Severity, What, check};
use draconis_ext::{Follow, InodeNumber, OpenOptions as Open, Volume};

const SUPER: usize = 1024;
const BLOCK: usize = 1024;
const DESCRIPTORS: usize = 2048;

/// A valid volume: blocks of 1 KiB, inodes of 256 bytes, four groups.
struct Sound {
    bytes: Vec<u8>,
    volume: Volume,
}

fn fill(root: &Path) {
    std::fs::write(root.join("small"), vec![7; 5000]).unwrap();
    std::fs::write(root.join("large"), vec![9; 400_000]).unwrap();
    std::fs::create_dir_all(root.join("outer/inner")).unwrap();
    std::fs::create_dir_all(root.join("other")).unwrap();
    std::fs::create_dir(root.join("many")).unwrap();
    for nth in 0..150 {
        std::fs::write(root.join(format!("many/a somewhat longer name {nth}")), b"").unwrap();
    }
    std::os::unix::fs::symlink("short", root.join("fast")).unwrap();
    std::os::unix::fs::symlink("x/".repeat(100), root.join("slow")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap();
    for (name, len) in [("user.a", 30), ("user.b", 300)] {
        let flags = rustix::fs::XattrFlags::empty();
        let _ = rustix::fs::setxattr(root.join("small"), name, &vec![b'v'; len], flags);
    }
}

impl Sound {
    fn make(arguments: &[&str], size: &str) -> Option<Self> {
        let source = tempfile::tempdir().unwrap();
        fill(source.path());
        let mut all = vec!["-b", "1024", "-I", "256", "-N", "256", "-E", common::HASH_SEED];
        all.extend(arguments);
        let image = Image::make(Some(source.path()), size, &all)?;
        common::run("e2fsck", &["-fyD", image.path()])?;
        let bytes = std::fs::read(&image.path).unwrap();
        let disk = Arc::new(Pread::open(&image.path, 512));
        Some(Self { bytes, volume: Volume::open(disk, Open::default()).unwrap() })
    }

    fn number(&self, path: &str) -> u32 {
        self.volume.resolve(InodeNumber::ROOT, path.as_bytes(), Follow::No).unwrap().0
    }

    fn le32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().unwrap())
    }

    /// Returns the offset of an inode.
    fn slot(&self, number: u32) -> usize {
        let per_group = self.le32(SUPER + 0x28);
        let group = ((number - 1) / per_group) as usize;
        let table = self.le32(DESCRIPTORS + 32 * group + 8) as usize * BLOCK;
        table + ((number - 1) % per_group) as usize * 256
    }

    fn inode(&self, path: &str) -> usize {
        self.slot(self.number(path))
    }

    /// Returns a block pointer of a file.
    fn pointer(&self, path: &str, nth: usize) -> u32 {
        self.le32(self.inode(path) + 40 + 4 * nth)
    }

    /// Returns the offset of a block of a file.
    fn block(&self, path: &str, nth: usize) -> usize {
        self.pointer(path, nth) as usize * BLOCK
    }

    /// Returns the offset of a name's entry in the first block of a directory.
    fn entry(&self, dir: &str, name: &str) -> usize {
        let at = self.block(dir, 0);
        let block = &self.bytes[at..at + BLOCK];
        let found = block.windows(name.len()).position(|it| it == name.as_bytes()).unwrap();
        at + found - 8
    }
}

/// Changes: offset and new bytes.
type Edits = Vec<(usize, Vec<u8>)>;

fn le16(at: usize, value: u16) -> (usize, Vec<u8>) {
    (at, value.to_le_bytes().to_vec())
}

fn le32(at: usize, value: u32) -> (usize, Vec<u8>) {
    (at, value.to_le_bytes().to_vec())
}

/// Problems planted by any test, to find those that were not.
static PLANTED: Mutex<BTreeSet<What>> = Mutex::new(BTreeSet::new());

/// All failures, reported together.
static WRONG: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn look(bytes: Vec<u8>) -> Report {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(bytes, 512));
    check(&disk, CheckOptions::default(), &|_, _| {}).unwrap()
}

fn planted(sound: &Sound, name: &str, edits: &Edits, expected: &[What]) {
    let mut bytes = sound.bytes.clone();
    for (at, value) in edits {
        bytes[*at..at + value.len()].copy_from_slice(value);
    }
    judge(name, &bytes, expected);
}

fn judge(name: &str, bytes: &[u8], expected: &[What]) {
    let report = look(bytes.to_vec());
    let found: BTreeSet<What> = report.problems.iter().map(|it| it.what).collect();
    let text: Vec<String> = report.problems.iter().map(ToString::to_string).collect();
    let mut wrong = Vec::new();
    if found != expected.iter().copied().collect() {
        wrong.push(format!("{name}: {text:#?}"));
    }
    PLANTED.lock().unwrap().extend(expected);
    let image = Image::of(bytes);
    let tools = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let e2fsck =
        |how| Command::new("e2fsck").args([how, image.path()]).env("PATH", &tools).output();
    let output = e2fsck("-fn");
    let clean = expected.iter().all(|what| what.severity() == Severity::Notice);
    assert_eq!(report.is_clean(), found.iter().all(|it| it.severity() == Severity::Notice));
    if let Ok(output) = output
        && (output.status.code() == Some(0)) != clean
    {
        let said = String::from_utf8_lossy(&output.stdout);
        wrong.push(format!("{name}: {text:#?}, but e2fsck says:\n{said}"));
    }
    let mended = report.problems.iter().all(Problem::is_preen_ok);
    if let Ok(output) = e2fsck("-fp") {
        let asked = !matches!(output.status.code(), Some(0 | 1));
        if asked == mended && (asked || !CAREFUL.contains(&name)) {
            let said = String::from_utf8_lossy(&output.stdout);
            wrong.push(format!("{name}: mended {mended}, but e2fsck -fp says:\n{said}"));
        }
        if !asked {
            let again = e2fsck("-fn").unwrap();
            assert_eq!(again.status.code(), Some(0), "{name}");
        }
    }
    WRONG.lock().unwrap().extend(wrong);
}

/// Repaired without a question although such a problem may need one, or with loss of data.
const CAREFUL: &[&str] = &[
    "quota inode",
    "inode 6",
    "index of a file",
    "attribute hash",
    "limit",
    "count",
    "order",
    "magic, needs recovery",
];

macro_rules! plant {
    ($sound:ident: $($name:literal: [$($edit:expr),* $(,)?] => $($what:ident)*;)*) => {
        $(planted(&$sound, $name, &vec![$($edit),*], &[$(What::$what),*]);)*
    };
}

fn usual() -> Option<Sound> {
    Sound::make(&["-g", "512", "-O", "resize_inode"], "2M")
}

#[test]
fn every_complaint_has_been_planted() {
    let Some(s) = usual() else { return };
    superblock_and_groups(&s);
    reserved_inodes(&s);
    inodes(&s);
    blocks(&s);
    names(&s);
    hash_trees(&s);
    connections_and_links(&s);
    bitmaps_and_counters(&s);
    journals();
    let wrong = WRONG.lock().unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let planted = PLANTED.lock().unwrap();
    let known = |what: &&What| planted.contains(what) || OF_EXT4.contains(what);
    let left: Vec<_> = What::ALL.iter().filter(|what| !known(what)).collect();
    assert!(left.is_empty(), "never planted: {left:?}");
}

/// Problems that ext2 volumes cannot have; the test of features plants them.
const OF_EXT4: &[What] = &[
    What::SuperblockChecksum,
    What::GroupChecksum,
    What::GroupUnused,
    What::BlockBitmapChecksum,
    What::InodeBitmapChecksum,
    What::OrphanFile,
    What::MmpBlock,
    What::JournalNotEmpty,
    What::InodeChecksum,
    What::ExtentNode,
    What::ExtentChecksum,
    What::ExtentStart,
    What::ExtentFlag,
    What::Misaligned,
    What::DirectoryUnwritten,
    What::DirectoryChecksum,
    What::AttributeChecksum,
    What::AttributeValue,
    What::AttributeValueReferences,
    What::InlineData,
    What::Encryption,
    What::EntryEncryption,
    What::Quota,
];

fn superblock_and_groups(s: &Sound) {
    let compat = s.le32(SUPER + 0x5C);
    plant! { s:
        "nothing": [] => ;
        "reserved blocks": [le32(SUPER + 8, 1500)] => Superblock;
        "cluster size": [le32(SUPER + 0x1C, 1)] => Superblock;
        "inodes count": [le32(SUPER, 248)] => Superblock;
        "one inode too few": [le32(SUPER, s.le32(SUPER) - 1)] => Superblock;
        "one inode too many": [le32(SUPER, s.le32(SUPER) + 1)] => Superblock;
        "inode size": [le16(SUPER + 0x58, 100)] => Superblock;
        "beyond the disk": [le32(SUPER + 4, 2049)] => VolumeBeyondDisk;
        "resize inode and meta_bg": [le32(SUPER + 0x60, 0x12)] => FeatureClash;
        "journal without feature": [le32(SUPER + 0xE0, 8)] => JournalWithoutFeature;
        "no resize_inode": [le32(SUPER + 0x5C, compat & !0x10)]
            => ReserveWithoutFeature ResizeInodeWithoutFeature;
        "block bitmap": [le32(DESCRIPTORS, 1900)] => GroupBlockBitmap;
        "inode bitmap": [le32(DESCRIPTORS + 4, 99_999)] => GroupInodeBitmap;
        "inode table": [le32(DESCRIPTORS + 8, 1500)] => GroupInodeTable;
        "overlap": [le32(DESCRIPTORS + 4, s.le32(DESCRIPTORS))] => GroupOverlap;
        "uninitialised": [le16(DESCRIPTORS + 96 + 0x12, 2)] => GroupUninitialised;
        "inodes uninitialised": [le16(DESCRIPTORS + 0x12, 1)]
            => GroupUninitialised UsedUninitialised;
        "times, orphans, label": [le32(SUPER + 0x30, u32::MAX), le32(SUPER + 0xE8, 12)] => ;
    }
}

fn reserved_inodes(s: &Sound) {
    plant! { s:
        "bad block inode": [le16(s.slot(1) + 26, 1)] => ReservedInode;
        "quota inode": [le16(s.slot(3) + 26, 1)] => ReservedInode;
        "inode 6": [le16(s.slot(6), 0o100_644)] => ReservedInode;
        "root": [le16(s.slot(2), 0o100_755)]
            => RootMissing EntryKind Unconnected Unattached LinkCount GroupDirectories;
        "resize inode": [le32(s.slot(7) + 40, 1500)] => ResizeInode;
    }
}

fn inodes(s: &Sound) {
    let (small, outer) = (s.inode("/small"), s.inode("/outer"));
    let attributes = s.le32(small + 104) as usize * BLOCK;
    let ro = s.le32(SUPER + 0x64);
    plant! { s:
        "deleted without time": [le16(s.slot(250), 0o100_644)] => DeletedWithoutTime;
        "orphan": [le32(s.slot(250) + 20, 5)] => InOrphanList;
        "orphans": [
            le32(SUPER + 0xE8, s.number("/small")),
            le16(small + 26, 0), le32(small + 20, s.number("/large")),
            le16(s.inode("/large") + 26, 0),
            le32(s.entry("/", "small"), 0), le32(s.entry("/", "large"), 0),
        ] => OnOrphanList DeletedWithoutTime BlockFreeButUsed InodeFreeButUsed
            GroupFreeBlocks GroupFreeInodes FreeBlocks FreeInodes;
        "orphans that go round": [
            le32(SUPER + 0xE8, s.number("/small")),
            le32(small + 20, s.number("/large")),
            le32(s.inode("/large") + 20, s.number("/small")),
        ] => OnOrphanList UsedWithDeletionTime;
        "dead, and its name there": [le16(s.inode("/fast") + 26, 0)]
            => DeletedWithoutTime EntryUnused InodeFreeButUsed GroupFreeInodes FreeInodes;
        "dead with a time, and its name there": [
            le16(s.inode("/slow") + 26, 0), le32(s.inode("/slow") + 20, 1_500_000_000),
        ] => EntryUnused InodeFreeButUsed GroupFreeInodes FreeInodes BlockFreeButUsed
            GroupFreeBlocks FreeBlocks;
        "deletion time": [le32(small + 20, 1_500_000_000)] => UsedWithDeletionTime;
        "mode": [le16(s.inode("/socket"), 0o30_644)] => Mode EntryKind;
        "extents": [le32(s.inode("/socket") + 32, 0x8_0000)] => Flags;
        "index of a file": [le32(small + 32, 0x1000)] => Flags;
        "i_file_acl_hi": [le16(small + 118, 1)] => HighHalf;
        "i_size_high": [le32(outer + 108, 1)] => HighHalf;
        "i_blocks_hi": [le16(small + 116, 1)] => HighHalf;
        "i_faddr": [le32(small + 112, 1)] => FragmentAddress;
        "extra size": [le16(small + 128, 7)] => ExtraSize;
        "attribute inside": [le16(small + 128 + 32 + 4 + 2, 500)] => AttributesInInode;
        "size of a socket": [le32(s.inode("/socket") + 4, 1)] => SpecialSize;
        "fast link": [le32(s.inode("/fast") + 4, 4)] => Symlink;
        "slow link": [(s.block("/slow", 0) + 10, vec![0])] => Symlink;
        "size of a file": [le32(small + 4, 4095)] => Size;
        "size of a directory": [le32(outer + 4, 2048)] => Size;
        "large file": [le32(SUPER + 0x64, ro & !2), le32(small + 108, 1)] => LargeFileFeature;
        "i_blocks": [le32(small + 28, 200)] => BlockCount;
        "attribute magic": [le32(attributes, 0)] => AttributeBlock;
        "attribute hash": [le32(attributes + 32 + 12, 5)] => AttributeBlock;
        "attribute place": [le32(small + 104, 99_999)]
            => AttributeBlock BlockFreeButUsed GroupFreeBlocks FreeBlocks;
        "attribute references": [le32(attributes + 4, 2)] => AttributeReferences;
    }
}

fn blocks(s: &Sound) {
    let small = s.inode("/small");
    let table = s.le32(DESCRIPTORS + 8);
    // Blocks that the file no longer has are free.
    plant! { s:
        "pointer": [le32(small + 40, 99_999)]
            => PointerOutside BlockFreeButUsed GroupFreeBlocks FreeBlocks;
        "inode table": [le32(small + 40, table + 2)]
            => InMetadata BlockFreeButUsed GroupFreeBlocks FreeBlocks;
        "two files": [le32(small + 40, s.pointer("/large", 3))]
            => ClaimedTwice BlockFreeButUsed GroupFreeBlocks FreeBlocks;
        "one file": [le32(small + 40, s.pointer("/small", 1))]
            => ClaimedTwice BlockFreeButUsed GroupFreeBlocks FreeBlocks;
    }
}

fn names(s: &Sound) {
    let outer = s.block("/outer", 0);
    let inner = s.entry("/outer", "inner");
    let lost = s.inode("/lost+found");
    plant! { s:
        "hole": [le32(lost + 44, 0), le32(lost + 28, 22)]
            => DirectoryHole BlockFreeButUsed GroupFreeBlocks FreeBlocks;
        "chain": [le16(s.block("/lost+found", 1) + 4, 8)] => EntryChain;
        "slash": [(inner + 9, b"/".to_vec())] => EntryName;
        "no name": [(inner + 6, vec![0])] => EntryName;
        "reserved": [le32(s.entry("/", "small"), 7)] => EntryInode Unattached;
        "beyond": [le32(s.entry("/", "small"), 999)] => EntryInode Unattached;
        "unused": [le32(s.entry("/", "small"), 250)] => EntryUnused Unattached;
        "kind": [(s.entry("/", "small") + 7, vec![3])] => EntryKind;
        "twice": [(s.entry("/", "slow") + 8, b"fast".to_vec())] => EntryTwice;
        "dot": [(outer + 8, b"x".to_vec())] => Dot;
        "dot's inode": [le32(outer, s.number("/small"))] => Dot EntryKind LinkCount;
        "dot-dot": [(outer + 20, b"x".to_vec())] => DotDot;
        "second name": [le32(inner, s.number("/other"))]
            => DirectoryTwice Unconnected LinkCount;
    }
}

fn hash_trees(s: &Sound) {
    let root = s.block("/many", 0);
    plant! { s:
        "root": [(root + 31, vec![1])] => TreeRoot;
        "version": [(root + 28, vec![9])] => TreeRoot;
        "limit": [le16(root + 32, 100)] => TreeNode;
        "count": [le16(root + 34, 200)] => TreeNode;
        "order": [le32(root + 40, u32::MAX)] => TreeOrder TreeRange;
        "range": [le32(root + 40, 5)] => TreeRange;
        "block": [le32(root + 44, 99)] => TreeBlock;
        "name": [(s.block("/many", 1) + 8, b"X".to_vec())] => TreeRange;
    }
}

fn connections_and_links(s: &Sound) {
    let (root, outer) = (2, s.number("/outer"));
    let inner = s.number("/outer/inner");
    plant! { s:
        "no name": [le32(s.entry("/outer", "inner"), 0)] => Unconnected;
        "loop": [
            le32(s.entry("/", "outer"), 0),
            le16(s.block("/outer/inner", 0) + 16, 12),
            le32(s.block("/outer/inner", 0) + 24, outer),
            (s.block("/outer/inner", 0) + 28, b"\xE8\x03\x05\x02again".to_vec()),
        ] => Unconnected;
        "dot-dot": [
            le32(s.block("/outer/inner", 0) + 12, root),
            le16(s.slot(root) + 26, 7), le16(s.slot(outer) + 26, 2),
        ] => Parent;
        "dot-dot of the root": [
            le32(s.block("/", 0) + 12, inner),
            le16(s.slot(root) + 26, 5), le16(s.slot(inner) + 26, 3),
        ] => Parent;
        "unattached": [le32(s.entry("/", "small"), 0)] => Unattached;
        "unattached, empty": [le32(s.block("/many", 1), 0)] => UnattachedEmpty;
        "unattached, no file": [le32(s.entry("/", "socket"), 0)] => Unattached;
        "a second name": [
            le32(s.block("/many", 1), s.number("/small")),
        ] => UnattachedEmpty LinkCount;
        "links": [le16(s.inode("/small") + 26, 2)] => LinkCount;
    }
}

fn bitmaps_and_counters(s: &Sound) {
    let blocks = s.le32(DESCRIPTORS) as usize * BLOCK;
    let inodes = s.le32(DESCRIPTORS + 4) as usize * BLOCK;
    let last_blocks = s.le32(DESCRIPTORS + 96) as usize * BLOCK;
    let last_inodes = s.le32(DESCRIPTORS + 96 + 4) as usize * BLOCK;
    plant! { s:
        "block is free": [(blocks, vec![0xFE])] => BlockUsedButFree;
        "block is taken": [(last_blocks + 50, vec![1])] => BlockFreeButUsed;
        "inode is free": [(inodes + 1, vec![0xFE])] => InodeUsedButFree;
        "inode is taken": [(last_inodes + 7, vec![0x80])] => InodeFreeButUsed;
        "end of blocks": [(blocks + 1023, vec![0x7F])] => BlockBitmapEnd;
        "end of inodes": [(inodes + 8, vec![0xFE])] => InodeBitmapEnd;
        "group's blocks": [le16(DESCRIPTORS + 12, 5)] => GroupFreeBlocks;
        "group's inodes": [le16(DESCRIPTORS + 14, 5)] => GroupFreeInodes;
        "group's directories": [le16(DESCRIPTORS + 16, 99)] => GroupDirectories;
        "volume's blocks": [le32(SUPER + 12, 5)] => FreeBlocks;
        "volume's inodes": [le32(SUPER + 16, 5)] => FreeInodes;
    }
}

fn journals() {
    let Some(s) = Sound::make(&["-t", "ext3", "-J", "size=1"], "4M") else { return };
    let journal = s.le32(s.slot(8) + 40) as usize * BLOCK;
    let needs_recovery = s.le32(SUPER + 0x60) | 4;
    plant! { s:
        "nothing": [] => ;
        "magic": [le32(journal, 0)] => JournalInode;
        "magic, needs recovery": [le32(journal, 0), le32(SUPER + 0x60, needs_recovery)]
            => Journal JournalInode;
    }
    let Some(s) = Sound::make(&["-O", "^resize_inode"], "4M") else { return };
    let mut old = s.bytes.clone();
    old[SUPER + 0x4C] = 0;
    old[SUPER + 0x58] = 0;
    let report = look(old);
    assert!(report.problems.iter().any(|it| it.what == What::FeaturesInRevision0));
    PLANTED.lock().unwrap().insert(What::FeaturesInRevision0);
}

#[test]
fn a_complaint_names_its_place() {
    let Some(s) = usual() else { return };
    let mut bytes = s.bytes.clone();
    let small = s.inode("/small");
    bytes[small + 26] = 9;
    bytes[s.entry("/", "fast") + 7] = 1;
    let report = look(bytes);
    let text: Vec<String> = report.problems.iter().map(ToString::to_string).collect();
    let root = s.pointer("/", 0);
    assert_eq!(
        text,
        [
            format!(
                "inode 2, block {root}, \"fast\": the kind in the entry is not that of the \
                 inode: 1, should be 7"
            ),
            format!("inode {}: the link count is wrong: 9, should be 1", s.number("/small")),
        ]
    );
}

#[test]
fn complaints_are_bounded() {
    let Some(s) = usual() else { return };
    let mut bytes = s.bytes.clone();
    for number in 12..60 {
        bytes[s.slot(number) + 112] = 1;
    }
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(bytes, 512));
    let options = CheckOptions { max_problems: 10, ..CheckOptions::default() };
    let report = check(&disk, options, &|_, _| {}).unwrap();
    assert_eq!((report.problems.len(), report.suppressed), (10, 38));
    assert!(!report.is_clean());
}
