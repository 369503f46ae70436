//! Commits, bulk loads and reads beside SQLite on files, in one run on one file system:
//!
//! ```sh
//! cargo run --release -p draconis-sqlite --example commits -- DIRECTORY [WORKLOAD]
//! ```

#[path = "../tests/common/mod.rs"]
mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use draconis_access::{NewStore, Store};
use rusqlite::{Connection, params};

const STORE_BYTES: u64 = 2 << 30;
const ROUNDS: usize = 5;
const COMMITS: u32 = 300;
const BULK_ROWS: u32 = 200_000;
const READS: u32 = 50_000;

/// One of the databases that are compared.
struct Contender {
    name: &'static str,
    connection: Connection,
}

/// Returns units per second.
fn rate(units: u32, took: Duration) -> f64 {
    f64::from(units) / took.as_secs_f64()
}

fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

/// Durable transactions that insert one row of 100 bytes.
fn inserts(db: &Connection, _: usize) -> rusqlite::Result<f64> {
    let mut insert = db.prepare("INSERT INTO small(b) VALUES (?1)")?;
    let began = Instant::now();
    for _ in 0..COMMITS {
        insert.execute([[b'x'; 100]])?;
    }
    Ok(rate(COMMITS, began.elapsed()))
}

/// Durable transactions that change three rows of a table with an index.
fn updates(db: &Connection, round: usize) -> rusqlite::Result<f64> {
    let mut update = db.prepare("UPDATE indexed SET b = ?2 WHERE a = ?1")?;
    let mut state = round as u64;
    let began = Instant::now();
    for _ in 0..COMMITS {
        db.execute_batch("BEGIN IMMEDIATE")?;
        for _ in 0..3 {
            let (row, value) = (random(&mut state) % 20_000, random(&mut state));
            update.execute(params![row as i64, value as i64])?;
        }
        db.execute_batch("COMMIT")?;
    }
    Ok(rate(COMMITS, began.elapsed()))
}

/// Rows of 100 bytes, in one transaction.
fn bulk(db: &Connection, round: usize) -> rusqlite::Result<f64> {
    let began = Instant::now();
    db.execute_batch(&format!("BEGIN; CREATE TABLE bulk{round}(a INTEGER PRIMARY KEY, b)"))?;
    let mut insert = db.prepare(&format!("INSERT INTO bulk{round} VALUES (?1, ?2)"))?;
    for row in 0..BULK_ROWS {
        insert.execute(params![row, [b'y'; 100]])?;
    }
    db.execute_batch("COMMIT")?;
    Ok(rate(BULK_ROWS, began.elapsed()))
}

/// Reads of random rows, each in a transaction of its own; most pages are not in SQLite's cache.
fn point_reads(db: &Connection, round: usize) -> rusqlite::Result<f64> {
    let mut select = db.prepare("SELECT b FROM bulk0 WHERE a = ?1")?;
    let mut state = round as u64;
    let began = Instant::now();
    for _ in 0..READS {
        let row = random(&mut state) % u64::from(BULK_ROWS);
        let len = select.query_row([row as i64], |row| Ok(row.get_ref(0)?.as_bytes()?.len()))?;
        assert_eq!(len, 100);
    }
    Ok(rate(READS, began.elapsed()))
}

/// Reads of random rows in one transaction.
fn reads_in_transaction(db: &Connection, round: usize) -> rusqlite::Result<f64> {
    db.execute_batch("BEGIN")?;
    let rate = point_reads(db, round)?;
    db.execute_batch("COMMIT")?;
    Ok(rate)
}

/// Rows of a table, in order.
fn scan(db: &Connection, _: usize) -> rusqlite::Result<f64> {
    let began = Instant::now();
    let sum: i64 = db.query_row("SELECT sum(length(b)) FROM bulk0", [], |row| row.get(0))?;
    assert_eq!(sum, i64::from(BULK_ROWS) * 100);
    Ok(rate(BULK_ROWS, began.elapsed()))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = std::env::args().nth(1).expect("a directory on the file system to measure");
    // Reads need the table of the bulk load.
    let wanted = std::env::args().nth(2);
    let dir = tempfile::tempdir_in(Path::new(&dir))?;
    common::register();
    println!("SQLite {}", rusqlite::version());
    let store = dir.path().join("things.store");
    // Written once, so that no commit waits for the allocation of the file.
    Store::create(&store, &NewStore { len_bytes: Some(STORE_BYTES), ..NewStore::default() })?;
    let open = |name: &'static str, path: String, pragma: &str| -> rusqlite::Result<Contender> {
        let connection = Connection::open(path)?;
        connection.execute_batch(&format!(
            "{pragma}; PRAGMA synchronous=FULL; CREATE TABLE small(a INTEGER PRIMARY KEY, b);
             CREATE TABLE indexed(a INTEGER PRIMARY KEY, b); CREATE INDEX i ON indexed(b);
             WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 19999)
             INSERT INTO indexed SELECT i, random() FROM n"
        ))?;
        Ok(Contender { name, connection })
    };
    let file = |name: &str| dir.path().join(name).display().to_string();
    let all = [
        open("store", format!("file:app.db?vfs=draconis&store={}", store.display()), "")?,
        open("file, WAL", file("wal.db"), "PRAGMA journal_mode=WAL")?,
        open("file, rollback journal", file("rollback.db"), "PRAGMA journal_mode=DELETE")?,
    ];
    println!(
        "units per second\t{}\tratio to the better file",
        all.each_ref().map(|one| one.name).join("\t")
    );
    type Workload = fn(&Connection, usize) -> rusqlite::Result<f64>;
    for (name, workload) in [
        ("commits of one row", inserts as Workload),
        ("commits of three updates", updates),
        ("rows of a bulk load", bulk),
        ("point reads", point_reads),
        ("point reads in a transaction", reads_in_transaction),
        ("rows of a scan", scan),
    ] {
        if wanted.as_ref().is_some_and(|wanted| !name.contains(wanted)) {
            continue;
        }
        let mut rates = [const { vec![] }; 3];
        // In turn, so that all see the same load of the machine.
        for round in 0..ROUNDS {
            for (one, rates) in all.iter().zip(&mut rates) {
                rates.push(workload(&one.connection, round)?);
            }
        }
        let medians = rates.map(|mut rates| {
            rates.sort_by(f64::total_cmp);
            rates[rates.len() / 2]
        });
        let shown = medians.map(|rate| format!("{rate:.0}")).join("\t");
        println!("{name}\t{shown}\t{:.2}", medians[0] / medians[1].max(medians[2]));
    }
    Ok(())
}
