//! Power cuts and disk errors: what was committed is there, and nothing of what was not.

use std::sync::Arc;

use crate::common::cuts::{Contents, connect, contents, record_new_store, recover};
use crate::common::{create_on, share, text};
use draconis_device::MemoryDisk;
use draconis_sqlite::test_hooks::{set_memory_limit, set_split_commits};
use draconis_testkit::{CrashOptions, CrashStates, Fault, FaultDisk, FaultTarget};
use rusqlite::Connection;

const DISK_BYTES: usize = 16 << 20;

/// Transactions, each of which is there as a whole or not at all.
fn transactions() -> Vec<String> {
    let insert = |table: &str, from: u32, rows: u32, len: u32| {
        format!(
            "WITH RECURSIVE n(i) AS (SELECT {from} UNION ALL SELECT i + 1 FROM n WHERE i < {from} + {rows})
             INSERT OR REPLACE INTO {table} SELECT i, hex(zeroblob({len})) || {from} FROM n"
        )
    };
    let both = |sql: String| format!("BEGIN; {sql}; UPDATE side.t SET b = a || 'x'; COMMIT");
    vec![
        "CREATE TABLE main.t(a INTEGER PRIMARY KEY, b)".into(),
        "CREATE TABLE side.t(a INTEGER PRIMARY KEY, b)".into(),
        insert("main.t", 1, 30, 40),
        insert("side.t", 1, 5, 40),
        both(insert("main.t", 10, 30, 100)),
        "UPDATE main.t SET b = 'short' WHERE a % 3 = 0".into(),
        // Longer than fits memory.
        insert("main.t", 20, 60, 600),
        both(insert("main.t", 1, 50, 600)),
        both("DELETE FROM main.t WHERE a > 20".into()),
        "VACUUM main".into(),
        insert("main.t", 100, 10, 2000),
    ]
}

/// Runs the transactions over a disk that records, and returns the number of states that a power
/// cut can leave, and of those that lack something.
fn cut_everywhere(name: &str, prepare: &str, subsets: u32) -> (usize, Vec<String>) {
    let (disk, image) = record_new_store(DISK_BYTES);
    let shared = share(name, disk.clone());
    let connection = connect(name).unwrap();
    connection.execute_batch(prepare).unwrap();
    let mut history = vec![contents(&connection)];
    for sql in transactions() {
        connection.execute_batch(&sql).unwrap();
        history.push(contents(&connection));
        disk.record_mark(history.len() as u64 - 1);
        // Nothing of it is seen.
        connection.execute_batch("BEGIN; DELETE FROM main.t; ROLLBACK").unwrap();
    }
    drop((connection, shared));
    let options = CrashOptions { seed: 7, subsets, exhaustive_sectors: 0 };
    let (mut states, mut wrong) = (0, vec![]);
    for crash in CrashStates::new(image, disk.take_events(), options) {
        let least = crash.marks().last().map_or(0, |mark| *mark as usize);
        states += 1;
        match recover(crash.disk.clone()) {
            // The transaction that was in progress may be there.
            Ok(found) if history[least..].iter().take(2).any(|wanted| *wanted == found) => {}
            Ok(found) => wrong.push(format!("{:?} after {least}: {found:?}", crash.kind)),
            Err(error) => wrong.push(format!("{:?} after {least}: {error}", crash.kind)),
        }
    }
    (states, wrong)
}

/// All in one test: limits and hooks are those of the process.
#[test]
fn every_power_cut_leaves_whole_transactions() {
    draconis_testkit::in_own_process!();
    set_memory_limit(24 << 10);
    let subsets = std::env::var("DRACONIS_SQLITE_SUBSETS").map_or(1, |text| text.parse().unwrap());
    let (states, wrong) = cut_everywhere("cuts.store", "", subsets);
    assert!(wrong.is_empty(), "{} of {states}: {}", wrong.len(), wrong[0]);
    assert!(states > 50, "{states} states");
    eprintln!("{states} states after power cuts");
    // A commit in two groups is found.
    set_split_commits(true);
    let (states, wrong) = cut_everywhere("split.store", "", subsets);
    set_split_commits(false);
    assert!(!wrong.is_empty(), "{states} states");
    eprintln!("split commits: {} wrong of {states} states", wrong.len());

    disk_errors_at_every_write();
}

fn disk_errors_at_every_write() {
    for flushes in [false, true] {
        let mut failures = 0;
        for nth in 0.. {
            let disk = Arc::new(FaultDisk::new(MemoryDisk::new(vec![0; DISK_BYTES], 512)));
            create_on(disk.clone());
            let name = format!("faults-{flushes}-{nth}.store");
            let shared = share(&name, disk.clone());
            let connection = connect(&name).unwrap();
            let (mut history, mut acknowledged) = (vec![contents(&connection)], 0);
            let fault = if nth % 2 == 0 { Fault::Fail } else { Fault::Break { kept_writes: 1 } };
            // Those of the creation were counted, too.
            let request = disk.request_count() + nth;
            if !flushes {
                disk.add_fault(FaultTarget::Request(request), fault);
            }
            let mut error = None;
            for (index, sql) in transactions().iter().enumerate() {
                if flushes && index as u64 == nth {
                    disk.add_fault(FaultTarget::Flushes, Fault::Fail);
                }
                match connection.execute_batch(sql) {
                    Ok(()) if error.is_none() => {
                        history.push(contents(&connection));
                        acknowledged = history.len() - 1;
                    }
                    // Later transactions are refused, or have no effect.
                    Ok(()) => {}
                    Err(found) => {
                        let _ = connection.execute_batch("ROLLBACK");
                        error.get_or_insert(found);
                    }
                }
            }
            drop((connection, shared));
            disk.clear_faults();
            let is_over = match flushes {
                false => disk.request_count() <= request,
                true => nth as usize >= transactions().len(),
            };
            failures += usize::from(error.is_some());
            let bytes = Arc::into_inner(disk).unwrap().into_inner().into_bytes();
            let found = recover(Arc::new(MemoryDisk::new(bytes, 512))).unwrap();
            let next = expected_next(&history[acknowledged], acknowledged);
            assert!(
                found == history[acknowledged] || Some(&found) == next.as_ref(),
                "{fault:?} at {nth}, {error:?}, acknowledged {acknowledged}: {found:?}"
            );
            if is_over {
                break;
            }
            assert!(nth < 2000);
        }
        assert!(failures > 5, "{failures}");
        eprintln!("{failures} runs with disk errors, flushes: {flushes}");
    }
}

/// Returns the contents after one more transaction.
fn expected_next(now: &Contents, acknowledged: usize) -> Option<Contents> {
    let memory = Connection::open_in_memory().unwrap();
    memory.execute_batch("ATTACH ':memory:' AS side").unwrap();
    for sql in transactions().iter().take(acknowledged).filter(|sql| !sql.starts_with("VACUUM")) {
        memory.execute_batch(sql).unwrap();
    }
    assert_eq!(contents(&memory), *now);
    let next = transactions().into_iter().nth(acknowledged)?;
    memory.execute_batch(&next).unwrap();
    Some(contents(&memory))
}

#[test]
fn the_text_of_an_error_of_the_disk_is_kept() {
    draconis_testkit::in_own_process!();
    let disk = Arc::new(FaultDisk::new(MemoryDisk::new(vec![0; DISK_BYTES], 512)));
    create_on(disk.clone());
    let shared = share("error.store", disk.clone());
    let connection = connect("error.store").unwrap();
    disk.add_fault(FaultTarget::Flushes, Fault::Fail);
    let found = connection.execute_batch("CREATE TABLE t(a)").unwrap_err();
    assert!(found.to_string().contains("disk I/O error"), "{found}");
    assert!(text(&connection, "SELECT draconis_error()").starts_with("error.store: "));
    drop((connection, shared));
}
