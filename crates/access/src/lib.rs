//! Volumes and stores by the paths of the host: opened, claimed, archived, in the caller's
//! process. What the program does between two confinements, and what libraries for other
//! languages stand on.
//!
//! ```text
//!   path ──image──▶ Opened ──start──▶ a disk ──▶ Volume: files by path, tar, check
//!        ──stores─▶ objects::Store ───────────▶ Store: groups, objects, keys
//!        ──populate, format, making──▶ a new volume, filled or empty, a new store
//! ```
//!
//! Law 1: nothing here confines the process, prints, or ends it: who calls may do that.
//! Law 2: every failure has an errno, and says what it is about.
//! Law 3: a volume or store that was closed answers EBADF, also to those that hold a part of it.
//!
//! This crate does not know FUSE, the command line and buckets.

#![forbid(unsafe_code)]

pub mod compressed;
pub mod create_store;
pub mod destination;
mod error;
pub mod file;
pub mod format;
pub mod host_file;
pub mod image;
pub mod listing;
mod location;
pub mod messages;
pub mod mmp_claim;
pub mod overwrite;
pub mod populate;
pub mod resize;
mod store;
pub mod store_disk;
pub mod stores;
pub mod tar;
pub mod tuning;
pub mod uuid;
pub mod volume;
pub mod walk;

pub use error::{Error, Result, busy_error, not_found_error};
pub use file::{File, OpenOptions};
pub use store::{CheckReport, KeyIterator, NewStore, Store};
pub use volume::{Checked, CreatedVolume, DirEntry, NewVolume, Volume, VolumeLocation};
