//! Snapshot, clone, rollback and removal of disks: in this process, or, while disks of the store
//! are mounted, in the process of the store.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use draconis_service::client::{RuntimeDir, request_if_running};
use draconis_service::protocol::{Reply, Request};
use draconis_service::store_keeper;
use draconis_service::store_process::DiskCommand;
use draconis_types::path_bytes::ShowPath;

use super::open::{close_store, open_writable, with_context};
use crate::bucket;
use crate::image::Force;
use crate::image::store_disk::parse_existing_disk_name;

/// A disk or snapshot argument: STORE#DISK, STORE#DISK@SNAPSHOT.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoreDiskArg {
    pub store: PathBuf,
    pub disk: String,
    pub snapshot: Option<String>,
}

impl StoreDiskArg {
    /// Splits at the last `#`. The store may be a file, a device or a bucket.
    ///
    /// # Errors
    /// Description of the syntax error, for clap.
    pub fn parse(text: &OsStr) -> Result<Self, String> {
        let bytes = text.as_bytes();
        let wrong = || "STORE#DISK names a disk, STORE#DISK@SNAPSHOT its snapshot".to_owned();
        let hash = bytes.iter().rposition(|byte| *byte == b'#').ok_or_else(wrong)?;
        let (store, name) = bytes.split_at(hash);
        let name = std::str::from_utf8(name.get(1..).unwrap_or_default()).map_err(|_| wrong())?;
        let (disk, snapshot) = match name.split_once('@') {
            Some((disk, snapshot)) => (disk, Some(parse_existing_disk_name(snapshot)?)),
            None => (name, None),
        };
        if store.is_empty() {
            return Err(wrong());
        }
        let store = PathBuf::from(OsStr::from_bytes(store));
        Ok(Self { store, disk: parse_existing_disk_name(disk)?, snapshot })
    }

    /// Returns the name in the store.
    pub fn name(&self) -> String {
        match &self.snapshot {
            Some(snapshot) => format!("{}@{snapshot}", self.disk),
            None => self.disk.clone(),
        }
    }
}

impl std::fmt::Display for StoreDiskArg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}#{}", self.store.shown(), self.name())
    }
}

impl std::str::FromStr for StoreDiskArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(OsStr::new(text))
    }
}

/// Executes a command; its result is durable on return.
pub fn run_disk_command(
    store: &Path,
    change: &DiskCommand,
    force: Option<Force>,
) -> anyhow::Result<()> {
    let shown = store.shown();
    let by_name =
        bucket::bucket_url(store).map(|address| PathBuf::from(bucket::normalize_url(address)));
    if by_name.is_some() || store.exists() {
        let directory =
            RuntimeDir::open().context("cannot find the process that has the store open")?;
        let named = by_name.as_deref().unwrap_or(store);
        let done = store_keeper::execute_disk_command(&directory, named, change);
        if done.map_err(|why| anyhow!("{shown}: {why}"))? {
            return Ok(());
        }
    }
    let opened = open_writable(store, force)?;
    change.execute(&opened).map_err(|error| with_context(store, error))?;
    close_store(&opened, store)
}

/// Commits the writes to a mounted disk, so that a snapshot includes them.
pub fn sync_mounted(disk: &StoreDiskArg) -> anyhow::Result<()> {
    let store = match bucket::bucket_url(&disk.store) {
        Some(address) => PathBuf::from(bucket::normalize_url(address)),
        None => match disk.store.canonicalize() {
            Ok(store) => store,
            Err(_) => return Ok(()),
        },
    };
    let mut name = store.into_os_string();
    name.push("#");
    name.push(&disk.disk);
    let Some(Reply::Status(status)) = request_if_running(&RuntimeDir::open()?, &Request::Status)?
    else {
        return Ok(());
    };
    for mount in status.mounts.iter().filter(|mount| mount.volume.as_os_str() == name) {
        if mount.read_only {
            continue;
        }
        // First the page cache of the kernel, then the worker.
        let committed = File::open(&mount.mount_point).and_then(|root| {
            rustix::fs::syncfs(&root)?;
            root.sync_all()
        });
        committed.with_context(|| format!("{}: cannot sync", mount.mount_point.shown()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_and_snapshot_names_follow_last_hash() {
        let named =
            |text: &str| text.parse::<StoreDiskArg>().map(|it| (it.store.clone(), it.name()));
        assert_eq!(named("a#b#vol@s.1"), Ok(("a#b".into(), "vol@s.1".into())));
        assert_eq!(named("s3://bucket/p#vol"), Ok(("s3://bucket/p".into(), "vol".into())));
        for wrong in ["vol", "#vol", "s#", "s#vol@", "s#@x", "s#vol@a@b", "s#17", "s#a b"] {
            assert!(named(wrong).is_err(), "{wrong}");
        }
    }
}
