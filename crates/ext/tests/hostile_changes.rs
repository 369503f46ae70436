//! Damaged images opened for writing: no panic, no hang, bounded memory. A failure stops all
//! writing, and untouched files stay unchanged.

use crate::common;

use std::collections::HashMap;
use std::sync::Arc;

use crate::common::spoil::{
    assert_peak_memory_is_small, base_images, build_small_tree, corrupt_field, metadata_ranges,
    metadata_ranges_of_inodes, scaled_rounds,
};
use crate::common::storm::{Storm, StormOutcome, write_options};
use crate::common::{Image, exercise, tree};
use draconis_device::{Disk, MemoryDisk, Random};
use draconis_ext::grow::{GrowPlan, GrowTarget};
use draconis_ext::{Cookie, Error, InodeNumber, NewNode, Volume};
use draconis_testkit::wait::HangClock;
use draconis_types::{AttributeChange, FileType};

const STORM_STEPS: u64 = 60;

/// StormOutcome, and the resulting bytes.
type StormResult = Result<(StormOutcome, Vec<u8>), Error>;

/// Runs a storm on one image, and reads everything before and after closing.
fn storm_and_reread(image: Vec<u8>, seed: u64) -> StormResult {
    let mut random = Random::new(seed);
    let disk = Arc::new(MemoryDisk::new(image, 512));
    let mut storm = Storm::new(disk.clone(), exercise::open_options())?;
    for _ in 0..STORM_STEPS {
        storm.random_change(&mut |limit| random.next_below(limit));
    }
    exercise::read_whole_volume(&storm.volume);
    storm.finish();
    exercise::read_whole_volume(&storm.volume);
    let outcome = std::mem::take(&mut storm.outcome);
    drop(storm);
    let bytes = Arc::try_unwrap(disk).unwrap().into_bytes();
    // A closed volume can be opened again for reading and writing.
    if !outcome.stopped {
        exercise::read_whole_image(bytes.clone())?;
        let disk = Arc::new(MemoryDisk::new(bytes.clone(), 512));
        if let Ok(mut again) = Storm::new(disk, exercise::open_options()) {
            again.finish();
        }
    }
    Ok((outcome, bytes))
}

/// Runs one image and names it on failure.
fn run_storm_with_timeout(what: &str, seed: u64, image: Vec<u8>) -> StormResult {
    let clock = HangClock::start();
    let ran = std::panic::catch_unwind(|| storm_and_reread(image, seed));
    clock.assert_not_hung(format_args!("{what}, seed {seed}"));
    ran.unwrap_or_else(|_| panic!("{what}, seed {seed}: panicked"))
}

fn base_image(seed: u64) -> Option<&'static Vec<u8>> {
    base_images().get(seed as usize % base_images().len().max(1))
}

#[test]
fn storms_on_valid_images_leave_them_clean() {
    draconis_testkit::in_own_process!();
    for seed in 0..scaled_rounds(40) {
        let Some(base) = base_image(seed) else { return };
        let (outcome, bytes) = run_storm_with_timeout("sound", seed, base.clone()).unwrap();
        assert!(!outcome.stopped && outcome.done > 5, "seed {seed}: {outcome:?}");
        let image = Image::from_bytes(&bytes);
        assert!(common::run_tool("e2fsck", &["-fn", image.path()]).is_some(), "seed {seed}");
    }
}

#[test]
fn storms_on_corrupt_structures_terminate() {
    draconis_testkit::in_own_process!();
    let (mut opened, mut stopped) = (0, 0);
    let rounds = scaled_rounds(600);
    for seed in 0..rounds {
        let Some(base) = base_image(seed) else { return };
        let structures = metadata_ranges(base);
        let mut random = Random::new(seed ^ 0x5701);
        let mut image = base.clone();
        for _ in 0..=random.next_below(8) {
            let nth = random.next_below(structures.len() as u64) as usize;
            corrupt_field(&mut image, structures[nth].clone(), &mut random);
        }
        if let Ok((outcome, _)) = run_storm_with_timeout("spoilt", seed, image) {
            opened += 1;
            stopped += u64::from(outcome.stopped);
        }
    }
    assert!(opened > rounds / 4 && stopped > 0, "{opened} opened, {stopped} stopped");
    assert_peak_memory_is_small();
}

#[test]
fn storms_on_corrupt_clusters_extents_and_quotas_terminate() {
    draconis_testkit::in_own_process!();
    let source = tempfile::tempdir().unwrap();
    build_small_tree(source.path());
    let features = "bigalloc,quota,^has_journal,^metadata_csum,^64bit";
    let arguments = ["-t", "ext4", "-b", "4096", "-C", "16384", "-N", "256", "-O", features];
    let Some(image) = Image::make(Some(source.path()), "8M", &arguments) else { return };
    let base = std::fs::read(&image.path).unwrap();
    assert!(!run_storm_with_timeout("sound", 0, base.clone()).unwrap().0.stopped);
    let inodes: Vec<usize> = [1, 2, 3].into_iter().chain(10..22).collect();
    let structures = metadata_ranges_of_inodes(&base, &inodes);
    let (mut opened, mut stopped) = (0, 0);
    let rounds = scaled_rounds(200);
    for seed in 0..rounds {
        let mut random = Random::new(seed ^ 0xC1D5);
        let mut spoilt = base.clone();
        for _ in 0..=random.next_below(6) {
            let nth = random.next_below(structures.len() as u64) as usize;
            corrupt_field(&mut spoilt, structures[nth].clone(), &mut random);
        }
        if let Ok((outcome, _)) = run_storm_with_timeout("clusters", seed, spoilt) {
            opened += 1;
            stopped += u64::from(outcome.stopped);
        }
    }
    assert!(opened > rounds / 4 && stopped > 0, "{opened} opened, {stopped} stopped");
    assert_peak_memory_is_small();
}

#[test]
fn storms_on_wrong_bitmaps_and_descriptors_terminate() {
    draconis_testkit::in_own_process!();
    for seed in 0..scaled_rounds(400) {
        let Some(base) = base_image(seed) else { return };
        let mut random = Random::new(seed ^ 0xB175);
        let mut image = base.clone();
        let le32 = |at: usize| u32::from_le_bytes(base[at..at + 4].try_into().unwrap()) as usize;
        let block = 1024 << le32(1024 + 0x18);
        let descriptors = block * (le32(1024 + 0x14) + 1);
        for _ in 0..=random.next_below(4) {
            let map = le32(descriptors + 4 * random.next_below(2) as usize) * block;
            match random.next_below(4) {
                0 => image[map..map + block].fill(0),
                1 => image[map..map + block].fill(0xFF),
                2 => corrupt_field(&mut image, map..map + block, &mut random),
                _ => corrupt_field(&mut image, descriptors..descriptors + 20, &mut random),
            }
        }
        let _ = run_storm_with_timeout("bitmaps", seed, image);
    }
    assert_peak_memory_is_small();
}

#[test]
fn storms_on_flipped_bytes_terminate() {
    draconis_testkit::in_own_process!();
    for seed in 0..scaled_rounds(300) {
        let Some(base) = base_image(seed) else { return };
        let mut random = Random::new(seed ^ 0xF11C);
        let mut image = base.clone();
        for _ in 0..(1 << random.next_below(12)) {
            let at = random.next_below(image.len() as u64) as usize;
            image[at] ^= random.next_u64() as u8;
        }
        let _ = run_storm_with_timeout("flipped", seed, image);
    }
    assert_peak_memory_is_small();
}

#[test]
fn storms_on_truncated_images_and_noise_terminate() {
    draconis_testkit::in_own_process!();
    for seed in 0..scaled_rounds(200) {
        let Some(base) = base_image(seed) else { return };
        let mut random = Random::new(seed ^ 0xC08);
        let len = random.next_below(base.len() as u64) as usize;
        let cut = run_storm_with_timeout("cut", seed, base[..len].to_vec());
        assert!(cut.is_err(), "seed {seed}: not all of the volume is there");
        let mut image = tree::random_bytes(seed, base.len());
        image[1024..2048].copy_from_slice(&base[1024..2048]);
        if seed % 2 == 0 {
            image[2048..8192].copy_from_slice(&base[2048..8192]);
        }
        let _ = run_storm_with_timeout("noise", seed, image);
    }
}

/// Returns the contents of all readable files.
fn readable_contents(image: &[u8]) -> HashMap<InodeNumber, Vec<u8>> {
    let disk = Arc::new(MemoryDisk::new(image.to_vec(), 512));
    let Ok(volume) = Volume::open(disk, exercise::open_options()) else { return HashMap::new() };
    let mut found = HashMap::new();
    let mut dirs = vec![volume.root()];
    let mut seen = std::collections::HashSet::new();
    while let Some(dir) = dirs.pop() {
        let _ = volume.entries(dir, Cookie::default(), false, |entry| {
            let Ok(entry) = entry else { return true };
            let Ok(inode) = volume.inode(entry.inode) else { return true };
            if seen.insert(entry.inode) && inode.kind == FileType::Directory {
                dirs.push(entry.inode);
            }
            let mut bytes = vec![0; inode.size_bytes.min(200_000) as usize];
            if inode.kind == FileType::File && volume.read_into(entry.inode, 0, &mut bytes).is_ok()
            {
                found.insert(entry.inode, bytes);
            }
            true
        });
    }
    found
}

#[test]
fn damaged_directories_and_xattrs_cost_no_other_file() {
    draconis_testkit::in_own_process!();
    for seed in 0..scaled_rounds(300) {
        let Some(base) = base_image(seed) else { return };
        let mut random = Random::new(seed ^ 0xD1);
        let mut image = base.clone();
        for range in dirent_and_xattr_block_ranges(base) {
            for _ in 0..random.next_below(3) {
                corrupt_field(&mut image, range.clone(), &mut random);
            }
        }
        let before = readable_contents(&image);
        let Ok((outcome, bytes)) = run_storm_with_timeout("directories", seed, image) else {
            continue;
        };
        let after = readable_contents(&bytes);
        for (inode, bytes) in before {
            // A directory may be gone, with the path to its files.
            if !outcome.touched.contains(&inode)
                && let Some(now) = after.get(&inode)
            {
                assert!(*now == bytes, "seed {seed}: inode {inode}");
            }
        }
    }
}

/// Returns the directory and xattr blocks.
fn dirent_and_xattr_block_ranges(image: &[u8]) -> Vec<std::ops::Range<usize>> {
    let disk = Arc::new(MemoryDisk::new(image.to_vec(), 512));
    let volume = Volume::open(disk, exercise::open_options()).unwrap();
    let block = volume.superblock().block_bytes as usize;
    let mut found = vec![];
    for number in (2..40).map(InodeNumber) {
        let Ok(inode) = volume.inode(number) else { continue };
        if inode.kind == FileType::Directory {
            for run in volume.map(number, 0).unwrap_or_default() {
                if let draconis_ext::BlockLocation::Mapped(at) = run.location {
                    let at = at.0 as usize * block;
                    found.push(at..at + block * run.blocks as usize);
                }
            }
        }
    }
    found
}

#[test]
#[ignore = "long: a minute: hundreds of volumes"]
fn corrupt_volumes_are_grown_or_refused() {
    draconis_testkit::in_own_process!();
    let mut grown = 0;
    for seed in 0..scaled_rounds(600) {
        let Some(base) = base_image(seed) else { return };
        let structures = metadata_ranges(base);
        let mut random = Random::new(seed ^ 0x6420);
        let mut image = base.clone();
        for _ in 0..random.next_below(6) {
            let nth = random.next_below(structures.len() as u64) as usize;
            corrupt_field(&mut image, structures[nth].clone(), &mut random);
        }
        let size = random.next_below(24 << 20);
        image.resize(image.len().max(size as usize), 0);
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(image, 512));
        let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let growth = GrowPlan::plan(&disk, size)?;
            let now = Default::default();
            growth.write(&GrowTarget { disk: &*disk, zeroed_from_bytes: 0, now, progress: &|_| () })
        }));
        let run = run.unwrap_or_else(|_| panic!("seed {seed}: panicked"));
        grown += u64::from(run.is_ok());
    }
    assert!(grown > 50, "{grown}");
    assert_peak_memory_is_small();
}

#[test]
fn maximum_size_hole_is_cheap() {
    draconis_testkit::in_own_process!();
    let Some(image) = Image::make(None, "16M", &["-b", "65536"]) else { return };
    let disk = image.memory_disk();
    let volume =
        Volume::open_for_writing(disk.clone(), exercise::open_options(), write_options()).unwrap();
    let new =
        NewNode { kind: FileType::File, mode: 0o644, uid: 0, gid: 0, device: (0, 0), target: b"" };
    let clock = HangClock::start();
    for nth in 0..20 {
        let name = format!("hole {nth}").into_bytes();
        let file = volume.create(volume.root(), &name, &new).unwrap();
        let resize = |size| {
            let change = AttributeChange { size_bytes: Some(size), ..Default::default() };
            volume.set_attributes(file, &change).unwrap();
        };
        let most = volume.max_file_bytes();
        resize(most);
        resize(100);
        resize(most);
        volume.write(file, most - 10, b"0123456789abc").unwrap();
        assert_eq!(volume.write(file, most, b"x"), Err(Error::TooLarge));
        volume.unlink(volume.root(), &name).unwrap();
    }
    volume.close().unwrap();
    clock.assert_not_hung("the volume");

    // An inode may claim more than that; it is deleted nevertheless.
    assert!(image.debugfs_write("mknod long p").is_some());
    for (field, value) in [("mode", "0100644"), ("size", "281470681743364")] {
        image.debugfs_write(&format!("set_inode_field long {field} {value}"));
    }
    let disk = image.memory_disk();
    let clock = HangClock::start();
    let volume = Volume::open_for_writing(disk, exercise::open_options(), write_options()).unwrap();
    let file = volume.lookup(volume.root(), b"long").unwrap();
    assert_eq!(volume.inode(file).unwrap().size_bytes, (0xFFFF << 32) + 4);
    volume.write(file, 4, b"thing").unwrap();
    volume.unlink(volume.root(), b"long").unwrap();
    volume.close().unwrap();
    clock.assert_not_hung("the volume");
}

#[test]
fn directory_with_cyclic_block_map_can_be_changed() {
    draconis_testkit::in_own_process!();
    let Some(image) = Image::make(None, "16M", &["-b", "65536"]) else { return };
    // The last block of the volume points to itself everywhere.
    let last = 255u32;
    assert!(image.debugfs_write("mkdir dir").is_some());
    image.debugfs_write("set_inode_field dir block[TIND] 255");
    let mut bytes = std::fs::read(&image.path).unwrap();
    bytes[last as usize * 65536..].copy_from_slice(&last.to_le_bytes().repeat(16384));
    let disk = Arc::new(MemoryDisk::new(bytes, 512));
    let clock = HangClock::start();
    let volume = Volume::open_for_writing(disk, exercise::open_options(), write_options()).unwrap();
    let dir = volume.lookup(volume.root(), b"dir").unwrap();
    for nth in 0..60 {
        let new = NewNode {
            kind: FileType::Fifo,
            mode: 0o644,
            uid: 0,
            gid: 0,
            device: (0, 0),
            target: b"",
        };
        volume.create(dir, format!("a name of some length {nth}").as_bytes(), &new).unwrap();
    }
    volume.sync().unwrap();
    volume.link(volume.lookup(dir, b"a name of some length 3").unwrap(), dir, b"more").unwrap();
    volume.unlink(dir, b"a name of some length 50").unwrap();
    volume.sync().unwrap();
    clock.assert_not_hung("the volume");
    assert_peak_memory_is_small();
}
