//! A file or device without a file system, with direct I/O.
//!
//! Its "files" are consecutive areas.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use draconis_device::{Extent, FileOptions, OpenedFile, write_unit_bytes};
use draconis_types::lock::Mutex;
use rustix::fs::OFlags;

use super::counters::BlockDeviceCounters;
use super::{
    CacheDropResult, OpenMode, RawRegion, RunEnvironment, Subject, SubjectFile, SubjectFiles,
    SubjectKind,
};
use crate::clock::{Clock, WallClock};

/// Alignment of areas, in bytes.
const REGION_ALIGN_BYTES: u64 = 1 << 20;

/// A file or device.
pub struct RawSubject {
    spec: String,
    clock: Arc<WallClock>,
    file: Arc<File>,
    areas: Arc<RegionAllocator>,
    device: Option<BlockDeviceCounters>,
    is_device: bool,
    /// A file created for this run.
    made: Option<PathBuf>,
}

/// Allocated areas.
#[derive(Default)]
pub struct RegionAllocator(Mutex<AllocatedRegions>);

/// Start of the next area, and start and length of each area by name.
type AllocatedRegions = (u64, HashMap<String, (u64, u64)>);

impl RegionAllocator {
    /// Allocates an area of `bytes` for `name`, or returns its area if that is large enough.
    pub fn allocate(&self, name: &str, bytes: u64, end: u64) -> anyhow::Result<u64> {
        let (next, areas) = &mut *self.0.lock();
        if let Some((start, len)) = areas.get(name)
            && *len >= bytes
        {
            return Ok(*start);
        }
        let start = *next;
        let len = bytes.next_multiple_of(REGION_ALIGN_BYTES);
        if start + len > end {
            bail!("{bytes} bytes more than the {end} that there are");
        }
        *next += len;
        areas.insert(name.into(), (start, len));
        Ok(start)
    }

    /// Returns the area of `name`.
    pub fn get(&self, name: &str) -> anyhow::Result<u64> {
        let areas = &self.0.lock().1;
        areas.get(name).map(|(start, _)| *start).with_context(|| format!("no area {name}"))
    }

    /// Releases an area; only the space of the last one is reused.
    pub fn release(&self, name: &str) {
        let (next, areas) = &mut *self.0.lock();
        if let Some((start, len)) = areas.remove(name)
            && start + len == *next
        {
            *next = start;
        }
    }
}

impl RawSubject {
    /// Opens a device or file, and creates the file if it is missing.
    ///
    /// # Errors
    /// Opening fails, or contents would be overwritten without `--destroy`.
    pub fn new(spec: &str, shop: &RunEnvironment) -> anyhow::Result<Self> {
        let (head, path) = spec.split_once(':').unwrap_or((spec, ""));
        if head == "dev" && path.is_empty() {
            bail!("dev:PATH");
        }
        let path =
            if path.is_empty() { shop.temp_file()?.path().into() } else { PathBuf::from(path) };
        let there = std::fs::metadata(&path).ok();
        let is_device = there.as_ref().is_some_and(|found| found.file_type().is_block_device());
        if head == "dev" && !is_device {
            bail!("{} is no block device", path.display());
        }
        let holds = is_device || there.as_ref().is_some_and(|found| found.len() > 0);
        if holds && !shop.destroy {
            bail!("--destroy: {} would be overwritten", path.display());
        }
        let mut options = File::options();
        options.read(true).write(true).create(!is_device);
        // O_EXCL fails on a device that is mounted.
        let alone = if is_device { OFlags::EXCL } else { OFlags::empty() };
        let flags = OFlags::DIRECT | alone;
        let file = options.custom_flags(flags.bits() as i32).open(&path);
        let file = file.with_context(|| format!("{} for direct I/O", path.display()))?;
        let made = there.is_none().then(|| path.clone());
        let device = if is_device {
            BlockDeviceCounters::from_device_number(std::fs::metadata(&path)?.rdev())
        } else {
            BlockDeviceCounters::of_path(&path)
        };
        let spec = if spec == "file:" { "file".into() } else { spec.to_string() };
        let raw = Self {
            spec,
            clock: Arc::new(WallClock::new()),
            file: Arc::new(file),
            areas: Arc::default(),
            device,
            is_device,
            made,
        };
        raw.write_out_holes(shop.bytes)?;
        Ok(raw)
    }

    /// Writes a file once, so that it has blocks instead of holes.
    fn write_out_holes(&self, bytes: u64) -> anyhow::Result<()> {
        if self.is_device {
            return Ok(());
        }
        let piece = crate::buffer::AlignedBuffer::new(REGION_ALIGN_BYTES as usize);
        let mut at = 0;
        while at < bytes + REGION_ALIGN_BYTES {
            self.file.write_all_at(&piece, at)?;
            at += REGION_ALIGN_BYTES;
        }
        Ok(self.file.sync_all()?)
    }

    fn len(&self) -> anyhow::Result<u64> {
        let mut file = &*self.file;
        Ok(std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0))?)
    }
}

impl Drop for RawSubject {
    fn drop(&mut self) {
        if let Some(made) = &self.made {
            let _ = std::fs::remove_file(made);
        }
    }
}

impl Subject for RawSubject {
    fn name(&self) -> String {
        self.spec.clone()
    }

    fn describe(&self) -> String {
        let device = self.device.as_ref().map_or("no device".into(), BlockDeviceCounters::name);
        format!("direct I/O on {device}, no file system between")
    }

    fn kind(&self) -> SubjectKind {
        SubjectKind::Raw
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.clock.clone()
    }

    fn files(&self) -> anyhow::Result<Arc<dyn SubjectFiles>> {
        let (file, areas, end) = (self.file.clone(), self.areas.clone(), self.len()?);
        Ok(Arc::new(RawFiles { file, areas, end }))
    }

    fn empty_caches(&mut self) -> anyhow::Result<CacheDropResult> {
        Ok(CacheDropResult::Yes)
    }

    fn bare_disk(&self, bytes: u64) -> anyhow::Result<Option<RawRegion>> {
        let len_bytes = self.len()?;
        let start = self.areas.allocate("bare", bytes, len_bytes)?;
        let options = FileOptions { write: true, direct: true, uring: true };
        let opened = OpenedFile::new(self.file.try_clone()?.into(), options)?;
        // A file keeps its blocks: nothing is discarded.
        let opened = if self.is_device { opened.with_discards() } else { opened };
        Ok(Some(RawRegion {
            disk: Arc::new(opened.start()),
            clock: self.clock.clone(),
            region: Extent::new(start, bytes),
            told_bytes: write_unit_bytes(&*self.file).unwrap_or(0),
            // The length of a file is this run's choice.
            len_bytes: self.is_device.then_some(len_bytes),
        }))
    }

    fn device_read_bytes(&self) -> Option<u64> {
        self.device.as_ref()?.read_bytes()
    }
}

struct RawFiles {
    file: Arc<File>,
    areas: Arc<RegionAllocator>,
    end: u64,
}

struct RawHandle {
    file: Arc<File>,
    start: u64,
}

impl SubjectFiles for RawFiles {
    fn create(&self, name: &str, bytes: u64, _: OpenMode) -> anyhow::Result<Arc<dyn SubjectFile>> {
        let start = self.areas.allocate(name, bytes, self.end)?;
        Ok(Arc::new(RawHandle { file: self.file.clone(), start }))
    }

    fn open(&self, name: &str, _: OpenMode) -> anyhow::Result<Arc<dyn SubjectFile>> {
        Ok(Arc::new(RawHandle { file: self.file.clone(), start: self.areas.get(name)? }))
    }

    fn remove(&self, name: &str) -> anyhow::Result<()> {
        self.areas.release(name);
        Ok(())
    }
}

impl SubjectFile for RawHandle {
    fn read(&self, at: u64, into: &mut [u8]) -> anyhow::Result<usize> {
        self.file.read_exact_at(into, self.start + at)?;
        Ok(into.len())
    }

    fn write(&self, at: u64, bytes: &[u8]) -> anyhow::Result<()> {
        Ok(self.file.write_all_at(bytes, self.start + at)?)
    }

    fn sync(&self) -> anyhow::Result<()> {
        Ok(self.file.sync_data()?)
    }
}
