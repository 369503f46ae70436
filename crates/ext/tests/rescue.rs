//! Rescue: what can be read is copied, what cannot is named.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::common::spoil::{
    base_images, build_small_tree, corrupt_field, metadata_ranges, scaled_rounds,
};
use crate::common::{Image, readable_names, report_skipped};
use draconis_device::{
    Disk, Error as DeviceError, Extent, MemoryDisk, Pending, Random, ReadAnswer, Refused, Urgency,
};
use draconis_ext::repair::{RepairOptions, plan};
use draconis_ext::rescue::{Loss, Rescue, UNNAMED};
use draconis_ext::{
    AccessTimes, BlockLocation, FileType, InodeNumber, OpenOptions, SuperblockPlace, Time, Volume,
    WriteOptions,
};
use draconis_types::Block;

/// Bytes of each file that are compared; some are long and sparse.
const COMPARED_BYTES: u64 = 1 << 20;
const NOW: Time = Time { seconds: 1_800_000_000, nanoseconds: 0 };

/// A change of an image.
type Damage<'a> = &'a dyn Fn(&mut Vec<u8>);
/// Contents of files by their paths.
pub type Contents = BTreeMap<Vec<u8>, Vec<u8>>;

pub struct Rescued {
    pub files: Contents,
    pub missing: BTreeMap<Vec<u8>, Vec<Range<u64>>>,
    pub losses: Vec<Loss>,
    paths: Vec<Vec<u8>>,
}

fn disk_of(bytes: &[u8]) -> Arc<dyn Disk> {
    Arc::new(MemoryDisk::new(bytes.to_vec(), 512))
}

fn rescue_disk(disk: Arc<dyn Disk>) -> draconis_ext::Result<Rescued> {
    let place = SuperblockPlace::default();
    let rescue = Rescue::scan(disk, OpenOptions::default(), &place, &|_, _| {})?;
    let (mut files, mut missing) = (Contents::new(), BTreeMap::new());
    let mut order = rescue.order().to_vec();
    for at in &order {
        let item = &rescue.items()[*at];
        let _ = rescue.xattrs(item);
        let Some(attributes) = &item.attributes else { continue };
        if attributes.kind == FileType::Symlink {
            let _ = rescue.link_target(item);
        }
        if attributes.kind != FileType::File {
            continue;
        }
        let mut bytes = vec![0; attributes.size_bytes.min(COMPARED_BYTES) as usize];
        let mut end = 0;
        let contents = rescue.read(item, &mut |offset, data| {
            assert!(offset >= end, "pieces are in order");
            end = offset + data.len() as u64;
            assert!(end <= attributes.size_bytes);
            let from = (offset as usize).min(bytes.len());
            let to = (end as usize).min(bytes.len());
            bytes[from..to].copy_from_slice(&data[..to - from]);
            true
        });
        assert!(contents.missing.windows(2).all(|pair| pair[0].end < pair[1].start));
        if !contents.missing.is_empty() || contents.reason.is_some() {
            missing.insert(item.path.clone(), contents.missing);
        }
        files.insert(item.path.clone(), bytes);
    }
    // Each item is copied once, and no two have one path.
    let mut paths: Vec<_> = order.iter().map(|at| rescue.items()[*at].path.clone()).collect();
    order.sort_unstable();
    assert_eq!(order, (0..rescue.items().len()).collect::<Vec<_>>());
    paths.sort();
    assert!(paths.windows(2).all(|pair| pair[0] != pair[1]), "a path twice");
    Ok(Rescued { files, missing, losses: rescue.losses().to_vec(), paths })
}

pub fn rescue(bytes: &[u8]) -> draconis_ext::Result<Rescued> {
    rescue_disk(disk_of(bytes))
}

/// Reads all that an ordinary reader can read.
fn readable_files(disk: Arc<dyn Disk>) -> Contents {
    let mut found = Contents::new();
    let place = SuperblockPlace::default();
    let opened = Volume::open_damaged(disk, OpenOptions::default(), &place);
    let Ok(volume) = opened else { return found };
    let mut stack = vec![(vec![], InodeNumber::ROOT)];
    let mut budget = 3000;
    while let Some((path, dir)) = stack.pop() {
        for (name, inode) in readable_names(&volume, dir) {
            budget -= 1;
            if budget == 0 {
                return found;
            }
            let path = if path.is_empty() { name } else { [&path[..], b"/", &name].concat() };
            let Ok(node) = volume.inode(inode) else { continue };
            match node.kind {
                FileType::Directory if path.len() < 200 => stack.push((path, inode)),
                FileType::File => {
                    let mut bytes = vec![0; node.size_bytes.min(COMPARED_BYTES) as usize];
                    if volume.read_into(inode, 0, &mut bytes) == Ok(bytes.len()) {
                        found.insert(path, bytes);
                    }
                }
                _ => {}
            }
        }
    }
    found
}

/// Volumes with at least two groups.
fn volumes_with_backups() -> Vec<(String, Vec<u8>)> {
    let source = tempfile::tempdir().unwrap();
    build_small_tree(source.path());
    let makes: [&[&str]; 6] = [
        &["-t", "ext2", "-b", "1024"],
        &["-t", "ext3", "-b", "1024"],
        &["-t", "ext4", "-b", "1024", "-O", "metadata_csum,inline_data"],
        &["-t", "ext4", "-b", "2048"],
        &["-t", "ext4", "-b", "1024", "-O", "meta_bg,^resize_inode,^flex_bg"],
        &["-t", "ext4", "-b", "2048", "-O", "^metadata_csum,^uninit_bg"],
    ];
    let make = |arguments: &&[&str]| {
        let image = Image::make(Some(source.path()), "36m", arguments)?;
        Some((arguments.join(" "), std::fs::read(&image.path).unwrap()))
    };
    makes.iter().filter_map(make).collect()
}

fn le32(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

/// Returns block size and the range of the first descriptor block.
fn first_descriptors(bytes: &[u8]) -> (usize, Range<usize>) {
    let block = 1024 << le32(bytes, 1024 + 0x18);
    let at = block * (le32(bytes, 1024 + 0x14) + 1);
    (block, at..at + block)
}

/// Flips each `stride`th bit of superblock and descriptors of volumes without backups: every file is
/// copied, and an ordinary reader reads them all.
fn flip_bits_of_single_groups(stride: usize) {
    let source = tempfile::tempdir().unwrap();
    build_small_tree(source.path());
    for arguments in [
        &["-t", "ext4", "-b", "1024", "-O", "metadata_csum,^resize_inode"][..],
        &["-t", "ext4", "-b", "4096", "-O", "metadata_csum,64bit"],
        &["-t", "ext4", "-b", "4096", "-O", "metadata_csum,^64bit,inline_data"],
    ] {
        let Some(image) = Image::make(Some(source.path()), "8M", arguments) else { return };
        let sound = std::fs::read(&image.path).unwrap();
        let all = readable_files(disk_of(&sound));
        assert!(all.len() > 5);
        let (_, descriptors) = first_descriptors(&sound);
        let descriptor = descriptors.start..descriptors.start + 32;
        for bit in (1024..2048).chain(descriptor).flat_map(|at| at * 8..at * 8 + 8) {
            if !bit.is_multiple_of(stride) {
                continue;
            }
            let mut bytes = sound.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let what = format!("{arguments:?}, bit {} of byte {}", bit % 8, bit / 8);
            let rescued = rescue(&bytes).unwrap_or_else(|error| panic!("{what}: {error}"));
            let is_copied = |(path, contents): (&Vec<u8>, &Vec<u8>)| {
                rescued.files.get(path).is_some_and(|found| found == contents)
            };
            assert!(all.iter().all(is_copied), "{what}: not all is rescued");
            assert!(readable_files(disk_of(&bytes)) == all, "{what}: not all is read");
        }
    }
}

#[test]
fn one_flipped_bit_without_a_backup_costs_nothing() {
    flip_bits_of_single_groups(61);
}

#[test]
#[ignore = "long: a minute: thousands of bits"]
fn no_flipped_bit_without_a_backup_costs_anything() {
    flip_bits_of_single_groups(11);
}

#[test]
fn whole_volumes_are_copied_whole() {
    let others = base_images().iter().map(|bytes| ("small".to_owned(), bytes.clone()));
    for (name, bytes) in volumes_with_backups().into_iter().chain(others) {
        let all = readable_files(disk_of(&bytes));
        assert!(all.len() > 100, "{name}");
        let found = rescue(&bytes).unwrap();
        assert_eq!(found.losses, [], "{name}");
        assert!(found.missing.is_empty(), "{name}: {:?}", found.missing);
        assert!(found.files == all, "{name}");
    }
}

#[test]
fn backups_stand_in_for_superblock_and_descriptors() {
    for (name, bytes) in volumes_with_backups() {
        let all = readable_files(disk_of(&bytes));
        let (_, descriptors) = first_descriptors(&bytes);
        let zero_super = |bytes: &mut Vec<u8>| bytes[1024..2048].fill(0);
        let flip_super = |bytes: &mut Vec<u8>| bytes[1024 + 0x20] ^= 0xff;
        let zero_groups = |bytes: &mut Vec<u8>| bytes[descriptors.clone()].fill(0);
        let fill_groups = |bytes: &mut Vec<u8>| bytes[descriptors.clone()].fill(0x5a);
        // Valid for a volume without checksums, and wrong.
        let shift_table = |bytes: &mut Vec<u8>| {
            let at = descriptors.start + 8;
            let table = le32(bytes, at) as u32 + 40;
            bytes[at..at + 4].copy_from_slice(&table.to_le_bytes());
        };
        let damages: [(&str, Vec<Damage<'_>>); 6] = [
            ("no superblock", vec![&zero_super]),
            ("wrong superblock", vec![&flip_super]),
            ("no descriptors", vec![&zero_groups]),
            ("no superblock and wrong descriptors", vec![&zero_super, &fill_groups]),
            ("descriptors of elsewhere", vec![&shift_table]),
            ("both of elsewhere", vec![&flip_super, &shift_table]),
        ];
        for (damage, steps) in damages {
            let mut damaged = bytes.clone();
            steps.iter().for_each(|step| step(&mut damaged));
            assert!(readable_files(disk_of(&damaged)) == all, "{name}, {damage}: read");
            let found = rescue(&damaged).unwrap();
            assert!(found.files == all, "{name}, {damage}: {:?}", found.losses);
            assert!(found.missing.is_empty() && found.losses.is_empty(), "{name}, {damage}");
        }
        // The place of a backup, by hand: that of group 1.
        let (block, _) = first_descriptors(&bytes);
        let backup = le32(&bytes, 1024 + 0x14) + le32(&bytes, 1024 + 0x20);
        let open = |block: usize, block_bytes: usize| {
            let place = SuperblockPlace {
                block: Some(block as u64),
                block_bytes: Some(block_bytes as u32),
            };
            Volume::open_damaged(disk_of(&bytes), OpenOptions::default(), &place)
        };
        assert!(open(backup, block).is_ok(), "{name}");
        let error = open(backup + 1, block).unwrap_err().to_string();
        assert!(error.contains("no valid backup there"), "{error}");
        assert!(open(backup, block * 2).is_err(), "{name}");
    }
}

/// What was committed is in the journal alone, and the superblock that says so is lost.
#[test]
fn journal_is_replayed_without_the_superblock_that_asks_for_it() {
    for (name, bytes) in volumes_with_backups() {
        let memory = Arc::new(MemoryDisk::new(bytes, 512));
        let clock = Arc::new(|| NOW);
        let writing =
            WriteOptions { clock, dirty_bytes: 8 << 20, atime: AccessTimes::Never, discard: false };
        let volume =
            Volume::open_for_writing(memory.clone(), OpenOptions::default(), writing).unwrap();
        if volume.superblock().journal.is_none() {
            continue;
        }
        let new = draconis_ext::NewNode {
            kind: FileType::File,
            mode: 0o644,
            uid: 0,
            gid: 0,
            device: (0, 0),
            target: b"",
        };
        let file = volume.create(InodeNumber::ROOT, b"committed", &new).unwrap();
        volume.write(file, 0, b"in the journal").unwrap();
        volume.sync().unwrap();
        let len = memory.properties().len_bytes;
        let whole = memory.read_now(Extent::new(0, len), Block::private(len as usize)).unwrap();
        let mut bytes = whole.into_private().to_vec();
        bytes[1024..2048].fill(0);
        let is_there = |disk: Arc<dyn Disk>| {
            readable_files(disk).get(&b"committed"[..]).map(Vec::as_slice)
                == Some(b"in the journal")
        };
        assert!(is_there(disk_of(&bytes)), "{name}: read");
        let disk = disk_of(&bytes);
        let options = RepairOptions {
            superblock: SuperblockPlace::default(),
            check: Default::default(),
            now: NOW,
            max_change_bytes: 64 << 20,
        };
        let repair = plan(&disk, &options, &|_, _| {}).unwrap();
        assert!(repair.unfixed.is_empty(), "{name}: {:?}", repair.unfixed);
        repair.write(&disk, None, None).unwrap();
        assert!(is_there(disk), "{name}: repair");
    }
}

/// Returns the blocks of a file or directory.
fn blocks_of(bytes: &[u8], path: &[u8]) -> Vec<Range<usize>> {
    let volume = Volume::open(disk_of(bytes), OpenOptions::default()).unwrap();
    let inode = volume.resolve(volume.root(), path, draconis_ext::Follow::No).unwrap();
    let block = volume.space().block_bytes as usize;
    let runs = volume.map(inode, 0).unwrap().into_iter();
    let runs = runs.filter_map(|run| match run.location {
        BlockLocation::Mapped(first) => Some((first.0 as usize, run.blocks as usize)),
        _ => None,
    });
    runs.map(|(first, blocks)| first * block..(first + blocks) * block).collect()
}

#[test]
fn files_of_a_lost_directory_are_in_lost_and_found() {
    for (name, bytes) in volumes_with_backups() {
        let all = readable_files(disk_of(&bytes));
        let mut damaged = bytes.clone();
        for range in blocks_of(&bytes, b"/") {
            damaged[range].fill(0);
        }
        let found = rescue(&damaged).unwrap();
        assert!(found.missing.is_empty(), "{name}");
        let mut contents: Vec<&Vec<u8>> = found.files.values().collect();
        let mut wanted: Vec<&Vec<u8>> = all.values().collect();
        // A file that has also a name in the root has that path no more.
        contents.sort();
        contents.dedup();
        wanted.sort();
        wanted.dedup();
        assert!(contents == wanted, "{name}: {:?}", found.files.keys());
        let deep = found.files.keys().filter(|path| {
            path.starts_with(b"lost+found/#") && path.ends_with(b"a somewhat longer name 7")
        });
        assert_eq!(deep.count(), 1, "{name}");
        let empty = found.paths.iter().filter(|path| path.ends_with(b"/below/it"));
        assert_eq!(empty.count(), 1, "{name}: {:?}", found.paths);
        assert!(found.losses.iter().any(|loss| loss.what == UNNAMED), "{name}");
        assert!(found.losses.iter().any(|it| it.path.is_empty() && it.what.contains("director")));
    }
}

/// Returns the fifth entry of a block of a directory, if it has so many.
fn fifth_entry(block: &[u8]) -> Option<usize> {
    let mut at = 0;
    for _ in 0..5 {
        let len = usize::from(u16::from_le_bytes([block[at + 4], block[at + 5]]));
        at += len.max(1);
        if at + 12 >= block.len() || le32(block, at) == 0 {
            return None;
        }
    }
    Some(at)
}

#[test]
fn broken_entry_costs_its_own_name() {
    for (name, bytes) in volumes_with_backups() {
        let (block, _) = first_descriptors(&bytes);
        let blocks = blocks_of(&bytes, b"/many").into_iter().flat_map(|it| it.step_by(block));
        let mut entries = blocks.filter_map(|at| Some(at + fifth_entry(&bytes[at..at + block])?));
        let broken = entries.next().unwrap();
        let mut damaged = bytes.clone();
        damaged[broken + 4..broken + 6].copy_from_slice(&7u16.to_le_bytes());
        let names = |found: &Rescued| -> Vec<Vec<u8>> {
            found.paths.iter().filter(|it| it.starts_with(b"many/")).cloned().collect()
        };
        let (all, found) = (rescue(&bytes).unwrap(), rescue(&damaged).unwrap());
        let (all, left) = (names(&all), names(&found));
        let lost = all.iter().filter(|path| !left.contains(path)).count();
        assert_eq!((lost, left.len()), (1, all.len() - 1), "{name}");
        assert!(found.losses.iter().any(|loss| loss.path == b"many"), "{name}");
    }
}

/// A disk with sectors that cannot be read.
struct WithBadSectors {
    disk: MemoryDisk,
    bad: Vec<Range<u64>>,
}

impl draconis_device::ForwardingDisk for WithBadSectors {
    type Inner = MemoryDisk;

    fn inner_disk(&self) -> &MemoryDisk {
        &self.disk
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        let end = at.start_bytes + at.len_bytes;
        if self.bad.iter().any(|bad| bad.start < end && at.start_bytes < bad.end) {
            let errno = rustix::io::Errno::IO;
            let error = DeviceError::Io { what: "read", extent: at, errno };
            return Pending::ready(Err(Refused { payload: Some(into), error }));
        }
        Disk::read(&self.disk, at, into, urgency)
    }
}

#[test]
fn bad_sectors_cost_their_own_bytes() {
    for (name, bytes) in volumes_with_backups() {
        let all = readable_files(disk_of(&bytes));
        let ranges = blocks_of(&bytes, b"/f90000");
        let start = ranges[0].start as u64;
        let bad = vec![start + 512..start + 1024, start + 5120..start + 5632];
        let disk = WithBadSectors { disk: MemoryDisk::new(bytes.clone(), 512), bad };
        let found = rescue_disk(Arc::new(disk)).unwrap();
        let lost = &found.missing[&b"f90000"[..]];
        assert_eq!(lost, &[512..1024, 5120..5632], "{name}");
        for (path, wanted) in &all {
            let (mut wanted, got) = (wanted.clone(), &found.files[path]);
            if path == b"f90000" {
                lost.iter().for_each(|it| wanted[it.start as usize..it.end as usize].fill(0));
            }
            assert!(*got == wanted, "{name}: {}", path.escape_ascii());
        }
        assert_eq!(found.missing.len(), 1, "{name}");
        // Sectors of metadata: the superblock, a directory.
        let mut bad: Vec<Range<u64>> =
            blocks_of(&bytes, b"/many").iter().map(|it| it.start as u64..it.end as u64).collect();
        bad.push(1024..1536);
        let disk = WithBadSectors { disk: MemoryDisk::new(bytes.clone(), 512), bad };
        let found = rescue_disk(Arc::new(disk)).unwrap();
        let others = all.iter().filter(|(path, _)| !path.starts_with(b"many/"));
        for (path, wanted) in others {
            assert!(found.files.get(path) == Some(wanted), "{name}: {}", path.escape_ascii());
        }
        assert!(found.losses.iter().any(|loss| loss.path == b"many"), "{name}");
    }
}

#[test]
fn damaged_maps_cost_what_they_map() {
    for (name, bytes) in volumes_with_backups() {
        let mut damaged = bytes.clone();
        let volume = Volume::open(disk_of(&bytes), OpenOptions::default()).unwrap();
        if volume.superblock().kind() == "ext4" {
            continue;
        }
        // The indirect block of a file of 90,000 bytes: it is behind the twelfth data block.
        let data: usize = blocks_of(&bytes, b"/f90000").iter().map(|range| range.len()).sum();
        let image = Image::from_bytes(&bytes);
        let Some(said) = image.debugfs("blocks /f90000") else {
            report_skipped("debugfs is missing");
            return;
        };
        let block = volume.space().block_bytes as usize;
        let numbers: Vec<usize> =
            said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        assert!(numbers.len() > data / block, "{said}");
        let indirect = numbers[12] * block;
        damaged[indirect..indirect + block].fill(0xff);
        let found = rescue(&damaged).unwrap();
        let lost = &found.missing[&b"f90000"[..]];
        assert!(lost.len() == 1 && lost[0] == (12 * block as u64..90_000), "{name}: {lost:?}");
        assert!(found.files[&b"f90000"[..]][..12 * block] == bytes_of(&bytes)[..12 * block]);
    }
}

fn bytes_of(bytes: &[u8]) -> Vec<u8> {
    readable_files(disk_of(bytes)).remove(&b"f90000"[..]).unwrap()
}

/// Files that an ordinary reader reads are rescued with the same bytes, with any field corrupt.
#[test]
fn nothing_that_can_be_read_is_left_out() {
    let bases = base_images();
    let mut random = Random::new(1);
    for nth in 0..scaled_rounds(400) {
        let Some(base) = bases.get(nth as usize % bases.len().max(1)) else { return };
        let mut image = base.clone();
        let ranges = metadata_ranges(base);
        for _ in 0..1 + random.next_below(4) {
            let range = ranges[random.next_below(ranges.len() as u64) as usize].clone();
            corrupt_field(&mut image, range, &mut random);
        }
        let all = readable_files(disk_of(&image));
        let found = match rescue(&image) {
            Ok(found) => found,
            Err(error) => {
                assert!(all.is_empty(), "{nth}: {error}");
                continue;
            }
        };
        for (path, wanted) in &all {
            let Some(got) = found.files.get(path) else {
                // A directory that occurs twice has one path; so has a file with two names in it.
                let is_there = found.files.values().any(|got| got == wanted);
                assert!(is_there, "{nth}: {} is missing: {:?}", path.escape_ascii(), found.losses);
                continue;
            };
            // An end before the last block, or past the reach of the map, is none.
            let is_zeros = |rest: &[u8]| rest.iter().all(|byte| *byte == 0);
            let is_cut = wanted.strip_prefix(&got[..]).is_some_and(is_zeros);
            assert!(got.starts_with(wanted) || is_cut, "{nth}: {}", path.escape_ascii());
        }
    }
}
