//! fjall: a log-structured merge tree.

use std::path::Path;

use fjall::{Config, Keyspace, PartitionCreateOptions, PartitionHandle, PersistMode};

use crate::kv::{KvSubject, Statistics};

/// An open keyspace with one partition.
pub struct Fjall {
    keyspace: Keyspace,
    partition: PartitionHandle,
    durable: bool,
}

impl Fjall {
    /// Opens it in `dir`.
    ///
    /// # Errors
    /// What fjall says.
    pub fn open(dir: &Path, durable: bool) -> anyhow::Result<Self> {
        let keyspace = Config::new(dir).open()?;
        let partition = keyspace.open_partition("lab", PartitionCreateOptions::default())?;
        Ok(Self { keyspace, partition, durable })
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

    fn delete(&self, key: &[u8]) -> anyhow::Result<()> {
        self.partition.remove(key)?;
        self.done()
    }

    fn sync(&self) -> anyhow::Result<()> {
        Ok(self.keyspace.persist(PersistMode::SyncAll)?)
    }

    fn statistics(&self) -> anyhow::Result<Statistics> {
        // It shows neither of the two.
        Ok(Statistics::default())
    }
}
