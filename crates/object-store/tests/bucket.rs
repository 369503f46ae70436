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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn suite() {
    let (_dir, _, store) = create();
    put_get_delete_list(&store).await;
    put_get_attributes(&store).await;
    get_opts(&store).await;
    put_opts(&store, true).await;
    stream_get(&store).await;
    list_with_delimiter(&store).await;
    rename_and_copy(&store).await;
    copy_if_not_exists(&store).await;
    multipart(&store, &store).await;
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
