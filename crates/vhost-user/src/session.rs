//! A connection to a front end: its messages.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex as StdMutex};

use draconis_types::lock::{Mutex, RwLock};
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVirtioFeatures,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    BackendReqHandler, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut,
};

use crate::config::{self, CONFIG_WCE, EVENT_IDX, FLUSH, WRITE_CACHE_OFFSET};
use crate::device::Device;
use crate::inflight::{InflightArea, Resources};
use crate::memory::{MAX_REGIONS, Memory, MemoryTable, RegionInfo, refuse};
use crate::queue::{Notifiers, Queue, Shared, notify};
use crate::ring::{Ring, RingLayout};
use crate::{MAX_QUEUE_SIZE, MAX_QUEUES};

const PROTOCOL_FEATURES: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();

/// Reason for closing a connection: the stream failed, or the front end broke the protocol.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConnectionError(Error);

/// Serves a front end until it disconnects. Its requests are answered by then, except those that
/// [`Device::stop`] leaves to a successor.
///
/// # Errors
/// See [`ConnectionError`].
pub fn serve(
    stream: UnixStream,
    device: &Arc<Device>,
    resources: &Arc<Resources>,
) -> std::result::Result<(), ConnectionError> {
    let _client = device.count_client();
    let session = Session::new(device.clone(), resources.clone());
    let session = Arc::new(StdMutex::new(session));
    let mut handler = BackendReqHandler::from_stream(stream, session.clone());
    let ended = loop {
        match handler.handle_request() {
            Ok(()) => {}
            Err(Error::Disconnected) => break Ok(()),
            Err(error) => {
                let error = ConnectionError(error);
                device.record_error(format!("a front end was disconnected: {error}"));
                break Err(error);
            }
        }
    };
    if let Ok(mut session) = session.lock() {
        session.stop_all();
    }
    ended
}

/// What the front end has told of a queue.
struct Vring {
    size: u16,
    /// Addresses in the front end: descriptors, available ring, used ring.
    addresses: Option<[u64; 3]>,
    base: u16,
    kick: Option<File>,
    notifiers: Arc<Mutex<Notifiers>>,
    is_enabled: bool,
    queue: Option<Arc<Queue>>,
}

impl Default for Vring {
    fn default() -> Self {
        Self {
            size: MAX_QUEUE_SIZE,
            addresses: None,
            base: 0,
            kick: None,
            notifiers: Arc::default(),
            is_enabled: false,
            queue: None,
        }
    }
}

impl Vring {
    fn stop(&mut self) {
        if let Some(queue) = self.queue.take() {
            self.base = queue.stop();
        }
    }
}

struct Session {
    shared: Arc<Shared>,
    table: MemoryTable,
    vrings: Vec<Vring>,
    inflight: Option<InflightArea>,
    features: u64,
    /// Setting of the guest, which counts if `CONFIG_WCE` was negotiated.
    has_write_cache: bool,
}

impl Session {
    fn new(device: Arc<Device>, resources: Arc<Resources>) -> Self {
        let shared = Shared {
            device,
            resources,
            memory: RwLock::new(Memory::default()),
            is_write_through: AtomicBool::new(true),
        };
        Self {
            shared: Arc::new(shared),
            table: MemoryTable::default(),
            vrings: (0..MAX_QUEUES).map(|_| Vring::default()).collect(),
            inflight: None,
            features: 0,
            has_write_cache: true,
        }
    }

    fn vring(&mut self, index: impl TryInto<usize>) -> Result<&mut Vring> {
        let index = index.try_into().ok();
        index.and_then(|index| self.vrings.get_mut(index)).ok_or(Error::InvalidParam)
    }

    fn stop_all(&mut self) {
        self.vrings.iter_mut().for_each(Vring::stop);
    }

    fn offered_features(&self) -> u64 {
        config::features(self.shared.device.properties()) | PROTOCOL_FEATURES
    }

    fn apply_write_cache(&self) {
        let has_cache = match self.features & CONFIG_WCE {
            0 => self.features & FLUSH != 0,
            _ => self.has_write_cache,
        };
        let is_write_through = !has_cache || self.shared.device.has_durable_writes();
        self.shared.is_write_through.store(is_write_through, Ordering::SeqCst);
    }

    fn apply_memory(&mut self) -> Result<()> {
        *self.shared.memory.write() = self.table.memory()?;
        Ok(())
    }

    /// Starts or stops a queue, by what the front end has told of it.
    fn update_queue(&mut self, index: usize) -> Result<()> {
        let is_enabled_by_default = self.features & PROTOCOL_FEATURES == 0;
        let has_event_idx = self.features & EVENT_IDX != 0;
        let inflight = self.inflight.as_ref().and_then(|area| area.queue(index as u16));
        let Some(vring) = self.vrings.get_mut(index) else { return Err(Error::InvalidParam) };
        if !vring.is_enabled && !is_enabled_by_default {
            vring.stop();
            return Ok(());
        }
        let (Some(addresses), Some(kick), None) = (vring.addresses, &vring.kick, &vring.queue)
        else {
            return Ok(());
        };
        let kick = kick.try_clone().map_err(Error::ReqHandlerError)?;
        let [descriptors, available, used] = addresses.map(|at| self.table.guest_address(at));
        let (Some(descriptors), Some(available), Some(used)) = (descriptors, available, used)
        else {
            return Err(refuse(format_args!("ring {index} is outside the shared memory")));
        };
        let layout = RingLayout { size: vring.size, descriptors, available, used };
        let memory = self.shared.memory.read().clone();
        let ring = Ring::start(&memory, layout, vring.base, has_event_idx, inflight);
        let ring = ring.map_err(|error| refuse(format_args!("ring {index}: {error}")))?;
        let notifiers = vring.notifiers.clone();
        let queue = Queue::start(index, self.shared.clone(), ring, kick, notifiers);
        vring.queue = Some(queue.map_err(Error::ReqHandlerError)?);
        log::debug!("queue {index} runs with {} descriptors", vring.size);
        Ok(())
    }

    /// Restarts the queues that run, after a change that they read at their start.
    fn restart_queues(&mut self, change: impl FnOnce(&mut Self)) -> Result<()> {
        self.stop_all();
        change(self);
        (0..self.vrings.len()).try_for_each(|index| self.update_queue(index))
    }
}

fn unsupported<T>() -> Result<T> {
    Err(Error::InvalidOperation("not supported"))
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset_device()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop_all();
        self.vrings = (0..MAX_QUEUES).map(|_| Vring::default()).collect();
        self.features = 0;
        self.has_write_cache = true;
        self.apply_write_cache();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offered_features())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !self.offered_features() != 0 {
            return Err(Error::InvalidParam);
        }
        if features != self.features {
            self.restart_queues(|session| session.features = features)?;
        }
        self.apply_write_cache();
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let mut table = MemoryTable::default();
        for (region, file) in regions.iter().zip(files) {
            let info = RegionInfo {
                guest: region.guest_phys_addr,
                user: region.user_addr,
                len: region.memory_size,
                file_offset: region.mmap_offset,
            };
            table.add(info, file)?;
        }
        self.table = table;
        self.apply_memory()?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let size = u16::try_from(num).ok();
        let size = size.filter(|size| *size <= MAX_QUEUE_SIZE && size.is_power_of_two());
        self.vring(index)?.size = size.ok_or(Error::InvalidParam)?;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _: u64,
    ) -> Result<()> {
        self.vring(index)?.addresses = Some([descriptor, available, used]);
        self.update_queue(index as usize)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.vring(index)?.base = u16::try_from(base).map_err(refuse)?;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let vring = self.vring(index)?;
        vring.stop();
        vring.kick = None;
        vring.notifiers.lock().call = None;
        Ok(VhostUserVringState::new(index, vring.base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let vring = self.vring(index)?;
        vring.stop();
        // Without a descriptor the ring would have to be polled.
        vring.kick = Some(fd.ok_or(Error::InvalidParam)?);
        self.update_queue(index.into())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        // A predecessor may have died before it told of its last entries.
        notify(fd.as_ref());
        self.vring(index)?.notifiers.lock().call = fd;
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.vring(index)?.notifiers.lock().error = fd;
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    }

    fn set_protocol_features(&mut self, _: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(MAX_QUEUES.into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.vring(index)?.is_enabled = enable;
        self.update_queue(index as usize)
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let device = &self.shared.device;
        let has_write_cache = self.has_write_cache && !device.has_durable_writes();
        let space = config::space(device.properties(), has_write_cache);
        let end = offset.checked_add(size).ok_or(Error::InvalidParam)? as usize;
        let part = space.get(offset as usize..end).ok_or(Error::InvalidParam)?;
        Ok(part.to_vec())
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        let (WRITE_CACHE_OFFSET, &[value @ 0..=1]) = (offset as usize, bytes) else {
            return Err(Error::InvalidParam);
        };
        self.has_write_cache = value == 1;
        if let Some(area) = &self.inflight {
            area.set_write_through(!self.has_write_cache);
        }
        self.apply_write_cache();
        Ok(())
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        unsupported()
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        unsupported()
    }

    fn get_inflight_fd(&mut self, area: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        self.stop_all();
        let area = self.shared.resources.new_area(area, self.shared.device.disk_id())?;
        self.restart_queues(|_| {})?;
        Ok(area)
    }

    fn set_inflight_fd(&mut self, description: &VhostUserInflight, file: File) -> Result<()> {
        let area = InflightArea::map(description, file)?;
        let disk_id = self.shared.device.disk_id();
        if disk_id.is_some() && area.disk_id() != disk_id {
            return Err(refuse(
                "the machine has used another disk, which is gone; restart the machine",
            ));
        }
        // Set by a predecessor, whom the front end does not repeat it after.
        if area.is_write_through() {
            self.has_write_cache = false;
        } else if !self.has_write_cache {
            area.set_write_through(true);
        }
        self.restart_queues(|session| session.inflight = Some(area))?;
        self.apply_write_cache();
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MAX_REGIONS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        self.table.add(single_region(region), file)?;
        self.apply_memory()?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        self.table.remove(single_region(region))?;
        self.apply_memory()
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        unsupported()
    }

    fn check_device_state(&mut self) -> Result<()> {
        unsupported()
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        unsupported()
    }

    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> Result<()> {
        unsupported()
    }
}

fn single_region(region: &VhostUserSingleMemoryRegion) -> RegionInfo {
    RegionInfo {
        guest: region.guest_phys_addr,
        user: region.user_addr,
        len: region.memory_size,
        file_offset: region.mmap_offset,
    }
}
