//! Draconis: keys in an object store, in a file with direct I/O or in a bucket.

use std::path::Path;
use std::sync::Arc;

use anyhow::anyhow;
use draconis_bucket::{BucketDisk, JournalDevice, ObjectStoreBucket};
use draconis_device::{Disk, FileDisk, FileOptions};
use draconis_objects::kv::{Batch, Kv};
use draconis_objects::{CreateOptions, LayoutKind, OpenOptions, Profile, Store};

use crate::kv::{KvSubject, ScanCallback, StoreOptions, StoreStatistics};

/// Length of a sparse store file.
const STORE_BYTES: u64 = 32 << 30;

/// Length of a store file for durable puts, zero-filled as by `store create`: unallocated blocks
/// would cost a journal commit of the file system below for each flush.
const DURABLE_BYTES: u64 = 1 << 30;

/// Length of a store in a bucket.
const BUCKET_BYTES: u64 = 4 << 30;

/// Length of a journal, as in the program.
const JOURNAL_BYTES: u64 = 256 << 20;

/// Default cache for reads, in bytes.
const CACHE_BYTES: u64 = 256 << 20;

/// An open store.
pub struct DraconisKv {
    kv: Kv,
    durable: bool,
}

impl DraconisKv {
    /// Opens the store in `dir`, and creates it if missing.
    ///
    /// # Errors
    /// The store fails.
    pub fn open(dir: &Path, how: StoreOptions) -> anyhow::Result<Self> {
        let path = dir.join("store");
        let is_new = !path.exists();
        match is_new {
            true if how.durable => write_out(&path)?,
            true => std::fs::File::create(&path)?.set_len(STORE_BYTES)?,
            false => {}
        }
        let options = FileOptions { write: true, direct: true, uring: !how.calls };
        let disk: Arc<dyn Disk> = Arc::new(FileDisk::open_discarding(&path, options)?);
        if is_new {
            let profile = Profile {
                layout: LayoutKind::Cow,
                page_bytes: 4096,
                segment_bytes: if how.durable { 1 << 20 } else { 16 << 20 },
                queue_depth: 32,
            };
            Store::create(disk.clone(), &CreateOptions { profile, id: 1 })?;
        }
        Self::on(disk, how)
    }

    /// Opens the store in a bucket, given by address as in the program, with an optional journal;
    /// creates it if `makes`.
    ///
    /// # Errors
    /// The bucket or the store fails.
    pub fn in_bucket(
        address: &str,
        makes: bool,
        journal: Option<&Path>,
        how: StoreOptions,
    ) -> anyhow::Result<Self> {
        let cloud = ObjectStoreBucket::open(address, makes, std::time::Duration::from_secs(30))
            .map_err(|why| anyhow!("{why}"))?;
        let token = u128::from(std::process::id());
        let journal =
            journal.map(|file| JournalDevice::file(file, JOURNAL_BYTES, token)).transpose();
        let journal = journal.map_err(|why| anyhow!("{why}"))?;
        let options = draconis_bucket::BucketOptions {
            token,
            journal,
            ..draconis_bucket::BucketOptions::default()
        };
        let disk = match makes {
            true => BucketDisk::create(Arc::new(cloud), address, BUCKET_BYTES, false, &options)?,
            false => BucketDisk::open(Arc::new(cloud), address, &options)?,
        };
        let disk: Arc<dyn Disk> = Arc::new(disk);
        if makes {
            // The profile of `store create`.
            let profile = Profile {
                layout: LayoutKind::Bucket,
                page_bytes: 512,
                segment_bytes: 16 << 20,
                queue_depth: 16,
            };
            Store::create(disk.clone(), &CreateOptions { profile, id: 1 })?;
        }
        Self::on(disk, how)
    }

    fn on(disk: Arc<dyn Disk>, how: StoreOptions) -> anyhow::Result<Self> {
        let options =
            OpenOptions { cache_bytes: how.cache_bytes.unwrap_or(CACHE_BYTES), read_only: false };
        Ok(Self { kv: Kv::new(Store::open(disk, &options)?), durable: how.durable })
    }
}

fn write_out(path: &Path) -> anyhow::Result<()> {
    let mut file = std::fs::File::create(path)?;
    let zeroes = vec![0; 1 << 20];
    for _ in 0..DURABLE_BYTES / zeroes.len() as u64 {
        std::io::Write::write_all(&mut file, &zeroes)?;
    }
    Ok(file.sync_all()?)
}

impl KvSubject for DraconisKv {
    fn put(&self, key: &[u8], value: &[u8]) -> anyhow::Result<()> {
        let ticket = self.kv.put(key, value)?;
        if self.durable {
            self.kv.wait(ticket)?;
        }
        Ok(())
    }

    fn load(&self, pairs: &[(Vec<u8>, Vec<u8>)]) -> anyhow::Result<()> {
        let mut batch = Batch::new();
        pairs.iter().for_each(|(key, value)| batch.put(key, value));
        match self.kv.write(batch) {
            Ok(_) => Ok(()),
            Err(refused) => Err(refused.1.into()),
        }
    }

    fn get(&self, key: &[u8]) -> anyhow::Result<Option<Vec<u8>>> {
        Ok(self.kv.get(key)?)
    }

    fn scan(&self, visit: ScanCallback<'_>) -> anyhow::Result<()> {
        for pair in self.kv.scan::<std::ops::RangeFull>(&..) {
            let (key, value) = pair?;
            if !visit(&key, &value) {
                break;
            }
        }
        Ok(())
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

    fn statistics(&self) -> anyhow::Result<StoreStatistics> {
        // The store has no level 0 and no compactions.
        Ok(StoreStatistics::default())
    }
}
