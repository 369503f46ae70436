//! Lists of the objects in a store. The process that has the store open makes them: the tool, or
//! the store process while some disks are mounted.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use draconis_objects::{DiskInfo, ObjectId, Store};
use serde::{Deserialize, Serialize};

/// Longest list that is accepted from a process, in bytes.
const MAX_LIST_BYTES: u64 = 256 << 20;

/// An object of a store.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ObjectEntry {
    /// The object number.
    pub object: u64,
    /// The length, in bytes.
    pub len_bytes: u64,
    /// Bytes of a disk or snapshot that it does not share with its parent.
    pub own_bytes: Option<u64>,
    /// The parent.
    pub over: Option<Vec<u8>>,
    /// Its names as a disk or snapshot.
    pub names: Vec<Vec<u8>>,
}

/// Returns all objects of a store, in order of their numbers.
///
/// # Errors
/// The store's error.
pub fn list_objects(store: &Arc<Store>) -> draconis_objects::Result<Vec<ObjectEntry>> {
    let mut disks: HashMap<ObjectId, Vec<DiskInfo>> = HashMap::new();
    for disk in store.list_disks()? {
        disks.entry(disk.id).or_default().push(disk);
    }
    let listed = |(id, len_bytes): (ObjectId, u64)| {
        let disks = disks.remove(&id).unwrap_or_default();
        let own_bytes = disks.first().map(|disk| disk.own_bytes);
        let over = disks.first().and_then(|disk| disk.parent.clone());
        let names = disks.into_iter().map(|disk| disk.name).collect();
        ObjectEntry { object: id.0, len_bytes, own_bytes, over, names }
    };
    Ok(store.list()?.into_iter().map(listed).collect())
}

/// Receives a list that another process writes into a pipe.
///
/// # Errors
/// The reason of a refusal, or that the list is invalid.
pub(crate) fn receive_listing(pipe: OwnedFd) -> Result<Vec<ObjectEntry>, String> {
    let mut text = vec![];
    let read = std::fs::File::from(pipe).take(MAX_LIST_BYTES).read_to_end(&mut text);
    read.map_err(|error| crate::error_text(&error))?;
    let told: Result<Result<Vec<ObjectEntry>, String>, _> = serde_json::from_slice(&text);
    told.map_err(|_| "the process that serves the store did not list it".to_owned())?
}

/// Writes a list for [`receive_listing`] in a thread, since the reader may be slow.
pub(super) fn send_listing(store: &Arc<Store>, pipe: OwnedFd) -> std::io::Result<()> {
    let store = store.clone();
    std::thread::Builder::new().name("list".into()).spawn(move || {
        let told = list_objects(&store).map_err(|error| error.to_string());
        drop(store);
        // Fails only if the reader has closed it.
        if let Ok(text) = serde_json::to_vec(&told) {
            let _ = std::fs::File::from(pipe).write_all(&text);
        }
    })?;
    Ok(())
}
