//! The library in this process, on an image opened with O_DIRECT.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use draconis_device::{FileDisk, FileOptions};
use draconis_ext::{
    AccessTimes, Follow, InodeNumber, NewNode, OpenOptions, Reserve, Statistics, Volume,
    WriteOptions,
};
use draconis_types::lock::Mutex;
use draconis_types::{FileType as NodeKind, Time};

use super::counters::BlockDeviceCounters;
use super::directory::{make_volume, run_e2fsck};
use super::{
    CacheDropResult, OpenMode, RunEnvironment, Subject, SubjectFile, SubjectFiles, SubjectKind,
};
use crate::clock::{Clock, WallClock};

/// Limit of dirty data in memory, in bytes.
const MAX_DIRTY_BYTES: u64 = 64 << 20;

/// A volume open in this process.
pub struct LibrarySubject {
    spec: String,
    clock: Arc<WallClock>,
    volume: SharedVolume,
    options: OpenOptions,
    dir: tempfile::TempDir,
    device: Option<BlockDeviceCounters>,
}

/// The volume, while it is open; remounting replaces it.
type SharedVolume = Arc<Mutex<Option<Arc<Volume>>>>;

impl LibrarySubject {
    /// Creates a volume with space for the experiment, and opens it.
    ///
    /// # Errors
    /// A requirement is missing.
    pub fn new(spec: &str, shop: &RunEnvironment) -> anyhow::Result<Self> {
        let kind = spec.split_once(':').map_or("ext2", |(_, kind)| kind);
        let dir = shop.temp_dir()?;
        make_volume(kind, &dir.path().join("image"), shop.bytes)?;
        let device = BlockDeviceCounters::of_path(dir.path());
        let clock = Arc::new(WallClock::new());
        let options = OpenOptions::default();
        let spec = spec.to_owned();
        let mut library =
            Self { spec, clock, volume: SharedVolume::default(), options, dir, device };
        library.open()?;
        Ok(library)
    }

    /// Reopens the volume with other cache sizes.
    ///
    /// # Errors
    /// The library fails.
    pub fn reopen(&mut self, options: OpenOptions) -> anyhow::Result<()> {
        self.close_volume()?;
        self.options = options;
        self.open()
    }

    /// Returns the statistics of the caches.
    ///
    /// # Errors
    /// The volume is closed.
    pub fn statistics(&self) -> anyhow::Result<Statistics> {
        Ok(open_volume_of(&self.volume)?.statistics())
    }

    /// Returns the volume.
    ///
    /// # Errors
    /// The volume is closed.
    pub fn volume(&self) -> anyhow::Result<Arc<Volume>> {
        open_volume_of(&self.volume)
    }

    /// Closes the volume and returns its image, for callers that open it themselves.
    ///
    /// # Errors
    /// The library fails.
    pub fn close_and_take_image(&mut self) -> anyhow::Result<PathBuf> {
        self.close_volume()?;
        Ok(self.dir.path().join("image"))
    }

    fn open(&mut self) -> anyhow::Result<()> {
        let how = FileOptions { write: true, direct: true, uring: true };
        let disk = Arc::new(FileDisk::open(&self.dir.path().join("image"), how)?);
        let atime = AccessTimes::Relative;
        let writing = WriteOptions {
            clock: Arc::new(current_time),
            dirty_bytes: MAX_DIRTY_BYTES,
            atime,
            discard: false,
        };
        let volume = Volume::open_for_writing(disk, self.options, writing)?;
        *self.volume.lock() = Some(Arc::new(volume));
        Ok(())
    }

    fn close_volume(&mut self) -> anyhow::Result<()> {
        let volume = self.volume.lock().take();
        volume.map_or(Ok(()), |volume| Ok(volume.close()?))
    }
}

fn current_time() -> Time {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let since = since.unwrap_or_default();
    Time { seconds: since.as_secs() as i64, nanoseconds: since.subsec_nanos() }
}

fn open_volume_of(shared: &SharedVolume) -> anyhow::Result<Arc<Volume>> {
    shared.lock().clone().context("the volume is closed")
}

impl Subject for LibrarySubject {
    fn name(&self) -> String {
        self.spec.clone()
    }

    fn describe(&self) -> String {
        "a volume by our library in this process, past the kernel's caches".into()
    }

    fn kind(&self) -> SubjectKind {
        SubjectKind::Library
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.clock.clone()
    }

    fn files(&self) -> anyhow::Result<Arc<dyn SubjectFiles>> {
        Ok(Arc::new(LibraryFiles(self.volume.clone())))
    }

    fn empty_caches(&mut self) -> anyhow::Result<CacheDropResult> {
        self.close_volume()?;
        // Best effort: the library's own reads bypass the page cache anyway.
        let _ = super::drop_caches();
        self.open()?;
        Ok(CacheDropResult::Yes)
    }

    fn device_read_bytes(&self) -> Option<u64> {
        self.device.as_ref()?.read_bytes()
    }

    fn library_subject(&mut self) -> Option<&mut LibrarySubject> {
        Some(self)
    }

    fn close(&mut self) -> anyhow::Result<()> {
        self.close_volume()?;
        run_e2fsck(&self.dir.path().join("image"))
    }
}

/// Returns a new file or directory owned by root.
pub fn plain_node(kind: NodeKind, mode: u32) -> NewNode<'static> {
    NewNode { kind, mode, uid: 0, gid: 0, device: (0, 0), target: b"" }
}

struct LibraryFiles(SharedVolume);

struct LibraryHandle {
    volume: Arc<Volume>,
    inode: InodeNumber,
}

impl SubjectFiles for LibraryFiles {
    fn create(&self, name: &str, _: u64, _: OpenMode) -> anyhow::Result<Arc<dyn SubjectFile>> {
        let volume = open_volume_of(&self.0)?;
        let root = volume.root();
        if volume.resolve(root, name.as_bytes(), Follow::No).is_ok() {
            self.remove(name)?;
        }
        let inode = volume.create(root, name.as_bytes(), &plain_node(NodeKind::File, 0o644))?;
        Ok(Arc::new(LibraryHandle { volume, inode }))
    }

    fn open(&self, name: &str, _: OpenMode) -> anyhow::Result<Arc<dyn SubjectFile>> {
        let volume = open_volume_of(&self.0)?;
        let inode = volume.resolve(volume.root(), name.as_bytes(), Follow::No)?;
        Ok(Arc::new(LibraryHandle { volume, inode }))
    }

    fn remove(&self, name: &str) -> anyhow::Result<()> {
        let volume = open_volume_of(&self.0)?;
        Ok(volume.unlink(volume.root(), name.as_bytes())?)
    }
}

impl SubjectFile for LibraryHandle {
    fn read(&self, at: u64, into: &mut [u8]) -> anyhow::Result<usize> {
        Ok(self.volume.read_into(self.inode, at, into)?)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> anyhow::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match self.volume.write(self.inode, at + done as u64, &bytes[done..])? {
                0 => bail!("nothing was written"),
                taken => done += taken,
            }
        }
        Ok(())
    }

    fn sync(&self) -> anyhow::Result<()> {
        Ok(self.volume.sync_inode(self.inode, false)?)
    }

    fn allocate(&self, at: u64, len: u64) -> anyhow::Result<bool> {
        self.volume.fallocate(self.inode, at, len, Reserve::KeepSize)?;
        Ok(true)
    }
}
