//! A volume of the `ext` library, fitted to the contracts.
//!
//! The library does not know that contracts exist, and contracts do not know ext: this
//! file is where they meet. It is also the one place where an option becomes a cache size
//! and a partition becomes a disk.

mod directory;
mod file;
mod part;
mod told;

pub use file::VolumeFile;
pub use part::{Part, part, part_for_writing};

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use draconis_container::{Format, Image, signature::Held};
use draconis_device::{Atomic, Disk, PartitionError, Properties};
use draconis_exchange::channel::Server;
use draconis_exchange::contract::file::File;
use draconis_exchange::contract::tree::Tree;
use draconis_exchange::contract::{AccessTimes, Attributes, Kind, Node, Refusal, Space, Time};
use draconis_ext::{Claim, Claiming, InodeNumber, Options, Predecessor, Volume, Witness, Writing};

use crate::options::MountOptions;
use crate::protocol::{CacheStatus, WorkerStatus};
use told::Told;

/// Said of a volume that is marked as damaged, as the reason why it is not written.
const DAMAGED: &str = "the volume says that it is damaged; run e2fsck on it, or mount it with \
    errors=continue";

/// How long claiming a volume may take that other hosts can reach: a manager waits for a worker that
/// opens a volume for a little longer.
const CLAIM_WAIT: Duration = Duration::from_secs(50);

/// Why a volume was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The options make no sense.
    #[error("{0}")]
    Options(String),
    /// The partition was not found.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// The offset lies outside.
    #[error(transparent)]
    Offset(#[from] draconis_device::Error),
    /// None of the partitions can be taken without being told.
    #[error("{0}")]
    Partitions(String),
    /// A disk image that cannot be read.
    #[error(transparent)]
    Container(#[from] draconis_container::Error),
    /// A disk image that was to be written.
    #[error("a {} image is only read; {} makes one that can be changed", .0.name(), .0.help())]
    OnlyRead(Format),
    /// Something else.
    #[error("not an ext volume; it holds {}, and {}", .0.what, .0.help)]
    Held(Held),
    /// The system does not say how long the image's file is.
    #[error("the length of the image: {0}")]
    Length(#[source] std::io::Error),
    /// The disk service did not answer.
    #[error("the volume cannot be written: {0}")]
    Disk(#[source] draconis_device::Error),
    /// The file system refused.
    #[error(transparent)]
    Ext(#[from] draconis_ext::Error),
}

impl OpenError {
    /// What a contract says of it.
    pub fn refusal(&self) -> Refusal {
        match self {
            Self::Disk(_) | Self::Length(_) => Refusal::Gone,
            Self::Ext(error) => error.refusal(),
            _ => Refusal::Invalid,
        }
    }
}

/// Opens the volume on `disk` that `options` name, for reading; `behind` is what a disk image
/// there says it differs from.
///
/// # Errors
/// See [`OpenError`].
pub fn open(
    disk: Arc<dyn Disk>,
    behind: &[Arc<dyn Disk>],
    options: &MountOptions,
) -> Result<VolumeTree, OpenError> {
    let Part { disk, is_of_backup, .. } = part(disk, behind, options)?;
    let mut tree = open_part(disk, options)?;
    tree.is_of_backup = is_of_backup;
    Ok(tree)
}

/// Opens a volume that is all of `disk`, for reading.
///
/// # Errors
/// See [`OpenError`].
pub fn open_part(disk: Arc<dyn Disk>, options: &MountOptions) -> Result<VolumeTree, OpenError> {
    let volume = Volume::open(disk.clone(), caches(options));
    let volume = volume.map_err(|error| part::named(&*disk, error))?;
    fits(&volume, options)?;
    Ok(VolumeTree::new(volume, false, options))
}

/// Opens the volume on `disk` that `options` name, for writing; where it must not be
/// written, for reading, and its notes say why.
///
/// # Errors
/// See [`OpenError`].
pub fn open_for_writing(
    disk: Arc<dyn Disk>,
    options: &MountOptions,
) -> Result<VolumeTree, OpenError> {
    open_with(disk, &[], options, None, |_| Ok(None))
}

/// [`open_for_writing`] for a mount, which renews what it claims where other hosts can reach the
/// volume; `before` tells what is known of a worker that had it open.
pub(crate) fn open_in_use(
    disk: Arc<dyn Disk>,
    behind: &[Arc<dyn Disk>],
    options: &MountOptions,
    before: Option<Predecessor>,
) -> Result<VolumeTree, OpenError> {
    let is_first = before.is_none();
    open_with(disk, behind, options, before, |disk| {
        let how = Claiming {
            now: now(),
            chance: RandomState::new().build_hasher().finish() as u32,
            node: "draconis",
            wait: &std::thread::sleep,
            most_wait: CLAIM_WAIT,
        };
        if is_first { Claim::make(disk, &how) } else { Claim::resume(disk, &how) }
    })
}

/// Whether a disk takes room as it is written, in a store: those are atomic.
fn is_in_store(disk: &Properties) -> bool {
    disk.discards && disk.atomic == Atomic::AgainstPowerCut
}

fn open_with(
    disk: Arc<dyn Disk>,
    behind: &[Arc<dyn Disk>],
    options: &MountOptions,
    before: Option<Predecessor>,
    claim: impl FnOnce(&Arc<dyn Disk>) -> draconis_ext::Result<Option<Claim>>,
) -> Result<VolumeTree, OpenError> {
    let (part, only_read) = part::part_for_mounting(disk, behind, options)?;
    let is_of_backup = part.is_of_backup;
    let mut tree = match only_read {
        None => open_found(part, options, before, claim)?,
        Some(why) => {
            let mut tree = open_part(part.disk, options)?;
            tree.not_written = Some(why.to_string());
            tree
        }
    };
    tree.is_of_backup = is_of_backup;
    Ok(tree)
}

/// [`open_with`] of a part that can be written.
fn open_found(
    part: Part,
    options: &MountOptions,
    before: Option<Predecessor>,
    claim: impl FnOnce(&Arc<dyn Disk>) -> draconis_ext::Result<Option<Claim>>,
) -> Result<VolumeTree, OpenError> {
    use draconis_ext::Error::{Corrupt, ReadOnly, Unsupported};
    let Part { disk, image, .. } = part;
    let writing = Writing {
        clock: Arc::new(now),
        dirty_bytes: options.dirty_bytes,
        atime: options.access_times,
        discard: options.discard.unwrap_or_else(|| is_in_store(&disk.properties())),
    };
    if !options.ignore_errors && before.is_none() {
        let mut tree = open_part(disk.clone(), options)?;
        if tree.volume.info().errors {
            tree.not_written = Some(DAMAGED.into());
            return Ok(tree);
        }
    }
    let opened = claim(&disk).and_then(|claim| match before {
        None => Volume::open_claimed(disk.clone(), caches(options), writing, claim),
        Some(before) => Volume::take_over(disk.clone(), caches(options), writing, before, claim),
    });
    match opened {
        Ok(volume) => {
            fits(&volume, options)?;
            let mut tree = VolumeTree::new(volume, true, options);
            tree.image = image;
            Ok(tree)
        }
        // What must not be written can often be read; if not, that says why.
        Err(why @ (ReadOnly | Unsupported { .. })) => {
            let mut tree = VolumeTree::new(Volume::open(disk, caches(options))?, false, options);
            if tree.volume.read_only_reason().is_none() {
                tree.not_written = Some(why.to_string());
            }
            Ok(tree)
        }
        // Of a volume with a damaged journal the rest can be read.
        Err(why @ Corrupt { .. }) => {
            let tree = open_part(disk, options)?;
            if tree.volume.journal_damage().is_some() { Ok(tree) } else { Err(why.into()) }
        }
        Err(other) => Err(part::named(&*disk, other)),
    }
}

/// Refuses what only a volume of another kind can be told.
fn fits(volume: &Volume, options: &MountOptions) -> Result<(), OpenError> {
    let has_journal = volume.superblock().journal.is_some();
    if options.journal && !has_journal {
        let why = "mount option 'data' needs a journal, and the volume has none; leave it out, or \
                   add one with draconis tune -j";
        return Err(OpenError::Options(why.into()));
    }
    Ok(())
}

fn caches(options: &MountOptions) -> Options {
    Options {
        inode_cache: options.inode_cache as u64,
        block_map_cache: options.block_map_cache as u64,
        data_cache_bytes: options.data_cache_bytes,
        dots: options.dots,
        ..Options::default()
    }
}

/// The system's clock. It may stand before 1970, as any clock may.
fn now() -> Time {
    let of = |time: std::time::Duration| (time.as_secs() as i64, time.subsec_nanos());
    match SystemTime::now().duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => {
            let (seconds, nanoseconds) = of(after);
            Time { seconds, nanoseconds }
        }
        Err(before) => Time { seconds: -of(before.duration()).0 - 1, nanoseconds: 0 },
    }
}

/// An open volume behind the contracts. Nodes are inode numbers; [`Node::ROOT`] is another
/// name for the root directory's.
pub struct VolumeTree {
    volume: Volume,
    told: Arc<Told>,
    /// What the volume is in, where changing that is a session.
    image: Option<Arc<dyn Image>>,
    /// Whether it was opened for writing. That it can be written may end; that its nodes
    /// are held may not.
    writing: bool,
    /// Why it was not, though it was wanted.
    not_written: Option<String>,
    /// Whether it is in a partition of a backup table.
    is_of_backup: bool,
    /// What the options say of each change.
    durable: Durable,
    /// Whether the kernel checks permissions.
    permissions: bool,
    /// Whether it may keep what is written for a while.
    write_back: bool,
    /// Whether who serves the kernel sleeps until there is a request.
    no_polling: bool,
    /// Whether new nodes have the group of their directory.
    directory_group: bool,
    /// Whether `statfs` counts blocks that can never be a file's, too.
    minix_df: bool,
    /// Whether listing a directory leaves its time of access.
    no_directory_atime: bool,
    /// What a look at the descriptors and the root directory found when it was opened.
    damage: Option<String>,
    /// Listings of these end with an error.
    damaged_directories: directory::DamagedDirectories,
}

/// What is durable before it is answered.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Durable {
    /// What a process waits for.
    OnRequest,
    /// Every change of a directory.
    Names,
    /// Every change.
    All,
}

fn inode(node: Node) -> Result<InodeNumber, Refusal> {
    InodeNumber::from_node(node).ok_or(Refusal::NotFound)
}

fn refusal(error: draconis_ext::Error) -> Refusal {
    let why = error.refusal();
    if matches!(why, Refusal::Corrupt | Refusal::Io) {
        log::warn!("{error}");
    }
    why
}

impl VolumeTree {
    fn new(volume: Volume, writing: bool, options: &MountOptions) -> Self {
        let durable = match (options.sync, options.dir_sync) {
            (true, _) => Durable::All,
            (false, true) => Durable::Names,
            (false, false) => Durable::OnRequest,
        };
        let (permissions, write_back) = (options.default_permissions, options.write_back);
        let (directory_group, minix_df) = (options.directory_group, options.minix_df);
        let not_written = None;
        let damage = volume.damage_at_a_glance().map(|error| error.to_string());
        let told = Arc::<Told>::default();
        volume.tell_witness(told.clone());
        Self {
            volume,
            told,
            image: None,
            writing,
            not_written,
            is_of_backup: false,
            durable,
            permissions,
            write_back,
            no_polling: options.no_polling,
            directory_group,
            minix_df,
            no_directory_atime: options.no_directory_atime,
            damage,
            damaged_directories: directory::DamagedDirectories::default(),
        }
    }

    /// Whether the kernel is to check permissions.
    pub fn permissions(&self) -> bool {
        self.permissions
    }

    /// Whether the kernel may keep what is written for a while.
    pub fn write_back(&self) -> bool {
        self.write_back
    }

    /// Whether who serves the kernel is to sleep until there is a request.
    pub fn no_polling(&self) -> bool {
        self.no_polling
    }

    /// Writes everything and marks the volume as unmounted. Later changes are refused.
    ///
    /// # Errors
    /// What stopped writing, now or before, for the user.
    pub fn close(&self) -> Result<(), String> {
        if !self.writing {
            return Ok(());
        }
        let closed = self.volume.close();
        match (self.volume.failure(), closed) {
            (Some(why), _) => Err(why),
            (None, Err(error)) => Err(error.to_string()),
            (None, Ok(())) => match self.image.as_ref().map(|image| image.rest()) {
                Some(Err(error)) => Err(error.to_string()),
                None | Some(Ok(())) => Ok(()),
            },
        }
    }

    /// Ends all changes as [`VolumeTree::close`] does, or allows them again, while the mount
    /// stays.
    ///
    /// # Errors
    /// What stopped writing; that the volume was opened for reading.
    pub fn set_read_only(&self, read_only: bool) -> Result<(), String> {
        if read_only {
            return self.close();
        }
        self.volume.reopen().map_err(|error| match self.volume.failure() {
            Some(why) => why,
            None if !self.writing => {
                "it was mounted read-only: unmount it and mount it again".into()
            }
            None => error.to_string(),
        })
    }

    /// The library's own view, for what contracts do not say.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Has `witness` told of every change from now on. Only the first one counts.
    pub(crate) fn tell_witness(&self, witness: Arc<dyn Witness>) {
        self.told.pass_on_to(witness);
    }

    /// Whether nothing can be written.
    pub fn read_only(&self) -> bool {
        !self.volume.is_writable()
    }

    /// Its figures, as `draconis status` shows them.
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
            notes: self.notes(),
            failure: self.volume.failure(),
            ..WorkerStatus::default()
        }
    }

    fn notes(&self) -> Vec<String> {
        let info = self.volume.info();
        let mut notes = vec![];
        if self.is_of_backup {
            notes.push(part::BACKUP_TABLE.to_owned());
        }
        if let Some(reason) = info.read_only_reason {
            notes.push(format!("read-only: {reason}"));
        } else if let Some(reason) = &self.not_written {
            notes.push(format!("read-only: {reason}"));
        }
        if self.volume.needs_preen() {
            let note = "the volume has no journal and was not unmounted: e2fsck -p repairs what a \
                        power cut left";
            notes.push(note.into());
        }
        if let Some(damage) = &self.damage {
            notes.push(format!("{damage}: draconis check shows all damage, e2fsck -f repairs it"));
        }
        if info.errors && self.not_written.is_none() {
            notes.push("the volume is marked as damaged; run e2fsck on it".into());
        }
        if info.truncated {
            notes.push("the image is shorter than its volume: some files cannot be read".into());
        }
        notes
    }

    fn attributes(&self, node: InodeNumber) -> Result<Attributes, Refusal> {
        let attributes = self.volume.attributes(node).map_err(refusal)?;
        // The number that Linux programs expect, for the root directory too.
        Ok(Attributes { node: Node(node.0.into()), ..attributes })
    }

    /// After a change of names: durable, if the options want that.
    fn names_changed(&self) -> Result<(), Refusal> {
        match self.durable {
            Durable::OnRequest => Ok(()),
            Durable::Names | Durable::All => self.make_durable(),
        }
    }

    /// After any other change.
    fn contents_changed(&self) -> Result<(), Refusal> {
        match self.durable {
            Durable::OnRequest | Durable::Names => Ok(()),
            Durable::All => self.make_durable(),
        }
    }

    fn make_durable(&self) -> Result<(), Refusal> {
        if self.writing { self.volume.sync().map_err(refusal) } else { Ok(()) }
    }

    /// Reading is written down, where it is to be.
    fn was_read(&self, node: Node) {
        if self.writing
            && let Ok(inode) = inode(node)
        {
            self.volume.touch_access(inode);
        }
    }
}

impl Tree for VolumeTree {
    type File<'a> = VolumeFile<'a>;

    fn sync_files(&self, files: &[(Node, bool)]) -> Result<(), Refusal> {
        if !self.writing {
            return Ok(());
        }
        let inodes = files.iter().map(|&(node, data_only)| Ok((inode(node)?, data_only)));
        let inodes = inodes.collect::<Result<Vec<_>, Refusal>>()?;
        self.volume.sync_inodes(&inodes).map_err(refusal)
    }

    fn file(&self, node: Node) -> VolumeFile<'_> {
        VolumeFile::new(self, node)
    }

    fn space(&self) -> Space {
        let space = self.volume.space();
        let blocks = if self.minix_df { self.volume.superblock().blocks } else { space.blocks };
        Space { blocks, ..space }
    }

    fn is_writable(&self) -> bool {
        self.writing
    }

    fn decides_opening(&self, kind: Kind) -> bool {
        // Files may be immutable or append-only; times of access are kept of both.
        let keeps_times = self.volume.access_times() != AccessTimes::Never;
        self.writing && (kind == Kind::File || keeps_times && !self.no_directory_atime)
    }

    fn is_short_of_room(&self) -> bool {
        self.writing && self.volume.is_short_of_room()
    }

    fn tell_of_changes(&self, end: &Server<File>) {
        // What nothing changes is told of once: that it will be.
        let teller = end.teller();
        if self.writing {
            self.told.tell(teller);
        }
    }

    fn hold(&self, node: Node) {
        if self.writing
            && let Ok(inode) = inode(node)
        {
            self.volume.hold(inode);
        }
    }

    fn release(&self, node: Node, users: u64) {
        if self.writing
            && let Ok(inode) = inode(node)
        {
            self.volume.release(inode, users);
        }
    }
}
