//! The whole path of a mount in one process, including the disk service behind its session.

#[path = "../../crates/front/tests/common/kernel.rs"]
#[allow(dead_code, reason = "the tests of the front use more of it")]
pub mod kernel;

use std::sync::Arc;
use std::time::Duration;

use draconis_device::{FileDisk, FileOptions, RemoteDisk};
use draconis_exchange::channel::session::{Session, SessionConfig, accept, offer};
use draconis_exchange::contract::disk::Disk;
use draconis_exchange::contract::request_log::{
    DeferredRequest, LoggedRequest, RequestData, RequestLog, RequestOutcome,
};
use draconis_exchange::heap::arena::SlotClass;
use draconis_exchange::heap::{PagePool, PoolBuffer};
use draconis_exchange::shm::SharedMemory;
use draconis_front::fuse::{Activity, Server, ServerOptions};
use draconis_service::options::MountOptions;
use draconis_service::volume::open_for_mount;
use draconis_types::Node;
use kernel::ScriptedKernel;
use rustix::process::{PidfdFlags, getpid, pidfd_open};

const LANE_COUNT: u32 = 6;

/// A request log that allocates buffers like a worker's, but stores nothing.
struct BufferOnlyLog {
    rooms: Arc<PagePool>,
}

impl RequestLog for BufferOnlyLog {
    fn allocate_buffer(&self, len: usize) -> Option<PoolBuffer> {
        self.rooms.allocate(len)
    }
    fn begin_request(&self, _: u64, _: Option<(&[u8], RequestData<'_>)>) {}
    fn record_outcome(&self, _: RequestOutcome) {}
    fn finish_request(&self) {}
    fn defer_completion(&self) -> Option<DeferredRequest> {
        None
    }
    fn finish_deferred(&self, _: DeferredRequest) {}
    fn is_quarantined(&self, _: u64) -> bool {
        false
    }
    fn report_quarantined(&self, _: String) {}
    fn unfinished_requests(&self) -> Result<Option<Vec<LoggedRequest>>, String> {
        Ok(None)
    }
    fn replay(&self, _: &LoggedRequest, _: &mut dyn FnMut()) {}
    fn fail_replay(&self, _: &str) {}
    fn end_replay(&self) {}
    fn finish_replay(&self) {}
    fn orphans(&self) -> Vec<Node> {
        vec![]
    }
    fn is_orphan(&self, _: Node) -> bool {
        false
    }
    fn release_orphans(&self, _: &[Node]) {}
    fn release_orphan(&self, _: Node) {}
}

/// Creates both sides of a session.
fn session_pair() -> (Arc<Session>, Arc<Session>) {
    let class = |slot_bytes, slots| SlotClass { slot_bytes, slots };
    let plan = SessionConfig {
        lanes: LANE_COUNT,
        host: vec![class(4096, 1)],
        guest: vec![class(4096, 128), class(64 << 10, 16), class(256 << 10, 8)],
    };
    let (offer, socket) = offer(&plan).unwrap();
    let host = offer.start(pidfd_open(getpid(), PidfdFlags::empty()).unwrap());
    (host, accept(&socket, draconis_testkit::wait::hang_deadline()).unwrap())
}

/// Connects a simulated kernel to a worker with a buffer pool of `rooms_bytes`, whose volume is on
/// a disk service.
pub fn with_simulated_mount(rooms_bytes: usize, test: impl FnOnce(&mut ScriptedKernel, &PagePool)) {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(64 << 20).unwrap();
    let made = std::process::Command::new(env!("CARGO_BIN_EXE_draconis"))
        .args(["format", "--force"])
        .arg(image.path())
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let how = FileOptions { write: true, direct: true, uring: false };
    let file = FileDisk::open(image.path(), how).unwrap();
    let (host, guest) = session_pair();
    let servers: Vec<_> = (0..LANE_COUNT).filter_map(|lane| host.server::<Disk>(lane)).collect();
    let clients: Vec<_> = (0..LANE_COUNT).filter_map(|lane| guest.client::<Disk>(lane)).collect();
    std::thread::scope(|scope| {
        let service = scope
            .spawn(|| draconis_device::serve_remote_disk(&file, servers, Duration::MAX).unwrap());
        let blocks = guest.clone();
        let blocks = Box::new(move |len| blocks.allocate_block(len));
        let memory = Arc::new(SharedMemory::new(rooms_bytes).unwrap());
        // SAFETY: nothing else writes to the memory.
        let page_pool = unsafe { PagePool::new(memory.clone(), 0..rooms_bytes) };
        [&host, &guest].into_iter().for_each(|side| side.register_pool(memory.clone()));
        let disk = RemoteDisk::new(clients, Some(blocks), Duration::MAX).unwrap();
        let disk = disk.with_shared_memory(page_pool.clone());
        let recorder = BufferOnlyLog { rooms: page_pool.clone() };
        let options = MountOptions::default();
        let tree = open_for_mount(Arc::new(disk), &[], &options, None).unwrap();
        let (mut kernel, device) = ScriptedKernel::new();
        let activity = Activity::default();
        std::thread::scope(|scope| {
            let server = Server::new(&tree, ServerOptions::default()).with_recorder(&recorder);
            let activity = &activity;
            scope.spawn(move || server.serve(device, activity).unwrap());
            test(&mut kernel, &page_pool);
            drop(kernel);
        });
        tree.close().unwrap();
        drop(tree);
        service.join().unwrap();
    });
    draconis_testkit::judge::assert_fsck_clean(image.path());
}
