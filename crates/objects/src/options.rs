//! Options of creating and opening a store.

use std::fmt;

/// Placement policy of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LayoutKind {
    /// For disks with seeks: one log.
    Log,
    /// For flash: several streams, by lifetime.
    Cow,
    /// For buckets, where a request is slow and has a price.
    Bucket,
    /// A layout registered with this number: see [`crate::layout::register_layout`].
    Other(u16),
}

impl fmt::Display for LayoutKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Log => f.write_str("log"),
            Self::Cow => f.write_str("cow"),
            Self::Bucket => f.write_str("bucket"),
            Self::Other(number) => write!(f, "number {number}"),
        }
    }
}

/// Layout and sizes of a store, derived from its disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Profile {
    /// Layout.
    pub layout: LayoutKind,
    /// Unit of writes: their length and alignment; a power of two.
    pub page_bytes: u32,
    /// Length of a segment; a multiple of the page.
    pub segment_bytes: u32,
    /// Useful number of requests in flight.
    pub queue_depth: u32,
}

/// Options of a new store.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Layout and its sizes.
    pub profile: Profile,
    /// Random id that distinguishes stores.
    pub id: u128,
}

/// Options for opening a store.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Memory of the cache, in bytes. Changes since the last checkpoint need a few MB more.
    pub cache_bytes: u64,
    /// True to write nothing and refuse groups.
    pub read_only: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self { cache_bytes: 64 << 20, read_only: false }
    }
}
