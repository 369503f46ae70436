//! Large directories: every hash version, signed and unsigned, and damaged htrees.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

use crate::common::{Image, compare, run_tool};
use draconis_device::Random;
use draconis_ext::format::hash::{HashSeed, NameHash};
use draconis_ext::{Error, InodeNumber, Volume};

const NAME_COUNT: usize = 10_000;

/// Returns names of many lengths and bytes, always the same.
fn varied_names() -> Vec<Vec<u8>> {
    let mut random = Random::new(11);
    let mut names: Vec<Vec<u8>> = (0..NAME_COUNT)
        .map(|nth| {
            let mut name = format!("{nth}-").into_bytes();
            let longest = if nth % 50 == 0 { 240 } else { 24 };
            for _ in 0..random.next_below(longest) {
                name.push(match random.next_below(254) as u8 + 1 {
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
fn large_directory_image() -> Option<&'static [u8]> {
    static IMAGE: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    let image = IMAGE.get_or_init(|| {
        let source = tempfile::tempdir().unwrap();
        let dir = source.path().join("large");
        fs::create_dir(&dir).unwrap();
        for name in varied_names() {
            fs::write(dir.join(OsStr::from_bytes(&name)), b"").unwrap();
        }
        let arguments = ["-b", "1024", "-N", "12000", "-O", "dir_index"];
        let image = Image::make(Some(source.path()), "16M", &arguments)?;
        Some(fs::read(&image.path).unwrap())
    });
    image.as_deref()
}

/// Returns the large directory with an htree of this hash and signedness.
fn make_htree_image(algorithm: &str, unsigned: bool) -> Option<Image> {
    let image = Image::from_bytes(large_directory_image()?);
    image.debugfs_write(&format!("ssv def_hash_version {algorithm}"))?;
    image.debugfs_write(&format!("ssv flags {}", if unsigned { 2 } else { 1 }))?;
    run_tool("e2fsck", &["-fyD", image.path()])?;
    Some(image)
}

/// Looks up every name and returns the average of blocks read.
fn average_lookup_blocks(
    volume: &Volume,
    dir: InodeNumber,
    all: &BTreeMap<Vec<u8>, InodeNumber>,
) -> f64 {
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

fn check_htree_lookups(algorithm: &str, unsigned: bool) {
    let Some(image) = make_htree_image(algorithm, unsigned) else { return };
    let htree = image.debugfs("htree_dump /large").unwrap();
    assert!(htree.contains("Indirect levels: 1"), "{}", &htree[..400]);
    let volume = image.open();
    let dir = volume.lookup(volume.root(), b"large").unwrap();
    let all = compare::list_names(&volume, dir);
    assert_eq!(all.len(), NAME_COUNT + 1);
    let looks = average_lookup_blocks(&volume, dir, &all);
    assert!(looks < 8.0, "{looks} blocks a name: that is not the tree");
    assert_eq!(volume.lookup(dir, b"not there"), Err(Error::NotFound));
    assert_eq!(volume.lookup(dir, b".."), Ok(volume.root()));
    assert_eq!(volume.lookup(dir, &[b'x'; 256]), Err(Error::NameTooLong));
}

#[test]
fn legacy_hash_lookups() {
    check_htree_lookups("legacy", false);
    check_htree_lookups("legacy", true);
}

#[test]
#[ignore = "long: half a minute: a large directory"]
fn half_md4_lookups() {
    check_htree_lookups("half_md4", false);
    check_htree_lookups("half_md4", true);
}

#[test]
fn tea_lookups() {
    check_htree_lookups("tea", false);
    check_htree_lookups("tea", true);
}

#[test]
fn name_hashes_match_debugfs() {
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
                let expected = format!("{:#x} (", hash.hash_name(name.as_bytes()));
                assert!(answer.contains(&expected), "{version} {name}: {answer} not {expected}");
            }
        }
    }
}

#[test]
fn names_in_damaged_htree_are_found() {
    let Some(image) = make_htree_image("half_md4", false) else { return };
    let volume = image.open();
    let dir = volume.lookup(volume.root(), b"large").unwrap();
    let all = compare::list_names(&volume, dir);
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
fn linear_directory_is_quick_in_its_own_order() {
    let Some(plain) = large_directory_image() else { return };
    let image = Image::from_bytes(plain);
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
