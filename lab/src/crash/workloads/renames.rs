//! Files renamed over and over, within and between directories.

use draconis_ext::{InodeNumber, RenameMode, Volume};
use draconis_types::FileType;
use draconis_types::lock::Mutex;

use super::{RecordingDisk, Workload, cell_versions, create, encode_cells, find, read_file, write};
use draconis_device::Random;

const FILE_COUNT: u64 = 24;
const DIRECTORY_COUNT: u64 = 3;
const FILE_BYTES: u64 = 3000;
/// Renames between two syncs.
const RENAMES_PER_SYNC: u64 = 8;

pub(super) struct RenameWorkload {
    steps: u64,
    /// Renames in order: file and new path.
    history: Mutex<Vec<(u64, String)>>,
}

impl RenameWorkload {
    pub(super) fn new(steps: u64) -> Self {
        Self { steps, history: Mutex::default() }
    }
}

impl Workload for RenameWorkload {
    fn name(&self) -> &'static str {
        "renames"
    }

    fn run(
        &self,
        volume: &Volume,
        record: &RecordingDisk,
        dice: &mut Random,
    ) -> anyhow::Result<()> {
        let mut history = self.history.lock();
        let mut dirs = vec![];
        for nth in 0..DIRECTORY_COUNT {
            dirs.push(create(volume, InodeNumber::ROOT, &format!("d{nth}"), FileType::Directory)?);
        }
        let mut places: Vec<(usize, String)> = vec![];
        for nth in 0..FILE_COUNT {
            let (dir, name) = ((nth % DIRECTORY_COUNT) as usize, format!("first {nth}"));
            let file = create(volume, dirs[dir], &name, FileType::File)?;
            write(volume, file, 0, &encode_cells(nth as u32 + 1, 1, 0, FILE_BYTES))?;
            history.push((nth, format!("d{dir}/{name}")));
            places.push((dir, name));
        }
        volume.sync()?;
        record.record_mark(history.len() as u64);
        for step in 0..self.steps {
            let nth = dice.next_below(FILE_COUNT);
            let (from, old) = places[nth as usize].clone();
            let to = dice.next_below(DIRECTORY_COUNT) as usize;
            // Varying name lengths, so that some names fit into the old dirent.
            let new = format!("{step}{}", "x".repeat(dice.next_below(40) as usize));
            history.push((nth, format!("d{to}/{new}")));
            let how = if step % 2 == 0 { RenameMode::NoReplace } else { RenameMode::Replace };
            volume.rename(dirs[from], old.as_bytes(), dirs[to], new.as_bytes(), how)?;
            places[nth as usize] = (to, new);
            match step % RENAMES_PER_SYNC {
                7 => {
                    volume.sync()?;
                    record.record_mark(history.len() as u64);
                }
                3 => volume.commit()?,
                _ => {}
            }
        }
        Ok(())
    }

    fn verify(&self, volume: &Volume, marks: &[u64]) -> Result<(), String> {
        let history = self.history.lock();
        let Some(&synced) = marks.last() else { return Ok(()) };
        let (before, after) = history.split_at(synced as usize);
        for nth in 0..FILE_COUNT {
            let last = before.iter().rfind(|(file, _)| *file == nth);
            let later = after.iter().filter(|(file, _)| *file == nth);
            let mut seen = false;
            for (_, path) in last.into_iter().chain(later) {
                let Some(file) = find(volume, path) else { continue };
                let bytes = read_file(volume, file)?;
                let whole = cell_versions(&bytes, nth as u32 + 1)?.iter().all(Option::is_some);
                if bytes.len() as u64 != FILE_BYTES || !whole {
                    return Err(format!("{path} has {} bytes; whole: {whole}", bytes.len()));
                }
                seen = true;
            }
            if !seen {
                return Err(format!("file {nth} has no name that it had since the last sync"));
            }
        }
        Ok(())
    }
}
