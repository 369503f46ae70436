//! Reads an object through a snapshot after the object was changed and deleted.
//!
//! `cargo run -p draconis-objects --example snapshot`

use std::sync::Arc;

use draconis_device::MemoryDisk;
use draconis_objects::{
    CreateOptions, Error, Group, LayoutKind, LifetimeHint, OpenOptions, Profile, Store,
};

/// Runs the example.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let disk = Arc::new(MemoryDisk::new(vec![0; 16 << 20], 512));
    let layout = LayoutKind::Log;
    let profile = Profile { layout, page_bytes: 4096, segment_bytes: 256 << 10, queue_depth: 8 };
    Store::create(disk.clone(), &CreateOptions { profile, id: 1 })?;
    let store = Store::open(disk, &OpenOptions { cache_bytes: 1 << 20, read_only: false })?;

    let mut group = Group::new();
    let letter = group.create(store.new_object(), LifetimeHint::Unknown);
    group.append(letter, b"Dear reader,\n");
    store.submit(group, &[])?;
    let snapshot = store.snapshot();

    let mut group = Group::new();
    group.delete(letter);
    store.wait(store.submit(group, &[])?)?;
    assert!(matches!(store.len(letter), Err(Error::NoObject(_))));

    // The snapshot keeps the bytes from being freed until it is dropped.
    let mut bytes = vec![0; snapshot.len(letter)?.try_into()?];
    snapshot.read(letter, 0, &mut bytes)?;
    print!("{}", String::from_utf8(bytes)?);
    Ok(())
}
