//! Where tests make a store smaller, or worse, than it is.
//!
//! Without the feature `torture` everything here is a constant. With it each thread has
//! settings of its own: a store does all its work in the threads of those who call it.

/// Something that a store does, and that its promises need. Left out, the campaign fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InjectedFault {
    /// Waiting for the disk before an answer says that a group is durable.
    Flush,
    /// A checkpoint is durable before a superblock leads to it.
    SuperblockAfterFrames,
    /// Old commits are durable before frames say so.
    Barrier,
    /// A checkpoint is durable before the segments are used again that it does without.
    FreeAfterCheckpoint,
    /// Commits count only as long as none is missing.
    NoGaps,
    /// A commit counts only if all its frames are there.
    WholeCommits,
    /// Payloads are verified where the log may have holes.
    VerifiedReplay,
    /// A store that is opened again does not take old frames for its own.
    Incarnation,
    /// What an older store is found by is gone before a new one is made over it.
    Wipe,
    /// What a frame's header says of the commits before it.
    DurableMark,
    /// What is given up of an object over another does not show that one's bytes.
    ForkZeros,
    /// The sum of a frame's header and table.
    FrameSum,
    /// The sums of payloads.
    PayloadSum,
    /// The sums of nodes, runs and checkpoints.
    NodeSum,
    /// The sum of a superblock.
    SuperblockSum,
    /// All sums: what reads the disk must bear anything.
    Sums,
}

impl InjectedFault {
    fn is_sum(self) -> bool {
        matches!(self, Self::FrameSum | Self::PayloadSum | Self::NodeSum | Self::SuperblockSum)
    }
}

/// How a thread's stores differ from others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(not(feature = "torture"), allow(dead_code))]
pub struct Settings {
    /// A commit is handed over when it has so many bytes, if the layout does not want it
    /// sooner.
    pub commit_bytes: usize,
    /// Bytes of log after which the disk is asked to flush.
    pub barrier_bytes: u64,
    /// What is left out.
    pub fault: Option<InjectedFault>,
}

impl Settings {
    /// As stores are.
    pub const USUAL: Self = Self { commit_bytes: usize::MAX, barrier_bytes: 32 << 20, fault: None };
}

#[cfg(feature = "torture")]
mod set {
    use std::cell::Cell;

    use super::Settings;

    thread_local! {
        static SETTINGS: Cell<Settings> = const { Cell::new(Settings::USUAL) };
    }

    /// How stores are from now on in this thread.
    pub fn set(settings: Settings) {
        SETTINGS.set(settings);
    }

    pub(crate) fn settings() -> Settings {
        SETTINGS.get()
    }
}

#[cfg(not(feature = "torture"))]
mod set {
    pub(crate) const fn settings() -> super::Settings {
        super::Settings::USUAL
    }
}

#[cfg(feature = "torture")]
pub use set::set;

/// A commit is handed over when it has so many bytes, if not sooner.
#[inline]
pub(crate) fn commit_bytes() -> usize {
    set::settings().commit_bytes
}

/// Bytes of log after which the disk is asked to flush, with or without a waiter: so much may have
/// holes after a power cut, and is verified then.
#[inline]
pub(crate) fn barrier_bytes() -> u64 {
    set::settings().barrier_bytes
}

/// Whether a test leaves this out.
#[inline]
pub(crate) fn is_fault_injected(what: InjectedFault) -> bool {
    cfg!(feature = "torture")
        && set::settings()
            .fault
            .is_some_and(|it| it == what || it == InjectedFault::Sums && what.is_sum())
}
