//! A disk that fails on order.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use draconis_exchange::heap::Block;

use crate::{
    Disk, Error, Extent, Group, Pending, Properties, ReadAnswer, Refused, Ticket, Urgency,
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
    /// Every wait for a ticket.
    Flushes,
}

/// A disk that passes everything on, but for the faults it was given.
pub struct FaultDisk<D> {
    disk: D,
    faults: Mutex<Vec<(Hits, Fault)>>,
    requests: AtomicU64,
}

impl<D: Disk> FaultDisk<D> {
    /// `disk`, without a fault yet.
    pub fn new(disk: D) -> Self {
        Self { disk, faults: Mutex::new(vec![]), requests: AtomicU64::new(0) }
    }

    /// Adds a fault; it stays until [`FaultDisk::heal`].
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

    fn hits(&self, is_hit: impl Fn(Hits) -> bool) -> Vec<(Hits, Fault)> {
        let faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        faults.iter().copied().filter(|(hits, _)| is_hit(*hits)).collect()
    }
}

fn touch(a: Extent, b: Extent) -> bool {
    let end = |e: Extent| e.end_bytes().unwrap_or(u64::MAX);
    a.start_bytes < end(b) && b.start_bytes < end(a)
}

fn failed(what: &'static str, extent: Extent) -> Error {
    Error::Io { what, extent, errno: rustix::io::Errno::IO }
}

impl<D: Disk> Disk for FaultDisk<D> {
    fn properties(&self) -> Properties {
        self.disk.properties()
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
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
                (Fault::Fail, Ok(block)) => {
                    Err(Refused { goods: Some(block), error: failed("read", at) })
                }
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
            };
        }
        Pending::ready(answer)
    }

    fn submit(&self, group: Group, after: &[Ticket]) -> Result<Ticket, Refused<Group>> {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        let extents: Vec<Extent> =
            group.writes.iter().map(|w| Extent::new(w.at_bytes, w.block.len() as u64)).collect();
        let faults = self.hits(|hits| match hits {
            Hits::Writes(extent) => extents.iter().any(|&write| touch(extent, write)),
            Hits::Request(n) => n == number,
            _ => false,
        });
        for (_, fault) in faults {
            match fault {
                Fault::Delay(time) => std::thread::sleep(time),
                _ => {
                    let extent = extents.first().copied().unwrap_or(Extent::new(0, 0));
                    let error = failed("write", extent);
                    return Err(Refused { goods: Some(group), error });
                }
            }
        }
        self.disk.submit(group, after)
    }

    fn wait(&self, ticket: Ticket) -> Result<(), Error> {
        for (_, fault) in self.hits(|hits| hits == Hits::Flushes) {
            match fault {
                Fault::Delay(time) => std::thread::sleep(time),
                _ => return Err(failed("flush", Extent::new(0, 0))),
            }
        }
        self.disk.wait(ticket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryDisk, Write};

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
}
