//! A client that goes on when calls fail: it writes numbered files, and knows which of them `fsync`
//! returned for.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use draconis_device::Random;

use super::SharedState;

/// Number of files of a client: older ones are removed.
const MAX_FILES: u64 = 24;
/// Longest file, in bytes.
const MAX_FILE_BYTES: u64 = 24_000;

pub(super) struct RecordClient {
    dir: PathBuf,
    seed: u64,
    next: u64,
    /// Files that are complete and for which `fsync` has returned.
    durable: BTreeSet<u64>,
}

impl RecordClient {
    pub(super) fn new(at: &Path, nth: u64, seed: u64) -> anyhow::Result<Self> {
        let dir = at.join(format!("records-{nth}"));
        std::fs::create_dir(&dir)?;
        File::open(&dir)?.sync_all()?;
        File::open(at)?.sync_all()?;
        Ok(Self { dir, seed: seed << 8 | nth, next: 0, durable: BTreeSet::new() })
    }

    fn contents(&self, nth: u64) -> Vec<u8> {
        let mut random = Random::new(self.seed << 32 | nth);
        let mut bytes = vec![0; 1 + random.next_below(MAX_FILE_BYTES) as usize];
        random.fill(&mut bytes);
        bytes
    }

    fn path(&self, nth: u64) -> PathBuf {
        self.dir.join(nth.to_string())
    }

    /// Writes the next file and syncs it, and removes the oldest one.
    ///
    /// # Errors
    /// The first error of a call; what is there of the file is removed if that is possible.
    pub(super) fn step(&mut self, shared: &SharedState) -> std::io::Result<()> {
        let nth = self.next;
        self.next += 1;
        let path = self.path(nth);
        let written = shared.timed_call(|| -> std::io::Result<()> {
            let mut file = File::create_new(&path)?;
            file.write_all(&self.contents(nth))?;
            file.sync_all()?;
            File::open(&self.dir)?.sync_all()
        });
        if let Err(error) = written {
            // Not possible on a volume that has become read-only.
            let _ = shared.timed_call(|| std::fs::remove_file(&path));
            return Err(error);
        }
        self.durable.insert(nth);
        if let Some(old) = nth.checked_sub(MAX_FILES) {
            self.durable.remove(&old);
            let removed = shared.timed_call(|| std::fs::remove_file(self.path(old)));
            // One that could not be written is not there.
            return removed.or_else(|error| match error.kind() {
                std::io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            });
        }
        Ok(())
    }

    /// Checks that each durable file is there, and that no other has wrong bytes: a file that was
    /// not synced may be short, or have zeros.
    pub(super) fn verify(&self) -> anyhow::Result<()> {
        for nth in &self.durable {
            let read = std::fs::read(self.path(*nth));
            let read = read.with_context(|| format!("file {nth}, which was synced"))?;
            ensure!(read == self.contents(*nth), "file {nth}, which was synced, has other bytes");
        }
        for entry in std::fs::read_dir(&self.dir)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let nth: u64 = name.parse().with_context(|| format!("{name} was never made"))?;
            let read = match std::fs::read(self.path(nth)) {
                // Of ext2 without a journal: a name that leads nowhere, for e2fsck -p to remove.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                read => read.with_context(|| format!("file {nth}, which was not synced"))?,
            };
            let known = self.contents(nth);
            if nth >= self.next || read.len() > known.len() {
                bail!("file {nth} has {} bytes", read.len());
            }
            let is_wrong = |(now, then): (&u8, &u8)| now != then && *now != 0;
            ensure!(!read.iter().zip(&known).any(is_wrong), "file {nth} has bytes of no one");
        }
        Ok(())
    }

    /// Returns the number of durable files.
    pub(super) fn durable_count(&self) -> usize {
        self.durable.len()
    }
}
