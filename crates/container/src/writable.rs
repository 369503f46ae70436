//! A disk inside a file that is changed where it lies.
//!
//! ```text
//!   chain ──▶ Tables: each unit has its place? ──no──▶ a place is taken, what the unit held goes there
//!         ──▶ tables lead to new places ──▶ the same chain, where its units are in the file
//! ```
//! Law 1: a chain of the disk is one chain of the file, group by group: order, death and tickets are
//! the file's.
//! Law 2: a new place reads as zeros, and is durable as taken before a table leads to it: a cut leaves
//! a unit as it was or with a part of what was written. So tables may lead there ahead of the chain.
//! Law 3: what a unit held elsewhere (packed, or in the file behind) is durable in its new place
//! before a table leads there.
//! Law 4: after a failed write or a contradiction nothing is written any more.

#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use draconis_device::{
    Atomic, ChainBounds, Disk, Error as DiskError, Extent, Group, Pending, Properties, ReadAnswer,
    Refused, SubmitOptions, Ticket, Urgency, Write,
};
use draconis_exchange::heap::Block;

use crate::image_file::ImageFile;
use crate::image_map::{DecompressedCache, Location};
use crate::read_only::SECTOR_BYTES;
use crate::{Error, SessionDisk};

/// Where the file has what, and how that changes.
pub(crate) trait AllocationTables: Send {
    /// Length of the disk.
    fn len_bytes(&self) -> u64;

    /// What gets a place as a whole.
    fn unit_bytes(&self) -> u64;

    /// Where the byte `at` is, and how many from it on are so: at least one.
    fn find(&mut self, file: &ImageFile, at: u64) -> Result<(Location, u64), Error>;

    /// Unpacks a piece.
    fn unpack(&self, file: &ImageFile, piece: u64) -> Result<Vec<u8>, Error>;

    /// Where the unit of the byte `at` is, if it can be written there.
    fn writable_offset(&mut self, file: &ImageFile, at: u64) -> Result<Option<u64>, Error>;

    /// Comes before the first change of a chain.
    fn begin_session(&mut self, out: &mut MetadataWriter<'_>) -> Result<(), Error>;

    /// Takes a place for the unit of the byte `at`, which reads as zeros. What leads to it must
    /// follow all that `out` is told to be followed.
    fn allocate_unit(&mut self, out: &mut MetadataWriter<'_>, at: u64) -> Result<u64, Error>;

    /// Lets the tables lead to a place that was taken.
    fn map_unit(&mut self, out: &mut MetadataWriter<'_>, at: u64, place: u64) -> Result<(), Error>;

    /// Hands over what changed in the tables; it follows all that `out` is told to be followed.
    fn submit_tables(&mut self, out: &mut MetadataWriter<'_>) -> Result<(), Error>;

    /// Brings the file into the state of one that is closed; all that was handed over is
    /// durable.
    fn close_session(&mut self, out: &mut MetadataWriter<'_>) -> Result<(), Error>;

    /// Releases what `unused` bytes of the disk have, moves the rest to the front of the file, and
    /// returns the length that the file needs. `unused` is in order. Comes after [`Tables::rest`], and ends as it does.
    fn compact(
        &mut self,
        out: &mut MetadataWriter<'_>,
        unused: Vec<Range<u64>>,
    ) -> Result<Option<u64>, Error>;
}

/// The way out for what tables write by themselves.
pub(crate) struct MetadataWriter<'a> {
    pub(crate) file: &'a ImageFile,
    newest: &'a mut Ticket,
    /// What tables that lead to new places follow.
    after: Vec<Ticket>,
}

impl MetadataWriter<'_> {
    /// Hands over groups, each behind the one before it; the ticket of the last.
    pub(crate) fn submit(&mut self, chain: Vec<Vec<(u64, Vec<u8>)>>) -> Result<Ticket, Error> {
        self.submit_after(chain, &[])
    }

    fn submit_after(
        &mut self,
        chain: Vec<Vec<(u64, Vec<u8>)>>,
        after: &[Ticket],
    ) -> Result<Ticket, Error> {
        let write = |(at_bytes, bytes): (u64, Vec<u8>)| Write { at_bytes, block: filled(&bytes) };
        let group = |writes: Vec<_>| Group { writes: writes.into_iter().map(write).collect() };
        let chain: Vec<Group> = chain.into_iter().map(group).collect();
        let tickets =
            self.file.disk().submit_chain(chain, after).map_err(|refused| refused.error)?;
        if let Some(last) = tickets.last() {
            *self.newest = (*self.newest).max(*last);
        }
        Ok(*self.newest)
    }

    /// A group by itself, behind those in `after`.
    pub(crate) fn submit_behind(
        &mut self,
        writes: Vec<(u64, Vec<u8>)>,
        after: &[Ticket],
    ) -> Result<Ticket, Error> {
        self.submit_after(vec![writes], after)
    }

    /// What tables that lead to new places follow.
    pub(crate) fn followed(&mut self) -> Vec<Ticket> {
        std::mem::take(&mut self.after)
    }

    /// Has what leads to new places follow `ticket`.
    pub(crate) fn add_dependency(&mut self, ticket: Ticket) {
        if !self.after.contains(&ticket) {
            self.after.push(ticket);
        }
    }

    /// Waits until all that was handed over is durable.
    pub(crate) fn wait(&self) -> Result<(), Error> {
        match *self.newest {
            Ticket(0) => Ok(()),
            newest => Ok(self.file.disk().wait_durable(newest)?),
        }
    }
}

struct State<T> {
    tables: T,
    /// The newest ticket of the file.
    newest: Ticket,
    stopped: bool,
}

/// A disk inside a file, which can be changed.
pub(crate) struct WritableImage<T: AllocationTables> {
    file: ImageFile,
    behind: Option<Arc<dyn Disk>>,
    properties: Properties,
    unit_bytes: u64,
    pieces: DecompressedCache,
    state: Mutex<State<T>>,
}

/// Where a part of a write goes: the byte of the file, the byte of the block, how many.
type WriteSlice = (u64, u64, u64);

/// Of each write of each group, where its parts go.
type Plan = Vec<Vec<Vec<WriteSlice>>>;

/// Where a block that was sent whole comes from, and where it went.
struct Origin {
    ours: (usize, usize),
    theirs: (usize, usize),
}

impl<T: AllocationTables> WritableImage<T> {
    pub(crate) fn new(file: ImageFile, tables: T, behind: Option<Arc<dyn Disk>>) -> Self {
        let of_file = file.disk().properties();
        let sector_bytes = of_file.sector_bytes.max(SECTOR_BYTES);
        let len = tables.len_bytes();
        let properties = Properties {
            len_bytes: len - len % u64::from(sector_bytes),
            sector_bytes,
            atomic: match of_file.atomic {
                Atomic::None => Atomic::None,
                // What a new place holds besides is not of the group.
                Atomic::AgainstDeath | Atomic::AgainstPowerCut => Atomic::AgainstDeath,
            },
            ..of_file
        };
        let unit_bytes = tables.unit_bytes();
        let state = Mutex::new(State { tables, newest: Ticket(0), stopped: false });
        Self { file, behind, properties, unit_bytes, pieces: DecompressedCache::default(), state }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the bytes from `at` on are, neighbours in the file as one.
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
            self.pieces.read(&self.file, self.behind.as_ref(), *place, room, unpack)?;
            rest = behind;
        }
        Ok(())
    }

    /// Finds places for all of a chain, and takes those that are missing.
    fn plan(&self, state: &mut State<T>, chain: &[Group]) -> Result<Plan, Error> {
        let State { tables, newest, .. } = state;
        let mut out = MetadataWriter { file: &self.file, newest, after: vec![] };
        let mut plan = vec![];
        tables.begin_session(&mut out)?;
        for group in chain {
            let mut of_group = vec![];
            for write in &group.writes {
                let len = write.block.len() as u64;
                let mut parts: Vec<WriteSlice> = vec![];
                let mut done = 0;
                while done < len {
                    let at = write.at_bytes + done;
                    let skip = at % self.unit_bytes;
                    let here = (self.unit_bytes - skip).min(len - done);
                    let place = match tables.writable_offset(&self.file, at)? {
                        Some(place) => place,
                        None => self.take(tables, &mut out, at - skip)?,
                    };
                    match parts.last_mut() {
                        Some((to, _, count)) if *to + *count == place + skip => *count += here,
                        _ => parts.push((place + skip, done, here)),
                    }
                    done += here;
                }
                of_group.push(parts);
            }
            plan.push(of_group);
        }
        tables.submit_tables(&mut out)?;
        Ok(plan)
    }

    /// Gives a unit a place of its own, with what it holds.
    fn take(&self, tables: &mut T, out: &mut MetadataWriter<'_>, at: u64) -> Result<u64, Error> {
        let len = self.unit_bytes.min(tables.len_bytes().saturating_sub(at));
        let places = self.locate_range(tables, at, len)?;
        let has_behind = self.behind.is_some();
        let is_zeros = |(place, _): &(Location, u64)| match place {
            Location::Zeros => true,
            Location::Backing(_) => !has_behind,
            Location::File(_) | Location::Compressed { .. } => false,
        };
        let place = tables.allocate_unit(out, at)?;
        if !places.iter().all(is_zeros) {
            let mut held = vec![0; self.unit_bytes as usize];
            let room = held.get_mut(..len as usize).unwrap_or_default();
            self.fill(&places, room, &mut |piece| tables.unpack(&self.file, piece))?;
            let ticket = out.submit(vec![vec![(place, held)]])?;
            // Reads come here from now on.
            self.file.disk().wait_visible(ticket)?;
            out.add_dependency(ticket);
        }
        tables.map_unit(out, at, place)?;
        Ok(place)
    }

    /// The chain of the file, and where its blocks come from.
    fn split_chain(chain: &mut [Group], plan: &Plan) -> (Vec<Group>, Vec<Origin>) {
        let (mut groups, mut origins) = (vec![], vec![]);
        for (group, parts) in plan.iter().enumerate() {
            let mut writes = vec![];
            let ours = chain.get_mut(group).map(|it| &mut it.writes[..]).unwrap_or_default();
            for (nth, (write, parts)) in ours.iter_mut().zip(parts).enumerate() {
                if let [(at_bytes, _, _)] = parts[..] {
                    origins.push(Origin { ours: (group, nth), theirs: (group, writes.len()) });
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

/// Ranges in order, neighbours as one.
fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
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

fn filled(bytes: &[u8]) -> Block {
    let mut block = Block::private(bytes.len());
    block.copy_in(0, bytes);
    block
}

/// Puts what was refused back where it came from; `None` if it did not come back.
fn returned(
    mut chain: Vec<Group>,
    origins: &[Origin],
    refused: Option<Vec<Group>>,
) -> Option<Vec<Group>> {
    let mut refused = refused?;
    for Origin { ours, theirs } in origins {
        let block = refused.get_mut(theirs.0)?.writes.get_mut(theirs.1)?.block.take();
        chain.get_mut(ours.0)?.writes.get_mut(ours.1)?.block = block;
    }
    Some(chain)
}

impl<T: AllocationTables> draconis_device::ForwardingDisk for WritableImage<T> {
    type Below = dyn Disk;

    fn disk(&self) -> &Self::Below {
        &**self.file.disk()
    }

    fn properties(&self) -> Properties {
        self.properties
    }

    fn read(&self, at: Extent, mut into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        if let Err(error) = self.properties.check(at, into.len()) {
            return Pending::ready(Err(Refused { payload: Some(into), error }));
        }
        let places = self.locate_range(&mut self.lock().tables, at.start_bytes, at.len_bytes);
        if let Ok([(Location::File(from), _)]) = places.as_deref() {
            return self.disk().read(Extent::new(*from, at.len_bytes), into, urgency);
        }
        let done = places.and_then(|places| {
            let mut bytes = vec![0; into.len()];
            let mut unpack = |piece| self.lock().tables.unpack(&self.file, piece);
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
        let bounds = self.disk().chain_bounds();
        let checked = match self.properties.check_chain(&chain) {
            Ok(()) if !ChainBounds::of(&chain).is_within(bounds) => {
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
        match self.disk().submit_with(groups, after, terms) {
            Ok(tickets) => {
                let mut state = self.lock();
                state.newest = tickets.last().copied().unwrap_or(state.newest).max(state.newest);
                Ok(tickets)
            }
            Err(Refused { payload: goods, error }) => {
                Err(Refused { payload: returned(chain, &origins, goods), error })
            }
        }
    }

    /// What lies in a place of its own keeps that, and the file loses its room.
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
        for whole in extents.iter().filter_map(|extent| extent.whole_units(sector)) {
            let mut done = 0;
            while done < whole.len_bytes {
                let at = whole.start_bytes + done;
                let skip = at % self.unit_bytes;
                let here = (self.unit_bytes - skip).min(whole.len_bytes - done);
                // What cannot be found is no reason to fail: it is a hint.
                if let Ok(Some(place)) = state.tables.writable_offset(&self.file, at) {
                    there.push(Extent::new(place + skip, here));
                }
                done += here;
            }
        }
        self.disk().discard(&there, after)
    }
}

impl<T: AllocationTables> WritableImage<T> {
    /// Ends the session, and does `more` then.
    fn end_session<A>(
        &self,
        more: impl FnOnce(&mut T, &mut MetadataWriter<'_>) -> Result<A, Error>,
    ) -> Result<A, DiskError> {
        let mut state = self.lock();
        let State { tables, newest, stopped } = &mut *state;
        if *stopped {
            return Err(DiskError::Stopped);
        }
        let mut out = MetadataWriter { file: &self.file, newest, after: vec![] };
        let rested =
            out.wait().and_then(|()| tables.close_session(&mut out)).and_then(|()| out.wait());
        let done = rested.and_then(|()| more(tables, &mut out));
        *stopped |= done.is_err();
        done.map_err(Error::into_write_error)
    }
}

impl<T: AllocationTables> SessionDisk for WritableImage<T> {
    fn close_session(&self) -> Result<(), DiskError> {
        self.end_session(|_, _| Ok(()))
    }

    fn compact(&self, unused: Vec<Range<u64>>) -> Result<Option<u64>, DiskError> {
        self.end_session(|tables, out| tables.compact(out, merged(unused)))
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
