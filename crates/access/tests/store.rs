//! A store by its path: objects and keys, made, read again, closed, checked.

use std::ops::Bound;

use draconis_access::{NewStore, Store};
use draconis_objects::kv::Batch;
use draconis_objects::{Group, LifetimeHint, ObjectId};
use rustix::io::Errno;

#[test]
fn objects_and_keys_in_store_opened_by_path() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("things.store");
    let missing = Store::open(&path).unwrap_err();
    assert_eq!(missing.errno, Errno::NOENT);
    let new = NewStore { len_bytes: Some(8 << 20), ..NewStore::default() };
    Store::create(&path, &new).unwrap();
    assert_eq!(Store::create(&path, &new).unwrap_err().errno, Errno::EXIST);

    let store = Store::open_for_writing(&path).unwrap();
    assert_eq!(Store::open(&path).unwrap_err().errno, Errno::BUSY);
    let mut group = Group::new();
    let letter = group.create(store.new_object().unwrap(), LifetimeHint::Unknown);
    group.append(letter, b"Dear reader,\n");
    group.set_name(b"letter", letter);
    store.wait(store.submit(group).unwrap()).unwrap();
    let mut batch = Batch::new();
    for key in [&b"a"[..], b"b", b"c"] {
        batch.put(key, &[key, b"!"].concat());
    }
    store.wait(store.write_keys(batch).unwrap()).unwrap();
    let mut wrong = Group::new();
    wrong.append(ObjectId(77), b"x");
    assert_eq!(store.submit(wrong).unwrap_err().errno, Errno::NOENT);
    store.close().unwrap();
    assert_eq!(store.get(b"a").unwrap_err().errno, Errno::BADF);

    let store = Store::open(&path).unwrap();
    assert_eq!(store.find_name(b"letter").unwrap(), Some(letter));
    assert_eq!(store.list().unwrap(), [(letter, 13)]);
    let mut bytes = [0; 20];
    assert_eq!(store.read(letter, 5, &mut bytes).unwrap(), 8);
    assert_eq!(&bytes[..8], b"reader,\n");
    let keys = |reverse| {
        let all = store.scan((Bound::Included(b"a"), Bound::Excluded(b"c")), reverse).unwrap();
        std::iter::from_fn(|| all.next().unwrap()).map(|(key, _)| key).collect::<Vec<_>>()
    };
    assert_eq!(keys(false), [b"a", b"b"]);
    assert_eq!(keys(true), [b"b", b"a"]);
    assert_eq!((store.get(b"b").unwrap(), store.get(b"x").unwrap()), (Some(b"b!".to_vec()), None));
    assert_eq!(store.count_keys().unwrap(), 3);
    let mut more = Group::new();
    more.append(letter, b"x");
    assert!(store.submit(more).is_err(), "it was opened for reading");
    let unfinished = store.scan((Bound::Unbounded, Bound::Unbounded), false).unwrap();
    assert!(unfinished.next().unwrap().is_some());
    store.close().unwrap();
    assert_eq!(unfinished.next().unwrap_err().errno, Errno::BADF);
    Store::open_for_writing(&path).unwrap().close().unwrap();
    assert!(Store::check(&path).unwrap().is_clean());
}
