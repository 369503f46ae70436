//! What a kind of hardware wants: placement, cadence, depth. Everything else is shared.
//!
//! ```text
//!   log   0 what is written   1 what is cleaned   2 nodes, runs
//!   cow   0 what is written in bits   1 hot, runs   2 cold   3 what is cleaned   4 nodes
//!   bucket   as log
//! ```
//!
//! A store is segments. Some of them are open, one for each *stream*; what is written goes to the
//! stream that the layout says, in *frames* that describe themselves. A commit is the frames of
//! all streams that have something, given to the disk together. Segments that have little alive
//! are cleaned: what is alive of them is written again. Now and then a checkpoint is due; opening
//! a store reads what came behind the last one.
//!
//! A layout says where and how much, never what: it sees no byte, and a store reads and promises
//! the same with any of them. So one that chooses badly is slow, and not wrong. To write one for a
//! device that you know:
//!
//! 1. implement [`Layout`]: four questions have no default;
//! 2. [`register`] it under a number of your own, which stores that have it say on disk: who opens
//!    them needs it;
//! 3. put it to [`conform::check_all`], and make a store with the [`crate::Profile`] of your device.
//!
//! `examples/zoned.rs` is one, for a device whose zones are written in order.
//!
//! # Who chooses
//!
//! [`crate::probe`] measures a disk and chooses between `log` and `cow` by one rule: where short
//! reads anywhere, or short writes anywhere, cost clearly more than neighbours do, distance costs
//! time, and that is `log`; else it is `cow`. A bucket gets `bucket`, since it is none of both and
//! says so. A layout that is registered is chosen by who makes the store: what it is made for is
//! known, and not to be measured.
//!
//! Law: a layout answers alike as long as a store is open, and [`Layout::streams`] and
//! [`Layout::index_stream`] as long as there is one: where streams stood is read by their number.

mod bucket;
pub mod conform;
mod cow;
mod log;

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::{Error, Hint, LayoutKind, Result};

/// What is known of a payload when its place is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PayloadKind {
    /// Written by a client.
    Written {
        /// What its object's maker said.
        hint: Hint,
        /// Bytes that were written since what it replaces was; none if it replaces
        /// nothing that is in memory, or [`Layout::separates_by_age`] says no.
        replaced_after: Option<u64>,
    },
    /// Moved by the cleaner: so many bytes were written since it was.
    Moved {
        /// Bytes.
        age: u64,
    },
    /// A node of the tree.
    Node,
    /// A part of a run or checkpoint: the next ones replace it.
    ShortLived,
}

impl PayloadKind {
    /// One of each that a layout may tell apart.
    const SAMPLES: [Self; 8] = [
        Self::Written { hint: Hint::Unknown, replaced_after: None },
        Self::Written { hint: Hint::Unknown, replaced_after: Some(0) },
        Self::Written { hint: Hint::Hot, replaced_after: Some(u64::MAX) },
        Self::Written { hint: Hint::Cold, replaced_after: None },
        Self::Moved { age: 0 },
        Self::Moved { age: u64::MAX },
        Self::Node,
        Self::ShortLived,
    ];
}

/// Where a store lies that is to be laid out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoreDimensions {
    /// No write is smaller, in bytes.
    pub page_bytes: u32,
    /// Length of a segment, in bytes: at least four pages.
    pub segment_bytes: u32,
    /// All segments together, in bytes.
    pub capacity_bytes: u64,
}

impl StoreDimensions {
    /// So many bytes, but not more than a part of a segment.
    pub fn at_most(&self, bytes: usize, part: usize) -> usize {
        bytes.min((self.segment_bytes as usize).checked_div(part).unwrap_or(0))
    }

    /// A 512th of `capacity_bytes`, within what recovery may read: what is dead is free only
    /// behind a checkpoint, so that much more is kept free.
    pub fn log_bytes(&self, capacity_bytes: u64, most: u64) -> u64 {
        (capacity_bytes / 512).max(u64::from(self.segment_bytes) / 2).min(most)
    }
}

/// A layout's choices. What has a default is what serves where distance costs nothing, requests
/// are few and long, and nothing is known of how long things live.
pub trait Layout: Send + Sync {
    /// Where the store lies: as it was made for.
    fn site(&self) -> &StoreDimensions;

    /// How many segments are filled at a time, at most 16.
    fn streams(&self) -> usize {
        3
    }

    /// Which of them gets a payload. In a trickle commits are small, and each has a waiter: who
    /// parts them makes it wait for two places.
    fn stream_of(&self, kind: PayloadKind, is_trickle: bool) -> usize {
        match kind {
            _ if is_trickle && !matches!(kind, PayloadKind::Moved { .. }) => 0,
            PayloadKind::Written { .. } => 0,
            // What survived until its segment was cleaned is older than what is written:
            // apart from it, it stays together.
            PayloadKind::Moved { .. } => 1,
            // A merge replaces nearly all: then they leave whole segments behind. Among
            // payloads each hole of theirs costs moving the neighbours.
            PayloadKind::Node | PayloadKind::ShortLived => 2,
        }
    }

    /// Which of them has nodes and runs, and nothing else but in a trickle.
    fn index_stream(&self) -> usize {
        2
    }

    /// Whether the age of what a payload replaces matters to its place: it is looked up then.
    fn separates_by_age(&self) -> bool {
        false
    }

    /// The longest frame, in bytes: what is worth one request. At most a segment.
    fn frame_bytes(&self) -> usize {
        self.site().at_most(4 << 20, 1)
    }

    /// Whether what is as long as a page begins with one: then no more pages than it needs are
    /// read for it.
    fn is_page_aligned(&self) -> bool {
        false
    }

    /// What is gathered of changes without a waiter, in bytes: the more, the less is
    /// lost where frames end. At most the log.
    fn commit_bytes(&self) -> usize {
        crate::codec::to_usize_saturating((16 << 20).min(self.log_bytes() / 2))
    }

    /// What the cleaner reads at once, in bytes: the time that this takes should be some times
    /// that of going there.
    fn read_bytes(&self) -> usize;

    /// The cleaner jumps from one thing that is alive to the next where fewer than one byte
    /// of so many is; else it reads what is between.
    fn sparse_read_ratio(&self) -> u64 {
        16
    }

    /// How many such reads it asks for before it needs them.
    fn reads_ahead(&self) -> usize;

    /// What is read of a stream's log at once when a store is opened, in bytes.
    fn log_read_bytes(&self) -> usize {
        1 << 20
    }

    /// About how long a node is, in bytes, at most an eighth of a segment. A lookup reads one or
    /// two; each that changed is written whole.
    fn node_bytes(&self) -> usize;

    /// The longest part of a run or a table, in bytes, at most an eighth of a segment: opening a
    /// store reads each by itself.
    fn chunk_bytes(&self) -> usize {
        self.site().at_most(1 << 20, 8)
    }

    /// Bytes of log after which a checkpoint is due, from 4 KiB to 40 MiB: opening reads as much,
    /// and so much is kept free. See [`StoreDimensions::log_bytes`].
    fn log_bytes(&self) -> u64 {
        self.site().log_bytes(self.site().capacity_bytes, 24 << 20)
    }

    /// The worth of cleaning a segment: `used` of its bytes are alive, of `len`; what is
    /// in it was written `age` bytes ago, on average. Not less where less is alive.
    fn cleaning_benefit(&self, used: u64, len: u64, age: u64) -> f64 {
        // Cost-benefit (Rosenblum and Ousterhout, section 3.5): what is gained, and for how
        // long, over what is read and written again. Of the age only the root: where what
        // dies together lies together it says less, and measured 1.8 against 1.9.
        let u = used as f64 / len as f64;
        (1.0 - u) * (age as f64).sqrt() / (1.0 + u)
    }
}

/// Makes a layout for a store.
pub type Make = fn(&StoreDimensions) -> Box<dyn Layout>;

/// Numbers below this are layouts of this crate.
const FIRST_OF_OTHERS: u16 = 256;
const STREAMS_MAX: usize = 16;

static OTHERS: Mutex<BTreeMap<u16, Make>> = Mutex::new(BTreeMap::new());

/// Has stores of this program know a layout by a number, 256 or more, from now on. What had that
/// number is forgotten.
///
/// # Errors
/// [`Error::Misuse`] for numbers of this crate's own.
pub fn register(number: u16, make: Make) -> Result<LayoutKind> {
    if number < FIRST_OF_OTHERS {
        return Err(Error::Misuse("layouts of others have numbers from 256 on"));
    }
    OTHERS.lock().insert(number, make);
    Ok(LayoutKind::Other(number))
}

/// What stores say on disk of their layout.
pub(crate) fn number_of(kind: LayoutKind) -> u32 {
    match kind {
        LayoutKind::Log => 1,
        LayoutKind::Cow => 2,
        LayoutKind::Bucket => 3,
        LayoutKind::Other(number) => number.into(),
    }
}

/// The layout that a store says it has.
pub(crate) fn kind_of(number: u32) -> Option<LayoutKind> {
    match number {
        1 => Some(LayoutKind::Log),
        2 => Some(LayoutKind::Cow),
        3 => Some(LayoutKind::Bucket),
        _ => {
            let number = u16::try_from(number).ok()?;
            (number >= FIRST_OF_OTHERS).then_some(LayoutKind::Other(number))
        }
    }
}

/// The layout for a store at a site.
///
/// # Errors
/// [`Error::NotAStore`] where it was not registered, [`Error::Misuse`] where its sizes do not fit.
pub(crate) fn layout(kind: LayoutKind, site: &StoreDimensions) -> Result<Box<dyn Layout>> {
    let site = *site;
    let layout: Box<dyn Layout> = match kind {
        LayoutKind::Log => Box::new(log::Log(site)),
        LayoutKind::Cow => Box::new(cow::Cow(site)),
        LayoutKind::Bucket => Box::new(bucket::Bucket(site)),
        LayoutKind::Other(number) => {
            let make = OTHERS.lock().get(&number).copied();
            let make = make.ok_or_else(|| {
                Error::NotAStore(format!("its layout, number {number}, is not one of this program"))
            })?;
            let layout = make(&site);
            fits(&*layout).map_err(Error::Misuse)?;
            layout
        }
    };
    Ok(layout)
}

/// Whether a layout's answers fit each other and its site; else which does not.
fn fits(layout: &dyn Layout) -> std::result::Result<(), &'static str> {
    let site = layout.site();
    let (page, segment) = (site.page_bytes as usize, site.segment_bytes as usize);
    let streams = layout.streams();
    let is_stream = |kind: PayloadKind| {
        [false, true].iter().all(|trickle| layout.stream_of(kind, *trickle) < streams)
    };
    let log = layout.log_bytes();
    let all = [
        ((1..=STREAMS_MAX).contains(&streams), "a layout has 1 to 16 streams"),
        (layout.index_stream() < streams, "the layout's index is in no stream of it"),
        (
            PayloadKind::SAMPLES.into_iter().all(is_stream),
            "the layout names a stream that it has not",
        ),
        ((page..=segment).contains(&layout.frame_bytes()), "a frame has a page to a segment"),
        ((4096..=40 << 20).contains(&log), "the log of a layout has 4 KiB to 40 MiB"),
        ((1..=log).contains(&(layout.commit_bytes() as u64)), "a commit is at most the log"),
        ((512..=segment / 8).contains(&layout.node_bytes()), "a node is at most an 8th segment"),
        ((512..=segment / 8).contains(&layout.chunk_bytes()), "a chunk is at most an 8th segment"),
        (layout.read_bytes() >= page, "the cleaner reads a page at least"),
        (layout.log_read_bytes() >= page, "the log is read by pages"),
        (layout.reads_ahead() <= 64, "the cleaner asks for 64 reads ahead at most"),
    ];
    all.into_iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, what)| Err(what))
}
