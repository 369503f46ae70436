//! The block device: requests on a disk.
//!
//! Law: contents are copied once, between guest memory and the disk, if the disk takes foreign memory
//! and the request consists of whole sectors of the disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use draconis_device::{
    Disk, Error as DiskError, Extent, Group, Properties, Ticket, UnflushedChanges, Write, ZeroStep,
    ZeroedSpace,
};
use draconis_types::lock::{Mutex, RwLock};
use draconis_types::{Block, ExportActivity, PrivateBuffer};

use crate::memory::{GuestBlock, Memory, Segment, take_front, total_len, write_segments};
use crate::request::{Command, DiskRange, ID_BYTES, Request, SECTOR_BYTES, Status};

/// Maximum length of one read or write of the disk, in bytes.
const PIECE_BYTES: u64 = 1 << 20;

/// A disk as a virtio block device.
pub struct Device {
    disk: Arc<dyn Disk>,
    properties: Properties,
    serial: [u8; ID_BYTES],
    unflushed: UnflushedChanges,
    /// Held alone by a write that reads a sector before it changes a part of it.
    sectors: RwLock<()>,
    /// True if a write is answered only once it is durable.
    has_durable_writes: bool,
    /// Identity of a disk that exists only as long as this process.
    disk_id: Option<u64>,
    activity: Mutex<ExportActivity>,
    /// True once requests may be left to a successor.
    is_stopping: AtomicBool,
}

/// Result of a request.
pub(crate) enum Outcome {
    /// Status, and the number of bytes of contents that the guest gets.
    Done(Status, u32),
    /// The device stops: a successor carries the request out.
    Abandoned,
}

/// Counts a connected front end.
pub(crate) struct ClientCount<'d>(&'d Device);

impl Drop for ClientCount<'_> {
    fn drop(&mut self) {
        self.0.activity.lock().clients -= 1;
    }
}

/// Reason for not carrying a request out.
enum Failure {
    Status(Status),
    Abandoned,
}

impl Device {
    /// Creates a device of all of `disk`. The guest sees the first 20 bytes of `serial`.
    pub fn new(disk: Arc<dyn Disk>, serial: &str) -> Self {
        let mut bytes = [0; ID_BYTES];
        bytes.iter_mut().zip(serial.bytes()).for_each(|(to, from)| *to = from);
        Self {
            properties: disk.properties(),
            disk,
            serial: bytes,
            unflushed: UnflushedChanges::default(),
            sectors: RwLock::new(()),
            has_durable_writes: false,
            disk_id: None,
            activity: Mutex::default(),
            is_stopping: AtomicBool::new(false),
        }
    }

    /// Answers writes only once they are durable, for a disk that loses visible writes when its
    /// process dies. The guest goes on with a successor and would miss them.
    #[must_use]
    pub fn with_durable_writes(self) -> Self {
        Self { has_durable_writes: true, ..self }
    }

    pub(crate) fn has_durable_writes(&self) -> bool {
        self.has_durable_writes
    }

    /// Refuses machines that go on from another disk than `id`, for a disk that is not there before or
    /// after this process. The in-flight area of a front end has the identity.
    #[must_use]
    pub fn with_disk_id(self, id: u64) -> Self {
        Self { disk_id: Some(id), ..self }
    }

    pub(crate) fn disk_id(&self) -> Option<u64> {
        self.disk_id
    }

    /// Returns what front ends have done, without names of clones.
    pub fn activity(&self) -> ExportActivity {
        self.activity.lock().clone()
    }

    pub(crate) fn count_client(&self) -> ClientCount<'_> {
        self.activity.lock().clients += 1;
        ClientCount(self)
    }

    pub(crate) fn record_error(&self, error: String) {
        self.activity.lock().last_error = Some(error);
    }

    /// Returns the sizes and guarantees of the disk.
    pub fn properties(&self) -> &Properties {
        &self.properties
    }

    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// Error of the first failed write or flush.
    pub fn flush(&self) -> Result<(), DiskError> {
        self.unflushed.flush(&*self.disk, || !self.is_stopping())
    }

    /// Ends the use of the device: a request that waits for an unreachable disk is left to a
    /// successor.
    pub fn stop(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
    }

    fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    /// Carries out a request, except for its status.
    pub(crate) fn execute(
        &self,
        memory: &Memory,
        request: &mut Request,
        is_write_through: bool,
    ) -> Outcome {
        let input = std::mem::take(&mut request.input);
        let output = std::mem::take(&mut request.output);
        let len = total_len(&output) as u32;
        let input_len = total_len(&input);
        let done = match &request.command {
            Err(status) => Err(Failure::Status(*status)),
            Ok(Command::Read { offset }) => self.read(memory, *offset, output).map(|()| len),
            Ok(Command::Write { offset }) => {
                self.write(memory, *offset, input, is_write_through).map(|()| 0)
            }
            Ok(Command::Flush) => self.flush().map_err(|error| self.failure(&error)).map(|()| 0),
            Ok(Command::Id) => Ok(write_segments(memory, &output, &self.serial) as u32),
            Ok(Command::Discard(ranges)) => self.discard(ranges, is_write_through).map(|()| 0),
            Ok(Command::WriteZeroes(ranges)) => {
                self.write_zeroes(ranges, is_write_through).map(|()| 0)
            }
        };
        let mut activity = self.activity.lock();
        activity.requests += 1;
        match (&done, &request.command) {
            (Ok(_), Ok(Command::Read { .. })) => activity.read_bytes += u64::from(len),
            (Ok(_), Ok(Command::Write { .. })) => activity.written_bytes += input_len,
            _ => {}
        }
        drop(activity);
        match done {
            Ok(written) => Outcome::Done(Status::Ok, written),
            Err(Failure::Status(status)) => Outcome::Done(status, 0),
            Err(Failure::Abandoned) => Outcome::Abandoned,
        }
    }

    /// Refuses a range that reaches beyond the last whole sector of 512 bytes.
    fn check_range(&self, offset: u64, len: u64) -> Result<(), Failure> {
        let capacity = self.properties.len_bytes / SECTOR_BYTES * SECTOR_BYTES;
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= capacity);
        if is_inside { Ok(()) } else { Err(Failure::Status(Status::IoError)) }
    }

    /// Refuses what cannot be written. A guest cannot fill the log with that.
    fn check_change(&self, offset: u64, len: u64) -> Result<(), Failure> {
        if self.properties.read_only {
            return Err(Failure::Status(Status::IoError));
        }
        self.check_range(offset, len)
    }

    fn sector_bytes(&self) -> u64 {
        u64::from(self.properties.sector_bytes).max(1)
    }

    fn is_aligned(&self, offset: u64, len: u64) -> bool {
        let sector = self.sector_bytes();
        offset.is_multiple_of(sector) && len.is_multiple_of(sector)
    }

    /// Returns the whole sectors around a range, and the offset of the range in them.
    fn widen_to_sectors(&self, offset: u64, len: u64) -> (Extent, usize) {
        let sector = self.sector_bytes();
        let start = offset - offset % sector;
        let skip = offset - start;
        (Extent::new(start, (skip + len).next_multiple_of(sector)), skip as usize)
    }

    fn read(&self, memory: &Memory, offset: u64, mut into: Vec<Segment>) -> Result<(), Failure> {
        let len = total_len(&into);
        self.check_range(offset, len)?;
        let mut done = 0;
        while done < len {
            let piece = take_front(&mut into, PIECE_BYTES);
            let piece_len = total_len(&piece);
            self.read_piece(memory, offset + done, piece, piece_len)?;
            done += piece_len;
        }
        Ok(())
    }

    fn read_piece(
        &self,
        memory: &Memory,
        offset: u64,
        into: Vec<Segment>,
        len: u64,
    ) -> Result<(), Failure> {
        if !self.is_aligned(offset, len) {
            let (wide, skip) = self.widen_to_sectors(offset, len);
            let bytes = self.read_sectors(wide)?;
            let bytes = bytes.get(skip..skip + len as usize).unwrap_or_default();
            write_segments(memory, &into, bytes);
            return Ok(());
        }
        let block = Block::from_memory(GuestBlock::new(memory, into.clone(), true));
        let answer = self.disk.read_now(Extent::new(offset, len), block);
        let block = answer.map_err(|refused| self.failure(&refused.error))?;
        if block.memory::<GuestBlock>().is_none() {
            // The disk has replaced the block by its own memory.
            write_segments(memory, &into, &block.into_private());
        }
        Ok(())
    }

    /// Reads whole sectors.
    fn read_sectors(&self, at: Extent) -> Result<PrivateBuffer, Failure> {
        let block = Block::from(PrivateBuffer::new_uninitialized(at.len_bytes as usize));
        match self.disk.read_now(at, block) {
            Ok(block) => Ok(block.into_private()),
            Err(refused) => Err(self.failure(&refused.error)),
        }
    }

    fn write(
        &self,
        memory: &Memory,
        offset: u64,
        mut from: Vec<Segment>,
        is_write_through: bool,
    ) -> Result<(), Failure> {
        let len = total_len(&from);
        self.check_change(offset, len)?;
        let (mut done, mut last) = (0, None);
        while done < len {
            let piece = take_front(&mut from, PIECE_BYTES);
            let piece_len = total_len(&piece);
            let block = Block::from_memory(GuestBlock::new(memory, piece, false));
            last = Some(self.write_piece(offset + done, block)?);
            done += piece_len;
        }
        self.wait_written(last, is_write_through)
    }

    fn write_piece(&self, offset: u64, piece: Block) -> Result<Ticket, Failure> {
        let len = piece.len() as u64;
        if self.is_aligned(offset, len) {
            let _shared = self.sectors.read();
            return self.submit(offset, piece);
        }
        let _alone = self.sectors.write();
        // Submitted writes of the same sectors must be visible to the read.
        self.wait_written(self.unflushed.newest(), false)?;
        let (wide, skip) = self.widen_to_sectors(offset, len);
        let mut bytes = self.read_sectors(wide)?;
        piece.copy_out(0, bytes.get_mut(skip..skip + len as usize).unwrap_or_default());
        self.submit(wide.start_bytes, bytes.into())
    }

    fn submit(&self, at_bytes: u64, block: Block) -> Result<Ticket, Failure> {
        let group = Group { writes: vec![Write { at_bytes, block }] };
        match self.disk.submit(group, &[]) {
            Ok(ticket) => {
                self.unflushed.record(ticket);
                Ok(ticket)
            }
            Err(refused) => Err(self.failure(&refused.error)),
        }
    }

    /// Waits until every read sees the write `last`, or until all writes are durable.
    fn wait_written(&self, last: Option<Ticket>, is_write_through: bool) -> Result<(), Failure> {
        let waited = match last {
            _ if is_write_through => self.flush(),
            Some(ticket) => self.disk.wait_visible(ticket),
            None => Ok(()),
        };
        waited.map_err(|error| self.failure(&error))
    }

    fn discard(&self, ranges: &[DiskRange], is_write_through: bool) -> Result<(), Failure> {
        ranges.iter().try_for_each(|range| self.check_change(range.offset, range.len))?;
        let extents: Vec<_> =
            ranges.iter().map(|range| Extent::new(range.offset, range.len)).collect();
        self.disk.discard(&extents, &[]).map_err(|error| self.failure(&error))?;
        self.wait_written(None, is_write_through)
    }

    /// Makes ranges read as zeros.
    fn write_zeroes(&self, ranges: &[DiskRange], is_write_through: bool) -> Result<(), Failure> {
        ranges.iter().try_for_each(|range| self.check_change(range.offset, range.len))?;
        for DiskRange { offset, len, unmap } in ranges {
            let space = if *unmap { ZeroedSpace::Freed } else { ZeroedSpace::Kept };
            let mut done = 0;
            while done < *len {
                let at = Extent::new(offset + done, len - done);
                let whole = self.sectors.read();
                let step = self.unflushed.zero_start(&*self.disk, at, space, PIECE_BYTES);
                drop(whole);
                done += match step.map_err(|error| self.failure(&error))? {
                    ZeroStep::Done(bytes) => bytes,
                    ZeroStep::Write(bytes) => {
                        let piece = Block::private(bytes as usize);
                        let ticket = self.write_piece(at.start_bytes, piece)?;
                        // At most one piece of zeros is in memory.
                        self.wait_written(Some(ticket), false)?;
                        bytes
                    }
                };
            }
        }
        self.wait_written(self.unflushed.newest(), is_write_through)
    }

    fn failure(&self, error: &DiskError) -> Failure {
        if self.is_stopping() && matches!(error, DiskError::Unreachable(_)) {
            return Failure::Abandoned;
        }
        // The protocol has no status for a full disk.
        let what =
            if error.is_no_space() { "it is full, and guests get an I/O error: " } else { "" };
        log::warn!("{what}{error}");
        // The error that stopped the disk says why.
        let mut activity = self.activity.lock();
        if activity.last_error.is_none() || !matches!(error, DiskError::Stopped) {
            activity.last_error = Some(format!("{what}{error}"));
        }
        Failure::Status(Status::IoError)
    }
}
