//! The stores that this process has open.
//!
//! Law 1: a store is opened once, by the first database of it, and closed with a checkpoint by the
//! last one. Both happen under the lock of the registry.
//! Law 2: opening a store for writing deletes what a crash left of transactions.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use draconis_access::{Error as AccessError, bucket_host, stores};
use draconis_objects::{Error, Store};
use parking_lot::Mutex;

use crate::bucket::{self, BucketParameters};
use crate::codes;
use crate::database::OpenStore;
use crate::error::{Failure, Result};

static REGISTRY: Mutex<BTreeMap<PathBuf, Arc<OpenStore>>> = Mutex::new(BTreeMap::new());

/// Errno of a file that another process has locked.
const EBUSY: i32 = 16;

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
            // Everything that must be durable is.
            let _ = stores::close_store(&self.0.store, &self.0.path);
        }
    }
}

impl StoreUse {
    /// Opens a store, or uses it if it is open. [`codes::BUSY`] if another process uses it.
    pub fn open(path: &Path, parameters: &BucketParameters, is_read_only: bool) -> Result<Self> {
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
        let store = match bucket_host::parse_url(path) {
            Some(address) => bucket::open(address, parameters, is_read_only)?,
            None => open_file(path, parameters, is_read_only)?,
        };
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
        let open = Arc::new(OpenStore::new(path, store, is_owned));
        registry.insert(path.to_owned(), open.clone());
        open
    }

    /// Uses a store that is open already.
    pub fn find(path: &Path) -> Option<Self> {
        REGISTRY.lock().get(path).cloned().map(Self)
    }
}

/// Opens the store in a file or on a device.
fn open_file(path: &Path, parameters: &BucketParameters, is_read_only: bool) -> Result<Arc<Store>> {
    if let Some((name, _)) = parameters.0.first() {
        let why = format!("{}: {name} is for stores in buckets", path.display());
        return Err(Failure::new(codes::CANTOPEN, why));
    }
    let opened = match is_read_only {
        true => stores::open_shared(path),
        false => stores::open_exclusive(path),
    };
    opened.map_err(|error| {
        let error = AccessError::from(error);
        match error.errno.raw_os_error() {
            EBUSY => Failure::new(
                codes::BUSY,
                format!("{}: another process has the store open", path.display()),
            ),
            _ => Failure::new(codes::CANTOPEN, error.message),
        }
    })
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
