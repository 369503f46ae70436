//! A split ring: the device's side.
//!
//! Law 1: a head that is carried out is not available again before its entry in the used ring.
//! Law 2: an error breaks the ring: nothing more is read from it.

use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};

use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};

use crate::chain::{Chain, read_chain};
use crate::error::RingError;
use crate::inflight::InflightQueue;

const NO_NOTIFY: u16 = virtio_bindings::virtio_ring::VRING_USED_F_NO_NOTIFY as u16;
const NO_INTERRUPT: u16 = virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT as u16;

/// Size and addresses of a ring, in the guest's memory.
#[derive(Clone, Copy, Debug)]
pub struct RingLayout {
    /// Number of descriptors: a power of two.
    pub size: u16,
    /// Address of the descriptor table.
    pub descriptors: u64,
    /// Address of the available ring.
    pub available: u64,
    /// Address of the used ring.
    pub used: u64,
}

impl RingLayout {
    fn check(&self, memory: &GuestMemoryMmap) -> Result<(), RingError> {
        let size = usize::from(self.size);
        let parts = [
            (self.descriptors, 16, 16 * size),
            (self.available, 2, 6 + 2 * size),
            (self.used, 4, 6 + 8 * size),
        ];
        let is_valid = parts.iter().all(|&(at, align, len)| {
            let at = GuestAddress(at);
            at.0.is_multiple_of(align) && memory.check_range(at, len, Permissions::ReadWrite)
        });
        if self.size.is_power_of_two() && is_valid { Ok(()) } else { Err(RingError::Memory) }
    }
}

/// A ring that is in use.
pub(crate) struct Ring {
    layout: RingLayout,
    has_event_idx: bool,
    next_avail: u16,
    next_used: u16,
    /// Value of `next_used` at the last decision to notify.
    notified_used: Option<u16>,
    /// True if the guest is to kick.
    wants_kicks: bool,
    inflight: Option<InflightQueue>,
    counter: u64,
    /// Heads that a predecessor has not answered.
    resubmitted: VecDeque<u16>,
    /// By head: true if it is carried out.
    in_use: Vec<bool>,
}

impl Ring {
    /// Starts at `base`, or with what `inflight` says of a predecessor.
    pub(crate) fn start(
        memory: &GuestMemoryMmap,
        layout: RingLayout,
        base: u16,
        has_event_idx: bool,
        inflight: Option<InflightQueue>,
    ) -> Result<Self, RingError> {
        layout.check(memory)?;
        let next_used = load(memory, layout.used + 2, Ordering::Acquire)?;
        let (mut next_avail, mut counter, mut resubmitted) = (base, 0, vec![]);
        if let Some(inflight) = &inflight {
            (resubmitted, counter) = inflight.recover(next_used);
            if resubmitted.iter().any(|head| *head >= layout.size) {
                return Err(RingError::Chain("a descriptor outside its table is in flight"));
            }
            if !resubmitted.is_empty() {
                log::info!("{} requests of a predecessor are carried out", resubmitted.len());
            }
            next_avail = next_used.wrapping_add(resubmitted.len() as u16);
        }
        Ok(Self {
            layout,
            has_event_idx,
            next_avail,
            next_used,
            notified_used: None,
            wants_kicks: true,
            inflight,
            counter,
            resubmitted: resubmitted.into(),
            in_use: vec![false; layout.size.into()],
        })
    }

    pub(crate) fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// Returns the number of chains that are available, without those of a predecessor.
    fn available(&self, memory: &GuestMemoryMmap) -> Result<u16, RingError> {
        let index = load(memory, self.layout.available + 2, Ordering::Acquire)?;
        let count = index.wrapping_sub(self.next_avail);
        if count > self.layout.size { Err(RingError::AvailableIndex) } else { Ok(count) }
    }

    /// Returns true if a chain is available.
    pub(crate) fn has_available(&self, memory: &GuestMemoryMmap) -> bool {
        !self.resubmitted.is_empty() || self.available(memory).is_ok_and(|count| count > 0)
    }

    /// Returns the next chain, and records that it is carried out; `None` if there is none.
    pub(crate) fn pop(&mut self, memory: &GuestMemoryMmap) -> Result<Option<Chain>, RingError> {
        let head = match self.resubmitted.pop_front() {
            Some(head) => head,
            None if self.available(memory)? == 0 => return Ok(None),
            None => {
                let entry = self.next_avail % self.layout.size;
                let at = self.layout.available + 4 + 2 * u64::from(entry);
                let head = load(memory, at, Ordering::Relaxed)?;
                self.next_avail = self.next_avail.wrapping_add(1);
                head
            }
        };
        match self.in_use.get_mut(usize::from(head)) {
            Some(in_use) if !*in_use => *in_use = true,
            Some(_) => return Err(RingError::InUse(head)),
            None => return Err(RingError::Chain("a head outside the table")),
        }
        if let Some(inflight) = &self.inflight {
            inflight.begin(head, self.counter);
            self.counter = self.counter.wrapping_add(1);
        }
        read_chain(memory, self.layout.descriptors, self.layout.size, head).map(Some)
    }

    /// Puts an entry into the used ring. Returns true if the guest wants to be notified.
    pub(crate) fn push(
        &mut self,
        memory: &GuestMemoryMmap,
        head: u16,
        written: u32,
    ) -> Result<bool, RingError> {
        let entry = u64::from(self.next_used % self.layout.size);
        let [a, b, c, d] = u32::from(head).to_le_bytes();
        let [e, f, g, h] = written.to_le_bytes();
        let at = GuestAddress(self.layout.used + 4 + 8 * entry);
        memory.write_obj([a, b, c, d, e, f, g, h], at)?;
        if let Some(inflight) = &self.inflight {
            inflight.prepare_end(head);
        }
        self.next_used = self.next_used.wrapping_add(1);
        store(memory, self.layout.used + 2, self.next_used, Ordering::Release)?;
        if let Some(inflight) = &self.inflight {
            inflight.end(head, self.next_used);
        }
        if let Some(in_use) = self.in_use.get_mut(usize::from(head)) {
            *in_use = false;
        }
        self.wants_notification(memory)
    }

    fn wants_notification(&mut self, memory: &GuestMemoryMmap) -> Result<bool, RingError> {
        // The entry is visible before the guest's wish is read.
        fence(Ordering::SeqCst);
        if !self.has_event_idx {
            let flags = load(memory, self.layout.available, Ordering::Relaxed)?;
            return Ok(flags & NO_INTERRUPT == 0);
        }
        let at = self.layout.available + 4 + 2 * u64::from(self.layout.size);
        let used_event = load(memory, at, Ordering::Relaxed)?;
        let new = self.next_used;
        let Some(old) = self.notified_used.replace(new) else { return Ok(true) };
        Ok(new.wrapping_sub(used_event).wrapping_sub(1) < new.wrapping_sub(old))
    }

    /// Asks the guest for kicks. Returns true if a chain has become available meanwhile.
    pub(crate) fn enable_kicks(&mut self, memory: &GuestMemoryMmap) -> Result<bool, RingError> {
        if self.has_event_idx {
            let at = self.layout.used + 4 + 8 * u64::from(self.layout.size);
            store(memory, at, self.next_avail, Ordering::Relaxed)?;
        } else if !self.wants_kicks {
            store(memory, self.layout.used, 0, Ordering::Relaxed)?;
        }
        self.wants_kicks = true;
        // The guest sees the wish before the index is read.
        fence(Ordering::SeqCst);
        Ok(self.available(memory)? > 0)
    }

    /// Tells the guest that kicks are not needed.
    pub(crate) fn disable_kicks(&mut self, memory: &GuestMemoryMmap) -> Result<(), RingError> {
        if self.wants_kicks && !self.has_event_idx {
            store(memory, self.layout.used, NO_NOTIFY, Ordering::Relaxed)?;
        }
        self.wants_kicks = false;
        Ok(())
    }
}

fn load(memory: &GuestMemoryMmap, at: u64, order: Ordering) -> Result<u16, RingError> {
    Ok(u16::from_le(memory.load(GuestAddress(at), order)?))
}

fn store(memory: &GuestMemoryMmap, at: u64, value: u16, order: Ordering) -> Result<(), RingError> {
    Ok(memory.store(value.to_le(), GuestAddress(at), order)?)
}
