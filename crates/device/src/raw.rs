//! Synchronous I/O on an open file or device: one request at a time, in the calling thread.
//!
//! Law: a request that is misaligned for direct I/O goes through a bounce buffer.

use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicU64, Ordering};

use draconis_types::{Block, PrivateBuffer};
use rustix::fs::{FallocateFlags, OFlags, SeekFrom};
use rustix::io::{Errno, ReadWriteFlags};

use crate::{AllocationRun, CloseOnFork, Error, Extent, ReadAnswer, Refused, Write};

/// Granularity of discards: parts of a file system block would be zeroed instead of freed.
pub(crate) const DISCARD_UNIT_BYTES: u64 = 4096;

/// Flags that punch a hole. A block device treats it as a discard that reads as zeroes.
pub(crate) const PUNCH_HOLE_FLAGS: FallocateFlags =
    FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

/// A descriptor and its alignment.
#[derive(Debug)]
pub(crate) struct RawFile {
    pub(crate) fd: CloseOnFork,
    /// Alignment of offsets, lengths and memory of a request.
    pub(crate) align_bytes: u32,
    /// End of a file that ends inside a sector; the rest of the sector reads as zeros.
    pub(crate) end_bytes: Option<u64>,
    /// True if writes lengthen the file; bytes past its end read as zeros.
    pub(crate) can_grow: bool,
    pub(crate) flushes: AtomicU64,
}

/// One write: its range and its consecutive parts.
#[derive(Debug)]
pub(crate) struct VectoredWrite<'a> {
    pub(crate) at: Extent,
    pub(crate) parts: Vec<IoSlice<'a>>,
}

/// Result of a non-blocking read (`RWF_NOWAIT`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NowaitRead {
    /// All bytes were in the page cache.
    Done,
    /// Not all were cached; the system has started to read them.
    Started,
    /// Non-blocking reads are unsupported or useless here.
    Unable,
}

impl RawFile {
    /// Reads from the page cache without blocking. The system reads missing pages ahead (since
    /// Linux 5.12).
    pub(crate) fn read_nowait(&self, at: Extent, into: &mut Block) -> NowaitRead {
        if self.align_bytes > 1 {
            return NowaitRead::Unable;
        }
        let Some(bytes) = into.bytes_mut() else { return NowaitRead::Unable };
        let mut parts = [IoSliceMut::new(bytes)];
        let flags = ReadWriteFlags::NOWAIT;
        match rustix::io::preadv2(&self.fd, &mut parts, at.start_bytes, flags) {
            Ok(got) if got as u64 == at.len_bytes => NowaitRead::Done,
            // Nothing, a part, or the end of the file: the waiter reads it.
            Ok(_) | Err(Errno::AGAIN) => NowaitRead::Started,
            Err(_) => NowaitRead::Unable,
        }
    }

    /// Reads in the calling thread.
    pub(crate) fn read(&self, at: Extent, mut into: Block) -> ReadAnswer {
        let done = match into.bytes_mut().filter(|_| self.is_aligned(at)) {
            Some(bytes) => self.read_bytes(at, bytes),
            None => self.read_bounced(at, &mut into),
        };
        match done {
            Ok(()) => Ok(into),
            Err(error) => Err(Refused { payload: Some(into), error }),
        }
    }

    /// Fills `blocks`, which are consecutive in the file, with one request; returns true on
    /// success.
    pub(crate) fn read_scattered<'a>(
        &self,
        start_bytes: u64,
        blocks: impl Iterator<Item = &'a mut Block>,
    ) -> bool {
        let mut len_bytes = 0;
        let mut parts = Vec::new();
        for bytes in blocks.map(Block::bytes_mut) {
            // Shared memory cannot be passed to the kernel this way.
            let Some(bytes) = bytes else { return false };
            if !self.is_aligned(Extent::new(start_bytes + len_bytes, bytes.len() as u64)) {
                return false;
            }
            len_bytes += bytes.len() as u64;
            parts.push(IoSliceMut::new(bytes));
        }
        let got = rustix::io::preadv(&self.fd, &mut parts, start_bytes);
        got.is_ok_and(|got| got as u64 == len_bytes)
    }

    /// Returns true if a request for `at` is aligned for the file.
    pub(crate) fn is_aligned(&self, at: Extent) -> bool {
        let align = u64::from(self.align_bytes);
        at.start_bytes.is_multiple_of(align) && at.len_bytes.is_multiple_of(align)
    }

    fn read_bounced(&self, at: Extent, into: &mut Block) -> Result<(), Error> {
        let (wide, skip) = self.widen_to_alignment(at);
        let mut bounce = PrivateBuffer::new_uninitialized(wide.len_bytes as usize);
        // The widened range may exceed the file: only the requested bytes must have been read.
        let got =
            self.read_up_to(wide, &mut bounce).map_err(|errno| io_error("read", at, errno))?;
        let end = skip + at.len_bytes as usize;
        let got = self.zero_past_end(wide, got, &mut bounce);
        if got < end {
            return Err(Error::ShortRead {
                extent: at,
                got_bytes: got.saturating_sub(skip) as u64,
            });
        }
        into.copy_in(0, &bounce[skip..end]);
        Ok(())
    }

    /// Returns the aligned range around `at`, and the offset of `at` in it.
    fn widen_to_alignment(&self, at: Extent) -> (Extent, usize) {
        let align = u64::from(self.align_bytes);
        let start = at.start_bytes - at.start_bytes % align;
        let skip = at.start_bytes - start;
        (Extent::new(start, (skip + at.len_bytes).next_multiple_of(align)), skip as usize)
    }

    fn read_bytes(&self, at: Extent, into: &mut [u8]) -> Result<(), Error> {
        let got = self.read_up_to(at, into).map_err(|errno| io_error("read", at, errno))?;
        let got = self.zero_past_end(at, got, into);
        if (got as u64) < at.len_bytes {
            return Err(Error::ShortRead { extent: at, got_bytes: got as u64 });
        }
        Ok(())
    }

    /// Fills the bytes past the end of the file with zeros, if the end stopped the read.
    fn zero_past_end(&self, at: Extent, got: usize, into: &mut [u8]) -> usize {
        let is_end = self.end_bytes.is_some_and(|end| at.start_bytes + got as u64 == end);
        if !self.can_grow && !is_end {
            return got;
        }
        into[got..].fill(0);
        into.len()
    }

    /// Returns the first bytes of `at`, as far as the file has them.
    pub(crate) fn read_head(&self, at: Extent) -> rustix::io::Result<Vec<u8>> {
        let (wide, _) = self.widen_to_alignment(at);
        let mut bytes = PrivateBuffer::new(wide.len_bytes as usize);
        let got = self.read_up_to(wide, &mut bytes)?;
        Ok(bytes[..got.min(at.len_bytes as usize)].to_vec())
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
                // A direct read that stopped at the end of the file leaves the offset misaligned.
                Err(Errno::INVAL) if got > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(got)
    }

    /// Writes a run of adjacent writes in the calling thread. Uses one request if all are aligned;
    /// else assembles them first.
    pub(crate) fn write_run(&self, run: &[&Write]) -> Result<(), Error> {
        let extent = run_extent(run);
        let written = match self.to_vectored_write(run) {
            Some(gathered) => self.write_gathered(extent, &gathered.parts),
            None => self.write_bounced(extent, run),
        };
        written.map_err(|errno| io_error("write", extent, errno))
    }

    /// Returns a run as one request, if all of it is aligned.
    pub(crate) fn to_vectored_write<'a>(&self, run: &[&'a Write]) -> Option<VectoredWrite<'a>> {
        let part = |write: &&'a Write| {
            let at = Extent::new(write.at_bytes, write.block.len() as u64);
            write.block.bytes().filter(|_| self.is_aligned(at)).map(IoSlice::new)
        };
        Some(VectoredWrite {
            at: run_extent(run),
            parts: run.iter().map(part).collect::<Option<_>>()?,
        })
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
        // Partly written: single writes reveal the error.
        let mut at_bytes = extent.start_bytes;
        parts.iter().try_for_each(|part| {
            let from = at_bytes;
            at_bytes += part.len() as u64;
            self.write_all(from, part)
        })
    }

    /// Reads the aligned range around a misaligned one, modifies it and writes it back.
    fn write_bounced(&self, extent: Extent, run: &[&Write]) -> rustix::io::Result<()> {
        let (wide, skip) = self.widen_to_alignment(extent);
        let mut bounce = PrivateBuffer::new_uninitialized(wide.len_bytes as usize);
        let end = skip + extent.len_bytes as usize;
        if wide != extent {
            let got = self.read_up_to(wide, &mut bounce)?;
            if got < bounce.len() {
                // The file ends inside the range: writing all of it would lengthen the file.
                copy_run_into(run, &mut bounce[skip..end]);
                return self.write_buffered(extent.start_bytes, &bounce[skip..end]);
            }
        }
        copy_run_into(run, &mut bounce[skip..end]);
        self.write_all(wide.start_bytes, &bounce)
    }

    /// Writes the end of a file whose length is misaligned for direct I/O, through the page cache.
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

    /// Returns the state of the start of `at`. All is stored where the system does not tell.
    pub(crate) fn allocation_run(&self, at: Extent) -> AllocationRun {
        let end = at.start_bytes.saturating_add(at.len_bytes);
        let run = |until: u64, is_hole| {
            let len_bytes = until.min(end).saturating_sub(at.start_bytes);
            AllocationRun { len_bytes, is_hole }
        };
        match rustix::fs::seek(&self.fd, SeekFrom::Data(at.start_bytes)) {
            Ok(data) if data > at.start_bytes => run(data, true),
            Ok(_) => match rustix::fs::seek(&self.fd, SeekFrom::Hole(at.start_bytes)) {
                Ok(hole) if hole > at.start_bytes => run(hole, false),
                _ => AllocationRun::stored(at),
            },
            // No data until the end of the file.
            Err(Errno::NXIO) => run(end, true),
            Err(_) => AllocationRun::stored(at),
        }
    }

    /// Punches a hole: returns the space of `extent` to the file system or device.
    pub(crate) fn punch(&self, extent: Extent) -> rustix::io::Result<()> {
        rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(&self.fd, PUNCH_HOLE_FLAGS, extent.start_bytes, extent.len_bytes)
        })
    }

    /// Makes all writes durable.
    pub(crate) fn flush(&self) -> Result<(), Error> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        rustix::fs::fdatasync(&self.fd).map_err(|errno| io_error("flush", Extent::new(0, 0), errno))
    }
}

fn io_error(what: &'static str, extent: Extent, errno: Errno) -> Error {
    Error::Io { what, extent, errno }
}

/// Returns the range of a run.
fn run_extent(run: &[&Write]) -> Extent {
    let start_bytes = run.first().map_or(0, |first| first.at_bytes);
    Extent::new(start_bytes, run.iter().map(|write| write.block.len() as u64).sum())
}

/// Copies the blocks of `run` into `bytes`, one after the other.
fn copy_run_into(run: &[&Write], bytes: &mut [u8]) {
    let mut at = 0;
    for write in run {
        at += write.block.copy_out(0, &mut bytes[at..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattered_read_fills_each_block() {
        let mut file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..100_000u32).map(|at| (at / 512) as u8).collect();
        std::io::Write::write_all(&mut file, &bytes).unwrap();
        let file = RawFile {
            fd: CloseOnFork::new(file.into()),
            align_bytes: 1,
            end_bytes: None,
            can_grow: false,
            flushes: Default::default(),
        };
        let read = |start, lens: [usize; 3]| {
            let mut blocks = lens.map(Block::private);
            file.read_scattered(start, blocks.iter_mut())
                .then(|| blocks.map(|block| block.bytes().unwrap().to_vec()).concat())
        };
        assert_eq!(read(512, [512, 4096, 1024]).as_deref(), bytes.get(512..512 + 5632));
        assert_eq!(read(99_000, [512, 512, 512]), None);
    }
}
