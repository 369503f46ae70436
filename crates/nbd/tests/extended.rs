//! Extended headers, byte for byte as the specification has them.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use draconis_device::{Disk, MemoryDisk, Properties, Random};
use draconis_nbd::{Connection, Export};

const DISK_BYTES: usize = 1 << 20;
const ACK: u32 = 1;
const FUA: u16 = 1;
const NO_HOLE: u16 = 2;
const DF: u16 = 4;
const PAYLOAD_LEN: u16 = 32;
const EINVAL: u8 = 22;
const ENOSPC: u8 = 28;

fn encode_request(command: u16, flags: u16, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0x21, 0xe4, 0x1c, 0x71];
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(b"a cookie");
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    assert_eq!(bytes.len(), 32);
    bytes
}

struct Client {
    stream: UnixStream,
    server: std::thread::JoinHandle<Result<(), String>>,
}

/// Chunk of a reply: flags, type, offset and contents.
type Chunk = (u16, u16, u64, Vec<u8>);

impl Client {
    fn connect(disk: impl Disk + 'static) -> Self {
        let (stream, theirs) = UnixStream::pair().unwrap();
        stream.set_read_timeout(Some(draconis_testkit::wait::HANG_BOUND)).unwrap();
        let server = std::thread::spawn(move || {
            let exports = [Export::new("disk".into(), String::new(), Arc::new(disk))];
            let mut connection = Connection::new(theirs.try_clone().unwrap(), theirs);
            match connection.negotiate(&exports).map_err(|error| error.to_string())? {
                Some(session) => connection.transmit(&session).map_err(|error| error.to_string()),
                None => Ok(()),
            }
        });
        let mut client = Self { stream, server };
        client.receive(18);
        client.send(&[0, 0, 0, 3]);
        client
    }

    /// Connects with extended headers and `base:allocation`.
    fn choose(disk: impl Disk + 'static) -> Self {
        let mut client = Self::connect(disk);
        assert_eq!(client.option(11, &[]), [(ACK, vec![])]);
        let query = [&[0; 4][..], &[0, 0, 0, 1, 0, 0, 0, 15], b"base:allocation"].concat();
        assert_eq!(client.option(10, &query).len(), 2);
        let go = client.option(7, &[0; 6]);
        assert_eq!(go.last().unwrap().0, ACK);
        let flags = u16::from_be_bytes([go[0].1[10], go[0].1[11]]);
        assert_eq!(flags & (1 << 12 | 1 << 7), 1 << 12 | 1 << 7, "status payloads, and DF");
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

    fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        let len = (data.len() as u32).to_be_bytes();
        self.send(&[b"IHAVEOPT", &option.to_be_bytes()[..], &len, data].concat());
        let mut replies = vec![];
        loop {
            let head = self.receive(20);
            let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
            replies.push((number(12), self.receive(number(16) as usize)));
            if number(12) == ACK || number(12) > 1 << 31 {
                return replies;
            }
        }
    }

    fn request(&mut self, command: u16, flags: u16, offset: u64, len: u64, payload: &[u8]) {
        self.send(&[&encode_request(command, flags, offset, len), payload].concat());
    }

    fn chunk(&mut self) -> Chunk {
        let head = self.receive(32);
        assert_eq!(head[..4], [0x6e, 0x8a, 0x27, 0x8c]);
        assert_eq!(head[8..16], *b"a cookie");
        let short = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let long = |at: usize| u64::from_be_bytes(head[at..at + 8].try_into().unwrap());
        (short(4), short(6), long(16), self.receive(long(24) as usize))
    }

    /// Sends a request whose reply is one chunk; returns the chunk without flags and offset.
    fn call(
        &mut self,
        (command, flags): (u16, u16),
        offset: u64,
        len: u64,
        payload: &[u8],
    ) -> (u16, Vec<u8>) {
        self.request(command, flags, offset, len, payload);
        let (flags, kind, at, contents) = self.chunk();
        assert_eq!((flags, at), (1, offset), "the last chunk, with the offset of the request");
        (kind, contents)
    }

    fn leave(mut self) -> Result<(), String> {
        self.request(2, 0, 0, 0, &[]);
        self.server.join().unwrap()
    }
}

fn memory_disk() -> MemoryDisk {
    MemoryDisk::new((0..DISK_BYTES).map(|at| (at / 512) as u8).collect(), 512)
}

fn error(number: u8) -> (u16, Vec<u8>) {
    (0x8001, vec![0, 0, 0, number, 0, 0])
}

const DONE: (u16, Vec<u8>) = (0, vec![]);

#[test]
fn options_of_extended_headers() {
    let mut client = Client::connect(memory_disk());
    assert_eq!(client.option(11, b"x")[0].0, 0x8000_0003);
    assert_eq!(client.option(8, &[])[0].0, ACK);
    assert_eq!(client.option(11, &[])[0].0, ACK);
    assert_eq!(client.option(8, &[])[0].0, 0x8000_000a, "no way back to structured replies");
    // Without a metadata context there are no status payloads.
    let info = client.option(6, &[0; 6]);
    assert_eq!(u16::from_be_bytes([info[0].1[10], info[0].1[11]]) & 1 << 12, 0);
    client.send(b"IHAVEOPT\0\0\0\x01\0\0\0\0");
    assert!(client.server.join().unwrap().unwrap_err().contains("EXPORT_NAME"));
}

#[test]
fn every_command_with_extended_headers() {
    let mut client = Client::choose(memory_disk());
    let end = DISK_BYTES as u64;
    let offset = |at: u64| at.to_be_bytes().to_vec();
    assert_eq!(client.call((0, 0), 512, 2, &[]), (1, [offset(512), vec![1, 1]].concat()));
    assert_eq!(client.call((0, DF), 1023, 2, &[]), (1, [offset(1023), vec![1, 2]].concat()));
    assert_eq!(client.call((0, 0), 0, 0, &[]), DONE);
    assert_eq!(client.call((1, PAYLOAD_LEN | FUA), 4096, 4, b"abcd"), DONE);
    assert_eq!(client.call((0, 0), 4096, 4, &[]), (1, [&offset(4096)[..], b"abcd"].concat()));
    assert_eq!(client.call((3, 0), 0, 0, &[]), DONE);
    assert_eq!(client.call((4, FUA), 8192, 4096, &[]), DONE);
    assert_eq!(client.call((5, 0), 0, end, &[]), DONE);
    assert_eq!(client.call((6, NO_HOLE), 100, 5000, &[]), DONE);
    assert_eq!(client.call((0, 0), 100, 3, &[]), (1, [offset(100), vec![0; 3]].concat()));
    // Status: context, count, then lengths and states of 64 bits.
    let whole = [&[0, 0, 0, 1, 0, 0, 0, 1][..], &offset(end), &offset(0)].concat();
    assert_eq!(client.call((7, 0), 0, end, &[]), (6, whole.clone()));
    let filter = |ids: &[u32]| {
        let ids = ids.iter().flat_map(|id| id.to_be_bytes());
        offset(end).into_iter().chain(ids).collect::<Vec<u8>>()
    };
    let mut status =
        |payload: &[u8]| client.call((7, PAYLOAD_LEN), 0, payload.len() as u64, payload);
    assert_eq!(status(&filter(&[1])), (6, whole));
    for wrong in [&filter(&[])[..], &filter(&[2]), &filter(&[1, 1]), b"x", &[0; 5000]] {
        assert_eq!(status(wrong), error(EINVAL), "{wrong:?}");
    }
    // A write without its flag has no payload; others have none at all. It is skipped.
    assert_eq!(client.call((1, 0), 0, 512, &[]), error(EINVAL));
    for command in [0, 3, 4, 5, 6, 99] {
        assert_eq!(client.call((command, PAYLOAD_LEN), 0, 3, b"abc"), error(EINVAL), "{command}");
    }
    for command in [0, 4, 5, 7] {
        for len in [end + 1, 1 << 33, u64::MAX] {
            assert_eq!(client.call((command, 0), 0, len, &[]), error(EINVAL));
        }
    }
    assert_eq!(client.call((6, 0), 1, u64::MAX, &[]), error(ENOSPC));
    assert_eq!(client.call((1, PAYLOAD_LEN), end, 1, b"x"), error(ENOSPC));
    assert_eq!(client.leave(), Ok(()));
}

/// A disk of 1 TiB that is one hole.
struct Huge(MemoryDisk);

impl draconis_device::ForwardingDisk for Huge {
    type Inner = MemoryDisk;

    fn inner_disk(&self) -> &MemoryDisk {
        &self.0
    }

    fn properties(&self) -> Properties {
        Properties { len_bytes: 1 << 40, ..Disk::properties(&self.0) }
    }

    fn allocation_run(
        &self,
        at: draconis_device::Extent,
    ) -> Result<draconis_device::AllocationRun, draconis_device::Error> {
        Ok(draconis_device::AllocationRun { len_bytes: at.len_bytes, is_hole: true })
    }
}

#[test]
fn longest_payload_after_a_small_write_closes_the_connection() {
    for len in [u64::MAX, u64::MAX - 31, 1 << 63, (1 << 26) + 1] {
        let mut client = Client::choose(memory_disk());
        let small = encode_request(1, PAYLOAD_LEN, 4096, 4);
        let longest = encode_request(1, PAYLOAD_LEN, 0, len);
        client.send(&[&small[..], b"abcd", &small, b"efgh", &longest, &[7; 100]].concat());
        for _ in 0..2 {
            assert_eq!(client.chunk(), (1, 0, 4096, vec![]), "{len}");
        }
        let error = client.server.join().unwrap().unwrap_err();
        assert!(error.contains("a payload that is too long"), "{len}: {error}");
    }
}

#[test]
fn lengths_have_64_bits() {
    let mut client = Client::choose(Huge(memory_disk()));
    let all = 1_u64 << 40;
    assert_eq!(client.call((6, 0), 0, all, &[]), DONE, "zeros of a hole");
    let status = [&[0, 0, 0, 1, 0, 0, 0, 1][..], &all.to_be_bytes(), &3_u64.to_be_bytes()].concat();
    assert_eq!(client.call((7, 0), 0, all, &[]), (6, status));
    let at = all - (1 << 30);
    let hole = [&at.to_be_bytes()[..], &(1_u32 << 20).to_be_bytes()].concat();
    assert_eq!(client.call((0, 0), at, 1 << 20, &[]), (2, hole));
    assert_eq!(client.leave(), Ok(()));
}

#[test]
fn wrong_headers_close_the_connection() {
    let mut client = Client::choose(memory_disk());
    client.send(&[0x25, 0x60, 0x95, 0x13]);
    client.send(&[0; 28]);
    assert!(client.server.join().unwrap().unwrap_err().contains("magic"));
    let mut client = Client::choose(memory_disk());
    client.request(1, PAYLOAD_LEN, 0, (32 << 20) + 1, &[]);
    assert!(client.server.join().unwrap().unwrap_err().contains("too long"));
}

/// Half-right requests: no panic and no endless loop, and replies that can be divided.
#[test]
fn random_requests_are_survived() {
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let mut bytes = b"\0\0\0\x03IHAVEOPT\0\0\0\x0b\0\0\0\0\
            IHAVEOPT\0\0\0\x0a\0\0\0\x1b\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation\
            IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0"
            .to_vec();
        for _ in 0..random.next_below(40) {
            bytes.extend([0x21, 0xe4, 0x1c, 0x71]);
            bytes.extend((random.next_below(64) as u16).to_be_bytes());
            bytes.extend((random.next_below(9) as u16).to_be_bytes());
            bytes.extend(random.next_u64().to_be_bytes());
            for _ in 0..2 {
                let bits = 40 + random.next_below(24);
                bytes.extend((random.next_u64() >> bits).to_be_bytes());
            }
            bytes.extend((0..random.next_below(2000)).map(|_| 0));
        }
        bytes.truncate(bytes.len() - random.next_below(bytes.len() as u64 / 4) as usize);
        let exports = [Export::new(String::new(), String::new(), Arc::new(memory_disk()))];
        let mut output = vec![];
        let mut connection = Connection::new(&bytes[..], &mut output);
        if let Ok(Some(session)) = connection.negotiate(&exports) {
            let _ = connection.transmit(&session);
        }
    }
}
