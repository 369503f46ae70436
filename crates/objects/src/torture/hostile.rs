//! Arbitrary bytes as a store: nothing panics, spins or takes much memory.

use std::ops::RangeFull;
use std::sync::Arc;

use draconis_device::{Disk, MemoryDisk};

use super::stores::SMALL;
use super::{Random, Recorded, Settings, Shape, Violation, random, record};
use crate::kv::{Kv, Scan};
use crate::{Error, Group, Hint, OpenOptions, Store};

/// Most items of each kind to read; a damaged store may claim to have many.
const MANY: usize = 2000;
/// Bytes of one read.
const PIECE: usize = 64 << 10;

/// Returns a store after random changes, as a base for hostile images.
///
/// # Errors
/// A violation by the store.
pub fn base(seed: u64) -> Result<Vec<u8>, Violation> {
    let shape = Shape::ALL[(seed % 4) as usize];
    let Recorded { last_image, .. } = record(shape, &random(seed, shape, 100), Settings::USUAL)?;
    Ok(last_image)
}

/// Changes some bytes of an image that are in use.
pub fn spoil(image: &mut [u8], dice: &mut Random) {
    for _ in 0..1 + dice.below(8) {
        // Most structures begin at a page, or close to it.
        let mut at = dice.below(image.len() as u64) as usize;
        for _ in 0..50 {
            if image[at] != 0xEE && image[at] != 0 {
                break;
            }
            at = dice.below(image.len() as u64) as usize;
        }
        if dice.once_in(3) {
            at = at / 512 * 512 + dice.below(72) as usize;
        }
        match dice.below(4) {
            0 => image[at] ^= 1 << dice.below(8),
            1 => image[at] = [0, 1, 0x7F, 0x80, 0xFF][dice.below(5) as usize],
            2 => {
                let value = [0, 1, u64::MAX, 1 << 63, u64::from(u32::MAX)][dice.below(5) as usize];
                let end = (at + 8).min(image.len());
                image[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
            }
            _ => {
                let from = dice.below(image.len() as u64) as usize;
                let len = (1 + dice.below(600) as usize).min(image.len() - at.max(from));
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
pub fn altered(bases: &[Vec<u8>], bytes: &[u8]) -> Option<Vec<u8>> {
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
pub fn exercise(image: Vec<u8>) -> Result<u64, Error> {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(image, 512));
    let store = Store::open(disk.clone(), &OpenOptions { read_only: true, ..SMALL })?;
    let mut seen = look(&store);
    drop(store);
    let store = Store::open(disk.clone(), &SMALL)?;
    seen += change(&store).unwrap_or(0);
    drop(store);
    let store = Store::open(disk, &SMALL)?;
    Ok(seen + look(&store))
}

fn look(store: &Arc<Store>) -> u64 {
    let mut seen = 0;
    let mut bytes = vec![0; PIECE];
    for (id, len) in store.list().unwrap_or_default().into_iter().take(MANY) {
        for at in [0, len.saturating_sub(PIECE as u64 / 2), len / 2] {
            seen += u64::from(store.read(id, at, &mut bytes).is_ok());
        }
    }
    let kv = Kv::new(store.clone());
    let values = |scan: Scan| scan.take(MANY).filter(Result::is_ok).count() as u64;
    seen += values(kv.scan::<RangeFull>(&..));
    seen += kv.scan::<RangeFull>(&..).rev().take(MANY).filter(Result::is_ok).count() as u64;
    let _ = store.info();
    seen
}

fn change(store: &Arc<Store>) -> Result<u64, Error> {
    let mut group = Group::new();
    let id = group.create(store.new_object(), Hint::Unknown);
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
