//! Tests of the caching reader: it reads what a message would return, with fewer messages, over
//! both transports.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{TEST_TIMEOUT, test_deadline, transport::assert_all_blocks_returned};
use draconis_exchange::channel::session::{self, SessionConfig};
use draconis_exchange::channel::{self, ChangeNotifier, ChannelError, Client, Server};
use draconis_exchange::contract::file::{
    self, CHUNK_BYTES, CachingReader, File, FileServer, GetAttributes, ReadError,
};
use draconis_exchange::heap::arena::SlotClass;
use draconis_types::Block;
use draconis_types::{Attributes, Refusal};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

const CHUNK_LEN: u64 = CHUNK_BYTES as u64;
/// Available blocks of chunk size.
const CHUNK_SLOTS: u32 = 6;

/// One file, which changes under a lock and notifies before the lock is released.
#[derive(Default)]
struct ChangingFile {
    bytes: Mutex<Vec<u8>>,
    teller: Mutex<Option<ChangeNotifier>>,
    /// Number of read messages.
    reads: AtomicUsize,
    asked: AtomicUsize,
    /// Offset from which reads are refused.
    bad_from: Mutex<Option<u64>>,
}

impl ChangingFile {
    fn new(len: usize) -> Arc<Self> {
        let bytes = (0..len).map(|at| (at / 7 + at / 4096) as u8).collect::<Vec<_>>();
        Arc::new(Self { bytes: bytes.into(), ..Self::default() })
    }

    fn change_bytes(&self, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = self.bytes.lock().unwrap();
        change(&mut bytes);
        if let Some(teller) = &*self.teller.lock().unwrap() {
            teller.notify_change();
        }
    }

    /// Returns messages and requested bytes since the last call.
    fn take_message_counts(&self) -> (usize, usize) {
        (self.reads.swap(0, SeqCst), self.asked.swap(0, SeqCst))
    }
}

impl FileServer for ChangingFile {
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

type BlockAllocator = Box<dyn Fn(usize) -> Option<Block> + Send>;

/// Runs `test` over each transport, with a reader that caches so many chunks; if `tells`, the
/// server has a change notifier.
fn with_reader(
    content: &Arc<ChangingFile>,
    chunks: usize,
    tells: bool,
    test: impl Fn(&mut CachingReader),
) {
    let serve = |client: Client<File>, server: Server<File>, blocks: BlockAllocator| {
        *content.teller.lock().unwrap() = tells.then(|| server.change_notifier());
        content.take_message_counts();
        let served = content.clone();
        let answer = move |message| file::answer(&*served, message);
        let peer = std::thread::spawn(move || server.serve(TEST_TIMEOUT, answer));
        test(&mut CachingReader::new(client, TEST_TIMEOUT, chunks, blocks));
        peer.join().unwrap().unwrap();
        assert!(
            content.teller.lock().unwrap().iter().all(|teller| !teller.notify_change()),
            "it is closed"
        );
    };
    let (client, server) = channel::pair::<File>();
    serve(client, server, Box::new(|len| Some(Block::unallocated(len))));

    let class = |slot_bytes, slots| SlotClass { slot_bytes, slots };
    let host = vec![class(16 << 10, 1), class(CHUNK_BYTES, CHUNK_SLOTS)];
    let plan = SessionConfig { lanes: 1, host, guest: vec![] };
    let (offer, socket) = session::offer(&plan).unwrap();
    let host = offer.start(pidfd_open(getpid(), PidfdFlags::empty()).unwrap());
    let guest = session::accept(&socket, test_deadline()).unwrap();
    let blocks = host.clone();
    let ends = (host.client::<File>(0).unwrap(), guest.server::<File>(0).unwrap());
    serve(ends.0, ends.1, Box::new(move |len| blocks.allocate_block(len)));
    assert_all_blocks_returned(&host);
}

#[track_caller]
fn assert_read(reader: &mut CachingReader, content: &ChangingFile, offset: u64, len: usize) {
    let mut into = vec![0xaa; len];
    let read = reader.read(offset, &mut into).unwrap();
    let bytes = content.bytes.lock().unwrap();
    let there = bytes.get(offset as usize..).unwrap_or_default();
    assert_eq!(read, there.len().min(len));
    assert!(into[..read] == there[..read], "{len} bytes at {offset}");
    assert!(into[read..].iter().all(|byte| *byte == 0xaa));
}

#[test]
fn cached_chunks_are_read_without_messages() {
    let content = ChangingFile::new(3 * CHUNK_LEN as usize + 1000);
    with_reader(&content, 4, true, |reader| {
        for offset in (0..4 * CHUNK_LEN).step_by(16 << 10) {
            assert_read(reader, &content, offset, 16 << 10);
        }
        assert_eq!(content.take_message_counts().0, 4, "one for each chunk, the last one short");
        for (offset, len) in
            [(0, 1), (CHUNK_LEN - 3, 7), (5, 3 * CHUNK_LEN as usize), (3 * CHUNK_LEN, 4096)]
        {
            assert_read(reader, &content, offset, len);
        }
        for offset in [3 * CHUNK_LEN + 1000, 3 * CHUNK_LEN + 5000, 0] {
            assert_read(reader, &content, offset, 0);
            assert_read(reader, &content, offset, 9);
        }
        assert_eq!(content.take_message_counts(), (0, 0));
        // Past the end of any file, and an offset that none can have.
        assert_read(reader, &content, 9 * CHUNK_LEN, 10);
        assert_eq!(reader.read(u64::MAX, &mut [0; 9]), Ok(0));
        assert_eq!(reader.read(u64::MAX - 3 * CHUNK_LEN, &mut [0; 9]), Ok(0));
    });
}

#[test]
fn file_of_whole_chunks_is_cached_entirely() {
    let content = ChangingFile::new(4 * CHUNK_LEN as usize);
    with_reader(&content, 4, true, |reader| {
        let pass = |reader: &mut CachingReader| {
            (0..4)
                .for_each(|nth| assert_read(reader, &content, nth * CHUNK_LEN, CHUNK_LEN as usize));
        };
        pass(reader);
        // Detecting the end takes a request, which evicts the first chunk.
        pass(reader);
        assert_eq!(content.take_message_counts().0, 4 + 1 + 1);
        pass(reader);
        assert_eq!(content.take_message_counts(), (0, 0));
    });
}

#[test]
fn changed_chunks_are_read_again() {
    let content = ChangingFile::new(2 * CHUNK_LEN as usize);
    with_reader(&content, 4, true, |reader| {
        for round in 0..50u64 {
            let at = (round * 7919 % (2 * CHUNK_LEN - 10)) as usize;
            assert_read(reader, &content, at as u64, 10);
            content.change_bytes(|bytes| bytes[at + 3] ^= 0x5a);
            assert_read(reader, &content, at as u64, 10);
        }
        let (messages, _) = content.take_message_counts();
        assert!((50..=200).contains(&messages), "{messages}");
        content.change_bytes(|bytes| bytes.truncate(5));
        assert_read(reader, &content, 0, 100);
        content.change_bytes(|bytes| bytes.resize(CHUNK_LEN as usize + 77, 9));
        assert_read(reader, &content, 0, 2 * CHUNK_LEN as usize);
        content.change_bytes(|bytes| bytes.clear());
        assert_read(reader, &content, 0, 100);
        content.change_bytes(|bytes| {
            *bytes = ChangingFile::new(2 * CHUNK_LEN as usize).bytes.lock().unwrap().clone()
        });
    });
}

#[test]
fn nothing_is_cached_without_change_notifier() {
    let content = ChangingFile::new(CHUNK_LEN as usize);
    for (tells, chunks) in [(false, 4), (true, 0)] {
        with_reader(&content, chunks, tells, |reader| {
            for _ in 0..3 {
                assert_read(reader, &content, 8192, 4096);
            }
            assert_eq!(content.take_message_counts(), (3, 3 * 4096));
        });
    }
}

#[test]
fn random_read_fetches_less_than_chunk() {
    let content = ChangingFile::new(4 * CHUNK_LEN as usize);
    with_reader(&content, 4, true, |reader| {
        assert_read(reader, &content, CHUNK_LEN + 20_000, 100);
        assert_eq!(content.take_message_counts(), (1, 16 << 10));
        assert_read(reader, &content, CHUNK_LEN + 90_000, 100);
        assert_eq!(content.take_message_counts(), (1, CHUNK_LEN as usize));
        assert_read(reader, &content, CHUNK_LEN + 40_000, 50_000);
        assert_eq!(content.take_message_counts(), (0, 0));
    });
}

#[test]
fn reader_works_with_fewer_blocks_than_cache_slots() {
    let content = ChangingFile::new(3 * CHUNK_SLOTS as usize * CHUNK_LEN as usize);
    with_reader(&content, 100, true, |reader| {
        for round in 0..2 {
            for offset in (0..3 * u64::from(CHUNK_SLOTS) * CHUNK_LEN).step_by(3 << 14) {
                assert_read(reader, &content, offset, 3 << 14);
            }
            // Between threads blocks are unlimited.
            assert!(content.take_message_counts().0 > 0 || round > 0);
        }
    });
}

#[test]
fn refused_prefetch_is_reported_at_its_offset() {
    let content = ChangingFile::new(3 * CHUNK_LEN as usize);
    *content.bad_from.lock().unwrap() = Some(CHUNK_LEN);
    with_reader(&content, 4, true, |reader| {
        // The next chunk is prefetched.
        assert_read(reader, &content, 0, CHUNK_LEN as usize);
        assert_read(reader, &content, CHUNK_LEN - 4096, 4096);
        assert_eq!(reader.read(CHUNK_LEN, &mut [0; 9]), Err(ReadError::Refused(Refusal::Io)));
        assert_eq!(reader.read(CHUNK_LEN - 4, &mut [0; 9]), Err(ReadError::Refused(Refusal::Io)));
        assert_read(reader, &content, CHUNK_LEN - 4, 4);
    });
}

#[test]
fn reads_during_changes_are_not_torn() {
    // All bytes of a state are its number.
    let content = ChangingFile::new(0);
    content.change_bytes(|bytes| bytes.resize(2 * CHUNK_LEN as usize, 0));
    with_reader(&content, 4, true, |reader| {
        content.change_bytes(|bytes| bytes.fill(0));
        std::thread::scope(|scope| {
            let changes = scope.spawn(|| {
                for state in 1..=60 {
                    content.change_bytes(|bytes| bytes.fill(state));
                    draconis_testkit::wait::pause(
                        "contents change during reads",
                        Duration::from_micros(200),
                    );
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
        assert_read(reader, &content, 0, 2 * CHUNK_LEN as usize);
    });
}

#[test]
fn read_after_server_close_returns_closed() {
    let (client, server) = channel::pair::<File>();
    let _ = server.change_notifier();
    let mut reader =
        CachingReader::new(client, TEST_TIMEOUT, 4, |len| Some(Block::unallocated(len)));
    drop(server);
    for _ in 0..2 {
        assert_eq!(reader.read(0, &mut [0; 9]), Err(ReadError::Lost(ChannelError::Closed)));
    }
}
