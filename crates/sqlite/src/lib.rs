//! SQLite databases in a Draconis store.
//!
//! ```text
//!   SQLite ──sqlite3_vfs──▶ raw          pointers of C
//!                            │
//!                           vfs ─ open_store ─ database ─ locks     files, without pointers
//!                                               │      └─ journal   for ROLLBACK only
//!                                            pending                changes, not committed
//!                                               │ one group for each commit
//!                                     draconis_objects::Store
//! ```
//!
//! - A database is an object of the store, with a name: `draconis store ls`, `get`, `put`,
//!   `snapshot`, `clone` and `rm` know it, and `store get` writes the database as a file.
//! - A commit is one atomic group and one flush. There is no journal on the disk, and no pragma is
//!   needed. `PRAGMA journal_mode=WAL` changes nothing: a store needs no write-ahead log.
//! - A transaction over databases of one store is one group, unless the main database of the
//!   connection is `:memory:`, for which SQLite commits each attached database by itself. Databases
//!   of other stores and plain files are not in the group.
//! - Connections of a process share the store. Another process gets `SQLITE_BUSY` while one has the
//!   store open, as with a lock: its busy handler waits. A forked child cannot use the connections
//!   of its parent.
//! - A store may be in a bucket: `store=s3://BUCKET/PREFIX`, with parameters named as mount options,
//!   such as `bucket_journal=FILE:SIZE`.
//! - A transaction beyond 32 MiB goes on in the store, and needs no more memory.
//! - `PRAGMA draconis_snapshot = 'NAME'` takes a snapshot, and the database `app.db@NAME` is it.
//!
//! As a loadable extension: `.load libdraconis_sqlite`, then
//! `.open 'file:app.db?vfs=draconis&store=things.store'`. The name `things.store#app.db` means the
//! same. Messages of failures are in SQLite's error log, and `SELECT draconis_error()` returns the
//! newest one of the thread, on the connection that loaded the extension.
//!
//! In a program with its own SQLite, without the feature `loadable`:
//!
//! ```
//! use rusqlite::{Connection, auto_extension};
//!
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("things.store");
//! # let new = draconis_access::NewStore { len_bytes: Some(16 << 20), ..Default::default() };
//! # draconis_access::Store::create(&path, &new)?;
//! // SAFETY: both types are SQLite's type of an entry point.
//! let entry: auto_extension::RawAutoExtension =
//!     unsafe { std::mem::transmute(draconis_sqlite::draconis_sqlite_auto_init as *const ()) };
//! // SAFETY: the function is an entry point.
//! unsafe { auto_extension::register_auto_extension(entry)? };
//! // The first connection registers the file system.
//! Connection::open_in_memory()?;
//!
//! let app = Connection::open(format!("file:app.db?vfs=draconis&store={}", path.display()))?;
//! app.execute_batch("CREATE TABLE words(word TEXT); INSERT INTO words VALUES ('durable')")?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![deny(unsafe_code)]

mod bucket;
mod codes;
mod database;
mod error;
mod journal;
mod locks;
mod name;
mod open_store;
mod page_cache;
mod pending;
#[allow(unsafe_code, reason = "the C interface")]
mod raw;
#[doc(hidden)]
pub mod test_hooks;
mod vfs;

pub use open_store::{SharedStore, share_store};
pub use raw::draconis_sqlite_auto_init;
