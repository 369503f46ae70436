//! Stores in files of a temporary directory, and connections to databases in them.

#![allow(dead_code, reason = "each test uses a part of it")]

pub mod buckets;
pub mod cuts;

use std::path::{Path, PathBuf};
use std::sync::Once;

use draconis_access::{Store, stores};
use draconis_objects::LayoutKind;
use draconis_sqlite::{SharedStore, share_store};
use rusqlite::auto_extension::{RawAutoExtension, register_auto_extension};
use rusqlite::{Connection, OpenFlags};

/// Registers the file system with the SQLite that is linked into the test.
pub fn register() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: both types are SQLite's type of an entry point, and the function is one.
        unsafe {
            let entry = draconis_sqlite::draconis_sqlite_auto_init as *const ();
            register_auto_extension(std::mem::transmute::<*const (), RawAutoExtension>(entry))
                .unwrap();
        }
        Connection::open_in_memory().unwrap();
    });
}

/// A store in a file.
pub struct TestStore {
    pub dir: tempfile::TempDir,
    pub file: PathBuf,
}

impl TestStore {
    pub fn create(len_bytes: u64) -> Self {
        register();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("things.store");
        let new = std::fs::File::options().read(true).write(true).create_new(true).open(&file);
        let new = new.unwrap();
        new.set_len(len_bytes).unwrap();
        // Not measured, which takes seconds.
        create_on(stores::open_store_disk(new, &file, true, false).unwrap());
        Self { dir, file }
    }

    pub fn uri(&self, name: &str) -> String {
        uri(&self.file, name)
    }

    pub fn open(&self, name: &str) -> Connection {
        Connection::open(self.uri(name)).unwrap()
    }

    /// Fails if a check of the store finds damage, or if anything is left of a transaction.
    pub fn check(&self) {
        let report = Store::check(&self.file).unwrap();
        assert!(report.is_clean(), "{:?}", report.damage);
        let store = Store::open(&self.file).unwrap();
        let names = store.names().unwrap();
        assert!(names.iter().all(|(name, _)| !name.contains(&b'~')), "{names:?}");
        let named: std::collections::BTreeSet<_> = names.iter().map(|(_, id)| *id).collect();
        let all = store.list().unwrap();
        assert!(all.iter().all(|(id, _)| named.contains(id)), "{all:?} beside {names:?}");
        assert_eq!(store.count_keys().unwrap(), 0);
    }
}

pub fn uri(store: &Path, name: &str) -> String {
    format!("file:{name}?vfs=draconis&store={}", store.display())
}

pub fn open_read_only(uri: &str) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI;
    Connection::open_with_flags(uri, flags)
}

pub fn text(connection: &Connection, sql: &str) -> String {
    connection
        .query_row(sql, [], |row| {
            Ok(match row.get_ref(0)? {
                rusqlite::types::ValueRef::Null => "NULL".into(),
                rusqlite::types::ValueRef::Integer(number) => number.to_string(),
                rusqlite::types::ValueRef::Real(number) => number.to_string(),
                other => String::from_utf8_lossy(other.as_bytes().unwrap()).into_owned(),
            })
        })
        .unwrap_or_else(|error| panic!("{sql}: {error}"))
}

pub fn integrity(connection: &Connection) {
    assert_eq!(text(connection, "PRAGMA integrity_check"), "ok");
}

/// A generator of numbers from a seed.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// Creates a store on an empty disk of zeros.
pub fn create_on(disk: std::sync::Arc<dyn draconis_device::Disk>) {
    let layout = LayoutKind::Cow;
    let profile = draconis_objects::Profile {
        layout,
        page_bytes: 4096,
        segment_bytes: 128 << 10,
        queue_depth: 8,
    };
    let options = draconis_objects::CreateOptions { profile, id: 1 };
    draconis_objects::Store::create(disk, &options).unwrap();
}

/// Opens the store on a disk under a name.
pub fn share(name: &str, disk: std::sync::Arc<dyn draconis_device::Disk>) -> SharedStore {
    register();
    let options = draconis_objects::OpenOptions { cache_bytes: 1 << 20, read_only: false };
    let store = draconis_objects::Store::open(disk, &options).unwrap();
    share_store(Path::new(name), store).unwrap()
}

/// Returns all rows of the tables `t`, `u`, .. of a database, or the error.
pub fn dump(connection: &Connection, schema: &str) -> String {
    let list = format!(
        "SELECT coalesce(group_concat(name, ' '), '') FROM
         (SELECT name FROM {schema}.sqlite_schema WHERE type = 'table' ORDER BY name)"
    );
    let tables = match connection.query_row(&list, [], |row| row.get::<_, String>(0)) {
        Ok(tables) => tables,
        Err(error) => return error.to_string(),
    };
    let rows = |table: &str| {
        let sql = format!(
            "SELECT count(*) || '/' || coalesce(group_concat(a || ':' || b, ' '), '')
             FROM (SELECT a, b FROM {schema}.{table} ORDER BY a)"
        );
        let rows = connection.query_row(&sql, [], |row| row.get::<_, String>(0));
        format!("{table}={}", rows.unwrap_or_else(|error| error.to_string()))
    };
    tables.split_whitespace().map(rows).collect::<Vec<_>>().join(";")
}
