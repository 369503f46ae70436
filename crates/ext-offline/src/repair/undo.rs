//! Undo file: the old bytes of all blocks that a repair writes.
//!
//! ```text
//!   | magic 16 | block bytes 4 | 0 4 | disk bytes 8 | blocks 8 | UUID 16 |
//!   | number 8, crc32c 4 of each sector as the repair leaves it, bytes before it | .. | crc32c 4 |
//! ```
//! Format 1 has no UUID and no checksums of sectors.
//!
//! Law 1: it is complete and durable before the first write of the repair; one that is not complete
//! has no valid checksum, and is refused.
//! Law 2: a revert overwrites only sectors that are as the repair left them, or restored already.
//! Otherwise nothing is written, unless the caller forces it.
//! Law 3: from the first to the last write of a revert all drivers refuse the volume; a revert that
//! was cut off is repeated with the same file, with the same result.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufReader, BufWriter, ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;

use draconis_device::{Disk, Extent};

use crate::blocks::uncached::{read_bytes, read_raw_superblock, write_of};
use crate::format::checksum::Checksum;
use crate::format::superblock::{LEN_BYTES, OFFSET_BYTES, Superblock};
use crate::offline::{OfflineError, Result};
use crate::redo_log::{
    OfflineWriter, REVERTING, SECTOR_BYTES, finish_interrupted_change, superblock_sector,
};
use crate::units::saturating_usize;
use crate::{Error, FsBlock};

const MAGIC: &[u8; 16] = b"draconis undo 2\n";
/// Magic of format 1.
const MAGIC_1: &[u8; 16] = b"draconis undo 1\n";
const HEADER_BYTES: usize = 40;

fn file_error(error: impl std::fmt::Display) -> OfflineError {
    OfflineError::Misuse(format!("undo file: {error}"))
}

/// Returns the checksum of each sector of a block.
fn sector_sums(block: &[u8]) -> impl Iterator<Item = u32> {
    block.chunks(saturating_usize(SECTOR_BYTES)).map(|it| Checksum::new().update(it).value())
}

struct Summing<T> {
    inner: T,
    sum: Checksum,
}

impl<T: Write> Summing<T> {
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.sum = self.sum.update(bytes);
        self.inner.write_all(bytes).map_err(file_error)
    }
}

impl<T: Read> Summing<T> {
    fn take(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.inner.read_exact(bytes).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => file_error("it is not whole"),
            _ => file_error(error),
        })?;
        self.sum = self.sum.update(bytes);
        Ok(())
    }
}

/// Saves blocks of `disk` in a new, empty file, durably; returns the file. Only a volume that has
/// them as `overwritten` is reverted.
pub(super) fn save(
    file: File,
    disk: &dyn Disk,
    overwritten: &dyn Disk,
    super_: &Superblock,
    blocks: &BTreeSet<u64>,
) -> Result<File> {
    let mut out = Summing { inner: BufWriter::new(file), sum: Checksum::new() };
    let len = u64::from(super_.block_bytes);
    out.put(MAGIC)?;
    out.put(&super_.block_bytes.to_le_bytes())?;
    out.put(&[0; 4])?;
    out.put(&disk.properties().len_bytes.to_le_bytes())?;
    out.put(&(blocks.len() as u64).to_le_bytes())?;
    out.put(&super_.uuid)?;
    for at in blocks {
        let extent = Extent::new(at.saturating_mul(len), len);
        out.put(&at.to_le_bytes())?;
        for sum in sector_sums(&read_bytes(overwritten, extent).map_err(Error::from)?) {
            out.put(&sum.to_le_bytes())?;
        }
        out.put(&read_bytes(disk, extent).map_err(Error::from)?)?;
    }
    let sum = out.sum.value();
    out.put(&sum.to_le_bytes())?;
    let file = out.inner.into_inner().map_err(|error| file_error(error.error()))?;
    file.sync_data().map_err(file_error)?;
    Ok(file)
}

/// What the head of an undo file says.
struct Header {
    block_bytes: u32,
    blocks: u64,
    /// UUID of the repaired volume; `None` in format 1.
    uuid: Option<[u8; 16]>,
}

/// A block of an undo file.
struct SavedBlock<'a> {
    at: FsBlock,
    bytes: &'a [u8],
    /// Checksums of the sectors that a revert overwrites.
    sums: &'a [u32],
}

impl SavedBlock<'_> {
    /// Returns the place of the superblock in the block; of this block a revert writes nothing else.
    fn superblock_part(&self) -> Option<Range<usize>> {
        let len = self.bytes.len() as u64;
        let start = saturating_usize(OFFSET_BYTES.checked_rem(len)?);
        let is_its_block = OFFSET_BYTES.checked_div(len) == Some(self.at.0);
        is_its_block.then(|| start..start.saturating_add(LEN_BYTES))
    }
}

fn read_header(file: &mut Summing<impl Read>, disk: &dyn Disk) -> Result<Header> {
    let mut head = [0; HEADER_BYTES];
    file.take(&mut head)?;
    let word = |at: usize| {
        let bytes = head.get(at..).and_then(|rest| rest.first_chunk::<8>());
        bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
    };
    let mut uuid = [0; 16];
    let uuid = match head.first_chunk() {
        Some(MAGIC) => file.take(&mut uuid).map(|()| Some(uuid))?,
        Some(MAGIC_1) => None,
        _ => return Err(file_error("this is none")),
    };
    let block_bytes = u32::try_from(word(16)).unwrap_or(0);
    if !(1024..=65536).contains(&block_bytes) || !block_bytes.is_power_of_two() {
        return Err(file_error("the block size makes no sense"));
    }
    if word(24) != disk.properties().len_bytes {
        return Err(file_error("it belongs to a disk of another size"));
    }
    Ok(Header { block_bytes, blocks: word(32), uuid })
}

/// Calls `each` with every block of an undo file, and verifies the whole; returns its checksum too.
fn read_blocks(
    file: &mut File,
    disk: &dyn Disk,
    mut each: impl FnMut(&SavedBlock<'_>) -> Result<()>,
) -> Result<(Header, u32)> {
    file.seek(SeekFrom::Start(0)).map_err(file_error)?;
    let mut file = Summing { inner: BufReader::new(file), sum: Checksum::new() };
    let header = read_header(&mut file, disk)?;
    let len = u64::from(header.block_bytes);
    let mut bytes = vec![0; saturating_usize(len)];
    let sectors = len.checked_div(SECTOR_BYTES).filter(|_| header.uuid.is_some());
    let mut sums = vec![0; saturating_usize(sectors.unwrap_or(0))];
    for _ in 0..header.blocks {
        let mut number = [0; 8];
        file.take(&mut number)?;
        for sum in &mut sums {
            let mut stored = [0; 4];
            file.take(&mut stored)?;
            *sum = u32::from_le_bytes(stored);
        }
        file.take(&mut bytes)?;
        let at = FsBlock(u64::from_le_bytes(number));
        if at.0.saturating_add(1).saturating_mul(len) > disk.properties().len_bytes {
            return Err(file_error("a block beyond the disk"));
        }
        each(&SavedBlock { at, bytes: &bytes, sums: &sums })?;
    }
    let sum = file.sum.value();
    let mut stored = [0; 4];
    file.take(&mut stored)?;
    if u32::from_le_bytes(stored) != sum {
        return Err(file_error("its checksum is wrong"));
    }
    Ok((header, sum))
}

/// Returns the number of sectors that a revert overwrites and that are neither as the repair left
/// them nor restored. The first sector of a superblock that `is_marked` is the revert's own.
fn changed_sectors(disk: &dyn Disk, block: &SavedBlock<'_>, is_marked: bool) -> Result<usize> {
    let len = block.bytes.len() as u64;
    let start = block.at.0.saturating_mul(len);
    let now = read_bytes(disk, Extent::new(start, len)).map_err(Error::from)?;
    let (size, part) = (saturating_usize(SECTOR_BYTES), block.superblock_part());
    let sectors = now.chunks(size).zip(block.bytes.chunks(size)).zip(sector_sums(&now));
    let left = block.sums.iter().zip((0..).step_by(size));
    let changed = sectors.zip(left).filter(|(((now, before), sum), (left, at))| {
        let is_marker = is_marked && start.saturating_add(*at as u64) == OFFSET_BYTES;
        part.as_ref().is_none_or(|part| part.contains(at))
            && !is_marker
            && sum != *left
            && now != before
    });
    Ok(changed.count())
}

/// Completes what was cut off, and refuses a volume other than the one that the repair left.
fn verify_volume(disk: &dyn Disk, file: &mut File, header: &Header, marker: u64) -> Result<()> {
    let Some(uuid) = header.uuid else {
        return Err(file_error(
            "an older version made it, and it does not know its volume; --force restores its blocks",
        ));
    };
    let marked = read_raw_superblock(disk).ok().and_then(|raw| raw.interrupted_change());
    let reverting = marked.filter(|head| *head >= REVERTING);
    if reverting.is_some_and(|other| other != marker) {
        let what = "a revert by another file was cut off; --revert with that file ends it";
        return Err(file_error(what));
    }
    if marked.is_some() && reverting.is_none() {
        finish_interrupted_change(disk)?;
    }
    let (mut changed, mut first) = (0usize, None);
    read_blocks(file, disk, |block| {
        let count = changed_sectors(disk, block, reverting.is_some())?;
        changed = changed.saturating_add(count);
        first = first.or((count > 0).then_some(block.at));
        Ok(())
    })?;
    let Some(FsBlock(first)) = first else { return Ok(()) };
    let is_other = read_raw_superblock(disk).is_ok_and(|raw| raw.s_uuid != uuid);
    Err(file_error(match is_other {
        true => "it belongs to a volume with another UUID; --force restores its blocks".to_owned(),
        false => format!(
            "{changed} sectors were changed after the repair, the first in block {first}: older \
             blocks beside newer ones would damage the volume; --force restores them nevertheless"
        ),
    }))
}

/// Restores every byte that a repair wrote on `disk`, and returns the number of blocks. Completes
/// the repair first, or an earlier revert by the same file, if it was cut off. `is_forced` restores
/// the blocks whatever they hold now.
///
/// # Errors
/// [`OfflineError::Misuse`] for a file that is damaged or belongs to another disk, and unless forced
/// for another volume and one that was changed after the repair: nothing is written then; errors of
/// the disk.
pub fn revert(disk: &dyn Disk, file: &mut File, is_forced: bool) -> Result<u64> {
    let (header, sum) = read_blocks(file, disk, |_| Ok(()))?;
    let marker = REVERTING | u64::from(sum);
    if !is_forced {
        verify_volume(disk, file, &header, marker)?;
    }
    let mut writer = OfflineWriter::new(disk, header.block_bytes);
    if let Ok(mut raw) = read_raw_superblock(disk) {
        // All drivers refuse the volume until the revert is complete.
        raw.set_change_marker(marker);
        raw.preserve_checksum();
        writer.write_barrier(vec![superblock_sector(&raw, 0)])?;
    }
    let mut last = vec![];
    read_blocks(file, disk, |block| match block.superblock_part() {
        Some(part) => {
            last = block.bytes.get(part).unwrap_or_default().to_vec();
            Ok(())
        }
        None => Ok(writer.write(block.at, block.bytes)?),
    })?;
    writer.wait()?;
    // The marker is in the first sector.
    let sectors: Vec<_> =
        last.chunks(saturating_usize(SECTOR_BYTES)).zip([0, SECTOR_BYTES]).collect();
    for (sector, from) in sectors.into_iter().rev() {
        writer.write_barrier(vec![write_of(OFFSET_BYTES.saturating_add(from), sector)])?;
    }
    Ok(header.blocks)
}
