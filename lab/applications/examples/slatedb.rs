//! SlateDB on `DraconisStore` beside `LocalFileSystem` with `fsync`, in one run on one file system:
//!
//! ```sh
//! cargo run --release --manifest-path lab/applications/Cargo.toml --target-dir target/applications --example slatedb -- DIRECTORY
//! ```

use std::path::Path as HostPath;
use std::sync::Arc;
use std::time::{Duration, Instant};

use draconis_device::Random;
use draconis_object_store::{DraconisStore, NewStore};
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use slatedb::Db;
use slatedb::config::Settings;

const STORE_BYTES: u64 = 2 << 30;
const ROUNDS: u64 = 5;
const VALUE_BYTES: usize = 1000;
const DURABLE_PUTS: u64 = 100;
const LOADED: u64 = 20_000;
const GETS: u64 = 1000;

async fn open(objects: Arc<dyn ObjectStore>) -> Db {
    let settings = Settings {
        // SlateDB writes its log this often; the rest of a put's time is the object store's.
        flush_interval: Some(Duration::from_millis(1)),
        l0_sst_size_bytes: 8 << 20,
        garbage_collector_options: None,
        ..Settings::default()
    };
    Db::builder("db", objects).with_settings(settings).build().await.unwrap()
}

/// Runs `tasks` tasks that each call `work` with numbers of their own, and returns calls per second.
async fn rate<F>(tasks: u64, calls: u64, work: impl Fn(u64) -> F + Clone + Send + 'static) -> f64
where
    F: Future<Output = ()> + Send,
{
    let began = Instant::now();
    let running = (0..tasks).map(|task| {
        let work = work.clone();
        tokio::spawn(async move {
            for nth in 0..calls {
                work(task * calls + nth).await;
            }
        })
    });
    for one in running.collect::<Vec<_>>() {
        one.await.unwrap();
    }
    (tasks * calls) as f64 / began.elapsed().as_secs_f64()
}

fn value(seed: u64) -> Vec<u8> {
    let mut value = vec![0; VALUE_BYTES];
    Random::new(seed).fill(&mut value);
    value
}

async fn durable_puts(db: Db, round: u64, tasks: u64) -> f64 {
    rate(tasks, DURABLE_PUTS, move |nth| {
        let db = db.clone();
        async move {
            let put = db.put(format!("{round}/{tasks}/{nth}"), value(nth)).await.unwrap();
            put.await_durable().await.unwrap();
        }
    })
    .await
}

async fn load(db: Db, round: u64) -> f64 {
    let began = Instant::now();
    for nth in 0..LOADED {
        db.put(format!("load/{nth:06}"), value(nth + round)).await.unwrap();
    }
    db.flush().await.unwrap();
    LOADED as f64 / began.elapsed().as_secs_f64()
}

/// Gets of random keys; SlateDB has no cache of its own here.
async fn gets(db: Db, round: u64, tasks: u64) -> f64 {
    rate(tasks, GETS, move |nth| {
        let db = db.clone();
        async move {
            let key = Random::new(nth ^ round << 32).next_below(LOADED);
            let found = db.get(format!("load/{key:06}")).await.unwrap().unwrap();
            assert_eq!(found.len(), VALUE_BYTES);
        }
    })
    .await
}

async fn scan(db: Db) -> f64 {
    let began = Instant::now();
    let mut pairs = db.scan_prefix("load/", ..).await.unwrap();
    let mut found = 0;
    while pairs.next().await.unwrap().is_some() {
        found += 1;
    }
    assert_eq!(found, LOADED);
    LOADED as f64 / began.elapsed().as_secs_f64()
}

#[tokio::main]
async fn main() {
    let dir = std::env::args().nth(1).expect("a directory on the file system to measure");
    let dir = tempfile::tempdir_in(HostPath::new(&dir)).unwrap();
    let file = dir.path().join("objects.store");
    // Written once, so that no put waits for the allocation of the file.
    let new = NewStore { len_bytes: Some(STORE_BYTES), ..NewStore::default() };
    let ours = Arc::new(DraconisStore::create(&file, &new).unwrap());
    let files = dir.path().join("files");
    std::fs::create_dir(&files).unwrap();
    let theirs = LocalFileSystem::new_with_prefix(&files).unwrap().with_fsync(true);
    let both = [open(ours).await, open(Arc::new(theirs)).await];
    println!("per second\tDraconisStore\tLocalFileSystem with fsync\tratio");
    for what in [
        "durable puts, 1 task",
        "durable puts, 16 tasks",
        "loaded puts",
        "gets, 1 task",
        "gets, 16 tasks",
        "scanned pairs",
    ] {
        let mut rounds = [vec![], vec![]];
        // In turn, so that both see the same load of the machine.
        for round in 0..ROUNDS {
            for (db, rounds) in both.iter().zip(&mut rounds) {
                let db = db.clone();
                rounds.push(match what {
                    "durable puts, 1 task" => durable_puts(db, round, 1).await,
                    "durable puts, 16 tasks" => durable_puts(db, round, 16).await,
                    "loaded puts" => load(db, round).await,
                    "gets, 1 task" => gets(db, round, 1).await,
                    "gets, 16 tasks" => gets(db, round, 16).await,
                    _ => scan(db).await,
                });
            }
        }
        let [ours, theirs] = rounds.map(|mut rounds| {
            rounds.sort_by(f64::total_cmp);
            rounds[rounds.len() / 2]
        });
        println!("{what}\t{ours:.0}\t{theirs:.0}\t{:.2}", ours / theirs);
    }
    for db in both {
        db.close().await.unwrap();
    }
}
