//! Adaptive busy-polling before sleep.
//!
//! Waking a sleeper costs microseconds on one CPU and tens of microseconds on an idle second one.
//! Reading a mailbox that the peer is about to write costs a quarter of a microsecond. So a
//! receiver polls first. A hit doubles the poll budget, a miss halves it, and every
//! [`MISSES_BEFORE_RETRY`] misses the full budget is tried again.

/// Maximum polls: some tens of microseconds, longer than it takes to wake the peer. Otherwise both
/// sides would sleep between any two messages once they had begun to. None under loom, which tries
/// all interleavings.
const MAX_SPINS: u32 = if cfg!(loom) { 0 } else { 2048 };
/// Minimum polls.
const MIN_SPINS: u32 = if cfg!(loom) { 0 } else { 2 };
/// Number of misses after which the full budget is tried.
const MISSES_BEFORE_RETRY: u32 = 1024;

/// Poll budget of one receiver.
#[derive(Debug)]
pub(super) struct SpinBudget {
    spins: u32,
    misses: u32,
}

impl Default for SpinBudget {
    fn default() -> Self {
        Self { spins: MAX_SPINS, misses: 0 }
    }
}

impl SpinBudget {
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// Polls until `there` returns true; returns false once the budget is used up.
    pub(super) fn spin_until(&mut self, mut condition: impl FnMut() -> bool) -> bool {
        for _ in 0..self.spins {
            if condition() {
                self.spins = (self.spins * 2).min(MAX_SPINS);
                return true;
            }
            std::hint::spin_loop();
        }
        self.misses = self.misses.wrapping_add(1);
        let retry = self.misses.is_multiple_of(MISSES_BEFORE_RETRY);
        self.spins = if retry { MAX_SPINS } else { (self.spins / 2).max(MIN_SPINS) };
        false
    }
}
