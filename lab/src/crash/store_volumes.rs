//! Volumes on a store disk: power cuts affect the disk below; recovery is the store's.
//!
//! ```text
//!   workload ── Volume ── object ── Store ── recorder ── memory
//!   a state of the memory ──▶ Store::open ──▶ object ──▶ judged as a disk that is atomic
//! ```
//! While the workload runs, snapshots of the disk are taken, cloned and removed between its chains
//! of writes, and clones are rolled back.
//!
//! Law: the store is opened for each crash state, and checked whenever e2fsck runs,
//! too.

use std::sync::Arc;

use anyhow::Context;
use draconis_device::{
    Disk, Error as DiskError, Extent, Group as DiskGroup, MemoryDisk, Random, Refused,
    SubmitOptions, Ticket,
};
use draconis_ext::mkfs;
use draconis_objects::check::CheckOptions;
use draconis_objects::{
    CreateOptions, Error, Group, LayoutKind, LifetimeHint, ObjectDisk, OpenOptions, Profile, Store,
};
use draconis_types::Block;
use draconis_types::lock::Mutex;

use super::{VolumeConfig, make_image};

/// Name of the volume's disk.
const DISK_NAME: &[u8] = b"volume";

/// Volumes: without a journal, with an unused journal, and with checksums.
pub(super) const VOLUME_KINDS: [(&str, VolumeConfig); 4] = [
    ("ext2", VolumeConfig { block_bytes: 1024, len_bytes: 4 << 20 }),
    ("ext4", VolumeConfig { block_bytes: 1024, len_bytes: 8 << 20 }),
    ("ext2", VolumeConfig { block_bytes: 4096, len_bytes: 8 << 20 }),
    ("ext4", VolumeConfig { block_bytes: 4096, len_bytes: 12 << 20 }),
];

/// Creates a store with a volume in it; returns its description and the image.
pub(super) fn create_store_image(seed: u64) -> anyhow::Result<(String, Vec<u8>)> {
    let (kind, shape) = VOLUME_KINDS[(seed % VOLUME_KINDS.len() as u64) as usize];
    let options = mkfs::FormatOptions::for_type(kind).context("a type that is made")?;
    let volume = make_image(shape, options, seed)?;
    let layout = if (seed / 4).is_multiple_of(2) { LayoutKind::Cow } else { LayoutKind::Log };
    // Small segments and little free space, so that the workload triggers cleaning.
    let profile = Profile { layout, page_bytes: 4096, segment_bytes: 64 << 10, queue_depth: 4 };
    let disk = Arc::new(MemoryDisk::new(vec![0; volume.len() * 2 + (4 << 20)], 512));
    Store::create(disk.clone(), &CreateOptions { profile, id: u128::from(seed) + 1 })?;
    let store = open_store(disk.clone())?;
    let mut group = Group::new();
    let id = group.create(store.new_object(), LifetimeHint::Unknown);
    group.set_name(DISK_NAME, id);
    for (nth, piece) in volume.chunks(PIECE_BYTES).enumerate() {
        group.write(id, (nth * PIECE_BYTES) as u64, piece);
        store.submit(std::mem::take(&mut group), &[]).map_err(|refused| refused.error)?;
    }
    store.sync()?;
    store.checkpoint()?;
    drop(store);
    let disk = Arc::into_inner(disk).context("a store that was dropped keeps its disk")?;
    let VolumeConfig { block_bytes, .. } = shape;
    Ok((format!("{kind} -b {block_bytes} on {layout}"), disk.into_bytes()))
}

/// Size of one read or write, in bytes.
const PIECE_BYTES: usize = 1 << 20;

fn open_store(disk: Arc<dyn Disk>) -> draconis_objects::Result<Arc<Store>> {
    Store::open(disk, &OpenOptions { cache_bytes: 1 << 20, read_only: false })
}

/// Opens the store and the volume's disk.
pub(super) fn open(disk: Arc<dyn Disk>) -> Result<Arc<dyn Disk>, String> {
    let describe = |error: draconis_objects::Error| format!("the store: {error}");
    let store = open_store(disk).map_err(describe)?;
    let id = store
        .find_named_object(DISK_NAME)
        .map_err(describe)?
        .ok_or("the volume's disk is not there")?;
    Ok(Arc::new(store.disk(id).map_err(describe)?))
}

/// Opens the store and a disk that takes, clones, rolls back and removes snapshots between its
/// write chains.
pub(super) fn open_with_snapshots(disk: Arc<dyn Disk>, seed: u64) -> Result<Arc<dyn Disk>, String> {
    let describe = |error: draconis_objects::Error| format!("the store: {error}");
    let store = open_store(disk).map_err(describe)?;
    let disk = store.disk_named(DISK_NAME).map_err(describe)?;
    let state = Mutex::new(SnapshotState { dice: Random::new(seed ^ 0x5A9), chains: 0 });
    Ok(Arc::new(SnapshottingDisk { disk, store, state }))
}

/// A disk whose snapshots change between its write chains.
struct SnapshottingDisk {
    disk: ObjectDisk,
    store: Arc<Store>,
    state: Mutex<SnapshotState>,
}

struct SnapshotState {
    dice: Random,
    chains: u64,
}

/// Maximum number of snapshots and clones at a time.
const MAX_SNAPSHOTS: usize = 4;

impl SnapshottingDisk {
    /// Takes, clones, rolls back or removes a snapshot at random.
    fn change_snapshots(&self) -> draconis_objects::Result<()> {
        let mut state = self.state.lock();
        state.chains += 1;
        if !state.dice.once_in(30) {
            return Ok(());
        }
        let new = format!("n{}", state.chains);
        let disks = self.store.list_disks()?;
        let all: Vec<Vec<u8>> = disks.into_iter().map(|disk| disk.name).collect();
        let others: Vec<&Vec<u8>> = all.iter().filter(|name| *name != DISK_NAME).collect();
        let any = others.get(state.dice.next_below(others.len().max(1) as u64) as usize);
        let done = match (any, state.dice.next_below(4)) {
            (Some(any), 0) if others.len() < MAX_SNAPSHOTS => {
                self.store.clone_disk(any, new.as_bytes())
            }
            // The open disk cannot be rolled back, so a clone is.
            (Some(any), 1) if others.len() < MAX_SNAPSHOTS => (self.store)
                .clone_disk(any, new.as_bytes())
                .and_then(|()| self.store.take_snapshot(new.as_bytes(), b"begin"))
                .and_then(|()| self.store.roll_back(new.as_bytes(), b"begin")),
            (Some(any), _) if others.len() >= MAX_SNAPSHOTS => self.store.remove_disk(any, true),
            _ => self.store.take_snapshot(DISK_NAME, new.as_bytes()),
        };
        match done {
            // Snapshots with clones cannot be removed, and a full store accepts nothing.
            Err(Error::Disk(_) | Error::NoSpace { .. }) => Ok(()),
            done => done,
        }
    }
}

impl draconis_device::ForwardingDisk for SnapshottingDisk {
    type Inner = ObjectDisk;

    fn inner_disk(&self) -> &ObjectDisk {
        &self.disk
    }

    fn submit_with(
        &self,
        chain: Vec<DiskGroup>,
        after: &[Ticket],
        terms: SubmitOptions,
    ) -> Result<Vec<Ticket>, Refused<Vec<DiskGroup>>> {
        if let Err(error) = self.change_snapshots() {
            let error = DiskError::Remote(format!("snapshots: {error}").into());
            return Err(Refused { payload: Some(chain), error });
        }
        self.inner_disk().submit_with(chain, after, terms)
    }
}

/// Returns all disks and snapshots of the store other than the volume's disk.
pub(super) fn open_other_disks(disk: Arc<dyn Disk>) -> Result<Vec<Arc<dyn Disk>>, String> {
    let describe = |error: draconis_objects::Error| format!("the store: {error}");
    let store = open_store(disk).map_err(describe)?;
    let mut clones: Vec<Arc<dyn Disk>> = vec![];
    for disk in store.list_disks().map_err(describe)?.iter().filter(|disk| disk.name != DISK_NAME) {
        if !disk.name.contains(&b'@') {
            clones.push(Arc::new(store.disk_named(&disk.name).map_err(describe)?));
            continue;
        }
        let name = format!("judged{}", disk.id);
        match store.clone_disk(&disk.name, name.as_bytes()) {
            Ok(()) => clones.push(Arc::new(store.disk_named(name.as_bytes()).map_err(describe)?)),
            Err(Error::NoSpace { .. }) => {}
            Err(error) => return Err(describe(error)),
        }
    }
    Ok(clones)
}

/// Returns the damage of the store itself.
pub(super) fn find_store_damage(disk: Arc<dyn Disk>) -> Option<String> {
    match Store::check(disk, &CheckOptions::default(), &mut |_, _| {}) {
        Ok(report) if report.is_clean() => None,
        Ok(report) => Some(format!("the store: {:?}", report.damage)),
        Err(error) => Some(format!("the store: {error}")),
    }
}

/// Reads all bytes of a disk.
pub(super) fn read_disk(disk: &dyn Disk) -> anyhow::Result<Vec<u8>> {
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
