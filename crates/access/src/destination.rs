//! Host files that a command writes: checked against the files that the command reads.
//!
//! ```text
//!   what is read  ──add──▶ Sources ──create, refuse, refuse_at──▶ what is written
//! ```
//! Law 1: no file is truncated or replaced before it was compared with every source, by device
//! and inode, through symbolic links, loop devices, partitions and mapped devices.
//! Law 2: a file that is mounted, locked or attached to a loop device is never truncated or
//! replaced.
//!
//! No other code overwrites host files; `tests/arrows.rs` checks this.

use std::fs::{File, Metadata};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use draconis_device::{LockMode, try_lock_file};
use draconis_service::remote_disk;
use draconis_types::path_bytes::ShowPath;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::error::{Error, busy_error};
use crate::image::{container_file, extent_files};

/// Maximum depth of stacked block devices.
const MAX_STACKED_DEVICES: usize = 64;

/// Identity of a file (device and inode) or of a block device (device number).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FileIdentity {
    File { device: u64, inode: u64 },
    Device(u64),
}

impl FileIdentity {
    fn from_metadata(found: &Metadata) -> Self {
        match found.file_type().is_block_device() {
            true => Self::Device(found.rdev()),
            false => Self::File { device: found.dev(), inode: found.ino() },
        }
    }

    #[allow(clippy::unnecessary_cast, reason = "the widths differ between machines")]
    fn from_stat(found: &Stat) -> Self {
        match FileType::from_raw_mode(found.st_mode) {
            FileType::BlockDevice => Self::Device(found.st_rdev as u64),
            _ => Self::File { device: found.st_dev as u64, inode: found.st_ino as u64 },
        }
    }
}

/// One layer of storage, and the device through which it was reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct StackedDevice {
    on: FileIdentity,
    through: Option<FileIdentity>,
}

/// Returns a file or device and all storage layers below it, itself first.
fn device_stack(of: FileIdentity) -> Vec<StackedDevice> {
    let mut all = vec![StackedDevice { on: of, through: None }];
    let mut at = 0;
    while let Some(StackedDevice { on, .. }) = all.get(at).copied() {
        at += 1;
        let FileIdentity::Device(number) = on else { continue };
        let below = lower_devices(number)
            .into_iter()
            .map(|on_below| StackedDevice { on: on_below, through: Some(on) });
        all.extend(below.take(MAX_STACKED_DEVICES.saturating_sub(all.len())));
    }
    all
}

/// Returns the layers directly below a block device: the file of a loop device, the disk of a
/// partition, the devices of a device-mapper target.
fn lower_devices(number: u64) -> Vec<FileIdentity> {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let dir = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let mut found = vec![];
    if let Ok(file) = std::fs::read_to_string(dir.join("loop/backing_file")) {
        let file = std::fs::metadata(file.trim_end_matches('\n'));
        found.extend(file.ok().as_ref().map(FileIdentity::from_metadata));
    }
    if dir.join("partition").exists() {
        found.extend(read_device_number(&dir.join("../dev")));
    }
    let slaves = std::fs::read_dir(dir.join("slaves")).into_iter().flatten().flatten();
    found.extend(slaves.filter_map(|slave| read_device_number(&slave.path().join("dev"))));
    found
}

/// Returns the device whose number a sysfs file contains.
fn read_device_number(file: &Path) -> Option<FileIdentity> {
    let text = std::fs::read_to_string(file).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(FileIdentity::Device(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?)))
}

/// Returns true if writing to one changes the other.
fn do_stacks_overlap(one: &[StackedDevice], other: &[StackedDevice]) -> bool {
    let is_on = |top: Option<&StackedDevice>, all: &[StackedDevice]| {
        top.is_some_and(|top| all.iter().any(|layer| layer.on == top.on))
    };
    // True for two loop devices of one file. Two partitions of one device do not overlap.
    let share_file = || {
        one.iter().any(|layer| {
            matches!(layer.on, FileIdentity::File { .. })
                && other.iter().any(|it| it.on == layer.on && it.through != layer.through)
        })
    };
    is_on(one.first(), other) || is_on(other.first(), one) || share_file()
}

/// A file, device or directory that the command reads.
#[derive(Debug)]
struct ReadSource {
    shown: String,
    layers: Vec<StackedDevice>,
    /// True for a directory all of whose files are read; `layers` are then its directories.
    is_dir: bool,
}

/// Everything that a command reads: it must write to none of these files.
#[derive(Debug, Default)]
pub struct ReadSources {
    all: Vec<ReadSource>,
    attached: Vec<LoopAttachment>,
}

impl ReadSources {
    /// Creates an empty set.
    pub fn new() -> Self {
        Self { all: vec![], attached: LoopAttachment::list_attached() }
    }

    /// Creates the set for an image, its extent files and its backing files.
    pub fn of_image(image: &Path, backing: &[PathBuf]) -> Self {
        let mut sources = Self::new();
        sources.add(image);
        let parts = extent_files(image).into_iter().map(|name| image.with_file_name(name));
        parts.for_each(|path| sources.add(&path));
        backing.iter().for_each(|path| sources.add(path));
        sources
    }

    /// Adds a file, a device, a directory with its files, a store, a disk in a store, or a bucket
    /// in a directory. Ignores paths that do not exist.
    pub fn add(&mut self, path: &Path) {
        let shown = path.shown().to_string();
        let path = match remote_disk::parse_url(path).filter(|_| !path.exists()) {
            None => container_file(path),
            Some(address) => {
                let store = address.rsplit_once('#').map_or(address, |(store, _)| store);
                match store.strip_prefix("file://") {
                    Some(dir) => dir.into(),
                    None => return,
                }
            }
        };
        let Ok(found) = std::fs::metadata(&path) else { return };
        let source = match found.is_dir() {
            true => ReadSource { shown, layers: stacks_of_directories(&path), is_dir: true },
            false => ReadSource {
                shown,
                layers: device_stack(FileIdentity::from_metadata(&found)),
                is_dir: false,
            },
        };
        self.all.push(source);
    }

    /// Adds standard input if it is a file or device.
    pub fn add_input(&mut self) {
        if let Some(identity) = opened_identity(std::io::stdin()) {
            let shown = "standard input".to_owned();
            self.all.push(ReadSource { shown, layers: device_stack(identity), is_dir: false });
        }
    }

    /// Opens a file for overwriting: creates it if missing, truncates it if it is no source.
    ///
    /// # Errors
    /// The file is a source, in use, or not writable.
    pub fn create(&self, dest: &Path) -> anyhow::Result<File> {
        let shown = || dest.shown().to_string();
        // A FIFO or socket is only opened for writing: opening it for reading may block.
        let is_file = std::fs::metadata(dest).map_or(true, |found| found.is_file());
        let mut options = File::options();
        options.read(is_file).write(true).create(true).truncate(false);
        let file = options.open(dest).with_context(shown)?;
        let found = file.metadata().with_context(shown)?;
        self.refuse_same_identity(FileIdentity::from_metadata(&found), &shown())?;
        self.refuse_inside_source(dest)?;
        if found.is_file() || found.file_type().is_block_device() {
            self.check_unused(&file, FileIdentity::from_metadata(&found), &shown())?;
        }
        if found.is_file() {
            file.set_len(0).with_context(shown)?;
        }
        Ok(file)
    }

    /// Opens a file to read and write, whose contents stay: creates it if missing.
    ///
    /// # Errors
    /// The file is a source, in use, no file, or not writable.
    pub fn open_or_create(&self, dest: &Path) -> anyhow::Result<File> {
        let shown = || dest.shown().to_string();
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(dest).with_context(shown)?;
        let found = file.metadata().with_context(shown)?;
        anyhow::ensure!(found.is_file(), "{}: not a file", shown());
        self.refuse_same_identity(FileIdentity::from_metadata(&found), &shown())?;
        self.refuse_inside_source(dest)?;
        self.check_unused(&file, FileIdentity::from_metadata(&found), &shown())?;
        Ok(file)
    }

    /// Overwrites a file with `bytes`, opened as by [`ReadSources::create`].
    ///
    /// # Errors
    /// As [`ReadSources::create`].
    pub fn write(&self, dest: &Path, bytes: &[u8]) -> anyhow::Result<()> {
        use std::io::Write;
        self.create(dest)?.write_all(bytes).with_context(|| dest.shown().to_string())
    }

    /// Refuses a destination that is a source, symbolic links followed.
    ///
    /// # Errors
    /// The destination is a source.
    pub fn refuse_source_as_destination(&self, dest: &Path) -> anyhow::Result<()> {
        let Ok(found) = std::fs::metadata(container_file(dest)) else { return Ok(()) };
        self.refuse_same_identity(FileIdentity::from_metadata(&found), &dest.shown().to_string())?;
        self.refuse_inside_source(dest)
    }

    /// Refuses to replace a destination that is a source or in use. Works relative to a directory
    /// descriptor, so that a confined process can call it.
    ///
    /// # Errors
    /// The destination is a source, or in use.
    pub fn refuse_source_as_destination_at(
        &self,
        dir: impl AsFd,
        name: &[u8],
        shown: &str,
    ) -> anyhow::Result<()> {
        let dir = dir.as_fd();
        let behind_links = rustix::fs::statat(dir, name, AtFlags::empty());
        let itself = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW);
        for found in [&behind_links, &itself].into_iter().flatten() {
            self.refuse_same_identity(FileIdentity::from_stat(found), shown)?;
        }
        let above = rustix::fs::fstat(dir)?;
        self.refuse_parent_in_source(FileIdentity::from_stat(&above), shown)?;
        let Ok(found) = itself else { return Ok(()) };
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        match rustix::fs::openat(dir, name, flags, Mode::empty()) {
            Ok(file) => self.check_unused(&file, FileIdentity::from_stat(&found), shown),
            // An unreadable file may still be replaced, unless a loop device is attached to it.
            Err(_) => self.check_detached(FileIdentity::from_stat(&found), shown),
        }
    }

    fn refuse_same_identity(&self, dest: FileIdentity, shown: &str) -> anyhow::Result<()> {
        let dest = device_stack(dest);
        let files = self.all.iter().filter(|source| !source.is_dir);
        match files.into_iter().find(|source| do_stacks_overlap(&source.layers, &dest)) {
            None => Ok(()),
            Some(source) => Err(same_file_error(shown, &source.shown)),
        }
    }

    /// Refuses a destination inside a directory that is a source.
    fn refuse_inside_source(&self, dest: &Path) -> anyhow::Result<()> {
        let Ok(real) = dest.canonicalize() else { return Ok(()) };
        let Some(above) = real.parent() else { return Ok(()) };
        let Ok(above) = std::fs::metadata(above) else { return Ok(()) };
        self.refuse_parent_in_source(FileIdentity::from_metadata(&above), &dest.shown().to_string())
    }

    fn refuse_parent_in_source(&self, above: FileIdentity, shown: &str) -> anyhow::Result<()> {
        let mut dirs = self.all.iter().filter(|source| source.is_dir);
        match dirs.find(|source| source.layers.iter().any(|layer| layer.on == above)) {
            None => Ok(()),
            Some(source) => Err(same_file_error(shown, &source.shown)),
        }
    }

    /// Refuses a file that is mounted, locked by another command, or attached to a loop device.
    fn check_unused(
        &self,
        file: impl AsFd,
        identity: FileIdentity,
        shown: &str,
    ) -> anyhow::Result<()> {
        match try_lock_file(file, LockMode::Exclusive) {
            Err(Errno::WOULDBLOCK) => Err(busy_error(format!(
                "{shown} is in use; unmount it first, or name another file"
            ))),
            // The file system does not support locks.
            _ => self.check_detached(identity, shown),
        }
    }

    fn check_detached(&self, identity: FileIdentity, shown: &str) -> anyhow::Result<()> {
        match self.attached.iter().find(|attached| attached.file == identity) {
            None => Ok(()),
            Some(LoopAttachment { device, .. }) => {
                Err(busy_error(format!("{shown} is in use by {device}; detach it first")))
            }
        }
    }
}

/// Refuses a standard output that is the image or one of its files, as GNU cat and tar do.
///
/// # Errors
/// Standard output is the image.
pub fn refuse_output(image: &Path, backing: &[PathBuf]) -> anyhow::Result<()> {
    match opened_identity(std::io::stdout()) {
        Some(output) => {
            ReadSources::of_image(image, backing).refuse_same_identity(output, "standard output")
        }
        None => Ok(()),
    }
}

fn same_file_error(dest: &str, source: &str) -> anyhow::Error {
    let text = match dest == source {
        true => format!("{dest}: this is the source itself; name another destination"),
        false => format!("{dest}: the same file as the source {source}; name another destination"),
    };
    Error::new(Errno::INVAL, text).into()
}

/// Returns the layers of a directory and of all directories below it.
fn stacks_of_directories(top: &Path) -> Vec<StackedDevice> {
    let mut found = vec![];
    let mut stack = vec![top.to_path_buf()];
    while let Some(dir) = stack.pop() {
        let Ok(meta) = std::fs::metadata(&dir) else { continue };
        found.push(StackedDevice { on: FileIdentity::from_metadata(&meta), through: None });
        let entries = std::fs::read_dir(&dir).into_iter().flatten().flatten();
        stack.extend(
            entries
                .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
                .map(|entry| entry.path()),
        );
    }
    found
}

/// Returns the identity of an open file or block device.
fn opened_identity(fd: impl AsFd) -> Option<FileIdentity> {
    let found = rustix::fs::fstat(fd).ok()?;
    let kind = FileType::from_raw_mode(found.st_mode);
    let has_bytes = matches!(kind, FileType::RegularFile | FileType::BlockDevice);
    has_bytes.then(|| FileIdentity::from_stat(&found))
}

/// A file that a loop device is attached to.
#[derive(Debug)]
struct LoopAttachment {
    file: FileIdentity,
    device: String,
    /// Kept open so that no new file reuses the inode number.
    _handle: OwnedFd,
}

impl LoopAttachment {
    /// Returns the backing file of a sysfs block device, if it is an attached loop device.
    fn of_block_device(device: &Path) -> Option<Self> {
        let path = std::fs::read_to_string(device.join("loop/backing_file")).ok()?;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let handle = rustix::fs::open(path.trim_end_matches('\n'), flags, Mode::empty()).ok()?;
        let file = FileIdentity::from_stat(&rustix::fs::fstat(&handle).ok()?);
        let device = format!("/dev/{}", device.file_name()?.shown());
        Some(Self { file, device, _handle: handle })
    }

    fn list_attached() -> Vec<Self> {
        let devices = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
        devices.filter_map(|device| Self::of_block_device(&device.path())).collect()
    }
}
