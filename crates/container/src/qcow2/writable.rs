//! L1 and L2 tables of a writable qcow2 image.
//!
//! Law 1: all table entries are checked before the first change. If a cluster is used twice, not
//! counted, or past the end of the file, opening fails and nothing is written.
//! Law 2: tables are written by sectors, with the contents at the time of submission. An evicted
//! table is read again only once its sectors are visible in the file.
//! Law 3: writes to compressed, backing and shared clusters allocate a new cluster. An L2 table
//! that a snapshot shares is copied before it changes.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use draconis_device::Ticket;

use super::refcounts::Refcounts;
use super::snapshots;
use super::{MAX_L1_ENTRIES, OFFSET_MASK, OFLAG_COMPRESSED, OFLAG_COPIED, Qcow2, read_table};
use crate::image_file::{ImageFile, be32, be64};
use crate::image_map::{ImageMap, Location};
use crate::writable::{AllocationTables, MetadataWriter};
use crate::{CONVERT_REMEDY, Error, UnsupportedFeature};

/// Maximum length of all cached L2 tables.
const MAX_CACHED_L2_BYTES: u64 = 16 << 20;
/// Minimum number of cached L2 tables, which takes precedence.
const MIN_CACHED_L2_TABLES: u64 = 4;
/// Maximum table sectors in one group.
const MAX_SECTORS_PER_GROUP: usize = 1024;

pub(super) struct L2Table {
    pub(super) entries: Vec<u64>,
    last_used: u64,
}

/// Changed sector of the L1 table or an L2 table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TableSector {
    L1Table(u64),
    /// Index of the L2 table, and of the sector in it.
    L2Table(u64, u64),
}

pub(crate) struct WritableQcow2 {
    pub(super) map: Qcow2,
    pub(super) refcounts: Refcounts,
    pub(super) has_snapshots: bool,
    /// True if the image had compressed clusters when it was opened.
    pub(super) has_compressed: bool,
    pub(super) sector_bytes: u64,
    /// L1 table, in whole sectors.
    pub(super) l1_table: Vec<u64>,
    pub(super) l2_tables: HashMap<u64, L2Table>,
    use_clock: u64,
    pub(super) changed_sectors: BTreeSet<TableSector>,
    /// Newest group of table sectors, until it is known to be visible.
    pending_tables: Option<Ticket>,
}

impl WritableQcow2 {
    pub(crate) fn open(file: &ImageFile, map: Qcow2) -> Result<Self, Error> {
        let head = file.read_vec(0, 112.min(file.len_bytes()) as usize)?;
        let unchanged =
            |what, help| Err(UnsupportedFeature::ReadOnlyFormat("qcow2", what, help).into());
        if map.has_subclusters {
            return unchanged("clusters in parts (extended_l2)", CONVERT_REMEDY);
        }
        match if map.version == 3 { be64(&head, 88) } else { 0 } {
            0 => {}
            1 => {
                return unchanged("bitmaps of changes", "qemu-img bitmap --remove takes them away");
            }
            _ => return unchanged("features that are not known", CONVERT_REMEDY),
        }
        let entries = u64::from(be32(&head, 36));
        if entries > MAX_L1_ENTRIES {
            return Err(Error::DamagedAt("qcow2: a first table of impossible length", 36));
        }
        let mut refcounts = Refcounts::open(file, map.cluster_bits, map.version)?;
        refcounts.record_exclusive(map.l1_table_offset, entries * 8, false)?;
        let sector_bytes = file.sector_bytes().max(512);
        let whole = (entries * 8).next_multiple_of(sector_bytes) / 8;
        let first = read_table(file, map.l1_table_offset, whole)?;
        let seconds = first.iter().take(entries as usize).map(|entry| entry & OFFSET_MASK);
        let seconds: Vec<u64> = seconds.filter(|at| *at != 0).collect();
        let kept = snapshots::record_snapshots(file, &mut refcounts, &head)?;
        let (has_snapshots, mut has_compressed) = (be32(&head, 60) != 0, false);
        if kept.is_empty() {
            for at in seconds {
                has_compressed |= record_l2_table(file, &map, &mut refcounts, at, None)?;
            }
        } else {
            let mut times = kept;
            for at in seconds {
                *times.entry(at).or_insert(0) += 1;
            }
            for (at, times) in times {
                has_compressed |= record_l2_table(file, &map, &mut refcounts, at, Some(times))?;
            }
        }
        refcounts.verify_or_repair(file, map.is_dirty)?;
        Ok(Self {
            map,
            refcounts,
            has_snapshots,
            has_compressed,
            sector_bytes,
            l1_table: first,
            l2_tables: HashMap::new(),
            use_clock: 0,
            changed_sectors: BTreeSet::new(),
            pending_tables: None,
        })
    }

    /// Moves an L2 table that a snapshot shares to a new cluster.
    fn unshare_l2_table(&mut self, out: &mut MetadataWriter<'_>, nth: u64) -> Result<(), Error> {
        let place = self.refcounts.allocate_cluster(out)?;
        self.copy_l2_table(out, nth, place)
    }

    /// Copies an L2 table to an allocated cluster and releases the old one.
    pub(super) fn copy_l2_table(
        &mut self,
        out: &mut MetadataWriter<'_>,
        nth: u64,
        place: u64,
    ) -> Result<(), Error> {
        let old = self.l2_table_offset(nth);
        let entries = &self.cached_l2_table(out.file, nth)?.entries;
        let bytes: Vec<u8> = entries.iter().copied().flat_map(u64::to_be_bytes).collect();
        let ticket = out.submit_chain(vec![vec![(place, bytes)]])?;
        // From now on reads go to the copy.
        out.file.disk().wait_visible(ticket)?;
        out.add_dependency(ticket);
        self.set_l1_entry(nth, place);
        self.refcounts.release_clusters(old, self.map.cluster_bytes());
        Ok(())
    }

    /// Sets the L1 entry of an L2 table to `place`, or clears it if `place` is 0.
    pub(super) fn set_l1_entry(&mut self, nth: u64, place: u64) {
        if let Some(entry) = self.l1_table.get_mut(nth as usize) {
            *entry = if place == 0 { 0 } else { place | OFLAG_COPIED };
        }
        self.changed_sectors.insert(TableSector::L1Table(nth * 8 / self.sector_bytes));
    }

    /// Returns the number of entries of an L2 table.
    pub(super) fn entries_per_l2_table(&self) -> u64 {
        self.map.cluster_bytes() / 8
    }

    /// Returns the indexes of the L2 table of disk offset `at` and of its entry.
    fn l2_index(&self, at: u64) -> (u64, usize) {
        let nth = at >> self.map.cluster_bits;
        (nth / self.entries_per_l2_table(), (nth % self.entries_per_l2_table()) as usize)
    }

    /// Returns the offset of an L2 table, or 0 if it is unallocated.
    pub(super) fn l2_table_offset(&self, table: u64) -> u64 {
        self.l1_table.get(table as usize).copied().unwrap_or(0) & OFFSET_MASK
    }

    /// Returns an allocated L2 table from the cache, or reads it.
    pub(super) fn cached_l2_table(
        &mut self,
        file: &ImageFile,
        nth: u64,
    ) -> Result<&mut L2Table, Error> {
        self.use_clock += 1;
        if !self.l2_tables.contains_key(&nth) {
            self.evict_l2_table();
            if let Some(ticket) = self.pending_tables {
                file.disk().wait_visible(ticket)?;
                self.pending_tables = None;
            }
            let entries = read_table(file, self.l2_table_offset(nth), self.entries_per_l2_table())?;
            self.l2_tables.insert(nth, L2Table { entries, last_used: 0 });
        }
        let uses = self.use_clock;
        match self.l2_tables.get_mut(&nth) {
            Some(second) => {
                second.last_used = uses;
                Ok(second)
            }
            None => Err(Error::Damaged("qcow2: a table that is not there")),
        }
    }

    /// Evicts L2 tables if the cache is full and no changed sectors are pending.
    fn evict_l2_table(&mut self) {
        let most = (MAX_CACHED_L2_BYTES >> self.map.cluster_bits).max(MIN_CACHED_L2_TABLES);
        if (self.l2_tables.len() as u64) < most || !self.changed_sectors.is_empty() {
            return;
        }
        // Evicts an eighth at once, because selecting takes time.
        let mut used: Vec<u64> = self.l2_tables.values().map(|second| second.last_used).collect();
        used.sort_unstable();
        let until = used.get(used.len() / 8).copied().unwrap_or(0);
        self.l2_tables.retain(|_, second| second.last_used > until);
    }

    /// Submits the changed table sectors.
    pub(super) fn write_dirty_tables(&mut self, out: &mut MetadataWriter<'_>) -> Result<(), Error> {
        if self.changed_sectors.is_empty() {
            return Ok(());
        }
        let per_sector = self.sector_bytes as usize / 8;
        let of = |entries: &[u64], nth: u64| -> Vec<u8> {
            let entries = entries.iter().skip(nth as usize * per_sector).take(per_sector);
            entries.copied().flat_map(u64::to_be_bytes).collect()
        };
        let mut writes = vec![];
        for sector in std::mem::take(&mut self.changed_sectors) {
            let (at, nth, bytes) = match sector {
                TableSector::L1Table(nth) => {
                    (self.map.l1_table_offset, nth, of(&self.l1_table, nth))
                }
                TableSector::L2Table(table, nth) => {
                    let Some(second) = self.l2_tables.get(&table) else { continue };
                    (self.l2_table_offset(table), nth, of(&second.entries, nth))
                }
            };
            writes.push((at + nth * self.sector_bytes, bytes));
        }
        let after = out.take_dependencies();
        while !writes.is_empty() {
            let rest = writes.split_off(writes.len().min(MAX_SECTORS_PER_GROUP));
            self.pending_tables =
                Some(out.submit_group_after(std::mem::replace(&mut writes, rest), &after)?);
        }
        Ok(())
    }

    fn l2_entry(&mut self, file: &ImageFile, at: u64) -> Result<u64, Error> {
        let (nth, place) = self.l2_index(at);
        if self.l2_table_offset(nth) == 0 {
            return Ok(0);
        }
        Ok(self.cached_l2_table(file, nth)?.entries.get(place).copied().unwrap_or(0))
    }
}

/// Records an L2 table and the clusters it refers to: as exclusive, or with `times` users. Returns
/// true if any of them is compressed.
fn record_l2_table(
    file: &ImageFile,
    map: &Qcow2,
    counts: &mut Refcounts,
    at: u64,
    times: Option<u64>,
) -> Result<bool, Error> {
    let note = |counts: &mut Refcounts, at| match times {
        None => counts.record_exclusive(at, map.cluster_bytes(), map.is_dirty),
        Some(times) => {
            counts.check_cluster_offset(at)?;
            counts.record_shared(at, map.cluster_bytes(), times, map.is_dirty)
        }
    };
    note(counts, at)?;
    let mut has_compressed = false;
    for entry in read_table(file, at, map.cluster_bytes() / 8)? {
        if entry & OFLAG_COMPRESSED != 0 {
            has_compressed = true;
            // An entry counts whole sectors, so only the last one may reach beyond the file.
            let (at, len) = map.compressed_extent(entry);
            if at + len > file.len_bytes().next_multiple_of(map.cluster_bytes()) {
                let why = "qcow2: a packed cluster behind the end of the file";
                return Err(Error::DamagedAt(why, at));
            }
            counts.record_shared(at, len, times.unwrap_or(1), false)?;
        } else if entry & OFFSET_MASK != 0 {
            note(counts, entry & OFFSET_MASK)?;
        }
    }
    Ok(has_compressed)
}

impl AllocationTables for WritableQcow2 {
    fn len_bytes(&self) -> u64 {
        self.map.len_bytes()
    }

    fn unit_bytes(&self) -> u64 {
        self.map.cluster_bytes()
    }

    fn find(&mut self, file: &ImageFile, at: u64) -> Result<(Location, u64), Error> {
        if self.l2_table_offset(self.l2_index(at).0) == 0 {
            let table_bytes = self.entries_per_l2_table() << self.map.cluster_bits;
            return Ok((Location::Backing(at), table_bytes - at % table_bytes));
        }
        let entry = self.l2_entry(file, at)?;
        self.map.locate(file, entry, at)
    }

    fn decompress_chunk(&self, file: &ImageFile, piece: u64) -> Result<Vec<u8>, Error> {
        self.map.decompress_chunk(file, piece)
    }

    fn writable_offset(&mut self, file: &ImageFile, at: u64) -> Result<Option<u64>, Error> {
        let entry = self.l2_entry(file, at)?;
        let place = match entry & OFLAG_COMPRESSED {
            0 if entry & super::OFLAG_ZERO == 0 => entry & OFFSET_MASK,
            _ => 0,
        };
        Ok((place != 0 && self.refcounts.is_exclusive(place)).then_some(place))
    }

    /// Does nothing: a session begins with the first allocation.
    fn begin_session(&mut self, _: &mut MetadataWriter<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn allocate_unit(&mut self, out: &mut MetadataWriter<'_>, at: u64) -> Result<u64, Error> {
        let (nth, _) = self.l2_index(at);
        let second = self.l2_table_offset(nth);
        if second != 0 && !self.refcounts.is_exclusive(second) {
            self.unshare_l2_table(out, nth)?;
        }
        if second == 0 {
            let place = self.refcounts.allocate_cluster(out)?;
            // The new cluster reads as zeros: an empty table.
            self.set_l1_entry(nth, place);
            let entries = vec![0; self.entries_per_l2_table() as usize];
            self.l2_tables.insert(nth, L2Table { entries, last_used: self.use_clock });
        }
        self.refcounts.allocate_cluster(out)
    }

    fn map_unit(&mut self, out: &mut MetadataWriter<'_>, at: u64, place: u64) -> Result<(), Error> {
        let (nth, entry) = self.l2_index(at);
        let second = self.cached_l2_table(out.file, nth)?;
        let old = match second.entries.get_mut(entry) {
            Some(entry) => std::mem::replace(entry, place | OFLAG_COPIED),
            None => 0,
        };
        self.changed_sectors
            .insert(TableSector::L2Table(nth, entry as u64 * 8 / self.sector_bytes));
        self.release_entry(out.file, old);
        Ok(())
    }

    fn submit_tables(&mut self, out: &mut MetadataWriter<'_>) -> Result<(), Error> {
        if self.changed_sectors.is_empty() {
            return Ok(());
        }
        self.write_dirty_tables(out)?;
        self.refcounts.preallocate_if_low(out)
    }

    fn compact(
        &mut self,
        out: &mut MetadataWriter<'_>,
        unused: Vec<Range<u64>>,
    ) -> Result<Option<u64>, Error> {
        self.compact_clusters(out, unused).map(Some)
    }

    fn close_session(&mut self, out: &mut MetadataWriter<'_>) -> Result<(), Error> {
        self.pending_tables = None;
        self.refcounts.close_session(out)
    }
}
