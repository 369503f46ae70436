//! A full check of a volume that changes nothing.
//!
//! ```text
//!   0 superblock, groups        where everything is                layout · orphans
//!   1 inode tables, block maps  which inode claims which block     inodes · blocks · attributes
//!                               and where two claim one            twice
//!   2 directory blocks          which directory names which inode  entries · tree
//!   3 directories               reached from the root?             connect
//!   4 link counts               as many as names?                  counts
//!   5 bitmaps and counters      as passes 0 to 2 found them?       counts · quota
//! ```
//! Law 1: passes 1 and 2 share their work among threads and share nothing but sets of
//! bits, a word for each inode, and the list of complaints. The verdict does not depend on
//! which came first; of files that share an indirect block, the first to come tells more.
//! Law 2: an indirect block is walked once, however many point to it; so is a directory block.
//! Blocks that are claimed once more are counted, and no further than a multiple of all there are.
//! Time and memory follow the size of the disk, whatever it holds.
//! Law 3: what a checksum seals is verified once, where it is first looked at; it is looked at
//! whether its checksum is right or not, and each wrong one is a complaint of its own.
//! Law 4: a volume whose journal needs recovery is checked as it will be after that.
//! Law 5: scattered blocks are asked for together before they are looked at (`ahead`).
//! Law 6: the verdict is that of `e2fsck -fn`, found out by watching it.

mod ahead;
mod attributes;
mod bits;
mod blocks;
mod complaint;
mod connect;
mod counts;
mod entries;
mod inodes;
mod layout;
mod notes;
mod orphans;
mod preen;
mod quota;
mod tree;
mod twice;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use draconis_device::{Disk, Extent};
use draconis_exchange::heap::{Block, Private};

use crate::blocks::Store;
use crate::blocks::role::Role as BlockRole;
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::superblock::{self, RawSuperblock, Superblock};
use crate::journal;
use crate::units::index;
use crate::{Data, Error, FileId, FsBlock, Result};

use attributes::{Shared, Value};
use bits::Bits;
use complaint::Log;
use layout::GroupPlaces;
use notes::Notes;

pub use complaint::{Complaint, Severity, What};

/// Features that change what a sound volume looks like, beyond what is looked at here.
const UNCHECKED: Compatible =
    Compatible::LAZY_BG.union(Compatible::EXCLUDE_INODE).union(Compatible::EXCLUDE_BITMAP);
/// How often blocks are come by another time on a volume of any size.
const MOST_AGAIN: u64 = 1 << 20;
const KNOWN_COMPATIBLE: u32 = (1 << 13) - 1;

/// How a volume is checked.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads that share the work.
    pub threads: usize,
    /// Complaints that are kept; more are only counted.
    pub most: usize,
    /// Bytes of metadata kept in memory.
    pub cache_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { threads: 2, most: 10_000, cache_bytes: 4 << 20 }
    }
}

/// What a check found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// What is wrong, pass by pass.
    pub complaints: Vec<Complaint>,
    /// How much more was wrong than `complaints` has room for.
    pub more: u64,
    /// Whether the check went through all passes.
    pub complete: bool,
    /// Whether what the journal holds was read as if it were in place.
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
    /// Whether `e2fsck -fn` would end with status 0.
    pub fn is_clean(&self) -> bool {
        !self.damaged
    }
}

/// How far a check is: what is done, and of how much. Called by several threads.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// What all passes share.
struct Check<'a> {
    disk: &'a dyn Disk,
    /// The journal is read as if it were in place.
    replayed: bool,
    raw: RawSuperblock,
    super_: Superblock,
    store: Store,
    options: Options,
    progress: Progress<'a>,
    done: AtomicU64,
    log: Log,
    groups: Vec<GroupPlaces>,
    /// Blocks of the volume's own structures, from the first data block on.
    metadata: Bits,
    /// Clusters that something claims.
    used: Bits,
    /// Clusters that are claimed again.
    twice: Bits,
    /// Blocks that were claimed, looked at or listed another time.
    again: AtomicU64,
    /// What is known of each inode.
    notes: Notes,
    /// Inodes on the list that the superblock begins.
    orphans: HashSet<u32>,
    directories: Mutex<Vec<u32>>,
    /// Their inodes.
    kept: ahead::Kept,
    /// Memory of requests that are done; a few for each thread.
    buffers: Mutex<Vec<Private>>,
    /// How often each block of attributes is referred to.
    attribute_blocks: Mutex<HashMap<u64, Shared>>,
    /// How encrypted inodes are.
    policies: Mutex<HashMap<u32, Vec<u8>>>,
    /// What users, groups and projects use.
    usage: Mutex<[quota::Usage; 3]>,
    /// Which attributes have values in inodes of their own.
    values: Mutex<Vec<Value>>,
}

/// Checks the volume on `disk`. It must not be written meanwhile.
///
/// # Errors
/// [`Error::NotExt`]; [`Error::Unsupported`] naming what the volume needs that cannot be
/// checked; [`Error::Io`]. Damage is no error.
pub fn check(disk: &Arc<dyn Disk>, options: Options, progress: Progress<'_>) -> Result<Report> {
    let raw = read_superblock(&**disk)?;
    let Some(super_) = raw.check().ok().filter(Superblock::needs_recovery) else {
        return check_in_place(disk, raw, false, options, progress);
    };
    let recovered = journal::replayed(disk.clone(), &super_)?;
    let raw = read_superblock(&*recovered.disk)?;
    let mut report = check_in_place(&recovered.disk, raw, true, options, progress)?;
    if let Some(Error::Corrupt { what, block, .. }) = recovered.damage {
        let complaint = Complaint::new(What::Journal).name(what.as_bytes());
        report.complaints.insert(0, Complaint { block, ..complaint });
        report.damaged = true;
    }
    Ok(report)
}

/// Checks a volume whose blocks are all where `disk` says.
fn check_in_place(
    disk: &Arc<dyn Disk>,
    raw: RawSuperblock,
    replayed: bool,
    options: Options,
    progress: Progress<'_>,
) -> Result<Report> {
    let log = Log::new(options.most);
    let super_ = match raw.understand() {
        Ok(super_) => super_,
        Err(Error::Corrupt { what, .. }) => {
            log.add(match what {
                superblock::WRONG_CHECKSUM => Complaint::new(What::SuperblockChecksum),
                field => Complaint::new(What::Superblock).name(field.as_bytes()),
            });
            return Ok(report(log, Report::default()));
        }
        Err(other) => return Err(other),
    };
    refuse_what_is_unchecked(&super_)?;
    let empty = Report {
        label: super_.label.clone(),
        inodes: u64::from(super_.inodes),
        blocks: super_.blocks,
        replayed,
        ..Report::default()
    };
    layout::superblock(&raw, &super_, disk.properties().len_bytes, &log);
    if log.is_damaged() {
        return Ok(report(log, empty));
    }
    let in_groups = super_.blocks.saturating_sub(u64::from(super_.first_data_block));
    let clusters = in_groups.div_ceil(super_.cluster_blocks.max(1).into());
    let mut check = Check {
        disk: &**disk,
        replayed,
        store: Store::new(disk.clone(), super_.block_bytes, options.cache_bytes, 0)
            .of_blocks(ahead::UNDER_WAY_BYTES),
        options,
        progress,
        done: AtomicU64::new(0),
        log,
        groups: Vec::new(),
        metadata: Bits::new(in_groups),
        used: Bits::new(clusters),
        twice: Bits::new(clusters),
        again: AtomicU64::new(0),
        notes: Notes::new(super_.inodes),
        orphans: HashSet::new(),
        directories: Mutex::default(),
        kept: ahead::Kept::default(),
        buffers: Mutex::default(),
        attribute_blocks: Mutex::default(),
        policies: Mutex::default(),
        usage: Mutex::default(),
        values: Mutex::default(),
        raw,
        super_,
    };
    let unsealed;
    (check.groups, unsealed) = layout::groups(&check)?;
    let is_damaged = check.log.is_damaged();
    for group in unsealed {
        check.log.add(Complaint::new(What::GroupChecksum).group(group));
    }
    if is_damaged {
        return Ok(report(check.log, empty));
    }
    let unwritten = layout::unwritten(&check);
    check.orphans = orphans::listed(&check)?;
    let in_file = orphans::file(&check)?;
    if check.replayed {
        check.orphans.extend(in_file);
    }
    inodes::tables(&check)?;
    let directories = check.sorted_directories();
    twice::name_twice(&check)?;
    attributes::references(&check)?;
    attributes::values(&check)?;
    let parents = entries::directories(&check, &directories)?;
    let connected = connect::directories(&check, &parents);
    counts::links(&check, &connected)?;
    let (used_inodes, used_blocks) = counts::bitmaps(&check, &unwritten)?;
    quota::compare(&check)?;
    let directories = directories.len() as u64;
    let full = Report { complete: true, used_inodes, used_blocks, directories, ..empty };
    Ok(report(check.log, full))
}

fn report(log: Log, report: Report) -> Report {
    let kept = log.into_kept();
    Report { complaints: kept.list, more: kept.more, damaged: kept.damaged, ..report }
}

fn read_superblock(disk: &dyn Disk) -> Result<RawSuperblock> {
    let properties = disk.properties();
    let sector = u64::from(properties.sector_bytes.max(1));
    let end = superblock::OFFSET_BYTES.saturating_add(superblock::LEN_BYTES as u64);
    let len = end.checked_next_multiple_of(sector).unwrap_or(end);
    if len > properties.len_bytes {
        return Err(Error::NotExt);
    }
    let read = disk.read_now(Extent::new(0, len), Block::private(index(len)));
    let bytes = read.map_err(|refused| Error::Io(refused.error))?.into_private();
    let at = index(superblock::OFFSET_BYTES);
    RawSuperblock::view(bytes.get(at..).unwrap_or_default()).cloned()
}

fn refuse_what_is_unchecked(super_: &Superblock) -> Result<()> {
    let missing = super_.incompatible.difference(Incompatible::CHECKABLE | Incompatible::RECOVER);
    if !missing.is_empty() {
        let feature = format!("needs: {}", missing.names().join(", "));
        return Err(Error::Unsupported { feature });
    }
    let unknown = super_.compatible.bits() & !KNOWN_COMPATIBLE;
    let compatible = super_.compatible & (UNCHECKED | Compatible::from_bits_retain(unknown));
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
    /// The role of what belongs to a file needs no generation here: nothing is verified by it.
    fn file(inode: u32) -> FileId {
        FileId { inode, generation: 0 }
    }

    /// Notes that a block was come by another time. An extent of few bytes claims many blocks, so
    /// this is done only so often; whether it may be done again.
    fn once_more(&self) -> bool {
        let most = self.used.len().saturating_mul(4).saturating_add(MOST_AGAIN);
        self.again.fetch_add(1, Ordering::Relaxed) < most
    }

    /// The place of the cluster of a block in the sets of clusters.
    fn cluster(&self, block: u64) -> u64 {
        self.nth(block).checked_div(self.super_.cluster_blocks.into()).unwrap_or(0)
    }

    /// Whether an inode was in use without a name, or about to be cut short, when the volume was
    /// left: who recovers it goes on with that, and until then it is in use.
    fn is_pending(&self, number: u32) -> bool {
        self.replayed && self.orphans.contains(&number)
    }

    /// Whether `number` is the inode of a quota.
    fn is_quota(&self, number: u32) -> bool {
        self.super_.read_only_compatible.contains(ReadOnlyCompatible::QUOTA)
            && number != 0
            && self.super_.quotas.contains(&number)
    }

    /// The place of a block in the sets of blocks.
    fn nth(&self, block: u64) -> u64 {
        block.wrapping_sub(u64::from(self.super_.first_data_block))
    }

    /// Whether a pointer may say `block`.
    fn holds(&self, block: u64) -> bool {
        (u64::from(self.super_.first_data_block)..self.super_.blocks).contains(&block)
    }

    fn block(&self, block: u64, role: BlockRole) -> Result<Data> {
        self.store.block(FsBlock(block), role)
    }

    /// The directories that were found, but for those that are about to be deleted: they hold no
    /// names, and their `..` does not count.
    fn sorted_directories(&self) -> Vec<u32> {
        let mut list =
            std::mem::take(&mut *self.directories.lock().unwrap_or_else(PoisonError::into_inner));
        list.retain(|dir| !self.is_pending(*dir));
        list.sort_unstable();
        list
    }

    /// Counts `bytes` of work.
    fn advance(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let tables = u64::from(self.super_.inode_table_blocks())
            .saturating_mul(u64::from(self.super_.groups))
            .saturating_mul(u64::from(self.super_.block_bytes));
        (self.progress)(done, tables);
    }

    /// Runs `work` on each number below `count`, shared among the threads; ends at the
    /// first error.
    fn share(&self, count: usize, work: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
        let next = AtomicU64::new(0);
        let run = || -> Result<()> {
            loop {
                let nth = next.fetch_add(1, Ordering::Relaxed);
                if nth >= count as u64 {
                    return Ok(());
                }
                if let Err(error) = work(index(nth)) {
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
