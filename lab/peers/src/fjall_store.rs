//! fjall: a log-structured merge tree (LSM tree).

use std::path::Path;

use fjall::{Config, Keyspace, PartitionCreateOptions, PartitionHandle, PersistMode};

use crate::kv::{KvSubject, ScanCallback, StoreOptions, StoreStatistics};

/// An open keyspace with one partition.
pub struct Fjall {
    keyspace: Keyspace,
    partition: PartitionHandle,
    durable: bool,
}

impl Fjall {
    /// Opens the keyspace in `dir`.
    ///
    /// # Errors
    /// fjall fails.
    pub fn open(dir: &Path, how: StoreOptions) -> anyhow::Result<Self> {
        let (mut config, mut options) = (Config::new(dir), PartitionCreateOptions::default());
        if let Some(bytes) = how.cache_bytes {
            let unwritten = bytes / 4;
            config = config.cache_size(bytes - unwritten).max_write_buffer_size(unwritten);
            // A quarter, because one memtable is filled while others are flushed.
            options = options.max_memtable_size(u32::try_from(unwritten / 4).unwrap_or(u32::MAX));
        }
        let keyspace = config.open()?;
        let partition = keyspace.open_partition("lab", options)?;
        Ok(Self { keyspace, partition, durable: how.durable })
    }

    fn done(&self) -> anyhow::Result<()> {
        if self.durable {
            self.keyspace.persist(PersistMode::SyncData)?;
        }
        Ok(())
    }
}

impl KvSubject for Fjall {
    fn put(&self, key: &[u8], value: &[u8]) -> anyhow::Result<()> {
        self.partition.insert(key, value)?;
        self.done()
    }

    fn get(&self, key: &[u8]) -> anyhow::Result<Option<Vec<u8>>> {
        Ok(self.partition.get(key)?.map(|value| value.to_vec()))
    }

    fn scan(&self, visit: ScanCallback<'_>) -> anyhow::Result<()> {
        for pair in self.partition.iter() {
            let (key, value) = pair?;
            if !visit(&key, &value) {
                break;
            }
        }
        Ok(())
    }

    fn delete(&self, key: &[u8]) -> anyhow::Result<()> {
        self.partition.remove(key)?;
        self.done()
    }

    fn sync(&self) -> anyhow::Result<()> {
        Ok(self.keyspace.persist(PersistMode::SyncAll)?)
    }

    fn statistics(&self) -> anyhow::Result<StoreStatistics> {
        // fjall reports neither.
        Ok(StoreStatistics::default())
    }
}
