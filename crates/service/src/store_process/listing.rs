//! What a store has: told by who has it open, a command or the process of the store while some of
//! its disks are mounted.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use draconis_objects::{DiskInfo, ObjectId, Store};
use serde::{Deserialize, Serialize};

/// The longest list that is taken from a process, in bytes.
const MAX_LIST_BYTES: u64 = 256 << 20;

/// An object of a store.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ObjectEntry {
    /// Its number.
    pub object: u64,
    /// Its length.
    pub len_bytes: u64,
    /// Of a disk or snapshot: bytes that it does not share with what it is over.
    pub own_bytes: Option<u64>,
    /// What it is over.
    pub over: Option<Vec<u8>>,
    /// What it is called, as a disk or snapshot.
    pub names: Vec<Vec<u8>>,
}

/// All objects of a store, in order of their numbers.
///
/// # Errors
/// What the store says.
pub fn list(store: &Arc<Store>) -> draconis_objects::Result<Vec<ObjectEntry>> {
    let mut disks: HashMap<ObjectId, Vec<DiskInfo>> = HashMap::new();
    for disk in store.disks()? {
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

/// What a process wrote into a pipe.
///
/// # Errors
/// What it was refused for, or that it makes no sense.
pub(crate) fn receive(pipe: OwnedFd) -> Result<Vec<ObjectEntry>, String> {
    let mut text = vec![];
    let read = std::fs::File::from(pipe).take(MAX_LIST_BYTES).read_to_end(&mut text);
    read.map_err(|error| crate::error_text(&error))?;
    let told: Result<Result<Vec<ObjectEntry>, String>, _> = serde_json::from_slice(&text);
    told.map_err(|_| "the process that serves the store did not list it".to_owned())?
}

/// Writes what [`receive`] takes, in a thread: who reads it may take its time.
pub(super) fn send(store: &Arc<Store>, pipe: OwnedFd) -> std::io::Result<()> {
    let store = store.clone();
    std::thread::Builder::new().name("list".into()).spawn(move || {
        let told = list(&store).map_err(|error| error.to_string());
        drop(store);
        // Who does not want to know any more has closed it.
        if let Ok(text) = serde_json::to_vec(&told) {
            let _ = std::fs::File::from(pipe).write_all(&text);
        }
    })?;
    Ok(())
}
