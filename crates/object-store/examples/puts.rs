//! Durable puts beside `LocalFileSystem` with `fsync`, in one run on one file system:
//!
//! ```sh
//! cargo run --release -p draconis-object-store --example puts -- DIRECTORY
//! ```

use std::path::Path as HostPath;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use draconis_object_store::{DraconisStore, NewStore};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

const STORE_BYTES: u64 = 2 << 30;
const ROUNDS: u32 = 5;

/// Puts of one round, for each client.
fn puts(len: usize) -> usize {
    if len > 1 << 20 { 2 } else { 16 }
}

/// Returns the time of a put of one client, and puts per second of all.
async fn measure(store: &Arc<dyn ObjectStore>, len: usize, clients: usize) -> (Duration, f64) {
    let contents = Bytes::from(vec![0x5a; len]);
    let began = Instant::now();
    let clients: Vec<_> = (0..clients)
        .map(|client| {
            let (store, contents) = (store.clone(), contents.clone());
            tokio::spawn(async move {
                for nth in 0..puts(len) {
                    let path = Path::from(format!("{len}/{client}/{nth}"));
                    store.put(&path, contents.clone().into()).await.unwrap();
                }
            })
        })
        .collect();
    let count = clients.len() * puts(len);
    for client in clients {
        client.await.unwrap();
    }
    let took = began.elapsed();
    (took / puts(len) as u32, count as f64 / took.as_secs_f64())
}

#[tokio::main]
async fn main() {
    let dir = std::env::args().nth(1).expect("a directory on the file system to measure");
    let dir = tempfile::tempdir_in(HostPath::new(&dir)).unwrap();
    let file = dir.path().join("objects.store");
    // Written once, so that no put waits for the allocation of the file.
    let new = NewStore { len_bytes: Some(STORE_BYTES), ..NewStore::default() };
    let ours: Arc<dyn ObjectStore> = Arc::new(DraconisStore::create(&file, &new).unwrap());
    let files = dir.path().join("files");
    std::fs::create_dir(&files).unwrap();
    let theirs = LocalFileSystem::new_with_prefix(&files).unwrap().with_fsync(true);
    let theirs: Arc<dyn ObjectStore> = Arc::new(theirs);
    println!("bytes\tclients\tDraconisStore\tLocalFileSystem with fsync\tratio of puts/s");
    for len in [1 << 10, 64 << 10, 8 << 20] {
        for clients in [1, 16] {
            let mut rounds = [vec![], vec![]];
            // In turn, so that both see the same load of the machine.
            for _ in 0..ROUNDS {
                for (store, rounds) in [&ours, &theirs].into_iter().zip(&mut rounds) {
                    rounds.push(measure(store, len, clients).await);
                }
            }
            let [ours, theirs] = rounds.map(|mut rounds| {
                rounds.sort_by(|a, b| a.1.total_cmp(&b.1));
                rounds[rounds.len() / 2]
            });
            let show = |(time, rate): (Duration, f64)| {
                format!("{:.2} ms, {rate:.0}/s", time.as_secs_f64() * 1000.0)
            };
            let ratio = ours.1 / theirs.1;
            println!("{len}\t{clients}\t{}\t{}\t{ratio:.2}", show(ours), show(theirs));
        }
    }
}
