//! Mounted file systems: existing mounts, or our own mounts for one experiment.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, bail};
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;

use super::counters::BlockDeviceCounters;
use super::server::{MountServer, MountedVolume, drop_caches};
use super::{
    CacheDropResult, OpenMode, RunEnvironment, Subject, SubjectFile, SubjectFiles, SubjectKind,
};
use crate::clock::{Clock, WallClock};

/// Files in a directory.
struct DirectoryFiles(PathBuf);

struct FileHandle(File);

impl DirectoryFiles {
    /// Opens with O_DIRECT if requested and supported, else cached.
    fn open_with_mode(
        &self,
        name: &str,
        how: OpenMode,
        new: bool,
    ) -> anyhow::Result<Arc<dyn SubjectFile>> {
        let path = self.0.join(name);
        let open = |flags: OFlags| {
            let mut options = File::options();
            options.read(true).write(true).create(new).truncate(new);
            options.custom_flags(flags.bits() as i32).open(&path)
        };
        let file = match how {
            OpenMode::Cached => open(OFlags::empty()),
            OpenMode::Direct => open(OFlags::DIRECT).or_else(|_| open(OFlags::empty())),
        };
        Ok(Arc::new(FileHandle(file.with_context(|| path.display().to_string())?)))
    }
}

impl SubjectFiles for DirectoryFiles {
    fn create(&self, name: &str, _: u64, how: OpenMode) -> anyhow::Result<Arc<dyn SubjectFile>> {
        self.open_with_mode(name, how, true)
    }

    fn open(&self, name: &str, how: OpenMode) -> anyhow::Result<Arc<dyn SubjectFile>> {
        self.open_with_mode(name, how, false)
    }

    fn remove(&self, name: &str) -> anyhow::Result<()> {
        Ok(std::fs::remove_file(self.0.join(name))?)
    }
}

impl SubjectFile for FileHandle {
    fn read(&self, at: u64, into: &mut [u8]) -> anyhow::Result<usize> {
        let mut done = 0;
        while done < into.len() {
            match self.0.read_at(&mut into[done..], at + done as u64)? {
                0 => break,
                got => done += got,
            }
        }
        Ok(done)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> anyhow::Result<()> {
        Ok(self.0.write_all_at(bytes, at)?)
    }

    fn sync(&self) -> anyhow::Result<()> {
        Ok(self.0.sync_all()?)
    }

    fn allocate(&self, at: u64, len: u64) -> anyhow::Result<bool> {
        match rustix::fs::fallocate(&self.0, FallocateFlags::empty(), at, len) {
            Ok(()) => Ok(true),
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// A directory of an existing mount.
pub struct DirectorySubject {
    spec: String,
    clock: Arc<WallClock>,
    dir: tempfile::TempDir,
    device: Option<BlockDeviceCounters>,
}

impl DirectorySubject {
    /// Creates a directory in `path`, or in the lab's directory if `path` is empty.
    ///
    /// # Errors
    /// The directory cannot be created.
    pub fn new(path: &str, shop: &RunEnvironment) -> anyhow::Result<Self> {
        let base = if path.is_empty() { shop.dir.as_path() } else { Path::new(path) };
        let dir = tempfile::Builder::new().prefix(super::TEMP_NAME_PREFIX).tempdir_in(base);
        let dir = dir.with_context(|| format!("a directory that can be written: {path}"))?;
        let spec = if path.is_empty() { "dir".into() } else { format!("dir:{path}") };
        let device = BlockDeviceCounters::of_path(dir.path());
        Ok(Self { spec, clock: Arc::new(WallClock::new()), dir, device })
    }
}

impl Subject for DirectorySubject {
    fn name(&self) -> String {
        self.spec.clone()
    }

    fn describe(&self) -> String {
        let device = self.device.as_ref().map_or("no device".into(), BlockDeviceCounters::name);
        format!("{} on {device}", crate::machine::file_system_type(self.dir.path()))
    }

    fn kind(&self) -> SubjectKind {
        SubjectKind::Directory
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.clock.clone()
    }

    fn files(&self) -> anyhow::Result<Arc<dyn SubjectFiles>> {
        Ok(Arc::new(DirectoryFiles(self.dir.path().into())))
    }

    fn directory(&self) -> Option<&Path> {
        Some(self.dir.path())
    }

    fn empty_caches(&mut self) -> anyhow::Result<CacheDropResult> {
        Ok(if drop_caches().is_ok() { CacheDropResult::Dropped } else { CacheDropResult::No })
    }

    fn device_read_bytes(&self) -> Option<u64> {
        self.device.as_ref()?.read_bytes()
    }
}

/// Volume types that can be created, as `mke2fs -t` names them.
const EXT_TYPES: &[&str] = &["ext2", "ext3", "ext4"];

/// A new volume, mounted for one experiment.
pub struct MountSubject {
    spec: String,
    server: MountServer,
    /// File system type.
    kind: String,
    clock: Arc<WallClock>,
    // Drop order: unmounted first, then removed.
    mounted: Option<MountedVolume>,
    dir: tempfile::TempDir,
    draconis: PathBuf,
    device: Option<BlockDeviceCounters>,
}

impl MountSubject {
    /// Creates a volume with space for the experiment, and mounts it.
    ///
    /// # Errors
    /// Root privileges, a program, or disk space are missing.
    pub fn new(spec: &str, shop: &RunEnvironment) -> anyhow::Result<Self> {
        let (by, kind) = spec.split_once(':').unwrap_or((spec, "ext2"));
        let server = match by {
            "kernel" => MountServer::Kernel,
            "fuse2fs" => MountServer::Fuse2fs,
            "draconis" => MountServer::Draconis,
            _ => MountServer::Memory,
        };
        if !EXT_TYPES.contains(&kind) {
            bail!("{spec}: {by}:KIND, where KIND is one of {}", EXT_TYPES.join(", "));
        }
        if server == MountServer::Kernel && !rustix::process::geteuid().is_root() {
            bail!("the kernel's loop mount needs root");
        }
        if server == MountServer::Draconis && !shop.draconis.exists() {
            bail!("the program draconis, here {}", shop.draconis.display());
        }
        let dir = shop.temp_dir()?;
        std::fs::create_dir(dir.path().join("mnt"))?;
        if server != MountServer::Memory {
            make_volume(kind, &dir.path().join("image"), shop.bytes)?;
        }
        let device = BlockDeviceCounters::of_path(dir.path());
        let spec = if spec == "kernel" { "kernel:ext2".into() } else { spec.to_string() };
        let draconis = shop.draconis.clone();
        let clock = Arc::new(WallClock::new());
        let kind = kind.to_owned();
        let mut mount = Self { spec, server, kind, clock, mounted: None, dir, draconis, device };
        mount.mount()?;
        Ok(mount)
    }

    fn image_path(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    fn mount_point(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    fn mount(&mut self) -> anyhow::Result<()> {
        let (image, at) = (self.image_path(), self.mount_point());
        self.mounted =
            Some(MountedVolume::mount_read_write(self.server, &image, &at, &self.draconis)?);
        Ok(())
    }
}

impl Subject for MountSubject {
    fn name(&self) -> String {
        self.spec.clone()
    }

    fn describe(&self) -> String {
        match self.server {
            MountServer::Kernel => format!("{} over a loop device", self.spec),
            MountServer::Fuse2fs => format!("{} by e2fsprogs' FUSE server", self.kind),
            MountServer::Draconis => format!("{} by draconis mount", self.kind),
            MountServer::Memory => "a FUSE server that forgets: what one can reach at most".into(),
        }
    }

    fn kind(&self) -> SubjectKind {
        SubjectKind::Directory
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.clock.clone()
    }

    fn files(&self) -> anyhow::Result<Arc<dyn SubjectFiles>> {
        Ok(Arc::new(DirectoryFiles(self.mount_point())))
    }

    fn directory(&self) -> Option<&Path> {
        self.mounted.as_ref().map(MountedVolume::mount_point)
    }

    fn image(&self) -> Option<PathBuf> {
        (self.server != MountServer::Memory).then(|| self.image_path())
    }

    fn empty_caches(&mut self) -> anyhow::Result<CacheDropResult> {
        if self.server == MountServer::Memory {
            return Ok(CacheDropResult::No);
        }
        self.mounted = None;
        let dropped = drop_caches().is_ok();
        self.mount()?;
        Ok(if dropped { CacheDropResult::Yes } else { CacheDropResult::No })
    }

    fn device_read_bytes(&self) -> Option<u64> {
        // The device of the image counts, whatever layers are above it.
        self.device.as_ref()?.read_bytes()
    }

    fn close(&mut self) -> anyhow::Result<()> {
        self.mounted = None;
        if self.server == MountServer::Memory {
            return Ok(());
        }
        run_e2fsck(&self.image_path()).with_context(|| self.spec.clone())
    }
}

/// Creates a volume with space for `bytes` in files.
pub(super) fn make_volume(kind: &str, image: &Path, bytes: u64) -> anyhow::Result<()> {
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.args(["-q", "-F", "-t", kind, "-b", "4096", "-m", "0", "-i", "8192"]);
    mke2fs.args(["-E", "lazy_itable_init=0,lazy_journal_init=0,root_owner"]);
    let bytes = bytes + bytes / 8 + (96 << 20);
    mke2fs.arg(image).arg(format!("{}k", bytes / 1024));
    let output = mke2fs.output().context("mke2fs of e2fsprogs")?;
    if !output.status.success() {
        bail!("mke2fs: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// Checks the volume: a fast but wrong result does not count.
pub(super) fn run_e2fsck(image: &Path) -> anyhow::Result<()> {
    File::open(image)?.sync_all()?;
    let output = Command::new("e2fsck").arg("-fn").arg(image).output().context("e2fsck")?;
    if !output.status.success() {
        bail!("e2fsck -fn: {}", String::from_utf8_lossy(&output.stdout));
    }
    Ok(())
}
