//! The worker as a thread: a volume opened in this process, behind the same channels.
//!
//! ```text
//!   Caller<Directory> ── channel (blocks are moved) ──▶ thread ── volume ──▶ ext
//! ```
//!
//! What isolates it is safe Rust, not the kernel: the parser has no memory but what it
//! was given, and a panic of it closes the end that it was serving. Use it for volumes one
//! trusts, or in a process that has confined itself; a [`worker`](crate::worker) is for
//! the others. The contracts are the same, and so is what is written over them.
//!
//! ```no_run
//! use draconis_exchange::{channel, contract::{Node, file::Reader, tree}, heap::Block};
//! use draconis_service::{local::Local, options::MountOptions};
//! use std::time::Duration;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let patience = Duration::from_secs(10);
//! let volume = Local::open("disk.img".as_ref(), &MountOptions::default(), patience)?;
//! let mut directory = volume.directory()?;
//! let (hosts, _) = tree::open(&mut directory, Node::ROOT, b"etc/hosts", channel::pair(), patience)?;
//! let end = hosts.into_end().ok_or("the volume was lost")?;
//! // What it reads again costs no message, until the volume tells of a change.
//! let mut hosts = Reader::new(end, patience, 4, |len| Some(Block::vacant(len)));
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

/// Why a volume was not opened in this process.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The file or device could not be opened, or is in use.
    #[error(transparent)]
    Image(#[from] std::io::Error),
    /// What it holds could not.
    #[error(transparent)]
    Volume(#[from] OpenError),
}

/// A volume open in this process. It closes when this and all ends of it are dropped.
#[derive(Clone)]
pub struct LocalVolume {
    tree: Arc<VolumeTree>,
    timeout: Duration,
}

impl LocalVolume {
    /// Opens the volume in `image` for reading. A client that is silent for `patience` is
    /// given up, and so is a call that takes as long.
    ///
    /// # Errors
    /// See [`LocalError`].
    pub fn open(
        image: &Path,
        options: &MountOptions,
        patience: Duration,
    ) -> Result<Self, LocalError> {
        // As a worker opens it, so that the two forms differ in one thing.
        let how = FileOptions { write: false, direct: true, uring: false };
        let disk = FileDisk::open(image, how)?;
        Ok(Self::new(open(Arc::new(disk), &[], options)?, patience))
    }

    /// Opens the volume in `image` for reading and writing, as [`LocalVolume::open`] does for
    /// reading. Changes are handed to the disk when they are many, when a client waits for
    /// them and when [`VolumeTree::close`] is called, which should be.
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

    /// Serves a volume that is open already.
    pub fn new(tree: VolumeTree, patience: Duration) -> Self {
        Self { tree: Arc::new(tree), timeout: patience }
    }

    /// A new channel to the volume's root directory, with a thread that serves it and one
    /// for every end bound through it.
    ///
    /// # Errors
    /// What the system says when it has no thread left.
    pub fn directory(&self) -> std::io::Result<RpcClient<Directory>> {
        let (client, server) = channel::pair();
        let Self { tree, timeout: patience } = self.clone();
        std::thread::Builder::new().name("volume".into()).spawn(move || {
            if let Err(lost) = tree::serve(server, &*tree, patience) {
                log::info!("a client of the volume was lost: {lost}");
            }
        })?;
        Ok(RpcClient::new(client, self.timeout))
    }

    /// The volume itself, for what contracts do not say.
    pub fn tree(&self) -> &VolumeTree {
        &self.tree
    }
}
