//! A table overwritten in place and a log that grows, with fsync after each change.

use draconis_ext::{InodeNumber, Volume};
use draconis_types::FileType;

use super::{
    CELL_BYTES, RecordingDisk, Workload, cell_versions, create, encode_cells, find, read_file,
    write,
};
use draconis_device::Random;

const PAGE_COUNT: u64 = 20;
const PAGE_BYTES: u64 = 4096;
const LOG_RECORD_BYTES: u64 = 512;
const TABLE_OWNER: u32 = 1;
const LOG_OWNER: u32 = 2;

pub(super) struct DatabaseWorkload {
    seed: u64,
    steps: u64,
}

impl DatabaseWorkload {
    pub(super) fn new(seed: u64, steps: u64) -> Self {
        Self { seed, steps }
    }

    /// Returns the page that a version writes.
    fn page_of_version(&self, version: u64) -> u64 {
        Random::new(self.seed ^ version << 16).next_below(PAGE_COUNT)
    }
}

impl Workload for DatabaseWorkload {
    fn name(&self) -> &'static str {
        "database"
    }

    fn run(&self, volume: &Volume, record: &RecordingDisk, _: &mut Random) -> anyhow::Result<()> {
        let root = InodeNumber::ROOT;
        let table = create(volume, root, "table", FileType::File)?;
        write(volume, table, 0, &encode_cells(TABLE_OWNER, 0, 0, PAGE_COUNT * PAGE_BYTES))?;
        let log = create(volume, root, "log", FileType::File)?;
        volume.sync()?;
        record.record_mark(0);
        for version in 1..=self.steps {
            let at = (version - 1) * LOG_RECORD_BYTES;
            write(volume, log, at, &encode_cells(LOG_OWNER, version as u32, at, LOG_RECORD_BYTES))?;
            volume.sync_inode(log, version % 2 == 0)?;
            let at = self.page_of_version(version) * PAGE_BYTES;
            write(volume, table, at, &encode_cells(TABLE_OWNER, version as u32, at, PAGE_BYTES))?;
            if version % 3 == 0 {
                volume.sync_inode(table, true)?;
                // The log was synced first, then the table.
                record.record_mark(version);
            }
        }
        Ok(())
    }

    fn verify(&self, volume: &Volume, marks: &[u64]) -> Result<(), String> {
        let Some(&synced) = marks.last() else { return Ok(()) };
        let open = |path: &str| find(volume, path).ok_or(format!("{path} is gone"));
        let log = read_file(volume, open("log")?)?;
        let found = cell_versions(&log, LOG_OWNER)?;
        let records = found.chunks((LOG_RECORD_BYTES / CELL_BYTES) as usize).zip(1..);
        for (cells, version) in records.take(synced as usize) {
            if cells.iter().any(|cell| *cell != Some(version as u32)) {
                return Err(format!("record {version} of the log is {:?}", cells.first()));
            }
        }
        if (log.len() as u64) < synced * LOG_RECORD_BYTES {
            return Err(format!("the log has {} bytes after {synced} records", log.len()));
        }
        let table = read_file(volume, open("table")?)?;
        let found = cell_versions(&table, TABLE_OWNER)?;
        if table.len() as u64 != PAGE_COUNT * PAGE_BYTES {
            return Err(format!("the table has {} bytes", table.len()));
        }
        for (cells, page) in found.chunks((PAGE_BYTES / CELL_BYTES) as usize).zip(0..) {
            let written = (1..=synced).rev().find(|version| self.page_of_version(*version) == page);
            let least = written.unwrap_or(0);
            // A page may be torn between the acknowledged version and newer ones.
            if cells.iter().any(|cell| cell.is_none_or(|version| u64::from(version) < least)) {
                return Err(format!("page {page} of the table is older than version {least}"));
            }
        }
        Ok(())
    }
}
