//! How much the kv holds: from the index alone, values are not read.

use crate::Result;
use crate::entry::{DecodedKey, Entry, decode_key, value_key};
use crate::index::cursor::Cursor;
use crate::kv::Kv;

/// What the kv holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KvCount {
    /// Keys.
    pub keys: u64,
    /// Bytes of them.
    pub key_bytes: u64,
    /// Bytes of their values.
    pub value_bytes: u64,
    /// Values that are objects of their own, because they are long.
    pub long_values: u64,
}

impl Kv {
    /// Counts keys and their bytes, as they are now. Reads all of the index.
    ///
    /// # Errors
    /// What reading the index gave.
    pub fn count(&self) -> Result<KvCount> {
        let snapshot = self.store().snapshot();
        let (view, io) = (snapshot.view(), snapshot.io());
        let mut count = KvCount::default();
        let mut cursor = Cursor::at(view, io, (&value_key(&[]), &[u8::MAX]))?;
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
