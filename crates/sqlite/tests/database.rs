//! Databases in a store: commits, rollbacks, locks, snapshots, limits.

use crate::common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::{TestStore, integrity, open_read_only, text, uri};
use draconis_access::Store;
use draconis_objects::{Group, LifetimeHint};
use draconis_types::lock::Mutex;
use rusqlite::{Connection, ErrorCode, OpenFlags};

fn code(error: &rusqlite::Error) -> ErrorCode {
    error.sqlite_error_code().unwrap_or_else(|| panic!("{error}"))
}

fn put_object(test: &TestStore, name: &str, bytes: &[u8]) {
    let store = Store::open_for_writing(&test.file).unwrap();
    let mut group = Group::new();
    let id = group.create(store.new_object().unwrap(), LifetimeHint::Unknown);
    group.append(id, bytes);
    group.set_name(name.as_bytes(), id);
    store.wait(store.submit(group).unwrap()).unwrap();
}

fn last_error() -> String {
    text(&Connection::open_in_memory().unwrap(), "SELECT draconis_error()")
}

#[test]
fn commits_are_there_after_reopening_and_rollbacks_are_not() {
    let test = TestStore::create(64 << 20);
    let app = test.open("app.db");
    app.execute_batch(
        "CREATE TABLE t(a INTEGER PRIMARY KEY, b); INSERT INTO t VALUES (1, 'one'), (2, 'two');
         BEGIN; UPDATE t SET b = 'three' WHERE a = 2; DELETE FROM t WHERE a = 1; ROLLBACK;
         BEGIN; INSERT INTO t VALUES (3, 'x'); SAVEPOINT s; DELETE FROM t; ROLLBACK TO s; COMMIT",
    )
    .unwrap();
    drop(app);
    let app = test.open("app.db");
    assert_eq!(text(&app, "SELECT group_concat(b) FROM t"), "one,two,x");
    integrity(&app);
    // By its other name.
    let name = format!("{}#app.db", test.file.display());
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE;
    let other = Connection::open_with_flags_and_vfs(name, flags, c"draconis").unwrap();
    assert_eq!(text(&other, "SELECT count(*) FROM t"), "3");
    other.execute_batch("DELETE FROM t WHERE a = 3").unwrap();
    assert_eq!(text(&app, "SELECT count(*) FROM t"), "2");
    drop((app, other));
    test.check();
}

#[test]
fn a_store_needs_no_journal_mode() {
    let test = TestStore::create(64 << 20);
    let app = test.open("app.db");
    app.execute_batch("CREATE TABLE t(a)").unwrap();
    for mode in ["DELETE", "TRUNCATE", "PERSIST", "MEMORY", "OFF"] {
        for synchronous in ["FULL", "OFF"] {
            for locking in ["EXCLUSIVE", "NORMAL"] {
                let set = format!(
                    "PRAGMA journal_mode={mode}; PRAGMA synchronous={synchronous};
                     PRAGMA locking_mode={locking};"
                );
                app.execute_batch(&set).unwrap();
                app.execute_batch("INSERT INTO t VALUES (1); BEGIN; INSERT INTO t VALUES (2)")
                    .unwrap();
                app.execute_batch(
                    "ROLLBACK; BEGIN; DELETE FROM t; COMMIT; INSERT INTO t VALUES (3)",
                )
                .unwrap();
                assert_eq!(text(&app, "SELECT group_concat(a) FROM t"), "3", "{set}");
                integrity(&app);
            }
        }
        for locking in ["NORMAL", "EXCLUSIVE"] {
            app.execute_batch(&format!("PRAGMA locking_mode={locking}")).unwrap();
            for asked in ["=WAL", "=wrong", ""] {
                let sql = format!("PRAGMA journal_mode{asked}");
                assert_eq!(text(&app, &sql), mode.to_lowercase(), "{locking}, {sql}");
            }
        }
    }
    app.execute_batch("INSERT INTO t VALUES (4)").unwrap();
    drop(app);
    let app = test.open("app.db");
    assert_eq!(text(&app, "SELECT count(*) FROM t"), "2");
    // Through a connection whose main database is not ours, the pragma reaches SQLite.
    drop(app);
    let memory = Connection::open_in_memory().unwrap();
    let attach = format!("ATTACH '{}' AS app; PRAGMA locking_mode=EXCLUSIVE", test.uri("app.db"));
    memory.execute_batch(&attach).unwrap();
    let _ = memory.execute_batch("PRAGMA journal_mode=WAL; INSERT INTO app.t VALUES (5)");
    drop(memory);
    let app = test.open("app.db");
    integrity(&app);
    app.execute_batch("INSERT INTO t VALUES (6)").unwrap();
    drop(app);
    test.check();
}

#[test]
fn all_page_sizes_and_vacuum() {
    let test = TestStore::create(64 << 20);
    for (nth, size) in [512, 1024, 4096, 16384, 65536].into_iter().enumerate() {
        let name = format!("p{size}.db");
        let app = test.open(&name);
        let mode = ["NONE", "FULL", "INCREMENTAL"][nth % 3];
        app.execute_batch(&format!(
            "PRAGMA page_size={size}; PRAGMA auto_vacuum={mode}; CREATE TABLE t(a, b);
             WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000)
             INSERT INTO t SELECT i, randomblob(300) FROM n;
             CREATE INDEX i ON t(b); DELETE FROM t WHERE a % 3 > 0; PRAGMA incremental_vacuum"
        ))
        .unwrap();
        assert_eq!(text(&app, "PRAGMA page_size"), size.to_string());
        integrity(&app);
        let sum = text(&app, "SELECT sum(length(hex(b)) + a) FROM t");
        let before: u64 = text(&app, "PRAGMA page_count").parse().unwrap();
        app.execute_batch("PRAGMA page_size=8192; VACUUM").unwrap();
        assert_eq!(text(&app, "PRAGMA page_size"), "8192");
        let after: u64 = text(&app, "PRAGMA page_count").parse().unwrap();
        assert!(after * 8192 < before * size + 65536, "{before} of {size}, then {after}");
        integrity(&app);
        drop(app);
        let app = test.open(&name);
        assert_eq!(text(&app, "SELECT sum(length(hex(b)) + a) FROM t"), sum);
        assert!(Store::open(&test.file).is_err(), "the store is open for writing");
        drop(app);
        let store = Store::open(&test.file).unwrap();
        let object = store.find_name(name.as_bytes()).unwrap().unwrap();
        assert_eq!(store.len(object).unwrap(), after * 8192);
    }
    let app = test.open("p512.db");
    app.execute_batch(&format!("VACUUM INTO '{}'", test.uri("copy.db"))).unwrap();
    let file = test.dir.path().join("copy.db");
    app.execute_batch(&format!("VACUUM INTO 'file:{}?vfs=unix'", file.display())).unwrap();
    let sum = text(&app, "SELECT sum(a) FROM t");
    assert_eq!(text(&test.open("copy.db"), "SELECT sum(a) FROM t"), sum);
    assert_eq!(text(&Connection::open(&file).unwrap(), "SELECT sum(a) FROM t"), sum);
    drop(app);
    test.check();
}

/// Databases that were files, and files that were databases.
#[test]
fn databases_are_imported_and_exported() {
    let test = TestStore::create(64 << 20);
    let path = test.dir.path().join("plain.db");
    let plain = Connection::open(&path).unwrap();
    assert_eq!(text(&plain, "PRAGMA journal_mode=WAL"), "wal");
    plain.execute_batch("CREATE TABLE t(a); INSERT INTO t VALUES ('from a file')").unwrap();
    drop(plain);
    let put = |name: &str, bytes: &[u8]| put_object(&test, name, bytes);
    put("in.db", &std::fs::read(&path).unwrap());
    put(
        "text.db",
        b"this is no database but a text that is longer than its header would be, \
        which is a hundred bytes long",
    );
    put("short.db", b"x");
    put("empty.db", b"");
    let app = test.open("in.db");
    assert_eq!(text(&app, "PRAGMA journal_mode"), "delete");
    app.execute_batch("INSERT INTO t VALUES ('and a store')").unwrap();
    integrity(&app);
    drop(app);
    let store = Store::open(&test.file).unwrap();
    let id = store.find_name(b"in.db").unwrap().unwrap();
    let mut bytes = vec![0; store.len(id).unwrap() as usize];
    store.read(id, 0, &mut bytes).unwrap();
    drop(store);
    std::fs::write(&path, bytes).unwrap();
    let plain = Connection::open(&path).unwrap();
    assert_eq!(text(&plain, "SELECT group_concat(a) FROM t"), "from a file,and a store");
    integrity(&plain);
    for name in ["text.db", "short.db"] {
        let found = test.open(name).execute_batch("CREATE TABLE t(a)");
        assert_eq!(code(&found.unwrap_err()), ErrorCode::NotADatabase, "{name}");
    }
    test.open("empty.db").execute_batch("CREATE TABLE t(a)").unwrap();
    test.check();
}

#[test]
fn failures_to_open_say_why() {
    let test = TestStore::create(16 << 20);
    let missing = test.dir.path().join("missing.store");
    for (uri, wanted) in [
        (common::uri(&missing, "app.db"), "missing.store: no such file; draconis store create"),
        (common::uri(test.dir.path(), "app.db"), "is a directory"),
        (test.uri("no/path.db"), "no/path.db: letters, digits"),
        (test.uri("app.db@snap"), "things.store#app.db@snap: no such database; draconis store ls"),
        ("file:app.db?vfs=draconis".into(), "app.db: a database in a store is file:NAME?vfs="),
    ] {
        let error = Connection::open(&uri).unwrap_err();
        assert_eq!(code(&error), ErrorCode::CannotOpen, "{uri}: {error}");
        assert!(last_error().contains(wanted), "{uri}: {}", last_error());
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_URI;
    let found = Connection::open_with_flags(test.uri("app.db"), flags);
    assert_eq!(code(&found.unwrap_err()), ErrorCode::CannotOpen);
    assert!(open_read_only(&test.uri("app.db")).is_err());
    // A file that is no store.
    let text = test.dir.path().join("text");
    std::fs::write(&text, vec![b'x'; 1 << 20]).unwrap();
    assert!(Connection::open(common::uri(&text, "app.db")).is_err());
    assert!(last_error().contains("not a store"), "{}", last_error());
    // Nothing was created by all that, and opening creates nothing either.
    drop(test.open("app.db"));
    assert!(Store::open(&test.file).unwrap().names().unwrap().is_empty());
}

#[test]
fn readers_share_a_store_and_do_not_write() {
    let test = TestStore::create(16 << 20);
    test.open("app.db").execute_batch("CREATE TABLE t(a); INSERT INTO t VALUES (1)").unwrap();
    let one = open_read_only(&test.uri("app.db")).unwrap();
    let found = one.execute_batch("INSERT INTO t VALUES (2)");
    assert_eq!(code(&found.unwrap_err()), ErrorCode::ReadOnly);
    // As another process would.
    assert!(Store::open(&test.file).is_ok());
    assert!(Connection::open(test.uri("app.db")).is_err());
    assert!(last_error().contains("open read-only"), "{}", last_error());
    assert_eq!(text(&one, "SELECT a FROM t"), "1");
    drop(one);
    let writer = test.open("app.db");
    let reader = open_read_only(&test.uri("app.db")).unwrap();
    writer.execute_batch("INSERT INTO t VALUES (2)").unwrap();
    assert_eq!(text(&reader, "SELECT count(*) FROM t"), "2");
}

#[test]
fn a_store_of_another_process_is_waited_for() {
    let test = TestStore::create(16 << 20);
    test.open("app.db").execute_batch("CREATE TABLE t(a)").unwrap();
    let other = Store::open_for_writing(&test.file).unwrap();
    // Opening succeeds, as with a locked file; the first use is busy.
    let app = test.open("app.db");
    app.busy_timeout(Duration::from_millis(50)).unwrap();
    let found = app.execute_batch("INSERT INTO t VALUES (1)");
    assert_eq!(code(&found.unwrap_err()), ErrorCode::DatabaseBusy);
    assert!(last_error().contains("another process has the store open"), "{}", last_error());
    app.busy_timeout(Duration::from_secs(60)).unwrap();
    let closing = std::thread::spawn(move || {
        draconis_testkit::wait::pause(
            "the other process goes on for a while",
            Duration::from_millis(200),
        );
        drop(other);
    });
    app.execute_batch("INSERT INTO t VALUES (1)").unwrap();
    closing.join().unwrap();
    assert_eq!(text(&app, "SELECT count(*) FROM t"), "1");
}

#[test]
fn a_busy_store_is_left_to_the_busy_handler() {
    static TRIES: AtomicUsize = AtomicUsize::new(0);
    static OTHER: Mutex<Option<Arc<Store>>> = Mutex::new(None);
    let test = TestStore::create(16 << 20);
    test.open("app.db").execute_batch("CREATE TABLE t(a)").unwrap();
    *OTHER.lock() = Some(Store::open_for_writing(&test.file).unwrap());
    let mut app = test.open("app.db");
    let give_up = |tries| {
        TRIES.store(1, Ordering::Relaxed);
        tries < 2
    };
    app.busy_handler(Some(give_up)).unwrap();
    let found = app.execute_batch("INSERT INTO t VALUES (1)");
    assert_eq!(code(&found.unwrap_err()), ErrorCode::DatabaseBusy);
    assert_eq!(TRIES.load(Ordering::Relaxed), 1, "the handler was asked");
    let release = |_| OTHER.lock().take().is_some();
    app.busy_handler(Some(release)).unwrap();
    app.execute_batch("INSERT INTO t VALUES (1)").unwrap();
    assert!(OTHER.lock().is_none(), "the handler was asked");
}

#[test]
fn a_replaced_store_takes_no_commits_and_its_path_is_the_new_one() {
    let test = TestStore::create(64 << 20);
    let old = test.open("app.db");
    old.execute_batch("CREATE TABLE t(a); INSERT INTO t VALUES ('old')").unwrap();
    let other_name = test.dir.path().join("other.store");
    std::fs::hard_link(&test.file, &other_name).unwrap();
    let same = Connection::open(uri(&other_name, "app.db")).unwrap();
    same.execute_batch("INSERT INTO t VALUES ('by another name')").unwrap();
    assert_eq!(text(&old, "SELECT count(*) FROM t"), "2");
    let restored = TestStore::create(64 << 20);
    std::fs::rename(&restored.file, &test.file).unwrap();

    // With its own journal, of which the old connections know nothing.
    let new = test.open("app.db");
    new.execute_batch("CREATE TABLE t(a, b); PRAGMA cache_size=5; BEGIN").unwrap();
    for _ in 0..100 {
        new.execute_batch("INSERT INTO t VALUES ('new', randomblob(1000))").unwrap();
    }
    for mode in ["DELETE", "TRUNCATE", "PERSIST", "MEMORY", "OFF"] {
        for locking in ["EXCLUSIVE", "NORMAL"] {
            let set = format!("PRAGMA locking_mode={locking}; PRAGMA journal_mode={mode}");
            old.execute_batch(&set).unwrap();
            for _ in 0..2 {
                let refused = old.execute_batch("INSERT INTO t VALUES ('lost')").unwrap_err();
                let extended = refused.sqlite_error().map(|error| error.extended_code);
                assert_eq!(extended, Some(rusqlite::ffi::SQLITE_READONLY_DBMOVED), "{set}");
            }
            assert!(last_error().contains("was replaced") || mode != "MEMORY", "{}", last_error());
            assert_eq!(text(&old, "SELECT group_concat(a) FROM t"), "old,by another name");
        }
    }
    assert!(old.execute_batch("PRAGMA draconis_snapshot = 'lost'").is_err());
    new.execute_batch("ROLLBACK; INSERT INTO t VALUES ('new', 0)").unwrap();
    let second = test.open("app.db");
    assert_eq!(text(&second, "SELECT group_concat(a) FROM t"), "new");
    integrity(&second);
    drop((old, same, new));
    let third = test.open("app.db");
    third.execute_batch("INSERT INTO t VALUES ('third', 0)").unwrap();
    assert_eq!(text(&second, "SELECT group_concat(a) FROM t"), "new,third");
    drop((second, third));
    test.check();
    let renamed = Connection::open(uri(&other_name, "app.db")).unwrap();
    assert_eq!(text(&renamed, "SELECT count(*) FROM t"), "2");
    std::fs::remove_file(&other_name).unwrap();
    assert!(renamed.execute_batch("INSERT INTO t VALUES ('lost')").is_err());
}

#[test]
fn readers_see_committed_pages_only() {
    let test = TestStore::create(64 << 20);
    let writer = test.open("app.db");
    writer.execute_batch("CREATE TABLE t(a, b); INSERT INTO t VALUES (1, 'old')").unwrap();
    let reader = test.open("app.db");
    for connection in [&writer, &reader] {
        connection.busy_timeout(Duration::ZERO).unwrap();
    }
    // While pages are in the cache, both go on.
    writer.execute_batch("BEGIN IMMEDIATE; UPDATE t SET b = 'new'").unwrap();
    assert_eq!(text(&reader, "SELECT b FROM t"), "old");
    assert_eq!(code(&reader.execute_batch("DELETE FROM t").unwrap_err()), ErrorCode::DatabaseBusy);
    reader.execute_batch("BEGIN; SELECT * FROM t").unwrap();
    assert_eq!(code(&writer.execute_batch("COMMIT").unwrap_err()), ErrorCode::DatabaseBusy);
    reader.execute_batch("COMMIT").unwrap();
    writer.execute_batch("COMMIT").unwrap();
    assert_eq!(text(&reader, "SELECT b FROM t"), "new");
    // Pages that were spilled are not seen, and gone after a rollback.
    writer.execute_batch("PRAGMA cache_size=5; BEGIN").unwrap();
    for nth in 0..500 {
        writer.execute("INSERT INTO t VALUES (?1, randomblob(1000))", [nth]).unwrap();
    }
    let found = reader.query_row("SELECT count(*) FROM t", [], |row| row.get::<_, i64>(0));
    assert_eq!(code(&found.unwrap_err()), ErrorCode::DatabaseBusy);
    writer.execute_batch("ROLLBACK").unwrap();
    assert_eq!(text(&reader, "SELECT count(*) FROM t"), "1");
    integrity(&reader);
    drop((writer, reader));
    test.check();
}

#[test]
fn threads_write_without_losing_a_change() {
    const THREADS: usize = 4;
    const CHANGES: usize = 20;
    let test = TestStore::create(64 << 20);
    test.open("app.db")
        .execute_batch(
            "CREATE TABLE t(thread, nth); CREATE TABLE sum(n); INSERT INTO sum VALUES (0)",
        )
        .unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let test = &test;
            scope.spawn(move || {
                let app = test.open(if thread == 3 { "other.db" } else { "app.db" });
                app.busy_timeout(Duration::from_secs(60)).unwrap();
                app.execute_batch(
                    "CREATE TABLE IF NOT EXISTS t(thread, nth);
                     CREATE TABLE IF NOT EXISTS sum(n);
                     INSERT INTO sum SELECT 0 WHERE NOT EXISTS (SELECT * FROM sum)",
                )
                .unwrap();
                for nth in 0..CHANGES {
                    let (count, sum) = app
                        .query_row("SELECT (SELECT count(*) FROM t), n FROM sum", [], |row| {
                            Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?))
                        })
                        .unwrap();
                    assert_eq!(count, sum);
                    app.execute_batch(&format!(
                        "BEGIN IMMEDIATE; INSERT INTO t VALUES ({thread}, {nth});
                         UPDATE sum SET n = n + 1; COMMIT"
                    ))
                    .unwrap();
                }
            });
        }
    });
    let app = test.open("app.db");
    assert_eq!(text(&app, "SELECT count(*) FROM t"), (3 * CHANGES).to_string());
    assert_eq!(text(&test.open("other.db"), "SELECT n FROM sum"), CHANGES.to_string());
    integrity(&app);
    drop(app);
    test.check();
}

#[test]
fn snapshots_stay_as_they_are() {
    let test = TestStore::create(64 << 20);
    let app = test.open("app.db");
    app.execute_batch("CREATE TABLE t(a); INSERT INTO t VALUES ('monday')").unwrap();
    assert_eq!(text(&app, "PRAGMA draconis_snapshot = 'mon'"), "app.db@mon");
    let snapshot = test.open("app.db@mon");
    for nth in 0..60 {
        app.execute("INSERT INTO t VALUES (randomblob(?1))", [nth * 50]).unwrap();
        if nth % 20 == 0 {
            assert_eq!(text(&snapshot, "SELECT group_concat(a) FROM t"), "monday");
        }
    }
    let found = snapshot.execute_batch("DELETE FROM t");
    assert_eq!(code(&found.unwrap_err()), ErrorCode::ReadOnly);
    assert!(app.execute_batch("PRAGMA draconis_snapshot = 'mon'").is_err());
    let inside = app.execute_batch("BEGIN; DELETE FROM t; PRAGMA draconis_snapshot = 'in'");
    assert!(inside.unwrap_err().to_string().contains("commit first"));
    app.execute_batch("COMMIT; PRAGMA draconis_snapshot = 'tue'; INSERT INTO t VALUES (1)")
        .unwrap();
    drop((app, snapshot));
    let count = |name: &str| text(&test.open(name), "SELECT count(*) FROM t");
    assert_eq!(["app.db", "app.db@mon", "app.db@tue"].map(count), ["1", "1", "0"]);
    test.check();
}

/// Fills a table with blobs of `kib` KiB each.
fn fill(connection: &Connection, rows: u64, kib: u64) -> rusqlite::Result<()> {
    connection.execute_batch(&format!(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
         INSERT INTO t SELECT i, randomblob({}) FROM n",
        kib * 1024
    ))
}

#[test]
fn a_full_store_deletes_and_updates() {
    let test = TestStore::create(24 << 20);
    let app = test.open("app.db");
    app.execute_batch("CREATE TABLE t(a, b)").unwrap();
    for rows in [200, 10, 1] {
        let full = loop {
            if let Err(error) = fill(&app, rows, 4) {
                break error;
            }
        };
        assert_eq!(code(&full), ErrorCode::DiskFull, "{full}");
    }
    let count = || text(&app, "SELECT count(*) FROM t").parse::<u64>().unwrap();
    let full = count();
    for round in 0..20 {
        app.execute_batch("UPDATE t SET b = randomblob(4096) WHERE rowid = 7").unwrap();
        let limit = full / 20 * (round + 1);
        app.execute_batch(&format!("DELETE FROM t WHERE rowid <= {limit} AND rowid <> 7")).unwrap();
    }
    let left = count();
    assert!(left < 200, "{left} of {full}");
    integrity(&app);
    // What is free in the database takes new rows.
    for _ in 0..full / 20 {
        fill(&app, 10, 4).unwrap_or_else(|error| panic!("{error}: {}", last_error()));
    }
    integrity(&app);
    drop(app);
    integrity(&test.open("app.db"));
    test.check();
}

#[test]
fn a_full_store_loses_nothing() {
    let test = TestStore::create(24 << 20);
    put_object(&test, "ballast", &vec![7; 5 << 20]);
    let app = test.open("app.db");
    app.execute_batch("CREATE TABLE t(a, b); INSERT INTO t VALUES (0, 'first')").unwrap();
    let mut committed = 0;
    let full = loop {
        match fill(&app, 200, 4) {
            Ok(()) => committed += 200,
            Err(error) => break error,
        }
        assert!(committed < 10_000);
    };
    assert_eq!(code(&full), ErrorCode::DiskFull, "{full}");
    assert!(last_error().contains("the store is full"), "{}", last_error());
    assert!(committed > 400);
    assert_eq!(text(&app, "SELECT count(*) FROM t"), (committed + 1).to_string());
    integrity(&app);
    // Small changes still find space, or are refused as a whole.
    let _ = app.execute_batch("INSERT INTO t VALUES (-1, 'small')");
    integrity(&app);
    drop(app);
    let store = Store::open_for_writing(&test.file).unwrap();
    let mut group = Group::new();
    group.delete(store.find_name(b"ballast").unwrap().unwrap());
    group.remove_name(b"ballast");
    store.wait(store.submit(group).unwrap()).unwrap();
    drop(store);
    // A store never overwrites: VACUUM needs space for the pages that stay.
    let app = test.open("app.db");
    app.execute_batch("DELETE FROM t WHERE rowid > 100; VACUUM").unwrap();
    for _ in 0..committed / 200 {
        fill(&app, 200, 4).unwrap_or_else(|error| panic!("{error}: {}", last_error()));
    }
    integrity(&app);
    drop(app);
    integrity(&test.open("app.db"));
    test.check();
}
