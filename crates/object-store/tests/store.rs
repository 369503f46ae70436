//! Objects of a store: durability, sharing, conditions, uploads, free space.

use std::sync::Arc;
use std::time::Duration;

use crate::common::TestStore;
use bytes::Bytes;
use draconis_object_store::DraconisStore;
use draconis_testkit::wait::HangClock;
use futures_util::{StreamExt, TryStreamExt};
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{
    CopyMode, CopyOptions, Error, ObjectStore, ObjectStoreExt, PutMode, PutPayload,
};

const MIB: usize = 1 << 20;

async fn read(store: &DraconisStore, path: &Path) -> Bytes {
    store.get(path).await.unwrap().bytes().await.unwrap()
}

async fn paths(store: &DraconisStore) -> Vec<String> {
    let list = store.list(None).map_ok(|meta| meta.location.to_string());
    let mut paths: Vec<_> = list.try_collect().await.unwrap();
    paths.sort();
    paths
}

/// Returns the number of objects in the store below, with those that wait to be deleted.
fn content_objects(store: &DraconisStore) -> usize {
    store.store().list().unwrap().len()
}

/// Waits until work that nobody waits for has left so many objects.
async fn wait_for_content_objects(store: &DraconisStore, wanted: usize) {
    let clock = HangClock::start();
    while content_objects(store) != wanted {
        clock.assert_not_hung(format_args!("{} objects", content_objects(store)));
        tokio::task::yield_now().await;
    }
}

fn random_bytes(seed: u64, len: usize) -> Bytes {
    let mut bytes = vec![0; len];
    draconis_device::Random::new(seed).fill(&mut bytes);
    bytes.into()
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_are_the_same_after_reopening() {
    let test = TestStore::create(32 << 20);
    let store = test.open();
    let mut before = vec![];
    for nth in 0..50_usize {
        let path = Path::from(format!("dir/{}/{nth}", nth % 7));
        store.put(&path, random_bytes(nth as u64, nth * 1000).into()).await.unwrap();
        before.push((store.head(&path).await.unwrap(), nth));
    }
    drop(store);
    let store = test.open();
    for (meta, nth) in before {
        assert_eq!(store.head(&meta.location).await.unwrap(), meta);
        assert_eq!(read(&store, &meta.location).await, random_bytes(nth as u64, nth * 1000));
    }
    store.close().await.unwrap();
    let store = test.open();
    assert_eq!(paths(&store).await.len(), 50);
    drop(store);
    test.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_clients_put_at_once_and_share_flushes() {
    let test = TestStore::create(64 << 20);
    let store = test.open();
    let clients = (0..16_usize).map(|client| {
        let store = store.clone();
        tokio::spawn(async move {
            for nth in 0..25 {
                let path = Path::from(format!("{client}/{nth}"));
                store.put(&path, format!("{client} {nth}").into()).await.unwrap();
                store.put(&Path::from("last"), format!("{client}").into()).await.unwrap();
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    assert_eq!(paths(&store).await.len(), 16 * 25 + 1);
    assert_eq!(content_objects(&store), 16 * 25 + 1);
    let commits = store.store().info().counters.commits;
    assert!(commits < 800, "800 puts, {commits} commits");
    for client in 0..16 {
        assert_eq!(read(&store, &Path::from(format!("{client}/24"))).await, format!("{client} 24"));
    }
    drop(store);
    test.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_many_creators_wins_and_updates_are_not_lost() {
    let test = TestStore::create(32 << 20);
    let store = test.open();
    let path = Path::from("fence");
    let creators = (0..16).map(|nth| {
        let (store, path) = (store.clone(), path.clone());
        tokio::spawn(async move {
            store.put_opts(&path, format!("{nth}").into(), PutMode::Create.into()).await
        })
    });
    let mut won = 0;
    for creator in creators.collect::<Vec<_>>() {
        match creator.await.unwrap() {
            Ok(_) => won += 1,
            Err(error) => assert!(matches!(error, Error::AlreadyExists { .. }), "{error}"),
        }
    }
    assert_eq!((won, content_objects(&store)), (1, 1));
    // An e-tag does not come back, not even with the contents.
    let first = store.put(&path, "a".into()).await.unwrap();
    store.copy(&path, &Path::from("kept")).await.unwrap();
    store.put(&path, "b".into()).await.unwrap();
    store.copy(&Path::from("kept"), &path).await.unwrap();
    assert_eq!(read(&store, &path).await, "a");
    let stale = PutMode::Update(first.into());
    let error = store.put_opts(&path, "c".into(), stale.into()).await.unwrap_err();
    assert!(matches!(error, Error::Precondition { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn names_may_have_odd_bytes_and_be_long() {
    let test = TestStore::create(32 << 20);
    let store = test.open();
    let long = "long/".repeat(400);
    let odd = [
        "123",
        "new",
        "-",
        "a@b",
        "disk@snapshot",
        "ü/日本語",
        "a b",
        "a\tb",
        "a\u{1}b",
        "~",
        "%",
        "#?*\"'\\<>",
        &long,
        "x/..y",
        "\u{10ffff}",
    ];
    for name in odd {
        let path = Path::from(name);
        store.put(&path, name.to_owned().into()).await.unwrap();
        assert_eq!(read(&store, &path).await, name);
        assert_eq!(store.head(&path).await.unwrap().location, path);
    }
    let mut wanted: Vec<_> = odd.iter().map(|name| Path::from(*name).to_string()).collect();
    wanted.sort();
    assert_eq!(paths(&store).await, wanted);
    // The store lists them under their paths, but for long ones and those with an @.
    let names: Vec<_> =
        store.store().list_names().unwrap().into_iter().map(|(name, _)| name).collect();
    let named = wanted.iter().filter(|path| path.len() <= 255 && !path.contains('@'));
    assert_eq!(names, named.map(|path| path.clone().into_bytes()).collect::<Vec<_>>());
    let too_long = Path::from("n".repeat(100_000));
    let error = store.put(&too_long, "".into()).await.unwrap_err();
    assert!(error.to_string().ends_with("a key that is too long"), "{error}");
    for name in odd {
        store.delete(&Path::from(name)).await.unwrap();
    }
    assert_eq!((paths(&store).await.len(), content_objects(&store)), (0, 0));
    drop(store);
    test.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_share_contents_until_the_last_is_deleted() {
    let test = TestStore::create(32 << 20);
    let store = test.open();
    let contents = random_bytes(1, 3 * MIB);
    let [a, b, c] = ["a", "b", "c"].map(Path::from);
    store.put(&a, contents.clone().into()).await.unwrap();
    let e_tag = store.head(&a).await.unwrap().e_tag;
    for _ in 0..2 {
        store.copy(&a, &b).await.unwrap();
        store.copy(&b, &c).await.unwrap();
        store.copy(&c, &a).await.unwrap();
        store.copy(&a, &a).await.unwrap();
    }
    assert_eq!(content_objects(&store), 1);
    assert_ne!(store.head(&a).await.unwrap().e_tag, e_tag);
    let create = CopyOptions { mode: CopyMode::Create, ..CopyOptions::default() };
    let error = store.copy_opts(&a, &c, create).await.unwrap_err();
    assert!(matches!(error, Error::AlreadyExists { .. }), "{error}");
    store.delete(&a).await.unwrap();
    store.put(&b, "other".into()).await.unwrap();
    assert_eq!((read(&store, &c).await, content_objects(&store)), (contents.clone(), 2));
    // Over the last but one, and back.
    store.copy(&c, &a).await.unwrap();
    store.rename(&a, &c).await.unwrap();
    assert_eq!((read(&store, &c).await, content_objects(&store)), (contents.clone(), 2));
    store.rename(&c, &c).await.unwrap();
    store.rename_if_not_exists(&c, &a).await.unwrap();
    let error = store.rename_if_not_exists(&a, &b).await.unwrap_err();
    assert!(matches!(error, Error::AlreadyExists { .. }), "{error}");
    assert_eq!(
        (read(&store, &a).await, paths(&store).await),
        (contents, vec!["a".into(), "b".into()])
    );
    store.delete(&a).await.unwrap();
    store.delete(&b).await.unwrap();
    assert_eq!(content_objects(&store), 0);
    // Nothing of the shares is left.
    let kv = draconis_objects::kv::Kv::new(store.store().clone());
    assert_eq!(kv.scan::<std::ops::RangeFull>(&..).count(), 0);
    drop((store, kv));
    test.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn replaced_and_deleted_objects_are_read_to_their_end() {
    let test = TestStore::create(64 << 20);
    let store = test.open();
    let path = Path::from("a");
    let contents = random_bytes(2, 5 * MIB + 7);
    store.put(&path, contents.clone().into()).await.unwrap();
    let (first, second) = (store.get(&path).await.unwrap(), store.get(&path).await.unwrap());
    store.put(&path, "new".into()).await.unwrap();
    assert_eq!((read(&store, &path).await, content_objects(&store)), ("new".into(), 2));
    assert_eq!(first.bytes().await.unwrap(), contents);
    assert_eq!(content_objects(&store), 2);
    let mut stream = second.into_stream();
    assert_eq!(stream.next().await.unwrap().unwrap().len(), MIB);
    store.delete(&path).await.unwrap();
    assert_eq!(stream.next().await.unwrap().unwrap(), contents.slice(MIB..2 * MIB));
    drop(stream);
    wait_for_content_objects(&store, 0).await;
    drop(store);
    test.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn aborted_and_dropped_uploads_free_their_space() {
    let test = TestStore::create(32 << 20);
    let store = test.open();
    let path = Path::from("a");
    let part = || PutPayload::from(random_bytes(3, 2 * MIB));
    // Several times the store.
    for nth in 0..10 {
        let mut upload = store.put_multipart(&path).await.unwrap();
        for _ in 0..4 {
            upload.put_part(part()).await.unwrap();
        }
        if nth % 2 == 0 {
            upload.abort().await.unwrap();
            upload.complete().await.unwrap_err();
        }
        drop(upload);
        wait_for_content_objects(&store, 0).await;
        let id = store.create_multipart(&path).await.unwrap();
        store.put_part(&path, &id, 3, part()).await.unwrap();
        store.put_part(&path, &id, 3, part()).await.unwrap();
        store.abort_multipart(&path, &id).await.unwrap();
        store.put_part(&path, &id, 0, part()).await.unwrap_err();
        wait_for_content_objects(&store, 0).await;
    }
    assert!(paths(&store).await.is_empty());
    // A part that is not awaited is missing.
    let mut upload = store.put_multipart(&path).await.unwrap();
    drop(upload.put_part(part()));
    let error = upload.complete().await.unwrap_err();
    assert!(error.to_string().ends_with("a: 0 of 1 parts were written"), "{error}");
    drop(upload);
    wait_for_content_objects(&store, 0).await;
    drop(store);
    test.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_puts_are_whole_or_absent() {
    let test = TestStore::create(64 << 20);
    let store = test.open();
    let contents = random_bytes(4, 4 * MIB);
    for nth in 0..12_u64 {
        let (putter, payload) = (store.clone(), contents.clone());
        let task = tokio::spawn(async move {
            putter.put(&Path::from("a"), payload.into()).await.unwrap();
        });
        let moment = Duration::from_micros(nth * 500);
        tokio::time::sleep(moment).await; // time: the task ends at any moment
        task.abort();
        let _ = task.await;
        match store.get(&Path::from("a")).await {
            Ok(got) => assert_eq!(got.bytes().await.unwrap(), contents),
            Err(error) => assert!(matches!(error, Error::NotFound { .. }), "{error}"),
        }
    }
    drop(store);
    test.check();
    let store = test.open();
    assert_eq!(content_objects(&store), paths(&store).await.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn full_store_keeps_all_and_deletions_free_space() {
    let test = TestStore::create(16 << 20);
    let store = test.open();
    let mut stored = vec![];
    for len in [3 * MIB, 200_000, 1000] {
        let error = loop {
            let path = Path::from(format!("{}", stored.len()));
            match store.put(&path, random_bytes(stored.len() as u64, len).into()).await {
                Ok(_) => stored.push((path, len)),
                Err(error) => break error,
            }
        };
        assert!(error.to_string().contains("the store is full"), "{error}");
    }
    // A refused replacement changes nothing.
    store.put(&stored[0].0, random_bytes(0, 3 * MIB).into()).await.unwrap_err();
    let mut upload = store.put_multipart(&Path::from("upload")).await;
    if let Ok(upload) = &mut upload {
        upload.put_part(random_bytes(1, 3 * MIB).into()).await.unwrap_err();
    }
    drop(upload);
    let check_all = async |store: &DraconisStore, stored: &[(Path, usize)], first: usize| {
        for (nth, (path, len)) in stored.iter().enumerate().skip(first) {
            assert_eq!(read(store, path).await, random_bytes(nth as u64, *len), "{path}");
        }
    };
    check_all(&store, &stored, 0).await;
    drop(store);
    let store = test.open();
    check_all(&store, &stored, 0).await;
    assert_eq!(content_objects(&store), stored.len());
    // Also while it is read: the space is needed.
    let reader = store.get(&stored[0].0).await.unwrap();
    store.delete(&stored[0].0).await.unwrap();
    drop(reader);
    store.delete(&stored[1].0).await.unwrap();
    store.put(&Path::from("again"), random_bytes(7, 3 * MIB).into()).await.unwrap();
    assert_eq!(read(&store, &Path::from("again")).await, random_bytes(7, 3 * MIB));
    check_all(&store, &stored, 2).await;
    drop(store);
    test.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn one_writer_or_many_readers_have_the_store() {
    let test = TestStore::create(16 << 20);
    let store = test.open();
    store.put(&Path::from("a"), "1".into()).await.unwrap();
    for opened in [DraconisStore::open(&test.file), DraconisStore::open_read_only(&test.file)] {
        let error = opened.unwrap_err().to_string();
        assert!(error.contains("in use"), "{error}");
    }
    store.close().await.unwrap();
    let readers = [(); 2].map(|()| DraconisStore::open_read_only(&test.file).unwrap());
    for reader in &readers {
        assert_eq!(read(reader, &Path::from("a")).await, "1");
        assert_eq!(paths(reader).await, ["a"]);
        reader.put(&Path::from("b"), "2".into()).await.unwrap_err();
        reader.delete(&Path::from("a")).await.unwrap_err();
    }
    DraconisStore::open(&test.file).unwrap_err();
    let missing = test.file.with_extension("missing");
    let error = DraconisStore::open(&missing).unwrap_err().to_string();
    assert!(error.contains("no such file"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_of_other_programs_are_neither_replaced_nor_listed() {
    let test = TestStore::create(16 << 20);
    let store = test.open();
    let below = store.store().clone();
    let mut group = draconis_objects::Group::new();
    let disk = group.create(below.new_object(), draconis_objects::LifetimeHint::Unknown);
    group.append(disk, b"a disk");
    group.set_name(b"disk", disk);
    below.submit(group, &[]).unwrap();
    let path = Path::from("disk");
    store.put(&Path::from("a"), "1".into()).await.unwrap();
    for error in [
        store.put(&path, "1".into()).await.unwrap_err(),
        store.copy(&Path::from("a"), &path).await.unwrap_err(),
        store.rename(&Path::from("a"), &path).await.unwrap_err(),
    ] {
        assert!(error.to_string().contains("that was not put here"), "{error}");
    }
    assert!(matches!(store.get(&path).await, Err(Error::NotFound { .. })));
    assert_eq!(paths(&store).await, ["a"]);
    // What another program deletes is not found, and can be replaced and deleted.
    let content = below.find_named_object(b"a").unwrap().unwrap();
    let mut group = draconis_objects::Group::new();
    group.delete(content);
    group.remove_name(b"a");
    below.submit(group, &[]).unwrap();
    assert!(matches!(store.get(&Path::from("a")).await, Err(Error::NotFound { .. })));
    store.put(&Path::from("a"), "2".into()).await.unwrap();
    assert_eq!(read(&store, &Path::from("a")).await, "2");
    // A record that another program wrote is refused.
    let mut group = draconis_objects::Group::new();
    group.put(b"object/meta/a", b"no record");
    below.submit(group, &[]).unwrap();
    let error = store.get(&Path::from("a")).await.unwrap_err().to_string();
    assert!(error.contains("a: its record in the store is invalid"), "{error}");
    store.list(None).try_collect::<Vec<_>>().await.unwrap_err();
    drop((store, below));
    test.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_of_many_objects_have_pages() {
    let test = TestStore::create(32 << 20);
    let store = Arc::new(test.open());
    let names: Vec<_> = (0..2500).map(|nth| format!("dir{}/{nth:05}", nth % 3)).collect();
    let puts = futures_util::stream::iter(names.clone()).map(|name| {
        let store = store.clone();
        async move { store.put(&Path::from(name), PutPayload::new()).await.map(drop) }
    });
    puts.buffer_unordered(64).try_collect::<()>().await.unwrap();
    let mut wanted = names.clone();
    wanted.sort();
    let list: Vec<_> =
        store.list(None).map_ok(|meta| meta.location.to_string()).try_collect().await.unwrap();
    assert_eq!(list, wanted);
    let after = store.list_with_offset(Some(&Path::from("dir1")), &Path::from("dir1/01000"));
    let after: Vec<_> = after.map_ok(|meta| meta.location.to_string()).try_collect().await.unwrap();
    let is_after = |name: &&String| name.starts_with("dir1/") && name.as_str() > "dir1/01000";
    assert_eq!(after, wanted.iter().filter(is_after).cloned().collect::<Vec<_>>());
    let top = store.list_with_delimiter(None).await.unwrap();
    assert_eq!(top.common_prefixes, ["dir0", "dir1", "dir2"].map(Path::from));
    let below = store.list_with_delimiter(Some(&Path::from("dir2"))).await.unwrap();
    assert_eq!((below.objects.len(), below.common_prefixes.len()), (833, 0));
}
