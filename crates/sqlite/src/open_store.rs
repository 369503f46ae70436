//! The stores that this process has open.
//!
//! Law 1: a store is opened once, by the first database of it, and closed with a checkpoint by the
//! last one. Both happen under the lock of the registry.
//! Law 2: opening a store for writing deletes what a crash left of transactions.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::{Bound, Deref};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use draconis_access::{Error as AccessError, stores};
use draconis_objects::kv::Kv;
use draconis_objects::{Error, ObjectId, Result as StoreResult, Store};
use parking_lot::Mutex;

use crate::codes;
use crate::database::{Database, SuperJournals};
use crate::error::{Failure, Result};
use crate::pending::{JOIN_PREFIX, PENDING_PREFIX, delete_staging, join_hidden_parent};

static REGISTRY: Mutex<BTreeMap<PathBuf, Arc<OpenStore>>> = Mutex::new(BTreeMap::new());

/// Errno of a file that another process has locked.
const EBUSY: i32 = 16;

/// An open store.
pub(crate) struct OpenStore {
    pub path: PathBuf,
    pub store: Arc<Store>,
    pub super_journals: SuperJournals,
    databases: Mutex<HashMap<String, Weak<Database>>>,
    /// False if the caller of [`share_store`] opened it.
    pub is_owned: bool,
}

impl fmt::Debug for OpenStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenStore").field("path", &self.path).finish_non_exhaustive()
    }
}

/// A use of an open store. The last one closes it.
#[derive(Debug)]
pub(crate) struct StoreUse(Arc<OpenStore>);

impl Deref for StoreUse {
    type Target = OpenStore;

    fn deref(&self) -> &OpenStore {
        &self.0
    }
}

impl Drop for StoreUse {
    fn drop(&mut self) {
        let mut registry = REGISTRY.lock();
        // The registry's own, and this one.
        if Arc::strong_count(&self.0) > 2 {
            return;
        }
        registry.remove(&self.0.path);
        if self.0.is_owned && !self.0.store.is_read_only() {
            // All that must be durable was waited for.
            let _ = stores::close_store(&self.0.store, &self.0.path);
        }
    }
}

impl StoreUse {
    /// Opens a store, or uses it if it is open. [`codes::BUSY`] if another process uses it.
    pub fn open(path: &Path, is_read_only: bool) -> Result<Self> {
        let mut registry = REGISTRY.lock();
        if let Some(open) = registry.get(path) {
            if !is_read_only && open.store.is_read_only() {
                let why = format!(
                    "{}: this process has it open read-only; close those connections first",
                    path.display()
                );
                return Err(Failure::new(codes::CANTOPEN, why));
            }
            return Ok(Self(open.clone()));
        }
        let opened = match is_read_only {
            true => stores::open_shared(path),
            false => stores::open_exclusive(path),
        };
        let store = opened.map_err(|error| {
            let error = AccessError::from(error);
            match error.errno.raw_os_error() {
                EBUSY => Failure::new(
                    codes::BUSY,
                    format!("{}: another process has the store open", path.display()),
                ),
                _ => Failure::new(codes::CANTOPEN, error.message),
            }
        })?;
        let open = Self(Self::register(&mut registry, path, store, true));
        drop(registry);
        open.remove_leftovers().map_err(|error| Failure::of_store(path, error, codes::CANTOPEN))?;
        Ok(open)
    }

    fn register(
        registry: &mut BTreeMap<PathBuf, Arc<OpenStore>>,
        path: &Path,
        store: Arc<Store>,
        is_owned: bool,
    ) -> Arc<OpenStore> {
        let open = Arc::new(OpenStore {
            path: path.to_owned(),
            store,
            super_journals: SuperJournals::default(),
            databases: Mutex::default(),
            is_owned,
        });
        registry.insert(path.to_owned(), open.clone());
        open
    }

    /// Uses a store that is open already.
    pub fn find(path: &Path) -> Option<Self> {
        REGISTRY.lock().get(path).cloned().map(Self)
    }
}

impl OpenStore {
    /// Deletes staging objects, and joins parents that a crash left hidden.
    fn remove_leftovers(&self) -> StoreResult<()> {
        if self.store.is_read_only() {
            return Ok(());
        }
        for key in self.list_keys(PENDING_PREFIX)? {
            let number = std::str::from_utf8(&key).ok().and_then(|number| number.parse().ok());
            let number = number.ok_or(Error::Misuse("a key sqlite/pending/ without a number"))?;
            delete_staging(&self.store, ObjectId(number))?;
        }
        for key in self.list_keys(JOIN_PREFIX)? {
            let name = String::from_utf8_lossy(&key).into_owned();
            match join_hidden_parent(&self.store, &name) {
                // It is joined when there is space.
                Err(Error::NoSpace { .. }) => {}
                joined => joined?,
            }
        }
        Ok(())
    }

    /// Returns the rests of the keys with a prefix.
    fn list_keys(&self, prefix: &[u8]) -> StoreResult<Vec<Vec<u8>>> {
        let range = (Bound::Included(prefix), Bound::Unbounded);
        let scan = Kv::new(self.store.clone()).scan::<(Bound<&[u8]>, Bound<&[u8]>)>(&range);
        let mut rests = vec![];
        for pair in scan {
            let (key, _) = pair?;
            let Some(rest) = key.strip_prefix(prefix) else { break };
            rests.push(rest.to_vec());
        }
        Ok(rests)
    }

    /// Returns the state of a database of the store.
    pub fn database(&self, name: &str) -> Arc<Database> {
        let mut databases = self.databases.lock();
        if let Some(open) = databases.get(name).and_then(Weak::upgrade) {
            return open;
        }
        databases.retain(|_, database| database.strong_count() > 0);
        let database = Arc::new(Database::new(name.to_owned()));
        databases.insert(name.to_owned(), Arc::downgrade(&database));
        database
    }

    /// Returns the state of a database if it is open.
    pub fn find_database(&self, name: &str) -> Option<Arc<Database>> {
        self.databases.lock().get(name).and_then(Weak::upgrade)
    }
}

/// Returns true if a store was registered under this path by [`share_store`].
pub(crate) fn is_shared(path: &Path) -> bool {
    REGISTRY.lock().get(path).is_some_and(|open| !open.is_owned)
}

/// Makes a store that is open available under `name`, as the parameter `store` of a database name.
/// Drop the guard once all connections are closed. Only SQLite may change its databases meanwhile.
///
/// # Errors
/// The name is in use, or the store is damaged or full.
pub fn share_store(name: &Path, store: Arc<Store>) -> draconis_access::Result<SharedStore> {
    let with_context = |error| AccessError::from(stores::with_context(name, error));
    let mut registry = REGISTRY.lock();
    if registry.contains_key(name) {
        return Err(with_context(Error::Misuse("a store is open under this name already")));
    }
    let open = StoreUse(StoreUse::register(&mut registry, name, store, false));
    drop(registry);
    open.remove_leftovers().map_err(with_context)?;
    Ok(SharedStore { _open: open })
}

/// Guard of a store that is available under a name.
#[derive(Debug)]
pub struct SharedStore {
    _open: StoreUse,
}
