//! Client side: a disk whose requests go over lanes.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use draconis_exchange::channel::{ChannelError, Client};
use draconis_exchange::contract::List;
use draconis_exchange::contract::disk::{
    self, Discard, MAX_DEPENDENCIES, MAX_DISCARD_EXTENTS, MAX_GROUP_ENDS, MAX_WRITES, Read,
    Reserve, Settle, Submit, Wait,
};
use draconis_exchange::heap::PagePool;
use draconis_types::Block;
use draconis_types::Refusal;

use super::error_from_refusal;
use super::lane_pool::{AcquiredLane, LanePool, LanePriority};
use crate::elevator::{Elevator, ReadRequest};
use crate::readers::{ReadHandler, ReaderThreads};
use crate::{
    Atomic, ChainBounds, Disk, Error, Extent, Group, Pending, Properties, ReadAnswer, Refused,
    SubmitOptions, Ticket, Urgency, Write, promise_pair,
};

/// Allocates blocks that the server can access, of a length in bytes, while some are left:
/// `session.block(len)`.
pub type BlockAllocator = Box<dyn Fn(usize) -> Option<Block> + Send + Sync>;

/// Maximum bytes that one message passes in shared blocks.
const MAX_COPIED_PART_BYTES: usize = 256 << 10;
/// Maximum bytes that one message passes by reference to shared memory.
const MAX_SHARED_PART_BYTES: usize = 1 << 20;
/// Number of attempts, a millisecond apart, to allocate from a full exchange heap.
const HEAP_RETRIES: u32 = 10_000;

/// A remote disk, accessed through the disk contract.
///
/// Every lane carries one request at a time, so the number of lanes is the queue depth. Urgent
/// reads and chains come first. Read-ahead and waits leave one lane to them, and waits use at most
/// half of the lanes.
pub struct RemoteDisk {
    shared: Arc<ClientShared>,
    readers: ReaderThreads<ClientShared>,
    can_be_away: bool,
}

struct ClientShared {
    properties: Properties,
    bounds: ChainBounds,
    lanes: LanePool,
    blocks: Option<BlockAllocator>,
    /// Page pool whose buffers are written without a copy.
    page_pool: OnceLock<Arc<PagePool>>,
}

impl RemoteDisk {
    /// Queries the properties of the disk behind `ends`. Each reply may take `patience`.
    ///
    /// With `blocks`, private blocks are copied through blocks allocated there; a sector per lane
    /// is the minimum. Without it, the blocks themselves are sent.
    ///
    /// # Errors
    /// [`Error::ServiceEnded`] if there is no reply, or an invalid one.
    pub fn new(
        ends: Vec<Client<disk::Disk>>,
        blocks: Option<BlockAllocator>,
        patience: Duration,
    ) -> Result<Self, Error> {
        let readers = ends.len().saturating_sub(1).max(1);
        let lanes = LanePool::new(ends, patience);
        let asked = lanes.acquire(LanePriority::Now)?.call(disk::Properties {});
        let told =
            asked.map_err(|_| Error::ServiceEnded)?.map_err(|_| Error::ServiceEnded)?.properties;
        let properties = parse_properties(&told).ok_or(Error::ServiceEnded)?;
        let bounds = ChainBounds {
            groups: told.chain_groups_max as usize,
            writes: told.chain_writes_max as usize,
            bytes: told.chain_bytes_max,
        };
        let page_pool = OnceLock::new();
        let shared = Arc::new(ClientShared { properties, bounds, lanes, blocks, page_pool });
        let readers = ReaderThreads::new(shared.clone(), readers);
        Ok(Self { shared, readers, can_be_away: false })
    }

    /// Declares that the disk may be unreachable: [`Disk::can_be_unreachable`].
    #[must_use]
    pub fn with_outages(self) -> Self {
        Self { can_be_away: true, ..self }
    }

    /// Passes data in `rooms` by offset instead of copying it: the server maps their memory, too.
    #[must_use]
    pub fn with_shared_memory(self, rooms: Arc<PagePool>) -> Self {
        // A second call is ignored.
        let _ = self.shared.page_pool.set(rooms);
        self
    }
}

/// Converts the server's properties, if they are valid.
fn parse_properties(told: &disk::DiskProperties) -> Option<Properties> {
    let sector = told.sector_bytes;
    (sector.is_power_of_two() && sector as usize <= MAX_COPIED_PART_BYTES).then_some(())?;
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
        discards: told.discards,
    })
}

impl Disk for RemoteDisk {
    fn properties(&self) -> Properties {
        self.shared.properties
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        if let Err(error) = self.shared.properties.check_range(at, into.len()) {
            return Pending::ready(Err(Refused { payload: Some(into), error }));
        }
        if urgency == Urgency::Now {
            return Pending::ready(self.shared.read(at, into, LanePriority::Now));
        }
        let (promise, answer) = promise_pair();
        self.readers.read(ReadRequest { at, into, promise });
        answer
    }

    fn chain_bounds(&self) -> ChainBounds {
        self.shared.bounds
    }

    fn can_be_unreachable(&self) -> bool {
        self.can_be_away
    }

    fn submit_chain(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        self.submit_with(chain, after, SubmitOptions::default())
    }

    fn submit_with(
        &self,
        mut chain: Vec<Group>,
        after: &[Ticket],
        terms: SubmitOptions,
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        if chain.is_empty() {
            return Ok(vec![]);
        }
        match self.shared.submit(&mut chain, after, terms) {
            Ok(first) => Ok((first..).take(chain.len()).map(Ticket).collect()),
            Err(SubmitFailure::Refused(error)) => Err(Refused { payload: Some(chain), error }),
            Err(SubmitFailure::Lost) => {
                let payload = self.shared.blocks.is_some().then_some(chain);
                Err(Refused { payload, error: Error::ServiceEnded })
            }
        }
    }

    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        let mut lane = self.shared.lanes.acquire(LanePriority::Long)?;
        let answer = lane.call(Settle { ticket: ticket.0 });
        ticket_reply_to_result(answer.map(|reply| reply.map(drop).map_err(|nak| nak.why)), ticket)
    }

    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        let mut lane = self.shared.lanes.acquire(LanePriority::Long)?;
        let answer = lane.call(Wait { ticket: ticket.0 });
        ticket_reply_to_result(answer.map(|reply| reply.map(drop).map_err(|nak| nak.why)), ticket)
    }

    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), Error> {
        let properties = &self.shared.properties;
        properties.check_extents(extents)?;
        if !properties.discards {
            return Ok(());
        }
        // The newest dependency implies all others.
        let last = after.iter().max().copied();
        // A discard of no extents still asks about the ticket.
        let none: Option<&[Extent]> = extents.is_empty().then_some(&[]);
        for some in extents.chunks(MAX_DISCARD_EXTENTS).chain(none) {
            let extents =
                to_wire_list(some.iter().map(|it| (it.start_bytes, it.len_bytes)).collect());
            let mut lane = self.shared.lanes.acquire(LanePriority::Now)?;
            let answer = lane.call(Discard { extents, after: last.map(|ticket| ticket.0) });
            let answer = answer.map(|reply| reply.map(drop).map_err(|nak| nak.why));
            ticket_reply_to_result(answer, last.unwrap_or(Ticket(0)))?;
        }
        Ok(())
    }

    fn reserve(&self, bytes: u64) -> Result<u64, Error> {
        let mut lane = self.shared.lanes.acquire(LanePriority::Now)?;
        match lane.call(Reserve { bytes }) {
            Ok(Ok(ack)) => Ok(ack.bytes),
            Ok(Err(nak)) => Err(error_from_refusal(nak.why, "reserve", Extent::new(0, bytes))),
            Err(_) => Err(Error::ServiceEnded),
        }
    }
}

/// Converts the reply to a request about `ticket`.
fn ticket_reply_to_result(
    answer: Result<Result<(), Refusal>, ChannelError>,
    ticket: Ticket,
) -> Result<(), Error> {
    match answer {
        Ok(Ok(())) => Ok(()),
        Ok(Err(Refusal::NotFound)) => Err(Error::UnknownTicket(ticket)),
        Ok(Err(why)) => Err(error_from_refusal(why, "flush", Extent::new(0, 0))),
        Err(_) => Err(Error::ServiceEnded),
    }
}

impl ReadHandler for ClientShared {
    fn take_batch(elevator: &mut Elevator) -> Vec<ReadRequest> {
        elevator.pop().into_iter().collect()
    }

    fn min_threads(elevator: &Elevator) -> u64 {
        elevator.len()
    }

    fn answer_requests(&self, requests: Vec<ReadRequest>) {
        for ReadRequest { at, into, promise } in requests {
            promise.fulfill_promise(self.read(at, into, LanePriority::Ahead));
        }
    }
}

/// Reason that a chain was not accepted.
enum SubmitFailure {
    /// Refused; the chain is complete again.
    Refused(Error),
    /// The server is lost, with the blocks sent to it.
    Lost,
}

impl From<Error> for SubmitFailure {
    fn from(error: Error) -> Self {
        SubmitFailure::Refused(error)
    }
}

impl ClientShared {
    fn read(&self, at: Extent, mut into: Block, need: LanePriority) -> ReadAnswer {
        let urgent = need == LanePriority::Now;
        let mut lane = match self.lanes.acquire(need) {
            Ok(lane) => lane,
            Err(error) => return Err(Refused { payload: Some(into), error }),
        };
        if let Some(blocks) = &self.blocks {
            let sector = self.properties.sector_bytes as usize;
            return match read_by_copy(&mut lane, blocks, sector, at, &mut into, urgent) {
                Ok(()) => Ok(into),
                Err(error) => Err(Refused { payload: Some(into), error }),
            };
        }
        match lane.call(Read { at_bytes: at.start_bytes, buffer: into, urgent }) {
            Ok(Ok(ack)) => Ok(ack.buffer),
            Ok(Err(nak)) => {
                let error = error_from_refusal(nak.why, "read", at);
                Err(Refused { payload: Some(nak.buffer), error })
            }
            Err(_) => Err(Refused { payload: None, error: Error::ServiceEnded }),
        }
    }

    /// Sends a chain part by part over one lane; returns the ticket of its first group.
    fn submit(
        &self,
        chain: &mut [Group],
        tickets: &[Ticket],
        terms: SubmitOptions,
    ) -> Result<u64, SubmitFailure> {
        if self.properties.read_only {
            return Err(Error::ReadOnly.into());
        }
        self.properties.check_chain(chain)?;
        if !ChainBounds::size_of_chain(chain).is_within(self.bounds) {
            return Err(Error::ChainTooLarge { bounds: self.bounds }.into());
        }
        let mut lane = self.lanes.acquire(LanePriority::Now)?;
        let (mark, durable) = (terms.mark, terms.durable.map(|place| place as u32));
        let mut follows = tickets.iter().map(|ticket| ticket.0);
        let mut place = ChainCursor::default();
        loop {
            let part = match &self.blocks {
                None => Ok(place.move_part(chain)),
                Some(blocks) => {
                    let page_pool = self.page_pool.get().map(|page_pool| &**page_pool);
                    place.copy_part(chain, blocks, page_pool, self.properties.sector_bytes)
                }
            };
            let part = match part {
                Ok(part) => part,
                Err(error) => {
                    // Closing drops the incomplete chain at the server.
                    lane.close();
                    return Err(error.into());
                }
            };
            let after: Vec<_> = follows.by_ref().take(MAX_DEPENDENCIES).collect();
            let more = place.group < chain.len() || follows.len() > 0;
            let ChainFragment { blocks, ends, origins } = part;
            let (blocks, ends, after) =
                (to_wire_list(blocks), to_wire_list(ends), to_wire_list(after));
            let sent = Submit { blocks, ends, after, mark, durable, more };
            let answered = lane.call(sent).map_err(|_| SubmitFailure::Lost)?;
            let (blocks, first) = match answered {
                Ok(ack) => (ack.blocks, Ok(ack.first)),
                Err(nak) => (nak.blocks, Err(nak.why)),
            };
            if self.blocks.is_none() {
                for ((group, write), (_, block)) in origins.into_iter().zip(blocks.into_vec()) {
                    chain[group].writes[write].block = block;
                }
            }
            match first {
                Ok(None) if more => {}
                Ok(Some(first)) if !more => return Ok(first),
                // Only the newest ticket can be unknown.
                Err(Refusal::NotFound) => {
                    let newest = tickets.iter().max().copied().unwrap_or(Ticket(0));
                    return Err(Error::UnknownTicket(newest).into());
                }
                Err(why) => {
                    let whole = Extent::new(0, self.properties.len_bytes);
                    return Err(error_from_refusal(why, "write", whole).into());
                }
                // A ticket before the end, or none at the end: the server violates the contract.
                Ok(_) => {
                    lane.close();
                    return Err(Error::ServiceEnded.into());
                }
            }
        }
    }
}

/// Position in a chain that is being sent.
#[derive(Default)]
struct ChainCursor {
    group: usize,
    write: usize,
    /// Bytes of that write that were sent.
    skip: usize,
}

/// Part of a chain that fits one message.
#[derive(Default)]
struct ChainFragment {
    blocks: Vec<(u64, Block)>,
    ends: Vec<u32>,
    /// Group and write of each moved block.
    origins: Vec<(usize, usize)>,
}

impl ChainCursor {
    /// Finds the next write with unsent bytes; records group ends on the way in `part`, as far as
    /// they fit.
    fn next_write(&mut self, chain: &[Group], part: &mut ChainFragment) -> bool {
        while let Some(group) = chain.get(self.group) {
            match group.writes.get(self.write) {
                Some(write) if write.block.is_empty() => self.write += 1,
                Some(_) => return part.blocks.len() < MAX_WRITES,
                None if part.ends.len() == MAX_GROUP_ENDS => return false,
                None => {
                    part.ends.push(part.blocks.len() as u32);
                    *self = Self { group: self.group + 1, ..Self::default() };
                }
            }
        }
        false
    }

    /// Moves the next blocks out of the chain; they return with the reply.
    fn move_part(&mut self, chain: &mut [Group]) -> ChainFragment {
        let mut part = ChainFragment::default();
        while self.next_write(chain, &mut part) {
            let write = &mut chain[self.group].writes[self.write];
            part.blocks.push((write.at_bytes, write.block.take()));
            part.origins.push((self.group, self.write));
            self.write += 1;
        }
        part
    }

    /// Copies as much of the next writes as fits, and at least something. Adjacent writes share one
    /// block.
    fn copy_part(
        &mut self,
        chain: &[Group],
        blocks: &BlockAllocator,
        rooms: Option<&PagePool>,
        sector_bytes: u32,
    ) -> Result<ChainFragment, Error> {
        let mut part = ChainFragment::default();
        let (mut bytes, mut beside) = (0, 0);
        while bytes < MAX_COPIED_PART_BYTES
            && beside < MAX_SHARED_PART_BYTES
            && self.next_write(chain, &mut part)
        {
            let writes = &chain[self.group].writes[self.write..];
            let at_bytes = writes[0].at_bytes + self.skip as u64;
            let lent = rooms.and_then(|rooms| {
                let (at, len) =
                    pool_range(rooms, writes, self.skip, MAX_SHARED_PART_BYTES - beside)?;
                rooms.block_at(at, len)
            });
            if let Some(block) = lent {
                self.advance(writes, block.len());
                beside += block.len();
                part.blocks.push((at_bytes, block));
                continue;
            }
            let want = contiguous_bytes(writes, self.skip, MAX_COPIED_PART_BYTES - bytes);
            let block = match part.blocks.is_empty() {
                false => blocks(want),
                true => {
                    let at = Extent::new(at_bytes, want as u64);
                    let room = allocate_block(blocks, sector_bytes as usize, want);
                    Some(room.ok_or_else(|| heap_full_error("write", at))?)
                }
            };
            let Some(mut block) = block else { break };
            self.copy_run(writes, &mut block);
            bytes += block.len();
            part.blocks.push((at_bytes, block));
        }
        Ok(part)
    }

    /// Advances by `len` bytes.
    fn advance(&mut self, writes: &[Write], mut len: usize) {
        for write in writes {
            let left = write.block.len() - self.skip;
            if len < left {
                self.skip += len;
                return;
            }
            len -= left;
            (self.write, self.skip) = (self.write + 1, 0);
            if len == 0 {
                return;
            }
        }
    }

    /// Fills `block` from the next writes.
    fn copy_run(&mut self, writes: &[Write], block: &mut Block) {
        let mut at = 0;
        for write in writes {
            let len = (write.block.len() - self.skip).min(block.len() - at);
            block.copy_from(at, &write.block, self.skip, len);
            at += len;
            self.skip += len;
            if self.skip < write.block.len() {
                return;
            }
            (self.write, self.skip) = (self.write + 1, 0);
            if at == block.len() {
                return;
            }
        }
    }
}

/// Returns the pool range of the next bytes of `writes`, from `skip` in the first, that are
/// contiguous both in the pool and on the disk: at most `most` bytes.
fn pool_range(
    rooms: &PagePool,
    writes: &[Write],
    skip: usize,
    most: usize,
) -> Option<(usize, usize)> {
    let mut found: Option<(usize, usize)> = None;
    let (mut skip, mut end) = (skip, writes.first()?.at_bytes);
    'run: for write in writes.iter().take_while(|write| {
        let joins = write.at_bytes == end;
        end += write.block.len() as u64;
        joins
    }) {
        let mut left = write.block.len();
        for piece in write.block.shared_slices() {
            left = left.saturating_sub(piece.len());
            let bytes = piece.get(skip..).unwrap_or_default();
            skip = skip.saturating_sub(piece.len());
            if bytes.is_empty() {
                continue;
            }
            let Some(place) = rooms.offset_of(bytes) else { break 'run };
            let (at, len) = found.unwrap_or((place, 0));
            if place != at + len || len >= most {
                break 'run;
            }
            found = Some((at, (len + bytes.len()).min(most)));
        }
        if left > 0 {
            // The rest of the block reads as zeros, and is not in the pool.
            break;
        }
    }
    found
}

/// Returns the number of contiguous bytes of `writes`, from `skip` in the first, up to `most`.
fn contiguous_bytes(writes: &[Write], skip: usize, most: usize) -> usize {
    let mut end = writes.first().map_or(0, |first| first.at_bytes);
    let joined = writes.iter().take_while(|write| {
        let joins = write.at_bytes == end;
        end += write.block.len() as u64;
        joins
    });
    let mut bytes = 0;
    for write in joined {
        bytes += write.block.len();
        if bytes - skip >= most {
            return most;
        }
    }
    bytes - skip
}

/// Converts values that were collected within the list's limit.
fn to_wire_list<T, const MAX: usize>(values: Vec<T>) -> List<T, MAX> {
    values.try_into().unwrap_or_default()
}

/// Reads into shared blocks and copies from them.
fn read_by_copy(
    lane: &mut AcquiredLane<'_>,
    blocks: &BlockAllocator,
    sector: usize,
    at: Extent,
    into: &mut Block,
    urgent: bool,
) -> Result<(), Error> {
    let mut done = 0;
    while done < into.len() {
        let start_bytes = at.start_bytes + done as u64;
        let want = (into.len() - done).min(MAX_COPIED_PART_BYTES);
        let buffer =
            allocate_block(blocks, sector, want).ok_or_else(|| heap_full_error("read", at))?;
        let len = buffer.len();
        let read = Read { at_bytes: start_bytes, buffer, urgent };
        let buffer = match lane.call(read) {
            Ok(Ok(ack)) => ack.buffer,
            Ok(Err(nak)) => return Err(error_from_refusal(nak.why, "read", at)),
            Err(_) => return Err(Error::ServiceEnded),
        };
        into.copy_from(done, &buffer, 0, len);
        done += len;
    }
    Ok(())
}

/// Allocates a block of `want` bytes or, if none is that large, of a power-of-two fraction in whole
/// sectors.
fn allocate_block(blocks: &BlockAllocator, sector: usize, want: usize) -> Option<Block> {
    for _ in 0..HEAP_RETRIES {
        let smaller =
            std::iter::successors(Some(want.next_power_of_two() / 2), |len| Some(len / 2))
                .take_while(|len| *len >= sector);
        if let Some(block) = std::iter::once(want).chain(smaller).find_map(blocks) {
            return Some(block);
        }
        // Other requests will soon return their blocks.
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

fn heap_full_error(what: &'static str, extent: Extent) -> Error {
    Error::Io { what, extent, errno: rustix::io::Errno::NOBUFS }
}
