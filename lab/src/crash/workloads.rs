//! Workloads on volumes, whose results can be verified after a power cut.
//!
//! Files consist of 16-byte cells: | owner | version | place |. A file may contain only its own
//! cells or zeros, and acknowledged data (by a mark in the recording) must be there.

mod database;
mod history;
mod random;
mod renames;
mod saves;
pub(super) mod sequence;
mod tree;

use draconis_device::MemoryDisk;
use draconis_ext::{Cookie, Follow, InodeNumber, NewNode, Volume};
use draconis_testkit::RecordDisk;
use draconis_types::FileType;

use draconis_device::Random;

/// In-memory disk that records writes, for every workload.
pub(super) type RecordingDisk = RecordDisk<MemoryDisk>;

/// A workload, and the check of its result.
pub(super) trait Workload: Sync {
    fn name(&self) -> &'static str;

    /// Returns true if the workload may fill the volume.
    fn may_fill_volume(&self) -> bool {
        false
    }

    /// Changes the volume; adds marks to `record` for acknowledged changes.
    fn run(&self, volume: &Volume, record: &RecordingDisk, dice: &mut Random)
    -> anyhow::Result<()>;

    /// Checks that all changes acknowledged by `marks` are there, and no foreign data.
    fn verify(&self, volume: &Volume, marks: &[u64]) -> Result<(), String>;
}

/// Creates a workload from a seed and a number of steps.
pub(super) type WorkloadFactory = fn(u64, u64) -> Box<dyn Workload>;

/// All workloads.
pub(super) const ALL_WORKLOADS: &[WorkloadFactory] = &[
    |seed, steps| Box::new(tree::UntarWorkload::new(seed, steps)),
    |_, steps| Box::new(renames::RenameWorkload::new(steps)),
    |seed, steps| Box::new(saves::DocumentSaveWorkload::new(seed, steps)),
    |seed, steps| Box::new(database::DatabaseWorkload::new(seed, steps)),
    |_, steps| Box::new(random::RandomWorkload::new(steps)),
];

/// Workloads whose promises need a journal.
pub(super) const JOURNALLED_WORKLOADS: &[WorkloadFactory] =
    &[|_, steps| Box::new(history::HistoryWorkload::new(steps))];

/// Size of a cell, in bytes.
const CELL_BYTES: u64 = 16;

/// Returns whole cells of `owner`'s file from offset `at` on.
fn encode_cells(owner: u32, version: u32, at: u64, len: u64) -> Vec<u8> {
    let cell = |nth: u64| {
        let mut bytes = [0; CELL_BYTES as usize];
        bytes[..4].copy_from_slice(&owner.to_le_bytes());
        bytes[4..8].copy_from_slice(&version.to_le_bytes());
        bytes[8..].copy_from_slice(&(at / CELL_BYTES + nth).to_le_bytes());
        bytes
    };
    (0..len.div_ceil(CELL_BYTES)).flat_map(cell).take(len as usize).collect()
}

/// Decodes a cell into owner and version; `None` for zeros.
fn decode_cell(bytes: &[u8], nth: u64) -> Result<Option<(u32, u32)>, String> {
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    let word = |at: usize| -> u32 {
        bytes.get(at..at + 4).and_then(|it| it.try_into().ok()).map_or(0, u32::from_le_bytes)
    };
    let place = u64::from(word(8)) | u64::from(word(12)) << 32;
    if place != nth {
        return Err(format!("cell {nth} holds {bytes:02x?}"));
    }
    Ok(Some((word(0), word(4))))
}

/// Reads a whole file.
fn read_file(volume: &Volume, file: InodeNumber) -> Result<Vec<u8>, String> {
    let describe = |error: draconis_ext::Error| format!("inode {file}: {error}");
    let size = volume.attributes(file).map_err(describe)?.size_bytes;
    let mut bytes = vec![0; usize::try_from(size).map_err(|error| error.to_string())?];
    let mut at = 0;
    while at < bytes.len() {
        let got = volume.read_into(file, at as u64, &mut bytes[at..]).map_err(describe)?;
        if got == 0 {
            return Err(format!("inode {file}: ends at {at} of {size} bytes"));
        }
        at += got;
    }
    Ok(bytes)
}

/// Returns the versions of all whole cells of a file, `None` for zeros; fails on a cell that is
/// not `owner`'s.
fn cell_versions(bytes: &[u8], owner: u32) -> Result<Vec<Option<u32>>, String> {
    let each = bytes.chunks_exact(CELL_BYTES as usize).zip(0..);
    each.map(|(bytes, nth)| match decode_cell(bytes, nth)? {
        Some((it, _)) if it != owner => Err(format!("file {owner} shows cell {nth} of file {it}")),
        other => Ok(other.map(|(_, version)| version)),
    })
    .collect()
}

/// Returns the inode at `path`, if it exists and is readable.
fn find(volume: &Volume, path: &str) -> Option<InodeNumber> {
    let inode = volume.resolve(InodeNumber::ROOT, path.as_bytes(), Follow::No).ok()?;
    volume.attributes(inode).is_ok().then_some(inode)
}

fn create(
    volume: &Volume,
    dir: InodeNumber,
    name: &str,
    kind: FileType,
) -> anyhow::Result<InodeNumber> {
    let target: &[u8] = if kind == FileType::Symlink { b"somewhere" } else { b"" };
    let new = NewNode { kind, mode: 0o755, uid: 1, gid: 1, device: (0, 0), target };
    Ok(volume.create(dir, name.as_bytes(), &new)?)
}

fn write(volume: &Volume, file: InodeNumber, at: u64, bytes: &[u8]) -> anyhow::Result<()> {
    let mut put = 0;
    while put < bytes.len() {
        put += volume.write(file, at + put as u64, &bytes[put..])?;
    }
    Ok(())
}

/// Returns all files and directories as `(path, inode, kind)`. Skips names of deleted inodes,
/// which a power cut may leave.
fn walk_volume(volume: &Volume) -> Result<Vec<(String, InodeNumber, FileType)>, String> {
    let mut found = vec![];
    let mut left = vec![(String::new(), InodeNumber::ROOT)];
    while let Some((path, dir)) = left.pop() {
        let mut damage = None;
        let visit = |entry: Result<draconis_ext::Entry<'_>, draconis_ext::DirDamage>| {
            match entry {
                Ok(entry) => {
                    let path = format!("{path}/{}", entry.name.escape_ascii());
                    if let Ok(inode) = volume.inode(entry.inode) {
                        found.push((path.clone(), entry.inode, inode.kind));
                        if inode.kind == FileType::Directory {
                            left.push((path, entry.inode));
                        }
                    }
                }
                Err(broken) => damage = Some(broken.error.to_string()),
            }
            true
        };
        volume
            .entries(dir, Cookie::default(), false, visit)
            .map_err(|error| format!("{path}: {error}"))?;
        if let Some(damage) = damage {
            return Err(format!("{path}: {damage}"));
        }
        if found.len() > 1_000_000 {
            return Err("the tree has no end".into());
        }
    }
    Ok(found)
}
