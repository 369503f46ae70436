//! Hostile peers: they write arbitrary bytes wherever they can.

use std::{
    os::fd::BorrowedFd,
    sync::atomic::{AtomicBool, Ordering::*},
    thread,
    time::Duration,
};

use rustix::fs::{self, MemfdFlags, SealFlags};

use super::lane::{CHANGE_COUNT_OFFSET, FINGERPRINT_OFFSET, MailboxHeader, PAYLOAD_OFFSET};
use super::*;
use crate::{
    channel::RpcClient,
    contract::{
        Call,
        directory::Directory,
        disk::{self, Disk},
        file::{self, CachingReader, File, ReadError},
        volume::Volume,
        wire::MAX_MESSAGE_BYTES,
    },
};
use draconis_types::{Attributes, Refusal};

const SLOTS: u32 = 3;
const SLOT_BYTES: u32 = 4096;

fn session_config() -> SessionConfig {
    let classes = vec![SlotClass { slot_bytes: SLOT_BYTES, slots: SLOTS }];
    SessionConfig { lanes: 2, host: classes.clone(), guest: classes }
}

fn test_deadline() -> Instant {
    draconis_testkit::wait::hang_deadline()
}

/// Returns an honest host and the session of its hostile guest.
fn connect_host_and_guest() -> (Arc<Session>, Arc<Session>) {
    let (offer, socket) = offer(&session_config()).unwrap();
    let host = offer.start(pidfd_open(getpid(), PidfdFlags::empty()).unwrap());
    (host, accept(&socket, test_deadline()).unwrap())
}

/// Returns the index of a message in its contract's table.
fn message_tag<C: Contract>(name: &str) -> u16 {
    C::TABLE.messages.iter().position(|message| message.name == name).unwrap() as u16
}

const TO_SERVER: usize = 0;
const TO_CLIENT: usize = 1;

/// Writes a mailbox of lane 0 as the first message in it.
fn forge_message<C: Contract>(session: &Session, line: usize, head: MailboxHeader, payload: &[u8]) {
    let at = line * MAILBOX_STRIDE;
    session.shared.atomic_u64(at + FINGERPRINT_OFFSET).store(C::FINGERPRINT, SeqCst);
    session.shared.copy_in(at + PAYLOAD_OFFSET, payload);
    session.shared.atomic_u64(at).store(head.to_bits(), SeqCst);
}

fn first_header(tag: u16, payload: &[u8]) -> MailboxHeader {
    MailboxHeader { seq: 1, epoch: 1, tag, len: payload.len() as u16 }
}

fn words_to_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[track_caller]
fn assert_slot_accounting(session: &Arc<Session>, away_slots: u32) {
    let audit = session.heap_usage();
    assert_eq!(audit.total_bytes(), u64::from(SLOTS * SLOT_BYTES));
    assert_eq!((audit.held_bytes, audit.borrowed_bytes), (0, 0), "{audit:?}");
    assert_eq!(audit.exported_bytes, u64::from(away_slots * SLOT_BYTES), "{audit:?}");
}

/// Requests a read of 100 bytes (slot 0, generation 1) and receives the reply that `lie` writes.
#[track_caller]
fn assert_reply_violation(lie: impl FnOnce(&Session), expected: Violation) {
    let (host, guest) = connect_host_and_guest();
    let client = host.client::<File>(0).unwrap();
    let buffer = host.allocate_block(100).unwrap();
    let waiting =
        client.send(file::Read { buffer, buffer_offset: 0, offset: 0, len: 100, no_atime: false });
    lie(&guest);
    assert_eq!(waiting.receive(test_deadline()).unwrap_err(), ChannelError::Violation(expected));
    assert_eq!(host.violation(), Some(expected));
    // The slot stays exported until the peer's death is confirmed.
    let claimed = matches!(expected, Violation::Value(_) | Violation::Length(28));
    assert_slot_accounting(&host, u32::from(!claimed));
    host.dead.store(true, SeqCst);
    assert_slot_accounting(&host, 0);
}

fn ack_read_payload(name: [u32; 3], len: u32) -> Vec<u8> {
    words_to_bytes(&[name[0], name[1], name[2], len])
}

#[test]
fn forged_reply_is_reported_as_violation() {
    let good = ack_read_payload([0, 1, 100], 100);
    let ack_read = message_tag::<File>("AckRead");
    let send = |head: MailboxHeader, payload: Vec<u8>| {
        move |guest: &Session| forge_message::<File>(guest, TO_CLIENT, head, &payload)
    };
    let state = |message| Violation::State { message, state: "awaiting Read" };
    let as_tag = |tag| send(first_header(tag, &good), good.clone());
    assert_reply_violation(as_tag(999), Violation::Tag(999));
    assert_reply_violation(as_tag(message_tag::<File>("AckWrite")), state("AckWrite"));
    assert_reply_violation(as_tag(message_tag::<File>("Read")), state("Read"));
    assert_reply_violation(as_tag(message_tag::<File>("Close")), state("Close"));

    let jump = MailboxHeader { seq: 2, ..first_header(ack_read, &good) };
    assert_reply_violation(send(jump, good.clone()), Violation::Turn);
    let long = MailboxHeader { len: MAX_MESSAGE_BYTES as u16 + 1, ..first_header(ack_read, &good) };
    assert_reply_violation(
        send(long, good.clone()),
        Violation::Length(MAX_MESSAGE_BYTES as u32 + 1),
    );
    let short = MailboxHeader { len: 11, ..first_header(ack_read, &good) };
    assert_reply_violation(send(short, good.clone()), Violation::Length(3));
    let surplus = [good.clone(), vec![0; 28]].concat();
    assert_reply_violation(send(first_header(ack_read, &surplus), surplus), Violation::Length(28));

    let block = |name| {
        let payload = ack_read_payload(name, 100);
        send(first_header(ack_read, &payload), payload)
    };
    assert_reply_violation(block([6, 1, 100]), Violation::Slot(6));
    assert_reply_violation(block([u32::MAX, 1, 100]), Violation::Slot(u32::MAX));
    assert_reply_violation(block([1, 1, 100]), Violation::Owner(1));
    assert_reply_violation(block([0, 0, 100]), Violation::Generation(0));
    assert_reply_violation(block([0, 2, 100]), Violation::Generation(0));
    assert_reply_violation(block([0, 1, 101]), Violation::BlockLength(0));
    assert_reply_violation(block([0, 1, 5000]), Violation::BlockLength(0));
    assert_reply_violation(block([5, 1, 5000]), Violation::BlockLength(5));

    let why = words_to_bytes(&[0, 1, 100, 99]);
    let nak = first_header(message_tag::<File>("NakRead"), &why);
    assert_reply_violation(send(nak, why), Violation::Value("Refusal"));
}

#[test]
fn fingerprint_mismatch_is_violation() {
    let reply = ack_read_payload([0, 1, 100], 100);
    let head = first_header(message_tag::<File>("AckRead"), &reply);
    assert_reply_violation(
        |guest| forge_message::<Disk>(guest, TO_CLIENT, head, &reply),
        Violation::Fingerprint,
    );
}

#[test]
fn one_violation_closes_all_lanes() {
    let (host, guest) = connect_host_and_guest();
    let other = host.client::<File>(1).unwrap();
    let server = host.server::<File>(0).unwrap();
    forge_message::<File>(&guest, TO_SERVER, first_header(77, &[]), &[]);
    assert_eq!(
        server.serve(Duration::from_secs(20), |_| None),
        Err(ChannelError::Violation(Violation::Tag(77)))
    );
    let told = other.call(file::GetAttributes {}, test_deadline()).unwrap_err();
    assert_eq!(told, ChannelError::Violation(Violation::Tag(77)));
}

#[test]
fn violating_peer_is_killed_if_asked_for() {
    use std::os::unix::process::ExitStatusExt;
    for kills in [false, true] {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let (offer, _socket) = offer(&session_config()).unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let host = offer.start(pidfd_open(pid, PidfdFlags::empty()).unwrap());
        if kills {
            host.kill_peer_on_violation();
        }
        let server = host.server::<File>(0).unwrap();
        forge_message::<File>(&host, TO_SERVER, first_header(77, &[]), &[]);
        let served = server.serve(Duration::from_secs(20), |_| None);
        assert_eq!(served, Err(ChannelError::Violation(Violation::Tag(77))));
        if !kills {
            assert!(child.try_wait().unwrap().is_none());
            child.kill().unwrap();
        }
        assert_eq!(child.wait().unwrap().signal(), Some(9));
    }
}

#[test]
fn full_or_drained_event_fd_does_not_block_peer() {
    let (host, guest) = connect_host_and_guest();
    for bell in &guest.event_fds {
        io::write(bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    }
    let server = guest.server::<File>(0).unwrap();
    let hand = thread::spawn(move || {
        server.serve(Duration::from_secs(20), |message| file::answer(&RefusingFileServer, message))
    });
    let mut caller = RpcClient::new(host.client::<File>(0).unwrap(), Duration::from_secs(20));
    for _ in 0..100 {
        assert!(caller.call(file::GetAttributes {}).unwrap().is_err());
    }
    drop(caller);
    hand.join().unwrap().unwrap();

    let (host, guest) = connect_host_and_guest();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Relaxed) {
                for bell in &guest.event_fds {
                    let _ = io::read(bell, &mut [0; 8]);
                }
            }
        });
        let client = host.client::<File>(0).unwrap();
        let until = Instant::now() + Duration::from_millis(50); // time: a deadline is tested
        let told = client.call(file::GetAttributes {}, until);
        assert_eq!(told.unwrap_err(), ChannelError::Timeout);
        over.store(true, Relaxed);
    });
}

struct RefusingFileServer;

impl file::FileServer for RefusingFileServer {
    fn read(&self, _: &mut file::Read) -> Result<u32, Refusal> {
        Err(Refusal::Io)
    }
    fn get_attributes(&self, _: &mut file::GetAttributes) -> Result<Attributes, Refusal> {
        Err(Refusal::Io)
    }
}

#[test]
fn wakeup_flood_ends_at_limit_or_deadline() {
    let (host, guest) = connect_host_and_guest();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Relaxed) {
                guest.signal_event_fd(TO_CLIENT);
            }
        });
        let client = host.client::<File>(0).unwrap();
        let deadline = Instant::now() + Duration::from_secs(2); // time: a deadline is tested
        let lost = client.call(file::GetAttributes {}, deadline).unwrap_err();
        over.store(true, Relaxed);
        assert!(
            matches!(lost, ChannelError::Timeout | ChannelError::Violation(Violation::Flood)),
            "{lost}"
        );
    });
}

/// A `Submit` of one write whose block is slot 3, the guest's first.
fn submit_payload() -> Vec<u8> {
    let mut bytes = words_to_bytes(&[1, 0, 0, SLOTS, 1, 10]);
    bytes.extend(words_to_bytes(&[1, 1])); // ends
    bytes.extend(words_to_bytes(&[1, 7, 0])); // after
    bytes.extend(words_to_bytes(&[9, 0])); // mark
    bytes.extend([1, 0, 0, 0, 0, 0]); // durable, more
    bytes
}

#[test]
fn message_changed_after_send_is_validated_on_copy() {
    let mut random = Random(11);
    let (over, mut submitted) = (AtomicBool::new(false), 0);
    for _ in 0..300 {
        let (host, guest) = connect_host_and_guest();
        let payload = submit_payload();
        let server = host.server::<Disk>(0).unwrap();
        over.store(false, Relaxed);
        thread::scope(|scope| {
            let seed = random.next_u64();
            let (over, guest, payload) = (&over, &guest, &payload);
            scope.spawn(move || {
                let mut random = Random(seed);
                let head = first_header(message_tag::<Disk>("Submit"), payload);
                forge_message::<Disk>(guest, TO_SERVER, head, payload);
                guest.signal_event_fd(TO_SERVER);
                while !over.load(Relaxed) {
                    let at = random.next_u64() as usize % payload.len();
                    let byte =
                        [[payload[at]], [random.next_u64() as u8]][random.next_u64() as usize & 1];
                    guest.shared.copy_in(PAYLOAD_OFFSET + at, &byte);
                }
                // Closes the lane.
                drop(guest.client::<Disk>(0));
            });
            let served = server.serve(Duration::from_secs(20), |message| {
                over.store(true, Relaxed);
                let disk::ToServer::Submit(request) = message else { panic!("{message:?}") };
                let fits = |(_, block): &(u64, Block)| block.len() <= SLOT_BYTES as usize;
                assert!(request.blocks.iter().all(fits));
                submitted += 1;
                Some(request.into_nak(Refusal::Io).into())
            });
            over.store(true, Relaxed);
            assert!(matches!(served, Ok(()) | Err(ChannelError::Violation(_))), "{served:?}");
        });
        assert_slot_accounting(&host, 0);
    }
    assert!(submitted > 0);
}

struct Random(u64);

impl Random {
    fn next_u64(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Four bytes that are mostly a small number, as in valid messages.
    fn next_word_bytes(&mut self) -> [u8; 4] {
        let n = self.next_u64();
        if n & 3 == 0 {
            ((n >> 8) as u32).to_le_bytes()
        } else {
            ((n >> 8) as u32 & 7).to_le_bytes()
        }
    }
}

/// Sends random messages to an honest server. Each is a violation or is refused, and all slots of
/// the server stay accounted for.
fn fuzz_server<C: Contract>(
    seed: u64,
    mut answer: impl FnMut(C::ToServer) -> Option<C::ToClient>,
) -> u32 {
    let mut random = Random(seed);
    let mut accepted = 0;
    for _ in 0..3000 {
        let (host, guest) = connect_host_and_guest();
        let server = host.server::<C>(0).unwrap();
        let message = random.next_u64() as usize % C::TABLE.messages.len();
        let bytes: usize = C::TABLE.messages[message].fields.iter().map(|f| f.bytes_max).sum();
        let len = if random.next_u64() & 1 == 0 { bytes } else { random.next_u64() as usize % 300 };
        let payload: Vec<u8> =
            std::iter::repeat_with(|| random.next_word_bytes()).flatten().take(len).collect();
        forge_message::<C>(&guest, TO_SERVER, first_header(message as u16, &payload), &payload);
        let lost = server.serve(Duration::ZERO, |message| {
            accepted += 1;
            answer(message)
        });
        // Refused, closed by request, or silent after a valid message.
        assert!(
            matches!(lost, Ok(()) | Err(ChannelError::Violation(_) | ChannelError::Timeout)),
            "{lost:?}"
        );
        assert_slot_accounting(&host, 0);
    }
    accepted
}

#[test]
fn random_messages_do_not_panic_or_leak() {
    assert!(fuzz_server::<File>(1, |m| file::answer(&RefusingFileServer, m)) > 20);
    assert!(fuzz_server::<Disk>(2, |_| None) > 20);
    assert!(fuzz_server::<Volume>(3, |_| None) > 20);
    assert!(fuzz_server::<Directory>(4, |_| None) > 20);
}

/// Sends `hello` and `fds` over a socket and returns the error of accepting them.
fn accept_forged_hello(hello: &[u8], fds: &[BorrowedFd<'_>]) -> ChannelError {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) =
        net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    crate::descriptors::send_with_fds(&ours, hello, fds).unwrap();
    drop(ours);
    accept(&theirs, test_deadline()).unwrap_err()
}

/// A store's process outlives an upgrade of the program.
#[test]
fn hello_and_fingerprints_are_those_of_older_programs() {
    assert_eq!(Disk::FINGERPRINT, 0x8dd9_dafd_5b7b_411b);
    assert_eq!(Volume::FINGERPRINT, 0xbf9e_4ce8_d130_2227);
    let hello = session_config().to_bytes();
    let (lanes, classes) = ([2, 0, 0], [SLOT_BYTES, SLOTS, SLOT_BYTES, SLOTS]);
    assert!(hello.starts_with(&[&b"Drakon\0\x01"[..], &words_to_bytes(&lanes)].concat()));
    assert!(hello[20..].starts_with(&words_to_bytes(&classes)));
    assert!(hello.len() == 148 && hello[36..].iter().all(|byte| *byte == 0));
}

#[test]
fn forged_hello_is_refused() {
    let (offer, _socket) = offer(&session_config()).unwrap();
    let me = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let hello = session_config().to_bytes();
    let event_fds: Vec<_> = offer.event_fds.iter().map(OwnedFd::as_fd).collect();
    let all = [&[offer.shared.as_fd(), me.as_fd()][..], &event_fds].concat();
    let memory = |what| ChannelError::Violation(Violation::Memory(what));
    let descriptors = |what| ChannelError::Violation(Violation::Descriptors(what));
    assert_eq!(SessionConfig::from_bytes(&hello).unwrap(), session_config());

    let mut magic = hello;
    magic[0] ^= 1;
    assert_eq!(accept_forged_hello(&magic, &all), memory("the hello is malformed"));
    for unused_word in [12, 16] {
        let mut more = hello;
        more[unused_word] = 1;
        assert_eq!(accept_forged_hello(&more, &all), memory("the hello is malformed"));
    }
    assert_eq!(
        accept_forged_hello(&hello[1..], &all),
        ChannelError::Violation(Violation::Length(hello.len() as u32 - 1))
    );
    assert_eq!(
        accept_forged_hello(&[&hello[..], &[0]].concat(), &all),
        descriptors("more than fit a message")
    );
    for lanes in [MAX_LANES + 1, u32::MAX] {
        let plan = SessionConfig { lanes, ..session_config() };
        assert_eq!(
            accept_forged_hello(&plan.to_bytes(), &all),
            memory("the plan exceeds its limits")
        );
    }
    for (slot_bytes, slots) in [(4095, 1), (0, 1), (1 << 20, 1 << 20), (1 << 31, 1)] {
        let plan =
            SessionConfig { host: vec![SlotClass { slot_bytes, slots }], ..session_config() };
        assert_eq!(
            accept_forged_hello(&plan.to_bytes(), &all),
            memory("the plan exceeds its limits")
        );
    }
    let number = descriptors("another number than the plan needs");
    assert_eq!(accept_forged_hello(&hello, &all[..all.len() - 1]), number);
    assert_eq!(accept_forged_hello(&hello, &[&all[..], &[me.as_fd()]].concat()), number);
    assert_eq!(accept_forged_hello(&hello, &[]), number);

    let blocking = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let mut swapped = all.clone();
    swapped[2] = blocking.as_fd();
    assert_eq!(accept_forged_hello(&hello, &swapped), descriptors("a bell that can block"));

    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let unsealed = fs::memfd_create("test", flags).unwrap();
    let mut swapped = all.clone();
    swapped[0] = unsealed.as_fd();
    assert_eq!(accept_forged_hello(&hello, &swapped), memory("it is not sealed"));
    fs::fcntl_add_seals(&unsealed, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
    assert_eq!(accept_forged_hello(&hello, &swapped), memory("it has another size"));
    assert!(fs::ftruncate(&offer.shared, 0).is_err(), "what is sealed cannot be cut");

    let (ours, theirs) =
        net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .unwrap();
    let soon = Instant::now() + Duration::from_millis(10); // time: a deadline is tested
    assert_eq!(accept(&theirs, soon).unwrap_err(), ChannelError::Timeout);
    drop(ours);
    assert_eq!(accept(&theirs, self::test_deadline()).unwrap_err(), ChannelError::Closed);
}

fn caching_reader(host: &Arc<Session>) -> CachingReader {
    let blocks = host.clone();
    let end = host.client::<File>(0).unwrap();
    CachingReader::new(end, Duration::from_secs(20), 1, move |len| {
        blocks.allocate_block(len.min(4096))
    })
}

/// A file whose reads return four bytes of 7 at any offset.
struct FourSevensFile;

impl file::FileServer for FourSevensFile {
    fn read(&self, request: &mut file::Read) -> Result<u32, Refusal> {
        Ok(request.buffer.copy_in(0, &[7; 4]) as u32)
    }
    fn get_attributes(&self, _: &mut file::GetAttributes) -> Result<Attributes, Refusal> {
        Err(Refusal::Io)
    }
}

#[test]
fn oversized_reply_length_closes_reader() {
    // The peer's own slot of ten bytes; the reader's slot with more than it requested.
    for payload in [
        ack_read_payload([SLOTS, 1, 10], 100),
        ack_read_payload([0, 1, 100], 101),
        ack_read_payload([0, 1, 100], u32::MAX),
    ] {
        let (host, guest) = connect_host_and_guest();
        // This server has no notifier: the reader requests exactly the bytes it needs.
        let mut reader = caching_reader(&host);
        let head = first_header(message_tag::<File>("AckRead"), &payload);
        // Sent before the request: a peer may be early.
        forge_message::<File>(&guest, TO_CLIENT, head, &payload);
        let lost = ChannelError::Violation(Violation::Value("AckRead"));
        for _ in 0..2 {
            assert_eq!(reader.read(0, &mut [0; 100]), Err(ReadError::Lost(lost)));
        }
        drop(reader);
        host.dead.store(true, SeqCst);
        assert_slot_accounting(&host, 0);
    }
}

#[test]
fn peer_writing_to_cached_slot_changes_only_bytes() {
    let (host, guest) = connect_host_and_guest();
    let server = guest.server::<File>(0).unwrap();
    let _ = server.change_notifier();
    let mut reader = caching_reader(&host);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            server.serve(Duration::from_secs(20), |message| file::answer(&FourSevensFile, message))
        });
        scope.spawn(|| {
            let mut random = Random(5);
            let slots_at = guest.plan.layout().unwrap().slots_at;
            while !over.load(Relaxed) {
                guest.shared.copy_in(slots_at + random.next_u64() as usize % 4096, &[1]);
                let told = [random.next_u64(), 1 << 48 | random.next_u64() & 1]
                    [random.next_u64() as usize & 1];
                guest.shared.atomic_u64(MAILBOX_STRIDE + CHANGE_COUNT_OFFSET).store(told, Relaxed);
            }
        });
        for _ in 0..3000 {
            let mut into = [9; 8];
            assert_eq!(reader.read(0, &mut into), Ok(4));
            assert!(into[..4].iter().all(|byte| [1, 7].contains(byte)), "{into:?}");
            assert_eq!(into[4..], [9; 4]);
        }
        over.store(true, Relaxed);
        drop(reader);
    });
    assert_slot_accounting(&host, 0);
}

#[test]
fn notifier_ends_with_its_server() {
    let (host, guest) = connect_host_and_guest();
    let client = host.client::<File>(0).unwrap();
    let server = guest.server::<File>(0).unwrap();
    assert_eq!(client.change_count(), Ok(None));
    let teller = server.change_notifier();
    let before = client.change_count().unwrap().unwrap();
    assert!(teller.notify_change() && client.change_count().unwrap().unwrap() > before);
    drop(server);
    assert!(!teller.notify_change());
    assert_eq!(client.change_count(), Err(ChannelError::Closed));
}

#[test]
fn full_session_returns_heap_full() {
    let (host, guest) = connect_host_and_guest();
    let _server = guest.server::<File>(0).unwrap();
    let mut caller = RpcClient::new(host.client::<File>(0).unwrap(), Duration::from_secs(20));
    let held: Vec<_> = (0..SLOTS).map(|_| host.allocate_block(1).unwrap()).collect();
    assert!(host.allocate_block(1).is_none());
    let buffer = Block::private(10);
    let read = file::Read { buffer, buffer_offset: 0, offset: 0, len: 1, no_atime: false };
    assert_eq!(caller.call(read).unwrap_err(), ChannelError::HeapFull);
    drop(held);
    assert_slot_accounting(&host, 0);
}
