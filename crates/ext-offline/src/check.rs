//! Read-only check of a whole volume.
//!
//! ```text
//!   0 superblock, groups        locations of all structures        layout · orphans
//!   1 inode tables, block maps  claims of blocks by inodes         inodes · blocks · xattrs
//!                               and multiply claimed blocks        multiply_claimed
//!   2 directory blocks          references from names to inodes    entries · htree
//!   3 directories               reachable from the root?           connectivity
//!   4 link counts               equal to the names?                counts
//!   5 bitmaps and counters      equal to the result of 0 to 2?     counts · quota
//! ```
//! Law 1: threads share the work of passes 1 and 2. They share only bit sets, one word per inode,
//! and the problem log. The verdict does not depend on their order; of files that share an indirect
//! block, the first one gets more details.
//! Law 2: an indirect or directory block is walked once, however many pointers it has. Repeated
//! claims are counted up to a multiple of all blocks. Time and memory follow the size of the disk.
//! Law 3: a checksum is verified once, at first use. A block with a wrong checksum is still
//! checked; each wrong checksum is a problem of its own.
//! Law 4: a volume whose journal needs recovery is checked as it will be after replay.
//! Law 5: scattered blocks are prefetched together (`prefetch`).
//! Law 6: the verdict is that of `e2fsck -fn`, found out by watching it.

pub(crate) mod bit_set;
pub(crate) mod blocks;
mod connectivity;
pub(crate) mod counts;
pub(crate) mod entries;
mod htree;
pub(crate) mod inode_states;
pub(crate) mod inodes;
pub(crate) mod layout;
mod multiply_claimed;
mod orphans;
mod places;
mod preen;
mod prefetch;
mod problem;
mod quota;
pub(crate) mod raw_inode;
pub(crate) mod xattrs;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use draconis_device::Disk;
use draconis_types::PrivateBuffer;
use draconis_types::lock::Mutex;

use crate::blocks::BlockStore;
use crate::blocks::role::Role as BlockRole;
use crate::blocks::uncached::read_raw_superblock;
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::superblock::{self, RawSuperblock, Superblock};
use crate::format::witness::{self, Bit, Verdict};
use crate::journal;
use crate::options::OpenOptions;
use crate::units::saturating_usize;
use crate::volume::Volume;
use crate::{Error, FileId, FsBlock, InodeNumber, Result, SharedBytes};

use bit_set::AtomicBitSet;
use inode_states::InodeStates;
use layout::GroupLayout;
use problem::ProblemLog;
use xattrs::{EaInodeUse, XattrBlockRefs};

pub use problem::{Problem, Severity, What};

/// Features that change the layout of a valid volume, which the checker does not know.
const UNSUPPORTED_COMPATIBLE: Compatible =
    Compatible::LAZY_BG.union(Compatible::EXCLUDE_INODE).union(Compatible::EXCLUDE_BITMAP);
/// Revisits of blocks allowed on a volume of any size.
const MAX_REVISITS: u64 = 1 << 20;
/// Inodes with a wrong checksum of which all bits are tried; a table of others' inodes has many.
const MAX_MENDED_INODES: u64 = 256;
const KNOWN_COMPATIBLE: u32 = (1 << 13) - 1;

/// Options of a check.
#[derive(Clone, Copy, Debug)]
pub struct CheckOptions {
    /// Number of threads.
    pub threads: usize,
    /// Problems kept; further ones are only counted.
    pub max_problems: usize,
    /// Bytes of the metadata cache.
    pub cache_bytes: u64,
}

impl Default for CheckOptions {
    fn default() -> Self {
        Self { threads: 2, max_problems: 10_000, cache_bytes: 4 << 20 }
    }
}

/// Result of a check.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Problems, in the order of the passes.
    pub problems: Vec<Problem>,
    /// Problems beyond the limit of `problems`.
    pub suppressed: u64,
    /// True if the check completed all passes.
    pub complete: bool,
    /// True if the journal was replayed in memory for the check.
    pub replayed: bool,
    /// Label of the volume.
    pub label: Vec<u8>,
    /// Inodes in use, reserved ones included, as found.
    pub used_inodes: u64,
    /// Inodes of the volume.
    pub inodes: u64,
    /// Directories found.
    pub directories: u64,
    /// Blocks in use, as found.
    pub used_blocks: u64,
    /// Blocks of the volume.
    pub blocks: u64,
    damaged: bool,
}

impl Report {
    /// Returns true if `e2fsck -fn` would exit with status 0.
    pub fn is_clean(&self) -> bool {
        !self.damaged
    }
}

/// Callback for progress: bytes done, and bytes in total. Called by several threads.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// State shared by all passes.
pub(crate) struct Check<'a> {
    disk: &'a dyn Disk,
    /// True if the disk is read with the journal applied.
    replayed: bool,
    pub(crate) raw: RawSuperblock,
    pub(crate) super_: Superblock,
    store: BlockStore,
    options: CheckOptions,
    progress: Progress<'a>,
    done: AtomicU64,
    problems: ProblemLog,
    pub(crate) groups: Vec<GroupLayout>,
    /// Metadata blocks of the volume, from the first data block on.
    pub(crate) metadata: AtomicBitSet,
    /// Claimed clusters.
    pub(crate) used: AtomicBitSet,
    /// Clusters claimed more than once.
    pub(crate) multiply_claimed: AtomicBitSet,
    /// Repeated claims, visits and list entries of blocks.
    revisits: AtomicU64,
    /// State of each inode.
    pub(crate) inode_states: InodeStates,
    /// Inodes on the orphan list of the superblock.
    orphans: HashSet<u32>,
    directories: Mutex<Vec<u32>>,
    /// Inodes of the directories.
    directory_inodes: prefetch::DirectoryInodeCache,
    /// Buffers of finished requests; a few per thread.
    buffers: Mutex<Vec<PrivateBuffer>>,
    /// References to each xattr block.
    xattr_blocks: Mutex<HashMap<u64, XattrBlockRefs>>,
    /// Encryption contexts of encrypted inodes.
    policies: Mutex<HashMap<u32, Vec<u8>>>,
    /// Usage of users, groups and projects.
    usage: Mutex<[quota::UsageById; 3]>,
    /// References from attributes to EA inodes.
    values: Mutex<Vec<EaInodeUse>>,
    /// Files with the flag of EA inodes.
    flagged_values: Mutex<BTreeSet<u32>>,
    /// Inodes with a wrong checksum of which all bits may still be tried.
    mends_left: AtomicU64,
    /// Features that inodes need and the superblock does not have.
    missing_features: Mutex<BTreeSet<String>>,
    /// True after all passes: all that is in use is known.
    pub(crate) is_complete: bool,
}

/// Checks the volume on `disk`, which must not be written meanwhile.
///
/// # Errors
/// [`Error::NotExt`]; [`Error::Unsupported`] naming a feature that cannot be checked;
/// [`Error::Io`]. Damage is no error.
pub fn check(
    disk: &Arc<dyn Disk>,
    options: CheckOptions,
    progress: Progress<'_>,
) -> Result<Report> {
    let raw = read_raw_superblock(&**disk)?;
    let Some(super_) = raw.check().ok().filter(Superblock::needs_recovery) else {
        return check_in_place(disk, raw, false, options, progress);
    };
    let recovered = journal::open_replayed(disk.clone(), &super_)?;
    let raw = read_raw_superblock(&*recovered.disk)?;
    let mut report = check_in_place(&recovered.disk, raw, true, options, progress)?;
    if let Some(Error::Corrupt { what, block, .. }) = recovered.damage {
        let kind = if what == journal::COPY_CHECKSUM { What::JournalCopy } else { What::Journal };
        let complaint = Problem::new(kind).name(what.as_bytes());
        report.problems.insert(0, Problem { block, ..complaint });
        report.damaged = true;
    }
    Ok(report)
}

/// Checks a volume whose journal needs no replay.
fn check_in_place(
    disk: &Arc<dyn Disk>,
    raw: RawSuperblock,
    replayed: bool,
    options: CheckOptions,
    progress: Progress<'_>,
) -> Result<Report> {
    examine(disk, raw, replayed, options, progress).map(|(report, _)| report)
}

/// Damage of pass 0 after which the others go on: they find out what the bitmaps should say.
const MISPLACED_BITMAPS: [What; 2] = [What::GroupBlockBitmap, What::GroupInodeBitmap];

/// Pass 0: the superblock and the places of all structures.
pub(crate) struct Pass0<'a> {
    /// What the superblock says.
    report: Report,
    /// `None` if the superblock is damaged.
    pub(crate) check: Option<Check<'a>>,
    is_damaged: bool,
}

/// Options of a check of pass 0 alone.
pub(crate) const SMALL_CHECK: CheckOptions =
    CheckOptions { threads: 1, max_problems: 10_000, cache_bytes: 1 << 20 };

/// Returns the problems of pass 0, and whether the superblock alone is sound. Without any problem,
/// the root directory can be read.
///
/// # Errors
/// As [`check()`].
pub(crate) fn examine_layout(
    disk: &Arc<dyn Disk>,
    raw: RawSuperblock,
) -> Result<(Vec<Problem>, bool)> {
    let Pass0 { report, check, .. } = check_layout(disk, raw, false, SMALL_CHECK, &|_, _| {})?;
    let Some(check) = check else { return Ok((report.problems, false)) };
    let mut problems = check.take_problems();
    problems.retain(|it| it.what.severity() == Severity::Damage);
    if problems.is_empty() {
        let small_caches = OpenOptions { data_cache_bytes: 1 << 20, ..OpenOptions::default() };
        let volume = Volume::open_unreplayed(disk.clone(), small_caches, check.super_.clone());
        if volume.quick_check().is_some() {
            problems.push(Problem::new(What::RootMissing).inode(2));
        }
    }
    Ok((problems, true))
}

pub(crate) fn check_layout<'a>(
    disk: &'a Arc<dyn Disk>,
    raw: RawSuperblock,
    replayed: bool,
    options: CheckOptions,
    progress: Progress<'a>,
) -> Result<Pass0<'a>> {
    let ended = |report| Pass0 { report, check: None, is_damaged: true };
    let log = ProblemLog::new(options.max_problems);
    let super_ = match raw.check_lenient() {
        Ok(super_) => super_,
        Err(Error::Corrupt { what, .. }) => {
            log.add(match what {
                superblock::WRONG_CHECKSUM => Problem::new(What::SuperblockChecksum),
                field => Problem::new(What::Superblock).name(field.as_bytes()),
            });
            return Ok(ended(build_report(&log, Report::default())));
        }
        Err(other) => return Err(other),
    };
    check_supported(&super_)?;
    let empty = Report {
        label: super_.label.clone(),
        inodes: u64::from(super_.inodes),
        blocks: super_.blocks,
        replayed,
        ..Report::default()
    };
    layout::check_superblock(&raw, &super_, disk.properties().len_bytes, &log);
    if log.is_damaged() {
        return Ok(ended(build_report(&log, empty)));
    }
    let in_groups = super_.blocks.saturating_sub(u64::from(super_.first_data_block));
    let clusters = in_groups.div_ceil(super_.cluster_blocks.max(1).into());
    let mut check = Check {
        disk: &**disk,
        replayed,
        store: BlockStore::new(disk.clone(), super_.block_bytes, options.cache_bytes, 0)
            .with_small_pieces(prefetch::MAX_IN_FLIGHT_BYTES),
        options,
        progress,
        done: AtomicU64::new(0),
        problems: log,
        groups: Vec::new(),
        metadata: AtomicBitSet::new(in_groups),
        used: AtomicBitSet::new(clusters),
        multiply_claimed: AtomicBitSet::new(clusters),
        revisits: AtomicU64::new(0),
        inode_states: InodeStates::new(super_.inodes),
        orphans: HashSet::new(),
        directories: Mutex::default(),
        directory_inodes: prefetch::DirectoryInodeCache::default(),
        buffers: Mutex::default(),
        xattr_blocks: Mutex::default(),
        policies: Mutex::default(),
        usage: Mutex::default(),
        values: Mutex::default(),
        flagged_values: Mutex::default(),
        mends_left: AtomicU64::new(MAX_MENDED_INODES),
        missing_features: Mutex::default(),
        is_complete: false,
        raw,
        super_,
    };
    let unsealed;
    (check.groups, unsealed) = layout::read_group_layouts(&check)?;
    check.check_place_of_root()?;
    let is_damaged = check.problems.is_damaged_beside(&MISPLACED_BITMAPS);
    for group in unsealed {
        check.problems.add(Problem::new(What::GroupChecksum).group(group));
    }
    Ok(Pass0 { report: empty, check: Some(check), is_damaged })
}

/// [`check()`] of a volume whose journal needs no replay, with all that it found out; without that,
/// the check ended with the superblock.
pub(crate) fn examine<'a>(
    disk: &'a Arc<dyn Disk>,
    raw: RawSuperblock,
    replayed: bool,
    options: CheckOptions,
    progress: Progress<'a>,
) -> Result<(Report, Option<Check<'a>>)> {
    let Pass0 { report: empty, check, is_damaged } =
        check_layout(disk, raw, replayed, options, progress)?;
    let Some(mut check) = check else { return Ok((empty, None)) };
    if is_damaged {
        return Ok((build_report(&check.problems, empty), Some(check)));
    }
    let unwritten = layout::uninit_metadata_clusters(&check);
    orphans::check_orphan_list(&check);
    check.orphans = orphans::read_orphan_list(&check)?;
    let in_file = orphans::check_orphan_file(&check)?;
    if check.replayed {
        check.orphans.extend(in_file);
    }
    inodes::check_inode_tables(&check)?;
    let directories = check.sorted_directories();
    multiply_claimed::report_multiply_claimed(&check)?;
    xattrs::check_xattr_block_references(&check)?;
    xattrs::check_ea_inodes(&check)?;
    let parents = entries::check_directories(&check, &directories)?;
    xattrs::check_named_ea_inodes(&check)?;
    for feature in std::mem::take(&mut *check.missing_features.lock()) {
        check.problems.add(Problem::new(What::FeatureLost).name(feature.as_bytes()));
    }
    prefetch::prefetch_bitmaps(&check, 0);
    let connected = connectivity::check_connectivity(&check, &parents);
    counts::check_link_counts(&check, &connected)?;
    let (used_inodes, used_blocks) = counts::check_bitmaps(&check, &unwritten)?;
    quota::compare_usage(&check)?;
    check.is_complete = true;
    let directories = directories.len() as u64;
    let full = Report { complete: true, used_inodes, used_blocks, directories, ..empty };
    Ok((build_report(&check.problems, full), Some(check)))
}

fn build_report(log: &ProblemLog, report: Report) -> Report {
    let kept = log.take();
    Report { problems: kept.list, suppressed: kept.suppressed, damaged: kept.damaged, ..report }
}

fn check_supported(super_: &Superblock) -> Result<()> {
    let missing = super_.incompatible.difference(Incompatible::CHECKABLE | Incompatible::RECOVER);
    if !missing.is_empty() {
        let feature = format!("needs: {}", missing.names().join(", "));
        return Err(Error::Unsupported { feature });
    }
    let unknown = super_.compatible.bits() & !KNOWN_COMPATIBLE;
    let compatible =
        super_.compatible & (UNSUPPORTED_COMPATIBLE | Compatible::from_bits_retain(unknown));
    let read_only = super_.read_only_compatible.difference(ReadOnlyCompatible::CHECKABLE);
    let mut names = compatible.names();
    names.extend(read_only.names());
    let journal = super_.compatible.contains(Compatible::HAS_JOURNAL);
    if let Some(device) = super_.external_journal().filter(|_| journal && super_.journal.is_none())
    {
        names.push(format!("external journal ({device}), which e2fsck -j JOURNAL takes"));
    }
    let both = Incompatible::CASEFOLD | Incompatible::ENCRYPT;
    if super_.incompatible.contains(both) {
        names.push("casefold with encrypt".to_owned());
    }
    if names.is_empty() {
        return Ok(());
    }
    Err(Error::Unsupported { feature: format!("needs: {}", names.join(", ")) })
}

impl Check<'_> {
    /// Returns the problems found until now.
    pub(crate) fn take_problems(&self) -> Vec<Problem> {
        self.problems.take().list
    }

    /// Returns the file's id for block roles; its generation is unused: it verifies nothing.
    pub(crate) fn file_id(inode: u32) -> FileId {
        FileId { inode, generation: 0 }
    }

    /// Counts a revisit of a block and returns true below the limit. A small extent can claim many
    /// blocks, so revisits are limited.
    fn count_revisit(&self) -> bool {
        let most = self.used.len().saturating_mul(4).saturating_add(MAX_REVISITS);
        self.revisits.fetch_add(1, Ordering::Relaxed) < most
    }

    /// Returns the index of a block's cluster in the cluster sets.
    pub(crate) fn cluster_index(&self, block: u64) -> u64 {
        self.block_index(block).checked_div(self.super_.cluster_blocks.into()).unwrap_or(0)
    }

    /// Returns true if the inode was an orphan at unmount. Recovery deletes or truncates it, and
    /// until then it is in use.
    fn is_orphan(&self, number: u32) -> bool {
        self.replayed && self.orphans.contains(&number)
    }

    /// Hears the witnesses of how the contents of an inode are stored.
    pub(crate) fn form(&self, slot: &[u8]) -> Option<Verdict> {
        witness::judge(slot, self.super_.incompatible, self.super_.blocks)
    }

    /// Returns the bit that makes the checksum of an inode right, for the first inodes that ask.
    fn mended_bit(&self, slot: &[u8], number: InodeNumber) -> Option<Bit> {
        self.mends_left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
            .ok()?;
        witness::mend_inode(slot, number, &self.super_).map(|(bit, _)| bit)
    }

    /// Remembers features that the superblock lost.
    fn note_missing(&self, features: Incompatible) {
        if !features.is_empty() {
            self.missing_features.lock().extend(features.names());
        }
    }

    /// Returns true if `number` is a quota inode.
    fn is_quota_inode(&self, number: u32) -> bool {
        self.super_.read_only_compatible.contains(ReadOnlyCompatible::QUOTA)
            && number != 0
            && self.super_.quotas.contains(&number)
    }

    /// Visits the clusters that the bitmaps call used.
    pub(crate) fn visit_bits_in_use(&self, visit: &mut dyn FnMut(u64)) {
        let per_group = u64::from(self.super_.clusters_per_group());
        for (nth, place) in (0u64..).zip(&self.groups) {
            let readable = self.is_valid_block(place.block_bitmap) && !place.blocks_unwritten;
            let bitmap = readable.then(|| self.block(place.block_bitmap, BlockRole::Contents));
            let Some(Ok(bytes)) = bitmap else { continue };
            let first = nth.saturating_mul(per_group);
            let used = (0..per_group).filter(|bit| {
                bytes.get(saturating_usize(bit / 8)).is_some_and(|byte| byte >> (bit % 8) & 1 != 0)
            });
            used.for_each(|bit| visit(first.saturating_add(bit)));
        }
    }

    /// Returns the index of a block in the block sets.
    pub(crate) fn block_index(&self, block: u64) -> u64 {
        block.wrapping_sub(u64::from(self.super_.first_data_block))
    }

    /// Returns true if `block` is a valid block number.
    pub(crate) fn is_valid_block(&self, block: u64) -> bool {
        (u64::from(self.super_.first_data_block)..self.super_.blocks).contains(&block)
    }

    fn block(&self, block: u64, role: BlockRole) -> Result<SharedBytes> {
        self.store.block(FsBlock(block), role)
    }

    /// Returns the directories found, without orphans: these hold no names, and their `..` does not
    /// count.
    fn sorted_directories(&self) -> Vec<u32> {
        let mut list = std::mem::take(&mut *self.directories.lock());
        list.retain(|dir| !self.is_orphan(*dir));
        list.sort_unstable();
        list
    }

    /// Reports `bytes` of finished work.
    fn advance(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let tables = u64::from(self.super_.inode_table_blocks())
            .saturating_mul(u64::from(self.super_.groups))
            .saturating_mul(u64::from(self.super_.block_bytes));
        (self.progress)(done, tables);
    }

    /// Runs `work` on each number below `count` on all threads; ends at the first error.
    fn run_parallel(&self, count: usize, work: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
        let next = AtomicU64::new(0);
        let run = || -> Result<()> {
            loop {
                let nth = next.fetch_add(1, Ordering::Relaxed);
                if nth >= count as u64 {
                    return Ok(());
                }
                if let Err(error) = work(saturating_usize(nth)) {
                    next.store(count as u64, Ordering::Relaxed);
                    return Err(error);
                }
            }
        };
        let helpers = self.options.threads.saturating_sub(1).min(count.saturating_sub(1));
        std::thread::scope(|scope| {
            let helpers: Vec<_> = (0..helpers).map(|_| scope.spawn(run)).collect();
            let mine = run();
            let theirs = helpers.into_iter().map(|helper| match helper.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            theirs.fold(mine, |all, one| all.and(one))
        })
    }
}
