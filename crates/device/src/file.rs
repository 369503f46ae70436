//! A file or block device as a disk.
//!
//! ```text
//!   Now ───────────── pread in the caller's thread (waking another CPU costs more)
//!   Ahead ── queue in disk order ──┬── io_uring, up to DEPTH reads in flight
//!                                  └── or one thread that preads
//!   submit ── writer thread, group after group ─┬─ io_uring, up to DEPTH writes in flight
//!          └── one flush for all who need it      └─ or pwritev
//! ```
//!
//! Law 1: direct I/O where the file takes it; a misaligned end goes through a bounce
//! buffer, never through the page cache.
//! Law 2: after one failed write or flush nothing more is written.
//! Law 3: a read need not see a group before its ticket is settled.

use std::fs::File;
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use draconis_exchange::heap::{Block, Private};
use rustix::fs::{FallocateFlags, FileType, FlockOperation, OFlags, StatxFlags};
use rustix::io::Errno;

use crate::ahead::Ahead;
use crate::uring::{Gathered, discard_blocks};
use crate::writer::Writer;
use crate::{
    Atomic, Disk, Error, Extent, Group, Pending, Properties, ReadAnswer, Refused, Ticket, Urgency,
    Write,
};

/// The sector that every file disk offers, in bytes; smaller than any it has.
const SECTOR_BYTES: u32 = 512;
/// Alignment tried for direct I/O where the kernel does not tell one, in bytes.
const DIRECT_ALIGN_BYTES: u32 = 4096;
/// Request size from which this machine's disks gain nothing much.
const BEST_IO_BYTES: u32 = 512 << 10;

/// Room is given back in multiples of this: parts of a block of the file system below would
/// be zeroed instead.
pub(crate) const DISCARD_UNIT_BYTES: u64 = 4096;

/// How to open a file disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileOptions {
    /// Open for writing as well, alone: a second user is refused.
    pub write: bool,
    /// Bypass the page cache where the file allows it.
    pub direct: bool,
    /// Use io_uring for reads ahead and writes where the system allows it. A sandboxed
    /// process must not: its filter cannot see what goes through a ring.
    pub uring: bool,
}

/// A file or block device as a disk.
#[derive(Debug)]
pub struct FileDisk {
    file: Arc<RawFile>,
    properties: Properties,
    ahead: Ahead,
    writer: Option<Writer>,
}

/// The descriptor and how it wants its requests.
#[derive(Debug)]
pub(crate) struct RawFile {
    pub(crate) fd: OwnedFd,
    /// Offsets, lengths and memory of a request must be multiples of this.
    pub(crate) align_bytes: u32,
    pub(crate) flushes: AtomicU64,
}

/// Who may use a disk beside us.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Claim {
    /// Others may read too.
    Shared,
    /// Nobody else: what a mount and a writer take.
    Alone,
}

/// Claims the file or device for as long as the open file lives.
///
/// # Errors
/// `EWOULDBLOCK` if somebody else holds a claim that does not go with this one.
pub fn claim(fd: impl std::os::fd::AsFd, how: Claim) -> rustix::io::Result<()> {
    let operation = match how {
        Claim::Shared => FlockOperation::NonBlockingLockShared,
        Claim::Alone => FlockOperation::NonBlockingLockExclusive,
    };
    rustix::fs::flock(fd, operation)
}

impl FileDisk {
    /// Opens `path` and claims it: alone for writing, shared for reading.
    ///
    /// # Errors
    /// What the system says; [`std::io::ErrorKind::ResourceBusy`] when it is in use.
    pub fn open(path: &Path, options: FileOptions) -> std::io::Result<Self> {
        Ok(Self::claimed(path, options)?.start())
    }

    /// As [`FileDisk::open`], for a user that owns all there is on the disk and says what
    /// it needs no more: [`OpenedFile::discarding`].
    ///
    /// # Errors
    /// As [`FileDisk::open`].
    pub fn open_discarding(path: &Path, options: FileOptions) -> std::io::Result<Self> {
        Ok(Self::claimed(path, options)?.discarding().start())
    }

    fn claimed(path: &Path, options: FileOptions) -> std::io::Result<OpenedFile> {
        let file = File::options().read(true).write(options.write).open(path)?;
        let how = if options.write { Claim::Alone } else { Claim::Shared };
        claim(&file, how).map_err(|errno| match errno {
            Errno::WOULDBLOCK => std::io::Error::new(
                std::io::ErrorKind::ResourceBusy,
                "in use by another mount or tool",
            ),
            other => other.into(),
        })?;
        OpenedFile::new(file.into(), options)
    }

    /// Uses an open file or device. Claims nothing.
    ///
    /// # Errors
    /// As [`OpenedFile::new`].
    pub fn from_fd(fd: OwnedFd, options: FileOptions) -> std::io::Result<Self> {
        Ok(OpenedFile::new(fd, options)?.start())
    }

    /// Whether requests bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.file.align_bytes > 1
    }

    /// How often the device was flushed.
    pub fn flushes(&self) -> u64 {
        self.file.flushes.load(Ordering::Relaxed)
    }

    /// What ended all writing, if something did.
    pub fn failure(&self) -> Option<Error> {
        self.writer.as_ref().and_then(Writer::failure)
    }

    /// Who knows `ticket`: without a writer there is none.
    fn writer_of(&self, ticket: Ticket) -> Result<&Writer, Error> {
        self.writer.as_ref().ok_or(Error::NoTicket(ticket))
    }

    /// Whether reads ahead go through io_uring.
    pub fn uses_uring(&self) -> bool {
        self.ahead.uses_uring()
    }
}

/// A file disk that asks nothing more of the system but reads, writes and a thread.
///
/// A process that is to be confined asks everything else first, while it may.
#[derive(Debug)]
pub struct OpenedFile {
    file: RawFile,
    len_bytes: u64,
    options: FileOptions,
    discards: bool,
}

impl OpenedFile {
    /// Asks what there is to ask of an open file or device. Claims nothing.
    ///
    /// # Errors
    /// What the system says of the descriptor; [`std::io::ErrorKind::InvalidInput`] if it
    /// is neither a file nor a block device.
    pub fn new(fd: OwnedFd, options: FileOptions) -> std::io::Result<Self> {
        let len_bytes = len_bytes(&fd)?;
        let align_bytes = if options.direct { go_direct(&fd) } else { 1 };
        Ok(Self {
            file: RawFile { fd, align_bytes, flushes: AtomicU64::new(0) },
            len_bytes,
            options,
            discards: false,
        })
    }

    /// Lets [`Disk::discard`] reach the file or device, where it can do that; else nothing
    /// is discarded. Off otherwise: an image of somebody's stays as dense as it came.
    pub fn discarding(mut self) -> Self {
        self.discards = self.options.write && can_discard(&self.file.fd, self.len_bytes);
        self
    }

    /// Starts the disk's threads.
    pub fn start(self) -> FileDisk {
        let Self { file, len_bytes, options, discards } = self;
        let file = Arc::new(file);
        let properties = Properties {
            len_bytes: len_bytes - len_bytes % u64::from(SECTOR_BYTES),
            sector_bytes: SECTOR_BYTES,
            best_io_bytes: BEST_IO_BYTES,
            rotational: false,
            read_only: !options.write,
            atomic: Atomic::None,
            discards,
        };
        let ahead = Ahead::start(file.clone(), options.uring);
        let writer = options.write.then(|| Writer::start(file.clone(), options.uring));
        FileDisk { file, properties, ahead, writer }
    }
}

impl Disk for FileDisk {
    fn properties(&self) -> Properties {
        self.properties
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        if let Err(error) = self.properties.check(at, into.len()) {
            return Pending::ready(Err(Refused { goods: Some(into), error }));
        }
        match urgency {
            Urgency::Now => Pending::ready(self.file.read(at, into)),
            Urgency::Ahead => self.ahead.read(at, into),
        }
    }

    fn submit_chain(
        &self,
        mut chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let Some(writer) = &self.writer else {
            return Err(Refused { goods: Some(chain), error: Error::ReadOnly });
        };
        match self.properties.check_chain(&chain) {
            Ok(()) => {
                // A device wants whole pages, and what is lent is where its owner has it.
                for write in chain.iter_mut().flat_map(|group| &mut group.writes) {
                    if !write.block.lent().is_empty() {
                        write.block.own();
                    }
                }
                writer.submit(chain, after)
            }
            Err(error) => Err(Refused { goods: Some(chain), error }),
        }
    }

    fn settle(&self, ticket: Ticket) -> Result<(), Error> {
        self.writer_of(ticket)?.settle(ticket)
    }

    fn wait(&self, ticket: Ticket) -> Result<(), Error> {
        self.writer_of(ticket)?.wait(ticket)
    }

    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), Error> {
        self.properties.check_extents(extents)?;
        match &self.writer {
            Some(writer) => writer.discard(extents, after, self.properties.discards),
            None => after.first().map_or(Ok(()), |&ticket| Err(Error::NoTicket(ticket))),
        }
    }
}

impl RawFile {
    /// Reads in the calling thread.
    pub(crate) fn read(&self, at: Extent, mut into: Block) -> ReadAnswer {
        let done = match into.bytes_mut().filter(|_| self.aligned(at)) {
            Some(bytes) => self.read_bytes(at, bytes),
            None => self.read_bounced(at, &mut into),
        };
        match done {
            Ok(()) => Ok(into),
            Err(error) => Err(Refused { goods: Some(into), error }),
        }
    }

    /// Fills `blocks`, one after the other on the file, with one request; says whether
    /// that went well.
    pub(crate) fn read_scattered<'a>(
        &self,
        start_bytes: u64,
        blocks: impl Iterator<Item = &'a mut Block>,
    ) -> bool {
        let mut len_bytes = 0;
        let mut parts = Vec::new();
        for bytes in blocks.map(Block::bytes_mut) {
            // Shared memory cannot be lent to the kernel like this.
            let Some(bytes) = bytes else { return false };
            if !self.aligned(Extent::new(start_bytes + len_bytes, bytes.len() as u64)) {
                return false;
            }
            len_bytes += bytes.len() as u64;
            parts.push(std::io::IoSliceMut::new(bytes));
        }
        let got = rustix::io::preadv(&self.fd, &mut parts, start_bytes);
        got.is_ok_and(|got| got as u64 == len_bytes)
    }

    /// Whether a request for `at` can go to the file as it is.
    pub(crate) fn aligned(&self, at: Extent) -> bool {
        let align = u64::from(self.align_bytes);
        at.start_bytes.is_multiple_of(align) && at.len_bytes.is_multiple_of(align)
    }

    fn read_bounced(&self, at: Extent, into: &mut Block) -> Result<(), Error> {
        let (wide, skip) = self.widen(at);
        let mut bounce = Private::new(wide.len_bytes as usize);
        // The widened end may lie beyond the end of the file: what counts is that the
        // bytes asked for came.
        let got = self.read_up_to(wide, &mut bounce).map_err(|errno| io("read", at, errno))?;
        let end = skip + at.len_bytes as usize;
        if got < end {
            return Err(Error::Short { extent: at, got_bytes: got.saturating_sub(skip) as u64 });
        }
        into.copy_in(0, &bounce[skip..end]);
        Ok(())
    }

    /// The aligned run around `at`, and where `at` starts in it.
    fn widen(&self, at: Extent) -> (Extent, usize) {
        let align = u64::from(self.align_bytes);
        let start = at.start_bytes - at.start_bytes % align;
        let skip = at.start_bytes - start;
        (Extent::new(start, (skip + at.len_bytes).next_multiple_of(align)), skip as usize)
    }

    fn read_bytes(&self, at: Extent, into: &mut [u8]) -> Result<(), Error> {
        let got = self.read_up_to(at, into).map_err(|errno| io("read", at, errno))?;
        if (got as u64) < at.len_bytes {
            return Err(Error::Short { extent: at, got_bytes: got as u64 });
        }
        Ok(())
    }

    /// Reads until `into` is full or the file ends.
    fn read_up_to(&self, at: Extent, into: &mut [u8]) -> rustix::io::Result<usize> {
        let mut got = 0;
        while got < into.len() {
            let from = at.start_bytes + got as u64;
            match rustix::io::pread(&self.fd, &mut into[got..], from) {
                Ok(0) => break,
                Ok(n) => got += n,
                Err(Errno::INTR) => {}
                // A direct read that stopped at the end of the file leaves us misaligned.
                Err(Errno::INVAL) if got > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(got)
    }

    /// Writes a run in the calling thread: each write begins where the one before it ends.
    /// One request if all of them can go to the file as they are; else they are put
    /// together first.
    pub(crate) fn write_run(&self, run: &[&Write]) -> Result<(), Error> {
        let extent = extent_of(run);
        let written = match self.gather(run) {
            Some(gathered) => self.write_gathered(extent, &gathered.parts),
            None => self.write_bounced(extent, run),
        };
        written.map_err(|errno| io("write", extent, errno))
    }

    /// A run as one request, if all of it can go to the file as it is.
    pub(crate) fn gather<'a>(&self, run: &[&'a Write]) -> Option<Gathered<'a>> {
        let part = |write: &&'a Write| {
            let at = Extent::new(write.at_bytes, write.block.len() as u64);
            write.block.bytes().filter(|_| self.aligned(at)).map(IoSlice::new)
        };
        Some(Gathered { at: extent_of(run), parts: run.iter().map(part).collect::<Option<_>>()? })
    }

    fn write_gathered(&self, extent: Extent, parts: &[IoSlice<'_>]) -> rustix::io::Result<()> {
        if let [one] = parts {
            return self.write_all(extent.start_bytes, one);
        }
        let put = loop {
            match rustix::io::pwritev(&self.fd, parts, extent.start_bytes) {
                Err(Errno::INTR) => {}
                put => break put?,
            }
        };
        if put as u64 == extent.len_bytes {
            return Ok(());
        }
        // Written in part: each for itself tells what is the matter.
        let mut at_bytes = extent.start_bytes;
        parts.iter().try_for_each(|part| {
            let from = at_bytes;
            at_bytes += part.len() as u64;
            self.write_all(from, part)
        })
    }

    /// Reads the aligned run around a misaligned one, changes it, writes it back.
    fn write_bounced(&self, extent: Extent, run: &[&Write]) -> rustix::io::Result<()> {
        let (wide, skip) = self.widen(extent);
        let mut bounce = Private::unset(wide.len_bytes as usize);
        let end = skip + extent.len_bytes as usize;
        if wide != extent {
            let got = self.read_up_to(wide, &mut bounce)?;
            if got < bounce.len() {
                // The file ends inside the run: writing it whole would lengthen the file.
                put_together(run, &mut bounce[skip..end]);
                return self.write_buffered(extent.start_bytes, &bounce[skip..end]);
            }
        }
        put_together(run, &mut bounce[skip..end]);
        self.write_all(wide.start_bytes, &bounce)
    }

    /// Writes the end of a file whose length direct I/O cannot express.
    fn write_buffered(&self, at_bytes: u64, bytes: &[u8]) -> rustix::io::Result<()> {
        let flags = rustix::fs::fcntl_getfl(&self.fd)?;
        rustix::fs::fcntl_setfl(&self.fd, flags - OFlags::DIRECT)?;
        let written = self.write_all(at_bytes, bytes);
        rustix::fs::fcntl_setfl(&self.fd, flags)?;
        written
    }

    fn write_all(&self, at_bytes: u64, bytes: &[u8]) -> rustix::io::Result<()> {
        let mut put = 0;
        while put < bytes.len() {
            match rustix::io::pwrite(&self.fd, &bytes[put..], at_bytes + put as u64) {
                Ok(0) => return Err(Errno::IO),
                Ok(n) => put += n,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Gives the room of `extent` back to the file system or device.
    pub(crate) fn discard(&self, extent: Extent) -> rustix::io::Result<()> {
        match rustix::fs::fallocate(&self.fd, PUNCH, extent.start_bytes, extent.len_bytes) {
            // A device that does not promise zeroes afterwards has another word for it.
            Err(errno) => discard_blocks(&self.fd, extent).map_err(|_| errno),
            done => done,
        }
    }

    /// Makes everything written durable.
    pub(crate) fn flush(&self) -> Result<(), Error> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        rustix::fs::fdatasync(&self.fd).map_err(|errno| io("flush", Extent::new(0, 0), errno))
    }
}

pub(crate) fn io(what: &'static str, extent: Extent, errno: Errno) -> Error {
    Error::Io { what, extent, errno }
}

/// What a run covers.
fn extent_of(run: &[&Write]) -> Extent {
    let start_bytes = run.first().map_or(0, |first| first.at_bytes);
    Extent::new(start_bytes, run.iter().map(|write| write.block.len() as u64).sum())
}

/// Copies the blocks of `run` into `bytes`, one behind the other.
fn put_together(run: &[&Write], bytes: &mut [u8]) {
    let mut at = 0;
    for write in run {
        at += write.block.copy_out(0, &mut bytes[at..]);
    }
}

fn len_bytes(fd: &OwnedFd) -> std::io::Result<u64> {
    let stat = rustix::fs::fstat(fd)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(u64::try_from(stat.st_size).unwrap_or(0)),
        // A seek tells a device's length without an ioctl a sandbox would have to allow.
        FileType::BlockDevice => Ok(rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0))?),
        _ => Err(std::io::Error::new(
            std::io::ErrorKind::InvalidInput,
            "neither a file nor a block device",
        )),
    }
}

/// How room is given back. A block device takes this as a discard that reads as zeroes.
const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

/// Whether a file or device can give room back. A file is asked with a hole behind its end.
fn can_discard(fd: &OwnedFd, len_bytes: u64) -> bool {
    let Ok(stat) = rustix::fs::fstat(fd) else { return false };
    if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
        return queue_says(stat.st_rdev, "discard_max_bytes").is_some_and(|bytes| bytes > 0);
    }
    let behind = len_bytes.next_multiple_of(DISCARD_UNIT_BYTES);
    rustix::fs::fallocate(fd, PUNCH, behind, DISCARD_UNIT_BYTES).is_ok()
}

/// The unit in which a file or device says that it is written, in bytes: what is shorter is
/// read, changed and written back somewhere below. A device tells what is physically one
/// block, and what it likes best if that is no more than 16 KiB (with several disks it is a
/// stripe, which is no unit). A file has its file system's blocks besides.
///
/// None where nobody says anything, as of memory and the network.
pub fn written_unit_bytes(fd: impl std::os::fd::AsFd) -> Option<u32> {
    const MOST: u64 = 16 << 10;
    let stat = rustix::fs::fstat(&fd).ok()?;
    let (device, block) = match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => (stat.st_rdev, None),
        _ => (stat.st_dev, rustix::fs::fstatvfs(&fd).ok().map(|system| system.f_frsize)),
    };
    let queue = ["physical_block_size", "optimal_io_size"].map(|name| queue_says(device, name));
    let told = queue.into_iter().chain([block]).flatten();
    let unit = told.filter(|bytes| bytes.is_power_of_two() && *bytes <= MOST).max()?;
    u32::try_from(unit).ok()
}

/// A number that the kernel tells of a block device's queue.
fn queue_says(device: rustix::fs::Dev, name: &str) -> Option<u64> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    // A partition has its queue in the directory of the whole device.
    let said = ["queue", "../queue"].iter().find_map(|queue| {
        let path = format!("/sys/dev/block/{major}:{minor}/{queue}/{name}");
        std::fs::read_to_string(path).ok()
    });
    said?.trim().parse().ok()
}

/// Switches direct I/O on if the file takes it; returns the alignment its requests need.
fn go_direct(fd: &OwnedFd) -> u32 {
    match try_direct(fd) {
        Ok(align_bytes) => align_bytes,
        Err(errno) => {
            log::info!("no direct I/O here ({errno}): reads and writes go through the page cache");
            1
        }
    }
}

fn try_direct(fd: &OwnedFd) -> rustix::io::Result<u32> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | OFlags::DIRECT)?;
    let align_bytes = match told_alignment(fd) {
        // The kernel says that this file does no direct I/O, whatever the flag says.
        Some(0) => Err(Errno::OPNOTSUPP),
        Some(told) if told.is_power_of_two() && told <= 1 << 16 => Ok(told),
        _ => Ok(DIRECT_ALIGN_BYTES),
    };
    let mut probe = Private::new(DIRECT_ALIGN_BYTES as usize);
    let tried = align_bytes.and_then(|align_bytes| {
        rustix::io::pread(fd, &mut probe[..], 0)?;
        Ok(align_bytes)
    });
    if tried.is_err() {
        rustix::fs::fcntl_setfl(fd, flags)?;
    }
    tried
}

/// What `statx` tells of direct I/O: memory and offset alignment (Linux 6.1).
fn told_alignment(fd: &OwnedFd) -> Option<u32> {
    let flags = rustix::fs::AtFlags::EMPTY_PATH;
    let told = rustix::fs::statx(fd, c"", flags, StatxFlags::DIOALIGN).ok()?;
    (told.stx_mask & StatxFlags::DIOALIGN.bits() != 0)
        .then(|| told.stx_dio_offset_align.max(told.stx_dio_mem_align.min(4096)))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn image(len: usize) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..len).map(|i| (i / 512) as u8).collect();
        file.write_all(&bytes).unwrap();
        file
    }

    fn variants() -> Vec<FileOptions> {
        let mut all = vec![];
        for direct in [false, true] {
            for uring in [false, true] {
                all.push(FileOptions { write: true, direct, uring });
            }
        }
        all
    }

    #[test]
    fn any_whole_sectors_can_be_read_in_every_mode() {
        // 100,000 is no multiple of any alignment: the last sectors need the bounce.
        let file = image(100_000);
        for options in variants() {
            let disk = FileDisk::open(file.path(), options).unwrap();
            assert_eq!(disk.properties().len_bytes, 99_840);
            for (start, len) in [(0, 512), (512, 4096), (4096, 65_536), (98_816, 1024), (0, 99_840)]
            {
                for urgency in [Urgency::Now, Urgency::Ahead] {
                    let block = Block::private(len as usize);
                    let answer = disk.read(Extent::new(start, len), block, urgency).wait();
                    let got = answer.unwrap().unwrap().into_private();
                    assert!(
                        got.chunks(512).zip((start / 512)..).all(|(s, n)| s == [n as u8; 512]),
                        "{options:?} {urgency:?} {start} {len}"
                    );
                }
            }
        }
    }

    #[test]
    fn many_reads_ahead_all_arrive() {
        let file = image(1 << 20);
        for options in variants() {
            let disk = FileDisk::open(file.path(), options).unwrap();
            let pending: Vec<_> = (0..512u64)
                .map(|i| {
                    let at = Extent::new((i * 37 % 512) * 2048, 2048);
                    (at, disk.read(at, Block::private(2048), Urgency::Ahead))
                })
                .collect();
            for (at, pending) in pending {
                let got = pending.wait().unwrap().unwrap().into_private();
                assert_eq!(got[0], (at.start_bytes / 512) as u8);
            }
        }
    }

    #[test]
    fn groups_are_written_in_order_and_survive_reopening() {
        for options in variants() {
            let file = image(100_000);
            let disk = FileDisk::open(file.path(), options).unwrap();
            let write = |at_bytes, byte| {
                let mut block = Block::private(1024);
                block.copy_in(0, &[byte; 1024]);
                Write { at_bytes, block }
            };
            let first = Group { writes: vec![write(512, 0xaa), write(98_816, 0xbb)] };
            let first = disk.submit(first, &[]).unwrap();
            let second = disk.submit(Group { writes: vec![write(1024, 0xcc)] }, &[first]).unwrap();
            disk.wait(second).unwrap();
            disk.wait(first).unwrap();
            drop(disk);
            let bytes = std::fs::read(file.path()).unwrap();
            assert_eq!(bytes.len(), 100_000);
            assert_eq!((bytes[511], bytes[512], bytes[1024]), (0, 0xaa, 0xcc));
            assert_eq!((bytes[2047], bytes[2048], bytes[98_816]), (0xcc, 4, 0xbb));
            assert_eq!((bytes[99_839], bytes[99_840]), (0xbb, 195));
        }
    }

    fn group(writes: &[(u64, usize, u8)]) -> Group {
        let write = |&(at_bytes, len, byte): &(u64, usize, u8)| {
            let mut block = Block::private(len);
            block.copy_in(0, &vec![byte; len]);
            Write { at_bytes, block }
        };
        Group { writes: writes.iter().map(write).collect() }
    }

    #[test]
    fn order_costs_a_flush_where_it_is_asked_for_and_only_there() {
        let file = image(100_000);
        for options in variants() {
            let disk = FileDisk::open(file.path(), options).unwrap();
            let small = || group(&[(0, 512, 1)]);
            let mut flushes = 0;
            let mut costs = |expected, what: &dyn Fn() -> Ticket| {
                let ticket = what();
                let after = disk.flushes();
                assert_eq!(after - flushes, expected, "{options:?}");
                flushes = after;
                ticket
            };
            let settled = |ticket| {
                disk.settle(ticket).unwrap();
                ticket
            };
            let first = costs(0, &|| settled(disk.submit(small(), &[]).unwrap()));
            let second = costs(0, &|| settled(disk.submit(small(), &[]).unwrap()));
            // The flush for the older one covers the newer one.
            let third = costs(1, &|| settled(disk.submit(small(), &[first]).unwrap()));
            costs(0, &|| settled(disk.submit(small(), &[second, first]).unwrap()));
            costs(1, &|| settled(disk.submit(small(), &[third]).unwrap()));
            // Three links, two flushes; the last link is durable by a third one only.
            let chain = || vec![small(), small(), small()];
            let last = costs(2, &|| {
                let tickets = disk.submit_chain(chain(), &[third]).unwrap();
                settled(tickets[2]);
                // Durable by the chain's own flush.
                disk.wait(tickets[0]).unwrap();
                disk.wait(tickets[1]).unwrap();
                tickets[2]
            });
            let wait = |ticket| {
                disk.wait(ticket).unwrap();
                ticket
            };
            costs(1, &|| wait(last));
            costs(0, &|| wait(last));
            costs(0, &|| settled(disk.submit(small(), &[last]).unwrap()));
        }
    }

    #[test]
    fn concurrent_waiters_share_flushes() {
        let file = image(100_000);
        let disk = FileDisk::open(file.path(), variants()[0]).unwrap();
        let ticket = disk.submit(group(&[(0, 512, 1)]), &[]).unwrap();
        disk.settle(ticket).unwrap();
        let barrier = std::sync::Barrier::new(8);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    barrier.wait();
                    disk.wait(ticket).unwrap();
                });
            }
        });
        assert_eq!(disk.flushes(), 1);
    }

    #[test]
    fn what_nobody_waits_for_is_written_too() {
        let file = image(100_000);
        let disk = FileDisk::open(file.path(), variants()[0]).unwrap();
        // At once, while its thread dozes, and after it fell asleep.
        for (byte, pause_ms) in [(1, 0), (2, 0), (3, 2), (4, 60), (5, 0)] {
            std::thread::sleep(std::time::Duration::from_millis(pause_ms));
            disk.submit(group(&[(4096, 512, byte)]), &[]).unwrap();
            let began = std::time::Instant::now();
            while std::fs::read(file.path()).unwrap()[4096] != byte {
                assert!(began.elapsed().as_secs() < 20, "{byte} was not written");
                std::thread::yield_now();
            }
        }
        assert_eq!(disk.flushes(), 0);
    }

    #[test]
    fn nothing_follows_what_failed() {
        use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
        for options in variants() {
            let fd = memfd_create("disk", MemfdFlags::ALLOW_SEALING).unwrap();
            let file = File::from(fd.try_clone().unwrap());
            file.set_len(1 << 16).unwrap();
            let disk = FileDisk::from_fd(fd, options).unwrap();
            // From here on writes beyond the first two pages fail.
            file.set_len(8192).unwrap();
            fcntl_add_seals(&file, SealFlags::GROW).unwrap();
            let first = disk.submit(group(&[(0, 4096, 1)]), &[]).unwrap();
            disk.wait(first).unwrap();
            let at = [4096, 8192, 0, 4096].into_iter();
            let chain = at.zip(2..).map(|(at, byte)| group(&[(at, 4096, byte)])).collect();
            let tickets = disk.submit_chain(chain, &[first]).unwrap();
            for &ticket in tickets[1..].iter().rev() {
                assert!(matches!(disk.wait(ticket), Err(Error::Io { what: "write", .. })));
                assert!(matches!(disk.settle(ticket), Err(Error::Io { what: "write", .. })));
            }
            // What was durable stays so: the chain's own flush covered its first group.
            assert_eq!((disk.wait(first), disk.wait(tickets[0])), (Ok(()), Ok(())));
            let refused = disk.submit(group(&[(0, 512, 9)]), &[]).unwrap_err();
            assert_eq!(refused.error, Error::Stopped);
            assert_eq!(disk.wait(Ticket(6)), Err(Error::NoTicket(Ticket(6))));
            drop(disk);
            let mut bytes = vec![0; 8192];
            rustix::io::pread(&file, &mut bytes[..], 0).unwrap();
            assert_eq!((bytes[0], bytes[4096]), (1, 2));
        }
    }

    #[test]
    fn neighbours_go_as_one_and_land_where_they_belong() {
        for options in variants() {
            let file = image(1 << 20);
            let disk = FileDisk::open(file.path(), options).unwrap();
            // Backwards, with a gap, with sizes that direct I/O does not take, more than
            // one request carries; and overlapping ones, whose order counts.
            let scattered: Vec<_> =
                (0..1500u64).rev().filter(|n| n % 700 != 3).map(|n| (n * 512, 512, 0xa0)).collect();
            let blocks: Vec<_> =
                (0..32).map(|n| ((800 << 10) + (n << 12), 4096, n as u8)).collect();
            let overlapping = [(1000 << 10, 8192, 1), (1004 << 10, 8192, 2), (1002 << 10, 4096, 3)];
            let chain = vec![group(&scattered), group(&blocks), group(&overlapping)];
            let tickets = disk.submit_chain(chain, &[]).unwrap();
            disk.wait(tickets[2]).unwrap();
            let bytes = std::fs::read(file.path()).unwrap();
            for n in 0..1500 {
                let expected = if n % 700 == 3 { n as u8 } else { 0xa0 };
                assert!(bytes[n * 512..][..512].iter().all(|b| *b == expected), "{options:?} {n}");
            }
            for n in 0..32 {
                assert_eq!(bytes[(800 << 10) + (n << 12)], n as u8);
            }
            let kib: Vec<_> = (1000..1012).map(|kib| bytes[kib << 10]).collect();
            assert_eq!(kib, [1, 1, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2]);
        }
    }

    #[test]
    fn a_refused_request_returns_its_block() {
        let file = image(4096);
        let options = FileOptions { write: false, direct: true, uring: false };
        let disk = FileDisk::open(file.path(), options).unwrap();
        let refused = disk.read_now(Extent::new(4096, 512), Block::private(512)).unwrap_err();
        assert_eq!(refused.goods.unwrap().len(), 512);
        assert!(matches!(refused.error, Error::OutOfRange { .. }));
        let refused = disk.read_now(Extent::new(1, 512), Block::private(512)).unwrap_err();
        assert!(matches!(refused.error, Error::Misaligned { .. }));
        let refused = disk.submit(Group::default(), &[]).unwrap_err();
        assert_eq!(refused.error, Error::ReadOnly);
    }

    #[test]
    fn a_file_that_shrank_is_an_error_not_a_signal() {
        let file = image(1 << 16);
        for options in variants() {
            let disk = FileDisk::open(file.path(), options).unwrap();
            file.as_file().set_len(4096).unwrap();
            let at = Extent::new(0, 1 << 16);
            for urgency in [Urgency::Now, Urgency::Ahead] {
                let answer = disk.read(at, Block::private(1 << 16), urgency).wait().unwrap();
                assert!(matches!(answer.unwrap_err().error, Error::Short { .. }));
            }
            file.as_file().set_len(1 << 16).unwrap();
        }
    }

    #[test]
    fn a_disk_in_use_is_refused() {
        let file = image(4096);
        let read = FileOptions { write: false, direct: false, uring: false };
        let write = FileOptions { write: true, ..read };
        let one = FileDisk::open(file.path(), read).unwrap();
        let two = FileDisk::open(file.path(), read).unwrap();
        let refused = FileDisk::open(file.path(), write).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ResourceBusy);
        drop((one, two));
        let alone = FileDisk::open(file.path(), write).unwrap();
        assert!(FileDisk::open(file.path(), read).is_err());
        drop(alone);
        assert!(FileDisk::open(file.path(), read).is_ok());
    }

    #[test]
    fn a_file_is_written_in_blocks_of_its_file_system() {
        let file = image(8192);
        let block = rustix::fs::fstatvfs(&file).unwrap().f_frsize;
        let unit = written_unit_bytes(&file).unwrap();
        assert!(u64::from(unit) >= block.min(16 << 10) && unit.is_power_of_two(), "{unit}");
        assert_eq!(queue_says(rustix::fs::makedev(0, 0), "physical_block_size"), None);
    }

    #[test]
    fn a_file_is_no_device_to_discard_on() {
        let file = image(8192);
        let fd = OwnedFd::from(file.reopen().unwrap());
        assert_eq!(discard_blocks(&fd, Extent::new(0, 4096)), Err(Errno::NOTTY));
    }

    #[test]
    fn what_is_discarded_becomes_room_once_what_it_follows_is_durable() {
        use std::os::unix::fs::MetadataExt;
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().write_all(&vec![7; 1 << 20]).unwrap();
        file.as_file().sync_all().unwrap();
        let options = FileOptions { write: true, direct: false, uring: false };
        let ordinary = FileDisk::open(file.path(), options).unwrap();
        assert!(!ordinary.properties().discards);
        ordinary.discard(&[Extent::new(0, 1 << 20)], &[]).unwrap();
        drop(ordinary);
        let disk = FileDisk::open_discarding(file.path(), options).unwrap();
        if !disk.properties().discards {
            return;
        }
        let write = |at_bytes| {
            let mut block = Block::private(4096);
            block.copy_in(0, &[9; 4096]);
            let group = Group { writes: vec![Write { at_bytes, block }] };
            disk.submit(group, &[]).unwrap()
        };
        let first = write(0);
        let beyond = disk.discard(&[Extent::new(1 << 20, 1)], &[]).unwrap_err();
        assert!(matches!(beyond, Error::OutOfRange { .. }));
        assert_eq!(disk.discard(&[], &[Ticket(7)]), Err(Error::NoTicket(Ticket(7))));
        disk.discard(&[Extent::new(65536, 65536), Extent::new(100, 9000)], &[first]).unwrap();
        disk.discard(&[Extent::new(512 << 10, 65536)], &[first]).unwrap();
        // Nothing is flushed for a hint, and it waits for what it follows: long enough for
        // a thread that would not.
        disk.settle(first).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!((disk.flushes(), std::fs::read(file.path()).unwrap()[65536]), (0, 7));
        let kept = write(520 << 10);
        disk.wait(kept).unwrap();
        drop(disk);
        let bytes = std::fs::read(file.path()).unwrap();
        let byte = |at: usize| bytes[at];
        assert_eq!((bytes.len(), byte(0), byte(4095), byte(520 << 10)), (1 << 20, 9, 9, 9));
        assert_eq!((byte(4096), byte(8191), byte(8192)), (0, 0, 7));
        assert_eq!((byte(65535), byte(65536), byte(131_071), byte(131_072)), (7, 0, 0, 7));
        // Written to since: it was not carried out.
        assert_eq!((byte(512 << 10), byte((576 << 10) - 1)), (7, 7));
        assert!(file.as_file().metadata().unwrap().blocks() < 2048);
    }
}
