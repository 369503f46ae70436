//! redb: a copy-on-write B-tree. Each put is a transaction.

use std::path::Path;

use redb::{Database, Durability, ReadableDatabase, ReadableTable, TableDefinition};

use crate::kv::{KvSubject, ScanCallback, StoreOptions, StoreStatistics};

const TABLE: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("lab");

/// An open database.
pub struct Redb {
    database: Database,
    durable: bool,
}

impl Redb {
    /// Opens the database in `dir`.
    ///
    /// # Errors
    /// redb fails.
    pub fn open(dir: &Path, how: StoreOptions) -> anyhow::Result<Self> {
        let mut builder = Database::builder();
        if let Some(bytes) = how.cache_bytes {
            builder.set_cache_size(usize::try_from(bytes)?);
        }
        Ok(Self { database: builder.create(dir.join("redb"))?, durable: how.durable })
    }

    fn change(
        &self,
        durable: bool,
        change: impl FnOnce(&mut redb::Table<'_, &'static [u8], &'static [u8]>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut transaction = self.database.begin_write()?;
        let how = if durable { Durability::Immediate } else { Durability::None };
        transaction.set_durability(how)?;
        change(&mut transaction.open_table(TABLE)?)?;
        Ok(transaction.commit()?)
    }
}

impl KvSubject for Redb {
    fn put(&self, key: &[u8], value: &[u8]) -> anyhow::Result<()> {
        self.change(self.durable, |table| {
            table.insert(key, value)?;
            Ok(())
        })
    }

    fn load(&self, pairs: &[(Vec<u8>, Vec<u8>)]) -> anyhow::Result<()> {
        self.change(self.durable, |table| {
            for (key, value) in pairs {
                table.insert(&key[..], &value[..])?;
            }
            Ok(())
        })
    }

    fn get(&self, key: &[u8]) -> anyhow::Result<Option<Vec<u8>>> {
        let table = self.database.begin_read()?.open_table(TABLE)?;
        Ok(table.get(key)?.map(|value| value.value().to_vec()))
    }

    fn scan(&self, visit: ScanCallback<'_>) -> anyhow::Result<()> {
        let table = self.database.begin_read()?.open_table(TABLE)?;
        for pair in table.iter()? {
            let (key, value) = pair?;
            if !visit(key.value(), value.value()) {
                break;
            }
        }
        Ok(())
    }

    fn delete(&self, key: &[u8]) -> anyhow::Result<()> {
        self.change(self.durable, |table| {
            table.remove(key)?;
            Ok(())
        })
    }

    fn sync(&self) -> anyhow::Result<()> {
        self.change(true, |_| Ok(()))
    }

    fn statistics(&self) -> anyhow::Result<StoreStatistics> {
        Ok(StoreStatistics::default())
    }
}
