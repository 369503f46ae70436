//! Subjects: the systems that experiments measure.
//!
//! ```text
//!   experiment ── Subject ─┬─ files ── Handle: read · write · sync · allocate
//!                          ├─ clock: the machine's, or the model's
//!                          ├─ cold: empty every cache that can be emptied
//!                          └─ counters: what the device was really asked
//! ```
//!
//! A subject is created from its specification on the command line, for one experiment, and removes
//! its files when it is dropped. If this machine cannot provide it, the error names what is
//! missing.

mod counters;
mod delay;
mod directory;
mod key_value;
mod library;
mod memory;
mod model;
mod raw;
mod server;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use draconis_device::{Disk, Extent};
use draconis_testkit::sim::DeviceTiming;

use crate::clock::Clock;

pub use counters::BlockDeviceCounters;
pub use library::{LibrarySubject, plain_node};
pub use server::{MountServer, MountedVolume, drop_caches, time_command};

/// Kind of a subject; experiments declare which kinds they can use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SubjectKind {
    /// A mounted file system.
    Directory,
    /// A file or device without a file system.
    Raw,
    /// The library in this process.
    Library,
    /// A modelled device, with modelled time.
    Model,
    /// The machine's memory, or the machine itself.
    Memory,
    /// A key-value store.
    KeyValue,
}

/// Mode of opening a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpenMode {
    /// With caches.
    Cached,
    /// Without caches, if the subject supports that.
    Direct,
}

/// A container of files.
pub trait SubjectFiles: Send + Sync {
    /// Creates an empty file that will grow to at most `bytes`.
    ///
    /// # Errors
    /// The subject fails.
    fn create(&self, name: &str, bytes: u64, how: OpenMode)
    -> anyhow::Result<Arc<dyn SubjectFile>>;

    /// Opens an existing file.
    ///
    /// # Errors
    /// The subject fails.
    fn open(&self, name: &str, how: OpenMode) -> anyhow::Result<Arc<dyn SubjectFile>>;

    /// Removes a file.
    ///
    /// # Errors
    /// The subject fails.
    fn remove(&self, name: &str) -> anyhow::Result<()>;
}

/// An open file.
pub trait SubjectFile: Send + Sync {
    /// Reads up to `into.len()` bytes, and returns the number of bytes read.
    ///
    /// # Errors
    /// The subject fails.
    fn read(&self, at: u64, into: &mut [u8]) -> anyhow::Result<usize>;

    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// The subject fails.
    fn write(&self, at: u64, bytes: &[u8]) -> anyhow::Result<()>;

    /// Makes all writes durable.
    ///
    /// # Errors
    /// The subject fails.
    fn sync(&self) -> anyhow::Result<()>;

    /// Allocates blocks for a range; returns false if the subject does not support this.
    ///
    /// # Errors
    /// The subject fails.
    fn allocate(&self, at: u64, len: u64) -> anyhow::Result<bool> {
        let _ = (at, len);
        Ok(false)
    }
}

/// Result of emptying the caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CacheDropResult {
    /// Remounted, and dropped from the kernel's caches.
    Yes,
    /// Only dropped from the kernel's caches.
    Dropped,
    /// The caches could not be emptied.
    No,
}

/// A bare disk, and a region of it that may be overwritten.
pub struct RawRegion {
    /// The disk.
    pub disk: Arc<dyn Disk>,
    /// Clock of the disk.
    pub clock: Arc<dyn Clock>,
    /// Region.
    pub region: Extent,
    /// Write unit that the disk reports, in bytes; 0 if none.
    pub told_bytes: u32,
    /// Length of the disk, in bytes; `None` if it can be chosen.
    pub len_bytes: Option<u64>,
}

/// A system that experiments measure.
pub trait Subject {
    /// Returns the specification, without parts that are private to a run.
    fn name(&self) -> String;

    /// Returns a description for the report.
    fn describe(&self) -> String;

    /// Returns the kind.
    fn kind(&self) -> SubjectKind;

    /// Returns the clock.
    fn clock(&self) -> Arc<dyn Clock>;

    /// Returns the files.
    ///
    /// # Errors
    /// The subject has no files.
    fn files(&self) -> anyhow::Result<Arc<dyn SubjectFiles>>;

    /// Returns the directory of its files, for programs.
    fn directory(&self) -> Option<&Path> {
        None
    }

    /// Returns the image of the volume, for checks.
    fn image(&self) -> Option<PathBuf> {
        None
    }

    /// Returns the modelled device, for experiments in device time.
    fn device_timing(&self) -> Option<Box<dyn DeviceTiming>> {
        None
    }

    /// Returns the bare disk with `bytes` of space, if the subject is one.
    ///
    /// # Errors
    /// The subject fails.
    fn bare_disk(&self, bytes: u64) -> anyhow::Result<Option<RawRegion>> {
        let _ = bytes;
        Ok(None)
    }

    /// Returns the library, if the subject is one.
    fn library_subject(&mut self) -> Option<&mut LibrarySubject> {
        None
    }

    /// Empties the caches. No handle may be open.
    ///
    /// # Errors
    /// Remounting fails.
    fn empty_caches(&mut self) -> anyhow::Result<CacheDropResult> {
        Ok(CacheDropResult::No)
    }

    /// Returns the bytes read by the device so far, if they are counted.
    fn device_read_bytes(&self) -> Option<u64> {
        None
    }

    /// Unmounts the subject if it is mounted, and checks its volume.
    ///
    /// # Errors
    /// The check finds damage.
    fn close(&mut self) -> anyhow::Result<()> {
        Ok(())
    }
}

/// Environment for creating subjects.
#[derive(Clone, Debug)]
pub struct RunEnvironment {
    /// Directory of images and files.
    pub dir: PathBuf,
    /// Path of the `draconis` program.
    pub draconis: PathBuf,
    /// Path of the helper with the other stores.
    pub peers: PathBuf,
    /// True if existing contents of devices and files may be overwritten.
    pub destroy: bool,
    /// Bytes that a volume must hold.
    pub bytes: u64,
}

/// Prefix of the names of temporary files and directories.
const TEMP_NAME_PREFIX: &str = "draconis-lab-";

impl RunEnvironment {
    /// Creates a temporary directory, deleted on drop.
    ///
    /// # Errors
    /// Creating it fails.
    pub fn temp_dir(&self) -> std::io::Result<tempfile::TempDir> {
        tempfile::Builder::new().prefix(TEMP_NAME_PREFIX).tempdir_in(&self.dir)
    }

    /// Creates a temporary file, deleted on drop.
    ///
    /// # Errors
    /// Creating it fails.
    pub fn temp_file(&self) -> std::io::Result<tempfile::NamedTempFile> {
        tempfile::Builder::new().prefix(TEMP_NAME_PREFIX).tempfile_in(&self.dir)
    }
}

/// Reason why a subject is not available.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SkipReason(pub String);

impl SkipReason {
    fn find_in(error: &anyhow::Error) -> Self {
        Self(format!("{error:#}"))
    }
}

/// Returns the kind of a specification; `None` if it is invalid.
pub fn subject_kind(spec: &str) -> Option<SubjectKind> {
    let head = spec.split(':').next().unwrap_or_default();
    Some(match head {
        "dir" | "kernel" | "fuse2fs" | "draconis" | "no-op" => SubjectKind::Directory,
        "draconis-lib" => SubjectKind::Library,
        "file" | "dev" => SubjectKind::Raw,
        "model" => SubjectKind::Model,
        "mem" | "delay" => SubjectKind::Memory,
        "leveldb" | "rocksdb" | "lmdb" | "redb" | "fjall" | "slatedb" | "draconis-kv" => {
            SubjectKind::KeyValue
        }
        _ => return None,
    })
}

/// Creates the subject of a specification.
///
/// # Errors
/// Names the missing requirement.
pub fn open(spec: &str, shop: &RunEnvironment) -> Result<Box<dyn Subject>, SkipReason> {
    let (head, rest) = spec.split_once(':').unwrap_or((spec, ""));
    let made: anyhow::Result<Box<dyn Subject>> = match head {
        "dir" => directory::DirectorySubject::new(rest, shop).map(|made| Box::new(made) as _),
        "kernel" | "fuse2fs" | "draconis" | "no-op" => {
            directory::MountSubject::new(spec, shop).map(|made| Box::new(made) as _)
        }
        "draconis-lib" => library::LibrarySubject::new(spec, shop).map(|made| Box::new(made) as _),
        "file" | "dev" => raw::RawSubject::new(spec, shop).map(|made| Box::new(made) as _),
        "model" => model::ModelSubject::new(rest, shop).map(|made| Box::new(made) as _),
        "leveldb" | "rocksdb" | "lmdb" | "redb" | "fjall" | "slatedb" | "draconis-kv" => {
            key_value::KeyValue::new(head, shop).map(|made| Box::new(made) as _)
        }
        "mem" => Ok(Box::new(memory::MemorySubject::new()) as _),
        "delay" => delay::DelaySubject::new(rest).map(|made| Box::new(made) as _),
        _ => Err(anyhow::anyhow!("nobody knows {spec}")),
    };
    made.map_err(|error| SkipReason::find_in(&error))
}
