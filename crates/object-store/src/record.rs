//! Keys and records in the store.
//!
//! ```text
//!   object/meta/PATH               -> record: content object, version, length, time, attributes
//!   object/share/CONTENT/PATH      -> empty: PATH is one of several paths of this content object
//!   object/pending/CONTENT         -> empty: content object to delete at the next opening
//! ```
//!
//! Law: a record is checked before it is used; its bytes may come from another program.

use std::ops::Bound;

use chrono::{DateTime, Utc};
use draconis_objects::ObjectId;
use object_store::path::Path;
use object_store::{Attribute, Attributes, ObjectMeta};

const META_PREFIX: &str = "object/meta/";
const SHARE_PREFIX: &str = "object/share/";
const PENDING_PREFIX: &str = "object/pending/";

const FORMAT: u8 = 1;
const FLAG_SHARED: u8 = 1;

/// Longest name of an object in a store.
const MAX_NAME_BYTES: usize = 255;

/// Returns the key of the record of a path, or of the first path with a prefix.
pub(crate) fn meta_key(path: &str) -> Vec<u8> {
    [META_PREFIX, path].concat().into_bytes()
}

/// Returns the path of a record's key.
pub(crate) fn path_of_meta_key(key: &[u8]) -> Option<&str> {
    std::str::from_utf8(key.strip_prefix(META_PREFIX.as_bytes())?).ok()
}

/// Returns the prefix of the keys that list the paths of a shared content object.
pub(crate) fn share_prefix(content: ObjectId) -> String {
    format!("{SHARE_PREFIX}{:016x}/", content.0)
}

pub(crate) fn share_key(content: ObjectId, path: &Path) -> Vec<u8> {
    (share_prefix(content) + path.as_ref()).into_bytes()
}

pub(crate) fn pending_key(content: ObjectId) -> Vec<u8> {
    format!("{PENDING_PREFIX}{:016x}", content.0).into_bytes()
}

/// Returns the bounds of all pending keys.
pub(crate) fn pending_range() -> (Vec<u8>, Vec<u8>) {
    (PENDING_PREFIX.into(), successor_of_prefix(PENDING_PREFIX.as_bytes()))
}

/// Returns the content object of a pending key.
pub(crate) fn content_of_pending_key(key: &[u8]) -> Option<ObjectId> {
    let digits = std::str::from_utf8(key.strip_prefix(PENDING_PREFIX.as_bytes())?).ok()?;
    u64::from_str_radix(digits, 16).ok().map(ObjectId)
}

/// Bounds of keys, as a scan takes them.
pub(crate) type KeyRange<'a> = (Bound<&'a [u8]>, Bound<&'a [u8]>);

/// Returns the range from one key to another, which is excluded.
pub(crate) fn key_range<'a>(from: &'a [u8], to: &'a [u8]) -> KeyRange<'a> {
    (Bound::Included(from), Bound::Excluded(to))
}

/// Returns the first key after all keys with a prefix, which does not end in 0xff.
pub(crate) fn successor_of_prefix(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    if let Some(last) = end.last_mut() {
        *last = last.saturating_add(1);
    }
    end
}

/// Returns the name under which the store lists the object of a path. None for long paths, and for
/// paths with `@`, which marks snapshots of disks.
pub(crate) fn name_of_path(path: &Path) -> Option<&[u8]> {
    let name = path.as_ref().as_bytes();
    ((1..=MAX_NAME_BYTES).contains(&name.len()) && !name.contains(&b'@')).then_some(name)
}

/// Version of an object: the store and its opening that wrote it, and a number that this opening
/// gave out once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Version {
    pub incarnation: u64,
    pub number: u64,
}

impl Version {
    /// Returns the e-tag, with its quotes.
    pub fn to_e_tag(self) -> String {
        format!("\"{:x}-{:x}\"", self.incarnation, self.number)
    }
}

/// What the store knows about the object of a path.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Record {
    pub content: ObjectId,
    /// True if other paths may have the same content object.
    pub is_shared: bool,
    pub version: Version,
    pub len: u64,
    /// Microseconds since 1970.
    pub modified_us: i64,
    pub attributes: Attributes,
}

impl Record {
    /// Returns the metadata of the object of `path`.
    pub fn to_meta(&self, path: Path) -> ObjectMeta {
        ObjectMeta {
            location: path,
            last_modified: DateTime::<Utc>::from_timestamp_micros(self.modified_us)
                .unwrap_or_default(),
            size: self.len,
            e_tag: Some(self.version.to_e_tag()),
            version: None,
        }
    }

    /// Encodes a record. `None` for an attribute that this crate does not know.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let mut bytes = vec![FORMAT, if self.is_shared { FLAG_SHARED } else { 0 }];
        let Version { incarnation, number } = self.version;
        for value in [self.content.0, incarnation, number, self.len] {
            bytes.extend(value.to_le_bytes());
        }
        bytes.extend(self.modified_us.to_le_bytes());
        for (attribute, value) in &self.attributes {
            let (kind, name) = match attribute {
                Attribute::ContentDisposition => (0, ""),
                Attribute::ContentEncoding => (1, ""),
                Attribute::ContentLanguage => (2, ""),
                Attribute::ContentType => (3, ""),
                Attribute::CacheControl => (4, ""),
                Attribute::StorageClass => (5, ""),
                Attribute::Metadata(name) => (6, name.as_ref()),
                _ => return None,
            };
            bytes.push(kind);
            for text in [name, value.as_ref()] {
                bytes.extend(u32::try_from(text.len()).ok()?.to_le_bytes());
                bytes.extend(text.as_bytes());
            }
        }
        Some(bytes)
    }

    /// Decodes a record; `None` if it is none.
    pub fn decode(mut bytes: &[u8]) -> Option<Self> {
        let [format, flags] = take_array(&mut bytes)?;
        if format != FORMAT || flags & !FLAG_SHARED != 0 {
            return None;
        }
        let mut number = || take_array(&mut bytes).map(u64::from_le_bytes);
        let content = ObjectId(number()?);
        let version = Version { incarnation: number()?, number: number()? };
        let len = number()?;
        let modified_us = i64::from_le_bytes(take_array(&mut bytes)?);
        let mut attributes = Attributes::new();
        while !bytes.is_empty() {
            let [kind] = take_array(&mut bytes)?;
            let name = take_text(&mut bytes)?;
            let value = take_text(&mut bytes)?;
            let attribute = match kind {
                0 => Attribute::ContentDisposition,
                1 => Attribute::ContentEncoding,
                2 => Attribute::ContentLanguage,
                3 => Attribute::ContentType,
                4 => Attribute::CacheControl,
                5 => Attribute::StorageClass,
                6 => Attribute::Metadata(name.into()),
                _ => return None,
            };
            attributes.insert(attribute, value.into());
        }
        let is_shared = flags & FLAG_SHARED != 0;
        Some(Self { content, is_shared, version, len, modified_us, attributes })
    }
}

fn take_array<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*first)
}

fn take_text(bytes: &mut &[u8]) -> Option<String> {
    let len = usize::try_from(u32::from_le_bytes(take_array(bytes)?)).ok()?;
    let (text, rest) = bytes.split_at_checked(len)?;
    *bytes = rest;
    String::from_utf8(text.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_decoded_as_encoded_and_no_cut_or_changed_one_panics() {
        let record = Record {
            content: ObjectId(7),
            is_shared: true,
            version: Version { incarnation: 3, number: 99 },
            len: u64::MAX,
            modified_us: -1,
            attributes: Attributes::from_iter([
                (Attribute::ContentType, "text/plain"),
                (Attribute::Metadata("key".into()), "value"),
                (Attribute::StorageClass, ""),
            ]),
        };
        let bytes = record.encode().unwrap();
        assert_eq!(Record::decode(&bytes), Some(record));
        for len in 0..bytes.len() {
            let _ = Record::decode(&bytes[..len]);
            let mut changed = bytes.clone();
            changed[len] ^= 0x81;
            let _ = Record::decode(&changed);
        }
        assert_eq!(Record::decode(&[]), None);
        assert_eq!(Record::decode(&[2; 100]), None);
    }

    #[test]
    fn keys_are_found_again() {
        assert_eq!(path_of_meta_key(&meta_key("a/b")), Some("a/b"));
        assert_eq!(content_of_pending_key(&pending_key(ObjectId(255))), Some(ObjectId(255)));
        assert_eq!(content_of_pending_key(b"object/pending/x"), None);
        assert_eq!(name_of_path(&Path::from("a/b")), Some(&b"a/b"[..]));
        assert_eq!(name_of_path(&Path::from("a@b")), None);
        assert_eq!(name_of_path(&Path::from("n".repeat(256))), None);
        assert_eq!(name_of_path(&Path::default()), None);
    }
}
