//! A table overwritten in place and a log that grows, with fsync after each change.

use draconis_exchange::contract::FileType;
use draconis_ext::{InodeNumber, Volume};

use super::{CELL, Record, Workload, cells, contents, create, find, versions, write};
use draconis_device::Random;

const PAGES: u64 = 20;
const PAGE: u64 = 4096;
const LOG_RECORD: u64 = 512;
const TABLE: u32 = 1;
const LOG: u32 = 2;

pub(super) struct Database {
    seed: u64,
    steps: u64,
}

impl Database {
    pub(super) fn new(seed: u64, steps: u64) -> Self {
        Self { seed, steps }
    }

    /// Returns the page that a version writes.
    fn page(&self, version: u64) -> u64 {
        Random::new(self.seed ^ version << 16).below(PAGES)
    }
}

impl Workload for Database {
    fn name(&self) -> &'static str {
        "database"
    }

    fn run(&self, volume: &Volume, record: &Record, _: &mut Random) -> anyhow::Result<()> {
        let root = InodeNumber::ROOT;
        let table = create(volume, root, "table", FileType::File)?;
        write(volume, table, 0, &cells(TABLE, 0, 0, PAGES * PAGE))?;
        let log = create(volume, root, "log", FileType::File)?;
        volume.sync()?;
        record.mark(0);
        for version in 1..=self.steps {
            let at = (version - 1) * LOG_RECORD;
            write(volume, log, at, &cells(LOG, version as u32, at, LOG_RECORD))?;
            volume.sync_inode(log, version % 2 == 0)?;
            let at = self.page(version) * PAGE;
            write(volume, table, at, &cells(TABLE, version as u32, at, PAGE))?;
            if version % 3 == 0 {
                volume.sync_inode(table, true)?;
                // The log was synced first, then the table.
                record.mark(version);
            }
        }
        Ok(())
    }

    fn verify(&self, volume: &Volume, marks: &[u64]) -> Result<(), String> {
        let Some(&synced) = marks.last() else { return Ok(()) };
        let open = |path: &str| find(volume, path).ok_or(format!("{path} is gone"));
        let log = contents(volume, open("log")?)?;
        let found = versions(&log, LOG)?;
        let records = found.chunks((LOG_RECORD / CELL) as usize).zip(1..);
        for (cells, version) in records.take(synced as usize) {
            if cells.iter().any(|cell| *cell != Some(version as u32)) {
                return Err(format!("record {version} of the log is {:?}", cells.first()));
            }
        }
        if (log.len() as u64) < synced * LOG_RECORD {
            return Err(format!("the log has {} bytes after {synced} records", log.len()));
        }
        let table = contents(volume, open("table")?)?;
        let found = versions(&table, TABLE)?;
        if table.len() as u64 != PAGES * PAGE {
            return Err(format!("the table has {} bytes", table.len()));
        }
        for (cells, page) in found.chunks((PAGE / CELL) as usize).zip(0..) {
            let written = (1..=synced).rev().find(|version| self.page(*version) == page);
            let least = written.unwrap_or(0);
            // A page may be torn between the acknowledged version and newer ones.
            if cells.iter().any(|cell| cell.is_none_or(|version| u64::from(version) < least)) {
                return Err(format!("page {page} of the table is older than version {least}"));
            }
        }
        Ok(())
    }
}
