//! Changes of a transaction that is not committed.
//!
//! ```text
//!   extents, in memory   over   base: the database's object, or a staging object
//!      │ more than the limit
//!      └─▶ staging object: a fork of the database's object, which a crash leaves to be deleted
//! ```
//!
//! Law 1: readers other than the writer see none of it.
//! Law 2: [`Pending::add_to`] is one part of one group of the store, at any size. A staging object
//! takes over the name; its parent is hidden behind a name of its own until both are joined.
//! Law 3: a refused group leaves all as it was.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use draconis_objects::{Error, Group, LifetimeHint, ObjectId, Result, Store};

use crate::page_cache::PageCache;

/// Longest write of a group that adjacent pages are joined to: the longest payload of a store.
const MAX_WRITE_BYTES: usize = 128 << 10;

/// Bytes of a transaction that are kept in memory.
pub(crate) static MEMORY_LIMIT: AtomicUsize = AtomicUsize::new(32 << 20);

/// Prefix of the keys of staging objects.
pub(crate) const PENDING_PREFIX: &[u8] = b"sqlite/pending/";
/// Prefix of the keys of hidden parents that have to be joined with their children.
pub(crate) const JOIN_PREFIX: &[u8] = b"sqlite/join/";

pub(crate) fn pending_key(id: ObjectId) -> Vec<u8> {
    [PENDING_PREFIX, id.to_string().as_bytes()].concat()
}

pub(crate) fn join_key(name: &str) -> Vec<u8> {
    [JOIN_PREFIX, name.as_bytes()].concat()
}

/// The object of a database, and its length.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Committed {
    /// `None` before the first commit.
    pub object: Option<ObjectId>,
    pub len: u64,
}

/// Changes over a committed state.
#[derive(Debug)]
pub(crate) struct Pending {
    committed: Committed,
    /// A fork of the committed object, with all but `extents`.
    staging: Option<ObjectId>,
    /// Pages of the staging object, if there is one.
    staging_cache: Option<Arc<PageCache>>,
    /// Length of the object below the extents, and how much of it is visible.
    stored_len: u64,
    visible_len: u64,
    len: u64,
    /// Do not overlap.
    extents: BTreeMap<u64, Vec<u8>>,
    bytes: usize,
}

/// What a submitted part changes.
#[derive(Debug)]
pub(crate) struct Change {
    pub committed: Committed,
    /// Name of the parent that is now hidden.
    pub hidden_parent: Option<String>,
}

impl Pending {
    pub fn new(committed: Committed) -> Self {
        let len = committed.len;
        Self {
            committed,
            staging: None,
            staging_cache: None,
            stored_len: len,
            visible_len: len,
            len,
            extents: BTreeMap::new(),
            bytes: 0,
        }
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    fn base(&self) -> Option<ObjectId> {
        self.staging.or(self.committed.object)
    }

    /// Reads from byte `at` on; returns the number of bytes before the end. `cache` has pages of the
    /// committed object.
    pub fn read(
        &self,
        store: &Store,
        cache: &PageCache,
        at: u64,
        into: &mut [u8],
    ) -> Result<usize> {
        let len = to_usize(self.len.saturating_sub(at)).min(into.len());
        let Some(into) = into.get_mut(..len) else { return Ok(0) };
        let end = at.saturating_add(len as u64);
        if let Some((start, bytes)) = self.extents.range(..=at).next_back()
            && let Some(found) = bytes.get(to_usize(at.saturating_sub(*start))..)
            && let Some(found) = found.get(..len)
        {
            into.copy_from_slice(found);
            return Ok(len);
        }
        let (base, visible) = (self.base(), self.visible_len);
        if end <= visible && self.overlapping(at, end).next().is_none() {
            let cache = self.staging_cache.as_deref().unwrap_or(cache);
            return cache.read_through((at, visible), into, |into| {
                read_object(store, base, (at, visible), into)
            });
        }
        read_object(store, base, (at, visible), into)?;
        for (start, bytes) in self.overlapping(at, end) {
            let from = (*start).max(at);
            let to = start.saturating_add(bytes.len() as u64).min(end);
            let source = to_usize(from.saturating_sub(*start))..to_usize(to.saturating_sub(*start));
            let target = to_usize(from.saturating_sub(at))..to_usize(to.saturating_sub(at));
            if let (Some(into), Some(from)) = (into.get_mut(target), bytes.get(source)) {
                into.copy_from_slice(from);
            }
        }
        Ok(len)
    }

    fn overlapping(&self, at: u64, end: u64) -> impl Iterator<Item = (&u64, &Vec<u8>)> {
        let before = self.extents.range(..at).next_back();
        let before = before.filter(move |(start, bytes)| end_of(**start, bytes) > at);
        before.into_iter().chain(self.extents.range(at..end.max(at)))
    }

    /// Writes at byte `at`. The caller spills when [`Pending::is_over_limit`].
    pub fn write(&mut self, at: u64, bytes: &[u8]) {
        self.len = self.len.max(at.saturating_add(bytes.len() as u64));
        match self.extents.get_mut(&at) {
            Some(there) if there.len() == bytes.len() => there.copy_from_slice(bytes),
            _ => {
                self.remove(at, at.saturating_add(bytes.len() as u64));
                self.insert(at, bytes.to_vec());
            }
        }
    }

    /// Sets the length; new bytes read as zeros.
    pub fn truncate(&mut self, len: u64) {
        if len < self.len {
            self.remove(len, u64::MAX);
            self.visible_len = self.visible_len.min(len);
        }
        self.len = len;
    }

    fn insert(&mut self, at: u64, bytes: Vec<u8>) {
        if !bytes.is_empty() {
            self.bytes = self.bytes.saturating_add(bytes.len());
            self.extents.insert(at, bytes);
        }
    }

    fn remove(&mut self, at: u64, end: u64) {
        let starts: Vec<u64> = self.overlapping(at, end).map(|(start, _)| *start).collect();
        for start in starts {
            let Some(mut bytes) = self.extents.remove(&start) else { continue };
            self.bytes = self.bytes.saturating_sub(bytes.len());
            if end_of(start, &bytes) > end {
                let rest = bytes.split_off(to_usize(end.saturating_sub(start)));
                self.insert(end, rest);
            }
            bytes.truncate(to_usize(at.saturating_sub(start)));
            self.insert(start, bytes);
        }
    }

    /// Returns true if the changes need more memory than they may.
    pub fn is_over_limit(&self) -> bool {
        self.bytes > MEMORY_LIMIT.load(Ordering::Relaxed)
    }

    /// Moves the changes in memory to the staging object.
    pub fn spill(&mut self, store: &Store) -> Result<()> {
        let mut group = Group::new();
        let staging = match self.staging {
            Some(staging) => staging,
            None => {
                let staging = match self.committed.object {
                    Some(parent) => group.fork(store.new_object(), parent),
                    None => group.create(store.new_object(), LifetimeHint::Unknown),
                };
                group.put(&pending_key(staging), &[]);
                staging
            }
        };
        self.add_extents(&mut group, staging);
        store.submit(group, &[]).map_err(|refused| refused.error)?;
        self.staging = Some(staging);
        let cache = self.staging_cache.take().unwrap_or_default();
        self.replace_pages(&cache);
        self.staging_cache = Some(cache);
        (self.stored_len, self.visible_len) = (self.len, self.len);
        self.extents.clear();
        self.bytes = 0;
        Ok(())
    }

    fn add_extents(&self, group: &mut Group, id: ObjectId) {
        if self.visible_len < self.stored_len {
            group.truncate(id, self.visible_len);
        }
        let (mut run, mut run_at, mut end) = (vec![], 0, self.visible_len);
        for (&at, bytes) in &self.extents {
            let is_adjacent = end_of(run_at, &run) == at;
            if !is_adjacent || run.len().saturating_add(bytes.len()) > MAX_WRITE_BYTES {
                if !run.is_empty() {
                    group.write(id, run_at, &run);
                }
                run.clear();
                run_at = at;
            }
            run.extend_from_slice(bytes);
            end = end.max(end_of(at, bytes));
        }
        if !run.is_empty() {
            group.write(id, run_at, &run);
        }
        if self.len > end {
            group.truncate(id, self.len);
        }
    }

    /// Adds the changes to a group that commits them to the database `name`.
    pub fn add_to(&self, group: &mut Group, store: &Store, name: &str) -> Change {
        let (id, mut hidden_parent) = match (self.staging, self.committed.object) {
            (None, Some(id)) => (id, None),
            (None, None) => (group.create(store.new_object(), LifetimeHint::Unknown), None),
            (Some(id), parent) => (id, parent.map(|parent| (parent, format!("{name}@~{id}")))),
        };
        self.add_extents(group, id);
        if self.committed.object != Some(id) {
            group.set_name(name.as_bytes(), id);
        }
        if self.staging.is_some() {
            group.remove(&pending_key(id));
        }
        if let Some((parent, hidden)) = &mut hidden_parent {
            group.set_name(hidden.as_bytes(), *parent);
            group.put(&join_key(hidden), &[]);
        }
        Change {
            committed: Committed { object: Some(id), len: self.len },
            hidden_parent: hidden_parent.map(|(_, name)| name),
        }
    }

    /// Brings a cache of the committed state up to date, once the changes are committed.
    pub fn update_cache(&self, cache: &mut Arc<PageCache>) {
        if let Some(staging) = &self.staging_cache {
            *cache = staging.clone();
        }
        self.replace_pages(cache);
    }

    fn replace_pages(&self, cache: &PageCache) {
        if self.visible_len < self.stored_len {
            cache.clear();
        }
        self.extents.iter().for_each(|(at, bytes)| cache.replace(*at, bytes));
    }

    /// Returns a group with one of the changes, for tests.
    pub fn one_extent(&self) -> Group {
        let mut group = Group::new();
        if let (Some(id), None, Some((at, bytes))) =
            (self.committed.object, self.staging, self.extents.last_key_value())
        {
            group.write(id, *at, bytes);
        }
        group
    }

    /// Returns true if all is as committed, as after a rollback.
    pub fn is_unchanged(&self, store: &Store) -> Result<bool> {
        if self.staging.is_some() || self.len != self.committed.len {
            return Ok(false);
        }
        // A rollback writes back what was truncated.
        let written = self
            .extents
            .iter()
            .map(|(at, bytes)| end_of(*at, bytes).saturating_sub((*at).max(self.visible_len)));
        if written.sum::<u64>() < self.len.saturating_sub(self.visible_len) {
            return Ok(false);
        }
        let mut old = vec![];
        for (&at, bytes) in &self.extents {
            old.resize(bytes.len(), 0);
            read_object(store, self.committed.object, (at, self.committed.len), &mut old)?;
            if old != *bytes {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Deletes the staging object, if there is one.
    pub fn discard(self, store: &Store) -> Result<()> {
        let Some(staging) = self.staging else { return Ok(()) };
        delete_staging(store, staging)
    }
}

/// Deletes a staging object and its key.
pub(crate) fn delete_staging(store: &Store, staging: ObjectId) -> Result<()> {
    let mut group = Group::new();
    group.delete(staging);
    group.remove(&pending_key(staging));
    store.submit(group, &[]).map_err(|refused| refused.error)?;
    Ok(())
}

/// Joins a hidden parent with its child. Readers see unchanged data, also if it is interrupted.
pub(crate) fn join_hidden_parent(store: &Arc<Store>, name: &str) -> Result<()> {
    match store.remove_disk(name.as_bytes(), false) {
        // It is joined already.
        Err(Error::Disk(_)) | Ok(()) => {}
        Err(error) => return Err(error),
    }
    let mut group = Group::new();
    group.remove(&join_key(name));
    store.submit(group, &[]).map_err(|refused| refused.error)?;
    Ok(())
}

/// Fills `into` from byte `at` of an object with `len` visible bytes, and with zeros after them.
pub(crate) fn read_object(
    store: &Store,
    id: Option<ObjectId>,
    (at, len): (u64, u64),
    into: &mut [u8],
) -> Result<()> {
    let visible = to_usize(len.saturating_sub(at)).min(into.len());
    let mut done = 0;
    if let (Some(id), Some(into)) = (id, into.get_mut(..visible))
        && !into.is_empty()
    {
        done = store.read(id, at, into)?;
    }
    into.get_mut(done..).unwrap_or_default().fill(0);
    Ok(())
}

fn end_of(at: u64, bytes: &[u8]) -> u64 {
    at.saturating_add(bytes.len() as u64)
}

fn to_usize(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}
