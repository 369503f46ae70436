//! Power loss during changes of an ext2 volume: `e2fsck -p` repairs the result without a question.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::common::spoil::{base_images, scaled_rounds};
use crate::common::storm::{Storm, write_options};
use crate::common::{DIRECTORY, FILE};
use crate::common::{Image, readable_names};
use draconis_device::{Disk, MemoryDisk, Random};
use draconis_ext::{InodeNumber, OpenOptions, RenameMode, Volume, check};
use draconis_testkit::judge::assert_preens;
use draconis_testkit::{CrashOptions, CrashStates, RecordDisk};
use draconis_types::FileType;

const STORM_STEPS: u64 = 14;
/// One state of so many is checked with `e2fsck`.
const E2FSCK_SAMPLE_INTERVAL: u64 = 4;

#[test]
#[ignore = "long: a minute: a power cut in each of many storms"]
fn storms_with_power_loss_are_repaired_by_e2fsck() {
    for seed in 0..scaled_rounds(40) {
        let Some(base) = base_images().get(seed as usize % base_images().len().max(1)) else {
            return;
        };
        let mut random = Random::new(seed ^ 0xC07C07);
        let disk = Arc::new(RecordDisk::new(MemoryDisk::new(base.clone(), 512)));
        let mut storm = Storm::new(disk.clone(), OpenOptions::default()).unwrap();
        storm.calm = true;
        for _ in 0..STORM_STEPS {
            storm.random_change(&mut |limit| random.next_below(limit));
        }
        storm.finish();
        let options = CrashOptions { seed, subsets: 4, exhaustive_sectors: 0 };
        for crash in CrashStates::new(base.clone(), disk.take_events(), options) {
            if random.next_below(E2FSCK_SAMPLE_INTERVAL) == 0 {
                let image = Image::from_bytes(&crash.disk.to_bytes());
                assert_preens(&image.path, &format!("seed {seed}, {:?}", crash.kind));
            }
        }
    }
}

/// Changes that share a chain, and changes that must not. No directory gets another parent: that is
/// what `e2fsck` asks about.
const SCRIPTS: [&str; 23] = [
    "mkdir new; mv a/1 new/1",
    "mkdir new; mkdir new/in; mkdir new/in/deep; create new/in/deep/file; mv a/1 new/in/1",
    "mkdir new; mkdir new/in; mv new moved; create moved/in/file; mv b/1 moved/in/file",
    "mv a/1 b/3; mv b/1 a/4",
    "mv a/1 b/3; mv b/3 full/3",
    "mv a/1 full/3; mv b/1 full/4; mv a/2 b/5",
    "link a/1 b/3; mv a/1 b/4",
    "link a/1 b/3; mv a/1 b/1",
    "link a/1 b/3; mv a/2 a/1",
    "link a/1 b/3; rm a/1",
    "link a/1 b/3; rm b/3; rm a/2",
    "rm a/linked; mv a/1 b/linked",
    "rm a/linked; rm b/linked",
    "mv a/1 b/1; rm b/1; mv a/2 b/1",
    "mv a/1 a/2; create a/1; mv a/1 b/2",
    "create a/new; mv a/new b/1; mv b/1 a/2",
    "create a/new; swap a/new a/1; rm a/new",
    "swap a/1 a/2; rm a/1",
    "create a/new; link a/new b/new; rm a/new; create a/more; rm a/more; rm a/1",
    "rm d/e/f/1; rmdir d/e/f; rmdir d/e; rmdir d; mkdir d; mv a/1 d/1",
    "mv d/e/f/1 a/3; rmdir d/e/f; rmdir d/e; create d/e",
    "drain full; fill full; mv a/1 full/1",
    "drain deep; fill deep; mv full/kept deep/kept; rm a/1",
];

fn find_dir(volume: &Volume, path: &str) -> InodeNumber {
    let names = path.split('/').filter(|name| !name.is_empty());
    names.fold(volume.root(), |dir, name| volume.lookup(dir, name.as_bytes()).unwrap())
}

/// Carries out commands that are separated by semicolons.
fn run_script(volume: &Volume, script: &str) {
    let place = |path: &str| {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        (find_dir(volume, dir), name.as_bytes().to_vec())
    };
    for command in script.split("; ") {
        let words: Vec<&str> = command.split(' ').collect();
        let (dir, name) = place(words[1]);
        let to = words.get(2).map(|path| place(path));
        let done = match (words[0], to) {
            ("create", None) => volume
                .create(dir, &name, &FILE)
                .and_then(|file| volume.write(file, 0, words[1].as_bytes()).map(drop)),
            ("mkdir", None) => volume.create(dir, &name, &DIRECTORY).map(drop),
            ("rm", None) => volume.unlink(dir, &name),
            ("rmdir", None) => volume.remove_directory(dir, &name),
            ("link", Some((to, new))) => volume.link(volume.lookup(dir, &name).unwrap(), to, &new),
            ("mv", Some((to, new))) => volume.rename(dir, &name, to, &new, RenameMode::Replace),
            ("swap", Some((to, new))) => volume.rename(dir, &name, to, &new, RenameMode::Exchange),
            ("fill", None) => {
                let dir = find_dir(volume, words[1]);
                (0..30).try_for_each(|nth| {
                    volume.create(dir, format!("{nth:-^60}").as_bytes(), &FILE).map(drop)
                })
            }
            ("drain", None) => {
                let dir = find_dir(volume, words[1]);
                let names = readable_names(volume, dir).into_iter().map(|(name, _)| name);
                let mut old = names.filter(|name| name.starts_with(b"="));
                old.try_for_each(|name| volume.unlink(dir, &name))
            }
            _ => panic!("{command}"),
        };
        done.unwrap_or_else(|error| panic!("{command}: {error}"));
    }
}

/// Returns the paths of a volume with inode and contents, of as much as can be read.
fn all_paths(volume: &Volume) -> BTreeMap<Vec<u8>, (InodeNumber, Vec<u8>)> {
    let (mut found, mut left) = (BTreeMap::new(), vec![(vec![], volume.root())]);
    while let Some((path, dir)) = left.pop() {
        for (name, inode) in readable_names(volume, dir) {
            let own = [&path[..], b"/", &name].concat();
            let Ok(node) = volume.inode(inode) else { continue };
            if name == b"." || name == b".." {
                continue;
            }
            if node.kind == FileType::Directory {
                left.push((own.clone(), inode));
            }
            let mut bytes = vec![0; 64];
            let len = match node.kind {
                FileType::File => volume.read_into(inode, 0, &mut bytes).unwrap_or(0),
                _ => 0,
            };
            bytes.truncate(len);
            found.insert(own, (inode, bytes));
        }
    }
    found
}

/// A file that has a name before and after a script has one in each state, and its contents.
#[test]
#[ignore = "long: half a minute: a power cut at each change"]
fn power_loss_between_changes_of_one_batch() {
    let Some(image) = Image::make(None, "1M", &["-b", "1024", "-I", "128", "-N", "512"]) else {
        return;
    };
    let open = |disk: Arc<dyn Disk>| {
        Volume::open_for_writing(disk, OpenOptions::default(), write_options()).unwrap()
    };
    let disk = image.memory_disk();
    let volume = open(disk.clone());
    run_script(
        &volume,
        "mkdir a; mkdir b; mkdir d; mkdir d/e; mkdir d/e/f; mkdir full; mkdir deep",
    );
    run_script(&volume, "create a/1; create a/2; create b/1; create b/2; create d/e/f/1");
    run_script(&volume, "create a/linked; link a/linked b/linked; create full/kept");
    for (dir, count) in [("full", 40), ("deep", 200)] {
        let dir = find_dir(&volume, dir);
        for nth in 0..count {
            // Every fourth name stays.
            let name = if nth % 4 == 0 { format!("{nth:_^60}") } else { format!("{nth:=^60}") };
            volume.create(dir, name.as_bytes(), &FILE).unwrap();
        }
    }
    volume.close().unwrap();
    drop(volume);
    let base = Arc::into_inner(disk).unwrap().into_bytes();
    for script in SCRIPTS {
        let disk = Arc::new(RecordDisk::new(MemoryDisk::new(base.clone(), 512)));
        let volume = open(disk.clone());
        let before = all_paths(&volume);
        run_script(&volume, script);
        volume.sync().unwrap();
        disk.record_mark(1);
        let after = all_paths(&volume);
        volume.close().unwrap();
        let stay: BTreeMap<InodeNumber, Vec<u8>> =
            after.values().filter(|it| before.values().any(|old| old == *it)).cloned().collect();
        let options = CrashOptions { seed: 1, subsets: 12, exhaustive_sectors: 8 };
        for crash in CrashStates::new(base.clone(), disk.take_events(), options) {
            let what = format!("{script}: {:?} after {:?}", crash.kind, crash.written);
            let left: Arc<dyn Disk> = crash.disk.clone();
            let options = check::CheckOptions { threads: 1, ..check::CheckOptions::default() };
            let report = check::check(&left, options, &|_, _| {}).unwrap();
            let asked = report.problems.iter().find(|it| !it.is_preen_ok());
            assert!(asked.is_none(), "{what}: {asked:?}");
            let found = all_paths(&Volume::open(left, OpenOptions::default()).unwrap());
            let have: BTreeMap<_, _> = found.values().cloned().collect();
            for (inode, bytes) in &stay {
                assert_eq!(have.get(inode), Some(bytes), "{what}: inode {inode}");
            }
            assert!(crash.marks().is_empty() || found == after, "{what}");
        }
    }
}
