//! A tree created as by `tar x`: directories, files, links; synced at intervals.

use draconis_ext::{InodeNumber, Volume};
use draconis_types::FileType;

use super::{RecordingDisk, Workload, cell_versions, create, encode_cells, find, read_file, write};
use draconis_device::Random;

/// Files created between two syncs.
const FILES_PER_SYNC: u64 = 15;
/// Files per directory.
const FILES_PER_DIRECTORY: u64 = 40;

pub(super) struct UntarWorkload {
    seed: u64,
    files: u64,
}

impl UntarWorkload {
    pub(super) fn new(seed: u64, steps: u64) -> Self {
        Self { seed, files: steps }
    }

    /// Returns the length: mostly small, sometimes with an indirect block.
    fn len(&self, nth: u64) -> u64 {
        let mut dice = Random::new(self.seed ^ nth << 20);
        let most = if nth % 9 == 4 { 60_000 } else { 6_000 };
        dice.next_below(most)
    }

    fn file_owner(nth: u64) -> u32 {
        nth as u32 + 1
    }

    fn directory_name(nth: u64) -> String {
        format!("dir {}", nth / FILES_PER_DIRECTORY)
    }

    /// Returns a name long enough for directories of several blocks.
    fn file_path(nth: u64) -> String {
        format!("a file with a somewhat longer name {nth}")
    }
}

impl Workload for UntarWorkload {
    fn name(&self) -> &'static str {
        "untar"
    }

    fn run(&self, volume: &Volume, record: &RecordingDisk, _: &mut Random) -> anyhow::Result<()> {
        let mut dir = InodeNumber::ROOT;
        for nth in 0..self.files {
            if nth % FILES_PER_DIRECTORY == 0 {
                dir = create(
                    volume,
                    InodeNumber::ROOT,
                    &Self::directory_name(nth),
                    FileType::Directory,
                )?;
            }
            let file = create(volume, dir, &Self::file_path(nth), FileType::File)?;
            let bytes = encode_cells(Self::file_owner(nth), 1, 0, self.len(nth));
            // In pieces, as programs write.
            for (piece, at) in bytes.chunks(4096).zip((0..).step_by(4096)) {
                write(volume, file, at, piece)?;
            }
            if nth % 11 == 3 {
                create(volume, dir, &format!("link {nth}"), FileType::Symlink)?;
                volume.link(file, dir, format!("again {nth}").as_bytes())?;
            }
            if nth % FILES_PER_SYNC == FILES_PER_SYNC - 1 {
                volume.sync()?;
                record.record_mark(nth + 1);
            }
        }
        Ok(())
    }

    fn verify(&self, volume: &Volume, marks: &[u64]) -> Result<(), String> {
        let synced = marks.last().copied().unwrap_or(0);
        for nth in 0..self.files {
            let path = format!("{}/{}", Self::directory_name(nth), Self::file_path(nth));
            let Some(file) = find(volume, &path) else {
                if nth < synced {
                    return Err(format!("{path} was synced and is gone"));
                }
                continue;
            };
            let bytes = read_file(volume, file)?;
            let versions = cell_versions(&bytes, Self::file_owner(nth))?;
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
