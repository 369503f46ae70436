//! A bucket that is away for an hour, for a writer and for a follower. The hour is simulated: the
//! test makes as many attempts as both make in an hour, with shorter pauses between them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::{NO_ROUTE, UnreachableBucket};
use draconis_bucket::{BucketDisk, BucketOptions, MemoryBucket};
use draconis_objects::kv::{Batch, Kv};
use draconis_objects::{CreateOptions, Error, LayoutKind, OpenOptions, Profile, Store};
use draconis_testkit::wait::{HangClock, wait_until};

const DISK_BYTES: u64 = 256 << 20;
/// Attempts of a writer in an hour: one every 3 seconds.
const PROBES: u64 = 3600 / 3;
/// Looks of a follower in an hour: one a second.
const LOOKS: u64 = 3600;
/// Bytes that a writer holds in memory at most before the next change waits.
const OUTAGE_BYTES: u64 = 64 << 20;
const VALUE_BYTES: usize = 1 << 20;

fn options() -> BucketOptions {
    BucketOptions {
        deadline: Duration::from_millis(200),
        // The longest pause is ten times as long.
        pause: Duration::from_micros(100),
        commit: Duration::ZERO,
        host_id: "here".to_owned(),
        is_mount: true,
        ..BucketOptions::default()
    }
}

/// Returns a bucket with an empty store.
fn create_store() -> MemoryBucket {
    let server = MemoryBucket::default();
    let client = Arc::new(server.client(Default::default()));
    let options = BucketOptions { is_mount: false, ..options() };
    let disk = BucketDisk::create(client, "memory", DISK_BYTES, false, &options).unwrap();
    let profile = Profile {
        layout: LayoutKind::Bucket,
        page_bytes: 4096,
        segment_bytes: 1 << 20,
        queue_depth: 8,
    };
    Store::create(Arc::new(disk), &CreateOptions { profile, id: 1 }).unwrap();
    server
}

/// Opens the store for writing, or for reading while another one writes it.
fn open(
    server: &MemoryBucket,
    is_away: &Arc<AtomicBool>,
    read_only: bool,
) -> (Arc<BucketDisk>, Kv) {
    let client =
        Arc::new(UnreachableBucket(server.client(Default::default()), is_away.clone(), NO_ROUTE));
    let disk = match read_only {
        true => BucketDisk::open_to_read(client, "memory", &options()),
        false => BucketDisk::open(client, "memory", &options()),
    };
    let disk = Arc::new(disk.unwrap());
    let store = Store::open(disk.clone(), &OpenOptions { cache_bytes: 1 << 20, read_only });
    (disk, Kv::new(store.unwrap()))
}

fn key(nth: u64) -> Vec<u8> {
    format!("{nth:04}").into_bytes()
}

fn put(kv: &Kv, nth: u64, value: &[u8]) -> draconis_objects::Ticket {
    let mut batch = Batch::new();
    batch.put(&key(nth), value);
    kv.write(batch).map_err(|refused| refused.1).unwrap()
}

/// Returns the memory of this process, in bytes.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    status.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * rustix::param::page_size() as u64
}

/// The writer goes on in memory, then waits. Nothing is lost.
fn writer_is_away() {
    const PUTS: u64 = 150;
    let (server, is_away) = (create_store(), Arc::default());
    let (disk, kv) = open(&server, &is_away, false);
    kv.wait(put(&kv, 0, b"before")).unwrap();
    is_away.store(true, Ordering::SeqCst);
    let before = disk.requests().puts;
    let mut memory = None;
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let puts = (1..=PUTS).map(|nth| put(&kv, nth, &vec![nth as u8; VALUE_BYTES]));
            let last = puts.reduce(|_, later| later).unwrap();
            let mut failures = 0;
            while let Err(error) = kv.wait(last) {
                assert!(matches!(&error, Error::Device(_)), "{error}");
                failures += 1;
            }
            failures
        });
        wait_until("the bucket is away", || disk.write_state().away.is_some());
        while disk.requests().puts - before < PROBES {
            let state = disk.write_state();
            assert!(state.waiting_bytes <= OUTAGE_BYTES * 5 / 4, "{state:?}");
            assert_eq!(state.error, None);
            let (why, _) = state.away.clone().unwrap();
            assert!(why.contains("writing memory/") && why.contains("no route to it"), "{why}");
            // Once the memory of the outage is in use.
            if memory.is_none() && disk.requests().puts - before > PROBES / 4 {
                memory = Some(resident_bytes());
            }
            draconis_testkit::wait::pause("polls the state", Duration::from_millis(1));
        }
        let grown = resident_bytes().saturating_sub(memory.unwrap());
        assert!(grown < 8 << 20, "{grown} bytes more");
        assert!(!writer.is_finished(), "all changes fit into the memory of an outage");
        is_away.store(false, Ordering::SeqCst);
        writer.join().unwrap();
    });
    assert!(disk.write_state().away.is_none());
    let probes = disk.requests().puts - before;
    drop((disk, kv));
    let (_disk, kv) = open(&server, &is_away, true);
    assert_eq!(kv.get(&key(0)).unwrap().unwrap(), b"before");
    for nth in 1..=PUTS {
        assert!(kv.get(&key(nth)).unwrap().unwrap() == vec![nth as u8; VALUE_BYTES], "{nth}");
    }
    eprintln!("writer: {probes} requests, {PUTS} MiB were written");
}

/// The follower shows its state, says why it does not move on, and then has the newest commit at
/// its first look.
fn follower_is_away() {
    let (server, is_away, reachable) = (create_store(), Arc::default(), Arc::default());
    let (_writing, writer) = open(&server, &reachable, false);
    let (reading, follower) = open(&server, &is_away, true);
    writer.wait(put(&writer, 0, b"0")).unwrap();
    assert!(follower.store().refresh().unwrap());
    is_away.store(true, Ordering::SeqCst);
    let before = reading.requests().lists;
    let clock = HangClock::start();
    let mut memory = 0;
    let mut text = String::new();
    for look in 1..=LOOKS {
        if look % 10 == 0 {
            let value = look.to_string().repeat(1000);
            let ticket = put(&writer, 0, value.as_bytes());
            put(&writer, look % 50 + 1, value.as_bytes());
            writer.wait(ticket).unwrap();
        }
        if look % 600 == 0 {
            // The follower's state needs bytes that the writer does not need any more.
            writer.store().checkpoint().unwrap();
        }
        if look == LOOKS / 4 {
            memory = resident_bytes();
        }
        let error = follower.store().refresh().unwrap_err().to_string();
        assert!(error.contains("listing memory") && error.contains("no route to it"), "{error}");
        // One message of an outage, however long it is.
        text = if look == 1 { error.clone() } else { text };
        assert_eq!(error, text);
        match follower.get(&key(0)) {
            Ok(value) => assert_eq!(value.unwrap(), b"0"),
            Err(error) => assert!(error.to_string().contains("no route to it"), "{error}"),
        }
    }
    let looked = reading.requests().lists - before;
    assert!((LOOKS..LOOKS + 200).contains(&looked), "{looked} requests");
    let grown = resident_bytes().saturating_sub(memory);
    assert!(grown < 24 << 20, "{grown} bytes more");
    is_away.store(false, Ordering::SeqCst);
    assert!(follower.store().refresh().unwrap());
    assert_eq!(follower.store().newest_commit(), writer.store().newest_commit());
    let newest = LOOKS.to_string().repeat(1000);
    assert_eq!(follower.get(&key(0)).unwrap().unwrap(), newest.as_bytes());
    eprintln!("follower: {looked} requests in {:?}, {grown} bytes more", clock.elapsed());
}

/// One test: both measure the memory of the process.
#[test]
fn an_hour_away_ends_with_everything_written_and_the_newest_commit_read() {
    draconis_testkit::in_own_process!();
    writer_is_away();
    follower_is_away();
}
