//! The open commit, and the submitted ones.
//!
//! Law 1: the first frames of a long commit may be submitted early. Its last frame is submitted
//! last, and is marked as the last.
//! Law 2: commits that a frame declares durable were flushed, or precede it by the disk's order.
use std::collections::VecDeque;
use std::sync::Arc;

use draconis_device::{Group, Ticket, Write};
use draconis_types::{Block, PrivateBuffer};

use super::{Counters, LogWriter};
use crate::frame::{FrameHeader, SealedFrame};
use crate::required_io::CompletedIo;
use crate::test_hooks::{InjectedFault, barrier_bytes, is_fault_injected};
use crate::{Error, Result};

/// The commit that groups are added to.
#[derive(Debug, Default)]
pub(crate) struct OpenCommit {
    pub seq: u64,
    /// Number of items so far.
    order: u64,
    /// Number of finished frames so far.
    frames: u32,
    pub(super) done: Vec<SealedFrame>,
    pub bytes: usize,
    /// Ticket of the commit's first frames, submitted early.
    early: Option<Ticket>,
    pub(super) early_bytes: u64,
}

impl OpenCommit {
    /// Creates an empty commit.
    pub fn with_seq(seq: u64) -> Self {
        Self { seq, ..Self::default() }
    }

    pub(super) fn add_bytes(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes);
    }

    pub(super) fn next_order(&mut self) -> u64 {
        self.order = self.order.saturating_add(1);
        self.order
    }
}

/// Commits submitted to the disk.
#[derive(Debug, Default)]
pub(crate) struct SubmittedCommits {
    /// Commits that may not be durable yet, oldest first.
    pub commits: VecDeque<(u64, Ticket)>,
    pub durable: u64,
    /// Commits up to this one are durable before anything later is written.
    pub barrier: u64,
    unflushed_bytes: u64,
    pub last: Option<Ticket>,
    /// Newest tickets that the disk reported as durable and as visible.
    pub durable_ticket: Option<Ticket>,
    visible_ticket: Option<Ticket>,
}

/// Write amplification: headers, padding, nodes and runs per payload byte.
#[derive(Debug)]
pub(crate) struct WriteAmplification {
    /// Payload of changes since the last commit, in bytes.
    brought_bytes: u64,
    /// Disk bytes per payload byte, in 64ths: a moving average.
    each_64ths: u64,
    /// Bytes written when the last commit ended, without those moved by the cleaner.
    before: u64,
}

impl Default for WriteAmplification {
    fn default() -> Self {
        Self { brought_bytes: 0, each_64ths: 64, before: 0 }
    }
}

impl WriteAmplification {
    /// Records a change of so many bytes. Returns the disk bytes that it is expected to take.
    pub fn estimate_disk_bytes(&mut self, bytes: u64) -> u64 {
        self.brought_bytes = self.brought_bytes.saturating_add(bytes);
        bytes.saturating_mul(self.each_64ths) / 64
    }

    /// Updates the average at the end of a commit.
    fn update_average(&mut self, written: u64) {
        let spent = written.saturating_sub(std::mem::replace(&mut self.before, written));
        let brought = std::mem::take(&mut self.brought_bytes);
        if let Some(part) = spent.saturating_mul(64).checked_div(brought) {
            let before = self.each_64ths.saturating_mul(15);
            self.each_64ths = before.saturating_add(part.clamp(64, 64 * 64)) / 16;
        }
    }
}

impl SubmittedCommits {
    /// Records that all commits up to `seq` were found on the disk.
    pub fn mark_recovered(&mut self, seq: u64) {
        (self.durable, self.barrier) = (seq, seq);
    }

    /// Returns the ticket that must be visible before reads see all of commit `seq`.
    pub fn invisible_ticket(&self, seq: u64) -> Option<Ticket> {
        let ticket = self.commits.iter().find(|(of, _)| *of >= seq)?.1;
        (self.visible_ticket < Some(ticket)).then_some(ticket)
    }

    /// Records completed I/O.
    pub fn record_completed(&mut self, granted: CompletedIo) {
        match granted {
            CompletedIo::Settled(ticket) => {
                self.visible_ticket = self.visible_ticket.max(Some(ticket))
            }
            CompletedIo::Durable(ticket) => {
                self.durable_ticket = self.durable_ticket.max(Some(ticket));
            }
        }
    }
}

impl LogWriter {
    /// Submits the first frames of a long commit.
    pub(super) fn submit_early_frames(&mut self) -> Result<()> {
        let waiting: usize = self.batch.done.iter().map(|done| done.len).sum();
        if waiting < self.commit_limit().saturating_mul(4) {
            return Ok(());
        }
        // One frame stays: the last one is marked as the last.
        let kept = self.batch.done.pop();
        let frames = std::mem::take(&mut self.batch.done);
        self.batch.early_bytes = self.batch.early_bytes.saturating_add(waiting as u64);
        let ticket = self.submit_frames(frames, false, &[])?;
        self.batch.early = Some(ticket);
        self.batch.done.extend(kept);
        Ok(())
    }

    /// Submits the commit to the disk; returns at once.
    pub fn commit(&mut self) -> Result<()> {
        for stream in 0..self.streams.len() {
            self.finish_frame(stream);
        }
        if self.batch.done.is_empty() {
            return Ok(());
        }
        let frames = std::mem::take(&mut self.batch.done);
        let len = frames.iter().map(|done| done.len).sum::<usize>() as u64;
        let len = self.batch.early_bytes.saturating_add(len);
        // A long commit's first frames are durable before its last: opening a store need not verify
        // them.
        let mut after: Vec<Ticket> = vec![];
        if self.batch.early_bytes > barrier_bytes() {
            after.extend(self.batch.early);
        }
        if self.sent.unflushed_bytes > barrier_bytes() {
            after.extend(self.sent.last.filter(|_| !is_fault_injected(InjectedFault::Barrier)));
            self.sent.unflushed_bytes = 0;
            self.sent.barrier = self.batch.seq.saturating_sub(1);
        }
        let ticket = self.submit_frames(frames, true, &after)?;
        self.sent.unflushed_bytes = self.sent.unflushed_bytes.saturating_add(len);
        self.bytes = self.bytes.saturating_add(len);
        self.usual_bytes = self.usual_bytes.saturating_mul(7).saturating_add(self.batch.bytes) / 8;
        self.counters.commits = self.counters.commits.saturating_add(1);
        self.sent.commits.push_back((self.batch.seq, ticket));
        self.batch = OpenCommit::with_seq(self.batch.seq.saturating_add(1));
        self.io.clear_unsubmitted_nodes();
        let Counters { written_bytes, moved_bytes, .. } = self.counters;
        self.spent.update_average(written_bytes.saturating_sub(moved_bytes));
        Ok(())
    }

    fn submit_frames(
        &mut self,
        frames: Vec<SealedFrame>,
        is_end: bool,
        after: &[Ticket],
    ) -> Result<Ticket> {
        let count = frames.len();
        let mut writes = Vec::with_capacity(count);
        let mut places = Vec::with_capacity(count);
        for (index, mut frame) in frames.into_iter().enumerate() {
            let header = FrameHeader {
                incarnation: self.incarnation,
                at: 0,
                seq: self.batch.seq,
                durable: if is_fault_injected(InjectedFault::DurableMark) {
                    0
                } else {
                    self.sent.durable.max(self.sent.barrier)
                },
                len: 0,
                table_at: 0,
                table_len: 0,
                frame_index: self.batch.frames,
                is_last: is_end && index.saturating_add(1) == count,
                next_segment: frame.next_segment,
            };
            self.batch.frames = self.batch.frames.saturating_add(1);
            frame.write_header(header, self.tag, self.io.summer);
            // As large as the frame's own buffer, so that the allocator reuses memory: clearing new
            // pages takes longer than copying.
            let mut memory = PrivateBuffer::new_uninitialized(frame.capacity());
            memory.truncate(frame.len);
            memory.copy_from_slice(frame.bytes());
            let written = &mut self.counters.written_bytes;
            *written = written.saturating_add(frame.len as u64);
            writes.push(Write { at_bytes: frame.at, block: Block::from(memory) });
            places.push(Arc::new(frame));
        }
        self.io.cache_invisible_frames(&places);
        let ticket = self
            .io
            .disk
            .submit(Group { writes }, after)
            .map_err(|refused| Error::Device(refused.error))?;
        self.sent.last = Some(ticket);
        self.io.track_submitted(ticket, places)?;
        Ok(ticket)
    }

    /// Records that commits up to `seq` are durable.
    pub fn mark_durable(&mut self, seq: u64) {
        self.sent.durable = self.sent.durable.max(seq);
        while let Some(&(first, ticket)) = self.sent.commits.front()
            && first <= seq
        {
            self.io.mark_visible(ticket);
            self.sent.durable_ticket = self.sent.durable_ticket.max(Some(ticket));
            self.sent.commits.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cleaner waits for the writes of a commit until they are visible.
    #[test]
    fn commits_are_invisible_until_their_writes_are_completed() {
        let mut sent = SubmittedCommits::default();
        sent.commits.extend([(5, Ticket(1)), (6, Ticket(3))]);
        let invisible = |sent: &SubmittedCommits| [5, 6, 7].map(|seq| sent.invisible_ticket(seq));
        assert_eq!(invisible(&sent), [Some(Ticket(1)), Some(Ticket(3)), None]);
        sent.record_completed(CompletedIo::Settled(Ticket(2)));
        assert_eq!(invisible(&sent), [None, Some(Ticket(3)), None]);
        sent.record_completed(CompletedIo::Settled(Ticket(1)));
        sent.record_completed(CompletedIo::Settled(Ticket(3)));
        assert_eq!(invisible(&sent), [None; 3]);
    }
}
