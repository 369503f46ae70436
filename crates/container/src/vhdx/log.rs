//! Log of a VHDX image: table updates that its last user had not completed.
//!
//! ```text
//!   | entry | entry | .. |     entry: | header, descriptors .. | data sectors of 4 KiB .. |
//! ```
//! A ring. Its newest complete sequence is valid: entries with consecutive numbers, the last of
//! which has the offset of the first.
//!
//! Law 1: each entry is read once, whatever the log contains; the work is bounded by a few times
//! the length of the log.
//! Law 2: this module writes nothing: readers overlay the log's contents on their reads.

use std::collections::BTreeMap;

use super::{MIB, has_valid_checksum, set_checksum};
use crate::image_file::{ImageFile, le32, le64};
use crate::{Error, UnsupportedFeature};

pub(super) const LOG_SECTOR_BYTES: usize = 4096;
/// Maximum length of a log, which is read as a whole.
const MAX_LOG_BYTES: u64 = 32 * MIB;
/// Maximum bytes of zeros that a log may write.
const MAX_ZEROED_BYTES: u64 = 64 * MIB;
/// Maximum bytes of entries that are parsed, in lengths of the log.
const MAX_SCAN_FACTOR: u64 = 8;
const ENTRY_HEADER_BYTES: usize = 64;
const DESCRIPTOR_BYTES: usize = 32;
/// Number of descriptors in the first sector of an entry.
pub(super) const FIRST_SECTOR_DESCRIPTORS: usize =
    (LOG_SECTOR_BYTES - ENTRY_HEADER_BYTES) / DESCRIPTOR_BYTES;
const SECTOR_DESCRIPTORS: usize = LOG_SECTOR_BYTES / DESCRIPTOR_BYTES;

/// A write in the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum LogWrite {
    Sector(u64, Vec<u8>),
    Zeros(u64, u64),
}

struct LogEntry {
    len: usize,
    tail: usize,
    number: u64,
    /// Length of the file that was durable when the entry was written.
    flushed_bytes: u64,
    patches: Vec<LogWrite>,
}

/// Writes in the log of an image that was not closed cleanly.
#[derive(Default)]
pub(super) struct LogReplay {
    pub(super) writes: Vec<LogWrite>,
}

impl LogReplay {
    /// Reads the active sequence of the log at `at`, of entries with this `id`.
    pub(super) fn read(file: &ImageFile, at: u64, len: u64, id: &[u8]) -> Result<Self, Error> {
        if len > MAX_LOG_BYTES {
            return Err(UnsupportedFeature::Feature("VHDX", "so long a log").into());
        }
        if len == 0 || !len.is_multiple_of(MIB) || !at.is_multiple_of(MIB) || at < MIB {
            return Err(Error::DamagedAt("VHDX: a log that cannot be", at));
        }
        let log = file.read_vec(at, len as usize)?;
        let entries = parse_entries(&log, id)?;
        let Some(active) = find_active_sequence(&entries, log.len()) else {
            return Err(Error::DamagedAt("VHDX: its log has no whole sequence", at));
        };
        let head = active.last().and_then(|at| entries.get(at));
        if head.is_some_and(|head| head.flushed_bytes > file.len_bytes()) {
            return Err(Error::Damaged("VHDX: its end is cut off"));
        }
        let entries = active.iter().filter_map(|at| entries.get(at));
        let patches: Vec<LogWrite> = entries.flat_map(|entry| entry.patches.clone()).collect();
        let zeros = patches.iter().map(|patch| match patch {
            LogWrite::Zeros(_, len) => *len,
            LogWrite::Sector(..) => 0,
        });
        match zeros.fold(0, u64::saturating_add) <= MAX_ZEROED_BYTES {
            true => Ok(Self { writes: patches }),
            false => Err(UnsupportedFeature::Feature("VHDX", "so many zeros in its log").into()),
        }
    }

    /// Overlays the log's writes on bytes that were read at `at`.
    pub(super) fn apply_to_read(&self, at: u64, bytes: &mut [u8]) {
        let end = at.saturating_add(bytes.len() as u64);
        for patch in &self.writes {
            let (start, len) = match patch {
                LogWrite::Sector(start, sector) => (*start, sector.len() as u64),
                LogWrite::Zeros(start, len) => (*start, *len),
            };
            let (from, to) = (start.max(at), start.saturating_add(len).min(end));
            if from >= to {
                continue;
            }
            let Some(room) = bytes.get_mut((from - at) as usize..(to - at) as usize) else {
                continue;
            };
            match patch {
                LogWrite::Zeros(..) => room.fill(0),
                LogWrite::Sector(start, sector) => {
                    let there = sector.get((from - start) as usize..(to - start) as usize);
                    room.copy_from_slice(there.unwrap_or_default());
                }
            }
        }
    }
}

/// Returns all valid entries of a log, by offset.
fn parse_entries(log: &[u8], id: &[u8]) -> Result<BTreeMap<usize, LogEntry>, Error> {
    let mut entries = BTreeMap::new();
    let mut looks = 0;
    for at in (0..log.len()).step_by(LOG_SECTOR_BYTES) {
        let head = log.get(at..).unwrap_or_default();
        let len = le32(head, 8) as usize;
        let is_one = head.starts_with(b"loge") && head.get(32..48) == Some(id);
        if !is_one
            || len < LOG_SECTOR_BYTES
            || len > log.len()
            || !len.is_multiple_of(LOG_SECTOR_BYTES)
        {
            continue;
        }
        looks += len as u64;
        if looks > MAX_SCAN_FACTOR * log.len() as u64 {
            return Err(Error::DamagedAt("VHDX: a log whose entries lie in each other", at as u64));
        }
        // An entry may wrap around to the start of the ring.
        let mut bytes = head.get(..len.min(head.len())).unwrap_or_default().to_vec();
        bytes.extend(log.get(..len - bytes.len()).unwrap_or_default());
        entries.extend(parse_entry(&bytes).map(|entry| (at, entry)));
    }
    Ok(entries)
}

/// Parses an entry, if it is valid.
fn parse_entry(bytes: &[u8]) -> Option<LogEntry> {
    let (tail, number) = (le32(bytes, 12) as usize, le64(bytes, 16));
    let count = le32(bytes, 24) as usize;
    let in_descriptors = descriptor_sectors(count);
    if number == 0
        || !tail.is_multiple_of(LOG_SECTOR_BYTES)
        || in_descriptors > bytes.len() / LOG_SECTOR_BYTES
    {
        return None;
    }
    if !has_valid_checksum(bytes) {
        return None;
    }
    let mut sectors = bytes.chunks_exact(LOG_SECTOR_BYTES).skip(in_descriptors);
    let mut patches = vec![];
    for nth in 0..count {
        let descriptor = bytes.get(ENTRY_HEADER_BYTES + nth * DESCRIPTOR_BYTES..)?;
        let at = le64(descriptor, 16);
        if le64(descriptor, 24) != number || !at.is_multiple_of(LOG_SECTOR_BYTES as u64) {
            return None;
        }
        if descriptor.starts_with(b"zero") {
            patches.push(LogWrite::Zeros(at, le64(descriptor, 8)));
            continue;
        }
        let sector = sectors.next()?;
        let high_low =
            u64::from(le32(sector, 4)) << 32 | u64::from(le32(sector, LOG_SECTOR_BYTES - 4));
        if !descriptor.starts_with(b"desc") || !sector.starts_with(b"data") || high_low != number {
            return None;
        }
        let mut data = sector.to_vec();
        data.get_mut(..8)?.copy_from_slice(descriptor.get(8..16)?);
        data.get_mut(LOG_SECTOR_BYTES - 4..)?.copy_from_slice(descriptor.get(4..8)?);
        patches.push(LogWrite::Sector(at, data));
    }
    let flushed_bytes = le64(bytes, 48);
    Some(LogEntry { len: bytes.len(), tail, number, flushed_bytes, patches })
}

fn descriptor_sectors(count: usize) -> usize {
    1 + count.saturating_sub(FIRST_SECTOR_DESCRIPTORS).div_ceil(SECTOR_DESCRIPTORS)
}

/// Returns the offsets of the newest complete sequence, from its tail.
fn find_active_sequence(entries: &BTreeMap<usize, LogEntry>, log_len: usize) -> Option<Vec<usize>> {
    let mut best: Option<(u64, Vec<usize>)> = None;
    let mut starts = entries.keys().copied();
    let mut not_before = 0;
    while let Some(start) = starts.find(|start| *start >= not_before) {
        let mut sequence = vec![];
        let (mut at, mut last) = (start, 0);
        while let Some(entry) = entries.get(&at) {
            // Ascending numbers prevent a second pass around the ring.
            if last != 0 && entry.number != last + 1 {
                break;
            }
            last = entry.number;
            sequence.push(at);
            at = (at + entry.len) % log_len;
        }
        let tail = sequence.last().and_then(|head| entries.get(head)).map(|head| head.tail);
        let tail = sequence.iter().position(|at| Some(*at) == tail);
        if let Some(tail) = tail {
            if best.as_ref().is_none_or(|(number, _)| *number < last) {
                best = Some((last, sequence.split_off(tail)));
            }
            if at <= start {
                break;
            }
            not_before = at;
        } else {
            not_before = start + LOG_SECTOR_BYTES;
        }
    }
    best.map(|(_, sequence)| sequence)
}

/// Returns an entry that writes at most [`FIRST_SECTOR_DESCRIPTORS`] sectors.
pub(super) fn build_entry(
    id: &[u8],
    number: u64,
    tail: u64,
    file_bytes: u64,
    sectors: &[(u64, Vec<u8>)],
) -> Vec<u8> {
    let mut bytes = vec![0; LOG_SECTOR_BYTES * (1 + sectors.len())];
    let len = bytes.len() as u32;
    let mut put = |at: usize, what: &[u8]| {
        if let Some(room) = bytes.get_mut(at..at + what.len()) {
            room.copy_from_slice(what);
        }
    };
    put(0, b"loge");
    put(8, &len.to_le_bytes());
    put(12, &(tail as u32).to_le_bytes());
    put(16, &number.to_le_bytes());
    put(24, &(sectors.len() as u32).to_le_bytes());
    put(32, id);
    put(48, &file_bytes.to_le_bytes());
    put(56, &file_bytes.to_le_bytes());
    for (nth, (at, sector)) in sectors.iter().enumerate() {
        let (descriptor, data) =
            (ENTRY_HEADER_BYTES + nth * DESCRIPTOR_BYTES, LOG_SECTOR_BYTES * (1 + nth));
        put(descriptor, b"desc");
        put(descriptor + 4, sector.get(LOG_SECTOR_BYTES - 4..).unwrap_or_default());
        put(descriptor + 8, sector.get(..8).unwrap_or_default());
        put(descriptor + 16, &at.to_le_bytes());
        put(descriptor + 24, &number.to_le_bytes());
        put(data, sector);
        put(data, b"data");
        put(data + 4, &((number >> 32) as u32).to_le_bytes());
        put(data + LOG_SECTOR_BYTES - 4, &(number as u32).to_le_bytes());
    }
    set_checksum(&mut bytes);
    bytes
}
