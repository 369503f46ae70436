//! Paths and their content objects: blocking calls on the store.
//!
//! ```text
//!   path ──▶ record ──▶ content object      written once, never changed
//!   path ──▶ record ──┘                     a copy shares it
//! ```
//!
//! Law 1: a change of a path is one group: record, name, contents, and the deletion of what it
//! replaces. A reader sees all of it or nothing.
//! Law 2: a content object has a record or a pending key from the group that creates it on, so
//! that the next opening deletes what a crash left.
//! Law 3: a content object is not deleted while a reader in this process pins it, unless the store
//! is full and the caller deletes the object.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use draconis_device::Process;
use draconis_objects::kv::Kv;
use draconis_objects::{Error as StoreError, Group, ObjectId, Store, Ticket};
use draconis_types::lock::{Mutex, RwLock};
use object_store::path::Path;
use object_store::{Attributes, Error, PutMode, PutResult, Result};

use crate::blocking::run_detached;
use crate::error::{already_exists, damaged, generic, not_found, precondition, with_path};
use crate::record::{
    KeyRange, Record, Version, content_of_pending_key, key_range, meta_key, name_of_path,
    pending_key, pending_range, share_key, share_prefix, successor_of_prefix,
};

/// Longest contents that are one group with their record, and length of the pieces of longer ones.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// Paths of an open store.
#[derive(Debug)]
pub(crate) struct Catalog {
    pub store: Arc<Store>,
    pub kv: Kv,
    /// The process that may use it: in its children other threads may have left locks.
    pub process: Process,
    incarnation: u64,
    /// Held shared by a reader from the lookup of a record until it pinned the content object; held
    /// alone by a change from the check of its condition until its group is submitted.
    paths: RwLock<()>,
    pins: Mutex<HashMap<ObjectId, PinState>>,
}

#[derive(Debug, Default)]
struct PinState {
    holders: u64,
    /// True if the last holder deletes the content object.
    is_replaced: bool,
}

/// A content object that is not deleted while this exists.
#[derive(Debug)]
pub(crate) struct Pin {
    catalog: Arc<Catalog>,
    content: ObjectId,
}

impl Drop for Pin {
    fn drop(&mut self) {
        if self.catalog.process.check().is_err() {
            return;
        }
        let mut pins = self.catalog.pins.lock();
        let Some(state) = pins.get_mut(&self.content) else { return };
        state.holders = state.holders.saturating_sub(1);
        if state.holders > 0 {
            return;
        }
        let is_replaced = pins.remove(&self.content).is_some_and(|state| state.is_replaced);
        drop(pins);
        if is_replaced {
            let (catalog, content) = (self.catalog.clone(), self.content);
            run_detached(move || catalog.delete_pending_or_warn(content));
        }
    }
}

/// Contents that a group creates or releases from staging.
pub(crate) struct NewContents {
    pub group: Group,
    pub content: ObjectId,
    pub len: u64,
}

impl Catalog {
    /// Opens the paths of a store, and deletes what a crash left of uploads.
    pub fn open(store: Arc<Store>) -> draconis_objects::Result<Arc<Self>> {
        let info = store.info();
        let catalog = Arc::new(Self {
            kv: Kv::new(store.clone()),
            process: Process::current(),
            // A part of the store's id: what salvage brings into a new store keeps its e-tags.
            incarnation: ((info.id as u64) << 32) | (info.incarnation & u64::from(u32::MAX)),
            store,
            paths: RwLock::default(),
            pins: Mutex::default(),
        });
        if !catalog.store.is_read_only() {
            let (from, to) = pending_range();
            for pair in catalog.kv.scan::<KeyRange<'_>>(&key_range(&from, &to)) {
                if let Some(content) = content_of_pending_key(&pair?.0) {
                    catalog.delete_pending(content)?;
                }
            }
        }
        Ok(catalog)
    }

    /// Deletes a content object that has a pending key, or had one.
    pub fn delete_pending(&self, content: ObjectId) -> draconis_objects::Result<()> {
        let mut group = Group::new();
        group.remove(&pending_key(content));
        if self.has_object(content)? {
            group.delete(content);
        }
        self.store.submit(group, &[]).map(drop).map_err(|refused| refused.error)
    }

    /// As [`Catalog::delete_pending`], where nobody takes the error: the next opening tries again.
    pub fn delete_pending_or_warn(&self, content: ObjectId) {
        if let Err(error) = self.delete_pending(content) {
            log::warn!("object {content} stays until the store is opened again: {error}");
        }
    }

    fn has_object(&self, content: ObjectId) -> draconis_objects::Result<bool> {
        match self.store.len(content) {
            Ok(_) => Ok(true),
            Err(StoreError::NoObject(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns a version that no other object has or had.
    pub fn next_version(&self) -> Version {
        Version { incarnation: self.incarnation, number: self.store.new_object().id().0 }
    }

    /// Returns the record of a path.
    pub fn find(&self, path: &Path) -> Result<Option<Record>> {
        let value =
            self.kv.get(&meta_key(path.as_ref())).map_err(|error| with_path(path, error))?;
        value
            .map(|bytes| {
                Record::decode(&bytes)
                    .ok_or_else(|| damaged(path.as_ref(), "its record in the store is invalid"))
            })
            .transpose()
    }

    /// Returns the record of a path, and keeps its contents while the pin exists.
    pub fn find_pinned(self: &Arc<Self>, path: &Path) -> Result<(Record, Pin)> {
        let _found = self.paths.read();
        let record = self.find(path)?.ok_or_else(|| not_found(path))?;
        let pin = self.pin(record.content);
        Ok((record, pin))
    }

    fn pin(self: &Arc<Self>, content: ObjectId) -> Pin {
        let mut pins = self.pins.lock();
        let state = pins.entry(content).or_default();
        state.holders = state.holders.saturating_add(1);
        Pin { catalog: self.clone(), content }
    }

    fn is_pinned(&self, content: ObjectId) -> bool {
        self.pins.lock().contains_key(&content)
    }

    /// Reads a range of an object, which must be whole.
    pub fn read(&self, path: &Path, record: &Record, at: u64, len: usize) -> Result<Bytes> {
        let mut bytes = vec![0; len];
        let read = self.store.read(record.content, at, &mut bytes);
        match read.map_err(|error| with_path(path, error))? {
            read if read == len => Ok(bytes.into()),
            _ => Err(damaged(path.as_ref(), "its contents are shorter than its record says")),
        }
    }

    /// Gives a path new contents; durable after [`Catalog::wait`].
    pub fn submit_contents(
        self: &Arc<Self>,
        path: &Path,
        mode: &PutMode,
        new: NewContents,
        attributes: Attributes,
    ) -> Result<(Ticket, PutResult)> {
        let NewContents { group, content, len } = new;
        let version = self.next_version();
        let record =
            Record { content, is_shared: false, version, len, modified_us: now_us(), attributes };
        let ticket = {
            let _alone = self.paths.write();
            let old = self.find(path)?;
            check_mode(path, old.as_ref(), mode)?;
            self.submit_record(path, old.as_ref(), &record, group)?
        };
        let e_tag = Some(version.to_e_tag());
        Ok((ticket, PutResult { e_tag, version: None, extensions: Default::default() }))
    }

    /// Copies an object: both paths have one content object. Returns once it is durable.
    pub fn copy(self: &Arc<Self>, from: &Path, to: &Path, must_create: bool) -> Result<()> {
        let ticket = {
            let _alone = self.paths.write();
            let mut source = self.find(from)?.ok_or_else(|| not_found(from))?;
            let old = self.find(to)?;
            if must_create && old.is_some() {
                return Err(already_exists(to));
            }
            let mut group = Group::new();
            if from != to {
                // The e-tag of the source stays.
                source.is_shared = true;
                group.put(&meta_key(from.as_ref()), &encode(from, &source)?);
                group.put(&share_key(source.content, from), &[]);
            }
            let copy =
                Record { version: self.next_version(), modified_us: now_us(), ..source.clone() };
            self.submit_record(to, old.as_ref(), &copy, group)?
        };
        self.wait(to, ticket)
    }

    /// Renames an object. Returns once it is durable.
    pub fn rename(self: &Arc<Self>, from: &Path, to: &Path, must_create: bool) -> Result<()> {
        let ticket = {
            let _alone = self.paths.write();
            let source = self.find(from)?.ok_or_else(|| not_found(from))?;
            let old = self.find(to)?;
            if must_create && old.is_some() {
                return Err(already_exists(to));
            }
            if from == to {
                return Ok(());
            }
            let mut group = Group::new();
            remove_path(&mut group, from, &source);
            let renamed = Record { version: self.next_version(), modified_us: now_us(), ..source };
            self.submit_record(to, old.as_ref(), &renamed, group)?
        };
        self.wait(to, ticket)
    }

    /// Deletes an object, if it exists. Returns once that is durable.
    pub fn remove(self: &Arc<Self>, path: &Path) -> Result<()> {
        let ticket = {
            let _alone = self.paths.write();
            let Some(old) = self.find(path)? else { return Ok(()) };
            let submit = |must_delete: bool| {
                let mut group = Group::new();
                remove_path(&mut group, path, &old);
                self.submit_replacing(path, group, Some(&old), must_delete)
            };
            match submit(false) {
                // Only a group without new keys may use what the store keeps for deletions.
                Err(StoreError::NoSpace { .. }) if self.is_pinned(old.content) => submit(true),
                submitted => submitted,
            }
            .map_err(|error| with_path(path, error))?
        };
        self.wait(path, ticket)
    }

    /// Adds a record to a group and submits it, with the deletion of what the path had.
    fn submit_record(
        self: &Arc<Self>,
        path: &Path,
        old: Option<&Record>,
        record: &Record,
        mut group: Group,
    ) -> Result<Ticket> {
        let name = name_of_path(path);
        if let (Some(name), None) = (name, old)
            && self.store.find_named_object(name).map_err(|error| with_path(path, error))?.is_some()
        {
            let text = "the store has an object or a disk of this name that was not put here";
            return Err(Error::AlreadyExists { path: path.to_string(), source: text.into() });
        }
        group.put(&meta_key(path.as_ref()), &encode(path, record)?);
        if let Some(name) = name {
            group.set_name(name, record.content);
        }
        let old = old.filter(|old| old.content != record.content);
        if let Some(old) = old.filter(|old| old.is_shared) {
            group.remove(&share_key(old.content, path));
        }
        if record.is_shared {
            group.put(&share_key(record.content, path), &[]);
        }
        self.submit_replacing(path, group, old, false).map_err(|error| with_path(path, error))
    }

    /// Submits a group that takes a path from the content object of `old`, and deletes that unless
    /// it has other paths or, without `must_delete`, readers.
    fn submit_replacing(
        self: &Arc<Self>,
        path: &Path,
        mut group: Group,
        old: Option<&Record>,
        must_delete: bool,
    ) -> draconis_objects::Result<Ticket> {
        let mut pin = None;
        if let Some(old) = old
            && !self.has_other_path(path, old)?
            && self.has_object(old.content)?
        {
            if self.is_pinned(old.content) && !must_delete {
                // No reader adds a pin meanwhile; a last one that leaves finds this one.
                pin = Some(self.pin(old.content));
                group.put(&pending_key(old.content), &[]);
            } else {
                group.delete(old.content);
            }
        }
        let ticket = self.store.submit(group, &[]).map_err(|refused| refused.error)?;
        if let Some(pin) = pin {
            // The pin is dropped after this, and locks the pins.
            self.pins.lock().entry(pin.content).or_default().is_replaced = true;
        }
        Ok(ticket)
    }

    fn has_other_path(&self, path: &Path, record: &Record) -> draconis_objects::Result<bool> {
        if !record.is_shared {
            return Ok(false);
        }
        let (prefix, own) = (share_prefix(record.content), share_key(record.content, path));
        let end = successor_of_prefix(prefix.as_bytes());
        for pair in self.kv.scan::<KeyRange<'_>>(&key_range(prefix.as_bytes(), &end)) {
            if pair?.0 != own {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Waits until a group is durable. Concurrent callers share a flush.
    pub fn wait(&self, path: &Path, ticket: Ticket) -> Result<()> {
        self.store.wait(ticket).map_err(|error| with_path(path, error))
    }
}

/// Removes the record and the name of a path.
fn remove_path(group: &mut Group, path: &Path, record: &Record) {
    group.remove(&meta_key(path.as_ref()));
    if let Some(name) = name_of_path(path) {
        group.remove_name(name);
    }
    if record.is_shared {
        group.remove(&share_key(record.content, path));
    }
}

/// Checks the condition of a put.
pub(crate) fn check_mode(path: &Path, old: Option<&Record>, mode: &PutMode) -> Result<()> {
    match (mode, old) {
        (PutMode::Overwrite, _) | (PutMode::Create, None) => Ok(()),
        (PutMode::Create, Some(_)) => Err(already_exists(path)),
        (PutMode::Update(_), None) => Err(precondition(path, "the object does not exist".into())),
        (PutMode::Update(wanted), Some(old)) => {
            let there = old.version.to_e_tag();
            match &wanted.e_tag {
                None => Err(generic(format!("{path}: an update needs the e-tag to replace"))),
                Some(e_tag) if *e_tag == there => Ok(()),
                Some(e_tag) => Err(precondition(path, format!("{there} does not match {e_tag}"))),
            }
        }
    }
}

fn encode(path: &Path, record: &Record) -> Result<Vec<u8>> {
    record.encode().ok_or_else(|| Error::NotSupported {
        source: format!("{path}: an attribute that the store does not know").into(),
    })
}

fn now_us() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}
