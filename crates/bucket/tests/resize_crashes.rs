//! Stores in buckets that grow and shrink while machines die: after each step the full check
//! passes, and all acknowledged data is there. `SEED`, `RUNS` and `STEPS` in the environment make
//! it longer.

use std::collections::BTreeMap;
use std::ops::RangeFull;
use std::sync::Arc;
use std::time::Duration;

use draconis_bucket::{BucketDisk, BucketOptions, Faults, MemoryBucket};
use draconis_device::Disk;
use draconis_device::Random;
use draconis_objects::check::CheckOptions;
use draconis_objects::kv::Kv;
use draconis_objects::{OpenOptions, Store};
use draconis_testkit::torture::StoreShape;

fn env_number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(otherwise)
}

/// Possible values of a key: the last acknowledged one, and later ones.
type PossibleValues = BTreeMap<Vec<u8>, Vec<Option<Vec<u8>>>>;

struct ResizeWorkload {
    server: MemoryBucket,
    dice: Random,
    keys: PossibleValues,
    deaths: u64,
    resized: u64,
}

type StepResult = Result<(), String>;

fn to_text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl ResizeWorkload {
    fn begin(seed: u64) -> Self {
        let (server, mut dice) = (MemoryBucket::default(), Random::new(seed));
        let len_bytes = StoreShape::BUCKET_SHAPE.disk_bytes as u64;
        let machine = Arc::new(server.client(Faults::default()));
        let options = options(&mut dice);
        let disk = BucketDisk::create(machine, "memory", len_bytes, false, &options).unwrap();
        Store::create(Arc::new(disk), &StoreShape::BUCKET_SHAPE.options()).unwrap();
        Self { server, dice, keys: PossibleValues::new(), deaths: 0, resized: 0 }
    }

    /// One step by a machine of its own, which may die in it.
    fn run_step(&mut self) -> Result<(), String> {
        let dies_after = self.dice.once_in(2).then(|| self.dice.next_below(60));
        let faults = Faults { seed: self.dice.next_u64(), dies_after, ..Faults::default() };
        let machine = Arc::new(self.server.client(faults));
        let options = options(&mut self.dice);
        let opened = BucketDisk::open(machine, "memory", &options);
        let done = opened.map_err(to_text).and_then(|disk| match self.dice.next_below(3) {
            0 => self.put_keys(Arc::new(disk)),
            1 => self.grow(Arc::new(disk)),
            _ => self.shrink(Arc::new(disk)),
        });
        match done {
            Err(_) if dies_after.is_some() => self.deaths += 1,
            done => done?,
        }
        self.verify_keys()
    }

    fn put_keys(&mut self, disk: Arc<BucketDisk>) -> StepResult {
        let store = Store::open(disk, &OpenOptions::default()).map_err(to_text)?;
        let kv = Kv::new(store.clone());
        let mut put = vec![];
        for _ in 0..1 + self.dice.next_below(60) {
            let (key, len) = (self.dice.next_below(300).to_be_bytes(), self.dice.next_below(600));
            let mut value = vec![0; len as usize];
            self.dice.fill(&mut value);
            put.push(key);
            self.keys.entry(key.to_vec()).or_insert_with(|| vec![None]).push(Some(value.clone()));
            kv.put(&key, &value).map_err(to_text)?;
        }
        store.sync().map_err(to_text)?;
        for key in put {
            let values = self.keys.get_mut(&key[..]).unwrap();
            values.drain(..values.len() - 1);
        }
        Ok(())
    }

    fn grow(&mut self, disk: Arc<BucketDisk>) -> StepResult {
        // By whole megabytes, and by less than an end of the disk has.
        let more = [512, 4096, 1 << 20, 3 << 20][self.dice.next_below(4) as usize];
        let wanted = Store::read_profile(&*disk).map_err(to_text)?.0 + more;
        disk.resize(wanted).map_err(to_text)?;
        Store::resize(disk, wanted).map_err(to_text)?;
        self.resized += 1;
        Ok(())
    }

    fn shrink(&mut self, disk: Arc<BucketDisk>) -> StepResult {
        let less = [512, 4096, 1 << 20, 2 << 20][self.dice.next_below(4) as usize];
        let before = Store::read_profile(&*disk).map_err(to_text)?.0;
        let wanted = before.saturating_sub(less).max(StoreShape::BUCKET_SHAPE.disk_bytes as u64);
        Store::resize(disk.clone(), wanted).map_err(to_text)?;
        disk.resize(wanted).map_err(to_text)?;
        self.resized += 1;
        Ok(())
    }

    fn verify_keys(&mut self) -> Result<(), String> {
        let machine = Arc::new(self.server.client(Faults::default()));
        let options = options(&mut self.dice);
        let disk = BucketDisk::open_to_read(machine, "memory", &options).map_err(to_text)?;
        let disk: Arc<dyn Disk> = Arc::new(disk);
        let report = Store::check(disk.clone(), &CheckOptions::default(), &mut |_, _| {});
        let report = report.map_err(to_text)?;
        if let Some(damage) = report.damage.first() {
            return Err(format!("check: {damage}"));
        }
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let store = Store::open(disk, &options).map_err(to_text)?;
        let pairs = Kv::new(store).scan::<RangeFull>(&..).collect::<Result<Vec<_>, _>>();
        let found: BTreeMap<Vec<u8>, Vec<u8>> = pairs.map_err(to_text)?.into_iter().collect();
        if let Some(key) = found.keys().find(|key| !self.keys.contains_key(*key)) {
            return Err(format!("key {key:?} was never put"));
        }
        for (key, values) in &mut self.keys {
            let value = found.get(key).cloned();
            let Some(seen) = values.iter().rposition(|it| *it == value) else {
                return Err(format!("key {key:?} has none of its {} values", values.len()));
            };
            // A value seen once stays; late requests of a dead machine may still arrive.
            values.drain(..seen);
        }
        Ok(())
    }
}

fn options(dice: &mut Random) -> BucketOptions {
    BucketOptions {
        pause: Duration::from_micros(20),
        commit: Duration::ZERO,
        lanes: 1 + dice.next_below(6) as usize,
        token: u128::from(dice.next_u64()),
        ..BucketOptions::default()
    }
}

#[test]
fn resize_keeps_acknowledged_keys() {
    let (first, steps) = (env_number("SEED", 1), env_number("STEPS", 30));
    let (mut deaths, mut resized) = (0, 0);
    for seed in first..first + env_number("RUNS", 20) {
        let mut user = ResizeWorkload::begin(seed);
        for step in 0..steps {
            let done = user.run_step();
            done.unwrap_or_else(|why| panic!("SEED={seed} RUNS=1 STEPS={steps}: {step}: {why}"));
        }
        deaths += user.deaths;
        resized += user.resized;
    }
    println!("{deaths} deaths, {resized} times another length");
    assert!(deaths > steps && resized > steps || env_number("RUNS", 20) < 5);
}

#[test]
fn resized_disk_keeps_common_contents() {
    let server = MemoryBucket::default();
    let machine = || Arc::new(server.client(Faults::default()));
    let options = options(&mut Random::new(1));
    let disk = BucketDisk::create(machine(), "memory", 1 << 20, false, &options).unwrap();
    let read = |disk: &BucketDisk| {
        let len = disk.properties().len_bytes;
        let extent = draconis_device::Extent::new(0, len);
        let block = draconis_types::Block::private(len as usize);
        disk.read_now(extent, block).unwrap().into_private().to_vec()
    };
    let mut bytes: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 512 * 7 + 1) as u8).collect();
    let mut block = draconis_types::Block::private(1 << 20);
    block.copy_in(0, &bytes);
    let write = draconis_device::Write { at_bytes: 0, block };
    let ticket = disk.submit(draconis_device::Group { writes: vec![write] }, &[]).unwrap();
    disk.wait_durable(ticket).unwrap();
    drop(disk);
    let lens = [(1 << 20) + 512, (1 << 20) + 9 * 512, 2 << 20, (2 << 20) - 512, 1 << 19, 3 << 19];
    for len in lens {
        let disk = BucketDisk::open(machine(), "memory", &options).unwrap();
        disk.resize(len).unwrap();
        bytes.resize(bytes.len().min(len as usize), 0);
        let common = bytes.len();
        for disk in [disk, BucketDisk::open(machine(), "memory", &options).unwrap()] {
            assert!(read(&disk)[..common] == bytes[..], "{len}");
        }
        bytes.resize(len as usize, 0);
        // Data after the old end is not shown.
        let disk = BucketDisk::open_to_read(machine(), "memory", &options).unwrap();
        bytes = read(&disk);
    }
}
