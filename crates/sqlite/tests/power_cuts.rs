//! Random transactions over two databases, cut off by power cuts at every flush interval:
//!
//! ```sh
//! DRACONIS_SQLITE_SEED=1 DRACONIS_SQLITE_RUNS=100 DRACONIS_SQLITE_SUBSETS=8 \
//!     cargo test -p draconis-sqlite --test main power_cuts:: -- --nocapture
//! ```
//!
//! ```text
//!   seed ─▶ pragmas, transactions ─▶ SQLite ─▶ recorded disk      marks: begun, durable
//!               │                                   │
//!            history of contents          states that a power cut can leave
//!               └──────────── judge ◀─ open, integrity_check, dump ─┘
//! ```
//!
//! Law 1: a state has the contents after one transaction of the history: at least the newest
//! durable one, at most the newest begun one.
//! Law 2: `synchronous` FULL, EXTRA and NORMAL make a transaction and all before it durable. OFF
//! may lose the newest ones.
//! Law 3: two databases agree, unless SQLite uses no super-journal (`synchronous=OFF`,
//! `journal_mode=MEMORY`). Then the main database may be one transaction ahead.
//! Law 4: a power cut while a store is opened after a power cut changes nothing.

use std::sync::Arc;

use crate::common::cuts::{Contents, connect, contents, record_new_store, recover};
use crate::common::{Random, share};
use draconis_device::MemoryDisk;
use draconis_sqlite::test_hooks::{set_memory_limit, set_split_commits};
use draconis_testkit::{CrashOptions, CrashStates, RecordDisk};
use rusqlite::{Connection, ErrorCode};

const DISK_BYTES: usize = 16 << 20;
const TRANSACTIONS: u64 = 24;
/// One in so many states is cut off again while the store is opened.
const SECOND_CUTS: u64 = 64;

fn pick<T: Copy>(random: &mut Random, from: &[T]) -> T {
    from[random.below(from.len() as u64) as usize]
}

fn change(random: &mut Random, table: &str) -> String {
    let (from, rows) = (random.below(120), random.below(40) + 1);
    let len = pick(random, &[5, 60, 400, 1500]);
    let (to, tag) = (from + rows, random.below(1000));
    let select = format!(
        "WITH RECURSIVE n(i) AS (SELECT {from} UNION ALL SELECT i + 1 FROM n WHERE i < {to})
         SELECT i, hex(zeroblob({len})) || {tag} FROM n"
    );
    match random.below(12) {
        0..5 => format!("INSERT OR REPLACE INTO {table} {select}"),
        // May fail half way.
        5..7 => format!("INSERT INTO {table} {select}"),
        7..10 => format!("UPDATE {table} SET b = {tag} || substr(b, 4) WHERE a % {rows} = 0"),
        10 => format!("DELETE FROM {table} WHERE a BETWEEN {from} AND {to}"),
        _ => format!("DELETE FROM {table} WHERE a > {from}"),
    }
}

/// Settings of both databases, which hold until they are set again.
#[derive(Clone, Copy)]
struct Modes {
    synchronous: &'static str,
    journal: &'static str,
}

impl Modes {
    /// True if SQLite commits each of several databases by itself.
    fn is_without_super_journal(self) -> bool {
        self.synchronous == "OFF" || self.journal == "MEMORY"
    }

    fn choose(random: &mut Random) -> Self {
        Self {
            synchronous: pick(random, &["FULL", "FULL", "FULL", "EXTRA", "NORMAL", "OFF"]),
            journal: pick(random, &["DELETE", "DELETE", "TRUNCATE", "PERSIST", "MEMORY"]),
        }
    }

    fn set(self, connection: &Connection) {
        for schema in ["main", "side"] {
            let Self { synchronous, journal } = self;
            connection
                .execute_batch(&format!(
                    "PRAGMA {schema}.synchronous={synchronous};
                     PRAGMA {schema}.journal_mode={journal}"
                ))
                .unwrap();
        }
    }
}

/// Statements that commit once at most.
fn transaction(random: &mut Random) -> Vec<String> {
    let schema = pick(random, &["main", "side"]);
    let (table, other) = (format!("{schema}.t"), pick(random, &["main.t", "main.u", "side.t"]));
    let mut inner = vec![];
    match random.below(20) {
        0 => {
            let size = pick(random, &[512, 1024, 4096, 8192, 32768]);
            return vec![format!("PRAGMA {schema}.page_size={size}"), format!("VACUUM {schema}")];
        }
        1 => return vec![format!("VACUUM {schema}")],
        2 => return vec![format!("PRAGMA {schema}.incremental_vacuum({})", random.below(9))],
        3 => return vec![format!("CREATE INDEX IF NOT EXISTS {schema}.x ON t(b)")],
        4 => return vec![format!("DROP INDEX IF EXISTS {schema}.x")],
        5..8 => return vec![change(random, &table)],
        8 => {
            inner.push("DROP TABLE main.u".into());
            inner.push("CREATE TABLE main.u(a INTEGER PRIMARY KEY, b)".into());
            inner.push(change(random, "main.u"));
        }
        9..12 => {
            inner.push(change(random, &table));
            inner.push("SAVEPOINT s".into());
            inner.push(change(random, other));
            inner.push(change(random, &table));
            inner.push(pick(random, &["ROLLBACK TO s", "RELEASE s"]).into());
            inner.push(change(random, other));
        }
        _ => {
            inner.push(change(random, "main.t"));
            inner.push(change(random, "side.t"));
            (0..random.below(3)).for_each(|_| inner.push(change(random, other)));
        }
    }
    inner.insert(0, "BEGIN".into());
    inner.push(if random.below(6) == 0 { "ROLLBACK".into() } else { "COMMIT".into() });
    inner
}

/// Contents after each commit, and the events of the disk.
struct Recorded {
    image: Vec<u8>,
    events: Vec<draconis_testkit::Event>,
    history: Vec<Contents>,
    statements: Vec<String>,
}

/// Marks have two kinds: contents that may be there from now on, and contents that are durable.
fn begun(index: usize) -> u64 {
    index as u64 * 2
}

fn durable(index: usize) -> u64 {
    begun(index) + 1
}

fn record(seed: u64) -> Recorded {
    let mut random = Random(seed);
    set_memory_limit(pick(&mut random, &[8 << 10, 24 << 10, 64 << 10, 32 << 20]));
    let (disk, image) = record_new_store(DISK_BYTES);
    let name = format!("seed-{seed}.store");
    let shared = share(&name, disk.clone());
    let mut modes = Modes { synchronous: "FULL", journal: "DELETE" };
    let settings: String = ["main", "side"]
        .iter()
        .map(|schema| {
            let pages = pick(&mut random, &[512, 1024, 2048, 4096, 4096, 16384]);
            let cache = pick(&mut random, &[1, 5, 20, 2000]);
            let vacuum = pick(&mut random, &["NONE", "NONE", "FULL", "INCREMENTAL"]);
            format!(
                "PRAGMA {schema}.page_size={pages}; PRAGMA {schema}.cache_size={cache};
                 PRAGMA {schema}.auto_vacuum={vacuum};"
            )
        })
        .collect();
    let locking = pick(&mut random, &["NORMAL", "NORMAL", "EXCLUSIVE"]);
    let settings = format!("{settings} PRAGMA locking_mode={locking};");
    let open = |modes: Modes| {
        let connection = connect(&name).unwrap();
        connection.execute_batch(&settings).unwrap();
        modes.set(&connection);
        connection
    };
    let mut connection = open(modes);
    let mut history = vec![contents(&connection)];
    let mut statements = vec![settings.clone()];
    let creations = ["main.t", "main.u", "side.t"]
        .map(|table| vec![format!("CREATE TABLE {table}(a INTEGER PRIMARY KEY, b)")]);
    let mut creations = creations.into_iter();
    for nth in 0..TRANSACTIONS {
        let transaction = creations.next().unwrap_or_else(|| transaction(&mut random));
        if nth > 3 && random.below(4) == 0 {
            modes = Modes::choose(&mut random);
            modes.set(&connection);
            statements.push(format!("-- {}, {}", modes.synchronous, modes.journal));
        }
        // Only one of the two databases may have it for a moment.
        let both = history.len() + usize::from(modes.is_without_super_journal());
        disk.record_mark(begun(both));
        for sql in &transaction {
            let done = connection.execute_batch(sql);
            let code = done.as_ref().err().and_then(rusqlite::Error::sqlite_error_code);
            assert!(
                done.is_ok() || code == Some(ErrorCode::ConstraintViolation),
                "seed {seed}, {sql}: {done:?}"
            );
        }
        statements.extend(transaction);
        assert!(connection.is_autocommit());
        let before = history[history.len() - 1].clone();
        let after = contents(&connection);
        if both > history.len() {
            history.push([after[0].clone(), before[1].clone()]);
        }
        history.push(after.clone());
        // What changed nothing waits for nothing.
        if modes.synchronous != "OFF" && after != before {
            disk.record_mark(durable(history.len() - 1));
        }
        if random.below(8) == 0 {
            drop(connection);
            connection = open(modes);
            statements.push("-- opened again".into());
        }
    }
    drop((connection, shared));
    Recorded { image, events: disk.take_events(), history, statements }
}

#[derive(Default)]
struct Tally {
    states: u64,
    second_cuts: u64,
    wrong: Vec<String>,
}

/// Judges the states of one seed.
fn judge(seed: u64, subsets: u32, tally: &mut Tally) {
    let Recorded { image, events, history, statements } = record(seed);
    let options = CrashOptions { seed, subsets, exhaustive_sectors: 3 };
    for (nth, crash) in CrashStates::new(image, events, options).enumerate() {
        let newest = |kind: u64| {
            let marks = crash.marks().iter().filter(|mark| *mark % 2 == kind);
            marks.max().map_or(0, |mark| *mark as usize / 2)
        };
        let (least, most) = (newest(1), newest(0).min(history.len() - 1));
        let again = (nth as u64).is_multiple_of(SECOND_CUTS).then(|| crash.disk.to_bytes());
        tally.states += 1;
        let wrong = match recover(crash.disk.clone()) {
            Err(error) => Some(error),
            Ok(found) if !history[least..=most].contains(&found) => {
                let at = history.iter().position(|contents| *contents == found);
                Some(format!("contents {at:?}, {least} to {most} are right: {found:?}"))
            }
            Ok(found) => again.and_then(|image| cut_again(image, seed, &found, tally)),
        };
        if let Some(wrong) = wrong {
            let kind = crash.kind;
            let script = statements.join(";\n");
            tally.wrong.push(format!("seed {seed}, state {nth}, {kind:?}: {wrong}\n{script}"));
        }
    }
}

/// Cuts the recovery off; returns what is wrong then.
fn cut_again(image: Vec<u8>, seed: u64, wanted: &Contents, tally: &mut Tally) -> Option<String> {
    let disk = Arc::new(RecordDisk::new(MemoryDisk::new(image.clone(), 512)));
    recover(disk.clone()).unwrap();
    let options = CrashOptions { seed, subsets: 2, exhaustive_sectors: 3 };
    CrashStates::new(image, disk.take_events(), options).find_map(|crash| {
        tally.states += 1;
        tally.second_cuts += 1;
        match recover(crash.disk.clone()) {
            Ok(found) if found == *wanted => None,
            other => Some(format!("cut off again, {:?}: {other:?}", crash.kind)),
        }
    })
}

/// All in one test: limits and hooks are those of the process.
#[test]
fn every_power_cut_leaves_a_transaction_of_the_history() {
    draconis_testkit::in_own_process!();
    let number = |name: &str, default| {
        std::env::var(name).map_or(default, |text| text.parse::<u64>().unwrap())
    };
    let (first, runs) = (number("DRACONIS_SQLITE_SEED", 1), number("DRACONIS_SQLITE_RUNS", 2));
    let subsets = number("DRACONIS_SQLITE_SUBSETS", 1) as u32;
    let mut tally = Tally::default();
    for seed in first..first + runs {
        judge(seed, subsets, &mut tally);
    }
    let Tally { states, second_cuts, wrong } = tally;
    eprintln!(
        "seeds {first} to {}: {states} states, {second_cuts} of them after a second cut, {} wrong",
        first + runs - 1,
        wrong.len()
    );
    assert!(wrong.is_empty(), "{} of {states}: {}", wrong.len(), wrong[0]);
    assert!(states > runs * 100 && second_cuts > 0, "{states} states, {second_cuts} second cuts");
    // A commit in two groups is found.
    set_split_commits(true);
    let mut split = Tally::default();
    (first..first + runs.min(4)).for_each(|seed| judge(seed, subsets, &mut split));
    set_split_commits(false);
    assert!(!split.wrong.is_empty(), "{} states", split.states);
    eprintln!("split commits: {} wrong of {} states", split.wrong.len(), split.states);
}
