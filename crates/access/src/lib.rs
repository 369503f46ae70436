//! Volumes and stores by host path, in the caller's process: opening, locking, creating,
//! archiving. The command line and the libraries for other languages build on this crate.
//!
//! ```text
//!   path ──image──▶ Opened ──start──▶ a disk ──▶ Volume: files by path, tar, check
//!        ──stores─▶ objects::Store ───────────▶ Store: groups, objects, keys
//!        ──populate, format, making──▶ a new volume, filled or empty, a new store
//! ```
//!
//! Law 1: nothing here confines the process, prints, or exits; these are the caller's decisions.
//! Law 2: every failure has an errno and names its object.
//! Law 3: a closed volume or store returns EBADF, also through files, scans and iterators; so does
//! one that a forked child inherited.
//!
//! This crate depends on neither FUSE, the command line, nor buckets.

#![forbid(unsafe_code)]

pub mod bucket_host;
pub mod compressed;
pub mod create_store;
pub mod destination;
mod error;
pub mod file;
pub mod format;
pub mod host_file;
pub mod image;
pub mod listing;
pub mod location;
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
pub use volume::{CheckedVolume, CreatedVolume, DirEntry, NewVolume, Volume, VolumeLocation};
