//! Puts keys and values into a store in memory, reads them back and scans a range.
//!
//! `cargo run -p draconis-objects --example put_and_get`

use std::ops::Bound;
use std::sync::Arc;

use draconis_device::MemoryDisk;
use draconis_objects::kv::{Batch, Kv};
use draconis_objects::{CreateOptions, LayoutKind, OpenOptions, Profile, Store};

/// Runs the example.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let disk = Arc::new(MemoryDisk::new(vec![0; 16 << 20], 512));
    let layout = LayoutKind::Cow;
    let profile = Profile { layout, page_bytes: 4096, segment_bytes: 256 << 10, queue_depth: 8 };
    Store::create(disk.clone(), &CreateOptions { profile, id: 1 })?;
    let options = OpenOptions { cache_bytes: 1 << 20, read_only: false };
    let keys = Kv::new(Store::open(disk.clone(), &options)?);

    // A batch is atomic: after a crash all of it is there, or nothing.
    let mut batch = Batch::new();
    batch.put(b"colour/apple", b"red");
    batch.put(b"colour/pear", b"green");
    let ticket = keys.write(batch).map_err(|refused| refused.1)?;
    // Reads see the batch already; `wait` returns once it is durable.
    assert_eq!(keys.get(b"colour/pear")?.as_deref(), Some(&b"green"[..]));
    keys.wait(ticket)?;
    keys.wait(keys.delete(b"colour/apple")?)?;
    drop(keys);

    let keys = Kv::new(Store::open(disk, &options)?);
    let range = (Bound::Included(&b"colour/"[..]), Bound::Excluded(&b"colour0"[..]));
    let colours: Vec<_> = keys.scan(&range).collect::<Result<_, _>>()?;
    for (key, value) in &colours {
        println!("{}: {}", String::from_utf8_lossy(key), String::from_utf8_lossy(value));
    }
    assert_eq!(colours, [(b"colour/pear".to_vec(), b"green".to_vec())]);
    Ok(())
}
