//! Exports: disks as NBD commands see them, of any offset and length.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use draconis_device::{
    AllocationRun, Disk, Error as DiskError, Extent, Group, Properties, Ticket, UnflushedChanges,
    Urgency, Write, ZeroStep, ZeroedSpace, wait_durable_while,
};
use draconis_types::lock::{Mutex, RwLock};
use draconis_types::{Block, ExportActivity, PrivateBuffer};
use rustix::io::Errno;

use crate::wire::ErrorCode;

/// Contents of a request are in pieces of this size.
pub(crate) const PIECE_BYTES: usize = 1 << 20;
/// Maximum number of descriptors of a BLOCK_STATUS reply.
const MAX_STATUS_RUNS: usize = 1024;
/// Maximum bytes that CACHE reads; it is a hint.
const MAX_CACHE_BYTES: u64 = 256 << 20;

/// Creates a writable disk for each connection of an export.
pub trait CloneSource: Send + Sync {
    /// Creates a clone: its name, for people, and its disk. Dropping the disk ends its use.
    ///
    /// # Errors
    /// The reason, for people.
    fn create_clone(&self) -> Result<(String, Arc<dyn Disk>), String>;
}

/// Counts the client of a connection.
pub(crate) struct ClientCount<'e>(&'e Export);

impl Drop for ClientCount<'_> {
    fn drop(&mut self) {
        let mut activity = self.0.activity.lock();
        activity.clients -= 1;
        activity.clones.retain(|clone| !self.0.is_clone || *clone != self.0.description);
    }
}

/// A disk that clients can choose by name. Its connections share it, or get clones of it.
pub struct Export {
    name: String,
    description: String,
    disk: Arc<dyn Disk>,
    properties: Properties,
    clones: Option<Box<dyn CloneSource>>,
    /// True if only one connection ever uses the disk.
    is_clone: bool,
    unflushed: UnflushedChanges,
    /// Held alone by a write that reads a sector before it changes a part of it.
    sectors: RwLock<()>,
    /// Error of the write after which the disk takes no more.
    failure: Mutex<Option<ErrorCode>>,
    /// An export shares it with its clones.
    activity: Arc<Mutex<ExportActivity>>,
    /// True once no more requests are read. An export shares it with its clones.
    is_stopping: Arc<AtomicBool>,
}

impl Export {
    /// Creates an export of all of `disk`.
    pub fn new(name: String, description: String, disk: Arc<dyn Disk>) -> Self {
        Self {
            name,
            description,
            properties: disk.properties(),
            disk,
            clones: None,
            is_clone: false,
            unflushed: UnflushedChanges::default(),
            sectors: RwLock::new(()),
            failure: Mutex::new(None),
            activity: Arc::default(),
            is_stopping: Arc::default(),
        }
    }

    /// Creates an export that gives each connection a clone of `disk`. `disk` itself is not used.
    pub fn with_clones(
        name: String,
        description: String,
        disk: Arc<dyn Disk>,
        clones: Box<dyn CloneSource>,
    ) -> Self {
        let mut export = Self::new(name, description, disk);
        export.properties.read_only = false;
        export.clones = Some(clones);
        export
    }

    /// Returns the export for a connection that has chosen this one.
    pub(crate) fn for_connection(&self) -> Result<ChosenExport<'_>, String> {
        let Some(clones) = &self.clones else { return Ok(ChosenExport::Shared(self)) };
        let (description, disk) = clones.create_clone().inspect_err(|why| {
            self.activity.lock().last_error = Some(format!("no clone for a client: {why}"));
        })?;
        let mut export = Self::new(self.name.clone(), description, disk);
        export.is_clone = true;
        export.is_stopping = self.is_stopping.clone();
        export.activity = self.activity.clone();
        Ok(ChosenExport::Clone(Box::new(export)))
    }

    /// Returns true if a flush covers the writes of every connection that the client opens.
    pub(crate) fn can_multi_conn(&self) -> bool {
        self.clones.is_none() && !self.is_clone
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the description, for people.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Returns the length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.properties.len_bytes
    }

    /// Returns true if nothing can be written.
    pub fn is_read_only(&self) -> bool {
        self.properties.read_only
    }

    /// Returns what clients have done; of an export with clones also what they did to these.
    pub fn activity(&self) -> ExportActivity {
        self.activity.lock().clone()
    }

    pub(crate) fn count_client(&self) -> ClientCount<'_> {
        let mut activity = self.activity.lock();
        activity.clients += 1;
        if self.is_clone {
            activity.clones.push(self.description.clone());
        }
        ClientCount(self)
    }

    pub(crate) fn count_request(&self, read_bytes: u64, written_bytes: u64) {
        let mut activity = self.activity.lock();
        activity.requests += 1;
        activity.read_bytes += read_bytes;
        activity.written_bytes += written_bytes;
    }

    /// Returns true if a request can wait until a server is back.
    pub(crate) fn can_be_unreachable(&self) -> bool {
        self.disk.can_be_unreachable()
    }

    pub(crate) fn is_rotational(&self) -> bool {
        self.properties.rotational
    }

    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// Error of the first failed write or flush.
    pub fn flush(&self) -> Result<(), DiskError> {
        self.unflushed.flush(&*self.disk, || !self.is_stopping())
    }

    /// [`Export::flush`], with the protocol's error.
    pub(crate) fn flush_for_client(&self) -> Result<(), ErrorCode> {
        self.flush().map_err(|error| self.error_code(&error))
    }

    /// Ends the use of the export: connections read no more requests once they are woken, and a
    /// flush of an unreachable disk fails instead of waiting until the disk is back.
    pub fn stop(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    fn wait_durable(&self, ticket: Ticket) -> Result<(), DiskError> {
        wait_durable_while(|| self.disk.wait_durable(ticket), || !self.is_stopping())
    }

    /// Returns true if `len` bytes at `offset` are inside the export.
    pub(crate) fn contains(&self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.properties.len_bytes)
    }

    /// Returns the whole sectors around a range, and the offset of the range in them.
    fn widen_to_sectors(&self, offset: u64, len: usize) -> (Extent, usize) {
        let sector = u64::from(self.properties.sector_bytes).max(1);
        let start = offset - offset % sector;
        let skip = offset - start;
        let wide = (skip + len as u64).next_multiple_of(sector);
        (Extent::new(start, wide), skip as usize)
    }

    fn is_aligned(&self, offset: u64, len: u64) -> bool {
        let sector = u64::from(self.properties.sector_bytes).max(1);
        offset.is_multiple_of(sector) && len.is_multiple_of(sector)
    }

    /// Reads whole sectors.
    fn read_sectors(&self, at: Extent) -> Result<PrivateBuffer, ErrorCode> {
        let block = Block::from(PrivateBuffer::new_uninitialized(at.len_bytes as usize));
        match self.disk.read_now(at, block) {
            Ok(block) => Ok(block.into_private()),
            Err(refused) => Err(self.error_code(&refused.error)),
        }
    }

    /// Reads up to [`PIECE_BYTES`].
    fn read_piece(&self, offset: u64, len: usize) -> Result<PrivateBuffer, ErrorCode> {
        if self.is_aligned(offset, len as u64) {
            return self.read_sectors(Extent::new(offset, len as u64));
        }
        let (wide, skip) = self.widen_to_sectors(offset, len);
        let mut bytes = self.read_sectors(wide)?;
        bytes.copy_within(skip..skip + len, 0);
        bytes.truncate(len);
        Ok(bytes)
    }

    /// Reads a range, as pieces.
    pub(crate) fn read(&self, offset: u64, len: u64) -> Result<Vec<PrivateBuffer>, ErrorCode> {
        let pieces = split(offset, len);
        pieces.map(|(at, len)| self.read_piece(at, len)).collect()
    }

    /// Writes `pieces`, one after the other from `offset`. Returns once every read sees them, or with
    /// `fua` once they are durable.
    pub(crate) fn write(
        &self,
        offset: u64,
        pieces: Vec<PrivateBuffer>,
        fua: bool,
    ) -> Result<(), ErrorCode> {
        let last = self.submit_write(offset, pieces)?;
        self.wait_written(last, fua)
    }

    /// Submits the writes of `pieces`, one after the other from `offset`; returns the last ticket.
    pub(crate) fn submit_write(
        &self,
        offset: u64,
        pieces: Vec<PrivateBuffer>,
    ) -> Result<Option<Ticket>, ErrorCode> {
        let mut at = offset;
        let mut last = None;
        for piece in pieces {
            let len = piece.len() as u64;
            last = Some(self.write_piece(at, piece)?);
            at += len;
        }
        Ok(last)
    }

    /// Waits until every read sees the write `last`, or with `fua` until it is durable.
    pub(crate) fn wait_written(&self, last: Option<Ticket>, fua: bool) -> Result<(), ErrorCode> {
        let waited = match last {
            Some(ticket) if fua => self.wait_durable(ticket),
            Some(ticket) => self.disk.wait_visible(ticket),
            None if fua => self.flush(),
            None => Ok(()),
        };
        waited.map_err(|error| self.error_code(&error))
    }

    fn write_piece(&self, offset: u64, piece: PrivateBuffer) -> Result<Ticket, ErrorCode> {
        if self.is_aligned(offset, piece.len() as u64) {
            let _shared = self.sectors.read();
            return self.submit(offset, piece);
        }
        let _alone = self.sectors.write();
        // Submitted writes of the same sectors must be visible to the read.
        self.wait_written(self.unflushed.newest(), false)?;
        let (wide, skip) = self.widen_to_sectors(offset, piece.len());
        let mut bytes = self.read_sectors(wide)?;
        if let Some(room) = bytes.get_mut(skip..skip + piece.len()) {
            room.copy_from_slice(&piece);
        }
        self.submit(wide.start_bytes, bytes)
    }

    fn submit(&self, at_bytes: u64, bytes: PrivateBuffer) -> Result<Ticket, ErrorCode> {
        let group = Group { writes: vec![Write { at_bytes, block: bytes.into() }] };
        match self.disk.submit(group, &[]) {
            Ok(ticket) => {
                self.unflushed.record(ticket);
                Ok(ticket)
            }
            Err(refused) => Err(self.error_code(&refused.error)),
        }
    }

    /// Makes a range read as zeros. With `fast`, refuses a range that is not all holes.
    pub(crate) fn write_zeroes(
        &self,
        offset: u64,
        len: u64,
        space: ZeroedSpace,
        fast: bool,
        fua: bool,
    ) -> Result<(), ErrorCode> {
        if fast {
            let mut done = 0;
            while done < len {
                let run = self.allocation_run(offset + done, len - done)?;
                if !run.is_hole || space == ZeroedSpace::Allocated {
                    return Err(ErrorCode::NotSup);
                }
                done += run.len_bytes;
            }
        }
        let mut done = 0;
        while done < len {
            // Extended headers allow ranges that take hours.
            if self.is_stopping() {
                return Err(ErrorCode::Shutdown);
            }
            let at = Extent::new(offset + done, len - done);
            let whole = self.sectors.read();
            let step = self.unflushed.zero_start(&*self.disk, at, space, PIECE_BYTES as u64);
            drop(whole);
            done += match step.map_err(|error| self.error_code(&error))? {
                ZeroStep::Done(bytes) => bytes,
                ZeroStep::Write(bytes) => {
                    let piece = PrivateBuffer::new(bytes as usize);
                    let ticket = self.write_piece(at.start_bytes, piece)?;
                    // At most one piece of zeros is in memory.
                    self.wait_written(Some(ticket), false)?;
                    bytes
                }
            };
        }
        match fua {
            true => self.flush_for_client(),
            false => self.wait_written(self.unflushed.newest(), false),
        }
    }

    /// Discards a range: reads may return old bytes or zeros until the next write.
    pub(crate) fn trim(&self, offset: u64, len: u64, fua: bool) -> Result<(), ErrorCode> {
        let discarded = self.disk.discard(&[Extent::new(offset, len)], &[]);
        discarded.map_err(|error| self.error_code(&error))?;
        self.wait_written(None, fua)
    }

    /// Reads a range ahead, as far as is reasonable.
    pub(crate) fn cache(&self, offset: u64, len: u64) -> Result<(), ErrorCode> {
        for (at, len) in split(offset, len.min(MAX_CACHE_BYTES)) {
            let (wide, _) = self.widen_to_sectors(at, len);
            let block = Block::from(PrivateBuffer::new_uninitialized(wide.len_bytes as usize));
            let read = self.disk.read(wide, block, Urgency::Ahead).wait();
            match read {
                Some(Err(refused)) => return Err(self.error_code(&refused.error)),
                Some(Ok(_)) => {}
                None => return Err(ErrorCode::Io),
            }
        }
        Ok(())
    }

    /// Returns the state of the first of `len` bytes, and the number of bytes that have it: at least
    /// 1, at most `len`.
    pub(crate) fn allocation_run(&self, offset: u64, len: u64) -> Result<AllocationRun, ErrorCode> {
        let run = self.disk.allocation_run(Extent::new(offset, len));
        let run = run.map_err(|error| self.error_code(&error))?;
        Ok(AllocationRun { len_bytes: run.len_bytes.clamp(1, len.max(1)), ..run })
    }

    /// Returns the runs of a range from its start, merged; a large or fragmented range not to its
    /// end.
    pub(crate) fn block_status(
        &self,
        offset: u64,
        len: u64,
        only_one: bool,
    ) -> Result<Vec<(u64, bool)>, ErrorCode> {
        let mut runs: Vec<(u64, bool)> = vec![];
        let mut done = 0;
        for _ in 0..MAX_STATUS_RUNS {
            if done >= len {
                break;
            }
            let rest = len - done;
            let run = self.allocation_run(offset + done, rest)?;
            let bytes = run.len_bytes;
            match runs.last_mut() {
                Some((count, is_hole)) if *is_hole == run.is_hole => *count += bytes,
                Some(_) if only_one => break,
                _ => runs.push((bytes, run.is_hole)),
            }
            done += bytes;
        }
        Ok(runs)
    }

    /// Returns the protocol's number of a disk's error.
    fn error_code(&self, error: &DiskError) -> ErrorCode {
        let code = match error {
            DiskError::Io { errno: Errno::NOMEM, .. } => ErrorCode::NoMem,
            error if error.is_no_space() => ErrorCode::NoSpc,
            DiskError::ReadOnly => ErrorCode::Perm,
            DiskError::OutOfRange { .. }
            | DiskError::Misaligned { .. }
            | DiskError::ChainTooLarge { .. } => ErrorCode::Inval,
            // The first error says why.
            DiskError::Stopped => return self.failure.lock().unwrap_or(ErrorCode::Io),
            _ => ErrorCode::Io,
        };
        let mut failure = self.failure.lock();
        if failure.is_none() && matches!(error, DiskError::Io { what: "write" | "flush", .. }) {
            *failure = Some(code);
        }
        drop(failure);
        let of = if self.is_clone { format!("{}: ", self.description) } else { String::new() };
        let what = match code {
            ErrorCode::NoSpc => "it is full, and clients get ENOSPC: ",
            _ => "",
        };
        self.activity.lock().last_error = Some(format!("{of}{what}{error}"));
        log::warn!("export '{}': {of}{what}{error}", self.name);
        code
    }
}

/// The export that a connection uses.
pub enum ChosenExport<'e> {
    /// An export that connections share.
    Shared(&'e Export),
    /// A clone for this connection alone.
    Clone(Box<Export>),
}

impl std::ops::Deref for ChosenExport<'_> {
    type Target = Export;

    fn deref(&self) -> &Export {
        match self {
            Self::Shared(export) => export,
            Self::Clone(export) => export,
        }
    }
}

/// Splits a range into pieces.
pub(crate) fn split(offset: u64, len: u64) -> impl Iterator<Item = (u64, usize)> {
    let starts = (0..len).step_by(PIECE_BYTES);
    starts.map(move |at| (offset + at, (len - at).min(PIECE_BYTES as u64) as usize))
}
