//! Forked children: what they inherited returns EBADF, and does not keep files locked.

use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use draconis_access::{
    Error, File, NewStore, NewVolume, OpenOptions, Store, Volume, VolumeLocation,
};
use draconis_device::CloseOnFork;
use draconis_ext::{FileSystem, Follow};
use draconis_objects::kv::Batch;
use draconis_testkit::{ForkedChild, in_own_process};
use draconis_types::lock::{Condvar, Mutex, RecursiveRwLock, RwLock};
use rustix::io::Errno;

fn assert_inherited<T: std::fmt::Debug>(result: Result<T, Error>) {
    let error = result.unwrap_err();
    assert_eq!(error.errno, Errno::BADF, "{error}");
    let wanted = format!("process {} opened it", rustix::process::getppid().unwrap().as_raw_pid());
    assert!(error.message.contains(&wanted), "{error}");
}

#[test]
fn forked_children_cannot_use_open_stores_and_volumes() {
    in_own_process!();
    let dir = tempfile::tempdir().unwrap();
    let [store_path, image, other] =
        ["a.store", "a.img", "b.img"].map(|name| dir.path().join(name));
    let by_path = FileSystem::create(&other, 16 << 20).unwrap();
    by_path.write("/file", "parent").unwrap();
    Store::create(&store_path, &NewStore { len_bytes: Some(8 << 20), ..NewStore::default() })
        .unwrap();
    let new = NewVolume { kind: "ext4".into(), len_bytes: Some(16 << 20), ..NewVolume::default() };
    Volume::create(&image, &new).unwrap();
    let store = Store::open_for_writing(&store_path).unwrap();
    let volume = Volume::open_for_writing(&image, &VolumeLocation::default()).unwrap();
    let how = OpenOptions { write: true, create: true, mode: 0o644, ..OpenOptions::default() };
    let file = File::open(&volume, b"/file", how).unwrap();
    let everything = (std::ops::Bound::Unbounded, std::ops::Bound::Unbounded);
    let keys = store.scan(everything, false).unwrap();

    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Locks are held at some moments.
        let changing = scope.spawn(|| {
            for round in (0u32..).take_while(|_| !is_over.load(Ordering::Relaxed)) {
                // `keys` keeps what is overwritten: more would fill the store.
                if round < 200 {
                    let mut batch = Batch::new();
                    batch.put(b"key", &[7; 9000]);
                    store.wait(store.write_keys(batch).unwrap()).unwrap();
                }
                store.get(b"key").unwrap();
                file.write_at(0, &[7; 9000]).unwrap();
                volume.sync().unwrap();
                by_path.write("/file", [7; 9000]).unwrap();
                by_path.sync().unwrap();
            }
        });
        for _ in 0..8 {
            ForkedChild::start(|| {
                assert_inherited(store.get(b"key"));
                assert_inherited(store.sync());
                assert_inherited(store.close());
                assert_inherited(keys.next());
                assert_inherited(volume.stat(b"/", Follow::Yes));
                assert_inherited(volume.close());
                assert_inherited(file.write_at(0, b"child"));
                for refused in [
                    by_path.read("/file").map(drop),
                    by_path.write("/file", "child"),
                    by_path.create_dir("/dir"),
                    by_path.sync(),
                ] {
                    assert!(refused.unwrap_err().to_string().contains("this process is a fork"));
                }
                assert_eq!(Store::open(&store_path).unwrap_err().errno, Errno::BUSY);
            })
            .assert_success();
        }
        is_over.store(true, Ordering::Relaxed);
        changing.join().unwrap();
    });

    let (mut until, signal) = std::io::pipe().unwrap();
    let signal = CloseOnFork::new(OwnedFd::from(signal));
    // The parent closes them when `start` returns.
    let idle = ForkedChild::start(move || {
        drop((keys, file, store, volume, by_path));
        until.read_to_end(&mut vec![]).unwrap();
    });
    let store = Store::open(&store_path).unwrap();
    assert_eq!(store.get(b"key").unwrap().unwrap(), [7; 9000]);
    for image in [&image, &other] {
        assert!(Volume::check(image, &VolumeLocation::default()).unwrap().is_clean());
        draconis_testkit::judge::assert_fsck_clean(image);
    }
    drop(signal);
    idle.assert_success();
    assert!(Store::check(&store_path).unwrap().is_clean());
}

/// Six threads that wait for each other in all kinds of locks, as long as `goes_on`.
fn wait_for_each_other(goes_on: impl Fn(u32) -> bool + Sync) {
    let (turn, changed) = (Mutex::new(0), Condvar::new());
    let (plain, recursive) = (RwLock::new(0), RecursiveRwLock::new(0));
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                for _ in (0..).take_while(|round| goes_on(*round)) {
                    let mut turns = turn.lock();
                    *turns += 1;
                    changed.notify_one();
                    changed.wait_for(&mut turns, std::time::Duration::from_micros(50));
                    std::thread::yield_now();
                    drop(turns);
                    *plain.write() += 1;
                    let seen = *plain.read();
                    *recursive.write() += 1;
                    let (outer, inner) = (recursive.read(), recursive.read());
                    assert!(seen > 0 && *outer == *inner);
                }
            });
        }
    });
    assert_eq!([turn.into_inner(), plain.into_inner()], [recursive.into_inner(); 2]);
}

#[test]
fn threads_that_wait_in_the_parent_are_nothing_to_locks_of_a_child() {
    in_own_process!();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| wait_for_each_other(|_| !is_over.load(Ordering::Relaxed)));
        for _ in 0..24 {
            ForkedChild::start(|| wait_for_each_other(|round| round < 40)).assert_success();
        }
        is_over.store(true, Ordering::Relaxed);
        waiting.join().unwrap();
    });
}
