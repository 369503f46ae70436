//! State of a bucket, as a list and a root tell it.
//!
//! The laws of what counts are those of [`open`](crate::open).

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use draconis_device::Error;

use crate::SECTOR_BYTES;
use crate::api::RequestError;
use crate::epoch::Epoch;
use crate::listing::{list_objects, list_objects_after};
use crate::map::SectorMap;
use crate::name::{ObjectName, ObjectNumber, SectorRun};
use crate::remote;
use crate::retry::RetryingStore;
use crate::root::Root;

/// Most attempts of readers to list an unchanged store.
const MAX_LIST_ATTEMPTS: usize = 50;

/// Contents of a bucket found at open.
pub(crate) struct OpenedBucket {
    pub root: Root,
    pub map: SectorMap,
    /// Keys of live objects.
    pub names: HashMap<ObjectNumber, Arc<str>>,
    /// Objects to delete once a root of this writer is durable.
    pub garbage: Vec<Arc<str>>,
    /// None for readers.
    pub epoch: Option<Epoch>,
    /// Newest root.
    pub newest: ObjectNumber,
    /// Number of live objects of the newest root's epoch.
    pub end: u64,
}

pub(crate) fn no_store_error(address: &str) -> Error {
    remote(format!("{address}: no store is there; draconis store create {address} makes one"))
}

/// Returns the current state of a bucket, for a reader.
pub(crate) fn list_newest_state(bucket: &RetryingStore) -> Result<OpenedBucket, Error> {
    let address = &bucket.address;
    for _ in 0..MAX_LIST_ATTEMPTS {
        let found =
            newest_root(&list_objects(bucket, "root")?).ok_or_else(|| no_store_error(address))?;
        let root = match read_root(bucket, found) {
            Ok(root) => root,
            Err(RequestError::NotFound) => continue,
            Err(trouble) => {
                return Err(bucket.error("reading", &ObjectName::Root(found).key(), &trouble));
            }
        };
        let names = list_objects(bucket, "data")?;
        if newest_root(&list_objects(bucket, "root")?) == Some(found) {
            return Ok(live_objects(&names, found, root, None));
        }
    }
    Err(remote(format!("{address} changed each time it was listed; try again")))
}

/// What a reader finds in a bucket after the state that it knows.
pub(crate) enum NewerState {
    /// Objects of the same root, in order.
    More(Vec<(ObjectNumber, Vec<SectorRun>, Arc<str>)>),
    /// Another root.
    Replaced(Box<OpenedBucket>),
}

/// Looks for a newer state than that of the root `newest` with its objects before `end`.
pub(crate) fn list_newer_state(
    bucket: &RetryingStore,
    newest: ObjectNumber,
    end: u64,
) -> Result<NewerState, Error> {
    let first = ObjectNumber { sequence: end, ..newest };
    let names = list_objects_after(bucket, "data", &first.key_before_data())?;
    if newest_root(&list_objects(bucket, "root")?) != Some(newest) {
        return Ok(NewerState::Replaced(Box::new(list_newest_state(bucket)?)));
    }
    let mut more = vec![];
    for (name, len_bytes) in names {
        let key = name.key();
        let ObjectName::Data(number, runs) = name else { continue };
        let expected = ObjectNumber { sequence: end + more.len() as u64, ..newest };
        if number != expected || !is_sane(&runs, len_bytes) {
            break;
        }
        more.push((number, runs, key.into()));
    }
    Ok(NewerState::More(more))
}

/// Returns true if an object has the length that its name says.
fn is_sane(runs: &[SectorRun], len_bytes: u64) -> bool {
    let sectors: u64 = runs.iter().map(|run| run.count).sum();
    sectors.checked_mul(SECTOR_BYTES) == Some(len_bytes)
}

pub(crate) fn newest_root(names: &BTreeMap<ObjectName, u64>) -> Option<ObjectNumber> {
    let roots = names.keys().filter_map(|name| match name {
        ObjectName::Root(number) => Some(*number),
        _ => None,
    });
    roots.max()
}

pub(crate) fn read_root(
    bucket: &RetryingStore,
    number: ObjectNumber,
) -> Result<Root, RequestError> {
    let bytes = bucket.get(&ObjectName::Root(number).key(), None)?;
    Root::decode(&bytes).map_err(|what| RequestError::Permanent(format!("damaged: {what}")))
}

/// Returns the live objects and their sectors.
pub(crate) fn live_objects(
    names: &BTreeMap<ObjectName, u64>,
    newest: ObjectNumber,
    mut root: Root,
    epoch: Option<Epoch>,
) -> OpenedBucket {
    let mine = epoch.as_ref().map(|epoch| epoch.number);
    let data = names.iter().filter_map(|(name, len_bytes)| match name {
        ObjectName::Data(number, runs) => {
            Some((*number, (runs, is_sane(runs, *len_bytes), name.key())))
        }
        _ => None,
    });
    let data: BTreeMap<ObjectNumber, (&Vec<SectorRun>, bool, String)> = data.collect();
    let mut end = newest.sequence + 1;
    while data
        .get(&ObjectNumber { sequence: end, ..newest })
        .is_some_and(|(_, is_sane, _)| *is_sane)
    {
        end += 1;
    }
    root.epoch_ends.insert(newest.epoch, end);
    let (mut map, mut keys, mut gone) = (SectorMap::default(), HashMap::new(), vec![]);
    let mut garbage: Vec<Arc<str>> = vec![];
    for (number, (runs, is_sane, key)) in data {
        let counts =
            root.epoch_ends.get(&number.epoch).is_some_and(|end| number.sequence < *end) && is_sane;
        if !counts {
            // Objects of a newer epoch are not ours to delete.
            if mine.is_some_and(|mine| number.epoch < mine) {
                garbage.push(key.into());
            }
            continue;
        }
        keys.insert(number, Arc::from(key));
        let mut from = 0;
        for run in runs {
            if let Some((skipped, within)) = root.clip_to_objects(*run) {
                map.set(within, number, from + skipped, &mut gone);
            }
            from += run.count;
        }
    }
    // Objects without references, or only beyond the current ends, are not needed.
    let alive: HashSet<ObjectNumber> = map.live_objects().collect();
    garbage.extend(keys.extract_if(|number, _| !alive.contains(number)).map(|(_, key)| key));
    let is_old = |name: &&ObjectName| match name {
        ObjectName::Root(number) => mine.is_some_and(|mine| number.epoch < mine),
        _ => false,
    };
    garbage.extend(names.keys().filter(is_old).map(|name| name.key().into()));
    // An epoch without objects needs no end: its late objects are not live then.
    let epochs: BTreeSet<u32> = map.live_objects().map(|number| number.epoch).collect();
    root.epoch_ends.retain(|epoch, _| epochs.contains(epoch));
    OpenedBucket { root, map, names: keys, garbage, epoch, newest, end }
}
