//! Damaged images opened for writing: no panic, no hang, bounded memory. A failure stops all
//! writing, and untouched files stay unchanged.

mod common;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::spoil::{
    assert_memory_stayed_small, bases, rounds, small_tree, spoil, structures, structures_of,
};
use common::storm::{Outcome, Storm, writing};
use common::{Image, exercise, tree};
use draconis_device::{MemoryDisk, Random};
use draconis_exchange::contract::{AttributeChange, FileType};
use draconis_ext::grow::{GrowPlan, GrowTarget};
use draconis_ext::{Cookie, Error, InodeNumber, NewNode, Volume};

/// Time limit: each run takes milliseconds on an idle machine.
const HANGS: Duration = Duration::from_secs(120);
const STEPS: u64 = 60;

/// Outcome, and the resulting bytes.
type Ran = Result<(Outcome, Vec<u8>), Error>;

/// Runs a storm on one image, and reads everything before and after closing.
fn storm(image: Vec<u8>, seed: u64) -> Ran {
    let mut random = Random::new(seed);
    let disk = Arc::new(MemoryDisk::new(image, 512));
    let mut storm = Storm::new(disk.clone(), exercise::options())?;
    for _ in 0..STEPS {
        storm.step(&mut |limit| random.below(limit));
    }
    exercise::look(&storm.volume);
    storm.end();
    exercise::look(&storm.volume);
    let outcome = std::mem::take(&mut storm.outcome);
    drop(storm);
    let bytes = Arc::try_unwrap(disk).unwrap().into_bytes();
    // A closed volume can be opened again for reading and writing.
    if !outcome.stopped {
        exercise::all(bytes.clone())?;
        let disk = Arc::new(MemoryDisk::new(bytes.clone(), 512));
        if let Ok(mut again) = Storm::new(disk, exercise::options()) {
            again.end();
        }
    }
    Ok((outcome, bytes))
}

/// Runs one image and names it on failure.
fn run(what: &str, seed: u64, image: Vec<u8>) -> Ran {
    let start = Instant::now();
    let ran = std::panic::catch_unwind(|| storm(image, seed));
    assert!(start.elapsed() < HANGS, "{what}, seed {seed}: took {:?}", start.elapsed());
    ran.unwrap_or_else(|_| panic!("{what}, seed {seed}: panicked"))
}

fn base(seed: u64) -> Option<&'static Vec<u8>> {
    bases().get(seed as usize % bases().len().max(1))
}

#[test]
fn sound_images_do_not_stop_and_stay_sound() {
    for seed in 0..rounds(40) {
        let Some(base) = base(seed) else { return };
        let (outcome, bytes) = run("sound", seed, base.clone()).unwrap();
        assert!(!outcome.stopped && outcome.done > 5, "seed {seed}: {outcome:?}");
        let image = Image::of(&bytes);
        assert!(common::run("e2fsck", &["-fn", image.path()]).is_some(), "seed {seed}");
    }
}

#[test]
fn spoilt_structures() {
    let (mut opened, mut stopped) = (0, 0);
    let rounds = rounds(600);
    for seed in 0..rounds {
        let Some(base) = base(seed) else { return };
        let structures = structures(base);
        let mut random = Random::new(seed ^ 0x5701);
        let mut image = base.clone();
        for _ in 0..=random.below(8) {
            let nth = random.below(structures.len() as u64) as usize;
            spoil(&mut image, structures[nth].clone(), &mut random);
        }
        if let Ok((outcome, _)) = run("spoilt", seed, image) {
            opened += 1;
            stopped += u64::from(outcome.stopped);
        }
    }
    assert!(opened > rounds / 4 && stopped > 0, "{opened} opened, {stopped} stopped");
    assert_memory_stayed_small();
}

#[test]
fn spoilt_clusters_extents_and_quotas() {
    let source = tempfile::tempdir().unwrap();
    small_tree(source.path());
    let features = "bigalloc,quota,^has_journal,^metadata_csum,^64bit";
    let arguments = ["-t", "ext4", "-b", "4096", "-C", "16384", "-N", "256", "-O", features];
    let Some(image) = Image::make(Some(source.path()), "8M", &arguments) else { return };
    let base = std::fs::read(&image.path).unwrap();
    assert!(!run("sound", 0, base.clone()).unwrap().0.stopped);
    let inodes: Vec<usize> = [1, 2, 3].into_iter().chain(10..22).collect();
    let structures = structures_of(&base, &inodes);
    let (mut opened, mut stopped) = (0, 0);
    let rounds = rounds(200);
    for seed in 0..rounds {
        let mut random = Random::new(seed ^ 0xC1D5);
        let mut spoilt = base.clone();
        for _ in 0..=random.below(6) {
            let nth = random.below(structures.len() as u64) as usize;
            spoil(&mut spoilt, structures[nth].clone(), &mut random);
        }
        if let Ok((outcome, _)) = run("clusters", seed, spoilt) {
            opened += 1;
            stopped += u64::from(outcome.stopped);
        }
    }
    assert!(opened > rounds / 4 && stopped > 0, "{opened} opened, {stopped} stopped");
    assert_memory_stayed_small();
}

#[test]
fn bitmaps_and_descriptors_that_lie() {
    for seed in 0..rounds(400) {
        let Some(base) = base(seed) else { return };
        let mut random = Random::new(seed ^ 0xB175);
        let mut image = base.clone();
        let le32 = |at: usize| u32::from_le_bytes(base[at..at + 4].try_into().unwrap()) as usize;
        let block = 1024 << le32(1024 + 0x18);
        let descriptors = block * (le32(1024 + 0x14) + 1);
        for _ in 0..=random.below(4) {
            let map = le32(descriptors + 4 * random.below(2) as usize) * block;
            match random.below(4) {
                0 => image[map..map + block].fill(0),
                1 => image[map..map + block].fill(0xFF),
                2 => spoil(&mut image, map..map + block, &mut random),
                _ => spoil(&mut image, descriptors..descriptors + 20, &mut random),
            }
        }
        let _ = run("bitmaps", seed, image);
    }
    assert_memory_stayed_small();
}

#[test]
fn flipped_bytes_anywhere() {
    for seed in 0..rounds(300) {
        let Some(base) = base(seed) else { return };
        let mut random = Random::new(seed ^ 0xF11C);
        let mut image = base.clone();
        for _ in 0..(1 << random.below(12)) {
            let at = random.below(image.len() as u64) as usize;
            image[at] ^= random.next_u64() as u8;
        }
        let _ = run("flipped", seed, image);
    }
    assert_memory_stayed_small();
}

#[test]
fn cut_images_and_noise() {
    for seed in 0..rounds(200) {
        let Some(base) = base(seed) else { return };
        let mut random = Random::new(seed ^ 0xC08);
        let len = random.below(base.len() as u64) as usize;
        let cut = run("cut", seed, base[..len].to_vec());
        assert!(cut.is_err(), "seed {seed}: not all of the volume is there");
        let mut image = tree::pattern(seed, base.len());
        image[1024..2048].copy_from_slice(&base[1024..2048]);
        if seed % 2 == 0 {
            image[2048..8192].copy_from_slice(&base[2048..8192]);
        }
        let _ = run("noise", seed, image);
    }
}

/// Returns the contents of all readable files.
fn contents(image: &[u8]) -> HashMap<InodeNumber, Vec<u8>> {
    let disk = Arc::new(MemoryDisk::new(image.to_vec(), 512));
    let Ok(volume) = Volume::open(disk, exercise::options()) else { return HashMap::new() };
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
fn damaged_directories_and_attributes_cost_no_other_file() {
    for seed in 0..rounds(300) {
        let Some(base) = base(seed) else { return };
        let mut random = Random::new(seed ^ 0xD1);
        let mut image = base.clone();
        for range in names_and_attributes(base) {
            for _ in 0..random.below(3) {
                spoil(&mut image, range.clone(), &mut random);
            }
        }
        let before = contents(&image);
        let Ok((outcome, bytes)) = run("directories", seed, image) else { continue };
        let after = contents(&bytes);
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
fn names_and_attributes(image: &[u8]) -> Vec<std::ops::Range<usize>> {
    let disk = Arc::new(MemoryDisk::new(image.to_vec(), 512));
    let volume = Volume::open(disk, exercise::options()).unwrap();
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
fn spoilt_volumes_grow_or_are_refused() {
    let mut grown = 0;
    for seed in 0..rounds(600) {
        let Some(base) = base(seed) else { return };
        let structures = structures(base);
        let mut random = Random::new(seed ^ 0x6420);
        let mut image = base.clone();
        for _ in 0..random.below(6) {
            let nth = random.below(structures.len() as u64) as usize;
            spoil(&mut image, structures[nth].clone(), &mut random);
        }
        let size = random.below(24 << 20);
        image.resize(image.len().max(size as usize), 0);
        let disk = MemoryDisk::new(image, 512);
        let run = std::panic::catch_unwind(|| {
            let growth = GrowPlan::plan(&disk, size)?;
            let now = Default::default();
            growth.write(&GrowTarget { disk: &disk, zeroed_from_bytes: 0, now, progress: &|_| () })
        });
        let run = run.unwrap_or_else(|_| panic!("seed {seed}: panicked"));
        grown += u64::from(run.is_ok());
    }
    assert!(grown > 50, "{grown}");
    assert_memory_stayed_small();
}

#[test]
fn a_hole_as_long_as_a_file_can_be_costs_nothing() {
    let Some(image) = Image::make(None, "16M", &["-b", "65536"]) else { return };
    let disk = Arc::new(MemoryDisk::new(std::fs::read(&image.path).unwrap(), 512));
    let volume = Volume::open_for_writing(disk.clone(), exercise::options(), writing()).unwrap();
    let new =
        NewNode { kind: FileType::File, mode: 0o644, uid: 0, gid: 0, device: (0, 0), target: b"" };
    let start = Instant::now();
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
    assert!(start.elapsed() < HANGS, "{:?}", start.elapsed());

    // An inode may claim more than that; it is deleted nevertheless.
    assert!(image.debugfs_write("mknod long p").is_some());
    for (field, value) in [("mode", "0100644"), ("size", "281470681743364")] {
        image.debugfs_write(&format!("set_inode_field long {field} {value}"));
    }
    let disk = Arc::new(MemoryDisk::new(std::fs::read(&image.path).unwrap(), 512));
    let start = Instant::now();
    let volume = Volume::open_for_writing(disk, exercise::options(), writing()).unwrap();
    let file = volume.lookup(volume.root(), b"long").unwrap();
    assert_eq!(volume.inode(file).unwrap().size_bytes, (0xFFFF << 32) + 4);
    volume.write(file, 4, b"thing").unwrap();
    volume.unlink(volume.root(), b"long").unwrap();
    volume.close().unwrap();
    assert!(start.elapsed() < HANGS, "{:?}", start.elapsed());
}

#[test]
fn a_directory_whose_map_leads_in_circles_is_changed_all_the_same() {
    let Some(image) = Image::make(None, "16M", &["-b", "65536"]) else { return };
    // The last block of the volume points to itself everywhere.
    let last = 255u32;
    assert!(image.debugfs_write("mkdir dir").is_some());
    image.debugfs_write("set_inode_field dir block[TIND] 255");
    let mut bytes = std::fs::read(&image.path).unwrap();
    bytes[last as usize * 65536..].copy_from_slice(&last.to_le_bytes().repeat(16384));
    let disk = Arc::new(MemoryDisk::new(bytes, 512));
    let start = Instant::now();
    let volume = Volume::open_for_writing(disk, exercise::options(), writing()).unwrap();
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
    assert!(start.elapsed() < HANGS, "{:?}", start.elapsed());
    assert_memory_stayed_small();
}
