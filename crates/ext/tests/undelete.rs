//! Deleted files: right bytes and paths come back, and what may be wrong is called unsure.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::common::spoil::{corrupt_field, metadata_ranges, scaled_rounds};
use crate::common::{Image, PreadDisk, run_tool, tree};
use draconis_device::{Disk, Extent, MemoryDisk, Random};
use draconis_ext::undelete::{
    DeletedFile, DeletedFiles, DeletedTree, DeletedView, FileState, Limits, STATE_XATTR,
};
use draconis_ext::{Cookie, FileSystem, FileType, Follow, InodeNumber, OpenOptions, Volume};
use draconis_testkit::wait::HangClock;
use draconis_types::Block;

/// Volumes with a journal.
const VOLUMES: &[&[&str]] = &[
    &["-t", "ext3", "-b", "1024"],
    &["-t", "ext3", "-b", "4096"],
    &["-t", "ext4", "-b", "1024"],
    &["-t", "ext4", "-b", "4096"],
    &["-t", "ext4", "-b", "4096", "-O", "^metadata_csum"],
    &["-t", "ext4", "-b", "1024", "-O", "^metadata_csum,^64bit"],
    &["-t", "ext4", "-b", "4096", "-O", "inline_data"],
];

type Files = BTreeMap<String, Vec<u8>>;

/// Files of several sizes in several directories; some need blocks of the map.
fn planned_files() -> Files {
    let dirs = ["docs", "docs/letters", "docs/letters/2026", "src"];
    let sizes = [40, 900, 5000, 30_000, 150_000, 1_300_000];
    (0..48)
        .map(|nth| {
            let len = sizes[nth % sizes.len()] + nth;
            (format!("/top/{}/file-{nth}", dirs[nth % 4]), tree::random_bytes(nth as u64, len))
        })
        .collect()
}

fn scan(image: &Image) -> DeletedFiles {
    let before = std::fs::read(&image.path).unwrap();
    let disk = Arc::new(PreadDisk::open(&image.path, 512));
    let found = DeletedFiles::scan(disk.clone(), Limits::default()).unwrap();
    let view = DeletedFiles::scan(disk, Limits::default()).unwrap().into_view().unwrap();
    compare_view(&found, &view);
    assert!(std::fs::read(&image.path).unwrap() == before, "the image changed");
    found
}

/// Compares the volume of deleted files with what undeletion reads.
fn compare_view(found: &DeletedFiles, view: &DeletedView) {
    let volume = Volume::open(view.disk.clone(), OpenOptions::default()).unwrap();
    assert_eq!(volume.quick_check(), None);
    let files: Vec<_> = found.files().iter().map(|it| (it, it.names().collect())).collect();
    let tree = DeletedTree::new(&files);
    let (mut files, mut unsure) = (0, 0);
    for (nth, place) in tree.places().iter().enumerate() {
        let path = tree.path(nth);
        let shown = String::from_utf8_lossy(&path);
        let inode = volume.resolve(volume.root(), &path, Follow::No).expect(&shown);
        let ours = volume.attributes(inode).unwrap();
        let Some(file) = place.file else {
            assert_eq!(ours.kind, FileType::Directory, "{shown}");
            continue;
        };
        let theirs = &file.attributes;
        let of = |it: &draconis_types::Attributes| {
            let device = (it.kind, it.mode, it.uid, it.gid, it.device);
            (device, it.accessed, it.modified, it.changed)
        };
        assert_eq!(of(&ours), of(theirs), "{shown}");
        assert!(theirs.created.is_none() || ours.created == theirs.created, "{shown}");
        let mut xattrs: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
        for name in volume.xattr_names(inode).unwrap() {
            xattrs.insert(name.clone(), volume.xattr(inode, &name).unwrap());
        }
        if let Some(first) = place.link_to {
            let first = volume.resolve(volume.root(), &tree.path(first), Follow::No);
            assert_eq!(first, Ok(inode), "{shown}");
        } else if theirs.kind != FileType::Directory {
            files += 1;
            unsure += u64::from(file.state != FileState::Whole);
        }
        let state = xattrs.remove(STATE_XATTR).map(|text| String::from_utf8(text).unwrap());
        let own = found.xattrs(file);
        if theirs.kind == FileType::File {
            let is_lost = own.is_err();
            assert_eq!(state.is_some(), is_lost || file.state != FileState::Whole, "{shown}");
            let text = file.state.text();
            assert!(state.is_none_or(|state| state.starts_with(text)), "{shown}: {text}");
        } else {
            assert_eq!(state, None, "{shown}");
        }
        assert_eq!(xattrs, own.unwrap_or_default().into_iter().collect(), "{shown}");
        match theirs.kind {
            FileType::File => {
                assert_eq!(ours.size_bytes, theirs.size_bytes, "{shown}");
                let len = theirs.size_bytes as usize;
                let ours = read_all(&volume, inode, len);
                let mut bytes = vec![0; len];
                match found.read(file, 0, &mut bytes) {
                    _ if file.state == FileState::Overwritten => assert!(ours.is_err(), "{shown}"),
                    Ok(_) => assert!(ours.unwrap() == bytes, "{shown}"),
                    Err(_) => assert!(ours.is_err(), "{shown}"),
                }
            }
            FileType::Symlink => match file.link_target(found) {
                Ok(target) => assert_eq!(volume.read_link(inode), Ok(target), "{shown}"),
                Err(_) => assert!(volume.read_link(inode).is_err(), "{shown}"),
            },
            _ => {}
        }
    }
    assert_eq!(walk(&volume).len() + 1, tree.places().len());
    assert_eq!((view.summary.files, view.summary.unsure), (files, unsure));
}

/// Reads a file in parts, as many bytes as each read returns.
fn read_all(volume: &Volume, inode: InodeNumber, len: usize) -> draconis_ext::Result<Vec<u8>> {
    let mut bytes = vec![];
    while bytes.len() < len {
        let part = volume.read(inode, bytes.len() as u64, len - bytes.len())?;
        assert!(!part.is_empty(), "{} of {len} bytes", bytes.len());
        bytes.extend_from_slice(&part);
    }
    Ok(bytes)
}

/// Returns the inodes of all names of a volume but its root.
fn walk(volume: &Volume) -> Vec<InodeNumber> {
    let (mut dirs, mut all) = (vec![volume.root()], vec![]);
    while let Some(dir) = dirs.pop() {
        let listed = volume.entries(dir, Cookie::default(), false, |entry| {
            if let Ok(entry) = entry {
                all.push(entry.inode);
                if entry.kind == Some(FileType::Directory) {
                    dirs.push(entry.inode);
                }
            }
            true
        });
        listed.unwrap();
    }
    all
}

fn contents(all: &DeletedFiles, file: &DeletedFile) -> Vec<u8> {
    let mut bytes = vec![0; file.attributes.size_bytes as usize];
    assert_eq!(all.read(file, 0, &mut bytes), Ok(bytes.len()));
    bytes
}

/// What came back of some files.
#[derive(Debug, Default)]
struct Restored {
    /// Files with their bytes at their path.
    right: usize,
    /// Of these, how many are whole.
    whole: usize,
}

/// Compares what was found with what was deleted. No contents may be wrong without a word.
fn compare(all: &DeletedFiles, files: &Files) -> Restored {
    let mut restored = Restored::default();
    for file in all.files().iter().filter(|file| file.attributes.kind == FileType::File) {
        let path = String::from_utf8_lossy(&file.path).into_owned();
        if path.starts_with("/new") {
            continue;
        }
        let Some(wanted) = files.get(&path) else {
            assert!(!file.is_path_known, "{path}: no such file was deleted");
            continue;
        };
        let found = contents(all, file);
        if found == *wanted {
            restored.right += 1;
            restored.whole += usize::from(file.state == FileState::Whole);
            continue;
        }
        let is_excused = |at: usize| {
            let at = at as u64;
            file.overwritten.iter().chain(&file.unsure).any(|range| range.contains(&at))
        };
        if file.state != FileState::Unsure || file.reason.is_none() {
            assert_eq!(found.len(), wanted.len(), "{path}: {:?}", file.state);
            let wrong = (0..found.len()).find(|at| found[*at] != wanted[*at] && !is_excused(*at));
            assert_eq!(wrong, None, "{path}: {:?} has wrong bytes", file.state);
        }
        assert_ne!(file.state, FileState::Whole, "{path}");
    }
    restored
}

fn write_tree(top: &Path, files: &Files) {
    for (path, bytes) in files {
        let path = top.join(&path[1..]);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}

#[test]
fn files_deleted_by_the_kernel_come_back() {
    let files = planned_files();
    for arguments in VOLUMES {
        let Some(image) = Image::make(None, "64M", arguments) else { return };
        let Some(mount) = image.mount_writable() else { return };
        write_tree(mount.path(), &files);
        std::os::unix::fs::symlink("short", mount.path().join("top/fast")).unwrap();
        std::os::unix::fs::symlink("x/".repeat(200), mount.path().join("top/slow")).unwrap();
        drop(mount);
        let Some(mount) = image.mount_writable() else { return };
        std::fs::remove_dir_all(mount.path().join("top")).unwrap();
        drop(mount);
        let found = scan(&image);
        let restored = compare(&found, &files);
        assert_eq!((restored.right, restored.whole), (files.len(), files.len()), "{arguments:?}");
        let dirs = found.files().iter().filter(|file| file.attributes.kind == FileType::Directory);
        assert_eq!(dirs.count(), 5, "{arguments:?}");
        for (path, target) in [("/top/fast", "short".to_owned()), ("/top/slow", "x/".repeat(200))] {
            let link = found.files().iter().find(|file| file.path == path.as_bytes()).unwrap();
            assert_eq!(link.link_target(&found).unwrap(), target.as_bytes(), "{arguments:?}");
        }
        run_tool("e2fsck", &["-fn", image.path()]);

        // Later writes, of which every other one is deleted again.
        for percent in [5, 25] {
            let Some(mount) = image.mount_writable() else { return };
            let mut left = (64 << 20) / 100 * percent;
            for nth in 0.. {
                let len = [3000, 20_000, 200_000][nth % 3].min(left);
                let path = mount.path().join(format!("new-{percent}-{nth}"));
                std::fs::write(&path, tree::random_bytes(nth as u64 + 1000, len)).unwrap();
                if nth % 8 == 7 {
                    std::fs::File::open(&path).unwrap().sync_all().unwrap();
                }
                if nth % 2 == 1 {
                    std::fs::remove_file(&path).unwrap();
                }
                left -= len;
                if left == 0 {
                    break;
                }
            }
            drop(mount);
            let restored = compare(&scan(&image), &files);
            println!("{arguments:?}: {percent} % written: {restored:?} of {}", files.len());
        }
    }
}

/// Deletes a tree that the kernel wrote, mounted with `options`; `then` runs before the last unmount.
fn deleted_by_the_kernel(files: &Files, options: &str, then: impl FnOnce(&Path)) -> Option<Image> {
    let image = Image::make(None, "64M", &["-t", "ext4", "-b", "4096"])?;
    let mount = image.mount_with(options)?;
    write_tree(mount.path(), files);
    drop(mount);
    let mount = image.mount_with(options)?;
    std::fs::remove_dir_all(mount.path().join("top")).unwrap();
    then(mount.path());
    drop(mount);
    Some(image)
}

#[test]
fn contents_from_a_data_journal_are_unsure() {
    let files: Files = planned_files().into_iter().filter(|(_, it)| it.len() < 9000).collect();
    let Some(image) = deleted_by_the_kernel(&files, "loop,data=journal", |_| {}) else { return };
    let restored = compare(&scan(&image), &files);
    assert_eq!(restored.whole, 0, "{restored:?}");
}

#[test]
fn discarded_contents_are_unsure() {
    let files = planned_files();
    let trim = |at: &Path| {
        std::fs::File::open(at).and_then(|dir| dir.sync_all()).unwrap();
        run_tool("fstrim", &[at.to_str().unwrap()]);
    };
    let Some(image) = deleted_by_the_kernel(&files, "loop", trim) else { return };
    let found = scan(&image);
    let restored = compare(&found, &files);
    assert_eq!((found.files().len() > files.len(), restored.right), (true, 0), "{restored:?}");
    let all = found.files().iter().filter(|file| file.attributes.kind == FileType::File);
    assert!(all.into_iter().all(|file| file.state == FileState::Unsure));
}

/// Deletes with this library: the log still has what was written in the same session.
fn deleted_by_us(arguments: &[&str], files: &Files) -> Option<Image> {
    let image = Image::make(None, "24M", arguments)?;
    let fs = FileSystem::open(&image.path).unwrap();
    for (path, bytes) in files {
        fs.create_dir_all(Path::new(path).parent().unwrap()).unwrap();
        fs.write(path, bytes).unwrap();
    }
    fs.sync().unwrap();
    for path in files.keys() {
        fs.remove_file(path).unwrap();
    }
    for dir in ["docs/letters/2026", "docs/letters", "docs", "src", ""] {
        fs.remove_dir(Path::new("/top").join(dir)).unwrap();
    }
    fs.close().unwrap();
    run_tool("e2fsck", &["-fn", image.path()])?;
    Some(image)
}

#[test]
fn files_deleted_by_this_library_come_back() {
    let files: Files = planned_files().into_iter().filter(|(_, it)| it.len() < 100_000).collect();
    for arguments in VOLUMES {
        let Some(image) = deleted_by_us(arguments, &files) else { return };
        let restored = compare(&scan(&image), &files);
        assert_eq!((restored.right, restored.whole), (files.len(), files.len()), "{arguments:?}");
    }
}

#[test]
#[ignore = "long: a minute: many volumes"]
fn dead_slots_of_ext2_have_their_maps() {
    let source = tempfile::tempdir().unwrap();
    let files = planned_files();
    write_tree(source.path(), &files);
    for block in ["1024", "4096"] {
        let arguments = ["-t", "ext2", "-b", block];
        let Some(image) = Image::make(Some(source.path()), "48M", &arguments) else { return };
        draconis_testkit::wait::pause(
            "the clock shows another second",
            Duration::from_millis(1100),
        );
        for path in files.keys() {
            image.debugfs_write(&format!("rm {path}")).unwrap();
        }
        let found = scan(&image);
        let restored = compare(&found, &files);
        assert_eq!((restored.right, restored.whole), (files.len(), files.len()), "{block}");
        assert!(found.files().iter().all(|file| file.deleted.is_some()));
        // Whatever was deleted before something was written is unsure.
        draconis_testkit::wait::pause(
            "the clock shows another second",
            Duration::from_millis(1100),
        );
        let new = source.path().join("new");
        std::fs::write(&new, vec![7; 500_000]).unwrap();
        image.debugfs_write(&format!("write {} new", new.display())).unwrap();
        image.debugfs_write("rm new").unwrap();
        std::fs::remove_file(&new).unwrap();
        let found = scan(&image);
        compare(&found, &files);
        let is_old = |file: &&DeletedFile| file.path.starts_with(b"/top/");
        let old: Vec<&DeletedFile> = found.files().iter().filter(is_old).collect();
        assert!(old.len() + 1 >= files.len(), "{} of {}", old.len(), files.len());
        let whole = old.iter().find(|file| file.state == FileState::Whole);
        assert!(whole.is_none(), "{whole:?}");
    }
}

#[test]
fn orphans_are_whole() {
    let source = tempfile::tempdir().unwrap();
    let bytes = tree::random_bytes(3, 70_000);
    std::fs::write(source.path().join("open"), &bytes).unwrap();
    let Some(image) = Image::make(Some(source.path()), "8M", &["-t", "ext4"]) else { return };
    let at = image.debugfs("stat /open").unwrap();
    let inode: u32 = at.split_whitespace().nth(1).unwrap().parse().unwrap();
    image.debugfs_write("unlink /open").unwrap();
    image.debugfs_write(&format!("set_inode_field <{inode}> links_count 0")).unwrap();
    image.debugfs_write(&format!("set_super_value last_orphan {inode}")).unwrap();
    let found = scan(&image);
    let [file] = found.files() else { panic!("{:?}", found.files()) };
    assert_eq!((file.inode.0, file.state), (inode, FileState::Whole));
    assert!(contents(&found, file) == bytes);
}

#[test]
fn changes_without_the_journal_make_everything_unsure() {
    let files: Files = planned_files().into_iter().filter(|(_, it)| it.len() < 9000).collect();
    let Some(image) = deleted_by_us(VOLUMES[3], &files) else { return };
    assert_eq!(compare(&scan(&image), &files).whole, files.len());
    draconis_testkit::wait::pause("the clock shows two more seconds", Duration::from_millis(2100));
    let dir = tempfile::tempdir().unwrap();
    let new = dir.path().join("new");
    std::fs::write(&new, vec![7; 500_000]).unwrap();
    image.debugfs_write(&format!("write {} new", new.display())).unwrap();
    image.debugfs_write("rm new").unwrap();
    let found = scan(&image);
    assert_eq!(compare(&found, &files).whole, 0);
    let old = found.files().iter().filter(|file| file.path.starts_with(b"/top/"));
    assert!(old.filter(|file| file.attributes.size_bytes > 0).count() >= files.len());
}

/// Reads everything of a hostile image.
fn exercise(what: &str, seed: u64, image: Vec<u8>) -> usize {
    let clock = HangClock::start();
    let disk = Arc::new(MemoryDisk::new(image, 512));
    let limits = Limits { max_files: 5000, max_runs: 50_000, max_names: 50_000 };
    let Ok(found) = DeletedFiles::scan(disk, limits) else { return 0 };
    let mut bytes = vec![0; 1 << 16];
    for file in found.files() {
        let _ = (found.xattrs(file), file.link_target(&found));
        for range in file.data_ranges(found.block_bytes()).into_iter().take(8) {
            let _ = found.read(file, range.start, &mut bytes);
        }
        let _ = found.read(file, u64::MAX - 5, &mut bytes);
    }
    let files = found.files().len();
    if let Ok(view) = found.into_view() {
        let volume = Volume::open(view.disk, OpenOptions::default()).unwrap();
        for inode in walk(&volume).into_iter().take(2000) {
            let _ = (volume.xattr_names(inode), volume.read_link(inode));
            let _ = (volume.read(inode, 0, 1 << 16), volume.read(inode, 1 << 30, 1 << 16));
        }
    }
    clock.assert_not_hung(format_args!("{what}, seed {seed}"));
    files
}

#[test]
fn linux_mounts_the_volume_of_deleted_files() {
    let files = planned_files();
    // Older states of directories inside inodes are not read: their names may be lost.
    for arguments in VOLUMES.iter().filter(|it| !it.contains(&"inline_data")) {
        let Some(image) = Image::make(None, "64M", arguments) else { return };
        let Some(mount) = image.mount_writable() else { return };
        write_tree(mount.path(), &files);
        let stays = mount.path().join("stays");
        let many = |nth: usize| format!("many/a-rather-long-name-{nth}");
        std::fs::create_dir_all(stays.join("many")).unwrap();
        for nth in 0..700 {
            std::fs::write(stays.join(many(nth)), b"few bytes").unwrap();
        }
        let sparse = std::fs::File::create(stays.join("sparse")).unwrap();
        sparse.write_all_at(b"far away", 90_000_000).unwrap();
        sparse.write_all_at(b"near", 5000).unwrap();
        drop(sparse);
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(stays.join(many(7)), "user.mine", b"value", flags).unwrap();
        std::fs::hard_link(stays.join(many(8)), stays.join("linked")).unwrap();
        std::os::unix::fs::symlink("short", stays.join("fast")).unwrap();
        std::os::unix::fs::symlink("x/".repeat(200), stays.join("slow")).unwrap();
        drop(mount);
        let Some(mount) = image.mount_writable() else { return };
        let stays = mount.path().join("stays");
        std::fs::remove_dir_all(mount.path().join("top")).unwrap();
        std::fs::remove_dir_all(stays.join("many")).unwrap();
        for name in ["sparse", "fast", "slow", "linked"] {
            std::fs::remove_file(stays.join(name)).unwrap();
        }
        drop(mount);
        scan(&image);
        let disk = PreadDisk::open(&image.path, 512);
        let view = DeletedFiles::scan(Arc::new(disk), Limits::default()).unwrap();
        let disk = view.into_view().unwrap().disk;
        let mut bytes = vec![0; disk.properties().len_bytes as usize];
        for (nth, part) in bytes.chunks_mut(1 << 20).enumerate() {
            let at = Extent::new((nth as u64) << 20, part.len() as u64);
            disk.read_now(at, Block::private(part.len())).unwrap().copy_out(0, part);
        }
        let dump = Image::from_bytes(&bytes);
        let Some(mount) = dump.mount() else { return };
        let stays = mount.path().join("stays");
        for (path, bytes) in &files {
            assert!(std::fs::read(mount.path().join(&path[1..])).unwrap() == *bytes, "{path}");
        }
        let listed = std::fs::read_dir(stays.join("many"));
        let listed = listed.unwrap_or_else(|error| panic!("{arguments:?}: {error}"));
        assert_eq!(listed.count(), 700);
        for nth in (0..700).step_by(90) {
            assert_eq!(std::fs::read(stays.join(many(nth))).unwrap(), b"few bytes");
        }
        let sparse = std::fs::read(stays.join("sparse")).unwrap();
        assert!(sparse.starts_with(&[0; 5000]) && sparse.ends_with(b"\0far away"));
        assert_eq!(std::fs::read_link(stays.join("fast")).unwrap(), Path::new("short"));
        assert_eq!(std::fs::read_link(stays.join("slow")).unwrap(), Path::new(&"x/".repeat(200)));
        let linked = std::fs::metadata(stays.join("linked")).unwrap();
        let same = std::fs::metadata(stays.join(many(8))).unwrap();
        assert_eq!((linked.ino(), linked.nlink()), (same.ino(), 2), "{arguments:?}");
        let mut value = [0; 8];
        let path = stays.join(many(7));
        let len = rustix::fs::getxattr(path, "user.mine", &mut value[..]).unwrap();
        assert_eq!(&value[..len], b"value");
    }
}

#[test]
fn mutated_images_do_not_panic_or_hang() {
    let files: Files = planned_files().into_iter().filter(|(_, it)| it.len() < 40_000).collect();
    let (mut opened, rounds) = (0, scaled_rounds(300));
    for (kind, arguments) in VOLUMES.iter().enumerate().step_by(2) {
        let Some(image) = deleted_by_us(arguments, &files) else { return };
        let base = std::fs::read(&image.path).unwrap();
        let structures = metadata_ranges(&base);
        let at = image.debugfs("blocks <8>").unwrap();
        let journal: Vec<usize> =
            at.split_whitespace().filter_map(|block| block.parse().ok()).take(400).collect();
        let block_bytes = 1024usize << base[1024 + 0x18];
        for seed in (0..rounds / 4).map(|seed| seed * 8 + kind as u64) {
            let (mut random, mut image) = (Random::new(seed), base.clone());
            for _ in 0..=random.next_below(24) {
                let range = match random.next_below(2) {
                    0 => structures[random.next_below(structures.len() as u64) as usize].clone(),
                    _ => {
                        let nth = random.next_below(journal.len() as u64) as usize;
                        journal[nth] * block_bytes..(journal[nth] + 1) * block_bytes
                    }
                };
                corrupt_field(&mut image, range, &mut random);
            }
            opened += usize::from(exercise("mutated", seed, image) > 0);
        }
    }
    assert!(opened > rounds as usize / 10, "{opened} of {rounds} had files");
}
