//! Images made by other tools, and the view of other tools on images.
#![allow(dead_code, reason = "every test binary takes what it needs")]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use draconis_device::{
    Atomic, Disk, Error, Extent, MemoryDisk, Pending, Properties, ReadAnswer, Refused, Urgency,
};
use draconis_ext::{Cookie, InodeNumber, NewNode, OpenOptions, Volume};
pub use draconis_testkit::judge::run_tool;
use draconis_testkit::wait::wait_for;
pub use draconis_testkit::{report_skipped, unmount_and_wait};
use draconis_types::{Block, FileType};
use tempfile::TempDir;

pub mod compare;
pub mod cuts;
pub mod exercise;
pub mod offline;
pub mod repairing;
pub mod spoil;
pub mod storm;
pub mod tree;

/// Fixed hash seed for `mke2fs`.
pub const HASH_SEED: &str = "hash_seed=6b33f586-a183-4383-921d-30da3fef2e5c";

/// An empty file of root.
pub const FILE: NewNode<'static> =
    NewNode { kind: FileType::File, mode: 0o644, uid: 0, gid: 0, device: (0, 0), target: b"" };
/// An empty directory of root.
pub const DIRECTORY: NewNode<'static> = NewNode { kind: FileType::Directory, mode: 0o755, ..FILE };

/// Makes a volume with `mke2fs`, in memory.
pub fn make_disk(size: &str, arguments: &[&str]) -> Option<Arc<MemoryDisk>> {
    Some(Image::make(None, size, arguments)?.memory_disk())
}

/// Closes the volume and checks its disk with `e2fsck`.
pub fn close_and_fsck(volume: Volume, disk: Arc<MemoryDisk>) -> Image {
    volume.close().unwrap();
    drop(volume);
    fsck_disk(disk)
}

/// Checks a disk that nobody else has with `e2fsck`.
pub fn fsck_disk(disk: Arc<MemoryDisk>) -> Image {
    let image = Image::from_bytes(&Arc::into_inner(disk).unwrap().into_bytes());
    assert!(run_tool("e2fsck", &["-fn", image.path()]).is_some());
    image
}

/// Returns the names in a directory that can be read, with their inodes.
pub fn readable_names(volume: &Volume, dir: InodeNumber) -> Vec<(Vec<u8>, InodeNumber)> {
    let mut names = vec![];
    let _ = volume.entries(dir, Cookie::default(), false, |entry| {
        if let Ok(entry) = entry {
            names.push((entry.name.to_vec(), entry.inode));
        }
        true
    });
    names
}

/// A minimal disk: a file and `pread`.
pub struct PreadDisk {
    file: File,
    len_bytes: u64,
    sector_bytes: u32,
}

impl PreadDisk {
    pub fn open(path: &Path, sector_bytes: u32) -> Self {
        let file = File::open(path).unwrap();
        let len = file.metadata().unwrap().len();
        Self { file, len_bytes: len - len % u64::from(sector_bytes), sector_bytes }
    }
}

impl Disk for PreadDisk {
    fn properties(&self) -> Properties {
        Properties {
            len_bytes: self.len_bytes,
            sector_bytes: self.sector_bytes,
            best_io_bytes: 128 << 10,
            rotational: false,
            read_only: true,
            atomic: Atomic::None,
            discards: false,
        }
    }

    fn read(&self, at: Extent, mut into: Block, _: Urgency) -> Pending<ReadAnswer> {
        let answer = self.properties().check_range(at, into.len()).and_then(|()| {
            let read = self.file.read_exact_at(into.bytes_mut().unwrap(), at.start_bytes);
            read.map_err(|_| Error::ShortRead { extent: at, got_bytes: 0 })
        });
        Pending::ready(match answer {
            Ok(()) => Ok(into),
            Err(error) => Err(Refused { payload: Some(into), error }),
        })
    }
}

/// An image in a temporary file.
pub struct Image {
    pub dir: TempDir,
    pub path: PathBuf,
}

impl Image {
    /// Makes an image with `mke2fs`, filled from `tree`.
    pub fn make(tree: Option<&Path>, size: &str, arguments: &[&str]) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let mut all = vec!["-q", "-F"];
        all.extend(arguments);
        if let Some(tree) = tree {
            all.extend(["-d", tree.to_str().unwrap()]);
        }
        all.extend([path.to_str().unwrap(), size]);
        run_tool("mke2fs", &all)?;
        Some(Self { dir, path })
    }

    /// Creates an image of these bytes.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        std::fs::write(&path, bytes).unwrap();
        Self { dir, path }
    }

    pub fn path(&self) -> &str {
        self.path.to_str().unwrap()
    }

    /// Returns a copy in memory.
    pub fn memory_disk(&self) -> Arc<MemoryDisk> {
        Arc::new(MemoryDisk::new(std::fs::read(&self.path).unwrap(), 512))
    }

    pub fn debugfs(&self, request: &str) -> Option<String> {
        run_tool("debugfs", &["-R", request, self.path()])
    }

    pub fn debugfs_write(&self, request: &str) -> Option<String> {
        run_tool("debugfs", &["-w", "-R", request, self.path()])
    }

    pub fn open(&self) -> Volume {
        self.try_open().unwrap()
    }

    pub fn try_open(&self) -> draconis_ext::Result<Volume> {
        Volume::open(Arc::new(PreadDisk::open(&self.path, 512)), OpenOptions::default())
    }

    /// Mounts the image read-only; `None`, with a message, without permission.
    pub fn mount(&self) -> Option<Mount> {
        self.mount_with("ro,loop")
    }

    /// Mounts the image read-only, also with blocks larger than pages if the kernel supports that.
    pub fn mount_large(&self) -> Option<Mount> {
        let block_bytes = self.open().superblock().block_bytes;
        if block_bytes as usize <= rustix::param::page_size() {
            return self.mount();
        }
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        match self.try_mount("ro,loop") {
            Ok(mount) => Some(mount),
            Err(why) => {
                eprintln!("the kernel does not mount blocks of {block_bytes} bytes: {why}");
                None
            }
        }
    }

    /// Mounts the image read-write.
    pub fn mount_writable(&self) -> Option<Mount> {
        self.mount_with("loop")
    }

    /// Mounts the image with these options.
    pub fn mount_with(&self, options: &str) -> Option<Mount> {
        if !rustix::process::geteuid().is_root() {
            report_skipped("mounting needs root");
            return None;
        }
        let needs = self.configuration();
        self.try_mount(options)
            .map_err(|why| match needs.as_str() {
                "" => report_skipped(format_args!("mount: {why}")),
                needs => {
                    eprintln!("{why}");
                    report_skipped(format_args!("mounting by the kernel:{needs}"));
                }
            })
            .ok()
    }

    /// Returns the kernel configuration needed to write the image.
    fn configuration(&self) -> String {
        use std::os::unix::fs::FileExt;
        let mut words = [0; 8];
        let file = std::fs::File::open(&self.path).unwrap();
        file.read_exact_at(&mut words, 1024 + 0x60).unwrap();
        let word = |at: usize| u32::from_le_bytes(words[at..at + 4].try_into().unwrap());
        let (incompatible, read_only) = (word(0), word(4));
        [
            (incompatible & 0x2_0000, " (CONFIG_UNICODE)"),
            (read_only & 0x2100, " (CONFIG_QUOTA)"),
            (read_only & 0x8000, " (CONFIG_FS_VERITY)"),
        ]
        .into_iter()
        .filter(|(bits, _)| *bits != 0)
        .map(|(_, name)| name)
        .collect()
    }

    /// Mounts the image with these options, or returns the kernel's error.
    pub fn try_mount(&self, options: &str) -> Result<Mount, String> {
        let dir = tempfile::tempdir().unwrap();
        wait_for("the loop device of a previous mount is free", || {
            let output = Command::new("mount")
                .arg("-o")
                .args(options.split(' '))
                .args([self.path()])
                .arg(dir.path())
                .output();
            match output {
                Err(error) => Some(Err(error.to_string())),
                Ok(output) if output.status.success() => Some(Ok(())),
                Ok(output) => {
                    let why = String::from_utf8_lossy(&output.stderr).trim().to_string();
                    (!why.contains("busy")).then_some(Err(why))
                }
            }
        })
        .map(|()| Mount { dir })
    }
}

impl AsRef<Path> for Image {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

/// A kernel mount, unmounted on drop.
pub struct Mount {
    dir: TempDir,
}

impl Mount {
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        unmount_and_wait(self.dir.path());
    }
}
