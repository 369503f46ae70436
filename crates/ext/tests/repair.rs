//! Repairs that are cut at each write, and undone: the old volume or the repaired one, never a
//! third.

mod common;
#[path = "common/repairing.rs"]
mod repairing;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::Image;
use draconis_device::{
    Disk, Error as DiskError, Extent, Group, MemoryDisk, Pending, Properties, Random, ReadAnswer,
    Refused, Ticket, Urgency,
};
use draconis_ext::check::{CheckOptions, check};
use draconis_ext::finish_interrupted_change;
use draconis_ext::repair::{plan, revert};
use draconis_types::Block;

/// `usual` times `DRACONIS_ROUNDS`.
fn scaled_rounds(usual: u64) -> u64 {
    let times = std::env::var("DRACONIS_ROUNDS").ok().and_then(|times| times.parse().ok());
    usual * times.unwrap_or(1)
}

/// A disk that fails from a write on: all later ones are lost.
#[derive(Debug)]
struct CutDisk {
    disk: MemoryDisk,
    /// Writes until the cut.
    left: AtomicU64,
    made: AtomicU64,
}

impl CutDisk {
    fn new(bytes: Vec<u8>, left: u64) -> Self {
        let disk = MemoryDisk::new(bytes, 512);
        Self { disk, left: AtomicU64::new(left), made: AtomicU64::new(0) }
    }
}

impl Disk for CutDisk {
    fn properties(&self) -> Properties {
        self.disk.properties()
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        self.disk.read(at, into, urgency)
    }

    fn submit_chain(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let count = chain.iter().map(|group| group.writes.len() as u64).sum::<u64>();
        let cut = |left: u64| left.checked_sub(count);
        if self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, cut).is_err() {
            self.left.store(0, Ordering::Relaxed);
            return Err(Refused { payload: Some(chain), error: DiskError::ServiceEnded });
        }
        self.made.fetch_add(count, Ordering::Relaxed);
        self.disk.submit_chain(chain, after)
    }

    fn wait_visible(&self, ticket: Ticket) -> Result<(), DiskError> {
        self.disk.wait_visible(ticket)
    }

    fn wait_durable(&self, ticket: Ticket) -> Result<(), DiskError> {
        self.disk.wait_durable(ticket)
    }
}

/// Volumes with damage, from a seed.
fn damaged_volume(seed: u64) -> Option<Vec<u8>> {
    let source = tempfile::tempdir().unwrap();
    for nth in 0..40 {
        let dir = source.path().join(format!("dir {}", nth % 4));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join(format!("file {nth}")), vec![nth as u8; 3000 * nth]).unwrap();
    }
    let kind = ["ext2", "ext3", "ext4"][seed as usize % 3];
    let arguments = ["-t", kind, "-b", "1024", "-N", "256", "-E", common::HASH_SEED];
    let image = Image::make(Some(source.path()), "12M", &arguments)?;
    let mut bytes = std::fs::read(&image.path).unwrap();
    let mut random = Random::new(seed);
    let unnamed = format!("unlink \"dir {}\"/\"file {}\"", seed % 4, seed % 4 + 4);
    image.debugfs_write(&unnamed)?;
    image.debugfs_write(&format!(
        "sif <{}> links_count {}",
        20 + seed % 30,
        random.next_below(9)
    ))?;
    bytes = std::fs::read(&image.path).unwrap_or(bytes);
    // Some bytes of the first metadata blocks, behind superblock and descriptors.
    for _ in 0..random.next_below(6) {
        let at = 80 * 1024 + random.next_below(90 * 1024) as usize;
        bytes[at] ^= 1 << random.next_below(8);
    }
    Some(bytes)
}

fn is_clean(bytes: &[u8]) -> bool {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(bytes.to_vec(), 512));
    check(&disk, CheckOptions::default(), &|_, _| {}).is_ok_and(|it| it.problems.is_empty())
}

/// Returns what is on the disk after a restart.
fn after_restart(disk: CutDisk) -> Vec<u8> {
    disk.left.store(u64::MAX, Ordering::Relaxed);
    finish_interrupted_change(&disk).unwrap();
    disk.disk.into_bytes()
}

/// Returns true if two volumes differ at most in blocks that are free in both.
fn has_same_files(one: &[u8], other: &[u8]) -> bool {
    let superblock = |bytes: &[u8]| bytes[1024..2048].to_vec();
    superblock(one) == superblock(other) && problems(one) == problems(other)
}

fn problems(bytes: &[u8]) -> Vec<String> {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(bytes.to_vec(), 512));
    let report = check(&disk, CheckOptions::default(), &|_, _| {}).unwrap();
    report.problems.iter().map(ToString::to_string).collect()
}

#[test]
fn cut_repair_leaves_old_or_repaired_volume() {
    let (mut cuts, mut repairs) = (0, 0);
    for seed in 0..scaled_rounds(12) {
        let Some(bytes) = damaged_volume(seed) else { return };
        let whole = Arc::new(CutDisk::new(bytes.clone(), u64::MAX));
        let as_disk: Arc<dyn Disk> = whole.clone();
        let repair = plan(&as_disk, &repairing::options(), &|_, _| {}).unwrap();
        if repair.is_empty() || !repair.unfixed.is_empty() {
            continue;
        }
        repairs += 1;
        repair.write(&*whole, None, None).unwrap();
        let writes = whole.made.load(Ordering::Relaxed);
        let step = (writes / 40).max(1);
        for cut in (0..writes).step_by(step as usize) {
            let disk = CutDisk::new(bytes.clone(), cut);
            assert!(repair.write(&disk, None, None).is_err(), "seed {seed}, cut {cut}");
            let found = after_restart(disk);
            let is_old = has_same_files(&found, &bytes);
            assert!(is_old || is_clean(&found), "seed {seed}, cut {cut} of {writes}");
            cuts += 1;
        }
    }
    eprintln!("{cuts} cuts of {repairs} repairs");
    assert!(repairs > 3 && cuts > 50, "{cuts} cuts of {repairs} repairs");
}

#[test]
fn revert_restores_every_byte() {
    let mut reverts = 0;
    for seed in 0..scaled_rounds(12) {
        let Some(bytes) = damaged_volume(seed) else { return };
        let disk = Arc::new(CutDisk::new(bytes.clone(), u64::MAX));
        let as_disk: Arc<dyn Disk> = disk.clone();
        let repair = plan(&as_disk, &repairing::options(), &|_, _| {}).unwrap();
        if repair.is_empty() || !repair.unfixed.is_empty() {
            continue;
        }
        let mut undo = tempfile::tempfile().unwrap();
        repair.write(&*disk, Some(undo.try_clone().unwrap()), None).unwrap();
        drop((repair, as_disk));
        let repaired = Arc::try_unwrap(disk).unwrap().disk.into_bytes();
        assert!(is_clean(&repaired) && repaired != bytes, "seed {seed}");
        let disk = CutDisk::new(repaired.clone(), u64::MAX);
        revert(&disk, &mut undo).unwrap();
        let writes = disk.made.load(Ordering::Relaxed);
        assert!(disk.disk.into_bytes() == bytes, "seed {seed}");
        for cut in (0..writes).step_by((writes / 20).max(1) as usize) {
            let disk = CutDisk::new(repaired.clone(), cut);
            assert!(revert(&disk, &mut undo).is_err(), "seed {seed}, cut {cut}");
            disk.left.store(u64::MAX, Ordering::Relaxed);
            let as_it_is = MemoryDisk::new(read_all(&disk), 512);
            let refused = finish_interrupted_change(&as_it_is).is_err();
            let now = as_it_is.into_bytes();
            assert!(refused || now == repaired || now == bytes, "seed {seed}, cut {cut}");
            revert(&disk, &mut undo).unwrap();
            assert!(disk.disk.into_bytes() == bytes, "seed {seed}, cut {cut}");
            reverts += 1;
        }
    }
    assert!(reverts > 30, "{reverts}");
}

fn read_all(disk: &CutDisk) -> Vec<u8> {
    let len = disk.properties().len_bytes;
    let block = disk.read_now(Extent::new(0, len), Block::private(len as usize)).unwrap();
    let mut bytes = vec![0; len as usize];
    block.copy_out(0, &mut bytes);
    bytes
}

#[test]
fn damaged_undo_file_is_refused() {
    let Some(bytes) = damaged_volume(1) else { return };
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(bytes, 512));
    let repair = plan(&disk, &repairing::options(), &|_, _| {}).unwrap();
    let mut undo = tempfile::tempfile().unwrap();
    repair.write(&*disk, Some(undo.try_clone().unwrap()), None).unwrap();
    let mut saved = vec![];
    undo.seek(SeekFrom::Start(0)).unwrap();
    undo.read_to_end(&mut saved).unwrap();
    let before = problems_of(&disk);
    let refuses = |bytes: &[u8]| {
        let mut file: File = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        let refused = revert(&*disk, &mut file).unwrap_err().to_string();
        assert!(refused.starts_with("undo file: "), "{refused}");
    };
    for at in [0, 16, 24, 32, 33, 47, saved.len() / 2, saved.len() - 1] {
        let mut wrong = saved.clone();
        wrong[at] ^= 0x10;
        refuses(&wrong);
    }
    refuses(&saved[..saved.len() - 1]);
    refuses(b"");
    assert_eq!(problems_of(&disk), before);
}

fn problems_of(disk: &Arc<dyn Disk>) -> usize {
    check(disk, CheckOptions::default(), &|_, _| {}).unwrap().problems.len()
}

/// A superblock that is zeros comes back from a backup.
#[test]
fn missing_superblock_is_restored() {
    let Some(image) = Image::make(None, "20M", &["-t", "ext4", "-b", "1024"]) else { return };
    let mut bytes = std::fs::read(&image.path).unwrap();
    bytes[1024..2048].fill(0);
    match repairing::repair(&bytes).unwrap() {
        repairing::Repaired::Whole(bytes) => assert!(is_clean(&bytes)),
        repairing::Repaired::Left(why) => panic!("{why}"),
    }
}

/// Whatever the bytes are: a repair ends, and one that is complete leaves a silent check and
/// nothing for a second one.
#[test]
fn wild_damage_is_repaired_or_left() {
    let (mut whole, mut left) = (0, 0);
    for seed in 0..scaled_rounds(60) {
        let Some(mut bytes) = damaged_volume(seed) else { return };
        let mut random = Random::new(seed ^ 0x5EED);
        let flips = 1 << random.next_below(10);
        let reach = [4096, 200 * 1024, bytes.len() as u64][random.next_below(3) as usize];
        for _ in 0..flips {
            let at = 1024 + random.next_below(reach - 1024) as usize;
            bytes[at] = match random.next_below(3) {
                0 => 0,
                1 => 0xFF,
                _ => random.next_below(256) as u8,
            };
        }
        match repairing::repair(&bytes) {
            Ok(repairing::Repaired::Whole(bytes)) => {
                assert!(is_clean(&bytes), "seed {seed}");
                whole += 1;
            }
            Ok(repairing::Repaired::Left(_)) => left += 1,
            // What only e2fsck sees is counted by the test of corrupted features.
            Err(why) if why.contains("e2fsck says") => whole += 1,
            Err(why) => panic!("seed {seed}: {why}"),
        }
    }
    eprintln!("{whole} repaired, {left} left");
    assert!(whole > 5 && left > 0, "{whole} repaired, {left} left");
}
