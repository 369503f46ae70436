//! A disk that fails on order.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use draconis_exchange::heap::Block;

use crate::{
    ChainBounds, Disk, Error, Extent, Group, Pending, Properties, ReadAnswer, Refused, Ticket,
    Urgency, Write,
};

/// What a fault does to the request it hits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The request fails with EIO.
    Fail,
    /// A read ends after this many bytes.
    Short {
        /// Bytes that still come.
        got_bytes: u64,
    },
    /// The request takes this much longer.
    Delay(Duration),
    /// The device breaks while it writes the group: what comes before it is written, and
    /// of the group itself the first writes. The group is taken as if nothing were wrong;
    /// that it failed is told to who settles it or waits for it, or for a later one, and
    /// nothing is taken any more. Of a flush: as [`Fault::Fail`].
    Break {
        /// Writes of the group that still happen, in the order they have in it.
        kept_writes: usize,
    },
    /// As [`Fault::Break`], and nothing answers any more, reads neither: [`Error::Gone`].
    PowerCut {
        /// Writes of the group that still happen, in the order they have in it.
        kept_writes: usize,
    },
    /// A read succeeds with this bit of its first byte within the fault's extent flipped.
    Flip {
        /// 0 to 7.
        bit: u8,
    },
}

/// Which requests a fault hits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hits {
    /// Every read that touches the extent.
    Reads(Extent),
    /// Every group with a write that touches the extent.
    Writes(Extent),
    /// The request with this number, reads and groups counted together from 0.
    Request(u64),
    /// The group with this number, counted from 0 whatever chain it comes in.
    Group(u64),
    /// Every wait for a ticket.
    Flushes,
}

/// A disk that passes everything on, but for the faults it was given.
pub struct FaultDisk<D> {
    disk: D,
    faults: Mutex<Vec<(Hits, Fault)>>,
    requests: AtomicU64,
    /// Held while a chain is taken: faults count its groups.
    writing: Mutex<Writing>,
}

#[derive(Default)]
struct Writing {
    groups: u64,
    broken: Option<Broken>,
}

/// What is left of a disk that broke.
#[derive(Clone)]
struct Broken {
    /// This group was not written whole, and nothing after it.
    first: Ticket,
    /// The last ticket that was given out.
    last: Ticket,
    error: Error,
    is_dark: bool,
}

impl<D: Disk> FaultDisk<D> {
    /// `disk`, without a fault yet.
    pub fn new(disk: D) -> Self {
        Self {
            disk,
            faults: Mutex::default(),
            requests: AtomicU64::new(0),
            writing: Mutex::default(),
        }
    }

    /// Adds a fault; it stays until [`FaultDisk::heal`]. What it broke stays broken.
    pub fn add(&self, hits: Hits, fault: Fault) {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).push((hits, fault));
    }

    /// Takes all faults away.
    pub fn heal(&self) {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// How many reads and groups there were.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// The disk below: what a power cut left.
    pub fn into_inner(self) -> D {
        self.disk
    }

    fn writing(&self) -> MutexGuard<'_, Writing> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What there is to say of `ticket` on a disk that broke.
    fn broken(&self, ticket: Ticket) -> Result<(), Error> {
        match &self.writing().broken {
            Some(broken) if broken.is_dark => Err(Error::Gone),
            Some(broken) if ticket > broken.last => Err(Error::NoTicket(ticket)),
            Some(broken) if ticket >= broken.first => Err(broken.error.clone()),
            _ => Ok(()),
        }
    }

    /// Faults of the groups of `chain`: the number of the group, and what happens to it.
    fn group_faults(&self, chain: &[Group], first: u64) -> Vec<(usize, Fault)> {
        let mut faults = vec![];
        for (nth, group) in chain.iter().enumerate() {
            let request = self.requests.fetch_add(1, Ordering::Relaxed);
            let hits = self.hits(|hits| match hits {
                Hits::Writes(extent) => group.writes.iter().any(|w| touch(extent, extent_of(w))),
                Hits::Request(n) => n == request,
                Hits::Group(n) => n == first + nth as u64,
                _ => false,
            });
            faults.extend(hits.into_iter().map(|(_, fault)| (nth, fault)));
        }
        faults
    }

    /// Writes what comes before the break; the tickets are those of an unharmed disk.
    fn break_in(
        &self,
        mut chain: Vec<Group>,
        after: &[Ticket],
        nth: usize,
        fault: Fault,
        broken: &mut Option<Broken>,
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let (Fault::Break { kept_writes } | Fault::PowerCut { kept_writes }) = fault else {
            return self.disk.submit_chain(chain, after);
        };
        let extent = chain[nth].writes.first().map_or(Extent::new(0, 0), extent_of);
        let lost = chain.split_off(nth + 1).len() as u64;
        chain[nth].writes.truncate(kept_writes);
        let mut tickets = self.disk.submit_chain(chain, after)?;
        let first = tickets.last().copied().unwrap_or(Ticket(0));
        tickets.extend((first.0 + 1..).take(lost as usize).map(Ticket));
        *broken = Some(Broken {
            first,
            last: Ticket(first.0 + lost),
            error: failed("write", extent),
            is_dark: matches!(fault, Fault::PowerCut { .. }),
        });
        Ok(tickets)
    }

    fn hits(&self, is_hit: impl Fn(Hits) -> bool) -> Vec<(Hits, Fault)> {
        let faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        faults.iter().copied().filter(|(hits, _)| is_hit(*hits)).collect()
    }
}

fn touch(a: Extent, b: Extent) -> bool {
    let end = |e: Extent| e.end_bytes().unwrap_or(u64::MAX);
    a.start_bytes < end(b) && b.start_bytes < end(a)
}

fn extent_of(write: &Write) -> Extent {
    Extent::new(write.at_bytes, write.block.len() as u64)
}

fn failed(what: &'static str, extent: Extent) -> Error {
    Error::Io { what, extent, errno: rustix::io::Errno::IO }
}

impl<D: Disk> Disk for FaultDisk<D> {
    fn properties(&self) -> Properties {
        self.disk.properties()
    }

    fn chain_bounds(&self) -> ChainBounds {
        self.disk.chain_bounds()
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        if self.writing().broken.as_ref().is_some_and(|broken| broken.is_dark) {
            return Pending::ready(Err(Refused { goods: Some(into), error: Error::Gone }));
        }
        let faults = self.hits(|hits| match hits {
            Hits::Reads(extent) => touch(extent, at),
            Hits::Request(n) => n == number,
            _ => false,
        });
        if faults.is_empty() {
            return self.disk.read(at, into, urgency);
        }
        let mut answer = self.disk.read_now(at, into);
        for (hits, fault) in faults {
            answer = match (fault, answer) {
                (Fault::Delay(time), answer) => {
                    std::thread::sleep(time);
                    answer
                }
                (_, Err(refused)) => Err(refused),
                (Fault::Short { got_bytes }, Ok(block)) => {
                    let error = Error::Short { extent: at, got_bytes };
                    Err(Refused { goods: Some(block), error })
                }
                (Fault::Flip { bit }, Ok(mut block)) => {
                    let from = match hits {
                        Hits::Reads(extent) => extent.start_bytes.saturating_sub(at.start_bytes),
                        _ => 0,
                    };
                    let mut byte = [0];
                    block.copy_out(from as usize, &mut byte);
                    block.copy_in(from as usize, &[byte[0] ^ 1 << (bit & 7)]);
                    Ok(block)
                }
                (Fault::Fail | Fault::Break { .. } | Fault::PowerCut { .. }, Ok(block)) => {
                    Err(Refused { goods: Some(block), error: failed("read", at) })
                }
            };
        }
        Pending::ready(answer)
    }

    fn submit_chain(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let refuse = |chain, error| Err(Refused { goods: Some(chain), error });
        let mut writing = self.writing();
        if let Some(broken) = &writing.broken {
            let error = if broken.is_dark { Error::Gone } else { Error::Stopped };
            return refuse(chain, error);
        }
        let faults = self.group_faults(&chain, writing.groups);
        writing.groups += chain.len() as u64;
        let mut breaks = None;
        for (nth, fault) in faults {
            match fault {
                Fault::Delay(time) => std::thread::sleep(time),
                Fault::Break { .. } | Fault::PowerCut { .. } => {
                    breaks.get_or_insert((nth, fault));
                }
                _ => {
                    let first = chain[nth].writes.first();
                    let extent = first.map_or(Extent::new(0, 0), extent_of);
                    return refuse(chain, failed("write", extent));
                }
            }
        }
        match breaks {
            Some((nth, fault)) => self.break_in(chain, after, nth, fault, &mut writing.broken),
            None => self.disk.submit_chain(chain, after),
        }
    }

    fn settle(&self, ticket: Ticket) -> Result<(), Error> {
        self.broken(ticket)?;
        self.disk.settle(ticket)
    }

    fn wait(&self, ticket: Ticket) -> Result<(), Error> {
        self.broken(ticket)?;
        for (_, fault) in self.hits(|hits| hits == Hits::Flushes) {
            match fault {
                Fault::Delay(time) => std::thread::sleep(time),
                _ => return Err(failed("flush", Extent::new(0, 0))),
            }
        }
        self.disk.wait(ticket)
    }

    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), Error> {
        // What broke writes nothing, and forgets nothing either.
        match &self.writing().broken {
            Some(broken) if broken.is_dark => Err(Error::Gone),
            Some(_) => Ok(()),
            None => self.disk.discard(extents, after),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryDisk;

    fn read(disk: &dyn Disk, start: u64, len: u64) -> ReadAnswer {
        disk.read_now(Extent::new(start, len), Block::private(len as usize))
    }

    #[test]
    fn faults_hit_what_they_name() {
        let disk = FaultDisk::new(MemoryDisk::new(vec![0; 8192], 512));
        disk.add(Hits::Reads(Extent::new(1024, 512)), Fault::Fail);
        assert!(read(&disk, 0, 1024).is_ok());
        let refused = read(&disk, 512, 1024).unwrap_err();
        assert!(matches!(refused.error, Error::Io { .. }) && refused.goods.is_some());
        disk.heal();
        disk.add(Hits::Reads(Extent::new(1030, 1)), Fault::Flip { bit: 3 });
        let block = read(&disk, 1024, 512).unwrap().into_private();
        assert_eq!((block[5], block[6], block[7]), (0, 8, 0));
        disk.heal();
        disk.add(Hits::Request(disk.requests() + 1), Fault::Short { got_bytes: 3 });
        assert!(read(&disk, 0, 512).is_ok());
        assert!(matches!(
            read(&disk, 0, 512).unwrap_err().error,
            Error::Short { got_bytes: 3, .. }
        ));
        assert!(read(&disk, 0, 512).is_ok());
    }

    #[test]
    fn a_failed_group_and_a_failed_flush() {
        let disk = FaultDisk::new(MemoryDisk::new(vec![0; 8192], 512));
        let group = || Group { writes: vec![Write { at_bytes: 512, block: Block::private(512) }] };
        disk.add(Hits::Writes(Extent::new(600, 1)), Fault::Fail);
        assert_eq!(disk.submit(group(), &[]).unwrap_err().goods.unwrap().writes.len(), 1);
        disk.heal();
        let ticket = disk.submit(group(), &[]).unwrap();
        disk.add(Hits::Flushes, Fault::Fail);
        assert!(disk.wait(ticket).is_err());
    }

    #[test]
    fn a_disk_that_breaks_has_written_what_came_before() {
        let fill = |at_bytes, byte| {
            let mut block = Block::private(512);
            block.copy_in(0, &[byte; 512]);
            Write { at_bytes, block }
        };
        let group = |byte| Group { writes: vec![fill(0, byte), fill(512, byte)] };
        for (fault, is_dark) in
            [(Fault::Break { kept_writes: 1 }, false), (Fault::PowerCut { kept_writes: 1 }, true)]
        {
            let disk = FaultDisk::new(MemoryDisk::new(vec![0; 4096], 512));
            disk.submit(group(1), &[]).unwrap();
            disk.add(Hits::Group(2), fault);
            let tickets = disk.submit_chain(vec![group(2), group(3), group(4)], &[]).unwrap();
            assert_eq!(tickets, [Ticket(2), Ticket(3), Ticket(4)]);
            let dark = |otherwise| if is_dark { Err(Error::Gone) } else { otherwise };
            let broke = Err(failed("write", Extent::new(0, 512)));
            assert_eq!(disk.wait(tickets[0]), dark(Ok(())));
            assert_eq!(disk.settle(tickets[1]), dark(broke.clone()));
            assert_eq!(disk.wait(tickets[2]), dark(broke));
            assert_eq!(disk.wait(Ticket(5)), dark(Err(Error::NoTicket(Ticket(5)))));
            let refused = disk.submit(group(5), &[]).unwrap_err();
            assert_eq!(refused.error, if is_dark { Error::Gone } else { Error::Stopped });
            assert_eq!(refused.goods.unwrap().writes.len(), 2);
            assert_eq!(read(&disk, 0, 512).is_err(), is_dark);
            let bytes = disk.into_inner().into_bytes();
            assert_eq!((bytes[0], bytes[512]), (3, 2));
        }
    }

    #[test]
    fn a_fault_within_a_chain_refuses_all_of_it() {
        let disk = FaultDisk::new(MemoryDisk::new(vec![0; 4096], 512));
        let group =
            |at_bytes| Group { writes: vec![Write { at_bytes, block: Block::private(512) }] };
        disk.add(Hits::Writes(Extent::new(512, 512)), Fault::Fail);
        let refused = disk.submit_chain(vec![group(0), group(512)], &[]).unwrap_err();
        assert_eq!(refused.goods.unwrap().len(), 2);
        assert_eq!(disk.submit(group(0), &[]).unwrap(), Ticket(1));
    }
}
