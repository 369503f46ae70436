//! Interface of a timing model.

use draconis_device::Extent;

/// Type of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RequestKind {
    /// Read an extent.
    Read,
    /// Write an extent: complete when cached, if the device has a cache with free space.
    Write,
    /// Make all completed writes durable.
    Flush,
    /// Discard an extent.
    Discard,
}

/// A request to a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SimRequest {
    /// Identifier in its completion; ascends.
    pub id: u64,
    /// Type.
    pub kind: RequestKind,
    /// Range; empty for a flush.
    pub at: Extent,
}

/// A completed request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Completion {
    /// Time, in virtual ns.
    pub at_ns: u64,
    /// Identifier of the request.
    pub id: u64,
}

/// Properties of a modelled device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceModel {
    /// Length in bytes, a multiple of 4096.
    pub len_bytes: u64,
    /// True if seeks cost time.
    pub rotational: bool,
    /// True if a completed write may be lost before the next flush.
    pub volatile_cache: bool,
    /// Maximum requests in the device; more wait outside.
    pub depth: usize,
    /// Request size beyond which throughput hardly grows, in bytes.
    pub best_io_bytes: u32,
    /// True if [`RequestKind::Discard`] has an effect.
    pub discards: bool,
}

/// Work of a device since its creation.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct WorkCounters {
    /// Number of head movements to another track at the start of a request.
    pub seeks: u64,
    /// Bytes programmed to flash, moved ones included; for a hard disk, bytes written to the
    /// platters.
    pub programmed_bytes: u64,
    /// Of those, bytes that garbage collection moved.
    pub moved_bytes: u64,
    /// Number of erased blocks, counted for each die.
    pub erases: u64,
    /// Time in which the mechanics, or the busiest die, had work, in ns.
    pub busy_ns: u64,
}

/// Timing of a device: a deterministic simulation that its caller drives.
///
/// ```text
///   take(now, request)*   next_ns() ──▶ advance(next_ns) ──▶ completions   take(now, ..)
/// ```
///
/// Law 1: times never go back, and [`DeviceTiming::submit`] is called only at a time to which the device
/// was advanced.
/// Law 2: every request completes once, after finitely many steps.
pub trait DeviceTiming: Send + std::fmt::Debug {
    /// Returns the properties of the device.
    fn model(&self) -> DeviceModel;

    /// Queues a request at `now_ns`.
    fn submit(&mut self, now_ns: u64, request: SimRequest);

    /// Returns the time of the next internal event if no further request comes.
    fn next_event_ns(&self) -> Option<u64>;

    /// Processes all events up to and including `to_ns`; appends the completions.
    fn advance(&mut self, to_ns: u64, done: &mut Vec<Completion>);

    /// Cuts the power at `now_ns` and restores it: queue and volatile caches are empty.
    fn power_cut(&mut self, now_ns: u64);

    /// Returns the work so far.
    fn work_counters(&self) -> WorkCounters;

    /// Returns a copy in the same condition.
    fn clone_boxed(&self) -> Box<dyn DeviceTiming>;
}
