//! Layouts: placement, checkpoint interval and queue depth for a kind of hardware.
//!
//! ```text
//!   log   0 what is written   1 what is cleaned   2 nodes, runs
//!   cow   0 what is written in bits   1 hot, runs   2 cold   3 what is cleaned   4 nodes
//!   bucket   as log
//! ```
//!
//! A store consists of segments. One segment is open for each *stream*. The layout chooses the
//! stream of a payload, which is written in self-describing *frames*. A commit submits the frames
//! of all streams together. The cleaner moves live bytes out of segments that have few, and frees
//! them. Opening a store replays the log after the last checkpoint.
//!
//! A layout chooses places and sizes and never sees a byte. A store reads and guarantees the same
//! with any layout: a bad one is slow, not wrong. To write one for a device:
//!
//! 1. implement [`Layout`]: four methods have no default;
//! 2. [`register_layout`] it under a number of your own: opening a store needs its layout;
//! 3. check it with [`crate::conform::check_all`], and create a store with the [`crate::Profile`] of
//!    your device.
//!
//! `examples/zoned.rs` is one, for a device whose zones are written in order.
//!
//! # Choice of a layout
//!
//! [`crate::probe`] measures a disk. If short random reads or writes cost clearly more than
//! sequential ones, distance costs time, and it chooses `log`; otherwise `cow`. A bucket reports
//! itself as one and gets `bucket`. A registered layout is chosen by the creator of the store, who
//! knows the device.
//!
//! Law: a layout returns the same answers as long as a store is open. [`Layout::streams`] and
//! [`Layout::index_stream`] never change: checkpoints record stream positions by number.

mod bucket;
mod cow;
mod log;

use std::collections::BTreeMap;

use draconis_types::lock::Mutex;

use crate::{Error, LayoutKind, LifetimeHint, Result};

/// Properties of a payload that decide its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PayloadKind {
    /// Written by a client.
    Written {
        /// Hint of the object's creator.
        hint: LifetimeHint,
        /// Age of the payload that it replaces, in bytes written since. None if that is not in
        /// memory or does not exist, or if [`Layout::separates_by_age`] is false.
        replaced_after: Option<u64>,
    },
    /// Moved by the cleaner.
    Moved {
        /// Bytes written since the payload was.
        age: u64,
    },
    /// A node of the tree.
    Node,
    /// A chunk of a run or checkpoint: the next ones replace it.
    ShortLived,
}

impl PayloadKind {
    /// One of each kind that a layout may distinguish.
    const SAMPLE_KINDS: [Self; 8] = [
        Self::Written { hint: LifetimeHint::Unknown, replaced_after: None },
        Self::Written { hint: LifetimeHint::Unknown, replaced_after: Some(0) },
        Self::Written { hint: LifetimeHint::Hot, replaced_after: Some(u64::MAX) },
        Self::Written { hint: LifetimeHint::Cold, replaced_after: None },
        Self::Moved { age: 0 },
        Self::Moved { age: u64::MAX },
        Self::Node,
        Self::ShortLived,
    ];
}

/// Sizes of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoreDimensions {
    /// Unit of writes, in bytes.
    pub page_bytes: u32,
    /// Length of a segment, in bytes: at least four pages.
    pub segment_bytes: u32,
    /// Bytes of all segments.
    pub capacity_bytes: u64,
}

impl StoreDimensions {
    /// Returns `bytes`, but at most the `part`th part of a segment.
    pub fn cap_to_segment_part(&self, bytes: usize, part: usize) -> usize {
        bytes.min((self.segment_bytes as usize).checked_div(part).unwrap_or(0))
    }

    /// Returns a 512th of `capacity_bytes`, within what recovery may read. Dead bytes become free
    /// only after a checkpoint, so this much more is reserved.
    pub fn log_bytes(&self, capacity_bytes: u64, most: u64) -> u64 {
        (capacity_bytes / 512).max(u64::from(self.segment_bytes) / 2).min(most)
    }
}

/// Choices of a layout. The defaults suit devices without seek costs, with few and long requests,
/// and data of unknown lifetime.
pub trait Layout: Send + Sync {
    /// Returns the sizes that the layout was made for.
    fn dimensions(&self) -> &StoreDimensions;

    /// Returns the number of segments that are filled at a time, at most 16.
    fn streams(&self) -> usize {
        3
    }

    /// Returns the stream of a payload. Small, awaited commits (`is_trickle`) should use one
    /// stream: each further stream adds a write to the wait.
    fn stream_of(&self, kind: PayloadKind, is_trickle: bool) -> usize {
        match kind {
            _ if is_trickle && !matches!(kind, PayloadKind::Moved { .. }) => 0,
            PayloadKind::Written { .. } => 0,
            // Bytes that survived until their segment was cleaned are older than new ones: kept
            // apart, they stay together.
            PayloadKind::Moved { .. } => 1,
            // A merge replaces nearly all nodes, so whole segments become free. Among payloads,
            // each dead node would cost moving its neighbours.
            PayloadKind::Node | PayloadKind::ShortLived => 2,
        }
    }

    /// Returns the stream of nodes and runs; only a trickle mixes it.
    fn index_stream(&self) -> usize {
        2
    }

    /// Returns true if the age of replaced payloads affects placement; the store then looks it up.
    fn separates_by_age(&self) -> bool {
        false
    }

    /// Returns the longest frame, in bytes, which is one request. At most a segment.
    fn frame_bytes(&self) -> usize {
        self.dimensions().cap_to_segment_part(4 << 20, 1)
    }

    /// Returns true if items of a page or more begin on a page boundary, so that a read needs no
    /// extra page.
    fn is_page_aligned(&self) -> bool {
        false
    }

    /// Returns the bytes gathered without a waiter before a commit. More bytes waste less space at
    /// the ends of frames. At most the log.
    fn commit_bytes(&self) -> usize {
        crate::codec::to_usize_saturating((16 << 20).min(self.log_bytes() / 2))
    }

    /// Returns the bytes of one read of the cleaner. Its transfer should take several times as long
    /// as a seek.
    fn cleaner_read_bytes(&self) -> usize;

    /// Returns the ratio of segment bytes to live bytes above which the cleaner reads live parts
    /// separately, and not the gaps between them.
    fn sparse_read_ratio(&self) -> u64 {
        16
    }

    /// Returns the number of such reads in flight ahead of use.
    fn cleaner_reads_ahead(&self) -> usize;

    /// Returns the bytes of one read of a stream's log at open.
    fn log_read_bytes(&self) -> usize {
        1 << 20
    }

    /// Returns the target size of a node, in bytes, at most an eighth of a segment. A lookup reads
    /// one or two nodes; each changed one is written whole.
    fn node_bytes(&self) -> usize;

    /// Returns the longest chunk of a run or a table, in bytes, at most an eighth of a segment:
    /// opening a store reads each separately.
    fn chunk_bytes(&self) -> usize {
        self.dimensions().cap_to_segment_part(1 << 20, 8)
    }

    /// Returns the bytes of log after which a checkpoint is due, from 4 KiB to 40 MiB. Opening
    /// reads as much, and as much is reserved. See [`StoreDimensions::log_bytes`].
    fn log_bytes(&self) -> u64 {
        self.dimensions().log_bytes(self.dimensions().capacity_bytes, 24 << 20)
    }

    /// Returns the benefit of cleaning a segment of `len` bytes with `used` live ones, written
    /// `age` bytes ago on average. It must not fall as live bytes do.
    fn cleaning_benefit(&self, used: u64, len: u64, age: u64) -> f64 {
        // Cost-benefit (Rosenblum and Ousterhout, section 3.5): the gain, and its duration, over
        // the bytes read and written. Only the root of the age: with placement by lifetime it says
        // less, and measured 1.8 against 1.9.
        let u = used as f64 / len as f64;
        (1.0 - u) * (age as f64).sqrt() / (1.0 + u)
    }
}

/// Constructor of a layout.
pub type LayoutConstructor = fn(&StoreDimensions) -> Box<dyn Layout>;

/// Numbers below this are layouts of this crate.
const FIRST_CUSTOM_LAYOUT_NUMBER: u16 = 256;
const MAX_STREAM_COUNT: usize = 16;

static REGISTERED_LAYOUTS: Mutex<BTreeMap<u16, LayoutConstructor>> = Mutex::new(BTreeMap::new());

/// Registers a layout in this process by a number, 256 or more. It replaces a layout with the same
/// number.
///
/// # Errors
/// [`Error::Misuse`] for the numbers of this crate.
pub fn register_layout(number: u16, make: LayoutConstructor) -> Result<LayoutKind> {
    if number < FIRST_CUSTOM_LAYOUT_NUMBER {
        return Err(Error::Misuse("layouts of others have numbers from 256 on"));
    }
    REGISTERED_LAYOUTS.lock().insert(number, make);
    Ok(LayoutKind::Other(number))
}

/// Returns the number of a layout on the disk.
pub(crate) fn layout_number(kind: LayoutKind) -> u32 {
    match kind {
        LayoutKind::Log => 1,
        LayoutKind::Cow => 2,
        LayoutKind::Bucket => 3,
        LayoutKind::Other(number) => number.into(),
    }
}

/// Returns the layout of a number on the disk.
pub(crate) fn layout_kind_of(number: u32) -> Option<LayoutKind> {
    match number {
        1 => Some(LayoutKind::Log),
        2 => Some(LayoutKind::Cow),
        3 => Some(LayoutKind::Bucket),
        _ => {
            let number = u16::try_from(number).ok()?;
            (number >= FIRST_CUSTOM_LAYOUT_NUMBER).then_some(LayoutKind::Other(number))
        }
    }
}

/// Returns the layout for a store of these sizes.
///
/// # Errors
/// [`Error::NotAStore`] if it is not registered, [`Error::Misuse`] if its sizes do not fit.
pub(crate) fn construct_layout(
    kind: LayoutKind,
    site: &StoreDimensions,
) -> Result<Box<dyn Layout>> {
    let site = *site;
    let layout: Box<dyn Layout> = match kind {
        LayoutKind::Log => Box::new(log::LogLayout(site)),
        LayoutKind::Cow => Box::new(cow::CowLayout(site)),
        LayoutKind::Bucket => Box::new(bucket::BucketLayout(site)),
        LayoutKind::Other(number) => {
            let make = REGISTERED_LAYOUTS.lock().get(&number).copied();
            let make = make.ok_or_else(|| {
                Error::NotAStore(format!("its layout, number {number}, is not one of this program"))
            })?;
            let layout = make(&site);
            check_layout_sizes(&*layout).map_err(Error::Misuse)?;
            layout
        }
    };
    Ok(layout)
}

/// Checks that a layout's answers fit each other and its sizes.
pub(crate) fn check_layout_sizes(layout: &dyn Layout) -> std::result::Result<(), &'static str> {
    let site = layout.dimensions();
    let (page, segment) = (site.page_bytes as usize, site.segment_bytes as usize);
    let streams = layout.streams();
    let is_stream = |kind: PayloadKind| {
        [false, true].iter().all(|trickle| layout.stream_of(kind, *trickle) < streams)
    };
    let log = layout.log_bytes();
    let all = [
        ((1..=MAX_STREAM_COUNT).contains(&streams), "a layout has 1 to 16 streams"),
        (layout.index_stream() < streams, "the layout's index is in no stream of it"),
        (
            PayloadKind::SAMPLE_KINDS.into_iter().all(is_stream),
            "the layout names a stream that it has not",
        ),
        ((page..=segment).contains(&layout.frame_bytes()), "a frame has a page to a segment"),
        ((4096..=40 << 20).contains(&log), "the log of a layout has 4 KiB to 40 MiB"),
        ((1..=log).contains(&(layout.commit_bytes() as u64)), "a commit is at most the log"),
        ((512..=segment / 8).contains(&layout.node_bytes()), "a node is at most an 8th segment"),
        ((512..=segment / 8).contains(&layout.chunk_bytes()), "a chunk is at most an 8th segment"),
        (layout.cleaner_read_bytes() >= page, "the cleaner reads a page at least"),
        (layout.log_read_bytes() >= page, "the log is read by pages"),
        (layout.cleaner_reads_ahead() <= 64, "the cleaner asks for 64 reads ahead at most"),
    ];
    all.into_iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, what)| Err(what))
}
