//! A front end for tests: the driver of a guest, with one queue that is filled by hand.
#![allow(dead_code, reason = "not every test uses all of it")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use draconis_testkit::wait::wait_for;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

pub const READ: u32 = 0;
pub const OUT: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

pub const OK: u8 = 0;
pub const IO_ERROR: u8 = 1;
pub const UNSUPPORTED: u8 = 2;

pub const F_RO: u64 = 1 << 5;
pub const F_FLUSH: u64 = 1 << 9;
pub const F_CONFIG_WCE: u64 = 1 << 11;
pub const F_EVENT_IDX: u64 = 1 << 29;
pub const F_PROTOCOL: u64 = 1 << 30;

/// Number of descriptors of the queue.
pub const SIZE: u16 = 64;
/// Length of the memory; descriptors, rings, then space for requests.
pub const MEMORY_BYTES: usize = 16 << 20;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
/// Start of the space for requests: each head has a part of it.
pub const SPACE: u64 = 0x10000;
/// Length of the part of a head.
pub const PART_BYTES: u64 = 0x40000;

/// What a back end must find after the death of its predecessor.
pub struct Guest {
    pub memory: GuestMemoryMmap,
    pub available_idx: u16,
    pub used_idx: u16,
    pub inflight: Option<(VhostUserInflight, File)>,
}

impl Guest {
    pub fn new() -> Self {
        let memory = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let memory = File::from(memory);
        memory.set_len(MEMORY_BYTES as u64).unwrap();
        let range = (GuestAddress(0), MEMORY_BYTES, Some(FileOffset::new(memory, 0)));
        let memory = GuestMemoryMmap::from_ranges_with_files([range]).unwrap();
        Self { memory, available_idx: 0, used_idx: 0, inflight: None }
    }

    /// Returns the file of the memory.
    pub fn file(&self) -> &File {
        self.memory.iter().next().unwrap().file_offset().unwrap().file()
    }

    pub fn set_descriptor(&self, index: u16, at: u64, len: u32, flags: u16, next: u16) {
        self.set_descriptor_at(u64::from(index) * 16, at, len, flags, next);
    }

    pub fn set_descriptor_at(&self, place: u64, at: u64, len: u32, flags: u16, next: u16) {
        let raw = [&at.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes()].concat();
        let raw = [raw, next.to_le_bytes().to_vec()].concat();
        self.memory.write_slice(&raw, GuestAddress(place)).unwrap();
    }

    pub fn make_available(&mut self, head: u16) {
        let at = AVAILABLE + 4 + 2 * u64::from(self.available_idx % SIZE);
        self.memory.write_obj(head.to_le(), GuestAddress(at)).unwrap();
        self.available_idx = self.available_idx.wrapping_add(1);
        self.set_available_idx(self.available_idx);
    }

    /// Changes the first sector of a request.
    pub fn set_sector(&self, head: u16, sector: u64) {
        self.memory.write_obj(sector.to_le(), GuestAddress(Self::part(head) + 8)).unwrap();
    }

    /// Returns true if the back end wants a kick for the newest request.
    pub fn wants_kick(&self) -> bool {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let at = USED + 4 + 8 * u64::from(SIZE);
        let event: u16 = self.memory.read_obj(GuestAddress(at)).unwrap();
        self.available_idx.wrapping_sub(1) == u16::from_le(event)
    }

    pub fn set_available_idx(&self, index: u16) {
        let order = std::sync::atomic::Ordering::SeqCst;
        self.memory.store(index.to_le(), GuestAddress(AVAILABLE + 2), order).unwrap();
    }

    pub fn used_idx_in_ring(&self) -> u16 {
        let order = std::sync::atomic::Ordering::SeqCst;
        u16::from_le(self.memory.load(GuestAddress(USED + 2), order).unwrap())
    }

    pub fn set_used_idx_in_ring(&self, index: u16) {
        self.memory.write_obj(index.to_le(), GuestAddress(USED + 2)).unwrap();
    }

    /// Makes a request available in three descriptors from `head`, which is a multiple of 3.
    pub fn put_request(&mut self, head: u16, kind: u32, sector: u64, data: &[u8], output: u32) {
        self.write_request(head, kind, sector, data, output);
        self.make_available(head);
    }

    pub fn write_request(&self, head: u16, kind: u32, sector: u64, data: &[u8], output: u32) {
        assert!(head.is_multiple_of(3) && head + 2 < SIZE);
        let part = Self::part(head);
        let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        self.memory.write_slice(&header, GuestAddress(part)).unwrap();
        self.memory.write_obj(0xffu8, GuestAddress(part + 16)).unwrap();
        self.memory.write_slice(data, GuestAddress(part + 0x100)).unwrap();
        self.set_descriptor(head, part, 16, NEXT, head + 1);
        let (len, flags) = match output {
            0 => (data.len() as u32, 0),
            len => (len, WRITE),
        };
        self.set_descriptor(head + 1, part + 0x100, len, NEXT | flags, head + 2);
        self.set_descriptor(head + 2, part + 16, 1, WRITE, 0);
    }

    /// Returns the address of the part of `head`.
    pub fn part(head: u16) -> u64 {
        SPACE + u64::from(head / 3) * PART_BYTES
    }

    /// Returns the status of a request.
    pub fn status(&self, head: u16) -> u8 {
        self.memory.read_obj(GuestAddress(Self::part(head) + 16)).unwrap()
    }

    /// Returns the output of a request.
    pub fn output(&self, head: u16, len: usize) -> Vec<u8> {
        let mut output = vec![0; len];
        self.memory.read_slice(&mut output, GuestAddress(Self::part(head) + 0x100)).unwrap();
        output
    }

    /// Returns the next entry of the used ring, if there is one.
    pub fn take_used(&mut self) -> Option<(u16, u32)> {
        if self.used_idx_in_ring() == self.used_idx {
            return None;
        }
        let at = USED + 4 + 8 * u64::from(self.used_idx % SIZE);
        let [head, len]: [u32; 2] = self.memory.read_obj(GuestAddress(at)).unwrap();
        self.used_idx = self.used_idx.wrapping_add(1);
        Some((u32::from_le(head) as u16, u32::from_le(len)))
    }
}

/// A guest that is connected to a back end.
pub struct Driver {
    pub guest: Guest,
    pub front_end: Frontend,
    pub features: u64,
    pub kick: EventFd,
    pub call: EventFd,
    pub error: EventFd,
}

impl Driver {
    /// Negotiates the features of `wanted` that are offered, and starts the queue.
    pub fn connect(stream: UnixStream, guest: Guest, wanted: u64) -> Self {
        let mut driver = Self::negotiate(stream, guest, wanted);
        driver.share_memory().unwrap();
        driver.start_queue().unwrap();
        driver
    }

    /// Negotiates features and the in-flight area.
    pub fn negotiate(stream: UnixStream, guest: Guest, wanted: u64) -> Self {
        let mut front_end = Frontend::from_stream(stream, 1);
        front_end.set_owner().unwrap();
        let features = front_end.get_features().unwrap() & (wanted | F_PROTOCOL);
        let protocol = front_end.get_protocol_features().unwrap();
        front_end.set_protocol_features(protocol).unwrap();
        front_end.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        front_end.set_features(features).unwrap();
        let event = || EventFd::new(EFD_NONBLOCK).unwrap();
        let (kick, call, error) = (event(), event(), event());
        let mut driver = Self { guest, front_end, features, kick, call, error };
        if protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD) {
            driver.pass_inflight();
        }
        driver
    }

    fn pass_inflight(&mut self) {
        if self.guest.inflight.is_none() {
            let wanted = VhostUserInflight::new(0, 0, 1, SIZE);
            self.front_end.set_hdr_flags(VhostUserHeaderFlag::empty());
            let area = self.front_end.get_inflight_fd(&wanted).unwrap();
            self.front_end.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
            self.guest.inflight = Some(area);
        }
        let (area, file) = self.guest.inflight.as_ref().unwrap();
        self.front_end.set_inflight_fd(area, file.as_raw_fd()).unwrap();
    }

    pub fn share_memory(&mut self) -> vhost::Result<()> {
        let regions: Vec<_> = self
            .guest
            .memory
            .iter()
            .map(|region| VhostUserMemoryRegionInfo::from_guest_region(region).unwrap())
            .collect();
        self.front_end.set_mem_table(&regions).map(drop)
    }

    pub fn start_queue(&mut self) -> vhost::Result<()> {
        let user = |at| self.guest.memory.get_host_address(GuestAddress(at)).unwrap() as u64;
        let config = VringConfigData {
            queue_max_size: SIZE,
            queue_size: SIZE,
            flags: 0,
            desc_table_addr: user(0),
            used_ring_addr: user(USED),
            avail_ring_addr: user(AVAILABLE),
            log_addr: None,
        };
        let front_end = &mut self.front_end;
        front_end.set_vring_num(0, SIZE)?;
        front_end.set_vring_base(0, self.guest.used_idx_in_ring())?;
        front_end.set_vring_addr(0, &config)?;
        front_end.set_vring_call(0, &self.call)?;
        front_end.set_vring_err(0, &self.error)?;
        front_end.set_vring_kick(0, &self.kick)?;
        front_end.set_vring_enable(0, true)
    }

    pub fn config(&mut self, offset: u32, len: u32) -> Vec<u8> {
        let room = vec![0; len as usize];
        self.front_end.set_hdr_flags(VhostUserHeaderFlag::empty());
        let flags = VhostUserConfigFlags::WRITABLE;
        let (_, space) = self.front_end.get_config(offset, len, flags, &room).unwrap();
        self.front_end.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        space
    }

    pub fn kick(&self) {
        self.kick.write(1).unwrap();
    }

    /// Waits for an entry of the used ring; `None` if the ring is broken instead.
    pub fn wait_used(&mut self) -> Option<(u16, u32)> {
        wait_for("an answer", || {
            if let Some(used) = self.guest.take_used() {
                return Some(Some(used));
            }
            // Interrupts are drained; what they announce is in the ring.
            let _ = self.call.read();
            self.error.read().is_ok().then(|| self.guest.take_used())
        })
    }

    /// Sends a request and waits for its status and output.
    pub fn request(&mut self, kind: u32, sector: u64, data: &[u8], output: u32) -> (u8, Vec<u8>) {
        self.guest.put_request(0, kind, sector, data, output);
        self.kick();
        let (head, written) = self.wait_used().expect("the ring is broken");
        assert_eq!(head, 0);
        let status = self.guest.status(0);
        assert!(written > 0 && (written == output + 1 || status != OK || output == 0));
        (status, self.guest.output(0, output as usize))
    }
}
