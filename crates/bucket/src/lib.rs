//! A bucket of objects as a disk: what is written is never changed, and the younger writer wins.
//!
//! ```text
//!   trait Disk ── BucketDisk: sectors ─▶ packs ─▶ immutable objects, names that say what is in them
//!                    │            root: superblocks, which objects count
//!                    │            epoch: who may write
//!                    │            journal: a file here that has what the bucket has not yet
//!                    │ trait Engine: put · create · get · head · delete · list
//!   S3, Google, Azure, a directory (object_store) · memory, with faults
//! ```
//!
//! Law 1: an object is never changed, and no name is given out twice.
//! Law 2: all that is known before anything is read is in the names: opening lists.
//! Law 3: one condition is relied on, that what exists is not created; it is probed first.
//!
//! This crate knows what a disk is, a clock, threads and a network; not what a store is.

#![forbid(unsafe_code)]

mod api;
mod cache;
#[cfg_attr(not(feature = "clouds"), path = "no_clouds.rs")]
mod clouds;
mod disk;
mod epoch;
mod journal;
mod journal_queue;
mod map;
mod memory_bucket;
mod name;
mod object_store_bucket;
mod open;
mod probe;
mod read_ahead;
mod request_threads;
mod retry;
mod root;
mod upload_queue;

pub use api::{BucketApi, ListEntry, RequestError, RequestResult};
pub use disk::{BucketDisk, Writing};
pub use journal::{JournalDevice, JournalStatistics};
pub use memory_bucket::{Faults, MemoryBucket, ServerGuarantees};
pub use object_store_bucket::{ObjectStoreBucket, is_address};
pub use open::BucketOptions;
pub use retry::Requests;

/// The unit of the disk, in bytes.
const SECTOR: u64 = 512;

/// The longest object, in bytes: what takes about as long to send as the answer does to come.
const OBJECT_BYTES: u64 = 4 << 20;
