//! VHD images, of Virtual PC and Azure. A fixed one is a raw disk followed by a footer.
//!
//! ```text
//!   fixed     | contents | footer |
//!   dynamic   | footer | header | BAT | block: bitmap, contents | .. | footer |
//! ```
//! After the Virtual Hard Disk Image Format Specification 1.0. A bit of a block's bitmap is set if
//! its sector was written; other sectors are zeros, or those of the parent image.

use crate::backing::reference::{BackingFile, BackingId, decode_utf16};
use crate::image_file::{ImageFile, be32, be64};
use crate::image_map::{ImageMap, Location};
use crate::{Error, Format, UnsupportedFeature};

const FOOTER_BYTES: u64 = 512;
const SECTOR_BYTES: u64 = 512;
/// Number of sectors that a sector of a bitmap covers.
const SECTORS_PER_BITMAP_SECTOR: u64 = SECTOR_BYTES * 8;
const UNUSED_BAT_ENTRY: u32 = u32::MAX;
/// Maximum blocks of a disk: 2 TiB of the usual 2 MiB are a million.
const MAX_BLOCKS: u64 = 8 << 20;

pub(crate) struct Vhd {
    len_bytes: u64,
    block_bytes: u64,
    table: Vec<u32>,
    behind: Option<BackingFile>,
}

/// Returns true if the copy of the footer at the start has its cookie.
pub(crate) fn is_footer(bytes: &[u8]) -> bool {
    bytes.starts_with(b"conectix")
}

/// Returns the length of the raw disk if this is the footer of a fixed image in a file of `len`
/// bytes. No other format is detected by the end of a file.
pub(crate) fn fixed_disk_len(footer: &[u8], len: u64) -> Option<u64> {
    let disk = be64(footer, 48);
    let is = is_footer(footer) && has_valid_checksum(footer, 64) && be32(footer, 60) == 2;
    (is && disk.checked_add(FOOTER_BYTES) == Some(len)).then_some(disk)
}

/// Returns the identity by which differencing images know this one; a fixed image has its footer
/// only at the end.
pub(crate) fn read_identity(file: &ImageFile) -> Result<Option<String>, Error> {
    for at in [file.len_bytes().saturating_sub(FOOTER_BYTES), 0] {
        let footer = file.read_vec(at, FOOTER_BYTES.min(file.len_bytes() - at) as usize)?;
        if is_footer(&footer) && has_valid_checksum(&footer, 64) {
            return Ok(Some(format_identity(footer.get(68..84).unwrap_or_default())));
        }
    }
    Ok(None)
}

fn format_identity(identity: &[u8]) -> String {
    identity.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn has_valid_checksum(bytes: &[u8], at: usize) -> bool {
    let inside = |nth: usize| (at..at + 4).contains(&nth);
    let bytes_but_it = bytes.iter().enumerate().filter(|(nth, _)| !inside(*nth));
    let sum = bytes_but_it.fold(0u32, |sum, (_, byte)| sum.wrapping_add(u32::from(*byte)));
    !sum == be32(bytes, at)
}

impl Vhd {
    pub(crate) fn open(file: &ImageFile) -> Result<Self, Error> {
        // The copy at the start equals the footer, and is present in truncated files.
        let footer = file.read_vec(0, 512)?;
        if !is_footer(&footer) || !has_valid_checksum(&footer, 64) {
            return Err(Error::Damaged("VHD: checksum of the footer"));
        }
        let len_bytes = be64(&footer, 48);
        let differs = match be32(&footer, 60) {
            3 => false,
            4 => true,
            other => return Err(UnsupportedFeature::Version("VHD", other.into()).into()),
        };
        let header = file.read_vec(be64(&footer, 16), 1024)?;
        let (block_bytes, table) = read_dynamic_header(file, &header, len_bytes)?;
        let behind = differs.then(|| BackingFile {
            name: decode_utf16(header.get(64..576).unwrap_or_default(), u16::from_be_bytes),
            id: BackingId::One(
                Format::Vhd,
                vec![format_identity(header.get(40..56).unwrap_or_default())],
            ),
        });
        Ok(Self { len_bytes, block_bytes, table, behind })
    }

    /// Returns the location of an absent block or sector.
    fn absent_location(&self, at: u64) -> Location {
        match self.behind {
            Some(_) => Location::Backing(at),
            None => Location::Zeros,
        }
    }
}

fn read_dynamic_header(
    file: &ImageFile,
    header: &[u8],
    len_bytes: u64,
) -> Result<(u64, Vec<u32>), Error> {
    if !header.starts_with(b"cxsparse") || !has_valid_checksum(header, 36) {
        return Err(Error::Damaged("VHD: checksum of the header"));
    }
    let block = u64::from(be32(header, 32));
    if !block.is_power_of_two() || !(SECTOR_BYTES..=1 << 30).contains(&block) {
        return Err(Error::Damaged("VHD: blocks of an impossible size"));
    }
    let count = len_bytes.div_ceil(block);
    if count > u64::from(be32(header, 28)) || count > MAX_BLOCKS {
        return Err(Error::Damaged("VHD: its table does not fit its length"));
    }
    let table = file.read_vec(be64(header, 16), (count * 4) as usize)?;
    Ok((block, (0..count as usize).map(|nth| be32(&table, nth * 4)).collect()))
}

impl ImageMap for Vhd {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn find(&self, file: &ImageFile, at: u64) -> Result<(Location, u64), Error> {
        let (block, skip) = (self.block_bytes, at % self.block_bytes);
        let entry = usize::try_from(at / block).ok().and_then(|nth| self.table.get(nth));
        let start = match entry.copied() {
            None | Some(UNUSED_BAT_ENTRY) => return Ok((self.absent_location(at), block - skip)),
            Some(sector) => u64::from(sector) * SECTOR_BYTES,
        };
        let bitmap_bytes = (block / SECTOR_BYTES / 8).max(1).next_multiple_of(SECTOR_BYTES);
        // Up to the next different bit, in the part of the bitmap that is read at once.
        let first = skip / SECTOR_BYTES;
        let (page, last) = (
            first / SECTORS_PER_BITMAP_SECTOR,
            (first / SECTORS_PER_BITMAP_SECTOR + 1) * SECTORS_PER_BITMAP_SECTOR,
        );
        let bits = file.read_vec(start + page * SECTOR_BYTES, SECTOR_BYTES as usize)?;
        let written = |sector: u64| {
            let byte =
                bits.get((sector % SECTORS_PER_BITMAP_SECTOR / 8) as usize).copied().unwrap_or(0);
            byte >> (7 - sector % 8) & 1 == 1
        };
        let end = last.min(block / SECTOR_BYTES);
        let alike = (first..end).take_while(|it| written(*it) == written(first)).count() as u64;
        let run = alike * SECTOR_BYTES - skip % SECTOR_BYTES;
        Ok(match written(first) {
            true => (Location::File(start + bitmap_bytes + skip), run),
            false => (self.absent_location(at), run),
        })
    }

    fn backing_file(&self) -> Option<&BackingFile> {
        self.behind.as_ref()
    }
}
