//! Guarantees of a store in a bucket with a journal: machines lose their power at any request to
//! the bucket and any write of the journal, which then has any part of its unflushed writes.
//! Acknowledged data is there after the journal is opened again, in order; without the journal the
//! bucket is refused. `SEED` and `RUNS` make it longer.
//!
//! Mutation tests: deliberate violations of the laws are detected.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use draconis_bucket::{
    BucketApi, BucketDisk, BucketOptions, Faults, JournalDevice, ListEntry, MemoryBucket,
    RequestError, RequestResult,
};
use draconis_device::Random;
use draconis_device::{Disk, Error, Group, MemoryDisk, Refused, SubmitOptions, Ticket};
use draconis_objects::test_hooks::TestSettings;
use draconis_testkit::torture::{self, DamageTally, DiskFactory, StoreShape};
use draconis_testkit::{CrashOptions, CrashStates, Event, RecordDisk};
use draconis_types::lock::Mutex;

/// Small, so that it is full now and then.
const JOURNAL_BYTES: usize = 192 << 10;

fn env_number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(otherwise)
}

/// Deliberate violation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DeliberateFault {
    None,
    /// The journal answers before it is flushed.
    Hasty,
    /// Data objects are uploaded after the roots that refer to them.
    Disordered,
    /// The epoch does not record the journal.
    Unmarked,
}

/// Power of a machine, for so many steps of its bucket and its journal.
struct MachinePower {
    left: Option<u64>,
    dice: Random,
}

impl MachinePower {
    /// Takes a step; an error states if it is done though the power ends with it.
    fn consume_step(power: &Mutex<Self>) -> Result<(), bool> {
        let mut power = power.lock();
        match &mut power.left {
            None => Ok(()),
            Some(0) => Err(false),
            Some(left) => {
                *left -= 1;
                match *left {
                    0 => Err(power.dice.next_below(2) == 0),
                    _ => Ok(()),
                }
            }
        }
    }
}

/// The bucket of one machine.
struct MachineBucket {
    bucket: MemoryBucket,
    faults: Faults,
    power: Arc<Mutex<MachinePower>>,
    sin: DeliberateFault,
    /// Epoch texts as their writer knows them.
    told: Mutex<Vec<(String, Bytes)>>,
    held_back: Mutex<Vec<(String, Bytes)>>,
}

impl MachineBucket {
    fn request_with_power<T>(
        &self,
        request: impl FnOnce(&MemoryBucket) -> RequestResult<T>,
    ) -> RequestResult<T> {
        match MachinePower::consume_step(&self.power) {
            Ok(()) => request(&self.bucket),
            Err(is_done) => {
                if is_done {
                    let _ = request(&self.bucket);
                }
                Err(RequestError::Permanent("the machine is off".to_owned()))
            }
        }
    }

    /// Returns the epoch text that the bucket gets.
    fn epoch_without_journal_mark(&self, key: &str, bytes: Bytes) -> Bytes {
        if self.sin != DeliberateFault::Unmarked || !key.starts_with("epoch/") || bytes.is_empty() {
            return bytes;
        }
        self.told.lock().push((key.to_owned(), bytes.clone()));
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        let lines: Vec<&str> = text.lines().take(2).collect();
        (lines.join("\n") + "\n").into()
    }

    fn upload_held_back(&self, bucket: &MemoryBucket) {
        for (key, bytes) in std::mem::take(&mut *self.held_back.lock()) {
            let _ = bucket.put(&key, bytes);
        }
    }
}

impl BucketApi for MachineBucket {
    fn put(&self, key: &str, bytes: Bytes) -> RequestResult<()> {
        let bytes = self.epoch_without_journal_mark(key, bytes);
        if self.sin == DeliberateFault::Disordered && key.starts_with("data/") {
            return self.request_with_power(|_| {
                self.held_back.lock().push((key.to_owned(), bytes));
                Ok(())
            });
        }
        self.request_with_power(|bucket| bucket.put(key, bytes))
    }

    fn create(&self, key: &str, bytes: Bytes) -> RequestResult<()> {
        let bytes = self.epoch_without_journal_mark(key, bytes);
        let created = self.request_with_power(|bucket| bucket.create(key, bytes));
        if self.sin == DeliberateFault::Disordered && key.starts_with("root/") {
            self.request_with_power(|bucket| {
                self.upload_held_back(bucket);
                Ok(())
            })?;
        }
        created
    }

    fn get(&self, key: &str, range: Option<(u64, u64)>) -> RequestResult<Bytes> {
        let there = self.request_with_power(|bucket| {
            self.upload_held_back(bucket);
            bucket.get(key, range)
        })?;
        let told = self.told.lock();
        let mine = told.iter().find(|(it, told)| it == key && told.starts_with(&there));
        Ok(mine.filter(|_| !there.is_empty()).map_or(there.clone(), |(_, told)| told.clone()))
    }

    fn head(&self, key: &str) -> RequestResult<u64> {
        self.request_with_power(|bucket| bucket.head(key))
    }

    fn delete(&self, key: &str) -> RequestResult<()> {
        self.request_with_power(|bucket| bucket.delete(key))
    }

    fn list(&self, folder: &str) -> RequestResult<Vec<ListEntry>> {
        self.request_with_power(|bucket| {
            self.upload_held_back(bucket);
            bucket.list(folder)
        })
    }
}

/// The journal's disk of one machine.
struct JournalDrive {
    disk: RecordDisk<MemoryDisk>,
    power: Arc<Mutex<MachinePower>>,
    sin: DeliberateFault,
}

impl draconis_device::ForwardingDisk for JournalDrive {
    type Inner = RecordDisk<MemoryDisk>;

    fn inner_disk(&self) -> &Self::Inner {
        &self.disk
    }

    fn submit_with(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
        terms: SubmitOptions,
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        match MachinePower::consume_step(&self.power) {
            Ok(()) => Disk::submit_with(&self.disk, chain, after, terms),
            Err(is_done) => {
                if is_done {
                    let _ = Disk::submit_with(&self.disk, chain, after, SubmitOptions::default());
                }
                Err(Refused { payload: None, error: Error::Stopped })
            }
        }
    }

    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        MachinePower::consume_step(&self.power).map_err(|_| Error::Stopped)?;
        match self.sin {
            DeliberateFault::Hasty => Ok(()),
            _ => Disk::wait_durable(&self.disk, ticket),
        }
    }
}

/// A bucket, and its machines, with a journal that each passes to the next.
struct MachineSequence {
    server: MemoryBucket,
    sin: DeliberateFault,
    dice: Random,
    /// Contents of the journal when its current machine started.
    image: Vec<u8>,
    now: Option<(Arc<JournalDrive>, Arc<Mutex<MachinePower>>)>,
    /// Faults of the first machine, once it has created its disk.
    first: Option<(Arc<MachineBucket>, Faults)>,
    /// Number of further deaths.
    dying: u64,
    /// Openings without the journal that were refused.
    refused: u64,
    sent_late: u64,
}

impl MachineSequence {
    fn new(seed: u64, sin: DeliberateFault) -> Self {
        let mut dice = Random::new(seed);
        let disk = MemoryDisk::new(vec![0; JOURNAL_BYTES], 512);
        JournalDevice::format(&disk, u128::from(seed) << 64 | 7).unwrap();
        Self {
            server: MemoryBucket::default(),
            sin,
            image: disk.into_bytes(),
            now: None,
            first: None,
            dying: dice.next_below(4),
            dice,
            refused: 0,
            sent_late: 0,
        }
    }

    /// Cuts the power of the current machine; returns the contents of its journal.
    fn cut_power(&mut self) {
        let Some((drive, power)) = self.now.take() else { return };
        power.lock().left = Some(0);
        let mut events = drive.disk.take_events();
        let mut image = std::mem::take(&mut self.image);
        // Each write waits for the one before: the image has all durable ones.
        let durable = events.iter().rposition(|event| matches!(event, Event::Durable(_)));
        for event in events.drain(..durable.map_or(0, |at| at + 1)) {
            let Event::Group { writes, .. } = event else { continue };
            for (at, bytes) in writes {
                image[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
            }
        }
        let options = CrashOptions { seed: self.dice.next_u64(), ..CrashOptions::default() };
        let states: Vec<_> = CrashStates::new(image, events, options).collect();
        let chosen = self.dice.next_below(states.len() as u64) as usize;
        self.image = states[chosen].disk.to_bytes();
    }

    fn next_machine(
        &mut self,
        steps: Option<u64>,
        with: bool,
    ) -> (Arc<MachineBucket>, BucketOptions) {
        self.cut_power();
        let left = steps.map(|most| 1 + self.dice.next_below(most));
        let power =
            Arc::new(Mutex::new(MachinePower { left, dice: Random::new(self.dice.next_u64()) }));
        let disk = RecordDisk::new(MemoryDisk::new(self.image.clone(), 512));
        let drive = Arc::new(JournalDrive { disk, power: power.clone(), sin: self.sin });
        self.now = Some((drive.clone(), power.clone()));
        let mut rate = || [0, 6, 12, 40][self.dice.next_below(4) as usize];
        let (refused, lost, late, slow) = (rate(), rate(), rate(), rate());
        let seed = self.dice.next_u64();
        let faults = Faults { seed, refused, lost, late, slow, dies_after: None };
        let client = MachineBucket {
            bucket: self.server.client(faults),
            faults,
            power,
            sin: self.sin,
            told: Mutex::default(),
            held_back: Mutex::default(),
        };
        let options = BucketOptions {
            pause: Duration::from_micros(20),
            commit: Duration::from_micros(self.dice.next_below(3) * 150),
            lanes: 1 + self.dice.next_below(6) as usize,
            token: u128::from(self.dice.next_u64()),
            is_mount: self.dice.next_below(2) == 0,
            journal: with.then(|| JournalDevice::on_disk(drive, "the journal")),
            ..BucketOptions::default()
        };
        (Arc::new(client), options)
    }

    fn open(&mut self, steps: Option<u64>, with: bool) -> Result<BucketDisk, Error> {
        let (client, options) = self.next_machine(steps, with);
        let disk = BucketDisk::open(client, "memory", &options)?;
        self.sent_late += disk.journal_statistics().map_or(0, |kept| kept.sent_late);
        Ok(disk)
    }
}

impl DiskFactory for MachineSequence {
    type Disk = BucketDisk;

    fn create_disk(&mut self) -> BucketDisk {
        let len_bytes = StoreShape::BUCKET_SHAPE.disk_bytes as u64;
        let (client, options) = self.next_machine(None, true);
        // Late requests would look like a broken guarantee of the server.
        let faults = client.faults;
        client.bucket.set_faults(Faults::default());
        self.first = Some((client.clone(), faults));
        BucketDisk::create(client, "memory", len_bytes, false, &options).unwrap()
    }

    fn begin_faults(&mut self) {
        if let Some((client, faults)) = self.first.take() {
            client.bucket.set_faults(faults);
        }
        let left = 1 + self.dice.next_below(500);
        self.now.as_ref().unwrap().1.lock().left = Some(left);
    }

    fn reopen(&mut self) -> Option<Result<BucketDisk, Error>> {
        self.dying = self.dying.checked_sub(1)?;
        let with = self.dice.next_below(3) > 0;
        let opened = self.open(Some(120), with);
        if let Err(Error::Remote(why)) = &opened
            && why.contains("is written with a journal, the journal, by ")
        {
            assert!(!with, "{why}");
            self.refused += 1;
        }
        Some(opened)
    }

    /// Opens a reader, which sees the bucket: everything, once the journal was opened.
    fn open_reader(&mut self) -> Result<BucketDisk, Error> {
        // Sometimes a machine without the journal tries first.
        if self.dice.next_below(2) == 0 {
            match self.open(None, false) {
                Ok(disk) => return Ok(disk),
                Err(Error::Remote(why)) if why.contains("is written with a journal") => {
                    self.refused += 1;
                }
                Err(error) => return Err(error),
            }
        }
        drop(self.open(None, true)?);
        let (client, options) = self.next_machine(None, false);
        BucketDisk::open_to_read(client, "memory", &options)
    }

    fn open_last(&mut self) -> Result<BucketDisk, Error> {
        self.open(None, true)
    }
}

fn run_campaign(
    seed: u64,
    sin: DeliberateFault,
) -> (Result<DamageTally, torture::Violation>, MachineSequence) {
    let script = match seed % 3 {
        0 => torture::random_large(seed, StoreShape::BUCKET_SHAPE, 60),
        _ => torture::random(seed, StoreShape::BUCKET_SHAPE, 120),
    };
    let mut machines = MachineSequence::new(seed, sin);
    (
        torture::run_until_disk_loss(
            StoreShape::BUCKET_SHAPE,
            &script,
            TestSettings::NORMAL,
            &mut machines,
        ),
        machines,
    )
}

#[test]
#[ignore = "long: half a minute: power cuts at any request"]
fn power_cuts_keep_acknowledged_groups() {
    let (first, runs) = (env_number("SEED", 1), env_number("RUNS", 40));
    let (mut all, mut refused, mut sent_late) = (DamageTally::default(), 0, 0);
    for seed in first..first + runs {
        match run_campaign(seed, DeliberateFault::None) {
            (Ok(harm), machines) => {
                all += harm;
                refused += machines.refused;
                sent_late += machines.sent_late;
            }
            (Err(violation), _) => panic!("SEED={seed} RUNS=1: {violation}"),
        }
    }
    println!("{all:?}, {refused} refused without the journal, {sent_late} objects sent late");
    assert!(runs < 20 || refused > 0 && sent_late > 0 && all.disks > 0);
}

fn is_fault_detected(sin: DeliberateFault) -> bool {
    (1..=60).any(|seed| run_campaign(seed, sin).0.is_err())
}

#[test]
fn acknowledgement_before_flush_is_detected() {
    assert!(is_fault_detected(DeliberateFault::Hasty));
}

#[test]
fn root_before_its_objects_is_detected() {
    assert!(is_fault_detected(DeliberateFault::Disordered));
}

#[test]
fn epoch_without_journal_is_detected() {
    assert!(is_fault_detected(DeliberateFault::Unmarked));
}
