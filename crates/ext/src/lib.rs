//! The ext2 file system family as a plain library.
//!
//! ```text
//!   Volume: inode · lookup · entries · read · map · attributes        &self, Send + Sync
//!      │
//!   dir · file · map · xattr            what files are made of
//!      │            │
//!   inode cache   block-map cache
//!      │            │
//!   store: data cache, reads ahead, merging
//!      │
//!   trait Disk
//! ```
//!
//! Law 1: no bytes on a disk make this crate panic, loop without end, or take memory in
//! proportion to what they claim.
//! Law 2: damage costs the file it is in; everything else stays readable.
//! Law 3: the holder of [`Data`] holds it for good; caches forget, they never take back.
//!
//! A volume made in memory, a file written, and read after the volume was opened again:
//!
//! ```
//! use std::sync::Arc;
//!
//! use draconis_device::MemoryDisk;
//! use draconis_exchange::contract::{Kind, Time};
//! use draconis_ext::mkfs::{self, Contents, Node, Target, Tree, What};
//! use draconis_ext::{AccessTimes, Follow, NewNode, Options, Volume, Writing};
//!
//! /// What the files of the new volume hold: it has none.
//! struct NoFiles;
//! impl Contents for NoFiles {
//!     fn read(&self, _: u64, _: u64, _: &mut [u8]) -> std::io::Result<()> {
//!         Err(std::io::ErrorKind::NotFound.into())
//!     }
//! }
//!
//! let disk = Arc::new(MemoryDisk::new(vec![0; 4 << 20], 512));
//! let mut tree = Tree::new(Node::new(What::Directory, 0o755));
//! let plan = mkfs::sized(&mkfs::Options::default(), &mut tree, 4 << 20)?;
//! mkfs::write(&plan, &NoFiles, &Target { disk: &disk, zeroed: true, progress: &|_| {} })?;
//!
//! let writing = Writing {
//!     clock: Arc::new(|| Time { seconds: 1_700_000_000, nanoseconds: 0 }),
//!     dirty_bytes: 8 << 20,
//!     atime: AccessTimes::Relative,
//!     discard: false,
//! };
//! let volume = Volume::open_for_writing(disk.clone(), Options::default(), writing)?;
//! let file = NewNode {
//!     kind: Kind::File,
//!     mode: 0o644,
//!     uid: 0,
//!     gid: 0,
//!     device: (0, 0),
//!     target: b"",
//! };
//! let letter = volume.create(volume.root(), b"letter", &file)?;
//! volume.write(letter, 0, b"Dear reader,\n")?;
//! // What this returned for is durable; closing marks the volume as unmounted.
//! volume.sync_inode(letter, false)?;
//! volume.close()?;
//!
//! let volume = Volume::open(disk, Options::default())?;
//! let letter = volume.resolve(volume.root(), b"/letter", Follow::Yes)?;
//! let mut bytes = [0; 100];
//! let len = volume.read_into(letter, 0, &mut bytes)?;
//! assert_eq!(&bytes[..len], b"Dear reader,\n");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! This crate does not know what a channel, a mount or a path of the host is.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::panic,
        clippy::unreachable,
        clippy::unwrap_used
    )
)]

mod alloc;
mod blocks;
mod cache;
pub mod check;
mod claim;
mod commit;
mod dir;
mod error;
mod file;
pub mod format;
pub mod grow;
mod inline;
mod journal;
mod label;
mod map;
pub mod mkfs;
mod mount;
mod ops;
mod orphans;
mod path;
mod quota;
mod redo;
mod rework;
pub mod shrink;
mod takeover;
#[cfg(test)]
mod testing;
mod transaction;
pub mod tune;
mod units;
mod volume;
mod whole;
mod xattr;

pub use blocks::DeviceStatistics;
pub use blocks::data::Data;
pub use cache::CacheStatistics;
pub use claim::{Claim, Claiming, clear_claim};
pub use dir::{Cookie, Damage, Entry};
pub use error::{Error, Result};
pub use file::Seek;
pub use format::inode::Inode;
pub use label::set_label;
pub use map::{Place, Run};
pub use ops::{Access, AccessTimes, NewNode, Renaming, Reserve, Whiteout, Writing, XattrSet};
pub use path::Follow;
pub use redo::finish;
pub use takeover::{Made, Predecessor, Witness};
pub use units::{FileBlock, FileId, FsBlock, GroupNumber, InodeNumber};
pub use volume::{Info, Options, Space, Statistics, Volume};
pub use whole::settle;
