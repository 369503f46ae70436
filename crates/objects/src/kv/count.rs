//! Statistics of the key-value store, from the index alone.

use crate::Result;
use crate::entry::{DecodedKey, Entry, decode_key, value_key};
use crate::index::cursor::Cursor;
use crate::kv::Kv;

/// Statistics of the key-value store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KvCount {
    /// Keys.
    pub keys: u64,
    /// Bytes of the keys.
    pub key_bytes: u64,
    /// Bytes of the values.
    pub value_bytes: u64,
    /// Values stored as objects, because they are long.
    pub long_values: u64,
}

impl Kv {
    /// Counts keys and their bytes. Reads all of the index.
    ///
    /// # Errors
    /// The error of reading the index.
    pub fn count(&self) -> Result<KvCount> {
        let snapshot = self.store().snapshot();
        let (view, io) = (snapshot.view(), snapshot.io());
        let mut count = KvCount::default();
        let mut cursor = Cursor::forward(view, io, (&value_key(&[]), &[u8::MAX]))?;
        while let Some((key, entry)) = cursor.next(view, io)? {
            let Some(DecodedKey::Value(name)) = decode_key(&key) else { break };
            count.keys = count.keys.saturating_add(1);
            count.key_bytes = count.key_bytes.saturating_add(name.len() as u64);
            match entry {
                Entry::Data(data) => {
                    count.value_bytes = count.value_bytes.saturating_add(u64::from(data.len));
                }
                Entry::Inline(value) => {
                    count.value_bytes = count.value_bytes.saturating_add(value.len() as u64);
                }
                Entry::ValueObject(_, len) => {
                    count.value_bytes = count.value_bytes.saturating_add(len);
                    count.long_values = count.long_values.saturating_add(1);
                }
                _ => {}
            }
        }
        Ok(count)
    }
}
