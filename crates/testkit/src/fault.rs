//! A disk with injected faults.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use draconis_types::Block;
use draconis_types::lock::{Mutex, MutexGuard};

use draconis_device::{
    Disk, Error, Extent, Group, Pending, ReadAnswer, Refused, SubmitOptions, Ticket, Urgency, Write,
};

/// Effect of a fault on the request it hits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The request fails with EIO.
    Fail,
    /// A read ends after this many bytes.
    Short {
        /// Bytes that are still read.
        got_bytes: u64,
    },
    /// The request is delayed.
    Delay(Duration),
    /// The device breaks while it writes the group: earlier groups are written, and the first
    /// writes of this one. The group is accepted normally. Waiting for it or a later group reports
    /// the failure, and further groups are refused. For a flush: as [`Fault::Fail`].
    Break {
        /// Number of writes of the group that are still done, in their order.
        kept_writes: usize,
    },
    /// As [`Fault::Break`], and every further call fails with [`Error::ServiceEnded`], reads too.
    PowerCut {
        /// Number of writes of the group that are still done, in their order.
        kept_writes: usize,
    },
    /// A read succeeds with this bit flipped in its first byte within the fault's extent.
    Flip {
        /// 0 to 7.
        bit: u8,
    },
    /// A write is reported as done and never happens: the writes of the group that touch the
    /// fault's extent, or all if it names none. For a read: as [`Fault::Fail`].
    Lost,
    /// A write is reported as done and lands elsewhere: the first write that [`Fault::Lost`] would
    /// lose goes to this offset, the others keep their distance to it. Parts past the end of the
    /// disk are lost. A read returns the bytes at this offset.
    Misdirected {
        /// First byte; a multiple of the sector.
        to_bytes: u64,
    },
    /// A stored bit flips and stays so until the byte is rewritten, even after [`FaultDisk::clear_faults`].
    /// It is in the first byte of the request within the fault's extent; it flips after the write
    /// of a group, or before a read.
    Rot {
        /// 0 to 7.
        bit: u8,
    },
}

/// Requests that a fault hits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultTarget {
    /// Every read that touches the extent.
    Reads(Extent),
    /// Every group with a write that touches the extent.
    Writes(Extent),
    /// The request with this number, reads and groups counted together from 0.
    Request(u64),
    /// The group with this number, counted from 0 over all chains.
    Group(u64),
    /// Every wait for a ticket.
    Flushes,
}

/// A disk that forwards all calls, except for injected faults.
pub struct FaultDisk<D> {
    disk: D,
    faults: Mutex<Vec<(FaultTarget, Fault)>>,
    requests: AtomicU64,
    /// Held while a chain is accepted: faults count its groups.
    writing: Mutex<WriteState>,
    /// Flipped bits of stored bytes.
    rotten: Mutex<BTreeMap<u64, u8>>,
}

#[derive(Default)]
struct WriteState {
    groups: u64,
    broken: Option<BrokenState>,
}

/// State of a disk that broke.
#[derive(Clone)]
struct BrokenState {
    /// First group that was not written completely; nothing after it is written.
    first: Ticket,
    /// Last issued ticket.
    last: Ticket,
    error: Error,
    is_powered_off: bool,
}

impl<D: Disk> FaultDisk<D> {
    /// Wraps `disk`, without faults.
    pub fn new(disk: D) -> Self {
        Self {
            disk,
            faults: Mutex::default(),
            requests: AtomicU64::new(0),
            writing: Mutex::default(),
            rotten: Mutex::default(),
        }
    }

    /// Flips a bit of the stored byte, as [`Fault::Rot`].
    pub fn flip_stored_bit(&self, at_bytes: u64, bit: u8) {
        *self.flipped_bits().entry(at_bytes).or_default() |= 1 << (bit & 7);
    }

    /// Adds a fault; it stays until [`FaultDisk::clear_faults`], and its damage remains.
    pub fn add_fault(&self, hits: FaultTarget, fault: Fault) {
        self.faults.lock().push((hits, fault));
    }

    /// Removes all faults.
    pub fn clear_faults(&self) {
        self.faults.lock().clear();
    }

    /// Returns the number of reads and groups so far.
    pub fn request_count(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Returns the inner disk: as a power cut left it, with the flipped bits.
    pub fn into_inner(self) -> D {
        let sector_bytes = u64::from(self.disk.properties().sector_bytes);
        let rotten = std::mem::take(&mut *self.flipped_bits());
        for (byte, bits) in rotten {
            let at = Extent::new(byte - byte % sector_bytes, sector_bytes);
            let Ok(mut block) = self.disk.read_now(at, Block::private(sector_bytes as usize))
            else {
                continue;
            };
            flip_bits(&mut block, byte - at.start_bytes, bits);
            let group = Group { writes: vec![Write { at_bytes: at.start_bytes, block }] };
            // A disk that accepts no more writes stays as it is.
            let _ = self.disk.submit(group, &[]).map(|ticket| self.disk.wait_durable(ticket));
        }
        self.disk
    }

    fn flipped_bits(&self) -> MutexGuard<'_, BTreeMap<u64, u8>> {
        self.rotten.lock()
    }

    /// Applies the flipped bits to the answer of a read.
    fn apply_bit_rot(&self, at: Extent, answer: ReadAnswer) -> ReadAnswer {
        answer.map(|mut block| {
            let end = at.start_bytes + at.len_bytes;
            for (byte, bits) in self.flipped_bits().range(at.start_bytes..end) {
                flip_bits(&mut block, byte - at.start_bytes, *bits);
            }
            block
        })
    }

    fn is_bit_flipped_in(&self, at: Extent) -> bool {
        let end = at.start_bytes.saturating_add(at.len_bytes);
        self.flipped_bits().range(at.start_bytes..end.max(at.start_bytes)).next().is_some()
    }

    /// Submits a chain, subject to the faults.
    fn take_matching_fault(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let refuse = |chain, error| Err(Refused { payload: Some(chain), error });
        let mut writing = self.lock_write_state();
        if let Some(broken) = &writing.broken {
            let error = if broken.is_powered_off { Error::ServiceEnded } else { Error::Stopped };
            return refuse(chain, error);
        }
        let faults = self.group_faults(&chain, writing.groups);
        writing.groups += chain.len() as u64;
        let mut breaks = None;
        for &(nth, _, fault) in &faults {
            match fault {
                Fault::Delay(time) => std::thread::sleep(time),
                Fault::Lost | Fault::Misdirected { .. } | Fault::Rot { .. } => {}
                Fault::Break { .. } | Fault::PowerCut { .. } => {
                    breaks.get_or_insert((nth, fault));
                }
                _ => {
                    let first = chain[nth].writes.first();
                    let extent = first.map_or(Extent::new(0, 0), write_extent);
                    return refuse(chain, injected_io_error("write", extent));
                }
            }
        }
        match breaks {
            Some((nth, fault)) => {
                self.submit_until_break(chain, after, nth, fault, &mut writing.broken)
            }
            None if faults.is_empty() && self.flipped_bits().is_empty() => {
                self.disk.submit_chain(chain, after)
            }
            None => self.submit_with_write_faults(chain, after, &faults),
        }
    }

    /// Submits a chain of which some writes are lost or misdirected.
    fn submit_with_write_faults(
        &self,
        mut chain: Vec<Group>,
        after: &[Ticket],
        faults: &[(usize, FaultTarget, Fault)],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        // Checked first: misdirected writes past the end must not cause an error.
        if let Err(error) = self.properties().check_chain(&chain) {
            return Err(Refused { payload: Some(chain), error });
        }
        let len_bytes = self.properties().len_bytes;
        let mut harmed = vec![];
        let rots: Vec<_> = faults.iter().filter_map(|it| bit_to_flip(&chain, it)).collect();
        for &(nth, hits, fault) in faults {
            harmed.extend(
                apply_write_fault(&mut chain[nth].writes, hits, fault, len_bytes)
                    .into_iter()
                    .map(|it| (nth, it)),
            );
        }
        let written: Vec<_> =
            chain.iter().flat_map(|group| &group.writes).map(write_extent).collect();
        match self.disk.submit_chain(chain, after) {
            Ok(tickets) => {
                let mut rotten = self.flipped_bits();
                rotten.retain(|byte, _| {
                    !written.iter().any(|it| extents_overlap(*it, Extent::new(*byte, 1)))
                });
                rotten.extend(rots);
                Ok(tickets)
            }
            Err(mut refused) => {
                for (nth, harm) in harmed.into_iter().rev() {
                    if let Some(group) = refused.payload.as_mut().and_then(|it| it.get_mut(nth)) {
                        harm.undo(&mut group.writes);
                    }
                }
                Err(refused)
            }
        }
    }

    fn lock_write_state(&self) -> MutexGuard<'_, WriteState> {
        self.writing.lock()
    }

    /// Returns the error for `ticket` on a disk that broke.
    fn broken_error(&self, ticket: Ticket) -> Result<(), Error> {
        match &self.lock_write_state().broken {
            Some(broken) if broken.is_powered_off => Err(Error::ServiceEnded),
            Some(broken) if ticket > broken.last => Err(Error::UnknownTicket(ticket)),
            Some(broken) if ticket >= broken.first => Err(broken.error.clone()),
            _ => Ok(()),
        }
    }

    /// Returns the faults of the groups of `chain`: group number, target, fault.
    fn group_faults(&self, chain: &[Group], first: u64) -> Vec<(usize, FaultTarget, Fault)> {
        let mut faults = vec![];
        for (nth, group) in chain.iter().enumerate() {
            let request = self.requests.fetch_add(1, Ordering::Relaxed);
            let hits = self.faults_matching(|hits| match hits {
                FaultTarget::Writes(extent) => {
                    group.writes.iter().any(|w| extents_overlap(extent, write_extent(w)))
                }
                FaultTarget::Request(n) => n == request,
                FaultTarget::Group(n) => n == first + nth as u64,
                _ => false,
            });
            faults.extend(hits.into_iter().map(|(hits, fault)| (nth, hits, fault)));
        }
        faults
    }

    /// Writes everything before the break; tickets are the same as without a fault.
    fn submit_until_break(
        &self,
        mut chain: Vec<Group>,
        after: &[Ticket],
        nth: usize,
        fault: Fault,
        broken: &mut Option<BrokenState>,
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let (Fault::Break { kept_writes } | Fault::PowerCut { kept_writes }) = fault else {
            return self.disk.submit_chain(chain, after);
        };
        let extent = chain[nth].writes.first().map_or(Extent::new(0, 0), write_extent);
        let lost = chain.split_off(nth + 1).len() as u64;
        chain[nth].writes.truncate(kept_writes);
        let mut tickets = self.disk.submit_chain(chain, after)?;
        let first = tickets.last().copied().unwrap_or(Ticket(0));
        tickets.extend((first.0 + 1..).take(lost as usize).map(Ticket));
        *broken = Some(BrokenState {
            first,
            last: Ticket(first.0 + lost),
            error: injected_io_error("write", extent),
            is_powered_off: matches!(fault, Fault::PowerCut { .. }),
        });
        Ok(tickets)
    }

    fn faults_matching(&self, is_hit: impl Fn(FaultTarget) -> bool) -> Vec<(FaultTarget, Fault)> {
        let faults = self.faults.lock();
        faults.iter().copied().filter(|(hits, _)| is_hit(*hits)).collect()
    }
}

fn extents_overlap(a: Extent, b: Extent) -> bool {
    let end = |e: Extent| e.end_bytes().unwrap_or(u64::MAX);
    a.start_bytes < end(b) && b.start_bytes < end(a)
}

fn write_extent(write: &Write) -> Extent {
    Extent::new(write.at_bytes, write.block.len() as u64)
}

/// Effect of a fault on one write.
enum WriteFault {
    Lost(usize, Write),
    Astray(usize, u64),
}

impl WriteFault {
    fn undo(self, writes: &mut Vec<Write>) {
        match self {
            Self::Lost(nth, write) => writes.insert(nth, write),
            Self::Astray(nth, at_bytes) => writes[nth].at_bytes = at_bytes,
        }
    }
}

/// Returns true if a fault that hits a group applies to this write of it.
fn targets_write(hits: FaultTarget, write: &Write) -> bool {
    !matches!(hits, FaultTarget::Writes(extent) if !extents_overlap(extent, write_extent(write)))
}

/// Drops or moves writes; returns each change, in order.
fn apply_write_fault(
    writes: &mut Vec<Write>,
    hits: FaultTarget,
    fault: Fault,
    len_bytes: u64,
) -> Vec<WriteFault> {
    let to_bytes = match fault {
        Fault::Lost => None,
        Fault::Misdirected { to_bytes } => Some(to_bytes),
        _ => return vec![],
    };
    let Some(first) = writes.iter().find(|write| targets_write(hits, write)) else { return vec![] };
    let from_bytes = first.at_bytes;
    let mut harmed = vec![];
    let mut nth = 0;
    while nth < writes.len() {
        if !targets_write(hits, &writes[nth]) {
            nth += 1;
            continue;
        }
        let write = &mut writes[nth];
        let there = to_bytes.and_then(|to| to.checked_add(write.at_bytes)?.checked_sub(from_bytes));
        let fits = |there: &u64| {
            Extent::new(*there, write.block.len() as u64)
                .end_bytes()
                .is_some_and(|end| end <= len_bytes)
        };
        match there.filter(fits) {
            Some(there) => {
                harmed.push(WriteFault::Astray(nth, std::mem::replace(&mut write.at_bytes, there)));
                nth += 1;
            }
            None => harmed.push(WriteFault::Lost(nth, writes.remove(nth))),
        }
    }
    harmed
}

/// Returns the bit that flips once `chain` is written.
fn bit_to_flip(
    chain: &[Group],
    (nth, hits, fault): &(usize, FaultTarget, Fault),
) -> Option<(u64, u8)> {
    let Fault::Rot { bit } = fault else { return None };
    let write = chain[*nth].writes.iter().find(|write| targets_write(*hits, write))?;
    let byte = match hits {
        FaultTarget::Writes(extent) => extent.start_bytes.max(write.at_bytes),
        _ => write.at_bytes,
    };
    Some((byte, 1 << (bit & 7)))
}

fn flip_bits(block: &mut Block, at_bytes: u64, bits: u8) {
    let mut byte = [0];
    block.copy_out(at_bytes as usize, &mut byte);
    block.copy_in(at_bytes as usize, &[byte[0] ^ bits]);
}

fn injected_io_error(what: &'static str, extent: Extent) -> Error {
    Error::Io { what, extent, errno: rustix::io::Errno::IO }
}

impl<D: Disk> draconis_device::ForwardingDisk for FaultDisk<D> {
    type Inner = D;

    fn inner_disk(&self) -> &D {
        &self.disk
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        if self.lock_write_state().broken.as_ref().is_some_and(|broken| broken.is_powered_off) {
            return Pending::ready(Err(Refused {
                payload: Some(into),
                error: Error::ServiceEnded,
            }));
        }
        let faults = self.faults_matching(|hits| match hits {
            FaultTarget::Reads(extent) => extents_overlap(extent, at),
            FaultTarget::Request(n) => n == number,
            _ => false,
        });
        if faults.is_empty() && !self.is_bit_flipped_in(at) {
            return self.inner_disk().read(at, into, urgency);
        }
        let first_of = |hits| match hits {
            FaultTarget::Reads(extent) => extent.start_bytes.max(at.start_bytes),
            _ => at.start_bytes,
        };
        let mut from = at;
        for (hits, fault) in &faults {
            match *fault {
                Fault::Rot { bit } => self.flip_stored_bit(first_of(*hits), bit),
                Fault::Misdirected { to_bytes } => from.start_bytes = to_bytes,
                _ => {}
            }
        }
        let mut answer = self.apply_bit_rot(from, self.inner_disk().read_now(from, into));
        for (hits, fault) in faults {
            answer = match (fault, answer) {
                (Fault::Delay(time), answer) => {
                    std::thread::sleep(time);
                    answer
                }
                (_, Err(refused)) => Err(refused),
                (Fault::Short { got_bytes }, Ok(block)) => {
                    let error = Error::ShortRead { extent: at, got_bytes };
                    Err(Refused { payload: Some(block), error })
                }
                (Fault::Flip { bit }, Ok(mut block)) => {
                    flip_bits(&mut block, first_of(hits) - at.start_bytes, 1 << (bit & 7));
                    Ok(block)
                }
                (Fault::Misdirected { .. } | Fault::Rot { .. }, Ok(block)) => Ok(block),
                (_, Ok(block)) => {
                    Err(Refused { payload: Some(block), error: injected_io_error("read", at) })
                }
            };
        }
        Pending::ready(answer)
    }

    fn submit_with(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
        terms: SubmitOptions,
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let tickets = self.take_matching_fault(chain, after)?;
        terms.wait(self, &tickets)?;
        Ok(tickets)
    }

    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        self.broken_error(ticket)?;
        self.inner_disk().wait_visible(ticket)
    }

    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        self.broken_error(ticket)?;
        for (_, fault) in self.faults_matching(|hits| hits == FaultTarget::Flushes) {
            match fault {
                Fault::Delay(time) => std::thread::sleep(time),
                _ => return Err(injected_io_error("flush", Extent::new(0, 0))),
            }
        }
        self.inner_disk().wait_durable(ticket)
    }

    /// Every change is a group.
    fn punch_hole(&self, _: Extent) -> Result<Option<Ticket>, Error> {
        Ok(None)
    }

    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), Error> {
        // A broken disk neither writes nor discards.
        match &self.lock_write_state().broken {
            Some(broken) if broken.is_powered_off => Err(Error::ServiceEnded),
            Some(_) => Ok(()),
            None => self.inner_disk().discard(extents, after),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use draconis_device::MemoryDisk;

    fn read_range(disk: &dyn Disk, start: u64, len: u64) -> ReadAnswer {
        disk.read_now(Extent::new(start, len), Block::private(len as usize))
    }

    #[test]
    fn faults_affect_only_their_target() {
        let disk = FaultDisk::new(MemoryDisk::new(vec![0; 8192], 512));
        disk.add_fault(FaultTarget::Reads(Extent::new(1024, 512)), Fault::Fail);
        assert!(read_range(&disk, 0, 1024).is_ok());
        let refused = read_range(&disk, 512, 1024).unwrap_err();
        assert!(matches!(refused.error, Error::Io { .. }) && refused.payload.is_some());
        disk.clear_faults();
        disk.add_fault(FaultTarget::Reads(Extent::new(1030, 1)), Fault::Flip { bit: 3 });
        let block = read_range(&disk, 1024, 512).unwrap().into_private();
        assert_eq!((block[5], block[6], block[7]), (0, 8, 0));
        disk.clear_faults();
        disk.add_fault(
            FaultTarget::Request(disk.request_count() + 1),
            Fault::Short { got_bytes: 3 },
        );
        assert!(read_range(&disk, 0, 512).is_ok());
        assert!(matches!(
            read_range(&disk, 0, 512).unwrap_err().error,
            Error::ShortRead { got_bytes: 3, .. }
        ));
        assert!(read_range(&disk, 0, 512).is_ok());
    }

    #[test]
    fn failed_group_and_flush_return_errors() {
        let disk = FaultDisk::new(MemoryDisk::new(vec![0; 8192], 512));
        let group = || Group { writes: vec![Write { at_bytes: 512, block: Block::private(512) }] };
        disk.add_fault(FaultTarget::Writes(Extent::new(600, 1)), Fault::Fail);
        assert_eq!(disk.submit(group(), &[]).unwrap_err().payload.unwrap().writes.len(), 1);
        disk.clear_faults();
        let ticket = disk.submit(group(), &[]).unwrap();
        disk.add_fault(FaultTarget::Flushes, Fault::Fail);
        assert!(disk.wait_durable(ticket).is_err());
    }

    #[test]
    fn broken_disk_keeps_earlier_writes() {
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
            disk.add_fault(FaultTarget::Group(2), fault);
            let tickets = disk.submit_chain(vec![group(2), group(3), group(4)], &[]).unwrap();
            assert_eq!(tickets, [Ticket(2), Ticket(3), Ticket(4)]);
            let dark = |otherwise| if is_dark { Err(Error::ServiceEnded) } else { otherwise };
            let broke = Err(injected_io_error("write", Extent::new(0, 512)));
            assert_eq!(disk.wait_durable(tickets[0]), dark(Ok(())));
            assert_eq!(disk.wait_visible(tickets[1]), dark(broke.clone()));
            assert_eq!(disk.wait_durable(tickets[2]), dark(broke));
            assert_eq!(disk.wait_durable(Ticket(5)), dark(Err(Error::UnknownTicket(Ticket(5)))));
            let refused = disk.submit(group(5), &[]).unwrap_err();
            assert_eq!(refused.error, if is_dark { Error::ServiceEnded } else { Error::Stopped });
            assert_eq!(refused.payload.unwrap().writes.len(), 2);
            assert_eq!(read_range(&disk, 0, 512).is_err(), is_dark);
            let bytes = disk.into_inner().into_bytes();
            assert_eq!((bytes[0], bytes[512]), (3, 2));
        }
    }

    #[test]
    fn fault_in_chain_refuses_whole_chain() {
        let disk = FaultDisk::new(MemoryDisk::new(vec![0; 4096], 512));
        let group =
            |at_bytes| Group { writes: vec![Write { at_bytes, block: Block::private(512) }] };
        disk.add_fault(FaultTarget::Writes(Extent::new(512, 512)), Fault::Fail);
        let refused = disk.submit_chain(vec![group(0), group(512)], &[]).unwrap_err();
        assert_eq!(refused.payload.unwrap().len(), 2);
        assert_eq!(disk.submit(group(0), &[]).unwrap(), Ticket(1));
    }

    fn fill_sector(at_bytes: u64, byte: u8) -> Write {
        let mut block = Block::private(512);
        block.copy_in(0, &[byte; 512]);
        Write { at_bytes, block }
    }

    fn first_sector_bytes(disk: &dyn Disk) -> Vec<u8> {
        let block = read_range(disk, 0, 4096).unwrap().into_private();
        block.chunks(512).map(|sector| sector[0]).collect()
    }

    #[test]
    fn lost_write_reports_success() {
        let disk = FaultDisk::new(MemoryDisk::new(vec![0; 4096], 512));
        disk.add_fault(FaultTarget::Writes(Extent::new(600, 1)), Fault::Lost);
        disk.add_fault(FaultTarget::Group(1), Fault::Lost);
        let group = |byte| Group {
            writes: vec![fill_sector(0, byte), fill_sector(512, byte), fill_sector(1024, byte)],
        };
        // A refusal returns also the write that would be lost, and it counts as a group.
        let refused = disk.submit(group(8), &[Ticket(9)]).unwrap_err();
        let back: Vec<_> = refused.payload.unwrap().writes.iter().map(|it| it.at_bytes).collect();
        assert_eq!(back, [0, 512, 1024]);
        let tickets = disk.submit_chain(vec![group(1), group(2)], &[]).unwrap();
        disk.wait_durable(tickets[1]).unwrap();
        assert_eq!(first_sector_bytes(&disk)[..3], [2, 0, 2]);
        disk.clear_faults();
        disk.submit(group(3), &[]).unwrap();
        assert_eq!(first_sector_bytes(&disk)[..3], [3, 3, 3]);
    }

    #[test]
    fn misdirected_write_and_read_use_other_offset() {
        let disk = FaultDisk::new(MemoryDisk::new(vec![0; 4096], 512));
        disk.add_fault(
            FaultTarget::Writes(Extent::new(0, 1024)),
            Fault::Misdirected { to_bytes: 2048 },
        );
        let group =
            Group { writes: vec![fill_sector(0, 1), fill_sector(512, 2), fill_sector(1024, 3)] };
        disk.submit(group, &[]).unwrap();
        assert_eq!(first_sector_bytes(&disk), [0, 0, 3, 0, 1, 2, 0, 0]);
        // A write past the end is lost.
        disk.clear_faults();
        disk.add_fault(
            FaultTarget::Writes(Extent::new(0, 4096)),
            Fault::Misdirected { to_bytes: 3584 },
        );
        disk.submit(Group { writes: vec![fill_sector(0, 7), fill_sector(512, 8)] }, &[]).unwrap();
        assert_eq!(first_sector_bytes(&disk), [0, 0, 3, 0, 1, 2, 0, 7]);
        disk.clear_faults();
        disk.add_fault(
            FaultTarget::Reads(Extent::new(0, 512)),
            Fault::Misdirected { to_bytes: 1024 },
        );
        assert_eq!(read_range(&disk, 0, 512).unwrap().into_private()[0], 3);
        let refused = disk.submit(Group { writes: vec![fill_sector(4096, 1)] }, &[]).unwrap_err();
        assert!(matches!(refused.error, Error::OutOfRange { .. }));
    }

    #[test]
    fn flipped_bit_persists_until_overwrite() {
        let disk = FaultDisk::new(MemoryDisk::new(vec![0; 4096], 512));
        disk.add_fault(FaultTarget::Writes(Extent::new(700, 10)), Fault::Rot { bit: 2 });
        disk.submit(Group { writes: vec![fill_sector(0, 0), fill_sector(512, 0)] }, &[]).unwrap();
        disk.clear_faults();
        disk.add_fault(FaultTarget::Reads(Extent::new(1024, 512)), Fault::Rot { bit: 0 });
        for _ in 0..2 {
            let block = read_range(&disk, 512, 1024).unwrap().into_private();
            assert_eq!((block[187], block[188], block[189], block[512]), (0, 4, 0, 1));
        }
        disk.clear_faults();
        disk.flip_stored_bit(4095, 7);
        assert_eq!(read_range(&disk, 3584, 512).unwrap().into_private()[511], 128);
        disk.submit(Group { writes: vec![fill_sector(1024, 0)] }, &[]).unwrap();
        assert_eq!(first_sector_bytes(&disk)[2], 0);
        let bytes = disk.into_inner().into_bytes();
        assert_eq!((bytes[700], bytes[1024], bytes[4095]), (4, 0, 128));
    }
}
