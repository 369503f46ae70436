//! Making and opening a disk in a bucket, and taking it over from who writes it.
//!
//! ```text
//!   writers  epoch of my own, the others' ended ─▶ newest root ─▶ objects that count
//!   readers                                        newest root ─▶ objects that count ─▶ still it?
//! ```
//!
//! Law 1: a writer ends the epochs before its own and lists then: what another one was told is
//! durable was in the bucket before its epoch ended, so it is in the list.
//! Law 2: of the objects of the epoch that wrote the newest root count those up to the first that
//! is missing; of those before as many as the root says; of all others none.
//! Law 3: a list is no moment. The root is of a list before that of the objects, so what it leads to
//! is in that; a newer one may lead to what is not.
//! Law 4: who stays writes a root at once. Until one is written, objects that an ended writer sends
//! late, and is told that they are not durable, count for who opens the disk next.
//! Law 5: readers write nothing and end no epoch. If there is another root afterwards, they list
//! again: what the first one led to may have been written over.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use draconis_device::Error;

use crate::SECTOR;
use crate::cache::Cache;
use crate::disk::{BucketDisk, Opened};
use crate::engine::{Engine, Listed, Trouble};
use crate::epoch::Epoch;
use crate::map::Map;
use crate::name::{Name, Number, Run};
use crate::outbox::Pace;
use crate::root::{EDGE_SECTORS, Root};
use crate::steady::Steady;

/// How often readers list again because the store changed meanwhile.
const ATTEMPTS: usize = 50;

/// How a bucket is used.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a request is tried again before it failed.
    pub deadline: Duration,
    /// The first pause before that; later ones are longer.
    pub pause: Duration,
    /// Commits that are waited for begin at least so long after each other: those between go
    /// together.
    pub commit: Duration,
    /// Requests at once.
    pub lanes: usize,
    /// Who writes, for those who are told that they do no longer.
    pub who: String,
    /// A number that no other writer has; chance is an argument.
    pub token: u128,
    /// Where the writer sits: a place that has one writer that stays at most, so that who comes to
    /// it knows that the one before is gone.
    pub seat: String,
    /// It stays for long, as a mount does: others do not end its epoch without being told to.
    pub stays: bool,
    /// The epoch of a writer that stays is ended all the same.
    pub takes_over: bool,
    /// Where what was read is kept, and how many bytes of it at most.
    pub cache: Option<(PathBuf, u64)>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(60),
            pause: Duration::from_millis(100),
            commit: Duration::from_millis(50),
            lanes: 16,
            who: "a writer without a name".to_owned(),
            token: 0,
            seat: String::new(),
            stays: false,
            takes_over: false,
            cache: None,
        }
    }
}

impl Options {
    fn steady(&self, engine: Arc<dyn Engine>, address: &str) -> Steady {
        Steady::new(engine, address, self.deadline, self.pause)
    }

    fn disk(&self, bucket: Steady, opened: Opened) -> Result<BucketDisk, Error> {
        let cache = self.cache.as_ref().map(|(dir, most_bytes)| {
            Cache::open(dir, *most_bytes, opened.root.id).map_err(elsewhere)
        });
        let pace = Pace { commit: self.commit, lanes: self.lanes, stays: self.stays };
        Ok(BucketDisk::new(bucket, pace, opened, cache.transpose()?))
    }
}

impl BucketDisk {
    /// Makes a disk of zeros in a bucket, after it was probed; with `over` in
    /// place of one that is there.
    ///
    /// # Errors
    /// One is there, the bucket does not keep its promises, or what it says.
    pub fn create(
        engine: Arc<dyn Engine>,
        address: &str,
        len_bytes: u64,
        over: bool,
        options: &Options,
    ) -> Result<Self, Error> {
        let bucket = options.steady(engine, address);
        let sectors = len_bytes / SECTOR;
        if sectors < EDGE_SECTORS * 4 {
            return Err(elsewhere(format!("{address}: {len_bytes} bytes are too few for a disk")));
        }
        crate::probe::conditions(&bucket, options.token)?;
        let there = || elsewhere(format!("{address} holds a store; --force overwrites it"));
        // Who writes it is not disturbed for that.
        let names = list(&bucket, "")?;
        if !over && newest(&names).is_some() {
            return Err(there());
        }
        let (epoch, [roots, names]) = Epoch::claim(&bucket, options, names)?;
        if !over && newest(&roots).is_some() {
            return Err(there());
        }
        let dead = names.keys().filter(|name| !matches!(name, Name::Epoch(_)));
        let opened = Opened {
            root: Root { id: options.token, sectors, ..Root::default() },
            map: Map::default(),
            names: HashMap::new(),
            dead: dead.map(|name| name.key().into()).collect(),
            epoch: Some(epoch),
        };
        let disk = options.disk(bucket, opened)?;
        disk.write_root()?;
        Ok(disk)
    }

    /// Opens the disk in a bucket to write it, and ends the epoch of who did before.
    ///
    /// # Errors
    /// There is none, it is damaged, or what the bucket says.
    pub fn open(engine: Arc<dyn Engine>, address: &str, options: &Options) -> Result<Self, Error> {
        let bucket = options.steady(engine, address);
        // What is no store gets no epoch.
        let names = list(&bucket, "")?;
        if newest(&names).is_none() {
            return Err(nothing(address));
        }
        let (epoch, [roots, names]) = Epoch::claim(&bucket, options, names)?;
        let newest = newest(&roots).ok_or_else(|| nothing(address))?;
        let root = read_root(&bucket, newest).map_err(|trouble| match trouble {
            // Only a younger writer does away with it.
            Trouble::Missing => epoch.ended(&bucket),
            trouble => bucket.error("reading", &Name::Root(newest).key(), &trouble),
        })?;
        let opened = counted(&names, newest, root, Some(epoch));
        let disk = options.disk(bucket, opened)?;
        if options.stays {
            disk.write_root()?;
        }
        Ok(disk)
    }

    /// Opens the disk in a bucket to read it as it is now, while others may write it.
    ///
    /// # Errors
    /// There is none, it is damaged, it changes all the time, or what the bucket says.
    pub fn open_to_read(
        engine: Arc<dyn Engine>,
        address: &str,
        options: &Options,
    ) -> Result<Self, Error> {
        let bucket = options.steady(engine, address);
        for _ in 0..ATTEMPTS {
            let found = newest(&list(&bucket, "root")?).ok_or_else(|| nothing(address))?;
            let root = match read_root(&bucket, found) {
                Ok(root) => root,
                Err(Trouble::Missing) => continue,
                Err(trouble) => {
                    return Err(bucket.error("reading", &Name::Root(found).key(), &trouble));
                }
            };
            let names = list(&bucket, "data")?;
            if newest(&list(&bucket, "root")?) == Some(found) {
                let opened = counted(&names, found, root, None);
                return options.disk(bucket, opened);
            }
        }
        Err(elsewhere(format!("{address} changed each time it was listed; try again")))
    }
}

pub(crate) fn elsewhere(text: String) -> Error {
    Error::Elsewhere(text.into())
}

fn nothing(address: &str) -> Error {
    elsewhere(format!("{address}: no store is there; draconis store create {address} makes one"))
}

/// Our names in a folder, with the length of each object.
pub(crate) fn list(bucket: &Steady, folder: &str) -> Result<BTreeMap<Name, u64>, Error> {
    let all = bucket.list(folder).map_err(|trouble| bucket.error("listing", folder, &trouble))?;
    let ours = all
        .into_iter()
        .filter_map(|Listed { key, len_bytes }| Name::of(&key).map(|name| (name, len_bytes)));
    Ok(ours.collect())
}

fn newest(names: &BTreeMap<Name, u64>) -> Option<Number> {
    let roots = names.keys().filter_map(|name| match name {
        Name::Root(number) => Some(*number),
        _ => None,
    });
    roots.max()
}

fn read_root(bucket: &Steady, number: Number) -> Result<Root, Trouble> {
    let bytes = bucket.get(&Name::Root(number).key(), None)?;
    Root::decode(&bytes).map_err(|what| Trouble::Refused(format!("damaged: {what}")))
}

/// Which objects count, and what they have.
fn counted(
    names: &BTreeMap<Name, u64>,
    newest: Number,
    mut root: Root,
    epoch: Option<Epoch>,
) -> Opened {
    let mine = epoch.as_ref().map(|epoch| epoch.number);
    let is_sane = |runs: &[Run], len_bytes: u64| {
        let sectors: u64 = runs.iter().map(|run| run.count).sum();
        let lie_on = |run: &Run| run.sector + run.count <= root.sectors;
        runs.iter().all(lie_on) && sectors.checked_mul(SECTOR) == Some(len_bytes)
    };
    let data = names.iter().filter_map(|(name, len_bytes)| match name {
        Name::Data(number, runs) => Some((*number, (runs, is_sane(runs, *len_bytes), name.key()))),
        _ => None,
    });
    let data: BTreeMap<Number, (&Vec<Run>, bool, String)> = data.collect();
    let mut end = newest.nth + 1;
    while data.get(&Number { nth: end, ..newest }).is_some_and(|(_, is_sane, _)| *is_sane) {
        end += 1;
    }
    root.ends.insert(newest.epoch, end);
    let (mut map, mut keys, mut gone) = (Map::default(), HashMap::new(), vec![]);
    let mut dead: Vec<Arc<str>> = vec![];
    for (number, (runs, is_sane, key)) in data {
        let counts = root.ends.get(&number.epoch).is_some_and(|end| number.nth < *end) && is_sane;
        if !counts {
            // Of a younger epoch it is none of ours.
            if mine.is_some_and(|mine| number.epoch < mine) {
                dead.push(key.into());
            }
            continue;
        }
        keys.insert(number, Arc::from(key));
        let mut from = 0;
        for run in runs {
            map.set(*run, number, from, &mut gone);
            from += run.count;
        }
    }
    dead.extend(gone.iter().filter_map(|number| keys.remove(number)));
    let is_old = |name: &&Name| match name {
        Name::Root(number) => mine.is_some_and(|mine| number.epoch < mine),
        _ => false,
    };
    dead.extend(names.keys().filter(is_old).map(|name| name.key().into()));
    // An epoch without objects needs no end: what still comes of it does not count then.
    let epochs: BTreeSet<u32> = map.objects().map(|number| number.epoch).collect();
    root.ends.retain(|epoch, _| epochs.contains(epoch));
    Opened { root, map, names: keys, dead, epoch }
}
