//! Fan-out of each change of a volume: to clients that cache what they have read, and to the oplog.
//!
//! Law: they are notified before a reader of the volume sees the change. So a client that reads
//! after a notification never gets older data than it has seen.

use std::sync::{Arc, OnceLock};

use draconis_exchange::channel::ChangeNotifier;
use draconis_ext::{ChangeRecord, ChangeRecorder, InodeNumber};
use draconis_types::lock::{Mutex, MutexGuard};

/// Passes each change on to the clients and the oplog.
#[derive(Default)]
pub(super) struct ChangeFanout {
    clients: Mutex<Vec<ChangeNotifier>>,
    next: OnceLock<Arc<dyn ChangeRecorder>>,
}

impl ChangeFanout {
    /// Notifies a client from now on, until its channel is closed.
    pub(super) fn add_client(&self, client: ChangeNotifier) {
        let mut clients = self.lock_clients();
        clients.retain(ChangeNotifier::is_open);
        clients.push(client);
    }

    /// Passes changes to `witness`, too. The first call wins.
    pub(super) fn set_oplog(&self, witness: Arc<dyn ChangeRecorder>) {
        let _ = self.next.set(witness);
    }

    fn lock_clients(&self) -> MutexGuard<'_, Vec<ChangeNotifier>> {
        self.clients.lock()
    }
}

impl ChangeRecorder for ChangeFanout {
    fn record_change(&self, number: u64, made: ChangeRecord) {
        if let Some(next) = self.next.get() {
            next.record_change(number, made);
        }
        self.lock_clients().retain(ChangeNotifier::notify_change);
    }

    fn record_partial_failure(&self) {
        if let Some(next) = self.next.get() {
            next.record_partial_failure();
        }
        self.lock_clients().retain(ChangeNotifier::notify_change);
    }

    fn record_stop(&self, why: &str) {
        if let Some(next) = self.next.get() {
            next.record_stop(why);
        }
    }

    fn record_accepted_through(&self, number: u64) {
        if let Some(next) = self.next.get() {
            next.record_accepted_through(number);
        }
    }

    fn record_orphan(&self, number: u64, inode: InodeNumber, all: &dyn Fn() -> Vec<InodeNumber>) {
        if let Some(next) = self.next.get() {
            next.record_orphan(number, inode, all);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use draconis_device::{Disk, MemoryDisk};
    use draconis_exchange::channel;
    use draconis_exchange::contract::file::{self, CachingReader, File, FileServer, Write};
    use draconis_exchange::contract::tree::Tree;
    use draconis_ext::FileSystem;
    use draconis_types::Block;
    use draconis_types::Node;

    use crate::options::MountOptions;
    use crate::volume::open_for_mount;

    #[test]
    fn caching_reader_sees_each_write() {
        const TIMEOUT: Duration = Duration::from_secs(20);
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(vec![0; 8 << 20], 512));
        let volume = FileSystem::create_on(disk.clone(), &Default::default(), true).unwrap();
        volume.write("/new", [7; 9]).unwrap();
        let node = Node(volume.metadata("/new").unwrap().node.0);
        volume.close().unwrap();
        let tree = open_for_mount(disk, &[], &MountOptions::default(), None).unwrap();
        let (client, server) = channel::pair::<File>();
        tree.notify_changes_to(&server);
        let served = tree.file(node);
        std::thread::scope(|scope| {
            scope.spawn(|| server.serve(TIMEOUT, |message| file::answer(&served, message)));
            let vacant = |len| Some(Block::unallocated(len));
            let mut reader = CachingReader::new(client, TIMEOUT, 4, vacant);
            for byte in 7..47 {
                let mut into = [0; 10];
                for _ in 0..3 {
                    assert_eq!(reader.read(0, &mut into), Ok(9));
                }
                assert_eq!(into[..9], [byte; 9]);
                let mut buffer = Block::private(9);
                buffer.copy_in(0, &[byte + 1; 9]);
                let (buffer_offset, offset, len) = (0, 0, 9);
                let clear_privileges = false;
                let mut write = Write { buffer, buffer_offset, offset, len, clear_privileges };
                assert_eq!(tree.file(node).write(&mut write), Ok(9));
            }
        });
    }
}
