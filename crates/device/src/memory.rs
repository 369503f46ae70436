//! A disk in memory: every write is durable the moment it is submitted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use draconis_exchange::heap::Block;

use crate::{
    Atomic, Disk, Error, Extent, Group, Pending, Properties, ReadAnswer, Refused, Ticket, Urgency,
};

/// A disk in memory.
#[derive(Debug)]
pub struct MemoryDisk {
    bytes: RwLock<Vec<u8>>,
    properties: Properties,
    tickets: AtomicU64,
}

impl MemoryDisk {
    /// A disk that holds `bytes`, in sectors of `sector_bytes`. What does not fill the
    /// last sector cannot be reached.
    pub fn new(bytes: Vec<u8>, sector_bytes: u32) -> Self {
        let len = bytes.len() as u64;
        let properties = Properties {
            len_bytes: len - len % u64::from(sector_bytes),
            sector_bytes,
            best_io_bytes: 128 << 10,
            rotational: false,
            read_only: false,
            atomic: Atomic::AgainstDeath,
        };
        Self { bytes: RwLock::new(bytes), properties, tickets: AtomicU64::new(0) }
    }

    /// What the disk holds now.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Disk for MemoryDisk {
    fn properties(&self) -> Properties {
        self.properties
    }

    fn read(&self, at: Extent, mut into: Block, _: Urgency) -> Pending<ReadAnswer> {
        if let Err(error) = self.properties.check(at, into.len()) {
            return Pending::ready(Err(Refused { goods: Some(into), error }));
        }
        let bytes = self.bytes.read().unwrap_or_else(PoisonError::into_inner);
        into.copy_in(0, &bytes[at.start_bytes as usize..]);
        Pending::ready(Ok(into))
    }

    fn submit(&self, group: Group, after: &[Ticket]) -> Result<Ticket, Refused<Group>> {
        for write in &group.writes {
            let extent = Extent::new(write.at_bytes, write.block.len() as u64);
            if let Err(error) = self.properties.check(extent, write.block.len()) {
                return Err(Refused { goods: Some(group), error });
            }
        }
        let given = self.tickets.load(Ordering::Relaxed);
        if let Some(&unknown) = after.iter().find(|ticket| ticket.0 > given) {
            return Err(Refused { goods: Some(group), error: Error::NoTicket(unknown) });
        }
        let mut bytes = self.bytes.write().unwrap_or_else(PoisonError::into_inner);
        for write in &group.writes {
            let start = write.at_bytes as usize;
            write.block.copy_out(0, &mut bytes[start..start + write.block.len()]);
        }
        Ok(Ticket(self.tickets.fetch_add(1, Ordering::Relaxed) + 1))
    }

    fn wait(&self, ticket: Ticket) -> Result<(), Error> {
        if ticket.0 > self.tickets.load(Ordering::Relaxed) {
            return Err(Error::NoTicket(ticket));
        }
        Ok(())
    }
}
