//! The device as this crate reads it: everything through the data cache.
//!
//! ```text
//!   metadata: device in pieces of 32 KiB     file contents: the file in chunks of 128 KiB
//!                  │                                    │ runs of blocks, merged
//!                  └────────── data cache ◀─────────────┤
//!                                                    flights: reads ahead, not awaited yet
//! ```
//! Law 1: a full chunk that one run of blocks fills is read in place and never copied.
//! What is smaller is copied once, to memory of its own length; small files that lie
//! together are read together.
//! Law 2: what flies is bounded; who needs a chunk in flight waits for it.
//! Law 3: a failed read costs what failed: its neighbours are read without it.

pub(crate) mod data;
pub(crate) mod overlay;
pub(crate) mod pool;
pub(crate) mod role;
pub(crate) mod stream;
pub(crate) mod sums;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use draconis_device::{Atomic, Disk, Extent, Pending, ReadAnswer, Urgency};
use draconis_exchange::heap::Block;

pub(crate) use crate::blocks::data::CHUNK_BYTES;
use crate::blocks::data::{Chunk, Data};
use crate::blocks::overlay::Overlay;
use crate::blocks::pool::{Memory, Pool};
use crate::blocks::role::{Role, Sums};
use crate::blocks::stream::{Ahead, Stretches};
use crate::cache::{Cache, CacheStatistics};
use crate::units::index;
use crate::{Error, FsBlock, Result};

/// Metadata is read in aligned pieces of this many bytes, or of a block if that is more:
/// large enough for an inode table or a stretch of small files to take few reads, small
/// enough for the cache to hold the blocks of many directories.
const PIECE_BYTES: u64 = 32 << 10;
/// The smallest pieces.
const PAGE_BYTES: u64 = 4 << 10;

/// Runs that a small file may have to be read with its neighbours: scattered files have
/// none.
const FEW_RUNS: usize = 4;

/// Names a value of the data cache: piece `index` of the device if `inode` is 0, else
/// chunk `index` of that file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Key {
    pub(crate) inode: u32,
    pub(crate) index: u64,
}

/// Where the bytes of a chunk come from.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Length of the chunk in bytes.
    pub(crate) len: usize,
    /// Device bytes, and where they go in the chunk; what no part fills is zero.
    pub(crate) parts: Vec<Part>,
    /// Whether what lies beside it will be wanted with it, as with the files of a directory.
    pub(crate) clustered: bool,
}

/// One run of a plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// The first byte on the device.
    pub(crate) start_bytes: u64,
    /// How many.
    pub(crate) len: usize,
    /// The first byte in the chunk.
    pub(crate) to: usize,
}

/// A chunk on its way.
struct Flight {
    len: usize,
    reads: Vec<Read>,
    marked: bool,
}

struct Read {
    pending: Pending<ReadAnswer>,
    /// The wanted bytes of what is read: devices read whole sectors.
    wanted: Range<usize>,
    to: usize,
}

/// See the head of the file.
pub(crate) struct Store {
    disk: Arc<dyn Disk>,
    disk_bytes: u64,
    /// Whether a power cut leaves each chain of groups whole or undone.
    pub(crate) is_atomic: bool,
    sector_bytes: u64,
    block_bytes: u32,
    piece_bytes: u64,
    cache: Cache<Key, Arc<Chunk>>,
    flights: Mutex<Flights>,
    stretches: Stretches,
    pool: Arc<Pool>,
    reads: AtomicU64,
    read_bytes: AtomicU64,
    /// What is newer than the device; nothing on a volume that is only read.
    pub(crate) overlay: Overlay,
    /// What seals and verifies blocks, on volumes whose blocks carry checksums.
    pub(crate) sums: Option<Box<dyn Sums>>,
}

#[derive(Default)]
struct Flights {
    by_key: HashMap<Key, Flight>,
    bytes: usize,
    limit: usize,
}

/// What a volume asked of its device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeviceStatistics {
    /// Reads.
    pub reads: u64,
    /// Bytes read.
    pub bytes: u64,
}

impl Store {
    pub(crate) fn new(
        disk: Arc<dyn Disk>,
        block_bytes: u32,
        cache_bytes: u64,
        ahead_bytes: u64,
    ) -> Self {
        let properties = disk.properties();
        let piece_bytes = PIECE_BYTES.max(u64::from(block_bytes));
        let limit = (cache_bytes / 4).clamp(CHUNK_BYTES, 16 << 20);
        Self {
            disk,
            disk_bytes: properties.len_bytes,
            is_atomic: properties.atomic == Atomic::AgainstPowerCut,
            sector_bytes: u64::from(properties.sector_bytes.max(1)),
            block_bytes,
            cache: Cache::new(cache_bytes, 16 << 10, CHUNK_BYTES),
            flights: Mutex::new(Flights { limit: index(limit), ..Flights::default() }),
            // What is ahead must not push out what was read just now.
            stretches: Stretches::new(ahead_bytes.min(limit / 4), piece_bytes),
            pool: Pool::new([piece_bytes, CHUNK_BYTES], false),
            piece_bytes,
            reads: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            overlay: Overlay::default(),
            sums: None,
        }
    }

    /// With pieces as small as pages: for who says what it will want ([`Store::expect`]), so much
    /// of it under way at once, and looks at most of it once.
    pub(crate) fn of_blocks(mut self, under_way_bytes: usize) -> Self {
        self.piece_bytes = PAGE_BYTES.max(u64::from(self.block_bytes));
        self.pool = Pool::new([self.piece_bytes, CHUNK_BYTES], true);
        self.flights = Mutex::new(Flights { limit: under_way_bytes, ..Flights::default() });
        self
    }

    pub(crate) fn cache_statistics(&self) -> CacheStatistics {
        self.cache.statistics()
    }

    pub(crate) fn device_statistics(&self) -> DeviceStatistics {
        DeviceStatistics {
            reads: self.reads.load(Ordering::Relaxed),
            bytes: self.read_bytes.load(Ordering::Relaxed),
        }
    }

    /// A block of metadata, as it is now.
    pub(crate) fn block(&self, block: FsBlock, role: Role) -> Result<Data> {
        if let Some(newer) = self.overlay.get(block) {
            return Ok(newer);
        }
        let bytes = self.block_of_disk(block)?;
        self.verify(block, role, &bytes).map(|()| bytes)
    }

    /// Looks whether a block of the disk is what was sealed.
    pub(crate) fn verify(&self, block: FsBlock, role: Role, bytes: &[u8]) -> Result<()> {
        self.sums.as_ref().map_or(Ok(()), |sums| sums.verify(role, block, bytes))
    }

    /// A block of metadata, if no device must be asked for it.
    pub(crate) fn block_in_memory(&self, block: FsBlock) -> Option<Data> {
        if let Some(newer) = self.overlay.get(block) {
            return Some(newer);
        }
        let (nth, at) = self.piece_place(block.0.checked_mul(self.block_bytes.into())?);
        let piece = self.cache.peek(Key { inode: 0, index: nth })?;
        Some(Data::of(piece, at, index(self.block_bytes.into())))
    }

    fn block_of_disk(&self, block: FsBlock) -> Result<Data> {
        let len = u64::from(self.block_bytes);
        let missing = Error::Corrupt {
            what: "block beyond the end of the disk",
            inode: None,
            block: Some(block),
        };
        let Some(start) = block.0.checked_mul(len) else { return Err(missing) };
        match start.checked_add(len) {
            Some(end) if end <= self.disk_bytes => {}
            _ => return Err(missing),
        }
        let ((nth, at), len) = (self.piece_place(start), index(len));
        match self.piece(nth) {
            Ok(piece) => Ok(Data::of(piece, at, len)),
            Err(Error::Io(_)) => {
                let part = Part { start_bytes: start, len, to: 0 };
                let alone = self.load(&Plan { len, parts: vec![part], clustered: false })?;
                Ok(Data::of(alone, 0, len))
            }
            Err(other) => Err(other),
        }
    }

    /// A piece of the device, with what comes after it on its way if it is part of a
    /// stretch.
    fn piece(&self, nth: u64) -> Result<Arc<Chunk>> {
        let key = Key { inode: 0, index: nth };
        let started = || {
            if let Some(ahead) = self.stretches.at(nth) {
                self.pieces_ahead(ahead);
            }
        };
        let piece = self
            .cache
            .get_or_load(key, || self.fetch(key, || Ok(self.plan_of_piece(nth)), started))?;
        if piece.marked() {
            started();
        }
        Ok(piece)
    }

    fn pieces_ahead(&self, ahead: Ahead) {
        let (last, _) = self.piece_place(self.disk_bytes.saturating_sub(1));
        let end = ahead.end.min(last.saturating_add(1));
        for nth in ahead.from..end {
            let key = Key { inode: 0, index: nth };
            if !self.read_ahead(key, || Ok(self.plan_of_piece(nth)), nth == ahead.mark) {
                return;
            }
        }
    }

    /// Starts to read blocks of metadata that will be wanted soon, in the order of the disk and
    /// neighbours together; no more than there is room for.
    pub(crate) fn expect(&self, blocks: Vec<u64>) {
        let start = |block: u64| block.checked_mul(self.block_bytes.into());
        let places = blocks.into_iter().filter_map(start).map(|start| self.piece_place(start).0);
        let pieces: BTreeSet<u64> = places.collect();
        for nth in pieces {
            let key = Key { inode: 0, index: nth };
            if !self.read_ahead(key, || Ok(self.plan_of_piece(nth)), false) {
                return;
            }
        }
    }

    /// The piece that byte `at` of the device is in, and where therein.
    fn piece_place(&self, at: u64) -> (u64, usize) {
        // Both are powers of two, so no block straddles two pieces.
        let nth = at.checked_div(self.piece_bytes).unwrap_or(0);
        (nth, index(at.checked_rem(self.piece_bytes).unwrap_or(0)))
    }

    fn plan_of_piece(&self, nth: u64) -> Plan {
        let start_bytes = nth.saturating_mul(self.piece_bytes);
        let len = index(self.disk_bytes.saturating_sub(start_bytes).min(self.piece_bytes));
        Plan { len, parts: vec![Part { start_bytes, len, to: 0 }], clustered: false }
    }

    /// The chunk of `key`, read by `plan` if it is neither cached nor on its way;
    /// `started` runs between the start of that read and the wait for it.
    pub(crate) fn chunk(
        &self,
        key: Key,
        plan: impl FnOnce() -> Result<Plan>,
        started: impl FnOnce(),
    ) -> Result<Arc<Chunk>> {
        self.cache.get_or_load(key, || self.fetch(key, plan, started))
    }

    fn fetch(
        &self,
        key: Key,
        plan: impl FnOnce() -> Result<Plan>,
        started: impl FnOnce(),
    ) -> Result<Arc<Chunk>> {
        if let Some(flight) = self.claim(key) {
            started();
            if let Ok(chunk) = flight.land(&self.pool) {
                return Ok(chunk);
            }
            return self.load(&plan()?);
        }
        let plan = plan()?;
        // Small files, and the starts of large ones: reading on in those is
        // a stream, and read ahead as one.
        if plan.clustered
            && key.index == 0
            && self.in_company(&plan)
            && let Ok(chunk) = self.assemble(&plan)
        {
            return Ok(self.renew(&plan, chunk));
        }
        let flight = self.take_off(&plan, Urgency::Now)?;
        started();
        Ok(self.renew(&plan, flight.land(&self.pool)?))
    }

    /// Puts into a chunk what is newer than the device. It is not shared yet.
    fn renew(&self, plan: &Plan, mut chunk: Arc<Chunk>) -> Arc<Chunk> {
        if self.overlay.is_empty() {
            return chunk;
        }
        let blocks = self.overlay.read();
        for (block, to, len) in self.blocks_of(plan) {
            let Some(newer) = blocks.get(block) else { continue };
            let range = to..to.saturating_add(len);
            if let (Some(into), Some(from)) = (Chunk::lend(&mut chunk, range), newer.get(..len)) {
                into.copy_from_slice(from);
            }
        }
        chunk
    }

    /// The blocks of a plan: which, where in the chunk, and how much of each.
    fn blocks_of(&self, plan: &Plan) -> impl Iterator<Item = (FsBlock, usize, usize)> {
        let block_bytes = u64::from(self.block_bytes);
        plan.parts.iter().flat_map(move |part| {
            let (first, len, to) = (part.start_bytes.checked_div(block_bytes), part.len, part.to);
            (0..len).step_by(index(block_bytes)).zip(0u64..).filter_map(move |(at, nth)| {
                let block = FsBlock(first?).after(nth);
                Some((block, to.saturating_add(at), len.saturating_sub(at).min(index(block_bytes))))
            })
        })
    }

    /// Whether the device is behind in any block of the plan.
    fn is_newer(&self, plan: &Plan) -> bool {
        if self.overlay.is_empty() {
            return false;
        }
        let blocks = self.overlay.read();
        self.blocks_of(plan).any(|(block, ..)| blocks.get(block).is_some())
    }

    /// Forgets a chunk, also one on its way.
    pub(crate) fn forget(&self, key: Key) {
        // In this order: what lands meanwhile is in the cache by then.
        self.claim(key);
        self.cache.forget(key);
    }

    /// Forgets these chunks of a file, also those on their way.
    pub(crate) fn forget_chunks(&self, inode: u32, chunks: std::ops::Range<u64>) {
        let among = |key: &Key| key.inode == inode && chunks.contains(&key.index);
        let mut flights = self.lock_flights();
        let Flights { by_key, bytes, .. } = &mut *flights;
        by_key.retain(|key, flight| {
            let gone = among(key);
            *bytes = bytes.saturating_sub(if gone { flight.len } else { 0 });
            !gone
        });
        drop(flights);
        self.cache.forget_row(chunks.clone(), |index| Key { inode, index }, among);
    }

    /// Forgets what the data cache holds of a block of the device.
    pub(crate) fn forget_block(&self, block: FsBlock) {
        let start = block.0.saturating_mul(u64::from(self.block_bytes));
        self.forget(Key { inode: 0, index: self.piece_place(start).0 });
    }

    /// Contents leave the overlay: what the data cache holds of their block is renewed, or
    /// forgotten where others read it just now. Who appends a little at a time, and syncs, finds
    /// the block that he goes on with in memory.
    pub(crate) fn renew_block(&self, block: FsBlock, now: &Data) {
        let (nth, at) = self.piece_place(block.0.saturating_mul(u64::from(self.block_bytes)));
        let key = Key { inode: 0, index: nth };
        self.claim(key);
        let Some(mut piece) = self.cache.take(key) else { return };
        let range = at..at.saturating_add(now.len());
        if let Some(into) = Chunk::lend(&mut piece, range) {
            into.copy_from_slice(now);
            self.cache.offer(key, piece);
        }
    }

    /// Whether a small file lies where others were read just now.
    fn in_company(&self, plan: &Plan) -> bool {
        let [first, ..] = plan.parts.as_slice() else { return false };
        if plan.parts.len() > FEW_RUNS {
            return false;
        }
        let (nth, _) = self.piece_place(first.start_bytes);
        match self.stretches.at(nth) {
            Some(ahead) => {
                self.pieces_ahead(ahead);
                true
            }
            None => self.cache.holds(Key { inode: 0, index: nth }),
        }
    }

    /// Puts a small file together from pieces of the device.
    fn assemble(&self, plan: &Plan) -> Result<Arc<Chunk>> {
        let mut memory = Memory::zeros(plan.len);
        for part in &plan.parts {
            let into = memory.get_mut(part.to..part.to.saturating_add(part.len));
            let mut rest = into.unwrap_or_default();
            let mut from = part.start_bytes;
            // Each turn takes at least a byte, and all that its piece has.
            while !rest.is_empty() {
                let (nth, at) = self.piece_place(from);
                let bytes = Data::of(self.piece(nth)?, at, rest.len());
                let (head, tail) = rest.split_at_mut_checked(bytes.len()).unwrap_or_default();
                if head.is_empty() {
                    return Err(Error::corrupt("block beyond the end of the disk"));
                }
                head.copy_from_slice(&bytes);
                from = from.saturating_add(bytes.len() as u64);
                rest = tail;
            }
        }
        Ok(Chunk::whole(memory))
    }

    /// Starts to read a chunk that will be wanted soon. Says whether there is room
    /// for more.
    pub(crate) fn read_ahead(
        &self,
        key: Key,
        plan: impl FnOnce() -> Result<Plan>,
        marked: bool,
    ) -> bool {
        if self.cache.holds(key) {
            return true;
        }
        {
            let mut flights = self.lock_flights();
            if flights.by_key.contains_key(&key) {
                return true;
            }
            if flights.bytes >= flights.limit / 2 {
                self.settle(&mut flights);
            }
            if flights.bytes >= flights.limit {
                return false;
            }
        }
        // A read that needs it will get the error.
        let Ok(plan) = plan() else { return false };
        if self.is_newer(&plan) && key.inode != 0 {
            return true;
        }
        let Ok(mut flight) = self.take_off(&plan, Urgency::Ahead) else { return false };
        flight.marked = marked;
        let mut flights = self.lock_flights();
        flights.bytes = flights.bytes.saturating_add(flight.len);
        if let Some(twin) = flights.by_key.insert(key, flight) {
            flights.bytes = flights.bytes.saturating_sub(twin.len);
        }
        true
    }

    /// Takes a chunk out of the air.
    fn claim(&self, key: Key) -> Option<Flight> {
        let mut flights = self.lock_flights();
        let flight = flights.by_key.remove(&key)?;
        flights.bytes = flights.bytes.saturating_sub(flight.len);
        Some(flight)
    }

    /// Moves what has arrived unasked into the cache.
    fn settle(&self, flights: &mut Flights) {
        let arrived: Vec<Key> =
            flights.by_key.iter().filter(|(_, it)| it.arrived()).map(|(key, _)| *key).collect();
        for key in arrived {
            if let Some(flight) = flights.by_key.remove(&key) {
                flights.bytes = flights.bytes.saturating_sub(flight.len);
                if let Ok(chunk) = flight.land(&self.pool) {
                    self.cache.offer(key, chunk);
                }
            }
        }
    }

    fn lock_flights(&self) -> std::sync::MutexGuard<'_, Flights> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads a chunk and waits for it.
    pub(crate) fn load(&self, plan: &Plan) -> Result<Arc<Chunk>> {
        let chunk = self.take_off(plan, Urgency::Now)?.land(&self.pool)?;
        Ok(self.renew(plan, chunk))
    }

    fn take_off(&self, plan: &Plan, urgency: Urgency) -> Result<Flight> {
        let mut reads = Vec::with_capacity(plan.parts.len());
        for part in &plan.parts {
            reads.push(self.start(part, urgency)?);
        }
        Ok(Flight { len: plan.len, reads, marked: false })
    }

    fn start(&self, part: &Part, urgency: Urgency) -> Result<Read> {
        let sector = self.sector_bytes;
        let skew = part.start_bytes.checked_rem(sector).unwrap_or(0);
        let start = part.start_bytes.saturating_sub(skew);
        let wanted = index(skew)..index(skew).saturating_add(part.len);
        let len = (wanted.end as u64).checked_next_multiple_of(sector).unwrap_or(u64::MAX);
        if start.checked_add(len).is_none_or(|end| end > self.disk_bytes) {
            let block = part.start_bytes.checked_div(u64::from(self.block_bytes)).map(FsBlock);
            return Err(Error::Corrupt {
                what: "block beyond the end of the disk",
                inode: None,
                block,
            });
        }
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(len, Ordering::Relaxed);
        let pending = self.disk.read(Extent::new(start, len), self.pool.take(index(len)), urgency);
        Ok(Read { pending, wanted, to: part.to })
    }
}

impl Flight {
    fn arrived(&self) -> bool {
        self.reads.iter().all(|read| read.pending.is_ready())
    }

    /// Waits for all of it.
    fn land(mut self, pool: &Arc<Pool>) -> Result<Arc<Chunk>> {
        let whole = matches!(
            self.reads.as_slice(),
            [Read { to: 0, wanted, .. }] if wanted.len() == self.len
        );
        let chunk = match self.reads.pop() {
            Some(read) if whole => {
                let range = read.wanted.clone();
                let memory = read.wait()?.into_private();
                let (memory, range) = Memory::filled(memory, range, pool);
                Chunk::new(memory, range)
            }
            last => {
                let mut memory = Memory::zeros(self.len);
                for read in self.reads.into_iter().chain(last) {
                    let (to, wanted) = (read.to, read.wanted.clone());
                    let block = read.wait()?;
                    let into = memory.get_mut(to..to.saturating_add(wanted.len()));
                    block.copy_out(wanted.start, into.unwrap_or_default());
                }
                Chunk::whole(memory)
            }
        };
        chunk.mark(self.marked);
        Ok(chunk)
    }
}

impl Read {
    fn wait(self) -> Result<Block> {
        match self.pending.wait() {
            Some(Ok(block)) => Ok(block),
            Some(Err(refused)) => Err(Error::Io(refused.error)),
            None => Err(Error::Io(draconis_device::Error::Gone)),
        }
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("disk_bytes", &self.disk_bytes).finish_non_exhaustive()
    }
}
