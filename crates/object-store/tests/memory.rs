//! Memory of long objects, in a process of its own.

use std::sync::Arc;

use crate::common::TestStore;
use draconis_access::stores;
use draconis_device::{FileOptions, OpenedFile};
use draconis_object_store::DraconisStore;
use draconis_objects::{OpenOptions, Store};
use futures_util::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};

const OBJECT_BYTES: usize = 256 << 20;
const PART_BYTES: usize = 4 << 20;
/// 64 MiB that wait for the disk, the commit that is gathered, and parts in progress.
const MAX_GROWTH_KIB: u64 = 144 << 10;

/// Returns the largest resident memory so far.
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn long_and_empty_objects_need_little_memory() {
    draconis_testkit::in_own_process!();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(use_long_and_empty_objects());
}

async fn use_long_and_empty_objects() {
    let test = TestStore::create(900 << 20);
    let file = std::fs::File::options().read(true).write(true).open(&test.file).unwrap();
    let options = FileOptions { write: true, direct: true, uring: true };
    let disk = OpenedFile::new(file.into(), options).unwrap().start();
    let options = OpenOptions { cache_bytes: 1 << 20, read_only: false };
    let store = DraconisStore::from_store(Store::open(Arc::new(disk), &options).unwrap()).unwrap();
    let path = Path::from("long");
    let before = peak_kib();
    let mut upload = store.put_multipart(&path).await.unwrap();
    for nth in 0..OBJECT_BYTES / PART_BYTES {
        let part = vec![nth as u8 + 1; PART_BYTES];
        upload.put_part(part.into()).await.unwrap();
    }
    upload.complete().await.unwrap();
    let mut at = 0;
    let mut stream = store.get(&path).await.unwrap().into_stream();
    while let Some(piece) = stream.try_next().await.unwrap() {
        assert!(
            piece
                .iter()
                .enumerate()
                .all(|(nth, byte)| { usize::from(*byte) == (at + nth) / PART_BYTES + 1 })
        );
        at += piece.len();
    }
    assert_eq!(at, OBJECT_BYTES);
    let grown = peak_kib() - before;
    assert!(grown < MAX_GROWTH_KIB, "{grown} KiB");
    // Whole, from one payload: that, and a copy of it until it is written.
    store.put(&path, PutPayload::from(vec![7; OBJECT_BYTES])).await.unwrap();
    let grown = peak_kib() - before;
    assert!(grown < 2 * OBJECT_BYTES as u64 / 1024 + MAX_GROWTH_KIB, "{grown} KiB");
    assert_eq!(store.get_range(&path, 255 << 20..(255 << 20) + 10).await.unwrap(), [7; 10][..]);
    store.put(&path, PutPayload::new()).await.unwrap();
    assert_eq!(store.head(&path).await.unwrap().size, 0);
    assert!(store.get(&path).await.unwrap().bytes().await.unwrap().is_empty());
    store.close().await.unwrap();
    let report = stores::open_disk_shared(&test.file, false).map(|disk| {
        Store::check(disk, &draconis_objects::check::CheckOptions::default(), &mut |_, _| {})
    });
    assert!(report.unwrap().unwrap().is_clean());
}
