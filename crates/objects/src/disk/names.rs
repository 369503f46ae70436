//! Names of objects.
//!
//! Law: a name of a missing object does not exist for readers. A group that deletes an object
//! removes its names, too; otherwise `check` reports damage.

use std::sync::Arc;

use crate::entry::{DecodedKey, NAME_KEYS_END, decode_key, name_key};
use crate::index::cursor::Cursor;
use crate::{Error, ObjectId, Result, Store};

impl Store {
    /// Returns the object with this name.
    ///
    /// # Errors
    /// The error of reading the index.
    pub fn find_named_object(&self, name: &[u8]) -> Result<Option<ObjectId>> {
        let (entry, _view) = self.find_key(&name_key(name))?;
        let Some(id) = entry.and_then(|entry| entry.named_object()) else { return Ok(None) };
        match self.len(id) {
            Ok(_) => Ok(Some(id)),
            Err(Error::NoObject(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns all names in order, with their objects.
    ///
    /// # Errors
    /// The error of reading the index.
    pub fn list_names(self: &Arc<Self>) -> Result<Vec<(Vec<u8>, ObjectId)>> {
        let snapshot = self.snapshot();
        let (view, io) = (snapshot.view(), snapshot.io());
        let first = name_key(&[]);
        let mut cursor = Cursor::forward(view, io, (&first, NAME_KEYS_END))?;
        let mut names = vec![];
        while let Some((key, entry)) = cursor.next(view, io)? {
            let Some(DecodedKey::Name(name)) = decode_key(&key) else { break };
            if let Some(id) = entry.named_object() {
                names.push((name.to_vec(), id));
            }
        }
        Ok(names)
    }
}
