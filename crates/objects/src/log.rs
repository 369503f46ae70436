//! The write path: frames of streams, and commits of frames to the disk.
//!
//! ```text
//!   payload, entry, node ─▶ the open frame of a stream ─ full ─▶ done
//!                                     │ a waiter, or much came together
//!                                     ▼
//!                          commit: all its frames to the disk at once
//! ```
//!
//! Law 1: everything written between two commits has one number, and is valid only if all frames of
//! the commit are there.
//! Law 2: written bytes are live in the segment table until they are marked dead, once.
//! Law 3: the log knows no index: its callers set the entries that refer to written bytes.

pub(crate) mod commit;
mod stream;

use std::sync::Arc;

use self::commit::{OpenCommit, SubmittedCommits, WriteAmplification};
pub(crate) use self::stream::{Stream, StreamPosition};
use crate::Result;
use crate::cached_disk::CachedDisk;
use crate::codec::to_u32_saturating;
use crate::entry::{CHECKSUM_BLOCK_BYTES, Entry, Key, MAX_PAYLOAD_BYTES, PayloadRef};
use crate::frame::summary::FrameSummary;
use crate::index::tree::{BlockPtr, Node, NodeSource, NodeStore};
use crate::layout::{Layout, PayloadKind};
use crate::segment_table::SegmentTable;
use crate::test_hooks::commit_bytes;

/// Commits shorter than this are a trickle.
const MAX_TRICKLE_COMMIT_BYTES: usize = 32 << 10;

/// Writer of a store.
pub(crate) struct LogWriter {
    pub io: Arc<CachedDisk>,
    pub layout: Box<dyn Layout>,
    pub segments: SegmentTable,
    pub streams: Vec<Stream>,
    pub batch: OpenCommit,
    pub sent: SubmittedCommits,
    pub spent: WriteAmplification,
    /// Identity of the store and of this opening, in each frame.
    pub tag: u32,
    pub incarnation: u64,
    /// Moving average of a commit's bytes.
    pub usual_bytes: usize,
    /// Bytes of log since the last checkpoint began.
    pub bytes: u64,
    /// Payload of all groups so far, in bytes: the clock of payload ages.
    pub clock: u64,
    pub counters: Counters,
}

/// Counters since the store was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Groups accepted.
    pub groups: u64,
    /// Payload of groups, in bytes.
    pub payload_bytes: u64,
    /// Payload that the cleaner moved, in bytes.
    pub moved_bytes: u64,
    /// Nodes, runs and checkpoints, in bytes.
    pub index_bytes: u64,
    /// Bytes submitted to the disk.
    pub written_bytes: u64,
    /// Commits submitted to the disk.
    pub commits: u64,
    /// Checkpoints written.
    pub checkpoints: u64,
    /// Segments cleaned.
    pub cleaned: u64,
}

impl LogWriter {
    /// Creates the writer of a new or existing store.
    pub fn new(io: Arc<CachedDisk>, layout: Box<dyn Layout>, tag: u32) -> Self {
        Self {
            segments: SegmentTable::new(io.geometry),
            io,
            layout,
            streams: vec![],
            batch: OpenCommit::with_seq(1),
            sent: SubmittedCommits::default(),
            spent: WriteAmplification::default(),
            tag,
            incarnation: 0,
            usual_bytes: 0,
            bytes: 0,
            clock: 0,
            counters: Counters::default(),
        }
    }

    /// Returns true if the open commit is empty.
    pub fn is_batch_empty(&self) -> bool {
        self.batch.bytes == 0
    }

    /// Returns the number of the newest commit that is not empty: of the open one, or the last.
    pub fn newest_commit(&self) -> u64 {
        self.batch.seq.saturating_sub(u64::from(self.is_batch_empty()))
    }

    /// Returns the bytes at which a commit without a waiter is submitted.
    pub fn commit_limit(&self) -> usize {
        commit_bytes().min(self.layout.commit_bytes())
    }

    /// Returns the longest payload of one entry.
    pub fn payload_max(&self) -> usize {
        const BLOCK_BYTES: usize = CHECKSUM_BLOCK_BYTES as usize;
        let quarter = self.segments.geometry.segment_bytes as usize / 4;
        MAX_PAYLOAD_BYTES.min(quarter.saturating_sub(quarter % BLOCK_BYTES)).max(BLOCK_BYTES / 4)
    }

    /// Returns all bytes submitted to the disk, and those of the open commit.
    pub fn written_bytes(&self) -> u64 {
        let open = (self.batch.bytes as u64).saturating_sub(self.batch.early_bytes);
        self.counters.written_bytes.saturating_add(open)
    }

    /// The same without nodes, runs and checkpoints.
    pub fn logged_bytes(&self) -> u64 {
        self.written_bytes().saturating_sub(self.counters.index_bytes)
    }

    /// Appends a payload and its entry, which is returned, to the commit. `stamp` is the clock of
    /// its first write.
    pub fn append_payload(
        &mut self,
        key: &Key,
        payload: &[u8],
        kind: PayloadKind,
        stamp: Option<u64>,
    ) -> Result<Entry> {
        let align = self.alignment();
        let stream = self.stream_of(kind);
        let order = self.batch.next_order();
        let summer = self.io.summer;
        let line = FrameSummary::max_pair_bytes(key.len(), payload.len());
        let frame = self.frame_for(stream, payload.len(), line)?;
        let at = frame.append_payload(payload, align);
        let sums = (at..)
            .step_by(CHECKSUM_BLOCK_BYTES as usize)
            .zip(payload.chunks(CHECKSUM_BLOCK_BYTES as usize))
            .map(|(at, piece)| summer.checksum(at, piece))
            .collect();
        let len = to_u32_saturating(payload.len() as u64);
        let entry = Entry::Data(PayloadRef { at, stored: len, skip: 0, len, sums });
        frame.add_pair(order, key, &entry);
        self.batch.add_bytes(payload.len().saturating_add(line));
        if stamp.is_none() {
            self.clock = self.clock.saturating_add(u64::from(len));
        }
        self.segments.add_live(at, len, stamp.unwrap_or(self.clock), true);
        self.submit_early_frames()?;
        Ok(entry)
    }

    /// Appends an entry without a payload to the commit.
    pub fn append_entry(&mut self, key: &Key, entry: &Entry) -> Result<()> {
        let order = self.batch.next_order();
        let line = FrameSummary::max_pair_bytes(key.len(), 0);
        self.frame_for(0, 0, line)?.add_pair(order, key, entry);
        self.batch.add_bytes(line);
        Ok(())
    }

    /// Stores a block outside of the log: a node, or a short-lived chunk.
    pub fn append_block(&mut self, bytes: &[u8], is_node: bool) -> Result<BlockPtr> {
        self.append_block_to_stream(
            if is_node { PayloadKind::Node } else { PayloadKind::ShortLived },
            bytes,
            is_node,
        )
    }

    /// Stores a block in the stream of `kind`.
    pub fn append_block_to_stream(
        &mut self,
        kind: PayloadKind,
        bytes: &[u8],
        is_node: bool,
    ) -> Result<BlockPtr> {
        let align = self.alignment();
        let stream = self.stream_of(kind);
        let frame = self.frame_for(stream, bytes.len(), FrameSummary::max_pair_bytes(0, 0))?;
        let at = frame.append_payload(bytes, align);
        let len = to_u32_saturating(bytes.len() as u64);
        frame.add_block(is_node, at, len);
        self.batch.add_bytes(bytes.len().saturating_add(16));
        self.segments.add_live(at, len, self.clock, false);
        self.counters.index_bytes = self.counters.index_bytes.saturating_add(u64::from(len));
        self.submit_early_frames()?;
        Ok(BlockPtr { at, len, sum: self.io.summer.checksum(at, bytes) })
    }

    /// Marks stored blocks as dead.
    pub fn mark_blocks_dead(&mut self, ptrs: impl IntoIterator<Item = BlockPtr>) {
        for ptr in ptrs {
            self.segments.sub_live(ptr.at, ptr.len, false);
        }
    }

    /// Stores bytes in chunks of the layout's length.
    pub fn append_chunks(&mut self, bytes: &[u8]) -> Result<Vec<BlockPtr>> {
        bytes.chunks(self.layout.chunk_bytes()).map(|part| self.append_block(part, false)).collect()
    }

    fn stream_of(&self, kind: PayloadKind) -> usize {
        let stream = self.layout.stream_of(kind, self.usual_bytes < MAX_TRICKLE_COMMIT_BYTES);
        // Layouts of other crates were checked for samples only.
        stream.min(self.streams.len().saturating_sub(1))
    }

    /// Returns the alignment of payloads that are at least as long.
    fn alignment(&self) -> usize {
        if self.layout.is_page_aligned() { self.segments.geometry.page_bytes as usize } else { 1 }
    }
}

impl NodeSource for LogWriter {
    fn load(&self, ptr: BlockPtr) -> Result<Arc<Node>> {
        self.io.load(ptr)
    }
}

impl NodeStore for LogWriter {
    fn write(&mut self, bytes: Vec<u8>) -> Result<BlockPtr> {
        let ptr = self.append_block(&bytes, true)?;
        self.io.cache_node(ptr, Arc::new(Node::decode(&bytes, ptr.at)?));
        Ok(ptr)
    }

    fn mark_dead(&mut self, ptr: BlockPtr) {
        // A snapshot that still needs it reads it again.
        self.io.forget_node(ptr);
        self.segments.sub_live(ptr.at, ptr.len, false);
    }

    fn node_bytes(&self) -> usize {
        self.layout.node_bytes()
    }
}
