//! Expected contents after each group.

use std::collections::{BTreeMap, HashMap};
use std::ops::RangeFull;
use std::sync::Arc;

use draconis_device::Random;
use twox_hash::XxHash3_64;

use draconis_objects::kv::Kv;
use draconis_objects::{Error, ObjectId, Store};

/// Contents of a store.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Contents {
    /// Objects.
    pub objects: BTreeMap<ObjectId, Arc<[u8]>>,
    /// Keys and values.
    pub keys: BTreeMap<Arc<[u8]>, Arc<[u8]>>,
    /// Largest number of an object so far.
    pub last_id: u64,
    /// Parents of objects; not visible to readers.
    pub over: BTreeMap<ObjectId, ObjectId>,
}

impl Contents {
    /// Reads all of a store.
    ///
    /// # Errors
    /// The first read error.
    pub fn read(store: &Arc<Store>) -> Result<Self, Error> {
        let mut contents = Self::default();
        for (id, len) in store.list()? {
            contents.objects.insert(id, read_object(store, id, len)?);
        }
        for pair in Kv::new(store.clone()).scan::<RangeFull>(&..) {
            let (key, value) = pair?;
            contents.keys.insert(key.into(), value.into());
        }
        Ok(contents)
    }

    /// Returns the number of an object's children.
    pub fn child_count(&self, id: ObjectId) -> usize {
        self.over.values().filter(|below| **below == id).count()
    }

    /// Removes an object; its child continues as `now`, maybe with the object's number.
    pub fn join_child(&mut self, id: ObjectId, child: ObjectId, now: ObjectId) {
        let below = self.over.remove(&id);
        if now != child {
            if let Some(bytes) = self.objects.remove(&child) {
                self.objects.insert(now, bytes);
            }
            self.over.remove(&child);
            let children = self.over.values_mut().filter(|below| **below == child);
            children.for_each(|below| *below = now);
        }
        match below {
            Some(below) => self.over.insert(now, below),
            None => self.over.remove(&now),
        };
    }

    /// Returns the bytes of objects, keys and values.
    pub fn len_bytes(&self) -> u64 {
        let objects: usize = self.objects.values().map(|bytes| bytes.len()).sum();
        let keys: usize = self.keys.iter().map(|(key, value)| key.len() + value.len()).sum();
        (objects + keys) as u64
    }

    /// Returns the least stored bytes: zeros may be holes.
    fn stored_bytes(&self) -> u64 {
        // A child may have no extents of its own.
        let alone = self.objects.iter().filter(|(id, _)| !self.over.contains_key(id));
        let all = alone.map(|(_, bytes)| bytes).chain(self.keys.values());
        all.map(|bytes| bytes.iter().filter(|byte| **byte != 0).count() as u64).sum()
    }

    /// Returns a 64-bit hash of the contents; collisions are ignored.
    fn digest(&self) -> u64 {
        let object =
            |(id, bytes): (&ObjectId, &Arc<[u8]>)| mix_bits(id.0 ^ XxHash3_64::oneshot(bytes));
        let pair = |(key, value): (&Arc<[u8]>, &Arc<[u8]>)| {
            mix_bits(XxHash3_64::oneshot(key) ^ XxHash3_64::oneshot(value).rotate_left(7))
        };
        let sum = |sum: u64, it: u64| sum.wrapping_add(it);
        let objects = self.objects.iter().map(object).fold(self.objects.len() as u64, sum);
        self.keys.iter().map(pair).fold(objects, sum)
    }

    /// Returns a description of the first difference.
    pub fn describe_difference(&self, other: &Self) -> String {
        for id in self.objects.keys().chain(other.objects.keys()) {
            let (mine, others) = (self.objects.get(id), other.objects.get(id));
            if mine != others {
                return format!("object {id}: {}", describe_byte_difference(mine, others));
            }
        }
        for key in self.keys.keys().chain(other.keys.keys()) {
            let (mine, others) = (self.keys.get(key), other.keys.get(key));
            if mine != others {
                let key = String::from_utf8_lossy(key);
                return format!("key {key}: {}", describe_byte_difference(mine, others));
            }
        }
        "in nothing".to_owned()
    }
}

/// Reads an object of exactly `len` bytes.
pub(super) fn read_object(store: &Store, id: ObjectId, len: u64) -> Result<Arc<[u8]>, Error> {
    // One byte more is requested: it must not exist.
    let mut bytes = vec![0xA5; len as usize + 1];
    let got = store.read(id, 0, &mut bytes)?;
    bytes.truncate(got);
    Ok(bytes.into())
}

fn describe_byte_difference(is: Option<&Arc<[u8]>>, should: Option<&Arc<[u8]>>) -> String {
    match (is, should) {
        (Some(_), None) => "is there and should not be".to_owned(),
        (None, Some(_)) => "is not there".to_owned(),
        (Some(is), Some(should)) if is.len() != should.len() => {
            format!("{} bytes long, should be {}", is.len(), should.len())
        }
        (Some(is), Some(should)) => {
            let at = is.iter().zip(should.iter()).position(|(a, b)| a != b).unwrap_or(0);
            let count = is.iter().zip(should.iter()).filter(|(a, b)| a != b).count();
            format!("{count} bytes are wrong, from byte {at}: {} for {}", is[at], should[at])
        }
        (None, None) => "the same".to_owned(),
    }
}

/// Contents after each prefix of the groups, from the empty one on.
#[derive(Clone, Debug)]
pub struct History {
    prefixes: Vec<Contents>,
    /// Least stored bytes of each.
    stored: Vec<u64>,
    by_digest: HashMap<u64, Vec<usize>>,
}

impl History {
    /// Creates a history that starts with `contents`.
    pub fn new(contents: Contents) -> Self {
        let mut history = Self { prefixes: vec![], stored: vec![], by_digest: HashMap::new() };
        history.push(contents);
        history
    }

    /// Adds the contents after one more group.
    pub fn push(&mut self, contents: Contents) {
        self.by_digest.entry(contents.digest()).or_default().push(self.prefixes.len());
        self.stored.push(contents.stored_bytes());
        self.prefixes.push(contents);
    }

    /// Returns the number of groups.
    pub fn group_count(&self) -> usize {
        self.prefixes.len() - 1
    }

    /// Returns the contents after so many groups.
    pub fn contents_after(&self, groups: usize) -> &Contents {
        &self.prefixes[groups]
    }

    /// Returns the least stored bytes after so many groups: zeros may be holes.
    pub fn stored_bytes(&self, groups: usize) -> u64 {
        self.stored[groups]
    }

    /// Returns every object and key that ever existed, each at its longest.
    pub fn union_of_all(&self) -> Contents {
        let mut all = Contents::default();
        for contents in &self.prefixes {
            for (id, bytes) in &contents.objects {
                let longest = all.objects.entry(*id).or_insert_with(|| bytes.clone());
                if longest.len() < bytes.len() {
                    longest.clone_from(bytes);
                }
            }
            for (key, value) in &contents.keys {
                all.keys.entry(key.clone()).or_insert_with(|| value.clone());
            }
        }
        all
    }

    /// Returns the current contents.
    pub fn current(&self) -> &Contents {
        self.contents_after(self.group_count())
    }

    /// Returns the number of groups, `least` or more, after which these contents are visible.
    ///
    /// # Errors
    /// A description, if there is none.
    pub fn find_prefix(&self, contents: &Contents, least: usize) -> Result<usize, String> {
        let places = self.by_digest.get(&contents.digest()).into_iter().flatten();
        let mut fewer = None;
        for &groups in places {
            if groups >= least {
                return Ok(groups);
            }
            fewer = Some(groups);
        }
        if let Some(groups) = fewer {
            return Err(format!("{groups} groups are there, {least} were waited for"));
        }
        let differ = |groups: usize| contents.describe_difference(self.contents_after(groups));
        Err(format!(
            "no number of groups shows this; after {least} that were waited for, {}; after all {}, {}",
            differ(least),
            self.group_count(),
            differ(self.group_count())
        ))
    }
}

/// Spreads a number over all bits.
pub(super) fn mix_bits(number: u64) -> u64 {
    Random::new(number).next_u64()
}
