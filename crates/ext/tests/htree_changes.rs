//! Changes of htrees: every hash, colliding names, folded names. `e2fsck` checks each, the kernel
//! looks up and changes names, and we continue after it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use crate::common::storm::write_options;
use crate::common::{DIRECTORY, FILE};
use crate::common::{Image, compare, run_tool};
use draconis_device::Random;
use draconis_ext::format::inode::flags;
use draconis_ext::{Error, InodeNumber, OpenOptions, RenameMode, Volume};

/// Steps of each walk, and names in use. With folding, a lookup of an absent name scans the whole
/// directory.
const STEPS_PER_WALK: u64 = 1200;
const NAMES_PER_WALK: u64 = 900;
const CASEFOLD_STEPS: u64 = 300;
const CASEFOLD_NAMES: u64 = 150;

/// Fixed hash seed.
const HASH_SEED_OPTION: &str = "hash_seed=6b33f586-a183-4183-921d-30da3fef2e5c";

/// With [`SEED`], the numbers of a row have the same hash as names of [`long_colliding_name`]: more names
/// than fit into a block of 1 KiB.
const LEGACY_COLLISIONS: [[u32; 4]; 3] = [
    [31_279_174, 35_483_884, 48_483_193, 51_263_320],
    [34_572_475, 36_656_597, 42_449_645, 45_103_340],
    [32_778_031, 41_088_205, 41_088_705, 42_617_611],
];
const HALF_MD4_COLLISIONS: [[u32; 4]; 3] = [
    [4_920_730, 13_200_534, 23_072_538, 25_280_850],
    [44_804_960, 50_087_426, 56_980_148, 57_731_537],
    [11_512_279, 25_237_242, 42_344_857, 59_107_675],
];
const TEA_COLLISIONS: [[u32; 4]; 3] = [
    [3_869_922, 8_378_387, 28_878_127, 55_740_309],
    [4_455_303, 24_008_742, 25_008_271, 38_658_791],
    [22_162_416, 26_820_628, 28_863_645, 58_121_813],
];

/// Three such names fill a block.
fn long_colliding_name(number: u32) -> Vec<u8> {
    format!("{}{number:08}", "x".repeat(242)).into_bytes()
}

/// A kind of htree.
#[derive(Clone, Copy)]
struct HtreeKind {
    hash: &'static str,
    collisions: [[u32; 4]; 3],
    unsigned: bool,
    features: &'static str,
    folds: bool,
}

impl HtreeKind {
    /// Makes a volume with htrees of this kind.
    fn make_image(&self) -> Option<Image> {
        let arguments =
            ["-t", "ext4", "-b", "1024", "-N", "3000", "-O", self.features, "-E", HASH_SEED_OPTION];
        let image = Image::make(None, "16M", &arguments)?;
        image.debugfs_write(&format!("ssv def_hash_version {}", self.hash))?;
        image.debugfs_write(&format!("ssv flags {}", if self.unsigned { 2 } else { 1 }))?;
        Some(image)
    }

    /// Returns a random name of a walk, in one form, or in three with folding.
    fn random_name(&self, random: &mut Random) -> Vec<u8> {
        if random.next_below(4) == 0 {
            let row = self.collisions[random.next_below(3) as usize];
            return long_colliding_name(row[random.next_below(4) as usize]);
        }
        let nth = random.next_below(if self.folds { CASEFOLD_NAMES } else { NAMES_PER_WALK });
        if self.folds {
            let len = 75 + Random::new(nth).next_below(40) as usize;
            return format!("\u{C9}t\u{E9} {nth} {}", "\u{3A3}".repeat(len)).into_bytes();
        }
        let mut own = Random::new(nth);
        let mut name = format!("{nth} ").into_bytes();
        let len = 150 + own.next_below(90);
        name.extend((0..len).map(|_| match own.next_below(254) as u8 + 1 {
            b'/' => b'_',
            byte => byte,
        }));
        name
    }

    /// Returns a name in an equivalent form.
    fn equivalent_name(&self, random: &mut Random, name: &[u8]) -> Vec<u8> {
        let Ok(text) = std::str::from_utf8(name) else { return name.to_vec() };
        match random.next_below(if self.folds { 4 } else { 1 }) {
            1 => text.to_uppercase().into_bytes(),
            2 => text.to_lowercase().into_bytes(),
            3 => text.replace('\u{E9}', "e\u{301}").into_bytes(),
            _ => name.to_vec(),
        }
    }
}

/// A directory with its model.
struct DirectoryWalk<'v> {
    trees: HtreeKind,
    volume: &'v Volume,
    dir: InodeNumber,
    model: BTreeMap<Vec<u8>, InodeNumber>,
}

impl DirectoryWalk<'_> {
    fn random_step(&mut self, random: &mut Random) {
        let (volume, dir) = (self.volume, self.dir);
        let name = self.trees.random_name(random);
        let shown = self.trees.equivalent_name(random, &name);
        let there = self.model.get(&name).copied();
        assert_eq!(volume.lookup(dir, &shown).ok(), there);
        match random.next_below(16) {
            0..9 => match volume.create(dir, &shown, &FILE) {
                Ok(made) => {
                    assert!(there.is_none());
                    self.model.insert(name, made);
                }
                Err(error) => assert!(error == Error::Exists && there.is_some(), "{error}"),
            },
            9..12 => {
                assert_eq!(volume.unlink(dir, &shown).is_ok(), there.is_some());
                self.model.remove(&name);
            }
            _ => {
                let to = self.trees.random_name(random);
                let moved = self.trees.equivalent_name(random, &to);
                let how =
                    [RenameMode::Replace, RenameMode::NoReplace][random.next_below(2) as usize];
                let taken = how == RenameMode::NoReplace && self.model.contains_key(&to);
                let done = volume.rename(dir, &shown, dir, &moved, how);
                assert_eq!(done.is_ok(), there.is_some() && !taken, "{done:?}");
                if let Some(inode) = there.filter(|_| !taken) {
                    self.model.remove(&name);
                    self.model.insert(to, inode);
                }
            }
        }
    }

    /// Creates the missing colliding names, not in numeric order.
    fn create_colliding_names(&mut self) {
        for nth in [2, 0, 3, 1] {
            for row in self.trees.collisions {
                let name = long_colliding_name(row[nth]);
                if !self.model.contains_key(&name) {
                    let made = self.volume.create(self.dir, &name, &FILE).unwrap();
                    self.model.insert(name, made);
                }
            }
        }
    }

    /// Checks that exactly the model's names exist.
    fn assert_matches_model(&self) {
        for (name, inode) in &self.model {
            assert_eq!(self.volume.lookup(self.dir, name), Ok(*inode));
        }
        let listed = compare::list_names(self.volume, self.dir);
        let mut found: Vec<_> = listed.values().collect();
        let mut expected: Vec<_> = self.model.values().collect();
        found.sort();
        expected.sort();
        assert_eq!(found, expected);
    }
}

/// Applies `change` to an image, and checks it with e2fsck.
fn change_and_fsck(image: &Image, change: impl FnOnce(&Volume)) -> Image {
    let disk = image.memory_disk();
    let volume =
        Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap();
    change(&volume);
    volume.close().unwrap();
    drop(volume);
    let image = Image::from_bytes(&Arc::try_unwrap(disk).unwrap().into_bytes());
    assert!(run_tool("e2fsck", &["-fn", image.path()]).is_some());
    image
}

/// Lets the kernel find every name, remove some, and add others.
fn change_with_kernel(image: &Image, trees: HtreeKind, model: &mut BTreeMap<Vec<u8>, InodeNumber>) {
    let Some(mount) = image.mount_writable() else { return };
    let path = |name: &[u8]| mount.path().join("dir").join(OsStr::from_bytes(name));
    for (name, inode) in &*model {
        assert_eq!(fs::metadata(path(name)).unwrap().ino(), u64::from(inode.0));
    }
    let mut random = Random::new(99);
    for _ in 0..STEPS_PER_WALK / 4 {
        let name = trees.random_name(&mut random);
        if model.remove(&name).is_some() {
            fs::remove_file(path(&name)).unwrap();
        } else {
            let made = File::create_new(path(&name)).unwrap().metadata().unwrap().ino();
            model.insert(name, InodeNumber(u32::try_from(made).unwrap()));
        }
    }
    drop(mount);
    assert!(run_tool("e2fsck", &["-fn", image.path()]).is_some());
}

fn check_htree_walk(trees: HtreeKind, seed: u64) {
    let Some(image) = trees.make_image() else { return };
    let mut model = BTreeMap::new();
    let walk = |volume: &Volume, dir, model: &mut BTreeMap<_, _>, seed| {
        let mut random = Random::new(seed);
        let mut walk = DirectoryWalk { trees, volume, dir, model: std::mem::take(model) };
        let steps = if trees.folds { CASEFOLD_STEPS } else { STEPS_PER_WALK };
        (0..steps).for_each(|_| walk.random_step(&mut random));
        walk.create_colliding_names();
        walk.assert_matches_model();
        *model = walk.model;
    };
    let image = change_and_fsck(&image, |volume| {
        let dir = volume.create(volume.root(), b"dir", &DIRECTORY).unwrap();
        if trees.folds {
            volume.set_flags(dir, volume.inode(dir).unwrap().flags | flags::CASEFOLD).unwrap();
        }
        walk(volume, dir, &mut model, seed);
    });
    let dump = image.debugfs("htree_dump /dir").unwrap();
    assert!(trees.folds || dump.contains("Indirect levels: 1"), "{}: one level", trees.hash);
    // An odd hash marks names that continue in the next block.
    let odd = |line: &str| {
        let (_, rest) = line.split_once(": Hash 0x")?;
        Some(u32::from_str_radix(rest.get(..8)?, 16).ok()? % 2 == 1)
    };
    assert!(dump.lines().any(|line| odd(line) == Some(true)), "{}: no hash went on", trees.hash);
    if !trees.folds {
        change_with_kernel(&image, trees, &mut model);
    }
    change_and_fsck(&image, |volume| {
        let dir = volume.lookup(volume.root(), b"dir").unwrap();
        walk(volume, dir, &mut model, seed + 1);
        for name in model.keys() {
            volume.unlink(dir, name).unwrap();
        }
    });
}

const PLAIN_FEATURES: &str = "^has_journal";
const NO_CHECKSUM_FEATURES: &str = "^metadata_csum,^has_journal,large_dir";
const CASEFOLD_FEATURES: &str = "casefold,^has_journal";

fn check_all_htree_kinds(hash: &'static str, collisions: [[u32; 4]; 3], seed: u64) {
    let plain =
        HtreeKind { hash, collisions, unsigned: false, features: PLAIN_FEATURES, folds: false };
    check_htree_walk(plain, seed);
    check_htree_walk(
        HtreeKind { unsigned: true, features: NO_CHECKSUM_FEATURES, ..plain },
        seed + 2,
    );
    check_htree_walk(HtreeKind { features: CASEFOLD_FEATURES, folds: true, ..plain }, seed + 4);
    check_htree_walk(
        HtreeKind { features: CASEFOLD_FEATURES, folds: true, unsigned: true, ..plain },
        seed + 6,
    );
}

#[test]
#[ignore = "long: half a minute: thousands of changes"]
fn random_changes_of_legacy_hash_trees() {
    check_all_htree_kinds("legacy", LEGACY_COLLISIONS, 10);
}

#[test]
fn random_changes_of_half_md4_trees() {
    check_all_htree_kinds("half_md4", HALF_MD4_COLLISIONS, 20);
}

#[test]
#[ignore = "long: half a minute: thousands of changes"]
fn random_changes_of_tea_trees() {
    check_all_htree_kinds("tea", TEA_COLLISIONS, 30);
}
