//! A disk in a store: `STORE#NAME`.
//!
//! ```text
//!   STORE ──claimed──▶ Unopened ──confined──▶ Opened: store ──▶ the disks of its objects
//! ```
//!
//! Law 1: before the process is confined, only the 8 magic bytes of the store are read.
//! Law 2: an existing file whose name contains `#` is that file.
//! Law 3: dropping the last disk of a store writes a checkpoint, because corruption of the newest
//! log records cannot be told from a torn write.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, anyhow, bail, ensure};
use draconis_device::{Disk, FileOptions, OpenedFile};
use draconis_objects::{
    Group, LifetimeHint, ObjectDisk, ObjectId, OpenOptions, SNAPSHOT_SEPARATOR, Store,
};
use draconis_service::remote_disk::DiskProcess;
use draconis_service::store_process::DiskCommand;
use draconis_types::path_bytes::ShowPath;

use crate::error::not_found_error;
use crate::host_file;
use crate::messages::format_bytes;
use crate::stores::{lock_store_shared, refuse_raid_member, with_context};

/// Magic at the start of a store.
const STORE_MAGIC: &[u8; 8] = b"DracoObj";

/// Character in the names of clones that exist while a client of an export uses them. No command
/// creates a disk with such a name.
pub const EXPORT_CLONE_MARK: char = '~';

/// Name of a disk on the command line: store and disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoreDiskName {
    /// File or device of the store.
    pub store: PathBuf,
    /// Name of the disk in the store.
    pub name: String,
}

impl StoreDiskName {
    /// Parses `STORE#NAME`; `None` if a file has that path or there is no such store.
    pub fn parse(image: &Path) -> Option<Self> {
        if std::fs::symlink_metadata(image).is_ok() {
            return None;
        }
        let text = image.as_os_str().as_bytes();
        let hash = text.iter().rposition(|byte| *byte == b'#')?;
        let (store, name) = text.split_at(hash);
        let store = PathBuf::from(OsStr::from_bytes(store));
        let name = std::str::from_utf8(name.get(1..)?).ok()?.to_owned();
        (!name.is_empty() && is_store(&store)).then_some(Self { store, name })
    }

    /// Opens the store read-only with a shared lock.
    pub fn open_shared(self) -> anyhow::Result<UnreadStoreDisk> {
        let file = File::open(&self.store).with_context(|| self.store.shown().to_string())?;
        lock_store_shared(&file, &self.store)?;
        self.open_in_file(file, false)
    }

    /// Opens the store read-write with an exclusive lock; on a member of a RAID only with
    /// `force_raid_member`.
    pub fn open_exclusive(self, force_raid_member: bool) -> anyhow::Result<UnreadStoreDisk> {
        self.check_writable(true)?;
        let none = || not_found_error(format!("{}: no such file", self.store.shown()));
        let file = host_file::open_exclusive(&self.store)?.ok_or_else(none)?;
        Ok(UnreadStoreDisk { force_raid_member, ..self.open_in_file(file, true)? })
    }

    /// Returns true if the name is that of a snapshot, which is read-only.
    pub fn is_snapshot(&self) -> bool {
        self.name.as_bytes().contains(&SNAPSHOT_SEPARATOR)
    }

    fn open_in_file(self, file: File, write: bool) -> anyhow::Result<UnreadStoreDisk> {
        // A sandbox cannot filter io_uring requests. Readers use the page cache, as every one-shot
        // tool does.
        let options = FileOptions { write, direct: write, uring: false };
        let file = OpenedFile::new(file.into(), options);
        let file = file.with_context(|| self.store.shown().to_string())?;
        Ok(UnreadStoreDisk::new(StoreBacking::File(file), self, write, None))
    }

    /// Opens a store that is not in a file, over the disk of another process. Holds `claim` while
    /// the store is in use.
    pub fn open_remote(
        self,
        disk: DiskProcess,
        write: bool,
        claim: Option<File>,
    ) -> anyhow::Result<UnreadStoreDisk> {
        self.check_writable(write)?;
        Ok(UnreadStoreDisk::new(StoreBacking::Served(disk), self, write, claim))
    }

    /// Refuses to open a snapshot for writing.
    pub fn check_writable(&self, write: bool) -> anyhow::Result<()> {
        if write && self.is_snapshot() {
            bail!(
                "{self} is a snapshot, and read-only; draconis store clone {self} NEW makes a disk of it"
            );
        }
        Ok(())
    }
}

impl std::fmt::Display for StoreDiskName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}#{}", self.store.shown(), self.name)
    }
}

/// Returns true if the file begins with the magic of a store.
fn is_store(path: &Path) -> bool {
    // Only files and devices are opened: opening a FIFO may block.
    let is_usable = |found: std::fs::Metadata| {
        use std::os::unix::fs::FileTypeExt;
        found.is_file() || found.file_type().is_block_device()
    };
    let mut head = [0; STORE_MAGIC.len()];
    std::fs::metadata(path).is_ok_and(is_usable)
        && File::open(path).and_then(|file| file.read_exact_at(&mut head, 0)).is_ok()
        && head == *STORE_MAGIC
}

/// Parses the name of a disk, for clap.
pub fn parse_disk_name(text: &str) -> Result<String, String> {
    let is_good = |c: char| c.is_alphanumeric() || "-_.+,=".contains(c);
    if text.is_empty() || text.len() > 255 || text.starts_with('-') || !text.chars().all(is_good) {
        return Err("letters, digits and -_.+,= make a name, up to 255 bytes".into());
    }
    if text == "new" || text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("a name is not new, and no number: those are objects".into());
    }
    Ok(text.to_owned())
}

/// Parses the name of an existing disk, for clap: also of one that an export made for itself, with
/// `~`, so that it can be removed and opened but never created.
pub fn parse_existing_disk_name(text: &str) -> Result<String, String> {
    parse_disk_name(&text.replace(EXPORT_CLONE_MARK, "_"))?;
    Ok(text.to_owned())
}

/// A disk in a store that is open and locked, but not yet read.
pub struct UnreadStoreDisk {
    below: StoreBacking,
    of: StoreDiskName,
    write: bool,
    force_raid_member: bool,
    claim: Option<File>,
}

/// Storage below a store.
enum StoreBacking {
    File(OpenedFile),
    /// A disk served by another process.
    Served(DiskProcess),
}

impl UnreadStoreDisk {
    fn new(below: StoreBacking, of: StoreDiskName, write: bool, claim: Option<File>) -> Self {
        Self { below, of, write, force_raid_member: false, claim }
    }

    /// Opens the store. Callers that confine themselves must have done so.
    pub fn open(self) -> anyhow::Result<OpenStoreDisk> {
        let options = OpenOptions { read_only: !self.write, ..OpenOptions::default() };
        let below: Arc<dyn Disk> = match self.below {
            StoreBacking::File(file) => Arc::new(file.start()),
            StoreBacking::Served(disk) => {
                disk.start().with_context(|| self.of.store.shown().to_string())?
            }
        };
        if self.write {
            refuse_raid_member(&self.of.store, &*below, self.force_raid_member)?;
        }
        let store =
            Store::open(below, &options).map_err(|error| with_context(&self.of.store, error))?;
        let held = HeldStore { store, path: self.of.store.clone(), _claim: self.claim };
        Ok(OpenStoreDisk { open_store: Arc::new(held), of: self.of })
    }

    /// Opens the store, and returns the disk.
    pub fn start(self) -> anyhow::Result<Arc<dyn Disk>> {
        self.open()?.disk()
    }
}

/// A disk of an open store; it may not exist yet.
pub struct OpenStoreDisk {
    open_store: Arc<HeldStore>,
    of: StoreDiskName,
}

impl OpenStoreDisk {
    /// Returns the object of the disk, if the disk exists.
    pub fn find(&self) -> anyhow::Result<Option<ObjectId>> {
        self.open_store
            .store
            .find_named_object(self.of.name.as_bytes())
            .map_err(|error| with_context(&self.of.store, error))
    }

    fn find_object(&self) -> anyhow::Result<ObjectId> {
        self.find()?.ok_or_else(|| {
            let StoreDiskName { store, name } = &self.of;
            let store = store.shown();
            if let Some(disk) = name.strip_suffix("@deleted") {
                return not_found_error(format!(
                    "{store}#{disk} has no snapshot deleted; --deleted and -o deleted take its \
                     deleted files"
                ));
            }
            not_found_error(format!(
                "{store} has no disk {name}; draconis store disk {store} {name} SIZE makes one, \
                 draconis store ls {store} lists them"
            ))
        })
    }

    /// Returns the names of all disks and snapshots of the store.
    pub fn list_names(&self) -> anyhow::Result<Vec<String>> {
        let names = self.open_store.store.list_names();
        let names = names.map_err(|error| with_context(&self.of.store, error))?;
        Ok(names.into_iter().filter_map(|(name, _)| String::from_utf8(name).ok()).collect())
    }

    /// Executes a command on the disks of the store; its result is durable on return.
    pub fn execute(&self, command: &DiskCommand) -> anyhow::Result<()> {
        let done = command.execute(&self.open_store.store);
        done.map_err(|error| with_context(&self.of.store, error))
    }

    /// Creates a clone of this snapshot. It is durable once anything that is written to it is.
    pub fn clone_as(&self, name: &str) -> anyhow::Result<Self> {
        let StoreDiskName { store, name: of } = &self.of;
        let cloned = self.open_store.store.submit_clone(of.as_bytes(), name.as_bytes());
        cloned.map_err(|error| with_context(store, error))?;
        Ok(self.other_disk(&StoreDiskName { store: store.clone(), name: name.to_owned() }))
    }

    /// Removes a disk that need not be removed durably. It has no snapshots.
    pub fn remove_soon(&self) -> anyhow::Result<()> {
        let removed = self.open_store.store.submit_removal(self.of.name.as_bytes(), false);
        removed.map(drop).map_err(|error| with_context(&self.of.store, error))
    }

    /// Returns the disk with its current contents.
    pub fn disk(&self) -> anyhow::Result<Arc<dyn Disk>> {
        self.find_object()?;
        let disk = self.open_store.store.disk_named(self.of.name.as_bytes());
        let disk = disk.map_err(|error| with_context(&self.of.store, error))?;
        Ok(Arc::new(StoreObjectDisk { disk, _store: self.open_store.clone() }))
    }

    /// Returns another disk of the same store.
    pub fn other_disk(&self, of: &StoreDiskName) -> Self {
        Self { open_store: self.open_store.clone(), of: of.clone() }
    }

    /// Returns the length of the disk, in bytes.
    pub fn len_bytes(&self) -> anyhow::Result<u64> {
        self.open_store
            .store
            .len(self.find_object()?)
            .map_err(|error| with_context(&self.of.store, error))
    }

    /// Returns the name of the disk.
    pub fn name(&self) -> &StoreDiskName {
        &self.of
    }

    /// Sets the length of the disk. New bytes read as zeros.
    pub fn set_len(&self, len_bytes: u64) -> anyhow::Result<()> {
        let id = self.find_object()?;
        self.submit_and_wait(|group| group.truncate(id, len_bytes), len_bytes)
    }

    /// Creates the disk; all of it reads as zeros.
    pub fn create(&self, len_bytes: u64) -> anyhow::Result<()> {
        ensure!(self.find()?.is_none(), "{}: is there already", self.of);
        parse_disk_name(&self.of.name).map_err(|why| anyhow!("{}: {why}", self.of))?;
        let new = self.open_store.store.new_object();
        let name = self.of.name.as_bytes();
        self.submit_and_wait(
            |group| {
                let id = group.create(new, LifetimeHint::Unknown);
                group.truncate(id, len_bytes);
                group.set_name(name, id);
            },
            len_bytes,
        )
    }

    /// Clears the disk to zeros and sets its length.
    pub fn zero_and_resize(&self, len_bytes: u64) -> anyhow::Result<()> {
        let id = self.find_object()?;
        self.submit_and_wait(
            |group| {
                group.truncate(id, 0);
                group.truncate(id, len_bytes);
            },
            len_bytes,
        )
    }

    /// Removes the disk.
    pub fn remove(&self) -> anyhow::Result<()> {
        let id = self.find_object()?;
        let name = self.of.name.as_bytes();
        self.submit_and_wait(
            |group| {
                group.delete(id);
                group.remove_name(name);
            },
            0,
        )
    }

    fn submit_and_wait(&self, fill: impl FnOnce(&mut Group), len_bytes: u64) -> anyhow::Result<()> {
        // Objects can be longer, but the length of a disk must fit a signed 64-bit integer.
        ensure!(
            len_bytes <= i64::MAX as u64,
            "{}: {} are too much",
            self.of,
            format_bytes(len_bytes)
        );
        let mut group = Group::new();
        fill(&mut group);
        let done = self.open_store.store.submit(group, &[]).map_err(|refused| refused.error);
        let done = done.and_then(|ticket| self.open_store.store.wait(ticket));
        done.map_err(|error| with_context(&self.of.store, error))
    }
}

/// An open store, held while one of its disks is in use.
struct HeldStore {
    store: Arc<Store>,
    path: PathBuf,
    /// Released last.
    _claim: Option<File>,
}

impl Drop for HeldStore {
    fn drop(&mut self) {
        // Callers have already waited for the changes that must be durable.
        if !self.store.is_read_only()
            && let Err(error) = self.store.sync().and_then(|()| self.store.checkpoint())
        {
            log::warn!("{}: {error}", self.path.shown());
        }
    }
}

/// Disk of an object; keeps its store open.
struct StoreObjectDisk {
    disk: ObjectDisk,
    _store: Arc<HeldStore>,
}

impl draconis_device::ForwardingDisk for StoreObjectDisk {
    type Inner = ObjectDisk;

    fn inner_disk(&self) -> &ObjectDisk {
        &self.disk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_name_follows_last_hash() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("a#b.store"), b"DracoObj and more").unwrap();
        std::fs::write(path("file"), b"something else").unwrap();
        std::fs::write(path("a#b.store#file"), b"").unwrap();
        let named =
            |text: &str| StoreDiskName::parse(&path(text)).map(|name| (name.store, name.name));
        assert_eq!(named("a#b.store#vol"), Some((path("a#b.store"), "vol".into())));
        for none in ["a#b.store", "a#b.store#", "a#b.store#file", "file#vol", "nothing#vol", "file"]
        {
            assert_eq!(named(none), None, "{none}");
        }
    }

    #[test]
    fn disk_names_are_validated() {
        for good in ["vol", "a.b-c_1", "7up", "Straße"] {
            assert_eq!(parse_disk_name(good), Ok(good.into()));
        }
        for bad in ["", "new", "17", "-x", "a b", "a/b", "a#b", "a@b", "a:b", "a\n"] {
            assert!(parse_disk_name(bad).is_err(), "{bad:?}");
            assert!(parse_existing_disk_name(bad).is_err(), "{bad:?}");
        }
        assert!(parse_disk_name("vol~1").is_err());
        assert_eq!(parse_existing_disk_name("vol~1"), Ok("vol~1".into()));
    }
}
