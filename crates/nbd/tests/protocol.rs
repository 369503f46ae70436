//! Clients of every kind: usual ones, wrong ones, hostile ones, and ones that do not read.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use draconis_device::{
    Disk, Error, Group, MemoryDisk, Properties, Random, Refused, SubmitOptions, Ticket,
};
use draconis_nbd::{CloneSource, Connection, Export, MAX_OPTIONS};
use draconis_testkit::thin::{ThinClient, zeros_take_no_space};
use draconis_types::lock::Mutex;

const DISK_BYTES: usize = 1 << 20;
const GO: u32 = 7;
const ACK: u32 = 1;
const ERR_UNSUP: u32 = 0x8000_0001;
const ERR_INVALID: u32 = 0x8000_0003;
const ERR_UNKNOWN: u32 = 0x8000_0006;
const READ: u16 = 0;
const WRITE: u16 = 1;
const DISC: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const CACHE: u16 = 5;
const WRITE_ZEROES: u16 = 6;
const BLOCK_STATUS: u16 = 7;
const FUA: u16 = 1;
const NO_HOLE: u16 = 2;
const FAST_ZERO: u16 = 16;
const EPERM: u32 = 1;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const ENOTSUP: u32 = 95;

fn memory_disk() -> MemoryDisk {
    MemoryDisk::new((0..DISK_BYTES).map(|at| (at / 512) as u8).collect(), 512)
}

fn export(disk: impl Disk + 'static) -> Export {
    Export::new("disk".into(), "a disk for tests".into(), Arc::new(disk))
}

fn encode_request(command: u16, flags: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

/// A client, and the thread that serves it.
struct Client {
    stream: UnixStream,
    server: Option<std::thread::JoinHandle<Result<(), String>>>,
    cookie: u64,
}

impl Client {
    /// Connects, and sends the client flags.
    fn connect(exports: &Arc<[Export]>) -> Self {
        let (stream, theirs) = UnixStream::pair().unwrap();
        stream.set_read_timeout(Some(draconis_testkit::wait::HANG_BOUND)).unwrap();
        let exports = exports.clone();
        let server = std::thread::spawn(move || {
            let mut connection = Connection::new(theirs.try_clone().unwrap(), theirs);
            match connection.negotiate(&exports).map_err(|error| error.to_string())? {
                Some(session) => connection.transmit(&session).map_err(|error| error.to_string()),
                None => Ok(()),
            }
        });
        let mut client = Self { stream, server: Some(server), cookie: 0 };
        let hello = client.receive(18);
        assert_eq!(&hello[..16], b"NBDMAGICIHAVEOPT");
        assert_eq!(hello[16..], [0, 3]);
        client.send(&[0, 0, 0, 3]);
        client
    }

    /// Connects, and chooses the first export; with structured replies and `base:allocation` if
    /// `is_structured`.
    fn choose(exports: &Arc<[Export]>, is_structured: bool) -> Self {
        let mut client = Self::connect(exports);
        if is_structured {
            assert_eq!(client.option(8, &[]).last().unwrap().0, ACK);
            let query = [&[0; 4][..], &[0, 0, 0, 1, 0, 0, 0, 15], b"base:allocation"].concat();
            let replies = client.option(10, &query);
            assert_eq!(replies[0], (4, [&[0, 0, 0, 1][..], b"base:allocation"].concat()));
        }
        let replies = client.option(GO, &[0; 6]);
        assert_eq!(replies.last().unwrap().0, ACK);
        client
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    fn receive(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn receive_u32(&mut self) -> u32 {
        u32::from_be_bytes(self.receive(4).try_into().unwrap())
    }

    /// Sends an option; returns types and contents of the replies.
    fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        let len = (data.len() as u32).to_be_bytes();
        self.send(&[b"IHAVEOPT", &option.to_be_bytes()[..], &len, data].concat());
        let mut replies = vec![];
        loop {
            let head = self.receive(12);
            assert_eq!(head[..8], 0x0003_e889_0455_65a9_u64.to_be_bytes());
            assert_eq!(head[8..], option.to_be_bytes());
            let (kind, len) = (self.receive_u32(), self.receive_u32());
            replies.push((kind, self.receive(len as usize)));
            if kind == ACK || kind >= ERR_UNSUP {
                return replies;
            }
        }
    }

    /// Sends a request without waiting for its reply.
    fn request(&mut self, command: u16, flags: u16, offset: u64, len: u32, payload: &[u8]) -> u64 {
        self.cookie += 1;
        let mut bytes = encode_request(command, flags, self.cookie, offset, len);
        bytes.extend(payload);
        self.send(&bytes);
        self.cookie
    }

    /// Receives a simple reply: error and cookie.
    fn simple_reply(&mut self) -> (u32, u64) {
        assert_eq!(self.receive_u32(), 0x6744_6698);
        (self.receive_u32(), u64::from_be_bytes(self.receive(8).try_into().unwrap()))
    }

    /// Sends a request, and returns the error of its simple reply.
    fn call(&mut self, command: u16, flags: u16, offset: u64, len: u32, payload: &[u8]) -> u32 {
        let cookie = self.request(command, flags, offset, len, payload);
        let (error, answered) = self.simple_reply();
        assert_eq!(answered, cookie);
        error
    }

    /// Reads a range by simple replies.
    fn read(&mut self, offset: u64, len: u32) -> Vec<u8> {
        assert_eq!(self.call(READ, 0, offset, len, &[]), 0);
        self.receive(len as usize)
    }

    /// Receives a chunk of a structured reply: flags, type and contents.
    fn chunk(&mut self) -> (u16, u16, Vec<u8>) {
        assert_eq!(self.receive_u32(), 0x668e_33ef);
        let head = self.receive(12);
        let len = self.receive_u32();
        let number = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        (number(0), number(2), self.receive(len as usize))
    }

    /// Leaves; returns how the server's thread ended.
    fn leave(mut self) -> Result<(), String> {
        self.request(DISC, 0, 0, 0, &[]);
        self.server.take().unwrap().join().unwrap()
    }

    /// Closes the stream; returns how the server's thread ended.
    fn hang_up(self) -> Result<(), String> {
        drop(self.stream);
        self.server.unwrap().join().unwrap()
    }
}

fn one(disk: impl Disk + 'static) -> Arc<[Export]> {
    vec![export(disk)].into()
}

#[test]
fn every_option_is_answered() {
    let exports: Arc<[Export]> = vec![
        export(memory_disk()),
        Export::new("b".into(), String::new(), Arc::new(memory_disk())),
    ]
    .into();
    let mut client = Client::connect(&exports);
    let list = client.option(3, &[]);
    let names: Vec<_> = list.iter().map(|(kind, data)| (*kind, data.get(4..))).collect();
    assert_eq!(names, [(2, Some(&b"disk"[..])), (2, Some(b"b")), (ACK, None)]);
    assert_eq!(client.option(3, b"x")[0].0, ERR_INVALID);
    for unsupported in [0, 4, 5, 12, u32::MAX] {
        assert_eq!(client.option(unsupported, b"data")[0].0, ERR_UNSUP, "{unsupported}");
    }
    // Metadata needs structured replies.
    let context = |name: &[u8], query: &[u8]| {
        let len = |bytes: &[u8]| (bytes.len() as u32).to_be_bytes();
        [&len(name)[..], name, &[0, 0, 0, 1], &len(query), query].concat()
    };
    assert_eq!(client.option(10, &context(b"", b"base:allocation"))[0].0, ERR_INVALID);
    assert_eq!(client.option(8, b"")[0].0, ACK);
    assert_eq!(client.option(9, &context(b"b", b"base:"))[0].0, 4);
    assert_eq!(client.option(9, &context(b"b", b"qemu:"))[0].0, ACK);
    assert_eq!(client.option(10, &context(b"c", b"base:allocation"))[0].0, ERR_UNKNOWN);
    assert_eq!(client.option(10, &context(b"b", b"base:allocation"))[0].0, 4);
    // Data that is cut off, or too long.
    for wrong in [&[][..], &[0, 0, 0, 9, 1], &[0, 0, 0, 0, 0, 1], &[0; 7], &[255; 12]] {
        for option in [6, 7, 9, 10] {
            if option > 7 && wrong == [0; 7] {
                continue;
            }
            assert_eq!(client.option(option, wrong)[0].0, ERR_INVALID, "{option} {wrong:?}");
        }
    }
    // INFO of the name and the description; then GO of an unknown export.
    let told = client.option(6, &[0, 0, 0, 1, b'b', 0, 2, 0, 1, 0, 2]);
    let kinds: Vec<_> = told.iter().map(|(_, data)| data.get(..2).map(<[u8]>::to_vec)).collect();
    let kind = |number: u8| Some(vec![0, number]);
    assert_eq!(kinds, [kind(0), kind(3), kind(1), kind(2), None]);
    assert_eq!(told[0].1[2..10], (DISK_BYTES as u64).to_be_bytes());
    assert_eq!(client.option(GO, &[0, 0, 0, 1, b'c', 0, 0])[0].0, ERR_UNKNOWN);
    assert_eq!(client.option(2, &[])[0].0, ACK);
    assert_eq!(client.server.take().unwrap().join().unwrap(), Ok(()));
}

#[test]
fn export_name_chooses_with_and_without_zeroes() {
    for (flags, more) in [(3, 0), (1, 124)] {
        let exports = one(memory_disk());
        let (mut stream, theirs) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || {
            let mut connection = Connection::new(theirs.try_clone().unwrap(), theirs);
            let session = connection.negotiate(&exports).unwrap().unwrap();
            assert_eq!(session.export.name(), "disk");
        });
        stream.read_exact(&mut [0; 18]).unwrap();
        stream.write_all(&[0, 0, 0, flags]).unwrap();
        stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\x04disk").unwrap();
        let mut reply = vec![];
        stream.read_to_end(&mut reply).unwrap();
        assert_eq!(reply.len(), 10 + more);
        assert_eq!(reply[..8], (DISK_BYTES as u64).to_be_bytes());
        server.join().unwrap();
    }
}

#[test]
fn every_command_and_error() {
    let exports = one(memory_disk());
    let mut client = Client::choose(&exports, false);
    let end = DISK_BYTES as u64;
    assert_eq!(client.read(512, 1024)[511..513], [1, 2]);
    assert_eq!(client.read(1023, 2), [1, 2]);
    assert_eq!(client.read(7, 0), []);
    // Any offset and length, also across sectors.
    for (offset, len, byte) in [(0, 512, 7), (1000, 700, 8), (511, 2, 9), (end - 1, 1, 10)] {
        let before = client.read(0, DISK_BYTES as u32);
        assert_eq!(client.call(WRITE, 0, offset, len, &vec![byte; len as usize]), 0);
        let mut wanted = before;
        wanted[offset as usize..][..len as usize].fill(byte);
        assert!(client.read(0, DISK_BYTES as u32) == wanted, "{offset} {len}");
    }
    assert_eq!(client.call(WRITE, FUA, 4096, 4, b"abcd"), 0);
    assert_eq!(client.call(FLUSH, 0, 0, 0, &[]), 0);
    assert_eq!(client.call(CACHE, 0, 0, end as u32, &[]), 0);
    assert_eq!(client.call(WRITE_ZEROES, 0, 100, 5000, &[]), 0);
    assert_eq!(client.read(100, 5000), vec![0; 5000]);
    assert_ne!(client.read(5100, 1), [0]);
    assert_eq!(client.call(WRITE_ZEROES, FAST_ZERO, 0, 512, &[]), ENOTSUP);
    assert_eq!(client.call(TRIM, FUA, 8192, 4096, &[]), 0);
    // Beyond the end, unknown, and with unknown flags: the payload is skipped.
    assert_eq!(client.call(READ, 0, end - 1, 2, &[]), EINVAL);
    assert_eq!(client.call(READ, 0, u64::MAX, 2, &[]), EINVAL);
    assert_eq!(client.call(READ, 0, 0, u32::MAX, &[]), EINVAL);
    assert_eq!(client.call(WRITE, 0, end - 1, 2, b"ab"), ENOSPC);
    assert_eq!(client.call(WRITE_ZEROES, 0, end, u32::MAX, &[]), ENOSPC);
    assert_eq!(client.call(TRIM, 0, end, 1, &[]), EINVAL);
    assert_eq!(client.call(WRITE, 64, 0, 2, b"ab"), EINVAL);
    assert_eq!(client.call(BLOCK_STATUS, 0, 0, 512, &[]), EINVAL);
    assert_eq!(client.call(99, 0, 0, 512, &[]), EINVAL);
    assert_eq!(client.leave(), Ok(()));
}

#[test]
fn structured_replies() {
    let exports = one(memory_disk());
    let mut client = Client::choose(&exports, true);
    client.request(READ, 4, 512, 512, &[]);
    let (flags, kind, data) = client.chunk();
    assert_eq!((flags, kind, data.len()), (1, 1, 8 + 512));
    assert_eq!(data[..9], [0, 0, 0, 0, 0, 0, 2, 0, 1]);
    client.request(READ, 0, 0, 0, &[]);
    assert_eq!(client.chunk(), (1, 0, vec![]));
    client.request(READ, 0, DISK_BYTES as u64, 1, &[]);
    assert_eq!(client.chunk(), (1, 0x8001, vec![0, 0, 0, EINVAL as u8, 0, 0]));
    client.request(BLOCK_STATUS, 0, 0, 4096, &[]);
    assert_eq!(client.chunk(), (1, 5, vec![0, 0, 0, 1, 0, 0, 16, 0, 0, 0, 0, 0]));
    client.request(BLOCK_STATUS, 0, 0, 0, &[]);
    assert_eq!(client.chunk().1, 0x8001);
    assert_eq!(client.call(WRITE, 0, 0, 1, b"x"), 0);
    assert_eq!(client.hang_up(), Ok(()));
}

/// A disk that refuses writes at some offsets.
struct RefusesOdd(MemoryDisk);

impl draconis_device::ForwardingDisk for RefusesOdd {
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
        if chain[0].writes[0].at_bytes % 1024 == 512 {
            return Err(Refused { payload: Some(chain), error: Error::ReadOnly });
        }
        self.0.submit_with(chain, after, terms)
    }
}

/// A stream that was recorded, or takes what is written; counts calls.
#[derive(Clone, Default)]
struct Recorded(Arc<Mutex<(Vec<u8>, usize)>>);

impl Write for Recorded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let mut taken = self.0.lock();
        taken.0.extend(bytes);
        taken.1 += 1;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn writes_that_arrive_together_are_answered_together() {
    for (disk, wanted) in [
        (Arc::new(memory_disk()) as Arc<dyn Disk>, [0, 0]),
        (Arc::new(RefusesOdd(memory_disk())), [0, EPERM]),
    ] {
        let exports: Arc<[Export]> = Arc::new([Export::new("disk".into(), String::new(), disk)]);
        let mut input = b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x04disk".to_vec();
        for nth in 0..20 {
            input.extend(encode_request(WRITE, 0, nth, nth * 512, 512));
            input.extend([nth as u8 + 100; 512]);
        }
        // No part of the batch: FUA, and a write that is not all there.
        input.extend(encode_request(WRITE, FUA, 20, 20 * 512, 512));
        input.extend([120; 512]);
        input.extend(encode_request(WRITE, 0, 21, 21 * 512, 512));
        input.extend([121; 500]);
        let output = Recorded::default();
        let mut connection = Connection::new(&input[..], output.clone());
        let session = connection.negotiate(&exports).unwrap().unwrap();
        let (negotiated, calls) = output.0.lock().clone();
        let error = connection.transmit(&session).unwrap_err();
        assert!(error.to_string().contains("failed to fill"), "{error}");
        let (replies, all_calls) = output.0.lock().clone();
        assert_eq!(all_calls - calls, 2, "one for the batch, one for FUA");
        let mut answered: Vec<u64> = vec![];
        for reply in replies[negotiated.len()..].chunks(16) {
            let cookie = u64::from_be_bytes(reply[8..].try_into().unwrap());
            assert_eq!(reply[4..8], wanted[cookie as usize % 2].to_be_bytes(), "{cookie}");
            answered.push(cookie);
        }
        answered.sort_unstable();
        assert!(answered.iter().copied().eq(0..=20), "{answered:?}");
        let mut client = Client::choose(&exports, false);
        for nth in 0..22 {
            let is_written = nth <= 20 && wanted[nth as usize % 2] == 0;
            let value = if is_written { nth + 100 } else { nth } as u8;
            assert_eq!(client.read(nth * 512, 512), [value; 512], "{nth}");
        }
        assert_eq!(client.leave(), Ok(()));
    }
}

#[test]
fn batches_of_every_kind_of_write() {
    let exports = one(memory_disk());
    let mut client = Client::choose(&exports, false);
    let mut dice = Random::new(5);
    let mut wanted = client.read(0, DISK_BYTES as u32);
    for round in 0..60 {
        let (mut bytes, mut errors) = (vec![], std::collections::BTreeMap::new());
        // Requests in flight must not overlap: their order is open.
        let mut at = dice.next_below(3000);
        for _ in 0..dice.next_below(70) {
            client.cookie += 1;
            let longest = [600, 5000, 40_000][dice.next_below(3) as usize];
            let len = 1 + dice.next_below(longest);
            let flags = if dice.next_below(9) == 0 { FUA } else { 0 };
            let value = dice.next_below(256) as u8;
            bytes.extend(encode_request(WRITE, flags, client.cookie, at, len as u32));
            bytes.extend(vec![value; len as usize]);
            let room = wanted.get_mut(at as usize..(at + len) as usize);
            errors.insert(client.cookie, if room.is_some() { 0 } else { ENOSPC });
            if let Some(room) = room {
                room.fill(value);
            }
            at += len + dice.next_below(2000);
        }
        let mut stream = client.stream.try_clone().unwrap();
        let sender = std::thread::spawn(move || {
            for piece in bytes.chunks(30_000) {
                stream.write_all(piece).unwrap();
            }
        });
        while !errors.is_empty() {
            let (error, cookie) = client.simple_reply();
            assert_eq!(errors.remove(&cookie), Some(error), "round {round}");
        }
        sender.join().unwrap();
        assert!(client.read(0, DISK_BYTES as u32) == wanted, "round {round}");
    }
    assert_eq!(client.leave(), Ok(()));
}

/// A disk that is only read.
struct ReadOnly(MemoryDisk);

impl draconis_device::ForwardingDisk for ReadOnly {
    type Inner = MemoryDisk;

    fn inner_disk(&self) -> &MemoryDisk {
        &self.0
    }

    fn properties(&self) -> Properties {
        Properties { read_only: true, ..Disk::properties(&self.0) }
    }
}

#[test]
fn read_only_export_refuses_changes() {
    let exports = one(ReadOnly(memory_disk()));
    let mut client = Client::choose(&exports, false);
    assert_eq!(client.call(WRITE, 0, 0, 2, b"ab"), EPERM);
    assert_eq!(client.call(TRIM, 0, 0, 512, &[]), EPERM);
    assert_eq!(client.call(WRITE_ZEROES, 0, 0, 512, &[]), EPERM);
    assert_eq!(client.call(FLUSH, 0, 0, 0, &[]), 0);
    assert_eq!(client.read(0, 1), [0]);
    assert_eq!(client.leave(), Ok(()));
}

/// A disk in a bucket that is away: writes wait until the test lets them go on.
struct Away(MemoryDisk, Mutex<Receiver<()>>);

impl draconis_device::ForwardingDisk for Away {
    type Inner = MemoryDisk;

    fn inner_disk(&self) -> &MemoryDisk {
        &self.0
    }

    fn can_be_unreachable(&self) -> bool {
        true
    }

    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        self.1.lock().recv().unwrap();
        Disk::wait_visible(&self.0, ticket)
    }
}

#[test]
fn reads_are_answered_while_a_write_waits_for_a_bucket() {
    let (let_go, waits) = channel();
    let exports = one(Away(memory_disk(), Mutex::new(waits)));
    let mut client = Client::choose(&exports, false);
    let written = client.request(WRITE, 0, 4096, 3, b"new");
    assert_eq!(client.read(512, 2), [1, 1]);
    let_go.send(()).unwrap();
    assert_eq!(client.simple_reply(), (0, written));
    assert_eq!(client.read(4096, 4), [b'n', b'e', b'w', 8]);
    assert_eq!(client.leave(), Ok(()));
}

/// A disk whose flushes wait until the test lets them go on.
struct SlowFlush(MemoryDisk, Mutex<Receiver<()>>);

impl draconis_device::ForwardingDisk for SlowFlush {
    type Inner = MemoryDisk;

    fn inner_disk(&self) -> &MemoryDisk {
        &self.0
    }

    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        self.1.lock().recv().unwrap();
        Disk::wait_durable(&self.0, ticket)
    }
}

#[test]
fn replies_are_sent_in_any_order_and_a_flush_covers_all_connections() {
    let (let_go, waits) = channel();
    let exports = one(SlowFlush(memory_disk(), Mutex::new(waits)));
    let mut client = Client::choose(&exports, false);
    let mut other = Client::choose(&exports, false);
    assert_eq!(client.call(WRITE, 0, 0, 4, b"abcd"), 0);
    // The other connection has written nothing, and its flush waits all the same.
    let flush = other.request(FLUSH, 0, 0, 0, &[]);
    let read = other.request(READ, 0, 0, 4, &[]);
    assert_eq!(other.simple_reply(), (0, read));
    assert_eq!(other.receive(4), b"abcd");
    let_go.send(()).unwrap();
    assert_eq!(other.simple_reply(), (0, flush));
    assert_eq!(other.leave(), Ok(()));
    assert_eq!(client.leave(), Ok(()));
}

/// Clones in memory, of which there can be two at a time.
#[derive(Clone, Default)]
struct TwoClones(Arc<()>);

/// A clone, and its share in the count.
struct CountedClone(MemoryDisk, #[allow(dead_code, reason = "counts")] Arc<()>);

impl draconis_device::ForwardingDisk for CountedClone {
    type Inner = MemoryDisk;

    fn inner_disk(&self) -> &MemoryDisk {
        &self.0
    }
}

impl CloneSource for TwoClones {
    fn create_clone(&self) -> Result<(String, Arc<dyn Disk>), String> {
        // The test and the export hold one as well.
        if Arc::strong_count(&self.0) >= 4 {
            return Err("two are enough".into());
        }
        Ok(("a clone".into(), Arc::new(CountedClone(memory_disk(), self.0.clone()))))
    }
}

#[test]
fn each_connection_has_a_clone() {
    let clones = TwoClones::default();
    let base = Arc::new(ReadOnly(memory_disk()));
    let export =
        Export::with_clones("disk".into(), "the base".into(), base, Box::new(clones.clone()));
    let exports: Arc<[Export]> = vec![export].into();
    let mut one = Client::choose(&exports, false);
    let mut two = Client::connect(&exports);
    // INFO describes what GO gives, and makes nothing.
    let about = [0, 0, 0, 0, 0, 1, 0, 2];
    let (info, go) = (two.option(6, &about), two.option(GO, &about));
    assert_eq!((&info[0], &info[2].1[2..]), (&go[0], &b"the base"[..]));
    assert_eq!(go[2].1[2..], *b"a clone");
    let flags = u16::from_be_bytes([go[0].1[10], go[0].1[11]]);
    assert_eq!(flags & (1 << 1 | 1 << 8), 0, "neither read-only nor for many connections");
    assert_eq!(one.call(WRITE, 0, 0, 4, b"abcd"), 0);
    assert_eq!(two.read(0, 4), [0; 4]);
    assert_eq!(one.read(0, 4), b"abcd");
    // The third client reads why it gets none, and may go on.
    let mut three = Client::connect(&exports);
    let told = three.option(GO, &[0; 6]);
    assert_eq!(told[0].0, 0x8000_0002);
    assert!(told[0].1.ends_with(b"two are enough"));
    assert_eq!(one.leave(), Ok(()));
    assert_eq!(three.option(GO, &[0; 6]).last().unwrap().0, ACK);
    assert_eq!((two.leave(), three.hang_up()), (Ok(()), Ok(())));
    assert_eq!(Arc::strong_count(&clones.0), 2);
}

#[test]
fn client_that_does_not_read_disturbs_nobody() {
    let exports = one(MemoryDisk::new(vec![3; 32 << 20], 512));
    let mut silent = Client::choose(&exports, false);
    for _ in 0..100 {
        silent.request(READ, 0, 0, 32 << 20, &[]);
    }
    let mut other = Client::choose(&exports, false);
    assert_eq!(other.read(5, 3), [3; 3]);
    assert_eq!(other.leave(), Ok(()));
    // It leaves with half a request; replies to it are given up.
    let _ = silent.stream.write_all(&[0x25]);
    let _ = silent.hang_up();
}

#[test]
fn protocol_errors_close_the_connection() {
    let exports = one(memory_disk());
    let describe = |client: Client| client.hang_up().unwrap_err();
    let mut client = Client::choose(&exports, false);
    client.send(&[0; 28]);
    assert!(describe(client).contains("magic"));
    let mut client = Client::choose(&exports, false);
    client.request(WRITE, 0, 0, (32 << 20) + 1, &[]);
    assert!(describe(client).contains("too long"));
    let mut client = Client::choose(&exports, false);
    client.request(WRITE, 0, 0, 1024, &[1; 1000]);
    assert!(!describe(client).is_empty());
    let mut client = Client::connect(&exports);
    client.send(b"IHAVEOPT\0\0\0\x03\0\x01\0\x01");
    assert!(describe(client).contains("too long"));
    let mut client = Client::connect(&exports);
    client.send(b"IHAVEOPT\0\0\0\x01\0\0\0\x01x");
    assert!(describe(client).contains("no export"));
    let mut client = Client::connect(&exports);
    for _ in 0..MAX_OPTIONS {
        client.option(77, &[]);
    }
    assert!(describe(client).contains("too many"));
}

/// Requests and options of random and of half-right bytes: no panic, no endless loop, and a client
/// beside them is served.
#[test]
fn random_bytes_are_survived() {
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let exports = one(memory_disk());
        let mut bytes = vec![];
        let usual: &[u8] = b"\0\0\0\x03IHAVEOPT\0\0\0\x08\0\0\0\0\
            IHAVEOPT\0\0\0\x0a\0\0\0\x1b\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation\
            IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0";
        bytes.extend(usual);
        for _ in 0..random.next_below(40) {
            bytes.extend(0x2560_9513_u32.to_be_bytes());
            bytes.extend((random.next_below(32) as u16).to_be_bytes());
            bytes.extend((random.next_below(9) as u16).to_be_bytes());
            bytes.extend(random.next_u64().to_be_bytes());
            let bits = random.next_below(64);
            bytes.extend((random.next_u64() >> bits).to_be_bytes());
            let len = (random.next_u64() >> (32 + random.next_below(32))) as u32;
            bytes.extend(len.to_be_bytes());
            bytes.extend((0..random.next_below(2000)).map(|_| 0));
        }
        for _ in 0..random.next_below(4) {
            let at = random.next_below(bytes.len() as u64) as usize;
            bytes[at] = random.next_u64() as u8;
        }
        bytes.truncate(bytes.len() - random.next_below(bytes.len() as u64 / 4) as usize);
        let mut output = vec![];
        let mut connection = Connection::new(&bytes[..], &mut output);
        if let Ok(Some(session)) = connection.negotiate(&exports) {
            let _ = connection.transmit(&session);
        }
        let mut client = Client::choose(&exports, false);
        assert_eq!(client.read(0, 4).len(), 4, "seed {seed}");
        assert_eq!(client.leave(), Ok(()));
    }
}

impl ThinClient for Client {
    fn write(&mut self, at: u64, bytes: &[u8]) {
        assert_eq!(self.call(WRITE, 0, at, bytes.len() as u32, bytes), 0);
    }

    fn read(&mut self, at: u64, len: usize) -> Vec<u8> {
        Self::read(self, at, len as u32)
    }

    fn trim(&mut self, at: u64, len: u64) {
        assert_eq!(self.call(TRIM, 0, at, len as u32, &[]), 0);
    }

    fn zero(&mut self, at: u64, len: u64, keeps_space: bool) {
        let flags = if keeps_space { NO_HOLE } else { 0 };
        assert_eq!(self.call(WRITE_ZEROES, flags, at, len as u32, &[]), 0);
    }

    fn flush(&mut self) {
        assert_eq!(self.call(FLUSH, 0, 0, 0, &[]), 0);
    }

    fn leaves_holes(&self) -> bool {
        false
    }
}

#[test]
fn zeros_stay_holes() {
    zeros_take_no_space(|disk| Client::choose(&one(disk), false));
}
