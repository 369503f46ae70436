//! redb: a tree of pages, copied on write. Each put is a transaction.

use std::path::Path;

use redb::{Database, Durability, ReadableDatabase, TableDefinition};

use crate::kv::{KvSubject, Statistics};

const TABLE: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("lab");

/// An open database.
pub struct Redb {
    database: Database,
    durable: bool,
}

impl Redb {
    /// Opens it in `dir`.
    ///
    /// # Errors
    /// What redb says.
    pub fn open(dir: &Path, durable: bool) -> anyhow::Result<Self> {
        Ok(Self { database: Database::create(dir.join("redb"))?, durable })
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

    fn get(&self, key: &[u8]) -> anyhow::Result<Option<Vec<u8>>> {
        let table = self.database.begin_read()?.open_table(TABLE)?;
        Ok(table.get(key)?.map(|value| value.value().to_vec()))
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

    fn statistics(&self) -> anyhow::Result<Statistics> {
        Ok(Statistics::default())
    }
}
