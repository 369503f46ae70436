//! The ext2, ext3 and ext4 file systems as a library.
//!
//! ```text
//!   Volume: inode · lookup · entries · read · map · attributes        &self, Send + Sync
//!      │
//!   dir · file · map · xattr            what files are made of
//!      │            │
//!   inode cache   block-map cache
//!      │            │
//!   store: data cache, read-ahead, merging
//!      │
//!   trait Disk
//! ```
//!
//! Law 1: no bytes on a disk make this crate panic, loop without end, or allocate memory in
//! proportion to the sizes that they claim.
//! Law 2: damage costs the file it is in; everything else stays readable.
//! Law 3: a [`SharedBytes`] stays valid as long as its holder keeps it, whatever the caches evict.
//!
//! [`FileSystem`] creates, changes and reads an image by path, with the names of [`std::fs`]:
//!
//! ```
//! use draconis_ext::FileSystem;
//!
//! # let scratch = tempfile::tempdir()?;
//! # let image = scratch.path().join("disk.img");
//! let fs = FileSystem::create(&image, 16 << 20)?;
//! fs.create_dir_all("/etc/app")?;
//! fs.write("/etc/app/greeting", "Dear reader,\n")?;
//! assert_eq!(fs.read("/etc/app/greeting")?, b"Dear reader,\n");
//! for entry in fs.read_dir("/etc/app")? {
//!     println!("{}", entry.path().display());
//! }
//! fs.close()?;
//! # if let Ok(found) = std::process::Command::new("e2fsck").arg("-fn").arg(&image).output() {
//! #     assert!(found.status.success());
//! # }
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! [`Volume`] is the layer below: inodes, any [`Disk`], the caller's clock. [`mkfs`] fills a new
//! volume from a directory tree.
//!
//! This crate knows nothing of channels and mounts. Only [`FileSystem`] opens host paths and reads
//! the system clock.

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

mod access_times;
mod alloc;
mod backup;
mod blocks;
mod cache;
mod change_record;
pub mod check;
mod commit;
mod dir;
mod file;
mod filesystem;
pub mod grow;
mod inline;
mod journal;
mod label;
mod map;
pub mod mkfs;
mod mmp;
mod mount;
mod offline;
mod ops;
mod options;
mod orphans;
mod path;
mod quota;
mod reader;
mod redo_log;
pub mod repair;
pub mod rescue;
mod resume;
mod rewrite;
pub mod shrink;
#[cfg(test)]
mod testing;
mod transaction;
pub mod tune;
pub mod undelete;
mod volume;
mod write_context;
mod xattr;

pub use draconis_device::{Disk, FileDisk, FileOptions, MemoryDisk};
pub use draconis_ext_format as format;
use draconis_ext_format::units;
pub use draconis_ext_format::{
    Error, FileBlock, FileId, FsBlock, GroupNumber, InodeNumber, Result, inode::Inode,
    xattr::XattrSet,
};
pub use draconis_types::{AttributeChange, Attributes, FileType, SetTime, Time};

pub use backup::{SuperblockPlace, lost_superblock};
pub use blocks::DeviceStatistics;
pub use blocks::data::SharedBytes;
pub use cache::CacheStatistics;
pub use change_record::{ChangeRecord, ChangeRecorder};
pub use dir::{Cookie, DirDamage, Entry};
pub use file::Seek;
pub use filesystem::{DirEntry, FileSystem};
pub use label::set_label;
pub use map::{BlockLocation, Run};
pub use mmp::{MmpClaim, MmpClaimOptions, clear_mmp};
pub use offline::recover_unmounted;
pub use ops::{Access, AccessTimes, NewNode, RenameMode, Reserve, Whiteout};
pub use options::{OpenOptions, WriteOptions};
pub use path::{Follow, split_parent};
pub use redo_log::finish_interrupted_change;
pub use resume::CrashedProcess;
pub use volume::{Info, StatFs, Statistics, Volume};
