//! Checkpoints: the state that recovery begins from.
//!
//! ```text
//!   superblock ─▶ blob, twice ─▶ tree's root · runs · image · table of segments · where streams stood
//! ```
//!
//! A checkpoint seals the active memtable. Changes account the entries it hides, a few pairs each.
//! Then the memtable is written as a sorted *run*, with all changed inner nodes. The disk orders
//! the writes: frames, then two superblocks, then the other two.
//!
//! Law 1: the *image* is a log in another form: not accounted, written when a store is opened after
//! a crash, and replayed before the log after it.
//! Law 2: the segment table counts exactly the bytes that this checkpoint refers to, because a
//! store opened from it knows no others.
//! Law 3: segments that a checkpoint frees are reusable once it is durable and no reader uses their
//! old contents.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use draconis_device::{Extent, Group as DiskGroup, Ticket as DiskTicket};

use crate::checkpoint_record::CheckpointRecord;
use crate::core::Core;
use crate::index::memtable::ImmutableMemtable;
use crate::index::tree::BlockPtr;
use crate::index::view::ReaderPin;
use crate::layout::PayloadKind;
use crate::levels::flush::PREFETCHED_PAIRS;
use crate::levels::run::ChunkWriter;
use crate::log::{LogWriter, StreamPosition};
use crate::required_io::{MaintenanceStep, MissPolicy, RequiredIo};
use crate::superblock::Superblock;
use crate::test_hooks::{InjectedFault, is_fault_injected};
use crate::{Error, Result};

/// Superblock and checkpoint on the disk, and segments that wait for them.
pub(crate) struct Checkpoints {
    pub superblock: Superblock,
    /// The newest one, while it may not be durable.
    pub written: Option<SubmittedCheckpoint>,
    /// Its blocks.
    pub ptrs: Vec<BlockPtr>,
    /// Segments that earlier readers still pin; oldest first.
    pub pinned_segments: VecDeque<(Arc<ReaderPin>, Vec<u32>)>,
    /// True if the next superblock is the first of another length.
    pub is_resized: bool,
}

/// A submitted checkpoint, durable or not.
#[derive(Debug)]
pub(crate) struct SubmittedCheckpoint {
    ticket: DiskTicket,
    pub emptied: Vec<u32>,
    /// Segments that were cleaned before it began.
    pub cleaned: HashSet<u32>,
    /// Bytes submitted to the disk before it.
    written_bytes: u64,
}

impl Checkpoints {
    /// Creates the state of a store with this superblock.
    pub fn new(superblock: Superblock) -> Self {
        let pinned_segments = VecDeque::new();
        Self { superblock, written: None, ptrs: vec![], pinned_segments, is_resized: false }
    }

    /// Writes all copies of the superblock after all earlier writes.
    pub fn write_superblock(&mut self, log: &mut LogWriter) -> Result<DiskTicket> {
        self.superblock.generation = self.superblock.generation.saturating_add(1);
        // The new end of the store has no superblock yet: until it has, the old ones count.
        self.write_superblock_copies(log, if self.is_resized { [1, 0] } else { [0, 1] })
    }

    /// Writes all copies of the current superblock, the second of `pairs` after the first.
    pub fn write_superblock_copies(
        &self,
        log: &mut LogWriter,
        pairs: [usize; 2],
    ) -> Result<DiskTicket> {
        let chain = pairs.map(|pair| DiskGroup { writes: self.superblock.copy_writes(pair) });
        let is_ordered = !is_fault_injected(InjectedFault::SuperblockAfterFrames);
        let after: Vec<DiskTicket> = log.sent.last.into_iter().filter(|_| is_ordered).collect();
        let disk = &log.io.disk;
        let tickets = disk
            .submit_chain(chain.into(), &after)
            .map_err(|refused| Error::Device(refused.error))?;
        // A flush makes the first pair durable before the second is written.
        let ticket = *tickets.last().ok_or(Error::Device(draconis_device::Error::ServiceEnded))?;
        log.sent.last = Some(ticket);
        Ok(ticket)
    }
}

impl Core {
    /// Seals the active memtable. Later changes account it.
    pub fn begin_checkpoint(&mut self) -> Result<MaintenanceStep> {
        self.finish_flush()?;
        self.log.commit()?;
        self.levels.begin_memtable_flush(&mut self.log);
        self.log.segments.begin_checkpoint();
        self.cleaner.before.extend(self.cleaner.since.drain());
        self.log.bytes = 0;
        Ok(MaintenanceStep::Continue(0))
    }

    /// Accounts all pairs and writes the checkpoint in progress, if there is one.
    pub fn finish_flush(&mut self) -> Result<()> {
        while self.levels.flush.is_some() {
            let _ = self.flush_step(PREFETCHED_PAIRS, MissPolicy::Block)?;
        }
        Ok(())
    }

    /// Accounts so many pairs, and writes the checkpoint once all are accounted.
    pub fn flush_step(&mut self, pairs: usize, patience: MissPolicy) -> Result<MaintenanceStep> {
        let step = self.levels.account_dead(&mut self.log, pairs, patience)?;
        let Some(counting) = &mut self.levels.flush else { return Ok(step) };
        if let MaintenanceStep::Continue(pairs) = step {
            counting.debt.subtract_done(pairs);
        }
        counting.is_ready_to_finish = counting.is_done() && step.is_continue();
        if counting.is_ready_to_finish { self.finish_checkpoint(patience) } else { Ok(step) }
    }

    /// Writes the rest of the run, and the checkpoint record.
    pub fn finish_checkpoint(&mut self, patience: MissPolicy) -> Result<MaintenanceStep> {
        if let Some(need) = self.complete_checkpoint(patience)? {
            return Ok(MaintenanceStep::Break(need));
        }
        if let Some((seq, places)) = self.levels.finish_memtable_flush(&mut self.log)? {
            self.write_checkpoint(seq, places, vec![])?;
            self.levels.schedule_merges(&self.log);
            self.levels.publish_view();
        }
        Ok(MaintenanceStep::Continue(0))
    }

    /// Writes the replayed log as an image, without accounting it.
    pub fn write_replayed_image(&mut self) -> Result<()> {
        self.log.segments.begin_checkpoint();
        let places = self.log.positions();
        let seq = self.log.newest_commit();
        let pairs = self.levels.active.map.iter().map(|(key, entry)| (key.clone(), entry.clone()));
        let layer = ImmutableMemtable::new(pairs.collect(), 0);
        let mut chunks = ChunkWriter::default();
        chunks.encode_new_pairs(&mut self.log, &layer.pairs)?;
        let image = chunks.finish(&mut self.log)?;
        self.write_checkpoint(seq, places, image)?;
        self.log.bytes = 0;
        self.complete_checkpoint(MissPolicy::Block).map(drop)
    }

    fn write_checkpoint(
        &mut self,
        seq: u64,
        places: Vec<StreamPosition>,
        image: Vec<BlockPtr>,
    ) -> Result<()> {
        let (log, levels) = (&mut self.log, &mut self.levels);
        let root = levels.tree.write_changed(log)?;
        log.mark_blocks_dead(std::mem::take(&mut self.checkpoints.ptrs));
        let emptied = log.segments.mark_emptied(seq);
        // A later checkpoint will refer to a run that compaction is still writing.
        let folding = levels.compaction.iter().filter_map(|folding| folding.chunks.as_ref());
        let unled: Vec<BlockPtr> =
            folding.flat_map(|chunks| chunks.stored.iter().copied()).collect();
        let table = log.segments.encode(&unled);
        let table = log.append_chunks(&table)?;
        let blob = CheckpointRecord {
            seq,
            own_seq: log.batch.seq,
            clock: log.clock,
            next_id: self.next_id,
            links: self.value_objects,
            root,
            runs: levels.runs.iter().map(|run| run.chunks.clone()).collect(),
            replayed_log: image.clone(),
            places,
            table: table.clone(),
        };
        let bytes = blob.encode();
        // In a commit of its own number: `own_seq` is the open one.
        let checkpoint = log.append_block(&bytes, false)?;
        // Everything depends on it, so there are two copies, in two streams if there are two.
        let copy = log.append_block_to_stream(PayloadKind::Node, &bytes, false)?;
        log.commit()?;
        let superblock = &mut self.checkpoints.superblock;
        (superblock.checkpoint, superblock.checkpoint_copy) = (checkpoint, Some(copy));
        let ticket = self.checkpoints.write_superblock(log)?;
        log.sent.barrier = log.sent.barrier.max(blob.own_seq);
        self.checkpoints.ptrs = [table, vec![checkpoint, copy], image].concat();
        let written_bytes = log.counters.written_bytes;
        let cleaned = std::mem::take(&mut self.cleaner.before);
        self.checkpoints.written =
            Some(SubmittedCheckpoint { ticket, emptied, cleaned, written_bytes });
        log.counters.checkpoints = log.counters.checkpoints.saturating_add(1);
        Ok(())
    }

    /// Frees the segments that the last checkpoint does not need, once it is durable.
    pub fn complete_checkpoint(&mut self, patience: MissPolicy) -> Result<Option<RequiredIo>> {
        let Some(written) = &self.checkpoints.written else {
            self.release();
            return Ok(None);
        };
        if !is_fault_injected(InjectedFault::FreeAfterCheckpoint) {
            let is_durable = self.log.sent.durable_ticket >= Some(written.ticket);
            match patience {
                _ if is_durable => {}
                MissPolicy::Defer => return Ok(Some(RequiredIo::Durable(written.ticket))),
                MissPolicy::Block => self.log.io.wait_durable_without_deadline(written.ticket)?,
            }
        }
        if let Some(written) = self.checkpoints.written.take() {
            let old = self.levels.replace_reader_pin();
            self.checkpoints.pinned_segments.push_back((old, written.emptied));
        }
        self.release();
        Ok(None)
    }

    /// Frees segments without readers.
    pub fn release(&mut self) {
        while let Some((token, _)) = self.checkpoints.pinned_segments.front()
            && Arc::strong_count(token) == 1
        {
            let Some((_, emptied)) = self.checkpoints.pinned_segments.pop_front() else { break };
            let log = &mut self.log;
            let geometry = log.segments.geometry;
            let len = u64::from(geometry.segment_bytes);
            let extents: Vec<Extent> = emptied
                .iter()
                .map(|&segment| Extent::new(geometry.start_of(segment), len))
                .collect();
            for (&segment, extent) in emptied.iter().zip(&extents) {
                log.io.invalidate(extent.start_bytes, len);
                log.segments.release_segment(segment);
                // They will be overwritten: data read from them is stale.
                self.cleaner.cleaning.take_if(|cleaning| cleaning.segment == segment);
            }
            // Only a hint; a failure changes nothing.
            if !extents.is_empty() && log.io.disk.properties().discards {
                let after: Vec<DiskTicket> = log.sent.last.into_iter().collect();
                let _ = log.io.disk.discard(&extents, &after);
            }
        }
    }

    /// Completes a checkpoint that is so old that the disk should have written it by now.
    pub fn complete_old_checkpoint(
        &mut self,
        patience: MissPolicy,
    ) -> Result<Option<MaintenanceStep>> {
        let age = self.reserve.log_bytes / 8;
        let is_old = self.checkpoints.written.as_ref().is_some_and(|written| {
            self.log.sent.durable_ticket >= Some(written.ticket)
                || self.log.counters.written_bytes.saturating_sub(written.written_bytes) > age
        });
        if is_old {
            let need = self.complete_checkpoint(patience)?;
            return Ok(Some(need.map_or(MaintenanceStep::Continue(0), MaintenanceStep::Break)));
        }
        self.release();
        Ok(None)
    }

    /// Writes a whole checkpoint, and waits until it is durable.
    pub fn checkpoint_now(&mut self) -> Result<()> {
        let _ = self.begin_checkpoint()?;
        self.finish_flush()?;
        self.complete_checkpoint(MissPolicy::Block).map(drop)
    }
}
