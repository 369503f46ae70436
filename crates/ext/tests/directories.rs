//! Large directories: every hash version, signed and unsigned, and damaged htrees.

mod common;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

use common::{Image, compare, run};
use draconis_device::Random;
use draconis_ext::format::hash::{HashSeed, NameHash};
use draconis_ext::{Error, InodeNumber, Volume};

const NAMES: usize = 10_000;

/// Returns names of many lengths and bytes, always the same.
fn odd_names() -> Vec<Vec<u8>> {
    let mut random = Random::new(11);
    let mut names: Vec<Vec<u8>> = (0..NAMES)
        .map(|nth| {
            let mut name = format!("{nth}-").into_bytes();
            let longest = if nth % 50 == 0 { 240 } else { 24 };
            for _ in 0..random.below(longest) {
                name.push(match random.below(254) as u8 + 1 {
                    b'/' => b'_',
                    byte => byte,
                });
            }
            name
        })
        .collect();
    names.push(vec![0xFF; 255]);
    names
}

/// An image with one large directory, made once because `mke2fs` is slow here.
fn plain() -> Option<&'static [u8]> {
    static IMAGE: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    let image = IMAGE.get_or_init(|| {
        let source = tempfile::tempdir().unwrap();
        let dir = source.path().join("large");
        fs::create_dir(&dir).unwrap();
        for name in odd_names() {
            fs::write(dir.join(OsStr::from_bytes(&name)), b"").unwrap();
        }
        let arguments = ["-b", "1024", "-N", "12000", "-O", "dir_index"];
        let image = Image::make(Some(source.path()), "16M", &arguments)?;
        Some(fs::read(&image.path).unwrap())
    });
    image.as_deref()
}

/// Returns the large directory with an htree of this hash and signedness.
fn hashed(algorithm: &str, unsigned: bool) -> Option<Image> {
    let image = Image::of(plain()?);
    image.debugfs_write(&format!("ssv def_hash_version {algorithm}"))?;
    image.debugfs_write(&format!("ssv flags {}", if unsigned { 2 } else { 1 }))?;
    run("e2fsck", &["-fyD", image.path()])?;
    Some(image)
}

/// Looks up every name and returns the average of blocks read.
fn look_up_all(volume: &Volume, dir: InodeNumber, all: &BTreeMap<Vec<u8>, InodeNumber>) -> f64 {
    let asked = |volume: &Volume| {
        let data = volume.statistics().data;
        data.hits + data.misses
    };
    let before = asked(volume);
    for (name, number) in all {
        assert_eq!(volume.lookup(dir, name).unwrap(), *number);
    }
    (asked(volume) - before) as f64 / all.len() as f64
}

fn check(algorithm: &str, unsigned: bool) {
    let Some(image) = hashed(algorithm, unsigned) else { return };
    let htree = image.debugfs("htree_dump /large").unwrap();
    assert!(htree.contains("Indirect levels: 1"), "{}", &htree[..400]);
    let volume = image.open();
    let dir = volume.lookup(volume.root(), b"large").unwrap();
    let all = compare::names(&volume, dir);
    assert_eq!(all.len(), NAMES + 1);
    let looks = look_up_all(&volume, dir, &all);
    assert!(looks < 8.0, "{looks} blocks a name: that is not the tree");
    assert_eq!(volume.lookup(dir, b"not there"), Err(Error::NotFound));
    assert_eq!(volume.lookup(dir, b".."), Ok(volume.root()));
    assert_eq!(volume.lookup(dir, &[b'x'; 256]), Err(Error::NameTooLong));
}

#[test]
fn legacy_hashes() {
    check("legacy", false);
    check("legacy", true);
}

#[test]
fn half_md4_hashes() {
    check("half_md4", false);
    check("half_md4", true);
}

#[test]
fn tea_hashes() {
    check("tea", false);
    check("tea", true);
}

#[test]
fn hashes_are_those_of_debugfs() {
    let Some(image) = Image::make(None, "1M", &[]) else { return };
    let seed_text = "00112233-4455-6677-8899-aabbccddeeff";
    let seed = HashSeed::new([0x3322_1100, 0x7766_5544, 0xBBAA_9988, 0xFFEE_DDCC]);
    let zero = "00000000-0000-0000-0000-000000000000";
    let names =
        ["a", "lost+found", "a name of exactly 32 characters.", "größe", &"long".repeat(60)];
    for (text, seed) in [(seed_text, seed), (zero, HashSeed::new([0; 4]))] {
        for version in 0..6u8 {
            let hash = NameHash::of_version(version, false, seed).unwrap();
            for name in names {
                let request = format!("dx_hash -h {version} -s {text} \"{name}\"");
                let answer = image.debugfs(&request).unwrap();
                let expected = format!("{:#x} (", hash.of(name.as_bytes()));
                assert!(answer.contains(&expected), "{version} {name}: {answer} not {expected}");
            }
        }
    }
}

#[test]
fn a_damaged_tree_still_has_its_names() {
    let Some(image) = hashed("half_md4", false) else { return };
    let volume = image.open();
    let dir = volume.lookup(volume.root(), b"large").unwrap();
    let all = compare::names(&volume, dir);
    let root = image.debugfs("blocks /large").unwrap();
    let root: u64 = root.split_whitespace().next().unwrap().parse().unwrap();
    let damage = |at: u64, bytes: &[u8]| {
        let file = fs::OpenOptions::new().write(true).open(&image.path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, bytes, root * 1024 + at).unwrap();
    };
    // An unknown hash version, zero levels instead of some, an impossible count.
    for (at, bytes, good) in [(28, [9u8], [1u8]), (34, [0], [0]), (35, [0xFF], [0])] {
        damage(at, &bytes);
        let volume = image.open();
        for (name, number) in all.iter().step_by(97) {
            assert_eq!(volume.lookup(dir, name), Ok(*number), "damage at {at}");
        }
        damage(at, &good);
    }
}

#[test]
fn a_large_directory_without_a_tree_is_quick_in_its_own_order() {
    let Some(plain) = plain() else { return };
    let image = Image::of(plain);
    let volume = image.open();
    let root = volume.lookup(volume.root(), b"large").unwrap();
    let mut order = Vec::new();
    volume
        .entries(root, draconis_ext::Cookie::default(), false, |entry| {
            let entry = entry.unwrap();
            order.push((entry.name.to_vec(), entry.inode));
            true
        })
        .unwrap();
    let before = volume.statistics().data;
    for (name, number) in &order {
        assert_eq!(volume.lookup(root, name).unwrap(), *number);
    }
    let after = volume.statistics().data;
    let looks = (after.hits - before.hits) / order.len() as u64;
    assert!(looks < 4, "{looks} blocks a name");
}
