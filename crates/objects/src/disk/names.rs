//! Names of objects: what people call them by.
//!
//! Law: a name leads to an object that is there, or it is none: who deletes an object takes its
//! names away in the same group, and `check` complains where that was not done.

use std::sync::Arc;

use crate::entry::{DecodedKey, NAMES_END, decode_key, name_key};
use crate::index::cursor::Cursor;
use crate::{Error, ObjectId, Result, Store};

impl Store {
    /// The object that has this name.
    ///
    /// # Errors
    /// What reading the index gave.
    pub fn named(&self, name: &[u8]) -> Result<Option<ObjectId>> {
        let (entry, _view) = self.find_key(&name_key(name))?;
        let Some(id) = entry.and_then(|entry| entry.named_object()) else { return Ok(None) };
        match self.len(id) {
            Ok(_) => Ok(Some(id)),
            Err(Error::NoObject(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// All names in order, with their objects.
    ///
    /// # Errors
    /// What reading the index gave.
    pub fn names(self: &Arc<Self>) -> Result<Vec<(Vec<u8>, ObjectId)>> {
        let snapshot = self.snapshot();
        let (view, io) = (snapshot.view(), snapshot.io());
        let first = name_key(&[]);
        let mut cursor = Cursor::at(view, io, (&first, NAMES_END))?;
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
