//! Our own: keys in an object store, in a file with direct I/O.

use std::path::Path;
use std::sync::Arc;

use draconis_device::{Disk, FileDisk, FileOptions};
use draconis_objects::kv::Kv;
use draconis_objects::{CreateOptions, LayoutKind, OpenOptions, Profile, Store};

use crate::kv::{KvSubject, Statistics};

/// Length of the file, which has holes where nothing was written.
const STORE_BYTES: u64 = 32 << 30;

/// An open store.
pub struct DraconisKv {
    kv: Kv,
    durable: bool,
}

impl DraconisKv {
    /// Opens it in `dir`, made if it is not there.
    ///
    /// # Errors
    /// What the store says.
    pub fn open(dir: &Path, durable: bool) -> anyhow::Result<Self> {
        let path = dir.join("store");
        let is_new = !path.exists();
        if is_new {
            std::fs::File::create(&path)?.set_len(STORE_BYTES)?;
        }
        let options = FileOptions { write: true, direct: true, uring: true };
        let disk: Arc<dyn Disk> = Arc::new(FileDisk::open_discarding(&path, options)?);
        if is_new {
            let profile = Profile {
                layout: LayoutKind::Cow,
                page_bytes: 4096,
                segment_bytes: 16 << 20,
                queue_depth: 32,
            };
            Store::create(disk.clone(), &CreateOptions { profile, id: 1 })?;
        }
        let options = OpenOptions { cache_bytes: 256 << 20, read_only: false };
        Ok(Self { kv: Kv::new(Store::open(disk, &options)?), durable })
    }
}

impl KvSubject for DraconisKv {
    fn put(&self, key: &[u8], value: &[u8]) -> anyhow::Result<()> {
        let ticket = self.kv.put(key, value)?;
        if self.durable {
            self.kv.wait(ticket)?;
        }
        Ok(())
    }

    fn get(&self, key: &[u8]) -> anyhow::Result<Option<Vec<u8>>> {
        Ok(self.kv.get(key)?)
    }

    fn delete(&self, key: &[u8]) -> anyhow::Result<()> {
        let ticket = self.kv.delete(key)?;
        if self.durable {
            self.kv.wait(ticket)?;
        }
        Ok(())
    }

    fn sync(&self) -> anyhow::Result<()> {
        Ok(self.kv.store().sync()?)
    }

    fn statistics(&self) -> anyhow::Result<Statistics> {
        // There is no level 0, and nothing is compacted.
        Ok(Statistics::default())
    }
}
