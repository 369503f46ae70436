//! Truncated, corrupted and random images: no panic, no hang, bounded memory, a clear error.

use crate::common;

use crate::common::exercise::{self, ReadOutcome};
use crate::common::spoil::{
    assert_peak_memory_is_small, base_images, corrupt_field, metadata_ranges, scaled_rounds,
};
use crate::common::tree;
use draconis_device::Random;
use draconis_ext::Error;
use draconis_testkit::wait::HangClock;

/// Runs one image and names it on failure.
fn read_image_with_timeout(what: &str, seed: u64, image: Vec<u8>) -> Result<ReadOutcome, Error> {
    let clock = HangClock::start();
    let outcome = std::panic::catch_unwind(|| exercise::read_whole_image(image));
    clock.assert_not_hung(format_args!("{what}, seed {seed}"));
    let outcome = outcome.unwrap_or_else(|_| panic!("{what}, seed {seed}: panicked"));
    if let Err(error) = &outcome {
        assert!(!error.to_string().is_empty());
    }
    outcome
}

#[test]
fn valid_images_read_without_errors() {
    for base in base_images() {
        let outcome = read_image_with_timeout("sound", 0, base.clone()).unwrap();
        // Unused inodes, and the four invalid numbers.
        assert!(outcome.names > 120 && outcome.errors <= 8 && !outcome.cut_short, "{outcome:?}");
    }
}

#[test]
fn corrupt_structures_do_not_hang_or_panic() {
    draconis_testkit::in_own_process!();
    let (mut opened, mut damaged) = (0, 0);
    let sound: Vec<ReadOutcome> = base_images()
        .iter()
        .map(|base| read_image_with_timeout("sound", 0, base.clone()).unwrap())
        .collect();
    let rounds = scaled_rounds(4000);
    for seed in 0..rounds {
        let Some(base) = base_images().get(seed as usize % base_images().len().max(1)) else {
            return;
        };
        let structures = metadata_ranges(base);
        let mut random = Random::new(seed);
        let mut image = base.clone();
        for _ in 0..=random.next_below(16) {
            let nth = random.next_below(structures.len() as u64) as usize;
            corrupt_field(&mut image, structures[nth].clone(), &mut random);
        }
        if let Ok(outcome) = read_image_with_timeout("spoilt", seed, image) {
            opened += 1;
            damaged += u64::from(outcome != sound[seed as usize % sound.len()]);
        }
    }
    // The test would prove little if most images were refused, or few were damaged.
    let tenth = rounds / 10;
    assert!(
        (5 * tenth..rounds).contains(&opened) && damaged > 3 * tenth,
        "{opened} opened, {damaged} hurt"
    );
    assert_peak_memory_is_small();
}

#[test]
fn flipped_bytes_do_not_hang_or_panic() {
    draconis_testkit::in_own_process!();
    for seed in 0..scaled_rounds(500) {
        let Some(base) = base_images().get(seed as usize % base_images().len().max(1)) else {
            return;
        };
        let mut random = Random::new(seed ^ 0xF11B);
        let mut image = base.clone();
        for _ in 0..(1 << random.next_below(12)) {
            let at = random.next_below(image.len() as u64) as usize;
            image[at] ^= random.next_u64() as u8;
        }
        let _ = read_image_with_timeout("flipped", seed, image);
    }
    assert_peak_memory_is_small();
}

#[test]
fn truncated_images_do_not_hang_or_panic() {
    for seed in 0..scaled_rounds(300) {
        let Some(base) = base_images().get(seed as usize % base_images().len().max(1)) else {
            return;
        };
        let mut random = Random::new(seed ^ 0xC07);
        let len = random.next_below(base.len() as u64) as usize;
        let _ = read_image_with_timeout("cut", seed, base[..len].to_vec());
    }
}

#[test]
fn random_bytes_do_not_hang_or_panic() {
    for seed in 0..scaled_rounds(400) {
        let mut random = Random::new(seed ^ 0xA01);
        let mut image = tree::random_bytes(seed, 64 << 10);
        if seed % 2 == 0 {
            // A valid superblock, and noise for everything else.
            let Some(base) = base_images().get(seed as usize % base_images().len().max(1)) else {
                return;
            };
            image.resize(base.len(), random.next_u64() as u8);
            image[1024..2048].copy_from_slice(&base[1024..2048]);
            if seed % 4 == 0 {
                image[2048..8192].copy_from_slice(&base[2048..8192]);
            }
            let _ = read_image_with_timeout("noise", seed, image);
        } else {
            assert!(read_image_with_timeout("noise", seed, image).is_err());
        }
    }
}

/// A superblock claims far more groups than the disk holds.
#[test]
fn bogus_group_count_takes_no_memory() {
    draconis_testkit::in_own_process!();
    let arguments = ["-t", "ext4", "-O", "^has_journal,^metadata_csum,64bit,bigalloc"];
    let Some(image) = common::Image::make(None, "1M", &[&arguments[..], &["-b", "1024"]].concat())
    else {
        return;
    };
    let mut image = std::fs::read(&image.path).unwrap();
    // `s_overhead_clusters` is recounted; `s_blocks_count_hi` has the upper half.
    image[1024 + 0x248..1024 + 0x24C].fill(0);
    image[1024 + 0x150..1024 + 0x154].copy_from_slice(&0x2300u32.to_le_bytes());
    // So few inodes per group that 32 bits count all of them.
    let number = |at: usize| u32::from_le_bytes(image[1024 + at..1028 + at].try_into().unwrap());
    let blocks = (0x2300 << 32 | u64::from(number(0x04))) - u64::from(number(0x14));
    let inodes = u32::try_from(blocks.div_ceil(number(0x20).into()) * 8).unwrap();
    image[1024..1028].copy_from_slice(&inodes.to_le_bytes());
    image[1024 + 0x28..1024 + 0x2C].copy_from_slice(&8u32.to_le_bytes());
    let disk = std::sync::Arc::new(draconis_device::MemoryDisk::new(image, 512));
    let volume = draconis_ext::Volume::open(disk, draconis_ext::OpenOptions::default()).unwrap();
    let info = volume.info();
    assert!(info.truncated && info.groups > 100_000_000, "{}", info.groups);
    assert_peak_memory_is_small();
}
