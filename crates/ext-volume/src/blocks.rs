//! Reads of the device, all through the data cache.
//!
//! ```text
//!   metadata: device in pieces of 32 KiB     file data: the file in chunks of 128 KiB
//!                  │                                    │ runs of blocks, merged
//!                  └────────── data cache ◀─────────────┤
//!                                                    in-flight chunks: read-ahead
//! ```
//! Law 1: a full chunk in one run of blocks is read in place and never copied. A smaller one is
//! copied once, to memory of its own length; small files that are close together are read together.
//! Law 2: in-flight bytes are bounded. A reader that needs an in-flight chunk waits for it.
//! Law 3: a failed read fails only its own block: the neighbours are read without it.

pub(crate) mod checksums;
pub(crate) mod cow_disk;
pub(crate) mod data;
pub(crate) mod pool;
pub(crate) mod read_ahead;
pub(crate) mod role;
mod run_read;
#[cfg(test)]
mod tests;
pub(crate) mod uncached;
pub(crate) mod write_back;

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use draconis_device::{Atomic, Disk, Extent, Pending, ReadAnswer, Urgency};
use draconis_types::Block;
use draconis_types::lock::Mutex;

pub(crate) use crate::blocks::data::CHUNK_BYTES;
use crate::blocks::data::{Chunk, SharedBytes};
use crate::blocks::pool::{ChunkMemory, Pool};
use crate::blocks::read_ahead::{DeviceReadAhead, ReadAheadWindow};
use crate::blocks::role::{BlockChecksums, Role};
use crate::blocks::write_back::WriteBackCache;
use crate::cache::{Cache, CacheStatistics};
use crate::units::saturating_usize;
use crate::{Error, FsBlock, Result};

/// Size of the aligned pieces in which metadata is read, or of a block if that is larger. Large
/// enough to read an inode table or a group of small files with few requests; small enough that the
/// cache holds blocks of many directories.
const PIECE_BYTES: u64 = 32 << 10;
/// Size of the smallest pieces.
const MIN_PIECE_BYTES: u64 = 4 << 10;

/// Limit of runs of a small file that is read with its neighbours; a scattered file has none.
const MAX_CLUSTERED_RUNS: usize = 4;

/// Key of the data cache: piece `index` of the device if `inode` is 0, else chunk `index` of that
/// file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct CacheKey {
    pub(crate) inode: u32,
    pub(crate) index: u64,
}

/// Sources of the bytes of a chunk.
#[derive(Debug)]
pub(crate) struct ReadPlan {
    /// Length of the chunk in bytes.
    pub(crate) len: usize,
    /// Device ranges and their offsets in the chunk; the rest is zero.
    pub(crate) segments: Vec<ReadSegment>,
    /// True if the adjacent blocks will be needed, too, as with the files of a directory.
    pub(crate) is_near_siblings: bool,
}

/// One device range of a plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadSegment {
    /// First byte on the device.
    pub(crate) start_bytes: u64,
    /// Number of bytes.
    pub(crate) len: usize,
    /// Offset in the chunk.
    pub(crate) chunk_offset: usize,
}

/// A chunk that is being read.
struct InFlightChunk {
    len: usize,
    reads: Vec<PendingRead>,
    marked: bool,
}

struct PendingRead {
    pending: Pending<ReadAnswer>,
    /// Range of the wanted bytes in the read sectors.
    wanted: Range<usize>,
    chunk_offset: usize,
}

/// A device with its data cache.
pub struct BlockStore {
    disk: Arc<dyn Disk>,
    disk_bytes: u64,
    /// Whether a power cut leaves each chain of groups whole or undone.
    pub(crate) is_atomic: bool,
    sector_bytes: u64,
    block_bytes: u32,
    piece_bytes: u64,
    cache: Cache<CacheKey, Arc<Chunk>>,
    in_flight: Mutex<InFlightChunks>,
    device_read_ahead: DeviceReadAhead,
    pool: Arc<Pool>,
    reads: AtomicU64,
    read_bytes: AtomicU64,
    /// Write-back cache; empty on a read-only volume.
    pub(crate) write_back: WriteBackCache,
    /// Sets and verifies block checksums, on volumes that have them.
    pub(crate) checksums: Option<Box<dyn BlockChecksums>>,
}

#[derive(Default)]
struct InFlightChunks {
    by_key: HashMap<CacheKey, InFlightChunk>,
    bytes: usize,
    limit: usize,
}

/// Statistics of a volume's device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeviceStatistics {
    /// Number of reads.
    pub reads: u64,
    /// Bytes read.
    pub bytes: u64,
}

impl BlockStore {
    /// Creates the caches of a volume on `disk`, without checksums.
    pub fn new(disk: Arc<dyn Disk>, block_bytes: u32, cache_bytes: u64, ahead_bytes: u64) -> Self {
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
            in_flight: Mutex::new(InFlightChunks {
                limit: saturating_usize(limit),
                ..InFlightChunks::default()
            }),
            // Read-ahead must not evict recent reads.
            device_read_ahead: DeviceReadAhead::new(ahead_bytes.min(limit / 4), piece_bytes),
            pool: Pool::new([piece_bytes, CHUNK_BYTES], false),
            piece_bytes,
            reads: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            write_back: WriteBackCache::default(),
            checksums: None,
        }
    }

    /// Reduces pieces to the size of a page, for a caller that prefetches
    /// ([`BlockStore::prefetch`]) up to `under_way_bytes` and uses most blocks once.
    pub fn with_small_pieces(mut self, under_way_bytes: usize) -> Self {
        self.piece_bytes = MIN_PIECE_BYTES.max(u64::from(self.block_bytes));
        self.pool = Pool::new([self.piece_bytes, CHUNK_BYTES], true);
        self.in_flight =
            Mutex::new(InFlightChunks { limit: under_way_bytes, ..InFlightChunks::default() });
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

    /// Returns true if the blocks of the volume have checksums.
    pub fn has_checksums(&self) -> bool {
        self.checksums.is_some()
    }

    /// Returns the current version of a metadata block.
    pub fn block(&self, block: FsBlock, role: Role) -> Result<SharedBytes> {
        if let Some(newer) = self.write_back.get(block) {
            return Ok(newer);
        }
        let bytes = self.read_device_block(block)?;
        self.verify_checksum(block, role, &bytes).map(|()| bytes)
    }

    /// Returns the disk.
    pub fn disk(&self) -> &dyn Disk {
        &*self.disk
    }

    /// Verifies the checksum of a block read from the disk.
    pub fn verify_checksum(&self, block: FsBlock, role: Role, bytes: &[u8]) -> Result<()> {
        self.checksums.as_ref().map_or(Ok(()), |sums| sums.verify_checksum(role, block, bytes))
    }

    /// Returns a metadata block if it is in memory.
    pub(crate) fn cached_block(&self, block: FsBlock) -> Option<SharedBytes> {
        if let Some(newer) = self.write_back.get(block) {
            return Some(newer);
        }
        let (nth, at) = self.locate_in_piece(block.0.checked_mul(self.block_bytes.into())?);
        let piece = self.cache.peek(CacheKey { inode: 0, index: nth })?;
        Some(SharedBytes::from_chunk(piece, at, saturating_usize(self.block_bytes.into())))
    }

    fn read_device_block(&self, block: FsBlock) -> Result<SharedBytes> {
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
        let ((nth, at), len) = (self.locate_in_piece(start), saturating_usize(len));
        match self.read_piece(nth) {
            Ok(piece) => Ok(SharedBytes::from_chunk(piece, at, len)),
            Err(Error::Io(_)) => {
                let part = ReadSegment { start_bytes: start, len, chunk_offset: 0 };
                let alone =
                    self.load(&ReadPlan { len, segments: vec![part], is_near_siblings: false })?;
                Ok(SharedBytes::from_chunk(alone, 0, len))
            }
            Err(other) => Err(other),
        }
    }

    /// Returns a piece of the device; reads ahead if it belongs to a sequential region.
    fn read_piece(&self, nth: u64) -> Result<Arc<Chunk>> {
        let key = CacheKey { inode: 0, index: nth };
        let started = || {
            if let Some(ahead) = self.device_read_ahead.on_piece_read(nth) {
                self.read_pieces_ahead(ahead);
            }
        };
        let piece = self
            .cache
            .get_or_load(key, || self.fetch(key, || Ok(self.piece_read_plan(nth)), started))?;
        if piece.take_read_ahead_mark() {
            started();
        }
        Ok(piece)
    }

    fn read_pieces_ahead(&self, ahead: ReadAheadWindow) {
        let (last, _) = self.locate_in_piece(self.disk_bytes.saturating_sub(1));
        let end = ahead.end.min(last.saturating_add(1));
        for nth in ahead.from..end {
            let key = CacheKey { inode: 0, index: nth };
            if !self.read_ahead(key, || Ok(self.piece_read_plan(nth)), nth == ahead.mark) {
                return;
            }
        }
    }

    /// Prefetches metadata blocks in device order, up to the in-flight limit. Adjacent small
    /// pieces are read together.
    pub fn prefetch(&self, blocks: Vec<u64>) {
        let start = |block: u64| block.checked_mul(self.block_bytes.into());
        let places =
            blocks.into_iter().filter_map(start).map(|start| self.locate_in_piece(start).0);
        let mut pieces: BTreeSet<u64> = places.collect();
        {
            let flights = self.lock_in_flight();
            pieces.retain(|nth| {
                let key = CacheKey { inode: 0, index: *nth };
                !self.cache.contains(key) && !flights.by_key.contains_key(&key)
            });
        }
        let most = match self.piece_bytes {
            PIECE_BYTES.. => 1,
            small => run_read::MAX_RUN_BYTES.checked_div(small).unwrap_or(1),
        };
        let mut run = 0..0;
        for nth in pieces {
            if nth == run.end && nth.saturating_sub(run.start) < most {
                run.end = nth.saturating_add(1);
                continue;
            }
            if !self.prefetch_run(std::mem::replace(&mut run, nth..nth.saturating_add(1))) {
                return;
            }
        }
        self.prefetch_run(run);
    }

    /// Starts to read adjacent pieces; returns false if the in-flight limit is reached.
    fn prefetch_run(&self, run: Range<u64>) -> bool {
        let count = run.end.saturating_sub(run.start);
        let start_bytes = run.start.saturating_mul(self.piece_bytes);
        let len = count.saturating_mul(self.piece_bytes);
        let is_whole = start_bytes.saturating_add(len) <= self.disk_bytes;
        if count < 2 || !is_whole || !self.piece_bytes.is_multiple_of(self.sector_bytes) {
            let mut all = run.map(|nth| CacheKey { inode: 0, index: nth });
            return all
                .all(|key| self.read_ahead(key, || Ok(self.piece_read_plan(key.index)), false));
        }
        if !self.has_room_in_flight() {
            return false;
        }
        let part = ReadSegment { start_bytes, len: saturating_usize(len), chunk_offset: 0 };
        let Ok(whole) = self.submit_read(&part, Urgency::Ahead) else { return false };
        let pieces = run_read::split_run(whole.pending, count, self.piece_bytes, &self.pool);
        let wanted = 0..saturating_usize(self.piece_bytes);
        for (nth, pending) in run.zip(pieces) {
            let read = PendingRead { pending, wanted: wanted.clone(), chunk_offset: 0 };
            let flight = InFlightChunk { len: wanted.len(), reads: vec![read], marked: false };
            self.insert_in_flight(CacheKey { inode: 0, index: nth }, flight);
        }
        true
    }

    /// Returns the piece of byte `at` of the device, and the offset there.
    fn locate_in_piece(&self, at: u64) -> (u64, usize) {
        // Both are powers of two, so no block straddles two pieces.
        let nth = at.checked_div(self.piece_bytes).unwrap_or(0);
        (nth, saturating_usize(at.checked_rem(self.piece_bytes).unwrap_or(0)))
    }

    fn piece_read_plan(&self, nth: u64) -> ReadPlan {
        let start_bytes = nth.saturating_mul(self.piece_bytes);
        let len =
            saturating_usize(self.disk_bytes.saturating_sub(start_bytes).min(self.piece_bytes));
        ReadPlan {
            len,
            segments: vec![ReadSegment { start_bytes, len, chunk_offset: 0 }],
            is_near_siblings: false,
        }
    }

    /// Returns the chunk of `key`, read by `plan` unless it is cached or in flight. `started` runs
    /// between the start of the read and the wait.
    pub(crate) fn chunk(
        &self,
        key: CacheKey,
        plan: impl FnOnce() -> Result<ReadPlan>,
        started: impl FnOnce(),
    ) -> Result<Arc<Chunk>> {
        self.cache.get_or_load(key, || self.fetch(key, plan, started))
    }

    fn fetch(
        &self,
        key: CacheKey,
        plan: impl FnOnce() -> Result<ReadPlan>,
        started: impl FnOnce(),
    ) -> Result<Arc<Chunk>> {
        if let Some(flight) = self.take_in_flight(key) {
            started();
            if let Ok(chunk) = flight.wait_for_chunk(&self.pool) {
                return Ok(chunk);
            }
            return self.load(&plan()?);
        }
        let plan = plan()?;
        // Small files, and the starts of large ones; the file's own read-ahead covers the rest.
        if plan.is_near_siblings
            && key.index == 0
            && self.is_near_recent_reads(&plan)
            && let Ok(chunk) = self.assemble_from_pieces(&plan)
        {
            return Ok(self.apply_newer_blocks(&plan, chunk));
        }
        let flight = self.submit_reads(&plan, Urgency::Now)?;
        started();
        Ok(self.apply_newer_blocks(&plan, flight.wait_for_chunk(&self.pool)?))
    }

    /// Overlays newer blocks on a chunk that is not shared yet.
    fn apply_newer_blocks(&self, plan: &ReadPlan, mut chunk: Arc<Chunk>) -> Arc<Chunk> {
        if self.write_back.is_empty() {
            return chunk;
        }
        let blocks = self.write_back.read();
        for (block, to, len) in self.blocks_in_plan(plan) {
            let Some(newer) = blocks.get(block) else { continue };
            let range = to..to.saturating_add(len);
            if let (Some(into), Some(from)) =
                (Chunk::get_mut_range(&mut chunk, range), newer.get(..len))
            {
                into.copy_from_slice(from);
            }
        }
        chunk
    }

    /// Returns the blocks of a plan: number, offset in the chunk, and length.
    fn blocks_in_plan(&self, plan: &ReadPlan) -> impl Iterator<Item = (FsBlock, usize, usize)> {
        let block_bytes = u64::from(self.block_bytes);
        plan.segments.iter().flat_map(move |part| {
            let (first, len, to) =
                (part.start_bytes.checked_div(block_bytes), part.len, part.chunk_offset);
            (0..len).step_by(saturating_usize(block_bytes)).zip(0u64..).filter_map(
                move |(at, nth)| {
                    let block = FsBlock(first?).offset(nth);
                    Some((
                        block,
                        to.saturating_add(at),
                        len.saturating_sub(at).min(saturating_usize(block_bytes)),
                    ))
                },
            )
        })
    }

    /// Returns true if the write-back cache has a newer version of any block of the plan.
    fn has_newer_blocks(&self, plan: &ReadPlan) -> bool {
        if self.write_back.is_empty() {
            return false;
        }
        let blocks = self.write_back.read();
        self.blocks_in_plan(plan).any(|(block, ..)| blocks.get(block).is_some())
    }

    /// Invalidates a chunk, also one in flight.
    pub(crate) fn invalidate_chunk(&self, key: CacheKey) {
        // In this order: a chunk that completes meanwhile is cached by then.
        self.take_in_flight(key);
        self.cache.remove(key);
    }

    /// Invalidates these chunks of a file, also those in flight.
    pub(crate) fn invalidate_chunks(&self, inode: u32, chunks: std::ops::Range<u64>) {
        let among = |key: &CacheKey| key.inode == inode && chunks.contains(&key.index);
        let mut flights = self.lock_in_flight();
        let InFlightChunks { by_key, bytes, .. } = &mut *flights;
        by_key.retain(|key, flight| {
            let gone = among(key);
            *bytes = bytes.saturating_sub(if gone { flight.len } else { 0 });
            !gone
        });
        drop(flights);
        self.cache.remove_range(chunks.clone(), |index| CacheKey { inode, index }, among);
    }

    /// Invalidates the cached piece of a device block.
    pub(crate) fn invalidate_block(&self, block: FsBlock) {
        let start = block.0.saturating_mul(u64::from(self.block_bytes));
        self.invalidate_chunk(CacheKey { inode: 0, index: self.locate_in_piece(start).0 });
    }

    /// Updates the cached piece with data that leaves the write-back cache, or drops it if a reader
    /// shares it. An application that appends and syncs in small steps then finds its last block in
    /// memory.
    pub(crate) fn update_cached_block(&self, block: FsBlock, now: &SharedBytes) {
        let (nth, at) = self.locate_in_piece(block.0.saturating_mul(u64::from(self.block_bytes)));
        let key = CacheKey { inode: 0, index: nth };
        self.take_in_flight(key);
        let Some(mut piece) = self.cache.take(key) else { return };
        let range = at..at.saturating_add(now.len());
        if let Some(into) = Chunk::get_mut_range(&mut piece, range) {
            into.copy_from_slice(now);
            self.cache.insert(key, piece);
        }
    }

    /// Returns true if the file's first block is near recent reads.
    fn is_near_recent_reads(&self, plan: &ReadPlan) -> bool {
        let [first, ..] = plan.segments.as_slice() else { return false };
        if plan.segments.len() > MAX_CLUSTERED_RUNS {
            return false;
        }
        let (nth, _) = self.locate_in_piece(first.start_bytes);
        match self.device_read_ahead.on_piece_read(nth) {
            Some(ahead) => {
                self.read_pieces_ahead(ahead);
                true
            }
            None => self.cache.contains(CacheKey { inode: 0, index: nth }),
        }
    }

    /// Assembles a small file from pieces of the device.
    fn assemble_from_pieces(&self, plan: &ReadPlan) -> Result<Arc<Chunk>> {
        let mut memory = ChunkMemory::zeros(plan.len);
        for part in &plan.segments {
            let into =
                memory.get_mut(part.chunk_offset..part.chunk_offset.saturating_add(part.len));
            let mut rest = into.unwrap_or_default();
            let mut from = part.start_bytes;
            // Each iteration takes at least one byte, and all that its piece has.
            while !rest.is_empty() {
                let (nth, at) = self.locate_in_piece(from);
                let bytes = SharedBytes::from_chunk(self.read_piece(nth)?, at, rest.len());
                let (head, tail) = rest.split_at_mut_checked(bytes.len()).unwrap_or_default();
                if head.is_empty() {
                    return Err(Error::corrupt("block beyond the end of the disk"));
                }
                head.copy_from_slice(&bytes);
                from = from.saturating_add(bytes.len() as u64);
                rest = tail;
            }
        }
        Ok(Chunk::from_memory(memory))
    }

    /// Starts to read a chunk ahead; returns false if the in-flight limit is reached.
    pub(crate) fn read_ahead(
        &self,
        key: CacheKey,
        plan: impl FnOnce() -> Result<ReadPlan>,
        marked: bool,
    ) -> bool {
        if self.cache.contains(key) || self.lock_in_flight().by_key.contains_key(&key) {
            return true;
        }
        if !self.has_room_in_flight() {
            return false;
        }
        // A later read reports the error.
        let Ok(plan) = plan() else { return false };
        if self.has_newer_blocks(&plan) && key.inode != 0 {
            return true;
        }
        let Ok(mut flight) = self.submit_reads(&plan, Urgency::Ahead) else { return false };
        flight.marked = marked;
        self.insert_in_flight(key, flight);
        true
    }

    /// Returns true below the in-flight limit; moves completed chunks into the cache to get there.
    fn has_room_in_flight(&self) -> bool {
        let mut flights = self.lock_in_flight();
        if flights.bytes >= flights.limit / 2 {
            self.cache_completed_chunks(&mut flights);
        }
        flights.bytes < flights.limit
    }

    fn insert_in_flight(&self, key: CacheKey, flight: InFlightChunk) {
        let mut flights = self.lock_in_flight();
        flights.bytes = flights.bytes.saturating_add(flight.len);
        if let Some(twin) = flights.by_key.insert(key, flight) {
            flights.bytes = flights.bytes.saturating_sub(twin.len);
        }
    }

    /// Removes and returns the in-flight read of a chunk.
    fn take_in_flight(&self, key: CacheKey) -> Option<InFlightChunk> {
        let mut flights = self.lock_in_flight();
        let flight = flights.by_key.remove(&key)?;
        flights.bytes = flights.bytes.saturating_sub(flight.len);
        Some(flight)
    }

    /// Moves completed read-ahead chunks into the cache.
    fn cache_completed_chunks(&self, flights: &mut InFlightChunks) {
        let arrived: Vec<CacheKey> =
            flights.by_key.iter().filter(|(_, it)| it.is_complete()).map(|(key, _)| *key).collect();
        for key in arrived {
            if let Some(flight) = flights.by_key.remove(&key) {
                flights.bytes = flights.bytes.saturating_sub(flight.len);
                if let Ok(chunk) = flight.wait_for_chunk(&self.pool) {
                    self.cache.insert(key, chunk);
                }
            }
        }
    }

    fn lock_in_flight(&self) -> draconis_types::lock::MutexGuard<'_, InFlightChunks> {
        self.in_flight.lock()
    }

    /// Reads a chunk and waits for it.
    pub(crate) fn load(&self, plan: &ReadPlan) -> Result<Arc<Chunk>> {
        let chunk = self.submit_reads(plan, Urgency::Now)?.wait_for_chunk(&self.pool)?;
        Ok(self.apply_newer_blocks(plan, chunk))
    }

    fn submit_reads(&self, plan: &ReadPlan, urgency: Urgency) -> Result<InFlightChunk> {
        let mut reads = Vec::with_capacity(plan.segments.len());
        for part in &plan.segments {
            reads.push(self.submit_read(part, urgency)?);
        }
        Ok(InFlightChunk { len: plan.len, reads, marked: false })
    }

    fn submit_read(&self, part: &ReadSegment, urgency: Urgency) -> Result<PendingRead> {
        let sector = self.sector_bytes;
        let skew = part.start_bytes.checked_rem(sector).unwrap_or(0);
        let start = part.start_bytes.saturating_sub(skew);
        let wanted = saturating_usize(skew)..saturating_usize(skew).saturating_add(part.len);
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
        let pending = self.disk.read(
            Extent::new(start, len),
            self.pool.acquire(saturating_usize(len)),
            urgency,
        );
        Ok(PendingRead { pending, wanted, chunk_offset: part.chunk_offset })
    }
}

impl InFlightChunk {
    fn is_complete(&self) -> bool {
        self.reads.iter().all(|read| read.pending.is_ready())
    }

    /// Waits for all reads of the chunk.
    fn wait_for_chunk(mut self, pool: &Arc<Pool>) -> Result<Arc<Chunk>> {
        let whole = matches!(
            self.reads.as_slice(),
            [PendingRead { chunk_offset: 0, wanted, .. }] if wanted.len() == self.len
        );
        let chunk = match self.reads.pop() {
            Some(read) if whole => {
                let range = read.wanted.clone();
                let memory = read.wait()?.into_private();
                let (memory, range) = ChunkMemory::from_filled_buffer(memory, range, pool);
                Chunk::new(memory, range)
            }
            last => {
                let mut memory = ChunkMemory::zeros(self.len);
                for read in self.reads.into_iter().chain(last) {
                    let (to, wanted) = (read.chunk_offset, read.wanted.clone());
                    let block = read.wait()?;
                    let into = memory.get_mut(to..to.saturating_add(wanted.len()));
                    block.copy_out(wanted.start, into.unwrap_or_default());
                }
                Chunk::from_memory(memory)
            }
        };
        chunk.set_read_ahead_mark(self.marked);
        Ok(chunk)
    }
}

impl PendingRead {
    fn wait(self) -> Result<Block> {
        match self.pending.wait() {
            Some(Ok(block)) => Ok(block),
            Some(Err(refused)) => Err(Error::Io(refused.error)),
            None => Err(Error::Io(draconis_device::Error::ServiceEnded)),
        }
    }
}

impl std::fmt::Debug for BlockStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("disk_bytes", &self.disk_bytes).finish_non_exhaustive()
    }
}
