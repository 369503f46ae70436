//! A tree created as by `tar x`: directories, files, links; synced at intervals.

use draconis_exchange::contract::FileType;
use draconis_ext::{InodeNumber, Volume};

use super::{Record, Workload, cells, contents, create, find, versions, write};
use draconis_device::Random;

/// Files created between two syncs.
const BATCH: u64 = 15;
/// Files per directory.
const IN_DIRECTORY: u64 = 40;

pub(super) struct Untar {
    seed: u64,
    files: u64,
}

impl Untar {
    pub(super) fn new(seed: u64, steps: u64) -> Self {
        Self { seed, files: steps }
    }

    /// Returns the length: mostly small, sometimes with an indirect block.
    fn len(&self, nth: u64) -> u64 {
        let mut dice = Random::new(self.seed ^ nth << 20);
        let most = if nth % 9 == 4 { 60_000 } else { 6_000 };
        dice.below(most)
    }

    fn owner(nth: u64) -> u32 {
        nth as u32 + 1
    }

    fn directory(nth: u64) -> String {
        format!("dir {}", nth / IN_DIRECTORY)
    }

    /// Returns a name long enough for directories of several blocks.
    fn file(nth: u64) -> String {
        format!("a file with a somewhat longer name {nth}")
    }
}

impl Workload for Untar {
    fn name(&self) -> &'static str {
        "untar"
    }

    fn run(&self, volume: &Volume, record: &Record, _: &mut Random) -> anyhow::Result<()> {
        let mut dir = InodeNumber::ROOT;
        for nth in 0..self.files {
            if nth % IN_DIRECTORY == 0 {
                dir =
                    create(volume, InodeNumber::ROOT, &Self::directory(nth), FileType::Directory)?;
            }
            let file = create(volume, dir, &Self::file(nth), FileType::File)?;
            let bytes = cells(Self::owner(nth), 1, 0, self.len(nth));
            // In pieces, as programs write.
            for (piece, at) in bytes.chunks(4096).zip((0..).step_by(4096)) {
                write(volume, file, at, piece)?;
            }
            if nth % 11 == 3 {
                create(volume, dir, &format!("link {nth}"), FileType::Symlink)?;
                volume.link(file, dir, format!("again {nth}").as_bytes())?;
            }
            if nth % BATCH == BATCH - 1 {
                volume.sync()?;
                record.mark(nth + 1);
            }
        }
        Ok(())
    }

    fn verify(&self, volume: &Volume, marks: &[u64]) -> Result<(), String> {
        let synced = marks.last().copied().unwrap_or(0);
        for nth in 0..self.files {
            let path = format!("{}/{}", Self::directory(nth), Self::file(nth));
            let Some(file) = find(volume, &path) else {
                if nth < synced {
                    return Err(format!("{path} was synced and is gone"));
                }
                continue;
            };
            let bytes = contents(volume, file)?;
            let versions = versions(&bytes, Self::owner(nth))?;
            let is_whole = versions.iter().all(Option::is_some);
            if nth < synced && (bytes.len() as u64 != self.len(nth) || !is_whole) {
                return Err(format!(
                    "{path} was synced with {} bytes, now {}; whole: {is_whole}",
                    self.len(nth),
                    bytes.len()
                ));
            }
        }
        Ok(())
    }
}
