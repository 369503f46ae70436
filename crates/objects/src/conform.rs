//! Conformance checks for layouts.
//!
//! ```
//! use draconis_objects::LayoutKind;
//! use draconis_objects::conform;
//!
//! conform::check_all(LayoutKind::Log);
//! ```
//!
//! A layout of another crate is registered first: see [`crate::layout::register_layout`]. A check
//! panics with the failure. Guarantees at power cuts are not checked here: no layout can break them.
use std::collections::BTreeMap;
use std::sync::Arc;

use draconis_device::{Disk, MemoryDisk, Random};

use crate::check::CheckOptions;
use crate::codec::to_usize_saturating;
use crate::kv::Kv;
use crate::layout::{PayloadKind, StoreDimensions, check_layout_sizes, construct_layout};
use crate::{
    CreateOptions, Error, Group, LayoutKind, LifetimeHint, ObjectId, OpenOptions, Profile, Store,
};

/// Name and function of a check.
pub type Check = (&'static str, fn(LayoutKind));

/// All checks.
pub const CHECKS: [Check; 4] = [
    ("its sizes fit each other", check_sizes_are_consistent),
    ("what has less alive is worth more", check_cleaning_benefit_order),
    ("a store is used for long", check_long_use),
    ("a full store is emptied", check_full_store_can_be_emptied),
];

/// Runs all checks on a layout.
///
/// # Panics
/// If a check fails.
pub fn check_all(kind: LayoutKind) {
    for (name, check) in CHECKS {
        log::debug!("conform: {name}");
        check(kind);
    }
}

#[allow(clippy::panic, reason = "a broken layout ends the test that calls this")]
fn unwrap_or_panic<T>(done: crate::Result<T>, what: &str) -> T {
    done.unwrap_or_else(|error| panic!("{what}: {error}"))
}

/// Pages of 512 bytes to 64 KiB, segments of 16 pages to 64 MiB, stores of 256 to a million
/// segments.
#[allow(clippy::panic, reason = "a broken layout ends the test that calls this")]
fn check_sizes_are_consistent(kind: LayoutKind) {
    for page_bytes in (9..=16).map(|bits| 1u32 << bits) {
        let segments = (14..=26).map(|bits| 1u32 << bits);
        for segment_bytes in segments.filter(|&len| len / 16 >= page_bytes) {
            for capacity_bytes in (8..=20).map(|bits| u64::from(segment_bytes) << bits) {
                let site = StoreDimensions { page_bytes, segment_bytes, capacity_bytes };
                let layout = unwrap_or_panic(construct_layout(kind, &site), "a layout");
                if let Err(what) = check_layout_sizes(&*layout) {
                    panic!("{what}: {site:?}");
                }
                assert_eq!(*layout.dimensions(), site, "a layout is of another site");
                let hot = PayloadKind::Written { hint: LifetimeHint::Hot, replaced_after: Some(0) };
                let cold = PayloadKind::Written { hint: LifetimeHint::Cold, replaced_after: None };
                let apart = layout.stream_of(hot, true) != layout.stream_of(cold, true);
                assert!(!apart, "a commit with a waiter waits for two places: {site:?}");
            }
        }
    }
}

fn check_cleaning_benefit_order(kind: LayoutKind) {
    let len = 1u64 << 20;
    let site =
        StoreDimensions { page_bytes: 4096, segment_bytes: 1 << 20, capacity_bytes: len << 10 };
    let layout = unwrap_or_panic(construct_layout(kind, &site), "a layout");
    for age in [1, 1 << 12, 1 << 24, 1 << 40] {
        let worths: Vec<f64> = (0..=64)
            .map(|part| layout.cleaning_benefit((len / 64).saturating_mul(part), len, age))
            .collect();
        assert!(worths.iter().all(|worth| worth.is_finite()), "a worth is no number: {worths:?}");
        let descends = worths.iter().zip(worths.iter().skip(1)).all(|(more, less)| more >= less);
        assert!(descends, "more alive is worth more, at age {age}: {worths:?}");
        assert!(
            worths.first() > worths.last(),
            "nothing alive is worth as much as all, at age {age}"
        );
    }
}

const DISK_BYTES: usize = 12 << 20;
const SEGMENT_BYTES: u32 = 64 << 10;

struct StoreUnderTest {
    disk: Arc<dyn Disk>,
    store: Arc<Store>,
    dice: Random,
    objects: BTreeMap<ObjectId, Vec<u8>>,
    values: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl StoreUnderTest {
    fn new(kind: LayoutKind) -> Self {
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(vec![0xEE; DISK_BYTES], 512));
        let profile = Profile {
            layout: kind,
            page_bytes: 4096,
            segment_bytes: SEGMENT_BYTES,
            queue_depth: 8,
        };
        unwrap_or_panic(Store::create(disk.clone(), &CreateOptions { profile, id: 7 }), "create");
        let store = unwrap_or_panic(Self::open(&disk), "open");
        let (objects, values) = (BTreeMap::new(), BTreeMap::new());
        Self { disk, store, dice: Random::new(5), objects, values }
    }

    fn open(disk: &Arc<dyn Disk>) -> crate::Result<Arc<Store>> {
        Store::open(disk.clone(), &OpenOptions { cache_bytes: 256 << 10, read_only: false })
    }

    fn random_index(&mut self, end: u64) -> usize {
        to_usize_saturating(self.dice.next_below(end))
    }

    fn random_bytes(&mut self, most: u64) -> Vec<u8> {
        let mut bytes = vec![0; self.random_index(most).saturating_add(1)];
        self.dice.fill(&mut bytes);
        bytes
    }

    /// Creates, changes or deletes an object, as one group; returns true if there was space.
    fn change_random_object(&mut self, is_growing: bool) -> bool {
        let mut group = Group::new();
        let any = self.random_index(self.objects.len().max(1) as u64);
        let old = self.objects.keys().nth(any).copied();
        let done = match (old, self.dice.next_below(6)) {
            (Some(id), 0) if !is_growing => {
                group.delete(id);
                (id, None)
            }
            (Some(id), 1..) if !is_growing || self.dice.next_below(2) == 0 => {
                let at = self.random_index(20_000);
                let part = self.random_bytes(9000);
                group.write(id, at as u64, &part);
                let mut bytes = self.objects.get(&id).cloned().unwrap_or_default();
                let end = at.saturating_add(part.len());
                bytes.resize(bytes.len().max(end), 0);
                if let Some(into) = bytes.get_mut(at..end) {
                    into.copy_from_slice(&part);
                }
                (id, Some(bytes))
            }
            _ => {
                let hint = match self.dice.next_below(3) {
                    0 => LifetimeHint::Unknown,
                    1 => LifetimeHint::Hot,
                    _ => LifetimeHint::Cold,
                };
                let id = group.create(self.store.new_object(), hint);
                let bytes = self.random_bytes(60_000);
                group.append(id, &bytes);
                (id, Some(bytes))
            }
        };
        match self.store.submit(group, &[]).map_err(|refused| refused.error) {
            Ok(ticket) => {
                if self.dice.next_below(20) == 0 {
                    unwrap_or_panic(self.store.wait(ticket), "wait");
                }
                match done {
                    (id, Some(bytes)) => self.objects.insert(id, bytes),
                    (id, None) => self.objects.remove(&id),
                };
                true
            }
            Err(Error::NoSpace { .. }) => false,
            Err(error) => unwrap_or_panic(Err(error), "submit"),
        }
    }

    fn put_value(&mut self) {
        let key = self.dice.next_below(400).to_be_bytes().to_vec();
        let value = self.random_bytes(300);
        match Kv::new(self.store.clone()).put(&key, &value) {
            Ok(_) => drop(self.values.insert(key, value)),
            Err(Error::NoSpace { .. }) => {}
            Err(error) => unwrap_or_panic(Err(error), "put"),
        }
    }

    /// Reads all, checks the store, and opens it again.
    fn verify_and_reopen(&mut self) {
        unwrap_or_panic(self.store.sync(), "sync");
        for (id, bytes) in &self.objects {
            let mut have = vec![0; bytes.len().saturating_add(1)];
            let len = unwrap_or_panic(self.store.read(*id, 0, &mut have), "read");
            assert!(have.get(..len) == Some(&bytes[..]), "object {id} has other bytes");
        }
        let kv = Kv::new(self.store.clone());
        for (key, value) in &self.values {
            let have = unwrap_or_panic(kv.get(key), "get");
            assert!(have.as_ref() == Some(value), "a key has another value");
        }
        let report = Store::check(self.disk.clone(), &CheckOptions::default(), &mut |_, _| {});
        let report = unwrap_or_panic(report, "check");
        assert!(report.is_clean(), "{:?}", report.damage);
    }

    fn reopen(self) -> Self {
        let Self { disk, store, .. } = self;
        drop(store);
        let store = unwrap_or_panic(Self::open(&disk), "open again");
        Self { disk, store, ..self }
    }
}

/// Writes far more than the capacity, so that segments are cleaned.
fn check_long_use(kind: LayoutKind) {
    let mut used = StoreUnderTest::new(kind);
    let mut cleaned = 0u64;
    for _ in 0..6 {
        for _ in 0..600 {
            used.change_random_object(used.objects.len() < 60);
            used.put_value();
        }
        used.verify_and_reopen();
        cleaned = cleaned.saturating_add(used.store.info().counters.cleaned);
        used = used.reopen();
        used.verify_and_reopen();
    }
    assert!(cleaned > 0, "no segment was cleaned");
}

fn check_full_store_can_be_emptied(kind: LayoutKind) {
    let mut used = StoreUnderTest::new(kind);
    for _ in 0..2 {
        while used.change_random_object(true) {}
        used.verify_and_reopen();
        used = used.reopen();
        while let Some((&id, _)) = used.objects.iter().next() {
            let mut group = Group::new();
            group.delete(id);
            let done = used.store.submit(group, &[]).map_err(|refused| refused.error);
            unwrap_or_panic(done, "deleting on a full store");
            used.objects.remove(&id);
        }
        (0..3).for_each(|_| unwrap_or_panic(used.store.checkpoint(), "checkpoint"));
        let held = used.store.info().used_bytes;
        assert!(held < u64::from(SEGMENT_BYTES) * 4, "{held} bytes are held of nothing");
    }
    used.verify_and_reopen();
}
