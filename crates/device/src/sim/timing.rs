//! What a model of a device's time must do.

use crate::Extent;

/// What a device is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RequestKind {
    /// Read an extent.
    Read,
    /// Write an extent: done when it is in the cache, if the device has one with room.
    Write,
    /// Make everything durable whose write is done by now.
    Flush,
    /// An extent is no longer needed.
    Discard,
}

/// One request of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The name by which it is said to be done; ascends.
    pub id: u64,
    /// What is asked.
    pub kind: RequestKind,
    /// Where; of a flush nothing.
    pub at: Extent,
}

/// A request that is done.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Completion {
    /// When, in virtual ns.
    pub at_ns: u64,
    /// Which.
    pub id: u64,
}

/// What a modelled device is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Model {
    /// Length in bytes, a multiple of 4096.
    pub len_bytes: u64,
    /// Whether distance costs time.
    pub rotational: bool,
    /// Whether a write that is done may be lost before the next flush.
    pub volatile_cache: bool,
    /// Requests that the device takes at once; more wait outside.
    pub depth: usize,
    /// Size from which larger requests gain nothing much, in bytes.
    pub best_io_bytes: u32,
    /// Whether it does anything about [`RequestKind::Discard`].
    pub discards: bool,
}

/// What a device did, counted from its making.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct WorkCounters {
    /// Times that the head went to another track to begin a request.
    pub seeks: u64,
    /// Bytes that went to flash, moved ones included; of a hard disk, to the platters.
    pub programmed_bytes: u64,
    /// Of those, bytes that garbage collection moved.
    pub moved_bytes: u64,
    /// Erase blocks that were erased, one die's part of each counted for itself.
    pub erases: u64,
    /// Time in which the mechanics, or the busiest die, had work, in ns.
    pub busy_ns: u64,
}

/// How long a device takes: a deterministic simulation that its caller drives.
///
/// ```text
///   take(now, request)*   next_ns() ──▶ advance(next_ns) ──▶ what is done   take(now, ..)
/// ```
///
/// Law 1: times handed in never go back, and [`Timing::take`] is called at a time up to
/// which the device was advanced.
/// Law 2: every request is done once, and after finitely many steps.
pub trait Timing: Send + std::fmt::Debug {
    /// What the device is.
    fn model(&self) -> Model;

    /// Puts a request into the device's queue at `now_ns`.
    fn take(&mut self, now_ns: u64, request: Request);

    /// When something happens next inside the device, if nothing more is asked of it.
    fn next_ns(&self) -> Option<u64>;

    /// Lets everything happen up to and at `to_ns`; appends what is done by that.
    fn advance(&mut self, to_ns: u64, done: &mut Vec<Completion>);

    /// Power is cut at `now_ns` and comes back: queue and volatile caches are empty.
    fn power_cut(&mut self, now_ns: u64);

    /// What it did so far.
    fn work(&self) -> WorkCounters;

    /// A device in the same condition.
    fn fork(&self) -> Box<dyn Timing>;
}
