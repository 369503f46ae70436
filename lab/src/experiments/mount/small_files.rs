//! Small files created, statted, renamed and removed: by system calls below a directory, or by
//! the library in this process.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use draconis_ext::{Access, Follow, InodeNumber, RenameMode, Volume};
use draconis_types::FileType as NodeKind;

use crate::results::Sample;
use crate::subject::plain_node;

/// Length of a small file, in bytes.
const SMALL_FILE_BYTES: usize = 4096;
/// Small files of one directory.
const FILES_PER_DIRECTORY: u64 = 1000;

/// Operations on the small file with a number.
pub trait SmallFiles {
    /// Creates the file, and writes `bytes`.
    fn create(&self, nth: u64, bytes: &[u8]) -> anyhow::Result<()>;
    /// Stats the file.
    fn stat(&self, nth: u64) -> anyhow::Result<()>;
    /// Opens the file for reading, and closes it.
    fn open(&self, nth: u64) -> anyhow::Result<()>;
    /// Renames the file.
    fn rename(&self, nth: u64) -> anyhow::Result<()>;
    /// Removes the renamed file.
    fn unlink(&self, nth: u64) -> anyhow::Result<()>;
}

/// Measures all operations on `files` files, one kind after the other.
pub fn measure_small_files(by: &dyn SmallFiles, files: u64) -> anyhow::Result<Vec<Sample>> {
    let bytes = [0x5a; SMALL_FILE_BYTES];
    let each = |what: &str, once: &dyn Fn(u64) -> anyhow::Result<()>| {
        let started = Instant::now();
        (0..files).try_for_each(once).with_context(|| what.to_string())?;
        Ok(super::rate_sample(what, files, started.elapsed()))
    };
    [
        each("create", &|nth| by.create(nth, &bytes)),
        each("stat", &|nth| by.stat(nth)),
        each("open", &|nth| by.open(nth)),
        each("rename", &|nth| by.rename(nth)),
        each("unlink", &|nth| by.unlink(nth)),
    ]
    .into_iter()
    .collect()
}

/// Implementation by system calls.
pub struct SmallFilesBySystemCall(PathBuf);

impl SmallFilesBySystemCall {
    /// Creates the directories for `files` files below `at`.
    pub fn new(at: PathBuf, files: u64) -> anyhow::Result<Self> {
        for dir in 0..files.div_ceil(FILES_PER_DIRECTORY) {
            std::fs::create_dir_all(at.join(format!("d{dir}")))?;
        }
        Ok(Self(at))
    }

    fn path(&self, nth: u64, prefix: &str) -> PathBuf {
        self.0.join(format!("d{}/{prefix}{nth}", nth / FILES_PER_DIRECTORY))
    }
}

impl SmallFiles for SmallFilesBySystemCall {
    fn create(&self, nth: u64, bytes: &[u8]) -> anyhow::Result<()> {
        Ok(File::create_new(self.path(nth, "file"))?.write_all(bytes)?)
    }

    fn stat(&self, nth: u64) -> anyhow::Result<()> {
        Ok(std::fs::metadata(self.path(nth, "file")).map(drop)?)
    }

    fn open(&self, nth: u64) -> anyhow::Result<()> {
        Ok(File::open(self.path(nth, "file")).map(drop)?)
    }

    fn rename(&self, nth: u64) -> anyhow::Result<()> {
        Ok(std::fs::rename(self.path(nth, "file"), self.path(nth, "moved"))?)
    }

    fn unlink(&self, nth: u64) -> anyhow::Result<()> {
        Ok(std::fs::remove_file(self.path(nth, "moved"))?)
    }
}

/// Implementation by the library.
pub struct SmallFilesByLibrary {
    volume: Arc<Volume>,
    dirs: Vec<InodeNumber>,
}

impl SmallFilesByLibrary {
    /// Creates the directories for `files` files in the root of a volume.
    pub fn new(volume: Arc<Volume>, files: u64) -> anyhow::Result<Self> {
        let root = volume.root();
        let directory = |nth: u64| {
            let name = format!("d{nth}");
            let there = volume.resolve(root, name.as_bytes(), Follow::No);
            let new = plain_node(NodeKind::Directory, 0o755);
            there.or_else(|_| volume.create(root, name.as_bytes(), &new))
        };
        let dirs =
            (0..files.div_ceil(FILES_PER_DIRECTORY)).map(directory).collect::<Result<_, _>>()?;
        Ok(Self { volume, dirs })
    }

    fn dir(&self, nth: u64) -> InodeNumber {
        self.dirs[(nth / FILES_PER_DIRECTORY) as usize]
    }
}

impl SmallFiles for SmallFilesByLibrary {
    fn create(&self, nth: u64, bytes: &[u8]) -> anyhow::Result<()> {
        let new = plain_node(NodeKind::File, 0o644);
        let file = self.volume.create(self.dir(nth), format!("file{nth}").as_bytes(), &new)?;
        ensure!(self.volume.write(file, 0, bytes)? == bytes.len(), "no room");
        Ok(())
    }

    fn stat(&self, nth: u64) -> anyhow::Result<()> {
        let file = self.volume.lookup(self.dir(nth), format!("file{nth}").as_bytes())?;
        Ok(self.volume.attributes(file).map(drop)?)
    }

    fn open(&self, nth: u64) -> anyhow::Result<()> {
        let file = self.volume.lookup(self.dir(nth), format!("file{nth}").as_bytes())?;
        let reads = Access { read: true, write: false, append: false };
        Ok(self.volume.check_open(file, reads)?)
    }

    fn rename(&self, nth: u64) -> anyhow::Result<()> {
        let (dir, from, to) = (self.dir(nth), format!("file{nth}"), format!("moved{nth}"));
        let how = RenameMode::Replace;
        Ok(self.volume.rename(dir, from.as_bytes(), dir, to.as_bytes(), how)?)
    }

    fn unlink(&self, nth: u64) -> anyhow::Result<()> {
        Ok(self.volume.unlink(self.dir(nth), format!("moved{nth}").as_bytes())?)
    }
}
