//! Reads everything on an untrusted volume: for fuzzers and damaged images.

use std::collections::HashSet;
use std::sync::Arc;

use draconis_device::{Disk, MemoryDisk};
use draconis_ext::{Cookie, Error, Follow, InodeNumber, OpenOptions, Seek, Volume};
use draconis_types::FileType;

/// Result of a run.
#[derive(Default, Debug, PartialEq, Eq)]
pub struct ReadOutcome {
    pub names: u64,
    pub bytes: u64,
    pub errors: u64,
    /// True if a limit below ended the run.
    pub cut_short: bool,
}

/// Limits above the names and the non-hole bytes of all test images.
const MAX_NAMES: u64 = 5_000;
const MAX_READS: u64 = 20_000;

pub fn open_options() -> OpenOptions {
    OpenOptions {
        inode_cache: 64,
        block_map_cache: 16,
        data_cache_bytes: 1 << 20,
        lists_dots: false,
        read_ahead_bytes: 512 << 10,
    }
}

/// Opens `image` and reads everything, up to the limits.
///
/// # Errors
/// The error of opening it.
pub fn read_whole_image(image: Vec<u8>) -> Result<ReadOutcome, Error> {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(image, 512));
    Ok(read_whole_volume(&Volume::open(disk, open_options())?))
}

/// Reads everything on an open volume, up to the limits.
pub fn read_whole_volume(volume: &Volume) -> ReadOutcome {
    let mut outcome = ReadOutcome::default();
    let (info, space) = (volume.info(), volume.space());
    assert!(space.free_blocks <= info.len_bytes / u64::from(space.block_bytes));
    let mut reads = 0;
    let mut known = HashSet::from([volume.root()]);
    let mut directories = vec![volume.root()];
    while let Some(dir) = directories.pop() {
        for number in list_and_lookup(volume, dir, &mut outcome) {
            if known.insert(number)
                && matches!(
                    read_inode(volume, number, &mut outcome, &mut reads),
                    Some(FileType::Directory)
                )
            {
                directories.push(number);
            }
        }
        if outcome.names > MAX_NAMES || reads > MAX_READS {
            outcome.cut_short = true;
            break;
        }
    }
    // Inodes without names.
    for number in [0, 1, 2, 7, 8, 11, 12, u32::MAX].map(InodeNumber) {
        read_inode(volume, number, &mut outcome, &mut reads);
    }
    let statistics = volume.statistics();
    for cache in [statistics.inodes, statistics.block_maps, statistics.data] {
        assert!(cache.used <= cache.capacity, "{statistics:?}");
    }
    outcome
}

/// Lists a directory and looks each name up again.
fn list_and_lookup(
    volume: &Volume,
    dir: InodeNumber,
    outcome: &mut ReadOutcome,
) -> Vec<InodeNumber> {
    let mut names = Vec::new();
    let mut last = Cookie::default();
    let listed = volume.entries(dir, Cookie::default(), true, |entry| {
        let next = match entry {
            Ok(entry) => {
                assert!(!entry.name.is_empty() && entry.name.len() <= 255);
                names.push((entry.name.to_vec(), entry.inode));
                entry.next
            }
            Err(damage) => {
                outcome.errors += 1;
                damage.next
            }
        };
        assert!(next > last, "{next:?} does not go on from {last:?}");
        last = next;
        names.len() < 2000
    });
    outcome.errors += u64::from(listed.is_err());
    outcome.names += names.len() as u64;
    for (name, _) in names.iter().take(200) {
        outcome.errors += u64::from(volume.lookup(dir, name).is_err());
    }
    let _ = volume.lookup(dir, b"no such name");
    if let Some((name, _)) = names.last() {
        let _ = volume.resolve(dir, name, Follow::Yes);
    }
    names.into_iter().map(|(_, number)| number).collect()
}

fn read_inode(
    volume: &Volume,
    number: InodeNumber,
    outcome: &mut ReadOutcome,
    reads: &mut u64,
) -> Option<FileType> {
    let inode = match volume.inode(number) {
        Ok(inode) => inode,
        Err(_) => {
            outcome.errors += 1;
            return None;
        }
    };
    let attributes = volume.attributes_of(&inode);
    match volume.xattr_names(number) {
        Ok(names) => {
            for name in names {
                outcome.errors += u64::from(volume.xattr(number, &name).is_err());
            }
        }
        Err(_) => outcome.errors += 1,
    }
    outcome.errors +=
        u64::from(volume.read_link(number).is_err() && inode.kind == FileType::Symlink);
    let _ = volume.first_block(&inode);
    if inode.kind == FileType::File {
        read_contents(volume, number, attributes.size_bytes, outcome, reads);
    }
    Some(inode.kind)
}

fn read_contents(
    volume: &Volume,
    number: InodeNumber,
    size: u64,
    outcome: &mut ReadOutcome,
    reads: &mut u64,
) {
    let mut at = 0;
    let mut left = 64;
    while at < size && left > 0 {
        left -= 1;
        *reads += 1;
        match volume.read(number, at, 1 << 20) {
            Ok(data) => {
                assert!(!data.is_empty());
                outcome.bytes += data.len() as u64;
                at += data.len() as u64;
            }
            Err(_) => {
                outcome.errors += 1;
                at += 1024;
            }
        }
    }
    let mut buffer = [0; 3000];
    for at in [size / 2, size.saturating_sub(1000), size, u64::MAX] {
        let _ = volume.read_into(number, at, &mut buffer);
        let _ = volume.seek(number, at, Seek::Data);
        let _ = volume.seek(number, at, Seek::Hole);
        let _ = volume.map(number, at);
    }
    let mut at = 0;
    for _ in 0..64 {
        let Ok(runs) = volume.map(number, at) else { break };
        let Some(last) = runs.last() else { break };
        assert!(runs.windows(2).all(|pair| pair[0].end() == pair[1].from));
        at = u64::from(last.end().0) * u64::from(volume.superblock().block_bytes);
    }
}
