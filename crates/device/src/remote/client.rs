//! The asking side: a disk whose requests go over lanes.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use draconis_exchange::channel::Client;
use draconis_exchange::contract::disk::{self, AFTER_MAX, Read, Submit, WRITES_MAX, Wait};
use draconis_exchange::contract::{List, Refusal};
use draconis_exchange::heap::Block;

use super::error;
use super::lanes::{Lane, Lanes, Need};
use crate::ahead::{Elevator, Request};
use crate::{
    Atomic, Disk, Error, Extent, Group, Pending, Properties, ReadAnswer, Refused, Ticket, Urgency,
    pending,
};

/// Gives blocks that cross to the server, of a length in bytes, while there are any:
/// `session.block(len)`.
pub type Blocks = Box<dyn Fn(usize) -> Option<Block> + Send + Sync>;

/// The most that one message carries by way of shared blocks, in bytes.
const PART_BYTES: usize = 256 << 10;
/// How often, a millisecond apart, a request looks for room in the exchange heap.
const ROOM_LOOKS: u32 = 10_000;

/// A disk on the other side of the disk contract.
///
/// Every lane carries one request at a time, so the number of lanes is the depth. Urgent
/// reads and groups go first; reads ahead and waits leave one lane to them.
pub struct RemoteDisk {
    shared: Arc<Shared>,
    readers: Vec<JoinHandle<()>>,
}

struct Shared {
    properties: Properties,
    lanes: Lanes,
    blocks: Option<Blocks>,
    ahead: Mutex<Ahead>,
    changed: Condvar,
}

#[derive(Default)]
struct Ahead {
    elevator: Elevator,
    closing: bool,
}

impl RemoteDisk {
    /// Asks the disk behind `ends` what it is. Each answer may take `patience`.
    ///
    /// With `blocks`, private blocks cross by way of blocks from there, which need room
    /// for a sector a lane at the least; without, the blocks themselves are sent.
    ///
    /// # Errors
    /// [`Error::Gone`] when nobody answers, or the answer makes no sense.
    pub fn new(
        ends: Vec<Client<disk::Disk>>,
        blocks: Option<Blocks>,
        patience: Duration,
    ) -> Result<Self, Error> {
        let readers = ends.len().saturating_sub(1).max(1);
        let lanes = Lanes::new(ends, patience);
        let asked = lanes.lend(Need::Now)?.call(disk::Properties {});
        let told = asked.map_err(|_| Error::Gone)?.map_err(|_| Error::Gone)?;
        let properties = properties(&told).ok_or(Error::Gone)?;
        let (ahead, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { properties, lanes, blocks, ahead, changed });
        let reader = |_| {
            let shared = shared.clone();
            let name = std::thread::Builder::new().name("disk-ahead".into());
            name.spawn(move || shared.read_ahead()).ok()
        };
        // Fewer threads read less at once; without any, every read is waited for.
        let readers = (0..readers).filter_map(reader).collect();
        Ok(Self { shared, readers })
    }
}

/// What the server says, if a disk can be that.
fn properties(told: &disk::AckProperties) -> Option<Properties> {
    let sector = told.sector_bytes;
    (sector.is_power_of_two() && sector as usize <= PART_BYTES).then_some(())?;
    Some(Properties {
        len_bytes: told.len_bytes,
        sector_bytes: sector,
        best_io_bytes: told.best_io_bytes.max(sector),
        rotational: told.rotational,
        read_only: told.read_only,
        atomic: match told.atomic {
            1 => Atomic::AgainstDeath,
            2 => Atomic::AgainstPowerCut,
            _ => Atomic::None,
        },
    })
}

impl Disk for RemoteDisk {
    fn properties(&self) -> Properties {
        self.shared.properties
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        if let Err(error) = self.shared.properties.check(at, into.len()) {
            return Pending::ready(Err(Refused { goods: Some(into), error }));
        }
        if urgency == Urgency::Now || self.readers.is_empty() {
            return Pending::ready(self.shared.read(at, into, Need::Now));
        }
        let (promise, answer) = pending();
        self.shared.lock().elevator.push(Request { at, into, promise });
        self.shared.changed.notify_one();
        answer
    }

    fn submit(&self, mut group: Group, after: &[Ticket]) -> Result<Ticket, Refused<Group>> {
        match self.shared.submit(&mut group, after) {
            Ok(ticket) => Ok(ticket),
            Err(Failed::Refused(error)) => Err(Refused { goods: Some(group), error }),
            Err(Failed::Lost) => {
                let goods = self.shared.blocks.is_some().then_some(group);
                Err(Refused { goods, error: Error::Gone })
            }
        }
    }

    fn wait(&self, ticket: Ticket) -> Result<(), Error> {
        let mut lane = self.shared.lanes.lend(Need::Later)?;
        match lane.call(Wait { ticket: ticket.0 }) {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(nak)) if nak.why == Refusal::NotFound => Err(Error::NoTicket(ticket)),
            Ok(Err(nak)) => Err(error(nak.why, "flush", Extent::new(0, 0))),
            Err(_) => Err(Error::Gone),
        }
    }
}

impl Drop for RemoteDisk {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.changed.notify_all();
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
    }
}

/// Why a group was not taken.
enum Failed {
    /// It is whole again.
    Refused(Error),
    /// With the server; blocks that had been sent are gone.
    Lost,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Failed::Refused(error)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Ahead> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What each reader does until the disk is dropped.
    fn read_ahead(&self) {
        let mut ahead = self.lock();
        // Closing breaks the promises that still wait: nobody can be there to hear them.
        while !ahead.closing {
            match ahead.elevator.pop() {
                Some(Request { at, into, promise }) => {
                    drop(ahead);
                    promise.keep(self.read(at, into, Need::Later));
                    ahead = self.lock();
                }
                None => {
                    ahead = self.changed.wait(ahead).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    fn read(&self, at: Extent, mut into: Block, need: Need) -> ReadAnswer {
        let urgent = need == Need::Now;
        let mut lane = match self.lanes.lend(need) {
            Ok(lane) => lane,
            Err(error) => return Err(Refused { goods: Some(into), error }),
        };
        if let Some(blocks) = &self.blocks {
            let sector = self.properties.sector_bytes as usize;
            return match read_by_copy(&mut lane, blocks, sector, at, &mut into, urgent) {
                Ok(()) => Ok(into),
                Err(error) => Err(Refused { goods: Some(into), error }),
            };
        }
        match lane.call(Read { at_bytes: at.start_bytes, buffer: into, urgent }) {
            Ok(Ok(ack)) => Ok(ack.buffer),
            Ok(Err(nak)) => {
                let error = error(nak.why, "read", at);
                Err(Refused { goods: Some(nak.buffer), error })
            }
            Err(_) => Err(Refused { goods: None, error: Error::Gone }),
        }
    }

    /// Sends a group part by part over one lane.
    fn submit(&self, group: &mut Group, tickets: &[Ticket]) -> Result<Ticket, Failed> {
        if self.properties.read_only {
            return Err(Error::ReadOnly.into());
        }
        for write in &group.writes {
            let extent = Extent::new(write.at_bytes, write.block.len() as u64);
            self.properties.check(extent, write.block.len())?;
        }
        let mut lane = self.lanes.lend(Need::Now)?;
        let mut follows = tickets.iter().map(|ticket| ticket.0);
        let sector = self.properties.sector_bytes as usize;
        let mut place = Place::default();
        loop {
            let from = place.write;
            let blocks = match &self.blocks {
                None => place.move_part(group),
                Some(blocks) => match place.copy_part(group, blocks, sector) {
                    Ok(part) => part,
                    Err(error) => {
                        // What the server has of the group must not wait for more.
                        lane.close();
                        return Err(error.into());
                    }
                },
            };
            let after: Vec<_> = follows.by_ref().take(AFTER_MAX).collect();
            let more = place.write < group.writes.len() || follows.len() > 0;
            let sent = Submit { blocks: list(blocks), after: list(after), more };
            let answered = lane.call(sent).map_err(|_| Failed::Lost)?;
            let (blocks, ticket) = match answered {
                Ok(ack) => (ack.blocks, Ok(ack.ticket)),
                Err(nak) => (nak.blocks, Err(nak.why)),
            };
            if self.blocks.is_none() {
                for (write, (_, block)) in group.writes[from..].iter_mut().zip(blocks.into_vec()) {
                    write.block = block;
                }
            }
            match ticket {
                Ok(None) if more => {}
                Ok(Some(ticket)) if !more => return Ok(Ticket(ticket)),
                // The newest is the one that can be unknown.
                Err(Refusal::NotFound) => {
                    let newest = tickets.iter().max().copied().unwrap_or(Ticket(0));
                    return Err(Error::NoTicket(newest).into());
                }
                Err(why) => {
                    let whole = Extent::new(0, self.properties.len_bytes);
                    return Err(error(why, "write", whole).into());
                }
                // A ticket before the end, or none at the end: not a server to go on with.
                Ok(_) => {
                    lane.close();
                    return Err(Error::Gone.into());
                }
            }
        }
    }
}

/// How much of a group was sent.
#[derive(Default)]
struct Place {
    write: usize,
    /// Bytes of that write.
    skip: usize,
}

impl Place {
    /// Takes the next blocks out of the group; they return with the answer.
    fn move_part(&mut self, group: &mut Group) -> Vec<(u64, Block)> {
        let rest = group.writes[self.write..].iter_mut().take(WRITES_MAX);
        let part: Vec<_> = rest
            .map(|write| (write.at_bytes, std::mem::replace(&mut write.block, Block::private(0))))
            .collect();
        self.write += part.len();
        part
    }

    /// Copies as much of what comes next as there is room for, and something at least.
    fn copy_part(
        &mut self,
        group: &Group,
        blocks: &Blocks,
        sector: usize,
    ) -> Result<Vec<(u64, Block)>, Error> {
        let mut part = Vec::new();
        let mut bytes = 0;
        while let Some(write) = group.writes.get(self.write)
            && part.len() < WRITES_MAX
            && bytes < PART_BYTES
        {
            let want = (write.block.len() - self.skip).min(PART_BYTES - bytes);
            let at_bytes = write.at_bytes + self.skip as u64;
            let block = match blocks(want) {
                Some(block) => Some(block),
                None if part.is_empty() => Some(
                    room(blocks, sector, want)
                        .ok_or_else(|| no_room("write", Extent::new(at_bytes, want as u64)))?,
                ),
                None => None,
            };
            let Some(mut block) = block else { break };
            let len = block.len();
            copy(&write.block, self.skip, &mut block, 0, len);
            part.push((at_bytes, block));
            bytes += len;
            self.skip += len;
            if self.skip == write.block.len() {
                (self.write, self.skip) = (self.write + 1, 0);
            }
        }
        Ok(part)
    }
}

/// A list of what was taken in portions no longer than it.
fn list<T, const MAX: usize>(values: Vec<T>) -> List<T, MAX> {
    values.try_into().unwrap_or_default()
}

/// Reads into blocks that cross, and copies from them.
fn read_by_copy(
    lane: &mut Lane<'_>,
    blocks: &Blocks,
    sector: usize,
    at: Extent,
    into: &mut Block,
    urgent: bool,
) -> Result<(), Error> {
    let mut done = 0;
    while done < into.len() {
        let start_bytes = at.start_bytes + done as u64;
        let want = (into.len() - done).min(PART_BYTES);
        let buffer = room(blocks, sector, want).ok_or_else(|| no_room("read", at))?;
        let len = buffer.len();
        let read = Read { at_bytes: start_bytes, buffer, urgent };
        let buffer = match lane.call(read) {
            Ok(Ok(ack)) => ack.buffer,
            Ok(Err(nak)) => return Err(error(nak.why, "read", at)),
            Err(_) => return Err(Error::Gone),
        };
        copy(&buffer, 0, into, done, len);
        done += len;
    }
    Ok(())
}

/// A block of `want` bytes or, where there is none so large, of a power-of-two part of
/// them that is whole sectors.
fn room(blocks: &Blocks, sector: usize, want: usize) -> Option<Block> {
    for _ in 0..ROOM_LOOKS {
        let smaller =
            std::iter::successors(Some(want.next_power_of_two() / 2), |len| Some(len / 2))
                .take_while(|len| *len >= sector);
        if let Some(block) = std::iter::once(want).chain(smaller).find_map(blocks) {
            return Some(block);
        }
        // Others' requests give theirs back soon.
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

fn no_room(what: &'static str, extent: Extent) -> Error {
    Error::Io { what, extent, errno: rustix::io::Errno::NOBUFS }
}

/// Copies `len` bytes between blocks, of which at most one is shared as a rule.
fn copy(from: &Block, from_at: usize, into: &mut Block, into_at: usize, len: usize) {
    if let Some(bytes) = from.bytes() {
        into.copy_in(into_at, &bytes[from_at..from_at + len]);
    } else if let Some(bytes) = into.bytes_mut() {
        from.copy_out(from_at, &mut bytes[into_at..into_at + len]);
    } else {
        let mut bytes = vec![0; len];
        from.copy_out(from_at, &mut bytes);
        into.copy_in(into_at, &bytes);
    }
}
