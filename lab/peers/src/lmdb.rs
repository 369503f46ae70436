//! LMDB: a memory-mapped copy-on-write B-tree. Each put is a transaction.
#![allow(unsafe_code)]

use std::path::Path;

use heed::types::Bytes;
use heed::{Database, Env, EnvFlags, EnvOpenOptions};

use crate::kv::{KvSubject, ScanCallback, StoreOptions, StoreStatistics};

/// Maximum size, in bytes: reserves address space, not memory.
const MAP_BYTES: usize = 64 << 30;

/// An open environment with one database.
pub struct Lmdb {
    env: Env,
    database: Database<Bytes, Bytes>,
}

impl Lmdb {
    /// Opens the environment in `dir`.
    ///
    /// # Errors
    /// LMDB fails.
    pub fn open(dir: &Path, how: StoreOptions) -> anyhow::Result<Self> {
        let mut options = EnvOpenOptions::new();
        options.map_size(MAP_BYTES);
        if how.scarce {
            // SAFETY: only disables read-ahead in the kernel.
            unsafe { options.flags(EnvFlags::NO_READ_AHEAD) };
        }
        if !how.durable {
            // SAFETY: a crash of the machine may corrupt the file, which is deleted after the
            // run.
            unsafe { options.flags(EnvFlags::NO_SYNC) };
        }
        // SAFETY: no other process opens the file, which was created for this run.
        let env = unsafe { options.open(dir)? };
        let mut transaction = env.write_txn()?;
        let database = env.create_database(&mut transaction, None)?;
        transaction.commit()?;
        Ok(Self { env, database })
    }
}

impl KvSubject for Lmdb {
    fn put(&self, key: &[u8], value: &[u8]) -> anyhow::Result<()> {
        let mut transaction = self.env.write_txn()?;
        self.database.put(&mut transaction, key, value)?;
        Ok(transaction.commit()?)
    }

    fn load(&self, pairs: &[(Vec<u8>, Vec<u8>)]) -> anyhow::Result<()> {
        let mut transaction = self.env.write_txn()?;
        for (key, value) in pairs {
            self.database.put(&mut transaction, key, value)?;
        }
        Ok(transaction.commit()?)
    }

    fn get(&self, key: &[u8]) -> anyhow::Result<Option<Vec<u8>>> {
        let transaction = self.env.read_txn()?;
        Ok(self.database.get(&transaction, key)?.map(<[u8]>::to_vec))
    }

    fn scan(&self, visit: ScanCallback<'_>) -> anyhow::Result<()> {
        let transaction = self.env.read_txn()?;
        for pair in self.database.iter(&transaction)? {
            let (key, value) = pair?;
            if !visit(key, value) {
                break;
            }
        }
        Ok(())
    }

    fn delete(&self, key: &[u8]) -> anyhow::Result<()> {
        let mut transaction = self.env.write_txn()?;
        self.database.delete(&mut transaction, key)?;
        Ok(transaction.commit()?)
    }

    fn sync(&self) -> anyhow::Result<()> {
        Ok(self.env.force_sync()?)
    }

    fn statistics(&self) -> anyhow::Result<StoreStatistics> {
        Ok(StoreStatistics::default())
    }
}
