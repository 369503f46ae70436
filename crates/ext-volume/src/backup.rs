//! Superblocks that stand in for a damaged one.
//!
//! ```text
//!   superblock valid? ──no──▶ first valid backup ─▶ journal not empty? ─▶ superblock, in memory
//! ```
//! Law 1: nothing is written. Reads of the superblock return the backup's contents.
//! A volume of one group has no backup: where one flipped bit explains a wrong checksum, it is flipped
//! back; else a superblock that makes sense is used as it is.
//! Law 2: a backup is one only at the place that it names itself, unless the caller names the place.
//! Law 3: a volume in the middle of a change is refused: its backups are of another time.
//!
//! Linux writes backups at mkfs, resize and tune, not at mount: whether the journal needs recovery
//! is in the journal alone. A disk that was formatted anew still has the backups of its old volume:
//! callers first look for other contents. Backups of descriptors: [`crate::reader::VolumeReader::group`].

use std::mem::offset_of;
use std::sync::Arc;

use draconis_device::{Disk, Extent, Group};
use zerocopy::IntoBytes;

use crate::blocks::cow_disk::CowDisk;
use crate::blocks::uncached::{read_bytes, read_raw_superblock, write_of};
use crate::format::group::is_sparse_backup;
use crate::format::superblock::{LEN_BYTES, OFFSET_BYTES, RawSuperblock, STATE_CLEAN, Superblock};
use crate::format::witness::{Bit, flip_one_bit};
use crate::journal;
use crate::{Error, FsBlock, Result};

/// Groups that are searched for a backup.
const SEARCHED_GROUPS: u32 = 128;
/// Block size of the disk in memory that holds a superblock, in bytes.
const MEMORY_BLOCK_BYTES: u32 = 1024;

/// Place of the superblock to use, if not its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SuperblockPlace {
    /// Block of a backup; `None` for the superblock, or the first valid backup if it is damaged.
    pub block: Option<u64>,
    /// Block size of the volume in bytes, for the search of a backup; `None` to try all.
    pub block_bytes: Option<u32>,
}

/// A valid copy of the superblock.
#[derive(Clone, Debug)]
pub struct Backup {
    /// The superblock.
    pub raw: RawSuperblock,
    /// Its block, in blocks of the volume.
    pub(crate) block: u64,
}

/// A volume with a superblock that can be used.
pub struct UsableVolume {
    /// The disk, with the superblock that is used in the place of a damaged one.
    pub disk: Arc<dyn Disk>,
    /// The superblock.
    pub super_: Superblock,
    /// What stands in for what, if something does.
    pub substitute: Option<String>,
}

/// Returns the block size, if it is one.
pub fn block_bytes(raw: &RawSuperblock) -> Option<u32> {
    let bytes = 1024u32.checked_shl(raw.s_log_block_size.get())?;
    (1024..=65536).contains(&bytes).then_some(bytes)
}

/// Finds a backup of the superblock: at `place`, or the first valid one.
pub fn find(
    disk: &dyn Disk,
    primary: Option<&RawSuperblock>,
    place: &SuperblockPlace,
) -> Option<Backup> {
    let said = place.block_bytes.or(primary.and_then(block_bytes));
    let others = (0..7).map(|log| 1024 << log).filter(|_| place.block_bytes.is_none());
    for bytes in said.into_iter().chain(others) {
        if let Some(block) = place.block {
            match read_copy(disk, block, bytes, None) {
                None => continue,
                found => return found,
            }
        }
        let first = u64::from(bytes == 1024);
        let whole = u64::from(bytes).saturating_mul(8);
        let said = primary.map_or(whole, |raw| raw.s_blocks_per_group.get().into());
        for per_group in [said, whole] {
            for group in (1..SEARCHED_GROUPS).filter(|it| is_sparse_backup(*it) || *it == 2) {
                let block = first.saturating_add(per_group.saturating_mul(group.into()));
                if block.saturating_mul(bytes.into()) > disk.properties().len_bytes {
                    break;
                }
                let found = read_copy(disk, block, bytes, Some(group));
                if found.is_some() {
                    return found;
                }
            }
        }
    }
    None
}

/// Returns the superblock with one bit changed back, if that makes its checksum right.
pub fn mend_one_bit(disk: &dyn Disk) -> Option<(Bit, RawSuperblock)> {
    let bytes = read_bytes(disk, Extent::new(OFFSET_BYTES, LEN_BYTES as u64)).ok()?;
    let magic = offset_of!(RawSuperblock, s_magic);
    // What is no superblock without its magic number is one only with it.
    let range = match RawSuperblock::view(&bytes) {
        Ok(_) => 0..LEN_BYTES,
        Err(_) => magic..magic.saturating_add(2),
    };
    flip_one_bit(bytes, range, |bytes| {
        let raw = RawSuperblock::view(bytes).ok()?;
        (raw.has_checksum() && raw.check().is_ok()).then(|| raw.clone())
    })
}

/// Returns true if a change of the whole volume was cut off; the mark alone may be a flipped bit.
pub fn is_interrupted(disk: &dyn Disk, raw: &RawSuperblock) -> bool {
    raw.interrupted_change().is_some() && mend_one_bit(disk).is_none()
}

/// Returns a superblock without backup that can be used, and what was done with it.
fn mend(disk: &dyn Disk, primary: Option<&RawSuperblock>) -> Option<(RawSuperblock, &'static str)> {
    if let Some((_, mended)) = mend_one_bit(disk) {
        return Some((mended, "one bit of it is changed back"));
    }
    let mut raw = primary?.clone();
    raw.set_checksum();
    raw.check().is_ok().then_some((raw, "it has no backup, and is used as it is"))
}

/// Returns the error for a disk whose superblock is lost, and a backup of it is not.
pub fn lost_superblock(disk: &dyn Disk) -> Option<Error> {
    let backup = find(disk, None, &SuperblockPlace::default())?;
    let block = Some(FsBlock(backup.block));
    Some(Error::Corrupt {
        what: "superblock: lost; draconis repair restores it from its backup",
        inode: None,
        block,
    })
}

/// Returns the error for a volume without a backup: its own, or that of the place.
pub fn none_found(place: &SuperblockPlace, own: Error) -> Error {
    match place.block {
        Some(_) => Error::corrupt("superblock: no valid backup there"),
        None => own,
    }
}

/// Reads a copy of the superblock of a volume with this block size, in this group.
fn read_copy(disk: &dyn Disk, block: u64, bytes: u32, group: Option<u32>) -> Option<Backup> {
    let start = block.saturating_mul(bytes.into());
    // In block 0 it follows the boot sector.
    let start = if start == 0 { OFFSET_BYTES } else { start };
    let found = read_bytes(disk, Extent::new(start, LEN_BYTES as u64)).ok()?;
    let raw = RawSuperblock::view(&found).ok()?;
    // Revision 0 has no number of the group.
    let named = Some(u32::from(raw.s_block_group_nr.get())).filter(|_| raw.s_rev_level.get() > 0);
    let is_right = block_bytes(raw) == Some(bytes)
        && group.is_none_or(|group| named.is_none_or(|named| named == group))
        && raw.interrupted_change().is_none()
        && raw.check().is_ok();
    is_right.then(|| Backup { raw: raw.clone(), block })
}

/// Puts a backup in the place of the superblock, on a disk in memory.
///
/// # Errors
/// Errors of the disk.
pub fn put_as_primary(disk: &Arc<CowDisk>, backup: &Backup) -> Result<()> {
    let mut raw = backup.raw.clone();
    raw.s_block_group_nr.set(0);
    raw.s_state.set(STATE_CLEAN);
    raw.set_checksum();
    put(disk, &raw)?;
    let super_ = raw.check()?;
    let log = super_.journal.map(|_| journal::open_journal(disk.clone(), &super_));
    if log.is_some_and(|log| log.is_ok_and(|log| log.super_.start.is_some())) {
        raw.set_needs_recovery();
        raw.set_checksum();
        put(disk, &raw)?;
    }
    Ok(())
}

/// Writes a superblock to a disk in memory.
///
/// # Errors
/// Errors of the disk.
pub fn put(disk: &CowDisk, raw: &RawSuperblock) -> Result<()> {
    let writes = vec![write_of(OFFSET_BYTES, raw.as_bytes())];
    let sent = disk.submit(Group { writes }, &[]);
    sent.map(drop).map_err(|refused| Error::Io(refused.error))
}

/// Reads the superblock, or what stands in for it. The disk does not change.
///
/// # Errors
/// Errors of the superblock, if there is no valid backup: [`Error::NotExt`], [`Error::Corrupt`],
/// [`Error::Unsupported`], [`Error::Io`]. [`Error::Corrupt`] if there is none at `place`.
pub fn open_superblock(disk: Arc<dyn Disk>, place: &SuperblockPlace) -> Result<UsableVolume> {
    let raw = read_raw_superblock(&*disk);
    if let Ok(raw) = &raw
        && is_interrupted(&*disk, raw)
    {
        let super_ = raw.check()?;
        return Ok(UsableVolume { disk, super_, substitute: None });
    }
    let why = match (raw.as_ref().map_err(Clone::clone).and_then(RawSuperblock::check), place.block)
    {
        (Ok(super_), None) => return Ok(UsableVolume { disk, super_, substitute: None }),
        (Ok(_), Some(_)) => None,
        (Err(error), _) => Some(error),
    };
    let in_memory = Arc::new(CowDisk::new(disk.clone(), MEMORY_BLOCK_BYTES, 2));
    let used = if let Some(backup) = find(&*disk, raw.as_ref().ok(), place) {
        put_as_primary(&in_memory, &backup)?;
        format!("its backup in block {} is used", backup.block)
    } else {
        let mended = place.block.is_none().then(|| mend(&*disk, raw.as_ref().ok())).flatten();
        let Some((mended, used)) = mended else {
            return Err(none_found(place, why.unwrap_or(Error::NotExt)));
        };
        put(&in_memory, &mended)?;
        used.to_owned()
    };
    in_memory.freeze();
    let super_ = read_raw_superblock(&*in_memory)?.check()?;
    let substitute = why.map(|why| format!("the superblock is damaged ({why}): {used}"));
    Ok(UsableVolume { disk: in_memory, super_, substitute })
}
