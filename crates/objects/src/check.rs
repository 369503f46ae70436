//! Checks a whole store: every checksum, every map, every count.
//!
//! ```text
//!   open, read-only ─▶ superblocks ─▶ walk: nodes · order · owners · recount
//!                                      └─▶ walk again, a window of segments at a time:
//!                                          who lies where · payloads in disk order
//! ```
//!
//! The check walks two views: runs over the tree (*counted*, what the live-byte counts cover), and
//! the log over both (*visible*, what readers see). Entries that the log hides are live until the
//! next memtable flush accounts them.
//!
//! Where a part of the index is lost, frames tell which payloads may belong to it: these are
//! verified, too.
//!
//! Law 1: nothing is written.
//! Law 2: damage is a finding, not an error, and the check goes on after it.
//! Law 3: the live bytes of a segment are exactly those that the counted view and the log refer to,
//! and the nodes and chunks that hold both. The segment table must agree, byte for byte.
//! Law 4: memory is bounded: the check gathers payloads for as many segments as fit.

mod index;
mod live_bytes;
mod lost_index;
mod payloads;
mod report;
mod superblocks;
#[cfg(test)]
mod tests;
pub(crate) mod walk;

use std::sync::Arc;

use draconis_device::Disk;

use self::report::new_finding;
pub use self::report::{DamageKind, Finding, Owner, Report};
use self::superblocks::check_superblocks;
use self::walk::IndexSnapshot;
use crate::core::Core;
use crate::entry::Key;
use crate::options::OpenOptions;
use crate::recovery::OpenDamage;
use crate::superblock::Superblock;
use crate::{Error, Result, Store};

/// Options of a check.
#[derive(Clone, Debug)]
pub struct CheckOptions {
    /// Memory for payload records, in bytes. The index is read once more each time it is full.
    pub memory_bytes: u64,
    /// Findings to keep; further ones are only counted.
    pub findings_max: usize,
}

impl Default for CheckOptions {
    fn default() -> Self {
        Self { memory_bytes: 256 << 20, findings_max: 1000 }
    }
}

/// Callback with the number of checked bytes, and of all.
pub type ProgressCallback<'p> = &'p mut dyn FnMut(u64, u64);

impl Store {
    /// Checks the store on `disk`, which must not be changed meanwhile. Writes nothing.
    ///
    /// # Errors
    /// [`Error::NotAStore`]; [`Error::Device`] where not even the superblocks can be read.
    /// Damage is no error.
    pub fn check(
        disk: Arc<dyn Disk>,
        options: &CheckOptions,
        progress: ProgressCallback<'_>,
    ) -> Result<Report> {
        let mut report = Report::default();
        // Small: the walk reads everything once.
        let how = OpenOptions { cache_bytes: 16 << 20, read_only: true };
        let mut lost = vec![];
        let core = match crate::recovery::open_degraded(disk.clone(), &how, &mut lost) {
            Ok(core) => core,
            Err(Error::Corrupt { what, at_bytes }) => {
                report.add(
                    options,
                    new_finding(DamageKind::Open, what.to_owned(), Some(at_bytes), None),
                );
                // Frames are verified without a checkpoint.
                let Ok((superblock, _)) = Superblock::find_newest(&*disk) else {
                    return Ok(report);
                };
                let core = crate::recovery::empty_core(disk, superblock, how.cache_bytes)?;
                let mut check = Checker::new(core, options, report, progress);
                (check.is_whole, check.report.is_complete) = (false, false);
                check.lost_keys.push((Key::new(), None));
                check.verify_frames();
                return Ok(check.finish());
            }
            Err(error) => return Err(error),
        };
        check_superblocks(&core, &mut report, options);
        let is_whole = lost.is_empty();
        for OpenDamage { error, .. } in lost {
            let at = match &error {
                Error::Corrupt { at_bytes, .. } => Some(*at_bytes),
                _ => None,
            };
            report.add(options, new_finding(DamageKind::Open, error.to_string(), at, None));
        }
        let mut check = Checker::new(core, options, report, progress);
        (check.is_whole, check.report.is_complete) = (is_whole, is_whole);
        check.walk_index();
        check.compare_live_bytes();
        check.verify_payloads();
        check.verify_frames();
        Ok(check.finish())
    }
}

/// A check in progress.
struct Checker<'c> {
    core: Core,
    map: Arc<IndexSnapshot>,
    options: &'c CheckOptions,
    report: Report,
    progress: ProgressCallback<'c>,
    /// Live bytes of each segment, recounted by the check.
    recounted_live: Vec<i64>,
    /// Memory that the payload records of each segment need.
    weights: Vec<u64>,
    done_bytes: u64,
    total_bytes: u64,
    /// Ranges of keys that the tree lost: from a key on, before another.
    lost_keys: Vec<(Key, Option<Key>)>,
    /// True if the checkpoint and the log could be read. Otherwise missing items cannot be
    /// reported.
    is_whole: bool,
}

impl<'c> Checker<'c> {
    fn new(
        mut core: Core,
        options: &'c CheckOptions,
        report: Report,
        progress: ProgressCallback<'c>,
    ) -> Self {
        let segments = core.checkpoints.superblock.geometry.segments as usize;
        let map = Arc::new(IndexSnapshot::new(&mut core));
        Self {
            map,
            options,
            report: Report { is_complete: true, ..report },
            progress,
            recounted_live: vec![0; segments],
            weights: vec![0; segments],
            done_bytes: 0,
            lost_keys: vec![],
            is_whole: true,
            total_bytes: core.log.segments.total_live_bytes(),
            core,
        }
    }

    fn add_progress(&mut self, bytes: u64) {
        self.done_bytes = self.done_bytes.saturating_add(bytes).min(self.total_bytes);
        (self.progress)(self.done_bytes, self.total_bytes);
    }

    fn add_damage(&mut self, what: DamageKind, text: String, at: Option<u64>, of: Option<Owner>) {
        self.report.add(self.options, new_finding(what, text, at, of));
    }

    fn finish(mut self) -> Report {
        self.add_progress(self.total_bytes);
        self.report
    }
}
