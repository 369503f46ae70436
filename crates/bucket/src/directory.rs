//! A directory as a bucket: it may be away for a while, such as a network mount.
//!
//! Law 1: an object is only missing if its directory is there. A missing directory is a transient
//! error, as a server that does not answer.
//! Law 2: once the directory had objects, an empty one in its place is as good as none: it is a
//! mount point whose file system is away.
//! Law 3: an answer counts only if the directory was the same before and after the request, which
//! would make a missing directory anew.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use draconis_types::path_bytes::ShowPath;

use crate::api::{RequestError, RequestResult};

/// The directory of a bucket.
pub(crate) struct BucketDirectory {
    path: PathBuf,
    has_had_objects: AtomicBool,
}

impl BucketDirectory {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, has_had_objects: AtomicBool::new(false) }
    }

    /// Makes a request if the directory is there.
    pub(crate) fn request<T>(
        &self,
        request: impl FnOnce() -> RequestResult<T>,
    ) -> RequestResult<T> {
        let before = self.identity()?;
        let answer = request();
        match self.identity()? == before {
            true => answer,
            false => Err(self.absence("was replaced by another")),
        }
    }

    /// Returns device and inode of the directory.
    fn identity(&self) -> RequestResult<(u64, u64)> {
        let entry =
            std::fs::read_dir(&self.path).and_then(|mut entries| entries.next().transpose());
        match entry {
            Ok(Some(_)) => self.has_had_objects.store(true, Ordering::Relaxed),
            Ok(None) if !self.has_had_objects.load(Ordering::Relaxed) => {}
            Ok(None) => return Err(self.absence("is empty, and had a store")),
            Err(error) => return Err(self.absence(&format!("is away: {error}"))),
        }
        match std::fs::metadata(&self.path) {
            Ok(directory) => Ok((directory.dev(), directory.ino())),
            Err(error) => Err(self.absence(&format!("is away: {error}"))),
        }
    }

    fn absence(&self, what: &str) -> RequestError {
        RequestError::Transient(format!("the directory {} {what}", self.path.shown()))
    }
}
