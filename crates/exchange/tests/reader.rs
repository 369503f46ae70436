//! Tests of the caching reader: it reads what a message would return, with fewer messages, over
//! both transports.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{PATIENCE, soon, transport::expect_all_home};
use draconis_exchange::channel::session::{self, SessionConfig};
use draconis_exchange::channel::{self, ChangeNotifier, ChannelError, Client, Server};
use draconis_exchange::contract::file::{
    self, CHUNK_BYTES, CachingReader, File, FileServer, GetAttributes, ReadError,
};
use draconis_exchange::contract::{Attributes, Refusal};
use draconis_exchange::heap::{Block, arena::Class};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

#[test]
fn child_entry() {
    common::transport::play_if_child();
}

const CHUNK: u64 = CHUNK_BYTES as u64;
/// Available blocks of chunk size.
const SLOTS: u32 = 6;

/// One file, which changes under a lock and notifies before the lock is released.
#[derive(Default)]
struct Content {
    bytes: Mutex<Vec<u8>>,
    teller: Mutex<Option<ChangeNotifier>>,
    /// Number of read messages.
    reads: AtomicUsize,
    asked: AtomicUsize,
    /// Offset from which reads are refused.
    bad_from: Mutex<Option<u64>>,
}

impl Content {
    fn new(len: usize) -> Arc<Self> {
        let bytes = (0..len).map(|at| (at / 7 + at / 4096) as u8).collect::<Vec<_>>();
        Arc::new(Self { bytes: bytes.into(), ..Self::default() })
    }

    fn change(&self, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = self.bytes.lock().unwrap();
        change(&mut bytes);
        if let Some(teller) = &*self.teller.lock().unwrap() {
            teller.notify_change();
        }
    }

    /// Returns messages and requested bytes since the last call.
    fn messages(&self) -> (usize, usize) {
        (self.reads.swap(0, SeqCst), self.asked.swap(0, SeqCst))
    }
}

impl FileServer for Content {
    fn read(&self, request: &mut file::Read) -> Result<u32, Refusal> {
        self.reads.fetch_add(1, SeqCst);
        self.asked.fetch_add(request.len as usize, SeqCst);
        if self
            .bad_from
            .lock()
            .unwrap()
            .is_some_and(|bad| request.offset + u64::from(request.len) > bad)
        {
            return Err(Refusal::Io);
        }
        let bytes = self.bytes.lock().unwrap();
        let from = bytes.get(request.offset as usize..).unwrap_or_default();
        let from = &from[..from.len().min(request.len as usize)];
        Ok(request.buffer.copy_in(request.buffer_offset as usize, from) as u32)
    }

    fn get_attributes(&self, _: &mut GetAttributes) -> Result<Attributes, Refusal> {
        Err(Refusal::NotSupported)
    }
}

type Blocks = Box<dyn Fn(usize) -> Option<Block> + Send>;

/// Runs `test` over each transport, with a reader that caches so many chunks; if `tells`, the
/// server has a change notifier.
fn with_reader(
    content: &Arc<Content>,
    chunks: usize,
    tells: bool,
    test: impl Fn(&mut CachingReader),
) {
    let serve = |client: Client<File>, server: Server<File>, blocks: Blocks| {
        *content.teller.lock().unwrap() = tells.then(|| server.change_notifier());
        content.messages();
        let served = content.clone();
        let peer = std::thread::spawn(move || file::serve(server, &*served, PATIENCE));
        test(&mut CachingReader::new(client, PATIENCE, chunks, blocks));
        peer.join().unwrap().unwrap();
        assert!(
            content.teller.lock().unwrap().iter().all(|teller| !teller.notify_change()),
            "it is closed"
        );
    };
    let (client, server) = channel::pair::<File>();
    serve(client, server, Box::new(|len| Some(Block::unallocated(len))));

    let class = |slot_bytes, slots| Class { slot_bytes, slots };
    let host = vec![class(16 << 10, 1), class(CHUNK_BYTES, SLOTS)];
    let plan =
        SessionConfig { static_lanes: 1, host_lanes: 0, guest_lanes: 0, host, guest: vec![] };
    let (offer, socket) = session::offer(&plan).unwrap();
    let host = offer.start(pidfd_open(getpid(), PidfdFlags::empty()).unwrap());
    let guest = session::accept(&socket, soon()).unwrap();
    let blocks = host.clone();
    let ends = (host.client::<File>(0).unwrap(), guest.server::<File>(0).unwrap());
    serve(ends.0, ends.1, Box::new(move |len| blocks.block(len)));
    expect_all_home(&host);
}

#[track_caller]
fn expect(reader: &mut CachingReader, content: &Content, offset: u64, len: usize) {
    let mut into = vec![0xaa; len];
    let read = reader.read(offset, &mut into).unwrap();
    let bytes = content.bytes.lock().unwrap();
    let there = bytes.get(offset as usize..).unwrap_or_default();
    assert_eq!(read, there.len().min(len));
    assert!(into[..read] == there[..read], "{len} bytes at {offset}");
    assert!(into[read..].iter().all(|byte| *byte == 0xaa));
}

#[test]
fn what_was_read_is_read_again_without_a_message() {
    let content = Content::new(3 * CHUNK as usize + 1000);
    with_reader(&content, 4, true, |reader| {
        for offset in (0..4 * CHUNK).step_by(16 << 10) {
            expect(reader, &content, offset, 16 << 10);
        }
        assert_eq!(content.messages().0, 4, "one for each chunk, the last one short");
        for (offset, len) in [(0, 1), (CHUNK - 3, 7), (5, 3 * CHUNK as usize), (3 * CHUNK, 4096)] {
            expect(reader, &content, offset, len);
        }
        for offset in [3 * CHUNK + 1000, 3 * CHUNK + 5000, 0] {
            expect(reader, &content, offset, 0);
            expect(reader, &content, offset, 9);
        }
        assert_eq!(content.messages(), (0, 0));
        // Past the end of any file, and an offset that none can have.
        expect(reader, &content, 9 * CHUNK, 10);
        assert_eq!(reader.read(u64::MAX, &mut [0; 9]), Ok(0));
        assert_eq!(reader.read(u64::MAX - 3 * CHUNK, &mut [0; 9]), Ok(0));
    });
}

#[test]
fn a_file_of_whole_chunks_that_fits_is_kept_as_a_whole() {
    let content = Content::new(4 * CHUNK as usize);
    with_reader(&content, 4, true, |reader| {
        let pass = |reader: &mut CachingReader| {
            (0..4).for_each(|nth| expect(reader, &content, nth * CHUNK, CHUNK as usize));
        };
        pass(reader);
        // Detecting the end takes a request, which evicts the first chunk.
        pass(reader);
        assert_eq!(content.messages().0, 4 + 1 + 1);
        pass(reader);
        assert_eq!(content.messages(), (0, 0));
    });
}

#[test]
fn what_has_changed_is_asked_for_again() {
    let content = Content::new(2 * CHUNK as usize);
    with_reader(&content, 4, true, |reader| {
        for round in 0..50u64 {
            let at = (round * 7919 % (2 * CHUNK - 10)) as usize;
            expect(reader, &content, at as u64, 10);
            content.change(|bytes| bytes[at + 3] ^= 0x5a);
            expect(reader, &content, at as u64, 10);
        }
        let (messages, _) = content.messages();
        assert!((50..=200).contains(&messages), "{messages}");
        content.change(|bytes| bytes.truncate(5));
        expect(reader, &content, 0, 100);
        content.change(|bytes| bytes.resize(CHUNK as usize + 77, 9));
        expect(reader, &content, 0, 2 * CHUNK as usize);
        content.change(|bytes| bytes.clear());
        expect(reader, &content, 0, 100);
        content.change(|bytes| {
            *bytes = Content::new(2 * CHUNK as usize).bytes.lock().unwrap().clone()
        });
    });
}

#[test]
fn of_a_server_that_does_not_tell_nothing_is_kept() {
    let content = Content::new(CHUNK as usize);
    for (tells, chunks) in [(false, 4), (true, 0)] {
        with_reader(&content, chunks, tells, |reader| {
            for _ in 0..3 {
                expect(reader, &content, 8192, 4096);
            }
            assert_eq!(content.messages(), (3, 3 * 4096));
        });
    }
}

#[test]
fn little_is_asked_for_by_one_who_comes_once_and_more_by_one_who_stays() {
    let content = Content::new(4 * CHUNK as usize);
    with_reader(&content, 4, true, |reader| {
        expect(reader, &content, CHUNK + 20_000, 100);
        assert_eq!(content.messages(), (1, 16 << 10));
        expect(reader, &content, CHUNK + 90_000, 100);
        assert_eq!(content.messages(), (1, CHUNK as usize));
        expect(reader, &content, CHUNK + 40_000, 50_000);
        assert_eq!(content.messages(), (0, 0));
    });
}

#[test]
fn fewer_blocks_than_were_to_be_kept_are_enough() {
    let content = Content::new(3 * SLOTS as usize * CHUNK as usize);
    with_reader(&content, 100, true, |reader| {
        for round in 0..2 {
            for offset in (0..3 * u64::from(SLOTS) * CHUNK).step_by(3 << 14) {
                expect(reader, &content, offset, 3 << 14);
            }
            // Between threads blocks are unlimited.
            assert!(content.messages().0 > 0 || round > 0);
        }
    });
}

#[test]
fn a_refusal_is_told_where_it_belongs_and_ends_nothing() {
    let content = Content::new(3 * CHUNK as usize);
    *content.bad_from.lock().unwrap() = Some(CHUNK);
    with_reader(&content, 4, true, |reader| {
        // The next chunk is prefetched.
        expect(reader, &content, 0, CHUNK as usize);
        expect(reader, &content, CHUNK - 4096, 4096);
        assert_eq!(reader.read(CHUNK, &mut [0; 9]), Err(ReadError::Refused(Refusal::Io)));
        assert_eq!(reader.read(CHUNK - 4, &mut [0; 9]), Err(ReadError::Refused(Refusal::Io)));
        expect(reader, &content, CHUNK - 4, 4);
    });
}

#[test]
fn readers_beside_one_who_changes_see_whole_states_that_grow() {
    // All bytes of a state are its number.
    let content = Content::new(0);
    content.change(|bytes| bytes.resize(2 * CHUNK as usize, 0));
    with_reader(&content, 4, true, |reader| {
        content.change(|bytes| bytes.fill(0));
        std::thread::scope(|scope| {
            let changes = scope.spawn(|| {
                for state in 1..=60 {
                    content.change(|bytes| bytes.fill(state));
                    std::thread::sleep(Duration::from_micros(200));
                }
            });
            let (mut last, mut into) = (0, vec![0; 8192]);
            while !changes.is_finished() {
                assert_eq!(reader.read(4096, &mut into), Ok(into.len()));
                assert!(into.iter().all(|byte| *byte == into[0]), "a torn state");
                assert!(into[0] >= last, "{} after {last}", into[0]);
                last = into[0];
            }
        });
        expect(reader, &content, 0, 2 * CHUNK as usize);
    });
}

#[test]
fn a_server_that_has_gone_is_told_of() {
    let (client, server) = channel::pair::<File>();
    let _ = server.change_notifier();
    let mut reader = CachingReader::new(client, PATIENCE, 4, |len| Some(Block::unallocated(len)));
    drop(server);
    for _ in 0..2 {
        assert_eq!(reader.read(0, &mut [0; 9]), Err(ReadError::Lost(ChannelError::Closed)));
    }
}
