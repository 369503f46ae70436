//! Undo file: the old bytes of all blocks that a repair writes.
//!
//! ```text
//!   | magic 16 | block bytes 4 | 0 4 | disk bytes 8 | blocks 8 | (number 8, bytes) .. | crc32c 4 |
//! ```
//! Law 1: it is complete and durable before the first write of the repair; one that is not complete
//! has no valid checksum, and is refused.
//! Law 2: from the first to the last write of a revert all drivers refuse the volume; a revert that
//! was cut off is repeated, with the same result.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufReader, BufWriter, ErrorKind, Read, Seek, SeekFrom, Write};

use draconis_device::{Disk, Extent, Group};

use crate::blocks::uncached::{read_bytes, read_raw_superblock};
use crate::format::checksum::Checksum;
use crate::format::superblock::{LEN_BYTES, OFFSET_BYTES, RawSuperblock, Superblock};
use crate::offline::{OfflineError, Result};
use crate::redo_log::{OfflineWriter, SECTOR_BYTES, superblock_sector};
use crate::units::saturating_usize;
use crate::{Error, FsBlock};

const MAGIC: &[u8; 16] = b"draconis undo 1\n";
const HEADER_BYTES: usize = 40;

fn file_error(error: &std::io::Error) -> OfflineError {
    OfflineError::Misuse(format!("undo file: {error}"))
}

struct Summing<T> {
    inner: T,
    sum: Checksum,
}

impl<T: Write> Summing<T> {
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.sum = self.sum.update(bytes);
        self.inner.write_all(bytes).map_err(|error| file_error(&error))
    }
}

impl<T: Read> Summing<T> {
    fn take(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.inner.read_exact(bytes).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => OfflineError::Misuse("undo file: it is not whole".into()),
            _ => file_error(&error),
        })?;
        self.sum = self.sum.update(bytes);
        Ok(())
    }
}

/// Saves blocks of `disk` in a new, empty file, durably; returns the file.
pub(super) fn save(
    file: File,
    disk: &dyn Disk,
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
    for at in blocks {
        let extent = Extent::new(at.saturating_mul(len), len);
        out.put(&at.to_le_bytes())?;
        out.put(&read_bytes(disk, extent).map_err(Error::from)?)?;
    }
    let sum = out.sum.value();
    out.put(&sum.to_le_bytes())?;
    let file = out.inner.into_inner().map_err(|error| file_error(error.error()))?;
    file.sync_data().map_err(|error| file_error(&error))?;
    Ok(file)
}

/// What the head of an undo file says.
struct Header {
    block_bytes: u32,
    blocks: u64,
}

fn read_header(file: &mut Summing<impl Read>, disk: &dyn Disk) -> Result<Header> {
    let mut head = [0; HEADER_BYTES];
    file.take(&mut head)?;
    let word = |at: usize| {
        let bytes = head.get(at..).and_then(|rest| rest.first_chunk::<8>());
        bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
    };
    let refused = |what: &str| Err(OfflineError::Misuse(format!("undo file: {what}")));
    if !head.starts_with(MAGIC) {
        return refused("this is none");
    }
    let block_bytes = u32::try_from(word(16)).unwrap_or(0);
    if !(1024..=65536).contains(&block_bytes) || !block_bytes.is_power_of_two() {
        return refused("the block size makes no sense");
    }
    if word(24) != disk.properties().len_bytes {
        return refused("it belongs to a disk of another size");
    }
    Ok(Header { block_bytes, blocks: word(32) })
}

/// Calls `each` with every block of an undo file, and verifies the whole.
fn read_blocks(
    file: &mut File,
    disk: &dyn Disk,
    mut each: impl FnMut(&Header, FsBlock, &[u8]) -> Result<()>,
) -> Result<Header> {
    file.seek(SeekFrom::Start(0)).map_err(|error| file_error(&error))?;
    let mut file = Summing { inner: BufReader::new(file), sum: Checksum::new() };
    let header = read_header(&mut file, disk)?;
    let len = u64::from(header.block_bytes);
    let mut bytes = vec![0; saturating_usize(len)];
    for _ in 0..header.blocks {
        let mut number = [0; 8];
        file.take(&mut number)?;
        file.take(&mut bytes)?;
        let at = u64::from_le_bytes(number);
        let end = at.saturating_add(1).saturating_mul(len);
        if end > disk.properties().len_bytes {
            let what = "undo file: a block beyond the disk".to_owned();
            return Err(OfflineError::Misuse(what));
        }
        each(&header, FsBlock(at), &bytes)?;
    }
    let sum = file.sum.value();
    let mut stored = [0; 4];
    file.take(&mut stored)?;
    if u32::from_le_bytes(stored) != sum {
        return Err(OfflineError::Misuse("undo file: its checksum is wrong".to_owned()));
    }
    Ok(header)
}

/// Restores every byte that a repair wrote on `disk`.
///
/// # Errors
/// [`OfflineError::Misuse`] for a file that is damaged or belongs to another disk: nothing is
/// written then; errors of the disk.
pub fn revert(disk: &dyn Disk, file: &mut File) -> Result<u64> {
    let header = read_blocks(file, disk, |_, _, _| Ok(()))?;
    let len = u64::from(header.block_bytes);
    let mut writer = OfflineWriter::new(disk, header.block_bytes);
    let marker = read_raw_superblock(disk).ok().map(|mut raw| {
        raw.mark_reverting();
        raw.preserve_checksum();
        raw
    });
    if let Some(raw) = &marker {
        writer.write_barrier(vec![superblock_sector(raw, 0)])?;
    }
    let super_block = OFFSET_BYTES.checked_div(len).unwrap_or(0);
    let mut last = None;
    read_blocks(file, disk, |_, at, bytes| {
        if at.0 == super_block {
            last = Some(bytes.to_vec());
            return Ok(());
        }
        Ok(writer.write(at, bytes)?)
    })?;
    writer.wait()?;
    let Some(bytes) = last else { return Ok(header.blocks) };
    let at = saturating_usize(OFFSET_BYTES.checked_rem(len).unwrap_or(0));
    let old = bytes.get(at..).and_then(|rest| rest.get(..LEN_BYTES)).unwrap_or_default();
    for from in [SECTOR_BYTES, 0] {
        let end = saturating_usize(from.saturating_add(SECTOR_BYTES));
        let sector = old.get(saturating_usize(from)..end).unwrap_or_default();
        let write = crate::blocks::uncached::write_of(OFFSET_BYTES.saturating_add(from), sector);
        let sent = disk.submit(Group { writes: vec![write] }, &[]);
        disk.wait_durable(sent.map_err(|refused| refused.error)?)?;
    }
    Ok(header.blocks)
}

impl RawSuperblock {
    /// Makes all drivers refuse the volume until a revert is complete.
    fn mark_reverting(&mut self) {
        self.set_change_marker(crate::redo_log::REVERTING);
    }
}
