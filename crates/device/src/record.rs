//! A disk that remembers what was asked of it.

use std::sync::{Mutex, PoisonError};

use draconis_exchange::heap::Block;

use crate::{
    Disk, Error, Extent, Group, Pending, Properties, ReadAnswer, Refused, Ticket, Urgency,
};

/// One request, in the order in which they were made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A read.
    Read(Extent, Urgency),
    /// A group that was taken: where each write goes and what it holds.
    Group {
        /// The name it was given.
        ticket: Ticket,
        /// What it follows.
        after: Vec<Ticket>,
        /// First byte and contents of each write.
        writes: Vec<(u64, Vec<u8>)>,
    },
    /// A ticket was waited for, and the answer was that it is durable.
    Durable(Ticket),
}

/// A disk that passes everything on and keeps a list.
pub struct RecordDisk<D> {
    disk: D,
    events: Mutex<Vec<Event>>,
}

impl<D: Disk> RecordDisk<D> {
    /// `disk`, with an empty list.
    pub fn new(disk: D) -> Self {
        Self { disk, events: Mutex::new(vec![]) }
    }

    /// The list so far; it starts again empty.
    pub fn take(&self) -> Vec<Event> {
        std::mem::take(&mut self.events.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn note(&self, event: Event) {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }
}

impl<D: Disk> Disk for RecordDisk<D> {
    fn properties(&self) -> Properties {
        self.disk.properties()
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        self.note(Event::Read(at, urgency));
        self.disk.read(at, into, urgency)
    }

    fn submit(&self, group: Group, after: &[Ticket]) -> Result<Ticket, Refused<Group>> {
        let copy = |block: &Block| {
            let mut bytes = vec![0; block.len()];
            block.copy_out(0, &mut bytes);
            bytes
        };
        let writes = group.writes.iter().map(|w| (w.at_bytes, copy(&w.block))).collect();
        let ticket = self.disk.submit(group, after)?;
        self.note(Event::Group { ticket, after: after.to_vec(), writes });
        Ok(ticket)
    }

    fn wait(&self, ticket: Ticket) -> Result<(), Error> {
        self.disk.wait(ticket)?;
        self.note(Event::Durable(ticket));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryDisk, Write};

    #[test]
    fn the_list_holds_what_happened() {
        let disk = RecordDisk::new(MemoryDisk::new(vec![0; 4096], 512));
        let mut block = Block::private(512);
        block.copy_in(0, b"x");
        let group = Group { writes: vec![Write { at_bytes: 1024, block }] };
        let ticket = disk.submit(group, &[]).unwrap();
        disk.wait(ticket).unwrap();
        let at = Extent::new(1024, 512);
        let read = disk.read(at, Block::private(512), Urgency::Ahead).wait().unwrap();
        assert_eq!(read.unwrap().bytes().unwrap()[0], b'x');
        let events = disk.take();
        let Event::Group { writes, .. } = &events[0] else { panic!("{events:?}") };
        assert_eq!((writes[0].0, writes[0].1[0]), (1024, b'x'));
        assert_eq!(events[1..], [Event::Durable(ticket), Event::Read(at, Urgency::Ahead)]);
        assert!(disk.take().is_empty());
    }
}
