//! Partition tables: MBR (with logical partitions) and GPT.
//!
//! Tables are untrusted: all values are bounded and checked against the length of the disk, and a
//! chain of logical partitions ends after [`MAX_LOGICAL_PARTITIONS`]. MBR as on every PC since 1983; GPT from
//! the UEFI specification 2.10, chapter 5.

use draconis_types::{Block, PrivateBuffer};

use crate::{Disk, Error, Extent};

/// Maximum GPT entries that are read; the specification's minimum is 128.
const MAX_GPT_ENTRIES: u32 = 1024;
/// Maximum logical partitions that are followed.
const MAX_LOGICAL_PARTITIONS: u32 = 256;
/// Types of MBR entries that hold a chain of logical partitions.
const EXTENDED_PARTITION_TYPES: [u8; 3] = [0x05, 0x0f, 0x85];
/// Type of the MBR entry of a protective MBR, which announces a GPT.
const PROTECTIVE_MBR_TYPE: u8 = 0xee;

/// Error of finding a partition.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PartitionError {
    /// The disk could not be read.
    #[error(transparent)]
    Disk(#[from] Error),
    /// Neither an MBR nor a GPT.
    #[error("the disk has no partition table")]
    NoTable,
    /// The table has no such partition.
    #[error("there is no partition {wanted}; the table has: {found}")]
    NoPartition {
        /// Requested number.
        wanted: u32,
        /// Existing numbers, as text.
        found: String,
    },
    /// The partition begins past the end of the disk.
    #[error("partition {0} lies behind the end of the disk, which was cut off or copied in part")]
    Beyond(u32),
    /// The table contradicts itself.
    #[error("the partition table is damaged: {0}")]
    Damaged(&'static str),
}

/// Finds partition `number`, counted from 1 as Linux does (logical ones from 5).
///
/// # Errors
/// See [`PartitionError`].
pub fn find_partition(disk: &dyn Disk, number: u32) -> Result<Extent, PartitionError> {
    let table = read_partitions(disk)?;
    match table.iter().find(|entry| entry.number == number) {
        Some(entry) if entry.extent.len_bytes == 0 => Err(PartitionError::Beyond(number)),
        Some(entry) => Ok(entry.extent),
        None => {
            let numbers: Vec<String> = table.iter().map(|it| it.number.to_string()).collect();
            let found = if table.is_empty() { "none".into() } else { numbers.join(", ") };
            Err(PartitionError::NoPartition { wanted: number, found })
        }
    }
}

/// One partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partition {
    /// Number, from 1.
    pub number: u32,
    /// Range, clipped to the length of the disk, which may be truncated.
    pub extent: Extent,
}

/// Format of a partition table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TableKind {
    /// Master boot record.
    #[default]
    Mbr,
    /// GUID partition table.
    Gpt,
}

impl TableKind {
    /// Returns the usual name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mbr => "MBR",
            Self::Gpt => "GPT",
        }
    }
}

/// A partition table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionTable {
    /// Format.
    pub kind: TableKind,
    /// Partitions by number.
    pub partitions: Vec<Partition>,
    /// True if this is the backup of a GPT whose primary copy is damaged or missing.
    pub is_backup: bool,
}

/// Returns all partitions of a disk, by number.
///
/// # Errors
/// See [`PartitionError`].
pub fn read_partitions(disk: &dyn Disk) -> Result<Vec<Partition>, PartitionError> {
    read_partition_table(disk).map(|table| table.partitions)
}

/// Returns the partition table of a disk; a GPT also if the first sector is lost.
///
/// # Errors
/// See [`PartitionError`].
pub fn read_partition_table(disk: &dyn Disk) -> Result<PartitionTable, PartitionError> {
    let Some(mbr) = Mbr::read(disk, 0)? else { return read_gpt(disk) };
    if mbr.entries.iter().any(|entry| entry.kind == PROTECTIVE_MBR_TYPE) {
        return read_gpt(disk);
    }
    let mut found = vec![];
    for (entry, number) in mbr.entries.iter().zip(1..) {
        if entry.sectors != 0 && !EXTENDED_PARTITION_TYPES.contains(&entry.kind) && entry.kind != 0
        {
            found.push(Partition { number, extent: entry.extent(disk, 0) });
        }
    }
    for entry in &mbr.entries {
        if EXTENDED_PARTITION_TYPES.contains(&entry.kind) && entry.sectors != 0 {
            read_logical_partitions(disk, u64::from(entry.start), &mut found)?;
        }
    }
    Ok(PartitionTable { kind: TableKind::Mbr, partitions: found, is_backup: false })
}

struct Mbr {
    entries: [MbrEntry; 4],
}

#[derive(Clone, Copy)]
struct MbrEntry {
    kind: u8,
    start: u32,
    sectors: u32,
}

/// MBRs count in sectors of 512 bytes, except on rare native 4 KiB disks, which an image file does
/// not distinguish.
const MBR_SECTOR_BYTES: u64 = 512;

impl Mbr {
    fn read(disk: &dyn Disk, sector: u64) -> Result<Option<Self>, PartitionError> {
        let bytes = read_bytes_at(disk, sector * MBR_SECTOR_BYTES, MBR_SECTOR_BYTES)?;
        if bytes.get(510..512) != Some(&[0x55, 0xaa]) {
            return Ok(None);
        }
        let entry = |i: usize| {
            let at = 446 + 16 * i;
            MbrEntry {
                kind: bytes[at + 4],
                start: u32_at(&bytes, at + 8),
                sectors: u32_at(&bytes, at + 12),
            }
        };
        Ok(Some(Self { entries: [entry(0), entry(1), entry(2), entry(3)] }))
    }
}

impl MbrEntry {
    fn extent(self, disk: &dyn Disk, base: u64) -> Extent {
        let start = base + u64::from(self.start);
        clip_to_disk(disk, start * MBR_SECTOR_BYTES, u64::from(self.sectors) * MBR_SECTOR_BYTES)
    }
}

/// Follows the chain of extended boot records from sector `first`.
fn read_logical_partitions(
    disk: &dyn Disk,
    first: u64,
    found: &mut Vec<Partition>,
) -> Result<(), PartitionError> {
    let mut at = first;
    for number in 5..5 + MAX_LOGICAL_PARTITIONS {
        let Some(record) = Mbr::read(disk, at)? else {
            return Err(PartitionError::Damaged("a logical partition's record has no signature"));
        };
        let [own, next, ..] = record.entries;
        if own.sectors != 0 {
            found.push(Partition { number, extent: own.extent(disk, at) });
        }
        if !EXTENDED_PARTITION_TYPES.contains(&next.kind) || next.sectors == 0 {
            return Ok(());
        }
        at = first + u64::from(next.start);
    }
    Err(PartitionError::Damaged("the chain of logical partitions does not end"))
}

/// Reads the GPT. The header is in sector 1, in sectors of unknown size. If it is damaged, reads
/// the backup, from where an intact first header says or from the last sector.
fn read_gpt(disk: &dyn Disk) -> Result<PartitionTable, PartitionError> {
    const GPT_SECTOR_SIZES: [u64; 2] = [512, 4096];
    let len_bytes = disk.properties().len_bytes;
    let mut places =
        GPT_SECTOR_SIZES.map(|sector_bytes| (sector_bytes, sector_bytes, false)).to_vec();
    for sector_bytes in GPT_SECTOR_SIZES {
        let said = read_gpt_header(disk, sector_bytes).ok().map(|header| u64_at(&header, 32));
        let last = (len_bytes / sector_bytes).saturating_sub(1);
        for sector in said.into_iter().chain([last]) {
            if let Some(at_bytes) = sector.checked_mul(sector_bytes) {
                places.push((sector_bytes, at_bytes, true));
            }
        }
    }
    let mut why = PartitionError::NoTable;
    for (sector_bytes, at_bytes, is_backup) in places {
        let found = read_gpt_header(disk, at_bytes)
            .and_then(|header| read_gpt_entries(disk, &header, sector_bytes))
            .map(|partitions| PartitionTable { kind: TableKind::Gpt, partitions, is_backup });
        match found {
            Ok(found) => return Ok(found),
            // The error of the primary copy is more useful.
            Err(error @ PartitionError::Damaged(_)) if why == PartitionError::NoTable => {
                why = error;
            }
            Err(_) => {}
        }
    }
    Err(why)
}

/// Reads a header and verifies its checksum.
fn read_gpt_header(disk: &dyn Disk, at_bytes: u64) -> Result<PrivateBuffer, PartitionError> {
    let header = read_bytes_at(disk, at_bytes, 512)?;
    if header.get(..8) != Some(b"EFI PART") {
        return Err(PartitionError::NoTable);
    }
    let header_len = u32_at(&header, 12) as usize;
    if !(92..=512).contains(&header_len) {
        return Err(PartitionError::Damaged("GPT header of an impossible length"));
    }
    let mut summed = header[..header_len].to_vec();
    summed[16..20].fill(0);
    if crc32(&summed) != u32_at(&header, 16) {
        return Err(PartitionError::Damaged("checksum of the GPT header"));
    }
    Ok(header)
}

fn read_gpt_entries(
    disk: &dyn Disk,
    header: &[u8],
    sector_bytes: u64,
) -> Result<Vec<Partition>, PartitionError> {
    let (count, size) = (u32_at(header, 80), u32_at(header, 84));
    if count > MAX_GPT_ENTRIES || !(128..=4096).contains(&size) || !size.is_power_of_two() {
        return Err(PartitionError::Damaged("GPT with impossible entries"));
    }
    let len = u64::from(count) * u64::from(size);
    let at = u64_at(header, 72).checked_mul(sector_bytes);
    let at = at.ok_or(PartitionError::Damaged("GPT entries beyond the disk"))?;
    let entries = read_bytes_at(disk, at, len.next_multiple_of(512))?;
    if crc32(&entries[..len as usize]) != u32_at(header, 88) {
        return Err(PartitionError::Damaged("checksum of the GPT entries"));
    }
    let mut found = vec![];
    for (entry, number) in entries[..len as usize].chunks_exact(size as usize).zip(1..) {
        if entry[..16] == [0; 16] {
            continue;
        }
        let (first, last) = (u64_at(entry, 32), u64_at(entry, 40));
        let count = last.checked_sub(first).and_then(|n| n.checked_add(1));
        let bytes = |sectors: u64| sectors.checked_mul(sector_bytes);
        let (Some(start), Some(len)) = (bytes(first), count.and_then(bytes)) else {
            return Err(PartitionError::Damaged("GPT partition beyond the disk"));
        };
        found.push(Partition { number, extent: clip_to_disk(disk, start, len) });
    }
    Ok(found)
}

/// Returns the part of a partition that is on the disk; empty, at the disk's end, if it begins past
/// the end.
fn clip_to_disk(disk: &dyn Disk, start_bytes: u64, len_bytes: u64) -> Extent {
    let end = disk.properties().len_bytes;
    let start = start_bytes.min(end);
    Extent::new(start, len_bytes.min(end - start))
}

fn read_bytes_at(
    disk: &dyn Disk,
    at_bytes: u64,
    len_bytes: u64,
) -> Result<PrivateBuffer, PartitionError> {
    let block = Block::private(len_bytes as usize);
    let read = disk.read_now(Extent::new(at_bytes, len_bytes), block);
    Ok(read.map_err(|refused| refused.error)?.into_private())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |n, &b| n << 8 | u32::from(b))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |n, &b| n << 8 | u64::from(b))
}

/// Returns the CRC-32 of IEEE 802.3. Bit by bit is fast enough for a few kilobytes per mount.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryDisk;

    fn mbr_entry(bytes: &mut [u8], sector: usize, i: usize, kind: u8, start: u32, sectors: u32) {
        let at = sector * 512;
        bytes[at + 510..at + 512].copy_from_slice(&[0x55, 0xaa]);
        let e = at + 446 + 16 * i;
        bytes[e + 4] = kind;
        bytes[e + 8..e + 12].copy_from_slice(&start.to_le_bytes());
        bytes[e + 12..e + 16].copy_from_slice(&sectors.to_le_bytes());
    }

    fn image_with_logical_partitions() -> Vec<u8> {
        let mut bytes = vec![0; 512 * 100];
        mbr_entry(&mut bytes, 0, 0, 0x83, 2, 8);
        mbr_entry(&mut bytes, 0, 2, 0x05, 20, 80);
        mbr_entry(&mut bytes, 20, 0, 0x83, 1, 5);
        mbr_entry(&mut bytes, 20, 1, 0x05, 10, 20);
        mbr_entry(&mut bytes, 30, 0, 0x83, 2, 6);
        bytes
    }

    fn read_image_partitions(bytes: &[u8]) -> Result<Vec<(u32, u64, u64)>, PartitionError> {
        let found = read_partitions(&MemoryDisk::new(bytes.to_vec(), 512))?;
        let row = |p: &Partition| (p.number, p.extent.start_bytes / 512, p.extent.len_bytes / 512);
        Ok(found.iter().map(row).collect())
    }

    #[test]
    fn primary_and_logical_partitions() {
        let bytes = image_with_logical_partitions();
        assert_eq!(read_image_partitions(&bytes).unwrap(), [(1, 2, 8), (5, 21, 5), (6, 32, 6)]);
        let disk = MemoryDisk::new(bytes, 512);
        assert_eq!(find_partition(&disk, 6).unwrap(), Extent::new(32 * 512, 6 * 512));
        let missing = find_partition(&disk, 2).unwrap_err();
        assert_eq!(missing.to_string(), "there is no partition 2; the table has: 1, 5, 6");
    }

    #[test]
    fn cyclic_logical_chain_ends() {
        let mut bytes = image_with_logical_partitions();
        mbr_entry(&mut bytes, 30, 1, 0x05, 0, 20);
        let damaged = read_image_partitions(&bytes).unwrap_err();
        assert_eq!(
            damaged,
            PartitionError::Damaged("the chain of logical partitions does not end")
        );
    }

    #[test]
    fn partitions_of_truncated_disk_are_clipped() {
        let mut bytes = image_with_logical_partitions();
        bytes.truncate(512 * 34);
        assert_eq!(read_image_partitions(&bytes).unwrap(), [(1, 2, 8), (5, 21, 5), (6, 32, 2)]);
        mbr_entry(&mut bytes, 0, 1, 0x83, 90, 11);
        assert_eq!(read_image_partitions(&bytes).unwrap()[1], (2, 34, 0));
        let beyond = find_partition(&MemoryDisk::new(bytes, 512), 2).unwrap_err();
        assert_eq!(beyond, PartitionError::Beyond(2));
        assert_eq!(read_image_partitions(&[0; 1024]), Err(PartitionError::NoTable));
        assert!(matches!(read_image_partitions(&[]), Err(PartitionError::Disk(_))));
    }

    fn image_with_gpt(sector: usize) -> Vec<u8> {
        let mut bytes = vec![0; sector * 128];
        mbr_entry(&mut bytes, 0, 0, PROTECTIVE_MBR_TYPE, 1, 127);
        let entries = 2 * sector;
        for (i, first, last) in [(0, 40u64, 47u64), (3, 50, 50)] {
            let e = entries + 128 * i;
            bytes[e] = 1;
            bytes[e + 32..e + 40].copy_from_slice(&first.to_le_bytes());
            bytes[e + 40..e + 48].copy_from_slice(&last.to_le_bytes());
        }
        let sum = crc32(&bytes[entries..entries + 128 * 4]);
        let h = sector;
        bytes[h..h + 8].copy_from_slice(b"EFI PART");
        bytes[h + 12..h + 16].copy_from_slice(&92u32.to_le_bytes());
        bytes[h + 72..h + 80].copy_from_slice(&2u64.to_le_bytes());
        bytes[h + 80..h + 84].copy_from_slice(&4u32.to_le_bytes());
        bytes[h + 84..h + 88].copy_from_slice(&128u32.to_le_bytes());
        bytes[h + 88..h + 92].copy_from_slice(&sum.to_le_bytes());
        let sum = crc32(&bytes[h..h + 92]);
        bytes[h + 16..h + 20].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    #[test]
    fn gpt_is_read_with_512_and_4096_byte_sectors() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(read_image_partitions(&image_with_gpt(512)).unwrap(), [(1, 40, 8), (4, 50, 1)]);
        assert_eq!(
            read_image_partitions(&image_with_gpt(4096)).unwrap(),
            [(1, 320, 64), (4, 400, 8)]
        );
    }

    /// Returns the same disk with a backup at its end, as tools create it.
    fn image_with_backup_gpt(sector: usize) -> Vec<u8> {
        let mut bytes = image_with_gpt(sector);
        let last = bytes.len() - sector;
        bytes.copy_within(2 * sector..2 * sector + 512, last - sector);
        bytes.copy_within(sector..sector + 512, last);
        for (h, other, entries) in [(sector, 127u64, 2u64), (last, 1, 126)] {
            bytes[h + 32..h + 40].copy_from_slice(&other.to_le_bytes());
            bytes[h + 72..h + 80].copy_from_slice(&entries.to_le_bytes());
            bytes[h + 16..h + 20].fill(0);
            let sum = crc32(&bytes[h..h + 92]);
            bytes[h + 16..h + 20].copy_from_slice(&sum.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn backup_gpt_is_used_if_primary_is_damaged() {
        let table = |bytes: &[u8]| read_partition_table(&MemoryDisk::new(bytes.to_vec(), 512));
        for sector in [512, 4096] {
            let whole = image_with_backup_gpt(sector);
            let first = table(&whole).unwrap();
            assert!(!first.is_backup);
            let backup = Ok(PartitionTable { is_backup: true, ..first.clone() });
            // Damage to the header, its entries, both, also the first sector, and all of it.
            let ends = [
                (sector, sector + 8),
                (sector + 90, sector + 91),
                (2 * sector, 2 * sector + 1),
                (sector, 3 * sector),
                (0, 3 * sector),
            ];
            for (from, to) in ends {
                let mut bytes = whole.clone();
                bytes[from..to].iter_mut().for_each(|byte| *byte ^= 0xff);
                assert_eq!(table(&bytes), backup, "{from}..{to} of {sector}");
                // The disk has grown since: an intact first header locates the backup.
                bytes.extend(vec![0; sector * 4]);
                let header_is_whole = from >= 2 * sector;
                assert_eq!(table(&bytes).is_ok(), header_is_whole, "{from}..{to} of {sector}");
            }
            // Without the first sector the primary GPT is still found.
            let mut bytes = whole.clone();
            bytes[..512].fill(0);
            assert_eq!(table(&bytes), Ok(first));
            let mut bytes = whole.clone();
            bytes[sector..sector + 512].fill(0);
            let last = bytes.len() - sector;
            bytes[last + 17] ^= 1;
            let said = PartitionError::Damaged("checksum of the GPT header");
            assert_eq!(read_image_partitions(&bytes), Err(said));
        }
    }

    #[test]
    fn flipped_gpt_byte_is_detected_without_panic() {
        for bytes in [image_with_gpt(512), image_with_logical_partitions()] {
            let is_gpt = bytes[446 + 4] == PROTECTIVE_MBR_TYPE;
            for at in 0..2 * 512 + 512 {
                for flip in [0x01, 0x80, 0xff] {
                    let mut bytes = bytes.clone();
                    bytes[at] ^= flip;
                    let found = read_image_partitions(&bytes);
                    // The checksummed parts of the GPT: 92 bytes of header, 4 entries.
                    if is_gpt && ((512..604).contains(&at) || at >= 1024) {
                        assert!(found.is_err(), "byte {at}");
                    }
                }
            }
        }
    }
}
