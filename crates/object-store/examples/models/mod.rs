//! A store and an ext4 on modelled devices, whose time is virtual: figures do not depend on the
//! machine.

use std::sync::Arc;

use draconis_device::{Disk, Extent};
use draconis_ext::FileSystem;
use draconis_ext::mkfs::FormatOptions;
use draconis_objects::{CreateOptions, OpenOptions, Store, probe};
use draconis_testkit::sim::{Clock, DeviceTiming, Hdd, HddParameters, SimDisk, Ssd, SsdParameters};

const DISK_BYTES: u64 = 4 << 30;
const FLASH_BYTES: u64 = 1 << 30;
const PROBE_BYTES: u64 = 64 << 20;

/// A disk of 7,200 turns a minute with its write cache on; flash that was written full before.
pub const DEVICES: [&str; 2] = ["disk", "flash"];

/// Returns a device, and its clock.
pub fn device(name: &str) -> (Arc<SimDisk>, Clock) {
    let clock = Clock::new();
    let timing: Box<dyn DeviceTiming> = match name {
        "disk" => Box::new(Hdd::new(HddParameters::desktop_7200(DISK_BYTES))),
        _ => Box::new(Ssd::preconditioned(SsdParameters::p3700(FLASH_BYTES))),
    };
    (SimDisk::from_boxed_timing(timing, &clock), clock)
}

/// Creates a store, with the profile that measuring the device gives.
pub fn new_store(disk: Arc<SimDisk>) -> Arc<Store> {
    let measured = disk.fork();
    let clock = measured.clock().clone();
    let region = Extent::new(0, PROBE_BYTES);
    let found = probe::probe(&*measured, &|| clock.now_ns(), region, 0, &mut |_, _| {}).unwrap();
    let (profile, _) = found.profile(disk.properties().len_bytes);
    eprintln!("the store's profile: {profile:?}");
    Store::create(disk.clone(), &CreateOptions { profile, id: 1 }).unwrap();
    Store::open(disk, &OpenOptions::default()).unwrap()
}

/// Creates an ext4 with a journal, read and written by our own driver.
pub fn new_ext4(disk: Arc<SimDisk>) -> FileSystem {
    FileSystem::create_on(disk, &FormatOptions::default(), true).unwrap()
}

/// Writes the contents of a file and its inode to the device.
pub fn sync(volume: &FileSystem, name: &str) {
    let volume = volume.volume();
    let inode = match name {
        "" => volume.root(),
        name => volume.lookup(volume.root(), name.as_bytes()).unwrap(),
    };
    volume.sync_inode(inode, false).unwrap();
}
