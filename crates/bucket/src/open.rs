//! Creates and opens a disk in a bucket, and fences its previous writer.
//!
//! ```text
//!   writers  epoch of my own, the others' ended ─▶ newest root ─▶ objects that count
//!   readers                                        newest root ─▶ objects that count ─▶ still it?
//! ```
//!
//! Law 1: a writer fences the older epochs, then lists. Data acknowledged by an older writer was in
//! the bucket before it was fenced, so the list has it.
//! Law 2: of the epoch of the newest root, objects up to the first missing number are live. Of
//! older epochs, as many as the root states; of all others none.
//! Law 3: a list is not atomic. The root comes from an earlier list than the objects, so that list
//! has everything the root refers to. A newer root may refer to missing objects.
//! Law 4: a mount writes a root at once. Until then, late objects of a fenced writer, which it
//! reports as not durable, are live for the next opener.
//! Law 5: a journal is uploaded first, while its epoch is still the newest, and is emptied before
//! the next epoch is created.
//! Law 6: readers write nothing and fence no epoch. If the root has changed, they list again:
//! objects of the old root may be deleted.
//! Law 7: the ends of the disk are only in the root. Sectors of objects there, or past the end,
//! were written when the disk had another length, and are hidden.
//! Law 8: a reader that follows a writer adds the objects after those that it knows, while the root
//! stays the same, and reads another root's state as when it was opened.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use draconis_device::Error;
use draconis_types::lock::Mutex;

use crate::SECTOR_BYTES;
use crate::api::{BucketApi, RequestError};
use crate::cache::ChunkCache;
use crate::disk::BucketDisk;
use crate::epoch::{Epoch, newest_epoch};
use crate::journal::{Journal, JournalDevice, JournaledObject, UnsentObjects};
use crate::listing::list_objects;
use crate::map::SectorMap;
use crate::name::{ObjectName, ObjectNumber};
use crate::options::BucketOptions;
use crate::remote;
use crate::retry::RetryingStore;
use crate::root::{EDGE_SECTORS, Root};
use crate::state::{
    OpenedBucket, list_newest_state, live_objects, newest_root, no_store_error, read_root,
};
use crate::upload_queue::WritePolicy;

/// Most lost objects that an error names.
const MAX_NAMED_OBJECTS: usize = 4;

impl Default for BucketOptions {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(60),
            pause: Duration::from_millis(100),
            commit: Duration::from_millis(50),
            lanes: 16,
            who: "a writer without a name".to_owned(),
            token: 0,
            host_id: String::new(),
            is_mount: false,
            take_over: false,
            journal: None,
            cache: None,
            lock: None,
        }
    }
}

impl BucketOptions {
    fn retrying_store(&self, engine: Arc<dyn BucketApi>, address: &str) -> RetryingStore {
        RetryingStore::new(engine, address, self.deadline, self.pause)
    }

    fn open_disk(
        &self,
        bucket: RetryingStore,
        opened: OpenedBucket,
        mut journal: Option<Journal>,
    ) -> Result<BucketDisk, Error> {
        let cache = self.cache.as_ref().map(|(dir, most_bytes)| {
            ChunkCache::open(dir, *most_bytes, opened.root.id).map_err(remote)
        });
        let releases_epoch = self.is_mount || journal.is_some();
        let pace = WritePolicy { commit: self.commit, lanes: self.lanes, releases_epoch };
        if let Some(journal) = &mut journal {
            journal.begin_incarnation(opened.root.id, &bucket.address)?;
        }
        BucketDisk::new(bucket, pace, opened, cache.transpose()?, journal, self.lock.clone())
    }
}

impl BucketDisk {
    /// Creates a disk of zeros in a bucket, after a probe; with `over` it replaces an existing one.
    ///
    /// # Errors
    /// A disk exists, the bucket lacks a guarantee, or an error of the bucket.
    pub fn create(
        engine: Arc<dyn BucketApi>,
        address: &str,
        len_bytes: u64,
        over: bool,
        options: &BucketOptions,
    ) -> Result<Self, Error> {
        let bucket = options.retrying_store(engine, address);
        let sectors = len_bytes / SECTOR_BYTES;
        if sectors < EDGE_SECTORS * 4 {
            return Err(remote(format!("{address}: {len_bytes} bytes are too few for a disk")));
        }
        crate::probe::probe_guarantees(&bucket, options.token)?;
        let there = || remote(format!("{address} holds a store; --force overwrites it"));
        // The check must not fence its current writer.
        let names = list_objects(&bucket, "")?;
        if !over && newest_root(&names).is_some() {
            return Err(there());
        }
        let journal = match &options.journal {
            None => None,
            Some(local) => match Journal::open(local)? {
                (journal, waiting) if waiting.objects.is_empty() => Some(journal),
                (journal, _) => return Err(other_store_error(&journal, address)),
            },
        };
        let (epoch, [roots, names]) = Epoch::claim(&bucket, options, journal.as_ref(), names)?;
        if !over && newest_root(&roots).is_some() {
            return Err(there());
        }
        let dead = names.keys().filter(|name| !matches!(name, ObjectName::Epoch(_)));
        let opened = OpenedBucket {
            root: Root { id: options.token, sectors, ..Root::default() },
            map: SectorMap::default(),
            names: HashMap::new(),
            garbage: dead.map(|name| name.key().into()).collect(),
            epoch: Some(epoch),
            newest: ObjectNumber { epoch: 0, sequence: 0 },
            end: 0,
        };
        let disk = options.open_disk(bucket, opened, journal)?;
        disk.write_root()?;
        disk.finish_opening();
        Ok(disk)
    }

    /// Opens the disk in a bucket for writing, and fences its previous writer.
    ///
    /// # Errors
    /// There is no disk, it is damaged, or an error of the bucket.
    pub fn open(
        engine: Arc<dyn BucketApi>,
        address: &str,
        options: &BucketOptions,
    ) -> Result<Self, Error> {
        let bucket = options.retrying_store(engine, address);
        // A bucket without a store gets no epoch.
        let names = list_objects(&bucket, "")?;
        if newest_root(&names).is_none() {
            return Err(no_store_error(address));
        }
        let journal = match &options.journal {
            None => None,
            Some(local) => Some(open_journal_and_upload(&bucket, options, local, &names)?),
        };
        let (epoch, [roots, names]) = Epoch::claim(&bucket, options, journal.as_ref(), names)?;
        let newest = newest_root(&roots).ok_or_else(|| no_store_error(address))?;
        let root = read_root(&bucket, newest).map_err(|trouble| match trouble {
            // Only a newer writer deletes it.
            RequestError::NotFound => epoch.fenced_error(&bucket),
            trouble => bucket.error("reading", &ObjectName::Root(newest).key(), &trouble),
        })?;
        let opened = live_objects(&names, newest, root, Some(epoch));
        let disk = options.open_disk(bucket, opened, journal)?;
        if options.is_mount {
            disk.write_root()?;
        }
        disk.finish_opening();
        Ok(disk)
    }

    /// Opens the disk in a bucket for reading, in its current state, while others may write it.
    ///
    /// # Errors
    /// There is no disk, it is damaged, it changes all the time, or an error of the bucket.
    pub fn open_to_read(
        engine: Arc<dyn BucketApi>,
        address: &str,
        options: &BucketOptions,
    ) -> Result<Self, Error> {
        let bucket = options.retrying_store(engine, address);
        if let Some(local) = &options.journal {
            let (journal, waiting) = Journal::open(local)?;
            if !waiting.objects.is_empty() {
                let place = journal.location();
                return Err(remote(format!(
                    "{place} has what {address} has not yet, and reading sends nothing: a command \
                     that changes the store does, with --journal {place}"
                )));
            }
        }
        let opened = list_newest_state(&bucket)?;
        options.open_disk(bucket, opened, None)
    }
}

/// Returns the error for a journal with data of another store.
fn other_store_error(journal: &Journal, address: &str) -> Error {
    let (place, (_, other)) = (journal.location(), journal.store_identity());
    remote(format!(
        "{place} has what waits for {other}, not for the store at {address}: open that one with \
         --journal {place} first, or use another file"
    ))
}

/// Opens a journal and uploads its data to the bucket, if that is still possible.
fn open_journal_and_upload(
    bucket: &RetryingStore,
    options: &BucketOptions,
    local: &JournalDevice,
    names: &BTreeMap<ObjectName, u64>,
) -> Result<Journal, Error> {
    let (mut journal, waiting) = Journal::open(local)?;
    if waiting.objects.is_empty() {
        return Ok(journal);
    }
    let newest = newest_root(names).ok_or_else(|| no_store_error(&bucket.address))?;
    let root = read_root(bucket, newest)
        .map_err(|trouble| bucket.error("reading", &ObjectName::Root(newest).key(), &trouble))?;
    if root.id != journal.store_identity().0 {
        return Err(other_store_error(&journal, &bucket.address));
    }
    // A machine without the journal may have uploaded everything before.
    let end = match newest.epoch == waiting.epoch {
        true => live_objects(names, newest, root, None).end,
        false => root.epoch_ends.get(&waiting.epoch).copied().unwrap_or(0),
    };
    let mine = match newest_epoch(names) == waiting.epoch {
        true => Epoch::find_by_journal(bucket, waiting.epoch, &journal)?,
        false => None,
    };
    match &mine {
        None if waiting.objects.range(end..).next().is_none() => {}
        None => return Err(fenced_journal_error(bucket, &journal, &waiting, end)),
        Some(epoch) => {
            // Every later opening will reassemble the same objects.
            journal.persist_replay()?;
            let sent = upload_unsent(bucket, options.lanes, &waiting, newest, names)?;
            match epoch.is_current(bucket) {
                Ok(true) => log::info!("{sent} objects of {} were sent", journal.location()),
                Ok(false) => return Err(fenced_journal_error(bucket, &journal, &waiting, end)),
                Err(trouble) => return Err(bucket.error("asking for", &epoch.key(), &trouble)),
            }
            journal.kept.sent_late = sent;
        }
    }
    journal.mark_empty()?;
    Ok(journal)
}

/// Uploads unsent objects under their names. A root is uploaded once all before it are there.
/// Returns the number of uploads.
fn upload_unsent(
    bucket: &RetryingStore,
    lanes: usize,
    waiting: &UnsentObjects,
    newest: ObjectNumber,
    names: &BTreeMap<ObjectName, u64>,
) -> Result<u64, Error> {
    let epoch = waiting.epoch;
    // Objects before a root were uploaded before it; some may have been deleted since.
    let first = if newest.epoch == epoch { newest.sequence + 1 } else { 0 };
    let there: BTreeSet<u64> = names
        .keys()
        .filter_map(|name| match name {
            ObjectName::Data(number, _) if number.epoch == epoch => Some(number.sequence),
            _ => None,
        })
        .collect();
    let missing = waiting.objects.range(first..).filter(|(nth, _)| !there.contains(*nth));
    let missing: Vec<(&u64, &JournaledObject)> = missing.collect();
    for part in missing.chunk_by(|(_, before), (_, next)| !before.is_root && !next.is_root) {
        let left = Mutex::new(part.iter());
        let work = || -> Result<(), Error> {
            loop {
                let Some(&(&nth, object)) = left.lock().next() else { return Ok(()) };
                let key = object.key(ObjectNumber { epoch, sequence: nth });
                let bytes = Bytes::copy_from_slice(&object.bytes);
                let sent = match object.is_root {
                    false => bucket.put(&key, &bytes),
                    true => bucket.create(&key, &bytes),
                };
                sent.map_err(|trouble| bucket.error("writing", &key, &trouble))?;
            }
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..lanes.min(part.len())).map(|_| scope.spawn(work)).collect();
            let died = |_| Err(remote("a thread that sent objects died".to_owned()));
            threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(died))
        })?;
    }
    Ok(missing.len() as u64)
}

/// Returns the error for journal data that another machine has fenced, with object names.
fn fenced_journal_error(
    bucket: &RetryingStore,
    journal: &Journal,
    waiting: &UnsentObjects,
    end: u64,
) -> Error {
    let (place, address, epoch) = (journal.location(), &bucket.address, waiting.epoch);
    let who = Epoch::with_number(epoch).fenced_by(bucket);
    let lost: Vec<(&u64, &JournaledObject)> = waiting.objects.range(end..).collect();
    let bytes: usize = lost.iter().map(|(_, object)| object.bytes.len()).sum();
    let name = |(nth, object): &(&u64, &JournaledObject)| {
        object.key(ObjectNumber { epoch, sequence: **nth })
    };
    let mut keys: Vec<String> = lost.iter().take(MAX_NAMED_OBJECTS).map(name).collect();
    if lost.len() > MAX_NAMED_OBJECTS {
        keys.push(format!("{} more", lost.len() - MAX_NAMED_OBJECTS));
    }
    remote(format!(
        "{address} was taken over by {who}, without what only {place} has: {}, {bytes} bytes. They \
         can not be added to the store any more, and {place} is left as it is: move it away, or \
         delete it, to open the store without them",
        keys.join(", ")
    ))
}
