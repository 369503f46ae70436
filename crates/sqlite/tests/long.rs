//! Transactions that do not fit memory, in a process of their own.

use std::sync::Arc;

use crate::common::{TestStore, integrity, text};
use draconis_device::{FileOptions, OpenedFile};
use draconis_objects::{OpenOptions, Store};
use draconis_sqlite::share_store;
use draconis_sqlite::test_hooks::{set_cache_limit, set_memory_limit};

/// Returns the largest resident memory so far.
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn insert(rows: u32) -> String {
    format!(
        "CREATE TABLE t(a INTEGER PRIMARY KEY, b);
         WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
         INSERT INTO t SELECT i, randomblob(1000) FROM n"
    )
}

/// All in one test: the limit is that of the process.
#[test]
fn long_transactions_go_on_in_the_store() {
    draconis_testkit::in_own_process!();
    let test = TestStore::create(512 << 20);
    set_memory_limit(1 << 20);
    set_cache_limit(8 << 20);
    let file = std::fs::File::options().read(true).write(true).open(&test.file).unwrap();
    let options = FileOptions { write: true, direct: true, uring: true };
    let disk = OpenedFile::new(file.into(), options).unwrap().start();
    let options = OpenOptions { cache_bytes: 1 << 20, read_only: false };
    let store = Store::open(Arc::new(disk), &options).unwrap();
    let counted = store.clone();
    let shared = share_store(&test.file, store).unwrap();
    let app = test.open("app.db");
    let before = peak_kib();
    app.execute_batch(&insert(72_000)).unwrap();
    let grown = peak_kib() - before;
    // The database has 76 MiB. What the store queues and caches needs memory, too.
    assert!(grown < 60 << 10, "{grown} KiB");
    assert_eq!(text(&app, "SELECT count(*) FROM t"), "72000");
    // A scan within a long transaction reads several pages at once: the database has 24,000.
    app.execute_batch("BEGIN; UPDATE t SET b = randomblob(1000) WHERE a < 5000").unwrap();
    let before = counted.info().cache.misses;
    assert_eq!(text(&app, "SELECT sum(length(b)) FROM t"), "72000000");
    let reads = counted.info().cache.misses - before;
    assert!(reads < 6000, "{reads} reads");
    app.execute_batch("COMMIT").unwrap();
    drop((app, shared, counted));
    test.check();

    // Rolled back, over a savepoint, and after changing every page.
    set_memory_limit(256 << 10);
    let app = test.open("small.db");
    app.execute_batch(&insert(8000)).unwrap();
    let sum = "SELECT sum(a * length(b)) FROM t";
    let is = text(&app, sum);
    app.execute_batch(
        "PRAGMA cache_size=20; BEGIN; UPDATE t SET b = a; SAVEPOINT s; DELETE FROM t; ROLLBACK TO s",
    )
    .unwrap();
    assert_eq!(text(&app, "SELECT count(*) FROM t WHERE a = b"), "8000");
    app.execute_batch("ROLLBACK").unwrap();
    assert_eq!(text(&app, sum), is);
    integrity(&app);
    // A snapshot, a long change over it, and one more.
    app.execute_batch("PRAGMA draconis_snapshot = 'before'").unwrap();
    app.execute_batch("UPDATE t SET b = randomblob(900) WHERE a % 2 = 0").unwrap();
    app.execute_batch("DELETE FROM t WHERE a > 5000; VACUUM").unwrap();
    integrity(&app);
    assert_eq!(text(&test.open("small.db@before"), sum), is);
    // Two in one transaction.
    app.execute_batch(&format!(
        "ATTACH '{}' AS other; CREATE TABLE other.t(a INTEGER PRIMARY KEY, b);
         BEGIN; INSERT INTO other.t SELECT * FROM main.t; DELETE FROM main.t WHERE a > 9; COMMIT",
        test.uri("other.db")
    ))
    .unwrap();
    assert_eq!(text(&app, "SELECT count(*) FROM other.t"), "5000");
    assert_eq!(text(&app, "SELECT count(*) FROM main.t"), "9");
    drop(app);
    for name in ["small.db", "other.db", "small.db@before"] {
        integrity(&test.open(name));
    }
    test.check();
}
