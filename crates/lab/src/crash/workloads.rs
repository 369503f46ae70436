//! What people do to volumes, in a form that can be verified after a power cut.
//!
//! Files hold cells of 16 bytes: | owner | version | place |. Whatever a file shows must
//! be its own, or zeros; whatever was acknowledged - by a mark in the record - must be there.

mod database;
mod history;
mod random;
mod renames;
mod saves;
mod tree;

use draconis_device::{MemoryDisk, RecordDisk};
use draconis_exchange::contract::FileType;
use draconis_ext::{Cookie, Follow, InodeNumber, NewNode, Volume};

use draconis_device::Random;

/// A recorder on memory: what every workload runs on.
pub(super) type Record = RecordDisk<MemoryDisk>;

/// Something that is done to a volume, and what must be left of it.
pub(super) trait Workload: Sync {
    fn name(&self) -> &'static str;

    /// Whether the volume may run full under it.
    fn may_fill(&self) -> bool {
        false
    }

    /// Changes the volume; marks in `record` what was acknowledged.
    fn run(&self, volume: &Volume, record: &Record, dice: &mut Random) -> anyhow::Result<()>;

    /// Whether all that `marks` acknowledge is there, and nothing shows what is another's.
    fn verify(&self, volume: &Volume, marks: &[u64]) -> Result<(), String>;
}

/// Makes a workload from a seed and a number of steps.
pub(super) type Make = fn(u64, u64) -> Box<dyn Workload>;

/// All of them.
pub(super) const ALL: &[Make] = &[
    |seed, steps| Box::new(tree::Untar::new(seed, steps)),
    |_, steps| Box::new(renames::Renames::new(steps)),
    |seed, steps| Box::new(saves::Saves::new(seed, steps)),
    |seed, steps| Box::new(database::Database::new(seed, steps)),
    |_, steps| Box::new(random::Anything::new(steps)),
];

/// What only a journal keeps.
pub(super) const JOURNALLED: &[Make] = &[|_, steps| Box::new(history::History::new(steps))];

/// Bytes of a cell.
const CELL: u64 = 16;

/// What `owner`'s file holds from `at` on, in whole cells.
fn cells(owner: u32, version: u32, at: u64, len: u64) -> Vec<u8> {
    let cell = |nth: u64| {
        let mut bytes = [0; CELL as usize];
        bytes[..4].copy_from_slice(&owner.to_le_bytes());
        bytes[4..8].copy_from_slice(&version.to_le_bytes());
        bytes[8..].copy_from_slice(&(at / CELL + nth).to_le_bytes());
        bytes
    };
    (0..len.div_ceil(CELL)).flat_map(cell).take(len as usize).collect()
}

/// What a whole cell says: its owner and version, or that it is zeros.
fn cell(bytes: &[u8], nth: u64) -> Result<Option<(u32, u32)>, String> {
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

/// All bytes of a file.
fn contents(volume: &Volume, file: InodeNumber) -> Result<Vec<u8>, String> {
    let said = |error: draconis_ext::Error| format!("inode {file}: {error}");
    let size = volume.attributes(file).map_err(said)?.size_bytes;
    let mut bytes = vec![0; usize::try_from(size).map_err(|error| error.to_string())?];
    let mut at = 0;
    while at < bytes.len() {
        let got = volume.read_into(file, at as u64, &mut bytes[at..]).map_err(said)?;
        if got == 0 {
            return Err(format!("inode {file}: ends at {at} of {size} bytes"));
        }
        at += got;
    }
    Ok(bytes)
}

/// The versions of all whole cells of a file, where they are not zeros; an error if one is
/// not `owner`'s.
fn versions(bytes: &[u8], owner: u32) -> Result<Vec<Option<u32>>, String> {
    let each = bytes.chunks_exact(CELL as usize).zip(0..);
    each.map(|(bytes, nth)| match cell(bytes, nth)? {
        Some((it, _)) if it != owner => Err(format!("file {owner} shows cell {nth} of file {it}")),
        other => Ok(other.map(|(_, version)| version)),
    })
    .collect()
}

/// The inode at `path`, if there is one that lives.
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

/// All files, with the directories walked: `(path, inode, kind)`. Names that lead nowhere
/// are passed: those a power cut may leave.
fn walk(volume: &Volume) -> Result<Vec<(String, InodeNumber, FileType)>, String> {
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
