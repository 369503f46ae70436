//! Arbitrary bytes as a store: nothing panics, spins or takes much memory.

use std::ops::RangeFull;
use std::sync::Arc;

use draconis_device::{Disk, MemoryDisk};

use super::stores::SMALL_CACHE_OPTIONS;
use super::{Random, RecordedRun, StoreShape, TestSettings, Violation, random, record_script};
use draconis_objects::check::CheckOptions;
use draconis_objects::kv::{Kv, Scan};
use draconis_objects::{
    CreateOptions, Error, Group, LifetimeHint, OpenOptions, SalvageOptions, Store,
};

/// Most items of each kind to read; a damaged store may claim to have many.
const MAX_ITEMS_READ: usize = 2000;
/// Bytes of one read.
const READ_CHUNK_BYTES: usize = 64 << 10;

/// Returns a store after random changes, as a base for hostile images.
///
/// # Errors
/// A violation by the store.
pub fn base_image(seed: u64) -> Result<Vec<u8>, Violation> {
    let shape = StoreShape::ALL[(seed % 4) as usize];
    let RecordedRun { last_image, .. } =
        record_script(shape, &random(seed, shape, 100), TestSettings::NORMAL)?;
    Ok(last_image)
}

/// Changes some bytes of an image that are in use.
pub fn corrupt_image(image: &mut [u8], dice: &mut Random) {
    for _ in 0..1 + dice.next_below(8) {
        // Most structures begin at a page, or close to it.
        let mut at = dice.next_below(image.len() as u64) as usize;
        for _ in 0..50 {
            if image[at] != 0xEE && image[at] != 0 {
                break;
            }
            at = dice.next_below(image.len() as u64) as usize;
        }
        if dice.once_in(3) {
            at = at / 512 * 512 + dice.next_below(72) as usize;
        }
        match dice.next_below(4) {
            0 => image[at] ^= 1 << dice.next_below(8),
            1 => image[at] = [0, 1, 0x7F, 0x80, 0xFF][dice.next_below(5) as usize],
            2 => {
                let value =
                    [0, 1, u64::MAX, 1 << 63, u64::from(u32::MAX)][dice.next_below(5) as usize];
                let end = (at + 8).min(image.len());
                image[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
            }
            _ => {
                let from = dice.next_below(image.len() as u64) as usize;
                let len = (1 + dice.next_below(600) as usize).min(image.len() - at.max(from));
                image.copy_within(from..from + len, at);
            }
        }
    }
}

/// Makes an image of a fuzzer's bytes: changes of one of `bases`, or the bytes themselves.
///
/// ```text
///   | which | place (3 bytes) len - 1 bytes.. | place len - 1 bytes.. | ..
/// ```
pub fn image_from_fuzz_input(bases: &[Vec<u8>], bytes: &[u8]) -> Option<Vec<u8>> {
    let (&which, mut rest) = bytes.split_first()?;
    if which & 0x80 != 0 {
        let mut image = rest.to_vec();
        image.resize(1 << 20, 0);
        return Some(image);
    }
    let mut image = bases[usize::from(which & 7) % bases.len()].clone();
    while let [a, b, c, len, more @ ..] = rest {
        let at = usize::from(*a) | usize::from(*b) << 8 | usize::from(*c) << 16;
        let (now, then) = more.split_at((usize::from(*len) + 1).min(more.len()));
        for (nth, byte) in now.iter().enumerate() {
            let at = (at + nth) % image.len();
            image[at] = *byte;
        }
        rest = then;
    }
    Some(image)
}

/// Opens, reads and changes a disk with these bytes. Returns the number of readable items.
///
/// # Errors
/// The error of opening it.
pub fn exercise_image(image: Vec<u8>) -> Result<u64, Error> {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(image, 512));
    let store = Store::open(disk.clone(), &OpenOptions { read_only: true, ..SMALL_CACHE_OPTIONS })?;
    let mut seen = read_everything(&store);
    drop(store);
    let store = Store::open(disk.clone(), &SMALL_CACHE_OPTIONS)?;
    seen += change_store(&store).unwrap_or(0);
    drop(store);
    let store = Store::open(disk, &SMALL_CACHE_OPTIONS)?;
    Ok(seen + read_everything(&store))
}

/// Salvages a disk with these bytes to one of twice the length: it may be full. Returns the number of readable items; the new store must be
/// clean.
///
/// # Errors
/// The error of the salvage, or of creating a store for it.
///
/// # Panics
/// If the new store is damaged.
pub fn salvage_image(image: Vec<u8>) -> Result<u64, Error> {
    let old: Arc<dyn Disk> = Arc::new(MemoryDisk::new(image, 512));
    let (len, profile) = Store::profile_for_salvage(&*old)?;
    let new: Arc<dyn Disk> = Arc::new(MemoryDisk::new(vec![0; 2 * len as usize], 512));
    Store::create(new.clone(), &CreateOptions { profile, id: 1 })?;
    let store = Store::open(new.clone(), &SMALL_CACHE_OPTIONS)?;
    store.salvage_with(
        old,
        &SalvageOptions { memory_bytes: 1 << 20, unsure: true },
        &mut |_, _| (),
    )?;
    let seen = read_everything(&store);
    drop(store);
    let report = Store::check(new, &CheckOptions::default(), &mut |_, _| ())?;
    assert!(report.is_clean(), "{report:?}");
    Ok(seen)
}

fn read_everything(store: &Arc<Store>) -> u64 {
    let mut seen = 0;
    let mut bytes = vec![0; READ_CHUNK_BYTES];
    for (id, len) in store.list().unwrap_or_default().into_iter().take(MAX_ITEMS_READ) {
        for at in [0, len.saturating_sub(READ_CHUNK_BYTES as u64 / 2), len / 2] {
            seen += u64::from(store.read(id, at, &mut bytes).is_ok());
        }
    }
    let kv = Kv::new(store.clone());
    let values = |scan: Scan| scan.take(MAX_ITEMS_READ).filter(Result::is_ok).count() as u64;
    seen += values(kv.scan::<RangeFull>(&..));
    seen +=
        kv.scan::<RangeFull>(&..).rev().take(MAX_ITEMS_READ).filter(Result::is_ok).count() as u64;
    let _ = store.info();
    seen
}

fn change_store(store: &Arc<Store>) -> Result<u64, Error> {
    let mut group = Group::new();
    let id = group.create(store.new_object(), LifetimeHint::Unknown);
    group.append(id, &[7; 3000]);
    group.put(b"key 0001", &[8; 90]);
    group.remove(b"key 0002");
    if let Some((old, _)) = store.list()?.first() {
        group.truncate(*old, 10);
    }
    let ticket = store.submit(group, &[]).map_err(|refused| refused.error)?;
    store.wait(ticket)?;
    store.checkpoint()?;
    for (id, _) in store.list()?.into_iter().take(20) {
        let mut group = Group::new();
        group.delete(id);
        store.submit(group, &[]).map_err(|refused| refused.error)?;
    }
    store.checkpoint()?;
    Ok(1)
}
