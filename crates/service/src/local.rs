//! The worker as a thread: a volume opened in this process, behind the same channels.
//!
//! ```text
//!   Caller<Directory> ── channel (blocks are moved) ──▶ thread ── volume ──▶ ext
//! ```
//!
//! Safe Rust isolates the parser, not the kernel: it has no memory but its own, and a panic closes
//! only the endpoint that it serves. Use it for trusted volumes, or in a process that has confined
//! itself; use a [`worker`](crate::worker) for others. The contracts are the same, so is the code
//! that uses them.
//!
//! ```no_run
//! use draconis_exchange::{channel, contract::{Node, file::CachingReader, tree}, heap::Block};
//! use draconis_service::{local::LocalVolume, options::MountOptions};
//! use std::time::Duration;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let timeout = Duration::from_secs(10);
//! let volume = LocalVolume::open("disk.img".as_ref(), &MountOptions::default(), timeout)?;
//! let mut directory = volume.directory()?;
//! let ends = channel::pair();
//! let (hosts, _) = tree::open(&mut directory, Node::ROOT, b"etc/hosts", ends, timeout)?;
//! let client = hosts.into_client().ok_or("the volume was lost")?;
//! // Repeated reads need no message until the volume notifies a change.
//! let mut hosts = CachingReader::new(client, timeout, 4, |len| Some(Block::unallocated(len)));
//! let mut bytes = [0; 4096];
//! println!("{} bytes", hosts.read(0, &mut bytes)?);
//! # Ok(())
//! # }
//! ```

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use draconis_device::{FileDisk, FileOptions};
use draconis_exchange::channel::{self, RpcClient};
use draconis_exchange::contract::directory::Directory;
use draconis_exchange::contract::tree;

use crate::options::MountOptions;
use crate::volume::{OpenError, VolumeTree, open, open_for_writing};

/// Reasons why a volume was not opened in this process.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The file or device could not be opened, or is in use.
    #[error(transparent)]
    Image(#[from] std::io::Error),
    /// The volume in it could not be opened.
    #[error(transparent)]
    Volume(#[from] OpenError),
}

/// A volume open in this process. It closes when this and all its endpoints are dropped.
#[derive(Clone)]
pub struct LocalVolume {
    tree: Arc<VolumeTree>,
    timeout: Duration,
}

impl LocalVolume {
    /// Opens the volume in `image` for reading. Both a client's silence and a call may take at most
    /// `patience`.
    ///
    /// # Errors
    /// See [`LocalError`].
    pub fn open(
        image: &Path,
        options: &MountOptions,
        patience: Duration,
    ) -> Result<Self, LocalError> {
        // Same options as a worker, so that the two forms differ only in isolation.
        let how = FileOptions { write: false, direct: true, uring: false };
        let disk = FileDisk::open(image, how)?;
        Ok(Self::new(open(Arc::new(disk), &[], options)?, patience))
    }

    /// Opens the volume in `image` for reading and writing, otherwise like [`LocalVolume::open`].
    /// Changes reach the disk when there are many, when a client syncs, and in
    /// [`VolumeTree::close`], which should be called.
    ///
    /// # Errors
    /// See [`LocalError`].
    pub fn open_for_writing(
        image: &Path,
        options: &MountOptions,
        patience: Duration,
    ) -> Result<Self, LocalError> {
        let how = FileOptions { write: true, direct: true, uring: false };
        let disk = FileDisk::open(image, how)?;
        Ok(Self::new(open_for_writing(Arc::new(disk), options)?, patience))
    }

    /// Serves an open volume.
    pub fn new(tree: VolumeTree, patience: Duration) -> Self {
        Self { tree: Arc::new(tree), timeout: patience }
    }

    /// Opens a new channel to the volume's root directory. One thread serves it, and one every
    /// endpoint bound through it.
    ///
    /// # Errors
    /// The system's error if no thread can be created.
    pub fn directory(&self) -> std::io::Result<RpcClient<Directory>> {
        let (client, server) = channel::pair();
        let Self { tree, timeout: patience } = self.clone();
        std::thread::Builder::new().name("volume".into()).spawn(move || {
            if let Err(lost) = tree::serve_tree(server, &*tree, patience) {
                log::info!("a client of the volume was lost: {lost}");
            }
        })?;
        Ok(RpcClient::new(client, self.timeout))
    }

    /// Returns the volume itself, for operations that the contracts lack.
    pub fn tree(&self) -> &VolumeTree {
        &self.tree
    }
}
