//! qcow2 images, versions 2 and 3, of QEMU.
//!
//! ```text
//!   | header | .. | L1 table ──▶ L2 tables ──▶ clusters: plain, compressed, zeros, unallocated |
//! ```
//! After `docs/interop/qcow2.rst` of QEMU. Reads use the active state of the image. Snapshots are
//! read only when the image is opened for writing, so that they stay intact.
//!
//! Law: tables are read on demand, and each entry is checked against the file.

mod compact;
mod pack;
mod refcounts;
mod snapshots;
mod writable;

use draconis_types::lock::Mutex;
use std::io::Read;
use std::sync::Arc;

pub(crate) use self::writable::WritableQcow2;
use crate::backing::reference::{BackingFile, BackingId};
use crate::image_file::{ImageFile, be32, be64};
use crate::image_map::{ImageMap, Location, MAX_CHUNK_BYTES};
use crate::{Error, UnsupportedFeature};

/// Maximum L1 entries: a disk of 8 EiB with clusters of 2 MiB; 32 MiB, QEMU's limit.
const MAX_L1_ENTRIES: u64 = 4 << 20;
/// Number of cached L2 tables.
const CACHED_L2_TABLES: usize = 32;

/// Header extension that names the format of the backing file.
const BACKING_FORMAT_EXTENSION: u32 = 0xE279_2ACA;
const MAX_HEADER_EXTENSIONS: u32 = 64;

/// Flag of an L1 or L2 entry: the refcount of its cluster is 1.
const OFLAG_COPIED: u64 = 1 << 63;
const OFFSET_MASK: u64 = 0x00FF_FFFF_FFFF_FE00;
const OFLAG_COMPRESSED: u64 = 1 << 62;
const OFLAG_ZERO: u64 = 1;
/// Subclusters of a cluster with extended L2 entries.
const SUBCLUSTERS_PER_CLUSTER: u64 = 32;

const INCOMPAT_DIRTY: u64 = 1;
const INCOMPAT_CORRUPT: u64 = 2;
const INCOMPAT_EXTERNAL_DATA: u64 = 4;
const INCOMPAT_COMPRESSION: u64 = 8;
const INCOMPAT_EXTENDED_L2: u64 = 16;

/// Offset and entries of a cached L2 table.
type CachedL2Table = (u64, Arc<Vec<u64>>);

pub(crate) struct Qcow2 {
    len_bytes: u64,
    cluster_bits: u32,
    l1_table: Vec<u64>,
    l2_cache: Mutex<Vec<CachedL2Table>>,
    zstd: bool,
    /// True if L2 entries have a second word, the subcluster bitmap.
    has_subclusters: bool,
    version: u32,
    l1_table_offset: u64,
    /// True if the last writer did not close the image: clusters past the end read as zeros.
    pub(crate) is_dirty: bool,
    backing: Option<BackingFile>,
}

impl Qcow2 {
    pub(crate) fn open(file: &ImageFile) -> Result<Self, Error> {
        let head = file.read_vec(0, 112.min(file.len_bytes()) as usize)?;
        let version = be32(&head, 4);
        if !matches!(version, 2 | 3) {
            return Err(UnsupportedFeature::Version("qcow2", version.into()).into());
        }
        let cluster_bits = be32(&head, 20);
        if !(9..=21).contains(&cluster_bits) {
            return Err(Error::Damaged("qcow2: clusters of an impossible size"));
        }
        if be32(&head, 32) != 0 {
            return Err(UnsupportedFeature::Encrypted("qcow2").into());
        }
        let incompatible = if version == 3 { be64(&head, 72) } else { 0 };
        if incompatible & INCOMPAT_EXTERNAL_DATA != 0 {
            return Err(UnsupportedFeature::Feature("qcow2", "its contents in another file").into());
        }
        let has_subclusters = incompatible & INCOMPAT_EXTENDED_L2 != 0;
        if has_subclusters && cluster_bits < 14 {
            return Err(Error::Damaged("qcow2: parts of clusters that are shorter than a sector"));
        }
        if incompatible & INCOMPAT_CORRUPT != 0 {
            return Err(Error::Damaged(
                "qcow2: it is marked as damaged; qemu-img check repairs it",
            ));
        }
        if incompatible & !(INCOMPAT_DIRTY | INCOMPAT_COMPRESSION | INCOMPAT_EXTENDED_L2) != 0 {
            return Err(UnsupportedFeature::Feature("qcow2", "features that are not known").into());
        }
        let zstd = match (incompatible & INCOMPAT_COMPRESSION != 0, head.get(104)) {
            (false, _) | (true, Some(0)) => false,
            (true, Some(1)) => true,
            _ => return Err(UnsupportedFeature::Feature("qcow2", "a compression").into()),
        };
        let len_bytes = be64(&head, 24);
        let entries = u64::from(be32(&head, 36));
        // Each L1 entry refers to an L2 table of one cluster.
        let covered = 1u128 << (2 * cluster_bits - if has_subclusters { 4 } else { 3 });
        let needed = u128::from(len_bytes).div_ceil(covered);
        if u128::from(entries) < needed || needed > u128::from(MAX_L1_ENTRIES) {
            return Err(Error::Damaged("qcow2: its first table does not fit its length"));
        }
        let first_at = be64(&head, 40);
        let first = read_table(file, first_at, needed as u64)?;
        let is_dirty = incompatible & INCOMPAT_DIRTY != 0;
        let backing = match (be64(&head, 8), be32(&head, 16)) {
            (0, _) | (_, 0) => None,
            (_, len) if len > 1023 => return Err(Error::Damaged("qcow2: a name too long")),
            (at, len) => {
                let name = file.read_vec(at, len as usize)?;
                Some(String::from_utf8_lossy(&name).into_owned())
            }
        };
        let backing = match backing {
            None => None,
            Some(name) if has_raw_backing_format(file, &head, version)? => {
                Some(BackingFile { name, id: BackingId::Raw })
            }
            Some(name) => Some(BackingFile { name, id: BackingId::Any }),
        };
        let kept = Mutex::default();
        Ok(Self {
            len_bytes,
            cluster_bits,
            l1_table: first,
            l2_cache: kept,
            zstd,
            has_subclusters,
            version,
            l1_table_offset: first_at,
            is_dirty,
            backing,
        })
    }

    fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Decodes the L2 entry of disk offset `at`.
    fn locate(&self, file: &ImageFile, entry: u64, at: u64) -> Result<(Location, u64), Error> {
        let skip = at % self.cluster_bytes();
        let rest = self.cluster_bytes() - skip;
        if entry & OFLAG_COMPRESSED != 0 {
            return Ok((Location::Compressed { piece: entry, skip }, rest));
        }
        Ok(match entry & OFFSET_MASK {
            _ if entry & OFLAG_ZERO != 0 => (Location::Zeros, rest),
            0 => (Location::Backing(at), rest),
            cluster => match file.max_len_bytes().checked_sub(cluster + skip) {
                // The last cluster may be cut off by the end of the file.
                Some(left) if left > 0 => (Location::File(cluster + skip), rest.min(left)),
                _ if cluster < file.len_bytes() || self.is_dirty => (Location::Zeros, rest),
                _ => return Err(Error::Damaged("qcow2: a cluster behind the end of the file")),
            },
        })
    }

    /// Decodes an extended L2 entry. Its bitmap has an allocation bit for each subcluster and,
    /// above these, a zero bit for each.
    fn locate_subcluster(
        &self,
        file: &ImageFile,
        (entry, parts): (u64, u64),
        at: u64,
    ) -> Result<(Location, u64), Error> {
        if entry & OFLAG_COMPRESSED != 0 {
            return self.locate(file, entry, at);
        }
        let len = self.cluster_bytes() / SUBCLUSTERS_PER_CLUSTER;
        let first = at % self.cluster_bytes() / len;
        let state =
            |nth: u64| (parts >> nth & 1 == 1, parts >> (SUBCLUSTERS_PER_CLUSTER + nth) & 1 == 1);
        let alike = (first..SUBCLUSTERS_PER_CLUSTER)
            .take_while(|nth| state(*nth) == state(first))
            .count() as u64;
        let run = alike * len - at % len;
        Ok(match state(first) {
            (_, true) => (Location::Zeros, run),
            (false, false) => (Location::Backing(at), run),
            (true, false) if entry & OFFSET_MASK == 0 => {
                return Err(Error::Damaged("qcow2: a part of a cluster that is not there"));
            }
            (true, false) => {
                let (place, there) = self.locate(file, entry & OFFSET_MASK, at)?;
                (place, run.min(there))
            }
        })
    }

    /// Returns the width of the offset in an entry of a compressed cluster; the sector count is
    /// above it, and is wider for larger clusters.
    fn compressed_offset_bits(&self) -> u32 {
        62 - (self.cluster_bits - 8)
    }

    /// Returns the offset and the maximum length of a compressed cluster.
    fn compressed_extent(&self, entry: u64) -> (u64, u64) {
        let bits = self.compressed_offset_bits();
        let at = entry & ((1 << bits) - 1);
        let sectors = (entry & (OFLAG_COMPRESSED - 1)) >> bits;
        (at, (sectors + 1) * 512 - at % 512)
    }

    /// Returns the offset and the maximum length of a compressed cluster within the file.
    fn compressed_extent_in(&self, file: &ImageFile, entry: u64) -> (u64, u64) {
        let (at, len) = self.compressed_extent(entry);
        (at, len.min(file.max_len_bytes().saturating_sub(at)))
    }

    /// Returns the L2 table at `at` from the cache, or reads it.
    fn l2_table(&self, file: &ImageFile, at: u64) -> Result<Arc<Vec<u64>>, Error> {
        let lock = || self.l2_cache.lock();
        if let Some((_, found)) = lock().iter().find(|(kept, _)| *kept == at) {
            return Ok(found.clone());
        }
        let found = Arc::new(read_table(file, at, self.cluster_bytes() / 8)?);
        let mut kept = lock();
        if kept.len() >= CACHED_L2_TABLES {
            kept.remove(0);
        }
        kept.push((at, found.clone()));
        Ok(found)
    }
}

/// Returns true if a header extension names `raw` as the format of the backing file.
fn has_raw_backing_format(file: &ImageFile, head: &[u8], version: u32) -> Result<bool, Error> {
    let mut at = if version == 3 { u64::from(be32(head, 100)) } else { 72 };
    for _ in 0..MAX_HEADER_EXTENSIONS {
        let extension = file.read_vec(at, 8)?;
        let (kind, len) = (be32(&extension, 0), be32(&extension, 4));
        match kind {
            0 => break,
            BACKING_FORMAT_EXTENSION if len <= 64 => {
                return Ok(file.read_vec(at + 8, len as usize)? == b"raw");
            }
            _ => at = at.saturating_add(8 + u64::from(len).next_multiple_of(8)),
        }
    }
    Ok(false)
}

fn read_table(file: &ImageFile, at: u64, entries: u64) -> Result<Vec<u64>, Error> {
    // Bounded by the caller: by MAX_L1_ENTRIES, or by the cluster size.
    let bytes = file.read_vec(at, (entries * 8) as usize)?;
    Ok((0..entries as usize).map(|nth| be64(&bytes, nth * 8)).collect())
}

impl ImageMap for Qcow2 {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn find(&self, file: &ImageFile, at: u64) -> Result<(Location, u64), Error> {
        let nth = at >> self.cluster_bits;
        let words = if self.has_subclusters { 2 } else { 1 };
        let per_table = self.cluster_bytes() / 8 / words;
        let first = usize::try_from(nth / per_table).ok().and_then(|nth| self.l1_table.get(nth));
        let first = first.copied().unwrap_or(0) & OFFSET_MASK;
        if first == 0 {
            let table_bytes = per_table << self.cluster_bits;
            return Ok((Location::Backing(at), table_bytes - at % table_bytes));
        }
        let second = self.l2_table(file, first)?;
        let word = |nth: u64| second.get(nth as usize).copied().unwrap_or(0);
        let nth = nth % per_table * words;
        match self.has_subclusters {
            true => self.locate_subcluster(file, (word(nth), word(nth + 1)), at),
            false => self.locate(file, word(nth), at),
        }
    }

    fn backing_file(&self) -> Option<&BackingFile> {
        self.backing.as_ref()
    }

    fn decompress_chunk(&self, file: &ImageFile, entry: u64) -> Result<Vec<u8>, Error> {
        let (at, len) = self.compressed_extent_in(file, entry);
        let len = len.min(MAX_CHUNK_BYTES * 2);
        let packed = file.read_vec(at, len as usize)?;
        let mut unpacked = Vec::new();
        let read = if self.zstd {
            let unpack = crate::compression::Compression::Zstd.decompress(&packed[..]);
            unpack.and_then(|stream| stream.take(self.cluster_bytes()).read_to_end(&mut unpacked))
        } else {
            let stream = flate2::bufread::DeflateDecoder::new(&packed[..]);
            stream.take(self.cluster_bytes()).read_to_end(&mut unpacked)
        };
        match read {
            // The rest of its last sector belongs to another cluster.
            _ if unpacked.len() as u64 == self.cluster_bytes() => Ok(unpacked),
            _ => Err(Error::Damaged("qcow2: a packed cluster cannot be unpacked")),
        }
    }
}
