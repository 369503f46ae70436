//! Contents that are written before they have a path.
//!
//! ```text
//!   create ─▶ write .. write ─▶ publish      in one group: pending key out, record in
//!                       │
//!                       └─▶ discard          also when dropped, and at the next opening
//! ```

use std::sync::Arc;

use draconis_objects::{Error as StoreError, Group, LifetimeHint, ObjectId};
use draconis_types::lock::Mutex;
use object_store::path::Path;
use object_store::{Attributes, PutMode, PutPayload, PutResult, Result};

use crate::blocking::run_detached;
use crate::catalog::{Catalog, NewContents, PIECE_BYTES, check_mode};
use crate::error::{generic, with_path};
use crate::record::pending_key;

/// Stores an object, and returns once it is durable.
pub(crate) fn put(
    catalog: &Arc<Catalog>,
    path: &Path,
    payload: &PutPayload,
    mode: &PutMode,
    attributes: Attributes,
) -> Result<PutResult> {
    let len = payload.content_length() as u64;
    if payload.content_length() > PIECE_BYTES {
        // Before all of it is written.
        check_mode(path, catalog.find(path)?.as_ref(), mode)?;
        let staging = Staging::create(catalog).map_err(|error| with_path(path, error))?;
        let written = staging.write(0, payload).map_err(|error| with_path(path, error));
        let put = written.and_then(|()| staging.publish(path, mode, len, attributes));
        if put.is_err() {
            staging.discard().map_err(|error| with_path(path, error))?;
        }
        return put;
    }
    let mut group = Group::new();
    let content = group.create(catalog.store.new_object(), LifetimeHint::Unknown);
    payload.iter().filter(|piece| !piece.is_empty()).for_each(|piece| {
        group.append(content, piece);
    });
    let new = NewContents { group, content, len };
    let (ticket, put) = catalog.submit_contents(path, mode, new, attributes)?;
    catalog.wait(path, ticket)?;
    Ok(put)
}

/// A content object without a path.
#[derive(Debug)]
pub(crate) struct Staging {
    catalog: Arc<Catalog>,
    pub content: ObjectId,
    /// True once it was published or discarded.
    is_over: Mutex<bool>,
}

impl Staging {
    pub fn create(catalog: &Arc<Catalog>) -> draconis_objects::Result<Arc<Self>> {
        let mut group = Group::new();
        let content = group.create(catalog.store.new_object(), LifetimeHint::Unknown);
        group.put(&pending_key(content), &[]);
        catalog.store.submit(group, &[]).map_err(|refused| refused.error)?;
        Ok(Arc::new(Self { catalog: catalog.clone(), content, is_over: Mutex::new(false) }))
    }

    /// Writes a payload from byte `at` on, in pieces: the store limits the bytes that wait in
    /// memory.
    pub fn write(&self, at: u64, payload: &PutPayload) -> draconis_objects::Result<()> {
        let mut at = at;
        for piece in payload.iter().flat_map(|bytes| bytes.chunks(PIECE_BYTES)) {
            let mut group = Group::new();
            group.write(self.content, at, piece);
            self.catalog.store.submit(group, &[]).map_err(|refused| refused.error)?;
            at = at.saturating_add(piece.len() as u64);
        }
        Ok(())
    }

    /// Appends `len` bytes of another content object from byte `at` on.
    pub fn write_copy(&self, at: u64, from: &Self, len: u64) -> draconis_objects::Result<()> {
        let mut piece = vec![0; PIECE_BYTES];
        let mut done = 0;
        while done < len {
            let read = match self.catalog.store.read(from.content, done, &mut piece)? {
                0 => return Err(StoreError::NoObject(from.content)),
                read => read,
            };
            let mut group = Group::new();
            group.write(self.content, at.saturating_add(done), piece.get(..read).unwrap_or(&[]));
            self.catalog.store.submit(group, &[]).map_err(|refused| refused.error)?;
            done = done.saturating_add(read as u64);
        }
        Ok(())
    }

    /// Gives the contents to a path, and returns once they are durable. A refused publication can
    /// be repeated.
    pub fn publish(
        &self,
        path: &Path,
        mode: &PutMode,
        len: u64,
        attributes: Attributes,
    ) -> Result<PutResult> {
        self.catalog.process.check().map_err(generic)?;
        let mut is_over = self.is_over.lock();
        if *is_over {
            return Err(generic(format!("{path}: the upload was completed or aborted before")));
        }
        let mut group = Group::new();
        group.remove(&pending_key(self.content));
        let contents = NewContents { group, content: self.content, len };
        let (ticket, put) = self.catalog.submit_contents(path, mode, contents, attributes)?;
        *is_over = true;
        drop(is_over);
        self.catalog.wait(path, ticket)?;
        Ok(put)
    }

    /// Deletes the contents, unless they were published.
    pub fn discard(&self) -> draconis_objects::Result<()> {
        self.catalog.process.check()?;
        let mut is_over = self.is_over.lock();
        if !std::mem::replace(&mut *is_over, true) {
            self.catalog.delete_pending(self.content)?;
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !*self.is_over.get_mut() && self.catalog.process.check().is_ok() {
            let (catalog, content) = (self.catalog.clone(), self.content);
            run_detached(move || catalog.delete_pending_or_warn(content));
        }
    }
}
