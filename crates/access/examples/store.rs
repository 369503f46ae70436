//! Makes a store in a file, puts an object and keys into it, and reads them back.
//!
//! `cargo run -p draconis-access --example store`

use draconis_access::{NewStore, Store};
use draconis_objects::kv::Batch;
use draconis_objects::{Group, LayoutKind, LifetimeHint};

/// Runs the example.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("things.store");
    // Without a layout, `create` measures the disk first.
    let layout = Some(LayoutKind::Cow);
    Store::create(&path, &NewStore { len_bytes: Some(8 << 20), layout, ..NewStore::default() })?;

    let store = Store::open_for_writing(&path)?;
    let mut group = Group::new();
    let letter = group.create(store.new_object()?, LifetimeHint::Unknown);
    group.append(letter, b"Dear reader,\n");
    group.set_name(b"letter", letter);
    store.submit(group)?;
    let mut batch = Batch::new();
    batch.put(b"apple", b"red");
    // What was submitted before is durable as well.
    store.wait(store.write_keys(batch)?)?;
    store.close()?;

    let store = Store::open(&path)?;
    let letter = store.find_name(b"letter")?.ok_or("the object has no name")?;
    let mut bytes = vec![0; store.len(letter)?.try_into()?];
    store.read(letter, 0, &mut bytes)?;
    print!("{}", String::from_utf8(bytes)?);
    assert_eq!(store.get(b"apple")?.as_deref(), Some(&b"red"[..]));
    Ok(store.close()?)
}
