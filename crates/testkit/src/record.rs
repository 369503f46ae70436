//! A disk that records its requests.

use draconis_types::Block;
use draconis_types::lock::{Mutex, MutexGuard};

use draconis_device::{
    Disk, Error, Extent, Group, Pending, ReadAnswer, Refused, SubmitOptions, Ticket, Urgency, Write,
};

/// A request, in submission order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A read.
    Read(Extent, Urgency),
    /// A group that was accepted: offset and contents of each write. The groups of a chain are
    /// consecutive.
    Group {
        /// Its ticket.
        ticket: Ticket,
        /// Ticket of the first group of its chain.
        chain: Ticket,
        /// Its dependencies: `after` of the chain, or the group before it.
        after: Vec<Ticket>,
        /// Offset and contents of each write.
        writes: Vec<(u64, Vec<u8>)>,
    },
    /// A discard of extents once its dependencies are durable.
    Discard {
        /// The discarded extents.
        extents: Vec<Extent>,
        /// Its dependencies.
        after: Vec<Ticket>,
    },
    /// A wait reported this ticket as durable.
    Durable(Ticket),
    /// A call of [`RecordDisk::record_mark`].
    Mark(u64),
}

/// A disk that forwards all calls and records them.
pub struct RecordDisk<D> {
    disk: D,
    events: Mutex<Vec<Event>>,
}

impl<D: Disk> RecordDisk<D> {
    /// Wraps `disk`, with an empty record.
    pub fn new(disk: D) -> Self {
        Self { disk, events: Mutex::new(vec![]) }
    }

    /// Returns the record so far and empties it.
    pub fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut self.lock())
    }

    /// Records a mark of the caller, such as an acknowledgement.
    pub fn record_mark(&self, mark: u64) {
        self.record(Event::Mark(mark));
    }

    /// Returns the inner disk.
    pub fn into_inner(self) -> D {
        self.disk
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Event>> {
        self.events.lock()
    }

    fn record(&self, event: Event) {
        self.lock().push(event);
    }
}

/// Returns offset and contents of each write of a group.
fn copy_group_writes(group: &Group) -> Vec<(u64, Vec<u8>)> {
    let copy = |write: &Write| {
        let mut bytes = vec![0; write.block.len()];
        write.block.copy_out(0, &mut bytes);
        (write.at_bytes, bytes)
    };
    group.writes.iter().map(copy).collect()
}

impl<D: Disk> draconis_device::ForwardingDisk for RecordDisk<D> {
    type Inner = D;

    fn inner_disk(&self) -> &D {
        &self.disk
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        self.record(Event::Read(at, urgency));
        self.inner_disk().read(at, into, urgency)
    }

    fn submit_with(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
        terms: SubmitOptions,
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let copies: Vec<_> = chain.iter().map(copy_group_writes).collect();
        // Held over both, so that groups are recorded in ticket order.
        let mut events = self.lock();
        let tickets = self.inner_disk().submit_chain(chain, after)?;
        let mut after = after.to_vec();
        for (&ticket, writes) in tickets.iter().zip(copies) {
            let follows = std::mem::replace(&mut after, vec![ticket]);
            let chain = tickets.first().copied().unwrap_or(ticket);
            events.push(Event::Group { ticket, chain, after: follows, writes });
        }
        drop(events);
        terms.wait(self, &tickets)?;
        Ok(tickets)
    }

    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        self.inner_disk().wait_durable(ticket)?;
        self.record(Event::Durable(ticket));
        Ok(())
    }

    /// Every change is a group.
    fn punch_hole(&self, _: Extent) -> Result<Option<Ticket>, Error> {
        Ok(None)
    }

    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), Error> {
        // Held over both, so that the discard precedes the later groups that it spares.
        let mut events = self.lock();
        self.inner_disk().discard(extents, after)?;
        events.push(Event::Discard { extents: extents.to_vec(), after: after.to_vec() });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use draconis_device::MemoryDisk;

    #[test]
    fn recorded_events_match_operations() {
        let disk = RecordDisk::new(MemoryDisk::new(vec![0; 4096], 512));
        let mut block = Block::private(512);
        block.copy_in(0, b"x");
        let group = Group { writes: vec![Write { at_bytes: 1024, block }] };
        let ticket = disk.submit(group, &[]).unwrap();
        disk.wait_durable(ticket).unwrap();
        let at = Extent::new(1024, 512);
        let read = disk.read(at, Block::private(512), Urgency::Ahead).wait().unwrap();
        assert_eq!(read.unwrap().bytes().unwrap()[0], b'x');
        let events = disk.take_events();
        let Event::Group { writes, .. } = &events[0] else { panic!("{events:?}") };
        assert_eq!((writes[0].0, writes[0].1[0]), (1024, b'x'));
        assert_eq!(events[1..], [Event::Durable(ticket), Event::Read(at, Urgency::Ahead)]);
        assert!(disk.take_events().is_empty());
    }

    #[test]
    fn chain_groups_are_recorded_in_order() {
        let disk = RecordDisk::new(MemoryDisk::new(vec![0; 4096], 512));
        let first = disk.submit(Group::default(), &[]).unwrap();
        disk.record_mark(7);
        let chain = vec![Group::default(), Group::default()];
        assert_eq!(disk.submit_chain(chain, &[first]).unwrap(), [Ticket(2), Ticket(3)]);
        disk.submit(Group::default(), &[Ticket(9)]).unwrap_err();
        let group = |ticket, chain, after: &[u64]| Event::Group {
            ticket: Ticket(ticket),
            chain: Ticket(chain),
            after: after.iter().copied().map(Ticket).collect(),
            writes: vec![],
        };
        let expected = [group(1, 1, &[]), Event::Mark(7), group(2, 2, &[1]), group(3, 2, &[2])];
        assert_eq!(disk.take_events(), expected);
    }

    #[test]
    fn discard_is_recorded_in_submission_order() {
        let disk = RecordDisk::new(MemoryDisk::new(vec![7; 4096], 512));
        let ticket = disk.submit(Group::default(), &[]).unwrap();
        let extents = vec![Extent::new(0, 512), Extent::new(1024, 512)];
        disk.discard(&extents, &[ticket]).unwrap();
        disk.discard(&[Extent::new(4096, 1)], &[]).unwrap_err();
        disk.submit(Group::default(), &[]).unwrap();
        let events = disk.take_events();
        assert_eq!(events.len(), 3);
        assert_eq!(events[1], Event::Discard { extents, after: vec![ticket] });
    }
}
