//! Conformance suite, run over every disk: in memory, in a file in each of its modes, stacked, and
//! remote from a thread and from a process.

use std::any::Any;
use std::io::Write as _;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;

use draconis_device::{
    Atomic, Disk, Error, Extent, FileDisk, FileOptions, Group, MemoryDisk, Pending, Properties,
    ReadAnswer, Refused, RemoteDisk, SubDisk, SubmitOptions, Ticket, Urgency, Write,
    serve_remote_disk,
};
use draconis_exchange::channel::session::{self, Session, SessionConfig};
use draconis_exchange::channel::{self, Client, Server};
use draconis_exchange::contract::List;
use draconis_exchange::contract::disk::{self, Submit};
use draconis_exchange::heap::arena::SlotClass;
use draconis_testkit::sim::{Clock, Hdd, HddParameters, SimDisk, Ssd, SsdParameters};
use draconis_testkit::{CrashOptions, CrashStates, FaultDisk, RecordDisk, conform};
use draconis_types::Block;
use draconis_types::Refusal;
use rustix::process::{Pid, PidfdFlags, Signal, getpid, kill_process, pidfd_open};

const TEST_TIMEOUT: Duration = draconis_testkit::wait::HANG_BOUND;
/// Length of every disk of the suite; no multiple of direct I/O alignment.
const DISK_BYTES: usize = 300 * 512;
const LANES: u32 = 4;

/// Sector `n` holds the byte `n` modulo 256.
fn numbered_sectors() -> Vec<u8> {
    (0..DISK_BYTES).map(|at| (at / 512) as u8).collect()
}

/// A disk, and the resources that must outlive it.
struct TestDisk {
    disk: Box<dyn Disk>,
    _beside: Box<dyn Any>,
}

fn test_disk(disk: impl Disk + 'static, beside: impl Any) -> Option<TestDisk> {
    Some(TestDisk { disk: Box::new(disk), _beside: Box::new(beside) })
}

fn image_file() -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&numbered_sectors()).unwrap();
    file
}

fn open_file_disk(write: bool, direct: bool, uring: bool) -> Option<TestDisk> {
    let image = image_file();
    let disk = FileDisk::open(image.path(), FileOptions { write, direct, uring }).unwrap();
    test_disk(disk, image)
}

const BUFFERED_OPTIONS: FileOptions = FileOptions { write: true, direct: false, uring: false };

fn underlying_file_disk(write: bool) -> (FileDisk, tempfile::NamedTempFile) {
    let image = image_file();
    (FileDisk::open(image.path(), FileOptions { write, ..BUFFERED_OPTIONS }).unwrap(), image)
}

// Each function creates a disk that holds `contents`; `None` where the kind cannot be read-only.

fn memory(write: bool) -> Option<TestDisk> {
    write.then(|| test_disk(MemoryDisk::new(numbered_sectors(), 512), ()))?
}
fn file_plain(write: bool) -> Option<TestDisk> {
    open_file_disk(write, false, false)
}
fn file_direct(write: bool) -> Option<TestDisk> {
    open_file_disk(write, true, false)
}
fn file_uring(write: bool) -> Option<TestDisk> {
    open_file_disk(write, true, true)
}
fn file_discarding(write: bool) -> Option<TestDisk> {
    let image = image_file();
    let options = FileOptions { write, direct: false, uring: false };
    let disk = FileDisk::open_discarding(image.path(), options).unwrap();
    assert!(write || !disk.properties().discards);
    test_disk(disk, image)
}
fn view(write: bool) -> Option<TestDisk> {
    let image = tempfile::NamedTempFile::new().unwrap();
    let around = [&[0xee; 1024][..], &numbered_sectors(), &[0xee; 512]].concat();
    std::fs::write(image.path(), around).unwrap();
    let disk = FileDisk::open(image.path(), FileOptions { write, ..BUFFERED_OPTIONS }).unwrap();
    test_disk(SubDisk::new(Arc::new(disk), Extent::new(1024, DISK_BYTES as u64)).unwrap(), image)
}
fn fault(write: bool) -> Option<TestDisk> {
    let (disk, image) = underlying_file_disk(write);
    test_disk(FaultDisk::new(disk), image)
}
fn record(write: bool) -> Option<TestDisk> {
    let (disk, image) = underlying_file_disk(write);
    test_disk(RecordDisk::new(disk), image)
}
fn crash(write: bool) -> Option<TestDisk> {
    let state =
        CrashStates::new(numbered_sectors(), vec![], CrashOptions::default()).next().unwrap();
    write.then(|| test_disk(state.disk, ()))?
}
fn shared(write: bool) -> Option<TestDisk> {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(numbered_sectors(), 512));
    write.then(|| test_disk(RecordDisk::new(disk), ()))?
}
fn sim_hdd(write: bool) -> Option<TestDisk> {
    write.then(|| test_disk(SimDisk::hdd(64 << 20, 1).0, ()))?
}
fn sim_hdd_without_cache(write: bool) -> Option<TestDisk> {
    let parameters = HddParameters::desktop_7200(64 << 20);
    let disk = Hdd::new(HddParameters { volatile_cache: false, ..parameters });
    write.then(|| test_disk(SimDisk::new(disk, &Clock::new()), ()))?
}
fn sim_ssd(write: bool) -> Option<TestDisk> {
    write.then(|| test_disk(SimDisk::ssd(64 << 20, 1).0, ()))?
}
fn sim_ssd_volatile(write: bool) -> Option<TestDisk> {
    let parameters = SsdParameters::p3700(64 << 20);
    let disk = Ssd::new(SsdParameters { volatile_cache: true, ..parameters });
    write.then(|| test_disk(SimDisk::new(disk, &Clock::new()), ()))?
}
fn remote_thread(write: bool) -> Option<TestDisk> {
    let (disk, image) = underlying_file_disk(write);
    let (clients, servers) = (0..LANES).map(|_| channel::pair::<disk::Disk>()).unzip();
    std::thread::spawn(move || serve_remote_disk(&disk, servers, TEST_TIMEOUT));
    test_disk(RemoteDisk::new(clients, None, TEST_TIMEOUT).unwrap(), image)
}
fn remote_process(write: bool) -> Option<TestDisk> {
    let image = image_file();
    let how = if write { "serve" } else { "serve-read-only" };
    let (session, child) = spawn_child(how, image.path());
    let clients = (0..LANES).map(|lane| session.client(lane).unwrap()).collect();
    let blocks = Box::new(move |len| session.allocate_block(len));
    let disk = RemoteDisk::new(clients, Some(blocks), TEST_TIMEOUT).unwrap();
    test_disk(disk, (ReapedChild(child), image))
}

/// Runs every check on every disk.
macro_rules! conform {
    ($($disk:ident),*; $checks:tt) => { $(conform!(@ $disk $checks);)* };
    (@ $disk:ident { $($check:ident),* $(,)? }) => {
        mod $disk {
            $(
                #[test]
                fn $check() {
                    conform::$check(&*super::writable(super::$disk).disk);
                }
            )*

            #[test]
            fn read_only_disk_refuses_groups() {
                super::read_only_disk_refuses_groups(super::$disk);
            }

            use draconis_testkit::conform;
        }
    };
}

conform! {
    memory, file_plain, file_direct, file_uring, file_discarding, view, fault, record, crash,
    shared, remote_thread, remote_process, sim_hdd, sim_hdd_without_cache, sim_ssd,
    sim_ssd_volatile;
    {
        reads_work_up_to_last_sector,
        refused_read_returns_block,
        refused_group_is_returned_unapplied,
        later_overlapping_write_wins,
        groups_of_all_sizes_are_applied,
        durable_group_is_readable,
        concurrent_reads_and_groups_are_independent,
        chain_is_applied_in_order,
        refused_chain_is_returned_unapplied,
        visible_group_is_seen_by_all_reads,
        concurrent_waits_all_return,
        tickets_ascend_across_threads,
        discard_changes_only_its_extents,
        punched_hole_is_zeros_in_its_turn,
        holes_read_as_zeros,
    }
}

#[test]
fn all_conformance_checks_are_listed() {
    // As many as are listed above.
    assert_eq!(conform::ALL_CHECKS.len(), 15);
    conform::check_all(|| MemoryDisk::new(vec![0x55; DISK_BYTES], 512));
    // Larger sectors, and an odd length.
    conform::check_all(|| MemoryDisk::new(vec![0x55; 301 * 4096 + 5], 4096));
}

/// A disk that breaks one guarantee at a time.
struct FaultyDisk(MemoryDisk, u32);

impl Disk for FaultyDisk {
    fn properties(&self) -> Properties {
        self.0.properties()
    }
    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        let len = into.len();
        let answer = self.0.read(at, into, urgency).wait().unwrap();
        Pending::ready(match (self.1, answer) {
            (0, Err(refused)) => Err(Refused { payload: None, ..refused }),
            (1, Ok(_)) if urgency == Urgency::Ahead => Ok(Block::private(len)),
            (_, answer) => answer,
        })
    }
    fn submit_chain(
        &self,
        mut chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        match self.1 {
            2 => chain.iter_mut().for_each(|group| group.writes.reverse()),
            3 => return self.0.submit_chain(chain, &[]),
            4 => chain.iter_mut().for_each(|group| group.writes.truncate(150)),
            5 => {
                return self
                    .0
                    .submit_chain(chain, after)
                    .map_err(|_| Refused { payload: None, error: Error::ServiceEnded });
            }
            6 => {
                return self
                    .0
                    .submit_chain(chain, after)
                    .map(|tickets| vec![Ticket(1); tickets.len()]);
            }
            _ => {}
        }
        self.0.submit_chain(chain, after)
    }
    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        self.0.wait_visible(ticket)
    }
    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        if self.1 == 7 { Ok(()) } else { self.0.wait_durable(ticket) }
    }
    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), Error> {
        let wide = |at: &Extent| Extent::new(at.start_bytes, at.len_bytes + 512);
        match self.1 {
            8 => self.0.discard(&extents.iter().map(wide).collect::<Vec<_>>(), after),
            9 => self.0.discard(extents, &[]),
            _ => self.0.discard(extents, after),
        }
    }
}

#[test]
fn checks_detect_each_faulty_disk() {
    for lie in 0..10 {
        let liar = || FaultyDisk(MemoryDisk::new(vec![0; DISK_BYTES], 512), lie);
        let run = std::panic::catch_unwind(|| conform::check_all(liar));
        assert!(run.is_err(), "lie {lie} was believed");
    }
}

type DiskFactory = fn(bool) -> Option<TestDisk>;

fn writable(make: DiskFactory) -> TestDisk {
    make(true).expect("every disk can be written")
}

fn filled_block(len: usize, byte: u8) -> Block {
    let mut block = Block::private(len);
    block.copy_in(0, &vec![byte; len]);
    block
}

fn read_bytes(disk: &dyn Disk, start: u64, len: usize) -> Vec<u8> {
    let answer = disk.read_now(Extent::new(start, len as u64), filled_block(len, 0xdd));
    answer.unwrap().into_private().to_vec()
}

fn group_of(writes: &[(u64, usize, u8)]) -> Group {
    let write = |&(at_bytes, len, byte)| Write { at_bytes, block: filled_block(len, byte) };
    Group { writes: writes.iter().map(write).collect() }
}

fn read_only_disk_refuses_groups(make: DiskFactory) {
    let Some(subject) = make(false) else { return };
    let disk = &*subject.disk;
    assert!(disk.properties().read_only);
    let refused = disk.submit(group_of(&[(0, 512, 9)]), &[]).unwrap_err();
    assert_eq!(refused.error, Error::ReadOnly);
    assert_eq!(refused.payload.unwrap().writes.len(), 1);
    assert!(read_bytes(disk, 0, DISK_BYTES) == numbered_sectors());
}

// Guarantees of remote disks only.

#[test]
fn served_disk_is_atomic_against_client_death() {
    let (plain, served) = (file_plain(true).unwrap(), remote_thread(true).unwrap());
    assert_eq!(plain.disk.properties().atomic, Atomic::None);
    assert_eq!(served.disk.properties().atomic, Atomic::AgainstDeath);
}

#[test]
fn oversized_chain_is_refused_by_client() {
    let TestDisk { disk, _beside } = remote_thread(true).unwrap();
    let bounds = disk.chain_bounds();
    assert!(bounds.writes >= 1 << 16 && bounds.bytes >= 64 << 20, "{bounds}");
    let groups = |count| (0..count).map(|_| Group::default()).collect();
    let refused = disk.submit_chain(groups(bounds.groups + 1), &[]).unwrap_err();
    assert_eq!(refused.error, Error::ChainTooLarge { bounds });
    assert_eq!(refused.payload.unwrap().len(), bounds.groups + 1);
    let tickets = disk.submit_chain(groups(bounds.groups), &[]).unwrap();
    disk.wait_durable(tickets[bounds.groups - 1]).unwrap();
    let mut many = Group::default();
    for _ in 0..bounds.writes {
        many.writes.push(Write { at_bytes: 0, block: Block::private(512) });
    }
    let ticket = disk.submit(many, &[]).unwrap();
    disk.wait_durable(ticket).unwrap();
}

#[test]
fn killed_service_returns_service_ended() {
    let image = image_file();
    let (session, mut child) = spawn_child("serve", image.path());
    let clients = (0..LANES).map(|lane| session.client(lane).unwrap()).collect();
    let blocks = Box::new(move |len| session.allocate_block(len));
    // The timeout is too long to matter: only the death is detected.
    let disk = RemoteDisk::new(clients, Some(blocks), Duration::from_secs(24 * 3600)).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    for urgency in [Urgency::Now, Urgency::Ahead].repeat(4) {
        let answer = disk.read(Extent::new(0, 512), Block::private(512), urgency).wait().unwrap();
        let refused = answer.unwrap_err();
        assert_eq!((refused.error, refused.payload.unwrap().len()), (Error::ServiceEnded, 512));
    }
    let refused = disk.submit(group_of(&[(0, 512, 1)]), &[]).unwrap_err();
    assert_eq!((refused.error, refused.payload.unwrap().writes.len()), (Error::ServiceEnded, 1));
    assert_eq!(disk.wait_durable(Ticket(1)), Err(Error::ServiceEnded));
}

#[test]
fn remote_disk_returns_device_errors() {
    use draconis_testkit::{Fault, FaultTarget};
    let disk = FaultDisk::new(MemoryDisk::new(numbered_sectors(), 512));
    disk.add_fault(FaultTarget::Reads(Extent::new(512, 512)), Fault::Fail);
    disk.add_fault(FaultTarget::Writes(Extent::new(1024, 512)), Fault::Fail);
    let (clients, servers) = (0..LANES).map(|_| channel::pair::<disk::Disk>()).unzip();
    std::thread::scope(|scope| {
        let served = scope.spawn(|| serve_remote_disk(&disk, servers, TEST_TIMEOUT));
        let remote = RemoteDisk::new(clients, None, TEST_TIMEOUT).unwrap();
        assert_eq!(read_bytes(&remote, 0, 512)[0], 0);
        let refused = remote.read_now(Extent::new(0, 1024), filled_block(1024, 5)).unwrap_err();
        assert!(matches!(refused.error, Error::Io { what: "read", .. }), "{}", refused.error);
        assert_eq!(refused.payload.unwrap().len(), 1024);
        let both = group_of(&[(0, 512, 1), (1024, 512, 1)]);
        let refused = remote.submit(both, &[]).unwrap_err();
        assert!(matches!(refused.error, Error::Io { what: "write", .. }), "{}", refused.error);
        assert_eq!(refused.payload.unwrap().writes[1].block.bytes(), Some(&[1; 512][..]));
        assert_eq!(read_bytes(&remote, 1024, 512)[0], 2);
        drop(remote);
        assert_eq!(served.join().unwrap(), Ok(()));
    });
}

/// A disk whose flushes block until a test opens the gate.
struct FlushGateDisk(MemoryDisk, std::sync::Mutex<bool>, std::sync::Condvar);

impl draconis_device::ForwardingDisk for FlushGateDisk {
    type Inner = MemoryDisk;
    fn inner_disk(&self) -> &MemoryDisk {
        &self.0
    }
    fn submit_with(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
        terms: SubmitOptions,
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let tickets = self.inner_disk().submit_chain(chain, after)?;
        terms.wait(self, &tickets)?;
        Ok(tickets)
    }
    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        let open = self.2.wait_while(self.1.lock().unwrap(), |open| !*open).unwrap();
        drop(open);
        self.inner_disk().wait_durable(ticket)
    }
}

#[test]
fn flush_wait_does_not_block_other_requests() {
    let disk =
        FlushGateDisk(MemoryDisk::new(numbered_sectors(), 512), false.into(), Default::default());
    let (clients, servers) = (0..LANES).map(|_| channel::pair::<disk::Disk>()).unzip();
    std::thread::scope(|outer| {
        outer.spawn(|| serve_remote_disk(&disk, servers, TEST_TIMEOUT));
        let remote = RemoteDisk::new(clients, None, TEST_TIMEOUT).unwrap();
        let first = remote.submit(group_of(&[(0, 512, 1)]), &[]).unwrap();
        std::thread::scope(|scope| {
            let waiters: Vec<_> =
                (0..2 * LANES).map(|_| scope.spawn(|| remote.wait_durable(first))).collect();
            for round in 0..20 {
                remote.submit(group_of(&[(512, 512, round)]), &[first]).unwrap();
                assert_eq!(read_bytes(&remote, 512, 512)[0], round);
                let at = Extent::new(512, 512);
                let ahead = remote.read(at, Block::private(512), Urgency::Ahead).wait().unwrap();
                assert_eq!(ahead.unwrap().into_private()[0], round);
            }
            assert!(waiters.iter().all(|waiter| !waiter.is_finished()));
            *disk.1.lock().unwrap() = true;
            disk.2.notify_all();
            for waiter in waiters {
                assert_eq!(waiter.join().unwrap(), Ok(()));
            }
        });
    });
}

#[test]
fn client_closing_between_parts_writes_nothing() {
    let disk = MemoryDisk::new(numbered_sectors(), 512);
    let (client, server) = channel::pair::<disk::Disk>();
    std::thread::scope(|scope| {
        let served = scope.spawn(|| serve_remote_disk(&disk, vec![server], TEST_TIMEOUT));
        drop(send_part(client, true));
        assert_eq!(served.join().unwrap(), Ok(()));
    });
    assert!(disk.into_bytes() == numbered_sectors());
}

#[test]
fn client_killed_between_parts_writes_nothing() {
    for (role, expected) in [("die-within-a-group", false), ("die-after-a-group", true)] {
        let image = image_file();
        let (session, mut child) = spawn_child(role, Path::new("none"));
        let ends: Vec<Server<disk::Disk>> =
            (0..LANES).map(|lane| session.server(lane).unwrap()).collect();
        let disk = FileDisk::open(image.path(), BUFFERED_OPTIONS).unwrap();
        assert_eq!(serve_remote_disk(&disk, ends, TEST_TIMEOUT), Ok(()));
        child.wait().unwrap();
        session.wait_for_death(draconis_testkit::wait::hang_deadline()).unwrap();
        let audit = session.heap_usage();
        assert_eq!(audit.free_bytes, audit.total_bytes(), "{audit:?}");
        // Closing writes all submitted groups.
        drop(disk);
        let changed = std::fs::read(image.path()).unwrap() != numbered_sectors();
        assert_eq!(changed, expected, "{role}");
    }
}

/// Sends one part of a group; the server has received it when this returns.
fn send_part(client: Client<disk::Disk>, more: bool) -> Client<disk::Disk> {
    let blocks =
        vec![(0, filled_block(512, 0xaa)), (4096, filled_block(512, 0xbb))].try_into().unwrap();
    let ends = if more { List::new() } else { List::try_from(vec![2]).unwrap() };
    let part = Submit { blocks, ends, after: List::new(), mark: 0, durable: None, more };
    let (reply, client) = client.call(part, draconis_testkit::wait::hang_deadline()).unwrap();
    let reply: Result<_, Refusal> = reply.map_err(|nak| nak.why);
    assert_eq!(reply.unwrap().first.is_none(), more);
    client
}

// The other process: this test binary again.

const ROLE_VARIABLE: &str = "DRACONIS_TEST_ROLE";
const IMAGE_VARIABLE: &str = "DRACONIS_TEST_IMAGE";

/// A child that is killed when its test ends.
struct ReapedChild(Child);

impl Drop for ReapedChild {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A small session, so that large requests are split and wait for each other.
fn session_config() -> SessionConfig {
    let classes = [(4 << 10, 8), (64 << 10, 2)];
    let classes: Vec<_> = classes.map(|(slot_bytes, slots)| SlotClass { slot_bytes, slots }).into();
    SessionConfig { lanes: LANES, host: classes.clone(), guest: classes }
}

fn spawn_child(role: &str, image: &Path) -> (Arc<Session>, Child) {
    let (offer, socket) = session::offer(&session_config()).unwrap();
    let child = draconis_testkit::child_test!(child_entry)
        .env(ROLE_VARIABLE, role)
        .env(IMAGE_VARIABLE, image)
        .stdin(socket)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let pid = Pid::from_child(&child);
    (offer.start(pidfd_open(pid, PidfdFlags::empty()).unwrap()), child)
}

#[test]
fn child_entry() {
    let Ok(role) = std::env::var(ROLE_VARIABLE) else { return };
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let session = session::accept(&socket, draconis_testkit::wait::hang_deadline()).unwrap();
    match role.as_str() {
        "serve" | "serve-read-only" => {
            let path = std::env::var_os(IMAGE_VARIABLE).unwrap();
            let options = FileOptions { write: role == "serve", ..BUFFERED_OPTIONS };
            let disk = FileDisk::open(path.as_ref(), options).unwrap();
            let ends = (0..LANES).map(|lane| session.server(lane).unwrap()).collect();
            let _ = serve_remote_disk(&disk, ends, TEST_TIMEOUT);
        }
        _ => {
            let _end = send_part(session.client(0).unwrap(), role == "die-within-a-group");
            kill_process(getpid(), Signal::KILL).unwrap();
        }
    }
}
