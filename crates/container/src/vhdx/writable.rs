//! Tables of a VHDX image that is open for writing.
//!
//! ```text
//!   session: header ──▶ log replay ──▶ empty log, header ──▶ ..changes.. ──▶ header: no log
//!   change:  file lengthened ──▶ log entry ──▶ (some entries later) BAT
//! ```
//! Law 1: the header gets a new file GUID before any other change.
//! Law 2: the BAT is written only with contents that are durable in the log. The log always has a
//! complete sequence: it is filled in halves, and a half is overwritten only once the other one has
//! a sequence.
//! Law 3: a new block is past the former end of the file, and reads as zeros.

mod compact;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use draconis_device::{Error as DiskError, Extent, Random, Ticket};

use super::log::{FIRST_SECTOR_DESCRIPTORS, LOG_SECTOR_BYTES, LogWrite, build_entry};
use super::{DATA_WRITE_GUID_AT, FILE_WRITE_GUID_OFFSET, LOG_GUID_AT, MIB, Vhdx, set_checksum};
use crate::image_file::{ImageFile, le64};
use crate::image_map::{ImageMap, Location};
use crate::writable::{AllocationTables, MetadataWriter};
use crate::{CONVERT_REMEDY, Error, UnsupportedFeature};

const PAYLOAD_BLOCK_FULLY_PRESENT: u64 = 6;
/// Maximum blocks whose offsets are checked for overlaps: 32 MiB of offsets.
const MAX_WRITABLE_BLOCKS: usize = 1 << 21;

pub(crate) struct WritableVhdx {
    map: Vhdx,
    /// End of the file, in whole MiB.
    end: u64,
    /// End of the file when it was opened.
    opened_end: u64,
    /// Seed of new GUIDs.
    guids: Random,
    in_session: bool,
    log_id: [u8; 16],
    /// Number of the next entry.
    number: u64,
    /// Log offsets of the sequence and of the next entry.
    tail: u64,
    head: u64,
    /// Changed sectors of the BAT.
    changed: BTreeSet<u64>,
    /// Sectors that are in the log but not yet in the BAT.
    logged: BTreeMap<u64, Vec<u8>>,
    last_entry: Option<Ticket>,
}

impl WritableVhdx {
    pub(crate) fn open(file: &ImageFile, map: Vhdx, chance: u64) -> Result<Self, Error> {
        if map.log.1 < MIB || !map.log.1.is_multiple_of(MIB) || map.log.0 < MIB {
            return Err(Error::DamagedAt("VHDX: a log that cannot be", map.log.0));
        }
        if map.backing.is_some() {
            let what = "only what differs from another";
            return Err(UnsupportedFeature::ReadOnlyFormat("VHDX", what, CONVERT_REMEDY).into());
        }
        if map.has_unknown_region {
            let what = "regions that are not known";
            return Err(UnsupportedFeature::ReadOnlyFormat("VHDX", what, CONVERT_REMEDY).into());
        }
        let blocks = map.bat.iter().filter(|entry| *entry & 7 == PAYLOAD_BLOCK_FULLY_PRESENT);
        if blocks.clone().count() > MAX_WRITABLE_BLOCKS {
            return Err(UnsupportedFeature::ReadOnlyFormat(
                "VHDX",
                "so many blocks",
                CONVERT_REMEDY,
            )
            .into());
        }
        let blocks = blocks.map(|entry| (entry >> 20 << 20, map.block_bytes));
        let mut all: Vec<(u64, u64)> = [(0, MIB), map.log].into_iter().collect();
        all.extend(map.regions.iter().copied().chain(blocks));
        all.sort_unstable();
        for pair in all.windows(2) {
            if let [(one, len), (other, _)] = pair
                && one.saturating_add(*len) > *other
            {
                return Err(Error::DamagedAt("VHDX: two things lie in the same place", *other));
            }
        }
        let len = file.len_bytes();
        let last = all.last().copied().unwrap_or_default();
        if last.0 >= len && !map.needs_replay() {
            return Err(Error::DamagedAt("VHDX: a block behind the end of the file", last.0));
        }
        let end = match file.max_len_bytes() > len {
            true => len.max(last.0.saturating_add(last.1)).next_multiple_of(MIB),
            false => len / MIB * MIB,
        };
        Ok(Self {
            map,
            end,
            opened_end: end,
            guids: Random::new(chance),
            in_session: false,
            log_id: [0; 16],
            number: 1,
            tail: 0,
            head: 0,
            changed: BTreeSet::new(),
            logged: BTreeMap::new(),
            last_entry: None,
        })
    }

    /// Returns a new GUID.
    fn new_guid(&mut self) -> [u8; 16] {
        let all = u128::from(self.guids.next_u64()) << 64 | u128::from(self.guids.next_u64());
        // Version 4, as stored: the third number is little-endian.
        let all = all & !(0xF << 60 | 0xC0 << 64) | 0x4 << 60 | 0x80 << 64;
        all.to_le_bytes()
    }

    /// Returns a newer header with the fields `put`, and its offset: that of the older header.
    fn next_header(&mut self, put: &[(usize, [u8; 16])]) -> (u64, Vec<u8>) {
        let number = le64(&self.map.header, 8) + 1;
        for (at, bytes) in
            put.iter().map(|(at, id)| (*at, &id[..])).chain([(8, &number.to_le_bytes()[..])])
        {
            if let Some(room) = self.map.header.get_mut(at..at + bytes.len()) {
                room.copy_from_slice(bytes);
            }
        }
        set_checksum(&mut self.map.header);
        self.map.header_at =
            super::HEADER_OFFSETS.into_iter().find(|at| *at != self.map.header_at).unwrap_or(0);
        (self.map.header_at, self.map.header.clone())
    }

    /// Returns offset and contents of a BAT sector.
    fn bat_sector(&self, nth: u64) -> (u64, Vec<u8>) {
        let entries = self
            .map
            .bat
            .iter()
            .skip(nth as usize * LOG_SECTOR_BYTES / 8)
            .take(LOG_SECTOR_BYTES / 8);
        let mut bytes: Vec<u8> = entries.copied().flat_map(u64::to_le_bytes).collect();
        bytes.resize(LOG_SECTOR_BYTES, 0);
        (self.map.bat_offset + nth * LOG_SECTOR_BYTES as u64, bytes)
    }

    /// Writes the logged sectors to the BAT, after the log.
    fn apply_log(&mut self, out: &mut MetadataWriter<'_>) -> Result<Option<Ticket>, Error> {
        let after: Vec<Ticket> = self.last_entry.into_iter().collect();
        match std::mem::take(&mut self.logged) {
            logged if logged.is_empty() => Ok(None),
            logged => out.submit_group_after(logged.into_iter().collect(), &after).map(Some),
        }
    }

    /// Returns half the length of the log.
    fn half_log_bytes(&self) -> u64 {
        self.map.log.1 / 2
    }
}

impl AllocationTables for WritableVhdx {
    fn len_bytes(&self) -> u64 {
        self.map.len_bytes()
    }

    fn unit_bytes(&self) -> u64 {
        self.map.block_bytes
    }

    fn find(&mut self, file: &ImageFile, at: u64) -> Result<(Location, u64), Error> {
        self.map.find(file, at)
    }

    fn decompress_chunk(&self, file: &ImageFile, piece: u64) -> Result<Vec<u8>, Error> {
        self.map.decompress_chunk(file, piece)
    }

    fn writable_offset(&mut self, _: &ImageFile, at: u64) -> Result<Option<u64>, Error> {
        let entry = self.map.bat.get(self.map.bat_index(at)).copied().unwrap_or(0);
        Ok((entry & 7 == PAYLOAD_BLOCK_FULLY_PRESENT).then_some(entry >> 20 << 20))
    }

    fn begin_session(&mut self, out: &mut MetadataWriter<'_>) -> Result<(), Error> {
        if self.in_session {
            return Ok(());
        }
        self.in_session = true;
        let ids =
            [(FILE_WRITE_GUID_OFFSET, self.new_guid()), (DATA_WRITE_GUID_AT, self.new_guid())];
        let mut chain = vec![vec![self.next_header(&ids)]];
        let mut put_right: Vec<(u64, Vec<u8>)> = vec![];
        if out.file.len_bytes() < self.end {
            let sector = out.file.sector_bytes();
            put_right.push((self.end - sector, vec![0; sector as usize]));
        }
        for patch in self.map.take_log_writes() {
            put_right.push(match patch {
                LogWrite::Sector(at, sector) => (at, sector),
                LogWrite::Zeros(at, len) => (at, vec![0; len as usize]),
            });
        }
        chain.push(put_right);
        chain.push(vec![self.next_header(&[(LOG_GUID_AT, [0; 16])])]);
        self.log_id = self.new_guid();
        (self.number, self.tail) = (1, 0);
        let first = build_entry(&self.log_id, self.number, self.tail, self.end, &[]);
        (self.number, self.head) = (2, first.len() as u64);
        chain.push(vec![(self.map.log.0, first)]);
        let log_id = self.log_id;
        chain.push(vec![self.next_header(&[(LOG_GUID_AT, log_id)])]);
        out.submit_chain(chain)?;
        out.wait()
    }

    fn allocate_unit(&mut self, out: &mut MetadataWriter<'_>, _: u64) -> Result<u64, Error> {
        let place = self.end;
        let end = place.saturating_add(self.map.block_bytes);
        if end > out.file.max_len_bytes() {
            return Err(DiskError::no_space(Extent::new(place, self.map.block_bytes)).into());
        }
        self.end = end;
        let sector = out.file.sector_bytes();
        let ticket = out.submit_chain(vec![vec![(end - sector, vec![0; sector as usize])]])?;
        out.add_dependency(ticket);
        Ok(place)
    }

    fn map_unit(&mut self, _: &mut MetadataWriter<'_>, at: u64, place: u64) -> Result<(), Error> {
        let nth = self.map.bat_index(at);
        if let Some(entry) = self.map.bat.get_mut(nth) {
            *entry = place | PAYLOAD_BLOCK_FULLY_PRESENT;
        }
        self.changed.insert((nth * 8 / LOG_SECTOR_BYTES) as u64);
        Ok(())
    }

    fn submit_tables(&mut self, out: &mut MetadataWriter<'_>) -> Result<(), Error> {
        if self.changed.is_empty() {
            return Ok(());
        }
        let mut after = out.take_dependencies();
        let most =
            FIRST_SECTOR_DESCRIPTORS.min(self.half_log_bytes() as usize / LOG_SECTOR_BYTES - 1);
        let sectors: Vec<u64> = std::mem::take(&mut self.changed).into_iter().collect();
        for sectors in sectors.chunks(most) {
            let sectors: Vec<(u64, Vec<u8>)> =
                sectors.iter().map(|nth| self.bat_sector(*nth)).collect();
            let len = ((1 + sectors.len()) * LOG_SECTOR_BYTES) as u64;
            if self.head + len > self.tail + self.half_log_bytes() {
                // Switches to the other half, once this one's sectors are in the BAT.
                after.extend(self.apply_log(out)?);
                self.tail = if self.tail == 0 { self.half_log_bytes() } else { 0 };
                self.head = self.tail;
            }
            let entry = build_entry(&self.log_id, self.number, self.tail, self.end, &sectors);
            let write = vec![(self.map.log.0 + self.head, entry)];
            self.last_entry = Some(out.submit_group_after(write, &after)?);
            (self.number, self.head) = (self.number + 1, self.head + len);
            self.logged.extend(sectors);
        }
        Ok(())
    }

    fn close_session(&mut self, out: &mut MetadataWriter<'_>) -> Result<(), Error> {
        if !self.in_session {
            return Ok(());
        }
        self.apply_log(out)?;
        out.wait()?;
        let headers = [self.next_header(&[(LOG_GUID_AT, [0; 16])]), self.next_header(&[])];
        out.submit_chain(headers.into_iter().map(|header| vec![header]).collect())?;
        self.in_session = false;
        Ok(())
    }
    fn compact(
        &mut self,
        out: &mut MetadataWriter<'_>,
        unused: Vec<Range<u64>>,
    ) -> Result<Option<u64>, Error> {
        self.compact_blocks(out, &unused)
    }
}
