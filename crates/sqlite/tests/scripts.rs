//! Random scripts, run on a database in a store and on one in a file: the same results.
//!
//! ```sh
//! DRACONIS_SQLITE_SCRIPTS=10000 cargo test -p draconis-sqlite --test main scripts::
//! ```

use crate::common;

use std::path::Path;
use std::sync::Arc;

use crate::common::buckets::TestBucket;
use crate::common::{Random, create_on, dump, integrity, share};
use draconis_device::MemoryDisk;
use draconis_objects::Store;
use draconis_objects::check::CheckOptions;
use draconis_sqlite::test_hooks::set_memory_limit;
use rusqlite::Connection;

const STATEMENTS: u64 = 40;

/// A connection with a second database attached.
fn open(main: &str, side: &str) -> Connection {
    let connection = Connection::open(main).unwrap();
    connection.execute_batch(&format!("ATTACH '{side}' AS side")).unwrap();
    connection
}

fn statement(random: &mut Random) -> String {
    let table = ["main.t", "main.u", "side.t"][random.below(3) as usize];
    let index = table.replace('.', "_");
    let (from, rows) = (random.below(200), random.below(60) + 1);
    let len = [10, 100, 900, 5000][random.below(4) as usize];
    let size = [512, 1024, 4096, 8192][random.below(4) as usize];
    let cache = [1, 5, 20, 2000][random.below(4) as usize];
    let select = format!(
        "WITH RECURSIVE n(i) AS (SELECT {from} UNION ALL SELECT i + 1 FROM n WHERE i < {from} + {rows})
         SELECT i, hex(zeroblob({len} / 2)) || {} FROM n",
        random.below(1000)
    );
    match random.below(40) {
        0..8 => format!("INSERT OR REPLACE INTO {table} {select}"),
        8..10 => format!("INSERT INTO {table} {select}"),
        10..14 => format!("UPDATE {table} SET b = b || a WHERE a % {rows} = 0"),
        14..18 => format!("DELETE FROM {table} WHERE a BETWEEN {from} AND {from} + {rows}"),
        18..21 => "BEGIN".into(),
        21 => "BEGIN IMMEDIATE".into(),
        22..24 => "COMMIT".into(),
        24..26 => "ROLLBACK".into(),
        26 => "SAVEPOINT s".into(),
        27 => "ROLLBACK TO s".into(),
        28 => "RELEASE s".into(),
        29 => format!("CREATE TABLE IF NOT EXISTS {table}(a INTEGER PRIMARY KEY, b)"),
        30 => match random.below(3) {
            0 => format!("DROP TABLE {table}"),
            _ => format!("CREATE INDEX IF NOT EXISTS main.{index} ON u(b)"),
        },
        31 => format!("PRAGMA {}.page_size={size}", table.split_once('.').unwrap().0),
        32 => format!("VACUUM {}", table.split_once('.').unwrap().0),
        33..35 => format!("PRAGMA {}.cache_size={cache}", table.split_once('.').unwrap().0),
        35 => {
            let mode = ["DELETE", "TRUNCATE", "PERSIST", "MEMORY"][random.below(4) as usize];
            format!("PRAGMA journal_mode={mode}")
        }
        36 => format!("PRAGMA synchronous={}", ["OFF", "FULL"][random.below(2) as usize]),
        37 => "PRAGMA main.auto_vacuum=INCREMENTAL".into(),
        38 => "PRAGMA main.incremental_vacuum(5)".into(),
        _ => format!("PRAGMA locking_mode={}", ["NORMAL", "EXCLUSIVE"][random.below(2) as usize]),
    }
}

/// Runs a script on a store in memory.
fn run_in_memory(seed: u64, dir: &Path) {
    let disk = Arc::new(MemoryDisk::new(vec![0; 32 << 20], 512));
    create_on(disk.clone());
    let name = format!("scripts-{seed}.store");
    let shared = share(&name, disk.clone());
    run_script(seed, dir, |file| common::uri(Path::new(&name), file));
    drop(shared);
    let report = Store::check(disk, &CheckOptions::default(), &mut |_, _| {}).unwrap();
    assert!(report.is_clean(), "seed {seed}: {:?}", report.damage);
}

/// Runs a script on databases of the store that `ours` names, and on files in `dir`.
fn run_script(seed: u64, dir: &Path, ours: impl Fn(&str) -> String) {
    let mut random = Random(seed);
    set_memory_limit(if seed.is_multiple_of(2) { 32 << 20 } else { 16 << 10 });
    let theirs = |file: &str| dir.join(format!("{seed}-{file}")).display().to_string();
    let connect = || [open(&ours("a.db"), &ours("b.db")), open(&theirs("a.db"), &theirs("b.db"))];
    let mut both = connect();
    let mut done = vec![];
    for nth in 0..STATEMENTS {
        let sql = match nth {
            0 => "CREATE TABLE main.t(a INTEGER PRIMARY KEY, b)".into(),
            1 => "CREATE TABLE side.t(a INTEGER PRIMARY KEY, b)".into(),
            _ => statement(&mut random),
        };
        let found = both
            .each_ref()
            .map(|connection| connection.execute_batch(&sql).map_err(|error| error.to_string()));
        done.push(sql);
        assert_eq!(found[0], found[1], "seed {seed}: {}", done.join(";\n"));
        if random.below(12) == 0 && both[0].is_autocommit() {
            drop(both);
            both = connect();
        }
        if random.below(4) == 0 || nth + 1 == STATEMENTS {
            for schema in ["main", "side"] {
                let found = both.each_ref().map(|connection| dump(connection, schema));
                assert!(found[0] == found[1], "seed {seed}, {schema}: {}", done.join(";\n"));
            }
        }
    }
    // What is open is rolled back.
    drop(both);
    let both = connect();
    for schema in ["main", "side"] {
        assert!(dump(&both[0], schema) == dump(&both[1], schema), "seed {seed}");
        assert_eq!(common::text(&both[0], &format!("PRAGMA {schema}.integrity_check")), "ok");
    }
    integrity(&both[0]);
    drop(both);
    for file in ["a.db", "b.db"] {
        let _ = std::fs::remove_file(theirs(file));
    }
}

#[test]
fn scripts_have_the_same_results_in_a_store_in_a_bucket_and_in_a_file() {
    draconis_testkit::in_own_process!();
    let number = |name: &str, default| {
        std::env::var(name).map_or(default, |text| text.parse::<u64>().unwrap())
    };
    let (first, count) =
        (number("DRACONIS_SQLITE_SEED", 1), number("DRACONIS_SQLITE_SCRIPTS", 200));
    // The files are not flushed: their judge is the same SQLite.
    let base = Path::new("/dev/shm");
    let dir = match base.is_dir() {
        true => tempfile::tempdir_in(base).unwrap(),
        false => tempfile::tempdir().unwrap(),
    };
    for seed in first..first + count {
        run_in_memory(seed, dir.path());
    }
    // In the same test: the memory limit is that of the process.
    for seed in first..first + count.div_ceil(100) {
        let bucket = TestBucket::create(64 << 20);
        run_script(seed, dir.path(), |file| bucket.uri(file, "&bucket_commit_ms=0"));
        let report = bucket.check();
        assert!(report.is_clean(), "seed {seed}: {:?}", report.damage);
    }
}
