//! Server side: serves any disk over the contract.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use draconis_exchange::channel::{ChannelError, Server};
use draconis_exchange::contract::disk::{
    self, DiskProperties, DiskServer, Read, Settle, Submit, Wait,
};
use draconis_types::Refusal;
use draconis_types::lock::{Mutex, MutexGuard};
use draconis_types::{ALIGN_BYTES, Block, PrivateBuffer};

use super::refusal_from_error;
use crate::{
    Atomic, ChainBounds, Disk, Extent, Group, Properties, SubmitOptions, Ticket, Urgency, Write,
};

/// Maximum size of one chain.
pub const CHAIN_BOUNDS: ChainBounds =
    ChainBounds { groups: 1 << 10, writes: 1 << 16, bytes: 64 << 20 };
/// Maximum memory of the parts of one chain: each write in whole pages.
const MAX_HELD_BYTES: u64 = CHAIN_BOUNDS.bytes + (CHAIN_BOUNDS.writes * ALIGN_BYTES) as u64;
/// Maximum dependencies of one chain.
const MAX_CHAIN_DEPENDENCIES: usize = 1 << 10;
/// Maximum groups of one client that were submitted and are not known to be durable. Beyond it the
/// service waits before it accepts another.
const MAX_LIVE_GROUPS: usize = 1 << 12;
/// Maximum memory of groups that are not yet visible.
const MAX_LIVE_BYTES: u64 = 256 << 20;

/// Serves `disk` to one client over all of `ends`, with a thread for each; returns once all are
/// closed. Each lane collects its own parts; all lanes know all tickets.
///
/// # Errors
/// Reason that the client was lost, from the first failing lane: no message within `patience`, or a
/// contract violation.
pub fn serve_remote_disk(
    disk: &dyn Disk,
    ends: Vec<Server<disk::Disk>>,
    patience: Duration,
) -> Result<(), ChannelError> {
    let service = ClientService::new(disk);
    thread::scope(|scope| {
        let service = &service;
        let serve = |end: Server<disk::Disk>| {
            scope.spawn(move || {
                let lane = ServedLane { service, parts: RefCell::default() };
                end.serve(patience, |message| disk::answer(&lane, message))
            })
        };
        let lanes: Vec<_> = ends.into_iter().map(serve).collect();
        let joined = lanes.into_iter().map(|lane| lane.join().unwrap_or(Err(ChannelError::Closed)));
        // All threads are joined before the first error is returned.
        joined.collect::<Vec<_>>().into_iter().collect()
    })
}

/// A disk and the groups that one client has submitted.
struct ClientService<'a> {
    disk: &'a dyn Disk,
    /// Held while a chain is submitted, so that the client's tickets ascend like the disk's.
    submitting: Mutex<()>,
    tickets: Mutex<ClientTickets>,
}

#[derive(Default)]
struct ClientTickets {
    /// Number of issued client tickets; the first is 1.
    issued: u64,
    /// All groups up to this ticket are visible.
    settled: u64,
    /// Groups not known to be durable: the disk's ticket, and the group's memory.
    live: BTreeMap<u64, (Ticket, u64)>,
    /// Memory of groups that are not yet visible.
    invisible_bytes: u64,
}

/// One endpoint of the contract.
struct ServedLane<'a> {
    service: &'a ClientService<'a>,
    parts: RefCell<ChainAssembly>,
}

/// Parts of a chain received so far.
#[derive(Default)]
struct ChainAssembly {
    /// Complete groups, and their memory.
    chain: Vec<(Group, u64)>,
    /// The incomplete group.
    group: Group,
    group_bytes: u64,
    after: Vec<u64>,
    /// Size of all parts.
    needs: ChainSize,
}

#[derive(Clone, Copy, Default)]
struct ChainSize {
    bytes: u64,
    held_bytes: u64,
}

impl DiskServer for ServedLane<'_> {
    fn properties(&self, _: &mut disk::Properties) -> Result<DiskProperties, Refusal> {
        let ours = self.service.disk.properties();
        let bounds = self.service.chain_limits();
        Ok(DiskProperties {
            // The maximum of a growing disk: a client that does not read it itself has no other
            // length.
            len_bytes: self.service.disk.max_len_bytes(),
            sector_bytes: ours.sector_bytes,
            best_io_bytes: ours.best_io_bytes,
            rotational: ours.rotational,
            read_only: ours.read_only,
            atomic: match ours.atomic {
                Atomic::None | Atomic::AgainstDeath => 1,
                Atomic::AgainstPowerCut => 2,
            },
            discards: ours.discards && !ours.read_only,
            chain_groups_max: bounds.groups as u32,
            chain_writes_max: bounds.writes as u32,
            chain_bytes_max: bounds.bytes,
        })
    }

    fn read(&self, request: &mut Read) -> Result<(), Refusal> {
        let at = Extent::new(request.at_bytes, request.buffer.len() as u64);
        let urgency = if request.urgent { Urgency::Now } else { Urgency::Ahead };
        let answer = self.service.disk.read(at, request.buffer.take(), urgency).wait();
        let (goods, read) = match answer {
            Some(Ok(buffer)) => (Some(buffer), Ok(())),
            Some(Err(refused)) => (refused.payload, Err(refusal_from_error(&refused.error))),
            None => (None, Err(Refusal::Gone)),
        };
        // A disk that lost the block is replaced by a block of the same length.
        request.buffer = goods.unwrap_or_else(|| Block::private(at.len_bytes as usize));
        read
    }

    fn submit(&self, request: &mut Submit) -> Result<Option<u64>, Refusal> {
        // Taken out: a refused part drops its whole chain.
        let mut parts = self.parts.take();
        parts.add_message(self.service, request)?;
        if request.more {
            self.parts.replace(parts);
            return Ok(None);
        }
        let durable = request.durable.map(u64::from);
        if durable.is_some_and(|place| place >= parts.chain.len() as u64) {
            return Err(Refusal::Invalid);
        }
        let first = self.service.submit_assembled_chain(parts, request.mark)?;
        durable.map_or(Ok(()), |place| self.service.wait_ticket_durable(first + place))?;
        Ok(Some(first))
    }

    fn wait_visible(&self, request: &mut Settle) -> Result<(), Refusal> {
        self.service.wait_ticket_visible(request.ticket)
    }

    fn wait(&self, request: &mut Wait) -> Result<(), Refusal> {
        self.service.wait_ticket_durable(request.ticket)
    }

    fn discard(&self, request: &mut disk::Discard) -> Result<(), Refusal> {
        let ClientService { disk, tickets, .. } = self.service;
        if disk.properties().read_only {
            return Err(Refusal::ReadOnly);
        }
        let extents: Vec<_> =
            request.extents.iter().map(|&(at, len)| Extent::new(at, len)).collect();
        let after: Vec<u64> = request.after.into_iter().collect();
        let after = tickets.lock().disk_tickets_of(&after)?;
        disk.discard(&extents, &after).map_err(|error| refusal_from_error(&error))
    }

    fn reserve(&self, request: &mut disk::Reserve) -> Result<u64, Refusal> {
        self.service.disk.reserve(request.bytes).map_err(|error| refusal_from_error(&error))
    }
}

impl ChainAssembly {
    /// Copies the contents of part `m`, if writing is allowed and the chain stays within bounds.
    fn add_message(&mut self, service: &ClientService<'_>, m: &Submit) -> Result<(), Refusal> {
        if service.disk.properties().read_only {
            return Err(Refusal::ReadOnly);
        }
        if self.after.len() + m.after.len() > MAX_CHAIN_DEPENDENCIES {
            return Err(Refusal::Quota);
        }
        self.after.extend_from_slice(&m.after);
        let mut from = 0;
        for &end in m.ends.iter() {
            let writes = m.blocks.get(from..end as usize).ok_or(Refusal::Invalid)?;
            self.add_writes(service, writes)?;
            self.end_group(service)?;
            from = end as usize;
        }
        self.add_writes(service, &m.blocks[from..])?;
        let is_whole = self.group.writes.is_empty() && !self.chain.is_empty();
        (m.more || is_whole).then_some(()).ok_or(Refusal::Invalid)
    }

    fn end_group(&mut self, service: &ClientService<'_>) -> Result<(), Refusal> {
        if self.chain.len() == service.chain_limits().groups {
            return Err(Refusal::Quota);
        }
        let group = std::mem::take(&mut self.group);
        self.chain.push((group, std::mem::take(&mut self.group_bytes)));
        Ok(())
    }

    /// Adds writes to the incomplete group. Adjacent writes are merged: the device receives one
    /// request, and it takes the memory of one.
    fn add_writes(
        &mut self,
        service: &ClientService<'_>,
        mut writes: &[(u64, Block)],
    ) -> Result<(), Refusal> {
        while !writes.is_empty() {
            let (run, behind) = writes.split_at(run_len(writes));
            let extent = run_extent(run)?;
            let len = usize::try_from(extent.len_bytes).map_err(|_| Refusal::Invalid)?;
            let room = service.disk.max_len_bytes();
            let properties = Properties { len_bytes: room, ..service.disk.properties() };
            properties.check_range(extent, len).map_err(|error| refusal_from_error(&error))?;
            self.count_write(service, len)?;
            // All bytes are overwritten below.
            let mut copy = PrivateBuffer::new_uninitialized(len);
            let mut at = 0;
            for (_, block) in run {
                at += block.copy_out(0, &mut copy[at..]);
            }
            self.group.writes.push(Write { at_bytes: extent.start_bytes, block: copy.into() });
            writes = behind;
        }
        Ok(())
    }

    /// Counts one more write. The client splits large writes and neighbours were merged, so the
    /// memory bounds their number.
    fn count_write(&mut self, service: &ClientService<'_>, len: usize) -> Result<(), Refusal> {
        let held = len.next_multiple_of(ALIGN_BYTES) as u64;
        self.needs.bytes += len as u64;
        self.needs.held_bytes += held;
        self.group_bytes += held;
        let fits = self.needs.bytes <= service.chain_limits().bytes
            && self.needs.held_bytes <= MAX_HELD_BYTES;
        fits.then_some(()).ok_or(Refusal::Quota)
    }
}

/// Returns the number of adjacent writes at the start of `writes`, in whole sectors or not.
fn run_len(writes: &[(u64, Block)]) -> usize {
    let joins =
        |pair: &&[(u64, Block)]| pair[0].0.checked_add(pair[0].1.len() as u64) == Some(pair[1].0);
    writes.windows(2).take_while(joins).count() + 1
}

/// Returns the range of a run.
fn run_extent(run: &[(u64, Block)]) -> Result<Extent, Refusal> {
    let (start, _) = run.first().ok_or(Refusal::Invalid)?;
    Ok(Extent::new(*start, run.iter().map(|(_, block)| block.len() as u64).sum()))
}

impl<'a> ClientService<'a> {
    fn new(disk: &'a dyn Disk) -> Self {
        Self { disk, submitting: Mutex::default(), tickets: Mutex::default() }
    }

    /// Returns the chain limits for a client: those of the disk, within the service's bounds.
    fn chain_limits(&self) -> ChainBounds {
        let disk = self.disk.chain_bounds();
        ChainBounds {
            groups: disk.groups.min(CHAIN_BOUNDS.groups),
            writes: disk.writes.min(CHAIN_BOUNDS.writes),
            bytes: disk.bytes.min(CHAIN_BOUNDS.bytes),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ClientTickets> {
        self.tickets.lock()
    }

    /// Submits a complete chain to the disk; returns the ticket of its first group.
    fn submit_assembled_chain(&self, parts: ChainAssembly, mark: u64) -> Result<u64, Refusal> {
        self.wait_for_capacity(parts.chain.len(), parts.needs.held_bytes)?;
        let _giving = self.submitting.lock();
        let after = self.lock().disk_tickets_of(&parts.after)?;
        let (chain, bytes): (Vec<_>, Vec<_>) = parts.chain.into_iter().unzip();
        let submitted = self.disk.submit_with(chain, &after, SubmitOptions { mark, durable: None });
        let tickets = submitted.map_err(|refused| refusal_from_error(&refused.error))?;
        let mut ours = self.lock();
        let first = ours.issued + 1;
        tickets.into_iter().zip(bytes).for_each(|(ticket, bytes)| ours.add_group(ticket, bytes));
        Ok(first)
    }

    /// Waits until the client may submit this much more.
    fn wait_for_capacity(&self, groups: usize, bytes: u64) -> Result<(), Refusal> {
        loop {
            // Not in the loop's head: the lock would be held during the wait.
            let in_the_way = self.lock().blocking_ticket(groups, bytes);
            match in_the_way {
                Some((ticket, RequiredState::Settled)) => self.wait_ticket_visible(ticket)?,
                Some((ticket, RequiredState::Durable)) => {
                    self.wait_durable_without_timeout(ticket)?
                }
                None => return Ok(()),
            }
        }
    }

    /// Waits, also while the disk is unreachable.
    fn wait_durable_without_timeout(&self, ticket: u64) -> Result<(), Refusal> {
        loop {
            match self.wait_ticket_durable(ticket) {
                Err(Refusal::Timeout) => {}
                waited => return waited,
            }
        }
    }

    fn wait_ticket_visible(&self, ticket: u64) -> Result<(), Refusal> {
        let Some(ours) = self.lock().disk_ticket_of(ticket)? else { return Ok(()) };
        self.disk.wait_visible(ours).map_err(|error| refusal_from_error(&error))?;
        self.lock().mark_visible(ticket);
        Ok(())
    }

    fn wait_ticket_durable(&self, ticket: u64) -> Result<(), Refusal> {
        let Some(ours) = self.lock().disk_ticket_of(ticket)? else { return Ok(()) };
        self.disk.wait_durable(ours).map_err(|error| refusal_from_error(&error))?;
        let mut tickets = self.lock();
        tickets.mark_visible(ticket);
        tickets.mark_durable(ticket);
        Ok(())
    }
}

/// State that a group must reach before others can be accepted.
enum RequiredState {
    Settled,
    Durable,
}

impl ClientTickets {
    /// Returns the disk's ticket, or `None` if the group is already durable.
    fn disk_ticket_of(&self, ticket: u64) -> Result<Option<Ticket>, Refusal> {
        if ticket == 0 || ticket > self.issued {
            return Err(Refusal::NotFound);
        }
        Ok(self.live.get(&ticket).map(|(ours, _)| *ours))
    }

    fn disk_tickets_of(&self, tickets: &[u64]) -> Result<Vec<Ticket>, Refusal> {
        tickets.iter().filter_map(|ticket| self.disk_ticket_of(*ticket).transpose()).collect()
    }

    /// Returns the ticket to wait for, and its state, before so much more can be accepted.
    fn blocking_ticket(&self, groups: usize, bytes: u64) -> Option<(u64, RequiredState)> {
        if self.invisible_bytes > 0 && self.invisible_bytes + bytes > MAX_LIVE_BYTES {
            return Some((self.settled + 1, RequiredState::Settled));
        }
        // Half of them at once, so that not every group costs a flush.
        let half = self.live.keys().nth(self.live.len() / 2);
        half.filter(|_| self.live.len() + groups > MAX_LIVE_GROUPS)
            .map(|ticket| (*ticket, RequiredState::Durable))
    }

    fn add_group(&mut self, ours: Ticket, bytes: u64) {
        self.issued += 1;
        self.live.insert(self.issued, (ours, bytes));
        self.invisible_bytes += bytes;
    }

    /// Records that groups up to `ticket` are visible and hold no memory.
    fn mark_visible(&mut self, ticket: u64) {
        // Another lane may have recorded a later ticket.
        if ticket > self.settled {
            let done: u64 =
                self.live.range(self.settled + 1..=ticket).map(|(_, (_, bytes))| bytes).sum();
            self.invisible_bytes -= done;
            self.settled = ticket;
        }
    }

    /// Records that groups up to `ticket` are durable.
    fn mark_durable(&mut self, ticket: u64) {
        self.live = self.live.split_off(&(ticket + 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, ForwardingDisk, MemoryDisk, Refused, SubmitOptions};

    /// Dependencies of a group, and offset and length of each write.
    type RecordedGroup = (Vec<Ticket>, Vec<(u64, usize)>);

    /// Records the groups and the durable waits.
    struct RecordingDisk {
        disk: MemoryDisk,
        groups: Mutex<Vec<RecordedGroup>>,
        waits: Mutex<Vec<Ticket>>,
    }

    impl RecordingDisk {
        fn new() -> Self {
            let disk = MemoryDisk::new(vec![0; 8192], 512);
            Self { disk, groups: Mutex::default(), waits: Mutex::default() }
        }
    }

    impl ForwardingDisk for RecordingDisk {
        type Inner = MemoryDisk;

        fn inner_disk(&self) -> &MemoryDisk {
            &self.disk
        }

        fn submit_with(
            &self,
            chain: Vec<Group>,
            after: &[Ticket],
            terms: SubmitOptions,
        ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
            let write = |write: &Write| (write.at_bytes, write.block.len());
            let lens = chain.iter().map(|group| group.writes.iter().map(write).collect());
            let lens: Vec<Vec<_>> = lens.collect();
            let tickets = self.disk.submit_chain(chain, after)?;
            let mut after = after.to_vec();
            for (ticket, writes) in tickets.iter().zip(lens) {
                let follows = std::mem::replace(&mut after, vec![*ticket]);
                self.groups.lock().push((follows, writes));
            }
            terms.wait(self, &tickets)?;
            Ok(tickets)
        }

        fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
            self.waits.lock().push(ticket);
            self.disk.wait_durable(ticket)
        }
    }

    fn served_lane<'a>(service: &'a ClientService<'a>) -> ServedLane<'a> {
        ServedLane { service, parts: RefCell::default() }
    }

    /// Returns a part with one write, and the end of its group unless more follow.
    fn submit_message(at: u64, byte: u8, after: &[u64], more: bool) -> Submit {
        let ends: &[u32] = if more { &[] } else { &[1] };
        submit_message_with_ends(&[(at, byte)], ends, after, more)
    }

    fn submit_message_with_ends(
        writes: &[(u64, u8)],
        ends: &[u32],
        after: &[u64],
        more: bool,
    ) -> Submit {
        let write = |&(at, byte): &(u64, u8)| {
            let mut block = Block::private(512);
            block.copy_in(0, &[byte; 512]);
            (at, block)
        };
        let blocks: Vec<_> = writes.iter().map(write).collect();
        Submit {
            blocks: blocks.try_into().unwrap(),
            ends: ends.to_vec().try_into().unwrap(),
            after: after.to_vec().try_into().unwrap(),
            mark: 0,
            durable: None,
            more,
        }
    }

    fn byte_at(disk: &MemoryDisk, at: u64) -> u8 {
        let block = disk.read_now(Extent::new(at, 512), Block::private(512)).unwrap();
        block.into_private()[0]
    }

    #[test]
    fn group_is_submitted_after_its_last_part() {
        let disk = MemoryDisk::new(vec![0; 8192], 512);
        let service = ClientService::new(&disk);
        let lane = served_lane(&service);
        let mut first = submit_message(0, 1, &[], true);
        let begun = lane.submit(&mut first).unwrap();
        assert_eq!((begun, first.blocks.len(), byte_at(&disk, 0)), (None, 1, 0));
        // Another lane has its own groups.
        assert_eq!(
            served_lane(&service).submit(&mut submit_message(512, 2, &[], false)).unwrap(),
            Some(1)
        );
        assert_eq!((byte_at(&disk, 0), byte_at(&disk, 512)), (0, 2));
        assert_eq!(lane.submit(&mut submit_message(1024, 3, &[1], false)).unwrap(), Some(2));
        assert_eq!((byte_at(&disk, 0), byte_at(&disk, 1024)), (1, 3));
        assert!(
            lane.wait(&mut Wait { ticket: 1 }).is_ok()
                && lane.wait(&mut Wait { ticket: 1 }).is_ok()
        );
        for unknown in [0, 3, u64::MAX] {
            assert_eq!(lane.wait(&mut Wait { ticket: unknown }).unwrap_err(), Refusal::NotFound);
        }
    }

    #[test]
    fn durable_submit_waits_in_same_message() {
        let disk = RecordingDisk::new();
        let service = ClientService::new(&disk);
        let lane = served_lane(&service);
        let with = |durable| Submit {
            durable,
            ..submit_message_with_ends(&[(0, 1), (512, 2)], &[1, 2], &[], false)
        };
        assert_eq!(lane.submit(&mut with(Some(0))), Ok(Some(1)));
        let waited = || std::mem::take(&mut *disk.waits.lock());
        assert_eq!(waited(), [Ticket(1)], "and for no later group");
        assert_eq!(lane.submit(&mut with(None)), Ok(Some(3)));
        assert_eq!(lane.submit(&mut with(Some(2))), Err(Refusal::Invalid));
        assert_eq!(lane.submit(&mut with(Some(1))), Ok(Some(5)), "nothing of the one before");
        assert_eq!(waited(), [Ticket(6)]);
    }

    #[test]
    fn refused_part_drops_group_and_returns_blocks() {
        let disk = MemoryDisk::new(vec![0; 8192], 512);
        let service = ClientService::new(&disk);
        let lane = served_lane(&service);
        for (mut bad, why) in [
            (submit_message(8192, 9, &[], false), Refusal::Invalid),
            (submit_message(1, 9, &[], true), Refusal::Invalid),
            (submit_message(u64::MAX - 511, 9, &[], true), Refusal::Invalid),
            (submit_message(512, 9, &[7], false), Refusal::NotFound),
        ] {
            lane.submit(&mut submit_message(0, 9, &[], true)).unwrap();
            assert_eq!(lane.submit(&mut bad), Err(why));
            assert_eq!((bad.blocks.len(), bad.blocks[0].1.len()), (1, 512));
            // The next write begins a new group.
            lane.submit(&mut submit_message(1024, 1, &[], false)).unwrap();
            assert_eq!((byte_at(&disk, 0), byte_at(&disk, 512)), (0, 0));
        }
    }

    #[test]
    fn chain_is_submitted_after_its_last_group() {
        let disk = RecordingDisk::new();
        let service = ClientService::new(&disk);
        let lane = served_lane(&service);
        let groups = || std::mem::take(&mut *disk.groups.lock());
        // Three groups over two parts, the middle one split and the last one empty.
        let mut first = submit_message_with_ends(&[(0, 1), (512, 1), (2048, 2)], &[2], &[], true);
        assert_eq!(lane.submit(&mut first).unwrap(), None);
        assert!(groups().is_empty());
        let mut second = submit_message_with_ends(&[(2560, 2), (0, 2)], &[2, 2], &[], false);
        assert_eq!(lane.submit(&mut second).unwrap(), Some(1));
        assert_eq!(
            groups(),
            [
                (vec![], vec![(0, 1024)]),
                (vec![Ticket(1)], vec![(2048, 512), (2560, 512), (0, 512)]),
                (vec![Ticket(2)], vec![]),
            ]
        );
        // Group ends that go back, exceed the part, or are missing at the end.
        for (ends, more) in [(&[1, 0][..], true), (&[2], true), (&[], false), (&[0], false)] {
            let refused = lane.submit(&mut submit_message_with_ends(&[(0, 9)], ends, &[], more));
            assert_eq!(refused, Err(Refusal::Invalid), "{ends:?}");
        }
        assert_eq!(
            lane.submit(&mut submit_message_with_ends(&[], &[], &[], false)).unwrap_err(),
            Refusal::Invalid
        );
        assert!(groups().is_empty());
        assert_eq!(lane.submit(&mut submit_message(0, 3, &[3], false)).unwrap(), Some(4));
        assert!(lane.wait_visible(&mut Settle { ticket: 4 }).is_ok());
        assert_eq!(lane.wait_visible(&mut Settle { ticket: 5 }).unwrap_err(), Refusal::NotFound);
    }

    #[test]
    fn memory_held_for_client_is_bounded() {
        let disk = MemoryDisk::new(vec![0; 1 << 20], 512);
        let service = ClientService::new(&disk);
        let lane = served_lane(&service);
        let large = || Submit {
            blocks: vec![(0, Block::private(1 << 20))].try_into().unwrap(),
            ends: Default::default(),
            after: Default::default(),
            mark: 0,
            durable: None,
            more: true,
        };
        for _ in 0..64 {
            lane.submit(&mut large()).unwrap();
        }
        assert_eq!(lane.submit(&mut large()).unwrap_err(), Refusal::Quota);
        // Small writes take a page each.
        let mut small = 0u64;
        let refused = loop {
            match lane.submit(&mut submit_message_with_ends(&[(0, 0); 64], &[], &[], true)) {
                Ok(_) => small += 64,
                Err(why) => break why,
            }
        };
        assert_eq!((refused, small), (Refusal::Quota, MAX_HELD_BYTES / 4096));
        let ends = |more| submit_message_with_ends(&[], &[0; 16], &[], more);
        for _ in 0..CHAIN_BOUNDS.groups / 16 {
            lane.submit(&mut ends(true)).unwrap();
        }
        assert_eq!(lane.submit(&mut ends(false)).unwrap_err(), Refusal::Quota);
        for _ in 0..MAX_LIVE_GROUPS + 100 {
            lane.submit(&mut submit_message(0, 0, &[], false)).unwrap();
        }
        assert!(service.lock().live.len() <= MAX_LIVE_GROUPS);
        assert!(lane.wait(&mut Wait { ticket: 1 }).is_ok(), "forgotten because it is durable");
        let last = MAX_LIVE_GROUPS as u64 + 100;
        assert!(lane.wait(&mut Wait { ticket: last }).is_ok());
        let tickets = service.lock();
        assert_eq!((tickets.live.len(), tickets.invisible_bytes), (0, 0));
    }
}
