//! The stores that this process has open.
//!
//! ```text
//!   name ──▶ open store ──▶ file (device, inode)      several names may have one file
//! ```
//!
//! Law 1: a store is opened once, by the first database of it, and closed with a checkpoint by the
//! last one. Both happen under the lock of the registry.
//! Law 2: a name whose file was replaced is not used for the new one while a connection is open. The
//! new file gets another name.
//! Law 3: a forked child has no stores. It opens its own, or finds them busy.
//! Law 4: nothing here waits for another process: the busy handler of the connection does.
//! Law 5: opening a store for writing deletes what a crash left of transactions.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use draconis_access::{Error as AccessError, bucket_host, stores};
use draconis_device::{PerProcess, ProcessBound};
use draconis_objects::{Error, Store};
use draconis_types::lock::Mutex;

use crate::bucket::{self, BucketParameters};
use crate::codes;
use crate::database::{FileIdentity, OpenStore};
use crate::error::{Failure, Result};

/// Open stores by name. A path compares equal to another spelling of it; names do not.
type Registry = BTreeMap<OsString, Arc<OpenStore>>;

static REGISTRY: PerProcess<Mutex<Registry>> = PerProcess::new();

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
        let mut registry = REGISTRY.get().lock();
        let is_this = |open: &Arc<OpenStore>| Arc::ptr_eq(open, &self.0);
        // Those of the registry, and this one.
        if Arc::strong_count(&self.0) > registry.values().filter(|open| is_this(open)).count() + 1 {
            return;
        }
        registry.retain(|_, open| !is_this(open));
        if self.0.is_owned && !self.0.store.is_read_only() {
            // Everything that must be durable is.
            let _ = stores::close_store(&self.0.store, &self.0.path);
        }
    }
}

impl StoreUse {
    /// Opens a store, or uses it if it is open. [`codes::BUSY`] if another process uses it.
    pub fn open(path: &Path, parameters: &BucketParameters, is_read_only: bool) -> Result<Self> {
        let mut registry = REGISTRY.get().lock();
        if let Some(open) = registry.get(path.as_os_str()) {
            open.check_not_replaced()?;
            return Self::share(open, is_read_only);
        }
        let opened = match bucket_host::parse_url(path) {
            Some(address) => {
                OpenStore::new(path, None, bucket::open(address, parameters, is_read_only)?, true)
            }
            None => {
                let (file, identity) = open_file(path, parameters, is_read_only)?;
                let is_same = |open: &&Arc<OpenStore>| open.file == Some(identity);
                if let Some(open) = registry.values().find(is_same).cloned() {
                    let shared = Self::share(&open, is_read_only)?;
                    registry.insert(path.into(), open);
                    return Ok(shared);
                }
                let store = stores::try_open(path, file, !is_read_only);
                OpenStore::new(path, Some(identity), store.map_err(open_failure(path))?, true)
            }
        };
        let open = Self::register(&mut registry, opened);
        drop(registry);
        open.remove_leftovers().map_err(|error| Failure::of_store(path, error, codes::CANTOPEN))?;
        Ok(open)
    }

    fn share(open: &Arc<OpenStore>, is_read_only: bool) -> Result<Self> {
        if !is_read_only && open.store.is_read_only() {
            let why = format!(
                "{}: this process has it open read-only; close those connections first",
                open.path.display()
            );
            return Err(Failure::new(codes::CANTOPEN, why));
        }
        Ok(Self(open.clone()))
    }

    fn register(registry: &mut Registry, open: OpenStore) -> Self {
        let open = Arc::new(open);
        registry.insert(open.path.clone().into(), open.clone());
        Self(open)
    }

    /// Uses a store that is open already.
    pub fn find(path: &Path) -> Option<Self> {
        REGISTRY.get().lock().get(path.as_os_str()).cloned().map(Self)
    }
}

/// Opens the file or device of a store, without a lock.
fn open_file(
    path: &Path,
    parameters: &BucketParameters,
    is_read_only: bool,
) -> Result<(File, FileIdentity)> {
    if let Some((name, _)) = parameters.0.first() {
        let why = format!("{}: {name} is for stores in buckets", path.display());
        return Err(Failure::new(codes::CANTOPEN, why));
    }
    let opened = stores::open_unlocked(path, !is_read_only);
    let opened = opened.and_then(|file| {
        let identity = FileIdentity::new(&file.metadata()?);
        Ok((file, identity))
    });
    opened.map_err(open_failure(path))
}

fn open_failure<E: Into<AccessError>>(path: &Path) -> impl Fn(E) -> Failure {
    move |error| {
        let error = error.into();
        match error.errno.raw_os_error() {
            EBUSY => Failure::new(
                codes::BUSY,
                format!("{}: another process has the store open", path.display()),
            ),
            _ => Failure::new(codes::CANTOPEN, error.message),
        }
    }
}

/// What is registered under a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Registration {
    /// A store of [`share_store`].
    Shared,
    Opened,
    /// A store whose file was replaced or removed.
    Replaced,
}

/// Returns what is registered under a name.
pub(crate) fn find_registration(name: &OsStr) -> Option<Registration> {
    let registry = REGISTRY.get().lock();
    let open = registry.get(name)?;
    Some(match open.is_owned {
        false => Registration::Shared,
        true if open.is_replaced() => Registration::Replaced,
        true => Registration::Opened,
    })
}

/// Makes a store that is open available under `name`, as the parameter `store` of a database name.
/// Drop the guard once all connections are closed. Only SQLite may change its databases meanwhile.
///
/// # Errors
/// The name is in use, or the store is damaged or full.
pub fn share_store(name: &Path, store: Arc<Store>) -> draconis_access::Result<SharedStore> {
    let with_context = |error| AccessError::from(stores::with_context(name, error));
    let mut registry = REGISTRY.get().lock();
    if registry.contains_key(name.as_os_str()) {
        return Err(with_context(Error::Misuse("a store is open under this name already")));
    }
    let open = StoreUse::register(&mut registry, OpenStore::new(name, None, store, false));
    drop(registry);
    open.remove_leftovers().map_err(with_context)?;
    Ok(SharedStore { _open: ProcessBound::new(open) })
}

/// Guard of a store that is available under a name.
#[derive(Debug)]
pub struct SharedStore {
    _open: ProcessBound<StoreUse>,
}
