//! Writable disks in image files.
//!
//! ```text
//!   chain ──▶ AllocationTables: is each unit writable in place? ─no─▶ allocate, copy old contents
//!         ──▶ tables map the new units ──▶ the same chain, at the file offsets of its units
//! ```
//! Law 1: a chain of the disk is one chain of the file, group by group: ordering, atomicity and
//! tickets are those of the file.
//! Law 2: a new unit reads as zeros, and its allocation is durable before a table refers to it. So
//! tables may refer to it before the chain is written: a power cut leaves the old contents, or a
//! part of the new ones.
//! Law 3: old contents that are copied (from a compressed cluster or the backing file) are durable
//! in the new unit before a table refers to it.
//! Law 4: after a failed write or an inconsistency nothing more is written.

#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use draconis_device::{
    AllocationRun, Atomic, ChainBounds, Disk, Error as DiskError, Extent, Group, Pending,
    Properties, ReadAnswer, Refused, SubmitOptions, Ticket, Urgency, Write,
};
use draconis_types::Block;
use draconis_types::lock::{Mutex, MutexGuard};

use crate::image_file::ImageFile;
use crate::image_map::{DecompressedCache, Location, allocation_of};
use crate::read_only::SECTOR_BYTES;
use crate::{Error, SessionDisk};

/// Allocation tables of an image: map disk offsets to file offsets.
pub(crate) trait AllocationTables: Send {
    /// Returns the length of the disk.
    fn len_bytes(&self) -> u64;

    /// Returns the allocation unit: the cluster or block size.
    fn unit_bytes(&self) -> u64;

    /// Returns the location of disk offset `at`, and the number of bytes (at least 1) it holds for.
    fn find(&mut self, file: &ImageFile, at: u64) -> Result<(Location, u64), Error>;

    /// Decompresses a cluster.
    fn decompress_chunk(&self, file: &ImageFile, piece: u64) -> Result<Vec<u8>, Error>;

    /// Returns the file offset of the unit of disk offset `at`, if it can be overwritten in place.
    fn writable_offset(&mut self, file: &ImageFile, at: u64) -> Result<Option<u64>, Error>;

    /// Begins a session, if none is open, before the first change of a chain.
    fn begin_session(&mut self, out: &mut MetadataWriter<'_>) -> Result<(), Error>;

    /// Allocates a zeroed unit for disk offset `at`. Tables that refer to it must depend on the
    /// tickets added to `out`.
    fn allocate_unit(&mut self, out: &mut MetadataWriter<'_>, at: u64) -> Result<u64, Error>;

    /// Maps disk offset `at` to the allocated unit `place`.
    fn map_unit(&mut self, out: &mut MetadataWriter<'_>, at: u64, place: u64) -> Result<(), Error>;

    /// Submits the changed table sectors, which depend on the tickets added to `out`.
    fn submit_tables(&mut self, out: &mut MetadataWriter<'_>) -> Result<(), Error>;

    /// Ends the session: marks the file as cleanly closed. All earlier writes are durable.
    fn close_session(&mut self, out: &mut MetadataWriter<'_>) -> Result<(), Error>;

    /// Releases the units of `unused` bytes, moves the rest to the front of the file, and returns
    /// the required length of the file. `unused` is sorted. No session is open before and after.
    fn compact(
        &mut self,
        out: &mut MetadataWriter<'_>,
        unused: Vec<Range<u64>>,
    ) -> Result<Option<u64>, Error>;
}

/// Writer of table metadata, which orders writes by their dependencies.
pub(crate) struct MetadataWriter<'a> {
    pub(crate) file: &'a ImageFile,
    newest: &'a mut Ticket,
    /// Dependencies of the next table writes.
    dependencies: Vec<Ticket>,
}

impl<'a> MetadataWriter<'a> {
    pub(crate) fn new(file: &'a ImageFile, newest: &'a mut Ticket) -> Self {
        Self { file, newest, dependencies: vec![] }
    }

    /// Submits groups, each ordered after the previous one; returns the ticket of the last.
    pub(crate) fn submit_chain(
        &mut self,
        chain: Vec<Vec<(u64, Vec<u8>)>>,
    ) -> Result<Ticket, Error> {
        self.submit_chain_after(chain, &[])
    }

    fn submit_chain_after(
        &mut self,
        chain: Vec<Vec<(u64, Vec<u8>)>>,
        after: &[Ticket],
    ) -> Result<Ticket, Error> {
        let write =
            |(at_bytes, bytes): (u64, Vec<u8>)| Write { at_bytes, block: block_from(&bytes) };
        let group = |writes: Vec<_>| Group { writes: writes.into_iter().map(write).collect() };
        let chain: Vec<Group> = chain.into_iter().map(group).collect();
        let tickets =
            self.file.disk().submit_chain(chain, after).map_err(|refused| refused.error)?;
        if let Some(last) = tickets.last() {
            *self.newest = (*self.newest).max(*last);
        }
        Ok(*self.newest)
    }

    /// Submits one group, ordered after the tickets `after`.
    pub(crate) fn submit_group_after(
        &mut self,
        writes: Vec<(u64, Vec<u8>)>,
        after: &[Ticket],
    ) -> Result<Ticket, Error> {
        self.submit_chain_after(vec![writes], after)
    }

    /// Takes the dependencies of the next table writes.
    pub(crate) fn take_dependencies(&mut self) -> Vec<Ticket> {
        std::mem::take(&mut self.dependencies)
    }

    /// Makes the next table writes depend on `ticket`.
    pub(crate) fn add_dependency(&mut self, ticket: Ticket) {
        if !self.dependencies.contains(&ticket) {
            self.dependencies.push(ticket);
        }
    }

    /// Waits until all submitted writes are durable.
    pub(crate) fn wait(&self) -> Result<(), Error> {
        match *self.newest {
            Ticket(0) => Ok(()),
            newest => Ok(self.file.disk().wait_durable(newest)?),
        }
    }
}

struct ImageState<T> {
    tables: T,
    /// Newest ticket of the file.
    newest: Ticket,
    stopped: bool,
}

/// Writable disk in an image file.
pub(crate) struct WritableImage<T: AllocationTables> {
    file: ImageFile,
    backing: Option<Arc<dyn Disk>>,
    properties: Properties,
    unit_bytes: u64,
    decompressed: DecompressedCache,
    state: Mutex<ImageState<T>>,
}

/// Part of a write: file offset, offset in the block, length.
type WriteSlice = (u64, u64, u64);

/// Slices of each write of each group.
type WritePlan = Vec<Vec<Vec<WriteSlice>>>;

/// Write whose block was moved as a whole: indexes in the caller's chain and in the file's.
struct WriteOrigin {
    in_chain: (usize, usize),
    in_file: (usize, usize),
}

impl<T: AllocationTables> WritableImage<T> {
    pub(crate) fn new(file: ImageFile, tables: T, backing: Option<Arc<dyn Disk>>) -> Self {
        let of_file = file.disk().properties();
        let sector_bytes = of_file.sector_bytes.max(SECTOR_BYTES);
        let len = tables.len_bytes();
        let properties = Properties {
            len_bytes: len - len % u64::from(sector_bytes),
            sector_bytes,
            atomic: match of_file.atomic {
                Atomic::None => Atomic::None,
                // The group does not cover the copied contents of a new unit.
                Atomic::AgainstDeath | Atomic::AgainstPowerCut => Atomic::AgainstDeath,
            },
            ..of_file
        };
        let unit_bytes = tables.unit_bytes();
        let state = Mutex::new(ImageState { tables, newest: Ticket(0), stopped: false });
        Self {
            file,
            backing,
            properties,
            unit_bytes,
            decompressed: DecompressedCache::default(),
            state,
        }
    }

    fn lock(&self) -> MutexGuard<'_, ImageState<T>> {
        self.state.lock()
    }

    /// Returns the locations of a range; locations adjacent in the file are merged.
    fn locate_range(
        &self,
        tables: &mut T,
        at: u64,
        len: u64,
    ) -> Result<Vec<(Location, u64)>, Error> {
        let mut places: Vec<(Location, u64)> = vec![];
        let mut done = 0;
        while done < len {
            let (place, run) = tables.find(&self.file, at + done)?;
            let run = run.clamp(1, len - done);
            match (places.last_mut(), place) {
                (Some((Location::Zeros, count)), Location::Zeros) => *count += run,
                (Some((Location::File(from), count)), Location::File(next))
                    if *from + *count == next =>
                {
                    *count += run;
                }
                (Some((Location::Backing(from), count)), Location::Backing(next))
                    if *from + *count == next =>
                {
                    *count += run;
                }
                _ => places.push((place, run)),
            }
            done += run;
        }
        Ok(places)
    }

    fn fill(
        &self,
        places: &[(Location, u64)],
        into: &mut [u8],
        unpack: &mut dyn FnMut(u64) -> Result<Vec<u8>, Error>,
    ) -> Result<(), Error> {
        let mut rest = into;
        for (place, run) in places {
            let len = rest.len().min(*run as usize);
            let (room, behind) = rest.split_at_mut(len);
            self.decompressed.read(&self.file, self.backing.as_ref(), *place, room, unpack)?;
            rest = behind;
        }
        Ok(())
    }

    /// Finds the file offsets of all writes of a chain, and allocates missing units.
    fn plan(&self, state: &mut ImageState<T>, chain: &[Group]) -> Result<WritePlan, Error> {
        let ImageState { tables, newest, .. } = state;
        let mut out = MetadataWriter::new(&self.file, newest);
        let mut plan = vec![];
        tables.begin_session(&mut out)?;
        for group in chain {
            let mut of_group = vec![];
            for write in &group.writes {
                let len = write.block.len() as u64;
                let mut parts: Vec<WriteSlice> = vec![];
                for (at, here) in self.split_at_units(write.at_bytes, len) {
                    let (skip, done) = (at % self.unit_bytes, at - write.at_bytes);
                    let place = match tables.writable_offset(&self.file, at)? {
                        Some(place) => place,
                        None => self.allocate_and_copy(tables, &mut out, at - skip)?,
                    };
                    match parts.last_mut() {
                        Some((to, _, count)) if *to + *count == place + skip => *count += here,
                        _ => parts.push((place + skip, done, here)),
                    }
                }
                of_group.push(parts);
            }
            plan.push(of_group);
        }
        tables.submit_tables(&mut out)?;
        Ok(plan)
    }

    /// Finds the file offsets of a range that becomes a hole. Units of which nothing remains get new
    /// ones, which are zeros.
    fn plan_hole(&self, state: &mut ImageState<T>, at: Extent) -> Result<Vec<Extent>, Error> {
        let ImageState { tables, newest, .. } = state;
        let mut out = MetadataWriter::new(&self.file, newest);
        let mut places = vec![];
        tables.begin_session(&mut out)?;
        for (start, here) in self.split_at_units(at.start_bytes, at.len_bytes) {
            let skip = start % self.unit_bytes;
            let place = match tables.writable_offset(&self.file, start)? {
                Some(place) => place,
                None if here == self.unit_bytes => {
                    let place = tables.allocate_unit(&mut out, start)?;
                    tables.map_unit(&mut out, start, place)?;
                    continue;
                }
                None => self.allocate_and_copy(tables, &mut out, start - skip)?,
            };
            places.push(Extent::new(place + skip, here));
        }
        tables.submit_tables(&mut out)?;
        Ok(places)
    }

    /// Splits a range at the units; returns offsets and lengths.
    fn split_at_units(&self, start: u64, len: u64) -> impl Iterator<Item = (u64, u64)> {
        let (unit, mut done) = (self.unit_bytes, 0);
        std::iter::from_fn(move || {
            let at = start + done;
            let here = (unit - at % unit).min(len - done);
            done += here;
            (here > 0).then_some((at, here))
        })
    }

    /// Allocates a unit and copies its old contents.
    fn allocate_and_copy(
        &self,
        tables: &mut T,
        out: &mut MetadataWriter<'_>,
        at: u64,
    ) -> Result<u64, Error> {
        let len = self.unit_bytes.min(tables.len_bytes().saturating_sub(at));
        let places = self.locate_range(tables, at, len)?;
        let has_behind = self.backing.is_some();
        let is_zeros = |(place, _): &(Location, u64)| match place {
            Location::Zeros => true,
            Location::Backing(_) => !has_behind,
            Location::File(_) | Location::Compressed { .. } => false,
        };
        let place = tables.allocate_unit(out, at)?;
        if !places.iter().all(is_zeros) {
            let mut held = vec![0; self.unit_bytes as usize];
            let room = held.get_mut(..len as usize).unwrap_or_default();
            self.fill(&places, room, &mut |piece| tables.decompress_chunk(&self.file, piece))?;
            let ticket = out.submit_chain(vec![vec![(place, held)]])?;
            // From now on reads go to the new unit.
            self.file.disk().wait_visible(ticket)?;
            out.add_dependency(ticket);
        }
        tables.map_unit(out, at, place)?;
        Ok(place)
    }

    /// Splits the writes of a chain at the units. Returns the chain for the file, and the origin of
    /// each block that was moved as a whole.
    fn split_chain(chain: &mut [Group], plan: &WritePlan) -> (Vec<Group>, Vec<WriteOrigin>) {
        let (mut groups, mut origins) = (vec![], vec![]);
        for (group, parts) in plan.iter().enumerate() {
            let mut writes = vec![];
            let ours = chain.get_mut(group).map(|it| &mut it.writes[..]).unwrap_or_default();
            for (nth, (write, parts)) in ours.iter_mut().zip(parts).enumerate() {
                if let [(at_bytes, _, _)] = parts[..] {
                    origins.push(WriteOrigin {
                        in_chain: (group, nth),
                        in_file: (group, writes.len()),
                    });
                    writes.push(Write { at_bytes, block: write.block.take() });
                    continue;
                }
                for (at_bytes, from, count) in parts {
                    let mut block = Block::private(*count as usize);
                    block.copy_from(0, &write.block, *from as usize, *count as usize);
                    writes.push(Write { at_bytes: *at_bytes, block });
                }
            }
            groups.push(Group { writes });
        }
        (groups, origins)
    }
}

/// Sorts ranges and merges adjacent and overlapping ones.
fn merge_ranges(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.retain(|range| !range.is_empty());
    ranges.sort_unstable_by_key(|range| range.start);
    let mut all: Vec<Range<u64>> = vec![];
    for range in ranges {
        match all.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => all.push(range),
        }
    }
    all
}

fn block_from(bytes: &[u8]) -> Block {
    let mut block = Block::private(bytes.len());
    block.copy_in(0, bytes);
    block
}

/// Moves refused blocks back to their writes; `None` if the payload was not returned.
fn restore_chain(
    mut chain: Vec<Group>,
    origins: &[WriteOrigin],
    refused: Option<Vec<Group>>,
) -> Option<Vec<Group>> {
    let mut refused = refused?;
    for WriteOrigin { in_chain, in_file } in origins {
        let block = refused.get_mut(in_file.0)?.writes.get_mut(in_file.1)?.block.take();
        chain.get_mut(in_chain.0)?.writes.get_mut(in_chain.1)?.block = block;
    }
    Some(chain)
}

impl<T: AllocationTables> draconis_device::ForwardingDisk for WritableImage<T> {
    type Inner = dyn Disk;

    fn inner_disk(&self) -> &Self::Inner {
        &**self.file.disk()
    }

    fn properties(&self) -> Properties {
        self.properties
    }

    fn read(&self, at: Extent, mut into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        if let Err(error) = self.properties.check_range(at, into.len()) {
            return Pending::ready(Err(Refused { payload: Some(into), error }));
        }
        let places = self.locate_range(&mut self.lock().tables, at.start_bytes, at.len_bytes);
        if let Ok([(Location::File(from), _)]) = places.as_deref() {
            return self.inner_disk().read(Extent::new(*from, at.len_bytes), into, urgency);
        }
        let done = places.and_then(|places| {
            let mut bytes = vec![0; into.len()];
            let mut unpack = |piece| self.lock().tables.decompress_chunk(&self.file, piece);
            self.fill(&places, &mut bytes, &mut unpack)?;
            into.copy_in(0, &bytes);
            Ok(())
        });
        Pending::ready(match done {
            Ok(()) => Ok(into),
            Err(error) => Err(Refused { payload: Some(into), error: error.into_read_error(at) }),
        })
    }

    fn max_len_bytes(&self) -> u64 {
        self.properties.len_bytes
    }

    fn submit_with(
        &self,
        mut chain: Vec<Group>,
        after: &[Ticket],
        terms: SubmitOptions,
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let bounds = self.inner_disk().chain_bounds();
        let checked = match self.properties.check_chain(&chain) {
            Ok(()) if !ChainBounds::size_of_chain(&chain).is_within(bounds) => {
                Err(DiskError::ChainTooLarge { bounds })
            }
            checked => checked,
        };
        let mut state = self.lock();
        let unknown = after.iter().find(|ticket| **ticket > state.newest).copied();
        let refuse = match (checked, unknown) {
            (Err(error), _) => Some(error),
            (Ok(()), Some(ticket)) => Some(DiskError::UnknownTicket(ticket)),
            (Ok(()), None) => state.stopped.then_some(DiskError::Stopped),
        };
        if let Some(error) = refuse {
            return Err(Refused { payload: Some(chain), error });
        }
        let plan = match self.plan(&mut state, &chain) {
            Ok(plan) => plan,
            Err(error) => {
                state.stopped = true;
                return Err(Refused { payload: Some(chain), error: error.into_write_error() });
            }
        };
        drop(state);
        let (groups, origins) = Self::split_chain(&mut chain, &plan);
        match self.inner_disk().submit_with(groups, after, terms) {
            Ok(tickets) => {
                let mut state = self.lock();
                state.newest = tickets.last().copied().unwrap_or(state.newest).max(state.newest);
                Ok(tickets)
            }
            Err(Refused { payload, error }) => {
                Err(Refused { payload: restore_chain(chain, &origins, payload), error })
            }
        }
    }

    /// Allocated units stay allocated; their file space is discarded.
    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), DiskError> {
        self.properties.check_extents(extents)?;
        let mut state = self.lock();
        if let Some(unknown) = after.iter().find(|ticket| **ticket > state.newest) {
            return Err(DiskError::UnknownTicket(*unknown));
        }
        if !self.properties.discards || state.stopped {
            return Ok(());
        }
        let mut there = vec![];
        let sector = u64::from(self.properties.sector_bytes);
        for whole in extents.iter().filter_map(|extent| extent.inner_aligned_extent(sector)) {
            for (at, here) in self.split_at_units(whole.start_bytes, whole.len_bytes) {
                // An error is no reason to fail: a discard is a hint.
                if let Ok(Some(place)) = state.tables.writable_offset(&self.file, at) {
                    there.push(Extent::new(place + at % self.unit_bytes, here));
                }
            }
        }
        self.inner_disk().discard(&there, after)
    }

    /// A unit that is not writable in place gets a new one, which is a hole of the file.
    fn punch_hole(&self, at: Extent) -> Result<Option<Ticket>, DiskError> {
        self.properties.check_range(at, at.len_bytes as usize)?;
        if !self.properties.discards {
            return Ok(None);
        }
        let mut state = self.lock();
        if state.stopped {
            return Err(DiskError::Stopped);
        }
        let places = match self.plan_hole(&mut state, at) {
            Ok(places) => places,
            Err(error) => {
                state.stopped = true;
                return Err(error.into_write_error());
            }
        };
        for place in places {
            match self.inner_disk().punch_hole(place)? {
                Some(ticket) => state.newest = state.newest.max(ticket),
                None => return Ok(None),
            }
        }
        Ok(Some(state.newest))
    }

    fn allocation_run(&self, at: Extent) -> Result<AllocationRun, DiskError> {
        self.properties.check_extents(&[at])?;
        let found = self.lock().tables.find(&self.file, at.start_bytes);
        if let Ok((Location::File(from), run)) = found {
            return self.inner_disk().allocation_run(Extent::new(from, run.min(at.len_bytes)));
        }
        let run =
            found.and_then(|(place, run)| allocation_of(place, run, at, self.backing.as_ref()));
        run.map_err(|error| error.into_read_error(at))
    }
}

impl<T: AllocationTables> WritableImage<T> {
    /// Ends the session and then calls `more`.
    fn end_session_then<A>(
        &self,
        more: impl FnOnce(&mut T, &mut MetadataWriter<'_>) -> Result<A, Error>,
    ) -> Result<A, DiskError> {
        let mut state = self.lock();
        let ImageState { tables, newest, stopped } = &mut *state;
        if *stopped {
            return Err(DiskError::Stopped);
        }
        let mut out = MetadataWriter::new(&self.file, newest);
        let rested =
            out.wait().and_then(|()| tables.close_session(&mut out)).and_then(|()| out.wait());
        let done = rested.and_then(|()| more(tables, &mut out));
        *stopped |= done.is_err();
        done.map_err(Error::into_write_error)
    }
}

impl<T: AllocationTables> SessionDisk for WritableImage<T> {
    fn close_session(&self) -> Result<(), DiskError> {
        self.end_session_then(|_, _| Ok(()))
    }

    fn compact(&self, unused: Vec<Range<u64>>) -> Result<Option<u64>, DiskError> {
        let compacted =
            self.end_session_then(|tables, out| tables.compact(out, merge_ranges(unused)));
        self.decompressed.clear();
        compacted
    }
}

impl<T: AllocationTables> Drop for WritableImage<T> {
    fn drop(&mut self) {
        match self.close_session() {
            Ok(()) | Err(DiskError::Stopped) => {}
            Err(error) => log::error!("an image stays marked as in use: {error}"),
        }
    }
}
