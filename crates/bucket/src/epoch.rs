//! Epochs: the writer of the newest epoch may write.
//!
//! ```text
//!   list ─▶ create epoch n + 1 with my name ─▶ list and empty those before ─▶ list roots, then all
//!   an older writer: object sent ─▶ does its epoch still have its name? ─▶ it is durable
//! ```
//!
//! Law 1: an epoch is created with create-if-absent, so it has one writer.
//! Law 2: an epoch is fenced by emptying its object, before anything is listed. The newest empty
//! ones stay, so that a writer with an old list finds its number taken.
//! Law 3: a writer that finds a newer epoch is fenced.
//! Law 4: a mount records itself in its epoch object and empties it at unmount. Until then it is
//! alive or crashed. Another writer fences it only with `--take-over`, or from the same host id,
//! where the mount is known to be gone.
//! Law 5: a writer with a journal records the journal's id and path. Until both are empty,
//! acknowledged data may be only in the journal. Another writer fences the epoch only with that
//! journal, or with `--take-over`.

use std::collections::BTreeMap;

use bytes::Bytes;
use draconis_device::Error;

use crate::api::{RequestError, RequestResult};
use crate::journal::Journal;
use crate::listing::list_objects;
use crate::name::{ObjectName, ObjectNumber};
use crate::options::BucketOptions;
use crate::remote;
use crate::retry::RetryingStore;

/// Most attempts of a writer that others precede.
const MAX_CLAIM_ATTEMPTS: usize = 50;
/// Fenced epochs whose objects stay.
const MAX_KEPT_FENCED_EPOCHS: u32 = 16;
/// Prefix of a mount's host id, on the third line of its epoch.
const MOUNT_PREFIX: &str = "stays at ";
/// Prefix of the id of a journal and its path, on the fourth line.
const JOURNAL_PREFIX: &str = "journal ";

/// An epoch of this writer.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Epoch {
    pub number: u32,
    /// Text of its object while it is not fenced.
    text: Bytes,
    /// True if the writer is a mount.
    is_mount: bool,
}

impl Epoch {
    /// Creates the newest epoch and fences the others. `names` is a list of the bucket just before.
    /// Returns the current roots, and a later list of all objects.
    pub fn claim(
        bucket: &RetryingStore,
        options: &BucketOptions,
        journal: Option<&Journal>,
        mut names: BTreeMap<ObjectName, u64>,
    ) -> Result<(Self, [BTreeMap<ObjectName, u64>; 2]), Error> {
        let mut text = format!("{}\n{:032x}\n", options.who, options.token);
        // Programs without journal support do not fence mounts.
        if options.is_mount || journal.is_some() {
            text += &format!("{MOUNT_PREFIX}{}\n", options.host_id);
        }
        if let Some(journal) = journal {
            text += &format!("{JOURNAL_PREFIX}{:032x} {}\n", journal.id(), journal.location());
        }
        let text = Bytes::from(text);
        let describe = |doing, epoch: u32, trouble: &RequestError| {
            bucket.error(doing, &ObjectName::Epoch(epoch).key(), trouble)
        };
        for _ in 0..MAX_CLAIM_ATTEMPTS {
            check_may_fence(bucket, options, journal, &names)?;
            let number = newest_epoch(&names).checked_add(1);
            let number = number.ok_or_else(|| remote("all epochs are used up".to_owned()))?;
            match bucket.create(&ObjectName::Epoch(number).key(), &text) {
                Ok(()) => {}
                Err(RequestError::AlreadyExists) => {
                    names = list_objects(bucket, "")?;
                    continue;
                }
                Err(trouble) => return Err(describe("writing", number, &trouble)),
            }
            // Listed again: a later writer with an older number finds this one in its list.
            names = list_objects(bucket, "epoch")?;
            let before = names.iter().filter_map(|(name, len_bytes)| match name {
                ObjectName::Epoch(epoch) if *epoch < number => Some((*epoch, *len_bytes)),
                _ => None,
            });
            for (epoch, len_bytes) in before {
                let key = ObjectName::Epoch(epoch).key();
                let ended = match number - epoch > MAX_KEPT_FENCED_EPOCHS {
                    true => bucket.delete(&key),
                    false if len_bytes == 0 => Ok(()),
                    false => bucket.put(&key, &Bytes::new()),
                };
                ended.map_err(|trouble| describe("ending", epoch, &trouble))?;
            }
            let roots = list_objects(bucket, "root")?;
            names = list_objects(bucket, "")?;
            let mine = Self { number, text, is_mount: options.is_mount };
            // Creating another epoch would make both writers fence each other without end.
            return match newest_epoch(&names) == number {
                true => Ok((mine, [roots, names])),
                false => Err(mine.fenced_error(bucket)),
            };
        }
        let address = &bucket.address;
        Err(remote(format!("{address}: others opened it each time it was tried; try again")))
    }

    /// Returns the epoch with that number, if its writer has this journal and did not empty it.
    pub fn find_by_journal(
        bucket: &RetryingStore,
        number: u32,
        journal: &Journal,
    ) -> Result<Option<Self>, Error> {
        let key = ObjectName::Epoch(number).key();
        match bucket.get(&key, None) {
            Ok(text) if EpochRecord::parse(&text).has_journal(journal) => {
                Ok(Some(Self { number, text, is_mount: false }))
            }
            Ok(_) | Err(RequestError::NotFound) => Ok(None),
            Err(trouble) => Err(bucket.error("asking for", &key, &trouble)),
        }
    }

    /// Returns true if this writer is not fenced.
    pub fn is_current(&self, bucket: &RetryingStore) -> RequestResult<bool> {
        match bucket.get(&ObjectName::Epoch(self.number).key(), None) {
            Ok(text) => Ok(text == self.text),
            Err(RequestError::NotFound) => Ok(false),
            Err(trouble) => Err(trouble),
        }
    }

    /// Returns an epoch that may be another writer's.
    pub fn with_number(number: u32) -> Self {
        Self { number, ..Self::default() }
    }

    pub fn key(&self) -> String {
        ObjectName::Epoch(self.number).key()
    }

    /// Records the end of a mount. Errors are ignored: the next writer is told that the epoch was
    /// not released.
    pub fn release(&self, bucket: &RetryingStore) {
        let key = ObjectName::Epoch(self.number).key();
        if let Err(trouble) = bucket.put(&key, &Bytes::new()) {
            log::warn!("{}", bucket.error("ending", &key, &trouble));
        }
    }

    /// Returns the error of a fenced writer.
    pub fn fenced_error(&self, bucket: &RetryingStore) -> Error {
        let who = self.fenced_by(bucket);
        let step = match self.is_mount {
            true => "; unmount it, and mount it with --take-over to take it over in turn",
            false => ": run this again, and it takes over in turn",
        };
        remote(format!(
            "{} was taken over by {who}; what was not durable by then is not in it{step}",
            bucket.address
        ))
    }

    /// Returns the name of the writer that fenced this epoch.
    pub fn fenced_by(&self, bucket: &RetryingStore) -> String {
        // The one found may be fenced before it is read: then there is a newer one.
        let who = (0..MAX_CLAIM_ATTEMPTS).find_map(|_| {
            let names = list_objects(bucket, "epoch").ok()?;
            let younger = |name: &ObjectName| *name > ObjectName::Epoch(self.number);
            let last = names.into_keys().rfind(younger)?;
            let text = bucket.get(&last.key(), None).ok()?;
            Some(EpochRecord::parse(&text).who).filter(|who| !who.is_empty())
        });
        who.unwrap_or_else(|| "another writer".to_owned())
    }
}

/// Decoded text of an epoch object.
#[derive(Default)]
struct EpochRecord {
    who: String,
    seat: Option<String>,
    /// Its id, and its path.
    journal: Option<(String, String)>,
}

impl EpochRecord {
    fn parse(text: &[u8]) -> Self {
        let text = String::from_utf8_lossy(text);
        let clean = |line: &str| line.chars().filter(|c| !c.is_control()).collect::<String>();
        let mut mark =
            Self { who: clean(text.lines().next().unwrap_or_default()), ..Self::default() };
        for line in text.lines().skip(2) {
            if let Some(seat) = line.strip_prefix(MOUNT_PREFIX) {
                mark.seat = Some(seat.to_owned());
            } else if let Some(journal) = line.strip_prefix(JOURNAL_PREFIX) {
                mark.journal =
                    journal.split_once(' ').map(|(id, path)| (id.to_owned(), clean(path)));
            }
        }
        mark
    }

    fn has_journal(&self, journal: &Journal) -> bool {
        self.journal.as_ref().is_some_and(|(id, _)| *id == format!("{:032x}", journal.id()))
    }
}

/// Returns an error if the existing epochs must not be fenced.
fn check_may_fence(
    bucket: &RetryingStore,
    options: &BucketOptions,
    journal: Option<&Journal>,
    names: &BTreeMap<ObjectName, u64>,
) -> Result<(), Error> {
    let last = names.iter().rev().find_map(|(name, len_bytes)| match name {
        ObjectName::Epoch(_) if *len_bytes > 0 => Some(name.key()),
        _ => None,
    });
    let Some(key) = last else { return Ok(()) };
    let text = match bucket.get(&key, None) {
        Ok(text) => text,
        // Fenced since it was listed.
        Err(RequestError::NotFound) => return Ok(()),
        Err(trouble) => return Err(bucket.error("asking for", &key, &trouble)),
    };
    let (mark, address) = (EpochRecord::parse(&text), &bucket.address);
    if journal.is_some_and(|journal| mark.has_journal(journal)) {
        return Ok(());
    }
    let who = &mark.who;
    match mark {
        EpochRecord { journal: Some((_, path)), .. } if options.take_over => {
            log::warn!(
                "{address} is taken over from {who}: what only its journal has, {path} there, is not \
                 in the store any more"
            );
            Ok(())
        }
        EpochRecord { journal: Some((_, path)), .. } => Err(remote(format!(
            "{address} is written with a journal, {path}, by {who}, and that was not emptied: if it \
             has ended, --journal {path} there sends what is in it. If that machine or file is gone, \
             --take-over opens the store without: what only the journal has is lost"
        ))),
        EpochRecord { seat: Some(seat), .. } if seat != options.host_id && !options.take_over => {
            Err(remote(format!(
                "{address} is mounted by {who}; unmount it there first. If that machine is gone, \
                 --take-over ends its mounts: what they were not told is durable is lost"
            )))
        }
        _ => Ok(()),
    }
}

/// Returns the newest epoch in any name.
pub(crate) fn newest_epoch(names: &BTreeMap<ObjectName, u64>) -> u32 {
    let epochs = names.keys().map(|name| match name {
        ObjectName::Epoch(epoch) => *epoch,
        ObjectName::Root(ObjectNumber { epoch, .. })
        | ObjectName::Data(ObjectNumber { epoch, .. }, _) => *epoch,
    });
    epochs.max().unwrap_or(0)
}
