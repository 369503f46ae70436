//! Forked children: a store that they inherited returns errors, and is not kept locked.

use std::sync::atomic::{AtomicBool, Ordering};

use draconis_object_store::DraconisStore;
use draconis_testkit::{ForkedChild, in_own_process};
use futures_util::StreamExt;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};

use crate::common::TestStore;

/// Waits for a future in a runtime of this process.
fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

fn assert_inherited<T>(result: object_store::Result<T>) {
    let error = result.err().expect("it was inherited").to_string();
    assert!(error.contains("this process is a fork"), "{error}");
}

#[test]
fn forked_children_cannot_use_a_store_and_open_their_own() {
    in_own_process!();
    let test = TestStore::create(64 << 20);
    let (store, path) = (test.open(), Path::from("data/long"));
    run(store.put(&path, PutPayload::from(vec![7; 3 << 20]))).unwrap();
    let mut upload = run(store.put_multipart(&Path::from("upload"))).unwrap();
    run(upload.put_part(vec![1; 9000].into())).unwrap();
    let mut stream = run(store.get(&path)).unwrap().into_stream();
    run(stream.next()).unwrap().unwrap();

    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Locks are held at some moments.
        let changing = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                run(store.put(&Path::from("other"), PutPayload::from(vec![1; 9000]))).unwrap();
            }
        });
        for _ in 0..8 {
            ForkedChild::start(|| {
                assert_inherited(run(store.get(&path)));
                assert_inherited(run(store.put(&path, "child".into())));
                assert_inherited(run(store.put_multipart(&path)));
                assert_inherited(run(store.create_multipart(&path)));
                assert_inherited(run(store.list(None).next()).unwrap());
                assert_inherited(run(store.delete(&path)));
                assert_inherited(run(store.clone().close()));
                assert!(DraconisStore::open(&test.file).is_err(), "the parent has it");
            })
            .assert_success();
        }
        is_over.store(true, Ordering::Relaxed);
        changing.join().unwrap();
    });

    // The parent drops all but the file when `start` returns.
    let (test, path) = (&test, &path);
    ForkedChild::start(move || {
        assert_inherited(run(stream.next()).unwrap());
        assert_inherited(run(upload.complete()));
        assert_inherited(run(upload.put_part("child".into())));
        assert_inherited(run(upload.abort()));
        drop((stream, upload, store));
        // Once the parent has dropped it.
        let own = test.open();
        let bytes = run(async { own.get(path).await?.bytes().await }).unwrap();
        assert_eq!(bytes.len(), 3 << 20);
        run(own.put(&Path::from("child"), "child".into())).unwrap();
        drop(own);
        test.check();
    })
    .assert_success();
}
