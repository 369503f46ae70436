//! Damage to volumes with each feature: no panic, no endless loop, bounded memory. Images with each
//! feature, filled by the kernel, are corrupted in their metadata and then read completely.
//! `DRACONIS_ROUNDS=50` multiplies the rounds.

use crate::matrix::{journals, made, pool, structures, table};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::exercise::{self, ReadOutcome};
use crate::common::spoil::{assert_peak_memory_is_small, corrupt_field, scaled_rounds};
use crate::matrix::fill::{DataScale, Dumpe2fsInfo};
use crate::matrix::ioctl::ShutdownMode;
use crate::matrix::structures::StructureRanges;
use draconis_device::{
    Disk, Error as DiskError, Extent, MemoryDisk, Pending, Properties, Random, ReadAnswer, Refused,
    Urgency,
};
use draconis_ext::{Error, Volume};
use draconis_types::Block;

/// One volume per structure, with checksums and without; without them damage is not detected.
#[rustfmt::skip]
const BASE_VOLUMES: &[&str] = &[
    "-t ext2 -b 1024 -O extent,large_file,uninit_bg",
    "-t ext4 -b 1024 -O ^has_journal,^metadata_csum",
    "-t ext4 -b 1024 -O ^has_journal",
    "-t ext4 -b 4096 -O ^has_journal,^metadata_csum,^64bit -I 512",
    "-t ext4 -b 1024 -O ^has_journal,^metadata_csum,meta_bg,^resize_inode -g 1024",
    "-t ext4 -b 1024 -O ^has_journal,^metadata_csum,large_dir",
    "-t ext4 -b 1024 -O ^has_journal,^metadata_csum,inline_data -I 256",
    "-t ext4 -b 2048 -O ^has_journal,inline_data -I 1024",
    "-t ext4 -b 1024 -O ^has_journal,^metadata_csum,ea_inode",
    "-t ext4 -b 1024 -O ^has_journal,ea_inode",
    "-t ext4 -b 1024 -O ^has_journal,^metadata_csum,bigalloc -C 4096",
    "-t ext4 -b 1024 -O ^has_journal,^metadata_csum,encrypt",
    "-t ext4 -b 1024 -O ^has_journal,^metadata_csum,casefold",
    "-t ext4 -b 1024 -O ^has_journal,^metadata_csum,verity",
    "-t ext4 -b 1024 -O ^has_journal,^metadata_csum,sparse_super2",
    "-t ext4 -b 1024 -O ^metadata_csum,orphan_file",
    "-t ext4 -b 1024 -O metadata_csum_seed,orphan_file",
    "-t ext4 -b 1024 -O ^has_journal,^metadata_csum | -O project,quota -Q usrquota,grpquota,prjquota",
];

/// Volumes whose journals need replay.
#[rustfmt::skip]
const DIRTY_JOURNAL_VOLUMES: &[(&str, &str)] = &[
    ("-t ext3 -b 1024 -J size=1", ""),
    ("-t ext3 -b 1024 -O huge_file -J size=1", "journal_checksum"),
    ("-t ext4 -b 1024 -J size=1", "data=journal"),
    ("-t ext4 -b 1024 -O ^metadata_csum,^64bit,fast_commit -J size=1", ""),
];

/// Rounds per volume.
const ROUNDS_PER_VOLUME: u64 = 80;
/// Two images per thread are in memory.
const THREADS: usize = 2;
/// Many times the reads of such a volume: more mean an endless loop.
const MAX_READS: u64 = 400_000;

#[test]
#[ignore = "long: a minute: 1,760 volumes"]
fn corrupt_structures_of_every_feature_are_survived() {
    draconis_testkit::in_own_process!();
    let made = BASE_VOLUMES.iter().map(|line| (*line, None));
    let left = DIRTY_JOURNAL_VOLUMES.iter().map(|(line, options)| (*line, Some(*options)));
    let bases: Vec<_> = made.chain(left).collect();
    check_results(pool::run_each_in_threads(THREADS, &bases, |(line, options)| {
        let random = &mut Random::new(1);
        let image = match options {
            None => made::make_volume(line, DataScale::Tiny, random)?.image,
            Some(options) => {
                journals::make_dirty_volume(line, options, ShutdownMode::AfterCommit, random)?.image
            }
        };
        let facts = Dumpe2fsInfo::from_image(&image.path);
        if let Some((key, why)) =
            table::find_known_failure(line, |feature| facts.has_feature(feature))
        {
            println!("not yet ({key}: {why}): {line}");
            return None;
        }
        Some(corrupt_repeatedly(line, &std::fs::read(&image.path).unwrap()))
    }));
}

/// Fails on a panic, or if too few images were opened and damaged.
fn check_results(results: Vec<Result<Option<CorruptionOutcome>, String>>) {
    let mut all = CorruptionOutcome::default();
    for result in results {
        let Some(hurt) = result.unwrap_or_else(|panic| panic!("{panic}")) else { continue };
        all.opened += hurt.opened;
        all.hurt += hurt.hurt;
        all.rounds += hurt.rounds;
    }
    println!("{all:?}");
    assert!(4 * all.opened >= all.rounds && 5 * all.hurt >= all.rounds, "{all:?}");
    assert_peak_memory_is_small();
}

/// Result of the corruption.
#[derive(Default, Debug)]
struct CorruptionOutcome {
    rounds: u64,
    opened: u64,
    hurt: u64,
}

fn corrupt_repeatedly(line: &str, sound: &[u8]) -> CorruptionOutcome {
    let structures = structures::find_structures(sound);
    let mut hurt = CorruptionOutcome {
        rounds: scaled_rounds(ROUNDS_PER_VOLUME),
        ..CorruptionOutcome::default()
    };
    let untouched = read_image(sound.to_vec());
    let untouched = untouched.unwrap_or_else(|error| panic!("{line}: not opened: {error}"));
    for seed in 1..=hurt.rounds {
        let spoilt = || {
            let mut image = sound.to_vec();
            let mut random = Random::new(seed);
            for _ in 0..=random.next_below(8) {
                corrupt_one_structure(&mut image, &structures, &mut random);
            }
            image
        };
        let looked = std::panic::catch_unwind(|| read_image(spoilt()));
        match looked {
            Ok(Ok(outcome)) => {
                hurt.opened += 1;
                hurt.hurt += u64::from(outcome != untouched);
            }
            Ok(Err(error)) => assert!(!error.to_string().is_empty()),
            Err(panic) => {
                // The volume is unique, so keep it.
                let kept = std::env::temp_dir().join(format!("draconis-damage-{seed}.image"));
                std::fs::write(&kept, spoilt()).unwrap();
                let (why, kept) = (pool::panic_message(panic), kept.display());
                panic!("{line}, seed {seed}: {why}; the image is kept as {kept}");
            }
        }
    }
    hurt
}

/// Corrupts one structure. All kinds are equally likely, however many structures they have; half of
/// the time it is the structure's head.
fn corrupt_one_structure(image: &mut [u8], structures: &StructureRanges, random: &mut Random) {
    let kinds: Vec<_> = structures.values().collect();
    let kind = kinds[random.next_below(kinds.len() as u64) as usize];
    let mut range = kind[random.next_below(kind.len() as u64) as usize].clone();
    if random.next_below(2) == 0 {
        range.end = range.end.min(range.start + 64);
    }
    corrupt_field(image, range, random);
}

/// Reads everything in one image.
fn read_image(image: Vec<u8>) -> Result<ReadOutcome, Error> {
    let disk =
        Arc::new(ReadCountingDisk { disk: MemoryDisk::new(image, 512), reads: AtomicU64::new(0) });
    let volume = Volume::open(disk.clone(), exercise::open_options());
    let looked = volume.map(|volume| exercise::read_whole_volume(&volume));
    assert!(disk.reads.load(Ordering::Relaxed) < MAX_READS, "reading does not end");
    looked
}

/// A disk that counts reads, to detect endless loops.
struct ReadCountingDisk {
    disk: MemoryDisk,
    reads: AtomicU64,
}

impl Disk for ReadCountingDisk {
    fn properties(&self) -> Properties {
        Properties { read_only: true, ..self.disk.properties() }
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        if self.reads.fetch_add(1, Ordering::Relaxed) >= MAX_READS {
            return Pending::ready(Err(Refused { payload: Some(into), error: DiskError::Stopped }));
        }
        self.disk.read(at, into, urgency)
    }
}
