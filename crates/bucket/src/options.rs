//! Options of a bucket.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use draconis_device::CloseOnFork;

use crate::journal::JournalDevice;

/// Options of a bucket.
#[derive(Clone, Debug)]
pub struct BucketOptions {
    /// Time limit of the retries of a request.
    pub deadline: Duration,
    /// First pause between retries; later ones are longer.
    pub pause: Duration,
    /// Minimum interval between awaited commits; those within it are sent together.
    pub commit: Duration,
    /// Concurrent requests.
    pub lanes: usize,
    /// Name of the writer, for the errors of writers that it fences.
    pub who: String,
    /// Random number, unique to the writer.
    pub token: u128,
    /// Identifies the host and its runtime directory, which hold one mount at most: a new mount
    /// there implies that the old one ended.
    pub host_id: String,
    /// True for a mount: others do not fence it unless asked.
    pub is_mount: bool,
    /// True to fence a mount.
    pub take_over: bool,
    /// Journal: it acknowledges writes; the upload follows in the background.
    pub journal: Option<JournalDevice>,
    /// Directory of the read cache, and its size limit in bytes.
    pub cache: Option<(PathBuf, u64)>,
    /// Lock that is held until the disk is closed.
    pub lock: Option<Arc<CloseOnFork>>,
}
