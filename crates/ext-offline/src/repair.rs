//! Repair of an unmounted volume.
//!
//! ```text
//!   disk ─▶ changes in memory ─▶ check ─▶ fixes ─▶ check ─▶ .. ─▶ silent ─▶ undo file ─▶ redo log
//!                                  ▲        │
//!                                  └────────┘  the lowest pass that found something
//! ```
//! Law 1: nothing is written before the check of the repaired volume, in memory, is silent, or finds
//! only what has no fix. Then all is written as one change: a cut leaves the old volume or the repaired one.
//! Law 2: each fix answers a problem of the check. Problems without a fix are left, and the others
//! fixed where that frees nothing and makes no file worse.
//! Law 3: what could be read stays readable: blocks claimed twice are copied, and what has no name
//! gets one in `lost+found`: the one that a directory still has behind another, if that is the only.
//! Law 4: a block that a file had at any time of the repair holds nothing new, and no log.
//! Law 5: maps and directories are not patched but built anew from what is valid in them.

mod bitmaps;
mod blocks;
mod directories;
mod groups;
mod inodes;
mod maps;
mod superblock;
mod undo;
mod worse;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use draconis_device::{Disk, Extent};
use draconis_types::Time;

use crate::backup::{self, SuperblockPlace, block_bytes};
use crate::blocks::cow_disk::CowDisk;
use crate::blocks::uncached::{read_bytes, read_raw_superblock};
use crate::check::bit_set::AtomicBitSet;
use crate::check::{self, Check, CheckOptions, Problem, Progress, Report, SMALL_CHECK, What};
use crate::format::features::ReadOnlyCompatible;
use crate::format::superblock::{RawSuperblock, Superblock};
use crate::journal;
use crate::offline::Result;
use crate::redo_log::RedoLog;
use crate::tune::{TuneChanges, tune_checked};
use crate::units::saturating_usize;
use crate::volume::Volume;
use crate::{Error, FsBlock, InodeNumber};

pub use crate::offline::OfflineError;
pub use undo::revert;

/// Limit of rounds of check and fixes.
const MAX_ROUNDS: usize = 48;
/// Problems of a round; further ones belong to the next.
const PROBLEMS_PER_ROUND: usize = 50_000;
/// Blocks of superblock and descriptors that change for a rescue, in memory.
const MAX_LAYOUT_BLOCKS: usize = 1 << 14;
/// Times that a problem may come back before it counts as one without a fix.
const MAX_ATTEMPTS: u32 = 3;

/// Options of a repair.
#[derive(Clone, Copy, Debug)]
pub struct RepairOptions {
    /// Place of the superblock to use.
    pub superblock: SuperblockPlace,
    /// Options of each check.
    pub check: CheckOptions,
    /// Time of the repair.
    pub now: Time,
    /// Limit of the changes, which are held in memory, in bytes.
    pub max_change_bytes: u64,
}

/// A problem, and what the repair does about it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fix {
    /// The problem.
    pub problem: Problem,
    /// What is done.
    pub action: &'static str,
    /// True if the first whole check did not find the problem: other fixes led to it.
    pub follows: bool,
}

/// What a repair makes of a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// No problem was found.
    NothingToDo,
    /// All problems have a fix.
    Repaired,
    /// Some have, and no file gets worse by them.
    InPart,
    /// Nothing is written, for this reason.
    Left(String),
}

/// A repair in memory.
pub struct Repair {
    /// Result of the first check that completed all passes, or else of the first.
    pub before: Report,
    /// What is done, in order.
    pub fixes: Vec<Fix>,
    /// Problems that are left.
    pub unfixed: Vec<Problem>,
    /// Why nothing is written although some problems have a fix.
    pub obstacle: Option<String>,
    is_partial: bool,
    changes: Arc<CowDisk>,
    /// Clusters that belonged to something at any time.
    taken: AtomicBitSet,
    /// Clusters in use at the last check.
    used: AtomicBitSet,
    super_: Option<Superblock>,
}

/// Plans the repair of the unmounted volume on `disk`. Nothing is written.
///
/// # Errors
/// As [`check::check`]; [`OfflineError::Unsupported`] for more changes than memory may hold.
pub fn plan(
    disk: &Arc<dyn Disk>,
    options: &RepairOptions,
    progress: Progress<'_>,
) -> Result<Repair> {
    let raw = match read_raw_superblock(&**disk) {
        Ok(raw) if options.superblock.block.is_none() => Some(raw),
        Ok(_) | Err(Error::NotExt) => {
            backup::find(&**disk, None, &options.superblock).map(|backup| backup.raw)
        }
        Err(other) => return Err(other.into()),
    };
    if raw.is_some_and(|raw| backup::is_interrupted(&**disk, &raw)) {
        let feature = "unfinished: a change of the whole volume was cut off".to_owned();
        return Err(Error::Unsupported { feature }.into());
    }
    let (raw, fixed) = superblock::choose_superblock(disk, &options.superblock)?;
    let block_bytes = block_bytes(&raw).ok_or(Error::corrupt("superblock: block size"))?;
    let most = options.max_change_bytes.checked_div(block_bytes.into()).unwrap_or(0);
    let plan = |is_partial| {
        let changes = Arc::new(CowDisk::new(disk.clone(), block_bytes, saturating_usize(most)));
        plan_with(changes, (&raw, &fixed), is_partial, options, progress)
    };
    let whole = plan(false)?;
    if whole.unfixed.is_empty() {
        return Ok(whole);
    }
    // Without all problems fixed, less is certain: what the bitmaps call used stays as it is.
    let mut partial = match plan(true) {
        Ok(partial) if !partial.fixes.is_empty() => partial,
        _ => return Ok(Repair { fixes: vec![], ..whole }),
    };
    // What is still found was tried, and not fixed.
    let left: BTreeSet<Problem> = partial.unfixed.iter().cloned().collect();
    partial.fixes.retain(|it| !left.contains(&it.problem));
    let changed: Arc<dyn Disk> = partial.changes.clone();
    partial.obstacle = match worse::find_worse_file(disk, &changed) {
        Ok(None) => None,
        Ok(Some(path)) => Some(format!("\"{}\" would get worse", path.escape_ascii())),
        Err(error) => Some(error.to_string()),
    };
    Ok(partial)
}

/// Plans a repair in `changes`, with a superblock that was chosen. A partial one leaves problems
/// without a fix, and all that only frees what nothing seems to use.
fn plan_with(
    changes: Arc<CowDisk>,
    (raw, fixed): (&RawSuperblock, &[(Problem, &'static str)]),
    is_partial: bool,
    options: &RepairOptions,
    progress: Progress<'_>,
) -> Result<Repair> {
    let mut repair = Repair {
        before: Report::default(),
        fixes: vec![],
        unfixed: vec![],
        obstacle: None,
        is_partial,
        changes,
        taken: AtomicBitSet::new(0),
        used: AtomicBitSet::new(0),
        super_: None,
    };
    if !fixed.is_empty() {
        backup::put(&repair.changes, raw)?;
    }
    for (problem, action) in fixed {
        repair.note(problem.clone(), action);
    }
    match repair.run(options, progress) {
        Err(OfflineError::Volume(Error::Io(draconis_device::Error::ServiceEnded))) => {
            let what = "more changes than memory is allowed for: --memory allows more";
            Err(OfflineError::Unsupported(what.to_owned()))
        }
        done => done.map(|()| repair),
    }
}

/// Returns the disk with the superblock and the places of all structures that a repair makes. The
/// disk does not change.
///
/// # Errors
/// As [`plan`].
pub(crate) fn with_repaired_layout(disk: &Arc<dyn Disk>) -> Result<Arc<dyn Disk>> {
    let (raw, fixed) = superblock::choose_superblock(disk, &SuperblockPlace::default())?;
    let block_bytes = block_bytes(&raw).ok_or(Error::corrupt("superblock: block size"))?;
    let changes = Arc::new(CowDisk::new(disk.clone(), block_bytes, MAX_LAYOUT_BLOCKS));
    if !fixed.is_empty() {
        backup::put(&changes, &raw)?;
    }
    let as_disk: Arc<dyn Disk> = changes.clone();
    for attempt in 1..=MAX_ATTEMPTS {
        let pass0 = check::check_layout(&as_disk, raw.clone(), false, SMALL_CHECK, &|_, _| {})?;
        let Some(check) = pass0.check else {
            return Err(Error::corrupt("superblock: not all of it has a fix").into());
        };
        let problems = check.take_problems();
        let of_groups: Vec<_> = problems.iter().filter(|it| it.what.is_of_descriptor()).collect();
        if fix_layout(&changes, Some(&check), attempt, &of_groups)?.is_empty() {
            break;
        }
    }
    changes.freeze();
    Ok(as_disk)
}

/// Fixes problems of the superblock and the descriptors, for which nothing is allocated.
fn fix_layout<'a>(
    changes: &'a Arc<CowDisk>,
    check: Option<&'a Check<'a>>,
    attempt: u32,
    problems: &[&Problem],
) -> crate::Result<Vec<(Problem, &'static str)>> {
    let (taken, mut later) = (AtomicBitSet::new(0), BTreeSet::new());
    let mut fixer = Fixer {
        check,
        changes,
        taken: &taken,
        next_free: 0,
        now: Time::default(),
        blocks_left: Cell::new(0),
        attempt,
        later: &mut later,
        mended_groups: BTreeSet::new(),
        fixes: vec![],
    };
    fixer.fix_superblock_and_groups(problems)?;
    Ok(fixer.fixes)
}

impl Repair {
    /// Returns the number of changed blocks.
    pub fn changed_block_count(&self) -> usize {
        self.changes.blocks().len()
    }

    /// Returns true if there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.verdict() == Verdict::NothingToDo
    }

    /// Returns what becomes of the volume.
    pub fn verdict(&self) -> Verdict {
        match (self.fixes.is_empty(), self.unfixed.len(), &self.obstacle) {
            (true, 0, _) => Verdict::NothingToDo,
            (false, 0, _) => Verdict::Repaired,
            (false, _, None) => Verdict::InPart,
            (_, _, Some(why)) => Verdict::Left(why.clone()),
            (true, left, None) => Verdict::Left(format!("{left} problems have no fix")),
        }
    }

    fn run(&mut self, options: &RepairOptions, progress: Progress<'_>) -> Result<()> {
        let disk: Arc<dyn Disk> = self.changes.clone();
        let options_of_check = CheckOptions { max_problems: PROBLEMS_PER_ROUND, ..options.check };
        let mut attempts: HashMap<Problem, u32> = HashMap::new();
        let mut later = BTreeSet::new();
        let mut may_delete_orphans = !self.is_partial;
        let mut left: BTreeSet<Problem> = BTreeSet::new();
        for round in 0..MAX_ROUNDS {
            // A superblock from a backup says only now that there is something to replay.
            self.replay_journal(&disk)?;
            may_delete_orphans = may_delete_orphans && self.delete_orphans(options)?;
            let raw = read_raw_superblock(&*disk)?;
            let (report, found) = check::examine(&disk, raw, false, options_of_check, progress)?;
            if round == 0 || report.complete && !self.before.complete {
                self.before = report.clone();
            }
            if let Some(check) = &found {
                self.remember_used(check);
            }
            let is_open =
                |it: &&Problem| !(left.contains(it) || self.is_partial && it.what.frees());
            let open = || report.problems.iter().filter(is_open);
            if self.is_partial && !report.problems.is_empty() && open().next().is_none() {
                self.unfixed = report.problems;
                if !later.is_empty() {
                    self.obstacle = Some("what was removed cannot be made anew".to_owned());
                }
                return Ok(());
            }
            // What follows from a wrong reading of an inode goes away with it.
            let decisive = open().find(|it| it.is_decisive());
            let first = decisive.or_else(|| open().min_by_key(|it| it.what.pass()));
            let Some((pass, is_decisive)) = first.map(|it| (it.what.pass(), decisive.is_some()))
            else {
                if !self.add_dropped_features(&disk, &mut later, options)? {
                    return self.finish(&disk, options);
                }
                continue;
            };
            let mut now: Vec<&Problem> = open().filter(|it| it.what.pass() == pass).collect();
            now.retain(|it| !is_decisive || it.is_decisive());
            // Several pointers of an inode have one wrong value: that is one attempt.
            let mut distinct = BTreeSet::new();
            now.retain(|it| distinct.insert(*it));
            let quota = |it: &&Problem| it.what == What::Quota;
            if now.iter().all(quota) {
                later.insert(LaterStep::Quota);
                if !self.add_dropped_features(&disk, &mut later, options)? {
                    self.unfixed = now.into_iter().cloned().collect();
                    return Ok(());
                }
                for problem in now {
                    self.note(problem.clone(), "the quota files are made anew");
                }
                continue;
            }
            now.retain(|it| !quota(it));
            let mut attempt = 0;
            for problem in &now {
                let times = attempts.entry((*problem).clone()).or_default();
                *times = times.saturating_add(1);
                attempt = attempt.max(*times);
            }
            if attempt > MAX_ATTEMPTS && self.is_partial {
                left.extend(now.into_iter().cloned());
                continue;
            }
            if attempt > MAX_ATTEMPTS {
                self.unfixed = now.into_iter().cloned().collect();
                return Ok(());
            }
            let mut fixer = Fixer {
                check: found.as_ref(),
                changes: &self.changes,
                taken: &self.taken,
                next_free: 0,
                now: options.now,
                blocks_left: Cell::new(self.taken.len().saturating_mul(8).saturating_add(1 << 22)),
                attempt,
                later: &mut later,
                mended_groups: BTreeSet::new(),
                fixes: vec![],
            };
            match fixer.fix_pass(pass, &now) {
                // The next check says what is left.
                Err(Error::NoSpace) => log::info!("no free blocks for a fix"),
                done => done?,
            }
            let fixes = std::mem::take(&mut fixer.fixes);
            if fixes.is_empty() && self.is_partial && found.is_some() {
                left.extend(now.into_iter().cloned());
                continue;
            }
            if fixes.is_empty() {
                self.unfixed = now.into_iter().cloned().collect();
                return Ok(());
            }
            for (problem, action) in fixes {
                self.note(problem, action);
            }
        }
        let what = format!("more than {MAX_ROUNDS} rounds of check and repair");
        Err(OfflineError::Unsupported(what))
    }

    /// Replays the journal in memory, up to its first damage.
    fn replay_journal(&mut self, disk: &Arc<dyn Disk>) -> Result<()> {
        let raw = read_raw_superblock(&**disk)?;
        let Some(super_) = raw.check_lenient().ok().filter(Superblock::needs_recovery) else {
            return Ok(());
        };
        let problem = Problem::new(What::Unreplayed);
        match journal::replay(disk, &super_) {
            Ok(()) => self.note(problem, "the journal is replayed"),
            Err(Error::Corrupt { what, block, .. }) => {
                let replayed = journal::open_replayed(disk.clone(), &super_)?;
                for at in replayed.changed {
                    let extent = Extent::new(
                        at.0.saturating_mul(super_.block_bytes.into()),
                        super_.block_bytes.into(),
                    );
                    let bytes = read_bytes(&*replayed.disk, extent).map_err(Error::from)?;
                    self.changes.put(at, bytes).map_err(Error::from)?;
                }
                superblock::edit(&self.changes, RawSuperblock::set_recovered)?;
                let (kind, action) = match what == journal::COPY_CHECKSUM {
                    true => (What::JournalCopy, "the journal is replayed without it, and emptied"),
                    false => (What::Journal, "the journal is replayed up to there, and emptied"),
                };
                let problem = Problem { block, name: Some(what.into()), ..Problem::new(kind) };
                self.note(problem, action);
            }
            Err(other) => return Err(other.into()),
        }
        Ok(())
    }

    /// Deletes or cuts the orphans in memory, as a mount does. Returns false where damage forbids it:
    /// the fixes of the other problems empty the list and the file.
    fn delete_orphans(&mut self, options: &RepairOptions) -> Result<bool> {
        let Some(super_) = read_raw_superblock(&*self.changes)?.check_lenient().ok() else {
            return Ok(true);
        };
        let in_file = super_.read_only_compatible.contains(ReadOnlyCompatible::ORPHAN_PRESENT);
        if super_.last_orphan == 0 && !in_file {
            return Ok(true);
        }
        let most = options.max_change_bytes.checked_div(super_.block_bytes.into()).unwrap_or(0);
        let tried = Arc::new(CowDisk::new(
            self.changes.clone(),
            super_.block_bytes,
            saturating_usize(most),
        ));
        match Volume::process_orphans_in_memory(tried.clone(), &super_, options.now) {
            Ok(()) => {
                for (at, bytes) in tried.blocks() {
                    self.changes.put(FsBlock(at), bytes.to_vec()).map_err(Error::from)?;
                }
                let first = Some(InodeNumber(super_.last_orphan)).filter(|first| first.0 != 0);
                let problem = Problem { inode: first, ..Problem::new(What::OnOrphanList) };
                self.note(problem, "the orphans are deleted, as by a mount");
                Ok(true)
            }
            Err(error @ Error::Io(_)) => Err(error.into()),
            Err(error) => {
                log::info!("the orphans are not deleted by their list: {error}");
                if in_file {
                    superblock::edit(&self.changes, RawSuperblock::set_no_orphans_in_file)?;
                }
                Ok(false)
            }
        }
    }

    fn note(&mut self, problem: Problem, action: &'static str) {
        let follows = self.before.complete && !self.before.problems.contains(&problem);
        self.fixes.push(Fix { problem, action, follows });
    }

    /// Remembers the clusters in use: they are not allocated from now on.
    fn remember_used(&mut self, check: &Check<'_>) {
        if self.taken.len() != check.used.len() {
            self.taken = AtomicBitSet::new(check.used.len());
        }
        self.used = AtomicBitSet::new(check.used.len());
        for at in (0..check.used.len()).step_by(64) {
            self.taken.insert_word(at, check.used.word_from(at));
            self.used.insert_word(at, check.used.word_from(at));
        }
        if self.is_partial && self.super_.is_none() {
            check.visit_bits_in_use(&mut |cluster| {
                self.taken.insert(cluster);
            });
        }
        self.super_ = Some(check.super_.clone());
    }

    /// Makes anew what the fixes removed. Returns true if there was something.
    fn add_dropped_features(
        &mut self,
        disk: &Arc<dyn Disk>,
        later: &mut BTreeSet<LaterStep>,
        options: &RepairOptions,
    ) -> Result<bool> {
        let Some(step) = later.pop_first() else { return Ok(false) };
        self.mark_clean(options)?;
        if step == LaterStep::Quota {
            // No inode has these numbers: there is nothing to remove.
            superblock::edit(&self.changes, |raw| {
                let last = raw.s_inodes_count;
                let all = [
                    &mut raw.s_usr_quota_inum,
                    &mut raw.s_grp_quota_inum,
                    &mut raw.s_prj_quota_inum,
                ];
                all.into_iter().filter(|it| it.get() > last.get()).for_each(|it| it.set(0));
            })?;
        }
        let features: &[&[&str]] = match step {
            LaterStep::Journal => &[&["has_journal"]],
            LaterStep::OrphanFile => &[&["orphan_file"]],
            LaterStep::Quota => &[&["^quota"], &["quota"]],
        };
        for features in features {
            let features = features.iter().map(|it| (*it).to_owned()).collect();
            let changes = TuneChanges { features, ..TuneChanges::default() };
            match tune_checked(&**disk, &changes, options.now) {
                // The volume can be used without it.
                Err(OfflineError::NoLogSpace | OfflineError::Misuse(_))
                    if step != LaterStep::Quota =>
                {
                    let (what, action) = match step {
                        LaterStep::Journal => (
                            What::JournalInode,
                            "no free blocks for a new journal: there is none any more",
                        ),
                        _ => (
                            What::OrphanFile,
                            "no free blocks for a new one: there is none any more",
                        ),
                    };
                    self.note(Problem::new(what), action);
                }
                done => done?,
            }
        }
        Ok(true)
    }

    fn mark_clean(&self, options: &RepairOptions) -> Result<()> {
        let now = crate::format::superblock::to_disk_seconds(options.now);
        Ok(superblock::edit(&self.changes, |raw| raw.mark_checked(now))?)
    }

    fn finish(&mut self, disk: &Arc<dyn Disk>, options: &RepairOptions) -> Result<()> {
        let raw = read_raw_superblock(&**disk)?;
        if !self.fixes.is_empty() || !raw.is_marked_clean() {
            self.mark_clean(options)?;
        }
        Ok(())
    }

    /// Returns the blocks in use that differ from `disk`. Others stay as they are: what was staged
    /// in them has no use any more, and they may hold the log.
    fn changed_blocks(
        &self,
        disk: &dyn Disk,
        super_: &Superblock,
    ) -> Result<BTreeMap<u64, Vec<u8>>> {
        let mut changed = BTreeMap::new();
        let first = u64::from(super_.first_data_block);
        let ratio = u64::from(super_.cluster_blocks.max(1));
        let cluster = |at: u64| at.saturating_sub(first).checked_div(ratio).unwrap_or(0);
        for (at, bytes) in self.changes.blocks() {
            if at >= first && !self.used.contains(cluster(at)) {
                continue;
            }
            let len = u64::from(super_.block_bytes);
            let extent = Extent::new(at.saturating_mul(len), len);
            if read_bytes(disk, extent).map_err(Error::from)? != *bytes {
                changed.insert(at, bytes.to_vec());
            }
        }
        Ok(changed)
    }

    /// Returns free block ranges for a log of `blocks`, the last ones first.
    fn log_ranges(&self, super_: &Superblock, blocks: u64) -> Vec<Range<u64>> {
        let ratio = u64::from(super_.cluster_blocks.max(1));
        let first = u64::from(super_.first_data_block);
        let (mut ranges, mut left): (Vec<Range<u64>>, u64) = (vec![], blocks);
        let mut cluster = self.taken.len();
        while left > 0 && cluster > 0 {
            cluster = cluster.saturating_sub(1);
            if self.taken.contains(cluster) {
                continue;
            }
            let start = first.saturating_add(cluster.saturating_mul(ratio));
            let end = start.saturating_add(ratio).min(super_.blocks);
            left = left.saturating_sub(end.saturating_sub(start));
            match ranges.last_mut() {
                Some(last) if last.start == end => last.start = start,
                _ => ranges.push(start..end),
            }
        }
        ranges
    }

    /// Writes the repaired volume as one change of `disk`; first the old bytes of all that changes
    /// go to `undo`, durably. The log of the change goes to free blocks of the volume, or to
    /// `scratch`, which [`revert`] takes after a cut.
    ///
    /// # Errors
    /// [`OfflineError::NoLogSpace`]: nothing was written; errors of the disk or of the files.
    pub fn write(
        &self,
        disk: &Arc<dyn Disk>,
        undo: Option<File>,
        scratch: Option<File>,
    ) -> Result<()> {
        if matches!(self.verdict(), Verdict::Left(_)) {
            return Err(Error::Misuse("a repair that writes nothing").into());
        }
        let Some(super_) = &self.super_ else { return Ok(()) };
        let changed = self.changed_blocks(&**disk, super_)?;
        if changed.is_empty() {
            return Ok(());
        }
        if let Some(scratch) = scratch {
            let (super_block, _) = super_.location();
            let all = changed.into_keys().chain([super_block.0]).collect();
            if let Some(undo) = undo {
                undo::save(undo, &**disk, &*self.changes, super_, &all)?;
            }
            let mut file = undo::save(scratch, &*self.changes, &**disk, super_, &all)?;
            return revert(&**disk, &mut file, false).map(drop);
        }
        if let Some(undo) = undo {
            // What the change leaves in each block, the log included.
            let after = CowDisk::new(disk.clone(), super_.block_bytes, usize::MAX);
            self.write_logged(&after, super_, changed.clone())?;
            let all = after.blocks().into_keys().collect();
            undo::save(undo, &**disk, &after, super_, &all)?;
        }
        self.write_logged(&**disk, super_, changed)
    }

    /// Writes the `changed` blocks and the superblock, with a log in free blocks of the volume.
    fn write_logged(
        &self,
        disk: &dyn Disk,
        super_: &Superblock,
        mut changed: BTreeMap<u64, Vec<u8>>,
    ) -> Result<()> {
        let (super_block, at) = super_.location();
        let planned = read_raw_superblock(&*self.changes)?;
        let homes = changed.len() as u64;
        let per_index = u64::from(super_.block_bytes) / 32;
        let log =
            homes.saturating_add(homes.checked_div(per_index).unwrap_or(homes)).saturating_add(8);
        // The log writes the superblock itself; around it, its block does not change.
        if let Some(bytes) = changed.remove(&super_block.0) {
            let old = self.read_home(disk, super_, super_block)?;
            let around = |bytes: &[u8]| {
                let mut bytes = bytes.to_vec();
                let end = at.saturating_add(crate::format::superblock::LEN_BYTES);
                bytes.get_mut(at..end).unwrap_or_default().fill(0);
                bytes
            };
            if around(&old) != around(&bytes) {
                return Err(Error::Misuse("a change beside the superblock").into());
            }
        }
        // The log is found by the superblock: one that is none is replaced first.
        let old = read_raw_superblock(disk).ok();
        if old.and_then(|old| block_bytes(&old)) != Some(super_.block_bytes) {
            superblock::write_first(disk, &planned)?;
        }
        let mut redo = RedoLog::new(disk, super_.block_bytes, self.log_ranges(super_, log));
        for (at, bytes) in changed {
            redo.stage_block(FsBlock(at), bytes)?;
        }
        Ok(redo.commit(&planned)?)
    }

    fn read_home(&self, disk: &dyn Disk, super_: &Superblock, at: FsBlock) -> Result<Vec<u8>> {
        let len = u64::from(super_.block_bytes);
        let extent = Extent::new(at.0.saturating_mul(len), len);
        Ok(read_bytes(disk, extent).map_err(Error::from)?)
    }
}

/// What is made anew when all else is in order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum LaterStep {
    Journal,
    OrphanFile,
    Quota,
}

/// One round of fixes.
struct Fixer<'a> {
    /// What the check found out; `None` if it ended with the superblock.
    check: Option<&'a Check<'a>>,
    changes: &'a Arc<CowDisk>,
    taken: &'a AtomicBitSet,
    /// Cluster from which on free ones are sought.
    next_free: u64,
    now: Time,
    /// Blocks of maps that this round may still visit: hostile maps claim the same ones many times.
    blocks_left: Cell<u64>,
    /// How often the problems of this round were found, this time included.
    attempt: u32,
    later: &'a mut BTreeSet<LaterStep>,
    /// Groups of whose descriptor one bit was changed back.
    mended_groups: BTreeSet<u32>,
    fixes: Vec<(Problem, &'static str)>,
}

impl Fixer<'_> {
    fn fix_pass(&mut self, pass: u8, problems: &[&Problem]) -> crate::Result<()> {
        match pass {
            0 => self.fix_superblock_and_groups(problems),
            1 => self.fix_inodes(problems),
            2 => self.fix_directories(problems),
            3 => self.fix_connections(problems),
            4 => self.fix_links(problems),
            _ => self.fix_bitmaps(problems),
        }
    }

    fn done(&mut self, problem: &Problem, action: &'static str) {
        self.fixes.push((problem.clone(), action));
    }
}
