//! Store guarantees on buckets that delay, refuse, lose answers and act late, with clients that die
//! at any request. `SEED` and `RUNS` in the environment make it longer.

use std::sync::Arc;
use std::time::Duration;

use draconis_bucket::{BucketDisk, BucketOptions, Faults, MemoryBucket};
use draconis_device::Error;
use draconis_objects::torture::{self, DamageTally, DiskFactory, Random, Settings, Shape};

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(otherwise)
}

/// A bucket and its clients, one after the other.
struct Machines {
    server: MemoryBucket,
    now: Arc<MemoryBucket>,
    dice: Random,
    /// Number of further deaths.
    dying: u64,
}

impl Machines {
    fn faults(&mut self, dies_within: Option<u64>) -> Faults {
        let mut rate = || [0, 6, 12, 40][self.dice.below(4) as usize];
        let (refused, lost, late, slow) = (rate(), rate(), rate(), rate());
        let dies_after = dies_within.map(|most| self.dice.below(most));
        Faults { seed: self.dice.next_u64(), refused, lost, late, slow, dies_after }
    }

    fn options(&mut self) -> BucketOptions {
        BucketOptions {
            pause: Duration::from_micros(20),
            commit: Duration::from_micros(self.dice.below(2) * 100),
            lanes: 1 + self.dice.below(6) as usize,
            token: u128::from(self.dice.next_u64()),
            ..BucketOptions::default()
        }
    }

    fn next(&mut self, dies_within: Option<u64>) -> Arc<MemoryBucket> {
        let faults = self.faults(dies_within);
        self.now = Arc::new(self.server.client(faults));
        self.now.clone()
    }
}

impl DiskFactory for Machines {
    type Disk = BucketDisk;

    fn first(&mut self) -> BucketDisk {
        let len_bytes = Shape::BUCKET.disk_bytes as u64;
        let options = self.options();
        BucketDisk::create(self.now.clone(), "memory", len_bytes, false, &options).unwrap()
    }

    fn begins(&mut self) {
        let faults = self.faults(Some(400));
        self.now.set(faults);
    }

    fn again(&mut self) -> Option<Result<BucketDisk, Error>> {
        self.dying = self.dying.checked_sub(1)?;
        let (machine, options) = (self.next(Some(60)), self.options());
        Some(BucketDisk::open(machine, "memory", &options))
    }

    fn reader(&mut self) -> Result<BucketDisk, Error> {
        let (machine, options) = (self.next(None), self.options());
        BucketDisk::open_to_read(machine, "memory", &options)
    }

    fn last(&mut self) -> Result<BucketDisk, Error> {
        let (machine, options) = (self.next(None), self.options());
        BucketDisk::open(machine, "memory", &options)
    }
}

#[test]
fn machines_that_die() {
    let first = number("SEED", 1);
    let mut all = DamageTally::default();
    for seed in first..first + number("RUNS", 60) {
        let mut dice = Random::new(seed);
        let shape = Shape::BUCKET;
        let script = match seed % 3 {
            0 => torture::random_large(seed, shape, 60),
            _ => torture::random(seed, shape, 120),
        };
        let server = MemoryBucket::default();
        let now = Arc::new(server.client(Faults::default()));
        let mut machines = Machines { server, now, dying: dice.below(4), dice };
        match torture::ended(shape, &script, Settings::USUAL, &mut machines) {
            Ok(harm) => all += harm,
            Err(violation) => panic!("SEED={seed} RUNS=1: {violation}"),
        }
    }
    println!("{all:?}");
    // A campaign without deaths tests nothing.
    assert!(all.disks > all.refused && all.refused > 0 || number("RUNS", 60) < 20);
}
