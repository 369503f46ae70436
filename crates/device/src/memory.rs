//! A disk in memory: every write is durable as soon as it is submitted.

use std::sync::atomic::{AtomicU64, Ordering};

use draconis_types::Block;
use draconis_types::lock::RwLock;

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
    /// Creates a disk with contents `bytes` and sectors of `sector_bytes`. A partial last sector is
    /// not accessible.
    pub fn new(bytes: Vec<u8>, sector_bytes: u32) -> Self {
        let len = bytes.len() as u64;
        let properties = Properties {
            len_bytes: len - len % u64::from(sector_bytes),
            sector_bytes,
            best_io_bytes: 128 << 10,
            rotational: false,
            read_only: false,
            atomic: Atomic::AgainstDeath,
            discards: true,
        };
        Self { bytes: RwLock::new(bytes), properties, tickets: AtomicU64::new(0) }
    }

    /// Declares groups as atomic against power cuts.
    #[must_use]
    pub fn atomic_against_power_cuts(mut self) -> Self {
        self.properties.atomic = Atomic::AgainstPowerCut;
        self
    }

    /// Returns the contents.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes.into_inner()
    }
}

impl Disk for MemoryDisk {
    fn properties(&self) -> Properties {
        self.properties
    }

    fn read(&self, at: Extent, mut into: Block, _: Urgency) -> Pending<ReadAnswer> {
        if let Err(error) = self.properties.check_range(at, into.len()) {
            return Pending::ready(Err(Refused { payload: Some(into), error }));
        }
        let bytes = self.bytes.read();
        into.copy_in(0, &bytes[at.start_bytes as usize..]);
        Pending::ready(Ok(into))
    }

    fn submit_chain(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        if let Err(error) = self.properties.check_chain(&chain) {
            return Err(Refused { payload: Some(chain), error });
        }
        // Tickets are issued under the lock, so they ascend as the groups are written.
        let mut bytes = self.bytes.write();
        let given = self.tickets.load(Ordering::Relaxed);
        if let Some(&unknown) = after.iter().find(|ticket| ticket.0 > given) {
            return Err(Refused { payload: Some(chain), error: Error::UnknownTicket(unknown) });
        }
        for write in chain.iter().flat_map(|group| &group.writes) {
            let start = write.at_bytes as usize;
            write.block.copy_out(0, &mut bytes[start..start + write.block.len()]);
        }
        let last = given + chain.len() as u64;
        self.tickets.store(last, Ordering::Relaxed);
        Ok((given + 1..=last).map(Ticket).collect())
    }

    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        self.wait_durable(ticket)
    }

    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        if ticket.0 > self.tickets.load(Ordering::Relaxed) {
            return Err(Error::UnknownTicket(ticket));
        }
        Ok(())
    }

    fn punch_hole(&self, at: Extent) -> Result<Option<Ticket>, Error> {
        self.properties.check_range(at, at.len_bytes as usize)?;
        let start = at.start_bytes as usize;
        self.bytes.write()[start..start + at.len_bytes as usize].fill(0);
        Ok(Some(Ticket(self.tickets.fetch_add(1, Ordering::Relaxed) + 1)))
    }

    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), Error> {
        self.properties.check_extents(extents)?;
        let mut bytes = self.bytes.write();
        let given = self.tickets.load(Ordering::Relaxed);
        if let Some(&unknown) = after.iter().find(|ticket| ticket.0 > given) {
            return Err(Error::UnknownTicket(unknown));
        }
        // Zeroed at once, so that tests detect later reads early.
        let sector = u64::from(self.properties.sector_bytes);
        for whole in extents.iter().filter_map(|extent| extent.inner_aligned_extent(sector)) {
            let start = whole.start_bytes as usize;
            bytes[start..start + whole.len_bytes as usize].fill(0);
        }
        Ok(())
    }
}
