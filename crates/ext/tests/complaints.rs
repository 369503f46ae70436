//! Each problem of ext2, planted: the checker finds exactly that one. `e2fsck -fn` agrees on the
//! verdict, and `e2fsck -fp` asks nothing if we predict so.

use crate::common;
use crate::common::repairing;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::common::{Image, PreadDisk};
use draconis_device::{Disk, MemoryDisk};
use draconis_ext::check::{CheckOptions, Problem, Report, Severity, What, check};
use draconis_ext::{Follow, InodeNumber, OpenOptions as Open, Volume};
use draconis_testkit::judge;

const SUPERBLOCK_AT: usize = 1024;
const BLOCK_BYTES: usize = 1024;
const DESCRIPTORS_AT: usize = 2048;

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
        common::run_tool("e2fsck", &["-fyD", image.path()])?;
        let bytes = std::fs::read(&image.path).unwrap();
        let disk = Arc::new(PreadDisk::open(&image.path, 512));
        Some(Self { bytes, volume: Volume::open(disk, Open::default()).unwrap() })
    }

    fn inode_number(&self, path: &str) -> u32 {
        self.volume.resolve(InodeNumber::ROOT, path.as_bytes(), Follow::No).unwrap().0
    }

    fn le32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().unwrap())
    }

    /// Returns the offset of an inode.
    fn inode_slot_offset(&self, number: u32) -> usize {
        let per_group = self.le32(SUPERBLOCK_AT + 0x28);
        let group = ((number - 1) / per_group) as usize;
        let table = self.le32(DESCRIPTORS_AT + 32 * group + 8) as usize * BLOCK_BYTES;
        table + ((number - 1) % per_group) as usize * 256
    }

    fn inode_offset(&self, path: &str) -> usize {
        self.inode_slot_offset(self.inode_number(path))
    }

    /// Returns a block pointer of a file.
    fn block_pointer(&self, path: &str, nth: usize) -> u32 {
        self.le32(self.inode_offset(path) + 40 + 4 * nth)
    }

    /// Returns the offset of a block of a file.
    fn block_offset(&self, path: &str, nth: usize) -> usize {
        self.block_pointer(path, nth) as usize * BLOCK_BYTES
    }

    /// Returns the offset of a name's entry in the first block of a directory.
    fn dirent_offset(&self, dir: &str, name: &str) -> usize {
        let at = self.block_offset(dir, 0);
        let block = &self.bytes[at..at + BLOCK_BYTES];
        let found = block.windows(name.len()).position(|it| it == name.as_bytes()).unwrap();
        at + found - 8
    }
}

/// Changes: offset and new bytes.
type ByteEdits = Vec<(usize, Vec<u8>)>;

fn le16(at: usize, value: u16) -> (usize, Vec<u8>) {
    (at, value.to_le_bytes().to_vec())
}

fn le32(at: usize, value: u32) -> (usize, Vec<u8>) {
    (at, value.to_le_bytes().to_vec())
}

/// Problems planted by any test, to find those that were not.
static PLANTED_PROBLEMS: Mutex<BTreeSet<What>> = Mutex::new(BTreeSet::new());

/// All failures, reported together.
static FAILURES: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn check_bytes(bytes: Vec<u8>) -> Report {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(bytes, 512));
    check(&disk, CheckOptions::default(), &|_, _| {}).unwrap()
}

fn planted(sound: &Sound, name: &str, edits: &ByteEdits, expected: &[What]) {
    let mut bytes = sound.bytes.clone();
    for (at, value) in edits {
        bytes[*at..at + value.len()].copy_from_slice(value);
    }
    check_problems_match(name, &bytes, expected);
}

fn check_problems_match(name: &str, bytes: &[u8], expected: &[What]) {
    let report = check_bytes(bytes.to_vec());
    let found: BTreeSet<What> = report.problems.iter().map(|it| it.what).collect();
    let text: Vec<String> = report.problems.iter().map(ToString::to_string).collect();
    let mut wrong = Vec::new();
    if found != expected.iter().copied().collect() {
        wrong.push(format!("{name}: {text:#?}"));
    }
    PLANTED_PROBLEMS.lock().unwrap().extend(expected);
    let image = Image::from_bytes(bytes);
    let e2fsck = |how| judge::try_run(judge::tool_command("e2fsck").args([how, image.path()]));
    let output = e2fsck("-fn");
    let clean = expected.iter().all(|what| what.severity() == Severity::Notice);
    assert_eq!(report.is_clean(), found.iter().all(|it| it.severity() == Severity::Notice));
    if let Ok(output) = output
        && output.is_success() != clean
    {
        wrong.push(format!("{name}: {text:#?}, but e2fsck says:\n{}", output.stdout));
    }
    let mended = report.problems.iter().all(Problem::is_preen_ok);
    if let Ok(output) = e2fsck("-fp") {
        let asked = !matches!(output.status, Some(0 | 1));
        if asked == mended && (asked || !PREENED_DESPITE_DATA_LOSS.contains(&name)) {
            let printed = output.stdout;
            wrong.push(format!("{name}: mended {mended}, but e2fsck -fp says:\n{printed}"));
        }
        if !asked {
            let again = e2fsck("-fn").unwrap();
            assert!(again.is_success(), "{name}");
        }
    }
    match repairing::repair(bytes) {
        Ok(repairing::Repaired::Whole(bytes)) => assert!(check_bytes(bytes).is_clean(), "{name}"),
        Ok(repairing::Repaired::Left(why)) => {
            if !UNREPAIRED.contains(&name) {
                wrong.push(format!("{name}: not repaired: {why}"));
            }
        }
        Err(why) => wrong.push(format!("{name}: repaired, {why}")),
    }
    FAILURES.lock().unwrap().extend(wrong);
}

/// Plants that a repair refuses.
const UNREPAIRED: &[&str] = &["beyond the disk"];

/// Repaired without a question although such a problem may need one, or with loss of data.
const PREENED_DESPITE_DATA_LOSS: &[&str] = &[
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

fn default_volume() -> Option<Sound> {
    Sound::make(&["-g", "512", "-O", "resize_inode"], "2M")
}

#[test]
fn every_problem_kind_is_planted() {
    let Some(s) = default_volume() else { return };
    plant_superblock_and_group_problems(&s);
    plant_reserved_inode_problems(&s);
    plant_inode_problems(&s);
    plant_block_problems(&s);
    plant_name_problems(&s);
    plant_htree_problems(&s);
    plant_connectivity_and_link_problems(&s);
    plant_bitmap_and_counter_problems(&s);
    plant_journal_problems();
    let wrong = FAILURES.lock().unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let planted = PLANTED_PROBLEMS.lock().unwrap();
    let known = |what: &&What| planted.contains(what) || EXT4_ONLY_PROBLEMS.contains(what);
    let left: Vec<_> = What::ALL.iter().filter(|what| !known(what)).collect();
    assert!(left.is_empty(), "never planted: {left:?}");
}

/// Problems that ext2 volumes cannot have; the test of features plants them. A check replays a journal
/// in memory: only `repair` names one that was not replayed. `journal_damage.rs` flips bits of copies.
const EXT4_ONLY_PROBLEMS: &[What] = &[
    What::FeatureLost,
    What::JournalCopy,
    What::SuperblockChecksum,
    What::GroupChecksum,
    What::GroupUnused,
    What::BlockBitmapChecksum,
    What::InodeBitmapChecksum,
    What::OrphanFile,
    What::MmpBlock,
    What::JournalNotEmpty,
    What::Unreplayed,
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

fn plant_superblock_and_group_problems(s: &Sound) {
    let compat = s.le32(SUPERBLOCK_AT + 0x5C);
    plant! { s:
        "nothing": [] => ;
        "reserved blocks": [le32(SUPERBLOCK_AT + 8, 1500)] => Superblock;
        "cluster size": [le32(SUPERBLOCK_AT + 0x1C, 1)] => Superblock;
        "inodes count": [le32(SUPERBLOCK_AT, 248)] => Superblock;
        "one inode too few": [le32(SUPERBLOCK_AT, s.le32(SUPERBLOCK_AT) - 1)] => Superblock;
        "one inode too many": [le32(SUPERBLOCK_AT, s.le32(SUPERBLOCK_AT) + 1)] => Superblock;
        "inode size": [le16(SUPERBLOCK_AT + 0x58, 100)] => Superblock;
        "beyond the disk": [le32(SUPERBLOCK_AT + 4, 2049)] => VolumeBeyondDisk;
        "resize inode and meta_bg": [le32(SUPERBLOCK_AT + 0x60, 0x12)] => FeatureClash;
        "journal without feature": [le32(SUPERBLOCK_AT + 0xE0, 8)] => JournalWithoutFeature;
        "no resize_inode": [le32(SUPERBLOCK_AT + 0x5C, compat & !0x10)]
            => ReserveWithoutFeature ResizeInodeWithoutFeature;
        "block bitmap": [le32(DESCRIPTORS_AT, 1900)] => GroupBlockBitmap GroupFreeBlocks FreeBlocks;
        "inode bitmap": [le32(DESCRIPTORS_AT + 4, 99_999)]
            => GroupInodeBitmap BlockFreeButUsed GroupFreeBlocks FreeBlocks;
        "inode table": [le32(DESCRIPTORS_AT + 8, 1500)] => GroupInodeTable;
        "overlap": [le32(DESCRIPTORS_AT + 4, s.le32(DESCRIPTORS_AT))] => GroupOverlap;
        "uninitialised": [le16(DESCRIPTORS_AT + 96 + 0x12, 2)] => GroupUninitialised;
        "inodes uninitialised": [le16(DESCRIPTORS_AT + 0x12, 1)]
            => GroupUninitialised UsedUninitialised;
        "times, orphans, label": [le32(SUPERBLOCK_AT + 0x30, u32::MAX), le32(SUPERBLOCK_AT + 0xE8, 12)] => ;
    }
}

fn plant_reserved_inode_problems(s: &Sound) {
    plant! { s:
        "bad block inode": [le16(s.inode_slot_offset(1) + 26, 1)] => ReservedInode;
        "quota inode": [le16(s.inode_slot_offset(3) + 26, 1)] => ReservedInode;
        "inode 6": [le16(s.inode_slot_offset(6), 0o100_644)] => ReservedInode;
        "root": [le16(s.inode_slot_offset(2), 0o100_755)]
            => RootMissing EntryKind Unconnected Unattached LinkCount GroupDirectories;
        "resize inode": [le32(s.inode_slot_offset(7) + 40, 1500)] => ResizeInode;
    }
}

fn plant_inode_problems(s: &Sound) {
    let (small, outer) = (s.inode_offset("/small"), s.inode_offset("/outer"));
    let attributes = s.le32(small + 104) as usize * BLOCK_BYTES;
    let ro = s.le32(SUPERBLOCK_AT + 0x64);
    plant! { s:
        "deleted without time": [le16(s.inode_slot_offset(250), 0o100_644)] => DeletedWithoutTime;
        "orphan": [le32(s.inode_slot_offset(250) + 20, 5)] => InOrphanList;
        "list of a reserved inode": [le32(SUPERBLOCK_AT + 0xE8, 8)] => OrphanList;
        "orphans": [
            le32(SUPERBLOCK_AT + 0xE8, s.inode_number("/small")),
            le16(small + 26, 0), le32(small + 20, s.inode_number("/large")),
            le16(s.inode_offset("/large") + 26, 0),
            le32(s.dirent_offset("/", "small"), 0), le32(s.dirent_offset("/", "large"), 0),
        ] => OnOrphanList DeletedWithoutTime BlockFreeButUsed InodeFreeButUsed
            GroupFreeBlocks GroupFreeInodes FreeBlocks FreeInodes;
        "orphans that go round": [
            le32(SUPERBLOCK_AT + 0xE8, s.inode_number("/small")),
            le32(small + 20, s.inode_number("/large")),
            le32(s.inode_offset("/large") + 20, s.inode_number("/small")),
        ] => OnOrphanList UsedWithDeletionTime;
        "dead, and its name there": [le16(s.inode_offset("/fast") + 26, 0)]
            => DeletedWithoutTime EntryUnused InodeFreeButUsed GroupFreeInodes FreeInodes;
        "dead with a time, and its name there": [
            le16(s.inode_offset("/slow") + 26, 0), le32(s.inode_offset("/slow") + 20, 1_500_000_000),
        ] => EntryUnused InodeFreeButUsed GroupFreeInodes FreeInodes BlockFreeButUsed
            GroupFreeBlocks FreeBlocks;
        "deletion time": [le32(small + 20, 1_500_000_000)] => UsedWithDeletionTime;
        "mode": [le16(s.inode_offset("/socket"), 0o30_644)] => Mode EntryKind;
        "extents": [le32(s.inode_offset("/socket") + 32, 0x8_0000)] => Flags;
        "index of a file": [le32(small + 32, 0x1000)] => Flags;
        "i_file_acl_hi": [le16(small + 118, 1)] => HighHalf;
        "i_size_high": [le32(outer + 108, 1)] => HighHalf;
        "i_blocks_hi": [le16(small + 116, 1)] => HighHalf;
        "i_faddr": [le32(small + 112, 1)] => FragmentAddress;
        "extra size": [le16(small + 128, 7)] => ExtraSize;
        "attribute inside": [le16(small + 128 + 32 + 4 + 2, 500)] => AttributesInInode;
        "size of a socket": [le32(s.inode_offset("/socket") + 4, 1)] => SpecialSize;
        "fast link": [le32(s.inode_offset("/fast") + 4, 4)] => Symlink;
        "slow link": [(s.block_offset("/slow", 0) + 10, vec![0])] => Symlink;
        "size of a file": [le32(small + 4, 4095)] => Size;
        "size of a directory": [le32(outer + 4, 2048)] => Size;
        "large file": [le32(SUPERBLOCK_AT + 0x64, ro & !2), le32(small + 108, 1)] => LargeFileFeature;
        "i_blocks": [le32(small + 28, 200)] => BlockCount;
        "attribute magic": [le32(attributes, 0)] => AttributeBlock;
        "attribute hash": [le32(attributes + 32 + 12, 5)] => AttributeBlock;
        "attribute place": [le32(small + 104, 99_999)]
            => AttributeBlock BlockFreeButUsed GroupFreeBlocks FreeBlocks;
        "attribute references": [le32(attributes + 4, 2)] => AttributeReferences;
    }
}

fn plant_block_problems(s: &Sound) {
    let small = s.inode_offset("/small");
    let table = s.le32(DESCRIPTORS_AT + 8);
    // Blocks that the file no longer has are free.
    plant! { s:
        "pointer": [le32(small + 40, 99_999)]
            => PointerOutside BlockFreeButUsed GroupFreeBlocks FreeBlocks;
        "inode table": [le32(small + 40, table + 2)]
            => InMetadata BlockFreeButUsed GroupFreeBlocks FreeBlocks;
        "two files": [le32(small + 40, s.block_pointer("/large", 3))]
            => ClaimedTwice BlockFreeButUsed GroupFreeBlocks FreeBlocks;
        "one file": [le32(small + 40, s.block_pointer("/small", 1))]
            => ClaimedTwice BlockFreeButUsed GroupFreeBlocks FreeBlocks;
    }
}

fn plant_name_problems(s: &Sound) {
    let outer = s.block_offset("/outer", 0);
    let inner = s.dirent_offset("/outer", "inner");
    let lost = s.inode_offset("/lost+found");
    plant! { s:
        "hole": [le32(lost + 44, 0), le32(lost + 28, 22)]
            => DirectoryHole BlockFreeButUsed GroupFreeBlocks FreeBlocks;
        "chain": [le16(s.block_offset("/lost+found", 1) + 4, 8)] => EntryChain;
        "slash": [(inner + 9, b"/".to_vec())] => EntryName;
        "no name": [(inner + 6, vec![0])] => EntryName;
        "reserved": [le32(s.dirent_offset("/", "small"), 7)] => EntryInode Unattached;
        "beyond": [le32(s.dirent_offset("/", "small"), 999)] => EntryInode Unattached;
        "unused": [le32(s.dirent_offset("/", "small"), 250)] => EntryUnused Unattached;
        "kind": [(s.dirent_offset("/", "small") + 7, vec![3])] => EntryKind;
        "twice": [(s.dirent_offset("/", "slow") + 8, b"fast".to_vec())] => EntryTwice;
        "dot": [(outer + 8, b"x".to_vec())] => Dot;
        "dot's inode": [le32(outer, s.inode_number("/small"))] => Dot EntryKind LinkCount;
        "dot-dot": [(outer + 20, b"x".to_vec())] => DotDot;
        "second name": [le32(inner, s.inode_number("/other"))]
            => DirectoryTwice Unconnected LinkCount;
    }
}

fn plant_htree_problems(s: &Sound) {
    let root = s.block_offset("/many", 0);
    plant! { s:
        "root": [(root + 31, vec![1])] => TreeRoot;
        "version": [(root + 28, vec![9])] => TreeRoot;
        "limit": [le16(root + 32, 100)] => TreeNode;
        "count": [le16(root + 34, 200)] => TreeNode;
        "order": [le32(root + 40, u32::MAX)] => TreeOrder TreeRange;
        "range": [le32(root + 40, 5)] => TreeRange;
        "block": [le32(root + 44, 99)] => TreeBlock;
        "name": [(s.block_offset("/many", 1) + 8, b"X".to_vec())] => TreeRange;
    }
}

fn plant_connectivity_and_link_problems(s: &Sound) {
    let (root, outer) = (2, s.inode_number("/outer"));
    let inner = s.inode_number("/outer/inner");
    plant! { s:
        "no name": [le32(s.dirent_offset("/outer", "inner"), 0)] => Unconnected;
        "loop": [
            le32(s.dirent_offset("/", "outer"), 0),
            le16(s.block_offset("/outer/inner", 0) + 16, 12),
            le32(s.block_offset("/outer/inner", 0) + 24, outer),
            (s.block_offset("/outer/inner", 0) + 28, b"\xE8\x03\x05\x02again".to_vec()),
        ] => Unconnected;
        "dot-dot": [
            le32(s.block_offset("/outer/inner", 0) + 12, root),
            le16(s.inode_slot_offset(root) + 26, 7), le16(s.inode_slot_offset(outer) + 26, 2),
        ] => Parent;
        "dot-dot of the root": [
            le32(s.block_offset("/", 0) + 12, inner),
            le16(s.inode_slot_offset(root) + 26, 5), le16(s.inode_slot_offset(inner) + 26, 3),
        ] => Parent;
        "unattached": [le32(s.dirent_offset("/", "small"), 0)] => Unattached;
        "unattached, empty": [le32(s.block_offset("/many", 1), 0)] => UnattachedEmpty;
        "unattached, no file": [le32(s.dirent_offset("/", "socket"), 0)] => Unattached;
        "a second name": [
            le32(s.block_offset("/many", 1), s.inode_number("/small")),
        ] => UnattachedEmpty LinkCount;
        "links": [le16(s.inode_offset("/small") + 26, 2)] => LinkCount;
    }
}

fn plant_bitmap_and_counter_problems(s: &Sound) {
    let blocks = s.le32(DESCRIPTORS_AT) as usize * BLOCK_BYTES;
    let inodes = s.le32(DESCRIPTORS_AT + 4) as usize * BLOCK_BYTES;
    let last_blocks = s.le32(DESCRIPTORS_AT + 96) as usize * BLOCK_BYTES;
    let last_inodes = s.le32(DESCRIPTORS_AT + 96 + 4) as usize * BLOCK_BYTES;
    plant! { s:
        "block is free": [(blocks, vec![0xFE])] => BlockUsedButFree;
        "block is taken": [(last_blocks + 50, vec![1])] => BlockFreeButUsed;
        "inode is free": [(inodes + 1, vec![0xFE])] => InodeUsedButFree;
        "inode is taken": [(last_inodes + 7, vec![0x80])] => InodeFreeButUsed;
        "end of blocks": [(blocks + 1023, vec![0x7F])] => BlockBitmapEnd;
        "end of inodes": [(inodes + 8, vec![0xFE])] => InodeBitmapEnd;
        "group's blocks": [le16(DESCRIPTORS_AT + 12, 5)] => GroupFreeBlocks;
        "group's inodes": [le16(DESCRIPTORS_AT + 14, 5)] => GroupFreeInodes;
        "group's directories": [le16(DESCRIPTORS_AT + 16, 99)] => GroupDirectories;
        "volume's blocks": [le32(SUPERBLOCK_AT + 12, 5)] => FreeBlocks;
        "volume's inodes": [le32(SUPERBLOCK_AT + 16, 5)] => FreeInodes;
    }
}

fn plant_journal_problems() {
    let Some(s) = Sound::make(&["-t", "ext3", "-J", "size=1"], "4M") else { return };
    let journal = s.le32(s.inode_slot_offset(8) + 40) as usize * BLOCK_BYTES;
    let needs_recovery = s.le32(SUPERBLOCK_AT + 0x60) | 4;
    plant! { s:
        "nothing": [] => ;
        "magic": [le32(journal, 0)] => JournalInode;
        "magic, needs recovery": [le32(journal, 0), le32(SUPERBLOCK_AT + 0x60, needs_recovery)]
            => Journal JournalInode;
    }
    let Some(s) = Sound::make(&["-O", "^resize_inode"], "4M") else { return };
    let mut old = s.bytes.clone();
    old[SUPERBLOCK_AT + 0x4C] = 0;
    old[SUPERBLOCK_AT + 0x58] = 0;
    let report = check_bytes(old);
    assert!(report.problems.iter().any(|it| it.what == What::FeaturesInRevision0));
    PLANTED_PROBLEMS.lock().unwrap().insert(What::FeaturesInRevision0);
}

#[test]
fn problem_text_names_location() {
    let Some(s) = default_volume() else { return };
    let mut bytes = s.bytes.clone();
    let small = s.inode_offset("/small");
    bytes[small + 26] = 9;
    bytes[s.dirent_offset("/", "fast") + 7] = 1;
    let report = check_bytes(bytes);
    let text: Vec<String> = report.problems.iter().map(ToString::to_string).collect();
    let root = s.block_pointer("/", 0);
    assert_eq!(
        text,
        [
            format!(
                "inode 2, block {root}, \"fast\": the kind in the entry is not that of the \
                 inode: 1, should be 7"
            ),
            format!("inode {}: the link count is wrong: 9, should be 1", s.inode_number("/small")),
        ]
    );
}

#[test]
fn problem_list_is_bounded() {
    let Some(s) = default_volume() else { return };
    let mut bytes = s.bytes.clone();
    for number in 12..60 {
        bytes[s.inode_slot_offset(number) + 112] = 1;
    }
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(bytes, 512));
    let options = CheckOptions { max_problems: 10, ..CheckOptions::default() };
    let report = check(&disk, options, &|_, _| {}).unwrap();
    assert_eq!((report.problems.len(), report.suppressed), (10, 38));
    assert!(!report.is_clean());
}
