//! Guarantees of changes beyond their result: cost of a sync, lifetime of inodes, refusals, and
//! damaged volumes.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::common::{DIRECTORY, FILE, close_and_fsck, fsck_disk, make_disk};
use crate::common::{Image, run_tool};
use draconis_device::{Disk, FileDisk, FileOptions, MemoryDisk};
use draconis_ext::{
    Access, AccessTimes, Error, InodeNumber, NewNode, OpenOptions, RenameMode, Reserve, Volume,
    Whiteout, WriteOptions, XattrSet,
};
use draconis_testkit::{CrashOptions, CrashStates, Event, RecordDisk};
use draconis_types::{AttributeChange, FileType, SetTime, Time};

fn write_options() -> WriteOptions {
    let clock = || Time { seconds: 1_700_000_000, nanoseconds: 5 };
    WriteOptions {
        clock: Arc::new(clock),
        dirty_bytes: 8 << 20,
        atime: AccessTimes::Relative,
        discard: false,
    }
}

fn open_for_writing(disk: &Arc<MemoryDisk>) -> Volume {
    Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap()
}

fn file_disk(path: &Path) -> Arc<FileDisk> {
    let options = FileOptions { write: true, direct: false, uring: false };
    Arc::new(FileDisk::open(path, options).unwrap())
}

/// Offset of `s_state`.
const STATE_AT: usize = 1024 + 0x3A;

#[test]
fn superblock_is_marked_in_use_before_first_change() {
    let Some(image) = Image::make(None, "2M", &[]) else { return };
    let base = std::fs::read(&image.path).unwrap();
    let disk = Arc::new(RecordDisk::new(MemoryDisk::new(base.clone(), 512)));
    let volume =
        Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap();
    volume.lookup(volume.root(), b"lost+found").unwrap();
    volume.sync().unwrap();
    volume.commit().unwrap();
    let written =
        || disk.take_events().into_iter().any(|event| matches!(event, Event::Group { .. }));
    assert!(!written(), "nothing was changed");
    let file = volume.create(volume.root(), b"file", &FILE).unwrap();
    volume.write(file, 0, b"contents").unwrap();
    volume.sync().unwrap();
    let events = disk.take_events();
    let options = CrashOptions { seed: 1, subsets: 4, exhaustive_sectors: 0 };
    let (mut states, mut changed) = (0, 0);
    for crash in CrashStates::new(base.clone(), events, options) {
        let bytes = crash.disk.to_bytes();
        states += 1;
        if bytes[2048..] != base[2048..] {
            changed += 1;
            assert_eq!(bytes[STATE_AT] & 1, 0, "{:?}", crash.kind);
        }
    }
    assert!(states > changed && changed > 5, "{changed} of {states}");
    volume.close().unwrap();
    assert_eq!(volume.create(volume.root(), b"late", &FILE), Err(Error::ReadOnly));
    // Reopened, its first change marks it again.
    volume.reopen().unwrap();
    assert!(written());
    volume.sync().unwrap();
    assert!(!written());
    volume.create(volume.root(), b"late", &FILE).unwrap();
    volume.sync().unwrap();
    assert!(written());
    volume.close().unwrap();
    drop(volume);
    let bytes = Arc::into_inner(disk).unwrap().into_inner().into_bytes();
    assert_eq!(bytes[STATE_AT] & 1, 1);
    run_tool("e2fsck", &["-fn", Image::from_bytes(&bytes).path()]);
}

/// A logger that syncs each line continues a block that it has just written.
#[test]
fn small_appends_do_not_read_their_block_again() {
    for kind in ["ext2", "ext4"] {
        let Some(image) = Image::make(None, "16M", &["-t", kind, "-b", "4096"]) else { return };
        let disk = file_disk(&image.path);
        let volume =
            Volume::open_for_writing(disk, OpenOptions::default(), write_options()).unwrap();
        let file = volume.create(volume.root(), b"log", &FILE).unwrap();
        let line = |nth: u64| vec![nth as u8; 100];
        let append = |nth: u64| {
            assert_eq!(volume.write(file, nth * 100, &line(nth)), Ok(100));
            volume.sync_inode(file, false).unwrap();
        };
        (0..2).for_each(append);
        let reads = || volume.statistics().device.reads;
        let before = reads();
        (2..40).for_each(append);
        assert!(reads() - before <= 1, "{kind}: {} reads", reads() - before);
        let mut all = vec![0; 4000];
        assert_eq!(volume.read_into(file, 0, &mut all), Ok(4000));
        assert!(all == (0..40).flat_map(line).collect::<Vec<_>>(), "{kind}");
        volume.close().unwrap();
        drop(volume);
        run_tool("e2fsck", &["-fn", image.path()]);
    }
}

#[test]
fn fsync_costs_one_or_two_flushes() {
    let Some(image) = Image::make(None, "16M", &["-b", "4096"]) else { return };
    let disk = file_disk(&image.path);
    let volume =
        Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap();
    let cost = |what: &dyn Fn()| {
        let before = disk.flush_count();
        what();
        disk.flush_count() - before
    };
    let file = volume.create(volume.root(), b"file", &FILE).unwrap();
    volume.sync().unwrap();
    let write = |offset: u64, len: usize| {
        assert_eq!(volume.write(file, offset, &vec![b'x'; len]), Ok(len));
        volume.sync_inode(file, true).unwrap();
    };
    assert_eq!(cost(&|| write(0, 100)), 2, "a first block");
    assert_eq!(cost(&|| write(100, 100)), 1, "an append inside its block");
    assert_eq!(cost(&|| write(50, 100)), 1, "an overwrite");
    assert_eq!(cost(&|| write(200, 8000)), 2, "an append with a new block");
    assert_eq!(cost(&|| volume.sync_inode(file, true).unwrap()), 0, "nothing changed");
    let create = || {
        let new = volume.create(volume.root(), b"new", &FILE).unwrap();
        volume.write(new, 0, b"contents").unwrap();
        volume.sync_inode(new, false).unwrap();
    };
    assert_eq!(cost(&create), 2, "a new file");
    // Callers that arrive during a flush share the next one.
    std::thread::scope(|scope| {
        let all = cost(&|| {
            for nth in 0..8u64 {
                let volume = &volume;
                scope.spawn(move || {
                    volume.write(file, nth * 10, b"shared").unwrap();
                    volume.sync_inode(file, true).unwrap();
                });
            }
        });
        assert!(all <= 8);
    });
    volume.close().unwrap();
    drop(volume);
    drop(disk);
    run_tool("e2fsck", &["-fn", image.path()]);
}

#[test]
fn open_unlinked_files_stay_readable() {
    let Some(disk) = make_disk("8M", &["-b", "1024"]) else { return };
    let volume = open_for_writing(&disk);
    let free = volume.space();
    let file = volume.create(volume.root(), b"file", &FILE).unwrap();
    let dir = volume.create(volume.root(), b"dir", &DIRECTORY).unwrap();
    volume.add_user(file);
    volume.add_user(file);
    volume.add_user(dir);
    volume.write(file, 0, &[b'x'; 5000]).unwrap();
    volume.sync().unwrap();
    volume.unlink(volume.root(), b"file").unwrap();
    volume.remove_directory(volume.root(), b"dir").unwrap();
    volume.sync().unwrap();
    assert_eq!(volume.attributes(file).unwrap().links, 0);
    assert_eq!(volume.attributes(dir).unwrap().links, 0);
    volume.write(file, 5000, &[b'y'; 5000]).unwrap();
    let mut bytes = [0; 10_001];
    assert_eq!(volume.read_into(file, 0, &mut bytes), Ok(10_000));
    assert_eq!(&bytes[4999..5001], b"xy");
    assert_eq!(volume.create(dir, b"in it", &FILE), Err(Error::NotFound));
    assert_eq!(volume.link(file, volume.root(), b"again"), Err(Error::NotFound));
    volume.remove_users(file, 1);
    volume.attributes(file).unwrap();
    volume.remove_users(file, 1);
    volume.remove_users(dir, 1);
    assert_eq!(volume.attributes(file), Err(Error::NotFound));
    assert_eq!(volume.space(), free);
    // An orphan in use when the volume is closed.
    let last = volume.create(volume.root(), b"last", &FILE).unwrap();
    volume.add_user(last);
    volume.write(last, 0, &[b'x'; 5000]).unwrap();
    volume.unlink(volume.root(), b"last").unwrap();
    volume.close().unwrap();
    assert_eq!(volume.space(), free);
    assert_eq!(volume.create(volume.root(), b"late", &FILE), Err(Error::ReadOnly));
    drop(volume);
    fsck_disk(disk);
}

#[test]
fn open_unlinked_files_are_freed_at_next_mount() {
    let Some(disk) = make_disk("8M", &["-b", "1024"]) else { return };
    let volume = open_for_writing(&disk);
    let free = volume.space();
    let file = volume.create(volume.root(), b"file", &FILE).unwrap();
    volume.add_user(file);
    volume.write(file, 0, &[b'x'; 50_000]).unwrap();
    volume.sync().unwrap();
    volume.unlink(volume.root(), b"file").unwrap();
    volume.sync().unwrap();
    drop(volume);
    let volume = open_for_writing(&disk);
    assert_eq!(volume.space(), free);
    close_and_fsck(volume, disk);
}

#[test]
fn orphans_of_other_drivers_are_freed() {
    let Some(disk) = make_disk("8M", &["-b", "1024"]) else { return };
    let volume = open_for_writing(&disk);
    let free = volume.space();
    let file = volume.create(volume.root(), b"file", &FILE).unwrap();
    volume.write(file, 0, &[b'x'; 50_000]).unwrap();
    volume.close().unwrap();
    drop(volume);
    let image = Image::from_bytes(&Arc::try_unwrap(disk).unwrap().into_bytes());
    let inode = format!("<{}>", file.0);
    for command in [
        "unlink file".to_owned(),
        format!("sif {inode} links_count 0"),
        format!("ssv last_orphan {}", file.0),
    ] {
        if image.debugfs_write(&command).is_none() {
            return;
        }
    }
    let disk = image.memory_disk();
    let volume = open_for_writing(&disk);
    assert_eq!(volume.space(), free);
    close_and_fsck(volume, disk);
}

#[test]
fn operations_over_limits_are_refused_without_changes() {
    let Some(disk) = make_disk("8M", &["-b", "1024"]) else { return };
    let volume = open_for_writing(&disk);
    let root = volume.root();
    let file = volume.create(root, b"file", &FILE).unwrap();
    let dir = volume.create(root, b"dir", &DIRECTORY).unwrap();
    assert_eq!(volume.create(root, &[b'x'; 256], &FILE), Err(Error::NameTooLong));
    assert_eq!(volume.create(file, b"x", &FILE), Err(Error::NotADirectory));
    assert!(matches!(volume.create(root, b"a/b", &FILE), Err(Error::Misuse(_))));
    assert_eq!(volume.create(root, b"..", &FILE), Err(Error::Exists));
    assert_eq!(volume.link(dir, root, b"x"), Err(Error::NotPermitted));
    assert_eq!(volume.write(dir, 0, b"x"), Err(Error::IsADirectory));
    let most = volume.max_file_bytes();
    assert_eq!(volume.write(file, most, b"x"), Err(Error::TooLarge));
    assert_eq!(volume.write(file, most - 1, b"xy"), Ok(1));
    let change = AttributeChange { size_bytes: Some(most + 1), ..AttributeChange::default() };
    assert_eq!(volume.set_attributes(file, &change), Err(Error::TooLarge));
    assert_eq!(volume.fallocate(file, most, 1, Reserve::Allocate), Err(Error::TooLarge));
    let names = 31_998;
    let before = volume.attributes(dir).unwrap();
    for nth in 0..3 {
        volume.link(file, root, format!("link {nth}").as_bytes()).unwrap();
    }
    assert_eq!(volume.attributes(file).unwrap().links, 4);
    for nth in 0..names {
        if volume.create(dir, format!("{nth}").as_bytes(), &DIRECTORY) == Err(Error::NoSpace) {
            break;
        }
    }
    assert!(volume.attributes(dir).unwrap().links > before.links);
    close_and_fsck(volume, disk);
}

#[test]
fn immutable_and_append_flags_are_enforced() {
    let Some(disk) = make_disk("8M", &["-b", "1024"]) else { return };
    let volume = open_for_writing(&disk);
    let root = volume.root();
    let file = volume.create(root, b"file", &FILE).unwrap();
    volume.write(file, 0, b"contents").unwrap();
    const IMMUTABLE: u32 = 0x10;
    const APPEND: u32 = 0x20;
    volume.set_flags(file, IMMUTABLE).unwrap();
    assert_eq!(volume.attributes(file).unwrap().flags & IMMUTABLE, IMMUTABLE);
    assert_eq!(volume.write(file, 0, b"x"), Err(Error::NotPermitted));
    assert_eq!(volume.unlink(root, b"file"), Err(Error::NotPermitted));
    let to = (root, &b"other"[..]);
    let moved = volume.rename(root, b"file", to.0, to.1, RenameMode::Replace);
    assert_eq!(moved, Err(Error::NotPermitted));
    let mode = AttributeChange { mode: Some(0o600), ..AttributeChange::default() };
    assert_eq!(volume.set_attributes(file, &mode), Err(Error::NotPermitted));
    let set = volume.set_xattr(file, b"user.x", b"", XattrSet::Any, false);
    assert_eq!(set, Err(Error::NotPermitted));
    volume.set_flags(file, APPEND).unwrap();
    assert_eq!(volume.write(file, 8, b" and more"), Ok(9));
    assert_eq!(volume.write(file, 3, b"x"), Err(Error::NotPermitted));
    let cut = AttributeChange { size_bytes: Some(3), ..AttributeChange::default() };
    assert_eq!(volume.set_attributes(file, &cut), Err(Error::NotPermitted));
    volume.set_flags(file, 0).unwrap();
    assert!(matches!(volume.set_flags(file, 0x8_0000), Err(Error::Unsupported { .. })));
    volume.unlink(root, b"file").unwrap();
    close_and_fsck(volume, disk);
}

#[test]
fn rename_does_not_replace_in_an_append_only_directory() {
    let Some(disk) = make_disk("8M", &["-b", "1024"]) else { return };
    let volume = open_for_writing(&disk);
    let root = volume.root();
    let dir = volume.create(root, b"dir", &DIRECTORY).unwrap();
    for (parent, name) in [(root, &b"one"[..]), (root, b"two"), (dir, b"there")] {
        volume.create(parent, name, &FILE).unwrap();
    }
    volume.set_flags(dir, 0x20).unwrap();
    let rename = |to: &[u8], how| volume.rename(root, b"one", dir, to, how);
    for how in [RenameMode::Replace, RenameMode::Exchange] {
        assert_eq!(rename(b"there", how), Err(Error::NotPermitted));
    }
    assert_eq!(rename(b"there", RenameMode::NoReplace), Err(Error::Exists));
    // A new name may come in.
    assert_eq!(rename(b"new", RenameMode::Replace), Ok(()));
    volume.set_flags(dir, 0).unwrap();
    volume.rename(root, b"two", dir, b"there", RenameMode::Replace).unwrap();
    close_and_fsck(volume, disk);
}

#[test]
fn setgid_group_and_large_timestamps_are_kept() {
    let Some(disk) = make_disk("8M", &["-b", "1024", "-I", "256"]) else { return };
    let volume = open_for_writing(&disk);
    let shared = NewNode { mode: 0o2775, gid: 7, ..DIRECTORY };
    let dir = volume.create(volume.root(), b"shared", &shared).unwrap();
    let file = volume.create(dir, b"file", &FILE).unwrap();
    let below = volume.create(dir, b"below", &DIRECTORY).unwrap();
    assert_eq!(volume.attributes(file).unwrap().gid, 7);
    let shown = volume.attributes(below).unwrap();
    assert_eq!((shown.gid, shown.mode), (7, 0o42755));
    let time = Time { seconds: 5_000_000_000, nanoseconds: 999_999_999 };
    let change = AttributeChange {
        accessed: Some(SetTime::To(time)),
        modified: Some(SetTime::To(time)),
        ..AttributeChange::default()
    };
    let shown = volume.set_attributes(file, &change).unwrap();
    assert_eq!((shown.accessed, shown.modified), (time, time));
    let image = close_and_fsck(volume, disk);
    let disk: Arc<dyn Disk> = image.memory_disk();
    let volume = Volume::open(disk, OpenOptions::default()).unwrap();
    assert_eq!(volume.attributes(file).unwrap().modified, time);
}

#[test]
fn a_full_volume_reuses_freed_space() {
    let Some(disk) = make_disk("2M", &["-b", "1024", "-m", "0"]) else { return };
    let volume = open_for_writing(&disk);
    let file = volume.create(volume.root(), b"file", &FILE).unwrap();
    for round in 0..5 {
        let mut at = 0;
        let bytes = vec![round; 64 << 10];
        while let Ok(taken) = volume.write(file, at, &bytes) {
            at += taken as u64;
        }
        assert_eq!(volume.space().free_blocks, 0, "round {round}");
        assert!(at > 1 << 20);
        assert_eq!(volume.create(volume.root(), b"one more", &DIRECTORY), Err(Error::NoSpace));
        let empty = AttributeChange { size_bytes: Some(0), ..AttributeChange::default() };
        volume.set_attributes(file, &empty).unwrap();
    }
    close_and_fsck(volume, disk);
}

#[test]
fn reserved_blocks_are_only_for_superuser() {
    let Some(disk) = make_disk("2M", &["-b", "1024", "-m", "10"]) else { return };
    let volume = open_for_writing(&disk);
    let theirs = volume.create(volume.root(), b"theirs", &NewNode { uid: 1000, ..FILE }).unwrap();
    let ours = volume.create(volume.root(), b"ours", &FILE).unwrap();
    let fill = |file: InodeNumber| {
        let mut at = 0;
        while let Ok(taken) = volume.write(file, at, &[b'x'; 4096]) {
            at += taken as u64;
        }
    };
    fill(theirs);
    let space = volume.space();
    assert_eq!(space.available_blocks, 0);
    assert!(space.free_blocks > 100);
    fill(ours);
    assert_eq!(volume.space().free_blocks, 0);
    close_and_fsck(volume, disk);
}

#[test]
fn deep_trees_are_created_and_deleted_in_bounded_chains() {
    let Some(disk) = make_disk("8M", &["-b", "1024"]) else { return };
    let disk = Arc::into_inner(disk).unwrap();
    let record = Arc::new(RecordDisk::new(disk));
    let volume =
        Volume::open_for_writing(record.clone(), OpenOptions::default(), write_options()).unwrap();
    let mut way = vec![volume.root()];
    for _ in 0..200 {
        let dir = volume.create(*way.last().unwrap(), b"down", &DIRECTORY).unwrap();
        volume.create(dir, b"file", &FILE).unwrap();
        way.push(dir);
    }
    // New directories, moved into each other.
    for nth in 0..80 {
        let name = format!("n{nth}");
        volume.create(volume.root(), name.as_bytes(), &DIRECTORY).unwrap();
    }
    for nth in (1..80).rev() {
        let (from, to) = (format!("n{nth}"), format!("n{}", nth - 1));
        let to = volume.lookup(volume.root(), to.as_bytes()).unwrap();
        volume.rename(volume.root(), from.as_bytes(), to, b"in", RenameMode::Replace).unwrap();
    }
    volume.sync().unwrap();
    while let Some(dir) = way.pop() {
        if let Some(above) = way.last() {
            volume.unlink(dir, b"file").unwrap();
            volume.remove_directory(*above, b"down").unwrap();
        }
    }
    volume.close().unwrap();
    drop(volume);
    let events = record.take_events();
    let mut lengths = std::collections::HashMap::new();
    for event in events {
        if let Event::Group { chain, .. } = event {
            *lengths.entry(chain).or_insert(0) += 1;
        }
    }
    assert!(lengths.values().all(|length| *length < 80), "{lengths:?}");
    fsck_disk(Arc::new(Arc::into_inner(record).unwrap().into_inner()));
}

#[test]
fn tmpfile_lives_until_last_close() {
    let Some(disk) = make_disk("4M", &["-b", "1024"]) else { return };
    let volume = open_for_writing(&disk);
    let before = volume.space();
    let unnamed = |volume: &Volume| {
        let file = volume.create_tmpfile(volume.root(), &FILE).unwrap();
        volume.add_user(file);
        assert_eq!(volume.write(file, 0, &[7; 30_000]), Ok(30_000));
        file
    };
    // It is deleted with its last user, committed or not.
    for commit in [false, true] {
        let file = unnamed(&volume);
        if commit {
            volume.sync().unwrap();
        }
        assert_eq!(volume.attributes(file).unwrap().links, 0);
        volume.remove_users(file, 1);
        assert_eq!(volume.attributes(file).map(drop), Err(Error::NotFound));
        volume.sync().unwrap();
        assert_eq!(volume.space(), before);
    }
    // It can get one name; an inode that lost its last name cannot.
    for commit in [false, true] {
        let file = unnamed(&volume);
        if commit {
            volume.sync().unwrap();
        }
        let name = format!("named {commit}");
        volume.link(file, volume.root(), name.as_bytes()).unwrap();
        volume.remove_users(file, 1);
        assert_eq!(volume.attributes(file).unwrap().links, 1);
    }
    let gone = volume.create(volume.root(), b"gone", &FILE).unwrap();
    volume.add_user(gone);
    volume.unlink(volume.root(), b"gone").unwrap();
    assert_eq!(volume.link(gone, volume.root(), b"again"), Err(Error::NotFound));
    // An orphan in use is deleted at close.
    unnamed(&volume);
    let image = close_and_fsck(volume, disk);
    let Some(listed) = run_tool("debugfs", &["-R", "ls -l /", image.path()]) else { return };
    assert!(listed.contains("named true") && listed.contains("named false"), "{listed}");
    assert!(!listed.contains("again"), "{listed}");
}

#[test]
fn rename_with_whiteout_leaves_whiteout() {
    let Some(disk) = make_disk("4M", &["-b", "1024"]) else { return };
    let volume = open_for_writing(&disk);
    let root = volume.root();
    let dir = volume.create(root, b"dir", &DIRECTORY).unwrap();
    let owner = Whiteout { uid: 7, gid: 8 };
    for (nth, commit) in [(0, false), (1, true)] {
        // To another directory; over a file in the same directory, and in another.
        for (from, to_dir, over) in [("a", dir, false), ("b", root, true), ("c", dir, true)] {
            let (from, to) = (format!("{from}{nth}"), format!("to {from}{nth}"));
            let file = volume.create(root, from.as_bytes(), &FILE).unwrap();
            if over {
                volume.create(to_dir, to.as_bytes(), &FILE).unwrap();
            }
            if commit {
                volume.sync().unwrap();
            }
            let (from, to) = (from.as_bytes(), to.as_bytes());
            volume
                .rename_with_whiteout(root, from, to_dir, to, RenameMode::Replace, owner)
                .unwrap();
            assert_eq!(volume.lookup(to_dir, to), Ok(file));
            let left = volume.attributes(volume.lookup(root, from).unwrap()).unwrap();
            assert_eq!((left.kind, left.device), (FileType::CharDevice, (0, 0)));
            assert_eq!((left.uid, left.gid, left.mode & 0o7777, left.links), (7, 8, 0, 1));
        }
    }
    let whiteout =
        volume.rename_with_whiteout(root, b"a0", root, b"dir", RenameMode::Exchange, owner);
    assert!(matches!(whiteout, Err(Error::Misuse(_))), "{whiteout:?}");
    close_and_fsck(volume, disk);
}

#[test]
fn open_checks_immutable_and_append_flags() {
    let Some(disk) = make_disk("4M", &["-b", "1024"]) else { return };
    let volume = open_for_writing(&disk);
    let file = volume.create(volume.root(), b"file", &FILE).unwrap();
    let (read, write, append) = (true, true, true);
    let ways = [
        Access { read, write: false, append: false },
        Access { read, write, append: false },
        Access { read, write, append },
    ];
    const IMMUTABLE: u32 = 0x10;
    const APPEND: u32 = 0x20;
    for (flags, allowed) in [(0, [1, 1, 1]), (IMMUTABLE, [1, 0, 0]), (APPEND, [1, 0, 1])] {
        volume.set_flags(file, flags).unwrap();
        let found = ways.map(|access| u8::from(volume.check_open(file, access).is_ok()));
        assert_eq!(found, allowed, "{flags:#x}");
    }
    // An immutable file keeps its other flags; an unknown flag is refused.
    volume.set_flags(file, IMMUTABLE).unwrap();
    assert_eq!(volume.set_flags(file, IMMUTABLE | 0x40), Err(Error::NotPermitted));
    volume.set_flags(file, 0).unwrap();
    assert!(matches!(volume.set_flags(file, 0x0800_0000), Err(Error::Unsupported { .. })));
    close_and_fsck(volume, disk);
}

#[test]
fn first_change_after_commit_calls_callback() {
    let Some(disk) = make_disk("4M", &["-b", "1024"]) else { return };
    let volume = open_for_writing(&disk);
    let told = Arc::new(AtomicU32::new(0));
    let count = told.clone();
    volume.on_first_change(move || {
        count.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(volume.uncommitted_changes(), None);
    for nth in 1..4 {
        let file = volume.create(volume.root(), format!("{nth}").as_bytes(), &FILE).unwrap();
        let one = volume.uncommitted_changes().unwrap();
        volume.write(file, 0, b"more").unwrap();
        assert!(volume.uncommitted_changes().unwrap() > one);
        assert_eq!(told.load(Ordering::Relaxed), nth);
        volume.sync().unwrap();
        assert_eq!(volume.uncommitted_changes(), None);
    }
    close_and_fsck(volume, disk);
}

#[test]
fn orphan_that_damage_keeps_keeps_nothing_else_from_disk() {
    for kind in ["ext2", "ext3"] {
        let Some(disk) = make_disk("16M", &["-t", kind, "-b", "1024"]) else { return };
        let volume = open_for_writing(&disk);
        let [broken, whole] = [&b"broken"[..], b"whole"].map(|name| {
            let file = volume.create(volume.root(), name, &FILE).unwrap();
            volume.write(file, 0, &[b'x'; 20_000]).unwrap();
            file
        });
        volume.close().unwrap();
        drop(volume);
        let image = Image::from_bytes(&Arc::try_unwrap(disk).unwrap().into_bytes());
        let Some(_) = image.debugfs_write(&format!("sif <{}> block[IND] 16000000", broken.0))
        else {
            return;
        };
        let disk = image.memory_disk();
        let volume = open_for_writing(&disk);
        for (file, name) in [(broken, &b"broken"[..]), (whole, b"whole")] {
            volume.add_user(file);
            volume.unlink(volume.root(), name).unwrap();
        }
        let other = volume.create(volume.root(), b"other", &FILE).unwrap();
        volume.write(other, 0, b"contents").unwrap();
        let refused = volume.close().unwrap_err();
        assert!(matches!(refused, Error::Corrupt { .. }), "{refused:?}");
        assert_eq!(volume.create(volume.root(), b"late", &FILE), Err(Error::ReadOnly));
        drop(volume);
        let image = Image::from_bytes(&Arc::try_unwrap(disk).unwrap().into_bytes());
        // Replays the journal, too.
        run_tool("e2fsck", &["-fy", image.path()]);
        run_tool("e2fsck", &["-fn", image.path()]).unwrap();
        assert_eq!(image.debugfs("cat other").as_deref(), Some("contents"), "{kind}");
    }
}

/// Data written ahead is left to another thread, and there is an end of waiting for it.
#[test]
fn data_written_ahead_is_sent_by_another_thread() {
    let Some(disk) = make_disk("8M", &["-b", "1024"]) else { return };
    let volume = open_for_writing(&disk);
    let calls = Arc::new(AtomicU32::new(0));
    let counter = calls.clone();
    volume.on_queued_contents(move || {
        counter.fetch_add(1, Ordering::Relaxed);
    });
    let file = volume.create(volume.root(), b"file", &FILE).unwrap();
    for nth in 0..4 {
        volume.write(file, nth << 19, &vec![1; 1 << 19]).unwrap();
    }
    assert!(calls.load(Ordering::Relaxed) > 0);
    volume.send_queued().unwrap();
    let visible = (0..10).map(|_| volume.wait_oldest_visible().unwrap());
    assert!(visible.into_iter().any(|was_waiting| !was_waiting));
    close_and_fsck(volume, disk);
}
