//! Files of the host that a command writes: compared with what the command reads.
//!
//! ```text
//!   what is read  ──add──▶ Sources ──create, refuse, refuse_at──▶ what is written
//! ```
//! Law 1: no file is cut or replaced before it was compared with every source: by device and
//! inode, behind links, and behind loop devices, partitions and mapped devices.
//! Law 2: what is mounted, claimed or attached to a loop device is neither cut nor replaced.
//!
//! Nothing else in the commands and libraries opens a file of the host to overwrite it;
//! `tests/arrows.rs` looks.

use std::fs::{File, Metadata};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use draconis_device::{LockMode, try_lock_file};
use draconis_service::remote_disk;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::error::{Error, busy_error};
use crate::image::{container_file, parts_of};

/// Devices below a device that are followed.
const MAX_LAYERS: usize = 64;

/// A file by its inode, or a block device by its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Identity {
    File { device: u64, inode: u64 },
    Device(u64),
}

impl Identity {
    fn of(found: &Metadata) -> Self {
        match found.file_type().is_block_device() {
            true => Self::Device(found.rdev()),
            false => Self::File { device: found.dev(), inode: found.ino() },
        }
    }

    #[allow(clippy::unnecessary_cast, reason = "the widths differ between machines")]
    fn of_stat(found: &Stat) -> Self {
        match FileType::from_raw_mode(found.st_mode) {
            FileType::BlockDevice => Self::Device(found.st_rdev as u64),
            _ => Self::File { device: found.st_dev as u64, inode: found.st_ino as u64 },
        }
    }
}

/// What bytes lie on, and the device through which that is reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct StackedDevice {
    on: Identity,
    through: Option<Identity>,
}

/// A file or device with all that it lies on, itself first.
fn layers(of: Identity) -> Vec<StackedDevice> {
    let mut all = vec![StackedDevice { on: of, through: None }];
    let mut at = 0;
    while let Some(StackedDevice { on, .. }) = all.get(at).copied() {
        at += 1;
        let Identity::Device(number) = on else { continue };
        let below = below(number)
            .into_iter()
            .map(|on_below| StackedDevice { on: on_below, through: Some(on) });
        all.extend(below.take(MAX_LAYERS.saturating_sub(all.len())));
    }
    all
}

/// What a block device lies on: the file of a loop device, the disk of a partition, the devices
/// of a mapped one.
fn below(number: u64) -> Vec<Identity> {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let dir = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let mut found = vec![];
    if let Ok(file) = std::fs::read_to_string(dir.join("loop/backing_file")) {
        let file = std::fs::metadata(file.trim_end_matches('\n'));
        found.extend(file.ok().as_ref().map(Identity::of));
    }
    if dir.join("partition").exists() {
        found.extend(device_number(&dir.join("../dev")));
    }
    let slaves = std::fs::read_dir(dir.join("slaves")).into_iter().flatten().flatten();
    found.extend(slaves.filter_map(|slave| device_number(&slave.path().join("dev"))));
    found
}

/// The device whose number a file of sysfs says.
fn device_number(file: &Path) -> Option<Identity> {
    let text = std::fs::read_to_string(file).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(Identity::Device(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?)))
}

/// Whether writing to one changes the other.
fn overlap(one: &[StackedDevice], other: &[StackedDevice]) -> bool {
    let is_on = |top: Option<&StackedDevice>, all: &[StackedDevice]| {
        top.is_some_and(|top| all.iter().any(|layer| layer.on == top.on))
    };
    // Two loop devices of one file; two partitions of one device lie parts_of each other.
    let share_file = || {
        one.iter().any(|layer| {
            matches!(layer.on, Identity::File { .. })
                && other.iter().any(|it| it.on == layer.on && it.through != layer.through)
        })
    };
    is_on(one.first(), other) || is_on(other.first(), one) || share_file()
}

/// Something that is read.
#[derive(Debug)]
struct ReadSource {
    shown: String,
    layers: Vec<StackedDevice>,
    /// A directory all of whose files are read: those directories that it consists of.
    is_dir: bool,
}

/// What a command reads: no file of the host that it writes may be one of these.
#[derive(Debug, Default)]
pub struct Sources {
    all: Vec<ReadSource>,
    attached: Vec<Attached>,
}

impl Sources {
    /// Nothing is read.
    pub fn new() -> Self {
        Self { all: vec![], attached: Attached::all() }
    }

    /// An image, the files that its disk is in, and what it differs from.
    pub fn of_image(image: &Path, backing: &[PathBuf]) -> Self {
        let mut sources = Self::new();
        sources.add(image);
        let parts = parts_of(image).into_iter().map(|name| image.with_file_name(name));
        parts.for_each(|path| sources.add(&path));
        backing.iter().for_each(|path| sources.add(path));
        sources
    }

    /// Adds a file, a device, a directory with its files, a store, a disk in a store, or a bucket
    /// in a directory. What is not there cannot be overwritten.
    pub fn add(&mut self, path: &Path) {
        let shown = path.display().to_string();
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
            true => ReadSource { shown, layers: directories(&path), is_dir: true },
            false => ReadSource { shown, layers: layers(Identity::of(&found)), is_dir: false },
        };
        self.all.push(source);
    }

    /// Adds standard input, if it is a file or device.
    pub fn add_input(&mut self) {
        if let Some(identity) = opened_identity(std::io::stdin()) {
            let shown = "standard input".to_owned();
            self.all.push(ReadSource { shown, layers: layers(identity), is_dir: false });
        }
    }

    /// Opens a file to be written anew. It is made if it is not there, and cut if it is no source.
    ///
    /// # Errors
    /// It is a source, in use, or cannot be written.
    pub fn create(&self, dest: &Path) -> anyhow::Result<File> {
        let shown = || dest.display().to_string();
        // What is no file may wait for a reader, and has nothing to be read.
        let is_file = std::fs::metadata(dest).map_or(true, |found| found.is_file());
        let mut options = File::options();
        options.read(is_file).write(true).create(true).truncate(false);
        let file = options.open(dest).with_context(shown)?;
        let found = file.metadata().with_context(shown)?;
        self.compare(Identity::of(&found), &shown())?;
        self.compare_directory(dest)?;
        if found.is_file() || found.file_type().is_block_device() {
            self.is_free(&file, Identity::of(&found), &shown())?;
        }
        if found.is_file() {
            file.set_len(0).with_context(shown)?;
        }
        Ok(file)
    }

    /// Writes a file anew, as [`Sources::create`] opens it.
    ///
    /// # Errors
    /// As [`Sources::create`].
    pub fn write(&self, dest: &Path, bytes: &[u8]) -> anyhow::Result<()> {
        use std::io::Write;
        self.create(dest)?.write_all(bytes).with_context(|| dest.display().to_string())
    }

    /// Refuses a destination that is a source, wherever links lead.
    ///
    /// # Errors
    /// It is a source.
    pub fn refuse(&self, dest: &Path) -> anyhow::Result<()> {
        let Ok(found) = std::fs::metadata(container_file(dest)) else { return Ok(()) };
        self.compare(Identity::of(&found), &dest.display().to_string())?;
        self.compare_directory(dest)
    }

    /// Refuses a destination that is a source or in use, and is to be replaced: in a process that
    /// may be confined.
    ///
    /// # Errors
    /// It is a source, or in use.
    pub fn refuse_at(&self, dir: impl AsFd, name: &[u8], shown: &str) -> anyhow::Result<()> {
        let dir = dir.as_fd();
        let behind_links = rustix::fs::statat(dir, name, AtFlags::empty());
        let itself = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW);
        for found in [&behind_links, &itself].into_iter().flatten() {
            self.compare(Identity::of_stat(found), shown)?;
        }
        let above = rustix::fs::fstat(dir)?;
        self.compare_above(Identity::of_stat(&above), shown)?;
        let Ok(found) = itself else { return Ok(()) };
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        match rustix::fs::openat(dir, name, flags, Mode::empty()) {
            Ok(file) => self.is_free(&file, Identity::of_stat(&found), shown),
            // Who may not read it can have it replaced all the same; loop devices are known.
            Err(_) => self.is_detached(Identity::of_stat(&found), shown),
        }
    }

    fn compare(&self, dest: Identity, shown: &str) -> anyhow::Result<()> {
        let dest = layers(dest);
        let files = self.all.iter().filter(|source| !source.is_dir);
        match files.into_iter().find(|source| overlap(&source.layers, &dest)) {
            None => Ok(()),
            Some(source) => Err(same(shown, &source.shown)),
        }
    }

    /// Refuses what lies in a directory that is a source.
    fn compare_directory(&self, dest: &Path) -> anyhow::Result<()> {
        let Ok(real) = dest.canonicalize() else { return Ok(()) };
        let Some(above) = real.parent() else { return Ok(()) };
        let Ok(above) = std::fs::metadata(above) else { return Ok(()) };
        self.compare_above(Identity::of(&above), &dest.display().to_string())
    }

    fn compare_above(&self, above: Identity, shown: &str) -> anyhow::Result<()> {
        let mut dirs = self.all.iter().filter(|source| source.is_dir);
        match dirs.find(|source| source.layers.iter().any(|layer| layer.on == above)) {
            None => Ok(()),
            Some(source) => Err(same(shown, &source.shown)),
        }
    }

    /// Refuses what a mount, another command or a loop device uses.
    fn is_free(&self, file: impl AsFd, identity: Identity, shown: &str) -> anyhow::Result<()> {
        match try_lock_file(file, LockMode::Exclusive) {
            Err(Errno::WOULDBLOCK) => Err(busy_error(format!(
                "{shown} is in use; unmount it first, or name another file"
            ))),
            // A file system without locks.
            _ => self.is_detached(identity, shown),
        }
    }

    fn is_detached(&self, identity: Identity, shown: &str) -> anyhow::Result<()> {
        match self.attached.iter().find(|attached| attached.file == identity) {
            None => Ok(()),
            Some(Attached { device, .. }) => {
                Err(busy_error(format!("{shown} is in use by {device}; detach it first")))
            }
        }
    }
}

/// Refuses a standard output that is an image, or what that lies in, as GNU cat and tar do.
///
/// # Errors
/// It is the image.
pub fn refuse_output(image: &Path, backing: &[PathBuf]) -> anyhow::Result<()> {
    match opened_identity(std::io::stdout()) {
        Some(output) => Sources::of_image(image, backing).compare(output, "standard output"),
        None => Ok(()),
    }
}

fn same(dest: &str, source: &str) -> anyhow::Error {
    let text = match dest == source {
        true => format!("{dest}: this is the source itself; name another destination"),
        false => format!("{dest}: the same file as the source {source}; name another destination"),
    };
    Error::new(Errno::INVAL, text).into()
}

/// A directory and all directories in it.
fn directories(top: &Path) -> Vec<StackedDevice> {
    let mut found = vec![];
    let mut stack = vec![top.to_path_buf()];
    while let Some(dir) = stack.pop() {
        let Ok(meta) = std::fs::metadata(&dir) else { continue };
        found.push(StackedDevice { on: Identity::of(&meta), through: None });
        let entries = std::fs::read_dir(&dir).into_iter().flatten().flatten();
        stack.extend(
            entries
                .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
                .map(|entry| entry.path()),
        );
    }
    found
}

/// The file or block device that is open.
fn opened_identity(fd: impl AsFd) -> Option<Identity> {
    let found = rustix::fs::fstat(fd).ok()?;
    let kind = FileType::from_raw_mode(found.st_mode);
    let has_bytes = matches!(kind, FileType::RegularFile | FileType::BlockDevice);
    has_bytes.then(|| Identity::of_stat(&found))
}

/// A file that a loop device is attached to.
#[derive(Debug)]
struct Attached {
    file: Identity,
    device: String,
    /// While this is open, no new file gets the inode number.
    _handle: OwnedFd,
}

impl Attached {
    /// The file behind a block device of sysfs, if it is an attached loop device.
    fn of(device: &Path) -> Option<Self> {
        let path = std::fs::read_to_string(device.join("loop/backing_file")).ok()?;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let handle = rustix::fs::open(path.trim_end_matches('\n'), flags, Mode::empty()).ok()?;
        let file = Identity::of_stat(&rustix::fs::fstat(&handle).ok()?);
        let device = format!("/dev/{}", device.file_name()?.display());
        Some(Self { file, device, _handle: handle })
    }

    fn all() -> Vec<Self> {
        let devices = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
        devices.filter_map(|device| Self::of(&device.path())).collect()
    }
}
