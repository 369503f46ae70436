//! Corrupt inline data, EA inodes, folded and encrypted names, read and changed: no panic, no hang,
//! bounded memory; valid data is read.

use crate::common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use crate::common::exercise::{self, ReadOutcome};
use crate::common::spoil::{
    assert_peak_memory_is_small, corrupt_field, metadata_ranges_of_inodes, scaled_rounds,
};
use crate::common::storm::{self, Storm};
use crate::common::{Image, tree};
use draconis_device::{MemoryDisk, Random};
use draconis_ext::format::inode::flags;
use rustix::fs::XattrFlags;

fn fill(root: &Path, names: u64) {
    for len in [0, 3, 60, 61, 90] {
        fs::write(root.join(format!("Short {len}")), tree::random_bytes(len, len as usize))
            .unwrap();
    }
    symlink("t".repeat(40), root.join("fast")).unwrap();
    symlink("t".repeat(80), root.join("slow")).unwrap();
    for count in [3, names] {
        let dir = root.join(format!("Dir {count}"));
        fs::create_dir(&dir).unwrap();
        for nth in 0..count {
            fs::write(dir.join(format!("\u{C9}ntry {nth} {}", "n".repeat(nth as usize))), b"")
                .unwrap();
        }
    }
    for len in [100, 900, 5000] {
        let file = root.join(format!("valued {len}"));
        fs::write(&file, b"x").unwrap();
        let _ =
            rustix::fs::setxattr(&file, "user.v", &tree::random_bytes(2, len), XattrFlags::empty());
    }
}

/// Makes an image with all of these; `None`, with a message, if the kernel cannot.
fn base_image() -> Option<&'static [u8]> {
    static BASE: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    let made = BASE.get_or_init(|| {
        let features = "ea_inode,encrypt,^has_journal,^extent,^64bit,^metadata_csum";
        let arguments = ["-t", "ext4", "-b", "1024", "-I", "256", "-N", "128", "-O", features];
        let image = Image::make(None, "1M", &arguments)?;
        fill(image.mount_with("loop")?.path(), 40);
        {
            let mount = image.mount_with("loop,test_dummy_encryption=v2")?;
            let dir = mount.path().join("encrypted");
            fs::create_dir(&dir).unwrap();
            fill(&dir, 20);
        }
        common::run_tool("e2fsck", &["-fn", image.path()])?;
        image.debugfs_write("feature casefold")?;
        image.debugfs_write("set_super_value encoding 1")?;
        for name in ["Dir 3", "Dir 40"] {
            let volume = image.open();
            let dir = volume.lookup(volume.root(), name.as_bytes()).unwrap();
            let all = volume.inode(dir).unwrap().flags | flags::CASEFOLD;
            image.debugfs_write(&format!("set_inode_field <{dir}> flags {all:#x}"))?;
        }
        Some(fs::read(&image.path).unwrap())
    });
    made.as_deref()
}

/// Returns all inodes in use.
fn used_inode_numbers(base: &[u8]) -> Vec<usize> {
    let mut inodes = vec![1];
    inodes.extend(10..base.len().min(110));
    inodes
}

#[test]
fn valid_image_reads_without_errors() {
    draconis_testkit::in_own_process!();
    let Some(base) = base_image() else { return };
    let outcome = exercise::read_whole_image(base.to_vec()).unwrap();
    assert!(outcome.names > 90 && !outcome.cut_short, "{outcome:?}");
    // Unused and invalid inodes, and the ranges read of each encrypted file.
    assert!(outcome.errors < 60, "{outcome:?}");
}

#[test]
#[ignore = "long: a minute: hundreds of volumes"]
fn corrupt_structures_do_not_hang_or_panic() {
    draconis_testkit::in_own_process!();
    let Some(base) = base_image() else { return };
    let sound = exercise::read_whole_image(base.to_vec()).unwrap();
    let structures = metadata_ranges_of_inodes(base, &used_inode_numbers(base));
    // The first are superblock and descriptors, which other tests corrupt.
    let own: Vec<_> = structures.into_iter().skip(24).collect();
    let (mut opened, mut hurt) = (0, 0);
    let rounds = scaled_rounds(1500);
    for seed in 0..rounds {
        let mut random = Random::new(seed ^ 0x5A11);
        let mut image = base.to_vec();
        for _ in 0..=random.next_below(24) {
            let nth = random.next_below(own.len() as u64) as usize;
            corrupt_field(&mut image, own[nth].clone(), &mut random);
        }
        let outcome = std::panic::catch_unwind(|| exercise::read_whole_image(image))
            .unwrap_or_else(|_| panic!("seed {seed}: panicked"));
        if let Ok(outcome) = outcome {
            opened += 1;
            hurt += u64::from(outcome != sound);
        }
    }
    assert_eq!(opened, rounds);
    assert!(hurt > rounds / 3, "{hurt}");
    assert_peak_memory_is_small();
}

#[test]
fn inodes_with_wrong_feature_flags_do_not_hang_or_panic() {
    draconis_testkit::in_own_process!();
    let Some(base) = base_image() else { return };
    let one_of = [
        flags::INLINE_DATA,
        flags::EA_INODE,
        flags::ENCRYPT,
        flags::CASEFOLD,
        flags::INDEX,
        flags::EXTENTS,
        flags::VERITY,
    ];
    let slots: Vec<_> = metadata_ranges_of_inodes(base, &used_inode_numbers(base))
        .into_iter()
        .filter(|range| range.len() == 256)
        .collect();
    let mut differ = 0;
    let sound: ReadOutcome = exercise::read_whole_image(base.to_vec()).unwrap();
    for seed in 0..scaled_rounds(500) {
        let mut random = Random::new(seed ^ 0xF1A6);
        let mut image = base.to_vec();
        for _ in 0..=random.next_below(6) {
            let slot = &slots[random.next_below(slots.len() as u64) as usize];
            let flag = one_of[random.next_below(one_of.len() as u64) as usize];
            let at = slot.start + 0x20;
            for (byte, flip) in image[at..at + 4].iter_mut().zip(flag.to_le_bytes()) {
                *byte ^= flip;
            }
        }
        let outcome = std::panic::catch_unwind(|| exercise::read_whole_image(image));
        let outcome = outcome.unwrap_or_else(|_| panic!("seed {seed}: panicked"));
        differ += u64::from(outcome.unwrap() != sound);
    }
    assert!(differ > 200, "{differ}");
    assert_peak_memory_is_small();
}

/// Makes many changes of one image; returns the result.
fn storm_on_image(
    image: Vec<u8>,
    seed: u64,
) -> draconis_ext::Result<(storm::StormOutcome, Vec<u8>)> {
    let mut random = Random::new(seed);
    let disk = Arc::new(MemoryDisk::new(image, 512));
    let mut storm = Storm::new(disk.clone(), exercise::open_options())?;
    for _ in 0..60 {
        storm.random_change(&mut |limit| random.next_below(limit));
    }
    storm.finish();
    let outcome = std::mem::take(&mut storm.outcome);
    drop(storm);
    Ok((outcome, Arc::try_unwrap(disk).unwrap().into_bytes()))
}

#[test]
fn storms_on_valid_image_leave_it_clean() {
    draconis_testkit::in_own_process!();
    let Some(base) = base_image() else { return };
    let image = Image::from_bytes(base);
    // Rebuilds the htrees with folded names.
    let Some(_) = common::run_tool("e2fsck", &["-fyD", image.path()]) else { return };
    let base = fs::read(&image.path).unwrap();
    for seed in 0..scaled_rounds(30) {
        let (outcome, bytes) = storm_on_image(base.clone(), seed).unwrap();
        assert!(!outcome.stopped && outcome.done > 5, "seed {seed}: {outcome:?}");
        let image = Image::from_bytes(&bytes);
        assert!(common::run_tool("e2fsck", &["-fn", image.path()]).is_some(), "seed {seed}");
    }
}

#[test]
fn storms_on_corrupt_structures_terminate() {
    draconis_testkit::in_own_process!();
    let Some(base) = base_image() else { return };
    let own: Vec<_> =
        metadata_ranges_of_inodes(base, &used_inode_numbers(base)).into_iter().skip(24).collect();
    let (mut opened, mut stopped) = (0, 0);
    let rounds = scaled_rounds(600);
    for seed in 0..rounds {
        let mut random = Random::new(seed ^ 0xC4A6);
        let mut image = base.to_vec();
        for _ in 0..=random.next_below(24) {
            let nth = random.next_below(own.len() as u64) as usize;
            corrupt_field(&mut image, own[nth].clone(), &mut random);
        }
        let ran = std::panic::catch_unwind(|| storm_on_image(image, seed))
            .unwrap_or_else(|_| panic!("seed {seed}: panicked"));
        if let Ok((outcome, _)) = ran {
            opened += 1;
            stopped += u64::from(outcome.stopped);
        }
    }
    assert!(opened > rounds / 2 && stopped < opened, "{opened} opened, {stopped} stopped");
    assert_peak_memory_is_small();
}
