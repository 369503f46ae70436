//! Changes of whole volumes in memory: shrink, grow, tune.

use std::sync::Arc;

use draconis_device::{Disk, MemoryDisk};
use draconis_ext::grow::{GrowPlan, GrowTarget};
use draconis_ext::shrink::{ShrinkPlan, ShrinkTarget};
use draconis_ext::tune::{OfflineError, TuneChanges, tune};

use crate::common::repairing::NOW;

/// Returns a disk in memory.
pub fn disk_of(bytes: &[u8]) -> Arc<dyn Disk> {
    Arc::new(MemoryDisk::new(bytes.to_vec(), 512))
}

/// Runs `change` on a disk in memory; returns its result, and the bytes after it.
pub fn with_disk<T>(bytes: Vec<u8>, change: impl FnOnce(&Arc<dyn Disk>) -> T) -> (T, Vec<u8>) {
    let memory = Arc::new(MemoryDisk::new(bytes, 512));
    let disk: Arc<dyn Disk> = memory.clone();
    let done = change(&disk);
    drop(disk);
    (done, Arc::into_inner(memory).unwrap().into_bytes())
}

/// A change of the volume on a disk.
pub type OfflineChange = fn(&Arc<dyn Disk>) -> Result<(), OfflineError>;

/// Changes that move blocks and inodes, reuse free ones, or rewrite what is in use.
pub const OFFLINE_CHANGES: &[(&str, OfflineChange)] = &[
    ("shrink", |disk| {
        let target = ShrinkTarget { disk: &**disk, now: NOW, progress: &|_| () };
        ShrinkPlan::plan(disk, None)?.write(&target)
    }),
    ("grow", |disk| {
        let (zeroed_from_bytes, progress) = (u64::MAX, &|_| ());
        let target = GrowTarget { disk: &**disk, zeroed_from_bytes, now: NOW, progress };
        GrowPlan::plan(disk, disk.properties().len_bytes)?.write(&target)
    }),
    ("tune, UUID", |disk| {
        tune(disk, &TuneChanges { uuid: Some([7; 16]), ..TuneChanges::default() }, NOW)
    }),
    ("tune, ^has_journal", |disk| tune_feature(disk, "^has_journal")),
    ("tune, orphan_file", |disk| tune_feature(disk, "orphan_file")),
    ("tune, quota", |disk| tune_feature(disk, "quota")),
    ("tune, ^resize_inode", |disk| tune_feature(disk, "^resize_inode")),
];

fn tune_feature(disk: &Arc<dyn Disk>, feature: &str) -> Result<(), OfflineError> {
    let features = vec![feature.to_owned()];
    tune(disk, &TuneChanges { features, ..TuneChanges::default() }, NOW)
}
