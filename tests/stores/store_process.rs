//! The process that serves the disks of a store: several disks at once, sandboxed, and robust
//! against malformed messages.

use crate::common;

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use crate::common::{Draconis, has_tool};
use draconis_device::{Disk, Error, Extent, Group, RemoteDisk, SubmitOptions, Write};
use draconis_exchange::channel::session::{Session, accept};
use draconis_exchange::descriptors;
use draconis_service::store_process::{
    AttachedDisk, StoreAccess, StoreError, StoreProcess, open_session_disk,
};
use draconis_testkit::conform;
use draconis_types::Block;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socketpair};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

const PROFILE_JSON: &str =
    r#"{"layout": "cow", "page_bytes": 4096, "segment_bytes": 262144, "queue_depth": 8}"#;

struct TestStore {
    draconis: Draconis,
}

impl TestStore {
    /// Creates a store with disks of 1 MiB each.
    fn new(names: &[&str]) -> Self {
        let place = Self { draconis: Draconis::new() };
        let (profile, store) = (place.draconis.path("profile"), place.store_path());
        std::fs::write(&profile, PROFILE_JSON).unwrap();
        let (profile, store) = (profile.to_str().unwrap(), store.to_str().unwrap());
        let size = ["--size", "64M", "--sparse", "--profile", profile];
        place.draconis.run_ok([&["store", "create", store], &size[..]].concat());
        for name in names {
            place.draconis.run_ok(["store", "disk", store, name, "1M"]);
        }
        place
    }

    fn store_path(&self) -> PathBuf {
        self.draconis.path("s")
    }

    fn open_store_file(&self, write: bool) -> OwnedFd {
        std::fs::File::options().read(true).write(write).open(self.store_path()).unwrap().into()
    }

    fn start_process(&self) -> StoreProcess {
        StoreProcess::start(program_path(), self.open_store_file(true), StoreAccess::Write).unwrap()
    }
}

fn program_path() -> &'static Path {
    Path::new(crate::common::program())
}

fn own_pidfd() -> OwnedFd {
    pidfd_open(getpid(), PidfdFlags::empty()).unwrap()
}

fn open_attached_disk(attached: &AttachedDisk) -> (RemoteDisk, Arc<Session>) {
    let session = accept(&attached.socket, draconis_testkit::wait::hang_deadline()).unwrap();
    (open_session_disk(&session).unwrap(), session)
}

fn attach_disk(process: &StoreProcess, name: &str) -> (RemoteDisk, u64) {
    let attached = process.attach(name, false, own_pidfd().as_fd()).unwrap();
    (open_attached_disk(&attached).0, attached.number)
}

fn submit_with_mark(mark: u64) -> SubmitOptions {
    SubmitOptions { mark, ..SubmitOptions::default() }
}

fn write(at_bytes: u64, byte: u8) -> Group {
    let mut block = Block::private(4096);
    block.copy_in(0, &[byte; 4096]);
    Group { writes: vec![Write { at_bytes, block }] }
}

fn read_byte(disk: &dyn Disk, at: u64) -> u8 {
    let block = disk.read_now(Extent::new(at, 512), Block::private(512)).unwrap();
    block.into_private()[0]
}

fn refusal_message<T: std::fmt::Debug>(answer: Result<T, StoreError>) -> String {
    match answer {
        Err(StoreError::Refused(said)) => said,
        other => panic!("{other:?}"),
    }
}

#[test]
fn remote_disk_behaves_like_local_disk() {
    let place = TestStore::new(&["vol"]);
    let process = place.start_process();
    let mut last = None;
    conform::check_all(|| {
        if let Some(number) = last {
            // The previous attachment is closed by now.
            process.wait_detached(number).unwrap();
        }
        let (disk, number) = attach_disk(&process, "vol");
        last = Some(number);
        disk
    });
    assert!(process.join().unwrap().success());
    place.draconis.run_ok(["store", "check", place.store_path().to_str().unwrap()]);
}

#[test]
fn acknowledged_writes_of_several_disks_survive_kill() {
    let place = TestStore::new(&["a", "b"]);
    let process = place.start_process();
    let ((a, _), (b, _)) = (attach_disk(&process, "a"), attach_disk(&process, "b"));
    std::thread::scope(|scope| {
        for (disk, first) in [(&a, 1u8), (&b, 101)] {
            scope.spawn(move || {
                for nth in 0..50u8 {
                    let group = write(u64::from(nth) * 4096, first + nth);
                    let ticket = disk
                        .submit_with(vec![group], &[], submit_with_mark(u64::from(nth)))
                        .unwrap()[0];
                    disk.wait_durable(ticket).unwrap();
                }
            });
        }
    });
    // A disk with a writer has no second user.
    let said = refusal_message(process.attach("a", true, own_pidfd().as_fd()));
    assert_eq!(said, "the disk a is in use; unmount it first");
    process.kill();
    assert_eq!(a.submit(write(0, 9), &[]).unwrap_err().error, Error::ServiceEnded);
    let block = b.read_now(Extent::new(0, 512), Block::private(512));
    assert_eq!(block.unwrap_err().error, Error::ServiceEnded);
    assert!(matches!(process.attach("b", false, own_pidfd().as_fd()), Err(StoreError::Gone)));
    assert!(!process.join().unwrap().success());
    drop((a, b));

    let process = place.start_process();
    let ((a, number), (b, _)) = (attach_disk(&process, "a"), attach_disk(&process, "b"));
    for nth in 0..50u8 {
        let at = u64::from(nth) * 4096;
        assert_eq!((read_byte(&a, at), read_byte(&b, at)), (1 + nth, 101 + nth));
    }
    let ticket = a.submit_with(vec![write(0, 77)], &[], submit_with_mark(5)).unwrap()[0];
    a.wait_visible(ticket).unwrap();
    drop(a);
    assert_eq!(process.wait_detached(number).unwrap(), 5);
    refusal_message(process.wait_detached(number));
    // Two readers share a disk, which is then read-only.
    let readers = [0, 1].map(|_| process.attach("a", true, own_pidfd().as_fd()).unwrap());
    for attached in &readers {
        let (disk, _session) = open_attached_disk(attached);
        assert!(disk.properties().read_only && read_byte(&disk, 0) == 77);
        assert!(disk.submit(write(0, 1), &[]).is_err());
    }
    drop(b);
    assert!(process.join().unwrap().success());
    place.draconis.run_ok(["store", "check", place.store_path().to_str().unwrap()]);
}

#[test]
fn ext4_volume_works_on_remote_disk() {
    use draconis_ext::{AccessTimes, OpenOptions, Volume, WriteOptions};
    if !has_tool("a volume on a disk of a process", "e2fsck") {
        return;
    }
    let place = TestStore::new(&[]);
    let store = place.store_path();
    let image = format!("{}#vol", store.display());
    place.draconis.run_ok(["format", "-t", "ext4", &image, "16M"]);
    let process = place.start_process();
    let (disk, number) = attach_disk(&process, "vol");
    let clock = || draconis_types::Time { seconds: 1_700_000_000, nanoseconds: 0 };
    let writing = WriteOptions {
        clock: Arc::new(clock),
        dirty_bytes: 1 << 20,
        atime: AccessTimes::Never,
        discard: true,
    };
    let volume = Volume::open_for_writing(Arc::new(disk), OpenOptions::default(), writing).unwrap();
    let new = draconis_ext::NewNode {
        kind: draconis_types::FileType::File,
        mode: 0o644,
        uid: 0,
        gid: 0,
        device: (0, 0),
        target: b"",
    };
    let file = volume.create(volume.root(), b"file", &new).unwrap();
    let bytes: Vec<u8> = (0..3_000_000u32).map(|at| (at.wrapping_mul(at) >> 7) as u8).collect();
    let mut done = 0;
    while done < bytes.len() {
        done += volume.write(file, done as u64, &bytes[done..]).unwrap();
    }
    volume.sync().unwrap();
    // Synced data survives any end of the process.
    process.kill();
    process.join().unwrap();
    drop(volume);
    let got = place.draconis.run(["cat", &format!("{image}:/file")]);
    assert!(got.stdout == bytes);
    let (store, raw) = (store.to_str().unwrap(), place.draconis.path("raw"));
    place.draconis.run_ok(["store", "get", store, "vol", raw.to_str().unwrap()]);
    common::volume::run_e2fsck(&raw);
    assert_eq!(number, 1);
}

#[test]
fn non_stores_and_missing_disks_are_refused() {
    let place = TestStore::new(&["vol"]);
    let file = place.draconis.path("zeros");
    std::fs::write(&file, vec![0; 1 << 20]).unwrap();
    let zeros = std::fs::File::options().read(true).write(true).open(&file).unwrap();
    let said = match StoreProcess::start(program_path(), zeros.into(), StoreAccess::Write) {
        Err(StoreError::Refused(said)) => said,
        _ => panic!("zeros are no store"),
    };
    assert!(said.contains("no superblock"), "{said}");
    let process =
        StoreProcess::start(program_path(), place.open_store_file(false), StoreAccess::Read)
            .unwrap();
    let said = refusal_message(process.attach("other", true, own_pidfd().as_fd()));
    assert_eq!(said, "the store has no disk other");
    // All disks of a read-only store are read-only.
    let attached = process.attach("vol", false, own_pidfd().as_fd()).unwrap();
    assert!(open_attached_disk(&attached).0.properties().read_only);
    refusal_message(process.wait_detached(99));
    assert!(process.join().unwrap().success());
}

/// A process that receives hand-made messages.
struct RawStoreClient {
    child: std::process::Child,
    control: OwnedFd,
}

impl RawStoreClient {
    fn new(place: &TestStore) -> Self {
        let flags = SocketFlags::CLOEXEC;
        let (control, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let child =
            Command::new(program_path()).arg("store-process").stdin(theirs).spawn().unwrap();
        let told = Self { child, control };
        assert_eq!(told.send_and_receive(b"o", &[place.open_store_file(true)]), Some(vec![0; 9]));
        told
    }

    /// Sends a message; returns the reply.
    fn send_and_receive(&self, bytes: &[u8], fds: &[OwnedFd]) -> Option<Vec<u8>> {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        descriptors::send_with_fds(&self.control, bytes, &fds).unwrap();
        let mut answer = vec![0; 1024];
        let got =
            descriptors::receive_with_fds(&self.control, &mut answer, RecvFlags::empty()).ok()?;
        answer.truncate(got.len);
        (got.len > 0).then_some(answer)
    }
}

#[test]
fn malformed_messages_are_refused_without_exit() {
    let place = TestStore::new(&["vol"]);
    let mut told = RawStoreClient::new(&place);
    let (other, _end) = std::os::unix::net::UnixStream::pair().unwrap();
    let other = OwnedFd::from(other);
    let long = [b'a'; 2000];
    let questions: [(&[u8], Vec<OwnedFd>); 9] = [
        (b"x", vec![]),
        (b"a", vec![]),
        (b"avol", vec![]),
        // The process does not wait for a hello from a sender that is gone.
        (b"avol", vec![socket_without_peer()]),
        (b"avol", vec![other.try_clone().unwrap(), other.try_clone().unwrap()]),
        (b"avol", vec![std::fs::File::open("/dev/null").unwrap().into()]),
        (b"e", vec![]),
        (b"e12345678", vec![other.try_clone().unwrap()]),
        (&long, vec![]),
    ];
    for (question, fds) in questions {
        let answer = told.send_and_receive(question, &fds).expect("an answer");
        assert_eq!(answer[0], 1, "{:?}", question.escape_ascii().to_string());
    }
    let RawStoreClient { child, control } = &mut told;
    drop(std::mem::replace(control, socket_without_peer()));
    assert!(child.wait().unwrap().success());
}

#[test]
fn failing_worker_loses_only_its_disk() {
    use draconis_exchange::contract::{self, volume};
    let place = TestStore::new(&["a", "b", "c"]);
    let process = place.start_process();
    let (a, _) = attach_disk(&process, "a");
    let mut dying = Command::new("sleep").arg("1000").spawn().unwrap();
    let pid = rustix::process::Pid::from_raw(dying.id().cast_signed()).unwrap();
    let guest = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    let attached = process.attach("b", false, guest.as_fd()).unwrap();
    refusal_message(process.attach("b", false, own_pidfd().as_fd()));
    dying.kill().unwrap();
    assert_eq!(process.wait_detached(attached.number).unwrap(), 0);
    dying.wait().unwrap();
    attach_disk(&process, "b");
    // A contract other than that of disks.
    let attached = process.attach("c", false, own_pidfd().as_fd()).unwrap();
    let session = accept(&attached.socket, draconis_testkit::wait::hang_deadline()).unwrap();
    let end = session.client::<volume::Volume>(0).unwrap();
    let text = Block::private(64);
    drop(end.send(volume::Mount { options: text, len: 0 }));
    // The other lanes are closed in order; a killed worker would close them, too.
    (1..64).for_each(|lane| drop(session.client::<contract::disk::Disk>(lane)));
    process.wait_detached(attached.number).unwrap();
    assert_eq!(read_byte(&a, 0), 0);
    drop(a);
    assert!(process.join().unwrap().success());
}

/// Returns a socket whose peer is closed.
fn socket_without_peer() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap().0
}
