//! VHDX images, fixed, dynamic and differencing: of Hyper-V and WSL.
//!
//! ```text
//!   | file type | header 1 | header 2 | regions ×2 | log | BAT | metadata | blocks |
//! ```
//! After \[MS-VHDX\]. The log of an image that was not closed cleanly overlays all reads, and is
//! replayed when the image is opened for writing.

mod locator;
mod log;
mod writable;

use self::log::{LogReplay, LogWrite};
pub(crate) use self::writable::WritableVhdx;
use crate::backing::reference::BackingFile;
use crate::image_file::{ImageFile, le16, le32, le64};
use crate::image_map::{ImageMap, Location};
use crate::{Error, UnsupportedFeature};

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
/// Offsets in a header of the GUIDs of the file, of its contents, and of its log entries.
const FILE_WRITE_GUID_OFFSET: usize = 16;
const DATA_WRITE_GUID_AT: usize = 32;
const LOG_GUID_AT: usize = 48;
/// Maximum BAT entries: 64 TiB of the smallest blocks.
const MAX_BAT_ENTRIES: u64 = 64 << 20 >> 3;

pub(crate) const BAT_GUID: [u8; 16] =
    guid(0x2DC2_7766, 0xF623, 0x4200, [0x9D, 0x64, 0x11, 0x5E, 0x9B, 0xFD, 0x4A, 0x08]);
pub(crate) const METADATA_GUID: [u8; 16] =
    guid(0x8B7C_A206, 0x4790, 0x4B9A, [0xB8, 0xFE, 0x57, 0x5F, 0x05, 0x0F, 0x88, 0x6E]);
pub(crate) const FILE_PARAMETERS_GUID: [u8; 16] =
    guid(0xCAA1_6737, 0xFA36, 0x4D43, [0xB3, 0xB6, 0x33, 0xF0, 0xAA, 0x44, 0xE7, 0x6B]);
pub(crate) const DISK_SIZE_GUID: [u8; 16] =
    guid(0x2FA5_4224, 0xCD1B, 0x4876, [0xB2, 0x11, 0x5D, 0xBE, 0xD8, 0x3B, 0xF4, 0xB8]);
pub(crate) const SECTOR_SIZE_GUID: [u8; 16] =
    guid(0x8141_BF1D, 0xA96F, 0x4709, [0xBA, 0x47, 0xF2, 0x33, 0xA8, 0xFA, 0xAB, 0x5F]);
pub(crate) const PARENT_LOCATOR_GUID: [u8; 16] =
    guid(0xA8D3_5F2D, 0xB30B, 0x454D, [0xAB, 0xF7, 0xD3, 0xD8, 0x48, 0x34, 0xAB, 0x0C]);

/// Flag of the file parameters: the image has a parent.
const HAS_PARENT_FLAG: u32 = 2;
const LEAVE_ALLOCATED_FLAG: u32 = 1;
/// State of a sector bitmap entry in the BAT.
const SB_BLOCK_PRESENT: u64 = 6;
/// Number of bitmap bits that are read at once.
const BITMAP_READ_BITS: u64 = 512 * 8;

/// Returns a GUID in its stored form.
pub(crate) const fn guid(a: u32, b: u16, c: u16, d: [u8; 8]) -> [u8; 16] {
    let ([a0, a1, a2, a3], [b0, b1], [c0, c1]) =
        (a.to_le_bytes(), b.to_le_bytes(), c.to_le_bytes());
    let [d0, d1, d2, d3, d4, d5, d6, d7] = d;
    [a0, a1, a2, a3, b0, b1, c0, c1, d0, d1, d2, d3, d4, d5, d6, d7]
}

/// Offsets of the two headers.
const HEADER_OFFSETS: [u64; 2] = [64 * KIB, 128 * KIB];
const HEADER_BYTES: usize = 4 << 10;
/// Maximum number of regions.
const MAX_REGIONS: u32 = 2047;

pub(crate) struct Vhdx {
    len_bytes: u64,
    block_bytes: u64,
    /// Payload blocks between two sector bitmap blocks in the BAT.
    chunk_ratio: u64,
    bat_offset: u64,
    /// The BAT, in whole sectors.
    bat: Vec<u64>,
    /// The newer header, and its offset.
    header: Vec<u8>,
    header_at: u64,
    /// Offset and length of the log and of the regions.
    log: (u64, u64),
    regions: Vec<(u64, u64)>,
    /// True if a required region is unknown.
    has_unknown_region: bool,
    /// Contents of the log, if the image was not closed cleanly.
    replay: Option<LogReplay>,
    sector_bytes: u64,
    /// True if allocated blocks must stay allocated (LeaveBlocksAllocated).
    is_fixed: bool,
    backing: Option<BackingFile>,
}

impl Vhdx {
    pub(crate) fn open(file: &ImageFile) -> Result<Self, Error> {
        let (header_at, header) = newest_header(file)?;
        if le16(&header, 66) != 1 {
            return Err(UnsupportedFeature::Version("VHDX", le16(&header, 66).into()).into());
        }
        let log = (le64(&header, 72), u64::from(le32(&header, 68)));
        let replay = match header.get(LOG_GUID_AT..LOG_GUID_AT + 16) {
            Some(id) if id != [0; 16] => match le16(&header, 64) {
                0 => Some(LogReplay::read(file, log.0, log.1, id)?),
                other => {
                    return Err(UnsupportedFeature::Version("VHDX, its log", other.into()).into());
                }
            },
            _ => None,
        };
        let file = &file.clone().zero_tail_if_unclean(replay.is_some());
        let bytes = |at: u64, len: usize| -> Result<Vec<u8>, Error> {
            let mut bytes = file.read_vec(at, len)?;
            if let Some(replay) = &replay {
                replay.apply_to_read(at, &mut bytes);
            }
            Ok(bytes)
        };
        let regions = read_region_table(&bytes)?;
        let count = le32(&regions, 8).min(MAX_REGIONS) as usize;
        let all = (0..count).map(|nth| regions.get(16 + 32 * nth..).unwrap_or_default());
        let is_unknown = |region: &[u8]| {
            !region.starts_with(&BAT_GUID)
                && !region.starts_with(&METADATA_GUID)
                && le32(region, 28) & 1 != 0
        };
        let has_unknown = all.clone().any(is_unknown);
        let all = all.map(|region| (le64(region, 16), u64::from(le32(region, 24)))).collect();
        let region = |id: [u8; 16]| {
            let found = (0..count).map(|nth| 16 + 32 * nth);
            let mut found = found.filter(|at| regions.get(*at..at + 16) == Some(&id[..]));
            found.next().map(|at| (le64(&regions, at + 16), u64::from(le32(&regions, at + 24))))
        };
        let metadata = region(METADATA_GUID).ok_or(Error::Damaged("VHDX: no metadata"))?;
        let (at, len) = region(BAT_GUID).ok_or(Error::Damaged("VHDX: no table of blocks"))?;
        let items = bytes(metadata.0, (64 * KIB) as usize)?;
        if !items.starts_with(b"metadata") {
            return Err(Error::Damaged("VHDX: no metadata"));
        }
        // Returns offset and claimed length of a metadata item.
        let place = |id: [u8; 16]| -> Result<(u64, u32), Error> {
            let mut found = (0..le16(&items, 10).min(2047) as usize).map(|nth| 32 + 32 * nth);
            let found = found.find(|at| items.get(*at..at + 16) == Some(&id[..]));
            let found = found.ok_or(Error::Damaged("VHDX: an item of metadata is missing"))?;
            let at = metadata.0.saturating_add(le32(&items, found + 16).into());
            Ok((at, le32(&items, found + 20)))
        };
        let item = |id: [u8; 16], len: usize| bytes(place(id)?.0, len);
        let parameters = item(FILE_PARAMETERS_GUID, 8)?;
        let block_bytes = u64::from(le32(&parameters, 0));
        if !block_bytes.is_power_of_two() || !(MIB..=256 * MIB).contains(&block_bytes) {
            return Err(Error::Damaged("VHDX: blocks of an impossible size"));
        }
        let backing = match le32(&parameters, 4) & HAS_PARENT_FLAG {
            0 => None,
            _ => {
                let (at, len) = place(PARENT_LOCATOR_GUID)?;
                if len > locator::MAX_LOCATOR_BYTES {
                    return Err(Error::DamagedAt("VHDX: a locator of its parent so long", at));
                }
                Some(locator::parse_parent(&bytes(at, len as usize)?)?)
            }
        };
        let len_bytes = le64(&item(DISK_SIZE_GUID, 8)?, 0);
        let sector_bytes = u64::from(le32(&item(SECTOR_SIZE_GUID, 4)?, 0));
        if !matches!(sector_bytes, 512 | 4096) {
            return Err(Error::Damaged("VHDX: sectors of an impossible size"));
        }
        let chunk = (sector_bytes << 23) / block_bytes;
        let blocks = len_bytes.div_ceil(block_bytes);
        let entries = match backing {
            None => blocks + blocks.saturating_sub(1) / chunk,
            // The BAT includes the last bitmap.
            Some(_) => blocks.div_ceil(chunk) * (chunk + 1),
        };
        if entries > MAX_BAT_ENTRIES || entries * 8 > len {
            return Err(Error::Damaged("VHDX: its table does not fit its length"));
        }
        let table = bytes(at, ((entries * 8) as usize).next_multiple_of(log::LOG_SECTOR_BYTES))?;
        let table = (0..table.len() / 8).map(|nth| le64(&table, nth * 8)).collect();
        Ok(Self {
            len_bytes,
            block_bytes,
            chunk_ratio: chunk,
            bat_offset: at,
            bat: table,
            header,
            header_at,
            log,
            regions: all,
            has_unknown_region: has_unknown,
            replay,
            sector_bytes,
            is_fixed: le32(&parameters, 4) & LEAVE_ALLOCATED_FLAG != 0,
            backing,
        })
    }

    /// For a partially present block: returns true if the sector at `at` is the image's own, and
    /// the length up to the next sector that differs in this.
    fn sector_presence(&self, file: &ImageFile, at: u64) -> Result<(bool, u64), Error> {
        let chunk_bytes = self.chunk_ratio * self.block_bytes;
        let nth = usize::try_from(at / chunk_bytes * (self.chunk_ratio + 1) + self.chunk_ratio);
        let entry = nth.ok().and_then(|nth| self.bat.get(nth)).copied().unwrap_or(0);
        if entry & 7 != SB_BLOCK_PRESENT {
            return Err(Error::DamagedAt("VHDX: no bitmap for a block that is there in part", at));
        }
        let first = at % chunk_bytes / self.sector_bytes;
        let page = first / BITMAP_READ_BITS;
        let page_at = (entry >> 20 << 20) + page * BITMAP_READ_BITS / 8;
        let mut bits = file.read_vec(page_at, (BITMAP_READ_BITS / 8) as usize)?;
        if let Some(replay) = &self.replay {
            replay.apply_to_read(page_at, &mut bits);
        }
        let is_own = |sector: u64| {
            let byte = bits.get((sector % BITMAP_READ_BITS / 8) as usize).copied().unwrap_or(0);
            byte >> (sector % 8) & 1 == 1
        };
        let end = (page + 1) * BITMAP_READ_BITS;
        let alike = (first..end).take_while(|it| is_own(*it) == is_own(first)).count() as u64;
        Ok((is_own(first), alike * self.sector_bytes - at % self.sector_bytes))
    }

    /// Returns true if the last user did not close the image: its tables may refer past the end of
    /// the file, which then reads as zeros.
    pub(crate) fn needs_replay(&self) -> bool {
        self.replay.is_some()
    }

    /// Removes and returns the contents of the log.
    fn take_log_writes(&mut self) -> Vec<LogWrite> {
        self.replay.take().map(|replay| replay.writes).unwrap_or_default()
    }

    /// Returns the index of the BAT entry for disk offset `at`.
    fn bat_index(&self, at: u64) -> usize {
        let nth = at / self.block_bytes;
        usize::try_from(nth + nth / self.chunk_ratio).unwrap_or(usize::MAX)
    }
}

/// Sets the checksum of a structure.
pub(crate) fn set_checksum(bytes: &mut [u8]) {
    let mut put = |sum: u32| {
        if let Some(room) = bytes.get_mut(4..8) {
            room.copy_from_slice(&sum.to_le_bytes());
        }
        crc32c::crc32c(bytes)
    };
    let sum = put(0);
    put(sum);
}

fn has_valid_checksum(bytes: &[u8]) -> bool {
    let mut clear = bytes.to_vec();
    if let Some(sum) = clear.get_mut(4..8) {
        sum.fill(0);
    }
    crc32c::crc32c(&clear) == le32(bytes, 4)
}

/// Returns the identity by which differencing images know this one; it changes with its contents.
pub(crate) fn data_guid(file: &ImageFile) -> Result<Option<String>, Error> {
    if !file.read_vec(0, file.len_bytes().min(8) as usize)?.starts_with(b"vhdxfile") {
        return Ok(None);
    }
    let (_, header) = newest_header(file)?;
    Ok(Some(locator::format_guid(
        header.get(DATA_WRITE_GUID_AT..DATA_WRITE_GUID_AT + 16).unwrap_or_default(),
    )))
}

/// Returns the newer valid one of the two alternating headers.
fn newest_header(file: &ImageFile) -> Result<(u64, Vec<u8>), Error> {
    let mut best: Option<(u64, Vec<u8>)> = None;
    for at in HEADER_OFFSETS {
        let header = file.read_vec(at, HEADER_BYTES)?;
        let newer = best.as_ref().is_none_or(|(_, best)| le64(best, 8) < le64(&header, 8));
        if header.starts_with(b"head") && has_valid_checksum(&header) && newer {
            best = Some((at, header));
        }
    }
    best.ok_or(Error::Damaged("VHDX: checksums of both headers"))
}

fn read_region_table(
    bytes: &dyn Fn(u64, usize) -> Result<Vec<u8>, Error>,
) -> Result<Vec<u8>, Error> {
    for at in [192 * KIB, 256 * KIB] {
        let table = bytes(at, (64 * KIB) as usize)?;
        if table.starts_with(b"regi") && has_valid_checksum(&table) {
            return Ok(table);
        }
    }
    Err(Error::Damaged("VHDX: checksums of both tables of regions"))
}

impl ImageMap for Vhdx {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn find(&self, file: &ImageFile, at: u64) -> Result<(Location, u64), Error> {
        let skip = at % self.block_bytes;
        let entry = self.bat.get(self.bat_index(at)).copied().unwrap_or(0);
        let rest = self.block_bytes - skip;
        let here = Location::File((entry >> 20 << 20) + skip);
        Ok(match (entry & 7, &self.backing) {
            (0, Some(_)) => (Location::Backing(at), rest),
            // Not present, undefined, zero, unmapped.
            (0..=3, _) => (Location::Zeros, rest),
            (6, _) => (here, rest),
            (7, Some(_)) => {
                let (is_own, run) = self.sector_presence(file, at)?;
                (if is_own { here } else { Location::Backing(at) }, rest.min(run))
            }
            _ => return Err(Error::Damaged("VHDX: a block in an impossible state")),
        })
    }

    fn backing_file(&self) -> Option<&BackingFile> {
        self.backing.as_ref()
    }
}

#[cfg(test)]
mod tests;
