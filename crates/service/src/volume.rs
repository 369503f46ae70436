//! Adapter of a volume of the `ext` library to the contracts.
//!
//! The library and the contracts do not know each other; this module connects them. It is also the
//! one place where an option becomes a cache size and a partition becomes a disk.

mod change_fanout;
mod directory;
mod file;
mod locate;

pub use file::VolumeFile;
pub use locate::{
    LocatedVolume, describe_deleted, locate_for_writing, locate_volume, open_for_reading,
    refuse_other_contents,
};

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use draconis_container::{
    Format, SessionDisk,
    signature::{DetectedContent, RaidMember},
};
use draconis_device::{Atomic, Disk, PartitionError, Properties};
use draconis_exchange::channel::Server;
use draconis_exchange::contract::file::File;
use draconis_exchange::contract::tree::Tree;
use draconis_ext::{
    ChangeRecorder, CrashedProcess, InodeNumber, MmpClaim, MmpClaimOptions, OpenOptions, Volume,
    WriteOptions,
};
use draconis_types::{AccessTimes, Attributes, FileType, Node, Refusal, StatFs, Time};

use crate::options::MountOptions;
use crate::protocol::{CacheStatus, WorkerStatus};
use change_fanout::ChangeFanout;

/// Reason why a volume that is marked as damaged is not written.
const DAMAGED_NOTE: &str = "the volume says that it is damaged; run e2fsck on it, or mount it with \
    errors=continue";

/// Timeout for claiming an MMP volume, a little shorter than the keeper's timeout for a worker to
/// open a volume.
const MMP_CLAIM_TIMEOUT: Duration = Duration::from_secs(50);

/// Reasons why a volume was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The options are invalid.
    #[error("{0}")]
    Options(String),
    /// The partition was not found.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// The offset is out of range.
    #[error(transparent)]
    Offset(#[from] draconis_device::Error),
    /// No partition can be chosen automatically.
    #[error("{0}")]
    Partitions(String),
    /// The disk image cannot be read.
    #[error(transparent)]
    Container(#[from] draconis_container::Error),
    /// The disk image cannot be written.
    #[error("a {} image is only read; {} makes one that can be changed", .0.name(), .0.conversion_help())]
    ReadOnlyFormat(Format),
    /// A member of a RAID is not written unless told.
    #[error(transparent)]
    RaidMember(#[from] RaidMember),
    /// The disk contains something else.
    #[error("not an ext volume; it holds {}, and {}", .0.what, .0.help)]
    NotAVolume(DetectedContent),
    /// The length of the image's file could not be determined.
    #[error("the length of the image: {0}")]
    Length(#[source] std::io::Error),
    /// The disk service did not answer.
    #[error("the volume cannot be written: {0}")]
    Disk(#[source] draconis_device::Error),
    /// The file system could not be opened.
    #[error(transparent)]
    Ext(#[from] draconis_ext::Error),
}

impl OpenError {
    /// Returns the error code for the contracts.
    pub fn refusal(&self) -> Refusal {
        match self {
            Self::Disk(_) | Self::Length(_) => Refusal::Gone,
            Self::Ext(error) => error.refusal(),
            _ => Refusal::Invalid,
        }
    }
}

/// Opens for reading the volume on `disk` that `options` select. `behind` are the backing files of
/// a disk image.
///
/// # Errors
/// See [`OpenError`].
pub fn open(
    disk: Arc<dyn Disk>,
    behind: &[Arc<dyn Disk>],
    options: &MountOptions,
) -> Result<VolumeTree, OpenError> {
    let LocatedVolume { disk, uses_backup_gpt, deleted, .. } =
        locate_volume(disk, behind, options)?;
    let mut tree = open_whole_disk(disk, options)?;
    tree.uses_backup_gpt = uses_backup_gpt;
    tree.notes = deleted.as_ref().map(describe_deleted).unwrap_or_default();
    Ok(tree)
}

/// Opens for reading a volume that is all of `disk`.
///
/// # Errors
/// See [`OpenError`].
pub fn open_whole_disk(
    disk: Arc<dyn Disk>,
    options: &MountOptions,
) -> Result<VolumeTree, OpenError> {
    let volume = open_for_reading(disk, cache_options(options))?;
    check_options(&volume, options)?;
    Ok(VolumeTree::new(volume, false, options))
}

/// Opens for a mount the volume on `disk` that `options` select, and claims an MMP volume. If it
/// must not be written, opens it for reading, with the reason in its notes. `crashed` is the state
/// of a previous worker.
///
/// # Errors
/// See [`OpenError`].
pub fn open_for_mount(
    disk: Arc<dyn Disk>,
    behind: &[Arc<dyn Disk>],
    options: &MountOptions,
    crashed: Option<CrashedProcess>,
) -> Result<VolumeTree, OpenError> {
    let (part, only_read) = locate::locate_for_mount(disk, behind, options)?;
    let is_of_backup = part.uses_backup_gpt;
    let mut tree = match only_read {
        None => open_located(part, options, crashed)?,
        Some(why) => {
            let mut tree = open_whole_disk(part.disk, options)?;
            tree.read_only_reason = Some(why.to_string());
            tree
        }
    };
    tree.uses_backup_gpt = is_of_backup;
    Ok(tree)
}

/// Opens for reading a volume whose changes ended with `failure` in an earlier worker, and which
/// cannot be opened for writing.
///
/// # Errors
/// See [`OpenError`].
pub(crate) fn open_after_failure(
    disk: Arc<dyn Disk>,
    backing_files: &[Arc<dyn Disk>],
    options: &MountOptions,
    failure: String,
) -> Result<VolumeTree, OpenError> {
    let mut tree = open(disk, backing_files, options)?;
    tree.earlier_failure = Some(failure);
    Ok(tree)
}

/// Returns true if a disk is in a store and allocates space on write: those disks are atomic.
fn is_in_store(disk: &Properties) -> bool {
    disk.discards && disk.atomic == Atomic::AgainstPowerCut
}

/// [`open_for_mount`] for a located volume that can be written.
fn open_located(
    part: LocatedVolume,
    options: &MountOptions,
    before: Option<CrashedProcess>,
) -> Result<VolumeTree, OpenError> {
    use draconis_ext::Error::{Corrupt, ReadOnly, Unsupported};
    let LocatedVolume { disk, image, .. } = part;
    let writing = WriteOptions {
        clock: Arc::new(current_time),
        dirty_bytes: options.dirty_bytes,
        atime: options.access_times,
        discard: options.discard.unwrap_or_else(|| is_in_store(&disk.properties())),
    };
    if !options.ignore_errors && before.is_none() {
        let mut tree = open_whole_disk(disk.clone(), options)?;
        if tree.volume.info().errors {
            tree.read_only_reason = Some(DAMAGED_NOTE.into());
            return Ok(tree);
        }
    }
    let how = MmpClaimOptions {
        now: current_time(),
        random: RandomState::new().build_hasher().finish() as u32,
        node: "draconis",
        wait: &std::thread::sleep,
        max_wait: MMP_CLAIM_TIMEOUT,
    };
    let claim = match before {
        None => MmpClaim::acquire(&disk, &how),
        Some(_) => MmpClaim::resume(&disk, &how),
    };
    let opened = claim.and_then(|claim| match before {
        None => Volume::open_with_claim(disk.clone(), cache_options(options), writing, claim),
        Some(before) => {
            Volume::resume_after_crash(disk.clone(), cache_options(options), writing, before, claim)
        }
    });
    match opened {
        Ok(volume) => {
            check_options(&volume, options)?;
            let mut tree = VolumeTree::new(volume, true, options);
            tree.image = image;
            Ok(tree)
        }
        // A volume that must not be written can often be read; if not, its error is returned.
        Err(why @ (ReadOnly | Unsupported { .. })) => {
            let mut tree =
                VolumeTree::new(Volume::open(disk, cache_options(options))?, false, options);
            if tree.volume.read_only_reason().is_none() {
                tree.read_only_reason = Some(why.to_string());
            }
            Ok(tree)
        }
        // A volume with a damaged journal can be read without it.
        Err(why @ Corrupt { .. }) => {
            let tree = open_whole_disk(disk, options)?;
            if tree.volume.journal_damage().is_some() { Ok(tree) } else { Err(why.into()) }
        }
        Err(other) => Err(locate::identify_contents(&*disk, other)),
    }
}

/// Refuses options that require a volume with other features.
fn check_options(volume: &Volume, options: &MountOptions) -> Result<(), OpenError> {
    let has_journal = volume.superblock().journal.is_some();
    if options.journal && !has_journal {
        let why = "mount option 'data' needs a journal, and the volume has none; leave it out, or \
                   add one with draconis tune -j";
        return Err(OpenError::Options(why.into()));
    }
    Ok(())
}

fn cache_options(options: &MountOptions) -> OpenOptions {
    OpenOptions {
        inode_cache: options.inode_cache as u64,
        block_map_cache: options.block_map_cache as u64,
        data_cache_bytes: options.data_cache_bytes,
        lists_dots: options.dots,
        ..OpenOptions::default()
    }
}

/// Returns the system's time, which may be before 1970.
fn current_time() -> Time {
    let of = |time: std::time::Duration| (time.as_secs() as i64, time.subsec_nanos());
    match SystemTime::now().duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => {
            let (seconds, nanoseconds) = of(after);
            Time { seconds, nanoseconds }
        }
        Err(before) => Time { seconds: -of(before.duration()).0 - 1, nanoseconds: 0 },
    }
}

/// An open volume behind the contracts. Nodes are inode numbers; [`Node::ROOT`] is an alias of the
/// root directory's.
pub struct VolumeTree {
    volume: Volume,
    change_fanout: Arc<ChangeFanout>,
    /// The disk image of the volume, if changing it requires closing a session.
    image: Option<Arc<dyn SessionDisk>>,
    /// True if it was opened for writing. Write access may end later, but reference counts of its
    /// nodes continue.
    opened_writable: bool,
    /// The reason why it was opened read-only although writing was requested.
    read_only_reason: Option<String>,
    /// The error that ended all changes in an earlier worker, if it also kept this one from opening
    /// the volume for writing.
    earlier_failure: Option<String>,
    /// True if it is in a partition of a backup GPT.
    uses_backup_gpt: bool,
    /// Notes for the user about deleted files.
    notes: Vec<String>,
    /// Which changes the options make durable.
    durable: SyncPolicy,
    /// True if the kernel checks permissions.
    kernel_checks_permissions: bool,
    /// True if the kernel may use its writeback cache.
    write_back: bool,
    /// True if FUSE threads sleep until a request arrives instead of busy-polling.
    no_polling: bool,
    /// True if new nodes get the group of their directory.
    directory_group: bool,
    /// True if `statfs` also counts blocks of metadata.
    minix_df: bool,
    /// True if listing a directory leaves its access time.
    no_directory_atime: bool,
    /// Damage found in the group descriptors and the root directory on opening.
    damage: Option<String>,
    /// Directories whose listings end with an error.
    damaged_directories: directory::DamagedDirectories,
}

/// Which changes are durable before their replies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SyncPolicy {
    /// Only explicit syncs.
    OnRequest,
    /// Every change of a directory.
    DirectoryChanges,
    /// Every change.
    All,
}

fn inode_of_node(node: Node) -> Result<InodeNumber, Refusal> {
    InodeNumber::from_node(node).ok_or(Refusal::NotFound)
}

fn log_and_get_refusal(error: draconis_ext::Error) -> Refusal {
    let why = error.refusal();
    if matches!(why, Refusal::Corrupt | Refusal::Io) {
        log::warn!("{error}");
    }
    why
}

impl VolumeTree {
    fn new(volume: Volume, writing: bool, options: &MountOptions) -> Self {
        let durable = match (options.sync, options.dir_sync) {
            (true, _) => SyncPolicy::All,
            (false, true) => SyncPolicy::DirectoryChanges,
            (false, false) => SyncPolicy::OnRequest,
        };
        let (kernel_checks_permissions, write_back) =
            (options.default_permissions, options.write_back);
        let (directory_group, minix_df) = (options.directory_group, options.minix_df);
        let read_only_reason = None;
        let damage = volume.quick_check().map(|error| error.to_string());
        let change_fanout = Arc::<ChangeFanout>::default();
        volume.set_change_recorder(change_fanout.clone());
        Self {
            volume,
            change_fanout,
            image: None,
            opened_writable: writing,
            read_only_reason,
            earlier_failure: None,
            uses_backup_gpt: false,
            notes: vec![],
            durable,
            kernel_checks_permissions,
            write_back,
            no_polling: options.no_polling,
            directory_group,
            minix_df,
            no_directory_atime: options.no_directory_atime,
            damage,
            damaged_directories: directory::DamagedDirectories::default(),
        }
    }

    /// Returns true if the kernel is to check permissions.
    pub fn kernel_checks_permissions(&self) -> bool {
        self.kernel_checks_permissions
    }

    /// Returns true if the kernel may use its writeback cache.
    pub fn uses_writeback_cache(&self) -> bool {
        self.write_back
    }

    /// Returns true if FUSE threads should sleep until a request arrives instead of busy-polling.
    pub fn is_polling_disabled(&self) -> bool {
        self.no_polling
    }

    /// Writes everything and marks the volume clean. Later changes are refused.
    ///
    /// # Errors
    /// The error that stopped writing, now or before, for the user.
    pub fn close(&self) -> Result<(), String> {
        if !self.opened_writable {
            return self.earlier_failure.clone().map_or(Ok(()), Err);
        }
        let closed = self.volume.close();
        match (self.failure(), closed) {
            (Some(why), _) => Err(why),
            (None, Err(error)) => Err(error.to_string()),
            (None, Ok(())) => match self.image.as_ref().map(|image| image.close_session()) {
                Some(Err(error)) => Err(error.to_string()),
                None | Some(Ok(())) => Ok(()),
            },
        }
    }

    /// Ends all changes as [`VolumeTree::close`] does, or allows them again, while the mount stays.
    ///
    /// # Errors
    /// The error that stopped writing; an error if the volume was opened for reading.
    pub fn set_read_only(&self, read_only: bool) -> Result<(), String> {
        if read_only {
            return self.close();
        }
        self.volume.reopen().map_err(|error| match self.failure() {
            Some(why) => why,
            None if !self.opened_writable => {
                "it was mounted read-only: unmount it and mount it again".into()
            }
            None => error.to_string(),
        })
    }

    /// Makes all changes durable.
    ///
    /// # Errors
    /// What stopped the volume's writing.
    pub fn sync(&self) -> Result<(), String> {
        if self.is_read_only() {
            return self.failure().map_or(Ok(()), Err);
        }
        self.volume.sync().map_err(|error| error.to_string())
    }

    /// Returns the library's volume, for operations that the contracts lack.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Passes every change from now on to `witness`. Only the first call has an effect.
    pub(crate) fn set_change_recorder(&self, witness: Arc<dyn ChangeRecorder>) {
        self.change_fanout.set_oplog(witness);
    }

    /// Returns true if the volume cannot be written.
    pub fn is_read_only(&self) -> bool {
        !self.volume.is_writable()
    }

    /// Returns the error that ended all changes.
    fn failure(&self) -> Option<String> {
        self.volume.failure().or_else(|| self.earlier_failure.clone())
    }

    /// Returns its figures for `draconis status`.
    pub fn status(&self) -> WorkerStatus {
        let all = self.volume.statistics();
        let cache = |name: &str, cache: draconis_ext::CacheStatistics| CacheStatus {
            name: name.to_string(),
            used: cache.used,
            capacity: cache.capacity,
            hits: cache.hits,
            misses: cache.misses,
            hit_rate: cache.hits as f64 / ((cache.hits + cache.misses) as f64).max(1.0),
        };
        WorkerStatus {
            device_reads: all.device.reads,
            device_read_bytes: all.device.bytes,
            caches: vec![
                cache("inode", all.inodes),
                cache("block_map", all.block_maps),
                cache("data", all.data),
            ],
            notes: self.status_notes(),
            failure: self.failure(),
            ..WorkerStatus::default()
        }
    }

    fn status_notes(&self) -> Vec<String> {
        let info = self.volume.info();
        let mut notes = self.notes.clone();
        if self.uses_backup_gpt {
            notes.push(locate::BACKUP_GPT_WARNING.to_owned());
        }
        if let Some(reason) = info.read_only_reason {
            notes.push(format!("read-only: {reason}"));
        } else if let Some(reason) = &self.read_only_reason {
            notes.push(format!("read-only: {reason}"));
        }
        if self.volume.needs_preen() {
            let note = "the volume has no journal and was not unmounted: e2fsck -p repairs what a \
                        power cut left";
            notes.push(note.into());
        }
        if let Some(damage) = &self.damage {
            notes.push(format!(
                "{damage}: draconis check shows all damage, draconis repair repairs it"
            ));
        }
        if info.errors && self.read_only_reason.is_none() {
            notes.push("the volume is marked as damaged; run e2fsck on it".into());
        }
        if info.truncated {
            notes.push("the image is shorter than its volume: some files cannot be read".into());
        }
        notes
    }

    fn attributes(&self, node: InodeNumber) -> Result<Attributes, Refusal> {
        let attributes = self.volume.attributes(node).map_err(log_and_get_refusal)?;
        // The inode number that Linux programs expect, for the root directory too.
        Ok(Attributes { node: Node(node.0.into()), ..attributes })
    }

    /// Makes a change of names durable, if the options require it.
    fn sync_name_change(&self) -> Result<(), Refusal> {
        match self.durable {
            SyncPolicy::OnRequest => Ok(()),
            SyncPolicy::DirectoryChanges | SyncPolicy::All => self.sync_if_writable(),
        }
    }

    /// Makes any other change durable, if the options require it.
    fn sync_data_change(&self) -> Result<(), Refusal> {
        match self.durable {
            SyncPolicy::OnRequest | SyncPolicy::DirectoryChanges => Ok(()),
            SyncPolicy::All => self.sync_if_writable(),
        }
    }

    fn sync_if_writable(&self) -> Result<(), Refusal> {
        if self.opened_writable { self.volume.sync().map_err(log_and_get_refusal) } else { Ok(()) }
    }

    /// Updates the access time of a node that was read, if required.
    fn record_access(&self, node: Node) {
        if self.opened_writable
            && let Ok(inode) = inode_of_node(node)
        {
            self.volume.touch_atime(inode);
        }
    }
}

impl Tree for VolumeTree {
    type File<'a> = VolumeFile<'a>;

    fn sync_files(&self, files: &[(Node, bool)]) -> Result<(), Refusal> {
        if !self.opened_writable {
            return Ok(());
        }
        let inodes = files.iter().map(|&(node, data_only)| Ok((inode_of_node(node)?, data_only)));
        let inodes = inodes.collect::<Result<Vec<_>, Refusal>>()?;
        self.volume.sync_inodes(&inodes).map_err(log_and_get_refusal)
    }

    fn file(&self, node: Node) -> VolumeFile<'_> {
        VolumeFile::new(self, node)
    }

    fn statfs(&self) -> StatFs {
        let space = self.volume.space();
        let blocks = if self.minix_df { self.volume.superblock().blocks } else { space.blocks };
        StatFs { blocks, ..space }
    }

    fn is_writable(&self) -> bool {
        self.opened_writable
    }

    fn handles_open(&self, kind: FileType) -> bool {
        // Files may be immutable or append-only; access times are kept for both.
        let keeps_times = self.volume.access_times() != AccessTimes::Never;
        self.opened_writable && (kind == FileType::File || keeps_times && !self.no_directory_atime)
    }

    fn is_low_on_space(&self) -> bool {
        self.opened_writable && self.volume.is_low_on_space()
    }

    fn notify_changes_to(&self, end: &Server<File>) {
        // A client of a read-only volume expects notifications, too; none will come.
        let teller = end.change_notifier();
        if self.opened_writable {
            self.change_fanout.add_client(teller);
        }
    }

    fn add_user(&self, node: Node) {
        if self.opened_writable
            && let Ok(inode) = inode_of_node(node)
        {
            self.volume.add_user(inode);
        }
    }

    fn remove_users(&self, node: Node, users: u64) {
        if self.opened_writable
            && let Ok(inode) = inode_of_node(node)
        {
            self.volume.remove_users(inode, users);
        }
    }
}
