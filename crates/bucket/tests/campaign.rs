//! Store guarantees on buckets that delay, refuse, lose answers and act late, with clients that die
//! at any request. `SEED` and `RUNS` in the environment make it longer.

use std::sync::Arc;
use std::time::Duration;

use draconis_bucket::{BucketDisk, BucketOptions, Faults, MemoryBucket};
use draconis_device::Error;
use draconis_device::Random;
use draconis_objects::test_hooks::TestSettings;
use draconis_testkit::torture::{self, DamageTally, DiskFactory, StoreShape};

fn env_number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(otherwise)
}

/// A bucket and its clients, one after the other.
struct MachineSequence {
    server: MemoryBucket,
    now: Arc<MemoryBucket>,
    dice: Random,
    /// Number of further deaths.
    dying: u64,
}

impl MachineSequence {
    fn faults(&mut self, dies_within: Option<u64>) -> Faults {
        let mut rate = || [0, 6, 12, 40][self.dice.next_below(4) as usize];
        let (refused, lost, late, slow) = (rate(), rate(), rate(), rate());
        let dies_after = dies_within.map(|most| self.dice.next_below(most));
        Faults { seed: self.dice.next_u64(), refused, lost, late, slow, dies_after }
    }

    fn options(&mut self) -> BucketOptions {
        BucketOptions {
            pause: Duration::from_micros(20),
            commit: Duration::from_micros(self.dice.next_below(2) * 100),
            lanes: 1 + self.dice.next_below(6) as usize,
            token: u128::from(self.dice.next_u64()),
            ..BucketOptions::default()
        }
    }

    fn next_client(&mut self, dies_within: Option<u64>) -> Arc<MemoryBucket> {
        let faults = self.faults(dies_within);
        self.now = Arc::new(self.server.client(faults));
        self.now.clone()
    }
}

impl DiskFactory for MachineSequence {
    type Disk = BucketDisk;

    fn create_disk(&mut self) -> BucketDisk {
        let len_bytes = StoreShape::BUCKET_SHAPE.disk_bytes as u64;
        let options = self.options();
        BucketDisk::create(self.now.clone(), "memory", len_bytes, false, &options).unwrap()
    }

    fn begin_faults(&mut self) {
        let faults = self.faults(Some(400));
        self.now.set_faults(faults);
    }

    fn reopen(&mut self) -> Option<Result<BucketDisk, Error>> {
        self.dying = self.dying.checked_sub(1)?;
        let (machine, options) = (self.next_client(Some(60)), self.options());
        Some(BucketDisk::open(machine, "memory", &options))
    }

    fn open_reader(&mut self) -> Result<BucketDisk, Error> {
        let (machine, options) = (self.next_client(None), self.options());
        BucketDisk::open_to_read(machine, "memory", &options)
    }

    fn open_last(&mut self) -> Result<BucketDisk, Error> {
        let (machine, options) = (self.next_client(None), self.options());
        BucketDisk::open(machine, "memory", &options)
    }
}

#[test]
fn crashed_machines_keep_durable_groups() {
    let first = env_number("SEED", 1);
    let mut all = DamageTally::default();
    for seed in first..first + env_number("RUNS", 60) {
        let mut dice = Random::new(seed);
        let shape = StoreShape::BUCKET_SHAPE;
        let script = match seed % 3 {
            0 => torture::random_large(seed, shape, 60),
            _ => torture::random(seed, shape, 120),
        };
        let server = MemoryBucket::default();
        let now = Arc::new(server.client(Faults::default()));
        let mut machines = MachineSequence { server, now, dying: dice.next_below(4), dice };
        match torture::run_until_disk_loss(shape, &script, TestSettings::NORMAL, &mut machines) {
            Ok(harm) => all += harm,
            Err(violation) => panic!("SEED={seed} RUNS=1: {violation}"),
        }
    }
    println!("{all:?}");
    // A campaign without deaths tests nothing.
    assert!(all.disks > all.refused && all.refused > 0 || env_number("RUNS", 60) < 20);
}
