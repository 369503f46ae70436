//! Repairs that a power cut ends, and that are undone: the old volume or the repaired one, never a
//! third.

use crate::common;
use crate::common::repairing::{self, Repaired};

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::sync::Arc;

use crate::common::Image;
use crate::common::offline::with_disk;
use crate::common::spoil::scaled_rounds;
use draconis_device::{Disk, Extent, MemoryDisk, Random};
use draconis_ext::check::{CheckOptions, What, check};
use draconis_ext::finish_interrupted_change;
use draconis_ext::repair::{Repair, plan, revert};
use draconis_testkit::{CrashOptions, CrashStates, RecordDisk, judge};
use draconis_types::Block;

/// Volumes with damage, from a seed.
fn damaged_volume(seed: u64) -> Option<Vec<u8>> {
    let source = tempfile::tempdir().unwrap();
    for nth in 0..40 {
        let dir = source.path().join(format!("dir {}", nth % 4));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join(format!("file {nth}")), vec![nth as u8; 3000 * nth]).unwrap();
    }
    let kind = ["ext2", "ext3", "ext4"][seed as usize % 3];
    let arguments = ["-t", kind, "-b", "1024", "-N", "256", "-E", common::HASH_SEED];
    let image = Image::make(Some(source.path()), "12M", &arguments)?;
    let mut bytes = std::fs::read(&image.path).unwrap();
    let mut random = Random::new(seed);
    let unnamed = format!("unlink \"dir {}\"/\"file {}\"", seed % 4, seed % 4 + 4);
    image.debugfs_write(&unnamed)?;
    image.debugfs_write(&format!(
        "sif <{}> links_count {}",
        20 + seed % 30,
        random.next_below(9)
    ))?;
    bytes = std::fs::read(&image.path).unwrap_or(bytes);
    // Some bytes of the first metadata blocks, behind superblock and descriptors.
    for _ in 0..random.next_below(6) {
        let at = 80 * 1024 + random.next_below(90 * 1024) as usize;
        bytes[at] ^= 1 << random.next_below(8);
    }
    Some(bytes)
}

fn is_clean(bytes: &[u8]) -> bool {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(bytes.to_vec(), 512));
    check(&disk, CheckOptions::default(), &|_, _| {}).is_ok_and(|it| it.problems.is_empty())
}

/// Returns true if two volumes differ at most in blocks that are free in both.
fn has_same_files(one: &[u8], other: &[u8]) -> bool {
    one[1024..2048] == other[1024..2048] && problems(one) == problems(other)
}

fn problems(bytes: &[u8]) -> Vec<String> {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(bytes.to_vec(), 512));
    let report = check(&disk, CheckOptions::default(), &|_, _| {}).unwrap();
    report.problems.iter().map(ToString::to_string).collect()
}

type Recorded = Arc<RecordDisk<MemoryDisk>>;

fn as_disk(disk: &Recorded) -> Arc<dyn Disk> {
    disk.clone()
}

/// Plans the repair of a damaged volume from a seed; `None` if there is none to write.
fn planned(seed: u64) -> Option<(Vec<u8>, Recorded, Repair)> {
    let bytes = damaged_volume(seed)?;
    let disk = Arc::new(RecordDisk::new(MemoryDisk::new(bytes.clone(), 512)));
    let repair = plan(&as_disk(&disk), &repairing::options(), &|_, _| {}).unwrap();
    (!repair.is_empty() && repair.unfixed.is_empty()).then_some((bytes, disk, repair))
}

/// All states after a power cut: each write made or not, torn, or any of one flush interval.
fn crash_states(before: &[u8], disk: &Recorded, seed: u64) -> CrashStates {
    let options = CrashOptions { seed, subsets: 4, exhaustive_sectors: 0 };
    CrashStates::new(before.to_vec(), disk.take_events(), options)
}

fn contents(disk: &Recorded) -> Vec<u8> {
    let len = disk.properties().len_bytes;
    let block = disk.read_now(Extent::new(0, len), Block::private(len as usize)).unwrap();
    let mut bytes = vec![0; len as usize];
    block.copy_out(0, &mut bytes);
    bytes
}

#[test]
fn cut_repair_leaves_old_or_repaired_volume() {
    let (mut cuts, mut repairs, mut old) = (0, 0, 0);
    // In the last one the journal is made anew, by a change with a log of its own.
    for seed in (0..scaled_rounds(12)).chain([139]) {
        let Some((bytes, disk, repair)) = planned(seed) else { continue };
        repairs += 1;
        repair.write(&as_disk(&disk), None, None).unwrap();
        for crash in crash_states(&bytes, &disk, seed) {
            finish_interrupted_change(&*crash.disk).unwrap();
            let found = crash.disk.to_bytes();
            let is_old = has_same_files(&found, &bytes);
            assert!(is_old || is_clean(&found), "seed {seed}, {:?}", crash.kind);
            (cuts, old) = (cuts + 1, old + u32::from(is_old));
        }
    }
    eprintln!("{cuts} cuts of {repairs} repairs, {old} leave the old volume");
    if repairs > 0 {
        assert!(repairs > 3 && old > 30 && cuts > old, "{cuts} cuts of {repairs}, {old} old");
    }
}

#[test]
fn revert_restores_every_byte() {
    let mut cuts = 0;
    for seed in 0..scaled_rounds(6) {
        let Some((bytes, disk, repair)) = planned(seed) else { continue };
        let mut undo = tempfile::tempfile().unwrap();
        repair.write(&as_disk(&disk), Some(undo.try_clone().unwrap()), None).unwrap();
        let repaired = contents(&disk);
        assert!(is_clean(&repaired) && repaired != bytes, "seed {seed}");
        disk.take_events();
        revert(&*disk, &mut undo, false).unwrap();
        assert!(contents(&disk) == bytes, "seed {seed}");
        for crash in crash_states(&repaired, &disk, seed) {
            let now = crash.disk.to_bytes();
            let refused = finish_interrupted_change(&*crash.disk).is_err();
            let is_whole = now == repaired || now == bytes;
            assert!(refused || is_whole, "seed {seed}, {:?}", crash.kind);
            let mixed = |(at, sector): (usize, &[u8])| {
                let range = at * 512..(at + 1) * 512;
                at != 2 && *sector != bytes[range.clone()] && *sector != repaired[range]
            };
            assert!(!now.chunks(512).enumerate().any(mixed), "seed {seed}, {:?}", crash.kind);
            revert(&*crash.disk, &mut undo, false).unwrap();
            assert!(crash.disk.to_bytes() == bytes, "seed {seed}, {:?}", crash.kind);
            cuts += 1;
        }
        assert!(cuts > 10);
    }
    eprintln!("{cuts} cuts of reverts");
}

/// The undo file of a repair that was cut off at any write leads back, too.
#[test]
fn cut_repair_is_reverted() {
    let mut unfinished = 0;
    for seed in 0..scaled_rounds(6) {
        let Some((bytes, disk, repair)) = planned(seed) else { continue };
        let mut undo = tempfile::tempfile().unwrap();
        repair.write(&as_disk(&disk), Some(undo.try_clone().unwrap()), None).unwrap();
        for crash in crash_states(&bytes, &disk, seed) {
            unfinished += u32::from(crash.disk.to_bytes()[1024 + 0x63] & 0x80 != 0);
            revert(&*crash.disk, &mut undo, false).unwrap();
            assert!(crash.disk.to_bytes() == bytes, "seed {seed}, {:?}", crash.kind);
        }
        assert!(unfinished > 0);
    }
}

/// One sector that is no longer as the repair left it, anywhere in what a revert overwrites: nothing
/// is written unless it is forced.
#[test]
fn revert_of_another_state_is_refused() {
    for seed in 0..scaled_rounds(3) {
        let Some((bytes, disk, repair)) = planned(seed) else { continue };
        let mut undo = tempfile::tempfile().unwrap();
        repair.write(&as_disk(&disk), Some(undo.try_clone().unwrap()), None).unwrap();
        let repaired = contents(&disk);
        let differs = |sector: &usize| {
            let range = sector * 512..(sector + 1) * 512;
            bytes[range.clone()] != repaired[range]
        };
        let sectors: Vec<usize> = (0..bytes.len() / 512).filter(differs).collect();
        assert!(sectors.len() > 2, "seed {seed}");
        for sector in &sectors {
            let mut changed = repaired.clone();
            changed[sector * 512 + 77] ^= 1;
            let (refused, after) =
                with_disk(changed.clone(), |disk| revert(&**disk, &mut undo, false));
            let why = refused.unwrap_err().to_string();
            assert!(why.contains("1 sectors were changed") && why.contains("--force"), "{why}");
            assert!(after == changed, "seed {seed}, sector {sector}");
            let (forced, after) = with_disk(changed, |disk| revert(&**disk, &mut undo, true));
            assert!(forced.is_ok() && after == bytes, "seed {seed}, sector {sector}");
        }
        // Another volume of the same length, and a revert by another file that was cut off.
        let mut other = repaired.clone();
        other[1024 + 0x68] ^= 1;
        let (refused, after) = with_disk(other.clone(), |disk| revert(&**disk, &mut undo, false));
        let why = refused.unwrap_err().to_string();
        assert!(why.contains("another UUID") && after == other, "{why}");
        let mut reverting = repaired;
        reverting[1024 + 0x63] |= 0x80;
        reverting[1024 + 0x188..1024 + 0x190].fill(0xFF);
        let (refused, after) =
            with_disk(reverting.clone(), |disk| revert(&**disk, &mut undo, false));
        let why = refused.unwrap_err().to_string();
        assert!(why.contains("a revert by another file") && after == reverting, "{why}");
    }
}

/// A log in a file of its own: a cut leaves the old volume, or what the file completes.
#[test]
fn cut_repair_with_scratch_file_is_completed_by_it() {
    for seed in 0..scaled_rounds(3) {
        let Some((bytes, disk, repair)) = planned(seed) else { continue };
        let mut scratch = tempfile::tempfile().unwrap();
        repair.write(&as_disk(&disk), None, Some(scratch.try_clone().unwrap())).unwrap();
        let repaired = contents(&disk);
        assert!(is_clean(&repaired), "seed {seed}");
        for crash in crash_states(&bytes, &disk, seed) {
            let now = crash.disk.to_bytes();
            let refused = finish_interrupted_change(&*crash.disk).is_err();
            assert!(refused || now == bytes || now == repaired, "seed {seed}, {:?}", crash.kind);
            revert(&*crash.disk, &mut scratch, false).unwrap();
            assert!(crash.disk.to_bytes() == repaired, "seed {seed}, {:?}", crash.kind);
        }
    }
}

#[test]
fn damaged_undo_file_is_refused() {
    let Some(bytes) = damaged_volume(1) else { return };
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(bytes, 512));
    let repair = plan(&disk, &repairing::options(), &|_, _| {}).unwrap();
    let mut undo = tempfile::tempfile().unwrap();
    repair.write(&disk, Some(undo.try_clone().unwrap()), None).unwrap();
    let mut saved = vec![];
    undo.seek(SeekFrom::Start(0)).unwrap();
    undo.read_to_end(&mut saved).unwrap();
    let before = problems_of(&disk);
    let refuses = |bytes: &[u8]| {
        let mut file: File = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        let refused = revert(&*disk, &mut file, false).unwrap_err().to_string();
        assert!(refused.starts_with("undo file: "), "{refused}");
    };
    for at in [0, 16, 24, 32, 33, 47, saved.len() / 2, saved.len() - 1] {
        let mut wrong = saved.clone();
        wrong[at] ^= 0x10;
        refuses(&wrong);
    }
    // The first format knows no volume.
    let mut first = saved.clone();
    first[14] = b'1';
    refuses(&first);
    refuses(&saved[..saved.len() - 1]);
    refuses(b"");
    assert_eq!(problems_of(&disk), before);
}

fn problems_of(disk: &Arc<dyn Disk>) -> usize {
    check(disk, CheckOptions::default(), &|_, _| {}).unwrap().problems.len()
}

/// A superblock that is zeros comes back from a backup.
#[test]
fn missing_superblock_is_restored() {
    let Some(image) = Image::make(None, "20M", &["-t", "ext4", "-b", "1024"]) else { return };
    let mut bytes = std::fs::read(&image.path).unwrap();
    bytes[1024..2048].fill(0);
    match repairing::repair(&bytes).unwrap() {
        repairing::Repaired::Whole(bytes) => assert!(is_clean(&bytes)),
        repairing::Repaired::Left(why) => panic!("{why}"),
    }
}

/// Returns a volume with an unlinked file in use, as a crash leaves it, and the file's inode: on the
/// list of orphans, or in the file of orphans.
fn volume_with_orphan(features: &str, in_file: bool) -> Option<(Vec<u8>, usize)> {
    let source = tempfile::tempdir().unwrap();
    std::fs::write(source.path().join("gone"), vec![7; 300_000]).unwrap();
    std::fs::write(source.path().join("kept"), vec![8; 30_000]).unwrap();
    let arguments = ["-t", "ext4", "-b", "1024", "-O", features];
    let image = Image::make(Some(source.path()), "16M", &arguments)?;
    let inode_of = |path: &str| -> usize {
        let text = image.debugfs(&format!("stat {path}")).unwrap();
        text.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let orphan = inode_of("/gone");
    image.debugfs_write("unlink /gone")?;
    image.debugfs_write(&format!("sif <{orphan}> links_count 0"))?;
    if !in_file {
        image.debugfs_write(&format!("ssv last_orphan {orphan}"))?;
        return Some((std::fs::read(&image.path).unwrap(), orphan));
    }
    // `orphan_present`, and the number in the first word of the file.
    let file = image.debugfs("stats -h").unwrap();
    let file = file.lines().find_map(|line| line.strip_prefix("Orphan file inode:")).unwrap();
    let blocks = image.debugfs(&format!("blocks <{}>", file.trim())).unwrap();
    let first: usize = blocks.split_whitespace().next().unwrap().parse().unwrap();
    let mut bytes = std::fs::read(&image.path).unwrap();
    bytes[1024 + 0x66] |= 1;
    bytes[first * 1024..first * 1024 + 4].copy_from_slice(&(orphan as u32).to_le_bytes());
    Some((bytes, orphan))
}

/// Orphans are deleted, with their blocks and quotas, and the volume is one that every mount takes.
#[test]
fn orphans_are_deleted_as_by_a_mount() {
    for (features, in_file) in [
        ("quota", false),
        ("^has_journal,^metadata_csum", false),
        ("orphan_file,^metadata_csum", true),
        ("orphan_file,quota,^metadata_csum", true),
    ] {
        let Some((bytes, orphan)) = volume_with_orphan(features, in_file) else { return };
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(bytes.clone(), 512));
        let repair = plan(&disk, &repairing::options(), &|_, _| {}).unwrap();
        let first = &repair.fixes[0];
        assert_eq!(first.problem.what, What::OnOrphanList, "{features}");
        assert_eq!(first.action, "the orphans are deleted, as by a mount", "{features}");
        let Repaired::Whole(repaired) = repairing::repair(&bytes).unwrap() else {
            panic!("{features}: not repaired")
        };
        let image = Image::from_bytes(&repaired);
        let stat = image.debugfs(&format!("stat <{orphan}>")).unwrap();
        assert!(stat.contains("Links: 0") && stat.contains("dtime: 0x"), "{features}: {stat}");
        let disk = Arc::new(MemoryDisk::new(repaired, 512));
        let options = draconis_ext::OpenOptions::default();
        let writing = crate::common::storm::write_options();
        let mounted = draconis_ext::Volume::open_for_writing(disk, options, writing).unwrap();
        let other = mounted.lookup(mounted.root(), b"kept").unwrap();
        assert_eq!(mounted.attributes(other).unwrap().size_bytes, 30_000);
    }
}

/// A list of orphans that leads nowhere is emptied by the fixes.
#[test]
fn damaged_orphan_file_is_emptied() {
    let features = "orphan_file,^metadata_csum";
    let Some((mut bytes, orphan)) = volume_with_orphan(features, true) else { return };
    // The inode's map is none: nothing of it can be freed by a mount.
    let image = Image::from_bytes(&bytes);
    image.debugfs_write(&format!("sif <{orphan}> block[0] 0")).unwrap();
    bytes = std::fs::read(&image.path).unwrap();
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(bytes.clone(), 512));
    let repair = plan(&disk, &repairing::options(), &|_, _| {}).unwrap();
    let actions: Vec<_> = repair.fixes.iter().map(|it| it.action).collect();
    assert!(actions.contains(&"the file is emptied"), "{actions:?}");
    assert!(!actions.contains(&"the orphans are deleted, as by a mount"), "{actions:?}");
    let Repaired::Whole(repaired) = repairing::repair(&bytes).unwrap() else {
        panic!("not repaired")
    };
    let disk = Arc::new(MemoryDisk::new(repaired, 512));
    let writing = crate::common::storm::write_options();
    let options = draconis_ext::OpenOptions::default();
    draconis_ext::Volume::open_for_writing(disk, options, writing).unwrap();
}

/// After a crash with nothing but a journal to replay, `-p` asks nothing.
#[test]
fn replay_of_a_journal_is_safe() {
    let Some(image) = Image::make(None, "16M", &["-t", "ext4", "-b", "1024"]) else { return };
    let new = image.path.with_extension("new");
    std::fs::write(&new, [0; 1024]).unwrap();
    let commands = image.path.with_extension("commands");
    std::fs::write(&commands, format!("jo\njw -b 3000 {}\njc\n", new.display())).unwrap();
    let run = draconis_testkit::judge::tool_command("debugfs")
        .args(["-w", "-f"])
        .args([&commands, &image.path])
        .status();
    assert!(run.unwrap().success());
    let disk: Arc<dyn Disk> = image.memory_disk();
    let repair = plan(&disk, &repairing::options(), &|_, _| {}).unwrap();
    let found: Vec<_> = repair.fixes.iter().map(|it| it.problem.what).collect();
    assert_eq!(found, [What::Unreplayed]);
    assert!(repair.fixes[0].problem.is_preen_ok() && repair.unfixed.is_empty());
}

/// A journal with a hole is one that no mount takes: it is damage, and the repair makes a new one.
#[test]
fn journal_with_a_hole_is_made_anew() {
    for arguments in [&["-t", "ext3", "-b", "1024"][..], &["-t", "ext4", "-b", "1024"]] {
        let Some(image) = Image::make(None, "16M", arguments) else { return };
        // The file is longer than the journal in it: blocks behind it are none of its own.
        image.debugfs_write("punch <8> 500 510").unwrap();
        let bytes = std::fs::read(&image.path).unwrap();
        let mount = |bytes: Vec<u8>| {
            let disk = Arc::new(MemoryDisk::new(bytes, 512));
            let writing = crate::common::storm::write_options();
            let options = draconis_ext::OpenOptions::default();
            draconis_ext::Volume::open_for_writing(disk, options, writing).map(drop)
        };
        assert!(mount(bytes.clone()).is_err());
        assert!(!is_clean(&bytes), "{arguments:?}");
        let Repaired::Whole(repaired) = repairing::repair(&bytes).unwrap() else {
            panic!("not repaired")
        };
        mount(repaired).unwrap();
    }
}

/// Whatever the bytes are: a repair ends, and one that is complete leaves a silent check and
/// nothing for a second one.
#[test]
#[ignore = "long: a minute: hundreds of volumes"]
fn wild_damage_is_repaired_or_left() {
    let (mut whole, mut left) = (0, 0);
    for seed in 0..scaled_rounds(60) {
        let Some(mut bytes) = damaged_volume(seed) else { return };
        let mut random = Random::new(seed ^ 0x5EED);
        let flips = 1 << random.next_below(10);
        let reach = [4096, 200 * 1024, bytes.len() as u64][random.next_below(3) as usize];
        for _ in 0..flips {
            let at = 1024 + random.next_below(reach - 1024) as usize;
            bytes[at] = match random.next_below(3) {
                0 => 0,
                1 => 0xFF,
                _ => random.next_below(256) as u8,
            };
        }
        match repairing::repair(&bytes) {
            Ok(repairing::Repaired::Whole(bytes)) => {
                assert!(is_clean(&bytes), "seed {seed}");
                whole += 1;
            }
            Ok(repairing::Repaired::Left(_)) => left += 1,
            // What only e2fsck sees is counted by the test of corrupted features.
            Err(why) if why.contains("e2fsck says") => whole += 1,
            Err(why) => panic!("seed {seed}: {why}"),
        }
    }
    eprintln!("{whole} repaired, {left} left");
    assert!(whole > 5, "{whole} repaired, {left} left");
}

/// Names of files without one are those that directories still have behind others, if they are sure.
#[test]
fn files_without_a_name_get_their_removed_one() {
    for arguments in [
        &["-t", "ext2", "-b", "1024"][..],
        &["-t", "ext4", "-b", "4096"],
        &["-t", "ext4", "-b", "1024", "-O", "^metadata_csum"],
    ] {
        let source = tempfile::tempdir().unwrap();
        for dir in ["one", "other"] {
            std::fs::create_dir(source.path().join(dir)).unwrap();
            for nth in 0..8 {
                let path = source.path().join(dir).join(format!("{dir}-{nth}"));
                std::fs::write(path, format!("{dir} {nth}")).unwrap();
            }
        }
        let Some(image) = Image::make(Some(source.path()), "8M", arguments) else { return };
        let number = |path: &str| -> u32 {
            let text = image.debugfs(&format!("stat {path}")).unwrap();
            text.split_whitespace().nth(1).unwrap().parse().unwrap()
        };
        let (two, five) = (number("/one/one-2"), number("/one/one-5"));
        image.debugfs_write("ln /one/one-5 /other/another-name").unwrap();
        for path in ["/one/one-2", "/one/one-5", "/other/another-name"] {
            image.debugfs_write(&format!("unlink {path}")).unwrap();
        }
        let disk: Arc<dyn Disk> = image.memory_disk();
        let repair = plan(&disk, &repairing::options(), &|_, _| {}).unwrap();
        assert!(repair.unfixed.is_empty(), "{:?}", repair.unfixed);
        repair.write(&disk, None, None).unwrap();
        let mut bytes = vec![0; 8 << 20];
        let whole = Extent::new(0, bytes.len() as u64);
        disk.read_now(whole, Block::private(8 << 20)).unwrap().copy_out(0, &mut bytes);
        let repaired = Image::from_bytes(&bytes);
        assert!(common::run_tool("e2fsck", &["-fn", repaired.path()]).is_some());
        let names = repaired.debugfs("ls -l /lost+found").unwrap();
        // Two names of one inode: neither is sure.
        let has = |name: &str| names.split_whitespace().any(|it| it == name);
        assert!(has("one-2") && has(&format!("#{five}")), "{arguments:?}: {names}");
        assert!(!has(&format!("#{two}")) && !has("another-name"), "{names}");
        assert_eq!(repaired.debugfs("cat /lost+found/one-2").unwrap(), "one 2");
    }
}

/// A volume was formatted over another one: its tables still have the other's inodes.
#[test]
fn inodes_of_an_earlier_format_stay_unused() {
    let source = tempfile::tempdir().unwrap();
    let [old, new] = ["old", "new"].map(|name| source.path().join(name));
    for (dir, count) in [(&old, 400), (&new, 20)] {
        std::fs::create_dir(dir).unwrap();
        for nth in 0..count {
            std::fs::write(dir.join(format!("file {nth}")), format!("{nth}\n")).unwrap();
        }
    }
    let arguments = ["-t", "ext4", "-b", "1024", "-N", "1024"];
    let Some(image) = Image::make(Some(&old), "24M", &arguments) else { return };
    let arguments = [&arguments[..], &["-E", "lazy_itable_init=1,nodiscard"]].concat();
    judge::mke2fs(&image.path, Some(&new), &arguments, "24M");
    let mut bytes = std::fs::read(&image.path).unwrap();
    // All descriptors; the backups are whole.
    bytes[2048..2048 + 3 * 64].fill(0);
    let Repaired::Whole(repaired) = repairing::repair(&bytes).unwrap() else {
        panic!("not repaired")
    };
    let image = Image::from_bytes(&repaired);
    let found = image.debugfs("ls -p /lost+found").unwrap();
    // Beside the two of every directory, and unused entries.
    let names = found.lines().filter(|line| line.starts_with('/') && !line.starts_with("/0/"));
    assert_eq!(names.count(), 2, "{found}");
    assert_eq!(image.debugfs("cat \"/file 19\"").unwrap(), "19\n");
}
