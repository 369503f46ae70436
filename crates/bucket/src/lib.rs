//! A bucket of immutable objects as a disk; the writer with the newest epoch fences the others.
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
//! Law 1: objects are immutable, and names are never reused.
//! Law 2: names hold all metadata of data objects, so opening needs only a list and the root.
//! Law 3: the only conditional request is create-if-absent; it is probed first.
//!
//! This crate knows disks, clocks, threads and networks; not stores.

#![forbid(unsafe_code)]

mod advice;
mod api;
mod cache;
#[cfg_attr(not(feature = "clouds"), path = "no_clouds.rs")]
mod clouds;
mod directory;
mod disk;
mod epoch;
mod journal;

mod listing;
mod map;
mod memory_bucket;
mod name;
mod object_store_bucket;
mod open;
mod options;
mod probe;
mod read_ahead;
mod request_threads;
mod retry;
mod root;
mod state;
mod unanswered;
mod upload_queue;

pub use api::{BucketApi, ListEntry, RequestError, RequestResult};
pub use disk::{BucketDisk, BucketWriteState};
pub use journal::{JournalDevice, JournalStatistics};
pub use memory_bucket::{Faults, MemoryBucket, ServerGuarantees};
pub use object_store_bucket::{ObjectStoreBucket, is_address};
pub use options::BucketOptions;
pub use retry::RequestStatistics;

/// Unit of the disk, in bytes.
const SECTOR_BYTES: u64 = 512;

/// Longest object, in bytes: its transfer takes about as long as the latency of a request.
const OBJECT_BYTES: u64 = 4 << 20;

pub(crate) fn remote(text: String) -> draconis_device::Error {
    draconis_device::Error::Remote(text.into())
}
