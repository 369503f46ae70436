//! Test hooks: smaller limits and injected faults.
//!
//! Without the feature `test-hooks` everything here is constant. With it, each thread has its own
//! settings: a store does all its work in the threads of its callers.

/// A step that the guarantees need. If a test omits it, the campaign must fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InjectedFault {
    /// Wait for the disk before a group is reported as durable.
    Flush,
    /// Flush a checkpoint before its superblock.
    SuperblockAfterFrames,
    /// Flush old commits before frames declare them durable.
    Barrier,
    /// Flush a checkpoint before the segments that it frees are reused.
    FreeAfterCheckpoint,
    /// Ignore commits after a missing one.
    NoGaps,
    /// Ignore a commit with missing frames.
    WholeCommits,
    /// Verify payloads where the log may have holes.
    VerifiedReplay,
    /// Change the incarnation at each opening, so that old frames are ignored.
    Incarnation,
    /// Erase the superblocks of an older store before a new one is created.
    Wipe,
    /// The declaration of durable commits in frame headers.
    DurableMark,
    /// Hide the parent's bytes in freed ranges of a child.
    ForkZeros,
    /// The checksum of a frame's header and summary.
    FrameSum,
    /// The checksums of payloads.
    PayloadSum,
    /// The checksums of nodes, runs and checkpoints.
    NodeSum,
    /// The checksum of a superblock.
    SuperblockSum,
    /// All checksums: decoders must survive any bytes.
    Sums,
}

impl InjectedFault {
    fn is_checksum_fault(self) -> bool {
        matches!(self, Self::FrameSum | Self::PayloadSum | Self::NodeSum | Self::SuperblockSum)
    }
}

/// Settings of the stores of a thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(not(feature = "test-hooks"), allow(dead_code))]
pub struct TestSettings {
    /// Bytes at which a commit is submitted, if the layout does not want it sooner.
    pub commit_bytes: usize,
    /// Bytes of log after which the disk is flushed.
    pub barrier_bytes: u64,
    /// Omitted step.
    pub fault: Option<InjectedFault>,
}

impl TestSettings {
    /// Settings without changes.
    pub const NORMAL: Self =
        Self { commit_bytes: usize::MAX, barrier_bytes: 32 << 20, fault: None };
}

#[cfg(feature = "test-hooks")]
mod set {
    use std::cell::Cell;

    use super::TestSettings;

    thread_local! {
        static SETTINGS: Cell<TestSettings> = const { Cell::new(TestSettings::NORMAL) };
    }

    /// Sets the settings of this thread.
    pub fn set_thread_settings(settings: TestSettings) {
        SETTINGS.set(settings);
    }

    pub(crate) fn settings() -> TestSettings {
        SETTINGS.get()
    }
}

#[cfg(not(feature = "test-hooks"))]
mod set {
    pub(crate) const fn settings() -> super::TestSettings {
        super::TestSettings::NORMAL
    }
}

#[cfg(feature = "test-hooks")]
pub use set::set_thread_settings;

/// Returns the bytes at which a commit is submitted, if not sooner.
#[inline]
pub(crate) fn commit_bytes() -> usize {
    set::settings().commit_bytes
}

/// Returns the bytes of log after which the disk is flushed, even without a waiter. So many bytes
/// may have holes after a power cut, and are verified then.
#[inline]
pub(crate) fn barrier_bytes() -> u64 {
    set::settings().barrier_bytes
}

/// Returns true if a test omits this step.
#[inline]
pub(crate) fn is_fault_injected(what: InjectedFault) -> bool {
    cfg!(feature = "test-hooks")
        && set::settings()
            .fault
            .is_some_and(|it| it == what || it == InjectedFault::Sums && what.is_checksum_fault())
}
