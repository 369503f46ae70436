//! Buckets that are away for a while: transient errors are retried, mounts report them after the
//! deadline and continue later, and no written data is lost meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use draconis_bucket::{
    BucketApi, BucketDisk, BucketOptions, ListEntry, MemoryBucket, ObjectStoreBucket, RequestError,
    RequestResult,
};
use draconis_device::{Disk, Error, Extent, Group, Ticket, Write};
use draconis_testkit::wait::{wait_for, wait_until};
use draconis_types::Block;

const DEADLINE: Duration = Duration::from_millis(400);
/// A deadline that no test waits for.
const NEVER: Duration = Duration::from_secs(3600);

/// A bucket that refuses changes while its switch is set.
struct DenyingBucket(MemoryBucket, Arc<AtomicBool>);

impl DenyingBucket {
    fn change(
        &self,
        request: impl FnOnce(&MemoryBucket) -> RequestResult<()>,
    ) -> RequestResult<()> {
        match self.1.load(Ordering::SeqCst) {
            true => Err(RequestError::Denied("403 AccessDenied: Access Denied".to_owned())),
            false => request(&self.0),
        }
    }
}

impl BucketApi for DenyingBucket {
    fn put(&self, key: &str, bytes: Bytes) -> RequestResult<()> {
        self.change(|bucket| bucket.put(key, bytes))
    }

    fn create(&self, key: &str, bytes: Bytes) -> RequestResult<()> {
        self.change(|bucket| bucket.create(key, bytes))
    }

    fn get(&self, key: &str, range: Option<(u64, u64)>) -> RequestResult<Bytes> {
        self.0.get(key, range)
    }

    fn head(&self, key: &str) -> RequestResult<u64> {
        self.0.head(key)
    }

    fn delete(&self, key: &str) -> RequestResult<()> {
        self.change(|bucket| bucket.delete(key))
    }

    fn list(&self, folder: &str) -> RequestResult<Vec<ListEntry>> {
        self.0.list(folder)
    }
}

fn options(stays: bool) -> BucketOptions {
    BucketOptions {
        deadline: DEADLINE,
        pause: Duration::from_millis(5),
        commit: Duration::ZERO,
        host_id: "here".to_owned(),
        is_mount: stays,
        ..BucketOptions::default()
    }
}

/// Returns a server with an empty disk, and the switch of the refusals.
fn server_with_disk() -> (MemoryBucket, Arc<AtomicBool>) {
    let server = MemoryBucket::default();
    let machine = Arc::new(server.client(Default::default()));
    drop(BucketDisk::create(machine, "memory", 1 << 20, false, &options(false)).unwrap());
    (server, Arc::default())
}

fn open(
    server: &MemoryBucket,
    denies: &Arc<AtomicBool>,
    how: &BucketOptions,
) -> Result<BucketDisk, Error> {
    let machine = DenyingBucket(server.client(Default::default()), denies.clone());
    BucketDisk::open(Arc::new(machine), "memory", how)
}

fn write(disk: &BucketDisk, at: u64, byte: u8) -> Ticket {
    let mut block = Block::private(4096);
    block.copy_in(0, &[byte; 4096]);
    let write = Write { at_bytes: at * 4096 + (64 << 10), block };
    disk.submit(Group { writes: vec![write] }, &[]).unwrap()
}

fn read_byte(disk: &BucketDisk, at: u64) -> u8 {
    let extent = Extent::new(at * 4096 + (64 << 10), 4096);
    disk.read_now(extent, Block::private(4096)).unwrap().bytes().unwrap()[0]
}

#[test]
fn mounted_writer_resumes_after_outage() {
    let (server, denies) = server_with_disk();
    let disk = open(&server, &denies, &options(true)).unwrap();
    disk.wait_durable(write(&disk, 0, 1)).unwrap();
    for round in 0..3 {
        denies.store(true, Ordering::SeqCst);
        let tickets = [write(&disk, 1, 2 + round), write(&disk, 2, 12 + round)];
        let told = disk.wait_durable(tickets[1]).unwrap_err();
        assert!(matches!(&told, Error::Unreachable(why) if why.contains("AccessDenied")), "{told}");
        let state = disk.write_state();
        let (why, since) = state.away.clone().unwrap();
        assert!(why.contains("403 AccessDenied") && since <= SystemTime::now());
        assert!(state.waiting_bytes >= 8192 && state.error.is_none(), "{state:?}");
        assert_eq!([0, 1, 2].map(|at| read_byte(&disk, at)), [1, 2 + round, 12 + round]);
        // Visibility does not depend on the bucket.
        disk.wait_visible(tickets[1]).unwrap();
        denies.store(false, Ordering::SeqCst);
        wait_until("the write is durable", || disk.wait_durable(tickets[1]).is_ok());
        disk.wait_durable(write(&disk, 3, round)).unwrap();
        assert!(disk.write_state().away.is_none());
    }
    drop(disk);
    let machine = Arc::new(server.client(Default::default()));
    let disk = BucketDisk::open_to_read(machine, "memory", &options(false)).unwrap();
    assert_eq!([0, 1, 2, 3].map(|at| read_byte(&disk, at)), [1, 4, 14, 2]);
}

#[test]
fn denied_changes_fail_at_once_and_commands_time_out() {
    let (server, denies) = server_with_disk();
    denies.store(true, Ordering::SeqCst);
    let patient = BucketOptions { deadline: NEVER, ..options(true) };
    let refused = open(&server, &denies, &patient).map(drop).unwrap_err();
    assert!(refused.to_string().contains("403 AccessDenied"), "{refused}");
    denies.store(false, Ordering::SeqCst);
    let disk = open(&server, &denies, &options(false)).unwrap();
    disk.wait_durable(write(&disk, 0, 1)).unwrap();
    denies.store(true, Ordering::SeqCst);
    let failed = disk.wait_durable(write(&disk, 0, 2)).unwrap_err();
    assert!(matches!(failed, Error::Remote(_)), "{failed}");
}

#[test]
fn close_during_outage_reports_unsent_data() {
    let (server, denies) = server_with_disk();
    let disk = open(&server, &denies, &options(true)).unwrap();
    disk.wait_durable(write(&disk, 0, 1)).unwrap();
    denies.store(true, Ordering::SeqCst);
    disk.wait_durable(write(&disk, 0, 2)).unwrap_err();
    disk.finish();
    disk.close();
    let left = disk.close_error().unwrap();
    assert!(left.contains("4096 bytes") && left.contains("AccessDenied"), "{left}");
    // A bucket that answers in time gets everything. The deadline leaves a busy machine time.
    denies.store(false, Ordering::SeqCst);
    let patient = BucketOptions { deadline: DEADLINE * 5, ..options(true) };
    let disk = open(&server, &denies, &patient).unwrap();
    disk.wait_durable(write(&disk, 0, 3)).unwrap();
    denies.store(true, Ordering::SeqCst);
    disk.wait_durable(write(&disk, 0, 4)).unwrap_err();
    let switch = denies.clone();
    let heals = std::thread::spawn(move || {
        draconis_testkit::wait::pause("the bucket is away for a while", DEADLINE / 4);
        switch.store(false, Ordering::SeqCst);
    });
    disk.finish();
    disk.close();
    heals.join().unwrap();
    assert_eq!(disk.close_error(), None);
    let machine = Arc::new(server.client(Default::default()));
    let disk = BucketDisk::open_to_read(machine, "memory", &options(false)).unwrap();
    assert_eq!(read_byte(&disk, 0), 4);
}

#[test]
fn fenced_writer_reports_fencing_without_writing() {
    let (server, denies) = server_with_disk();
    let disk = open(&server, &denies, &options(true)).unwrap();
    disk.wait_durable(write(&disk, 0, 1)).unwrap();
    assert!(disk.write_state().error.is_none());
    let other = BucketOptions {
        host_id: "there".to_owned(),
        token: 7,
        take_over: true,
        who: "another machine".to_owned(),
        ..options(true)
    };
    let other = open(&server, &denies, &other).unwrap();
    draconis_testkit::wait::pause("the other writer writes", Duration::from_millis(600));
    let why = wait_for("the writer is fenced", || disk.write_state().error);
    assert!(why.contains("taken over by another machine"), "{why}");
    drop(other);
}

#[test]
fn directory_that_is_away_is_waited_for() {
    let place = tempfile::tempdir().unwrap();
    let [path, elsewhere] = ["bucket", "away"].map(|name| place.path().join(name));
    std::fs::create_dir(&path).unwrap();
    let address = format!("file://{}", path.display());
    let patient = BucketOptions { deadline: NEVER, ..options(true) };
    let bucket = || Arc::new(ObjectStoreBucket::open(&address, false, NEVER).unwrap());
    drop(BucketDisk::create(bucket(), &address, 1 << 20, false, &options(false)).unwrap());
    let disk = BucketDisk::open(bucket(), &address, &patient).unwrap();
    disk.wait_durable(write(&disk, 0, 1)).unwrap();
    let retries = |disk: &BucketDisk| disk.requests().again;
    for (round, is_replaced) in (2..).zip([false, true]) {
        std::fs::rename(&path, &elsewhere).unwrap();
        if is_replaced {
            std::fs::create_dir(&path).unwrap();
        }
        let before = retries(&disk);
        let ticket = write(&disk, 1, round);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| disk.wait_durable(ticket));
            wait_until("it was tried again", || retries(&disk) > before + 5);
            // Nothing is made in its place.
            assert_eq!(std::fs::remove_dir(&path).is_ok(), is_replaced);
            assert!(!path.exists());
            std::fs::rename(&elsewhere, &path).unwrap();
            waiting.join().unwrap().unwrap();
        });
        assert!(disk.write_state().error.is_none());
    }
    disk.close();
    let disk = BucketDisk::open_to_read(bucket(), &address, &options(false)).unwrap();
    assert_eq!([0, 1].map(|at| read_byte(&disk, at)), [1, 3]);
}
