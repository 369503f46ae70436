//! The serving side: fits any disk to the contract.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use draconis_exchange::channel::{Lost, Server};
use draconis_exchange::contract::disk::{
    self, AckProperties, AckRead, AckSubmit, AckWait, DiskServer, NakProperties, NakRead,
    NakSubmit, NakWait, Read, Submit, Wait,
};
use draconis_exchange::contract::{Call, Refusal};
use draconis_exchange::heap::{ALIGN_BYTES, Block, Private};

use super::refusal;
use crate::{Atomic, Disk, Extent, Group, Ticket, Urgency, Write};

/// Most writes of one group.
pub const GROUP_WRITES_MAX: usize = 1 << 14;
/// Most bytes of one group, in whole pages of memory.
pub const GROUP_BYTES_MAX: usize = 64 << 20;
/// Most tickets that one group is put after.
const GROUP_AFTER_MAX: usize = 1 << 10;
/// Groups of one client that may be given to the disk and not yet known to be durable.
const LIVE_GROUPS_MAX: usize = 1 << 12;
/// Their bytes. Beyond either the service waits for the oldest before it takes another.
const LIVE_BYTES_MAX: usize = 4 * GROUP_BYTES_MAX;

/// Serves `disk` to one client over all of `ends`, a thread for each; returns once all are
/// closed. Each lane collects parts of its own; tickets are known on all of them.
///
/// # Errors
/// Why the client was lost on the first lane that lost it: silent for `patience`, or in
/// breach of the contract.
pub fn serve(
    disk: &dyn Disk,
    ends: Vec<Server<disk::Disk>>,
    patience: Duration,
) -> Result<(), Lost> {
    let service = Service { disk, tickets: Mutex::default() };
    thread::scope(|scope| {
        let service = &service;
        let serve = |end| {
            scope.spawn(move || {
                disk::serve(end, &Lane { service, parts: RefCell::default() }, patience)
            })
        };
        let lanes: Vec<_> = ends.into_iter().map(serve).collect();
        let joined = lanes.into_iter().map(|lane| lane.join().unwrap_or(Err(Lost::Closed)));
        // All are joined before the first trouble is told.
        joined.collect::<Vec<_>>().into_iter().collect()
    })
}

/// A disk and what one client has given to it.
struct Service<'a> {
    disk: &'a dyn Disk,
    tickets: Mutex<Tickets>,
}

#[derive(Default)]
struct Tickets {
    /// The client's tickets count from 1.
    given: u64,
    /// Those not yet known to be durable: the disk's own ticket, and bytes of the group.
    live: BTreeMap<u64, (Ticket, usize)>,
    live_bytes: usize,
}

/// One end of the contract.
struct Lane<'a> {
    service: &'a Service<'a>,
    parts: RefCell<Parts>,
}

/// What has come of a group so far.
#[derive(Default)]
struct Parts {
    writes: Vec<Write>,
    after: Vec<u64>,
    bytes: usize,
}

impl DiskServer for Lane<'_> {
    fn properties(&self, _: disk::Properties) -> Result<AckProperties, NakProperties> {
        let ours = self.service.disk.properties();
        Ok(AckProperties {
            len_bytes: ours.len_bytes,
            sector_bytes: ours.sector_bytes,
            best_io_bytes: ours.best_io_bytes,
            rotational: ours.rotational,
            read_only: ours.read_only,
            atomic: match ours.atomic {
                Atomic::None | Atomic::AgainstDeath => 1,
                Atomic::AgainstPowerCut => 2,
            },
        })
    }

    fn read(&self, m: Read) -> Result<AckRead, NakRead> {
        let at = Extent::new(m.at_bytes, m.buffer.len() as u64);
        let len = m.buffer.len();
        let urgency = if m.urgent { Urgency::Now } else { Urgency::Ahead };
        match self.service.disk.read(at, m.buffer, urgency).wait() {
            Some(Ok(buffer)) => Ok(AckRead { buffer }),
            Some(Err(refused)) => {
                let why = refusal(&refused.error);
                Err(NakRead { buffer: refused.goods.unwrap_or_else(|| Block::private(len)), why })
            }
            None => Err(NakRead { buffer: Block::private(len), why: Refusal::Gone }),
        }
    }

    fn submit(&self, m: Submit) -> Result<AckSubmit, NakSubmit> {
        // Taken out: a part that is refused leaves nothing of its group.
        let mut parts = self.parts.take();
        let done = parts.add(self.service.disk, &m).and_then(|()| {
            if m.more {
                self.parts.replace(parts);
                return Ok(None);
            }
            self.service.apply(parts).map(Some)
        });
        match done {
            Ok(ticket) => Ok(AckSubmit { blocks: m.blocks, ticket }),
            Err(why) => Err(m.refuse(why)),
        }
    }

    fn wait(&self, m: Wait) -> Result<AckWait, NakWait> {
        match self.service.wait(m.ticket) {
            Ok(()) => Ok(AckWait {}),
            Err(why) => Err(m.refuse(why)),
        }
    }
}

impl Parts {
    /// Copies what `m` brings, if it may be written and the group stays within bounds.
    fn add(&mut self, disk: &dyn Disk, m: &Submit) -> Result<(), Refusal> {
        let properties = disk.properties();
        if properties.read_only {
            return Err(Refusal::ReadOnly);
        }
        let room = self.writes.len() + m.blocks.len() <= GROUP_WRITES_MAX
            && self.after.len() + m.after.len() <= GROUP_AFTER_MAX;
        if !room {
            return Err(Refusal::Quota);
        }
        for (at_bytes, block) in m.blocks.iter() {
            let extent = Extent::new(*at_bytes, block.len() as u64);
            properties.check(extent, block.len()).map_err(|error| refusal(&error))?;
            self.bytes += block.len().next_multiple_of(ALIGN_BYTES);
            if self.bytes > GROUP_BYTES_MAX {
                return Err(Refusal::Quota);
            }
            let mut copy = Private::new(block.len());
            block.copy_out(0, &mut copy);
            self.writes.push(Write { at_bytes: *at_bytes, block: copy.into() });
        }
        self.after.extend_from_slice(&m.after);
        Ok(())
    }
}

impl Service<'_> {
    fn lock(&self) -> MutexGuard<'_, Tickets> {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the disk a whole group.
    fn apply(&self, parts: Parts) -> Result<u64, Refusal> {
        let after = self.lock().find_all(&parts.after)?;
        loop {
            // Not in the loop's head: the lock would be held while it waits.
            let oldest = self.lock().oldest_in_the_way(parts.bytes);
            let Some(oldest) = oldest else { break };
            self.wait(oldest)?;
        }
        let submitted = self.disk.submit(Group { writes: parts.writes }, &after);
        let ticket = submitted.map_err(|refused| refusal(&refused.error))?;
        Ok(self.lock().give(ticket, parts.bytes))
    }

    fn wait(&self, ticket: u64) -> Result<(), Refusal> {
        let Some(ours) = self.lock().find(ticket)? else { return Ok(()) };
        self.disk.wait(ours).map_err(|error| refusal(&error))?;
        self.lock().forget(ticket);
        Ok(())
    }
}

impl Tickets {
    /// The disk's ticket, or none if the group is durable already.
    fn find(&self, ticket: u64) -> Result<Option<Ticket>, Refusal> {
        if ticket == 0 || ticket > self.given {
            return Err(Refusal::NotFound);
        }
        Ok(self.live.get(&ticket).map(|(ours, _)| *ours))
    }

    fn find_all(&self, tickets: &[u64]) -> Result<Vec<Ticket>, Refusal> {
        tickets.iter().filter_map(|ticket| self.find(*ticket).transpose()).collect()
    }

    fn oldest_in_the_way(&self, bytes: usize) -> Option<u64> {
        let full = self.live.len() >= LIVE_GROUPS_MAX || self.live_bytes + bytes > LIVE_BYTES_MAX;
        self.live.first_key_value().filter(|_| full).map(|(ticket, _)| *ticket)
    }

    fn give(&mut self, ours: Ticket, bytes: usize) -> u64 {
        self.given += 1;
        self.live.insert(self.given, (ours, bytes));
        self.live_bytes += bytes;
        self.given
    }

    fn forget(&mut self, ticket: u64) {
        // Another lane may have waited for it, too.
        if let Some((_, bytes)) = self.live.remove(&ticket) {
            self.live_bytes -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryDisk;

    fn lane_of<'a>(service: &'a Service<'a>) -> Lane<'a> {
        Lane { service, parts: RefCell::default() }
    }

    fn part(at: u64, byte: u8, after: &[u64], more: bool) -> Submit {
        let mut block = Block::private(512);
        block.copy_in(0, &[byte; 512]);
        let (blocks, after) = (vec![(at, block)], after.to_vec());
        Submit { blocks: blocks.try_into().unwrap(), after: after.try_into().unwrap(), more }
    }

    fn byte(disk: &MemoryDisk, at: u64) -> u8 {
        let block = disk.read_now(Extent::new(at, 512), Block::private(512)).unwrap();
        block.into_private()[0]
    }

    #[test]
    fn a_group_is_applied_once_it_is_whole() {
        let disk = MemoryDisk::new(vec![0; 8192], 512);
        let service = Service { disk: &disk, tickets: Mutex::default() };
        let lane = lane_of(&service);
        let ack = lane.submit(part(0, 1, &[], true)).unwrap();
        assert_eq!((ack.ticket, ack.blocks.len(), byte(&disk, 0)), (None, 1, 0));
        // Another lane's group is another group.
        assert_eq!(lane_of(&service).submit(part(512, 2, &[], false)).unwrap().ticket, Some(1));
        assert_eq!((byte(&disk, 0), byte(&disk, 512)), (0, 2));
        assert_eq!(lane.submit(part(1024, 3, &[1], false)).unwrap().ticket, Some(2));
        assert_eq!((byte(&disk, 0), byte(&disk, 1024)), (1, 3));
        assert!(lane.wait(Wait { ticket: 1 }).is_ok() && lane.wait(Wait { ticket: 1 }).is_ok());
        for unknown in [0, 3, u64::MAX] {
            assert_eq!(lane.wait(Wait { ticket: unknown }).unwrap_err().why, Refusal::NotFound);
        }
    }

    #[test]
    fn a_refused_part_ends_its_group_and_comes_back() {
        let disk = MemoryDisk::new(vec![0; 8192], 512);
        let service = Service { disk: &disk, tickets: Mutex::default() };
        let lane = lane_of(&service);
        for (bad, why) in [
            (part(8192, 9, &[], false), Refusal::Invalid),
            (part(1, 9, &[], true), Refusal::Invalid),
            (part(u64::MAX - 511, 9, &[], true), Refusal::Invalid),
            (part(512, 9, &[7], false), Refusal::NotFound),
        ] {
            lane.submit(part(0, 9, &[], true)).unwrap();
            let nak = lane.submit(bad).unwrap_err();
            assert_eq!((nak.why, nak.blocks.len(), nak.blocks[0].1.len()), (why, 1, 512));
            // What follows is a group of its own.
            lane.submit(part(1024, 1, &[], false)).unwrap();
            assert_eq!((byte(&disk, 0), byte(&disk, 512)), (0, 0));
        }
    }

    #[test]
    fn what_a_client_can_make_the_service_hold_is_bounded() {
        let disk = MemoryDisk::new(vec![0; 1 << 20], 512);
        let service = Service { disk: &disk, tickets: Mutex::default() };
        let lane = lane_of(&service);
        let large = |more| Submit {
            blocks: vec![(0, Block::private(1 << 20))].try_into().unwrap(),
            after: Default::default(),
            more,
        };
        for _ in 0..64 {
            lane.submit(large(true)).unwrap();
        }
        assert_eq!(lane.submit(large(true)).unwrap_err().why, Refusal::Quota);
        // Small writes take a page each.
        for _ in 0..GROUP_WRITES_MAX {
            lane.submit(part(0, 0, &[], true)).unwrap();
        }
        assert_eq!(lane.submit(part(0, 0, &[], true)).unwrap_err().why, Refusal::Quota);
        for _ in 0..LIVE_GROUPS_MAX + 100 {
            lane.submit(part(0, 0, &[], false)).unwrap();
        }
        assert_eq!(service.lock().live.len(), LIVE_GROUPS_MAX);
        assert!(lane.wait(Wait { ticket: 1 }).is_ok(), "forgotten because it is durable");
    }
}
