//! Bytes from the disk, verified and cached.
//!
//! Law 1: nothing referenced leaves here unless its checksum was right.
//! Law 2: frames that the disk may not show to reads yet are read from memory (`invisible_frames`),
//! which holds them until the disk says that reads see them.
//! Law 3: cached bytes may be stale or rotten: on a wrong checksum the disk is read again.
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use draconis_device::{Disk, Extent, Pending, ReadAnswer, Ticket as DiskTicket, Urgency};
use draconis_types::PrivateBuffer;
use draconis_types::lock::{Mutex, RwLock};
use smallvec::SmallVec;

use crate::block_cache::{BlockCache, PageLookup};
use crate::codec::{Checksummer, slice_at, to_usize_saturating};
use crate::entry::{CHECKSUM_BLOCK_BYTES, PayloadRef};
use crate::frame::SealedFrame;
use crate::index::tree::{BlockPtr, Node, NodeMap, NodeRef, NodeSource};
use crate::superblock::{Geometry, round_down_to_page};
use crate::test_hooks::{InjectedFault, is_fault_injected};
use crate::{Error, Result};

/// Longest read that is cached, in bytes.
const MAX_CACHED_READ_BYTES: u64 = 64 << 10;

/// Largest gap between payloads that are read in one request.
const COALESCE_GAP_BYTES: u64 = 16 << 10;
/// Longest request that reads several payloads.
const MAX_COALESCED_READ_BYTES: u64 = 256 << 10;

/// Longer reads are split into parts of this many bytes, where they may be long.
const READ_PART_BYTES: usize = 4 << 20;

/// Alignment of read-around, in bytes: used while most of the cache is empty.
const READ_AROUND_BYTES: u64 = 128 << 10;

/// Cached payloads that are looked up together, and the size of a processor's cache line.
const LOOKUP_BATCH: usize = 64;
const CACHE_LINE_BYTES: usize = 64;

/// Most singly prefetched nodes that are kept.
const MAX_PREFETCHED_NODES: usize = 4096;

/// Statistics of the caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CacheInfo {
    /// Lookups answered from memory.
    pub hits: u64,
    /// Lookups that needed the disk.
    pub misses: u64,
    /// Memory in use, in bytes.
    pub used_bytes: u64,
}

/// The disk, with its caches.
pub(crate) struct CachedDisk {
    pub disk: Arc<dyn Disk>,
    pub geometry: Geometry,
    pub summer: Checksummer,
    memory: BlockCache,
    invisible_frames: RwLock<BTreeMap<u64, Arc<SealedFrame>>>,
    /// Nodes in frames that were not submitted to the disk yet.
    unsubmitted_nodes: RwLock<HashMap<u64, Arc<Node>>>,
    /// Nodes that were prefetched last: the cache may evict an entry that was never used.
    ahead: RwLock<NodeMap>,
    /// Submitted frames that reads may not see yet, oldest first, and their bytes.
    queue: Mutex<VecDeque<(DiskTicket, Arc<SealedFrame>)>>,
    queued_bytes: AtomicUsize,
    hits: AtomicU64,
    misses: AtomicU64,
}

/// Bytes that may wait to be written before a writer of more waits, too.
const MAX_CACHE_QUEUE_BYTES: usize = 16 << 20;

/// Pages that are being read, in parts.
pub(crate) struct PagesRead {
    parts: Vec<Pending<ReadAnswer>>,
}

impl PagesRead {
    /// Waits for the pages.
    pub fn wait(self) -> Result<PrivateBuffer> {
        let mut blocks = vec![];
        for read in self.parts {
            match read.wait() {
                Some(Ok(block)) => blocks.push(block.into_private()),
                Some(Err(refused)) => return Err(refused.error.into()),
                None => return Err(draconis_device::Error::ServiceEnded.into()),
            }
        }
        if blocks.len() == 1
            && let Some(only) = blocks.pop()
        {
            return Ok(only);
        }
        let mut all = PrivateBuffer::new_uninitialized(blocks.iter().map(|it| it.len()).sum());
        for (into, block) in all.chunks_mut(READ_PART_BYTES).zip(&blocks) {
            into.copy_from_slice(block);
        }
        Ok(all)
    }
}

impl CachedDisk {
    pub fn new(
        disk: Arc<dyn Disk>,
        geometry: Geometry,
        summer: Checksummer,
        cache_bytes: u64,
    ) -> Self {
        Self {
            disk,
            geometry,
            summer,
            memory: BlockCache::new(
                cache_bytes.max(128 << 10),
                u64::from(geometry.page_bytes.max(1024)),
            ),
            invisible_frames: RwLock::default(),
            unsubmitted_nodes: RwLock::default(),
            ahead: RwLock::default(),
            queue: Mutex::default(),
            queued_bytes: AtomicUsize::new(0),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }
    }

    pub fn info(&self) -> CacheInfo {
        CacheInfo {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            used_bytes: self.memory.used_bytes(),
        }
    }

    /// Keeps frames for readers while the disk writes them.
    pub fn cache_invisible_frames(&self, frames: &[Arc<SealedFrame>]) {
        let mut recent = self.invisible_frames.write();
        recent.extend(frames.iter().map(|frame| (frame.at, frame.clone())));
    }

    /// Records that frames were submitted to the disk as `ticket`. Waits only if far more is queued
    /// than [`CachedDisk::throttle`] leaves.
    pub fn track_submitted(&self, ticket: DiskTicket, frames: Vec<Arc<SealedFrame>>) -> Result<()> {
        let mut queue = self.queue.lock();
        let bytes = frames.iter().map(|frame| frame.len).sum();
        self.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        queue.extend(frames.into_iter().map(|frame| (ticket, frame)));
        while self.queued_bytes.load(Ordering::Relaxed) > MAX_CACHE_QUEUE_BYTES * 4
            && let Some((ticket, _)) = queue.front()
        {
            self.disk.wait_visible(*ticket)?;
            self.drop_oldest_frame(&mut queue);
        }
        Ok(())
    }

    /// Waits until few bytes are on their way to the disk. No other caller waits for it.
    pub fn throttle(&self) -> Result<()> {
        while self.queued_bytes.load(Ordering::Relaxed) > MAX_CACHE_QUEUE_BYTES {
            let first = self.queue.lock().front().map(|(ticket, _)| *ticket);
            let Some(ticket) = first else { break };
            self.disk.wait_visible(ticket)?;
            self.mark_visible(ticket);
        }
        Ok(())
    }

    /// Waits until everything up to `ticket` is durable, for as long as the disk is away.
    pub fn wait_durable_without_deadline(&self, ticket: DiskTicket) -> Result<()> {
        loop {
            match self.disk.wait_durable(ticket) {
                Err(draconis_device::Error::Unreachable(_)) => {}
                waited => return Ok(waited?),
            }
        }
    }

    /// Records that reads see everything up to `ticket`, and drops those frames.
    pub fn mark_visible(&self, ticket: DiskTicket) {
        let mut queue = self.queue.lock();
        while queue.front().is_some_and(|(first, _)| *first <= ticket) {
            self.drop_oldest_frame(&mut queue);
        }
    }

    fn drop_oldest_frame(&self, queue: &mut VecDeque<(DiskTicket, Arc<SealedFrame>)>) {
        let Some((_, frame)) = queue.pop_front() else { return };
        self.queued_bytes.fetch_sub(frame.len, Ordering::Relaxed);
        let mut recent = self.invisible_frames.write();
        // Another frame may have its address by now.
        if recent.get(&frame.at).is_some_and(|other| Arc::ptr_eq(other, &frame)) {
            recent.remove(&frame.at);
        }
    }

    /// Drops everything cached of these bytes, because they will be overwritten.
    pub fn invalidate(&self, start: u64, len: u64) {
        for index in self.page_indexes(start, start.saturating_add(len)) {
            self.memory.remove_page(index);
        }
        let mut recent = self.invisible_frames.write();
        let old: Vec<u64> =
            recent.range(start..start.saturating_add(len)).map(|(at, _)| *at).collect();
        old.iter().for_each(|at| drop(recent.remove(at)));
    }

    fn page_bytes(&self) -> u64 {
        u64::from(self.geometry.page_bytes)
    }

    /// Reads whole pages from the disk.
    pub fn read_pages_uncached(&self, at: u64, len: usize) -> Result<PrivateBuffer> {
        match self
            .disk
            .read_now(Extent::new(at, len as u64), PrivateBuffer::new_uninitialized(len).into())
        {
            Ok(block) => Ok(block.into_private()),
            Err(refused) => Err(refused.error.into()),
        }
    }

    /// Reads whole pages without the cache; parts of a long read are in flight together.
    pub fn read_pages_in_parts(&self, at: u64, len: usize) -> Result<PrivateBuffer> {
        if len <= READ_PART_BYTES {
            return self.read_pages_uncached(at, len);
        }
        self.begin_reading_pages(at, len).wait()
    }

    /// Begins to read whole pages without the cache, in parts.
    pub fn begin_reading_pages(&self, at: u64, len: usize) -> PagesRead {
        let parts = (0..len).step_by(READ_PART_BYTES).map(|from| {
            let part = READ_PART_BYTES.min(len.saturating_sub(from));
            let extent = Extent::new(at.saturating_add(from as u64), part as u64);
            let into = PrivateBuffer::new_uninitialized(part).into();
            self.disk.read(extent, into, Urgency::Ahead)
        });
        PagesRead { parts: parts.collect() }
    }

    fn find_invisible_frame(&self, at: u64, len: usize) -> Option<Arc<SealedFrame>> {
        let recent = self.invisible_frames.read();
        let (&start, frame) = recent.range(..=at).next_back()?;
        let end = start.saturating_add(frame.len as u64);
        (at.saturating_add(len as u64) <= end).then(|| frame.clone())
    }

    /// Returns the pages from `first` to `last`, if all of them are cached.
    fn cached_pages(&self, first: u64, last: u64) -> Option<SmallVec<[Arc<[u8]>; 2]>> {
        let mut pages = SmallVec::new();
        for index in first..=last {
            pages.push(self.memory.page(index)?);
        }
        Some(pages)
    }

    /// Reads pages, with their surroundings if `keeps` is set. Returns the start and the bytes.
    fn read_pages(&self, (start, end): (u64, u64), keeps: bool) -> Result<(u64, PrivateBuffer)> {
        let (from, to) = if keeps { self.read_around_range((start, end)) } else { (start, end) };
        match self.read_pages_uncached(from, to_usize_saturating(to.saturating_sub(from))) {
            // The error may be of the surroundings.
            Err(_) if (from, to) != (start, end) => {
                let len = to_usize_saturating(end.saturating_sub(start));
                Ok((start, self.read_pages_uncached(start, len)?))
            }
            read => Ok((from, read?)),
        }
    }

    /// Returns the range to read for these pages: a larger one while the cache is half empty.
    fn read_around_range(&self, (from, to): (u64, u64)) -> (u64, u64) {
        if !self.memory.is_half_empty() {
            return (from, to);
        }
        let (_, end) = self.pages_of(from, to.next_multiple_of(READ_AROUND_BYTES));
        (from.saturating_sub(from % READ_AROUND_BYTES), end.max(to))
    }

    /// Passes bytes of the disk to `take` in one slice; `take` verifies them. Their pages may be
    /// cached.
    fn with_bytes<T>(
        &self,
        at: u64,
        len: usize,
        keeps: bool,
        mut take: impl FnMut(&[u8]) -> Result<T>,
    ) -> Result<T> {
        if !self.geometry.contains(at, len as u64) {
            return Err(Error::Corrupt {
                what: "an address outside of all segments",
                at_bytes: at,
            });
        }
        if let Some(frame) = self.find_invisible_frame(at, len)
            && let Some(bytes) = slice_at(frame.bytes(), frame.at, at, len)
        {
            return take(bytes);
        }
        let gone = Error::Corrupt { what: "an address behind the end", at_bytes: at };
        let (start, end) = self.pages_of(at, at.saturating_add(len.max(1) as u64));
        let pages = self.page_indexes(start, end);
        let is_short = len as u64 <= MAX_CACHED_READ_BYTES;
        if is_short
            && let Some(remembered) = self.cached_pages(pages.start, pages.end.saturating_sub(1))
        {
            let many;
            let bytes = match &remembered[..] {
                [one] => &one[..],
                all => {
                    many = all.concat();
                    &many
                }
            };
            match slice_at(bytes, start, at, len).map(&mut take) {
                None | Some(Err(Error::Corrupt { .. })) => {
                    pages.for_each(|index| self.memory.remove_page(index));
                }
                Some(taken) => {
                    self.hits.fetch_add(1, Ordering::Relaxed);
                    return taken;
                }
            }
        }
        self.misses.fetch_add(1, Ordering::Relaxed);
        let keeps = keeps && is_short;
        let (began, bytes) = self.read_pages((start, end), keeps)?;
        let taken = take(slice_at(&bytes, began, at, len).ok_or(gone)?)?;
        if keeps {
            self.cache_pages(began, &bytes, (began, began.saturating_add(bytes.len() as u64)));
        }
        Ok(taken)
    }

    /// Verifies the checksum blocks of a payload.
    pub fn verify_payload(&self, data: &PayloadRef, stored: &[u8]) -> Result<()> {
        let mut at = data.at;
        for (piece, &sum) in stored.chunks(CHECKSUM_BLOCK_BYTES as usize).zip(&data.sums) {
            if self.summer.checksum(at, piece) != sum
                && !is_fault_injected(InjectedFault::PayloadSum)
            {
                return Err(Error::Corrupt { what: "a payload's sum", at_bytes: at });
            }
            at = at.saturating_add(CHECKSUM_BLOCK_BYTES.into());
        }
        Ok(())
    }

    /// Copies the referenced part of a payload.
    pub fn read_data(&self, data: &PayloadRef, into: &mut [u8]) -> Result<()> {
        if data.stored == 0 {
            return Ok(());
        }
        self.with_bytes(data.at, data.stored as usize, true, |stored| {
            self.verify_payload(data, stored)?;
            into.copy_from_slice(data.referenced_bytes(stored));
            Ok(())
        })
    }

    /// Returns the referenced part of a payload, if it is cached and right. The checksum includes
    /// the address, so stale bytes of that address do not pass.
    pub fn cached_value(&self, data: &PayloadRef) -> Option<Vec<u8>> {
        self.value_from_pages(&self.memory, data)
    }

    /// Looks up several cached payloads and touches all of them first, so that the processor
    /// overlaps their cache misses.
    pub fn cached_values(&self, all: &[&PayloadRef]) -> Vec<Option<Vec<u8>>> {
        let mut values = Vec::with_capacity(all.len());
        for some in all.chunks(LOOKUP_BATCH) {
            match self.memory.lock_page_index() {
                Some(held) => {
                    let stored = |data: &&PayloadRef| {
                        let (index, from) = self.locate_in_page(data.at);
                        let held = held.page(index)?;
                        held.get(from..from.saturating_add(data.stored as usize).min(held.len()))
                    };
                    let stored: SmallVec<[&[u8]; LOOKUP_BATCH]> =
                        some.iter().filter_map(stored).collect();
                    let lines =
                        stored.iter().flat_map(|stored| stored.iter().step_by(CACHE_LINE_BYTES));
                    std::hint::black_box(lines.fold(0, |all, byte| all ^ byte));
                    values.extend(some.iter().map(|data| self.value_from_pages(&held, data)));
                }
                None => values.extend(some.iter().map(|data| self.cached_value(data))),
            }
        }
        values
    }

    fn value_from_pages(&self, pages: &impl PageLookup, data: &PayloadRef) -> Option<Vec<u8>> {
        if data.stored == 0 {
            return Some(vec![]);
        }
        if u64::from(data.stored) > MAX_CACHED_READ_BYTES {
            return None;
        }
        let (page, len) = (self.geometry.page_bytes as usize, data.stored as usize);
        let (index, from) = self.locate_in_page(data.at);
        let part = |stored: &[u8]| {
            self.verify_payload(data, stored).ok()?;
            Some(data.referenced_bytes(stored).to_vec())
        };
        let end = from.saturating_add(len);
        let value = if end <= page {
            pages.with_page(index, |held| part(held.get(from..end)?))??
        } else {
            let mut stored = Vec::with_capacity(len);
            let mut places = (index..).zip(std::iter::once(from).chain(std::iter::repeat(0)));
            while stored.len() < len {
                let (index, from) = places.next()?;
                let lacks = len.saturating_sub(stored.len());
                let rest = |held: &[u8]| {
                    let rest = held.get(from..)?;
                    Some(rest.get(..lacks).unwrap_or(rest).to_vec())
                };
                stored.extend(pages.with_page(index, rest)??);
            }
            part(&stored)?
        };
        self.hits.fetch_add(1, Ordering::Relaxed);
        Some(value)
    }

    /// Returns the referenced part of a payload.
    pub fn read_value(&self, data: &PayloadRef) -> Result<Vec<u8>> {
        if data.stored == 0 {
            return Ok(vec![]);
        }
        self.with_bytes(data.at, data.stored as usize, true, |stored| {
            self.verify_payload(data, stored)?;
            Ok(data.referenced_bytes(stored).to_vec())
        })
    }

    /// Reads the uncached payloads together; neighbours share a request. `None`: the payload is
    /// cached, or could not be read.
    pub fn read_uncached_values(&self, all: &[&PayloadRef]) -> Vec<Option<Vec<u8>>> {
        let mut values = vec![None; all.len()];
        let far = all.iter().enumerate().filter(|(_, data)| !self.is_cached(data));
        let places: Vec<_> = far.map(|(nth, data)| (nth, data.at, data.end())).collect();
        if places.len() < 2 {
            return values;
        }
        for (from, bytes, members) in self.read_coalesced(places, COALESCE_GAP_BYTES) {
            let is_roomy = self.memory.is_half_empty();
            for nth in members {
                let (Some(data), Some(value)) = (all.get(nth), values.get_mut(nth)) else {
                    continue;
                };
                let stored = slice_at(&bytes, from, data.at, data.stored as usize);
                let Some(stored) = stored else { continue };
                if self.verify_payload(data, stored).is_err() {
                    continue;
                }
                *value = Some(data.referenced_bytes(stored).to_vec());
                if !is_roomy && u64::from(data.stored) <= MAX_CACHED_READ_BYTES {
                    self.cache_pages(from, &bytes, self.pages_of(data.at, data.end()));
                }
            }
            if is_roomy {
                self.cache_pages(from, &bytes, (from, from.saturating_add(bytes.len() as u64)));
            }
        }
        values
    }

    /// Prefetches nodes that the index will need, together.
    pub fn prefetch_nodes(&self, ptrs: &[BlockPtr]) {
        *self.ahead.write() = self.read_nodes(ptrs);
    }

    /// Prefetches nodes in addition to those prefetched last.
    pub fn prefetch_more_nodes(&self, ptrs: &[BlockPtr]) {
        let more = self.read_nodes(ptrs);
        let mut ahead = self.ahead.write();
        if ahead.len() >= MAX_PREFETCHED_NODES {
            ahead.clear();
        }
        ahead.extend(more);
    }

    /// Reads nodes from the disk, by their checksums. Unreadable ones are left out.
    fn read_nodes(&self, ptrs: &[BlockPtr]) -> NodeMap {
        let mut loaded = NodeMap::new();
        let places = ptrs.iter().enumerate();
        let places =
            places.map(|(nth, ptr)| (nth, ptr.at, ptr.at.saturating_add(u64::from(ptr.len))));
        for (from, bytes, members) in self.read_coalesced(places.collect(), 0) {
            for ptr in members.into_iter().filter_map(|nth| ptrs.get(nth)) {
                let node = slice_at(&bytes, from, ptr.at, ptr.len as usize)
                    .filter(|bytes| self.summer.checksum(ptr.at, bytes) == ptr.sum)
                    .and_then(|bytes| Node::decode(bytes, ptr.at).ok());
                if let Some(node) = node {
                    loaded.insert(ptr.sum, Arc::new(node));
                }
            }
        }
        loaded
    }

    /// Returns the page range of bytes from `at` to `end`.
    pub fn pages_of(&self, at: u64, end: u64) -> (u64, u64) {
        let sector_bytes = self.disk.properties().sector_bytes;
        let limit = round_down_to_page(self.geometry.disk_bytes, sector_bytes);
        let end = end.checked_next_multiple_of(self.page_bytes()).unwrap_or(limit);
        (round_down_to_page(at, self.geometry.page_bytes), end.min(limit))
    }

    /// Returns the indexes of the pages that hold the bytes from `from` to `to`.
    #[allow(clippy::arithmetic_side_effects, reason = "the superblock's page size is not 0")]
    fn page_indexes(&self, from: u64, to: u64) -> Range<u64> {
        from / self.page_bytes()..to.div_ceil(self.page_bytes())
    }

    /// Returns the index of the page of a byte, and the byte's offset in it.
    #[allow(clippy::arithmetic_side_effects, reason = "the superblock's page size is not 0")]
    fn locate_in_page(&self, at: u64) -> (u64, usize) {
        (at / self.page_bytes(), to_usize_saturating(at % self.page_bytes()))
    }

    /// Reads numbered ranges at once, in one request if they have gaps of at most `gap` bytes.
    /// Yields the start of each request, its bytes, and the numbers of the ranges in it.
    fn read_coalesced(
        &self,
        mut places: Vec<(usize, u64, u64)>,
        gap: u64,
    ) -> impl Iterator<Item = (u64, PrivateBuffer, Vec<usize>)> {
        places.sort_unstable_by_key(|&(_, at, _)| at);
        let mut runs: Vec<(u64, u64, Vec<usize>)> = vec![];
        for (nth, at, behind) in places {
            let (start, end) = match gap {
                0 => self.pages_of(at, behind),
                _ => self.read_around_range(self.pages_of(at, behind)),
            };
            let len = behind.saturating_sub(at);
            // A longer or invalid range is left to a read of its own.
            if start >= end || len > MAX_COALESCED_READ_BYTES || !self.geometry.contains(at, len) {
                continue;
            }
            match runs.last_mut() {
                Some((from, to, members))
                    if start <= to.saturating_add(gap)
                        && end.max(*to).saturating_sub(*from) <= MAX_COALESCED_READ_BYTES =>
                {
                    *to = end.max(*to);
                    members.push(nth);
                }
                _ => runs.push((start, end, vec![nth])),
            }
        }
        let reads: Vec<_> = runs
            .into_iter()
            .map(|(from, to, members)| {
                self.misses.fetch_add(1, Ordering::Relaxed);
                let extent = Extent::new(from, to.saturating_sub(from));
                let len = to_usize_saturating(extent.len_bytes);
                let into = PrivateBuffer::new_uninitialized(len).into();
                (from, members, self.disk.read(extent, into, Urgency::Ahead))
            })
            .collect();
        reads.into_iter().filter_map(|(from, members, read)| match read.wait() {
            Some(Ok(block)) => Some((from, block.into_private(), members)),
            _ => None,
        })
    }

    /// Returns true if a payload can be read without the disk.
    fn is_cached(&self, data: &PayloadRef) -> bool {
        let mut pages = self.page_indexes(data.at, data.end().max(1));
        !self.geometry.contains(data.at, u64::from(data.stored))
            || pages.all(|index| self.memory.has_page(index))
            || self.find_invisible_frame(data.at, data.stored as usize).is_some()
    }

    /// Caches the pages from `from` to `to` of bytes read at `at`; a part of them was verified.
    fn cache_pages(&self, at: u64, bytes: &[u8], (from, to): (u64, u64)) {
        for index in self.page_indexes(from, to) {
            let start = index.saturating_mul(self.page_bytes()).saturating_sub(at);
            let Some(behind) = bytes.get(to_usize_saturating(start)..) else { continue };
            let page = behind.get(..self.geometry.page_bytes as usize).unwrap_or(behind);
            if !self.memory.has_page(index) {
                self.memory.insert_page(index, Arc::from(page));
            }
        }
    }

    /// Returns the bytes that a pointer refers to.
    pub fn read_block(&self, ptr: BlockPtr) -> Result<Vec<u8>> {
        self.read_block_and_neighbours(ptr, false)
    }

    fn read_block_and_neighbours(&self, ptr: BlockPtr, keeps: bool) -> Result<Vec<u8>> {
        self.with_bytes(ptr.at, ptr.len as usize, keeps, |bytes| {
            if self.summer.checksum(ptr.at, bytes) != ptr.sum
                && !is_fault_injected(InjectedFault::NodeSum)
            {
                return Err(Error::Corrupt { what: "a node's sum", at_bytes: ptr.at });
            }
            Ok(bytes.to_vec())
        })
    }

    /// Caches a node that was just made.
    pub fn cache_node(&self, ptr: BlockPtr, node: Arc<Node>) {
        self.unsubmitted_nodes.write().insert(ptr.sum, node.clone());
        self.memory.insert_node(ptr, node);
    }

    /// Evicts a node that only snapshots refer to.
    pub fn forget_node(&self, ptr: BlockPtr) {
        self.memory.remove_node(ptr);
    }

    /// Returns a node that is in memory, and marks it as used.
    fn cached_node(&self, ptr: BlockPtr) -> Option<Arc<Node>> {
        if let Some(node) = self.memory.node(ptr) {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return Some(node);
        }
        if let Some(node) = self.unsubmitted_nodes.read().get(&ptr.sum) {
            return Some(node.clone());
        }
        let node = self.ahead.read().get(&ptr.sum)?.clone();
        self.memory.insert_node(ptr, node.clone());
        Some(node)
    }

    /// Returns a node by its weak reference while the cache does not evict, or loads it.
    fn node_via_ref(
        &self,
        ptr: BlockPtr,
        seen: &NodeRef,
        load: impl FnOnce() -> Result<Arc<Node>>,
    ) -> Result<Arc<Node>> {
        if let Some(node) = seen.upgrade(ptr).filter(|_| self.memory.is_below_eviction()) {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(node);
        }
        let node = load()?;
        if self.memory.is_below_eviction() {
            seen.set_node(ptr, &node);
        }
        Ok(node)
    }

    /// Returns true if a node is in memory.
    pub fn has_node(&self, ptr: BlockPtr) -> bool {
        self.memory.node(ptr).is_some()
            || self.unsubmitted_nodes.read().contains_key(&ptr.sum)
            || self.ahead.read().contains_key(&ptr.sum)
    }

    /// Drops the unsubmitted nodes: their frames are readable now.
    pub fn clear_unsubmitted_nodes(&self) {
        let mut fresh = self.unsubmitted_nodes.write();
        if !fresh.is_empty() {
            fresh.clear();
        }
    }
}

/// Source of nodes in memory only: it reads no others, and records the first that is missing.
pub(crate) struct CachedNodes<'a> {
    io: &'a CachedDisk,
    /// Nodes that an earlier attempt read.
    read: Option<&'a NodeMap>,
    missing: Cell<Option<BlockPtr>>,
}

impl<'a> CachedNodes<'a> {
    pub fn new(io: &'a CachedDisk) -> Self {
        Self { io, read: None, missing: Cell::new(None) }
    }

    /// The same, with nodes that an earlier attempt read.
    pub fn with_loaded(io: &'a CachedDisk, read: &'a NodeMap) -> Self {
        Self { read: Some(read), ..Self::new(io) }
    }

    /// Returns the first requested node that is not in memory.
    pub fn missing_node(&self) -> Option<BlockPtr> {
        self.missing.get()
    }
}

impl NodeSource for CachedNodes<'_> {
    fn load(&self, ptr: BlockPtr) -> Result<Arc<Node>> {
        if let Some(node) = self.read.and_then(|read| read.get(&ptr.sum)) {
            return Ok(node.clone());
        }
        self.io.cached_node(ptr).ok_or_else(|| {
            self.missing.set(self.missing.get().or(Some(ptr)));
            Error::Misuse("a node that is not in memory")
        })
    }

    fn load_via_ref(&self, ptr: BlockPtr, seen: &NodeRef) -> Result<Arc<Node>> {
        self.io.node_via_ref(ptr, seen, || self.load(ptr))
    }
}

impl NodeSource for CachedDisk {
    fn prefetch(&self, ptrs: &[BlockPtr]) -> NodeMap {
        let is_far = |ptr: &BlockPtr| !self.has_node(*ptr);
        if !ptrs.first().is_some_and(is_far) {
            return NodeMap::new();
        }
        let far: Vec<BlockPtr> = ptrs.iter().filter(|ptr| is_far(ptr)).copied().collect();
        let loaded = self.read_nodes(&far);
        for ptr in far {
            if let Some(node) = loaded.get(&ptr.sum) {
                self.memory.insert_node(ptr, node.clone());
            }
        }
        loaded
    }

    fn load(&self, ptr: BlockPtr) -> Result<Arc<Node>> {
        if let Some(node) = self.cached_node(ptr) {
            return Ok(node);
        }
        // The decoded node is cached; its pages only while the cache is half empty.
        let bytes = self.read_block_and_neighbours(ptr, self.memory.is_half_empty())?;
        let node = Arc::new(Node::decode(&bytes, ptr.at)?);
        self.memory.insert_node(ptr, node.clone());
        Ok(node)
    }

    fn load_via_ref(&self, ptr: BlockPtr, seen: &NodeRef) -> Result<Arc<Node>> {
        self.node_via_ref(ptr, seen, || self.load(ptr))
    }
}
