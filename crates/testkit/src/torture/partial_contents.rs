//! What a store that may be damaged still returns.

use std::ops::RangeFull;
use std::sync::Arc;

use super::{Contents, History, Violation};
use draconis_objects::kv::Kv;
use draconis_objects::{Error, ObjectId, Store};

/// A key and its value.
type KeyValue = (Vec<u8>, Vec<u8>);

/// A key and its value, if any.
type ExposedKey = (Arc<[u8]>, Option<Vec<u8>>);

/// Readable contents of a store.
pub(super) struct PartialContents {
    list: Option<Vec<(ObjectId, u64)>>,
    objects: Vec<(ObjectId, Option<Vec<u8>>)>,
    keys: Vec<ExposedKey>,
    scanned: Option<Vec<KeyValue>>,
    pub errors: u64,
}

impl PartialContents {
    pub fn read(store: &Arc<Store>, history: &History) -> Result<Self, Violation> {
        let mut seen = Self { list: None, objects: vec![], keys: vec![], scanned: None, errors: 0 };
        let mut errors = 0;
        let mut ok = |error: Error| match error {
            Error::Corrupt { .. } | Error::Device(_) | Error::Stopped(_) => {
                errors += 1;
                Ok(())
            }
            error => Err(Violation(format!("a read says {error}"))),
        };
        match store.list() {
            Ok(list) => seen.list = Some(list),
            Err(error) => ok(error)?,
        }
        let Contents { objects, keys, .. } = history.union_of_all();
        for (id, longest) in objects {
            let mut bytes = vec![0xA5; longest.len() + 1];
            match store.read(id, 0, &mut bytes) {
                Ok(len) => {
                    bytes.truncate(len);
                    seen.objects.push((id, Some(bytes)));
                }
                Err(Error::NoObject(_)) => seen.objects.push((id, None)),
                Err(error) => ok(error)?,
            }
        }
        let kv = Kv::new(store.clone());
        for key in keys.into_keys() {
            match kv.get(&key) {
                Ok(value) => seen.keys.push((key, value)),
                Err(error) => ok(error)?,
            }
        }
        match kv.scan::<RangeFull>(&..).collect::<draconis_objects::Result<Vec<_>>>() {
            Ok(pairs) => seen.scanned = Some(pairs),
            Err(error) => ok(error)?,
        }
        seen.errors = errors;
        Ok(seen)
    }

    /// Returns the number of groups, `least` or more, after which these contents are visible.
    pub fn find_prefix(&self, history: &History, least: usize) -> Result<usize, Violation> {
        let place = (0..=history.group_count())
            .rev()
            .find(|groups| self.is_part_of(history.contents_after(*groups)));
        match place {
            Some(groups) if groups >= least || self.errors > 0 => Ok(groups),
            Some(groups) => Err(Violation(format!(
                "{groups} groups are there, {least} were durable when the last write was made, and nobody says a word"
            ))),
            None => Err(Violation(format!(
                "bytes that no number of groups shows, {} errors",
                self.errors
            ))),
        }
    }

    /// Returns a description of the difference from the expected contents.
    pub fn describe_difference(&self, contents: &Contents) -> String {
        for (id, bytes) in &self.objects {
            let should = contents.objects.get(id).map(|it| &it[..]);
            if bytes.as_deref() != should {
                return format!(
                    "object {id}: {:?} bytes, should be {:?}",
                    bytes.as_ref().map(Vec::len),
                    should.map(<[u8]>::len)
                );
            }
        }
        for (key, value) in &self.keys {
            if value.as_deref() != contents.keys.get(key).map(|it| &it[..]) {
                return format!("key {}", String::from_utf8_lossy(key));
            }
        }
        "the lists".to_owned()
    }

    fn is_part_of(&self, contents: &Contents) -> bool {
        let lens = contents.objects.iter().map(|(id, bytes)| (*id, bytes.len() as u64));
        let pairs = contents.keys.iter().map(|(key, value)| (&key[..], &value[..]));
        self.list.as_ref().is_none_or(|list| list.iter().copied().eq(lens))
            && self
                .objects
                .iter()
                .all(|(id, bytes)| bytes.as_deref() == contents.objects.get(id).map(|it| &it[..]))
            && self
                .keys
                .iter()
                .all(|(key, value)| value.as_deref() == contents.keys.get(key).map(|it| &it[..]))
            && self
                .scanned
                .as_ref()
                .is_none_or(|scanned| scanned.iter().map(|(k, v)| (&k[..], &v[..])).eq(pairs))
    }
}
