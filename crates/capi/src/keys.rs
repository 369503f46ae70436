//! Keys and values in a store.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::Bound;

use draconis_access::KeyIterator;
use draconis_objects::kv::Batch;

use crate::error::{require, run, run_with_output};
use crate::raw::{Bytes, null_error};
use crate::store::{draconis_store, submit_with_ticket};

/// Scan in descending order.
pub const DRACONIS_REVERSE: u32 = 1;

/// A batch of changes, applied atomically. For one thread at a time.
pub struct draconis_batch(Batch);

/// The value of a key at the time of the call.
pub struct draconis_value(Vec<u8>);

/// A scan of keys and values as of its start. For one thread at a time.
pub struct draconis_scan {
    keys: KeyIterator,
    pair: (Vec<u8>, Vec<u8>),
}

/// Bytes owned by the library.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct draconis_bytes {
    /// First byte; not NULL.
    pub bytes: *const c_void,
    /// Number of bytes.
    pub len: usize,
}

fn as_draconis_bytes(bytes: &[u8]) -> draconis_bytes {
    draconis_bytes { bytes: bytes.as_ptr().cast(), len: bytes.len() }
}

/// Creates an empty batch; never NULL. draconis_batch_free or draconis_keys_write frees it.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_batch_new() -> Box<draconis_batch> {
    Box::new(draconis_batch(Batch::new()))
}

/// Frees a batch without writing it. Accepts NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_batch_free(batch: Option<Box<draconis_batch>>) {
    drop(batch);
}

/// Adds setting the value of a key.
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

/// Adds deleting a key, if it exists.
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

/// Applies a batch atomically, after everything submitted before, and frees batch even on failure.
/// The changes are durable once draconis_store_wait has returned for the ticket. ticket may be
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

/// Sets the value of one key, as a batch of its own.
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

/// Deletes one key, as a batch of its own.
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

/// Gets the value of a key: returns 1 and the value, which draconis_value_free frees, or 0 and NULL
/// if the key does not exist.
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

/// Returns the bytes of a value, valid until it is freed. value must not be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_value_bytes(value: &draconis_value) -> draconis_bytes {
    as_draconis_bytes(&value.0)
}

/// Frees a value. Accepts NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_value_free(value: Option<Box<draconis_value>>) {
    drop(value);
}

/// Begins a scan of the keys from from (inclusive) to to (exclusive), in byte order; NULL with
/// length 0 means no bound. flags: 0 or DRACONIS_REVERSE. draconis_scan_close frees the
/// scan.
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
        // An empty exclusive end would match no key.
        let to = if to.is_empty() { Bound::Unbounded } else { Bound::Excluded(to) };
        let range = (Bound::Included(from), to);
        let keys = require(store, "store")?.0.scan(range, flags & DRACONIS_REVERSE != 0)?;
        Ok(Some(Box::new(draconis_scan { keys, pair: (vec![], vec![]) })))
    })
}

/// Gets the next key and its value, which may be NULL: returns 1, or 0 at the end. The bytes are
/// valid until the next call with this scan. After an error the scan continues past the damage.
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

/// Closes a scan. Accepts NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_scan_close(scan: Option<Box<draconis_scan>>) {
    drop(scan);
}
