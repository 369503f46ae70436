//! SlateDB, unmodified, with its tables and log in a store. `DRACONIS_SLATEDB_KILLS=100` kills its
//! process more often.

#[path = "../../../crates/object-store/tests/common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::TestStore;
use draconis_device::Random;
use draconis_object_store::DraconisStore;
use futures_util::TryStreamExt;
use object_store::ObjectStore;
use slatedb::admin::Admin;
use slatedb::config::{
    CompactionWorkerOptions, CompactorOptions, GarbageCollectorDirectoryOptions,
    GarbageCollectorOptions, Settings,
};
use slatedb::{CloseReason, Db, ErrorKind, WriteBatch};

/// Path of a store, for the test that is the writer of another one.
const WRITER: &str = "DRACONIS_SLATEDB_WRITER";
const TASKS: usize = 4;

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

/// Opens the database with small tables, so that they are flushed and compacted within a test.
async fn open(store: &DraconisStore) -> Db {
    let often = Duration::from_millis(20);
    let worker = CompactionWorkerOptions { compactions_poll_interval: often, ..Default::default() };
    let compactor = CompactorOptions {
        poll_interval: often,
        commit_compacted_interval: often,
        worker: Some(worker),
        ..CompactorOptions::default()
    };
    let settings = Settings {
        flush_interval: Some(Duration::from_millis(2)),
        manifest_poll_interval: often,
        l0_sst_size_bytes: 32 << 10,
        compactor_options: Some(compactor),
        garbage_collector_options: None,
        ..Settings::default()
    };
    Db::builder("db", Arc::new(store.clone())).with_settings(settings).build().await.unwrap()
}

async fn scan(db: &Db) -> Model {
    let mut pairs = db.scan::<std::ops::RangeFull>(..).await.unwrap();
    let mut found = Model::new();
    while let Some(pair) = pairs.next().await.unwrap() {
        found.insert(pair.key.to_vec(), pair.value.to_vec());
    }
    found
}

async fn count_objects(store: &DraconisStore) -> usize {
    store.list(None).try_collect::<Vec<_>>().await.unwrap().len()
}

/// Deletes what the database no longer refers to.
async fn collect_garbage(store: &DraconisStore) {
    let now = GarbageCollectorDirectoryOptions { min_age: Duration::ZERO, ..Default::default() };
    let options = GarbageCollectorOptions {
        manifest_options: Some(now),
        wal_options: Some(now),
        compacted_options: Some(now),
        compactions_options: Some(now),
        ..GarbageCollectorOptions::default()
    };
    let admin = Admin::builder("db", Arc::new(store.clone())).build();
    admin.run_gc_once(options).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn scans_and_gets_agree_with_a_model_after_each_opening() {
    let test = TestStore::create(64 << 20);
    let mut random = Random::new(1);
    let mut model = Model::new();
    for round in 0..4 {
        let store = test.open();
        let db = open(&store).await;
        assert_eq!(scan(&db).await, model, "round {round}");
        for nth in 0..400 {
            let key =
                |random: &mut Random| format!("key {:03}", random.next_below(300)).into_bytes();
            let mut batch = WriteBatch::new();
            for _ in 0..if nth % 20 == 0 { 10 } else { 1 } {
                let key = key(&mut random);
                if random.next_below(4) == 0 {
                    batch.delete(&key);
                    model.remove(&key);
                } else {
                    let mut value = vec![0; random.next_below(2000) as usize];
                    random.fill(&mut value);
                    batch.put(&key, &value);
                    model.insert(key, value);
                }
            }
            let written = db.write(batch).await.unwrap();
            if nth % 50 == 0 {
                written.await_durable().await.unwrap();
            }
            let key = key(&mut random);
            let found = db.get(&key).await.unwrap().map(|value| value.to_vec());
            assert_eq!(found.as_ref(), model.get(&key));
        }
        db.flush().await.unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while db.manifest().compacted().is_empty() {
            assert!(Instant::now() < until, "nothing was compacted");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(scan(&db).await, model, "round {round}");
        db.close().await.unwrap();
        drop(db);
        store.close().await.unwrap();
    }
    let store = test.open();
    let before = count_objects(&store).await;
    collect_garbage(&store).await;
    let after = count_objects(&store).await;
    assert!(after < before / 2, "{before} objects, {after} after the garbage collection");
    let db = open(&store).await;
    assert_eq!(scan(&db).await, model);
    db.close().await.unwrap();
    drop((db, store));
    test.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn second_writer_fences_the_first() {
    let test = TestStore::create(32 << 20);
    let store = test.open();
    let first = open(&store).await;
    first.put("a", "1").await.unwrap().await_durable().await.unwrap();
    let second = open(&store).await;
    let refused = async { first.put("a", "2").await?.await_durable().await }.await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Closed(CloseReason::Fenced), "{refused}");
    assert_eq!(second.get("a").await.unwrap().unwrap(), "1");
    second.put("a", "3").await.unwrap().await_durable().await.unwrap();
    second.close().await.unwrap();
    let _ = first.close().await;
    drop((first, second, store));
    let store = test.open();
    let db = open(&store).await;
    assert_eq!(db.get("a").await.unwrap().unwrap(), "3");
    db.close().await.unwrap();
    drop((db, store));
    test.check();
}

fn key(task: usize, nth: usize) -> String {
    format!("{task}/{nth:08}")
}

fn value(task: usize, nth: usize) -> Vec<u8> {
    let mut value = vec![0; 100 + nth * 37 % 900];
    Random::new((task << 32 | nth) as u64).fill(&mut value);
    value
}

/// Returns how many puts of each task are there, all of which must be whole and without a gap.
async fn count_puts(db: &Db) -> [usize; TASKS] {
    let mut counts = [0; TASKS];
    for (found, contents) in scan(db).await {
        let task = usize::from(found[0] - b'0');
        assert_eq!(String::from_utf8(found).unwrap(), key(task, counts[task]));
        assert!(contents == value(task, counts[task]), "{task}, {}", counts[task]);
        counts[task] += 1;
    }
    counts
}

/// Not a test but the process that is killed: it prints each put once it is durable.
#[tokio::test(flavor = "multi_thread")]
async fn writer() {
    let Some(file) = std::env::var_os(WRITER) else { return };
    let store = DraconisStore::open(file.as_ref()).unwrap();
    let db = open(&store).await;
    let counts = count_puts(&db).await;
    let tasks = (0..TASKS).map(|task| {
        let db = db.clone();
        tokio::spawn(async move {
            for nth in counts[task].. {
                let put = db.put(key(task, nth), value(task, nth)).await.unwrap();
                put.await_durable().await.unwrap();
                let mut out = std::io::stdout().lock();
                writeln!(out, "acknowledged {task} {nth}").unwrap();
                out.flush().unwrap();
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_writers_lose_nothing_that_they_acknowledged() {
    let runs = std::env::var("DRACONIS_SLATEDB_KILLS").map_or(4, |text| text.parse().unwrap());
    let test = TestStore::create(128 << 20);
    let mut random = Random::new(3);
    let mut acknowledged = [0; TASKS];
    for run in 0..runs {
        let mut writer = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "writer", "--nocapture"])
            .env(WRITER, &test.file)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(writer.stdout.take().unwrap()).lines();
        let mut seen = 0;
        let least = 1 + random.next_below(60);
        let mut killed = false;
        // What was printed before the kill, too.
        while let Some(Ok(line)) = lines.next() {
            let Some((_, numbers)) = line.split_once("acknowledged ") else { continue };
            let (task, nth) = numbers.split_once(' ').unwrap();
            acknowledged[task.parse::<usize>().unwrap()] = nth.parse::<usize>().unwrap() + 1;
            seen += 1;
            if seen >= least && !killed {
                std::thread::sleep(Duration::from_micros(random.next_below(20_000)));
                writer.kill().unwrap();
                killed = true;
            }
        }
        writer.wait().unwrap();
        assert!(killed, "run {run}: the writer ended by itself");
        let store = test.open();
        let db = open(&store).await;
        let counts = count_puts(&db).await;
        for (task, (found, wanted)) in counts.iter().zip(&acknowledged).enumerate() {
            // One more may have been durable before it was printed.
            assert!(found == wanted || *found == wanted + 1, "{task}: {found} of {wanted}");
        }
        acknowledged = counts;
        db.close().await.unwrap();
        drop((db, store));
        test.check();
    }
    eprintln!("{runs} kills, {} puts", acknowledged.iter().sum::<usize>());
}
