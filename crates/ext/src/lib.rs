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
mod commit;
mod dir;
mod error;
mod file;
pub mod format;
pub mod grow;
mod label;
mod map;
pub mod mkfs;
mod mount;
mod ops;
mod orphans;
mod path;
#[cfg(test)]
mod testing;
mod transaction;
mod units;
mod volume;
mod xattr;

pub use blocks::DeviceStatistics;
pub use blocks::data::Data;
pub use cache::CacheStatistics;
pub use dir::{Cookie, Damage, Entry};
pub use error::{Error, Result};
pub use file::Seek;
pub use format::inode::Inode;
pub use label::set_label;
pub use map::{Place, Run};
pub use ops::{Access, AccessTimes, NewNode, Renaming, Reserve, Whiteout, Writing, XattrSet};
pub use path::Follow;
pub use units::{FileBlock, FsBlock, GroupNumber, InodeNumber};
pub use volume::{Info, Options, Space, Statistics, Volume};
