//! An object store by the path of its file or device.

use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use anyhow::Context;
use draconis_device::ProcessBound;
use draconis_objects::check::{CheckOptions, Report};
use draconis_objects::kv::{Batch, Kv, Scan};
use draconis_objects::{Group, LayoutKind, NewObject, ObjectId, StoreInfo, Ticket};
use draconis_types::lock::{Mutex, RecursiveRwLock};
use draconis_types::path_bytes::ShowPath;
use rustix::io::Errno;

use crate::create_store::{self, StoreSpec};
use crate::overwrite::OverwritePermission;
use crate::stores::{self, with_context};
use crate::{Error, Result, host_file};

/// Specification of a new store.
#[derive(Clone, Debug, Default)]
pub struct NewStore {
    /// Length of the store; that of the device if `None`.
    pub len_bytes: Option<u64>,
    /// Layout, with default sizes; measured if `None`, provided the store is long enough, which
    /// takes about ten seconds.
    pub layout: Option<LayoutKind>,
    /// Creates the file as one hole instead of writing zeros.
    pub sparse: bool,
    /// Contents that may be overwritten.
    pub force: OverwritePermission,
}

/// Result of checking a store.
pub type CheckReport = Report;

/// An open store. All methods take `&self` and can be called from any number of threads.
pub struct Store {
    path: PathBuf,
    inner: ProcessBound<RecursiveRwLock<Option<Arc<draconis_objects::Store>>>>,
    /// True if another process may write the store meanwhile.
    follows: bool,
    /// Open scans, which hold the file until the store is closed.
    scans: Mutex<Vec<Weak<Mutex<Option<Scan>>>>>,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Store {
    /// Creates an empty store, and the file if it is missing.
    ///
    /// # Errors
    /// The target is in use or holds other contents, or the disk is full.
    pub fn create(path: &Path, new: &NewStore) -> Result<()> {
        Ok(create(path, new)?)
    }

    /// Opens a store for reading, shared with other readers.
    ///
    /// # Errors
    /// The file is no store, damaged, or open for writing.
    pub fn open(path: &Path) -> Result<Arc<Self>> {
        Ok(Self::new(path, stores::open_shared(path)?, false))
    }

    /// Opens a store for reading while another process may write it. Calls see the newest commit as
    /// of the last [`Store::refresh`], or a newer one.
    ///
    /// # Errors
    /// The file is no store, or damaged.
    pub fn open_follower(path: &Path) -> Result<Arc<Self>> {
        Ok(Self::new(path, stores::open_follower(path)?, true))
    }

    /// Moves a follower on to the newest commit of the writer, also if the store was resized or
    /// created anew. Returns true if it changed.
    ///
    /// # Errors
    /// The store was not opened by [`Store::open_follower`], is damaged, or cannot be read. Calls
    /// still see the earlier state.
    pub fn refresh(&self) -> Result<bool> {
        if !self.follows {
            let text = format!("{}: it was not opened to follow a writer", self.path.shown());
            return Err(Error::new(Errno::INVAL, text));
        }
        let store = self.opened()?;
        match store.refresh() {
            Err(draconis_objects::Error::NotAStore(_)) => {
                let reopened = stores::open_follower(&self.path)?;
                if let Some(held) = &mut *self.lock()?.write() {
                    *held = reopened;
                }
                Ok(true)
            }
            refreshed => Ok(refreshed.map_err(|error| with_context(&self.path, error))?),
        }
    }

    fn opened(&self) -> Result<Arc<draconis_objects::Store>> {
        self.with_store(|store| Ok(store.clone()))
    }

    /// Opens a store for writing, exclusively.
    ///
    /// # Errors
    /// As [`Store::open`]; the store is in use.
    pub fn open_for_writing(path: &Path) -> Result<Arc<Self>> {
        Ok(Self::new(path, stores::open_exclusive(path, false)?, false))
    }

    fn new(path: &Path, store: Arc<draconis_objects::Store>, follows: bool) -> Arc<Self> {
        let inner = ProcessBound::new(RecursiveRwLock::new(Some(store)));
        Arc::new(Self { path: path.to_owned(), inner, follows, scans: Mutex::default() })
    }

    /// Checks every checksum, map and count, without changing anything.
    ///
    /// # Errors
    /// The store cannot be checked. Damage is reported, not returned as an error.
    pub fn check(path: &Path) -> Result<CheckReport> {
        let disk = stores::open_disk_shared(path, true)?;
        let report = draconis_objects::Store::check(disk, &CheckOptions::default(), &mut |_, _| {});
        Ok(report.map_err(|error| with_context(path, error))?)
    }

    /// Makes all changes durable, writes a checkpoint, and releases the file. Waits for calls in
    /// progress; later calls fail, also those of scans.
    ///
    /// # Errors
    /// The disk failed.
    pub fn close(&self) -> Result<()> {
        let Some(store) = self.lock()?.write().take() else { return Ok(()) };
        for scan in std::mem::take(&mut *self.scans.lock()).iter().filter_map(Weak::upgrade) {
            scan.lock().take();
        }
        match store.is_read_only() {
            true => Ok(()),
            false => Ok(stores::close_store(&store, &self.path)?),
        }
    }

    /// Returns the path of the file or device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns sizes and counts.
    ///
    /// # Errors
    /// The store is closed.
    pub fn info(&self) -> Result<StoreInfo> {
        self.with_store(|store| Ok(store.info()))
    }

    /// Reserves the number of a new object.
    ///
    /// # Errors
    /// The store is closed.
    pub fn new_object(&self) -> Result<NewObject> {
        self.with_store(|store| Ok(store.new_object()))
    }

    /// Submits an atomic group of changes, in order; durable after [`Store::wait`].
    ///
    /// # Errors
    /// The store is full or read-only, or an object does not exist. Nothing was applied.
    pub fn submit(&self, group: Group) -> Result<Ticket> {
        self.with_store(|store| store.submit(group, &[]).map_err(|refused| refused.error))
    }

    /// Waits until the group with this ticket and everything before it is durable.
    ///
    /// # Errors
    /// The disk failed.
    pub fn wait(&self, ticket: Ticket) -> Result<()> {
        self.with_store(|store| store.wait(ticket))
    }

    /// Makes all submitted changes durable.
    ///
    /// # Errors
    /// The disk failed.
    pub fn sync(&self) -> Result<()> {
        self.with_store(|store| store.sync())
    }

    /// Reads from byte `at` of an object, and returns the number of bytes read.
    ///
    /// # Errors
    /// The object does not exist, or is damaged.
    pub fn read(&self, id: ObjectId, at: u64, into: &mut [u8]) -> Result<usize> {
        self.look(|store| store.read(id, at, into))
    }

    /// Returns the length of an object.
    ///
    /// # Errors
    /// The object does not exist, or is damaged.
    pub fn len(&self, id: ObjectId) -> Result<u64> {
        self.look(|store| store.len(id))
    }

    /// Returns all objects with their lengths.
    ///
    /// # Errors
    /// The store is damaged.
    pub fn list(&self) -> Result<Vec<(ObjectId, u64)>> {
        self.look(|store| store.list())
    }

    /// Returns the object with a name.
    ///
    /// # Errors
    /// The store is damaged.
    pub fn find_name(&self, name: &[u8]) -> Result<Option<ObjectId>> {
        self.look(|store| store.find_named_object(name))
    }

    /// Returns all names with their objects.
    ///
    /// # Errors
    /// The store is damaged.
    pub fn names(&self) -> Result<Vec<(Vec<u8>, ObjectId)>> {
        self.look(|store| store.list_names())
    }

    /// Applies a batch of key changes atomically; durable after [`Store::wait`].
    ///
    /// # Errors
    /// As [`Store::submit`].
    pub fn write_keys(&self, batch: Batch) -> Result<Ticket> {
        self.with_store(|store| Kv::new(store.clone()).write(batch).map_err(|refused| refused.1))
    }

    /// Returns the value of a key.
    ///
    /// # Errors
    /// The store is damaged.
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.look(|store| Kv::new(store.clone()).get(key))
    }

    /// Returns the number of keys.
    ///
    /// # Errors
    /// The store is damaged.
    pub fn count_keys(&self) -> Result<u64> {
        self.look(|store| Kv::new(store.clone()).count().map(|count| count.keys))
    }

    /// Scans keys and values of a range as of now, in ascending or descending order.
    ///
    /// # Errors
    /// The store is closed.
    pub fn scan(
        self: &Arc<Self>,
        (from, to): (Bound<&[u8]>, Bound<&[u8]>),
        reverse: bool,
    ) -> Result<KeyIterator> {
        let scan = self.with_store(|store| {
            let scan = Kv::new(store.clone()).scan::<(Bound<&[u8]>, Bound<&[u8]>)>(&(from, to));
            let scan = Arc::new(Mutex::new(Some(scan)));
            let mut scans = self.scans.lock();
            scans.retain(|scan| scan.strong_count() > 0);
            scans.push(Arc::downgrade(&scan));
            Ok((scan, store.newest_checkpoint()))
        })?;
        let (scan, checkpoint) = scan;
        Ok(KeyIterator { store: self.clone(), scan, reverse, checkpoint })
    }

    /// Runs a lookup; of a follower, again if the writer has overwritten what it reads.
    fn look<T>(
        &self,
        look: impl FnMut(&Arc<draconis_objects::Store>) -> draconis_objects::Result<T>,
    ) -> Result<T> {
        match self.follows {
            true => self.with_store(|store| store.read_newest(look)),
            false => self.with_store(look),
        }
    }

    fn lock(&self) -> Result<&RecursiveRwLock<Option<Arc<draconis_objects::Store>>>> {
        Ok(self.inner.get().with_context(|| self.path.shown().to_string())?)
    }

    fn with_store<T>(
        &self,
        work: impl FnOnce(&Arc<draconis_objects::Store>) -> draconis_objects::Result<T>,
    ) -> Result<T> {
        let inner = self.lock()?.read();
        let Some(store) = &*inner else {
            let text = format!("{}: the store was closed", self.path.shown());
            return Err(Error::new(Errno::BADF, text));
        };
        Ok(work(store).map_err(|error| with_context(&self.path, error))?)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if self.inner.get().is_ok()
            && let Err(error) = self.close()
        {
            log::warn!("{error}");
        }
    }
}

/// Iterator over keys and values as of the start of the scan.
pub struct KeyIterator {
    store: Arc<Store>,
    /// `None` after the end.
    scan: Arc<Mutex<Option<Scan>>>,
    reverse: bool,
    /// Checkpoint of the writer when the scan began.
    checkpoint: u64,
}

impl KeyIterator {
    /// Returns the next key and its value; `None` at the end.
    ///
    /// # Errors
    /// Damage, after which the scan continues behind it; or the store was closed. Of a follower,
    /// `ESTALE` if the writer has overwritten what the scan reads: then begin it again.
    pub fn next(&self) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
        let next = self.next_pair();
        let is_lost = next.as_ref().is_err_and(|error| error.errno != Errno::BADF);
        if is_lost && self.store.follows {
            self.store.refresh()?;
            if self.store.opened()?.newest_checkpoint() != self.checkpoint {
                let shown = self.store.path.shown();
                let text = format!(
                    "{shown}: the writer has overwritten what this scan reads; begin it again"
                );
                return Err(Error::new(Errno::STALE, text));
            }
        }
        next
    }

    fn next_pair(&self) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
        self.store.with_store(|_| {
            let mut held = self.scan.lock();
            let Some(scan) = &mut *held else { return Ok(None) };
            let next = if self.reverse { scan.next_back() } else { scan.next() };
            if next.is_none() {
                *held = None;
            }
            next.transpose()
        })
    }
}

fn create(path: &Path, new: &NewStore) -> anyhow::Result<()> {
    let shown = path.shown();
    let opened = host_file::open_exclusive(path)?;
    let created = opened.is_none();
    if let Some(file) = &opened {
        create_store::check_overwrite(path, file, &new.force, "force")?;
        if new.force == OverwritePermission::Nothing && !file.metadata()?.is_file() {
            let text = format!(
                "{shown} is a block device; force makes a store of it, and what it holds is lost"
            );
            return Err(Error::new(Errno::EXIST, text).into());
        }
    }
    let file = match opened {
        Some(file) => file,
        None if new.len_bytes.is_none() => {
            return Err(crate::not_found_error(format!(
                "{shown} does not exist: a size is needed"
            )));
        }
        None => {
            let file = std::fs::File::options().read(true).write(true).create_new(true).open(path);
            let file = file.with_context(|| shown.to_string())?;
            host_file::claim_exclusive(&file, path)?;
            file
        }
    };
    let there = host_file::len_bytes(&file)?;
    let len_bytes = new.len_bytes.unwrap_or(there);
    let fits = len_bytes > 0 && (file.metadata()?.is_file() || len_bytes == there);
    if !fits {
        let text =
            format!("{shown} has {there} bytes: a store takes all of a device, and more than none");
        return Err(Error::new(Errno::INVAL, text).into());
    }
    let wanted = StoreSpec { len_bytes, sparse: new.sparse, profile: None, layout: new.layout };
    let made = create_store::create_in_file(path, file, &wanted, &mut |_, _, _| {});
    if made.is_err() && created {
        let _ = std::fs::remove_file(path);
    }
    made.map(drop)
}
