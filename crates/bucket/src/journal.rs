//! Journal: a local file with acknowledged data that is not in the bucket yet.
//!
//! ```text
//!   | head | head | ring: records one behind the other, and from its begin again |
//!   a record: | sum | magic | number | .. | runs of sectors | bytes |  up to a whole sector
//! ```
//!
//! Law 1: data is acknowledged once its record is durable. An object is uploaded once it is
//! complete and all its records are durable. So an object reassembled from the records has the same
//! name and bytes.
//! Law 2: records that the newest header refers to are not overwritten before a newer header is
//! durable.
//! Law 3: each opening is an incarnation. Checksums include journal and incarnation, so older bytes
//! are no records.
//! Law 4: a record declares how many before it were durable. If one of those is unreadable, the
//! journal is damaged; later unreadable ones are torn by a power cut.
//! Law 5: a file without a journal header is not overwritten.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use draconis_device::{Disk, Error, Extent, FileDisk, FileOptions, Group, Write};
use draconis_types::Block;
use draconis_types::path_bytes::ShowPath;
use twox_hash::XxHash3_64;

use crate::name::{ObjectName, ObjectNumber, SectorRun, can_append_run};
use crate::remote;
use crate::{OBJECT_BYTES, SECTOR_BYTES};

const MAGIC: &[u8; 8] = b"DracoJnl";
const RECORD_MAGIC: &[u8; 8] = b"DracoRec";
const VERSION: u32 = 1;
/// Offsets of the two headers; each is in its own 4 KiB block.
const HEADER_OFFSETS: [u64; 2] = [0, 4096];
const RING_START: u64 = 8192;
/// Bytes of the fixed part of a record.
const RECORD_HEADER_BYTES: usize = 64;
/// More runs than the name of an object has.
const MAX_RUNS: u32 = 64;
/// Longest address in a header, in bytes.
const MAX_ADDRESS_BYTES: usize = 300;
/// Largest value of a counter: sums of two do not overflow.
const MAX_COUNTER: u64 = 1 << 60;
/// Bytes of one read in a search for records.
const SEARCH_READ_BYTES: u64 = 1 << 20;

/// Shortest journal: several of the longest objects.
pub(crate) const MIN_JOURNAL_BYTES: u64 = 16 << 20;

/// A journal file or disk, with its path.
#[derive(Clone)]
pub struct JournalDevice {
    disk: Arc<dyn Disk>,
    place: Arc<str>,
}

impl std::fmt::Debug for JournalDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Local").field(&self.place).finish()
    }
}

impl JournalDevice {
    /// Opens the journal in a file. A missing file is created with this length and the unique `id`.
    ///
    /// # Errors
    /// A message: it is in use, it is no journal, there is no space.
    pub fn file(path: &Path, len_bytes: u64, id: u128) -> Result<Self, String> {
        let describe = |error: std::io::Error| format!("{}: {error}", path.shown());
        if !path.try_exists().map_err(describe)? {
            create_file(path, len_bytes, id)?;
        }
        if !std::fs::metadata(path).map_err(describe)?.is_file() {
            return Err(format!("{}: a journal is a file, which this is not", path.shown()));
        }
        let how = FileOptions { write: true, direct: true, uring: false };
        let disk = FileDisk::open(path, how).map_err(describe)?;
        let place: Arc<str> = strip_control_chars(&path.shown().to_string()).into();
        Ok(Self { disk: Arc::new(disk), place })
    }

    /// Returns the journal on a disk, which has one or is [formatted](JournalDevice::format) first.
    pub fn on_disk(disk: Arc<dyn Disk>, place: &str) -> Self {
        Self { disk, place: strip_control_chars(place).into() }
    }

    /// Writes an empty journal to a disk.
    ///
    /// # Errors
    /// Errors of writing.
    pub fn format(disk: &dyn Disk, id: u128) -> Result<(), Error> {
        let head = JournalHeader {
            id,
            len_bytes: disk.properties().len_bytes,
            ..JournalHeader::default()
        };
        HEADER_OFFSETS.into_iter().try_for_each(|at| write(disk, vec![(at, head.encode())]))
    }
}

/// Creates a journal under a temporary name, and links it once it is complete.
fn create_file(path: &Path, len_bytes: u64, id: u128) -> Result<(), String> {
    if len_bytes < MIN_JOURNAL_BYTES {
        return Err(format!(
            "{}: a journal has {} MiB at least",
            path.shown(),
            MIN_JOURNAL_BYTES >> 20
        ));
    }
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(format!(".{:08x}", id as u32));
    let unfinished = Path::new(&unfinished);
    let made = || -> std::io::Result<()> {
        let mut options = File::options();
        // It will have users' data.
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.open(unfinished)?;
        // Allocates all blocks now.
        let flags = rustix::fs::FallocateFlags::empty();
        match rustix::fs::fallocate(&file, flags, 0, len_bytes) {
            Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(len_bytes)?,
            allocated => allocated?,
        }
        let how = FileOptions { write: true, direct: false, uring: false };
        let disk = FileDisk::from_fd(file.try_clone()?.into(), how)?;
        JournalDevice::format(&disk, id).map_err(std::io::Error::other)?;
        drop(disk);
        file.sync_all()?;
        // Another process may have created it first: then that one is used.
        match std::fs::hard_link(unfinished, path) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            linked => linked?,
        }
        std::fs::remove_file(unfinished)?;
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
        File::open(dir.unwrap_or(Path::new(".")))?.sync_all()
    };
    made().map_err(|error| {
        let _ = std::fs::remove_file(unfinished);
        format!("{}: no journal can be made there: {error}", path.shown())
    })
}

/// Contents of a header.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct JournalHeader {
    id: u128,
    incarnation: u64,
    /// Number of this header: of the two copies, the one with the larger number is newer.
    generation: u64,
    len_bytes: u64,
    /// Store of this incarnation.
    store: u128,
    address: String,
    /// The first record that is needed.
    tail_at: u64,
    tail_index: u64,
    /// Records before this one are durable.
    durable: u64,
    /// True if nothing waits for the upload.
    is_empty: bool,
}

impl JournalHeader {
    fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        let address = self.address.as_bytes();
        let address = &address[..address.len().min(MAX_ADDRESS_BYTES)];
        out.extend((address.len() as u32).to_le_bytes());
        out.extend(self.id.to_le_bytes());
        out.extend(self.store.to_le_bytes());
        for word in [self.incarnation, self.generation, self.len_bytes] {
            out.extend(word.to_le_bytes());
        }
        for word in [self.tail_at, self.tail_index, self.durable, self.is_empty.into()] {
            out.extend(word.to_le_bytes());
        }
        out.extend(address);
        out.resize(SECTOR_BYTES as usize - 8, 0);
        out.extend(XxHash3_64::oneshot(&out).to_le_bytes());
        out
    }

    /// Decodes a header; none if the sector has none, or a torn one.
    fn decode(bytes: &[u8]) -> Option<Result<Self, &'static str>> {
        let (told, sum) = bytes.split_at_checked(SECTOR_BYTES as usize - 8)?;
        if !told.starts_with(MAGIC) || sum != XxHash3_64::oneshot(told).to_le_bytes() {
            return None;
        }
        let (word, half) = (|at| read_u64(told, at), |at| read_u64(told, at) as u32);
        let wide = |at| u128::from(word(at)) | u128::from(word(at + 8)) << 64;
        if half(8) != VERSION {
            return Some(Err("its version is not known here"));
        }
        let address =
            told.get(104..104 + (half(12) as usize).min(MAX_ADDRESS_BYTES)).unwrap_or_default();
        let head = Self {
            id: wide(16),
            store: wide(32),
            incarnation: word(48),
            generation: word(56),
            len_bytes: word(64),
            tail_at: word(72),
            tail_index: word(80),
            durable: word(88),
            is_empty: word(96) != 0,
            address: strip_control_chars(&String::from_utf8_lossy(address)),
        };
        Some(Ok(head))
    }

    /// Returns the checksum of a record of this incarnation.
    fn checksum(&self, bytes: &[u8]) -> u64 {
        XxHash3_64::oneshot_with_seed(
            (self.id >> 64) as u64 ^ self.id as u64 ^ self.incarnation,
            bytes,
        )
    }
}

/// Decodes eight bytes as a number; missing ones are 0.
fn read_u64(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    if let Some(found) = bytes.get(at..at + 8) {
        word.copy_from_slice(found);
    }
    u64::from_le_bytes(word)
}

fn strip_control_chars(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// Data of one record: a part of an object.
#[derive(Clone, Debug, Default)]
pub(crate) struct PendingRecord {
    pub nth: u64,
    pub runs: Vec<SectorRun>,
    pub bytes: Vec<Bytes>,
    pub is_root: bool,
}

impl PendingRecord {
    pub fn len(&self) -> u64 {
        self.bytes.iter().map(|bytes| bytes.len() as u64).sum()
    }

    /// Returns its length in the ring.
    fn padded_len(&self) -> u64 {
        (RECORD_HEADER_BYTES as u64 + 16 * self.runs.len() as u64 + self.len())
            .next_multiple_of(SECTOR_BYTES)
    }
}

/// An object in a journal that the bucket lacks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct JournaledObject {
    pub is_root: bool,
    pub runs: Vec<SectorRun>,
    pub bytes: Vec<u8>,
}

impl JournaledObject {
    pub fn key(&self, number: ObjectNumber) -> String {
        match self.is_root {
            true => ObjectName::Root(number).key(),
            false => ObjectName::Data(number, self.runs.clone()).key(),
        }
    }
}

/// All objects in a journal that the bucket lacks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct UnsentObjects {
    pub epoch: u32,
    pub objects: BTreeMap<u64, JournaledObject>,
}

/// Statistics of a journal.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct JournalStatistics {
    /// Records written.
    pub records: u64,
    /// Bytes written.
    pub bytes: u64,
    /// Number of flushes.
    pub flushes: u64,
    /// Number of waits of writers because it was full.
    pub full: u64,
    /// Objects of an earlier writer that were uploaded at open.
    pub sent_late: u64,
}

/// An open journal.
pub(crate) struct Journal {
    local: JournalDevice,
    head: JournalHeader,
    /// Offset of the next record, if it fits there.
    at: u64,
    nth: u64,
    /// Records since the header's tail: the number of the object, and the offset.
    records: VecDeque<(u64, u64)>,
    pub kept: JournalStatistics,
}

impl Journal {
    /// Opens a journal; returns it with its unsent objects.
    pub fn open(local: &JournalDevice) -> Result<(Self, UnsentObjects), Error> {
        let place = &local.place;
        let len_bytes = local.disk.properties().len_bytes;
        let mut newest: Option<JournalHeader> = None;
        for at in HEADER_OFFSETS.into_iter().filter(|at| at + SECTOR_BYTES <= len_bytes) {
            match JournalHeader::decode(&read(&*local.disk, at, SECTOR_BYTES, place)?) {
                Some(Ok(head))
                    if newest.as_ref().is_none_or(|it| it.generation < head.generation) =>
                {
                    newest = Some(head);
                }
                Some(Err(what)) => return Err(damaged_error(place, what)),
                _ => {}
            }
        }
        let head = newest.ok_or_else(|| {
            remote(format!(
                "{place} is no journal, or a damaged one, and is left as it is; --journal takes a \
                 file of its own"
            ))
        })?;
        if head.len_bytes > len_bytes {
            let told = head.len_bytes;
            return Err(damaged_error(place, &format!("it has {len_bytes} bytes of {told}")));
        }
        let is_in_ring =
            (RING_START..=head.len_bytes).contains(&head.tail_at) || head.incarnation == 0;
        let counts = [head.incarnation, head.generation, head.tail_index, head.durable];
        if head.len_bytes < RING_START + SECTOR_BYTES
            || !is_in_ring
            || !head.tail_at.is_multiple_of(SECTOR_BYTES)
            || counts.into_iter().any(|count| count >= MAX_COUNTER)
        {
            return Err(damaged_error(place, "its head"));
        }
        let at = head.tail_at.max(RING_START);
        let nth = head.tail_index;
        let (local, records, kept) = (local.clone(), VecDeque::new(), JournalStatistics::default());
        let mut journal = Self { local, head, at, nth, records, kept };
        let waiting = journal.replay()?;
        Ok((journal, waiting))
    }

    pub fn id(&self) -> u128 {
        self.head.id
    }

    pub fn location(&self) -> &str {
        &self.local.place
    }

    /// Returns the id and address of the store that last used it.
    pub fn store_identity(&self) -> (u128, &str) {
        (self.head.store, &self.head.address)
    }

    /// Returns the length limit of objects. Their records may be twice as long, and an object is
    /// uploaded only once the journal has all of them.
    pub fn object_bytes(&self) -> u64 {
        let part = (self.end_offset() - RING_START) / 8;
        (part - part % SECTOR_BYTES).clamp(SECTOR_BYTES, OBJECT_BYTES)
    }

    fn end_offset(&self) -> u64 {
        self.head.len_bytes - self.head.len_bytes % SECTOR_BYTES
    }

    /// Reads all records, and moves to the end.
    fn replay(&mut self) -> Result<UnsentObjects, Error> {
        let mut waiting = UnsentObjects::default();
        if self.head.incarnation == 0 || self.head.is_empty {
            return Ok(waiting);
        }
        let mut durable = self.head.durable;
        loop {
            // After the ring's end it continues at the start: each number is unique.
            let found = match self.record_at(self.at)? {
                Some(found) => Some((self.at, found)),
                None => self.record_at(RING_START)?.map(|found| (RING_START, found)),
            };
            let Some((at, record)) = found else { break };
            durable = durable.max(record.durable);
            self.records.push_back((record.nth, at));
            self.at = at + record.room;
            self.nth += 1;
            add_unsent(&mut waiting, record)
                .map_err(|what| damaged_error(&self.local.place, what))?;
        }
        if durable > self.nth || self.has_lost_durable_record()? {
            let at = self.at;
            return Err(damaged_error(&self.local.place, &format!("the record at byte {at}")));
        }
        if waiting.objects.values().any(|object| !object.is_root && object.runs.is_empty()) {
            return Err(damaged_error(&self.local.place, "an object without sectors"));
        }
        Ok(waiting)
    }

    /// Returns the record with the next number, if it is there.
    fn record_at(&self, at: u64) -> Result<Option<JournalRecord>, Error> {
        if at + SECTOR_BYTES > self.end_offset() {
            return Ok(None);
        }
        let first = self.read(at, SECTOR_BYTES)?;
        let Some((nth, room)) =
            self.parse_record_header(&first, at).filter(|(nth, _)| *nth == self.nth)
        else {
            return Ok(None);
        };
        let bytes = if room == SECTOR_BYTES { first } else { self.read(at, room)? };
        Ok(self.decode_record(bytes).filter(|record| record.number == nth))
    }

    /// Returns number and length of a possible record, from its first sector.
    fn parse_record_header(&self, first: &[u8], at: u64) -> Option<(u64, u64)> {
        if first.get(8..16)? != RECORD_MAGIC {
            return None;
        }
        let (runs, len) = (read_u64(first, 48) as u32, read_u64(first, 56));
        let most = self.end_offset() - RING_START;
        if runs > MAX_RUNS || len > most {
            return None;
        }
        let room = (RECORD_HEADER_BYTES as u64 + 16 * u64::from(runs) + len)
            .next_multiple_of(SECTOR_BYTES);
        (at + room <= self.end_offset()).then_some((read_u64(first, 16), room))
    }

    /// Decodes a record of this incarnation, if its checksum is right.
    fn decode_record(&self, bytes: Vec<u8>) -> Option<JournalRecord> {
        if self.head.checksum(bytes.get(8..)?) != read_u64(&bytes, 0) {
            return None;
        }
        let (flags, runs, len) =
            (read_u64(&bytes, 40), read_u64(&bytes, 48) as usize, read_u64(&bytes, 56));
        let bytes = Bytes::from(bytes);
        // Its first sector was checked for bounds.
        let from = RECORD_HEADER_BYTES + 16 * runs;
        let run = |nth: usize| {
            let at = RECORD_HEADER_BYTES + 16 * nth;
            SectorRun { sector: read_u64(&bytes, at), count: read_u64(&bytes, at + 8) }
        };
        Some(JournalRecord {
            number: read_u64(&bytes, 16),
            durable: read_u64(&bytes, 24),
            nth: read_u64(&bytes, 32),
            epoch: (flags >> 32) as u32,
            is_root: flags & 1 != 0,
            runs: (0..runs).map(run).collect(),
            room: bytes.len() as u64,
            bytes: bytes.slice(from..from + len as usize),
        })
    }

    /// Returns true if a later record declares the one at the end durable.
    fn has_lost_durable_record(&self) -> Result<bool, Error> {
        let mut start = RING_START;
        while start < self.end_offset() {
            let all = self.read(start, SEARCH_READ_BYTES.min(self.end_offset() - start))?;
            for (at, sector) in
                (start..).step_by(SECTOR_BYTES as usize).zip(all.chunks(SECTOR_BYTES as usize))
            {
                let Some((nth, room)) = self.parse_record_header(sector, at) else { continue };
                if nth <= self.nth || read_u64(sector, 24) <= self.nth {
                    continue;
                }
                if self.decode_record(self.read(at, room)?).is_some() {
                    return Ok(true);
                }
            }
            start += SEARCH_READ_BYTES;
        }
        Ok(false)
    }

    /// Makes the replayed state durable, so that the caller may act on it.
    pub fn persist_replay(&mut self) -> Result<(), Error> {
        let (at, nth) = match self.records.front() {
            Some((_, at)) => (*at, self.head.tail_index),
            None => (self.at, self.nth),
        };
        self.write_header(at, nth, false)
    }

    /// Discards all records: the bucket has them.
    pub fn mark_empty(&mut self) -> Result<(), Error> {
        self.write_header(self.at, self.nth, true)?;
        self.records.clear();
        Ok(())
    }

    /// Begins an incarnation of an empty journal, for a store.
    pub fn begin_incarnation(&mut self, store: u128, address: &str) -> Result<(), Error> {
        let (incarnation, address) = (self.head.incarnation + 1, strip_control_chars(address));
        self.head = JournalHeader { incarnation, store, address, ..self.head.clone() };
        (self.at, self.nth) = (RING_START, 0);
        self.records.clear();
        self.write_header(RING_START, 0, false)
    }

    /// Releases the space of objects before `durable`, which the bucket has.
    pub fn release(&mut self, durable: u64) -> Result<(), Error> {
        let gone = self.records.iter().take_while(|(nth, _)| *nth < durable).count();
        if gone == 0 {
            return Ok(());
        }
        let at = self.records.get(gone).map_or(self.at, |(_, at)| *at);
        self.write_header(at, self.head.tail_index + gone as u64, false)?;
        self.records.drain(..gone);
        Ok(())
    }

    /// Returns true if a record fits now.
    pub fn has_room_for(&self, draft: &PendingRecord) -> bool {
        self.find_space(draft.padded_len()).is_some()
    }

    /// Returns the first object that it has a record of.
    pub fn first_object(&self) -> Option<u64> {
        self.records.front().map(|(nth, _)| *nth)
    }

    /// Returns true if more than half of the ring is in use.
    pub fn is_half_full(&self) -> bool {
        let Some((_, tail)) = self.records.front() else { return false };
        let ring = self.end_offset() - RING_START;
        (self.at + ring - tail) % ring > ring / 2 || self.at == *tail
    }

    /// Returns true if a record of that length fits the empty journal.
    pub fn can_hold(&self, draft: &PendingRecord) -> bool {
        draft.padded_len() <= self.end_offset() - RING_START
    }

    /// Returns the offset for a record of that length, if there is space.
    fn find_space(&self, len: u64) -> Option<u64> {
        let Some((_, tail)) = self.records.front() else {
            return [self.at, RING_START].into_iter().find(|at| at + len <= self.end_offset());
        };
        if self.at <= *tail {
            return (self.at + len <= *tail).then_some(self.at);
        }
        if self.at + len <= self.end_offset() {
            return Some(self.at);
        }
        (RING_START + len <= *tail).then_some(RING_START)
    }

    /// Writes as many records as fit, waits until they are durable, and returns their number.
    pub fn write(&mut self, epoch: u32, drafts: &[PendingRecord]) -> Result<usize, Error> {
        let (durable, mut writes, mut done) = (self.nth, vec![], 0);
        for draft in drafts {
            let Some(at) = self.find_space(draft.padded_len()) else { break };
            writes.push((at, self.encode(epoch, durable, draft)));
            self.records.push_back((draft.nth, at));
            self.at = at + draft.padded_len();
            self.nth += 1;
            done += 1;
            self.kept.records += 1;
            self.kept.bytes += draft.padded_len();
        }
        if done > 0 {
            self.write_and_flush(writes)?;
        }
        Ok(done)
    }

    fn encode(&self, epoch: u32, durable: u64, draft: &PendingRecord) -> Vec<u8> {
        let mut out = Vec::with_capacity(draft.padded_len() as usize);
        let flags = u64::from(draft.is_root) | u64::from(epoch) << 32;
        out.extend([0; 8]);
        out.extend(RECORD_MAGIC);
        for word in [self.nth, durable, draft.nth, flags, draft.runs.len() as u64, draft.len()] {
            out.extend(word.to_le_bytes());
        }
        for run in &draft.runs {
            out.extend(run.sector.to_le_bytes());
            out.extend(run.count.to_le_bytes());
        }
        draft.bytes.iter().for_each(|bytes| out.extend_from_slice(bytes));
        out.resize(draft.padded_len() as usize, 0);
        let sum = self.head.checksum(&out[8..]);
        out[..8].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Writes a header over the older one of both.
    fn write_header(&mut self, tail_at: u64, tail_nth: u64, is_empty: bool) -> Result<(), Error> {
        let (generation, durable) = (self.head.generation + 1, self.nth);
        let old = self.head.clone();
        self.head =
            JournalHeader { tail_at, tail_index: tail_nth, durable, is_empty, generation, ..old };
        let at = HEADER_OFFSETS[(generation % 2) as usize];
        let bytes = self.head.encode();
        self.write_and_flush(vec![(at, bytes)])
    }

    fn write_and_flush(&mut self, writes: Vec<(u64, Vec<u8>)>) -> Result<(), Error> {
        self.kept.flushes += 1;
        let place = &self.local.place;
        write(&*self.local.disk, writes).map_err(|error| remote(format!("{place}: {error}")))
    }

    fn read(&self, at: u64, len: u64) -> Result<Vec<u8>, Error> {
        read(&*self.local.disk, at, len, &self.local.place)
    }
}

/// A decoded record.
struct JournalRecord {
    number: u64,
    durable: u64,
    epoch: u32,
    nth: u64,
    is_root: bool,
    runs: Vec<SectorRun>,
    bytes: Bytes,
    room: u64,
}

/// Adds a record to the unsent objects; returns the reason if it is invalid.
fn add_unsent(waiting: &mut UnsentObjects, record: JournalRecord) -> Result<(), &'static str> {
    let JournalRecord { epoch, nth, is_root, runs, bytes, .. } = record;
    let last = waiting.objects.last_key_value().map(|(nth, _)| *nth);
    if nth >= MAX_COUNTER {
        return Err("the number of an object");
    }
    match last {
        None => waiting.epoch = epoch,
        Some(_) if waiting.epoch != epoch => return Err("records of several epochs"),
        Some(last) if nth != last && nth != last + 1 => return Err("a gap"),
        Some(last) if nth == last && is_root => return Err("two roots with one number"),
        Some(_) => {}
    }
    if is_root {
        let object = JournaledObject { is_root, runs: vec![], bytes: bytes.to_vec() };
        return waiting.objects.insert(nth, object).map_or(Ok(()), |_| Err("an object twice"));
    }
    let is_sane = |run: &SectorRun| run.count > 0 && run.sector.max(run.count) < 1 << 48;
    let sectors = runs.iter().filter(|run| is_sane(run)).map(|run| run.count).sum::<u64>();
    if !runs.iter().all(is_sane) || sectors.checked_mul(SECTOR_BYTES) != Some(bytes.len() as u64) {
        return Err("the sectors of a record");
    }
    let empty = JournaledObject { is_root, runs: vec![], bytes: vec![] };
    let object = waiting.objects.entry(nth).or_insert(empty);
    if object.is_root || (object.bytes.len() + bytes.len()) as u64 > OBJECT_BYTES {
        return Err("an object that is too long");
    }
    for run in runs {
        let has_room = can_append_run(&object.runs, run);
        match object.runs.last_mut() {
            Some(last) if last.sector + last.count == run.sector => last.count += run.count,
            _ if has_room => object.runs.push(run),
            _ => return Err("an object of too many parts"),
        }
    }
    object.bytes.extend_from_slice(&bytes);
    Ok(())
}

fn damaged_error(place: &str, what: &str) -> Error {
    remote(format!(
        "{place}: the journal is damaged: {what}; it is left as it is. What waits in it may have been \
         acknowledged: without it, --take-over opens the store with what the bucket has"
    ))
}

fn read(disk: &dyn Disk, at: u64, len: u64, place: &str) -> Result<Vec<u8>, Error> {
    let block = disk.read_now(Extent::new(at, len), Block::private(len as usize));
    let block = block.map_err(|refused| remote(format!("{place}: {}", refused.error)))?;
    let mut bytes = vec![0; len as usize];
    block.copy_out(0, &mut bytes);
    Ok(bytes)
}

/// Writes, and waits until the data is durable.
fn write(disk: &dyn Disk, writes: Vec<(u64, Vec<u8>)>) -> Result<(), Error> {
    let writes = writes.into_iter().map(|(at_bytes, bytes)| {
        let mut block = Block::private(bytes.len());
        block.copy_in(0, &bytes);
        Write { at_bytes, block }
    });
    let group = Group { writes: writes.collect() };
    let ticket = disk.submit(group, &[]).map_err(|refused| refused.error)?;
    disk.wait_durable(ticket)
}
