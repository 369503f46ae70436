//! Stores in buckets, in a directory.

use draconis_object_store::{BucketOptions, DraconisStore};
use object_store::integration::*;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

const LEN_BYTES: u64 = 96 << 20;

fn create() -> (tempfile::TempDir, String, DraconisStore) {
    let dir = tempfile::tempdir().unwrap();
    let address = format!("file://{}/bucket", dir.path().display());
    let store = DraconisStore::create_bucket(&address, LEN_BYTES, &BucketOptions::default());
    (dir, address, store.unwrap())
}

/// Runs functions of the suite, each on a new store.
macro_rules! suite {
    ($($name:ident($store:ident) $call:expr;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            let (_dir, _, store) = create();
            let $store = &store;
            $call.await;
        }
    )*};
}

suite! {
    puts_gets_deletes_and_lists(store) put_get_delete_list(store);
    attributes_are_stored(store) put_get_attributes(store);
    conditional_puts(store) put_opts(store, true);
    streams_are_read(store) stream_get(store);
    renames_and_copies(store) rename_and_copy(store);
    uploads_in_parts(store) multipart(store, store);
}

/// Opened, closed and dropped by a thread that drives a runtime.
#[tokio::test]
async fn objects_stay_and_a_new_writer_fences_the_old_one() {
    let (_dir, address, store) = create();
    let (path, options) = (Path::from("a/b"), BucketOptions::default());
    store.put(&path, "1".into()).await.unwrap();
    let error = DraconisStore::create_bucket(&address, LEN_BYTES, &options).unwrap_err();
    assert!(error.to_string().contains("holds a store"), "{error}");
    let reader = DraconisStore::open_bucket_read_only(&address, &options).unwrap();
    assert!(reader.put(&path, "x".into()).await.is_err());

    let newer = DraconisStore::open_bucket(&address, &options).unwrap();
    newer.put(&path, "2".into()).await.unwrap();
    let error = store.put(&path, "3".into()).await.unwrap_err();
    assert!(error.to_string().contains("taken over"), "{error}");
    drop(store);
    newer.close().await.unwrap();
    drop(newer_reader(&address).await);
    let get = |store: DraconisStore| async move {
        store.get(&Path::from("a/b")).await.unwrap().bytes().await.unwrap()
    };
    assert_eq!(get(reader).await, "1", "a state of its own");
    assert_eq!(get(newer_reader(&address).await).await, "2");
}

async fn newer_reader(address: &str) -> DraconisStore {
    let store = DraconisStore::open_bucket_read_only(address, &BucketOptions::default()).unwrap();
    assert_eq!(store.list_with_delimiter(None).await.unwrap().common_prefixes.len(), 1);
    store
}

#[test]
fn missing_stores_and_wrong_addresses_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let address = format!("file://{}", dir.path().display());
    let options = BucketOptions::default();
    let said = DraconisStore::open_bucket(&address, &options).unwrap_err().to_string();
    assert!(said.contains("no store is there"), "{said}");
    let said = DraconisStore::open_bucket("ftp://x/y", &options).unwrap_err().to_string();
    assert!(said.contains("ftp:// is not known"), "{said}");
}
