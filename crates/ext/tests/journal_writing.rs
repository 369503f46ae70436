//! Writing through journals with power loss at any moment: after recovery the volume is valid, and
//! synced changes are present.

mod common;

use std::fs;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use common::compare::{self, Beside};
use common::spoil::{rounds, small_tree};
use common::storm::{Storm, writing};
use common::{Image, run};
use draconis_device::{
    CrashDisk, CrashOptions, CrashStates, Disk, Event, MemoryDisk, Random, RecordDisk,
};
use draconis_exchange::contract::{AttributeChange, FileType};
use draconis_ext::format::jbd2::RawJournalSuperblock;
use draconis_ext::{Error, InodeNumber, NewNode, OpenOptions, RenameMode, Reserve, Volume, check};

/// One state of so many is checked with `e2fsck`.
const SAMPLE: u64 = 60;

const FILE: NewNode<'_> =
    NewNode { kind: FileType::File, mode: 0o644, uid: 0, gid: 0, device: (0, 0), target: b"" };

/// Compatible and incompatible features of journals.
const KINDS: [(u32, u32); 5] = [(0, 0), (1, 0), (0, 8), (0, 0x10), (0, 0x12)];

/// Small volumes with journals of every kind; the last one is ext4.
fn bases() -> &'static [Vec<u8>] {
    static BASES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    BASES.get_or_init(|| {
        let source = tempfile::tempdir().unwrap();
        small_tree(source.path());
        let make = |kind| {
            let arguments = ["-t", kind, "-b", "1024", "-I", "256", "-J", "size=1"];
            let image = Image::make(Some(source.path()), "2600k", &arguments)?;
            run("e2fsck", &["-fyD", image.path()])?;
            Some(image)
        };
        let (Some(ext3), Some(ext4)) = (make("ext3"), make("ext4")) else { return vec![] };
        let place: usize = ext3.debugfs("bmap <8> 0").unwrap().trim().parse().unwrap();
        let of_kind = |(compatible, incompatible)| {
            let mut bytes = fs::read(&ext3.path).unwrap();
            let raw = RawJournalSuperblock::view_mut(&mut bytes[place * 1024..]).unwrap();
            raw.s_feature_compat.set(compatible);
            raw.s_feature_incompat.set(incompatible);
            raw.s_checksum_type = 4;
            raw.set_tail(None, 1);
            bytes
        };
        KINDS.into_iter().map(of_kind).chain([fs::read(&ext4.path).unwrap()]).collect()
    })
}

fn recorded(base: &[u8]) -> Arc<RecordDisk<MemoryDisk>> {
    Arc::new(RecordDisk::new(MemoryDisk::new(base.to_vec(), 512)))
}

/// Checks a state with our checker, and a sample with `e2fsck` after recovery by us and by itself.
fn is_whole(left: &Arc<CrashDisk>, sampled: bool, what: &str) {
    let disk: Arc<dyn Disk> = left.clone();
    match check::check(&disk, check::CheckOptions::default(), &|_, _| {}) {
        Ok(report) => assert!(report.problems.is_empty(), "{what}: {:?}", report.problems),
        // States that our checker does not support are left to the others.
        Err(Error::Unsupported { .. }) => {}
        Err(error) => panic!("{what}: {error}"),
    }
    if sampled {
        let image = Image::of(&left.to_bytes());
        let checked = Command::new("e2fsck").args(["-fp", image.path()]).output().unwrap();
        let said = String::from_utf8_lossy(&checked.stdout);
        assert!(matches!(checked.status.code(), Some(0 | 1)), "{what}: {said}");
        Volume::open_for_writing(disk, OpenOptions::default(), writing()).unwrap().close().unwrap();
        run("e2fsck", &["-fn", Image::of(&left.to_bytes()).path()]).unwrap();
    }
}

fn cuts(base: &[u8], events: Vec<Event>, seed: u64) -> CrashStates {
    let options = CrashOptions { seed, subsets: 6, exhaustive_sectors: 3 };
    CrashStates::new(base.to_vec(), events, options)
}

#[test]
fn storms_that_are_cut_off_leave_whole_volumes() {
    let mut states = 0;
    for seed in 0..rounds(20) {
        let Some(base) = bases().get(seed as usize % KINDS.len()) else { return };
        states += storm(base, seed, SAMPLE);
    }
    assert!(states > 1000, "{states}");
}

#[test]
fn storms_on_ext4_that_are_cut_off_leave_whole_volumes() {
    let Some(base) = bases().last() else { return };
    let states: u64 = (0..rounds(6)).map(|seed| storm(base, seed, 10)).sum();
    assert!(states > 300, "{states}");
}

#[test]
fn storms_with_quotas_or_clusters_that_are_cut_off_leave_whole_volumes() {
    let plain = ["-t", "ext4", "-b", "1024", "-N", "256", "-J", "size=1"];
    let features: [&[&str]; 2] = [&["-O", "quota"], &["-O", "bigalloc", "-C", "4096"]];
    for (seed, features) in (50..).zip(features) {
        let Some(image) = Image::make(None, "4M", &[&plain, features].concat()) else { return };
        let base = fs::read(&image.path).unwrap();
        let seeds = (0..rounds(3)).map(|nth| seed + nth * 10);
        let states: u64 = seeds.map(|seed| storm(&base, seed, 10)).sum();
        assert!(states > 100, "{states}");
    }
}

/// Makes random changes with power loss at any moment; returns the number of states.
fn storm(base: &[u8], seed: u64, sample: u64) -> u64 {
    let mut random = Random::new(seed ^ 0x10C);
    let disk = recorded(base);
    let mut storm = Storm::new(disk.clone(), OpenOptions::default()).unwrap();
    for _ in 0..60 {
        storm.step(&mut |limit| random.below(limit));
    }
    storm.end();
    assert!(!storm.outcome.stopped, "seed {seed}: {:?}", storm.volume.failure());
    let mut states = 0;
    for crash in cuts(base, disk.take(), seed) {
        states += 1;
        let what = format!("seed {seed}, {:?}", crash.kind);
        is_whole(&crash.disk, random.below(sample) == 0, &what);
    }
    states
}

/// Returns the contents of a file after its `nth` change.
fn contents(nth: u64) -> Vec<u8> {
    common::tree::pattern(nth, 100 + (nth as usize * 997) % 9000)
}

#[test]
fn what_was_synced_is_there() {
    for (kind, base) in bases().iter().enumerate() {
        let disk = recorded(base);
        let volume =
            Volume::open_for_writing(disk.clone(), OpenOptions::default(), writing()).unwrap();
        let root = volume.root();
        // Each step creates a file named after the step, and removes an old one.
        for step in 1..=60u64 {
            let name = format!("step{step}");
            let file = volume.create(root, b"new", &FILE).unwrap();
            volume.write(file, 0, &contents(step)).unwrap();
            volume.rename(root, b"new", root, name.as_bytes(), RenameMode::Replace).unwrap();
            if step > 5 {
                volume.unlink(root, format!("step{}", step - 5).as_bytes()).unwrap();
            }
            if step % 3 == 0 {
                volume.sync_inode(file, step % 2 == 0).unwrap();
                disk.mark(step);
            }
        }
        volume.close().unwrap();
        drop(volume);
        let mut random = Random::new(5);
        for crash in cuts(base, disk.take(), kind as u64) {
            let what = format!("kind {kind}, {:?}, {:?}", crash.kind, crash.marks().last());
            is_whole(&crash.disk, random.below(SAMPLE * 4) == 0, &what);
            let Some(synced) = crash.marks().last() else { continue };
            let volume = Volume::open(crash.disk.clone(), OpenOptions::default()).unwrap();
            let newest = (1..=60).rev().find(|step| {
                volume.lookup(volume.root(), format!("step{step}").as_bytes()).is_ok()
            });
            let newest = newest.unwrap();
            assert!(newest >= *synced, "{what}: {newest}");
            // A step is complete or absent.
            for step in newest.saturating_sub(4).max(1)..=newest {
                let name = format!("step{step}");
                let file = volume.lookup(volume.root(), name.as_bytes());
                let file = file.unwrap_or_else(|error| panic!("{what}: {name}: {error}"));
                let mut bytes = vec![0; 10_000];
                let len = volume.read_into(file, 0, &mut bytes).unwrap();
                assert!(bytes[..len] == contents(step), "{what}: {name}");
            }
        }
    }
}

/// Number of files kept.
const KEPT: u64 = 4;

/// Directory blocks become data blocks and vice versa, over several rounds of the log.
fn wear(volume: &Volume, rounds: std::ops::Range<u64>, synced: &dyn Fn(u64)) {
    let root = volume.root();
    for round in rounds {
        let dir = volume
            .create(root, b"dir", &NewNode { kind: FileType::Directory, mode: 0o755, ..FILE })
            .unwrap();
        for nth in 0..30 {
            let name = format!("{nth:0100}");
            volume.create(dir, name.as_bytes(), &FILE).unwrap();
        }
        volume.sync().unwrap();
        for nth in 0..30 {
            volume.unlink(dir, format!("{nth:0100}").as_bytes()).unwrap();
        }
        volume.remove_directory(root, b"dir").unwrap();
        volume.sync().unwrap();
        let file = volume.create(root, format!("file{round}").as_bytes(), &FILE).unwrap();
        volume.write(file, 0, &common::tree::pattern(round, 60_000)).unwrap();
        volume.sync_inode(file, false).unwrap();
        synced(round);
        if round >= KEPT {
            volume.unlink(root, format!("file{}", round - KEPT).as_bytes()).unwrap();
        }
    }
}

/// Commits like an idle mount.
fn is_left_alone(volume: &Volume) {
    volume.commit().unwrap();
    volume.commit().unwrap();
}

#[test]
fn reused_blocks_are_not_overwritten_by_replay() {
    for (kind, base) in bases().iter().enumerate() {
        let disk = recorded(base);
        let volume =
            Volume::open_for_writing(disk.clone(), OpenOptions::default(), writing()).unwrap();
        wear(&volume, 0..25, &|round| {
            disk.mark(round);
            if [6, 7, 15].contains(&round) {
                is_left_alone(&volume);
            }
        });
        volume.close().unwrap();
        drop(volume);
        let mut random = Random::new(5);
        for crash in cuts(base, disk.take(), kind as u64) {
            let what = format!("kind {kind}, {:?}, {:?}", crash.kind, crash.marks().last());
            if random.below(8) == 0 {
                is_whole(&crash.disk, random.below(SAMPLE) == 0, &what);
            }
            let volume = Volume::open(crash.disk.clone(), OpenOptions::default()).unwrap();
            let Some(last) = crash.marks().last() else { continue };
            // The next round may have begun to remove one.
            for round in last.saturating_sub(KEPT - 2)..=*last {
                let name = format!("file{round}");
                let file = volume.lookup(volume.root(), name.as_bytes());
                let file = file.unwrap_or_else(|error| panic!("{what}: {name}: {error}"));
                let mut bytes = vec![0; 60_000];
                assert_eq!(volume.read_into(file, 0, &mut bytes).unwrap(), bytes.len());
                assert!(bytes == common::tree::pattern(round, 60_000), "{what}: {name}");
            }
        }
    }
}

#[test]
fn all_recoveries_give_the_same_result() {
    for (kind, base) in bases().iter().enumerate() {
        let disk = recorded(base);
        let volume =
            Volume::open_for_writing(disk.clone(), OpenOptions::default(), writing()).unwrap();
        wear(&volume, 0..40, &|_| {});
        let events = disk.take();
        let options = CrashOptions { seed: 1, subsets: 0, exhaustive_sectors: 0 };
        let all: Vec<_> = CrashStates::new(base.clone(), events, options).collect();
        let last = all.last().unwrap();
        let bytes = last.disk.to_bytes();
        is_whole(&last.disk, false, "the last");

        let image = Image::of(&bytes);
        let seen = image.open();
        let by_e2fsck = Image::of(&bytes);
        run("e2fsck", &["-fp", by_e2fsck.path()]).unwrap();
        run("e2fsck", &["-fn", by_e2fsck.path()]).unwrap();
        let Some(mount) = by_e2fsck.mount() else { return };
        assert!(compare::tree(&seen, InodeNumber::ROOT, mount.path(), Beside::Mount) > 10);
        drop(mount);
        let by_kernel = Image::of(&bytes);
        drop(by_kernel.mount_writable());
        run("e2fsck", &["-fn", by_kernel.path()]).unwrap();
        let Some(mount) = by_kernel.mount() else { return };
        assert!(compare::tree(&seen, InodeNumber::ROOT, mount.path(), Beside::Mount) > 10);
        drop(mount);
        let again = MemoryDisk::new(bytes, 512);
        let again = Arc::new(again);
        Volume::open_for_writing(again.clone(), OpenOptions::default(), writing())
            .unwrap()
            .close()
            .unwrap();
        let by_us = Image::of(&Arc::into_inner(again).unwrap().into_bytes());
        run("e2fsck", &["-fn", by_us.path()]).unwrap();
        let Some(mount) = by_us.mount() else { return };
        assert!(
            compare::tree(&seen, InodeNumber::ROOT, mount.path(), Beside::Mount) > 10,
            "{kind}"
        );
    }
}

#[test]
fn a_closed_volume_has_an_empty_log_and_is_clean() {
    for base in bases() {
        let disk = Arc::new(MemoryDisk::new(base.clone(), 512));
        let volume =
            Volume::open_for_writing(disk.clone(), OpenOptions::default(), writing()).unwrap();
        for turn in 0..3 {
            wear(&volume, turn * 30..turn * 30 + 30, &|_| {});
            volume.close().unwrap();
            volume.reopen().unwrap();
        }
        wear(&volume, 90..97, &|_| {});
        volume.close().unwrap();
        drop(volume);
        let image = Image::of(&Arc::into_inner(disk).unwrap().into_bytes());
        run("e2fsck", &["-fn", image.path()]).unwrap();
        let header = run("dumpe2fs", &["-h", image.path()]).unwrap();
        assert!(!header.contains("needs_recovery"), "{header}");
        let start = header.lines().find(|line| line.starts_with("Journal start:")).unwrap();
        assert_eq!(start.split_whitespace().last(), Some("0"));
        let Some(mount) = image.mount_writable() else { return };
        fs::write(mount.path().join("theirs"), "x").unwrap();
        drop(mount);
        run("e2fsck", &["-fn", image.path()]).unwrap();
    }
}

#[test]
fn a_volume_that_is_left_alone_has_an_empty_log() {
    for base in bases() {
        let disk = recorded(base);
        let volume =
            Volume::open_for_writing(disk.clone(), OpenOptions::default(), writing()).unwrap();
        let mut events = vec![];
        for turn in 0..3u64 {
            wear(&volume, turn * 5..turn * 5 + 5, &|_| {});
            is_left_alone(&volume);
            events.extend(disk.take());
            let options = CrashOptions { seed: 1, subsets: 0, exhaustive_sectors: 0 };
            let last = CrashStates::new(base.clone(), events.clone(), options).last().unwrap();
            let image = Image::of(&last.disk.to_bytes());
            let header = run("dumpe2fs", &["-h", image.path()]).unwrap();
            // It is mounted nevertheless.
            assert!(header.contains("needs_recovery"), "{header}");
            let start = header.lines().find(|line| line.starts_with("Journal start:")).unwrap();
            assert_eq!(start.split_whitespace().last(), Some("0"), "turn {turn}");
            run("e2fsck", &["-fn", image.path()]).unwrap();
            let Some(mount) = image.mount_writable() else { return };
            fs::write(mount.path().join("theirs"), "x").unwrap();
            drop(mount);
            run("e2fsck", &["-fn", image.path()]).unwrap();
        }
        // Once is enough.
        volume.commit().unwrap();
        assert_eq!(disk.take(), []);
    }
}

#[test]
fn a_sync_waits_for_two_groups_and_an_overwrite_for_one() {
    let Some(base) = bases().last() else { return };
    let disk = recorded(base);
    let volume = Volume::open_for_writing(disk.clone(), OpenOptions::default(), writing()).unwrap();
    let file = volume.create(volume.root(), b"first", &FILE).unwrap();
    volume.write(file, 0, &contents(7)).unwrap();
    volume.sync().unwrap();
    disk.take();
    let groups = || {
        let events = disk.take();
        events.iter().filter(|event| matches!(event, Event::Group { .. })).count()
    };
    let file = volume.create(volume.root(), b"second", &FILE).unwrap();
    volume.write(file, 0, &contents(8)).unwrap();
    volume.sync_inode(file, false).unwrap();
    assert_eq!(groups(), 2);
    volume.write(file, 0, &contents(8)).unwrap();
    volume.sync_inode(file, true).unwrap();
    assert_eq!(groups(), 1);
    volume.unlink(volume.root(), b"second").unwrap();
    volume.rename(volume.root(), b"first", volume.root(), b"third", RenameMode::Replace).unwrap();
    volume.sync().unwrap();
    assert_eq!(groups(), 2);
    volume.close().unwrap();
}

#[test]
fn threads_with_small_caches_leave_a_sound_volume() {
    const THREADS: u64 = 4;
    for base in bases().iter().rev().take(2) {
        let disk = Arc::new(MemoryDisk::new(base.clone(), 512));
        let options = OpenOptions {
            inode_cache: 8,
            block_map_cache: 8,
            data_cache_bytes: 256 << 10,
            ..OpenOptions::default()
        };
        let volume = Volume::open_for_writing(disk.clone(), options, writing()).unwrap();
        let kept = |thread: u64, nth: u64| format!("{thread}-{nth}");
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let volume = &volume;
                scope.spawn(move || {
                    let root = volume.root();
                    for nth in 0..120 {
                        let name = kept(thread, nth);
                        let file = volume.create(root, name.as_bytes(), &FILE).unwrap();
                        let bytes = contents(thread * 1000 + nth);
                        volume.write(file, 0, &bytes).unwrap();
                        if nth % 5 == 0 {
                            volume.sync_inode(file, false).unwrap();
                        }
                        let mut read = vec![0; bytes.len()];
                        assert_eq!(volume.read_into(file, 0, &mut read).unwrap(), bytes.len());
                        assert!(read == bytes, "{name}");
                        if nth >= 9 {
                            volume.unlink(root, kept(thread, nth - 9).as_bytes()).unwrap();
                        }
                    }
                });
            }
        });
        volume.close().unwrap();
        drop(volume);
        let image = Image::of(&Arc::into_inner(disk).unwrap().into_bytes());
        run("e2fsck", &["-fn", image.path()]).unwrap();
        let volume = image.open();
        for (thread, nth) in
            (0..THREADS).flat_map(|thread| (111..120).map(move |nth| (thread, nth)))
        {
            let file = volume.lookup(volume.root(), kept(thread, nth).as_bytes()).unwrap();
            let mut read = vec![0; 10_000];
            let len = volume.read_into(file, 0, &mut read).unwrap();
            assert!(read[..len] == contents(thread * 1000 + nth));
        }
    }
}

#[test]
fn the_kernel_and_we_take_turns_and_both_are_cut_off() {
    for base in
        [&bases()[..1.min(bases().len())], &bases()[bases().len().saturating_sub(1)..]].concat()
    {
        let mut bytes = base;
        for turn in 0..4u64 {
            // Our volume is abandoned in the middle of its work.
            let disk = Arc::new(MemoryDisk::new(bytes, 512));
            let volume =
                Volume::open_for_writing(disk.clone(), OpenOptions::default(), writing()).unwrap();
            wear(&volume, turn * 10..turn * 10 + 10, &|_| {});
            drop(volume);
            let image = Image::of(&Arc::into_inner(disk).unwrap().into_bytes());
            let Some(mount) = image.mount_writable() else { return };
            for nth in 0..30 {
                let path = mount.path().join(format!("theirs {turn} {nth}"));
                fs::write(path, contents(nth)).unwrap();
            }
            let status = Command::new("sync").arg("-f").arg(mount.path()).status().unwrap();
            assert!(status.success());
            // The kernel's, too: a copy of the disk as after a power loss.
            bytes = fs::read(&image.path).unwrap();
            for nth in 0..30 {
                let path = mount.path().join(format!("theirs {turn} {nth}"));
                assert!(fs::read(path).unwrap() == contents(nth));
            }
            drop(mount);
            let left = Arc::new(MemoryDisk::new(bytes.clone(), 512));
            let volume =
                Volume::open_for_writing(left.clone(), OpenOptions::default(), writing()).unwrap();
            for nth in 0..30 {
                let name = format!("theirs {turn} {nth}");
                let file = volume.lookup(volume.root(), name.as_bytes()).unwrap();
                let mut read = vec![0; 10_000];
                let len = volume.read_into(file, 0, &mut read).unwrap();
                assert!(read[..len] == contents(nth), "{name}");
                volume.unlink(volume.root(), name.as_bytes()).unwrap();
            }
            volume.close().unwrap();
            drop(volume);
            bytes = Arc::into_inner(left).unwrap().into_bytes();
            run("e2fsck", &["-fn", Image::of(&bytes).path()]).unwrap();
        }
    }
}

/// A file in more groups than a small journal can hold bitmaps of.
#[test]
fn large_deletions_take_several_transactions() {
    let arguments = ["-t", "ext4", "-b", "1024", "-g", "256", "-J", "size=1", "-N", "4096"];
    let Some(image) = Image::make(None, "320M", &arguments) else { return };
    let base = fs::read(&image.path).unwrap();
    drop(image);
    let disk = Arc::new(MemoryDisk::new(base, 512));
    let len = 250 << 20;
    let large = |volume: &Volume, name: &[u8]| {
        // Makes freed blocks allocatable.
        volume.sync().unwrap();
        let file = volume.create(volume.root(), name, &FILE).unwrap();
        volume.fallocate(file, 0, len, Reserve::Allocate).unwrap();
        volume.sync().unwrap();
        file
    };
    let volume = Volume::open_for_writing(disk.clone(), OpenOptions::default(), writing()).unwrap();
    let free = volume.space().free_blocks;
    // Unlinked, and unlinked while in use.
    for holds in [false, true] {
        let file = large(&volume, b"large");
        if holds {
            volume.add_user(file);
        }
        volume.unlink(volume.root(), b"large").unwrap();
        if holds {
            assert_eq!(volume.inode(file).unwrap().size_bytes, len);
            volume.remove_users(file, 1);
        }
        volume.sync().unwrap();
        assert!(volume.space().free_blocks >= free - 64, "{}", volume.space().free_blocks);
    }
    // Truncated, after a hole was punched.
    let file = large(&volume, b"cut");
    volume.fallocate(file, 5 << 20, 200 << 20, Reserve::PunchHole).unwrap();
    volume.sync().unwrap();
    volume.fallocate(file, 0, len, Reserve::Allocate).unwrap();
    let change = AttributeChange { size_bytes: Some(100), ..AttributeChange::default() };
    volume.set_attributes(file, &change).unwrap();
    assert_eq!(volume.inode(file).unwrap().size_bytes, 100);
    // An orphan in use at power loss is deleted by the next mount.
    let file = large(&volume, b"held");
    volume.add_user(file);
    volume.unlink(volume.root(), b"held").unwrap();
    volume.sync().unwrap();
    assert_eq!(volume.failure(), None);
    drop(volume);
    let volume = Volume::open_for_writing(disk.clone(), OpenOptions::default(), writing()).unwrap();
    volume.sync().unwrap();
    assert!(volume.space().free_blocks >= free - 64, "{}", volume.space().free_blocks);
    volume.close().unwrap();
    drop(volume);
    let base = Arc::into_inner(disk).unwrap().into_bytes();
    run("e2fsck", &["-fn", Image::of(&base).path()]).unwrap();

    // Power loss in the middle of it.
    let disk = recorded(&base);
    let volume = Volume::open_for_writing(disk.clone(), OpenOptions::default(), writing()).unwrap();
    large(&volume, b"large");
    disk.mark(1);
    volume.unlink(volume.root(), b"large").unwrap();
    volume.sync().unwrap();
    disk.mark(2);
    let file = large(&volume, b"cut again");
    disk.mark(3);
    volume.set_attributes(file, &change).unwrap();
    volume.sync().unwrap();
    disk.mark(4);
    drop(volume);
    let options = CrashOptions { seed: 1, subsets: 1, exhaustive_sectors: 0 };
    let states = CrashStates::new(base, disk.take(), options);
    let within = states.filter(|crash| matches!(crash.marks().last(), Some(1 | 3)));
    let (mut all, mut seen) = (0, 0);
    for crash in within {
        all += 1;
        if all % 150 == 0 {
            seen += 1;
            Volume::open_for_writing(crash.disk.clone(), OpenOptions::default(), writing())
                .unwrap()
                .close()
                .unwrap();
            let image = Image::of(&crash.disk.to_bytes());
            run("e2fsck", &["-fn", image.path()]).unwrap();
        }
    }
    assert!(seen > 3, "{seen} of {all}");
}
