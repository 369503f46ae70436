//! Golden digests of every write group of every chain in recorded runs. Refactoring must not change
//! them. After an intended change: `DRACONIS_BLESS=1 cargo test -p draconis-ext --test main chains::`.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::common::storm::{RandomChoice, Storm};
use draconis_device::{MemoryDisk, Random};
use draconis_ext::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use draconis_ext::mkfs::{self, FileSource, FormatTarget, NodeKind, Tree, TreeNode};
use draconis_ext::{AccessTimes, NewNode, OpenOptions, RenameMode, Whiteout, WriteOptions};
use draconis_testkit::{Event, RecordDisk};
use draconis_types::{FileType, Time};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/chains.golden");
const STEPS_PER_SEED: u64 = 400;
/// Block size, and bytes of the volume.
const VOLUME_GEOMETRIES: [(u32, usize); 4] =
    [(1024, 4 << 20), (4096, 24 << 20), (2048, 700 << 10), (1024, 20 << 20)];

struct EmptyFileSource;

impl FileSource for EmptyFileSource {
    fn read(&self, _: u64, _: u64, _: &mut [u8]) -> std::io::Result<()> {
        Ok(())
    }
}

/// Volumes with other protocols than plain ext2, and their seeds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Plain,
    Journal,
    JournalWithChecksums,
    Unordered,
    Atomic,
}

const SEEDS: u64 = 40;
const PLAIN_SEEDS: u64 = 24;
const OTHER_KINDS: [Kind; 4] =
    [Kind::Journal, Kind::JournalWithChecksums, Kind::Unordered, Kind::Atomic];
/// Block size, and bytes of a volume that may have a journal.
const OTHER_GEOMETRIES: [(u32, usize); 2] = [(1024, 20 << 20), (4096, 48 << 20)];

fn format_image(kind: Kind, block_bytes: u32, len_bytes: usize) -> Vec<u8> {
    let mut options = mkfs::FormatOptions {
        block_bytes: Some(block_bytes),
        uuid: [7; 16],
        hash_seed: [9; 16],
        time: 1_600_000_000,
        ..mkfs::FormatOptions::default()
    };
    if matches!(kind, Kind::Journal | Kind::JournalWithChecksums) {
        options.compatible |= Compatible::HAS_JOURNAL;
    }
    if matches!(kind, Kind::JournalWithChecksums | Kind::Unordered) {
        options.incompatible |= Incompatible::EXTENTS;
        options.read_only_compatible |= ReadOnlyCompatible::METADATA_CSUM;
    }
    let disk = MemoryDisk::new(vec![0xEE; len_bytes], 512);
    let mut tree = Tree::new(TreeNode::new(NodeKind::Directory, 0o755));
    let plan = mkfs::plan_for_size(&options, &mut tree, len_bytes as u64).unwrap();
    let target = FormatTarget { disk: &disk, zeroed: false, progress: &|_| {} };
    mkfs::write(&plan, &EmptyFileSource, &target).unwrap();
    drop(plan);
    disk.into_bytes()
}

/// FNV-1a hash.
struct Digest(u64);

impl Digest {
    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01B3);
        }
    }
}

/// Makes steps that `Storm` lacks: orphans and whiteouts.
fn random_step(storm: &mut Storm, nth: u64, choose: RandomChoice<'_>) {
    let file =
        NewNode { kind: FileType::File, mode: 0o600, uid: 0, gid: 0, device: (0, 0), target: b"" };
    let root = storm.volume.root();
    match choose(24) {
        0 => {
            let Ok(inode) = storm.volume.create_tmpfile(root, &file) else { return };
            storm.volume.add_user(inode);
            let _ = storm.volume.write(inode, 0, &vec![3; choose(9000) as usize]);
            if choose(2) == 0 {
                let _ = storm.volume.link(inode, root, format!("first {nth}").as_bytes());
            }
            if choose(2) == 0 {
                storm.volume.remove_users(inode, 1);
            }
        }
        1 => {
            let name = format!("moved {nth}");
            let Ok(_) = storm.volume.create(root, name.as_bytes(), &file) else { return };
            let to = format!("moved {}", choose(nth + 1));
            let of = Whiteout { uid: 0, gid: 0 };
            let how = RenameMode::Replace;
            let (name, to) = (name.as_bytes(), to.as_bytes());
            let _ = storm.volume.rename_with_whiteout(root, name, root, to, how, of);
        }
        2 => {
            // Nested directories, moved in and out.
            let directory = NewNode { kind: FileType::Directory, mode: 0o700, ..file };
            let mut dirs = vec![root];
            for depth in 0..choose(50) {
                let name = if depth == 0 { format!("deep {nth}") } else { "d".to_owned() };
                let at = dirs[dirs.len() - 1];
                let Ok(dir) = storm.volume.create(at, name.as_bytes(), &directory) else { break };
                dirs.push(dir);
            }
            for depth in (choose(2) as usize..dirs.len() - 1).rev() {
                let name = if depth == 0 { format!("deep {nth}") } else { "d".to_owned() };
                let _ = storm.volume.remove_directory(dirs[depth], name.as_bytes());
            }
        }
        _ => storm.random_change(choose),
    }
}

/// Runs one seed; returns the line of digests.
fn digest_line_for_seed(seed: u64) -> String {
    let nth = seed as usize;
    let (kind, (block_bytes, len_bytes)) = match seed < PLAIN_SEEDS {
        true => (Kind::Plain, VOLUME_GEOMETRIES[nth % 4]),
        false => (OTHER_KINDS[nth % 4], OTHER_GEOMETRIES[nth / 4 % 2]),
    };
    let disk = MemoryDisk::new(format_image(kind, block_bytes, len_bytes), 512);
    let disk = if kind == Kind::Atomic { disk.atomic_against_power_cuts() } else { disk };
    let disk = Arc::new(RecordDisk::new(disk));
    // A clock that only the steps advance.
    let time = Arc::new(AtomicI64::new(1_700_000_000));
    let now = time.clone();
    let clock = move || Time { seconds: now.load(Ordering::Relaxed), nanoseconds: 7 };
    let atime = [AccessTimes::Relative, AccessTimes::Strict, AccessTimes::Never][seed as usize % 3];
    let writing =
        WriteOptions { clock: Arc::new(clock), dirty_bytes: 2 << 20, atime, discard: true };
    let mut storm =
        Storm::open_with_options(disk.clone(), OpenOptions::default(), writing).unwrap();
    storm.calm = seed.is_multiple_of(2);
    let mut random = Random::new(seed ^ 0xC4A1);
    for nth in 0..STEPS_PER_SEED {
        random_step(&mut storm, nth, &mut |limit| random.next_below(limit));
        time.fetch_add(1 + random.next_below(40_000) as i64, Ordering::Relaxed);
    }
    storm.finish();
    let mut digest = Digest(0xCBF2_9CE4_8422_2325);
    let (mut groups, mut bytes) = (0, 0);
    for event in disk.take_events() {
        let Event::Group { ticket, chain, after, writes } = event else { continue };
        groups += 1;
        for number in [ticket.0, chain.0].into_iter().chain(after.iter().map(|it| it.0)) {
            digest.add(&number.to_le_bytes());
        }
        for (at, written) in writes {
            bytes += written.len();
            digest.add(&at.to_le_bytes());
            digest.add(&written);
        }
    }
    let outcome = &storm.outcome;
    let kind = if kind == Kind::Plain { String::new() } else { format!(" {kind:?}") };
    format!(
        "{seed}{kind} {block_bytes} {} of {STEPS_PER_SEED}: {groups} groups, {bytes} bytes, {:016x}\n",
        outcome.done, digest.0
    )
}

#[test]
fn write_chains_match_golden_digests() {
    let now: String = (0..SEEDS).map(digest_line_for_seed).collect();
    if std::env::var_os("DRACONIS_BLESS").is_some() {
        std::fs::write(GOLDEN, &now).unwrap();
    }
    let golden = std::fs::read_to_string(GOLDEN).unwrap();
    for (now, golden) in now.lines().zip(golden.lines()) {
        assert_eq!(now, golden, "see the head of this file");
    }
    assert_eq!(now.lines().count(), golden.lines().count());
}
