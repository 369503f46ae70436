//! Hostile peers: they write arbitrary bytes wherever they can.

use std::{
    os::fd::BorrowedFd,
    sync::atomic::{AtomicBool, Ordering::*},
    thread,
    time::Duration,
};

use rustix::fs::{self, MemfdFlags, SealFlags};

use super::*;
use crate::{
    channel::{
        RpcClient,
        lane::{CHANGE_COUNT_AT, FINGERPRINT_AT, Head, PAYLOAD_AT},
    },
    contract::{
        Attributes,
        directory::{self, Directory},
        disk::Disk,
        file::{self, CachingReader, File, ReadError},
        volume::Volume,
        wire::MAX_MESSAGE_BYTES,
    },
};

const SLOTS: u32 = 3;
const SLOT_BYTES: u32 = 4096;

fn plan() -> SessionConfig {
    let classes = vec![Class { slot_bytes: SLOT_BYTES, slots: SLOTS }];
    SessionConfig {
        static_lanes: 1,
        host_lanes: 1,
        guest_lanes: 1,
        host: classes.clone(),
        guest: classes,
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Returns an honest host and the session of its hostile guest.
fn sides() -> (Arc<Session>, Arc<Session>) {
    let (offer, socket) = offer(&plan()).unwrap();
    let host = offer.start(pidfd_open(getpid(), PidfdFlags::empty()).unwrap());
    (host, accept(&socket, soon()).unwrap())
}

/// Returns the index of a message in its contract's table.
fn tag<C: Contract>(name: &str) -> u16 {
    C::TABLE.messages.iter().position(|message| message.name == name).unwrap() as u16
}

const TO_SERVER: usize = 0;
const TO_CLIENT: usize = 1;

/// Writes a mailbox of lane 0 as the first message in it.
fn forge<C: Contract>(session: &Session, line: usize, head: Head, payload: &[u8]) {
    let at = line * MAILBOX_STRIDE;
    session.shared.atomic_u64(at + FINGERPRINT_AT).store(C::FINGERPRINT, SeqCst);
    session.shared.copy_in(at + PAYLOAD_AT, payload);
    session.shared.atomic_u64(at).store(head.to_bits(), SeqCst);
}

fn first(tag: u16, payload: &[u8]) -> Head {
    Head { seq: 1, epoch: 1, tag, len: payload.len() as u16 }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[track_caller]
fn expect_sound(session: &Arc<Session>, away_slots: u32) {
    let audit = session.audit();
    assert_eq!(audit.total_bytes(), u64::from(SLOTS * SLOT_BYTES));
    assert_eq!((audit.held_bytes, audit.borrowed_bytes), (0, 0), "{audit:?}");
    assert_eq!(audit.exported_bytes, u64::from(away_slots * SLOT_BYTES), "{audit:?}");
}

/// Requests a read of 100 bytes (slot 0, generation 1) and receives the reply that `lie` writes.
#[track_caller]
fn reply_with(lie: impl FnOnce(&Session), expected: Violation) {
    let (host, guest) = sides();
    let client = host.client::<File>(0).unwrap();
    let buffer = host.block(100).unwrap();
    let waiting =
        client.send(file::Read { buffer, buffer_offset: 0, offset: 0, len: 100, no_atime: false });
    lie(&guest);
    assert_eq!(waiting.receive(soon()).unwrap_err(), ChannelError::Violation(expected));
    assert_eq!(host.violation(), Some(expected));
    // The slot stays exported until the peer's death is confirmed.
    let claimed = matches!(expected, Violation::Value(_) | Violation::Length(28));
    expect_sound(&host, u32::from(!claimed));
    host.dead.store(true, SeqCst);
    expect_sound(&host, 0);
}

fn ack(name: [u32; 3], len: u32) -> Vec<u8> {
    words(&[name[0], name[1], name[2], len])
}

#[test]
fn a_forged_reply_is_named() {
    let good = ack([0, 1, 100], 100);
    let ack_read = tag::<File>("AckRead");
    let send = |head: Head, payload: Vec<u8>| {
        move |guest: &Session| forge::<File>(guest, TO_CLIENT, head, &payload)
    };
    let state = |message| Violation::State { message, state: "awaiting Read" };
    let as_tag = |tag| send(first(tag, &good), good.clone());
    reply_with(as_tag(999), Violation::Tag(999));
    reply_with(as_tag(tag::<File>("AckWrite")), state("AckWrite"));
    reply_with(as_tag(tag::<File>("Read")), state("Read"));
    reply_with(as_tag(tag::<File>("Close")), state("Close"));

    let jump = Head { seq: 2, ..first(ack_read, &good) };
    reply_with(send(jump, good.clone()), Violation::Turn);
    let long = Head { len: MAX_MESSAGE_BYTES as u16 + 1, ..first(ack_read, &good) };
    reply_with(send(long, good.clone()), Violation::Length(MAX_MESSAGE_BYTES as u32 + 1));
    let short = Head { len: 11, ..first(ack_read, &good) };
    reply_with(send(short, good.clone()), Violation::Length(3));
    let surplus = [good.clone(), vec![0; 28]].concat();
    reply_with(send(first(ack_read, &surplus), surplus), Violation::Length(28));

    let block = |name| {
        let payload = ack(name, 100);
        send(first(ack_read, &payload), payload)
    };
    reply_with(block([6, 1, 100]), Violation::Slot(6));
    reply_with(block([u32::MAX, 1, 100]), Violation::Slot(u32::MAX));
    reply_with(block([1, 1, 100]), Violation::Owner(1));
    reply_with(block([0, 0, 100]), Violation::Generation(0));
    reply_with(block([0, 2, 100]), Violation::Generation(0));
    reply_with(block([0, 1, 101]), Violation::BlockLength(0));
    reply_with(block([0, 1, 5000]), Violation::BlockLength(0));
    reply_with(block([5, 1, 5000]), Violation::BlockLength(5));

    let why = words(&[0, 1, 100, 99]);
    let nak = first(tag::<File>("NakRead"), &why);
    reply_with(send(nak, why), Violation::Value("Refusal"));
}

#[test]
fn another_contract_is_not_spoken_with() {
    let reply = ack([0, 1, 100], 100);
    let head = first(tag::<File>("AckRead"), &reply);
    reply_with(|guest| forge::<Disk>(guest, TO_CLIENT, head, &reply), Violation::Fingerprint);
}

/// A `Bind` whose path is slot 3 (the guest's first) and whose endpoint has the given name.
fn bind(kind: u8, lane: u32, fingerprint: u64) -> Vec<u8> {
    let mut bytes = words(&[SLOTS, 1, 10]);
    bytes.extend(1u64.to_le_bytes());
    bytes.extend(words(&[1]));
    bytes.push(kind);
    bytes.extend(lane.to_le_bytes());
    bytes.extend(fingerprint.to_le_bytes());
    bytes
}

#[test]
fn a_forged_end_is_named() {
    // The host's own lane is 1, the guest's is 2; epochs are the upper half.
    let file = File::FINGERPRINT;
    let cases = [
        (bind(0, 9 | 1 << 16, file), Violation::Lane(9)),
        (bind(0, 1 << 16, file), Violation::Lane(0)),
        (bind(0, 1 | 1 << 16, file), Violation::Lane(1)),
        (bind(0, 2, file), Violation::Lane(2)),
        (bind(1, 2 | 1 << 16, file), Violation::Fingerprint),
        (bind(2, 2 | 1 << 16, file), Violation::Value("End")),
    ];
    for (payload, violation) in cases {
        let (host, guest) = sides();
        let server = host.server::<Directory>(0).unwrap();
        forge::<Directory>(&guest, TO_SERVER, first(tag::<Directory>("Bind"), &payload), &payload);
        let lost = server.receive(soon()).unwrap_err();
        assert_eq!(lost, ChannelError::Violation(violation));
        expect_sound(&host, 0);
    }
}

#[test]
fn one_breach_closes_every_lane() {
    let (host, guest) = sides();
    let (other, _kept) = host.pair::<File>().unwrap();
    let server = host.server::<File>(0).unwrap();
    forge::<File>(&guest, TO_SERVER, first(77, &[]), &[]);
    assert_eq!(server.receive(soon()).unwrap_err(), ChannelError::Violation(Violation::Tag(77)));
    let told = other.call(file::GetAttributes {}, soon()).unwrap_err();
    assert_eq!(told, ChannelError::Violation(Violation::Tag(77)));
}

#[test]
fn a_full_bell_blocks_no_end_and_a_drained_one_none_for_long() {
    let (host, guest) = sides();
    for bell in &guest.event_fds {
        io::write(bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    }
    let server = guest.server::<File>(0).unwrap();
    let hand = thread::spawn(move || file::serve(server, &Refuser, Duration::from_secs(20)));
    let mut caller = RpcClient::new(host.client::<File>(0).unwrap(), Duration::from_secs(20));
    for _ in 0..100 {
        assert!(caller.call(file::GetAttributes {}).unwrap().is_err());
    }
    drop(caller);
    hand.join().unwrap().unwrap();

    let (host, guest) = sides();
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
        let until = Instant::now() + Duration::from_millis(50);
        let told = client.call(file::GetAttributes {}, until);
        assert_eq!(told.unwrap_err(), ChannelError::Timeout);
        over.store(true, Relaxed);
    });
}

struct Refuser;

impl file::FileServer for Refuser {
    fn read(&self, _: &mut file::Read) -> Result<u32, Refusal> {
        Err(Refusal::Io)
    }
    fn get_attributes(&self, _: &mut file::GetAttributes) -> Result<Attributes, Refusal> {
        Err(Refusal::Io)
    }
}

#[test]
fn a_flood_of_rings_ends_at_its_bound_or_at_the_deadline() {
    let (host, guest) = sides();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Relaxed) {
                guest.signal(TO_CLIENT);
            }
        });
        let client = host.client::<File>(0).unwrap();
        let deadline = Instant::now() + Duration::from_secs(2);
        let lost = client.call(file::GetAttributes {}, deadline).unwrap_err();
        over.store(true, Relaxed);
        assert!(
            matches!(lost, ChannelError::Timeout | ChannelError::Violation(Violation::Flood)),
            "{lost}"
        );
    });
}

#[test]
fn a_message_that_changes_after_it_was_sent_is_judged_as_it_was_copied() {
    let mut random = Random(11);
    let over = AtomicBool::new(false);
    for _ in 0..300 {
        let (host, guest) = sides();
        let payload = bind(0, 2 | 1 << 16, File::FINGERPRINT);
        let server = host.server::<Directory>(0).unwrap();
        over.store(false, Relaxed);
        thread::scope(|scope| {
            let seed = random.next();
            let (over, guest, payload) = (&over, &guest, &payload);
            scope.spawn(move || {
                let mut random = Random(seed);
                let head = first(tag::<Directory>("Bind"), payload);
                forge::<Directory>(guest, TO_SERVER, head, payload);
                guest.signal(TO_SERVER);
                while !over.load(Relaxed) {
                    let at = random.next() as usize % payload.len();
                    let byte = [[payload[at]], [random.next() as u8]][random.next() as usize & 1];
                    guest.shared.copy_in(PAYLOAD_AT + at, &byte);
                }
            });
            let received = server.receive(soon());
            over.store(true, Relaxed);
            match received {
                Ok(directory::received::Ready::Bind(request, end)) => {
                    assert!(request.path.len() <= SLOT_BYTES as usize);
                    drop(end.nak(request, Refusal::Io.into()));
                }
                Ok(other) => panic!("{other:?}"),
                Err(ChannelError::Violation(_)) => {}
                Err(lost) => panic!("{lost}"),
            }
        });
        expect_sound(&host, 0);
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Four bytes that are mostly a small number, as in valid messages.
    fn word(&mut self) -> [u8; 4] {
        let n = self.next();
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
        let (host, guest) = sides();
        let server = host.server::<C>(0).unwrap();
        let message = random.next() as usize % C::TABLE.messages.len();
        let bytes: usize = C::TABLE.messages[message].fields.iter().map(|f| f.bytes_max).sum();
        let len = if random.next() & 1 == 0 { bytes } else { random.next() as usize % 300 };
        let payload: Vec<u8> =
            std::iter::repeat_with(|| random.word()).flatten().take(len).collect();
        forge::<C>(&guest, TO_SERVER, first(message as u16, &payload), &payload);
        let lost = server.serve(Duration::ZERO, |message| {
            accepted += 1;
            answer(message)
        });
        // Refused, closed by request, or silent after a valid message.
        assert!(
            matches!(lost, Ok(()) | Err(ChannelError::Violation(_) | ChannelError::Timeout)),
            "{lost:?}"
        );
        expect_sound(&host, 0);
    }
    accepted
}

#[test]
fn random_messages_are_refused_or_served_but_never_trusted() {
    assert!(fuzz_server::<File>(1, |m| file::answer(&Refuser, m)) > 20);
    assert!(fuzz_server::<Disk>(2, |_| None) > 20);
    assert!(fuzz_server::<Volume>(3, |_| None) > 20);
    assert!(fuzz_server::<Directory>(4, |_| None) > 20);
}

/// Sends `hello` and `fds` over a socket and returns the error of accepting them.
fn accept_of(hello: &[u8], fds: &[BorrowedFd<'_>]) -> ChannelError {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) =
        net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    crate::descriptors::send(&ours, hello, fds).unwrap();
    drop(ours);
    accept(&theirs, soon()).unwrap_err()
}

#[test]
fn a_hello_that_lies_is_refused() {
    let (offer, _socket) = offer(&plan()).unwrap();
    let me = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let hello = plan().to_bytes();
    let bells: Vec<_> = offer.event_fds.iter().map(OwnedFd::as_fd).collect();
    let all = [&[offer.shared.as_fd(), me.as_fd()][..], &bells].concat();
    let memory = |what| ChannelError::Violation(Violation::Memory(what));
    let descriptors = |what| ChannelError::Violation(Violation::Descriptors(what));
    assert_eq!(SessionConfig::from_bytes(&hello).unwrap(), plan());

    let mut magic = hello;
    magic[0] ^= 1;
    assert_eq!(accept_of(&magic, &all), memory("the hello is malformed"));
    assert_eq!(
        accept_of(&hello[1..], &all),
        ChannelError::Violation(Violation::Length(hello.len() as u32 - 1))
    );
    assert_eq!(
        accept_of(&[&hello[..], &[0]].concat(), &all),
        descriptors("more than fit a message")
    );
    for lanes in [MAX_LANES + 1, u32::MAX] {
        let plan = SessionConfig { host_lanes: lanes, ..plan() };
        assert_eq!(accept_of(&plan.to_bytes(), &all), memory("the plan exceeds its limits"));
    }
    for (slot_bytes, slots) in [(4095, 1), (0, 1), (1 << 20, 1 << 20), (1 << 31, 1)] {
        let plan = SessionConfig { host: vec![Class { slot_bytes, slots }], ..plan() };
        assert_eq!(accept_of(&plan.to_bytes(), &all), memory("the plan exceeds its limits"));
    }
    let number = descriptors("another number than the plan needs");
    assert_eq!(accept_of(&hello, &all[..all.len() - 1]), number);
    assert_eq!(accept_of(&hello, &[&all[..], &[me.as_fd()]].concat()), number);
    assert_eq!(accept_of(&hello, &[]), number);

    let blocking = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let mut swapped = all.clone();
    swapped[2] = blocking.as_fd();
    assert_eq!(accept_of(&hello, &swapped), descriptors("a bell that can block"));

    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let unsealed = fs::memfd_create("test", flags).unwrap();
    let mut swapped = all.clone();
    swapped[0] = unsealed.as_fd();
    assert_eq!(accept_of(&hello, &swapped), memory("it is not sealed"));
    fs::fcntl_add_seals(&unsealed, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
    assert_eq!(accept_of(&hello, &swapped), memory("it has another size"));
    assert!(fs::ftruncate(&offer.shared, 0).is_err(), "what is sealed cannot be cut");

    let (ours, theirs) =
        net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .unwrap();
    let soon = Instant::now() + Duration::from_millis(10);
    assert_eq!(accept(&theirs, soon).unwrap_err(), ChannelError::Timeout);
    drop(ours);
    assert_eq!(accept(&theirs, self::soon()).unwrap_err(), ChannelError::Closed);
}

fn reader(host: &Arc<Session>) -> CachingReader {
    let blocks = host.clone();
    let end = host.client::<File>(0).unwrap();
    CachingReader::new(end, Duration::from_secs(20), 1, move |len| blocks.block(len.min(4096)))
}

/// A file whose reads return four bytes of 7 at any offset.
struct Sevens;

impl file::FileServer for Sevens {
    fn read(&self, request: &mut file::Read) -> Result<u32, Refusal> {
        Ok(request.buffer.copy_in(0, &[7; 4]) as u32)
    }
    fn get_attributes(&self, _: &mut file::GetAttributes) -> Result<Attributes, Refusal> {
        Err(Refusal::Io)
    }
}

#[test]
fn an_answer_longer_than_its_block_or_than_was_asked_ends_the_reader() {
    // The peer's own slot of ten bytes; the reader's slot with more than it requested.
    for payload in [ack([SLOTS, 1, 10], 100), ack([0, 1, 100], 101), ack([0, 1, 100], u32::MAX)] {
        let (host, guest) = sides();
        // This server has no notifier: the reader requests exactly the bytes it needs.
        let mut reader = reader(&host);
        let head = first(tag::<File>("AckRead"), &payload);
        // Sent before the request: a peer may be early.
        forge::<File>(&guest, TO_CLIENT, head, &payload);
        let lost = ChannelError::Violation(Violation::Value("AckRead"));
        for _ in 0..2 {
            assert_eq!(reader.read(0, &mut [0; 100]), Err(ReadError::Lost(lost)));
        }
        drop(reader);
        host.dead.store(true, SeqCst);
        expect_sound(&host, 0);
    }
}

#[test]
fn a_peer_that_writes_to_what_is_kept_and_to_its_count_changes_bytes_and_nothing_else() {
    let (host, guest) = sides();
    let server = guest.server::<File>(0).unwrap();
    let _ = server.change_notifier();
    let mut reader = reader(&host);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| file::serve(server, &Sevens, Duration::from_secs(20)));
        scope.spawn(|| {
            let mut random = Random(5);
            let slots_at = guest.plan.layout().unwrap().slots_at;
            while !over.load(Relaxed) {
                guest.shared.copy_in(slots_at + random.next() as usize % 4096, &[1]);
                let told = [random.next(), 1 << 48 | random.next() & 1][random.next() as usize & 1];
                guest.shared.atomic_u64(MAILBOX_STRIDE + CHANGE_COUNT_AT).store(told, Relaxed);
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
    expect_sound(&host, 0);
}

#[test]
fn an_end_that_took_a_lane_over_is_not_told_of_by_the_one_before() {
    let (host, guest) = sides();
    let (client, server) = host.pair::<File>().unwrap();
    assert_eq!(client.change_count(), Ok(None));
    let teller = server.change_notifier();
    let before = client.change_count().unwrap().unwrap();
    assert!(teller.notify_change() && client.change_count().unwrap().unwrap() > before);
    // A new endpoint reuses the same lane of the session.
    drop((client, server));
    assert!(!teller.notify_change());
    let (client, server) = host.pair::<File>().unwrap();
    assert_eq!(client.change_count(), Ok(None), "what the one before told is nothing");
    assert!(!teller.notify_change());
    assert_eq!(client.change_count(), Ok(None));
    let _ = server.change_notifier();
    assert!(client.change_count().unwrap().is_some());
    drop(guest);
}

#[test]
fn a_session_without_room_says_so_and_keeps_what_it_has() {
    let (host, guest) = sides();
    let _server = guest.server::<File>(0).unwrap();
    let mut caller = RpcClient::new(host.client::<File>(0).unwrap(), Duration::from_secs(20));
    let held: Vec<_> = (0..SLOTS).map(|_| host.block(1).unwrap()).collect();
    assert!(host.block(1).is_none());
    let buffer = Block::private(10);
    let read = file::Read { buffer, buffer_offset: 0, offset: 0, len: 1, no_atime: false };
    assert_eq!(caller.call(read).unwrap_err(), ChannelError::HeapFull);
    drop(held);
    expect_sound(&host, 0);
    // The host has one lane: the second channel has to wait for it.
    let first = host.pair::<File>().unwrap();
    assert_eq!(host.pair::<File>().unwrap_err(), Refusal::Quota);
    drop(first);
    assert!(host.pair::<File>().is_ok());
}
