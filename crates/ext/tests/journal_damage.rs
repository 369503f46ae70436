//! Journals of every kind with one flipped bit. A changed committed block is damage, as for
//! `e2fsck` and the kernel; an incomplete log is not.
//!
//! All bits in the first bytes of a block are flipped, and one in some hundred of the others;
//! `DRACONIS_CUTS=1` flips all.

use crate::matrix::ioctl;
use std::fs::{self, File};
use std::sync::Arc;

use crate::common::FILE;
use crate::common::storm::write_options;
use crate::common::{Image, report_skipped, tree};
use draconis_device::{Disk, Group, MemoryDisk, Random, Write};
use draconis_ext::check::{self, What, check};
use draconis_ext::format::jbd2::blocks::header;
use draconis_ext::format::jbd2::{self, RawJournalSuperblock};
use draconis_ext::{BlockLocation, Error, InodeNumber, NewNode, OpenOptions, Volume};
use draconis_testkit::judge;
use draconis_types::Block;
use draconis_types::FileType;

const BLOCK_BYTES: usize = 1024;
/// Of the bits behind the first bytes of a block, one in so many is flipped.
const BIT_SAMPLE_INTERVAL: u64 = 397;
/// Bytes whose bits are all flipped.
const FULLY_FLIPPED_BYTES: usize = 24;

/// A kind of journal: name, options of mke2fs, compatible and incompatible features.
type JournalKind = (&'static str, &'static [&'static str], u32, u32);

const JOURNAL_KINDS: &[JournalKind] = &[
    ("ext3", &["-t", "ext3"], 0, 1),
    ("ext3, sums of transactions", &["-t", "ext3"], 1, 1),
    ("ext4, no sums, wide", &["-t", "ext4", "-O", "64bit,^metadata_csum"], 0, 3),
    ("csum v2", &["-t", "ext4", "-O", "^64bit"], 0, 1 | 8),
    ("csum v3", &["-t", "ext4", "-O", "^64bit"], 0, 1 | 0x10),
    ("csum v3, wide", &["-t", "ext4", "-O", "64bit"], 0, 3 | 0x10),
];

/// Returns the volume blocks of the journal.
fn journal_block_numbers(bytes: &[u8]) -> Vec<usize> {
    let volume = Image::from_bytes(bytes).open();
    let len = volume.inode(InodeNumber(8)).unwrap().size_bytes;
    let mut blocks = vec![];
    while (blocks.len() * BLOCK_BYTES) as u64 != len {
        for run in volume.map(InodeNumber(8), (blocks.len() * BLOCK_BYTES) as u64).unwrap() {
            let BlockLocation::Mapped(first) = run.location else {
                panic!("a journal with a hole")
            };
            blocks.extend((0..run.blocks).map(|nth| (first.0 + u64::from(nth)) as usize));
        }
    }
    blocks
}

/// Makes a volume whose journal holds some transactions, one of them with revokes.
fn make_dirty_journal(row: &JournalKind) -> Option<Vec<u8>> {
    let (_, arguments, compatible, incompatible) = row;
    let more = ["-b", "1024", "-I", "256", "-N", "128", "-J", "size=1"];
    let image = Image::make(None, "4M", &[arguments, &more[..]].concat())?;
    let mut bytes = fs::read(&image.path).unwrap();
    let first = journal_block_numbers(&bytes)[0] * BLOCK_BYTES;
    let raw = RawJournalSuperblock::view_mut(&mut bytes[first..]).unwrap();
    raw.s_feature_compat.set(*compatible);
    raw.s_feature_incompat.set(*incompatible);
    let has_sums = incompatible & 0x18 != 0;
    raw.s_checksum_type = if has_sums { 4 } else { 0 };
    raw.s_checksum.set(0);
    raw.set_tail(None, 1);
    let disk = Arc::new(MemoryDisk::new(bytes, 512));
    let volume =
        Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap();
    let root = volume.root();
    let make = |name: &[u8]| {
        let file = volume.create(root, name, &FILE).unwrap();
        volume.write(file, 0, &tree::random_bytes(name.len() as u64, 700)).unwrap();
    };
    make(b"early");
    let dir = NewNode { kind: FileType::Directory, mode: 0o755, ..FILE };
    volume.create(root, b"directory", &dir).unwrap();
    volume.sync().unwrap();
    make(b"between");
    volume.remove_directory(root, b"directory").unwrap();
    volume.sync().unwrap();
    make(b"late");
    volume.sync().unwrap();
    drop(volume);
    Some(Arc::into_inner(disk).unwrap().into_bytes())
}

fn flip_bit(disk: &MemoryDisk, bytes: &mut [u8], at: usize, bit: usize) {
    bytes[at] ^= 1 << bit;
    let start = at - at % 512;
    let mut block = Block::private(512);
    block.copy_in(0, &bytes[start..start + 512]);
    let writes = vec![Write { at_bytes: start as u64, block }];
    let ticket = disk.submit(Group { writes }, &[]).map_err(|refused| refused.error).unwrap();
    disk.wait_durable(ticket).unwrap();
}

/// Protection of the bits of a journal block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum BitProtection {
    /// A checksum that `e2fsck` verifies.
    Checksum,
    /// The header of a journal block.
    Header,
    /// No protection.
    No,
}

/// Returns each block of the log from the tail on, with its type: `None` for a copy.
fn list_log_blocks(bytes: &[u8], log: &[usize]) -> Vec<(usize, Option<jbd2::BlockType>)> {
    let own = |at: &usize| header(&bytes[at * BLOCK_BYTES..][..BLOCK_BYTES]);
    let last =
        log.iter().rposition(|at| own(at).is_some_and(|(kind, _)| kind == jbd2::BlockType::Commit));
    log[1..=last.unwrap()].iter().map(|at| (*at, own(at).map(|(kind, _)| kind))).collect()
}

fn protection_of_bit(
    row: &JournalKind,
    kind: Option<jbd2::BlockType>,
    is_last: bool,
    at: usize,
) -> BitProtection {
    let (.., compatible, incompatible) = *row;
    let is_summed = incompatible & 0x18 != 0;
    match kind {
        Some(jbd2::BlockType::Commit) if is_summed && (12..60).contains(&at) => {
            BitProtection::Checksum
        }
        // A commit block with a transaction checksum names its type.
        Some(jbd2::BlockType::Commit) if compatible == 1 && matches!(at, 12 | 13 | 16..20) => {
            BitProtection::Checksum
        }
        Some(jbd2::BlockType::Commit) if (8..12).contains(&at) && is_last && !is_summed => {
            BitProtection::No
        }
        Some(jbd2::BlockType::Commit) if at >= 12 => BitProtection::No,
        // The types of descriptors and revoke blocks differ in one bit.
        Some(jbd2::BlockType::Revoke | jbd2::BlockType::Descriptor) if at == 7 && !is_summed => {
            BitProtection::No
        }
        Some(_) if at < 12 => BitProtection::Header,
        Some(jbd2::BlockType::Revoke) if !is_summed => BitProtection::No,
        // Half of a checksum may miss the change.
        None if incompatible & 8 != 0 => BitProtection::No,
        _ if is_summed || compatible == 1 => BitProtection::Checksum,
        _ => BitProtection::No,
    }
}

fn is_damaged(disk: &Arc<MemoryDisk>) -> bool {
    let disk: Arc<dyn Disk> = disk.clone();
    // A copy without a checksum may be the superblock.
    let Ok(volume) = Volume::open(disk, OpenOptions::default()) else { return true };
    assert_eq!(volume.journal_damage().is_some(), volume.read_only_reason().is_some());
    volume.journal_damage().is_some()
}

/// Returns true if `e2fsck -fy` reports the journal, with its output.
fn e2fsck_reports_journal(bytes: &[u8]) -> (bool, String) {
    let image = Image::from_bytes(bytes);
    let printed = judge::e2fsck("-fy", &image.path).output();
    let of_damage = ["checksum error", "was corrupt", "is corrupt", "nvalid", "unknown"];
    let of_journal = |line: &&str| line.contains("ournal") || line.contains("JBD2");
    let is_damage = |line: &str| of_damage.iter().any(|words| line.contains(words));
    (printed.lines().filter(of_journal).any(is_damage), printed)
}

/// Checks that a damaged journal prevents writing, and that the checker reports it.
fn assert_journal_is_refused(bytes: &[u8], what: &str) {
    let disk = Arc::new(MemoryDisk::new(bytes.to_vec(), 512));
    let refused =
        Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).err();
    assert!(matches!(refused, Some(Error::Corrupt { .. })), "{what}: {refused:?}");
    let report =
        check(&(disk.clone() as Arc<dyn Disk>), check::CheckOptions::default(), &|_, _| {});
    let report = report.unwrap();
    assert!(!report.is_clean(), "{what}");
    let named = [What::Journal, What::JournalInode, What::JournalCopy];
    assert!(report.problems.iter().any(|it| named.contains(&it.what)), "{what}");
    assert!(Arc::into_inner(disk).unwrap().into_bytes() == bytes, "{what}: written");
}

fn is_exhaustive_run() -> bool {
    std::env::var_os("DRACONIS_CUTS").is_some()
}

#[test]
#[ignore = "long: a minute: bits anywhere"]
fn flipped_bits_of_committed_transactions_are_detected() {
    let mut random = Random::new(5);
    for row in JOURNAL_KINDS {
        let Some(mut bytes) = make_dirty_journal(row) else { return };
        let log = journal_block_numbers(&bytes);
        let blocks = list_log_blocks(&bytes, &log);
        let of_kind = |kind| blocks.iter().filter(|(_, it)| *it == Some(kind)).count();
        let counts =
            [jbd2::BlockType::Descriptor, jbd2::BlockType::Revoke, jbd2::BlockType::Commit]
                .map(of_kind);
        assert!(counts[0] >= 3 && counts[1] >= 1 && counts[2] >= 3, "{}: {counts:?}", row.0);
        let disk = Arc::new(MemoryDisk::new(bytes.clone(), 512));
        assert!(!is_damaged(&disk), "{}", row.0);
        assert!(!e2fsck_reports_journal(&bytes).0);
        let mut asked = 0;
        for (nth, (block, kind)) in blocks.iter().enumerate() {
            let is_last = nth + 1 == blocks.len();
            for bit in 0..BLOCK_BYTES * 8 {
                if bit >= FULLY_FLIPPED_BYTES * 8
                    && !is_exhaustive_run()
                    && random.next_below(BIT_SAMPLE_INTERVAL) != 0
                {
                    continue;
                }
                let (offset, at) = (bit / 8, block * BLOCK_BYTES + bit / 8);
                flip_bit(&disk, &mut bytes, at, bit % 8);
                let damaged = is_damaged(&disk);
                let sealed = protection_of_bit(row, *kind, is_last, offset);
                let what = format!("{}: {kind:?} in {block}, byte {offset}, bit {bit}", row.0);
                assert!(damaged || sealed == BitProtection::No, "{what}");
                if random.next_below(if is_exhaustive_run() { 4000 } else { 60 }) == 0 {
                    asked += 1;
                    let (theirs, said) = e2fsck_reports_journal(&bytes);
                    // Like a kernel, e2fsck cannot tell a damaged header from the end of the log.
                    // Copies without checksums are unchecked, and only the first sector of a commit
                    // block counts, as in Linux.
                    let is_told = match kind {
                        Some(jbd2::BlockType::Commit) => offset < 60,
                        Some(_) => true,
                        None => sealed == BitProtection::Checksum,
                    };
                    assert!(damaged || !theirs || !is_told, "{what}: {said}");
                    // It also skips copies of blocks that are revoked later.
                    let is_looked_at = sealed == BitProtection::Checksum && kind.is_some();
                    assert!(theirs || !is_looked_at, "{what}: {said}");
                    if sealed != BitProtection::No {
                        assert_journal_is_refused(&bytes, &what);
                    }
                }
                flip_bit(&disk, &mut bytes, at, bit % 8);
            }
        }
        assert!(asked > 10, "{}: {asked}", row.0);
        assert!(!is_damaged(&disk));
    }
}

#[test]
fn flipped_bits_of_journal_superblock_are_detected() {
    let mut random = Random::new(6);
    for row in JOURNAL_KINDS {
        let Some(mut bytes) = make_dirty_journal(row) else { return };
        let first = journal_block_numbers(&bytes)[0] * BLOCK_BYTES;
        let is_summed = row.3 & 0x18 != 0;
        for bit in 0..BLOCK_BYTES * 8 {
            let is_field = bit < 0x54 * 8;
            if !is_field && !is_exhaustive_run() && random.next_below(BIT_SAMPLE_INTERVAL) != 0 {
                continue;
            }
            bytes[first + bit / 8] ^= 1 << (bit % 8);
            let what = format!("{}: bit {bit}", row.0);
            let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(bytes.clone(), 512));
            let opened = Volume::open(disk, OpenOptions::default());
            let is_damaged = match &opened {
                Ok(volume) => volume.journal_damage().is_some(),
                Err(Error::Unsupported { .. }) => true,
                Err(other) => panic!("{what}: {other}"),
            };
            // Fields that select the checksum are protected only while they select it.
            let says_so =
                (0x24 * 8..0x2C * 8).contains(&bit) || (0x50 * 8..0x51 * 8).contains(&bit);
            assert!(is_damaged || !is_summed || says_so, "{what}");
            if random.next_below(if is_exhaustive_run() { 400 } else { 40 }) == 0 {
                let (theirs, said) = e2fsck_reports_journal(&bytes);
                assert!(is_damaged || !theirs, "{what}: {said}");
                if is_damaged && opened.is_ok() {
                    assert_journal_is_refused(&bytes, &what);
                }
            }
            bytes[first + bit / 8] ^= 1 << (bit % 8);
        }
    }
}

/// A log truncated after any block ends before the missing part, without damage.
#[test]
fn truncated_log_is_not_damage() {
    for row in JOURNAL_KINDS {
        let Some(bytes) = make_dirty_journal(row) else { return };
        let log = journal_block_numbers(&bytes);
        let blocks = list_log_blocks(&bytes, &log);
        for cut in 0..blocks.len() {
            let mut torn = bytes.clone();
            for (block, _) in &blocks[cut..] {
                torn[block * BLOCK_BYTES..][..BLOCK_BYTES].fill(0);
            }
            // Part of the next block may be present, too, unless it is a commit block.
            let (next, kind) = blocks[cut];
            if kind != Some(jbd2::BlockType::Commit) {
                let half = next * BLOCK_BYTES..next * BLOCK_BYTES + 512;
                torn[half.clone()].copy_from_slice(&bytes[half]);
            }
            let disk = Arc::new(MemoryDisk::new(torn, 512));
            assert!(!is_damaged(&disk), "{}: {cut}", row.0);
            let volume =
                Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options());
            volume.unwrap().close().unwrap();
        }
    }
}

/// Makes a volume with fast commits of the kernel to replay.
fn make_fast_commit_volume() -> Option<Vec<u8>> {
    let arguments = ["-t", "ext4", "-b", "1024", "-I", "256", "-N", "200", "-J", "size=4"];
    let image = Image::make(None, "16M", &[&arguments[..], &["-O", "fast_commit"]].concat())?;
    let mount = image.mount_writable()?;
    fs::write(mount.path().join("before"), b"before").unwrap();
    let handle = File::open(mount.path()).unwrap();
    rustix::fs::syncfs(&handle).unwrap();
    for nth in 0..3 {
        let file = File::create(mount.path().join(format!("fast {nth}"))).unwrap();
        std::io::Write::write_all(&mut &file, &tree::random_bytes(nth, 2000)).unwrap();
        file.sync_all().unwrap();
    }
    if let Err(error) = ioctl::shut_down(&handle, ioctl::ShutdownMode::WithoutCommit) {
        report_skipped(format_args!("shutting a mount down: {error}"));
        return None;
    }
    drop((handle, mount));
    Some(fs::read(&image.path).unwrap())
}

#[test]
fn flipped_bits_of_fast_commits_are_detected() {
    let Some(mut bytes) = make_fast_commit_volume() else { return };
    let log = journal_block_numbers(&bytes);
    let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let raw = log[0] * BLOCK_BYTES;
    let fast = match word(raw + 0x54) {
        0 => 256,
        blocks => blocks,
    };
    let places = &log[word(raw + 16) - fast + 1..];
    // Records up to the tail, which fills its block.
    let used = |block: &[u8]| {
        let mut at = 0;
        loop {
            let half = |at: usize| usize::from(u16::from_le_bytes([block[at], block[at + 1]]));
            match half(at) {
                8 => return at + 12,
                _ => at += 4 + half(at + 2),
            }
        }
    };
    let is_used = |place: &&usize| {
        bytes[**place * BLOCK_BYTES..][..BLOCK_BYTES].iter().any(|byte| *byte != 0)
    };
    let commits: Vec<(usize, usize)> = places
        .iter()
        .take_while(is_used)
        .map(|at| (*at, used(&bytes[at * BLOCK_BYTES..][..BLOCK_BYTES])))
        .collect();
    assert!(commits.len() >= 3, "{commits:?}");
    let disk = Arc::new(MemoryDisk::new(bytes.clone(), 512));
    assert!(!is_damaged(&disk));
    let mut random = Random::new(7);
    for (block, len) in commits {
        for bit in 0..len * 8 {
            if !is_exhaustive_run()
                && bit >= FULLY_FLIPPED_BYTES * 8
                && bit + 96 < len * 8
                && random.next_below(7) != 0
            {
                continue;
            }
            let at = block * BLOCK_BYTES + bit / 8;
            flip_bit(&disk, &mut bytes, at, bit % 8);
            let what = format!("block {block}, bit {bit}");
            assert!(is_damaged(&disk), "{what}");
            if random.next_below(200) == 0 {
                assert_journal_is_refused(&bytes, &what);
            }
            flip_bit(&disk, &mut bytes, at, bit % 8);
        }
    }
    assert!(!is_damaged(&disk));
}
