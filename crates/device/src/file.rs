//! A file or block device as a disk.
//!
//! ```text
//!   Now ───────────── pread in the caller's thread (waking another CPU costs more)
//!   Ahead ─┬─ short, through the page cache: cached pages at once, else the system reads ahead
//!          └─ queue in disk order ──┬── io_uring, up to DEPTH reads in flight
//!                                   └── or threads that pread
//!   submit ── writer thread, group after group ─┬─ io_uring, up to DEPTH writes in flight
//!          └── one flush for all waiters          └─ or pwritev
//! ```
//!
//! Law 1: direct I/O where the file supports it; misaligned ends go through a bounce buffer, never
//! through the page cache.
//! Law 2: after one failed write or flush nothing more is written.
//! Law 3: a read need not see a group before `wait_visible` has returned for it.

mod direct;
mod lock;
mod system_info;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use draconis_types::Block;
use rustix::io::Errno;

use self::direct::enable_direct_io;
pub use self::lock::{LockMode, lock_file, try_lock_file};
pub use self::system_info::write_unit_bytes;
use self::system_info::{can_discard, is_regular_file, len_bytes};
use crate::raw::RawFile;
use crate::read_ahead::ReadAhead;
use crate::writer::Writer;
use crate::{
    AllocationRun, Atomic, CloseOnFork, Disk, Error, Extent, Group, Pending, ProcessBound,
    Properties, ReadAnswer, Refused, Ticket, Urgency,
};

/// Sector size of every file disk in bytes; no device has a smaller one.
const SECTOR_BYTES: u32 = 512;
/// Maximum length of [`OpenedFile::read_file_head`].
const UNALIGNED_HEAD_BYTES: usize = 16;
/// Request size beyond which this machine's disks hardly gain throughput.
const OPTIMAL_IO_BYTES: u32 = 512 << 10;
/// Maximum length of a growing file: the system's maximum.
const MAX_GROWING_FILE_BYTES: u64 = i64::MAX as u64 / SECTOR_BYTES as u64 * SECTOR_BYTES as u64;

/// Options for opening a file disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileOptions {
    /// Open for writing as well, exclusively: a second user is refused.
    pub write: bool,
    /// Bypass the page cache if the file supports it.
    pub direct: bool,
    /// Use io_uring for read-ahead and writes if the system allows it. A sandboxed process must
    /// not: its seccomp filter cannot see ring operations.
    pub uring: bool,
}

/// A file or block device as a disk.
#[derive(Debug)]
pub struct FileDisk {
    file: Arc<RawFile>,
    properties: Properties,
    room_bytes: u64,
    /// True if the file can have holes punched.
    punches: bool,
    threads: ProcessBound<DiskThreads>,
}

#[derive(Debug)]
struct DiskThreads {
    ahead: ReadAhead,
    writer: Option<Writer>,
}

impl FileDisk {
    /// Opens `path` and locks it: exclusively for writing, shared for reading.
    ///
    /// # Errors
    /// Error of the system; [`std::io::ErrorKind::ResourceBusy`] if it is in use.
    pub fn open(path: &Path, options: FileOptions) -> std::io::Result<Self> {
        Ok(Self::open_locked(path, options)?.start())
    }

    /// As [`FileDisk::open`], for a user that owns the whole disk and discards unneeded blocks:
    /// [`OpenedFile::with_discards`].
    ///
    /// # Errors
    /// As [`FileDisk::open`].
    pub fn open_discarding(path: &Path, options: FileOptions) -> std::io::Result<Self> {
        Ok(Self::open_locked(path, options)?.with_discards().start())
    }

    fn open_locked(path: &Path, options: FileOptions) -> std::io::Result<OpenedFile> {
        let file = File::options().read(true).write(options.write).open(path)?;
        let how = if options.write { LockMode::Exclusive } else { LockMode::Shared };
        lock_file(&file, how).map_err(|errno| match errno {
            Errno::WOULDBLOCK => std::io::Error::new(
                std::io::ErrorKind::ResourceBusy,
                "in use by another mount or tool",
            ),
            other => other.into(),
        })?;
        OpenedFile::new(file.into(), options)
    }

    /// Uses an open file or device, without a lock.
    ///
    /// # Errors
    /// As [`OpenedFile::new`].
    pub fn from_fd(fd: OwnedFd, options: FileOptions) -> std::io::Result<Self> {
        Ok(OpenedFile::new(fd, options)?.start())
    }

    /// Returns true if requests bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.file.align_bytes > 1
    }

    /// Returns the number of flushes of the device.
    pub fn flush_count(&self) -> u64 {
        self.file.flushes.load(Ordering::Relaxed)
    }

    /// Returns the error that ended all writing, if any.
    pub fn write_failure(&self) -> Option<Error> {
        match self.threads.get() {
            Ok(threads) => threads.writer.as_ref().and_then(Writer::failure),
            Err(inherited) => Some(inherited),
        }
    }

    /// Returns the properties with the maximum length as length.
    fn disk_properties(&self) -> Properties {
        Properties { len_bytes: self.room_bytes, ..self.properties }
    }

    /// Returns the writer that issued `ticket`: a read-only disk has none.
    fn writer_for_ticket(&self, ticket: Ticket) -> Result<&Writer, Error> {
        self.threads.get()?.writer.as_ref().ok_or(Error::UnknownTicket(ticket))
    }

    /// Returns true if read-ahead uses io_uring.
    pub fn uses_uring(&self) -> bool {
        self.threads.get().is_ok_and(|threads| threads.ahead.uses_uring())
    }
}

/// Returns the end of a file that ends inside a sector: such a file often contains an image,
/// compressed or not.
fn unaligned_end(len_bytes: u64, options: FileOptions) -> Option<u64> {
    let uneven = !len_bytes.is_multiple_of(SECTOR_BYTES.into());
    (uneven && !options.write && !options.uring).then_some(len_bytes)
}

/// An open file disk whose start needs only reads, writes and a thread.
///
/// A process queries everything else first, then enters its sandbox.
#[derive(Debug)]
pub struct OpenedFile {
    file: RawFile,
    len_bytes: u64,
    options: FileOptions,
    discards: bool,
}

impl OpenedFile {
    /// Queries the properties of an open file or device, without a lock.
    ///
    /// # Errors
    /// Error of the system for the descriptor; [`std::io::ErrorKind::InvalidInput`] if it is
    /// neither a file nor a block device.
    pub fn new(fd: OwnedFd, options: FileOptions) -> std::io::Result<Self> {
        let len_bytes = len_bytes(&fd)?;
        let end_bytes = unaligned_end(len_bytes, options);
        let align_bytes = if options.direct { enable_direct_io(&fd) } else { 1 };
        Ok(Self {
            file: RawFile {
                fd: CloseOnFork::new(fd),
                align_bytes,
                end_bytes,
                can_grow: false,
                flushes: AtomicU64::new(0),
            },
            len_bytes,
            options,
            discards: false,
        })
    }

    /// Lets [`Disk::discard`] punch holes in the file or device, if it supports that. Off by
    /// default: a user's image stays as dense as it was.
    pub fn with_discards(mut self) -> Self {
        self.discards = self.options.write && can_discard(&self.file.fd, self.len_bytes);
        self
    }

    /// Returns the number of bytes after the last whole sector that are not part of the disk. Only a
    /// file that is open for writing has any.
    pub fn rest_bytes(&self) -> u64 {
        if self.file.end_bytes.is_some() { 0 } else { self.len_bytes % u64::from(SECTOR_BYTES) }
    }

    /// Returns the first bytes, fewer if the file is shorter. An unconfined process reads nothing
    /// else, and only compares them.
    ///
    /// # Errors
    /// Error of the system.
    pub fn read_file_head(&self) -> std::io::Result<Vec<u8>> {
        let sector = Extent::new(0, SECTOR_BYTES.into());
        let head = self.file.read_head(sector)?;
        Ok(head.get(..UNALIGNED_HEAD_BYTES.min(head.len())).unwrap_or_default().to_vec())
    }

    /// Lets writes past the end lengthen a file, up to [`Disk::max_len_bytes`]. Block devices stay
    /// as they are.
    ///
    /// Rereads the length of the file: a standby process may have opened it long before its
    /// predecessor's last writes.
    ///
    /// # Errors
    /// Error of reading the file's length.
    pub fn with_growth(mut self) -> std::io::Result<Self> {
        if is_regular_file(&self.file.fd) {
            self.len_bytes = len_bytes(&self.file.fd)?;
            self.file.end_bytes = unaligned_end(self.len_bytes, self.options);
            self.file.can_grow = true;
        }
        Ok(self)
    }

    /// Starts the threads of the disk.
    pub fn start(self) -> FileDisk {
        let Self { file, len_bytes, options, discards } = self;
        let file = Arc::new(file);
        let sector = u64::from(SECTOR_BYTES);
        let properties = Properties {
            len_bytes: match file.end_bytes {
                Some(end) => end.next_multiple_of(sector),
                None if file.can_grow => {
                    len_bytes.next_multiple_of(sector).min(MAX_GROWING_FILE_BYTES)
                }
                None => len_bytes - len_bytes % sector,
            },
            sector_bytes: SECTOR_BYTES,
            best_io_bytes: OPTIMAL_IO_BYTES,
            rotational: false,
            read_only: !options.write,
            atomic: Atomic::None,
            discards,
        };
        let ahead = ReadAhead::start(file.clone(), options.uring);
        let writer = options.write.then(|| Writer::start(file.clone(), options.uring));
        let room_bytes = if file.can_grow { MAX_GROWING_FILE_BYTES } else { properties.len_bytes };
        // A device may have no zeros to give, and then takes them as a write.
        let punches = discards && is_regular_file(&file.fd);
        let threads = ProcessBound::new(DiskThreads { ahead, writer });
        FileDisk { file, properties, room_bytes, punches, threads }
    }
}

impl Disk for FileDisk {
    fn properties(&self) -> Properties {
        self.properties
    }

    fn max_len_bytes(&self) -> u64 {
        self.room_bytes
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        let checked = self.disk_properties().check_range(at, into.len());
        match checked.and_then(|()| self.threads.get()) {
            Err(error) => Pending::ready(Err(Refused { payload: Some(into), error })),
            Ok(threads) => match urgency {
                Urgency::Now => Pending::ready(self.file.read(at, into)),
                Urgency::Ahead => threads.ahead.read(at, into),
            },
        }
    }

    fn submit_chain(
        &self,
        mut chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let writer = match self.threads.get() {
            Ok(threads) => threads.writer.as_ref().ok_or(Error::ReadOnly),
            Err(inherited) => Err(inherited),
        };
        let writer = match writer {
            Ok(writer) => writer,
            Err(error) => return Err(Refused { payload: Some(chain), error }),
        };
        match self.disk_properties().check_chain(&chain) {
            Ok(()) => {
                // Direct I/O needs whole pages, and lent slices are wherever their owner has them.
                for write in chain.iter_mut().flat_map(|group| &mut group.writes) {
                    if !write.block.shared_slices().is_empty() {
                        write.block.make_private();
                    }
                }
                writer.submit(chain, after)
            }
            Err(error) => Err(Refused { payload: Some(chain), error }),
        }
    }

    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        self.writer_for_ticket(ticket)?.wait_visible(ticket)
    }

    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        self.writer_for_ticket(ticket)?.wait_durable(ticket)
    }

    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), Error> {
        self.disk_properties().check_extents(extents)?;
        match &self.threads.get()?.writer {
            Some(writer) => writer.discard(extents, after, self.properties.discards),
            None => after.first().map_or(Ok(()), |&ticket| Err(Error::UnknownTicket(ticket))),
        }
    }

    fn punch_hole(&self, at: Extent) -> Result<Option<Ticket>, Error> {
        self.disk_properties().check_range(at, at.len_bytes as usize)?;
        match self.threads.get()?.writer.as_ref().filter(|_| self.punches) {
            Some(writer) => writer.punch_hole(at).map(Some),
            None => Ok(None),
        }
    }

    fn wait_all_durable(&self) -> Result<(), Error> {
        self.threads.get()?.writer.as_ref().map_or(Ok(()), Writer::wait_all_durable)
    }

    fn allocation_run(&self, at: Extent) -> Result<AllocationRun, Error> {
        self.disk_properties().check_extents(&[at])?;
        self.threads.get()?;
        Ok(self.file.allocation_run(at))
    }
}
