//! Immutable snapshots of a store.

use std::fmt;
use std::sync::{Arc, Weak};

use super::{Store, copy_payloads_into};
use crate::cached_disk::CachedDisk;
use crate::codec::to_usize_saturating;
use crate::entry::{DecodedKey, Entry, PayloadRef, decode_key, object_key};
use crate::index::cursor::Cursor;
use crate::index::view::View;
use crate::{Error, ObjectId, Result};

/// An immutable snapshot of a store. It keeps its bytes from being freed.
#[derive(Clone)]
pub struct Snapshot {
    pub(super) view: Arc<View>,
    pub(super) io: Arc<CachedDisk>,
    pub(super) store: Weak<Store>,
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").finish_non_exhaustive()
    }
}

impl Snapshot {
    /// As [`Store::read`].
    ///
    /// # Errors
    /// As [`Store::read`].
    pub fn read(&self, id: ObjectId, at: u64, into: &mut [u8]) -> Result<usize> {
        let index = self.view.index();
        let record = index.object(&*self.io, id)?.ok_or(Error::NoObject(id))?;
        let len = record.len.saturating_sub(at).min(into.len() as u64);
        let parts =
            index.visible_payloads(&*self.io, (id, &record), (at, at.saturating_add(len)))?;
        let into = into.get_mut(..to_usize_saturating(len)).unwrap_or_default();
        copy_payloads_into(at, into, parts, |data, into| self.read_data(data, into))
    }

    /// Copies a payload found in the index.
    pub(crate) fn read_data(&self, data: &PayloadRef, into: &mut [u8]) -> Result<()> {
        match self.store.upgrade() {
            Some(store) => store.read_data(data, into),
            None => self.io.read_data(data, into),
        }
    }

    /// Reads payloads found in the index; uncached ones together.
    pub(crate) fn read_payloads(&self, all: &[&PayloadRef]) -> Vec<Result<Vec<u8>>> {
        let mut found = self.io.cached_values(all);
        let lacks = |value: &&mut Option<Vec<u8>>| value.is_none();
        let far = all.iter().zip(&found).filter(|(_, value)| value.is_none());
        let far: Vec<&PayloadRef> = far.map(|(data, _)| *data).collect();
        if far.len() > 1 {
            let read = self.io.read_uncached_values(&far);
            found.iter_mut().filter(lacks).zip(read).for_each(|(value, read)| *value = read);
        }
        let answers = all.iter().zip(&mut found).map(|(data, far)| match far.take() {
            Some(value) => Ok(value),
            // In an open frame, or damaged: once more, for an error with its context.
            None => {
                let mut value = vec![0; data.len as usize];
                self.read_data(data, &mut value).map(|()| value)
            }
        });
        answers.collect()
    }

    /// As [`Store::len`].
    ///
    /// # Errors
    /// As [`Store::len`].
    pub fn len(&self, id: ObjectId) -> Result<u64> {
        Ok(self.view.index().object(&*self.io, id)?.ok_or(Error::NoObject(id))?.len)
    }

    /// As [`Store::list`].
    ///
    /// # Errors
    /// As [`Store::list`].
    pub fn list(&self) -> Result<Vec<(ObjectId, u64)>> {
        let mut out = vec![];
        let all = (object_key(ObjectId(0)), object_key(ObjectId(u64::MAX)));
        let mut cursor = Cursor::forward(&self.view, &*self.io, (&all.0, &all.1))?;
        while let Some((key, entry)) = cursor.next(&self.view, &*self.io)? {
            let Some(DecodedKey::Object(id)) = decode_key(&key) else { break };
            if let Entry::Object(record) = entry
                && !record.is_value
                && !record.is_pending_delete
            {
                out.push((id, record.len));
            }
        }
        Ok(out)
    }

    pub(crate) fn view(&self) -> &View {
        &self.view
    }

    pub(crate) fn io(&self) -> &CachedDisk {
        &self.io
    }
}
