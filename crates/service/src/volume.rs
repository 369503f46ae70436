//! A volume of the `ext` library, fitted to the contracts.
//!
//! The library does not know that contracts exist, and contracts do not know ext: this
//! file is where they meet. It is also the one place where an option becomes a cache size
//! and a partition becomes a disk.

mod change;

use std::sync::Arc;
use std::time::SystemTime;

use draconis_device::{Disk, PartitionError, View, partition};
use draconis_exchange::contract::directory::{
    self, AckEnumerate, AckGetXattr, AckListXattr, AckLookup, AckReadLink, DirectoryServer,
    Entries, Enumerate, GetXattr, ListXattr, Lookup, NakEnumerate, NakGetXattr, NakListXattr,
    NakLookup, NakReadLink, ReadLink,
};
use draconis_exchange::contract::file::{
    self, AckRead, AckReserve, AckSeek, AckSync, AckWrite, FileServer, NakRead, NakReserve,
    NakSeek, NakSync, NakWrite, Read, Reserve, Seek, Sync as SyncFile, Write,
};
use draconis_exchange::contract::tree::Tree;
use draconis_exchange::contract::{
    Access, Attributes, Call, Kept, Kind, Name, Node, Refusal, Space, Time,
};
use draconis_exchange::heap::Block;
use draconis_exchange::omission::Omission;
use draconis_ext::{Cookie, InodeNumber, Options, Volume, Writing};

use crate::options::MountOptions;
use crate::protocol::{CacheStatus, WorkerStatus};

/// Most that a contract reads in one go when the buffer is not private memory, in bytes.
const PIECE_BYTES: usize = 128 << 10;

/// Said of a volume that is marked as damaged, as the reason why it is not written.
const DAMAGED: &str = "the volume says that it is damaged; run e2fsck on it, or mount it with \
    errors=continue";

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
            Self::Options(_) | Self::Partition(_) | Self::Offset(_) => Refusal::Invalid,
            Self::Disk(_) => Refusal::Gone,
            Self::Ext(error) => error.refusal(),
        }
    }
}

/// Opens the volume on `disk` that `options` name, for reading.
///
/// # Errors
/// See [`OpenError`].
pub fn open(disk: Arc<dyn Disk>, options: &MountOptions) -> Result<VolumeTree, OpenError> {
    let disk = part(disk, options)?;
    Ok(VolumeTree::new(Volume::open(disk, caches(options))?, false, options))
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
    use draconis_ext::Error::{ReadOnly, Unsupported};
    let disk = part(disk, options)?;
    let writing = Writing {
        clock: Arc::new(now),
        dirty_bytes: options.dirty_bytes,
        atime: options.access_times.into(),
    };
    if !options.ignore_errors {
        let volume = Volume::open(disk.clone(), caches(options))?;
        if volume.info().errors {
            let mut tree = VolumeTree::new(volume, false, options);
            tree.not_written = Some(DAMAGED.into());
            return Ok(tree);
        }
    }
    match Volume::open_for_writing(disk.clone(), caches(options), writing) {
        Ok(volume) => Ok(VolumeTree::new(volume, true, options)),
        // What must not be written can often be read; if not, that says why.
        Err(why @ (ReadOnly | Unsupported { .. })) => {
            let mut tree = VolumeTree::new(Volume::open(disk, caches(options))?, false, options);
            if tree.volume.read_only_reason().is_none() {
                tree.not_written = Some(why.to_string());
            }
            Ok(tree)
        }
        Err(other) => Err(other.into()),
    }
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

/// The part of `disk` that `options` name.
///
/// # Errors
/// [`OpenError::Partition`], [`OpenError::Offset`].
pub fn part(disk: Arc<dyn Disk>, options: &MountOptions) -> Result<Arc<dyn Disk>, OpenError> {
    Ok(match (options.partition, options.offset_bytes) {
        (Some(number), _) => {
            let extent = partition(&*disk, number)?;
            Arc::new(View::new(disk, extent)?)
        }
        (None, Some(start)) => Arc::new(View::from_offset(disk, start)?),
        (None, None) => disk,
    })
}

/// An open volume behind the contracts. Nodes are inode numbers; [`Node::ROOT`] is another
/// name for the root directory's.
pub struct VolumeTree {
    volume: Volume,
    /// Whether it was opened for writing. That it can be written may end; that its nodes
    /// are held may not.
    writing: bool,
    /// Why it was not, though it was wanted.
    not_written: Option<String>,
    /// What the options say of each change.
    durable: Durable,
    /// Whether the kernel checks permissions.
    permissions: bool,
    /// Whether it may keep what is written for a while.
    write_back: bool,
    /// Whether new nodes have the group of their directory.
    directory_group: bool,
    /// Whether `statfs` counts blocks that can never be a file's, too.
    minix_df: bool,
    /// Whether listing a directory leaves its time of access.
    no_directory_atime: bool,
}

/// What is durable before it is answered.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Durable {
    /// What somebody waits for.
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
        Self {
            volume,
            writing,
            not_written,
            durable,
            permissions,
            write_back,
            directory_group,
            minix_df,
            no_directory_atime: options.no_directory_atime,
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

    /// Brings everything home and marks the volume as unmounted. Later changes are refused.
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
            (None, Ok(())) => Ok(()),
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
        if let Some(reason) = info.read_only_reason {
            notes.push(format!("read-only: {reason}"));
        } else if let Some(reason) = &self.not_written {
            notes.push(format!("read-only: {reason}"));
        }
        if !info.clean {
            notes.push("the volume was not unmounted cleanly; e2fsck may find damage".into());
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

    /// A node under its own number, of any kind: so file handles are found again. Numbers that
    /// no name leads to, as that of a journal, are none.
    fn itself(&self, node: InodeNumber) -> Result<InodeNumber, Refusal> {
        let first = self.volume.superblock().first_inode;
        let named = node == InodeNumber::ROOT || node >= first;
        let found = named && !Omission::Handles.is_made();
        if found { Ok(node) } else { Err(Refusal::NotFound) }
    }

    fn opened(&self, m: &directory::Open) -> Result<Kept, Refusal> {
        let node = inode(m.node)?;
        let Access { read, write, append } = m.access;
        if !Omission::OpenFlags.is_made() {
            let access = draconis_ext::Access { read, write, append };
            self.volume.may_open(node, access).map_err(refusal)?;
        }
        let listed = self.no_directory_atime && self.attributes(node)?.kind == Kind::Directory;
        let due =
            read && !listed && self.volume.is_access_due(node) && !Omission::AccessTime.is_made();
        let strict = self.volume.access_times() == draconis_ext::AccessTimes::Strict;
        Ok(match due {
            false => Kept::Valid,
            true if strict => Kept::Never,
            true => Kept::Stale,
        })
    }

    fn fill(&self, m: &mut Enumerate) -> Result<u32, Refusal> {
        let dir = inode(m.node)?;
        let (cookie, with_attributes) = (Cookie(m.cookie), m.with_attributes);
        let dots = self.volume.options().dots;
        let mut entries = Entries::new(&mut m.buffer);
        let mut why = None;
        self.volume
            .entries(dir, cookie, dots, |found| {
                let found = match found {
                    Ok(found) => found,
                    Err(damage) => {
                        why = Some(refusal(damage.error));
                        return false;
                    }
                };
                // A name that is none cannot be asked for either: damage, but not of the rest.
                let Ok(name) = Name::new(found.name) else { return true };
                let entry = directory::Entry {
                    cookie: found.next.0,
                    node: Node(found.inode.0.into()),
                    kind: found.kind,
                    name,
                    attributes: with_attributes
                        .then(|| self.attributes(found.inode).ok())
                        .flatten(),
                };
                let fits = entries.push(&entry);
                if fits && with_attributes && found.kind == Some(Kind::Directory) {
                    self.volume.will_list(found.inode);
                }
                if !fits && entries.is_empty() {
                    why = Some(Refusal::BufferTooSmall);
                }
                fits
            })
            .map_err(refusal)?;
        match why {
            // What came before the damage is delivered first; the next question meets it.
            Some(why) if entries.is_empty() => Err(why),
            _ => Ok(entries.len()),
        }
    }
}

/// Copies an answer of any length into a buffer; an empty buffer asks for the length.
fn answer(bytes: &[u8], buffer: &mut Block) -> Result<u32, Refusal> {
    if !buffer.is_empty() && buffer.copy_in(0, bytes) < bytes.len() {
        return Err(Refusal::BufferTooSmall);
    }
    Ok(bytes.len() as u32)
}

impl DirectoryServer for VolumeTree {
    fn lookup(&self, m: Lookup) -> Result<AckLookup, NakLookup> {
        let found = inode(m.parent)
            .and_then(|dir| match m.name.as_bytes() {
                b"." => self.itself(dir),
                name => self.volume.lookup(dir, name).map_err(refusal),
            })
            .and_then(|found| self.attributes(found));
        match found {
            Ok(attributes) => Ok(AckLookup { attributes }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn get_attributes(
        &self,
        m: directory::GetAttributes,
    ) -> Result<directory::AckGetAttributes, directory::NakGetAttributes> {
        match inode(m.node).and_then(|node| self.attributes(node)) {
            Ok(attributes) => Ok(directory::AckGetAttributes { attributes }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn enumerate(&self, mut m: Enumerate) -> Result<AckEnumerate, NakEnumerate> {
        match self.fill(&mut m) {
            Ok(len) => {
                if !m.no_atime && !self.no_directory_atime {
                    self.was_read(m.node);
                }
                Ok(AckEnumerate { buffer: m.buffer, len })
            }
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn read_link(&self, mut m: ReadLink) -> Result<AckReadLink, NakReadLink> {
        let target = inode(m.node).and_then(|node| self.volume.read_link(node).map_err(refusal));
        match target.and_then(|target| answer(&target, &mut m.buffer)) {
            Ok(len) => {
                self.was_read(m.node);
                Ok(AckReadLink { buffer: m.buffer, len })
            }
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn get_xattr(&self, mut m: GetXattr) -> Result<AckGetXattr, NakGetXattr> {
        let value = inode(m.node)
            .and_then(|node| self.volume.xattr(node, m.name.as_bytes()).map_err(refusal));
        match value.and_then(|value| answer(&value, &mut m.buffer)) {
            Ok(len) => Ok(AckGetXattr { buffer: m.buffer, len }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn list_xattr(&self, mut m: ListXattr) -> Result<AckListXattr, NakListXattr> {
        let names = inode(m.node).and_then(|node| self.volume.xattr_names(node).map_err(refusal));
        let list = names.map(|names| names.iter().flat_map(|n| [&n[..], b"\0"].concat()).collect());
        match list.and_then(|list: Vec<u8>| answer(&list, &mut m.buffer)) {
            Ok(len) => Ok(AckListXattr { buffer: m.buffer, len }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn create(&self, m: directory::Create) -> Result<directory::AckCreate, directory::NakCreate> {
        match self.make_node(&m) {
            Ok(attributes) => Ok(directory::AckCreate { attributes }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn create_unnamed(
        &self,
        m: directory::CreateUnnamed,
    ) -> Result<directory::AckCreateUnnamed, directory::NakCreateUnnamed> {
        match self.make_unnamed(&m) {
            Ok(attributes) => Ok(directory::AckCreateUnnamed { attributes }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn open(&self, m: directory::Open) -> Result<directory::AckOpen, directory::NakOpen> {
        match self.opened(&m) {
            Ok(kept) => Ok(directory::AckOpen { kept }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn make_directory(
        &self,
        m: directory::MakeDirectory,
    ) -> Result<directory::AckMakeDirectory, directory::NakMakeDirectory> {
        match self.make_dir(&m) {
            Ok(attributes) => Ok(directory::AckMakeDirectory { attributes }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn symlink(
        &self,
        m: directory::Symlink,
    ) -> Result<directory::AckSymlink, directory::NakSymlink> {
        match self.make_symlink(&m) {
            Ok(attributes) => Ok(directory::AckSymlink { target: m.target, attributes }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn link(&self, m: directory::Link) -> Result<directory::AckLink, directory::NakLink> {
        match self.add_name(&m) {
            Ok(attributes) => Ok(directory::AckLink { attributes }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn unlink(&self, m: directory::Unlink) -> Result<directory::AckUnlink, directory::NakUnlink> {
        match self.drop_name(&m) {
            Ok(()) => Ok(directory::AckUnlink {}),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn remove_directory(
        &self,
        m: directory::RemoveDirectory,
    ) -> Result<directory::AckRemoveDirectory, directory::NakRemoveDirectory> {
        match self.drop_directory(&m) {
            Ok(()) => Ok(directory::AckRemoveDirectory {}),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn rename(&self, m: directory::Rename) -> Result<directory::AckRename, directory::NakRename> {
        match self.move_name(&m) {
            Ok(()) => Ok(directory::AckRename {}),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn set_attributes(
        &self,
        m: directory::SetAttributes,
    ) -> Result<directory::AckSetAttributes, directory::NakSetAttributes> {
        match self.change_attributes(&m) {
            Ok(attributes) => Ok(directory::AckSetAttributes { attributes }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn set_flags(
        &self,
        m: directory::SetFlags,
    ) -> Result<directory::AckSetFlags, directory::NakSetFlags> {
        match self.change_flags(&m) {
            Ok(attributes) => Ok(directory::AckSetFlags { attributes }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn set_xattr(
        &self,
        m: directory::SetXattr,
    ) -> Result<directory::AckSetXattr, directory::NakSetXattr> {
        match self.change_xattr(&m) {
            Ok(()) => Ok(directory::AckSetXattr { value: m.value }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn remove_xattr(
        &self,
        m: directory::RemoveXattr,
    ) -> Result<directory::AckRemoveXattr, directory::NakRemoveXattr> {
        match self.drop_xattr(&m) {
            Ok(()) => Ok(directory::AckRemoveXattr {}),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn sync_volume(
        &self,
        m: directory::SyncVolume,
    ) -> Result<directory::AckSyncVolume, directory::NakSyncVolume> {
        match self.make_durable() {
            Ok(()) => Ok(directory::AckSyncVolume {}),
            Err(why) => Err(m.refuse(why)),
        }
    }
}

impl Tree for VolumeTree {
    type File<'a> = VolumeFile<'a>;

    fn file(&self, node: Node) -> VolumeFile<'_> {
        VolumeFile { tree: self, node }
    }

    fn space(&self) -> Space {
        let space = self.volume.space();
        Space {
            block_bytes: space.block_bytes,
            blocks: if self.minix_df { self.volume.superblock().blocks } else { space.blocks },
            free_blocks: space.free_blocks,
            available_blocks: space.available_blocks,
            inodes: space.inodes,
            free_inodes: space.free_inodes,
            name_bytes_max: space.name_bytes,
        }
    }

    fn is_writable(&self) -> bool {
        self.writing
    }

    fn decides_opening(&self, kind: Kind) -> bool {
        // Files may be immutable or append-only; times of access are kept of both.
        let keeps_times = self.volume.access_times() != draconis_ext::AccessTimes::Never;
        self.writing && (kind == Kind::File || keeps_times && !self.no_directory_atime)
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

/// One file of a volume.
#[derive(Clone, Copy)]
pub struct VolumeFile<'a> {
    tree: &'a VolumeTree,
    node: Node,
}

impl VolumeFile<'_> {
    fn read_into(&self, m: &mut Read) -> Result<usize, Refusal> {
        if !m.fits() {
            return Err(Refusal::Invalid);
        }
        let node = inode(self.node)?;
        let (from, len) = (m.buffer_offset as usize, m.len as usize);
        if let Some(into) = m.buffer.bytes_mut().and_then(|bytes| bytes.get_mut(from..from + len)) {
            return self.fill(node, m.offset, into);
        }
        // Shared memory cannot be lent to the library: by way of a private piece.
        let mut piece = vec![0; len.min(PIECE_BYTES)];
        let mut done = 0;
        while done < len {
            let want = (len - done).min(piece.len());
            let got = self.fill(node, m.offset + done as u64, &mut piece[..want])?;
            m.buffer.copy_in(from + done, &piece[..got]);
            done += got;
            if got < want {
                break;
            }
        }
        Ok(done)
    }

    /// Fills `into`, or as much of it as the file has. The library stops before damage too,
    /// but a short answer means the end of the file here: the kernel would cut it there.
    fn fill(&self, node: InodeNumber, offset: u64, into: &mut [u8]) -> Result<usize, Refusal> {
        let volume = &self.tree.volume;
        let got = volume.read_into(node, offset, into).map_err(refusal)?;
        match into.get_mut(got..got + 1) {
            // There is more, or there is nothing, or this says why not.
            Some(next) => match volume.read_into(node, offset + got as u64, next) {
                Ok(0) => Ok(got),
                Ok(_) => Err(Refusal::Io),
                Err(error) => Err(refusal(error)),
            },
            None => Ok(got),
        }
    }
}

impl FileServer for VolumeFile<'_> {
    fn read(&self, mut m: Read) -> Result<AckRead, NakRead> {
        match self.read_into(&mut m) {
            Ok(len) => {
                if !m.no_atime {
                    self.tree.was_read(self.node);
                }
                Ok(AckRead { buffer: m.buffer, len: len as u32 })
            }
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn get_attributes(
        &self,
        m: file::GetAttributes,
    ) -> Result<file::AckGetAttributes, file::NakGetAttributes> {
        match inode(self.node).and_then(|node| self.tree.attributes(node)) {
            Ok(attributes) => Ok(file::AckGetAttributes { attributes }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn seek(&self, m: Seek) -> Result<AckSeek, NakSeek> {
        let what = if m.hole { draconis_ext::Seek::Hole } else { draconis_ext::Seek::Data };
        let found = inode(self.node)
            .and_then(|node| self.tree.volume.seek(node, m.offset, what).map_err(refusal));
        match found {
            Ok(offset) => Ok(AckSeek { offset }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn write(&self, m: Write) -> Result<AckWrite, NakWrite> {
        match self.write_from(&m) {
            Ok(len) => Ok(AckWrite { buffer: m.buffer, len }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn reserve(&self, m: Reserve) -> Result<AckReserve, NakReserve> {
        match self.change_space(&m) {
            Ok(()) => Ok(AckReserve {}),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn sync(&self, m: SyncFile) -> Result<AckSync, NakSync> {
        match self.make_durable(m.data_only) {
            Ok(()) => Ok(AckSync {}),
            Err(why) => Err(m.refuse(why)),
        }
    }
}
