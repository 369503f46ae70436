//! Open stores and their databases, shared by the connections of this process.
//!
//! ```text
//!   xWrite, xTruncate ─▶ Pending ──FCNTL_SYNC──▶ group of the store ──xSync──▶ durable
//!                           │                       ▲
//!                           └─ with a super-journal: gathered until it is deleted
//! ```
//!
//! Law 1: the commit point is the group that FCNTL_SYNC submits, which SQLite sends after the last
//! write of a transaction and before it deletes the rollback journal, also with synchronous=OFF.
//! A database that shrank is truncated after it, which is a group of its own.
//! Law 2: with a super-journal, the commit point is its deletion: one group for all databases.
//! If it is not known to be durable, the store takes no more changes: SQLite would roll the databases
//! back one by one.
//! Law 3: changes that were not submitted when the writer unlocks are dropped. That is what a hot
//! journal is for in a file.

use std::collections::HashMap;
use std::fmt;
use std::fs::Metadata;
use std::ops::Bound;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use draconis_access::store_disk::parse_disk_name;
use draconis_objects::kv::Kv;
use draconis_objects::{Error, Group, ObjectId, Result as StoreResult, Store, Ticket};
use draconis_types::lock::{Mutex, MutexGuard};

use crate::codes;
use crate::error::{Failure, Result};
use crate::journal::Journal;
use crate::locks::{LockLevel, LockTable};
use crate::page_cache::PageCache;
use crate::pending::{
    Change, Committed, JOIN_PREFIX, PENDING_PREFIX, Pending, delete_staging, join_hidden_parent,
    read_object,
};

/// True in tests that must find that a commit is not one group.
pub(crate) static SPLIT_COMMITS: AtomicBool = AtomicBool::new(false);

/// A database and its state in this process.
#[derive(Debug)]
pub(crate) struct Database {
    pub name: String,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    committed: Committed,
    /// Pages of `committed`.
    cache: Arc<PageCache>,
    /// True once `committed` was looked up.
    is_known: bool,
    locks: LockTable,
    /// Changes of the connection that has reserved the database.
    pending: Option<Pending>,
    /// Super-journal whose deletion commits them.
    gathered_in: Option<String>,
    journals: Vec<Weak<Journal>>,
    /// True after a refused commit: a rollback follows.
    is_rolling_back: bool,
    hidden_parents: Vec<String>,
}

impl State {
    fn journals(&mut self) -> Vec<Arc<Journal>> {
        self.journals.retain(|journal| journal.strong_count() > 0);
        self.journals.iter().filter_map(Weak::upgrade).collect()
    }

    fn finish(&mut self, change: Change) {
        self.committed = change.committed;
        if let Some(pending) = &self.pending {
            pending.update_cache(&mut self.cache);
        }
        self.hidden_parents.extend(change.hidden_parent);
        (self.pending, self.gathered_in, self.is_rolling_back) = (None, None, false);
    }
}

/// A file, whatever its names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileIdentity {
    device: u64,
    inode: u64,
}

impl FileIdentity {
    pub fn new(metadata: &Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }

    fn of_path(path: &Path) -> Option<Self> {
        std::fs::metadata(path).ok().map(|metadata| Self::new(&metadata))
    }
}

/// An open store.
pub(crate) struct OpenStore {
    pub path: PathBuf,
    /// The file that was opened; `None` for buckets and for stores that the caller opened.
    pub file: Option<FileIdentity>,
    pub store: Arc<Store>,
    pub super_journals: SuperJournals,
    databases: Mutex<HashMap<String, Weak<Database>>>,
    /// False if the caller of `share_store` opened it.
    pub is_owned: bool,
    /// Why it takes no more changes.
    stopped: OnceLock<Failure>,
}

impl fmt::Debug for OpenStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenStore").field("path", &self.path).finish_non_exhaustive()
    }
}

impl OpenStore {
    pub fn new(path: &Path, file: Option<FileIdentity>, store: Arc<Store>, is_owned: bool) -> Self {
        Self {
            path: path.to_owned(),
            file,
            store,
            super_journals: SuperJournals::default(),
            databases: Mutex::default(),
            is_owned,
            stopped: OnceLock::new(),
        }
    }

    /// Returns true if another file, or none, is at the path of the store.
    pub fn is_replaced(&self) -> bool {
        self.file.is_some_and(|file| FileIdentity::of_path(&self.path) != Some(file))
    }

    /// Refuses changes of a store that nobody would find.
    pub fn check_not_replaced(&self) -> Result<()> {
        match self.is_replaced() {
            false => Ok(()),
            true => Err(Failure::new(
                codes::READONLY_DBMOVED,
                format!(
                    "{}: the file of the store was replaced or removed; close the connections to \
                     it and open the database anew",
                    self.path.display()
                ),
            )),
        }
    }

    /// Deletes staging objects, and joins parents that a crash left hidden.
    pub fn remove_leftovers(&self) -> StoreResult<()> {
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

/// Super-journals of a store, each with the databases that its deletion commits.
#[derive(Debug, Default)]
pub(crate) struct SuperJournals(Mutex<HashMap<String, SuperJournal>>);

#[derive(Debug, Default)]
struct SuperJournal {
    contents: Arc<Journal>,
    gathered: Vec<Arc<Database>>,
}

impl SuperJournals {
    pub fn contains(&self, name: &str) -> bool {
        self.0.lock().contains_key(name)
    }

    pub fn open(&self, name: &str, may_create: bool) -> Option<Arc<Journal>> {
        let mut all = self.0.lock();
        if may_create {
            return Some(all.entry(name.to_owned()).or_default().contents.clone());
        }
        all.get(name).map(|found| found.contents.clone())
    }

    /// Commits the gathered databases in one durable group, and deletes the super-journal. It stays
    /// if the group is refused.
    pub fn delete(&self, name: &str, store: &OpenStore) -> Result<()> {
        let Some(gathered) = self.0.lock().get(name).map(|found| found.gathered.clone()) else {
            return Ok(());
        };
        let mut group = Group::new();
        let mut states: Vec<(&Database, MutexGuard<'_, State>)> =
            gathered.iter().map(|database| (&**database, database.state.lock())).collect();
        let changes: Vec<Option<Change>> = states
            .iter()
            .map(|(database, state)| {
                let pending = state.pending.as_ref()?;
                Some(pending.add_to(&mut group, &store.store, &database.name))
            })
            .collect();
        let submitted = submit(store, group);
        for ((_, state), change) in states.iter_mut().zip(changes) {
            match (&submitted, change) {
                (Ok(_), Some(change)) => state.finish(change),
                (Ok(_), None) => state.gathered_in = None,
                (Err(_), _) => state.is_rolling_back = true,
            }
        }
        drop(states);
        wait(store, submitted?).inspect_err(|failure| {
            let Failure { code, message } = failure.clone();
            let step = "a transaction over several databases may have been committed; close all \
                        connections to the store and open it again";
            let _ = store.stopped.set(Failure { code, message: format!("{message}; {step}") });
        })?;
        self.0.lock().remove(name);
        Ok(())
    }

    fn gather(&self, name: &str, database: &Arc<Database>) -> bool {
        let mut all = self.0.lock();
        let Some(found) = all.get_mut(name) else { return false };
        found.gathered.push(database.clone());
        true
    }

    fn release(&self, name: &str, database: &Database) {
        if let Some(found) = self.0.lock().get_mut(name) {
            found.gathered.retain(|gathered| !std::ptr::eq(&**gathered, database));
        }
    }
}

fn submit(store: &OpenStore, group: Group) -> Result<Option<Ticket>> {
    if group.is_empty() {
        return Ok(None);
    }
    if let Some(failure) = store.stopped.get() {
        return Err(failure.clone());
    }
    store.check_not_replaced()?;
    let submitted = store.store.submit(group, &[]);
    let refused = |error| Failure::of_store(&store.path, error, codes::IOERR_WRITE);
    submitted.map(Some).map_err(|group| refused(group.error))
}

/// Waits until a commit is durable.
pub(crate) fn wait(store: &OpenStore, ticket: Option<Ticket>) -> Result<()> {
    let Some(ticket) = ticket else { return Ok(()) };
    let waited = store.store.wait(ticket);
    waited.map_err(|error| Failure::of_store(&store.path, error, codes::IOERR_FSYNC))
}

impl Database {
    pub fn new(name: String) -> Self {
        Self { name, state: Mutex::default() }
    }

    /// Looks the database up in the store, unless it is in use; returns true if it exists.
    pub fn refresh(&self, store: &OpenStore) -> Result<bool> {
        let mut state = self.state.lock();
        self.find_if_changed(&mut state, store)?;
        Ok(state.committed.object.is_some())
    }

    /// Looks the database up if another user of the store may have changed it.
    fn find_if_changed(&self, state: &mut State, store: &OpenStore) -> Result<()> {
        let may_have_changed = !state.is_known || !store.is_owned;
        match may_have_changed && state.locks.is_free() {
            true => self.find_committed(state, store),
            false => Ok(()),
        }
    }

    fn find_committed(&self, state: &mut State, store: &OpenStore) -> Result<()> {
        let found = self.look_up(store)?;
        if found != state.committed {
            state.cache.clear();
        }
        (state.committed, state.is_known) = (found, true);
        Ok(())
    }

    fn look_up(&self, store: &OpenStore) -> Result<Committed> {
        let found = store.store.find_named_object(self.name.as_bytes()).and_then(|object| {
            let len = object.map_or(Ok(0), |object| store.store.len(object))?;
            Ok(Committed { object, len })
        });
        found.map_err(|error| Failure::of_store(&store.path, error, codes::IOERR_READ))
    }

    pub fn lock(&self, store: &OpenStore, held: &mut LockLevel, wanted: LockLevel) -> Result<()> {
        if wanted > LockLevel::Shared {
            // With journal_mode=OFF, SQLite could not undo what a commit refuses.
            store.check_not_replaced()?;
        }
        let mut state = self.state.lock();
        self.find_if_changed(&mut state, store)?;
        match state.locks.raise(held, wanted) {
            true => Ok(()),
            false => Err(Failure::busy()),
        }
    }

    pub fn unlock(&self, store: &OpenStore, held: &mut LockLevel, wanted: LockLevel) {
        let mut state = self.state.lock();
        if *held > LockLevel::Shared && wanted <= LockLevel::Shared {
            self.release(&mut state, store);
            for journal in state.journals() {
                journal.take_was_read();
            }
            state.is_rolling_back = false;
            if let Some(pending) = state.pending.take() {
                // What is left of it is deleted when the store is opened next.
                let _ = pending.discard(&store.store);
            }
            self.join_hidden_parents(&mut state, store);
        }
        state.locks.lower(held, wanted);
    }

    pub fn is_reserved(&self) -> bool {
        self.state.lock().locks.is_reserved()
    }

    /// Registers a new rollback journal.
    pub fn add_journal(&self) -> Arc<Journal> {
        let journal = Arc::new(Journal::default());
        let mut state = self.state.lock();
        state.journals.retain(|journal| journal.strong_count() > 0);
        state.journals.push(Arc::downgrade(&journal));
        journal
    }

    /// Returns the rollback journal of the writer, if it has one.
    pub fn active_journal(&self) -> Option<Arc<Journal>> {
        let mut state = self.state.lock();
        if !state.locks.is_reserved() {
            return None;
        }
        state.journals().into_iter().find(|journal| journal.has_valid_header())
    }

    /// Returns the length that the connection sees.
    pub fn len(&self, held: LockLevel) -> u64 {
        let state = self.state.lock();
        match &state.pending {
            Some(pending) if held > LockLevel::Shared => pending.len(),
            _ => state.committed.len,
        }
    }

    pub fn read(
        &self,
        store: &OpenStore,
        held: LockLevel,
        at: u64,
        into: &mut [u8],
    ) -> Result<usize> {
        let state = self.state.lock();
        let read = match &state.pending {
            Some(pending) if held > LockLevel::Shared => {
                pending.read(&store.store, &state.cache, at, into)
            }
            _ => {
                let (Committed { object, len }, cache) = (state.committed, state.cache.clone());
                drop(state);
                cache.read_through((at, len), into, |into| {
                    read_object(&store.store, object, (at, len), into)
                })
            }
        };
        read.map_err(|error| Failure::of_store(&store.path, error, codes::IOERR_READ))
    }

    /// Changes the pending state of the writer.
    pub fn change(&self, store: &OpenStore, act: impl FnOnce(&mut Pending)) -> Result<()> {
        let mut state = self.state.lock();
        self.release(&mut state, store);
        let committed = state.committed;
        let pending = state.pending.get_or_insert_with(|| Pending::new(committed));
        act(pending);
        if pending.is_over_limit() {
            let spilled = pending.spill(&store.store);
            spilled.map_err(|error| Failure::of_store(&store.path, error, codes::IOERR_WRITE))?;
        }
        Ok(())
    }

    /// Takes the database out of the super-journal that would commit it.
    fn release(&self, state: &mut State, store: &OpenStore) {
        if let Some(name) = state.gathered_in.take() {
            store.super_journals.release(&name, self);
        }
    }

    /// Commits: submits the pending changes, or gathers them for a super-journal of the store.
    pub fn commit(
        self: &Arc<Self>,
        store: &OpenStore,
        super_journal: Option<&str>,
    ) -> Result<Option<Ticket>> {
        let mut state = self.state.lock();
        if let Some(name) = super_journal
            && state.pending.is_some()
        {
            self.release(&mut state, store);
            if store.super_journals.gather(name, self) {
                state.gathered_in = Some(name.to_owned());
                return Ok(None);
            }
        }
        self.release(&mut state, store);
        let mut was_read = false;
        for journal in state.journals() {
            was_read |= journal.take_was_read();
        }
        let Some(pending) = &state.pending else { return Ok(None) };
        if was_read || state.is_rolling_back {
            // A rollback must not need space.
            let unchanged = pending.is_unchanged(&store.store);
            if unchanged
                .map_err(|error| Failure::of_store(&store.path, error, codes::IOERR_READ))?
            {
                (state.pending, state.is_rolling_back) = (None, false);
                return Ok(None);
            }
        }
        if SPLIT_COMMITS.load(Ordering::Relaxed) {
            wait(store, submit(store, pending.one_extent())?)?;
        }
        let mut group = Group::new();
        let change = pending.add_to(&mut group, &store.store, &self.name);
        match submit(store, group) {
            Ok(ticket) => {
                state.finish(change);
                Ok(ticket)
            }
            Err(failure) => {
                state.is_rolling_back = true;
                Err(failure)
            }
        }
    }

    /// Returns true if the pending changes wait for a super-journal.
    pub fn is_gathered(&self) -> bool {
        self.state.lock().gathered_in.is_some()
    }

    /// Returns true if there are pending changes.
    pub fn has_pending(&self) -> bool {
        self.state.lock().pending.is_some()
    }

    /// Drops the pending changes.
    pub fn discard(&self, store: &OpenStore) -> Result<()> {
        let mut state = self.state.lock();
        self.release(&mut state, store);
        let discarded =
            state.pending.take().map_or(Ok(()), |pending| pending.discard(&store.store));
        discarded.map_err(|error| Failure::of_store(&store.path, error, codes::IOERR_WRITE))
    }

    /// Does what a commit left to be done while the database is locked.
    pub fn finish_commit(&self, store: &OpenStore) {
        self.join_hidden_parents(&mut self.state.lock(), store);
    }

    /// Joins parents that long transactions left. A parent that cannot be joined now is joined when
    /// the store is opened next: until then it takes space.
    fn join_hidden_parents(&self, state: &mut State, store: &OpenStore) {
        if state.hidden_parents.is_empty() || state.pending.is_some() {
            return;
        }
        state.hidden_parents.retain(|name| join_hidden_parent(&store.store, name).is_err());
        // The joined object may be the parent, with the same pages.
        if let Ok(joined) = self.look_up(store) {
            state.committed = joined;
        }
    }

    /// Takes a snapshot: `DATABASE@NAME`.
    pub fn take_snapshot(&self, store: &OpenStore, snapshot: &str) -> Result<()> {
        let mut state = self.state.lock();
        if state.locks.is_reserved() {
            let why = format!("{}: a snapshot is of a committed state: commit first", self.name);
            return Err(Failure::new(codes::BUSY, why));
        }
        store.check_not_replaced()?;
        parse_disk_name(snapshot).map_err(|why| Failure::new(codes::ERROR, why))?;
        let taken = store.store.take_snapshot(self.name.as_bytes(), snapshot.as_bytes());
        self.find_committed(&mut state, store)?;
        taken.map_err(|error| Failure::of_store(&store.path, error, codes::ERROR))
    }
}
