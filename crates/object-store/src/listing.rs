//! Lists of objects, by ranges of the records' keys.

use draconis_objects::kv::KvSnapshot;
use object_store::path::Path;
use object_store::{ObjectMeta, Result};

use crate::error::{damaged, generic};
use crate::record::{KeyRange, Record, key_range, meta_key, path_of_meta_key, successor_of_prefix};

/// Objects of one page of a list.
pub(crate) const PAGE_OBJECTS: usize = 1000;

/// A part of a list.
#[derive(Debug, Default)]
pub(crate) struct Page {
    pub objects: Vec<ObjectMeta>,
    pub common_prefixes: Vec<Path>,
    /// First path of the next page.
    pub next: Option<String>,
}

/// Range of a list.
#[derive(Clone, Debug)]
pub(crate) struct Range {
    /// Beginning of all paths of the list.
    pub prefix: String,
    /// First path, at the earliest.
    pub from: String,
    /// Paths that have it behind the prefix are represented by their common prefix.
    pub delimiter: Option<char>,
    /// Limit of objects and common prefixes.
    pub limit: usize,
}

impl Range {
    /// All objects below a path.
    pub fn below(prefix: Option<&Path>) -> Self {
        let prefix = match prefix.map(Path::as_ref) {
            None | Some("") => String::new(),
            Some(path) => format!("{path}/"),
        };
        Self { prefix, from: String::new(), delimiter: None, limit: PAGE_OBJECTS }
    }

    /// Starts behind this path.
    pub fn after(self, offset: &str) -> Self {
        Self { from: format!("{offset}\0"), ..self }
    }

    /// Returns the objects of this range in a snapshot.
    pub fn list(&self, snapshot: &KvSnapshot) -> Result<Page> {
        let end = successor_of_prefix(&meta_key(&self.prefix));
        let mut page = Page::default();
        let mut from = self.prefix.clone().max(self.from.clone());
        loop {
            let mut skip_to = None;
            for pair in snapshot.scan::<KeyRange<'_>>(&key_range(&meta_key(&from), &end)) {
                let (key, value) = pair.map_err(generic)?;
                let Some(path) = path_of_meta_key(&key) else {
                    return Err(damaged(&String::from_utf8_lossy(&key), "a key is not UTF-8"));
                };
                if page.objects.len().saturating_add(page.common_prefixes.len()) >= self.limit {
                    page.next = Some(path.to_owned());
                    return Ok(page);
                }
                let below = path.get(self.prefix.len()..).unwrap_or_default();
                if let Some(delimiter) = self.delimiter
                    && let Some((first, _)) = below.split_once(delimiter)
                {
                    let common = format!("{}{first}", self.prefix);
                    page.common_prefixes.push(Path::parse(&common)?);
                    // One scan for each common prefix, however many objects it has.
                    skip_to = Some(format!("{common}{}", successor_of_char(delimiter)));
                    break;
                }
                let record = Record::decode(&value)
                    .ok_or_else(|| damaged(path, "its record in the store is invalid"))?;
                page.objects.push(record.to_meta(Path::parse(path)?));
            }
            match skip_to {
                Some(next) => from = next,
                None => return Ok(page),
            }
        }
    }
}

fn successor_of_char(c: char) -> char {
    char::from_u32(u32::from(c).saturating_add(1)).unwrap_or(char::MAX)
}
