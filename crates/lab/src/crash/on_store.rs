//! Volumes on a disk of a store: the disk below is cut, and recovery is the store's.
//!
//! ```text
//!   workload ── Volume ── object ── Store ── recorder ── memory
//!   a state of the memory ──▶ Store::open ──▶ object ──▶ judged as a disk that is atomic
//! ```
//! Law: the store is opened for each state as it is after a power cut, and checked where e2fsck
//! is asked, too.

use std::sync::Arc;

use anyhow::Context;
use draconis_device::{Disk, Extent, MemoryDisk};
use draconis_exchange::heap::Block;
use draconis_ext::mkfs;
use draconis_objects::check::CheckOptions;
use draconis_objects::{CreateOptions, Group, Hint, LayoutKind, OpenOptions, Profile, Store};

use super::{Shape, make};

/// What the volume's disk is called.
const NAME: &[u8] = b"volume";

/// Kinds of volumes: without a journal, with one that is not used, and with checksums.
pub(super) const KINDS: [(&str, Shape); 4] = [
    ("ext2", Shape { block_bytes: 1024, len_bytes: 4 << 20 }),
    ("ext4", Shape { block_bytes: 1024, len_bytes: 8 << 20 }),
    ("ext2", Shape { block_bytes: 4096, len_bytes: 8 << 20 }),
    ("ext4", Shape { block_bytes: 4096, len_bytes: 12 << 20 }),
];

/// A store with a fresh volume in it, and what it is.
pub(super) fn fresh(seed: u64) -> anyhow::Result<(String, Vec<u8>)> {
    let (kind, shape) = KINDS[(seed % KINDS.len() as u64) as usize];
    let options = mkfs::Options::of_type(kind).context("a type that is made")?;
    let volume = make(shape, options, seed)?;
    let layout = if (seed / 4).is_multiple_of(2) { LayoutKind::Cow } else { LayoutKind::Log };
    // Small segments and little room: they are cleaned while the workload runs.
    let profile = Profile { layout, page_bytes: 4096, segment_bytes: 64 << 10, queue_depth: 4 };
    let disk = Arc::new(MemoryDisk::new(vec![0; volume.len() * 3 / 2 + (4 << 20)], 512));
    Store::create(disk.clone(), &CreateOptions { profile, id: u128::from(seed) + 1 })?;
    let store = opened(disk.clone())?;
    let mut group = Group::new();
    let id = group.create(store.new_object(), Hint::Unknown);
    group.name(NAME, id);
    for (nth, piece) in volume.chunks(PIECE_BYTES).enumerate() {
        group.write(id, (nth * PIECE_BYTES) as u64, piece);
        store.submit(std::mem::take(&mut group), &[]).map_err(|refused| refused.error)?;
    }
    store.sync()?;
    store.checkpoint()?;
    drop(store);
    let disk = Arc::into_inner(disk).context("a store that was dropped keeps its disk")?;
    let Shape { block_bytes, .. } = shape;
    Ok((format!("{kind} -b {block_bytes} on {layout}"), disk.into_bytes()))
}

/// What is written, and read, at once.
const PIECE_BYTES: usize = 1 << 20;

fn opened(disk: Arc<dyn Disk>) -> draconis_objects::Result<Arc<Store>> {
    Store::open(disk, &OpenOptions { cache_bytes: 1 << 20, read_only: false })
}

/// The volume's disk, in a store that is opened for it.
pub(super) fn open(disk: Arc<dyn Disk>) -> Result<Arc<dyn Disk>, String> {
    let said = |error: draconis_objects::Error| format!("the store: {error}");
    let store = opened(disk).map_err(said)?;
    let id = store.named(NAME).map_err(said)?.ok_or("the volume's disk is not there")?;
    Ok(Arc::new(store.disk(id).map_err(said)?))
}

/// What is wrong with the store itself.
pub(super) fn damage(disk: Arc<dyn Disk>) -> Option<String> {
    match Store::check(disk, &CheckOptions::default(), &mut |_, _| {}) {
        Ok(report) if report.is_clean() => None,
        Ok(report) => Some(format!("the store: {:?}", report.damage)),
        Err(error) => Some(format!("the store: {error}")),
    }
}

/// All bytes of a disk.
pub(super) fn bytes_of(disk: &dyn Disk) -> anyhow::Result<Vec<u8>> {
    let mut bytes = vec![];
    let len = disk.properties().len_bytes;
    while (bytes.len() as u64) < len {
        let piece = (len - bytes.len() as u64).min(PIECE_BYTES as u64);
        let at = Extent::new(bytes.len() as u64, piece);
        let read = disk.read_now(at, Block::private(piece as usize));
        bytes.extend_from_slice(&read.map_err(|refused| refused.error)?.into_private());
    }
    Ok(bytes)
}
