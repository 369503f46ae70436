//! VMDK images, sparse or stream-optimised: of VMware, and in OVA archives. [`extents`] reads
//! images in several files.
//!
//! ```text
//!   sparse   | header | descriptor | directory ──▶ tables ──▶ grains |
//!   stream   | header | descriptor | marker, compressed grain .. | table .. | directory | footer |
//! ```
//! After VMware's Virtual Disk Format 5.0. A descriptor inside an image may name a parent, but no
//! other files for its contents.

pub(crate) mod extents;

use draconis_types::lock::Mutex;
use std::io::Read;
use std::sync::Arc;

use crate::backing::reference::{BackingFile, BackingId};
use crate::image_file::{ImageFile, le16, le32, le64};
use crate::image_map::{ImageMap, Location, MAX_CHUNK_BYTES};
use crate::{Error, Format, UnsupportedFeature};

const SECTOR_BYTES: u64 = 512;
const COMPRESSED_FLAG: u32 = 1 << 16;
/// Directory offset that refers to the footer.
const GD_AT_END: u64 = u64::MAX;
/// Parent CID of an image without a parent.
const CID_NOPARENT: u32 = u32::MAX;
const MAX_GRAIN_DIRECTORY_ENTRIES: u64 = 4 << 20;
const MAX_CACHED_TABLES: usize = 32;

type GrainTable = (u32, Arc<Vec<u32>>);

pub(crate) struct Vmdk {
    len_bytes: u64,
    grain_bytes: u64,
    grain_table_entries: u64,
    directory: Vec<u32>,
    packed: bool,
    behind: Option<BackingFile>,
    kept: Mutex<Vec<GrainTable>>,
}

impl Vmdk {
    pub(crate) fn open(file: &ImageFile) -> Result<Self, Error> {
        let mut header = file.read_vec(0, 512)?;
        if !matches!(le32(&header, 4), 1..=3) {
            return Err(UnsupportedFeature::Version("VMDK", le32(&header, 4).into()).into());
        }
        if le64(&header, 56) == GD_AT_END {
            // Only the end-of-stream marker follows it.
            let at = file.len_bytes().checked_sub(1024).ok_or(Error::Damaged("VMDK: too short"))?;
            header = file.read_vec(at, 512)?;
            if !header.starts_with(b"KDMV") {
                return Err(Error::Damaged("VMDK: the stream has no footer"));
            }
        }
        let (capacity, grain) = (le64(&header, 12), le64(&header, 20));
        let per_table = u64::from(le32(&header, 44));
        if !grain.is_power_of_two() || !(8..=MAX_CHUNK_BYTES / SECTOR_BYTES).contains(&grain) {
            return Err(Error::Damaged("VMDK: grains of an impossible size"));
        }
        if !(1..=4096).contains(&per_table) || capacity > 1 << 53 {
            return Err(Error::Damaged("VMDK: tables of an impossible size"));
        }
        let descriptor = read_descriptor(file, &header)?;
        let is_extent = |line: &&str| line.starts_with("RW ") || line.starts_with("RDONLY ");
        if descriptor.lines().filter(is_extent).count() > 1 {
            return Err(UnsupportedFeature::Feature(
                "VMDK",
                "a header and its contents in other files",
            )
            .into());
        }
        let id = descriptor_number(&descriptor, "parentCID")?.filter(|id| *id != CID_NOPARENT);
        let behind = id.map(|id| BackingFile {
            name: descriptor_value(&descriptor, "parentFileNameHint")
                .unwrap_or_default()
                .to_owned(),
            id: BackingId::One(Format::Vmdk, vec![format_cid(id)]),
        });
        let packed = le32(&header, 8) & COMPRESSED_FLAG != 0;
        if packed && le16(&header, 77) != 1 {
            return Err(UnsupportedFeature::Feature("VMDK", "a compression").into());
        }
        let entries = capacity.div_ceil(grain * per_table);
        if entries > MAX_GRAIN_DIRECTORY_ENTRIES {
            return Err(Error::Damaged("VMDK: its directory does not fit its length"));
        }
        let at = le64(&header, 56).checked_mul(SECTOR_BYTES);
        let at = at.ok_or(Error::Damaged("VMDK: its directory lies behind its end"))?;
        let directory = read_grain_table(file, at, entries)?;
        let (len_bytes, grain_bytes) = (capacity * SECTOR_BYTES, grain * SECTOR_BYTES);
        let kept = Mutex::default();
        Ok(Self {
            len_bytes,
            grain_bytes,
            grain_table_entries: per_table,
            directory,
            packed,
            behind,
            kept,
        })
    }

    /// Returns the location of an absent grain.
    fn absent_location(&self, at: u64) -> Location {
        match self.behind {
            Some(_) => Location::Backing(at),
            None => Location::Zeros,
        }
    }

    fn cached_grain_table(&self, file: &ImageFile, sector: u32) -> Result<Arc<Vec<u32>>, Error> {
        let lock = || self.kept.lock();
        if let Some((_, found)) = lock().iter().find(|(kept, _)| *kept == sector) {
            return Ok(found.clone());
        }
        let found = Arc::new(read_grain_table(
            file,
            u64::from(sector) * SECTOR_BYTES,
            self.grain_table_entries,
        )?);
        let mut kept = lock();
        if kept.len() >= MAX_CACHED_TABLES {
            kept.remove(0);
        }
        kept.push((sector, found.clone()));
        Ok(found)
    }
}

/// Returns the identity by which differencing images know this one; it changes with its contents.
pub(crate) fn read_identity(file: &ImageFile) -> Result<Option<String>, Error> {
    let header = file.read_vec(0, file.len_bytes().min(512) as usize)?;
    if !header.starts_with(b"KDMV") {
        return Ok(None);
    }
    let descriptor = read_descriptor(file, &header)?;
    Ok(descriptor_number(&descriptor, "CID")?.map(format_cid))
}

fn format_cid(id: u32) -> String {
    format!("{id:08x}")
}

/// Returns the embedded descriptor.
fn read_descriptor(file: &ImageFile, header: &[u8]) -> Result<String, Error> {
    let (at, len) = (le64(header, 28), le64(header, 36));
    if at == 0 || len == 0 || at > 1 << 20 {
        return Ok(String::new());
    }
    let text = file.read_vec(at * SECTOR_BYTES, (len.min(40) * SECTOR_BYTES) as usize)?;
    let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(text).into_owned())
}

fn descriptor_value<'a>(descriptor: &'a str, key: &str) -> Option<&'a str> {
    let mut pairs = descriptor.lines().filter_map(|line| line.split_once('='));
    let found = pairs.find(|(found, _)| found.trim().eq_ignore_ascii_case(key));
    found.map(|(_, value)| value.trim().trim_matches('"'))
}

fn descriptor_number(descriptor: &str, key: &str) -> Result<Option<u32>, Error> {
    let number =
        descriptor_value(descriptor, key).map(|text| u32::from_str_radix(text, 16)).transpose();
    number.map_err(|_| Error::Damaged("VMDK: an identity that is no number"))
}

fn read_grain_table(file: &ImageFile, at: u64, entries: u64) -> Result<Vec<u32>, Error> {
    let bytes = file.read_vec(at, (entries * 4) as usize)?;
    Ok((0..entries as usize).map(|nth| le32(&bytes, nth * 4)).collect())
}

impl ImageMap for Vmdk {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn find(&self, file: &ImageFile, at: u64) -> Result<(Location, u64), Error> {
        let (nth, skip) = (at / self.grain_bytes, at % self.grain_bytes);
        let table_bytes = self.grain_bytes * self.grain_table_entries;
        let table = usize::try_from(nth / self.grain_table_entries).ok();
        let table = match table.and_then(|nth| self.directory.get(nth)) {
            None | Some(0) => {
                return Ok((self.absent_location(at), table_bytes - at % table_bytes));
            }
            Some(sector) => self.cached_grain_table(file, *sector)?,
        };
        let rest = self.grain_bytes - skip;
        Ok(match table.get((nth % self.grain_table_entries) as usize).copied().unwrap_or(0) {
            0 => (self.absent_location(at), rest),
            1 => (Location::Zeros, rest),
            sector if self.packed => (Location::Compressed { piece: sector.into(), skip }, rest),
            sector => (Location::File(u64::from(sector) * SECTOR_BYTES + skip), rest),
        })
    }

    fn backing_file(&self) -> Option<&BackingFile> {
        self.behind.as_ref()
    }

    fn decompress_chunk(&self, file: &ImageFile, sector: u64) -> Result<Vec<u8>, Error> {
        let head = file.read_vec(sector * SECTOR_BYTES, 12)?;
        let len = u64::from(le32(&head, 8));
        if len > 2 * MAX_CHUNK_BYTES {
            return Err(Error::Damaged("VMDK: a packed grain of an impossible size"));
        }
        let packed = file.read_vec(sector * SECTOR_BYTES + 12, len as usize)?;
        let mut unpacked = vec![];
        let stream = flate2::bufread::ZlibDecoder::new(&packed[..]);
        let read = stream.take(self.grain_bytes).read_to_end(&mut unpacked);
        // The last grain of a disk may be shorter.
        if read.is_err() || unpacked.is_empty() {
            return Err(Error::Damaged("VMDK: a packed grain cannot be unpacked"));
        }
        unpacked.resize(self.grain_bytes as usize, 0);
        Ok(unpacked)
    }
}
