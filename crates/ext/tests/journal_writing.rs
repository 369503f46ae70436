//! Writing through journals with power loss at any moment: after recovery the volume is valid, and
//! synced changes are present.

use crate::common;

use std::fs;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use crate::common::FILE;
use crate::common::compare::{self, ReferenceTree};
use crate::common::spoil::{build_small_tree, scaled_rounds};
use crate::common::storm::{Storm, write_options};
use crate::common::{Image, run_tool};
use draconis_device::{Disk, MemoryDisk, Random};
use draconis_ext::format::jbd2::RawJournalSuperblock;
use draconis_ext::{Error, InodeNumber, NewNode, OpenOptions, RenameMode, Reserve, Volume, check};
use draconis_testkit::judge::assert_preens;
use draconis_testkit::{CrashDisk, CrashOptions, CrashStates, Event, RecordDisk};
use draconis_types::{AttributeChange, FileType};

/// One state of so many is checked with `e2fsck`.
const E2FSCK_SAMPLE_INTERVAL: u64 = 60;

/// Compatible and incompatible features of journals.
const JOURNAL_FEATURE_SETS: [(u32, u32); 5] = [(0, 0), (1, 0), (0, 8), (0, 0x10), (0, 0x12)];

/// Small volumes with journals of every kind; the last one is ext4.
fn base_images() -> &'static [Vec<u8>] {
    static BASES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    BASES.get_or_init(|| {
        let source = tempfile::tempdir().unwrap();
        build_small_tree(source.path());
        let make = |kind| {
            let arguments = ["-t", kind, "-b", "1024", "-I", "256", "-J", "size=1"];
            let image = Image::make(Some(source.path()), "2600k", &arguments)?;
            run_tool("e2fsck", &["-fyD", image.path()])?;
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
        JOURNAL_FEATURE_SETS
            .into_iter()
            .map(of_kind)
            .chain([fs::read(&ext4.path).unwrap()])
            .collect()
    })
}

fn recording_disk(base: &[u8]) -> Arc<RecordDisk<MemoryDisk>> {
    Arc::new(RecordDisk::new(MemoryDisk::new(base.to_vec(), 512)))
}

/// Checks a state with our checker, and a sample with `e2fsck` after recovery by us and by itself.
fn assert_recovers_clean(left: &Arc<CrashDisk>, sampled: bool, what: &str) {
    let disk: Arc<dyn Disk> = left.clone();
    match check::check(&disk, check::CheckOptions::default(), &|_, _| {}) {
        Ok(report) => assert!(report.problems.is_empty(), "{what}: {:?}", report.problems),
        // States that our checker does not support are left to the others.
        Err(Error::Unsupported { .. }) => {}
        Err(error) => panic!("{what}: {error}"),
    }
    if sampled {
        let image = Image::from_bytes(&left.to_bytes());
        assert_preens(&image.path, what);
        Volume::open_for_writing(disk, OpenOptions::default(), write_options())
            .unwrap()
            .close()
            .unwrap();
        run_tool("e2fsck", &["-fn", Image::from_bytes(&left.to_bytes()).path()]).unwrap();
    }
}

fn crash_states(base: &[u8], events: Vec<Event>, seed: u64) -> CrashStates {
    let options = CrashOptions { seed, subsets: 6, exhaustive_sectors: 3 };
    CrashStates::new(base.to_vec(), events, options)
}

#[test]
fn storms_with_power_loss_leave_clean_volumes() {
    let mut states = 0;
    for seed in 0..scaled_rounds(20) {
        let Some(base) = base_images().get(seed as usize % JOURNAL_FEATURE_SETS.len()) else {
            return;
        };
        states += storm_with_power_loss(base, seed, E2FSCK_SAMPLE_INTERVAL);
    }
    assert!(states > 1000, "{states}");
}

#[test]
fn ext4_storms_with_power_loss_leave_clean_volumes() {
    let Some(base) = base_images().last() else { return };
    let states: u64 = (0..scaled_rounds(6)).map(|seed| storm_with_power_loss(base, seed, 10)).sum();
    assert!(states > 300, "{states}");
}

#[test]
fn quota_and_bigalloc_storms_with_power_loss_leave_clean_volumes() {
    let plain = ["-t", "ext4", "-b", "1024", "-N", "256", "-J", "size=1"];
    let features: [&[&str]; 2] = [&["-O", "quota"], &["-O", "bigalloc", "-C", "4096"]];
    for (seed, features) in (50..).zip(features) {
        let Some(image) = Image::make(None, "4M", &[&plain, features].concat()) else { return };
        let base = fs::read(&image.path).unwrap();
        let seeds = (0..scaled_rounds(3)).map(|nth| seed + nth * 10);
        let states: u64 = seeds.map(|seed| storm_with_power_loss(&base, seed, 10)).sum();
        assert!(states > 100, "{states}");
    }
}

/// Makes random changes with power loss at any moment; returns the number of states.
fn storm_with_power_loss(base: &[u8], seed: u64, sample: u64) -> u64 {
    let mut random = Random::new(seed ^ 0x10C);
    let disk = recording_disk(base);
    let mut storm = Storm::new(disk.clone(), OpenOptions::default()).unwrap();
    for _ in 0..60 {
        storm.random_change(&mut |limit| random.next_below(limit));
    }
    storm.finish();
    assert!(!storm.outcome.stopped, "seed {seed}: {:?}", storm.volume.failure());
    let mut states = 0;
    for crash in crash_states(base, disk.take_events(), seed) {
        states += 1;
        let what = format!("seed {seed}, {:?}", crash.kind);
        assert_recovers_clean(&crash.disk, random.next_below(sample) == 0, &what);
    }
    states
}

/// Returns the contents of a file after its `nth` change.
fn contents_after_change(nth: u64) -> Vec<u8> {
    common::tree::random_bytes(nth, 100 + (nth as usize * 997) % 9000)
}

#[test]
fn synced_data_survives_power_loss() {
    for (kind, base) in base_images().iter().enumerate() {
        let disk = recording_disk(base);
        let volume =
            Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options())
                .unwrap();
        let root = volume.root();
        // Each step creates a file named after the step, and removes an old one.
        for step in 1..=60u64 {
            let name = format!("step{step}");
            let file = volume.create(root, b"new", &FILE).unwrap();
            volume.write(file, 0, &contents_after_change(step)).unwrap();
            volume.rename(root, b"new", root, name.as_bytes(), RenameMode::Replace).unwrap();
            if step > 5 {
                volume.unlink(root, format!("step{}", step - 5).as_bytes()).unwrap();
            }
            if step % 3 == 0 {
                volume.sync_inode(file, step % 2 == 0).unwrap();
                disk.record_mark(step);
            }
        }
        volume.close().unwrap();
        drop(volume);
        let mut random = Random::new(5);
        for crash in crash_states(base, disk.take_events(), kind as u64) {
            let what = format!("kind {kind}, {:?}, {:?}", crash.kind, crash.marks().last());
            assert_recovers_clean(
                &crash.disk,
                random.next_below(E2FSCK_SAMPLE_INTERVAL * 4) == 0,
                &what,
            );
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
                assert!(bytes[..len] == contents_after_change(step), "{what}: {name}");
            }
        }
    }
}

/// Number of files kept.
const KEPT_FILES: u64 = 4;

/// Directory blocks become data blocks and vice versa, over several rounds of the log.
fn wrap_log_reusing_blocks(volume: &Volume, rounds: std::ops::Range<u64>, synced: &dyn Fn(u64)) {
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
        volume.write(file, 0, &common::tree::random_bytes(round, 60_000)).unwrap();
        volume.sync_inode(file, false).unwrap();
        synced(round);
        if round >= KEPT_FILES {
            volume.unlink(root, format!("file{}", round - KEPT_FILES).as_bytes()).unwrap();
        }
    }
}

/// Commits like an idle mount.
fn commit_like_idle_mount(volume: &Volume) {
    volume.commit().unwrap();
    volume.commit().unwrap();
}

#[test]
#[ignore = "long: half a minute: a power cut at each write"]
fn replay_does_not_overwrite_reused_blocks() {
    for (kind, base) in base_images().iter().enumerate() {
        let disk = recording_disk(base);
        let volume =
            Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options())
                .unwrap();
        wrap_log_reusing_blocks(&volume, 0..25, &|round| {
            disk.record_mark(round);
            if [6, 7, 15].contains(&round) {
                commit_like_idle_mount(&volume);
            }
        });
        volume.close().unwrap();
        drop(volume);
        let mut random = Random::new(5);
        for crash in crash_states(base, disk.take_events(), kind as u64) {
            let what = format!("kind {kind}, {:?}, {:?}", crash.kind, crash.marks().last());
            if random.next_below(8) == 0 {
                assert_recovers_clean(
                    &crash.disk,
                    random.next_below(E2FSCK_SAMPLE_INTERVAL) == 0,
                    &what,
                );
            }
            let volume = Volume::open(crash.disk.clone(), OpenOptions::default()).unwrap();
            let Some(last) = crash.marks().last() else { continue };
            // The next round may have begun to remove one.
            for round in last.saturating_sub(KEPT_FILES - 2)..=*last {
                let name = format!("file{round}");
                let file = volume.lookup(volume.root(), name.as_bytes());
                let file = file.unwrap_or_else(|error| panic!("{what}: {name}: {error}"));
                let mut bytes = vec![0; 60_000];
                assert_eq!(volume.read_into(file, 0, &mut bytes).unwrap(), bytes.len());
                assert!(bytes == common::tree::random_bytes(round, 60_000), "{what}: {name}");
            }
        }
    }
}

#[test]
fn draconis_kernel_and_e2fsck_recover_alike() {
    for (kind, base) in base_images().iter().enumerate() {
        let disk = recording_disk(base);
        let volume =
            Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options())
                .unwrap();
        wrap_log_reusing_blocks(&volume, 0..40, &|_| {});
        let events = disk.take_events();
        let options = CrashOptions { seed: 1, subsets: 0, exhaustive_sectors: 0 };
        let all: Vec<_> = CrashStates::new(base.clone(), events, options).collect();
        let last = all.last().unwrap();
        let bytes = last.disk.to_bytes();
        assert_recovers_clean(&last.disk, false, "the last");

        let image = Image::from_bytes(&bytes);
        let seen = image.open();
        let by_e2fsck = Image::from_bytes(&bytes);
        run_tool("e2fsck", &["-fp", by_e2fsck.path()]).unwrap();
        run_tool("e2fsck", &["-fn", by_e2fsck.path()]).unwrap();
        let Some(mount) = by_e2fsck.mount() else { return };
        assert!(
            compare::compare_trees(&seen, InodeNumber::ROOT, mount.path(), ReferenceTree::Mount)
                > 10
        );
        drop(mount);
        let by_kernel = Image::from_bytes(&bytes);
        drop(by_kernel.mount_writable());
        run_tool("e2fsck", &["-fn", by_kernel.path()]).unwrap();
        let Some(mount) = by_kernel.mount() else { return };
        assert!(
            compare::compare_trees(&seen, InodeNumber::ROOT, mount.path(), ReferenceTree::Mount)
                > 10
        );
        drop(mount);
        let again = MemoryDisk::new(bytes, 512);
        let again = Arc::new(again);
        Volume::open_for_writing(again.clone(), OpenOptions::default(), write_options())
            .unwrap()
            .close()
            .unwrap();
        let by_us = Image::from_bytes(&Arc::into_inner(again).unwrap().into_bytes());
        run_tool("e2fsck", &["-fn", by_us.path()]).unwrap();
        let Some(mount) = by_us.mount() else { return };
        assert!(
            compare::compare_trees(&seen, InodeNumber::ROOT, mount.path(), ReferenceTree::Mount)
                > 10,
            "{kind}"
        );
    }
}

#[test]
fn closed_volume_has_empty_journal_and_is_clean() {
    for base in base_images() {
        let disk = Arc::new(MemoryDisk::new(base.clone(), 512));
        let volume =
            Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options())
                .unwrap();
        for turn in 0..3 {
            wrap_log_reusing_blocks(&volume, turn * 30..turn * 30 + 30, &|_| {});
            volume.close().unwrap();
            volume.reopen().unwrap();
        }
        wrap_log_reusing_blocks(&volume, 90..97, &|_| {});
        volume.close().unwrap();
        drop(volume);
        let image = Image::from_bytes(&Arc::into_inner(disk).unwrap().into_bytes());
        run_tool("e2fsck", &["-fn", image.path()]).unwrap();
        let header = run_tool("dumpe2fs", &["-h", image.path()]).unwrap();
        assert!(!header.contains("needs_recovery"), "{header}");
        let start = header.lines().find(|line| line.starts_with("Journal start:")).unwrap();
        assert_eq!(start.split_whitespace().last(), Some("0"));
        let Some(mount) = image.mount_writable() else { return };
        fs::write(mount.path().join("theirs"), "x").unwrap();
        drop(mount);
        run_tool("e2fsck", &["-fn", image.path()]).unwrap();
    }
}

#[test]
fn idle_volume_has_empty_journal() {
    for base in base_images() {
        let disk = recording_disk(base);
        let volume =
            Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options())
                .unwrap();
        let mut events = vec![];
        for turn in 0..3u64 {
            wrap_log_reusing_blocks(&volume, turn * 5..turn * 5 + 5, &|_| {});
            commit_like_idle_mount(&volume);
            events.extend(disk.take_events());
            let options = CrashOptions { seed: 1, subsets: 0, exhaustive_sectors: 0 };
            let last = CrashStates::new(base.clone(), events.clone(), options).last().unwrap();
            let image = Image::from_bytes(&last.disk.to_bytes());
            let header = run_tool("dumpe2fs", &["-h", image.path()]).unwrap();
            // It is mounted nevertheless.
            assert!(header.contains("needs_recovery"), "{header}");
            let start = header.lines().find(|line| line.starts_with("Journal start:")).unwrap();
            assert_eq!(start.split_whitespace().last(), Some("0"), "turn {turn}");
            run_tool("e2fsck", &["-fn", image.path()]).unwrap();
            let Some(mount) = image.mount_writable() else { return };
            fs::write(mount.path().join("theirs"), "x").unwrap();
            drop(mount);
            run_tool("e2fsck", &["-fn", image.path()]).unwrap();
        }
        // Once is enough.
        volume.commit().unwrap();
        assert_eq!(disk.take_events(), []);
    }
}

#[test]
fn sync_waits_for_two_groups_and_overwrite_for_one() {
    let Some(base) = base_images().last() else { return };
    let disk = recording_disk(base);
    let volume =
        Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap();
    let file = volume.create(volume.root(), b"first", &FILE).unwrap();
    volume.write(file, 0, &contents_after_change(7)).unwrap();
    volume.sync().unwrap();
    disk.take_events();
    let groups = || {
        let events = disk.take_events();
        events.iter().filter(|event| matches!(event, Event::Group { .. })).count()
    };
    let file = volume.create(volume.root(), b"second", &FILE).unwrap();
    volume.write(file, 0, &contents_after_change(8)).unwrap();
    volume.sync_inode(file, false).unwrap();
    assert_eq!(groups(), 2);
    volume.write(file, 0, &contents_after_change(8)).unwrap();
    volume.sync_inode(file, true).unwrap();
    assert_eq!(groups(), 1);
    volume.unlink(volume.root(), b"second").unwrap();
    volume.rename(volume.root(), b"first", volume.root(), b"third", RenameMode::Replace).unwrap();
    volume.sync().unwrap();
    assert_eq!(groups(), 2);
    volume.close().unwrap();
}

#[test]
fn concurrent_writers_with_small_caches_leave_clean_volume() {
    const THREADS: u64 = 4;
    for base in base_images().iter().rev().take(2) {
        let disk = Arc::new(MemoryDisk::new(base.clone(), 512));
        let options = OpenOptions {
            inode_cache: 8,
            block_map_cache: 8,
            data_cache_bytes: 256 << 10,
            ..OpenOptions::default()
        };
        let volume = Volume::open_for_writing(disk.clone(), options, write_options()).unwrap();
        let kept = |thread: u64, nth: u64| format!("{thread}-{nth}");
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let volume = &volume;
                scope.spawn(move || {
                    let root = volume.root();
                    for nth in 0..120 {
                        let name = kept(thread, nth);
                        let file = volume.create(root, name.as_bytes(), &FILE).unwrap();
                        let bytes = contents_after_change(thread * 1000 + nth);
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
        let image = Image::from_bytes(&Arc::into_inner(disk).unwrap().into_bytes());
        run_tool("e2fsck", &["-fn", image.path()]).unwrap();
        let volume = image.open();
        for (thread, nth) in
            (0..THREADS).flat_map(|thread| (111..120).map(move |nth| (thread, nth)))
        {
            let file = volume.lookup(volume.root(), kept(thread, nth).as_bytes()).unwrap();
            let mut read = vec![0; 10_000];
            let len = volume.read_into(file, 0, &mut read).unwrap();
            assert!(read[..len] == contents_after_change(thread * 1000 + nth));
        }
    }
}

#[test]
fn kernel_and_draconis_alternate_with_power_losses() {
    for base in [
        &base_images()[..1.min(base_images().len())],
        &base_images()[base_images().len().saturating_sub(1)..],
    ]
    .concat()
    {
        let mut bytes = base;
        for turn in 0..4u64 {
            // Our volume is abandoned in the middle of its work.
            let disk = Arc::new(MemoryDisk::new(bytes, 512));
            let volume =
                Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options())
                    .unwrap();
            wrap_log_reusing_blocks(&volume, turn * 10..turn * 10 + 10, &|_| {});
            drop(volume);
            let image = Image::from_bytes(&Arc::into_inner(disk).unwrap().into_bytes());
            let Some(mount) = image.mount_writable() else { return };
            for nth in 0..30 {
                let path = mount.path().join(format!("theirs {turn} {nth}"));
                fs::write(path, contents_after_change(nth)).unwrap();
            }
            let status = Command::new("sync").arg("-f").arg(mount.path()).status().unwrap();
            assert!(status.success());
            // The kernel's, too: a copy of the disk as after a power loss.
            bytes = fs::read(&image.path).unwrap();
            for nth in 0..30 {
                let path = mount.path().join(format!("theirs {turn} {nth}"));
                assert!(fs::read(path).unwrap() == contents_after_change(nth));
            }
            drop(mount);
            let left = Arc::new(MemoryDisk::new(bytes.clone(), 512));
            let volume =
                Volume::open_for_writing(left.clone(), OpenOptions::default(), write_options())
                    .unwrap();
            for nth in 0..30 {
                let name = format!("theirs {turn} {nth}");
                let file = volume.lookup(volume.root(), name.as_bytes()).unwrap();
                let mut read = vec![0; 10_000];
                let len = volume.read_into(file, 0, &mut read).unwrap();
                assert!(read[..len] == contents_after_change(nth), "{name}");
                volume.unlink(volume.root(), name.as_bytes()).unwrap();
            }
            volume.close().unwrap();
            drop(volume);
            bytes = Arc::into_inner(left).unwrap().into_bytes();
            run_tool("e2fsck", &["-fn", Image::from_bytes(&bytes).path()]).unwrap();
        }
    }
}

/// A file in more groups than a small journal can hold bitmaps of.
#[test]
#[ignore = "long: half a minute: a large file"]
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
    let volume =
        Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap();
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
    let volume =
        Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap();
    volume.sync().unwrap();
    assert!(volume.space().free_blocks >= free - 64, "{}", volume.space().free_blocks);
    volume.close().unwrap();
    drop(volume);
    let base = Arc::into_inner(disk).unwrap().into_bytes();
    run_tool("e2fsck", &["-fn", Image::from_bytes(&base).path()]).unwrap();

    // Power loss in the middle of it.
    let disk = recording_disk(&base);
    let volume =
        Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap();
    large(&volume, b"large");
    disk.record_mark(1);
    volume.unlink(volume.root(), b"large").unwrap();
    volume.sync().unwrap();
    disk.record_mark(2);
    let file = large(&volume, b"cut again");
    disk.record_mark(3);
    volume.set_attributes(file, &change).unwrap();
    volume.sync().unwrap();
    disk.record_mark(4);
    drop(volume);
    let options = CrashOptions { seed: 1, subsets: 1, exhaustive_sectors: 0 };
    let states = CrashStates::new(base, disk.take_events(), options);
    let within = states.filter(|crash| matches!(crash.marks().last(), Some(1 | 3)));
    let (mut all, mut seen) = (0, 0);
    for crash in within {
        all += 1;
        if all % 150 == 0 {
            seen += 1;
            Volume::open_for_writing(crash.disk.clone(), OpenOptions::default(), write_options())
                .unwrap()
                .close()
                .unwrap();
            let image = Image::from_bytes(&crash.disk.to_bytes());
            run_tool("e2fsck", &["-fn", image.path()]).unwrap();
        }
    }
    assert!(seen > 3, "{seen} of {all}");
}
