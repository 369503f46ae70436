//! Backlogs of maintenance: how they grow with the bytes that are written.
use crate::backlog::Backlog;
use crate::core::Core;

/// Bytes written, as they count for each kind of work.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct WorkDone {
    all: u64,
    log: u64,
    /// Expected disk bytes of a change, without moved bytes: a moving average.
    pub brought: u64,
}

impl WorkDone {
    fn since(self, before: Self) -> Self {
        Self {
            all: self.all.saturating_sub(before.all),
            log: self.log.saturating_sub(before.log),
            brought: self.brought,
        }
    }

    /// Returns `bytes` for each kind.
    pub fn with_all_kinds(bytes: u64) -> Self {
        Self { all: bytes, log: bytes, brought: bytes }
    }
}

/// Backlogs of maintenance.
#[derive(Debug, Default)]
pub(crate) struct Backlogs {
    /// Bytes written at the last update.
    pub seen: WorkDone,
    /// Bytes that the cleaner has to process.
    pub cleaning: Backlog,
}

impl Core {
    /// Grows the backlogs by the writes since the last call. The change had `brought_bytes`.
    pub fn grow_backlogs(&mut self, brought_bytes: u64) {
        let (all, log) = (self.log.written_bytes(), self.log.logged_bytes());
        let now = WorkDone { all, log, brought: self.log.spent.estimate_disk_bytes(brought_bytes) };
        let before = std::mem::replace(&mut self.backlogs.seen, now);
        self.grow_backlogs_by(now.since(before));
    }

    /// Grows the backlogs by written bytes.
    pub fn grow_backlogs_by(&mut self, paid: WorkDone) {
        let log_bytes = self.reserve.log_bytes;
        let levels = &mut self.levels;
        if let Some(counting) = &mut levels.flush {
            counting.debt.grow(paid.all, counting.work(), log_bytes / 2);
        }
        if let Some(folding) = &mut levels.compaction {
            folding.debt.grow(paid.log, folding.pairs().saturating_add(1), log_bytes / 16);
        }
        if let Some(merging) = &mut levels.tree_merge {
            let work = merging.layer.pairs.len().saturating_add(1) as u64;
            merging.debt.grow(paid.log, work, merging.span);
        }
        self.grow_cleaning_backlog(paid.brought);
    }

    /// Grows the backlog of cleaning, if a segment is being cleaned.
    pub fn grow_cleaning_backlog(&mut self, bytes: u64) {
        if let Some(cleaning) = &self.cleaner.cleaning {
            let segment_bytes = u64::from(self.log.segments.geometry.segment_bytes);
            let dead_64ths = cleaning.dead.saturating_mul(64);
            let span = dead_64ths.checked_div(self.cleaning_rate_64ths()).unwrap_or(dead_64ths);
            self.backlogs.cleaning.grow(bytes, segment_bytes, span);
        }
    }

    /// Returns the bytes to clean per written byte, in 64ths. If an eighth of the free target is
    /// missing, cleaning frees one byte per written byte; the more is missing, the more.
    fn cleaning_rate_64ths(&self) -> u64 {
        let low = self.reserve.cleaning_threshold_segments as u64;
        let free = self.log.segments.free_segments();
        let missing =
            low.saturating_sub(free.saturating_add(self.segments_awaiting_checkpoint()) as u64);
        missing.saturating_mul(64 * 8).checked_div(low).unwrap_or(0).clamp(8, 4 * 64)
    }
}
