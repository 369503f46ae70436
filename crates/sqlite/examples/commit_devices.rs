//! Small durable commits on modelled devices, beside SQLite's writes with a rollback journal:
//!
//! ```sh
//! cargo run -p draconis-sqlite --example commit_devices
//! ```
//!
//! Times are those of the device. SQLite itself runs on the store. A kernel's file system cannot be
//! on a model, so the writes of a rollback journal are made by hand on our own ext4, as SQLite makes
//! them with `journal_mode=DELETE` and `synchronous=FULL` for a commit of two pages: the journal is
//! created, written and synced with its directory; its header is written and synced; the pages are
//! written and synced; the journal is deleted.

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../../object-store/examples/models/mod.rs"]
mod models;

use std::path::Path;

use draconis_sqlite::share_store;
use models::{DEVICES, device, new_ext4, new_store, sync};
use rusqlite::Connection;

const COMMITS: u64 = 200;
const PAGE_BYTES: usize = 4096;
/// Header, and both pages with number and checksum.
const JOURNAL_BYTES: usize = 512 + 2 * (PAGE_BYTES + 8);

fn main() {
    common::register();
    println!("device\tms a commit, store\tms a commit, rollback journal\tratio");
    for name in DEVICES {
        let (disk, clock) = device(name);
        let shared = share_store(Path::new(name), new_store(disk)).unwrap();
        let app = Connection::open(common::uri(Path::new(name), "app.db")).unwrap();
        app.execute_batch("PRAGMA synchronous=FULL; CREATE TABLE t(a INTEGER PRIMARY KEY, b)")
            .unwrap();
        let began = clock.now_ns();
        for _ in 0..COMMITS {
            app.execute("INSERT INTO t(b) VALUES (?1)", [[b'x'; 100]]).unwrap();
        }
        let ours = (clock.now_ns() - began) / COMMITS;
        drop((app, shared));

        let (disk, clock) = device(name);
        let files = new_ext4(disk);
        files.write("/app.db", vec![1; 16 * PAGE_BYTES]).unwrap();
        files.sync().unwrap();
        let volume = files.volume();
        let database = volume.lookup(volume.root(), b"app.db").unwrap();
        let began = clock.now_ns();
        for nth in 0..COMMITS {
            files.write("/app.db-journal", vec![2; JOURNAL_BYTES]).unwrap();
            sync(&files, "app.db-journal");
            sync(&files, "");
            let journal = volume.lookup(volume.root(), b"app.db-journal").unwrap();
            volume.write(journal, 0, &[3; 512]).unwrap();
            sync(&files, "app.db-journal");
            volume.write(database, 0, &[4; PAGE_BYTES]).unwrap();
            volume.write(database, (1 + nth / 40) * PAGE_BYTES as u64, &[5; PAGE_BYTES]).unwrap();
            volume.sync_inode(database, true).unwrap();
            files.remove_file("/app.db-journal").unwrap();
        }
        let theirs = (clock.now_ns() - began) / COMMITS;
        let ms = |ns: u64| ns as f64 / 1e6;
        let ratio = theirs as f64 / ours as f64;
        println!("{name}\t{:.3}\t{:.3}\t{ratio:.1}", ms(ours), ms(theirs));
    }
}
