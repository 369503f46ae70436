//! Two databases in a store on a disk that records, and the judge of what a power cut leaves.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use draconis_device::{Disk, MemoryDisk};
use draconis_objects::Store;
use draconis_objects::check::CheckOptions;
use draconis_testkit::{Event, RecordDisk};
use rusqlite::Connection;

use super::{create_on, dump, share, uri};

/// Rows of the main and of the attached database.
pub type Contents = [String; 2];

/// Opens the main database of a store, with another one attached as `side`.
pub fn connect(store: &str) -> rusqlite::Result<Connection> {
    let connection = Connection::open(uri(Path::new(store), "a.db"))?;
    let attach = format!("ATTACH '{}' AS side", uri(Path::new(store), "b.db"));
    connection.execute_batch(&attach)?;
    Ok(connection)
}

pub fn contents(connection: &Connection) -> Contents {
    ["main", "side"].map(|schema| dump(connection, schema))
}

/// Returns a disk with a new store that records from now on, and its image.
pub fn record_new_store(disk_bytes: usize) -> (Arc<RecordDisk<MemoryDisk>>, Vec<u8>) {
    let disk = Arc::new(RecordDisk::new(MemoryDisk::new(vec![0; disk_bytes], 512)));
    create_on(disk.clone());
    let mut image = vec![0; disk_bytes];
    for event in disk.take_events() {
        if let Event::Group { writes, .. } = event {
            for (at, bytes) in writes {
                image[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
            }
        }
    }
    (disk, image)
}

/// Opens the store on a disk after a crash; returns the contents, if the databases are sound.
pub fn recover(disk: Arc<dyn Disk>) -> Result<Contents, String> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let name = format!("recovered-{}.store", NUMBER.fetch_add(1, Ordering::Relaxed));
    let shared = share(&name, disk.clone());
    let connection = connect(&name).unwrap();
    let found = contents(&connection);
    for schema in ["main", "side"] {
        let check = format!("PRAGMA {schema}.integrity_check");
        let checked = connection.query_row(&check, [], |row| row.get::<_, String>(0));
        if checked.as_deref() != Ok("ok") {
            return Err(format!("{schema}: {checked:?}"));
        }
    }
    drop((connection, shared));
    let options = draconis_objects::OpenOptions { cache_bytes: 1 << 20, read_only: true };
    let store = Store::open(disk.clone(), &options).map_err(|error| error.to_string())?;
    let (names, objects) = (store.list_names().unwrap(), store.list().unwrap());
    if names.len() > 2 || objects.len() != names.len() {
        return Err(format!("left of a transaction: {names:?}, {objects:?}"));
    }
    drop(store);
    let report = Store::check(disk, &CheckOptions::default(), &mut |_, _| {}).unwrap();
    match report.is_clean() {
        true => Ok(found),
        false => Err(format!("{:?}", report.damage)),
    }
}
