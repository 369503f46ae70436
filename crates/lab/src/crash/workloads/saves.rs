//! Documents saved as editors do: write a new file, fsync, rename over the old one.

use draconis_exchange::contract::FileType;
use draconis_ext::{InodeNumber, RenameMode, Volume};

use super::{Record, Workload, cells, contents, create, find, versions, write};
use draconis_device::Random;

const DOCUMENTS: u64 = 5;

pub(super) struct Saves {
    seed: u64,
    steps: u64,
}

impl Saves {
    pub(super) fn new(seed: u64, steps: u64) -> Self {
        Self { seed, steps }
    }

    fn len(&self, version: u64) -> u64 {
        16 + Random::new(self.seed ^ version << 24).below(20_000)
    }
}

/// Mark: this version of this document is durable under its name.
fn mark(document: u64, version: u64) -> u64 {
    version * DOCUMENTS + document
}

impl Workload for Saves {
    fn name(&self) -> &'static str {
        "saves"
    }

    fn run(&self, volume: &Volume, record: &Record, dice: &mut Random) -> anyhow::Result<()> {
        let root = InodeNumber::ROOT;
        for version in 1..=self.steps {
            let document = dice.below(DOCUMENTS);
            let name = format!("document {document}");
            let temporary = format!(".{name}.{version}");
            let file = create(volume, root, &temporary, FileType::File)?;
            let bytes = cells(document as u32 + 1, version as u32, 0, self.len(version));
            write(volume, file, 0, &bytes)?;
            volume.sync_inode(file, false)?;
            volume.rename(
                root,
                temporary.as_bytes(),
                root,
                name.as_bytes(),
                RenameMode::Replace,
            )?;
            if dice.below(3) == 0 {
                volume.sync_inode(root, false)?;
                record.mark(mark(document, version));
            }
        }
        Ok(())
    }

    fn verify(&self, volume: &Volume, marks: &[u64]) -> Result<(), String> {
        for document in 0..DOCUMENTS {
            let saved = marks.iter().rfind(|mark| *mark % DOCUMENTS == document);
            let saved = saved.map(|mark| mark / DOCUMENTS);
            let path = format!("document {document}");
            let Some(file) = find(volume, &path) else {
                if saved.is_some() {
                    return Err(format!("{path} was saved and is gone"));
                }
                continue;
            };
            let bytes = contents(volume, file)?;
            let versions = versions(&bytes, document as u32 + 1)?;
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
