//! Documents saved as editors do: write a new file, fsync, rename over the old one.

use draconis_ext::{InodeNumber, RenameMode, Volume};
use draconis_types::FileType;

use super::{RecordingDisk, Workload, cell_versions, create, encode_cells, find, read_file, write};
use draconis_device::Random;

const DOCUMENT_COUNT: u64 = 5;

pub(super) struct DocumentSaveWorkload {
    seed: u64,
    steps: u64,
}

impl DocumentSaveWorkload {
    pub(super) fn new(seed: u64, steps: u64) -> Self {
        Self { seed, steps }
    }

    fn len(&self, version: u64) -> u64 {
        16 + Random::new(self.seed ^ version << 24).next_below(20_000)
    }
}

/// Mark: this version of this document is durable under its name.
fn durable_mark(document: u64, version: u64) -> u64 {
    version * DOCUMENT_COUNT + document
}

impl Workload for DocumentSaveWorkload {
    fn name(&self) -> &'static str {
        "saves"
    }

    fn run(
        &self,
        volume: &Volume,
        record: &RecordingDisk,
        dice: &mut Random,
    ) -> anyhow::Result<()> {
        let root = InodeNumber::ROOT;
        for version in 1..=self.steps {
            let document = dice.next_below(DOCUMENT_COUNT);
            let name = format!("document {document}");
            let temporary = format!(".{name}.{version}");
            let file = create(volume, root, &temporary, FileType::File)?;
            let bytes = encode_cells(document as u32 + 1, version as u32, 0, self.len(version));
            write(volume, file, 0, &bytes)?;
            volume.sync_inode(file, false)?;
            volume.rename(
                root,
                temporary.as_bytes(),
                root,
                name.as_bytes(),
                RenameMode::Replace,
            )?;
            if dice.next_below(3) == 0 {
                volume.sync_inode(root, false)?;
                record.record_mark(durable_mark(document, version));
            }
        }
        Ok(())
    }

    fn verify(&self, volume: &Volume, marks: &[u64]) -> Result<(), String> {
        for document in 0..DOCUMENT_COUNT {
            let saved = marks.iter().rfind(|mark| *mark % DOCUMENT_COUNT == document);
            let saved = saved.map(|mark| mark / DOCUMENT_COUNT);
            let path = format!("document {document}");
            let Some(file) = find(volume, &path) else {
                if saved.is_some() {
                    return Err(format!("{path} was saved and is gone"));
                }
                continue;
            };
            let bytes = read_file(volume, file)?;
            let versions = cell_versions(&bytes, document as u32 + 1)?;
            let version = versions.first().copied().flatten();
            let whole = versions.iter().all(|it| *it == version)
                && version.is_some_and(|it| self.len(it.into()) == bytes.len() as u64);
            if !whole || version.map(u64::from) < saved {
                return Err(format!(
                    "{path}: version {version:?} of {} bytes, whole: {whole}, saved: {saved:?}",
                    bytes.len()
                ));
            }
        }
        Ok(())
    }
}
