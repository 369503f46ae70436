//! An open volume of ext2, ext3 or ext4: read, and changed through its journal.
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
//! Law 4: nothing here makes, checks or changes unmounted volumes: `draconis-ext-offline` does, with
//! [`unmounted`].
//!
//! Programs use `draconis-ext`, which offers all of this. This crate knows nothing of channels,
//! mounts, host paths and clocks.

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
mod commit;
mod dir;
mod file;
mod inline;
mod journal;
mod map;
mod mmp;
mod mount;
mod ops;
mod options;
mod orphans;
mod path;
mod quota;
mod reader;
mod resume;
#[cfg(test)]
mod testing;
mod transaction;
#[doc(hidden)]
pub mod unmounted;
mod volume;
mod write_context;
mod xattr;

use draconis_ext_format as format;
use draconis_ext_format::units;
use draconis_ext_format::{Error, FileBlock, FileId, FsBlock, GroupNumber, InodeNumber, Result};

pub use backup::{SuperblockPlace, lost_superblock};
pub use blocks::DeviceStatistics;
pub use blocks::data::SharedBytes;
pub use cache::CacheStatistics;
pub use change_record::{ChangeRecord, ChangeRecorder};
pub use dir::{Cookie, DirDamage, Entry};
pub use file::Seek;
pub use map::{BlockLocation, Run};
pub use mmp::{MmpClaim, MmpClaimOptions, clear_mmp};
pub use ops::{Access, AccessTimes, NewNode, RenameMode, Reserve, Whiteout};
pub use options::{OpenOptions, WriteOptions};
pub use path::{Follow, split_parent};
pub use resume::CrashedProcess;
pub use volume::{Info, StatFs, Statistics, Volume};
