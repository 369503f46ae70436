//! File with the map of a disk's bad sectors.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use draconis_access::destination::ReadSources;
use draconis_device::Disk;
use draconis_device::sector_map::{MapOf, MappedDisk, SectorMap};
use draconis_types::lock::Mutex;
use draconis_types::path_bytes::ShowPath;

use crate::report;

/// Longest map file.
const MAX_MAP_BYTES: u64 = 256 << 20;
/// Time between two saves.
const SAVE_INTERVAL: Duration = Duration::from_secs(10);

/// A map file, and the disk that it is of.
pub struct SectorMapFile {
    path: PathBuf,
    file: File,
    of: MapOf,
    disk: Option<Arc<MappedDisk>>,
    saved: Mutex<Instant>,
}

impl SectorMapFile {
    /// Opens the map, before this process is confined. That of a device is made if there is none.
    pub fn open(sources: &ReadSources, path: &Path, image: &Path) -> anyhow::Result<Self> {
        let shown = || path.shown().to_string();
        let kind = std::fs::metadata(image).with_context(|| image.shown().to_string())?;
        let of = if kind.file_type().is_block_device() { MapOf::Disk } else { MapOf::Copy };
        let file = match of {
            MapOf::Disk => sources.open_or_create(path)?,
            MapOf::Copy => File::open(path).with_context(|| {
                format!("{}: the map that ddrescue wrote with the copy {}", shown(), image.shown())
            })?,
        };
        ensure!(
            file.metadata().with_context(shown)?.len() <= MAX_MAP_BYTES,
            "{}: too long for a map",
            shown()
        );
        Ok(Self { path: path.to_owned(), file, of, disk: None, saved: Mutex::new(Instant::now()) })
    }

    /// Reads the map and returns the disk that heeds it.
    pub fn cover(&mut self, disk: Arc<dyn Disk>) -> anyhow::Result<Arc<dyn Disk>> {
        let shown = || self.path.shown().to_string();
        let mut text = String::new();
        (&self.file).read_to_string(&mut text).with_context(shown)?;
        let map = match (text.is_empty(), self.of) {
            (true, MapOf::Disk) => SectorMap::default(),
            _ => SectorMap::parse(&text)
                .map_err(|problem| anyhow!("{}: not a map of ddrescue: {problem}", shown()))?,
        };
        let covered = Arc::new(MappedDisk::new(disk, map, self.of));
        self.disk = Some(covered.clone());
        Ok(covered)
    }

    /// Saves the map if that was not done for a while; a failure is said at the end.
    pub fn save_if_due(&self) {
        let mut saved = self.saved.lock();
        if saved.elapsed() >= SAVE_INTERVAL {
            *saved = Instant::now();
            if let Err(error) = self.save() {
                report::print_error(&error);
            }
        }
    }

    /// Saves the map of a disk.
    pub fn save(&self) -> anyhow::Result<()> {
        let (MapOf::Disk, Some(disk)) = (self.of, &self.disk) else { return Ok(()) };
        let text = disk.format_map();
        let shown = || self.path.shown().to_string();
        self.file.write_all_at(text.as_bytes(), 0).with_context(shown)?;
        self.file.set_len(text.len() as u64).with_context(shown)?;
        self.file.sync_data().with_context(shown)
    }
}
