//! One suite, every disk: in memory, in a file in each of its modes, stacked, and on the
//! other side of a channel - of a thread's, and of a process's.

use std::any::Any;
use std::io::Write as _;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use draconis_device::{
    Atomic, Disk, Error, Extent, FaultDisk, FileDisk, FileOptions, Group, MemoryDisk, Pending,
    Properties, ReadAnswer, RecordDisk, Refused, RemoteDisk, Ticket, Urgency, View, Write, serve,
};
use draconis_exchange::channel::process::{self, Plan, Session};
use draconis_exchange::channel::{self, Client, Server};
use draconis_exchange::contract::disk::{self, Submit};
use draconis_exchange::contract::{List, Refusal};
use draconis_exchange::heap::{Block, arena::Class};
use rustix::process::{Pid, PidfdFlags, Signal, getpid, kill_process, pidfd_open};

const PATIENCE: Duration = Duration::from_secs(20);
/// Length of every disk of the suite; not a multiple of what direct I/O wants.
const LEN: usize = 300 * 512;
const LANES: u32 = 4;

/// Sector `n` holds the byte `n`, as far as a byte goes.
fn contents() -> Vec<u8> {
    (0..LEN).map(|at| (at / 512) as u8).collect()
}

/// A disk, and what must live as long as it does.
struct Subject {
    disk: Box<dyn Disk>,
    _beside: Box<dyn Any>,
}

fn subject(disk: impl Disk + 'static, beside: impl Any) -> Option<Subject> {
    Some(Subject { disk: Box::new(disk), _beside: Box::new(beside) })
}

fn image() -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&contents()).unwrap();
    file
}

fn file(write: bool, direct: bool, uring: bool) -> Option<Subject> {
    let image = image();
    let disk = FileDisk::open(image.path(), FileOptions { write, direct, uring }).unwrap();
    subject(disk, image)
}

const PLAIN: FileOptions = FileOptions { write: true, direct: false, uring: false };

fn under(write: bool) -> (FileDisk, tempfile::NamedTempFile) {
    let image = image();
    (FileDisk::open(image.path(), FileOptions { write, ..PLAIN }).unwrap(), image)
}

// Each makes a disk that holds `contents`; none where the kind cannot be read-only.

fn memory(write: bool) -> Option<Subject> {
    write.then(|| subject(MemoryDisk::new(contents(), 512), ()))?
}
fn file_plain(write: bool) -> Option<Subject> {
    file(write, false, false)
}
fn file_direct(write: bool) -> Option<Subject> {
    file(write, true, false)
}
fn file_uring(write: bool) -> Option<Subject> {
    file(write, true, true)
}
fn view(write: bool) -> Option<Subject> {
    let image = tempfile::NamedTempFile::new().unwrap();
    let around = [&[0xee; 1024][..], &contents(), &[0xee; 512]].concat();
    std::fs::write(image.path(), around).unwrap();
    let disk = FileDisk::open(image.path(), FileOptions { write, ..PLAIN }).unwrap();
    subject(View::new(Arc::new(disk), Extent::new(1024, LEN as u64)).unwrap(), image)
}
fn fault(write: bool) -> Option<Subject> {
    let (disk, image) = under(write);
    subject(FaultDisk::new(disk), image)
}
fn record(write: bool) -> Option<Subject> {
    let (disk, image) = under(write);
    subject(RecordDisk::new(disk), image)
}
fn remote_thread(write: bool) -> Option<Subject> {
    let (disk, image) = under(write);
    let (clients, servers) = (0..LANES).map(|_| channel::pair::<disk::Disk>()).unzip();
    std::thread::spawn(move || serve(&disk, servers, PATIENCE));
    subject(RemoteDisk::new(clients, None, PATIENCE).unwrap(), image)
}
fn remote_process(write: bool) -> Option<Subject> {
    let image = image();
    let how = if write { "serve" } else { "serve-read-only" };
    let (session, child) = spawn(how, image.path());
    let clients = (0..LANES).map(|lane| session.client(lane).unwrap()).collect();
    let blocks = Box::new(move |len| session.block(len));
    let disk = RemoteDisk::new(clients, Some(blocks), PATIENCE).unwrap();
    subject(disk, (Reaped(child), image))
}

/// Runs every test on every disk.
macro_rules! conform {
    ($($disk:ident),*; $tests:tt) => { $(conform!(@ $disk $tests);)* };
    (@ $disk:ident { $($test:ident),* $(,)? }) => {
        mod $disk {
            $(
                #[test]
                fn $test() {
                    super::$test(super::$disk);
                }
            )*
        }
    };
}

conform! {
    memory, file_plain, file_direct, file_uring, view, fault, record, remote_thread,
    remote_process;
    {
        reads_reach_both_ends_and_no_further,
        a_refusal_returns_the_block,
        a_refused_group_comes_back_whole_and_changes_nothing,
        what_comes_later_in_a_group_or_after_it_wins,
        a_group_of_any_shape_is_applied,
        what_was_waited_for_is_there,
        many_reads_and_groups_at_once_all_get_their_own_answer,
        a_chain_is_taken_whole_and_in_order,
        a_chain_that_is_refused_comes_back_whole_and_changes_nothing,
        what_is_settled_is_seen_by_every_read,
        waiting_in_many_threads_ends_for_all,
        a_disk_for_reading_refuses_groups,
    }
}

type Make = fn(bool) -> Option<Subject>;

fn writable(make: Make) -> Subject {
    make(true).expect("every disk can be written")
}

fn filled(len: usize, byte: u8) -> Block {
    let mut block = Block::private(len);
    block.copy_in(0, &vec![byte; len]);
    block
}

fn read(disk: &dyn Disk, start: u64, len: usize) -> Vec<u8> {
    let answer = disk.read_now(Extent::new(start, len as u64), filled(len, 0xdd));
    answer.unwrap().into_private().to_vec()
}

fn group(writes: &[(u64, usize, u8)]) -> Group {
    let write = |&(at_bytes, len, byte)| Write { at_bytes, block: filled(len, byte) };
    Group { writes: writes.iter().map(write).collect() }
}

fn reads_reach_both_ends_and_no_further(make: Make) {
    let subject = writable(make);
    let disk = &*subject.disk;
    let properties = disk.properties();
    assert_eq!((properties.len_bytes, properties.sector_bytes), (LEN as u64, 512));
    for (start, len) in [(0, 512), (LEN - 512, 512), (0, LEN), (512, 4096), (4096, 65536)] {
        let expected = &contents()[start..start + len];
        assert!(read(disk, start as u64, len) == expected, "{len} at {start}");
        let at = Extent::new(start as u64, len as u64);
        let ahead = disk.read(at, Block::private(len), Urgency::Ahead).wait().unwrap();
        assert!(*ahead.unwrap().into_private() == *expected, "{len} ahead at {start}");
    }
}

fn a_refusal_returns_the_block(make: Make) {
    let subject = writable(make);
    let len = LEN as u64;
    for urgency in [Urgency::Now, Urgency::Ahead] {
        let refused = |start, extent_len, len| {
            let at = Extent::new(start, extent_len);
            let answer = subject.disk.read(at, Block::private(len), urgency).wait().unwrap();
            let refused = answer.unwrap_err();
            assert_eq!(refused.goods.unwrap().len(), len);
            refused.error
        };
        for (start, len) in [(len, 512), (len - 512, 1024), (u64::MAX - 511, 512), (1 << 60, 512)] {
            let error = refused(start, len, len as usize);
            assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
        }
        for (start, extent_len, len) in [(1, 512, 512), (0, 511, 511), (0, 1024, 512)] {
            let error = refused(start, extent_len, len);
            assert!(matches!(error, Error::Misaligned { .. }), "{error}");
        }
    }
}

fn a_refused_group_comes_back_whole_and_changes_nothing(make: Make) {
    let subject = writable(make);
    let good = (0, 512, 0xaa);
    for bad in [(LEN as u64, 512, 1), (u64::MAX - 511, 512, 1), (7, 512, 1), (512, 100, 1)] {
        let refused = subject.disk.submit(group(&[good, bad]), &[]).unwrap_err();
        let writes = refused.goods.unwrap().writes;
        let back: Vec<_> = writes.iter().map(|w| (w.at_bytes, w.block.len())).collect();
        assert_eq!(back, [(0, 512), (bad.0, bad.1)]);
        assert_eq!(writes[0].block.bytes().unwrap()[511], 0xaa);
        let expected = matches!(refused.error, Error::OutOfRange { .. } | Error::Misaligned { .. });
        assert!(expected, "{}", refused.error);
    }
    let refused = subject.disk.submit(group(&[good]), &[Ticket(99)]).unwrap_err();
    assert_eq!(refused.error, Error::NoTicket(Ticket(99)));
    assert_eq!(refused.goods.unwrap().writes[0].block.bytes().unwrap()[0], 0xaa);
    assert_eq!(subject.disk.wait(Ticket(99)), Err(Error::NoTicket(Ticket(99))));
    assert!(read(&*subject.disk, 0, LEN) == contents());
}

fn what_comes_later_in_a_group_or_after_it_wins(make: Make) {
    let subject = writable(make);
    let disk = &*subject.disk;
    let overlapping = group(&[(0, 2048, 1), (512, 512, 2), (1024, 4096, 3)]);
    let first = disk.submit(overlapping, &[]).unwrap();
    let second = disk.submit(group(&[(1536, 512, 4)]), &[first]).unwrap();
    assert_ne!(first, second);
    disk.wait(second).unwrap();
    let bytes = read(disk, 0, 5632);
    let sectors: Vec<_> = bytes.chunks(512).map(|sector| sector[0]).collect();
    assert_eq!(sectors, [1, 2, 3, 4, 3, 3, 3, 3, 3, 3, 10]);
}

fn a_group_of_any_shape_is_applied(make: Make) {
    let subject = writable(make);
    let disk = &*subject.disk;
    // More writes than one message carries, more predecessors, and one write alone larger
    // than any block that crosses.
    let tickets: Vec<_> =
        (0..40).map(|i| disk.submit(group(&[(0, 512, i)]), &[]).unwrap()).collect();
    let many: Vec<_> = (0..200).map(|i| ((299 - i) * 512, 512, i as u8)).collect();
    let last = disk.submit(group(&many), &tickets).unwrap();
    disk.wait(last).unwrap();
    let bytes = read(disk, 0, LEN);
    assert_eq!(bytes[0], 39);
    for i in 0..200 {
        assert_eq!(bytes[(299 - i) * 512], i as u8);
    }
    let whole = disk.submit(group(&[(0, LEN, 0x77)]), &[last]).unwrap();
    disk.wait(whole).unwrap();
    assert!(read(disk, 0, LEN) == vec![0x77; LEN]);
    let nothing = disk.submit(Group::default(), &[]).unwrap();
    disk.wait(nothing).unwrap();
}

fn what_was_waited_for_is_there(make: Make) {
    let subject = writable(make);
    let disk = &*subject.disk;
    for round in 1..20u8 {
        let at = u64::from(round) * 1024;
        let first = disk.submit(group(&[(at, 512, round)]), &[]).unwrap();
        let second = disk.submit(group(&[(at + 512, 512, round)]), &[first]).unwrap();
        disk.wait(second).unwrap();
        // With everything it follows.
        assert_eq!(read(disk, at, 1024), [round; 1024]);
        disk.wait(first).unwrap();
        disk.wait(second).unwrap();
    }
}

fn many_reads_and_groups_at_once_all_get_their_own_answer(make: Make) {
    let subject = writable(make);
    let disk = &*subject.disk;
    std::thread::scope(|scope| {
        for user in 0..6u64 {
            scope.spawn(move || {
                // Each has a part of the disk of its own.
                let base = user * 50 * 512;
                for round in 0..20u64 {
                    let at = base + round % 49 * 512;
                    let byte = (user * 40 + round) as u8;
                    let ahead: Vec<_> = (0..4)
                        .map(|i| {
                            let at = Extent::new(base + (49 - i % 2) * 512, 512);
                            disk.read(at, Block::private(512), Urgency::Ahead)
                        })
                        .collect();
                    let ticket = disk.submit(group(&[(at, 512, byte)]), &[]).unwrap();
                    disk.wait(ticket).unwrap();
                    assert_eq!(read(disk, at, 512), [byte; 512]);
                    for (i, pending) in (0..).zip(ahead) {
                        let got = pending.wait().unwrap().unwrap().into_private();
                        let untouched = (user * 50 + 49 - i % 2) as u8;
                        assert!(i % 2 == 1 || got[0] == untouched, "{} {untouched}", got[0]);
                    }
                }
            });
        }
    });
}

fn a_chain_is_taken_whole_and_in_order(make: Make) {
    let subject = writable(make);
    let disk = &*subject.disk;
    let before = disk.submit(group(&[(0, 1024, 1)]), &[]).unwrap();
    let chain = vec![
        group(&[(512, 1024, 2), (4096, 512, 2)]),
        Group::default(),
        group(&[(1024, 512, 3)]),
        // Larger than a message, with more groups behind it than end in one.
        group(&[(8192, 100 * 512, 4)]),
    ];
    let small = (0..40).map(|i| group(&[((200 + i) * 512, 512, i as u8)]));
    let chain: Vec<_> = chain.into_iter().chain(small).collect();
    let tickets = disk.submit_chain(chain, &[before]).unwrap();
    assert_eq!(tickets.len(), 44);
    assert!(tickets[0] > before && tickets.is_sorted() && tickets[42] < tickets[43]);
    for ticket in [tickets[0], tickets[3], tickets[43], tickets[1]] {
        disk.wait(ticket).unwrap();
    }
    let bytes = read(disk, 0, LEN);
    let sectors: Vec<_> = bytes.chunks(512).map(|sector| sector[0]).collect();
    assert_eq!(sectors[..9], [1, 2, 3, 3, 4, 5, 6, 7, 2]);
    assert!(sectors[16..116].iter().all(|byte| *byte == 4));
    assert!(sectors[200..240].iter().copied().eq(0..40));
    assert_eq!(disk.submit_chain(vec![], &[]).unwrap(), []);
}

fn a_chain_that_is_refused_comes_back_whole_and_changes_nothing(make: Make) {
    let subject = writable(make);
    let good = || group(&[(0, 512, 0xaa), (1024, 1024, 0xaa)]);
    let bad = group(&[(LEN as u64 - 512, 1024, 1)]);
    let refused = subject.disk.submit_chain(vec![good(), bad, good()], &[]).unwrap_err();
    assert!(matches!(refused.error, Error::OutOfRange { .. }), "{}", refused.error);
    let lens = |chain: Vec<Group>| -> Vec<Vec<usize>> {
        let group = |group: &Group| group.writes.iter().map(|w| w.block.len()).collect();
        chain.iter().map(group).collect()
    };
    assert_eq!(lens(refused.goods.unwrap()), [vec![512, 1024], vec![1024], vec![512, 1024]]);
    let refused = subject.disk.submit_chain(vec![good(), good()], &[Ticket(9)]).unwrap_err();
    assert_eq!(refused.error, Error::NoTicket(Ticket(9)));
    let goods = refused.goods.unwrap();
    assert_eq!(goods[1].writes[1].block.bytes().unwrap()[1023], 0xaa);
    assert_eq!(lens(goods), vec![vec![512, 1024]; 2]);
    assert!(read(&*subject.disk, 0, LEN) == contents());
    // Nothing was given a name.
    let first = subject.disk.submit(good(), &[]).unwrap();
    subject.disk.wait(first).unwrap();
    assert_eq!(subject.disk.wait(Ticket(first.0 + 1)), Err(Error::NoTicket(Ticket(first.0 + 1))));
}

fn what_is_settled_is_seen_by_every_read(make: Make) {
    let subject = writable(make);
    let disk = &*subject.disk;
    for round in 0..50u8 {
        let at = u64::from(round) * 1024;
        let chain = vec![group(&[(at, 512, round)]), group(&[(at + 512, 512, round)])];
        let tickets = disk.submit_chain(chain, &[]).unwrap();
        disk.settle(tickets[1]).unwrap();
        for urgency in [Urgency::Now, Urgency::Ahead] {
            let extent = Extent::new(at, 1024);
            let block = disk.read(extent, filled(1024, 0xdd), urgency).wait().unwrap().unwrap();
            assert_eq!(*block.into_private(), [round; 1024]);
        }
        disk.settle(tickets[0]).unwrap();
    }
    assert_eq!(disk.settle(Ticket(999)), Err(Error::NoTicket(Ticket(999))));
}

fn waiting_in_many_threads_ends_for_all(make: Make) {
    let subject = writable(make);
    let disk = &*subject.disk;
    // More waiters than lanes, and as many that submit meanwhile.
    std::thread::scope(|scope| {
        for user in 0..12u64 {
            scope.spawn(move || {
                for round in 0..10u8 {
                    let at = user * 20 * 512;
                    let chain: Vec<_> =
                        (0..3).map(|i| group(&[(at + i * 512, 512, round)])).collect();
                    let tickets = disk.submit_chain(chain, &[]).unwrap();
                    disk.wait(tickets[2 - usize::from(round) % 3]).unwrap();
                    disk.settle(tickets[2]).unwrap();
                    assert_eq!(read(disk, at, 1536), [round; 1536]);
                }
            });
        }
    });
}

fn a_disk_for_reading_refuses_groups(make: Make) {
    let Some(subject) = make(false) else { return };
    let disk = &*subject.disk;
    assert!(disk.properties().read_only);
    let refused = disk.submit(group(&[(0, 512, 9)]), &[]).unwrap_err();
    assert_eq!(refused.error, Error::ReadOnly);
    assert_eq!(refused.goods.unwrap().writes.len(), 1);
    assert!(read(disk, 0, LEN) == contents());
}

// What only remote disks promise.

#[test]
fn what_is_served_is_atomic_against_the_clients_death() {
    let (plain, served) = (file_plain(true).unwrap(), remote_thread(true).unwrap());
    assert_eq!(plain.disk.properties().atomic, Atomic::None);
    assert_eq!(served.disk.properties().atomic, Atomic::AgainstDeath);
}

#[test]
fn more_than_a_remote_disk_takes_at_once_is_refused_before_it_is_sent() {
    let Subject { disk, _beside } = remote_thread(true).unwrap();
    let bounds = disk.chain_bounds();
    assert!(bounds.writes >= 1 << 16 && bounds.bytes >= 64 << 20, "{bounds}");
    let groups = |count| (0..count).map(|_| Group::default()).collect();
    let refused = disk.submit_chain(groups(bounds.groups + 1), &[]).unwrap_err();
    assert_eq!(refused.error, Error::TooMuch { bounds });
    assert_eq!(refused.goods.unwrap().len(), bounds.groups + 1);
    let tickets = disk.submit_chain(groups(bounds.groups), &[]).unwrap();
    disk.wait(tickets[bounds.groups - 1]).unwrap();
    let mut many = Group::default();
    for _ in 0..bounds.writes {
        many.writes.push(Write { at_bytes: 0, block: Block::private(512) });
    }
    let ticket = disk.submit(many, &[]).unwrap();
    disk.wait(ticket).unwrap();
}

#[test]
fn a_disk_whose_service_is_killed_says_so() {
    let image = image();
    let (session, mut child) = spawn("serve", image.path());
    let clients = (0..LANES).map(|lane| session.client(lane).unwrap()).collect();
    let blocks = Box::new(move |len| session.block(len));
    let disk = RemoteDisk::new(clients, Some(blocks), PATIENCE).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let before = Instant::now();
    for urgency in [Urgency::Now, Urgency::Ahead].repeat(4) {
        let answer = disk.read(Extent::new(0, 512), Block::private(512), urgency).wait().unwrap();
        let refused = answer.unwrap_err();
        assert_eq!((refused.error, refused.goods.unwrap().len()), (Error::Gone, 512));
    }
    let refused = disk.submit(group(&[(0, 512, 1)]), &[]).unwrap_err();
    assert_eq!((refused.error, refused.goods.unwrap().writes.len()), (Error::Gone, 1));
    assert_eq!(disk.wait(Ticket(1)), Err(Error::Gone));
    assert!(before.elapsed() < Duration::from_secs(1));
}

#[test]
fn errors_of_the_disk_come_through() {
    use draconis_device::{Fault, Hits};
    let disk = FaultDisk::new(MemoryDisk::new(contents(), 512));
    disk.add(Hits::Reads(Extent::new(512, 512)), Fault::Fail);
    disk.add(Hits::Writes(Extent::new(1024, 512)), Fault::Fail);
    let (clients, servers) = (0..LANES).map(|_| channel::pair::<disk::Disk>()).unzip();
    std::thread::scope(|scope| {
        let served = scope.spawn(|| serve(&disk, servers, PATIENCE));
        let remote = RemoteDisk::new(clients, None, PATIENCE).unwrap();
        assert_eq!(read(&remote, 0, 512)[0], 0);
        let refused = remote.read_now(Extent::new(0, 1024), filled(1024, 5)).unwrap_err();
        assert!(matches!(refused.error, Error::Io { what: "read", .. }), "{}", refused.error);
        assert_eq!(refused.goods.unwrap().len(), 1024);
        let both = group(&[(0, 512, 1), (1024, 512, 1)]);
        let refused = remote.submit(both, &[]).unwrap_err();
        assert!(matches!(refused.error, Error::Io { what: "write", .. }), "{}", refused.error);
        assert_eq!(refused.goods.unwrap().writes[1].block.bytes(), Some(&[1; 512][..]));
        assert_eq!(read(&remote, 1024, 512)[0], 2);
        drop(remote);
        assert_eq!(served.join().unwrap(), Ok(()));
    });
}

/// A disk whose flushes take until somebody opens the gate.
struct Gated(MemoryDisk, std::sync::Mutex<bool>, std::sync::Condvar);

impl Disk for Gated {
    fn properties(&self) -> Properties {
        self.0.properties()
    }
    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        self.0.read(at, into, urgency)
    }
    fn submit_chain(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        self.0.submit_chain(chain, after)
    }
    fn settle(&self, ticket: Ticket) -> Result<(), Error> {
        self.0.settle(ticket)
    }
    fn wait(&self, ticket: Ticket) -> Result<(), Error> {
        let open = self.2.wait_while(self.1.lock().unwrap(), |open| !*open).unwrap();
        drop(open);
        self.0.wait(ticket)
    }
}

#[test]
fn whoever_waits_for_a_flush_is_in_nobodys_way() {
    let disk = Gated(MemoryDisk::new(contents(), 512), false.into(), Default::default());
    let (clients, servers) = (0..LANES).map(|_| channel::pair::<disk::Disk>()).unzip();
    std::thread::scope(|outer| {
        outer.spawn(|| serve(&disk, servers, PATIENCE));
        let remote = RemoteDisk::new(clients, None, PATIENCE).unwrap();
        let first = remote.submit(group(&[(0, 512, 1)]), &[]).unwrap();
        std::thread::scope(|scope| {
            let waiters: Vec<_> =
                (0..2 * LANES).map(|_| scope.spawn(|| remote.wait(first))).collect();
            for round in 0..20 {
                remote.submit(group(&[(512, 512, round)]), &[first]).unwrap();
                assert_eq!(read(&remote, 512, 512)[0], round);
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
fn a_client_that_closes_between_two_parts_has_written_nothing() {
    let disk = MemoryDisk::new(contents(), 512);
    let (client, server) = channel::pair::<disk::Disk>();
    std::thread::scope(|scope| {
        let served = scope.spawn(|| serve(&disk, vec![server], PATIENCE));
        drop(send_part(client, true));
        assert_eq!(served.join().unwrap(), Ok(()));
    });
    assert!(disk.into_bytes() == contents());
}

#[test]
fn a_client_killed_between_two_parts_has_written_nothing() {
    for (role, expected) in [("die-within-a-group", false), ("die-after-a-group", true)] {
        let image = image();
        let (session, mut child) = spawn(role, Path::new("none"));
        let ends: Vec<Server<disk::Disk>> =
            (0..LANES).map(|lane| session.server(lane).unwrap()).collect();
        let disk = FileDisk::open(image.path(), PLAIN).unwrap();
        assert_eq!(serve(&disk, ends, PATIENCE), Ok(()));
        child.wait().unwrap();
        session.wait_for_death(Instant::now() + PATIENCE).unwrap();
        let audit = session.audit();
        assert_eq!(audit.free_bytes, audit.total_bytes(), "{audit:?}");
        // Closing writes out what was submitted.
        drop(disk);
        let changed = std::fs::read(image.path()).unwrap() != contents();
        assert_eq!(changed, expected, "{role}");
    }
}

/// Sends one part of a group; the server has it once this returns.
fn send_part(client: Client<disk::Disk>, more: bool) -> Client<disk::Disk> {
    let blocks = vec![(0, filled(512, 0xaa)), (4096, filled(512, 0xbb))].try_into().unwrap();
    let ends = if more { List::new() } else { List::try_from(vec![2]).unwrap() };
    let part = Submit { blocks, ends, after: List::new(), more };
    let (reply, client) = client.call(part, Instant::now() + PATIENCE).unwrap();
    let reply: Result<_, Refusal> = reply.map_err(|nak| nak.why);
    assert_eq!(reply.unwrap().first.is_none(), more);
    client
}

// The other process: this binary again.

const ROLE: &str = "DRACONIS_TEST_ROLE";
const IMAGE: &str = "DRACONIS_TEST_IMAGE";

/// A child that ends with its test.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Little room, so that large requests travel in pieces and wait for each other.
fn plan() -> Plan {
    let classes = [(4 << 10, 8), (64 << 10, 2)];
    let classes: Vec<_> = classes.map(|(slot_bytes, slots)| Class { slot_bytes, slots }).into();
    Plan {
        fixed_lanes: LANES,
        host_lanes: 0,
        guest_lanes: 0,
        host: classes.clone(),
        guest: classes,
    }
}

fn spawn(role: &str, image: &Path) -> (Arc<Session>, Child) {
    let (offer, socket) = process::offer(&plan()).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["child_entry", "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env(IMAGE, image)
        .stdin(socket)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let pid = Pid::from_child(&child);
    (offer.start(pidfd_open(pid, PidfdFlags::empty()).unwrap()), child)
}

#[test]
fn child_entry() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let session = process::accept(&socket, Instant::now() + PATIENCE).unwrap();
    match role.as_str() {
        "serve" | "serve-read-only" => {
            let path = std::env::var_os(IMAGE).unwrap();
            let options = FileOptions { write: role == "serve", ..PLAIN };
            let disk = FileDisk::open(path.as_ref(), options).unwrap();
            let ends = (0..LANES).map(|lane| session.server(lane).unwrap()).collect();
            let _ = serve(&disk, ends, PATIENCE);
        }
        _ => {
            let _end = send_part(session.client(0).unwrap(), role == "die-within-a-group");
            kill_process(getpid(), Signal::KILL).unwrap();
        }
    }
}
