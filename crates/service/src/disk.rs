//! The disk of a worker: the worker reads by itself and writes through the keeper.
//!
//! ```text
//!   worker: ext ─┬─ read ──────────────▶ its own descriptor, read-only
//!                └─ submit, wait ══════▶ disk service in the keeper, the only one to write
//! ```
//!
//! Law: a message of the worker arrives whole or not at all. So a worker's death cannot fall
//! between two writes of a group.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use draconis_device::{
    Disk, Error, Extent, FileDisk, FileOptions, OpenedFile, Pending, Properties, ReadAnswer,
    Refused, RemoteDisk, Urgency, serve_remote_disk,
};
use draconis_exchange::channel::session::{Session, SessionConfig};
use draconis_exchange::contract::disk;
use draconis_exchange::heap::PagePool;
use draconis_exchange::heap::arena::SlotClass;
use draconis_types::Block;
use rustix::io::Errno;

use crate::accepted_mark::AcceptedMarkDisk;

/// Lanes of the disk contract: one for submitting, the others for waiting callers.
pub(crate) const DISK_LANES: u32 = 6;
/// Peer timeout of both sides: none, since a disk may take arbitrarily long. A death is noticed at
/// once.
const NO_TIMEOUT: Duration = Duration::MAX;

/// Appends the lanes of a writing worker's disk to the plan of its session.
pub(crate) fn add_disk_lanes(plan: &mut SessionConfig) {
    plan.lanes += DISK_LANES;
    plan.guest = vec![
        SlotClass { slot_bytes: 4 << 10, slots: 128 },
        SlotClass { slot_bytes: 64 << 10, slots: 16 },
        SlotClass { slot_bytes: 256 << 10, slots: 8 },
    ];
}

/// Returns the plan of a session for one disk alone.
pub(crate) fn disk_session() -> SessionConfig {
    let host = vec![SlotClass { slot_bytes: 4096, slots: 1 }];
    let mut plan = SessionConfig { lanes: 0, host, guest: vec![] };
    add_disk_lanes(&mut plan);
    plan
}

/// Serves the file behind `fd`, open for writing, to the worker of `session` on the lanes from
/// `first` on, until the worker closes or dies. Passes discards on to the file only if `discards`
/// is set.
///
/// # Errors
/// The system's error for the descriptor, or if no thread can be created.
pub(crate) fn serve_disk(
    fd: OwnedFd,
    session: &Arc<Session>,
    first: u32,
    discards: bool,
) -> std::io::Result<DiskService> {
    let how = FileOptions { write: true, direct: true, uring: true };
    let file = OpenedFile::new(fd, how)?;
    // Images that allocate clusters make their files grow.
    let grows = draconis_container::is_growing_format(&file.read_file_head()?);
    let file = if grows { file.with_growth()? } else { file };
    let file = Arc::new(if discards { file.with_discards() } else { file }.start());
    let (served, last) = (Arc::downgrade(&file), Arc::new(OnceLock::new()));
    let (told, accepted_mark) = (last.clone(), Arc::new(AtomicU64::new(0)));
    let marking = accepted_mark.clone();
    let lanes = first..first + DISK_LANES;
    let ends: Vec<_> = lanes.filter_map(|lane| session.server::<disk::Disk>(lane)).collect();
    let thread = std::thread::Builder::new().name("disk".into()).spawn(move || {
        let disk = AcceptedMarkDisk::new(file.clone(), marking);
        if let Err(lost) = serve_remote_disk(&disk, ends, NO_TIMEOUT) {
            log::debug!("a worker's disk was closed: {lost}");
        }
        drop(disk);
        if let Some(failure) = file.write_failure() {
            // Set once, here.
            let _ = told.set(failure);
        }
        // Dropping the file writes all completely accepted groups and releases the claim.
    })?;
    Ok(DiskService { thread, served, write_error: last, accepted_mark })
}

/// The service of a worker's disk, which ends with the worker.
pub(crate) struct DiskService {
    thread: JoinHandle<()>,
    /// Only the thread owns the disk, so that the disk is closed once the thread has ended.
    served: Weak<FileDisk>,
    /// The error that had ended all writing when the thread ended.
    write_error: Arc<OnceLock<Error>>,
    /// Mark of the last accepted chain, chosen by the worker.
    accepted_mark: Arc<AtomicU64>,
}

impl DiskService {
    /// Returns the error that ended all writing, if any, with the next step for the user.
    pub(crate) fn failure(&self) -> Option<String> {
        let failure = match self.served.upgrade() {
            Some(disk) => disk.write_failure(),
            None => self.write_error.get().cloned(),
        };
        let why = match failure? {
            Error::Io { errno: Errno::NOSPC, .. } => {
                "the file system that holds the image is full: free some space there, then \
                 unmount and mount again"
            }
            Error::Io { errno: Errno::DQUOT, .. } => {
                "the quota of the file system that holds the image is used up: raise it or free \
                 some space there, then unmount and mount again"
            }
            other => return Some(other.to_string()),
        };
        Some(why.into())
    }

    /// Waits until the service has ended; returns the mark of the last accepted chain.
    pub(crate) fn join(self) -> u64 {
        // A thread that panicked has logged that.
        let _ = self.thread.join();
        self.accepted_mark.load(Ordering::Acquire)
    }
}

/// Returns the disk as the worker of `session` uses it. The service has the page pool `rooms`
/// mapped.
///
/// # Errors
/// If the service does not answer, or there is none.
pub(crate) fn split_disk(
    reads: FileDisk,
    session: &Arc<Session>,
    first: u32,
    rooms: &Arc<PagePool>,
) -> Result<SplitDisk, Error> {
    let lanes = first..first + DISK_LANES;
    let ends: Vec<_> = lanes.filter_map(|lane| session.client::<disk::Disk>(lane)).collect();
    if ends.is_empty() {
        return Err(Error::ServiceEnded);
    }
    let blocks = session.clone();
    let writes =
        RemoteDisk::new(ends, Some(Box::new(move |len| blocks.allocate_block(len))), NO_TIMEOUT)?;
    let writes = writes.with_shared_memory(rooms.clone());
    Ok(SplitDisk { reads, writes })
}

/// Reads from one disk and writes to another that is the same device.
pub(crate) struct SplitDisk {
    reads: FileDisk,
    writes: RemoteDisk,
}

impl draconis_device::ForwardingDisk for SplitDisk {
    type Inner = RemoteDisk;

    fn inner_disk(&self) -> &RemoteDisk {
        &self.writes
    }

    fn properties(&self) -> Properties {
        let Properties { read_only, atomic, discards, .. } = self.inner_disk().properties();
        Properties { read_only, atomic, discards, ..self.reads.properties() }
    }

    fn max_len_bytes(&self) -> u64 {
        // Only `writes` knows the maximum; it reports that as its length.
        self.inner_disk().properties().len_bytes.max(self.reads.properties().len_bytes)
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        let bounds = Properties { len_bytes: Disk::max_len_bytes(self), ..self.reads.properties() };
        if let Err(error) = bounds.check_range(at, into.len()) {
            return Pending::ready(Err(Refused { payload: Some(into), error }));
        }
        self.reads.read(at, into, urgency)
    }
}

/// Returns the worker's side of a disk that [`StoreProcess::attach`](crate::store_process::StoreProcess::attach) attached. If the process dies,
/// every request fails with [`draconis_device::Error::ServiceEnded`].
///
/// # Errors
/// If the process does not answer.
pub fn open_session_disk(session: &Arc<Session>) -> Result<RemoteDisk, draconis_device::Error> {
    let ends: Vec<_> =
        (0..DISK_LANES).filter_map(|lane| session.client::<disk::Disk>(lane)).collect();
    if ends.is_empty() {
        return Err(draconis_device::Error::ServiceEnded);
    }
    let blocks = session.clone();
    let disk =
        RemoteDisk::new(ends, Some(Box::new(move |len| blocks.allocate_block(len))), NO_TIMEOUT)?;
    Ok(disk.with_outages())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::path::Path;

    use draconis_device::{Group, Write};
    use draconis_exchange::channel::session::{accept, offer};
    use draconis_exchange::contract::{Contract, Violation};
    use draconis_exchange::descriptors;
    use draconis_exchange::shm::SharedMemory;
    use draconis_types::SharedSlice;
    use rustix::net::RecvFlags;
    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    use super::*;

    fn group_of_writes(writes: &[(u64, usize, u8)]) -> Group {
        let write = |&(at_bytes, len, byte): &(u64, usize, u8)| {
            let mut block = Block::private(len);
            block.copy_in(0, &vec![byte; len]);
            Write { at_bytes, block }
        };
        Group { writes: writes.iter().map(write).collect() }
    }

    /// Returns the service of the disk in `file`, its session, the socket for the worker, and the
    /// page pool. Both endpoints of the session are in this process: each is the other's peer.
    fn serve_file_to_worker(
        file: &Path,
    ) -> (DiskService, Arc<Session>, OwnedFd, Arc<SharedMemory>) {
        let writable = File::options().read(true).write(true).open(file).unwrap();
        let mut all = disk_session();
        all.lanes += 1;
        let (offer, socket) = offer(&all).unwrap();
        let host = offer.start(pidfd_open(getpid(), PidfdFlags::empty()).unwrap());
        let memory = crate::oplog::create_memory().unwrap();
        host.register_pool(memory.clone());
        (serve_disk(writable.into(), &host, 1, false).unwrap(), host, socket, memory)
    }

    #[test]
    fn worker_and_keeper_see_each_others_writes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8 << 20).unwrap();
        let (service, _host, socket, memory) = serve_file_to_worker(file.path());
        let guest = accept(&socket, draconis_testkit::wait::hang_deadline()).unwrap();
        let how = FileOptions { write: false, direct: true, uring: false };
        let reads = FileDisk::open(file.path(), how).unwrap();
        let theirs =
            crate::oplog::map_existing(memory.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let log = crate::oplog::OpLog::new(theirs, 1).unwrap();
        guest.register_pool(log.memory().clone());
        let disk = split_disk(reads, &guest, 1, log.buffer_pool()).unwrap();
        assert!(!disk.properties().read_only && disk.properties().len_bytes == 8 << 20);
        let chain = vec![
            group_of_writes(&[(0, 4096, 1), (8192, 512, 2)]),
            group_of_writes(&[(1 << 20, 3 << 20, 3), (512, 512, 4)]),
        ];
        let tickets = disk.submit_chain(chain, &[]).unwrap();
        disk.wait_visible(tickets[0]).unwrap();
        disk.wait_durable(tickets[1]).unwrap();
        let byte = |at: u64| {
            let extent = Extent::new(at & !511, 512);
            let block = disk.read_now(extent, Block::private(512)).unwrap();
            block.bytes().unwrap()[(at & 511) as usize]
        };
        assert_eq!(
            [0, 512, 1024, 8192, 8704, 1 << 20, (4 << 20) - 1, 4 << 20].map(byte),
            [1, 4, 1, 2, 0, 3, 3, 0]
        );
        // From pool buffers: three slices, of which two are adjacent both on the disk and in
        // memory.
        let mut room = log.buffer_pool().allocate(3 << 20).unwrap();
        room.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 1024) as u8);
        let (sent, room) = (room.to_vec(), Arc::new(room));
        let mut block = Block::unallocated(5 << 20);
        for part in [0..700 << 10, 700 << 10..2 << 20, 0..3 << 20] {
            let at = if part.start == 0 && part.end == 3 << 20 { 2 << 20 } else { part.start };
            assert_eq!(
                block.put_slice(at, SharedSlice::from_owner(room.clone(), part.clone())),
                part.len()
            );
        }
        let ticket = disk.submit(Group { writes: vec![Write { at_bytes: 1 << 20, block }] }, &[]);
        disk.wait_visible(ticket.unwrap()).unwrap();
        let extent = Extent::new(1 << 20, 5 << 20);
        let block = disk.read_now(extent, Block::private(5 << 20)).unwrap();
        let expected = [&sent[..2 << 20], &sent[..]].concat();
        assert!(block.bytes().unwrap() == expected);
        let beyond = disk.submit(group_of_writes(&[(8 << 20, 512, 9)]), &[]).unwrap_err();
        assert!(matches!(beyond.error, Error::OutOfRange { .. }), "{}", beyond.error);
        assert_eq!(service.failure(), None);
        drop(disk);
        service.join();
    }

    /// A worker that breaks the protocol: it writes its messages into the session's memory itself.
    struct HostileWorker {
        memory: OwnedFd,
        event_fds: Vec<OwnedFd>,
    }

    /// Offsets of a mailbox and its fields: see the lanes of `exchange`.
    const MAILBOX_STRIDE: u64 = 17 * 128;
    const FINGERPRINT_OFFSET: u64 = 2120;
    const CLOSED_WORD_OFFSET: u64 = 2112;
    /// Slot number of a block that is in the page pool.
    const POOL_SLOT: u32 = u32::MAX;

    impl HostileWorker {
        fn accept(socket: &OwnedFd) -> Self {
            let hello =
                descriptors::receive_with_fds(socket, &mut [0; 512], RecvFlags::empty()).unwrap();
            let mut fds = hello.fds.into_iter();
            let memory = fds.next().unwrap();
            // The fd after the memory is the pidfd.
            Self { memory, event_fds: fds.skip(1).collect() }
        }

        fn write_mailbox(&self, lane: u32, at: u64, bytes: &[u8]) {
            let at = u64::from(lane) * 2 * MAILBOX_STRIDE + at;
            assert_eq!(rustix::io::pwrite(&self.memory, bytes, at), Ok(bytes.len()));
        }

        fn signal_lane(&self, lane: u32) {
            rustix::io::write(&self.event_fds[lane as usize * 2], &1u64.to_ne_bytes()).unwrap();
        }

        /// Submits a group as the first message of `lane`. Each block is its offset on the disk,
        /// its offset in the page pool, and its length.
        fn submit_forged_group(&self, lane: u32, blocks: &[(u64, u32, u32)]) {
            let mut payload = (blocks.len() as u32).to_le_bytes().to_vec();
            for (at, place, len) in blocks {
                payload.extend(at.to_le_bytes());
                [POOL_SLOT, *place, *len]
                    .iter()
                    .for_each(|word| payload.extend(word.to_le_bytes()));
            }
            // One group end, no predecessor, no mark, not durable, no further data.
            for word in [1, blocks.len() as u32, 0, 0, 0] {
                payload.extend(u32::to_le_bytes(word));
            }
            payload.extend([0, 0]);
            let messages = disk::Disk::TABLE.messages;
            let tag = messages.iter().position(|it| it.name == "Submit").unwrap() as u64;
            let head = 1 << 48 | 1 << 32 | tag << 16 | payload.len() as u64;
            self.write_mailbox(lane, FINGERPRINT_OFFSET, &disk::Disk::FINGERPRINT.to_ne_bytes());
            self.write_mailbox(lane, 8, &payload);
            self.write_mailbox(lane, 0, &head.to_ne_bytes());
            self.signal_lane(lane);
        }

        fn close_all_lanes(&self) {
            for lane in 1..=DISK_LANES {
                self.write_mailbox(lane, CLOSED_WORD_OFFSET, &(1u64 << 63 | 1 << 16).to_ne_bytes());
                self.signal_lane(lane);
            }
        }
    }

    #[test]
    fn invalid_pool_ranges_are_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let before: Vec<u8> = (0..1 << 20).map(|at| (at / 512) as u8).collect();
        std::fs::write(file.path(), &before).unwrap();
        let end = crate::oplog::OPLOG_MEMORY_BYTES as u32;
        let good = (4096, 8192, 512);
        for (lie, place) in [
            ((0, end, 512), end),
            ((0, end - 511, 512), end - 511),
            ((0, 0, end + 512), 0),
            ((0, 512, u32::MAX), 512),
            ((0, u32::MAX, u32::MAX), u32::MAX),
            ((0, 512, 0), 512),
        ] {
            let (service, host, socket, _memory) = serve_file_to_worker(file.path());
            let liar = HostileWorker::accept(&socket);
            // The valid block of the same message is not written, either.
            liar.submit_forged_group(2, &[good, lie]);
            liar.close_all_lanes();
            service.join();
            assert_eq!(host.violation(), Some(Violation::PoolRange(place)), "{lie:?}");
            assert!(std::fs::read(file.path()).unwrap() == before, "{lie:?}");
        }
        // Writes beyond the end of the disk are refused, but are no protocol violation. Neither are
        // two writes whose source ranges overlap.
        let (service, host, socket, memory) = serve_file_to_worker(file.path());
        let liar = HostileWorker::accept(&socket);
        memory.copy_in(8192, &[0xee; 1024]);
        liar.submit_forged_group(1, &[good, (1 << 20, 8192, 512)]);
        liar.submit_forged_group(2, &[good, (u64::MAX - 511, 8192, 512)]);
        liar.submit_forged_group(3, &[(4096, 8192, 1024), (8192, 8192 + 512, 512)]);
        liar.close_all_lanes();
        service.join();
        assert_eq!(host.violation(), None);
        let mut after = before;
        after[4096..5120].fill(0xee);
        after[8192..8704].fill(0xee);
        assert!(std::fs::read(file.path()).unwrap() == after);
    }
}
