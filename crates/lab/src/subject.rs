//! What experiments run against.
//!
//! ```text
//!   experiment ── Subject ─┬─ files ── Handle: read · write · sync · allocate
//!                          ├─ clock: the machine's, or the model's
//!                          ├─ cold: empty every cache that can be emptied
//!                          └─ counters: what the device was really asked
//! ```
//!
//! A subject is made from its spelling on the command line, for one experiment, and leaves
//! nothing behind when it is dropped. One that this machine cannot give says what it would
//! need.

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

use draconis_device::sim::Timing;
use draconis_device::{Disk, Extent};

use crate::clock::Clock;

pub use counters::Device;
pub use library::{Library, plain_node};
pub use server::{Mounted, Server, drop_caches, time_output};

/// What sort of thing a subject is: experiments say which they can use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A mounted file system.
    Directory,
    /// A file or device without a file system between.
    Raw,
    /// Our library in this process.
    Library,
    /// A modelled device: time is device time.
    Model,
    /// The machine's memory, or nothing but the machine.
    Memory,
    /// A key-value store.
    KeyValue,
}

/// How a file is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpenMode {
    /// Through the caches.
    Cached,
    /// Past them, where the subject can.
    Direct,
}

/// Something that holds files.
pub trait Files: Send + Sync {
    /// Makes an empty file that will grow to at most `bytes`.
    ///
    /// # Errors
    /// What the subject says.
    fn create(&self, name: &str, bytes: u64, how: OpenMode) -> anyhow::Result<Arc<dyn Handle>>;

    /// Opens a file that is there.
    ///
    /// # Errors
    /// What the subject says.
    fn open(&self, name: &str, how: OpenMode) -> anyhow::Result<Arc<dyn Handle>>;

    /// Removes a file.
    ///
    /// # Errors
    /// What the subject says.
    fn remove(&self, name: &str) -> anyhow::Result<()>;
}

/// An open file.
pub trait Handle: Send + Sync {
    /// Reads into all of `into` if there is as much; how many bytes came.
    ///
    /// # Errors
    /// What the subject says.
    fn read(&self, at: u64, into: &mut [u8]) -> anyhow::Result<usize>;

    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// What the subject says.
    fn write(&self, at: u64, bytes: &[u8]) -> anyhow::Result<()>;

    /// Makes everything written durable.
    ///
    /// # Errors
    /// What the subject says.
    fn sync(&self) -> anyhow::Result<()>;

    /// Gives the file its blocks ahead of the write; whether the subject can.
    ///
    /// # Errors
    /// What the subject says.
    fn allocate(&self, at: u64, len: u64) -> anyhow::Result<bool> {
        let _ = (at, len);
        Ok(false)
    }
}

/// Whether a run was cold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cold {
    /// Remounted and dropped from the kernel's caches.
    Yes,
    /// Only dropped from the kernel's caches.
    Dropped,
    /// It could not be made cold.
    No,
}

/// A disk without anything between, and a part of it that may be overwritten.
pub struct RawRegion {
    /// The disk.
    pub disk: Arc<dyn Disk>,
    /// Its time.
    pub clock: Arc<dyn Clock>,
    /// The part.
    pub region: Extent,
    /// The unit in which it says that it is written, in bytes; 0 if it says nothing.
    pub told_bytes: u32,
    /// How long it is, in bytes; nothing where that is as long as one likes.
    pub len_bytes: Option<u64>,
}

/// What an experiment runs against.
pub trait Subject {
    /// As on the command line, without what is private to a run.
    fn name(&self) -> String;

    /// What it is, for the report.
    fn describe(&self) -> String;

    /// What sort of thing.
    fn kind(&self) -> Kind;

    /// Its time.
    fn clock(&self) -> Arc<dyn Clock>;

    /// Its files.
    ///
    /// # Errors
    /// If it has none.
    fn files(&self) -> anyhow::Result<Arc<dyn Files>>;

    /// Where its files are found by programs.
    fn directory(&self) -> Option<&Path> {
        None
    }

    /// The image that the volume lies in, for judges.
    fn image(&self) -> Option<PathBuf> {
        None
    }

    /// The device behind a model, for experiments in device time.
    fn timing(&self) -> Option<Box<dyn Timing>> {
        None
    }

    /// The disk that it is, if it is one, with room of `bytes`.
    ///
    /// # Errors
    /// What the subject says.
    fn bare(&self, bytes: u64) -> anyhow::Result<Option<RawRegion>> {
        let _ = bytes;
        Ok(None)
    }

    /// Our library, if that is what this is.
    fn library(&mut self) -> Option<&mut Library> {
        None
    }

    /// Empties caches. No handle may be open.
    ///
    /// # Errors
    /// If it broke on the way.
    fn cold(&mut self) -> anyhow::Result<Cold> {
        Ok(Cold::No)
    }

    /// Bytes that the device behind it has read so far, where they are counted.
    fn device_read_bytes(&self) -> Option<u64> {
        None
    }

    /// Unmounts it, where it is mounted, and has what it left judged.
    ///
    /// # Errors
    /// What the judge found.
    fn close(&mut self) -> anyhow::Result<()> {
        Ok(())
    }
}

/// Where subjects are made, and with what.
#[derive(Clone, Debug)]
pub struct RunEnvironment {
    /// For images and files.
    pub dir: PathBuf,
    /// The `draconis` program.
    pub draconis: PathBuf,
    /// The helper with the stores that others wrote.
    pub peers: PathBuf,
    /// Whether subjects may be overwritten that held something before.
    pub destroy: bool,
    /// Bytes that a volume must hold.
    pub bytes: u64,
}

/// What names of files and directories of ours begin with.
const PREFIX: &str = "draconis-lab-";

impl RunEnvironment {
    /// A directory of one's own, until dropped.
    ///
    /// # Errors
    /// What the system says.
    pub fn directory(&self) -> std::io::Result<tempfile::TempDir> {
        tempfile::Builder::new().prefix(PREFIX).tempdir_in(&self.dir)
    }

    /// A file of one's own, until dropped.
    ///
    /// # Errors
    /// What the system says.
    pub fn file(&self) -> std::io::Result<tempfile::NamedTempFile> {
        tempfile::Builder::new().prefix(PREFIX).tempfile_in(&self.dir)
    }
}

/// Why there is no such subject here.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SkipReason(pub String);

impl SkipReason {
    fn of(error: &anyhow::Error) -> Self {
        Self(format!("{error:#}"))
    }
}

/// What sort of subject a spelling names; `None` if it names none.
pub fn kind_of(spec: &str) -> Option<Kind> {
    let head = spec.split(':').next().unwrap_or_default();
    Some(match head {
        "dir" | "kernel" | "fuse2fs" | "draconis" | "no-op" => Kind::Directory,
        "draconis-lib" => Kind::Library,
        "file" | "dev" => Kind::Raw,
        "model" => Kind::Model,
        "mem" | "delay" => Kind::Memory,
        "leveldb" | "rocksdb" | "lmdb" | "redb" | "fjall" | "slatedb" | "draconis-kv" => {
            Kind::KeyValue
        }
        _ => return None,
    })
}

/// Makes the subject of that spelling.
///
/// # Errors
/// What it would need.
pub fn open(spec: &str, shop: &RunEnvironment) -> Result<Box<dyn Subject>, SkipReason> {
    let (head, rest) = spec.split_once(':').unwrap_or((spec, ""));
    let made: anyhow::Result<Box<dyn Subject>> = match head {
        "dir" => directory::Directory::new(rest, shop).map(|made| Box::new(made) as _),
        "kernel" | "fuse2fs" | "draconis" | "no-op" => {
            directory::Mount::new(spec, shop).map(|made| Box::new(made) as _)
        }
        "draconis-lib" => library::Library::new(spec, shop).map(|made| Box::new(made) as _),
        "file" | "dev" => raw::Raw::new(spec, shop).map(|made| Box::new(made) as _),
        "model" => model::Model::new(rest, shop).map(|made| Box::new(made) as _),
        "leveldb" | "rocksdb" | "lmdb" | "redb" | "fjall" | "slatedb" | "draconis-kv" => {
            key_value::KeyValue::new(head, shop).map(|made| Box::new(made) as _)
        }
        "mem" => Ok(Box::new(memory::Memory::new()) as _),
        "delay" => delay::Delay::new(rest).map(|made| Box::new(made) as _),
        _ => Err(anyhow::anyhow!("nobody knows {spec}")),
    };
    made.map_err(|error| SkipReason::of(&error))
}
