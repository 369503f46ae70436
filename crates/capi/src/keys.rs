//! Keys and values in a store.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::Bound;

use draconis_access::KeyIterator;
use draconis_objects::kv::Batch;

use crate::error::{require, run, run_with_output};
use crate::raw::{Bytes, null_error};
use crate::store::{draconis_store, submit_with_ticket};

/// From the last key to the first.
pub const DRACONIS_REVERSE: u32 = 1;

/// Changes of keys that become visible together, whole or not at all. One thread at a time.
pub struct draconis_batch(Batch);

/// The value of a key, as it was when it was asked for.
pub struct draconis_value(Vec<u8>);

/// Keys and values as they were when the scan began. One thread at a time.
pub struct draconis_scan {
    keys: KeyIterator,
    pair: (Vec<u8>, Vec<u8>),
}

/// Bytes of ours.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct draconis_bytes {
    /// Where they begin; not NULL.
    pub bytes: *const c_void,
    /// How many.
    pub len: usize,
}

fn as_draconis_bytes(bytes: &[u8]) -> draconis_bytes {
    draconis_bytes { bytes: bytes.as_ptr().cast(), len: bytes.len() }
}

/// An empty batch; never NULL. draconis_batch_free gives it back, or draconis_keys_write does.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_batch_new() -> Box<draconis_batch> {
    Box::new(draconis_batch(Batch::new()))
}

/// Gives a batch back that is not written. NULL is taken.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_batch_free(batch: Option<Box<draconis_batch>>) {
    drop(batch);
}

/// Gives a key a value.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_batch_put(
    batch: Option<&mut draconis_batch>,
    key: Bytes,
    key_len: usize,
    value: Bytes,
    value_len: usize,
) -> c_int {
    run(|| {
        let batch = batch.ok_or_else(|| null_error("batch"))?;
        batch.0.put(key.get(key_len, "key")?, value.get(value_len, "value")?);
        Ok(())
    })
}

/// Takes a key away, if it is there.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_batch_delete(
    batch: Option<&mut draconis_batch>,
    key: Bytes,
    key_len: usize,
) -> c_int {
    run(|| {
        let batch = batch.ok_or_else(|| null_error("batch"))?;
        batch.0.delete(key.get(key_len, "key")?);
        Ok(())
    })
}

/// Makes all changes of a batch, or none, after all that was submitted before, and frees batch,
/// also when it fails. Durable once draconis_store_wait returned for the ticket, which may be
/// NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_keys_write(
    store: Option<&draconis_store>,
    batch: Option<Box<draconis_batch>>,
    ticket: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    submit_with_ticket(ticket, || {
        let batch = batch.ok_or_else(|| null_error("batch"))?;
        require(store, "store")?.0.write_keys(batch.0)
    })
}

/// Gives one key a value, as a batch of its own.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_keys_put(
    store: Option<&draconis_store>,
    key: Bytes,
    key_len: usize,
    value: Bytes,
    value_len: usize,
    ticket: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    submit_with_ticket(ticket, || {
        let mut batch = Batch::new();
        batch.put(key.get(key_len, "key")?, value.get(value_len, "value")?);
        require(store, "store")?.0.write_keys(batch)
    })
}

/// Takes one key away, as a batch of its own.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_keys_delete(
    store: Option<&draconis_store>,
    key: Bytes,
    key_len: usize,
    ticket: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    submit_with_ticket(ticket, || {
        let mut batch = Batch::new();
        batch.delete(key.get(key_len, "key")?);
        require(store, "store")?.0.write_keys(batch)
    })
}

/// The value of a key: 1 and the value, which draconis_value_free gives back, or 0 and NULL if
/// there is no such key.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_keys_get(
    store: Option<&draconis_store>,
    key: Bytes,
    key_len: usize,
    value: Option<&mut MaybeUninit<Option<Box<draconis_value>>>>,
) -> c_int {
    let mut found = 0;
    let told = run_with_output(value, None, || {
        let value = require(store, "store")?.0.get(key.get(key_len, "key")?)?;
        found = value.is_some().into();
        Ok(value.map(|value| Box::new(draconis_value(value))))
    });
    if told == 0 { found } else { told }
}

/// The bytes of a value, valid until it is given back. value must not be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_value_bytes(value: &draconis_value) -> draconis_bytes {
    as_draconis_bytes(&value.0)
}

/// Gives a value back. NULL is taken.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_value_free(value: Option<Box<draconis_value>>) {
    drop(value);
}

/// Begins a scan of the keys from from (with it) to to (without it), in the order of their bytes;
/// a NULL with the length 0 is no bound. flags: 0 or DRACONIS_REVERSE. draconis_scan_close gives
/// it back.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_scan_open(
    store: Option<&draconis_store>,
    from: Bytes,
    from_len: usize,
    to: Bytes,
    to_len: usize,
    flags: u32,
    scan: Option<&mut MaybeUninit<Option<Box<draconis_scan>>>>,
) -> c_int {
    run_with_output(scan, None, || {
        let from = from.get(from_len, "from")?;
        let to = to.get(to_len, "to")?;
        // No key is before the empty one.
        let to = if to.is_empty() { Bound::Unbounded } else { Bound::Excluded(to) };
        let range = (Bound::Included(from), to);
        let keys = require(store, "store")?.0.scan(range, flags & DRACONIS_REVERSE != 0)?;
        Ok(Some(Box::new(draconis_scan { keys, pair: (vec![], vec![]) })))
    })
}

/// The next key and its value, which may be NULL: 1, or 0 behind the last. The bytes are valid
/// until the next call with this scan. After a failure the scan goes on behind what is damaged.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_scan_next(
    scan: Option<&mut draconis_scan>,
    key: Option<&mut MaybeUninit<draconis_bytes>>,
    value: Option<&mut MaybeUninit<draconis_bytes>>,
) -> c_int {
    let mut found = 0;
    let told = run(|| {
        let scan = scan.ok_or_else(|| null_error("scan"))?;
        let next = scan.keys.next()?;
        found = next.is_some().into();
        scan.pair = next.unwrap_or_default();
        key.map(|key| key.write(as_draconis_bytes(&scan.pair.0)));
        value.map(|value| value.write(as_draconis_bytes(&scan.pair.1)));
        Ok(())
    });
    if told == 0 { found } else { told }
}

/// Gives a scan back. NULL is taken.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_scan_close(scan: Option<Box<draconis_scan>>) {
    drop(scan);
}
