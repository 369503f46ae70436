//! The ext2, ext3 and ext4 file systems as a library.
//!
//! ```text
//!   FileSystem              files by path, in an image of the host          here
//!      │
//!   Volume                  inodes, on any disk                             draconis-ext-volume
//!      │    check · mkfs · repair · grow · undelete · ..                    draconis-ext-offline
//!      │      │
//!      │    format          structures on disk                              draconis-ext-format
//!   trait Disk
//! ```
//!
//! Law 1: no bytes on a disk make these crates panic, loop without end, or allocate memory in
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

mod filesystem;

pub use draconis_device::{Disk, FileDisk, FileOptions, MemoryDisk};
pub use draconis_ext_format as format;
pub use draconis_ext_format::{
    Error, FileBlock, FileId, FsBlock, GroupNumber, InodeNumber, Result, inode::Inode,
    xattr::XattrSet,
};
pub use draconis_ext_offline::{
    check, finish_interrupted_change, grow, mkfs, recover_unmounted, repair, rescue, set_label,
    shrink, tune, undelete,
};
pub use draconis_ext_volume::{
    Access, AccessTimes, BlockLocation, CacheStatistics, ChangeRecord, ChangeRecorder, Cookie,
    CrashedProcess, DeviceStatistics, DirDamage, Entry, Follow, Info, MmpClaim, MmpClaimOptions,
    NewNode, OpenOptions, RenameMode, Reserve, Run, Seek, SharedBytes, StatFs, Statistics,
    SuperblockPlace, Volume, Whiteout, WriteOptions, clear_mmp, lost_superblock, split_parent,
};
pub use draconis_types::{AttributeChange, Attributes, FileType, SetTime, Time};

pub use filesystem::{DirEntry, FileSystem};
