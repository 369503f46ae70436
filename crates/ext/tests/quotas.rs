//! Quotas: inherited projects, and corrupt quota files.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::common::{Image, run_tool};
use draconis_device::{MemoryDisk, Random};
use draconis_ext::{
    AccessTimes, Cookie, Error, InodeNumber, NewNode, OpenOptions, RenameMode, Result, Volume,
    WriteOptions,
};
use draconis_types::{AttributeChange, FallocateMode, FileType, Time};

const ALL_QUOTA_TYPES: &str = "quotatype=usrquota:grpquota:prjquota";

fn open(disk: &Arc<MemoryDisk>) -> Result<Volume> {
    let seconds = AtomicI64::new(1_700_000_000);
    let clock = move || Time { seconds: seconds.fetch_add(1, Ordering::Relaxed), nanoseconds: 0 };
    let writing = WriteOptions {
        clock: Arc::new(clock),
        dirty_bytes: 8 << 20,
        atime: AccessTimes::Never,
        discard: false,
    };
    Volume::open_for_writing(disk.clone(), OpenOptions::default(), writing)
}

fn disk_of_image(image: &Image) -> Arc<MemoryDisk> {
    image.memory_disk()
}

const fn new_node(kind: FileType, uid: u32) -> NewNode<'static> {
    NewNode { kind, mode: 0o755, uid, gid: uid, device: (0, 0), target: b"" }
}

fn create_node(volume: &Volume, dir: InodeNumber, name: &str, kind: FileType) -> InodeNumber {
    volume.create(dir, name.as_bytes(), &new_node(kind, 3)).unwrap()
}

#[test]
fn project_ids_are_inherited_and_not_crossed() {
    let arguments = ["-t", "ext4", "-b", "1024", "-O", "quota,project", "-E", ALL_QUOTA_TYPES];
    let Some(image) = Image::make(None, "32M", &arguments) else { return };
    {
        let Some(mount) = image.mount_writable() else { return };
        for (name, project) in [("seven", "7"), ("eight", "8")] {
            let dir = mount.path().join(name);
            std::fs::create_dir(&dir).unwrap();
            let done = Command::new("chattr").args(["-p", project, "+P"]).arg(&dir).status();
            if !done.is_ok_and(|status| status.success()) {
                eprintln!("skipped: chattr sets no projects here");
                return;
            }
        }
    }
    let disk = disk_of_image(&image);
    let volume = open(&disk).unwrap();
    let root = volume.root();
    let seven = volume.lookup(root, b"seven").unwrap();
    let eight = volume.lookup(root, b"eight").unwrap();
    let below = create_node(&volume, seven, "below", FileType::Directory);
    let file = create_node(&volume, below, "file", FileType::File);
    volume.write(file, 0, &[7; 50_000]).unwrap();
    for inode in [below, file] {
        assert_eq!(volume.inode(inode).unwrap().project(), 7);
    }
    let rename = |from, name: &[u8], to| volume.rename(from, name, to, name, RenameMode::Replace);
    assert_eq!(rename(below, b"file", eight), Err(Error::OtherProject));
    assert_eq!(volume.link(file, eight, b"file"), Err(Error::OtherProject));
    rename(below, b"file", root).unwrap();
    assert_eq!(volume.inode(file).unwrap().project(), 7, "it takes its project along");
    let other = create_node(&volume, root, "other", FileType::File);
    assert_eq!(volume.inode(other).unwrap().project(), 0);
    assert_eq!(rename(root, b"other", seven), Err(Error::OtherProject));
    volume.close().unwrap();
    drop(volume);
    let image = Image::from_bytes(&Arc::try_unwrap(disk).unwrap().into_bytes());
    assert!(run_tool("e2fsck", &["-fn", image.path()]).is_some());
    let Some(mount) = image.mount_writable() else { return };
    let done =
        Command::new("lsattr").args(["-p", "-d"]).arg(mount.path().join("seven/below")).output();
    let shown = String::from_utf8_lossy(&done.unwrap().stdout).into_owned();
    assert!(shown.trim_start().starts_with("7 ") && shown.contains('P'), "{shown}");
    std::fs::write(mount.path().join("seven/below/by the kernel"), b"x").unwrap();
    drop(mount);
    assert!(run_tool("e2fsck", &["-fn", image.path()]).is_some());
}

/// Sums space and inodes by user over all files below `dir`.
fn sum_usage_of_inodes(volume: &Volume, dir: InodeNumber, sums: &mut BTreeMap<u32, [u64; 2]>) {
    let mut below = vec![dir];
    volume
        .entries(dir, Cookie::default(), false, |entry| {
            below.push(entry.unwrap().inode);
            true
        })
        .unwrap();
    for inode in below {
        let attributes = volume.attributes(inode).unwrap();
        if inode != dir && attributes.kind == FileType::Directory {
            sum_usage_of_inodes(volume, inode, sums);
            continue;
        }
        let sum = sums.entry(attributes.uid).or_default();
        *sum = [sum[0] + attributes.blocks_512 * 512, sum[1] + 1];
    }
}

/// Returns the same from the quota file.
fn read_usage_from_quota_file(image: &Image) -> BTreeMap<u32, [u64; 2]> {
    let listed = image.debugfs("list_quota user").unwrap();
    let numbers = listed.lines().filter_map(|line| {
        let all: Vec<u64> = line.split_whitespace().map_while(|it| it.parse().ok()).collect();
        match all[..] {
            [id, bytes, _, _, inodes, _, _] => Some((id as u32, [bytes, inodes])),
            _ => None,
        }
    });
    numbers.filter(|(_, sums)| *sums != [0, 0]).collect()
}

/// `e2fsck` 1.47.0 cannot check this: it counts blocks, the kernel counts clusters.
#[test]
fn bigalloc_quota_matches_inodes() {
    let arguments = ["-t", "ext4", "-b", "1024", "-O", "bigalloc,quota", "-C", "8192"];
    let Some(image) = Image::make(None, "64M", &arguments) else { return };
    let disk = disk_of_image(&image);
    let volume = open(&disk).unwrap();
    let mut random = Random::new(11);
    for nth in 0..300 {
        let uid = random.next_below(20) as u32;
        let name = format!("{}", random.next_below(100));
        let made = volume.create(volume.root(), name.as_bytes(), &new_node(FileType::File, uid));
        let file = made.or_else(|_| volume.lookup(volume.root(), name.as_bytes())).unwrap();
        volume.write(file, random.next_below(500_000), &[1; 9000]).unwrap();
        let size_bytes = Some(random.next_below(300_000));
        let change = AttributeChange { uid: Some(uid), size_bytes, ..AttributeChange::default() };
        volume.set_attributes(file, &change).unwrap();
        let hole = FallocateMode::PunchHole;
        volume
            .fallocate(file, random.next_below(100_000), 1 + random.next_below(50_000), hole)
            .unwrap();
        if nth % 4 == 0 {
            volume.unlink(volume.root(), name.as_bytes()).unwrap();
        }
    }
    volume.close().unwrap();
    drop(volume);
    let image = Image::from_bytes(&Arc::try_unwrap(disk).unwrap().into_bytes());
    let same = |image: &Image| {
        let volume = image.open();
        let mut sums = BTreeMap::new();
        sum_usage_of_inodes(&volume, volume.root(), &mut sums);
        assert_eq!(read_usage_from_quota_file(image), sums);
    };
    same(&image);
    {
        let Some(mount) = image.mount_writable() else { return };
        for nth in 0..20 {
            let file = mount.path().join(format!("by the kernel {nth}"));
            std::fs::write(&file, vec![7; nth * 3000]).unwrap();
            std::os::unix::fs::chown(&file, Some(nth as u32), None).unwrap();
        }
    }
    same(&image);
}

/// Makes all changes that affect quotas; only termination matters.
fn change_everything_with_quota(volume: &Volume, random: &mut Random) {
    for nth in 0..30u32 {
        let uid = match random.next_below(3) {
            0 => 0,
            1 => random.next_below(40) as u32,
            _ => random.next_below(1 << 32) as u32,
        };
        let name = format!("made {}", random.next_below(20));
        let made = volume.create(volume.root(), name.as_bytes(), &new_node(FileType::File, uid));
        if let Ok(file) = made.or_else(|_| volume.lookup(volume.root(), name.as_bytes())) {
            let _ = volume.write(file, u64::from(nth) * 5000, &[1; 3000]);
            let gid = Some(random.next_below(1000) as u32);
            let change = AttributeChange { uid: Some(uid), gid, ..AttributeChange::default() };
            let _ = volume.set_attributes(file, &change);
        }
        if nth % 3 == 0 {
            let _ = volume.unlink(volume.root(), name.as_bytes());
        }
        if nth % 7 == 0 {
            let _ = volume.sync();
        }
    }
    let _ = volume.close();
}

#[test]
fn changes_terminate_with_corrupt_quota_files() {
    let features = "quota,^has_journal,^metadata_csum";
    let arguments = ["-t", "ext4", "-b", "1024", "-N", "64", "-O", features];
    let Some(image) = Image::make(None, "2M", &arguments) else { return };
    {
        // Some entries, and blocks with free entries.
        let disk = disk_of_image(&image);
        let volume = open(&disk).unwrap();
        for uid in 1..40 {
            create_node(&volume, volume.root(), &format!("{uid}"), FileType::File);
            let file = volume.lookup(volume.root(), format!("{uid}").as_bytes()).unwrap();
            let change = AttributeChange { uid: Some(uid), ..AttributeChange::default() };
            volume.set_attributes(file, &change).unwrap();
        }
        volume.close().unwrap();
        drop(volume);
        std::fs::write(&image.path, Arc::try_unwrap(disk).unwrap().into_bytes()).unwrap();
    }
    let blocks: Vec<u64> = ["blocks <3>", "blocks <4>"]
        .iter()
        .filter_map(|request| image.debugfs(request))
        .flat_map(|out| out.split_whitespace().filter_map(|it| it.parse().ok()).collect::<Vec<_>>())
        .collect();
    assert!(blocks.len() > 10, "{blocks:?}");
    let sound = std::fs::read(&image.path).unwrap();
    let mut refused = 0;
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let mut bytes = sound.clone();
        for _ in 0..=random.next_below(4) {
            let block = blocks[random.next_below(blocks.len() as u64) as usize] as usize;
            let words: Vec<usize> = (0..256)
                .map(|nth| block * 1024 + nth * 4)
                .filter(|at| bytes[*at..*at + 4] != [0; 4])
                .collect();
            let at = match random.next_below(3) {
                0 => block * 1024 + random.next_below(256) as usize * 4,
                _ if words.is_empty() => block * 1024,
                _ => words[random.next_below(words.len() as u64) as usize],
            };
            let word = match random.next_below(3) {
                0 => random.next_below(1 << 32) as u32,
                _ => random.next_below(14) as u32,
            };
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        let disk = Arc::new(MemoryDisk::new(bytes, 512));
        match open(&disk) {
            Ok(volume) => change_everything_with_quota(&volume, &mut random),
            Err(error) => {
                assert!(matches!(error, Error::Corrupt { .. }), "seed {seed}: {error}");
                refused += 1;
            }
        }
    }
    assert!(refused > 0, "no header was spoilt");
}
