//! The in-flight area: memory that outlives this process, with what it has not answered yet.
//!
//! ```text
//!   queue 0 | queue 1 | .. | ours
//!   a queue: features, version, desc_num, last_batch_head, used_idx | descriptor states
//!   ours: magic, 1 if the guest has switched the write cache off, identity of a temporary disk
//! ```
//!
//! Layout and order of the queues are those of the vhost-user specification for split rings. The front
//! end keeps the area and passes it to the successor. It can write it, so nothing in it is trusted.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags};
use vhost::vhost_user::message::VhostUserInflight;
use vhost::vhost_user::{Error, Result};
use vm_memory::{Bytes, MmapRegion, VolatileMemory, VolatileSlice};

use crate::memory::{map_file, refuse};
use crate::{MAX_QUEUE_SIZE, MAX_QUEUES};

const HEADER_BYTES: u64 = 16;
const STATE_BYTES: u64 = 16;
const ALIGN_BYTES: u64 = 64;
/// Length of the part of the area that only we know, in bytes.
const OWN_BYTES: u64 = 64;
const OWN_MAGIC: u32 = 0x6b6c_6264;
const VERSION: u16 = 1;

/// Offsets in our part.
mod own_field {
    pub(super) const MAGIC: u64 = 0;
    pub(super) const IS_WRITE_THROUGH: u64 = 4;
    pub(super) const DISK_ID: u64 = 8;
}

/// Offsets in a queue's part.
mod queue_field {
    pub(super) const VERSION: u64 = 8;
    pub(super) const DESC_NUM: u64 = 10;
    pub(super) const LAST_BATCH_HEAD: u64 = 12;
    pub(super) const USED_IDX: u64 = 14;
}

/// Offset of the counter in a descriptor's state.
const COUNTER: u64 = 8;

fn queue_bytes(queue_size: u16) -> u64 {
    (HEADER_BYTES + STATE_BYTES * u64::from(queue_size)).next_multiple_of(ALIGN_BYTES)
}

fn queues_bytes(queues: u16, queue_size: u16) -> u64 {
    u64::from(queues) * queue_bytes(queue_size)
}

/// Descriptors that are created before the process is confined.
pub struct Resources {
    /// Memory of the in-flight area that a front end asks for.
    inflight: File,
    /// Its mapping.
    mapped: Arc<MmapRegion<()>>,
    /// Wakes threads that wait for a kick.
    pub(crate) wake_receiver: UnixStream,
    pub(crate) wake_sender: UnixStream,
}

impl Resources {
    /// Creates the descriptors.
    ///
    /// # Errors
    /// The system's error.
    pub fn new() -> std::io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let inflight = File::from(rustix::fs::memfd_create("vhost-user in-flight", flags)?);
        let len = queues_bytes(MAX_QUEUES, MAX_QUEUE_SIZE) + OWN_BYTES;
        inflight.set_len(len)?;
        let seals = SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&inflight, seals)?;
        let mapped = map_file(inflight.try_clone()?, 0, len).map_err(std::io::Error::other)?;
        let (wake_receiver, wake_sender) = UnixStream::pair()?;
        wake_receiver.set_nonblocking(true)?;
        Ok(Self { inflight, mapped: Arc::new(mapped), wake_receiver, wake_sender })
    }

    /// Prepares an empty area for `request`. Returns its description and its memory.
    pub(crate) fn new_area(
        &self,
        request: &VhostUserInflight,
        disk_id: Option<u64>,
    ) -> Result<(VhostUserInflight, File)> {
        let (queues, queue_size) = (request.num_queues, request.queue_size);
        if queues > MAX_QUEUES || queue_size > MAX_QUEUE_SIZE {
            return Err(Error::InvalidParam);
        }
        let len = queues_bytes(queues, queue_size) + OWN_BYTES;
        let area = InflightArea { mapped: self.mapped.clone(), queues, queue_size };
        let zeros = vec![0; len as usize];
        self.mapped.as_volatile_slice().write_slice(&zeros, 0).map_err(refuse)?;
        for index in 0..queues {
            let Some(queue) = area.queue(index) else { continue };
            queue.store(queue_field::VERSION, VERSION);
            queue.store(queue_field::DESC_NUM, queue_size);
        }
        area.store_own(own_field::DISK_ID, disk_id.unwrap_or_default());
        area.store_own(own_field::MAGIC, OWN_MAGIC);
        let file = self.inflight.try_clone().map_err(Error::ReqHandlerError)?;
        Ok((VhostUserInflight::new(len, 0, queues, queue_size), file))
    }
}

/// A mapped area.
#[derive(Clone)]
pub(crate) struct InflightArea {
    mapped: Arc<MmapRegion<()>>,
    queues: u16,
    queue_size: u16,
}

impl InflightArea {
    /// Maps the area that the front end passes.
    pub(crate) fn map(description: &VhostUserInflight, file: File) -> Result<Self> {
        let VhostUserInflight { mmap_size, mmap_offset, num_queues: queues, queue_size } =
            *description;
        let needed = queues_bytes(queues, queue_size);
        if queues > MAX_QUEUES || queue_size > MAX_QUEUE_SIZE || mmap_size < needed {
            return Err(Error::InvalidParam);
        }
        let mapped = map_file(file, mmap_offset, mmap_size.min(needed + OWN_BYTES))?;
        Ok(Self { mapped: Arc::new(mapped), queues, queue_size })
    }

    fn own_offset(&self) -> u64 {
        queues_bytes(self.queues, self.queue_size)
    }

    fn slice<T>(
        &self,
        offset: u64,
        len: usize,
        access: impl FnOnce(
            &VolatileSlice<'_>,
        ) -> std::result::Result<T, vm_memory::VolatileMemoryError>,
    ) -> Option<T> {
        let slice = self.mapped.get_slice(offset as usize, len).ok()?;
        access(&slice).ok()
    }

    fn load_own<T: vm_memory::AtomicAccess>(&self, field: u64) -> Option<T> {
        let at = self.own_offset() + field;
        self.slice(at, size_of::<T>(), |own| own.load(0, Ordering::Acquire))
    }

    fn store_own<T: vm_memory::AtomicAccess>(&self, field: u64, value: T) {
        let at = self.own_offset() + field;
        self.slice(at, size_of::<T>(), |own| own.store(value, 0, Ordering::Release));
    }

    fn has_own_part(&self) -> bool {
        self.load_own(own_field::MAGIC) == Some(OWN_MAGIC)
    }

    /// Returns true if a predecessor was told to switch the write cache off.
    pub(crate) fn is_write_through(&self) -> bool {
        self.has_own_part() && self.load_own(own_field::IS_WRITE_THROUGH) == Some(1u32)
    }

    pub(crate) fn set_write_through(&self, is_write_through: bool) {
        if self.has_own_part() {
            self.store_own(own_field::IS_WRITE_THROUGH, u32::from(is_write_through));
        }
    }

    /// Returns the identity of the disk that the machine has used, if the disk had one.
    pub(crate) fn disk_id(&self) -> Option<u64> {
        let id = self.load_own(own_field::DISK_ID).filter(|_| self.has_own_part());
        id.filter(|id| *id != 0)
    }

    /// Returns the part of a queue.
    pub(crate) fn queue(&self, index: u16) -> Option<InflightQueue> {
        let start = u64::from(index) * queue_bytes(self.queue_size);
        (index < self.queues).then(|| InflightQueue { area: self.clone(), start })
    }
}

/// The part of a queue.
pub(crate) struct InflightQueue {
    area: InflightArea,
    start: u64,
}

impl InflightQueue {
    fn load<T: vm_memory::AtomicAccess>(&self, at: u64) -> Option<T> {
        self.area.slice(self.start + at, size_of::<T>(), |it| it.load(0, Ordering::Acquire))
    }

    fn store<T: vm_memory::AtomicAccess>(&self, at: u64, value: T) {
        self.area
            .slice(self.start + at, size_of::<T>(), |it| it.store(value, 0, Ordering::Release));
    }

    fn state_at(&self, head: u16) -> Option<u64> {
        let is_inside = head < self.area.queue_size;
        is_inside.then(|| HEADER_BYTES + STATE_BYTES * u64::from(head))
    }

    /// Records that a request is carried out.
    pub(crate) fn begin(&self, head: u16, counter: u64) {
        let Some(at) = self.state_at(head) else { return };
        self.store(at + COUNTER, counter);
        self.store(at, 1u8);
    }

    /// Records that the next entry of the used ring is that of `head`.
    pub(crate) fn prepare_end(&self, head: u16) {
        self.store(queue_field::LAST_BATCH_HEAD, head);
    }

    /// Records that the used ring has the entry.
    pub(crate) fn end(&self, head: u16, used_idx: u16) {
        if let Some(at) = self.state_at(head) {
            self.store(at, 0u8);
        }
        self.store(queue_field::USED_IDX, used_idx);
    }

    /// Returns the heads of requests that a predecessor has not answered, oldest first, and the next
    /// counter. `used_idx` is that of the used ring.
    pub(crate) fn recover(&self, used_idx: u16) -> (Vec<u16>, u64) {
        // A fresh area of another back end is zero.
        self.store(queue_field::VERSION, VERSION);
        self.store(queue_field::DESC_NUM, self.area.queue_size);
        if self.load(queue_field::USED_IDX) != Some(used_idx) {
            // It died between the entry in the used ring and `end`.
            if let Some(last) = self.load(queue_field::LAST_BATCH_HEAD)
                && let Some(at) = self.state_at(last)
            {
                self.store(at, 0u8);
            }
            self.store(queue_field::USED_IDX, used_idx);
        }
        let mut found = vec![];
        for head in 0..self.area.queue_size {
            let Some(at) = self.state_at(head) else { break };
            if self.load::<u8>(at) == Some(1) {
                found.push((self.load::<u64>(at + COUNTER).unwrap_or_default(), head));
            }
        }
        found.sort_unstable();
        let next = found.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        (found.into_iter().map(|(_, head)| head).collect(), next)
    }
}
